//! Invalidates the mounts' caches after a remote command has changed files (design §5, rule 8). The
//! changes are known from redirects, from the annotation, and from the executor, which inspects the
//! trees.

use std::{
    collections::{BTreeSet, HashMap},
    ffi::OsStr,
    io,
    ops::Bound,
    os::unix::{ffi::OsStrExt, fs::MetadataExt},
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use fs_mapper::{
    DirectoryOwners, Mount, MountId, MountRoot, MountTable, Resolution,
    coherence::{Adapter, Change, Coherence, EntryKind, SSHFS_MEMORY, StaleEntry, WriteBehind},
};
use posh_annotations::FileKind;
use posh_proto::{
    executor::{Attributes, ChangedDirectory, Exited, NamedKind, VolumeMark},
    rule::{self, Rule},
};
use posh_volume::fs::Changes;

use super::{
    again,
    on_mounts::OnMounts,
    remake::{self, Remnants},
    verify::{self, ReportedFiles},
};
use crate::{
    aside::in_own_thread,
    enlisted::{DescriptorKind, Enlisted},
    facts::{PathOwner, ResolvedCommand},
    state::Gateway,
    written::{self, is_on_sshfs},
};

/// Timeout for mounts: the command has ended, and its shell must go on. Longer than the cache
/// lifetime that some adapters wait out, plus the work for large trees.
const DEADLINE: Duration = Duration::from_secs(60);
/// Number of parallel calls on the mounts: each takes a round trip or more, and only waits for the
/// network.
const AT_ONCE: usize = 64;
/// Up to so many files are refreshed one by one; beyond, listing their directory costs less.
const FEW_FILES: usize = 64;

/// Changes by one stage, as far as known.
pub struct StageChanges {
    table: Arc<MountTable>,
    changes: BTreeSet<Change>,
    /// Changes to invalidate unless the mount already shows the new state.
    doubtful: Doubtful,
    owners: DirectoryOwners,
    files: ReportedFiles,
    volumes: OnVolumes,
}

/// Changes that executors reported, and those that follow from the command's words.
#[derive(Debug)]
pub(super) struct ReportedChanges {
    pub changes: BTreeSet<Change>,
    pub doubtful: Doubtful,
    pub files: ReportedFiles,
}

/// Changes with the new attributes: to be invalidated unless already shown.
type Doubtful = Vec<(Change, Attributes)>;

/// Changes that volumes must catch up with.
#[derive(Debug)]
struct OnVolumes {
    /// Mounts that the stage uses.
    used: BTreeSet<MountId>,
    changes: Changes,
    /// Marks from their executors.
    marks: Vec<VolumeMark>,
}

impl StageChanges {
    /// Collects a stage's redirects, the files that its annotation declares as changed, and the
    /// changes that executors saw in the trees that it may change.
    #[must_use]
    pub fn by<'a>(
        gateway: &Gateway,
        stage: &Enlisted,
        reading: Option<&ResolvedCommand>,
        exits: impl Iterator<Item = &'a Exited>,
    ) -> Self {
        let table = Arc::clone(&gateway.view().table);
        let mut changes = BTreeSet::new();
        let redirects = [1, 2].into_iter().filter_map(|fd| stage.descriptor(fd));
        let redirects: Vec<_> = redirects
            .filter(|d| {
                d.kind == DescriptorKind::File && d.writes() && was_opened_there(&table, &d.path)
            })
            .collect();
        changes.extend(redirects.iter().map(|d| Change::FileWritten(d.path.clone())));
        let files = reading.into_iter().flat_map(|r| r.invocation.files.iter().zip(&r.places));
        for (file, place) in files {
            if let Some(PathOwner::At(_, path, _)) = place.as_ref().filter(|_| file.kind.writes()) {
                changes.extend(by_annotation(file.kind, path.as_path()));
            }
        }
        let only_reads = reading.is_some_and(again::only_reads);
        let changes_something = !changes.is_empty() || !only_reads;
        changes.retain(|change| volume_at(&table, change.path()).is_none());
        let trees =
            reading.map(|reading| written::watched_places(&table, reading)).unwrap_or_default();
        let made = reading.map(|reading| written::made_places(&table, reading)).unwrap_or_default();
        let exits: Vec<&Exited> = exits.collect();
        let volumes = OnVolumes {
            used: volumes_of(&table, stage, reading),
            changes: if changes_something { Changes::Possible } else { Changes::None },
            marks: exits.iter().flat_map(|exited| exited.volume_marks.clone()).collect(),
        };
        let directories: Vec<&ChangedDirectory> =
            exits.iter().flat_map(|e| &e.changed_directories).collect();
        let mut doubtful = Vec::new();
        for directory in &directories {
            match replaced(&table, directory) {
                Some(replaced) => doubtful.extend(replaced),
                None => changes.extend(seen(directory, only_reads)),
            }
        }
        let files = verify::reported(&exits, &directories, &changes);
        for exited in exits {
            if exited.changes_incomplete {
                let has_no_names =
                    |d: &ChangedDirectory| d.written.is_empty() && d.removed.is_empty();
                let is_all_unseen = exited.changed_directories.iter().all(has_no_names);
                let trees = trees.iter().map(|(path, mount)| (path, table.mount(*mount).adapter()));
                changes.extend(trees.map(|(path, adapter)| unseen(path, adapter, is_all_unseen)));
                // Created directories may be missing, too.
                changes.extend(made.iter().flat_map(|(path, mount)| above(&table, path, *mount)));
            }
        }
        let owners = directories
            .iter()
            .filter_map(|directory| Some((path_of(&directory.path), directory.owner?)));
        Self { table, changes, doubtful, owners: owners.collect(), files, volumes }
    }
}

/// Number of invalidations by kind.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Tally {
    /// Files with changed content or attributes.
    pub files: usize,
    /// Directories with changed listings.
    pub listings: usize,
    /// Removed names.
    pub removed: usize,
}

impl StageChanges {
    /// Counts the invalidations.
    #[must_use]
    pub fn tally(&self) -> Tally {
        let mut tally = Tally::default();
        for change in self.changes.iter().chain(self.doubtful.iter().map(|(change, _)| change)) {
            match change {
                Change::FileWritten(_) | Change::EntryIs(..) => tally.files += 1,
                Change::Removed(_) => tally.removed += 1,
                Change::ListingChanged(_)
                | Change::NameChanged(_)
                | Change::EntriesChanged(_)
                | Change::Anything(_) => {
                    tally.listings += 1;
                }
            }
        }
        tally
    }
}

/// Volume that holds a path.
fn volume_at(table: &MountTable, path: &Path) -> Option<MountId> {
    match table.resolve(path, Path::new("/")) {
        Resolution::Owned(owned) => {
            Some(owned.mount).filter(|id| table.mount(*id).adapter() == Adapter::Volume)
        }
        Resolution::Local { .. } => None,
    }
}

/// Volumes that a stage uses.
fn volumes_of(
    table: &MountTable,
    stage: &Enlisted,
    reading: Option<&ResolvedCommand>,
) -> BTreeSet<MountId> {
    let places = reading
        .into_iter()
        .flat_map(|reading| reading.places.iter().chain([&reading.cwd]))
        .flatten();
    let named = places.filter_map(|place| match place {
        PathOwner::At(_, _, mount) => {
            Some(*mount).filter(|id| table.mount(*id).adapter() == Adapter::Volume)
        }
        PathOwner::Here(_) => None,
    });
    let files =
        stage.descriptors.iter().filter(|descriptor| descriptor.kind == DescriptorKind::File);
    named.chain(files.filter_map(|descriptor| volume_at(table, &descriptor.path))).collect()
}

fn was_opened_there(table: &MountTable, path: &Path) -> bool {
    match table.resolve(path, Path::new("/")) {
        Resolution::Owned(owned) => {
            table.mount(owned.mount).coherence().write_behind() == WriteBehind::Allowed
        }
        Resolution::Local { .. } => false,
    }
}

/// The executor reports changes in trees.
fn by_annotation(kind: FileKind, path: &Path) -> Vec<Change> {
    if kind.recursive() || kind == FileKind::NewDir {
        return Vec::new();
    }
    vec![Change::FileWritten(path.to_owned()), Change::NameChanged(path.to_owned())]
}

/// Changes that an executor saw in one directory. Ignores removals by a read-only command: the
/// server is wrong.
fn seen(directory: &ChangedDirectory, only_reads: bool) -> Vec<Change> {
    let path = PathBuf::from(OsStr::from_bytes(&directory.path));
    let within = |name: &bytes::Bytes| path.join(OsStr::from_bytes(name));
    let removed = directory.removed.iter().filter(|_| !only_reads);
    let mut changes: Vec<Change> = removed.map(|name| Change::Removed(within(name))).collect();
    let kinds: HashMap<&bytes::Bytes, EntryKind> =
        directory.kinds.iter().map(|kind| (&kind.name, kind_of(kind))).collect();
    let entry = |name: &bytes::Bytes| {
        Change::EntryIs(within(name), kinds.get(name).cloned().unwrap_or(EntryKind::File))
    };
    if directory.written.len() > FEW_FILES {
        // A listing does not contain the target of a symlink.
        changes.extend(directory.kinds.iter().map(|kind| entry(&kind.name)));
        changes.push(Change::EntriesChanged(path));
        return changes;
    }
    changes.extend(directory.written.iter().map(entry));
    changes.extend(directory.names_changed.then_some(Change::ListingChanged(path)));
    changes
}

/// A path or name as an executor told it.
pub(super) fn path_of(told: &[u8]) -> PathBuf {
    OsStr::from_bytes(told).into()
}

/// Entry kind of a name that is not a regular file.
fn kind_of(told: &NamedKind) -> EntryKind {
    match told.link.is_empty() {
        true => EntryKind::Directory,
        false => EntryKind::Link(OsStr::from_bytes(&told.link).into()),
    }
}

/// Changes in a directory whose names are the same as before, with the new attributes; `None` if
/// those were not reported, or the mount does not show them. Contents need no invalidation: an open
/// file is one of the replaced ones, and a new open gets the new content.
fn replaced(table: &MountTable, directory: &ChangedDirectory) -> Option<Vec<(Change, Attributes)>> {
    let now = directory.now?;
    let path = PathBuf::from(OsStr::from_bytes(&directory.path));
    let Resolution::Owned(owned) = table.resolve(&path, Path::new("/")) else { return None };
    let is_told = directory.written.len() == directory.written_now.len()
        && directory.removed.is_empty()
        && directory.kinds.is_empty();
    if !is_told
        || directory.written.len() > FEW_FILES
        || table.mount(owned.mount).adapter() != Adapter::Sshfs
    {
        return None;
    }
    let file =
        |name: &bytes::Bytes| Change::EntryIs(path.join(OsStr::from_bytes(name)), EntryKind::File);
    let files = directory.written.iter().map(file).zip(directory.written_now.iter().copied());
    let listing = directory.names_changed.then(|| (Change::ListingChanged(path.clone()), now));
    Some(files.chain(listing).collect())
}

/// Listings of the directories above a path on its mount: one of them changed if it was created.
fn above<'a>(
    table: &'a MountTable,
    path: &'a Path,
    mount: MountId,
) -> impl Iterator<Item = Change> + 'a {
    let is_on_it = move |above: &&Path| {
        matches!(
            table.resolve(above, Path::new("/")),
            Resolution::Owned(owned) if owned.mount == mount
        )
    };
    path.ancestors()
        .skip(1)
        .take_while(is_on_it)
        .map(|above| Change::ListingChanged(above.to_owned()))
}

/// Change for a tree whose executor could not report all changes, or none at all.
pub(super) fn unseen(tree: &Path, adapter: Adapter, is_all_unseen: bool) -> Change {
    match adapter {
        Adapter::Rclone => Change::Anything(tree.to_owned()),
        Adapter::Sshfs if is_all_unseen => Change::Anything(tree.to_owned()),
        _ => Change::EntriesChanged(tree.to_owned()),
    }
}

/// Invalidates the mounts' caches. Takes as long as the mounts do, up to a deadline.
pub async fn refresh(gateway: Arc<Gateway>, written: StageChanges) {
    let StageChanges { table, changes, doubtful, owners, files, volumes } = written;
    if !rule::holds(Rule::Coherence) {
        return;
    }
    catch_up(&gateway, &table, volumes).await;
    let mut told = ReportedChanges { changes, doubtful, files };
    if told.changes.is_empty() && told.doubtful.is_empty() {
        return;
    }
    let on_mounts = OnMounts::claim(&gateway, table, &mut told).with_owners(owners);
    // In its own task: directories that were recreated on a server are removed even if the caller
    // gives up.
    let work = tokio::spawn(async move {
        let remnants = Remnants::default();
        let all = forget_all(&gateway, on_mounts, told, &remnants);
        if tokio::time::timeout(DEADLINE, all).await.is_err() {
            tracing::warn!("a mount does not answer; what it shows of changed files may be old");
            remnants.remove().await;
        }
    });
    let _done_or_not = tokio::time::timeout(DEADLINE, work).await;
}

async fn forget_all(
    gateway: &Gateway,
    mut on_mounts: OnMounts,
    told: ReportedChanges,
    remnants: &Remnants,
) {
    on_mounts.take_turns().await;
    let (table, ReportedChanges { changes, doubtful, files }) = (Arc::new(on_mounts), told);
    let outdated = verify::outdated(&table, files).await;
    let (trees, changes) = removed_trees(&table, changes).await;
    let certain = forget(&table, changes);
    let old = async { forget(&table, shown_otherwise(&table, doubtful).await).await };
    let (mut remembered, further) = tokio::join!(certain, old);
    remembered.extend(further);
    let (trees, in_use) = apart(gateway, trees, |tree| &tree.top).await;
    let (shown, there_again) = remake::forget_trees(gateway, &table, trees, remnants).await;
    remembered.extend(shown);
    remembered.extend(forget(&table, there_again).await);
    let (remembered, also_in_use) = apart(gateway, remembered, |directory| directory).await;
    let waited_out =
        in_use.into_iter().map(|tree| tree.top).chain(also_in_use).map(Change::Anything);
    let left = remake::forget(gateway, &table, remembered, remnants)
        .await
        .into_iter()
        .map(Change::Removed);
    at_once(&table, left.chain(waited_out).collect(), wait_for_one).await;
    verify::wait_until_current(&table, outdated).await;
}

/// Waits until volumes have received everything that their executors had to say before the command
/// ended; it arrives at the same time as the command's end. A volume whose executor sent no mark
/// asks for it.
async fn catch_up(gateway: &Gateway, table: &MountTable, volumes: OnVolumes) {
    let OnVolumes { used, changes, marks } = volumes;
    gateway.volumes.caught_up(&marks, changes).await;
    if changes == Changes::Possible {
        for id in used {
            gateway.volumes.catch_up(table.mount(id), &marks).await;
        }
    }
}

/// Takes removed trees on sshfs mounts out of the changes.
///
/// Invariant: names below a directory are looked up on a mount while the directory exists there.
/// Otherwise, a mount that has forgotten the directory notices its removal and keeps the cached
/// names below it.
async fn removed_trees(
    table: &Arc<OnMounts>,
    changes: BTreeSet<Change>,
) -> (Vec<RemovedTree>, BTreeSet<Change>) {
    let (trees, changes) = take_out_trees(changes, |path| is_on_sshfs(table, path));
    let owned = Arc::clone(table);
    let at_their_places = move |tree: &RemovedTree| {
        let real = real_place(&owned, &Change::Removed(tree.top.clone()))?;
        let moved = |paths: &BTreeSet<PathBuf>| {
            let moved =
                paths.iter().filter_map(|path| Some(real.join(path.strip_prefix(&tree.top).ok()?)));
            moved.map(|path| path.components().collect()).collect()
        };
        Some(RemovedTree {
            directories: moved(&tree.directories),
            others: moved(&tree.others),
            top: real,
        })
    };
    (in_parallel(trees, at_their_places).await, changes)
}

/// In one pass, as there may be several hundred thousand changes.
fn take_out_trees(
    mut changes: BTreeSet<Change>,
    is_sshfs: impl Fn(&Path) -> bool,
) -> (Vec<RemovedTree>, BTreeSet<Change>) {
    let removed: Vec<&Path> =
        changes.iter().filter(|c| matches!(c, Change::Removed(_))).map(Change::path).collect();
    let listed = |path: &Path| changes.contains(&Change::ListingChanged(path.to_owned()));
    let mut trees: Vec<RemovedTree> = Vec::new();
    // Entries below a path follow it directly.
    for (number, path) in removed.iter().enumerate() {
        let has_names = removed.get(number + 1).is_some_and(|next| next.starts_with(path));
        match trees.last_mut().filter(|tree| path.starts_with(&tree.top)) {
            Some(tree) if has_names || listed(path) => {
                tree.directories.insert((*path).to_owned());
            }
            Some(tree) => {
                tree.others.insert((*path).to_owned());
            }
            None if has_names && is_sshfs(path) => {
                let directories = BTreeSet::from([(*path).to_owned()]);
                trees.push(RemovedTree {
                    top: (*path).to_owned(),
                    directories,
                    others: BTreeSet::new(),
                });
            }
            None => {}
        }
    }
    let tops: BTreeSet<PathBuf> = trees.iter().map(|tree| tree.top.clone()).collect();
    changes.retain(|change| {
        let before =
            tops.range::<Path, _>((Bound::Unbounded, Bound::Included(change.path()))).next_back();
        !before.is_some_and(|top| change.path().starts_with(top))
    });
    (trees, changes)
}

/// A removed directory with its former entries.
#[derive(Debug)]
pub(super) struct RemovedTree {
    pub top: PathBuf,
    /// Known directories, including the top.
    pub directories: BTreeSet<PathBuf>,
    pub others: BTreeSet<PathBuf>,
}

impl RemovedTree {
    pub fn changes(self) -> impl Iterator<Item = Change> {
        self.directories.into_iter().chain(self.others).map(Change::Removed)
    }
}

/// Splits into directories that may be removed through their mounts, and those with open files
/// ([`open_files`]).
async fn apart<T>(
    gateway: &Gateway,
    all: Vec<T>,
    directory: impl Fn(&T) -> &PathBuf,
) -> (Vec<T>, Vec<T>) {
    if all.is_empty() {
        return (all, Vec::new());
    }
    let directories: BTreeSet<PathBuf> = all.iter().map(|one| directory(one).clone()).collect();
    let in_use = gateway.open_files.above(&gateway.view().table, directories).await;
    all.into_iter().partition(|one| !in_use.contains(directory(one)))
}

/// Invalidates caches; returns directories that the mounts still show.
async fn forget(table: &Arc<OnMounts>, changes: BTreeSet<Change>) -> Vec<PathBuf> {
    at_once(table, beside_listings(&changes), look_up).await;
    at_once(table, changes, refresh_one).await
}

/// Changes that a mount does not show yet. Checking takes one look each, invalidating two or three.
async fn shown_otherwise(table: &Arc<OnMounts>, doubtful: Doubtful) -> BTreeSet<Change> {
    let table = Arc::clone(table);
    let is_otherwise = move |(change, now): &(Change, Attributes)| {
        let path = real_place(&table, change)?;
        let (root, _) = root_around(&table, &path)?;
        let shown = root.metadata(&path).map(|found| Attributes {
            mode: found.mode(),
            size: found.size(),
            mtime_s: found.mtime(),
        });
        shown.ok().is_none_or(|shown| shown != *now).then(|| change.clone())
    };
    in_parallel(doubtful, is_otherwise).await.into_iter().collect()
}

/// Does the work for each change in parallel, and collects the directories that remain.
pub(super) async fn at_once(
    table: &Arc<OnMounts>,
    changes: BTreeSet<Change>,
    work: fn(&OnMounts, &Change) -> io::Result<StaleEntry>,
) -> Vec<PathBuf> {
    let table = Arc::clone(table);
    let began = Instant::now();
    // By now, sshfs's entries from before have expired, however many names a server reports that
    // the mount does not show as reported.
    let is_over = move |table: &OnMounts, change: &Change| {
        began.elapsed() > SSHFS_MEMORY
            && matches!(change, Change::EntryIs(..))
            && is_on_sshfs(table, change.path())
    };
    let work = move |table: &OnMounts, change: &Change| match is_over(table, change) {
        true => Ok(StaleEntry::Nothing),
        false => work(table, change),
    };
    let carry_out = move |change: &Change| match work(&table, change) {
        Ok(StaleEntry::Directory) => real_place(&table, change),
        Ok(StaleEntry::Nothing | StaleEntry::Link) => None,
        Err(error) => {
            // Usually, the command removed the file again, or never created it.
            tracing::debug!(path = %change.path().display(), %error, "nothing to refresh");
            None
        }
    };
    in_parallel(changes.into_iter().collect(), carry_out).await
}

/// Processes all items in separate threads, and collects the results.
pub(super) async fn in_parallel<T, R>(
    items: Vec<T>,
    work: impl Fn(&T) -> Option<R> + Send + Sync + 'static,
) -> Vec<R>
where
    T: Send + Sync + 'static,
    R: Send + 'static,
{
    if items.is_empty() {
        return Vec::new();
    }
    // The thread waits for all others, which may never end.
    let all = in_own_thread(move || {
        let (items, work) = (&items, &work);
        std::thread::scope(|scope| {
            // Distribute round-robin: items of one kind, which take equally long, go to different
            // threads.
            let shares = (0..items.len().min(AT_ONCE)).map(|first| {
                let share = items.iter().skip(first).step_by(AT_ONCE);
                scope.spawn(move || share.filter_map(work).collect::<Vec<_>>())
            });
            let shares: Vec<_> = shares.collect();
            shares.into_iter().flat_map(|share| share.join().unwrap_or_default()).collect()
        })
    });
    all.await.unwrap_or_default()
}

/// Files in directories whose listings will be invalidated. During that, the kernel blocks lookups
/// of their names, so look them up first.
fn beside_listings(changes: &BTreeSet<Change>) -> BTreeSet<Change> {
    let is_beside = |change: &&Change| {
        let listing =
            change.path().parent().map(|parent| Change::ListingChanged(parent.to_owned()));
        matches!(change, Change::FileWritten(_) | Change::EntryIs(..))
            && listing.is_some_and(|listing| changes.contains(&listing))
    };
    changes.iter().filter(is_beside).cloned().collect()
}

fn look_up(table: &OnMounts, change: &Change) -> io::Result<StaleEntry> {
    let Some(path) = real_place(table, change) else { return Ok(StaleEntry::Nothing) };
    let Some((root, _)) = root_around(table, &path) else { return Ok(StaleEntry::Nothing) };
    root.metadata(&path).map(|_| StaleEntry::Nothing)
}

/// Returns true if a path that an executor reported is on a mount of its own.
#[must_use]
pub fn is_on_mount_of(table: &MountTable, executor: &fs_mapper::ExecutorName, path: &Path) -> bool {
    matches!(
        table.resolve(path, Path::new("/")),
        Resolution::Owned(owned) if owned.executor == *executor
    )
}

/// Mount that holds a path from a server, opened at its root.
pub(super) fn root_around<'t>(
    table: &'t MountTable,
    path: &Path,
) -> Option<(MountRoot, &'t Mount)> {
    let Resolution::Owned(owned) = table.resolve(path, Path::new("/")) else { return None };
    let mount = table.mount(owned.mount);
    let opened = mount.open_root();
    if let Err(error) = &opened {
        tracing::debug!(
            mount = %mount.path.as_path().display(),
            %error,
            "nothing is done on this mount"
        );
    }
    Some((opened.ok()?, mount))
}

/// Resolves a change's path at this moment; operations reach it from its mount's root
/// ([`MountRoot`]) without following symlinks. The server controls symlinks on a mount: one that
/// leads off that server's mounts is not followed, or the server could make us open, list or touch
/// anything on this machine. A change of a name applies to the name, which may be a symlink; a
/// change of contents applies to its target.
pub(super) fn real_place(table: &MountTable, change: &Change) -> Option<PathBuf> {
    let path = change.path();
    let Resolution::Owned(told) = table.resolve(path, Path::new("/")) else { return None };
    let by_name = || Some(path.parent()?.canonicalize().ok()?.join(path.file_name()?));
    let real = match change {
        Change::Removed(_) | Change::NameChanged(_) | Change::EntryIs(..) => by_name()?,
        Change::FileWritten(_)
        | Change::ListingChanged(_)
        | Change::EntriesChanged(_)
        | Change::Anything(_) => match path.canonicalize() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => by_name()?,
            real => real.ok()?,
        },
    };
    if is_on_mount_of(table, &told.executor, &real) {
        return Some(real);
    }
    tracing::warn!(?path, "a link leads off its server's mounts; nothing is done there");
    None
}

pub(super) fn refresh_one(table: &OnMounts, change: &Change) -> io::Result<StaleEntry> {
    let Some((change, root, coherence)) = really(table, change) else {
        return Ok(StaleEntry::Nothing);
    };
    match &change {
        Change::Removed(path) => match coherence.forget_removed(&root, path)? {
            // Blocks until the mount has forgotten it.
            StaleEntry::Link => coherence.refresh(&root, &change).map(|()| StaleEntry::Nothing),
            left => Ok(left),
        },
        other => coherence.refresh(&root, other).map(|()| StaleEntry::Nothing),
    }
}

/// A change with resolved path, its mount and adapter.
fn really(
    table: &OnMounts,
    change: &Change,
) -> Option<(Change, MountRoot, &'static dyn Coherence)> {
    let real = real_place(table, change)?;
    let (root, mount) = root_around(table, &real)?;
    let told = table.owners_around(change.path(), &real, mount);
    Some((change.at(real), root.with_owners(told), mount.coherence()))
}

fn wait_for_one(table: &OnMounts, change: &Change) -> io::Result<StaleEntry> {
    let Some((change, root, coherence)) = really(table, change) else {
        return Ok(StaleEntry::Nothing);
    };
    coherence.refresh(&root, &change).map(|()| StaleEntry::Nothing)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn removed_directories_are_taken_out_with_all_that_was_in_them() {
        let removed = |text: &str| Change::Removed(text.into());
        let below =
            ["/m/a", "/m/a/b", "/m/a/b/c", "/m/a/empty", "/m/d/e", "/m/d/e/f", "/n/g", "/n/g/h"];
        let beside = ["/m/a.b", "/m/a-b", "/m/d/ef", "/m/file"];
        let mut changes: BTreeSet<Change> = below.into_iter().chain(beside).map(removed).collect();
        let listing = |text: &str| Change::ListingChanged(text.into());
        changes.extend([
            listing("/m"),
            listing("/m/a/empty"),
            Change::FileWritten("/m/a/new".into()),
        ]);
        let (trees, others) = take_out_trees(changes, |path| path.starts_with("/m"));
        let paths = |all: &BTreeSet<PathBuf>| {
            all.iter().map(|path| path.to_str().unwrap().to_owned()).collect()
        };
        let trees: Vec<(Vec<String>, Vec<String>)> =
            trees.iter().map(|tree| (paths(&tree.directories), paths(&tree.others))).collect();
        let all = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
        let a = (all(&["/m/a", "/m/a/b", "/m/a/empty"]), all(&["/m/a/b/c"]));
        assert_eq!(trees, [a, (all(&["/m/d/e"]), all(&["/m/d/e/f"]))]);
        let left = beside.into_iter().chain(["/n/g", "/n/g/h"]).map(removed).chain([listing("/m")]);
        assert_eq!(others, left.collect());
    }

    #[test]
    fn what_an_executor_saw() {
        let mut directory =
            ChangedDirectory { path: "/mnt/d".into(), names_changed: true, ..Default::default() };
        directory.written = vec!["f".into()];
        directory.removed = vec!["gone".into()];
        let path = |text: &str| PathBuf::from(text);
        let listing = Change::ListingChanged(path("/mnt/d"));
        let removed = Change::Removed(path("/mnt/d/gone"));
        let written = Change::EntryIs(path("/mnt/d/f"), EntryKind::File);
        assert_eq!(seen(&directory, false), [removed.clone(), written.clone(), listing.clone()]);
        assert_eq!(seen(&directory, true), [written, listing]);
        directory.written = vec!["f".into(); FEW_FILES + 1];
        assert_eq!(seen(&directory, false), [removed, Change::EntriesChanged(path("/mnt/d"))]);
    }
}
