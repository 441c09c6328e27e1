//! Whether an answer is one to what was asked. A server that lies must neither make this machine
//! keep more than was asked for, nor show names that are none.

use crate::store::{Answer, Op};

/// Longest target of a symbolic link (PATH_MAX of Linux).
const TARGET_BYTES: usize = 4096;
/// Longest value of an extended attribute, and all names of one file's together (XATTR_SIZE_MAX,
/// XATTR_LIST_MAX).
const EXTENDED_BYTES: usize = 64 << 10;

/// The counts and sizes of an answer, against its question.
pub fn fits(op: &Op, answer: &Answer) -> bool {
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
