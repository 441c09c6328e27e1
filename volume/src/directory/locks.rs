//! File locks, taken from the kernel: programs on the server see them, and the kernel decides which
//! conflict. flock(2) is taken on the session's open file. A range lock belongs to an owner on the
//! workstation; each owner has its own open file description of the file, which holds its locks
//! ("open file description locks", fcntl(2)).
//!
//! Invariant: a client that may not change an export can't block a program of the server or another
//! session. On a read-only export an exclusive lock is refused (`EROFS`); a shared one is granted
//! but not taken, since it could only block writers on the server.

use std::{
    collections::HashMap,
    ops::Range,
    os::fd::{AsFd as _, AsRawFd as _, OwnedFd},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use nix::{
    errno::Errno,
    fcntl::{FcntlArg, fcntl},
    libc,
};
use rustix::fs::{FlockOperation, Mode, OFlags, flock};

use super::{
    Fault,
    account::{Charge, Guest, halved_for_guests},
    attributes,
    deadlock::HeldRanges,
    descriptor::Descriptor,
    files::{Opened, Target},
    session::Session,
};
use crate::store::{Access, Answer, Caller, FileId, Lock, OpenFlags, Place, RangeLock, Wait};

/// Bounds of the polling interval for locks of programs on the server, whose release isn't
/// notified: an eighth of the time waited so far. Unlocks by sessions wake at once.
const FIRST_LOOK: Duration = Duration::from_millis(50);
const LAST_LOOK: Duration = Duration::from_secs(1);
/// Limit of open file descriptions for locks per session.
const MAX_OWNERS: usize = 4096;
/// Limit of locked ranges per owner and file; the kernel has none.
const MAX_RANGES: usize = 4096;

/// The range locks of a session.
#[derive(Debug, Default)]
pub struct Locks {
    by_owner: Mutex<ByOwner>,
}

/// By file and owner.
type ByOwner = HashMap<(FileId, u64), Arc<Description>>;

/// One owner's locks of one file.
#[derive(Debug)]
pub struct Description {
    fd: Descriptor,
    held: Arc<HeldRanges>,
    /// One change at a time, of the kernel's locks and of `held`.
    changing: Mutex<()>,
    /// Upper bound of its locked ranges: each lock or partial unlock can add up to two.
    ranges: AtomicUsize,
    /// Charges to the account, one per block of ranges.
    rooms: Mutex<Vec<Charge>>,
}

/// Number of ranges in one charge.
const BLOCK_RANGES: usize = 16;

impl Locks {
    /// Takes all out, to be released. The mutex is held only for that.
    pub fn take_all(&self) -> ByOwner {
        std::mem::take(&mut *self.by_owner.lock().expect("not poisoned"))
    }

    fn of(&self, file: FileId, owner: u64) -> Option<Arc<Description>> {
        self.by_owner.lock().expect("not poisoned").get(&(file, owner)).cloned()
    }
}

impl Description {
    /// Releases all its locks, though other calls may still hold it open.
    pub fn release(&self) {
        let _changing = self.changing.lock().expect("not poisoned");
        let _ = fcntl(&self.fd, FcntlArg::F_OFD_SETLK(&everything()));
        self.held.clear();
    }

    fn change(&self, lock: &RangeLock) -> Result<(), Fault> {
        let request = request(lock)?;
        let _changing = self.changing.lock().expect("not poisoned");
        fcntl(&self.fd, FcntlArg::F_OFD_SETLK(&request))?;
        self.held.change(lock);
        Ok(())
    }

    /// Counts one more lock request, and charges the account for its ranges.
    fn count(&self, session: &Session) -> Result<(), Fault> {
        self.count_own()?;
        let mut rooms = self.rooms.lock().expect("not poisoned");
        while rooms.len() * BLOCK_RANGES < self.ranges.load(Ordering::Relaxed) {
            let room =
                session.directory.machine.locked_ranges.try_take(&session.account, BLOCK_RANGES);
            rooms.push(room.ok_or(Errno::ENOLCK)?);
        }
        Ok(())
    }

    fn count_own(&self) -> Result<(), Fault> {
        if self.ranges.fetch_add(2, Ordering::Relaxed) < MAX_RANGES {
            return Ok(());
        }
        let known =
            std::fs::read_to_string(format!("/proc/self/fdinfo/{}", self.fd.as_fd().as_raw_fd()));
        let known = known
            .map_err(super::files::errno_of)?
            .lines()
            .filter(|line| line.starts_with("lock:"))
            .count();
        self.ranges.store(known, Ordering::Relaxed);
        if known < MAX_RANGES / 2 { Ok(()) } else { Err(Errno::ENOLCK.into()) }
    }
}

/// Takes or releases a lock. To cancel a wait, drop the future.
pub async fn lock(
    session: &Arc<Session>,
    caller: &Caller,
    place: Place,
    owner: u64,
    lock: Lock,
    wait: Wait,
) -> Result<Answer, Errno> {
    let waiting = Waiting::default();
    let attempt = || async {
        let (lock, is_given_up) = (lock.clone(), waiting.0.clone());
        // The kernel scans all locks of the file; the permit limits an account's use of processors.
        let turn = session.account.step().await;
        let trying = session.as_caller(caller, move |session| {
            let _until_it_is_done = turn;
            let Some(locked) = try_lock(session, place, owner, &lock)? else {
                return Ok(Answer::Done);
            };
            // The end has released what was locked before; this one by itself, since the session
            // knows it no longer.
            if session.is_over() {
                locked.release();
            } else if is_given_up.load(Ordering::Relaxed) {
                let _ = try_lock(session, place, owner, &lock.given_back());
            }
            Ok(Answer::Done)
        });
        trying.await
    };
    match attempt().await {
        Err(Errno::EAGAIN) if wait == Wait::Yes => {}
        done => return done,
    }
    let _charge = session
        .directory
        .machine
        .waiting_locks
        .try_take_for(&session.account, Guest::of(caller), 1)
        .ok_or(Errno::ENOLCK)?;
    let machine = &session.directory.machine;
    let file = session.directory.nodes.file(place.file);
    let _waiting = match &lock {
        Lock::Range(range) => Some(machine.deadlocks.wait((session.id, owner), file, range)?),
        Lock::Whole(_) => None,
    };
    let waiter = session.keeper().unlocked.wait_for(file);
    let began = crate::clock::now();
    loop {
        let unlocked = waiter.wake.notified();
        tokio::pin!(unlocked);
        // Registers for wake-ups before the attempt, so that none is missed.
        unlocked.as_mut().enable();
        match attempt().await {
            Err(Errno::EAGAIN) => {}
            done => return done,
        }
        let look_again = ((crate::clock::now() - began) / 8).clamp(FIRST_LOOK, LAST_LOOK);
        let _ = tokio::time::timeout(look_again, unlocked).await;
    }
}

/// On drop, tells the running job that the request was cancelled.
#[derive(Default)]
struct Waiting(Arc<AtomicBool>);

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl Lock {
    fn access(&self) -> Option<Access> {
        match self {
            Self::Whole(access) => *access,
            Self::Range(lock) => lock.access,
        }
    }

    fn given_back(&self) -> Self {
        match self {
            Self::Whole(_) => Self::Whole(None),
            Self::Range(lock) => Self::Range(RangeLock { access: None, ..lock.clone() }),
        }
    }
}

/// File that a lock was taken on.
enum Locked {
    Whole(Arc<Opened>),
    Range(Arc<Description>),
}

impl Locked {
    fn release(&self) {
        match self {
            Self::Whole(opened) => drop(opened.release()),
            Self::Range(description) => description.release(),
        }
    }
}

/// `None`: there is nothing to lock or unlock.
fn try_lock(
    session: &Session,
    place: Place,
    owner: u64,
    lock: &Lock,
) -> Result<Option<Locked>, Fault> {
    if session.directory.require_writable().is_err() {
        return match lock.access() {
            Some(Access::Exclusive) => Err(Errno::EROFS.into()),
            Some(Access::Shared) | None => Ok(None),
        };
    }
    let locked = match lock {
        Lock::Whole(access) => {
            let Target::Opened(opened) = session.target(place)? else {
                return Err(Errno::EBADF.into());
            };
            opened.is_locked.store(true, Ordering::Relaxed);
            flock(&opened.fd, operation(*access))?;
            Locked::Whole(opened)
        }
        Lock::Range(range) => {
            let known = session.locks.of(place.file, owner);
            if known.is_none() && range.access.is_none() {
                return Ok(None);
            }
            let description = match known {
                Some(description) => description,
                None => describe(session, place, owner)?,
            };
            // An unlock is not charged.
            if range.access.is_some() {
                description.count(session)?;
            } else {
                description.count_own()?;
            }
            description.change(range)?;
            Locked::Range(description)
        }
    };
    if lock.access() != Some(Access::Exclusive) {
        session.unlocked(place.file);
    }
    Ok(Some(locked))
}

/// Finds a conflicting lock. An owner without locks of the file uses a temporary open file
/// description.
pub fn test(
    session: &Session,
    place: Place,
    owner: u64,
    range: &RangeLock,
) -> Result<Answer, Fault> {
    let known = session.locks.of(place.file, owner);
    let own = match &known {
        Some(_) => None,
        None => Some(open_to_ask(session, place)?),
    };
    let fd = known
        .as_ref()
        .map(|description| description.fd.as_fd())
        .or(own.as_ref().map(|own| own.as_fd()))
        .ok_or(Errno::EBADF)?;
    let mut asked = request(range)?;
    fcntl(fd, FcntlArg::F_OFD_GETLK(&mut asked))?;
    let access = match i32::from(asked.l_type) {
        libc::F_UNLCK => return Ok(Answer::Locked(None)),
        libc::F_RDLCK => Access::Shared,
        _ => Access::Exclusive,
    };
    let start = asked.l_start.unsigned_abs();
    let end = if asked.l_len == 0 { u64::MAX } else { start + asked.l_len.unsigned_abs() };
    Ok(Answer::Locked(Some(RangeLock { range: start..end, access: Some(access) })))
}

/// Releases all range locks of an owner.
pub fn unlock(session: &Session, file: FileId, owner: u64) {
    let removed = session.locks.by_owner.lock().expect("not poisoned").remove(&(file, owner));
    if let Some(description) = removed {
        description.release();
        if let Some(description) = Arc::into_inner(description) {
            description.fd.close();
        }
        session.unlocked(file);
    }
}

/// Opens the file once more for one owner's locks, for reading and writing if the caller may: an
/// exclusive range lock needs a descriptor for writing. The client's kernel turns flock(2) through
/// one for reading into such a lock.
fn describe(session: &Session, place: Place, owner: u64) -> Result<Arc<Description>, Fault> {
    let charge =
        session.directory.machine.descriptors.try_take(&session.account, 1).ok_or(Errno::ENOLCK)?;
    let fd = match session.target(place)? {
        Target::Opened(opened) => {
            let open = |access| open_again(&opened, access);
            match (opened.flags.contains(OpenFlags::READ), opened.flags.contains(OpenFlags::WRITE))
            {
                (true, true) => open(OFlags::RDWR)?,
                (false, true) => open(OFlags::WRONLY)?,
                _ => open(OFlags::RDWR).or_else(|_| open(OFlags::RDONLY))?,
            }
        }
        Target::Node(_) => {
            let usable = session.usable(place, OpenFlags::READ | OpenFlags::WRITE);
            let usable = usable.or_else(|_| session.usable(place, OpenFlags::READ))?;
            usable.as_fd().try_clone_to_owned().map_err(super::files::errno_of)?
        }
    };
    let file = session.directory.nodes.file(place.file);
    let description = Arc::new(Description {
        fd: Descriptor::open(&session.closing, fd, Arc::new(charge)),
        held: session.directory.machine.deadlocks.add(file, (session.id, owner)),
        changing: Mutex::default(),
        ranges: AtomicUsize::default(),
        rooms: Mutex::default(),
    });
    let mut by_owner = session.locks.by_owner.lock().expect("not poisoned");
    if by_owner.len() >= halved_for_guests(MAX_OWNERS) {
        return Err(Errno::ENOLCK.into());
    }
    // Under the lock under which the end empties the table, so that no lock is left over.
    if session.is_over() {
        return Err(Errno::ESTALE.into());
    }
    Ok(by_owner.entry((place.file, owner)).or_insert(description).clone())
}

/// Opens the file once more to test for locks, read-only if possible: a program that is open for
/// writing can't be executed (ETXTBSY).
fn open_to_ask(session: &Session, place: Place) -> Result<OwnedFd, Fault> {
    match session.target(place)? {
        Target::Opened(opened)
            if !opened.flags.contains(OpenFlags::READ)
                && opened.flags.contains(OpenFlags::WRITE) =>
        {
            Ok(open_again(&opened, OFlags::WRONLY)?)
        }
        Target::Opened(opened) => Ok(open_again(&opened, OFlags::RDONLY)?),
        Target::Node(_) => {
            // A read-only export allows no descriptor for writing.
            let usable = session.usable(place, OpenFlags::READ);
            let usable = usable.or_else(|_| session.usable(place, OpenFlags::WRITE))?;
            usable.as_fd().try_clone_to_owned().map_err(super::files::errno_of)
        }
    }
}

fn open_again(opened: &Opened, access: OFlags) -> rustix::io::Result<OwnedFd> {
    let flags = access | OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NONBLOCK;
    rustix::fs::open(attributes::link_to(opened.fd.as_fd()), flags, Mode::empty())
}

fn request(lock: &RangeLock) -> Result<libc::flock, Fault> {
    let kind = match lock.access {
        None => libc::F_UNLCK,
        Some(Access::Shared) => libc::F_RDLCK,
        Some(Access::Exclusive) => libc::F_WRLCK,
    };
    let Range { start, end } = lock.range;
    if start >= end {
        return Err(Errno::EINVAL.into());
    }
    let limit = i64::MAX.unsigned_abs();
    let length = if end > limit { 0 } else { end - start };
    Ok(libc::flock {
        l_type: kind as i16,
        l_whence: libc::SEEK_SET as i16,
        l_start: i64::try_from(start).map_err(|_| Errno::EINVAL)?,
        l_len: i64::try_from(length).map_err(|_| Errno::EINVAL)?,
        l_pid: 0,
    })
}

/// A request to unlock the whole file.
fn everything() -> libc::flock {
    libc::flock {
        l_type: libc::F_UNLCK as i16,
        l_whence: libc::SEEK_SET as i16,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    }
}

fn operation(access: Option<Access>) -> FlockOperation {
    match access {
        None => FlockOperation::NonBlockingUnlock,
        Some(Access::Shared) => FlockOperation::NonBlockingLockShared,
        Some(Access::Exclusive) => FlockOperation::NonBlockingLockExclusive,
    }
}
