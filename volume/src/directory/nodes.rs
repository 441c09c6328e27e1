//! Which file an id means: every file that a session was told of, and the way back to it. An id that was never
//! given out leads nowhere, so that no guessing leads out of the export.

use std::{
    collections::{HashMap, VecDeque},
    ffi::{OsStr, OsString},
    os::{
        fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd},
        unix::ffi::OsStrExt as _,
    },
    sync::{Arc, Mutex},
};

use nix::errno::Errno;
use rustix::fs::{AtFlags, Mode, OFlags, ResolveFlags, StatxFlags, openat2, statx};

use super::{
    Fault,
    sys::{self, Handle, Purpose},
};
use crate::{
    leases::File,
    store::{FileId, Kind},
};

/// Files that are remembered: about 150 bytes each. Who asks for an older one gets ESTALE and walks to it again.
const MAX_NODES: usize = 500_000;
/// Descriptors kept open: getting one again costs two system calls.
const MAX_DESCRIPTORS: usize = 4096;
/// NAME_MAX.
const MAX_NAME_BYTES: usize = 255;

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
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    known: HashMap<FileId, Known>,
    /// Oldest first; those used since go to the back once more.
    order: VecDeque<FileId>,
    open: VecDeque<FileId>,
}

#[derive(Debug)]
struct Known {
    kind: Kind,
    back: WayBack,
    fd: Option<Arc<OwnedFd>>,
    is_used: bool,
}

#[derive(Debug, Clone)]
enum WayBack {
    Handle(Handle),
    Name {
        parent: FileId,
        name: OsString,
    },
    /// Only by its descriptor.
    None,
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
    pub fn new(root: OwnedFd, may_open_handles: bool) -> Result<Self, Fault> {
        let found = look(root.as_fd())?;
        let telling = match sys::handle_of(root.as_fd(), Purpose::Opening) {
            Ok(handle) if sys::handle_of(root.as_fd(), Purpose::Telling).is_ok_and(|telling| telling != handle) => {
                Purpose::Telling
            }
            Ok(_) => Purpose::Opening,
            Err(_) => Purpose::Telling,
        };
        let opens = |handle: Handle| sys::open_handle(root.as_fd(), &handle).is_ok();
        let opens_handles = may_open_handles && sys::handle_of(root.as_fd(), Purpose::Opening).is_ok_and(opens);
        let system = rustix::fs::fstatvfs(&root)?.f_fsid;
        let id = FileId { inode: found.inode, generation: number_of(root.as_fd(), &found, telling).0 };
        let root = Node { id, kind: Kind::Directory, fd: Arc::new(root) };
        Ok(Self { root, mount: found.mount, system, opens_handles, telling, state: Mutex::default() })
    }

    /// The export's own directory.
    pub fn root(&self) -> &Node {
        &self.root
    }

    /// As leases name it.
    pub fn file(&self, id: FileId) -> File {
        File { system: self.system, generation: id.generation }
    }

    /// A file that was given out before.
    pub fn node(&self, id: FileId) -> Result<Node, Fault> {
        if id == self.root.id {
            return Ok(self.root.clone());
        }
        let (kind, back) = {
            let mut state = self.state.lock().expect("not poisoned");
            let known = state.known.get_mut(&id).ok_or(Errno::ESTALE)?;
            known.is_used = true;
            if let Some(fd) = &known.fd {
                let node = Node { id, kind: known.kind, fd: fd.clone() };
                drop(state);
                return self.inside(node);
            }
            (known.kind, known.back.clone())
        };
        let fd = match back {
            WayBack::Handle(handle) => sys::open_handle(self.root.fd.as_fd(), &handle)?,
            WayBack::Name { parent, name } => {
                let parent = self.node(parent)?;
                self.open_beneath(parent.fd.as_fd(), &name).map_err(|_| Fault::from(Errno::ESTALE))?
            }
            WayBack::None => return Err(Errno::ESTALE.into()),
        };
        let found = look(fd.as_fd())?;
        if found.inode != id.inode || number_of(fd.as_fd(), &found, self.telling).0 != id.generation {
            return Err(Errno::ESTALE.into());
        }
        let node = Node { id, kind, fd: Arc::new(fd) };
        let node = self.inside(node)?;
        self.state.lock().expect("not poisoned").keep_open(id, node.fd.clone());
        Ok(node)
    }

    /// The file of a name. The name is one component; a symbolic link is found itself.
    pub fn child(&self, parent: &Node, name: &OsStr, keep: Keep) -> Result<Node, Fault> {
        check_name(name)?;
        let fd = self.open_beneath(parent.fd.as_fd(), name)?;
        self.remember(fd, Some((parent.id, name)), keep)
    }

    /// A file several names down, not through symbolic links. Each on the way is found again by its name.
    pub fn descend(&self, from: &Node, names: &[OsString]) -> Result<Node, Fault> {
        names.iter().try_fold(from.clone(), |at, name| self.child(&at, name, Keep::Open))
    }

    /// Gives a file its id. `at`: where it was found.
    pub fn remember(&self, fd: OwnedFd, at: Option<(FileId, &OsStr)>, keep: Keep) -> Result<Node, Fault> {
        let found = look(fd.as_fd())?;
        if found.mount != self.mount {
            return Err(Errno::EXDEV.into());
        }
        let (generation, handle) = number_of(fd.as_fd(), &found, self.telling);
        let id = FileId { inode: found.inode, generation };
        let fd = Arc::new(fd);
        let named = at.map(|(parent, name)| WayBack::Name { parent, name: name.to_owned() });
        let back = match handle {
            Some(handle) if self.opens_handles => WayBack::Handle(handle),
            _ => named.unwrap_or(WayBack::None),
        };
        let mut state = self.state.lock().expect("not poisoned");
        // Without a way back the descriptor is all there is.
        let keep = if matches!(back, WayBack::None) { Keep::Open } else { keep };
        state.insert(id, Known { kind: found.kind, back, fd: None, is_used: false });
        if keep == Keep::Open {
            state.keep_open(id, fd.clone());
        }
        Ok(Node { id, kind: found.kind, fd })
    }

    /// A file has another name now.
    pub fn moved(&self, id: FileId, parent: FileId, name: &OsStr) {
        let mut state = self.state.lock().expect("not poisoned");
        if let Some(known) = state.known.get_mut(&id)
            && !matches!(known.back, WayBack::Handle(_))
        {
            known.back = WayBack::Name { parent, name: name.to_owned() };
        }
    }

    /// A directory that was moved out of the export is not of it any more.
    fn inside(&self, node: Node) -> Result<Node, Fault> {
        if node.kind != Kind::Directory {
            return Ok(node);
        }
        let path = |fd: &OwnedFd| std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()));
        match (path(&self.root.fd), path(&node.fd)) {
            (Ok(root), Ok(path)) if path.starts_with(&root) => Ok(node),
            _ => Err(Errno::ESTALE.into()),
        }
    }

    fn open_beneath(&self, parent: BorrowedFd<'_>, path: &OsStr) -> Result<OwnedFd, Fault> {
        Ok(openat2(parent, path, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty(), BENEATH)?)
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

impl State {
    fn insert(&mut self, id: FileId, new: Known) {
        if let Some(known) = self.known.get_mut(&id) {
            known.is_used = true;
            known.back = new.back;
            return;
        }
        while self.known.len() >= MAX_NODES {
            let Some(oldest) = self.order.pop_front() else { break };
            match self.known.get_mut(&oldest) {
                Some(known) if known.is_used => {
                    known.is_used = false;
                    self.order.push_back(oldest);
                }
                _ => drop(self.known.remove(&oldest)),
            }
        }
        self.known.insert(id, new);
        self.order.push_back(id);
    }

    fn keep_open(&mut self, id: FileId, fd: Arc<OwnedFd>) {
        let Some(known) = self.known.get_mut(&id) else { return };
        if known.fd.replace(fd).is_none() {
            self.open.push_back(id);
        }
        while self.open.len() > MAX_DESCRIPTORS {
            let Some(oldest) = self.open.pop_front() else { break };
            if let Some(known) = self.known.get_mut(&oldest) {
                known.fd = None;
            }
        }
    }
}

struct Look {
    inode: u64,
    kind: Kind,
    mount: u64,
    born: (i64, u32),
}

fn look(fd: BorrowedFd<'_>) -> Result<Look, Fault> {
    let wanted = StatxFlags::INO | StatxFlags::TYPE | StatxFlags::MNT_ID | StatxFlags::BTIME;
    let found = statx(fd, c"", AtFlags::EMPTY_PATH, wanted)?;
    Ok(Look {
        inode: found.stx_ino,
        kind: kind_of(found.stx_mode.into()),
        mount: found.stx_mnt_id,
        born: (found.stx_btime.tv_sec, found.stx_btime.tv_nsec),
    })
}

/// The file's number, of its handle where the file system has such, otherwise of when it was made.
fn number_of(fd: BorrowedFd<'_>, found: &Look, purpose: Purpose) -> (u64, Option<Handle>) {
    match sys::handle_of(fd, purpose) {
        Ok(handle) => (handle.number(), Some(handle).filter(|_| purpose == Purpose::Opening)),
        Err(_) => {
            let (seconds, nanoseconds) = found.born;
            (sys::digest(found.inode, &[&seconds.to_le_bytes()[..], &nanoseconds.to_le_bytes()].concat()), None)
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
