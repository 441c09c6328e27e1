//! The daemon's end of a run's socket to its supervisor (see `runner::wire`).

use std::{
    io::{self, ErrorKind},
    os::fd::{AsFd as _, AsRawFd as _, OwnedFd},
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
};

use crate::runner::wire::{DESCRIPTORS_PER_MESSAGE, Job, send_descriptors};

/// Killing and reaping takes milliseconds; a process that a dead disk holds can
/// take for ever, and must not hold us.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);

/// A run's socket. Dropping it ends the run.
pub struct Link {
    socket: UnixStream,
    received: BytesMut,
}

impl Link {
    pub fn new(socket: UnixStream) -> Self {
        Self { socket, received: BytesMut::new() }
    }

    /// Sends the whole job; the descriptors are closed here.
    pub async fn send_job(&mut self, job: &Job, descriptors: Vec<OwnedFd>) -> io::Result<()> {
        let count = u32::try_from(descriptors.len()).map_err(io::Error::other)?;
        self.socket.write_all(&count.to_le_bytes()).await?;
        for batch in descriptors.chunks(DESCRIPTORS_PER_MESSAGE) {
            let raw: Vec<_> = batch.iter().map(|fd| fd.as_raw_fd()).collect();
            loop {
                self.socket.writable().await?;
                match self.socket.try_io(Interest::WRITABLE, || send_descriptors(self.socket.as_fd(), &raw)) {
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
        loop {
            if let Some(output) = frame::decode(&mut self.received).map_err(io::Error::other)? {
                return Ok(Some(output));
            }
            match self.socket.read_buf(&mut self.received).await {
                Ok(0) => return Ok(None),
                Ok(_) => {}
                // It died before it had read everything. What it had said is still
                // there, and whether that was `Started` matters; told only once.
                Err(error) if error.kind() == ErrorKind::ConnectionReset => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Tells the supervisor to kill what is left, and waits until it has.
    pub async fn close(&mut self) {
        let ended = async {
            self.socket.shutdown().await?;
            while self.next().await?.is_some() {}
            io::Result::Ok(())
        };
        if tokio::time::timeout(CLOSE_TIMEOUT, ended).await.is_err() {
            tracing::warn!("killed processes have not ended yet");
        }
    }

    async fn send(&mut self, message: &impl Message) -> io::Result<()> {
        let mut buffer = BytesMut::new();
        frame::encode(message, &mut buffer);
        self.socket.write_all(&buffer).await
    }
}
