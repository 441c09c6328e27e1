//! Nothing stale, nothing overwritten: what has to happen on a mount before a
//! command runs behind its back on the server, and after. One adapter per file
//! system type. Every call may block for as long as the mount does: the caller
//! brings the thread and the deadline.

use std::io;
use std::path::{Path, PathBuf};

/// What a run has changed on the server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// The content or attributes of a file, by its path on the workstation.
    FileWritten(PathBuf),
    /// Names in a directory were made, removed or renamed.
    NamesChanged(PathBuf),
}

/// Whether a file that the shell has opened for writing may be written on the
/// server instead.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WriteBehind {
    /// Yes: the open descriptor holds nothing back.
    Allowed,
    /// No: the file system uploads its own copy on close and would overwrite
    /// the server's. The bytes come back through the local descriptor.
    ThroughLocalDescriptor,
}

/// Keeps the caches of one kind of mount true. Paths are the workstation's.
pub trait Coherence: Send + Sync {
    /// Brings what this machine has written to a file through the mount to the
    /// server, before a command reads it there.
    fn settle(&self, path: &Path) -> io::Result<()>;
    /// Makes the mount forget what it remembers of something that a command has
    /// changed on the server.
    fn refresh(&self, change: &Change) -> io::Result<()>;
    /// Whether redirects may be written on the server.
    fn write_behind(&self) -> WriteBehind;
}

/// The adapters, by the names that `coherence` in `mounts.toml` knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Adapter {
    /// `fuse.sshfs`
    Sshfs,
    /// `fuse.rclone`
    Rclone,
    /// `nfs`, `nfs4`
    Nfs,
    /// The same files by the local kernel: a bind mount or a plain directory.
    Bind,
    /// Everything else.
    Generic,
}

impl Adapter {
    /// Every adapter, in the order that messages list them.
    pub const ALL: [Adapter; 5] = [Adapter::Sshfs, Adapter::Rclone, Adapter::Nfs, Adapter::Bind, Adapter::Generic];

    /// Its name in `mounts.toml`.
    pub fn name(self) -> &'static str {
        match self {
            Adapter::Sshfs => "sshfs",
            Adapter::Rclone => "rclone",
            Adapter::Nfs => "nfs",
            Adapter::Bind => "bind",
            Adapter::Generic => "generic",
        }
    }
}

/// The adapter of a mount: what the configuration says, else what its file
/// system type needs.
pub fn for_mount(_fs_type: &str, _configured: Option<Adapter>) -> &'static dyn Coherence {
    todo!()
}
