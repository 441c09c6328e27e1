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
//! - Setting attributes takes two round trips, an open one; a path that was not
//!   looked at for 20 s one more for each directory on the way.
//! - Of those two, the second one is libfuse's, which shows the new attributes; the kernel holds
//!   the directory's lock for both.
//! - The kernel has names in one directory looked up one after the other, those in several at once;
//!   and while one is looked up it sets no attributes of that directory.
//! - An open is answered after the writes before it, whoever made them: files are
//!   served over one connection each, in order (sftp-server(8)).
//! - It forgets a directory that is removed through it, and nothing else makes it forget
//!   one that is gone: whoever can makes it anew on the server, to be removed here.
//! - Listing a directory brings the kinds of its entries anew, too; the kernel takes a name whose
//!   kind has changed for another file.
//! - What is in a symbolic link it remembers for 20 s of its own, whatever else it is asked. It
//!   forgets that when the link is removed through it.
//! - Not found: a way to make it forget what is in a link that has become another one, and the
//!   listing of a directory whose attributes this user may not set. Its memory ends by itself, so
//!   that is waited out.

use super::{Change, Coherence, EntryKind, Left, SSHFS_MEMORY, WriteBehind, kernel, look};
use crate::beneath::{MountRoot, look_at};
use std::io;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant, SystemTime};

/// Between two looks at something that is waited out.
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
                Listing::Forgotten => Ok(()),
                Listing::Kept => {
                    sleep(SSHFS_MEMORY);
                    Ok(())
                }
            },
            Change::NameChanged(path) => forget_name_in_listing(on, path),
            // Listing it anew gives the daemon the attributes of all that is in it, in a
            // few round trips however many there are; the kernel then asks the daemon.
            Change::EntriesChanged(dir) => {
                if forget_listing(on, dir)? == Listing::Kept {
                    sleep(SSHFS_MEMORY);
                }
                kernel::forget_entries(on, dir)
            }
            Change::Removed(path) => wait_until_forgotten(on, path),
            // Names that nobody has told of may be remembered.
            Change::Anything(_) => {
                sleep(SSHFS_MEMORY);
                Ok(())
            }
        }
    }

    fn forget_removed(&self, on: &MountRoot, path: &Path) -> io::Result<Left> {
        try_to_forget(on, path)
    }

    // Names that are remembered are opened at once, those of one directory too. Each that is not is
    // looked up, as removing it through this mount would do.
    fn forget_one_of_many_removed(&self, on: &MountRoot, path: &Path) -> io::Result<Left> {
        match on.metadata(path) {
            Ok(found) if found.is_dir() => Ok(Left::Directory),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Left::Nothing),
            Ok(found) if found.is_symlink() => Ok(Left::Link),
            _ => on.open_itself(path).map(|_| Left::Nothing),
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

/// Returns when the mount shows that a name is what it is, or has had the time to forget what it
/// was: nobody goes where an old link led.
fn show_entry(on: &MountRoot, path: &Path, kind: &EntryKind) -> io::Result<()> {
    // What is not there is never remembered; nor what is in a link that sshfs refuses to show
    // (`contain_symlinks`), but for the link that was there before, which it does show.
    let is_shown = || match on.kind(path) {
        Err(error) => error.kind() == io::ErrorKind::NotFound,
        Ok(EntryKind::Link(shown)) if shown.as_os_str().is_empty() => {
            matches!(kind, EntryKind::Link(_))
        }
        Ok(shown) => shown == *kind,
    };
    // Fails where the kernel finds that it is no file any more, and shows that from then on.
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

/// Has what a name is, and its attributes, told by a listing.
fn list_anew(on: &MountRoot, path: &Path) -> io::Result<()> {
    let Some(dir) = path.parent() else { return Ok(()) };
    forget_listing(on, dir)?;
    on.list(dir)?.for_each(drop);
    kernel::forget(on, path)
}

#[derive(Debug, PartialEq, Eq)]
enum Listing {
    Forgotten,
    /// The owner alone may set attributes: the listing is remembered to its end.
    Kept,
}

/// A listing goes when the attributes of its directory are set.
fn forget_listing(on: &MountRoot, dir: &Path) -> io::Result<Listing> {
    match on.set_same_group(dir) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Ok(Listing::Kept),
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(Listing::Forgotten),
    }
}

/// Where the listing can't be forgotten, it may still be right about this name.
fn forget_name_in_listing(on: &MountRoot, path: &Path) -> io::Result<()> {
    let (Some(dir), Some(name)) = (path.parent(), path.file_name()) else { return Ok(()) };
    if forget_listing(on, dir)? == Listing::Forgotten {
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

/// Opening a file that is gone makes the daemon forget it. The kernel's own memory is asked by what
/// makes it look anew.
fn try_to_forget(on: &MountRoot, path: &Path) -> io::Result<Left> {
    drop(on.open_itself(path)?);
    if on.is_free(path)? {
        return Ok(Left::Nothing);
    }
    match on.metadata(path) {
        Ok(found) if found.is_dir() => Ok(Left::Directory),
        Ok(found) if found.is_symlink() => Ok(Left::Link),
        // There again by now; then it is true that it is there.
        Ok(_) => Ok(Left::Nothing),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Left::Nothing),
        Err(error) => Err(error),
    }
}

/// Directories and links are waited for.
fn wait_until_forgotten(on: &MountRoot, path: &Path) -> io::Result<()> {
    let end = Instant::now() + SSHFS_MEMORY;
    while try_to_forget(on, path)? != Left::Nothing && Instant::now() < end {
        sleep(LOOK_AGAIN);
    }
    Ok(())
}
