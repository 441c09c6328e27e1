//! Relays between the stage programs and the runs of one pipeline until every remote stage has
//! ended: one loop over one event queue, which never blocks on anything else.

mod joined;
mod lost;
mod noted;
mod outgoing;
mod runs;
mod silence;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    ffi::OsStr,
    os::unix::ffi::OsStrExt,
    path::Path,
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use posh_proto::{
    digest::Digest,
    executor::{
        Chunk, Credit, Exited, RunOutput, RunSpec, Signal, WindowSize, run_input, run_output,
    },
};
use posh_reach::{Outputs, has_exceeded};
use tokio::{sync::mpsc, task::JoinSet};
use tonic::Status;

use self::{
    noted::CollectedTrace,
    runs::{Listener, RunCall, RunState},
    silence::Silences,
};
use super::{
    ending::{JoinHere, PartEnd, StageState, as_shell},
    output::StageOutput,
    refresh::{self, StageChanges, is_on_mount_of},
    resume::{Gone, Resumed},
    start::{Flight, Flights, PipelineOutcome, StartedJoin},
};
use crate::{
    assembly::Pipeline,
    facts::ResolvedCommand,
    join::{self, Joining},
    lower::{JOINED, Lowered, RunStream},
    model::LocalReason,
    plan::{Placement, Plan},
    stage_link::{ForStage, FromStage},
    state::Gateway,
};

/// Capacity of the event queue. Small: queued data has left its sender's credit but is not yet
/// counted by another queue.
const QUEUE: usize = 64;

/// Timeout for invalidating caches after a lost command, as its mount may be dead.
const REFRESH_OF_LOST: Duration = Duration::from_millis(500);

/// Time within which the stage programs of a group have told of its signal.
const TOLD_OF_A_GROUP: Duration = Duration::from_millis(20);

/// Time for an executor to end a call after its run is over and we have closed our side.
const HEARING_OUT: Duration = Duration::from_secs(30);

enum FlightEvent {
    Stage(usize, Option<FromStage>),
    Run(usize, Result<Option<RunOutput>, RunFault>),
    Join(usize, join::AggregatorEvent),
    Resumed(usize, Result<Resumed, Gone>),
}

/// Reason for the early end of a run's messages.
enum RunFault {
    /// Lost connection.
    Lost(String),
    /// The executor exceeded its allowance.
    Exceeded(String),
}

impl From<Status> for RunFault {
    fn from(status: Status) -> Self {
        let why = status.message().to_owned();
        if has_exceeded(&status) { Self::Exceeded(why) } else { Self::Lost(why) }
    }
}

struct PipelineRelay<'a> {
    gateway: &'a Arc<Gateway>,
    pipeline: &'a Pipeline,
    readings: &'a [Result<ResolvedCommand, LocalReason>],
    runs: Vec<RunState>,
    stages: BTreeMap<usize, StageState>,
    outputs: BTreeMap<(usize, u32), StageOutput>,
    feeds: HashMap<RunStream, (usize, u32)>,
    /// Streams that a local aggregator reads: (stage, part).
    joined: HashMap<RunStream, (usize, usize)>,
    inputs: BTreeMap<(usize, u32), RunStream>,
    commands: HashMap<(usize, u32), (usize, usize)>,
    farewells: JoinSet<()>,
    outcome: PipelineOutcome,
    noted: CollectedTrace,
    /// Edges joined on servers: writer and reader.
    fused: Vec<(usize, usize)>,
    /// Specifications of the runs.
    specs: Vec<RunSpec>,
    /// Digest of the data sent to stage programs, by stage and descriptor.
    delivered: BTreeMap<(usize, u32), Digest>,
    /// Stages with effects that can't be repeated: their input was consumed, or they received a
    /// signal.
    spent: BTreeSet<usize>,
    /// Reason for the lost connection, by run.
    why_lost: BTreeMap<usize, String>,
    silences: Silences,
    events: mpsc::Sender<FlightEvent>,
    pumps: JoinSet<()>,
}

/// A pipeline whose runs and aggregators have started.
struct StartedPipeline<'a> {
    gateway: &'a Arc<Gateway>,
    pipeline: &'a Pipeline,
    plan: &'a Plan,
    readings: &'a [Result<ResolvedCommand, LocalReason>],
    lowered: Lowered,
    joins: BTreeMap<usize, JoinHere>,
    runs: Vec<RunState>,
}

/// Relays until every remote stage has ended and its program has been told so.
pub async fn fly(
    gateway: &Arc<Gateway>,
    pipeline: &mut Pipeline,
    flights: Flights,
    plan: &Plan,
    readings: &[Result<ResolvedCommand, LocalReason>],
) -> PipelineOutcome {
    let (events, incoming) = mpsc::channel(QUEUE);
    let mut pumps = JoinSet::new();
    for (index, stage) in pipeline.stages.iter_mut().enumerate() {
        if matches!(plan.placements[index], Placement::Remote(_)) {
            gateway.assembler.directed(Arc::clone(&stage.enlisted)).await;
            pumps.spawn(pump_stage(index, stage.take_incoming(), events.clone()));
        }
    }
    let Flights { flights, lowered, joins, tracer } = flights;
    let mut at_work = BTreeMap::new();
    for (stage, StartedJoin { joining, told, inputs }) in joins {
        pumps.spawn(pump_join(stage, told, events.clone()));
        at_work.insert(stage, JoinHere { joining, inputs, ended: None });
    }
    let calls = flights
        .iter()
        .map(|f| (gateway.executors.get(f.executor).name.to_string(), f.call))
        .collect();
    let noted = CollectedTrace::new(tracer, calls, pipeline, &lowered);
    let mut runs = Vec::new();
    for (index, flight) in flights.into_iter().enumerate() {
        let Flight { executor, connection, input, output, written_files, .. } = flight;
        let allowance = output.allowance().clone();
        let listener = listen(index, output, events.clone());
        let call = RunCall { input, allowance, listener };
        let spec = &lowered.runs[index].spec;
        runs.push(RunState::new(executor, connection, call, written_files, spec));
    }
    let started =
        StartedPipeline { gateway, pipeline, plan, readings, lowered, joins: at_work, runs };
    let relay = PipelineRelay::new(started, noted, events, pumps);
    let outcome = relay.run(incoming).await;
    for stage in &pipeline.stages {
        gateway.assembler.ended(stage.enlisted.pid).await;
    }
    outcome
}

async fn pump_stage(
    index: usize,
    mut stage: mpsc::Receiver<FromStage>,
    events: mpsc::Sender<FlightEvent>,
) {
    loop {
        let said = stage.recv().await;
        let over = said.is_none();
        if events.send(FlightEvent::Stage(index, said)).await.is_err() || over {
            return;
        }
    }
}

fn listen(index: usize, run: Outputs, events: mpsc::Sender<FlightEvent>) -> Listener {
    Listener::new(tokio::spawn(pump_run(index, run, events)).abort_handle())
}

async fn pump_run(index: usize, mut run: Outputs, events: mpsc::Sender<FlightEvent>) {
    loop {
        let message = run.message().await.map_err(RunFault::from);
        let over = !matches!(message, Ok(Some(_)));
        let is_unheard = events.send(FlightEvent::Run(index, message)).await.is_err();
        if over {
            return;
        }
        if is_unheard {
            return hear_out(run).await;
        }
    }
}

/// Drains a run whose commands have ended. See [`Listener`].
async fn hear_out(mut run: Outputs) {
    let hear = async { while let Ok(Some(_)) = run.message().await {} };
    let _ = tokio::time::timeout(HEARING_OUT, hear).await;
}

async fn pump_join(
    stage: usize,
    mut join: mpsc::Receiver<join::AggregatorEvent>,
    events: mpsc::Sender<FlightEvent>,
) {
    while let Some(event) = join.recv().await {
        if events.send(FlightEvent::Join(stage, event)).await.is_err() {
            return;
        }
    }
}

fn outputs(
    pipeline: &Pipeline,
    plan: &Plan,
    lowered: &Lowered,
) -> BTreeMap<(usize, u32), StageOutput> {
    let output = |(&(stage, fd), streams): (&(usize, u32), &Vec<RunStream>)| {
        let output = match &plan.placements[stage] {
            Placement::Remote(parts)
                if fd == 2 && join::starts_alike(&pipeline.stages[stage].enlisted.argv, parts) =>
            {
                StageOutput::of_errors(streams, parts.len())
            }
            _ => StageOutput::new(streams),
        };
        ((stage, fd), output)
    };
    lowered.outputs.iter().map(output).collect()
}

impl<'a> PipelineRelay<'a> {
    fn new(
        started: StartedPipeline<'a>,
        noted: CollectedTrace,
        events: mpsc::Sender<FlightEvent>,
        pumps: JoinSet<()>,
    ) -> Self {
        let StartedPipeline { gateway, pipeline, plan, readings, lowered, mut joins, runs } =
            started;
        let remote =
            plan.placements.iter().enumerate().filter_map(|(index, placement)| match placement {
                Placement::Remote(parts) => Some((index, parts.len())),
                Placement::Here(_) => None,
            });
        let joined = joins
            .iter()
            .flat_map(|(stage, join)| (0..).zip(&join.inputs).map(|(p, s)| (*s, (*stage, p))));
        let joined = joined.collect();
        let count = |stage: usize| lowered.commands.values().filter(|(s, _)| *s == stage).count();
        let stages = remote.map(|(index, parts)| {
            (
                index,
                StageState::new(&pipeline.stages[index], parts, count(index), joins.remove(&index)),
            )
        });
        let stages: BTreeMap<usize, StageState> = stages.collect();
        let feeds =
            lowered.outputs.iter().flat_map(|(key, streams)| streams.iter().map(|s| (*s, *key)));
        // An aggregator's streams belong to its stage, not to a run.
        let feeds = feeds.filter(|((run, _), _)| *run != JOINED);
        Self {
            gateway,
            pipeline,
            readings,
            runs,
            stages,
            joined,
            feeds: feeds.collect(),
            outputs: outputs(pipeline, plan, &lowered),
            inputs: lowered.inputs,
            commands: lowered.commands,
            farewells: JoinSet::new(),
            outcome: PipelineOutcome::default(),
            noted,
            fused: pipeline
                .shape
                .edges
                .iter()
                .zip(&plan.fused)
                .filter(|(_, f)| **f)
                .map(|(e, _)| (e.from.0, e.to.0))
                .collect(),
            specs: lowered.runs.into_iter().map(|run| run.spec).collect(),
            delivered: BTreeMap::new(),
            spent: BTreeSet::new(),
            why_lost: BTreeMap::new(),
            silences: Silences::default(),
            events,
            pumps,
        }
    }

    async fn run(mut self, mut incoming: mpsc::Receiver<FlightEvent>) -> PipelineOutcome {
        while !self.stages.values().all(|s| s.finished) {
            let event = match self.silences.next() {
                None => incoming.recv().await,
                Some((end, run)) => match tokio::time::timeout_at(end, incoming.recv()).await {
                    Ok(event) => event,
                    Err(_) => {
                        self.run_silent(run).await;
                        self.finish_stages();
                        continue;
                    }
                },
            };
            let Some(event) = event else { break };
            for event in self.with_those_at_once(event, &mut incoming).await {
                self.take(event).await;
            }
            self.finish_stages();
        }
        while self.farewells.join_next().await.is_some() {}
        self.hear_last_words(incoming).await;
        self.runs.into_iter().for_each(RunState::leave);
        self.outcome
    }

    /// Returns an event with those that must not be told apart from it.
    ///
    /// A signal that a program sends to a group of processes (kill(2)) reaches all of them before
    /// the call returns; their stage programs tell of it one by one. A command must not take the
    /// end of another one, which got its signal first, for the end of its input: the last command
    /// of a pipeline gets its signal first, and what else came meanwhile comes afterwards.
    async fn with_those_at_once(
        &self,
        event: FlightEvent,
        incoming: &mut mpsc::Receiver<FlightEvent>,
    ) -> Vec<FlightEvent> {
        let mut all = vec![event];
        if self.signalled(&all[0]).is_none() {
            return all;
        }
        let end = tokio::time::Instant::now() + TOLD_OF_A_GROUP;
        while let Ok(Some(event)) = tokio::time::timeout_at(end, incoming.recv()).await {
            all.push(event);
        }
        // Stages are numbered along the pipeline.
        all.sort_by_key(|event| std::cmp::Reverse(self.signalled(event)));
        all
    }

    /// Stage that a program has sent a signal to, as far as its stage program can tell; a
    /// terminal's signal is passed on for the whole group.
    fn signalled(&self, event: &FlightEvent) -> Option<usize> {
        match event {
            FlightEvent::Stage(stage, Some(FromStage::Signal(_, false))) => Some(*stage),
            FlightEvent::Stage(stage, None)
                if self.stages.get(stage).is_some_and(|s| !s.finished) =>
            {
                Some(*stage)
            }
            _ => None,
        }
    }

    async fn take(&mut self, event: FlightEvent) {
        match event {
            FlightEvent::Resumed(run, _) if self.silences.is_given_up(run) => {}
            FlightEvent::Stage(stage, Some(said)) => self.heard(stage, said).await,
            FlightEvent::Stage(stage, None) => self.stage_gone(stage).await,
            FlightEvent::Run(run, Ok(Some(message))) => {
                if self.tells_of_life(run, &message) {
                    self.silences.heard(run);
                }
                self.runs[run].received(&message);
                self.received(run, message).await;
            }
            FlightEvent::Run(run, end) => self.run_over(run, end.err()).await,
            FlightEvent::Resumed(run, Ok(resumed)) => self.run_resumed(run, resumed),
            FlightEvent::Resumed(run, Err(gone)) => self.run_gone(run, gone).await,
            FlightEvent::Join(stage, event) => self.join_told(stage, event).await,
        }
    }

    async fn heard(&mut self, stage: usize, said: FromStage) {
        match said {
            FromStage::Ack => {}
            FromStage::Times(times) => self.noted.stage(stage, times),
            FromStage::Data(fd, data) => {
                self.spent.insert(stage);
                if let Some(&(run, stream)) = self.inputs.get(&(stage, fd)) {
                    self.outcome.bytes += data.len() as u64;
                    self.send_to(run, run_input::Kind::Chunk(Chunk { stream, data }));
                }
            }
            FromStage::End(fd) => self.end_input(stage, fd).await,
            FromStage::Credit(fd, bytes) => {
                let credits =
                    self.outputs.get_mut(&(stage, fd)).map(|o| o.credit(bytes)).unwrap_or_default();
                for ((run, stream), bytes) in credits {
                    if run == JOINED {
                        self.joining(stage).into_iter().for_each(|j| j.allow(bytes));
                        continue;
                    }
                    self.send_to(run, run_input::Kind::Credit(Credit { stream, bytes }));
                }
            }
            FromStage::WriteFailed(fd, errno) => {
                tracing::debug!(stage, fd, errno, "an output is closed");
                self.fail_output(stage, fd).await;
            }
            FromStage::Signal(signal, group) => {
                self.spent.insert(stage);
                let runs = self
                    .commands
                    .iter()
                    .filter(|(_, (of, _))| *of == stage)
                    .map(|((run, _), _)| *run);
                self.silences.signalled(stage, signal, runs);
                self.signal(stage, signal, group).await;
            }
            FromStage::Window(size) => {
                let size =
                    WindowSize { rows: size.rows, columns: size.columns, x_pixels: 0, y_pixels: 0 };
                for run in 0..self.runs.len() {
                    self.send_to(run, run_input::Kind::WindowSize(size));
                }
            }
        }
    }

    /// Returns true if a message proves that a command makes progress. Credits and the like do not:
    /// a server can send them forever.
    fn tells_of_life(&self, run: usize, message: &RunOutput) -> bool {
        match &message.kind {
            Some(run_output::Kind::Chunk(Chunk { stream, data })) => {
                let stream = (run, *stream);
                !data.is_empty()
                    && (self.joined.contains_key(&stream) || self.feeds.contains_key(&stream))
            }
            Some(run_output::Kind::Exited(exited)) => {
                let command = self.commands.get(&(run, exited.stage));
                command.is_some_and(|(stage, part)| self.stages[stage].parts[*part].is_none())
            }
            Some(run_output::Kind::Finished(_)) => true,
            _ => false,
        }
    }

    async fn received(&mut self, run: usize, message: RunOutput) {
        match message.kind {
            Some(run_output::Kind::Chunk(Chunk { stream, data })) => {
                self.outcome.bytes += data.len() as u64;
                self.noted.chunk(run);
                if let Some(&(stage, part)) = self.joined.get(&(run, stream)) {
                    self.joining(stage).into_iter().for_each(|j| j.push(part, data.clone()));
                    return;
                }
                let Some(&(stage, fd)) = self.feeds.get(&(run, stream)) else { return };
                let output = self.outputs.get_mut(&(stage, fd)).expect("made with `feeds`");
                let released = output.push((run, stream), data);
                let undelivered = output.take_undelivered();
                self.deliver(stage, fd, released).await;
                if !undelivered.is_empty() {
                    // Written before the command could know that its reader is gone. Locally, this
                    // write would have raised SIGPIPE.
                    self.break_pipe(run, stage).await;
                    self.tell_undelivered(stage, fd, undelivered).await;
                }
            }
            Some(run_output::Kind::End(stream)) => self.end_stream((run, stream)).await,
            Some(run_output::Kind::Credit(Credit { stream, bytes })) => {
                // Ignore credit for a stream that is not an input.
                if let Some((stage, fd)) = self.input_of((run, stream)) {
                    if self.runs[run].given(stream, bytes).is_err() {
                        return self
                            .run_broken(
                                run,
                                "it gives credit for more input than any executor takes",
                            )
                            .await;
                    }
                    self.tell(stage, ForStage::Credit(fd, bytes)).await;
                }
            }
            Some(run_output::Kind::Closed(stream)) => {
                if let Some((stage, fd)) = self.input_of((run, stream)) {
                    self.tell(stage, ForStage::StopReading(fd)).await;
                }
            }
            Some(run_output::Kind::Exited(mut exited)) => {
                self.keep_own(run, &mut exited);
                self.runs[run].keep_shared_offsets(&mut exited);
                self.noted.exited(run, &exited);
                self.part_ended(run, exited.stage, PartEnd::Exited(exited));
            }
            Some(run_output::Kind::Finished(finished)) => self.noted.finished(run, finished.times),
            Some(
                run_output::Kind::Started(_)
                | run_output::Kind::Rejected(_)
                | run_output::Kind::Resumed(_),
            )
            | None => {}
        }
    }

    /// Drops changes that an executor reports outside its own mounts: the gateway looks up and
    /// opens the paths and invalidates caches.
    fn keep_own(&self, run: usize, exited: &mut Exited) {
        let directories = &mut exited.changed_directories;
        if directories.is_empty() {
            return;
        }
        let executor = self.gateway.executors.get(self.runs[run].executor);
        let table = Arc::clone(&self.gateway.view().table);
        let told = directories.len();
        directories.retain(|directory| {
            is_on_mount_of(&table, &executor.name, Path::new(OsStr::from_bytes(&directory.path)))
        });
        let dropped = told - directories.len();
        if dropped > 0 {
            tracing::warn!(
                executor = %executor.name,
                dropped,
                "it tells of changes on mounts that are not its own"
            );
        }
    }

    async fn end_stream(&mut self, stream: RunStream) {
        if let Some((stage, part)) = self.joined.remove(&stream) {
            if let Some(join) = self.stages.get_mut(&stage).and_then(|s| s.join.as_mut()) {
                join.joining.end(part);
            }
            return;
        }
        if let Some(&(stage, fd)) = self.feeds.get(&stream) {
            self.end_stream_of(stage, fd, stream).await;
        }
    }

    async fn end_stream_of(&mut self, stage: usize, fd: u32, stream: RunStream) {
        let released = self.outputs.get_mut(&(stage, fd)).map(|output| output.end(stream));
        self.deliver(stage, fd, released.unwrap_or_default()).await;
    }

    async fn deliver(&mut self, stage: usize, fd: u32, pieces: Vec<Bytes>) {
        for data in pieces {
            self.delivered.entry((stage, fd)).or_default().add(&data);
            self.tell(stage, ForStage::Data(fd, data)).await;
        }
    }

    /// Handles the end of a stage program, which only a kill can cause: kills its command.
    async fn stage_gone(&mut self, stage: usize) {
        let Some(state) = self.stages.get_mut(&stage) else { return };
        state.gone = true;
        if state.finished {
            return;
        }
        let kill = nix::libc::SIGKILL.cast_unsigned();
        let runs =
            self.commands.iter().filter(|(_, (of, _))| *of == stage).map(|((run, _), _)| *run);
        self.silences.signalled(stage, kill, runs);
        self.signal(stage, kill, true).await;
        let inputs: Vec<u32> = self.inputs.keys().filter(|k| k.0 == stage).map(|k| k.1).collect();
        for fd in inputs {
            self.end_input(stage, fd).await;
        }
        let outputs: Vec<u32> = self.outputs.keys().filter(|k| k.0 == stage).map(|k| k.1).collect();
        for fd in outputs {
            self.fail_output(stage, fd).await;
        }
    }

    async fn end_input(&mut self, stage: usize, fd: u32) {
        if let Some((run, stream)) = self.inputs.remove(&(stage, fd)) {
            self.send_to(run, run_input::Kind::End(stream));
        }
    }

    /// Mutes later parts when the reader of ordered parts is gone during one of them: a single
    /// process would have ended there, and so would those before it in the pipeline. An aggregator
    /// has read all parts by then.
    fn mute_later_parts(&mut self, stage: usize) {
        let Some(output) = self.outputs.get(&(stage, 1)) else { return };
        let (part, count) = (output.current(), output.len());
        let parts_of = |stage: usize| self.stages.get(&stage).map_or(0, |s| s.part_count);
        let mut chain = vec![stage];
        chain.retain(|stage| count > 1 && parts_of(*stage) == count);
        while let Some(&first) = chain.last() {
            let before =
                self.pipeline.shape.edges.iter().find(|e| e.to == (first, 0)).map(|e| e.from.0);
            match before.filter(|before| parts_of(*before) == count && !chain.contains(before)) {
                Some(before) => chain.push(before),
                None => break,
            }
        }
        for stage in chain {
            self.outputs
                .get_mut(&(stage, 2))
                .into_iter()
                .for_each(|errors| errors.mute_after(part));
        }
    }

    async fn fail_output(&mut self, stage: usize, fd: u32) {
        self.spent.insert(stage);
        if fd == 1 {
            self.mute_later_parts(stage);
        }
        let closed = self.outputs.get_mut(&(stage, fd)).map(StageOutput::fail).unwrap_or_default();
        for (run, stream) in closed {
            if run == JOINED {
                self.joining(stage).filter(|_| fd == 1).into_iter().for_each(Joining::close);
                continue;
            }
            self.send_to(run, run_input::Kind::Closed(stream));
        }
        let undelivered = self.outputs.get_mut(&(stage, fd)).map(StageOutput::take_undelivered);
        self.tell_undelivered(stage, fd, undelivered.unwrap_or_default()).await;
    }

    async fn signal(&mut self, stage: usize, signal: u32, group: bool) {
        // Signal the aggregator first: it must not take the end of a signalled part for end of
        // input.
        self.signal_join(stage, signal);
        let commands = self.commands.iter().filter(|(_, (s, _))| *s == stage);
        let mut commands: Vec<(usize, usize, u32)> =
            commands.map(|((run, id), (_, part))| (*part, *run, *id)).collect();
        commands.sort_unstable_by(|a, b| b.cmp(a));
        for (part, run, id) in commands {
            if self.stages[&stage].parts[part].is_none() {
                self.send_to(run, run_input::Kind::Signal(Signal { stage: id, signal, group }));
            }
        }
    }

    /// Sends SIGPIPE to the parts of a stage in one run.
    async fn break_pipe(&mut self, run: usize, stage: usize) {
        let signal = nix::libc::SIGPIPE.cast_unsigned();
        let parts = self.commands.iter().filter(|(key, (s, _))| key.0 == run && *s == stage);
        let parts: Vec<(u32, usize)> = parts.map(|(key, (_, part))| (key.1, *part)).collect();
        for (id, part) in parts {
            if self.stages[&stage].parts[part].is_none() {
                self.send_to(
                    run,
                    run_input::Kind::Signal(Signal { stage: id, signal, group: false }),
                );
            }
        }
    }

    /// The command may have exited successfully with its last bytes in transit: its stage program
    /// must learn how many they were, although it can't write them.
    async fn tell_undelivered(&self, stage: usize, fd: u32, undelivered: Vec<Bytes>) {
        for data in undelivered {
            self.tell(stage, ForStage::Data(fd, data)).await;
        }
    }

    fn input_of(&self, stream: RunStream) -> Option<(usize, u32)> {
        self.inputs.iter().find(|(_, s)| **s == stream).map(|(key, _)| *key)
    }

    /// Notes the end of a run's command.
    fn part_ended(&mut self, run: usize, command: u32, end: PartEnd) {
        if let Some(&(stage, part)) = self.commands.get(&(run, command)) {
            if end.is_violent() {
                // Its output is incomplete and must not be aggregated.
                self.signal_join(stage, nix::libc::SIGKILL.cast_unsigned());
            }
            self.stages.entry(stage).and_modify(|s| s.parts[part] = Some(end));
            let mut parts =
                self.commands.iter().filter(|((its, _), (of, _))| *its == run && *of == stage);
            if parts.all(|(_, (_, part))| self.stages[&stage].parts[*part].is_some()) {
                self.silences.ended(run, stage);
            }
        }
    }

    fn send_to(&mut self, run: usize, kind: run_input::Kind) {
        self.runs[run].send(kind);
    }

    async fn tell(&self, stage: usize, message: ForStage) {
        if let Some(state) = self.stages.get(&stage).filter(|s| !s.gone) {
            let _ = state.tell.send(message).await;
        }
    }

    /// Sends the exit status to every stage whose parts have all exited and whose outputs are all
    /// delivered, after invalidating the mounts' caches.
    fn finish_stages(&mut self) {
        while let Some(index) = self.stages.keys().copied().find(|stage| self.is_at_its_end(*stage))
        {
            let state = self.stages.get_mut(&index).expect("found a moment ago");
            state.finished = true;
            let farewell = state.farewell(self.readings[index].as_ref().ok());
            if let ForStage::Exit { status, .. } = &farewell {
                self.outcome.statuses.insert(index, as_shell(*status));
            }
            let (stage, reading) =
                (&self.pipeline.stages[index].enlisted, self.readings[index].as_ref().ok());
            let written = StageChanges::by(self.gateway, stage, reading, state.exits());
            let (gateway, tell) = (Arc::clone(self.gateway), state.tell.clone());
            let (ending, tally) = (self.noted.ending(index, stage), written.tally());
            let is_lost = self.stages[&index].is_lost();
            self.farewells.spawn(async move {
                let refreshing = refresh::refresh(gateway, written);
                if is_lost {
                    // Its mount may be unreachable too.
                    let _ = tokio::time::timeout(REFRESH_OF_LOST, refreshing).await;
                } else {
                    refreshing.await;
                }
                ending.refreshed(tally);
                let _ = tell.send(farewell).await;
            });
        }
    }

    fn is_at_its_end(&self, stage: usize) -> bool {
        let state = &self.stages[&stage];
        let delivered =
            self.outputs.range((stage, 0)..=(stage, u32::MAX)).all(|(_, o)| o.is_done());
        let joined = state.join.as_ref().is_none_or(|j| j.ended.is_some());
        !state.finished
            && delivered
            && joined
            && state.parts.iter().all(Option::is_some)
            && !self.is_held(stage)
    }
}
