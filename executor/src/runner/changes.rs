//! Changes that a command makes in trees that the workstation's mount caches: only this side can
//! tell without a lookup of each file over the network.
//!
//! The names of a tree are noted before the command starts. Afterwards removed names are reported,
//! old names with a newer change time, and directories whose listing has changed. The workstation
//! has never seen new files, except in their directory's listing. If a command changes only a part
//! of a tree, or only ever adds, the gateway says so, and only that is looked at: a git repository
//! has tens of thousands of names. The command's own directories are not reported if nobody has
//! read them since they last changed: nobody caches their entries.

mod noted;
mod told;
mod trees;

use std::{
    collections::{HashMap, HashSet},
    ffi::OsString,
    fs::File,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::ffi::OsStrExt as _,
    },
    path::{Path, PathBuf},
    rc::Rc,
    time::Duration,
};

use nix::{
    fcntl::{AT_FDCWD, AtFlags, readlink},
    sys::stat::{FileStat, SFlag, fstat, fstatat, lstat, stat},
    time::{ClockId, clock_gettime},
};
use posh_proto::{
    codec::MOST_CHANGED_DIRECTORIES,
    executor::{Attributes, FileNow, Stage, WatchedTree},
};

use self::{
    noted::{At, Growing, Noted, SLOT_BYTES},
    told::{Changed, DirectoryChanges},
    trees::{Trees, root_of},
};
use super::{
    budget::Budget,
    listing::{self, KnownDirectory, Listing, Time},
    view::{View, path_of},
};

/// Directories that are reported; the workstation invalidates each by a call of its own.
const MAX_REPORTED: usize = MOST_CHANGED_DIRECTORIES;

/// The trees of one stage before its start, and the time before which no change in them is its
/// work.
pub struct WatchedTrees {
    since: Duration,
    trees: Trees,
    before: Before,
    /// Directories whose owners are told.
    owners_of: Vec<PathBuf>,
    /// Files whose attributes are told.
    attributes_of: Vec<PathBuf>,
}

/// Names that were there before the stage started.
#[derive(Default)]
struct Before {
    directories: Noted,
    /// Roots that are no directories.
    files: HashSet<PathBuf>,
    /// Directories that only get further entries: there may be thousands, and they need not be
    /// noted.
    growing: Vec<Growing>,
    /// First missing component of each directory that the command makes.
    missing: HashSet<PathBuf>,
    /// Roots that nobody has read since they were made, with the times of that.
    never_read: HashMap<PathBuf, Time>,
    /// A directory with a default ACL, if the trees were searched for one.
    default_acl: Option<PathBuf>,
    incomplete: bool,
}

/// State of a directory.
#[derive(Default)]
struct DirectoryState {
    changed: Changed,
    /// Its subdirectories.
    below: Vec<OsString>,
}

impl WatchedTrees {
    /// Call it before the stage starts; costs nothing when it changes no trees.
    pub fn new(view: &View, cwd: &OwnedFd, stage: &Stage, budget: &Budget) -> Self {
        let mut trees = Trees::default();
        for tree in &stage.watched_trees {
            let names = 1 + tree.own.len() + tree.only.len() + tree.grows.len();
            let root = match tree.made {
                true => Some(path_of(&tree.path).to_owned()),
                false => root_of(view, tree, budget).filter(|_| budget.spend(names)),
            };
            // Each of its names is kept together with the root's path.
            let root = root.filter(|root| {
                budget.keep(names * (SLOT_BYTES + root.as_os_str().len()) + names_of(tree))
            });
            root.into_iter().for_each(|root| trees.add(root, tree));
        }
        trees.keep_inside(view, cwd, budget);
        trees.takes_umask = stage.paths.iter().any(|used| used.takes_umask);
        let on_mounts = |paths: &[bytes::Bytes]| {
            let paths = paths.iter().map(|path| path_of(path));
            let paths = paths.filter(|path| view.mount_of(path).is_some());
            let paths = paths.take_while(|path| budget.keep(path.as_os_str().len()));
            paths.map(Path::to_owned).collect()
        };
        Self {
            owners_of: on_mounts(&stage.owners_of),
            attributes_of: on_mounts(&stage.attributes_of),
            ..Self::since(moment(), trees, budget)
        }
    }

    fn since(since: Duration, trees: Trees, budget: &Budget) -> Self {
        let before = Before::of(&trees, since, budget);
        Self { since, trees, before, owners_of: Vec::new(), attributes_of: Vec::new() }
    }

    /// How the files are whose attributes are told. What does not fit is not told: the workstation
    /// only can't compare it.
    pub fn files_now(&self, budget: &Budget) -> Vec<FileNow> {
        let told = self.attributes_of.iter().take_while(|path| budget.tell(path, 0).is_some());
        told.filter_map(|path| {
            Some(FileNow {
                path: path.as_os_str().as_bytes().to_vec().into(),
                now: Some(attributes(&stat(path).ok()?)),
            })
        })
        .collect()
    }

    /// A directory of the trees with a default ACL, if the command takes the umask off what it
    /// makes there.
    pub fn default_acl(&self) -> Option<&Path> {
        self.before.default_acl.as_deref()
    }

    /// Walks the trees once more. Beyond the run's budget, all changes are unknown, except for
    /// directories that are made.
    pub fn changes(&self, budget: &Budget) -> DirectoryChanges {
        budget.resume();
        let is_told = |changes: &DirectoryChanges| changes.directories.len() <= MAX_REPORTED;
        let seen = (!self.before.incomplete).then(|| self.look(budget)).flatten().filter(is_told);
        let unknown = || DirectoryChanges { incomplete: true, ..DirectoryChanges::default() };
        let mut changes = seen.unwrap_or_else(unknown);
        if changes.incomplete {
            budget.resume();
        }
        let made = self.before.missing.iter().filter(|path| lstat(*path).is_ok());
        for parent in made.filter_map(|path| path.parent()) {
            if changes.directories.len() >= MAX_REPORTED || budget.tell(parent, 0).is_none() {
                changes = unknown();
                break;
            }
            changes.of(parent).names = true;
        }
        if !changes.incomplete {
            self.keep_unread(budget);
        }
        // Their owners only save the workstation a wait.
        for directory in &self.owners_of {
            if changes.directories.len() < MAX_REPORTED && budget.tell(directory, 0).is_some() {
                changes.of(directory);
            }
        }
        changes
    }

    /// `None`: the budget is spent.
    fn look(&self, budget: &Budget) -> Option<DirectoryChanges> {
        let mut changes = DirectoryChanges::default();
        let is_left = |names: usize| budget.spend(names).then_some(());
        for root in &self.trees.roots {
            is_left(1)?;
            self.look_at_root(root, &mut changes, budget)?;
            self.walk(root.clone(), &mut changes, budget)?;
        }
        for Growing { top, is_unread, below } in &self.before.growing {
            is_left(1 + below.len())?;
            self.look_at_growing(top, *is_unread, &mut changes, budget)?;
            for (name, is_unread) in below {
                self.look_at_growing(&top.join(name), *is_unread, &mut changes, budget)?;
            }
        }
        for at in self.before.directories.all() {
            // Entries were counted before and cost nothing more.
            is_left(0)?;
            let directory = self.before.directories.path(at);
            if lstat(&directory).is_ok_and(|found| listing::is_directory(&found)) {
                continue;
            }
            // Its parent, if that still exists, has reported the directory itself.
            let names = self.before.directories.entries(at).names();
            changes.of(&directory).removed =
                names.map(|name| told(&directory, name, budget)).collect::<Option<_>>()?;
        }
        Some(changes)
    }

    /// Marks the command's own directories as unread again: their only reader since was the
    /// command. Directories that it made have no reader yet, but would count as read, since their
    /// times are equal.
    fn keep_unread(&self, budget: &Budget) {
        let noted = &self.before.directories;
        let unread = noted.all().filter(|at| noted.is_unread(*at)).take_while(|_| budget.spend(0));
        unread.for_each(|at| listing::keep_unread(&noted.path(at)));
        for growing in &self.before.growing {
            let unread = growing.unread().take_while(|_| budget.spend(0));
            unread.for_each(|directory| listing::keep_unread(&directory));
        }
        let changed =
            |growing: &&Growing| lstat(&growing.top).is_ok_and(|found| self.is_newer(&found));
        let own = self.before.growing.iter().filter(|growing| self.trees.is_own(&growing.top));
        for Growing { top, below, .. } in own.filter(changed) {
            let listing = Listing::read(top, budget);
            let entries = listing.iter().flat_map(|listing| listing.entries().iter());
            let made =
                entries.filter(|entry| entry.is_directory && !below.contains_key(&entry.name()));
            made.for_each(|entry| listing::keep_unread(&top.join(entry.name())));
        }
    }

    /// Reports a root that came or went in the directory above, which is not walked. `None`: the
    /// budget is spent.
    fn look_at_root(
        &self,
        root: &Path,
        changes: &mut DirectoryChanges,
        budget: &Budget,
    ) -> Option<()> {
        let (Some(parent), Some(name)) = (root.parent(), root.file_name()) else { return Some(()) };
        budget.tell(parent, name.len())?;
        let was_directory = self.before.directories.root(root).is_some();
        let was_there = was_directory || self.before.files.contains(root);
        match lstat(root) {
            Ok(_) if !was_there => changes.of(parent).names = true,
            Ok(found)
                if was_directory != listing::is_directory(&found)
                    || !was_directory && self.is_newer(&found) =>
            {
                changes.of(parent).write(parent, name.to_owned(), &found, budget)?;
            }
            Err(_) if was_there => {
                let parent = changes.of(parent);
                parent.names = true;
                parent.removed.push(name.to_owned());
            }
            _ => {}
        }
        Some(())
    }

    /// `None`: the budget is spent.
    fn look_at_growing(
        &self,
        directory: &Path,
        is_unread: bool,
        changes: &mut DirectoryChanges,
        budget: &Budget,
    ) -> Option<()> {
        match lstat(directory) {
            // Somebody may have cached its former state.
            Ok(own) if self.is_newer(&own) && !is_unread => {
                budget.tell(directory, 0)?;
                changes.of(directory).names = true;
            }
            Ok(_) => {}
            Err(_) => {
                let (Some(parent), Some(name)) = (directory.parent(), directory.file_name()) else {
                    return Some(());
                };
                changes.of(parent).removed.push(told(parent, name.to_owned(), budget)?);
            }
        }
        Some(())
    }

    /// `None`: the budget is spent.
    fn walk(&self, root: PathBuf, changes: &mut DirectoryChanges, budget: &Budget) -> Option<()> {
        let mut queue = Vec::new();
        queue.extend(self.before.directories.root(&root).map(|at| (at, Below::root(root))));
        while let Some((known, at)) = queue.pop() {
            let Some(own) = at.status() else { continue };
            let directory = &at.path();
            let DirectoryState { changed, below } = match self.is_newer(&own) {
                true => self.look_anew(known, directory, &own, budget)?,
                false => self.look_again(known, directory, &own, budget)?,
            };
            // The workstation has seen neither new directories nor their entries.
            let below = below
                .into_iter()
                .filter_map(|name| Some((self.before.directories.below(known, &name)?, name)));
            let mut below = below.peekable();
            if below.peek().is_some()
                && let Some(parent) = at.open()
            {
                let parent = Rc::new(Above { directory: parent, path: directory.clone() });
                queue.extend(below.map(|(known, name)| {
                    (known, Below { parent: Some(Rc::clone(&parent)), name })
                }));
            }
            if changed != Changed::default() {
                budget.tell(directory, 0)?;
                changes.directories.insert(directory.clone(), changed);
            }
        }
        Some(())
    }

    /// Looks at a directory that has changed. `None`: the budget is spent.
    fn look_anew(
        &self,
        at: At,
        directory: &Path,
        own: &FileStat,
        budget: &Budget,
    ) -> Option<DirectoryState> {
        let Some(listing) = Listing::read(directory, budget) else {
            return (budget.over().is_none()).then(DirectoryState::default);
        };
        let known = self.before.directories.entries(at).iter();
        let before: HashMap<OsString, bool> =
            known.map(|entry| (entry.name(), entry.is_directory)).collect();
        let mut look = DirectoryState::default();
        // Somebody may have cached its former state.
        look.changed.names = self.is_newer(own) && !self.before.directories.is_unread(at);
        let mut now = HashSet::new();
        for entry in listing.entries().iter() {
            let name = entry.name();
            let Some(found) = listing.status(entry) else { continue };
            self.note(
                &mut look,
                &SeenEntry { directory, name: &name, found: &found },
                FormerEntry { device: own.st_dev, was_directory: before.get(&name).copied() },
                budget,
            )?;
            now.insert(name);
        }
        let removed = before.keys().filter(|name| !now.contains(*name));
        look.changed.removed =
            removed.map(|name| told(directory, name.clone(), budget)).collect::<Option<_>>()?;
        let is_replaced = look.changed.removed.is_empty()
            && before.len() == now.len()
            && self.is_replaced_unseen(at, own);
        let is_filled = || look.changed.written.is_empty() && self.is_never_read(directory);
        if is_replaced || is_filled() {
            look.changed.now = Some(attributes(own));
        }
        Some(look)
    }

    /// Returns true if all changes of a directory are new files in place of old ones, and nobody
    /// has read it meanwhile: a reader between the removal and the successor would cache that the
    /// file is missing. The first reader after a change updates the access time.
    fn is_replaced_unseen(&self, at: At, own: &FileStat) -> bool {
        let read_at = self.before.directories.read_at(at);
        read_at.is_some_and(|time| {
            time == (own.st_atime, own.st_atime_nsec) && !self.is_since(time.0, time.1)
        })
    }

    /// Returns true if nobody has read a directory since it was made.
    fn is_never_read(&self, directory: &Path) -> bool {
        let made = self.before.never_read.get(directory);
        made.is_some_and(|made| listing::never_read(directory) == Some(*made))
    }

    /// Looks at a directory with unchanged names. In a tree whose files are replaced, its files are
    /// unchanged, too.
    fn look_again(
        &self,
        at: At,
        directory: &Path,
        own: &FileStat,
        budget: &Budget,
    ) -> Option<DirectoryState> {
        let before = self.before.directories.entries(at);
        // An empty directory costs something, too.
        budget.spend(before.len().max(1)).then_some(())?;
        let mut look = DirectoryState::default();
        if self.trees.replaces(directory) {
            look.below = before
                .iter()
                .filter(|entry| entry.is_directory)
                .map(|entry| entry.name())
                .collect();
            return Some(look);
        }
        let Some(known) = KnownDirectory::open(directory) else { return Some(look) };
        for entry in before.iter() {
            if let Some(found) = known.status(entry) {
                self.note(
                    &mut look,
                    &SeenEntry { directory, name: &entry.name(), found: &found },
                    FormerEntry { device: own.st_dev, was_directory: Some(entry.is_directory) },
                    budget,
                )?;
            }
        }
        Some(look)
    }

    /// `None`: the budget is spent.
    fn note(
        &self,
        look: &mut DirectoryState,
        entry: &SeenEntry<'_>,
        former: FormerEntry,
        budget: &Budget,
    ) -> Option<()> {
        let SeenEntry { directory, name, found } = *entry;
        let FormerEntry { device, was_directory } = former;
        let is_directory = listing::is_directory(found);
        let has_another_kind =
            was_directory.is_some_and(|was_directory| was_directory != is_directory);
        if is_directory && found.st_dev == device && !has_another_kind {
            // Directories that only grow were not noted, and are looked at separately.
            look.below.push(name.clone());
        } else if has_another_kind
            || was_directory.is_some() && self.is_since(found.st_ctime, found.st_ctime_nsec)
        {
            look.changed.write(directory, name.clone(), found, budget)?;
        }
        Some(())
    }

    fn is_newer(&self, found: &FileStat) -> bool {
        self.is_since(found.st_ctime, found.st_ctime_nsec)
    }

    fn is_since(&self, seconds: i64, nanoseconds: i64) -> bool {
        let seconds = u64::try_from(seconds).unwrap_or(0);
        match u32::try_from(nanoseconds).unwrap_or(0) {
            // Some file systems keep whole seconds only, or only even ones (FAT).
            0 => seconds + 1 >= self.since.as_secs(),
            nanoseconds => Duration::new(seconds, nanoseconds) >= self.since,
        }
    }
}

/// An entry of a directory, as it is now.
struct SeenEntry<'a> {
    directory: &'a Path,
    name: &'a OsString,
    found: &'a FileStat,
}

/// The earlier state of an entry, before the command.
#[derive(Clone, Copy)]
struct FormerEntry {
    /// Device of its directory.
    device: u64,
    /// `None` for a new name.
    was_directory: Option<bool>,
}

impl Changed {
    /// Notes a name that was there before. `None`: the budget is spent.
    fn write(
        &mut self,
        directory: &Path,
        name: OsString,
        found: &FileStat,
        budget: &Budget,
    ) -> Option<()> {
        match SFlag::from_bits_truncate(found.st_mode & SFlag::S_IFMT.bits()) {
            SFlag::S_IFDIR => self.kinds.push((told(directory, name.clone(), budget)?, None)),
            SFlag::S_IFLNK => {
                // A file that has gone or is just being replaced is no link.
                let link = readlink(&directory.join(&name)).unwrap_or_default();
                budget.tell(directory, link.len())?;
                self.kinds.push((told(directory, name.clone(), budget)?, Some(link)));
            }
            _ => {}
        }
        budget.tell(directory, name.len() + size_of::<Attributes>())?;
        self.written.push(name);
        self.written_now.push(attributes(found));
        Some(())
    }
}

/// The name, if the budget has room for it among the changes.
fn told(directory: &Path, name: OsString, budget: &Budget) -> Option<OsString> {
    budget.tell(directory, name.len()).map(|()| name)
}

/// A time that is not later than that of any file changed from now on, and not much earlier either:
/// else changes that the workstation knows already would be reported again, and invalidating them
/// gives a directory a new change time. So it is the clock of file times: that of the kernel's last
/// tick (clock_gettime(2), CLOCK_REALTIME_COARSE).
fn moment() -> Duration {
    clock_gettime(ClockId::CLOCK_REALTIME_COARSE).map_or(Duration::ZERO, Duration::from)
}

impl Before {
    /// Reads names only: a directory has the type of each entry.
    fn of(trees: &Trees, since: Duration, budget: &Budget) -> Self {
        // No more than the specification names.
        let missing: HashSet<PathBuf> =
            trees.made.iter().filter_map(|path| missing(path)).collect();
        let mut before = Self { missing: missing.clone(), ..Self::default() };
        match before.fill(trees, since, budget).filter(|()| budget.over().is_none()) {
            Some(()) => before,
            None => Self { missing, incomplete: true, ..Self::default() },
        }
    }

    /// `None`: the budget is spent.
    fn fill(&mut self, trees: &Trees, since: Duration, budget: &Budget) -> Option<()> {
        let mut queue = Vec::new();
        for root in &trees.roots {
            (budget.spend(1) && budget.keep(SLOT_BYTES + root.as_os_str().len())).then_some(())?;
            match lstat(root) {
                Ok(found) if listing::is_directory(&found) => {
                    self.note_birth(trees, root, since);
                    queue.push((None, Below::root(root.clone())));
                }
                Ok(_) => drop(self.files.insert(root.clone())),
                Err(_) => {}
            }
        }
        while let Some((above, below)) = queue.pop() {
            let Some(directory) = below.open() else { continue };
            let path = below.path();
            self.look_for_acl(trees, &path);
            let is_unread = is_unread(trees, &path, || fstat(&directory).ok());
            let read_at = read_at(trees, &path, &directory);
            let (directory, entries) = Listing::of(directory, budget)?.into_parts();
            (budget.keep(entries.bytes() + noted::BYTES + below.name.len())).then_some(())?;
            let at = match above {
                None => self.directories.add_root(path.clone(), entries),
                Some(above) => self.directories.add(above, &below.name, entries),
            };
            self.directories.note_readers(at, is_unread, read_at);
            let parent = Rc::new(Above { directory, path });
            // The queue has the names of one directory at each level of the tree: less than is
            // kept.
            let names: Vec<OsString> = self.directories.entries(at).directories().collect();
            for name in names {
                let path = parent.path.join(&name);
                match trees.growing.contains(&path) {
                    true => self.note_growing(trees, path, budget)?,
                    false => {
                        queue.push((Some(at), Below { parent: Some(Rc::clone(&parent)), name }))
                    }
                }
            }
        }
        Some(())
    }

    /// Notes the directory, and its subdirectories.
    fn note_growing(&mut self, trees: &Trees, top: PathBuf, budget: &Budget) -> Option<()> {
        budget.keep(SLOT_BYTES + top.as_os_str().len()).then_some(())?;
        let mut growing = Growing { is_unread: false, below: HashMap::new(), top };
        if let Some(opened) = listing::open_directory(AT_FDCWD, &growing.top) {
            growing.is_unread = is_unread(trees, &growing.top, || fstat(&opened).ok());
            self.look_for_acl(trees, &growing.top);
            let listing = Listing::of(opened, budget)?;
            for entry in listing.entries().iter().filter(|entry| entry.is_directory) {
                let name = entry.name();
                budget.keep(SLOT_BYTES + name.len()).then_some(())?;
                let path = growing.top.join(&name);
                self.look_for_acl(trees, &path);
                let is_unread = is_unread(trees, &path, || listing.status(entry));
                growing.below.insert(name, is_unread);
            }
        }
        self.growing.push(growing);
        Some(())
    }

    fn look_for_acl(&mut self, trees: &Trees, directory: &Path) {
        if trees.takes_umask && self.default_acl.is_none() && listing::has_default_acl(directory) {
            self.default_acl = Some(directory.to_owned());
        }
    }

    /// Call it before we read the directory. A reader within the tick of its creation leaves no
    /// other time.
    fn note_birth(&mut self, trees: &Trees, root: &Path, now: Duration) {
        let made = listing::never_read(root).filter(|_| trees.far.contains(root));
        let is_over = |(seconds, nanoseconds): &Time| {
            let made = u64::try_from(*seconds).ok().zip(u32::try_from(*nanoseconds).ok());
            made.is_some_and(|(seconds, nanoseconds)| Duration::new(seconds, nanoseconds) < now)
        };
        if let Some(made) = made.filter(is_over) {
            self.never_read.insert(root.to_owned(), made);
        }
    }
}

/// Time of the last read of a directory in which files are replaced. Call it before we read it.
fn read_at(trees: &Trees, path: &Path, directory: impl AsFd) -> Option<Time> {
    trees.replaced_in(path).filter(|tree| tree.tells_readers)?;
    fstat(directory).ok().map(|found| (found.st_atime, found.st_atime_nsec))
}

/// Returns true for the command's own directories that nobody has read since their last change.
/// Call it before we read it.
fn is_unread(trees: &Trees, path: &Path, look: impl FnOnce() -> Option<FileStat>) -> bool {
    trees.is_own(path) && look().is_some_and(|found| listing::is_unread(&found))
}

/// Bytes of the names in a tree of the contract.
fn names_of(tree: &WatchedTree) -> usize {
    [&tree.own, &tree.only, &tree.grows].into_iter().flatten().map(String::len).sum()
}

/// A directory relative to its parent: the kernel then walks one name, not the whole path, and the
/// path is not kept for each of thousands in one directory.
struct Below {
    parent: Option<Rc<Above>>,
    /// The whole path of a root.
    name: OsString,
}

struct Above {
    directory: File,
    path: PathBuf,
}

impl Below {
    fn root(path: PathBuf) -> Self {
        Self { parent: None, name: path.into_os_string() }
    }

    fn path(&self) -> PathBuf {
        self.parent
            .as_ref()
            .map_or_else(|| PathBuf::from(&self.name), |parent| parent.path.join(&self.name))
    }

    fn open(&self) -> Option<File> {
        listing::open_directory(self.above(), Path::new(&self.name))
    }

    /// `None` if it has gone.
    fn status(&self) -> Option<FileStat> {
        fstatat(self.above(), Path::new(&self.name), AtFlags::AT_SYMLINK_NOFOLLOW).ok()
    }

    fn above(&self) -> BorrowedFd<'_> {
        self.parent.as_ref().map_or(AT_FDCWD, |parent| parent.directory.as_fd())
    }
}

/// The first missing component of a path.
fn missing(path: &Path) -> Option<PathBuf> {
    let missing = path.ancestors().take_while(|above| lstat(*above).is_err());
    missing.last().map(Path::to_owned)
}

fn attributes(found: &FileStat) -> Attributes {
    Attributes { mode: found.st_mode, size: found.st_size.cast_unsigned(), mtime_s: found.st_mtime }
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeMap, fs, os::unix::fs::MetadataExt as _};

    use posh_proto::executor::WatchedTree;

    use super::{super::budget::MAX_KEPT_BYTES, *};

    /// A time after that of all existing files: the clock of files moves in ticks, and later
    /// changes must be distinguishable from earlier ones.
    fn moment_after(directory: &Path) -> Duration {
        let probe = directory.join("probe");
        let time = |path: &Path| {
            let found = fs::symlink_metadata(path).expect("it is there");
            Duration::new(
                found.ctime().unsigned_abs(),
                u32::try_from(found.ctime_nsec()).unwrap_or(0),
            )
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

    /// Changes without the attributes of written names, of which there is one for each.
    fn names(changes: DirectoryChanges) -> BTreeMap<PathBuf, Changed> {
        let mut directories = changes.directories;
        for changed in directories.values_mut() {
            assert_eq!(changed.written_now.len(), changed.written.len());
            changed.written_now.clear();
        }
        directories
    }

    fn changed(names: bool, written: &[&str], removed: &[&str]) -> Changed {
        let names_of = |list: &[&str]| list.iter().map(OsString::from).collect();
        Changed {
            names,
            written: names_of(written),
            removed: names_of(removed),
            ..Changed::default()
        }
    }

    #[test]
    fn names_that_are_another_thing_now_are_told_with_what_they_are() {
        use std::os::unix::fs::symlink;

        let tree = tempfile::tempdir().expect("a directory");
        let clock = tempfile::tempdir().expect("a directory");
        let root = tree.path();
        for name in ["a-file", "b-file", "same"] {
            fs::write(root.join(name), "old").expect("a file");
        }
        fs::create_dir_all(root.join("c-dir/below")).expect("a directory");
        fs::create_dir(root.join("d-dir")).expect("a directory");
        symlink("x", root.join("e-link")).expect("a link");
        symlink("x", root.join("f-link")).expect("a link");
        let watch = WatchedTrees::since(
            moment_after(clock.path()),
            whole(&[root.to_owned()]),
            &Budget::new(None),
        );
        for name in ["a-file", "b-file", "e-link", "f-link"] {
            fs::remove_file(root.join(name)).expect("removed");
        }
        for name in ["c-dir", "d-dir"] {
            fs::remove_dir_all(root.join(name)).expect("removed");
        }
        symlink("y", root.join("a-file")).expect("a link");
        fs::create_dir(root.join("b-file")).expect("a directory");
        symlink("y", root.join("c-dir")).expect("a link");
        fs::write(root.join("d-dir"), "new").expect("a file");
        symlink("y", root.join("e-link")).expect("a link");
        fs::write(root.join("f-link"), "new").expect("a file");
        let mut changes = watch.changes(&Budget::new(None)).directories;
        let mut told =
            changes.remove(&root.components().collect::<PathBuf>()).expect("it has changed");
        told.written.sort();
        told.kinds.sort();
        assert_eq!(told.written, ["a-file", "b-file", "c-dir", "d-dir", "e-link", "f-link"]);
        let link = |name: &str| (name.into(), Some("y".into()));
        assert_eq!(
            told.kinds,
            [link("a-file"), ("b-file".into(), None), link("c-dir"), link("e-link")]
        );
        changes.retain(|_, changed| *changed != Changed::default());
        assert_eq!(changes, [(root.join("c-dir"), changed(false, &[], &["below"]))].into());
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
        let watch = WatchedTrees::since(
            moment_after(clock.path()),
            whole(&[root.to_owned()]),
            &Budget::new(None),
        );
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
        let expect = expect
            .into_iter()
            .map(|(path, changed)| (root.join(path).components().collect(), changed));
        assert_eq!(names(watch.changes(&Budget::new(None))), expect.collect());
    }

    #[test]
    fn what_is_told_of_has_a_bound_over_all_paths() {
        let tree = tempfile::tempdir().expect("a directory");
        let clock = tempfile::tempdir().expect("a directory");
        let long = "d".repeat(250);
        let below = (0..12).fold(tree.path().to_owned(), |below, _| below.join(&long));
        fs::create_dir_all(&below).expect("directories");
        let path_bytes = below.as_os_str().len() + 250;
        let bound = super::super::budget::MAX_TOLD_BYTES;
        let most = bound / (path_bytes + size_of::<Attributes>());
        let file = |number: usize| below.join(format!("{number:0250}"));
        let all = 0..bound / path_bytes + 10;
        all.for_each(|number| fs::write(file(number), "").expect("a file"));
        let watch = || {
            WatchedTrees::since(
                moment_after(clock.path()),
                whole(&[tree.path().to_owned()]),
                &Budget::new(None),
            )
        };
        for (count, is_told) in [(most - 10, true), (most + 10, false)] {
            let watch = watch();
            (0..count).for_each(|number| fs::write(file(number), "x").expect("a file"));
            let changes = watch.changes(&Budget::new(None));
            let written: usize =
                changes.directories.values().map(|changed| changed.written.len()).sum();
            assert_eq!((changes.incomplete, written), (!is_told, if is_told { count } else { 0 }));
        }
        // Removed names count, too.
        let watch = watch();
        fs::remove_dir_all(tree.path().join(&long)).expect("removed");
        let changes = watch.changes(&Budget::new(None));
        assert!(changes.incomplete && changes.directories.is_empty());
    }

    #[test]
    fn of_a_repository_only_what_git_changes_is_looked_at() {
        let tree = tempfile::tempdir().expect("a directory");
        let clock = tempfile::tempdir().expect("a directory");
        let root = tree.path();
        for directory in
            [".git/objects/aa", ".git/objects/bb", ".git/objects/gone", ".git/refs", "src"]
        {
            fs::create_dir_all(root.join(directory)).expect("a directory");
        }
        for file in [".git/index", ".git/objects/aa/1", ".git/refs/main", "src/f"] {
            fs::write(root.join(file), "old").expect("a file");
        }
        let contract = WatchedTree {
            only: vec![".git".into()],
            grows: vec![".git/objects".into()],
            ..Default::default()
        };
        let mut trees = Trees::default();
        trees.add(root.to_owned(), &contract);
        let watch = WatchedTrees::since(moment_after(clock.path()), trees, &Budget::new(None));
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
        assert_eq!(names(watch.changes(&Budget::new(None))), expect.collect());
    }

    #[test]
    fn where_files_are_replaced_a_directory_that_did_not_change_is_not_looked_into() {
        let tree = tempfile::tempdir().expect("a directory");
        let clock = tempfile::tempdir().expect("a directory");
        let root = tree.path();
        for directory in [".git", "changed/below", "quiet/deep"] {
            fs::create_dir_all(root.join(directory)).expect("a directory");
        }
        for file in [".git/log", "changed/f", "quiet/f", "quiet/deep/f"] {
            fs::write(root.join(file), "old").expect("a file");
        }
        let contract =
            WatchedTree { own: vec![".git".into()], replaces: true, ..Default::default() };
        let mut trees = Trees::default();
        trees.add(root.to_owned(), &contract);
        let watch = WatchedTrees::since(moment_after(clock.path()), trees, &Budget::new(None));
        // It may change its own files in place; changing other files in place breaks its promise.
        for file in [".git/log", "quiet/f"] {
            fs::write(root.join(file), "new").expect("a file");
        }
        for file in ["changed/f", "quiet/deep/f"] {
            fs::remove_file(root.join(file)).expect("removed");
            fs::write(root.join(file), "new").expect("a file");
        }
        let expect = [
            (".git", changed(false, &["log"], &[])),
            ("changed", changed(true, &["f"], &[])),
            ("quiet/deep", changed(true, &["f"], &[])),
        ];
        let expect = expect.into_iter().map(|(path, changed)| (root.join(path), changed));
        let mut found = names(watch.changes(&Budget::new(None)));
        for (path, changed) in &mut found {
            let is_replaced = !path.ends_with(".git") && listing::tells_readers(root);
            assert_eq!(changed.now.take().is_some(), is_replaced, "{}", path.display());
        }
        assert_eq!(found, expect.collect());
    }

    #[test]
    fn how_replaced_files_are_is_told_where_nobody_has_seen_them_gone() {
        let tree = tempfile::tempdir().expect("a directory");
        let clock = tempfile::tempdir().expect("a directory");
        let root = tree.path();
        if !listing::tells_readers(root) {
            return;
        }
        for directory in ["unseen", "seen", "grown", "shrunk"] {
            fs::create_dir(root.join(directory)).expect("a directory");
            fs::write(root.join(directory).join("f"), "old").expect("a file");
            fs::write(root.join(directory).join("other"), "").expect("a file");
        }
        let mut trees = Trees::default();
        trees.add(root.to_owned(), &WatchedTree { replaces: true, ..Default::default() });
        let watch = WatchedTrees::since(moment_after(clock.path()), trees, &Budget::new(None));
        for directory in ["unseen", "seen", "grown", "shrunk"] {
            let file = root.join(directory).join("f");
            fs::remove_file(&file).expect("removed");
            if directory == "seen" {
                fs::read_dir(root.join(directory)).expect("listed").for_each(drop);
            }
            fs::write(&file, "new one").expect("a file");
        }
        fs::write(root.join("grown/g"), "").expect("a file");
        fs::remove_file(root.join("shrunk/other")).expect("removed");
        let changes = watch.changes(&Budget::new(None));
        for directory in ["seen", "grown", "shrunk"] {
            assert_eq!(changes.directories[&root.join(directory)].now, None, "{directory}");
        }
        let found = |path: &str| attributes(&lstat(&root.join(path)).expect("it is there"));
        let unseen = &changes.directories[&root.join("unseen")];
        assert_eq!(unseen.now, Some(found("unseen")));
        assert_eq!(unseen.written_now, [found("unseen/f")]);
        assert_eq!(found("unseen/f").size, 7);
    }

    #[test]
    fn of_trees_beyond_the_budget_nothing_but_what_is_made_is_told() {
        let tree = tempfile::tempdir().expect("a directory");
        let clock = tempfile::tempdir().expect("a directory");
        fs::create_dir_all(tree.path().join("a/b")).expect("a directory");
        fs::write(tree.path().join("a/f"), "old").expect("a file");
        let spent = Budget::new(None);
        assert!(!spent.spend(usize::MAX));
        let since = moment_after(clock.path());
        let watch = |budget: &Budget| {
            let mut trees = whole(&[tree.path().to_owned()]);
            trees.add(clock.path().join("made"), &WatchedTree { made: true, ..Default::default() });
            WatchedTrees::since(since, trees, budget)
        };
        let (before, after) = (watch(&spent), watch(&Budget::new(None)));
        fs::write(tree.path().join("a/f"), "new").expect("a file");
        fs::create_dir(clock.path().join("made")).expect("a directory");
        for (watch, budget) in [(&before, Budget::new(None)), (&after, spent)] {
            let changes = watch.changes(&budget);
            assert!(changes.incomplete);
            assert_eq!(changes.directories.keys().collect::<Vec<_>>(), [clock.path()]);
        }
        assert!(!after.changes(&Budget::new(None)).incomplete);
    }

    #[test]
    fn what_is_kept_of_trees_has_a_bound_and_no_path_twice() {
        let tree = tempfile::tempdir().expect("a directory");
        let clock = tempfile::tempdir().expect("a directory");
        let long = "x".repeat(250);
        let deep = tree.path().join([long.as_str(); 12].join("/"));
        fs::create_dir_all(&deep).expect("directories");
        (0..1000).for_each(|number| {
            fs::create_dir(deep.join(format!("{number}"))).expect("a directory")
        });
        let since = moment_after(clock.path());
        let with = |left: usize| {
            let budget = Budget::new(None);
            assert!(budget.keep(MAX_KEPT_BYTES - left));
            let watch = WatchedTrees::since(since, whole(&[tree.path().to_owned()]), &budget);
            watch.changes(&Budget::new(None)).incomplete
        };
        // Their whole paths have three million.
        assert!(!with(400_000) && with(40_000));
    }

    #[test]
    fn what_only_a_command_itself_has_read_stays_unread() {
        let tree = tempfile::tempdir().expect("a directory");
        let clock = tempfile::tempdir().expect("a directory");
        let objects = tree.path().join(".git/objects");
        fs::create_dir_all(&objects).expect("a directory");
        let contract = WatchedTree {
            only: vec![".git".into()],
            grows: vec![".git/objects".into()],
            own: vec![".git".into()],
            ..Default::default()
        };
        let watch = || {
            let mut trees = Trees::default();
            trees.add(tree.path().to_owned(), &contract);
            WatchedTrees::since(moment_after(clock.path()), trees, &Budget::new(None))
        };
        if !listing::tells_readers(&objects) {
            return;
        }
        let told = |watch: &WatchedTrees| {
            watch.changes(&Budget::new(None)).directories.contains_key(&objects.join("aa"))
        };
        let first = watch();
        fs::create_dir(objects.join("aa")).expect("a directory");
        fs::write(objects.join("aa/1"), "").expect("a file");
        // Like git, which looks which abbreviations are free.
        fs::read_dir(objects.join("aa")).expect("listed").for_each(drop);
        assert!(!told(&first), "nobody knew of it");
        let second = watch();
        fs::write(objects.join("aa/2"), "").expect("a file");
        fs::read_dir(objects.join("aa")).expect("listed").for_each(drop);
        assert!(!told(&second), "nobody else has read it");
        fs::read_dir(objects.join("aa")).expect("listed").for_each(drop);
        let third = watch();
        fs::write(objects.join("aa/3"), "").expect("a file");
        assert!(told(&third), "somebody has read it");
    }

    #[test]
    fn what_is_made_is_told_of_the_directory_above_that_was_there() {
        let tree = tempfile::tempdir().expect("a directory");
        let clock = tempfile::tempdir().expect("a directory");
        let root = |name: &str| tree.path().join(name);
        fs::create_dir(root("there")).expect("a directory");
        fs::write(root("there/f"), "old").expect("a file");
        let mut trees = Trees::default();
        for name in ["a/b/c", "there", "there/new", "other"] {
            trees.add(root(name), &WatchedTree { made: true, ..Default::default() });
        }
        let watch = WatchedTrees::since(moment_after(clock.path()), trees, &Budget::new(None));
        fs::create_dir_all(root("a/b/c")).expect("directories");
        fs::create_dir(root("there/new")).expect("a directory");
        fs::write(root("there/f"), "not looked at").expect("a file");
        let expect = [("", changed(true, &[], &[])), ("there", changed(true, &[], &[]))];
        let expect =
            expect.into_iter().map(|(path, changed)| (root(path).components().collect(), changed));
        assert_eq!(names(watch.changes(&Budget::new(None))), expect.collect());
    }

    #[test]
    fn how_a_directory_is_that_nobody_has_read_since_it_was_made() {
        let tree = tempfile::tempdir().expect("a directory");
        let clock = tempfile::tempdir().expect("a directory");
        let directory = tree.path().join("new");
        let told = |is_far: bool, before: &dyn Fn(), work: &dyn Fn()| {
            let _ = fs::remove_dir_all(&directory);
            fs::create_dir(&directory).expect("a directory");
            moment_after(clock.path());
            before();
            let mut trees = Trees::default();
            trees.add(directory.clone(), &WatchedTree { far: is_far, ..Default::default() });
            let watch = WatchedTrees::since(moment_after(clock.path()), trees, &Budget::new(None));
            fs::write(directory.join("f"), "new").expect("a file");
            work();
            watch
                .changes(&Budget::new(None))
                .directories
                .remove(&directory)
                .expect("it has changed")
                .now
        };
        let list = || fs::read_dir(&directory).expect("listed").for_each(drop);
        let nothing = || {};
        if listing::never_read(tree.path()).is_none() || !listing::tells_readers(tree.path()) {
            return;
        }
        let now = told(true, &nothing, &nothing).expect("nobody has read it");
        assert_eq!(now, attributes(&lstat(&directory).expect("it is there")));
        assert_eq!(told(true, &list, &nothing), None, "somebody had read it");
        assert_eq!(told(true, &nothing, &list), None, "somebody reads it");
        assert_eq!(
            told(false, &nothing, &nothing),
            None,
            "who reads it in the same tick leaves no trace"
        );
        let write = || fs::write(directory.join("old"), "old").expect("a file");
        assert!(told(true, &write, &nothing).is_some(), "files in it");
        let other = || fs::write(directory.join("old"), "other").expect("a file");
        assert_eq!(told(true, &write, &other), None, "whose content is another one");
    }

    #[test]
    fn a_root_that_comes_or_goes_is_told_of_its_parent() {
        let tree = tempfile::tempdir().expect("a directory");
        let clock = tempfile::tempdir().expect("a directory");
        let root = |name: &str| tree.path().join(name);
        fs::create_dir(root("goes")).expect("a directory");
        fs::write(root("file"), "old").expect("a file");
        let since = moment_after(clock.path());
        let watch = WatchedTrees::since(
            since,
            whole(&["comes", "goes", "file"].map(root)),
            &Budget::new(None),
        );
        fs::create_dir(root("comes")).expect("a directory");
        fs::remove_dir(root("goes")).expect("removed");
        fs::write(root("file"), "new").expect("a file");
        let changes = watch.changes(&Budget::new(None));
        assert!(!changes.incomplete);
        assert_eq!(names(changes)[tree.path()], changed(true, &["file"], &["goes"]));
    }
}
