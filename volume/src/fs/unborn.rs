//! Pending files: files that exist in memory and in the journal only, until the store has them.
//! This module holds their states and the order in which they are sent. It does not wait and asks
//! no store: `newborn` creates pending files, `births` sends them.
//!
//! # The states of a pending file
//!
//! | state | contents | next state |
//! |---|---|---|
//! | `Open` | may change | the last close → `Waiting`; somebody waits for it, or 200 ms → `Leaving` |
//! | `Waiting` | fixed, in the journal, in the queue | the next request → `Leaving`; unlink → gone |
//! | `Leaving` | fixed, in a request without an answer | created → an ordinary file; the request is lost → `Waiting`, and *may be there*; refused → `Refused` |
//! | `Refused` | fixed, in the journal, may be there if it was before | tried again → `Waiting`; unlink (once it is known whether it is there) or `posh volumes recover` → gone |
//!
//! Invariant: a file whose close(2) succeeded (and a directory or symbolic link whose mkdir(2) or
//! symlink(2) did) is in the journal and in one of these states until the store has answered that
//! it exists, or the user has removed it. No error, and no lost request, ends a pending file by
//! itself.
//!
//! In the words of what is promised (`volume/tests/simulation` holds the promises):
//!
//! | word | is | promised |
//! |---|---|---|
//! | written | `Open`, and not noted | here at once; on the server after fsync(2) |
//! | closed, journalled | `Open` and noted (`is_noted`), or `Waiting` | here at once, also after a death of the gateway; on the server in the end |
//! | granted | no state: the lease WRITE of the directory above (`newborn::is_held`), without which nothing is noted | nobody else looks before it has been sent |
//! | flying | `Leaving` | as closed; not changed in memory |
//! | landed | an ordinary file, and done in the journal | on the server |
//! | refused | `Refused` | here under its name, told by `posh volumes`, and recoverable |
//! | unknown | `Waiting`, and it may be there (`may_be_there`) | as closed; on the server once |
//!
//! A request whose answer is lost may have been carried out. A file that *may be there* is sent
//! again; if its name exists then and has the same kind and contents, it has arrived. A refusal
//! does not settle that: a server may refuse (its disk is full, a directory above can't be
//! searched) before it looks whether the name exists.

use std::{
    collections::{BTreeMap, HashMap},
    ffi::{OsStr, OsString},
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
use crate::store::{Attributes, Caller, Changes, Entry, Errno, FileId, Leases, OpenFlags};

/// Names of a path, as PATH_MAX has room for them: more are a circle, made by renaming at the same
/// time.
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
    /// Its place in the queue.
    pub turn: u64,
    /// A request to create it was lost: the store may have it.
    pub may_be_there: bool,
    /// How often in a row its directory was looked up anew and found, since the store did not know
    /// it.
    pub searches: usize,
    /// What the request that is under way changes of its attributes.
    pub sent: Option<Changes>,
    pub since: Instant,
    /// Whether the journal has it as it is.
    pub is_noted: bool,
    /// Its share of what may be pending.
    pub room: Room,
}

/// A share of what may be pending.
#[derive(Debug, Default)]
pub(super) struct Room {
    pub _file: Option<OwnedSemaphorePermit>,
    pub bytes: Option<OwnedSemaphorePermit>,
    /// Its part of the store's reservation.
    pub reserved: Option<ReservedPart>,
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
    /// In a request without an answer: nothing is changed in memory any more.
    Leaving,
    /// The store has refused it, with this error.
    Refused(Errno),
}

/// What is on its way to the store, by the order in which it became ready.
#[derive(Debug, Default)]
pub(super) struct Unborn {
    last: u64,
    /// Numbers by turn.
    pub(super) queue: BTreeMap<u64, u64>,
    /// Numbers of those that the store has refused, by turn.
    pub(super) refused: BTreeMap<u64, u64>,
    /// How many requests were given up since the store was out of reach for too long.
    pub(super) timeouts: u64,
    /// Directories whose attributes are to be set: by number, since when.
    pub(super) dirty: BTreeMap<u64, u64>,
    pub(super) leaving: HashMap<u64, u64>,
    open: BTreeMap<u64, u64>,
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

    /// It waits for its turn, which is returned.
    pub fn is_ready(&mut self, number: u64, bytes: usize) -> u64 {
        self.open.remove(&number);
        let turn = self.next();
        self.queue.insert(turn, number);
        self.bytes += bytes;
        turn
    }

    /// It keeps the turn that it had before.
    pub fn is_ready_again(&mut self, number: u64, turn: u64, bytes: usize) {
        self.leaving.remove(&number);
        self.refused.remove(&turn);
        self.queue.insert(turn, number);
        self.bytes += bytes;
    }

    /// The store has refused it.
    pub fn is_refused(&mut self, number: u64, turn: u64) {
        self.leaving.remove(&number);
        self.refused.insert(turn, number);
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

    pub fn withdraw(&mut self, turn: u64, bytes: usize) {
        if self.queue.remove(&turn).is_some() {
            self.bytes = self.bytes.saturating_sub(bytes);
        }
        self.refused.remove(&turn);
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
        let is_queued = self.queue.first_key_value().is_some_and(|(turn, _)| *turn <= last);
        !is_open && !is_queued && orders.all(|order| *order > last)
    }

    /// Whether there is nothing to be sent: at most what the store has refused.
    pub fn is_idle(&self) -> bool {
        self.queue.is_empty()
            && self.dirty.is_empty()
            && self.open.is_empty()
            && self.leaving.is_empty()
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
        let overdue = self
            .open
            .iter()
            .filter(|(number, order)| **order <= self.demanded_open || is_old(number));
        overdue.map(|(number, _)| *number).collect()
    }
}

impl Newborn {
    /// As it is made, or found in the journal.
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

    /// Why the store does not take it.
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

    /// Whether it may be changed in memory: the store does not have it, and no request is under
    /// way.
    pub fn is_here(&self) -> bool {
        self.stage != Stage::Leaving && !self.may_be_there
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

    /// The directory, or the nearest one above it, that the store knows.
    pub fn known_above(&self, directory: u64) -> Option<FileId> {
        let node = self.node(directory)?;
        if node.unborn.is_none() {
            return Some(node.file);
        }
        let (above, _) = self.path_below(directory)?;
        Some(self.node(above)?.file)
    }

    /// The names from the root down to a file, if it was found that way.
    pub fn path_to(&self, number: u64) -> Option<Vec<OsString>> {
        Some(self.way_to(number)?.into_iter().map(|step| step.name).collect())
    }

    /// The same with all files on the way.
    pub fn way_to(&self, number: u64) -> Option<Vec<Step>> {
        let mut way = Vec::new();
        let mut at = number;
        while at != ROOT {
            let node = self.node(at)?;
            let (parent, name) = node.at.clone()?;
            way.push(Step { number: at, file: node.file, name });
            at = parent;
            if way.len() > PATH_NAMES {
                return None;
            }
        }
        way.reverse();
        Some(way)
    }

    /// It is closed, and waits for its turn.
    pub fn is_ready(&mut self, number: u64, bytes: usize) {
        let turn = self.unborn.is_ready(number, bytes);
        if let Some(newborn) = self.node_mut(number).and_then(|node| node.unborn.as_mut()) {
            newborn.turn = turn;
        }
    }

    pub fn is_pending(&self, number: u64) -> bool {
        self.node(number).is_some_and(|node| node.unborn.is_some())
    }

    /// The first of those that the store has refused and might take another time.
    pub fn first_to_retry(&self) -> Option<u64> {
        let refusal = |number: &u64| self.node(*number)?.unborn.as_ref()?.refusal();
        self.unborn
            .refused
            .values()
            .copied()
            .find(|number| refusal(number).is_some_and(|errno| errno != Errno::ESTALE))
    }

    /// Others have removed directories, from `first` down to `directory`, in which there are
    /// pending files: they stay visible here, as long as there are any.
    pub fn keep_removed(&mut self, directory: u64, first: u64) {
        let mut at = directory;
        loop {
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
            at = parent;
        }
    }

    /// A directory that the store has just made: if nobody else knows it, its names may be made in
    /// memory from now on.
    pub fn is_own(&mut self, entry: &Entry, maker: &Caller, (parent, name): (u64, &OsStr)) {
        let Some(number) = self.number_of(entry.attributes.id) else { return };
        self.place(entry.attributes.id, parent, name);
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

    /// The unborn file of a name.
    pub fn unborn_child(&self, parent: u64, name: &OsStr) -> Option<(u64, &Node)> {
        let number = *self.node(parent)?.pending_names.get(name)?;
        Some((number, self.node(number).filter(|node| node.unborn.is_some())?))
    }

    /// Why the store does not take a pending file, or a directory above it.
    pub fn refusal(&self, number: u64) -> Option<Errno> {
        let mut at = number;
        loop {
            let node = self.node(at)?;
            let newborn = node.unborn.as_ref()?;
            if let Some(errno) = newborn.refusal() {
                return Some(errno);
            }
            at = node.at.as_ref()?.0;
        }
    }

    /// Why the store does not take the first of those that it has refused, in a directory or below
    /// it.
    pub fn refusal_below(&self, directory: u64) -> Option<Errno> {
        let refused = self.unborn.refused.values().copied();
        let mut below = refused.filter(|number| self.is_below(*number, directory));
        below.find_map(|number| self.node(number)?.unborn.as_ref()?.refusal())
    }

    fn is_below(&self, number: u64, directory: u64) -> bool {
        let mut at = number;
        for _ in 0..PATH_NAMES {
            if at == directory {
                return true;
            }
            match self.node(at).and_then(|node| node.at.as_ref()) {
                Some((parent, _)) if at != ROOT => at = *parent,
                _ => return false,
            }
        }
        false
    }

    /// The request that it went with is lost: it goes with another one.
    pub fn is_lost(&mut self, number: u64) {
        if self.is_pending(number) {
            return self.wait_again(number, true);
        }
        let order = self.unborn.has_arrived(number);
        if self.node(number).is_some_and(|node| node.changed.is_some()) {
            self.unborn.is_dirty(number, order);
        }
    }

    /// The request that it went with was lost, or it is to be tried again.
    pub fn wait_again(&mut self, number: u64, may_be_there: bool) {
        let Some(node) = self.node_mut(number) else { return };
        let Some(newborn) = &mut node.unborn else { return };
        newborn.stage = Stage::Waiting;
        newborn.may_be_there |= may_be_there;
        let (turn, bytes) = (newborn.turn, newborn.bytes());
        node.take_changes_back();
        self.unborn.is_ready_again(number, turn, bytes);
    }

    /// The store has refused it. It stays as it is, under its name.
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

    /// Takes a file out of those that are tried again. Whether it was one.
    pub fn take_refused(&mut self, number: u64) -> bool {
        let newborn = self.node(number).and_then(|node| node.unborn.as_ref());
        let Some(turn) = newborn.filter(|its| its.refusal().is_some()).map(|its| its.turn) else {
            return false;
        };
        self.unborn.withdraw(turn, 0);
        true
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
