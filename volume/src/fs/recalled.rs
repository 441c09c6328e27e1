//! Unanswered recalls, bounded against a malicious server. Each file has at most one task for
//! recalls of write leases, and one for the others; further recalls wait for the task's next turn.
//! Calls carry many answers each, and a few calls are in progress at a time.
//!
//! Invariant: each recall is answered with its own stamp and leases. Merged answers, with the later
//! stamp, would return leases that were granted between the two recalls.

use std::{
    collections::{HashMap, hash_map::Entry},
    sync::{Arc, MutexGuard, PoisonError, Weak},
    time::Duration,
};

use tokio::sync::{Notify, Semaphore};

use super::{
    Volume,
    forgetting::Share,
    recalls::{Invalidate, Names, Taken},
    unborn::Which,
};
use crate::{
    leases::MAX_LEASED_FILES,
    store::{Caller, FileId, Leases, Op, Returned, Store},
};

/// Time for which a recall waits for the kernel's invalidation, which blocks on readers of the
/// pages. After it, the recall is answered all the same.
pub(crate) const KERNEL_PATIENCE: Duration = Duration::from_secs(5);

/// Limit of unanswered recalls: our server has no more for all its clients.
const MAX_RECALLED: usize = MAX_LEASED_FILES;

/// Limit of calls with answers in progress: on a slow link further answers gather.
const ANSWERING_CALLS: usize = 64;

/// Limit of answers in one call, about 30 bytes each.
const ANSWERS_OF_A_CALL: usize = 4096;

/// One of a file's two queues: with [`Leases::WRITE`] for recalls that wait until all is written,
/// and without.
type Lane = (FileId, Leases);

/// A recall, with the names that were taken out of the table for it.
#[derive(Debug)]
pub(super) struct Recall {
    pub returned: Returned,
    pub taken: Taken,
    pub share: Share,
}

/// Unanswered recalls of a volume.
#[derive(Debug, Default)]
pub(super) struct Recalled {
    /// Recalls that wait for the running task of their lane.
    lanes: HashMap<Lane, Vec<Recall>>,
    /// Recalls of unknown files; `Some` while a task is running.
    unknown: Option<Vec<Recall>>,
    answers: Vec<Returned>,
    /// Number of recalls whose answer the server has not accepted, and of leases being returned.
    count: usize,
    has_ended: bool,
    /// Notified when there are answers.
    wake: Arc<Notify>,
}

impl Recalled {
    /// Counts another recall; returns false if the limit is reached.
    pub fn has_room(&mut self) -> bool {
        let has_room = !self.has_ended && self.count < MAX_RECALLED;
        self.count += usize::from(has_room);
        has_room
    }

    /// Stops answering; returns true on the first call.
    pub fn end(&mut self) -> bool {
        self.answers = Vec::new();
        !std::mem::replace(&mut self.has_ended, true)
    }

    pub fn has_ended(&self) -> bool {
        self.has_ended
    }

    fn answer(&mut self, returned: impl IntoIterator<Item = Returned>) {
        if !self.has_ended {
            self.answers.extend(returned);
            self.wake.notify_one();
        }
    }

    /// Returns leases that were not recalled, together with the answers.
    pub fn give_back(&mut self, returned: Vec<Returned>) {
        if !self.has_ended {
            self.count += returned.len();
            self.answer(returned);
        }
    }

    fn take_answers(&mut self) -> Vec<Returned> {
        let rest = self.answers.split_off(self.answers.len().min(ANSWERS_OF_A_CALL));
        std::mem::replace(&mut self.answers, rest)
    }
}

/// Recalls of one file that are answered together, and the invalidations for them.
#[derive(Debug, Default)]
struct Turn {
    recalls: Vec<(Returned, Share)>,
    number: Option<u64>,
    pages: bool,
    names: Option<Names>,
    /// True if recalls were answered before their invalidation was sent to the kernel.
    is_owed: bool,
}

impl Turn {
    fn add(&mut self, recalls: Vec<Recall>) {
        for Recall { returned, taken: (number, names), share } in recalls {
            self.number = number.or(self.number);
            self.pages |= returned.leases.contains(Leases::DATA);
            if let Some(names) = names {
                self.names.get_or_insert_default().extend(names);
            }
            self.recalls.push((returned, share));
        }
    }
}

/// Sends answers as long as the volume exists.
pub(super) async fn answer(volume: Weak<Volume>, store: Arc<dyn Store>, wake: Arc<Notify>) {
    let calls = Arc::new(Semaphore::new(ANSWERING_CALLS));
    loop {
        wake.notified().await;
        loop {
            let Ok(place) = Arc::clone(&calls).acquire_owned().await else { return };
            let Some(found) = volume.upgrade() else { return };
            let answers = found.recalled().take_answers();
            if answers.is_empty() {
                break;
            }
            let (volume, store) = (volume.clone(), Arc::clone(&store));
            tokio::spawn(async move {
                let count = answers.len();
                if let Err(errno) = store.call(&Caller::default(), Op::Return(answers)).await {
                    tracing::debug!(%errno, count, "leases could not be given back");
                }
                if let Some(volume) = volume.upgrade() {
                    volume.recalled().count -= count;
                }
                drop(place);
            });
        }
    }
}

impl Volume {
    pub(super) fn recalled(&self) -> MutexGuard<'_, Recalled> {
        self.recalled.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the [`Notify`] for answers.
    pub(super) fn answers_wake(&self) -> Arc<Notify> {
        Arc::clone(&self.recalled().wake)
    }

    /// Processes a recall: by its lane's running task, or a new one.
    pub(super) fn take_up(self: &Arc<Self>, recall: Recall) {
        if recall.taken.0.is_none() {
            return self.take_up_unknown(recall);
        }
        let lane = (recall.returned.file, recall.returned.leases & Leases::WRITE);
        match self.recalled().lanes.entry(lane) {
            Entry::Occupied(waiting) => waiting.into_mut().push(recall),
            Entry::Vacant(place) => {
                place.insert(Vec::new());
                let mut turn = Turn::default();
                turn.add(vec![recall]);
                tokio::spawn(Arc::clone(self).work(lane, turn));
            }
        }
    }

    /// Processes a recall of an unknown file, which may be a pending one whose answer is in flight.
    fn take_up_unknown(self: &Arc<Self>, recall: Recall) {
        let has_landed = {
            let table = self.table();
            table.unborn.has_landed(table.unborn.last())
        };
        let mut recalled = self.recalled();
        match &mut recalled.unknown {
            Some(waiting) => waiting.push(recall),
            None if has_landed => {
                drop(recall.share);
                recalled.answer([recall.returned]);
            }
            none => {
                *none = Some(vec![recall]);
                tokio::spawn(Arc::clone(self).find_unknown());
            }
        }
    }

    async fn find_unknown(self: Arc<Self>) {
        loop {
            self.landing().await;
            let found = {
                let mut recalled = self.recalled();
                let found = recalled.unknown.take().unwrap_or_default();
                if found.is_empty() {
                    return;
                }
                // Further recalls wait for the next landing.
                recalled.unknown = Some(Vec::new());
                found
            };
            for recall in found {
                let taken = self.take_leases(&recall.returned);
                if taken.0.is_some() {
                    self.take_up(Recall { taken, ..recall });
                } else {
                    drop(recall.share);
                    self.recalled().answer([recall.returned]);
                }
            }
        }
    }

    async fn work(self: Arc<Self>, lane: Lane, mut turn: Turn) {
        loop {
            self.write_out(lane).await;
            turn = self.carry_out(lane, turn).await;
            let mut recalled = self.recalled();
            let Some(waiting) = recalled.lanes.get_mut(&lane) else { return };
            turn.add(std::mem::take(waiting));
            if turn.recalls.is_empty() && !turn.is_owed {
                recalled.lanes.remove(&lane);
                return;
            }
        }
    }

    async fn write_out(self: &Arc<Self>, (file, leases): Lane) {
        if leases.contains(Leases::WRITE) {
            let _ = self.bring_out(Which::All).await;
            let _ = self.drain(file).await;
        }
    }

    /// Sends the invalidation to the kernel, and answers the recalls. Returns the next turn when
    /// the kernel is done, so that invalidations of a file don't pile up while it blocks.
    async fn carry_out(self: &Arc<Self>, lane: Lane, turn: Turn) -> Turn {
        let mut rest = Turn { number: turn.number, ..Turn::default() };
        let Some(number) = turn.number else {
            self.answer_all(turn.recalls);
            return rest;
        };
        let (invalidate, mut is_done) = Invalidate::awaited(number, turn.pages, turn.names);
        let _ = self.invalidate.send(invalidate);
        let mut is_in_time = tokio::time::timeout(KERNEL_PATIENCE, &mut is_done).await.is_ok();
        self.answer_all(turn.recalls);
        if !is_in_time {
            tracing::warn!(number, "the kernel does not forget a file");
        }
        while !is_in_time {
            let late = self.recalled().lanes.get_mut(&lane).map(std::mem::take).unwrap_or_default();
            if !late.is_empty() {
                self.write_out(lane).await;
                rest.add(late);
            }
            // A recall in between waits for the rest of this period and another one.
            is_in_time = tokio::time::timeout(KERNEL_PATIENCE / 2, &mut is_done).await.is_ok();
            if !is_in_time && !rest.recalls.is_empty() {
                rest.is_owed = true;
                self.answer_all(std::mem::take(&mut rest.recalls));
            }
        }
        rest
    }

    fn answer_all(&self, recalls: Vec<(Returned, Share)>) {
        // Drops the shares first: their waiters wait for the kernel, not for the answers.
        let returned: Vec<Returned> = recalls.into_iter().map(|(returned, _)| returned).collect();
        self.recalled().answer(returned);
    }
}
