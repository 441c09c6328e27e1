//! Rights of a process, as far as the kernel shows them to others (proc_pid_status(5)). Offloaded
//! commands have the rights of the gateway's user on the server, and the arguments of a FUSE daemon
//! choose what the gateway starts. A process with fewer rights than the gateway (a changed root
//! directory, another mount, user or network namespace, fewer capabilities, other groups, seccomp
//! filters, a security label) must not regain them through the gateway. In another network
//! namespace, besides, an executor's address names another machine.
//!
//! Invariants:
//! * A command is offloaded, and a daemon's arguments are trusted, only if its process has exactly
//!   our own rights.
//! * No process blocks us for longer than [`LIMIT`]: its root directory may be on a file system
//!   that never answers. The root is compared last, only if nothing else differs, and without a
//!   request to that file system. On a timeout the process counts as having other rights.
//!
//! The kernel does not show Landlock domains. A process that enters one has `no_new_privs`, which
//! is compared, or `CAP_SYS_ADMIN`. So a gateway that has `no_new_privs` itself offloads nothing. A
//! domain that root enters without `no_new_privs` goes unnoticed.

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, SyncSender};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use nix::sys::signal::{SigSet, SigmaskHow};
use rustix::fs::{AtFlags, Mode, OFlags, StatxFlags, openat, statat, statx};

use crate::process::Process;

/// Compared lines of `/proc/PID/status`, and the words for a difference. A kernel without a line
/// lacks it for both processes.
const COMPARED: [(&str, &str); 8] = [
    ("Uid", "another user"),
    ("Gid", "another group"),
    (GROUPS, "other groups"),
    ("CapEff", "other capabilities"),
    ("CapBnd", "other capabilities"),
    ("NoNewPrivs", "no_new_privs"),
    ("Seccomp", "a filter of system calls"),
    ("Seccomp_filters", "other filters of system calls"),
];
const GROUPS: &str = "Groups";

/// Namespaces that determine which files a path names, the user's rights, and which machine an
/// address names.
const NAMESPACES: [(&str, &str); 3] = [
    ("mnt", "another mount namespace"),
    ("user", "another user namespace"),
    ("net", "another network namespace"),
];

/// A process may have 65,536 groups of ten digits each.
const MOST_STATUS_BYTES: u64 = 1 << 20;
/// Longer than any security module's label.
const MOST_LABEL_BYTES: u64 = 1 << 16;

/// Timeout for looking up a process's root directory.
pub const LIMIT: Duration = Duration::from_secs(1);
/// Acceptable delay while blocking other tasks.
const SHORT: Duration = Duration::from_millis(1);
/// Limit on blocked threads, none of which can be ended.
const MOST_UNANSWERED: usize = 16;

/// Runs work that may block for up to [`LIMIT`] without blocking other tasks.
pub type Aside = fn(&mut dyn FnMut());

/// Runs the work directly, for a caller without other tasks.
pub fn at_once(work: &mut dyn FnMut()) {
    work();
}

/// Rights of this process.
#[derive(Debug)]
pub struct Rights {
    at_hand: AtHand,
    root: Root,
}

/// Rights that the kernel shows without the risk of blocking.
#[derive(Debug)]
struct AtHand {
    /// Inode numbers; `None` if the kernel lacks the namespace type.
    namespaces: [Option<u64>; NAMESPACES.len()],
    status: [Option<String>; COMPARED.len()],
    /// Label of a Linux security module; `None` without one.
    label: Option<Vec<u8>>,
}

/// Root directory: device, inode and mount. The mount matters as a bind mount of the same directory
/// may show other files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Root {
    device: (u32, u32),
    inode: u64,
    mount: u64,
}

impl Rights {
    /// Reads this process's rights.
    ///
    /// # Errors
    /// /proc is not mounted.
    pub fn own() -> io::Result<Self> {
        let process = Process::own()?;
        Ok(Self { at_hand: AtHand::of(&process)?, root: Root::of(&process)? })
    }

    /// Difference that forbids offloading a process's command or trusting its arguments, in words
    /// that follow "it runs with".
    ///
    /// # Errors
    /// As [`Rights::difference`].
    pub fn keep_here(&self, process: &Process, aside: Aside) -> io::Result<Option<&'static str>> {
        let has_no_new_privs = COMPARED
            .iter()
            .zip(&self.at_hand.status)
            .any(|((name, _), value)| *name == "NoNewPrivs" && value.as_deref() == Some("1"));
        let unknown = has_no_new_privs
            .then_some("no_new_privs, as the gateway, which can't see a Landlock domain then");
        Ok(self.difference(process, aside)?.or(unknown))
    }

    /// Difference between another process's rights and these, in words that follow "it runs with".
    ///
    /// # Errors
    /// The process has ended, has rights that this process lacks, or its root directory does not
    /// answer.
    pub fn difference(&self, process: &Process, aside: Aside) -> io::Result<Option<&'static str>> {
        if let Some(words) = self.at_hand.difference(&AtHand::of(process)?) {
            return Ok(Some(words));
        }
        let root = LOOKS.within_limit(process.again()?, aside)?;
        Ok((root != self.root).then_some("another root directory"))
    }
}

impl AtHand {
    fn of(process: &Process) -> io::Result<Self> {
        let namespace = |name| {
            statat(process.directory(), format!("ns/{name}"), AtFlags::empty())
                .ok()
                .map(|found| found.st_ino)
        };
        let status = process.read("status", MOST_STATUS_BYTES)?;
        let status = String::from_utf8_lossy(&status);
        let lines: BTreeMap<&str, &str> =
            status.lines().filter_map(|line| line.split_once(':')).collect();
        let line = |name: &str| {
            let value = lines.get(name)?.trim();
            Some(if name == GROUPS { groups(value, lines.get("Gid")?) } else { value.to_owned() })
        };
        Ok(Self {
            namespaces: NAMESPACES.map(|(name, _)| namespace(name)),
            status: COMPARED.map(|(name, _)| line(name)),
            label: process.read("attr/current", MOST_LABEL_BYTES).ok(),
        })
    }

    fn difference(&self, other: &Self) -> Option<&'static str> {
        let namespaces =
            self.namespaces.iter().zip(&other.namespaces).map(|(own, other)| own == other);
        let status = self.status.iter().zip(&other.status).map(|(own, other)| own == other);
        let words = NAMESPACES.iter().chain(&COMPARED).map(|(_, words)| *words);
        let label = (self.label != other.label).then_some("another security label");
        namespaces
            .chain(status)
            .zip(words)
            .find_map(|(same, words)| (!same).then_some(words))
            .or(label)
    }
}

/// All groups that count for opening a file. root's login shell has its own group among the
/// supplementary ones, and systemd's services do not: both are equal.
fn groups(others: &str, own: &str) -> String {
    let own = own.split_whitespace().last();
    let mut all: Vec<&str> = others.split_whitespace().chain(own).collect();
    all.sort_unstable();
    all.dedup();
    all.join(" ")
}

impl Root {
    /// Opening a directory with O_PATH sends no request to a FUSE file system, and neither does
    /// this statx(2).
    fn of(process: &Process) -> io::Result<Self> {
        let root =
            openat(process.directory(), "root", OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
        let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
        let found = statx(&root, c"", flags, StatxFlags::MNT_ID | StatxFlags::INO)?;
        Ok(Self {
            device: (found.stx_dev_major, found.stx_dev_minor),
            inode: found.stx_ino,
            mount: found.stx_mnt_id,
        })
    }
}

/// Thread pool that looks up root directories, which may never answer. Idle threads are reused:
/// starting one takes as long as the rest of a comparison.
#[derive(Debug)]
struct Looks {
    look: fn(&Process) -> io::Result<Root>,
    idle: Mutex<Vec<Looker>>,
    /// Number of threads whose answer nobody awaits any more.
    unanswered: AtomicUsize,
}

static LOOKS: Looks = Looks::by(Root::of);

/// Thread of the pool.
#[derive(Debug)]
struct Looker {
    ask: SyncSender<Process>,
    answer: Receiver<io::Result<Root>>,
}

impl Looks {
    const fn by(look: fn(&Process) -> io::Result<Root>) -> Self {
        Self { look, idle: Mutex::new(Vec::new()), unanswered: AtomicUsize::new(0) }
    }

    fn within_limit(&'static self, process: Process, aside: Aside) -> io::Result<Root> {
        let mute = || io::Error::new(io::ErrorKind::TimedOut, "its root directory does not answer");
        if self.unanswered.load(Ordering::Relaxed) >= MOST_UNANSWERED {
            return Err(mute());
        }
        let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let looker = idle.map_or_else(|| self.start(), Ok)?;
        looker.ask.send(process).map_err(|_| mute())?;
        let mut found = looker.answer.recv_timeout(SHORT);
        if found.is_err() {
            aside(&mut || found = looker.answer.recv_timeout(LIMIT));
        }
        match found {
            Ok(found) => {
                self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(looker);
                found
            }
            Err(_) => {
                self.unanswered.fetch_add(1, Ordering::Relaxed);
                Err(mute())
            }
        }
    }

    fn start(&'static self) -> io::Result<Looker> {
        let (ask, asked) = mpsc::sync_channel(1);
        // A rendezvous channel: a thread whose answer is late notices.
        let (sender, answer) = mpsc::sync_channel(0);
        without_signals(|| {
            thread::Builder::new().name("looks".to_owned()).spawn(move || {
                for process in asked {
                    if sender.send((self.look)(&process)).is_err() {
                        self.unanswered.fetch_sub(1, Ordering::Relaxed);
                        return;
                    }
                }
            })
        })?;
        Ok(Looker { ask, answer })
    }
}

/// Starts a thread that takes no signals: where a process's own threads block one, as `posh` does
/// with Ctrl-C while its shell runs, the kernel would give it to this thread.
fn without_signals<T>(start: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    let before = SigSet::all().thread_swap_mask(SigmaskHow::SIG_BLOCK)?;
    let started = start();
    before.thread_set_mask()?;
    started
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::process::Command;
    use std::time::Instant;

    use super::*;
    use crate::process::tests::Running;

    /// A process that has become `sleep`, by way of a program that takes something away.
    fn through(line: &str) -> Running {
        let mut words = line.split(' ');
        let mut command = Command::new(words.next().expect("a word"));
        Running::start(command.args(words).args(["sh", "-c", "echo; exec sleep 100"]))
    }

    fn difference(line: &str) -> Option<&'static str> {
        let own = Rights::own().expect("/proc");
        own.difference(&through(line).process(), at_once).expect("it runs")
    }

    #[test]
    fn a_process_with_less_is_told_from_one_with_the_same() {
        assert_eq!(difference("env"), None);
        assert_eq!(difference("setpriv --no-new-privs"), Some("no_new_privs"));
        if !rustix::process::geteuid().is_root() {
            return;
        }
        // Through another mount of the same directory.
        let jail = tempfile::tempdir().expect("a directory");
        let bind = format!("mount --rbind / {0}; exec chroot {0} \"$@\"", jail.path().display());
        let script = jail.path().with_extension("sh");
        fs::write(&script, bind).expect("written");
        let of_bind = through(&format!("unshare -m --propagation private sh {}", script.display()));
        let of_namespace = through("unshare -m --propagation private");
        let root = |running: &Running| Root::of(&running.process()).expect("it runs");
        assert_ne!(root(&of_bind), root(&of_namespace));
        let place = |root: Root| (root.device, root.inode);
        assert_eq!(place(root(&of_bind)), place(root(&of_namespace)));
        fs::remove_file(script).expect("it is ours");
        for (line, expected) in [
            ("setpriv --bounding-set -sys_admin --inh-caps -sys_admin", "other capabilities"),
            ("setpriv --groups 1,2,3", "other groups"),
            ("setpriv --regid 1 --keep-groups", "another group"),
            ("unshare -m", "another mount namespace"),
            ("unshare -U -r", "another user namespace"),
            ("unshare -n", "another network namespace"),
            ("chroot /", ""),
        ] {
            assert_eq!(
                difference(line),
                Some(expected).filter(|expected| !expected.is_empty()),
                "{line}"
            );
        }
    }

    #[test]
    fn a_group_counts_once() {
        assert_eq!(groups("0", "0\t0\t0\t0"), groups("", "0\t0\t0\t0"));
        assert_eq!(
            groups("4 24 1000", "1000\t1000\t1000\t1000"),
            groups("4 24", "1000\t1000\t1000\t1000")
        );
        assert_ne!(groups("4 24", "1000\t1000\t1000\t1000"), groups("4", "1000\t1000\t1000\t1000"));
    }

    /// Changes its root directory to a FUSE file system of its own, mounted nowhere, that tells
    /// nothing of its files.
    const ROOT_IN_FUSE: &str = r#"
import ctypes, os, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *words):
    result = libc.syscall(number, *words)
    if result < 0: raise OSError(ctypes.get_errno(), f'call {number}')
    return result
fuse = os.open('/dev/fuse', os.O_RDWR)
context = call(430, b'fuse', 0)
for key, value in dict(fd=fuse, rootmode=40000, user_id=0, group_id=0).items():
    call(431, context, 1, key.encode(), str(value).encode(), 0)
call(431, context, 6, None, None, 0)
mount = call(432, context, 0, 0)
serving = os.fork() == 0
# It ends with the other.
if serving: libc.prctl(1, 9)
while serving:
    length, op, number = struct.unpack('<IIQ', os.read(fuse, 1 << 20)[:16])
    if op == 26:
        text = struct.pack('<IIIIHHII', 7, 31, 65536, 0, 12, 8, 4096, 1) + bytes(36)
        os.write(fuse, struct.pack('<IiQ', 16 + len(text), 0, number) + text)
    elif op == 3:
        print('asked', flush=True)
    else:
        os.write(fuse, struct.pack('<IiQ', 16, -38, number))
os.fchdir(mount)
os.chroot('.')
print('there', flush=True)
sys.stdin.read()
"#;

    #[test]
    fn a_root_directory_that_never_answers_is_another_one() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let mut command = Command::new("python3");
        let running = Running::start(command.args(["-c", ROOT_IN_FUSE]));
        let process = running.process();
        assert_eq!(running.said, "there");
        let (sender, receiver) = mpsc::channel();
        thread::spawn(move || {
            let own = Rights::own().expect("/proc");
            sender.send(own.difference(&process, at_once).map_err(|error| error.to_string()))
        });
        let found = receiver.recv_timeout(10 * LIMIT).expect("nobody is waited for");
        assert_eq!(found, Ok(Some("another root directory")));
    }

    #[test]
    fn no_answer_is_waited_for_without_end() {
        static NEVER: Looks = Looks::by(|process| {
            thread::sleep(30 * LIMIT);
            Root::of(process)
        });
        static AT_ONCE: Looks = Looks::by(Root::of);
        fn own() -> Process {
            Process::own().expect("/proc")
        }
        let began = Instant::now();
        let look = || NEVER.within_limit(own(), at_once);
        let waits: Vec<_> = (0..MOST_UNANSWERED).map(|_| thread::spawn(look)).collect();
        for wait in waits {
            let error = wait.join().expect("no panic").expect_err("it sleeps");
            assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        }
        assert!(began.elapsed() < 10 * LIMIT);
        // No more threads are spent on it.
        assert_eq!(NEVER.unanswered.load(Ordering::Relaxed), MOST_UNANSWERED);
        let began = Instant::now();
        assert_eq!(look().expect_err("it sleeps").kind(), io::ErrorKind::TimedOut);
        assert!(began.elapsed() < LIMIT);
        // One thread is enough for those who answer.
        for _ in 0..10 {
            AT_ONCE.within_limit(own(), at_once).expect("it answers");
        }
        assert_eq!(AT_ONCE.idle.lock().expect("no panic").len(), 1);
    }
}
