//! What of the server's own tree a view shows: its programs, the few files of `/etc`
//! that programs need, harmless devices, and `/proc`. All of it is read-only.
//!
//! It is taken as detached mounts (open_tree(2), fsmount(2)) while the server's root is still there, and
//! attached when that has left the view. Every name here is the server's or this file's.

use std::{
    fs,
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
};

use nix::libc;
use rustix::{
    fs::CWD,
    mount::{
        FsMountFlags, FsOpenFlags, MountAttrFlags, OpenTreeFlags, fsconfig_create, fsconfig_set_string, fsmount,
        fsopen, open_tree,
    },
};

use super::{
    places::is_program_link,
    root::Root,
    view::{SHOWN, failed},
    wire::Isolation,
};
use crate::{error::Refusal, sys};

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

/// Of `/etc/ssl`, whose other files are keys: the checksums of coreutils use OpenSSL, which reads it.
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

/// For devices: read-only is the node (its owner, mode and times), not what is read and written through it.
const DEVICE: u64 = libc::MOUNT_ATTR_RDONLY | libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NOEXEC;

/// One thing to show, and where.
enum Part {
    /// A detached mount of a directory.
    Tree(OwnedFd),
    /// A detached mount of a file or a device.
    File(OwnedFd),
    /// A symbolic link.
    Link(PathBuf),
}

/// What a view shows of the server.
pub struct Parts(Vec<(PathBuf, Part)>);

impl Parts {
    /// Takes all of it from the present root, other than the files that the workstation replaces.
    pub fn of_server(isolation: Isolation, replaced: &[&Path]) -> Result<Self, Refusal> {
        let mut parts = Self(Vec::new());
        parts.take_programs()?;
        parts.take_etc(replaced)?;
        for name in DEVICES {
            parts.take(&Path::new("/dev").join(name), DEVICE)?;
        }
        let links = DEVICE_LINKS.iter().map(|(link, target)| (PathBuf::from(link), Part::Link(target.into())));
        parts.0.extend(links);
        parts.take_processors()?;
        parts.0.push((PathBuf::from("/proc"), Part::Tree(processes(isolation)?)));
        Ok(parts)
    }

    /// Puts all of it into a new root.
    pub fn show(self, root: &Root) -> Result<(), Refusal> {
        for (path, part) in self.0 {
            match part {
                Part::Link(target) => root.make_link(&path, &target)?,
                Part::Tree(tree) => {
                    root.make_directory(&path)?;
                    root.mount(&tree, &path)?;
                }
                Part::File(file) => {
                    root.make_file(&path)?;
                    root.mount(&file, &path)?;
                }
            }
        }
        ["/run", "/home", "/mnt", "/etc"].iter().try_for_each(|path| root.make_directory(Path::new(path)).map(drop))
    }

    fn take_programs(&mut self) -> Result<(), Refusal> {
        let entries = fs::read_dir("/").map_err(failed(|| "list the server's root".to_owned()))?;
        for entry in entries.flatten() {
            let path = Path::new("/").join(entry.file_name());
            let is_link = entry.file_name().to_str().is_some_and(is_program_link);
            if is_link || SHOWN.iter().any(|shown| path == Path::new(shown)) {
                self.take(&path, PROGRAMS)?;
            }
        }
        Ok(())
    }

    fn take_etc(&mut self, replaced: &[&Path]) -> Result<(), Refusal> {
        for path in ETC.iter().map(|name| Path::new("/etc").join(name)).chain([PathBuf::from(OPENSSL)]) {
            if !replaced.iter().any(|file| file.starts_with(&path)) {
                self.take(&path, PROGRAMS)?;
            } else if path.is_dir() {
                self.take_entries(&path, replaced)?;
            }
        }
        Ok(())
    }

    /// The entries of a directory one by one, so that the workstation's files have room beside them.
    fn take_entries(&mut self, directory: &Path, replaced: &[&Path]) -> Result<(), Refusal> {
        let entries = fs::read_dir(directory).map_err(failed(|| format!("list {}", directory.display())))?;
        for path in entries.flatten().map(|entry| entry.path()) {
            if !replaced.contains(&path.as_path()) {
                self.take(&path, PROGRAMS)?;
            }
        }
        Ok(())
    }

    /// A file, a directory or a link as it is, if it exists.
    fn take(&mut self, path: &Path, attributes: u64) -> Result<(), Refusal> {
        let Ok(found) = fs::symlink_metadata(path) else { return Ok(()) };
        let part = if found.is_symlink() {
            Part::Link(fs::read_link(path).map_err(failed(|| format!("read the link {}", path.display())))?)
        } else {
            let tree = detached(CWD, path)?;
            set_attributes(&tree, attributes, path)?;
            if found.is_dir() { Part::Tree(tree) } else { Part::File(tree) }
        };
        self.0.push((path.to_owned(), part));
        Ok(())
    }

    fn take_processors(&mut self) -> Result<(), Refusal> {
        let path = Path::new(PROCESSORS);
        if !path.exists() {
            return Ok(());
        }
        let tree = detached(CWD, path)?;
        // Best effort: a kernel file system below it may not allow it, and nothing there can be
        // written without the rights that commands do not have.
        let _ = set_attributes(&tree, libc::MOUNT_ATTR_RDONLY, path);
        self.0.push((path.to_owned(), Part::Tree(tree)));
        Ok(())
    }
}

/// A copy of the mount at `path`, and of all below it, that is mounted nowhere. An empty path is `at` itself.
pub fn detached(at: impl AsFd, path: &Path) -> Result<OwnedFd, Refusal> {
    // AT_RECURSIVE and AT_EMPTY_PATH are taken by open_tree(2), too.
    const FLAGS: OpenTreeFlags = OpenTreeFlags::OPEN_TREE_CLONE
        .union(OpenTreeFlags::OPEN_TREE_CLOEXEC)
        .union(OpenTreeFlags::AT_RECURSIVE)
        .union(OpenTreeFlags::AT_EMPTY_PATH)
        .union(OpenTreeFlags::AT_SYMLINK_NOFOLLOW);
    open_tree(at, path, FLAGS).map_err(failed(|| format!("take {} along", path.display())))
}

/// Adds attributes to a detached mount and to all below it.
pub fn set_attributes(tree: &OwnedFd, attributes: u64, path: &Path) -> Result<(), Refusal> {
    let attempt = || format!("set the attributes of the mount {}", path.display());
    sys::set_mount(tree.as_fd(), attributes, true).map_err(failed(attempt))
}

/// A `/proc`. Only processes, where the kernel can leave the rest out: settings of the machine are there too.
fn processes(isolation: Isolation) -> Result<OwnedFd, Refusal> {
    if isolation != Isolation::MountsAndProcesses {
        let tree = detached(CWD, Path::new("/proc"))?;
        let _ = set_attributes(&tree, libc::MOUNT_ATTR_RDONLY, Path::new("/proc"));
        return Ok(tree);
    }
    let mount = |subset: &[(&str, &str)]| {
        let attributes = MountAttrFlags::MOUNT_ATTR_RDONLY
            | MountAttrFlags::MOUNT_ATTR_NOSUID
            | MountAttrFlags::MOUNT_ATTR_NODEV
            | MountAttrFlags::MOUNT_ATTR_NOEXEC;
        new_mount("proc", subset, attributes)
    };
    // In a user namespace it takes a /proc that can be seen as a whole, which the server's root has.
    mount(&[("subset", "pid")]).or_else(|_| mount(&[])).map_err(failed(|| "mount /proc".to_owned()))
}

/// A new file system that is mounted nowhere.
pub fn new_mount(kind: &str, options: &[(&str, &str)], attributes: MountAttrFlags) -> rustix::io::Result<OwnedFd> {
    let context = fsopen(kind, FsOpenFlags::FSOPEN_CLOEXEC)?;
    for (key, value) in options {
        fsconfig_set_string(&context, *key, *value)?;
    }
    fsconfig_create(&context)?;
    fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)
}
