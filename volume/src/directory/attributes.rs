//! File attributes: statx(2), chown, chmod, utimensat, statfs, and extended attributes.

use std::{
    ffi::{CStr, OsStr, OsString},
    os::{
        fd::{AsFd, AsRawFd as _, BorrowedFd},
        unix::ffi::{OsStrExt as _, OsStringExt as _},
    },
};

use bytes::Bytes;
use nix::errno::Errno;
use rustix::fs::{AtFlags, Gid, Mode, StatxFlags, Timespec, Timestamps, Uid, XattrFlags, statx};

use super::{Fault, effects::made, nodes::kind_of};
use crate::store::{
    Acls, AttributeChange, Attributes, Changes, FileId, FileSystem, Kind, NewTime, Time,
};

/// XATTR_SIZE_MAX and XATTR_LIST_MAX.
const MAX_VALUE_BYTES: usize = 64 << 10;
/// Name prefixes that users may set. Others belong to the system: file capabilities, security
/// labels, overlayfs's own.
const OPEN_NAMESPACES: [&str; 3] = ["user.", "system.posix_acl_access", "system.posix_acl_default"];
/// Names of the two ACLs.
const ACCESS_ACL: &CStr = c"system.posix_acl_access";
const DEFAULT_ACL: &CStr = c"system.posix_acl_default";
/// Permission bits with setuid, setgid and sticky.
const PERMISSIONS: u32 = 0o7777;

/// Returns the attributes of an open file (`O_PATH` is enough), without its ACLs.
pub fn of(fd: BorrowedFd<'_>, id: FileId) -> Result<Attributes, Fault> {
    let found = statx(fd, c"", AtFlags::EMPTY_PATH, StatxFlags::BASIC_STATS)?;
    let time =
        |time: rustix::fs::StatxTimestamp| Time { seconds: time.tv_sec, nanoseconds: time.tv_nsec };
    let ctime = time(found.stx_ctime);
    Ok(Attributes {
        id,
        kind: kind_of(found.stx_mode.into()),
        mode: u32::from(found.stx_mode) & PERMISSIONS,
        uid: found.stx_uid,
        gid: found.stx_gid,
        links: found.stx_nlink,
        size: found.stx_size,
        blocks: found.stx_blocks,
        rdev: rustix::fs::makedev(found.stx_rdev_major, found.stx_rdev_minor),
        atime: time(found.stx_atime),
        mtime: time(found.stx_mtime),
        ctime,
        version: version(ctime, found.stx_size),
        acls: None,
    })
}

/// Derives a version from the change time, which every change updates; since Linux 6.13 also two
/// changes within one tick with a stat between. The size helps on older kernels.
fn version(ctime: Time, size: u64) -> u64 {
    const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;
    let nanoseconds = ctime
        .seconds
        .cast_unsigned()
        .wrapping_mul(1_000_000_000)
        .wrapping_add(ctime.nanoseconds.into());
    nanoseconds ^ size.wrapping_mul(FACTOR)
}

/// Returns the link in /proc by which calls that take a path reach an open file.
pub fn link_to(fd: BorrowedFd<'_>) -> String {
    format!("/proc/self/fd/{}", fd.as_raw_fd())
}

/// Changes owner and mode. The size needs a descriptor for writing; times come last.
pub fn change(fd: BorrowedFd<'_>, changes: &Changes) -> Result<(), Fault> {
    let link = link_to(fd);
    if changes.uid.is_some() || changes.gid.is_some() {
        let (uid, gid) = (changes.uid.map(Uid::from_raw), changes.gid.map(Gid::from_raw));
        made(rustix::fs::chownat(fd, c"", uid, gid, AtFlags::EMPTY_PATH))?;
    }
    if let Some(mode) = changes.mode {
        made(rustix::fs::chmodat(
            rustix::fs::CWD,
            &*link,
            Mode::from_raw_mode(mode & PERMISSIONS),
            AtFlags::empty(),
        ))?;
    }
    Ok(())
}

/// Changes the times; to be called last, since every other change updates them.
pub fn change_times(fd: BorrowedFd<'_>, changes: &Changes) -> Result<(), Fault> {
    if changes.atime.is_none() && changes.mtime.is_none() {
        return Ok(());
    }
    let times = Timestamps {
        last_access: timespec(changes.atime),
        last_modification: timespec(changes.mtime),
    };
    let link = link_to(fd);
    Ok(made(rustix::fs::utimensat(rustix::fs::CWD, &*link, &times, AtFlags::empty()))?)
}

fn timespec(time: Option<NewTime>) -> Timespec {
    match time {
        None => Timespec { tv_sec: 0, tv_nsec: rustix::fs::UTIME_OMIT },
        Some(NewTime::Now) => Timespec { tv_sec: 0, tv_nsec: rustix::fs::UTIME_NOW },
        Some(NewTime::At(time)) => {
            Timespec { tv_sec: time.seconds, tv_nsec: time.nanoseconds.into() }
        }
    }
}

/// statfs(2).
pub fn file_system(fd: BorrowedFd<'_>) -> Result<FileSystem, Fault> {
    let found = rustix::fs::fstatvfs(fd)?;
    let bytes = |blocks: u64| blocks.saturating_mul(found.f_frsize);
    Ok(FileSystem {
        block_bytes: u32::try_from(found.f_bsize).unwrap_or(4096),
        bytes: bytes(found.f_blocks),
        bytes_free: bytes(found.f_bfree),
        bytes_available: bytes(found.f_bavail),
        files: found.f_files,
        files_free: found.f_ffree,
        name_bytes: u32::try_from(found.f_namemax).unwrap_or(255),
    })
}

/// getxattr(2).
pub fn value(fd: BorrowedFd<'_>, name: &OsString) -> Result<Bytes, Fault> {
    check_namespace(name, Errno::ENODATA)?;
    let mut value = vec![0; MAX_VALUE_BYTES];
    let length = rustix::fs::getxattr(link_to(fd), name, &mut value[..])?;
    value.truncate(length);
    Ok(value.into())
}

/// Returns which POSIX ACLs a file has; `None` on an error. The kernel caches ACLs with the inode.
pub fn acls(fd: BorrowedFd<'_>, kind: Kind) -> Option<Acls> {
    let link = link_to(fd);
    let mut acls = Acls::empty();
    if kind != Kind::Symlink {
        acls.set(Acls::ACCESS, has_value(&link, ACCESS_ACL)?);
    }
    if kind == Kind::Directory {
        acls.set(Acls::DEFAULT, has_value(&link, DEFAULT_ACL)?);
    }
    Some(acls)
}

/// Returns true if the file system supports POSIX ACLs.
pub fn may_have_acls(fd: BorrowedFd<'_>) -> bool {
    rustix::fs::getxattr_query(link_to(fd), ACCESS_ACL) != Err(rustix::io::Errno::OPNOTSUPP)
}

/// Returns true if a directory has no default ACL: new files get the mode that they are created
/// with.
pub fn has_no_default_acl(fd: BorrowedFd<'_>) -> bool {
    has_value(&link_to(fd), DEFAULT_ACL) == Some(false)
}

fn has_value(link: &str, name: &CStr) -> Option<bool> {
    match rustix::fs::getxattr_query(link, name) {
        Ok(_) => Some(true),
        Err(rustix::io::Errno::NODATA | rustix::io::Errno::OPNOTSUPP) => Some(false),
        Err(_) => None,
    }
}

/// setxattr(2).
pub fn set_value(
    fd: BorrowedFd<'_>,
    name: &OsString,
    value: &[u8],
    how: AttributeChange,
) -> Result<(), Fault> {
    check_namespace(name, Errno::EOPNOTSUPP)?;
    let flags = match how {
        AttributeChange::Any => XattrFlags::empty(),
        AttributeChange::Create => XattrFlags::CREATE,
        AttributeChange::Replace => XattrFlags::REPLACE,
    };
    Ok(made(rustix::fs::setxattr(link_to(fd), name, value, flags))?)
}

/// removexattr(2).
pub fn remove_value(fd: BorrowedFd<'_>, name: &OsString) -> Result<(), Fault> {
    check_namespace(name, Errno::ENODATA)?;
    Ok(made(rustix::fs::removexattr(link_to(fd), name))?)
}

/// listxattr(2), filtered to permitted names.
pub fn names(fd: BorrowedFd<'_>) -> Result<Vec<OsString>, Fault> {
    let mut list = vec![0; MAX_VALUE_BYTES];
    let length = rustix::fs::listxattr(link_to(fd.as_fd()), &mut list[..])?;
    list.truncate(length);
    let names = list.split(|byte| *byte == 0).filter(|name| !name.is_empty());
    let names = names.map(|name| OsString::from_vec(name.to_vec()));
    Ok(names.filter(|name| check_namespace(name, Errno::ENODATA).is_ok()).collect())
}

/// Fails with `refusal` unless users may access attributes of that name.
pub fn check_namespace(name: &OsStr, refusal: Errno) -> Result<(), Fault> {
    let is_open = OPEN_NAMESPACES.iter().any(|open| name.as_bytes().starts_with(open.as_bytes()));
    if is_open { Ok(()) } else { Err(refusal.into()) }
}
