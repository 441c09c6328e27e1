//! A volume that posh serves itself (`fuse.posh`). What a closed file holds is on
//! the server, and leases keep this machine's view true; the gateway that serves
//! the mount is besides told directly of what runs have changed, so that nothing
//! is left to do here but to flush what is still being written.

use super::{Change, Coherence, WriteBehind, look};
use crate::beneath::MountRoot;
use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// As mountinfo shows it.
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

    /// Another executor's changes are seen by the leases that this machine holds.
    fn renew(&self, _top: &Path, _paths: &[PathBuf]) -> io::Result<()> {
        Ok(())
    }

    fn publish(&self, _path: &Path, _since: SystemTime) -> io::Result<()> {
        Ok(())
    }
}
