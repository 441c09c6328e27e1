//! Paths that only one user and root can change.
//!
//! A path is walked from `/`, one descriptor after the other, with O_NOFOLLOW; each file is judged
//! by fstat(2) of the descriptor that the next step uses. The rule for every component:
//!
//! * it belongs to root or to the user;
//! * nobody else can write it: neither its group nor others have that permission (the bits of a
//!   POSIX ACL show in the group's);
//! * a directory that others may write is passed only with the sticky bit (`/tmp`), only on the
//!   way, and only to an entry that itself belongs to root or to the user, for nobody else can
//!   rename or remove that; no symbolic link in it is followed, and no other file system is
//!   entered, since a FUSE server can claim that its files belong to the user;
//! * a symbolic link elsewhere is followed, and its target is walked under the same rule.
//!
//! **Invariant.** Only root and the user can rename, replace or remount a part of an accepted path.
//! So it leads to the same file afterwards, and may be used as a path.
#![forbid(unsafe_code)]

mod links;
mod regular;

use std::{
    collections::VecDeque,
    ffi::{OsStr, OsString},
    fs::File,
    io,
    os::{fd::OwnedFd, unix::ffi::OsStrExt as _},
    path::{Component, Path, PathBuf},
};

use rustix::{
    fs::{FileType, Mode, OFlags, Stat, fstat, mkdirat, open, openat, readlinkat},
    io::Errno,
};

pub use links::open_shared_directory;
pub use regular::open_regular;

/// As many as Linux follows in one path (path_resolution(7)).
const MAX_LINKS: usize = 40;
/// Write permission of the group and of others.
const WRITABLE_BY_OTHERS: u32 = 0o022;
/// The sticky bit: entries can be renamed and removed only by their owner, the directory's, and
/// root.
const STICKY: u32 = 0o1000;
/// root's uid.
const ROOT: u32 = 0;

/// Reason why a path is not trusted, with the remedy.
#[derive(Debug, thiserror::Error)]
pub enum Untrusted {
    /// A system call failed, such as for a missing file.
    #[error("can't use {}", path.display())]
    Io {
        /// The component.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// Another user owns the component, and could replace it.
    #[error("{} belongs to user {owner}, not to user {user} or root", path.display())]
    ForeignOwner {
        /// The component.
        path: PathBuf,
        /// Its owner's uid.
        owner: u32,
        /// Uid of the user who should own it.
        user: u32,
    },
    /// Other users can write the component.
    #[error(
        "{} has mode {mode:04o}, so that other users can write it; run: chmod go-w {}",
        path.display(),
        path.display()
    )]
    Writable {
        /// The component.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// A symbolic link in a directory such as /tmp, where any user can have made it.
    #[error("{} is a symbolic link in a directory that all users may write", .0.display())]
    SharedLink(PathBuf),
    /// A mount in a directory such as /tmp: users may be allowed to mount (fuse.conf(5)), and a
    /// FUSE file system reports any owner that it likes.
    #[error("{} is a mount in a directory that all users may write", .0.display())]
    SharedMount(PathBuf),
    /// A file where a directory should be, or the other way round.
    #[error("{} is not a {wanted}", path.display())]
    Kind {
        /// The component.
        path: PathBuf,
        /// The expected file type.
        wanted: &'static str,
    },
}

impl Untrusted {
    /// Returns true if there is no such file.
    #[must_use]
    pub fn is_missing(&self) -> bool {
        matches!(
            self,
            Self::Io { source, .. }
                if matches!(
                    source.kind(),
                    io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
                )
        )
    }

    fn io(path: &Path, error: Errno) -> Self {
        Self::Io { path: path.to_owned(), source: error.into() }
    }
}

impl From<Untrusted> for io::Error {
    fn from(error: Untrusted) -> Self {
        match error {
            Untrusted::Io { path, source } => {
                io::Error::new(source.kind(), format!("{}: {source}", path.display()))
            }
            other => io::Error::new(io::ErrorKind::PermissionDenied, other),
        }
    }
}

/// A trusted directory.
#[derive(Debug)]
pub struct TrustedDirectory {
    /// Opened with O_PATH.
    pub descriptor: OwnedFd,
    /// Without symbolic links.
    pub path: PathBuf,
    /// Its owner's uid.
    pub owner: u32,
    /// Its permission bits.
    pub mode: u32,
}

/// A trusted regular file.
#[derive(Debug)]
pub struct TrustedFile {
    /// Opened for reading; this descriptor is the one that was checked.
    pub file: File,
    /// Without symbolic links.
    pub path: PathBuf,
    /// Its owner's uid.
    pub owner: u32,
    /// True if its directory is writable by others, with the sticky bit.
    pub is_in_shared_directory: bool,
}

/// Walks to a directory, and opens it with O_PATH.
///
/// # Errors
/// [`Untrusted`]
pub fn directory(path: &Path, user: u32) -> Result<TrustedDirectory, Untrusted> {
    Walk::to(path, user, Missing::Refused)?.into_directory()
}

/// Like [`directory`], but creates missing directories with mode 0700.
///
/// # Errors
/// [`Untrusted`]
pub fn make_directory(path: &Path, user: u32) -> Result<TrustedDirectory, Untrusted> {
    Walk::to(path, user, Missing::Made)?.into_directory()
}

/// Like [`make_directory`], but creates only the last component.
///
/// # Errors
/// [`Untrusted`]
pub fn make_last_directory(path: &Path, user: u32) -> Result<TrustedDirectory, Untrusted> {
    Walk::to(path, user, Missing::LastMade)?.into_directory()
}

/// Walks to a regular file, and opens it for reading.
///
/// # Errors
/// [`Untrusted`]
pub fn open_file(path: &Path, user: u32) -> Result<TrustedFile, Untrusted> {
    Walk::to(path, user, Missing::Refused)?.into_file()
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Missing {
    Refused,
    Made,
    LastMade,
}

/// State of a walk.
struct Walk {
    user: u32,
    missing: Missing,
    at: OwnedFd,
    about: Stat,
    path: PathBuf,
    /// True if the parent directory of `at` is writable by others.
    is_in_shared: bool,
    /// The parent directory of `at`; `None` for `/` and after `..`.
    parent: Option<OwnedFd>,
    left: VecDeque<OsString>,
    links: usize,
}

impl Walk {
    fn to(path: &Path, user: u32, missing: Missing) -> Result<Self, Untrusted> {
        let mut left = VecDeque::new();
        if path.is_relative() {
            let here = std::env::current_dir();
            let here = here.map_err(|source| Untrusted::Io { path: path.to_owned(), source })?;
            left.extend(names(here.as_os_str()));
        }
        left.extend(names(path.as_os_str()));
        let (at, about) = root()?;
        let path = PathBuf::from("/");
        let mut walk = Self {
            user,
            missing,
            at,
            about,
            path,
            is_in_shared: false,
            parent: None,
            left,
            links: 0,
        };
        walk.judge()?;
        while let Some(name) = walk.left.pop_front() {
            walk.step(&name)?;
        }
        Ok(walk)
    }

    fn step(&mut self, name: &OsStr) -> Result<(), Untrusted> {
        if name == ".." {
            return self.step_up();
        }
        let is_in_shared = self.passed()?;
        let path = self.path.join(name);
        let failed = |error| Untrusted::io(&path, error);
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let next = match openat(&self.at, name, flags, Mode::empty()) {
            Err(Errno::NOENT) if self.makes_missing() => {
                match mkdirat(&self.at, name, Mode::RWXU) {
                    Ok(()) | Err(Errno::EXIST) => openat(&self.at, name, flags, Mode::empty()),
                    Err(error) => Err(error),
                }
            }
            opened => opened,
        };
        let next = next.map_err(failed)?;
        let about = fstat(&next).map_err(failed)?;
        if FileType::from_raw_mode(about.st_mode) == FileType::Symlink {
            return self.follow(&next, &about, &path, is_in_shared);
        }
        if is_in_shared && about.st_dev != self.about.st_dev {
            return Err(Untrusted::SharedMount(path));
        }
        self.parent = Some(std::mem::replace(&mut self.at, next));
        (self.about, self.path, self.is_in_shared) = (about, path, is_in_shared);
        self.judge()
    }

    /// Returns true if others may write the current directory; fails if it is no directory.
    fn passed(&self) -> Result<bool, Untrusted> {
        self.expect(FileType::Directory, "directory")?;
        Ok(self.about.st_mode & WRITABLE_BY_OTHERS != 0)
    }

    fn step_up(&mut self) -> Result<(), Untrusted> {
        self.passed()?;
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        self.at = openat(&self.at, "..", flags, Mode::empty())
            .map_err(|error| Untrusted::io(&self.path, error))?;
        self.about = fstat(&self.at).map_err(|error| Untrusted::io(&self.path, error))?;
        self.path.pop();
        (self.parent, self.is_in_shared) = (None, false);
        self.judge()
    }

    /// Follows a symbolic link, unless others may write its directory and could have replaced it.
    fn follow(
        &mut self,
        link: &OwnedFd,
        about: &Stat,
        path: &Path,
        is_in_shared: bool,
    ) -> Result<(), Untrusted> {
        if is_in_shared {
            return Err(Untrusted::SharedLink(path.to_owned()));
        }
        self.expect_owner(about, path)?;
        self.links += 1;
        if self.links > MAX_LINKS {
            return Err(Untrusted::io(path, Errno::LOOP));
        }
        let target =
            readlinkat(link, "", Vec::new()).map_err(|error| Untrusted::io(path, error))?;
        let target = OsStr::from_bytes(target.as_bytes());
        for name in names(target).into_iter().rev() {
            self.left.push_front(name);
        }
        if Path::new(target).is_absolute() {
            (self.at, self.about) = root()?;
            self.path = PathBuf::from("/");
            (self.parent, self.is_in_shared) = (None, false);
        }
        Ok(())
    }

    fn makes_missing(&self) -> bool {
        match self.missing {
            Missing::Refused => false,
            Missing::Made => true,
            Missing::LastMade => self.left.is_empty(),
        }
    }

    fn judge(&self) -> Result<(), Untrusted> {
        self.expect_owner(&self.about, &self.path)?;
        let mode = self.about.st_mode;
        let is_shared_directory =
            FileType::from_raw_mode(mode) == FileType::Directory && mode & STICKY != 0;
        let is_on_the_way = is_shared_directory && !self.left.is_empty();
        if mode & WRITABLE_BY_OTHERS != 0 && !is_on_the_way {
            return Err(Untrusted::Writable { path: self.path.clone(), mode: mode & 0o7777 });
        }
        Ok(())
    }

    fn expect_owner(&self, about: &Stat, path: &Path) -> Result<(), Untrusted> {
        let owner = about.st_uid;
        if owner == ROOT || owner == self.user {
            return Ok(());
        }
        Err(Untrusted::ForeignOwner { path: path.to_owned(), owner, user: self.user })
    }

    fn expect(&self, kind: FileType, wanted: &'static str) -> Result<(), Untrusted> {
        if FileType::from_raw_mode(self.about.st_mode) == kind {
            return Ok(());
        }
        Err(Untrusted::Kind { path: self.path.clone(), wanted })
    }

    fn into_directory(self) -> Result<TrustedDirectory, Untrusted> {
        self.expect(FileType::Directory, "directory")?;
        let (owner, mode) = (self.about.st_uid, self.about.st_mode & 0o7777);
        Ok(TrustedDirectory { descriptor: self.at, path: self.path, owner, mode })
    }

    fn into_file(mut self) -> Result<TrustedFile, Untrusted> {
        self.expect(FileType::RegularFile, "regular file")?;
        let (Some(parent), Some(name)) = (self.parent.take(), self.path.file_name()) else {
            return Err(Untrusted::Kind { path: self.path, wanted: "regular file" });
        };
        let flags =
            OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let failed = |error| Untrusted::io(&self.path, error);
        let file = openat(&parent, name, flags, Mode::empty()).map_err(failed)?;
        // Check the descriptor that will be read.
        self.about = fstat(&file).map_err(failed)?;
        self.judge()?;
        self.expect(FileType::RegularFile, "regular file")?;
        let (owner, is_in_shared_directory) = (self.about.st_uid, self.is_in_shared);
        Ok(TrustedFile { file: file.into(), path: self.path, owner, is_in_shared_directory })
    }
}

fn root() -> Result<(OwnedFd, Stat), Untrusted> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let opened =
        open("/", flags, Mode::empty()).and_then(|root| fstat(&root).map(|about| (root, about)));
    opened.map_err(|error| Untrusted::io(Path::new("/"), error))
}

/// Returns the components of a path, without `/`, `.` and doubled slashes.
fn names(path: &OsStr) -> Vec<OsString> {
    let name = |component: Component<'_>| match component {
        Component::Normal(name) => Some(name.to_owned()),
        Component::ParentDir => Some("..".into()),
        Component::RootDir | Component::CurDir | Component::Prefix(_) => None,
    };
    Path::new(path).components().filter_map(name).collect()
}

#[cfg(test)]
mod tests;
