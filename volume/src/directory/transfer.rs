//! Bulk reads and writes over many files.

use std::{
    io::{IoSlice, IoSliceMut},
    os::fd::AsFd as _,
    sync::{Arc, Mutex},
    time::Duration,
};

use bytes::{Bytes, BytesMut};
use nix::errno::Errno;
use rustix::io::ReadWriteFlags;
use tokio::sync::{Semaphore, mpsc};
use tokio_stream::wrappers::ReceiverStream;

use super::{
    Fault,
    account::{Charge, Pool},
    effects,
    files::{Opened, Usable},
    limits,
    reserved::Spending,
    session::{BYTES, Intents, NAMES, Session, setting},
    workers,
};
use crate::{
    keeper::Begun,
    leases::Intent,
    store::{Caller, Entry, FileId, Leases, OpenFlags, Piece, Pieces, Place, ReadPart, Write},
};

/// Size of a piece.
const PIECE_BYTES: u64 = 256 << 10;
/// Number of parts that are read concurrently, to use the disk's queue.
const PARALLEL_PARTS: usize = 4;
/// Number of pieces queued for the receiver: 1 MiB.
const PIECES: usize = 4;
/// Limit of a read's bytes in memory: the queued pieces, and one of each part that is being read.
pub const READ_BYTES: usize = (PIECES + PARALLEL_PARTS) * PIECE_BYTES as usize;

/// Time limit of one job of a batch of writes, checked between writes: then other jobs get the
/// thread, and the batch of an ended session stops. It is below the time from which a job counts as
/// waiting for a disk (`workers`).
const WRITING: Duration = Duration::from_millis(2);

/// State of a part's read.
struct Reading {
    /// The session's open file. `None`: the file is opened anew for each piece, since the receiver
    /// may never take the next one.
    opened: Option<Arc<Opened>>,
    part: u32,
    place: Place,
    offset: u64,
    end: u64,
    first: Option<Entry>,
}

/// See [`crate::Store::read`].
pub fn read(session: &Arc<Session>, caller: &Caller, parts: Vec<ReadPart>) -> Pieces {
    if let Err(errno) = limits::check_parts(&parts) {
        return Box::pin(tokio_stream::once(Err(errno)));
    }
    let (sender, receiver) = mpsc::channel(PIECES);
    let (session, caller) = (session.clone(), caller.clone());
    let held = workers::held();
    // The task ends when the receiver is dropped.
    tokio::spawn(async move {
        let _held = held;
        let room = Arc::new(Semaphore::new(PARALLEL_PARTS));
        for (number, part) in parts.into_iter().enumerate() {
            let Ok(permit) = room.clone().acquire_owned().await else { return };
            if sender.is_closed() || session.is_over() {
                return;
            }
            let (session, caller, sender) = (session.clone(), caller.clone(), sender.clone());
            let number = u32::try_from(number).unwrap_or(u32::MAX);
            tokio::spawn(async move {
                read_part(&session, caller, number, part, &sender).await;
                drop(permit);
            });
        }
    });
    Box::pin(ReceiverStream::new(receiver))
}

async fn read_part(
    session: &Arc<Session>,
    caller: Caller,
    number: u32,
    part: ReadPart,
    sender: &mpsc::Sender<Result<Piece, Errno>>,
) {
    let offset = part.range.start;
    if let Err(errno) = read_pieces(session, caller, number, part, sender).await {
        let piece = Piece { part: number, offset, data: Err(errno), is_last: true, entry: None };
        tokio::select! {
            biased;
            _ = sender.send(Ok(piece)) => {}
            () = session.ended() => {}
        }
    }
}

async fn read_pieces(
    session: &Arc<Session>,
    caller: Caller,
    number: u32,
    part: ReadPart,
    sender: &mpsc::Sender<Result<Piece, Errno>>,
) -> Result<(), Errno> {
    // When this is clear, other sessions have written their held-back data.
    let mut begun = session.begin_of(&[(part.place.file, Intent::Look)]);
    tokio::select! {
        biased;
        () = begun.clear() => {}
        () = sender.closed() => return Ok(()),
    }
    let mut next =
        session.as_caller(&caller, move |session| session.first_piece(number, &part)).await?;
    loop {
        let (piece, reading) = next;
        tokio::select! {
            biased;
            // The receiver may never take the piece, which must not keep the session alive.
            () = session.ended() => return Err(Errno::ESTALE),
            sent = sender.send(Ok(piece)) => if sent.is_err() {
                return Ok(());
            }
        }
        let Some(reading) = reading else { return Ok(()) };
        next = session.as_caller(&caller, move |session| session.next_piece(reading)).await?;
    }
}

/// Charge for writes in memory. Invariant: writes that don't wait for other sessions wait only for
/// the disk, since the waiting ones have a separate pool. So the holder of a write lease can always
/// write back the data that others wait for, even others of its own account.
#[derive(Debug)]
pub struct WriteRoom {
    /// The charge that was taken on arrival.
    pub charge: Charge,
    /// Pool for writes that have to wait for other sessions' leases.
    pub waiting: Arc<Pool>,
    /// Size of the contents.
    pub bytes: usize,
}

impl WriteRoom {
    /// Moves the charge to the pool for waiting writes; returns false if that is full.
    fn wait(&mut self, session: &Session) -> bool {
        if Arc::ptr_eq(self.charge.pool(), &self.waiting) {
            return true;
        }
        let charge = self.waiting.try_take(&session.account, self.bytes);
        charge.is_some_and(|charge| {
            self.charge = charge;
            true
        })
    }
}

/// See [`crate::Store::write`].
///
/// # Errors
/// `EAGAIN` if nothing was written, for lack of room to wait in.
pub async fn write(
    session: &Arc<Session>,
    caller: &Caller,
    writes: Vec<Write>,
    room: Option<WriteRoom>,
) -> Result<Vec<Result<Entry, Errno>>, Errno> {
    limits::check_writes(&writes)?;
    let writes: Vec<Write> = match session.directory.is_guest(caller) {
        true => writes.into_iter().map(Write::without_set_ids).collect(),
        false => writes,
    };
    // Shared with the jobs, so that a job that outlives the call still holds the charge.
    let held = Arc::new((writes, Mutex::new(room)));
    let mut results = Vec::with_capacity(held.0.len());
    let mut begun = None;
    while results.len() < held.0.len() {
        let (job_held, first, owner) = (held.clone(), results.len(), caller.clone());
        let job =
            move |session: &Arc<Session>| Ok(session.write_some(&owner, &job_held.0, first, begun));
        let (more, mut waits) = match session.as_caller(caller, job).await {
            Ok(written) => written,
            Err(errno) if results.is_empty() => return Err(errno),
            // Some are written; the others certainly are not.
            Err(errno) => {
                results.resize(held.0.len(), Err(errno));
                break;
            }
        };
        results.extend(more);
        if let Some(waits) = &mut waits {
            let may_wait =
                held.1.lock().expect("not poisoned").as_mut().is_none_or(|room| room.wait(session));
            // A partial batch can't be undone: the rest waits without a charge to that pool.
            if !may_wait && results.is_empty() {
                return Err(Errno::EAGAIN);
            }
            waits.clear().await;
        }
        begun = waits;
    }
    Ok(results)
}

impl Session {
    fn begin_of(&self, files: &[(FileId, Intent)]) -> Begun {
        let intents = files.iter().map(|(id, what)| self.intent(*id, *what)).collect();
        self.announce(&intents)
    }

    fn first_piece(&self, part: u32, of: &ReadPart) -> Result<(Piece, Option<Reading>), Fault> {
        let file = self.usable(of.place, OpenFlags::READ)?;
        let first = Some(self.entry(file.as_fd(), of.place.file, BYTES)?);
        let (offset, end) = (of.range.start, of.range.end);
        self.piece_of(file, Reading { opened: None, part, place: of.place, offset, end, first })
    }

    fn next_piece(&self, mut reading: Reading) -> Result<(Piece, Option<Reading>), Fault> {
        let file = match reading.opened.take() {
            Some(opened) => Usable::Opened(opened),
            None => self.usable(reading.place, OpenFlags::READ)?,
        };
        self.piece_of(file, reading)
    }

    fn piece_of(
        &self,
        file: Usable,
        mut reading: Reading,
    ) -> Result<(Piece, Option<Reading>), Fault> {
        let wanted = reading.end.saturating_sub(reading.offset).min(PIECE_BYTES);
        let data = read_fully(&file, reading.offset, wanted as usize)?;
        let (part, offset) = (reading.part, reading.offset);
        reading.offset += data.len() as u64;
        let is_last = (data.len() as u64) < wanted || reading.offset >= reading.end;
        let entry = match reading.first.take() {
            Some(first) => Some(first),
            None if is_last => {
                Some(self.entry(file.as_fd(), reading.place.file, Leases::empty())?)
            }
            None => None,
        };
        let piece = Piece { part, offset, data: Ok(data), is_last, entry };
        reading.opened = match file {
            Usable::Opened(opened) => Some(opened),
            Usable::Own(_) => None,
        };
        Ok((piece, Some(reading).filter(|_| !is_last)))
    }

    /// Performs writes from number `first` on, until one has to wait, or [`WRITING`] is over.
    /// `begun`: the announcement of the first one, which has waited.
    fn write_some(
        &self,
        caller: &Caller,
        writes: &[Write],
        first: usize,
        mut begun: Option<Begun>,
    ) -> (Vec<Result<Entry, Errno>>, Option<Begun>) {
        let mut results = Vec::new();
        let mut spending = self.reserved.spending(caller);
        let started = crate::clock::now();
        for (number, write) in writes.iter().enumerate().skip(first) {
            if !results.is_empty() && crate::clock::now() - started >= WRITING {
                break;
            }
            let mut now = match begun.take() {
                Some(begun) => begun,
                None => match self.write_intent(write) {
                    Ok(intent) => self.begin_of(&[intent]),
                    Err(fault) => {
                        results.push(Err(fault.into()));
                        continue;
                    }
                },
            };
            if !now.is_clear() {
                return (results, Some(now));
            }
            effects::turn_to(number);
            let done = self.write_one(write, &mut spending, now.announced());
            results.push(done.map_err(Errno::from));
            now.finish();
        }
        (results, None)
    }

    /// Returns the intent of a write, if the caller has permission.
    fn write_intent(&self, write: &Write) -> Result<(FileId, Intent), Fault> {
        match write {
            Write::At { place, .. } | Write::Append { place, .. } => {
                self.check_writing(*place)?;
                Ok((place.file, Intent::Change(BYTES)))
            }
            Write::Set { place, changes } => {
                self.check_changes(*place, changes)?;
                Ok((place.file, setting(changes)))
            }
            Write::Put(put) => {
                let parent = self.parent_of(put)?;
                self.check_new_names(&parent)?;
                Ok((parent.id, Intent::Change(NAMES)))
            }
        }
    }

    fn write_one(
        &self,
        write: &Write,
        spending: &mut Spending<'_>,
        announced: &Intents,
    ) -> Result<Entry, Fault> {
        match write {
            Write::At { place, offset, data } => self.write_bytes(*place, data, Some(*offset)),
            Write::Append { place, data } => self.write_bytes(*place, data, None),
            Write::Set { place, changes } => self.set(*place, changes),
            Write::Put(put) => spending.spend(put.what.room(), || self.put(put, announced)),
        }
    }

    /// Writes at an offset, or atomically at the end.
    fn write_bytes(&self, place: Place, data: &Bytes, offset: Option<u64>) -> Result<Entry, Fault> {
        let flags = match offset {
            Some(_) => OpenFlags::WRITE,
            None => OpenFlags::WRITE | OpenFlags::APPEND,
        };
        let file = self.usable(place, flags)?;
        if let (Some(_), Usable::Opened(opened)) = (offset, &file)
            && opened.only_appends
        {
            return Err(Errno::EPERM.into());
        }
        write_all(&file, data, offset)?;
        self.entry(file.as_fd(), place.file, Leases::ATTRIBUTES)
    }
}

fn read_fully(file: &Usable, offset: u64, wanted: usize) -> Result<Bytes, Fault> {
    let mut data = BytesMut::zeroed(wanted);
    let mut filled = 0;
    while filled < wanted {
        let mut slice = [IoSliceMut::new(&mut data[filled..])];
        match rustix::io::preadv2(
            file,
            &mut slice,
            offset + filled as u64,
            ReadWriteFlags::empty(),
        )? {
            0 => break,
            read => filled += read,
        }
    }
    data.truncate(filled);
    Ok(data.freeze())
}

pub fn write_all(
    file: impl std::os::fd::AsFd,
    mut data: &[u8],
    mut offset: Option<u64>,
) -> Result<(), Fault> {
    effects::begin();
    while !data.is_empty() {
        let flags = if offset.is_none() { ReadWriteFlags::APPEND } else { ReadWriteFlags::empty() };
        let written =
            rustix::io::pwritev2(&file, &[IoSlice::new(data)], offset.unwrap_or_default(), flags)?;
        data = &data[written..];
        if let Some(offset) = &mut offset {
            *offset += written as u64;
        }
    }
    Ok(())
}
