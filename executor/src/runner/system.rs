//! The part of the server's own tree that a view shows: its programs, the few files of `/etc` that
//! programs need, harmless devices, and `/proc`. All of it is read-only.
//!
//! Invariant: nothing leads to a hidden path, whatever happens on the server while a view lives. A
//! mount over a hidden directory would go with the directory when that is renamed or removed. So a
//! directory above a hidden path is not shown itself, but made anew of its other entries
//! ([`Hidden`]); a view shows no later ones, and later runs have another view (`pool`).

use std::{
    collections::BTreeSet,
    ffi::OsStr,
    fs,
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::ffi::OsStrExt as _,
    },
    path::{Path, PathBuf},
};

use nix::{
    dir::Dir,
    errno::Errno,
    fcntl::{OFlag, open, openat},
    libc,
    sys::stat::{FileStat, Mode, SFlag, fchmod, fstat},
    unistd::fchown,
};
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_string, fsmount,
    fsopen,
};

use super::{
    root::{Root, detach, errno},
    scratch,
    view::{PROGRAM_LINKS, SHOWN, failed, is_shown},
    wire::Isolation,
};
use crate::error::Refusal;

/// Files of `/etc` that decide how programs run and what they print. No command needs the others
/// (passwords, keys of the host, configurations of services). `gitconfig` and `gitattributes` are
/// missing on purpose: the workstation sends its own.
const ETC: [&str; 24] = [
    // Names of owners, for `ls -l`, tar and find.
    "passwd",
    "group",
    "nsswitch.conf",
    // Times, unless the workstation sends its own zone.
    "localtime",
    "timezone",
    // Search path and cache of libraries.
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "ld.so.preload",
    "ld-musl-x86_64.path",
    "ld-musl-x86_64.d",
    // Choices among alternative programs: targets of links like /usr/bin/awk.
    "alternatives",
    // Kinds of files, for file(1).
    "magic",
    "magic.mime",
    "mime.types",
    // Locales and terminals that are not in /usr.
    "locale.alias",
    "terminfo",
    // The list of mounts, for `find -fstype` and `stat -f`: a link into the view's own /proc.
    "mtab",
    // Extended attributes that cp(1) copies.
    "xattr.conf",
    // ImageMagick's bounds, and the fonts that it draws with.
    "ImageMagick-6",
    "ImageMagick-7",
    "fonts",
    // Files of some distributions that others have in /usr.
    "static",
    "selinux",
];

/// A file of `/etc/ssl`, whose other files are keys: the checksums of coreutils use OpenSSL, which
/// reads it.
const OPENSSL: &str = "/etc/ssl/openssl.cnf";

/// Devices that give or take nothing of this machine's.
const DEVICES: [&str; 6] = ["null", "zero", "full", "random", "urandom", "tty"];

/// Names of a process's descriptors.
const DEVICE_LINKS: [(&str, &str); 4] = [
    ("/dev/fd", "/proc/self/fd"),
    ("/dev/stdin", "/proc/self/fd/0"),
    ("/dev/stdout", "/proc/self/fd/1"),
    ("/dev/stderr", "/proc/self/fd/2"),
];

/// Number of processors; commands need nothing else of /sys.
const PROCESSORS: &str = "/sys/devices/system/cpu";

/// For programs and their files: no devices, and no set-user-id.
const PROGRAMS: u64 = libc::MOUNT_ATTR_RDONLY | libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NODEV;

/// For devices: they are read and written, but their nodes' owner, mode and times can't be changed.
const NODES: u64 = libc::MOUNT_ATTR_RDONLY | libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NOEXEC;

/// For the kernel's files about processes and processors.
const KERNELS: u64 = PROGRAMS | libc::MOUNT_ATTR_NOEXEC;

/// For the private directories, which commands write to.
const OWN: u64 = libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NODEV;

/// A part of the server's tree that is to be placed in the view.
pub struct ServerTree {
    path: PathBuf,
    what: What,
}

enum What {
    Directory(OwnedFd),
    File(OwnedFd),
    Link(PathBuf),
    /// A directory to be made, with the rights of one on the server.
    Anew(FileStat),
}

/// Paths that a view does not show, and the directories above them.
#[derive(Debug, Default)]
pub struct Hidden {
    paths: BTreeSet<PathBuf>,
    above: BTreeSet<PathBuf>,
}

impl Hidden {
    /// Of paths in what views show.
    pub fn of(paths: BTreeSet<PathBuf>) -> Self {
        let above = paths.iter().flat_map(|path| path.ancestors().skip(1)).map(Path::to_owned);
        Self { above: above.collect(), paths }
    }

    /// Directories that are made anew of their entries.
    pub fn made_anew(&self) -> impl Iterator<Item = &Path> {
        self.above.iter().map(PathBuf::as_path).filter(|path| is_shown(path))
    }
}

impl ServerTree {
    /// Takes a directory, file, device or link of the server's, if it exists, with these
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

    /// Takes what is at a path, without what is hidden there.
    fn without(hidden: &Hidden, path: &Path, attributes: u64) -> Result<Vec<Self>, Refusal> {
        if hidden.paths.contains(path) {
            return Ok(Vec::new());
        }
        if !hidden.above.contains(path) {
            return Ok(Self::from(path, path, attributes)?.into_iter().collect());
        }
        let attempt = || format!("take {}", path.display());
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let mut directory = match Dir::open(path, flags, Mode::empty()) {
            Err(Errno::ENOENT) => return Ok(Vec::new()),
            // Only a link or a file: what is hidden is not below it.
            Err(Errno::ENOTDIR | Errno::ELOOP) => {
                return Ok(Self::from(path, path, attributes)?.into_iter().collect());
            }
            other => other.map_err(failed(attempt))?,
        };
        let rights = fstat(&directory).map_err(failed(attempt))?;
        let mut all = vec![Self { path: path.to_owned(), what: What::Anew(rights) }];
        for entry in directory.iter() {
            let entry = entry.map_err(failed(attempt))?;
            let name = entry.file_name().to_bytes();
            if name != b"." && name != b".." {
                let path = path.join(OsStr::from_bytes(name));
                all.extend(Self::without(hidden, &path, attributes)?);
            }
        }
        Ok(all)
    }

    /// Mounts it at its path.
    pub fn place(self, root: &Root) -> Result<(), Refusal> {
        let Self { path, what } = self;
        let placed = match what {
            What::Link(target) => root.link(&path, &target),
            What::Anew(rights) => root.point(&path).and_then(|at| set_rights(&at, &rights)),
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

/// Gives a directory of the view the owner and mode of one on the server.
fn set_rights(at: &OwnedFd, rights: &FileStat) -> nix::Result<()> {
    let at =
        openat(at, ".", OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC, Mode::empty())?;
    // In a user namespace others' ids can't be had: commands have this process's own rights there.
    let _ = fchown(&at, Some(rights.st_uid.into()), Some(rights.st_gid.into()));
    fchmod(&at, Mode::from_bits_truncate(rights.st_mode))
}

/// Returns true if every view shows `path`, which has no links in it, unless it is hidden there.
pub fn is_in_every_view(path: &Path) -> bool {
    SHOWN.iter().chain(&PROGRAM_LINKS).any(|shown| path.starts_with(shown))
        || etc().any(|shown| path.starts_with(shown))
}

/// The files of /etc that a view shows.
pub fn etc() -> impl Iterator<Item = PathBuf> {
    ETC.iter().map(|name| Path::new("/etc").join(name)).chain([PathBuf::from(OPENSSL)])
}

/// Paths that a view shows of the server, each with the attributes of its mount.
pub fn taken() -> impl Iterator<Item = (PathBuf, u64)> {
    let programs =
        SHOWN.iter().copied().chain(PROGRAM_LINKS).map(|path| (PathBuf::from(path), PROGRAMS));
    let etc = etc().map(|path| (path, PROGRAMS));
    let devices = DEVICES.iter().map(|name| (Path::new("/dev").join(name), NODES));
    programs.chain(etc).chain(devices).chain([(PathBuf::from(PROCESSORS), KERNELS)])
}

/// Takes all that a view shows of the server. The client has its own in place of `replaced` files.
pub fn take(
    isolation: Isolation,
    hidden: &Hidden,
    replaced: &[&Path],
) -> Result<Vec<ServerTree>, Refusal> {
    let links = DEVICE_LINKS
        .map(|(path, target)| ServerTree { path: path.into(), what: What::Link(target.into()) });
    let mut all = Vec::from(links);
    for (path, attributes) in taken() {
        if !replaced.contains(&path.as_path()) {
            all.extend(ServerTree::without(hidden, &path, attributes)?);
        }
    }
    all.extend(processes(isolation)?);
    Ok(all)
}

/// Makes and takes /tmp and /var/tmp.
pub fn take_private(scratch: &Path, bytes: u64) -> Result<Vec<ServerTree>, Refusal> {
    let made = scratch::make(&scratch.join("private"), bytes)?;
    let taken =
        made.iter().map(|(directory, path)| ServerTree::from(directory, path, OWN).transpose());
    taken.flatten().collect()
}

/// Mounts /proc with processes only, if the kernel can leave the rest out, such as the machine's
/// settings. This happens while the server's own is still mounted: else the kernel refuses it to a
/// user namespace.
fn processes(isolation: Isolation) -> Result<Option<ServerTree>, Refusal> {
    let path = Path::new("/proc");
    if isolation != Isolation::MountsAndProcesses {
        return ServerTree::from(path, path, KERNELS);
    }
    let tree = new_proc().map_err(failed(|| "mount /proc".to_owned()))?;
    Ok(Some(ServerTree { path: path.to_owned(), what: What::Directory(tree) }))
}

fn new_proc() -> nix::Result<OwnedFd> {
    let context = fsopen("proc", FsOpenFlags::FSOPEN_CLOEXEC).map_err(errno)?;
    // Kernels before 5.8 do not know this option.
    let _ = fsconfig_set_string(context.as_fd(), "subset", "pid");
    fsconfig_create(context.as_fd()).map_err(errno)?;
    let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID
        | MountAttrFlags::MOUNT_ATTR_NODEV
        | MountAttrFlags::MOUNT_ATTR_NOEXEC
        | MountAttrFlags::MOUNT_ATTR_RDONLY;
    fsmount(context.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, attributes).map_err(errno)
}
