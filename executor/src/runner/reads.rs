//! The files that a run reads. What was begun before anybody waited for it counts for who asks later if they are all as they were.

use std::{
    os::fd::{AsFd as _, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
    time::Duration,
};

use nix::{
    fcntl::{OFlag, open},
    libc,
    sys::{
        stat::{FileStat, Mode, fstat},
        statfs::fstatfs,
    },
    time::{ClockId, clock_gettime},
};

use super::{listing, paths, view::path_of};

/// A file's device and inode.
pub type Identity = (u64, u64);

/// File systems count time in steps of up to 10 ms: what changed later than that may change once more and look the same.
const SETTLES: Duration = Duration::from_millis(40);

/// One of them.
pub struct Read {
    /// The command's working directory, and the path from there.
    cwd: PathBuf,
    path: PathBuf,
    follow: bool,
    was: Option<FileStat>,
    /// By what it was, it can be told later whether it is still the same.
    is_settled: bool,
}

impl Read {
    /// A file as it is now, by its name from the working directory.
    pub fn by_name((cwd, bytes): (&OwnedFd, &[u8]), path: &Path, follow: bool) -> Self {
        let found = paths::find(cwd, path, follow);
        Self::of(bytes, path, (follow, found.ok().as_ref().map(OwnedFd::as_fd)))
    }

    /// One that is open.
    pub fn open(cwd: &[u8], path: &Path, file: BorrowedFd<'_>) -> Self {
        Self::of(cwd, path, (true, Some(file)))
    }

    fn of(cwd: &[u8], path: &Path, (follow, found): (bool, Option<BorrowedFd<'_>>)) -> Self {
        let cwd = if cwd.is_empty() { Path::new("/") } else { path_of(cwd) };
        let was = found.and_then(|found| fstat(found).ok());
        let is_settled = was.is_some_and(|was| is_file(&was) && is_past(&was)) && found.is_some_and(tells_changes);
        Self { cwd: cwd.to_owned(), path: path.to_owned(), follow, was, is_settled }
    }

    /// Which file it is, if there is one.
    pub fn identity(&self) -> Option<Identity> {
        self.was.as_ref().map(identity)
    }

    /// Whether what the command has read by this name is what it would read now.
    fn is_as_it_was(&self) -> bool {
        let now = || {
            let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
            let cwd = open(&self.cwd, flags, Mode::empty()).ok()?;
            fstat(paths::find(&cwd, &self.path, self.follow).ok()?.as_fd()).ok()
        };
        let seen = |about: &FileStat| {
            (identity(about), about.st_size, about.st_ctime, about.st_ctime_nsec, about.st_mtime, about.st_mtime_nsec)
        };
        self.is_settled && now().as_ref().map(seen) == self.was.as_ref().map(seen)
    }
}

/// The first one that is not, or of which that can't be told.
pub fn changed(reads: &[Read]) -> Option<&Path> {
    reads.iter().find(|read| !read.is_as_it_was()).map(|read| read.path.as_path())
}

/// The first one of which nobody will be able to tell.
pub fn unsettled(reads: &[Read]) -> Option<&Path> {
    reads.iter().find(|read| !read.is_settled).map(|read| read.path.as_path())
}

pub fn identity(about: &FileStat) -> Identity {
    (about.st_dev, about.st_ino)
}

fn is_file(about: &FileStat) -> bool {
    about.st_mode & libc::S_IFMT == libc::S_IFREG
}

/// Whether the last change was so long ago that the next one has another time.
fn is_past(about: &FileStat) -> bool {
    let changed = Duration::new(about.st_ctime.unsigned_abs(), u32::try_from(about.st_ctime_nsec).unwrap_or(0));
    let now = clock_gettime(ClockId::CLOCK_REALTIME_COARSE).map_or(Duration::ZERO, Duration::from);
    changed + SETTLES < now
}

/// Whether all changes of its files are made by this machine, which notes when.
fn tells_changes(file: BorrowedFd<'_>) -> bool {
    fstatfs(file).is_ok_and(|found| listing::FILE_SYSTEMS.contains(&found.filesystem_type()))
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::symlink, thread::sleep};

    use super::*;

    #[test]
    fn only_what_was_left_alone_is_as_it_was() {
        let tree = tempfile::tempdir().expect("a directory");
        let path = |name: &str| tree.path().join(name);
        let cwd = fs::File::open(tree.path()).expect("a directory").into();
        let read =
            |name: &str| Read::by_name((&cwd, tree.path().as_os_str().as_encoded_bytes()), Path::new(name), true);
        fs::write(path("f"), "old").expect("a file");
        assert!(!read("f").is_settled, "it has just changed");
        for name in ["g", "h"] {
            fs::write(path(name), "old").expect("a file");
        }
        symlink("f", path("link")).expect("a link");
        sleep(2 * SETTLES);
        if !tells_changes(cwd.as_fd()) {
            return;
        }
        let reads = ["f", "g", "link"].map(read);
        assert_eq!(changed(&reads), None);
        assert_eq!(changed(&[read(".")]), Some(Path::new(".")), "a directory");
        assert_eq!(changed(&[read("none")]), Some(Path::new("none")));
        // Others under the same name, and the same size; what leads there; and what is written, with its old time.
        let kept = fs::metadata(path("f")).expect("it is there").modified().expect("a time");
        fs::write(path("f"), "new").expect("written");
        fs::File::open(path("f")).expect("it is there").set_modified(kept).expect("set");
        assert_eq!(changed(&reads), Some(Path::new("f")));
        assert_eq!(changed(&reads[1..2]), None);
        fs::rename(path("h"), path("g")).expect("renamed");
        assert_eq!(changed(&reads[1..2]), Some(Path::new("g")));
    }
}
