//! Limits on calls that may never return: refreshes of an executor's mounts, and lookups on a
//! mount, or on any directory that may be one. A thread in such a call can't be cancelled, and an
//! executor can report many changes and then block every access to its mounts. So each call holds a
//! share until its last thread has ended.
//!
//! Invariants: no such call uses a thread of tokio's pool, which the gateway needs to continue
//! while its own thread is busy ([`aside`](crate::aside::aside)). Every wait for an answer has a
//! limit. A place with an unanswered question gets no further one until it answers.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::{
    runtime::{Handle, RuntimeFlavor},
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{Instant, timeout_at},
};

use crate::aside::in_own_thread;

/// Limit on concurrent refreshes and questions, a refresh with up to 64 threads; others wait for
/// their turn.
const TURNS: usize = 32;
/// Limit on bytes of reported paths that are still in work: enough for two commands with the
/// maximum report each (16 MiB). A refresh keeps some copies of each path.
const TOLD_KIB: usize = 32 << 10;
/// Overhead of a path besides its bytes.
const PATH_BYTES: usize = 64;

/// Limits of one executor, or of one kind of question to local directories.
#[derive(Debug)]
pub struct Shares {
    turns: Arc<Semaphore>,
    told_kib: Arc<Semaphore>,
    questions: Questions,
}

/// Reason for a missing answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Unanswered {
    /// No answer within the limit.
    #[error("it does not answer in time")]
    Late,
    /// Not asked, as an earlier question is unanswered.
    #[error("it has not answered an earlier question yet")]
    Earlier,
}

/// A share, released on drop.
#[derive(Debug)]
pub struct TaskShare {
    _permit: OwnedSemaphorePermit,
}

impl Default for Shares {
    fn default() -> Self {
        Self {
            turns: Arc::new(Semaphore::new(TURNS)),
            told_kib: Arc::new(Semaphore::new(TOLD_KIB)),
            questions: Questions::default(),
        }
    }
}

impl Shares {
    /// Claims room for paths with so many bytes in total; `None` if there is not enough.
    #[must_use]
    pub fn room(&self, paths: usize, bytes: usize) -> Option<TaskShare> {
        let kib = u32::try_from((bytes + paths * PATH_BYTES).div_ceil(1 << 10)).ok()?;
        let permit = Arc::clone(&self.told_kib).try_acquire_many_owned(kib).ok()?;
        Some(TaskShare { _permit: permit })
    }

    /// Waits for a turn.
    pub async fn turn(&self) -> TaskShare {
        let permit = Arc::clone(&self.turns).acquire_owned().await;
        TaskShare { _permit: permit.expect("it is never closed") }
    }

    /// Runs `work` and returns its answer within the limit, which includes the wait for a turn. The
    /// work keeps its turn until it ends, even after its caller has given up.
    ///
    /// # Errors
    /// [`Unanswered`].
    pub async fn ask<T: Send + 'static>(
        &self,
        place: &Path,
        limit: Duration,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Unanswered> {
        if self.questions.is_given_up(place) {
            return Err(Unanswered::Earlier);
        }
        let end = Instant::now() + limit;
        let turn = timeout_at(end, self.turn()).await.map_err(|_| Unanswered::Late)?;
        // It may have been given up during the wait.
        if self.questions.is_given_up(place) {
            return Err(Unanswered::Earlier);
        }
        let question = self.questions.begin(place);
        let _waiting = WaitingCaller { number: question.number, all: self.questions.clone() };
        let answer = in_own_thread(move || {
            let _until_it_has_ended = (question, turn);
            work()
        });
        timeout_at(end, answer).await.ok().and_then(Result::ok).ok_or(Unanswered::Late)
    }

    /// Like `ask`, but blocking, while the gateway's other tasks go on.
    ///
    /// # Errors
    /// [`Unanswered`].
    pub fn ask_aside<T: Send + 'static>(
        &self,
        place: &Path,
        limit: Duration,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Unanswered> {
        match Handle::try_current() {
            Ok(runtime) if runtime.runtime_flavor() == RuntimeFlavor::MultiThread => {
                tokio::task::block_in_place(|| runtime.block_on(self.ask(place, limit, work)))
            }
            // There is no other thread to continue on.
            _ => Ok(work()),
        }
    }
}

/// Unanswered questions.
#[derive(Debug, Default, Clone)]
struct Questions(Arc<Mutex<OpenQuestions>>);

#[derive(Debug, Default)]
struct OpenQuestions {
    /// Number of questions so far; no number is reused.
    next: u64,
    by_number: BTreeMap<u64, Asked>,
}

#[derive(Debug)]
struct Asked {
    place: PathBuf,
    /// The caller has given up.
    is_given_up: bool,
}

impl Questions {
    fn is_given_up(&self, place: &Path) -> bool {
        let all = self.lock();
        let given_up = || all.by_number.values().filter(|asked| asked.is_given_up);
        given_up().any(|asked| asked.place == place) || given_up().count() >= TURNS
    }

    fn begin(&self, place: &Path) -> AskingThread {
        let mut all = self.lock();
        let number = all.next;
        all.next += 1;
        all.by_number.insert(number, Asked { place: place.to_owned(), is_given_up: false });
        AskingThread { number, all: self.clone() }
    }

    fn lock(&self) -> MutexGuard<'_, OpenQuestions> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Dropped when its thread ends.
struct AskingThread {
    number: u64,
    all: Questions,
}

impl Drop for AskingThread {
    fn drop(&mut self) {
        self.all.lock().by_number.remove(&self.number);
    }
}

/// Dropped when its caller no longer waits.
struct WaitingCaller {
    number: u64,
    all: Questions,
}

impl Drop for WaitingCaller {
    fn drop(&mut self) {
        if let Some(asked) = self.all.lock().by_number.get_mut(&self.number) {
            asked.is_given_up = true;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{
        atomic::{AtomicBool, Ordering},
        mpsc,
    };

    use super::*;

    #[tokio::test]
    async fn an_executor_has_so_many_refreshes_and_paths_at_a_time() {
        let shares = Shares::default();
        let all = shares.room(1000, 31 << 20);
        assert!(all.is_some() && shares.room(1, 1 << 20).is_none());
        assert!(shares.room(1, 100).is_some(), "a few more");
        drop(all);
        assert!(shares.room(1, 1 << 20).is_some());
        let mut turns = Vec::new();
        for _ in 0..TURNS {
            turns.push(shares.turn().await);
        }
        assert!(at_once(shares.turn()).await.is_none());
        turns.pop();
        assert!(at_once(shares.turn()).await.is_some());
    }

    /// A question that is answered when the sender is dropped.
    fn held_up() -> (mpsc::Sender<()>, impl FnOnce() + Send + 'static) {
        let (answer, answered) = mpsc::channel::<()>();
        (answer, move || assert!(answered.recv().is_err()))
    }

    const LIMIT: Duration = Duration::from_millis(100);
    const LONG: Duration = Duration::from_secs(30);

    #[tokio::test]
    async fn a_place_that_leaves_a_question_unanswered_gets_no_further_one() {
        let shares = Shares::default();
        let (mute, other) = (Path::new("/mute"), Path::new("/other"));
        let (answer, never) = held_up();
        assert_eq!(shares.ask(mute, LIMIT, never).await, Err(Unanswered::Late));
        let was_asked = Arc::new(AtomicBool::new(false));
        let asked = Arc::clone(&was_asked);
        let further = shares.ask(mute, LONG, move || asked.store(true, Ordering::Relaxed)).await;
        assert_eq!((further, was_asked.load(Ordering::Relaxed)), (Err(Unanswered::Earlier), false));
        assert_eq!(shares.ask(other, LONG, || 7).await, Ok(7));
        assert_eq!(shares.turns.available_permits(), TURNS - 1, "it has its turn until it ends");
        drop(answer);
        while shares.turns.available_permits() < TURNS {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        assert_eq!(shares.ask(mute, LONG, || 8).await, Ok(8));
    }

    #[tokio::test]
    async fn where_all_turns_are_held_up_nobody_waits() {
        let shares = Shares::default();
        let mut answers = Vec::new();
        for number in 0..TURNS {
            let (answer, never) = held_up();
            answers.push(answer);
            let place = PathBuf::from(format!("/{number}"));
            assert_eq!(
                shares.ask(&place, Duration::from_millis(10), never).await,
                Err(Unanswered::Late)
            );
        }
        assert_eq!(shares.ask(Path::new("/other"), LONG, || ()).await, Err(Unanswered::Earlier));
        // Also where it is refreshes that have them.
        let shares = Shares::default();
        let mut turns = Vec::new();
        for _ in 0..TURNS {
            turns.push(shares.turn().await);
        }
        assert_eq!(shares.ask(Path::new("/other"), LIMIT, || ()).await, Err(Unanswered::Late));
    }

    /// By as many as tokio's pool has threads: it needs one for what is done aside.
    #[test]
    fn questions_without_an_answer_take_no_thread_of_the_pool() {
        let pool = 2;
        let mut runtime = tokio::runtime::Builder::new_multi_thread();
        let runtime =
            runtime.worker_threads(1).max_blocking_threads(pool).enable_all().build().unwrap();
        let work = async move {
            let shares = Shares::default();
            let mut answers = Vec::new();
            for number in 0..2 * pool {
                let (answer, never) = held_up();
                answers.push(answer);
                let place = PathBuf::from(format!("/{number}"));
                assert_eq!(
                    shares.ask(&place, Duration::from_millis(10), never).await,
                    Err(Unanswered::Late)
                );
            }
            let (sender, receiver) = mpsc::channel();
            tokio::spawn(async move { sender.send(()) });
            crate::aside::aside(|| receiver.recv_timeout(LONG)).expect("the other task went on");
        };
        // On the runtime's only thread, as the gateway's tasks are.
        runtime.block_on(runtime.spawn(work)).unwrap();
        runtime.shutdown_background();
    }

    /// What is there without waiting.
    async fn at_once<T>(work: impl Future<Output = T>) -> Option<T> {
        tokio::select! {
            biased;
            done = work => Some(done),
            () = std::future::ready(()) => None,
        }
    }
}
