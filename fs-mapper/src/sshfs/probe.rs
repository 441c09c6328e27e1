//! A directory made through a mount, by which it is found out what the mount's server makes of new
//! files, and that it allows changes of each kind.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::path::Path;

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

impl ProbeDirectory {
    /// Makes a directory below one of a mount, and in it a file, which it changes and renames.
    /// Blocks, and changes the umask of its thread, which must end after it.
    ///
    /// # Errors
    /// As the mount answers; EEXIST if there is something of that name.
    pub fn make(root: &MountRoot, above: &Path, name: &OsStr) -> io::Result<Self> {
        // Threads of a process have one umask; this one shall have its own.
        unshare(CloneFlags::CLONE_FS)?;
        umask(Mode::empty());
        let above = root.directory(above)?;
        mkdirat(&above, name, Mode::from_raw_mode(ALL))?;
        let found = statat(&above, name, AtFlags::SYMLINK_NOFOLLOW);
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let within = openat(&above, name, flags, Mode::empty());
        let mut made = Self { above: Some(above), name: name.to_owned(), cleared: 0 };
        made.cleared = ALL & !found?.st_mode;
        let within = within?;
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        drop(openat(&within, FIRST, flags, Mode::RUSR | Mode::WUSR)?);
        chmodat(&within, FIRST, Mode::RUSR, AtFlags::empty())?;
        renameat(&within, FIRST, &within, SECOND)?;
        Ok(made)
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
        self.take_away()
    }

    fn take_away(&mut self) -> io::Result<()> {
        let Some(above) = self.above.take() else { return Ok(()) };
        let within = Path::new(&self.name);
        for file in [FIRST, SECOND] {
            // One of the two is not there.
            let _ = unlinkat(&above, within.join(file), AtFlags::empty());
        }
        Ok(unlinkat(above, within, AtFlags::REMOVEDIR)?)
    }
}

impl Drop for ProbeDirectory {
    fn drop(&mut self) {
        // The caller of `remove` has its error; who has given it up can do no more.
        let _ = self.take_away();
    }
}
