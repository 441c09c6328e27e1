//! A volume that posh itself serves (`fuse.posh`). A closed file is on the server, and leases keep
//! this machine's view coherent. The gateway that serves the mount also learns directly of runs'
//! changes, so this adapter only flushes files that are still being written.

use super::{Change, Coherence, WriteBehind, look};
use crate::beneath::MountRoot;
use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// Type in mountinfo.
pub(super) const FS_TYPE: &str = "fuse.posh";

pub(super) struct Volume;

impl Coherence for Volume {
    fn settle(&self, path: &Path) -> io::Result<()> {
        look::open(path)?.map_or(Ok(()), |file| file.sync_all())
    }

    fn hand_over(&self, path: &Path) -> io::Result<()> {
        self.settle(path)
    }

    fn refresh(&self, on: &MountRoot, change: &Change) -> io::Result<()> {
        on.look_at(change.path())
    }

    fn write_behind(&self) -> WriteBehind {
        WriteBehind::Allowed
    }

    /// This machine's leases reveal other executors' changes.
    fn renew(&self, _top: &Path, _paths: &[PathBuf]) -> io::Result<()> {
        Ok(())
    }

    fn publish(&self, _path: &Path, _since: SystemTime) -> io::Result<()> {
        Ok(())
    }
}
