//! FUSE adapter between the kernel and [`Volume`]. Only this file and the ones below `fuse/` use
//! the crate fuser. This file runs the requests and invalidates the kernel's caches; `requests`
//! has one handler per request.

mod convert;
mod requests;

use std::{
    cell::Cell,
    ffi::{OsStr, OsString},
    future::Future,
    io,
    ops::Range,
    os::{fd::OwnedFd, unix::ffi::OsStrExt},
    path::{Path, PathBuf},
    pin::Pin,
    sync::{Arc, Weak},
    task::{Context, Waker},
    time::Duration,
};

use fuser::{Request, Session, SessionACL};
use nix::errno::Errno;
use tokio::{runtime::Handle, sync::mpsc};

use crate::{
    fs::{Invalidate, KERNEL_PATIENCE, Volume},
    mounted,
};

/// Number of threads that read requests. They never block on a request.
const THREADS: usize = 2;

/// FUSE_NOTIFY_INC_EPOCH of linux/fuse.h (Linux 6.16): invalidates all names.
const NOTIFY_INC_EPOCH: i32 = 8;

/// FUSE_NOTIFY_INVAL_INODE of linux/fuse.h.
const NOTIFY_INVAL_INODE: i32 = 2;

/// FUSE_NOTIFY_INVAL_ENTRY of linux/fuse.h.
const NOTIFY_INVAL_ENTRY: i32 = 3;

/// FUSE_NOTIFY_PRUNE of linux/fuse.h (Linux 6.18): drops unused dentries of files.
const NOTIFY_PRUNE: i32 = 9;

/// First protocol version with [`NOTIFY_PRUNE`].
const PRUNES: fuser::Version = fuser::Version(7, 45);

/// Limit of files in one [`NOTIFY_PRUNE`].
const PRUNED_AT_ONCE: usize = 512;

/// FUSE_EXPIRE_ONLY of linux/fuse.h (Linux 6.2): a name is looked up again, but not dropped.
const EXPIRE_ONLY: u32 = 1;

/// Interval of checks whether a waiting thread was killed.
const LOOK_AT_KILLED: Duration = Duration::from_millis(300);

/// Interval of retries of an invalidation for a file whose first reply the kernel has not processed
/// yet.
const LOOK_AT_UNKNOWN: Duration = Duration::from_micros(100);

/// Page size of x86-64; a larger one is a multiple.
const PAGE_BYTES: u64 = 4096;

/// Size of `struct fuse_out_header`.
const ANSWER_BYTES: usize = 16;

/// Users with access to a mount.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Users {
    /// Only the user who mounted it.
    Own,
    /// All users, each with their own rights (`allow_other`).
    All,
}

/// Serves a device, mounted at `mount_point`, until it is unmounted; the returned thread ends then.
///
/// # Errors
/// Those of the handshake with the kernel.
pub fn serve(
    volume: Arc<Volume>,
    invalidations: mpsc::UnboundedReceiver<Invalidate>,
    device: OwnedFd,
    mount_point: &Path,
    users: Users,
) -> io::Result<std::thread::JoinHandle<io::Result<()>>> {
    let acl = if users == Users::All { SessionACL::All } else { SessionACL::Owner };
    let mut config = fuser::Config::default();
    config.acl = acl;
    config.n_threads = Some(THREADS);
    let raw = Arc::new(device.try_clone()?);
    let told = Arc::downgrade(&volume);
    let adapter = Adapter { volume, runtime: Handle::current(), users, raw: Arc::clone(&raw) };
    let session = Session::from_fd(adapter, device, acl, config)?;
    let kernel = Kernel { raw, mount_point: mount_point.to_owned(), volume: told };
    std::thread::Builder::new()
        .name("volume-forget".to_owned())
        .spawn(move || kernel.carry_out(invalidations))?;
    std::thread::Builder::new().name("volume".to_owned()).spawn(move || session.run())
}

/// Invalidates the kernel's caches.
///
/// Invariant: after an invalidation the kernel caches no attribute that it was sent before. A reply
/// is sent when it is written, and takes effect when the requesting thread runs. For a file that
/// the kernel knows, it discards a reply to a LOOKUP, READDIRPLUS or GETATTR from before the
/// invalidation (`attr_version`, fs/fuse/inode.c). It has no such order for SETATTR, nor for
/// CREATE, LINK and the other replies with a new name: these give attributes no lifetime. A file
/// that it does not know yet becomes known by the first reply, and the invalidation waits for that
/// ([`forget_for_sure`]).
struct Kernel {
    raw: Arc<OwnedFd>,
    mount_point: PathBuf,
    volume: Weak<Volume>,
}

impl Kernel {
    /// Performs invalidations, in a thread of its own: the kernel blocks on readers of the pages.
    fn carry_out(self, mut invalidations: mpsc::UnboundedReceiver<Invalidate>) {
        while let Some(mut invalidate) = invalidations.blocking_recv() {
            if let Some(names) = &invalidate.names {
                self.forget_names(names);
            }
            if !invalidate.busy.is_empty() && self.carry_out_beside_reads(&mut invalidate) {
                continue;
            }
            // A negative offset: only attributes.
            let offset = if invalidate.pages { 0 } else { -1 };
            let number = invalidate.number;
            let forget = || file_is_doubtful(&self.raw, number, offset, 0);
            forget_for_sure(forget, || self.is_told(number));
            self.let_go(&invalidate.let_go);
        }
    }

    /// Invalidates in another thread, which waits for the reads in progress: first the pages
    /// between them. Returns false if no thread could be started.
    fn carry_out_beside_reads(&self, invalidate: &mut Invalidate) -> bool {
        let (raw, volume, number) = (Arc::clone(&self.raw), self.volume.clone(), invalidate.number);
        let gaps = gaps_between(std::mem::take(&mut invalidate.busy));
        let carried_out = invalidate.take_over();
        let wait = move || {
            let _carried_out = carried_out;
            for (offset, length) in gaps.into_iter().chain([(0, 0)]) {
                let forget = || file_is_doubtful(&raw, number, offset, length);
                let is_told = || volume.upgrade().is_some_and(|volume| volume.is_told(number));
                forget_for_sure(forget, is_told);
            }
        };
        std::thread::Builder::new().name("volume-forget".to_owned()).spawn(wait).is_ok()
    }

    fn is_told(&self, number: u64) -> bool {
        self.volume.upgrade().is_some_and(|volume| volume.is_told(number))
    }

    /// Drops files from the kernel's caches: pages and attributes first, then dentries.
    fn let_go(&self, numbers: &[u64]) {
        for number in numbers {
            let forget = || file_is_doubtful(&self.raw, *number, 0, 0);
            forget_for_sure(forget, || self.is_told(*number));
        }
        for numbers in numbers.chunks(PRUNED_AT_ONCE) {
            // An older kernel keeps the dentries.
            let _ = self.prune(numbers);
        }
    }

    /// Sends a `struct fuse_notify_prune_out`.
    fn prune(&self, numbers: &[u64]) -> nix::Result<usize> {
        let count = u32::try_from(numbers.len()).unwrap_or_default();
        let head = [count.to_ne_bytes(), [0; 4]].concat();
        let numbers: Vec<u8> = numbers.iter().flat_map(|number| number.to_ne_bytes()).collect();
        notify(&self.raw, NOTIFY_PRUNE, &[&head, &[0; 8], &numbers])
    }

    fn forget_names(&self, names: &[(u64, Vec<OsString>)]) {
        // Dropping a name would unmount the mounts on it and below it.
        if !mounted::has_mounts_below(&self.mount_point) && self.all_names_are_doubtful() {
            return;
        }
        for (directory, names) in names {
            names.iter().for_each(|name| self.name_is_doubtful(*directory, name));
        }
    }

    /// Invalidates all names. It takes no locks, so that it doesn't block on a waiting request in
    /// the same directory.
    fn all_names_are_doubtful(&self) -> bool {
        notify(&self.raw, NOTIFY_INC_EPOCH, &[]).is_ok()
    }

    /// Invalidates a name. A kernel before 6.2 drops it.
    fn name_is_doubtful(&self, directory: u64, name: &OsStr) {
        let length = u32::try_from(name.len()).unwrap_or_default();
        let numbers =
            [directory.to_ne_bytes().as_slice(), &length.to_ne_bytes(), &EXPIRE_ONLY.to_ne_bytes()]
                .concat();
        // An error: the kernel does not know the name.
        let _ = notify(&self.raw, NOTIFY_INVAL_ENTRY, &[&numbers, name.as_bytes(), b"\0"]);
    }
}

/// Returns offsets and lengths of the gaps between pages that are being read, the rest of the file
/// last.
fn gaps_between(mut busy: Vec<Range<u64>>) -> Vec<(i64, i64)> {
    busy.sort_by_key(|range| range.start);
    let mut gaps = Vec::new();
    let mut at = 0;
    for range in busy {
        let (start, end) =
            (range.start / PAGE_BYTES * PAGE_BYTES, range.end.next_multiple_of(PAGE_BYTES));
        if start > at {
            gaps.push((at, start - at));
        }
        at = at.max(end);
    }
    gaps.push((at, 0));
    gaps.into_iter()
        .filter_map(|(at, length)| Some((i64::try_from(at).ok()?, i64::try_from(length).ok()?)))
        .collect()
}

/// Sends a `struct fuse_notify_inval_inode_out`, with an offset (below 0: only attributes) and a
/// length (0: to the end). fuser's own function doesn't report that the kernel does not know the
/// file.
fn file_is_doubtful(raw: &OwnedFd, number: u64, offset: i64, length: i64) -> nix::Result<()> {
    let numbers = [number.to_ne_bytes(), offset.to_ne_bytes(), length.to_ne_bytes()].concat();
    notify(raw, NOTIFY_INVAL_INODE, &[&numbers]).map(drop)
}

/// Writes a notification: `struct fuse_out_header` and its body.
fn notify(raw: &OwnedFd, what: i32, parts: &[&[u8]]) -> nix::Result<usize> {
    let length = 16 + parts.iter().map(|part| part.len()).sum::<usize>();
    let mut message = Vec::with_capacity(length);
    message.extend(u32::try_from(length).unwrap_or_default().to_ne_bytes());
    message.extend(what.to_ne_bytes());
    message.extend(0_u64.to_ne_bytes());
    parts.iter().for_each(|part| message.extend_from_slice(part));
    nix::unistd::write(raw, &message)
}

/// Repeats an invalidation until the kernel knows the file. If the kernel doesn't know a file that
/// it was sent, a reply or a FORGET is on the way, and either ends this. [`KERNEL_PATIENCE`] passes
/// only if the kernel can't run the requesting thread.
fn forget_for_sure(forget: impl Fn() -> nix::Result<()>, is_told: impl Fn() -> bool) {
    let until = crate::clock::now() + KERNEL_PATIENCE;
    while forget() == Err(Errno::ENOENT) && is_told() && crate::clock::now() < until {
        std::thread::sleep(LOOK_AT_UNKNOWN);
    }
}

tokio::task_local! {
    /// True if the task's request has been answered before, with EINTR.
    static IS_LET_GO: Cell<bool>;
}

/// Returns true if the kernel will drop this request's answer: so it must count as not sent.
fn is_let_go() -> bool {
    IS_LET_GO.try_with(Cell::get).unwrap_or(false)
}

struct Adapter {
    volume: Arc<Volume>,
    runtime: Handle,
    users: Users,
    raw: Arc<OwnedFd>,
}

/// Timeout for the invalidation of a write's pages. The kernel keeps the last page locked during
/// the write if the write has added it; then no other thread can have filled it.
const PAGES_PATIENCE: Duration = Duration::from_millis(10);

/// Invalidates a write's pages before the write returns. The kernel copies the data into its pages,
/// and unlocks them before it sends the request. If they are dropped for a recall meanwhile, and
/// another thread reads them again, they have the contents from before the write, and would keep
/// them.
async fn forget_written(raw: Arc<OwnedFd>, number: u64, offset: u64, length: u32) {
    let Ok(offset) = i64::try_from(offset) else { return };
    let forget = move || file_is_doubtful(&raw, number, offset, length.into());
    let _ = tokio::time::timeout(PAGES_PATIENCE, tokio::task::spawn_blocking(forget)).await;
}

impl Adapter {
    /// Polls the work once, which suffices for requests that are answered from the cache; the
    /// runtime does the rest.
    fn answer(&self, request: &Request, work: impl Future<Output = ()> + Send + 'static) {
        let mut work: Pin<Box<dyn Future<Output = ()> + Send>> = Box::pin(work);
        let _entered = self.runtime.enter();
        let mut context = Context::from_waker(Waker::noop());
        if work.as_mut().poll(&mut context).is_pending() {
            let asked = Asked {
                thread: request.pid(),
                number: request.unique().into(),
                raw: Arc::clone(&self.raw),
            };
            self.runtime.spawn(IS_LET_GO.scope(Cell::new(false), asked.answer(work)));
        }
    }

    fn caller(&self, request: &Request) -> crate::store::Caller {
        convert::caller(request, self.users)
    }
}

/// A request that is not answered at once.
///
/// Invariant: a killed thread gets an answer within a second, whatever the server does. The kernel
/// waits for the answer to a request that was read (fs/fuse/dev.c, `request_wait_answer`), and
/// sends FUSE_INTERRUPT, which fuser does not pass on: so waiting threads are polled.
struct Asked {
    thread: u32,
    number: u64,
    raw: Arc<OwnedFd>,
}

impl Asked {
    /// Completes the work, also after the thread was killed. The kernel drops the second answer; a
    /// file that was opened is closed again.
    async fn answer(self, mut work: Pin<Box<dyn Future<Output = ()> + Send>>) {
        loop {
            tokio::select! {
                () = &mut work => return,
                () = tokio::time::sleep(LOOK_AT_KILLED) => {}
            }
            if convert::is_killed(self.thread) {
                self.let_go();
                IS_LET_GO.with(|is_let_go| is_let_go.set(true));
                return work.await;
            }
        }
    }

    /// Answers with EINTR, by a `struct fuse_out_header`.
    fn let_go(&self) {
        let mut answer = Vec::with_capacity(ANSWER_BYTES);
        answer.extend(u32::try_from(ANSWER_BYTES).unwrap_or_default().to_ne_bytes());
        answer.extend((-nix::libc::EINTR).to_ne_bytes());
        answer.extend(self.number.to_ne_bytes());
        let _ = nix::unistd::write(&self.raw, &answer);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_that_are_not_being_read_are_forgotten_first() {
        assert_eq!(gaps_between(vec![5000..6000, 5500..5600]), [(0, 4096), (8192, 0)]);
        assert_eq!(gaps_between(vec![8192..16384, 0..100, 9000..9001]), [(4096, 4096), (16384, 0)]);
        assert_eq!(gaps_between(vec![0..u64::MAX / 2, 4096..8192]).len(), 0);
    }

    #[test]
    fn a_file_that_the_kernel_is_about_to_know_is_forgotten_when_it_does() {
        // What the kernel says one time after the other, and for how many times it was told of the
        // file.
        for (answers, told_for, asked) in [
            (vec![], 0, 1),
            (vec![Errno::ENOENT], 0, 1),
            (vec![Errno::ENOENT, Errno::ENOENT], 9, 3),
            (vec![Errno::ENOENT, Errno::ENOENT, Errno::ENOENT], 2, 3),
            (vec![Errno::ENOTCONN], 9, 1),
        ] {
            let (times, looks) = (Cell::new(0), Cell::new(0));
            let forget = || {
                let time = times.replace(times.get() + 1);
                answers.get(time).map_or(Ok(()), |errno| Err(*errno))
            };
            forget_for_sure(forget, || looks.replace(looks.get() + 1) < told_for);
            assert_eq!(times.get(), asked, "{answers:?}");
        }
    }
}
