//! The parts of a stage's watched trees that are examined, and how: resolves the contract's trees
//! to directories of the server.

use std::{
    collections::HashSet,
    ffi::OsStr,
    os::{fd::OwnedFd, unix::ffi::OsStrExt as _},
    path::{Path, PathBuf},
};

use posh_proto::executor::WatchedTree;

use crate::runner::{budget::Budget, listing, paths::landing, view::View};

/// Trees to examine.
#[derive(Default)]
pub struct Trees {
    pub roots: Vec<PathBuf>,
    /// Directories, within the roots, that only get further entries, as do their subdirectories.
    pub growing: HashSet<PathBuf>,
    /// Directories that belong to the command, on file systems that note reads of a directory.
    pub own: Vec<PathBuf>,
    /// Directories that are made, if they do not exist.
    pub made: Vec<PathBuf>,
    /// Roots that nobody can have read within a tick of the clock after they were made.
    pub far: HashSet<PathBuf>,
    /// Trees in which no file is changed in place.
    pub replaced: Vec<Replaced>,
    /// The command makes files whose permissions the workstation would lessen by the umask.
    pub takes_umask: bool,
}

/// A tree in which a file that changes is a new one, so that its directory changes too.
pub struct Replaced {
    pub top: PathBuf,
    /// Subtrees to which that does not apply.
    pub except: Vec<PathBuf>,
    /// Its file system notes reads of a directory.
    pub tells_readers: bool,
}

impl Trees {
    /// Adds a tree of the contract, with the root `top`.
    pub fn add(&mut self, top: PathBuf, tree: &WatchedTree) {
        if tree.made {
            return self.made.push(top);
        }
        if tree.far && listing::tells_readers(&top) {
            self.far.insert(top.clone());
        }
        let own = tree.own.iter().map(|path| top.join(path));
        self.own.extend(own.filter(|path| listing::tells_readers(path)));
        self.growing.extend(tree.grows.iter().map(|path| top.join(path)));
        if tree.replaces {
            let except = tree.own.iter().map(|path| top.join(path)).collect();
            let tells_readers = listing::tells_readers(&top);
            self.replaced.push(Replaced { top: top.clone(), except, tells_readers });
        }
        match tree.only.is_empty() {
            true => self.roots.push(top),
            false => self.roots.extend(tree.only.iter().map(|path| top.join(path))),
        }
    }

    /// Drops paths that lie in no mount, by name or by a link on the way: nobody caches them, and
    /// without a view they are the server's own.
    pub fn keep_inside(&mut self, view: &View, cwd: &OwnedFd, budget: &Budget) {
        let is_inside = |path: &PathBuf| {
            budget.spend(1 + path.components().count() / 8)
                && landing(cwd, path, false).is_ok_and(|(at, _)| view.mount_of(&at).is_some())
        };
        self.roots.retain(is_inside);
        self.made.retain(is_inside);
    }

    pub fn is_own(&self, directory: &Path) -> bool {
        self.own.iter().any(|own| directory.starts_with(own))
    }

    /// Returns true if each changed file in this directory is a new one.
    pub fn replaces(&self, directory: &Path) -> bool {
        self.replaced_in(directory).is_some()
    }

    pub fn replaced_in(&self, directory: &Path) -> Option<&Replaced> {
        let holds =
            |tree: &Replaced| !tree.except.iter().any(|except| directory.starts_with(except));
        self.replaced.iter().find(|tree| directory.starts_with(&tree.top) && holds(tree))
    }
}

/// The tree itself, or the nearest directory above it, within its mount, that has one of the names.
/// `None`: the budget is spent.
pub fn root_of(view: &View, tree: &WatchedTree, budget: &Budget) -> Option<PathBuf> {
    let path = Path::new(OsStr::from_bytes(&tree.path));
    let top = view.mount_of(path);
    let inside = path.ancestors().take_while(|above| top.is_some_and(|top| above.starts_with(top)));
    let is_there = |path: PathBuf| budget.spend(1) && path.symlink_metadata().is_ok();
    let named = |above: &&Path| tree.up_to.iter().any(|name| is_there(above.join(name)));
    let root = inside.into_iter().find(named).unwrap_or(path).to_owned();
    (budget.over().is_none()).then_some(root)
}
