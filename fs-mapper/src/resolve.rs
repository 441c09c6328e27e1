//! Resolution of a path: a file on a mount that an executor owns (with its name on the executor),
//! or local and the reason.

use crate::foreign::Foreign;
use crate::path::{ClientPath, ExecutorName, ExportPath, MountId, joined};
use crate::places::{Terrain, dir_of};
use crate::table::{Mount, MountState, MountTable};
use crate::walk::{LastLink, LookupEnd, Position};
use std::collections::HashMap;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// The answer about one path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Resolution {
    /// An executor owns it.
    Owned(Owned),
    /// The path is local.
    Local {
        /// The reason; its `Display` is a sentence for the user.
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
    /// A `..` is left below the mount point: only the executor's kernel can resolve it, perhaps to
    /// a path outside the mount.
    pub uncertain: bool,
    /// The given path passes a symlink on the local disk, which the executor does not have: rewrite
    /// the word, or run the stage locally.
    pub through_symlink: bool,
}

/// Reason why a path has no owner.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LocalReason {
    /// On a local disk, existing or not. The path is as given.
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
    /// On a FUSE mount that this user's commands must not bypass.
    #[error("{} is not used: {why}", mount.display())]
    ForeignMount {
        /// The mount point.
        mount: PathBuf,
        /// Reason, about the mount.
        why: Foreign,
    },
    /// Inside an owned mount, but on another file system that is mounted there.
    #[error(
        "{} ({fs_type}) is mounted inside {} and is not part of it",
        mount.display(), outer.display()
    )]
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
    /// In /proc, where links depend on the process.
    #[error("{} is a view of one process", .0.display())]
    ProcessView(PathBuf),
    /// More than 40 symlinks, as the kernel counts (path_resolution(7)).
    #[error("{} passes too many symbolic links", .0.display())]
    TooManyLinks(PathBuf),
    /// Empty, with a NUL byte, or relative to a directory that is not absolute.
    #[error("{:?} is not a path", .0)]
    Invalid(PathBuf),
}

/// Limit on cached directories per call. A call with more comes from `find`, whose directories do
/// not recur.
const MAX_CACHED_DIRECTORIES: usize = 1024;

/// Resolves many paths of one call. Walks shared directories once, so each further name costs one
/// readlink(2) on a local disk and nothing on an owned mount. Drop it after the call: it does not
/// notice changed symlinks.
pub struct Resolver<'t> {
    table: &'t MountTable,
    /// `None` if the current directory is not absolute.
    start: Option<Position>,
    /// Keyed by the text up to and including the last slash.
    directories: HashMap<Vec<u8>, Position>,
}

impl<'t> Resolver<'t> {
    /// `cwd` as from getcwd(3): absolute and without symlinks.
    pub fn new(table: &'t MountTable, cwd: &Path) -> Self {
        let start = cwd.is_absolute().then(|| Position::at(&table.places, cwd));
        Resolver { table, start, directories: HashMap::new() }
    }

    /// Resolves a path as open(2) does. Blocks on local disks only.
    pub fn resolve(&mut self, path: &Path) -> Resolution {
        self.resolve_with(path, LastLink::Follow)
    }

    /// Resolves a path, following a symlink at its end or not.
    pub fn resolve_with(&mut self, path: &Path, last: LastLink) -> Resolution {
        let text = path.as_os_str().as_bytes();
        if text.is_empty() || text.contains(&0) {
            return Resolution::Local { reason: LocalReason::Invalid(path.to_path_buf()) };
        }
        match self.position(text, last) {
            Some(position) => self.resolution(position, path),
            None => Resolution::Local { reason: LocalReason::Invalid(path.to_path_buf()) },
        }
    }

    fn position(&mut self, text: &[u8], last: LastLink) -> Option<Position> {
        let places = &self.table.places;
        let start = self.start.as_ref()?;
        let name_start = text.iter().rposition(|byte| *byte == b'/').map_or(0, |slash| slash + 1);
        let (dir, name) = text.split_at(name_start);
        // A last component `.`, `..` or empty refers to the component before it.
        let plain = !matches!(name, b"" | b"." | b"..");
        if dir.is_empty() || !plain {
            let mut position = start.clone();
            position.walk(places, text, last);
            return Some(position);
        }
        let mut position = match self.directories.get(dir) {
            Some(known) => known.clone(),
            None => {
                let mut position = start.clone();
                position.walk(places, dir, LastLink::Follow);
                if self.directories.len() < MAX_CACHED_DIRECTORIES {
                    self.directories.insert(dir.to_vec(), position.clone());
                }
                position
            }
        };
        position.walk(places, name, last);
        Some(position)
    }

    fn resolution(&self, position: Position, given: &Path) -> Resolution {
        let owner = position.index.and_then(|index| {
            let mount = &self.table.mounts[index];
            (position.end == LookupEnd::Open && position.terrain == Terrain::Owned).then_some(mount)
        });
        match owner.and_then(|mount| owned(mount, &position)) {
            Some(owned) => Resolution::Owned(owned),
            None => Resolution::Local { reason: self.reason(&position, given) },
        }
    }

    fn reason(&self, position: &Position, given: &Path) -> LocalReason {
        if position.end == LookupEnd::TooManyLinks {
            return LocalReason::TooManyLinks(given.to_path_buf());
        }
        if let Some(awaited) = self.table.absent.around(&dir_of(&position.path())) {
            let mount = &self.table.mounts[awaited.index];
            let point = mount.path.as_path().to_path_buf();
            return match mount.state {
                MountState::Automount => LocalReason::Automount(point),
                _ => LocalReason::NotMounted(point),
            };
        }
        let Some(mount) = position.index.map(|index| &self.table.mounts[index]) else {
            return LocalReason::NotOnMount(given.to_path_buf());
        };
        let (point, fs_type) = (mount.path.as_path().to_path_buf(), mount.fs_type.clone());
        if fs_type == "proc" {
            LocalReason::ProcessView(given.to_path_buf())
        } else if let Some(outer) = self.table.owner_around(mount) {
            LocalReason::Boundary {
                mount: point,
                fs_type,
                outer: outer.path.as_path().to_path_buf(),
            }
        } else if let Some(why) = mount.foreign {
            LocalReason::ForeignMount { mount: point, why }
        } else if position.terrain == Terrain::Closed {
            LocalReason::UnownedMount { mount: point, fs_type }
        } else {
            LocalReason::NotOnMount(given.to_path_buf())
        }
    }
}

fn owned(mount: &Mount, position: &Position) -> Option<Owned> {
    let owner = mount.owner.as_ref()?;
    let path = position.path();
    let rest = path.strip_prefix(mount.path.as_path()).ok()?;
    let export_path =
        ExportPath { export: owner.export.clone(), path: joined(&owner.sub_path, rest) };
    Some(Owned {
        mount: mount.id,
        executor: owner.executor.clone(),
        export_path,
        client_path: ClientPath::new(path)?,
        uncertain: position.uncertain,
        through_symlink: position.through_symlink,
    })
}

#[cfg(test)]
#[path = "resolve_tests.rs"]
mod tests;
