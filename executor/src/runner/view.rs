//! The file tree that commands see: the server's programs, and the exports at
//! the workstation's paths. All else of the server is hidden.
//!
//! The root is a small tmpfs. On it: `/usr /etc /opt /nix /gnu /snap` of the
//! server, read-only; `/bin /sbin /lib*` as they are; `/dev`, `/sys`, a `/proc`;
//! a private `/tmp` and `/var/tmp` on the server's disk; then each mount of the
//! workstation, its parents made as empty directories. Commands can't write
//! to the root: a file made there would vanish unseen. Empty directories for
//! working directories that exist only on the workstation are made on
//! demand, through a descriptor of the same tmpfs from before it was made
//! read-only.

use std::{
    ffi::OsStr,
    fs::{self, File},
    io,
    os::{
        fd::{AsRawFd as _, OwnedFd},
        unix::{
            ffi::OsStrExt as _,
            fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _},
        },
    },
    path::{Component, Path, PathBuf},
};

use nix::{
    errno::Errno,
    fcntl::{OFlag, OpenHow, ResolveFlag, open, openat2},
    mount::{MntFlags, MsFlags, mount, umount2},
    sched::{CloneFlags, unshare},
    sys::stat::{Mode, mkdirat},
    unistd::pivot_root,
};
use posh_proto::executor::{ClientFile, rejected::Kind};

use super::wire::{Isolation, ViewMount, ViewSpec};
use crate::{error::Refusal, sys};

/// Directories of the server that hold programs and what these read.
const SHOWN: [&str; 6] = ["/usr", "/etc", "/opt", "/nix", "/gnu", "/snap"];

/// Where the kernel's own file systems are; nothing can be placed there.
const KERNEL: [&str; 3] = ["/dev", "/proc", "/sys"];

/// Where the server's tree is while the view is built.
const OLD_ROOT: &str = "/.old";

/// The root holds directories and small files only.
const ROOT_OPTIONS: &str = "size=64m,nr_inodes=256k,mode=755";

/// A directory with more entries is not rebuilt for a mount point in it: each
/// entry becomes a mount, in every view.
const MAX_REBUILT_ENTRIES: usize = 512;

/// Symbolic links at the top of the tree that distributions use for merged /usr.
fn is_program_link(name: &str) -> bool {
    name == "bin" || name == "sbin" || name.starts_with("lib") && !name.contains("lost")
}

/// Whether commands see `path` of the server, which has no symbolic links in it.
pub fn is_shown(path: &Path) -> bool {
    SHOWN.iter().any(|shown| path.starts_with(shown))
        || path.components().nth(1).and_then(|top| top.as_os_str().to_str()).is_some_and(is_program_link)
}

/// A view that stands: this process and its children are inside it.
#[derive(Debug)]
pub struct View {
    mounts: Vec<PathBuf>,
    /// The root's tmpfs where it can still be written; none without a namespace.
    root: Option<OwnedFd>,
    /// The soft limit of open files that commands start with.
    pub open_files: u64,
}

fn refuse(message: impl Into<String>) -> Refusal {
    Refusal::new(Kind::NoNamespace, message)
}

/// Says what failed, with the system's words.
fn failed<E: Into<io::Error>>(attempt: impl FnOnce() -> String) -> impl FnOnce(E) -> Refusal {
    move |error| refuse(format!("cannot {}: {}", attempt(), error.into()))
}

impl View {
    /// Builds the view and enters it.
    pub fn build(spec: &ViewSpec) -> Result<Self, Refusal> {
        let mut view = Self { mounts: Vec::new(), root: None, open_files: spec.open_files };
        if spec.isolation() == Isolation::Nothing {
            view.check_same_tree(spec)?;
        } else {
            Builder::build(&mut view, spec)?;
        }
        Ok(view)
    }

    /// The mount that `path` lies in, which the kernel must have resolved.
    pub fn mount_of(&self, path: &Path) -> Option<&Path> {
        self.mounts.iter().map(PathBuf::as_path).find(|mount| path.starts_with(mount))
    }

    /// The mount paths, for messages.
    pub fn mounts(&self) -> &[PathBuf] {
        &self.mounts
    }

    /// Makes `directory` and its parents, where that changes nothing of the server's.
    pub fn make_directory(&self, directory: &Path) -> Result<(), String> {
        let Some(root) = &self.root else { return Err("it does not exist on the server".to_owned()) };
        let root_device = nix::sys::stat::fstat(root).map_err(|errno| errno.desc().to_owned())?.st_dev;
        for path in directory.ancestors().collect::<Vec<_>>().into_iter().rev() {
            match fs::symlink_metadata(path) {
                Ok(metadata) if metadata.is_dir() => continue,
                Ok(_) => return Err(format!("{} is no directory on the server", path.display())),
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error.to_string()),
                Err(_) => {}
            }
            let parent = path.parent().unwrap_or(Path::new("/"));
            let made = if fs::metadata(parent).is_ok_and(|parent| parent.dev() == root_device) {
                let relative = path.strip_prefix("/").unwrap_or(path);
                mkdirat(root, relative, Mode::from_bits_truncate(0o755)).map_err(io::Error::from)
            } else if is_private(path) {
                fs::create_dir(path)
            } else {
                return Err(format!("it does not exist on the server, where {} is its own", parent.display()));
            };
            if let Err(error) = made
                && error.kind() != io::ErrorKind::AlreadyExists
            {
                return Err(error.to_string());
            }
        }
        Ok(())
    }

    /// Without a namespace, all must already be where the workstation has it.
    fn check_same_tree(&mut self, spec: &ViewSpec) -> Result<(), Refusal> {
        for entry in &spec.mounts {
            let (path, shown) = (path_of(&entry.path), Path::new(OsStr::from_bytes(&entry.path)).display());
            let directory = path_of(&entry.directory).join(path_of(&entry.sub_path));
            if fs::canonicalize(&directory).ok().as_deref() != Some(path) {
                return Err(refuse(format!(
                    "{shown} is {} here, and no mount namespace can be made",
                    directory.display()
                )));
            }
            if entry.read_only {
                return Err(refuse(format!(
                    "{shown} is read-only, which needs a mount namespace, and none can be made"
                )));
            }
            self.mounts.push(path.to_owned());
        }
        for file in &spec.client_files {
            if fs::read(path_of(&file.path)).ok().as_deref() != Some(&file.content[..]) {
                let path = path_of(&file.path).display();
                return Err(refuse(format!("cannot show {path} to commands: no mount namespace can be made")));
            }
        }
        Ok(())
    }
}

/// /tmp and /var/tmp are private to the view.
fn is_private(path: &Path) -> bool {
    path.starts_with("/tmp") || path.starts_with("/var/tmp")
}

fn path_of(bytes: &[u8]) -> &Path {
    Path::new(OsStr::from_bytes(bytes))
}

/// Opens a mount's directory on the server; the sub-path can't leave the export.
///
/// The errors are of the kind `UnknownExport`: the directory is not there.
pub fn open_export(entry: &ViewMount) -> Result<OwnedFd, Refusal> {
    let directory = path_of(&entry.directory);
    let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    let unknown = |what: std::path::Display<'_>, errno: Errno| {
        Refusal::new(Kind::UnknownExport, format!("cannot open {what} of the export: {}", errno.desc()))
    };
    let export = open(directory, flags, Mode::empty()).map_err(|errno| unknown(directory.display(), errno))?;
    if entry.sub_path.is_empty() {
        return Ok(export);
    }
    let how = OpenHow::new().flags(flags).resolve(ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_MAGICLINKS);
    let sub_path = path_of(&entry.sub_path);
    openat2(&export, sub_path, how).map_err(|errno| unknown(sub_path.display(), errno))
}

/// The steps of building; ends inside the new root.
struct Builder<'a> {
    view: &'a mut View,
    spec: &'a ViewSpec,
    root: OwnedFd,
    /// Directories whose content became mounts on a tmpfs.
    rebuilt: Vec<PathBuf>,
}

impl<'a> Builder<'a> {
    fn build(view: &'a mut View, spec: &'a ViewSpec) -> Result<(), Refusal> {
        unshare(CloneFlags::CLONE_NEWNS).map_err(failed(|| "make a mount namespace".to_owned()))?;
        mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>)
            .map_err(failed(|| "make the mounts private".to_owned()))?;
        let exports = spec.mounts.iter().map(open_export).collect::<Result<Vec<_>, _>>()?;
        let scratch = path_of(&spec.scratch);
        let root = enter_new_root(scratch)?;
        let mut builder = Builder { view, spec, root, rebuilt: Vec::new() };
        builder.mount_kernel_file_systems()?;
        builder.show_programs()?;
        builder.private_directories(scratch)?;
        for (entry, directory) in spec.mounts.iter().zip(exports) {
            builder.mount_export(entry, directory)?;
        }
        for (index, file) in spec.client_files.iter().enumerate() {
            builder.show_file(file, &scratch.join("files").join(index.to_string()))?;
        }
        builder.finish()
    }

    fn mount_kernel_file_systems(&self) -> Result<(), Refusal> {
        for path in ["/dev", "/sys"] {
            make_directory(Path::new(path))?;
            bind(&Path::new(OLD_ROOT).join(&path[1..]), Path::new(path))?;
        }
        // Best effort: a kernel file system below it may not allow it, and as an
        // ordinary user nothing there can be written anyway.
        let _ = set_read_only(Path::new("/sys"));
        make_directory(Path::new("/proc"))?;
        if self.spec.isolation() == Isolation::MountsAndProcesses {
            let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
            return mount(Some("proc"), "/proc", Some("proc"), flags, None::<&str>)
                .map_err(failed(|| "mount /proc".to_owned()));
        }
        bind(&Path::new(OLD_ROOT).join("proc"), Path::new("/proc"))
    }

    fn show_programs(&self) -> Result<(), Refusal> {
        let entries = fs::read_dir(OLD_ROOT).map_err(failed(|| "list the server's root".to_owned()))?;
        for entry in entries.flatten() {
            let name = entry.file_name();
            let path = Path::new("/").join(&name);
            let is_named = SHOWN.iter().any(|shown| path == Path::new(shown));
            if !is_named && !name.to_str().is_some_and(is_program_link) {
                continue;
            }
            if let Ok(target) = fs::read_link(entry.path()) {
                std::os::unix::fs::symlink(target, &path).map_err(failed(|| format!("link {}", path.display())))?;
            } else if entry.path().is_dir() {
                make_directory(&path)?;
                bind(&entry.path(), &path)?;
                set_read_only(&path)?;
            }
        }
        Ok(())
    }

    /// /tmp and /var/tmp, on disk since sort(1) may need room there.
    fn private_directories(&self, scratch: &Path) -> Result<(), Refusal> {
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

    fn mount_export(&mut self, entry: &ViewMount, directory: OwnedFd) -> Result<(), Refusal> {
        let path = path_of(&entry.path);
        let hides = |system: &&str| Path::new(system).starts_with(path);
        if let Some(system) = SHOWN.iter().chain(&KERNEL).chain(&["/bin", "/lib", "/sbin", "/tmp"]).find(|s| hides(s)) {
            return Err(refuse(format!("a mount at {} would hide the server's {system}", path.display())));
        }
        if KERNEL.iter().any(|kernel| path.starts_with(kernel)) {
            return Err(refuse(format!("nothing can be mounted at {}", path.display())));
        }
        self.place(path)?;
        bind(&descriptor_path(&directory), path)?;
        if entry.read_only {
            set_read_only(path)?;
        }
        self.view.mounts.push(path.to_owned());
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
            if let Some(mount) = self.view.mount_of(&at) {
                let (at, mount) = (at.display(), mount.display());
                return Err(refuse(format!("{at} does not exist in what the server has at {mount}")));
            }
            if is_shown(&at) && !self.rebuilt.contains(&parent) {
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
        mount(Some("posh"), directory, Some("tmpfs"), MsFlags::empty(), Some(ROOT_OPTIONS)).map_err(failed(attempt))?;
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
        if self.view.mount_of(path).is_some() {
            return Ok(());
        }
        let attempt = || format!("show {}", path.display());
        let parent = path.parent().ok_or_else(|| refuse("a client file can't be /"))?;
        self.place(parent)?;
        let write = |to: &Path| {
            let mut options = File::options();
            options.write(true).create(true).truncate(true).mode(0o600);
            let mut target = options.open(to)?;
            io::Write::write_all(&mut target, &file.content)?;
            target.set_permissions(fs::Permissions::from_mode(file.mode & 0o7777))
        };
        if !is_shown(path) || self.rebuilt.contains(&parent.to_owned()) && !path.exists() {
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

    fn finish(self) -> Result<(), Refusal> {
        umount2(OLD_ROOT, MntFlags::MNT_DETACH).map_err(failed(|| "leave the server's root".to_owned()))?;
        fs::remove_dir(OLD_ROOT).map_err(failed(|| "leave the server's root".to_owned()))?;
        for directory in self.rebuilt.iter().map(PathBuf::as_path).chain([Path::new("/")]) {
            let attempt = || format!("make {} read-only", directory.display());
            let at = open(directory, OFlag::O_PATH | OFlag::O_CLOEXEC, Mode::empty()).map_err(failed(attempt))?;
            sys::set_read_only(std::os::fd::AsFd::as_fd(&at), false).map_err(failed(attempt))?;
        }
        self.view.root = Some(self.root);
        Ok(())
    }
}

/// Makes the tmpfs and enters it; the old root is at [`OLD_ROOT`]. The descriptor
/// is of the same tmpfs through another mount, which stays writable.
fn enter_new_root(scratch: &Path) -> Result<OwnedFd, Refusal> {
    let attempt = || format!("make a root in {}", scratch.display());
    let root = scratch.join("root");
    make_directory(&root)?;
    mount(Some("posh"), &root, Some("tmpfs"), MsFlags::MS_NOSUID | MsFlags::MS_NODEV, Some(ROOT_OPTIONS))
        .map_err(failed(attempt))?;
    let writable =
        open(&root, OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC, Mode::empty()).map_err(failed(attempt))?;
    bind(&root, &root)?;
    make_directory(&root.join(&OLD_ROOT[1..]))?;
    pivot_root(&root, &root.join(&OLD_ROOT[1..])).map_err(failed(attempt))?;
    std::env::set_current_dir("/").map_err(failed(attempt))?;
    Ok(writable)
}

fn in_old_root(path: &Path) -> PathBuf {
    Path::new(OLD_ROOT).join(path.strip_prefix("/").unwrap_or(path))
}

fn make_directory(path: &Path) -> Result<(), Refusal> {
    match fs::DirBuilder::new().mode(0o755).create(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        other => other.map_err(failed(|| format!("make {}", path.display()))),
    }
}

fn bind(source: &Path, target: &Path) -> Result<(), Refusal> {
    mount(Some(source), target, None::<&str>, MsFlags::MS_BIND | MsFlags::MS_REC, None::<&str>)
        .map_err(failed(|| format!("mount {}", target.display())))
}

fn set_read_only(path: &Path) -> Result<(), Refusal> {
    let attempt = || format!("make {} read-only", path.display());
    let at = open(path, OFlag::O_PATH | OFlag::O_CLOEXEC, Mode::empty()).map_err(failed(attempt))?;
    sys::set_read_only(std::os::fd::AsFd::as_fd(&at), true).map_err(failed(attempt))
}

/// A path that leads to what `fd` refers to, also when that is covered.
fn descriptor_path(fd: &OwnedFd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", fd.as_raw_fd()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(path: &Path, directory: &Path) -> ViewSpec {
        let bytes = |path: &Path| path.as_os_str().as_bytes().to_vec();
        let mount = ViewMount { path: bytes(path), directory: bytes(directory), ..ViewMount::default() };
        ViewSpec { isolation: Isolation::Nothing.into(), mounts: vec![mount], ..ViewSpec::default() }
    }

    fn refusal(spec: &ViewSpec) -> String {
        View::build(spec).err().expect("a refusal").message
    }

    #[test]
    fn without_a_namespace_only_the_same_tree_is_served() {
        let directory = tempfile::tempdir().unwrap();
        let same = directory.path().canonicalize().unwrap();
        let view = View::build(&spec(&same, &same)).expect("the same tree");
        assert_eq!(view.mount_of(&same.join("f")), Some(same.as_path()));
        assert!(view.make_directory(&same.join("new")).is_err());
        assert!(refusal(&spec(Path::new("/mnt/elsewhere"), &same)).contains("no mount namespace can be made"));
        let mut read_only = spec(&same, &same);
        read_only.mounts[0].read_only = true;
        assert!(refusal(&read_only).contains("is read-only, which needs a mount namespace"));
        let mut with_file = spec(&same, &same);
        let path = b"/home/u/.gitconfig"[..].into();
        with_file.client_files = vec![ClientFile { path, content: "x".into(), mode: 0o600 }];
        assert!(refusal(&with_file).contains("cannot show /home/u/.gitconfig"));
    }

    #[test]
    fn programs_are_shown_and_homes_are_not() {
        for (path, expected) in [
            ("/usr/bin/sort", true),
            ("/bin/sort", true),
            ("/lib64/ld.so", true),
            ("/opt/x/bin/y", true),
            ("/home/u/bin/x", false),
            ("/usrlocal/x", false),
            ("/", false),
        ] {
            assert_eq!(is_shown(Path::new(path)), expected, "{path}");
        }
    }
}
