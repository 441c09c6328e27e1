//! Builds a view (see `view`) in three steps: clones what it shows of the server's tree as detached
//! mounts (`system`, and the exports), leaves that tree for a tmpfs of its own (`root`), and only
//! then makes the places that the client chose (`places`) and mounts the exports there.

use std::{
    collections::{BTreeSet, HashSet},
    ops::Bound,
    os::fd::{AsFd as _, OwnedFd},
    path::{Path, PathBuf},
};

use fs_mapper::mountinfo::MountInfo;
use nix::{
    errno::Errno,
    libc,
    mount::{MsFlags, mount},
    sched::{CloneFlags, unshare},
    sys::stat::{Mode, umask},
};
use posh_proto::executor::ClientFile;

use super::{
    paths::name_of,
    places,
    root::{Root, detach},
    system::{self, Hidden},
    view::{failed, open_export, path_of, refuse},
    wire::{DirectoryId, ViewMount, ViewSpec, ViewUser},
};
use crate::{error::Refusal, hidden};

/// Further directories of the view: most workstations have their mounts there.
const EMPTY: [&str; 3] = ["/run", "/home", "/mnt"];

/// A view that [`enter`] has made.
pub struct Entered {
    pub root: Root,
    /// Paths of its mounts.
    pub mounts: Vec<PathBuf>,
    /// The exports' directories, in the order of the specification.
    pub directories: Vec<DirectoryId>,
    pub unreachable: Unreachable,
}

/// Places of a view where it shows a file system that the workstation's mount does not: those that
/// are mounted on the server below the directory of a mount that shows one file system.
#[derive(Debug, Default)]
pub struct Unreachable {
    points: BTreeSet<PathBuf>,
    parents: HashSet<PathBuf>,
}

/// Makes the view of `spec` in a new mount namespace and enters it.
pub fn enter(spec: &ViewSpec) -> Result<Entered, Refusal> {
    let points: Vec<&Path> = spec.mounts.iter().map(|entry| path_of(&entry.path)).collect();
    let files: Vec<&Path> = spec.client_files.iter().map(|file| path_of(&file.path)).collect();
    places::check_all(&points, &files).map_err(|misplaced| refuse(misplaced.to_string()))?;
    unshare(CloneFlags::CLONE_NEWNS).map_err(failed(|| "make a mount namespace".to_owned()))?;
    mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>)
        .map_err(failed(|| "make the mounts private".to_owned()))?;
    // Users other than root search directories made from now on.
    umask(Mode::S_IWGRP | Mode::S_IWOTH);
    let user = spec.user.as_ref();
    let unreachable = Unreachable::of(spec)?;
    let exports =
        spec.mounts.iter().map(|entry| take_export(entry, user)).collect::<Result<Vec<_>, _>>()?;
    let directories = exports.iter().map(DirectoryId::of).collect::<Result<Vec<_>, _>>();
    let directories = directories.map_err(failed(|| "look at what was taken".to_owned()))?;
    let hidden = hidden::shown(spec.hidden.iter().map(|path| path_of(path)));
    let hidden = hidden.map_err(|error| refuse(error.to_string()))?;
    let of_server = system::take(spec.isolation(), &Hidden::of(hidden), &files)?;
    let scratch = path_of(&spec.scratch);
    let private = system::take_private(scratch, spec.bounds.tmp_bytes)?;
    let root = Root::enter(scratch)?;
    // The server's tree is left: from now on only what was taken can be reached.
    of_server.into_iter().chain(private).try_for_each(|taken| taken.place(&root))?;
    for path in EMPTY {
        root.directory(Path::new(path)).map_err(failed(|| format!("make {path}")))?;
    }
    let mut builder = Builder { root, user, mounts: Vec::new() };
    for file in &spec.client_files {
        builder.show_file(file, &points)?;
    }
    for (entry, export) in spec.mounts.iter().zip(&exports) {
        builder.mount_export(path_of(&entry.path), export)?;
    }
    builder.root.close().map_err(failed(|| "make the root read-only".to_owned()))?;
    Ok(Entered { root: builder.root, mounts: builder.mounts, directories, unreachable })
}

impl Unreachable {
    /// Reads this namespace's list of mounts.
    pub fn of(spec: &ViewSpec) -> Result<Self, Refusal> {
        let mut found = Self::default();
        if !spec.mounts.iter().any(|entry| entry.one_file_system) {
            return Ok(found);
        }
        let info = MountInfo::read().map_err(|error| refuse(error.to_string()))?;
        let visible = info.visible();
        for entry in spec.mounts.iter().filter(|entry| entry.one_file_system) {
            let directory = open_export(entry, spec.user.as_ref())?;
            let directory = name_of(&directory).map_err(failed(|| "find an export".to_owned()))?;
            let path = path_of(&entry.path);
            let below = visible.iter().filter_map(|mount| {
                let rest = mount.mount_point.strip_prefix(&directory).ok()?;
                (rest != Path::new("")).then(|| path.join(rest))
            });
            // The workstation may have mounted such a file system's own export there.
            let others = spec.mounts.iter().map(|other| path_of(&other.path));
            let inner: Vec<_> =
                others.filter(|other| *other != path && other.starts_with(path)).collect();
            let is_shown = |point: &PathBuf| inner.iter().any(|other| point.starts_with(other));
            found.points.extend(below.filter(|point| !is_shown(point)));
        }
        found.parents =
            found.points.iter().filter_map(|at| Some(at.parent()?.to_owned())).collect();
        Ok(found)
    }

    /// Returns the mount point that a use of this path would meet: one around it; an entry of the
    /// directory, whose attributes the workstation refuses; with `is_recursive`, any below it.
    pub fn met_by(&self, at: &Path, is_recursive: bool) -> Option<&Path> {
        let around = at.ancestors().find_map(|above| self.points.get(above));
        // Paths below `at` come right behind it in the order.
        let below = || {
            let is_met = is_recursive || self.parents.contains(at);
            let next = is_met
                .then(|| {
                    self.points.range::<Path, _>((Bound::Included(at), Bound::Unbounded)).next()
                })
                .flatten();
            next.filter(|point| point.starts_with(at))
        };
        around.or_else(below).map(PathBuf::as_path)
    }
}

/// Takes an export's directory, with the rights that commands have in it.
fn take_export(entry: &ViewMount, user: Option<&ViewUser>) -> Result<OwnedFd, Refusal> {
    let directory = open_export(entry, user)?;
    let path = path_of(&entry.path);
    let read_only = if entry.read_only { libc::MOUNT_ATTR_RDONLY } else { 0 };
    let no_links = if entry.no_symlinks { libc::MOUNT_ATTR_NOSYMFOLLOW } else { 0 };
    let no_programs = if entry.exec { 0 } else { libc::MOUNT_ATTR_NOEXEC };
    detach(
        directory.as_fd(),
        libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NODEV | no_programs | read_only | no_links,
    )
    .map_err(failed(|| format!("take the export for {}", path.display())))
}

/// Makes the places that the client chose.
struct Builder<'a> {
    root: Root,
    /// Owner of the client's files.
    user: Option<&'a ViewUser>,
    /// Mounts that are in place.
    mounts: Vec<PathBuf>,
}

impl Builder<'_> {
    fn mount_export(&mut self, path: &Path, export: &OwnedFd) -> Result<(), Refusal> {
        let around = self.mounts.iter().find(|mount| path.starts_with(mount));
        let point = match around {
            // No mount point is made in an export: that would change the server.
            Some(mount) => self.root.find_as(path, self.user).map_err(|errno| {
                let (path, mount) = (path.display(), mount.display());
                refuse(format!(
                    "cannot mount {path} inside of the server's {mount}: {}",
                    errno.desc()
                ))
            })?,
            None => self
                .root
                .directory(path)
                .and_then(|_| self.root.find(path))
                .map_err(cannot_make(path))?,
        };
        self.root.attach(export, &point).map_err(failed(|| format!("mount {}", path.display())))?;
        self.mounts.push(path.to_owned());
        Ok(())
    }

    /// Shows a small file of the user. A file inside a mount is there already.
    fn show_file(&mut self, file: &ClientFile, points: &[&Path]) -> Result<(), Refusal> {
        let path = path_of(&file.path);
        if points.iter().any(|point| path.starts_with(point)) {
            return Ok(());
        }
        let attempt = || format!("show {}", path.display());
        // Only files of /etc with fixed names can lie in a directory that the server shows.
        match places::is_replaceable(path).then(|| self.shown_parent(path)).flatten() {
            Some(_) => {
                let covered = self.root.find(path).map_err(failed(attempt))?;
                self.root.cover(&covered, file, self.user).map_err(failed(attempt))
            }
            None => self.root.write(file, self.user).map_err(failed(attempt)),
        }
    }

    /// The directory of a file, if the server shows it as a whole.
    fn shown_parent(&self, path: &Path) -> Option<OwnedFd> {
        path.parent()
            .filter(|parent| *parent != Path::new("/etc"))
            .and_then(|parent| self.root.find(parent).ok())
    }
}

fn cannot_make(path: &Path) -> impl FnOnce(Errno) -> Refusal {
    failed(move || format!("make the mount point {}", path.display()))
}
