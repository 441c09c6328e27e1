//! Decides if the gateway must be asked about a command, and describes the command to it. The
//! decision is on the path of every local command; the description is made only after a yes.

use std::{
    ffi::OsStr,
    fs::{self, File},
    io::Read,
    os::unix::{
        ffi::{OsStrExt, OsStringExt},
        fs::MetadataExt,
    },
    path::{Path, PathBuf},
};

use fs_mapper::mountinfo::mount_id;
use nix::sys::resource::{Resource, getrlimit};
use posh_proto::{
    PROTOCOL_VERSION,
    stage::{Descriptor, Enlist, ResourceLimit, WindowSize, descriptor::Kind},
};

use super::{
    descriptors,
    entry::{Looked, ShellCommand, StageSession},
    process,
};

/// Resource limits that a command can notice, and that make sense on another machine: CPU time,
/// file size, data, stack, core, open files, address space.
const FORWARDED_LIMITS: [Resource; 7] = [
    Resource::RLIMIT_CPU,
    Resource::RLIMIT_FSIZE,
    Resource::RLIMIT_DATA,
    Resource::RLIMIT_STACK,
    Resource::RLIMIT_CORE,
    Resource::RLIMIT_NOFILE,
    Resource::RLIMIT_AS,
];

/// Usual size of /proc/self/status, with a margin; it grows with the user's groups.
const STATUS_USUAL_BYTES: usize = 4 << 10;
/// Limit for the kernel's 65,536 groups and the rest.
const STATUS_BYTES: u64 = 1 << 20;

/// `None` when the command uses no owned mount, and no pipe joins it to one that might.
pub fn worth_asking(entry: &ShellCommand, session: &StageSession) -> Option<Enlist> {
    let cwd = std::env::current_dir().unwrap_or_default();
    let looked = entry.looked.or_else(|| look(entry, session, &cwd))?;
    Some(describe(entry, session, cwd, looked))
}

fn look(entry: &ShellCommand, session: &StageSession, cwd: &Path) -> Option<Looked> {
    let owned = !session.prefixes.owned().is_empty();
    let touches = session.prefixes.cwd_is_owned(cwd)
        || entry.argv.iter().skip(1).any(|word| session.prefixes.may_touch(word.as_bytes(), cwd))
        || (0..=2).any(|fd| descriptor_touches(fd, session));
    if touches {
        Some(Looked::MayTouch)
    } else if owned && (0..=1).any(descriptors::is_pipe) {
        Some(Looked::PipeOnly)
    } else {
        session.always_enlist.then_some(Looked::MayTouch)
    }
}

fn descriptor_touches(fd: i32, session: &StageSession) -> bool {
    fs::read_link(format!("/proc/self/fd/{fd}"))
        .is_ok_and(|path| session.prefixes.cwd_is_owned(&path))
}

fn describe(entry: &ShellCommand, session: &StageSession, cwd: PathBuf, looked: Looked) -> Enlist {
    let status = ProcStatus::read();
    let descriptors = descriptors::all();
    Enlist {
        protocol: PROTOCOL_VERSION,
        session: session.id.clone(),
        name: entry.name.to_string_lossy().into_owned(),
        program: bytes_of(entry.program.as_os_str()),
        argv: entry.argv.iter().map(|a| bytes_of(a)).collect(),
        env: entry
            .environment
            .iter()
            .map(|v| bytes::Bytes::copy_from_slice(v.to_bytes()))
            .collect(),
        cwd: cwd.into_os_string().into_vec().into(),
        cwd_mount_id: mount_id(rustix::fs::CWD),
        untouched: looked == Looked::PipeOnly,
        childless: process::is_childless(),
        pid: std::process::id(),
        umask: status.umask,
        window_size: window_size(&descriptors),
        descriptors,
        ignored_signals: status.ignored,
        blocked_signals: status.blocked,
        limits: FORWARDED_LIMITS.into_iter().filter_map(limit).collect(),
        nice: rustix::process::getpriority_process(None).unwrap_or(0),
        mount_namespace: fs::metadata("/proc/self/ns/mnt").map_or(0, |m| m.ino()),
        ..Enlist::default()
    }
}

fn bytes_of(word: &OsStr) -> bytes::Bytes {
    bytes::Bytes::copy_from_slice(word.as_bytes())
}

fn limit(resource: Resource) -> Option<ResourceLimit> {
    let (soft, hard) = getrlimit(resource).ok()?;
    Some(ResourceLimit { resource: resource as u32, soft, hard })
}

fn window_size(descriptors: &[Descriptor]) -> Option<WindowSize> {
    let tty = descriptors.iter().find(|d| d.kind() == Kind::Tty && (1..=2).contains(&d.fd))?;
    terminal_size(tty.fd.cast_signed())
}

/// Size of the terminal of a descriptor.
pub fn terminal_size(fd: i32) -> Option<WindowSize> {
    let size = rustix::termios::tcgetwinsize(descriptors::borrow(fd)).ok()?;
    Some(WindowSize {
        rows: size.ws_row.into(),
        columns: size.ws_col.into(),
        x_pixels: size.ws_xpixel.into(),
        y_pixels: size.ws_ypixel.into(),
    })
}

/// Fields of /proc/self/status (proc_pid_status(5)) that a run must inherit.
#[derive(Default)]
struct ProcStatus {
    umask: u32,
    ignored: u64,
    blocked: u64,
}

impl ProcStatus {
    fn read() -> Self {
        let mut text = Vec::with_capacity(STATUS_USUAL_BYTES);
        // Without the limit, std would ask for the size, which is 0 for this file, and then read in
        // pieces of a few bytes.
        let read = File::open("/proc/self/status")
            .and_then(|f| f.take(STATUS_BYTES).read_to_end(&mut text));
        read.map_or_else(|_| Self::default(), |_| Self::parse(&String::from_utf8_lossy(&text)))
    }

    fn parse(text: &str) -> Self {
        let mut found = Self::default();
        for (key, value) in text.lines().filter_map(|line| line.split_once(':')) {
            let value = value.trim();
            match key {
                "Umask" => found.umask = u32::from_str_radix(value, 8).unwrap_or(0o022),
                "SigIgn" => found.ignored = u64::from_str_radix(value, 16).unwrap_or(0),
                "SigBlk" => found.blocked = u64::from_str_radix(value, 16).unwrap_or(0),
                _ => {}
            }
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_is_read_in_its_own_bases() {
        let found = ProcStatus::parse(
            "Name:\tcat\nUmask:\t0027\nSigBlk:\t0000000000010000\nSigIgn:\t0000000000001006\n",
        );
        assert_eq!((found.umask, found.blocked, found.ignored), (0o027, 0x10000, 0x1006));
    }
}
