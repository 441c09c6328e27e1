//! NFS (nfs(5), "Data and metadata coherence"): close-to-open. fsync(2) sends
//! what any descriptor of this machine has left in the page cache; an open asks
//! the server for the change attribute and drops what no longer fits, and a
//! forced statx(2) does the same for a directory and its names.
//!
//! From the documentation and the kernel's source, not yet held against a real
//! server.

use super::{Change, Coherence, WriteBehind, kernel, look};
use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

pub(super) struct Nfs;

impl Coherence for Nfs {
    fn settle(&self, path: &Path) -> io::Result<()> {
        match look::open(path)? {
            Some(file) => file.sync_all(),
            None => Ok(()),
        }
    }

    fn hand_over(&self, path: &Path) -> io::Result<()> {
        self.settle(path)
    }

    fn refresh(&self, change: &Change) -> io::Result<()> {
        let path = change.path();
        if let Some(file) = look::open(path)? {
            look::attributes(&file)?;
            return match change {
                Change::EntriesChanged(dir) => kernel::forget_entries(dir),
                _ => Ok(()),
            };
        }
        // It is gone: what its directory remembers of it goes with a look at that.
        match path.parent().map(look::open).transpose()?.flatten() {
            Some(parent) => look::attributes(&parent),
            None => Ok(()),
        }
    }

    fn write_behind(&self) -> WriteBehind {
        WriteBehind::Allowed
    }

    /// All that an NFS client remembers is in the kernel.
    fn renew(&self, paths: &[PathBuf]) -> io::Result<()> {
        let Some(first) = paths.first() else { return Ok(()) };
        kernel::drop_caches(first)?;
        paths.iter().try_for_each(|path| look::attributes_at(path))
    }

    /// Commands that have ended have closed their files, and close(2) sends what is left.
    fn publish(&self, _path: &Path, _since: SystemTime) -> io::Result<()> {
        Ok(())
    }
}
