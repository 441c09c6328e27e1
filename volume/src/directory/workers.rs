//! Threads for blocking system calls on a directory's files. Each has its own umask, 0, since
//! clients have applied theirs. Its capabilities are those of root on files, and those for changing
//! the user.
//!
//! Each account has a queue, and queues are served round-robin. No account gets more threads than
//! it leaves free: one account's jobs on a hanging disk leave threads for all others. Invariant: an
//! account without a running job does not wait for a thread. If all threads are busy, as when
//! several accounts' disks hang, another one is started, which ends when it is idle. While other
//! accounts are active, an account's jobs occupy at most half of the processors, and pause for as
//! long as they ran: the scheduler doesn't soon preempt a thread with endless jobs. A long-running
//! job counts as waiting for a disk.
//!
//! A lane is a queue of an account besides its own one, whose jobs run one at a time, whatever the
//! account's other jobs do ([`super::descriptor`]).
//!
//! CPU-bound jobs have threads of their own with a low priority: without kernel preemption, a
//! thread in the kernel yields its processor late, but sooner to one of a higher priority
//! (sched(7)).

use std::{
    any::Any,
    cell::Cell,
    collections::{HashMap, VecDeque},
    sync::{Arc, Condvar, Mutex},
    thread,
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    sys::stat::{Mode, umask},
};
use tokio::sync::oneshot;

use super::{
    account::{Account, PoolUsage},
    rivals::Rivals,
    sys,
};

/// Number of threads. One account gets up to 16: so many concurrent requests saturate an SSD or a
/// RAID. A job never waits for another.
const THREADS: usize = 32;

/// Number of threads for CPU-bound jobs. One account gets up to four.
const LOW_PRIORITY_THREADS: usize = 8;
/// Their niceness (setpriority(2)).
const LOW_PRIORITY: i32 = 10;

/// Run time after which a job counts as waiting for a disk: most take some 0.1 ms.
const WAITS_FOR_DISK: Duration = Duration::from_millis(5);

/// Run time of an account's jobs before they pause for others: a shorter sleep isn't worth its
/// cost.
const AT_WORK: Duration = Duration::from_millis(1);

/// Hard limit of threads, including those started for accounts while disks hang.
const MOST_THREADS: usize = 1024;

/// Limit of accounts that are kept without jobs.
const MOST_IDLE: usize = 64;

/// Separates the parts of a lane's name. No identity has it in its name.
const LANE: char = '\0';

type Job = Box<dyn FnOnce() + Send>;

thread_local! {
    static IS_WORKER: Cell<bool> = const { Cell::new(false) };
}

/// Returns true on a thread of a pool.
pub fn is_worker() -> bool {
    IS_WORKER.get()
}

/// Returns the name of an account's lane.
pub fn lane_name(account: &str, purpose: &str) -> String {
    format!("{account}{LANE}{purpose}")
}

/// Returns the account of a queue.
fn owner(name: &str) -> &str {
    name.split(LANE).next().unwrap_or_default()
}

/// Charge of a call.
pub type Held = Arc<dyn Any + Send + Sync>;

tokio::task_local! {
    /// Charge of the current call, held by all its jobs. A cancelled call returns its charge only
    /// when its jobs, with their memory, are gone.
    pub static HELD: Held;
}

/// Returns the current call's charge, for work that continues in another task.
pub fn held() -> Option<Held> {
    HELD.try_with(Clone::clone).ok()
}

/// A pool of threads, which end when it is dropped.
#[derive(Debug)]
pub struct Workers(Arc<Queue>);

struct Queue {
    /// Number of permanent threads; with 0, jobs run on their caller's thread.
    threads: usize,
    name: &'static str,
    set_up: fn(),
    /// Limit of one account's running jobs while others are active; those that wait for a disk
    /// don't count.
    beside_others: usize,
    state: Mutex<WorkersState>,
    changed: Condvar,
}

#[derive(Default)]
struct WorkersState {
    /// By account or lane. Bounded by the number of callers, each of which waits for its job, and
    /// of descriptors to close.
    by_account: HashMap<String, Jobs>,
    /// Accounts with waiting jobs, and lanes of which none runs, in round-robin order.
    turns: VecDeque<String>,
    busy: usize,
    /// Present number of threads.
    threads: usize,
    rivals: Arc<Rivals>,
    /// True if a thread polls for waiting jobs that may begin.
    is_looked_after: bool,
    is_over: bool,
}

#[derive(Default)]
struct Jobs {
    waiting: VecDeque<Job>,
    /// One job at a time.
    is_lane: bool,
    /// Start times of the running jobs, in order.
    begun: VecDeque<Instant>,
    /// Run time since `since`, the start of the first job after the last pause.
    taken: Duration,
    since: Option<Instant>,
    rest_until: Option<Instant>,
}

impl Jobs {
    /// Counts the running jobs that don't wait for a disk.
    fn count_quick(&self, now: Instant) -> usize {
        self.begun
            .iter()
            .filter(|begun| now.saturating_duration_since(**begun) < WAITS_FOR_DISK)
            .count()
    }

    /// Notes the end of a job that began at `begun`. With active rivals (`beside`), the account has
    /// to pause.
    fn ended(&mut self, begun: Instant, now: Instant, beside: bool) {
        if let Some(at) = self.begun.iter().position(|other| *other == begun) {
            self.begun.remove(at);
        }
        let took = now.saturating_duration_since(begun);
        let since = *self.since.get_or_insert(begun);
        self.taken += if took < WAITS_FOR_DISK { took } else { Duration::ZERO };
        if self.taken >= AT_WORK {
            // An account that uses less than half of a processor needs no pause.
            let is_to_rest = beside && now.saturating_duration_since(since) < 2 * self.taken;
            self.rest_until = is_to_rest.then_some(now + self.taken.min(WAITS_FOR_DISK));
            (self.since, self.taken) = (None, Duration::ZERO);
        }
    }

    /// Returns false for a lane with a running job.
    fn may_begin(&self) -> bool {
        !self.is_lane || self.begun.is_empty()
    }

    fn rests(&self, now: Instant) -> bool {
        self.rest_until.is_some_and(|until| now < until)
    }
}

/// A job to run.
struct Next {
    account: String,
    begun: Instant,
    job: Job,
}

impl std::fmt::Debug for Queue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Queue")
    }
}

impl Workers {
    /// Starts the threads for blocking system calls.
    ///
    /// # Errors
    /// The system can't start more threads.
    pub fn start(rivals: Arc<Rivals>) -> std::io::Result<Self> {
        Self::start_threads("files", THREADS, rivals, || ())
    }

    /// Starts the low-priority threads for CPU-bound jobs.
    ///
    /// # Errors
    /// The system can't start more threads.
    pub fn start_low_priority(rivals: Arc<Rivals>) -> std::io::Result<Self> {
        // On Linux this sets the calling thread's niceness only. Raising it is always allowed.
        Self::start_threads("steps", LOW_PRIORITY_THREADS, rivals, || {
            let _ = rustix::process::setpriority_process(None, LOW_PRIORITY);
        })
    }

    /// Creates a pool without threads: each job runs at once on its caller's thread, with that
    /// thread's umask and capabilities. So a simulation determines the order.
    pub fn none() -> Self {
        let state = Mutex::default();
        let (name, set_up): (_, fn()) = ("none", || ());
        Self(Arc::new(Queue {
            threads: 0,
            name,
            set_up,
            beside_others: 0,
            state,
            changed: Condvar::new(),
        }))
    }

    fn start_threads(
        name: &'static str,
        count: usize,
        rivals: Arc<Rivals>,
        set_up: fn(),
    ) -> std::io::Result<Self> {
        let state = WorkersState { threads: count, rivals, ..WorkersState::default() };
        let workers = Self(Arc::new(Queue {
            threads: count,
            name,
            set_up,
            beside_others: (thread::available_parallelism().map_or(1, usize::from) / 2).max(1),
            state: Mutex::new(state),
            changed: Condvar::new(),
        }));
        for number in 0..count {
            Queue::start_thread(&workers.0, number)?;
        }
        Ok(workers)
    }

    /// Runs a job on one of the threads, also if the future is dropped.
    ///
    /// # Errors
    /// The job's; `EIO` if it panicked.
    pub async fn run<T, F>(&self, account: &Account, job: F) -> Result<T, Errno>
    where
        T: Send + 'static,
        F: FnOnce() -> Result<T, Errno> + Send + 'static,
    {
        if self.0.threads == 0 {
            return job();
        }
        let (sender, receiver) = oneshot::channel();
        let held = held();
        let job = Box::new(move || {
            let _ = sender.send(job());
            drop(held);
        });
        self.push(account.name(), job);
        receiver.await.unwrap_or(Err(Errno::EIO))
    }

    /// Runs a job in a lane ([`lane_name`]), without waiting for it.
    pub fn run_in_lane(&self, lane: &str, job: Job) {
        if self.0.threads == 0 {
            return job();
        }
        self.push(lane, job);
    }

    fn push(&self, queue: &str, job: Job) {
        let number = {
            let mut state = self.0.state.lock().expect("not poisoned");
            state.push(queue, job);
            state.lacks_thread().then(|| {
                state.threads += 1;
                state.threads
            })
        };
        self.0.changed.notify_one();
        if let Some(number) = number
            && let Err(error) = Queue::start_thread(&self.0, number)
        {
            // An existing thread runs the job as soon as it is free.
            tracing::warn!(%error, "cannot start a thread for files");
            self.0.state.lock().expect("not poisoned").threads -= 1;
        }
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.0.state.lock().expect("not poisoned").is_over = true;
        self.0.changed.notify_all();
    }
}

impl WorkersState {
    fn push(&mut self, account: &str, job: Job) {
        if self.by_account.len() >= MOST_IDLE && !self.by_account.contains_key(account) {
            self.by_account.retain(|_, jobs| !jobs.begun.is_empty() || !jobs.waiting.is_empty());
        }
        let is_lane = account.contains(LANE);
        let new = || Jobs { is_lane, ..Jobs::default() };
        let jobs = self.by_account.entry(account.to_owned()).or_insert_with(new);
        if jobs.waiting.is_empty() && jobs.may_begin() {
            self.turns.push_back(account.to_owned());
        }
        jobs.waiting.push_back(job);
    }

    /// Returns true if more accounts without a running job are waiting than threads are idle.
    fn lacks_thread(&self) -> bool {
        let has_none = |account: &&String| {
            self.by_account.get(*account).is_some_and(|jobs| jobs.begun.is_empty())
        };
        let idle = self.threads.saturating_sub(self.busy);
        self.threads < MOST_THREADS && self.turns.iter().filter(has_none).nth(idle).is_some()
    }

    /// Takes the next job of the first account whose share is not used up.
    fn take(&mut self, threads: usize, beside_others: usize, now: Instant) -> Option<Next> {
        let may_have = |account: &String| {
            let Some(jobs) = self.by_account.get(account) else { return true };
            let usage = PoolUsage { own: jobs.begun.len(), used: self.busy, limit: threads };
            // An account's first job may always begin: extra threads were started for such jobs.
            (jobs.begun.is_empty() || usage.may_take(1))
                && (!self.rivals.has_rival(owner(account), now)
                    || jobs.count_quick(now) < beside_others && !jobs.rests(now))
        };
        let at = self.turns.iter().position(may_have)?;
        let account = self.turns.remove(at)?;
        let jobs = self.by_account.get_mut(&account)?;
        let job = jobs.waiting.pop_front()?;
        jobs.begun.push_back(now);
        self.busy += 1;
        if !jobs.waiting.is_empty() && jobs.may_begin() {
            self.turns.push_back(account.clone());
        }
        Some(Next { account, begun: now, job })
    }

    fn done(&mut self, account: &str, begun: Instant, now: Instant) {
        self.busy -= 1;
        let took = now.saturating_duration_since(begun);
        if took < WAITS_FOR_DISK {
            self.rivals.note(owner(account), took, now);
        }
        let beside = self.rivals.has_rival(owner(account), now);
        if let Some(jobs) = self.by_account.get_mut(account) {
            jobs.ended(begun, now, beside);
            if jobs.is_lane && !jobs.waiting.is_empty() {
                self.turns.push_back(account.to_owned());
            }
        }
    }
}

impl Queue {
    fn start_thread(queue: &Arc<Self>, number: usize) -> std::io::Result<()> {
        let (name, queue) = (format!("{}-{number}", queue.name), queue.clone());
        let work = move || {
            (queue.set_up)();
            queue.work();
        };
        thread::Builder::new().name(name).spawn(work).map(drop)
    }

    fn work(&self) {
        IS_WORKER.set(true);
        // If a sandbox forbids it, the process's umask applies to modes.
        if sys::unshare_umask().is_ok() {
            umask(Mode::empty());
        }
        // A process without capabilities has none to drop.
        let _ = sys::give_up_capabilities();
        let mut before = None;
        while let Some(Next { account, begun, job }) = self.next(before.take()) {
            // A panic must not end the thread; the caller gets EIO since nothing was sent.
            let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(job));
            before = Some((account, begun));
        }
    }

    /// Waits for the next job, after noting the end of `before`.
    fn next(&self, before: Option<(String, Instant)>) -> Option<Next> {
        let mut state = self.state.lock().expect("not poisoned");
        if let Some((account, begun)) = before {
            state.done(&account, begun, Instant::now());
            // Its account, or another, may start a job now.
            self.changed.notify_one();
        }
        loop {
            if let Some(next) = state.take(self.threads, self.beside_others, Instant::now()) {
                // Whoever polled for the others may be this thread, or have woken it up to do so.
                if !state.turns.is_empty() && !state.is_looked_after {
                    self.changed.notify_one();
                }
                return Some(next);
            }
            if state.is_over && state.turns.is_empty() {
                return None;
            }
            if state.threads > self.threads && !state.lacks_thread() {
                state.threads -= 1;
                // The notification that this thread took may have been for another one.
                self.changed.notify_one();
                return None;
            }
            state = if !state.turns.is_empty() && !state.is_looked_after {
                // These changes have no notification: a job counts as waiting for a disk, a pause
                // ends, or rivals become idle. So poll.
                state.is_looked_after = true;
                let mut state = self.changed.wait_timeout(state, AT_WORK).expect("not poisoned").0;
                state.is_looked_after = false;
                state
            } else {
                self.changed.wait(state).expect("not poisoned")
            };
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
        let workers = Workers::start(Arc::default()).unwrap();
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
    async fn an_account_without_a_job_at_work_finds_a_thread_though_all_hang() {
        let workers = Arc::new(Workers::start(Arc::default()).unwrap());
        let (release, gate) = std::sync::mpsc::channel::<()>();
        let (gate, (begins, mut begun)) =
            (Arc::new(Mutex::new(gate)), tokio::sync::mpsc::unbounded_channel());
        let mut jobs = tokio::task::JoinSet::new();
        for number in 0..12 {
            let account = Account::named(&number.to_string());
            for _ in 0..THREADS {
                let (workers, account, gate, begins) =
                    (workers.clone(), account.clone(), gate.clone(), begins.clone());
                jobs.spawn(async move {
                    let job = move || {
                        let _ = begins.send(number);
                        let _ = gate.lock().expect("not poisoned").recv();
                        Ok(())
                    };
                    workers.run(&account, job).await
                });
            }
            let has_begun = async { while begun.recv().await != Some(number) {} };
            tokio::time::timeout(Duration::from_secs(10), has_begun)
                .await
                .expect("it finds a thread");
        }
        assert!(workers.0.state.lock().unwrap().threads > THREADS);
        drop(release);
        while jobs.join_next().await.is_some() {}
        let are_ended = async {
            while workers.0.state.lock().unwrap().threads > THREADS {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(10), are_ended)
            .await
            .expect("what was started ends");
    }

    #[test]
    fn beside_others_an_account_keeps_few_processors_busy() {
        let began = Instant::now();
        let after = |milliseconds| began + Duration::from_millis(milliseconds);
        let mut state = WorkersState::default();
        for _ in 0..THREADS {
            state.push("ada", Box::new(|| ()));
        }
        let taken = |state: &mut WorkersState, milliseconds| {
            std::iter::from_fn(|| state.take(THREADS, 2, after(milliseconds)))
                .map(|next| next.account)
                .collect::<Vec<_>>()
        };
        state.rivals.note("bob", Duration::from_millis(4), after(0));
        assert_eq!(taken(&mut state, 1), ["ada"; 2]);
        state.push("bob", Box::new(|| ()));
        assert_eq!(taken(&mut state, 2), ["bob"]);
        // Those two wait for a disk.
        assert_eq!(taken(&mut state, 7), ["ada"; 2]);
        state.done("ada", after(7), after(8));
        // It took long enough for a rest.
        assert!(taken(&mut state, 8).is_empty());
        assert_eq!(taken(&mut state, 9), ["ada"]);
        // Nobody else has been at work for a while.
        assert_eq!(taken(&mut state, 200).len(), THREADS / 2 - 4);
    }

    #[test]
    fn who_takes_less_than_half_of_a_processor_does_not_rest() {
        let began = Instant::now();
        let after = |microseconds| began + Duration::from_micros(microseconds);
        let mut jobs = Jobs::default();
        for number in 0..100 {
            jobs.begun.push_back(after(number * 1000));
            jobs.ended(after(number * 1000), after(number * 1000 + 300), true);
            assert!(!jobs.rests(after(number * 1000 + 301)));
        }
        jobs = Jobs::default();
        for number in 0..3 {
            assert!(!jobs.rests(after(number * 500)));
            jobs.begun.push_back(after(number * 500));
            jobs.ended(after(number * 500), after(number * 500 + 400), true);
        }
        assert!(jobs.rests(after(1401)) && jobs.rests(after(2500)) && !jobs.rests(after(2601)));
    }

    #[tokio::test]
    async fn what_waits_beside_others_is_done_when_jobs_turn_out_to_wait_for_a_disk() {
        let workers = Arc::new(Workers::start(Arc::default()).unwrap());
        workers.0.state.lock().unwrap().rivals.note("bob", Duration::from_secs(1), Instant::now());
        // More than may keep a processor busy, each of which waits for its gate.
        let count = workers.0.beside_others + 4;
        let (keys, gates): (Vec<_>, Vec<_>) = (0..count).map(|_| mpsc::channel::<()>()).unzip();
        let wait = |gate: mpsc::Receiver<()>| {
            let workers = workers.clone();
            let job = move || gate.recv().map_err(|_| Errno::EIO);
            tokio::spawn(async move { workers.run(&Account::named("ada"), job).await })
        };
        let all: Vec<_> = gates.into_iter().map(wait).collect();
        for (key, job) in keys.into_iter().zip(all).rev() {
            key.send(()).unwrap();
            tokio::time::timeout(Duration::from_secs(5), job).await.unwrap().unwrap().unwrap();
        }
    }

    #[tokio::test]
    async fn one_account_leaves_threads_for_others() {
        let workers = Arc::new(Workers::start(Arc::default()).unwrap());
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
