//! Mounts and unmounts a FUSE device: as root by mount(2), so that mountinfo shows `fuse.posh`, as
//! another user by fusermount3(1). [`crate::fuse`] serves the device.

use std::{
    fs::{self, File},
    io,
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::{ffi::OsStrExt, net::UnixStream},
    },
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use nix::{
    errno::Errno,
    mount::{MntFlags, MsFlags, mount as mount_2, umount2},
    unistd::{getegid, geteuid},
};
use rustix::{
    fs::{CWD, Mode, OFlags, ResolveFlags, openat2},
    net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg},
};
use trusted_path::Untrusted;

/// File system type in mountinfo.
pub const FS_TYPE: &str = "fuse.posh";

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

/// Mounts a new FUSE device on a directory. No access to the directory returns until the device is
/// served, so this process must make none before.
///
/// # Errors
/// The kernel's or fusermount3's; `PermissionDenied` if other users can redirect the path.
pub fn mount(wanted: &Wanted<'_>, directory: &Path) -> io::Result<OwnedFd> {
    let point = Point::find(directory)?;
    if geteuid().is_root() {
        match by_the_kernel(wanted, &point) {
            // Root of a user namespace, say.
            Err(error) if error.raw_os_error() == Some(Errno::EPERM as i32) => {}
            outcome => return outcome,
        }
    }
    by_fusermount(wanted, &point)
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

/// Returns true if this process's mount table has a mount below a directory, or can't be read.
#[must_use]
pub fn has_mounts_below(directory: &Path) -> bool {
    let Ok(table) = fs::read("/proc/self/mountinfo") else { return true };
    let mut start = escaped(directory);
    start.push(b'/');
    let mut points = table
        .split(|byte| *byte == b'\n')
        .filter_map(|line| line.split(|byte| *byte == b' ').nth(4));
    points.any(|point| point.starts_with(&start))
}

/// Escapes a path as in mountinfo (proc(5)).
fn escaped(path: &Path) -> Vec<u8> {
    let escape = |byte: &u8| match byte {
        b' ' | b'\t' | b'\n' | b'\\' => format!("\\{byte:03o}").into_bytes(),
        _ => vec![*byte],
    };
    path.as_os_str().as_bytes().iter().flat_map(escape).collect()
}

/// Unmounts a directory lazily (`MNT_DETACH`), also if its FUSE server is dead. Open files stay
/// open.
///
/// # Errors
/// The kernel's or fusermount3's; `EINVAL` if nothing is mounted.
pub fn unmount(directory: &Path) -> io::Result<()> {
    match umount2(directory, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW) {
        Err(Errno::EPERM) => {}
        outcome => return outcome.map_err(io::Error::from),
    }
    let ended = Command::new("fusermount3")
        .args(["-u", "-z", "--"])
        .arg(directory)
        .stdin(Stdio::null())
        .output();
    let ended = ended.map_err(no_fusermount)?;
    if ended.status.success() { Ok(()) } else { Err(said(&ended.stderr)) }
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

fn no_fusermount(error: io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("cannot run fusermount3, install fuse3: {error}"))
}

fn said(stderr: &[u8]) -> io::Error {
    let text = String::from_utf8_lossy(stderr);
    io::Error::other(text.trim().to_owned())
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

/// Returns true if a directory is a FUSE mount whose server is dead (`ENOTCONN`).
#[must_use]
pub fn is_dead(directory: &Path) -> bool {
    matches!(nix::sys::statfs::statfs(directory), Err(Errno::ENOTCONN))
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
