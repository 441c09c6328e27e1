//! Types for files in a store: their ids, and the results of stat(2) and statfs(2).
#![allow(
    missing_docs,
    reason = "a variant's fields are explained with the variant, \
              names of system calls by their manual pages"
)]

use std::{ffi::OsStr, os::unix::ffi::OsStrExt as _};

use bitflags::bitflags;

use super::{Leases, Stamp};

/// Id of a file on the wire: never reused for another file, unlike an inode number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct FileId {
    /// Inode number, as `ls -i` shows it.
    pub inode: u64,
    /// Generation, which differs between successive files with the same inode number.
    pub generation: u64,
}

/// First inode of provisional ids, and first of the numbers that a volume gives to files whose own
/// inode number is taken.
pub const FIRST_PROVISIONAL: u64 = 1 << 62;

/// Generation of provisional ids.
const PROVISIONAL: u64 = u64::MAX;

impl FileId {
    /// Returns the id that a volume gives to a file which the store does not know yet, by its
    /// number there.
    ///
    /// Invariant: no provisional id crosses the wire. A volume sends none, and a server's messages
    /// that name one are refused as a whole ([`crate::wire`]): so no server can speak of a file
    /// that it does not know.
    #[must_use]
    pub fn provisional(number: u64) -> Self {
        Self { inode: number, generation: PROVISIONAL }
    }

    /// Returns true for an id that was given out before the store knew the file.
    #[must_use]
    pub fn is_provisional(self) -> bool {
        self.generation == PROVISIONAL && self.inode >= FIRST_PROVISIONAL
    }
}

/// An open file of this session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Handle(pub u64);

/// A file, with an open handle of it if there is one: an unlinked file is only reachable through
/// its handle. Without a handle the store opens the file for this one call, with the caller's
/// rights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Place {
    /// The file.
    pub file: FileId,
    /// Its handle in this session.
    pub handle: Option<Handle>,
}

impl From<FileId> for Place {
    fn from(file: FileId) -> Self {
        Self { file, handle: None }
    }
}

/// A name in a directory, as mkdirat(2) takes it: a file may have it or not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NameIn<'a, D> {
    /// The directory: its id, its number, or the directory itself.
    pub parent: D,
    /// One component.
    pub name: &'a OsStr,
}

/// A position in a file, as copy_file_range(2) takes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PositionIn<F> {
    /// The file: its place, the number of an open file, or the file itself.
    pub file: F,
    /// Offset in bytes.
    pub offset: u64,
}

/// File type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    Regular,
    Directory,
    Symlink,
    Fifo,
    Socket,
    BlockDevice,
    CharacterDevice,
}

/// Timestamp of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Time {
    /// Seconds since 1970; may be negative.
    pub seconds: i64,
    /// Below 1,000,000,000.
    pub nanoseconds: u32,
}

/// Attributes of a file, as from stat(2).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attributes {
    /// The file.
    pub id: FileId,
    /// File type.
    pub kind: Kind,
    /// Permission bits with setuid, setgid and sticky (07777).
    pub mode: u32,
    /// The owner's uid on the server.
    pub uid: u32,
    /// The group's gid on the server.
    pub gid: u32,
    /// Number of hard links.
    pub links: u32,
    /// Size in bytes.
    pub size: u64,
    /// Allocated space in units of 512 bytes.
    pub blocks: u64,
    /// Device number of a device file, as from `makedev`.
    pub rdev: u64,
    /// Time of the last read.
    pub atime: Time,
    /// Time of the last change of contents.
    pub mtime: Time,
    /// Time of the last change of contents or attributes.
    pub ctime: Time,
    /// Changes whenever contents or attributes change; has no order.
    pub version: u64,
    /// Its POSIX ACLs; `None` if the store doesn't know.
    pub acls: Option<Acls>,
}

#[cfg(test)]
impl Attributes {
    /// Those of an empty file or directory.
    pub fn of_test(id: FileId, kind: Kind) -> Self {
        let time = Time { seconds: 0, nanoseconds: 0 };
        let is_directory = kind == Kind::Directory;
        Self {
            id,
            kind,
            mode: if is_directory { 0o755 } else { 0o644 },
            uid: 0,
            gid: 0,
            links: if is_directory { 2 } else { 1 },
            size: 0,
            blocks: 0,
            rdev: 0,
            atime: time,
            mtime: time,
            ctime: time,
            version: 1,
            acls: None,
        }
    }
}

bitflags! {
    /// POSIX ACLs that a file has beside its permissions (acl(5)).
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
    pub struct Acls: u32 {
        /// Access ACL: the group's bits of the mode are its mask.
        const ACCESS = 2;
        /// Default ACL of a directory, which new files in it inherit.
        const DEFAULT = 4;
    }
}

impl Acls {
    /// Returns the ACL that is stored in an extended attribute of that name.
    #[must_use]
    pub fn named(attribute: &OsStr) -> Option<Self> {
        match attribute.as_bytes() {
            b"system.posix_acl_access" => Some(Self::ACCESS),
            b"system.posix_acl_default" => Some(Self::DEFAULT),
            _ => None,
        }
    }
}

/// A file in an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// Its attributes.
    pub attributes: Attributes,
    /// All leases that the session now has of it.
    pub leases: Leases,
    /// Stamp of the answer.
    pub stamp: Stamp,
}

/// Result of statfs(2), in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileSystem {
    pub block_bytes: u32,
    pub bytes: u64,
    pub bytes_free: u64,
    pub bytes_available: u64,
    pub files: u64,
    pub files_free: u64,
    pub name_bytes: u32,
}
