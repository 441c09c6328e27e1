//! Leases of all sessions of one machine, with their waiters: the table of [`crate::leases`] with a
//! clock, a lock and wake-ups. All exports share one, since they may overlap.
//!
//! Invariant: no spurious wake-ups by unrelated events. A change waits for one answer of one
//! session at a time, a session's listener for its own notices, and a lock request for unlocks of
//! its file.

use std::{
    collections::HashMap,
    hash::Hash,
    path::Path,
    sync::{Arc, Mutex, MutexGuard},
    time::{Duration, SystemTime},
};

use tokio::sync::Notify;

use crate::{
    leases::{File, FileRef, Former, Intent, LeaseTable, Progress, STEP, SessionId, Ticket},
    store::{Leases, Notice, Stamp},
};

/// An answer that takes longer counts against its session ([`LeaseTable::waited`]). Others decide
/// how often they ask, so quick answers must cost nothing, however many they are.
const LATE: Duration = Duration::from_secs(1);
/// Interval of checks while waiting: a session's expiry may have been extended meanwhile.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// Lease table with a lock and wake-ups, shared by all that grant or recall leases.
#[derive(Debug)]
pub struct Keeper {
    table: Mutex<LeaseTable>,
    /// Waiters for a session's answer about a file.
    answered: Waits<(SessionId, File)>,
    /// Waiters for a session that may lose all its leases.
    lost: Waits<SessionId>,
    /// Waiters for the holders of former sessions.
    back: Notify,
    /// Waiters for released locks.
    pub unlocked: Waits<File>,
}

/// Waiters by key, so that a notification wakes only those of its key.
#[derive(Debug)]
pub struct Waits<K: Copy + Eq + Hash>(Mutex<HashMap<K, Waiters>>);

#[derive(Debug, Default)]
struct Waiters {
    wake: Arc<Notify>,
    count: usize,
}

/// One waiter.
#[derive(Debug)]
pub struct Waiter<'a, K: Copy + Eq + Hash> {
    waits: &'a Waits<K>,
    what: K,
    /// Notified for waiters that have begun to wait before the event.
    pub wake: Arc<Notify>,
}

impl<K: Copy + Eq + Hash> Default for Waits<K> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<K: Copy + Eq + Hash> Waits<K> {
    /// Registers a waiter.
    pub fn wait_for(&self, what: K) -> Waiter<'_, K> {
        let mut all = self.0.lock().expect("not poisoned");
        let waiters = all.entry(what).or_default();
        waiters.count += 1;
        Waiter { waits: self, what, wake: waiters.wake.clone() }
    }

    /// Wakes the waiters of a key.
    pub fn notify(&self, what: K) {
        if let Some(waiters) = self.0.lock().expect("not poisoned").get(&what) {
            waiters.wake.notify_waiters();
        }
    }

    fn notify_all(&self) {
        self.0
            .lock()
            .expect("not poisoned")
            .values()
            .for_each(|waiters| waiters.wake.notify_waiters());
    }
}

impl<K: Copy + Eq + Hash> Drop for Waiter<'_, K> {
    fn drop(&mut self) {
        let mut all = self.waits.0.lock().expect("not poisoned");
        if let Some(waiters) = all.get_mut(&self.what) {
            waiters.count -= 1;
            if waiters.count == 0 {
                all.remove(&self.what);
            }
        }
    }
}

/// An announced operation. Until it is dropped, others get no conflicting leases of its files.
#[derive(Debug)]
pub struct Begun {
    keeper: Arc<Keeper>,
    ticket: Option<Ticket>,
    announced: Vec<(FileRef, Intent)>,
    /// Identity of the waiting session.
    waiter: String,
}

impl Default for Keeper {
    fn default() -> Self {
        Self {
            table: Mutex::new(LeaseTable::starting_at(stamp_of_clock())),
            answered: Waits::default(),
            lost: Waits::default(),
            back: Notify::new(),
            unlocked: Waits::default(),
        }
    }
}

/// Returns a stamp above all earlier ones: there are fewer answers than microseconds.
fn stamp_of_clock() -> Stamp {
    let since = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
    Stamp(u64::try_from(since.as_micros()).unwrap_or_default())
}

impl Keeper {
    /// Creates a keeper after an earlier process has ended; see [`LeaseTable::begin_grace`].
    #[must_use]
    pub fn after(former: impl IntoIterator<Item = Former>) -> Self {
        let keeper = Self::default();
        keeper.table().begin_grace(former, crate::clock::now());
        keeper
    }

    /// See [`LeaseTable::forgotten`].
    pub fn forgotten(&self, session: SessionId, lost: Stamp) {
        if self.table().forgotten(session, lost) {
            self.back.notify_waiters();
        }
    }

    /// See [`LeaseTable::has_ended`].
    pub fn has_ended(&self, name: &str) {
        if self.table().has_ended(name) {
            self.back.notify_waiters();
        }
    }

    /// Completes when no former session relies on leases in a tree that matches `of`.
    async fn grace_is_over(&self, of: impl Fn(&Path) -> bool) {
        loop {
            let is_back = self.back.notified();
            let Some(until) = self.table().grace(None, &of, crate::clock::now()) else { return };
            let _ = tokio::time::timeout_at(until.into(), is_back).await;
        }
    }

    /// Locks the table, for operations that need no waiting.
    pub fn table(&self) -> MutexGuard<'_, LeaseTable> {
        self.table.lock().expect("not poisoned")
    }

    /// See [`LeaseTable::open_session_of`]. The stamps start from the clock: the client may come
    /// from another machine's executor, whose stamps must all be earlier.
    pub fn open_session(&self, owner: &str, tree: &Path) -> SessionId {
        let mut table = self.table();
        table.count_on_from(stamp_of_clock());
        table.open_session_of(owner, tree, crate::clock::now())
    }

    /// Announces an operation; see [`LeaseTable::begin`].
    pub fn begin(self: &Arc<Self>, session: SessionId, intents: &[(FileRef, Intent)]) -> Begun {
        let mut table = self.table();
        let ticket = table.begin(Some(session), intents, crate::clock::now());
        let waiter = table.owner_of(session).unwrap_or_default().to_owned();
        Begun { keeper: self.clone(), ticket: Some(ticket), announced: intents.to_vec(), waiter }
    }

    /// Completes when the other sessions on trees that match `of` have written their held-back
    /// data, or have lost it: within `time` of the last recall. Waits before for the grace period
    /// of former sessions on these trees. However many files these are, the lock is held for a step
    /// at a time, and each session is waited for only once. `waiter`: the identity of the waiting
    /// session.
    pub async fn flush(
        self: &Arc<Self>,
        waiter: &str,
        session: Option<SessionId>,
        of: impl Fn(&Path) -> bool,
        time: Duration,
    ) {
        self.grace_is_over(&of).await;
        let holders = self.table().writers(session, of);
        for holder in &holders {
            let mut after = None;
            loop {
                after = self.table().recall_written(*holder, session, after, crate::clock::now());
                if after.is_none() {
                    break;
                }
                tokio::task::yield_now().await;
            }
        }
        let ticket = self.table().begin_flush(&holders, time, crate::clock::now());
        let waiter = waiter.to_owned();
        Begun { keeper: self.clone(), ticket: Some(ticket), announced: Vec::new(), waiter }
            .clear()
            .await;
    }

    /// See [`LeaseTable::begin_answers`].
    pub fn begin_answers(self: &Arc<Self>, session: SessionId) -> Begun {
        let mut table = self.table();
        let ticket = table.begin_answers(session, crate::clock::now());
        let waiter = table.owner_of(session).unwrap_or_default().to_owned();
        Begun { keeper: self.clone(), ticket: Some(ticket), announced: Vec::new(), waiter }
    }

    /// Performs all steps of [`LeaseTable::recall_all`].
    pub async fn recall_all(&self, session: SessionId) {
        let mut after = None;
        loop {
            after = self.table().recall_all(session, after, crate::clock::now());
            if after.is_none() {
                return;
            }
            tokio::task::yield_now().await;
        }
    }

    /// See [`LeaseTable::mark`].
    pub fn mark(&self, session: SessionId) -> Option<Stamp> {
        self.table().mark(session)
    }

    /// See [`LeaseTable::changed`].
    pub fn changed(&self, changes: impl IntoIterator<Item = (File, Leases)>) {
        let mut changes = changes.into_iter().peekable();
        while changes.peek().is_some() {
            // A step at a time, so that a burst doesn't block others.
            let (mut table, now) = (self.table(), crate::clock::now());
            for (file, leases) in changes.by_ref().take(STEP) {
                table.changed(file, leases, now);
            }
        }
    }

    /// See [`LeaseTable::lose_all`].
    pub fn lose_all(&self) {
        self.table().lose_all();
        self.lost.notify_all();
    }

    /// See [`LeaseTable::returned`].
    pub fn returned(&self, session: SessionId, file: File, leases: Leases, stamp: Stamp) {
        self.table().returned(session, file, leases, stamp);
        self.answered.notify((session, file));
    }

    /// See [`LeaseTable::end_session`].
    pub fn end_session(&self, session: SessionId) {
        self.table().end_session(session);
        self.lost.notify(session);
    }

    /// Returns the next notices of a session, in order; `None` when it has ended.
    pub async fn notices(&self, session: SessionId) -> Option<Vec<Notice>> {
        loop {
            let wake = {
                let mut table = self.table();
                let until = table.valid_until(session)?;
                // A session learns of its own expiry even if no other session's request finds it.
                if until <= crate::clock::now() {
                    table.expire(crate::clock::now());
                }
                let notices = table.take_notices(session);
                if !notices.is_empty() {
                    return Some(notices);
                }
                table.wake(session)?
            };
            // A notice since then is not missed: it leaves a permit.
            let _ = tokio::time::timeout(LOOK_AGAIN, wake.notified()).await;
        }
    }
}

impl Begun {
    /// Files of the operation, and what it does to each.
    #[must_use]
    pub fn announced(&self) -> &Vec<(FileRef, Intent)> {
        &self.announced
    }

    /// Returns true if the operation may proceed at once.
    #[must_use]
    pub fn is_clear(&mut self) -> bool {
        self.ticket
            .as_mut()
            .is_none_or(|ticket| self.keeper.table().is_clear(ticket, crate::clock::now()))
    }

    /// Completes when all recalls are answered, or the holders' leases have expired.
    pub async fn clear(&mut self) {
        let Some(ticket) = &mut self.ticket else { return };
        // Answers within that time count as immediate.
        let late = crate::clock::now() + LATE;
        loop {
            let now = crate::clock::now();
            let is_back = self.keeper.back.notified();
            let found = {
                let mut table = self.keeper.table();
                match table.progress(ticket, now) {
                    Progress::Clear => return,
                    Progress::More => None,
                    Progress::Grace(until) => Some(Err(until)),
                    // Registered under the table's lock, so that no answer is missed.
                    Progress::Waits(session, file, until) => {
                        let (answer, loss) = (
                            self.keeper.answered.wait_for((session, file)),
                            self.keeper.lost.wait_for(session),
                        );
                        let wakes = (
                            answer.wake.clone().notified_owned(),
                            loss.wake.clone().notified_owned(),
                        );
                        Some(Ok((session, until.min(now + LOOK_AGAIN), wakes, (answer, loss))))
                    }
                }
            };
            let (session, until, wakes, _waiters) = match found {
                Some(Ok(found)) => found,
                Some(Err(until)) => {
                    let _ = tokio::time::timeout_at(until.into(), is_back).await;
                    continue;
                }
                None => {
                    tokio::task::yield_now().await;
                    continue;
                }
            };
            tokio::select! {
                biased;
                () = wakes.0 => {}
                () = wakes.1 => {}
                () = tokio::time::sleep_until(until.into()) => {}
            }
            let since = now.max(late);
            if self.keeper.table().waited(&self.waiter, session, since, crate::clock::now()) {
                self.keeper.lost.notify(session);
            }
        }
    }

    /// Ends the operation after it was performed.
    pub fn finish(mut self) {
        self.end();
    }

    fn end(&mut self) {
        if let Some(ticket) = self.ticket.take() {
            self.keeper.table().finish(ticket);
        }
    }
}

impl Drop for Begun {
    fn drop(&mut self) {
        self.end();
    }
}

#[cfg(test)]
#[path = "keeper_tests.rs"]
mod tests;
