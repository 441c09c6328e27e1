//! What a file system type means for us: is its data elsewhere, and may a
//! lookup walk on it.

use std::path::Path;

/// Types whose data is on another machine, or in the hands of a daemon.
const REMOTE: [&str; 17] = [
    "9p", "afs", "beegfs", "ceph", "cifs", "coda", "fuse", "gpfs", "lustre", "ncpfs", "nfs",
    "nfs4", "orangefs", "panfs", "smb3", "smbfs", "virtiofs",
];

/// The prefix of the sub-types that FUSE daemons give: `fuse.sshfs`.
const FUSE: &str = "fuse.";

/// Whether `posh mounts` shows it even without an owner.
pub(crate) fn is_remote(fs_type: &str) -> bool {
    fs_type.starts_with(FUSE) || REMOTE.contains(&fs_type)
}

/// Whether a lookup may follow symlinks on it. A remote mount may hang, an
/// automounter mounts things, and links in /proc lead each process elsewhere.
/// The root directory is walked whatever it is: without it nothing works.
pub(crate) fn is_walked(fs_type: &str, mount_point: &Path) -> bool {
    mount_point == Path::new("/")
        || !(is_remote(fs_type) || fs_type == "autofs" || fs_type == "proc")
}
