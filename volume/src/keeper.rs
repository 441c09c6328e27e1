//! The leases of all sessions of one machine, with those who wait for them: the table of [`crate::leases`] with a
//! clock, a lock and wake-ups. One for all exports, since they may overlap.

use std::{
    collections::HashMap,
    path::Path,
    sync::{Arc, Mutex, MutexGuard},
    time::{Duration, Instant, SystemTime},
};

use tokio::sync::Notify;

use crate::{
    leases::{File, Intent, LeaseTable, SessionId, Ticket},
    store::{FileId, Leases, Notice, Stamp},
};

/// What has not been looked at for so long is looked at: a session's time may have been moved on meanwhile.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// Shared by all that hand out or break leases.
#[derive(Debug)]
pub struct Keeper {
    table: Mutex<LeaseTable>,
    /// Something was answered, or is over.
    answered: Notify,
    /// There may be notices.
    noticed: Notify,
    /// Locks that were given back.
    pub unlocked: Unlocked,
}

/// Those who wait for locks, by file: a lock that is given back wakes nobody else.
#[derive(Debug, Default)]
pub struct Unlocked(Mutex<HashMap<File, Waiters>>);

#[derive(Debug, Default)]
struct Waiters {
    wake: Arc<Notify>,
    count: usize,
}

/// One that waits for a lock of a file.
#[derive(Debug)]
pub struct LockWaiter<'a> {
    unlocked: &'a Unlocked,
    file: File,
    /// Completes for those that have begun to wait when a lock of the file is given back.
    pub wake: Arc<Notify>,
}

impl Unlocked {
    /// From now on the file's locks are waited for.
    pub fn wait_for(&self, file: File) -> LockWaiter<'_> {
        let mut files = self.0.lock().expect("not poisoned");
        let waiters = files.entry(file).or_default();
        waiters.count += 1;
        LockWaiter { unlocked: self, file, wake: waiters.wake.clone() }
    }

    /// A lock of that file was given back.
    pub fn notify(&self, file: File) {
        if let Some(waiters) = self.0.lock().expect("not poisoned").get(&file) {
            waiters.wake.notify_waiters();
        }
    }
}

impl Drop for LockWaiter<'_> {
    fn drop(&mut self) {
        let mut files = self.unlocked.0.lock().expect("not poisoned");
        if let Some(waiters) = files.get_mut(&self.file) {
            waiters.count -= 1;
            if waiters.count == 0 {
                files.remove(&self.file);
            }
        }
    }
}

/// Something begun; others get no leases of its files as long as this lives.
#[derive(Debug)]
pub struct Begun {
    keeper: Arc<Keeper>,
    ticket: Option<Ticket>,
}

impl Default for Keeper {
    fn default() -> Self {
        let since = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
        // More than there are answers in the meantime.
        let stamp = Stamp(u64::try_from(since.as_micros()).unwrap_or_default());
        Self {
            table: Mutex::new(LeaseTable::starting_at(stamp)),
            answered: Notify::default(),
            noticed: Notify::default(),
            unlocked: Unlocked::default(),
        }
    }
}

impl Keeper {
    /// The table, for what needs no waiting.
    pub fn table(&self) -> MutexGuard<'_, LeaseTable> {
        self.table.lock().expect("not poisoned")
    }

    /// Says what is about to happen; see [`LeaseTable::begin`].
    pub fn begin(self: &Arc<Self>, session: SessionId, intents: &[(File, FileId, Intent)]) -> Begun {
        let ticket = self.table().begin(Some(session), intents, Instant::now());
        self.noticed.notify_waiters();
        Begun { keeper: self.clone(), ticket: Some(ticket) }
    }

    /// See [`LeaseTable::begin_flush`].
    pub fn begin_flush(
        self: &Arc<Self>,
        session: Option<SessionId>,
        of: impl Fn(&Path) -> bool,
        time: Duration,
    ) -> Begun {
        let ticket = self.table().begin_flush(session, of, time, Instant::now());
        self.noticed.notify_waiters();
        Begun { keeper: self.clone(), ticket: Some(ticket) }
    }

    /// See [`LeaseTable::begin_answers`].
    pub fn begin_answers(self: &Arc<Self>, session: SessionId) -> Begun {
        let ticket = self.table().begin_answers(session, Instant::now());
        self.noticed.notify_waiters();
        Begun { keeper: self.clone(), ticket: Some(ticket) }
    }

    /// See [`LeaseTable::recall_all`].
    pub fn recall_all(&self, session: SessionId) {
        self.table().recall_all(session, Instant::now());
        self.noticed.notify_waiters();
    }

    /// See [`LeaseTable::mark`].
    pub fn mark(&self, session: SessionId) -> Option<Stamp> {
        let stamp = self.table().mark(session);
        self.noticed.notify_waiters();
        stamp
    }

    /// See [`LeaseTable::changed`]. Of most of what other programs change, nobody here has heard.
    pub fn changed(&self, changes: impl IntoIterator<Item = (File, Leases)>) {
        let now = Instant::now();
        let mut table = self.table();
        let told = changes.into_iter().filter(|(file, leases)| table.changed(*file, *leases, now)).count();
        drop(table);
        if told > 0 {
            self.noticed.notify_waiters();
        }
    }

    /// See [`LeaseTable::lose_all`].
    pub fn lose_all(&self) {
        self.table().lose_all();
        self.answered.notify_waiters();
        self.noticed.notify_waiters();
    }

    /// See [`LeaseTable::returned`].
    pub fn returned(&self, session: SessionId, file: File, leases: Leases, stamp: Stamp) {
        self.table().returned(session, file, leases, stamp);
        self.answered.notify_waiters();
    }

    /// See [`LeaseTable::end_session`].
    pub fn end_session(&self, session: SessionId) {
        self.table().end_session(session);
        self.answered.notify_waiters();
        self.noticed.notify_waiters();
    }

    /// The next notices of a session, in order; none when it has ended.
    pub async fn notices(&self, session: SessionId) -> Option<Vec<Notice>> {
        loop {
            let noticed = self.noticed.notified();
            tokio::pin!(noticed);
            // From here on no wake-up is missed.
            noticed.as_mut().enable();
            {
                let mut table = self.table();
                let until = table.valid_until(session)?;
                // Its own end is told to it also when nobody else asks.
                if until <= Instant::now() {
                    table.expire(Instant::now());
                }
                let notices = table.take_notices(session);
                if !notices.is_empty() {
                    return Some(notices);
                }
            }
            let _ = tokio::time::timeout(LOOK_AGAIN, noticed).await;
        }
    }
}

impl Begun {
    /// Whether it may happen at once.
    #[must_use]
    pub fn is_clear(&self) -> bool {
        self.ticket.as_ref().is_none_or(|ticket| self.keeper.table().is_clear(ticket, Instant::now()))
    }

    /// Completes when all recalls are answered, or their holders' time is over.
    pub async fn clear(&self) {
        let Some(ticket) = &self.ticket else { return };
        loop {
            let answered = self.keeper.answered.notified();
            tokio::pin!(answered);
            answered.as_mut().enable();
            let now = Instant::now();
            let deadline = {
                let mut table = self.keeper.table();
                if table.is_clear(ticket, now) {
                    drop(table);
                    self.keeper.noticed.notify_waiters();
                    return;
                }
                table.deadline(ticket)
            };
            let until = deadline.unwrap_or(now + LOOK_AGAIN).min(now + LOOK_AGAIN);
            let _ = tokio::time::timeout_at(until.into(), answered).await;
        }
    }

    /// It has happened.
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
