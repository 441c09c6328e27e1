//! The mount table: what the configuration says joined to what is mounted.

use crate::coherence::Coherence;
use crate::config::Config;
use crate::mountinfo::{MountInfo, MountInfoError};
use crate::path::{ClientPath, ExecutorName, MountId};
use crate::prefixes::Prefixes;
use crate::resolve::{Resolution, Resolver};
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// Who has the data of a mount.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Owner {
    /// The executor.
    pub executor: ExecutorName,
    /// Its name for the directory tree.
    pub export: String,
    /// What of the export is mounted; empty for its root.
    pub sub_path: PathBuf,
}

/// What is at a mount's path now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MountState {
    /// Something is mounted there, or the path lies inside a network mount.
    Mounted,
    /// Nothing is, and the configuration says `coherence = "bind"`: the
    /// directory itself is what the executor serves.
    PlainDirectory,
    /// An automounter waits there for the first access.
    Automount,
    /// Nothing is: paths below it are local.
    NotMounted,
}

/// A mount, as `posh mounts` shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mount {
    /// Its place in the table.
    pub id: MountId,
    /// The mount point, symlinks resolved.
    pub path: ClientPath,
    /// As `mounts.toml` has it, when a symlink makes that another path.
    pub configured_as: Option<PathBuf>,
    /// Such as `fuse.sshfs`; empty when nothing is mounted.
    pub fs_type: String,
    /// Such as `host:/export`; empty when nothing is mounted.
    pub source: OsString,
    /// `None`: a mount of this machine alone.
    pub owner: Option<Owner>,
    /// Whether something is there.
    pub state: MountState,
    /// `mnt_id` in /proc/PID/fdinfo of a file on it; `None` when nothing is mounted.
    pub kernel_id: Option<u32>,
}

impl Mount {
    /// Something is mounted there now (or a plain directory stands for it).
    pub fn mounted(&self) -> bool {
        matches!(self.state, MountState::Mounted | MountState::PlainDirectory)
    }

    /// What keeps this mount's caches true. Its calls block.
    pub fn coherence(&self) -> &'static dyn Coherence {
        todo!()
    }
}

/// Path → owner, at one moment. Make a new one when mounts change.
#[derive(Debug, Clone)]
pub struct MountTable {}

impl MountTable {
    /// Joins the two. Symlinks in configured paths are resolved here.
    pub fn new(_config: &Config, _info: &MountInfo) -> MountTable {
        todo!()
    }

    /// What `posh mounts` shows, in path order: configured mounts, bind mounts
    /// of parts of them, and network or FUSE mounts without an owner.
    pub fn mounts(&self) -> impl Iterator<Item = &Mount> {
        std::iter::empty()
    }

    /// A mount that a resolution named.
    pub fn mount(&self, _id: MountId) -> &Mount {
        todo!()
    }

    /// The mount of an open file, by `mnt_id` of its /proc/PID/fdinfo: exact,
    /// where the path of a descriptor is only a hint.
    pub fn by_kernel_id(&self, _kernel_id: u32) -> Option<&Mount> {
        todo!()
    }

    /// Who owns a path. `cwd` as from getcwd(3). Blocks on local disks only.
    pub fn resolve(&self, path: &Path, cwd: &Path) -> Resolution {
        Resolver::new(self, cwd).resolve(path)
    }

    /// Every mount, owned or not, strictly below a directory, in path order:
    /// what a recursive argument would also walk.
    pub fn nested(&self, _path: &ClientPath) -> Vec<&Mount> {
        todo!()
    }

    /// The short list for the stage program.
    pub fn prefixes(&self) -> Prefixes {
        todo!()
    }

    /// Makes the automounter mount a path that [`LocalReason::Automount`](crate::LocalReason::Automount)
    /// named, and reads the mounts again. Blocks as long as the mount takes.
    pub fn trigger_automount(&self, _path: &Path) -> Result<MountTable, MountInfoError> {
        todo!()
    }
}
