//! What a command has changed in trees that the workstation's mount remembers:
//! only this side can tell without asking for each file over the network.
//!
//! The names of a tree are noted before the command starts. Afterwards, names
//! that are gone are told, those that were there and have a newer change time,
//! and the directories whose listing is another. What is new was never seen by
//! the workstation, save in its directory's listing. Where a command changes only a
//! part of a tree, or only ever adds, the gateway says so, and no more is looked at:
//! a git repository has tens of thousands of names. Of a command's own directories those that nobody
//! has read since they last changed are not told of: nobody remembers their entries.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    ffi::{OsStr, OsString},
    fs,
    os::unix::{ffi::OsStrExt as _, fs::MetadataExt as _},
    path::{Path, PathBuf},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use posh_proto::executor::{ChangedDirectory, Stage, WatchedTree};

use super::{
    listing::{self, Listing},
    view::View,
};

/// Times of files are those of the kernel's last tick, which may lie a little before the clock.
const TICK: Duration = Duration::from_millis(20);
/// Entries that are looked at: a tree beyond this is not worth the time of every command in it.
const MAX_ENTRIES: usize = 500_000;
/// Directories that are reported; the workstation forgets each by a call of its own.
const MAX_REPORTED: usize = 4096;

/// The trees of one stage as they were, and the moment before which nothing in them was its work.
pub struct Watch {
    since: Duration,
    trees: Trees,
    before: Before,
}

/// What is looked at.
#[derive(Default)]
struct Trees {
    roots: Vec<PathBuf>,
    /// Directories, within the roots, that only get further entries, as do those in them.
    growing: HashSet<PathBuf>,
    /// Directories that belong to the command, on file systems that tell when a directory was read.
    own: Vec<PathBuf>,
}

/// Names that were there before the stage started.
#[derive(Default)]
struct Before {
    /// Directory → its entries.
    directories: HashMap<PathBuf, HashSet<OsString>>,
    /// Roots that are no directories.
    files: HashSet<PathBuf>,
    /// Directories that only get further entries: there may be thousands, and they need not be noted.
    growing: Vec<PathBuf>,
    /// Of the command's own directories, those that nobody had read since their last change. Who reads one later
    /// is most often the command itself: git looks which abbreviations are free.
    unread: HashSet<PathBuf>,
    incomplete: bool,
}

/// Directories with something new, and whether these are all.
#[derive(Debug, Default, PartialEq)]
pub struct Changes {
    pub directories: BTreeMap<PathBuf, Changed>,
    pub incomplete: bool,
}

/// What is new in one directory.
#[derive(Debug, Default, PartialEq)]
pub struct Changed {
    pub names: bool,
    pub written: Vec<OsString>,
    pub removed: Vec<OsString>,
}

impl Watch {
    /// To be made before the stage starts; costs nothing when it changes no trees.
    pub fn new(view: &View, stage: &Stage) -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let mut trees = Trees::default();
        stage.watched_trees.iter().for_each(|tree| trees.add(root_of(view, tree), tree));
        Self::since(now.saturating_sub(TICK), trees)
    }

    fn since(since: Duration, trees: Trees) -> Self {
        let before = Before::of(&trees);
        Self { since, trees, before }
    }

    /// Walks the trees once more.
    pub fn changes(&self) -> Changes {
        let mut changes = Changes { incomplete: self.before.incomplete, ..Changes::default() };
        let mut left = MAX_ENTRIES;
        for root in &self.trees.roots {
            self.look_at_root(root, &mut changes);
            self.walk(root.clone(), &mut changes, &mut left);
        }
        self.before.growing.iter().for_each(|directory| self.look_at_growing(directory, &mut changes));
        for (directory, names) in &self.before.directories {
            if fs::symlink_metadata(directory).is_ok_and(|found| found.is_dir()) {
                continue;
            }
            // Its parent, if that is still there, has told of the directory itself.
            changes.of(directory).removed = names.iter().cloned().collect();
        }
        if changes.directories.len() > MAX_REPORTED {
            changes = Changes { incomplete: true, ..Changes::default() };
        }
        changes
    }

    /// A root that came or went changed the directory above, which nobody walks.
    fn look_at_root(&self, root: &Path, changes: &mut Changes) {
        let (Some(parent), Some(name)) = (root.parent(), root.file_name()) else { return };
        let was_directory = self.before.directories.contains_key(root);
        let was_there = was_directory || self.before.files.contains(root);
        match fs::symlink_metadata(root) {
            Ok(_) if !was_there => changes.of(parent).names = true,
            Ok(found) if !was_directory && self.is_newer(&found) => changes.of(parent).written.push(name.to_owned()),
            Err(_) if was_there => {
                let parent = changes.of(parent);
                parent.names = true;
                parent.removed.push(name.to_owned());
            }
            _ => {}
        }
    }

    fn look_at_growing(&self, directory: &Path, changes: &mut Changes) {
        match fs::symlink_metadata(directory) {
            Ok(own) if self.is_to_be_told(directory, &own) => changes.of(directory).names = true,
            Ok(_) => {}
            Err(_) => {
                let (Some(parent), Some(name)) = (directory.parent(), directory.file_name()) else { return };
                changes.of(parent).removed.push(name.to_owned());
            }
        }
    }

    fn walk(&self, root: PathBuf, changes: &mut Changes, left: &mut usize) {
        let mut queue = vec![root];
        while let Some(directory) = queue.pop() {
            // What was not there before was never seen, and neither was what is in it.
            let Some(before) = self.before.directories.get(&directory) else { continue };
            let Ok(own) = fs::symlink_metadata(&directory) else { continue };
            let Some(listing) = Listing::read(&directory) else { continue };
            let mut changed = Changed { names: self.is_to_be_told(&directory, &own), ..Changed::default() };
            let mut now = HashSet::new();
            for entry in listing.entries() {
                let Some(fewer) = left.checked_sub(1) else {
                    changes.incomplete = true;
                    return;
                };
                *left = fewer;
                let name = entry.name();
                let Some(found) = listing.status(entry) else { continue };
                if listing::is_directory(&found) && found.st_dev == own.dev() {
                    // Those that only grow were not noted, and are looked at on their own.
                    queue.push(directory.join(&name));
                } else if before.contains(&name) && self.is_since((found.st_ctime, found.st_ctime_nsec)) {
                    changed.written.push(name.clone());
                }
                now.insert(name);
            }
            changed.removed = before.difference(&now).cloned().collect();
            if changed != Changed::default() {
                changes.directories.insert(directory, changed);
            }
        }
    }

    /// Whether a directory has changed, and somebody may remember how it was.
    fn is_to_be_told(&self, directory: &Path, found: &fs::Metadata) -> bool {
        self.is_newer(found) && !self.before.unread.contains(directory)
    }

    fn is_newer(&self, found: &fs::Metadata) -> bool {
        self.is_since((found.ctime(), found.ctime_nsec()))
    }

    fn is_since(&self, (seconds, nanoseconds): (i64, i64)) -> bool {
        let seconds = u64::try_from(seconds).unwrap_or(0);
        Duration::new(seconds, u32::try_from(nanoseconds).unwrap_or(0)) >= self.since
    }
}

impl Before {
    /// Names only: the kind of each entry comes with its directory.
    fn of(trees: &Trees) -> Self {
        let mut before = Self::default();
        let mut left = MAX_ENTRIES;
        let mut queue: Vec<PathBuf> = Vec::new();
        for root in &trees.roots {
            match fs::symlink_metadata(root) {
                Ok(found) if found.is_dir() => queue.push(root.clone()),
                Ok(_) => drop(before.files.insert(root.clone())),
                Err(_) => {}
            }
        }
        while let Some(directory) = queue.pop() {
            before.note_reader(trees, &directory);
            let Some(listing) = Listing::read(&directory) else { continue };
            let mut names = HashSet::new();
            for entry in listing.entries() {
                let Some(fewer) = left.checked_sub(1) else {
                    before.incomplete = true;
                    return before;
                };
                left = fewer;
                let name = entry.name();
                if entry.is_directory {
                    let path = directory.join(&name);
                    match trees.growing.contains(&path) {
                        true => before.note_growing(trees, path),
                        false => queue.push(path),
                    }
                }
                names.insert(name);
            }
            before.directories.insert(directory, names);
        }
        before
    }

    /// The directory, and those in it.
    fn note_growing(&mut self, trees: &Trees, directory: PathBuf) {
        self.note_reader(trees, &directory);
        let listing = Listing::read(&directory);
        let entries = listing.iter().flat_map(Listing::entries).filter(|entry| entry.is_directory);
        for below in entries.map(|entry| directory.join(entry.name())) {
            self.note_reader(trees, &below);
            self.growing.push(below);
        }
        self.growing.push(directory);
    }

    /// To be called before it is read here.
    fn note_reader(&mut self, trees: &Trees, directory: &Path) {
        if trees.own.iter().any(|own| directory.starts_with(own)) {
            let is_unread = fs::symlink_metadata(directory).is_ok_and(|found| listing::is_unread(&found));
            self.unread.extend(is_unread.then(|| directory.to_owned()));
        }
    }
}

impl Trees {
    /// The tree below `top` that a contract's tree is.
    fn add(&mut self, top: PathBuf, tree: &WatchedTree) {
        let own = tree.own.iter().map(|path| top.join(path));
        self.own.extend(own.filter(|path| listing::tells_readers(path)));
        self.growing.extend(tree.grows.iter().map(|path| top.join(path)));
        match tree.only.is_empty() {
            true => self.roots.push(top),
            false => self.roots.extend(tree.only.iter().map(|path| top.join(path))),
        }
    }
}

impl Changes {
    fn of(&mut self, directory: &Path) -> &mut Changed {
        self.directories.entry(directory.to_owned()).or_default()
    }

    /// As the contract has it.
    pub fn message(&self) -> Vec<ChangedDirectory> {
        let bytes = |names: &[OsString]| names.iter().map(|name| name.as_bytes().to_vec().into()).collect();
        let directory = |(path, changed): (&PathBuf, &Changed)| ChangedDirectory {
            path: path.as_os_str().as_bytes().to_vec().into(),
            names_changed: changed.names,
            written: bytes(&changed.written),
            removed: bytes(&changed.removed),
        };
        self.directories.iter().map(directory).collect()
    }
}

/// The tree itself, or the nearest directory above it, within its mount, that has one of the names.
fn root_of(view: &View, tree: &WatchedTree) -> PathBuf {
    let path = Path::new(OsStr::from_bytes(&tree.path));
    let top = view.mount_of(path);
    let inside = path.ancestors().take_while(|above| top.is_some_and(|top| above.starts_with(top)));
    let named = |above: &&Path| tree.up_to.iter().any(|name| above.join(name).symlink_metadata().is_ok());
    inside.into_iter().find(named).unwrap_or(path).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A moment after everything that is there: the clock of files moves in ticks,
    /// and what comes now must be told from what was.
    fn moment_after(directory: &Path) -> Duration {
        let probe = directory.join("probe");
        let time = |path: &Path| {
            let found = fs::symlink_metadata(path).expect("it is there");
            Duration::new(found.ctime().unsigned_abs(), u32::try_from(found.ctime_nsec()).unwrap_or(0))
        };
        fs::write(&probe, "x").expect("a file");
        let first = time(&probe);
        let since = loop {
            fs::write(&probe, "x").expect("a file");
            if time(&probe) > first {
                break time(&probe);
            }
        };
        fs::remove_file(&probe).expect("removed");
        since
    }

    fn whole(roots: &[PathBuf]) -> Trees {
        Trees { roots: roots.to_vec(), ..Trees::default() }
    }

    fn changed(names: bool, written: &[&str], removed: &[&str]) -> Changed {
        let names_of = |list: &[&str]| list.iter().map(OsString::from).collect();
        Changed { names, written: names_of(written), removed: names_of(removed) }
    }

    #[test]
    fn what_is_new_and_what_is_gone_is_reported() {
        let tree = tempfile::tempdir().expect("a directory");
        let clock = tempfile::tempdir().expect("a directory");
        let root = tree.path();
        for directory in ["quiet", "written", "grown/deep", "lost", "gone/below"] {
            fs::create_dir_all(root.join(directory)).expect("a directory");
        }
        for file in ["quiet/f", "written/f", "written/g", "lost/f", "gone/below/f"] {
            fs::write(root.join(file), "old").expect("a file");
        }
        let watch = Watch::since(moment_after(clock.path()), whole(&[root.to_owned()]));
        fs::write(root.join("written/f"), "new").expect("a file");
        fs::create_dir(root.join("grown/deep/new")).expect("a directory");
        fs::write(root.join("grown/deep/new/f"), "new").expect("a file");
        fs::remove_file(root.join("lost/f")).expect("removed");
        fs::remove_dir_all(root.join("gone")).expect("removed");
        let expect = [
            ("", changed(true, &[], &["gone"])),
            ("gone", changed(false, &[], &["below"])),
            ("gone/below", changed(false, &[], &["f"])),
            ("grown/deep", changed(true, &[], &[])),
            ("lost", changed(true, &[], &["f"])),
            ("written", changed(false, &["f"], &[])),
        ];
        let expect = expect.into_iter().map(|(path, changed)| (root.join(path).components().collect(), changed));
        assert_eq!(watch.changes().directories, expect.collect());
    }

    #[test]
    fn of_a_repository_only_what_git_changes_is_looked_at() {
        let tree = tempfile::tempdir().expect("a directory");
        let clock = tempfile::tempdir().expect("a directory");
        let root = tree.path();
        for directory in [".git/objects/aa", ".git/objects/bb", ".git/objects/gone", ".git/refs", "src"] {
            fs::create_dir_all(root.join(directory)).expect("a directory");
        }
        for file in [".git/index", ".git/objects/aa/1", ".git/refs/main", "src/f"] {
            fs::write(root.join(file), "old").expect("a file");
        }
        let contract =
            WatchedTree { only: vec![".git".into()], grows: vec![".git/objects".into()], ..Default::default() };
        let mut trees = Trees::default();
        trees.add(root.to_owned(), &contract);
        let watch = Watch::since(moment_after(clock.path()), trees);
        fs::write(root.join("src/f"), "new").expect("a file");
        fs::write(root.join(".git/refs/main"), "new").expect("a file");
        fs::write(root.join(".git/objects/aa/2"), "new").expect("a file");
        fs::create_dir(root.join(".git/objects/cc")).expect("a directory");
        fs::remove_dir(root.join(".git/objects/gone")).expect("removed");
        let expect = [
            (".git/objects", changed(true, &[], &["gone"])),
            (".git/objects/aa", changed(true, &[], &[])),
            (".git/refs", changed(false, &["main"], &[])),
        ];
        let expect = expect.into_iter().map(|(path, changed)| (root.join(path), changed));
        assert_eq!(watch.changes().directories, expect.collect());
    }

    #[test]
    fn a_root_that_comes_or_goes_is_told_of_its_parent() {
        let tree = tempfile::tempdir().expect("a directory");
        let clock = tempfile::tempdir().expect("a directory");
        let root = |name: &str| tree.path().join(name);
        fs::create_dir(root("goes")).expect("a directory");
        fs::write(root("file"), "old").expect("a file");
        let since = moment_after(clock.path());
        let watch = Watch::since(since, whole(&["comes", "goes", "file"].map(root)));
        fs::create_dir(root("comes")).expect("a directory");
        fs::remove_dir(root("goes")).expect("removed");
        fs::write(root("file"), "new").expect("a file");
        let changes = watch.changes();
        assert_eq!(changes.directories[tree.path()], changed(true, &["file"], &["goes"]));
        assert!(!changes.incomplete);
    }
}
