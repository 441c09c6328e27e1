//! Numbers and flags of the kernel's interface, and what they are called here.

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

/// No file that is told of has a number with this bit.
const NOBODY: u64 = 1 << 63;

/// What goes with a name that is not there: number 0.
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

/// What read(2) and write(2) do best with: the unit of st_blksize.
const BLOCK_BYTES: u32 = 4096;

pub(super) fn error(errno: Errno) -> fuser::Errno {
    fuser::Errno::from_i32(errno as i32)
}

/// With whose rights: on a mount for everybody with all groups of the process that asks.
pub(super) fn caller(request: &Request, users: Users) -> Caller {
    let groups =
        if users == Users::All && request.uid() != 0 { groups(request.pid()) } else { Vec::new() };
    Caller { uid: request.uid(), gid: request.gid(), groups: groups.into() }
}

/// Of a process, as proc_pid_status(5) has them; none of one that has gone.
fn groups(process: u32) -> Vec<u32> {
    let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("Groups:")).unwrap_or_default();
    line.split_ascii_whitespace().filter_map(|group| group.parse().ok()).collect()
}

/// Whether a thread has a signal waiting that it does not hold back.
pub(super) fn is_interrupted(thread: u32) -> bool {
    let Ok(status) = fs::read_to_string(format!("/proc/{thread}/status")) else { return true };
    let mask = |name| mask_in(&status, name);
    (mask("SigPnd:") | mask("ShdPnd:")) & !(mask("SigBlk:") | mask("SigIgn:")) != 0
}

/// Whether a thread has been killed by a signal, and ends as soon as nothing holds it. Any signal
/// that ends a process becomes a SIGKILL for each of its threads (signal(7), kernel/signal.c). One
/// that does not see it here (another process namespace, a thread that is gone) does not wait for
/// an answer that it can be given.
pub(super) fn is_killed(thread: u32) -> bool {
    const KILL: u64 = 1 << (nix::libc::SIGKILL - 1);
    let Ok(status) = fs::read_to_string(format!("/proc/{thread}/status")) else { return false };
    (mask_in(&status, "SigPnd:") | mask_in(&status, "ShdPnd:")) & KILL != 0
        || ends_by_signal(thread)
}

/// It has begun to end, by a signal, and closes its files: `flags` and `exit_code` of
/// proc_pid_stat(5).
fn ends_by_signal(thread: u32) -> bool {
    const EXITING: u64 = 4;
    const SIGNAL: u64 = 0x7f;
    let Ok(stat) = fs::read_to_string(format!("/proc/{thread}/stat")) else { return false };
    // The name before may have spaces and parentheses in it; `state` is the third field.
    let Some((_, fields)) = stat.rsplit_once(") ") else { return false };
    let field = |number: usize| {
        fields.split(' ').nth(number - 3).and_then(|field| field.trim().parse::<u64>().ok())
    };
    field(9).is_some_and(|flags| flags & EXITING != 0)
        && field(52).is_some_and(|code| code & SIGNAL != 0)
}

/// A mask of signals in a text of /proc/PID/status.
fn mask_in(status: &str, name: &str) -> u64 {
    let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default();
    u64::from_str_radix(line.trim(), 16).unwrap_or(0)
}

pub(super) fn attr(told: &Told) -> FileAttr {
    let attributes = &told.attributes;
    // The root's own number is what ls(1) shows; the kernel knows the root by another.
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

/// A directory entry without attributes. fuser gives the kernel this number as the file's, too: the
/// kernel heeds it for all names but `.` and `..`, and must not take what it knows by that number
/// for a file that has become another.
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

/// The kernel's 32 bits (`new_encode_dev`) for a device number.
fn kernel_device(device: u64) -> u32 {
    let (major, minor) = (libc::major(device), libc::minor(device));
    (minor & 0xff) | (major << 8) | ((minor & !0xff) << 12)
}

/// And back.
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

/// Others mean something to the server's kernel, or are asked for with every `ls -l`. ACLs are
/// where this kernel heeds them.
pub(super) fn is_passed_on(attribute: &OsStr, users: Users) -> bool {
    let is_open =
        [&b"user."[..], b"trusted."].iter().any(|prefix| attribute.as_bytes().starts_with(prefix));
    is_open || users == Users::All && Acls::named(attribute).is_some()
}

/// Permissions of something new. Without [`InitFlags::FUSE_DONT_MASK`] the kernel has applied the
/// umask.
///
/// [`InitFlags::FUSE_DONT_MASK`]: fuser::InitFlags::FUSE_DONT_MASK
pub(super) fn new_mode(mode: u32, umask: u32, users: Users) -> NewMode {
    let umask = if users == Users::All { umask & 0o777 } else { 0 };
    NewMode::new(mode & 0o7777, umask)
}

/// The answer to listxattr(2).
pub(super) fn names_of_attributes(names: Vec<OsString>, users: Users) -> Vec<u8> {
    let passed_on = names.iter().filter(|name| is_passed_on(name, users));
    passed_on.flat_map(|name| name.as_bytes().iter().copied().chain([0])).collect()
}

/// Room for 0 bytes asks how much is needed.
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

/// The kernel's ranges have their last byte, and end with the largest offset if they have no end.
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
    // A process of another machine has no number here.
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
