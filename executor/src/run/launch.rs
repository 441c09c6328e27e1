//! Starting a run: bounds, checks, pipes, and the job on its way to a supervisor.

use std::{collections::HashMap, sync::Arc};

use posh_proto::executor::{RunSpec, Stage, StartTimes, WrittenFile, descriptor::Source, rejected::Kind, run_output};
use tokio::task::JoinSet;

use super::{
    Report, Run,
    farewells::Farewells,
    inlet::WINDOW_BYTES,
    link::{Admitted, Link},
    plumbing::{PIPE_BYTES, Plumbing},
    times::Clock,
};
use crate::{
    callers::Caller,
    cgroup::RunCgroup,
    error::Refusal,
    load::{Need, Wanted},
    own_mounts::OwnMounts,
    pool::Identified,
    runner::{WAITS_BYTES, wire::Job},
    service::Shared,
    volume::trees_of,
    wiring::Wiring,
};

/// Chunks in a run's queue, and about as much again in HTTP/2.
const OUTPUT_BYTES: usize = 2 << 20;

/// Starts the run, or says why not; then nothing of it has run. Times are taken if there is a clock.
pub async fn start(
    (shared, caller): (&Shared, &Caller),
    mut spec: RunSpec,
    clock: Option<Clock>,
) -> Result<Run, Refusal> {
    if shared.is_draining() {
        return Err(Refusal::new(Kind::ShuttingDown, "the executor is shutting down"));
    }
    let wanted = if spec.ahead { Wanted::Ahead } else { Wanted::Now };
    shared.load.admit_call(caller, wanted)?;
    let share = shared.load.admit_run(caller, need(&spec), wanted)?;
    for stage in &spec.stages {
        caller.require_command(&stage.program).map_err(|refusal| refusal.at(stage.id))?;
    }
    let (mounts, mut client_files) = (std::mem::take(&mut spec.mounts), std::mem::take(&mut spec.client_files));
    let fences;
    (spec.stages, client_files, fences) =
        shared.classifier.classify(caller, shared.policy(), (std::mem::take(&mut spec.stages), client_files)).await?;
    let identify = || shared.pool.identify(caller, &mounts, &client_files);
    let identifying = identify()?;
    let own_mounts = OwnMounts::of(&caller.exports, &mounts, &spec.stages).await?;
    let identifying = match own_mounts.is_empty() {
        true => identifying,
        false => {
            own_mounts.renew().await?;
            // What was seen before may have been what is remembered.
            identify()?
        }
    };
    let trees = trees_of(caller, |export| mounts.iter().any(|mount| mount.export == export));
    let volumes = shared.volumes.begin_run(caller, std::mem::take(&mut spec.volumes), &trees).await;
    let (ahead, to_be_confirmed) = (spec.ahead, spec.to_be_confirmed);
    let mut wiring = Wiring::check(spec)?;
    let count = u32::try_from(wiring.descriptor_count()).unwrap_or(u32::MAX);
    let descriptors = shared.descriptors.clone().try_acquire_many_owned(count);
    let descriptors =
        descriptors.map_err(|_| Refusal::new(Kind::Overloaded, "the executor is at its limit of open files"))?;
    let admitted = Arc::new(Admitted::new(share, descriptors));
    let checked_ns = clock.map_or(0, Clock::now_ns);
    let view = identifying.wait().await?;
    let stages = std::mem::take(&mut wiring.stages);
    let job = Job {
        stages,
        ends: wiring.stage_ends.clone(),
        trace: clock.is_some(),
        fences,
        has_cgroup: shared.cgroups.is_some(),
        ahead,
        to_be_confirmed,
    };
    let Launched { link, plumbing, times, written_files, cgroup } =
        match launch((shared, &admitted), &view, &wiring, (&job, clock)).await {
            // It did not start, so that it may be tried once more.
            Err(Failure::Lost(mut link)) => {
                link.forget_runner_if_dead().await;
                launch((shared, &admitted), &view, &wiring, (&job, clock)).await
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
        farewells: Farewells::new(own_mounts, volumes),
        report: Report::default(),
        written_files,
        signals_taken: 0,
        is_released: false,
        _cgroup: cgroup,
    })
}

/// What a run will hold: its commands, and for each of its streams a pipe of full size and
/// what is on its way between pipe and network.
fn need(spec: &RunSpec) -> Need {
    // One process more each for those that carry what was held to its file.
    let descriptors = spec.stages.iter().flat_map(|stage| &stage.descriptors);
    let held = descriptors.filter(|d| matches!(&d.source, Some(Source::File(file)) if file.held)).count();
    let own_pipes = spec.inlets.len() + spec.merges.len() + spec.outlets.iter().map(|o| o.sources.len()).sum::<usize>();
    let buffered_bytes = OUTPUT_BYTES
        .saturating_add(held.saturating_mul(WAITS_BYTES))
        .saturating_add(own_pipes.saturating_mul(PIPE_BYTES))
        .saturating_add(spec.inlets.len().saturating_mul(WINDOW_BYTES));
    Need { processes: spec.stages.len() + held, buffered_bytes }
}

/// A run whose commands were let go.
struct Launched {
    link: Link,
    plumbing: Plumbing,
    times: Option<StartTimes>,
    written_files: Vec<WrittenFile>,
    cgroup: Option<RunCgroup>,
}

enum Failure {
    Refused(Refusal),
    /// The supervisor ended without a word: nothing has started.
    Lost(Link),
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
    (shared, admitted): (&Shared, &Arc<Admitted>),
    view: &Identified,
    wiring: &Wiring,
    (job, clock): (&Job, Option<Clock>),
) -> Result<Launched, Failure> {
    let (socket, lease) = shared.pool.open(view).await?;
    let mut link = Link::new(socket, lease, admitted.clone());
    let runner_ns = clock.map_or(0, Clock::now_ns);
    let mut plumbing = Plumbing::make(wiring)?;
    let mut ends = plumbing.take_stage_ends(&job.ends)?;
    let mut cgroup = None;
    if let Some(cgroups) = &shared.cgroups {
        let made = cgroups.make(job.stages.len());
        let (run, entrance) =
            made.map_err(|error| Refusal::new(Kind::SpawnFailed, format!("cannot make a cgroup: {error}")))?;
        ends.push(entrance);
        cgroup = Some(run);
    }
    // When sending fails, the supervisor may still have said why.
    let _ = link.send_job(job, ends).await;
    match link.next().await.ok().flatten().and_then(|output| output.kind) {
        Some(run_output::Kind::Started(started)) => {
            let times = clock.zip(started.times).map(|(clock, times)| clock.take_over(times));
            let times = times.map(|times| StartTimes { runner_ns, ..times });
            Ok(Launched { link, plumbing, times, written_files: started.written_files, cgroup })
        }
        Some(run_output::Kind::Rejected(rejected)) => {
            link.close().await;
            Err(Refusal::new(rejected.kind(), rejected.message).at(rejected.stage).into())
        }
        _ => Err(Failure::Lost(link)),
    }
}

/// The stages that write to a terminal.
fn terminal_stages(stages: &[Stage]) -> Vec<u32> {
    let has_terminal = |stage: &&Stage| stage.descriptors.iter().any(|d| matches!(d.source, Some(Source::Pty(_))));
    stages.iter().filter(has_terminal).map(|stage| stage.id).collect()
}
