//! The threads on which a directory's files are touched: system calls that may take long have no place on
//! those of the runtime. Each has a umask of its own, none, since the callers have applied theirs, and no
//! capability but those that root's commands have on files and those that change the user.
//!
//! Each account has a queue of its own, and they are served in turn. No account has more threads than it
//! leaves free: the jobs of one on a disk that hangs leave threads for everybody else.
//!
//! Jobs that keep a processor busy have threads of their own, of a low priority: a thread at work
//! in the kernel gives its processor up late where the kernel is not preemptible, and sooner to one
//! of a higher priority (sched(7)).

use std::{
    any::Any,
    collections::{HashMap, VecDeque},
    sync::{Arc, Condvar, Mutex},
    thread,
};

use nix::{
    errno::Errno,
    sys::stat::{Mode, umask},
};
use tokio::sync::oneshot;

use super::{
    account::{Account, is_share},
    sys,
};

/// One account so has 16: as many disks' requests at a time keep an SSD or a RAID busy. A job never
/// waits for another.
const THREADS: usize = 32;

/// For jobs that keep a processor busy. One account so has four.
const LOW_PRIORITY_THREADS: usize = 8;
/// Their niceness (setpriority(2)).
const LOW_PRIORITY: i32 = 10;

type Job = Box<dyn FnOnce() + Send>;

/// What a call is charged with.
pub type Held = Arc<dyn Any + Send + Sync>;

tokio::task_local! {
    /// Of the present call: kept by all that is done for it, until it is done. Whoever gives a call up gets
    /// its charge back only when the call's jobs, with what they have in memory, are gone.
    pub static HELD: Held;
}

/// For what is done for the present call elsewhere than in its own task.
pub fn held() -> Option<Held> {
    HELD.try_with(Clone::clone).ok()
}

/// The threads; they end when the last of these is dropped.
#[derive(Debug)]
pub struct Workers(Arc<Queue>);

struct Queue {
    threads: usize,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Bounded by what asks: each caller waits for its job. Without jobs and threads there is no queue.
    by_account: HashMap<String, Jobs>,
    /// Accounts with jobs, the next one first.
    turns: VecDeque<String>,
    busy: usize,
    is_over: bool,
}

#[derive(Default)]
struct Jobs {
    waiting: VecDeque<Job>,
    busy: usize,
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
        Self::start_threads("files", THREADS, || ())
    }

    /// Starts the threads for jobs that keep a processor busy.
    ///
    /// # Errors
    /// When the system has no more threads.
    pub fn start_low_priority() -> std::io::Result<Self> {
        // Of the calling thread alone, on Linux. Nobody is kept from a higher niceness.
        Self::start_threads("steps", LOW_PRIORITY_THREADS, || {
            let _ = rustix::process::setpriority_process(None, LOW_PRIORITY);
        })
    }

    fn start_threads(name: &str, count: usize, set_up: fn()) -> std::io::Result<Self> {
        let workers = Self(Arc::new(Queue { threads: count, state: Mutex::default(), changed: Condvar::new() }));
        for number in 0..count {
            let queue = workers.0.clone();
            thread::Builder::new().name(format!("{name}-{number}")).spawn(move || {
                set_up();
                queue.work();
            })?;
        }
        Ok(workers)
    }

    /// Does it on one of the threads. It is done also if nobody waits for it any more.
    ///
    /// # Errors
    /// What the job gives; `EIO` if it panicked.
    pub async fn run<T, F>(&self, account: &Account, job: F) -> Result<T, Errno>
    where
        T: Send + 'static,
        F: FnOnce() -> Result<T, Errno> + Send + 'static,
    {
        let (sender, receiver) = oneshot::channel();
        let held = held();
        let job = Box::new(move || {
            let _ = sender.send(job());
            drop(held);
        });
        self.0.state.lock().expect("not poisoned").push(account.name(), job);
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

impl State {
    fn push(&mut self, account: &str, job: Job) {
        let jobs = self.by_account.entry(account.to_owned()).or_default();
        if jobs.waiting.is_empty() {
            self.turns.push_back(account.to_owned());
        }
        jobs.waiting.push_back(job);
    }

    /// The next job of the first account whose share is not used up.
    fn take(&mut self, threads: usize) -> Option<(String, Job)> {
        let may_have = |account: &String| {
            let own = self.by_account.get(account).map_or(0, |jobs| jobs.busy);
            is_share((own, 1), (self.busy, threads))
        };
        let at = self.turns.iter().position(may_have)?;
        let account = self.turns.remove(at)?;
        let jobs = self.by_account.get_mut(&account)?;
        let job = jobs.waiting.pop_front()?;
        jobs.busy += 1;
        self.busy += 1;
        if !jobs.waiting.is_empty() {
            self.turns.push_back(account.clone());
        }
        Some((account, job))
    }

    fn done(&mut self, account: &str) {
        self.busy -= 1;
        if let Some(jobs) = self.by_account.get_mut(account) {
            jobs.busy -= 1;
            if jobs.busy == 0 && jobs.waiting.is_empty() {
                self.by_account.remove(account);
            }
        }
    }
}

impl Queue {
    fn work(&self) {
        // Where it can't be had (some sandbox), modes are what the process's umask leaves of them.
        if sys::unshare_umask().is_ok() {
            umask(Mode::empty());
        }
        // Without any there are none to give up.
        let _ = sys::give_up_capabilities();
        let mut before = None;
        while let Some((account, job)) = self.next(before.take()) {
            // A panic must not end the thread; the caller gets EIO since nothing was sent.
            let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(job));
            before = Some(account);
        }
    }

    /// The next job, once that of `before` is done.
    fn next(&self, before: Option<String>) -> Option<(String, Job)> {
        let mut state = self.state.lock().expect("not poisoned");
        if let Some(account) = before {
            state.done(&account);
            // Its share, or that of others, may have a place again.
            self.changed.notify_one();
        }
        loop {
            if let Some(next) = state.take(self.threads) {
                return Some(next);
            }
            if state.is_over && state.turns.is_empty() {
                return None;
            }
            state = self.changed.wait(state).expect("not poisoned");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        sync::mpsc,
        time::{Duration, Instant},
    };

    use super::*;

    #[tokio::test]
    async fn a_call_that_is_given_up_is_charged_until_its_job_is_done() {
        let workers = Workers::start().unwrap();
        let (release, gate) = mpsc::channel::<()>();
        let charge: Held = Arc::new(());
        let ada = Account::named("ada");
        let job = move || gate.recv().map_err(|_| Errno::EIO);
        let call = HELD.scope(charge.clone(), workers.run(&ada, job));
        assert!(tokio::time::timeout(Duration::from_millis(10), call).await.is_err());
        assert_eq!(Arc::strong_count(&charge), 2);
        release.send(()).unwrap();
        let given_back = async {
            while Arc::strong_count(&charge) > 1 {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(Duration::from_secs(5), given_back).await.unwrap();
    }

    #[tokio::test]
    async fn one_account_leaves_threads_for_others() {
        let workers = Arc::new(Workers::start().unwrap());
        let (release, gate) = mpsc::channel::<()>();
        let gate = Arc::new(Mutex::new(gate));
        let ada = Account::named("ada");
        let mut stuck = Vec::new();
        for _ in 0..200 {
            let (workers, ada, gate) = (workers.clone(), ada.clone(), gate.clone());
            stuck.push(tokio::spawn(async move {
                let job = move || {
                    let _ = gate.lock().unwrap().recv();
                    Ok(())
                };
                workers.run(&ada, job).await
            }));
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
        assert_eq!(workers.0.state.lock().unwrap().busy, THREADS / 2);
        let asked = Instant::now();
        for _ in 0..100 {
            workers.run(&Account::named("bob"), || Ok(())).await.unwrap();
        }
        assert!(asked.elapsed() < Duration::from_secs(2), "{:?}", asked.elapsed());
        drop(release);
        for each in stuck {
            each.await.unwrap().unwrap();
        }
        assert!(workers.0.state.lock().unwrap().turns.is_empty());
    }
}
