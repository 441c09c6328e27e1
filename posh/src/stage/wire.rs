//! The stage's end of its socket to the gateway: blocking until the directive has arrived, then
//! driven by the relay's poll loop.

use std::{
    io::{self, Write},
    os::{
        fd::{AsFd, BorrowedFd},
        unix::net::UnixStream,
    },
    path::Path,
    time::Duration,
};

use bytes::BytesMut;
use posh_proto::{
    frame,
    stage::{Ack, Enlist, ToGateway, ToStage, to_gateway::Kind},
};
use rustix::io::Errno;

use super::process;
use crate::socket::connect_within;

/// Timeout for a directive. Far above the gateway's own deadlines of tens of milliseconds: it is
/// for a gateway that is stopped or swapped out. On expiry the command runs locally.
const DIRECTIVE_TIMEOUT: Duration = Duration::from_secs(10);

/// Size of the first reads: a directive and an exit, which is all that most commands get. Untouched
/// memory costs nothing.
const FIRST_READ_BYTES: usize = 4 << 10;
/// Size of reads after a full one: a full frame of data and a bit.
const READ_BYTES: usize = 512 << 10;

/// A connection to the gateway.
pub struct GatewayLink {
    socket: UnixStream,
    incoming: BytesMut,
    outgoing: BytesMut,
    read_bytes: usize,
    closed: bool,
    acknowledged: bool,
}

impl GatewayLink {
    /// Connects to the stage socket.
    ///
    /// # Errors
    /// No gateway listens there.
    pub fn connect(socket: &Path) -> io::Result<Self> {
        let socket = connect_within(DIRECTIVE_TIMEOUT, socket)?;
        let (incoming, outgoing) = (BytesMut::new(), BytesMut::new());
        Ok(Self {
            socket,
            incoming,
            outgoing,
            read_bytes: FIRST_READ_BYTES,
            closed: false,
            acknowledged: false,
        })
    }

    /// Sends the enlistment.
    ///
    /// # Errors
    /// The gateway has closed the connection.
    pub fn send_enlist(&mut self, enlist: Enlist) -> io::Result<()> {
        self.queue(Kind::Enlist(enlist));
        self.socket.write_all(&self.outgoing.split())
    }

    /// Gives up the right to run the command locally.
    ///
    /// # Errors
    /// The gateway has closed the connection: then nothing was given up.
    pub fn acknowledge(&mut self) -> io::Result<()> {
        self.queue(Kind::Ack(Ack {}));
        self.socket.write_all(&self.outgoing.split())?;
        self.acknowledged = true;
        self.socket.set_nonblocking(true)
    }

    /// Waits for the directive.
    ///
    /// # Errors
    /// The gateway has closed the connection, or took too long.
    pub fn receive_directive(&mut self) -> io::Result<ToStage> {
        loop {
            if let Some(message) = self.next()? {
                return Ok(message);
            }
            self.fill()?;
            if self.closed {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
    }

    /// The next complete message, if any.
    ///
    /// # Errors
    /// The bytes are no message.
    pub fn next(&mut self) -> io::Result<Option<ToStage>> {
        frame::decode(&mut self.incoming).map_err(io::Error::other)
    }

    /// Reads available bytes; [`Self::is_closed`] reports the end.
    ///
    /// # Errors
    /// Any but EAGAIN.
    pub fn fill(&mut self) -> io::Result<()> {
        self.incoming.reserve(self.read_bytes);
        match process::read_into(&self.socket, &mut self.incoming, self.read_bytes) {
            Ok(0) | Err(Errno::CONNRESET) => self.closed = true,
            Ok(count) if count == self.read_bytes => self.read_bytes = READ_BYTES,
            Ok(_) | Err(Errno::INTR) => {}
            // Before the acknowledgement the socket blocks, and this is its timeout.
            Err(Errno::AGAIN) if self.acknowledged => {}
            Err(e) => return Err(e.into()),
        }
        Ok(())
    }

    /// Returns true if the gateway has closed its end.
    pub fn is_closed(&self) -> bool {
        self.closed
    }

    /// Queues a message.
    pub fn queue(&mut self, kind: Kind) {
        frame::encode(&ToGateway { kind: Some(kind) }, &mut self.outgoing);
    }

    /// Bytes not yet sent.
    pub fn queued_bytes(&self) -> usize {
        self.outgoing.len()
    }

    /// Sends as much of the queue as the socket takes now.
    pub fn flush(&mut self) {
        while !self.outgoing.is_empty() {
            match self.socket.write(&self.outgoing) {
                Ok(n) => drop(self.outgoing.split_to(n)),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return,
                Err(_) => {
                    // The next read reports the end; unsent bytes are useless now.
                    self.outgoing.clear();
                    return;
                }
            }
        }
    }
}

impl AsFd for GatewayLink {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
