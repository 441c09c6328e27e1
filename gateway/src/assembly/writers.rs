//! Files on mounts that the sessions' processes hold open for writing: their data may still be in
//! transit when a remote command reads them.

use std::{
    collections::HashSet,
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

use super::procfs::{Orphans, processes_below};
use crate::{
    aside::Growing,
    enlisted::{DescriptorKind, Enlisted, Pid},
};

/// Limit on inspected descriptors per process, at a microsecond or two each. A process with more
/// may have anything open for writing.
const MOST_DESCRIPTORS: usize = 65_536;

/// Finds files open for writing.
#[derive(Debug, Default)]
pub struct Writers {
    /// Remembers processes outside the sessions.
    orphans: Mutex<Orphans>,
    looking: Growing,
}

/// A file open for writing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Written {
    /// Path in /proc.
    pub path: PathBuf,
    /// Writer's offset, in bytes: at 0, nothing was written in the usual way.
    pub offset: u64,
}

impl Writers {
    /// Finds files below some directories that processes below `roots` have open for writing. Reads
    /// /proc only. Of the `waiting` stages it reads nothing: their descriptors are those that they
    /// enlisted with.
    #[must_use]
    pub fn find(
        &self,
        roots: &[Pid],
        waiting: &[Arc<Enlisted>],
        below: &[PathBuf],
    ) -> Vec<Written> {
        let stages: HashSet<Pid> = waiting.iter().map(|stage| stage.pid).collect();
        let childless: HashSet<Pid> =
            waiting.iter().filter(|stage| stage.childless).map(|stage| stage.pid).collect();
        self.looking.run(|| {
            let mut orphans = self.orphans.lock().unwrap_or_else(PoisonError::into_inner);
            let pids = processes_below(roots, &childless, &mut orphans);
            let others = pids
                .into_iter()
                .filter(|pid| !stages.contains(pid))
                .flat_map(|pid| written_by(pid, below, MOST_DESCRIPTORS));
            others.chain(waiting.iter().flat_map(|stage| written_through(stage, below))).collect()
        })
    }
}

/// Files that a stage can write to.
fn written_through<'s>(
    stage: &'s Enlisted,
    below: &'s [PathBuf],
) -> impl Iterator<Item = Written> + 's {
    let files = stage.descriptors.iter().filter(|d| d.kind == DescriptorKind::File && d.writes());
    let files = files.filter(|d| below.iter().any(|top| d.path.starts_with(top)));
    files.map(|d| Written { path: d.path.clone(), offset: d.offset })
}

fn written_by(pid: Pid, below: &[PathBuf], most: usize) -> Vec<Written> {
    let Ok(directory) = fs::read_dir(format!("/proc/{pid}/fd")) else { return Vec::new() };
    let mut descriptors = directory.flatten();
    let written = descriptors.by_ref().take(most).filter_map(|entry| {
        let link = entry.path();
        let path = fs::read_link(&link).ok()?;
        if !below.iter().any(|top| path.starts_with(top)) {
            return None;
        }
        // The link's permissions are the access mode (proc_pid_fd(5)).
        let writes = fs::symlink_metadata(&link).ok()?.permissions().mode() & 0o200 != 0;
        // If the offset is unreadable, assume that data was written.
        let offset = offset(pid, link.file_name()?.as_ref()).unwrap_or(u64::MAX);
        writes.then_some(Written { path, offset })
    });
    let mut written: Vec<Written> = written.collect();
    if descriptors.next().is_some() {
        written.extend(below.iter().map(|top| Written { path: top.clone(), offset: u64::MAX }));
    }
    written
}

/// Offset of a process's open file, in bytes (proc_pid_fdinfo(5)).
pub(super) fn offset(pid: Pid, fd: &Path) -> Option<u64> {
    let info = fs::read_to_string(Path::new("/proc").join(pid.to_string()).join("fdinfo").join(fd))
        .ok()?;
    info.lines().find_map(|line| line.strip_prefix("pos:")?.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::{super::closing::tests::stage, *};
    use crate::enlisted::Descriptor;
    use std::io::Write;

    #[test]
    fn what_waits_is_believed() {
        let directory = tempfile::tempdir().unwrap();
        let top = directory.path().canonicalize().unwrap();
        let _open = fs::File::create(top.join("open")).unwrap();
        let me = std::process::id();
        let mut stage = stage(me, &[(0, 0, false), (1, 0, true), (2, 0, true)], 0, &[]);
        for (descriptor, name) in
            stage.descriptors.iter_mut().zip(["read", "written", "/elsewhere"])
        {
            *descriptor = Descriptor {
                kind: DescriptorKind::File,
                path: top.join(name),
                offset: 7,
                ..descriptor.clone()
            };
        }
        let waiting = Arc::new(stage);
        let found = Writers::default().find(&[me], &[waiting], std::slice::from_ref(&top));
        assert_eq!(found, [Written { path: top.join("written"), offset: 7 }]);
    }

    #[test]
    fn a_process_with_more_descriptors_than_are_looked_at_may_write_to_anything() {
        let top = PathBuf::from("/nowhere");
        let find = |most| written_by(std::process::id(), std::slice::from_ref(&top), most);
        assert_eq!(find(2), [Written { path: top.clone(), offset: u64::MAX }]);
        assert_eq!(find(MOST_DESCRIPTORS), []);
    }

    #[test]
    fn our_own_open_files_are_found() {
        let directory = tempfile::tempdir().unwrap();
        let top = directory.path().canonicalize().unwrap();
        let mut file = fs::File::create(top.join("written")).unwrap();
        file.write_all(b"four").unwrap();
        let read = fs::File::open(top.join("written")).unwrap();
        // Other tests start processes, which have all of ours open until their exec.
        let find =
            || Writers::default().find(&[std::process::id()], &[], std::slice::from_ref(&top));
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
