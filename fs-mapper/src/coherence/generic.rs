//! Adapter for any other network or FUSE file system. Does what should work on most of them, and
//! avoids what could lose data on some. Several upload a whole file on close (s3fs, gcsfuse), so
//! commands on the server never write their files.

use super::{Change, Coherence, WriteBehind, kernel, look};
use crate::beneath::{MountRoot, look_at};
use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

pub(super) struct Generic;

impl Coherence for Generic {
    fn settle(&self, path: &Path) -> io::Result<()> {
        let Some(file) = look::open(path)? else { return Ok(()) };
        match file.sync_all() {
            // A file system without fsync writes synchronously, or on close.
            Err(error) if error.raw_os_error() == Some(rustix::io::Errno::INVAL.raw_os_error()) => {
                Ok(())
            }
            other => other,
        }
    }

    fn hand_over(&self, path: &Path) -> io::Result<()> {
        let message = format!("{} must be written through its mount", path.display());
        Err(io::Error::new(io::ErrorKind::Unsupported, message))
    }

    fn refresh(&self, on: &MountRoot, change: &Change) -> io::Result<()> {
        if let Change::Removed(path) = change {
            kernel::forget_name(on, path);
        }
        match on.open_itself(change.path())? {
            Some(file) => look_at(&file),
            None => Ok(()),
        }
    }

    fn write_behind(&self) -> WriteBehind {
        WriteBehind::ThroughLocalDescriptor
    }

    fn renew(&self, top: &Path, _paths: &[PathBuf]) -> io::Result<()> {
        Err(super::unknown_daemon(top))
    }

    fn publish(&self, path: &Path, _since: SystemTime) -> io::Result<()> {
        Err(super::unknown_daemon(path))
    }
}
