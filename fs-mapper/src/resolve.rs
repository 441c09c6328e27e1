//! What a path is: a file on a mount that an executor owns (and its name
//! there), or local and why.

use crate::path::{ClientPath, ExecutorName, ExportPath, MountId};
use crate::table::MountTable;
use std::path::{Path, PathBuf};

/// Whether a symlink that is the last component of a path is followed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LastLink {
    /// As open(2) does.
    Follow,
    /// As lstat(2), unlink(2) and rename(2) do.
    Keep,
}

/// The answer about one path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Resolution {
    /// An executor owns it.
    Owned(Owned),
    /// It is this machine's business.
    Local {
        /// Why, with a sentence for the user as its `Display`.
        reason: LocalReason,
    },
}

/// A path on an owned mount.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Owned {
    /// The mount that it is on.
    pub mount: MountId,
    /// The mount's owner.
    pub executor: ExecutorName,
    /// As the workstation sees it, symlinks above the mount resolved.
    pub client_path: ClientPath,
    /// As the executor names it.
    pub export_path: ExportPath,
    /// A `..` is left below the mount point: only the executor's kernel can say
    /// where it leads, perhaps out of the mount.
    pub uncertain: bool,
    /// The path as given passes a symlink on the local disk, which the executor
    /// does not have: the word must be rewritten there, or the stage runs here.
    pub through_symlink: bool,
}

/// Why a path has no owner.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LocalReason {
    /// On a local disk, whether it exists or not.
    #[error("{} is not on a mount with an executor", .0.display())]
    NotOnMount(PathBuf),
    /// On a network or FUSE mount that the configuration does not name.
    #[error("{} ({fs_type}) has no executor in the configuration", mount.display())]
    UnownedMount {
        /// The mount point.
        mount: PathBuf,
        /// Its file system type.
        fs_type: String,
    },
    /// Inside an owned mount, but on another file system that is mounted there.
    #[error("{} ({fs_type}) is mounted inside {} and is not part of it", mount.display(), outer.display())]
    Boundary {
        /// The inner mount point.
        mount: PathBuf,
        /// Its file system type.
        fs_type: String,
        /// The owned mount point around it.
        outer: PathBuf,
    },
    /// The configuration names a mount there, but nothing is mounted.
    #[error("nothing is mounted on {} now", .0.display())]
    NotMounted(PathBuf),
    /// The automounter has not mounted it yet: see [`MountTable::trigger_automount`].
    #[error("{} has not been mounted by the automounter yet", .0.display())]
    Automount(PathBuf),
    /// In /proc, where links mean something else to every process.
    #[error("{} is a view of one process", .0.display())]
    ProcessView(PathBuf),
    /// More than 40 symlinks, as the kernel counts (path_resolution(7)).
    #[error("{} passes too many symbolic links", .0.display())]
    TooManyLinks(PathBuf),
    /// Empty, with a NUL byte, or relative to a directory that is not absolute.
    #[error("{:?} is not a path", .0)]
    Invalid(PathBuf),
}

/// Resolves many paths of one call: the directories that they share are walked once.
pub struct Resolver<'t> {
    _table: &'t MountTable,
}

impl<'t> Resolver<'t> {
    /// `cwd` as from getcwd(3): absolute and without symlinks.
    pub fn new(table: &'t MountTable, _cwd: &Path) -> Self {
        Resolver { _table: table }
    }

    /// Resolves a path, a symlink at its end included.
    pub fn resolve(&mut self, path: &Path) -> Resolution {
        self.resolve_with(path, LastLink::Follow)
    }

    /// Resolves a path.
    pub fn resolve_with(&mut self, _path: &Path, _last: LastLink) -> Resolution {
        todo!()
    }
}
