//! Kernel caches of a FUSE or network mount, as distinct from its daemon's caches: attributes and
//! names, each for as long as the file system allows.

use super::look;
use crate::beneath::MountRoot;
use crate::mountinfo::MountInfo;
use rustix::fs::CWD;
use rustix::mount::{FsPickFlags, fsconfig_reconfigure, fspick};
use std::io;
use std::os::fd::AsFd as _;
use std::path::Path;

/// Upper bound of names in a directory whose attributes are refreshed. Further ones may be a second
/// old in the kernel.
const MOST_ENTRIES: usize = 5000;

/// Looks up one name again and refreshes its attributes.
pub(super) fn forget(on: &MountRoot, path: &Path) -> io::Result<()> {
    forget_name(on, path);
    on.look_at(path)
}

/// Makes the kernel look up the name again.
pub(super) fn forget_name(on: &MountRoot, path: &Path) {
    let _free_or_not = on.is_free(path);
}

/// Lists a directory and refreshes the attributes of its entries.
pub(super) fn forget_entries(on: &MountRoot, dir: &Path) -> io::Result<()> {
    match on.look_at_entries(dir, MOST_ENTRIES) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            forget_name(on, dir);
            Ok(())
        }
        looked => looked,
    }
}

/// Like [`forget`], but on an executor, for a path from a command, with its user's rights.
pub(super) fn look_up_again(path: &Path) -> io::Result<()> {
    // Source and target are on different mounts: link(2) can never create anything.
    let _never_made = std::fs::hard_link("/", path);
    look::attributes_at(path)
}

/// Drops every cached name and attribute of the mount that holds `path`, except those in use: the
/// kernel does so when a file system is remounted with its current options. Needs the right to
/// mount.
pub(super) fn drop_caches(path: &Path) -> io::Result<()> {
    let info = MountInfo::read().map_err(io::Error::other)?;
    let around = info.visible().into_iter().filter(|mount| path.starts_with(&mount.mount_point));
    let Some(mount) = around.max_by_key(|mount| mount.mount_point.components().count()) else {
        return Ok(());
    };
    configure_anew(&mount.mount_point).map_err(|errno| {
        let what =
            format!("cannot drop what the kernel remembers of {}", mount.mount_point.display());
        io::Error::new(io::Error::from(errno).kind(), format!("{what}: {errno}"))
    })
}

/// Reconfigures the file system without changes. fsconfig(2) (Linux 5.2) keeps the mount's own
/// flags. MS_REMOUNT of mount(2) clears every flag that is not passed again, including flags that
/// are newer than this program.
fn configure_anew(mount_point: &Path) -> rustix::io::Result<()> {
    let flags = FsPickFlags::FSPICK_CLOEXEC | FsPickFlags::FSPICK_NO_AUTOMOUNT;
    let context = fspick(CWD, mount_point, flags)?;
    fsconfig_reconfigure(context.as_fd())
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    /// Set in the second run of the test, which is the one in a namespace of its own.
    const INSIDE: &str = "POSH_FS_MAPPER_TEST_INSIDE";

    /// Needs root.
    #[test]
    fn no_flag_of_a_mount_is_lost_when_caches_are_dropped() {
        if std::env::var_os(INSIDE).is_none() {
            let test =
                "coherence::kernel::tests::no_flag_of_a_mount_is_lost_when_caches_are_dropped";
            let mut again = Command::new("unshare");
            again
                .args(["--mount", "--propagation", "private", "--"])
                .arg(std::env::current_exe().expect("known"));
            let output = again
                .args(["--exact", test, "--nocapture"])
                .env(INSIDE, "1")
                .output()
                .expect("it runs");
            let said = String::from_utf8_lossy(&output.stdout);
            return assert!(output.status.success() && said.contains("1 passed"), "{said}");
        }
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path();
        for options in [
            "nosuid,nodev,noexec,nosymfollow,noatime,nodiratime",
            "strictatime,nosymfollow",
            "relatime",
            "ro,nosymfollow,strictatime,nodiratime",
        ] {
            let mount = |words: &[&str]| {
                Command::new("mount").args(words).arg(path).status().expect("it runs").success()
            };
            assert!(mount(&["-t", "tmpfs", "-o", options, "tmpfs"]), "{options}");
            let seen = || {
                let info = MountInfo::read().expect("readable");
                let found =
                    info.visible().into_iter().find(|mount| mount.mount_point == path).cloned();
                found.map(|mount| mount.options).expect("it is mounted")
            };
            let before = seen();
            assert!(!options.contains("nosymfollow") || before.contains("nosymfollow"), "{before}");
            drop_caches(path).expect("root may");
            assert_eq!(seen(), before);
        }
    }
}
