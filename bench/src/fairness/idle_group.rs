//! A control group whose processes run only when the processor is idle (`cpu.idle`, Linux 5.15).
//!
//! SCHED_IDLE alone has an effect within one autogroup only (sched(7)): compared with another
//! session's processes, such as an executor's commands, a process of that policy has the share of
//! its whole session, and delays them by a tick at each of their steps.

use std::io::{Error, Result};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::{fs, process};

/// Mount points of the cpu controller: that of version 1, and the single hierarchy of version 2.
const MOUNTS: [&str; 2] = ["/sys/fs/cgroup/cpu", "/sys/fs/cgroup"];

/// Removes the group when dropped, after its processes.
pub struct IdleGroup {
    directory: PathBuf,
    members: PathBuf,
}

impl IdleGroup {
    /// # Errors
    /// If no cpu controller is mounted, or this process may not create a group in it.
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
            // Created by the kernel: without the controller it does not exist, and can't be
            // created.
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

    /// The file for the ids of member processes.
    pub fn members(&self) -> &Path {
        &self.members
    }
}

impl Drop for IdleGroup {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.directory);
    }
}
