//! A directory made through a mount, by which it is found out what the mount's server makes of new
//! files, and that it allows changes of each kind.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::path::Path;
use std::thread;

use nix::sched::{CloneFlags, unshare};
use rustix::fs::{AtFlags, Mode, OFlags, chmodat, mkdirat, openat, renameat, statat, unlinkat};
use rustix::process::umask;

use crate::beneath::MountRoot;

/// Permissions that are asked for: all.
const ALL: u32 = 0o777;
/// First and second name of the file in it.
const FIRST: &str = "new";
const SECOND: &str = "renamed";

/// A directory on a mount, with one empty file.
#[derive(Debug)]
pub struct ProbeDirectory {
    /// `None` once it is removed.
    above: Option<File>,
    name: OsString,
    cleared: u32,
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
        let mut made = Self::make_directory(root, above, name).map_err(ProbeError::NotMade)?;
        match made.make_file() {
            Ok(cleared) => {
                made.cleared = cleared;
                Ok(made)
            }
            Err(error) => match made.remove() {
                Ok(()) => Err(ProbeError::NotMade(error)),
                Err(error) => Err(ProbeError::NotRemoved(error)),
            },
        }
    }

    fn make_directory(root: &MountRoot, above: &Path, name: &OsStr) -> io::Result<Self> {
        // Threads of a process have one umask; this one shall have its own.
        unshare(CloneFlags::CLONE_FS)?;
        umask(Mode::empty());
        let above = root.directory(above)?;
        mkdirat(&above, name, Mode::from_raw_mode(ALL))?;
        Ok(Self { above: Some(above), name: name.to_owned(), cleared: 0 })
    }

    /// Returns the permissions that the server has cleared of the directory's.
    fn make_file(&self) -> io::Result<u32> {
        let Some(above) = &self.above else { return Err(io::ErrorKind::NotFound.into()) };
        let found = statat(above, &self.name, AtFlags::SYMLINK_NOFOLLOW)?;
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let within = openat(above, &self.name, flags, Mode::empty())?;
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        drop(openat(&within, FIRST, flags, Mode::RUSR | Mode::WUSR)?);
        chmodat(&within, FIRST, Mode::RUSR, AtFlags::empty())?;
        renameat(&within, FIRST, &within, SECOND)?;
        Ok(ALL & !found.st_mode)
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
        self.above.take().map_or(Ok(()), |above| take_away(&above, &self.name))
    }
}

fn take_away(above: &File, name: &OsStr) -> io::Result<()> {
    for file in [FIRST, SECOND] {
        // One of the two is not there.
        let _ = unlinkat(above, Path::new(name).join(file), AtFlags::empty());
    }
    Ok(unlinkat(above, name, AtFlags::REMOVEDIR)?)
}

impl Drop for ProbeDirectory {
    /// For a caller that has given it up, who may be a task: the mount may hang.
    fn drop(&mut self) {
        let Some(above) = self.above.take() else { return };
        let name = std::mem::take(&mut self.name);
        let _ = thread::Builder::new().spawn(move || take_away(&above, &name));
    }
}
