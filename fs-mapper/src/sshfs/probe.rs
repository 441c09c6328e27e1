//! A directory made through a mount, by which it is found out what the mount's server makes of new
//! files, and that it allows changes of each kind.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::thread;

use nix::sched::{CloneFlags, unshare};
use rustix::fs::{AtFlags, Mode, OFlags, fchmod, fstat, mkdirat, openat, renameat, unlinkat};
use rustix::process::umask;

use crate::beneath::MountRoot;

/// Permissions of the file that are asked for: all.
const ALL: u32 = 0o777;
/// First and second name of the file in it.
const FIRST: &str = "new";
const SECOND: &str = "renamed";

/// A directory on a mount, with one empty file. Nobody but its owner may put anything into it.
#[derive(Debug)]
pub struct ProbeDirectory {
    /// `None` once it is removed.
    made: Option<MadeDirectory>,
    cleared: u32,
}

/// A directory by its handle, and its name in another: a server may show a symbolic link in its
/// place at any time, and no link is followed.
#[derive(Debug)]
struct MadeDirectory {
    above: File,
    name: OsString,
    /// `None` if it could not be opened.
    itself: Option<OwnedFd>,
}

/// Reason for which a mount does not allow all kinds of changes.
#[derive(Debug, thiserror::Error)]
pub enum ProbeError {
    /// Something can't be made, changed or renamed; nothing is left.
    #[error("{0}")]
    NotMade(io::Error),
    /// The directory can't be removed.
    #[error("{0}")]
    NotRemoved(io::Error),
}

impl ProbeDirectory {
    /// Makes a directory below one of a mount, and in it a file, which it changes and renames.
    /// Blocks, and changes the umask of its thread, which must end after it.
    ///
    /// # Errors
    /// As the mount answers; EEXIST if there is something of that name.
    pub fn make(root: &MountRoot, above: &Path, name: &OsStr) -> Result<Self, ProbeError> {
        let made = Self::make_directory(root, above, name).map_err(ProbeError::NotMade)?;
        match made.make_file() {
            Ok(cleared) => Ok(Self { made: Some(made), cleared }),
            Err(error) => match made.take_away() {
                Ok(()) => Err(ProbeError::NotMade(error)),
                Err(error) => Err(ProbeError::NotRemoved(error)),
            },
        }
    }

    fn make_directory(root: &MountRoot, above: &Path, name: &OsStr) -> io::Result<MadeDirectory> {
        // Threads of a process have one umask; this one shall have its own.
        unshare(CloneFlags::CLONE_FS)?;
        umask(Mode::empty());
        let above = root.directory(above)?;
        mkdirat(&above, name, Mode::RWXU)?;
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let itself = openat(&above, name, flags, Mode::empty()).ok();
        Ok(MadeDirectory { above, name: name.to_owned(), itself })
    }

    /// Permissions that the server has cleared.
    pub fn cleared(&self) -> u32 {
        self.cleared
    }

    /// Removes it. Blocks.
    ///
    /// # Errors
    /// As the mount answers.
    pub fn remove(mut self) -> io::Result<()> {
        self.made.take().map_or(Ok(()), |made| made.take_away())
    }
}

impl MadeDirectory {
    /// Makes, changes and renames the file. Returns the permissions that the server has cleared.
    fn make_file(&self) -> io::Result<u32> {
        let Some(itself) = &self.itself else { return Err(io::ErrorKind::NotFound.into()) };
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let file = openat(itself, FIRST, flags, Mode::from_raw_mode(ALL))?;
        let given = fstat(&file)?.st_mode;
        fchmod(&file, Mode::RUSR)?;
        drop(file);
        renameat(itself, FIRST, itself, SECOND)?;
        Ok(ALL & !given)
    }

    fn take_away(&self) -> io::Result<()> {
        for file in [FIRST, SECOND] {
            // One of the two is not there.
            let _ = self.itself.as_ref().map(|itself| unlinkat(itself, file, AtFlags::empty()));
        }
        Ok(unlinkat(&self.above, &self.name, AtFlags::REMOVEDIR)?)
    }
}

impl Drop for ProbeDirectory {
    /// For a caller that has given it up, who may be a task: the mount may hang.
    fn drop(&mut self) {
        let Some(made) = self.made.take() else { return };
        let _ = thread::Builder::new().spawn(move || made.take_away());
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use super::*;

    /// In a thread of its own, whose umask it changes.
    fn probe_in(directory: &Path) -> ProbeDirectory {
        let directory = directory.to_owned();
        let making = thread::spawn(move || {
            let root = MountRoot::at(&directory).expect("opened");
            ProbeDirectory::make(&root, &directory, OsStr::new("probe")).expect("made")
        });
        making.join().expect("no panic")
    }

    #[test]
    fn nobody_else_may_put_anything_into_it_and_nothing_is_left() {
        let tree = tempfile::tempdir().expect("a directory");
        let probe = probe_in(tree.path());
        let mode = fs::metadata(tree.path().join("probe")).expect("there").permissions().mode();
        assert_eq!((mode & 0o7777, probe.cleared()), (0o700, 0));
        probe.remove().expect("removed");
        assert_eq!(fs::read_dir(tree.path()).expect("listed").count(), 0);
    }

    /// A server that lies shows a link to what is on the workstation.
    #[test]
    fn nothing_is_removed_through_a_link_that_is_shown_in_its_place() {
        let (tree, own) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        for name in [FIRST, SECOND] {
            fs::write(own.path().join(name), "").expect("written");
        }
        let probe = probe_in(tree.path());
        fs::rename(tree.path().join("probe"), tree.path().join("hidden")).expect("renamed");
        symlink(own.path(), tree.path().join("probe")).expect("linked");
        probe.remove().expect_err("a link is no directory");
        assert_eq!(fs::read_dir(own.path()).expect("listed").count(), 2);
    }
}
