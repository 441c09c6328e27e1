//! Location of posh's programs: they lie in one directory.

use std::{env, io, path::PathBuf};

/// Path of a program in the directory of the running one, with links followed. It need not exist.
///
/// # Errors
/// /proc is not mounted.
pub fn beside(name: &str) -> io::Result<PathBuf> {
    env::current_exe().map(|own| own.with_file_name(name))
}
