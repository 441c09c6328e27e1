//! Files on mounts that the sessions' processes hold open for writing, or have mapped so: their
//! data may still be in transit, or in this machine's memory, when a remote command reads them.

use std::{
    collections::HashSet,
    ffi::OsStr,
    fs,
    io::Read as _,
    os::unix::{ffi::OsStrExt as _, fs::PermissionsExt},
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

/// Limit on the text about a process's mappings: some ten thousand of them.
const MOST_MAPS_BYTES: u64 = 1 << 20;

/// Finds files open for writing, or mapped so.
#[derive(Debug, Default)]
pub struct Writers {
    /// Remembers processes outside the sessions.
    orphans: Mutex<Orphans>,
    looking: Growing,
}

/// A file that a process may be writing to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Written {
    /// It is open for writing.
    Open {
        /// Path in /proc.
        path: PathBuf,
        /// Writer's offset, in bytes: at 0, nothing was written in the usual way.
        offset: u64,
    },
    /// It, or something below it, may be mapped so that stores change it (mmap(2)): what was stored
    /// is in this machine's memory until the kernel writes it out.
    Mapped(PathBuf),
}

impl Writers {
    /// Finds files below some directories that processes below `roots` have open for writing, or
    /// mapped so. Reads /proc only. Of the `waiting` stages it reads nothing: their descriptors are
    /// those that they enlisted with.
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
            let others = pids.into_iter().filter(|pid| !stages.contains(pid)).flat_map(|pid| {
                let mut written = written_by(pid, below, MOST_DESCRIPTORS);
                written.extend(mapped_by(pid, below));
                written
            });
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
    files.map(|d| Written::Open { path: d.path.clone(), offset: d.offset })
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
        writes.then_some(Written::Open { path, offset })
    });
    let mut written: Vec<Written> = written.collect();
    if descriptors.next().is_some() {
        written.extend(below.iter().cloned().map(Written::Mapped));
    }
    written
}

/// Files that a process can store to by a shared mapping, whose descriptor may be closed.
fn mapped_by(pid: Pid, below: &[PathBuf]) -> Vec<Written> {
    let Ok(maps) = fs::File::open(format!("/proc/{pid}/maps")) else { return Vec::new() };
    let mut text = Vec::new();
    match maps.take(MOST_MAPS_BYTES).read_to_end(&mut text) {
        Ok(count) if (count as u64) < MOST_MAPS_BYTES => mapped_in(&text, below),
        _ => below.iter().cloned().map(Written::Mapped).collect(),
    }
}

/// Files of /proc/PID/maps that can be stored to.
fn mapped_in(maps: &[u8], below: &[PathBuf]) -> Vec<Written> {
    let mut written = Vec::new();
    for line in maps.split(|byte| *byte == b'\n') {
        let may_store = line.split(|byte| *byte == b' ').nth(1).is_some_and(|permissions| {
            permissions.get(1) == Some(&b'w') && permissions.get(3) == Some(&b's')
        });
        // The name starts at the first slash, as no earlier column has one.
        let name = line.iter().position(|byte| *byte == b'/').map(|at| &line[at..]);
        let Some(name) = name.filter(|_| may_store) else { continue };
        // A line break is shown as \012.
        if name.windows(4).any(|part| part == br"\012") {
            return below.iter().cloned().map(Written::Mapped).collect();
        }
        let path = Path::new(OsStr::from_bytes(name));
        if below.iter().any(|top| path.starts_with(top)) {
            written.push(Written::Mapped(path.to_owned()));
        }
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
        assert_eq!(found, [Written::Open { path: top.join("written"), offset: 7 }]);
    }

    #[test]
    fn a_process_with_more_descriptors_than_are_looked_at_may_write_to_anything() {
        let top = PathBuf::from("/nowhere");
        let find = |most| written_by(std::process::id(), std::slice::from_ref(&top), most);
        assert_eq!(find(2), [Written::Mapped(top.clone())]);
        assert_eq!(find(MOST_DESCRIPTORS), []);
    }

    #[test]
    fn a_file_that_can_be_stored_to_is_found_when_its_descriptor_is_closed() {
        let top = PathBuf::from("/m/d");
        let find = |line: &str| {
            let text = format!(
                "7f00-7f01 r-xp 00000000 fe:00 123   /lib/a\n{line}\n7f02-7f03 rw-p 00 00:00 0\n"
            );
            mapped_in(text.as_bytes(), std::slice::from_ref(&top))
        };
        let mapped = |path: &str| vec![Written::Mapped(path.into())];
        assert_eq!(find("7f04-7f05 rw-s 0000 0:3 9   /m/d/a b"), mapped("/m/d/a b"));
        assert_eq!(find(r"7f04-7f05 rw-s 0000 0:3 9   /m/a\012b"), mapped("/m/d"));
        for line in ["rw-p 0000 0:3 9 /m/d/f", "r--s 0000 0:3 9 /m/d/f", "rw-s 0000 0:3 9 /m/e"] {
            assert_eq!(find(&format!("7f04-7f05 {line}")), []);
        }
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
        assert_eq!(found, [Written::Open { path: top.join("written"), offset: 4 }]);
        drop((file, read));
        let began = std::time::Instant::now();
        while !find().is_empty() {
            assert!(began.elapsed() < std::time::Duration::from_secs(10), "{:?}", find());
        }
    }
}
