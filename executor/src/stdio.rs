//! The one connection of an executor that ssh has started: its own standard input and output. Moves
//! them away from descriptors 0 and 1, so that no command and no stray message can reach them, and
//! signals the connection's end.

use std::{
    fs::OpenOptions,
    io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream as StdUnixStream,
    },
    pin::Pin,
    task::{Context, Poll},
};

use nix::{
    sys::stat::{SFlag, fstat},
    unistd::{dup2_stdin, dup2_stdout},
};
use posh_proto::STDIO_GREETING;
use tokio::{
    io::{AsyncRead, AsyncWrite, AsyncWriteExt as _, ReadBuf},
    net::{UnixStream, unix::pipe},
    sync::oneshot,
};
use tonic::transport::server::Connected;

use crate::{
    accept::Peer,
    error::{AttemptExt as _, Error},
    tls::serving::Proof,
};

/// Standard input and output as a connection. sshd gives a command pipes or a socket; other files
/// can't be polled.
pub struct Stdio {
    input: StdioInput,
    output: StdioOutput,
    /// Dropped with the connection.
    open: Option<oneshot::Sender<()>>,
}

enum StdioInput {
    Pipe(pipe::Receiver),
    Socket(UnixStream),
}

enum StdioOutput {
    Pipe(pipe::Sender),
    Socket(UnixStream),
}

impl Stdio {
    /// Takes this process's standard input and output: from now on 0 is /dev/null and 1
    /// is standard error. Must be called once, inside a runtime.
    ///
    /// # Errors
    /// [`Error::Io`] when they are neither pipes nor sockets.
    pub fn take() -> Result<Self, Error> {
        // Copies have numbers from 3 on and are closed on exec.
        let copy = |original: &dyn AsFd| original.as_fd().try_clone_to_owned();
        let input = copy(&io::stdin()).attempting(|| "take standard input".to_owned())?;
        let output = copy(&io::stdout()).attempting(|| "take standard output".to_owned())?;
        let null = OpenOptions::new()
            .read(true)
            .open("/dev/null")
            .attempting(|| "open /dev/null".to_owned())?;
        dup2_stdin(null).attempting(|| "replace standard input".to_owned())?;
        dup2_stdout(io::stderr()).attempting(|| "replace standard output".to_owned())?;
        let hint = || {
            "serve on standard input and output; --stdio is for ssh, which gives pipes or sockets"
                .to_owned()
        };
        Ok(Self {
            input: StdioInput::new(input).attempting(hint)?,
            output: StdioOutput::new(output).attempting(hint)?,
            open: None,
        })
    }

    /// Marks the start of the executor's output: start-up files may have written before.
    pub(crate) async fn greet(&mut self) -> Result<(), Error> {
        self.write_all(STDIO_GREETING).await.attempting(|| "write to standard output".to_owned())
    }

    /// Like `self`, with a receiver that resolves once the connection is dropped.
    pub(crate) fn watched(mut self) -> (Self, oneshot::Receiver<()>) {
        let (open, over) = oneshot::channel();
        self.open = Some(open);
        (self, over)
    }
}

impl StdioInput {
    fn new(descriptor: OwnedFd) -> io::Result<Self> {
        if is_socket(&descriptor)? {
            return Ok(Self::Socket(socket(descriptor)?));
        }
        pipe::Receiver::from_owned_fd(descriptor).map(Self::Pipe)
    }
}

impl StdioOutput {
    fn new(descriptor: OwnedFd) -> io::Result<Self> {
        if is_socket(&descriptor)? {
            return Ok(Self::Socket(socket(descriptor)?));
        }
        pipe::Sender::from_owned_fd(descriptor).map(Self::Pipe)
    }
}

fn is_socket(descriptor: &OwnedFd) -> io::Result<bool> {
    let mode = fstat(descriptor)?.st_mode;
    Ok(SFlag::from_bits_truncate(mode) & SFlag::S_IFMT == SFlag::S_IFSOCK)
}

fn socket(descriptor: OwnedFd) -> io::Result<UnixStream> {
    let socket = StdUnixStream::from(descriptor);
    socket.set_nonblocking(true)?;
    UnixStream::from_std(socket)
}

impl AsyncRead for Stdio {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match &mut self.input {
            StdioInput::Pipe(pipe) => Pin::new(pipe).poll_read(cx, buffer),
            StdioInput::Socket(socket) => Pin::new(socket).poll_read(cx, buffer),
        }
    }
}

impl AsyncWrite for Stdio {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        match &mut self.output {
            StdioOutput::Pipe(pipe) => Pin::new(pipe).poll_write(cx, bytes),
            StdioOutput::Socket(socket) => Pin::new(socket).poll_write(cx, bytes),
        }
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match &mut self.output {
            StdioOutput::Pipe(pipe) => Pin::new(pipe).poll_write_vectored(cx, parts),
            StdioOutput::Socket(socket) => Pin::new(socket).poll_write_vectored(cx, parts),
        }
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.output {
            // A pipe is closed when it is dropped.
            StdioOutput::Pipe(_) => Poll::Ready(Ok(())),
            StdioOutput::Socket(socket) => Pin::new(socket).poll_shutdown(cx),
        }
    }
}

impl Connected for Stdio {
    type ConnectInfo = Peer;

    /// The peer is the process that has started this one.
    fn connect_info(&self) -> Peer {
        Peer { address: None, proof: Proof::NotAsked }
    }
}
