//! Inlets: input from the client, on its way into a command's pipe.

use std::{
    io::ErrorKind,
    sync::{Arc, Mutex},
};

use bytes::{Buf as _, BytesMut};
use posh_proto::executor::{Credit, run_output};
use tokio::{io::Interest, net::unix::pipe, sync::Notify};

use super::{ClientQueue, Traffic, broken::InletViolation, output_of};

/// Bytes that the client may send before the command reads them: as much as the pipe holds, so that
/// neither waits for a round trip while the other works.
pub const WINDOW_BYTES: usize = 1 << 20;

/// Credit is returned in steps of at least this, or when nothing is left: one small message for
/// many bytes.
const CREDIT_STEP_BYTES: usize = 128 << 10;

/// Input that has arrived and is not written yet: at most [`WINDOW_BYTES`].
#[derive(Default)]
pub struct Inlet {
    state: Mutex<InletState>,
    changed: Notify,
}

#[derive(Default)]
struct InletState {
    arrived: BytesMut,
    /// Bytes that the client has sent and not got back as credit.
    outstanding_bytes: usize,
    is_ended: bool,
    is_closed: bool,
}

impl Inlet {
    /// Keeps `data` for the command, which may have stopped reading; an
    /// error if the client had no credit for it.
    pub fn push(&self, data: &[u8]) -> Result<(), InletViolation> {
        let mut state = self.state.lock().expect("not poisoned");
        if state.is_closed {
            return Ok(());
        }
        if state.is_ended {
            return Err(InletViolation::AfterEnd);
        }
        state.outstanding_bytes += data.len();
        if state.outstanding_bytes > WINDOW_BYTES {
            return Err(InletViolation::Credit { credit_bytes: WINDOW_BYTES });
        }
        state.arrived.extend_from_slice(data);
        self.changed.notify_one();
        Ok(())
    }

    /// The client has closed the inlet.
    pub fn end(&self) {
        self.state.lock().expect("not poisoned").is_ended = true;
        self.changed.notify_one();
    }

    /// Returns true if the client has no more input to send.
    pub fn is_ended(&self) -> bool {
        let state = self.state.lock().expect("not poisoned");
        state.is_ended || state.is_closed
    }

    /// Waits for bytes; `None` at the end.
    async fn take(&self) -> Option<BytesMut> {
        loop {
            {
                let mut state = self.state.lock().expect("not poisoned");
                if !state.arrived.is_empty() {
                    return Some(std::mem::take(&mut state.arrived));
                }
                if state.is_ended {
                    return None;
                }
            }
            self.changed.notified().await;
        }
    }

    fn give_back(&self, bytes: usize) {
        self.state.lock().expect("not poisoned").outstanding_bytes -= bytes;
    }

    /// The command has stopped reading: further input is dropped.
    fn close(&self) {
        let mut state = self.state.lock().expect("not poisoned");
        state.is_closed = true;
        state.arrived = BytesMut::new();
    }
}

/// Writes input into `target` until its end, or until the pipe has no reader, which is reported to
/// the client at once.
pub async fn feed(
    stream: u32,
    inlet: Arc<Inlet>,
    target: pipe::Sender,
    output: ClientQueue,
    traffic: Arc<Traffic>,
) {
    let credit =
        |bytes: usize| output_of(run_output::Kind::Credit(Credit { stream, bytes: bytes as u64 }));
    if output.send(Ok(credit(WINDOW_BYTES))).await.is_err() {
        return;
    }
    let mut written = 0;
    loop {
        let data = tokio::select! {
            data = inlet.take() => data,
            () = unread(&target) => break,
        };
        // When `target` is dropped, the command reads end of file.
        let Some(mut data) = data else { return };
        while !data.is_empty() {
            let Some(count) = write_some(&target, &data).await else {
                inlet.close();
                let _ = output.send(Ok(output_of(run_output::Kind::Closed(stream)))).await;
                return;
            };
            data.advance(count);
            written += count;
            traffic.received(count);
            if written >= CREDIT_STEP_BYTES || data.is_empty() {
                inlet.give_back(written);
                if output.send(Ok(credit(written))).await.is_err() {
                    return;
                }
                written = 0;
            }
        }
    }
    inlet.close();
    let _ = output.send(Ok(output_of(run_output::Kind::Closed(stream)))).await;
}

/// Completes when the pipe has no reader any more.
pub async fn unread(target: &pipe::Sender) {
    // An error here would mean that the pipe can't be watched; writing will tell.
    if target.ready(Interest::ERROR).await.is_err() {
        std::future::pending::<()>().await;
    }
}

async fn write_some(target: &pipe::Sender, data: &[u8]) -> Option<usize> {
    loop {
        target.writable().await.ok()?;
        match target.try_write(data) {
            Ok(count) => return Some(count),
            Err(error)
                if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
            Err(_) => return None,
        }
    }
}
