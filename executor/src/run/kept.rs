//! Runs that are kept, by their names: those at work, which a new connection of their
//! client may go on with, and for some minutes those that have ended, so that nothing
//! that changed something is ever done twice for want of an answer.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use posh_proto::executor::{Resume, RunInput, rejected::Kind};
use tokio::sync::{mpsc, watch};
use tonic::Streaming;

use super::outbox::{Messages, Outbox};
use crate::error::Refusal;

/// How long an ended run is remembered: a client looks for it for seconds.
const REMEMBERED: Duration = Duration::from_secs(300);
/// Ended runs, and bytes of their last outputs, that are remembered; beyond, the oldest are forgotten
/// of whoever has most.
const REMEMBERED_RUNS: usize = 1024;
const REMEMBERED_BYTES: usize = 64 << 20;
/// A run that is being killed has an answer when its processes are gone.
const ENDING: Duration = Duration::from_secs(5);

/// A client that has come back: what it says first, and the rest.
pub type Return = (Resume, Streaming<RunInput>);

/// What became of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    AtWork,
    /// Its last message says how.
    Ended(Instant),
    Killed(Instant),
}

struct Entry {
    outbox: Arc<Outbox>,
    returns: mpsc::Sender<Return>,
    fate: watch::Sender<Fate>,
}

/// All runs of an executor that are kept.
#[derive(Default)]
pub struct KeptRuns(Mutex<HashMap<String, Entry>>);

impl KeptRuns {
    /// A run of this name begins; where its client comes back to.
    ///
    /// # Errors
    /// There is or was one of that name: it is not done twice.
    pub fn begin(&self, name: &str, outbox: &Arc<Outbox>) -> Result<mpsc::Receiver<Return>, Refusal> {
        let mut runs = self.lock();
        forget(&mut runs);
        if runs.contains_key(name) {
            return Err(Refusal::protocol(format!("the run {name} was started before")));
        }
        let (returns, coming) = mpsc::channel(1);
        let fate = watch::Sender::new(Fate::AtWork);
        runs.insert(name.to_owned(), Entry { outbox: outbox.clone(), returns, fate });
        Ok(coming)
    }

    /// It is over, and nothing of it is left.
    pub fn end(&self, name: &str, was_killed: bool) {
        let now = Instant::now();
        if let Some(entry) = self.lock().get(name) {
            entry.fate.send_replace(if was_killed { Fate::Killed(now) } else { Fate::Ended(now) });
        }
    }

    /// A client wants to go on with a run.
    ///
    /// # Errors
    /// Why it can't.
    pub async fn resume(&self, resume: Resume, input: Streaming<RunInput>) -> Result<Messages, Refusal> {
        let found = self.lock().get(&resume.run_id).map(|e| (e.outbox.clone(), e.returns.clone(), e.fate.subscribe()));
        let unknown = || Refusal::new(Kind::UnknownRun, "no such run is remembered");
        let (outbox, returns, mut fate) = found.ok_or_else(unknown)?;
        let received = resume.received;
        if *fate.borrow() == Fate::AtWork && returns.send((resume, input)).await.is_err() {
            let _ = tokio::time::timeout(ENDING, fate.wait_for(|fate| *fate != Fate::AtWork)).await;
        }
        if matches!(*fate.borrow(), Fate::Killed(_)) {
            return Err(Refusal::new(Kind::RunKilled, "the run was ended before it was done"));
        }
        outbox.resume(received).ok_or_else(unknown)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Entry>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn forget(runs: &mut HashMap<String, Entry>) {
    let ended = |entry: &Entry| match *entry.fate.borrow() {
        Fate::AtWork => None,
        Fate::Ended(at) | Fate::Killed(at) => Some(at),
    };
    runs.retain(|_, entry| ended(entry).is_none_or(|at| at.elapsed() < REMEMBERED));
    let mut by_client: HashMap<String, Remembered> = HashMap::new();
    for (name, entry) in runs.iter() {
        let Some(at) = ended(entry) else { continue };
        let remembered = by_client.entry(client_of(name).to_owned()).or_default();
        remembered.bytes += entry.outbox.held_bytes();
        remembered.runs.push((at, name.clone()));
    }
    by_client.values_mut().for_each(|remembered| remembered.runs.sort_unstable_by(|a, b| b.cmp(a)));
    loop {
        let count: usize = by_client.values().map(|remembered| remembered.runs.len()).sum();
        let bytes: usize = by_client.values().map(|remembered| remembered.bytes).sum();
        let most = match (bytes > REMEMBERED_BYTES, count > REMEMBERED_RUNS) {
            (true, _) => by_client.values_mut().max_by_key(|remembered| remembered.bytes),
            (_, true) => by_client.values_mut().max_by_key(|remembered| remembered.runs.len()),
            _ => return,
        };
        let Some((remembered, (_, oldest))) = most.and_then(|most| most.runs.pop().map(|oldest| (most, oldest))) else {
            return;
        };
        remembered.bytes -= runs.remove(&oldest).map_or(0, |entry| entry.outbox.held_bytes()).min(remembered.bytes);
    }
}

/// Ended runs of one client, the oldest last.
#[derive(Default)]
struct Remembered {
    bytes: usize,
    runs: Vec<(Instant, String)>,
}

/// The part of a name that says whose run it is, see `Caller::run_name`.
fn client_of(name: &str) -> &str {
    name.split_once('\0').map_or("", |(client, _)| client)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_name_is_taken_once() {
        let runs = KeptRuns::default();
        let outbox = Outbox::new(true);
        assert!(runs.begin("a", &outbox).is_ok() && runs.begin("a", &outbox).is_err());
        runs.end("a", false);
        assert!(runs.begin("a", &outbox).is_err());
    }

    #[tokio::test]
    async fn only_so_many_are_remembered() {
        let runs = KeptRuns::default();
        let outbox = Outbox::new(true);
        for n in 0..REMEMBERED_RUNS + 10 {
            runs.begin(&n.to_string(), &outbox).unwrap();
            runs.end(&n.to_string(), n % 2 == 0);
        }
        forget(&mut runs.lock());
        assert_eq!(runs.lock().len(), REMEMBERED_RUNS);
        assert!(!runs.lock().contains_key("0") && runs.lock().contains_key("500"));
    }

    #[tokio::test]
    async fn one_client_does_not_make_the_runs_of_another_forgotten() {
        let runs = KeptRuns::default();
        let outbox = Outbox::new(true);
        let enter = |name: String| {
            runs.begin(&name, &outbox).unwrap();
            runs.end(&name, false);
        };
        enter("bob\0only".to_owned());
        (0..3 * REMEMBERED_RUNS).for_each(|n| enter(format!("ada\0{n}")));
        assert!(runs.lock().contains_key("bob\0only"));
        assert!(runs.lock().len() <= REMEMBERED_RUNS + 1);
    }
}
