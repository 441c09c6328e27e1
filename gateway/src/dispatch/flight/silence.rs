//! Runs whose executor says nothing after a signal by which a user or a shell wants a command to
//! end. Here, it would have ended at once, or gone on to write; who is silent may be out of reach,
//! or keep the caller waiting for as long as it likes.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use nix::libc::{SIGHUP, SIGINT, SIGKILL, SIGQUIT, SIGTERM};
use tokio::time::Instant;

use super::{PartEnd, Relay};

/// Many times what a command needs to remove its temporary files, and what a message takes over the
/// slowest link.
const SILENCE: Duration = Duration::from_secs(5);
/// What comes so soon was on its way before the signal was known there.
const UNDER_WAY: Duration = Duration::from_secs(1);

/// Runs that were sent such a signal, and have said nothing since.
#[derive(Default)]
pub(super) struct Silences {
    runs: BTreeMap<usize, Silence>,
    given_up: BTreeSet<usize>,
}

struct Silence {
    since: Instant,
    /// The last such signal of each stage.
    signals: BTreeMap<usize, u32>,
}

impl Silences {
    /// A stage of these runs is sent a signal.
    pub(super) fn signalled(
        &mut self,
        stage: usize,
        signal: u32,
        runs: impl Iterator<Item = usize>,
    ) {
        if ![SIGHUP, SIGINT, SIGKILL, SIGQUIT, SIGTERM].contains(&signal.cast_signed()) {
            return;
        }
        for run in runs {
            let silence = || Silence { since: Instant::now(), signals: BTreeMap::new() };
            self.runs.entry(run).or_insert_with(silence).signals.insert(stage, signal);
        }
    }

    /// The executor says something of a run.
    pub(super) fn heard(&mut self, run: usize) {
        // Who was killed does not go on, whatever is said.
        let goes_on = |silence: &Silence| {
            !silence.signals.values().any(|signal| *signal == SIGKILL.cast_unsigned())
        };
        if self
            .runs
            .get(&run)
            .is_some_and(|silence| silence.since.elapsed() > UNDER_WAY && goes_on(silence))
        {
            self.runs.remove(&run);
        }
    }

    /// A stage has ended in a run: what it was sent counts no more.
    pub(super) fn ended(&mut self, run: usize, stage: usize) {
        if let Some(silence) = self.runs.get_mut(&run)
            && silence.signals.remove(&stage).is_some()
            && silence.signals.is_empty()
        {
            self.runs.remove(&run);
        }
    }

    /// Which run has said nothing for too long, and when that is.
    pub(super) fn next(&self) -> Option<(Instant, usize)> {
        self.runs.iter().map(|(run, silence)| (silence.since + SILENCE, *run)).min()
    }

    pub(super) fn is_given_up(&self, run: usize) -> bool {
        self.given_up.contains(&run)
    }
}

impl Relay<'_> {
    /// Gives a run up. Its stages that were sent a signal end by that one.
    pub(super) async fn run_silent(&mut self, run: usize) {
        let Some(silence) = self.silences.runs.remove(&run) else { return };
        let unended = self.unended(run);
        if unended.is_empty() {
            return;
        }
        self.silences.given_up.insert(run);
        self.runs[run].abandon();
        let executor = self.gateway.executors.get(self.runs[run].executor);
        tracing::warn!(executor = %executor.name, "a run is given up, since nothing is heard after a signal");
        for command in unended {
            let stage = self.commands[&command].0;
            let name = &self.stages[&stage].name;
            let message = format!(
                "posh: {name}: executor {} at {} does not answer; its output is incomplete",
                executor.name, executor.address
            );
            let end = silence
                .signals
                .get(&stage)
                .map_or(PartEnd::Lost(message), |signal| PartEnd::Silent(*signal));
            self.part_ended(command, end);
        }
        self.end_streams(run).await;
    }
}
