//! Conversion of the kernel's numbers and flags to and from our types.

use std::{
    ffi::{OsStr, OsString},
    fs,
    ops::Range,
    os::unix::ffi::OsStrExt,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use fuser::{FileAttr, FileType, INodeNo, ReplyLock, ReplyXattr, Request, TimeOrNow};
use nix::{
    fcntl::{FallocateFlags, OFlag},
    libc,
};

use super::Users;
use crate::{
    fs::{Name, ROOT, Told},
    store::{
        Access, Acls, Allocation, AttributeChange, Caller, Errno, Kind, NewMode, NewTime,
        OpenFlags, RangeLock, Sought, Time,
    },
};

/// Bit that is in no number of a file that the kernel was sent.
const NOBODY: u64 = 1 << 63;

/// Attributes of a negative entry: number 0.
pub(super) const NOTHING: FileAttr = FileAttr {
    ino: INodeNo(0),
    size: 0,
    blocks: 0,
    atime: UNIX_EPOCH,
    mtime: UNIX_EPOCH,
    ctime: UNIX_EPOCH,
    crtime: UNIX_EPOCH,
    kind: FileType::RegularFile,
    perm: 0,
    nlink: 0,
    uid: 0,
    gid: 0,
    rdev: 0,
    blksize: 0,
    flags: 0,
};

/// Preferred size for read(2) and write(2) (st_blksize).
const BLOCK_BYTES: u32 = 4096;

pub(super) fn error(errno: Errno) -> fuser::Errno {
    fuser::Errno::from_i32(errno as i32)
}

/// Returns the caller of a request; on a mount for all users with the supplementary groups of its
/// process.
pub(super) fn caller(request: &Request, users: Users) -> Caller {
    let is_guest = users == Users::All && request.uid() != 0;
    let groups = if is_guest { groups(request.pid()) } else { Vec::new() };
    Caller { uid: request.uid(), gid: request.gid(), groups: groups.into(), is_guest }
}

/// Returns the groups of a process (proc_pid_status(5)); none if it is gone.
fn groups(process: u32) -> Vec<u32> {
    let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("Groups:")).unwrap_or_default();
    line.split_ascii_whitespace().filter_map(|group| group.parse().ok()).collect()
}

/// Returns true if a thread has a pending signal that is neither blocked nor ignored, or is gone.
pub(super) fn is_interrupted(thread: u32) -> bool {
    let Ok(status) = fs::read_to_string(format!("/proc/{thread}/status")) else { return true };
    let mask = |name| mask_in(&status, name);
    (mask("SigPnd:") | mask("ShdPnd:")) & !(mask("SigBlk:") | mask("SigIgn:")) != 0
}

/// Returns true if a thread has been killed by a signal, but has not exited yet. Any fatal signal
/// becomes a SIGKILL for each thread of the process (signal(7), kernel/signal.c). A thread that
/// this process can't see (another PID namespace, or gone) counts as not killed.
pub(super) fn is_killed(thread: u32) -> bool {
    const KILL: u64 = 1 << (nix::libc::SIGKILL - 1);
    let Ok(status) = fs::read_to_string(format!("/proc/{thread}/status")) else { return false };
    (mask_in(&status, "SigPnd:") | mask_in(&status, "ShdPnd:")) & KILL != 0
        || ends_by_signal(thread)
}

/// Returns true if a thread is exiting by a signal, and is closing its files: `flags` and
/// `exit_code` of proc_pid_stat(5).
fn ends_by_signal(thread: u32) -> bool {
    const EXITING: u64 = 4;
    const SIGNAL: u64 = 0x7f;
    let Ok(stat) = fs::read_to_string(format!("/proc/{thread}/stat")) else { return false };
    // The name may contain spaces and parentheses; `state` is the third field.
    let Some((_, fields)) = stat.rsplit_once(") ") else { return false };
    let field = |number: usize| {
        fields.split(' ').nth(number - 3).and_then(|field| field.trim().parse::<u64>().ok())
    };
    field(9).is_some_and(|flags| flags & EXITING != 0)
        && field(52).is_some_and(|code| code & SIGNAL != 0)
}

/// Parses a signal mask in the text of /proc/PID/status.
fn mask_in(status: &str, name: &str) -> u64 {
    let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default();
    u64::from_str_radix(line.trim(), 16).unwrap_or(0)
}

pub(super) fn attr(told: &Told) -> FileAttr {
    let attributes = &told.attributes;
    // ls(1) shows the root's real number; the kernel knows the root by another.
    let number = if told.number == ROOT { attributes.id.inode } else { told.number };
    FileAttr {
        ino: INodeNo(number),
        size: attributes.size,
        blocks: attributes.blocks,
        atime: system_time(attributes.atime),
        mtime: system_time(attributes.mtime),
        ctime: system_time(attributes.ctime),
        crtime: UNIX_EPOCH,
        kind: file_type(attributes.kind),
        perm: u16::try_from(attributes.mode & 0o7777).unwrap_or_default(),
        nlink: attributes.links,
        uid: attributes.uid,
        gid: attributes.gid,
        rdev: kernel_device(attributes.rdev),
        blksize: BLOCK_BYTES,
        flags: 0,
    }
}

/// Returns a directory entry without attributes. fuser sends its number as the inode's, too, which
/// the kernel uses for all names but `.` and `..`: so it must not be the number of a file that the
/// kernel knows, which may be another one by now.
pub(super) fn name_only(name: &Name) -> FileAttr {
    let is_dots = name.name == OsStr::new(".") || name.name == OsStr::new("..");
    let number = if is_dots { name.inode } else { name.inode | NOBODY };
    FileAttr { ino: INodeNo(number), kind: file_type(name.kind), ..NOTHING }
}

pub(super) fn file_type(kind: Kind) -> FileType {
    match kind {
        Kind::Regular => FileType::RegularFile,
        Kind::Directory => FileType::Directory,
        Kind::Symlink => FileType::Symlink,
        Kind::Fifo => FileType::NamedPipe,
        Kind::Socket => FileType::Socket,
        Kind::BlockDevice => FileType::BlockDevice,
        Kind::CharacterDevice => FileType::CharDevice,
    }
}

pub(super) fn kind_of_mode(mode: u32) -> Kind {
    match mode & libc::S_IFMT {
        libc::S_IFIFO => Kind::Fifo,
        libc::S_IFSOCK => Kind::Socket,
        libc::S_IFBLK => Kind::BlockDevice,
        libc::S_IFCHR => Kind::CharacterDevice,
        _ => Kind::Regular,
    }
}

/// Encodes a device number in the kernel's 32 bits (`new_encode_dev`).
fn kernel_device(device: u64) -> u32 {
    let (major, minor) = (libc::major(device), libc::minor(device));
    (minor & 0xff) | (major << 8) | ((minor & !0xff) << 12)
}

/// Decodes the kernel's 32 bits to a device number.
pub(super) fn device(device: u32) -> u64 {
    libc::makedev((device & 0xfff00) >> 8, (device & 0xff) | ((device >> 12) & 0xfff00))
}

fn system_time(time: Time) -> SystemTime {
    let nanoseconds = Duration::from_nanos(u64::from(time.nanoseconds));
    let seconds = Duration::from_secs(time.seconds.unsigned_abs());
    let whole = if time.seconds < 0 {
        UNIX_EPOCH.checked_sub(seconds)
    } else {
        UNIX_EPOCH.checked_add(seconds)
    };
    whole.and_then(|whole| whole.checked_add(nanoseconds)).unwrap_or(UNIX_EPOCH)
}

pub(super) fn new_time(time: TimeOrNow) -> NewTime {
    let TimeOrNow::SpecificTime(time) = time else { return NewTime::Now };
    let time = match time.duration_since(UNIX_EPOCH) {
        Ok(after) => Time { seconds: seconds(after), nanoseconds: after.subsec_nanos() },
        Err(before) => match before.duration() {
            before if before.subsec_nanos() == 0 => {
                Time { seconds: -seconds(before), nanoseconds: 0 }
            }
            before => Time {
                seconds: -seconds(before) - 1,
                nanoseconds: 1_000_000_000 - before.subsec_nanos(),
            },
        },
    };
    NewTime::At(time)
}

fn seconds(duration: Duration) -> i64 {
    i64::try_from(duration.as_secs()).unwrap_or(i64::MAX)
}

pub(super) fn open_flags(flags: i32) -> OpenFlags {
    let mut open = match flags & libc::O_ACCMODE {
        libc::O_RDONLY => OpenFlags::READ,
        libc::O_WRONLY => OpenFlags::WRITE,
        _ => OpenFlags::READ | OpenFlags::WRITE,
    };
    let given = OFlag::from_bits_truncate(flags);
    for (flag, meaning) in [
        (OFlag::O_APPEND, OpenFlags::APPEND),
        (OFlag::O_TRUNC, OpenFlags::TRUNCATE),
        (OFlag::O_EXCL, OpenFlags::EXCLUSIVE),
        (OFlag::O_DIRECT, OpenFlags::DIRECT),
    ] {
        open.set(meaning, given.contains(flag));
    }
    open
}

/// Flags of setxattr(2).
pub(super) fn attribute_change(flags: i32) -> Option<AttributeChange> {
    match flags {
        0 => Some(AttributeChange::Any),
        libc::XATTR_CREATE => Some(AttributeChange::Create),
        libc::XATTR_REPLACE => Some(AttributeChange::Replace),
        _ => None,
    }
}

/// Returns true if an extended attribute is forwarded to the server. Others have a meaning for the
/// server's kernel, or are read by every `ls -l`. ACLs are forwarded if this kernel checks them.
pub(super) fn is_passed_on(attribute: &OsStr, users: Users) -> bool {
    let is_open =
        [&b"user."[..], b"trusted."].iter().any(|prefix| attribute.as_bytes().starts_with(prefix));
    is_open || users == Users::All && Acls::named(attribute).is_some()
}

/// Returns the permissions of a new file.
pub(super) fn new_mode(mode: u32, umask: u32) -> NewMode {
    NewMode::new(mode & 0o7777, umask & 0o777)
}

/// Encodes the answer to listxattr(2).
pub(super) fn names_of_attributes(names: Vec<OsString>, users: Users) -> Vec<u8> {
    let passed_on = names.iter().filter(|name| is_passed_on(name, users));
    passed_on.flat_map(|name| name.as_bytes().iter().copied().chain([0])).collect()
}

/// Replies with a value, or with its size if `room` is 0.
pub(super) fn sized(reply: ReplyXattr, value: &[u8], room: u32) {
    match u32::try_from(value.len()) {
        Ok(length) if room == 0 => reply.size(length),
        Ok(length) if length <= room => reply.data(value),
        _ => reply.error(fuser::Errno::ERANGE),
    }
}

pub(super) fn access(typ: i32) -> Option<Access> {
    match typ {
        libc::F_RDLCK => Some(Access::Shared),
        libc::F_WRLCK => Some(Access::Exclusive),
        _ => None,
    }
}

/// Converts the kernel's inclusive range, in which the largest offset means no end.
pub(super) fn lock_range(start: u64, last: u64) -> Range<u64> {
    if last >= i64::MAX.cast_unsigned() { start..u64::MAX } else { start..last + 1 }
}

pub(super) fn lock(reply: ReplyLock, found: Option<RangeLock>) {
    let Some(found) = found else { return reply.locked(0, 0, libc::F_UNLCK, 0) };
    let typ = if found.access == Some(Access::Shared) { libc::F_RDLCK } else { libc::F_WRLCK };
    let last = if found.range.end == u64::MAX {
        i64::MAX.cast_unsigned()
    } else {
        found.range.end.saturating_sub(1)
    };
    // A process of another machine has no PID here.
    reply.locked(found.range.start, last, typ, 0);
}

/// Modes of fallocate(2).
pub(super) fn allocation(mode: i32) -> Option<Allocation> {
    let keep = FallocateFlags::FALLOC_FL_KEEP_SIZE;
    let zero = FallocateFlags::FALLOC_FL_ZERO_RANGE;
    match FallocateFlags::from_bits(mode)? {
        mode if mode.is_empty() => Some(Allocation::Extend),
        mode if mode == keep => Some(Allocation::KeepSize),
        mode if mode == FallocateFlags::FALLOC_FL_PUNCH_HOLE | keep => Some(Allocation::PunchHole),
        mode if mode == zero => Some(Allocation::ZeroRange),
        mode if mode == zero | keep => Some(Allocation::ZeroRangeKeepSize),
        mode if mode == FallocateFlags::FALLOC_FL_COLLAPSE_RANGE => Some(Allocation::CollapseRange),
        mode if mode == FallocateFlags::FALLOC_FL_INSERT_RANGE => Some(Allocation::InsertRange),
        _ => None,
    }
}

pub(super) fn sought(whence: i32) -> Option<Sought> {
    match whence {
        libc::SEEK_DATA => Some(Sought::Data),
        libc::SEEK_HOLE => Some(Sought::Hole),
        _ => None,
    }
}
