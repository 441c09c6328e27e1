//! Places that a command may change, on mounts that cache what is there.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
};

use fs_mapper::{Mount, MountId, MountTable, Resolution, coherence::Adapter};
use posh_annotations::{CurrentDir, FileKind, FileUse};

use crate::facts::{PathOwner, ResolvedCommand, World};

/// Directories that the command creates, on mounts with caches.
#[must_use]
pub fn made_places(table: &MountTable, reading: &ResolvedCommand) -> Vec<(PathBuf, MountId)> {
    places_with_caches(table, reading, |file| file.kind == FileKind::NewDir).collect()
}

/// Directories above single files that a command writes, on mounts with caches.
#[must_use]
pub fn directories_written(table: &MountTable, reading: &ResolvedCommand) -> BTreeSet<PathBuf> {
    let is_single = |file: &FileUse| file.kind.writes() && !file.kind.recursive();
    places_with_caches(table, reading, is_single)
        .filter_map(|(path, _)| path.parent().map(Path::to_owned))
        .collect()
}

/// An sshfs mount that goes on showing old listings of directories that the command may change:
/// see [`Owner`](fs_mapper::Owner).
#[must_use]
pub fn keeps_listings<'a>(table: &'a MountTable, reading: &ResolvedCommand) -> Option<&'a Mount> {
    let singles =
        places_with_caches(table, reading, |file| file.kind.writes()).map(|(_, mount)| mount);
    let others = made_places(table, reading).into_iter().chain(watched_places(table, reading));
    let keeps = |mount: &&Mount| mount.adapter() == Adapter::Sshfs && !mount.shows_changes();
    singles.chain(others.map(|(_, mount)| mount)).map(|mount| table.mount(mount)).find(keeps)
}

/// Returns true if a path is on an sshfs mount.
pub fn is_on_sshfs(table: &MountTable, path: &Path) -> bool {
    let place = table.resolve(path, Path::new("/"));
    matches!(
        place,
        Resolution::Owned(owned) if table.mount(owned.mount).adapter() == Adapter::Sshfs
    )
}

/// Single files that a command may write on sshfs mounts.
pub fn files_on_sshfs(
    table: &MountTable,
    reading: &ResolvedCommand,
) -> impl Iterator<Item = PathBuf> {
    let is_single =
        |file: &FileUse| matches!(file.kind, FileKind::OutputFile | FileKind::InoutFile);
    places_with_caches(table, reading, is_single)
        .filter(|(_, mount)| table.mount(*mount).adapter() == Adapter::Sshfs)
        .map(|(path, _)| path)
}

/// A directory whose listing a command may change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChangedListing {
    /// The directory.
    pub directory: PathBuf,
    /// Only if this path in it does not exist yet.
    pub unless_exists: Option<PathBuf>,
}

/// Listings on sshfs mounts that a command may change.
#[must_use]
pub fn listings_on_sshfs(table: &MountTable, reading: &ResolvedCommand) -> Vec<ChangedListing> {
    let above = |(path, mount): (PathBuf, MountId), is_made: bool| {
        let directory = path.parent()?.to_owned();
        // The mount's root is in no listing of it.
        if !directory.starts_with(table.mount(mount).path.as_path()) {
            return None;
        }
        Some((ChangedListing { directory, unless_exists: is_made.then_some(path) }, mount))
    };
    // A tree may be made; only what acts on the name itself (rm) takes one away.
    let is_made = |file: &FileUse| match file.kind {
        FileKind::OutputFile | FileKind::NewDir => true,
        FileKind::OutputDir => !file.no_follow,
        _ => false,
    };
    let made = places_with_caches(table, reading, is_made);
    let is_replaced = |file: &FileUse| match file.kind {
        FileKind::InoutFile => true,
        FileKind::OutputDir => file.no_follow,
        _ => false,
    };
    let replaced = places_with_caches(table, reading, is_replaced);
    let trees = watched_places(table, reading)
        .into_iter()
        .map(|(directory, mount)| (ChangedListing { directory, unless_exists: None }, mount));
    let all = made
        .filter_map(|place| above(place, true))
        .chain(replaced.filter_map(|place| above(place, false)))
        .chain(trees)
        .filter(|(_, mount)| table.mount(*mount).adapter() == Adapter::Sshfs);
    let mut listings: Vec<ChangedListing> = all.map(|(listing, _)| listing).collect();
    listings.dedup();
    listings
}

/// An sshfs mount on which the command may change something while other programs write through it
/// without pause.
#[must_use]
pub fn busy_mount<'a>(world: &World<'a>, reading: &ResolvedCommand) -> Option<&'a Mount> {
    let table = world.table;
    let files = places_with_caches(table, reading, |file| file.kind.writes());
    let mounts = files.chain(watched_places(table, reading)).map(|(_, mount)| table.mount(mount));
    let is_busy = |mount: &&Mount| {
        let executor = mount.owner.as_ref().and_then(|own| world.executors.named(&own.executor));
        mount.adapter() == Adapter::Sshfs && executor.is_some_and(|its| its.has_busy_mounts())
    };
    let mut mounts: Vec<&'a Mount> = mounts.filter(is_busy).collect();
    mounts.pop()
}

/// Trees that the command may change, as paths on this machine.
#[must_use]
pub fn watched_places(table: &MountTable, reading: &ResolvedCommand) -> Vec<(PathBuf, MountId)> {
    let invocation = &reading.invocation;
    let moved = |file: &FileUse| {
        invocation.side_effects && invocation.working_dir.as_ref() == Some(&file.path)
    };
    let files = invocation.files.iter().zip(&reading.places);
    let written = files
        .filter(|(f, _)| (f.kind.writes() && f.kind.recursive()) || moved(f))
        .map(|(_, p)| p.as_ref());
    let cwd = reading.cwd.as_ref().filter(|_| invocation.current_dir == CurrentDir::Writes);
    let watched = written.flatten().chain(cwd).filter_map(|place| match place {
        PathOwner::At(_, path, mount) => Some((path.as_path().to_owned(), *mount)),
        PathOwner::Here(_) => None,
    });
    // Executors report changes on volumes to the volumes.
    watched
        .filter(|(_, mount)| {
            !matches!(table.mount(*mount).adapter(), Adapter::Bind | Adapter::Volume)
        })
        .collect()
}

/// Places of a command's files of some kinds, on mounts with caches.
fn places_with_caches(
    table: &MountTable,
    reading: &ResolvedCommand,
    is_wanted: impl Fn(&FileUse) -> bool,
) -> impl Iterator<Item = (PathBuf, MountId)> {
    let has_cache =
        |mount: MountId| !matches!(table.mount(mount).adapter(), Adapter::Bind | Adapter::Volume);
    reading.invocation.files.iter().zip(&reading.places).filter_map(
        move |(file, place)| match place {
            Some(PathOwner::At(_, path, mount)) if is_wanted(file) && has_cache(*mount) => {
                Some((path.as_path().to_owned(), *mount))
            }
            _ => None,
        },
    )
}
