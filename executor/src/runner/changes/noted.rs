//! The directories of watched trees as they were before a command: kept until it ends, each by the
//! one above it and its name. Whole paths would take up to 4 KB each, of which a tree has as many
//! as it has directories.

use std::{
    collections::HashMap,
    ffi::{OsStr, OsString},
    mem::size_of,
    path::{Path, PathBuf},
    rc::Rc,
};

use crate::runner::listing::{Entries, Time};

/// What a name takes in a table, about: its slot there, the head of its own memory, and what grows
/// ahead of need.
pub const SLOT_BYTES: usize = 64;

/// What a directory takes, besides its names.
pub const BYTES: usize = size_of::<Directory>() + SLOT_BYTES;

/// One of the directories.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct At(usize);

/// Directories with their entries.
#[derive(Default)]
pub struct Noted {
    directories: Vec<Directory>,
    roots: HashMap<PathBuf, At>,
    below: HashMap<(At, Rc<OsStr>), At>,
}

struct Directory {
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
        self.directories.push(Directory { above, name, entries, is_unread: false, read_at: None });
        At(self.directories.len() - 1)
    }

    /// Who has read it: nobody since its last change, of the command's own ones; and when, where
    /// files are replaced.
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

    /// One of the command's own directories that nobody had read since its last change. Who reads
    /// it later is most often the command itself: git looks which abbreviations are free.
    pub fn is_unread(&self, at: At) -> bool {
        self.directories[at.0].is_unread
    }

    /// When it was last read, if files are replaced in it.
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
    /// As [`Noted::is_unread`].
    pub is_unread: bool,
    /// The directories in it, with the same of each.
    pub below: HashMap<OsString, bool>,
}

impl Growing {
    /// Of it and of those in it, what nobody had read.
    pub fn unread(&self) -> impl Iterator<Item = PathBuf> {
        let below = self
            .below
            .iter()
            .filter(|(_, is_unread)| **is_unread)
            .map(|(name, _)| self.top.join(name));
        self.is_unread.then(|| self.top.clone()).into_iter().chain(below)
    }
}
