//! NFS (nfs(5), "Data and metadata coherence"): close-to-open. fsync(2) sends
//! what any descriptor of this machine has left in the page cache; an open asks
//! the server for the change attribute and drops what no longer fits, and a
//! forced statx(2) does the same for a directory and its names.
//!
//! From the documentation and the kernel's source, not yet held against a real
//! server.

use super::{Change, Coherence, WriteBehind, look};
use std::io;
use std::path::Path;

pub(super) struct Nfs;

impl Coherence for Nfs {
    fn settle(&self, path: &Path) -> io::Result<()> {
        match look::open(path)? {
            Some(file) => file.sync_all(),
            None => Ok(()),
        }
    }

    fn refresh(&self, change: &Change) -> io::Result<()> {
        let (Change::FileWritten(path) | Change::NamesChanged(path)) = change;
        if let Some(file) = look::open(path)? {
            return look::attributes(&file);
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
}
