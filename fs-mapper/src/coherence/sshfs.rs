//! sshfs 3.7, by experiment (tests/real_mounts.rs repeats it):
//!
//! - The daemon sends every write at once and in order; only a mapping's dirty pages stay in the
//!   kernel. Opening and closing the file flushes those, and is answered after earlier writes.
//! - The daemon caches attributes and listings for 20 s, the kernel for 1 s more. An open makes the
//!   daemon fetch the attributes, a forced statx(2) then passes them to the kernel: either one
//!   alone leaves the old size.
//! - Opening a removed file makes the daemon forget it. The kernel forgets it when a call needs
//!   that name to be free. link(2) from another mount is such a call, and can never create anything
//!   (EXDEV).
//! - Setting a directory's attributes invalidates its listing. Setting the owner to its current
//!   value is the smallest such change, and the only one in which a login without privileges can't
//!   set a wrong value. What the mount shows may be up to 20 s old, so only an owner is set that
//!   the server has just told.
//! - Listing an invalidated directory also refreshes the attributes of its entries in the daemon.
//! - Setting attributes takes two round trips, an open one; a path that was not looked up for 20 s
//!   takes one more for each directory on the way.
//! - The second of those two is libfuse's, which returns the new attributes; the kernel holds the
//!   directory's lock during both.
//! - The kernel looks up names of one directory one after the other, those of several directories
//!   in parallel. During a lookup it sets no attributes of that directory.
//! - An open is answered after earlier writes by any process: files are served over one connection
//!   each, in order (sftp-server(8)).
//! - The daemon forgets a directory that is removed through it. Nothing else makes it forget a
//!   removed directory: a caller that can recreates it on the server, to remove it through the
//!   mount.
//! - Listing a directory also refreshes the types of its entries; the kernel treats a name whose
//!   type has changed as another file.
//! - The daemon caches the target of a symlink for 20 s of its own, whatever else is requested. It
//!   forgets the target when the symlink is removed through it.
//! - Not found: a way to make it forget the target of a replaced symlink, or the listing of a
//!   directory whose attributes this user may not set. These entries expire, so wait.

use super::{Change, Coherence, EntryKind, SSHFS_MEMORY, StaleEntry, WriteBehind, kernel, look};
use crate::beneath::{MountRoot, look_at};
use std::io;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant, SystemTime};

/// Poll interval while waiting for an entry to expire.
const LOOK_AGAIN: Duration = Duration::from_millis(200);

pub(super) struct Sshfs;

impl Coherence for Sshfs {
    fn settle(&self, path: &Path) -> io::Result<()> {
        drop(look::open(path)?);
        Ok(())
    }

    fn hand_over(&self, path: &Path) -> io::Result<()> {
        self.settle(path)
    }

    fn refresh(&self, on: &MountRoot, change: &Change) -> io::Result<()> {
        match change {
            Change::FileWritten(path) => look_anew(on, path),
            Change::EntryIs(path, kind) => show_entry(on, path, kind),
            Change::ListingChanged(dir) => match forget_listing(on, dir)? {
                ListingState::Forgotten => Ok(()),
                ListingState::Kept => {
                    sleep(SSHFS_MEMORY);
                    Ok(())
                }
            },
            Change::NameChanged(path) => forget_name_in_listing(on, path),
            // Listing it again gives the daemon the attributes of all entries in a few round trips,
            // however many there are. The kernel then asks the daemon.
            Change::EntriesChanged(dir) => {
                if forget_listing(on, dir)? == ListingState::Kept {
                    sleep(SSHFS_MEMORY);
                }
                kernel::forget_entries(on, dir)
            }
            Change::Removed(path) => wait_until_forgotten(on, path),
            // Unreported names may be cached.
            Change::Anything(_) => {
                sleep(SSHFS_MEMORY);
                Ok(())
            }
        }
    }

    fn forget_removed(&self, on: &MountRoot, path: &Path) -> io::Result<StaleEntry> {
        try_to_forget(on, path)
    }

    // Cached names are opened in parallel, also those of one directory. Each name that is not
    // cached costs a lookup, as removing it through this mount would.
    fn forget_one_of_many_removed(&self, on: &MountRoot, path: &Path) -> io::Result<StaleEntry> {
        match on.metadata(path) {
            Ok(found) if found.is_dir() => Ok(StaleEntry::Directory),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(StaleEntry::Nothing),
            Ok(found) if found.is_symlink() => Ok(StaleEntry::Link),
            _ => on.open_itself(path).map(|_| StaleEntry::Nothing),
        }
    }

    fn write_behind(&self) -> WriteBehind {
        WriteBehind::Allowed
    }

    fn renew(&self, top: &Path, _paths: &[PathBuf]) -> io::Result<()> {
        Err(super::unknown_daemon(top))
    }

    /// A closed file is on the server.
    fn publish(&self, _path: &Path, _since: SystemTime) -> io::Result<()> {
        Ok(())
    }
}

fn look_anew(on: &MountRoot, path: &Path) -> io::Result<()> {
    match on.open_itself(path)? {
        Some(file) => look_at(&file),
        None => {
            kernel::forget_name(on, path);
            Ok(())
        }
    }
}

/// Returns when the mount shows the new type and target, or the old entry must have expired: nobody
/// follows an old symlink.
fn show_entry(on: &MountRoot, path: &Path, kind: &EntryKind) -> io::Result<()> {
    // Missing names are never cached. Nor is the target of a symlink that sshfs refuses to show
    // (`contain_symlinks`), unless a symlink that it does show preceded it.
    let is_shown = || match on.kind(path) {
        Err(error) => error.kind() == io::ErrorKind::NotFound,
        Ok(EntryKind::Link(shown)) if shown.as_os_str().is_empty() => {
            matches!(kind, EntryKind::Link(_))
        }
        Ok(shown) => shown == *kind,
    };
    // Fails if the kernel finds that the name is no longer a file; it shows the new type from then
    // on.
    let looked = look_anew(on, path);
    if *kind == EntryKind::File && is_shown() {
        return looked;
    }
    let listed = list_anew(on, path);
    let end = Instant::now() + SSHFS_MEMORY;
    while !is_shown() && Instant::now() < end {
        sleep(LOOK_AGAIN);
    }
    listed
}

/// Refreshes a name's type and attributes by listing its directory.
fn list_anew(on: &MountRoot, path: &Path) -> io::Result<()> {
    let Some(dir) = path.parent() else { return Ok(()) };
    forget_listing(on, dir)?;
    on.list(dir)?.for_each(drop);
    kernel::forget(on, path)
}

#[derive(Debug, PartialEq, Eq)]
enum ListingState {
    Forgotten,
    /// Only the owner may set attributes, and only where the server told the owner: the listing
    /// stays until it expires.
    Kept,
}

/// Setting a directory's attributes invalidates its listing.
fn forget_listing(on: &MountRoot, dir: &Path) -> io::Result<ListingState> {
    match on.set_same_owner(dir) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Ok(ListingState::Kept),
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(ListingState::Forgotten),
    }
}

/// A listing that can't be invalidated may still be right about this name.
fn forget_name_in_listing(on: &MountRoot, path: &Path) -> io::Result<()> {
    let (Some(dir), Some(name)) = (path.parent(), path.file_name()) else { return Ok(()) };
    if forget_listing(on, dir)? == ListingState::Forgotten {
        return Ok(());
    }
    drop(on.open_itself(path)?);
    kernel::forget_name(on, path);
    let is_there = on.metadata(path).is_ok();
    let end = Instant::now() + SSHFS_MEMORY;
    while Instant::now() < end {
        let is_listed = on.list(dir)?.flatten().any(|entry| entry == name);
        if is_listed == is_there {
            break;
        }
        sleep(LOOK_AGAIN);
    }
    Ok(())
}

/// Opening a removed file makes the daemon forget it. `is_free` makes the kernel look it up again.
fn try_to_forget(on: &MountRoot, path: &Path) -> io::Result<StaleEntry> {
    drop(on.open_itself(path)?);
    if on.is_free(path)? {
        return Ok(StaleEntry::Nothing);
    }
    match on.metadata(path) {
        Ok(found) if found.is_dir() => Ok(StaleEntry::Directory),
        Ok(found) if found.is_symlink() => Ok(StaleEntry::Link),
        // It exists again, so the mount shows the truth.
        Ok(_) => Ok(StaleEntry::Nothing),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(StaleEntry::Nothing),
        Err(error) => Err(error),
    }
}

/// Directories and symlinks have to expire.
fn wait_until_forgotten(on: &MountRoot, path: &Path) -> io::Result<()> {
    let end = Instant::now() + SSHFS_MEMORY;
    while try_to_forget(on, path)? != StaleEntry::Nothing && Instant::now() < end {
        sleep(LOOK_AGAIN);
    }
    Ok(())
}
