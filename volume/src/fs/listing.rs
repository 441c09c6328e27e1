//! Listing of directories: one listing per open directory, a snapshot from its beginning, with the
//! attributes of its files; and directory prefetch, as predicted by [`super::tours`].
//!
//! A directory above the limit for caching is read in parts, as the program goes on. Memory holds
//! only the present part, and the start of each earlier one.

use std::{
    collections::HashSet,
    ffi::OsString,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio::sync::Notify;

use super::{
    Volume,
    kept::{AHEAD_BYTES, Charge, LISTING_BYTES, OPEN_BYTES, Sum, listed_bytes, remembered_bytes},
    readers::By,
    tours::{TourId, Tours},
};
use crate::store::{
    Answer, Caller, Entry, Errno, FileId, Kind, Leases, Listed, Listing, Op, Stamp,
};

#[cfg(doc)]
use super::table::{Node, Table};

/// Names in one answer: about 300 KiB with their attributes, so that a large directory takes few
/// round trips, but the first names don't wait for the last.
const NAMES_AT_ONCE: u32 = 4096;
/// Names in the first answer of a directory prefetch: most directories have fewer, and up to 192
/// prefetches are in progress at a time.
const NAMES_AHEAD: u32 = 512;
/// Limit of names in a directory, against a malicious server's endless listing.
const MOST_NAMES: usize = 1 << 30;

/// An open directory.
#[derive(Debug)]
pub struct Directory {
    number: u64,
    caller: Caller,
    reading: tokio::sync::Mutex<Option<Reading>>,
}

/// Position of an open directory.
#[derive(Debug)]
struct Reading {
    /// Number of names before `part`.
    from: usize,
    part: Part,
    /// Start of each part, for seeking back: number of names before it, and cookie.
    parts: Vec<(usize, u64)>,
    open: Charge,
}

/// Consecutive names of a directory.
#[derive(Debug, Clone)]
pub(super) struct Part {
    pub names: Arc<Vec<Listed>>,
    /// Time at which they were valid.
    seen: Seen,
    /// Cookie of the next part; `None`: this is the last.
    rest: Option<u64>,
}

/// Logical time at which a directory had certain names.
///
/// Invariant: it still has them if [`Leases::ENTRIES`] has been held since that answer, or an
/// earlier one, and this session has not changed them since ([`Table::has_names_of`]).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Seen {
    pub stamp: Stamp,
    /// [`Node::name_changes`] before the request for them.
    pub changes: u64,
}

/// Purpose of a listing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum For {
    /// For a program, which needs all names.
    Program,
    /// Prefetch, which gives up on a large directory.
    Later,
}

/// A name of a directory, for the kernel.
#[derive(Debug, Clone)]
pub struct Name {
    /// One component; `.` and `..` too.
    pub name: OsString,
    /// Offset of the next name.
    pub next: u64,
    /// The file; `None` for `.` and `..`, and for a file that has to be looked up.
    pub entry: Option<Entry>,
    /// Its inode number, as `ls -i` shows it.
    pub inode: u64,
    /// Its file type.
    pub kind: Kind,
    /// Time at which the name referred to the file.
    pub(super) seen: Seen,
}

impl Volume {
    /// opendir(3). The first read checks permissions.
    ///
    /// # Errors
    /// `ESTALE`
    pub fn open_directory(&self, caller: &Caller, number: u64) -> Result<u64, Errno> {
        self.file(number)?;
        let open = self.fresh_number();
        let directory =
            Directory { number, caller: caller.clone(), reading: tokio::sync::Mutex::default() };
        self.directories
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(open, Arc::new(directory));
        Ok(open)
    }

    /// closedir(3)
    pub fn close_directory(&self, open: u64) {
        self.directories.lock().unwrap_or_else(PoisonError::into_inner).remove(&open);
    }

    /// Returns the names from `offset` on, more than fit in one reply. Attributes are included only
    /// if they are valid now.
    ///
    /// # Errors
    /// Those of reading the directory.
    pub async fn read_directory(
        self: &Arc<Self>,
        open: u64,
        offset: u64,
    ) -> Result<Vec<Name>, Errno> {
        self.read_names(open, offset, NAMES_FOR_THE_KERNEL).await
    }

    /// Like [`Self::read_directory`], but for up to `most` files.
    pub(super) async fn read_names(
        self: &Arc<Self>,
        open: u64,
        offset: u64,
        most: usize,
    ) -> Result<Vec<Name>, Errno> {
        let directory = self.directory(open)?;
        let mut place = directory.reading.lock().await;
        // Offset 0 starts a new snapshot, as for rewinddir(3).
        if offset == 0 || place.is_none() {
            *place = None;
            let refusal = self.table().refusal(directory.number);
            let part = if refusal.is_some() {
                Part { names: Arc::default(), seen: Seen::default(), rest: None }
            } else {
                let file = self.born(directory.number).await?;
                self.list_for_a_program(&directory.caller, file).await?
            };
            let part = self.with_pending(directory.number, part);
            let mut open = self.listings.charge();
            open.add(listed_bytes(&part.names));
            *place = Some(Reading { from: 0, part, parts: vec![(0, 0)], open });
        }
        let Some(reading) = place.as_mut() else { return Err(Errno::EIO) };
        let wanted =
            usize::try_from(offset.saturating_sub(2)).unwrap_or(MOST_NAMES).min(MOST_NAMES);
        self.go_to(&directory, reading, wanted).await?;
        let (before, listed) = (reading.from, &reading.part.names);
        let own = self.table().node(directory.number).map_or(0, |node| node.file.inode);
        let dots = [".", ".."].into_iter().zip(1..).map(|(name, next)| Name {
            name: name.into(),
            next,
            entry: None,
            inode: own,
            kind: Kind::Directory,
            seen: Seen::default(),
        });
        let from = usize::try_from(offset).unwrap_or(usize::MAX);
        let table = self.table();
        let files = listed.iter().zip(before as u64 + 3..).skip(wanted - before).take(most).map(
            |(listed, next)| {
                let known = listed
                    .entry
                    .and_then(|entry| table.of(entry.attributes.id))
                    .filter(|node| self.is_good(node));
                let known = known.filter(|node| !self.writes.is_dirty(node.file));
                let entry = known.and_then(|node| {
                    node.attributes.map(|attributes| Entry {
                        attributes,
                        leases: node.leases,
                        stamp: node.stamp,
                    })
                });
                // The number that stat(2) shows.
                let inode = listed
                    .entry
                    .and_then(|entry| table.number_of(entry.attributes.id))
                    .unwrap_or(listed.inode);
                Name {
                    name: listed.name.clone(),
                    next,
                    entry,
                    inode,
                    kind: listed.kind,
                    seen: reading.part.seen,
                }
            },
        );
        Ok(dots.skip(from).chain(files).collect())
    }

    /// Reads forward or back to the part with the `wanted`-th name, if there is one.
    async fn go_to(
        self: &Arc<Self>,
        directory: &Directory,
        reading: &mut Reading,
        wanted: usize,
    ) -> Result<(), Errno> {
        if wanted < reading.from {
            let place =
                reading.parts.iter().rposition(|(from, _)| *from <= wanted).unwrap_or_default();
            reading.parts.truncate(place + 1);
            let (from, cookie) = reading.parts.last().copied().unwrap_or_default();
            reading.from = from;
            reading.part =
                Part { names: Arc::default(), seen: Seen::default(), rest: Some(cookie) };
        }
        while wanted >= reading.from + reading.part.names.len() {
            // Past the end.
            let Some(cookie) = reading.part.rest else { return Ok(()) };
            let file = self.born(directory.number).await?;
            let from = reading.from + reading.part.names.len();
            if from > MOST_NAMES {
                tracing::warn!("the server lists a directory without end");
                return Err(Errno::EIO);
            }
            // Free this part first, so that only one is in memory.
            reading.part.names = Arc::default();
            reading.from = from;
            let changes = self.name_changes(file);
            let (listing, rest) =
                self.ask_for_part(&directory.caller, file, cookie, NAMES_AT_ONCE).await?;
            let seen = Seen { stamp: listing.directory.stamp, changes };
            if reading.parts.last().is_none_or(|(last, _)| last + NAMES_AT_ONCE as usize <= from) {
                reading.parts.push((from, cookie));
            }
            reading.open.set(listed_bytes(&listing.names));
            reading.part = self.with_pending(
                directory.number,
                Part { names: Arc::new(listing.names), seen, rest },
            );
        }
        Ok(())
    }

    /// Appends pending files to the last part, and removes other files of their names.
    fn with_pending(&self, directory: u64, part: Part) -> Part {
        let table = self.table();
        let Some(node) = table.node(directory).filter(|node| !node.pending_names.is_empty()) else {
            return part;
        };
        let others = part
            .names
            .iter()
            .filter(|listed| !node.pending_names.contains_key(&listed.name))
            .cloned();
        let mut names: Vec<Listed> = others.collect();
        if part.rest.is_none() {
            let pending = node.pending_names.iter().filter_map(|(name, number)| {
                let node = table.node(*number)?;
                let attributes = node.attributes?;
                let entry = Some(Entry { attributes, leases: node.leases, stamp: node.stamp });
                Some(Listed {
                    name: name.clone(),
                    cookie: 0,
                    kind: attributes.kind,
                    inode: *number,
                    entry,
                })
            });
            names.extend(pending);
        }
        Part { names: Arc::new(names), ..part }
    }

    fn directory(&self, open: u64) -> Result<Arc<Directory>, Errno> {
        let directories = self.directories.lock().unwrap_or_else(PoisonError::into_inner);
        directories.get(&open).cloned().ok_or(Errno::EBADF)
    }

    /// Returns the number of an open directory, and the caller that opened it.
    pub(super) fn whose_directory(&self, open: u64) -> Result<(u64, Caller), Errno> {
        self.directory(open).map(|directory| (directory.number, directory.caller.clone()))
    }

    /// Like [`Self::list_all`], with prefetch of the directories that the program may list next.
    async fn list_for_a_program(
        self: &Arc<Self>,
        caller: &Caller,
        file: FileId,
    ) -> Result<Part, Errno> {
        let tours = self.note_visited(file);
        tours.iter().for_each(|tour| self.list_ahead(caller, *tour));
        let part = self.list_all(caller, file, For::Program).await?;
        for tour in tours {
            self.heard_of(caller, tour, file, &part.names);
            self.list_ahead(caller, tour);
        }
        Ok(part)
    }

    /// Lists all names of a directory, cached if its lease allows it; of a large one the first
    /// part.
    pub(super) async fn list_all(
        &self,
        caller: &Caller,
        file: FileId,
        wanted: For,
    ) -> Result<Part, Errno> {
        loop {
            let ended = self.listings.ended.notified();
            tokio::pin!(ended);
            ended.as_mut().enable();
            if let Some((names, seen)) = self.remembered_listing(file) {
                return Ok(Part { names, seen, rest: None });
            }
            if !self.listings.is_claimed(file) {
                return self.ask_for_listing(caller, file, wanted).await;
            }
            ended.await;
        }
    }

    async fn ask_for_listing(
        &self,
        caller: &Caller,
        file: FileId,
        wanted: For,
    ) -> Result<Part, Errno> {
        let (changes, has_pending) = (self.name_changes(file), self.has_pending_names(file));
        let mut names: Vec<Listed> = Vec::new();
        let (mut cookie, mut first) = (0, None::<Entry>);
        let mut charge = match wanted {
            For::Program => self.listings.charge(),
            For::Later => self.listings.charge_ahead(),
        };
        let mut limit = if wanted == For::Later { NAMES_AHEAD } else { NAMES_AT_ONCE };
        loop {
            let (part, rest) = self.ask_for_part(caller, file, cookie, limit).await?;
            limit = NAMES_AT_ONCE;
            let first = *first.get_or_insert(part.directory);
            let seen = Seen { stamp: first.stamp, changes };
            let bytes = listed_bytes(&part.names);
            let (most, most_of_one) = match wanted {
                For::Program => (OPEN_BYTES, LISTING_BYTES),
                For::Later => (AHEAD_BYTES, AHEAD_BYTES / 2),
            };
            let has_room =
                charge.add_within(bytes, most) && remembered_bytes(&names) + bytes <= most_of_one;
            names.extend(part.names);
            match rest {
                None => {
                    names.shrink_to_fit();
                    let names = Arc::new(names);
                    let is_small = remembered_bytes(&names) <= LISTING_BYTES;
                    let is_unchanged = !has_pending && self.name_changes(file) == changes;
                    if is_small && is_unchanged && !self.has_pending_names(file) {
                        self.remember_listing(&first, &part.directory, &names);
                    }
                    return Ok(Part { names, seen, rest: None });
                }
                Some(next) if has_room => cookie = next,
                Some(_) if wanted == For::Later => return Err(Errno::EFBIG),
                rest => return Ok(Part { names: Arc::new(names), seen, rest }),
            }
        }
    }

    /// Requests one part; returns the cookie of the next one, too.
    async fn ask_for_part(
        &self,
        caller: &Caller,
        directory: FileId,
        cookie: u64,
        limit: u32,
    ) -> Result<(Listing, Option<u64>), Errno> {
        let op = Op::List { directory, cookie, limit };
        let Answer::Listing(part) = self.ask(caller, op).await? else { return Err(Errno::EPROTO) };
        let rest = part.names.last().map(|listed| listed.cookie).filter(|_| !part.is_last);
        Ok((part, rest))
    }

    fn name_changes(&self, directory: FileId) -> u64 {
        self.table().of(directory).map_or(0, |node| node.name_changes)
    }

    /// Returns true if the directory has pending files.
    fn has_pending_names(&self, directory: FileId) -> bool {
        self.table().of(directory).is_some_and(|node| !node.pending_names.is_empty())
    }

    pub(super) fn tours(&self) -> MutexGuard<'_, Tours> {
        self.tours.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn note_visited(&self, directory: FileId) -> Vec<TourId> {
        let parent = self.table().of(directory).and_then(|node| node.parent);
        self.tours().visited(directory, parent, |parent| self.siblings(parent, directory))
    }

    /// Returns a directory's siblings, beginning with those after it. By name, if the program seems
    /// to be a shell's glob.
    fn siblings(&self, parent: FileId, directory: FileId) -> Vec<FileId> {
        let Some(orders) = self.table().of(parent).and_then(|node| node.orders.clone()) else {
            return Vec::new();
        };
        let is_first = |by| orders.directories(by).first() == Some(&directory);
        let by = if is_first(By::Name) && !is_first(By::Listing) { By::Name } else { By::Listing };
        let after = orders.directories_after(directory, by);
        let before = orders.directories(by).iter().take_while(|other| **other != directory);
        after.iter().chain(before).copied().collect()
    }

    fn note_listed(&self, tour: TourId, directory: FileId, names: &[Listed]) {
        let inside = names.iter().filter(|listed| listed.kind == Kind::Directory);
        let inside: Vec<FileId> =
            inside.filter_map(|listed| Some(listed.entry?.attributes.id)).collect();
        self.tours().listed(tour, directory, names.len(), &inside);
    }

    /// Prefetches the directories that a tour predicts.
    pub(super) fn list_ahead(self: &Arc<Self>, caller: &Caller, tour: TourId) {
        if self.store.lease_limit().is_some() {
            // Without recalls, a listing could not be cached until its use.
            return;
        }
        loop {
            let next = self.tours().next(tour);
            if next.is_empty() {
                return;
            }
            for directory in next {
                if let Some((names, _)) = self.remembered_listing(directory) {
                    self.heard_of(caller, tour, directory, &names);
                } else {
                    let (volume, caller) = (Arc::clone(self), caller.clone());
                    let is_ours = self.listings.claim(directory);
                    tokio::spawn(async move {
                        volume.list_one_ahead(&caller, tour, directory, is_ours).await
                    });
                }
            }
        }
    }

    /// Requests a listing, or waits for a request that is in progress.
    async fn list_one_ahead(
        self: Arc<Self>,
        caller: &Caller,
        tour: TourId,
        directory: FileId,
        is_ours: bool,
    ) {
        match self.list_claimed(caller, directory, is_ours).await {
            Ok(part) => self.heard_of(caller, tour, directory, &part.names),
            // The huge count stops the tour's prefetch until the program has passed it.
            Err(Errno::EFBIG) => self.tours().listed(tour, directory, usize::MAX, &[]),
            Err(_) => return,
        }
        self.list_ahead(caller, tour);
    }

    async fn list_claimed(
        &self,
        caller: &Caller,
        directory: FileId,
        is_ours: bool,
    ) -> Result<Part, Errno> {
        if !is_ours {
            return self.list_all(caller, directory, For::Later).await;
        }
        let listed = self.ask_for_listing(caller, directory, For::Later).await;
        self.listings.give_up(directory);
        listed
    }

    fn heard_of(
        self: &Arc<Self>,
        caller: &Caller,
        tour: TourId,
        directory: FileId,
        names: &[Listed],
    ) {
        self.note_listed(tour, directory, names);
        self.expect_files_of(caller, tour, names);
    }

    fn remembered_listing(&self, file: FileId) -> Option<(Arc<Vec<Listed>>, Seen)> {
        let mut table = self.table();
        let node = table.of(file).filter(|node| node.leases.contains(Leases::ENTRIES))?;
        let names = node.listing.clone().filter(|_| self.is_good(node))?;
        let seen = Seen { stamp: node.entries_since, changes: node.name_changes };
        table.uses(file);
        Some((names, seen))
    }

    /// Caches a listing, if the directory was unchanged from the first part to the last, and there
    /// was no later answer about it.
    fn remember_listing(&self, first: &Entry, last: &Entry, names: &Arc<Vec<Listed>>) {
        let mut table = self.table();
        let is_one = first.attributes.version == last.attributes.version;
        let Some(node) = table.of_mut(last.attributes.id) else { return };
        if !is_one || node.stamp != last.stamp || !node.leases.contains(Leases::ENTRIES) {
            return;
        }
        node.put_listing(names);
        for id in names.iter().filter_map(|listed| Some(listed.entry?.attributes.id)) {
            if let Some(node) = table.of_mut(id) {
                node.parent = Some(last.attributes.id);
            }
        }
        table.uses(last.attributes.id);
        self.drop_surplus(&mut table);
    }
}

/// Directory prefetches in progress, and the charges of listings.
#[derive(Debug, Default)]
pub(super) struct Listings {
    claimed: Mutex<HashSet<FileId>>,
    /// Notified when a prefetch has ended.
    ended: Notify,
    /// Memory of open directories, including listings in progress for them.
    open: Sum,
    /// Memory of prefetches in progress.
    ahead: Sum,
}

impl Listings {
    fn charge(&self) -> Charge {
        Charge::of(&self.open)
    }

    fn charge_ahead(&self) -> Charge {
        Charge::of(&self.ahead)
    }

    fn claimed(&self) -> MutexGuard<'_, HashSet<FileId>> {
        self.claimed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn claim(&self, directory: FileId) -> bool {
        self.claimed().insert(directory)
    }

    fn is_claimed(&self, directory: FileId) -> bool {
        self.claimed().contains(&directory)
    }

    fn give_up(&self, directory: FileId) {
        self.claimed().remove(&directory);
        self.ended.notify_waiters();
    }
}

/// More names than fit into one reply to the kernel (128 KiB).
const NAMES_FOR_THE_KERNEL: usize = 1024;
