//! What this machine's kernel remembers of a FUSE or network mount, apart from
//! what its daemon does: attributes and names, each for as long as the file
//! system allows.

use super::look;
use crate::mountinfo::MountInfo;
use rustix::mount::MountFlags;
use std::io;
use std::path::Path;

/// Names of a directory whose attributes are looked at again; beyond it they may
/// be a second old in the kernel.
const MOST_ENTRIES: usize = 5000;

/// MS_REMOUNT of mount(2), which rustix has only in a call that passes data.
const REMOUNT: MountFlags = MountFlags::from_bits_retain(32);

/// Has one name looked up and its attributes asked for again.
pub(super) fn forget(path: &Path) -> io::Result<()> {
    forget_name(path);
    look::attributes_at(path)
}

/// Has the kernel look the name up again: link(2) wants it to be free, and from
/// another mount it can never create anything (EXDEV).
pub(super) fn forget_name(path: &Path) {
    let _never_made = is_free(path);
}

/// The same, and whether nothing has the name: what is there is noticed before the other mount is.
pub(super) fn is_free(path: &Path) -> bool {
    let linked = std::fs::hard_link("/", path);
    linked.is_err_and(|error| error.kind() != io::ErrorKind::AlreadyExists)
}

/// Lists a directory and asks for the attributes of what is in it.
pub(super) fn forget_entries(dir: &Path) -> io::Result<()> {
    let entries = match std::fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            forget_name(dir);
            return Ok(());
        }
        Err(error) => return Err(error),
    };
    for entry in entries.take(MOST_ENTRIES) {
        look::attributes_at(&entry?.path())?;
    }
    Ok(())
}

/// Drops every name and attribute of the mount that `path` lies on, save those in
/// use at this moment: the kernel does so when a file system is mounted anew with
/// the options it has. Needs the right to mount.
pub(super) fn drop_caches(path: &Path) -> io::Result<()> {
    let info = MountInfo::read().map_err(io::Error::other)?;
    let around = info.visible().into_iter().filter(|mount| path.starts_with(&mount.mount_point));
    let Some(mount) = around.max_by_key(|mount| mount.mount_point.components().count()) else { return Ok(()) };
    // Options of the mount stand before those of the file system, which has its own `rw`.
    let flags = mount.options.split(',').fold(REMOUNT, |flags, option| flags | flag(option));
    // Without any data: NFS would take an empty text for other options than it has.
    rustix::mount::mount("none", &mount.mount_point, "", flags, None).map_err(|errno| {
        let what = format!("cannot drop what the kernel remembers of {}", mount.mount_point.display());
        io::Error::new(io::Error::from(errno).kind(), format!("{what}: {errno}"))
    })
}

fn flag(option: &str) -> MountFlags {
    match option {
        "ro" => MountFlags::RDONLY,
        "nosuid" => MountFlags::NOSUID,
        "nodev" => MountFlags::NODEV,
        "noexec" => MountFlags::NOEXEC,
        "noatime" => MountFlags::NOATIME,
        "nodiratime" => MountFlags::NODIRATIME,
        "relatime" => MountFlags::RELATIME,
        "sync" => MountFlags::SYNCHRONOUS,
        "dirsync" => MountFlags::DIRSYNC,
        _ => MountFlags::empty(),
    }
}
