//! The connections of a mount's sshfs to its server. sshfs starts an ssh for each, joined to it by
//! a pair of sockets, and makes another pair when it connects anew (`reconnect`).
//!
//! Invariant: as long as the same processes have the same sockets, the mount is on the same
//! connections. The kernel gives a socket a number that it gives to no other one soon; a process's
//! directory in /proc is never another process's. That also holds without an ssh of its own: a
//! socket to a master (ControlMaster) closes with it, and `directport` is a socket itself.
//! `passive` has no socket, and never connects anew.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::unix::ffi::OsStrExt as _;

use rustix::fs::{Dir, Mode, OFlags, openat};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink, recv, send, socket_with,
};

use super::processes;
use crate::daemons::Daemons;
use crate::mountinfo::MountInfo;
use crate::process::Process;

/// Longest list of sockets that is read.
const MOST_LIST_BYTES: u64 = 16 << 20;
/// `st` of an established connection in /proc/net/tcp.
const ESTABLISHED: &str = "01";

/// The processes that serve an sshfs mount.
#[derive(Debug, Default)]
pub struct SshfsProcesses {
    processes: Vec<Process>,
    /// Another connection may follow a lost one, or be made beside it.
    may_connect_anew: bool,
}

/// Connections at one moment, by the numbers of sshfs's sockets.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SshfsConnections(BTreeSet<u64>);

impl SshfsConnections {
    /// Returns true if none of these was given up since.
    pub fn has_all_of(&self, earlier: &Self) -> bool {
        self.0.is_superset(&earlier.0)
    }
}

impl SshfsProcesses {
    /// Finds the processes that serve a mount, by its ID in /proc/self/mountinfo. Reads /proc.
    ///
    /// # Errors
    /// There is none that may be looked at.
    pub fn of(mount_id: u32) -> io::Result<Self> {
        let info = MountInfo::read().map_err(io::Error::other)?;
        let gone = || io::Error::new(io::ErrorKind::NotFound, "its sshfs is not found");
        let entries = info.visible();
        let entry = entries.into_iter().find(|entry| entry.mount_id == mount_id);
        let entry = entry.ok_or_else(gone)?;
        let daemons = Daemons::running(processes::PROGRAMS, &[0]);
        let names_it = |words: &[OsString]| {
            processes::arguments(words).is_some_and(|words| words.contains(&entry.source))
        };
        let serving = daemons.serving(entry, &names_it);
        let may_connect_anew = serving.iter().any(|daemon| connects_anew(&daemon.words));
        let processes = serving.into_iter().map(|daemon| daemon.process.again());
        let processes: Vec<_> = processes.collect::<Result<_, _>>()?;
        match processes.is_empty() {
            true => Err(gone()),
            false => Ok(Self { processes, may_connect_anew }),
        }
    }

    /// Its connections now: some ten system calls, none of which waits.
    ///
    /// # Errors
    /// A process has ended; or it is another user's, and may connect anew unseen.
    pub fn connections(&self) -> io::Result<SshfsConnections> {
        let mut all = BTreeSet::new();
        for process in &self.processes {
            match sockets(process) {
                Ok(its) => all.extend(its),
                Err(error)
                    if error.kind() == io::ErrorKind::PermissionDenied
                        && !self.may_connect_anew =>
                {
                    // It has one connection for its life, and must live.
                    process
                        .link("exe")
                        .or_else(|_| process.read("stat", 4096).map(|_| "".into()))?;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(SshfsConnections(all))
    }

    /// Addresses that its ssh processes are connected to; empty if that is not known, as behind a
    /// ProxyCommand.
    pub fn servers(&self) -> BTreeSet<SocketAddr> {
        let own = self.processes.iter().flat_map(|process| sockets(process).unwrap_or_default());
        let ends: BTreeSet<u64> = own.filter_map(|number| peer(number).ok()).collect();
        if ends.is_empty() {
            return BTreeSet::new();
        }
        let of_ssh = Process::of_users(&[]).filter_map(|process| sockets(&process).ok());
        let of_ssh = of_ssh.filter(|its| !its.is_disjoint(&ends));
        connected_to(&of_ssh.flatten().collect())
    }
}

/// Addresses that a process of this user is connected to by TCP.
pub fn servers_of(process: u32) -> BTreeSet<SocketAddr> {
    let opened = Process::open(process).and_then(|process| sockets(&process));
    opened.map(|its| connected_to(&its)).unwrap_or_default()
}

/// Returns true if arguments let sshfs make another connection than its first.
fn connects_anew(words: &[OsString]) -> bool {
    words.iter().any(|word| {
        let word = String::from_utf8_lossy(word.as_bytes());
        ["reconnect", "max_conns", "delay_connect"].iter().any(|option| word.contains(option))
    })
}

/// Numbers of a process's sockets.
fn sockets(process: &Process) -> io::Result<BTreeSet<u64>> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let directory = openat(process.directory(), "fd", flags, Mode::empty())?;
    let mut numbers = BTreeSet::new();
    for entry in Dir::read_from(&directory)? {
        let entry = entry?;
        let Ok(target) = rustix::fs::readlinkat(&directory, entry.file_name(), Vec::new()) else {
            continue;
        };
        numbers.extend(socket_number(OsStr::from_bytes(target.to_bytes())));
    }
    Ok(numbers)
}

fn socket_number(link: &OsStr) -> Option<u64> {
    link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok()
}

/// Number of the other socket of a pair (`unix_diag_req` and `unix_diag_msg` of
/// linux/unix_diag.h; sock_diag(7)).
fn peer(number: u64) -> io::Result<u64> {
    const SOCK_DIAG_BY_FAMILY: u16 = 20;
    const REQUEST: u16 = 1;
    const SHOW_PEER: u32 = 4;
    const ATTRIBUTE_PEER: u16 = 2;
    const HEADER_BYTES: usize = 16;
    const MESSAGE_BYTES: usize = 16;
    let odd = || io::Error::new(io::ErrorKind::InvalidData, "no pair of sockets");
    let number = u32::try_from(number).map_err(|_| odd())?;
    let mut request = Vec::with_capacity(40);
    request.extend(40_u32.to_ne_bytes());
    request.extend(SOCK_DIAG_BY_FAMILY.to_ne_bytes());
    request.extend(REQUEST.to_ne_bytes());
    request.extend([0; 8]);
    request.extend([AddressFamily::UNIX.as_raw().to_ne_bytes()[0], 0, 0, 0]);
    request.extend(u32::MAX.to_ne_bytes());
    request.extend(number.to_ne_bytes());
    request.extend(SHOW_PEER.to_ne_bytes());
    request.extend([0xff; 8]);
    let kind = SocketType::DGRAM;
    let asked =
        socket_with(AddressFamily::NETLINK, kind, SocketFlags::CLOEXEC, Some(netlink::SOCK_DIAG))?;
    send(&asked, &request, SendFlags::empty())?;
    let mut answer = [0_u8; 4096];
    // The kernel answers before send(2) returns.
    let (length, _) = recv(&asked, &mut answer[..], RecvFlags::DONTWAIT)?;
    let answer = &answer[..length];
    let kind = answer.get(4..6).and_then(|kind| kind.try_into().ok()).map(u16::from_ne_bytes);
    if kind != Some(SOCK_DIAG_BY_FAMILY) {
        return Err(odd());
    }
    let mut rest = answer.get(HEADER_BYTES + MESSAGE_BYTES..).ok_or_else(odd)?;
    while let [l0, l1, k0, k1, content @ ..] = rest {
        let length = usize::from(u16::from_ne_bytes([*l0, *l1]));
        if u16::from_ne_bytes([*k0, *k1]) == ATTRIBUTE_PEER {
            let peer = content.first_chunk().ok_or_else(odd)?;
            return Ok(u32::from_ne_bytes(*peer).into());
        }
        rest = rest.get(length.next_multiple_of(4).max(4)..).unwrap_or_default();
    }
    Err(odd())
}

/// Addresses at the other ends of TCP sockets with these numbers.
fn connected_to(numbers: &BTreeSet<u64>) -> BTreeSet<SocketAddr> {
    let own = Process::own().ok();
    let read = |name: &str| own.as_ref()?.read(name, MOST_LIST_BYTES).ok();
    let lists: Vec<_> = ["net/tcp", "net/tcp6"].into_iter().filter_map(read).collect();
    let lines = lists.iter().flat_map(|list| list.split(|byte| *byte == b'\n'));
    lines.filter_map(|line| remote_end(line, numbers)).collect()
}

/// The remote address in a line of /proc/net/tcp or tcp6 (proc_pid_net(5)), if it is about one of
/// these sockets.
fn remote_end(line: &[u8], numbers: &BTreeSet<u64>) -> Option<SocketAddr> {
    let words: Vec<&str> = std::str::from_utf8(line).ok()?.split_ascii_whitespace().collect();
    let (state, number) = (*words.get(3)?, words.get(9)?.parse().ok()?);
    if state != ESTABLISHED || !numbers.contains(&number) {
        return None;
    }
    let (address, port) = words.get(2)?.split_once(':')?;
    let port = u16::from_str_radix(port, 16).ok()?;
    // Each group of eight digits is a number of the machine's, whose bytes are the address's.
    let mut bytes = Vec::with_capacity(16);
    for group in address.as_bytes().chunks(8) {
        let group = u32::from_str_radix(std::str::from_utf8(group).ok()?, 16).ok()?;
        bytes.extend(group.to_ne_bytes());
    }
    let address: IpAddr = match bytes.len() {
        4 => Ipv4Addr::from(<[u8; 4]>::try_from(bytes).ok()?).into(),
        16 => Ipv6Addr::from(<[u8; 16]>::try_from(bytes).ok()?).into(),
        _ => return None,
    };
    Some(SocketAddr::new(address.to_canonical(), port))
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsRawFd as _;
    use std::os::unix::net::UnixStream;

    use super::*;

    fn number(of: &impl std::os::fd::AsRawFd) -> u64 {
        let link = std::fs::read_link(format!("/proc/self/fd/{}", of.as_raw_fd())).expect("a link");
        socket_number(link.as_os_str()).expect("a socket")
    }

    #[test]
    fn a_new_connection_has_other_sockets() {
        let of = || {
            let processes = vec![Process::own().expect("/proc")];
            SshfsProcesses { processes, may_connect_anew: true }
        };
        let (one, _end) = UnixStream::pair().expect("a pair");
        let before = of().connections().expect("sockets");
        assert!(before.0.contains(&number(&one)));
        let old = number(&one);
        drop(one);
        let (_other, _end) = UnixStream::pair().expect("a pair");
        let after = of().connections().expect("sockets");
        assert!(!after.0.contains(&old) && !after.has_all_of(&before) && after != before);
    }

    #[test]
    fn the_other_end_of_a_pair_is_found() {
        let (one, other) = UnixStream::pair().expect("a pair");
        assert_eq!(peer(number(&one)).expect("told"), number(&other));
        assert!(peer(u64::from(u32::MAX)).is_err());
    }

    #[test]
    fn the_address_of_a_connection_is_found() {
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let Ok(server) = TcpListener::bind(address) else { continue };
            let address = server.local_addr().expect("bound");
            let client = TcpStream::connect(address).expect("connected");
            assert_eq!(connected_to(&BTreeSet::from([number(&client)])), [address].into());
            assert!(servers_of(std::process::id()).contains(&address), "{}", client.as_raw_fd());
        }
        assert_eq!(connected_to(&BTreeSet::new()), BTreeSet::new());
    }

    #[test]
    fn which_arguments_allow_another_connection() {
        let words = |line: &str| line.split(' ').map(OsString::from).collect::<Vec<_>>();
        assert!(!connects_anew(&words("sshfs h:/d /mnt -o ro,IdentityFile=/k")));
        assert!(connects_anew(&words("sshfs h:/d /mnt -o ro,reconnect")));
        assert!(connects_anew(&words("sshfs h:/d /mnt -omax_conns=4")));
    }
}
