//! One intercepted command as its stage program described it: plain values, made
//! from the wire message once, so that nothing behind this file sees protobuf.

use std::{
    borrow::Cow,
    ffi::{OsStr, OsString},
    fs,
    os::unix::ffi::{OsStrExt, OsStringExt},
    path::{Path, PathBuf},
};

use posh_proto::stage::{self as wire, descriptor::Kind as WireKind};

use crate::plan::NOTHING_ON_MOUNTS;

/// A process id of this machine.
pub type Pid = u32;

/// Everything that the shell had prepared for the command.
#[derive(Debug, Clone)]
pub struct Enlisted {
    /// The session it belongs to.
    pub session: String,
    /// The stage program's process, which is the command's in the shell's eyes.
    pub pid: Pid,
    /// As found on PATH.
    pub name: String,
    /// The real program on this machine.
    pub program: PathBuf,
    /// Final words, `argv[0]` included.
    pub argv: Vec<OsString>,
    /// The environment, in order.
    pub env: Vec<(OsString, OsString)>,
    /// Absolute; empty when the directory was deleted.
    pub cwd: PathBuf,
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
    /// Of the terminal it writes to, if it does.
    pub window: Option<Window>,
    /// It has started nobody, also not as the shell's child that it was before its exec: for a
    /// process substitution among its redirects.
    pub childless: bool,
    /// Why it runs here whatever it is joined with: it may replace a file that somebody here has
    /// open.
    pub must_stay: Option<String>,
    /// Why it runs here wherever its output goes, unless something is piped to it: nothing of it is
    /// on an owned mount, by the quick look or by its annotation, or a volume has it at hand.
    pub stays: Option<Cow<'static, str>>,
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
    /// Its number.
    pub fd: u32,
    /// What it is.
    pub kind: Kind,
    /// What /proc/self/fd says of it.
    pub path: PathBuf,
    /// Device and inode; for pipes the inode names the pipe.
    pub identity: (u64, u64),
    /// As fcntl(F_GETFL) gives them.
    pub flags: u32,
    /// Of a file, in bytes.
    pub offset: u64,
    /// Of a file: whether it is on an owned mount; what can't be told counts as such.
    pub on_mount: bool,
    /// Of a file: it may have been opened before the command, so that its name may be another
    /// file's (`fresh`).
    pub is_older: bool,
    /// Bytes waiting in a pipe.
    pub queued_bytes: u64,
    /// Lower numbered descriptor with the very same open file description, if known.
    pub same_as: Option<u32>,
}

/// What a descriptor is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
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
    /// What a process says that is about to execute a command: enough to tell whether that stays
    /// here, and nothing more. It is believed to be in the gateway's own mount namespace: of
    /// another one it would hear that it stays, too, or become a stage, which says. `None` where
    /// another command may have to do with it, or it can't be seen.
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
            descriptors.push(Descriptor::without_details(fd, Kind::File, path, 0));
        }
        // Which of the two it writes to which pipe does not matter.
        let pipes = (1..=2).filter(|fd| question.streams & 1 << fd == 0).zip(question.writes);
        descriptors.extend(
            pipes.map(|(fd, pipe)| {
                Descriptor::without_details(fd, Kind::Pipe, PathBuf::new(), pipe)
            }),
        );
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
            // One that every mount takes.
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
            stays: None,
        })
    }

    /// The descriptor of that number, if it is open.
    #[must_use]
    pub fn descriptor(&self, fd: u32) -> Option<&Descriptor> {
        self.descriptors.iter().find(|d| d.fd == fd)
    }

    /// A variable of its environment; the first one counts, as for getenv(3).
    #[must_use]
    pub fn variable(&self, name: &str) -> Option<&OsStr> {
        self.env.iter().find(|(n, _)| n == name).map(|(_, v)| v.as_os_str())
    }

    /// Descriptors above 2 that the words name (`/dev/fd/63`, `/proc/self/fd/63`):
    /// process substitution.
    pub fn named_descriptors(&self) -> impl Iterator<Item = &Descriptor> {
        self.argv
            .iter()
            .skip(1)
            .filter_map(|word| self.descriptor(descriptor_named_by(word)?))
            .filter(|d| d.fd > 2)
    }
}

/// The number in `/dev/fd/N` and its like.
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
    fn without_details(fd: u32, kind: Kind, path: PathBuf, pipe: u64) -> Self {
        let access = if fd == 0 { nix::libc::O_RDONLY } else { nix::libc::O_WRONLY };
        let (flags, identity) = (access.cast_unsigned(), (0, pipe));
        Self {
            fd,
            kind,
            path,
            identity,
            flags,
            offset: 0,
            on_mount: true,
            is_older: false,
            queued_bytes: 0,
            same_as: None,
        }
    }

    /// One that a shell would open, of which the text is all that is known.
    #[must_use]
    pub fn imagined(fd: u32, kind: Kind, path: PathBuf, flags: i32) -> Self {
        Self { kind, flags: flags.cast_unsigned(), ..Self::without_details(fd, kind, path, 0) }
    }

    /// Whether reading is allowed.
    #[must_use]
    pub fn reads(&self) -> bool {
        self.access() != nix::libc::O_WRONLY
    }

    /// Whether writing is allowed.
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
            umask: message.umask,
            descriptors: message.descriptors.iter().map(Descriptor::from).collect(),
            ignored_signals: message.ignored_signals,
            blocked_signals: message.blocked_signals,
            limits: message.limits.iter().map(|l| (l.resource, l.soft, l.hard)).collect(),
            nice: message.nice,
            mount_namespace: message.mount_namespace,
            childless: message.childless,
            must_stay: None,
            stays: message.untouched.then_some(Cow::Borrowed(NOTHING_ON_MOUNTS)),
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
            WireKind::File => Kind::File,
            WireKind::Directory => Kind::Directory,
            WireKind::Pipe => Kind::Pipe,
            WireKind::Tty => Kind::Tty,
            WireKind::Null => Kind::Null,
            WireKind::Socket => Kind::Socket,
            WireKind::Other => Kind::Other,
        };
        Self {
            fd: message.fd,
            kind,
            path: os(&message.path).into(),
            identity: (message.device, message.inode),
            flags: message.flags,
            offset: message.offset,
            on_mount: true,
            is_older: false,
            queued_bytes: message.queued_bytes,
            same_as: message.same_as,
        }
    }
}
