//! Makes a view (see `view`): a new root on a tmpfs, with the exports mounted in it.
//! What of the server's own it has is put there by `system`.

use std::{
    fs::{self, File},
    io,
    os::{
        fd::{AsFd as _, AsRawFd as _, OwnedFd},
        unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _, fchown},
    },
    path::{Component, Path, PathBuf},
};

use nix::{
    fcntl::{OFlag, open},
    libc,
    mount::{MntFlags, MsFlags, mount, umount2},
    sched::{CloneFlags, unshare},
    sys::stat::Mode,
    unistd::pivot_root,
};
use posh_proto::executor::ClientFile;

use super::{
    system,
    view::{SHOWN, failed, is_shown, open_export, path_of, refuse},
    wire::{ViewMount, ViewSpec, ViewUser},
};
use crate::{error::Refusal, sys};

/// Where the kernel's own file systems are; nothing can be placed there.
pub(super) const KERNEL: [&str; 3] = ["/dev", "/proc", "/sys"];

/// Where the server's tree is while the view is built.
pub(super) const OLD_ROOT: &str = "/.old";

/// The root holds directories and small files only.
const ROOT_OPTIONS: &str = "size=64m,nr_inodes=256k,mode=755";

/// A file on our own file systems gives nobody rights.
const NO_RIGHTS: MsFlags = MsFlags::MS_NOSUID.union(MsFlags::MS_NODEV);

/// A directory with more entries is not rebuilt for a mount point in it: each
/// entry becomes a mount, in every view.
const MAX_REBUILT_ENTRIES: usize = 512;

/// Makes the view of `spec` in a new mount namespace and enters it. Gives the
/// paths of its mounts, and its root's tmpfs where it can still be written.
pub fn enter(spec: &ViewSpec) -> Result<(Vec<PathBuf>, OwnedFd), Refusal> {
    unshare(CloneFlags::CLONE_NEWNS).map_err(failed(|| "make a mount namespace".to_owned()))?;
    mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>)
        .map_err(failed(|| "make the mounts private".to_owned()))?;
    let exports = spec.mounts.iter().map(open_export).collect::<Result<Vec<_>, _>>()?;
    let scratch = path_of(&spec.scratch);
    let root = enter_new_root(scratch)?;
    let mut builder = Builder { user: spec.user.clone(), ..Builder::default() };
    system::show(spec.isolation())?;
    private_directories(scratch)?;
    for (entry, directory) in spec.mounts.iter().zip(exports) {
        builder.mount_export(entry, directory)?;
    }
    for (index, file) in spec.client_files.iter().enumerate() {
        builder.show_file(file, &scratch.join("files").join(index.to_string()))?;
    }
    builder.finish()?;
    Ok((builder.mounts, root))
}

/// The steps of building; ends inside the new root.
#[derive(Default)]
struct Builder {
    /// Whose the user's files are.
    user: Option<ViewUser>,
    /// Those in place.
    mounts: Vec<PathBuf>,
    /// Directories whose content became mounts on a tmpfs.
    rebuilt: Vec<PathBuf>,
}

impl Builder {
    fn mount_export(&mut self, entry: &ViewMount, directory: OwnedFd) -> Result<(), Refusal> {
        let path = path_of(&entry.path);
        let hides = |system: &&str| Path::new(system).starts_with(path);
        let kept = ["/bin", "/lib", "/sbin", "/tmp", "/etc"];
        if let Some(system) = SHOWN.iter().chain(&KERNEL).chain(&kept).find(|s| hides(s)) {
            return Err(refuse(format!("a mount at {} would hide the server's {system}", path.display())));
        }
        if KERNEL.iter().any(|kernel| path.starts_with(kernel)) {
            return Err(refuse(format!("nothing can be mounted at {}", path.display())));
        }
        self.place(path)?;
        bind(&descriptor_path(&directory), path)?;
        let read_only = if entry.read_only { libc::MOUNT_ATTR_RDONLY } else { 0 };
        set_mount(path, libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NODEV | read_only)?;
        self.mounts.push(path.to_owned());
        Ok(())
    }

    /// Makes `path` a directory of the view, which a mount can then cover.
    fn place(&mut self, path: &Path) -> Result<(), Refusal> {
        let mut at = PathBuf::from("/");
        for component in path.components() {
            let Component::Normal(name) = component else { continue };
            let parent = at.clone();
            at.push(name);
            match fs::symlink_metadata(&at) {
                Ok(metadata) if metadata.is_dir() => continue,
                Ok(_) => return Err(refuse(format!("{} is no directory on the server", at.display()))),
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(failed(|| format!("look at {}", at.display()))(error));
                }
                Err(_) => {}
            }
            if let Some(mount) = self.mount_of(&at) {
                let (at, mount) = (at.display(), mount.display());
                return Err(refuse(format!("{at} does not exist in what the server has at {mount}")));
            }
            if is_shown(&at) && !self.is_ours(&parent) {
                self.rebuild(&parent)?;
            }
            make_directory(&at)?;
        }
        Ok(())
    }

    /// Covers a directory of the server by a tmpfs with the same entries, so that
    /// one more can be added.
    fn rebuild(&mut self, directory: &Path) -> Result<(), Refusal> {
        let attempt = || format!("make a mount point in {}", directory.display());
        let covered = open(directory, OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC, Mode::empty())
            .map_err(failed(attempt))?;
        let source = descriptor_path(&covered);
        let entries = fs::read_dir(&source).map_err(failed(attempt))?;
        let entries = entries.take(MAX_REBUILT_ENTRIES + 1).collect::<Result<Vec<_>, _>>().map_err(failed(attempt))?;
        if entries.len() > MAX_REBUILT_ENTRIES {
            return Err(refuse(format!("cannot {}: it has more than {MAX_REBUILT_ENTRIES} entries", attempt())));
        }
        mount(Some("posh"), directory, Some("tmpfs"), NO_RIGHTS, Some(ROOT_OPTIONS)).map_err(failed(attempt))?;
        for entry in entries {
            let (from, to) = (source.join(entry.file_name()), directory.join(entry.file_name()));
            if let Ok(target) = fs::read_link(&from) {
                std::os::unix::fs::symlink(target, &to).map_err(failed(attempt))?;
                continue;
            }
            if from.is_dir() {
                make_directory(&to)?
            } else {
                File::create(&to).map(drop).map_err(failed(attempt))?
            }
            bind(&from, &to)?;
        }
        self.rebuilt.push(directory.to_owned());
        Ok(())
    }

    /// Shows a small file of the user. Inside a mount it is there already.
    fn show_file(&mut self, file: &ClientFile, stored: &Path) -> Result<(), Refusal> {
        let path = path_of(&file.path);
        if self.mount_of(path).is_some() {
            return Ok(());
        }
        let attempt = || format!("show {}", path.display());
        let parent = path.parent().ok_or_else(|| refuse("a client file can't be /"))?;
        self.place(parent)?;
        let owner = self.user.as_ref().map(|user| (user.uid, user.gid));
        let write = |to: &Path| {
            let mut options = File::options();
            options.write(true).create(true).truncate(true).mode(0o600);
            let mut target = options.open(to)?;
            io::Write::write_all(&mut target, &file.content)?;
            if let Some((uid, gid)) = owner {
                fchown(&target, Some(uid), Some(gid))?;
            }
            target.set_permissions(fs::Permissions::from_mode(file.mode & 0o7777))
        };
        if is_shown(path) && fs::symlink_metadata(path).is_ok_and(|found| found.is_symlink()) {
            // Not what it leads to, which has a meaning of its own (/etc/localtime).
            if !self.is_ours(parent) {
                self.rebuild(parent)?;
            }
            fs::remove_file(path).map_err(failed(attempt))?;
        }
        if !is_shown(path) || self.is_ours(parent) && !path.exists() {
            return write(path).map_err(failed(attempt));
        }
        // Among the server's own files: ours covers theirs.
        let stored = in_old_root(stored);
        write(&stored).map_err(failed(attempt))?;
        if !path.exists() {
            self.rebuild(parent)?;
            File::create(path).map_err(failed(attempt))?;
        }
        bind(&stored, path)
    }

    /// Whether entries can be added to a directory of the server's: it is on a tmpfs of ours.
    fn is_ours(&self, directory: &Path) -> bool {
        directory == Path::new("/etc") || self.rebuilt.iter().any(|rebuilt| rebuilt == directory)
    }

    fn mount_of(&self, path: &Path) -> Option<&Path> {
        self.mounts.iter().map(PathBuf::as_path).find(|mount| path.starts_with(mount))
    }

    fn finish(&self) -> Result<(), Refusal> {
        umount2(OLD_ROOT, MntFlags::MNT_DETACH).map_err(failed(|| "leave the server's root".to_owned()))?;
        fs::remove_dir(OLD_ROOT).map_err(failed(|| "leave the server's root".to_owned()))?;
        for directory in self.rebuilt.iter().map(PathBuf::as_path).chain([Path::new("/")]) {
            let attempt = || format!("make {} read-only", directory.display());
            let at = open(directory, OFlag::O_PATH | OFlag::O_CLOEXEC, Mode::empty()).map_err(failed(attempt))?;
            sys::set_mount(at.as_fd(), libc::MOUNT_ATTR_RDONLY, false).map_err(failed(attempt))?;
        }
        Ok(())
    }
}

/// /tmp and /var/tmp, on disk since sort(1) may need room there.
fn private_directories(scratch: &Path) -> Result<(), Refusal> {
    let scratch = in_old_root(scratch);
    for (name, path) in [("tmp", "/tmp"), ("var-tmp", "/var/tmp")] {
        let directory = scratch.join(name);
        make_directory(&directory)?;
        fs::set_permissions(&directory, fs::Permissions::from_mode(0o1777))
            .map_err(failed(|| format!("open {path} for all")))?;
        fs::create_dir_all(path).map_err(failed(|| format!("make {path}")))?;
        bind(&directory, Path::new(path))?;
    }
    for path in ["/run", "/home", "/mnt"] {
        make_directory(Path::new(path))?;
    }
    make_directory(&scratch.join("files"))
}

/// Makes the tmpfs and enters it; the old root is at [`OLD_ROOT`]. The descriptor
/// is of the same tmpfs through another mount, which stays writable.
fn enter_new_root(scratch: &Path) -> Result<OwnedFd, Refusal> {
    let attempt = || format!("make a root in {}", scratch.display());
    let root = scratch.join("root");
    make_directory(&root)?;
    mount(Some("posh"), &root, Some("tmpfs"), NO_RIGHTS, Some(ROOT_OPTIONS)).map_err(failed(attempt))?;
    let writable =
        open(&root, OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC, Mode::empty()).map_err(failed(attempt))?;
    bind(&root, &root)?;
    make_directory(&root.join(&OLD_ROOT[1..]))?;
    pivot_root(&root, &root.join(&OLD_ROOT[1..])).map_err(failed(attempt))?;
    std::env::set_current_dir("/").map_err(failed(attempt))?;
    Ok(writable)
}

pub(super) fn in_old_root(path: &Path) -> PathBuf {
    Path::new(OLD_ROOT).join(path.strip_prefix("/").unwrap_or(path))
}

pub(super) fn make_directory(path: &Path) -> Result<(), Refusal> {
    match fs::DirBuilder::new().mode(0o755).create(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        other => other.map_err(failed(|| format!("make {}", path.display()))),
    }
}

pub(super) fn bind(source: &Path, target: &Path) -> Result<(), Refusal> {
    mount(Some(source), target, None::<&str>, MsFlags::MS_BIND | MsFlags::MS_REC, None::<&str>)
        .map_err(failed(|| format!("mount {}", target.display())))
}

pub(super) fn set_read_only(path: &Path) -> Result<(), Refusal> {
    set_mount(path, libc::MOUNT_ATTR_RDONLY)
}

/// Adds attributes to the mount at `path` and to all below it.
pub(super) fn set_mount(path: &Path, attributes: u64) -> Result<(), Refusal> {
    let attempt = || format!("set the attributes of the mount {}", path.display());
    let at = open(path, OFlag::O_PATH | OFlag::O_CLOEXEC, Mode::empty()).map_err(failed(attempt))?;
    sys::set_mount(at.as_fd(), attributes, true).map_err(failed(attempt))
}

/// A path that leads to what `fd` refers to, also when that is covered.
fn descriptor_path(fd: &OwnedFd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", fd.as_raw_fd()))
}
