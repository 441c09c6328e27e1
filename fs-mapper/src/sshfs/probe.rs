//! A file made through a mount, by which it is found out how the mount's server makes files.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::path::Path;

use nix::sched::{CloneFlags, unshare};
use rustix::fs::{AtFlags, Mode, OFlags, openat, statat, unlinkat};
use rustix::process::umask;

use crate::beneath::MountRoot;

/// Permissions that are asked for: all.
const ALL: u32 = 0o777;

/// An empty file on a mount. It is removed when dropped, too.
#[derive(Debug)]
pub struct ProbeFile {
    /// `None` once removed.
    directory: Option<File>,
    name: OsString,
    cleared: u32,
}

impl ProbeFile {
    /// Makes a file in a directory of a mount. Blocks, and changes the umask of its thread, which
    /// must end after it.
    ///
    /// # Errors
    /// As the mount answers; EEXIST if there is a file of that name.
    pub fn make(root: &MountRoot, directory: &Path, name: &OsStr) -> io::Result<Self> {
        // Threads of a process have one umask; this one shall have its own.
        unshare(CloneFlags::CLONE_FS)?;
        umask(Mode::empty());
        let directory = root.directory(directory)?;
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        drop(openat(&directory, name, flags, Mode::from_raw_mode(ALL))?);
        let found = statat(&directory, name, AtFlags::SYMLINK_NOFOLLOW);
        let mut made = Self { directory: Some(directory), name: name.to_owned(), cleared: 0 };
        made.cleared = ALL & !found?.st_mode;
        Ok(made)
    }

    /// Permissions that the server has cleared.
    pub fn cleared(&self) -> u32 {
        self.cleared
    }

    /// Removes the file. Blocks.
    ///
    /// # Errors
    /// As the mount answers.
    pub fn remove(mut self) -> io::Result<()> {
        self.take_away()
    }

    fn take_away(&mut self) -> io::Result<()> {
        let Some(directory) = self.directory.take() else { return Ok(()) };
        Ok(unlinkat(directory, &self.name, AtFlags::empty())?)
    }
}

impl Drop for ProbeFile {
    fn drop(&mut self) {
        // The caller of `remove` has its error; who has given it up can do no more.
        let _ = self.take_away();
    }
}
