//! What a store can be asked for in one call, and the words for that.
#![allow(
    missing_docs,
    reason = "a variant's fields are explained with the variant, names of system calls by their manual pages"
)]

use std::{ffi::OsString, ops::Range};

use bitflags::bitflags;
use bytes::Bytes;

#[cfg(doc)]
use super::{Answer, Leases, NewFile, Notice, Store};
use super::{FileId, Handle, Kind, Place, Put, Returned, Stamp, Time};

/// Sessions that one [`Op::EndSessions`] names at most.
pub const ENDED_AT_ONCE: usize = 64;

/// One thing to be done ([`Store::call`]). Directories are given by their ids, names are single
/// components.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Op {
    /// Walks down names from a directory as far as it goes, not through symbolic links and not
    /// upwards. → [`Answer::Walked`].
    Walk { from: FileId, names: Vec<OsString> },
    /// → [`Answer::Entry`].
    Attributes(Place),
    /// Changes attributes, all or none as chown, chmod, truncate, utimensat in that order. →
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
    Rename { from: (FileId, OsString), to: (FileId, OsString), how: Renaming },
    /// open(2) with `O_CREAT`. → [`Answer::Opened`].
    Create { parent: FileId, name: OsString, mode: NewMode, flags: OpenFlags },
    /// open(2) with `O_CREAT` and `O_EXCL` of an ordinary file that has contents and attributes
    /// from the start: it is there whole or not at all. → [`Answer::Opened`].
    CreateWhole { put: Put, flags: OpenFlags },
    /// open(2) of what exists. → [`Answer::Opened`].
    Open { file: FileId, flags: OpenFlags },
    /// The last close of an open file; its flock goes with it. → [`Answer::Done`].
    Close(Handle),
    /// fsync(2), or fdatasync(2). Directories, too. → [`Answer::Done`].
    Sync { place: Place, what: Synced },
    /// fallocate(2). → [`Answer::Entry`].
    Allocate { place: Place, range: Range<u64>, how: Allocation },
    /// lseek(2) for holes and data. → [`Answer::Offset`].
    Seek { place: Place, offset: u64, what: Sought },
    /// copy_file_range(2), as far as it goes in one step. → [`Answer::Copied`].
    CopyRange { from: (Place, u64), to: (Place, u64), length: u64 },
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
    /// Takes, or gives back, a lock that holds among all sessions and against programs of the
    /// server. → [`Answer::Done`], `EAGAIN` when another has it and `wait` is not asked.
    Lock { place: Place, owner: u64, lock: Lock, wait: Wait },
    /// fcntl(2)'s F_GETLK: what is in the way of `lock`. → [`Answer::Locked`].
    TestLock { place: Place, owner: u64, lock: RangeLock },
    /// Gives back all range locks that `owner` has of the file: one of its descriptors was closed.
    /// → [`Answer::Done`].
    Unlock { file: FileId, owner: u64 },
    /// Gives leases back: what a recall asks for, or what is of no use any more. What it says is in
    /// force before anything later of this session. → [`Answer::Done`].
    Return(Vec<Returned>),
    /// Answers [`Notice::Lost`] with that stamp, or one that a break has kept back: nothing from
    /// before is relied on any more, in the kernel neither. The keeper's former process may have
    /// granted it, and then others wait for this. → [`Answer::Done`].
    Forgotten(Stamp),
    /// Ends sessions of the caller's by the names that these were opened with: their holder is no
    /// more. From the answer on nothing is carried out that they have asked for, and none of their
    /// leases counts. Sessions that have ended, or never were, are no error. → [`Answer::Done`];
    /// `EBUSY` while a system call of theirs does not return.
    EndSessions(Vec<Bytes>),
    /// What other programs of the server changed before this was asked has been recalled, and this
    /// session has answered all recalls from before: whoever asks after an offloaded command has
    /// ended sees its effect from the answer on. With [`Settling::Flush`] other sessions have also
    /// written what they held under [`Leases::WRITE`]: an offloaded command is going to read. →
    /// [`Answer::Settled`].
    Settle(Settling),
    /// Sets the caller's space reservation of this session, in bytes; 0 ends it. It is one for all
    /// directories of the export, on the file system of `directory`. Each [`Put`] of the caller is
    /// deducted from it ([`NewFile::room`]). → [`Answer::Done`]; `ENOSPC` or `EDQUOT` as for a
    /// write of so many bytes.
    Reserve { directory: FileId, bytes: u64 },
}

impl Op {
    /// All files that it names.
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
            | Self::Open { file, .. }
            | Self::Unlock { file, .. } => vec![*file],
            Self::CreateWhole { put, .. } => vec![put.directory],
            Self::Attributes(place)
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
            Self::Rename { from, to, .. } => vec![from.0, to.0],
            Self::CopyRange { from, to, .. } => vec![from.0.file, to.0.file],
            Self::Close(_)
            | Self::FileSystem
            | Self::Return(_)
            | Self::Forgotten(_)
            | Self::EndSessions(_)
            | Self::Settle(_) => Vec::new(),
        }
    }

    /// Whether doing it twice is another thing than doing it once. A lock that is taken again is
    /// the same lock.
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

    /// Whether it can be asked for again when nobody knows whether it was done: the second time
    /// gives what the first would have, and leaves what the first would have left.
    #[must_use]
    pub fn is_repeatable(&self) -> bool {
        match self {
            // What the first one has opened is closed with its session.
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

/// Permissions of something new.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NewMode {
    /// With the umask applied.
    pub masked: u32,
    /// Taken away by the umask. A default ACL of the directory takes the umask's place (acl(5)).
    pub withheld: u32,
}

impl NewMode {
    /// As mkdir(2) has it.
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
    /// Bytes.
    pub size: Option<u64>,
    /// Last read.
    pub atime: Option<NewTime>,
    /// Last written.
    pub mtime: Option<NewTime>,
}

/// A time to be set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NewTime {
    /// The server's present.
    Now,
    /// That.
    At(Time),
}

/// Which of the two calls that remove a name.
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
    /// How a file is opened.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
    pub struct OpenFlags: u32 {
        /// To read.
        const READ = 1;
        /// To write.
        const WRITE = 2;
        /// Every write at the end of the file, whoever else writes.
        const APPEND = 4;
        /// Emptied.
        const TRUNCATE = 8;
        /// [`Op::Create`] only: must not be there.
        const EXCLUSIVE = 16;
        /// The store keeps nothing of it in memory of its own, either, where it can.
        const DIRECT = 32;
        /// No lease of the contents is wanted.
        const NO_LEASE = 64;
    }
}

/// What is to be on disk.
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

/// What lseek(2) looks for.
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

/// A lock that is set, or none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Lock {
    /// flock(2), which belongs to the open file: needs a handle. `None` gives it back.
    Whole(Option<Access>),
    /// fcntl(2), which belongs to the owner.
    Range(RangeLock),
}

/// A lock of fcntl(2).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RangeLock {
    /// Bytes; up to `u64::MAX` for all there will ever be.
    pub range: Range<u64>,
    /// `None` gives it back.
    pub access: Option<Access>,
}

/// What a lock is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    Shared,
    Exclusive,
}

/// Whether to wait for a lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wait {
    No,
    Yes,
}

/// Whether others write what they hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Settling {
    Recalls,
    Flush,
}
