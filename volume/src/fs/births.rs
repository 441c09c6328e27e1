//! What was made in memory on its way to the store: in the order in which it became ready, many files in one request and one
//! request after the other, so that what one needs is there before it. While one is under way, others gather.
//!
//! Whoever wants to know for sure that the store has something waits for all that came before ([`Volume::bring_out`]). What
//! the store refuses is never silent: the file gives the error from then on, its contents are kept, and the volume's state tells.

use std::{
    collections::HashSet,
    sync::{
        Arc, Mutex, OnceLock, PoisonError, Weak,
        atomic::{AtomicI64, Ordering},
    },
    time::{Duration, Instant, SystemTime},
};

use tokio::{
    sync::{Notify, Semaphore},
    time::timeout_at,
};

use super::{
    Volume,
    files::Open,
    newborn::NEWBORN_BYTES,
    openings::OPEN_LINGER,
    recalls::Invalidate,
    table::{Table, is_provisional},
    unborn::{Stage, What, Which},
};
use crate::{
    journal::{Journal, Record},
    store::{Attributes, Caller, Entry, Errno, FileId, Kind, Leases, Time},
};

/// How long closed files wait for others to go with.
const LINGER: Duration = Duration::from_millis(20);

/// Files that may be unborn at the same time.
const UNBORN_FILES: usize = 20_000;

/// What the births of a volume need.
pub(super) struct Births {
    journal: OnceLock<Journal>,
    /// Room for more of them.
    pub files: Arc<Semaphore>,
    /// There is something to be sent, or somebody waits.
    wake: Notify,
    /// Whenever something has arrived.
    pub arrived: Notify,
    /// By how many nanoseconds the server's clock is ahead.
    clock: AtomicI64,
    /// Files of which the kernel was told something that the server has otherwise since: the time of change, and sizes of directories.
    outdated: Mutex<HashSet<u64>>,
    /// The last that could not be born.
    fault: Mutex<Option<String>>,
}

impl Births {
    pub fn new() -> Arc<Self> {
        Arc::new(Self {
            journal: OnceLock::new(),
            files: Arc::new(Semaphore::new(UNBORN_FILES)),
            wake: Notify::new(),
            arrived: Notify::new(),
            clock: AtomicI64::new(0),
            outdated: Mutex::default(),
            fault: Mutex::new(None),
        })
    }

    pub fn journal(&self) -> Option<&Journal> {
        self.journal.get()
    }

    pub fn fault(&self) -> Option<String> {
        self.fault.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub fn wake(&self) {
        self.wake.notify_one();
    }

    /// The server's clock is ahead by that.
    pub fn set_clock(&self, nanoseconds: i64) {
        self.clock.store(nanoseconds, Ordering::Relaxed);
    }

    /// What the server's clock shows.
    pub fn now(&self) -> Time {
        let since = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
        let ahead = i128::from(self.clock.load(Ordering::Relaxed));
        let nanoseconds = i128::try_from(since.as_nanos()).unwrap_or_default() + ahead;
        Time {
            seconds: i64::try_from(nanoseconds.div_euclid(1_000_000_000)).unwrap_or_default(),
            nanoseconds: u32::try_from(nanoseconds.rem_euclid(1_000_000_000)).unwrap_or_default(),
        }
    }

    /// Notes a file in the journal as it is. Whether that could be done.
    pub fn note(&self, table: &Table, number: u64) -> bool {
        let (Some(journal), Some(record)) = (self.journal(), record_of(table, number)) else { return false };
        journal.note(record).inspect_err(|error| tracing::warn!(%error, "the journal can't be written")).is_ok()
    }

    pub fn is_done(&self, orders: &[u64]) {
        if let Some(journal) = self.journal() {
            journal.done(orders);
        }
    }
}

/// A file as it would be put from the root.
fn record_of(table: &Table, number: u64) -> Option<Record> {
    let newborn = table.node(number)?.unborn.as_ref()?;
    let (above, _) = table.path_below(number)?;
    let put = table.put_of(number)?;
    Some(Record { order: newborn.order, home: table.path_to(above)?, caller: newborn.caller.clone(), put })
}

/// Whether who has made a file may read it: what an open would say.
fn is_readable(maker: &Caller, made: &Attributes) -> bool {
    made.kind == Kind::Regular && maker.uid == made.uid && (maker.uid == 0 || made.mode & 0o400 != 0)
}

/// Sends for as long as there is a volume.
pub(super) async fn send(births: Arc<Births>, volume: Weak<Volume>) {
    loop {
        births.wake.notified().await;
        // As long as something is left, the volume is there.
        let Some(volume) = volume.upgrade() else { return };
        volume.send_unborn().await;
    }
}

impl Volume {
    /// Files of new directories are made in memory from now on, as far as this journal has them.
    /// What it has from before is put where it belongs first.
    ///
    /// # Errors
    /// The store's, which then is asked again by the next one.
    pub async fn keep_journal(&self, (journal, left): (Journal, Vec<Record>)) -> Result<(), Errno> {
        for record in left {
            let outcome = super::replay::put_again(&*self.store, &journal, &record).await?;
            if let Some(message) = outcome {
                tracing::error!("{message}");
                *self.births.fault.lock().unwrap_or_else(PoisonError::into_inner) = Some(message);
            }
        }
        self.table().unborn.begin_above(journal.last_order());
        let _ = self.births.journal.set(journal);
        Ok(())
    }

    async fn send_unborn(self: &Arc<Self>) {
        loop {
            let gathered_by = Instant::now() + LINGER;
            while !self.is_urgent() && timeout_at(gathered_by.into(), self.births.wake.notified()).await.is_ok() {}
            self.open_overdue();
            let (has_ready, is_empty) = {
                let table = self.table();
                (table.unborn.has_ready(), table.unborn.is_empty())
            };
            match (has_ready, is_empty) {
                (_, true) => return,
                (true, _) => self.fly().await,
                // What is open, or on its way by itself, says when it is ready.
                _ => drop(timeout_at((Instant::now() + OPEN_LINGER).into(), self.births.wake.notified()).await),
            }
        }
    }

    fn is_urgent(&self) -> bool {
        let table = self.table();
        table.unborn.is_urgent() || table.unborn.is_open_demanded()
    }

    async fn fly(&self) {
        let (flight, lost) = self.table().next_flight();
        for (number, errno) in lost {
            self.is_stillborn(number, errno);
        }
        let Some(flight) = flight else { return self.births.arrived.notify_waiters() };
        let asked = Instant::now();
        let results = self.store.write(&flight.caller, flight.writes).await;
        let orders: Vec<u64> = match results {
            Ok(results) => {
                let results = results.into_iter().chain(std::iter::repeat(Err(Errno::EPROTO)));
                flight
                    .numbers
                    .into_iter()
                    .zip(results)
                    .filter_map(|(n, result)| self.landed(n, result, asked))
                    .collect()
            }
            Err(errno) => flight.numbers.into_iter().filter_map(|n| self.landed(n, Err(errno), asked)).collect(),
        };
        self.births.is_done(&orders);
        self.births.arrived.notify_waiters();
    }

    /// What became of one write; its number in the journal, if it is done.
    fn landed(&self, number: u64, result: Result<Entry, Errno>, asked: Instant) -> Option<u64> {
        let is_unborn = self.table().node(number).is_some_and(|node| node.unborn.is_some());
        match (result, is_unborn) {
            (Ok(entry), true) => self.is_born(number, &entry, asked),
            (Err(errno), true) => {
                self.is_stillborn(number, errno);
                None
            }
            (result, false) => {
                self.is_set(number, result, asked);
                None
            }
        }
    }

    /// The store has it. Its number in the journal.
    fn is_born(&self, number: u64, entry: &Entry, asked: Instant) -> Option<u64> {
        let mut table = self.table();
        let newborn = table.node_mut(number)?.unborn.take()?;
        self.take_over(&mut table, number, entry, asked);
        let node = table.node_mut(number)?;
        let (leases, is_directory) = (node.leases, node.is_directory());
        node.pages_doubtful = !leases.contains(Leases::DATA);
        node.own = Some(Arc::clone(&newborn.own));
        if is_readable(&newborn.caller, &entry.attributes) {
            node.reader = Some(newborn.caller.uid);
        }
        let is_leased = leases.contains(Leases::ATTRIBUTES) && (!is_directory || leases.contains(Leases::ENTRIES));
        let doubtful = (!is_leased).then(|| table.take_told(entry.attributes.id));
        drop(table);
        if let (What::Regular(data), true) = (newborn.what, leases.contains(Leases::DATA))
            && !data.is_empty()
        {
            self.chunks.put((entry.attributes.id, 0), entry.attributes.version, data.into());
        }
        self.give_back(newborn.room);
        if doubtful.is_some() {
            // What the kernel was told, nobody holds true any more.
            let _ = self.invalidate.send(Invalidate::of(number, doubtful));
        } else {
            self.is_outdated(number);
        }
        Some(newborn.order)
    }

    /// What the store says of a file that it did not know before.
    pub(super) fn take_over(&self, table: &mut Table, number: u64, entry: &Entry, asked: Instant) {
        let id = entry.attributes.id;
        table.bear(number, id);
        if let Some(node) = table.node_mut(number) {
            node.leases = Leases::empty();
        }
        if !table.learn_sent(entry, asked)
            && let Some(node) = table.node_mut(number)
        {
            node.lose(Leases::all());
        }
        let order = table.unborn.has_arrived(number);
        if table.node(number).is_some_and(|node| node.changed.is_some()) {
            table.unborn.is_dirty(number, order);
        }
        let Some((parent, name)) = table.node(number).and_then(|node| node.at.clone()) else { return };
        if let Some(node) = table.node_mut(parent) {
            node.children = node.children.saturating_sub(1);
            if let Some(known) = node.names.get_mut(&name).filter(|known| known.is_some_and(is_provisional)) {
                *known = Some(id);
            }
        }
    }

    /// Attributes were set.
    fn is_set(&self, number: u64, result: Result<Entry, Errno>, asked: Instant) {
        let mut table = self.table();
        table.unborn.has_arrived(number);
        let before = table.node(number).and_then(|node| node.attributes);
        let is_changed_again = table.unborn.will_change_again(number);
        if let Some(node) = table.node_mut(number).filter(|_| !is_changed_again) {
            node.changed = None;
        }
        match result {
            Ok(entry) => {
                table.learn_sent(&entry, asked);
                drop(table);
                self.is_outdated(number);
                let (key, new) = ((entry.attributes.id, 0), entry.attributes);
                // The contents are those of the version before, all that there are.
                let same = before.filter(|before| before.size == new.size && new.size <= NEWBORN_BYTES);
                let kept = same.and_then(|before| self.chunks.get(key, before.version));
                kept.into_iter().for_each(|kept| self.chunks.put(key, new.version, kept));
            }
            Err(errno) => {
                drop(table);
                self.tell_fault(number, &format!("attributes could not be set: {errno}"));
            }
        }
    }

    pub(super) fn give_back(
        &self,
        room: (tokio::sync::OwnedSemaphorePermit, Option<tokio::sync::OwnedSemaphorePermit>),
    ) {
        let bytes = room.1.as_ref().map_or(0, tokio::sync::OwnedSemaphorePermit::num_permits);
        self.writes.dirty.fetch_sub(bytes as u64, Ordering::Relaxed);
    }

    /// It never came to be, though somebody was told so.
    pub(super) fn is_stillborn(&self, number: u64, errno: Errno) {
        let mut table = self.table();
        let record = record_of(&table, number);
        let Some(node) = table.node_mut(number) else { return };
        let Some(newborn) = node.unborn.take() else { return };
        node.fault = Some(errno);
        node.lose(Leases::all());
        node.attributes = None;
        let (file, at) = (node.file, node.at.clone());
        table.unborn.has_arrived(number);
        if let Some((parent, name)) = &at
            && let Some(node) = table.node_mut(*parent)
        {
            node.children = node.children.saturating_sub(1);
            node.names.remove(name);
            node.is_complete = false;
            let _ = self.invalidate.send(Invalidate::of(*parent, Some(vec![name.clone()])));
        }
        drop(table);
        let order = newborn.order;
        self.give_back(newborn.room);
        self.note_fault(file, errno);
        let _ = self.invalidate.send(Invalidate::of(number, None));
        let kept = record.as_ref().and_then(|record| {
            let path: std::path::PathBuf = record.home.iter().chain(&record.put.path).collect();
            let kept = self.births.journal()?.keep_lost(&record.put);
            Some(super::replay::message(&path, errno, kept))
        });
        self.tell_fault(number, &kept.unwrap_or_else(|| format!("a new file could not be made: {errno}")));
        self.births.is_done(&[order]);
    }

    /// What was told of a file stays as long as nobody compares it with what the server has.
    pub(super) fn is_outdated(&self, number: u64) {
        let mut outdated = self.births.outdated.lock().unwrap_or_else(PoisonError::into_inner);
        outdated.insert(number);
        let are_many = outdated.len() >= UNBORN_FILES;
        drop(outdated);
        if are_many {
            self.show_as_sent();
        }
    }

    /// From now on the kernel asks anew.
    pub(super) fn show_as_sent(&self) {
        let outdated = std::mem::take(&mut *self.births.outdated.lock().unwrap_or_else(PoisonError::into_inner));
        let mut table = self.table();
        outdated.iter().for_each(|number| table.show_as_sent(*number));
        drop(table);
        outdated.into_iter().for_each(|number| self.forget_attributes(number));
    }

    fn tell_fault(&self, number: u64, message: &str) {
        tracing::error!(number, "{message}");
        *self.births.fault.lock().unwrap_or_else(PoisonError::into_inner) = Some(message.to_owned());
    }

    /// Returns when the store has all that was made here until now, or has refused it.
    pub(super) async fn bring_out(&self, which: Which) {
        let last = {
            let mut table = self.table();
            if table.unborn.is_empty() {
                return;
            }
            table.unborn.demand(which)
        };
        self.births.wake();
        self.arrived_when(|table| table.unborn.is_out(last, which)).await;
    }

    /// Returns when nothing is on its way any more that was when this was called: what it is, is known then.
    pub(super) async fn landing(&self) {
        let last = self.table().unborn.last();
        self.arrived_when(|table| table.unborn.has_landed(last)).await;
    }

    pub(super) async fn arrived_when(&self, is_so: impl Fn(&Table) -> bool) {
        loop {
            let arrived = self.births.arrived.notified();
            tokio::pin!(arrived);
            arrived.as_mut().enable();
            if is_so(&self.table()) {
                return;
            }
            arrived.await;
        }
    }

    /// The file of a number, as the store knows it, with all in it that was made here.
    pub(super) async fn born(self: &Arc<Self>, number: u64) -> Result<FileId, Errno> {
        let stage = {
            let table = self.table();
            let node = table.node(number).ok_or(Errno::ESTALE)?;
            node.unborn.as_ref().map(|newborn| newborn.stage)
        };
        match stage {
            Some(Stage::Open(_)) => self.bear_open(number).await,
            Some(_) => self.bring_out(Which::Closed).await,
            None => {}
        }
        // Also files in it that are open: the store would make a second one of the same name.
        let is_ahead = self.table().node(number).is_some_and(|node| node.unborn.is_none() && node.is_ahead());
        if is_ahead {
            self.bring_out(Which::All).await;
        }
        let table = self.table();
        let node = table.node(number).ok_or(Errno::ESTALE)?;
        match node.fault {
            Some(errno) => Err(errno),
            None if is_provisional(node.file) => Err(Errno::EIO),
            None => Ok(node.file),
        }
    }

    /// The open file, which the store knows then.
    pub(super) async fn born_open(self: &Arc<Self>, open: u64) -> Result<Arc<Open>, Errno> {
        let found = self.open_file(open)?;
        let ahead = {
            let table = self.table();
            let number = table.number_of(found.file);
            number.filter(|number| table.node(*number).is_some_and(|node| node.is_ahead() || node.fault.is_some()))
        };
        let Some(number) = ahead else {
            // It may have been made on the server between the two looks.
            return if is_provisional(found.file) { self.open_file(open) } else { Ok(found) };
        };
        self.born(number).await?;
        self.open_file(open)
    }
}
