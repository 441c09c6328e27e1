//! Any other network or FUSE file system: what should work on most of them is
//! done, and what could lose data on some of them is not. Several upload a
//! whole file when it is closed (s3fs, gcsfuse), so nothing is written behind
//! their back.

use super::{Change, Coherence, WriteBehind, look};
use std::io;
use std::path::Path;

pub(super) struct Generic;

impl Coherence for Generic {
    fn settle(&self, path: &Path) -> io::Result<()> {
        let Some(file) = look::open(path)? else { return Ok(()) };
        match file.sync_all() {
            // A file system without fsync writes when it is told to write, or on close.
            Err(error) if error.raw_os_error() == Some(rustix::io::Errno::INVAL.raw_os_error()) => Ok(()),
            other => other,
        }
    }

    fn refresh(&self, change: &Change) -> io::Result<()> {
        let (Change::FileWritten(path) | Change::NamesChanged(path)) = change;
        match look::open(path)? {
            Some(file) => look::attributes(&file),
            None => Ok(()),
        }
    }

    fn write_behind(&self) -> WriteBehind {
        WriteBehind::ThroughLocalDescriptor
    }
}
