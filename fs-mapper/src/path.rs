//! Path types. A workstation's path and an executor's path have different types, so that neither is
//! used for the other. No access to file systems.

use std::fmt;
use std::path::{Component, Path, PathBuf};

/// Index of a mount in one [`MountTable`](crate::MountTable). Invalid in another table: keep the
/// executor and export when a table is replaced.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct MountId(pub(crate) usize);

impl MountId {
    /// Position in the table, for messages and maps.
    pub fn index(self) -> usize {
        self.0
    }
}

/// Name of an executor in `mounts.toml`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ExecutorName(pub(crate) String);

impl ExecutorName {
    /// Makes a name without checking it against a configuration.
    pub fn new(name: impl Into<String>) -> Self {
        ExecutorName(name.into())
    }

    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for ExecutorName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// An absolute path on the workstation. It may hold `..` below a mount point, which only the
/// owner's kernel can resolve.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ClientPath(PathBuf);

impl ClientPath {
    /// `None` unless the path is absolute.
    pub fn new(path: impl Into<PathBuf>) -> Option<Self> {
        let path = path.into();
        path.is_absolute().then_some(ClientPath(path))
    }

    /// The path, to be opened on the workstation.
    pub fn as_path(&self) -> &Path {
        &self.0
    }

    /// Drops the type: from now on the caller must keep the paths apart.
    pub fn into_path_buf(self) -> PathBuf {
        self.0
    }

    /// Returns true if the path holds a `..`.
    pub fn is_uncertain(&self) -> bool {
        self.0.components().any(|part| part == Component::ParentDir)
    }
}

/// A path on an executor: relative to the root of an export.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ExportPath {
    /// The export's name on its executor.
    pub export: String,
    /// Relative; empty for the export's root.
    pub path: PathBuf,
}

impl fmt::Display for ExportPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:/{}", self.export, self.path.display())
    }
}

/// Like `Path::join`, but without a trailing slash if `rest` is empty.
pub(crate) fn joined(base: &Path, rest: &Path) -> PathBuf {
    if rest.as_os_str().is_empty() { base.to_path_buf() } else { base.join(rest) }
}
