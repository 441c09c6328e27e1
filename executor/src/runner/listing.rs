//! Entries of a directory, read without an update of its access time; and other readers' updates,
//! which tell if anybody may have cached a listing.

use std::{
    ffi::{CStr, OsStr, OsString},
    fs::File,
    iter,
    mem::MaybeUninit,
    os::{
        fd::{AsFd, OwnedFd},
        unix::ffi::OsStrExt as _,
    },
    path::Path,
};

use super::budget::Budget;
use nix::{
    fcntl::{AT_FDCWD, AtFlags, OFlag, open},
    libc,
    sys::{
        stat::{FileStat, Mode, UtimensatFlags, fstatat, lstat, utimensat},
        statfs::{
            BTRFS_SUPER_MAGIC, EXT4_SUPER_MAGIC, FsType, TMPFS_MAGIC, XFS_SUPER_MAGIC, statfs,
        },
        statvfs::{FsFlags, statvfs},
        time::TimeSpec,
    },
};
use rustix::fs::{FileType, OFlags, RawDir, StatxFlags, statx};

/// Bytes per read of a directory; those of a source tree need one.
const READ_BYTES: usize = 32 << 10;

/// Seconds and nanoseconds since 1970.
pub type Time = (i64, i64);

/// File systems whose rules for access and change times are known.
pub const FILE_SYSTEMS: [FsType; 4] =
    [EXT4_SUPER_MAGIC, XFS_SUPER_MAGIC, BTRFS_SUPER_MAGIC, TMPFS_MAGIC];

/// A directory with its entries.
pub struct Listing {
    directory: File,
    entries: Entries,
}

/// The names in a directory, packed: a tree has tens of thousands, and an allocation for each would
/// cost as much as reading it.
#[derive(Default)]
pub struct Entries {
    /// For each entry a byte for its type, its name, and a zero.
    packed: Vec<u8>,
    count: usize,
}

/// One entry.
#[derive(Clone, Copy)]
pub struct ListingEntry<'a> {
    name: &'a CStr,
    /// By the type in the directory.
    pub is_directory: bool,
}

impl ListingEntry<'_> {
    pub fn name(&self) -> OsString {
        OsStr::from_bytes(self.name.to_bytes()).to_owned()
    }
}

impl Entries {
    fn push(&mut self, name: &CStr, is_directory: bool) {
        self.packed.push(is_directory.into());
        self.packed.extend_from_slice(name.to_bytes_with_nul());
        self.count += 1;
    }

    pub fn len(&self) -> usize {
        self.count
    }

    pub fn iter(&self) -> impl Iterator<Item = ListingEntry<'_>> {
        let mut rest = self.packed.as_slice();
        iter::from_fn(move || {
            let (kind, names) = rest.split_first()?;
            let name = CStr::from_bytes_until_nul(names).ok()?;
            rest = names.get(name.count_bytes() + 1..)?;
            Some(ListingEntry { name, is_directory: *kind != 0 })
        })
    }

    /// Bytes that it takes in memory.
    pub fn bytes(&self) -> usize {
        self.packed.capacity()
    }

    pub fn directories(&self) -> impl Iterator<Item = OsString> {
        self.iter().filter(|entry| entry.is_directory).map(|entry| entry.name())
    }

    pub fn names(&self) -> impl Iterator<Item = OsString> {
        self.iter().map(|entry| entry.name())
    }
}

/// Opens a directory for reading, with O_NOATIME if we may.
pub fn open_directory(parent: impl AsFd, name: &Path) -> Option<File> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let opened =
        match rustix::fs::openat(&parent, name, flags | OFlags::NOATIME, rustix::fs::Mode::empty())
        {
            // Only for the owner and for root.
            Err(rustix::io::Errno::PERM) => {
                rustix::fs::openat(&parent, name, flags, rustix::fs::Mode::empty())
            }
            other => other,
        };
    opened.ok().map(File::from)
}

impl Listing {
    /// Reads a directory; `None` also if the budget is spent.
    pub fn read(path: &Path, budget: &Budget) -> Option<Self> {
        Self::of(open_directory(rustix::fs::CWD, path)?, budget)
    }

    /// Reads an open directory; `None` if the budget is spent. An empty one costs something, too.
    pub fn of(directory: File, budget: &Budget) -> Option<Self> {
        budget.spend(1).then_some(())?;
        let mut entries = Entries::default();
        let mut buffer = [MaybeUninit::uninit(); READ_BYTES];
        let mut reader = RawDir::new(&directory, &mut buffer);
        while let Some(Ok(entry)) = reader.next() {
            if ![c".", c".."].contains(&entry.file_name()) {
                budget.spend(1).then_some(())?;
                entries.push(entry.file_name(), entry.file_type() == FileType::Directory);
            }
        }
        // It may be kept for long.
        entries.packed.shrink_to_fit();
        Some(Self { directory, entries })
    }

    pub fn entries(&self) -> &Entries {
        &self.entries
    }

    pub fn into_parts(self) -> (File, Entries) {
        (self.directory, self.entries)
    }

    /// Status of an entry; `None` if it has gone.
    pub fn status(&self, entry: ListingEntry<'_>) -> Option<FileStat> {
        status_in(&self.directory, entry)
    }
}

/// A directory whose entries are known already.
pub struct KnownDirectory(OwnedFd);

impl KnownDirectory {
    /// Opens it without reading.
    pub fn open(path: &Path) -> Option<Self> {
        let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        open(path, flags, Mode::empty()).ok().map(Self)
    }

    /// Status of an entry; `None` if it has gone.
    pub fn status(&self, entry: ListingEntry<'_>) -> Option<FileStat> {
        status_in(&self.0, entry)
    }
}

fn status_in(directory: impl AsFd, entry: ListingEntry<'_>) -> Option<FileStat> {
    fstatat(directory, entry.name, AtFlags::AT_SYMLINK_NOFOLLOW).ok()
}

pub fn is_directory(status: &FileStat) -> bool {
    status.st_mode & libc::S_IFMT == libc::S_IFDIR
}

/// Returns true if directories of this file system note reads. With relatime, the default, the
/// first reader after a change updates the access time, and no more is needed.
pub fn tells_readers(path: &Path) -> bool {
    let silent = FsFlags::ST_NOATIME | FsFlags::ST_NODIRATIME;
    let is_known = statfs(path).is_ok_and(|found| FILE_SYSTEMS.contains(&found.filesystem_type()));
    is_known && statvfs(path).is_ok_and(|found| !found.flags().intersects(silent))
}

/// Returns true if nobody has read a directory since its last change: a reader before that change
/// was told of it, and has not listed it since.
pub fn is_unread(found: &FileStat) -> bool {
    (found.st_atime, found.st_atime_nsec) < (found.st_mtime, found.st_mtime_nsec)
}

/// Time at which a directory was made, if nobody has read it in any later tick of the clock: then
/// its access time is still its birth time.
pub fn never_read(directory: &Path) -> Option<Time> {
    let wanted = StatxFlags::ATIME | StatxFlags::BTIME;
    let found =
        statx(rustix::fs::CWD, directory, rustix::fs::AtFlags::SYMLINK_NOFOLLOW, wanted).ok()?;
    let time = |stamp: rustix::fs::StatxTimestamp| (stamp.tv_sec, i64::from(stamp.tv_nsec));
    let (read, made) = (time(found.stx_atime), time(found.stx_btime));
    (StatxFlags::from_bits_retain(found.stx_mask).contains(wanted) && read == made).then_some(made)
}

/// Returns true if a directory has a default ACL (acl(5)), also where that can't be told.
pub fn has_default_acl(directory: &Path) -> bool {
    use rustix::io::Errno;
    let found = rustix::fs::lgetxattr(directory, c"system.posix_acl_default", &mut [0; 0][..]);
    !matches!(found, Err(Errno::NODATA | Errno::OPNOTSUPP | Errno::NOENT))
}

/// Undoes a reader's update for a directory whose listing nobody caches: sets its access time to a
/// moment before its last change. A directory that is not ours stays read.
pub fn keep_unread(directory: &Path) {
    let Ok(found) = lstat(directory) else { return };
    if is_directory(&found) && !is_unread(&found) {
        let before = TimeSpec::new(found.st_mtime, found.st_mtime_nsec) - TimeSpec::new(0, 1);
        let flag = UtimensatFlags::NoFollowSymlink;
        let _no_matter = utimensat(AT_FDCWD, directory, &before, &TimeSpec::UTIME_OMIT, flag);
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_reader_leaves_a_trace_and_we_leave_none() {
        let tree = tempfile::tempdir().expect("a directory");
        let directory = tree.path().join("d");
        fs::create_dir(&directory).expect("a directory");
        let look = || lstat(&directory).expect("it is there");
        // The times of a new directory are equal: a reader then changes none, and it counts as
        // read.
        assert!(!is_unread(&look()));
        let first = look().st_mtime_nsec;
        while look().st_mtime_nsec == first {
            fs::write(directory.join("f"), "").expect("a file");
            fs::remove_file(directory.join("f")).expect("removed");
        }
        fs::write(directory.join("f"), "").expect("a file");
        if !tells_readers(&directory) {
            return;
        }
        assert!(is_unread(&look()));
        let names: Vec<OsString> = Listing::read(&directory, &Budget::new(None))
            .expect("listed")
            .entries()
            .names()
            .collect();
        assert_eq!(names, [OsString::from("f")]);
        assert!(is_unread(&look()), "by us");
        assert_eq!(fs::read_dir(&directory).expect("listed").count(), 1);
        assert!(!is_unread(&look()), "by anybody");
    }
}
