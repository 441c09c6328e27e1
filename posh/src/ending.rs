//! How the front end ends: its exit statuses, and its last words.

use std::io::{self, Write};

use crate::Error;

/// All is well.
pub const OK: i32 = 0;
/// A question could not be answered, or a check found something.
pub const FAILED: i32 = 1;
/// The command line makes no sense; bash's number.
pub const USAGE: i32 = 2;
/// The shell was found but can't be run; bash's number.
const NOT_EXECUTABLE: i32 = 126;
/// The shell was not found; bash's number.
const NOT_FOUND: i32 = 127;

/// Says what went wrong on stderr, and gives the exit status for it.
#[must_use]
pub fn complain(error: &Error) -> i32 {
    let _ = writeln!(io::stderr(), "posh: {}", error.chain());
    match error {
        Error::NoShell(_) => NOT_FOUND,
        Error::Exec { .. } => NOT_EXECUTABLE,
        _ => FAILED,
    }
}
