//! Cache coherence of mounts: nothing stale, nothing overwritten. Covers the steps before and after
//! a command runs on the server, bypassing the mount. One adapter per file system type. Every call
//! may block for as long as the mount does: the caller provides the thread and the deadline.

mod bind;
mod generic;
mod kernel;
mod look;
mod nfs;
mod rclone;
mod sshfs;
mod volume;

pub use crate::beneath::EntryKind;
use crate::beneath::MountRoot;
use crate::kind;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// Change that a run made on the server.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Change {
    /// Content, attributes or existence of a file. For a file that was removed, the mount forgets
    /// it.
    FileWritten(PathBuf),
    /// Names in a directory were created, removed or renamed. Other changes report removed names
    /// and names that existed before.
    ListingChanged(PathBuf),
    /// One name was created or removed in its directory.
    NameChanged(PathBuf),
    /// An existing name now has another type, content or attributes.
    EntryIs(PathBuf, EntryKind),
    /// Anything in a directory, but not in its subdirectories.
    EntriesChanged(PathBuf),
    /// A file or directory was removed.
    Removed(PathBuf),
    /// Anything on the mount that this path lies on.
    Anything(PathBuf),
}

impl Change {
    /// Path that changed.
    pub fn path(&self) -> &Path {
        match self {
            Change::FileWritten(path)
            | Change::ListingChanged(path)
            | Change::NameChanged(path)
            | Change::EntryIs(path, _)
            | Change::EntriesChanged(path)
            | Change::Removed(path)
            | Change::Anything(path) => path,
        }
    }

    /// Like `self`, but for another path.
    #[must_use]
    pub fn at(&self, path: PathBuf) -> Change {
        match self {
            Change::FileWritten(_) => Change::FileWritten(path),
            Change::ListingChanged(_) => Change::ListingChanged(path),
            Change::NameChanged(_) => Change::NameChanged(path),
            Change::EntryIs(_, kind) => Change::EntryIs(path, kind.clone()),
            Change::EntriesChanged(_) => Change::EntriesChanged(path),
            Change::Removed(_) => Change::Removed(path),
            Change::Anything(_) => Change::Anything(path),
        }
    }
}

/// Upper bound of an sshfs mount's cache lifetime: 20 s in its daemon (default of
/// `dcache_timeout`), 1 s in the kernel, plus a margin.
pub const SSHFS_MEMORY: Duration = Duration::from_secs(22);
/// Lifetime of names in the kernel with libfuse's default timeouts, plus a margin.
pub const KERNEL_MEMORY: Duration = Duration::from_millis(1100);

/// Cache entry that a mount still shows for a removed name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StaleEntry {
    /// None: the name is gone from the mount too, or exists again.
    Nothing,
    /// A directory. The mount forgets it on rmdir(2) through the mount, or when the entry expires.
    Directory,
    /// A symlink. As for a directory, with unlink(2).
    Link,
}

/// Permission to write a file on the server although the shell has opened it for writing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WriteBehind {
    /// Yes: an open descriptor holds back no data that would arrive later.
    Allowed,
    /// No: on close, the file system uploads its own copy and would overwrite the server's. The
    /// bytes come back through the local descriptor, and a command that itself writes files on such
    /// a mount runs locally.
    ThroughLocalDescriptor,
}

/// Cache coherence for one file system type. Paths are the workstation's.
pub trait Coherence: Send + Sync {
    /// Flushes this machine's writes to a file through the mount to the server, before a command
    /// reads it on the server. A missing file counts as flushed. On an error, the server may lack
    /// data: run the command locally.
    fn settle(&self, path: &Path) -> io::Result<()>;
    /// Called before a command on the server changes a file, or files below a directory, by name.
    /// Checks that this machine can be made to see the change and has no pending data that would
    /// overwrite it. On an error, run the command locally.
    fn hand_over(&self, path: &Path) -> io::Result<()>;
    /// Invalidates the mount's cache for a change that a command made on the server. Changes no
    /// content and no name on the server. On an error, this machine may see the old state until the
    /// mount's caches expire.
    ///
    /// The path comes from a server and is untrusted: reach it only from the mount's root, as with
    /// all changes in this module.
    fn refresh(&self, on: &MountRoot, change: &Change) -> io::Result<()>;
    /// Makes the mount forget a removed name, as far as possible without waiting.
    fn forget_removed(&self, on: &MountRoot, path: &Path) -> io::Result<StaleEntry> {
        self.refresh(on, &Change::Removed(path.to_owned())).map(|()| StaleEntry::Nothing)
    }
    /// Like `forget_removed`, but as one of many names: the kernel may keep it for
    /// [`KERNEL_MEMORY`].
    fn forget_one_of_many_removed(&self, on: &MountRoot, path: &Path) -> io::Result<StaleEntry> {
        self.forget_removed(on, path)
    }
    /// Returns whether redirects may be written on the server.
    fn write_behind(&self) -> WriteBehind;
    /// For an executor whose export is itself such a mount: invalidates this machine's cache of the
    /// mount that holds `top`, before commands read others' writes from it. On an error, a command
    /// could see an old state. The paths come from commands. Don't look them up with this process's
    /// rights: the commands' user may have fewer.
    fn renew(&self, top: &Path, paths: &[PathBuf]) -> io::Result<()>;
    /// Second half of `renew`, with the rights of the commands' user: makes the kernel look up the
    /// paths again, as far as it did not forget them.
    fn look_again(&self, _paths: &[PathBuf]) -> io::Result<()> {
        Ok(())
    }
    /// For such an executor, after its commands: waits until their writes since `since` to the
    /// mount of `path` are visible to others.
    fn publish(&self, path: &Path, since: SystemTime) -> io::Result<()>;
}

/// Adapters, with the names that `coherence` in `mounts.toml` accepts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Adapter {
    /// `fuse.sshfs`
    Sshfs,
    /// `fuse.rclone`
    Rclone,
    /// `nfs`, `nfs4`
    Nfs,
    /// `fuse.posh`
    Volume,
    /// Same files through the local kernel: a bind mount or a plain directory.
    Bind,
    /// Everything else.
    Generic,
}

impl Adapter {
    /// Every adapter, in the order that messages list them.
    pub const ALL: [Adapter; 6] = [
        Adapter::Sshfs,
        Adapter::Rclone,
        Adapter::Nfs,
        Adapter::Volume,
        Adapter::Bind,
        Adapter::Generic,
    ];

    /// Name in `mounts.toml`.
    pub fn name(self) -> &'static str {
        match self {
            Adapter::Sshfs => "sshfs",
            Adapter::Rclone => "rclone",
            Adapter::Nfs => "nfs",
            Adapter::Volume => "volume",
            Adapter::Bind => "bind",
            Adapter::Generic => "generic",
        }
    }

    /// Default adapter of a file system type.
    pub fn of(fs_type: &str) -> Adapter {
        match fs_type {
            "fuse.sshfs" => Adapter::Sshfs,
            "fuse.rclone" => Adapter::Rclone,
            "nfs" | "nfs4" => Adapter::Nfs,
            volume::FS_TYPE => Adapter::Volume,
            other if kind::is_remote(other) => Adapter::Generic,
            _ => Adapter::Bind,
        }
    }

    /// Implementation of the adapter.
    pub fn coherence(self) -> &'static dyn Coherence {
        match self {
            Adapter::Sshfs => &sshfs::Sshfs,
            Adapter::Rclone => &rclone::Rclone,
            Adapter::Nfs => &nfs::Nfs,
            Adapter::Volume => &volume::Volume,
            Adapter::Bind => &bind::Bind,
            Adapter::Generic => &generic::Generic,
        }
    }
}

/// Error for an export whose caches can't be invalidated.
fn unknown_daemon(path: &Path) -> io::Error {
    let message =
        format!("{} is on a mount that cannot be made to forget what it remembers", path.display());
    io::Error::new(io::ErrorKind::Unsupported, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn which_adapter() {
        let check =
            |fs_type: &str, expect: Adapter| assert_eq!(Adapter::of(fs_type), expect, "{fs_type}");
        check("fuse.sshfs", Adapter::Sshfs);
        check("fuse.rclone", Adapter::Rclone);
        check("nfs4", Adapter::Nfs);
        check("fuse.posh", Adapter::Volume);
        check("fuse", Adapter::Generic);
        check("fuse.s3fs", Adapter::Generic);
        check("cifs", Adapter::Generic);
        check("ext4", Adapter::Bind);
        check("", Adapter::Bind);
    }

    #[test]
    fn the_configuration_is_asked_first() {
        assert_eq!(Adapter::Rclone.coherence().write_behind(), WriteBehind::ThroughLocalDescriptor);
        assert_eq!(Adapter::Bind.coherence().write_behind(), WriteBehind::Allowed);
    }

    #[test]
    fn a_file_that_is_not_there_is_settled_and_refreshed() {
        let dir = tempfile::tempdir().expect("a directory");
        let on = MountRoot::at(dir.path()).expect("opened");
        for adapter in Adapter::ALL {
            let coherence = adapter.coherence();
            if adapter != Adapter::Rclone {
                coherence.settle(&dir.path().join("absent")).expect("nothing to settle");
                coherence
                    .refresh(&on, &Change::FileWritten(dir.path().join("absent")))
                    .expect("nothing to forget");
                coherence
                    .refresh(&on, &Change::Removed(dir.path().join("absent")))
                    .expect("nothing to forget");
            }
        }
        assert_eq!(std::fs::read_dir(dir.path()).expect("the directory").count(), 0);
    }

    #[test]
    fn rclone_without_its_process_promises_nothing() {
        let dir = tempfile::tempdir().expect("a directory");
        let on = MountRoot::at(dir.path()).expect("opened");
        let rclone = Adapter::Rclone.coherence();
        let path = dir.path().join("f");
        assert!(rclone.settle(&path).is_err());
        assert!(rclone.hand_over(&path).is_err());
        assert!(rclone.refresh(&on, &Change::FileWritten(path.clone())).is_err());
        assert!(rclone.renew(&path, std::slice::from_ref(&path)).is_err());
        assert!(rclone.publish(&path, SystemTime::UNIX_EPOCH).is_err());
    }
}
