//! Types of the bulk transfers: parts of files to read, and writes.
#![allow(
    missing_docs,
    reason = "a variant's fields are explained with the variant, \
              names of system calls by their manual pages"
)]

use std::{ffi::OsString, ops::Range};

use bytes::Bytes;

#[cfg(doc)]
use super::Op;
use super::{Changes, Entry, Errno, FileId, Place};

/// A part of a file to be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReadPart {
    /// The file.
    pub place: Place,
    /// Bytes; up to `u64::MAX` for the whole rest.
    pub range: Range<u64>,
}

/// Bytes of a file, or an error.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// The index of its part in the request.
    pub part: u32,
    /// Offset in the file.
    pub offset: u64,
    /// The bytes, or the error that ends this part.
    pub data: Result<Bytes, Errno>,
    /// True for the last piece of its part.
    pub is_last: bool,
    /// The file's attributes before this piece was read, with the part's first piece and its last:
    /// if both have the same `version`, the bytes between belong to that version.
    pub entry: Option<Entry>,
}

/// A write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Write {
    /// Bytes at an offset.
    At { place: Place, offset: u64, data: Bytes },
    /// Bytes at the end of the file, as with `O_APPEND`. Their offset follows from the size in the
    /// new attributes.
    Append { place: Place, data: Bytes },
    /// A new file, complete.
    Put(Put),
    /// Like [`Op::Set`], in order with the other writes.
    Set { place: Place, changes: Changes },
}

/// A new file, complete. Many of them go into one request, as when an archive is unpacked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Put {
    /// A directory that exists.
    pub directory: FileId,
    /// Names from `directory` down, so that a new directory and its files fit in one request.
    /// Symbolic links are not followed. The last name is new: `EEXIST` otherwise.
    pub path: Vec<OsString>,
    /// Kind and contents.
    pub what: NewFile,
    /// Permissions; symbolic links have none.
    pub mode: u32,
    /// Owner and times that differ from a new file's defaults.
    pub changes: Changes,
}

/// Block size, in bytes, that reservations are counted in.
const BLOCK: u64 = 4096;

/// Returns the space, in bytes, to reserve for a new file of `bytes`: whole blocks, and one for its
/// name.
#[must_use]
pub const fn room_of_file(bytes: u64) -> u64 {
    (bytes.div_ceil(BLOCK) + 1) * BLOCK
}

impl NewFile {
    /// Returns the bytes that its creation deducts from a reservation ([`Op::Reserve`]).
    #[must_use]
    pub fn room(&self) -> u64 {
        match self {
            Self::Regular { data } => room_of_file(data.len() as u64),
            Self::Directory | Self::Symlink { .. } => room_of_file(BLOCK),
        }
    }
}

/// Kind and contents of a [`Put`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NewFile {
    Regular { data: Bytes },
    Directory,
    Symlink { target: OsString },
}
