//! Files that exist in memory only, for a while: what they are, which of them may go out, and in which order. No
//! waiting here, and no store; they are made in `newborn` and sent by `births`.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    ffi::{OsStr, OsString},
    sync::Arc,
    time::Instant,
};

use tokio::sync::OwnedSemaphorePermit;

use super::{
    flights::{FLIGHT_BYTES, FLIGHT_FILES},
    table::{Known, Node, ROOT, Table},
};
use crate::store::{Attributes, Caller, Changes, Entry, Leases, OpenFlags};

/// Names of a path, as PATH_MAX has room for them: more are a circle, made by renaming at the same time.
const PATH_NAMES: usize = 2048;

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
    pub(super) queue: VecDeque<(u64, u64)>,
    /// Directories whose attributes are to be set: by number, since when.
    pub(super) dirty: BTreeMap<u64, u64>,
    pub(super) leaving: HashMap<u64, u64>,
    open: HashMap<u64, u64>,
    pub(super) bytes: usize,
    /// Somebody waits for all up to here.
    pub(super) demanded: u64,
    /// And for those that are open.
    demanded_open: u64,
}

/// Which of them are waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Which {
    Closed,
    All,
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
            if names.len() > PATH_NAMES {
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
