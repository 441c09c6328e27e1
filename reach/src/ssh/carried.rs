//! The two pipes of an ssh process as one stream that reports its drop.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll},
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    process::{ChildStdin, ChildStdout},
    sync::oneshot,
};

/// Duplex stream to an executor through ssh.
#[derive(Debug)]
pub struct Carried {
    input: ChildStdout,
    output: ChildStdin,
    /// Dropped with the stream.
    _used: oneshot::Sender<()>,
}

impl Carried {
    /// Returns the stream, and a receiver that completes when the stream is dropped.
    pub(super) fn new(output: ChildStdin, input: ChildStdout) -> (Self, oneshot::Receiver<()>) {
        let (used, dropped) = oneshot::channel();
        (Self { input, output, _used: used }, dropped)
    }
}

impl AsyncRead for Carried {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.input).poll_read(cx, buffer)
    }
}

impl AsyncWrite for Carried {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.output).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.output).poll_write_vectored(cx, parts)
    }

    fn is_write_vectored(&self) -> bool {
        self.output.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.output).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.output).poll_shutdown(cx)
    }
}
