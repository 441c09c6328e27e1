//! Mounts a FUSE device: as root by mount(2), so that mountinfo shows `fuse.posh`, as another user
//! by fusermount3(1). [`crate::fuse`] serves the device, and [`crate::mounted`] unmounts it.

use std::{
    fs::{self, File},
    io,
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use nix::{
    errno::Errno,
    mount::{MsFlags, mount as mount_2},
    unistd::{getegid, geteuid},
};
use rustix::{
    fs::{CWD, Mode, OFlags, ResolveFlags, openat2},
    net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg},
};
use trusted_path::Untrusted;

use crate::mounted::{FS_TYPE, MountedVolume, no_fusermount, said};

/// Part of the type after `fuse.`.
const SUBTYPE: &str = "posh";

/// Options of a mount.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wanted<'a> {
    /// Source in mountinfo.
    pub source: &'a str,
    /// True for a read-only mount: the kernel refuses every change.
    pub read_only: bool,
    /// True for `allow_other` with `default_permissions`: the kernel checks mode, owner and group.
    /// For root's mounts, whose server knows the same users.
    pub for_everybody: bool,
}

/// A FUSE device that was just mounted.
#[derive(Debug)]
pub struct NewMount {
    /// The device, which must be served.
    pub device: OwnedFd,
    /// The mount.
    pub volume: MountedVolume,
}

/// Mounts a new FUSE device on a directory. No access to the directory returns until the device is
/// served, so this process must make none before.
///
/// # Errors
/// The kernel's or fusermount3's; `PermissionDenied` if other users can redirect the path.
pub fn mount(wanted: &Wanted<'_>, directory: &Path) -> io::Result<NewMount> {
    let point = Point::find(directory)?;
    let device = match geteuid().is_root().then(|| by_the_kernel(wanted, &point)) {
        Some(Ok(device)) => device,
        // Root of a user namespace, say.
        Some(Err(error)) if error.raw_os_error() != Some(Errno::EPERM as i32) => return Err(error),
        _ => by_fusermount(wanted, &point)?,
    };
    Ok(NewMount { device, volume: MountedVolume::on(&point.descriptor)? })
}

/// The directory to mount on.
#[derive(Debug)]
struct Point {
    descriptor: OwnedFd,
    /// Its path, if only root and the user can change it; otherwise the mount goes by the
    /// descriptor alone.
    trusted: Result<PathBuf, Untrusted>,
}

impl Point {
    /// Opens the directory. Symbolic links are followed only in directories that others can't
    /// write; elsewhere another user's link could redirect the mount to any directory.
    fn find(directory: &Path) -> io::Result<Self> {
        match trusted_path::directory(directory, geteuid().as_raw()) {
            Ok(found) => Ok(Self { descriptor: found.descriptor, trusted: Ok(found.path) }),
            Err(why) if why.is_missing() => Err(why.into()),
            Err(why) => {
                let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
                match openat2(CWD, directory, flags, Mode::empty(), ResolveFlags::NO_SYMLINKS) {
                    Ok(descriptor) => Ok(Self { descriptor, trusted: Err(why) }),
                    Err(rustix::io::Errno::LOOP) => Err(io::Error::new(
                        io::ErrorKind::PermissionDenied,
                        format!("{why}, and a link is on the way"),
                    )),
                    Err(error) => Err(error.into()),
                }
            }
        }
    }
}

/// Sets the kernel's read-ahead for a mount with that device number. This needs root; without it
/// reads are smaller.
pub fn read_ahead(major: u32, minor: u32, kib: u32) {
    let file = format!("/sys/class/bdi/{major}:{minor}/read_ahead_kb");
    let _ = fs::write(file, kib.to_string());
}

fn by_the_kernel(wanted: &Wanted<'_>, point: &Point) -> io::Result<OwnedFd> {
    let device = File::options().read(true).write(true).open("/dev/fuse")?;
    let mut options = format!(
        "fd={},rootmode=40000,user_id={},group_id={}",
        device.as_raw_fd(),
        geteuid().as_raw(),
        getegid().as_raw()
    );
    if wanted.for_everybody {
        options.push_str(",allow_other,default_permissions");
    }
    let mut flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
    if wanted.read_only {
        flags |= MsFlags::MS_RDONLY;
    }
    let target = format!("/proc/self/fd/{}", point.descriptor.as_raw_fd());
    mount_2(Some(wanted.source), target.as_str(), Some(FS_TYPE), flags, Some(options.as_str()))?;
    Ok(device.into())
}

/// Mounts by fusermount3, which sends the device through the socket that `_FUSE_COMMFD` names: its
/// standard input. It takes a path and resolves it anew, so the path must be trusted.
fn by_fusermount(wanted: &Wanted<'_>, point: &Point) -> io::Result<OwnedFd> {
    let refused =
        |why: &Untrusted| io::Error::new(io::ErrorKind::PermissionDenied, why.to_string());
    let directory = point.trusted.as_ref().map_err(refused)?;
    let (ours, theirs) = UnixStream::pair()?;
    let source = wanted.source.replace('\\', "\\\\").replace(',', "\\,");
    let access = if wanted.read_only { "ro" } else { "rw" };
    let mut fusermount = Command::new("fusermount3");
    fusermount.arg("-o").arg(format!("{access},nosuid,nodev,fsname={source},subtype={SUBTYPE}"));
    fusermount.arg("--").arg(directory).env("_FUSE_COMMFD", "0");
    let child = fusermount
        .stdin(OwnedFd::from(theirs))
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn();
    drop(fusermount);
    let child = child.map_err(no_fusermount)?;
    let received = receive(&ours);
    let ended = child.wait_with_output()?;
    match received? {
        Some(device) if ended.status.success() => Ok(device),
        _ => Err(said(&ended.stderr)),
    }
}

/// Receives a descriptor; `None` if the other end has closed without sending one.
fn receive(socket: &UnixStream) -> io::Result<Option<OwnedFd>> {
    let mut byte = [0; 1];
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut into = [io::IoSliceMut::new(&mut byte)];
    recvmsg(socket, &mut into, &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let descriptors = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
        _ => None,
    });
    Ok(descriptors.flatten().next())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt as _, chown, symlink};

    use super::*;

    /// Needs root, to have a directory of somebody else.
    #[test]
    fn a_link_in_a_directory_of_others_leads_no_mount_elsewhere() {
        let top = tempfile::tempdir().expect("a directory");
        let at = |name: &str| top.path().join(name);
        ["own/target", "others/real"]
            .iter()
            .for_each(|name| fs::create_dir_all(at(name)).expect("made"));
        symlink(at("own/target"), at("own/link")).expect("made");
        symlink(at("own/target"), at("others/link")).expect("made");
        symlink(at("own"), at("others/way")).expect("made");
        let is_target = |point: &Point| {
            let (found, target) =
                (rustix::fs::fstat(&point.descriptor), rustix::fs::stat(at("own/target")));
            found.is_ok_and(|found| target.is_ok_and(|target| found.st_ino == target.st_ino))
        };
        // While they are one's own.
        assert!(
            Point::find(&at("others/link"))
                .is_ok_and(|point| is_target(&point) && point.trusted.is_ok())
        );
        chown(at("others"), Some(12_345), None).expect("root may");
        assert!(Point::find(&at("own/link")).is_ok_and(|point| is_target(&point)));
        assert!(Point::find(&at("others/real")).is_ok_and(|point| point.trusted.is_err()));
        for path in ["others/link", "others/way/target"] {
            let why = Point::find(&at(path)).expect_err(path).to_string();
            assert!(
                why.contains("belongs to user 12345") && why.ends_with("and a link is on the way"),
                "{why}"
            );
        }
        chown(at("others"), Some(0), None).expect("root may");
        fs::set_permissions(at("others"), fs::Permissions::from_mode(0o777)).expect("root may");
        assert!(Point::find(&at("others/link")).is_err());
    }
}
