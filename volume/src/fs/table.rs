//! Table of files: the kernel's numbers, and attributes and names that are cached under leases. It
//! never waits and never calls the store.
//!
//! Invariant: at most [`super::Settings::most_files`] files are held, apart from those in use. A
//! file is *held* from its first answer until it is evicted ([`Table::take_surplus`]); another
//! answer about it holds it again. An evicted file keeps only its number and its name. A later
//! eviction removes it, once the kernel has forgotten it and no file in use is below it.
//!
//! Invariant: the places of the files ([`Node::at`]) form no cycle, whatever a server answers. A
//! file begins without a place, or is a pending one, which nothing is below; and a file that gets a
//! place is first taken from above that directory ([`Table::place`]). So every way up
//! ([`Table::way_up`]) ends, after as many steps as there are files at most.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    ffi::{OsStr, OsString},
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use tokio::sync::Notify;

use super::{
    acls::{KnownAcls, has_same_rights},
    kept::{KEPT_BYTES, Share, Sum, name_bytes, orders_bytes, remembered_bytes},
    listing::Seen,
    order::{Cursor, Orders},
    surplus::Surplus,
    unborn::{Newborn, Own, Unborn},
};
use crate::store::{
    Attributes, Changes, Entry, Errno, FIRST_PROVISIONAL, FileId, Handle, Kind, Leases, Listed,
    NameIn, Returned, Stamp,
};

/// The kernel's number of the root directory (fuse(4), FUSE_ROOT_ID).
pub const ROOT: u64 = 1;

/// First number for files whose own inode number is taken.
const FIRST_ALIAS: u64 = FIRST_PROVISIONAL;

/// Default limit of files that a volume holds, at about 700 bytes each: a large source tree. An
/// executor has leases for two such volumes of one owner.
pub const MAX_FILES: usize = 100_000;

/// One eviction removes this fraction (1/N) of the files: it scans all files, and recalls wait for
/// the kernel's invalidation, some 40 ms.
const SURPLUS_SHARE: usize = 6;

/// Limit of recalled files whose stamps are kept one by one.
const MAX_RECALLED: usize = 10_000;

/// A file.
#[derive(Debug)]
pub(super) struct Node {
    /// Its id on the wire.
    pub file: FileId,
    /// The kernel's look-up count (FUSE_FORGET).
    pub lookups: u64,
    /// Open handles of it.
    pub handles: Vec<Handle>,
    /// Cached under [`Leases::ATTRIBUTES`].
    pub attributes: Option<Attributes>,
    /// ACLs from the store, cached under [`Leases::ATTRIBUTES`].
    pub acls: Option<Box<KnownAcls>>,
    /// Number of times that [`Leases::ATTRIBUTES`] was not granted, or lost, or this session set an
    /// ACL.
    pub losses: u32,
    /// Attributes of a directory before they were lost.
    pub last: Option<Box<Attributes>>,
    /// Held leases.
    pub leases: Leases,
    /// Stamp of the latest answer about it.
    pub stamp: Stamp,
    /// Time of the request since whose answer it is cached. Later answers are about its attributes
    /// alone, so they make its names no newer; see [`Table::lease_limit`].
    pub cached_since: Instant,
    /// Names that were looked up, cached under [`Leases::ENTRIES`]; `None`: no such name.
    pub names: HashMap<OsString, Option<FileId>>,
    /// Names that the kernel may cache, also negative ones. They outlive `names`, until the
    /// kernel's invalidation.
    pub told: HashSet<OsString>,
    /// All names in order, cached under [`Leases::ENTRIES`].
    pub listing: Option<Arc<Vec<Listed>>>,
    /// True if `names` has all names of the directory.
    pub is_complete: bool,
    /// Its files and directories in each order in which programs open them, from the last listing.
    pub orders: Option<Arc<Orders>>,
    /// Position of the last opened file in `orders`.
    pub cursor: Cursor,
    /// The directory that it was last found in.
    pub parent: Option<FileId>,
    /// Uid of the caller with whose rights its contents were last read.
    pub reader: Option<u32>,
    /// Target of a symbolic link, cached under [`Leases::ATTRIBUTES`].
    pub target: Option<OsString>,
    /// True if the kernel may have stale pages of it, which the next open drops.
    pub pages_doubtful: bool,
    /// Time of the last recall of [`Leases::DATA`].
    pub pages_recalled: Option<Instant>,
    /// Number of single look-ups in it since its names were last dropped.
    pub asked: u32,
    /// Generation that the kernel was sent with the number, constant as long as the number.
    pub generation: u64,
    /// The directory's number and the name that it was last found by.
    pub at: Option<(u64, OsString)>,
    /// Set for a file that this session has created. Under [`Leases::WRITE`] its attributes are
    /// changed in memory, and names are created in a directory.
    pub own: Option<Arc<Own>>,
    /// State of a pending file, which the store does not know yet.
    pub unborn: Option<Box<Newborn>>,
    /// Numbers of the pending files in it, by name. They need no lease.
    pub pending_names: BTreeMap<OsString, u64>,
    /// Attributes that were changed in memory.
    pub changed: Option<Box<Changes>>,
    /// Attributes that are shown instead of the store's after a creation or change in memory.
    pub shown: Option<Box<Shown>>,
    /// Number of our own changes of its names.
    pub name_changes: u64,
    /// Stamp of the answer since which [`Leases::ENTRIES`] has been held, if it is.
    pub entries_since: Stamp,
    /// Error for which it was never created.
    pub fault: Option<Errno>,
    /// Memory of its names.
    pub share: Share,
    /// True if it was evicted, and no answer about it came since.
    is_given_up: bool,
}

/// A file's attributes as shown before it was sent, and as the store has them. A program that
/// stats twice, as tar does, must see the same values: the store's change time differs, and its
/// sizes of directories.
///
/// Invariant: `ours` is shown only while the store's version is that of `theirs`: the file is
/// unchanged since.
#[derive(Debug)]
pub(super) struct Shown {
    ours: Attributes,
    theirs: Attributes,
}

impl Shown {
    /// Returns the attributes to show instead of the store's.
    fn instead_of(&self, told: Attributes) -> Option<Attributes> {
        if told.version != self.theirs.version {
            return None;
        }
        let Attributes { ctime, blocks, .. } = self.ours;
        let size = if told.kind == Kind::Directory { self.ours.size } else { told.size };
        Some(Attributes { ctime, blocks, size, ..told })
    }
}

/// Cached state of a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Known {
    /// The name refers to this file.
    File(FileId),
    /// There is no such name.
    Absent,
    /// Not cached: ask the store.
    Unknown,
}

/// The table of files.
#[derive(Debug)]
pub(super) struct Table {
    nodes: HashMap<u64, Box<Node>>,
    numbers: HashMap<FileId, u64>,
    next_alias: u64,
    recalled: HashMap<FileId, Stamp>,
    /// Files for which [`Leases::WRITE`] was granted.
    writable: HashSet<FileId>,
    /// Answers with a lower stamp are not cached.
    floor: Stamp,
    /// Queue of pending files and changes.
    pub unborn: Unborn,
    /// Memory of all names.
    kept: Sum,
    /// Limit of `kept`; above [`KEPT_BYTES`] only while more names can't be dropped.
    most_kept: usize,
    /// Clock for the LRU order of directories.
    uses: u64,
    /// Number of evicted files in the table.
    given_up: usize,
    /// Configured limit of held files.
    most_files: usize,
    /// Present limit of held files; above `most_files` only while more are in use.
    most_held: usize,
    /// Notified when the limit is exceeded.
    is_full: Arc<Notify>,
    /// Lifetime of what is cached of a file ([`crate::Store::lease_limit`]).
    ///
    /// Invariant: where there is one, everything that is cached of a file was asked for at
    /// [`Node::cached_since`] or later, and is used for that long from then on. The next answer
    /// after that first drops all of it.
    pub lease_limit: Option<Duration>,
}

impl Table {
    pub fn new(root: FileId, most_files: usize) -> Self {
        let mut table = Self {
            nodes: HashMap::new(),
            numbers: HashMap::new(),
            next_alias: FIRST_ALIAS,
            recalled: HashMap::new(),
            writable: HashSet::new(),
            floor: Stamp(0),
            unborn: Unborn::default(),
            kept: Sum::default(),
            most_kept: KEPT_BYTES,
            uses: 0,
            given_up: 0,
            most_files,
            most_held: most_files,
            is_full: Arc::default(),
            lease_limit: None,
        };
        table.insert(ROOT, root);
        table
    }

    fn insert(&mut self, number: u64, file: FileId) {
        let node = Node {
            file,
            lookups: 0,
            handles: Vec::new(),
            attributes: None,
            last: None,
            acls: None,
            losses: 0,
            leases: Leases::empty(),
            stamp: Stamp(0),
            cached_since: crate::clock::now(),
            names: HashMap::new(),
            told: HashSet::new(),
            listing: None,
            is_complete: false,
            orders: None,
            cursor: Cursor::default(),
            parent: None,
            reader: None,
            target: None,
            pages_doubtful: true,
            pages_recalled: None,
            asked: 0,
            generation: file.generation,
            at: None,
            own: None,
            unborn: None,
            pending_names: BTreeMap::new(),
            changed: None,
            shown: None,
            name_changes: 0,
            entries_since: Stamp::default(),
            fault: None,
            share: Share::of(&self.kept),
            is_given_up: false,
        };
        self.nodes.insert(number, Box::new(node));
        if !file.is_provisional() {
            self.numbers.insert(file, number);
        }
        self.look_for_room();
    }

    fn remove(&mut self, number: u64) {
        if let Some(node) = self.nodes.remove(&number) {
            self.given_up -= usize::from(node.is_given_up);
            if self.numbers.get(&node.file) == Some(&number) {
                self.numbers.remove(&node.file);
            }
        }
    }

    /// Inserts a file that the store does not know; returns its number.
    pub fn insert_unborn(&mut self) -> u64 {
        let number = self.next_alias;
        self.next_alias += 1;
        self.insert(number, FileId::provisional(number));
        number
    }

    /// Removes a pending file whose creation failed.
    pub fn discard(&mut self, number: u64) {
        self.remove(number);
    }

    /// Sets the id that the store has given a pending file.
    pub fn bear(&mut self, number: u64, file: FileId) {
        if let Some(node) = self.nodes.get_mut(&number) {
            node.file = file;
            if let Some(attributes) = &mut node.attributes {
                attributes.id = file;
            }
            self.numbers.insert(file, number);
        }
    }

    /// Notes the directory and name by which a file was found.
    pub fn place(&mut self, file: FileId, at: NameIn<'_, u64>) {
        let Some(number) = self.number_of(file).filter(|number| *number != ROOT) else { return };
        let Some(node) = self.node(number) else { return };
        let is_there = |(parent, name): &(u64, OsString)| NameIn { parent: *parent, name } == at;
        if node.at.as_ref().is_some_and(is_there) || !self.take_from_above(number, at.parent) {
            return;
        }
        if let Some(node) = self.node_mut(number) {
            node.at = Some((at.parent, at.name.to_owned()));
        }
    }

    /// Makes a file no ancestor of a directory. Returns false if it must stay one: it is the
    /// directory itself, or has pending files on the way down, of which a server can't know.
    fn take_from_above(&mut self, file: u64, directory: u64) -> bool {
        let is_in_it = |node: &Node| node.at.as_ref().is_some_and(|(parent, _)| *parent == file);
        let child = self.way_up(directory).find(|(_, node)| is_in_it(node)).map(|(at, _)| at);
        match child.and_then(|child| self.node_mut(child)) {
            Some(child) if child.unborn.is_none() => child.at = None,
            Some(_) => return false,
            None => {}
        }
        directory != file
    }

    /// Iterates over a file and its ancestors, with their numbers, as far as they are known.
    pub fn way_up(&self, number: u64) -> impl Iterator<Item = (u64, &Node)> {
        let above = |(_, node): &(u64, &Node)| self.step_of(node.at.as_ref()?.0);
        // The limit is never reached; see the invariant.
        std::iter::successors(self.step_of(number), above).take(self.nodes.len())
    }

    fn step_of(&self, number: u64) -> Option<(u64, &Node)> {
        Some((number, self.node(number)?))
    }

    /// Returns the kernel's number of a file, and allocates it if necessary.
    pub fn number(&mut self, file: FileId) -> u64 {
        if let Some(number) = self.number_of(file) {
            return number;
        }
        let is_free =
            file.inode > ROOT && file.inode < FIRST_ALIAS && !self.nodes.contains_key(&file.inode);
        // The root is shown with its own inode number, too.
        let is_free = is_free && self.node(ROOT).is_none_or(|root| root.file.inode != file.inode);
        let number = if is_free { file.inode } else { self.next_alias };
        self.next_alias += u64::from(!is_free);
        self.insert(number, file);
        number
    }

    /// Makes another directory the root, if it is another: the server's path of the export leads
    /// there now. Nothing is cached of it yet. Other files keep their numbers and ids; those below
    /// the former root are not found by their names any more, so their use fails with `ESTALE`. Of
    /// the root's names those stay that are pending, and those that the kernel must forget.
    pub fn follow_root(&mut self, root: FileId) {
        let Some(node) = self.nodes.get_mut(&ROOT).filter(|node| node.file != root) else { return };
        node.lose(Leases::all());
        node.orders = None;
        node.share.orders.clear();
        (node.stamp, node.entries_since) = (Stamp::default(), Stamp::default());
        (node.last, node.reader) = (None, None);
        node.name_changes += 1;
        let former = std::mem::replace(&mut node.file, root);
        self.numbers.remove(&former);
        self.numbers.insert(root, ROOT);
    }

    /// Marks an evicted file as held again.
    fn hold(&mut self, number: u64) {
        if self.nodes.get_mut(&number).is_some_and(|node| std::mem::take(&mut node.is_given_up)) {
            self.given_up -= 1;
            self.look_for_room();
        }
    }

    fn held(&self) -> usize {
        self.nodes.len() - self.given_up
    }

    fn look_for_room(&self) {
        if self.held() > self.most_held {
            self.is_full.notify_one();
        }
    }

    /// Returns the [`Notify`] for evictions to be made.
    pub fn is_full(&self) -> Arc<Notify> {
        Arc::clone(&self.is_full)
    }

    /// Evicts the files with the oldest answers, if too many are held. `is_used`: true for files
    /// that are in use elsewhere.
    pub fn take_surplus(&mut self, is_used: impl Fn(FileId) -> bool) -> Option<Surplus> {
        if self.held() <= self.most_held {
            return None;
        }
        let surplus_files = (self.most_files / SURPLUS_SHARE).max(1);
        let above = self.above_those(|node| !node.can_go() || is_used(node.file));
        self.remove_given_up(&above);
        let can_go = |node: &Node| !node.is_given_up && node.can_go() && !is_used(node.file);
        let others = self.nodes.iter().filter(|(number, _)| !above.contains(number));
        let mut oldest: Vec<(Stamp, u64)> = others
            .filter(|(_, node)| can_go(node))
            .map(|(number, node)| (node.stamp, *number))
            .collect();
        if oldest.len() > surplus_files {
            oldest.select_nth_unstable(surplus_files);
            oldest.truncate(surplus_files);
        }
        // The latest first: answers about a directory's files are later than the directory's, and
        // the files' dentries keep it in the kernel.
        oldest.sort_unstable_by(|one, other| other.cmp(one));
        if let Some((stamp, _)) = oldest.first() {
            // The stamp of a removed file's last answer is lost.
            self.floor = self.floor.max(Stamp(stamp.0.saturating_add(1)));
        }
        let mut surplus = Surplus::default();
        // Files that the kernel could not drop before may be droppable now.
        let kept = self.nodes.iter().filter(|(_, node)| node.is_given_up).take(surplus_files);
        let kept: Vec<u64> = kept.map(|(number, _)| *number).collect();
        oldest.iter().for_each(|(_, number)| self.give_up(*number, &mut surplus));
        surplus.numbers.extend(kept);
        // If too many are in use, raise the limit, so that not every new file causes a scan.
        let most = if oldest.len() < surplus_files { self.held() + self.most_files / 4 } else { 0 };
        self.most_held = self.most_files.max(most);
        Some(surplus)
    }

    /// Returns the root, and all ancestors of matching files: the files are found again by their
    /// names.
    fn above_those(&self, is_meant: impl Fn(&Node) -> bool) -> HashSet<u64> {
        let mut above = HashSet::from([ROOT]);
        for node in self.nodes.values().filter(|node| is_meant(node)) {
            let mut at = node.at.as_ref().map(|(parent, _)| *parent);
            while let Some(number) = at.filter(|number| above.insert(*number)) {
                at = self.node(number).and_then(|node| node.at.as_ref()).map(|(parent, _)| *parent);
            }
        }
        above
    }

    /// Removes evicted files that the kernel has forgotten since.
    fn remove_given_up(&mut self, above: &HashSet<u64>) {
        let is_gone = |number: &u64, node: &Node| {
            node.is_given_up && node.lookups == 0 && node.can_go() && !above.contains(number)
        };
        let gone: Vec<u64> = self
            .nodes
            .iter()
            .filter(|(number, node)| is_gone(number, node))
            .map(|(number, _)| *number)
            .collect();
        gone.into_iter().for_each(|number| self.remove(number));
    }

    fn give_up(&mut self, number: u64, surplus: &mut Surplus) {
        let Some(node) = self.nodes.get_mut(&number) else { return };
        if !node.leases.is_empty() {
            surplus.returned.push(Returned {
                file: node.file,
                leases: node.leases,
                stamp: node.stamp,
            });
        }
        node.lose(Leases::all());
        node.orders = None;
        node.share.orders.clear();
        let parent = node.parent;
        if node.lookups == 0 {
            self.remove(number);
        } else {
            surplus.numbers.push(number);
            let told = node.take_told();
            if !told.is_empty() {
                surplus.names.push((number, told));
            }
            node.is_given_up = true;
            self.given_up += 1;
        }
        // Without its files' attributes a listing would cause one request per file.
        if let Some(directory) = parent.and_then(|parent| self.of_mut(parent)) {
            directory.listing = None;
        }
    }

    /// Marks the names of a directory as the most recently used.
    pub fn uses(&mut self, directory: FileId) {
        self.uses += 1;
        let uses = self.uses;
        if let Some(node) = self.of_mut(directory) {
            node.share.used = uses;
        }
    }

    /// Returns the memory of all names.
    pub fn kept_bytes(&self) -> usize {
        self.kept.load(Ordering::Relaxed)
    }

    /// Drops the names of the least recently used directories if the limit is exceeded: a quarter
    /// of the memory, so that this is rare. The leases stay, and names are requested again. Returns
    /// the names of these directories that the kernel may cache, and must drop, since a later
    /// recall couldn't list them.
    pub fn drop_surplus(&mut self) -> Vec<(u64, Vec<OsString>)> {
        if self.kept_bytes() <= self.most_kept {
            return Vec::new();
        }
        let droppable =
            self.nodes.iter().filter(|(_, node)| node.share.bytes() > 0 && !node.is_ahead());
        let mut by_use: Vec<(u64, u64)> =
            droppable.map(|(number, node)| (node.share.used, *number)).collect();
        by_use.sort_unstable();
        let mut to_forget = Vec::new();
        for (_, number) in by_use {
            if self.kept_bytes() <= KEPT_BYTES - KEPT_BYTES / 4 {
                break;
            }
            let Some(node) = self.nodes.get_mut(&number) else { continue };
            node.forget_names();
            node.orders = None;
            node.share.orders.clear();
            let told = node.take_told();
            if !told.is_empty() {
                to_forget.push((number, told));
            }
        }
        self.most_kept = KEPT_BYTES.max(self.kept_bytes() + KEPT_BYTES / 4);
        to_forget
    }

    pub fn node(&self, number: u64) -> Option<&Node> {
        self.nodes.get(&number).map(|node| &**node)
    }

    pub fn node_mut(&mut self, number: u64) -> Option<&mut Node> {
        self.nodes.get_mut(&number).map(|node| &mut **node)
    }

    pub fn of(&self, file: FileId) -> Option<&Node> {
        self.node(self.number_of(file)?)
    }

    pub fn of_mut(&mut self, file: FileId) -> Option<&mut Node> {
        self.node_mut(self.number_of(file)?)
    }

    /// Returns the kernel's number of a file, if it has one.
    pub fn number_of(&self, file: FileId) -> Option<u64> {
        if file.is_provisional() {
            return self.nodes.contains_key(&file.inode).then_some(file.inode);
        }
        self.numbers.get(&file).copied()
    }

    /// Iterates over all files with their numbers.
    pub fn iter(&self) -> impl Iterator<Item = (u64, &Node)> {
        self.nodes.iter().map(|(number, node)| (*number, &**node))
    }

    /// Counts a look-up of a file; returns its number.
    pub fn looked_up(&mut self, file: FileId) -> u64 {
        let number = self.number(file);
        if let Some(node) = self.nodes.get_mut(&number) {
            node.lookups += 1;
        }
        number
    }

    /// Subtracts `times` from a file's look-ups.
    pub fn forget(&mut self, number: u64, times: u64) {
        let Some(node) = self.nodes.get_mut(&number) else { return };
        node.lookups = node.lookups.saturating_sub(times);
    }

    /// Caches an answer's entry, as far as its leases allow. Returns true if its attributes are
    /// cached.
    pub fn learn(&mut self, entry: &Entry, asked: Instant) -> bool {
        let file = entry.attributes.id;
        let recalled = self.recalled.get(&file).copied().unwrap_or_default().max(self.floor);
        let number = self.number(file);
        self.hold(number);
        let Some(node) = self.nodes.get_mut(&number) else { return false };
        if entry.stamp < node.stamp {
            return false;
        }
        if entry.stamp < recalled {
            // The answer may be about our own change, which causes no recall: older cached data is
            // stale.
            if !node.is_ahead() {
                node.lose(Leases::all() - Leases::WRITE);
            }
            return false;
        }
        let is_old = self.lease_limit.is_some_and(|limit| asked >= node.cached_since + limit);
        if is_old {
            node.lose(Leases::all() - Leases::WRITE);
        }
        if is_old || node.leases.is_empty() {
            node.cached_since = asked;
        }
        if !node.leases.contains(Leases::ENTRIES) {
            node.entries_since = entry.stamp;
        }
        node.stamp = entry.stamp;
        node.leases = entry.leases;
        if entry.leases.contains(Leases::WRITE) {
            self.writable.insert(file);
        }
        if !entry.leases.contains(Leases::ENTRIES) {
            node.forget_names();
        }
        if node.is_ahead() {
            // Local changes are newer than the answer. ACLs are never changed in memory.
            if let Some(attributes) = &mut node.attributes {
                attributes.acls = entry.attributes.acls;
            }
            return true;
        }
        let may = entry.leases.contains(Leases::ATTRIBUTES);
        if node.attributes.is_none_or(|before| !has_same_rights(&before, &entry.attributes)) {
            node.reader = None;
        }
        let shown = node.shown.as_ref().and_then(|shown| shown.instead_of(entry.attributes));
        if shown.is_none() {
            node.shown = None;
        }
        node.attributes = may.then_some(shown.unwrap_or(entry.attributes));
        if !may {
            node.target = None;
            node.acls = None;
            node.losses = node.losses.wrapping_add(1);
        }
        may
    }

    /// Like [`Self::learn`], for a file that was created or changed in memory and has now arrived:
    /// its shown attributes stay.
    pub fn learn_sent(&mut self, entry: &Entry, asked: Instant) -> bool {
        let number = self.number(entry.attributes.id);
        if let Some(node) = self.nodes.get_mut(&number).filter(|node| !node.is_ahead()) {
            let shown = |ours| Box::new(Shown { ours, theirs: entry.attributes });
            node.shown = node.attributes.map(shown);
        }
        self.learn(entry, asked)
    }

    /// Shows the store's attributes from now on.
    pub fn show_as_sent(&mut self, number: u64) {
        let Some(node) = self.nodes.get_mut(&number) else { return };
        if let (Some(shown), Some(attributes)) = (node.shown.take(), &mut node.attributes) {
            let Attributes { ctime, blocks, size, .. } = shown.theirs;
            *attributes = Attributes { ctime, blocks, size, ..*attributes };
        }
    }

    /// Like [`Self::learn`], but ignores unknown files.
    pub fn learn_known(&mut self, entry: &Entry, now: Instant) {
        if self.number_of(entry.attributes.id).is_some() {
            self.learn(entry, now);
        }
    }

    /// Caches a name from its directory's answer, unless there was a later one about the directory.
    pub fn found(&mut self, directory: &Entry, name: &OsStr, file: Option<FileId>) {
        let id = directory.attributes.id;
        if self.of(id).is_some_and(|node| node.stamp == directory.stamp) {
            self.name(id, name, file);
            if let Some(node) = file.and_then(|file| self.of_mut(file)) {
                node.parent = Some(id);
            }
        }
    }

    /// Returns the cached state of a name.
    pub fn known(&self, at: NameIn<'_, u64>) -> Known {
        let NameIn { parent, name } = at;
        let Some(node) = self.nodes.get(&parent) else { return Known::Unknown };
        if let Some(pending) =
            node.pending_names.get(name).and_then(|number| self.nodes.get(number))
        {
            return Known::File(pending.file);
        }
        if !node.leases.contains(Leases::ENTRIES) {
            return Known::Unknown;
        }
        match node.names.get(name) {
            Some(Some(file)) => Known::File(*file),
            Some(None) => Known::Absent,
            None if node.is_complete => Known::Absent,
            None => Known::Unknown,
        }
    }

    /// Returns true if a directory's names are certainly unchanged since `seen`.
    pub fn has_names_of(&self, directory: u64, seen: Seen) -> bool {
        self.nodes.get(&directory).is_some_and(|node| {
            let is_held = node.leases.contains(Leases::ENTRIES) && node.entries_since <= seen.stamp;
            is_held && node.name_changes == seen.changes
        })
    }

    /// Caches a name, if the directory's leases allow it.
    pub fn name(&mut self, directory: FileId, name: &OsStr, file: Option<FileId>) {
        let Some(node) = self.of_mut(directory) else { return };
        if node.leases.contains(Leases::ENTRIES) {
            node.put_name(name, file);
        }
    }

    /// Applies our own change of a name: the other names stay valid, but not the listing's order.
    pub fn renamed(&mut self, directory: FileId, name: &OsStr, file: Option<FileId>) {
        if let Some(node) = self.of_mut(directory) {
            node.listing = None;
            node.name_changes += 1;
        }
        self.name(directory, name, file);
    }

    /// Drops recalled leases. Returns the file's number, if it is known.
    pub fn recall(&mut self, file: FileId, leases: Leases, stamp: Stamp) -> Option<u64> {
        if self.recalled.len() >= MAX_RECALLED {
            self.floor = self.recalled.values().copied().max().unwrap_or_default().max(self.floor);
            self.recalled.clear();
        }
        let known = self.recalled.entry(file).or_default();
        *known = stamp.max(*known);
        let number = self.number_of(file)?;
        let node = self.nodes.get_mut(&number)?;
        node.lose(leases);
        Some(number)
    }

    /// Drops [`Leases::WRITE`] of up to `most` files; returns these, each with its latest stamp.
    pub fn take_writable(&mut self, most: usize) -> Vec<(FileId, Stamp)> {
        let files: Vec<FileId> = self.writable.iter().copied().take(most).collect();
        let mut taken = Vec::new();
        for file in files {
            self.writable.remove(&file);
            let Some(node) = self.of_mut(file).filter(|node| node.leases.contains(Leases::WRITE))
            else {
                continue;
            };
            node.lose(Leases::WRITE);
            taken.push((file, node.stamp));
        }
        taken
    }

    /// Drops all leases. Answers with stamps below `stamp` are not cached either.
    pub fn lose_all(&mut self, stamp: Stamp) {
        self.floor = self.floor.max(stamp);
        self.nodes.values_mut().for_each(|node| node.lose(Leases::all()));
    }

    /// Notes that the kernel may cache a name of a directory.
    pub fn told(&mut self, at: NameIn<'_, u64>) {
        if let Some(node) = self.nodes.get_mut(&at.parent)
            && !node.told.contains(at.name)
        {
            node.told.insert(at.name.to_owned());
            node.share.told.add(name_bytes(at.name));
        }
    }

    /// Takes the names of a directory that the kernel may cache, to be invalidated.
    pub fn take_told(&mut self, directory: FileId) -> Vec<OsString> {
        self.of_mut(directory).map(Node::take_told).unwrap_or_default()
    }

    /// Like [`Self::take_told`], for all directories, with their numbers.
    pub fn take_all_told(&mut self) -> Vec<(u64, Vec<OsString>)> {
        let with_names = self.nodes.iter_mut().filter(|(_, node)| !node.told.is_empty());
        with_names.map(|(number, node)| (*number, node.take_told())).collect()
    }

    /// Returns the numbers of files and of leases.
    pub fn counts(&self) -> (u64, u64) {
        let leases =
            self.nodes.values().map(|node| u64::from(node.leases.bits().count_ones())).sum();
        (self.nodes.len() as u64, leases)
    }
}

impl Node {
    /// Returns true if the file may be evicted: no handles, and nothing held back.
    fn can_go(&self) -> bool {
        let is_held_back =
            self.is_ahead() || self.leases.contains(Leases::WRITE) || self.fault.is_some();
        self.handles.is_empty() && !is_held_back
    }

    /// Returns true if the file has changes that are not on the store yet.
    pub fn is_ahead(&self) -> bool {
        self.unborn.is_some() || !self.pending_names.is_empty() || self.changed.is_some()
    }

    pub fn is_directory(&self) -> bool {
        self.attributes.is_some_and(|attributes| attributes.kind == Kind::Directory)
    }

    /// Caches a name, regardless of leases.
    pub fn put_name(&mut self, name: &OsStr, file: Option<FileId>) {
        if self.names.insert(name.to_owned(), file).is_none() {
            self.share.names.add(name_bytes(name));
        }
    }

    /// Caches all names of a listing.
    pub fn put_listing(&mut self, names: &Arc<Vec<Listed>>) {
        self.listing = Some(Arc::clone(names));
        self.names = names
            .iter()
            .filter_map(|l| Some((l.name.clone(), Some(l.entry?.attributes.id))))
            .collect();
        // A name whose attributes can't be read exists all the same.
        self.is_complete = names.iter().all(|listed| listed.entry.is_some());
        if !self.is_complete {
            self.listing = None;
        }
        self.orders = Some(Arc::new(Orders::of(names)));
        self.cursor = Cursor::default();
        self.share.names.set(remembered_bytes(names) - orders_bytes(names));
        self.share.orders.set(orders_bytes(names));
    }

    fn take_told(&mut self) -> Vec<OsString> {
        self.share.told.clear();
        std::mem::take(&mut self.told).into_iter().collect()
    }

    fn forget_names(&mut self) {
        // A new map, to free its capacity too.
        self.names = HashMap::new();
        self.share.names.clear();
        self.listing = None;
        self.is_complete = false;
        self.asked = 0;
    }

    /// Moves the changes into the request: later changes go with a later request.
    pub fn send_changes(&mut self, sent: Changes) {
        self.changed = None;
        if let Some(newborn) = &mut self.unborn {
            newborn.sent = Some(sent);
        }
    }

    /// Takes the request's changes back, since it was lost: they go with the next one. Later
    /// changes take precedence.
    pub fn take_changes_back(&mut self) {
        let Some(sent) = self.unborn.as_mut().and_then(|newborn| newborn.sent.take()) else {
            return;
        };
        let since = self.changed.as_deref().copied().unwrap_or_default();
        self.changed = Some(Box::new(Changes {
            mode: since.mode.or(sent.mode),
            uid: since.uid.or(sent.uid),
            gid: since.gid.or(sent.gid),
            ..Changes::default()
        }));
    }

    /// Drops leases, with the data cached under them.
    pub fn lose(&mut self, leases: Leases) {
        if self.unborn.is_some() {
            // No other session knows a pending file.
            return;
        }
        self.leases -= leases;
        if leases.contains(Leases::ATTRIBUTES) {
            self.acls = None;
            self.losses = self.losses.wrapping_add(1);
        }
        if leases.contains(Leases::ATTRIBUTES) && !self.is_ahead() {
            let last = self.attributes.take().filter(|last| last.kind == Kind::Directory);
            self.last = last.map(Box::new).or(self.last.take());
            self.target = None;
            self.reader = None;
        }
        if leases.contains(Leases::ENTRIES) {
            self.forget_names();
        }
        if leases.contains(Leases::DATA) {
            self.pages_doubtful = true;
            self.pages_recalled = Some(crate::clock::now());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{fs::unborn::What, store::Caller};

    const LIMIT: Duration = Duration::from_secs(10);

    fn directory(inode: u64, stamp: u64) -> Entry {
        let id = FileId { inode, generation: inode * 1000 };
        let attributes = Attributes::of_test(id, Kind::Directory);
        Entry { attributes, leases: Leases::ATTRIBUTES | Leases::ENTRIES, stamp: Stamp(stamp) }
    }

    /// As on Btrfs, where each subvolume's top has number 256.
    #[test]
    fn numbers_of_files_differ_from_the_one_that_the_root_is_shown_with() {
        let root = FileId { inode: 256, generation: 1 };
        let mut table = Table::new(root, 100);
        let first = table.number(FileId { inode: 256, generation: 2 });
        let second = table.number(FileId { inode: 256, generation: 3 });
        assert!(first != second && ![first, second].contains(&256), "{first} {second}");
        assert_eq!(table.number(FileId { inode: 257, generation: 4 }), 257);
        assert_eq!(table.number(root), ROOT);
    }

    /// Repeated stats of a directory don't extend the lifetime of its cached names where the server
    /// reports no changes.
    #[test]
    fn names_are_no_longer_remembered_for_what_is_heard_of_their_directory() {
        let file = directory(7, 0).attributes.id;
        for (lease_limit, after_limit) in [(Some(LIMIT), Known::Unknown), (None, Known::Absent)] {
            let mut table = Table::new(FileId { inode: 2, generation: 2 }, 100);
            table.lease_limit = lease_limit;
            let begin = crate::clock::now();
            let number = table.number(file);
            let at = NameIn { parent: number, name: OsStr::new("new") };
            table.learn(&directory(7, 1), begin);
            table.found(&directory(7, 1), at.name, None);
            for (second, stamp) in [(4, 2), (9, 3)] {
                table.learn(&directory(7, stamp), begin + Duration::from_secs(second));
                assert_eq!(table.known(at), Known::Absent);
                assert_eq!(table.node(number).unwrap().cached_since, begin);
            }
            table.learn(&directory(7, 4), begin + LIMIT);
            assert_eq!(table.known(at), after_limit);
            // What is heard from now on is remembered as long.
            table.found(&directory(7, 4), at.name, Some(file));
            table.learn(&directory(7, 5), begin + LIMIT + Duration::from_secs(9));
            assert_eq!(table.known(at), Known::File(file));
        }
    }

    /// A server that lies, or an answer from before a rename.
    #[test]
    fn no_directory_is_above_itself() {
        let mut table = Table::new(FileId { inode: 2, generation: 2 }, 100);
        let files = [7, 8, 9].map(|inode| directory(inode, 0).attributes.id);
        let [above, middle, below] = files.map(|file| table.number(file));
        let name = OsStr::new("n");
        let at = |parent| NameIn { parent, name };
        table.place(files[0], at(ROOT));
        table.place(files[1], at(above));
        table.place(files[2], at(middle));
        assert_eq!(table.path_to(below).map(|names| names.len()), Some(3));
        // In itself, and the root in something: neither is so.
        table.place(files[2], at(below));
        table.place(FileId { inode: 2, generation: 2 }, at(below));
        assert_eq!(table.path_to(below).map(|names| names.len()), Some(3));
        // In what is below it: the later answer counts.
        table.place(files[0], at(below));
        assert_eq!(table.way_up(above).count(), 3);
        assert_eq!(table.path_to(above), None);
        // A pending file stays where it was made.
        let pending = table.insert_unborn();
        let own =
            Arc::new(Own { maker: Caller::default(), attributes: directory(9, 0).attributes });
        let newborn = Newborn::new(What::Directory, &Caller::default(), 0o755, own, None);
        let node = table.node_mut(pending).unwrap();
        (node.unborn, node.at) = (Some(Box::new(newborn)), Some((below, name.to_owned())));
        table.place(files[2], at(pending));
        assert_eq!(table.path_below(pending), Some((below, vec![name.to_owned()])));
    }

    #[test]
    fn another_root_has_none_of_the_names_of_the_former_one() {
        let former = FileId { inode: 2, generation: 2 };
        let (new, file) = (directory(3, 9), directory(7, 0).attributes.id);
        let mut table = Table::new(former, 100);
        let number = table.number(file);
        let at = NameIn { parent: ROOT, name: OsStr::new("n") };
        let told = Entry { attributes: Attributes { id: former, ..new.attributes }, ..new };
        table.learn(&told, crate::clock::now());
        table.found(&told, at.name, Some(file));
        table.told(at);
        assert_eq!(table.known(at), Known::File(file));
        table.follow_root(former);
        assert_eq!(table.known(at), Known::File(file));
        table.follow_root(new.attributes.id);
        assert_eq!(table.known(at), Known::Unknown);
        assert_eq!(
            (table.number_of(new.attributes.id), table.number_of(former)),
            (Some(ROOT), None)
        );
        assert_eq!(table.number_of(file), Some(number), "it may be open");
        assert_eq!(table.take_all_told(), [(ROOT, vec![at.name.to_owned()])]);
    }
}
