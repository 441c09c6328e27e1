//! The temporary directories of a view, `/tmp` and `/var/tmp`: one tmpfs of bounded size, which is
//! emptied when the view has no run.
//!
//! A supervisor holds a shared lock from before its run until it ends; the keeper empties the
//! directories under the exclusive lock, so that no run loses its files, and a new run waits
//! meanwhile.

use std::{
    collections::{BTreeMap, HashSet},
    ffi::CString,
    fs, io,
    os::{
        fd::{AsFd, AsRawFd as _, OwnedFd},
        unix::{ffi::OsStrExt as _, fs::PermissionsExt as _},
    },
    path::{Component, Path, PathBuf},
};

use nix::{
    mount::{MsFlags, mount},
    unistd::geteuid,
};
use rustix::{
    fs::{
        AtFlags, CWD, Dir, FlockOperation, MemfdFlags, Mode, OFlags, RenameFlags, ResolveFlags,
        chmod, fcntl_lock, memfd_create, openat, openat2, renameat_with, unlinkat,
    },
    io::{Errno, Result},
};

use super::{
    view::{failed, path_of},
    wire::{Isolation, ViewSpec},
};
use crate::error::Refusal;

/// The directories, with their names on the tmpfs.
const DIRECTORIES: [(&str, &str); 2] = [("tmp", "/tmp"), ("var-tmp", "/var/tmp")];

/// Files and directories: they take kernel memory that the size does not count, and the keeper has
/// to remove them. The commands that make the most, sort(1) and git(1), make some hundred.
const MAX_FILES: u32 = 1 << 16;

/// Makes the tmpfs at `place`, a directory of the runner's own, with both directories in it.
/// Returns each with its path in the view.
pub fn make(
    place: &Path,
    bytes: u64,
) -> std::result::Result<Vec<(PathBuf, &'static Path)>, Refusal> {
    fs::create_dir(place).map_err(attempt("make a place for"))?;
    let options = format!("size={bytes},nr_inodes={MAX_FILES},mode=755");
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    mount(Some("posh"), place, Some("tmpfs"), flags, Some(options.as_str()))
        .map_err(attempt("mount"))?;
    let make = |(name, path): &(&str, &'static str)| {
        let directory = place.join(name);
        fs::create_dir(&directory).map_err(attempt("make"))?;
        fs::set_permissions(&directory, fs::Permissions::from_mode(0o1777))
            .map_err(attempt("open"))?;
        Ok((directory, Path::new(*path)))
    };
    DIRECTORIES.iter().map(make).collect()
}

fn attempt<E: Into<io::Error>>(what: &'static str) -> impl FnOnce(E) -> Refusal {
    failed(move || format!("{what} the temporary directories of a view"))
}

/// Resolves a name in a directory on the same mount, without links.
const SAME_MOUNT: ResolveFlags =
    ResolveFlags::BENEATH.union(ResolveFlags::NO_SYMLINKS).union(ResolveFlags::NO_XDEV);

/// Lock on the directories of a view while they are in use.
#[derive(Debug)]
pub struct ScratchUse {
    lock: Option<OwnedFd>,
    /// Paths that the view shows: mounts, and the workstation's files.
    shown: Vec<PathBuf>,
}

impl ScratchUse {
    /// Not in use yet. Without a view of its own the directories are the machine's, and nothing is
    /// removed.
    pub fn new(spec: &ViewSpec) -> Result<Self> {
        let lock = match spec.isolation() {
            Isolation::Nothing => None,
            _ => Some(memfd_create("posh-view", MemfdFlags::CLOEXEC)?),
        };
        let mounts = spec.mounts.iter().map(|entry| path_of(&entry.path));
        let shown = mounts.chain(spec.client_files.iter().map(|file| path_of(&file.path)));
        Ok(Self { lock, shown: shown.map(Path::to_owned).collect() })
    }

    /// Locks them for this process until it ends: a lock of fcntl(2) belongs to a process, not to
    /// its children.
    pub fn begin(&self) -> Result<()> {
        self.lock.as_ref().map_or(Ok(()), |lock| fcntl_lock(lock, FlockOperation::LockShared))
    }

    /// Empties them if no process uses them.
    pub fn clean(&self) -> Result<()> {
        let Some(lock) = &self.lock else { return Ok(()) };
        match fcntl_lock(lock, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::AGAIN | Errno::ACCESS) => return Ok(()),
            locked => locked?,
        }
        let emptied = DIRECTORIES.iter().try_for_each(|(_, path)| {
            let top = openat(
                CWD,
                *path,
                OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC,
                Mode::empty(),
            )?;
            let below = self.shown.iter().filter_map(|shown| shown.strip_prefix(path).ok());
            empty_around(top, below.map(Path::to_owned).collect())
        });
        fcntl_lock(lock, FlockOperation::Unlock)?;
        emptied
    }
}

/// Removes everything in `top` except the `shown` paths below it, and the directories above these:
/// they keep their names.
fn empty_around(top: OwnedFd, shown: Vec<PathBuf>) -> Result<()> {
    let mut left = vec![(top, shown)];
    while let Some((directory, shown)) = left.pop() {
        let mut below: BTreeMap<CString, Vec<PathBuf>> = BTreeMap::new();
        for path in &shown {
            let mut rest = path.components();
            let Some(Component::Normal(name)) = rest.next() else { continue };
            below
                .entry(CString::new(name.as_bytes()).map_err(|_| Errno::INVAL)?)
                .or_default()
                .push(rest.as_path().to_owned());
        }
        empty(&directory, below.keys().cloned().collect())?;
        // A shown path itself is not entered.
        for (name, shown) in
            below.into_iter().filter(|(_, shown)| shown.iter().all(|path| path != Path::new("")))
        {
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            // A command with sufficient rights may have removed the directory.
            if let Ok(inner) = openat2(&directory, &name, flags, Mode::empty(), SAME_MOUNT) {
                left.push((inner, shown));
            }
        }
    }
    Ok(())
}

/// Removes everything in `top` except these names and mount points. A directory's entries are moved
/// up before it is removed, so that a deep tree takes neither stack nor descriptors. Every name is
/// one component below a descriptor, on the same mount: no link leads elsewhere, and exports that
/// are mounted below stay untouched.
fn empty(top: &OwnedFd, mut kept: HashSet<CString>) -> Result<()> {
    let mut number = 0_u32;
    loop {
        let names: Vec<CString> =
            names(top)?.into_iter().filter(|name| !kept.contains(name)).collect();
        if names.is_empty() {
            return Ok(());
        }
        for name in names {
            match unlinkat(top, &name, AtFlags::empty()) {
                Err(Errno::ISDIR | Errno::PERM) => {
                    make_usable(top, &name);
                    if !remove_directory(top, &name, &mut number)? {
                        kept.insert(name);
                    }
                }
                Err(Errno::BUSY) => drop(kept.insert(name)),
                other => other?,
            }
        }
    }
}

/// Removes a directory after moving its entries up; false if something is mounted on it or on one
/// of them.
fn remove_directory(top: &OwnedFd, name: &CString, number: &mut u32) -> Result<bool> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let directory = match openat2(top, name, flags, Mode::empty(), SAME_MOUNT) {
        Err(Errno::XDEV) => return Ok(false),
        other => other?,
    };
    if !move_up(&directory, top, number)? {
        return Ok(false);
    }
    match unlinkat(top, name, AtFlags::REMOVEDIR) {
        Err(Errno::BUSY | Errno::NOTEMPTY) => Ok(false),
        other => other.map(|()| true),
    }
}

/// Moves all entries up; false if one can't be moved, since something is mounted on it.
fn move_up(from: &OwnedFd, top: &OwnedFd, number: &mut u32) -> Result<bool> {
    let mut is_all = true;
    for name in names(from)? {
        make_usable(from, &name);
        loop {
            *number += 1;
            match renameat_with(from, &name, top, format!(".{number}"), RenameFlags::NOREPLACE) {
                Err(Errno::EXIST) => {}
                Err(Errno::BUSY | Errno::XDEV) => {
                    is_all = false;
                    break;
                }
                other => break other?,
            }
        }
    }
    Ok(is_all)
}

/// Opens up a directory that is closed to its owner, an unprivileged user. Changes it by a handle
/// on the directory itself: neither a link's target, nor a mount on it. root needs no such change.
fn make_usable(directory: &OwnedFd, name: &CString) {
    if geteuid().is_root() {
        return;
    }
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    if let Ok(handle) = openat2(directory, name, flags, Mode::empty(), SAME_MOUNT) {
        let _ = chmod(format!("/proc/self/fd/{}", handle.as_raw_fd()), Mode::RWXU);
    }
}

fn names(directory: impl AsFd) -> Result<Vec<CString>> {
    let entries = Dir::read_from(directory)?;
    let names = entries.map(|entry| entry.map(|entry| entry.file_name().to_owned()));
    names
        .filter(|name| !matches!(name.as_deref().map(std::ffi::CStr::to_bytes), Ok(b"." | b"..")))
        .collect()
}
