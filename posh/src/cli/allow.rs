//! `posh allow` and `posh deny`: permit or forbid a directory's own configuration.

use std::path::Path;

use fs_mapper::config::Config;

use crate::Error;

/// Allows a file with its current content.
///
/// # Errors
/// [`Error::Allow`], with every mistake of the file.
pub fn allow(file: &Path) -> Result<String, Error> {
    let file = Config::allow(file)?;
    Ok(format!(
        "{} counts for shells that start in its directory, until it is changed\n",
        file.display()
    ))
}

/// Withdraws the permission.
///
/// # Errors
/// [`Error::Allow`]
pub fn deny(file: &Path) -> Result<String, Error> {
    let was_allowed = Config::deny(file)?;
    let words = if was_allowed { "is no longer allowed" } else { "was not allowed" };
    Ok(format!("{} {words}\n", file.display()))
}
