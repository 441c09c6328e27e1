//! Ordered joins inside the executor: moves the sources into one pipe, one after the other. A
//! source whose turn has not come fills its pipe and waits, so that no memory is needed but that of
//! the pipes.

use std::{
    io::{self, ErrorKind},
    os::fd::{AsFd as _, BorrowedFd},
};

use nix::{
    errno::Errno,
    fcntl::{SpliceFFlags, splice},
    poll::{PollFd, PollFlags, PollTimeout, poll},
};
use tokio::net::unix::pipe;

use super::{broken::BrokenStream, inlet::unread};

/// Bytes per call; a pipe holds no more.
const SPLICE_BYTES: usize = 1 << 20;

/// Moves all of `sources`, in order, into `target`, which then closes. When the target has no
/// reader any more, all sources close.
///
/// # Errors
/// Bytes can't be moved, and the target is not whole.
pub async fn join(sources: Vec<pipe::Receiver>, target: pipe::Sender) -> Result<(), BrokenStream> {
    for source in sources {
        let moved = tokio::select! {
            moved = move_all(&source, &target) => moved,
            () = unread(&target) => return Ok(()),
        };
        match moved {
            Ok(()) => {}
            Err(error) if error.kind() == ErrorKind::BrokenPipe => return Ok(()),
            Err(error) => return Err(BrokenStream::Join(error)),
        }
    }
    Ok(())
}

async fn move_all(source: &pipe::Receiver, target: &pipe::Sender) -> io::Result<()> {
    loop {
        source.readable().await?;
        target.writable().await?;
        let flags = SpliceFFlags::SPLICE_F_NONBLOCK | SpliceFFlags::SPLICE_F_MOVE;
        match splice(source, None, target, None, SPLICE_BYTES, flags) {
            Ok(0) => return Ok(()),
            Ok(_) => {
                // Lets other tasks of this thread run.
                tokio::task::consume_budget().await;
            }
            Err(Errno::EINTR) => {}
            Err(Errno::EAGAIN) => {
                // One of the two is not ready, and only that one may be waited for:
                // the other would not be reported again.
                let _ = source.try_io(|| require(source.as_fd(), PollFlags::POLLIN));
                let _ = target.try_io(|| require(target.as_fd(), PollFlags::POLLOUT));
            }
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// `WouldBlock` when `fd` is not ready, which makes the runtime wait for it.
fn require(fd: BorrowedFd<'_>, events: PollFlags) -> io::Result<()> {
    match poll(&mut [PollFd::new(fd, events)], PollTimeout::ZERO)? {
        0 => Err(ErrorKind::WouldBlock.into()),
        _ => Ok(()),
    }
}
