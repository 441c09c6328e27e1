//! Makes a view (see `view`): a new root on a tmpfs, with the exports mounted in it.
//!
//! The order is what keeps the server safe. First all that the view needs of the server is taken as detached
//! mounts, by names that the server's administrator or this program chose; the one exception, the sub-path of an export, is
//! walked with the rights of the view's user. Then the new root is entered and the server's root leaves it. Only then
//! names that the client chose are made (`root` says how, `places` says which).

use std::{
    os::fd::{AsFd as _, OwnedFd},
    path::{Path, PathBuf},
};

use nix::{
    fcntl::{OFlag, open},
    libc,
    mount::{MntFlags, MsFlags, mount, umount2},
    sched::{CloneFlags, unshare},
    sys::stat::{Mode, fchmod, mkdirat},
    unistd::{fchdir, pivot_root},
};
use posh_proto::executor::ClientFile;
use rustix::mount::{MountAttrFlags, MoveMountFlags, move_mount};

use super::{
    places::{self, PRIVATE},
    root::{Mounted, Root},
    system::{Parts, detached, new_mount, set_attributes},
    view::{failed, open_export, path_of, refuse},
    wire::{ViewMount, ViewSpec},
};
use crate::{error::Refusal, sys};

/// The root holds directories and small files only.
const ROOT_OPTIONS: [(&str, &str); 3] = [("size", "64m"), ("nr_inodes", "256k"), ("mode", "755")];

/// The view's /tmp and /var/tmp have so many files together.
const TMP_INODES: &str = "256k";
/// Their size where the specification has none: a view that is made to see whether it can be made.
const LEAST_TMP_BYTES: u64 = 1 << 20;

/// Where the server's root is for a moment, in the new one.
const OLD_ROOT: &str = "old";

/// A file on our own file systems gives nobody rights.
const NO_RIGHTS: MountAttrFlags = MountAttrFlags::MOUNT_ATTR_NOSUID.union(MountAttrFlags::MOUNT_ATTR_NODEV);

/// Makes the view of `spec` in a new mount namespace and enters it. Gives the
/// paths of its mounts, and its root.
pub fn enter(spec: &ViewSpec) -> Result<(Vec<PathBuf>, Root), Refusal> {
    let replaced = check_places(spec)?;
    unshare(CloneFlags::CLONE_NEWNS).map_err(failed(|| "make a mount namespace".to_owned()))?;
    mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>)
        .map_err(failed(|| "make the mounts private".to_owned()))?;
    let parts = Parts::of_server(spec.isolation(), &replaced)?;
    let exports = spec.mounts.iter().map(|entry| take_export(entry, spec)).collect::<Result<Vec<_>, _>>()?;
    let scratch = path_of(&spec.scratch);
    let private = private_directories(&scratch.join("space"), spec.bounds.tmp_bytes)?;
    let (writable, shown) = enter_new_root(&scratch.join("root"))?;
    let [tmp, var_tmp] = private;
    let root = Root::new(writable, [tmp.directory, var_tmp.directory], shown);
    parts.show(&root)?;
    for (path, tree) in PRIVATE.iter().zip([tmp.tree, var_tmp.tree]) {
        root.make_place(Path::new(path))?;
        root.mount(&tree, Path::new(path))?;
    }
    let mounted = place(spec, &root, exports)?;
    sys::set_mount(root.shown(), libc::MOUNT_ATTR_RDONLY, false)
        .map_err(failed(|| "make the root read-only".to_owned()))?;
    Ok((mounted.0, root))
}

/// Refuses client names that have no place in a view; gives the files of the server that the workstation replaces.
fn check_places(spec: &ViewSpec) -> Result<Vec<&Path>, Refusal> {
    for entry in &spec.mounts {
        let path = path_of(&entry.path);
        places::check(path).map_err(|why| refuse(format!("no mount at {}: {why}", path.display())))?;
    }
    let files = spec.client_files.iter().map(|file| path_of(&file.path));
    for path in files.clone() {
        places::check_file(path).map_err(|why| refuse(format!("cannot show {}: {why}", path.display())))?;
    }
    Ok(files.filter(|path| places::is_replaceable(path)).collect())
}

/// The export's directory as a detached mount.
fn take_export(entry: &ViewMount, spec: &ViewSpec) -> Result<OwnedFd, Refusal> {
    let tree = detached(open_export(entry, spec.user.as_ref())?, Path::new(""))?;
    let mut attributes = libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NODEV;
    attributes |= if entry.read_only { libc::MOUNT_ATTR_RDONLY } else { 0 };
    attributes |= if entry.exec { 0 } else { libc::MOUNT_ATTR_NOEXEC };
    set_attributes(&tree, attributes, path_of(&entry.path))?;
    Ok(tree)
}

/// Puts what the client named into the root: mounts, shallow ones first, and files.
fn place(spec: &ViewSpec, root: &Root, exports: Vec<OwnedFd>) -> Result<Mounted, Refusal> {
    let mut mounted = Mounted::default();
    for (entry, tree) in spec.mounts.iter().zip(exports) {
        let path = path_of(&entry.path);
        if mounted.around(path).is_some() {
            root.mount_inside(&tree, path, spec.user.as_ref())?;
        } else {
            root.make_directory(path)?;
            root.mount(&tree, path)?;
        }
        mounted.0.push(path.to_owned());
    }
    let mut shown: Vec<&ClientFile> = Vec::new();
    for file in &spec.client_files {
        let path = path_of(&file.path);
        // Inside a mount it is there already; two commands may read the same one.
        if mounted.around(path).is_some() || shown.contains(&file) {
            continue;
        }
        root.write_file(path, &file.content, file.mode, spec.user.as_ref())?;
        shown.push(file);
    }
    Ok(mounted)
}

/// A directory of the view's own: a descriptor to make names by, and a mount of it.
struct Private {
    directory: OwnedFd,
    tree: OwnedFd,
}

/// [`PRIVATE`], on a tmpfs of their own: what commands leave there is bounded, and ends with the view.
fn private_directories(space: &Path, bytes: u64) -> Result<[Private; 2], Refusal> {
    let attempt = || format!("make {} of the view's own", PRIVATE.join(" and "));
    make_plain_directory(space)?;
    let size = bytes.max(LEAST_TMP_BYTES).to_string();
    let options = [("size", size.as_str()), ("nr_inodes", TMP_INODES), ("mode", "755")];
    let whole = new_mount("tmpfs", &options, NO_RIGHTS).map_err(failed(attempt))?;
    attach(&whole, space)?;
    let make = |name: &str| {
        mkdirat(&whole, name, Mode::S_IRWXU).map_err(failed(attempt))?;
        let flags = OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let directory = nix::fcntl::openat(&whole, name, flags, Mode::empty()).map_err(failed(attempt))?;
        fchmod(&directory, Mode::from_bits_truncate(0o1777)).map_err(failed(attempt))?;
        let tree = detached(&directory, Path::new(""))?;
        Ok::<_, Refusal>(Private { directory, tree })
    };
    Ok([make("tmp")?, make("var-tmp")?])
}

/// Makes the tmpfs, enters it, and has the server's root leave. Gives a mount of the tmpfs that stays writable, and
/// the one that is the root.
fn enter_new_root(at: &Path) -> Result<(OwnedFd, OwnedFd), Refusal> {
    let attempt = || format!("make a root in {}", at.display());
    make_plain_directory(at)?;
    let writable = new_mount("tmpfs", &ROOT_OPTIONS, NO_RIGHTS).map_err(failed(attempt))?;
    attach(&writable, at)?;
    let root = detached(&writable, Path::new(""))?;
    attach(&root, at)?;
    mkdirat(&root, OLD_ROOT, Mode::S_IRWXU).map_err(failed(attempt))?;
    fchdir(&root).map_err(failed(attempt))?;
    pivot_root(".", OLD_ROOT).map_err(failed(attempt))?;
    std::env::set_current_dir("/").map_err(failed(attempt))?;
    let left = || "leave the server's root".to_owned();
    umount2(OLD_ROOT, MntFlags::MNT_DETACH).map_err(failed(left))?;
    std::fs::remove_dir(OLD_ROOT).map_err(failed(left))?;
    let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    let shown = open("/", flags, Mode::empty()).map_err(failed(attempt))?;
    Ok((writable, shown))
}

/// Mounts a detached tree at a directory of the runner's own.
fn attach(tree: &OwnedFd, at: &Path) -> Result<(), Refusal> {
    let place = open(at, OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC, Mode::empty());
    let place = place.map_err(failed(|| format!("open {}", at.display())))?;
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    move_mount(tree.as_fd(), c"", &place, c"", flags).map_err(failed(|| format!("mount {}", at.display())))
}

/// In the runner's directory, which nobody else can reach.
fn make_plain_directory(path: &Path) -> Result<(), Refusal> {
    std::fs::create_dir(path).map_err(failed(|| format!("make {}", path.display())))
}
