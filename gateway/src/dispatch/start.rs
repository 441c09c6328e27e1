//! Directive, acknowledgement, start. Runs are requested only after every stage has acknowledged. A
//! run that an executor refuses was never started, so its stages may still run locally.

use std::{
    collections::BTreeMap,
    fmt,
    sync::Arc,
    time::{Duration, Instant},
};

use posh_proto::{
    executor::{
        Resume, RunInput, RunOutput, RunSpec, Started, WrittenFile, rejected::Kind as Rejection,
        run_output,
    },
    packed,
};
use posh_reach::{Allowance, Outputs};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;

use super::{
    Connections,
    resume::{Gone, Order, Resumed, resume},
};
use crate::{
    assembly::{Pipeline, read_stat},
    backstops::{Backstop, Backstops},
    executors::{Executor, ExecutorConnection},
    join::{self, Joining},
    lower::{JoinedHere, Lowered, RunStream},
    model::ReasonKind,
    plan::{ExecutorId, LineEnds, Need, PipelineFacts, Placement, Plan},
    stage_link::{ForStage, FromStage, StageLink},
    state::Gateway,
    trace::{RunStart, Tracer},
};

/// Capacity of the queue to an executor: inputs are bounded by credit, other messages by this.
pub(super) const QUEUE: usize = 256;
/// Timeout for acknowledgements. A running stage program answers a directive in microseconds.
const ACK_TIMEOUT: Duration = Duration::from_secs(5);
/// Poll interval for a silent stage program: a signal or a debugger may have stopped it, which
/// sends no event to the gateway.
const STOPPED_LOOK: Duration = Duration::from_millis(10);
/// Timeout for a start. An executor answers within a round trip and a few forks.
const START_TIMEOUT: Duration = Duration::from_secs(8);

/// Result of a pipeline's remote stages.
#[derive(Debug, Default)]
pub struct PipelineOutcome {
    /// Exit status as the shell sees it, by stage.
    pub statuses: BTreeMap<usize, u32>,
    /// Bytes of streams, both ways.
    pub bytes: u64,
}

/// A started run.
#[derive(Debug)]
pub struct Flight {
    /// Executor of the run.
    pub executor: ExecutorId,
    /// Connection of the run.
    pub connection: Arc<ExecutorConnection>,
    /// Messages to the executor.
    pub input: mpsc::Sender<RunInput>,
    /// Messages from the executor.
    pub output: Outputs,
    /// Times of the start, for the trace.
    pub call: RunStart,
    /// Sizes of the files that its redirects write to.
    pub written_files: Vec<WrittenFile>,
}

impl Flight {
    /// Sets the times of sending the specification and of the start.
    fn since(self, sent_ns: u64, tracer: &Tracer) -> Self {
        Self { call: RunStart { sent_ns, started_ns: tracer.now_ns(), ..self.call }, ..self }
    }
}

/// All runs of a pipeline, started, with their streams' connections.
pub struct Flights {
    /// In the order of `lowered.runs`.
    pub flights: Vec<Flight>,
    /// See [`Lowered`].
    pub lowered: Lowered,
    /// Aggregators on this machine, by stage.
    pub joins: BTreeMap<usize, StartedJoin>,
    /// Tracer of the session.
    pub tracer: Tracer,
}

/// A running aggregator that waits for its parts.
pub struct StartedJoin {
    /// Handle of the aggregator.
    pub joining: Joining,
    /// Its events.
    pub told: mpsc::Receiver<join::AggregatorEvent>,
    /// Its input streams, part by part.
    pub inputs: Vec<RunStream>,
}

/// Reason why nothing was started.
#[derive(Debug)]
pub struct StartRefusal {
    /// Executor that refused.
    pub executor: ExecutorId,
    fault: RefusalKind,
    reason: String,
}

/// Kind of a refusal; determines the next plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RefusalKind {
    /// A seam of a split is not at the end of a line.
    Seam,
    /// An operand of a split is not a regular file.
    NotWhole,
    /// The executor can't run this pipeline.
    Executor,
    /// The executor is overloaded.
    Full,
    /// Lost before it had started a read-only run.
    Lost,
    /// A run that does more than read may have been started: don't run it again.
    Unclear,
}

/// Reason for a missing start message.
enum NotOpened {
    Refused(StartRefusal),
    /// Lost when the executor may have received the specification, with the reason.
    Lost(Arc<ExecutorConnection>, String),
}

impl fmt::Display for StartRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.reason)
    }
}

impl StartRefusal {
    /// Returns true if the executor is gone; its mounts may be too.
    #[must_use]
    pub fn is_loss(&self) -> bool {
        self.fault == RefusalKind::Lost
    }

    /// Returns true if the commands may have run: they can't run locally.
    #[must_use]
    pub fn is_unclear(&self) -> bool {
        self.fault == RefusalKind::Unclear
    }

    /// Refusal by an executor that was lost when it may have started the commands.
    #[must_use]
    pub fn unclear(executor: &Executor, why: &str, known: &str) -> Self {
        let place = format!("executor {} at {}", executor.name, executor.address);
        let reason = format!("{place} was lost as the command was started there ({why}); {known}");
        Self { executor: executor.id, fault: RefusalKind::Unclear, reason }
    }

    /// Changes the facts so that the next plan does not meet the same refusal.
    pub fn apply(&self, gateway: &Gateway, facts: &mut PipelineFacts) {
        match self.fault {
            RefusalKind::Seam => {
                return facts.stages.iter_mut().for_each(|s| s.line_ends = LineEnds::Unknown);
            }
            RefusalKind::NotWhole => {
                return facts
                    .stages
                    .iter_mut()
                    .filter(|s| s.whole_files)
                    .for_each(|s| s.operands.clear());
            }
            RefusalKind::Executor
            | RefusalKind::Full
            | RefusalKind::Lost
            | RefusalKind::Unclear => {}
        }
        let name = &gateway.executors.get(self.executor).name;
        let reason = ReasonKind::Executor.because(format!("{name} refused: {}", self.reason));
        for stage in facts.stages.iter_mut().filter(|s| !matches!(s.need, Need::Here(_))) {
            stage.refusals.insert(self.executor, reason.clone());
        }
    }
}

/// Sends every stage its directive and waits for the acknowledgements. If one is missing, no stage
/// runs remotely.
pub async fn tell(
    mut pipeline: Pipeline,
    plan: &mut Plan,
    backstops: &Backstops,
    tracer: &Tracer,
) -> Pipeline {
    for (index, (stage, placement)) in pipeline.stages.iter().zip(&plan.placements).enumerate() {
        if let Placement::Here(reason) = placement {
            stage.tell(ForStage::RunHere(reason.to_string())).await;
            tracer.runs_here(index, stage, reason);
        }
    }
    for (index, placement) in plan.placements.iter().enumerate() {
        if matches!(placement, Placement::Remote(_)) {
            let stage = &pipeline.stages[index];
            // Credit and data decide which of these are forwarded: files that the server opens get
            // none.
            let named = stage.enlisted.named_descriptors().map(|d| (d.fd, d.writes()));
            let (writes, reads): (Vec<_>, Vec<_>) = [(0, false), (1, true), (2, true)]
                .into_iter()
                .chain(named)
                .filter(|(fd, _)| stage.enlisted.descriptor(*fd).is_some())
                .partition(|(_, writes)| *writes);
            let numbers = |list: Vec<(u32, bool)>| list.into_iter().map(|(fd, _)| fd).collect();
            stage.tell(ForStage::Remote { reads: numbers(reads), writes: numbers(writes) }).await;
        }
    }
    if !all_acknowledge(&mut pipeline, plan, backstops).await {
        for placement in &mut plan.placements {
            if matches!(placement, Placement::Remote(_)) {
                *placement = Placement::Here(
                    ReasonKind::Placement
                        .because("a stage of its pipeline ended before it was started"),
                );
            }
        }
        plan.fused.iter_mut().for_each(|f| *f = false);
    }
    pipeline
}

async fn all_acknowledge(pipeline: &mut Pipeline, plan: &Plan, backstops: &Backstops) -> bool {
    for (stage, placement) in pipeline.stages.iter_mut().zip(&plan.placements) {
        if matches!(placement, Placement::Remote(_)) && !acknowledges(stage, backstops).await {
            return false;
        }
    }
    true
}

/// Waits until a stage acknowledges, ends, or is stopped.
async fn acknowledges(stage: &mut StageLink, backstops: &Backstops) -> bool {
    let pid = stage.enlisted.pid;
    let began = Instant::now();
    while began.elapsed() < ACK_TIMEOUT {
        match tokio::time::timeout(STOPPED_LOOK, stage.hear()).await {
            Ok(said) => return matches!(said, Some(FromStage::Ack)),
            Err(_) if read_stat(pid).is_none_or(|stat| stat.is_stopped()) => return false,
            Err(_) => {}
        }
    }
    backstops.reached(Backstop::Acknowledgement, &stage.enlisted);
    false
}

/// Starts all runs of a pipeline, or none.
///
/// # Errors
/// [`StartRefusal`] when an executor refused or could not be reached. Runs that others had started
/// by then are cancelled: they are parts of one split, so they only read, and their output is
/// dropped.
pub async fn start(
    gateway: &Gateway,
    connections: &Connections,
    mut lowered: Lowered,
    tracer: &Tracer,
) -> Result<Flights, StartRefusal> {
    let joins = start_joins(&mut lowered)?;
    let mut opening = Vec::new();
    for run in &mut lowered.runs {
        run.spec.trace = tracer.is_on();
        let connection = connections.get(&run.executor).cloned();
        let executor = gateway.executors.get(run.executor);
        opening.push(tokio::spawn(open_in_time(
            executor,
            connection,
            run.spec.clone(),
            tracer.clone(),
        )));
    }
    let mut flights = Vec::new();
    for handle in opening {
        flights.push(handle.await.expect("opening a run does not panic")?);
    }
    Ok(Flights { flights, lowered, joins, tracer: tracer.clone() })
}

/// Starts the aggregators before any run: without one, no part may start.
fn start_joins(lowered: &mut Lowered) -> Result<BTreeMap<usize, StartedJoin>, StartRefusal> {
    let mut joins = BTreeMap::new();
    for (stage, JoinedHere { recipe, programs, inputs }) in std::mem::take(&mut lowered.joins) {
        let executor = lowered.runs[inputs[0].0].executor;
        let started = Joining::start(&recipe, &programs);
        let (joining, told) = started.map_err(|error| {
            refusal(executor, format!("its parts can't be joined here: {error}"))
        })?;
        joins.insert(stage, StartedJoin { joining, told, inputs });
    }
    Ok(joins)
}

fn refusal(executor: ExecutorId, reason: impl Into<String>) -> StartRefusal {
    StartRefusal { executor, fault: RefusalKind::Executor, reason: reason.into() }
}

/// Starts one run.
pub(super) async fn open_in_time(
    executor: Arc<Executor>,
    connection: Option<Arc<ExecutorConnection>>,
    spec: RunSpec,
    tracer: Tracer,
) -> Result<Flight, StartRefusal> {
    let sent_ns = tracer.now_ns();
    let connection = connection.ok_or_else(|| refusal(executor.id, "it is not connected"))?;
    let connection = executor.in_place_of(connection).ok_or_else(|| {
        let reason = "its connection was lost before anything was sent".to_owned();
        StartRefusal { executor: executor.id, fault: RefusalKind::Lost, reason }
    })?;
    let sent = Instant::now();
    let order = Order {
        resume: Resume { run_id: spec.run_id.clone(), ..Resume::default() },
        allowance: Allowance::of(&spec),
    };
    let kept = spec.grace_ms > 0;
    let opened = match tokio::time::timeout(
        START_TIMEOUT,
        open(executor.id, connection.clone(), spec),
    )
    .await
    {
        Ok(opened) => opened,
        Err(_) => Err(NotOpened::Lost(connection, "it did not start the run in time".to_owned())),
    };
    let opened = match opened {
        Err(NotOpened::Lost(connection, why)) => {
            executor.lost(&connection, &why);
            match kept {
                true => ask_for(&executor, connection, &why, sent.elapsed(), order).await,
                false => Err(StartRefusal {
                    executor: executor.id,
                    fault: RefusalKind::Lost,
                    reason: why,
                }),
            }
        }
        Err(NotOpened::Refused(refusal)) => Err(refusal),
        Ok(flight) => Ok(flight),
    };
    match opened {
        Ok(flight) => Ok(flight.since(sent_ns, &tracer)),
        Err(refusal) => {
            tracer.refused(executor.name.to_string(), sent_ns, &refusal);
            Err(refusal)
        }
    }
}

async fn open(
    executor: ExecutorId,
    connection: Arc<ExecutorConnection>,
    spec: RunSpec,
) -> Result<Flight, NotOpened> {
    let (input, requests) = mpsc::channel(QUEUE);
    let allowance = Allowance::of(&spec);
    let first = packed::pack(spec)
        .map_err(|large| NotOpened::Refused(refusal(executor, large.to_string())))?;
    let first = RunInput { kind: Some(first) };
    let _ = input.send(first).await;
    let lost = |status: &Status| NotOpened::Lost(connection.clone(), status.message().to_owned());
    let response = connection.client.clone().run(ReceiverStream::new(requests), allowance).await;
    let mut output = match response {
        Ok(output) => output,
        Err(status) if was_never_sent(&status) => {
            let reason = status.message().to_owned();
            return Err(NotOpened::Refused(StartRefusal {
                executor,
                fault: RefusalKind::Lost,
                reason,
            }));
        }
        Err(status) => return Err(lost(&status)),
    };
    let first = output.message().await.map_err(|status| lost(&status))?;
    flight(executor, connection.clone(), input, output, first).map_err(|refused| match refused {
        Some(refusal) => NotOpened::Refused(refusal),
        None => NotOpened::Lost(
            connection,
            "it answered a run with something else than a start".to_owned(),
        ),
    })
}

/// Interprets the first message of a run; `Err(None)` if it is neither a start nor a rejection.
fn flight(
    executor: ExecutorId,
    connection: Arc<ExecutorConnection>,
    input: mpsc::Sender<RunInput>,
    output: Outputs,
    first: Option<RunOutput>,
) -> Result<Flight, Option<StartRefusal>> {
    match first.and_then(|first| first.kind) {
        Some(run_output::Kind::Started(Started { times, written_files })) => {
            let call = RunStart { times, ..RunStart::default() };
            Ok(Flight { executor, connection, input, output, call, written_files })
        }
        Some(run_output::Kind::Rejected(rejected)) => {
            let fault = match rejected.kind() {
                Rejection::Seam => RefusalKind::Seam,
                Rejection::NotWhole => RefusalKind::NotWhole,
                Rejection::Overloaded => RefusalKind::Full,
                _ => RefusalKind::Executor,
            };
            Err(Some(StartRefusal { executor, fault, reason: rejected.message }))
        }
        _ => Err(None),
    }
}

/// Asks the executor if the run has started: the connection was lost between the specification and
/// its answer, and the run does more than read.
async fn ask_for(
    executor: &Arc<Executor>,
    lost: Arc<ExecutorConnection>,
    why: &str,
    silence: Duration,
    order: Order,
) -> Result<Flight, StartRefusal> {
    let unclear = |known: &str| StartRefusal::unclear(executor, why, known);
    match resume(Arc::clone(executor), lost, silence, order).await {
        Ok(Resumed { connection, input, mut output }) => {
            let first = output.message().await.map_err(|status| unclear(status.message()))?;
            flight(executor.id, connection, input, output, first)
                .map_err(|refused| refused.unwrap_or_else(|| unclear(why)))
        }
        Err(Gone::NeverCame) => Err(refusal(executor.id, why)),
        Err(gone) => Err(unclear(gone.sentence())),
    }
}

/// Returns true if there was no connection to send on.
fn was_never_sent(status: &Status) -> bool {
    let causes = std::iter::successors(std::error::Error::source(status), |cause| cause.source());
    let mut texts = causes.map(ToString::to_string).chain([status.message().to_owned()]);
    texts.any(|text| text.contains("connect error") || text.contains("its ssh has ended"))
}
