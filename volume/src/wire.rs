//! The store's words as messages (`volume.proto`), and back. What a peer sends that means nothing is refused as a
//! whole ([`Malformed`]). Nothing is decided here.

use std::{
    ffi::{OsStr, OsString},
    os::unix::ffi::{OsStrExt as _, OsStringExt as _},
};

use bytes::Bytes;
use posh_proto::volume as pb;

use crate::store::*;

/// A message that no peer of ours sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a message about a volume has no `{0}`")]
pub struct Malformed(pub &'static str);

/// What a field has that must be there.
fn needed<A, B>(value: Option<A>, name: &'static str) -> Result<B, Malformed>
where
    B: TryFrom<A>,
    Malformed: From<B::Error>,
{
    Ok(B::try_from(value.ok_or(Malformed(name))?)?)
}

impl From<std::convert::Infallible> for Malformed {
    fn from(never: std::convert::Infallible) -> Self {
        match never {}
    }
}

fn bytes(text: &OsStr) -> Bytes {
    Bytes::copy_from_slice(text.as_bytes())
}

fn text(bytes: &Bytes) -> OsString {
    OsString::from_vec(bytes.to_vec())
}

fn texts(all: &[Bytes]) -> Vec<OsString> {
    all.iter().map(text).collect()
}

/// Numbers of small enumerations, which both directions share.
macro_rules! numbered {
    ($name:ident: $($variant:ident = $number:literal),*) => {
        impl Numbered for $name {
            fn number(self) -> u32 {
                match self {
                    $(Self::$variant => $number),*
                }
            }

            fn of(number: u32) -> Result<Self, Malformed> {
                match number {
                    $($number => Ok(Self::$variant),)*
                    _ => Err(Malformed(stringify!($name))),
                }
            }
        }
    };
}

trait Numbered: Sized {
    fn number(self) -> u32;
    fn of(number: u32) -> Result<Self, Malformed>;
}

numbered!(Kind: Regular = 0, Directory = 1, Symlink = 2, Fifo = 3, Socket = 4, BlockDevice = 5, CharacterDevice = 6);
numbered!(Renaming: Replace = 0, NoReplace = 1, Exchange = 2);
numbered!(Allocation: Extend = 0, KeepSize = 1, PunchHole = 2, ZeroRange = 3, ZeroRangeKeepSize = 4, CollapseRange = 5, InsertRange = 6);
numbered!(AttributeChange: Any = 0, Create = 1, Replace = 2);
numbered!(Watched: LeaseEnd = 0, Fanotify = 1, Inotify = 2);

/// `Watched` as a number.
#[must_use]
pub fn watched_number(watched: Watched) -> u32 {
    watched.number()
}

/// And back; what is not known counts as the weakest.
#[must_use]
pub fn watched_of(number: u32) -> Watched {
    Watched::of(number).unwrap_or_default()
}

fn access_number(access: Option<Access>) -> u32 {
    match access {
        None => 0,
        Some(Access::Shared) => 1,
        Some(Access::Exclusive) => 2,
    }
}

fn access_of(number: u32) -> Result<Option<Access>, Malformed> {
    match number {
        0 => Ok(None),
        1 => Ok(Some(Access::Shared)),
        2 => Ok(Some(Access::Exclusive)),
        _ => Err(Malformed("access")),
    }
}

impl From<FileId> for pb::FileId {
    fn from(id: FileId) -> Self {
        Self { inode: id.inode, generation: id.generation }
    }
}

impl From<pb::FileId> for FileId {
    fn from(id: pb::FileId) -> Self {
        Self { inode: id.inode, generation: id.generation }
    }
}

impl From<Place> for pb::Place {
    fn from(place: Place) -> Self {
        Self { file: Some(place.file.into()), handle: place.handle.map(|handle| handle.0) }
    }
}

impl TryFrom<pb::Place> for Place {
    type Error = Malformed;

    fn try_from(place: pb::Place) -> Result<Self, Malformed> {
        Ok(Self { file: needed(place.file, "file")?, handle: place.handle.map(Handle) })
    }
}

impl From<&Caller> for pb::Caller {
    fn from(caller: &Caller) -> Self {
        Self { uid: caller.uid, gid: caller.gid, groups: caller.groups.to_vec() }
    }
}

impl From<pb::Caller> for Caller {
    fn from(caller: pb::Caller) -> Self {
        Self { uid: caller.uid, gid: caller.gid, groups: caller.groups.into() }
    }
}

impl From<Time> for pb::Time {
    fn from(time: Time) -> Self {
        Self { seconds: time.seconds, nanoseconds: time.nanoseconds }
    }
}

impl From<pb::Time> for Time {
    fn from(time: pb::Time) -> Self {
        Self { seconds: time.seconds, nanoseconds: time.nanoseconds }
    }
}

impl From<NewTime> for pb::NewTime {
    fn from(time: NewTime) -> Self {
        match time {
            NewTime::Now => Self { at: None },
            NewTime::At(time) => Self { at: Some(time.into()) },
        }
    }
}

impl From<pb::NewTime> for NewTime {
    fn from(time: pb::NewTime) -> Self {
        time.at.map_or(Self::Now, |time| Self::At(time.into()))
    }
}

impl From<Changes> for pb::Changes {
    fn from(changes: Changes) -> Self {
        Self {
            mode: changes.mode,
            uid: changes.uid,
            gid: changes.gid,
            size: changes.size,
            atime: changes.atime.map(Into::into),
            mtime: changes.mtime.map(Into::into),
        }
    }
}

impl From<pb::Changes> for Changes {
    fn from(changes: pb::Changes) -> Self {
        Self {
            mode: changes.mode,
            uid: changes.uid,
            gid: changes.gid,
            size: changes.size,
            atime: changes.atime.map(Into::into),
            mtime: changes.mtime.map(Into::into),
        }
    }
}

impl From<Entry> for pb::Entry {
    fn from(entry: Entry) -> Self {
        let its = entry.attributes;
        let attributes = pb::Attributes {
            id: Some(its.id.into()),
            kind: its.kind.number(),
            mode: its.mode,
            uid: its.uid,
            gid: its.gid,
            links: its.links,
            size: its.size,
            blocks: its.blocks,
            rdev: its.rdev,
            atime: Some(its.atime.into()),
            mtime: Some(its.mtime.into()),
            ctime: Some(its.ctime.into()),
            version: its.version,
        };
        Self { attributes: Some(attributes), leases: entry.leases.bits(), stamp: entry.stamp.0 }
    }
}

impl TryFrom<pb::Entry> for Entry {
    type Error = Malformed;

    fn try_from(entry: pb::Entry) -> Result<Self, Malformed> {
        let its = entry.attributes.ok_or(Malformed("attributes"))?;
        let attributes = Attributes {
            id: needed(its.id, "id")?,
            kind: Kind::of(its.kind)?,
            mode: its.mode,
            uid: its.uid,
            gid: its.gid,
            links: its.links,
            size: its.size,
            blocks: its.blocks,
            rdev: its.rdev,
            atime: its.atime.unwrap_or_default().into(),
            mtime: its.mtime.unwrap_or_default().into(),
            ctime: its.ctime.unwrap_or_default().into(),
            version: its.version,
        };
        // A lease of a kind that is not known here is of no use here.
        Ok(Self { attributes, leases: Leases::from_bits_truncate(entry.leases), stamp: Stamp(entry.stamp) })
    }
}

fn name_of(parent: FileId, name: &OsStr) -> Option<pb::Name> {
    Some(pb::Name { parent: Some(parent.into()), name: bytes(name) })
}

fn name(message: Option<pb::Name>) -> Result<(FileId, OsString), Malformed> {
    let name = message.ok_or(Malformed("name"))?;
    Ok((needed(name.parent, "parent")?, text(&name.name)))
}

impl From<Op> for pb::Op {
    fn from(op: Op) -> Self {
        Self { kind: Some(kind_of(op)) }
    }
}

fn kind_of(op: Op) -> pb::op::Kind {
    use pb::op::Kind as To;
    match op {
        Op::Walk { from, names } => {
            To::Walk(pb::Walk { from: Some(from.into()), names: names.iter().map(|name| bytes(name)).collect() })
        }
        Op::Attributes(place) => To::Attributes(place.into()),
        Op::Set { place, changes } => To::Set(pb::Set { place: Some(place.into()), changes: Some(changes.into()) }),
        Op::List { directory, cookie, limit } => {
            To::List(pb::List { directory: Some(directory.into()), cookie, limit })
        }
        Op::ReadLink(file) => To::ReadLink(file.into()),
        Op::MakeDirectory { .. } | Op::MakeNode { .. } | Op::Symlink { .. } | Op::Link { .. } => kind_of_make(op),
        Op::Remove { parent, name, what } => {
            To::Remove(pb::Remove { name: name_of(parent, &name), directory: what == Removal::Directory })
        }
        Op::Rename { from, to, how } => {
            let (from, to) = (name_of(from.0, &from.1), name_of(to.0, &to.1));
            To::Rename(pb::Rename { from, to, how: how.number() })
        }
        Op::Create { parent, name, mode, flags } => {
            To::Create(pb::Open { name: name_of(parent, &name), file: None, mode, flags: flags.bits() })
        }
        Op::Open { file, flags } => {
            To::Open(pb::Open { file: Some(file.into()), flags: flags.bits(), ..pb::Open::default() })
        }
        Op::Close(handle) => To::Close(handle.0),
        Op::Sync { place, what } => To::Sync(pb::Sync { place: Some(place.into()), data_only: what == Synced::Data }),
        Op::Allocate { place, range, how } => To::Allocate(pb::Allocate {
            place: Some(place.into()),
            start: range.start,
            end: range.end,
            how: how.number(),
        }),
        Op::Seek { place, offset, what } => {
            To::Seek(pb::Seek { place: Some(place.into()), offset, hole: what == Sought::Hole })
        }
        Op::CopyRange { from, to, length } => To::CopyRange(pb::CopyRange {
            from: Some(from.0.into()),
            from_offset: from.1,
            to: Some(to.0.into()),
            to_offset: to.1,
            length,
        }),
        Op::FileSystem => To::FileSystem(pb::Nothing {}),
        Op::GetAttribute { place, name } => To::GetAttribute(extended(place, &name)),
        Op::SetAttribute { place, name, value, how } => {
            To::SetAttribute(pb::Extended { value, how: how.number(), ..extended(place, &name) })
        }
        Op::RemoveAttribute { place, name } => To::RemoveAttribute(extended(place, &name)),
        Op::ListAttributes(place) => To::ListAttributes(place.into()),
        Op::Lock { place, owner, lock, wait } => {
            let (whole, (start, end), access) = match lock {
                Lock::Whole(access) => (true, (0, 0), access),
                Lock::Range(lock) => (false, (lock.range.start, lock.range.end), lock.access),
            };
            let (place, access) = (Some(place.into()), access_number(access));
            To::Lock(pb::Lock { place, owner, whole, access, start, end, wait: wait == Wait::Yes })
        }
        Op::TestLock { place, owner, lock } => {
            To::TestLock(pb::Lock { place: Some(place.into()), owner, ..range_lock(&lock) })
        }
        Op::Unlock { file, owner } => To::Unlock(pb::Unlock { file: Some(file.into()), owner }),
        Op::Return(returned) => {
            let leases = returned.into_iter().map(|each| notice(each.file, each.leases, each.stamp)).collect();
            To::ReturnLeases(pb::ReturnLeases { leases })
        }
        Op::Settle(how) => To::Settle(how == Settling::Flush),
    }
}

fn kind_of_make(op: Op) -> pb::op::Kind {
    use pb::op::Kind as To;
    match op {
        Op::MakeNode { parent, name, mode, kind, rdev } => To::MakeNode(pb::Make {
            name: name_of(parent, &name),
            mode,
            kind: kind.number(),
            rdev,
            ..pb::Make::default()
        }),
        Op::Symlink { parent, name, target } => {
            To::Symlink(pb::Make { name: name_of(parent, &name), target: bytes(&target), ..pb::Make::default() })
        }
        Op::Link { file, parent, name } => {
            To::Link(pb::Make { name: name_of(parent, &name), file: Some(file.into()), ..pb::Make::default() })
        }
        Op::MakeDirectory { parent, name, mode } => {
            To::MakeDirectory(pb::Make { name: name_of(parent, &name), mode, ..pb::Make::default() })
        }
        _ => To::FileSystem(pb::Nothing {}),
    }
}

fn extended(place: Place, name: &OsStr) -> pb::Extended {
    pb::Extended { place: Some(place.into()), name: bytes(name), ..pb::Extended::default() }
}

fn range_lock(lock: &RangeLock) -> pb::Lock {
    let (start, end) = (lock.range.start, lock.range.end);
    pb::Lock { access: access_number(lock.access), start, end, ..pb::Lock::default() }
}

fn notice(file: FileId, leases: Leases, stamp: Stamp) -> pb::Notice {
    pb::Notice { file: Some(file.into()), leases: leases.bits(), stamp: stamp.0 }
}

impl TryFrom<pb::Op> for Op {
    type Error = Malformed;

    fn try_from(op: pb::Op) -> Result<Self, Malformed> {
        use pb::op::Kind as From;
        Ok(match op.kind.ok_or(Malformed("op"))? {
            From::Walk(walk) => Self::Walk { from: needed(walk.from, "from")?, names: texts(&walk.names) },
            From::Attributes(place) => Self::Attributes(place.try_into()?),
            From::Set(set) => {
                Self::Set { place: needed(set.place, "place")?, changes: set.changes.unwrap_or_default().into() }
            }
            From::List(list) => {
                let directory = needed(list.directory, "directory")?;
                Self::List { directory, cookie: list.cookie, limit: list.limit }
            }
            From::ReadLink(file) => Self::ReadLink(file.into()),
            From::MakeDirectory(make) => {
                let (parent, name) = name(make.name)?;
                Self::MakeDirectory { parent, name, mode: make.mode }
            }
            From::MakeNode(make) => {
                let (parent, name) = name(make.name)?;
                Self::MakeNode { parent, name, mode: make.mode, kind: Kind::of(make.kind)?, rdev: make.rdev }
            }
            From::Symlink(make) => {
                let (parent, name) = name(make.name)?;
                Self::Symlink { parent, name, target: text(&make.target) }
            }
            From::Link(make) => {
                let (parent, name) = name(make.name)?;
                Self::Link { file: needed(make.file, "file")?, parent, name }
            }
            From::Remove(remove) => {
                let (parent, name) = name(remove.name)?;
                let what = if remove.directory { Removal::Directory } else { Removal::File };
                Self::Remove { parent, name, what }
            }
            From::Rename(rename) => {
                Self::Rename { from: name(rename.from)?, to: name(rename.to)?, how: Renaming::of(rename.how)? }
            }
            From::Create(open) => {
                let (parent, name) = name(open.name)?;
                Self::Create { parent, name, mode: open.mode, flags: flags(open.flags)? }
            }
            From::Open(open) => Self::Open { file: needed(open.file, "file")?, flags: flags(open.flags)? },
            From::Close(handle) => Self::Close(Handle(handle)),
            other => op_on_file(other)?,
        })
    }
}

fn op_on_file(kind: pb::op::Kind) -> Result<Op, Malformed> {
    use pb::op::Kind as From;
    Ok(match kind {
        From::Sync(sync) => {
            let what = if sync.data_only { Synced::Data } else { Synced::Everything };
            Op::Sync { place: needed(sync.place, "place")?, what }
        }
        From::Allocate(its) => {
            let (place, how) = (needed(its.place, "place")?, Allocation::of(its.how)?);
            Op::Allocate { place, range: its.start..its.end, how }
        }
        From::Seek(seek) => {
            let what = if seek.hole { Sought::Hole } else { Sought::Data };
            Op::Seek { place: needed(seek.place, "place")?, offset: seek.offset, what }
        }
        From::CopyRange(copy) => Op::CopyRange {
            from: (needed(copy.from, "from")?, copy.from_offset),
            to: (needed(copy.to, "to")?, copy.to_offset),
            length: copy.length,
        },
        From::FileSystem(_) => Op::FileSystem,
        From::GetAttribute(its) => Op::GetAttribute { place: needed(its.place, "place")?, name: text(&its.name) },
        From::SetAttribute(its) => Op::SetAttribute {
            place: needed(its.place, "place")?,
            name: text(&its.name),
            value: its.value,
            how: AttributeChange::of(its.how)?,
        },
        From::RemoveAttribute(its) => Op::RemoveAttribute { place: needed(its.place, "place")?, name: text(&its.name) },
        From::ListAttributes(place) => Op::ListAttributes(place.try_into()?),
        From::Lock(its) => {
            let access = access_of(its.access)?;
            let range = || RangeLock { range: its.start..its.end, access };
            let lock = if its.whole { Lock::Whole(access) } else { Lock::Range(range()) };
            let wait = if its.wait { Wait::Yes } else { Wait::No };
            Op::Lock { place: needed(its.place, "place")?, owner: its.owner, lock, wait }
        }
        From::TestLock(its) => {
            let lock = RangeLock { range: its.start..its.end, access: access_of(its.access)? };
            Op::TestLock { place: needed(its.place, "place")?, owner: its.owner, lock }
        }
        From::Unlock(its) => Op::Unlock { file: needed(its.file, "file")?, owner: its.owner },
        From::ReturnLeases(its) => {
            let returned = |each: pb::Notice| {
                let (leases, stamp) = (Leases::from_bits_truncate(each.leases), Stamp(each.stamp));
                Ok(Returned { file: needed(each.file, "file")?, leases, stamp })
            };
            Op::Return(its.leases.into_iter().map(returned).collect::<Result<_, Malformed>>()?)
        }
        From::Settle(flush) => Op::Settle(if flush { Settling::Flush } else { Settling::Recalls }),
        _ => return Err(Malformed("op")),
    })
}

fn flags(bits: u32) -> Result<OpenFlags, Malformed> {
    OpenFlags::from_bits(bits).ok_or(Malformed("flags"))
}

impl From<Answer> for pb::Answer {
    fn from(answer: Answer) -> Self {
        use pb::answer::Kind as To;
        let entries = |entries: Vec<Entry>| pb::Entries { entries: entries.into_iter().map(Into::into).collect() };
        let kind = match answer {
            Answer::Done => To::Done(pb::Nothing {}),
            Answer::Entry(entry) => To::Entry(entry.into()),
            Answer::Walked(walked) => To::Walked(pb::Walked {
                from: Some(walked.from.into()),
                entries: walked.entries.into_iter().map(Into::into).collect(),
                error: walked.error.map_or(0, |errno| errno as i32),
            }),
            Answer::Listing(listing) => To::Listing(listing.into()),
            Answer::Target { target, stamp } => To::Target(stamped(vec![bytes(&target)], stamp)),
            Answer::Made { entry, parent } => To::Made(entries(vec![entry, parent])),
            Answer::Removed { parent, file } => To::Removed(entries(std::iter::once(parent).chain(file).collect())),
            Answer::Renamed { from, to, file, other } => {
                To::Renamed(entries([from, to, file].into_iter().chain(other).collect()))
            }
            Answer::Opened { handle, entry, parent } => {
                To::Opened(pb::Opened { handle: handle.0, entry: Some(entry.into()), parent: parent.map(Into::into) })
            }
            Answer::Offset(offset) => To::Offset(offset),
            Answer::Copied { bytes, entry } => To::Copied(pb::Copied { bytes, entry: Some(entry.into()) }),
            Answer::FileSystem(its) => To::FileSystem(pb::FileSystem {
                block_bytes: its.block_bytes,
                bytes: its.bytes,
                bytes_free: its.bytes_free,
                bytes_available: its.bytes_available,
                files: its.files,
                files_free: its.files_free,
                name_bytes: its.name_bytes,
            }),
            Answer::Value { value, stamp } => To::Value(stamped(vec![value], stamp)),
            Answer::Names { names, stamp } => To::Names(stamped(names.iter().map(|name| bytes(name)).collect(), stamp)),
            Answer::Locked(lock) => To::Locked(lock.as_ref().map(range_lock).unwrap_or_default()),
            Answer::Settled(stamp) => To::Settled(stamp.0),
        };
        Self { kind: Some(kind) }
    }
}

fn stamped(values: Vec<Bytes>, stamp: Stamp) -> pb::Stamped {
    pb::Stamped { values, stamp: stamp.0 }
}

impl From<Listing> for pb::Listing {
    fn from(listing: Listing) -> Self {
        let listed = |listed: Listed| pb::Listed {
            name: bytes(&listed.name),
            cookie: listed.cookie,
            entry: listed.entry.map(Into::into),
            inode: listed.inode,
            kind: listed.kind.number(),
        };
        Self {
            directory: Some(listing.directory.into()),
            names: listing.names.into_iter().map(listed).collect(),
            is_last: listing.is_last,
        }
    }
}

impl TryFrom<pb::Listing> for Listing {
    type Error = Malformed;

    fn try_from(listing: pb::Listing) -> Result<Self, Malformed> {
        let listed = |listed: pb::Listed| {
            Ok(Listed {
                name: text(&listed.name),
                cookie: listed.cookie,
                entry: listed.entry.map(Entry::try_from).transpose()?,
                inode: listed.inode,
                kind: Kind::of(listed.kind)?,
            })
        };
        let names = listing.names.into_iter().map(listed).collect::<Result<_, Malformed>>()?;
        Ok(Self { directory: needed(listing.directory, "directory")?, names, is_last: listing.is_last })
    }
}

impl TryFrom<pb::Answer> for Answer {
    type Error = Malformed;

    fn try_from(answer: pb::Answer) -> Result<Self, Malformed> {
        use pb::answer::Kind as From;
        Ok(match answer.kind.ok_or(Malformed("answer"))? {
            From::Done(_) => Self::Done,
            From::Entry(entry) => Self::Entry(entry.try_into()?),
            From::Walked(walked) => Self::Walked(Walked {
                from: needed(walked.from, "from")?,
                entries: walked.entries.into_iter().map(Entry::try_from).collect::<Result<_, _>>()?,
                error: errno(walked.error),
            }),
            From::Listing(listing) => Self::Listing(listing.try_into()?),
            From::Target(its) => Self::Target { target: text(&first(&its)), stamp: Stamp(its.stamp) },
            From::Made(its) => {
                let mut its = its.entries.into_iter();
                Self::Made { entry: needed(its.next(), "entry")?, parent: needed(its.next(), "parent")? }
            }
            From::Removed(its) => {
                let mut its = its.entries.into_iter();
                let parent = needed(its.next(), "parent")?;
                Self::Removed { parent, file: its.next().map(Entry::try_from).transpose()? }
            }
            From::Renamed(its) => {
                let mut its = its.entries.into_iter();
                Self::Renamed {
                    from: needed(its.next(), "from")?,
                    to: needed(its.next(), "to")?,
                    file: needed(its.next(), "file")?,
                    other: its.next().map(Entry::try_from).transpose()?,
                }
            }
            From::Opened(its) => Self::Opened {
                handle: Handle(its.handle),
                entry: needed(its.entry, "entry")?,
                parent: its.parent.map(Entry::try_from).transpose()?,
            },
            From::Offset(offset) => Self::Offset(offset),
            From::Copied(its) => Self::Copied { bytes: its.bytes, entry: needed(its.entry, "entry")? },
            From::FileSystem(its) => Self::FileSystem(FileSystem {
                block_bytes: its.block_bytes,
                bytes: its.bytes,
                bytes_free: its.bytes_free,
                bytes_available: its.bytes_available,
                files: its.files,
                files_free: its.files_free,
                name_bytes: its.name_bytes,
            }),
            From::Value(its) => Self::Value { value: first(&its), stamp: Stamp(its.stamp) },
            From::Names(its) => Self::Names { names: texts(&its.values), stamp: Stamp(its.stamp) },
            From::Locked(its) => {
                let access = access_of(its.access)?;
                Self::Locked(access.map(|access| RangeLock { range: its.start..its.end, access: Some(access) }))
            }
            From::Settled(stamp) => Self::Settled(Stamp(stamp)),
        })
    }
}

fn first(stamped: &pb::Stamped) -> Bytes {
    stamped.values.first().cloned().unwrap_or_default()
}

/// Of its number; 0 is none.
#[must_use]
pub fn errno(number: i32) -> Option<Errno> {
    (number != 0).then(|| Errno::from_raw(number))
}

impl From<Notice> for pb::Notice {
    fn from(its: Notice) -> Self {
        match its {
            Notice::Recall { file, leases, stamp } => notice(file, leases, stamp),
            Notice::Lost { stamp } => Self { file: None, leases: 0, stamp: stamp.0 },
        }
    }
}

impl From<pb::Notice> for Notice {
    fn from(its: pb::Notice) -> Self {
        let stamp = Stamp(its.stamp);
        let leases = Leases::from_bits_truncate(its.leases);
        its.file.map_or(Self::Lost { stamp }, |file| Self::Recall { file: file.into(), leases, stamp })
    }
}

impl From<ReadPart> for pb::ReadPart {
    fn from(part: ReadPart) -> Self {
        Self { place: Some(part.place.into()), start: part.range.start, end: part.range.end }
    }
}

impl TryFrom<pb::ReadPart> for ReadPart {
    type Error = Malformed;

    fn try_from(part: pb::ReadPart) -> Result<Self, Malformed> {
        Ok(Self { place: needed(part.place, "place")?, range: part.start..part.end })
    }
}

impl From<Piece> for pb::Piece {
    fn from(piece: Piece) -> Self {
        let (data, error) = match piece.data {
            Ok(data) => (data, 0),
            Err(errno) => (Bytes::new(), errno as i32),
        };
        let (part, offset, is_last) = (piece.part, piece.offset, piece.is_last);
        Self { part, offset, data, error, is_last, entry: piece.entry.map(Into::into) }
    }
}

impl TryFrom<pb::Piece> for Piece {
    type Error = Malformed;

    fn try_from(piece: pb::Piece) -> Result<Self, Malformed> {
        Ok(Self {
            part: piece.part,
            offset: piece.offset,
            data: errno(piece.error).map_or(Ok(piece.data), Err),
            is_last: piece.is_last,
            entry: piece.entry.map(Entry::try_from).transpose()?,
        })
    }
}

impl From<Write> for pb::Write {
    fn from(write: Write) -> Self {
        use pb::write::Kind as To;
        let place_of = |place: Place| Some(place.into());
        let kind = match write {
            Write::At { place, offset, data } => To::At(pb::Bytes { place: place_of(place), offset, data }),
            Write::Append { place, data } => To::Append(pb::Bytes { place: place_of(place), offset: 0, data }),
            Write::Set { place, changes } => To::Set(pb::Set { place: place_of(place), changes: Some(changes.into()) }),
            Write::Put(put) => To::Put(put.into()),
        };
        Self { kind: Some(kind) }
    }
}

impl From<Put> for pb::Put {
    fn from(put: Put) -> Self {
        let (kind, data) = match put.what {
            NewFile::Regular { data } => (Kind::Regular, data),
            NewFile::Directory => (Kind::Directory, Bytes::new()),
            NewFile::Symlink { target } => (Kind::Symlink, bytes(&target)),
        };
        Self {
            directory: Some(put.directory.into()),
            path: put.path.iter().map(|name| bytes(name)).collect(),
            kind: kind.number(),
            data,
            mode: put.mode,
            changes: Some(put.changes.into()),
        }
    }
}

impl TryFrom<pb::Write> for Write {
    type Error = Malformed;

    fn try_from(write: pb::Write) -> Result<Self, Malformed> {
        use pb::write::Kind as From;
        Ok(match write.kind.ok_or(Malformed("write"))? {
            From::At(at) => Self::At { place: needed(at.place, "place")?, offset: at.offset, data: at.data },
            From::Append(at) => Self::Append { place: needed(at.place, "place")?, data: at.data },
            From::Set(set) => {
                Self::Set { place: needed(set.place, "place")?, changes: set.changes.unwrap_or_default().into() }
            }
            From::Put(put) => Self::Put(Put {
                directory: needed(put.directory, "directory")?,
                path: texts(&put.path),
                what: match Kind::of(put.kind)? {
                    Kind::Regular => NewFile::Regular { data: put.data },
                    Kind::Directory => NewFile::Directory,
                    Kind::Symlink => NewFile::Symlink { target: text(&put.data) },
                    _ => return Err(Malformed("kind")),
                },
                mode: put.mode,
                changes: put.changes.unwrap_or_default().into(),
            }),
        })
    }
}
