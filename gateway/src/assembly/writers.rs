//! Files on mounts that processes of the sessions hold open for writing: what was
//! written to them may still be on its way when a command elsewhere reads them.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
};

use super::procfs::{Orphans, processes_below};
use crate::{aside::Growing, enlisted::Pid};

/// Looks for them.
#[derive(Debug, Default)]
pub struct Writers {
    /// It remembers which processes are no part of a session.
    orphans: Mutex<Orphans>,
    looking: Growing,
}

/// A file that someone may write to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Written {
    /// As /proc shows it.
    pub path: PathBuf,
    /// The writer's offset, in bytes: at 0, nothing was written in the usual way.
    pub offset: u64,
}

impl Writers {
    /// Those below some directories, in the processes below `roots`. Reads /proc only.
    #[must_use]
    pub fn find(&self, roots: &[Pid], below: &[PathBuf]) -> Vec<Written> {
        self.looking.run(|| {
            let pids = processes_below(roots, &mut self.orphans.lock().unwrap_or_else(PoisonError::into_inner));
            pids.into_iter().flat_map(|pid| written_by(pid, below)).collect()
        })
    }
}

fn written_by(pid: Pid, below: &[PathBuf]) -> Vec<Written> {
    let Ok(directory) = fs::read_dir(format!("/proc/{pid}/fd")) else { return Vec::new() };
    let written = directory.flatten().filter_map(|entry| {
        let link = entry.path();
        let path = fs::read_link(&link).ok()?;
        if !below.iter().any(|top| path.starts_with(top)) {
            return None;
        }
        // The link's permissions tell the access mode (proc_pid_fd(5)).
        let writes = fs::symlink_metadata(&link).ok()?.permissions().mode() & 0o200 != 0;
        // Where it can't be read, something may have been written.
        let offset = offset(pid, link.file_name()?.as_ref()).unwrap_or(u64::MAX);
        writes.then_some(Written { path, offset })
    });
    written.collect()
}

/// The offset of a process's open file, in bytes (proc_pid_fdinfo(5)).
pub(super) fn offset(pid: Pid, fd: &Path) -> Option<u64> {
    let info = fs::read_to_string(Path::new("/proc").join(pid.to_string()).join("fdinfo").join(fd)).ok()?;
    info.lines().find_map(|line| line.strip_prefix("pos:")?.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn our_own_open_files_are_found() {
        let directory = tempfile::tempdir().unwrap();
        let top = directory.path().canonicalize().unwrap();
        let mut file = fs::File::create(top.join("written")).unwrap();
        file.write_all(b"four").unwrap();
        let read = fs::File::open(top.join("written")).unwrap();
        // Other tests start processes, which have all of ours open until their exec.
        let find = || Writers::default().find(&[std::process::id()], std::slice::from_ref(&top));
        let mut found = find();
        found.dedup();
        assert_eq!(found, [Written { path: top.join("written"), offset: 4 }]);
        drop((file, read));
        let began = std::time::Instant::now();
        while !find().is_empty() {
            assert!(began.elapsed() < std::time::Duration::from_secs(10), "{:?}", find());
        }
    }
}
