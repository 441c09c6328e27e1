//! Validation of answers. A malicious server must neither make this machine store more than was
//! requested, nor show invalid names.

use crate::store::{Answer, Op};

/// Longest target of a symbolic link (PATH_MAX of Linux).
const TARGET_BYTES: usize = 4096;
/// Limit for the value of an extended attribute, and for the list of names (XATTR_SIZE_MAX,
/// XATTR_LIST_MAX).
const EXTENDED_BYTES: usize = 64 << 10;

/// Returns true if an answer's counts and sizes are within what was requested.
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
