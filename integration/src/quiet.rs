//! Waits until a host has no remains of the work, neither processes nor files, and reports those
//! that stay.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use rustix::event::PollFlags;

use crate::error::{AttemptExt, Result};
use crate::host::{Host, RUNTIME};
use crate::process::{wait_for, wait_gone};
use crate::running::Running;

/// Programs that belong on a host while it is idle.
const SERVICES: [&str; 5] = ["sshd", "sshfs", "ssh", "posh-executor", "posh-gateway"];

/// Processes of a host that still run after `limit` and are no service of it.
pub fn processes_left(host: &Host, limit: Duration) -> Result<Vec<Running>> {
    let end = Instant::now() + limit;
    loop {
        let mut left = host.processes()?;
        left.retain(|p| !SERVICES.contains(&p.program.as_str()));
        // One at a time: a process may start another one before it ends.
        let Some(first) = left.first() else { return Ok(left) };
        if !wait_gone(first.pid, end.saturating_duration_since(Instant::now()))? {
            return Ok(left);
        }
    }
}

/// Files and directories in the places for temporary files, except sockets and logs.
pub fn temporary_files(host: &Host) -> Result<BTreeSet<PathBuf>> {
    let mut found = BTreeSet::new();
    for root in roots(host) {
        collect(&root, &mut found)?;
    }
    Ok(found)
}

/// Temporary files of a host that are not in `before` and stay for longer than `limit`.
pub fn files_left(
    host: &Host,
    before: &BTreeSet<PathBuf>,
    limit: Duration,
) -> Result<Vec<PathBuf>> {
    let end = Instant::now() + limit;
    let watch = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK)
        .attempt(|| "start inotify".into())?;
    let gone =
        AddWatchFlags::IN_DELETE | AddWatchFlags::IN_MOVED_FROM | AddWatchFlags::IN_DELETE_SELF;
    loop {
        for directory in
            roots(host).into_iter().chain(temporary_files(host)?).filter(|p| p.is_dir())
        {
            // It may be gone already.
            let _ = watch.add_watch(&directory, gone);
        }
        let left: Vec<_> = temporary_files(host)?.difference(before).cloned().collect();
        if left.is_empty()
            || !wait_for(&watch, PollFlags::IN, end.saturating_duration_since(Instant::now()))?
        {
            return Ok(left);
        }
        let _ = watch.read_events();
    }
}

/// Every file and directory below one.
pub fn files_below(directory: &Path) -> Result<BTreeSet<PathBuf>> {
    let mut found = BTreeSet::new();
    collect(directory, &mut found)?;
    Ok(found)
}

fn roots(host: &Host) -> Vec<PathBuf> {
    ["/tmp", RUNTIME].map(|p| host.path(p)).to_vec()
}

fn collect(directory: &Path, found: &mut BTreeSet<PathBuf>) -> Result<()> {
    let entries = match fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(e).attempt(|| format!("list {}", directory.display())),
    };
    for entry in entries.filter_map(std::io::Result::ok) {
        let path = entry.path();
        if entry.file_type().is_ok_and(|t| t.is_dir()) {
            collect(&path, found)?;
        }
        found.insert(path);
    }
    Ok(())
}
