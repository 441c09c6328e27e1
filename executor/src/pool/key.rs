//! Keys of views: a hash of everything that a view is made of.
//!
//! Invariant: a view is kept under a key only if its exports' directories are those of the key, and
//! nothing was mounted, unmounted or remounted between the making of the key and that of the view.
//! A view has copies of the server's mounts: it does not show later ones, keeps those that are
//! unmounted, and a mount that becomes read-only stays writable in it. So what is mounted around
//! and below the exports and the programs is part of the key, with all options, and so is what a
//! view takes of the server's own tree, and the directories that it makes anew (`runner::system`).

use std::{
    io,
    os::unix::ffi::{OsStrExt as _, OsStringExt as _},
    path::{Path, PathBuf},
};

use fs_mapper::mountinfo::{MountEntry, MountSnapshot};
use nix::{libc, sys::stat::lstat};
use posh_volume::directory::RootIdentity;
use prost::Message as _;
use sha2::{Digest as _, Sha256};

use super::spawn_failed;
use crate::{
    error::Refusal,
    hidden,
    runner::{
        Hidden, is_shown, open_below, open_root, path_of, taken,
        wire::{DirectoryId, ViewSpec},
    },
};

/// The directories and mounts that went into a key.
pub struct MadeOf {
    /// Taken before the key was made.
    mounts: MountSnapshot,
    directories: Vec<DirectoryId>,
    /// The exports' own directories, in which those were found.
    pub roots: Vec<ExportRoot>,
}

/// An export's directory when a run began.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExportRoot {
    /// The export's path.
    pub path: PathBuf,
    /// The directory that was there.
    pub identity: RootIdentity,
}

impl MadeOf {
    /// Returns true if a view just made of these directories is the one that the key stands for.
    pub fn is_still(&self, directories: &[DirectoryId]) -> bool {
        // Without a mount namespace there is only one view.
        directories.is_empty() || (directories == self.directories && !self.mounts.has_changed())
    }
}

/// Hash of the view's description and of what it is made of on the server.
pub fn key_of(spec: &ViewSpec, holder: Option<&str>) -> Result<(Vec<u8>, MadeOf), Refusal> {
    let (mounts, info) =
        MountSnapshot::take().map_err(|error| spawn_failed(&io::Error::other(error)))?;
    let visible = info.visible();
    let mut key = KeyHash(Sha256::new());
    // Hashed, since a view's description is as large as the files that the workstation shows in it,
    // and a key only has to differ.
    key.bytes(&spec.encode_to_vec());
    // Each identity has views of its own, so that their shares are clear.
    key.bytes(holder.unwrap_or_default().as_bytes());
    let mut directories = Vec::with_capacity(spec.mounts.len());
    let mut roots = Vec::with_capacity(spec.mounts.len());
    for mount in &spec.mounts {
        let root = open_root(mount)?;
        let identity = RootIdentity::of(&root).map_err(|error| spawn_failed(&error))?;
        roots.push(ExportRoot { path: path_of(&mount.directory).to_owned(), identity });
        let directory = open_below(root, mount, spec.user.as_ref())?;
        let id = DirectoryId::of(&directory).map_err(|errno| spawn_failed(&errno.into()))?;
        key.numbers([id.device, id.inode]);
        directories.push(id);
    }
    let exports: Vec<&Path> = spec.mounts.iter().map(|mount| path_of(&mount.directory)).collect();
    let concerns = |mount: &&&MountEntry| {
        let point = &mount.mount_point;
        is_shown(point)
            || exports.iter().any(|path| path.starts_with(point) || point.starts_with(path))
    };
    visible.iter().filter(concerns).for_each(|mount| key.mount(mount));
    let hidden = spec.hidden.iter().map(|path| path_of(path));
    let hidden = Hidden::of(hidden::shown_among(hidden, &visible));
    hidden.made_anew().for_each(|path| key.file(path, Contents::Copied));
    taken().for_each(|(path, _)| key.file(&path, Contents::Shown));
    Ok((key.0.finalize().to_vec(), MadeOf { mounts, directories, roots }))
}

/// How a view has the contents of a file or directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Contents {
    /// It shows later changes.
    Shown,
    Copied,
}

/// The hash, whose parts can be told apart.
struct KeyHash(Sha256);

impl KeyHash {
    fn bytes(&mut self, bytes: &[u8]) {
        self.0.update(bytes.len().to_le_bytes());
        self.0.update(bytes);
    }

    fn numbers<const COUNT: usize>(&mut self, numbers: [u64; COUNT]) {
        numbers.iter().for_each(|number| self.0.update(number.to_le_bytes()));
    }

    /// The id of a mount that is gone may be reused, but not together with its device, as long as a
    /// view has that mount.
    fn mount(&mut self, mount: &MountEntry) {
        let MountEntry { mount_id, device: (major, minor), root, mount_point, options, .. } = mount;
        self.numbers([*mount_id, *major, *minor].map(u64::from));
        self.bytes(root.as_os_str().as_bytes());
        self.bytes(mount_point.as_os_str().as_bytes());
        self.bytes(options.as_bytes());
    }

    /// The file at a path now, or none.
    fn file(&mut self, path: &Path, contents: Contents) {
        match lstat(path) {
            Ok(found) => {
                self.numbers([found.st_dev, found.st_ino]);
                // A view has copies of links.
                if found.st_mode & libc::S_IFMT == libc::S_IFLNK {
                    self.bytes(
                        &std::fs::read_link(path).map_or_else(
                            |_| Vec::new(),
                            |target| target.into_os_string().into_vec(),
                        ),
                    );
                }
                if contents == Contents::Copied {
                    self.numbers([found.st_ctime, found.st_ctime_nsec].map(i64::cast_unsigned));
                }
            }
            Err(errno) => self.numbers([0, (errno as i32).unsigned_abs().into()]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::mount::MsFlags;

    #[test]
    fn a_view_of_other_directories_is_not_what_its_key_says() {
        let id = |inode| DirectoryId { device: 1, inode };
        let made_of = || MadeOf {
            mounts: MountSnapshot::take().unwrap().0,
            directories: vec![id(1), id(2)],
            roots: Vec::new(),
        };
        assert!(!made_of().is_still(&[id(1), id(3)]) && !made_of().is_still(&[id(2), id(1)]));
        // Another test may mount something just now, but not always.
        assert!((0..1000).any(|_| made_of().is_still(&[id(1), id(2)])));
    }

    /// Gives this thread a mount namespace of its own.
    fn take_own_mounts() {
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNS).unwrap();
        mount_at("/", None, MsFlags::MS_REC | MsFlags::MS_PRIVATE);
    }

    fn mount_at(at: impl AsRef<Path>, kind: Option<&str>, flags: MsFlags) {
        nix::mount::mount(kind, at.as_ref(), kind, flags, None::<&str>).unwrap();
    }

    #[test]
    fn a_view_made_while_something_was_mounted_is_not_what_its_key_says() {
        let in_private = || {
            take_own_mounts();
            let place = tempfile::tempdir().unwrap();
            let made_of = || MadeOf {
                mounts: MountSnapshot::take().unwrap().0,
                directories: vec![DirectoryId::default()],
                roots: Vec::new(),
            };
            let directories = [DirectoryId::default()];
            let before = made_of();
            let is_still = before.is_still(&directories);
            let since = made_of();
            mount_at(place.path(), Some("tmpfs"), MsFlags::empty());
            nix::mount::umount(place.path()).unwrap();
            (is_still, since.is_still(&directories))
        };
        assert_eq!(std::thread::spawn(in_private).join().unwrap(), (true, false));
    }

    #[test]
    fn a_replaced_file_of_etc_makes_another_key() {
        let in_private = || {
            take_own_mounts();
            mount_at("/etc", Some("tmpfs"), MsFlags::empty());
            std::fs::write("/etc/passwd", "ada").unwrap();
            let key = || key_of(&ViewSpec::default(), None).unwrap().0;
            let before = key();
            assert_eq!(key(), before);
            std::fs::write("/etc/new", "ada and bob").unwrap();
            std::fs::rename("/etc/new", "/etc/passwd").unwrap();
            let after = key();
            std::os::unix::fs::symlink("one", "/etc/mtab").unwrap();
            let with_link = key();
            std::fs::remove_file("/etc/mtab").unwrap();
            std::os::unix::fs::symlink("other", "/etc/mtab").unwrap();
            after != before && with_link != after && key() != with_link
        };
        assert!(std::thread::spawn(in_private).join().unwrap());
    }
}
