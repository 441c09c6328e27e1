//! The root of a view: a tmpfs that no other process can reach, and everything that is made on it.
//!
//! Invariant: with the executor's own rights a name that a client chose is made only on a file
//! system of the view's own. The tmpfs is open through two mounts. [`Root::bare`] never has a mount
//! on it, so that a walk from there stays on the tmpfs whatever the names are; directories and
//! files are made through it. [`Root::seen`] is the one that commands see, with all mounts; through
//! it names are only looked up.

use std::{
    fs::{File, Permissions},
    io::{self, Write as _},
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::fs::{PermissionsExt as _, fchown},
    },
    path::{Component, Path},
};

use nix::{
    errno::Errno,
    fcntl::{OFlag, OpenHow, ResolveFlag, open, openat2},
    libc,
    mount::{MntFlags, MsFlags, mount, umount2},
    sys::stat::{Mode, mkdirat},
    unistd::{UnlinkatFlags, pivot_root, symlinkat, unlinkat},
};
use posh_proto::executor::ClientFile;
use rustix::mount::{MoveMountFlags, OpenTreeFlags, move_mount, open_tree};

use super::{
    places::PRIVATE,
    view::{failed, path_of},
    wire::ViewUser,
};
use crate::{
    error::Refusal,
    sys::{self, ActingAs},
};

/// The root holds directories and small files only.
const ROOT_OPTIONS: &str = "size=64m,nr_inodes=16k,mode=755";

/// Files on the view's own file systems give no rights.
const NO_RIGHTS: MsFlags = MsFlags::MS_NOSUID.union(MsFlags::MS_NODEV);

/// A handle on a directory or file.
const HANDLE: OFlag = OFlag::O_PATH.union(OFlag::O_CLOEXEC);

/// Permission bits that are copied: reading, writing, executing; no set-user-id, set-group-id or
/// sticky bit.
const FILE_MODE: u32 = 0o777;

/// Holds a file until it is mounted over another one.
const COVER: &str = ".posh-cover";

/// A view's tmpfs.
#[derive(Debug)]
pub struct Root {
    bare: OwnedFd,
    seen: OwnedFd,
}

impl Root {
    /// Makes the tmpfs, enters it and leaves the server's tree: from then on no name leads there.
    pub fn enter(scratch: &Path) -> Result<Self, Refusal> {
        let attempt = || format!("make a root in {}", scratch.display());
        let root = scratch.join("root");
        std::fs::create_dir(&root).map_err(failed(attempt))?;
        mount(Some("posh"), &root, Some("tmpfs"), NO_RIGHTS, Some(ROOT_OPTIONS))
            .map_err(failed(attempt))?;
        let bare =
            open(&root, HANDLE | OFlag::O_DIRECTORY, Mode::empty()).map_err(failed(attempt))?;
        mount(Some(&root), &root, None::<&str>, MsFlags::MS_BIND, None::<&str>)
            .map_err(failed(attempt))?;
        std::env::set_current_dir(&root).map_err(failed(attempt))?;
        // The old root is then mounted on the new one, so that it needs no directory
        // (pivot_root(2)).
        pivot_root(".", ".").map_err(failed(attempt))?;
        umount2(".", MntFlags::MNT_DETACH)
            .map_err(failed(|| "leave the server's root".to_owned()))?;
        std::env::set_current_dir("/").map_err(failed(attempt))?;
        let seen =
            open("/", HANDLE | OFlag::O_DIRECTORY, Mode::empty()).map_err(failed(attempt))?;
        Ok(Self { bare, seen })
    }

    /// Makes a directory and its parents, and returns a handle on it. `path` is checked (see
    /// `places`) and lies in no mount but the private directories.
    pub fn directory(&self, path: &Path) -> nix::Result<OwnedFd> {
        match PRIVATE.iter().find_map(|private| Some((private, path.strip_prefix(private).ok()?))) {
            Some((private, below)) => {
                make_directories(self.find(Path::new(private))?.as_fd(), below)
            }
            None => self.point(path),
        }
    }

    /// Makes a directory and its parents on the tmpfs.
    pub fn point(&self, path: &Path) -> nix::Result<OwnedFd> {
        make_directories(self.bare.as_fd(), path)
    }

    /// A handle on the file that commands see at `path`; follows no symbolic link.
    pub fn find(&self, path: &Path) -> nix::Result<OwnedFd> {
        let resolve = ResolveFlag::RESOLVE_IN_ROOT
            | ResolveFlag::RESOLVE_NO_SYMLINKS
            | ResolveFlag::RESOLVE_NO_MAGICLINKS;
        openat2(&self.seen, path, OpenHow::new().flags(HANDLE).resolve(resolve))
    }

    /// A mount point inside another mount: it must exist, for a user with these rights.
    pub fn find_as(&self, path: &Path, user: Option<&ViewUser>) -> nix::Result<OwnedFd> {
        let _acting = ActingAs::begin(user)?;
        self.find(path)
    }

    /// Makes an empty file on the tmpfs, as a mount point.
    pub fn empty_file(&self, path: &Path) -> nix::Result<()> {
        self.new_file(path).map(drop)
    }

    /// Makes a symbolic link on the tmpfs.
    pub fn link(&self, path: &Path, target: &Path) -> nix::Result<()> {
        let (parent, name) = self.parent(path)?;
        symlinkat(target, parent, name)
    }

    /// Mounts a detached tree.
    pub fn attach(&self, tree: &OwnedFd, at: &OwnedFd) -> nix::Result<()> {
        let flags =
            MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
        move_mount(tree, c"", at, c"", flags).map_err(errno)
    }

    /// Writes a client's file, whose place is checked and empty.
    pub fn write(&self, file: &ClientFile, user: Option<&ViewUser>) -> io::Result<()> {
        self.write_at(path_of(&file.path), file, user)
    }

    /// Writes a client's file and mounts it over one of the server's.
    pub fn cover(
        &self,
        covered: &OwnedFd,
        file: &ClientFile,
        user: Option<&ViewUser>,
    ) -> io::Result<()> {
        self.write_at(Path::new(COVER), file, user)?;
        let tree = detach(self.find(Path::new(COVER))?.as_fd(), FILE_ATTRIBUTES)?;
        self.attach(&tree, covered)?;
        // The kernel mounts no unlinked file, but a mounted one may be unlinked.
        Ok(unlinkat(&self.bare, COVER, UnlinkatFlags::NoRemoveDir)?)
    }

    fn write_at(&self, path: &Path, file: &ClientFile, user: Option<&ViewUser>) -> io::Result<()> {
        let mut target = self.new_file(path)?;
        target.write_all(&file.content)?;
        if let Some(ViewUser { uid, gid, .. }) = user {
            fchown(&target, Some(*uid), Some(*gid))?;
        }
        target.set_permissions(Permissions::from_mode(file.mode & FILE_MODE))
    }

    /// Makes the root read-only for commands; directories are still made through [`Self::bare`].
    pub fn close(&self) -> nix::Result<()> {
        sys::set_mount(self.seen.as_fd(), libc::MOUNT_ATTR_RDONLY, false)
    }

    fn new_file(&self, path: &Path) -> nix::Result<File> {
        let (parent, name) = self.parent(path)?;
        let flags =
            OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let how = OpenHow::new().flags(flags).mode(Mode::S_IRUSR | Mode::S_IWUSR);
        openat2(parent, name, how.resolve(inside())).map(File::from)
    }

    fn parent<'a>(&self, path: &'a Path) -> nix::Result<(OwnedFd, &'a Path)> {
        let name = path.file_name().ok_or(Errno::EINVAL)?;
        Ok((self.directory(path.parent().unwrap_or(Path::new("/")))?, Path::new(name)))
    }
}

/// Attributes of a file that commands only read.
const FILE_ATTRIBUTES: u64 = libc::MOUNT_ATTR_RDONLY
    | libc::MOUNT_ATTR_NOSUID
    | libc::MOUNT_ATTR_NODEV
    | libc::MOUNT_ATTR_NOEXEC;

/// Clones the mounts at and below `at`, with these attributes added (`MOUNT_ATTR_*`); the clone is
/// detached until it is attached.
pub fn detach(at: BorrowedFd<'_>, attributes: u64) -> nix::Result<OwnedFd> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE
        | OpenTreeFlags::OPEN_TREE_CLOEXEC
        | OpenTreeFlags::AT_RECURSIVE
        | OpenTreeFlags::AT_EMPTY_PATH;
    let tree = open_tree(at, c"", flags).map_err(errno)?;
    sys::set_mount(tree.as_fd(), attributes, true)?;
    Ok(tree)
}

/// Makes the directories of `path` below `base`, one component after the other, on the file system
/// of `base`.
fn make_directories(base: BorrowedFd<'_>, path: &Path) -> nix::Result<OwnedFd> {
    let handle = |at: BorrowedFd<'_>, name: &Path| {
        openat2(at, name, OpenHow::new().flags(HANDLE | OFlag::O_DIRECTORY).resolve(inside()))
    };
    let mut at = handle(base, Path::new("."))?;
    for component in path.components() {
        let name = match component {
            Component::Normal(name) => Path::new(name),
            Component::RootDir => continue,
            Component::ParentDir | Component::CurDir | Component::Prefix(_) => {
                return Err(Errno::EINVAL);
            }
        };
        at = match handle(at.as_fd(), name) {
            Err(Errno::ENOENT) => {
                match mkdirat(&at, name, Mode::from_bits_truncate(0o755)) {
                    // Another run's supervisor may make the same one.
                    Ok(()) | Err(Errno::EEXIST) => {}
                    Err(errno) => return Err(errno),
                }
                handle(at.as_fd(), name)?
            }
            other => other?,
        };
    }
    Ok(at)
}

/// Resolves a name in a directory on the same mount, without links.
fn inside() -> ResolveFlag {
    ResolveFlag::RESOLVE_BENEATH
        | ResolveFlag::RESOLVE_NO_SYMLINKS
        | ResolveFlag::RESOLVE_NO_MAGICLINKS
        | ResolveFlag::RESOLVE_NO_XDEV
}

pub fn errno(error: rustix::io::Errno) -> Errno {
    Errno::from_raw(error.raw_os_error())
}
