//! Makes a run's pipes and ptys and hands out their ends.

use std::{
    collections::HashMap,
    fs,
    io::ErrorKind,
    os::fd::{AsFd as _, OwnedFd},
    sync::{
        LazyLock,
        atomic::{AtomicUsize, Ordering},
    },
};

use nix::{
    fcntl::{FcntlArg, OFlag, fcntl, open},
    pty::{grantpt, posix_openpt, ptsname_r, unlockpt},
    sys::{
        stat::Mode,
        termios::{SetArg, cfmakeraw, tcgetattr, tcsetattr},
    },
    unistd::{fchown, geteuid, pipe2},
};
use posh_proto::executor::{Pty, rejected::Kind};
use tokio::net::unix::pipe;

use super::broken::BrokenStream;
use crate::{
    error::Refusal,
    runner::wire::{EndKind, PipeEnd, ViewUser},
    sys,
    wiring::Wiring,
};

/// The kernel's usual maximum, for pipes of which the daemon holds one end: fewer switches between
/// it and a stage. A pipe between two stages keeps the size of a shell's pipe, since that decides
/// if `cat f | head -1` ends by SIGPIPE.
pub const PIPE_BYTES: usize = 1 << 20;

/// Pipes that may still get the full size. An unprivileged user has a budget of pages for all
/// pipes, beyond which every new one has 8 KiB: half of it is left to the user's other programs.
static LARGE_PIPES_LEFT: LazyLock<AtomicUsize> = LazyLock::new(|| {
    let budget = fs::read_to_string("/proc/sys/fs/pipe-user-pages-soft")
        .ok()
        .and_then(|text| text.trim().parse().ok());
    let pages_per_pipe = PIPE_BYTES / 4096;
    AtomicUsize::new(match budget {
        _ if geteuid().is_root() => usize::MAX / 2,
        Some(0) | None => usize::MAX / 2,
        Some(pages) => pages / 2 / pages_per_pipe,
    })
});

/// Ends by their ids, until they are taken.
pub struct Plumbing {
    ends: HashMap<PipeEnd, OwnedFd>,
    large_pipes: usize,
}

impl Drop for Plumbing {
    fn drop(&mut self) {
        LARGE_PIPES_LEFT.fetch_add(self.large_pipes, Ordering::Relaxed);
    }
}

impl Plumbing {
    /// Makes all pipes and ptys. They belong to the commands' user: a command opens them by name,
    /// too (`/dev/stdin`, `/dev/fd/63`).
    pub fn make(wiring: &Wiring, owner: Option<&ViewUser>) -> Result<Self, Refusal> {
        let mut plumbing = Self { ends: HashMap::new(), large_pipes: 0 };
        let give = |end: &OwnedFd| match owner {
            // Unless we are root, they are this user's already.
            Some(user) if geteuid().is_root() => {
                fchown(end, Some(user.uid.into()), Some(user.gid.into()))
            }
            _ => Ok(()),
        };
        for &id in &wiring.pipes {
            let made = pipe2(OFlag::O_CLOEXEC)
                .and_then(|(read, write)| give(&read).map(|()| (read, write)));
            let (read, write) = made.map_err(|errno| no_more("pipe", errno))?;
            plumbing.insert(EndKind::PipeRead, id, read);
            plumbing.insert(EndKind::PipeWrite, id, write);
        }
        for pty in &wiring.ptys {
            let made = open_pty(pty)
                .and_then(|(master, terminal)| give(&terminal).map(|()| (master, terminal)));
            let (master, terminal) = made.map_err(|errno| no_more("pty", errno))?;
            // A master is read like a pipe; a pipe and a pty never share an id.
            plumbing.insert(EndKind::PipeRead, pty.id, master);
            plumbing.insert(EndKind::Pty, pty.id, terminal);
        }
        Ok(plumbing)
    }

    /// Takes the ends of the stages, in that order.
    pub fn take_stage_ends(&mut self, ends: &[PipeEnd]) -> Result<Vec<OwnedFd>, Refusal> {
        let missing = |end: &PipeEnd| Refusal::protocol(format!("no pipe or pty {}", end.id));
        ends.iter().map(|end| self.ends.remove(end).ok_or_else(|| missing(end))).collect()
    }

    /// The read end of a pipe or the master of a pty, for the runtime.
    ///
    /// # Errors
    /// The runtime can't wait for it, or there is none.
    pub fn reader(&mut self, id: u32) -> Result<pipe::Receiver, BrokenStream> {
        let end = self.take_own(EndKind::PipeRead, id)?;
        pipe::Receiver::from_owned_fd_unchecked(end)
            .map_err(|error| BrokenStream::Unready { id, error })
    }

    /// The write end of a pipe, for the runtime.
    ///
    /// # Errors
    /// The runtime can't wait for it, or there is none.
    pub fn writer(&mut self, id: u32) -> Result<pipe::Sender, BrokenStream> {
        let end = self.take_own(EndKind::PipeWrite, id)?;
        pipe::Sender::from_owned_fd_unchecked(end)
            .map_err(|error| BrokenStream::Unready { id, error })
    }

    fn take_own(&mut self, kind: EndKind, id: u32) -> Result<OwnedFd, BrokenStream> {
        let end =
            self.ends.remove(&PipeEnd { kind: kind.into(), id }).ok_or(BrokenStream::NoPipe(id))?;
        // The open file description of our end is ours alone: the command's stays blocking.
        fcntl(&end, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))
            .map_err(|errno| BrokenStream::Unready { id, error: errno.into() })?;
        self.enlarge(&end);
        Ok(end)
    }

    fn insert(&mut self, kind: EndKind, id: u32, end: OwnedFd) {
        self.ends.insert(PipeEnd { kind: kind.into(), id }, end);
    }

    fn enlarge(&mut self, pipe: &OwnedFd) {
        let taken = LARGE_PIPES_LEFT
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
        if taken.is_ok() {
            self.large_pipes += 1;
            // A smaller pipe works all the same.
            let _ = fcntl(pipe, FcntlArg::F_SETPIPE_SZ(PIPE_BYTES as i32));
        }
    }
}

fn no_more(what: &str, errno: nix::Error) -> Refusal {
    let is_limit =
        std::io::Error::from(errno).kind() == ErrorKind::Other || errno == nix::Error::EMFILE;
    let kind = if is_limit { Kind::Overloaded } else { Kind::SpawnFailed };
    Refusal::new(kind, format!("cannot make a {what}: {}", errno.desc()))
}

/// A pty in raw mode: output of the command arrives unchanged, and the workstation's own terminal
/// processes it.
fn open_pty(pty: &Pty) -> nix::Result<(OwnedFd, OwnedFd)> {
    let master = posix_openpt(OFlag::O_RDWR | OFlag::O_NOCTTY | OFlag::O_CLOEXEC)?;
    grantpt(&master)?;
    unlockpt(&master)?;
    let name = ptsname_r(&master)?;
    let terminal =
        open(name.as_str(), OFlag::O_RDWR | OFlag::O_NOCTTY | OFlag::O_CLOEXEC, Mode::empty())?;
    let mut attributes = tcgetattr(&terminal)?;
    cfmakeraw(&mut attributes);
    tcsetattr(&terminal, SetArg::TCSANOW, &attributes)?;
    if let Some(size) = &pty.size {
        sys::resize(master.as_fd(), size)?;
    }
    Ok((master.into(), terminal))
}
