//! Sends pending files to the store, in the order in which they became ready: many files per
//! request, one request at a time, so that directories exist before their files. Files gather while
//! a request is pending.
//!
//! An operation that needs a file on the store waits for all earlier ones ([`Volume::bring_out`]).
//! A lost request is repeated without limit. A refused file stays pending, visible under its name
//! and in the journal, and is tried again ([`Retry`]). `outcomes` processes the results.

use std::{
    collections::HashSet,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak,
        atomic::{AtomicBool, AtomicI64, Ordering},
    },
    time::{Duration, Instant, SystemTime},
};

use bytes::Bytes;
use tokio::{
    sync::{Notify, Semaphore},
    time::timeout_at,
};

use super::{
    Volume,
    files::Open,
    flights::Flight,
    openings::OPEN_LINGER,
    replay::{Unplaced, without_superseded},
    table::Table,
    unborn::{Stage, Which},
};
use crate::{
    journal::{Journal, Record},
    store::{Caller, ENDED_AT_ONCE, Errno, FileId, Op, Time},
};

/// Time for which closed files gather before a request.
const LINGER: Duration = Duration::from_millis(20);

/// Bounds of the exponential backoff after a lost request.
pub(super) const FIRST_PAUSE: Duration = Duration::from_millis(50);
pub(super) const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// Bounds of the exponential backoff between retries of a refused file.
const FIRST_RETRY: Duration = Duration::from_secs(1);
const LONGEST_RETRY: Duration = Duration::from_secs(60);

/// Limit of pending files.
const UNBORN_FILES: usize = 20_000;

/// Reason why the sessions of earlier gateways may still have requests in flight.
#[derive(Debug, thiserror::Error)]
pub enum EarlierSessionsError {
    /// Their names can't be read.
    #[error(transparent)]
    Names(#[from] std::io::Error),
    /// The store did not end them.
    #[error(transparent)]
    Store(#[from] Errno),
}

/// State of a volume's sending of pending files.
pub(super) struct Births {
    pub journal: OnceLock<Journal>,
    /// Permits for pending files.
    pub files: Arc<Semaphore>,
    /// Notified when there is something to send, or a waiter.
    wake: Notify,
    /// Notified when a request was answered.
    pub arrived: Notify,
    /// Offset of the server's clock, in nanoseconds.
    clock: AtomicI64,
    /// Files whose attributes in the kernel differ from the server's: change time, and sizes of
    /// directories.
    outdated: Mutex<HashSet<u64>>,
    /// Message of the last failure.
    fault: Mutex<Option<String>>,
    /// Records of an earlier gateway whose directory is gone.
    unplaced: Mutex<Vec<Unplaced>>,
    /// Orders of the records that the journal can remove.
    done: Mutex<Vec<u64>>,
    /// True after the volume's end: nothing more is sent.
    is_over: AtomicBool,
}

/// Retries of refused files: one file at intervals; when it is accepted, all others.
#[derive(Debug, Default)]
struct Retry {
    /// Time of the next retry, and the pause before it.
    next: Option<(Instant, Duration)>,
    /// The file that is being tried.
    tried: Option<u64>,
}

impl Retry {
    fn begin(&mut self, table: &mut Table) {
        let Some(number) = table.first_to_retry() else {
            self.next = None;
            return;
        };
        let (at, pause) =
            *self.next.get_or_insert((crate::clock::now() + FIRST_RETRY, FIRST_RETRY));
        if crate::clock::now() < at {
            return;
        }
        let pause = (2 * pause).min(LONGEST_RETRY);
        self.next = Some((crate::clock::now() + pause, pause));
        self.tried = Some(number);
        table.wait_again(number, false);
    }

    fn end(&mut self, table: &mut Table) {
        let Some(tried) = self.tried else { return };
        match table.is_pending(tried) {
            // Still being sent.
            true if table.refusal(tried).is_none() => {}
            true => self.tried = None,
            false => {
                (self.tried, self.next) = (None, None);
                while let Some(number) = table.first_to_retry() {
                    table.wait_again(number, false);
                }
            }
        }
    }
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
            unplaced: Mutex::default(),
            done: Mutex::default(),
            is_over: AtomicBool::new(false),
        })
    }

    pub fn journal(&self) -> Option<&Journal> {
        self.journal.get()
    }

    /// Returns true if files can be created in memory: a journal accepts them on close.
    pub fn are_kept(&self) -> bool {
        self.journal().is_some_and(Journal::is_open)
    }

    pub fn fault(&self) -> Option<String> {
        self.fault.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Stops sending, and aborts all waits.
    pub fn end(&self) {
        self.is_over.store(true, Ordering::Relaxed);
        self.wake();
        self.arrived.notify_waiters();
    }

    pub fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Relaxed)
    }

    pub fn wake(&self) {
        self.wake.notify_one();
    }

    /// Sets the offset of the server's clock.
    pub fn set_clock(&self, nanoseconds: i64) {
        self.clock.store(nanoseconds, Ordering::Relaxed);
    }

    /// Returns the server's current time.
    pub fn now(&self) -> Time {
        let since = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
        let ahead = i128::from(self.clock.load(Ordering::Relaxed));
        let nanoseconds = i128::try_from(since.as_nanos()).unwrap_or_default() + ahead;
        Time {
            seconds: i64::try_from(nanoseconds.div_euclid(1_000_000_000)).unwrap_or_default(),
            nanoseconds: u32::try_from(nanoseconds.rem_euclid(1_000_000_000)).unwrap_or_default(),
        }
    }

    /// Writes a file's present state to the journal; returns false on a failure.
    pub fn note(&self, table: &Table, number: u64) -> bool {
        let (Some(journal), Some(record)) = (self.journal(), record_of(table, number)) else {
            return false;
        };
        journal
            .note(record)
            .inspect_err(|error| tracing::warn!(%error, "the journal can't be written"))
            .is_ok()
    }

    pub fn unplaced(&self) -> MutexGuard<'_, Vec<Unplaced>> {
        self.unplaced.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that the store has a file, for the journal's next batch.
    pub fn will_be_done(&self, order: u64) {
        self.done.lock().unwrap_or_else(PoisonError::into_inner).push(order);
    }

    fn note_done(&self) {
        let done = std::mem::take(&mut *self.done.lock().unwrap_or_else(PoisonError::into_inner));
        self.is_done(&done);
    }

    pub fn is_done(&self, orders: &[u64]) {
        if let Some(journal) = self.journal() {
            journal.done(orders);
        }
    }
}

/// Returns the journal's record of a pending file.
pub(super) fn record_of(table: &Table, number: u64) -> Option<Record> {
    let newborn = table.node(number)?.unborn.as_ref()?;
    let (above, _) = table.path_below(number)?;
    let put = table.put_of(number)?;
    Some(Record {
        order: newborn.order,
        home: table.path_to(above)?,
        caller: newborn.caller.clone(),
        put,
    })
}

/// Sends pending files as long as the volume exists.
pub(super) async fn send(births: Arc<Births>, volume: Weak<Volume>) {
    loop {
        births.wake.notified().await;
        // The volume exists as long as files are pending.
        let Some(volume) = volume.upgrade() else { return };
        volume.send_unborn().await;
    }
}

impl Volume {
    /// Ends the sessions of earlier gateways that have sent this journal's records; to be called
    /// before its replay. Their requests may still be queued on the server, and must not be
    /// performed after those of this session.
    ///
    /// # Errors
    /// [`EarlierSessionsError`]
    pub async fn end_earlier_sessions(
        &self,
        journal: &Journal,
        own: &Bytes,
    ) -> Result<(), EarlierSessionsError> {
        let tell =
            |error: std::io::Error| tracing::warn!(%error, "the journal can't note its session");
        let earlier = journal.earlier_sessions()?;
        let _ = journal.begin_session(&earlier, own).map_err(tell);
        if earlier.is_empty() {
            return Ok(());
        }
        for names in earlier.chunks(ENDED_AT_ONCE) {
            self.store.call(&Caller::default(), Op::EndSessions(names.to_vec())).await?;
        }
        let _ = journal.begin_session(&[], own).map_err(tell);
        Ok(())
    }

    /// Sets the journal, so that files of new directories are created in memory from now on. The
    /// records that are left in it become pending files again, and are sent like all others.
    ///
    /// # Errors
    /// The store's; then the next volume replays the journal.
    pub async fn keep_journal(
        self: &Arc<Self>,
        journal: Journal,
        left: Vec<Record>,
    ) -> Result<(), Errno> {
        self.table().unborn.begin_above(journal.last_order());
        let (left, superseded) = without_superseded(left);
        self.births.unplaced().extend(superseded);
        for record in left {
            self.take_up_record(record).await?;
        }
        let _ = self.births.journal.set(journal);
        self.births.wake();
        Ok(())
    }

    async fn send_unborn(self: &Arc<Self>) {
        let mut pause = FIRST_PAUSE;
        let mut retry = Retry::default();
        while !self.births.is_over() {
            let gathered_by = crate::clock::now() + LINGER;
            while !self.is_urgent()
                && timeout_at(gathered_by.into(), self.births.wake.notified()).await.is_ok()
            {
            }
            self.open_overdue();
            retry.begin(&mut self.table());
            let (has_ready, is_idle, is_empty) = {
                let unborn = &self.table().unborn;
                (unborn.has_ready(), unborn.is_idle(), unborn.refused.is_empty())
            };
            match (has_ready, is_idle, is_empty) {
                (_, true, true) => return,
                (true, ..) => match self.fly().await {
                    Ok(()) => pause = FIRST_PAUSE,
                    // A waiter's wake-up cuts the pause short.
                    Err(_) => {
                        let _ = timeout_at(
                            (crate::clock::now() + pause).into(),
                            self.births.wake.notified(),
                        )
                        .await;
                        pause = (2 * pause).min(LONGEST_PAUSE);
                    }
                },
                // Open files, and those in requests of their own, notify when they are ready.
                _ => drop(
                    timeout_at(
                        (crate::clock::now() + OPEN_LINGER).into(),
                        self.births.wake.notified(),
                    )
                    .await,
                ),
            }
            retry.end(&mut self.table());
        }
    }

    fn is_urgent(&self) -> bool {
        let table = self.table();
        table.unborn.is_urgent() || table.unborn.is_open_demanded()
    }

    /// Sends one request.
    ///
    /// # Errors
    /// The request is lost: its files are queued again.
    async fn fly(&self) -> Result<(), Errno> {
        let flight = self.table().next_flight();
        let Some(Flight { caller, writes, numbers }) = flight else {
            self.births.arrived.notify_waiters();
            return Ok(());
        };
        let asked = crate::clock::now();
        let answer = self.store.write(&caller, writes).await;
        let outcome = match answer {
            Ok(results) => {
                let results = results.into_iter().chain(std::iter::repeat(Err(Errno::EPROTO)));
                let answered = numbers.into_iter().zip(results);
                let doubtful =
                    answered.filter_map(|(n, result)| self.landed(n, result, asked)).collect();
                self.settle_doubtful(doubtful).await
            }
            Err(errno) => {
                let mut table = self.table();
                numbers.into_iter().for_each(|number| table.is_lost(number));
                table.unborn.timeouts += u64::from(errno == Errno::ETIMEDOUT);
                Err(errno)
            }
        };
        self.births.note_done();
        self.births.arrived.notify_waiters();
        outcome
    }

    /// Notes that a file's attributes in the kernel differ from the server's, which does no harm
    /// until [`Self::show_as_sent`].
    pub(super) fn is_outdated(&self, number: u64) {
        let mut outdated = self.births.outdated.lock().unwrap_or_else(PoisonError::into_inner);
        outdated.insert(number);
        let are_many = outdated.len() >= UNBORN_FILES;
        drop(outdated);
        if are_many {
            self.show_as_sent();
        }
    }

    /// Shows the server's attributes from now on, and invalidates the kernel's.
    pub(super) fn show_as_sent(&self) {
        let outdated = std::mem::take(
            &mut *self.births.outdated.lock().unwrap_or_else(PoisonError::into_inner),
        );
        let mut table = self.table();
        outdated.iter().for_each(|number| table.show_as_sent(*number));
        drop(table);
        outdated.into_iter().for_each(|number| self.forget_attributes(number));
    }

    pub(super) fn tell_fault(&self, number: u64, message: &str) {
        tracing::error!(number, "{message}");
        *self.births.fault.lock().unwrap_or_else(PoisonError::into_inner) =
            Some(message.to_owned());
    }

    /// Returns when the store has all present pending files, except for refused ones
    /// ([`Table::refusal_below`]).
    ///
    /// # Errors
    /// `ETIMEDOUT`: the store is unreachable. Pending files stay pending.
    pub(super) async fn bring_out(&self, which: Which) -> Result<(), Errno> {
        let (last, timeouts) = {
            let mut table = self.table();
            if table.unborn.is_idle() {
                return Ok(());
            }
            (table.unborn.demand(which), table.unborn.timeouts)
        };
        self.births.wake();
        self.arrived_when(|table| {
            table.unborn.is_out(last, which) || table.unborn.timeouts != timeouts
        })
        .await;
        if self.table().unborn.is_out(last, which) { Ok(()) } else { Err(Errno::ETIMEDOUT) }
    }

    /// Returns when all present requests have been answered, so that their files' ids are known.
    pub(super) async fn landing(&self) {
        let last = self.table().unborn.last();
        self.arrived_when(|table| table.unborn.has_landed(last)).await;
    }

    /// Waits until `is_so`, or until the volume has ended.
    pub(super) async fn arrived_when(&self, is_so: impl Fn(&Table) -> bool) {
        loop {
            let arrived = self.births.arrived.notified();
            tokio::pin!(arrived);
            arrived.as_mut().enable();
            if self.births.is_over() || is_so(&self.table()) {
                return;
            }
            arrived.await;
        }
    }

    /// Returns a file's id on the store, after sending the file and all pending files in it.
    ///
    /// # Errors
    /// The error of its creation; `ETIMEDOUT` if the store is unreachable.
    pub(super) async fn born(self: &Arc<Self>, number: u64) -> Result<FileId, Errno> {
        let (stage, timeouts) = {
            let table = self.table();
            let node = table.node(number).ok_or(Errno::ESTALE)?;
            (node.unborn.as_ref().map(|newborn| newborn.stage), table.unborn.timeouts)
        };
        if let Some(stage) = stage {
            match stage {
                Stage::Open(_) => self.bear_open(number),
                _ => drop(self.table().unborn.demand(Which::Closed)),
            }
            self.births.wake();
            let is_over = |table: &Table| {
                table.unborn.timeouts != timeouts || table.refusal(number).is_some()
            };
            self.arrived_when(|table| !table.is_pending(number) || is_over(table)).await;
        }
        // Also open files in it: the store would create a second one of the same name.
        let is_ahead =
            self.table().node(number).is_some_and(|node| node.unborn.is_none() && node.is_ahead());
        if is_ahead {
            self.bring_out(Which::All).await?;
        }
        let table = self.table();
        if let Some(errno) = table.refusal(number) {
            return Err(errno);
        }
        let node = table.node(number).ok_or(Errno::ESTALE)?;
        match node.fault {
            Some(errno) => Err(errno),
            None if node.file.is_provisional() => Err(Errno::ETIMEDOUT),
            None => Ok(node.file),
        }
    }

    /// Returns an open file after the store has created it.
    pub(super) async fn born_open(self: &Arc<Self>, open: u64) -> Result<Arc<Open>, Errno> {
        let found = self.open_file(open)?;
        let ahead = {
            let table = self.table();
            let number = table.number_of(found.file);
            number.filter(|number| {
                table.node(*number).is_some_and(|node| node.is_ahead() || node.fault.is_some())
            })
        };
        let Some(number) = ahead else {
            // It may have been created on the server in between.
            return if found.file.is_provisional() { self.open_file(open) } else { Ok(found) };
        };
        self.born(number).await?;
        self.open_file(open)
    }
}
