//! What of the server's own tree a view shows: its programs, the few files of `/etc`
//! that programs need, harmless devices, and `/proc`. All of it is read-only.

use std::{
    fs,
    os::fd::{AsFd as _, OwnedFd},
    path::{Path, PathBuf},
};

use nix::{
    errno::Errno,
    fcntl::{OFlag, open},
    libc,
    sys::stat::{Mode, SFlag, fstat},
};
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_string, fsmount,
    fsopen,
};

use super::{
    root::{Root, detach, errno},
    scratch,
    view::{PROGRAM_LINKS, SHOWN, failed},
    wire::Isolation,
};
use crate::error::Refusal;

/// Of `/etc`, what decides how programs run and what they print. What is not here
/// (passwords, keys of the host, configurations of services) no command has to know.
/// `gitconfig` and `gitattributes` are missing on purpose: the workstation sends its own.
const ETC: [&str; 24] = [
    // Names of owners, in `ls -l`, tar and find.
    "passwd",
    "group",
    "nsswitch.conf",
    // Times, unless the workstation sends its own zone.
    "localtime",
    "timezone",
    // Which libraries there are.
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "ld.so.preload",
    "ld-musl-x86_64.path",
    "ld-musl-x86_64.d",
    // Which of several programs a name means: /usr/bin/awk leads here.
    "alternatives",
    // Kinds of files, for file(1).
    "magic",
    "magic.mime",
    "mime.types",
    // Locales and terminals by other names than /usr has.
    "locale.alias",
    "terminfo",
    // The list of mounts, for `find -fstype` and `stat -f`: a link into the view's own /proc.
    "mtab",
    // What cp(1) copies of extended attributes.
    "xattr.conf",
    // ImageMagick's bounds, and the fonts that it draws with.
    "ImageMagick-6",
    "ImageMagick-7",
    "fonts",
    // Where some distributions keep what others have in /usr.
    "static",
    "selinux",
];

/// Of `/etc/ssl`, whose other files are keys: the checksums of coreutils use OpenSSL, which reads
/// it.
const OPENSSL: &str = "/etc/ssl/openssl.cnf";

/// Devices that give or take nothing of this machine's.
const DEVICES: [&str; 6] = ["null", "zero", "full", "random", "urandom", "tty"];

/// What the descriptors of a process are called.
const DEVICE_LINKS: [(&str, &str); 4] = [
    ("/dev/fd", "/proc/self/fd"),
    ("/dev/stdin", "/proc/self/fd/0"),
    ("/dev/stdout", "/proc/self/fd/1"),
    ("/dev/stderr", "/proc/self/fd/2"),
];

/// How many processors there are; nothing else of /sys is anybody's business.
const PROCESSORS: &str = "/sys/devices/system/cpu";

/// For what programs are made of: nothing in it is a device, or gives another user's rights.
const PROGRAMS: u64 = libc::MOUNT_ATTR_RDONLY | libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NODEV;

/// For devices: they are read and written, and nobody changes the node's owner, mode or times.
const NODES: u64 = libc::MOUNT_ATTR_RDONLY | libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NOEXEC;

/// For what the kernel says of processes and processors.
const KERNELS: u64 = PROGRAMS | libc::MOUNT_ATTR_NOEXEC;

/// For the private directories, which commands write to.
const OWN: u64 = libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NODEV;

/// Something of the server's that waits to be placed in the view.
pub struct Taken {
    path: PathBuf,
    what: What,
}

enum What {
    Directory(OwnedFd),
    File(OwnedFd),
    Link(PathBuf),
}

impl Taken {
    /// Takes a directory, file, device or link of the server's, if there is one, with these
    /// attributes.
    fn from(source: &Path, path: &Path, attributes: u64) -> Result<Option<Self>, Refusal> {
        let attempt = || format!("take {}", source.display());
        let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let at = match open(source, flags, Mode::empty()) {
            Err(Errno::ENOENT | Errno::ENOTDIR) => return Ok(None),
            other => other.map_err(failed(attempt))?,
        };
        let mode = fstat(&at).map_err(failed(attempt))?.st_mode & libc::S_IFMT;
        let tree = || detach(at.as_fd(), attributes).map_err(failed(attempt));
        let what = match SFlag::from_bits_truncate(mode) {
            SFlag::S_IFDIR => What::Directory(tree()?),
            SFlag::S_IFREG | SFlag::S_IFCHR => What::File(tree()?),
            SFlag::S_IFLNK => What::Link(fs::read_link(source).map_err(failed(attempt))?),
            _ => return Ok(None),
        };
        Ok(Some(Self { path: path.to_owned(), what }))
    }

    /// Puts it at its path.
    pub fn place(self, root: &Root) -> Result<(), Refusal> {
        let Self { path, what } = self;
        let placed = match what {
            What::Link(target) => root.link(&path, &target),
            What::Directory(tree) => root
                .point(&path)
                .and_then(|_| root.find(&path))
                .and_then(|at| root.attach(&tree, &at)),
            What::File(tree) => root
                .empty_file(&path)
                .and_then(|()| root.find(&path))
                .and_then(|at| root.attach(&tree, &at)),
        };
        placed.map_err(failed(|| format!("show {}", path.display())))
    }
}

/// Tells if every view shows what is at `path`, which has no links in it, unless it is hidden
/// there.
pub fn is_in_every_view(path: &Path) -> bool {
    SHOWN.iter().chain(&PROGRAM_LINKS).any(|shown| path.starts_with(shown))
        || etc().any(|shown| path.starts_with(shown))
}

/// What of /etc a view shows.
pub fn etc() -> impl Iterator<Item = PathBuf> {
    ETC.iter().map(|name| Path::new("/etc").join(name)).chain([PathBuf::from(OPENSSL)])
}

/// Takes all that a view shows of the server. In place of `replaced` files the client has its own.
pub fn take(isolation: Isolation, replaced: &[&Path]) -> Result<Vec<Taken>, Refusal> {
    let programs =
        SHOWN.iter().copied().chain(PROGRAM_LINKS).map(|path| (PathBuf::from(path), PROGRAMS));
    let etc = etc().map(|path| (path, PROGRAMS));
    let devices = DEVICES.iter().map(|name| (Path::new("/dev").join(name), NODES));
    let processors = [(PathBuf::from(PROCESSORS), KERNELS)];
    let links = DEVICE_LINKS
        .map(|(path, target)| Taken { path: path.into(), what: What::Link(target.into()) });
    let mut all = Vec::from(links);
    for (path, attributes) in programs.chain(etc).chain(devices).chain(processors) {
        if !replaced.contains(&path.as_path()) {
            all.extend(Taken::from(&path, &path, attributes)?);
        }
    }
    all.extend(processes(isolation)?);
    Ok(all)
}

/// Makes and takes /tmp and /var/tmp.
pub fn take_private(scratch: &Path, bytes: u64) -> Result<Vec<Taken>, Refusal> {
    let made = scratch::make(&scratch.join("private"), bytes)?;
    let taken = made.iter().map(|(directory, path)| Taken::from(directory, path, OWN).transpose());
    taken.flatten().collect()
}

/// Only processes, where the kernel can leave the rest out: settings of the machine are there too.
/// It is mounted while the server's own is still there, without which the kernel gives none to a
/// user namespace.
fn processes(isolation: Isolation) -> Result<Option<Taken>, Refusal> {
    let path = Path::new("/proc");
    if isolation != Isolation::MountsAndProcesses {
        return Taken::from(path, path, KERNELS);
    }
    let tree = new_proc().map_err(failed(|| "mount /proc".to_owned()))?;
    Ok(Some(Taken { path: path.to_owned(), what: What::Directory(tree) }))
}

fn new_proc() -> nix::Result<OwnedFd> {
    let context = fsopen("proc", FsOpenFlags::FSOPEN_CLOEXEC).map_err(errno)?;
    // Kernels before 5.8 do not know it.
    let _ = fsconfig_set_string(context.as_fd(), "subset", "pid");
    fsconfig_create(context.as_fd()).map_err(errno)?;
    let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID
        | MountAttrFlags::MOUNT_ATTR_NODEV
        | MountAttrFlags::MOUNT_ATTR_NOEXEC
        | MountAttrFlags::MOUNT_ATTR_RDONLY;
    fsmount(context.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, attributes).map_err(errno)
}
