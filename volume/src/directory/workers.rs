//! The threads on which a directory's files are touched: system calls that may take long have no place on
//! those of the runtime. Each has a umask of its own, none, since the callers have applied theirs.

use std::{
    collections::VecDeque,
    sync::{Arc, Condvar, Mutex},
    thread,
};

use nix::{
    errno::Errno,
    sys::stat::{Mode, umask},
};
use tokio::sync::oneshot;

use super::sys;

/// As many disks' requests at a time keep an SSD or a RAID busy; a job never waits for another.
const THREADS: usize = 16;

type Job = Box<dyn FnOnce() + Send>;

/// The threads; they end when the last of these is dropped.
#[derive(Debug)]
pub struct Workers(Arc<Queue>);

#[derive(Default)]
struct Queue {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Bounded by what asks: each caller waits for its job.
    jobs: VecDeque<Job>,
    is_over: bool,
}

impl std::fmt::Debug for Queue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Queue")
    }
}

impl Workers {
    /// Starts them.
    ///
    /// # Errors
    /// When the system has no more threads.
    pub fn start() -> std::io::Result<Self> {
        let workers = Self(Arc::default());
        for number in 0..THREADS {
            let queue = workers.0.clone();
            thread::Builder::new().name(format!("files-{number}")).spawn(move || queue.work())?;
        }
        Ok(workers)
    }

    /// Does it on one of the threads. It is done also if nobody waits for it any more.
    ///
    /// # Errors
    /// What the job gives; `EIO` if it panicked.
    pub async fn run<T, F>(&self, job: F) -> Result<T, Errno>
    where
        T: Send + 'static,
        F: FnOnce() -> Result<T, Errno> + Send + 'static,
    {
        let (sender, receiver) = oneshot::channel();
        self.0.state.lock().expect("not poisoned").jobs.push_back(Box::new(move || {
            let _ = sender.send(job());
        }));
        self.0.changed.notify_one();
        receiver.await.unwrap_or(Err(Errno::EIO))
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.0.state.lock().expect("not poisoned").is_over = true;
        self.0.changed.notify_all();
    }
}

impl Queue {
    fn work(&self) {
        // Where it can't be had (some sandbox), modes are what the process's umask leaves of them.
        if sys::unshare_umask().is_ok() {
            umask(Mode::empty());
        }
        while let Some(job) = self.next() {
            // A panic must not end the thread; the caller gets EIO since nothing was sent.
            let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(job));
        }
    }

    fn next(&self) -> Option<Job> {
        let mut state = self.state.lock().expect("not poisoned");
        loop {
            if let Some(job) = state.jobs.pop_front() {
                return Some(job);
            }
            if state.is_over {
                return None;
            }
            state = self.changed.wait(state).expect("not poisoned");
        }
    }
}
