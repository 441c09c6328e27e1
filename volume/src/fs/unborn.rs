//! Files that exist in memory only, for a while: what they are, which of them may go out, and in which order. No
//! waiting here, and no store; they are made in `newborn` and sent by `births`.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    ffi::{OsStr, OsString},
    sync::Arc,
    time::Instant,
};

use bytes::Bytes;
use tokio::sync::OwnedSemaphorePermit;

use super::table::{Known, Node, ROOT, Table};
use crate::store::{Attributes, Caller, Changes, Entry, Errno, Leases, NewFile, NewTime, OpenFlags, Place, Put, Write};

/// One request's worth of contents: large enough to fill a link.
const FLIGHT_BYTES: usize = 2 << 20;

/// New files of one request, which the server makes one after the other.
const FLIGHT_FILES: usize = 2048;

/// Components of a path on the wire at most; deeper ones wait until their directories are born.
const MAX_DEPTH: usize = 64;

/// What files have that are made in a directory of our own making: what the directory itself got.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Own {
    /// Who made it.
    pub maker: Caller,
    /// How the store has the maker's numbers, and what a new directory has.
    pub attributes: Attributes,
}

/// A file that the store does not know yet.
#[derive(Debug)]
pub(super) struct Newborn {
    pub what: What,
    pub caller: Caller,
    /// As it was made.
    pub mode: u32,
    pub flags: OpenFlags,
    pub own: Arc<Own>,
    pub stage: Stage,
    /// Its number in the journal.
    pub order: u64,
    pub since: Instant,
    /// Whether the journal has it as it is.
    pub is_noted: bool,
    /// Its share of what may be unborn: one file, and its bytes.
    pub room: (OwnedSemaphorePermit, Option<OwnedSemaphorePermit>),
}

/// What it will be.
#[derive(Debug)]
pub(super) enum What {
    Regular(Vec<u8>),
    Directory,
    Symlink(OsString),
}

/// How far it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    /// Open, by that number.
    Open(u64),
    /// In the queue.
    Waiting,
    /// On its way: nothing is changed in memory any more.
    Leaving,
}

/// What is on its way to the store, by the order in which it became ready.
#[derive(Debug, Default)]
pub(super) struct Unborn {
    last: u64,
    queue: VecDeque<(u64, u64)>,
    /// Directories whose attributes are to be set: by number, since when.
    dirty: BTreeMap<u64, u64>,
    leaving: HashMap<u64, u64>,
    open: HashMap<u64, u64>,
    bytes: usize,
    /// Somebody waits for all up to here.
    demanded: u64,
    /// And for those that are open.
    demanded_open: u64,
}

/// Which of them are waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Which {
    Closed,
    All,
}

/// One request.
#[derive(Debug)]
pub(super) struct Flight {
    pub caller: Caller,
    pub writes: Vec<Write>,
    /// Whom each of them is about.
    pub numbers: Vec<u64>,
}

impl Unborn {
    /// An order for what comes next.
    pub fn next(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    /// Orders up to there have been given already.
    pub fn begin_above(&mut self, order: u64) {
        self.last = self.last.max(order);
    }

    /// Somebody waits for all until now: up to where that is.
    pub fn demand(&mut self, which: Which) -> u64 {
        self.demanded = self.last;
        if which == Which::All {
            self.demanded_open = self.last;
        }
        self.last
    }

    /// Whether nothing that left up to there is on its way.
    pub fn has_landed(&self, last: u64) -> bool {
        self.leaving.values().all(|order| *order > last)
    }

    /// Whether somebody waits for this one, which is open.
    pub fn is_demanded(&self, number: u64) -> bool {
        self.open.get(&number).is_some_and(|order| *order <= self.demanded_open)
    }

    /// Of what has come last.
    pub fn last(&self) -> u64 {
        self.last
    }

    pub fn has_begun(&mut self, number: u64) {
        let order = self.next();
        self.open.insert(number, order);
    }

    /// It waits for its turn.
    pub fn is_ready(&mut self, number: u64, bytes: usize) {
        self.open.remove(&number);
        let order = self.next();
        self.queue.push_back((order, number));
        self.bytes += bytes;
    }

    /// Its attributes are to be set, after what came up to there.
    pub fn is_dirty(&mut self, number: u64, order: u64) {
        self.dirty.entry(number).or_insert(order);
    }

    /// It does not go with the others. Its order.
    pub fn leaves(&mut self, number: u64) -> u64 {
        let order = self.open.remove(&number).unwrap_or(self.last);
        self.leaving.insert(number, order);
        order
    }

    pub fn withdraw(&mut self, number: u64, bytes: usize) {
        self.queue.retain(|(_, queued)| *queued != number);
        self.bytes = self.bytes.saturating_sub(bytes);
    }

    /// Its order.
    pub fn has_arrived(&mut self, number: u64) -> u64 {
        self.leaving.remove(&number).unwrap_or(self.last)
    }

    pub fn will_change_again(&self, number: u64) -> bool {
        self.dirty.contains_key(&number)
    }

    /// Whether nothing up to there is on its way any more.
    pub fn is_out(&self, last: u64, which: Which) -> bool {
        let mut orders = self.dirty.values().chain(self.leaving.values());
        let is_open = which == Which::All && self.open.values().any(|order| *order <= last);
        !is_open && self.queue.front().is_none_or(|(order, _)| *order > last) && orders.all(|order| *order > last)
    }

    pub fn is_empty(&self) -> bool {
        self.queue.is_empty() && self.dirty.is_empty() && self.open.is_empty() && self.leaving.is_empty()
    }

    /// Whether there is something to be sent without anybody's asking for it.
    pub fn has_ready(&self) -> bool {
        !self.queue.is_empty() || !self.dirty.is_empty()
    }

    /// Whether it is worth a request already, or somebody waits for it.
    pub fn is_urgent(&self) -> bool {
        let is_large = self.bytes >= FLIGHT_BYTES || self.queue.len() >= FLIGHT_FILES;
        is_large || self.has_ready() && !self.is_out(self.demanded, Which::Closed)
    }

    pub fn is_open_demanded(&self) -> bool {
        self.open.values().any(|order| *order <= self.demanded_open)
    }

    /// Those that are open: asked for, or for so long that they do not wait for their end.
    pub fn overdue(&self, table: &Table, begun_before: Instant) -> Vec<u64> {
        let is_old = |number: &u64| {
            let unborn = table.node(*number).and_then(|node| node.unborn.as_ref());
            unborn.is_some_and(|unborn| unborn.since <= begun_before)
        };
        let overdue = self.open.iter().filter(|(number, order)| **order <= self.demanded_open || is_old(number));
        overdue.map(|(number, _)| *number).collect()
    }
}

impl Newborn {
    pub fn bytes(&self) -> usize {
        match &self.what {
            What::Regular(data) => data.len(),
            _ => 0,
        }
    }

    /// Whether it may be changed in memory.
    pub fn is_here(&self) -> bool {
        self.stage != Stage::Leaving
    }
}

impl Own {
    /// Whether the maker may do everything on the server, too.
    pub fn is_root(&self) -> bool {
        self.maker.uid == 0 && self.attributes.uid == 0
    }
}

impl Table {
    /// The directory that the store knows, and the names down to a file from there.
    pub fn path_below(&self, number: u64) -> Option<(u64, Vec<OsString>)> {
        let mut names = Vec::new();
        let mut at = number;
        while self.node(at)?.unborn.is_some() || names.is_empty() {
            let (parent, name) = self.node(at)?.at.clone()?;
            names.push(name);
            at = parent;
        }
        names.reverse();
        Some((at, names))
    }

    /// The names from the root down to a directory, if it was found that way.
    pub fn path_to(&self, directory: u64) -> Option<Vec<OsString>> {
        let mut names = Vec::new();
        let mut at = directory;
        while at != ROOT {
            let (parent, name) = self.node(at)?.at.clone()?;
            names.push(name);
            at = parent;
            if names.len() > MAX_DEPTH * MAX_DEPTH {
                return None;
            }
        }
        names.reverse();
        Some(names)
    }

    /// A directory that the store has just made: if nobody else knows it, its names may be made in memory from now on.
    pub fn is_own(&mut self, entry: &Entry, maker: &Caller, (parent, name): (u64, &OsStr)) {
        let Some(number) = self.number_of(entry.attributes.id) else { return };
        self.place(entry.attributes.id, parent, name);
        let is_found = self.path_to(number).is_some();
        let Some(node) = self.node_mut(number).filter(|node| is_found && node.stamp == entry.stamp) else { return };
        if node.leases.contains(Leases::WRITE | Leases::ENTRIES) && node.attributes.is_some() {
            node.own = Some(Arc::new(Own { maker: maker.clone(), attributes: entry.attributes }));
            node.is_complete = true;
        }
    }

    /// The unborn file of a name.
    pub fn unborn_child(&self, parent: u64, name: &OsStr) -> Option<(u64, &Node)> {
        let Known::File(file) = self.known(parent, name) else { return None };
        let number = self.number_of(file)?;
        Some((number, self.node(number).filter(|node| node.unborn.is_some())?))
    }

    /// The next request: new files in their order, then what is to be set of directories when no more files of them are coming, or
    /// somebody waits. Those that can't go any more are given apart, with the reason.
    pub fn next_flight(&mut self) -> (Option<Flight>, Vec<(u64, Errno)>) {
        let mut lost = Vec::new();
        let mut flight: Option<Flight> = None;
        let mut bytes = 0;
        while let Some((order, number)) = self.unborn.queue.front().copied() {
            let Some(unborn) = self.node(number).and_then(|node| node.unborn.as_ref()) else {
                self.unborn.queue.pop_front();
                continue;
            };
            let (size, caller) = (unborn.bytes(), unborn.caller.clone());
            let is_full = flight.as_ref().is_some_and(|flight| {
                flight.writes.len() >= FLIGHT_FILES || bytes + size > FLIGHT_BYTES || flight.caller != caller
            });
            if is_full {
                break;
            }
            let put = self.put_of(number);
            if put.is_none() && flight.is_some() {
                break;
            }
            self.unborn.queue.pop_front();
            self.unborn.bytes = self.unborn.bytes.saturating_sub(size);
            let put = match put {
                Some(Ok(put)) => put,
                Some(Err(errno)) => {
                    lost.push((number, errno));
                    continue;
                }
                None => {
                    lost.push((number, Errno::ENAMETOOLONG));
                    continue;
                }
            };
            self.unborn.leaving.insert(number, order);
            bytes += size;
            let flight = flight.get_or_insert_with(|| Flight { caller, writes: Vec::new(), numbers: Vec::new() });
            flight.writes.push(Write::Put(put));
            flight.numbers.push(number);
            self.note_leaving(number, order);
        }
        self.add_sets(&mut flight);
        (flight, lost)
    }

    /// `None`: too deep to go together with its directories.
    fn put_of(&self, number: u64) -> Option<Result<Put, Errno>> {
        let node = self.node(number)?;
        let (Some(unborn), Some(attributes)) = (&node.unborn, &node.attributes) else { return Some(Err(Errno::EIO)) };
        let Some((above, path)) = self.path_below(number) else { return Some(Err(Errno::EIO)) };
        let Some(above) = self.node(above) else { return Some(Err(Errno::EIO)) };
        if let Some(errno) = above.fault {
            return Some(Err(errno));
        }
        if path.len() > MAX_DEPTH {
            return None;
        }
        let what = match &unborn.what {
            What::Regular(data) => NewFile::Regular { data: Bytes::copy_from_slice(data) },
            What::Directory => NewFile::Directory,
            What::Symlink(target) => NewFile::Symlink { target: target.clone() },
        };
        let changes = changes_of(attributes, node.changed);
        Some(Ok(Put { directory: above.file, path, what, mode: unborn.mode, changes }))
    }

    /// The store's directory gets another time by the new name; what is changed of the file from now on comes later.
    fn note_leaving(&mut self, number: u64, order: u64) {
        let parent = self.node(number).and_then(|node| Some(node.at.as_ref()?.0));
        if let Some(node) = self.node_mut(number) {
            node.changed = None;
            if let Some(unborn) = &mut node.unborn {
                unborn.stage = Stage::Leaving;
            }
        }
        if let Some(parent) = parent {
            self.note_changed(parent, Changes::default(), order);
        }
    }

    /// Attributes of a directory are others than the store has, by these changes and its times.
    pub fn note_changed(&mut self, number: u64, changes: Changes, order: u64) {
        let Some(node) = self.node_mut(number) else { return };
        let is_born = node.unborn.is_none();
        let changed = node.changed.get_or_insert_default();
        changed.mode = changes.mode.or(changed.mode);
        changed.uid = changes.uid.or(changed.uid);
        changed.gid = changes.gid.or(changed.gid);
        changed.atime = changes.atime.or(changed.atime);
        if is_born {
            self.unborn.is_dirty(number, order);
        }
    }

    fn add_sets(&mut self, flight: &mut Option<Flight>) {
        let is_last = self.unborn.queue.is_empty();
        let demanded = self.unborn.demanded;
        let dirty: Vec<(u64, u64)> = self.unborn.dirty.iter().map(|(number, order)| (*number, *order)).collect();
        for (number, order) in dirty.into_iter().filter(|(_, order)| is_last || *order <= demanded) {
            let Some(node) = self.node(number).filter(|node| node.unborn.is_none() && node.fault.is_none()) else {
                self.unborn.dirty.remove(&number);
                continue;
            };
            let (Some(own), Some(attributes), Some(changed)) = (&node.own, &node.attributes, node.changed) else {
                self.unborn.dirty.remove(&number);
                continue;
            };
            if flight
                .as_ref()
                .is_some_and(|flight| flight.caller != own.maker || flight.writes.len() >= FLIGHT_FILES * 2)
            {
                continue;
            }
            let write = Write::Set { place: Place::from(node.file), changes: changes_of(attributes, Some(changed)) };
            let caller = own.maker.clone();
            self.unborn.dirty.remove(&number);
            self.unborn.leaving.insert(number, order);
            let flight = flight.get_or_insert_with(|| Flight { caller, writes: Vec::new(), numbers: Vec::new() });
            flight.writes.push(write);
            flight.numbers.push(number);
        }
    }
}

/// What was changed, and the times as they were shown, which so stay what they are.
pub(super) fn changes_of(attributes: &Attributes, changed: Option<Changes>) -> Changes {
    Changes {
        atime: Some(NewTime::At(attributes.atime)),
        mtime: Some(NewTime::At(attributes.mtime)),
        ..changed.unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::FileId;

    fn root() -> FileId {
        FileId { inode: 7, generation: 7 }
    }

    #[test]
    fn what_came_before_is_waited_for_and_nothing_else() {
        let mut unborn = Unborn::default();
        unborn.has_begun(10);
        unborn.is_ready(11, 0);
        let last = unborn.last();
        assert!(!unborn.is_out(last, Which::Closed));
        unborn.is_ready(12, 0);
        unborn.withdraw(11, 0);
        assert!(unborn.is_out(last, Which::Closed));
        assert!(!unborn.is_out(last, Which::All), "one is open");
        unborn.leaves(10);
        assert!(!unborn.is_out(last, Which::Closed), "and now on its way");
        unborn.has_arrived(10);
        assert!(unborn.is_out(last, Which::All));
    }

    #[test]
    fn a_path_leads_from_the_directory_that_is_known() {
        let mut table = Table::new(root());
        let unborn = table.insert_unborn();
        assert_eq!(table.path_below(unborn), None, "nobody knows where it is");
        table.node_mut(unborn).unwrap().at = Some((ROOT, "a".into()));
        assert_eq!(table.path_below(unborn), Some((ROOT, vec!["a".into()])));
        assert_eq!(table.path_to(unborn), Some(vec!["a".into()]));
    }
}
