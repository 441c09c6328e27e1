//! Write-back of contents. A write is answered when it is queued, and sent at once, so that several
//! are in progress; unsent data is limited, and writers wait for room. Other operations on the file
//! wait until all its writes have arrived ([`Volume::drain`]).

use std::{
    collections::{HashMap, VecDeque},
    ops::Range,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

use super::{
    MOST_SEARCHES, Volume, appending::is_doubtful, files::Open, found::is_lost, unborn::Which,
    unsent::Unsent,
};
use crate::store::{Caller, Entry, Errno, FileId, OpenFlags, PositionIn, Write};

/// Limit of unsent data: a link of 1 Gbit/s at 250 ms.
const DIRTY_BYTES: usize = 32 << 20;

/// Limit for one request: large enough to fill a link, small enough for several in progress.
const BATCH_BYTES: usize = 2 << 20;

/// Limit of writes in one request; a store accepts four times as many.
const BATCH_WRITES: usize = 4096;

/// Limit of requests in progress per file.
const BATCHES: usize = 4;

/// Bounds of the exponential backoff after a lost request.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// Time for which a request is repeated that a reachable server doesn't perform.
const ANSWERED_PATIENCE: Duration = Duration::from_secs(60);

/// Origin of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// write(2), at the kernel's offset.
    Call,
    /// write(2) with `O_APPEND`, at the end of the file.
    Append,
    /// A page of a mapping, at its own offset even with `O_APPEND`.
    Mapping,
}

/// Writes of all files.
pub(super) struct Writes {
    files: Mutex<HashMap<FileId, Pending>>,
    pub(super) room: Arc<Semaphore>,
    pub(super) dirty: AtomicU64,
    /// Notified when a request was answered, or there is a new write.
    arrived: Notify,
    /// Number of requests that timed out, since the store was unreachable. They are repeated.
    timeouts: AtomicU64,
    /// Notified when there is a waiter, which cuts a backoff short.
    wanted: Notify,
    /// True after the volume's end.
    is_over: AtomicBool,
}

/// Writes of one file.
#[derive(Default)]
struct Pending {
    queue: VecDeque<Waiting>,
    /// Requests in progress, oldest first.
    flying: Vec<Flying>,
    next: u64,
}

/// A request in progress.
struct Flying {
    number: u64,
    span: Range<u64>,
    parts: Option<Unsent>,
}

struct Waiting {
    write: Write,
    caller: Caller,
    range: Range<u64>,
    /// End of the write, from the kernel's view.
    end: u64,
    /// Its number among the file's writes.
    number: u64,
    room: OwnedSemaphorePermit,
}

/// Writes of one request.
struct Batch {
    number: u64,
    caller: Caller,
    writes: Vec<Write>,
    /// End of the last write, from the kernel's view.
    end: u64,
    /// The file's size before the first append among them was sent.
    end_before: Option<u64>,
    /// True if it is unknown which of the appends were performed.
    is_doubtful: bool,
    room: Vec<OwnedSemaphorePermit>,
    bytes: u64,
}

impl Default for Writes {
    fn default() -> Self {
        Self {
            files: Mutex::default(),
            room: Arc::new(Semaphore::new(DIRTY_BYTES)),
            dirty: AtomicU64::new(0),
            arrived: Notify::new(),
            timeouts: AtomicU64::new(0),
            wanted: Notify::new(),
            is_over: AtomicBool::new(false),
        }
    }
}

impl Writes {
    /// Stops sending, and aborts all waits.
    pub fn end(&self) {
        self.is_over.store(true, Ordering::Relaxed);
        self.arrived.notify_waiters();
        self.wanted.notify_waiters();
    }

    fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Relaxed)
    }

    /// Completes when the number of timeouts differs from `timeouts`, or the volume has ended.
    async fn given_up(&self, timeouts: u64) {
        loop {
            let arrived = self.arrived.notified();
            tokio::pin!(arrived);
            arrived.as_mut().enable();
            if self.timeouts.load(Ordering::Relaxed) != timeouts || self.is_over() {
                return;
            }
            arrived.await;
        }
    }

    fn files(&self) -> MutexGuard<'_, HashMap<FileId, Pending>> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn bytes(&self) -> u64 {
        self.dirty.load(Ordering::Relaxed)
    }

    pub fn is_dirty(&self, file: FileId) -> bool {
        self.files().contains_key(&file)
    }

    /// Returns the number of the file's next write, if any write is unsent.
    fn next(&self, file: FileId) -> Option<u64> {
        self.files().get(&file).map(|pending| pending.next)
    }

    /// Returns the unsent writes; `None` if some are appends, whose offset is unknown.
    pub(super) fn unsent(&self, file: FileId) -> Option<Unsent> {
        let files = self.files();
        let Some(pending) = files.get(&file) else { return Some(Unsent::new()) };
        let mut unsent = Unsent::new();
        for flying in &pending.flying {
            unsent.extend(flying.parts.as_ref()?.iter().cloned());
        }
        for waiting in &pending.queue {
            unsent.push(part_of(&waiting.write)?);
        }
        Some(unsent)
    }

    /// Returns true if all writes below a number have arrived.
    fn arrived_below(&self, file: FileId, number: u64) -> bool {
        self.files()
            .get(&file)
            .is_none_or(|pending| pending.oldest().is_none_or(|oldest| oldest >= number))
    }

    /// Returns the next request of a file, if one may be sent now.
    fn next_batch(&self, file: FileId) -> Option<Batch> {
        let mut files = self.files();
        let pending = files.get_mut(&file)?;
        if pending.queue.is_empty() && pending.flying.is_empty() {
            files.remove(&file);
            return None;
        }
        pending.next_batch()
    }

    fn has_arrived(&self, file: FileId, batch: u64, bytes: u64) {
        if let Some(pending) = self.files().get_mut(&file) {
            pending.flying.retain(|flying| flying.number != batch);
        }
        self.dirty.fetch_sub(bytes, Ordering::Relaxed);
    }
}

impl Pending {
    fn oldest(&self) -> Option<u64> {
        let flying = self.flying.iter().map(|flying| flying.number);
        flying.chain(self.queue.front().map(|waiting| waiting.number)).min()
    }

    /// Composes a request of the next writes, in their order. A write that overlaps one in progress
    /// waits for it.
    fn next_batch(&mut self) -> Option<Batch> {
        if self.flying.len() >= BATCHES {
            return None;
        }
        let first = self.queue.front()?;
        let mut batch = Batch {
            number: first.number,
            caller: first.caller.clone(),
            writes: Vec::new(),
            end: first.end,
            end_before: None,
            is_doubtful: false,
            room: Vec::new(),
            bytes: 0,
        };
        let mut span = first.range.clone();
        while let Some(next) = self.queue.front() {
            let has_room = batch.bytes as usize + next.room.num_permits() <= BATCH_BYTES;
            let fits = batch.writes.is_empty() || has_room && batch.writes.len() < BATCH_WRITES;
            let is_beside =
                |span: &Range<u64>| span.end <= next.range.start || next.range.end <= span.start;
            let is_free = self.flying.iter().all(|flying| is_beside(&flying.span));
            if !fits || !is_free || next.caller != batch.caller {
                break;
            }
            let Some(next) = self.queue.pop_front() else { break };
            span = span.start.min(next.range.start)..span.end.max(next.range.end);
            batch.bytes += next.room.num_permits() as u64;
            batch.writes.push(next.write);
            batch.end = next.end;
            batch.room.push(next.room);
        }
        if batch.writes.is_empty() {
            return None;
        }
        let parts = batch.writes.iter().map(part_of).collect();
        self.flying.push(Flying { number: batch.number, span, parts });
        Some(batch)
    }
}

fn part_of(write: &Write) -> Option<(u64, Bytes)> {
    match write {
        Write::At { offset, data, .. } => Some((*offset, data.clone())),
        _ => None,
    }
}

impl Volume {
    /// write(2).
    ///
    /// # Errors
    /// Those of this write, if it is not answered before it is sent.
    pub async fn write(
        self: &Arc<Self>,
        open: u64,
        offset: u64,
        data: Bytes,
        from: Source,
    ) -> Result<(), Errno> {
        let number = open;
        let open = self.open_file(open)?;
        if data.is_empty() {
            return Ok(());
        }
        let appends = from == Source::Append;
        if self.write_newborn(&open, PositionIn { file: number, offset }, &data, appends) {
            return Ok(());
        }
        let open = self.born_open(number).await?;
        let is_through = self.settings.sync || open.flags.contains(OpenFlags::DIRECT);
        if is_through || appends && !self.may_gather(&self.table(), &open) {
            return self.write_through(&open, offset, data, appends).await;
        }
        let noted = self.note(&open, offset, data, appends).await;
        if !open.is_direct {
            self.forget_unleased_pages(open.file);
        }
        noted
    }

    async fn note(
        self: &Arc<Self>,
        open: &Open,
        offset: u64,
        data: Bytes,
        appends: bool,
    ) -> Result<(), Errno> {
        let bytes = u32::try_from(data.len()).map_err(|_| Errno::EFBIG)?;
        let timeouts = self.writes.timeouts.load(Ordering::Relaxed);
        let room = tokio::select! {
            biased;
            room = Arc::clone(&self.writes.room).acquire_many_owned(bytes) => {
                room.map_err(|_| Errno::EIO)?
            }
            // Earlier writes are not lost; this one is refused.
            () = self.writes.given_up(timeouts) => return Err(Errno::ETIMEDOUT),
        };
        if self.queue(open, offset, data.clone(), appends, room) {
            return Ok(());
        }
        self.write_through(open, offset, data, appends).await
    }

    /// Queues a write; returns false for an append that must not be answered before it is sent.
    fn queue(
        self: &Arc<Self>,
        open: &Open,
        offset: u64,
        data: Bytes,
        appends: bool,
        room: OwnedSemaphorePermit,
    ) -> bool {
        // Under the table's lock: writes that are queued before a recall are sent before its
        // answer.
        let table = self.table();
        if appends && !self.may_gather(&table, open) {
            return false;
        }
        let bytes = data.len() as u64;
        self.writes.dirty.fetch_add(bytes, Ordering::Relaxed);
        let mut files = self.writes.files();
        let is_new = !files.contains_key(&open.file);
        let pending = files.entry(open.file).or_default();
        let number = pending.next;
        pending.next += 1;
        let (place, end) = (open.place(), offset + bytes);
        // An append may overlap anything, so it is sent alone.
        let (write, range) = if appends {
            (Write::Append { place, data }, 0..u64::MAX)
        } else {
            (Write::At { place, offset, data }, offset..end)
        };
        pending.queue.push_back(Waiting {
            write,
            caller: open.caller.clone(),
            range,
            end,
            number,
            room,
        });
        drop(files);
        drop(table);
        if is_new {
            tokio::spawn(Arc::clone(self).send_all(open.file));
        } else {
            self.writes.arrived.notify_waiters();
        }
        true
    }

    /// Sends a file's writes until none is left.
    async fn send_all(self: Arc<Self>, file: FileId) {
        loop {
            // Registers before the check, so that no notification is missed.
            let arrived = self.writes.arrived.notified();
            tokio::pin!(arrived);
            arrived.as_mut().enable();
            while let Some(batch) = self.writes.next_batch(file) {
                tokio::spawn(Arc::clone(&self).send(file, batch));
            }
            if !self.writes.is_dirty(file) {
                self.writes.arrived.notify_waiters();
                return;
            }
            arrived.await;
        }
    }

    /// Sends a request until the store has answered. A lost request is repeated unchanged, before
    /// later writes to the same range: so answered writes have no gaps, and keep their order.
    async fn send(self: Arc<Self>, file: FileId, batch: Batch) {
        let mut batch = batch;
        let mut pause = FIRST_PAUSE;
        let mut answered_since = None;
        let appends = batch.writes.iter().any(|write| matches!(write, Write::Append { .. }));
        while !self.writes.is_over() {
            let asked = crate::clock::now();
            let Err(errno) = self.send_once(file, &mut batch).await else { break };
            match errno {
                Errno::ETIMEDOUT => {
                    self.writes.timeouts.fetch_add(1, Ordering::Relaxed);
                    self.writes.arrived.notify_waiters();
                    answered_since = None;
                }
                Errno::ESTALE => match self.find_all_again(&batch.caller, &[file]).await {
                    Err(errno) if !is_lost(errno) => {
                        self.note_fault(file, errno);
                        break;
                    }
                    Ok(()) | Err(_) => {}
                },
                // The server is reachable, but fails: retry for a limited time.
                Errno::EIO | Errno::EAGAIN
                    if asked - *answered_since.get_or_insert(asked) < ANSWERED_PATIENCE => {}
                errno => {
                    self.note_fault(file, errno);
                    break;
                }
            }
            let _ = tokio::time::timeout(pause, self.writes.wanted.notified()).await;
            pause = (2 * pause).min(LONGEST_PAUSE);
        }
        if appends && self.size_known(file) != Some(batch.end) {
            // The kernel's pages have it at the wrong offset.
            self.forget_pages(file);
        }
        drop(batch.room);
        self.writes.has_arrived(file, batch.number, batch.bytes);
        self.writes.arrived.notify_waiters();
    }

    /// Sends a request once, and removes the performed writes from the batch.
    ///
    /// # Errors
    /// The batch then has the writes that have yet to arrive, as far as that is known. `ESTALE`:
    /// the store does not know the file. Other errors of single writes are noted with the open
    /// files.
    async fn send_once(&self, file: FileId, batch: &mut Batch) -> Result<(), Errno> {
        if batch.is_doubtful {
            let (end, sent) = (batch.end_before.unwrap_or_default(), batch.writes.len());
            batch.end_before =
                Some(self.take_out_arrived(&batch.caller, end, &mut batch.writes).await?);
            batch.is_doubtful = false;
            if batch.writes.len() < sent {
                tracing::warn!(
                    inode = file.inode,
                    "the answers to appends are lost: like bytes are there"
                );
                self.note_fault(file, Errno::EIO);
            }
        } else if batch.end_before.is_none() {
            batch.end_before = self.end_before(&batch.caller, file, &batch.writes).await?;
        }
        if batch.writes.is_empty() {
            return Ok(());
        }
        let asked = crate::clock::now();
        let results = self.store.write(&batch.caller, batch.writes.clone()).await;
        batch.is_doubtful = results.as_ref().is_err_and(|errno| is_doubtful(&batch.writes, *errno));
        let mut results = results?.into_iter();
        let end_before = &mut batch.end_before;
        batch.writes.retain(|_| match results.next() {
            Some(Ok(entry)) => {
                *end_before = end_before.map(|_| entry.attributes.size);
                self.table().learn(&entry, asked);
                false
            }
            Some(Err(Errno::ESTALE)) => true,
            Some(Err(errno)) => {
                self.note_fault(file, errno);
                false
            }
            None => false,
        });
        if batch.writes.is_empty() { Ok(()) } else { Err(Errno::ESTALE) }
    }

    async fn write_through(
        &self,
        open: &Open,
        offset: u64,
        data: Bytes,
        appends: bool,
    ) -> Result<(), Errno> {
        self.drain(open.file).await?;
        let bytes = data.len() as u64;
        let place = open.place();
        let write =
            if appends { Write::Append { place, data } } else { Write::At { place, offset, data } };
        let asked = crate::clock::now();
        let mut results = self.write_at_once(&open.caller, write).await?;
        let entry = results.pop().ok_or(Errno::EPROTO)??;
        self.table().learn(&entry, asked);
        if appends && entry.attributes.size != offset + bytes {
            // The kernel's pages have it at the wrong offset.
            self.forget_pages(open.file);
        }
        Ok(())
    }

    /// Sends a write, and repeats it after a loss, unless it is an append, which may have been
    /// performed.
    async fn write_at_once(
        &self,
        caller: &Caller,
        write: Write,
    ) -> Result<Vec<Result<Entry, Errno>>, Errno> {
        let file = match &write {
            Write::At { place, .. } | Write::Append { place, .. } | Write::Set { place, .. } => {
                place.file
            }
            Write::Put(put) => put.directory,
        };
        let is_once = matches!(write, Write::Append { .. });
        let mut answer = self.store.write(caller, vec![write.clone()]).await;
        for _ in 0..MOST_SEARCHES {
            match &answer {
                Ok(results) if !results.contains(&Err(Errno::ESTALE)) => break,
                Ok(_) | Err(Errno::ESTALE) => self.find_all_again(caller, &[file]).await?,
                Err(Errno::EIO) if !is_once => {}
                Err(_) => break,
            }
            answer = self.store.write(caller, vec![write.clone()]).await;
        }
        answer
    }

    /// Returns when all earlier writes to a file are on the server, or have failed.
    ///
    /// # Errors
    /// `ETIMEDOUT`: the server is unreachable. The writes are sent when it is back.
    pub(super) async fn drain(&self, file: FileId) -> Result<(), Errno> {
        let timeouts = self.writes.timeouts.load(Ordering::Relaxed);
        self.drain_unless(file, || self.writes.timeouts.load(Ordering::Relaxed) != timeouts).await
    }

    /// Like [`Self::drain`], but without a timeout.
    pub(super) async fn drained(&self, file: FileId) {
        let _is_over = self.drain_unless(file, || false).await;
    }

    /// Waits for earlier writes. Cuts a backoff short only once: with more, the backoff would never
    /// grow while the server is unreachable.
    async fn drain_unless(
        &self,
        file: FileId,
        is_given_up: impl Fn() -> bool,
    ) -> Result<(), Errno> {
        let Some(number) = self.writes.next(file) else { return Ok(()) };
        self.writes.wanted.notify_waiters();
        loop {
            let arrived = self.writes.arrived.notified();
            tokio::pin!(arrived);
            arrived.as_mut().enable();
            if self.writes.arrived_below(file, number) {
                return Ok(());
            }
            if is_given_up() || self.writes.is_over() {
                return Err(Errno::ETIMEDOUT);
            }
            arrived.await;
        }
    }

    /// Waits until the store has all that is in memory, pending files included. Does not wait for
    /// files that the store has refused.
    ///
    /// # Errors
    /// `ETIMEDOUT`: the server is unreachable. The data is sent when it is back.
    pub async fn drain_all(&self) -> Result<(), Errno> {
        self.bring_out(Which::All).await?;
        let mut files: Vec<FileId> = self.writes.files().keys().copied().collect();
        files.sort_unstable();
        for file in files {
            self.drain(file).await?;
        }
        Ok(())
    }
}
