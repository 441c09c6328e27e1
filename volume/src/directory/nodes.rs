//! Which file an id means: every file that a session was told of, and the way back to it. An id
//! that was never given out leads nowhere, so that no guessing leads out of the export.
//!
//! Invariant: an id becomes a file in hand only by a walk from the export's root that the kernel
//! has just made with the caller's rights, and that has ended at the file of that id. So every
//! directory on the way is one that this caller may search, at this moment. Descriptors, handles
//! and names that are kept tell only where to walk; what they say is never trusted, and a
//! descriptor that was opened for one caller serves no other. One exception: a file that has lost
//! its last name can't be walked to, and is served to the account that walked to it last, which
//! could have kept it open. All of [`Nodes::node`] and [`Nodes::child`] is to be called with the
//! caller's rights ([`super::session::Session::as_caller`]).

use std::{
    collections::{HashMap, VecDeque},
    ffi::{OsStr, OsString},
    os::{
        fd::{AsFd as _, BorrowedFd, OwnedFd},
        unix::ffi::OsStrExt as _,
    },
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

use nix::errno::Errno;
use rustix::fs::{AtFlags, Mode, OFlags, ResolveFlags, StatxFlags, openat2, statx};

use super::{
    Fault,
    account::is_share,
    sys::{self, Handle, Purpose},
};
use crate::{
    leases::File,
    store::{FileId, Kind},
};

/// Files that all directories of a machine remember together: about 250 bytes each, at most 500.
/// Who asks for an older one gets ESTALE and walks to it again.
pub const MAX_NODES: usize = 250_000;
/// Descriptors kept open: they know where their files have been moved by other programs. A file
/// that is removed has none for longer than [`Nodes::close_removed`] takes.
const MAX_DESCRIPTORS: usize = 1024;
/// NAME_MAX.
const MAX_NAME_BYTES: usize = 255;
/// PATH_MAX, without the zero at its end: what the kernel walks at a time.
const MAX_PATH_BYTES: usize = 4095;
/// Names of one file that are remembered.
const MAX_LINKS: usize = 8;
/// Directories above a file that are looked up by their names, where no descriptor knows the way.
const MAX_DEPTH: usize = 4096;

/// A file in hand.
#[derive(Debug, Clone)]
pub struct Node {
    /// Its id.
    pub id: FileId,
    /// What it is.
    pub kind: Kind,
    /// An `O_PATH` descriptor.
    pub fd: Arc<OwnedFd>,
}

/// All that are known.
#[derive(Debug)]
pub struct Nodes {
    root: Node,
    /// Its mount: nothing of another is entered.
    mount: u64,
    system: u64,
    /// Whether handles can be opened; otherwise files are found again by name.
    opens_handles: bool,
    telling: Purpose,
    /// Its files can have ACLs.
    has_acls: bool,
    /// The root's path when it was last looked at. It only tells where to walk.
    root_path: Mutex<PathBuf>,
    /// Files that all directories of the machine remember.
    remembered: Arc<AtomicUsize>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    known: HashMap<FileId, Known>,
    /// Oldest first; those used since go to the back once more.
    order: VecDeque<FileId>,
    open: VecDeque<FileId>,
}

/// A name in a directory.
type At = (FileId, Box<OsStr>);

#[derive(Debug)]
struct Known {
    handle: Option<Handle>,
    /// The names under which it was found, the last one first: a file may have several.
    at: Vec<At>,
    fd: Option<Arc<OwnedFd>>,
    /// It is in [`State::open`].
    is_listed: bool,
    /// The account that walked to it last.
    walker: u32,
    is_used: bool,
}

/// Whether a descriptor is kept for what is looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Keep {
    Open,
    /// One of many: a directory's listing.
    Way,
}

impl Nodes {
    /// Below that directory.
    pub fn new(
        root: OwnedFd,
        may_open_handles: bool,
        remembered: Arc<AtomicUsize>,
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
        let system = rustix::fs::fstatvfs(&root)?.f_fsid;
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
            remembered,
            state,
        })
    }

    /// The export's own directory.
    pub fn root(&self) -> &Node {
        &self.root
    }

    /// Says that files of the export can have ACLs.
    pub fn has_acls(&self) -> bool {
        self.has_acls
    }

    /// As leases name it.
    pub fn file(&self, id: FileId) -> File {
        File { system: self.system, generation: id.generation }
    }

    /// A file that was given out before; `EACCES` when the caller may not walk to it, `ESTALE` when
    /// no way is known any more.
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
            .map(Arc::new);
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

    /// The file of that id, if it has no name any more and this caller was the last to walk to it.
    fn unlinked(&self, id: FileId, fd: Arc<OwnedFd>) -> Option<Node> {
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
        state.keep_open(node.id, node.fd.clone());
        if let Some(known) = state.known.get_mut(&node.id) {
            known.walker = sys::file_ids().0;
        }
        drop(state);
        Ok(node)
    }

    /// Walks from the root, with the rights of this thread; it is to end at the file of that id.
    fn walk_to(&self, id: FileId, path: &Path) -> Result<Node, Fault> {
        let fd = self.open_below_root(path)?;
        let found = look(fd.as_fd())?;
        if found.inode != id.inode || number_of(fd.as_fd(), &found, self.telling).0 != id.generation
        {
            return Err(Errno::ESTALE.into());
        }
        Ok(Node { id, kind: found.kind, fd: Arc::new(fd) })
    }

    /// As openat2(2), also where the path is longer than one call takes.
    fn open_below_root(&self, path: &Path) -> Result<OwnedFd, Fault> {
        if path.as_os_str().len() <= MAX_PATH_BYTES {
            return self.open_beneath(self.root.fd.as_fd(), path.as_os_str());
        }
        let mut at = self.root.fd.clone();
        let mut part = PathBuf::new();
        for name in path {
            if part.as_os_str().len() + 1 + name.len() > MAX_PATH_BYTES {
                at = Arc::new(self.open_beneath(at.as_fd(), part.as_os_str())?);
                part.clear();
            }
            part.push(name);
        }
        self.open_beneath(at.as_fd(), part.as_os_str())
    }

    /// Below the root, as far as the kernel knows of a descriptor.
    fn path_below(&self, fd: &OwnedFd) -> Option<PathBuf> {
        let path = path_of(fd)?;
        let mut root = self.root_path.lock().expect("not poisoned");
        if path.strip_prefix(&*root).is_err() {
            *root = path_of(&self.root.fd)?;
        }
        let below = path.strip_prefix(&*root).ok()?.to_owned();
        Some(below).filter(|below| !below.as_os_str().is_empty())
    }

    /// Below the root, by the names under which it and the directories above were found.
    fn known_paths(&self, id: FileId) -> Vec<PathBuf> {
        let state = self.state.lock().expect("not poisoned");
        let names = state.known.get(&id).map_or(&[][..], |known| &known.at);
        names.iter().filter_map(|at| state.path_of(at, self.root.id)).collect()
    }

    /// The file of a name. The name is one component; a symbolic link is found itself.
    pub fn child(&self, parent: &Node, name: &OsStr, keep: Keep) -> Result<Node, Fault> {
        check_name(name)?;
        let fd = self.open_beneath(parent.fd.as_fd(), name)?;
        self.remember(fd, Some((parent.id, name)), keep)
    }

    /// A file several names down, not through symbolic links. Each on the way is found again by its
    /// name.
    pub fn descend(&self, from: &Node, names: &[OsString]) -> Result<Node, Fault> {
        names.iter().try_fold(from.clone(), |at, name| self.child(&at, name, Keep::Open))
    }

    /// Gives a file its id. `at`: where it was found.
    pub fn remember(
        &self,
        fd: OwnedFd,
        at: Option<(FileId, &OsStr)>,
        keep: Keep,
    ) -> Result<Node, Fault> {
        let found = look(fd.as_fd())?;
        if found.mount != self.mount {
            return Err(Errno::EXDEV.into());
        }
        let (generation, handle) = number_of(fd.as_fd(), &found, self.telling);
        let id = FileId { inode: found.inode, generation };
        let fd = Arc::new(fd);
        let handle = handle.filter(|_| self.opens_handles);
        let at: Vec<At> = at.map(|(parent, name)| (parent, name.into())).into_iter().collect();
        // Without another way back the descriptor is all there is.
        let keep = if at.is_empty() && handle.is_none() { Keep::Open } else { keep };
        let mut state = self.state.lock().expect("not poisoned");
        let walker = sys::file_ids().0;
        state.insert(
            id,
            Known { handle, at, fd: None, is_listed: false, walker, is_used: false },
            &self.remembered,
        );
        if keep == Keep::Open {
            state.keep_open(id, fd.clone());
        }
        Ok(Node { id, kind: found.kind, fd })
    }

    /// A file has another name now.
    pub fn moved(&self, id: FileId, parent: FileId, name: &OsStr) {
        let mut state = self.state.lock().expect("not poisoned");
        if let Some(known) = state.known.get_mut(&id) {
            known.found_at((parent, name.into()));
        }
    }

    /// A file has lost a name.
    pub fn removed(&self, id: FileId, parent: FileId, name: &OsStr) {
        let mut state = self.state.lock().expect("not poisoned");
        if let Some(known) = state.known.get_mut(&id) {
            known.at.retain(|(its_parent, its_name)| (*its_parent, &**its_name) != (parent, name));
            known.fd.take_if(|fd| has_no_name(fd));
        }
    }

    /// Closes the descriptors of files that other programs have removed, which would keep their
    /// space. May block.
    pub fn close_removed(&self) {
        let open: Vec<(FileId, Arc<OwnedFd>)> = {
            let state = self.state.lock().expect("not poisoned");
            let kept =
                state.open.iter().filter_map(|id| Some((*id, state.known.get(id)?.fd.clone()?)));
            kept.collect()
        };
        let removed = open.into_iter().filter(|(_, fd)| has_no_name(fd));
        for (id, fd) in removed.collect::<Vec<_>>() {
            let mut state = self.state.lock().expect("not poisoned");
            if let Some(known) = state.known.get_mut(&id) {
                known.fd.take_if(|its| Arc::ptr_eq(its, &fd));
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

/// How every path below the export is walked: by the kernel, which leaves it by no way.
pub const BENEATH: ResolveFlags = ResolveFlags::BENEATH
    .union(ResolveFlags::NO_MAGICLINKS)
    .union(ResolveFlags::NO_SYMLINKS)
    .union(ResolveFlags::NO_XDEV);

/// Refuses what is no name.
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

impl State {
    /// The way to a name from the root.
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

    fn insert(&mut self, id: FileId, new: Known, remembered: &AtomicUsize) {
        if let Some(known) = self.known.get_mut(&id) {
            known.is_used = true;
            known.handle = new.handle;
            known.walker = new.walker;
            new.at.into_iter().for_each(|at| known.found_at(at));
            return;
        }
        // Others have theirs: see [`super::account`].
        while !is_share((self.known.len(), 1), (remembered.load(Ordering::Relaxed), MAX_NODES)) {
            let Some(oldest) = self.order.pop_front() else { break };
            match self.known.get_mut(&oldest) {
                Some(known) if known.is_used => {
                    known.is_used = false;
                    self.order.push_back(oldest);
                }
                Some(_) => {
                    self.known.remove(&oldest);
                    remembered.fetch_sub(1, Ordering::Relaxed);
                }
                None => {}
            }
        }
        remembered.fetch_add(1, Ordering::Relaxed);
        self.known.insert(id, new);
        self.order.push_back(id);
    }

    fn keep_open(&mut self, id: FileId, fd: Arc<OwnedFd>) {
        let Some(known) = self.known.get_mut(&id) else { return };
        let is_listed = known.is_listed;
        (known.fd, known.is_listed) = (Some(fd), true);
        if !is_listed {
            self.open.push_back(id);
        }
        while self.open.len() > MAX_DESCRIPTORS {
            let Some(oldest) = self.open.pop_front() else { break };
            if let Some(known) = self.known.get_mut(&oldest) {
                (known.fd, known.is_listed) = (None, false);
            }
        }
    }
}

impl Drop for Nodes {
    fn drop(&mut self) {
        let known = self.state.get_mut().map_or(0, |state| state.known.len());
        self.remembered.fetch_sub(known, Ordering::Relaxed);
    }
}

fn has_no_name(fd: &Arc<OwnedFd>) -> bool {
    rustix::fs::fstat(fd).is_ok_and(|found| found.st_nlink == 0)
}

/// The path that the kernel knows of a descriptor.
fn path_of(fd: &OwnedFd) -> Option<PathBuf> {
    std::fs::read_link(super::attributes::link_to(fd.as_fd())).ok()
}

/// Of two failures on different ways the one that says more: that no way was found is the least.
fn graver(known: Fault, new: Fault) -> Fault {
    let says_little = [Errno::ESTALE, Errno::ENOENT, Errno::ENOTDIR, Errno::ELOOP, Errno::EXDEV];
    if says_little.map(Fault::from).contains(&new) { known } else { new }
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

/// The file's number, of its handle where the file system has such, otherwise of when it was made.
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

/// Of the bits of `st_mode`.
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
