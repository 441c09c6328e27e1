//! The store over a directory of this machine: what an executor serves. Every path is walked by the
//! kernel below the directory; nothing leads out of it, nor into what else is mounted there.
//!
//! * [`Directory`]: one export, with the rights of those who use it; [`DirectorySession`]: one of
//!   them
//! * `session`: one op, from what it is going to touch to its answer
//! * `nodes`: which file an id means; `attributes`: how it is
//! * `names`: names made, changed and removed; `listing`: walked and listed
//! * `files`: open files, their bytes; `transfer`: many at a time; `steps`: what takes long;
//!   `locks`; `limits`: of one message
//! * `reserved`: space held for files that a session is going to put
//! * [`watch`]: what other programs change
//! * `workers`: the threads; `account`: what each identity may use of what is shared; `sys`: the
//!   file with `unsafe`
//!
//! Invariant: every system call about a name or a file of the export is made on a worker thread
//! between the beginning and the end of `session::Session::as_caller`, as the caller and without
//! any capability that the caller does not have. The one exception is `sys::open_handle`, of which
//! `nodes` uses no more than the path.

mod account;
mod attributes;
mod files;
mod limits;
mod listing;
mod locks;
mod names;
mod nodes;
mod reserved;
mod rights;
mod rivals;
mod session;
mod steps;
mod sys;
mod transfer;
pub mod watch;
mod workers;

use std::{
    io,
    os::fd::{AsFd as _, AsRawFd as _, OwnedFd},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, atomic::AtomicUsize},
};

use nix::{errno::Errno, unistd::geteuid};
use rustix::fs::{AtFlags, CWD, Mode, OFlags, ResolveFlags, StatxFlags, statx};

pub use self::{
    account::{Account, Charge, Pool, is_share},
    listing::MAX_NAMES,
    rivals::Rivals,
    session::{DirectorySession, Liveness, WeakSession},
    sys::Acting,
    transfer::{READ_BYTES, WriteRoom},
    workers::{HELD, Held},
};
use self::{nodes::Nodes, watch::Watch, workers::Workers};
use crate::{
    keeper::Keeper,
    store::{Caller, FileId, Leases, Watched},
};

/// Names of so many directories are changed at the same time.
const NAME_LOCKS: usize = 64;

/// With whose rights files are touched.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Rights {
    /// This process's.
    Own,
    /// One account's, whoever calls. Needs root.
    User(Caller),
    /// Each caller's own. Needs root.
    Callers,
}

/// Whether anything may be changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mutability {
    /// As the rights allow.
    ReadWrite,
    /// Nothing (`EROFS`).
    ReadOnly,
}

/// Locks that sessions wait for, in all and of one account.
const MAX_WAITING_LOCKS: usize = 4096;
const MAX_WAITING_LOCKS_OF_ONE: usize = 256;
/// Ranges that sessions have locked, in all and of one account: some 200 bytes of the kernel's
/// each, and all those of one file are looked at for each lock of it.
const MAX_LOCKED_RANGES: usize = 1 << 18;
const MAX_LOCKED_RANGES_OF_ONE: usize = 1 << 16;
/// Sessions that are being settled, in all and of one account. There is room for each of some
/// hundreds of accounts.
const MAX_SETTLING: usize = 1024;
const MAX_SETTLING_OF_ONE: usize = 2;
/// What all directories of one machine share.
#[derive(Debug)]
pub struct Machine {
    /// The leases.
    pub keeper: Arc<Keeper>,
    workers: Workers,
    low_priority_workers: Workers,
    watch: Watch,
    waiting_locks: Arc<Pool>,
    locked_ranges: Arc<Pool>,
    settling: Arc<Pool>,
    /// Of open files and of locks: half of what this process may have.
    descriptors: Arc<Pool>,
    remembered: Arc<AtomicUsize>,
}

/// An export.
#[derive(Debug)]
pub struct Directory {
    machine: Arc<Machine>,
    nodes: Nodes,
    /// Its path, without symbolic links.
    tree: PathBuf,
    /// Its device (major, minor) and inode. Nothing else gets this inode while the directory is
    /// open.
    identity: (u32, u32, u64),
    rights: Rights,
    mutability: Mutability,
    watched: Watched,
    /// Looking a name up and changing it are one step, among our own.
    name_locks: [Mutex<()>; NAME_LOCKS],
}

fn open_root(path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(rustix::fs::openat2(CWD, path, flags, Mode::empty(), ResolveFlags::NO_SYMLINKS)?)
}

fn identity_of(root: &OwnedFd) -> io::Result<(u32, u32, u64)> {
    // Which file it is the kernel knows without asking a server.
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    let about = statx(root, c"", flags, StatxFlags::INO)?;
    Ok((about.stx_dev_major, about.stx_dev_minor, about.stx_ino))
}

/// An error number, whichever crate it comes from.
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
    /// Starts the threads, and the watch over what other programs change.
    ///
    /// # Errors
    /// When the system has no threads left.
    pub fn start() -> io::Result<Arc<Self>> {
        Self::start_with(Arc::default(), Arc::default())
    }

    /// The same over leases that outlive it: penalties for leases that were not given back in time
    /// must not end with the sessions of whoever has earned them. `rivals` are also those who do
    /// something else.
    ///
    /// # Errors
    /// See [`Machine::start`].
    pub fn start_with(keeper: Arc<Keeper>, rivals: Arc<Rivals>) -> io::Result<Arc<Self>> {
        Self::with(Watch::start(keeper.clone()), keeper, rivals)
    }

    /// As on a machine that does not tell what other programs change.
    ///
    /// # Errors
    /// See [`Machine::start`].
    pub fn blind() -> io::Result<Arc<Self>> {
        Self::with(Watch::none(), Arc::default(), Arc::default())
    }

    /// Without any thread: nothing is watched, and each job is done by whoever asks for it.
    /// For simulations.
    #[must_use]
    pub fn without_threads(keeper: Arc<Keeper>) -> Arc<Self> {
        Self::of(Watch::none(), keeper, (Workers::none(), Workers::none()))
    }

    fn with(watch: Watch, keeper: Arc<Keeper>, rivals: Arc<Rivals>) -> io::Result<Arc<Self>> {
        let workers = (Workers::start(rivals.clone())?, Workers::start_low_priority(rivals)?);
        Ok(Self::of(watch, keeper, workers))
    }

    fn of(
        watch: Watch,
        keeper: Arc<Keeper>,
        (workers, low_priority_workers): (Workers, Workers),
    ) -> Arc<Self> {
        let open_files = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
        let open_files =
            open_files.and_then(|limit| usize::try_from(limit).ok()).unwrap_or(usize::MAX) / 2;
        Arc::new(Self {
            keeper,
            workers,
            low_priority_workers,
            watch,
            waiting_locks: Pool::new(MAX_WAITING_LOCKS, MAX_WAITING_LOCKS_OF_ONE),
            locked_ranges: Pool::new(MAX_LOCKED_RANGES, MAX_LOCKED_RANGES_OF_ONE),
            settling: Pool::new(MAX_SETTLING, MAX_SETTLING_OF_ONE),
            descriptors: Pool::new(open_files, open_files),
            remembered: Arc::default(),
        })
    }
}

impl Directory {
    /// The directory at `path`, which leads through no symbolic link.
    ///
    /// # Errors
    /// The system's, when it can't be opened or is none.
    pub fn open(
        machine: Arc<Machine>,
        path: &Path,
        rights: Rights,
        mutability: Mutability,
    ) -> io::Result<Arc<Self>> {
        let root = open_root(path)?;
        let identity = identity_of(&root)?;
        let watched = machine.watch.cover(root.as_fd());
        let tree = std::fs::read_link(format!("/proc/self/fd/{}", root.as_raw_fd()))?;
        let nodes = Nodes::new(root, geteuid().is_root(), machine.remembered.clone())
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

    /// How other programs' changes are noticed.
    #[must_use]
    pub fn watched(&self) -> Watched {
        self.watched
    }

    /// The directory's path, without symbolic links.
    #[must_use]
    pub fn tree(&self) -> &Path {
        &self.tree
    }

    /// Whether that path leads to this directory now, rather than to another one, or nowhere. May
    /// block.
    #[must_use]
    pub fn is_at(&self, path: &Path) -> bool {
        open_root(path)
            .and_then(|root| identity_of(&root))
            .is_ok_and(|identity| identity == self.identity)
    }

    /// Whether both are one directory of the file system, with whatever rights it is used.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        self.identity == other.identity
    }

    /// Gives back what it holds of files that other programs have removed. May block.
    pub fn close_removed(&self) {
        self.nodes.close_removed();
    }

    /// While what it gives lives, this thread has the rights that the caller's files are touched
    /// with.
    fn act(&self, caller: &Caller) -> Result<Option<Acting>, Fault> {
        match &self.rights {
            Rights::Own => Ok(None),
            Rights::User(user) => Ok(Some(Acting::begin(user)?)),
            Rights::Callers => Ok(Some(Acting::begin(caller)?)),
        }
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

    /// Somebody's leases are of a file that was touched without announcement.
    fn touched(&self, file: FileId, leases: Leases) {
        self.machine.keeper.changed([(self.nodes.file(file), leases)]);
    }
}
