//! Watch for changes by other programs of this machine, by fanotify(7): each change becomes a
//! recall. This process announces its own changes beforehand ([`crate::keeper`]); their events are
//! ignored.
//!
//! It watches whole file systems, which needs root. The kernel reports stores through a shared
//! mapping only on write-back.
//!
//! Batching: a wake-up of this thread per event would slow down writers. So after a read it pauses
//! for a millisecond (5,000 files that are unpacked and removed take a hundred reads, not eight
//! thousand). A caller that needs the events sooner calls [`Watch::catch_up`].

use std::{
    os::fd::{AsFd as _, BorrowedFd, OwnedFd},
    sync::{Arc, Mutex, Weak},
    thread,
    time::Duration,
};

use nix::{
    libc,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::eventfd::{EfdFlags, EventFd},
};

use super::sys::{self, Event, EventFile};
use crate::{
    keeper::Keeper,
    leases::File,
    store::{Leases, Watched},
};

/// Flags of the queue. Each event has names and file handles. The queue is unlimited: a lost event
/// would void all leases.
const QUEUE: u32 = libc::FAN_CLASS_NOTIF
    | libc::FAN_CLOEXEC
    | libc::FAN_NONBLOCK
    | libc::FAN_REPORT_DFID_NAME_TARGET
    | libc::FAN_UNLIMITED_QUEUE;
const NAMES: u64 = libc::FAN_CREATE | libc::FAN_DELETE | libc::FAN_MOVED_FROM | libc::FAN_MOVED_TO;
const EVENTS: u64 =
    NAMES | libc::FAN_MODIFY | libc::FAN_ATTRIB | libc::FAN_DELETE_SELF | libc::FAN_ONDIR;
/// File systems all of whose changes are events of this kernel, and whose files keep their handles
/// as long as they exist: ext2 to ext4, XFS, tmpfs, Btrfs (statfs(2)). Not overlayfs, which gives a
/// file another handle when it is first changed, nor what other machines change.
///
/// Invariant: an event's file system id is that of the descriptor that was marked, and the kernel
/// refuses a descriptor whose id differs from that of the file system's root (fanotify_mark(2),
/// EXDEV). So a Btrfs subvolume is watched only with the whole file system; see
/// [`sys::system_of`].
const TOLD: [u64; 4] = [0xef53, 0x5846_5342, sys::TMPFS, sys::BTRFS];
/// Size of the buffer for events.
const READ_BYTES: usize = 64 << 10;
/// Limit of queued events, each of which takes some hundred bytes in the kernel. Beyond it all
/// leases are dropped, which is faster than processing each event.
const MOST_QUEUED: u64 = 20_000;
/// Size of an event's head, the only part that FIONREAD counts
/// (fs/notify/fanotify/fanotify_user.c).
const EVENT_HEAD_BYTES: u64 = std::mem::size_of::<libc::fanotify_event_metadata>() as u64;
/// Pause between two reads. A longer one would lengthen the queue, but not speed up writers.
const REST: Duration = Duration::from_millis(1);
/// The kernel's name for an event of the directory itself.
const ITSELF: &[u8] = b".";

/// The queue of events, and the thread that reads it.
#[derive(Debug)]
pub struct Watch {
    shared: Option<Arc<Shared>>,
    /// Stops the thread.
    end: Option<Arc<EventFd>>,
}

#[derive(Debug)]
struct Shared {
    queue: OwnedFd,
    keeper: Arc<Keeper>,
    /// Its lock also serializes the processing of events.
    buffer: Mutex<Vec<u8>>,
}

impl Watch {
    /// Creates a watch that watches nothing.
    pub fn none() -> Self {
        Self { shared: None, end: None }
    }

    /// Starts the thread. If the kernel or our rights don't allow it, nothing is watched.
    pub fn start(keeper: Arc<Keeper>) -> Self {
        let none = Self::none();
        let Ok(queue) = sys::fanotify(QUEUE) else { return none };
        let Ok(end) = EventFd::from_flags(EfdFlags::EFD_CLOEXEC) else { return none };
        let end = Arc::new(end);
        let buffer = Mutex::new(vec![0; READ_BYTES]);
        let shared = Arc::new(Shared { queue, keeper, buffer });
        let (watched, its_end) = (Arc::downgrade(&shared), end.clone());
        let thread = thread::Builder::new()
            .name("watch".to_owned())
            .spawn(move || attend(&watched, &its_end));
        match thread {
            Ok(_) => Self { shared: Some(shared), end: Some(end) },
            Err(_) => none,
        }
    }

    /// Watches the file system of that directory, if possible.
    pub fn cover(&self, root: BorrowedFd<'_>) -> Watched {
        let Some(shared) = &self.shared else { return Watched::LeaseEnd };
        if !rustix::fs::fstatfs(root)
            .is_ok_and(|found| TOLD.contains(&found.f_type.cast_unsigned()))
        {
            return Watched::LeaseEnd;
        }
        // Events name files by handles.
        if sys::handle_of(root, sys::Purpose::Opening).is_err() {
            return Watched::LeaseEnd;
        }
        // Marked anew each time, which changes nothing where it is marked. The mark goes with the
        // file system when that is unmounted, and no number tells: another one may have the same.
        // Opened without a lock: a file system that hangs must not hold up others.
        // fanotify_mark(2) refuses O_PATH descriptors.
        let link = super::attributes::link_to(root);
        let flags = rustix::fs::OFlags::RDONLY
            | rustix::fs::OFlags::DIRECTORY
            | rustix::fs::OFlags::CLOEXEC;
        let marked =
            rustix::fs::open(link, flags, rustix::fs::Mode::empty()).is_ok_and(|directory| {
                let how = libc::FAN_MARK_ADD | libc::FAN_MARK_FILESYSTEM;
                sys::fanotify_mark(shared.queue.as_fd(), how, EVENTS, directory.as_fd()).is_ok()
            });
        if !marked {
            return Watched::LeaseEnd;
        }
        Watched::Fanotify
    }

    /// Turns all earlier changes into recalls before it returns.
    pub fn catch_up(&self) {
        if let Some(shared) = &self.shared {
            shared.catch_up();
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        if let Some(end) = &self.end {
            let _ = end.write(1);
        }
    }
}

/// Reads events until the watch is dropped.
fn attend(shared: &Weak<Shared>, end: &EventFd) {
    loop {
        // A strong reference keeps the queue open during poll(2); `end` stops the loop.
        let Some(shared) = shared.upgrade() else { return };
        let mut both = [
            PollFd::new(shared.queue.as_fd(), PollFlags::POLLIN),
            PollFd::new(end.as_fd(), PollFlags::POLLIN),
        ];
        if poll(&mut both, PollTimeout::NONE).is_ok() {
            if both[1].any().unwrap_or(true) {
                return;
            }
            shared.read_all();
            thread::sleep(REST);
        }
    }
}

impl Shared {
    /// Processes all queued events. Invariant: it takes no longer than two reads of [`MOST_QUEUED`]
    /// events, however fast others write. If more are queued, all leases are dropped, which covers
    /// all changes.
    fn catch_up(&self) {
        if self.queued() > MOST_QUEUED {
            self.keeper.lose_all();
        } else {
            self.read_all();
        }
    }

    fn queued(&self) -> u64 {
        rustix::io::ioctl_fionread(&self.queue).map_or(0, |bytes| bytes / EVENT_HEAD_BYTES)
    }

    /// Reads the events that are queued at this moment and no more: constant writers could keep a
    /// loop until the queue is empty going for ever.
    fn read_all(&self) {
        let mut buffer = self.buffer.lock().expect("not poisoned");
        let queued = self.queued();
        let is_too_much = queued > MOST_QUEUED;
        let own = std::process::id().cast_signed();
        let mut read = 0;
        while read < queued
            && let Ok(length @ 1..) = nix::unistd::read(&self.queue, &mut buffer)
        {
            let events = sys::events(&buffer[..length]);
            read += events.len() as u64;
            if is_too_much {
                continue;
            }
            if events.iter().any(|event| event.mask & libc::FAN_Q_OVERFLOW != 0) {
                self.keeper.lose_all();
            }
            let of_others = events.iter().filter(|event| event.pid != own);
            self.keeper.changed(of_others.flat_map(changes));
        }
        if is_too_much {
            // The events were not processed, so everything may have changed.
            self.keeper.lose_all();
        }
    }
}

/// Returns the files of an event, with the leases that it ends.
fn changes(event: &Event) -> impl Iterator<Item = (File, Leases)> + '_ {
    let changes = event.files.iter().map(|file| {
        let id = File { system: file.system, generation: file.handle.number() };
        (id, affected(event.mask, file))
    });
    changes.filter(|(_, leases)| !leases.is_empty())
}

/// Returns the leases of one of its files that an event ends.
fn affected(mask: u64, file: &EventFile) -> Leases {
    let is_parent = file.kind == libc::FAN_EVENT_INFO_TYPE_DFID_NAME && file.name != ITSELF;
    let mut leases = Leases::empty();
    if mask & NAMES != 0 {
        // The file's own change time or link count has changed.
        leases |= if is_parent { Leases::ENTRIES | Leases::ATTRIBUTES } else { Leases::ATTRIBUTES };
    }
    if !is_parent && mask & libc::FAN_MODIFY != 0 {
        leases |= Leases::DATA | Leases::ATTRIBUTES;
    }
    if !is_parent && mask & (libc::FAN_ATTRIB | libc::FAN_DELETE_SELF) != 0 {
        leases |= Leases::ATTRIBUTES;
    }
    leases
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    /// Whose files have other handles after their first change, as the kernel knows, unless it is
    /// told to keep a table of the former ones.
    #[test]
    fn an_overlay_is_not_watched() {
        if !nix::unistd::geteuid().is_root() {
            return;
        }
        let covered = || {
            let none = None::<&str>;
            nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNS).unwrap();
            let private = nix::mount::MsFlags::MS_REC | nix::mount::MsFlags::MS_PRIVATE;
            nix::mount::mount(none, "/", none, private, none).unwrap();
            let top = tempfile::tempdir().unwrap();
            let plain = nix::mount::MsFlags::empty();
            nix::mount::mount(none, top.path(), Some("tmpfs"), plain, none).unwrap();
            let [lower, upper, work, merged] =
                ["lower", "upper", "work", "merged"].map(|name| top.path().join(name));
            for directory in [&lower, &upper, &work, &merged] {
                std::fs::create_dir(directory).unwrap();
            }
            let watch = Watch::start(Arc::new(Keeper::default()));
            let cover = |path| watch.cover(std::fs::File::open(path).unwrap().as_fd());
            let by_itself = cover(&upper);
            let named = |key: &str, path: &std::path::Path| format!("{key}={}", path.display());
            let options = [
                named("lowerdir", &lower),
                named("upperdir", &upper),
                named("workdir", &work),
                "index=on,nfs_export=on".to_owned(),
            ]
            .join(",");
            nix::mount::mount(none, &merged, Some("overlay"), plain, Some(&*options)).unwrap();
            let overlaid = cover(&merged);
            nix::mount::umount(&merged).unwrap();
            nix::mount::umount(top.path()).unwrap();
            (by_itself, overlaid)
        };
        let found = thread::spawn(covered).join().unwrap();
        assert_eq!(found, (Watched::Fanotify, Watched::LeaseEnd));
    }

    /// Events that wait are read by somebody else, who never gets to their end.
    #[test]
    fn who_catches_up_does_not_wait_for_more_events_than_are_bounded() {
        let directory = tempfile::tempdir().unwrap();
        let root = std::fs::File::open(directory.path()).unwrap();
        let watch = Watch::start(Arc::new(Keeper::default()));
        if watch.cover(root.as_fd()) != Watched::Fanotify {
            return;
        }
        let shared = watch.shared.clone().unwrap();
        let reading = shared.buffer.lock().unwrap();
        for number in 0..=MOST_QUEUED {
            std::fs::write(directory.path().join(number.to_string()), "").unwrap();
        }
        assert!(shared.queued() > MOST_QUEUED);
        let (done, caught_up) = mpsc::channel();
        let its = shared.clone();
        thread::spawn(move || {
            its.catch_up();
            done.send(())
        });
        caught_up.recv_timeout(Duration::from_secs(10)).expect("it waits for nobody");
        drop(reading);
        // What waits is taken away, too.
        shared.read_all();
        assert!(shared.queued() <= MOST_QUEUED);
    }
}
