//! The root of a view, and how names get into it.
//!
//! Invariant: *names that a client chose are made on the view's own tmpfs only.* They are made through a
//! descriptor of a second mount of that tmpfs, in which nothing else is mounted, one component at a time and
//! without following links (openat2(2): BENEATH, NO_SYMLINKS, NO_MAGICLINKS, NO_XDEV). Nobody but the view's builder can reach that
//! mount. Where a name lies in an export, it is looked up with the rights of its user, and never made.

use std::{
    ffi::OsStr,
    fs::File,
    io::Write as _,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::fs::fchown,
    },
    path::{Component, Path, PathBuf},
};

use nix::{
    errno::Errno,
    fcntl::{OFlag, OpenHow, ResolveFlag, openat2},
    sys::stat::{Mode, fchmod, mkdirat},
    unistd::{geteuid, symlinkat},
};
use posh_volume::directory::Acting;
use rustix::mount::{MoveMountFlags, move_mount};

use super::{
    places::PRIVATE,
    view::{failed, refuse},
    wire::ViewUser,
};
use crate::error::Refusal;

/// How a name is walked that is to be made: nothing leads away from the tmpfs.
const ON_TMPFS: ResolveFlag = ResolveFlag::RESOLVE_BENEATH
    .union(ResolveFlag::RESOLVE_NO_SYMLINKS)
    .union(ResolveFlag::RESOLVE_NO_MAGICLINKS)
    .union(ResolveFlag::RESOLVE_NO_XDEV);

/// How a place in the view is found: across its mounts, and by no link.
const IN_VIEW: ResolveFlag =
    ResolveFlag::RESOLVE_BENEATH.union(ResolveFlag::RESOLVE_NO_SYMLINKS).union(ResolveFlag::RESOLVE_NO_MAGICLINKS);

const PLACE: OFlag = OFlag::O_PATH.union(OFlag::O_NOFOLLOW).union(OFlag::O_CLOEXEC);
const DIRECTORY: OFlag = PLACE.union(OFlag::O_DIRECTORY);

/// A view's root while it is built and afterwards.
#[derive(Debug)]
pub struct Root {
    /// A mount of the root's tmpfs that stays writable and has nothing mounted in it.
    writable: OwnedFd,
    /// The same of [`PRIVATE`], in that order.
    private: [OwnedFd; 2],
    /// The root as commands see it.
    shown: OwnedFd,
}

/// Rights of the view's user for the time that this lives; `None` where they are this process's.
pub fn acting(user: Option<&ViewUser>) -> Result<Option<Acting>, Refusal> {
    let other = user.filter(|user| user.uid != 0 && geteuid().is_root());
    let caller = other.map(|user| posh_volume::store::Caller {
        uid: user.uid,
        gid: user.gid,
        groups: user.groups.clone().into(),
    });
    let acting = caller.map(|caller| Acting::begin(&caller)).transpose();
    acting.map_err(failed(|| "take the rights of the view's user".to_owned()))
}

impl Root {
    /// Of the tmpfs `writable`, shown by the mount `shown`.
    pub fn new(writable: OwnedFd, private: [OwnedFd; 2], shown: OwnedFd) -> Self {
        Self { writable, private, shown }
    }

    /// Makes a directory of the view's own, with its parents.
    pub fn make_directory(&self, path: &Path) -> Result<OwnedFd, Refusal> {
        let (base, below) = self.base(path);
        Self::make_below(base, below)
    }

    /// Makes a place on the root itself, also where one of [`PRIVATE`] is going to be.
    pub fn make_place(&self, path: &Path) -> Result<OwnedFd, Refusal> {
        Self::make_below(self.writable.as_fd(), relative(path))
    }

    fn make_below(base: BorrowedFd<'_>, below: &Path) -> Result<OwnedFd, Refusal> {
        let attempt = || format!("make {}", below.display());
        let mut at = base.try_clone_to_owned().map_err(failed(attempt))?;
        for component in below.components() {
            let Component::Normal(name) = component else { continue };
            at = match open_at(&at, name, DIRECTORY, ON_TMPFS) {
                Err(Errno::ENOENT) => {
                    match mkdirat(&at, name, Mode::from_bits_truncate(0o755)) {
                        Ok(()) | Err(Errno::EEXIST) => {}
                        Err(errno) => return Err(failed(attempt)(errno)),
                    }
                    open_at(&at, name, DIRECTORY, ON_TMPFS)
                }
                other => other,
            }
            .map_err(failed(attempt))?;
        }
        Ok(at)
    }

    /// Makes a file where there is none yet.
    pub fn make_file(&self, path: &Path) -> Result<File, Refusal> {
        let attempt = || format!("make {}", path.display());
        let (parent, name) = self.parent(path)?;
        let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let how = OpenHow::new().flags(flags).mode(Mode::from_bits_truncate(0o600)).resolve(ON_TMPFS);
        openat2(&parent, name, how).map(File::from).map_err(failed(attempt))
    }

    /// Makes a file with that content, of that user. Its mode has no setuid, setgid or sticky bit.
    pub fn write_file(&self, path: &Path, content: &[u8], mode: u32, user: Option<&ViewUser>) -> Result<(), Refusal> {
        let attempt = || format!("show {}", path.display());
        let mut file = self.make_file(path)?;
        file.write_all(content).map_err(failed(attempt))?;
        if let Some(user) = user.filter(|_| geteuid().is_root()) {
            fchown(&file, Some(user.uid), Some(user.gid)).map_err(failed(attempt))?;
        }
        fchmod(&file, Mode::from_bits_truncate(mode & 0o777)).map_err(failed(attempt))
    }

    /// Makes a symbolic link of the server's own.
    pub fn make_link(&self, path: &Path, target: &Path) -> Result<(), Refusal> {
        let (parent, name) = self.parent(path)?;
        symlinkat(target, &parent, name).map_err(failed(|| format!("link {}", path.display())))
    }

    /// Mounts a detached tree at a place that was made for it.
    pub fn mount(&self, tree: &OwnedFd, path: &Path) -> Result<(), Refusal> {
        let at = self.find(path).map_err(failed(|| format!("find {}", path.display())))?;
        self.mount_at(tree, &at, path)
    }

    /// Mounts a detached tree at a place inside an export: it has to be there, for the user.
    pub fn mount_inside(&self, tree: &OwnedFd, path: &Path, user: Option<&ViewUser>) -> Result<(), Refusal> {
        let at = {
            let _acting = acting(user)?;
            open_at(&self.shown, relative(path), DIRECTORY, IN_VIEW)
        };
        let at =
            at.map_err(|errno| refuse(format!("{} is not there on the server: {}", path.display(), errno.desc())))?;
        self.mount_at(tree, &at, path)
    }

    fn mount_at(&self, tree: &OwnedFd, at: &OwnedFd, path: &Path) -> Result<(), Refusal> {
        let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
        move_mount(tree, c"", at, c"", flags).map_err(failed(|| format!("mount {}", path.display())))
    }

    fn find(&self, path: &Path) -> nix::Result<OwnedFd> {
        open_at(&self.shown, relative(path), PLACE, IN_VIEW)
    }

    /// The root as commands see it.
    pub fn shown(&self) -> BorrowedFd<'_> {
        self.shown.as_fd()
    }

    fn parent<'a>(&self, path: &'a Path) -> Result<(OwnedFd, &'a OsStr), Refusal> {
        let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
            return Err(refuse(format!("{} can't be made", path.display())));
        };
        Ok((self.make_directory(parent)?, name))
    }

    /// The file system of ours that a path lies on, and the path in it.
    fn base<'a>(&'a self, path: &'a Path) -> (BorrowedFd<'a>, &'a Path) {
        let private = PRIVATE.iter().zip(&self.private);
        let found = private.filter_map(|(top, fd)| Some((fd.as_fd(), path.strip_prefix(top).ok()?))).next();
        found.unwrap_or_else(|| (self.writable.as_fd(), relative(path)))
    }
}

fn relative(path: &Path) -> &Path {
    path.strip_prefix("/").unwrap_or(path)
}

fn open_at(at: impl AsFd, path: impl AsRef<Path>, flags: OFlag, resolve: ResolveFlag) -> nix::Result<OwnedFd> {
    openat2(at, path.as_ref(), OpenHow::new().flags(flags).resolve(resolve))
}

/// The paths of mounts that are in place, by which is told what lies in one.
#[derive(Debug, Default)]
pub struct Mounted(pub Vec<PathBuf>);

impl Mounted {
    /// The mount that `path` lies in.
    pub fn around(&self, path: &Path) -> Option<&Path> {
        self.0.iter().map(PathBuf::as_path).find(|mount| path.starts_with(mount))
    }
}
