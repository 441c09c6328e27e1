//! What of the server's own tree a view shows: its programs, the few files of `/etc`
//! that programs need, harmless devices, and `/proc`. All of it is read-only.

use std::{
    fs::{self, File},
    os::unix::fs::symlink,
    path::{Path, PathBuf},
};

use nix::{
    libc,
    mount::{MsFlags, mount},
};

use super::{
    build::{OLD_ROOT, bind, in_old_root, make_directory, set_mount, set_read_only},
    view::{SHOWN, failed, is_program_link},
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

/// Puts all of it into the new root, which is the current one; the server's is at [`OLD_ROOT`].
pub fn show(isolation: Isolation) -> Result<(), Refusal> {
    show_programs()?;
    show_etc()?;
    show_devices()?;
    show_processors()?;
    show_processes(isolation)
}

fn show_programs() -> Result<(), Refusal> {
    let entries = fs::read_dir(OLD_ROOT).map_err(failed(|| "list the server's root".to_owned()))?;
    for entry in entries.flatten() {
        let name = entry.file_name();
        let path = Path::new("/").join(&name);
        if SHOWN.iter().any(|shown| path == Path::new(shown)) || name.to_str().is_some_and(is_program_link) {
            show_one(&path)?;
        }
    }
    Ok(())
}

fn show_etc() -> Result<(), Refusal> {
    make_directory(Path::new("/etc"))?;
    for name in ETC {
        show_one(&Path::new("/etc").join(name))?;
    }
    if in_old_root(Path::new(OPENSSL)).is_file() {
        make_directory(Path::new("/etc/ssl"))?;
        show_one(Path::new(OPENSSL))?;
    }
    Ok(())
}

/// Shows a file or directory of the server, or a link as it is, if it exists.
fn show_one(path: &Path) -> Result<(), Refusal> {
    let source = in_old_root(path);
    if let Ok(target) = fs::read_link(&source) {
        return symlink(target, path).map_err(failed(|| format!("link {}", path.display())));
    }
    if source.is_dir() {
        make_directory(path)?;
    } else if source.is_file() {
        make_file(path)?;
    } else {
        return Ok(());
    }
    bind(&source, path)?;
    set_mount(path, PROGRAMS)
}

fn show_devices() -> Result<(), Refusal> {
    make_directory(Path::new("/dev"))?;
    for name in DEVICES {
        let path = Path::new("/dev").join(name);
        let source = in_old_root(&path);
        if source.exists() {
            make_file(&path)?;
            bind(&source, &path)?;
        }
    }
    for (link, target) in DEVICE_LINKS {
        symlink(target, link).map_err(failed(|| format!("link {link}")))?;
    }
    Ok(())
}

fn show_processors() -> Result<(), Refusal> {
    fs::create_dir_all(PROCESSORS).map_err(failed(|| format!("make {PROCESSORS}")))?;
    let source = in_old_root(Path::new(PROCESSORS));
    if !source.exists() {
        return Ok(());
    }
    bind(&source, Path::new(PROCESSORS))?;
    // Best effort: a kernel file system below it may not allow it, and nothing there can be
    // written without the rights that commands do not have.
    let _ = set_read_only(Path::new(PROCESSORS));
    Ok(())
}

/// Only processes, where the kernel can leave the rest out: settings of the machine are there too.
fn show_processes(isolation: Isolation) -> Result<(), Refusal> {
    make_directory(Path::new("/proc"))?;
    if isolation != Isolation::MountsAndProcesses {
        bind(&PathBuf::from(OLD_ROOT).join("proc"), Path::new("/proc"))?;
        let _ = set_read_only(Path::new("/proc"));
        return Ok(());
    }
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    mount(Some("proc"), "/proc", Some("proc"), flags, Some("subset=pid"))
        .or_else(|_| mount(Some("proc"), "/proc", Some("proc"), flags, None::<&str>))
        .map_err(failed(|| "mount /proc".to_owned()))?;
    set_read_only(Path::new("/proc"))
}

/// An empty file for something to be mounted on.
fn make_file(path: &Path) -> Result<(), Refusal> {
    File::create(path).map(drop).map_err(failed(|| format!("make {}", path.display())))
}
