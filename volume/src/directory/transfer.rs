//! Bulk reads and writes over many files.

use std::{
    ffi::OsStr,
    io::{IoSlice, IoSliceMut},
    os::fd::{AsFd as _, AsRawFd as _, OwnedFd},
    sync::{Arc, Mutex},
    time::Duration,
};

use bytes::{Bytes, BytesMut};
use nix::errno::Errno;
use rustix::{
    fs::{AtFlags, Mode, OFlags},
    io::ReadWriteFlags,
};
use tokio::sync::{Semaphore, mpsc};
use tokio_stream::wrappers::ReceiverStream;

use super::{
    Fault,
    account::{Charge, Pool},
    attributes,
    effects::{self, made},
    files::NewOpen,
    files::{Opened, Usable},
    limits,
    nodes::{BENEATH, Keep, Node, check_name},
    reserved::Spending,
    session::{BYTES, Intents, NAMES, Session, setting},
    workers,
};
use crate::{
    keeper::Begun,
    leases::Intent,
    store::{
        Answer, Caller, Entry, FileId, Leases, NameIn, NewFile, OpenFlags, Piece, Pieces, Place,
        Put, ReadPart, Write,
    },
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
        let file = self.usable(place, OpenFlags::WRITE)?;
        write_all(&file, data, offset)?;
        self.entry(file.as_fd(), place.file, Leases::ATTRIBUTES)
    }

    fn parent_of(&self, put: &Put) -> Result<Node, Fault> {
        let directory = self.directory.nodes.node(put.directory)?;
        let (_, above) = put.path.split_last().ok_or(Errno::EINVAL)?;
        self.directory.nodes.descend(&directory, above)
    }

    /// Creates a file without a name (O_TMPFILE), and links it when it is complete. `None` if the
    /// file system or the kernel doesn't allow that.
    fn put_whole(
        at: NameIn<'_, &Node>,
        data: &Bytes,
        mode: Mode,
        put: &Put,
    ) -> Result<Option<OwnedFd>, Fault> {
        let NameIn { parent, name } = at;
        let flags = OFlags::RDWR | OFlags::TMPFILE | OFlags::CLOEXEC;
        let file = match rustix::fs::openat2(&parent.fd, ".", flags, mode, BENEATH) {
            Ok(file) => file,
            Err(
                rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::ISDIR | rustix::io::Errno::INVAL,
            ) => return Ok(None),
            Err(errno) => return Err(errno.into()),
        };
        effects::without_name(|| {
            write_all(&file, data, Some(0))?;
            change(file.as_fd(), put)
        })?;
        // Linked through /proc, which needs no capability (open(2)).
        let by = format!("/proc/self/fd/{}", file.as_raw_fd());
        let flags = AtFlags::SYMLINK_FOLLOW;
        match made(rustix::fs::linkat(rustix::fs::CWD, by, &parent.fd, name, flags)) {
            Ok(()) => Ok(Some(file)),
            // A file of another owner may not be linked (proc(5), protected_hardlinks), and /proc
            // may be hidden.
            Err(rustix::io::Errno::PERM | rustix::io::Errno::NOENT) => Ok(None),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Returns a put's directory and name.
    pub fn place_of<'a>(&self, put: &'a Put) -> Result<(Node, &'a OsStr), Fault> {
        let name = put.path.last().ok_or(Errno::EINVAL)?;
        check_name(name)?;
        Ok((self.parent_of(put)?, name))
    }

    /// See [`crate::store::Op::CreateWhole`].
    pub fn create_whole(
        &self,
        put: &Put,
        flags: OpenFlags,
        announced: &Intents,
    ) -> Result<Answer, Fault> {
        self.directory.require_writable()?;
        let NewFile::Regular { data } = &put.what else { return Err(Errno::EINVAL.into()) };
        let room = self.room_for_open()?;
        let (parent, name) = self.place_of(put)?;
        let at = NameIn { parent: &parent, name };
        let file = Self::put_file(at, data, put)?;
        self.keep_new(at, file, NewOpen { flags, room, announced })
    }

    fn put_file(at: NameIn<'_, &Node>, data: &Bytes, put: &Put) -> Result<OwnedFd, Fault> {
        let mode = Mode::from_raw_mode(put.mode & 0o7777);
        match Self::put_whole(at, data, mode, put)? {
            Some(file) => Ok(file),
            None => put_by_name(at, data, mode, put),
        }
    }

    /// Creates a new file, complete or not at all.
    fn put(&self, put: &Put, announced: &Intents) -> Result<Entry, Fault> {
        self.directory.require_writable()?;
        let (parent, name) = self.place_of(put)?;
        let entry = self.put_in(NameIn { parent: &parent, name }, put)?;
        // Its path may lead into another directory than when it was announced.
        self.touch_unless_announced(&parent, NAMES, announced);
        Ok(entry)
    }

    fn put_in(&self, at: NameIn<'_, &Node>, put: &Put) -> Result<Entry, Fault> {
        let NameIn { parent, name } = at;
        let mode = Mode::from_raw_mode(put.mode & 0o7777);
        match &put.what {
            NewFile::Directory => made(rustix::fs::mkdirat(&parent.fd, name, mode))?,
            NewFile::Symlink { target } => {
                made(rustix::fs::symlinkat(target, &parent.fd, name))?;
            }
            NewFile::Regular { data } => {
                let file = Self::put_file(at, data, put)?;
                let at = NameIn { parent: parent.id, name };
                let node = self.directory.nodes.remember(file, Some(at), Keep::Way)?;
                // No other session knows the new file yet.
                return self.entry(node.fd.as_fd(), node.id, BYTES | Leases::WRITE);
            }
        }
        let node = self.directory.nodes.child(parent, name, Keep::Open)?;
        if let Err(fault) = change(node.fd.as_fd(), put) {
            super::files::unmake(at, &rustix::fs::fstat(&node.fd)?);
            return Err(fault);
        }
        match put.what {
            NewFile::Directory => self.entry_of_new_directory(&node),
            _ => self.entry_of_node(&node),
        }
    }
}

/// Creates a file under its name from the start: if this process is killed, an incomplete file is
/// left.
fn put_by_name(
    at: NameIn<'_, &Node>,
    data: &Bytes,
    mode: Mode,
    put: &Put,
) -> Result<OwnedFd, Fault> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = made(rustix::fs::openat2(&at.parent.fd, at.name, flags, mode, BENEATH))?;
    let written = write_all(&file, data, Some(0)).and_then(|()| change(file.as_fd(), put));
    if let Err(fault) = written {
        super::files::unmake(at, &rustix::fs::fstat(&file)?);
        return Err(fault);
    }
    Ok(file)
}

fn change(fd: std::os::fd::BorrowedFd<'_>, put: &Put) -> Result<(), Fault> {
    attributes::change(fd, &put.changes)?;
    if let Some(size) = put.changes.size {
        effects::begin();
        rustix::fs::ftruncate(fd, size)?;
    }
    attributes::change_times(fd, &put.changes)
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

fn write_all(
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
