//! Location of the programs under test: in the directory of the running one, cargo's target
//! directory.

use std::path::{Path, PathBuf};

use crate::error::{AttemptExt, LabError, Result};

/// The directory with `posh`, `posh-gateway`, `posh-executor`, `posh-stage` and `posh-lab`.
#[derive(Debug, Clone)]
pub struct Programs(PathBuf);

impl Programs {
    /// The directory of the running program (`posh-lab`).
    pub fn beside_this() -> Result<Programs> {
        let this = std::env::current_exe().attempt(|| "find the path of this program".into())?;
        Programs::beside(&this)
    }

    /// The directory that holds `program`.
    pub fn beside(program: &Path) -> Result<Programs> {
        let missing = || LabError::NotBuilt(program.to_owned());
        let directory = program.parent().ok_or_else(missing)?;
        let directory = directory.canonicalize().map_err(|_| missing())?;
        Ok(Programs(directory))
    }

    /// The directory itself.
    pub fn directory(&self) -> &Path {
        &self.0
    }

    /// Path of the program `name`, or an error that says to build it.
    pub fn find(&self, name: &str) -> Result<PathBuf> {
        let path = self.0.join(name);
        if path.is_file() { Ok(path) } else { Err(LabError::NotBuilt(path)) }
    }
}
