//! Completion of the kernel's invalidations: for marks of the store ([`Notice::All`]), and after a
//! loss of all leases. However often a server sends either, only the running round and the next one
//! wait for the kernel.
//!
//! [`Notice::All`]: crate::store::Notice::All

use std::{
    collections::{HashMap, VecDeque},
    ops::Range,
    sync::{Arc, MutexGuard, PoisonError, Weak},
    time::Duration,
};

use tokio::{
    sync::{mpsc, watch},
    task::JoinSet,
};

use super::{
    Volume,
    recalled::KERNEL_PATIENCE,
    recalls::{Invalidate, Names},
    table::ROOT,
};
use crate::store::{Caller, Op, Stamp};

/// Limit of waiting marks. A server sends one for each run of this workstation.
const MAX_MARKS: usize = 10_000;

/// All invalidations between two marks: done when all shares are dropped.
#[derive(Debug)]
pub(super) struct Forgetting {
    number: u64,
    share: mpsc::Sender<()>,
    shares: mpsc::Receiver<()>,
    is_shared: bool,
}

/// Share of a [`Forgetting`], held by one invalidation.
#[derive(Debug)]
pub(super) struct Share {
    of: u64,
    _share: mpsc::Sender<()>,
}

impl Forgetting {
    fn numbered(number: u64) -> Self {
        let (share, shares) = mpsc::channel(1);
        Self { number, share, shares, is_shared: false }
    }

    pub fn share(&mut self) -> Share {
        self.is_shared = true;
        Share { of: self.number, _share: self.share.clone() }
    }

    /// Begins the next one; returns the previous one.
    pub fn next(&mut self) -> Self {
        let next = Self::numbered(self.number + 1);
        std::mem::replace(self, next)
    }

    async fn done(mut self) {
        drop(self.share);
        // Nothing is ever sent.
        let _ = self.shares.recv().await;
    }
}

impl Default for Forgetting {
    fn default() -> Self {
        Self::numbered(0)
    }
}

/// Marks and losses of a volume.
#[derive(Debug, Default)]
pub(super) struct Losses {
    marks: VecDeque<(Forgetting, Stamp)>,
    are_marks_awaited: bool,
    /// Number of rounds that were begun.
    round: u64,
    is_at_work: bool,
    /// Names for the next round.
    names: Option<Names>,
    shares: Vec<Share>,
    /// Stamp of the last loss that the store has sent.
    told: Option<Stamp>,
    /// Stamp of the last completed loss, to be sent to the store.
    to_tell: Option<Stamp>,
    is_telling: bool,
    /// Number of rounds that the kernel has carried out, or that have timed out.
    forgotten: watch::Sender<u64>,
}

impl Losses {
    fn add(&mut self, names: Names, stamp: Stamp, share: Option<Share>) {
        self.told = self.told.max(share.is_some().then_some(stamp));
        self.names.get_or_insert_default().extend(names);
        // One share per mark is enough.
        let is_new = |share: &Share| self.shares.last().is_none_or(|last| last.of != share.of);
        self.shares.extend(share.filter(is_new));
    }
}

/// Interval of checks if expired leases are valid again.
const LOOK_FOR_LEASES: Duration = Duration::from_millis(250);

/// Invalidates everything when the leases expire: other sessions may change files then. Names and
/// attributes in the kernel expire by themselves, but pages and mappings don't.
pub(super) async fn forget_in_time(volume: Weak<Volume>) {
    let mut are_valid = false;
    loop {
        let left = {
            let Some(volume) = volume.upgrade() else { return };
            let left = volume.store.valid_until().saturating_duration_since(crate::clock::now());
            if left.is_zero() && are_valid {
                volume.lost(Stamp(0), None);
            }
            left
        };
        are_valid = !left.is_zero();
        tokio::time::sleep(if are_valid { left } else { LOOK_FOR_LEASES }).await;
    }
}

impl Volume {
    fn losses(&self) -> MutexGuard<'_, Losses> {
        self.losses.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Handles a mark: when `before` and all earlier invalidations are done, the notices up to that
    /// stamp have been carried out.
    pub(super) fn mark(self: &Arc<Self>, before: Forgetting, stamp: Stamp) {
        let mut losses = self.losses();
        if losses.marks.len() >= MAX_MARKS {
            drop(losses);
            return self.end_as_broken();
        }
        match losses.marks.back_mut() {
            Some((_, last)) if !before.is_shared => *last = stamp.max(*last),
            _ => losses.marks.push_back((before, stamp)),
        }
        if !std::mem::replace(&mut losses.are_marks_awaited, true) {
            tokio::spawn(Arc::clone(self).await_marks());
        }
    }

    async fn await_marks(self: Arc<Self>) {
        loop {
            let next = {
                let mut losses = self.losses();
                let next = losses.marks.pop_front();
                losses.are_marks_awaited = next.is_some();
                next
            };
            let Some((before, stamp)) = next else { return };
            before.done().await;
            self.heard
                .send_if_modified(|heard| std::mem::replace(heard, stamp.max(*heard)) < stamp);
        }
    }

    /// Handles the loss of all leases; with a share, if the store has sent a notice with that
    /// stamp. Returns the number of the round that invalidates the kernel's caches.
    pub(super) fn lost(self: &Arc<Self>, stamp: Stamp, share: Option<Share>) -> u64 {
        tracing::warn!("all leases of a volume have ended");
        let names = {
            let mut table = self.table();
            table.lose_all(stamp);
            table.take_all_told()
        };
        let mut losses = self.losses();
        losses.add(names, stamp, share);
        if !std::mem::replace(&mut losses.is_at_work, true) {
            tokio::spawn(Arc::clone(self).forget_in_rounds());
        }
        losses.round + 1
    }

    async fn forget_in_rounds(self: Arc<Self>) {
        loop {
            let (names, shares, told, round) = {
                let mut losses = self.losses();
                let Some(names) = losses.names.take() else {
                    losses.is_at_work = false;
                    return;
                };
                losses.round += 1;
                (names, std::mem::take(&mut losses.shares), losses.told.take(), losses.round)
            };
            self.forget_all(names, shares, round, told).await;
        }
    }

    /// Answers the loss with that stamp. One call at a time is in progress, and of several losses
    /// the last one is answered.
    fn tell_forgotten(self: &Arc<Self>, stamp: Stamp) {
        let mut losses = self.losses();
        losses.to_tell = Some(stamp);
        if std::mem::replace(&mut losses.is_telling, true) {
            return;
        }
        drop(losses);
        let volume = Arc::clone(self);
        tokio::spawn(async move {
            loop {
                let next = {
                    let mut losses = volume.losses();
                    let next = losses.to_tell.take();
                    losses.is_telling = next.is_some();
                    next
                };
                let Some(stamp) = next else { return };
                // On a failure, others wait until the leases have expired.
                let _ = volume.store.call(&Caller::default(), Op::Forgotten(stamp)).await;
            }
        });
    }

    /// Invalidates all files, and returns when the kernel is done, without a timeout.
    async fn forget_all(
        self: &Arc<Self>,
        names: Names,
        shares: Vec<Share>,
        round: u64,
        told: Option<Stamp>,
    ) {
        let numbers: Vec<u64> = self
            .table()
            .iter()
            .filter(|(_, node)| node.lookups > 0)
            .map(|(number, _)| number)
            .collect();
        let _ = self.invalidate.send(Invalidate::of_names(names));
        // Without a server a read may take long; it must delay only its own file's invalidation.
        let mut reads = self.reads_by_file();
        let mut all_done = JoinSet::new();
        for number in numbers {
            match reads.remove(&number) {
                None => drop(self.invalidate.send(Invalidate::awaited(number, true, None).0)),
                Some(busy) => {
                    let (invalidate, is_done) = Invalidate::beside_reads(number, busy);
                    let _ = self.invalidate.send(invalidate);
                    all_done.spawn(is_done);
                }
            }
        }
        // Invalidations are carried out in order.
        let (last, is_done) = Invalidate::awaited(ROOT, false, None);
        let _ = self.invalidate.send(last);
        all_done.spawn(is_done);
        let mut is_done = std::pin::pin!(async { while all_done.join_next().await.is_some() {} });
        let is_in_time = tokio::time::timeout(KERNEL_PATIENCE, &mut is_done).await.is_ok();
        drop(shares);
        self.losses().forgotten.send_replace(round);
        // As with a recall, after the timeout others wait no longer.
        if let Some(stamp) = told {
            self.tell_forgotten(stamp);
        }
        if !is_in_time {
            tracing::warn!("the kernel does not forget a volume");
            is_done.await;
        }
    }

    /// Returns the ranges that are being read, by the kernel's numbers of the files.
    fn reads_by_file(&self) -> HashMap<u64, Vec<Range<u64>>> {
        let reads = self.reads.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let table = self.table();
        let mut by_file: HashMap<u64, Vec<Range<u64>>> = HashMap::new();
        for (open, range) in reads.into_values() {
            let number = self.open_file(open).ok().and_then(|open| table.number_of(open.file));
            number
                .into_iter()
                .for_each(|number| by_file.entry(number).or_default().push(range.clone()));
        }
        by_file
    }

    /// Returns when that round's invalidations are done, or have timed out.
    pub(super) async fn forgotten_by(&self, round: u64) {
        let mut forgotten = self.losses().forgotten.subscribe();
        let _ = tokio::time::timeout(
            KERNEL_PATIENCE,
            forgotten.wait_for(|forgotten| *forgotten >= round),
        )
        .await;
    }

    /// Drops all leases, and returns when nothing is cached any more.
    pub(super) async fn forget_everything(self: &Arc<Self>) {
        let round = self.lost(Stamp(0), None);
        self.forgotten_by(round).await;
    }
}
