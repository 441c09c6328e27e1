//! Reading the words of commands, away from the runtime's threads: a long command line takes its time, and
//! everybody else's messages must not wait for it. What the words mean is the matter of `policy`.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, Weak},
};

use posh_proto::executor::{ClientFile, Stage, rejected::Kind};
use tokio::sync::Semaphore;

use crate::{callers::Caller, error::Refusal, policy::Policy, runner::wire::Fence};

/// Command lines of one identity that are read at a time. The others of it wait, so that the threads which read
/// are at most as many as there are identities at work.
const READS_OF_ONE: usize = 2;

/// What the reading gives back: what it was given, and the fences of the stages.
type Classified = (Vec<Stage>, Vec<ClientFile>, Vec<Fence>);

/// Who reads how many.
#[derive(Debug, Default)]
pub struct Classifier(Mutex<HashMap<Option<String>, Weak<Semaphore>>>);

impl Classifier {
    /// See [`Policy::fences`].
    pub async fn classify(
        &self,
        caller: &Caller,
        policy: Arc<Policy>,
        (mut stages, client_files): (Vec<Stage>, Vec<ClientFile>),
    ) -> Result<Classified, Refusal> {
        let failed = |why: String| Refusal::new(Kind::SpawnFailed, format!("cannot read the commands: {why}"));
        let turn = self.share_of(caller).acquire_owned().await.map_err(|closed| failed(closed.to_string()))?;
        let reading = tokio::task::spawn_blocking(move || {
            // Held until it has been read, also when nobody waits any more.
            let _turn = turn;
            let fences = policy.fences(&mut stages, &client_files)?;
            Ok((stages, client_files, fences))
        });
        reading.await.unwrap_or_else(|panicked| Err(failed(panicked.to_string())))
    }

    fn share_of(&self, caller: &Caller) -> Arc<Semaphore> {
        let mut shares = self.0.lock().expect("not poisoned");
        if let Some(share) = shares.get(&caller.identity).and_then(Weak::upgrade) {
            return share;
        }
        shares.retain(|_, share| share.strong_count() > 0);
        let share = Arc::new(Semaphore::new(READS_OF_ONE));
        shares.insert(caller.identity.clone(), Arc::downgrade(&share));
        share
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;
    use crate::config::Confinement;

    /// The shortest of some times that it takes to read a command of so many words.
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
            let (short, long) = (time_of(&policy, program, word, 4_000), time_of(&policy, program, word, 32_000));
            // Eight times the words; were it the square, 64 times the time.
            assert!(long < short * 24 + Duration::from_millis(20), "{program} {word}: {short:?}, {long:?}");
        }
    }
}
