//! Trace data of a relay. Does nothing for a session without tracing.

use std::{collections::HashMap, time::Duration};

use posh_proto::executor::{Exited, RunOutput, RunTimes, run_output};
use tokio::sync::mpsc;

use super::{FlightEvent as Happened, PipelineRelay, RunState};
use crate::{
    assembly::Pipeline,
    dispatch::refresh::Tally,
    enlisted::Enlisted,
    lower::{Lowered, RunStream},
    stage_link::{FromStage, Times},
    trace::{Row, RunStart, RunTrace, TraceEvent, Tracer},
};

/// Timeout for final messages of executors and stage programs. Both arrive within moments of the
/// end, unless a writer still fills a full pipe.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// Tracer and the data collected so far.
pub(super) struct CollectedTrace {
    tracer: Tracer,
    runs: Vec<RunTrace>,
    /// Names of remote commands, and of the commands behind streams.
    commands: HashMap<(usize, u32), String>,
    streams: HashMap<RunStream, String>,
    stages: HashMap<usize, Times>,
}

impl CollectedTrace {
    /// For these runs, in order, each with its executor's name.
    pub fn new(
        tracer: Tracer,
        calls: Vec<(String, RunStart)>,
        pipeline: &Pipeline,
        lowered: &Lowered,
    ) -> Self {
        let calls = calls.into_iter().filter(|_| tracer.is_on());
        let runs =
            calls.map(|(executor, call)| RunTrace::new(tracer.clone(), executor, call)).collect();
        let mut noted = Self {
            tracer,
            runs,
            commands: HashMap::new(),
            streams: HashMap::new(),
            stages: HashMap::new(),
        };
        if noted.tracer.is_on() {
            noted.name_all(pipeline, lowered);
        }
        noted
    }

    fn name_all(&mut self, pipeline: &Pipeline, lowered: &Lowered) {
        let name = |stage: usize| {
            format!("{} (stage {})", pipeline.stages[stage].enlisted.name, stage + 1)
        };
        for (command, (stage, part)) in &lowered.commands {
            let is_split =
                lowered.commands.values().filter(|(other, _)| other == stage).count() > 1;
            let part = if is_split { format!(" part {}", part + 1) } else { String::new() };
            self.commands.insert(*command, name(*stage) + &part);
        }
        for ((stage, fd), streams) in &lowered.outputs {
            self.streams.extend(
                streams
                    .iter()
                    .map(|stream| (*stream, format!("descriptor {fd} of {}", name(*stage)))),
            );
        }
        for (stage, join) in &lowered.joins {
            self.streams.extend(
                join.inputs.iter().map(|stream| (*stream, format!("a part of {}", name(*stage)))),
            );
        }
        self.stages.extend(
            pipeline.stages.iter().enumerate().filter_map(|(i, stage)| Some((i, stage.times?))),
        );
    }

    pub fn chunk(&mut self, run: usize) {
        self.runs.get_mut(run).into_iter().for_each(RunTrace::chunk);
    }

    pub fn exited(&mut self, run: usize, exited: &Exited) {
        let command = self.commands.get(&(run, exited.stage));
        self.runs
            .get_mut(run)
            .zip(command)
            .into_iter()
            .for_each(|(run, command)| run.exited(command, exited));
    }

    pub fn finished(&mut self, run: usize, times: Option<RunTimes>) {
        self.runs.get_mut(run).into_iter().for_each(|run| run.finished(times.clone()));
    }

    pub fn over(&mut self, run: usize) {
        self.runs.get_mut(run).into_iter().for_each(RunTrace::over);
    }

    /// Merges the times that a stage program sends at its end.
    pub fn stage(&mut self, stage: usize, times: Times) {
        let received_ns = self.stages.get(&stage).map_or(0, |times| times.received_ns);
        self.stages.insert(stage, Times { received_ns, ..times });
    }

    /// Begins the trace of a stage's end.
    pub fn ending(&self, place: usize, stage: &Enlisted) -> Ending {
        Ending {
            tracer: self.tracer.clone(),
            row: Row::Ending(place, stage.name.clone()),
            since_ns: self.tracer.now_ns(),
        }
    }
}

/// Trace of a stage's end: the gateway's own work after the command has ended.
pub(super) struct Ending {
    tracer: Tracer,
    row: Row,
    since_ns: u64,
}

impl Ending {
    /// Notes that the mounts are refreshed and the stage has its exit status.
    pub fn refreshed(self, tally: Tally) {
        if self.tracer.is_on() {
            let now_ns = self.tracer.now_ns();
            let mut span = TraceEvent::span("refreshing the mount", self.since_ns, now_ns);
            for (key, count) in
                [("files", tally.files), ("listings", tally.listings), ("removed", tally.removed)]
            {
                span = if count > 0 { span.with(key, count) } else { span };
            }
            self.tracer.add(self.row.clone(), span);
            self.tracer.add(self.row, TraceEvent::moment("farewell", now_ns));
        }
    }
}

impl PipelineRelay<'_> {
    /// Receives final messages, and adds all events to the trace.
    pub(super) async fn hear_last_words(&mut self, mut incoming: mpsc::Receiver<Happened>) {
        if !self.noted.tracer.is_on() {
            return;
        }
        let hear = async {
            while !(self.stages.values().all(|s| s.gone) && self.runs.iter().all(RunState::is_over))
            {
                let Some(event) = incoming.recv().await else { return };
                self.last_word(event);
            }
        };
        let _ = tokio::time::timeout(LAST_WORDS, hear).await;
        let streams = std::mem::take(&mut self.noted.streams);
        for (index, run) in self.noted.runs.drain(..).enumerate() {
            run.tell(|stream| {
                streams.get(&(index, stream)).cloned().unwrap_or_else(|| format!("stream {stream}"))
            });
        }
        for (place, times) in
            self.noted.stages.iter().filter(|(place, _)| self.stages.contains_key(*place))
        {
            self.noted.tracer.stood_in(*place, &self.pipeline.stages[*place].enlisted, times);
        }
    }

    /// Only times matter now: every stage already has its exit status.
    fn last_word(&mut self, event: Happened) {
        match event {
            Happened::Stage(stage, Some(FromStage::Times(times))) => self.noted.stage(stage, times),
            Happened::Stage(stage, None) => {
                self.stages.entry(stage).and_modify(|state| state.gone = true);
            }
            Happened::Run(
                run,
                Ok(Some(RunOutput { kind: Some(run_output::Kind::Finished(finished)) })),
            ) => {
                self.noted.finished(run, finished.times);
            }
            Happened::Run(run, Ok(None) | Err(_)) => {
                self.noted.over(run);
                let _ = self.runs[run].lost();
            }
            Happened::Stage(..)
            | Happened::Run(..)
            | Happened::Join(..)
            | Happened::Resumed(..) => {}
        }
    }
}
