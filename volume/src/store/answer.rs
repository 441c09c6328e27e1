//! What a call is answered with.
#![allow(
    missing_docs,
    reason = "a variant's fields are explained with the variant, names of system calls by their manual pages"
)]

use std::ffi::OsString;

use bytes::Bytes;

use super::{Entry, Errno, FileSystem, Handle, Kind, RangeLock, Stamp};
#[cfg(doc)]
use super::{Leases, Op};

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
    /// The directories, the file that was renamed, and what it has replaced (or been exchanged
    /// with) if that still is.
    Renamed { from: Entry, to: Entry, file: Entry, other: Option<Entry> },
    /// An open file. `parent` where it was created; [`Op::Create`] of a file that was there already
    /// changes no directory.
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

impl Answer {
    /// The entries that it tells of, for whoever remembers them.
    #[must_use]
    pub fn entries(&self) -> Vec<Entry> {
        match self {
            Self::Entry(entry) | Self::Copied { entry, .. } => vec![*entry],
            Self::Walked(walked) => walked.all().collect(),
            Self::Listing(listing) => {
                let entries = listing.names.iter().filter_map(|listed| listed.entry);
                std::iter::once(listing.directory).chain(entries).collect()
            }
            Self::Made { entry, parent } => vec![*entry, *parent],
            Self::Removed { parent, file } => std::iter::once(*parent).chain(*file).collect(),
            Self::Renamed { from, to, file, other } => {
                [*from, *to, *file].into_iter().chain(*other).collect()
            }
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

/// How far a walk went.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Walked {
    /// The directory that it began in.
    pub from: Entry,
    /// The file of each name.
    pub entries: Vec<Entry>,
    /// Why it ended before the last name: `ENOENT` (remembered under the last directory's
    /// [`Leases::ENTRIES`]), `ENOTDIR` (also at a symbolic link, whose entry is then the last),
    /// `EACCES`, `EXDEV` where another file system is mounted, ...
    pub error: Option<Errno>,
}

impl Walked {
    /// Of the whole way.
    fn all(&self) -> impl Iterator<Item = Entry> {
        std::iter::once(self.from).chain(self.entries.iter().copied())
    }
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
