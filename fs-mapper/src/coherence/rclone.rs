//! rclone mount, by experiment with 1.60 and from its documentation:
//!
//! - With a write cache (`--vfs-cache-mode`), a closed file is uploaded some seconds later
//!   (`--vfs-write-back`). Until then, its metadata file in the cache has it as dirty, from the
//!   first write on.
//! - Directories are cached for minutes (`--dir-cache-time`). Only the remote control (`--rc`)
//!   invalidates them, and the kernel keeps attributes for `--attr-timeout` more.
//! - A clean copy in the cache is used for as long as its fingerprint matches the cloud's. Over
//!   some protocols the fingerprint is the size alone, which misses other content of the same size:
//!   such a copy is not trusted.
//! - An open file is uploaded whole on close and overwrites changes made meanwhile: redirects are
//!   always written through the mount.

mod cache;
mod daemon;
mod peer;
mod remote_control;

use self::{cache::Copy, daemon::Daemon};
use super::{Change, Coherence, WriteBehind, kernel};
use crate::beneath::MountRoot;
use std::io;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant, SystemTime};

/// Timeout for an upload before a command reads the file on the server. After it, running locally
/// is quicker: the data is in this machine's cache.
const SETTLE_LIMIT: Duration = Duration::from_millis(800);
/// Timeout for uploading a command's writes on the executor to the cloud: the default delay is 5 s,
/// the rest is for large files.
const PUBLISH_LIMIT: Duration = Duration::from_secs(120);
/// Poll interval for the cache's metadata files, which are small and local.
const LOOK_AGAIN: Duration = Duration::from_millis(10);

pub(super) struct Rclone;

impl Coherence for Rclone {
    fn settle(&self, path: &Path) -> io::Result<()> {
        let daemon = Daemon::of(path)?;
        let Some(cache) = daemon.cache()? else { return Ok(()) };
        let inside = daemon.inside(path);
        let end = Instant::now() + SETTLE_LIMIT;
        while let Some(dirty) = cache.find(&inside, Copy::is_dirty)? {
            // Don't wait for a file whose upload starts only after the timeout.
            let starts = dirty.recorded + daemon.write_back();
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() || starts > SystemTime::now() + left {
                return Err(not_yet(&daemon, &dirty.path));
            }
            sleep(LOOK_AGAIN);
        }
        Ok(())
    }

    fn hand_over(&self, path: &Path) -> io::Result<()> {
        let daemon = Daemon::of(path)?;
        daemon.remote_control()?.noop()?;
        let Some(cache) = daemon.cache()? else { return Ok(()) };
        match cache.find(&daemon.inside(path), |copy| copy.dirty || copy.is_weak())? {
            Some(copy) if copy.dirty => Err(not_yet(&daemon, &copy.path)),
            Some(copy) => Err(not_trusted(&daemon, &copy.path)),
            None => Ok(()),
        }
    }

    fn refresh(&self, on: &MountRoot, change: &Change) -> io::Result<()> {
        match change {
            Change::FileWritten(path)
            | Change::NameChanged(path)
            | Change::EntryIs(path, _)
            | Change::Removed(path) => {
                let daemon = Daemon::of(path)?;
                let control = daemon.remote_control()?;
                let inside = daemon.inside(path);
                control.forget("file", &inside)?;
                control.forget("dir", inside.parent().unwrap_or(Path::new("")))?;
                kernel::forget(on, path)
            }
            Change::ListingChanged(dir) | Change::EntriesChanged(dir) => {
                let daemon = Daemon::of(dir)?;
                daemon.remote_control()?.forget("dir", &daemon.inside(dir))?;
                kernel::forget_entries(on, dir)
            }
            Change::Anything(top) => {
                let daemon = Daemon::of(top)?;
                daemon.remote_control()?.forget_all()?;
                sleep(daemon.attribute_life());
                Ok(())
            }
        }
    }

    fn write_behind(&self) -> WriteBehind {
        WriteBehind::ThroughLocalDescriptor
    }

    fn renew(&self, top: &Path, paths: &[PathBuf]) -> io::Result<()> {
        let daemon = Daemon::of(top)?;
        if let Some(cache) = daemon.cache()? {
            for path in paths {
                if let Some(copy) =
                    cache.find(&daemon.inside(path), |copy| !copy.dirty && copy.is_weak())?
                {
                    return Err(not_trusted(&daemon, &copy.path));
                }
            }
        }
        daemon.remote_control()?.forget_all()?;
        if !daemon.attribute_life().is_zero() {
            kernel::drop_caches(top)?;
        }
        Ok(())
    }

    fn look_again(&self, paths: &[PathBuf]) -> io::Result<()> {
        paths.iter().try_for_each(|path| kernel::look_up_again(path))
    }

    fn publish(&self, path: &Path, since: SystemTime) -> io::Result<()> {
        let daemon = Daemon::of(path)?;
        let Some(cache) = daemon.cache()? else { return Ok(()) };
        let end = Instant::now() + PUBLISH_LIMIT;
        while let Some(dirty) =
            cache.find(Path::new(""), |copy| copy.dirty && copy.recorded >= since)?
        {
            if Instant::now() >= end {
                return Err(not_yet(&daemon, &dirty.path));
            }
            sleep(LOOK_AGAIN);
        }
        Ok(())
    }
}

fn not_yet(daemon: &Daemon, inside: &Path) -> io::Error {
    let message = format!("{} is not uploaded yet", daemon.shown(inside).display());
    io::Error::new(io::ErrorKind::WouldBlock, message)
}

fn not_trusted(daemon: &Daemon, inside: &Path) -> io::Error {
    let path = daemon.shown(inside);
    let message = format!(
        "rclone may not notice that its copy of {} is old: it knows only the size",
        path.display()
    );
    io::Error::new(io::ErrorKind::Unsupported, message)
}
