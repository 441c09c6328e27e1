//! FUSE: the kernel's requests in the words of [`Volume`], and its answers in the kernel's. This file and the ones below
//! `fuse/` alone know the crate fuser. Here is what runs them and what tells the kernel to forget; `requests` has the
//! requests one by one.

mod convert;
mod requests;

use std::{
    future::Future,
    io,
    os::fd::OwnedFd,
    pin::Pin,
    sync::Arc,
    task::{Context, Waker},
};

use fuser::{INodeNo, Notifier, Request, Session, SessionACL};
use tokio::{runtime::Handle, sync::mpsc};

use crate::fs::{Invalidate, Volume};

/// Threads that read requests. They wait for nothing.
const THREADS: usize = 2;

/// FUSE_NOTIFY_INC_EPOCH of linux/fuse.h (Linux 6.16): all names are to be looked up again.
const NOTIFY_INC_EPOCH: u32 = 8;

/// Who may use a mount.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Users {
    /// Whoever mounted it.
    Own,
    /// Everybody, each with their own rights.
    All,
}

/// Answers on a device until it is unmounted; the thread returned ends then.
///
/// # Errors
/// Of the first exchange with the kernel.
pub fn serve(
    volume: Arc<Volume>,
    invalidations: mpsc::UnboundedReceiver<Invalidate>,
    device: OwnedFd,
    users: Users,
) -> io::Result<std::thread::JoinHandle<io::Result<()>>> {
    let acl = if users == Users::All { SessionACL::All } else { SessionACL::Owner };
    let mut config = fuser::Config::default();
    config.acl = acl;
    config.n_threads = Some(THREADS);
    let raw = device.try_clone()?;
    let adapter = Adapter { volume, runtime: Handle::current(), users };
    let session = Session::from_fd(adapter, device, acl, config)?;
    let kernel = Kernel { notifier: session.notifier(), raw };
    std::thread::Builder::new().name("volume-forget".to_owned()).spawn(move || kernel.carry_out(invalidations))?;
    std::thread::Builder::new().name("volume".to_owned()).spawn(move || session.run())
}

/// Makes the kernel forget.
struct Kernel {
    notifier: Notifier,
    raw: OwnedFd,
}

impl Kernel {
    /// In a thread of its own: the kernel waits for readers of what it drops.
    fn carry_out(self, mut invalidations: mpsc::UnboundedReceiver<Invalidate>) {
        while let Some(invalidate) = invalidations.blocking_recv() {
            if let Some(names) = &invalidate.names
                && !self.all_names_are_doubtful()
            {
                // A kernel that does not know epochs.
                for name in names {
                    let _ = self.notifier.inval_entry(INodeNo(invalidate.number), name);
                }
            }
            // A negative offset: attributes alone.
            let offset = if invalidate.pages { 0 } else { -1 };
            let _ = self.notifier.inval_inode(INodeNo(invalidate.number), offset, 0);
        }
    }

    /// Since it takes no locks, it does not wait for a request in the same directory that waits for somebody else.
    fn all_names_are_doubtful(&self) -> bool {
        let mut message = [0; 16];
        message[..4].copy_from_slice(&16_u32.to_ne_bytes());
        message[4..8].copy_from_slice(&NOTIFY_INC_EPOCH.to_ne_bytes());
        nix::unistd::write(&self.raw, &message).is_ok()
    }
}

struct Adapter {
    volume: Arc<Volume>,
    runtime: Handle,
    users: Users,
}

impl Adapter {
    /// Most requests are answered from memory: those need no other thread.
    fn answer(&self, work: impl Future<Output = ()> + Send + 'static) {
        let mut work: Pin<Box<dyn Future<Output = ()> + Send>> = Box::pin(work);
        let _entered = self.runtime.enter();
        let mut context = Context::from_waker(Waker::noop());
        if work.as_mut().poll(&mut context).is_pending() {
            self.runtime.spawn(work);
        }
    }

    fn caller(&self, request: &Request) -> crate::store::Caller {
        convert::caller(request, self.users)
    }
}
