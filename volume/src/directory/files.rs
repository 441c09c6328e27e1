//! Open files, and what is done to their bytes.

use std::{
    ffi::OsStr,
    ops::Range,
    os::fd::{AsFd as _, BorrowedFd, OwnedFd},
    sync::{Arc, atomic::Ordering},
};

use nix::errno::Errno;
use rustix::fs::{AtFlags, FallocateFlags, FileType, Mode, OFlags, SeekFrom, Stat};

use super::{
    Fault, Rights,
    account::Charge,
    attributes,
    nodes::{BENEATH, Keep, Node, check_name},
    session::{BYTES, Session, leases_of},
};
use crate::store::{
    Allocation, Answer, Changes, Entry, FileId, Handle, Kind, Leases, NewMode, OpenFlags, Place,
    Sought, Synced,
};

/// Open files of one session.
const MAX_OPENED: usize = 32_768;
/// Attempts at a name that others make and remove at the same time.
const ATTEMPTS: u32 = 16;

/// A file that a session has open.
#[derive(Debug)]
pub struct Opened {
    /// Which.
    pub file: FileId,
    /// How.
    pub flags: OpenFlags,
    /// As the kernel has it.
    pub fd: OwnedFd,
    _charge: Charge,
}

/// What a place means.
#[derive(Debug, Clone)]
pub enum Target {
    Opened(Arc<Opened>),
    Node(Node),
}

impl Target {
    /// For calls that take any descriptor.
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

/// A file open for what is to be done.
///
/// Invariant: nobody keeps an own one while a call waits, be it for a turn, a lease or a reader. So
/// there are no more of them than threads at work, however many calls wait.
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
    /// The handle's file, or the id's.
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

    /// A file by its id. One that has lost its names, or that cannot be reached by them any more,
    /// is found among those that this session has open, as an open descriptor goes on to work:
    /// where all callers are one, so that none is served by what another has opened.
    fn node(&self, file: FileId) -> Result<Node, Fault> {
        self.directory.nodes.node(file).or_else(|fault| {
            if self.directory.rights == Rights::Callers {
                return Err(fault);
            }
            let opened = self.opened.lock().expect("not poisoned");
            let opened = opened.values().find(|opened| opened.file == file).ok_or(fault)?;
            let fd = opened.fd.try_clone().map_err(errno_of)?;
            Ok(Node { id: file, kind: Kind::Regular, fd: Arc::new(fd) })
        })
    }

    /// Opens a place for this one use, where its handle does not allow it already.
    pub fn usable(&self, place: Place, flags: OpenFlags) -> Result<Usable, Fault> {
        match self.target(place)? {
            Target::Opened(opened) if opened.flags.contains(flags) => Ok(Usable::Opened(opened)),
            Target::Opened(_) => Err(Errno::EBADF.into()),
            Target::Node(node) => Ok(Usable::Own(self.reopen(&node, flags)?)),
        }
    }

    fn reopen(&self, node: &Node, flags: OpenFlags) -> Result<OwnedFd, Fault> {
        self.check_kind(node, flags)?;
        Ok(rustix::fs::open(
            attributes::link_to(node.fd.as_fd()),
            kernel_flags(flags),
            Mode::empty(),
        )?)
    }

    /// Whether files of this kind are opened so, rights apart.
    pub fn check_kind(&self, node: &Node, flags: OpenFlags) -> Result<(), Fault> {
        match node.kind {
            Kind::Regular => {}
            Kind::Directory if flags == OpenFlags::READ => {}
            Kind::Directory => return Err(Errno::EISDIR.into()),
            Kind::Symlink => return Err(Errno::ELOOP.into()),
            // The workstation's kernel has pipes, sockets and devices of its own.
            _ => return Err(Errno::ENXIO.into()),
        }
        if flags.intersects(OpenFlags::WRITE | OpenFlags::TRUNCATE) {
            self.directory.require_writable()?;
        }
        Ok(())
    }

    /// open(2) of what exists.
    pub fn open(&self, file: FileId, flags: OpenFlags) -> Result<Answer, Fault> {
        let node = self.directory.nodes.node(file)?;
        self.open_node(&node, flags)
    }

    fn open_node(&self, node: &Node, flags: OpenFlags) -> Result<Answer, Fault> {
        // Before it is cut, if it is to be.
        let room = self.room_for_open()?;
        let fd = self.reopen(node, flags)?;
        self.keep((node.id, fd), flags, None, room)
    }

    /// open(2) with `O_CREAT`.
    pub fn create(
        &self,
        (parent, name): (FileId, &OsStr),
        (mode, flags): (NewMode, OpenFlags),
    ) -> Result<Answer, Fault> {
        check_name(name)?;
        let parent = self.directory.nodes.node(parent)?;
        for _ in 0..ATTEMPTS {
            match self.create_new((&parent, name), (mode, flags)) {
                Err(fault)
                    if fault == Fault::from(Errno::EEXIST)
                        && !flags.contains(OpenFlags::EXCLUSIVE) => {}
                made => return made,
            }
            match self.directory.nodes.child(&parent, name, Keep::Open) {
                Err(fault) if fault == Fault::from(Errno::ENOENT) => {}
                found => return self.open_node(&found?, flags),
            }
        }
        Err(Errno::EAGAIN.into())
    }

    fn create_new(
        &self,
        (parent, name): (&Node, &OsStr),
        (mode, flags): (NewMode, OpenFlags),
    ) -> Result<Answer, Fault> {
        // On a read-only export opening what exists is all right, as long as it is not changed.
        if self.directory.require_writable().is_err() {
            let exists = self.directory.nodes.child(parent, name, Keep::Open).is_ok();
            return Err(if exists { Errno::EEXIST.into() } else { Errno::EROFS.into() });
        }
        let room = self.room_for_open()?;
        let how = kernel_flags(flags) | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW;
        let fd = rustix::fs::openat2(
            &parent.fd,
            name,
            how,
            super::names::permissions(parent, mode),
            BENEATH,
        )?;
        self.keep_new((parent, name), (flags, fd), room)
    }

    /// Of a file that was made just now.
    pub fn keep_new(
        &self,
        at: (&Node, &OsStr),
        opened: (OpenFlags, OwnedFd),
        room: Charge,
    ) -> Result<Answer, Fault> {
        let made = rustix::fs::fstat(&opened.1)?;
        let kept = self.keep_made(at, opened, room);
        if kept.is_err() {
            // It was not opened, and so it was not made: open(2) knows no half.
            unmake(at, &made);
        }
        kept
    }

    fn keep_made(
        &self,
        (parent, name): (&Node, &OsStr),
        (flags, fd): (OpenFlags, OwnedFd),
        room: Charge,
    ) -> Result<Answer, Fault> {
        let path = self.directory.nodes.remember(
            fd.try_clone().map_err(errno_of)?,
            Some((parent.id, name)),
            Keep::Way,
        )?;
        let begun =
            self.keeper().table().is_changing(self.directory.nodes.file(parent.id), self.id);
        if !begun {
            // It was there when this was announced, and has gone since.
            self.directory.touched(parent.id, super::session::NAMES);
        }
        self.keep((path.id, fd), flags, Some(parent), room)
    }

    /// A place among the open files of its account.
    pub fn room_for_open(&self) -> Result<Charge, Fault> {
        if self.opened.lock().expect("not poisoned").len() >= MAX_OPENED {
            return Err(Errno::EMFILE.into());
        }
        Ok(self.directory.machine.descriptors.try_take(&self.account, 1).ok_or(Errno::EMFILE)?)
    }

    fn keep(
        &self,
        (file, fd): (FileId, OwnedFd),
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
        let entry = self.entry((fd.as_fd(), file), wanted)?;
        let handle = Handle(self.last_handle.fetch_add(1, Ordering::Relaxed) + 1);
        let mut opened = self.opened.lock().expect("not poisoned");
        if opened.len() >= MAX_OPENED {
            return Err(Errno::EMFILE.into());
        }
        // Looked at under the lock, as the end empties the table under it: nothing stays behind.
        if self.is_over() {
            return Err(Errno::ESTALE.into());
        }
        opened.insert(handle, Arc::new(Opened { file, flags, fd, _charge: room }));
        drop(opened);
        let parent = parent.map(|parent| self.entry_of_node(parent)).transpose()?;
        Ok(Answer::Opened { handle, entry, parent })
    }

    /// The last close.
    pub fn close(&self, handle: Handle) -> Result<Answer, Fault> {
        let opened = self.opened.lock().expect("not poisoned").remove(&handle);
        let file = opened.ok_or(Errno::EBADF)?.file;
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
            // ftruncate(2) of a file that is open for reading.
            (Target::Opened(_), Some(_)) => return Err(Errno::EINVAL.into()),
            (Target::Node(_), Some(_)) => Some(self.usable(place, OpenFlags::WRITE)?),
        };
        attributes::change(target.fd(), changes)?;
        if let (Some(file), Some(size)) = (&resized, changes.size) {
            rustix::fs::ftruncate(file, size)?;
        }
        attributes::change_times(target.fd(), changes)?;
        let leases = if target.is_directory() { super::session::NAMES } else { Leases::ATTRIBUTES };
        debug_assert!(!leases_of(changes).is_empty());
        self.entry((target.fd(), place.file), leases)
    }

    /// fsync(2).
    pub fn sync(&self, place: Place, what: Synced) -> Result<Answer, Fault> {
        let target = self.target(place)?;
        let own = match &target {
            Target::Opened(_) => None,
            // What somebody may write but not read is his to sync, too.
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

    /// How a file is that its caller has written to.
    pub fn entry_of_writable(&self, place: Place) -> Result<Entry, Fault> {
        let file = self.usable(place, OpenFlags::WRITE)?;
        self.entry((file.as_fd(), place.file), Leases::ATTRIBUTES)
    }

    /// lseek(2).
    pub fn seek(&self, place: Place, (offset, what): (u64, Sought)) -> Result<Answer, Fault> {
        // A description of its own is not needed: nobody uses its offset.
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

/// Removes a file that was made a moment ago, unless the name has become another one's.
pub fn unmake((parent, name): (&Node, &OsStr), made: &Stat) {
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
    Ok(rustix::fs::fallocate(file, mode, range.start, range.end.saturating_sub(range.start))?)
}

/// copy_file_range(2), between two offsets.
pub fn copy_step(
    source: &Usable,
    target: &Usable,
    (mut from, mut to): (u64, u64),
    length: u64,
) -> Result<u64, Fault> {
    let length = usize::try_from(length).unwrap_or(usize::MAX);
    let copied =
        rustix::fs::copy_file_range(source, Some(&mut from), target, Some(&mut to), length)?;
    Ok(copied as u64)
}

/// As the kernel has them. Appending is done by each write ([`super::transfer`]); nothing waits for
/// pipes.
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

/// Of an error of the standard library.
pub fn errno_of(error: std::io::Error) -> Fault {
    Fault::from(error.raw_os_error().map_or(Errno::EIO, Errno::from_raw))
}
