//! Compares the working directory of a process with the one that its path leads to.
//!
//! The kernel names a directory by the way that it was reached. On a file system whose directories
//! have numbers of their own (volumes, NFS), a server may give that name to another directory, in
//! which a command on the server would work, while the local one goes on in its own. On sshfs a
//! directory is its path.

use std::{fs::File, os::fd::AsFd as _, path::Path, time::Duration};

use rustix::{
    fs::{AtFlags, CWD, Mode, OFlags, ResolveFlags, StatxFlags, openat2, statx},
    io::Errno,
};

use crate::{enlisted::Pid, shares::Shares};

/// Timeout for a lookup that the server has to answer.
const PATIENCE: Duration = Duration::from_secs(2);

/// Returns true if the path leads to the process's working directory, as far as this machine knows;
/// false also if the mount does not answer.
#[must_use]
pub fn is_at_its_path(mount: &Shares, mount_point: &Path, pid: Pid, path: &Path) -> bool {
    let Some(own) = inode(Path::new(&format!("/proc/{pid}/cwd"))) else { return false };
    // Without a question to the server, which may never answer.
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let named = match openat2(CWD, path, flags, Mode::empty(), ResolveFlags::CACHED) {
        Ok(directory) => inode_of(&File::from(directory)),
        Err(Errno::AGAIN) => {
            let path = path.to_owned();
            mount.ask_aside(mount_point, PATIENCE, move || inode(&path)).unwrap_or_default()
        }
        Err(_) => None,
    };
    named == Some(own)
}

fn inode(path: &Path) -> Option<u64> {
    let flags = AtFlags::STATX_DONT_SYNC | AtFlags::NO_AUTOMOUNT;
    statx(CWD, path, flags, StatxFlags::INO).ok().map(|found| found.stx_ino)
}

fn inode_of(directory: &File) -> Option<u64> {
    let flags = AtFlags::STATX_DONT_SYNC | AtFlags::EMPTY_PATH;
    statx(directory.as_fd(), "", flags, StatxFlags::INO).ok().map(|found| found.stx_ino)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_that_has_got_another_one_s_name_is_not_at_its_path() {
        let top = tempfile::tempdir().unwrap();
        let (path, other) = (top.path().join("a"), top.path().join("b"));
        std::fs::create_dir(&path).unwrap();
        let mut child =
            std::process::Command::new("sleep").arg("60").current_dir(&path).spawn().unwrap();
        let is_at = || is_at_its_path(&Shares::default(), top.path(), child.id(), &path);
        assert!(is_at());
        std::fs::rename(&path, &other).unwrap();
        assert!(!is_at());
        std::fs::create_dir(&path).unwrap();
        assert!(!is_at());
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
