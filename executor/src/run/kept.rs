//! Kept runs, by name: running ones, which a new connection of their client may resume, and for
//! some minutes those that have ended, so that no change is made twice because an answer was lost.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use posh_proto::executor::{Resume, rejected::Kind};
use tokio::sync::{mpsc, watch};

use super::{
    ClientMessages,
    outbox::{Messages, Outbox},
};
use crate::error::Refusal;

/// Time for which an ended run is remembered: a client asks for it within seconds.
const REMEMBERED: Duration = Duration::from_secs(300);
/// Ended runs, and bytes of their last outputs, that are remembered; beyond, the oldest of the
/// client that has most are forgotten.
const REMEMBERED_RUNS: usize = 1024;
const REMEMBERED_BYTES: usize = 64 << 20;
/// Bytes of a run's id; a gateway's has some 50.
const RUN_ID_BYTES: usize = 64;
/// Time for a run that is being killed until its processes are gone.
const ENDING: Duration = Duration::from_secs(5);

/// A client that has reconnected: its first message, and the rest of its input.
pub type Return = (Resume, ClientMessages);

/// State of a kept run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    AtWork,
    /// Its last message says how.
    Ended,
    Killed,
}

struct KeptRun {
    outbox: Arc<Outbox>,
    returns: mpsc::Sender<Return>,
    /// Number of the client's reconnections.
    resumes: watch::Sender<u64>,
    fate: watch::Sender<Fate>,
}

/// All kept runs of an executor.
#[derive(Default)]
pub struct KeptRuns(Mutex<KeptRunsState>);

#[derive(Default)]
struct KeptRunsState {
    runs: HashMap<String, KeptRun>,
    /// Ended runs, by client.
    ended: HashMap<String, Remembered>,
}

/// Ended runs of one client, the oldest first.
#[derive(Default)]
struct Remembered {
    bytes: usize,
    runs: VecDeque<EndedRun>,
}

struct EndedRun {
    name: String,
    at: Instant,
    bytes: usize,
}

/// Refuses a name that no gateway gives: names are kept, and appear in the record.
pub fn check_run_id(run_id: &str) -> Result<(), Refusal> {
    let is_plain =
        |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.' | b':');
    if run_id.len() <= RUN_ID_BYTES && run_id.bytes().all(is_plain) {
        return Ok(());
    }
    Err(Refusal::protocol(format!(
        "a run's id has at most {RUN_ID_BYTES} bytes: letters, digits, and `-_.:`"
    )))
}

impl KeptRuns {
    /// Registers a run of this name; returns the queue of its client's reconnections.
    ///
    /// # Errors
    /// There is or was a run of that name: it is not done twice.
    pub fn begin(
        &self,
        name: &str,
        outbox: &Arc<Outbox>,
    ) -> Result<mpsc::Receiver<Return>, Refusal> {
        let mut state = self.lock();
        state.forget(Instant::now());
        if state.runs.contains_key(name) {
            return Err(Refusal::protocol("a run of that name was started before"));
        }
        let (returns, coming) = mpsc::channel(1);
        let fate = watch::Sender::new(Fate::AtWork);
        state.runs.insert(
            name.to_owned(),
            KeptRun { outbox: outbox.clone(), returns, resumes: watch::Sender::new(0), fate },
        );
        Ok(coming)
    }

    /// Notes the end of a run, of which no process is left.
    pub fn end(&self, name: &str, was_killed: bool) {
        let at = Instant::now();
        let mut state = self.lock();
        let Some(entry) = state.runs.get(name) else { return };
        if *entry.fate.borrow() != Fate::AtWork {
            return;
        }
        entry.fate.send_replace(if was_killed { Fate::Killed } else { Fate::Ended });
        // No client acknowledges anything from now on.
        let bytes = entry.outbox.held_bytes() + name.len();
        let remembered = state.ended.entry(client_of(name).to_owned()).or_default();
        remembered.bytes += bytes;
        remembered.runs.push_back(EndedRun { name: name.to_owned(), at, bytes });
        state.forget(at);
    }

    /// Removes a run that was refused: it may be tried again under this name.
    pub fn forget(&self, name: &str) {
        self.lock().runs.remove(name);
    }

    /// Resumes a run for a client that has reconnected.
    ///
    /// Invariant: at most one client of a run waits until the run takes it, with its message in
    /// memory: the last one. A client that reconnects again has lost the connection before.
    ///
    /// The client's input is returned if no run takes it.
    ///
    /// # Errors
    /// The reason why the run can't be resumed.
    pub async fn resume(
        &self,
        resume: Resume,
        input: ClientMessages,
    ) -> (Result<Messages, Refusal>, Option<ClientMessages>) {
        let mut unheard = Some(input);
        (self.take_up(resume, &mut unheard).await, unheard)
    }

    async fn take_up(
        &self,
        resume: Resume,
        input: &mut Option<ClientMessages>,
    ) -> Result<Messages, Refusal> {
        let unknown = || Refusal::new(Kind::UnknownRun, "no such run is remembered");
        let (outbox, returns, mut later, mut fate) = {
            let state = self.lock();
            let entry = state.runs.get(&resume.run_id).ok_or_else(unknown)?;
            entry.resumes.send_modify(|count| *count += 1);
            (
                entry.outbox.clone(),
                entry.returns.clone(),
                entry.resumes.subscribe(),
                entry.fate.subscribe(),
            )
        };
        let received = resume.received;
        if *fate.borrow() == Fate::AtWork {
            let is_heard = tokio::select! {
                room = returns.reserve() => match (room, input.take()) {
                    (Ok(room), Some(input)) => {
                        room.send((resume, input));
                        true
                    }
                    (_, unheard) => {
                        *input = unheard;
                        false
                    }
                },
                _ = later.changed() => return Err(
                    Refusal::protocol("another connection goes on with the run")
                ),
            };
            if !is_heard {
                let _ =
                    tokio::time::timeout(ENDING, fate.wait_for(|fate| *fate != Fate::AtWork)).await;
            }
        }
        if *fate.borrow() == Fate::Killed {
            return Err(Refusal::new(Kind::RunKilled, "the run was ended before it was done"));
        }
        outbox.resume(received).ok_or_else(unknown)
    }

    fn lock(&self) -> MutexGuard<'_, KeptRunsState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl KeptRunsState {
    /// Forgets runs that are too old or too many. Looks at one run of each client, and at those
    /// that it forgets.
    fn forget(&mut self, now: Instant) {
        for remembered in self.ended.values_mut() {
            while remembered
                .runs
                .front()
                .is_some_and(|run| now.duration_since(run.at) >= REMEMBERED)
            {
                remembered.forget_oldest(&mut self.runs);
            }
        }
        let mut count: usize = self.ended.values().map(|remembered| remembered.runs.len()).sum();
        let mut bytes: usize = self.ended.values().map(|remembered| remembered.bytes).sum();
        loop {
            let most = match (bytes > REMEMBERED_BYTES, count > REMEMBERED_RUNS) {
                (true, _) => self.ended.values_mut().max_by_key(|remembered| remembered.bytes),
                (_, true) => self.ended.values_mut().max_by_key(|remembered| remembered.runs.len()),
                _ => break,
            };
            let Some(most) = most else { break };
            bytes -= most.forget_oldest(&mut self.runs);
            count -= 1;
        }
        self.ended.retain(|_, remembered| !remembered.runs.is_empty());
    }
}

impl Remembered {
    /// Returns the bytes that were held for it.
    fn forget_oldest(&mut self, runs: &mut HashMap<String, KeptRun>) -> usize {
        let Some(EndedRun { name, bytes, .. }) = self.runs.pop_front() else { return 0 };
        runs.remove(&name);
        self.bytes -= bytes;
        bytes
    }
}

/// The part of a name that identifies the client, see `Caller::run_name`.
fn client_of(name: &str) -> &str {
    name.split_once('\0').map_or("", |(client, _)| client)
}

#[cfg(test)]
mod tests {
    use posh_proto::executor::{Chunk, Rejected, RunInput, RunOutput, run_output};
    use tokio::sync::Semaphore;
    use tokio_stream::StreamExt as _;
    use tonic::{Streaming, body::Body, codec::Codec as _};
    use tonic_prost::ProstCodec;

    use super::*;
    use crate::run::outbox::KEPT_CHUNK_BYTES;

    fn account() -> Arc<Semaphore> {
        Arc::new(Semaphore::new(1 << 20))
    }

    #[tokio::test]
    async fn a_name_is_taken_once() {
        let runs = KeptRuns::default();
        let outbox = Outbox::kept(account());
        assert!(runs.begin("a", &outbox).is_ok() && runs.begin("a", &outbox).is_err());
        runs.end("a", false);
        assert!(runs.begin("a", &outbox).is_err());
    }

    #[tokio::test]
    async fn only_so_many_are_remembered() {
        let runs = KeptRuns::default();
        let outbox = Outbox::kept(account());
        for n in 0..REMEMBERED_RUNS + 10 {
            runs.begin(&n.to_string(), &outbox).unwrap();
            runs.end(&n.to_string(), n % 2 == 0);
        }
        assert_eq!(runs.lock().runs.len(), REMEMBERED_RUNS);
        assert!(!runs.lock().runs.contains_key("0") && runs.lock().runs.contains_key("500"));
    }

    #[tokio::test]
    async fn one_client_does_not_make_the_runs_of_another_forgotten() {
        let runs = KeptRuns::default();
        let outbox = Outbox::kept(account());
        let enter = |name: String| {
            runs.begin(&name, &outbox).unwrap();
            runs.end(&name, false);
        };
        enter("bob\0only".to_owned());
        (0..3 * REMEMBERED_RUNS).for_each(|n| enter(format!("ada\0{n}")));
        assert!(runs.lock().runs.contains_key("bob\0only"));
        assert!(runs.lock().runs.len() <= REMEMBERED_RUNS);
    }

    #[test]
    fn a_name_that_is_kept_is_short_and_plain() {
        for run_id in
            ["", "18-1", "4194304-17-3.1-0123456789abcdef0123456789abcdef", &"x".repeat(64)]
        {
            assert_eq!(check_run_id(run_id), Ok(()), "{run_id}");
        }
        for run_id in ["a b", "a\0b", "\u{1}", "ä", &"x".repeat(65)] {
            assert_eq!(check_run_id(run_id).unwrap_err().kind, Kind::Protocol, "{run_id:?}");
        }
    }

    #[tokio::test]
    async fn what_is_remembered_of_one_client_has_a_bound_whatever_its_messages_are() {
        let runs = KeptRuns::default();
        let large = || Rejected { message: "x".repeat(1 << 20), ..Rejected::default() };
        for n in 0..200 {
            let outbox = Outbox::kept(account());
            runs.begin(&format!("ada\0{n}"), &outbox).unwrap();
            outbox
                .send(Ok(RunOutput { kind: Some(run_output::Kind::Rejected(large())) }))
                .await
                .unwrap();
            runs.end(&format!("ada\0{n}"), false);
        }
        assert!((32..=64).contains(&runs.lock().runs.len()), "{}", runs.lock().runs.len());
    }

    #[tokio::test]
    async fn of_clients_that_come_back_to_a_run_which_does_not_hear_the_last_one_waits() {
        let runs = KeptRuns::default();
        let outbox = Outbox::kept(account());
        let _deaf = runs.begin("ada\0run", &outbox).unwrap();
        let resume = || {
            let messages = Streaming::new_empty(
                ProstCodec::<RunInput, RunInput>::default().decoder(),
                Body::empty(),
            );
            let input = ClientMessages { messages, largest: None };
            runs.resume(Resume { run_id: "ada\0run".to_owned(), ..Resume::default() }, input)
        };
        // The queue has room for one.
        let _ = resume().await;
        let mut waiting = std::pin::pin!(resume());
        let mut last = std::pin::pin!(resume());
        for _ in 0..2 {
            tokio::select! {
                biased;
                _ = &mut last => panic!("nobody has heard it"),
                () = std::future::ready(()) => {}
            }
            tokio::select! {
                biased;
                refused = &mut waiting => {
                    assert_eq!(refused.0.err().map(|refusal| refusal.kind), Some(Kind::Protocol));
                    return;
                }
                () = std::future::ready(()) => {}
            }
            // `last` came before `waiting`; now it comes again.
            last.set(resume());
        }
        panic!("two wait");
    }

    #[tokio::test]
    async fn many_runs_of_one_client_hold_little_each_and_go_on() {
        const RUNS: usize = 384;
        const ACCOUNT_BYTES: usize = 16 << 20;
        let account = Arc::new(Semaphore::new(ACCOUNT_BYTES));
        let chunk = || Chunk { data: vec![0; KEPT_CHUNK_BYTES].into(), ..Chunk::default() };
        let output = || Ok(RunOutput { kind: Some(run_output::Kind::Chunk(chunk())) });
        let mut outboxes = Vec::new();
        for _ in 0..RUNS {
            let outbox = Outbox::kept(account.clone());
            // As much as it accepts without acknowledgements.
            loop {
                tokio::select! {
                    biased;
                    sent = outbox.send(output()) => sent.unwrap(),
                    () = std::future::ready(()) => break,
                }
            }
            outboxes.push(outbox);
        }
        let held: Vec<usize> = outboxes.iter().map(|outbox| outbox.held_bytes()).collect();
        assert!(held[0] >= 3 << 20 && held[RUNS - 1] == 128 << 10, "{held:?}");
        let own: usize = held.iter().map(|held| held.min(&(128 << 10))).sum();
        assert!(
            held.iter().sum::<usize>() <= own + ACCOUNT_BYTES,
            "{}",
            held.iter().sum::<usize>()
        );
        // The account is full, but each run goes on as far as its client acknowledges.
        for outbox in &outboxes[RUNS - 8..] {
            let mut messages = outbox.attach();
            assert!(messages.next().await.is_some());
            outbox.received(1);
            let sent = tokio::time::timeout(Duration::from_secs(5), outbox.send(output())).await;
            sent.expect("there is room").unwrap();
        }
        // Ended runs are on no account.
        outboxes.iter().for_each(|outbox| outbox.end());
        assert_eq!(account.available_permits(), ACCOUNT_BYTES);
    }
}
