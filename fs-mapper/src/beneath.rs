//! Access to names on a mount through descriptors, from the mount's root down.
//!
//! A server reports which names of its mount have changed. At any time it can replace a directory
//! with a symlink, or make a call block. A path that was found on the mount may lead off it a
//! moment later. So each call walks from the root's descriptor with openat2(2), follows no symlink,
//! crosses no mount, and acts on the descriptor that it reaches; any other path is an error. This
//! module does not decide which server may report changes of which mount.

use rustix::fs::{
    AtFlags, CWD, Dir, Mode, OFlags, ResolveFlags, StatxFlags, Uid, chownat, linkat, openat2,
    readlinkat, statx, unlinkat,
};
use rustix::io::Errno;
use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::fs::{File, Metadata};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::{Path, PathBuf};

const NO_LINKS: ResolveFlags = ResolveFlags::NO_SYMLINKS.union(ResolveFlags::NO_MAGICLINKS);
const BENEATH: ResolveFlags = NO_LINKS.union(ResolveFlags::BENEATH).union(ResolveFlags::NO_XDEV);
/// O_PATH: the server sees no open, and FIFOs and devices do not notice.
const HANDLE: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
const DIRECTORY: OFlags = HANDLE.union(OFlags::DIRECTORY);

/// Kind of a directory entry.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum EntryKind {
    /// Neither a directory nor a symlink.
    File,
    /// A directory.
    Directory,
    /// A symlink and its target; the target is empty if the mount does not show it.
    Link(PathBuf),
}

/// Groups of directories (workstation's paths) as their server told them after a run; numbers as
/// the server has them.
pub type DirectoryOwners = HashMap<PathBuf, u32>;

/// Root of a mount. Paths are the workstation's; a symlink as last component is not followed.
#[derive(Debug)]
pub struct MountRoot {
    handle: OwnedFd,
    path: PathBuf,
    owners: DirectoryOwners,
}

impl MountRoot {
    pub(crate) fn at(path: &Path) -> io::Result<Self> {
        let handle = openat2(CWD, path, DIRECTORY, Mode::empty(), NO_LINKS)?;
        Ok(Self { handle, path: path.to_owned(), owners: DirectoryOwners::new() })
    }

    /// With what the server told of its directories' owners.
    #[must_use]
    pub fn with_owners(self, owners: DirectoryOwners) -> Self {
        Self { owners, ..self }
    }

    /// Mount ID of the opened root (statx(2), `STATX_MNT_ID`).
    pub(crate) fn mount_id(&self) -> io::Result<u64> {
        let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
        Ok(statx(&self.handle, "", flags, StatxFlags::MNT_ID)?.stx_mnt_id)
    }

    /// Attributes as of lstat(2).
    pub fn metadata(&self, path: &Path) -> io::Result<Metadata> {
        self.handle(path, HANDLE)?.metadata()
    }

    /// Like [`Self::metadata`], but from the file system, not the kernel's cache.
    pub fn fresh_metadata(&self, path: &Path) -> io::Result<Metadata> {
        let handle = self.handle(path, HANDLE)?;
        look_at(&handle)?;
        handle.metadata()
    }

    /// Entry kind as this machine sees it.
    pub fn kind(&self, path: &Path) -> io::Result<EntryKind> {
        let handle = self.handle(path, HANDLE)?;
        let kind = handle.metadata()?.file_type();
        Ok(match (kind.is_symlink(), kind.is_dir()) {
            (true, _) => {
                let target = readlinkat(&handle, "", Vec::new()).unwrap_or_default();
                EntryKind::Link(OsString::from_vec(target.into_bytes()).into())
            }
            (_, true) => EntryKind::Directory,
            _ => EntryKind::File,
        })
    }

    /// Opens a file or directory without blocking, creating or changing anything. Returns `None` if
    /// it does not exist or has no cached content (a symlink, a socket).
    pub(crate) fn open_itself(&self, path: &Path) -> io::Result<Option<File>> {
        let flags = OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let opened = match self.open_with(path, flags | OFlags::RDONLY) {
            // A file that may be written but not read.
            Err(Errno::ACCESS) => self.open_with(path, flags | OFlags::WRONLY),
            other => other,
        };
        match opened {
            Ok(file) => Ok(Some(file)),
            Err(Errno::NOENT | Errno::NOTDIR | Errno::NXIO | Errno::LOOP) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Makes the kernel fetch a name's attributes from the file system. A missing name is no error.
    pub(crate) fn look_at(&self, path: &Path) -> io::Result<()> {
        match self.open_with(path, HANDLE) {
            Ok(handle) => look_at(&handle),
            Err(Errno::NOENT) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Like `look_at`, but for the names in a directory, at most `most` of them.
    pub(crate) fn look_at_entries(&self, dir: &Path, most: usize) -> io::Result<()> {
        let listed = self.handle(dir, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC)?;
        for name in names(&listed)?.take(most) {
            match openat2(&listed, name?, HANDLE, Mode::empty(), BENEATH) {
                Ok(handle) => look_at(&handle)?,
                // The name was removed meanwhile, or another mount covers it.
                Err(Errno::NOENT | Errno::XDEV) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Names in a directory, without `.` and `..`.
    pub(crate) fn list(
        &self,
        dir: &Path,
    ) -> io::Result<impl Iterator<Item = io::Result<OsString>>> {
        names(&self.handle(dir, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC)?)
    }

    /// Sets a directory's owner to the one that it has, which the server told: the smallest change
    /// of attributes. The owner that the mount shows may be an old one, so without a told one this
    /// is EACCES, as for a directory of another user.
    ///
    /// Invariant: nobody gets or loses anything that way, whatever the server has at that path by
    /// then. Its kernel lets a login without privileges set itself only where it is the owner
    /// (chown(2)); for one with privileges, root or the run's own user is told, and nobody else can
    /// put another directory there (`dispatch::listings` of the gateway).
    pub(crate) fn set_same_owner(&self, dir: &Path) -> io::Result<()> {
        let opened = self.handle(dir, DIRECTORY)?;
        let owner = self.owners.get(dir).ok_or(Errno::ACCESS)?;
        Ok(chownat(&opened, "", Some(Uid::from_raw(*owner)), None, AtFlags::EMPTY_PATH)?)
    }

    /// Returns true if the name is free, after a fresh lookup by the kernel: link(2) needs a free
    /// name and reports EEXIST before EXDEV. It can never create anything (EXDEV).
    pub(crate) fn is_free(&self, path: &Path) -> io::Result<bool> {
        let (parent, name) = match self.parent(path) {
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
                ) =>
            {
                return Ok(true);
            }
            found => found?,
        };
        Ok(linkat(CWD, "/", &parent, name, AtFlags::empty()) != Err(Errno::EXIST))
    }

    /// Removes an empty directory.
    pub fn remove_directory(&self, path: &Path) -> io::Result<()> {
        let (parent, name) = self.parent(path)?;
        Ok(unlinkat(&parent, name, AtFlags::REMOVEDIR)?)
    }

    /// Removes a name that is not a directory.
    pub fn remove_file(&self, path: &Path) -> io::Result<()> {
        let (parent, name) = self.parent(path)?;
        Ok(unlinkat(&parent, name, AtFlags::empty())?)
    }

    /// Opens a directory, for names below it.
    pub(crate) fn directory(&self, path: &Path) -> io::Result<File> {
        self.handle(path, DIRECTORY)
    }

    fn handle(&self, path: &Path, flags: OFlags) -> io::Result<File> {
        Ok(self.open_with(path, flags)?)
    }

    fn open_with(&self, path: &Path, flags: OFlags) -> Result<File, Errno> {
        let below = path.strip_prefix(&self.path).map_err(|_| Errno::XDEV)?;
        let below = if below.as_os_str().is_empty() { Path::new(".") } else { below };
        openat2(&self.handle, below, flags, Mode::empty(), BENEATH).map(File::from)
    }

    /// Parent directory and last component of a path.
    fn parent<'p>(&self, path: &'p Path) -> io::Result<(File, &'p OsStr)> {
        let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
            return Err(Errno::INVAL.into());
        };
        Ok((self.handle(parent, DIRECTORY)?, name))
    }
}

/// Makes the kernel fetch attributes from the file system even if it has them cached (statx(2),
/// AT_STATX_FORCE_SYNC). Its caches take the new values.
pub(crate) fn look_at(file: impl AsFd) -> io::Result<()> {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_FORCE_SYNC;
    statx(file, "", flags, StatxFlags::BASIC_STATS)?;
    Ok(())
}

fn names(dir: &File) -> io::Result<impl Iterator<Item = io::Result<OsString>> + use<>> {
    let name = |entry: Result<rustix::fs::DirEntry, Errno>| match entry {
        Ok(entry) => match entry.file_name().to_bytes() {
            b"." | b".." => None,
            name => Some(Ok(OsStr::from_bytes(name).to_owned())),
        },
        Err(error) => Some(Err(error.into())),
    };
    Ok(Dir::read_from(dir)?.filter_map(name))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};

    /// `mnt/top` is a link to `home`, which has a file, a link and an empty directory.
    fn exchanged() -> (tempfile::TempDir, MountRoot, PathBuf) {
        let base = tempfile::tempdir().expect("a directory");
        let (mount, home) = (base.path().join("mnt"), base.path().join("home"));
        fs::create_dir(&mount).expect("made");
        fs::create_dir_all(home.join("empty")).expect("made");
        fs::write(home.join("file"), "x").expect("written");
        symlink("file", home.join("link")).expect("made");
        symlink(&home, mount.join("top")).expect("made");
        fs::create_dir_all(mount.join("in/sub")).expect("made");
        symlink("in", mount.join("within")).expect("made");
        let root = MountRoot::at(&mount).expect("opened");
        (base, root, mount)
    }

    #[test]
    fn nothing_is_reached_through_a_link() {
        let (base, root, mount) = exchanged();
        let top = mount.join("top");
        assert!(root.remove_file(&top.join("file")).is_err());
        assert!(root.remove_file(&top.join("link")).is_err());
        assert!(root.remove_directory(&top.join("empty")).is_err());
        assert!(root.metadata(&top.join("file")).is_err());
        assert!(root.open_itself(&top.join("file")).expect("no error").is_none());
        assert!(root.look_at(&top.join("file")).is_err());
        assert!(root.list(&top).is_err() && root.look_at_entries(&top, 9).is_err());
        assert!(root.is_free(&top.join("file")).expect("the parent is no directory"));
        assert!(
            root.metadata(&mount.join("in/sub")).is_ok()
                && root.metadata(&mount.join("within/sub")).is_err()
        );
        assert!(root.metadata(&mount.join("../home/file")).is_err());
        assert_eq!(root.kind(&top).expect("a link"), EntryKind::Link(base.path().join("home")));
        assert_eq!(fs::read_dir(base.path().join("home")).expect("listed").count(), 3);
        root.remove_file(&top).expect("the link itself");
    }

    #[test]
    fn attributes_are_set_of_directories_of_the_mount_alone() {
        let (base, root, mount) = exchanged();
        let program = base.path().join("home/file");
        fs::set_permissions(&program, fs::Permissions::from_mode(0o4755)).expect("set");
        symlink(&program, mount.join("program")).expect("made");
        fs::hard_link(&program, mount.join("other")).expect("made");
        let owner = fs::metadata(&mount).expect("there").uid();
        let told = ["program", "other", "top", ""].map(|name| (mount.join(name), owner));
        let root = root.with_owners(told.into_iter().collect());
        for name in ["program", "other", "top"] {
            assert!(root.set_same_owner(&mount.join(name)).is_err(), "{name}");
        }
        assert_eq!(fs::metadata(&program).expect("there").permissions().mode() & 0o7777, 0o4755);
        root.set_same_owner(&mount).expect("a directory");
    }

    /// The one told may be set only where this user may set it at all.
    #[test]
    fn the_told_owner_is_set_and_never_the_shown_one() {
        let dir = tempfile::tempdir().expect("made");
        let own = fs::metadata(dir.path()).expect("there").uid();
        let other = own + 7;
        let root = MountRoot::at(dir.path()).expect("opened");
        let untold = root.set_same_owner(dir.path()).expect_err("not told");
        assert_eq!(untold.kind(), io::ErrorKind::PermissionDenied);
        let root = root.with_owners([(dir.path().to_owned(), other)].into());
        let expected = root.set_same_owner(dir.path()).map_or(own, |()| other);
        assert_eq!(fs::metadata(dir.path()).expect("there").uid(), expected);
    }

    #[test]
    fn nothing_is_reached_on_another_mount() {
        let root = MountRoot::at(Path::new("/")).expect("opened");
        for path in ["/proc", "/proc/version"] {
            let error = root.metadata(Path::new(path)).expect_err("another mount");
            assert_eq!(error.raw_os_error(), Some(Errno::XDEV.raw_os_error()), "{path}");
        }
        assert!(root.metadata(Path::new("/")).expect("itself").is_dir());
    }

    #[test]
    fn only_the_mount_that_the_table_knows_is_acted_on() {
        let info = crate::mountinfo::MountInfo::read().expect("readable");
        let config = crate::config::Config::default();
        let table = crate::MountTable::new(&config, &info);
        let proc = table.mounts.iter().find(|mount| mount.path.as_path() == Path::new("/proc"));
        let mut proc = proc.expect("it is mounted").clone();
        proc.open_root().expect("the very mount");
        proc.files_mount_id = proc.files_mount_id.map(|id| id + 1);
        assert!(proc.open_root().is_err());
    }
}
