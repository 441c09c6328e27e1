//! Files made through a mount, by which it is found out what the mount's server makes of new files,
//! and which directory it changes.
//!
//! Invariant: each request names an entry of the directory itself, and none that a server carries
//! out through a symbolic link: files are made where nothing is (O_EXCL), renamed, and removed.
//! Whoever may change the directory on the server may put something else in their place, and so
//! loses no more than what they have put there. In particular nothing is changed by its name (the
//! requests of SFTP for permissions and times follow links), and nothing below an entry.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Write as _};
use std::path::Path;
use std::thread;

use nix::sched::{CloneFlags, unshare};
use rustix::fs::{AtFlags, Mode, OFlags, fstat, ftruncate, mkdirat, openat, renameat, unlinkat};
use rustix::io::Errno;
use rustix::process::umask;

use crate::beneath::MountRoot;

/// Permissions of the first file that are asked for: all.
const ALL: u32 = 0o777;
/// How files are made.
const NEW: OFlags = OFlags::WRONLY.union(OFlags::CREATE).union(OFlags::EXCL).union(OFlags::CLOEXEC);

/// A file on a mount that only its owner can read.
#[derive(Debug)]
pub struct ProbeFile {
    /// Its directory; `None` once it is removed.
    above: Option<File>,
    name: OsString,
    cleared: u32,
}

/// Reason for which a mount does not allow all kinds of changes.
#[derive(Debug, thiserror::Error)]
pub enum ProbeError {
    /// Something can't be made, renamed or removed; nothing is left.
    #[error("{0}")]
    NotMade(io::Error),
    /// Something that was made can't be removed.
    #[error("{0}")]
    NotRemoved(io::Error),
}

impl ProbeFile {
    /// Tries each kind of change in a directory of a mount, and makes a file there that holds
    /// `content`. Blocks, and changes the umask of its thread, which must end after it.
    ///
    /// # Errors
    /// As the mount answers; EEXIST if there is something of that name.
    pub fn make(
        root: &MountRoot,
        above: &Path,
        name: &OsStr,
        content: &[u8],
    ) -> Result<Self, ProbeError> {
        // Threads of a process have one umask; this one shall have its own.
        let opened = unshare(CloneFlags::CLONE_FS).map_err(io::Error::from);
        let above = opened.and_then(|()| {
            umask(Mode::empty());
            root.directory(above)
        });
        let above = above.map_err(ProbeError::NotMade)?;
        let cleared = try_changes(&above, name)?;
        let made = Self { above: Some(above), name: name.to_owned(), cleared };
        match made.write(content) {
            Ok(()) => Ok(made),
            Err(error) => {
                made.remove()?;
                Err(ProbeError::NotMade(error))
            }
        }
    }

    fn write(&self, content: &[u8]) -> io::Result<()> {
        let Some(above) = &self.above else { return Err(io::ErrorKind::NotFound.into()) };
        let mut file = File::from(openat(above, &self.name, NEW, Mode::RUSR | Mode::WUSR)?);
        // An error that comes only when it is closed shows in its content.
        file.write_all(content)
    }

    /// Permissions that the server clears of new files.
    pub fn cleared(&self) -> u32 {
        self.cleared
    }

    /// Removes it. Blocks.
    ///
    /// # Errors
    /// [`ProbeError::NotRemoved`].
    pub fn remove(mut self) -> Result<(), ProbeError> {
        let Some(above) = self.above.take() else { return Ok(()) };
        take_away(&above, &self.name, AtFlags::empty())
    }
}

impl Drop for ProbeFile {
    /// For a caller that has given it up, who may be a task: the mount may hang.
    fn drop(&mut self) {
        let Some(above) = self.above.take() else { return };
        let name = std::mem::take(&mut self.name);
        let _ = thread::Builder::new().spawn(move || take_away(&above, &name, AtFlags::empty()));
    }
}

/// Removes an entry. Where it is gone, somebody else has moved it.
fn take_away(above: &File, name: &OsStr, flags: AtFlags) -> Result<(), ProbeError> {
    match unlinkat(above, name, flags) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(error) => Err(ProbeError::NotRemoved(error.into())),
    }
}

/// Makes, changes, renames and removes an empty file, and makes and removes a directory. Returns
/// the permissions that the server has cleared.
fn try_changes(above: &File, name: &OsStr) -> Result<u32, ProbeError> {
    let with = |suffix: &str| {
        let mut whole = name.to_owned();
        whole.push(suffix);
        whole
    };
    let (first, second, directory) = (with("-new"), with("-renamed"), with("-directory"));
    let not_made = |error: Errno| ProbeError::NotMade(error.into());
    let file = openat(above, &first, NEW, Mode::from_raw_mode(ALL)).map_err(not_made)?;
    let given = fstat(&file);
    // sshfs names an open file by its handle when its size is set, and by its path else.
    let changed = ftruncate(&file, 0);
    drop(file);
    let renamed = renameat(above, &first, above, &second);
    let left = if renamed.is_ok() { &second } else { &first };
    take_away(above, left, AtFlags::empty())?;
    changed.and(renamed).map_err(not_made)?;
    mkdirat(above, &directory, Mode::RWXU).map_err(not_made)?;
    take_away(above, &directory, AtFlags::REMOVEDIR)?;
    Ok(ALL & !given.map_err(not_made)?.st_mode)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{MetadataExt as _, symlink};

    use super::*;

    /// In a thread of its own, whose umask it changes.
    fn probe_in(directory: &Path) -> Result<ProbeFile, ProbeError> {
        let directory = directory.to_owned();
        let making = thread::spawn(move || {
            let root = MountRoot::at(&directory).expect("opened");
            ProbeFile::make(&root, &directory, OsStr::new("probe"), b"secret")
        });
        making.join().expect("no panic")
    }

    #[test]
    fn only_its_owner_reads_it_and_nothing_is_left() {
        let tree = tempfile::tempdir().expect("a directory");
        let probe = probe_in(tree.path()).expect("made");
        assert_eq!(fs::read_dir(tree.path()).expect("listed").count(), 1);
        let at = tree.path().join("probe");
        assert_eq!(fs::metadata(&at).expect("there").mode() & 0o7777, 0o600);
        assert_eq!(fs::read(&at).expect("read"), b"secret");
        assert_eq!(probe.cleared(), 0);
        probe.remove().expect("removed");
        assert_eq!(fs::read_dir(tree.path()).expect("listed").count(), 0);
    }

    /// Who may change the directory on the server puts a link in its place.
    #[test]
    fn a_link_in_its_place_is_removed_itself_and_nothing_is_made_through_one() {
        let (tree, own) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let theirs = own.path().join("theirs");
        fs::write(&theirs, "").unwrap();
        let at = tree.path().join("probe");
        let probe = probe_in(tree.path()).expect("made");
        fs::rename(&at, tree.path().join("hidden")).unwrap();
        symlink(&theirs, &at).unwrap();
        probe.remove().unwrap();
        assert!(theirs.exists() && !at.is_symlink());
        symlink(own.path().join("made"), &at).unwrap();
        assert!(matches!(probe_in(tree.path()), Err(ProbeError::NotMade(_))));
        assert!(!own.path().join("made").exists());
    }
}
