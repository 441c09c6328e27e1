//! FUSE mounts whose access checks differ from the server's, by mountinfo alone.
//!
//! Invariant: a command that runs on the server with the login's rights is refused exactly what it
//! would be refused through the mount. That holds only where the daemon decides alone, for the user
//! who has mounted it (mount.fuse3(8)). For other users the kernel refuses everything, or, with
//! `allow_other`, lets them act with the rights of the one who has mounted it.

use crate::mountinfo::MountEntry;
use crate::sshfs::FS_TYPE;

/// Reason why posh does not use a FUSE mount, about the mount.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
pub enum Foreign {
    /// Mounted by somebody else.
    #[error("it is a mount of the user {0}, whose rights count there")]
    OfUser(u32),
    /// The kernel compares the server's modes and numbers with the local user.
    #[error("it is mounted with default_permissions, so that other users and modes count there")]
    ChecksModes,
}

impl Foreign {
    /// Checks a mount of any type.
    pub(crate) fn check(entry: &MountEntry) -> Result<(), Foreign> {
        let own = own_user();
        match user(entry) {
            Some(user) if user != own => Err(Foreign::OfUser(user)),
            // Root may do everything by modes too. A volume's numbers are this machine's.
            Some(_) if own != 0 && entry.fs_type == FS_TYPE && checks_modes(entry) => {
                Err(Foreign::ChecksModes)
            }
            _ => Ok(()),
        }
    }
}

/// User who has made a FUSE mount; `None` for other types.
pub(crate) fn user(entry: &MountEntry) -> Option<u32> {
    let is_fuse = entry.fs_type == "fuse" || entry.fs_type.starts_with("fuse.");
    let mut options = entry.options.split(',').filter(|_| is_fuse);
    options.find_map(|option| option.strip_prefix("user_id=")?.parse().ok())
}

/// User of this process, whose mounts it may use.
pub(crate) fn own_user() -> u32 {
    rustix::process::geteuid().as_raw()
}

fn checks_modes(entry: &MountEntry) -> bool {
    entry.options.split(',').any(|option| option == "default_permissions")
}
