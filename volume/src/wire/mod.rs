//! Conversion of the store's types to and from messages (`volume.proto`). An invalid message is
//! refused as a whole ([`Malformed`]), also one in which a server names a provisional id
//! ([`id_from_server`]).

mod answer;
mod bulk;
mod op;

use std::{
    ffi::{OsStr, OsString},
    os::unix::ffi::{OsStrExt as _, OsStringExt as _},
};

use bytes::Bytes;
use posh_proto::volume as pb;

use crate::store::*;

/// Error: the message is invalid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a message about a volume has no `{0}`")]
pub struct Malformed(pub &'static str);

/// Returns the value of a mandatory field.
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

/// Bit that is set if the other bits about ACLs are valid.
const ACLS_KNOWN: u32 = 1;

/// Longest name of a file (NAME_MAX of Linux's file systems).
const NAME_BYTES: usize = 255;

/// Validates a name from a server: it must be one component, since this machine's kernel exposes
/// it.
fn file_name(bytes: &Bytes) -> Result<OsString, Malformed> {
    let is_name = !bytes.is_empty()
        && bytes.len() <= NAME_BYTES
        && !bytes.iter().any(|byte| matches!(byte, 0 | b'/'));
    if !is_name || matches!(&bytes[..], b"." | b"..") {
        return Err(Malformed("name that is one"));
    }
    Ok(text(bytes))
}

fn texts(all: &[Bytes]) -> Vec<OsString> {
    all.iter().map(text).collect()
}

/// Numbers of small enumerations, shared by both directions.
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

numbered!(
    Kind: Regular = 0, Directory = 1, Symlink = 2, Fifo = 3, Socket = 4, BlockDevice = 5,
    CharacterDevice = 6
);
numbered!(Renaming: Replace = 0, NoReplace = 1, Exchange = 2);
numbered!(
    Allocation: Extend = 0, KeepSize = 1, PunchHole = 2, ZeroRange = 3, ZeroRangeKeepSize = 4,
    CollapseRange = 5, InsertRange = 6
);
numbered!(AttributeChange: Any = 0, Create = 1, Replace = 2);
numbered!(Watched: LeaseEnd = 0, Fanotify = 1, Inotify = 2);

/// Returns a `Watched` as a number.
#[must_use]
pub fn watched_number(watched: Watched) -> u32 {
    watched.number()
}

/// Returns the `Watched` of a number; an unknown number counts as the weakest.
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

/// Validates an id from a server, which can't know a provisional one.
///
/// # Errors
/// It is missing, or provisional.
pub fn id_from_server(id: Option<pb::FileId>) -> Result<FileId, Malformed> {
    let id: FileId = needed(id, "id")?;
    if id.is_provisional() { Err(Malformed("id that a server gives")) } else { Ok(id) }
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
        Self {
            uid: caller.uid,
            gid: caller.gid,
            groups: caller.groups.to_vec(),
            is_guest: caller.is_guest,
        }
    }
}

impl From<pb::Caller> for Caller {
    fn from(caller: pb::Caller) -> Self {
        Self {
            uid: caller.uid,
            gid: caller.gid,
            groups: caller.groups.into(),
            is_guest: caller.is_guest,
        }
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
            acls: its.acls.map_or(0, |acls| ACLS_KNOWN | acls.bits()),
        };
        Self { attributes: Some(attributes), leases: entry.leases.bits(), stamp: entry.stamp.0 }
    }
}

impl TryFrom<pb::Entry> for Entry {
    type Error = Malformed;

    fn try_from(entry: pb::Entry) -> Result<Self, Malformed> {
        let its = entry.attributes.ok_or(Malformed("attributes"))?;
        let attributes = Attributes {
            id: id_from_server(its.id)?,
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
            acls: (its.acls & ACLS_KNOWN != 0).then(|| Acls::from_bits_truncate(its.acls)),
        };
        // Leases of unknown kinds are dropped.
        Ok(Self {
            attributes,
            leases: Leases::from_bits_truncate(entry.leases),
            stamp: Stamp(entry.stamp),
        })
    }
}

fn notice(file: FileId, leases: Leases, stamp: Stamp) -> pb::Notice {
    pb::Notice {
        file: Some(file.into()),
        leases: leases.bits(),
        stamp: stamp.0,
        ..pb::Notice::default()
    }
}

/// Returns the error of a number; 0 is none.
#[must_use]
pub fn errno(number: i32) -> Option<Errno> {
    (number != 0).then(|| Errno::from_raw(number))
}

impl From<Notice> for pb::Notice {
    fn from(its: Notice) -> Self {
        match its {
            Notice::Recall { file, leases, stamp } => notice(file, leases, stamp),
            Notice::Lost { stamp } => Self { stamp: stamp.0, ..Self::default() },
            Notice::Is(entry) => Self { entry: Some(entry.into()), ..Self::default() },
            Notice::All { stamp } => Self { stamp: stamp.0, is_all: true, ..Self::default() },
        }
    }
}

impl TryFrom<pb::Notice> for Notice {
    type Error = Malformed;

    fn try_from(its: pb::Notice) -> Result<Self, Malformed> {
        let stamp = Stamp(its.stamp);
        let leases = Leases::from_bits_truncate(its.leases);
        Ok(match (its.entry, its.file) {
            (Some(entry), _) => Self::Is(entry.try_into()?),
            (None, file @ Some(_)) => Self::Recall { file: id_from_server(file)?, leases, stamp },
            (None, None) if its.is_all => Self::All { stamp },
            (None, None) => Self::Lost { stamp },
        })
    }
}

fn range_lock(lock: &RangeLock) -> pb::Lock {
    let (start, end) = (lock.range.start, lock.range.end);
    pb::Lock { access: access_number(lock.access), start, end, ..pb::Lock::default() }
}
