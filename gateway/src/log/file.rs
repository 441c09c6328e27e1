//! The log file of a gateway in the background: its standard error, so that it also has the
//! messages of panics and of the C library. It is in the runtime directory, which is memory that
//! the user's other programs need.
//!
//! Invariant: before each line, the file has less than [`LOG_BYTES`], or becomes the one former
//! file, in place of an older one. So the two have at most twice that and a line each. The size is
//! the file's own, not a count: an ending gateway of the same configuration may write to it, too.

use std::{
    ffi::OsString,
    fs::{self, File, OpenOptions},
    io::{self, Write},
    os::{
        fd::AsFd,
        unix::fs::{MetadataExt as _, OpenOptionsExt as _},
    },
    panic,
    path::{Path, PathBuf},
    sync::Arc,
};

use rustix::{fs::fstat, stdio::dup2_stderr};

/// Size at which a new file is begun.
const LOG_BYTES: u64 = 1 << 20;

/// Standard error.
#[derive(Debug, Clone)]
pub struct LogFile {
    /// Its file; `None` if its size is not our concern.
    path: Option<Arc<Path>>,
}

impl LogFile {
    /// Standard error, which is the file at `path`, if given.
    #[must_use]
    pub fn new(path: Option<&Path>) -> Self {
        Self { path: path.map(Arc::from) }
    }

    /// Bounds what panics write, too.
    pub fn include_panics(self) {
        let report = panic::take_hook();
        panic::set_hook(Box::new(move |panicked| {
            let _ = self.make_room();
            report(panicked);
        }));
    }

    fn make_room(&self) -> io::Result<()> {
        let Some(path) = &self.path else { return Ok(()) };
        match successor(path, &io::stderr())? {
            Some(file) => Ok(dup2_stderr(&file)?),
            None => Ok(()),
        }
    }
}

impl Write for LogFile {
    /// A line that finds no room is dropped.
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        // Volumes have threads of their own.
        let mut stderr = io::stderr().lock();
        self.make_room()?;
        stderr.write(line)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Returns the file to go on with, if `log` is full.
fn successor(path: &Path, log: &impl AsFd) -> io::Result<Option<File>> {
    let own = fstat(log)?;
    if own.st_size.cast_unsigned() < LOG_BYTES {
        return Ok(None);
    }
    // Another gateway, or a rename without the rest, has made room already.
    let is_current =
        fs::metadata(path).is_ok_and(|at| (at.dev(), at.ino()) == (own.st_dev, own.st_ino));
    if is_current {
        fs::rename(path, former(path))?;
    }
    OpenOptions::new().create(true).append(true).mode(0o600).open(path).map(Some)
}

fn former(path: &Path) -> PathBuf {
    let mut name = OsString::from(path);
    name.push(".old");
    name.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINE: [u8; 1000] = [b'x'; 1000];

    /// A gateway's log.
    struct Writer<'a> {
        path: &'a Path,
        file: File,
    }

    impl<'a> Writer<'a> {
        fn new(path: &'a Path) -> Self {
            let file = OpenOptions::new().create(true).append(true).open(path).unwrap();
            Self { path, file }
        }

        fn line(&mut self) {
            if let Some(next) = successor(self.path, &self.file).unwrap() {
                self.file = next;
            }
            self.file.write_all(&LINE).unwrap();
        }
    }

    fn sizes(directory: &Path) -> Vec<u64> {
        let files = fs::read_dir(directory).unwrap();
        files.map(|file| file.unwrap().metadata().unwrap().len()).collect()
    }

    #[test]
    fn the_log_has_a_bounded_size_and_one_former_file() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("gateway.log");
        let (mut ending, mut other) = (Writer::new(&path), Writer::new(&path));
        for number in 0..10 * LOG_BYTES / LINE.len() as u64 {
            other.line();
            if number % 3 == 0 {
                ending.line();
            }
        }
        let sizes = sizes(directory.path());
        assert_eq!(sizes.len(), 2, "{sizes:?}");
        assert!(sizes.iter().all(|size| *size < LOG_BYTES + LINE.len() as u64), "{sizes:?}");
        assert!(sizes.iter().sum::<u64>() >= LOG_BYTES, "what was before is kept: {sizes:?}");
    }
}
