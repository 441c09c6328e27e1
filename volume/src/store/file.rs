//! Files in the words of a store: what they are named by, and what stat(2) and statfs(2) tell.
#![allow(
    missing_docs,
    reason = "a variant's fields are explained with the variant, names of system calls by their manual pages"
)]

use std::{ffi::OsStr, os::unix::ffi::OsStrExt as _};

use bitflags::bitflags;

use super::{Leases, Stamp};

/// A file's name on the wire: it never means another file, also when the inode's number is used
/// again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct FileId {
    /// The number that `ls -i` shows.
    pub inode: u64,
    /// Tells files apart that had the number one after the other.
    pub generation: u64,
}

/// An open file of this session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Handle(pub u64);

/// A file, and the open handle of it where there is one: an unlinked file is reached by no other
/// way. Without a handle the store opens the file for this one call, with the caller's rights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Place {
    /// The file.
    pub file: FileId,
    /// As opened by this session.
    pub handle: Option<Handle>,
}

impl From<FileId> for Place {
    fn from(file: FileId) -> Self {
        Self { file, handle: None }
    }
}

/// What kind of file it is.
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

/// A time as files have it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Time {
    /// Seconds since 1970; files may be older.
    pub seconds: i64,
    /// Below 1,000,000,000.
    pub nanoseconds: u32,
}

/// What stat(2) tells of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attributes {
    /// Which file.
    pub id: FileId,
    /// What it is.
    pub kind: Kind,
    /// Permissions with the three bits above them (07777).
    pub mode: u32,
    /// The owner's number, as the server has it.
    pub uid: u32,
    /// The group's number.
    pub gid: u32,
    /// Names of the file.
    pub links: u32,
    /// Bytes.
    pub size: u64,
    /// Units of 512 bytes.
    pub blocks: u64,
    /// The device that a device file stands for, as `makedev` has it.
    pub rdev: u64,
    /// Last read.
    pub atime: Time,
    /// Contents changed.
    pub mtime: Time,
    /// Contents or attributes changed.
    pub ctime: Time,
    /// Another number whenever contents or attributes are others. Says nothing of which is newer.
    pub version: u64,
    /// Its POSIX ACLs, where the store tells of them.
    pub acls: Option<Acls>,
}

bitflags! {
    /// The POSIX ACLs of a file (acl(5)) beside its permissions.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
    pub struct Acls: u32 {
        /// Of access: the group's bits of the mode are its mask.
        const ACCESS = 2;
        /// Of a directory: what is made in it gets that.
        const DEFAULT = 4;
    }
}

impl Acls {
    /// The ACL that an extended attribute of that name is.
    #[must_use]
    pub fn named(attribute: &OsStr) -> Option<Self> {
        match attribute.as_bytes() {
            b"system.posix_acl_access" => Some(Self::ACCESS),
            b"system.posix_acl_default" => Some(Self::DEFAULT),
            _ => None,
        }
    }
}

/// A file as an answer tells of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// How it is.
    pub attributes: Attributes,
    /// All leases that the session now has of it.
    pub leases: Leases,
    /// When that was.
    pub stamp: Stamp,
}

/// What statfs(2) tells, in bytes.
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
