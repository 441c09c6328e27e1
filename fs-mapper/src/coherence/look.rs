//! System calls shared by the adapters: an open without side effects, and attributes from the
//! server. They take paths from the workstation's own commands. For names that a server reports,
//! use [`crate::beneath`].

use rustix::fs::{AtFlags, FileType, Mode, OFlags, StatxFlags};
use rustix::io::Errno;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;
use std::path::Path;

/// Opens a file or directory without blocking, creating or changing anything. Returns `None` if it
/// does not exist or has no cached content: a symlink on a mount may lead to a FIFO, whose writer
/// would be unblocked, or to a device with side effects.
pub(super) fn open(path: &Path) -> io::Result<Option<File>> {
    let found = match rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()) {
        Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => return Ok(None),
        found => found?,
    };
    let kind = FileType::from_raw_mode(rustix::fs::fstat(&found)?.st_mode);
    if !matches!(kind, FileType::RegularFile | FileType::Directory) {
        return Ok(None);
    }
    let itself = format!("/proc/self/fd/{}", found.as_raw_fd());
    let open = |access| {
        rustix::fs::open(&itself, access | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty())
    };
    let opened = match open(OFlags::RDONLY) {
        // A file that may be written but not read.
        Err(Errno::ACCESS) => open(OFlags::WRONLY),
        other => other,
    };
    match opened {
        Ok(file) => Ok(Some(File::from(file))),
        // Cached by the mount, but removed on the server.
        Err(Errno::NOENT) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Makes the kernel fetch a name's attributes from the file system. Does not follow a symlink in
/// the last component. A missing name is no error.
pub(super) fn attributes_at(path: &Path) -> io::Result<()> {
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::STATX_FORCE_SYNC;
    match rustix::fs::statx(rustix::fs::CWD, path, flags, StatxFlags::BASIC_STATS) {
        Ok(_) | Err(Errno::NOENT) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{CWD, mknodat};
    use std::os::unix::fs::symlink;

    #[test]
    fn what_has_no_cached_content_is_not_opened() {
        let dir = tempfile::tempdir().expect("a directory");
        let (pipe, link, file) =
            (dir.path().join("pipe"), dir.path().join("link"), dir.path().join("file"));
        mknodat(CWD, &pipe, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).expect("made");
        symlink(&pipe, &link).expect("made");
        std::fs::write(&file, "x").expect("written");
        for path in [&pipe, &link, Path::new("/dev/null"), &dir.path().join("absent")] {
            assert!(open(path).expect("no error").is_none(), "{}", path.display());
        }
        for path in [&file, dir.path()] {
            assert!(open(path).expect("opened").is_some(), "{}", path.display());
        }
    }
}
