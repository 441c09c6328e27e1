//! The daemon's end of a run's socket to its supervisor (see `runner::wire`), and what that supervisor takes of the machine.
//!
//! Invariant: all that a run was admitted with stays taken until its supervisor is gone, however the call ended: what a
//! client gives up is at work until then, and counts as its own.

use std::{
    io::{self, ErrorKind},
    os::fd::{AsFd as _, AsRawFd as _, OwnedFd},
    sync::{Arc, Mutex},
    time::Duration,
};

use bytes::BytesMut;
use posh_proto::{
    executor::{Release, RunInput, RunOutput, Signal, run_input},
    frame,
};
use prost::Message;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _, Interest},
    net::UnixStream,
    runtime::Handle,
};

use crate::{
    load::RunShare,
    pool::Lease,
    runner::wire::{DESCRIPTORS_PER_MESSAGE, Job, send_descriptors},
};

/// Killing and reaping takes milliseconds; a process that a dead disk holds can
/// take for ever, and must not hold us.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);

/// What a run was admitted with: its share of the machine.
pub struct Admitted(Mutex<RunShare>);

impl Admitted {
    pub fn new(share: RunShare) -> Self {
        Self(Mutex::new(share))
    }

    /// Gives back what was for its beginning alone.
    pub fn has_begun(&self, own_descriptors: usize, specification_bytes: usize) {
        self.0.lock().expect("not poisoned").has_begun(own_descriptors, specification_bytes);
    }
}

/// A run's socket. Dropping it ends the run: the supervisor is killed where it still prepares, and kills what it has started
/// where it does not (see `sys::Deadly`).
pub struct Link {
    /// There until this is dropped.
    connection: Option<Connection>,
}

struct Connection {
    socket: UnixStream,
    received: BytesMut,
    /// The supervisor is gone: it has closed its end, which nobody else has.
    is_over: bool,
    lease: Lease,
    /// The same for a second attempt.
    _admitted: Arc<Admitted>,
}

impl Link {
    pub fn new(socket: UnixStream, lease: Lease, admitted: Arc<Admitted>) -> Self {
        let received = BytesMut::new();
        Self { connection: Some(Connection { socket, received, is_over: false, lease, _admitted: admitted }) }
    }

    fn connection(&mut self) -> &mut Connection {
        self.connection.as_mut().expect("it is there until this is dropped")
    }

    /// After the supervisor was lost: see [`Lease::forget_if_dead`].
    pub async fn forget_runner_if_dead(&mut self) {
        self.connection().lease.forget_if_dead().await;
    }

    /// Sends the whole job; the descriptors are closed here.
    pub async fn send_job(&mut self, job: &Job, descriptors: Vec<OwnedFd>) -> io::Result<()> {
        let count = u32::try_from(descriptors.len()).map_err(io::Error::other)?;
        let socket = &mut self.connection().socket;
        socket.write_all(&count.to_le_bytes()).await?;
        for batch in descriptors.chunks(DESCRIPTORS_PER_MESSAGE) {
            let raw: Vec<_> = batch.iter().map(|fd| fd.as_raw_fd()).collect();
            loop {
                socket.writable().await?;
                match socket.try_io(Interest::WRITABLE, || send_descriptors(socket.as_fd(), &raw)) {
                    Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                    other => break other?,
                }
            }
        }
        drop(descriptors);
        self.send(job).await
    }

    /// Passes a signal on.
    pub async fn signal(&mut self, signal: Signal) -> io::Result<()> {
        self.send(&RunInput { kind: Some(run_input::Kind::Signal(signal)) }).await
    }

    /// Has redirects that are held let go.
    pub async fn release(&mut self, release: Release) -> io::Result<()> {
        self.send(&RunInput { kind: Some(run_input::Kind::Release(release)) }).await
    }

    /// The supervisor's next message; `None` at its end. Can be cancelled without
    /// loss.
    pub async fn next(&mut self) -> io::Result<Option<RunOutput>> {
        self.connection().next().await
    }

    /// Tells the supervisor to kill what is left, and waits until it has, for a while.
    pub async fn close(&mut self) {
        if tokio::time::timeout(CLOSE_TIMEOUT, self.connection().close()).await.is_err() {
            tracing::warn!("killed processes have not ended yet");
        }
    }

    async fn send(&mut self, message: &impl Message) -> io::Result<()> {
        let mut buffer = BytesMut::new();
        frame::encode(message, &mut buffer);
        self.connection().socket.write_all(&buffer).await
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        let Some(mut connection) = self.connection.take().filter(|connection| !connection.is_over) else { return };
        // Without a runtime the executor is at its end, and all of its runners with it.
        if let Ok(runtime) = Handle::try_current() {
            runtime.spawn(async move { connection.close().await });
        }
    }
}

impl Connection {
    async fn next(&mut self) -> io::Result<Option<RunOutput>> {
        loop {
            if let Some(output) = frame::decode(&mut self.received).map_err(io::Error::other)? {
                return Ok(Some(output));
            }
            match self.socket.read_buf(&mut self.received).await {
                Ok(0) => {
                    self.is_over = true;
                    return Ok(None);
                }
                Ok(_) => {}
                // It died before it had read everything. What it had said is still
                // there, and whether that was `Started` matters; told only once.
                Err(error) if error.kind() == ErrorKind::ConnectionReset => {}
                Err(error) => return Err(error),
            }
        }
    }

    async fn close(&mut self) {
        let _ = self.socket.shutdown().await;
        let mut rest = [0; 4096];
        loop {
            match self.socket.read(&mut rest).await {
                Ok(0) => break,
                // As above.
                Err(error) if error.kind() != ErrorKind::ConnectionReset => break,
                _ => {}
            }
        }
        self.is_over = true;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Config,
        callers::Caller,
        config::Bounds,
        load::{Capacity, Load, Need, Wanted},
    };

    #[tokio::test]
    async fn what_a_run_takes_is_taken_until_its_supervisor_is_gone() {
        let load = Arc::new(Load::new(Bounds::default(), Capacity { descriptors: 1, ptys: 0 }, false));
        let caller = Caller::anybody(&Config::new(Vec::new()));
        let share = load.admit_run(&caller, Need::default(), Wanted::Now).unwrap();
        let (ours, supervisor) = UnixStream::pair().unwrap();
        let (lease, runs) = Lease::of_test();
        // The call is cancelled while the supervisor still prepares.
        drop(Link::new(ours, lease, Arc::new(Admitted::new(share))));
        let mut told = Vec::new();
        let mut supervisor = supervisor;
        supervisor.read_to_end(&mut told).await.unwrap();
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert_eq!((load.running(), runs()), (1, 1));
        drop(supervisor);
        tokio::time::timeout(Duration::from_secs(5), load.idle()).await.expect("given back");
        while runs() > 0 {
            tokio::task::yield_now().await;
        }
    }
}
