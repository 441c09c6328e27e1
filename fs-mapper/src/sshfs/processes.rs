//! The sshfs processes of this user, from /proc.

use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::OsStringExt;
use std::path::{Component, Path};

/// A command line longer than this is not sshfs's.
const MAX_ARGUMENTS: usize = 256;

/// An sshfs process by its command line, without the program's name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Process {
    arguments: Vec<OsString>,
}

/// Those that run now, with this user's rights alone. A command line says nothing by itself: any user can start a
/// set-user-id program under sshfs's name, with words of their own. So all four user ids must be ours, and the program's file must be
/// sshfs's (proc_pid_status(5), proc_pid_exe(5)).
pub(super) fn running() -> Vec<Process> {
    let entries = fs::read_dir("/proc").into_iter().flatten().filter_map(Result::ok);
    let of_us = entries.filter(|entry| {
        let is_process = entry.file_name().as_encoded_bytes().iter().all(u8::is_ascii_digit);
        is_process && is_ours(&entry.path(), &[]) && runs(&entry.path(), &["sshfs"])
    });
    of_us.filter_map(|entry| Process::parse(&fs::read(entry.path().join("cmdline")).ok()?)).collect()
}

/// Whether it runs with this user's rights alone, or with those of one of `others` alone.
pub(crate) fn is_ours(process: &Path, others: &[u32]) -> bool {
    let Some(own) = user_ids(Path::new("/proc/self")) else { return false };
    user_ids(process).is_some_and(|ids| ids == own || others.iter().any(|other| ids == [*other; 4]))
}

/// Real, effective, saved and file system user id.
pub(crate) fn user_ids(process: &Path) -> Option<[u32; 4]> {
    let status = fs::read_to_string(process.join("status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("Uid:"))?;
    let ids: Vec<u32> = line.split_whitespace().map(str::parse).collect::<Result<_, _>>().ok()?;
    ids.try_into().ok()
}

/// Whether the program that it executes has one of these names, also when a newer one has taken the file's place.
pub(crate) fn runs(process: &Path, names: &[&str]) -> bool {
    let Ok(program) = fs::read_link(process.join("exe")) else { return false };
    let name = program.file_name().unwrap_or_default().as_encoded_bytes();
    let name = name.strip_suffix(b" (deleted)").unwrap_or(name);
    names.iter().any(|known| known.as_bytes() == name)
}

/// What argv[0] of an sshfs may be: mount(8) calls it by the names of its helpers.
const NAMES: [&str; 4] = ["sshfs", "mount.sshfs", "mount.fuse.sshfs", "mount.fuse"];

impl Process {
    /// From /proc/PID/cmdline; `None` when it is another program.
    pub(super) fn parse(command_line: &[u8]) -> Option<Process> {
        let words = command_line.strip_suffix(b"\0").unwrap_or(command_line);
        let mut words = words.split(|byte| *byte == 0).map(|word| OsString::from_vec(word.to_vec()));
        let program = words.next()?;
        let is_sshfs = Path::new(&program).file_name().is_some_and(|name| NAMES.iter().any(|known| name == *known));
        let arguments: Vec<_> = words.take(MAX_ARGUMENTS).collect();
        (is_sshfs && arguments.len() < MAX_ARGUMENTS).then_some(Process { arguments })
    }

    /// Its arguments, if they name this source and this mount point. A relative mount point is
    /// one from a directory that the process has left: its end must fit.
    pub(super) fn serves(&self, source: &str, mount_point: &Path) -> Option<&[OsString]> {
        let is_point = |word: &OsString| {
            let end = Path::new(word).components().filter(|part| *part != Component::CurDir);
            let end: std::path::PathBuf = end.collect();
            end.as_os_str() == mount_point.as_os_str()
                || end.is_relative() && end.components().next().is_some() && mount_point.ends_with(&end)
        };
        let named = self.arguments.iter().any(|word| word == source);
        (named && self.arguments.iter().any(is_point)).then_some(&self.arguments)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_under_another_name_is_no_sshfs() {
        use std::os::unix::process::CommandExt as _;
        // As an attacker starts a set-user-id program: sshfs by its argv[0] only.
        let mut command = std::process::Command::new("sleep");
        let mut child = command.arg0("sshfs").args(["600"]).spawn().expect("sleep(1) starts");
        let process = std::path::PathBuf::from(format!("/proc/{}", child.id()));
        let seen = (is_ours(&process, &[]), runs(&process, &["sshfs"]));
        child.kill().and_then(|()| child.wait()).expect("it ends");
        assert_eq!(seen, (true, false));
        assert!(Process::parse(b"mount.fuse.sshfs\0host:/dir\0/mnt\0").is_some());
    }
}
