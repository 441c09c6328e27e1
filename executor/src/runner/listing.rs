//! A directory's entries, read without a trace, and the trace that other readers
//! leave: by it can be told that nobody remembers a listing.

use std::{
    ffi::{CStr, CString, OsStr, OsString},
    fs::{self, Metadata},
    os::{
        fd::{AsFd, OwnedFd},
        unix::{ffi::OsStrExt as _, fs::MetadataExt as _},
    },
    path::Path,
};

use nix::{
    dir::{Dir, Type},
    errno::Errno,
    fcntl::{AT_FDCWD, AtFlags, OFlag, open},
    libc,
    sys::{
        stat::{FileStat, Mode, UtimensatFlags, fstatat, utimensat},
        statfs::{BTRFS_SUPER_MAGIC, EXT4_SUPER_MAGIC, TMPFS_MAGIC, XFS_SUPER_MAGIC, statfs},
        statvfs::{FsFlags, statvfs},
        time::TimeSpec,
    },
};

/// A directory with its entries.
pub struct Listing {
    directory: Dir,
    entries: Vec<Entry>,
}

/// One of them.
pub struct Entry {
    name: CString,
    /// As the directory has it.
    pub is_directory: bool,
}

impl Entry {
    pub fn name(&self) -> OsString {
        OsStr::from_bytes(self.name.as_bytes()).to_owned()
    }
}

impl Listing {
    /// Reads a directory. Its time of reading stays what it was, where we may have that.
    pub fn read(path: &Path) -> Option<Self> {
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let opened = match Dir::open(path, flags | OFlag::O_NOATIME, Mode::empty()) {
            // For the owner and for root only.
            Err(Errno::EPERM) => Dir::open(path, flags, Mode::empty()),
            other => other,
        };
        let mut directory = opened.ok()?;
        let own: [&CStr; 2] = [c".", c".."];
        let entry = |entry: nix::dir::Entry| {
            let is_other = !own.contains(&entry.file_name());
            is_other.then(|| Entry {
                name: entry.file_name().to_owned(),
                is_directory: entry.file_type() == Some(Type::Directory),
            })
        };
        let entries = directory.iter().filter_map(Result::ok).filter_map(entry).collect();
        Some(Self { directory, entries })
    }

    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    pub fn into_entries(self) -> Vec<Entry> {
        self.entries
    }

    /// What an entry is; `None` if it has gone.
    pub fn status(&self, entry: &Entry) -> Option<FileStat> {
        status_in(&self.directory, entry)
    }
}

/// A directory whose entries are known from before.
pub struct Known(OwnedFd);

impl Known {
    /// Reads nothing.
    pub fn open(path: &Path) -> Option<Self> {
        let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        open(path, flags, Mode::empty()).ok().map(Self)
    }

    /// What an entry is; `None` if it has gone.
    pub fn status(&self, entry: &Entry) -> Option<FileStat> {
        status_in(&self.0, entry)
    }
}

fn status_in(directory: impl AsFd, entry: &Entry) -> Option<FileStat> {
    fstatat(directory, entry.name.as_c_str(), AtFlags::AT_SYMLINK_NOFOLLOW).ok()
}

pub fn is_directory(status: &FileStat) -> bool {
    status.st_mode & libc::S_IFMT == libc::S_IFDIR
}

/// Whether directories of this file system tell when they were read. By relatime, the default, a reader leaves its
/// time if it is the first one since the last change, and no more is needed.
pub fn tells_readers(path: &Path) -> bool {
    let known = [EXT4_SUPER_MAGIC, XFS_SUPER_MAGIC, BTRFS_SUPER_MAGIC, TMPFS_MAGIC];
    let silent = FsFlags::ST_NOATIME | FsFlags::ST_NODIRATIME;
    let is_known = statfs(path).is_ok_and(|found| known.contains(&found.filesystem_type()));
    is_known && statvfs(path).is_ok_and(|found| !found.flags().intersects(silent))
}

/// Whether nobody has read a directory since it was last changed: who listed it
/// before that change was told of it then, and has not listed it since.
pub fn is_unread(found: &Metadata) -> bool {
    (found.atime(), found.atime_nsec()) < (found.mtime(), found.mtime_nsec())
}

/// Takes away the trace that a reader has left, for one whose listing nobody remembers: its time of reading becomes a moment
/// before its last change. Where the directory is not ours it stays read.
pub fn keep_unread(directory: &Path) {
    let Ok(found) = fs::symlink_metadata(directory) else { return };
    if found.is_dir() && !is_unread(&found) {
        let before = TimeSpec::new(found.mtime(), found.mtime_nsec()) - TimeSpec::new(0, 1);
        let flag = UtimensatFlags::NoFollowSymlink;
        let _no_matter = utimensat(AT_FDCWD, directory, &before, &TimeSpec::UTIME_OMIT, flag);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reader_leaves_a_trace_and_we_leave_none() {
        let tree = tempfile::tempdir().expect("a directory");
        let directory = tree.path().join("d");
        fs::create_dir(&directory).expect("a directory");
        let look = || fs::symlink_metadata(&directory).expect("it is there");
        // New directories have equal times: who reads one then leaves nothing new, and it counts as read.
        assert!(!is_unread(&look()));
        let first = look().mtime_nsec();
        while look().mtime_nsec() == first {
            fs::write(directory.join("f"), "").expect("a file");
            fs::remove_file(directory.join("f")).expect("removed");
        }
        fs::write(directory.join("f"), "").expect("a file");
        if !tells_readers(&directory) {
            return;
        }
        assert!(is_unread(&look()));
        let names: Vec<OsString> =
            Listing::read(&directory).expect("listed").entries().iter().map(Entry::name).collect();
        assert_eq!(names, [OsString::from("f")]);
        assert!(is_unread(&look()), "by us");
        assert_eq!(fs::read_dir(&directory).expect("listed").count(), 1);
        assert!(!is_unread(&look()), "by anybody");
    }
}
