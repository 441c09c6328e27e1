//! Open files: open, close, fsync, locks, and operations on contents that the server performs.

use std::{
    collections::{BTreeSet, HashSet},
    ops::Range,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use bytes::Bytes;
use tokio::task::JoinSet;

use super::{
    Volume,
    newborn::NEWBORN_BYTES,
    reading::Pattern,
    unborn::{What, Which},
};
use crate::store::{
    Access, Allocation, Answer, Caller, Entry, Errno, FileId, Handle, Leases, Lock, NameIn,
    NewMode, Op, OpenFlags, Place, PositionIn, RangeLock, Sought, Synced, Wait,
};

/// An open file.
#[derive(Debug)]
pub(super) struct Open {
    pub file: FileId,
    /// The store's handle; `None` for a file that was opened from the cache or created in memory.
    pub handle: Mutex<Option<Handle>>,
    /// The whole contents at the time of an open from the cache.
    pub pinned: Option<Bytes>,
    pub flags: OpenFlags,
    /// True for direct I/O: the kernel sends reads and writes as they are, and locks no pages.
    pub is_direct: bool,
    pub caller: Caller,
    /// Error of a write that was answered before it failed, to be reported by a later call.
    pub fault: Mutex<Option<Errno>>,
    /// Owners that have requested locks through it. A process's locks end when it closes the file.
    /// Locks of the open file itself (F_OFD_SETLK, flock(2)) end with it; for F_OFD_SETLK the
    /// kernel doesn't say so.
    pub lock_owners: Mutex<BTreeSet<u64>>,
    /// Pattern of its reads, for read-ahead.
    pub pattern: Mutex<Pattern>,
}

/// Result of an open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Opened {
    /// The number of the open file.
    pub number: u64,
    /// True if the kernel's cached pages are still valid (FOPEN_KEEP_CACHE).
    pub keeps_pages: bool,
    /// True if the kernel must bypass its pages (FOPEN_DIRECT_IO): there is no lease, or one
    /// write(2) must be one request.
    pub is_direct: bool,
}

impl Volume {
    /// open(2) of an existing file.
    ///
    /// # Errors
    /// Of the call.
    pub async fn open(
        self: &Arc<Self>,
        caller: &Caller,
        number: u64,
        flags: OpenFlags,
    ) -> Result<Opened, Errno> {
        if let Some(opened) = self.open_refused(caller, number, flags) {
            return Ok(opened);
        }
        let file = self.born(number).await?;
        self.drain(file).await?;
        if flags == OpenFlags::READ {
            self.note_opened(caller, file);
            if let Some((entry, pinned)) = self.in_memory(caller, file).await {
                return Ok(self.opened(caller, flags, None, Some(pinned), &entry));
            }
        }
        let answer = self.ask_of(caller, file, |place| Op::Open { place, flags }).await?;
        let Answer::Opened { handle, entry, .. } = answer else { return Err(Errno::EPROTO) };
        Ok(self.opened(caller, flags, Some(handle), None, &entry))
    }

    /// Opens a refused file for reading.
    fn open_refused(&self, caller: &Caller, number: u64, flags: OpenFlags) -> Option<Opened> {
        let table = self.table();
        let node = table.node(number)?;
        let newborn = node.unborn.as_ref().filter(|newborn| newborn.refusal().is_some())?;
        let What::Regular(contents) = &newborn.what else { return None };
        let may =
            caller.uid == 0 || newborn.caller == *caller && node.attributes?.mode & 0o400 != 0;
        if flags != OpenFlags::READ || !may {
            return None;
        }
        let pinned = Some(Bytes::copy_from_slice(contents));
        let file = node.file;
        drop(table);
        let number = self.fresh_number();
        self.add_open(Open { pinned, is_direct: true, ..Open::new(file, flags, caller) }, number);
        Some(Opened { number, keeps_pages: false, is_direct: true })
    }

    /// open(2) with `O_CREAT` of a name that is not known to exist.
    ///
    /// # Errors
    /// Of the call.
    pub async fn create(
        self: &Arc<Self>,
        caller: &Caller,
        at: NameIn<'_, u64>,
        mode: NewMode,
        flags: OpenFlags,
    ) -> Result<(Opened, Entry), Errno> {
        let empty = What::Regular(Vec::new());
        let conceived = self.conceive(caller, at, empty, mode.masked, flags).await;
        if let Some((entry, Some(opened))) = conceived {
            return Ok((opened, entry));
        }
        let (parent, name) = (self.born(at.parent).await?, at.name.to_owned());
        let op = Op::Create { parent, name, mode, flags };
        let Answer::Opened { handle, entry, parent } = self.ask(caller, op).await? else {
            return Err(Errno::EPROTO);
        };
        if let Some(parent) = parent {
            self.note_name(&parent, at.name, Some(entry.attributes.id));
        }
        self.drain(entry.attributes.id).await?;
        Ok((self.opened(caller, flags, Some(handle), None, &entry), entry))
    }

    fn opened(
        &self,
        caller: &Caller,
        flags: OpenFlags,
        handle: Option<Handle>,
        pinned: Option<Bytes>,
        entry: &Entry,
    ) -> Opened {
        let file = entry.attributes.id;
        let number = self.fresh_number();
        let mut table = self.table();
        table.number(file);
        let mut opened = Opened { number, keeps_pages: false, is_direct: true };
        if let Some(node) = table.of_mut(file) {
            node.handles.extend(handle);
            if flags.contains(OpenFlags::READ) {
                node.reader = Some(caller.uid);
            }
            // Without recalls, the kernel must not cache.
            let is_told = self.store.lease_limit().is_none();
            let is_leased =
                is_told && node.leases.contains(Leases::DATA) && !flags.contains(OpenFlags::DIRECT);
            opened.is_direct = !is_leased || self.writes_whole(flags);
            opened.keeps_pages = is_leased && !node.pages_doubtful;
            // Without `keeps_pages` the kernel drops its pages on this open.
            node.pages_doubtful = !is_leased;
        }
        drop(table);
        let is_direct = opened.is_direct;
        let open = Open {
            handle: Mutex::new(handle),
            pinned,
            is_direct,
            ..Open::new(file, flags, caller)
        };
        self.add_open(open, number);
        opened
    }

    /// Returns an open file with a handle, which is opened if necessary.
    async fn open_with_handle(self: &Arc<Self>, open: u64) -> Result<Arc<Open>, Errno> {
        let open = self.born_open(open).await?;
        if open.handle().is_none() {
            let op = |place| Op::Open { place, flags: open.flags };
            let answer = self.ask_of(&open.caller, open.file, op).await?;
            let Answer::Opened { handle, .. } = answer else {
                return Err(Errno::EPROTO);
            };
            let before = open.handle.lock().unwrap_or_else(PoisonError::into_inner).replace(handle);
            if let Some(node) = self.table().of_mut(open.file) {
                node.handles.push(handle);
            }
            if let Some(other) = before {
                // A concurrent call has opened another one.
                let _ = self.ask(&open.caller, Op::Close(other)).await;
            }
        }
        Ok(open)
    }

    /// Opens handles for open files without one, before a name is removed: if it is their last one,
    /// they would be unreachable afterwards.
    pub(super) async fn hold_open(self: &Arc<Self>, caller: &Caller, at: NameIn<'_, u64>) {
        let from_memory = self.opened_from_memory();
        if from_memory.is_empty() {
            return;
        }
        // Errors of the name are reported by the call itself.
        let Ok(entry) = self.lookup(caller, at).await else { return };
        for (number, _) in from_memory.iter().filter(|(_, file)| *file == entry.attributes.id) {
            let _ = self.open_with_handle(*number).await;
        }
    }

    /// Like `hold_open`, for all open files, before a command on the server that may remove or
    /// replace names.
    pub async fn hold_all_open(self: &Arc<Self>) {
        let held = self.opened_from_memory().into_iter().map(|(number, _)| {
            let volume = Arc::clone(self);
            async move { volume.open_with_handle(number).await.map(drop) }
        });
        let mut held: JoinSet<_> = held.collect();
        // A file that can't be opened any more is already gone.
        while held.join_next().await.is_some() {}
    }

    fn opened_from_memory(&self) -> Vec<(u64, FileId)> {
        let opens = self.opens.lock().unwrap_or_else(PoisonError::into_inner);
        let from_memory =
            opens.iter().filter(|(_, open)| open.pinned.is_some() && open.handle().is_none());
        let mut from_memory: Vec<_> =
            from_memory.map(|(number, open)| (*number, open.file)).collect();
        from_memory.sort_unstable();
        from_memory
    }

    /// Returns all open files.
    pub(super) fn open_ids(&self) -> HashSet<FileId> {
        self.opens
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .values()
            .map(|open| open.file)
            .collect()
    }

    pub(super) fn open_file(&self, open: u64) -> Result<Arc<Open>, Errno> {
        self.opens
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get(&open)
            .cloned()
            .ok_or(Errno::EBADF)
    }

    /// Notes a failed write with each open file of the file, whichever was written to.
    pub(super) fn note_fault(&self, file: FileId, errno: Errno) {
        let opens = self.opens.lock().unwrap_or_else(PoisonError::into_inner);
        for open in opens.values().filter(|open| open.file == file) {
            *open.fault.lock().unwrap_or_else(PoisonError::into_inner) = Some(errno);
        }
    }

    /// close(2) of one descriptor (FUSE_FLUSH): sends all writes to the server, and reports a
    /// failed one. The error stays for other descriptors, since an exiting child closes its own
    /// without checking; fsync(2) clears it, like Linux's errseq_t. Releases the locks of `owner`.
    ///
    /// # Errors
    /// That of a failed write.
    pub async fn flush(self: &Arc<Self>, open: u64, owner: Option<u64>) -> Result<(), Errno> {
        let number = open;
        let open = self.open_file(open)?;
        if self.flush_newborn(&open) {
            return open.look_at_fault();
        }
        let open = if open.file.is_provisional() { self.born_open(number).await? } else { open };
        self.drain(open.file).await?;
        // A close of any descriptor of the file releases the process's locks (fcntl(2)).
        if let Some(owner) = owner.filter(|owner| self.forget_lock_owner(open.file, *owner)) {
            self.ask(&open.caller, Op::Unlock { file: open.file, owner }).await?;
        }
        open.look_at_fault()
    }

    /// Last close (FUSE_RELEASE). Releases the locks of `owner`.
    ///
    /// # Errors
    /// `EBADF`
    pub async fn release(self: &Arc<Self>, open: u64, owner: Option<u64>) -> Result<(), Errno> {
        let found = self.open_file(open)?;
        if self.release_newborn(open, &found) {
            return Ok(());
        }
        // A file whose creation has failed is closed, too.
        let _ = self.born_open(open).await;
        let removed = self.opens.lock().unwrap_or_else(PoisonError::into_inner).remove(&open);
        let open = removed.ok_or(Errno::EBADF)?;
        if self.drain(open.file).await.is_ok() {
            self.close(&open, owner).await;
            return Ok(());
        }
        // Its writes need the handle until the server is back.
        let volume = Arc::clone(self);
        tokio::spawn(async move {
            volume.drained(open.file).await;
            volume.close(&open, owner).await;
        });
        Ok(())
    }

    async fn close(&self, open: &Open, owner: Option<u64>) {
        if let Some(node) = self.table().of_mut(open.file) {
            node.handles.retain(|handle| Some(*handle) != open.handle());
        }
        let mut owners = std::mem::take(&mut *open.lock_owners());
        owners.extend(owner.filter(|_| !owners.is_empty()));
        for owner in owners {
            let _ = self.ask(&open.caller, Op::Unlock { file: open.file, owner }).await;
        }
        if let Some(handle) = open.handle() {
            // A store that no longer knows the handle has closed it.
            let _ = self.ask_once(&open.caller, Op::Close(handle)).await;
        }
    }

    /// fsync(2)
    ///
    /// # Errors
    /// That of a failed write, or those of the call.
    pub async fn sync(self: &Arc<Self>, open: u64, what: Synced) -> Result<(), Errno> {
        let open = self.open_with_handle(open).await?;
        self.drain(open.file).await?;
        open.take_fault()?;
        self.ask(&open.caller, Op::Sync { place: open.place(), what }).await.map(drop)
    }

    /// fsync(2) of a directory.
    ///
    /// # Errors
    /// Of the call.
    pub async fn sync_directory(
        self: &Arc<Self>,
        caller: &Caller,
        number: u64,
        what: Synced,
    ) -> Result<(), Errno> {
        let place = self.born(number).await?.into();
        // fsync(2) of a directory includes its names.
        self.bring_out(Which::All).await?;
        self.show_as_sent();
        let refusal = self.table().refusal_below(number);
        refusal.map_or(Ok(()), Err)?;
        self.ask(caller, Op::Sync { place, what }).await.map(drop)
    }

    /// fallocate(2)
    ///
    /// # Errors
    /// Of the call.
    pub async fn allocate(
        self: &Arc<Self>,
        open: u64,
        range: Range<u64>,
        how: Allocation,
    ) -> Result<(), Errno> {
        let open = self.open_with_handle(open).await?;
        self.drain(open.file).await?;
        self.ask(&open.caller, Op::Allocate { place: open.place(), range, how }).await.map(drop)
    }

    /// lseek(2) for data and holes.
    ///
    /// # Errors
    /// Of the call.
    pub async fn seek(
        self: &Arc<Self>,
        open: u64,
        offset: u64,
        what: Sought,
    ) -> Result<u64, Errno> {
        let open = self.open_with_handle(open).await?;
        self.drain(open.file).await?;
        match self.ask(&open.caller, Op::Seek { place: open.place(), offset, what }).await? {
            Answer::Offset(offset) => Ok(offset),
            _ => Err(Errno::EPROTO),
        }
    }

    /// copy_file_range(2), on the server.
    ///
    /// # Errors
    /// Of the call.
    pub async fn copy(
        self: &Arc<Self>,
        from: PositionIn<u64>,
        to: PositionIn<u64>,
        length: u64,
    ) -> Result<u64, Errno> {
        if let Some(copied) = self.copy_to_newborn(from, to, length).await {
            return Ok(copied);
        }
        let (source, target) =
            (self.open_with_handle(from.file).await?, self.open_with_handle(to.file).await?);
        self.drain(source.file).await?;
        self.drain(target.file).await?;
        let op = Op::CopyRange {
            from: PositionIn { file: source.place(), offset: from.offset },
            to: PositionIn { file: target.place(), offset: to.offset },
            length,
        };
        match self.ask(&target.caller, op).await? {
            Answer::Copied { bytes, .. } => Ok(bytes),
            _ => Err(Errno::EPROTO),
        }
    }

    /// Copies a small file, which most often was prefetched, to a file in memory: so copying a tree
    /// takes no round trip per file.
    async fn copy_to_newborn(
        self: &Arc<Self>,
        from: PositionIn<u64>,
        to: PositionIn<u64>,
        length: u64,
    ) -> Option<u64> {
        let (source, target) = (self.open_file(from.file).ok()?, self.open_file(to.file).ok()?);
        if !target.file.is_provisional() || source.file == target.file {
            return None;
        }
        self.drain(source.file).await.ok()?;
        let size = self.size_known(source.file)?;
        let length = size.saturating_sub(from.offset).min(length);
        if to.offset.saturating_add(length) > NEWBORN_BYTES {
            return None;
        }
        let data = self.read(from.file, from.offset, u32::try_from(length).ok()?).await.ok()?;
        let copied = data.len() as u64;
        (data.is_empty() || self.write_newborn(&target, to, &data, false)).then_some(copied)
    }

    pub(super) fn size_known(&self, file: FileId) -> Option<u64> {
        let table = self.table();
        let node = table.of(file)?;
        let is_sure =
            node.unborn.is_some() || node.leases.contains(Leases::ATTRIBUTES) && self.is_good(node);
        node.attributes.filter(|_| is_sure).map(|attributes| attributes.size)
    }

    /// flock(2), and fcntl(2)'s locks. Writes are sent to the server before a lock is released.
    ///
    /// # Errors
    /// `EAGAIN` if the lock is held and `wait` is not set; others.
    pub async fn lock(
        self: &Arc<Self>,
        open: u64,
        owner: u64,
        lock: Lock,
        wait: Wait,
    ) -> Result<(), Errno> {
        let open = self.open_with_handle(open).await?;
        self.drain(open.file).await?;
        open.lock_owners().insert(owner);
        self.ask(&open.caller, Op::Lock { place: open.place(), owner, lock, wait }).await.map(drop)
    }

    /// Forgets a lock owner that has closed a descriptor of the file. Returns true if it may have
    /// had locks.
    fn forget_lock_owner(&self, file: FileId, owner: u64) -> bool {
        let opens = self.opens.lock().unwrap_or_else(PoisonError::into_inner);
        let of_file = opens.values().filter(|open| open.file == file);
        of_file.filter(|open| open.lock_owners().remove(&owner)).count() > 0
    }

    /// Finds a conflicting lock.
    ///
    /// # Errors
    /// Those of the call.
    pub async fn test_lock(
        self: &Arc<Self>,
        open: u64,
        owner: u64,
        range: Range<u64>,
        access: Access,
    ) -> Result<Option<RangeLock>, Errno> {
        let open = self.open_with_handle(open).await?;
        let op = Op::TestLock {
            place: open.place(),
            owner,
            lock: RangeLock { range, access: Some(access) },
        };
        match self.ask(&open.caller, op).await? {
            Answer::Locked(lock) => Ok(lock),
            _ => Err(Errno::EPROTO),
        }
    }
}

impl Open {
    /// Creates an open file without a handle.
    pub fn new(file: FileId, flags: OpenFlags, caller: &Caller) -> Self {
        Self {
            file,
            handle: Mutex::new(None),
            pinned: None,
            flags,
            is_direct: false,
            caller: caller.clone(),
            fault: Mutex::new(None),
            lock_owners: Mutex::default(),
            pattern: Mutex::default(),
        }
    }

    pub fn handle(&self) -> Option<Handle> {
        *self.handle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_owners(&self) -> MutexGuard<'_, BTreeSet<u64>> {
        self.lock_owners.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn place(&self) -> Place {
        Place { file: self.file, handle: self.handle() }
    }

    /// Error of failed writes for close(2); none for a file that is open for reading alone.
    fn look_at_fault(&self) -> Result<(), Errno> {
        let fault = *self.fault.lock().unwrap_or_else(PoisonError::into_inner);
        fault.filter(|_| self.flags.contains(OpenFlags::WRITE)).map_or(Ok(()), Err)
    }

    /// Error of failed writes for fsync(2), once.
    fn take_fault(&self) -> Result<(), Errno> {
        let fault = self.fault.lock().unwrap_or_else(PoisonError::into_inner).take();
        fault.map_or(Ok(()), Err)
    }
}
