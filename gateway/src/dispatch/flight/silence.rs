//! Runs whose executor stays silent after a signal that should end a command. Locally, the command
//! would have ended at once, or gone on writing. A silent executor may be unreachable, or may keep
//! the caller waiting indefinitely.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use nix::libc::{SIGHUP, SIGINT, SIGKILL, SIGQUIT, SIGTERM};
use tokio::time::Instant;

use super::{PartEnd, PipelineRelay};

/// Many times longer than a command needs to remove temporary files, and than a message takes over
/// the slowest link.
const SILENCE: Duration = Duration::from_secs(5);
/// Messages within this time may have been sent before the signal arrived.
const UNDER_WAY: Duration = Duration::from_secs(1);

/// Runs that were sent such a signal and have been silent since.
#[derive(Default)]
pub(super) struct Silences {
    runs: BTreeMap<usize, Silence>,
    given_up: BTreeSet<usize>,
}

struct Silence {
    since: Instant,
    /// Last such signal of each stage.
    signals: BTreeMap<usize, u32>,
}

impl Silences {
    /// Notes a signal to a stage of these runs.
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

    /// Notes a message of a run.
    pub(super) fn heard(&mut self, run: usize) {
        // A killed command does not continue, whatever the executor says.
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

    /// Notes the end of a stage in a run: its signals count no more.
    pub(super) fn ended(&mut self, run: usize, stage: usize) {
        if let Some(silence) = self.runs.get_mut(&run)
            && silence.signals.remove(&stage).is_some()
            && silence.signals.is_empty()
        {
            self.runs.remove(&run);
        }
    }

    /// Run whose timeout comes next, with its time.
    pub(super) fn next(&self) -> Option<(Instant, usize)> {
        self.runs.iter().map(|(run, silence)| (silence.since + SILENCE, *run)).min()
    }

    pub(super) fn is_given_up(&self, run: usize) -> bool {
        self.given_up.contains(&run)
    }
}

impl PipelineRelay<'_> {
    /// Gives up a run. Stages that were sent a signal count as ended by it.
    pub(super) async fn run_silent(&mut self, run: usize) {
        let Some(silence) = self.silences.runs.remove(&run) else { return };
        let unended = self.unended(run);
        if unended.is_empty() {
            return;
        }
        self.silences.given_up.insert(run);
        self.runs[run].abandon();
        let executor = self.gateway.executors.get(self.runs[run].executor);
        tracing::warn!(
            executor = %executor.name,
            "a run is given up, since nothing is heard after a signal"
        );
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
            self.part_ended(command.0, command.1, end);
        }
        self.end_streams(run).await;
    }
}
