//! Process at the other end of a UNIX socket: the one that connected, or the one that listens.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{getsockopt, sockopt};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::process::Process;

/// A peer.
#[derive(Debug)]
pub struct Peer {
    /// Its effective user ID when it connected or began to listen (unix(7), SO_PEERCRED).
    pub user: u32,
    /// Its process ID, if the kernel knows it. May be reused once the process has ended.
    pub number: Option<u32>,
    process: Option<OwnedFd>,
}

impl Peer {
    /// Reads the peer of a connected socket.
    ///
    /// # Errors
    /// Not a UNIX socket.
    pub fn of(socket: &impl AsFd) -> io::Result<Self> {
        let credentials = getsockopt(socket, sockopt::PeerCredentials)?;
        let pid = Pid::from_raw(credentials.pid());
        // Before Linux 6.5 the kernel provides no peer pidfd. One by process ID is as good unless
        // the ID was reused meanwhile.
        let by_number = || pidfd_open(pid?, PidfdFlags::empty()).ok();
        let process = getsockopt(socket, sockopt::PeerPidfd).ok().or_else(by_number);
        let number = pid.map(|pid| pid.as_raw_nonzero().get().cast_unsigned());
        Ok(Self { user: credentials.uid(), number, process })
    }

    /// Opens the process in /proc, after checking that it is the one that connected.
    ///
    /// # Errors
    /// It has ended.
    pub fn process(&self) -> io::Result<Process> {
        let (Some(number), Some(process)) = (self.number, &self.process) else {
            return Err(io::ErrorKind::NotFound.into());
        };
        let found = Process::open(number)?;
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
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::process::Command;

    use super::*;

    #[test]
    fn a_number_that_may_be_another_s_tells_no_rights() {
        let (own, _other) = UnixStream::pair().expect("a pair");
        assert!(Peer::of(&own).expect("a socket").process().is_ok());
        // A process that has connected and ended; its number may be anybody's.
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("s");
        let listener = UnixListener::bind(&path).expect("it listens");
        let connects = format!(
            "use Socket; socket(S, AF_UNIX, SOCK_STREAM, 0); connect(S, pack_sockaddr_un('{}'))",
            path.display()
        );
        let mut child = Command::new("perl").args(["-e", &connects]).spawn().expect("it starts");
        let (socket, _) = listener.accept().expect("a connection");
        let peer = Peer::of(&socket).expect("a socket");
        child.wait().expect("it ends");
        let reused = Peer { number: Some(std::process::id()), ..peer };
        assert!(reused.process().is_err());
    }
}
