//! A host's own /dev: the devices that programs use. A script run as root can't damage the
//! machine's /dev through it (`sed -i p /dev/stdin` replaces a link for all users).

use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use nix::fcntl::AT_FDCWD;
use nix::mount::{MsFlags, mount};
use nix::sys::stat::{FchmodatFlags, Mode, SFlag, fchmodat, makedev, mknod};

use crate::error::{AttemptExt, Result};

/// Devices and the terminals' file system, each bound from the machine's own.
const DEVICES: [&str; 8] = ["null", "zero", "full", "random", "urandom", "tty", "fuse", "net/tun"];
const TERMINALS: &str = "pts";
/// Creates terminals in the `pts` beside it, so it must be a node of this directory and not a bind
/// mount of another (pts(4)).
const MULTIPLEXER: (&str, u64, u64) = ("ptmx", 5, 2);
/// Links as in proc(5) and udev(7).
const LINKS: [(&str, &str); 4] = [
    ("fd", "/proc/self/fd"),
    ("stdin", "/proc/self/fd/0"),
    ("stdout", "/proc/self/fd/1"),
    ("stderr", "/proc/self/fd/2"),
];
/// Directory in which the new /dev is built.
const WORKSHOP: &str = "/run/devices";

/// Replaces /dev in this mount namespace.
pub fn replace() -> Result<()> {
    let root = Path::new(WORKSHOP);
    fs::create_dir(root).attempt(|| format!("make {WORKSHOP}"))?;
    tmpfs(root, "mode=0755")?;
    for name in DEVICES {
        let (from, to) = (Path::new("/dev").join(name), root.join(name));
        fs::create_dir_all(to.parent().expect("it lies below the root"))
            .attempt(|| format!("make {}", to.display()))?;
        File::create(&to).attempt(|| format!("make {}", to.display()))?;
        bind(&from, &to)?;
    }
    for (name, target) in LINKS {
        symlink(target, root.join(name)).attempt(|| format!("link {name}"))?;
    }
    let terminals = directory(root, TERMINALS)?;
    bind(&Path::new("/dev").join(TERMINALS), &terminals)?;
    let (name, major, minor) = MULTIPLEXER;
    let node = root.join(name);
    mknod(&node, SFlag::S_IFCHR, Mode::from_bits_truncate(0o666), makedev(major, minor))
        .and_then(|()| {
            fchmodat(AT_FDCWD, &node, Mode::from_bits_truncate(0o666), FchmodatFlags::FollowSymlink)
        })
        .attempt(|| format!("make {}", node.display()))?;
    tmpfs(&directory(root, "shm")?, "mode=1777")?;
    let none: Option<&str> = None;
    mount(Some(WORKSHOP), "/dev", none, MsFlags::MS_MOVE, none)
        .attempt(|| "put a new /dev in place".into())
}

fn directory(root: &Path, name: &str) -> Result<PathBuf> {
    let path = root.join(name);
    fs::create_dir(&path).attempt(|| format!("make {}", path.display()))?;
    Ok(path)
}

fn tmpfs(path: &Path, options: &str) -> Result<()> {
    mount(Some("tmpfs"), path, Some("tmpfs"), MsFlags::empty(), Some(options))
        .attempt(|| format!("mount a tmpfs on {}", path.display()))
}

fn bind(from: &Path, to: &Path) -> Result<()> {
    let none: Option<&str> = None;
    mount(Some(from), to, none, MsFlags::MS_BIND, none)
        .attempt(|| format!("show {} to a host", from.display()))
}
