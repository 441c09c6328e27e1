//! The directories of watched trees before a command: kept until it ends, each by its parent and
//! its name. Whole paths would take up to 4 KB for each directory.

use std::{
    collections::HashMap,
    ffi::{OsStr, OsString},
    mem::size_of,
    path::{Path, PathBuf},
    rc::Rc,
};

use crate::runner::listing::{Entries, Time};

/// Memory that a name takes in a table, about: its slot, the head of its own memory, and spare
/// capacity.
pub const SLOT_BYTES: usize = 64;

/// Memory that a directory takes, without its names.
pub const BYTES: usize = size_of::<NotedDirectory>() + SLOT_BYTES;

/// Index of a directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct At(usize);

/// Directories with their entries.
#[derive(Default)]
pub struct Noted {
    directories: Vec<NotedDirectory>,
    roots: HashMap<PathBuf, At>,
    below: HashMap<(At, Rc<OsStr>), At>,
}

struct NotedDirectory {
    /// `None`: the name is its whole path.
    above: Option<At>,
    name: Rc<OsStr>,
    entries: Entries,
    is_unread: bool,
    read_at: Option<Time>,
}

impl Noted {
    pub fn add_root(&mut self, path: PathBuf, entries: Entries) -> At {
        let at = self.push(None, path.as_os_str().into(), entries);
        self.roots.insert(path, at);
        at
    }

    pub fn add(&mut self, above: At, name: &OsStr, entries: Entries) -> At {
        let name: Rc<OsStr> = name.into();
        let at = self.push(Some(above), Rc::clone(&name), entries);
        self.below.insert((above, name), at);
        at
    }

    fn push(&mut self, above: Option<At>, name: Rc<OsStr>, entries: Entries) -> At {
        self.directories.push(NotedDirectory {
            above,
            name,
            entries,
            is_unread: false,
            read_at: None,
        });
        At(self.directories.len() - 1)
    }

    /// Notes if nobody has read it since its last change, for the command's own directories; and
    /// the time of the last read, if files are replaced in it.
    pub fn note_readers(&mut self, at: At, is_unread: bool, read_at: Option<Time>) {
        let directory = &mut self.directories[at.0];
        (directory.is_unread, directory.read_at) = (is_unread, read_at);
    }

    pub fn all(&self) -> impl Iterator<Item = At> + use<> {
        (0..self.directories.len()).map(At)
    }

    pub fn root(&self, path: &Path) -> Option<At> {
        self.roots.get(path).copied()
    }

    /// The directory of that name in another.
    pub fn below(&self, above: At, name: &OsStr) -> Option<At> {
        self.below.get(&(above, name.into())).copied()
    }

    pub fn entries(&self, at: At) -> &Entries {
        &self.directories[at.0].entries
    }

    /// Returns true for the command's own directories that nobody had read since their last change.
    /// A later reader is most often the command itself: git looks which abbreviations are free.
    pub fn is_unread(&self, at: At) -> bool {
        self.directories[at.0].is_unread
    }

    /// Time of its last read, if files are replaced in it.
    pub fn read_at(&self, at: At) -> Option<Time> {
        self.directories[at.0].read_at
    }

    pub fn path(&self, at: At) -> PathBuf {
        let upwards = std::iter::successors(Some(at), |at| self.directories[at.0].above);
        let names: Vec<_> = upwards.map(|at| Path::new(&self.directories[at.0].name)).collect();
        names.into_iter().rev().collect()
    }
}

/// A directory that only gets further entries.
pub struct Growing {
    pub top: PathBuf,
    /// Like [`Noted::is_unread`].
    pub is_unread: bool,
    /// Its subdirectories, each with its own `is_unread`.
    pub below: HashMap<OsString, bool>,
}

impl Growing {
    /// Those of it and its subdirectories that nobody had read.
    pub fn unread(&self) -> impl Iterator<Item = PathBuf> {
        let below = self
            .below
            .iter()
            .filter(|(_, is_unread)| **is_unread)
            .map(|(name, _)| self.top.join(name));
        self.is_unread.then(|| self.top.clone()).into_iter().chain(below)
    }
}
