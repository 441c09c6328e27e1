//! Open files, and operations on their contents.

use std::{
    ops::Range,
    os::fd::{AsFd as _, BorrowedFd, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use nix::errno::Errno;
use rustix::fs::{
    AtFlags, FallocateFlags, FileType, FlockOperation, Mode, OFlags, SeekFrom, Stat, flock,
};

use super::{
    Fault, Rights,
    account::{Charge, halved_for_guests},
    attributes,
    descriptor::Descriptor,
    effects::{self, made},
    nodes::{BENEATH, Keep, Node, check_name},
    session::{BYTES, Intents, Session, leases_of},
};
use crate::leases::Intent;
use crate::store::{
    Allocation, Answer, Changes, Entry, FileId, Handle, Kind, Leases, NameIn, NewMode, OpenFlags,
    Place, PositionIn, Sought, Synced,
};

/// Limit of open files per session.
const MAX_OPENED: usize = 32_768;
/// Attempts at a name that other programs create and remove concurrently.
const ATTEMPTS: u32 = 16;

/// How a file that was just made is opened.
pub struct NewOpen<'a> {
    pub flags: OpenFlags,
    /// Its descriptor's share.
    pub room: Charge,
    /// Announced for the op.
    pub announced: &'a Intents,
}

/// A file that a session has open.
#[derive(Debug)]
pub struct Opened {
    /// The file.
    pub file: FileId,
    /// The flags that it was opened with.
    pub flags: OpenFlags,
    /// The kernel's descriptor.
    pub fd: Descriptor,
    /// True if the kernel's descriptor has `O_APPEND`; see [`Session::reopen`].
    pub only_appends: bool,
    /// True if a lock of the whole file was ever asked for.
    pub is_locked: AtomicBool,
}

impl Opened {
    /// Gives back its lock of the whole file; returns false if it has none.
    pub fn release(&self) -> bool {
        let is_locked = self.is_locked.swap(false, Ordering::Relaxed);
        if is_locked {
            let _ = flock(&self.fd, FlockOperation::Unlock);
        }
        is_locked
    }
}

/// A resolved [`Place`].
#[derive(Debug, Clone)]
pub enum Target {
    Opened(Arc<Opened>),
    Node(Node),
}

impl Target {
    /// Returns a descriptor, for calls that accept `O_PATH`.
    pub fn fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Opened(opened) => opened.fd.as_fd(),
            Self::Node(node) => node.fd.as_fd(),
        }
    }

    pub fn is_directory(&self) -> bool {
        matches!(self, Self::Node(node) if node.kind == Kind::Directory)
    }
}

/// A file that is open with the necessary flags.
///
/// Invariant: no call holds an `Own` one while it waits for a turn, a lease or a reader. So there
/// are no more of them than running threads, however many calls wait.
#[derive(Debug)]
pub enum Usable {
    Opened(Arc<Opened>),
    Own(OwnedFd),
}

impl std::os::fd::AsFd for Usable {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Opened(opened) => opened.fd.as_fd(),
            Self::Own(fd) => fd.as_fd(),
        }
    }
}

impl Session {
    /// Resolves a place: by its handle, or else by its id.
    pub fn target(&self, place: Place) -> Result<Target, Fault> {
        match place.handle {
            None => self.node(place.file).map(Target::Node),
            Some(handle) => {
                let opened = self.opened.lock().expect("not poisoned").get(&handle).cloned();
                let opened =
                    opened.filter(|opened| opened.file == place.file).ok_or(Errno::ESTALE)?;
                Ok(Target::Opened(opened))
            }
        }
    }

    /// Resolves a file by its id. If it has no names, or they are unreachable, one of this
    /// session's open files serves, as an open descriptor keeps working. Not with
    /// [`Rights::Callers`]: a caller must not use another caller's descriptor.
    fn node(&self, file: FileId) -> Result<Node, Fault> {
        self.directory.nodes.node(file).or_else(|fault| {
            if self.directory.rights == Rights::Callers {
                return Err(fault);
            }
            let opened = self.opened.lock().expect("not poisoned");
            let opened = opened.values().find(|opened| opened.file == file).ok_or(fault)?;
            let fd = opened.fd.as_fd().try_clone_to_owned().map_err(errno_of)?;
            let fd = Arc::new(self.directory.nodes.descriptor(fd));
            Ok(Node { id: file, kind: Kind::Regular, fd })
        })
    }

    /// Returns the place's open file, or opens it for this one use.
    pub fn usable(&self, place: Place, flags: OpenFlags) -> Result<Usable, Fault> {
        match self.target(place)? {
            // Each write says whether it appends: fcntl(2) may have changed that.
            Target::Opened(opened) if opened.flags.contains(flags - OpenFlags::APPEND) => {
                Ok(Usable::Opened(opened))
            }
            Target::Opened(_) => Err(Errno::EBADF.into()),
            Target::Node(node) => Ok(Usable::Own(self.reopen(&node, flags)?)),
        }
    }

    /// Opens a file; with `O_APPEND` only if the kernel demands it, for an append-only file
    /// (chattr(1)): a write at an offset through such a descriptor would go to the end.
    fn reopen(&self, node: &Node, flags: OpenFlags) -> Result<OwnedFd, Fault> {
        self.check_kind(node, flags)?;
        if flags.contains(OpenFlags::TRUNCATE) {
            effects::begin();
        }
        let link = attributes::link_to(node.fd.as_fd());
        let open = |how: OFlags| rustix::fs::open(&*link, how, Mode::empty());
        let how = kernel_flags(flags);
        Ok(match open(how) {
            Err(rustix::io::Errno::PERM) if flags.contains(OpenFlags::APPEND) => {
                open(how | OFlags::APPEND)?
            }
            opened => opened?,
        })
    }

    /// Checks that a file of this kind can be opened with these flags, permissions apart.
    pub fn check_kind(&self, node: &Node, flags: OpenFlags) -> Result<(), Fault> {
        match node.kind {
            Kind::Regular => {}
            Kind::Directory if flags == OpenFlags::READ => {}
            Kind::Directory => return Err(Errno::EISDIR.into()),
            Kind::Symlink => return Err(Errno::ELOOP.into()),
            // Pipes, sockets and devices are the workstation's kernel's own.
            _ => return Err(Errno::ENXIO.into()),
        }
        if flags.intersects(OpenFlags::WRITE | OpenFlags::TRUNCATE) {
            self.directory.require_writable()?;
        }
        Ok(())
    }

    /// open(2) of an existing file.
    pub fn open(&self, place: Place, flags: OpenFlags) -> Result<Answer, Fault> {
        self.open_node(&self.node_to_open(place)?, flags)
    }

    /// Resolves a file that is to be opened. One without a name is opened through a handle, as
    /// through `/proc/PID/fd` (proc(5)): the kernel asks for the caller's permission again.
    pub fn node_to_open(&self, place: Place) -> Result<Node, Fault> {
        match self.target(place)? {
            Target::Node(node) => Ok(node),
            Target::Opened(opened) => {
                let fd = opened.fd.as_fd().try_clone_to_owned().map_err(errno_of)?;
                let fd = Arc::new(self.directory.nodes.descriptor(fd));
                Ok(Node { id: place.file, kind: Kind::Regular, fd })
            }
        }
    }

    fn open_node(&self, node: &Node, flags: OpenFlags) -> Result<Answer, Fault> {
        // Before the file is truncated.
        let room = self.room_for_open()?;
        let fd = self.reopen(node, flags)?;
        self.keep(node.id, fd, flags, None, room)
    }

    /// open(2) with `O_CREAT`.
    pub fn create(
        &self,
        at: NameIn<'_, FileId>,
        mode: NewMode,
        flags: OpenFlags,
        announced: &Intents,
    ) -> Result<Answer, Fault> {
        check_name(at.name)?;
        let parent = self.directory.nodes.node(at.parent)?;
        let at = NameIn { parent: &parent, name: at.name };
        for _ in 0..ATTEMPTS {
            match self.create_new(at, mode, flags, announced) {
                Err(fault)
                    if fault == Fault::from(Errno::EEXIST)
                        && !flags.contains(OpenFlags::EXCLUSIVE) => {}
                made => return made,
            }
            match self.directory.nodes.child(at.parent, at.name, Keep::Open) {
                Err(fault) if fault == Fault::from(Errno::ENOENT) => {}
                found => {
                    let node = found?;
                    if flags.contains(OpenFlags::TRUNCATE)
                        && self.directory.require_writable().is_ok()
                        && !announced.contains(&self.intent(node.id, Intent::Change(BYTES)))
                    {
                        // The name stands for another file than when this was announced, whose
                        // contents others may have cached. It is tried again with that one.
                        return Err(Errno::EAGAIN.into());
                    }
                    return self.open_node(&node, flags);
                }
            }
        }
        Err(Errno::EAGAIN.into())
    }

    fn create_new(
        &self,
        at: NameIn<'_, &Node>,
        mode: NewMode,
        flags: OpenFlags,
        announced: &Intents,
    ) -> Result<Answer, Fault> {
        // On a read-only export an existing file can still be opened.
        if self.directory.require_writable().is_err() {
            let exists = self.directory.nodes.child(at.parent, at.name, Keep::Open).is_ok();
            return Err(if exists { Errno::EEXIST.into() } else { Errno::EROFS.into() });
        }
        let room = self.room_for_open()?;
        let how = kernel_flags(flags) | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW;
        let mode = super::names::permissions(at.parent, mode);
        let fd = made(rustix::fs::openat2(&at.parent.fd, at.name, how, mode, BENEATH))?;
        self.keep_new(at, fd, NewOpen { flags, room, announced })
    }

    /// Registers a file that was just created as open.
    pub fn keep_new(
        &self,
        at: NameIn<'_, &Node>,
        fd: OwnedFd,
        how: NewOpen<'_>,
    ) -> Result<Answer, Fault> {
        let made = rustix::fs::fstat(&fd)?;
        let kept = self.keep_made(at, fd, how);
        if kept.is_err() {
            // A failed open(2) must not leave a new file.
            unmake(at, &made);
        }
        kept
    }

    fn keep_made(
        &self,
        at: NameIn<'_, &Node>,
        fd: OwnedFd,
        how: NewOpen<'_>,
    ) -> Result<Answer, Fault> {
        let NameIn { parent, name } = at;
        let path = self.directory.nodes.remember(
            fd.try_clone().map_err(errno_of)?,
            Some(NameIn { parent: parent.id, name }),
            Keep::Way,
        )?;
        // The file may have existed when the op was announced, and was removed since.
        self.touch_unless_announced(parent, super::session::NAMES, how.announced);
        self.keep(path.id, fd, how.flags, Some(parent), how.room)
    }

    /// Charges an open file to the account.
    pub fn room_for_open(&self) -> Result<Charge, Fault> {
        if self.opened.lock().expect("not poisoned").len() >= halved_for_guests(MAX_OPENED) {
            return Err(Errno::EMFILE.into());
        }
        Ok(self.directory.machine.descriptors.try_take(&self.account, 1).ok_or(Errno::EMFILE)?)
    }

    fn keep(
        &self,
        file: FileId,
        fd: OwnedFd,
        flags: OpenFlags,
        parent: Option<&Node>,
        room: Charge,
    ) -> Result<Answer, Fault> {
        let wanted = if flags.contains(OpenFlags::NO_LEASE) {
            Leases::ATTRIBUTES
        } else if flags.contains(OpenFlags::WRITE) {
            BYTES | Leases::WRITE
        } else {
            BYTES
        };
        let only_appends = rustix::fs::fcntl_getfl(&fd)?.contains(OFlags::APPEND);
        let fd = Descriptor::open(&self.closing, fd, Arc::new(room));
        let entry = self.entry(fd.as_fd(), file, wanted)?;
        let handle = Handle(self.last_handle.fetch_add(1, Ordering::Relaxed) + 1);
        let mut opened = self.opened.lock().expect("not poisoned");
        if opened.len() >= MAX_OPENED {
            return Err(Errno::EMFILE.into());
        }
        // Under the lock under which the end empties the table, so that no file is left over.
        if self.is_over() {
            return Err(Errno::ESTALE.into());
        }
        let is_locked = false.into();
        opened.insert(handle, Arc::new(Opened { file, flags, fd, only_appends, is_locked }));
        drop(opened);
        let parent = parent.map(|parent| self.entry_of_node(parent)).transpose()?;
        Ok(Answer::Opened { handle, entry, parent })
    }

    /// Closes an open file, before the answer unless another call uses it.
    pub fn close(&self, handle: Handle) -> Result<Answer, Fault> {
        let opened = self.opened.lock().expect("not poisoned").remove(&handle);
        let opened = opened.ok_or(Errno::EBADF)?;
        let file = opened.file;
        if let Some(opened) = Arc::into_inner(opened) {
            opened.fd.close();
        }
        self.unlocked(file);
        Ok(Answer::Done)
    }

    /// chown, chmod, truncate, utimensat.
    pub fn set(&self, place: Place, changes: &Changes) -> Result<Entry, Fault> {
        self.directory.require_writable()?;
        let target = self.target(place)?;
        let resized = match (&target, changes.size) {
            (_, None) => None,
            (Target::Opened(opened), Some(_)) if opened.flags.contains(OpenFlags::WRITE) => {
                Some(Usable::Opened(opened.clone()))
            }
            // ftruncate(2) of a read-only descriptor.
            (Target::Opened(_), Some(_)) => return Err(Errno::EINVAL.into()),
            (Target::Node(_), Some(_)) => Some(self.usable(place, OpenFlags::WRITE)?),
        };
        attributes::change(target.fd(), changes)?;
        if let (Some(file), Some(size)) = (&resized, changes.size) {
            effects::begin();
            rustix::fs::ftruncate(file, size)?;
        }
        attributes::change_times(target.fd(), changes)?;
        let leases = if target.is_directory() { super::session::NAMES } else { Leases::ATTRIBUTES };
        debug_assert!(!leases_of(changes).is_empty());
        self.entry(target.fd(), place.file, leases)
    }

    /// fsync(2).
    pub fn sync(&self, place: Place, what: Synced) -> Result<Answer, Fault> {
        let target = self.target(place)?;
        let own = match &target {
            Target::Opened(_) => None,
            // A file may be writable but not readable.
            Target::Node(node) => {
                let read = self.reopen(node, OpenFlags::READ);
                Some(read.or_else(|fault| self.reopen(node, OpenFlags::WRITE).map_err(|_| fault))?)
            }
        };
        let fd = own.as_ref().map_or_else(|| target.fd(), |own| own.as_fd());
        match what {
            Synced::Data => rustix::fs::fdatasync(fd)?,
            Synced::Everything => rustix::fs::fsync(fd)?,
        }
        Ok(Answer::Done)
    }

    /// Returns the entry of a file that the caller may write.
    pub fn entry_of_writable(&self, place: Place) -> Result<Entry, Fault> {
        let file = self.usable(place, OpenFlags::WRITE)?;
        self.entry(file.as_fd(), place.file, Leases::ATTRIBUTES)
    }

    /// lseek(2).
    pub fn seek(&self, place: Place, offset: u64, what: Sought) -> Result<Answer, Fault> {
        // The session's own descriptor will do: nothing else uses its offset.
        let file = match self.target(place)? {
            Target::Opened(opened) => Usable::Opened(opened),
            Target::Node(_) => self.usable(place, OpenFlags::READ)?,
        };
        let from = match what {
            Sought::Data => SeekFrom::Data(offset),
            Sought::Hole => SeekFrom::Hole(offset),
        };
        Ok(Answer::Offset(rustix::fs::seek(&file, from)?))
    }
}

/// Removes a file that was just created, unless its name refers to another file by now.
pub fn unmake(at: NameIn<'_, &Node>, made: &Stat) {
    let NameIn { parent, name } = at;
    let Ok(found) = rustix::fs::statat(&parent.fd, name, AtFlags::SYMLINK_NOFOLLOW) else { return };
    if (found.st_dev, found.st_ino) == (made.st_dev, made.st_ino) {
        let is_directory = FileType::from_raw_mode(made.st_mode) == FileType::Directory;
        let flags = if is_directory { AtFlags::REMOVEDIR } else { AtFlags::empty() };
        let _ = rustix::fs::unlinkat(&parent.fd, name, flags);
    }
}

/// fallocate(2).
pub fn allocate_step(file: &Usable, range: Range<u64>, how: Allocation) -> Result<(), Fault> {
    let mode = match how {
        Allocation::Extend => FallocateFlags::empty(),
        Allocation::KeepSize => FallocateFlags::KEEP_SIZE,
        Allocation::PunchHole => FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
        Allocation::ZeroRange => FallocateFlags::ZERO_RANGE,
        Allocation::ZeroRangeKeepSize => FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE,
        Allocation::CollapseRange => FallocateFlags::COLLAPSE_RANGE,
        Allocation::InsertRange => FallocateFlags::INSERT_RANGE,
    };
    effects::begin();
    Ok(rustix::fs::fallocate(file, mode, range.start, range.end.saturating_sub(range.start))?)
}

/// copy_file_range(2), between two offsets.
pub fn copy_step(
    mut from: PositionIn<&Usable>,
    mut to: PositionIn<&Usable>,
    length: u64,
) -> Result<u64, Fault> {
    let length = usize::try_from(length).unwrap_or(usize::MAX);
    effects::begin();
    let copied = rustix::fs::copy_file_range(
        from.file,
        Some(&mut from.offset),
        to.file,
        Some(&mut to.offset),
        length,
    )?;
    Ok(copied as u64)
}

/// Converts flags for open(2). Without `O_APPEND`: each write appends by itself
/// ([`super::transfer`]), if it is to. With `O_NONBLOCK`, so that no pipe blocks.
fn kernel_flags(flags: OpenFlags) -> OFlags {
    let (reads, writes) = (flags.contains(OpenFlags::READ), flags.contains(OpenFlags::WRITE));
    let access = match (reads, writes) {
        (true, true) => OFlags::RDWR,
        (false, true) => OFlags::WRONLY,
        _ => OFlags::RDONLY,
    };
    let truncate =
        if flags.contains(OpenFlags::TRUNCATE) { OFlags::TRUNC } else { OFlags::empty() };
    access | truncate | OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NONBLOCK
}

/// Converts an error of the standard library.
pub fn errno_of(error: std::io::Error) -> Fault {
    Fault::from(error.raw_os_error().map_or(Errno::EIO, Errno::from_raw))
}
