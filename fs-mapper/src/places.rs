//! Mount points as a sorted list of paths: exact match, longest prefix, and everything below a
//! directory. Pure; used by the whole table and by the stage program's short list.
//!
//! Paths are bytes with a trailing slash (`/mnt/logs/`). So "below" is a prefix match, and all
//! places below a directory are neighbours in the list: one binary search answers each query.

use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Access that a lookup may make below a mount point.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Terrain {
    /// A local disk: look up names.
    Local,
    /// An executor's: no access, the executor resolves the rest.
    Owned,
    /// A network or FUSE mount without owner, an automounter, /proc: no access.
    Closed,
}

/// A mount point.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct MountPlace {
    /// With a slash at the end.
    pub(crate) dir: Vec<u8>,
    pub(crate) terrain: Terrain,
    /// Index in the caller's list.
    pub(crate) index: usize,
}

/// Knowledge about a directory.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum PlaceLookup<'p> {
    /// A mount point.
    Here(&'p MountPlace),
    /// A mount point lies below it, so it is a real directory and no symlink.
    Above,
    /// Nothing.
    Unknown,
}

/// Mount points, at most one per directory.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Places {
    sorted: Vec<MountPlace>,
}

impl Places {
    /// Sorts the places; of several in one directory the first is kept.
    pub(crate) fn new(mut places: Vec<MountPlace>) -> Self {
        places.sort_by(|a, b| a.dir.cmp(&b.dir));
        places.dedup_by(|later, first| later.dir == first.dir);
        Places { sorted: places }
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &MountPlace> {
        self.sorted.iter()
    }

    /// Looks up a directory, given with a trailing slash.
    pub(crate) fn at(&self, dir: &[u8]) -> PlaceLookup<'_> {
        let next = self.sorted.partition_point(|place| place.dir.as_slice() < dir);
        match self.sorted.get(next) {
            Some(place) if place.dir == dir => PlaceLookup::Here(place),
            Some(place) if place.dir.starts_with(dir) => PlaceLookup::Above,
            _ => PlaceLookup::Unknown,
        }
    }

    /// Finds the place with the longest path that is a prefix of `dir`.
    pub(crate) fn around(&self, dir: &[u8]) -> Option<&MountPlace> {
        let mut prefix = dir;
        loop {
            if let PlaceLookup::Here(place) = self.at(prefix) {
                return Some(place);
            }
            prefix = parent(prefix)?;
        }
    }

    /// The places strictly below `dir`.
    pub(crate) fn below(&self, dir: &[u8]) -> &[MountPlace] {
        let start = self.sorted.partition_point(|place| place.dir.as_slice() <= dir);
        let count = self.sorted[start..].partition_point(|place| place.dir.starts_with(dir));
        &self.sorted[start..start + count]
    }
}

/// Parent directory, both with a trailing slash; `None` for the root.
pub(crate) fn parent(dir: &[u8]) -> Option<&[u8]> {
    let name_end = dir.len().checked_sub(1)?;
    let slash = dir[..name_end].iter().rposition(|byte| *byte == b'/')?;
    Some(&dir[..=slash])
}

/// Bytes of an absolute path with one trailing slash.
pub(crate) fn dir_of(path: &Path) -> Vec<u8> {
    let mut dir = path.as_os_str().as_bytes().to_vec();
    if dir.last() != Some(&b'/') {
        dir.push(b'/');
    }
    dir
}

/// Inverse of [`dir_of`].
pub(crate) fn path_of(dir: &[u8]) -> PathBuf {
    let end = if dir.len() > 1 && dir.ends_with(b"/") { dir.len() - 1 } else { dir.len() };
    PathBuf::from(std::ffi::OsStr::from_bytes(&dir[..end]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn places(dirs: &[&str]) -> Places {
        let place = |(index, dir): (usize, &&str)| MountPlace {
            dir: dir.as_bytes().to_vec(),
            terrain: Terrain::Local,
            index,
        };
        Places::new(dirs.iter().enumerate().map(place).collect())
    }

    #[test]
    fn names_that_share_a_prefix_are_not_below_each_other() {
        let places =
            places(&["/mnt/logs/", "/mnt/logs-old/", "/mnt/logs/a/", "/mnt/logs.d/x/", "/"]);
        let around = |dir: &str| places.around(dir.as_bytes()).map(|place| place.index);
        assert_eq!(around("/mnt/logs/"), Some(0));
        assert_eq!(around("/mnt/logs/b/"), Some(0));
        assert_eq!(around("/mnt/logs/a/b/"), Some(2));
        assert_eq!(around("/mnt/logs-old/b/"), Some(1));
        assert_eq!(around("/mnt/logs-ol/"), Some(4));
        assert_eq!(places.at(b"/mnt/logs.d/"), PlaceLookup::Above);
        assert_eq!(places.at(b"/mnt/log/"), PlaceLookup::Unknown);
        let below: Vec<usize> =
            places.below(b"/mnt/logs/").iter().map(|place| place.index).collect();
        assert_eq!(below, [2]);
        assert_eq!(places.below(b"/").len(), 4);
    }

    #[test]
    fn without_a_root_nothing_is_around() {
        assert_eq!(places(&["/mnt/"]).around(b"/home/u/"), None);
    }

    #[test]
    fn parents() {
        let check = |dir: &str, expect: Option<&str>| {
            assert_eq!(parent(dir.as_bytes()), expect.map(str::as_bytes))
        };
        check("/a/b/", Some("/a/"));
        check("/a/", Some("/"));
        check("/", None);
    }
}
