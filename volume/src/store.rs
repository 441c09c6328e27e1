//! What a volume asks of whatever keeps its files: one trait, and the words that it uses. A
//! [`Store`] value is one session: leases, handles and locks are its own and end with it.
//!
//! Everything small is a [`Store::call`]: one request, one answer, as many at a time as one likes, in no
//! order but that of their answers. What moves data is [`Store::read`] and [`Store::write`], in batches over
//! many files.
//!
//! # What may be remembered
//!
//! Every answer that tells of a file says which [`Leases`] go with it. Under a lease the caller may answer from memory,
//! until (whichever is first) the lease is recalled ([`Store::notices`]), it has been given back
//! ([`Op::Return`]), or [`Store::valid_until`] is over. All leases of a session are valid to the same time,
//! which the store itself keeps moving on while it is in touch with the keeper of the files.
//!
//! A recall may overtake an answer that was made before it, and the other way round. So both carry a [`Stamp`]: what an answer with
//! stamp `a` says of a file must not be remembered (it may be given to whoever asked) when a recall of
//! that file with a stamp above `a` has been seen. Bulk data are stamped, too.
//!
//! Who changed the file waits for the recall to be answered by [`Op::Return`], so that it must not wait for a call of
//! one's own: two sessions that make names in one directory would wait for each other.
//!
//! Not here: how any of this is kept or carried.
#![allow(
    missing_docs,
    reason = "a variant's fields are explained with the variant, names of system calls by their manual pages"
)]

use std::{
    ffi::OsString,
    fmt,
    ops::Range,
    pin::Pin,
    sync::Arc,
    time::{Duration, Instant},
};

use async_trait::async_trait;
use bitflags::bitflags;
use bytes::Bytes;
pub use nix::errno::Errno;
use tokio_stream::Stream;

/// The pieces of one [`Store::read`], as they arrive.
pub type Pieces = Pin<Box<dyn Stream<Item = Result<Piece, Errno>> + Send>>;

/// What the keeper of the files says on its own account.
pub type Notices = Pin<Box<dyn Stream<Item = Notice> + Send>>;

/// A session with whatever keeps the files of a volume.
#[async_trait]
pub trait Store: Send + Sync + 'static {
    /// The directory that is the volume's root.
    fn root(&self) -> FileId;

    /// Does one thing. Dropping the future gives a wait up ([`Op::Lock`]); what changes something may happen all the same.
    ///
    /// # Errors
    /// The error number that the system call of the same purpose would give; `ESTALE` when the file is not known any more (walk to it
    /// again), `EIO` or `ETIMEDOUT` when the keeper is out of reach, `EOPNOTSUPP` for what this store can't do.
    async fn call(&self, caller: &Caller, op: Op) -> Result<Answer, Errno>;

    /// Reads parts of many files, all in one request. Pieces of one part come in order and without gaps; those of several parts come
    /// as it suits. A part ends with a piece that says so ([`Piece::is_last`]): short at the end of the file. A hole reads as
    /// zeros. An error that concerns a part is a piece of its own; one of the whole stream ends it.
    async fn read(&self, caller: &Caller, parts: Vec<ReadPart>) -> Pieces;

    /// Writes, all in one request, in the order that is given, also where one of them fails. The results are in the same order.
    /// What has been answered is seen by every later call of any session.
    ///
    /// # Errors
    /// When the whole request is lost. It may have happened, or a part of it.
    async fn write(&self, caller: &Caller, writes: Vec<Write>) -> Result<Vec<Result<Entry, Errno>>, Errno>;

    /// Recalls, in order. There is one listener: a second call gets an empty stream. A session that does not
    /// listen yet gets no leases.
    fn notices(&self) -> Notices;

    /// Until when the leases of the session hold, if nothing more is heard. An operation that began before and ended
    /// before needs no further question.
    fn valid_until(&self) -> Instant;

    /// How long a single lease is good for, counted from its answer, where other programs' changes on the keeper's machine are not noticed
    /// ([`Watched::LeaseEnd`]). `None`: no less than [`Self::valid_until`] says.
    fn lease_limit(&self) -> Option<Duration> {
        None
    }

    /// In a few words and figures, for `posh volumes`.
    fn state(&self) -> StoreState;
}

/// A file's name on the wire: it never means another file, also when the inode's number is used again.
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

/// An order of answers and recalls of one session: later ones have higher numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Stamp(pub u64);

/// A file, and the open handle of it where there is one: an unlinked file is reached by no other way. Without a handle the
/// store opens the file for this one call, with the caller's rights.
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

/// With whose rights something is done, and to whom new files belong. A store whose session is tied to one account of its
/// machine does everything as that account.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Caller {
    /// The user's number.
    pub uid: u32,
    /// The first group's number.
    pub gid: u32,
    /// All further groups.
    pub groups: Arc<[u32]>,
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
}

bitflags! {
    /// What may be remembered of a file.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
    pub struct Leases: u32 {
        /// Its attributes, its extended attributes, and where a symbolic link leads.
        const ATTRIBUTES = 1;
        /// A directory's names: which there are, which there are not, and what each means.
        const ENTRIES = 2;
        /// Its contents.
        const DATA = 4;
        /// Its contents and attributes may be changed in memory and written later: nobody else has a lease of it. A recall of this
        /// (somebody wants to read) is answered when all is written; with the others recalled at the same time nothing may be kept.
        const WRITE = 8;
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

/// One thing to be done ([`Store::call`]). Directories are given by their ids, names are single components.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Op {
    /// Walks down names from a directory as far as it goes, not through symbolic links and not upwards. → [`Answer::Walked`].
    Walk { from: FileId, names: Vec<OsString> },
    /// → [`Answer::Entry`].
    Attributes(Place),
    /// Changes attributes, all or none as chown, chmod, truncate, utimensat in that order. → [`Answer::Entry`].
    Set { place: Place, changes: Changes },
    /// Names of a directory with their attributes, without `.` and `..`, from `cookie` on (0: from the start). → [`Answer::Listing`].
    List { directory: FileId, cookie: u64, limit: u32 },
    /// → [`Answer::Target`].
    ReadLink(FileId),
    /// `mode` has the umask taken off already, here and in all that follow. → [`Answer::Made`].
    MakeDirectory { parent: FileId, name: OsString, mode: u32 },
    /// A fifo, a socket or an empty file. Devices are refused (`EPERM`). → [`Answer::Made`].
    MakeNode { parent: FileId, name: OsString, mode: u32, kind: Kind, rdev: u64 },
    /// → [`Answer::Made`].
    Symlink { parent: FileId, name: OsString, target: OsString },
    /// Another name for a file. → [`Answer::Made`].
    Link { file: Place, parent: FileId, name: OsString },
    /// unlink(2), or rmdir(2). → [`Answer::Removed`].
    Remove { parent: FileId, name: OsString, what: Removal },
    /// renameat2(2). → [`Answer::Renamed`].
    Rename { from: (FileId, OsString), to: (FileId, OsString), how: Renaming },
    /// open(2) with `O_CREAT`. → [`Answer::Opened`].
    Create { parent: FileId, name: OsString, mode: u32, flags: OpenFlags },
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
    /// Takes, or gives back, a lock that holds among all sessions and against programs of the server. → [`Answer::Done`],
    /// `EAGAIN` when another has it and `wait` is not asked.
    Lock { place: Place, owner: u64, lock: Lock, wait: Wait },
    /// fcntl(2)'s F_GETLK: what is in the way of `lock`. → [`Answer::Locked`].
    TestLock { place: Place, owner: u64, lock: RangeLock },
    /// Gives back all range locks that `owner` has of the file: one of its descriptors was closed. → [`Answer::Done`].
    Unlock { file: FileId, owner: u64 },
    /// Gives leases back: what a recall asks for, or what is of no use any more. What it says is in force before
    /// anything later of this session. → [`Answer::Done`].
    Return(Vec<Returned>),
    /// What other programs of the server changed before this was asked has led to recalls with lower
    /// stamps than the answer's, and the session has answered these. With [`Settling::Flush`] other sessions have also written what they held under [`Leases::WRITE`]: an offloaded
    /// command is going to read. → [`Answer::Settled`].
    Settle(Settling),
}

/// What one op is answered with.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(clippy::large_enum_variant, reason = "an answer is made once and read once")]
pub enum Answer {
    /// Nothing more to tell.
    Done,
    /// How the file is now.
    Entry(Entry),
    /// The file of each name, as far as they are there.
    Walked(Walked),
    /// Part of a directory.
    Listing(Listing),
    /// Where a symbolic link leads.
    Target { target: OsString, stamp: Stamp },
    /// The new name's file, and its directory after that.
    Made { entry: Entry, parent: Entry },
    /// The directory, and the file when it has other names or is open (`None`: it is gone).
    Removed { parent: Entry, file: Option<Entry> },
    /// The directories, the file that was renamed, and what it has replaced (or been exchanged with) if that still is.
    Renamed { from: Entry, to: Entry, file: Entry, other: Option<Entry> },
    /// An open file. `parent` where it was created; [`Op::Create`] of a file that was there already changes no directory.
    Opened { handle: Handle, entry: Entry, parent: Option<Entry> },
    /// Where data or a hole is.
    Offset(u64),
    /// Bytes copied, and how the target is now.
    Copied { bytes: u64, entry: Entry },
    /// Space and limits.
    FileSystem(FileSystem),
    /// An extended attribute.
    Value { value: Bytes, stamp: Stamp },
    /// Names of extended attributes.
    Names { names: Vec<OsString>, stamp: Stamp },
    /// What is in the way; `None`: nothing.
    Locked(Option<RangeLock>),
    /// See [`Op::Settle`].
    Settled(Stamp),
}

/// How far a walk went.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Walked {
    /// The directory that it began in.
    pub from: Entry,
    /// The file of each name.
    pub entries: Vec<Entry>,
    /// Why it ended before the last name: `ENOENT` (remembered under the last directory's [`Leases::ENTRIES`]), `ENOTDIR`
    /// (also at a symbolic link, whose entry is then the last), `EACCES`, `EXDEV` where another file system is mounted, ...
    pub error: Option<Errno>,
}

/// Part of a directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listing {
    /// The directory itself.
    pub directory: Entry,
    /// In the order of the directory.
    pub names: Vec<Listed>,
    /// Whether the last name is among them.
    pub is_last: bool,
}

/// A name of a directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    /// One component.
    pub name: OsString,
    /// Where to go on after it.
    pub cookie: u64,
    /// The file; `None` when it has gone since, or can't be looked at.
    pub entry: Option<Entry>,
    /// Its inode and kind as the directory has them.
    pub inode: u64,
    /// See `inode`.
    pub kind: Kind,
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

/// Leases given back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Returned {
    /// Of which file.
    pub file: FileId,
    /// Which.
    pub leases: Leases,
    /// The recall's stamp; for leases given back unasked the highest stamp of an answer about the file that was seen, so that a lease that
    /// is on its way is not given back by mistake.
    pub stamp: Stamp,
}

/// Whether others write what they hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Settling {
    Recalls,
    Flush,
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

/// A part of a file to be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReadPart {
    /// Which file.
    pub place: Place,
    /// Bytes; up to `u64::MAX` for the whole rest.
    pub range: Range<u64>,
}

/// Bytes of a file, or why there are none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// The index of its part in the request.
    pub part: u32,
    /// Where in the file.
    pub offset: u64,
    /// The bytes, or why this part ends.
    pub data: Result<Bytes, Errno>,
    /// No more of this part.
    pub is_last: bool,
    /// The file as it was before this was read, with the part's first piece and with its last: two that agree in `version` enclose
    /// bytes that belong together.
    pub entry: Option<Entry>,
}

/// Something to be written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Write {
    /// Bytes at an offset.
    At { place: Place, offset: u64, data: Bytes },
    /// Bytes at the end, wherever that then is. The new attributes' size tells where they came to lie.
    Append { place: Place, data: Bytes },
    /// A new name with all that belongs to it.
    Put(Put),
    /// As [`Op::Set`], in its place among the others.
    Set { place: Place, changes: Changes },
}

/// A new file, complete. An archive is unpacked by a few requests with many of these.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Put {
    /// A directory that exists.
    pub directory: FileId,
    /// Down from there, so that what is put into a new directory may come in the same request. Not through symbolic links. The last is new: `EEXIST`
    /// otherwise.
    pub path: Vec<OsString>,
    /// What it is.
    pub what: NewFile,
    /// Permissions; symbolic links have none.
    pub mode: u32,
    /// Owner and times, where they are not what a new file gets by itself.
    pub changes: Changes,
}

/// What is put.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NewFile {
    Regular { data: Bytes },
    Directory,
    Symlink { target: OsString },
}

/// What the keeper says on its own account.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Notice {
    /// These leases are no more: forget, and answer with [`Op::Return`] (with this stamp). Who wants to change the file waits.
    Recall { file: FileId, leases: Leases, stamp: Stamp },
    /// All leases have ended, by time or because the keeper has begun anew; nobody waits for an answer. Open handles and locks may be lost, too.
    Lost { stamp: Stamp },
}

/// How a store does.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct StoreState {
    /// Whether the keeper was in reach when it was last asked.
    pub in_reach: bool,
    /// What the leases rest upon: how other programs' changes are seen.
    pub watched: Watched,
    /// Requests that have no answer yet.
    pub under_way: u64,
    /// How often the connection was made anew.
    pub reconnects: u64,
    /// The last fault, in words.
    pub fault: Option<String>,
}

/// How changes by other programs on the keeper's machine are noticed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Watched {
    /// By fanotify(7), at once.
    Fanotify,
    /// By inotify(7), at once.
    Inotify,
    /// Not at all: when a lease ends.
    #[default]
    LeaseEnd,
}

impl fmt::Display for Watched {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Fanotify => "fanotify",
            Self::Inotify => "inotify",
            Self::LeaseEnd => "lease end",
        })
    }
}

impl Op {
    /// Whether doing it twice is another thing than doing it once.
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
                | Self::Return(_)
                | Self::Settle(_)
        )
    }
}

impl Answer {
    /// The entries that it tells of, for whoever remembers them.
    #[must_use]
    pub fn entries(&self) -> Vec<Entry> {
        match self {
            Self::Entry(entry) | Self::Copied { entry, .. } => vec![*entry],
            Self::Walked(walked) => std::iter::once(walked.from).chain(walked.entries.iter().copied()).collect(),
            Self::Listing(listing) => {
                let entries = listing.names.iter().filter_map(|listed| listed.entry);
                std::iter::once(listing.directory).chain(entries).collect()
            }
            Self::Made { entry, parent } => vec![*entry, *parent],
            Self::Removed { parent, file } => std::iter::once(*parent).chain(*file).collect(),
            Self::Renamed { from, to, file, other } => [*from, *to, *file].into_iter().chain(*other).collect(),
            Self::Opened { entry, parent, .. } => std::iter::once(*entry).chain(*parent).collect(),
            Self::Done
            | Self::Target { .. }
            | Self::Offset(_)
            | Self::FileSystem(_)
            | Self::Value { .. }
            | Self::Names { .. }
            | Self::Locked(_)
            | Self::Settled(_) => Vec::new(),
        }
    }
}
