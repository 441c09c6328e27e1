//! A control group whose processes run when no others want to (`cpu.idle`, Linux 5.15).
//!
//! SCHED_IDLE alone counts within one autogroup only (sched(7)): beside processes of another
//! session, such as the commands of an executor, a process of that policy has the share of its
//! whole session, and delays them by a tick at each of their steps.

use std::io::{Error, Result};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::{fs, process};

/// Where the processor's controller is mounted: that of version 1, and the one hierarchy of version
/// 2.
const MOUNTS: [&str; 2] = ["/sys/fs/cgroup/cpu", "/sys/fs/cgroup"];

/// Removed when dropped, after its processes.
pub struct IdleGroup {
    directory: PathBuf,
    members: PathBuf,
}

impl IdleGroup {
    /// # Errors
    /// When no controller is mounted for the processor, or this process may make no group there.
    pub fn new() -> Result<Self> {
        static MADE: AtomicUsize = AtomicUsize::new(0);
        let name =
            format!("posh-fairness-{}-{}", process::id(), MADE.fetch_add(1, Ordering::Relaxed));
        let mut last = Error::other("no controller for the processor is mounted");
        for mount in MOUNTS {
            let directory = Path::new(mount).join(&name);
            if let Err(error) = fs::create_dir(&directory) {
                last = error;
                continue;
            }
            let group = Self { members: directory.join("cgroup.procs"), directory };
            // Made by the kernel: without the controller there is none, and none can be made.
            match fs::OpenOptions::new().write(true).open(group.directory.join("cpu.idle")) {
                Ok(mut idle) => {
                    std::io::Write::write_all(&mut idle, b"1")?;
                    return Ok(group);
                }
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    /// The file that takes the ids of processes.
    pub fn members(&self) -> &Path {
        &self.members
    }
}

impl Drop for IdleGroup {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.directory);
    }
}
