//! Builds the list of mounts: those that a lookup can reach, joined with the configuration, and
//! with the owners of bind mounts' sources.

use super::{Mount, MountFlags, MountState, Owner, SamePlace};
use crate::coherence::Adapter;
use crate::config::{Config, MountConfig};
use crate::foreign::Foreign;
use crate::kind;
use crate::mountinfo::{MountEntry, MountInfo, nfs_directory};
use crate::path::{ClientPath, MountId, joined};
use crate::places::{MountPlace, Places, Terrain, dir_of};
use crate::walk::{LastLink, Position};
use std::collections::HashMap;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Mounts in no order, before IDs are assigned.
pub(super) fn mounts(config: &Config, info: &MountInfo) -> (Vec<Mount>, Vec<SamePlace>) {
    let visible = info.visible();
    let ground = Ground::new(&visible);
    let mut problems = Vec::new();
    let mut configured: HashMap<PathBuf, &MountConfig> = HashMap::new();
    let mut mounts = Vec::new();
    let mut trees = Vec::new();
    for entry in &config.mounts {
        let path = ground.real_path(&entry.path);
        if let Some(first) = configured.get(&path) {
            problems.push(SamePlace { first: (*first).clone(), second: entry.clone() });
            continue;
        }
        let (mount, tree) = ground.configured(entry, &path);
        trees.extend(tree.filter(|_| mount.mounted()));
        mounts.push(mount);
        configured.insert(path, entry);
    }
    for entry in visible {
        if !configured.contains_key(&entry.mount_point) || entry.fs_type == "autofs" {
            mounts.extend(found(entry, &trees));
        }
    }
    (mounts, problems)
}

/// Mounts in mountinfo, without the configuration.
struct Ground<'m> {
    visible: &'m [&'m MountEntry],
    places: Places,
}

impl<'m> Ground<'m> {
    fn new(visible: &'m [&'m MountEntry]) -> Self {
        let place = |(index, entry): (usize, &&MountEntry)| {
            let walked = kind::is_walked(&entry.fs_type, &entry.mount_point);
            let terrain = if walked { Terrain::Local } else { Terrain::Closed };
            MountPlace { dir: dir_of(&entry.mount_point), terrain, index }
        };
        Ground { visible, places: Places::new(visible.iter().enumerate().map(place).collect()) }
    }

    /// Resolves symlinks above mounts in a configured path; missing components stay as written.
    fn real_path(&self, path: &Path) -> PathBuf {
        let mut position = Position::at(&self.places, Path::new("/"));
        position.walk(&self.places, path.as_os_str().as_bytes(), LastLink::Follow);
        position.path()
    }

    /// Mount of one configured entry, and the file tree that it shows.
    fn configured(&self, config: &MountConfig, path: &Path) -> (Mount, Option<OwnedTree>) {
        let around = self.places.around(&dir_of(path)).map(|place| self.visible[place.index]);
        let exact = around.is_some_and(|entry| entry.mount_point == path);
        let state = match around {
            Some(entry) if entry.fs_type == "autofs" => MountState::Automount,
            Some(entry)
                if exact
                    || kind::is_remote(&entry.fs_type) && entry.mount_point != Path::new("/") =>
            {
                MountState::Mounted
            }
            _ if config.coherence == Some(Adapter::Bind) => MountState::PlainDirectory,
            _ => MountState::NotMounted,
        };
        let owner = Owner {
            executor: config.executor.clone(),
            export: config.export.clone(),
            sub_path: config.sub_path.clone(),
            coherence: config.coherence,
            shows_changes: config.shows_changes,
        };
        let shown =
            around.filter(|_| state == MountState::Mounted || state == MountState::Automount);
        let foreign = shown.and_then(|entry| Foreign::check(entry).err());
        let mount = Mount {
            id: MountId(0),
            path: ClientPath::new(path).expect("the lookup began at the root"),
            configured_as: (config.path != path).then(|| config.path.clone()),
            fs_type: shown.map(|entry| entry.fs_type.clone()).unwrap_or_default(),
            source: shown.map(|entry| entry.source.clone()).unwrap_or_default(),
            owner: Some(owner.clone()).filter(|_| foreign.is_none()),
            state,
            flags: around.map(|entry| MountFlags::of(&entry.options)).unwrap_or_default(),
            foreign,
            kernel_id: shown
                .filter(|_| exact && state == MountState::Mounted)
                .map(|entry| entry.mount_id),
            files_mount_id: around
                .filter(|_| matches!(state, MountState::Mounted | MountState::PlainDirectory))
                .map(|entry| entry.mount_id),
        };
        let tree = around.filter(|_| foreign.is_none()).and_then(|entry| {
            let rest = path.strip_prefix(&entry.mount_point).ok()?;
            Some(OwnedTree { of: FileSystem::of(entry), base: joined(&base(entry)?, rest), owner })
        });
        (mount, tree)
    }
}

/// Identity of a file system: mounts with the same one may show the same files.
#[derive(Debug, Clone, PartialEq, Eq)]
struct FileSystem {
    device: (u32, u32),
    fs_type: String,
}

impl FileSystem {
    fn of(entry: &MountEntry) -> Self {
        FileSystem { device: entry.device, fs_type: entry.fs_type.clone() }
    }
}

/// A directory of a file system, and its owner.
struct OwnedTree {
    of: FileSystem,
    base: PathBuf,
    owner: Owner,
}

/// Directory of its file system that a mount shows. `None` if it was removed or is unknown.
fn base(entry: &MountEntry) -> Option<PathBuf> {
    if entry.root.as_os_str().as_bytes().ends_with(b"//deleted") {
        return None;
    }
    match entry.fs_type.as_str() {
        "nfs" | "nfs4" => nfs_directory(&entry.source),
        _ => Some(entry.root.clone()),
    }
}

/// A mount that the configuration does not name. It has an owner if it shows part of an owned tree
/// (`mount --bind /mnt/logs/x /srv/x`).
fn found(entry: &MountEntry, trees: &[OwnedTree]) -> Option<Mount> {
    let of = FileSystem::of(entry);
    let base = base(entry);
    let part_of = |tree: &OwnedTree| {
        let rest = base.as_ref()?.strip_prefix(&tree.base).ok()?;
        let owner = Owner { sub_path: joined(&tree.owner.sub_path, rest), ..tree.owner.clone() };
        (tree.of == of).then(|| (tree.base.components().count(), owner))
    };
    let closest = trees.iter().filter_map(part_of).max_by_key(|(depth, _)| *depth);
    Some(Mount {
        id: MountId(0),
        path: ClientPath::new(&entry.mount_point)?,
        configured_as: None,
        fs_type: entry.fs_type.clone(),
        source: entry.source.clone(),
        owner: closest.map(|(_, owner)| owner),
        state: MountState::Mounted,
        flags: MountFlags::of(&entry.options),
        foreign: Foreign::check(entry).err(),
        kernel_id: Some(entry.mount_id),
        files_mount_id: Some(entry.mount_id),
    })
}
