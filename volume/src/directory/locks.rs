//! Locks, which are the kernel's own: programs on the server see them, and it decides which exclude
//! each other. flock(2) is taken on the session's open file. A range lock belongs to an owner of
//! the workstation; each owner has a description of the file of its own here, with its locks on it
//! ("open file description locks", fcntl(2)).
//!
//! Invariant: whoever may not change an export keeps no program of the server, and no other
//! session, from anything. On a read-only export an exclusive lock is refused (`EROFS`); a shared
//! one is granted and excludes nobody: all who could be kept out by it write on the server, which
//! does not wait for readers that may only read.

use std::{
    collections::{HashMap, HashSet},
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
    account::Charge,
    attributes,
    files::{Opened, Target},
    session::Session,
};
use crate::store::{Access, Answer, Caller, FileId, Lock, OpenFlags, Place, RangeLock, Wait};

/// Nobody tells when a program of the server gives a lock back: it is looked for after an eighth of
/// the time that was waited already, between these two. Locks of sessions are told of at once.
const FIRST_LOOK: Duration = Duration::from_millis(50);
const LAST_LOOK: Duration = Duration::from_secs(1);
/// Descriptions for locks, of one session.
const MAX_OWNERS: usize = 4096;
/// Ranges that one owner has locked of one file; the kernel has no bound of its own.
const MAX_RANGES: usize = 4096;

/// The range locks of a session.
#[derive(Debug, Default)]
pub struct Locks {
    by_owner: Mutex<HashMap<(FileId, u64), Arc<Description>>>,
}

/// One owner's locks of one file.
#[derive(Debug)]
struct Description {
    fd: OwnedFd,
    /// Ranges that it may have, at most: a lock or a part given back makes two of one.
    ranges: AtomicUsize,
    /// Room for them among those of its account, a block each.
    rooms: Mutex<Vec<Charge>>,
    _charge: Charge,
}

/// Ranges that are charged at a time.
const BLOCK_RANGES: usize = 16;

impl Locks {
    /// Gives all back, and tells of which files.
    pub fn clear(&self) -> HashSet<FileId> {
        let cleared = std::mem::take(&mut *self.by_owner.lock().expect("not poisoned"));
        cleared.into_keys().map(|(file, _)| file).collect()
    }

    fn of(&self, file: FileId, owner: u64) -> Option<Arc<Description>> {
        self.by_owner.lock().expect("not poisoned").get(&(file, owner)).cloned()
    }
}

impl Description {
    /// Counts a range more.
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
        let known = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", self.fd.as_raw_fd()));
        let known = known
            .map_err(super::files::errno_of)?
            .lines()
            .filter(|line| line.starts_with("lock:"))
            .count();
        self.ranges.store(known, Ordering::Relaxed);
        if known < MAX_RANGES / 2 { Ok(()) } else { Err(Errno::ENOLCK.into()) }
    }
}

/// Takes a lock, or gives it back. To stop waiting, drop the future.
pub async fn lock(
    session: &Arc<Session>,
    caller: &Caller,
    (place, owner): (Place, u64),
    (lock, wait): (Lock, Wait),
) -> Result<Answer, Errno> {
    let waiting = Waiting::default();
    let attempt = || async {
        let (lock, is_given_up) = (lock.clone(), waiting.0.clone());
        // The kernel looks at all locks of a file, while others wait for the processor: one account
        // does so on few.
        let _turn = session.account.step().await;
        let trying = session.as_caller(caller, move |session| {
            try_lock(session, (place, owner), &lock)?;
            if is_given_up.load(Ordering::Relaxed) || session.is_over() {
                let _ = try_lock(session, (place, owner), &lock.given_back());
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
        .try_take(&session.account, 1)
        .ok_or(Errno::ENOLCK)?;
    let waiter = session.keeper().unlocked.wait_for(session.directory.nodes.file(place.file));
    let began = crate::clock::now();
    loop {
        let unlocked = waiter.wake.notified();
        tokio::pin!(unlocked);
        // From here on no wake-up is missed.
        unlocked.as_mut().enable();
        match attempt().await {
            Err(Errno::EAGAIN) => {}
            done => return done,
        }
        let look_again = ((crate::clock::now() - began) / 8).clamp(FIRST_LOOK, LAST_LOOK);
        let _ = tokio::time::timeout(look_again, unlocked).await;
    }
}

/// Tells the thread that works for it when nobody waits any more.
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

fn try_lock(session: &Session, (place, owner): (Place, u64), lock: &Lock) -> Result<(), Fault> {
    if session.directory.require_writable().is_err() {
        return match lock.access() {
            Some(Access::Exclusive) => Err(Errno::EROFS.into()),
            Some(Access::Shared) | None => Ok(()),
        };
    }
    match lock {
        Lock::Whole(access) => {
            let Target::Opened(opened) = session.target(place)? else {
                return Err(Errno::EBADF.into());
            };
            flock(&opened.fd, operation(*access))?;
        }
        Lock::Range(range) => {
            let known = session.locks.of(place.file, owner);
            if known.is_none() && range.access.is_none() {
                return Ok(());
            }
            let description = match known {
                Some(description) => description,
                None => describe(session, (place, owner))?,
            };
            // Giving back needs no room of others.
            if range.access.is_some() {
                description.count(session)?;
            } else {
                description.count_own()?;
            }
            fcntl(&description.fd, FcntlArg::F_OFD_SETLK(&request(range)?))?;
        }
    }
    if lock.access() != Some(Access::Exclusive) {
        session.unlocked(place.file);
    }
    Ok(())
}

/// What is in the way of a lock. Who has none of the file asks by a description that is closed at
/// once.
pub fn test(
    session: &Session,
    (place, owner): (Place, u64),
    range: &RangeLock,
) -> Result<Answer, Fault> {
    let known = session.locks.of(place.file, owner);
    let own = match &known {
        Some(_) => None,
        None => Some(open_to_ask(session, place)?),
    };
    let fd =
        known.as_ref().map(|description| &description.fd).or(own.as_ref()).ok_or(Errno::EBADF)?;
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

/// Gives back all range locks of an owner.
pub fn unlock(session: &Session, file: FileId, owner: u64) {
    let removed = session.locks.by_owner.lock().expect("not poisoned").remove(&(file, owner));
    if removed.is_some() {
        drop(removed);
        session.unlocked(file);
    }
}

/// Opens the file once more, for one owner's locks, as the caller may: flock(2) excludes others
/// also through a descriptor for reading, which the client's kernel sees to; a range is locked
/// through one for writing.
fn describe(session: &Session, (place, owner): (Place, u64)) -> Result<Arc<Description>, Fault> {
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
    let description = Arc::new(Description {
        fd,
        ranges: AtomicUsize::default(),
        rooms: Mutex::default(),
        _charge: charge,
    });
    let mut by_owner = session.locks.by_owner.lock().expect("not poisoned");
    if by_owner.len() >= MAX_OWNERS {
        return Err(Errno::ENOLCK.into());
    }
    // Looked at under the lock, as the end empties the table under it: nothing stays behind.
    if session.is_over() {
        return Err(Errno::ESTALE.into());
    }
    Ok(by_owner.entry((place.file, owner)).or_insert(description).clone())
}

/// Opens the file once more to ask about locks, as the caller may: to read, wherever that is
/// possible. One that is open for writing is no program that can be started.
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
            // An export that is not to be changed gives nothing to write to.
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

fn operation(access: Option<Access>) -> FlockOperation {
    match access {
        None => FlockOperation::NonBlockingUnlock,
        Some(Access::Shared) => FlockOperation::NonBlockingLockShared,
        Some(Access::Exclusive) => FlockOperation::NonBlockingLockExclusive,
    }
}
