//! Starting a run: bounds, checks, pipes, and the job on its way to a supervisor.

use std::collections::HashMap;

use posh_proto::executor::{
    ClientFile, MountPoint, RunSpec, Stage, StartTimes, WrittenFile, descriptor::Source, rejected::Kind, run_output,
};
use tokio::task::JoinSet;

use super::{Report, Run, link::Link, plumbing::Plumbing, times::Clock};
use crate::{error::Refusal, own_mounts::OwnMounts, pool::Lease, runner::wire::Job, service::Shared, wiring::Wiring};

/// Starts the run, or says why not; then nothing of it has run. Times are taken if there is a clock.
pub async fn start(shared: &Shared, mut spec: RunSpec, clock: Option<Clock>) -> Result<Run, Refusal> {
    let overloaded = |what: &str| Refusal::new(Kind::Overloaded, format!("the executor is at its limit of {what}"));
    if shared.is_draining() {
        return Err(Refusal::new(Kind::ShuttingDown, "the executor is shutting down"));
    }
    let run_permit = shared.runs.clone().try_acquire_owned().map_err(|_| overloaded("concurrent runs"))?;
    let place =
        Place { mounts: std::mem::take(&mut spec.mounts), client_files: std::mem::take(&mut spec.client_files) };
    let own_mounts = OwnMounts::of(&shared.config, &place.mounts, &spec.stages).await?;
    own_mounts.renew().await?;
    let mut wiring = Wiring::check(spec)?;
    let count = u32::try_from(wiring.descriptor_count()).unwrap_or(u32::MAX);
    let descriptors = shared.descriptors.clone().try_acquire_many_owned(count).map_err(|_| overloaded("open files"))?;
    let checked_ns = clock.map_or(0, Clock::now_ns);
    let stages = std::mem::take(&mut wiring.stages);
    let job = Job { stages, ends: wiring.stage_ends.clone(), trace: clock.is_some() };
    let Launched { link, lease, plumbing, times, written_files } =
        match launch(shared, &place, &wiring, (&job, clock)).await {
            // It did not start, so that it may be tried once more.
            Err(Failure::Lost(lease)) => {
                lease.forget_if_dead().await;
                launch(shared, &place, &wiring, (&job, clock)).await
            }
            other => other,
        }
        .map_err(Failure::into_refusal)?;
    Ok(Run {
        link,
        streams: JoinSet::new(),
        inlets: HashMap::new(),
        gates: HashMap::new(),
        ptys: Vec::new(),
        terminal_stages: terminal_stages(&job.stages),
        plan: Some((wiring, plumbing)),
        stages_left: job.stages.len(),
        start_times: times.map(|times| StartTimes { checked_ns, ..times }),
        own_mounts,
        held: Vec::new(),
        report: Report::default(),
        written_files,
        signals_taken: 0,
        _lease: lease,
        _permits: [run_permit, descriptors],
    })
}

/// Where a run's commands believe to be.
struct Place {
    mounts: Vec<MountPoint>,
    client_files: Vec<ClientFile>,
}

/// A run whose commands were let go.
struct Launched {
    link: Link,
    lease: Lease,
    plumbing: Plumbing,
    times: Option<StartTimes>,
    written_files: Vec<WrittenFile>,
}

enum Failure {
    Refused(Refusal),
    /// The supervisor ended without a word: nothing has started.
    Lost(Lease),
}

impl Failure {
    fn into_refusal(self) -> Refusal {
        match self {
            Self::Refused(refusal) => refusal,
            Self::Lost(_) => Refusal::new(Kind::SpawnFailed, "the run's supervisor ended before anything had started"),
        }
    }
}

impl From<Refusal> for Failure {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(refusal)
    }
}

/// Hands the job to a fresh supervisor; returns once its commands run.
async fn launch(
    shared: &Shared,
    place: &Place,
    wiring: &Wiring,
    (job, clock): (&Job, Option<Clock>),
) -> Result<Launched, Failure> {
    let (socket, lease) = shared.pool.open(&shared.config.exports, &place.mounts, &place.client_files).await?;
    let runner_ns = clock.map_or(0, Clock::now_ns);
    let mut plumbing = Plumbing::make(wiring)?;
    let ends = plumbing.take_stage_ends(&job.ends)?;
    let mut link = Link::new(socket);
    // When sending fails, the supervisor may still have said why.
    let _ = link.send_job(job, ends).await;
    match link.next().await.ok().flatten().and_then(|output| output.kind) {
        Some(run_output::Kind::Started(started)) => {
            let times = clock.zip(started.times).map(|(clock, times)| clock.take_over(times));
            let times = times.map(|times| StartTimes { runner_ns, ..times });
            Ok(Launched { link, lease, plumbing, times, written_files: started.written_files })
        }
        Some(run_output::Kind::Rejected(rejected)) => {
            link.close().await;
            Err(Refusal::new(rejected.kind(), rejected.message).at(rejected.stage).into())
        }
        _ => Err(Failure::Lost(lease)),
    }
}

/// The stages that write to a terminal.
fn terminal_stages(stages: &[Stage]) -> Vec<u32> {
    let has_terminal = |stage: &&Stage| stage.descriptors.iter().any(|d| matches!(d.source, Some(Source::Pty(_))));
    stages.iter().filter(has_terminal).map(|stage| stage.id).collect()
}
