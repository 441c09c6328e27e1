//! Describes the open descriptors that the shell has set up, without access to the files: from the
//! descriptors themselves and from /proc/self.

use std::{
    fs,
    os::{
        fd::{BorrowedFd, RawFd},
        unix::ffi::OsStrExt,
    },
};

use fs_mapper::mountinfo::mount_id;
use nix::{
    fcntl::{FcntlArg, fcntl},
    sys::{
        resource::{Resource, getrlimit},
        stat::{FileStat, SFlag, fstat},
    },
    unistd::{Whence, lseek},
};
use posh_proto::stage::{Descriptor, descriptor::Kind};

use super::process;

/// Device number of /dev/null: 1:3 (the kernel's devices.txt).
const NULL_DEVICE: u64 = (1 << 8) | 3;
/// Major numbers of terminals: tty (4), tty and ptmx (5), pts (136–143).
const TTY_MAJORS: [u64; 10] = [4, 5, 136, 137, 138, 139, 140, 141, 142, 143];

/// Descriptors that a relay needs: a socket, signals, and two for each output.
const NEEDED: u64 = 16;

/// Returns true if the limit of open files is too low for a relay (`ulimit -n 4`).
pub fn are_scarce() -> bool {
    getrlimit(Resource::RLIMIT_NOFILE).is_ok_and(|(soft, _)| soft < NEEDED)
}

/// Every open descriptor, ordered by number.
pub fn all() -> Vec<Descriptor> {
    let Ok(directory) = fs::read_dir("/proc/self/fd") else { return Vec::new() };
    let mut numbers: Vec<RawFd> =
        directory.filter_map(|e| e.ok()?.file_name().to_str()?.parse().ok()).collect();
    numbers.sort_unstable();
    // The directory's own descriptor was in its listing and is closed by now: `one` gives `None`
    // for it.
    described(numbers.into_iter())
}

fn described(numbers: impl Iterator<Item = RawFd>) -> Vec<Descriptor> {
    let mut found: Vec<Descriptor> = numbers.filter_map(one).collect();
    for index in 1..found.len() {
        found[index].same_as = shared_with(&found[..index], &found[index]);
    }
    found
}

/// An earlier descriptor that is a dup(2) of this one. Checked only for files, where it matters: a
/// pipe has no offset to share.
fn shared_with(earlier: &[Descriptor], this: &Descriptor) -> Option<u32> {
    if this.kind() != Kind::File {
        return None;
    }
    let candidates = earlier.iter().filter(|d| (d.device, d.inode) == (this.device, this.inode));
    candidates
        .map(|d| d.fd)
        .find(|&fd| process::same_description(fd.cast_signed(), this.fd.cast_signed()))
}

/// Describes one descriptor; `None` when it is not open.
pub fn one(fd: RawFd) -> Option<Descriptor> {
    let borrowed = borrow(fd);
    let stat = fstat(borrowed).ok()?;
    let kind = kind_of(&stat);
    let flags = fcntl(borrowed, FcntlArg::F_GETFL).ok()?;
    let path = fs::read_link(format!("/proc/self/fd/{fd}")).ok()?;
    let mut found = Descriptor {
        fd: fd.cast_unsigned(),
        kind: kind.into(),
        path: path.as_os_str().as_bytes().to_vec().into(),
        device: stat.st_dev,
        inode: stat.st_ino,
        flags: flags.cast_unsigned(),
        offset: 0,
        queued_bytes: 0,
        same_as: None,
        mount_id: 0,
    };
    match kind {
        Kind::File => {
            found.offset = lseek(borrowed, 0, Whence::SeekCur).ok()?.cast_unsigned();
            found.mount_id = mount_id(borrowed);
        }
        Kind::Pipe => found.queued_bytes = rustix::io::ioctl_fionread(borrowed).unwrap_or(0),
        _ => {}
    }
    Some(found)
}

/// Returns true if the descriptor is a pipe or a FIFO. One system call, since every local command
/// makes it.
pub fn is_pipe(fd: RawFd) -> bool {
    fstat(borrow(fd)).is_ok_and(|stat| kind_of(&stat) == Kind::Pipe)
}

fn kind_of(stat: &FileStat) -> Kind {
    let major = nix::sys::stat::major(stat.st_rdev);
    match SFlag::from_bits_truncate(stat.st_mode) & SFlag::S_IFMT {
        SFlag::S_IFREG => Kind::File,
        SFlag::S_IFDIR => Kind::Directory,
        SFlag::S_IFIFO => Kind::Pipe,
        SFlag::S_IFSOCK => Kind::Socket,
        SFlag::S_IFCHR if stat.st_rdev == NULL_DEVICE => Kind::Null,
        SFlag::S_IFCHR if TTY_MAJORS.contains(&major) => Kind::Tty,
        _ => Kind::Other,
    }
}

/// A descriptor that the shell has opened.
pub fn borrow(fd: RawFd) -> BorrowedFd<'static> {
    process::inherited(fd)
}
