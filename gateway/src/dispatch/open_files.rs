//! Trees in which somebody here has a file open.
//!
//! sshfs names an open file by the directories above it whenever it is written to. Once one of these was removed through
//! the mount (not on the server alone), the file has no name any more, and sshfs 3.7 ends at the next write. So no
//! directory above an open file is ever removed through a mount of sshfs.

use std::{
    collections::BTreeSet,
    ffi::OsStr,
    fs,
    os::unix::ffi::OsStrExt as _,
    path::{Path, PathBuf},
};

/// Those of the directories below which a process of this machine has a file open or mapped (proc_pid_fd(5),
/// proc_pid_maps(5)). Of processes that this one may not look into nothing is known; they can't use a mount of this user,
/// unless it was made with `allow_other`. Blocks.
pub fn above_open_files(directories: &BTreeSet<PathBuf>) -> BTreeSet<PathBuf> {
    let mut found = BTreeSet::new();
    let Ok(processes) = fs::read_dir("/proc") else { return found };
    let own = std::process::id().to_string();
    let is_process = |name: &OsStr| name != OsStr::new(&own) && name.as_bytes().iter().all(u8::is_ascii_digit);
    for process in processes.flatten().filter(|entry| is_process(&entry.file_name())) {
        let descriptors = fs::read_dir(process.path().join("fd")).into_iter().flatten().flatten();
        let open = descriptors.filter_map(|descriptor| fs::read_link(descriptor.path()).ok());
        open.for_each(|path| note(directories, &path, &mut found));
        let maps = fs::read(process.path().join("maps")).unwrap_or_default();
        mapped(&maps).for_each(|path| note(directories, path, &mut found));
    }
    found
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
    fn mapped_files_are_found() {
        let maps = b"7f00-7f01 r--p 00000000 fe:00 123   /m/d/f\n7f02-7f03 rw-p 00000000 00:00 0\n7f04-7f05 rw-s 0 0:3 9 /m/a b (deleted)\n";
        let found: Vec<&Path> = mapped(maps).collect();
        assert_eq!(found, [Path::new("/m/d/f"), Path::new("/m/a b (deleted)")]);
    }
}
