//! Locks, which are the kernel's own: programs on the server see them, and it decides which exclude each other. flock(2) is taken on
//! the session's open file. A range lock belongs to an owner of the workstation; each owner has a
//! description of the file of its own here, with its locks on it ("open file description locks", fcntl(2)).

use std::{
    collections::HashMap,
    ops::Range,
    os::fd::{AsFd as _, OwnedFd},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use nix::{
    errno::Errno,
    fcntl::{FcntlArg, fcntl},
    libc,
};
use rustix::fs::{FlockOperation, flock};

use super::{Fault, attributes, files::Target, session::Session};
use crate::store::{Access, Answer, Caller, FileId, Lock, OpenFlags, Place, RangeLock, Wait};

/// Nobody tells when a program of the server gives a lock back. Those of sessions are told of at once.
const LOOK_AGAIN: Duration = Duration::from_millis(50);
/// Descriptions for locks, of one session.
const MAX_OWNERS: usize = 4096;

/// The range locks of a session.
#[derive(Debug, Default)]
pub struct Locks {
    by_owner: Mutex<HashMap<(FileId, u64), Arc<OwnedFd>>>,
}

impl Locks {
    /// Gives all back.
    pub fn clear(&self) {
        self.by_owner.lock().expect("not poisoned").clear();
    }

    fn of(&self, file: FileId, owner: u64) -> Option<Arc<OwnedFd>> {
        self.by_owner.lock().expect("not poisoned").get(&(file, owner)).cloned()
    }
}

/// Takes a lock, or gives it back. To stop waiting, drop the future.
pub async fn lock(
    session: &Arc<Session>,
    caller: &Caller,
    (place, owner): (Place, u64),
    (lock, wait): (Lock, Wait),
) -> Result<Answer, Fault> {
    let keeper = session.keeper().clone();
    let waiting = Waiting::default();
    loop {
        let unlocked = keeper.unlocked.notified();
        tokio::pin!(unlocked);
        unlocked.as_mut().enable();
        let (its, caller, lock, is_given_up) = (session.clone(), caller.clone(), lock.clone(), waiting.0.clone());
        let attempt = move || {
            try_lock(&its, &caller, (place, owner), &lock).map_err(Errno::from)?;
            if is_given_up.load(Ordering::Relaxed) {
                let _ = try_lock(&its, &caller, (place, owner), &lock.given_back());
            }
            Ok(())
        };
        match session.directory.machine.workers.run(attempt).await {
            Err(Errno::EAGAIN) if wait == Wait::Yes => {}
            done => return Ok(done.map(|()| Answer::Done)?),
        }
        let _ = tokio::time::timeout(LOOK_AGAIN, unlocked).await;
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
    fn given_back(&self) -> Self {
        match self {
            Self::Whole(_) => Self::Whole(None),
            Self::Range(lock) => Self::Range(RangeLock { access: None, ..lock.clone() }),
        }
    }
}

fn try_lock(session: &Session, caller: &Caller, (place, owner): (Place, u64), lock: &Lock) -> Result<(), Fault> {
    match lock {
        Lock::Whole(access) => {
            let Target::Opened(opened) = session.target(place)? else { return Err(Errno::EBADF.into()) };
            flock(&opened.fd, operation(*access))?;
            if *access != Some(Access::Exclusive) {
                session.keeper().unlocked.notify_waiters();
            }
        }
        Lock::Range(range) => {
            let known = session.locks.of(place.file, owner);
            if known.is_none() && range.access.is_none() {
                return Ok(());
            }
            let description = match known {
                Some(description) => description,
                None => describe(session, caller, (place, owner))?,
            };
            fcntl(&description, FcntlArg::F_OFD_SETLK(&request(range)?))?;
            if range.access != Some(Access::Exclusive) {
                session.keeper().unlocked.notify_waiters();
            }
        }
    }
    Ok(())
}

/// What is in the way of a lock.
pub fn test(
    session: &Session,
    caller: &Caller,
    (place, owner): (Place, u64),
    range: &RangeLock,
) -> Result<Answer, Fault> {
    let description = match session.locks.of(place.file, owner) {
        Some(description) => description,
        None => describe(session, caller, (place, owner))?,
    };
    let mut asked = request(range)?;
    fcntl(&description, FcntlArg::F_OFD_GETLK(&mut asked))?;
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
        session.keeper().unlocked.notify_waiters();
    }
}

/// Opens the file once more, for one owner's locks.
fn describe(session: &Session, caller: &Caller, (place, owner): (Place, u64)) -> Result<Arc<OwnedFd>, Fault> {
    let target = session.target(place)?;
    let link = attributes::link_to(target.fd());
    let open = |flags| rustix::fs::open(&*link, flags | FLAGS, rustix::fs::Mode::empty());
    use rustix::fs::OFlags;
    const FLAGS: OFlags = OFlags::CLOEXEC.union(OFlags::NOCTTY).union(OFlags::NONBLOCK);
    let description = match &target {
        // As it was opened, also where it could not be opened so any more.
        Target::Opened(opened) => {
            match (opened.flags.contains(OpenFlags::READ), opened.flags.contains(OpenFlags::WRITE)) {
                (true, true) => open(OFlags::RDWR)?,
                (false, true) => open(OFlags::WRONLY)?,
                // flock(2) excludes others through whatever descriptor; that fcntl(2) does not, the client's kernel sees to.
                _ => open(OFlags::RDWR).or_else(|_| open(OFlags::RDONLY))?,
            }
        }
        Target::Node(_) => {
            let usable = session.usable(caller, place, OpenFlags::READ | OpenFlags::WRITE);
            let usable = usable.or_else(|_| session.usable(caller, place, OpenFlags::READ))?;
            usable.as_fd().try_clone_to_owned().map_err(super::files::errno_of)?
        }
    };
    let description = Arc::new(description);
    let mut by_owner = session.locks.by_owner.lock().expect("not poisoned");
    if by_owner.len() >= MAX_OWNERS {
        return Err(Errno::ENOLCK.into());
    }
    Ok(by_owner.entry((place.file, owner)).or_insert(description).clone())
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
