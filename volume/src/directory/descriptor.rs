//! Descriptors of an export's files that outlive the job that opened them.
//!
//! Invariant: close(2) and the unlocking of a file of an export run on threads that may block,
//! which but for [`super::Directory::close_removed`] are worker threads. close(2) can take minutes
//! (the last one of a removed file frees its extents), and a network file system or FUSE that
//! doesn't answer (`FLUSH`) keeps it for ever. A runtime's thread, on which an identity's rights
//! are checked and its runs are ended, never waits for it: dropping a [`Descriptor`], wherever that
//! is, hands it to a [`ClosingLane`] of the account that opened it.
//!
//! Bounds: a lane has one thread at a time; each account has two lanes for each export that it
//! uses. A descriptor stays charged to its account until close(2) has returned, so an account has
//! no more of them than its share of the pool, however many of its sessions have ended.

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::Path,
    sync::Arc,
};

use super::workers::{self, Held, Workers};

/// A queue of jobs of one account for one export, which run one after the other, apart from the
/// account's other jobs: a file system that hangs holds up no other one.
#[derive(Debug)]
pub struct ClosingLane {
    workers: Arc<Workers>,
    name: String,
}

/// Purpose of a lane.
#[derive(Debug, Clone, Copy)]
pub enum Purpose {
    /// Unlocks the files of ended sessions. Apart from closing, so that locks are given back though
    /// some close(2) takes long.
    Unlocking,
    Closing,
}

/// A descriptor that is closed on a worker thread.
#[derive(Debug)]
pub struct Descriptor {
    /// `None` only while it is dropped.
    fd: Option<OwnedFd>,
    /// `None`: it is `O_PATH`, whose close(2) asks no file system; a worker thread closes it at
    /// once.
    charge: Option<Held>,
    lane: Arc<ClosingLane>,
}

impl ClosingLane {
    /// Returns the lane of that account, export and purpose.
    pub fn new(workers: &Arc<Workers>, account: &str, tree: &Path, purpose: Purpose) -> Arc<Self> {
        let name = workers::lane_name(account, &format!("{purpose:?} {}", tree.display()));
        Arc::new(Self { workers: workers.clone(), name })
    }

    /// Runs a job after the earlier ones, without waiting for it.
    pub fn run(&self, job: impl FnOnce() + Send + 'static) {
        self.workers.run_in_lane(&self.name, Box::new(job));
    }
}

impl Descriptor {
    /// Wraps the descriptor of an open file. `charge` is held until it is closed.
    pub fn open(lane: &Arc<ClosingLane>, fd: OwnedFd, charge: Held) -> Self {
        Self { fd: Some(fd), charge: Some(charge), lane: lane.clone() }
    }

    /// Wraps an `O_PATH` descriptor.
    pub fn path(lane: &Arc<ClosingLane>, fd: OwnedFd) -> Self {
        Self { fd: Some(fd), charge: None, lane: lane.clone() }
    }

    /// Closes it before this returns. To be called without a lock, on a thread that may block.
    pub fn close(mut self) {
        drop(self.fd.take());
    }
}

impl AsFd for Descriptor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_ref().expect("open until it is dropped").as_fd()
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        let Some(fd) = self.fd.take() else { return };
        if self.charge.is_none() && workers::is_worker() {
            return drop(fd);
        }
        let (charge, lane) = (self.charge.take(), self.lane.clone());
        self.lane.run(move || {
            drop(fd);
            drop((charge, lane));
        });
    }
}

#[cfg(test)]
mod tests {
    use std::{
        fs::{self, File},
        sync::mpsc,
        time::{Duration, Instant},
    };

    use rustix::fs::{FlockOperation, flock};

    use super::*;
    use crate::{
        Store as _,
        directory::{Account, Directory, DirectorySession, Liveness, Machine, Mutability, Rights},
        store::{Access, Answer, Caller, Lock, NewMode, Op, OpenFlags, Place, Wait},
    };

    /// Completes what does not depend on the test's thread.
    fn soon(is_true: impl Fn() -> bool) -> bool {
        let began = Instant::now();
        while !is_true() && began.elapsed() < Duration::from_secs(10) {
            std::thread::sleep(Duration::from_millis(5));
        }
        is_true()
    }

    #[test]
    fn a_descriptor_is_closed_in_its_lane_and_charged_until_then() {
        let workers = Arc::new(Workers::start(Arc::default()).unwrap());
        let lane =
            |account, name| ClosingLane::new(&workers, account, Path::new(name), Purpose::Closing);
        let (ada, (release, gate)) = (lane("ada", "/a"), mpsc::channel::<()>());
        ada.run(move || {
            let _ = gate.recv();
        });
        let (end, kept_open) = rustix::pipe::pipe().unwrap();
        let (path, path_kept_open) = rustix::pipe::pipe().unwrap();
        let charge: Held = Arc::new(());
        drop(Descriptor::open(&ada, end, charge.clone()));
        drop(Descriptor::path(&ada, path));
        // Another file system's descriptors don't wait for those.
        let (other, other_kept_open) = rustix::pipe::pipe().unwrap();
        drop(Descriptor::open(&lane("ada", "/b"), other, Arc::new(())));
        assert!(soon(|| rustix::io::write(&other_kept_open, b"x").is_err()));
        for kept_open in [&kept_open, &path_kept_open] {
            rustix::io::write(kept_open, b"x").expect("it is not closed on this thread");
        }
        assert_eq!(Arc::strong_count(&charge), 2);
        release.send(()).unwrap();
        assert!(soon(|| Arc::strong_count(&charge) == 1));
        assert!(soon(|| rustix::io::write(&path_kept_open, b"x").is_err()));
        rustix::io::write(&kept_open, b"x").unwrap_err();
    }

    #[tokio::test]
    async fn the_end_of_a_session_gives_back_locks_though_closing_hangs() {
        let tree = tempfile::tempdir().unwrap();
        let tree = tree.path().canonicalize().unwrap();
        let machine = Machine::blind().unwrap();
        let directory =
            Directory::open(machine, &tree, Rights::Own, Mutability::ReadWrite).unwrap();
        let session =
            DirectorySession::open_for(Account::named("ada"), directory, Liveness::Served);
        let (caller, name) = (Caller::default(), "f");
        let create = Op::Create {
            parent: session.root(),
            name: name.into(),
            mode: NewMode::new(0o644, 0),
            flags: OpenFlags::READ | OpenFlags::WRITE,
        };
        let Answer::Opened { handle, entry, .. } = session.call(&caller, create).await.unwrap()
        else {
            panic!("opened")
        };
        let place = Place { file: entry.attributes.id, handle: Some(handle) };
        let lock = Lock::Whole(Some(Access::Exclusive));
        let lock = Op::Lock { place, owner: 1, lock, wait: Wait::No };
        session.call(&caller, lock).await.unwrap();
        let file = File::open(tree.join(name)).unwrap();
        let is_free = || flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok();
        assert!(!is_free());
        let (release, gate) = mpsc::channel::<()>();
        session.0.closing.run(move || {
            let _ = gate.recv();
        });
        session.end();
        assert!(soon(is_free), "the lock is given back");
        tokio::time::timeout(Duration::from_secs(10), session.is_quiet()).await.unwrap();
        let is_open = || {
            let open = fs::read_dir("/proc/self/fd").unwrap().flatten();
            let to = |link: fs::DirEntry| fs::read_link(link.path()).ok();
            open.filter_map(to).filter(|path| *path == tree.join(name)).count()
        };
        // The test's own one, the session's, and the cached one without rights.
        let held = is_open();
        drop((session, release));
        assert!(soon(|| is_open() < held));
    }
}
