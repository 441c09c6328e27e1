//! The programs that belong together lie in one directory.

use std::{env, io, path::PathBuf};

/// Where a program of that name is, if it is installed as it should be: beside the one that runs,
/// links followed.
///
/// # Errors
/// /proc is not mounted.
pub fn beside(name: &str) -> io::Result<PathBuf> {
    env::current_exe().map(|own| own.with_file_name(name))
}
