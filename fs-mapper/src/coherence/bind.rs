//! Adapter for files that the same kernel serves: a bind mount of a local disk, or a plain
//! directory that an executor on this machine exports. They share one page cache, so nothing is
//! left to do.

use super::{Change, Coherence, WriteBehind};
use crate::beneath::MountRoot;
use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

pub(super) struct Bind;

impl Coherence for Bind {
    fn settle(&self, _path: &Path) -> io::Result<()> {
        Ok(())
    }

    fn hand_over(&self, _path: &Path) -> io::Result<()> {
        Ok(())
    }

    fn refresh(&self, _on: &MountRoot, _change: &Change) -> io::Result<()> {
        Ok(())
    }

    fn write_behind(&self) -> WriteBehind {
        WriteBehind::Allowed
    }

    fn renew(&self, _top: &Path, _paths: &[PathBuf]) -> io::Result<()> {
        Ok(())
    }

    fn publish(&self, _path: &Path, _since: SystemTime) -> io::Result<()> {
        Ok(())
    }
}
