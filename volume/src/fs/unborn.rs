//! Pending files: files that exist in memory and in the journal only, until the store has them.
//! This module holds their states and the order in which they are sent. It does not wait and asks
//! no store: `newborn` creates pending files, `births` sends them.
//!
//! # The states of a pending file
//!
//! * `Open`: the contents may change.
//!   * the last close → `Waiting`
//!   * another operation waits for it, or after 200 ms → `Leaving`
//! * `Waiting`: fixed, in the journal, in the queue.
//!   * the next request → `Leaving`
//!   * unlink → gone
//! * `Leaving`: fixed, in a request without an answer.
//!   * created → an ordinary file
//!   * the request is lost → `Waiting`, and it *may exist* on the server
//!   * refused → `Refused`
//! * `Refused`: fixed, in the journal; may exist on the server if it might before.
//!   * a retry → `Waiting`
//!   * unlink (once it is known whether it exists), or `posh volumes recover` → gone
//!
//! Invariant: a file whose close(2) succeeded (and a directory or symbolic link whose mkdir(2) or
//! symlink(2) did) is in the journal and in one of these states until the store has answered that
//! it exists, or the user has removed it. No error, and no lost request, ends a pending file by
//! itself.
//!
//! Guarantees by state (`volume/tests/simulation` tests them):
//!
//! * written (`Open`, and not noted): visible in this volume at once; on the server after fsync(2)
//! * closed, journalled (`Open` and noted (`is_noted`), or `Waiting`): visible in this volume at
//!   once, also after a crash of the gateway; on the server eventually
//! * granted (no state: the lease WRITE of the parent directory (`newborn::is_held`), without which
//!   nothing is noted): no other session looks before it has been sent
//! * flying (`Leaving`): as closed; not changed in memory
//! * landed (an ordinary file, and done in the journal): on the server
//! * refused (`Refused`): visible in this volume, reported by `posh volumes`, and recoverable
//! * unknown (`Waiting`, and `may_be_there`): as closed; on the server once
//!
//! A request whose answer is lost may have been performed. A file that *may exist* is sent again;
//! if its name exists then and has the same kind and contents, it has arrived. A refusal doesn't
//! settle that: a server may refuse (disk full, a parent directory not searchable) before it checks
//! whether the name exists.

use std::{
    collections::{BTreeMap, HashMap},
    ffi::OsString,
    sync::Arc,
    time::Instant,
};

use tokio::sync::OwnedSemaphorePermit;

use super::{
    flights::{FLIGHT_BYTES, FLIGHT_FILES},
    found::Step,
    reserved::ReservedPart,
    table::{Node, ROOT, Table},
};
use crate::store::{Attributes, Caller, Changes, Entry, Errno, FileId, Leases, NameIn, OpenFlags};

/// Owner and attributes of a directory that this session has created, which new files in it
/// inherit.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Own {
    /// Caller that created it.
    pub maker: Caller,
    /// The directory's attributes at its creation: the server's uid and gid of the maker, and the
    /// defaults of a new directory.
    pub attributes: Attributes,
}

/// A pending file.
#[derive(Debug)]
pub(super) struct Newborn {
    pub what: What,
    pub caller: Caller,
    /// Mode at its creation.
    pub mode: u32,
    pub flags: OpenFlags,
    pub own: Arc<Own>,
    pub stage: Stage,
    /// Its number in the journal.
    pub order: u64,
    /// Its place in the queue.
    pub turn: u64,
    /// True if a request to create it was lost: the store may have it.
    pub may_be_there: bool,
    /// Number of times in a row that the store did not know its directory, but found it by name.
    pub searches: usize,
    /// Changes of its attributes in the pending request.
    pub sent: Option<Changes>,
    pub since: Instant,
    /// True if the journal has its present state.
    pub is_noted: bool,
    /// Its shares of the limits for pending files.
    pub room: Room,
}

/// Shares of the limits for pending files.
#[derive(Debug, Default)]
pub(super) struct Room {
    pub _file: Option<OwnedSemaphorePermit>,
    pub bytes: Option<OwnedSemaphorePermit>,
    /// Its part of the store's reservation.
    pub reserved: Option<ReservedPart>,
}

/// Kind and contents of a pending file.
#[derive(Debug)]
pub(super) enum What {
    Regular(Vec<u8>),
    Directory,
    Symlink(OsString),
}

/// State of a pending file; see the module's text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    /// Open, as the open file with that number.
    Open(u64),
    /// In the queue.
    Waiting,
    /// In a request without an answer; not changed in memory any more.
    Leaving,
    /// The store has refused it, with this error.
    Refused(Errno),
}

/// Queue of pending files and changes, in the order in which they became ready.
#[derive(Debug, Default)]
pub(super) struct Unborn {
    last: u64,
    /// Numbers by turn.
    pub(super) queue: BTreeMap<u64, u64>,
    /// Numbers of refused files, by turn.
    pub(super) refused: BTreeMap<u64, u64>,
    /// Number of requests that timed out, since the store was unreachable.
    pub(super) timeouts: u64,
    /// Directories whose attributes must be set: their numbers, with the order of the change.
    pub(super) dirty: BTreeMap<u64, u64>,
    pub(super) leaving: HashMap<u64, u64>,
    open: BTreeMap<u64, u64>,
    pub(super) bytes: usize,
    /// Order up to which waiters need everything on the store.
    pub(super) demanded: u64,
    /// Like `demanded`, for open files.
    demanded_open: u64,
}

/// Extent of a wait: closed files only, or open ones too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Which {
    Closed,
    All,
}

impl Unborn {
    /// Allocates the next order.
    pub fn next(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    /// Makes all further orders higher than that one.
    pub fn begin_above(&mut self, order: u64) {
        self.last = self.last.max(order);
    }

    /// Notes a waiter for everything so far; returns the last order.
    pub fn demand(&mut self, which: Which) -> u64 {
        self.demanded = self.last;
        if which == Which::All {
            self.demanded_open = self.last;
        }
        self.last
    }

    /// Returns true if no request with orders up to `last` is pending.
    pub fn has_landed(&self, last: u64) -> bool {
        self.leaving.values().all(|order| *order > last)
    }

    /// Returns true if it is open, and waiters need it on the store.
    pub fn is_demanded(&self, number: u64) -> bool {
        self.open.get(&number).is_some_and(|order| *order <= self.demanded_open)
    }

    /// Returns the last order.
    pub fn last(&self) -> u64 {
        self.last
    }

    pub fn has_begun(&mut self, number: u64) {
        let order = self.next();
        self.open.insert(number, order);
    }

    /// Queues a closed file; returns its turn.
    pub fn is_ready(&mut self, number: u64, bytes: usize) -> u64 {
        self.open.remove(&number);
        let turn = self.next();
        self.queue.insert(turn, number);
        self.bytes += bytes;
        turn
    }

    /// Queues a file again, with the turn that it had before.
    pub fn is_ready_again(&mut self, number: u64, turn: u64, bytes: usize) {
        self.leaving.remove(&number);
        self.refused.remove(&turn);
        self.queue.insert(turn, number);
        self.bytes += bytes;
    }

    /// Notes that the store has refused a file.
    pub fn is_refused(&mut self, number: u64, turn: u64) {
        self.leaving.remove(&number);
        self.refused.insert(turn, number);
    }

    /// Notes that a directory's attributes must be set, after everything up to `order`.
    pub fn is_dirty(&mut self, number: u64, order: u64) {
        self.dirty.entry(number).or_insert(order);
    }

    /// Notes that an open file is sent in a request of its own; returns its order.
    pub fn leaves(&mut self, number: u64) -> u64 {
        let order = self.open.remove(&number).unwrap_or(self.last);
        self.leaving.insert(number, order);
        order
    }

    pub fn withdraw(&mut self, turn: u64, bytes: usize) {
        if self.queue.remove(&turn).is_some() {
            self.bytes = self.bytes.saturating_sub(bytes);
        }
        self.refused.remove(&turn);
    }

    /// Notes that a request is answered; returns its order.
    pub fn has_arrived(&mut self, number: u64) -> u64 {
        self.leaving.remove(&number).unwrap_or(self.last)
    }

    pub fn will_change_again(&self, number: u64) -> bool {
        self.dirty.contains_key(&number)
    }

    /// Returns true if everything up to `last` is on the store, or refused.
    pub fn is_out(&self, last: u64, which: Which) -> bool {
        let mut orders = self.dirty.values().chain(self.leaving.values());
        let is_open = which == Which::All && self.open.values().any(|order| *order <= last);
        let is_queued = self.queue.first_key_value().is_some_and(|(turn, _)| *turn <= last);
        !is_open && !is_queued && orders.all(|order| *order > last)
    }

    /// Returns true if there is nothing to send, apart from refused files.
    pub fn is_idle(&self) -> bool {
        self.queue.is_empty()
            && self.dirty.is_empty()
            && self.open.is_empty()
            && self.leaving.is_empty()
    }

    /// Returns true if there is something to send without a waiter.
    pub fn has_ready(&self) -> bool {
        !self.queue.is_empty() || !self.dirty.is_empty()
    }

    /// Returns true if the queue is large enough for a request, or has waiters.
    pub fn is_urgent(&self) -> bool {
        let is_large = self.bytes >= FLIGHT_BYTES || self.queue.len() >= FLIGHT_FILES;
        is_large || self.has_ready() && !self.is_out(self.demanded, Which::Closed)
    }

    pub fn is_open_demanded(&self) -> bool {
        self.open.values().any(|order| *order <= self.demanded_open)
    }

    /// Returns the open files that waiters need, or that were created before `begun_before`.
    pub fn overdue(&self, table: &Table, begun_before: Instant) -> Vec<u64> {
        let is_old = |number: &u64| {
            let unborn = table.node(*number).and_then(|node| node.unborn.as_ref());
            unborn.is_some_and(|unborn| unborn.since <= begun_before)
        };
        let overdue = self
            .open
            .iter()
            .filter(|(number, order)| **order <= self.demanded_open || is_old(number));
        overdue.map(|(number, _)| *number).collect()
    }
}

impl Newborn {
    /// Creates a pending file, from a request or from the journal.
    pub fn new(
        what: What,
        caller: &Caller,
        mode: u32,
        own: Arc<Own>,
        file: Option<OwnedSemaphorePermit>,
    ) -> Self {
        Self {
            what,
            caller: caller.clone(),
            mode,
            flags: OpenFlags::empty(),
            own,
            stage: Stage::Waiting,
            order: 0,
            turn: 0,
            may_be_there: false,
            searches: 0,
            sent: None,
            since: crate::clock::now(),
            is_noted: false,
            room: Room { _file: file, ..Room::default() },
        }
    }

    /// Returns the store's error, if it has refused the file.
    pub fn refusal(&self) -> Option<Errno> {
        match self.stage {
            Stage::Refused(errno) => Some(errno),
            _ => None,
        }
    }

    pub fn bytes(&self) -> usize {
        match &self.what {
            What::Regular(data) => data.len(),
            _ => 0,
        }
    }

    /// Returns true if it may be changed in memory: the store does not have it, and no request is
    /// pending.
    pub fn is_here(&self) -> bool {
        self.stage != Stage::Leaving && !self.may_be_there
    }
}

impl Own {
    /// Returns true if the maker is root on the server, too.
    pub fn is_root(&self) -> bool {
        self.maker.uid == 0 && self.attributes.uid == 0
    }
}

impl Table {
    /// Returns the nearest ancestor that the store knows, and the names from it down to a file.
    pub fn path_below(&self, number: u64) -> Option<(u64, Vec<OsString>)> {
        let mut names = Vec::new();
        for (at, node) in self.way_up(number) {
            if node.unborn.is_none() && !names.is_empty() {
                names.reverse();
                return Some((at, names));
            }
            names.push(node.at.as_ref()?.1.clone());
        }
        None
    }

    /// Returns the directory itself, or its nearest ancestor, that the store knows.
    pub fn known_above(&self, directory: u64) -> Option<FileId> {
        let node = self.node(directory)?;
        if node.unborn.is_none() {
            return Some(node.file);
        }
        let (above, _) = self.path_below(directory)?;
        Some(self.node(above)?.file)
    }

    /// Returns the names from the root down to a file, if they are known.
    pub fn path_to(&self, number: u64) -> Option<Vec<OsString>> {
        Some(self.way_to(number)?.into_iter().map(|step| step.name).collect())
    }

    /// Like [`Self::path_to`], with the file of each name.
    pub fn way_to(&self, number: u64) -> Option<Vec<Step>> {
        let mut way = Vec::new();
        for (at, node) in self.way_up(number) {
            if at == ROOT {
                way.reverse();
                return Some(way);
            }
            let name = node.at.as_ref()?.1.clone();
            way.push(Step { number: at, file: node.file, name });
        }
        None
    }

    /// Queues a closed file.
    pub fn is_ready(&mut self, number: u64, bytes: usize) {
        let turn = self.unborn.is_ready(number, bytes);
        if let Some(newborn) = self.node_mut(number).and_then(|node| node.unborn.as_mut()) {
            newborn.turn = turn;
        }
    }

    pub fn is_pending(&self, number: u64) -> bool {
        self.node(number).is_some_and(|node| node.unborn.is_some())
    }

    /// Returns the first refused file whose retry may succeed.
    pub fn first_to_retry(&self) -> Option<u64> {
        let refusal = |number: &u64| self.node(*number)?.unborn.as_ref()?.refusal();
        self.unborn
            .refused
            .values()
            .copied()
            .find(|number| refusal(number).is_some_and(|errno| errno != Errno::ESTALE))
    }

    /// Keeps directories visible that other programs have removed, from `first` down to
    /// `directory`, as long as they contain pending files.
    pub fn keep_removed(&mut self, directory: u64, first: u64) {
        let way: Vec<u64> = self.way_up(directory).map(|(at, _)| at).collect();
        for at in way {
            let Some(node) = self.node_mut(at) else { return };
            let Some((own, (parent, name))) = node.own.clone().zip(node.at.clone()) else { return };
            if node.attributes.is_none() || node.unborn.is_some() {
                return;
            }
            node.unborn = Some(Box::new(Newborn {
                stage: Stage::Refused(Errno::ESTALE),
                ..Newborn::new(What::Directory, &own.maker.clone(), 0o700, own, None)
            }));
            node.leases = Leases::all();
            node.changed = None;
            let turn = self.unborn.next();
            self.unborn.is_refused(at, turn);
            if let Some(newborn) = self.node_mut(at).and_then(|node| node.unborn.as_mut()) {
                newborn.turn = turn;
            }
            if let Some(above) = self.node_mut(parent) {
                above.pending_names.insert(name, at);
                above.name_changes += 1;
            }
            if at == first {
                return;
            }
        }
    }

    /// Notes that the store has just created a directory: if no other session knows it, names may
    /// be created in it in memory from now on.
    pub fn is_own(&mut self, entry: &Entry, maker: &Caller, at: NameIn<'_, u64>) {
        let Some(number) = self.number_of(entry.attributes.id) else { return };
        self.place(entry.attributes.id, at);
        let is_found = self.path_to(number).is_some();
        let Some(node) = self.node_mut(number).filter(|node| is_found && node.stamp == entry.stamp)
        else {
            return;
        };
        if node.leases.contains(Leases::WRITE | Leases::ENTRIES) && node.attributes.is_some() {
            node.own = Some(Arc::new(Own { maker: maker.clone(), attributes: entry.attributes }));
            node.is_complete = true;
        }
    }

    /// Returns the pending file of a name.
    pub fn unborn_child(&self, at: NameIn<'_, u64>) -> Option<(u64, &Node)> {
        let number = *self.node(at.parent)?.pending_names.get(at.name)?;
        Some((number, self.node(number).filter(|node| node.unborn.is_some())?))
    }

    /// Returns the store's error, if it has refused a pending file or a directory above it.
    pub fn refusal(&self, number: u64) -> Option<Errno> {
        let pending = self.way_up(number).map_while(|(_, node)| node.unborn.as_ref());
        pending.map(|newborn| newborn.refusal()).find(Option::is_some)?
    }

    /// Returns the store's error for the first refused file in a directory or below it.
    pub fn refusal_below(&self, directory: u64) -> Option<Errno> {
        let refused = self.unborn.refused.values().copied();
        let mut below = refused.filter(|number| self.is_below(*number, directory));
        below.find_map(|number| self.node(number)?.unborn.as_ref()?.refusal())
    }

    fn is_below(&self, number: u64, directory: u64) -> bool {
        self.way_up(number).any(|(at, _)| at == directory)
    }

    /// Queues a file, or a directory's changes, again after its request was lost.
    pub fn is_lost(&mut self, number: u64) {
        if self.is_pending(number) {
            return self.wait_again(number, true);
        }
        let order = self.unborn.has_arrived(number);
        if self.node(number).is_some_and(|node| node.changed.is_some()) {
            self.unborn.is_dirty(number, order);
        }
    }

    /// Queues a pending file again, after a lost request or for a retry.
    pub fn wait_again(&mut self, number: u64, may_be_there: bool) {
        let Some(node) = self.node_mut(number) else { return };
        let Some(newborn) = &mut node.unborn else { return };
        newborn.stage = Stage::Waiting;
        newborn.may_be_there |= may_be_there;
        let (turn, bytes) = (newborn.turn, newborn.bytes());
        node.take_changes_back();
        self.unborn.is_ready_again(number, turn, bytes);
    }

    /// Notes that the store has refused a file. It stays pending, under its name.
    pub fn refuse(&mut self, number: u64, errno: Errno) {
        self.wait_again(number, false);
        let Some(newborn) = self.node_mut(number).and_then(|node| node.unborn.as_mut()) else {
            return;
        };
        newborn.stage = Stage::Refused(errno);
        newborn.searches = 0;
        let (turn, bytes) = (newborn.turn, newborn.bytes());
        self.unborn.withdraw(turn, bytes);
        self.unborn.is_refused(number, turn);
    }

    /// Removes a file from the retries. Returns true if it was refused before.
    pub fn take_refused(&mut self, number: u64) -> bool {
        let newborn = self.node(number).and_then(|node| node.unborn.as_ref());
        let Some(turn) = newborn.filter(|its| its.refusal().is_some()).map(|its| its.turn) else {
            return false;
        };
        self.unborn.withdraw(turn, 0);
        true
    }

    /// Notes that a file's attributes differ from the store's, by these changes and its times.
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
        let first = unborn.is_ready(11, 0);
        let last = unborn.last();
        assert!(!unborn.is_out(last, Which::Closed));
        unborn.is_ready(12, 0);
        unborn.withdraw(first, 0);
        assert!(unborn.is_out(last, Which::Closed));
        assert!(!unborn.is_out(last, Which::All), "one is open");
        unborn.leaves(10);
        assert!(!unborn.is_out(last, Which::Closed), "and now on its way");
        unborn.has_arrived(10);
        assert!(unborn.is_out(last, Which::All));
    }

    #[test]
    fn a_path_leads_from_the_directory_that_is_known() {
        let mut table = Table::new(root(), 100);
        let unborn = table.insert_unborn();
        assert_eq!(table.path_below(unborn), None, "nobody knows where it is");
        table.node_mut(unborn).unwrap().at = Some((ROOT, "a".into()));
        assert_eq!(table.path_below(unborn), Some((ROOT, vec!["a".into()])));
        assert_eq!(table.path_to(unborn), Some(vec!["a".into()]));
    }
}
