//! Analyses callers' requests off the runtime's threads: a long command line takes time, and other
//! callers' messages must not wait for it. The analysis itself is passed in.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, Weak},
    time::{Duration, Instant},
};

use posh_proto::executor::rejected::Kind;
use posh_volume::directory::Rivals;
use tokio::{runtime::Handle, sync::Semaphore, task::AbortHandle};

use crate::{callers::Caller, error::Refusal};

/// Requests of one identity that are analysed at a time. More of it wait, which bounds the threads
/// by the number of active identities.
const READS_OF_ONE: usize = 2;

/// Runs analyses, each in a turn of its identity.
#[derive(Debug)]
pub struct Classifier(Turns);

/// Concurrency limit per identity.
#[derive(Debug)]
pub struct Turns {
    of_one: usize,
    shares: Mutex<HashMap<Option<String>, Weak<Semaphore>>>,
    rivals: Arc<Rivals>,
}

/// A turn that ends after a time.
#[derive(Debug)]
pub struct Passing {
    lasts: AbortHandle,
    rivals: Arc<Rivals>,
    /// Identity that holds it, as an account of the volumes.
    name: String,
    began: Instant,
    has_waited: bool,
}

impl Passing {
    /// Ends the turn, after its rest.
    pub fn end(self) {
        let Self { lasts, rivals, name, began, has_waited } = self;
        let (now, used) = (Instant::now(), began.elapsed());
        rivals.note(&name, used, now);
        let rests = has_waited && rivals.has_rival(&name, now);
        match Handle::try_current() {
            Ok(runtime) if rests => drop(runtime.spawn(async move {
                tokio::time::sleep(used).await;
                lasts.abort();
            })),
            _ => lasts.abort(),
        }
    }
}

impl Default for Classifier {
    fn default() -> Self {
        Self(Turns::new(READS_OF_ONE))
    }
}

impl Turns {
    /// With rivals of its own.
    pub fn new(of_one: usize) -> Self {
        Self::beside(of_one, Arc::default())
    }

    /// Like `new`, but shares rivals with other work.
    pub fn beside(of_one: usize, rivals: Arc<Rivals>) -> Self {
        Self { of_one, shares: Mutex::default(), rivals }
    }

    /// The semaphore of one identity.
    pub fn share_of(&self, caller: &Caller) -> Arc<Semaphore> {
        let mut shares = self.shares.lock().expect("not poisoned");
        if let Some(share) = shares.get(&caller.identity).and_then(Weak::upgrade) {
            return share;
        }
        shares.retain(|_, share| share.strong_count() > 0);
        let share = Arc::new(Semaphore::new(self.of_one));
        shares.insert(caller.identity.clone(), Arc::downgrade(&share));
        share
    }
}

impl Turns {
    /// Waits for a turn of `caller`. It ends after `longest` or by [`Passing::end`], whichever
    /// comes first: its holder may itself wait for a later turn. If it had to wait and another
    /// identity is active, the turn lasts as long again as it was used, which leaves the processors
    /// to the other.
    pub async fn passing(&self, caller: &Caller, longest: Duration) -> Passing {
        let share = self.share_of(caller);
        let (turn, has_waited) = match share.clone().try_acquire_owned() {
            Ok(turn) => (Ok(turn), false),
            // The semaphore is never closed.
            Err(_) => (share.acquire_owned().await, true),
        };
        let lasts = tokio::spawn(async move {
            let _turn = turn;
            tokio::time::sleep(longest).await;
        });
        let name = caller.identity.clone().unwrap_or_default();
        let (rivals, began) = (self.rivals.clone(), Instant::now());
        Passing { lasts: lasts.abort_handle(), rivals, name, began, has_waited }
    }
}

impl Classifier {
    /// Runs `reading` in a turn of `caller`.
    pub async fn read<T: Send + 'static>(
        &self,
        caller: &Caller,
        reading: impl FnOnce() -> Result<T, Refusal> + Send + 'static,
    ) -> Result<T, Refusal> {
        let failed = |why: String| {
            Refusal::new(Kind::SpawnFailed, format!("cannot read the commands: {why}"))
        };
        let turn = self
            .0
            .share_of(caller)
            .acquire_owned()
            .await
            .map_err(|closed| failed(closed.to_string()))?;
        let reading = tokio::task::spawn_blocking(move || {
            // Held until the analysis ends, even if nobody awaits it any more.
            let _turn = turn;
            reading()
        });
        reading.await.unwrap_or_else(|panicked| Err(failed(panicked.to_string())))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use posh_proto::executor::Stage;

    use super::*;
    use crate::{Config, config::Confinement, policy::Policy};

    /// Shortest of several times for analysing a command of so many words.
    fn time_of(policy: &Policy, program: &str, word: &str, count: usize) -> Duration {
        let words = std::iter::once(program).chain(std::iter::repeat_n(word, count));
        let argv = words.map(|word| word.to_owned().into()).collect();
        let stage = Stage { id: 1, program: program.to_owned(), argv, ..Stage::default() };
        let once = || {
            let mut stages = [stage.clone()];
            let began = Instant::now();
            assert!(policy.fences(&mut stages, &[]).is_ok());
            began.elapsed()
        };
        (0..3).map(|_| once()).min().unwrap()
    }

    #[test]
    fn a_long_command_line_takes_no_more_than_its_length() {
        let (policy, _) = Policy::new(&Confinement::default());
        for (program, word) in [("sort", "-k1,1"), ("cat", "f"), ("grep", "-ex"), ("sort", "f")] {
            let (short, long) =
                (time_of(&policy, program, word, 4_000), time_of(&policy, program, word, 32_000));
            // Eight times the words: quadratic analysis would take 64 times as long.
            assert!(
                long < short * 24 + Duration::from_millis(20),
                "{program} {word}: {short:?}, {long:?}"
            );
        }
    }

    /// Time that the third of three turns waits after the second one's end.
    async fn third_waits(bob_is_at_work: bool) -> Duration {
        const USED: Duration = Duration::from_millis(50);
        let anybody = Caller::anybody(&Config::new(Vec::new()));
        let ada = Caller { identity: Some("ada".to_owned()), ..anybody };
        let turns = Arc::new(Turns::new(1));
        if bob_is_at_work {
            turns.rivals.note("bob", Duration::from_secs(9), Instant::now());
        }
        let first = turns.passing(&ada, 10 * USED).await;
        let next = || {
            let (turns, ada) = (turns.clone(), ada.clone());
            tokio::spawn(async move { turns.passing(&ada, 10 * USED).await })
        };
        let (second, third) = (next(), next());
        tokio::task::yield_now().await;
        first.end();
        let second = second.await.unwrap();
        tokio::time::sleep(USED).await;
        let ended = Instant::now();
        second.end();
        third.await.unwrap().end();
        ended.elapsed()
    }

    #[tokio::test]
    async fn beside_others_a_turn_of_several_rests() {
        assert!(third_waits(true).await >= Duration::from_millis(50));
        // Without rivals there is no rest. A busy machine may be slow.
        let mut alone = Vec::new();
        while alone.len() < 20 && alone.iter().all(|waited| *waited > Duration::from_millis(25)) {
            alone.push(third_waits(false).await);
        }
        assert!(
            alone.last().is_some_and(|waited| *waited <= Duration::from_millis(25)),
            "{alone:?}"
        );
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn one_identity_has_two_read_at_a_time() {
        let classifier = Arc::new(Classifier::default());
        let anybody = Caller::anybody(&Config::new(Vec::new()));
        let [ada, bob] = ["ada", "bob"]
            .map(|name| Caller { identity: Some(name.to_owned()), ..anybody.clone() });
        let (go, gone) = std::sync::mpsc::channel::<()>();
        let gone = Arc::new(Mutex::new(gone));
        let (began, mut beginnings) = tokio::sync::mpsc::unbounded_channel();
        for _ in 0..8 {
            let (classifier, ada, gone, began) =
                (classifier.clone(), ada.clone(), gone.clone(), began.clone());
            tokio::spawn(async move {
                let reading = move || {
                    let _ = began.send(());
                    let _ = gone.lock().unwrap().recv();
                    Ok(())
                };
                classifier.read(&ada, reading).await
            });
        }
        for _ in 0..READS_OF_ONE {
            beginnings.recv().await.unwrap();
        }
        // Another identity's turn comes all the same.
        assert!(classifier.read(&bob, || Ok(())).await.is_ok());
        tokio::time::sleep(Duration::from_millis(100)).await;
        assert!(beginnings.try_recv().is_err());
        drop(go);
        for _ in 0..8 - READS_OF_ONE {
            beginnings.recv().await.unwrap();
        }
    }
}
