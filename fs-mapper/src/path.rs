//! The names of things: a path as the workstation sees it and a path as an
//! executor names it are different types, so that one cannot be sent where the
//! other is meant. No look at any file system here.

use std::fmt;
use std::path::{Component, Path, PathBuf};

/// A mount of one [`MountTable`](crate::MountTable). It means nothing in
/// another table: keep the executor and export when a table is replaced.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct MountId(pub(crate) usize);

impl MountId {
    /// Position in the table, for messages and maps.
    pub fn index(self) -> usize {
        self.0
    }
}

/// An executor, by the name that `mounts.toml` gives it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ExecutorName(pub(crate) String);

impl ExecutorName {
    /// A name; it is not checked against any configuration.
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

/// An absolute path as the workstation sees it. It may hold `..` below a mount
/// point, where only the owner's kernel can say what that means.
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

    /// Gives up the type: from here on the caller answers for it.
    pub fn into_path_buf(self) -> PathBuf {
        self.0
    }

    /// Whether a `..` is left in it.
    pub fn is_uncertain(&self) -> bool {
        self.0.components().any(|part| part == Component::ParentDir)
    }
}

/// A path as an executor names it: relative to the root of an export.
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

/// As `Path::join`, but without the slash that joining an empty path leaves at the end.
pub(crate) fn joined(base: &Path, rest: &Path) -> PathBuf {
    if rest.as_os_str().is_empty() { base.to_path_buf() } else { base.join(rest) }
}
