//! rclone mount with a write cache (`--vfs-cache-mode writes` or `full`): a
//! closed file is uploaded five seconds later (`--vfs-write-back`) or when the
//! queue lets it, and overwrites what the server has. Nothing in the file
//! system tells whether an upload is still to come, and directories are
//! remembered for minutes without a way to make them forget from outside.
//!
//! So a file that changed lately counts as not settled, and nothing is written
//! behind the mount's back.

use super::{Change, Coherence, WriteBehind};
use std::io;
use std::path::Path;
use std::time::{Duration, SystemTime};

/// A file untouched for so long has been uploaded, unless the network is down or
/// the upload is very slow: twelve times the default write-back delay.
const UPLOADED_AFTER: Duration = Duration::from_secs(60);

pub(super) struct Rclone;

impl Coherence for Rclone {
    fn settle(&self, path: &Path) -> io::Result<()> {
        let modified = match std::fs::metadata(path) {
            Ok(found) if found.is_dir() => return Ok(()),
            Ok(found) => found.modified()?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(error),
        };
        // A time in the future says that a clock is wrong: not settled either.
        if SystemTime::now().duration_since(modified).is_ok_and(|age| age >= UPLOADED_AFTER) {
            return Ok(());
        }
        let message = format!("{} changed in the last minute and may not be uploaded yet", path.display());
        Err(io::Error::new(io::ErrorKind::WouldBlock, message))
    }

    fn refresh(&self, change: &Change) -> io::Result<()> {
        let (Change::FileWritten(path) | Change::NamesChanged(path)) = change;
        let message = format!("rclone may show the old state of {} for minutes", path.display());
        Err(io::Error::new(io::ErrorKind::Unsupported, message))
    }

    fn write_behind(&self) -> WriteBehind {
        WriteBehind::ThroughLocalDescriptor
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;

    #[test]
    fn a_file_that_changed_lately_is_not_settled() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("f");
        let file = File::create(&path).expect("a file");
        assert_eq!(Rclone.settle(&path).expect_err("fresh").kind(), io::ErrorKind::WouldBlock);
        file.set_modified(SystemTime::now() - 2 * UPLOADED_AFTER).expect("a time");
        Rclone.settle(&path).expect("old");
        file.set_modified(SystemTime::now() + 2 * UPLOADED_AFTER).expect("a time");
        assert_eq!(Rclone.settle(&path).expect_err("from the future").kind(), io::ErrorKind::WouldBlock);
    }
}
