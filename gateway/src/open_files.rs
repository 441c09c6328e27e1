//! Files that processes of this machine have open or mapped.
//!
//! sshfs names an open file by the directories above it whenever it is written to. Once one of
//! these was removed through the mount (not on the server alone), the file has no name any more,
//! and sshfs 3.7 ends at the next write. So no directory above an open file is ever removed through
//! a mount of sshfs ([`above_open_files`]).

use std::{
    collections::BTreeSet,
    ffi::OsStr,
    fs,
    os::unix::ffi::OsStrExt as _,
    path::{Path, PathBuf},
};

use crate::enlisted::Pid;

/// A file that somebody has open, or mapped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OpenFile {
    /// As /proc shows it.
    pub path: PathBuf,
    /// As its file system numbers it, if the kernel tells (proc_pid_fdinfo(5), since Linux 5.14).
    pub inode: Option<u64>,
}

/// Those of the directories below which a process of this machine has a file open or mapped. Blocks.
pub fn above_open_files(directories: &BTreeSet<PathBuf>) -> BTreeSet<PathBuf> {
    let mut found = BTreeSet::new();
    look(None, |path, _| note(directories, path, &mut found));
    found
}

/// The files below these paths, or at them, that a process other than `but` has open or mapped.
/// Blocks.
pub fn open_below(tops: &[PathBuf], but: Pid) -> Vec<OpenFile> {
    let mut found = Vec::new();
    look(Some(but), |path, inode| {
        if tops.iter().any(|top| path.starts_with(top)) {
            found.push(OpenFile { path: path.to_owned(), inode: inode() });
        }
    });
    found
}

/// Calls `found` with each open or mapped file and a way to its inode (proc_pid_fd(5),
/// proc_pid_maps(5)). Processes that this one may not look into are passed over: they can't use a
/// mount of this user, unless it was made with `allow_other`.
fn look(but: Option<Pid>, mut found: impl FnMut(&Path, &dyn Fn() -> Option<u64>)) {
    let Ok(processes) = fs::read_dir("/proc") else { return };
    let passed_over = [Some(std::process::id()), but];
    let pid = |entry: &fs::DirEntry| entry.file_name().to_str()?.parse::<Pid>().ok();
    for process in processes.flatten().filter(|entry| pid(entry).is_some_and(|pid| !passed_over.contains(&Some(pid)))) {
        let process = process.path();
        // Of one whose first thread has ended, the others show what it has.
        let has_some = fs::read_dir(process.join("fd")).is_ok_and(|mut table| table.next().is_some());
        let tables = if has_some {
            vec![process.clone()]
        } else {
            fs::read_dir(process.join("task")).into_iter().flatten().flatten().map(|task| task.path()).collect()
        };
        for table in tables {
            for descriptor in fs::read_dir(table.join("fd")).into_iter().flatten().flatten() {
                let Ok(path) = fs::read_link(descriptor.path()) else { continue };
                found(&path, &|| inode_of(&table.join("fdinfo").join(descriptor.file_name())));
            }
        }
        let maps = fs::read(process.join("maps")).unwrap_or_default();
        mapped(&maps).for_each(|path| found(path, &|| None));
    }
}

fn inode_of(info: &Path) -> Option<u64> {
    let info = fs::read_to_string(info).ok()?;
    info.lines().find_map(|line| line.strip_prefix("ino:")?.trim().parse().ok())
}

fn note(directories: &BTreeSet<PathBuf>, path: &Path, found: &mut BTreeSet<PathBuf>) {
    found.extend(path.ancestors().skip(1).filter_map(|above| directories.get(above)).cloned());
}

/// The files of /proc/PID/maps: what follows the first slash of a line, since no earlier column has one.
fn mapped(maps: &[u8]) -> impl Iterator<Item = &Path> {
    let lines = maps.split(|byte| *byte == b'\n');
    lines.filter_map(|line| {
        line.iter().position(|byte| *byte == b'/').map(|at| Path::new(OsStr::from_bytes(&line[at..])))
    })
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn directories_above_files_that_others_have_open_are_found() {
        let place = tempfile::tempdir().unwrap();
        let place = place.path().canonicalize().unwrap();
        let [open, other] = ["open", "other"].map(|name| place.join(name));
        fs::create_dir_all(open.join("deep")).unwrap();
        fs::create_dir(&other).unwrap();
        let path = open.join("deep/f");
        fs::write(&path, "x").unwrap();
        let all = BTreeSet::from([open.clone(), open.join("deep"), other]);
        assert!(above_open_files(&all).is_empty());
        let file = fs::File::open(&path).unwrap();
        let mut holder = Command::new("sleep").arg("1000").stdin(Stdio::from(file)).spawn().unwrap();
        let expected = BTreeSet::from([open.clone(), open.join("deep")]);
        let found = above_open_files(&all);
        // Also when its name and its directories are gone.
        fs::remove_dir_all(&open).unwrap();
        let found_later = above_open_files(&all);
        holder.kill().unwrap();
        holder.wait().unwrap();
        assert_eq!((found, found_later), (expected.clone(), expected));
    }

    #[test]
    fn files_below_a_path_are_found_with_their_inodes_but_for_one_process() {
        use std::os::unix::fs::MetadataExt as _;

        let place = tempfile::tempdir().unwrap();
        let place = place.path().canonicalize().unwrap();
        let path = place.join("f");
        fs::write(&path, "x").unwrap();
        let file = fs::File::open(&path).unwrap();
        let inode = file.metadata().unwrap().ino();
        let mut holder = Command::new("sleep").arg("1000").stdin(Stdio::from(file)).spawn().unwrap();
        let look = |top: &Path, but| open_below(&[top.to_owned()], but);
        let found = [look(&place, 0), look(&path, 0), look(&place.join("other"), 0), look(&place, holder.id())];
        holder.kill().unwrap();
        holder.wait().unwrap();
        let held = vec![OpenFile { path, inode: Some(inode) }];
        assert_eq!(found, [held.clone(), held, Vec::new(), Vec::new()]);
    }

    #[test]
    fn mapped_files_are_found() {
        let maps = b"7f00-7f01 r--p 00000000 fe:00 123   /m/d/f\n7f02-7f03 rw-p 00000000 00:00 0\n7f04-7f05 rw-s 0 0:3 9 /m/a b (deleted)\n";
        let found: Vec<&Path> = mapped(maps).collect();
        assert_eq!(found, [Path::new("/m/d/f"), Path::new("/m/a b (deleted)")]);
    }
}
