//! The two system calls that adapters are made of: an open that disturbs
//! nothing, and attributes that come from the server. By path: for what the workstation's own
//! commands name. Names that a server tells of are reached by [`crate::beneath`].

use rustix::fs::{AtFlags, Mode, OFlags, StatxFlags};
use rustix::io::Errno;
use std::fs::File;
use std::io;
use std::path::Path;

/// Opens a file or directory without waiting, creating or changing anything.
/// `None` if it is not there, or is nothing that has cached content (a socket).
pub(super) fn open(path: &Path) -> io::Result<Option<File>> {
    let flags = OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let opened = rustix::fs::open(path, flags | OFlags::RDONLY, Mode::empty());
    let opened = match opened {
        // A file that may be written but not read.
        Err(Errno::ACCESS) => rustix::fs::open(path, flags | OFlags::WRONLY, Mode::empty()),
        other => other,
    };
    match opened {
        Ok(fd) => Ok(Some(File::from(fd))),
        Err(Errno::NOENT | Errno::NOTDIR | Errno::NXIO | Errno::LOOP) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Has the kernel ask the file system for a name's attributes now. Its own symlink is not followed;
/// one that has gone is no error.
pub(super) fn attributes_at(path: &Path) -> io::Result<()> {
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::STATX_FORCE_SYNC;
    match rustix::fs::statx(rustix::fs::CWD, path, flags, StatxFlags::BASIC_STATS) {
        Ok(_) | Err(Errno::NOENT) => Ok(()),
        Err(error) => Err(error.into()),
    }
}
