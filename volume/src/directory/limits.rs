//! Limits of one message. Numbers that a system call checks anyway are left to it.

use std::ffi::OsString;

use nix::errno::Errno;

use crate::store::{Op, ReadPart, Write};

/// Limit of names in one walk: as many as fit in PATH_MAX bytes.
const MAX_NAMES: usize = 2048;
/// Limit of leases in one [`Op::Return`]; a gateway sends more in several.
const MAX_RETURNED: usize = 65_536;
/// Limit of parts in one read, and of writes in one call.
const MAX_PARTS: usize = 16_384;
/// PATH_MAX: a symbolic link's target.
const MAX_TARGET_BYTES: usize = 4096;
/// XATTR_SIZE_MAX.
const MAX_VALUE_BYTES: usize = 64 << 10;

/// Refuses an op above the limits.
pub fn check(op: &Op) -> Result<(), Errno> {
    match op {
        Op::Walk { names, .. } => check_names(names),
        Op::CreateWhole { put, .. } => check_names(&put.path),
        Op::Symlink { target, .. } => at_most(target.len(), MAX_TARGET_BYTES, Errno::ENAMETOOLONG),
        Op::SetAttribute { value, .. } => at_most(value.len(), MAX_VALUE_BYTES, Errno::E2BIG),
        Op::Return(returned) => at_most(returned.len(), MAX_RETURNED, Errno::E2BIG),
        _ => Ok(()),
    }
}

/// Refuses a read of too many parts, or with an invalid offset.
pub fn check_parts(parts: &[ReadPart]) -> Result<(), Errno> {
    at_most(parts.len(), MAX_PARTS, Errno::E2BIG)?;
    // The end may be `u64::MAX`, for the rest of the file.
    parts.iter().try_for_each(|part| check_offset(part.range.start, 0))
}

/// Refuses too many writes, or invalid ones.
pub fn check_writes(writes: &[Write]) -> Result<(), Errno> {
    at_most(writes.len(), MAX_PARTS, Errno::E2BIG)?;
    writes.iter().try_for_each(|write| match write {
        Write::At { offset, data, .. } => check_offset(*offset, data.len()),
        Write::Put(put) => check_names(&put.path),
        _ => Ok(()),
    })
}

/// Refuses offsets that are negative as `off_t`: pwritev2(2) takes -1 for the current position.
fn check_offset(offset: u64, bytes: usize) -> Result<(), Errno> {
    let end = offset.checked_add(bytes as u64);
    if end.is_some_and(|end| i64::try_from(end).is_ok()) { Ok(()) } else { Err(Errno::EINVAL) }
}

fn check_names(names: &[OsString]) -> Result<(), Errno> {
    at_most(names.len(), MAX_NAMES, Errno::ENAMETOOLONG)
}

fn at_most(count: usize, limit: usize, otherwise: Errno) -> Result<(), Errno> {
    if count <= limit { Ok(()) } else { Err(otherwise) }
}
