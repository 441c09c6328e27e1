//! Files that processes of this machine have open or mapped.
//!
//! sshfs names an open file by the directories above it whenever it is written to. Once one of
//! these was removed through the mount (not on the server alone), the file has no name any more,
//! and sshfs 3.7 ends at the next write. So no directory above an open file is ever removed through
//! a mount of sshfs ([`above_open_files`]).
//!
//! It also knows files by their names: an open file and the one that gets its name on the server
//! have one size and one cache here, and a reader would get some of both. Under a shell alone the
//! name is given away through the mount, whose kernel tells the two apart. So a command that may
//! replace an open file on an sshfs mount runs locally ([`OpenFiles::why_local`]). What another
//! machine replaces confuses sshfs under a shell alone, too.

use std::{
    collections::BTreeSet,
    ffi::OsStr,
    fs,
    os::unix::ffi::OsStrExt as _,
    path::{Path, PathBuf},
};

use fs_mapper::{MountTable, coherence::Adapter};
use posh_proto::rule::{self, Rule};

use crate::{
    aside::Growing,
    enlisted::{Descriptor, Pid},
    facts::{Place, Reading},
    lower,
};

/// Looks for open files, which takes the longer the more processes there are.
#[derive(Debug, Default)]
pub struct OpenFiles {
    looking: Growing,
}

impl OpenFiles {
    /// Tells why a command that may change names has to run locally: it may replace a file on an
    /// sshfs mount that a process other than `stage` has open.
    pub fn why_local(&self, table: &MountTable, stage: Pid, reading: &Reading) -> Option<String> {
        if !rule::holds(Rule::Coherence) {
            return None;
        }
        let files = reading.invocation.files.iter().zip(&reading.places);
        let written = files.filter(|(file, _)| file.kind.writes()).filter_map(|(_, place)| match place {
            Some(Place::At(_, path, mount)) => Some((path.as_path().to_owned(), *mount)),
            _ => None,
        });
        let all = written.chain(lower::watched_places(table, reading));
        let on_sshfs = all.filter(|(_, mount)| table.mount(*mount).adapter() == Adapter::Sshfs);
        let tops: Vec<PathBuf> = on_sshfs.map(|(path, _)| path).collect();
        if tops.is_empty() {
            return None;
        }
        let path = self.looking.run(|| open_below(&tops, stage))?;
        Some(format!("it may replace {}, which a process here has open", path.display()))
    }
}

/// Whether a process has the file of another one's descriptor open, or that can't be told. A file
/// that is renamed meanwhile keeps its inode, whose number other file systems may have, too.
#[must_use]
pub fn has_open(pid: Pid, (owner, file): (Pid, &Descriptor)) -> bool {
    let process = |pid: Pid| Path::new("/proc").join(pid.to_string());
    let own = identity_of(&process(owner).join("fdinfo").join(file.fd.to_string()));
    let descriptors = fs::read_dir(process(pid).join("fd"));
    let (Some(own), Ok(descriptors)) = (own, descriptors) else { return true };
    descriptors.flatten().any(|descriptor| {
        fs::read_link(descriptor.path()).is_ok_and(|path| path == file.path)
            || identity_of(&process(pid).join("fdinfo").join(descriptor.file_name())) == Some(own)
    })
}

/// Those of the directories below which a process of this machine has a file open or mapped.
/// Blocks.
pub fn above_open_files(directories: &BTreeSet<PathBuf>) -> BTreeSet<PathBuf> {
    let mut found = BTreeSet::new();
    look(None, |path| note(directories, path, &mut found));
    found
}

/// A file below these paths, or at one, that a process other than `but` has open or mapped. Blocks.
fn open_below(tops: &[PathBuf], but: Pid) -> Option<PathBuf> {
    let mut found = None;
    look(Some(but), |path| {
        if found.is_none() && tops.iter().any(|top| path.starts_with(top)) {
            found = Some(path.to_owned());
        }
    });
    found
}

/// Calls `found` with each open or mapped file (proc_pid_fd(5), proc_pid_maps(5)). Processes that this one may not look into are passed over: they can't use a
/// mount of this user, unless it was made with `allow_other`.
fn look(but: Option<Pid>, mut found: impl FnMut(&Path)) {
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
                found(&path);
            }
        }
        let maps = fs::read(process.join("maps")).unwrap_or_default();
        mapped(&maps).for_each(&mut found);
    }
}

/// Mount and inode of an open file (proc_pid_fdinfo(5), since Linux 5.14).
fn identity_of(info: &Path) -> Option<(u64, u64)> {
    let info = fs::read_to_string(info).ok()?;
    let number = |name: &str| info.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok());
    Some((number("mnt_id:")?, number("ino:")?))
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
    use crate::enlisted::Kind;

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
    fn a_file_below_a_path_is_found_but_for_one_process() {
        let place = tempfile::tempdir().unwrap();
        let place = place.path().canonicalize().unwrap();
        let path = place.join("f");
        fs::write(&path, "x").unwrap();
        let file = fs::File::open(&path).unwrap();
        let mut holder = Command::new("sleep").arg("1000").stdin(Stdio::from(file)).spawn().unwrap();
        let look = |top: &Path, but| open_below(&[top.to_owned()], but);
        let found = [look(&place, 0), look(&path, 0), look(&place.join("other"), 0), look(&place, holder.id())];
        holder.kill().unwrap();
        holder.wait().unwrap();
        assert_eq!(found, [Some(path.clone()), Some(path), None, None]);
    }

    #[test]
    fn an_open_file_is_known_by_its_name_and_by_its_inode() {
        use std::os::fd::AsRawFd as _;

        let place = tempfile::tempdir().unwrap();
        let place = place.path().canonicalize().unwrap();
        let open = |name: &str| {
            fs::write(place.join(name), "x").unwrap();
            fs::File::open(place.join(name)).unwrap()
        };
        let (held, other) = (open("f"), open("g"));
        let own = std::process::id();
        let mut holder = Command::new("sleep").arg("1000").stdin(Stdio::from(open("f"))).spawn().unwrap();
        let is_open = |file: &fs::File, name: &str| {
            let fd = u32::try_from(file.as_raw_fd()).unwrap();
            has_open(holder.id(), (own, &Descriptor::imagined(fd, Kind::File, place.join(name), 0)))
        };
        let found = [is_open(&held, "renamed"), is_open(&other, "f"), is_open(&other, "g")];
        holder.kill().unwrap();
        holder.wait().unwrap();
        assert_eq!(found, [true, true, false]);
        let closed = Descriptor::imagined(u32::MAX, Kind::File, place.join("g"), 0);
        assert!(has_open(own, (own, &closed)), "it can't be told");
    }

    #[test]
    fn mapped_files_are_found() {
        let maps = b"7f00-7f01 r--p 00000000 fe:00 123   /m/d/f\n7f02-7f03 rw-p 00000000 00:00 0\n7f04-7f05 rw-s 0 0:3 9 /m/a b (deleted)\n";
        let found: Vec<&Path> = mapped(maps).collect();
        assert_eq!(found, [Path::new("/m/d/f"), Path::new("/m/a b (deleted)")]);
    }
}
