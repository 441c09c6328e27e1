//! Mount table: the configuration joined with mountinfo.

mod build;

use crate::beneath::MountRoot;
use crate::coherence::{Adapter, Coherence};
use crate::config::{Config, MountConfig};
use crate::foreign::Foreign;
use crate::kind;
use crate::mountinfo::{MountInfo, MountInfoError};
use crate::path::{ClientPath, ExecutorName, MountId};
use crate::places::{MountPlace, Places, Terrain, dir_of, parent};
use crate::prefixes::Prefixes;
use crate::resolve::{Resolution, Resolver};
use crate::sshfs::FS_TYPE;
use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};

/// Owner of a mount's data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Owner {
    /// The executor.
    pub executor: ExecutorName,
    /// Export name on the executor.
    pub export: String,
    /// Directory below the export that is mounted; empty for its root.
    pub sub_path: PathBuf,
    /// Adapter from the configuration.
    pub coherence: Option<Adapter>,
    /// See [`MountConfig`](crate::config::MountConfig).
    pub shows_changes: bool,
}

/// State of a mount's path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MountState {
    /// Something is mounted there, or the path lies inside a network mount.
    Mounted,
    /// Nothing is mounted, and the configuration says `coherence = "bind"`: the executor serves the
    /// directory itself.
    PlainDirectory,
    /// An automounter awaits the first access.
    Automount,
    /// Nothing is mounted: paths below it are local.
    NotMounted,
}

/// Flags of a mount or its file system (mount(8)) by which the kernel refuses what the executor
/// could do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MountFlags {
    /// `ro`: nothing can be changed through it.
    pub is_read_only: bool,
    /// `nosymfollow`: no symbolic link on it leads anywhere.
    pub follows_no_links: bool,
}

impl MountFlags {
    /// Flags among the options in mountinfo.
    pub(crate) fn of(options: &str) -> Self {
        let has = |flag| options.split(',').any(|option| option == flag);
        Self { is_read_only: has("ro"), follows_no_links: has("nosymfollow") }
    }
}

/// A mount, as `posh mounts` shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mount {
    /// Index in the table.
    pub id: MountId,
    /// The mount point, symlinks resolved.
    pub path: ClientPath,
    /// Path in `mounts.toml`, if symlinks change it.
    pub configured_as: Option<PathBuf>,
    /// Such as `fuse.sshfs`; empty when nothing is mounted.
    pub fs_type: String,
    /// Such as `host:/export`; empty when nothing is mounted.
    pub source: OsString,
    /// `None` for a mount without an executor.
    pub owner: Option<Owner>,
    /// State of the path.
    pub state: MountState,
    /// Flags by which the kernel refuses what the executor could do.
    pub flags: MountFlags,
    /// Reason why a mount that is named, or could have an owner, has none.
    pub foreign: Option<Foreign>,
    /// `mnt_id` in /proc/PID/fdinfo of a file on it; `None` when nothing is mounted.
    pub kernel_id: Option<u32>,
    /// Mount ID of its files (statx(2)): also where it is a directory of another mount. `None` when
    /// nothing is mounted.
    pub files_mount_id: Option<u32>,
}

impl Mount {
    /// Returns true if it is mounted, or a plain directory stands for it.
    pub fn mounted(&self) -> bool {
        matches!(self.state, MountState::Mounted | MountState::PlainDirectory)
    }

    /// Returns true if it can be made to show at once what a command changes on its server: an
    /// sshfs of which it is known that exactly the owner that its server has told is set through
    /// it, and that the kernel asks it again after a second; or another file system, by its own
    /// means. See
    /// [`sshfs::adopted`](crate::sshfs::adopted).
    pub fn shows_changes(&self) -> bool {
        self.fs_type != FS_TYPE || self.owner.as_ref().is_some_and(|owner| owner.shows_changes)
    }

    /// Adapter for this mount's cache coherence.
    pub fn adapter(&self) -> Adapter {
        let configured = self.owner.as_ref().and_then(|owner| owner.coherence);
        configured.unwrap_or_else(|| Adapter::of(&self.fs_type))
    }

    /// Opens the mount's root directory.
    ///
    /// # Errors
    /// ESTALE if another mount has taken its place, or the error of openat2(2) or statx(2).
    pub fn open_root(&self) -> io::Result<MountRoot> {
        let root = MountRoot::at(self.path.as_path())?;
        match self.has_files_on(root.mount_id()?) {
            true => Ok(root),
            false => Err(io::Error::new(
                io::ErrorKind::StaleNetworkFileHandle,
                "another mount is there by now",
            )),
        }
    }

    fn has_files_on(&self, mount_id: u64) -> bool {
        match self.files_mount_id {
            Some(known) => mount_id == u64::from(known),
            // In a chroot whose root is no mount.
            None => self.state == MountState::PlainDirectory,
        }
    }

    /// Cache coherence of this mount. Its calls block.
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

/// Two entries of `mounts.toml` for one directory, because of a symlink. The first one counts.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "line {}: {} is the same directory as {}, which is in line {}; only the first counts",
    second.position.line, second.path.display(), first.path.display(), first.position.line
)]
pub struct SamePlace {
    /// The entry that counts.
    pub first: MountConfig,
    /// The entry that is ignored.
    pub second: MountConfig,
}

/// Map from path to owner, as of one moment. Make a new one when mounts change.
#[derive(Debug, Clone)]
pub struct MountTable {
    config: Config,
    /// By path.
    pub(crate) mounts: Vec<Mount>,
    /// Mount points that a lookup can meet; indices into `mounts`.
    pub(crate) places: Places,
    /// Configured paths where nothing is mounted (yet).
    pub(crate) absent: Places,
    problems: Vec<SamePlace>,
}

impl MountTable {
    /// Joins configuration and mountinfo. Resolves symlinks in configured paths, on local disks
    /// only.
    pub fn new(config: &Config, info: &MountInfo) -> MountTable {
        let (mut mounts, problems) = build::mounts(config, info);
        mounts.sort_by_cached_key(|mount| dir_of(mount.path.as_path()));
        for (index, mount) in mounts.iter_mut().enumerate() {
            mount.id = MountId(index);
        }
        let place = |mount: &Mount| MountPlace {
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

    /// Mounts for `posh mounts`, in path order: configured mounts, bind mounts of parts of them,
    /// and network or FUSE mounts without an owner.
    pub fn mounts(&self) -> impl Iterator<Item = &Mount> {
        self.mounts.iter().filter(|mount| mount.owner.is_some() || kind::is_remote(&mount.fs_type))
    }

    /// Ignored entries of the configuration, for a warning.
    pub fn problems(&self) -> &[SamePlace] {
        &self.problems
    }

    /// Mount by an ID from this table.
    pub fn mount(&self, id: MountId) -> &Mount {
        &self.mounts[id.0]
    }

    /// Returns true if a path leads to the mount with this ID (statx(2)). Otherwise a mount hides
    /// what a process has open by that path. A path in no mount of the list, as in a chroot, is
    /// hidden by none.
    pub fn shows(&self, path: &Path, mount_id: u64) -> bool {
        let around = self.places.around(&dir_of(path));
        around.is_none_or(|place| self.mounts[place.index].has_files_on(mount_id))
    }

    /// Resolves a path to its owner. `cwd` as from getcwd(3). Blocks on local disks only.
    pub fn resolve(&self, path: &Path, cwd: &Path) -> Resolution {
        Resolver::new(self, cwd).resolve(path)
    }

    /// Mounts, owned or not, strictly below a directory, in path order: a recursive command would
    /// also walk them.
    pub fn nested(&self, path: &ClientPath) -> Vec<&Mount> {
        self.places
            .below(&dir_of(path.as_path()))
            .iter()
            .map(|place| &self.mounts[place.index])
            .collect()
    }

    /// Short list of mount points for the stage program.
    pub fn prefixes(&self) -> Prefixes {
        let awaited = self
            .absent
            .iter()
            .filter(|place| self.mounts[place.index].state == MountState::Automount);
        let mount_id = |index: usize| self.mounts[index].kernel_id;
        Prefixes::of(&self.places, &Places::new(awaited.cloned().collect()), mount_id)
    }

    /// Makes the automounter mount a path from
    /// [`LocalReason::Automount`](crate::LocalReason::Automount), and reads mountinfo again. Blocks
    /// for as long as the mount takes. After a failed mount, the new table still has the path as an
    /// automount.
    pub fn trigger_automount(&self, path: &Path) -> Result<MountTable, MountInfoError> {
        // Opening a directory triggers the automount; stat(2) of the mount point does not.
        let _mounted_or_not = std::fs::read_dir(path);
        Ok(MountTable::new(&self.config, &MountInfo::read()?))
    }

    /// Owned mount that contains a mount point.
    pub(crate) fn owner_around(&self, mount: &Mount) -> Option<&Mount> {
        let dir = dir_of(mount.path.as_path());
        let outer = self.places.around(parent(&dir)?)?;
        (outer.terrain == Terrain::Owned).then(|| &self.mounts[outer.index])
    }
}
