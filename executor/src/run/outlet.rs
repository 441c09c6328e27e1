//! Outlets: output of commands, on its way to the client, under credit.

use std::{
    io::{self, ErrorKind},
    os::fd::AsFd as _,
    sync::{Arc, Mutex},
};

use bytes::{Bytes, BytesMut};
use nix::libc;
use posh_proto::executor::{Chunk, run_output};
use tokio::{net::unix::pipe, sync::Notify};

use super::{
    ClientQueue, Traffic, broken::BrokenStream, outbox::KEPT_CHUNK_BYTES, output_of, pace::Pace,
};

/// The first chunks are small, so that a first byte is not kept waiting behind
/// many; a busy stream grows to large ones, which cost less per byte.
const FIRST_CHUNK_BYTES: usize = 16 << 10;
const LARGEST_CHUNK_BYTES: usize = 256 << 10;

/// Credit of an outlet, and its close by the client.
pub struct Gate {
    state: Mutex<OutletState>,
    changed: Notify,
}

struct OutletState {
    credit_bytes: u64,
    /// Credit in addition to the first.
    given_bytes: u64,
    is_closed: bool,
}

impl Gate {
    pub fn new(credit_bytes: u64) -> Self {
        Self {
            state: Mutex::new(OutletState { credit_bytes, given_bytes: 0, is_closed: false }),
            changed: Notify::new(),
        }
    }

    /// Adds credit.
    pub fn add(&self, bytes: u64) {
        let mut state = self.state.lock().expect("not poisoned");
        state.credit_bytes = state.credit_bytes.saturating_add(bytes);
        state.given_bytes = state.given_bytes.saturating_add(bytes);
        self.changed.notify_one();
    }

    /// Like `add`, with the sum of all credit so far.
    pub fn add_up_to(&self, bytes: u64) {
        let given = self.state.lock().expect("not poisoned").given_bytes;
        self.add(bytes.saturating_sub(given));
    }

    /// The client wants no more.
    pub fn close(&self) {
        self.state.lock().expect("not poisoned").is_closed = true;
        self.changed.notify_one();
    }

    fn spend(&self, bytes: usize) {
        self.state.lock().expect("not poisoned").credit_bytes -= bytes as u64;
    }

    /// Waits for credit, and returns it; `None` once closed.
    async fn credit(&self) -> Option<usize> {
        self.wait(|state| state.credit_bytes > 0).await
    }

    async fn closed(&self) {
        self.wait(|_| false).await;
    }

    async fn wait(&self, is_enough: impl Fn(&OutletState) -> bool) -> Option<usize> {
        loop {
            {
                let state = self.state.lock().expect("not poisoned");
                if state.is_closed {
                    return None;
                }
                if is_enough(&state) {
                    return Some(usize::try_from(state.credit_bytes).unwrap_or(usize::MAX));
                }
            }
            // `Notify` keeps a notification that comes between the check and this.
            self.changed.notified().await;
        }
    }
}

/// Sends the sources one after the other, then the stream's end. When the client closes the stream,
/// all sources close at once, and writers get SIGPIPE. Bytes that they had written by then and
/// nobody read are sent once more, out of credit: the client knows since when there was no reader,
/// and that the writer must learn of it.
///
/// # Errors
/// A source can't be read to its end, and the stream is not whole.
pub async fn drain(
    stream: u32,
    sources: Vec<Arc<pipe::Receiver>>,
    gate: Arc<Gate>,
    output: ClientQueue,
    traffic: Arc<Traffic>,
) -> Result<(), BrokenStream> {
    match send(stream, &sources, &gate, &output, &traffic).await {
        SendingEnd::Sources => {
            traffic.ended(stream);
            let _ = output.send(Ok(output_of(run_output::Kind::End(stream)))).await;
        }
        SendingEnd::Closed => {
            let mut rest = [0; FIRST_CHUNK_BYTES];
            for source in sources {
                // Asks the kernel: the runtime may not know yet that the pipe is readable.
                if let Ok(count @ 1..) = nix::unistd::read(source.as_fd(), &mut rest) {
                    let data = Bytes::copy_from_slice(&rest[..count]);
                    let _ = output
                        .send(Ok(output_of(run_output::Kind::Chunk(Chunk { stream, data }))))
                        .await;
                }
            }
        }
        SendingEnd::Broken(error) => {
            return Err(BrokenStream::Output(error));
        }
        SendingEnd::Lost => {}
    }
    Ok(())
}

/// Reason why sending has ended.
enum SendingEnd {
    /// The sources are at their end.
    Sources,
    /// The client closed the stream.
    Closed,
    /// A source failed before its end.
    Broken(io::Error),
    /// The client is gone.
    Lost,
}

async fn send(
    stream: u32,
    sources: &[Arc<pipe::Receiver>],
    gate: &Gate,
    output: &ClientQueue,
    traffic: &Traffic,
) -> SendingEnd {
    let largest = if output.keeps() { KEPT_CHUNK_BYTES } else { LARGEST_CHUNK_BYTES };
    let mut buffer = Buffer { bytes: BytesMut::new(), chunk_bytes: FIRST_CHUNK_BYTES, largest };
    let mut pace = Pace::new();
    for source in sources {
        loop {
            let Some(credit) = gate.credit().await else { return SendingEnd::Closed };
            let data = tokio::select! {
                () = gate.closed() => return SendingEnd::Closed,
                data = buffer.read(source, credit) => data,
            };
            let (data, is_emptied) = match data {
                Ok(Some(data)) => data,
                Ok(None) => break,
                Err(error) => return SendingEnd::Broken(error),
            };
            let count = data.len();
            gate.spend(count);
            traffic.sent(stream, count);
            if output
                .send(Ok(output_of(run_output::Kind::Chunk(Chunk { stream, data }))))
                .await
                .is_err()
            {
                return SendingEnd::Lost;
            }
            pace.after_read(count, is_emptied).await;
        }
    }
    SendingEnd::Sources
}

/// Memory for chunks; small ones share an allocation.
struct Buffer {
    bytes: BytesMut,
    chunk_bytes: usize,
    largest: usize,
}

impl Buffer {
    /// The next bytes, and true if they emptied the source; `None` at the end.
    async fn read(
        &mut self,
        source: &pipe::Receiver,
        limit: usize,
    ) -> io::Result<Option<(Bytes, bool)>> {
        let mut is_hung_up = false;
        loop {
            source.readable().await?;
            let wanted = self.chunk_bytes.min(limit);
            if self.bytes.capacity() < wanted {
                self.bytes.reserve(self.chunk_bytes);
            }
            let mut space = bytes::BufMut::limit(&mut self.bytes, wanted);
            match source.try_read_buf(&mut space) {
                Ok(0) => return Ok(None),
                Ok(count) => {
                    self.adapt(count);
                    return Ok(Some((self.bytes.split().freeze(), count < wanted)));
                }
                Err(error)
                    if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
                // The other side of a pty is closed. The kernel checks for bytes first and for the
                // other side then: bytes written in between are found by a second read.
                Err(error) if error.raw_os_error() == Some(libc::EIO) => match is_hung_up {
                    true => return Ok(None),
                    false => is_hung_up = true,
                },
                Err(error) => return Err(error),
            }
        }
    }

    fn adapt(&mut self, count: usize) {
        let next = if count >= self.chunk_bytes {
            self.chunk_bytes * 2
        } else {
            count.next_power_of_two() * 2
        };
        self.chunk_bytes = next.clamp(FIRST_CHUNK_BYTES, self.largest);
    }
}

#[cfg(test)]
mod tests {
    use std::{io::Write as _, os::unix::net::UnixStream};

    use super::*;
    use crate::run::outbox::Outbox;

    #[tokio::test]
    async fn a_source_that_fails_is_not_taken_for_one_that_ended() {
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        // Closing a socket with unread data is a reset (unix(7)).
        ours.write_all(b"unread").unwrap();
        drop(theirs);
        let source = Arc::new(pipe::Receiver::from_owned_fd_unchecked(ours.into()).unwrap());
        let gate = Arc::new(Gate::new(1 << 20));
        let ended = drain(
            1,
            vec![source],
            gate,
            Outbox::kept(Arc::new(tokio::sync::Semaphore::new(1 << 20))),
            Arc::new(Traffic::new(None)),
        )
        .await;
        assert!(ended.unwrap_err().to_string().contains("cannot read a command's output"));
    }
}
