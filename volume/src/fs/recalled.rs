//! Recalls that are not answered yet, bounded whatever a server says: of each file one task is at
//! work on recalls of rights to write, and one on the others. Recalls that come meanwhile wait for
//! its next turn. Answers go out many in a call, a few calls at a time.
//!
//! Invariant: each recall is answered by its own stamp and leases. Merged, the later stamp would
//! give back what the file was leased for between the two.

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

/// How long a recall waits for the kernel, which waits for readers of the pages. Past it the recall
/// is answered all the same.
pub(crate) const KERNEL_PATIENCE: Duration = Duration::from_secs(5);

/// Recalls without an answer: a server of ours keeps no more for all its clients.
const MAX_RECALLED: usize = MAX_LEASED_FILES;

/// Calls with answers under way: on a slow link the next ones wait, and go together.
const ANSWERING_CALLS: usize = 64;

/// Answers of one call, about 30 bytes each.
const ANSWERS_OF_A_CALL: usize = 4096;

/// One of a file's two queues: with [`Leases::WRITE`] for recalls that wait until all is written,
/// and without.
type Lane = (FileId, Leases);

/// A recall, with what was taken out of the table for it.
#[derive(Debug)]
pub(super) struct Recall {
    pub returned: Returned,
    pub taken: Taken,
    pub share: Share,
}

/// All of a volume.
#[derive(Debug, Default)]
pub(super) struct Recalled {
    /// Recalls that wait for the task at work.
    lanes: HashMap<Lane, Vec<Recall>>,
    /// Of files that are not known; while a task is at work.
    unknown: Option<Vec<Recall>>,
    answers: Vec<Returned>,
    /// Without an answer that the server has taken, and leases on their way back.
    count: usize,
    has_ended: bool,
    /// There are answers.
    wake: Arc<Notify>,
}

impl Recalled {
    /// Takes the place of one more, if there is one.
    pub fn has_room(&mut self) -> bool {
        let has_room = !self.has_ended && self.count < MAX_RECALLED;
        self.count += usize::from(has_room);
        has_room
    }

    /// Nothing is answered any more. Whether this is news.
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

    /// Leases that were not recalled go back with the answers.
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

/// Recalls of one file that are answered together, and all that the kernel has to forget for them.
#[derive(Debug, Default)]
struct Turn {
    recalls: Vec<(Returned, Share)>,
    number: Option<u64>,
    pages: bool,
    names: Option<Names>,
    /// Recalls were answered before the kernel could be told.
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

/// Answers recalls for as long as there is a volume.
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

    /// Where its answers are waited for.
    pub(super) fn answers_wake(&self) -> Arc<Notify> {
        Arc::clone(&self.recalled().wake)
    }

    /// Has it answered.
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

    /// It may be one that was made here, whose answer is on its way.
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
                // What comes now waits for the next landing.
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

    /// Has the kernel forget, and answers. Returns when the kernel is done, so that it is not
    /// told of a file again and again while it waits; gives the turn that follows then.
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
            // A recall that comes meanwhile waits for the rest of this time and for another.
            is_in_time = tokio::time::timeout(KERNEL_PATIENCE / 2, &mut is_done).await.is_ok();
            if !is_in_time && !rest.recalls.is_empty() {
                rest.is_owed = true;
                self.answer_all(std::mem::take(&mut rest.recalls));
            }
        }
        rest
    }

    fn answer_all(&self, recalls: Vec<(Returned, Share)>) {
        // The shares first: whoever waits for them waits for the kernel.
        let returned: Vec<Returned> = recalls.into_iter().map(|(returned, _)| returned).collect();
        self.recalled().answer(returned);
    }
}
