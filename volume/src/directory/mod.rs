//! The store over a local directory, which an executor serves. The kernel resolves every path
//! beneath the directory (openat2(2)): no path leads out of it or into another mount.
//!
//! * [`Directory`]: one export, with the rights that apply; [`DirectorySession`]: a session with it
//! * `session`: one op, from its intents to its answer; `rights`: permission checks before recalls
//! * `nodes`: files by id; `attributes`: stat, chmod, xattrs and the like
//! * `names`: create, rename, remove; `listing`: walk, list
//! * `files`: open files; `transfer`: bulk reads and writes; `steps`: long operations; `locks`,
//!   `deadlock`; `limits`: of one message
//! * `descriptor`: descriptors that outlive a job, and where they are closed; `effects`: whether a
//!   call has begun to change anything
//! * `reserved`: space held for files that a session is going to put
//! * [`watch`]: changes by other programs
//! * `workers`: the threads; `account`: fair shares; `rivals`: recent CPU use by account; `sys`:
//!   the module with `unsafe`
//!
//! Invariant: every system call about a name or a file of the export is made on a worker thread
//! inside `session::Session::as_caller`, as the caller and without any capability that the caller
//! does not have. The exceptions: of the result of `sys::open_handle`, `nodes` uses only the path;
//! and what needs no rights of the caller, unlocking and closing, runs on worker threads, too
//! (`descriptor`). Directories are opened and compared ([`Directory::open`], [`Directory::is_at`],
//! [`Directory::close_removed`]) on threads that may block.

mod account;
mod attributes;
mod deadlock;
mod descriptor;
mod effects;
mod files;
mod limits;
mod listing;
mod locks;
mod names;
mod nodes;
mod put;
mod reserved;
mod rights;
mod rivals;
mod session;
mod steps;
mod sys;
mod totals;
mod transfer;
pub mod watch;
mod workers;

use std::{
    io,
    os::fd::{AsFd as _, AsRawFd as _, OwnedFd},
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
};

use nix::{errno::Errno, unistd::geteuid};
use rustix::fs::{AtFlags, CWD, Mode, OFlags, ResolveFlags, StatxFlags, statx};

pub use self::{
    account::{Account, Charge, Pool, PoolUsage},
    effects::{EFFECTS, EffectMark, Effects},
    listing::MAX_NAMES,
    rivals::Rivals,
    session::{DirectorySession, Liveness, WeakSession},
    sys::Acting,
    transfer::{READ_BYTES, WriteRoom},
    workers::{HELD, Held},
};
use self::{
    deadlock::Deadlocks,
    descriptor::{ClosingLane, Descriptor, Purpose},
    nodes::Nodes,
    totals::NodeTotals,
    watch::Watch,
    workers::Workers,
};
use crate::{
    keeper::Keeper,
    store::{Caller, FileId, Leases, Watched},
};

/// Number of locks for changes of names: a directory's id selects its lock.
const NAME_LOCKS: usize = 64;

/// Identity that files are accessed as.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Rights {
    /// This process's.
    Own,
    /// One account's, whoever calls. Needs root.
    User(Caller),
    /// Each caller's own. Needs root.
    Callers,
}

/// Read-write or read-only export.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mutability {
    /// As the rights allow.
    ReadWrite,
    /// Every change fails with `EROFS`.
    ReadOnly,
}

/// Limits for waiting lock requests: in all, and of one account.
const MAX_WAITING_LOCKS: usize = 4096;
const MAX_WAITING_LOCKS_OF_ONE: usize = 256;
/// Limits for locked ranges: in all, and of one account. Each takes some 200 bytes in the kernel,
/// which scans all ranges of a file for each lock request.
const MAX_LOCKED_RANGES: usize = 1 << 18;
const MAX_LOCKED_RANGES_OF_ONE: usize = 1 << 16;
/// Limits for concurrent [`Op::Settle`](crate::store::Op::Settle): in all (room for some hundreds
/// of accounts), and of one account.
const MAX_SETTLING: usize = 1024;
const MAX_SETTLING_OF_ONE: usize = 2;
/// Part of a machine's descriptors for those that are cached.
const KEPT_PART: usize = 3;

/// Half of the files that this process may have open.
fn half_of_open_files() -> usize {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    limit.and_then(|limit| usize::try_from(limit).ok()).unwrap_or(usize::MAX) / 2
}

/// Resources that all exports of one machine share.
#[derive(Debug)]
pub struct Machine {
    /// The leases.
    pub keeper: Arc<Keeper>,
    workers: Arc<Workers>,
    low_priority_workers: Workers,
    watch: Watch,
    waiting_locks: Arc<Pool>,
    locked_ranges: Arc<Pool>,
    deadlocks: Deadlocks,
    settling: Arc<Pool>,
    /// Descriptors for open files and locks.
    descriptors: Arc<Pool>,
    /// Space that accounts hold by reservations.
    reserved: Arc<reserved::HeldBytes>,
    totals: Arc<NodeTotals>,
}

/// An export.
#[derive(Debug)]
pub struct Directory {
    machine: Arc<Machine>,
    nodes: Nodes,
    /// Its path, without symbolic links.
    tree: PathBuf,
    identity: RootIdentity,
    rights: Rights,
    mutability: Mutability,
    watched: Watched,
    /// Make look-up and change of a name atomic within this process.
    name_locks: [Mutex<()>; NAME_LOCKS],
}

fn open_root(path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(rustix::fs::openat2(CWD, path, flags, Mode::empty(), ResolveFlags::NO_SYMLINKS)?)
}

/// A directory in a mount. The inode number is not reused while the directory is open; of a mount
/// over it, or another one of the same directory, the flags may differ (read-only).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RootIdentity {
    device: (u32, u32),
    inode: u64,
    mount: u64,
}

impl RootIdentity {
    /// Of an open directory.
    ///
    /// # Errors
    /// System errors.
    pub fn of(root: &OwnedFd) -> io::Result<Self> {
        // The inode number needs no request to a network file system's server.
        let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
        let about = statx(root, c"", flags, StatxFlags::INO | StatxFlags::MNT_ID)?;
        let device = (about.stx_dev_major, about.stx_dev_minor);
        Ok(Self { device, inode: about.stx_ino, mount: about.stx_mnt_id })
    }
}

/// Error number from nix or rustix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Fault(Errno);

impl From<Errno> for Fault {
    fn from(errno: Errno) -> Self {
        Self(errno)
    }
}

impl From<rustix::io::Errno> for Fault {
    fn from(errno: rustix::io::Errno) -> Self {
        Self(Errno::from_raw(errno.raw_os_error()))
    }
}

impl From<Fault> for Errno {
    fn from(fault: Fault) -> Self {
        fault.0
    }
}

impl Machine {
    /// Starts the threads, and the watch for changes by other programs.
    ///
    /// # Errors
    /// The system can't start more threads.
    pub fn start() -> io::Result<Arc<Self>> {
        Self::start_with(Arc::default(), Arc::default(), half_of_open_files())
    }

    /// Like [`Machine::start`], but with a keeper that outlives it, since penalties for late
    /// returns of leases must outlive the session. `rivals` also counts the accounts' other work.
    /// `descriptors` are those that all exports may have open.
    ///
    /// # Errors
    /// See [`Machine::start`].
    pub fn start_with(
        keeper: Arc<Keeper>,
        rivals: Arc<Rivals>,
        descriptors: usize,
    ) -> io::Result<Arc<Self>> {
        Self::with(Watch::start(keeper.clone()), keeper, rivals, descriptors)
    }

    /// Like [`Machine::start`], but without a watch for changes by other programs.
    ///
    /// # Errors
    /// See [`Machine::start`].
    pub fn blind() -> io::Result<Arc<Self>> {
        Self::with(Watch::none(), Arc::default(), Arc::default(), half_of_open_files())
    }

    /// Creates a machine without threads and watch, on which each job runs on its caller's thread.
    /// For simulations.
    #[must_use]
    pub fn without_threads(keeper: Arc<Keeper>) -> Arc<Self> {
        Self::of(Watch::none(), keeper, Workers::none(), Workers::none(), half_of_open_files())
    }

    fn with(
        watch: Watch,
        keeper: Arc<Keeper>,
        rivals: Arc<Rivals>,
        descriptors: usize,
    ) -> io::Result<Arc<Self>> {
        let workers = Workers::start(rivals.clone())?;
        let low_priority_workers = Workers::start_low_priority(rivals)?;
        Ok(Self::of(watch, keeper, workers, low_priority_workers, descriptors))
    }

    fn of(
        watch: Watch,
        keeper: Arc<Keeper>,
        workers: Workers,
        low_priority_workers: Workers,
        descriptors: usize,
    ) -> Arc<Self> {
        let open_files = descriptors - descriptors / KEPT_PART;
        Arc::new(Self {
            keeper,
            workers: Arc::new(workers),
            low_priority_workers,
            watch,
            waiting_locks: Pool::new(MAX_WAITING_LOCKS, MAX_WAITING_LOCKS_OF_ONE),
            locked_ranges: Pool::new(MAX_LOCKED_RANGES, MAX_LOCKED_RANGES_OF_ONE),
            deadlocks: Deadlocks::default(),
            settling: Pool::new(MAX_SETTLING, MAX_SETTLING_OF_ONE),
            descriptors: Pool::new(open_files, open_files),
            reserved: Arc::default(),
            totals: Arc::new(NodeTotals::new(descriptors / KEPT_PART)),
        })
    }
}

impl Directory {
    /// Opens the directory at `path`, which must contain no symbolic link.
    ///
    /// # Errors
    /// The system's, if it can't be opened or is no directory.
    pub fn open(
        machine: Arc<Machine>,
        path: &Path,
        rights: Rights,
        mutability: Mutability,
    ) -> io::Result<Arc<Self>> {
        let root = open_root(path)?;
        let identity = RootIdentity::of(&root)?;
        let watched = machine.watch.cover(root.as_fd());
        let tree = std::fs::read_link(format!("/proc/self/fd/{}", root.as_raw_fd()))?;
        // Several accounts may share the directory.
        let lane = ClosingLane::new(&machine.workers, "", &tree, Purpose::Closing);
        let root = Descriptor::path(&lane, root);
        let nodes = Nodes::new(root, lane, geteuid().is_root(), machine.totals.clone())
            .map_err(|fault| io::Error::from(Errno::from(fault)))?;
        let name_locks = std::array::from_fn(|_| Mutex::default());
        Ok(Arc::new(Self {
            machine,
            nodes,
            tree,
            identity,
            rights,
            mutability,
            watched,
            name_locks,
        }))
    }

    /// Returns the method by which changes by other programs are noticed.
    #[must_use]
    pub fn watched(&self) -> Watched {
        self.watched
    }

    /// Returns the directory's path, without symbolic links.
    #[must_use]
    pub fn tree(&self) -> &Path {
        &self.tree
    }

    /// Returns true if that path leads to this directory at present, in the same mount. May block.
    #[must_use]
    pub fn is_at(&self, path: &Path) -> bool {
        open_root(path)
            .and_then(|root| RootIdentity::of(&root))
            .is_ok_and(|identity| identity == self.identity)
    }

    /// Returns the directory's identity, which no other one has as long as this is open.
    #[must_use]
    pub fn root_identity(&self) -> RootIdentity {
        self.identity
    }

    /// Returns true if both are the same directory in the same mount, whatever their rights.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        self.identity == other.identity
    }

    /// Closes descriptors of files that other programs have removed. May block.
    pub fn close_removed(&self) {
        self.nodes.close_removed();
    }

    /// Gives this thread the identity for the caller's accesses, until the result is dropped.
    fn act(&self, caller: &Caller) -> Result<Option<Acting>, Fault> {
        let keeps_bits = !self.is_guest(caller);
        match &self.rights {
            Rights::Own if keeps_bits => Ok(None),
            Rights::Own => Ok(Acting::begin_as_guest()?),
            Rights::User(user) => Ok(Some(Acting::begin(user, keeps_bits)?)),
            Rights::Callers => Ok(Some(Acting::begin(caller, true)?)),
        }
    }

    /// Returns true for a caller who acts with the rights of another user's account.
    fn is_guest(&self, caller: &Caller) -> bool {
        caller.is_guest && self.rights != Rights::Callers
    }

    fn require_writable(&self) -> Result<(), Fault> {
        match self.mutability {
            Mutability::ReadWrite => Ok(()),
            Mutability::ReadOnly => Err(Errno::EROFS.into()),
        }
    }

    fn name_lock(&self, directory: FileId) -> usize {
        (directory.generation % NAME_LOCKS as u64) as usize
    }

    /// Ends other sessions' leases of a file that was changed without announcement.
    fn touched(&self, file: FileId, leases: Leases) {
        self.machine.keeper.changed([(self.nodes.file(file), leases)]);
    }
}
