//! Operations of a store, and their parameters.
#![allow(
    missing_docs,
    reason = "a variant's fields are explained with the variant, \
              names of system calls by their manual pages"
)]

use std::{ffi::OsString, ops::Range};

use bitflags::bitflags;
use bytes::Bytes;

#[cfg(doc)]
use super::{Answer, Leases, NewFile, Notice, Store};
use super::{FileId, Handle, Kind, Place, PositionIn, Put, Returned, Stamp, Time, Write};

/// Maximum number of sessions in one [`Op::EndSessions`].
pub const ENDED_AT_ONCE: usize = 64;

/// One operation ([`Store::call`]). Directories are given by their ids; names are single
/// components.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Op {
    /// Looks up names one below the other, from a directory on, as far as they exist. Doesn't
    /// follow symbolic links or go upwards. → [`Answer::Walked`].
    Walk { from: FileId, names: Vec<OsString> },
    /// → [`Answer::Entry`].
    Attributes(Place),
    /// Changes attributes, as by chown, chmod, truncate and utimensat in that order. →
    /// [`Answer::Entry`].
    Set { place: Place, changes: Changes },
    /// Names of a directory with their attributes, without `.` and `..`, from `cookie` on (0: from
    /// the start). → [`Answer::Listing`].
    List { directory: FileId, cookie: u64, limit: u32 },
    /// → [`Answer::Target`].
    ReadLink(FileId),
    /// → [`Answer::Made`].
    MakeDirectory { parent: FileId, name: OsString, mode: NewMode },
    /// A fifo, a socket or an empty file. Devices are refused (`EPERM`). → [`Answer::Made`].
    MakeNode { parent: FileId, name: OsString, mode: NewMode, kind: Kind, rdev: u64 },
    /// → [`Answer::Made`].
    Symlink { parent: FileId, name: OsString, target: OsString },
    /// Another name for a file. → [`Answer::Made`].
    Link { file: Place, parent: FileId, name: OsString },
    /// unlink(2), or rmdir(2). → [`Answer::Removed`].
    Remove { parent: FileId, name: OsString, what: Removal },
    /// renameat2(2). → [`Answer::Renamed`].
    Rename {
        parent: FileId,
        name: OsString,
        /// The directory of the new name; may be `parent`.
        new_parent: FileId,
        new_name: OsString,
        how: Renaming,
    },
    /// open(2) with `O_CREAT`. → [`Answer::Opened`].
    Create { parent: FileId, name: OsString, mode: NewMode, flags: OpenFlags },
    /// open(2) with `O_CREAT` and `O_EXCL` of a regular file with its contents and attributes: it
    /// appears atomically, complete. → [`Answer::Opened`].
    CreateWhole { put: Put, flags: OpenFlags },
    /// open(2) of an existing file, also of one that has no name any more. → [`Answer::Opened`].
    Open { place: Place, flags: OpenFlags },
    /// The last close of an open file; its flock goes with it. → [`Answer::Done`].
    Close(Handle),
    /// fsync(2), or fdatasync(2). Directories, too. → [`Answer::Done`].
    Sync { place: Place, what: Synced },
    /// fallocate(2). → [`Answer::Entry`].
    Allocate { place: Place, range: Range<u64>, how: Allocation },
    /// lseek(2) for holes and data. → [`Answer::Offset`].
    Seek { place: Place, offset: u64, what: Sought },
    /// copy_file_range(2), as far as it goes in one step. → [`Answer::Copied`].
    CopyRange { from: PositionIn<Place>, to: PositionIn<Place>, length: u64 },
    /// statfs(2). → [`Answer::FileSystem`].
    FileSystem,
    /// getxattr(2). → [`Answer::Value`].
    GetAttribute { place: Place, name: OsString },
    /// setxattr(2). → [`Answer::Entry`].
    SetAttribute { place: Place, name: OsString, value: Bytes, how: AttributeChange },
    /// → [`Answer::Names`].
    ListAttributes(Place),
    /// → [`Answer::Entry`].
    RemoveAttribute { place: Place, name: OsString },
    /// Takes or releases a lock that holds among all sessions and against programs on the server. →
    /// [`Answer::Done`], `EAGAIN` on a conflict unless `wait` is set.
    Lock { place: Place, owner: u64, lock: Lock, wait: Wait },
    /// fcntl(2)'s F_GETLK: finds a lock that conflicts with `lock`. → [`Answer::Locked`].
    TestLock { place: Place, owner: u64, lock: RangeLock },
    /// Releases all range locks of `owner` on the file, since one of its descriptors was closed.
    /// → [`Answer::Done`].
    Unlock { file: FileId, owner: u64 },
    /// Returns leases that were recalled or are no longer needed. It takes effect before any later
    /// operation of this session. → [`Answer::Done`].
    Return(Vec<Returned>),
    /// Answers [`Notice::Lost`] with that stamp, or with one that a broken connection has kept
    /// back: nothing from before is cached any more, not even in the kernel. If the server's former
    /// process granted the leases, others wait for this. → [`Answer::Done`].
    Forgotten(Stamp),
    /// Ends sessions of the caller by the names that they were opened with, since their process is
    /// dead. From the answer on none of their requests is performed, and their leases are void.
    /// Unknown or ended sessions are no error. → [`Answer::Done`]; `EBUSY` while one of their
    /// system calls does not return.
    EndSessions(Vec<Bytes>),
    /// Barrier: on the answer, the earlier changes by other programs on the server have been
    /// recalled, and this session has answered all earlier recalls. After an offloaded command has
    /// ended, its effects are visible from the answer on. With [`Settling::Flush`], for an
    /// offloaded command that is going to read, other sessions have also written what they held
    /// under [`Leases::WRITE`]. → [`Answer::Settled`].
    Settle(Settling),
    /// Sets the caller's space reservation of this session, in bytes; 0 ends it. It is one for all
    /// directories of the export, on the file system of `directory`. Each [`Put`] of the caller is
    /// deducted from it ([`NewFile::room`]). → [`Answer::Done`]; `ENOSPC` or `EDQUOT` as for a
    /// write of so many bytes.
    Reserve { directory: FileId, bytes: u64 },
}

impl Op {
    /// Returns all files in it.
    #[must_use]
    pub fn files(&self) -> Vec<FileId> {
        match self {
            Self::Walk { from: file, .. }
            | Self::List { directory: file, .. }
            | Self::Reserve { directory: file, .. }
            | Self::ReadLink(file)
            | Self::MakeDirectory { parent: file, .. }
            | Self::MakeNode { parent: file, .. }
            | Self::Symlink { parent: file, .. }
            | Self::Remove { parent: file, .. }
            | Self::Create { parent: file, .. }
            | Self::Unlock { file, .. } => vec![*file],
            Self::CreateWhole { put, .. } => vec![put.directory],
            Self::Attributes(place)
            | Self::Open { place, .. }
            | Self::Set { place, .. }
            | Self::Sync { place, .. }
            | Self::Allocate { place, .. }
            | Self::Seek { place, .. }
            | Self::GetAttribute { place, .. }
            | Self::SetAttribute { place, .. }
            | Self::ListAttributes(place)
            | Self::RemoveAttribute { place, .. }
            | Self::Lock { place, .. }
            | Self::TestLock { place, .. } => vec![place.file],
            Self::Link { file, parent, .. } => vec![file.file, *parent],
            Self::Rename { parent, new_parent, .. } => vec![*parent, *new_parent],
            Self::CopyRange { from, to, .. } => vec![from.file.file, to.file.file],
            Self::Close(_)
            | Self::FileSystem
            | Self::Return(_)
            | Self::Forgotten(_)
            | Self::EndSessions(_)
            | Self::Settle(_) => Vec::new(),
        }
    }

    /// Returns true if it is not idempotent. Taking a lock again is: it is the same lock.
    #[must_use]
    pub fn is_change(&self) -> bool {
        !matches!(
            self,
            Self::Walk { .. }
                | Self::Attributes(_)
                | Self::List { .. }
                | Self::ReadLink(_)
                | Self::Sync { .. }
                | Self::Seek { .. }
                | Self::FileSystem
                | Self::GetAttribute { .. }
                | Self::ListAttributes(_)
                | Self::TestLock { .. }
                | Self::Lock { .. }
                | Self::Unlock { .. }
                | Self::Return(_)
                | Self::Forgotten(_)
                | Self::EndSessions(_)
                | Self::Settle(_)
                | Self::Reserve { .. }
        )
    }

    /// Returns true if it can be repeated when its outcome is unknown: the second time has the same
    /// result and the same effect as the first.
    #[must_use]
    pub fn is_repeatable(&self) -> bool {
        match self {
            // The first handle is closed at the end of the session.
            Self::Open { .. } | Self::Set { .. } => true,
            Self::Create { flags, .. } => !flags.contains(OpenFlags::EXCLUSIVE),
            Self::SetAttribute { how, .. } => *how == AttributeChange::Any,
            Self::Allocate { how, .. } => {
                !matches!(how, Allocation::CollapseRange | Allocation::InsertRange)
            }
            other => !other.is_change(),
        }
    }
}

/// Permissions of a new file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NewMode {
    /// Permissions with the umask applied.
    pub masked: u32,
    /// Permissions that the umask removed. A default ACL of the directory replaces the umask
    /// (acl(5)).
    pub withheld: u32,
}

/// Set-user-ID and set-group-ID.
const SET_IDS: u32 = 0o6000;

/// Drops the bits of other accounts from a mode.
fn drop_set_ids(mode: &mut u32) {
    *mode &= !SET_IDS;
}

impl Op {
    /// Takes set-user-ID and set-group-ID bits out of the modes that it sets.
    pub(crate) fn without_set_ids(mut self) -> Self {
        match &mut self {
            Self::MakeDirectory { mode, .. }
            | Self::MakeNode { mode, .. }
            | Self::Create { mode, .. } => drop_set_ids(&mut mode.masked),
            Self::CreateWhole { put, .. } => put.drop_set_ids(),
            Self::Set { changes, .. } => changes.mode.iter_mut().for_each(drop_set_ids),
            _ => {}
        }
        self
    }
}

impl Put {
    fn drop_set_ids(&mut self) {
        drop_set_ids(&mut self.mode);
        self.changes.mode.iter_mut().for_each(drop_set_ids);
    }
}

impl Write {
    /// Takes set-user-ID and set-group-ID bits out of the modes that it sets.
    pub(crate) fn without_set_ids(mut self) -> Self {
        match &mut self {
            Self::Put(put) => put.drop_set_ids(),
            Self::Set { changes, .. } => changes.mode.iter_mut().for_each(drop_set_ids),
            Self::At { .. } | Self::Append { .. } => {}
        }
        self
    }
}

impl NewMode {
    /// Applies a umask to a mode, as mkdir(2) does.
    #[must_use]
    pub fn new(mode: u32, umask: u32) -> Self {
        Self { masked: mode & !umask, withheld: mode & umask }
    }
}

impl From<u32> for NewMode {
    fn from(masked: u32) -> Self {
        Self { masked, withheld: 0 }
    }
}

/// Attributes to be changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Changes {
    /// Permissions.
    pub mode: Option<u32>,
    /// Owner.
    pub uid: Option<u32>,
    /// Group.
    pub gid: Option<u32>,
    /// Size in bytes.
    pub size: Option<u64>,
    /// Time of the last read.
    pub atime: Option<NewTime>,
    /// Time of the last write.
    pub mtime: Option<NewTime>,
}

/// A time to be set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NewTime {
    /// The server's current time.
    Now,
    /// A given time.
    At(Time),
}

/// unlink(2) or rmdir(2).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Removal {
    File,
    Directory,
}

/// Flags of renameat2(2).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Renaming {
    Replace,
    NoReplace,
    Exchange,
}

bitflags! {
    /// Flags of open(2), and more.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
    pub struct OpenFlags: u32 {
        /// For reading.
        const READ = 1;
        /// For writing.
        const WRITE = 2;
        /// `O_APPEND`: every write goes atomically to the end of the file.
        const APPEND = 4;
        /// `O_TRUNC`.
        const TRUNCATE = 8;
        /// `O_EXCL`, for [`Op::Create`] only.
        const EXCLUSIVE = 16;
        /// `O_DIRECT`: the store bypasses its own page cache, too, where it can.
        const DIRECT = 32;
        /// The caller wants no lease of the contents.
        const NO_LEASE = 64;
    }
}

/// Extent of a sync: fdatasync(2) or fsync(2).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Synced {
    Data,
    Everything,
}

/// Modes of fallocate(2).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Allocation {
    Extend,
    KeepSize,
    PunchHole,
    ZeroRange,
    ZeroRangeKeepSize,
    CollapseRange,
    InsertRange,
}

/// Target of lseek(2): `SEEK_DATA` or `SEEK_HOLE`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sought {
    Data,
    Hole,
}

/// Flags of setxattr(2).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttributeChange {
    Any,
    Create,
    Replace,
}

/// A lock to take or release.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Lock {
    /// flock(2), which belongs to the open file: needs a handle. `None` releases it.
    Whole(Option<Access>),
    /// fcntl(2), which belongs to the owner.
    Range(RangeLock),
}

/// A lock of fcntl(2).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RangeLock {
    /// Bytes; up to `u64::MAX` for the rest of the file, however long it grows.
    pub range: Range<u64>,
    /// `None` releases it.
    pub access: Option<Access>,
}

/// Mode of a lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    Shared,
    Exclusive,
}

/// Blocking or non-blocking request for a lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wait {
    No,
    Yes,
}

/// Extent of an [`Op::Settle`]: with or without a flush of other sessions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Settling {
    Recalls,
    Flush,
}
