//! Answers to calls.
#![allow(
    missing_docs,
    reason = "a variant's fields are explained with the variant, \
              names of system calls by their manual pages"
)]

use std::ffi::OsString;

use bytes::Bytes;

use super::{Entry, Errno, FileSystem, Handle, Kind, RangeLock, Stamp};
#[cfg(doc)]
use super::{Leases, Op};

/// Answer to one [`Op`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(clippy::large_enum_variant, reason = "an answer is made once and read once")]
pub enum Answer {
    /// Success without a result.
    Done,
    /// The file's present attributes.
    Entry(Entry),
    /// The file of each name, as far as they exist.
    Walked(Walked),
    /// Part of a directory.
    Listing(Listing),
    /// Target of a symbolic link.
    Target { target: OsString, stamp: Stamp },
    /// The new name's file, and its directory after the change.
    Made { entry: Entry, parent: Entry },
    /// The directory, and the file if it has other names or is open (`None`: it is gone).
    Removed { parent: Entry, file: Option<Entry> },
    /// The directories, the renamed file, and the file that it replaced or was exchanged with, if
    /// that still exists.
    Renamed { from: Entry, to: Entry, file: Entry, other: Option<Entry> },
    /// An open file. `parent` if the file was created; [`Op::Create`] of an existing file changes
    /// no directory.
    Opened { handle: Handle, entry: Entry, parent: Option<Entry> },
    /// Offset of data or a hole.
    Offset(u64),
    /// Bytes copied, and the target's present attributes.
    Copied { bytes: u64, entry: Entry },
    /// Space and limits.
    FileSystem(FileSystem),
    /// An extended attribute.
    Value { value: Bytes, stamp: Stamp },
    /// Names of extended attributes.
    Names { names: Vec<OsString>, stamp: Stamp },
    /// The conflicting lock, if any.
    Locked(Option<RangeLock>),
    /// See [`Op::Settle`].
    Settled(Stamp),
}

impl Answer {
    /// Returns all entries in it, for caching.
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

/// Result of a walk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Walked {
    /// The directory that it began in.
    pub from: Entry,
    /// The file of each name.
    pub entries: Vec<Entry>,
    /// Error that ended it before the last name: `ENOENT` (may be cached under the last directory's
    /// [`Leases::ENTRIES`]), `ENOTDIR` (also at a symbolic link, whose entry is then the last),
    /// `EACCES`, `EXDEV` where another file system is mounted, ...
    pub error: Option<Errno>,
}

impl Walked {
    /// Returns the first directory's entry and those of all names.
    fn all(&self) -> impl Iterator<Item = Entry> {
        std::iter::once(self.from).chain(self.entries.iter().copied())
    }
}

/// Part of a directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listing {
    /// The directory itself.
    pub directory: Entry,
    /// The names, in the directory's order.
    pub names: Vec<Listed>,
    /// True if the last name is among them.
    pub is_last: bool,
}

/// A name of a directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    /// One component.
    pub name: OsString,
    /// Position from which the listing continues after it.
    pub cookie: u64,
    /// The file; `None` if it is gone, or its attributes can't be read.
    pub entry: Option<Entry>,
    /// Its inode number in the directory (`d_ino`).
    pub inode: u64,
    /// Its kind in the directory (`d_type`).
    pub kind: Kind,
}
