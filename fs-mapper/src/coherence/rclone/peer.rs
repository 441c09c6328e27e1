//! Process at the other end of a TCP connection within this machine, according to the kernel
//! (proc_pid_net(5)). Any user can listen at an address before the expected program does.

use std::{
    fs, io,
    net::{IpAddr, Ipv6Addr, SocketAddr, TcpStream},
    path::{Path, PathBuf},
    thread::sleep,
    time::{Duration, Instant},
};

/// Poll interval while nobody has accepted the connection.
const LOOK_AGAIN: Duration = Duration::from_millis(1);

/// Accepted socket at the other end of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SocketPeer {
    inode: u64,
    /// User of the process that accepted the connection.
    user: u32,
}

impl SocketPeer {
    /// Waits until the connection is accepted.
    pub(super) fn of(stream: &TcpStream, limit: Duration) -> io::Result<Self> {
        let (here, there) = (stream.local_addr()?, stream.peer_addr()?);
        let end = Instant::now() + limit;
        loop {
            for table in ["tcp", "tcp6"] {
                let table = fs::read_to_string(Path::new("/proc/thread-self/net").join(table))
                    .unwrap_or_default();
                // The peer's local address is the address that was connected to.
                if let Some(found) = find(&table, there, here) {
                    return Ok(found);
                }
            }
            if Instant::now() >= end {
                return Err(io::Error::new(
                    io::ErrorKind::TimedOut,
                    format!("nobody answers at {there}"),
                ));
            }
            sleep(LOOK_AGAIN);
        }
    }

    /// Refuses any process but `process`. If another user's rights hide its descriptors, the peer
    /// must belong to root or to this user.
    pub(super) fn expect(self, process: &Path) -> io::Result<()> {
        let descriptors = match fs::read_dir(process.join("fd")) {
            Ok(descriptors) => descriptors,
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                return if self.is_trusted() { Ok(()) } else { Err(self.refused()) };
            }
            Err(error) => return Err(error),
        };
        let own = PathBuf::from(format!("socket:[{}]", self.inode));
        let mut targets =
            descriptors.flatten().filter_map(|descriptor| fs::read_link(descriptor.path()).ok());
        if targets.any(|target| target == own) { Ok(()) } else { Err(self.refused()) }
    }

    /// Returns true for root and for this user, who learn nothing that they could not find out.
    fn is_trusted(self) -> bool {
        self.user == 0 || self.user == rustix::process::geteuid().as_raw()
    }

    fn refused(self) -> io::Error {
        let why = format!(
            "another program, of user {}, listens at the address of rclone's remote control",
            self.user
        );
        io::Error::new(io::ErrorKind::PermissionDenied, why)
    }
}

/// Finds the accepted socket with these two addresses in the text of /proc/net/tcp or tcp6.
fn find(table: &str, own: SocketAddr, other: SocketAddr) -> Option<SocketPeer> {
    table.lines().skip(1).find_map(|line| {
        let mut fields = line.split_ascii_whitespace().skip(1);
        let addresses = (address(fields.next()?)?, address(fields.next()?)?);
        let (user, inode) = (fields.nth(4)?.parse().ok()?, fields.nth(1)?.parse().ok()?);
        // Inode 0: the connection is still in the listener's accept queue.
        (addresses == (own, other) && inode != 0).then_some(SocketPeer { inode, user })
    })
}

/// Parses an address of 32-bit words in native byte order, and the port.
fn address(text: &str) -> Option<SocketAddr> {
    let (words, port) = text.split_once(':')?;
    let port = u16::from_str_radix(port, 16).ok()?;
    let word = |start: usize| {
        u32::from_str_radix(words.get(start..start + 8)?, 16).ok().map(u32::to_ne_bytes)
    };
    let address: IpAddr = match words.len() {
        8 => word(0)?.into(),
        32 => {
            let mut bytes = [0; 16];
            for (index, part) in bytes.chunks_exact_mut(4).enumerate() {
                part.copy_from_slice(&word(index * 8)?);
            }
            // A dual-stack socket has IPv4-mapped addresses.
            Ipv6Addr::from(bytes).to_canonical()
        }
        _ => return None,
    };
    Some(SocketAddr::new(address, port))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_accepted_socket_is_found_by_both_addresses() {
        let table = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:15C4 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 11 1 0 100 0 0 10 0
   1: 0100007F:15C4 0100007F:9C41 01 00000000:00000000 00:00000000 00000000     0        0 0 1 0 20 4 30 10 -1
   2: 0100007F:15C4 0100007F:9C40 01 00000000:00000000 00:00000000 00000000  1000        0 12 1 0 20 4 30 10 -1
   3: 0100007F:9C40 0100007F:15C4 01 00000000:00000000 00:00000000 00000000  1001        0 13 1 0 20 4 30 10 -1\n";
        let table = if cfg!(target_endian = "little") {
            table.to_owned()
        } else {
            table.replace("0100007F", "7F000001")
        };
        let at = |port| SocketAddr::from(([127, 0, 0, 1], port));
        assert_eq!(find(&table, at(5572), at(40_000)), Some(SocketPeer { inode: 12, user: 1000 }));
        assert_eq!(find(&table, at(5572), at(40_001)), None, "not accepted");
        assert_eq!(find(&table, at(5572), at(40_002)), None);
    }

    #[test]
    fn addresses_of_both_versions() {
        let check = |text: &str, expect: Option<&str>| {
            assert_eq!(address(text).map(|found| found.to_string()).as_deref(), expect, "{text}");
        };
        if cfg!(target_endian = "little") {
            check("0100007F:15C4", Some("127.0.0.1:5572"));
            check("00000000000000000000000001000000:15C4", Some("[::1]:5572"));
            check("0000000000000000FFFF00000100007F:15C4", Some("127.0.0.1:5572"));
        }
        check("0100007F", None);
        check("0100:15C4", None);
        check("0100007F:x", None);
    }

    #[test]
    fn sockets_of_both_versions_are_their_process_s() {
        use std::net::TcpListener;
        for at in ["127.0.0.1:0", "[::1]:0", "[::]:0"] {
            let listener = TcpListener::bind(at).expect("an address");
            let port = listener.local_addr().expect("bound").port();
            let to = if at.starts_with("[::1]") { "::1" } else { "127.0.0.1" };
            let stream = TcpStream::connect((to, port)).expect("it listens");
            let soon = Duration::from_millis(20);
            assert_eq!(
                SocketPeer::of(&stream, soon).expect_err("in the queue").kind(),
                io::ErrorKind::TimedOut
            );
            let _accepted = listener.accept().expect("there is one");
            let peer = SocketPeer::of(&stream, Duration::from_secs(10)).expect("accepted");
            peer.expect(Path::new("/proc/self")).expect("our own");
            let why = peer
                .expect(&PathBuf::from(format!("/proc/{}", std::os::unix::process::parent_id())));
            assert!(why.expect_err("not theirs").to_string().contains("another program"), "{at}");
        }
    }
}
