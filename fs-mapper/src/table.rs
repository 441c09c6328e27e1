//! The mount table: what the configuration says joined to what is mounted.

mod build;

use crate::coherence::{Adapter, Coherence};
use crate::config::{Config, MountConfig};
use crate::kind;
use crate::mountinfo::{MountInfo, MountInfoError};
use crate::path::{ClientPath, ExecutorName, MountId};
use crate::places::{Place, Places, Terrain, dir_of, parent};
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
    /// The adapter that the configuration asks for.
    pub coherence: Option<Adapter>,
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

    /// Which adapter keeps this mount's caches true.
    pub fn adapter(&self) -> Adapter {
        let configured = self.owner.as_ref().and_then(|owner| owner.coherence);
        configured.unwrap_or_else(|| Adapter::of(&self.fs_type))
    }

    /// What keeps this mount's caches true. Its calls block.
    pub fn coherence(&self) -> &'static dyn Coherence {
        self.adapter().coherence()
    }

    fn terrain(&self) -> Terrain {
        if self.owner.is_some() {
            Terrain::Owned
        } else if kind::is_walked(&self.fs_type, self.path.as_path()) {
            Terrain::Local
        } else {
            Terrain::Closed
        }
    }
}

/// Two entries of `mounts.toml` that turn out to be one directory, because of a
/// symlink. The first one counts.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "line {}: {} is the same directory as {}, which is in line {}; only the first counts",
    second.position.line, second.path.display(), first.path.display(), first.position.line
)]
pub struct SamePlace {
    /// The entry that counts.
    pub first: MountConfig,
    /// The entry that is passed over.
    pub second: MountConfig,
}

/// Path → owner, at one moment. Make a new one when mounts change.
#[derive(Debug, Clone)]
pub struct MountTable {
    config: Config,
    /// By path.
    pub(crate) mounts: Vec<Mount>,
    /// Every mount point that a lookup can meet; indices into `mounts`.
    pub(crate) places: Places,
    /// Configured paths where nothing is mounted (yet).
    pub(crate) absent: Places,
    problems: Vec<SamePlace>,
}

impl MountTable {
    /// Joins the two. Symlinks in configured paths are resolved here, by
    /// looking at local disks only.
    pub fn new(config: &Config, info: &MountInfo) -> MountTable {
        let (mut mounts, problems) = build::mounts(config, info);
        mounts.sort_by_cached_key(|mount| dir_of(mount.path.as_path()));
        for (index, mount) in mounts.iter_mut().enumerate() {
            mount.id = MountId(index);
        }
        let place = |mount: &Mount| Place {
            dir: dir_of(mount.path.as_path()),
            terrain: mount.terrain(),
            index: mount.id.index(),
        };
        let places =
            Places::new(mounts.iter().filter(|mount| mount.mounted()).map(place).collect());
        let absent =
            Places::new(mounts.iter().filter(|mount| !mount.mounted()).map(place).collect());
        MountTable { config: config.clone(), mounts, places, absent, problems }
    }

    /// What `posh mounts` shows, in path order: configured mounts, bind mounts
    /// of parts of them, and network or FUSE mounts without an owner.
    pub fn mounts(&self) -> impl Iterator<Item = &Mount> {
        self.mounts.iter().filter(|mount| mount.owner.is_some() || kind::is_remote(&mount.fs_type))
    }

    /// Entries of the configuration that are passed over, for a warning.
    pub fn problems(&self) -> &[SamePlace] {
        &self.problems
    }

    /// A mount that a resolution by this very table named.
    pub fn mount(&self, id: MountId) -> &Mount {
        &self.mounts[id.0]
    }

    /// The mount of an open file, by `mnt_id` of its /proc/PID/fdinfo: exact,
    /// where the path of a descriptor is only a hint. `None` also for mounts
    /// that no path leads to any more.
    pub fn by_kernel_id(&self, kernel_id: u32) -> Option<&Mount> {
        self.mounts.iter().find(|mount| mount.kernel_id == Some(kernel_id))
    }

    /// Who owns a path. `cwd` as from getcwd(3). Blocks on local disks only.
    pub fn resolve(&self, path: &Path, cwd: &Path) -> Resolution {
        Resolver::new(self, cwd).resolve(path)
    }

    /// Every mount, owned or not, strictly below a directory, in path order:
    /// what a recursive argument would also walk.
    pub fn nested(&self, path: &ClientPath) -> Vec<&Mount> {
        self.places
            .below(&dir_of(path.as_path()))
            .iter()
            .map(|place| &self.mounts[place.index])
            .collect()
    }

    /// The short list for the stage program.
    pub fn prefixes(&self) -> Prefixes {
        let awaited = self
            .absent
            .iter()
            .filter(|place| self.mounts[place.index].state == MountState::Automount);
        let mount_id = |index: usize| self.mounts[index].kernel_id;
        Prefixes::of(&self.places, &Places::new(awaited.cloned().collect()), mount_id)
    }

    /// Makes the automounter mount a path that
    /// [`LocalReason::Automount`](crate::LocalReason::Automount) named, and reads the mounts again.
    /// Blocks as long as the mount takes; a mount that fails shows in the new table as one that is
    /// still awaited.
    pub fn trigger_automount(&self, path: &Path) -> Result<MountTable, MountInfoError> {
        // Opening a directory mounts it, where stat(2) of the mount point does not.
        let _mounted_or_not = std::fs::read_dir(path);
        Ok(MountTable::new(&self.config, &MountInfo::read()?))
    }

    /// The owned mount that a mount lies inside of.
    pub(crate) fn owner_around(&self, mount: &Mount) -> Option<&Mount> {
        let dir = dir_of(mount.path.as_path());
        let outer = self.places.around(parent(&dir)?)?;
        (outer.terrain == Terrain::Owned).then(|| &self.mounts[outer.index])
    }
}
