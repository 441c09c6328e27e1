//! sshfs 3.7, by experiment (tests/real_mounts.rs repeats it):
//!
//! - Its daemon sends every write at once and one after the other; only a
//!   mapping's dirty pages stay in the kernel. Opening and closing the file
//!   flushes those, and is answered after the writes before it.
//! - The daemon keeps attributes and listings for 20 s, the kernel for 1 s more.
//!   An open makes the daemon ask for the attributes, a forced statx(2) then
//!   passes them to the kernel: either one alone leaves the old size.
//! - An open of a file that is gone makes the daemon forget it; the kernel
//!   forgets when a call wants that name to be free. link(2) from another mount
//!   is such a call, and can never create anything (EXDEV).
//! - A listing is forgotten when the attributes of its directory are set. Group
//!   to the same group is the smallest such change; the mode as the mount shows
//!   it can be one that the command has just replaced.
//! - Listing a directory that was forgotten also brings the attributes of its
//!   entries anew, into the daemon.
//! - Not found: a way to make it forget a directory that is gone (20 s).

use super::{Change, Coherence, WriteBehind, look};
use std::io;
use std::os::unix::fs::{MetadataExt, chown};
use std::path::Path;

/// Names of a directory whose attributes are looked at again; beyond it they may
/// be a second old in the kernel.
const MOST_ENTRIES: usize = 5000;

pub(super) struct Sshfs;

impl Coherence for Sshfs {
    fn settle(&self, path: &Path) -> io::Result<()> {
        drop(look::open(path)?);
        Ok(())
    }

    fn refresh(&self, change: &Change) -> io::Result<()> {
        match change {
            Change::FileWritten(path) => match look::open(path)? {
                Some(file) => look::attributes(&file),
                None => {
                    forget_name(path);
                    Ok(())
                }
            },
            Change::NamesChanged(dir) => forget_listing(dir),
        }
    }

    fn write_behind(&self) -> WriteBehind {
        WriteBehind::Allowed
    }
}

/// Has the kernel look the name up again.
fn forget_name(path: &Path) {
    let _never_made = std::fs::hard_link("/", path);
}

fn forget_listing(dir: &Path) -> io::Result<()> {
    match std::fs::metadata(dir).and_then(|found| chown(dir, None, Some(found.gid()))) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        other => other?,
    }
    // Listing it anew gives the daemon the attributes of all that is in it, in a
    // few round trips however many there are; the kernel then asks the daemon.
    for entry in std::fs::read_dir(dir)?.take(MOST_ENTRIES) {
        look::attributes_at(&entry?.path())?;
    }
    Ok(())
}
