//! The file tree that commands see: the server's programs, and the exports at the workstation's
//! paths. All else of the server is hidden. This module describes and answers questions about it;
//! `build` makes it.
//!
//! The root is a small tmpfs (see `root`). On it: `/usr /opt /nix /gnu /snap` of the server,
//! read-only; `/bin /sbin /lib*` as they are; a few files of `/etc`, a few devices, a `/proc` (see
//! `system`); a private `/tmp` and `/var/tmp` in memory (see `scratch`); then each mount of the
//! workstation, its parents made as empty directories where that hides nothing (see `places`).
//! Commands can't write to the root: a file made there would vanish unseen. Empty directories for
//! working directories that exist only on the workstation are made on demand.

use std::{
    ffi::OsStr,
    fs,
    io::{self, Read as _},
    os::{
        fd::OwnedFd,
        unix::{
            ffi::OsStrExt as _,
            fs::{DirBuilderExt as _, PermissionsExt as _, chown},
        },
    },
    path::{Path, PathBuf},
};

use nix::{
    errno::Errno,
    fcntl::{AT_FDCWD, OFlag, OpenHow, ResolveFlag, open, openat2},
    sys::stat::Mode,
    unistd::geteuid,
};
use posh_proto::executor::rejected::Kind;

use super::{
    build::{self, Entered, Unreachable},
    fence::Ground,
    places::{self, NoPlace, PRIVATE},
    root::Root,
    system,
    wire::{Bounds, DirectoryId, Isolation, ViewMount, ViewSpec, ViewUser},
};
use crate::{error::Refusal, sys::ActingAs};

/// Directories of the server with programs and their files; of `/etc` only a part is shown.
pub const SHOWN: [&str; 5] = ["/usr", "/opt", "/nix", "/gnu", "/snap"];

/// Links at the top of the tree that distributions use for merged /usr; elsewhere, directories.
pub const PROGRAM_LINKS: [&str; 7] =
    ["/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libo32", "/libx32"];

/// Returns true if commands see `path` of the server, which has no symbolic links in it.
pub fn is_shown(path: &Path) -> bool {
    SHOWN.iter().chain(&PROGRAM_LINKS).chain(&["/etc"]).any(|shown| path.starts_with(shown))
}

/// A complete view: this process and its children are inside it.
#[derive(Debug)]
pub struct View {
    mounts: Vec<PathBuf>,
    /// Mounts in which programs may be executed.
    executable: Vec<PathBuf>,
    /// Mounts in which commands may write.
    writable: Vec<PathBuf>,
    /// None without a namespace.
    root: Option<Root>,
    /// The soft limit of open files that commands start with.
    pub open_files: u64,
    /// Bounds of each command.
    pub bounds: Bounds,
    /// The user that commands run as, if not the executor's.
    pub user: Option<ViewUser>,
    /// Access of all commands to the server's own tree.
    pub ground: Ground,
    /// Without a namespace, the one directory for temporary files; the machine's own belong to
    /// other programs.
    pub temporary: Option<PathBuf>,
    /// Without a namespace, paths that a view would hide; see the module `hidden`.
    hidden: Vec<PathBuf>,
    /// Identities of the exports' directories, if they are mounted.
    pub directories: Vec<DirectoryId>,
    /// Places that commands must not use, since the workstation's mount does not show them.
    pub unreachable: Unreachable,
}

pub fn refuse(message: impl Into<String>) -> Refusal {
    Refusal::new(Kind::NoNamespace, message)
}

/// Makes a refusal of a failed attempt and the system's error.
pub fn failed<E: Into<io::Error>>(attempt: impl FnOnce() -> String) -> impl FnOnce(E) -> Refusal {
    move |error| refuse(format!("cannot {}: {}", attempt(), error.into()))
}

impl View {
    /// Builds the view and enters it.
    pub fn build(spec: &ViewSpec) -> Result<Self, Refusal> {
        let mut view = Self {
            mounts: Vec::new(),
            executable: Vec::new(),
            writable: Vec::new(),
            root: None,
            open_files: spec.open_files,
            bounds: spec.bounds,
            user: spec.user.clone(),
            ground: Ground::default(),
            temporary: None,
            hidden: Vec::new(),
            directories: Vec::new(),
            unreachable: Unreachable::default(),
        };
        if spec.isolation() == Isolation::Nothing {
            view.check_same_tree(spec)?;
            view.unreachable = Unreachable::of(spec)?;
            view.temporary = make_temporary(spec)?;
            let hidden = spec.hidden.iter().map(|path| path_of(path));
            let found = hidden.clone().filter_map(|path| fs::canonicalize(path).ok());
            view.hidden = hidden.map(Path::to_owned).chain(found).collect();
        } else {
            let Entered { root, mounts, directories, unreachable } = build::enter(spec)?;
            view.mounts = mounts;
            view.root = Some(root);
            view.directories = directories;
            view.unreachable = unreachable;
        }
        let executable = spec.mounts.iter().filter(|entry| entry.exec);
        view.executable = executable.map(|entry| path_of(&entry.path).to_owned()).collect();
        let writable = spec.mounts.iter().filter(|entry| !entry.read_only);
        view.writable = writable.map(|entry| path_of(&entry.path).to_owned()).collect();
        view.ground = Ground::new(spec, view.temporary.as_deref());
        Ok(view)
    }

    /// This machine as it is, all of it as one mount: for observing what commands would access.
    pub fn of_machine() -> Self {
        Self {
            mounts: vec![PathBuf::from("/")],
            executable: Vec::new(),
            writable: vec![PathBuf::from("/")],
            root: None,
            open_files: 0,
            bounds: Bounds::default(),
            user: None,
            ground: Ground::default(),
            temporary: None,
            hidden: Vec::new(),
            directories: Vec::new(),
            unreachable: Unreachable::default(),
        }
    }

    /// Returns true if commands see the server's own tree, in which only Landlock keeps them to the
    /// exports.
    pub fn is_servers_own(&self) -> bool {
        self.root.is_none()
    }

    /// Returns true if a view would show `path`, which the kernel must have resolved.
    pub fn would_show(&self, path: &Path) -> bool {
        system::is_in_every_view(path) && !self.hidden.iter().any(|hidden| path.starts_with(hidden))
    }

    /// The mount that `path` lies in, which the kernel must have resolved.
    pub fn mount_of(&self, path: &Path) -> Option<&Path> {
        self.mounts.iter().map(PathBuf::as_path).find(|mount| path.starts_with(mount))
    }

    /// The mount paths, for messages.
    pub fn mounts(&self) -> &[PathBuf] {
        &self.mounts
    }

    /// Returns true if programs at `path` may be executed: by the innermost mount, as for the
    /// kernel.
    pub fn is_executable(&self, path: &Path) -> bool {
        self.innermost(path).is_some_and(|mount| self.executable.contains(mount))
    }

    /// Returns true if commands may write at `path`, or in a mount below it.
    pub fn is_writable_at_or_below(&self, path: &Path) -> bool {
        self.innermost(path).is_some_and(|mount| self.writable.contains(mount))
            || self.writable.iter().any(|mount| mount.starts_with(path))
    }

    fn innermost(&self, path: &Path) -> Option<&PathBuf> {
        let around = self.mounts.iter().filter(|mount| path.starts_with(mount));
        around.max_by_key(|mount| mount.as_os_str().len())
    }

    /// Makes a working directory that only the workstation has, as far as it lies on the root,
    /// which commands can't write. [`paths::working_directory`](super::paths::working_directory)
    /// reports failures.
    pub fn prepare_directory(&self, directory: &[u8]) {
        let directory = path_of(directory);
        if self.mount_of(directory).is_none() && !is_private(directory) {
            let _ = self.make_directory(directory);
        }
    }

    /// Makes `directory` and its parents on the view's own file systems, with the rights of this
    /// process.
    pub fn make_directory(&self, directory: &Path) -> Result<(), NoDirectory> {
        let root = self.root.as_ref().ok_or(NoDirectory::NotMade)?;
        places::check(directory)?;
        root.directory(directory)?;
        Ok(())
    }

    /// Without a namespace, all must already have the workstation's paths.
    fn check_same_tree(&mut self, spec: &ViewSpec) -> Result<(), Refusal> {
        let _acting = ActingAs::begin(spec.user.as_ref())
            .map_err(failed(|| "act as the caller".to_owned()))?;
        for entry in &spec.mounts {
            let (path, shown) =
                (path_of(&entry.path), Path::new(OsStr::from_bytes(&entry.path)).display());
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
            if !has_content(path_of(&file.path), &file.content) {
                let path = path_of(&file.path).display();
                return Err(refuse(format!(
                    "cannot show {path} to commands: no mount namespace can be made"
                )));
            }
        }
        Ok(())
    }
}

/// A directory for the temporary files of the commands of one runner, which is removed with it.
fn make_temporary(spec: &ViewSpec) -> Result<Option<PathBuf>, Refusal> {
    if spec.scratch.is_empty() {
        return Ok(None);
    }
    let scratch = path_of(&spec.scratch);
    let directory = scratch.join("tmp");
    let attempt = || format!("make {}", directory.display());
    fs::DirBuilder::new().mode(0o700).create(&directory).map_err(failed(attempt))?;
    if let Some(user) = spec.user.as_ref().filter(|_| geteuid().is_root()) {
        chown(&directory, Some(user.uid), Some(user.gid)).map_err(failed(attempt))?;
        // Other users may search it, but not list it.
        fs::set_permissions(scratch, fs::Permissions::from_mode(0o711)).map_err(failed(attempt))?;
    }
    Ok(Some(directory))
}

/// Returns true if `path` is a regular file of this content. Opens no device, and reads no more
/// than that.
fn has_content(path: &Path, content: &[u8]) -> bool {
    let flags = OFlag::O_RDONLY | OFlag::O_NONBLOCK | OFlag::O_NOCTTY | OFlag::O_CLOEXEC;
    let is_as_large = |about: fs::Metadata| about.is_file() && about.len() == content.len() as u64;
    let mut found = vec![0; content.len()];
    fs::metadata(path).is_ok_and(is_as_large)
        && open(path, flags, Mode::empty())
            .is_ok_and(|file| fs::File::from(file).read_exact(&mut found).is_ok())
        && found == content
}

/// The reason why a working directory can't be made.
#[derive(Debug, thiserror::Error)]
pub enum NoDirectory {
    /// The view is the server's own tree.
    #[error("it does not exist on the server")]
    NotMade,
    /// It would lie in a directory of the server's.
    #[error("it does not exist on the server, where it can't be made: {0}")]
    Misplaced(#[from] NoPlace),
    /// The system refuses.
    #[error("{}", .0.desc())]
    System(#[from] Errno),
}

/// Returns true if commands can write at `path` of the view.
fn is_private(path: &Path) -> bool {
    PRIVATE.iter().any(|private| path.starts_with(private))
}

pub fn path_of(bytes: &[u8]) -> &Path {
    Path::new(OsStr::from_bytes(bytes))
}

/// Opens a mount's directory on the server. The administrator chose the export's own directory by a
/// path without links: a link in it was made since, perhaps by users of an export around it. The
/// sub-path is the client's, and is resolved with the rights of `user`, never out of the export.
///
/// The errors are of the kind `UnknownExport`: the directory does not exist.
pub fn open_export(entry: &ViewMount, user: Option<&ViewUser>) -> Result<OwnedFd, Refusal> {
    open_below(open_root(entry)?, entry, user)
}

/// Flags of an export's directories.
const DIRECTORY: OFlag = OFlag::O_PATH.union(OFlag::O_DIRECTORY).union(OFlag::O_CLOEXEC);

/// The first part of [`open_export`]: the export's own directory.
pub fn open_root(entry: &ViewMount) -> Result<OwnedFd, Refusal> {
    let directory = path_of(&entry.directory);
    let how = OpenHow::new().flags(DIRECTORY).resolve(ResolveFlag::RESOLVE_NO_SYMLINKS);
    openat2(AT_FDCWD, directory, how).map_err(not_opened(directory))
}

/// The second part: the mount's directory in it.
pub fn open_below(
    root: OwnedFd,
    entry: &ViewMount,
    user: Option<&ViewUser>,
) -> Result<OwnedFd, Refusal> {
    if entry.sub_path.is_empty() {
        return Ok(root);
    }
    let how = OpenHow::new()
        .flags(DIRECTORY)
        .resolve(ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_MAGICLINKS);
    let sub_path = path_of(&entry.sub_path);
    let _acting = ActingAs::begin(user).map_err(not_opened(sub_path))?;
    openat2(&root, sub_path, how).map_err(not_opened(sub_path))
}

fn not_opened(what: &Path) -> impl Fn(Errno) -> Refusal {
    move |errno| {
        let (what, why) = (what.display(), errno.desc());
        Refusal::new(Kind::UnknownExport, format!("cannot open {what} of the export: {why}"))
    }
}

#[cfg(test)]
mod tests {
    use posh_proto::executor::ClientFile;

    use super::*;

    fn spec(path: &Path, directory: &Path) -> ViewSpec {
        let bytes = |path: &Path| path.as_os_str().as_bytes().to_vec();
        let mount =
            ViewMount { path: bytes(path), directory: bytes(directory), ..ViewMount::default() };
        ViewSpec {
            isolation: Isolation::Nothing.into(),
            mounts: vec![mount],
            ..ViewSpec::default()
        }
    }

    fn refusal(spec: &ViewSpec) -> String {
        View::build(spec).expect_err("a refusal").message
    }

    #[test]
    fn without_a_namespace_only_the_same_tree_is_served() {
        let directory = tempfile::tempdir().unwrap();
        let same = directory.path().canonicalize().unwrap();
        let view = View::build(&spec(&same, &same)).expect("the same tree");
        assert_eq!(view.mount_of(&same.join("f")), Some(same.as_path()));
        assert!(view.make_directory(&same.join("new")).is_err());
        assert!(
            refusal(&spec(Path::new("/mnt/elsewhere"), &same))
                .contains("no mount namespace can be made")
        );
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
