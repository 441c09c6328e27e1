//! How much one message may ask for. A number that a system call refuses anyway is left to it.

use std::ffi::OsString;

use nix::errno::Errno;

use crate::store::{Op, ReadPart, Write};

/// Names of one walk: as many as a path of PATH_MAX bytes has.
const MAX_NAMES: usize = 2048;
/// Leases given back by one op; a gateway sends more in several.
const MAX_RETURNED: usize = 65_536;
/// Parts of one read, and writes of one call.
const MAX_PARTS: usize = 16_384;
/// PATH_MAX: a symbolic link's target.
const MAX_TARGET_BYTES: usize = 4096;
/// XATTR_SIZE_MAX.
const MAX_VALUE_BYTES: usize = 64 << 10;

/// Refuses an op that asks for too much at once.
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

/// Refuses a read of too many parts, or of what no file can have.
pub fn check_parts(parts: &[ReadPart]) -> Result<(), Errno> {
    at_most(parts.len(), MAX_PARTS, Errno::E2BIG)?;
    // An end may be beyond: it is as much as there is.
    parts.iter().try_for_each(|part| check_offset(part.range.start, 0))
}

/// Refuses too many writes at once.
pub fn check_writes(writes: &[Write]) -> Result<(), Errno> {
    at_most(writes.len(), MAX_PARTS, Errno::E2BIG)?;
    writes.iter().try_for_each(|write| match write {
        Write::At { offset, data, .. } => check_offset(*offset, data.len()),
        Write::Put(put) => check_names(&put.path),
        _ => Ok(()),
    })
}

/// pwritev2(2) takes -1 for the present position.
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
