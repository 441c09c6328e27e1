//! What moves data: parts of files to be read, and what is written.
#![allow(
    missing_docs,
    reason = "a variant's fields are explained with the variant, names of system calls by their manual pages"
)]

use std::{ffi::OsString, ops::Range};

use bytes::Bytes;

#[cfg(doc)]
use super::Op;
use super::{Changes, Entry, Errno, FileId, Place};

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
    /// The file as it was before this was read, with the part's first piece and with its last: two
    /// that agree in `version` enclose bytes that belong together.
    pub entry: Option<Entry>,
}

/// Something to be written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Write {
    /// Bytes at an offset.
    At { place: Place, offset: u64, data: Bytes },
    /// Bytes at the end, wherever that then is. The new attributes' size tells where they came to
    /// lie.
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
    /// Down from there, so that what is put into a new directory may come in the same request. Not
    /// through symbolic links. The last is new: `EEXIST` otherwise.
    pub path: Vec<OsString>,
    /// What it is.
    pub what: NewFile,
    /// Permissions; symbolic links have none.
    pub mode: u32,
    /// Owner and times, where they are not what a new file gets by itself.
    pub changes: Changes,
}

/// Block size, in bytes, that reservations are counted in.
const BLOCK: u64 = 4096;

/// Space, in bytes, that is reserved for a new file of so many bytes: whole blocks, and one for
/// its name.
#[must_use]
pub const fn room_of_file(bytes: u64) -> u64 {
    (bytes.div_ceil(BLOCK) + 1) * BLOCK
}

impl NewFile {
    /// Bytes that creating it deducts from a reservation ([`Op::Reserve`]).
    #[must_use]
    pub fn room(&self) -> u64 {
        match self {
            Self::Regular { data } => room_of_file(data.len() as u64),
            Self::Directory | Self::Symlink { .. } => room_of_file(BLOCK),
        }
    }
}

/// What is put.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NewFile {
    Regular { data: Bytes },
    Directory,
    Symlink { target: OsString },
}
