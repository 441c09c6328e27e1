//! Handlers of the kernel's requests. A request that needs no waiting is answered on fuser's
//! thread, others by the runtime.

use std::{
    ffi::OsStr,
    io,
    path::Path,
    sync::Arc,
    time::{Duration, SystemTime},
};

use bytes::Bytes;
use fuser::{
    AccessFlags, BsdFileFlags, CopyFileRangeFlags, FileHandle, Filesystem, FopenFlags, Generation,
    INodeNo, InitFlags, IoctlFlags, KernelConfig, LockOwner, OpenFlags as FuseOpenFlags,
    RenameFlags, ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory, ReplyDirectoryPlus, ReplyEmpty,
    ReplyEntry, ReplyIoctl, ReplyLock, ReplyLseek, ReplyOpen, ReplyStatfs, ReplyWrite, ReplyXattr,
    Request, TimeOrNow, WriteFlags,
};

use super::{
    Adapter, PRUNES, Users,
    convert::{self, attr, error, kind_of_mode, new_time, open_flags},
    forget_written, is_let_go,
};
use crate::{
    fs::{Name, Opened, Source, Told, Volume},
    store::{
        Acls, Changes, Entry, Errno, Lock, NameIn, PositionIn, RangeLock, Removal, Renaming,
        Synced, Wait,
    },
};

/// Size of the kernel's writes and read-ahead.
const REQUEST_BYTES: u32 = 1 << 20;

/// Number of the kernel's concurrent background requests (mostly read-ahead).
const BACKGROUND: u16 = 64;

/// Lifetime of attributes in a reply that the kernel does not order with invalidations
/// ([`super::Kernel`]).
const UNORDERED: Duration = Duration::ZERO;

/// Interval of checks whether a process that waits for a lock was interrupted: fuser doesn't pass
/// FUSE_INTERRUPT on.
const LOOK_AT_WAITING: Duration = Duration::from_millis(100);

/// Replies with a value, or with an error.
macro_rules! reply {
    ($reply:expr, $result:expr, $ok:expr) => {
        match $result {
            Ok(value) => $ok($reply, value),
            Err(errno) => $reply.error(error(errno)),
        }
    };
}

fn entry(volume: &Volume, at: NameIn<'_, u64>, entry: &Entry, reply: ReplyEntry) {
    if is_let_go() {
        return reply.error(fuser::Errno::EINTR);
    }
    volume.tell(at, entry, |told| {
        let generation = Generation(told.generation);
        reply.entry_with_ttls(&told.attributes_life, &told.name_life, &attr(&told), generation);
    });
}

/// Replies with a name that the request has created.
fn new_entry(volume: &Volume, at: NameIn<'_, u64>, entry: &Entry, reply: ReplyEntry) {
    if is_let_go() {
        return reply.error(fuser::Errno::EINTR);
    }
    volume.tell(at, entry, |told| {
        let generation = Generation(told.generation);
        reply.entry_with_ttls(&UNORDERED, &told.name_life, &attr(&told), generation);
    });
}

fn open_reply_flags(opened: &Opened) -> FopenFlags {
    let mut flags = FopenFlags::empty();
    flags.set(FopenFlags::FOPEN_DIRECT_IO, opened.is_direct);
    flags.set(FopenFlags::FOPEN_KEEP_CACHE, opened.keeps_pages);
    flags
}

/// Adds a name to a reply; returns false if it doesn't fit.
fn add_name(reply: &mut ReplyDirectoryPlus, name: &Name, told: Option<Told>) -> bool {
    let Some(told) = told else {
        let nobody = convert::name_only(name);
        return !reply.add(
            nobody.ino,
            name.next,
            &name.name,
            &Duration::ZERO,
            &nobody,
            Generation(0),
        );
    };
    let life = told.attributes_life.min(told.name_life);
    let generation = Generation(told.generation);
    !reply.add(INodeNo(told.number), name.next, &name.name, &life, &attr(&told), generation)
}

impl Filesystem for Adapter {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        // Optional: an older kernel goes without.
        for wanted in [
            InitFlags::FUSE_ATOMIC_O_TRUNC,
            InitFlags::FUSE_DO_READDIRPLUS,
            InitFlags::FUSE_PARALLEL_DIROPS,
            InitFlags::FUSE_ASYNC_DIO,
            InitFlags::FUSE_POSIX_LOCKS,
            InitFlags::FUSE_FLOCK_LOCKS,
            InitFlags::FUSE_HANDLE_KILLPRIV_V2,
            // The umask applies only without a default ACL of the directory, which the server
            // knows.
            InitFlags::FUSE_DONT_MASK,
            InitFlags::FUSE_EXPLICIT_INVAL_DATA,
            InitFlags::FUSE_DIRECT_IO_ALLOW_MMAP,
            InitFlags::FUSE_MAX_PAGES,
        ] {
            let _ = config.add_capabilities(wanted);
        }
        if config.kernel_abi() < PRUNES {
            // Attributes only if programs stat the files: this kernel may keep for long what it is
            // sent.
            let _ = config.add_capabilities(InitFlags::FUSE_READDIRPLUS_AUTO);
        }
        if self.users == Users::All {
            // The kernel checks permissions, for which it needs ACLs beside the mode.
            let wanted = InitFlags::FUSE_POSIX_ACL | InitFlags::FUSE_DONT_MASK;
            let lacks = |_| {
                io::Error::new(
                    io::ErrorKind::Unsupported,
                    "this kernel heeds no ACLs on mounts for everybody",
                )
            };
            config.add_capabilities(wanted).map_err(lacks)?;
        }
        let _ = config.set_max_write(REQUEST_BYTES);
        if let Err(most) = config.set_max_readahead(REQUEST_BYTES) {
            let _ = config.set_max_readahead(most);
        }
        let _ = config.set_max_background(BACKGROUND);
        Ok(())
    }

    fn lookup(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let (volume, caller, name) =
            (Arc::clone(&self.volume), self.caller(request), name.to_owned());
        self.answer(request, async move {
            let at = NameIn { parent: parent.0, name: &name };
            match volume.lookup(&caller, at).await {
                Ok(found) => entry(&volume, at, &found, reply),
                Err(Errno::ENOENT) => volume.tell_absent(at, |life| {
                    if life.is_zero() {
                        return reply.error(fuser::Errno::ENOENT);
                    }
                    // Number 0: a negative entry, which the kernel caches.
                    reply.entry(&life, &convert::NOTHING, Generation(0));
                }),
                Err(errno) => reply.error(error(errno)),
            }
        });
    }

    fn forget(&self, _: &Request, number: INodeNo, times: u64) {
        self.volume.forgotten(number.0, times);
    }

    fn getattr(&self, request: &Request, number: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        let (volume, caller) = (Arc::clone(&self.volume), self.caller(request));
        self.answer(request, async move {
            reply!(
                reply,
                volume.attributes(&caller, number.0).await,
                |reply: ReplyAttr, attributes| {
                    volume.tell_attributes(number.0, attributes, |told| {
                        reply.attr(&told.attributes_life, &attr(&told))
                    });
                }
            );
        });
    }

    fn setattr(
        &self,
        request: &Request,
        number: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        atime: Option<TimeOrNow>,
        mtime: Option<TimeOrNow>,
        _: Option<SystemTime>,
        open: Option<FileHandle>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let (volume, caller) = (Arc::clone(&self.volume), self.caller(request));
        let mode = mode.map(|mode| mode & 0o7777);
        let changes = Changes {
            mode,
            uid,
            gid,
            size,
            atime: atime.map(new_time),
            mtime: mtime.map(new_time),
        };
        self.answer(request, async move {
            let changed = volume.change(&caller, number.0, open.map(|open| open.0), changes).await;
            reply!(reply, changed, |reply: ReplyAttr, attributes| {
                volume.tell_attributes(number.0, attributes, |told| {
                    reply.attr(&UNORDERED, &attr(&told))
                });
            });
        });
    }

    fn readlink(&self, request: &Request, number: INodeNo, reply: ReplyData) {
        let (volume, caller) = (Arc::clone(&self.volume), self.caller(request));
        self.answer(request, async move {
            use std::os::unix::ffi::OsStrExt;
            reply!(
                reply,
                volume.target(&caller, number.0).await,
                |reply: ReplyData, target: std::ffi::OsString| {
                    reply.data(target.as_bytes());
                }
            );
        });
    }

    fn mknod(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        rdev: u32,
        reply: ReplyEntry,
    ) {
        let new_mode = convert::new_mode(mode, umask);
        let (volume, caller, name) =
            (Arc::clone(&self.volume), self.caller(request), name.to_owned());
        self.answer(request, async move {
            let at = NameIn { parent: parent.0, name: &name };
            let (kind, rdev) = (kind_of_mode(mode), convert::device(rdev));
            let made = volume.make_node(&caller, at, new_mode, kind, rdev).await;
            reply!(reply, made, |reply, made: Entry| new_entry(&volume, at, &made, reply));
        });
    }

    fn mkdir(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        reply: ReplyEntry,
    ) {
        let mode = convert::new_mode(mode, umask);
        let (volume, caller, name) =
            (Arc::clone(&self.volume), self.caller(request), name.to_owned());
        self.answer(request, async move {
            let at = NameIn { parent: parent.0, name: &name };
            let made = volume.make_directory(&caller, at, mode).await;
            reply!(reply, made, |reply, made: Entry| new_entry(&volume, at, &made, reply));
        });
    }

    fn unlink(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let (volume, caller, name) =
            (Arc::clone(&self.volume), self.caller(request), name.to_owned());
        self.answer(request, async move {
            let at = NameIn { parent: parent.0, name: &name };
            let removed = volume.remove(&caller, at, Removal::File).await;
            reply!(reply, removed, |reply: ReplyEmpty, ()| reply.ok());
        });
    }

    fn rmdir(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let (volume, caller, name) =
            (Arc::clone(&self.volume), self.caller(request), name.to_owned());
        self.answer(request, async move {
            let at = NameIn { parent: parent.0, name: &name };
            let removed = volume.remove(&caller, at, Removal::Directory).await;
            reply!(reply, removed, |reply: ReplyEmpty, ()| reply.ok());
        });
    }

    fn symlink(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        target: &Path,
        reply: ReplyEntry,
    ) {
        let (volume, caller, name) =
            (Arc::clone(&self.volume), self.caller(request), name.to_owned());
        let target = target.as_os_str().to_owned();
        self.answer(request, async move {
            let at = NameIn { parent: parent.0, name: &name };
            let made = volume.symlink(&caller, at, &target).await;
            reply!(reply, made, |reply, made: Entry| new_entry(&volume, at, &made, reply));
        });
    }

    fn rename(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        new_parent: INodeNo,
        new_name: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        let (volume, caller) = (Arc::clone(&self.volume), self.caller(request));
        let (name, new_name) = (name.to_owned(), new_name.to_owned());
        let how = match flags {
            flags if flags.is_empty() => Renaming::Replace,
            RenameFlags::RENAME_NOREPLACE => Renaming::NoReplace,
            RenameFlags::RENAME_EXCHANGE => Renaming::Exchange,
            _ => return reply.error(fuser::Errno::EINVAL),
        };
        self.answer(request, async move {
            let from = NameIn { parent: parent.0, name: &name };
            let to = NameIn { parent: new_parent.0, name: &new_name };
            let renamed = volume.rename(&caller, from, to, how).await;
            reply!(reply, renamed, |reply: ReplyEmpty, ()| reply.ok());
        });
    }

    fn link(
        &self,
        request: &Request,
        number: INodeNo,
        parent: INodeNo,
        name: &OsStr,
        reply: ReplyEntry,
    ) {
        let (volume, caller, name) =
            (Arc::clone(&self.volume), self.caller(request), name.to_owned());
        self.answer(request, async move {
            let at = NameIn { parent: parent.0, name: &name };
            let made = volume.link(&caller, number.0, at).await;
            reply!(reply, made, |reply, made: Entry| new_entry(&volume, at, &made, reply));
        });
    }

    fn open(&self, request: &Request, number: INodeNo, flags: FuseOpenFlags, reply: ReplyOpen) {
        let (volume, caller) = (Arc::clone(&self.volume), self.caller(request));
        self.answer(request, async move {
            let opened = volume.open(&caller, number.0, open_flags(flags.0)).await;
            if is_let_go() {
                return close_at_once(&volume, opened).await;
            }
            reply!(reply, opened, |reply: ReplyOpen, opened: Opened| {
                reply.opened(FileHandle(opened.number), open_reply_flags(&opened));
            });
        });
    }

    fn create(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        flags: i32,
        reply: ReplyCreate,
    ) {
        let mode = convert::new_mode(mode, umask);
        let (volume, caller, name) =
            (Arc::clone(&self.volume), self.caller(request), name.to_owned());
        self.answer(request, async move {
            let at = NameIn { parent: parent.0, name: &name };
            let created = volume.create(&caller, at, mode, open_flags(flags)).await;
            if is_let_go() {
                return close_at_once(&volume, created.map(|(opened, _)| opened)).await;
            }
            reply!(reply, created, |reply: ReplyCreate, (opened, entry): (Opened, Entry)| {
                volume.tell(at, &entry, |told: Told| {
                    let generation = Generation(told.generation);
                    reply.created(
                        &UNORDERED,
                        &attr(&told),
                        generation,
                        FileHandle(opened.number),
                        open_reply_flags(&opened),
                    );
                });
            });
        });
    }

    fn read(
        &self,
        request: &Request,
        _: INodeNo,
        open: FileHandle,
        offset: u64,
        size: u32,
        _: FuseOpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let volume = Arc::clone(&self.volume);
        self.answer(request, async move {
            reply!(
                reply,
                volume.read(open.0, offset, size).await,
                |reply: ReplyData, data: Bytes| reply.data(&data)
            );
        });
    }

    fn write(
        &self,
        request: &Request,
        number: INodeNo,
        open: FileHandle,
        offset: u64,
        data: &[u8],
        flags: WriteFlags,
        open_flags: FuseOpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let (volume, data) = (Arc::clone(&self.volume), Bytes::copy_from_slice(data));
        // The present flags: fcntl(2) may have changed O_APPEND since the open.
        let appends = open_flags.0 & nix::libc::O_APPEND != 0;
        let source = match flags.contains(WriteFlags::FUSE_WRITE_CACHE) {
            true => Source::Mapping,
            false if appends => Source::Append,
            false => Source::Call,
        };
        let drops_bits = flags.contains(WriteFlags::FUSE_WRITE_KILL_SUIDGID);
        let raw = Arc::clone(&self.raw);
        self.answer(request, async move {
            let length = u32::try_from(data.len()).unwrap_or(u32::MAX);
            let written = volume.write(open.0, offset, data, source).await;
            if drops_bits {
                volume.mode_may_change(number.0).await;
            }
            // Pages of a mapping stay in the kernel until they are written.
            if source != Source::Mapping && volume.were_pages_recalled(number.0) {
                forget_written(raw, number.0, offset, length).await;
            }
            reply!(reply, written, |reply: ReplyWrite, ()| reply.written(length));
        });
    }

    fn flush(
        &self,
        request: &Request,
        _: INodeNo,
        open: FileHandle,
        owner: LockOwner,
        reply: ReplyEmpty,
    ) {
        let volume = Arc::clone(&self.volume);
        self.answer(request, async move {
            reply!(reply, volume.flush(open.0, Some(owner.0)).await, |reply: ReplyEmpty, ()| reply
                .ok());
        });
    }

    fn release(
        &self,
        request: &Request,
        _: INodeNo,
        open: FileHandle,
        _: FuseOpenFlags,
        owner: Option<LockOwner>,
        _: bool,
        reply: ReplyEmpty,
    ) {
        let volume = Arc::clone(&self.volume);
        self.answer(request, async move {
            let released = volume.release(open.0, owner.map(|owner| owner.0)).await;
            reply!(reply, released, |reply: ReplyEmpty, ()| reply.ok());
        });
    }

    fn fsync(
        &self,
        request: &Request,
        _: INodeNo,
        open: FileHandle,
        datasync: bool,
        reply: ReplyEmpty,
    ) {
        let volume = Arc::clone(&self.volume);
        self.answer(request, async move {
            reply!(reply, volume.sync(open.0, synced(datasync)).await, |reply: ReplyEmpty, ()| {
                reply.ok()
            });
        });
    }

    fn opendir(&self, request: &Request, number: INodeNo, _: FuseOpenFlags, reply: ReplyOpen) {
        let opened = self.volume.open_directory(&self.caller(request), number.0);
        reply!(reply, opened, |reply: ReplyOpen, open| reply
            .opened(FileHandle(open), FopenFlags::empty()));
    }

    fn readdir(
        &self,
        request: &Request,
        _: INodeNo,
        open: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        let volume = Arc::clone(&self.volume);
        self.answer(request, async move {
            let names = match volume.read_directory(open.0, offset).await {
                Ok(names) => names,
                Err(errno) => return reply.error(error(errno)),
            };
            for name in names {
                if reply.add(
                    INodeNo(name.inode),
                    name.next,
                    convert::file_type(name.kind),
                    &name.name,
                ) {
                    break;
                }
            }
            reply.ok();
        });
    }

    fn readdirplus(
        &self,
        request: &Request,
        number: INodeNo,
        open: FileHandle,
        offset: u64,
        mut reply: ReplyDirectoryPlus,
    ) {
        let volume = Arc::clone(&self.volume);
        self.answer(request, async move {
            loop {
                let names = match volume.read_directory_with_attributes(open.0, offset).await {
                    Ok(_) if is_let_go() => return reply.error(fuser::Errno::EINTR),
                    Ok(names) => names,
                    Err(errno) => return reply.error(error(errno)),
                };
                let give = |filled: ReplyDirectoryPlus, count| {
                    if count > 0 || names.is_empty() {
                        filled.ok();
                        return None;
                    }
                    // Retry: the first file has changed meanwhile, and an empty answer would mean
                    // the end of the directory.
                    Some(filled)
                };
                let Some(filled) = volume.tell_all(number.0, &names, reply, add_name, give) else {
                    return;
                };
                reply = filled;
            }
        });
    }

    fn releasedir(
        &self,
        _: &Request,
        _: INodeNo,
        open: FileHandle,
        _: FuseOpenFlags,
        reply: ReplyEmpty,
    ) {
        self.volume.close_directory(open.0);
        reply.ok();
    }

    fn fsyncdir(
        &self,
        request: &Request,
        number: INodeNo,
        _: FileHandle,
        datasync: bool,
        reply: ReplyEmpty,
    ) {
        let (volume, caller) = (Arc::clone(&self.volume), self.caller(request));
        self.answer(request, async move {
            let done = volume.sync_directory(&caller, number.0, synced(datasync)).await;
            reply!(reply, done, |reply: ReplyEmpty, ()| reply.ok());
        });
    }

    fn statfs(&self, request: &Request, _: INodeNo, reply: ReplyStatfs) {
        let (volume, caller) = (Arc::clone(&self.volume), self.caller(request));
        self.answer(request, async move {
            reply!(
                reply,
                volume.file_system(&caller).await,
                |reply: ReplyStatfs, about: crate::store::FileSystem| {
                    let block = u64::from(about.block_bytes.max(1));
                    let [all, free, available] =
                        [about.bytes, about.bytes_free, about.bytes_available].map(|b| b / block);
                    let (files, files_free) = (about.files, about.files_free);
                    reply.statfs(
                        all,
                        free,
                        available,
                        files,
                        files_free,
                        about.block_bytes,
                        about.name_bytes,
                        about.block_bytes,
                    );
                }
            );
        });
    }

    fn setxattr(
        &self,
        request: &Request,
        number: INodeNo,
        name: &OsStr,
        value: &[u8],
        flags: i32,
        _: u32,
        reply: ReplyEmpty,
    ) {
        let Some(how) = convert::attribute_change(flags) else {
            return reply.error(fuser::Errno::EINVAL);
        };
        if !convert::is_passed_on(name, self.users) {
            return reply.error(fuser::Errno::EOPNOTSUPP);
        }
        let (volume, caller, name) =
            (Arc::clone(&self.volume), self.caller(request), name.to_owned());
        let value = Bytes::copy_from_slice(value);
        self.answer(request, async move {
            let done = volume.set_extended(&caller, number.0, &name, value, how).await;
            reply!(reply, done, |reply: ReplyEmpty, ()| reply.ok());
        });
    }

    fn getxattr(
        &self,
        request: &Request,
        number: INodeNo,
        name: &OsStr,
        size: u32,
        reply: ReplyXattr,
    ) {
        if !convert::is_passed_on(name, self.users) {
            return reply.error(fuser::Errno::EOPNOTSUPP);
        }
        // The kernel asks for ACLs with each access: skip the look-up of the caller's groups.
        if let Some(known) =
            Acls::named(name).and_then(|acl| self.volume.remembered_acl(number.0, acl))
        {
            return reply!(reply, known, |reply, value: Bytes| convert::sized(reply, &value, size));
        }
        let (volume, caller, name) =
            (Arc::clone(&self.volume), self.caller(request), name.to_owned());
        self.answer(request, async move {
            reply!(
                reply,
                volume.extended(&caller, number.0, &name).await,
                |reply, value: Bytes| {
                    convert::sized(reply, &value, size);
                }
            );
        });
    }

    fn listxattr(&self, request: &Request, number: INodeNo, size: u32, reply: ReplyXattr) {
        let (volume, caller, users) = (Arc::clone(&self.volume), self.caller(request), self.users);
        self.answer(request, async move {
            reply!(reply, volume.extended_names(&caller, number.0).await, |reply, names| {
                convert::sized(reply, &convert::names_of_attributes(names, users), size);
            });
        });
    }

    fn removexattr(&self, request: &Request, number: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        if !convert::is_passed_on(name, self.users) {
            return reply.error(fuser::Errno::EOPNOTSUPP);
        }
        let (volume, caller, name) =
            (Arc::clone(&self.volume), self.caller(request), name.to_owned());
        self.answer(request, async move {
            let done = volume.remove_extended(&caller, number.0, &name).await;
            reply!(reply, done, |reply: ReplyEmpty, ()| reply.ok());
        });
    }

    /// Sent only if the kernel does not check permissions itself; the server checks each operation.
    fn access(&self, _: &Request, _: INodeNo, _: AccessFlags, reply: ReplyEmpty) {
        reply.ok();
    }

    fn getlk(
        &self,
        request: &Request,
        _: INodeNo,
        open: FileHandle,
        owner: LockOwner,
        start: u64,
        end: u64,
        typ: i32,
        _: u32,
        reply: ReplyLock,
    ) {
        let Some(access) = convert::access(typ) else { return reply.error(fuser::Errno::EINVAL) };
        let volume = Arc::clone(&self.volume);
        self.answer(request, async move {
            let found =
                volume.test_lock(open.0, owner.0, convert::lock_range(start, end), access).await;
            reply!(reply, found, convert::lock);
        });
    }

    fn setlk(
        &self,
        request: &Request,
        _: INodeNo,
        open: FileHandle,
        owner: LockOwner,
        start: u64,
        end: u64,
        typ: i32,
        _: u32,
        sleep: bool,
        reply: ReplyEmpty,
    ) {
        // flock(2) arrives as a lock over the whole file, with an owner of its own.
        let lock =
            RangeLock { range: convert::lock_range(start, end), access: convert::access(typ) };
        let (volume, thread) = (Arc::clone(&self.volume), request.pid());
        let wait = if sleep { Wait::Yes } else { Wait::No };
        self.answer(request, async move {
            let locked = volume.lock(open.0, owner.0, Lock::Range(lock), wait);
            tokio::pin!(locked);
            let done = loop {
                tokio::select! {
                    done = &mut locked => break done,
                    () = tokio::time::sleep(LOOK_AT_WAITING) => {}
                }
                if convert::is_interrupted(thread) {
                    break Err(Errno::EINTR);
                }
            };
            reply!(reply, done, |reply: ReplyEmpty, ()| reply.ok());
        });
    }

    fn fallocate(
        &self,
        request: &Request,
        _: INodeNo,
        open: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let Some(how) = convert::allocation(mode) else {
            return reply.error(fuser::Errno::EOPNOTSUPP);
        };
        let volume = Arc::clone(&self.volume);
        self.answer(request, async move {
            let done = volume.allocate(open.0, offset..offset.saturating_add(length), how).await;
            reply!(reply, done, |reply: ReplyEmpty, ()| reply.ok());
        });
    }

    /// Refused for all files. fuser's default would log every isatty(3).
    fn ioctl(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        _: IoctlFlags,
        _: u32,
        _: &[u8],
        _: u32,
        reply: ReplyIoctl,
    ) {
        reply.error(fuser::Errno::ENOTTY);
    }

    fn lseek(
        &self,
        request: &Request,
        _: INodeNo,
        open: FileHandle,
        offset: i64,
        whence: i32,
        reply: ReplyLseek,
    ) {
        let (Some(what), Ok(offset)) = (convert::sought(whence), u64::try_from(offset)) else {
            return reply.error(fuser::Errno::EINVAL);
        };
        let volume = Arc::clone(&self.volume);
        self.answer(request, async move {
            reply!(
                reply,
                volume.seek(open.0, offset, what).await,
                |reply: ReplyLseek, offset: u64| {
                    reply.offset(offset.cast_signed());
                }
            );
        });
    }

    fn copy_file_range(
        &self,
        request: &Request,
        _: INodeNo,
        from: FileHandle,
        from_offset: u64,
        _: INodeNo,
        to: FileHandle,
        to_offset: u64,
        length: u64,
        _: CopyFileRangeFlags,
        reply: ReplyWrite,
    ) {
        let volume = Arc::clone(&self.volume);
        self.answer(request, async move {
            // The answer's count has 32 bits.
            let length = length.min(u64::from(u32::MAX) & !0xfff);
            let from = PositionIn { file: from.0, offset: from_offset };
            let to = PositionIn { file: to.0, offset: to_offset };
            let copied = volume.copy(from, to, length).await;
            reply!(reply, copied, |reply: ReplyWrite, bytes| reply
                .written(u32::try_from(bytes).unwrap_or(u32::MAX)));
        });
    }
}

/// Closes a file whose open was answered with EINTR.
async fn close_at_once(volume: &Arc<Volume>, opened: Result<Opened, Errno>) {
    if let Ok(opened) = opened {
        let _ = volume.release(opened.number, None).await;
    }
}

fn synced(datasync: bool) -> Synced {
    if datasync { Synced::Data } else { Synced::Everything }
}
