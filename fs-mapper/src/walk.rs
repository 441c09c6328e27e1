//! Path lookup as in the kernel (path_resolution(7)), but on local disks only: readlink(2) above
//! mount points, text below them.
//!
//! A directory that contains a mount point, or that getcwd(3) returned, is known to be real. Every
//! other name on a local disk costs one readlink, which also shows if it exists.

use crate::places::{MountPlace, PlaceLookup, Places, Terrain, dir_of, parent, path_of};
use std::ffi::OsStr;
use std::io::ErrorKind;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Linux's limit per lookup (MAXSYMLINKS).
const MAX_LINKS: u8 = 40;

/// Treatment of a symlink as last component of a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LastLink {
    /// As open(2) does.
    Follow,
    /// As lstat(2), unlink(2) and rename(2) do.
    Keep,
}

/// How a lookup ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LookupEnd {
    /// It exists, as far as can be told without touching a mount.
    Open,
    /// A component does not exist, is not a directory, or can't be searched.
    Missing,
    /// More than [`MAX_LINKS`].
    TooManyLinks,
}

/// State of a lookup.
#[derive(Debug, Clone)]
pub(crate) struct Position {
    /// Real path as far as known, with a trailing slash. On a local disk, the last component may be
    /// a file.
    dir: Vec<u8>,
    /// Rest of the path below a mount point, as text: no slash at either end.
    tail: Vec<u8>,
    pub(crate) terrain: Terrain,
    /// Index of the place around `dir`.
    pub(crate) index: Option<usize>,
    pub(crate) end: LookupEnd,
    /// The lookup followed a symlink on a local disk.
    pub(crate) through_symlink: bool,
    /// The tail contains a `..`.
    pub(crate) uncertain: bool,
    /// `dir` is known to be a directory.
    is_dir: bool,
    links: u8,
}

impl Position {
    /// Starts at a directory as from getcwd(3).
    pub(crate) fn at(places: &Places, dir: &Path) -> Position {
        let mut position = Position {
            dir: dir_of(dir),
            tail: Vec::new(),
            terrain: Terrain::Local,
            index: None,
            end: LookupEnd::Open,
            through_symlink: false,
            uncertain: false,
            is_dir: true,
            links: 0,
        };
        position.enter(places.around(&position.dir));
        position
    }

    /// Whole path.
    pub(crate) fn path(&self) -> PathBuf {
        let mut path = path_of(&self.dir);
        if !self.tail.is_empty() {
            path.push(OsStr::from_bytes(&self.tail));
        }
        path
    }

    /// Continues the lookup with a path: from the root if it is absolute.
    pub(crate) fn walk(&mut self, places: &Places, path: &[u8], last: LastLink) {
        if path.starts_with(b"/") {
            self.dir.clear();
            self.dir.push(b'/');
            self.tail.clear();
            self.uncertain = false;
            self.is_dir = true;
            self.enter(places.around(b"/"));
        }
        let mut rest = path;
        while let Some(start) = rest.iter().position(|byte| *byte != b'/') {
            let end = rest[start..]
                .iter()
                .position(|byte| *byte == b'/')
                .map_or(rest.len(), |slash| start + slash);
            let follow = end < rest.len() || last == LastLink::Follow;
            match &rest[start..end] {
                b"." => {}
                b".." => self.up(places),
                name => self.down(places, name, follow),
            }
            rest = &rest[end..];
        }
    }

    fn enter(&mut self, place: Option<&MountPlace>) {
        self.terrain = place.map_or(Terrain::Local, |place| place.terrain);
        self.index = place.map(|place| place.index);
    }

    fn up(&mut self, places: &Places) {
        if !self.tail.is_empty() {
            self.tail.extend_from_slice(b"/..");
            self.uncertain = true;
            return;
        }
        if self.end != LookupEnd::Open {
            return;
        }
        if !self.is_dir
            && !std::fs::metadata(OsStr::from_bytes(&self.dir)).is_ok_and(|found| found.is_dir())
        {
            self.end = LookupEnd::Missing;
            return;
        }
        self.is_dir = true;
        if let Some(parent) = parent(&self.dir) {
            self.dir.truncate(parent.len());
            self.enter(places.around(&self.dir));
        }
    }

    fn down(&mut self, places: &Places, name: &[u8], follow: bool) {
        if !self.tail.is_empty() {
            self.tail.push(b'/');
            self.tail.extend_from_slice(name);
            return;
        }
        let above = self.dir.len();
        self.dir.extend_from_slice(name);
        self.dir.push(b'/');
        if self.end != LookupEnd::Open {
            return;
        }
        match places.at(&self.dir) {
            PlaceLookup::Here(place) => {
                self.is_dir = true;
                self.enter(Some(place));
            }
            PlaceLookup::Above => self.is_dir = true,
            PlaceLookup::Unknown if self.terrain == Terrain::Local => {
                self.is_dir = false;
                if follow {
                    self.follow(places, above);
                }
            }
            PlaceLookup::Unknown => {
                self.dir.truncate(above);
                self.tail.extend_from_slice(name);
            }
        }
    }

    /// Follows the last component of `dir` if it is a symlink; `above` is the length of its parent
    /// directory.
    fn follow(&mut self, places: &Places, above: usize) {
        let name_end = self.dir.len() - 1;
        match std::fs::read_link(OsStr::from_bytes(&self.dir[..name_end])) {
            Ok(_) if self.links == MAX_LINKS => self.end = LookupEnd::TooManyLinks,
            Ok(target) => {
                self.links += 1;
                self.through_symlink = true;
                self.is_dir = true;
                self.dir.truncate(above);
                self.walk(places, target.as_os_str().as_bytes(), LastLink::Follow);
            }
            // EINVAL: it exists and is not a symlink.
            Err(error) if error.kind() == ErrorKind::InvalidInput => {}
            Err(_) => self.end = LookupEnd::Missing,
        }
    }
}
