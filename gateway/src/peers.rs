//! Access check for a gateway's clients: processes of its own user. The directory of the sockets
//! already excludes other users; this check holds if somebody has opened it, and against a root
//! that means another gateway.

use std::{
    io,
    os::fd::{AsFd as _, OwnedFd},
};

use fs_mapper::process::Process;
use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::socket::{getsockopt, sockopt::PeerPidfd},
};
use rustix::process::{PidfdFlags, pidfd_open};
use tokio::net::UnixStream;

use crate::enlisted::Pid;

/// The peer is another user's process, by its effective user ID when it connected (unix(7),
/// SO_PEERCRED).
#[derive(Debug, thiserror::Error)]
#[error("process of user {0} is not ours")]
pub struct Stranger(u32);

/// Process at the other end of a connection: the one that connected.
#[derive(Debug)]
pub struct Peer {
    /// Process ID, if the kernel knows it. May be reused once the process has ended.
    pub pid: Option<Pid>,
    process: Option<OwnedFd>,
}

impl Peer {
    /// Returns the peer, if it is this user's.
    ///
    /// # Errors
    /// [`Stranger`], in an [`io::Error`] of kind `PermissionDenied`.
    pub fn own(socket: &UnixStream) -> io::Result<Self> {
        let credentials = socket.peer_cred()?;
        if credentials.uid() != nix::unistd::geteuid().as_raw() {
            return Err(io::Error::new(
                io::ErrorKind::PermissionDenied,
                Stranger(credentials.uid()),
            ));
        }
        let pid = credentials.pid();
        // Before Linux 6.5 the kernel provides no peer pidfd. One by process ID is as good unless
        // the ID was reused meanwhile.
        let by_number =
            || pidfd_open(rustix::process::Pid::from_raw(pid?)?, PidfdFlags::empty()).ok();
        let process = getsockopt(socket, PeerPidfd).ok().or_else(by_number);
        Ok(Self { pid: pid.and_then(|pid| Pid::try_from(pid).ok()), process })
    }

    /// Opens the process in /proc, after checking that it is the one that connected.
    ///
    /// # Errors
    /// It has ended.
    pub fn process(&self) -> io::Result<Process> {
        let (Some(pid), Some(process)) = (self.pid, &self.process) else {
            return Err(io::ErrorKind::NotFound.into());
        };
        let found = Process::open(pid)?;
        // A pidfd becomes readable when the process ends (pidfd_open(2)): until then the ID was its
        // own.
        let mut ended = [PollFd::new(process.as_fd(), PollFlags::POLLIN)];
        match poll(&mut ended, PollTimeout::ZERO)? {
            0 => Ok(found),
            _ => Err(io::ErrorKind::NotFound.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[tokio::test]
    async fn a_number_that_may_be_another_s_tells_no_rights() {
        let (own, other) = UnixStream::pair().unwrap();
        assert!(Peer::own(&own).unwrap().process().is_ok());
        drop(other);
        // Somebody has connected and ended; its number may be anybody's.
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        let listener = tokio::net::UnixListener::bind(&path).unwrap();
        let connects = format!(
            "use Socket; socket(S, AF_UNIX, SOCK_STREAM, 0); connect(S, pack_sockaddr_un('{}'))",
            path.display()
        );
        let mut child = Command::new("perl").args(["-e", &connects]).spawn().unwrap();
        let (socket, _) = listener.accept().await.unwrap();
        let peer = Peer::own(&socket).unwrap();
        child.wait().unwrap();
        let reused = Peer { pid: Some(std::process::id()), ..peer };
        assert!(reused.process().is_err());
    }
}
