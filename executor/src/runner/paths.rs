//! Path resolution by the kernel inside the view: working directories, the files that a command is
//! known to use, and redirects.
//!
//! A path of a command must lead into the workstation's mounts; anything else is another file on
//! the server than on the workstation.

use std::{
    collections::{BTreeSet, HashSet},
    ffi::OsStr,
    fs,
    os::{
        fd::{AsRawFd as _, OwnedFd},
        unix::{ffi::OsStrExt as _, fs::FileExt as _},
    },
    path::{Component, Path, PathBuf},
};

use nix::{
    errno::Errno,
    fcntl::{OFlag, OpenHow, ResolveFlag, open, openat2, readlinkat},
    libc,
    sys::stat::{FileStat, Mode, SFlag, fstat},
    unistd::{Whence, lseek},
};
use posh_proto::{
    executor::{File as Redirect, PathUse, Stage, rejected::Kind},
    rule::{self, Rule},
};

use super::{
    budget::{Budget, SPENT},
    devices, ids,
    listing::has_default_acl,
    view::View,
};
use crate::error::Refusal;

/// Number of symbolic links that the kernel follows.
pub(super) const MAX_LINKS: usize = 40;

/// Entries of a tree that are checked before a command: the command itself would walk a larger one
/// faster.
const MAX_ENTRIES: usize = 100_000;

pub(super) fn path_of(bytes: &[u8]) -> &Path {
    Path::new(OsStr::from_bytes(bytes))
}

/// Opens a stage's working directory, and makes it (empty) if it lies outside of all mounts on the
/// workstation.
pub fn working_directory(view: &View, bytes: &[u8]) -> Result<OwnedFd, Refusal> {
    let path = if bytes.is_empty() { Path::new("/") } else { path_of(bytes) };
    let refuse =
        |why: &str| Refusal::new(Kind::Cwd, format!("working directory {}: {why}", path.display()));
    if !path.is_absolute() {
        return Err(refuse("not an absolute path"));
    }
    let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    let opened = match open(path, flags, Mode::empty()) {
        Err(Errno::ENOENT) if view.mount_of(path).is_none() => {
            view.make_directory(path).map_err(|why| refuse(&why.to_string()))?;
            open(path, flags, Mode::empty())
        }
        other => other,
    };
    let directory = opened.map_err(|errno| refuse(errno.desc()))?;
    let actual = name_of(&directory).map_err(|errno| refuse(errno.desc()))?;
    // getcwd(3) must return the same path as on the workstation.
    if actual != path {
        return Err(refuse(&format!("it is {} on the server", actual.display())));
    }
    Ok(directory)
}

/// Checks every path that the stage is known to use.
pub fn check(view: &View, cwd: &OwnedFd, stage: &Stage, budget: &Budget) -> Result<(), Refusal> {
    let named =
        PathSets { local_output: identity_of(cwd, &stage.local_output), ..PathSets::of(stage) };
    stage.paths.iter().try_for_each(|used| {
        let path = path_of(&used.path);
        if budget.spend(1 + path.components().count() / 8) {
            return check_one(view, cwd, &named, used, budget);
        }
        Err(Refusal::new(Kind::PathOutside, format!("{}: {SPENT}", path.display())))
    })
}

fn check_one(
    view: &View,
    cwd: &OwnedFd,
    named: &PathSets<'_>,
    used: &PathUse,
    budget: &Budget,
) -> Result<(), Refusal> {
    // An empty path names nothing anywhere.
    if used.path.is_empty()
        || devices::is_same_everywhere(&used.path)
        || named.has_descriptor(&used.path)
    {
        return Ok(());
    }
    let outside = |why: Unlike| {
        Refusal::new(Kind::PathOutside, format!("{}: {why}", path_of(&used.path).display()))
    };
    if used.whole_file && !is_readable_file(view, cwd, path_of(&used.path)) {
        let why =
            format!("{} is not a regular file that can be read", path_of(&used.path).display());
        return Err(Refusal::new(Kind::NotWhole, why));
    }
    let (at, status) = landing(cwd, path_of(&used.path), !used.no_follow)
        .map_err(|errno| outside(Unlike::System(errno)))?;
    if rule::holds(Rule::Files) {
        require_inside(view, &at).map_err(&outside)?;
        require_plain(&status, used.no_follow).map_err(&outside)?;
        named.require_uncovered(&at, used.recursive).map_err(&outside)?;
        if let Some(point) = view.unreachable.met_by(&at, used.recursive) {
            return Err(outside(Unlike::OtherFileSystem(point.to_owned())));
        }
        if used.plain_symlinks_below {
            require_plain_symlinks(&at, budget).map_err(&outside)?;
        }
    }
    if named.local_output == Some((status.st_dev, status.st_ino))
        && rule::holds(Rule::InputIsOutput)
    {
        let why = "it is also the command's output, which only the command itself can notice";
        return Err(Refusal::new(Kind::Guard, format!("{}: {why}", at.display())));
    }
    if used.written_over && rule::holds(Rule::Files) {
        let found = find(cwd, path_of(&used.path), false).and_then(|found| name_of(&found));
        found.map_or(Ok(()), |there| require_plain_symlinks(&there, budget)).map_err(&outside)?;
    }
    if used.no_links_beside
        && rule::holds(Rule::Coherence)
        && let Some(link) = link_beside(cwd, path_of(&used.path), budget)?
    {
        let why = "is a symbolic link, as which the workstation's mount might go on showing what \
                   this command puts there";
        return Err(Refusal::new(Kind::Guard, format!("{} {why}", link.display())));
    }
    if used.keeps_owner
        && rule::holds(Rule::MountDifferences)
        && !ids::are_ours(&status)
        && !ids::are_whole()
    {
        let why = "belongs to another user or group, which commands in a user namespace can't give \
                   to the file that replaces it";
        return Err(Refusal::new(Kind::Guard, format!("{}: {why}", at.display())));
    }
    // Directories below are looked at while their names are noted (`changes`).
    if used.takes_umask
        && rule::holds(Rule::MountDifferences)
        && let Some(directory) =
            [Some(&*at), at.parent()].into_iter().flatten().find(|path| has_default_acl(path))
    {
        return Err(default_acl_refusal(directory));
    }
    if is_unreadable_program(view, cwd, used, &at, &status) {
        let why = "it can be started but not read, and only the workstation can tell if this user \
                   may start it";
        return Err(Refusal::new(Kind::Guard, format!("{}: {why}", at.display())));
    }
    if used.no_symlinks && rule::holds(Rule::Files) && passes_link(cwd, path_of(&used.path)) {
        return Err(outside(Unlike::PassesLink));
    }
    if used.ends_in_newline && !ends_in_newline(cwd, path_of(&used.path)) {
        let why = format!("{} does not end in a newline", path_of(&used.path).display());
        return Err(Refusal::new(Kind::Seam, why));
    }
    Ok(())
}

/// Refusal of a command that makes files in a directory with a default ACL (acl(5)).
pub fn default_acl_refusal(directory: &Path) -> Refusal {
    let why = "has a default ACL, by which new files get other permissions than through the mount";
    Refusal::new(Kind::Guard, format!("{} {why}", directory.display()))
}

/// Returns true if access(2) would deny that a file is a program, because its export is mounted
/// noexec. file(1) asks that about files that it can't read; no other annotated command does.
fn is_unreadable_program(
    view: &View,
    cwd: &OwnedFd,
    used: &PathUse,
    at: &Path,
    status: &FileStat,
) -> bool {
    let may_start = status.st_mode & libc::S_IFMT == libc::S_IFREG && status.st_mode & 0o111 != 0;
    may_start && !view.is_executable(at) && open_to_read(cwd, path_of(&used.path)).is_none()
}

/// Device and inode of a file, if there is one.
fn identity_of(cwd: &OwnedFd, path: &[u8]) -> Option<(u64, u64)> {
    let found = fstat(find(cwd, path_of(path), true).ok()?).ok()?;
    Some((found.st_dev, found.st_ino))
}

/// Returns true if the lookup would follow a symbolic link. The last component of a path that is
/// not followed does not count, since O_NOFOLLOW opens the link itself.
fn passes_link(cwd: &OwnedFd, path: &Path) -> bool {
    let flags = OFlag::O_PATH | OFlag::O_CLOEXEC;
    let how = OpenHow::new().flags(flags).resolve(ResolveFlag::RESOLVE_NO_SYMLINKS);
    openat2(cwd, path, how).is_err_and(|errno| errno == Errno::ELOOP)
}

/// Checks the place first: no other file is opened, not even as a test. Opens the file that was
/// found, whatever has its name by then.
fn is_readable_file(view: &View, cwd: &OwnedFd, path: &Path) -> bool {
    let Ok(found) = find(cwd, path, true) else { return false };
    let is_inside = name_of(&found).is_ok_and(|at| view.mount_of(&at).is_some());
    let is_file = fstat(&found).is_ok_and(|status| status.st_mode & libc::S_IFMT == libc::S_IFREG);
    let own = format!("/proc/self/fd/{}", found.as_raw_fd());
    let flags = OFlag::O_RDONLY | OFlag::O_CLOEXEC | OFlag::O_NONBLOCK | OFlag::O_NOCTTY;
    is_inside && is_file && open(own.as_str(), flags, Mode::empty()).is_ok()
}

/// Does not wait for the other end of a FIFO.
fn open_to_read(cwd: &OwnedFd, path: &Path) -> Option<fs::File> {
    let flags = OFlag::O_RDONLY | OFlag::O_CLOEXEC | OFlag::O_NONBLOCK;
    let how = OpenHow::new().flags(flags).resolve(ResolveFlag::RESOLVE_NO_MAGICLINKS);
    openat2(cwd, path, how).ok().map(fs::File::from)
}

/// Returns true if a file's last byte is a newline. An empty or unreadable file does not tell how
/// its part of a split ends.
fn ends_in_newline(cwd: &OwnedFd, path: &Path) -> bool {
    let Some(file) = open_to_read(cwd, path) else { return false };
    let mut last = [0];
    let length = file.metadata().map_or(0, |found| found.len());
    length > 0 && file.read_exact_at(&mut last, length - 1).is_ok() && last == *b"\n"
}

/// Opens a redirect's file, at the offset that the shell's descriptor has.
pub fn open_redirect(view: &View, cwd: &OwnedFd, file: &Redirect) -> Result<OwnedFd, Refusal> {
    let path = path_of(&file.path);
    let refuse = |why: &str| {
        Refusal::new(Kind::OpenFailed, format!("cannot open {}: {why}", path.display()))
    };
    let flags = OFlag::from_bits_retain(i32::try_from(file.flags).unwrap_or(0));
    if flags.intersects(OFlag::O_CREAT | OFlag::O_TRUNC) {
        return Err(Refusal::protocol(format!(
            "redirect of {} would create or truncate",
            path.display()
        )));
    }
    let handle = find(cwd, path, true).map_err(|errno| refuse(errno.desc()))?;
    let at = name_of(&handle).map_err(|errno| refuse(errno.desc()))?;
    require_inside(view, &at)
        .map_err(|why| Refusal::new(Kind::PathOutside, format!("{}: {why}", path.display())))?;
    let status = fstat(&handle).map_err(|errno| refuse(errno.desc()))?;
    require_plain(&status, false).map_err(|why| refuse(&why.to_string()))?;
    let writes = flags & OFlag::O_ACCMODE != OFlag::O_RDONLY;
    let is_left_empty = status.st_size == 0 || file.offset > 0 || flags.contains(OFlag::O_APPEND);
    if writes && !is_left_empty && rule::holds(Rule::Offsets) {
        // The shell has emptied its file: another file has got the name since.
        return Err(refuse("it is not empty, as the shell has left it"));
    }
    if writes && status.st_nlink > 1 && rule::holds(Rule::InputIsOutput) {
        // Through the mount, another name of it may look like another file.
        return Err(refuse("it has several hard links"));
    }
    // Opens the object that was checked, not its name once more.
    let kept = flags & (OFlag::O_ACCMODE | OFlag::O_APPEND | OFlag::O_NONBLOCK);
    let own = format!("/proc/self/fd/{}", handle.as_raw_fd());
    let opened = open(own.as_str(), kept | OFlag::O_NOCTTY | OFlag::O_CLOEXEC, Mode::empty())
        .map_err(|errno| refuse(errno.desc()))?;
    if file.offset > 0 {
        let offset = i64::try_from(file.offset).map_err(|_| refuse("the offset is too large"))?;
        lseek(&opened, offset, Whence::SeekSet).map_err(|errno| refuse(errno.desc()))?;
    }
    Ok(opened)
}

/// Sets in which a stage's paths are looked up. The client makes both as long as it likes, so that
/// comparing each with each is too expensive.
struct PathSets<'a> {
    /// Mount points of the workstation inside a mount, in the order of their components.
    covered: BTreeSet<&'a Path>,
    /// The stage's open descriptors.
    descriptors: HashSet<u32>,
    /// Device and inode of the file to which the workstation writes its output.
    local_output: Option<(u64, u64)>,
}

impl<'a> PathSets<'a> {
    fn of(stage: &'a Stage) -> Self {
        Self {
            local_output: None,
            covered: stage.covered.iter().map(|point| path_of(point)).collect(),
            descriptors: stage.descriptors.iter().map(|descriptor| descriptor.fd).collect(),
        }
    }

    /// `/dev/stdin`, `/dev/fd/N` and their like refer to the stage's open files.
    fn has_descriptor(&self, path: &[u8]) -> bool {
        devices::descriptor_of(path).is_some_and(|fd| self.descriptors.contains(&fd))
    }

    /// Refuses paths below the workstation's own mounts inside a mount: the server lacks those
    /// files.
    fn require_uncovered(&self, at: &Path, recursive: bool) -> Result<(), Unlike> {
        let around = at.ancestors().find_map(|above| self.covered.get(&above).copied());
        // Paths below `at` come right behind it in the order.
        let below = || {
            self.covered
                .range(at..)
                .next()
                .copied()
                .filter(|point| recursive && point.starts_with(at))
        };
        match around.or_else(below) {
            None => Ok(()),
            Some(point) => Err(Unlike::Covered(point.to_owned())),
        }
    }
}

/// The target of `path`; if that does not exist, the directory in which it would be made, or the
/// deepest existing one.
pub(super) fn landing(
    cwd: &OwnedFd,
    path: &Path,
    follow: bool,
) -> nix::Result<(PathBuf, FileStat)> {
    let (mut path, mut follow) = (path.to_owned(), follow);
    // Each step removes a link or a component.
    for _ in 0..MAX_LINKS + path.components().count() {
        let errno = match find(cwd, &path, follow) {
            Ok(found) => return Ok((name_of(&found)?, fstat(&found)?)),
            Err(errno) => errno,
        };
        if path == Path::new(".") || path == Path::new("/") {
            return Err(errno);
        }
        let parent = match path.parent() {
            Some(parent) if parent != Path::new("") => parent.to_owned(),
            _ => PathBuf::from("."),
        };
        // A dangling link: a write would make its target.
        path = match readlinkat(cwd, &path) {
            Ok(target) if follow && errno != Errno::ELOOP => parent.join(target),
            _ => parent,
        };
        follow = true;
    }
    Err(Errno::ELOOP)
}

/// A handle on the file at `path`. Magic links like those of /proc/PID/fd are not followed: they
/// would lead through this process's open files.
pub fn find(cwd: &OwnedFd, path: &Path, follow: bool) -> nix::Result<OwnedFd> {
    if path == Path::new(".") {
        // Needs no right to search it.
        return cwd
            .try_clone()
            .map_err(|error| Errno::from_raw(error.raw_os_error().unwrap_or(libc::EMFILE)));
    }
    let flags =
        OFlag::O_PATH | OFlag::O_CLOEXEC | if follow { OFlag::empty() } else { OFlag::O_NOFOLLOW };
    openat2(cwd, path, OpenHow::new().flags(flags).resolve(ResolveFlag::RESOLVE_NO_MAGICLINKS))
}

/// The path that `fd` has in the view.
pub fn name_of(fd: &OwnedFd) -> nix::Result<PathBuf> {
    fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()))
        .map_err(|error| Errno::from_raw(error.raw_os_error().unwrap_or(libc::EIO)))
}

/// Why a file of the server is not, or may not be, what the workstation has there.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unlike {
    /// The path ends outside of the mounts.
    #[error("leads to {} on the server, which is not in {mounts}", at.display())]
    Outside {
        /// Its end.
        at: PathBuf,
        /// The mounts, for the user.
        mounts: String,
    },
    /// A mount of the workstation lies at or above it, or below it.
    #[error("the workstation has something else mounted at {}", .0.display())]
    Covered(PathBuf),
    /// Another file system of the server, which volumes do not show.
    #[error(
        "another file system of the server is mounted at {}, which a volume does not show",
        .0.display()
    )]
    OtherFileSystem(PathBuf),
    /// Looking for links in the tree would take too long.
    #[error("has too many entries to look for links")]
    ManyEntries,
    /// A link that is absolute or has `..`.
    #[error("has the link {}, which may lead out of it", .0.display())]
    Link(PathBuf),
    /// The path passes a symbolic link.
    #[error("passes a symbolic link, which the workstation's mount may not follow")]
    PassesLink,
    /// A file that joins processes of one machine.
    #[error("is a {0}")]
    Special(&'static str),
    /// The system's error.
    #[error("{}", .0.desc())]
    System(Errno),
}

pub(super) fn require_inside(view: &View, at: &Path) -> Result<(), Unlike> {
    if view.mount_of(at).is_some() {
        return Ok(());
    }
    let mounts = view.mounts().iter().map(|mount| mount.display().to_string()).collect::<Vec<_>>();
    Err(Unlike::Outside { at: at.to_owned(), mounts: mounts.join(" or ") })
}

/// Refuses links that are absolute or have `..`, which may lead out of the tree. A mount with
/// contain_symlinks (sshfs) refuses to read them.
fn require_plain_symlinks(tree: &Path, budget: &Budget) -> Result<(), Unlike> {
    if tree.is_symlink() {
        return require_plain_symlink(tree);
    }
    let mut queue = vec![tree.to_owned()];
    let mut left = MAX_ENTRIES;
    while let Some(directory) = queue.pop() {
        let Ok(entries) = fs::read_dir(&directory) else { continue };
        for entry in entries.flatten() {
            let fewer = left.checked_sub(1).filter(|_| budget.spend(1));
            left = fewer.ok_or(Unlike::ManyEntries)?;
            match entry.file_type() {
                Ok(kind) if kind.is_dir() => queue.push(entry.path()),
                Ok(kind) if kind.is_symlink() => require_plain_symlink(&entry.path())?,
                _ => {}
            }
        }
    }
    Ok(())
}

fn require_plain_symlink(path: &Path) -> Result<(), Unlike> {
    let target = fs::read_link(path).unwrap_or_default();
    if target.is_absolute() || target.components().any(|part| part == Component::ParentDir) {
        return Err(Unlike::Link(path.to_owned()));
    }
    Ok(())
}

/// A symbolic link that a command may overwrite beside a file that it writes by name: at the name,
/// at the name without its suffix, or at the name with a suffix or prefix (`sed -i.bak`, `gunzip`,
/// `xz`).
fn link_beside(cwd: &OwnedFd, path: &Path, budget: &Budget) -> Result<Option<PathBuf>, Refusal> {
    let parent = path.parent().filter(|parent| *parent != Path::new("")).unwrap_or(Path::new("."));
    // Without a directory, nothing is written.
    let Ok(directory) = find(cwd, parent, true).and_then(|found| name_of(&found)) else {
        return Ok(None);
    };
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        if !budget.spend(1) {
            let why = format!("{} has too many entries to look for links", parent.display());
            return Err(Refusal::new(Kind::Guard, why));
        }
        if may_be_made(path, &entry.file_name())
            && entry.file_type().is_ok_and(|kind| kind.is_symlink())
        {
            return Ok(Some(entry.path()));
        }
    }
    Ok(None)
}

fn may_be_made(path: &Path, beside: &OsStr) -> bool {
    let [name, stem] =
        [path.file_name(), path.file_stem()].map(|part| part.unwrap_or_default().as_bytes());
    let beside = beside.as_bytes();
    beside.starts_with(stem) || beside.ends_with(name) || name.starts_with(beside)
}

/// FIFOs, sockets and devices join processes of one machine.
pub(super) fn require_plain(status: &FileStat, link_itself: bool) -> Result<(), Unlike> {
    match SFlag::from_bits_truncate(status.st_mode & libc::S_IFMT) {
        SFlag::S_IFREG | SFlag::S_IFDIR => Ok(()),
        _ if link_itself => Ok(()),
        SFlag::S_IFIFO => Err(Unlike::Special("FIFO")),
        SFlag::S_IFSOCK => Err(Unlike::Special("socket")),
        _ => Err(Unlike::Special("device")),
    }
}

#[cfg(test)]
mod tests {
    use posh_proto::executor::Descriptor;

    use super::*;

    #[test]
    fn what_the_workstation_has_covered_is_found_among_many() {
        let others = (0..5000).flat_map(|number| {
            [format!("/m/a-{number}"), format!("/m/a/{number}/x"), "/m/a.b".into()]
        });
        let covered = others
            .chain(["/m/a/c".to_owned(), "/m/b//d/".to_owned()])
            .map(|path| path.into())
            .collect();
        let descriptors = vec![Descriptor { fd: 7, ..Descriptor::default() }];
        let stage = Stage { covered, descriptors, ..Stage::default() };
        let named = PathSets::of(&stage);
        for (path, itself, with_all_below) in [
            ("/m/a", true, false),
            ("/m/a/c", false, false),
            ("/m/a/c/f", false, false),
            ("/m/a/cc", true, true),
            ("/m/a/17", true, false),
            ("/m/b", true, false),
            ("/m/b/d/f", false, false),
            ("/m/z", true, true),
            ("/m/a-", true, true),
            ("/", true, false),
        ] {
            let is_fine = |recursive| named.require_uncovered(Path::new(path), recursive).is_ok();
            assert_eq!((is_fine(false), is_fine(true)), (itself, with_all_below), "{path}");
        }
        assert!(named.has_descriptor(b"/dev/fd/7") && !named.has_descriptor(b"/dev/stdin"));
    }

    // As many of both as one message can have; comparing takes no longer than decoding.
    #[test]
    fn paths_and_what_is_covered_are_not_compared_with_each_other() {
        let covered = (0..60_000).map(|number| format!("/q/g/{number}").into()).collect();
        let stage = Stage { covered, ..Stage::default() };
        let named = PathSets::of(&stage);
        let began = std::time::Instant::now();
        assert!((0..100_000).all(|_| named.require_uncovered(Path::new("/q/f"), true).is_ok()));
        assert!(began.elapsed() < std::time::Duration::from_secs(20), "{:?}", began.elapsed());
    }
}
