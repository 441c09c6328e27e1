//! Which parts of a stage's watched trees are looked at, and how: the contract's trees as
//! directories here.

use std::{
    collections::HashSet,
    ffi::OsStr,
    os::{fd::OwnedFd, unix::ffi::OsStrExt as _},
    path::{Path, PathBuf},
};

use posh_proto::executor::WatchedTree;

use crate::runner::{budget::Budget, listing, paths::landing, view::View};

/// What is looked at.
#[derive(Default)]
pub struct Trees {
    pub roots: Vec<PathBuf>,
    /// Directories, within the roots, that only get further entries, as do those in them.
    pub growing: HashSet<PathBuf>,
    /// Directories that belong to the command, on file systems that tell when a directory was read.
    pub own: Vec<PathBuf>,
    /// Directories that are made, if they are not there.
    pub made: Vec<PathBuf>,
    /// Roots that nobody can have read within a tick of the clock after they were made.
    pub far: HashSet<PathBuf>,
    /// Where no file is changed in its place.
    pub replaced: Vec<Replaced>,
}

/// A tree in which a file that changes is a new one, so that its directory changes too.
pub struct Replaced {
    pub top: PathBuf,
    /// Trees in it of which that does not hold.
    pub except: Vec<PathBuf>,
    /// Its file system tells when a directory was read.
    pub tells_readers: bool,
}

impl Trees {
    /// The tree below `top` that a contract's tree is.
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

    /// Forgets what lies in no mount, by its name or by a link on the way: nobody remembers it, and
    /// without a view it is the server's own.
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

    /// Whether each file that changes in this directory is a new one.
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
/// `None`: it took too long to find.
pub fn root_of(view: &View, tree: &WatchedTree, budget: &Budget) -> Option<PathBuf> {
    let path = Path::new(OsStr::from_bytes(&tree.path));
    let top = view.mount_of(path);
    let inside = path.ancestors().take_while(|above| top.is_some_and(|top| above.starts_with(top)));
    let is_there = |path: PathBuf| budget.spend(1) && path.symlink_metadata().is_ok();
    let named = |above: &&Path| tree.up_to.iter().any(|name| is_there(above.join(name)));
    let root = inside.into_iter().find(named).unwrap_or(path).to_owned();
    (budget.over().is_none()).then_some(root)
}
