//! Classes of file system types: remote or local, and safe for lookups or not.

use std::path::Path;

/// Types with data on another machine, or served by a daemon.
const REMOTE: [&str; 17] = [
    "9p", "afs", "beegfs", "ceph", "cifs", "coda", "fuse", "gpfs", "lustre", "ncpfs", "nfs",
    "nfs4", "orangefs", "panfs", "smb3", "smbfs", "virtiofs",
];

/// Prefix of FUSE subtypes: `fuse.sshfs`.
const FUSE: &str = "fuse.";

/// Returns true if `posh mounts` lists the type even without an owner.
pub(crate) fn is_remote(fs_type: &str) -> bool {
    fs_type.starts_with(FUSE) || REMOTE.contains(&fs_type)
}

/// Returns true if a lookup may follow symlinks on it. A remote mount may hang, an automounter
/// mounts on access, and links in /proc depend on the process. The root directory is always walked:
/// nothing works without it.
pub(crate) fn is_walked(fs_type: &str, mount_point: &Path) -> bool {
    mount_point == Path::new("/")
        || !(is_remote(fs_type) || fs_type == "autofs" || fs_type == "proc")
}
