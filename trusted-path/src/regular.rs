//! Regular files that are read before the program that they are meant for reads them.

use std::{fs::File, io, os::fd::AsRawFd as _, path::Path};

use rustix::fs::{FileType, Mode, OFlags, fstat, open};

/// Opens a regular file for reading, through symbolic links. Files of other types are not opened at
/// all: opening a FIFO unblocks its writer, and closing it loses the data; opening a device may
/// have any effect; and both may block.
///
/// The file is looked up with O_PATH, which opens nothing, checked, and then opened through that
/// descriptor, so that a rename meanwhile has no effect.
///
/// # Errors
/// The system's; `InvalidInput` if it is no regular file.
pub fn open_regular(path: &Path) -> io::Result<File> {
    let found = open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    if FileType::from_raw_mode(fstat(&found)?.st_mode) != FileType::RegularFile {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
    }
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let opened = open(format!("/proc/self/fd/{}", found.as_raw_fd()), flags, Mode::empty())?;
    Ok(opened.into())
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::symlink};

    use rustix::fs::{CWD, mkfifoat};

    use super::*;

    #[test]
    fn a_pipe_is_not_opened() {
        let top = tempfile::tempdir().unwrap();
        let (fifo, file, link) =
            (top.path().join("fifo"), top.path().join("file"), top.path().join("link"));
        mkfifoat(CWD, &fifo, Mode::RUSR | Mode::WUSR).unwrap();
        fs::write(&file, "text").unwrap();
        symlink("file", &link).unwrap();
        assert_eq!(io::read_to_string(open_regular(&link).unwrap()).unwrap(), "text");
        for path in [&fifo, top.path(), Path::new("/dev/zero"), &top.path().join("missing")] {
            assert!(open_regular(path).is_err(), "{path:?}");
        }
        // Nobody has it open to be read: a writer that does not wait is told so, and none that
        // waits was let go.
        let writer = open(&fifo, OFlags::WRONLY | OFlags::NONBLOCK, Mode::empty());
        assert_eq!(writer.unwrap_err(), rustix::io::Errno::NXIO);
        // A writer who waits goes on waiting.
        let waiting = std::thread::spawn({
            let fifo = fifo.clone();
            move || fs::write(fifo, "echo x")
        });
        for _ in 0..100 {
            assert!(open_regular(&fifo).is_err());
            std::thread::yield_now();
        }
        assert!(!waiting.is_finished());
        assert_eq!(fs::read_to_string(&fifo).unwrap(), "echo x");
        waiting.join().unwrap().unwrap();
    }
}
