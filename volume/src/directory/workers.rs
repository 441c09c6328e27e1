//! The threads on which a directory's files are touched: system calls that may take long have no
//! place on those of the runtime. Each has a umask of its own, none, since the callers have applied
//! theirs, and no capability but those that root's commands have on files and those that change the
//! user.
//!
//! Each account has a queue of its own, and they are served in turn. No account has more threads
//! than it leaves free: the jobs of one on a disk that hangs leave threads for everybody else.
//! Invariant: an account none of whose jobs is at work does not wait for a thread. Where those that
//! there are do not suffice for that, since several accounts have all of them at disks that hang,
//! one more is started, which ends when it is idle. While others are at work, an account's jobs
//! keep half of the processors busy at most, and rest for as long as they were at work: a thread
//! with jobs without end is not soon made to give its processor up. A job that has taken long is
//! taken to wait for a disk.
//!
//! Jobs that keep a processor busy have threads of their own, of a low priority: a thread at work
//! in the kernel gives its processor up late where the kernel is not preemptible, and sooner to one
//! of a higher priority (sched(7)).

use std::{
    any::Any,
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
    account::{Account, is_share},
    rivals::Rivals,
    sys,
};

/// One account so has 16: as many disks' requests at a time keep an SSD or a RAID busy. A job never
/// waits for another.
const THREADS: usize = 32;

/// For jobs that keep a processor busy. One account so has four.
const LOW_PRIORITY_THREADS: usize = 8;
/// Their niceness (setpriority(2)).
const LOW_PRIORITY: i32 = 10;

/// A job that has not ended in this time waits for a disk: most take some 0.1 ms.
const WAITS_FOR_DISK: Duration = Duration::from_millis(5);

/// Jobs of one account take so long before they rest beside others: there is no shorter sleep that
/// is worth its cost.
const AT_WORK: Duration = Duration::from_millis(1);

/// Of both kinds, whatever happens: as many identities' disks may hang.
const MOST_THREADS: usize = 1024;

/// Accounts that are remembered though they have no jobs.
const MOST_IDLE: usize = 64;

type Job = Box<dyn FnOnce() + Send>;

/// What a call is charged with.
pub type Held = Arc<dyn Any + Send + Sync>;

tokio::task_local! {
    /// Of the present call: kept by all that is done for it, until it is done. Whoever gives a call
    /// up gets its charge back only when the call's jobs, with what they have in memory, are gone.
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
    /// They are shared by accounts; without any, jobs are done by whoever asks.
    threads: usize,
    name: &'static str,
    set_up: fn(),
    /// Jobs of one account that keep processors busy while others are at work.
    beside_others: usize,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Bounded by what asks: each caller waits for its job.
    by_account: HashMap<String, Jobs>,
    /// Accounts with jobs, the next one first.
    turns: VecDeque<String>,
    busy: usize,
    /// Those that there are by now.
    threads: usize,
    rivals: Arc<Rivals>,
    /// A thread looks again in a while whether a job that has to wait may begin.
    is_looked_after: bool,
    is_over: bool,
}

#[derive(Default)]
struct Jobs {
    waiting: VecDeque<Job>,
    /// When those at work began, in order.
    begun: VecDeque<Instant>,
    /// What has been taken since then, when the first one began after the last rest.
    taken: Duration,
    since: Option<Instant>,
    rest_until: Option<Instant>,
}

impl Jobs {
    /// Those that do not wait for a disk.
    fn count_quick(&self, now: Instant) -> usize {
        self.begun
            .iter()
            .filter(|begun| now.saturating_duration_since(**begun) < WAITS_FOR_DISK)
            .count()
    }

    /// One that began then has ended; they are to rest if others are `beside`.
    fn ended(&mut self, begun: Instant, now: Instant, beside: bool) {
        if let Some(at) = self.begun.iter().position(|other| *other == begun) {
            self.begun.remove(at);
        }
        let took = now.saturating_duration_since(begun);
        let since = *self.since.get_or_insert(begun);
        self.taken += if took < WAITS_FOR_DISK { took } else { Duration::ZERO };
        if self.taken >= AT_WORK {
            // Who asks for less than half of a processor has rested of its own accord.
            let is_to_rest = beside && now.saturating_duration_since(since) < 2 * self.taken;
            self.rest_until = is_to_rest.then_some(now + self.taken.min(WAITS_FOR_DISK));
            (self.since, self.taken) = (None, Duration::ZERO);
        }
    }

    fn rests(&self, now: Instant) -> bool {
        self.rest_until.is_some_and(|until| now < until)
    }
}

/// A job to be done.
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
    /// Starts them.
    ///
    /// # Errors
    /// When the system has no more threads.
    pub fn start(rivals: Arc<Rivals>) -> std::io::Result<Self> {
        Self::start_threads(("files", THREADS), rivals, || ())
    }

    /// Starts the threads for jobs that keep a processor busy.
    ///
    /// # Errors
    /// When the system has no more threads.
    pub fn start_low_priority(rivals: Arc<Rivals>) -> std::io::Result<Self> {
        // Of the calling thread alone, on Linux. Nobody is kept from a higher niceness.
        Self::start_threads(("steps", LOW_PRIORITY_THREADS), rivals, || {
            let _ = rustix::process::setpriority_process(None, LOW_PRIORITY);
        })
    }

    /// None: each job is done at once by whoever asks for it, so that a simulation has an order of
    /// its own making. Umask and capabilities are then those of the caller's thread.
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
        (name, count): (&'static str, usize),
        rivals: Arc<Rivals>,
        set_up: fn(),
    ) -> std::io::Result<Self> {
        let state = State { threads: count, rivals, ..State::default() };
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

    /// Does it on one of the threads. It is done also if nobody waits for it any more.
    ///
    /// # Errors
    /// What the job gives; `EIO` if it panicked.
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
        let number = {
            let mut state = self.0.state.lock().expect("not poisoned");
            state.push(account.name(), job);
            state.lacks_thread().then(|| {
                state.threads += 1;
                state.threads
            })
        };
        self.0.changed.notify_one();
        if let Some(number) = number
            && let Err(error) = Queue::start_thread(&self.0, number)
        {
            // The job is done as soon as one of those that there are is free.
            tracing::warn!(%error, "cannot start a thread for files");
            self.0.state.lock().expect("not poisoned").threads -= 1;
        }
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
        if self.by_account.len() >= MOST_IDLE && !self.by_account.contains_key(account) {
            self.by_account.retain(|_, jobs| !jobs.begun.is_empty() || !jobs.waiting.is_empty());
        }
        let jobs = self.by_account.entry(account.to_owned()).or_default();
        if jobs.waiting.is_empty() {
            self.turns.push_back(account.to_owned());
        }
        jobs.waiting.push_back(job);
    }

    /// Accounts that have no job at work wait for threads, and more of them than are idle.
    fn lacks_thread(&self) -> bool {
        let has_none = |account: &&String| {
            self.by_account.get(*account).is_some_and(|jobs| jobs.begun.is_empty())
        };
        let idle = self.threads.saturating_sub(self.busy);
        self.threads < MOST_THREADS && self.turns.iter().filter(has_none).nth(idle).is_some()
    }

    /// The next job of the first account whose share is not used up.
    fn take(&mut self, (threads, beside_others): (usize, usize), now: Instant) -> Option<Next> {
        let may_have = |account: &String| {
            let Some(jobs) = self.by_account.get(account) else { return true };
            // A thread that takes the first job of an account was started for such jobs, if it was
            // not there before.
            (jobs.begun.is_empty() || is_share((jobs.begun.len(), 1), (self.busy, threads)))
                && (!self.rivals.has_rival(account, now)
                    || jobs.count_quick(now) < beside_others && !jobs.rests(now))
        };
        let at = self.turns.iter().position(may_have)?;
        let account = self.turns.remove(at)?;
        let jobs = self.by_account.get_mut(&account)?;
        let job = jobs.waiting.pop_front()?;
        jobs.begun.push_back(now);
        self.busy += 1;
        if !jobs.waiting.is_empty() {
            self.turns.push_back(account.clone());
        }
        Some(Next { account, begun: now, job })
    }

    fn done(&mut self, account: &str, begun: Instant, now: Instant) {
        self.busy -= 1;
        let took = now.saturating_duration_since(begun);
        if took < WAITS_FOR_DISK {
            self.rivals.note(account, took, now);
        }
        let beside = self.rivals.has_rival(account, now);
        if let Some(jobs) = self.by_account.get_mut(account) {
            jobs.ended(begun, now, beside);
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
        // Where it can't be had (some sandbox), modes are what the process's umask leaves of them.
        if sys::unshare_umask().is_ok() {
            umask(Mode::empty());
        }
        // Without any there are none to give up.
        let _ = sys::give_up_capabilities();
        let mut before = None;
        while let Some(Next { account, begun, job }) = self.next(before.take()) {
            // A panic must not end the thread; the caller gets EIO since nothing was sent.
            let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(job));
            before = Some((account, begun));
        }
    }

    /// The next job, once that of `before` is done.
    fn next(&self, before: Option<(String, Instant)>) -> Option<Next> {
        let mut state = self.state.lock().expect("not poisoned");
        if let Some((account, begun)) = before {
            state.done(&account, begun, Instant::now());
            // Its share, or that of others, may have a place again.
            self.changed.notify_one();
        }
        let mut looks_after = false;
        loop {
            if let Some(next) = state.take((self.threads, self.beside_others), Instant::now()) {
                if looks_after && !state.turns.is_empty() {
                    self.changed.notify_one();
                }
                return Some(next);
            }
            if state.is_over && state.turns.is_empty() {
                return None;
            }
            if state.threads > self.threads && !state.lacks_thread() {
                state.threads -= 1;
                // It may have been the one that looks again in a while.
                self.changed.notify_one();
                return None;
            }
            looks_after = !state.turns.is_empty() && !state.is_looked_after;
            state = if looks_after {
                // An account has a place again when one of its jobs turns out to wait for a disk,
                // when they have rested, and when it is alone.
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
        let mut state = State::default();
        for _ in 0..THREADS {
            state.push("ada", Box::new(|| ()));
        }
        let all = (THREADS, 2);
        let taken = |state: &mut State, milliseconds| {
            std::iter::from_fn(|| state.take(all, after(milliseconds)))
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
