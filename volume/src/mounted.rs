//! Volumes in the mount table of this process, and how they are unmounted.
//!
//! Invariant: the mount that ends is the one that was meant. Its path does not identify it: users
//! who can write a directory on the way can rename it, or put a link in its place, at any time. So
//! a mount is known by its ID, and umount2(2) is given no name to look up: it gets a descriptor of
//! the mount's root, and the descriptor tells the ID (proc(5), `mnt_id`). A mount ID can be used
//! again, so it counts only with the device. fusermount3(1), for users other than root, unmounts
//! nothing but what the user has mounted.

use std::{
    fs, io,
    os::{
        fd::{AsFd, AsRawFd as _, OwnedFd},
        unix::ffi::OsStringExt as _,
    },
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use nix::{
    errno::Errno,
    mount::{MntFlags, umount2},
    sys::statfs::fstatfs,
    unistd::geteuid,
};
use rustix::fs::{CWD, Mode, OFlags, ResolveFlags, openat2};

/// File system type in mountinfo.
pub(crate) const FS_TYPE: &str = "fuse.posh";

/// Limit of attempts to open a mount's root, if a directory on the way is renamed each time.
const ATTEMPTS: usize = 1000;

/// A mounted volume, of this gateway or another one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MountedVolume {
    id: u32,
    device: (u32, u32),
    path: PathBuf,
}

/// Reason why a mount's root can't be opened.
#[derive(Debug, thiserror::Error)]
enum OutOfReach {
    #[error("another file system is mounted over it; unmount that first")]
    Covered,
    #[error("a directory on the way is covered by a mount, or renamed again and again")]
    Hidden,
}

/// The root of a mount.
struct MountRoot {
    descriptor: OwnedFd,
    path: PathBuf,
}

/// A line of mountinfo.
#[derive(Debug)]
struct Line {
    id: u32,
    parent: u32,
    device: (u32, u32),
    path: PathBuf,
    fs_type: Vec<u8>,
    /// Options of the file system.
    options: Vec<u8>,
}

impl MountedVolume {
    /// Finds the volume that is mounted on a path, which has no symlinks, and not covered. Asks
    /// nothing of its server, which may be dead.
    ///
    /// # Errors
    /// The system's.
    pub fn at(path: &Path) -> io::Result<Option<Self>> {
        let root = match open_root(path) {
            Ok(root) => root,
            Err(rustix::io::Errno::LOOP | rustix::io::Errno::NOENT) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let id = mount_id(&root)?;
        let line = table()?.into_iter().find(|line| line.id == id);
        Ok(line
            .filter(|line| line.path == path && line.fs_type == FS_TYPE.as_bytes())
            .map(Self::of))
    }

    /// Finds the volume that this user has just mounted on a directory.
    ///
    /// # Errors
    /// The system's; `PermissionDenied` if the directory is renamed again and again.
    pub(crate) fn on(directory: &OwnedFd) -> io::Result<Self> {
        let parent = mount_id(directory)?;
        let user = format!("user_id={}", geteuid());
        for _ in 0..ATTEMPTS {
            let path = fs::read_link(format!("/proc/self/fd/{}", directory.as_raw_fd()))?;
            let is_it = |line: &Line| {
                line.parent == parent
                    && line.path == path
                    && line.fs_type == FS_TYPE.as_bytes()
                    && line.options.split(|byte| *byte == b',').any(|is| is == user.as_bytes())
            };
            if let Some(line) = table()?.into_iter().find(is_it) {
                return Ok(Self::of(line));
            }
        }
        Err(io::Error::new(io::ErrorKind::PermissionDenied, OutOfReach::Hidden))
    }

    fn of(line: Line) -> Self {
        Self { id: line.id, device: line.device, path: line.path }
    }

    /// Returns the major and minor number of its device.
    #[must_use]
    pub fn device(&self) -> (u32, u32) {
        self.device
    }

    /// Returns true if it is certainly mounted no more on the path that it was found on.
    #[must_use]
    pub fn has_left(&self) -> bool {
        self.line().is_ok_and(|line| line.is_none_or(|line| line.path != self.path))
    }

    /// Returns true if it is certainly mounted no more.
    #[must_use]
    pub fn is_unmounted(&self) -> bool {
        self.line().is_ok_and(|line| line.is_none())
    }

    /// Returns true if its server is dead (`ENOTCONN`), and it is not covered.
    #[must_use]
    pub fn is_dead(&self) -> bool {
        self.root().is_ok_and(|root| matches!(fstatfs(&root.descriptor), Err(Errno::ENOTCONN)))
    }

    /// Unmounts it lazily (`MNT_DETACH`), also if its FUSE server is dead, and wherever it has been
    /// moved to. Open files stay open.
    ///
    /// # Errors
    /// The kernel's or fusermount3's; `EINVAL` if it is not mounted; that it is covered by another
    /// mount.
    pub fn unmount(&self) -> io::Result<()> {
        let root = self.root()?;
        let link = format!("/proc/self/fd/{}", root.descriptor.as_raw_fd());
        match umount2(link.as_str(), MntFlags::MNT_DETACH) {
            Err(Errno::EPERM) => {}
            outcome => return outcome.map_err(io::Error::from),
        }
        let mut fusermount = Command::new("fusermount3");
        fusermount.args(["-u", "-z", "--"]).arg(root.path).stdin(Stdio::null());
        let ended = fusermount.output().map_err(no_fusermount)?;
        if ended.status.success() { Ok(()) } else { Err(said(&ended.stderr)) }
    }

    /// Opens its root where it is now.
    fn root(&self) -> io::Result<MountRoot> {
        for _ in 0..ATTEMPTS {
            let Some(Line { path, .. }) = self.line()? else { return Err(Errno::EINVAL.into()) };
            let Ok(descriptor) = open_root(&path) else { continue };
            let found = mount_id(&descriptor)?;
            if found == self.id {
                return Ok(MountRoot { descriptor, path });
            }
            if is_stacked(&table()?, found, self.id) {
                return Err(io::Error::other(OutOfReach::Covered));
            }
        }
        Err(io::Error::other(OutOfReach::Hidden))
    }

    /// Its line of the mount table, `None` if it is mounted no more.
    fn line(&self) -> io::Result<Option<Line>> {
        let is_it = |line: &Line| line.id == self.id && line.device == self.device;
        Ok(table()?.into_iter().find(is_it))
    }
}

/// Returns true if this process's mount table has a mount below a directory, or can't be read.
#[must_use]
pub fn has_mounts_below(directory: &Path) -> bool {
    let is_below = |line: &Line| line.path != directory && line.path.starts_with(directory);
    table().map_or(true, |table| table.iter().any(is_below))
}

pub(crate) fn no_fusermount(error: io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("cannot run fusermount3, install fuse3: {error}"))
}

/// The error message of fusermount3.
pub(crate) fn said(stderr: &[u8]) -> io::Error {
    let text = String::from_utf8_lossy(stderr);
    io::Error::other(text.trim().to_owned())
}

/// Returns true if a mount is mounted on the root of `lower`, or on that of one that is.
fn is_stacked(table: &[Line], id: u32, lower: u32) -> bool {
    let line = |id: u32| table.iter().find(|line| line.id == id);
    let below = |upper: &&Line| {
        line(upper.parent).filter(|under| under.id != upper.id && under.path == upper.path)
    };
    std::iter::successors(line(id), below).any(|upper| upper.parent == lower)
}

/// Opens what is at a path, without a request to the file system that is mounted on it.
fn open_root(path: &Path) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    openat2(CWD, path, flags, Mode::empty(), ResolveFlags::NO_SYMLINKS)
}

/// Reads from fdinfo: statx(2) may ask the file system.
fn mount_id(descriptor: &impl AsFd) -> io::Result<u32> {
    let number = descriptor.as_fd().as_raw_fd();
    let text = fs::read_to_string(format!("/proc/self/fdinfo/{number}"))?;
    let id = text.lines().find_map(|line| line.strip_prefix("mnt_id:")?.trim().parse().ok());
    id.ok_or_else(|| io::ErrorKind::InvalidData.into())
}

fn table() -> io::Result<Vec<Line>> {
    let text = fs::read("/proc/thread-self/mountinfo")?;
    Ok(text.split(|byte| *byte == b'\n').filter_map(line).collect())
}

/// Parses a line of mountinfo (proc(5)); `None` for another one.
fn line(text: &[u8]) -> Option<Line> {
    let mut fields = text.split(|byte| *byte == b' ');
    let number = |field: &[u8]| std::str::from_utf8(field).ok()?.parse().ok();
    let (id, parent) = (number(fields.next()?)?, number(fields.next()?)?);
    let device = std::str::from_utf8(fields.next()?).ok()?.split_once(':')?;
    let path = fields.nth(1)?;
    let mut last = fields.skip_while(|field| *field != b"-").skip(1);
    Some(Line {
        id,
        parent,
        device: (device.0.parse().ok()?, device.1.parse().ok()?),
        path: PathBuf::from(std::ffi::OsString::from_vec(unescaped(path))),
        fs_type: last.next()?.to_vec(),
        options: last.nth(1)?.to_vec(),
    })
}

/// Resolves the escapes of mountinfo: a backslash and three octal digits.
fn unescaped(field: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((first, others)) = rest.split_first() {
        let octal = || {
            let digits = std::str::from_utf8(others.get(..3)?).ok()?;
            u8::from_str_radix(digits, 8).ok()
        };
        match (*first == b'\\').then(octal).flatten() {
            Some(byte) => {
                bytes.push(byte);
                rest = &others[3..];
            }
            None => {
                bytes.push(*first);
                rest = others;
            }
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use std::{
        os::unix::fs::symlink,
        sync::{
            Arc,
            atomic::{AtomicBool, Ordering},
        },
    };

    use nix::{
        mount::{MsFlags, mount},
        sched::{CloneFlags, unshare},
    };
    use rustix::fs::{RenameFlags, renameat_with};

    use super::*;
    use crate::mount::{NewMount, Wanted};

    /// Runs as root in a mount namespace of its own, where mounts harm nobody.
    fn apart(test: impl FnOnce(&Path) + Send + 'static) {
        let thread = std::thread::spawn(|| {
            unshare(CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_FS).unwrap();
            let (none, private) = (None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE);
            mount(none, "/", none, private, none).unwrap();
            let top = tempfile::tempdir().unwrap();
            mount(none, top.path(), Some("tmpfs"), MsFlags::empty(), none).unwrap();
            test(&top.path().canonicalize().unwrap());
            umount2(top.path(), MntFlags::MNT_DETACH).unwrap();
        });
        thread.join().unwrap();
    }

    /// Nothing serves it: every request to it would wait for ever.
    fn mount_volume(on: &Path) -> io::Result<NewMount> {
        let wanted = Wanted { source: "s:x", read_only: false, for_everybody: true };
        crate::mount::mount(&wanted, on)
    }

    fn volume(on: &Path) -> NewMount {
        mount_volume(on).unwrap()
    }

    /// Looks at no directory that exists, which may be a volume.
    fn tmpfs(on: &Path) -> u32 {
        mount(None::<&str>, on, Some("tmpfs"), MsFlags::empty(), None::<&str>).unwrap();
        mount_id(&open_root(on).unwrap()).unwrap()
    }

    fn has(id: u32) -> bool {
        table().unwrap().iter().any(|line| line.id == id)
    }

    #[test]
    fn a_mount_that_a_link_leads_to_stays_and_a_volume_that_was_moved_ends() {
        apart(|top| {
            fs::create_dir_all(top.join("srv/data")).unwrap();
            let backup = tmpfs(&top.join("srv/data"));
            fs::create_dir_all(top.join("m/a b")).unwrap();
            let new = volume(&top.join("m/a b"));
            assert_eq!(MountedVolume::at(&top.join("m/a b")).unwrap().as_ref(), Some(&new.volume));
            fs::rename(top.join("m"), top.join("moved")).unwrap();
            symlink(top.join("srv"), top.join("m")).unwrap();
            assert!(MountedVolume::at(&top.join("m/data")).unwrap().is_none());
            assert!(MountedVolume::at(&top.join("srv/data")).unwrap().is_none());
            assert!(new.volume.has_left() && !new.volume.is_unmounted());
            new.volume.unmount().unwrap();
            assert!(new.volume.is_unmounted() && has(backup));
            new.volume.unmount().unwrap_err();
        });
    }

    #[test]
    fn no_exchange_of_directories_ends_another_mount() {
        apart(|top| {
            fs::create_dir_all(top.join("l/data")).unwrap();
            let backup = tmpfs(&top.join("l/data"));
            fs::create_dir_all(top.join("m/data")).unwrap();
            let names = [top.join("m"), top.join("l")];
            let over = Arc::new(AtomicBool::new(false));
            let is_over = Arc::clone(&over);
            // In this mount namespace.
            let exchange = std::thread::spawn(move || {
                while !is_over.load(Ordering::Relaxed) {
                    let flags = RenameFlags::EXCHANGE;
                    let _ = renameat_with(CWD, &names[0], CWD, &names[1], flags);
                }
            });
            for _ in 0..100 {
                // The tmpfs may be at the path just then; it is mounted over.
                if let Ok(new) = mount_volume(&top.join("m/data")) {
                    new.volume.unmount().unwrap();
                    assert!(new.volume.is_unmounted() && has(backup));
                }
            }
            over.store(true, Ordering::Relaxed);
            exchange.join().unwrap();
        });
    }

    #[test]
    fn a_covered_volume_stays_and_a_dead_one_is_seen_and_ends() {
        apart(|top| {
            let point = top.join("v");
            fs::create_dir(&point).unwrap();
            let NewMount { device, volume } = volume(&point);
            let over = tmpfs(&point);
            let told = volume.unmount().unwrap_err().to_string();
            assert!(told.contains("mounted over it") && has(over), "{told}");
            assert!(MountedVolume::at(&point).unwrap().is_none() && !volume.has_left());
            umount2(&point, MntFlags::MNT_DETACH).unwrap();
            assert!(has_mounts_below(top) && !has_mounts_below(&point));
            drop(device);
            let left = MountedVolume::at(&point).unwrap().unwrap();
            assert!(left.is_dead());
            left.unmount().unwrap();
            assert!(!has(left.id));
        });
    }

    #[test]
    fn lines_of_the_mount_table() {
        let text = br"41 29 0:57 / /mnt/a\040b\134 rw,nosuid master:1 - fuse.posh s:x rw,user_id=0";
        let line = line(text).unwrap();
        assert_eq!((line.id, line.parent, line.device), (41, 29, (0, 57)));
        assert_eq!(line.path, Path::new(r"/mnt/a b\"));
        assert_eq!(
            (&line.fs_type[..], &line.options[..]),
            (&b"fuse.posh"[..], &b"rw,user_id=0"[..])
        );
    }
}
