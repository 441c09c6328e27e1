//! `posh allow` and `posh deny`: permit or forbid a directory's own configuration.

use std::path::Path;

use fs_mapper::config::Config;

use crate::{Error, error::named};

/// Allows a file with its current content.
///
/// # Errors
/// [`Error::Allow`], with every mistake of the file.
pub fn allow(file: &Path) -> Result<String, Error> {
    let file = Config::allow(file)?;
    Ok(format!(
        "{} counts for shells that start in its directory, until it is changed\n",
        named(&file)
    ))
}

/// Withdraws the permission.
///
/// # Errors
/// [`Error::Allow`]
pub fn deny(file: &Path) -> Result<String, Error> {
    let was_allowed = Config::deny(file)?;
    let words = if was_allowed { "is no longer allowed" } else { "was not allowed" };
    Ok(format!("{} {words}\n", named(file)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_a_directory_forges_no_answer() {
        let said = deny(Path::new("/none\nFORGED: it counts/mounts.toml"));
        let said = said.unwrap_or_else(|error| error.chain());
        assert_eq!(said.trim_end().lines().count(), 1, "{said}");
    }
}
