//! The sshfs processes of this user, from /proc.

use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path};

/// A command line longer than this is not sshfs's.
const MAX_ARGUMENTS: usize = 256;

/// An sshfs process by its command line, without the program's name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Process {
    arguments: Vec<OsString>,
}

/// Those that run now as this user.
pub(super) fn running() -> Vec<Process> {
    let Ok(own) = fs::metadata("/proc/self").map(|process| process.uid()) else { return Vec::new() };
    let entries = fs::read_dir("/proc").into_iter().flatten().filter_map(Result::ok);
    let of_us = entries.filter(|entry| {
        let is_process = entry.file_name().as_encoded_bytes().iter().all(u8::is_ascii_digit);
        is_process && entry.metadata().is_ok_and(|process| process.uid() == own)
    });
    of_us.filter_map(|entry| Process::parse(&fs::read(entry.path().join("cmdline")).ok()?)).collect()
}

impl Process {
    /// From /proc/PID/cmdline; `None` when it is another program.
    pub(super) fn parse(command_line: &[u8]) -> Option<Process> {
        let words = command_line.strip_suffix(b"\0").unwrap_or(command_line);
        let mut words = words.split(|byte| *byte == 0).map(|word| OsString::from_vec(word.to_vec()));
        let program = words.next()?;
        let is_sshfs = Path::new(&program).file_name().is_some_and(|name| name == "sshfs" || name == "mount.sshfs");
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
