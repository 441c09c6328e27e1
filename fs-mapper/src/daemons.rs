//! Processes that serve FUSE mounts, such as sshfs and rclone. Their arguments name the program
//! that connects to the server, and the cache directory: a trusted daemon controls which program
//! the gateway starts.
//!
//! Invariant: a process's arguments are read only if it has exactly our own rights (or is root's,
//! if the caller accepts root's), and trusted only for a mount whose FUSE connection it holds.
//! Process name, program name and arguments prove nothing: a confined program can copy them, and
//! kill the real daemon. A mount whose process has ended belongs to nobody. So the options in the
//! arguments, such as a command for ssh, come from a program that could have started the command
//! itself.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::Path;

use crate::mountinfo::MountEntry;
use crate::process::Process;
use crate::rights::{Rights, at_once};

/// fdinfo of a connection has five short lines.
const MOST_INFO_BYTES: u64 = 1 << 16;

/// Running processes of some programs.
#[derive(Debug, Default)]
pub(crate) struct Daemons {
    daemons: Vec<Daemon>,
    /// Restriction that another process of these programs has and we have not.
    pub(crate) refused: Option<&'static str>,
}

/// A process that is trusted for the mounts that it serves.
#[derive(Debug)]
pub(crate) struct Daemon {
    pub(crate) process: Process,
    /// Command line, including the program's name.
    pub(crate) words: Vec<OsString>,
    held: FuseDescriptors,
}

/// Connections of a process's `/dev/fuse` descriptors (fuse(4)).
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum FuseDescriptors {
    /// Minor device numbers of their mounts; empty without such descriptors.
    Connections(Vec<u32>),
    /// Not shown by the kernel (before Linux 6.16), or not to us.
    Untold,
}

impl Daemons {
    /// Finds processes that execute one of `programs`, with our own rights or as one of the users
    /// `others`.
    pub(crate) fn running(programs: &[&str], others: &[u32]) -> Daemons {
        let mut found = Daemons::default();
        let Ok(own) = Rights::own() else { return found };
        for process in Process::of_users(others).filter(|process| process.runs(programs)) {
            let lacks = match process.is_ours(&[]) {
                true => {
                    own.keep_here(&process, at_once).unwrap_or(Some("rights that can't be told"))
                }
                // Another user's rights differ by definition.
                false => None,
            };
            if lacks.is_some() {
                found.refused = lacks;
                continue;
            }
            // A trusted process can only lose rights, and a cached command line would be read for
            // nothing.
            let held = FuseDescriptors::of(&process);
            if let Ok(words) = process.strings("cmdline") {
                found.daemons.push(Daemon { process, words, held });
            }
        }
        found
    }

    /// Daemons that hold a mount's connection. If the kernel shows none, those whose connections it
    /// hides and whose arguments name the mount.
    pub(crate) fn serving(
        &self,
        mount: &MountEntry,
        names_it: &dyn Fn(&[OsString]) -> bool,
    ) -> Vec<&Daemon> {
        let holds = |daemon: &Daemon| match &daemon.held {
            FuseDescriptors::Connections(numbers) => {
                mount.device.0 == 0 && numbers.contains(&mount.device.1)
            }
            FuseDescriptors::Untold => false,
        };
        let is_told = self.daemons.iter().any(holds);
        let is_named =
            |daemon: &Daemon| daemon.held == FuseDescriptors::Untold && names_it(&daemon.words);
        self.daemons
            .iter()
            .filter(|daemon| if is_told { holds(daemon) } else { is_named(daemon) })
            .collect()
    }
}

impl FuseDescriptors {
    fn of(process: &Process) -> FuseDescriptors {
        let (mut numbers, mut is_untold) = (Vec::new(), false);
        let descriptors = match fs::read_dir(process.path().join("fd")) {
            Ok(descriptors) => descriptors,
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                return FuseDescriptors::Untold;
            }
            Err(_) => return FuseDescriptors::Connections(numbers),
        };
        for name in descriptors.flatten().map(|entry| entry.file_name()) {
            let file = |directory: &str| format!("{directory}/{}", name.to_string_lossy());
            if !process.link(&file("fd")).is_ok_and(|target| target == Path::new("/dev/fuse")) {
                continue;
            }
            let info = process.read(&file("fdinfo"), MOST_INFO_BYTES).unwrap_or_default();
            let info = String::from_utf8_lossy(&info);
            match info
                .lines()
                .find_map(|line| line.strip_prefix("fuse_connection:")?.trim().parse().ok())
            {
                Some(number) => numbers.push(number),
                None => is_untold = true,
            }
        }
        if numbers.is_empty() && is_untold {
            FuseDescriptors::Untold
        } else {
            FuseDescriptors::Connections(numbers)
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::ffi::OsStr;
    use std::process::Command;

    use super::*;
    use crate::mountinfo::MountInfo;
    use crate::process::tests::Running;

    impl Daemons {
        /// As if these ran.
        pub(crate) fn of(daemons: &[(&[&str], FuseDescriptors)]) -> Daemons {
            let daemon = |(words, held): &(&[&str], FuseDescriptors)| Daemon {
                process: Process::own().expect("/proc"),
                words: words.iter().map(OsString::from).collect(),
                held: held.clone(),
            };
            Daemons { daemons: daemons.iter().map(daemon).collect(), refused: None }
        }
    }

    /// Has a connection of a FUSE file system that is mounted nowhere, says its number, and stays.
    const HOLDS: &str = r#"
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *words):
    result = libc.syscall(number, *words)
    if result < 0: raise OSError(ctypes.get_errno(), f'call {number}')
    return result
fuse = os.open('/dev/fuse', os.O_RDWR)
context = call(430, b'fuse', 0)
for key, value in dict(fd=fuse, rootmode=40000, user_id=os.getuid(), group_id=os.getgid()).items():
    call(431, context, 1, key.encode(), str(value).encode(), 0)
call(431, context, 6, None, None, 0)
info = open(f'/proc/self/fdinfo/{fuse}').read().split()
print(info[info.index('fuse_connection:') + 1], flush=True)
sys.stdin.read()
"#;

    /// How a program is started.
    #[derive(Debug, Clone, Copy)]
    pub(crate) enum Holder<'a> {
        Itself,
        /// Under the name of a link to it.
        Link,
        /// By a program that takes something away before.
        Through(&'a str),
    }

    /// A program of this name that holds a connection.
    pub(crate) fn holder(
        name: &str,
        how: Holder<'_>,
        words: &[&str],
    ) -> (tempfile::TempDir, Running) {
        let directory = tempfile::tempdir().expect("a directory");
        let program = directory.path().join(name);
        let python = fs::canonicalize("/usr/bin/python3").expect("it is there");
        match how {
            Holder::Link => std::os::unix::fs::symlink(python, &program).expect("made"),
            // By a program: while a file is open for writing here, a child that another test
            // starts has it, too, and it can't be executed (ETXTBSY).
            _ => {
                let copied = Command::new("cp").arg(python).arg(&program).status();
                assert!(copied.is_ok_and(|copied| copied.success()), "copied");
            }
        }
        let mut line: Vec<&OsStr> = match how {
            Holder::Through(line) => line.split(' ').map(OsStr::new).collect(),
            _ => Vec::new(),
        };
        line.push(program.as_os_str());
        let mut command = Command::new(line[0]);
        let running = Running::start(command.args(&line[1..]).args(["-c", HOLDS]).args(words));
        (directory, running)
    }

    fn mount(connection: &str) -> MountEntry {
        let line = format!("66 64 0:{connection} / /mnt/w rw - fuse.sshfs h:/d rw");
        MountInfo::parse(line.as_bytes()).expect("a mount").entries()[0].clone()
    }

    /// The numbers of those that serve a mount.
    fn serving(connection: &str) -> Vec<u32> {
        let found = Daemons::running(&["sshfs"], &[]);
        let serving = found.serving(&mount(connection), &|_| true);
        serving.into_iter().filter_map(|daemon| daemon.process.number()).collect()
    }

    #[test]
    fn who_serves_a_mount_is_who_holds_its_connection() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let (_kept, real) = holder("sshfs", Holder::Itself, &["h:/d", "/mnt/w"]);
        let (_kept_too, other) =
            holder("sshfs", Holder::Itself, &["h:/d", "/mnt/w", "-o", "ssh_command=/evil"]);
        let number = |one: &Running| one.process().number().expect("it runs");
        assert_ne!(real.said, other.said);
        assert_eq!(serving(&real.said), [number(&real)]);
        assert_eq!(serving(&other.said), [number(&other)]);
        // Of one that has ended nobody is the owner, whatever the words of others are.
        let connection = real.said.clone();
        drop(real);
        assert_eq!(serving(&connection), [0; 0]);
    }

    #[test]
    fn a_confined_program_is_not_believed() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let words = ["h:/d", "/mnt/w", "-o", "ssh_command=/evil"];
        let check = |line: &str, expected: &str| {
            let (_kept, confined) = holder("sshfs", Holder::Through(line), &words);
            assert_eq!(serving(&confined.said), [0; 0], "{line}");
            let own = Rights::own().expect("/proc");
            let lacks = own.keep_here(&confined.process(), at_once).expect("it runs");
            assert_eq!(lacks, Some(expected), "{line}");
        };
        check("setpriv --no-new-privs", "no_new_privs");
        check("unshare --mount --propagation private", "another mount namespace");
        check(
            "unshare --user --map-root-user --mount --propagation private",
            "another mount namespace",
        );
        check("setpriv --bounding-set -sys_chroot --inh-caps -sys_chroot", "other capabilities");
    }
}
