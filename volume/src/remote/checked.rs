//! Validation of answers. A malicious server must neither make this machine store more than was
//! requested, nor show invalid names, nor answer about other files.
//!
//! Invariant: an answer's entries of files that the request names are of these files, and a new
//! name's file is not its own directory. So what an answer says of "the parent" is of the directory
//! that was asked about. The id of a file that was found or created is the server's word: it names
//! one of its own files, never a provisional one ([`crate::wire`]).

use crate::store::{Answer, Entry, FileId, Op, Write};

/// Longest target of a symbolic link (PATH_MAX of Linux).
const TARGET_BYTES: usize = 4096;
/// Limit for the value of an extended attribute, and for the list of names (XATTR_SIZE_MAX,
/// XATTR_LIST_MAX).
const EXTENDED_BYTES: usize = 64 << 10;

/// Returns true if an answer is about the requested files, and its counts and sizes are within what
/// was requested.
pub fn fits(op: &Op, answer: &Answer) -> bool {
    is_about(op, answer) && is_within(op, answer)
}

/// Returns true if a write's result is about the written file.
pub fn is_written(write: &Write, entry: &Entry) -> bool {
    match write {
        Write::At { place, .. } | Write::Append { place, .. } | Write::Set { place, .. } => {
            is_of(entry, place.file)
        }
        Write::Put(put) => !is_of(entry, put.directory),
    }
}

fn is_of(entry: &Entry, file: FileId) -> bool {
    entry.attributes.id == file
}

fn is_about(op: &Op, answer: &Answer) -> bool {
    match (op, answer) {
        (Op::Walk { from, .. }, Answer::Walked(walked)) => is_of(&walked.from, *from),
        (Op::List { directory, .. }, Answer::Listing(listing)) => {
            is_of(&listing.directory, *directory)
        }
        (
            Op::MakeDirectory { parent: asked, .. }
            | Op::MakeNode { parent: asked, .. }
            | Op::Symlink { parent: asked, .. }
            | Op::Link { parent: asked, .. },
            Answer::Made { entry, parent },
        ) => is_of(parent, *asked) && !is_of(entry, *asked),
        (Op::Remove { parent: asked, .. }, Answer::Removed { parent, .. }) => is_of(parent, *asked),
        (Op::Rename { parent, new_parent, .. }, Answer::Renamed { from, to, .. }) => {
            is_of(from, *parent) && is_of(to, *new_parent)
        }
        (Op::Create { parent: asked, .. }, Answer::Opened { entry, parent, .. }) => {
            parent.is_none_or(|parent| is_of(&parent, *asked)) && !is_of(entry, *asked)
        }
        (Op::CreateWhole { put, .. }, Answer::Opened { entry, .. }) => !is_of(entry, put.directory),
        (Op::Open { place, .. }, Answer::Opened { entry, .. }) => is_of(entry, place.file),
        (Op::CopyRange { to, .. }, Answer::Copied { entry, .. }) => is_of(entry, to.file.file),
        (op, Answer::Entry(entry)) => op.files() == [entry.attributes.id],
        _ => true,
    }
}

fn is_within(op: &Op, answer: &Answer) -> bool {
    match (op, answer) {
        (Op::Walk { names, .. }, Answer::Walked(walked)) => walked.entries.len() <= names.len(),
        (Op::List { limit, .. }, Answer::Listing(listing)) => {
            listing.names.len() <= *limit as usize
        }
        (Op::ReadLink(_), Answer::Target { target, .. }) => {
            let target = target.as_encoded_bytes();
            !target.is_empty() && target.len() < TARGET_BYTES && !target.contains(&0)
        }
        (Op::GetAttribute { .. }, Answer::Value { value, .. }) => value.len() <= EXTENDED_BYTES,
        (Op::ListAttributes(_), Answer::Names { names, .. }) => {
            names.iter().map(|name| name.len() + 1).sum::<usize>() <= EXTENDED_BYTES
                && names
                    .iter()
                    .all(|name| !name.is_empty() && !name.as_encoded_bytes().contains(&0))
        }
        (Op::CopyRange { length, .. }, Answer::Copied { bytes, .. }) => bytes <= length,
        _ => true,
    }
}
