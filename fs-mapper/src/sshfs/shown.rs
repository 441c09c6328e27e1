//! The directory that a mount shows at its root, to be compared with what an executor says of the
//! same directory. sshfs may answer from its cache, which is as old as
//! [`SSHFS_MEMORY`](crate::coherence::SSHFS_MEMORY) at most; it does not cache the file system's
//! sizes.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt;
use std::fs::Metadata;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use rustix::fs::{FileType, statvfs};

use crate::beneath::MountRoot;

/// Names of a listing that are taken.
const MOST_NAMES: usize = 16_384;
/// sshfs invents the file system's sizes if its server does not tell them (`sshfs_statfs`): so many
/// files, all free, and a terabyte.
const INVENTED_FILES: u64 = 1_000_000_000;

/// Attributes of a file that are compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileLook {
    /// S_IFMT of st_mode.
    pub kind: u32,
    /// In bytes.
    pub size: u64,
    /// As SFTP has it: seconds since 1970, in 32 bits.
    pub modified_s: u32,
}

impl fmt::Display for FileLook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, size, modified_s } = self;
        write!(f, "type {kind:o}, {size} bytes and mtime {modified_s}")
    }
}

/// Sizes of a file system (statvfs(3)).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileSystemLook {
    /// In all.
    pub bytes: u64,
    /// Not used.
    pub free_bytes: u64,
    /// Inodes in all.
    pub files: u64,
    /// Inodes that are not used.
    pub free_files: u64,
    /// Bytes of a name.
    pub longest_name: u64,
}

/// The root of a mount.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DirectoryLook {
    /// `None` if sshfs has invented them.
    pub file_system: Option<FileSystemLook>,
    /// The directory itself.
    pub itself: FileLook,
    /// The first entries by the bytes of their names; a look is missing for one that has gone, or
    /// that another mount covers. `None` if it can't be listed.
    pub entries: Option<BTreeMap<OsString, Option<FileLook>>>,
    /// There are more entries.
    pub has_more: bool,
}

impl FileLook {
    /// Of what lstat(2) says.
    pub fn of(found: &Metadata) -> Self {
        Self {
            kind: FileType::from_raw_mode(found.mode()).as_raw_mode(),
            size: found.len(),
            modified_s: seconds(found.mtime()),
        }
    }
}

/// Seconds as SFTP passes them on.
pub fn seconds(since_1970: i64) -> u32 {
    since_1970.cast_unsigned() as u32
}

impl DirectoryLook {
    /// Looks at a mount's root, whose path this is, and at up to `most` entries if `lists`. Blocks.
    ///
    /// # Errors
    /// Of the mount.
    pub fn through(root: &MountRoot, path: &Path, most: usize, lists: bool) -> io::Result<Self> {
        let mut names = Vec::new();
        let listed = match lists.then(|| root.list(path)) {
            Some(Ok(list)) => {
                // sshfs reads a listing whole; its server may say what it wants.
                let listed = list.take(MOST_NAMES).collect::<io::Result<Vec<_>>>();
                listed.map(|all| names = all).is_ok()
            }
            _ => false,
        };
        names.sort_unstable();
        let has_more = names.len() > most;
        names.truncate(most);
        let look = |name: OsString| {
            let found = root.fresh_metadata(&path.join(&name));
            (name, found.ok().map(|found| FileLook::of(&found)))
        };
        let entries = listed.then(|| names.into_iter().map(look).collect());
        let itself = FileLook::of(&root.fresh_metadata(path)?);
        Ok(Self { file_system: FileSystemLook::of(path)?, itself, entries, has_more })
    }
}

impl FileSystemLook {
    /// Asked of the server each time; `None` if sshfs invents it.
    fn of(path: &Path) -> io::Result<Option<Self>> {
        let sizes = statvfs(path)?;
        let is_invented = sizes.f_files == INVENTED_FILES && sizes.f_ffree == INVENTED_FILES;
        Ok((!is_invented).then(|| Self {
            bytes: sizes.f_blocks.saturating_mul(sizes.f_frsize),
            free_bytes: sizes.f_bfree.saturating_mul(sizes.f_frsize),
            files: sizes.f_files,
            free_files: sizes.f_ffree,
            longest_name: sizes.f_namemax,
        }))
    }
}
