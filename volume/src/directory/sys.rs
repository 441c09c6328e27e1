//! System calls that no safe crate has: file handles, the rights of one thread, and fanotify(7). Knows nothing of
//! volumes.
#![allow(unsafe_code, reason = "nix and rustix have none of these calls, or not for one thread only")]

use std::{
    mem, ops,
    os::fd::{AsFd, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd},
    ptr,
};

use nix::{
    errno::Errno,
    libc,
    unistd::{Gid, Uid, setfsgid, setfsuid},
};

use crate::store::Caller;

/// The longest handle that the kernel makes (MAX_HANDLE_SZ).
const MAX_HANDLE_BYTES: usize = 128;
/// A handle that only tells files apart; more file systems make these (name_to_handle_at(2), Linux 6.5).
const AT_HANDLE_FID: libc::c_int = 0x200;

/// What a file system calls a file, for as long as it exists.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Handle {
    kind: i32,
    bytes: Box<[u8]>,
}

#[repr(C)]
struct RawHandle {
    length: u32,
    kind: i32,
    bytes: [u8; MAX_HANDLE_BYTES],
}

impl Handle {
    /// As a record of the kernel's has it: the length, the kind, the bytes.
    pub fn from_record(record: &[u8]) -> Option<Self> {
        let (length, rest) = record.split_first_chunk::<4>()?;
        let (kind, rest) = rest.split_first_chunk::<4>()?;
        let bytes = rest.get(..u32::from_ne_bytes(*length) as usize)?;
        Some(Self { kind: i32::from_ne_bytes(*kind), bytes: bytes.into() })
    }

    /// A number that no other file of the file system has, by all probability.
    pub fn number(&self) -> u64 {
        digest(self.kind.cast_unsigned().into(), &self.bytes)
    }
}

/// 64 well-mixed bits of a few bytes.
pub fn digest(start: u64, bytes: &[u8]) -> u64 {
    const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;
    let mix = |state: u64, word: u64| {
        let product = u128::from(state ^ word ^ FACTOR) * u128::from(FACTOR | 1);
        (product as u64) ^ ((product >> 64) as u64).rotate_left(31)
    };
    let start = mix(start, bytes.len() as u64);
    let words = bytes.chunks(8).map(|chunk| {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        u64::from_le_bytes(word)
    });
    mix(words.fold(start, mix), FACTOR)
}

/// What kind of handle is wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// One that [`open_handle`] takes.
    Opening,
    /// One to tell files apart.
    Telling,
}

/// The handle of an open file.
pub fn handle_of(file: BorrowedFd<'_>, purpose: Purpose) -> nix::Result<Handle> {
    let mut handle = RawHandle { length: MAX_HANDLE_BYTES as u32, kind: 0, bytes: [0; MAX_HANDLE_BYTES] };
    let mut mount = 0_i32;
    let flags = libc::AT_EMPTY_PATH | if purpose == Purpose::Telling { AT_HANDLE_FID } else { 0 };
    // SAFETY: the path is a C string, the handle has room for as many bytes as its length says.
    let done = unsafe {
        libc::syscall(
            libc::SYS_name_to_handle_at,
            file.as_raw_fd(),
            c"".as_ptr(),
            &raw mut handle,
            &raw mut mount,
            flags,
        )
    };
    Errno::result(done)?;
    let bytes = handle.bytes.get(..handle.length as usize).ok_or(Errno::EOVERFLOW)?;
    Ok(Handle { kind: handle.kind, bytes: bytes.into() })
}

/// Opens a file by its handle (`O_PATH`), on the file system that `mount` is a file of. Needs CAP_DAC_READ_SEARCH.
pub fn open_handle(mount: BorrowedFd<'_>, handle: &Handle) -> nix::Result<OwnedFd> {
    let mut raw = RawHandle { length: handle.bytes.len() as u32, kind: handle.kind, bytes: [0; MAX_HANDLE_BYTES] };
    raw.bytes.get_mut(..handle.bytes.len()).ok_or(Errno::EINVAL)?.copy_from_slice(&handle.bytes);
    let flags = libc::O_PATH | libc::O_CLOEXEC | libc::O_NOFOLLOW;
    // SAFETY: the handle's length is that of its bytes; the descriptor is new, and nobody else's.
    unsafe {
        let fd = libc::syscall(libc::SYS_open_by_handle_at, mount.as_raw_fd(), &raw mut raw, flags);
        Ok(OwnedFd::from_raw_fd(i32::try_from(Errno::result(fd)?).map_err(|_| Errno::EBADF)?))
    }
}

/// From now on this thread has a umask (and a current directory) of its own.
pub fn unshare_umask() -> nix::Result<()> {
    // SAFETY: no pointers.
    Errno::result(unsafe { libc::unshare(libc::CLONE_FS) }).map(drop)
}

/// While it lives, this thread reads, writes and owns files as somebody else. Only root can make one.
pub struct Acting {
    groups: Vec<libc::gid_t>,
    uid: Uid,
    gid: Gid,
    /// It is this thread's.
    _not_send: std::marker::PhantomData<*const ()>,
}

impl Acting {
    /// Begins to.
    pub fn begin(caller: &Caller) -> nix::Result<Self> {
        let groups = nix::unistd::getgroups()?.into_iter().map(Gid::as_raw).collect();
        set_groups_of_thread(&caller.groups)?;
        // Each gives what was before. The group first: as another user we may not.
        let gid = setfsgid(Gid::from_raw(caller.gid));
        let uid = setfsuid(Uid::from_raw(caller.uid));
        Ok(Self { groups, uid, gid, _not_send: std::marker::PhantomData })
    }
}

impl Drop for Acting {
    fn drop(&mut self) {
        setfsuid(self.uid);
        setfsgid(self.gid);
        let _ = set_groups_of_thread(&self.groups);
    }
}

/// libc's own function sets the groups of all threads.
fn set_groups_of_thread(groups: &[libc::gid_t]) -> nix::Result<()> {
    // SAFETY: as many numbers are read as the slice has.
    Errno::result(unsafe { libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr()) }).map(drop)
}

/// A queue of what happens in file systems.
pub fn fanotify(flags: u32) -> nix::Result<OwnedFd> {
    let event_flags = (libc::O_RDONLY | libc::O_CLOEXEC | libc::O_LARGEFILE).cast_unsigned();
    // SAFETY: no pointers; the descriptor is new.
    unsafe {
        let fd = Errno::result(libc::fanotify_init(flags, event_flags))?;
        Ok(OwnedFd::from_raw_fd(fd))
    }
}

/// Has the queue get events of `file`, or of its whole file system.
pub fn fanotify_mark(queue: BorrowedFd<'_>, flags: u32, events: u64, file: BorrowedFd<'_>) -> nix::Result<()> {
    // SAFETY: with a null path the descriptor itself is meant (fanotify_mark(2)).
    let done = unsafe { libc::fanotify_mark(queue.as_raw_fd(), flags, events, file.as_fd().as_raw_fd(), ptr::null()) };
    Errno::result(done).map(drop)
}

/// One event of a queue.
#[derive(Debug)]
pub struct Event {
    /// `FAN_*`.
    pub mask: u64,
    /// Of whoever did it.
    pub pid: i32,
    /// What it is about.
    pub files: Vec<EventFile>,
}

/// A file of an event.
#[derive(Debug)]
pub struct EventFile {
    /// `FAN_EVENT_INFO_TYPE_*`.
    pub kind: u8,
    /// The file system, as statvfs(3) has it.
    pub system: u64,
    /// The file.
    pub handle: Handle,
    /// In a directory; empty for none.
    pub name: Vec<u8>,
}

/// Takes apart what was read from a queue.
pub fn events(mut read: &[u8]) -> Vec<Event> {
    const HEADER_BYTES: usize = mem::size_of::<libc::fanotify_event_metadata>();
    let mut events = Vec::new();
    while read.len() >= HEADER_BYTES {
        // SAFETY: there are enough bytes, and any are valid for this structure of numbers.
        let event: libc::fanotify_event_metadata = unsafe { ptr::read_unaligned(read.as_ptr().cast()) };
        let Some((whole, rest)) = read.split_at_checked(event.event_len as usize) else { break };
        let Some(records) = whole.get(event.metadata_len.into()..) else { break };
        events.push(Event { mask: event.mask, pid: event.pid, files: event_files(records) });
        if whole.is_empty() {
            break;
        }
        read = rest;
    }
    events
}

/// Each record: its kind, a byte of padding, two bytes of length; the file system's eight bytes; the handle; the name.
fn event_files(mut records: &[u8]) -> Vec<EventFile> {
    const FSID: ops::Range<usize> = 4..12;
    const LENGTH: ops::Range<usize> = 2..4;
    let mut files = Vec::new();
    while let Some(length) = records.get(LENGTH).and_then(|bytes| <[u8; 2]>::try_from(bytes).ok()) {
        let Some((record, rest)) = records.split_at_checked(u16::from_ne_bytes(length).into()) else { break };
        records = rest;
        let (Some(system), Some(handle)) = (record.get(FSID), record.get(FSID.end..)) else { break };
        let system = <[u8; 8]>::try_from(system).map_or(0, u64::from_ne_bytes);
        let Some(parsed) = Handle::from_record(handle) else { continue };
        let name = handle.get(8 + parsed.bytes.len()..).unwrap_or_default();
        let name = name.split(|byte| *byte == 0).next().unwrap_or_default().to_vec();
        files.push(EventFile { kind: record[0], system, handle: parsed, name });
    }
    files
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_kernel_did_not_write_is_survived() {
        for bytes in [&[][..], &[0; 24], &[0xff; 100], &[1, 2, 3]] {
            let _ = events(bytes);
            let _ = event_files(bytes);
            let _ = Handle::from_record(bytes);
        }
    }

    #[test]
    fn digests_differ() {
        let all: std::collections::HashSet<u64> = (0..10_000_u32).map(|n| digest(1, &n.to_le_bytes())).collect();
        assert_eq!(all.len(), 10_000);
        assert_ne!(digest(1, &[0]), digest(1, &[0, 0]));
    }
}
