//! Large trees that a command has removed. Asking the mount to forget each name in them would take
//! longer than removing them did, and nobody can see what it remembers below a directory that is gone: so only
//! the top is forgotten at once, and what was below it when a tree is made there again.

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::{OsStr, OsString},
    fs,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use fs_mapper::{
    MountTable, Resolution,
    coherence::{Change, Coherence, Left},
};
use posh_proto::executor::ChangedDirectory;

use super::refresh::real_place;

/// Removed trees with more names than this are large.
const FEW_NAMES: usize = 64;
/// No mount remembers for longer, see the adapter for sshfs.
const MEMORY: Duration = Duration::from_secs(25);
/// Trees that are kept in mind: those that go beyond are the oldest, and may show old attributes to whoever
/// makes them again this soon.
const MOST: usize = 1024;
/// Calls on the mount at once.
const AT_ONCE: usize = 64;

/// The large trees that were removed lately.
#[derive(Debug, Default)]
pub struct Remnants(Mutex<Vec<Arc<Tree>>>);

/// One of them.
#[derive(Debug)]
pub struct Tree {
    since: Instant,
    top: PathBuf,
    /// Its directories, with the names that were in each.
    former: BTreeMap<PathBuf, Vec<OsString>>,
}

impl Remnants {
    /// Keeps trees in mind.
    pub fn add(&self, trees: Vec<Tree>) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|old| old.is_remembered() && !trees.iter().any(|new| new.top == old.top));
        all.extend(trees.into_iter().map(Arc::new));
        let beyond = all.len().saturating_sub(MOST);
        all.drain(..beyond);
    }

    /// Those that may be there again after such changes.
    pub fn touched(&self, changes: &BTreeSet<Change>) -> Vec<Arc<Tree>> {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // A listing that changed tells of what was made in it, and of nothing in that.
        let is_near = |tree: &&Arc<Tree>| {
            changes.iter().any(|change| tree.top.starts_with(change.path()) || change.path().starts_with(&tree.top))
        };
        all.iter().filter(|tree| tree.is_remembered()).filter(is_near).cloned().collect()
    }

    /// Makes the mount forget what it remembers of a tree that may be there again. Gives the directories that
    /// are gone and that it still shows.
    pub async fn forget(&self, table: &Arc<MountTable>, tree: &Arc<Tree>) -> Vec<PathBuf> {
        let (table, at_work) = (Arc::clone(table), Arc::clone(tree));
        let work = tokio::task::spawn_blocking(move || match table.resolve(&at_work.top, Path::new("/")) {
            Resolution::Owned(owned) if real_place(&table, &Change::Removed(at_work.top.clone())).is_some() => {
                at_work.forget(table.mount(owned.mount).coherence())
            }
            _ => (true, Vec::new()),
        });
        let (is_whole, left) = work.await.unwrap_or_default();
        if is_whole {
            self.0.lock().unwrap_or_else(PoisonError::into_inner).retain(|other| !Arc::ptr_eq(other, tree));
        }
        left
    }
}

impl Tree {
    fn is_remembered(&self) -> bool {
        self.since.elapsed() < MEMORY
    }

    /// Lists its directories anew, level by level, and then asks for what was there and is not. Gives whether all
    /// its directories were seen, and those of the others that the mount shows.
    fn forget(&self, coherence: &dyn Coherence) -> (bool, Vec<PathBuf>) {
        let mut listed: BTreeMap<PathBuf, BTreeSet<OsString>> = BTreeMap::new();
        let mut level = vec![self.top.clone()];
        while !level.is_empty() {
            let found = at_once(&level, |directory| list_anew(coherence, directory));
            level = found.iter().flatten().flat_map(|listing| listing.directories.iter().cloned()).collect();
            listed.extend(found.into_iter().flatten().map(|listing| (listing.path, listing.names)));
        }
        let gone = self.former.iter().filter_map(|(directory, names)| Some((directory, names, listed.get(directory)?)));
        let gone: Vec<PathBuf> = gone
            .flat_map(|(directory, names, now)| {
                names.iter().filter(|name| !now.contains(*name)).map(|name| directory.join(name))
            })
            .collect();
        let left = at_once(&gone, |path| matches!(coherence.forget_removed(path), Ok(Left::Directory)));
        let left = gone.into_iter().zip(left).filter(|(_, is_left)| *is_left).map(|(path, _)| path);
        (self.former.keys().all(|directory| listed.contains_key(directory)), left.collect())
    }
}

/// The large trees that are gone, by what an executor saw: directories that were removed are told of with their
/// former names.
pub fn large_trees(directories: &[&ChangedDirectory]) -> Vec<Tree> {
    let path = |bytes: &[u8]| PathBuf::from(OsStr::from_bytes(bytes));
    let names = |d: &ChangedDirectory| d.removed.iter().map(|name| OsStr::from_bytes(name).to_owned()).collect();
    let all = directories.iter().map(|d| (path(&d.path), names(d)));
    let all: Vec<(PathBuf, Vec<OsString>)> = all.collect();
    let removed: BTreeSet<PathBuf> =
        all.iter().flat_map(|(directory, names)| names.iter().map(|name| directory.join(name))).collect();
    let mut trees: BTreeMap<PathBuf, BTreeMap<PathBuf, Vec<OsString>>> = BTreeMap::new();
    for (directory, names) in all {
        if let Some(top) = directory.ancestors().filter(|above| removed.contains(*above)).last() {
            trees.entry(top.to_owned()).or_default().insert(directory, names);
        }
    }
    let large = trees.into_iter().filter(|(_, former)| former.values().map(Vec::len).sum::<usize>() > FEW_NAMES);
    large.map(|(top, former)| Tree { since: Instant::now(), top, former }).collect()
}

/// Whether a directory lies in one of these.
pub fn is_in(trees: &[Tree], directory: &[u8]) -> bool {
    trees.iter().any(|tree| tree.former.contains_key(Path::new(OsStr::from_bytes(directory))))
}

struct Listing {
    path: PathBuf,
    names: BTreeSet<OsString>,
    directories: Vec<PathBuf>,
}

/// `None`: it is not there.
fn list_anew(coherence: &dyn Coherence, directory: &Path) -> Option<Listing> {
    fs::symlink_metadata(directory).ok().filter(fs::Metadata::is_dir)?;
    if let Err(error) = coherence.refresh(&Change::EntriesChanged(directory.to_owned())) {
        tracing::debug!(path = %directory.display(), %error, "nothing to refresh");
    }
    let entries: Vec<fs::DirEntry> = fs::read_dir(directory).ok()?.flatten().collect();
    let is_directory = |entry: &&fs::DirEntry| entry.file_type().is_ok_and(|kind| kind.is_dir());
    let directories = entries.iter().filter(is_directory).map(fs::DirEntry::path).collect();
    let names = entries.iter().map(fs::DirEntry::file_name).collect();
    Some(Listing { path: directory.to_owned(), names, directories })
}

/// Calls on a mount for each path, as many at a time as are worth a thread.
fn at_once<T: Send>(paths: &[PathBuf], call: impl Fn(&Path) -> T + Sync) -> Vec<T> {
    let call = &call;
    let mut all = Vec::new();
    for paths in paths.chunks(AT_ONCE) {
        std::thread::scope(|scope| {
            let threads: Vec<_> = paths.iter().map(|path| scope.spawn(move || call(path))).collect();
            all.extend(threads.into_iter().filter_map(|thread| thread.join().ok()));
        });
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gone(path: &str, names: usize) -> ChangedDirectory {
        let removed = (0..names).map(|number| number.to_string().into()).collect();
        ChangedDirectory { path: path.to_owned().into(), removed, ..Default::default() }
    }

    #[test]
    fn trees_with_many_names_are_large() {
        let mut top = gone("/m", 0);
        top.removed = vec!["tree".into(), "small".into(), "file".into()];
        let mut tree = gone("/m/tree", 0);
        tree.removed = vec!["sub".into()];
        let all = [top, tree, gone("/m/tree/sub", FEW_NAMES), gone("/m/small", FEW_NAMES), gone("/m/kept", 1000)];
        let all: Vec<&ChangedDirectory> = all.iter().collect();
        let large = large_trees(&all);
        assert_eq!(large.iter().map(|tree| tree.top.as_path()).collect::<Vec<_>>(), [Path::new("/m/tree")]);
        assert!(is_in(&large, b"/m/tree/sub") && !is_in(&large, b"/m/small"));
    }

    #[test]
    fn a_tree_that_may_be_there_again_is_touched() {
        let check = |change: Change, expect: usize| {
            let remnants = Remnants::default();
            remnants.add(vec![Tree { since: Instant::now(), top: "/m/d/tree".into(), former: BTreeMap::new() }]);
            assert_eq!(remnants.touched(&BTreeSet::from([change.clone()])).len(), expect, "{change:?}");
        };
        check(Change::ListingChanged("/m/d".into()), 1);
        check(Change::ListingChanged("/m".into()), 1);
        check(Change::FileWritten("/m/d/tree/f".into()), 1);
        check(Change::FileWritten("/m/d/other".into()), 0);
    }
}
