//! Exit statuses and final error messages of the front end.

use std::io::{self, Write};

use crate::Error;

/// Success.
pub const OK: i32 = 0;
/// A question could not be answered, or a check found something.
pub const FAILED: i32 = 1;
/// Invalid command line; bash's number.
pub const USAGE: i32 = 2;
/// The shell was found but can't be run; bash's number.
const NOT_EXECUTABLE: i32 = 126;
/// The shell was not found; bash's number.
const NOT_FOUND: i32 = 127;

/// Prints the error on stderr; returns its exit status.
#[must_use]
pub fn complain(error: &Error) -> i32 {
    let _ = writeln!(io::stderr(), "posh: {}", error.chain());
    match error {
        Error::NoShell(_) => NOT_FOUND,
        Error::Exec { .. } => NOT_EXECUTABLE,
        _ => FAILED,
    }
}
