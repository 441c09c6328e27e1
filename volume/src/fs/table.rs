//! What is known of files: which the kernel knows by which number, and what may be remembered of
//! them under leases. No waiting here, and no store.
//!
//! Invariant: at most [`super::Settings::most_files`] files are held, but for those in use. A file
//! is *held* from its first answer until it is given up ([`Table::take_surplus`]); an answer about
//! it holds it again. Of a file that was given up nothing is remembered but its number and its
//! name, and it goes with the next ones, once the kernel has forgotten it and nothing in use lies
//! below it.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    ffi::{OsStr, OsString},
    sync::{Arc, atomic::Ordering},
    time::Instant,
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
    Attributes, Changes, Entry, Errno, FileId, Handle, Kind, Leases, Listed, Returned, Stamp,
};

/// The kernel's number of the root directory (fuse(4), FUSE_ROOT_ID).
pub const ROOT: u64 = 1;

/// Numbers from here on stand for files whose own number is taken.
const FIRST_ALIAS: u64 = 1 << 62;

/// The generation of files that the store does not know yet: their inode is the kernel's number. It
/// is never sent.
const UNBORN: u64 = u64::MAX;

/// Files that a volume holds at most, where nothing else is said, at about 700 bytes each: a large
/// source tree. An executor has leases for two such volumes of one owner.
pub const MAX_FILES: usize = 100_000;

/// That share of the files is given up together: all are looked at to find them, and recalls wait
/// while the kernel forgets them, some 40 ms.
const SURPLUS_SHARE: usize = 6;

/// Recalled files whose stamps are remembered one by one.
const MAX_RECALLED: usize = 10_000;

/// A file.
#[derive(Debug)]
pub(super) struct Node {
    /// Its name on the wire.
    pub file: FileId,
    /// How often the kernel was told of it, less what it has forgotten.
    pub lookups: u64,
    /// Open handles of it.
    pub handles: Vec<Handle>,
    /// Under [`Leases::ATTRIBUTES`].
    pub attributes: Option<Attributes>,
    /// ACLs that the store was asked for, under [`Leases::ATTRIBUTES`].
    pub acls: Option<Box<KnownAcls>>,
    /// How often [`Leases::ATTRIBUTES`] was not given, or lost, or an ACL was set here.
    pub losses: u32,
    /// What we hold.
    pub leases: Leases,
    /// Of the latest answer about it.
    pub stamp: Stamp,
    /// When that answer came, or before.
    pub heard: Instant,
    /// Names that were looked up, under [`Leases::ENTRIES`]; `None`: there is no such name.
    pub names: HashMap<OsString, Option<FileId>>,
    /// Names that the kernel may remember, there or not. They outlive `names`, and go when the
    /// kernel is made to forget them.
    pub told: HashSet<OsString>,
    /// All names in order, under [`Leases::ENTRIES`].
    pub listing: Option<Arc<Vec<Listed>>>,
    /// Whether `names` has all that there are.
    pub is_complete: bool,
    /// What lies in it in the orders of programs, as of the last listing, and how far that has been
    /// gone through.
    pub orders: Option<Arc<Orders>>,
    /// See `orders`.
    pub cursor: Cursor,
    /// The directory that it was last found in.
    pub parent: Option<FileId>,
    /// Whose rights its contents were last read with.
    pub reader: Option<u32>,
    /// Where a symbolic link leads, under [`Leases::ATTRIBUTES`].
    pub target: Option<OsString>,
    /// The kernel may have pages of it from before that are no longer true: dropped with the next
    /// open.
    pub pages_doubtful: bool,
    /// When the lease of its contents was last recalled.
    pub pages_recalled: Option<Instant>,
    /// Names that were asked for one by one since the leases of the directory were lost.
    pub asked: u32,
    /// What the kernel was told with the number, which stays as long as the number.
    pub generation: u64,
    /// The directory's number and the name that it was last found by.
    pub at: Option<(u64, OsString)>,
    /// Of what this session has made; under [`Leases::WRITE`] its attributes are changed in memory,
    /// and names are made in a directory.
    pub own: Option<Arc<Own>>,
    /// Of a file that the store does not know yet.
    pub unborn: Option<Box<Newborn>>,
    /// Numbers of the files in it that the store does not know yet, by name. No lease counts for
    /// them.
    pub pending_names: BTreeMap<OsString, u64>,
    /// What was changed of its attributes in memory.
    pub changed: Option<Box<Changes>>,
    /// What is shown of it in place of what the store says, since it was made or changed in memory.
    pub shown: Option<Box<Shown>>,
    /// Our own changes of its names, counted.
    pub name_changes: u64,
    /// Of the answer since which [`Leases::ENTRIES`] has been held, if it is.
    pub entries_since: Stamp,
    /// Why it never came to be.
    pub fault: Option<Errno>,
    /// What all of its names cost.
    pub share: Share,
    /// Its leases went back, and no answer about it came since.
    is_given_up: bool,
}

/// A file's attributes as they were shown when it was sent, and as the store has them. A program
/// that looks twice, as tar does, must see the same twice: the store gives another time of change,
/// and other sizes of directories.
///
/// Invariant: `ours` is shown only as long as the store's version is that of `theirs`: nobody has
/// changed the file since.
#[derive(Debug)]
pub(super) struct Shown {
    ours: Attributes,
    theirs: Attributes,
}

impl Shown {
    /// What is shown where the store says this.
    fn instead_of(&self, told: Attributes) -> Option<Attributes> {
        if told.version != self.theirs.version {
            return None;
        }
        let Attributes { ctime, blocks, .. } = self.ours;
        let size = if told.kind == Kind::Directory { self.ours.size } else { told.size };
        Some(Attributes { ctime, blocks, size, ..told })
    }
}

/// A name as it is remembered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Known {
    /// There is such a file.
    File(FileId),
    /// There is none.
    Absent,
    /// Somebody has to be asked.
    Unknown,
}

/// All of them.
#[derive(Debug)]
pub(super) struct Table {
    nodes: HashMap<u64, Box<Node>>,
    numbers: HashMap<FileId, u64>,
    next_alias: u64,
    recalled: HashMap<FileId, Stamp>,
    /// Files that we had a right to write.
    writable: HashSet<FileId>,
    /// No answer with a lower stamp is remembered.
    floor: Stamp,
    /// What is on its way to the store.
    pub unborn: Unborn,
    /// What all names cost.
    kept: Sum,
    /// So much may be kept; more than [`KEPT_BYTES`] only while names that can't be dropped are
    /// more.
    most_kept: usize,
    /// So often a directory was used.
    uses: u64,
    /// How many of the files are given up.
    given_up: usize,
    /// So many files may be held.
    most_files: usize,
    /// The same; more only while those in use are more.
    most_held: usize,
    /// More are held.
    is_full: Arc<Notify>,
}

/// Whether the store does not know the file, or did not when it was told of.
pub(super) fn is_provisional(file: FileId) -> bool {
    file.generation == UNBORN && file.inode >= FIRST_ALIAS
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
            acls: None,
            losses: 0,
            leases: Leases::empty(),
            stamp: Stamp(0),
            heard: crate::clock::now(),
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
        if !is_provisional(file) {
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

    /// A file that the store does not know.
    pub fn insert_unborn(&mut self) -> u64 {
        let number = self.next_alias;
        self.next_alias += 1;
        self.insert(number, FileId { inode: number, generation: UNBORN });
        number
    }

    /// It was not made after all.
    pub fn discard(&mut self, number: u64) {
        self.remove(number);
    }

    /// The store knows it from now on.
    pub fn bear(&mut self, number: u64, file: FileId) {
        if let Some(node) = self.nodes.get_mut(&number) {
            node.file = file;
            if let Some(attributes) = &mut node.attributes {
                attributes.id = file;
            }
            self.numbers.insert(file, number);
        }
    }

    /// Notes where a file was found. A pending file is nowhere else than where it was made.
    pub fn place(&mut self, file: FileId, parent: u64, name: &OsStr) {
        if let Some(node) = self.of_mut(file)
            && node
                .at
                .as_ref()
                .is_none_or(|(its, known)| (*its, known.as_os_str()) != (parent, name))
        {
            node.at = Some((parent, name.to_owned()));
        }
    }

    /// The kernel's number of a file, given now if it has none.
    pub fn number(&mut self, file: FileId) -> u64 {
        if let Some(number) = self.number_of(file) {
            return number;
        }
        let is_free =
            file.inode > ROOT && file.inode < FIRST_ALIAS && !self.nodes.contains_key(&file.inode);
        let number = if is_free { file.inode } else { self.next_alias };
        self.next_alias += u64::from(!is_free);
        self.insert(number, file);
        number
    }

    /// One that was given up may be again.
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

    /// Told when there are files to be given up.
    pub fn is_full(&self) -> Arc<Notify> {
        Arc::clone(&self.is_full)
    }

    /// Gives up the files that were asked about longest ago, if too many are held. `is_used` says
    /// of which files more is known elsewhere.
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
        // The latest first: what lies in a directory was asked about after it, and keeps it in the
        // kernel.
        oldest.sort_unstable_by(|one, other| other.cmp(one));
        if let Some((stamp, _)) = oldest.first() {
            // Of a file that goes from the table nobody will know which of its answers was the
            // last.
            self.floor = self.floor.max(Stamp(stamp.0.saturating_add(1)));
        }
        let mut surplus = Surplus::default();
        // What the kernel has kept before, since it was used or lay above what was used, may go
        // now.
        let kept = self.nodes.iter().filter(|(_, node)| node.is_given_up).take(surplus_files);
        let kept: Vec<u64> = kept.map(|(number, _)| *number).collect();
        oldest.iter().for_each(|(_, number)| self.give_up(*number, &mut surplus));
        surplus.numbers.extend(kept);
        // Those in use stay: then they are not looked through for every new one.
        let most = if oldest.len() < surplus_files { self.held() + self.most_files / 4 } else { 0 };
        self.most_held = self.most_files.max(most);
        Some(surplus)
    }

    /// The root, and all directories above such files: by their names these are found again.
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

    /// Those that the kernel has forgotten since they were given up.
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
        // A listing without the attributes of its files would be asked about file by file.
        if let Some(directory) = parent.and_then(|parent| self.of_mut(parent)) {
            directory.listing = None;
        }
    }

    /// The names of a directory are used.
    pub fn uses(&mut self, directory: FileId) {
        self.uses += 1;
        let uses = self.uses;
        if let Some(node) = self.of_mut(directory) {
            node.share.used = uses;
        }
    }

    /// What all names cost.
    pub fn kept_bytes(&self) -> usize {
        self.kept.load(Ordering::Relaxed)
    }

    /// Drops the names of the directories that were not used for longest, if too many are kept: a
    /// quarter of them, so that this is rare. The leases stay, and names are asked for again. What
    /// the kernel was told of these directories, and has to forget, since nobody will know any more
    /// to which names a recall applies.
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

    /// The number of a file that has one.
    pub fn number_of(&self, file: FileId) -> Option<u64> {
        if is_provisional(file) {
            return self.nodes.contains_key(&file.inode).then_some(file.inode);
        }
        self.numbers.get(&file).copied()
    }

    /// Every file with its number.
    pub fn iter(&self) -> impl Iterator<Item = (u64, &Node)> {
        self.nodes.iter().map(|(number, node)| (*number, &**node))
    }

    /// The kernel was told of a file once more.
    pub fn looked_up(&mut self, file: FileId) -> u64 {
        let number = self.number(file);
        if let Some(node) = self.nodes.get_mut(&number) {
            node.lookups += 1;
        }
        number
    }

    /// The kernel has forgotten a file so many times.
    pub fn forget(&mut self, number: u64, times: u64) {
        let Some(node) = self.nodes.get_mut(&number) else { return };
        node.lookups = node.lookups.saturating_sub(times);
    }

    /// Remembers what an answer says of a file, as far as that is allowed. Whether it is.
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
            // It may tell of a change of our own, which nobody recalls from us: what is remembered
            // from before it does not hold.
            if !node.is_ahead() {
                node.lose(Leases::all() - Leases::WRITE);
            }
            return false;
        }
        if !node.leases.contains(Leases::ENTRIES) {
            node.entries_since = entry.stamp;
        }
        node.stamp = entry.stamp;
        node.heard = asked;
        node.leases = entry.leases;
        if entry.leases.contains(Leases::WRITE) {
            self.writable.insert(file);
        }
        if !entry.leases.contains(Leases::ENTRIES) {
            node.forget_names();
        }
        if node.is_ahead() {
            // What was done here since, the store will hear. ACLs are never changed in memory.
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

    /// As [`Self::learn`], of what was made or changed in memory and has arrived as it was: what is
    /// shown of it stays.
    pub fn learn_sent(&mut self, entry: &Entry, asked: Instant) -> bool {
        let number = self.number(entry.attributes.id);
        if let Some(node) = self.nodes.get_mut(&number).filter(|node| !node.is_ahead()) {
            let shown = |ours| Box::new(Shown { ours, theirs: entry.attributes });
            node.shown = node.attributes.map(shown);
        }
        self.learn(entry, asked)
    }

    /// From now on the file is shown as the store has it.
    pub fn show_as_sent(&mut self, number: u64) {
        let Some(node) = self.nodes.get_mut(&number) else { return };
        if let (Some(shown), Some(attributes)) = (node.shown.take(), &mut node.attributes) {
            let Attributes { ctime, blocks, size, .. } = shown.theirs;
            *attributes = Attributes { ctime, blocks, size, ..*attributes };
        }
    }

    /// As [`Self::learn`], of a file that was heard of before.
    pub fn learn_known(&mut self, entry: &Entry, now: Instant) {
        if self.number_of(entry.attributes.id).is_some() {
            self.learn(entry, now);
        }
    }

    /// A name as its directory's answer had it, unless something was heard of the directory since.
    pub fn found(&mut self, directory: &Entry, name: &OsStr, file: Option<FileId>) {
        let id = directory.attributes.id;
        if self.of(id).is_some_and(|node| node.stamp == directory.stamp) {
            self.name(id, name, file);
            if let Some(node) = file.and_then(|file| self.of_mut(file)) {
                node.parent = Some(id);
            }
        }
    }

    /// What is remembered of a name.
    pub fn known(&self, directory: u64, name: &OsStr) -> Known {
        let Some(node) = self.nodes.get(&directory) else { return Known::Unknown };
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

    /// Whether a directory has the names that it had then.
    pub fn has_names_of(&self, directory: u64, seen: Seen) -> bool {
        self.nodes.get(&directory).is_some_and(|node| {
            let is_held = node.leases.contains(Leases::ENTRIES) && node.entries_since <= seen.stamp;
            is_held && node.name_changes == seen.changes
        })
    }

    /// Remembers a name, if its directory's answer allowed it.
    pub fn name(&mut self, directory: FileId, name: &OsStr, file: Option<FileId>) {
        let Some(node) = self.of_mut(directory) else { return };
        if node.leases.contains(Leases::ENTRIES) {
            node.put_name(name, file);
        }
    }

    /// A change of our own: the names are still true but for this one; the order of the listing is
    /// another.
    pub fn renamed(&mut self, directory: FileId, name: &OsStr, file: Option<FileId>) {
        if let Some(node) = self.of_mut(directory) {
            node.listing = None;
            node.name_changes += 1;
        }
        self.name(directory, name, file);
    }

    /// Leases are no more. The number, if the kernel may know the file.
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

    /// Takes away rights to write of so many files; gives these, each with the latest stamp.
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

    /// All leases are no more. `stamp`: answers up to it are not remembered either.
    pub fn lose_all(&mut self, stamp: Stamp) {
        self.floor = self.floor.max(stamp);
        self.nodes.values_mut().for_each(|node| node.lose(Leases::all()));
    }

    /// The kernel may remember a name of a directory from now on.
    pub fn told(&mut self, directory: u64, name: &OsStr) {
        if let Some(node) = self.nodes.get_mut(&directory)
            && !node.told.contains(name)
        {
            node.told.insert(name.to_owned());
            node.share.told.add(name_bytes(name));
        }
    }

    /// Names of a directory that the kernel may remember, and that it is made to forget now.
    pub fn take_told(&mut self, directory: FileId) -> Vec<OsString> {
        self.of_mut(directory).map(Node::take_told).unwrap_or_default()
    }

    /// The same of all directories, by their numbers.
    pub fn take_all_told(&mut self) -> Vec<(u64, Vec<OsString>)> {
        let with_names = self.nodes.iter_mut().filter(|(_, node)| !node.told.is_empty());
        with_names.map(|(number, node)| (*number, node.take_told())).collect()
    }

    /// How many files, and how many leases.
    pub fn counts(&self) -> (u64, u64) {
        let leases =
            self.nodes.values().map(|node| u64::from(node.leases.bits().count_ones())).sum();
        (self.nodes.len() as u64, leases)
    }
}

impl Node {
    /// Whether it is no more than what the store has said of it.
    fn can_go(&self) -> bool {
        let is_held_back =
            self.is_ahead() || self.leases.contains(Leases::WRITE) || self.fault.is_some();
        self.handles.is_empty() && !is_held_back
    }

    /// Whether the store has yet to hear of something that was done here.
    pub fn is_ahead(&self) -> bool {
        self.unborn.is_some() || !self.pending_names.is_empty() || self.changed.is_some()
    }

    pub fn is_directory(&self) -> bool {
        self.attributes.is_some_and(|attributes| attributes.kind == Kind::Directory)
    }

    /// Remembers a name, whatever the leases say.
    pub fn put_name(&mut self, name: &OsStr, file: Option<FileId>) {
        if self.names.insert(name.to_owned(), file).is_none() {
            self.share.names.add(name_bytes(name));
        }
    }

    /// Remembers all names as they were listed.
    pub fn put_listing(&mut self, names: &Arc<Vec<Listed>>) {
        self.listing = Some(Arc::clone(names));
        self.names = names
            .iter()
            .filter_map(|l| Some((l.name.clone(), Some(l.entry?.attributes.id))))
            .collect();
        // A name whose file can't be looked at is there all the same.
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
        // The map's room too.
        self.names = HashMap::new();
        self.share.names.clear();
        self.listing = None;
        self.is_complete = false;
        self.asked = 0;
    }

    /// Forgets what the leases were for.
    /// Its changes leave with it: what is changed from now on comes later.
    pub fn send_changes(&mut self, sent: Changes) {
        self.changed = None;
        if let Some(newborn) = &mut self.unborn {
            newborn.sent = Some(sent);
        }
    }

    /// They did not arrive, and go with the next request.
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

    pub fn lose(&mut self, leases: Leases) {
        if self.unborn.is_some() {
            // Nobody else knows it.
            return;
        }
        self.leases -= leases;
        if leases.contains(Leases::ATTRIBUTES) {
            self.acls = None;
            self.losses = self.losses.wrapping_add(1);
        }
        if leases.contains(Leases::ATTRIBUTES) && !self.is_ahead() {
            self.attributes = None;
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
