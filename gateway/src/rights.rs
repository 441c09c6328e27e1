//! The rights of a process, as far as the kernel tells others (proc_pid_status(5)). Commands that run
//! on servers have the rights of the gateway's user there. A process that has been given less than
//! the gateway (a changed root directory, another mount or user namespace, fewer capabilities, other
//! groups, filters of system calls, a security label) must not get them back by way of the gateway.
//!
//! Invariant: a command is offloaded only if its process has exactly the gateway's own rights.
//!
//! A Landlock domain is not shown. Who enters one has `no_new_privs`, which is compared, or `CAP_SYS_ADMIN`. So a gateway
//! that has `no_new_privs` itself offloads nothing; what root confines without it is not seen.

use std::{collections::BTreeMap, fs, io, os::unix::fs::MetadataExt as _, path::Path};

use rustix::fs::{AtFlags, CWD, StatxFlags, statx};

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
    /// Device and inode, and the mount that it is seen through: a bind of the same directory may show other files.
    root: (u64, u64, u64),
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
        let place = process.join("root/.");
        let (root, mount) =
            (fs::metadata(&place)?, statx(CWD, &place, AtFlags::empty(), StatxFlags::MNT_ID)?.stx_mnt_id);
        let namespace = |name| fs::metadata(process.join("ns").join(name)).ok().map(|found| found.ino());
        let status = fs::read_to_string(process.join("status"))?;
        let lines: BTreeMap<&str, &str> = status.lines().filter_map(|line| line.split_once(':')).collect();
        Ok(Self {
            root: (root.dev(), root.ino(), mount),
            namespaces: NAMESPACES.map(|(name, _)| namespace(name)),
            status: COMPARED.map(|(name, _)| lines.get(name).map(|value| value.trim().to_owned())),
            label: fs::read(process.join("attr/current")).ok(),
        })
    }

    /// What these lack for a command to be offloaded that has `its`, in words that follow "it runs with".
    #[must_use]
    pub fn keep_here(&self, its: &Self) -> Option<&'static str> {
        let has_no_new_privs = COMPARED
            .iter()
            .zip(&self.status)
            .any(|((name, _), value)| *name == "NoNewPrivs" && value.as_deref() == Some("1"));
        let unknown =
            has_no_new_privs.then_some("no_new_privs, as the gateway, which can't see a Landlock domain then");
        self.difference(its).or(unknown)
    }

    /// How those of another process differ from these, in words that follow "it runs with".
    #[must_use]
    pub fn difference(&self, other: &Self) -> Option<&'static str> {
        let namespaces = self.namespaces.iter().zip(&other.namespaces).map(|(own, other)| own == other);
        let status = self.status.iter().zip(&other.status).map(|(own, other)| own == other);
        let root = std::iter::once(self.root == other.root);
        let of_namespaces = NAMESPACES.iter().map(|(_, words)| *words);
        let words = of_namespaces.chain(["another root directory"]).chain(COMPARED.iter().map(|(_, words)| *words));
        let label = (self.label != other.label).then_some("another security label");
        namespaces.chain(root).chain(status).zip(words).find_map(|(same, words)| (!same).then_some(words)).or(label)
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
        // Through another mount of the same directory.
        let jail = tempfile::tempdir().unwrap();
        let bind = format!("mount --rbind / {0}; exec chroot {0} \"$@\"", jail.path().display());
        let script = jail.path().with_extension("sh");
        fs::write(&script, bind).unwrap();
        let inner = format!("unshare -m --propagation private sh {}", script.display());
        let of_bind = through(&inner);
        let of_namespace = through("unshare -m --propagation private");
        assert_ne!(of_bind.root, of_namespace.root);
        assert_eq!((of_bind.root.0, of_bind.root.1), (of_namespace.root.0, of_namespace.root.1));
        fs::remove_file(script).unwrap();
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
