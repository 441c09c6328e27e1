//! Carries out one pipeline: resolve its commands, plan, send each stage its directive, start the
//! runs once all have acknowledged, and relay until everything has ended.

mod again;
mod ending;
mod flight;
mod listings;
mod on_mounts;
pub mod output;
mod refresh;
mod remake;
mod resume;
mod settle;
mod start;
mod verify;
mod write_error;

use std::{
    collections::BTreeMap,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use fs_mapper::{MountFlags, MountTable, Resolution, config::Scheduler};
use posh_annotations::{FileAttribute, ToolVersion};
use posh_proto::rule::{self, Rule};

use crate::{
    assembly::{Pipeline, PipelineShape},
    enlisted::{DescriptorKind, Enlisted},
    executors::{Executor, ExecutorConnection},
    explain,
    facts::{self, ResolvedCommand, Surroundings, World},
    fresh,
    lower::{Builder, Lowered},
    model::Edge,
    model::{LocalReason, ReasonKind},
    peers::Peer,
    plan::{
        self, ExecutorId, Need, PipelineFacts, Placement, Plan, PlanSettings, Site, StageFacts,
    },
    probe::Connected,
    report::{PipelineReport, StageReport},
    session::ShellSession,
    stage_link::ForStage,
    state::{Gateway, View},
    trace::Tracer,
};

/// Number of plans: an executor may refuse one (a file without a newline at a seam, a path that
/// leaves the export). The next plan drops the split, then the executor.
const ATTEMPTS: usize = 3;

/// Attributes for which a command must see all users and groups.
const OWNERS: [FileAttribute; 2] = [FileAttribute::Owner, FileAttribute::CopiedOwner];

/// Connections of executors that a pipeline may use.
type Connections = BTreeMap<ExecutorId, Arc<ExecutorConnection>>;

/// Carries out a complete pipeline until all its stages have ended.
pub async fn carry_out(gateway: Arc<Gateway>, pipeline: Pipeline) {
    let number = gateway.next_pipeline();
    let session = pipeline.stages.iter().find_map(|s| gateway.sessions.get(&s.enlisted.session));
    if let Some(session) = &session {
        session.reports.begin();
    }
    let id = format!("{}-{number}", std::process::id());
    let tracer = Tracer::new(session.as_ref().and_then(|s| s.trace.clone()), number);
    let report = if pipeline.stays {
        let explain = session.as_ref().is_some_and(|s| s.explain);
        leave_here(&gateway, pipeline, explain, &tracer).await
    } else {
        Some(carry_out_as(&gateway, pipeline, session.as_ref(), &id, &tracer).await)
    };
    if let Some(session) = &session {
        session.reports.end(report.map(|report| PipelineReport { pipeline: number, ..report }));
    }
}

/// Handles a pipeline that is purely local. Its report costs more than the pipeline itself, so it
/// is made only on request.
async fn leave_here(
    gateway: &Arc<Gateway>,
    pipeline: Pipeline,
    explain: bool,
    tracer: &Tracer,
) -> Option<PipelineReport> {
    let began = Instant::now();
    tracer.assembled(&pipeline.stages);
    let view = gateway.view();
    let mut reasons = Vec::new();
    for (index, stage) in pipeline.stages.iter().enumerate() {
        let reason = why_it_stays(gateway, &world(gateway, &view), &stage.enlisted);
        stage.tell(ForStage::RunHere(reason.to_string())).await;
        tracer.runs_here(index, stage, &reason);
        reasons.push(reason);
    }
    let setup = began.elapsed();
    if !explain {
        return None;
    }
    let commands: Vec<Arc<Enlisted>> =
        pipeline.stages.iter().map(|s| Arc::clone(&s.enlisted)).collect();
    let subject = Subject {
        commands: &commands,
        shape: &pipeline.shape,
        split: None,
        tracer: &Tracer::default(),
    };
    let mut planned = Planned::make(gateway, &world(gateway, &view), &subject).await;
    for (placement, reason) in planned.plan.placements.iter_mut().zip(reasons) {
        // The plan may give a more specific reason for a stage without files on mounts.
        if matches!(placement, Placement::Remote(_)) || reason.kind != ReasonKind::NothingOnMounts {
            *placement = Placement::Here(reason);
        }
    }
    let outcome = start::PipelineOutcome::default();
    let costs = Costs { setup, wall: began.elapsed(), outcome: &outcome };
    Some(report(gateway, &commands, &pipeline.shape, &planned, &costs))
}

/// Reason for running a stage locally; starts a volume's prefetch of input that is almost cached.
fn why_it_stays(gateway: &Gateway, world: &World<'_>, stage: &Enlisted) -> LocalReason {
    let reason = stage.stays.clone().unwrap_or(LocalReason::nothing_on_mounts());
    let told = (reason.kind != ReasonKind::NothingOnMounts)
        .then(|| gateway.volumes.prefetch(world, stage))
        .flatten();
    told.map_or_else(|| reason.clone(), |words| reason.with(&words))
}

/// Inspects a stage as soon as it enlists.
pub fn look_at_once(gateway: &Gateway, stage: &mut Enlisted, peer: &Peer) {
    let view = gateway.view();
    let world = world(gateway, &view);
    note_mounts(&view, stage);
    if stage.stays.is_some() {
        return;
    }
    stage.must_stay = gateway.keeps_here(peer);
    stage.has_own_rights = stage.must_stay.is_none();
    if !stage.has_own_rights {
        return;
    }
    let shell = gateway.sessions.get(&stage.session).map(|session| session.pid);
    fresh::note(stage, shell);
    let reading = facts::read(&world, stage);
    if let Ok(reading) = &reading
        && !again::leaves_names(reading)
    {
        stage.must_stay = gateway.open_files.why_local(&view.table, stage.pid, reading);
    }
    if stage.must_stay.is_some() {
        return;
    }
    if reading.as_ref().is_ok_and(|reading| facts::is_all_here(stage, reading)) {
        stage.stays = Some(LocalReason::nothing_on_mounts());
    } else if gateway.config.gateway.scheduler == Scheduler::Cost && gateway.volumes.are_there() {
        stage.stays = gateway.volumes.at_hand(&world, &[(stage, &reading)]);
    }
}

/// Returns true if a command about to be executed certainly runs locally: a rule says so, none of
/// its files are on a mount, or all are cached. Prefetches input that is not cached. The command's
/// environment is unknown: it could only add reasons to run locally.
pub fn stays_at_once(gateway: &Gateway, command: &mut Enlisted, peer: &Peer) -> bool {
    let view = gateway.view();
    let world = world(gateway, &view);
    note_mounts(&view, command);
    let may_lack_something = match facts::read(&world, command) {
        Ok(reading) if facts::is_all_here(command, &reading) => false,
        Ok(reading) => match gateway.volumes.round_trips_to_have(&world, command, reading) {
            Some(round_trips) => round_trips > 0,
            None => return false,
        },
        Err(_) => true,
    };
    if may_lack_something && gateway.volumes.are_there() {
        command.has_own_rights = gateway.keeps_here(peer).is_none();
        let _nobody_explains = gateway.volumes.prefetch(&world, command);
    }
    true
}

fn note_mounts(view: &View, command: &mut Enlisted) {
    for file in command.descriptors.iter_mut().filter(|d| d.kind == DescriptorKind::File) {
        file.on_mount =
            matches!(view.table.resolve(&file.path, Path::new("/")), Resolution::Owned(_));
    }
}

#[tracing::instrument(name = "pipeline", skip_all, fields(id))]
async fn carry_out_as(
    gateway: &Arc<Gateway>,
    mut pipeline: Pipeline,
    session: Option<&Arc<ShellSession>>,
    id: &str,
    tracer: &Tracer,
) -> PipelineReport {
    let began = Instant::now();
    tracer.assembled(&pipeline.stages);
    fresh::confirm(&mut pipeline).await;
    let commands: Vec<Arc<Enlisted>> =
        pipeline.stages.iter().map(|s| Arc::clone(&s.enlisted)).collect();
    let split = session.and_then(|s| s.split);
    let view = gateway.view();
    let world = world_now(gateway, &view);
    let subject = Subject { commands: &commands, shape: &pipeline.shape, split, tracer };
    let mut planned = Planned::make(gateway, &world, &subject).await;
    tracing::debug!(plan = %planned.plan, "planned");
    fetch_inputs_ahead(gateway, &world, &commands, &mut planned.plan, None);
    let setup = began.elapsed();
    let mut step = tracer.now_ns();
    let mut pipeline =
        start::tell(pipeline, &mut planned.plan, &gateway.assembler.backstops, tracer).await;
    step = tracer.step("directives", step);
    let told = planned.plan.clone();
    let mut outcome = start::PipelineOutcome::default();
    let mut run_id = id.to_owned();
    for attempt in 1..=ATTEMPTS {
        if !planned.plan.placements.iter().any(|p| matches!(p, Placement::Remote(_))) {
            break;
        }
        let lowered = lower(gateway, &world, &commands, &pipeline.shape, &planned, &run_id);
        step = tracer.step("lowering", step);
        let started = start::start(gateway, &planned.connections, lowered, tracer).await;
        step = tracer.step("starting", step);
        match started {
            Ok(flights) => {
                outcome =
                    flight::fly(gateway, &mut pipeline, flights, &planned.plan, &planned.readings)
                        .await;
                tracer.step("relaying", step);
                break;
            }
            Err(refusal)
                if refusal.is_unclear()
                    || refusal.is_loss() && !may_run_here(&world, &commands, &planned).await =>
            {
                tracing::warn!(%refusal, "whether a run was started is not known");
                fail_all(&pipeline, &planned.plan, &refusal, &mut outcome).await;
                break;
            }
            Err(refusal) => {
                tracing::info!(%refusal, attempt, "an executor refused a run, nothing was started");
                planned.again(gateway, &commands, attempt, &refusal);
                run_id = format!("{id}.{attempt}");
            }
        }
    }
    fetch_inputs_ahead(gateway, &world, &commands, &mut planned.plan, Some(&told));
    release_the_rest(&pipeline, &told, &planned.plan, tracer).await;
    let costs = Costs { setup, wall: began.elapsed(), outcome: &outcome };
    report(gateway, &commands, &pipeline.shape, &planned, &costs)
}

/// Lowers a plan to run specifications.
fn lower(
    gateway: &Gateway,
    world: &World<'_>,
    commands: &[Arc<Enlisted>],
    shape: &PipelineShape,
    planned: &Planned,
    run_id: &str,
) -> Lowered {
    let elsewhere = planned
        .connections
        .iter()
        .filter(|(_, c)| c.description().reply.localtime_sha256 != gateway.localtime())
        .map(|(id, _)| *id);
    let elsewhere = elsewhere.filter(|_| rule::holds(Rule::Identity)).collect();
    let builder = Builder::new(world, commands, shape, &planned.readings, &planned.plan);
    let mut lowered = builder.with_other_zones(elsewhere).build(run_id);
    again::keep_what_writes(&mut lowered, &planned.readings, &gateway.secret);
    for run in &mut lowered.runs {
        run.spec.volumes = gateway.volumes.sessions(&gateway.executors.get(run.executor).name);
    }
    lowered
}

/// Plans stages without processes (`posh explain`). `unknowable` gives the reason for each stage
/// whose words are not known.
pub async fn plan_only(
    gateway: &Arc<Gateway>,
    commands: &[Arc<Enlisted>],
    edges: &[Edge],
    unknowable: &[Option<String>],
    split: Option<u32>,
) -> PipelineReport {
    let began = Instant::now();
    let shape = PipelineShape::unshared(commands.len(), edges.to_vec());
    let view = gateway.view();
    let world = world_now(gateway, &view);
    let subject = Subject { commands, shape: &shape, split, tracer: &Tracer::default() };
    let mut planned = Planned::make(gateway, &world, &subject).await;
    for (placement, reason) in planned.plan.placements.iter_mut().zip(unknowable) {
        if let Some(reason) = reason {
            *placement = Placement::Here(ReasonKind::Unknowable.because(reason.clone()));
        }
    }
    let outcome = start::PipelineOutcome::default();
    let costs = Costs { setup: began.elapsed(), wall: Duration::ZERO, outcome: &outcome };
    let mut report = report(gateway, commands, &shape, &planned, &costs);
    for ((stage, reason), command) in report.stages.iter_mut().zip(unknowable).zip(commands) {
        if let Some(reason) = reason {
            *stage = explain::unknowable(command, reason);
        }
    }
    report
}

/// Input of decisions that send nothing to a server: an old table leaves a command here.
fn world<'a>(gateway: &'a Gateway, view: &'a View) -> World<'a> {
    World {
        table: &view.table,
        library: &view.library,
        executors: &gateway.executors,
        mount_namespace: gateway.mount_namespace,
        mounts_have_changed: false,
        own_files: &gateway.own_files,
    }
}

/// Input of a plan. Compares the table with the mounts as they are now.
fn world_now<'a>(gateway: &'a Gateway, view: &'a View) -> World<'a> {
    let mounts_have_changed = view.mounts.has_changed();
    if mounts_have_changed {
        gateway.table_is_old.notify_one();
    }
    World { mounts_have_changed, ..world(gateway, view) }
}

/// Input of planning.
struct Subject<'a> {
    commands: &'a [Arc<Enlisted>],
    shape: &'a PipelineShape,
    split: Option<u32>,
    tracer: &'a Tracer,
}

/// A plan and its inputs.
struct Planned {
    readings: Vec<Result<ResolvedCommand, LocalReason>>,
    facts: PipelineFacts,
    connections: Connections,
    options: PlanSettings,
    plan: Plan,
}

impl Planned {
    async fn make(gateway: &Gateway, world: &World<'_>, subject: &Subject<'_>) -> Self {
        let &Subject { commands, shape, split, tracer } = subject;
        let mut step = tracer.now_ns();
        let mut readings: Vec<_> = commands.iter().map(|c| facts::read(world, c)).collect();
        keep_what_is_at_hand(gateway, world, commands, &mut readings);
        step = tracer.step("reading the commands", step);
        settle::settle(gateway, commands, &mut readings).await;
        step = tracer.step("settling files", step);
        let stages = commands.iter().enumerate().map(|(index, command)| {
            let around = Surroundings {
                edges: &shape.edges,
                index,
                shared_outputs: &shape.shared_outputs[index],
                shared_inputs: &shape.shared_inputs[index],
            };
            facts::stage_facts(world, command, &readings[index], &around)
        });
        let own_input_only =
            gateway.executors.all().into_iter().filter(|executor| !executor.takes_input);
        let own_input_only = own_input_only.map(|executor| {
            let words = format!("{} takes no input from elsewhere (takes_input)", executor.name);
            (executor.id, ReasonKind::Executor.because(words))
        });
        let mut facts = PipelineFacts {
            stages: stages.collect(),
            edges: shape.edges.clone(),
            own_input_only: own_input_only.collect(),
        };
        let connections = refusals(gateway, world, commands, &readings, &mut facts).await;
        step = tracer.step("asking who can run it", step);
        let split_factor = split.unwrap_or(gateway.config.gateway.split).max(1) as usize;
        let options = PlanSettings { split_factor, ..PlanSettings::default() };
        let plan = write_error::plan(commands, &mut facts, options);
        tracer.step("planning", step);
        Self { readings, facts, connections, options, plan }
    }

    /// Makes another plan after a refusal. Stages that already became their commands stay local.
    fn again(
        &mut self,
        gateway: &Gateway,
        commands: &[Arc<Enlisted>],
        attempt: usize,
        refusal: &start::StartRefusal,
    ) {
        refusal.apply(gateway, &mut self.facts);
        let plan = write_error::plan(commands, &mut self.facts, self.options);
        let keeps = plan.placements.iter().zip(&self.plan.placements).all(|(new, old)| {
            matches!(old, Placement::Remote(_)) || matches!(new, Placement::Here(_))
        });
        let before = std::mem::replace(&mut self.plan, plan);
        if !keeps || attempt == ATTEMPTS {
            self.plan = everything_here(&before, refusal);
        }
        let name = &gateway.executors.get(refusal.executor).name;
        let reason_now = ReasonKind::Executor.because(format!("{name} refused: {refusal}"));
        for (new, old) in self.plan.placements.iter_mut().zip(&before.placements) {
            if let (Placement::Here(reason), Placement::Remote(_)) = (new, old) {
                reason.clone_from(&reason_now);
            }
        }
    }
}

/// Keeps the whole pipeline local if that takes less time than asking a server.
fn keep_what_is_at_hand(
    gateway: &Gateway,
    world: &World<'_>,
    commands: &[Arc<Enlisted>],
    readings: &mut [Result<ResolvedCommand, LocalReason>],
) {
    if gateway.config.gateway.scheduler != Scheduler::Cost || !gateway.volumes.are_there() {
        return;
    }
    let read: Vec<_> = commands.iter().map(AsRef::as_ref).zip(readings.iter()).collect();
    if let Some(reason) = gateway.volumes.at_hand(world, &read) {
        readings
            .iter_mut()
            .filter(|reading| reading.is_ok())
            .for_each(|reading| *reading = Err(reason.clone()));
    }
}

/// Notes which executors can't run which stage, and returns the connections of the others.
async fn refusals(
    gateway: &Gateway,
    world: &World<'_>,
    commands: &[Arc<Enlisted>],
    readings: &[Result<ResolvedCommand, LocalReason>],
    facts: &mut PipelineFacts,
) -> Connections {
    let mut connections = Connections::new();
    let mut unreachable = BTreeMap::new();
    for id in concerned(facts) {
        match connection_of(gateway, &gateway.executors.get(id), world.table).await {
            Ok(connection) => drop(connections.insert(id, connection)),
            Err(reason) => drop(unreachable.insert(id, reason)),
        }
    }
    for (index, facts) in facts.stages.iter_mut().enumerate() {
        facts.refusals.extend(unreachable.clone());
        let (Ok(reading), false) = (&readings[index], matches!(facts.need, Need::Here(_))) else {
            continue;
        };
        for (id, connection) in &connections {
            let can = can_run(gateway, *id, connection, &commands[index], reading).await;
            let user = connection.description().reply.user;
            let can = can.and_then(|()| listings::can_invalidate(world, reading, user));
            let can = match can {
                Ok(()) => {
                    let to = Connected { executor: &gateway.executors.get(*id), connection };
                    let (same, stage) = (&gateway.same_files, &commands[index]);
                    gateway.new_files.check(same, to, world, stage, reading).await
                }
                refused => refused,
            };
            if let Err(reason) = can {
                facts.refusals.insert(*id, reason);
            }
        }
    }
    connections
}

/// Connection to an executor that serves what its mounts show.
async fn connection_of(
    gateway: &Gateway,
    executor: &Arc<Executor>,
    table: &MountTable,
) -> Result<Arc<ExecutorConnection>, LocalReason> {
    let connection = executor.connection().await?;
    gateway.same_files.check(executor, table, &connection).await?;
    Ok(connection)
}

/// Executors of the pipeline's paths.
fn concerned(facts: &PipelineFacts) -> Vec<ExecutorId> {
    let mut ids: Vec<ExecutorId> = facts.stages.iter().flat_map(of_stage).collect();
    ids.sort_unstable();
    ids.dedup();
    ids
}

fn of_stage(facts: &StageFacts) -> Vec<ExecutorId> {
    let mut ids: Vec<ExecutorId> = facts.operands.iter().map(|(_, id)| *id).collect();
    if let Need::At(id) = facts.need {
        ids.push(id);
    }
    for flow in [facts.input, facts.output] {
        if let plan::Flow::At(Site::Executor(id)) = flow {
            ids.push(id);
        }
    }
    ids
}

async fn can_run(
    gateway: &Gateway,
    id: ExecutorId,
    connection: &Arc<ExecutorConnection>,
    stage: &Enlisted,
    reading: &ResolvedCommand,
) -> Result<(), LocalReason> {
    let executor = gateway.executors.get(id);
    let name = executor.name.as_str();
    let identical = !rule::holds(Rule::Identity);
    let by_the_time = !identical && facts::goes_by_the_time(stage, &reading.invocation);
    let description = if by_the_time {
        connection.recent_description().await.map_err(|why| {
            ReasonKind::Executor
                .because(format!("{name} was asked for the time on its clock, and failed: {why}"))
        })?
    } else {
        connection.description_and_refresh()
    };
    let about = &description.reply;
    if about.machine != gateway.machine {
        return Err(ReasonKind::Executor.because(format!(
            "{name} is a {} machine, this one a {}",
            about.machine, gateway.machine
        )));
    }
    if !about.namespaces && has_flags(gateway, id) {
        return Err(ReasonKind::Executor.because(format!(
            "a mount of {name} is read-only or nosymfollow here, which it can't be there"
        )));
    }
    if about.ids_are_partial
        && reading.invocation.shows.iter().any(|shown| OWNERS.contains(shown))
        && rule::holds(Rule::MountDifferences)
    {
        return Err(ReasonKind::Attributes.because(format!(
            "{} shows or sets owners, of which the commands of {name} see only their own user's",
            reading.invocation.command
        )));
    }
    if !identical {
        gateway.locales.same(name, description.locales.as_ref(), stage)?;
    }
    if by_the_time && description.has_other_time {
        return Err(ReasonKind::Executor.because(format!(
            "the clock of {name} differs from this machine's by more than a second"
        )));
    }
    // An executor with namespaces can show our time zone.
    let shown = about.namespaces && !gateway.localtime().is_empty();
    if !shown
        && !identical
        && facts::shows_local_time(stage, &reading.invocation)
        && about.localtime_sha256 != gateway.localtime()
    {
        return Err(ReasonKind::Executor.because(format!("{name} is in another time zone; set TZ")));
    }
    let policy = reading.invocation.tool_version;
    gateway.tools.same(name, connection, &stage.name, &stage.program, policy).await?;
    for other in &reading.invocation.runs {
        let found = gateway
            .tools
            .on_path(stage.variable("PATH"), other, gateway.sessions.stage_programs())
            .await;
        let program = found.map_err(|why| {
            ReasonKind::Executor
                .because(format!("{other}, which it starts, is looked for in PATH: {why}"))
        })?;
        let program = program.ok_or_else(|| {
            ReasonKind::Executor
                .because(format!("{other}, which it starts, is not on this machine"))
        })?;
        gateway.tools.same(name, connection, other, &program, ToolVersion::Same).await?;
    }
    Ok(())
}

/// Returns true if a mount of an executor has flags that its views have to have.
fn has_flags(gateway: &Gateway, id: ExecutorId) -> bool {
    let (view, name) = (gateway.view(), &gateway.executors.get(id).name);
    view.table.mounts().any(|mount| {
        mount.owner.as_ref().is_some_and(|owner| owner.executor == *name)
            && mount.flags != MountFlags::default()
    })
}

fn everything_here(before: &Plan, refusal: &start::StartRefusal) -> Plan {
    let here = |p: &Placement| match p {
        Placement::Here(reason) => Placement::Here(reason.clone()),
        Placement::Remote(_) => Placement::Here(ReasonKind::Executor.because(refusal.to_string())),
    };
    Plan {
        placements: before.placements.iter().map(here).collect(),
        fused: vec![false; before.fused.len()],
        joins: before.joins.clone(),
    }
}

/// Returns true if the mounts of all remote stages answer, so that their commands could run
/// locally.
async fn may_run_here(world: &World<'_>, commands: &[Arc<Enlisted>], planned: &Planned) -> bool {
    let remote =
        planned.plan.placements.iter().map(|placement| matches!(placement, Placement::Remote(_)));
    let read = commands.iter().zip(&planned.readings).zip(remote).filter(|(_, remote)| *remote);
    let read: Vec<_> =
        read.filter_map(|((c, reading), _)| Some((c.as_ref(), reading.as_ref().ok()?))).collect();
    again::mounts_answer(world, &read).await
}

/// Fails stages whose commands may have run, with unknown results.
async fn fail_all(
    pipeline: &Pipeline,
    plan: &Plan,
    refusal: &start::StartRefusal,
    outcome: &mut start::PipelineOutcome,
) {
    for (index, (stage, placement)) in pipeline.stages.iter().zip(&plan.placements).enumerate() {
        if matches!(placement, Placement::Remote(_)) {
            let lost = if refusal.is_loss() {
                ", its executor was lost, and its mount does not answer"
            } else {
                ""
            };
            let message = format!("posh: {}: {refusal}{lost}", stage.enlisted.name);
            stage.tell(ending::failed(message)).await;
            outcome.statuses.insert(index, ending::EXIT_POSH_FAILED);
        }
    }
}

/// Makes volumes prefetch the input of stages that are about to run locally, and notes that for
/// `explain`. Skips stages that were `told` to run locally before.
fn fetch_inputs_ahead(
    gateway: &Gateway,
    world: &World<'_>,
    commands: &[Arc<Enlisted>],
    plan: &mut Plan,
    told: Option<&Plan>,
) {
    for (index, placement) in plan.placements.iter_mut().enumerate() {
        let is_new = told.is_none_or(|told| matches!(told.placements[index], Placement::Remote(_)));
        if let (Placement::Here(reason), true) = (placement, is_new)
            && let Some(words) = gateway.volumes.prefetch(world, &commands[index])
        {
            *reason = reason.with(&words);
        }
    }
}

/// Lets stages that acknowledged, but whose run was never started, run locally.
async fn release_the_rest(pipeline: &Pipeline, told: &Plan, plan: &Plan, tracer: &Tracer) {
    for (index, (stage, placement)) in pipeline.stages.iter().zip(&plan.placements).enumerate() {
        if let Placement::Here(reason) = placement {
            stage.tell(ForStage::RunHere(reason.to_string())).await;
            if matches!(told.placements[index], Placement::Remote(_)) {
                tracer.runs_here(index, stage, reason);
            }
        }
    }
}

struct Costs<'a> {
    setup: Duration,
    wall: Duration,
    outcome: &'a start::PipelineOutcome,
}

fn report(
    gateway: &Gateway,
    commands: &[Arc<Enlisted>],
    shape: &PipelineShape,
    planned: &Planned,
    costs: &Costs<'_>,
) -> PipelineReport {
    let milliseconds = |d: Duration| (d.as_secs_f64() * 1e5).round() / 100.0;
    let stages = commands.iter().enumerate().map(|(index, command)| {
        let (placement, reason) = described(gateway, shape, planned, index);
        let reading = planned.readings[index].as_ref();
        StageReport {
            command: reading
                .map_or_else(|_| command.name.clone(), |r| r.invocation.command.clone()),
            argv: command.argv.iter().map(|w| w.to_string_lossy().into_owned()).collect(),
            placement,
            reason,
            status: costs.outcome.statuses.get(&index).copied(),
        }
    });
    let remote = !costs.outcome.statuses.is_empty();
    PipelineReport {
        pipeline: 0,
        stages: stages.collect(),
        bytes: costs.outcome.bytes,
        setup_ms: milliseconds(costs.setup),
        wall_ms: if remote { milliseconds(costs.wall) } else { 0.0 },
    }
}

/// Placement of a stage and its reason, as text.
fn described(
    gateway: &Gateway,
    shape: &PipelineShape,
    planned: &Planned,
    stage: usize,
) -> (String, String) {
    let Planned { plan, readings, .. } = planned;
    let parts = match &plan.placements[stage] {
        Placement::Here(reason) => return ("local".to_owned(), reason.to_string()),
        Placement::Remote(parts) => parts,
    };
    let mut names: Vec<_> =
        parts.iter().map(|p| gateway.executors.get(p.executor).name.to_string()).collect();
    names.dedup();
    let joined = shape.edges.iter().zip(&plan.fused).any(|(e, fused)| *fused && e.from.0 == stage);
    let mut reason = match parts.len() {
        1 => "runs where its data is".to_owned(),
        n => format!(
            "split in {n} parts, {}",
            explain::joined(gateway, readings, &plan.joins[stage], stage)
        ),
    };
    if joined {
        reason += ", its output stays there";
    }
    (names.join("+"), reason)
}
