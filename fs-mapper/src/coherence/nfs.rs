//! NFS (nfs(5), "Data and metadata coherence"): close-to-open. fsync(2) flushes dirty pages of
//! every descriptor on this machine. An open asks the server for the change attribute and drops
//! outdated cache entries; a forced statx(2) does so for a directory and its names.
//!
//! Based on the documentation and the kernel's source, not tested against a real server: the mount
//! options decide which of these promises hold.

use super::{Change, Coherence, WriteBehind, kernel, look};
use crate::beneath::{MountRoot, look_at};
use crate::mountinfo::MountInfo;
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
        if !NfsCaching::of(path)?.close_to_open {
            let what = format!(
                "{} is mounted with nocto: a change on the server would go unnoticed",
                path.display()
            );
            return Err(io::Error::new(io::ErrorKind::Unsupported, what));
        }
        self.settle(path)
    }

    fn refresh(&self, on: &MountRoot, change: &Change) -> io::Result<()> {
        let path = change.path();
        let options = NfsCaching::of(path)?;
        if !options.keeps_attributes && !options.keeps_names {
            return Ok(());
        }
        if let Some(file) = on.open_itself(path)? {
            look_at(&file)?;
        }
        match change {
            Change::EntriesChanged(dir) => kernel::forget_entries(on, dir),
            Change::NameChanged(path)
            | Change::Removed(path)
            | Change::FileWritten(path)
            | Change::EntryIs(path, _) => forget_in_directory(on, path),
            Change::ListingChanged(_) | Change::Anything(_) => Ok(()),
        }
    }

    fn write_behind(&self) -> WriteBehind {
        WriteBehind::Allowed
    }

    /// An NFS client's caches are all in the kernel.
    fn renew(&self, top: &Path, _paths: &[PathBuf]) -> io::Result<()> {
        let options = NfsCaching::of(top)?;
        if options.keeps_attributes || options.keeps_names {
            kernel::drop_caches(top)?;
        }
        Ok(())
    }

    fn look_again(&self, paths: &[PathBuf]) -> io::Result<()> {
        paths.iter().try_for_each(|path| look::attributes_at(path))
    }

    /// Ended commands have closed their files, and close(2) flushes.
    fn publish(&self, _path: &Path, _since: SystemTime) -> io::Result<()> {
        Ok(())
    }
}

/// Refreshing a directory's attributes invalidates its cached names.
fn forget_in_directory(on: &MountRoot, path: &Path) -> io::Result<()> {
    match path.parent().map(|parent| on.open_itself(parent)).transpose()?.flatten() {
        Some(parent) => look_at(&parent),
        None => Ok(()),
    }
}

/// Caching behaviour of a mount, from its options (nfs(5)).
#[derive(Debug, PartialEq, Eq)]
struct NfsCaching {
    /// Attributes are cached for some seconds: neither `noac` nor `actimeo=0`.
    keeps_attributes: bool,
    /// Names are cached: not `lookupcache=none`.
    keeps_names: bool,
    /// An open revalidates with the server: not `nocto`.
    close_to_open: bool,
}

impl NfsCaching {
    fn of(path: &Path) -> io::Result<Self> {
        let info = MountInfo::read().map_err(io::Error::other)?;
        let around =
            info.visible().into_iter().filter(|mount| path.starts_with(&mount.mount_point));
        let mount = around.max_by_key(|mount| mount.mount_point.components().count());
        Ok(Self::parse(mount.map_or("", |mount| mount.options.as_str())))
    }

    /// The kernel shows `actimeo` as the four bounds that it sets, and omits defaults.
    fn parse(options: &str) -> Self {
        let has = |wanted: &str| options.split(',').any(|option| option == wanted);
        let zero = |name: &str| has(&format!("{name}=0"));
        let no_life =
            has("noac") || zero("actimeo") || ["acregmax", "acdirmax"].into_iter().all(zero);
        Self {
            keeps_attributes: !no_life,
            keeps_names: !(has("lookupcache=none") || no_life),
            close_to_open: !has("nocto"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_options_say() {
        let check = |options: &str, keeps_attributes, keeps_names, close_to_open| {
            assert_eq!(
                NfsCaching::parse(options),
                NfsCaching { keeps_attributes, keeps_names, close_to_open },
                "{options}"
            );
        };
        check("rw,relatime,vers=4.2,rsize=1048576,hard,proto=tcp,addr=10.0.0.1", true, true, true);
        check("rw,vers=3,noac,addr=10.0.0.1", false, false, true);
        check("rw,acregmin=0,acregmax=0,acdirmin=0,acdirmax=0", false, false, true);
        check("rw,acregmin=0,acregmax=0", true, true, true);
        check("rw,actimeo=0", false, false, true);
        check("rw,lookupcache=none", true, false, true);
        check("rw,lookupcache=pos", true, true, true);
        check("rw,nocto,nosharecache", true, true, false);
    }
}
