//! Starts a prepared run: its view, its pipes, and its job for a supervisor.

use std::{collections::HashMap, sync::Arc, time::Duration};

use posh_proto::executor::{
    Stage, StartTimes, WrittenFile, descriptor::Source, rejected::Kind, run_output,
};
use tokio::task::JoinSet;

use super::{
    RunOrigin, RunReport, StartedRun,
    farewells::Farewells,
    link::{Admitted, RunLink},
    plumbing::Plumbing,
    prepare::{Prepared, Rest},
    times::Clock,
};
use crate::{
    admission::Denied,
    callers::Caller,
    cgroup::RunCgroup,
    classifier::{Passing, Turns},
    error::Refusal,
    own_mounts::OwnMounts,
    policy::Policy,
    pool::Identified,
    runner::wire::SupervisorJob,
    service::ServiceState,
    volume::{ShownVolumes, trees_of},
    wiring::Wiring,
};

/// Longest turn: a start takes some milliseconds, and on a busy machine some tens.
const LONGEST_TURN: Duration = Duration::from_millis(200);

/// Refuses a run whose caller has lost a right since it was checked: it may have waited for its
/// turn.
fn check_standing(
    shared: &ServiceState,
    origin: &RunOrigin,
    policy: &Arc<Policy>,
) -> Result<(), Refusal> {
    let refused = |why: String| Err(Refusal::new(Kind::NotAllowed, why));
    let is_same = match shared.admission.standing(&origin.proof) {
        Ok(Some(caller)) => caller == origin.caller,
        Ok(None) => true,
        Err(Denied(why)) => return refused(why),
    };
    match is_same && Arc::ptr_eq(policy, &shared.policy()) {
        true => Ok(()),
        false => refused(
            "the executor's configuration has changed since this was asked for; ask again"
                .to_owned(),
        ),
    }
}

/// Starts the run, or refuses it; then nothing of it has run. Takes times if there is a clock.
pub async fn start(
    shared: &Arc<ServiceState>,
    origin: &RunOrigin,
    prepared: Prepared,
    clock: Option<Clock>,
) -> Result<StartedRun, Refusal> {
    let caller = &*origin.caller;
    let Prepared {
        spec,
        client_files,
        fences,
        mut wiring,
        share,
        specification_bytes,
        large_turn,
        policy,
        ..
    } = prepared;
    let Rest { mounts, volumes } = spec;
    let identify = || shared.pool.identify(caller, &mounts, &client_files);
    let identifying = identify()?;
    let own_mounts = OwnMounts::of(caller, &mounts, &wiring.stages).await?;
    let identifying = match own_mounts.is_empty() {
        true => identifying,
        false => {
            own_mounts.renew().await?;
            // The first look may have seen cached state.
            identify()?
        }
    };
    let shown = ShownVolumes::named_in(caller, &volumes);
    let trees = trees_of(caller, |export| mounts.iter().any(|mount| mount.export == export));
    let volumes = shared.volumes.begin_run(caller, volumes, &trees).await;
    let admitted = Arc::new(Admitted::new(share, shared.admission.queued(caller)));
    let checked_ns = clock.map_or(0, Clock::now_ns);
    let view = identifying.wait().await?;
    let stages = std::mem::take(&mut wiring.stages);
    let job = SupervisorJob {
        stages,
        ends: wiring.stage_ends.clone(),
        trace: clock.is_some(),
        fences,
        has_cgroup: shared.cgroups.is_some(),
    };
    let turn = LaunchTurn::of(&shared.launches, caller).await;
    check_standing(shared, origin, &policy)?;
    let view = ShownView { view, shown };
    let launched = match launch(shared, &admitted, &view, &wiring, &job, clock).await {
        // Nothing has started, so that a second attempt is safe.
        Err(Failure::Lost(mut link)) => {
            link.forget_runner_if_dead().await;
            launch(shared, &admitted, &view, &wiring, &job, clock).await
        }
        other => other,
    };
    turn.end();
    let Launched { link, plumbing, times, written_files, cgroup } =
        launched.map_err(Failure::into_refusal)?;
    let (terminal_stages, stages_left) = (terminal_stages(&job.stages), job.stages.len());
    drop((job, large_turn));
    admitted.has_begun(usize::MAX, specification_bytes);
    Ok(StartedRun {
        link,
        streams: JoinSet::new(),
        inlets: HashMap::new(),
        gates: HashMap::new(),
        ptys: Vec::new(),
        terminal_stages,
        plan: Some((wiring, plumbing)),
        stages_left,
        start_times: times.map(|times| StartTimes { checked_ns, ..times }),
        farewells: Farewells::new(own_mounts, volumes),
        report: RunReport::default(),
        written_files,
        signals_taken: 0,
        _cgroup: cgroup,
        admitted,
    })
}

/// Starting commands is long work for the kernel; see
/// [`launches_of_one`](crate::service::launches_of_one).
///
/// A start that waits itself (a named pipe is opened, a file system hangs) uses no processor, and
/// may wait for a later start: a turn ends after [`LONGEST_TURN`]. It also lasts that long when its
/// run is given up meanwhile, since work that has begun continues for a while.
struct LaunchTurn(Option<Passing>);

impl LaunchTurn {
    /// Waits for the turn.
    async fn of(launches: &Turns, caller: &Caller) -> Self {
        // Without identities there is only one caller.
        if caller.identity.is_none() {
            return Self(None);
        }
        Self(Some(launches.passing(caller, LONGEST_TURN).await))
    }

    /// Ends the turn after the start.
    fn end(self) {
        self.0.into_iter().for_each(Passing::end);
    }
}

/// A run whose commands have started.
struct Launched {
    link: RunLink,
    plumbing: Plumbing,
    times: Option<StartTimes>,
    written_files: Vec<WrittenFile>,
    cgroup: Option<RunCgroup>,
}

enum Failure {
    Refused(Refusal),
    /// The supervisor ended without a message: nothing has started.
    Lost(RunLink),
}

impl Failure {
    fn into_refusal(self) -> Refusal {
        match self {
            Self::Refused(refusal) => refusal,
            Self::Lost(_) => Refusal::new(
                Kind::SpawnFailed,
                "the run's supervisor ended before anything had started: it was killed, or looked \
                 at more than its memory holds",
            ),
        }
    }
}

impl From<Refusal> for Failure {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(refusal)
    }
}

/// The view of a run, and what its workstation's volumes show meanwhile.
struct ShownView {
    view: Identified,
    shown: ShownVolumes,
}

/// Hands the job to a new supervisor; returns once its commands run.
async fn launch(
    shared: &Arc<ServiceState>,
    admitted: &Arc<Admitted>,
    ShownView { view, shown }: &ShownView,
    wiring: &Wiring,
    job: &SupervisorJob,
    clock: Option<Clock>,
) -> Result<Launched, Failure> {
    let (socket, lease) = shared.pool.open(view).await?;
    // After all waits: the run begins here.
    shown.require(shared, view.roots())?;
    let mut link = RunLink::new(socket, lease, admitted.clone());
    let runner_ns = clock.map_or(0, Clock::now_ns);
    let mut plumbing = Plumbing::make(wiring, view.user())?;
    let mut ends = plumbing.take_stage_ends(&job.ends)?;
    let mut cgroup = None;
    if let Some(cgroups) = &shared.cgroups {
        let made = cgroups.make(job.stages.len());
        let (run, entrance) = made.map_err(|error| {
            Refusal::new(Kind::SpawnFailed, format!("cannot make a cgroup: {error}"))
        })?;
        ends.push(entrance);
        cgroup = Some(run);
    }
    // Even if the send fails, the supervisor may have sent its reason.
    let _ = link.send_job(job, ends).await;
    match link.next().await.ok().flatten().and_then(|told| told.output.kind) {
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
    let has_terminal =
        |stage: &&Stage| stage.descriptors.iter().any(|d| matches!(d.source, Some(Source::Pty(_))));
    stages.iter().filter(has_terminal).map(|stage| stage.id).collect()
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use tokio::time::timeout;

    use super::*;
    use crate::Config;

    const PATIENCE: Duration = Duration::from_secs(20);

    fn caller(identity: Option<&str>) -> Caller {
        Caller {
            identity: identity.map(str::to_owned),
            ..Caller::anybody(&Config::new(Vec::new()))
        }
    }

    #[tokio::test]
    async fn one_identity_starts_few_runs_at_a_time_and_keeps_nobody_else_waiting() {
        let launches = Turns::new(1);
        let [ada, bob] = [Some("ada"), Some("bob")].map(caller);
        let first = LaunchTurn::of(&launches, &ada).await;
        timeout(PATIENCE, LaunchTurn::of(&launches, &bob)).await.unwrap().end();
        assert!(timeout(LONGEST_TURN / 4, LaunchTurn::of(&launches, &ada)).await.is_err());
        first.end();
        timeout(PATIENCE, LaunchTurn::of(&launches, &ada)).await.unwrap().end();
    }

    #[tokio::test]
    async fn a_start_that_hangs_or_is_given_up_has_its_turn_for_a_while() {
        let launches = Turns::new(1);
        let ada = caller(Some("ada"));
        let begun = Instant::now();
        drop(LaunchTurn::of(&launches, &ada).await);
        timeout(PATIENCE, LaunchTurn::of(&launches, &ada)).await.unwrap().end();
        assert!(begun.elapsed() >= LONGEST_TURN);
    }

    #[tokio::test]
    async fn who_is_alone_waits_for_no_turn() {
        let launches = Turns::new(1);
        let anybody = caller(None);
        let turns =
            [LaunchTurn::of(&launches, &anybody).await, LaunchTurn::of(&launches, &anybody).await];
        turns.into_iter().for_each(LaunchTurn::end);
    }
}
