//! The rights of a process, as far as the kernel tells others (proc_pid_status(5)). Commands that run
//! on servers have the rights of the gateway's user there. A process that has been given less than
//! the gateway (a changed root directory, another mount or user namespace, fewer capabilities, other
//! groups, filters of system calls, a security label) must not get them back by way of the gateway.
//!
//! Invariant: a command is offloaded only if its process has exactly the gateway's own rights.
//!
//! Not seen: a Landlock domain of a process that had `CAP_SYS_ADMIN` when it entered it; any other
//! one implies `no_new_privs`, which is compared.

use std::{collections::BTreeMap, fs, io, os::unix::fs::MetadataExt as _, path::Path};

use crate::enlisted::Pid;

/// Lines of `/proc/PID/status` that are compared, and what it is if they differ. A kernel that lacks
/// one lacks it in both.
const COMPARED: [(&str, &str); 7] = [
    ("Uid", "another user"),
    ("Gid", "another group"),
    ("Groups", "other groups"),
    ("CapEff", "other capabilities"),
    ("NoNewPrivs", "no_new_privs"),
    ("Seccomp", "a filter of system calls"),
    ("Seccomp_filters", "other filters of system calls"),
];

/// Namespaces that decide which files a path names, and what the user may do.
const NAMESPACES: [(&str, &str); 2] = [("mnt", "another mount namespace"), ("user", "another user namespace")];

/// What one process has.
#[derive(Debug, PartialEq, Eq)]
pub struct Rights {
    /// Device and inode.
    root: (u64, u64),
    /// By inode; `None` where the kernel has none of the kind.
    namespaces: [Option<u64>; NAMESPACES.len()],
    status: [Option<String>; COMPARED.len()],
    /// Of a Linux security module; `None` where there is none.
    label: Option<Vec<u8>>,
}

impl Rights {
    /// Those of a process.
    ///
    /// # Errors
    /// It can't be looked at: it has ended, or has rights that this process has not.
    pub fn of(pid: Pid) -> io::Result<Self> {
        let process = Path::new("/proc").join(pid.to_string());
        let root = fs::metadata(process.join("root/"))?;
        let namespace = |name| fs::metadata(process.join("ns").join(name)).ok().map(|found| found.ino());
        let status = fs::read_to_string(process.join("status"))?;
        let lines: BTreeMap<&str, &str> = status.lines().filter_map(|line| line.split_once(':')).collect();
        Ok(Self {
            root: (root.dev(), root.ino()),
            namespaces: NAMESPACES.map(|(name, _)| namespace(name)),
            status: COMPARED.map(|(name, _)| lines.get(name).map(|value| value.trim().to_owned())),
            label: fs::read(process.join("attr/current")).ok(),
        })
    }

    /// How those of another process differ from these, in words that follow "it runs with".
    #[must_use]
    pub fn difference(&self, other: &Self) -> Option<&'static str> {
        if self.root != other.root {
            return Some("another root directory");
        }
        let namespaces = self.namespaces.iter().zip(&other.namespaces).map(|(own, other)| own == other);
        let status = self.status.iter().zip(&other.status).map(|(own, other)| own == other);
        let words = NAMESPACES.iter().chain(&COMPARED).map(|(_, words)| *words);
        let label = (self.label != other.label).then_some("another security label");
        namespaces.chain(status).zip(words).find_map(|(same, words)| (!same).then_some(words)).or(label)
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command, Stdio};

    use super::*;

    struct Ended(Child);

    impl Drop for Ended {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    /// A process that has become `sleep`, by way of a program that takes something away.
    fn through(line: &str) -> Rights {
        let mut words = line.split(' ');
        let mut command = Command::new(words.next().unwrap());
        command.args(words).args(["sh", "-c", "echo; exec sleep 100"]);
        let mut child = Ended(command.stdout(Stdio::piped()).spawn().unwrap());
        let said = child.0.stdout.take().unwrap();
        io::BufRead::read_line(&mut io::BufReader::new(said), &mut String::new()).unwrap();
        Rights::of(child.0.id()).unwrap()
    }

    #[test]
    fn a_process_with_less_is_told_from_one_with_the_same() {
        let own = Rights::of(std::process::id()).unwrap();
        assert_eq!(own.difference(&through("env")), None);
        assert_eq!(own.difference(&through("setpriv --no-new-privs")), Some("no_new_privs"));
        if !nix::unistd::geteuid().is_root() {
            return;
        }
        for (line, expected) in [
            ("setpriv --bounding-set -sys_admin --inh-caps -sys_admin", "other capabilities"),
            ("setpriv --groups 1,2,3", "other groups"),
            ("setpriv --regid 1 --keep-groups", "another group"),
            ("unshare -m", "another mount namespace"),
            ("unshare -U -r", "another user namespace"),
        ] {
            assert_eq!(own.difference(&through(line)), Some(expected), "{line}");
        }
    }
}
