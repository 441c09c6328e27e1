//! System calls without a safe wrapper: file handles, credentials of one thread, and fanotify(7).
#![allow(
    unsafe_code,
    reason = "nix and rustix have none of these calls, or not for one thread only"
)]

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

/// Size of the longest file handle (MAX_HANDLE_SZ).
const MAX_HANDLE_BYTES: usize = 128;
/// File systems' types (statfs(2)).
pub const BTRFS: u64 = 0x9123_683e;
pub const TMPFS: u64 = 0x0102_1994;
/// Number of a Btrfs file system's top-level subvolume (BTRFS_FS_TREE_OBJECTID).
const TOP_LEVEL: u64 = 5;
/// Flag for a handle that only identifies a file and can't be opened; more file systems support it
/// (name_to_handle_at(2), Linux 6.5).
const AT_HANDLE_FID: libc::c_int = 0x200;

/// File handle (name_to_handle_at(2)), which identifies a file as long as it exists.
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
    /// Parses a `struct file_handle`: length, kind, bytes.
    pub fn from_record(record: &[u8]) -> Option<Self> {
        let (length, rest) = record.split_first_chunk::<4>()?;
        let (kind, rest) = rest.split_first_chunk::<4>()?;
        let bytes = rest.get(..u32::from_ne_bytes(*length) as usize)?;
        Some(Self { kind: i32::from_ne_bytes(*kind), bytes: bytes.into() })
    }

    /// Returns the number of the subvolume in a handle of Btrfs (`struct btrfs_fid`).
    fn subvolume(&self) -> Option<u64> {
        Some(u64::from_ne_bytes(self.bytes.get(8..16)?.try_into().ok()?))
    }

    /// Returns a hash, almost certainly unique within the file system.
    pub fn number(&self) -> u64 {
        digest(self.kind.cast_unsigned().into(), &self.bytes)
    }
}

/// Hashes a few bytes to 64 bits.
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

/// Purpose of a handle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// For [`open_handle`].
    Opening,
    /// For identification only.
    Telling,
}

/// Returns the handle of an open file.
pub fn handle_of(file: BorrowedFd<'_>, purpose: Purpose) -> nix::Result<Handle> {
    let mut handle =
        RawHandle { length: MAX_HANDLE_BYTES as u32, kind: 0, bytes: [0; MAX_HANDLE_BYTES] };
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

/// Returns the id of a file's whole file system, as in events about any of its files.
///
/// Btrfs shows another id in each subvolume: the file system's own with the subvolume's number
/// XORed into it (btrfs_statfs(), Linux fs/btrfs/super.c). Handles say which subvolume a file is
/// in, and are the same in all mounts. So the number is replaced by that of the top level, which
/// holds the file system's root.
pub fn system_of(file: BorrowedFd<'_>) -> nix::Result<u64> {
    let errno = |errno: rustix::io::Errno| Errno::from_raw(errno.raw_os_error());
    let shown = rustix::fs::fstatvfs(file).map_err(errno)?.f_fsid;
    if rustix::fs::fstatfs(file).map_err(errno)?.f_type.cast_unsigned() != BTRFS {
        return Ok(shown);
    }
    // Without handles (a container may forbid them) nothing is watched either.
    let subvolume = handle_of(file, Purpose::Opening).ok().and_then(|handle| handle.subvolume());
    Ok(subvolume.map_or(shown, |subvolume| id_of_whole(shown, subvolume)))
}

/// Both halves of an id are XORed: the first with the number's upper half, the second with the
/// lower one.
fn id_of_whole(shown: u64, subvolume: u64) -> u64 {
    shown ^ (subvolume ^ TOP_LEVEL).rotate_right(u32::BITS)
}

/// Opens a file by its handle (`O_PATH`), on the file system of `mount`. It uses a capability that
/// the caller may lack, so that the result must not be used before a check of the caller's access.
pub fn open_handle(mount: BorrowedFd<'_>, handle: &Handle) -> nix::Result<OwnedFd> {
    with_read_search(|| open_handle_as_now(mount, handle))
}

fn open_handle_as_now(mount: BorrowedFd<'_>, handle: &Handle) -> nix::Result<OwnedFd> {
    let mut raw = RawHandle {
        length: handle.bytes.len() as u32,
        kind: handle.kind,
        bytes: [0; MAX_HANDLE_BYTES],
    };
    raw.bytes.get_mut(..handle.bytes.len()).ok_or(Errno::EINVAL)?.copy_from_slice(&handle.bytes);
    let flags = libc::O_PATH | libc::O_CLOEXEC | libc::O_NOFOLLOW;
    // SAFETY: the handle's length is that of its bytes; the descriptor is new, and nobody else's.
    unsafe {
        let fd = libc::syscall(libc::SYS_open_by_handle_at, mount.as_raw_fd(), &raw mut raw, flags);
        Ok(OwnedFd::from_raw_fd(i32::try_from(Errno::result(fd)?).map_err(|_| Errno::EBADF)?))
    }
}

/// Gives this thread its own umask (and current directory).
pub fn unshare_umask() -> nix::Result<()> {
    // SAFETY: no pointers.
    Errno::result(unsafe { libc::unshare(libc::CLONE_FS) }).map(drop)
}

/// A set of capabilities: bit n is capability n (capabilities(7)).
type Capabilities = u64;

/// Root's capabilities on files: CHOWN, DAC_OVERRIDE, DAC_READ_SEARCH, FOWNER, FSETID. A caller
/// that is root has only these, as with nfsd (not SYS_ADMIN, SYS_RESOURCE, SETFCAP, MKNOD,
/// LINUX_IMMUTABLE and the rest).
const ROOTS_FILES: Capabilities = 0b1_1111;
/// FSETID.
const KEEPS_BITS: Capabilities = 1 << 4;
/// SETGID and SETUID: for switching to the next caller.
const CHANGES_USER: Capabilities = 1 << 6 | 1 << 7;
/// DAC_READ_SEARCH: for opening a file by its handle.
const READ_SEARCH: Capabilities = 1 << 2;
/// Limit of groups, more than accounts of a large site have; the kernel sorts them at each change.
const MAX_GROUPS: usize = 1024;

/// Guard during which this thread accesses files as another user, without capabilities that this
/// user lacks. Only root can create one.
pub struct Acting {
    groups: Vec<libc::gid_t>,
    uid: Uid,
    gid: Gid,
    permitted: Capabilities,
    /// `!Send`: it belongs to this thread.
    _not_send: std::marker::PhantomData<*const ()>,
}

impl Acting {
    /// Switches this thread to this process's own account, without CAP_FSETID; `None` if it has no
    /// capabilities.
    pub fn begin_as_guest() -> nix::Result<Option<Self>> {
        let (uid, gid) = file_ids();
        if uid != 0 {
            return Ok(None);
        }
        let groups = nix::unistd::getgroups()?.into_iter().map(Gid::as_raw).collect();
        Self::begin(&Caller { uid, gid, groups, is_guest: true }, false).map(Some)
    }

    /// Switches this thread to a caller. With `keeps_bits`, root's writes and changes of owner keep
    /// set-user-ID and set-group-ID bits (CAP_FSETID).
    pub fn begin(caller: &Caller, keeps_bits: bool) -> nix::Result<Self> {
        if caller.groups.len() > MAX_GROUPS {
            return Err(Errno::EINVAL);
        }
        let permitted = permitted_capabilities()?;
        let groups = nix::unistd::getgroups()?.into_iter().map(Gid::as_raw).collect();
        set_groups_of_thread(&caller.groups)?;
        // Both return the previous id. The group first: as another user we may not change it.
        let gid = setfsgid(Gid::from_raw(caller.gid));
        let uid = setfsuid(Uid::from_raw(caller.uid));
        let acting = Self { groups, uid, gid, permitted, _not_send: std::marker::PhantomData };
        // setfsuid(2) and setfsgid(2) don't report errors, such as for invalid ids.
        if file_ids() != (caller.uid, caller.gid) {
            return Err(Errno::EINVAL);
        }
        let rights = match caller.uid {
            0 if keeps_bits => ROOTS_FILES,
            0 => ROOTS_FILES & !KEEPS_BITS,
            _ => 0,
        };
        set_capabilities(permitted, permitted & rights)?;
        Ok(acting)
    }
}

impl Drop for Acting {
    fn drop(&mut self) {
        let restored = set_capabilities(self.permitted, self.permitted);
        setfsuid(self.uid);
        setfsgid(self.gid);
        let groups = set_groups_of_thread(&self.groups);
        // A thread with another user's rights must not serve the next caller.
        if restored.is_err()
            || groups.is_err()
            || file_ids() != (self.uid.as_raw(), self.gid.as_raw())
        {
            std::process::abort();
        }
    }
}

/// Drops all capabilities of this thread but those that [`Acting`] and [`open_handle`] need.
pub fn give_up_capabilities() -> nix::Result<()> {
    let kept = permitted_capabilities()? & (ROOTS_FILES | CHANGES_USER);
    set_capabilities(kept, kept)
}

/// Runs `action` with CAP_DAC_READ_SEARCH, if this thread may have it.
fn with_read_search<T>(action: impl FnOnce() -> nix::Result<T>) -> nix::Result<T> {
    let (effective, permitted) = capabilities()?;
    if effective & READ_SEARCH != 0 || permitted & READ_SEARCH == 0 {
        return action();
    }
    set_capabilities(permitted, effective | READ_SEARCH)?;
    let done = action();
    if set_capabilities(permitted, effective).is_err() {
        std::process::abort();
    }
    done
}

/// Returns this thread's filesystem uid and gid.
pub fn file_ids() -> (libc::uid_t, libc::gid_t) {
    // -1 changes nothing and returns the current id (setfsuid(2)).
    (
        setfsuid(Uid::from_raw(libc::uid_t::MAX)).as_raw(),
        setfsgid(Gid::from_raw(libc::gid_t::MAX)).as_raw(),
    )
}

const CAPABILITIES_VERSION_3: u32 = 0x2008_0522;

#[repr(C)]
struct CapabilityHeader {
    version: u32,
    pid: i32,
}

#[repr(C)]
#[derive(Default, Clone, Copy)]
struct CapabilityData {
    effective: u32,
    permitted: u32,
    inheritable: u32,
}

/// A capability, by its number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Capability {
    /// CAP_CHOWN.
    Chown = 0,
    /// CAP_FOWNER.
    Fowner = 3,
}

/// Returns true if this thread has the capability in its effective set.
pub fn has(capability: Capability) -> nix::Result<bool> {
    capabilities().map(|(effective, _)| effective & 1 << capability as u32 != 0)
}

fn permitted_capabilities() -> nix::Result<Capabilities> {
    capabilities().map(|(_, permitted)| permitted)
}

/// Returns this thread's effective and permitted capabilities.
fn capabilities() -> nix::Result<(Capabilities, Capabilities)> {
    let mut header = CapabilityHeader { version: CAPABILITIES_VERSION_3, pid: 0 };
    let mut data = [CapabilityData::default(); 2];
    // SAFETY: both structures are as capget(2) says for this version, and live across the call.
    Errno::result(unsafe { libc::syscall(libc::SYS_capget, &raw mut header, data.as_mut_ptr()) })?;
    let joined = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
    Ok((joined(data[0].effective, data[1].effective), joined(data[0].permitted, data[1].permitted)))
}

/// Sets this thread's capabilities.
fn set_capabilities(permitted: Capabilities, effective: Capabilities) -> nix::Result<()> {
    let mut header = CapabilityHeader { version: CAPABILITIES_VERSION_3, pid: 0 };
    let part = |shift: u32| CapabilityData {
        effective: (effective >> shift) as u32,
        permitted: (permitted >> shift) as u32,
        inheritable: 0,
    };
    let data = [part(0), part(32)];
    // SAFETY: both structures are as capset(2) says for this version, and live across the call.
    Errno::result(unsafe { libc::syscall(libc::SYS_capset, &raw mut header, data.as_ptr()) })
        .map(drop)
}

/// Sets this thread's groups; libc's function would set those of all threads.
fn set_groups_of_thread(groups: &[libc::gid_t]) -> nix::Result<()> {
    // SAFETY: as many numbers are read as the slice has.
    Errno::result(unsafe { libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr()) })
        .map(drop)
}

/// Creates a fanotify queue.
pub fn fanotify(flags: u32) -> nix::Result<OwnedFd> {
    let event_flags = (libc::O_RDONLY | libc::O_CLOEXEC | libc::O_LARGEFILE).cast_unsigned();
    // SAFETY: no pointers; the descriptor is new.
    unsafe {
        let fd = Errno::result(libc::fanotify_init(flags, event_flags))?;
        Ok(OwnedFd::from_raw_fd(fd))
    }
}

/// Adds a mark on `file`, or on its whole file system.
pub fn fanotify_mark(
    queue: BorrowedFd<'_>,
    flags: u32,
    events: u64,
    file: BorrowedFd<'_>,
) -> nix::Result<()> {
    // SAFETY: with a null path the descriptor itself is meant (fanotify_mark(2)).
    let done = unsafe {
        libc::fanotify_mark(queue.as_raw_fd(), flags, events, file.as_fd().as_raw_fd(), ptr::null())
    };
    Errno::result(done).map(drop)
}

/// One event of a queue.
#[derive(Debug)]
pub struct Event {
    /// `FAN_*`.
    pub mask: u64,
    /// Process that caused it.
    pub pid: i32,
    /// The files that it is about.
    pub files: Vec<EventFile>,
}

/// A file of an event.
#[derive(Debug)]
pub struct EventFile {
    /// `FAN_EVENT_INFO_TYPE_*`.
    pub kind: u8,
    /// The file system's id, as from statvfs(3).
    pub system: u64,
    /// The file.
    pub handle: Handle,
    /// The name in the directory, or empty.
    pub name: Vec<u8>,
}

/// Parses the bytes that were read from a queue.
pub fn events(mut read: &[u8]) -> Vec<Event> {
    const HEADER_BYTES: usize = mem::size_of::<libc::fanotify_event_metadata>();
    let mut events = Vec::new();
    while read.len() >= HEADER_BYTES {
        // SAFETY: there are enough bytes, and any are valid for this structure of numbers.
        let event: libc::fanotify_event_metadata =
            unsafe { ptr::read_unaligned(read.as_ptr().cast()) };
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

/// Parses an event's records. Each has: kind (a byte), padding (a byte), length (two bytes), file
/// system id (eight bytes), handle, name.
fn event_files(mut records: &[u8]) -> Vec<EventFile> {
    const FSID: ops::Range<usize> = 4..12;
    const LENGTH: ops::Range<usize> = 2..4;
    let mut files = Vec::new();
    while let Some(length) = records.get(LENGTH).and_then(|bytes| <[u8; 2]>::try_from(bytes).ok()) {
        let Some((record, rest)) = records.split_at_checked(u16::from_ne_bytes(length).into())
        else {
            break;
        };
        records = rest;
        let (Some(system), Some(handle)) = (record.get(FSID), record.get(FSID.end..)) else {
            break;
        };
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
    fn nobody_acts_with_more_than_root_may_do_with_files() {
        if !nix::unistd::geteuid().is_root() {
            return;
        }
        let thread = std::thread::spawn(|| {
            give_up_capabilities().unwrap();
            let (own, _) = capabilities().unwrap();
            assert_eq!(own & !(ROOTS_FILES | CHANGES_USER), 0);
            for (uid, expected) in [(0, ROOTS_FILES), (1234, 0)] {
                let caller =
                    Caller { uid, gid: uid, groups: vec![uid, 77].into(), is_guest: false };
                let acting = Acting::begin(&caller, true).unwrap();
                assert_eq!(capabilities().unwrap().0, expected & own, "{uid}");
                assert_eq!(file_ids(), (uid, uid));
                let effective = with_read_search(|| Ok(capabilities()?.0)).unwrap();
                assert_ne!(effective & READ_SEARCH, 0);
                assert_eq!(capabilities().unwrap().0, expected & own, "{uid}");
                drop(acting);
                assert_eq!((capabilities().unwrap().0, file_ids()), (own, (0, 0)));
            }
            // A number that setfsuid(2) does not take leaves root's.
            for (uid, gid) in [(u32::MAX, 5), (5, u32::MAX)] {
                assert!(
                    Acting::begin(
                        &Caller { uid, gid, groups: Vec::new().into(), is_guest: false },
                        true
                    )
                    .is_err()
                );
                assert_eq!((capabilities().unwrap().0, file_ids()), (own, (0, 0)));
            }
            let groups = vec![1; MAX_GROUPS + 1].into();
            assert!(
                Acting::begin(&Caller { uid: 5, gid: 5, groups, is_guest: false }, true).is_err()
            );
        });
        thread.join().unwrap();
    }

    /// As seen on Linux 6.18: in the bytes' order, the top level and subvolume 256 of one.
    #[test]
    fn subvolumes_of_a_file_system_have_one_id() {
        let top = u64::from_le_bytes([0xf7, 0xfe, 0xbf, 0x09, 0x71, 0x15, 0x60, 0x5e]);
        let shown = u64::from_le_bytes([0xf7, 0xfe, 0xbf, 0x09, 0x74, 0x14, 0x60, 0x5e]);
        assert_eq!((id_of_whole(top, 5), id_of_whole(shown, 256)), (top, top));
    }

    #[test]
    fn digests_differ() {
        let all: std::collections::HashSet<u64> =
            (0..10_000_u32).map(|n| digest(1, &n.to_le_bytes())).collect();
        assert_eq!(all.len(), 10_000);
        assert_ne!(digest(1, &[0]), digest(1, &[0, 0]));
    }
}
