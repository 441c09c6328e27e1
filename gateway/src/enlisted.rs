//! One intercepted command as its stage program described it: plain values, converted from the wire
//! message once, so that no other code sees protobuf.

use std::{
    ffi::{OsStr, OsString},
    fs,
    os::unix::ffi::{OsStrExt, OsStringExt},
    path::{Path, PathBuf},
};

use posh_proto::stage::{self as wire, descriptor::Kind as WireKind};

use crate::model::LocalReason;

/// Process ID on this machine.
pub type Pid = u32;

/// Everything that the shell prepared for the command.
#[derive(Debug, Clone)]
pub struct Enlisted {
    /// Session ID.
    pub session: String,
    /// Process of the stage program, which the shell takes for the command's.
    pub pid: Pid,
    /// Name on PATH.
    pub name: String,
    /// Path of the real program on this machine.
    pub program: PathBuf,
    /// Arguments, including `argv[0]`.
    pub argv: Vec<OsString>,
    /// The environment, in order.
    pub env: Vec<(OsString, OsString)>,
    /// Absolute; empty when the directory was deleted.
    pub cwd: PathBuf,
    /// Mount ID of the working directory (statx(2)); `None` for a command without a stage program.
    pub cwd_mount_id: Option<u64>,
    /// File mode creation mask.
    pub umask: u32,
    /// Every open descriptor, by number.
    pub descriptors: Vec<Descriptor>,
    /// Bit n-1 is signal n.
    pub ignored_signals: u64,
    /// Bit n-1 is signal n.
    pub blocked_signals: u64,
    /// (RLIMIT number, soft, hard).
    pub limits: Vec<(u32, u64, u64)>,
    /// Scheduling niceness.
    pub nice: i32,
    /// Inode of its mount namespace.
    pub mount_namespace: u64,
    /// Size of the terminal that it writes to, if it does.
    pub window: Option<Window>,
    /// It has no children, not even from before its exec as the shell's child: for a process
    /// substitution among its redirects.
    pub childless: bool,
    /// Reason for running locally whatever its neighbours are: it may replace a file that a local
    /// process has open.
    pub must_stay: Option<LocalReason>,
    /// Its process was compared and has exactly the gateway's own rights. Without them, the gateway
    /// does nothing for it.
    pub has_own_rights: bool,
    /// Reason for running locally wherever its output goes, unless its input is piped: none of its
    /// files are on an owned mount, by the quick look or by its annotation, or a volume has them
    /// cached.
    pub stays: Option<LocalReason>,
}

/// A terminal's size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Window {
    /// Lines.
    pub rows: u32,
    /// Characters in a line.
    pub columns: u32,
}

/// One open descriptor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Descriptor {
    /// Descriptor number.
    pub fd: u32,
    /// Type of the file.
    pub kind: DescriptorKind,
    /// Path in /proc/self/fd.
    pub path: PathBuf,
    /// Device and inode; a pipe's inode identifies it.
    pub identity: (u64, u64),
    /// Mount ID of a file (statx(2)); `None` for a command without a stage program.
    pub mount_id: Option<u64>,
    /// Flags of fcntl(F_GETFL).
    pub flags: u32,
    /// Offset in a file, in bytes.
    pub offset: u64,
    /// File on an owned mount; unknown files count as such.
    pub on_mount: bool,
    /// The file may have been opened before the command, so its name may now be another file's
    /// (`fresh`).
    pub is_older: bool,
    /// Bytes queued in a pipe.
    pub queued_bytes: u64,
    /// Lower descriptor with the same open file description, if known.
    pub same_as: Option<u32>,
}

/// Type of a descriptor's file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DescriptorKind {
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// A pipe or FIFO.
    Pipe,
    /// A terminal.
    Tty,
    /// /dev/null.
    Null,
    /// A socket.
    Socket,
    /// Anything else.
    Other,
}

impl Enlisted {
    /// A process's description of a command that it is about to execute: just enough to decide if
    /// the command runs locally. Assumes the gateway's own mount namespace: in another one, the
    /// answer is to run locally too, or the process becomes a stage, which reports its namespace.
    /// `None` if another command may be involved, or the process can't be inspected.
    #[must_use]
    pub fn about_to_execute(
        question: wire::Question,
        pid: Pid,
        mount_namespace: u64,
    ) -> Option<Self> {
        let argv: Vec<OsString> = question.argv.iter().map(|a| os(a)).collect();
        if argv.iter().any(|word| descriptor_named_by(word).is_some()) {
            return None;
        }
        let mut descriptors = Vec::new();
        for fd in (0..=2).filter(|fd| question.streams & 1 << fd != 0) {
            let path = fs::read_link(format!("/proc/{pid}/fd/{fd}")).ok()?;
            descriptors.push(Descriptor::without_details(fd, DescriptorKind::File, path, 0));
        }
        // The order of descriptors and pipes does not matter.
        let pipes = (1..=2).filter(|fd| question.streams & 1 << fd == 0).zip(question.writes);
        descriptors.extend(pipes.map(|(fd, pipe)| {
            Descriptor::without_details(fd, DescriptorKind::Pipe, PathBuf::new(), pipe)
        }));
        let (program, cwd) = (os(&question.program), os(&question.cwd));
        Self::without_details(pid, program.into(), argv, cwd.into(), descriptors, mount_namespace)
    }

    fn without_details(
        pid: Pid,
        program: PathBuf,
        argv: Vec<OsString>,
        cwd: PathBuf,
        descriptors: Vec<Descriptor>,
        mount_namespace: u64,
    ) -> Option<Self> {
        Some(Self {
            session: String::new(),
            pid,
            name: program.file_name()?.to_string_lossy().into_owned(),
            program,
            argv,
            env: Vec::new(),
            cwd,
            cwd_mount_id: None,
            // Accepted by every mount.
            umask: 0o777,
            descriptors,
            ignored_signals: 0,
            blocked_signals: 0,
            limits: Vec::new(),
            nice: 0,
            mount_namespace,
            window: None,
            childless: false,
            must_stay: None,
            has_own_rights: false,
            stays: None,
        })
    }

    /// Descriptor of that number, if open.
    #[must_use]
    pub fn descriptor(&self, fd: u32) -> Option<&Descriptor> {
        self.descriptors.iter().find(|d| d.fd == fd)
    }

    /// Variable of its environment; the first one counts, as for getenv(3).
    #[must_use]
    pub fn variable(&self, name: &str) -> Option<&OsStr> {
        self.env.iter().find(|(n, _)| n == name).map(|(_, v)| v.as_os_str())
    }

    /// Descriptors above 2 that the words name (`/dev/fd/63`, `/proc/self/fd/63`): process
    /// substitution.
    pub fn named_descriptors(&self) -> impl Iterator<Item = &Descriptor> {
        self.argv
            .iter()
            .skip(1)
            .filter_map(|word| self.descriptor(descriptor_named_by(word)?))
            .filter(|d| d.fd > 2)
    }
}

/// Number in `/dev/fd/N` and similar paths.
#[must_use]
pub fn descriptor_named_by(path: &OsStr) -> Option<u32> {
    let path = Path::new(path);
    let rest = match path.to_str()? {
        "/dev/stdin" => return Some(0),
        "/dev/stdout" => return Some(1),
        "/dev/stderr" => return Some(2),
        text => text.strip_prefix("/dev/fd/").or_else(|| text.strip_prefix("/proc/self/fd/"))?,
    };
    rest.parse().ok()
}

impl Descriptor {
    fn without_details(fd: u32, kind: DescriptorKind, path: PathBuf, pipe: u64) -> Self {
        let access = if fd == 0 { nix::libc::O_RDONLY } else { nix::libc::O_WRONLY };
        let (flags, identity) = (access.cast_unsigned(), (0, pipe));
        Self {
            fd,
            kind,
            path,
            identity,
            mount_id: None,
            flags,
            offset: 0,
            on_mount: true,
            is_older: false,
            queued_bytes: 0,
            same_as: None,
        }
    }

    /// Descriptor that a shell would open, known only from the text.
    #[must_use]
    pub fn imagined(fd: u32, kind: DescriptorKind, path: PathBuf, flags: i32) -> Self {
        Self { kind, flags: flags.cast_unsigned(), ..Self::without_details(fd, kind, path, 0) }
    }

    /// Returns true if reading is allowed.
    #[must_use]
    pub fn reads(&self) -> bool {
        self.access() != nix::libc::O_WRONLY
    }

    /// Returns true if writing is allowed.
    #[must_use]
    pub fn writes(&self) -> bool {
        self.access() != nix::libc::O_RDONLY
    }

    fn access(&self) -> i32 {
        self.flags.cast_signed() & nix::libc::O_ACCMODE
    }
}

fn os(bytes: &[u8]) -> OsString {
    OsString::from_vec(bytes.to_vec())
}

impl From<wire::Enlist> for Enlisted {
    fn from(message: wire::Enlist) -> Self {
        Self {
            session: message.session,
            pid: message.pid,
            name: message.name,
            program: os(&message.program).into(),
            argv: message.argv.iter().map(|a| os(a)).collect(),
            env: message.env.iter().filter_map(|e| variable(e)).collect(),
            cwd: os(&message.cwd).into(),
            cwd_mount_id: Some(message.cwd_mount_id),
            umask: message.umask,
            descriptors: message.descriptors.iter().map(Descriptor::from).collect(),
            ignored_signals: message.ignored_signals,
            blocked_signals: message.blocked_signals,
            limits: message.limits.iter().map(|l| (l.resource, l.soft, l.hard)).collect(),
            nice: message.nice,
            mount_namespace: message.mount_namespace,
            childless: message.childless,
            must_stay: None,
            has_own_rights: false,
            stays: message.untouched.then_some(LocalReason::nothing_on_mounts()),
            window: message.window_size.map(|w| Window { rows: w.rows, columns: w.columns }),
        }
    }
}

fn variable(entry: &[u8]) -> Option<(OsString, OsString)> {
    let equals = entry.iter().position(|&b| b == b'=')?;
    Some((
        OsStr::from_bytes(&entry[..equals]).to_owned(),
        OsStr::from_bytes(&entry[equals + 1..]).to_owned(),
    ))
}

impl From<&wire::Descriptor> for Descriptor {
    fn from(message: &wire::Descriptor) -> Self {
        let kind = match message.kind() {
            WireKind::File => DescriptorKind::File,
            WireKind::Directory => DescriptorKind::Directory,
            WireKind::Pipe => DescriptorKind::Pipe,
            WireKind::Tty => DescriptorKind::Tty,
            WireKind::Null => DescriptorKind::Null,
            WireKind::Socket => DescriptorKind::Socket,
            WireKind::Other => DescriptorKind::Other,
        };
        Self {
            fd: message.fd,
            kind,
            path: os(&message.path).into(),
            identity: (message.device, message.inode),
            mount_id: Some(message.mount_id),
            flags: message.flags,
            offset: message.offset,
            on_mount: true,
            is_older: false,
            queued_bytes: message.queued_bytes,
            same_as: message.same_as,
        }
    }
}
