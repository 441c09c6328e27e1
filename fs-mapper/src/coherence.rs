//! Nothing stale, nothing overwritten: what has to happen on a mount before a
//! command runs behind its back on the server, and after. One adapter per file
//! system type. Every call may block for as long as the mount does: the caller
//! brings the thread and the deadline.

mod bind;
mod generic;
mod kernel;
mod look;
mod nfs;
mod rclone;
mod sshfs;
mod volume;

use crate::beneath::MountRoot;
use crate::kind;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// What a run has changed on the server.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Change {
    /// A file's content or attributes, or that it is there at all: for a file
    /// that was removed, this makes the mount forget it.
    FileWritten(PathBuf),
    /// Names in a directory were made, removed or renamed; what became of those
    /// that are no longer there, or were there before, is told by other changes.
    ListingChanged(PathBuf),
    /// One name in its directory was made, or removed.
    NameChanged(PathBuf),
    /// A name that was there before is another thing now, or has other content or attributes.
    EntryIs(PathBuf, EntryKind),
    /// Anything in a directory, but nothing in those below it.
    EntriesChanged(PathBuf),
    /// A file or directory is gone.
    Removed(PathBuf),
    /// Anything on the mount that this path lies on.
    Anything(PathBuf),
}

/// What a name is.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum EntryKind {
    /// Neither a directory nor a link.
    File,
    /// A directory.
    Directory,
    /// A symbolic link, and what is in it: nothing, where that is not shown.
    Link(PathBuf),
}

impl Change {
    /// What it is about.
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

    /// The same of another path.
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

/// The longest that an sshfs mount remembers anything: 20 s in its daemon (`dcache_timeout`, as it
/// is unless set), 1 s in the kernel, and a little more.
pub const SSHFS_MEMORY: Duration = Duration::from_secs(22);
/// How long the kernel remembers names of mounts with libfuse's own times, and a little more.
pub const KERNEL_MEMORY: Duration = Duration::from_millis(1100);

/// What a mount goes on showing of a name that is gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Left {
    /// It has gone here too, or is there again.
    Nothing,
    /// A directory, which the mount forgets when it is removed through it, or in time.
    Directory,
    /// A symbolic link, likewise.
    Link,
}

/// Whether a file that the shell has opened for writing may be written on the
/// server instead.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WriteBehind {
    /// Yes: an open descriptor holds nothing back that would come later.
    Allowed,
    /// No: the file system uploads its own copy on close and would overwrite
    /// the server's. The bytes come back through the local descriptor, and a
    /// command that itself writes files on such a mount runs here.
    ThroughLocalDescriptor,
}

/// Keeps the caches of one kind of mount true. Paths are the workstation's.
pub trait Coherence: Send + Sync {
    /// Brings what this machine has written to a file through the mount to the
    /// server, before a command reads it there. A file that is not there is
    /// settled. An error means that the server may not have it: run here.
    fn settle(&self, path: &Path) -> io::Result<()>;
    /// Asked before a command on the server changes a file, or what is below a
    /// directory, by its name: whether this machine can be made to see that, and
    /// has nothing of its own that would overwrite it. An error means: run here.
    fn hand_over(&self, path: &Path) -> io::Result<()>;
    /// Makes the mount forget what it remembers of something that a command has
    /// changed on the server. It changes no content and no name there. An error means that this
    /// machine may see the old state for as long as the mount's caches live.
    ///
    /// The path is a server's word: it is reached from the mount's root alone, as in all that has
    /// to do with changes here.
    fn refresh(&self, on: &MountRoot, change: &Change) -> io::Result<()>;
    /// Makes the mount forget a name that is gone, as far as it can without waiting.
    fn forget_removed(&self, on: &MountRoot, path: &Path) -> io::Result<Left> {
        self.refresh(on, &Change::Removed(path.to_owned())).map(|()| Left::Nothing)
    }
    /// The same for one of many names: the kernel may remember it for [`KERNEL_MEMORY`] more.
    fn forget_one_of_many_removed(&self, on: &MountRoot, path: &Path) -> io::Result<Left> {
        self.forget_removed(on, path)
    }
    /// Whether redirects may be written on the server.
    fn write_behind(&self) -> WriteBehind;
    /// For an executor whose export is itself such a mount: makes this machine
    /// forget what it remembers of the mount that `top` lies on, before
    /// commands read there what others have written. An error means that a
    /// command could see an old state. The paths are those that the commands name,
    /// which must not be looked up here: whoever named them may have fewer rights.
    fn renew(&self, top: &Path, paths: &[PathBuf]) -> io::Result<()>;
    /// The rest of it, with the rights of whoever has named the paths: has the kernel look
    /// at them anew, as far as it did not forget them.
    fn look_again(&self, _paths: &[PathBuf]) -> io::Result<()> {
        Ok(())
    }
    /// For such an executor, after its commands: waits until what they have
    /// written since then to the mount of `path` is where others can see it.
    fn publish(&self, path: &Path, since: SystemTime) -> io::Result<()>;
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
    /// `fuse.posh`
    Volume,
    /// The same files by the local kernel: a bind mount or a plain directory.
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

    /// Its name in `mounts.toml`.
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

    /// The adapter that a file system type needs.
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

    /// What it does.
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

/// Why an executor can't promise a true view of an export.
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
