//! /proc/self/mountinfo (proc_pid_mountinfo(5)): what is mounted where in this
//! mount namespace, and which of it a path lookup can reach. Who owns a mount
//! is not known here.

use std::ffi::OsString;
use std::io;
use std::path::PathBuf;

/// Why the list of mounts is not known.
#[derive(Debug, thiserror::Error)]
pub enum MountInfoError {
    /// The file could not be read.
    #[error("cannot read /proc/self/mountinfo; is /proc mounted?")]
    Read(#[source] io::Error),
    /// A line is not in the kernel's format.
    #[error("/proc/self/mountinfo line {line}: {what}")]
    Line {
        /// From 1.
        line: usize,
        /// What is missing or malformed.
        what: &'static str,
    },
}

/// A line of mountinfo, decoded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MountEntry {
    /// Column 1; also `mnt_id` in /proc/PID/fdinfo.
    pub mount_id: u32,
    /// Column 2: the mount that this one is mounted on.
    pub parent_id: u32,
    /// Major and minor number of the file system.
    pub device: (u32, u32),
    /// The directory of the file system that is mounted; `/` unless it is a bind mount.
    pub root: PathBuf,
    /// Where, as this process sees it.
    pub mount_point: PathBuf,
    /// Such as `ext4` or `fuse.sshfs`.
    pub fs_type: String,
    /// Such as `host:/export`; bytes, of whatever encoding.
    pub source: OsString,
    /// Options of the mount and of the file system, joined by a comma.
    pub options: String,
}

/// All mounts of this namespace, in the kernel's order.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct MountInfo {
    entries: Vec<MountEntry>,
}

impl MountInfo {
    /// Reads the calling process's own list.
    pub fn read() -> Result<MountInfo, MountInfoError> {
        MountInfo::parse(&std::fs::read("/proc/self/mountinfo").map_err(MountInfoError::Read)?)
    }

    /// Parses the text of a mountinfo file.
    pub fn parse(_text: &[u8]) -> Result<MountInfo, MountInfoError> {
        todo!()
    }

    /// Every mount, hidden ones too, in the kernel's order.
    pub fn entries(&self) -> &[MountEntry] {
        &self.entries
    }

    /// The mounts that a path lookup can reach, at most one per mount point:
    /// not those below or under a later mount.
    pub fn visible(&self) -> Vec<&MountEntry> {
        todo!()
    }
}
