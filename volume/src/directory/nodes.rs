//! Files by id: every file that a session has seen, with hints for finding it again. An id that was
//! never given out is unknown, so that guessed ids don't lead out of the export.
//!
//! Invariant: an id is resolved only by a path walk from the export's root that the kernel has just
//! made with the caller's rights, and that has ended at the file of that id. So this caller may
//! search every directory of the path at this moment. Cached descriptors, handles and names are
//! only hints for the path, never trusted, and a descriptor that was opened for one caller serves
//! no other. One exception: a file without names has no path, and is served to the account that
//! walked to it last, which could have kept it open. [`Nodes::node`] and [`Nodes::child`] must be
//! called with the caller's rights ([`super::session::Session::as_caller`]).

use std::{
    collections::{HashMap, VecDeque},
    ffi::{OsStr, OsString},
    os::{
        fd::{AsFd as _, BorrowedFd, OwnedFd},
        unix::ffi::OsStrExt as _,
    },
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard},
};

use nix::errno::Errno;
use rustix::fs::{AtFlags, Mode, OFlags, ResolveFlags, StatxFlags, openat2, statx};

use super::{
    Fault,
    descriptor::{ClosingLane, Descriptor},
    sys::{self, Handle, Purpose},
    totals::NodeTotals,
};
use crate::{
    leases::{File, FileRef},
    store::{FileId, Kind, NameIn},
};

/// Limit of cached descriptors of one export, which follow renames by other programs. Those of
/// removed files are closed by [`Nodes::close_removed`].
const MAX_DESCRIPTORS: usize = 1024;
/// NAME_MAX.
const MAX_NAME_BYTES: usize = 255;
/// PATH_MAX without the NUL at its end: the longest path of one system call.
const MAX_PATH_BYTES: usize = 4095;
/// Limit of known names of one file.
const MAX_LINKS: usize = 8;
/// Limit of path components when a path is built from known names.
const MAX_DEPTH: usize = 4096;

/// A resolved file.
#[derive(Debug, Clone)]
pub struct Node {
    /// Its id.
    pub id: FileId,
    /// Its file type.
    pub kind: Kind,
    /// An `O_PATH` descriptor.
    pub fd: Arc<Descriptor>,
}

/// All known files.
#[derive(Debug)]
pub struct Nodes {
    root: Node,
    /// The root's mount id; other mounts aren't entered.
    mount: u64,
    /// See [`sys::system_of`].
    system: u64,
    /// True if file handles can be opened; otherwise files are found again by name.
    opens_handles: bool,
    telling: Purpose,
    /// True if the file system supports ACLs.
    has_acls: bool,
    /// The root's path at the last look; only a hint.
    root_path: Mutex<PathBuf>,
    totals: Arc<NodeTotals>,
    /// For descriptors that are dropped elsewhere than on a worker thread.
    lane: Arc<ClosingLane>,
    state: Mutex<NodesState>,
}

#[derive(Debug, Default)]
struct NodesState {
    known: HashMap<FileId, Known>,
    /// Eviction order (second chance): a used file goes to the back once more.
    order: VecDeque<FileId>,
    open: VecDeque<FileId>,
    /// Known files with a cached descriptor.
    kept_open: usize,
    /// Descriptors to close when the lock is released: the last one of a removed file frees it.
    given_up: Vec<Arc<Descriptor>>,
}

/// A name in a directory.
type At = (FileId, Box<OsStr>);

#[derive(Debug)]
struct Known {
    handle: Option<Handle>,
    /// The names under which it was found, the latest first: a file may have several.
    at: Vec<At>,
    fd: Option<Arc<Descriptor>>,
    /// True if it is in [`NodesState::open`].
    is_listed: bool,
    /// Uid of the caller that walked to it last.
    walker: u32,
    is_used: bool,
}

/// Policy for caching the descriptor of a file that was looked up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Keep {
    Open,
    /// Not cached: one of many, as in a directory's listing.
    Way,
}

impl Nodes {
    /// Creates an empty table for the export at `root`.
    pub fn new(
        root: Descriptor,
        lane: Arc<ClosingLane>,
        may_open_handles: bool,
        totals: Arc<NodeTotals>,
    ) -> Result<Self, Fault> {
        let found = look(root.as_fd())?;
        let telling = match sys::handle_of(root.as_fd(), Purpose::Opening) {
            Ok(handle)
                if sys::handle_of(root.as_fd(), Purpose::Telling)
                    .is_ok_and(|telling| telling != handle) =>
            {
                Purpose::Telling
            }
            Ok(_) => Purpose::Opening,
            Err(_) => Purpose::Telling,
        };
        let opens = |handle: Handle| sys::open_handle(root.as_fd(), &handle).is_ok();
        let opens_handles =
            may_open_handles && sys::handle_of(root.as_fd(), Purpose::Opening).is_ok_and(opens);
        let system = sys::system_of(root.as_fd())?;
        let id =
            FileId { inode: found.inode, generation: number_of(root.as_fd(), &found, telling).0 };
        let has_acls = super::attributes::may_have_acls(root.as_fd());
        let root = Node { id, kind: Kind::Directory, fd: Arc::new(root) };
        let root_path = Mutex::new(path_of(&root.fd).unwrap_or_default());
        let mount = found.mount;
        let state = Mutex::default();
        Ok(Self {
            root,
            mount,
            system,
            opens_handles,
            telling,
            has_acls,
            root_path,
            totals,
            lane,
            state,
        })
    }

    /// Returns the export's root directory.
    pub fn root(&self) -> &Node {
        &self.root
    }

    /// Returns true if files of the export can have ACLs.
    pub fn has_acls(&self) -> bool {
        self.has_acls
    }

    /// Returns the file's key in the lease table.
    pub fn file(&self, id: FileId) -> File {
        File { system: self.system, generation: id.generation }
    }

    /// Returns the file with its key in the lease table.
    pub fn file_ref(&self, id: FileId) -> FileRef {
        FileRef { key: self.file(id), id }
    }

    /// Resolves an id that was given out before; `EACCES` if the caller may not walk to it,
    /// `ESTALE` if no path is known any more.
    pub fn node(&self, id: FileId) -> Result<Node, Fault> {
        if id == self.root.id {
            return Ok(self.root.clone());
        }
        let (kept, handle) = {
            let mut state = self.state.lock().expect("not poisoned");
            let known = state.known.get_mut(&id).ok_or(Errno::ESTALE)?;
            known.is_used = true;
            (known.fd.clone(), known.handle.clone())
        };
        let mut outcome = Errno::ESTALE.into();
        if let Some(path) = kept.as_ref().and_then(|fd| self.path_below(fd)) {
            match self.walk_to(id, &path) {
                Err(fault) => outcome = graver(outcome, fault),
                found => return found,
            }
        }
        for path in self.known_paths(id) {
            match self.walk_to(id, &path) {
                Err(fault) => outcome = graver(outcome, fault),
                found => return self.keep_found(found),
            }
        }
        let opened = handle
            .and_then(|handle| sys::open_handle(self.root.fd.as_fd(), &handle).ok())
            .map(|fd| Arc::new(self.descriptor(fd)));
        if let Some(path) = opened.as_ref().and_then(|fd| self.path_below(fd)) {
            match self.walk_to(id, &path) {
                Err(fault) => outcome = graver(outcome, fault),
                found => return self.keep_found(found),
            }
        }
        if outcome == Errno::ESTALE.into()
            && let Some(node) = kept.or(opened).and_then(|fd| self.unlinked(id, fd))
        {
            return Ok(node);
        }
        Err(outcome)
    }

    /// Returns the file of that id if it has no names and this caller was the last to walk to it.
    fn unlinked(&self, id: FileId, fd: Arc<Descriptor>) -> Option<Node> {
        let walker = self.state.lock().expect("not poisoned").known.get(&id)?.walker;
        let found = look(fd.as_fd()).ok()?;
        let is_it = found.inode == id.inode
            && number_of(fd.as_fd(), &found, self.telling).0 == id.generation;
        let is_gone = found.links == 0 && found.kind != Kind::Directory;
        (is_it && is_gone && walker == sys::file_ids().0).then_some(Node {
            id,
            kind: found.kind,
            fd,
        })
    }

    fn keep_found(&self, found: Result<Node, Fault>) -> Result<Node, Fault> {
        let node = found?;
        let mut state = self.state.lock().expect("not poisoned");
        state.keep_open(node.id, node.fd.clone(), &self.totals);
        if let Some(known) = state.known.get_mut(&node.id) {
            known.walker = sys::file_ids().0;
        }
        state.unlock();
        Ok(node)
    }

    /// Walks from the root with this thread's rights; `ESTALE` unless it ends at the file of that
    /// id.
    fn walk_to(&self, id: FileId, path: &Path) -> Result<Node, Fault> {
        let fd = self.open_below_root(path)?;
        let found = look(fd.as_fd())?;
        if found.inode != id.inode || number_of(fd.as_fd(), &found, self.telling).0 != id.generation
        {
            return Err(Errno::ESTALE.into());
        }
        Ok(Node { id, kind: found.kind, fd: Arc::new(self.descriptor(fd)) })
    }

    /// Like openat2(2), but also for paths longer than PATH_MAX.
    fn open_below_root(&self, path: &Path) -> Result<OwnedFd, Fault> {
        if path.as_os_str().len() <= MAX_PATH_BYTES {
            return self.open_beneath(self.root.fd.as_fd(), path.as_os_str());
        }
        let mut at = self.root.fd.clone();
        let mut part = PathBuf::new();
        for name in path {
            if part.as_os_str().len() + 1 + name.len() > MAX_PATH_BYTES {
                let fd = self.open_beneath(at.as_fd(), part.as_os_str())?;
                at = Arc::new(self.descriptor(fd));
                part.clear();
            }
            part.push(name);
        }
        self.open_beneath(at.as_fd(), part.as_os_str())
    }

    /// Returns the kernel's path of a descriptor, relative to the root.
    fn path_below(&self, fd: &Descriptor) -> Option<PathBuf> {
        let path = path_of(fd)?;
        let mut root = self.root_path.lock().expect("not poisoned");
        if path.strip_prefix(&*root).is_err() {
            *root = path_of(&self.root.fd)?;
        }
        let below = path.strip_prefix(&*root).ok()?.to_owned();
        Some(below).filter(|below| !below.as_os_str().is_empty())
    }

    /// Returns paths relative to the root, built from the known names of the file and its parents.
    fn known_paths(&self, id: FileId) -> Vec<PathBuf> {
        let state = self.state.lock().expect("not poisoned");
        let names = state.known.get(&id).map_or(&[][..], |known| &known.at);
        names.iter().filter_map(|at| state.path_of(at, self.root.id)).collect()
    }

    /// Looks up a name, which is one component. Doesn't follow a symbolic link.
    pub fn child(&self, parent: &Node, name: &OsStr, keep: Keep) -> Result<Node, Fault> {
        check_name(name)?;
        let fd = self.open_beneath(parent.fd.as_fd(), name)?;
        self.remember(fd, Some(NameIn { parent: parent.id, name }), keep)
    }

    /// Looks up names one below the other, without following symbolic links.
    pub fn descend(&self, from: &Node, names: &[OsString]) -> Result<Node, Fault> {
        names.iter().try_fold(from.clone(), |at, name| self.child(&at, name, Keep::Open))
    }

    /// Adds a file to the table, and returns it with its id.
    pub fn remember(
        &self,
        fd: OwnedFd,
        at: Option<NameIn<'_, FileId>>,
        keep: Keep,
    ) -> Result<Node, Fault> {
        let found = look(fd.as_fd())?;
        if found.mount != self.mount {
            return Err(Errno::EXDEV.into());
        }
        let (generation, handle) = number_of(fd.as_fd(), &found, self.telling);
        let id = FileId { inode: found.inode, generation };
        let fd = Arc::new(self.descriptor(fd));
        let handle = handle.filter(|_| self.opens_handles);
        let at: Vec<At> = at.map(|at| (at.parent, at.name.into())).into_iter().collect();
        // Without a name and a handle, only the descriptor leads back to the file.
        let keep = if at.is_empty() && handle.is_none() { Keep::Open } else { keep };
        let mut state = self.state.lock().expect("not poisoned");
        let walker = sys::file_ids().0;
        state.insert(
            id,
            Known { handle, at, fd: None, is_listed: false, walker, is_used: false },
            &self.totals,
        );
        if keep == Keep::Open {
            state.keep_open(id, fd.clone(), &self.totals);
        }
        state.unlock();
        Ok(Node { id, kind: found.kind, fd })
    }

    /// Notes a file's new name.
    pub fn moved(&self, id: FileId, parent: FileId, name: &OsStr) {
        let mut state = self.state.lock().expect("not poisoned");
        if let Some(known) = state.known.get_mut(&id) {
            known.found_at((parent, name.into()));
        }
    }

    /// Notes that a file has lost a name.
    pub fn removed(&self, id: FileId, parent: FileId, name: &OsStr) {
        let mut state = self.state.lock().expect("not poisoned");
        if let Some(known) = state.known.get_mut(&id) {
            known.at.retain(|(its_parent, its_name)| (*its_parent, &**its_name) != (parent, name));
        }
        let kept = state.known.get(&id).and_then(|known| known.fd.clone());
        drop(state);
        if let Some(fd) = kept.filter(has_no_name) {
            self.give_up(id, &fd);
        }
    }

    /// Keeps that descriptor open no longer.
    fn give_up(&self, id: FileId, fd: &Arc<Descriptor>) {
        let mut state = self.state.lock().expect("not poisoned");
        let is_it = |known: &Known| known.fd.as_ref().is_some_and(|its| Arc::ptr_eq(its, fd));
        if state.known.get(&id).is_some_and(is_it) {
            state.close_kept(id, &self.totals);
        }
        // Not the last reference.
        state.unlock();
    }

    /// Wraps a descriptor of a file of the export.
    pub fn descriptor(&self, fd: OwnedFd) -> Descriptor {
        Descriptor::path(&self.lane, fd)
    }

    /// Closes cached descriptors of files that other programs have removed, to free their space.
    /// May block.
    pub fn close_removed(&self) {
        let open: Vec<(FileId, Arc<Descriptor>)> = {
            let state = self.state.lock().expect("not poisoned");
            let kept =
                state.open.iter().filter_map(|id| Some((*id, state.known.get(id)?.fd.clone()?)));
            kept.collect()
        };
        let removed = open.into_iter().filter(|(_, fd)| has_no_name(fd));
        for (id, fd) in removed.collect::<Vec<_>>() {
            self.give_up(id, &fd);
            // On this thread, which may block, and not on one that somebody's call waits for.
            if let Some(fd) = Arc::into_inner(fd) {
                fd.close();
            }
        }
    }

    fn open_beneath(&self, parent: BorrowedFd<'_>, path: &OsStr) -> Result<OwnedFd, Fault> {
        Ok(openat2(
            parent,
            path,
            OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC,
            Mode::empty(),
            BENEATH,
        )?)
    }
}

/// Flags of openat2(2) by which the kernel confines every path walk to the export.
pub const BENEATH: ResolveFlags = ResolveFlags::BENEATH
    .union(ResolveFlags::NO_MAGICLINKS)
    .union(ResolveFlags::NO_SYMLINKS)
    .union(ResolveFlags::NO_XDEV);

/// Refuses an invalid file name.
pub fn check_name(name: &OsStr) -> Result<(), Fault> {
    let bytes = name.as_bytes();
    match bytes {
        b"" | b"." | b".." => Err(Errno::EINVAL.into()),
        _ if bytes.len() > MAX_NAME_BYTES => Err(Errno::ENAMETOOLONG.into()),
        _ if bytes.contains(&b'/') || bytes.contains(&0) => Err(Errno::EINVAL.into()),
        _ => Ok(()),
    }
}

impl Known {
    fn found_at(&mut self, at: At) {
        self.at.retain(|known| *known != at);
        self.at.insert(0, at);
        self.at.truncate(MAX_LINKS);
    }
}

impl NodesState {
    /// Returns the path of a name relative to the root.
    fn path_of(&self, at: &At, root: FileId) -> Option<PathBuf> {
        let mut names: Vec<&OsStr> = vec![&at.1];
        let mut directory = at.0;
        while directory != root {
            let (parent, name) = self.known.get(&directory)?.at.first()?;
            names.push(name);
            directory = *parent;
            if names.len() > MAX_DEPTH {
                return None;
            }
        }
        Some(names.into_iter().rev().collect())
    }

    fn insert(&mut self, id: FileId, new: Known, totals: &NodeTotals) {
        if let Some(known) = self.known.get_mut(&id) {
            known.is_used = true;
            known.handle = new.handle;
            known.walker = new.walker;
            new.at.into_iter().for_each(|at| known.found_at(at));
            return;
        }
        while !totals.known().try_add(self.known.len()) {
            let Some(oldest) = self.order.pop_front() else {
                // Others have all: the caller walks to it again.
                return;
            };
            match self.known.get_mut(&oldest) {
                Some(known) if known.is_used => {
                    known.is_used = false;
                    self.order.push_back(oldest);
                }
                Some(_) => {
                    self.close_kept(oldest, totals);
                    self.known.remove(&oldest);
                    totals.known().subtract(1);
                }
                None => {}
            }
        }
        self.known.insert(id, new);
        self.order.push_back(id);
    }

    /// Caches a known file's descriptor, if there is room for it.
    fn keep_open(&mut self, id: FileId, fd: Arc<Descriptor>, totals: &NodeTotals) {
        if !self.known.contains_key(&id) {
            return;
        }
        self.close_kept(id, totals);
        // Each that is kept is listed; a file that was forgotten may be listed still.
        while self.open.len() >= MAX_DESCRIPTORS || !totals.kept_open().try_add(self.kept_open) {
            let Some(oldest) = self.open.pop_front() else { return };
            self.close_kept(oldest, totals);
            if let Some(known) = self.known.get_mut(&oldest) {
                known.is_listed = false;
            }
        }
        self.kept_open += 1;
        let Some(known) = self.known.get_mut(&id) else { return };
        known.fd = Some(fd);
        if !known.is_listed {
            known.is_listed = true;
            self.open.push_back(id);
        }
    }

    /// Gives the cached descriptor of a file up, if there is one.
    fn close_kept(&mut self, id: FileId, totals: &NodeTotals) {
        if let Some(fd) = self.known.get_mut(&id).and_then(|known| known.fd.take()) {
            self.given_up.push(fd);
            self.kept_open -= 1;
            totals.kept_open().subtract(1);
        }
    }
}

impl Drop for Nodes {
    fn drop(&mut self) {
        if let Ok(state) = self.state.get_mut() {
            self.totals.known().subtract(state.known.len());
            self.totals.kept_open().subtract(state.kept_open);
        }
    }
}

fn has_no_name(fd: &Arc<Descriptor>) -> bool {
    rustix::fs::fstat(fd).is_ok_and(|found| found.st_nlink == 0)
}

/// Returns the kernel's path of a descriptor.
fn path_of(fd: &Descriptor) -> Option<PathBuf> {
    std::fs::read_link(super::attributes::link_to(fd.as_fd())).ok()
}

/// Returns the more specific of two errors of different paths: "not found" is the least specific.
fn graver(known: Fault, new: Fault) -> Fault {
    let says_little = [Errno::ESTALE, Errno::ENOENT, Errno::ENOTDIR, Errno::ELOOP, Errno::EXDEV];
    if says_little.map(Fault::from).contains(&new) { known } else { new }
}

trait Unlock {
    /// Unlocks it, then closes what was given up.
    fn unlock(self);
}

impl Unlock for MutexGuard<'_, NodesState> {
    fn unlock(mut self) {
        let given_up = std::mem::take(&mut self.given_up);
        drop(self);
        drop(given_up);
    }
}

struct Look {
    inode: u64,
    kind: Kind,
    mount: u64,
    links: u32,
    born: (i64, u32),
}

fn look(fd: BorrowedFd<'_>) -> Result<Look, Fault> {
    let wanted = StatxFlags::INO
        | StatxFlags::TYPE
        | StatxFlags::NLINK
        | StatxFlags::MNT_ID
        | StatxFlags::BTIME;
    let found = statx(fd, c"", AtFlags::EMPTY_PATH, wanted)?;
    Ok(Look {
        inode: found.stx_ino,
        kind: kind_of(found.stx_mode.into()),
        mount: found.stx_mnt_id,
        links: found.stx_nlink,
        born: (found.stx_btime.tv_sec, found.stx_btime.tv_nsec),
    })
}

/// Returns the file's generation: derived from its handle, or else from its creation time.
fn number_of(fd: BorrowedFd<'_>, found: &Look, purpose: Purpose) -> (u64, Option<Handle>) {
    match sys::handle_of(fd, purpose) {
        Ok(handle) => (handle.number(), Some(handle).filter(|_| purpose == Purpose::Opening)),
        Err(_) => {
            let (seconds, nanoseconds) = found.born;
            (
                sys::digest(
                    found.inode,
                    &[&seconds.to_le_bytes()[..], &nanoseconds.to_le_bytes()].concat(),
                ),
                None,
            )
        }
    }
}

/// Returns the file type in `st_mode`.
pub fn kind_of(mode: u32) -> Kind {
    use rustix::fs::FileType;
    match FileType::from_raw_mode(mode) {
        FileType::Directory => Kind::Directory,
        FileType::Symlink => Kind::Symlink,
        FileType::Fifo => Kind::Fifo,
        FileType::Socket => Kind::Socket,
        FileType::BlockDevice => Kind::BlockDevice,
        FileType::CharacterDevice => Kind::CharacterDevice,
        _ => Kind::Regular,
    }
}
