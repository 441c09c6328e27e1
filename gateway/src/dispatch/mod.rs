//! Carries out one pipeline: read its commands, plan, tell each stage program,
//! start the runs once all have acknowledged, relay until everything has ended.

mod flight;
mod output;
mod refresh;
mod start;

use std::{
    collections::BTreeMap,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use posh_annotations::ToolVersion;

use crate::{
    assembly::Pipeline,
    enlisted::Enlisted,
    executors::Connection,
    facts::{self, Reading, Surroundings, World},
    lower::{Builder, program_on_path},
    plan::{self, ExecutorId, Need, Options, PipelineFacts, Placement, Plan, Site, StageFacts},
    report::{PipelineReport, StageReport},
    session::Session,
    stage_link::{ForStage, StageLink},
    state::Gateway,
};

/// How often a plan is made anew after an executor has refused it (a file without
/// a newline at a seam, a path that leaves the export): without the split, then without the executor.
const ATTEMPTS: usize = 3;

/// Executors' connections that a pipeline may use.
type Connections = BTreeMap<ExecutorId, Arc<Connection>>;

/// Carries out a pipeline from the moment it is complete until all its stages have ended.
pub async fn carry_out(gateway: Arc<Gateway>, pipeline: Pipeline) {
    let began = Instant::now();
    let number = gateway.next_pipeline();
    let session = pipeline.stages.iter().find_map(|s| gateway.sessions.get(&s.enlisted.session));
    if let Some(session) = &session {
        session.reports.begin();
    }
    let id = format!("{}-{number}", std::process::id());
    let report = carry_out_as(&gateway, pipeline, session.as_deref(), &id, began).await;
    if let Some(session) = &session {
        session.reports.end(PipelineReport { pipeline: number, ..report });
    }
}

#[tracing::instrument(name = "pipeline", skip_all, fields(id))]
async fn carry_out_as(
    gateway: &Arc<Gateway>,
    pipeline: Pipeline,
    session: Option<&Session>,
    id: &str,
    began: Instant,
) -> PipelineReport {
    let view = gateway.view();
    let world = World {
        table: &view.table,
        library: &view.library,
        executor_id: &|name| gateway.executors.named(name).map(|e| e.id),
        mount_namespace: gateway.mount_namespace,
    };
    let readings: Vec<_> = pipeline.stages.iter().map(|s| facts::read(&world, &s.enlisted)).collect();
    let mut facts = facts_of(&world, &pipeline, &readings);
    let connections = refusals(gateway, &pipeline, &readings, &mut facts).await;
    let options = Options {
        split_factor: session.and_then(|s| s.split).unwrap_or(view.split).max(1) as usize,
        ..Options::default()
    };
    let mut plan = plan::greedy(&facts, options);
    tracing::debug!(%plan, "planned");
    let setup = began.elapsed();
    let mut stages = start::tell(pipeline, &mut plan).await;
    let mut outcome = start::Outcome::default();
    let mut run_id = id.to_owned();
    for attempt in 1..=ATTEMPTS {
        if !plan.placements.iter().any(|p| matches!(p, Placement::Remote(_))) {
            break;
        }
        let lowered = Builder::new(&world, &stages, &readings, &plan).build(&run_id);
        match start::start(&connections, lowered).await {
            Ok(flights) => {
                outcome = flight::fly(gateway, &mut stages, flights, &plan, &readings).await;
                break;
            }
            Err(refusal) => {
                tracing::info!(%refusal, attempt, "an executor refused a run, nothing was started");
                refusal.apply(gateway, &mut facts);
                plan = replan(&facts, options, &plan, attempt, &refusal);
                run_id = format!("{id}.{attempt}");
            }
        }
    }
    release_the_rest(&mut stages, &plan).await;
    report(gateway, &stages, &plan, &readings, Costs { setup, wall: began.elapsed(), outcome: &outcome })
}

fn facts_of(world: &World<'_>, pipeline: &Pipeline, readings: &[Result<Reading, String>]) -> PipelineFacts {
    let stages = pipeline.stages.iter().enumerate().map(|(index, stage)| {
        let around = Surroundings {
            edges: &pipeline.edges,
            index,
            shared_outputs: &pipeline.shared_outputs[index],
            shared_inputs: &pipeline.shared_inputs[index],
        };
        facts::stage_facts(world, &stage.enlisted, &readings[index], &around)
    });
    PipelineFacts { stages: stages.collect(), edges: pipeline.edges.clone() }
}

/// Fills in which executors can't run which stage; gives the connections of those that can.
async fn refusals(
    gateway: &Gateway,
    pipeline: &Pipeline,
    readings: &[Result<Reading, String>],
    facts: &mut PipelineFacts,
) -> Connections {
    let mut connections = Connections::new();
    let mut unreachable = BTreeMap::new();
    for id in concerned(facts) {
        match gateway.executors.get(id).connection().await {
            Ok(connection) => drop(connections.insert(id, connection)),
            Err(reason) => drop(unreachable.insert(id, reason)),
        }
    }
    for (index, facts) in facts.stages.iter_mut().enumerate() {
        facts.refusals.extend(unreachable.clone());
        let (Ok(reading), false) = (&readings[index], matches!(facts.need, Need::Here(_))) else { continue };
        for (id, connection) in &connections {
            let stage = &pipeline.stages[index].enlisted;
            if let Err(reason) = can_run(gateway, *id, connection, stage, reading).await {
                facts.refusals.insert(*id, reason);
            }
        }
    }
    connections
}

/// Executors that some path of the pipeline leads to.
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
    connection: &Connection,
    stage: &Enlisted,
    reading: &Reading,
) -> Result<(), String> {
    let name = gateway.executors.get(id).name.as_str();
    let about = &connection.about;
    if about.machine != gateway.machine {
        return Err(format!("{name} is a {} machine, this one a {}", about.machine, gateway.machine));
    }
    if let Some(locale) = needed_locale(stage).filter(|l| !has_locale(&about.locales, l)) {
        return Err(format!("{name} does not have the locale {locale}"));
    }
    let uses_zone = reading.invocation.environment.iter().any(|n| n == "TZ") && stage.variable("TZ").is_none();
    if uses_zone && about.localtime_sha256 != gateway.localtime {
        return Err(format!("{name} is in another time zone; set TZ"));
    }
    let policy = reading.invocation.tool_version;
    gateway.tools.same(name, connection, &stage.name, &stage.program, policy).await?;
    for other in &reading.invocation.runs {
        let program = program_on_path(stage.variable("PATH"), other, Path::new(""));
        let program = program.ok_or_else(|| format!("{other}, which it starts, is not on this machine"))?;
        gateway.tools.same(name, connection, other, &program, ToolVersion::Same).await?;
    }
    Ok(())
}

/// The locale of messages and characters, unless it is one that every machine has.
fn needed_locale(stage: &Enlisted) -> Option<String> {
    let set = ["LC_ALL", "LC_CTYPE", "LANG"].into_iter().find_map(|name| stage.variable(name).filter(|v| !v.is_empty()));
    let name = set?.to_string_lossy().into_owned();
    (!matches!(name.as_str(), "C" | "POSIX" | "C.UTF-8" | "C.utf8")).then_some(name)
}

/// Codeset names are compared as glibc does: letters and digits only, in lower case.
fn has_locale(locales: &[String], wanted: &str) -> bool {
    let normal = |name: &str| -> String {
        name.chars().filter(char::is_ascii_alphanumeric).map(|c| c.to_ascii_lowercase()).collect()
    };
    locales.iter().any(|l| normal(l) == normal(wanted))
}

/// Another plan after a refusal; stages that already became their commands stay what they are.
fn replan(
    facts: &PipelineFacts,
    options: Options,
    before: &Plan,
    attempt: usize,
    refusal: &start::Refusal,
) -> Plan {
    let mut plan = if attempt + 1 < ATTEMPTS { plan::greedy(facts, options) } else { everything_here(before, refusal) };
    let keeps = plan.placements.iter().zip(&before.placements).all(|(new, old)| match old {
        Placement::Here(_) => matches!(new, Placement::Here(_)),
        Placement::Remote(_) => true,
    });
    if !keeps {
        plan = everything_here(before, refusal);
    }
    plan
}

fn everything_here(before: &Plan, refusal: &start::Refusal) -> Plan {
    let here = |p: &Placement| match p {
        Placement::Here(reason) => Placement::Here(reason.clone()),
        Placement::Remote(_) => Placement::Here(refusal.to_string()),
    };
    Plan { placements: before.placements.iter().map(here).collect(), fused: vec![false; before.fused.len()] }
}

/// Stages that acknowledged but whose run was never started run here after all.
async fn release_the_rest(stages: &mut Pipeline, plan: &Plan) {
    for (stage, placement) in stages.stages.iter().zip(&plan.placements) {
        if let Placement::Here(reason) = placement {
            stage.tell(ForStage::RunHere(reason.clone())).await;
        }
    }
}

struct Costs<'a> {
    setup: Duration,
    wall: Duration,
    outcome: &'a start::Outcome,
}

fn report(
    gateway: &Gateway,
    pipeline: &Pipeline,
    plan: &Plan,
    readings: &[Result<Reading, String>],
    costs: Costs<'_>,
) -> PipelineReport {
    let milliseconds = |d: Duration| (d.as_secs_f64() * 1e5).round() / 100.0;
    let stages = pipeline.stages.iter().enumerate().map(|(index, stage)| {
        let (placement, reason) = described(gateway, pipeline, plan, index);
        stage_report(stage, &readings[index], (placement, reason), costs.outcome.statuses.get(&index).copied())
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

fn stage_report(
    stage: &StageLink,
    reading: &Result<Reading, String>,
    (placement, reason): (String, String),
    status: Option<u32>,
) -> StageReport {
    let command = reading.as_ref().map_or_else(|_| stage.enlisted.name.clone(), |r| r.invocation.command.clone());
    let argv = stage.enlisted.argv.iter().map(|w| w.to_string_lossy().into_owned()).collect();
    StageReport { command, argv, placement, reason, status }
}

/// Where a stage ran and why, in words.
fn described(gateway: &Gateway, pipeline: &Pipeline, plan: &Plan, stage: usize) -> (String, String) {
    let parts = match &plan.placements[stage] {
        Placement::Here(reason) => return ("local".to_owned(), reason.clone()),
        Placement::Remote(parts) => parts,
    };
    let names: Vec<&str> = parts.iter().map(|p| gateway.executors.get(p.executor).name.as_str()).collect();
    let mut distinct = names.clone();
    distinct.dedup();
    let joined = pipeline.edges.iter().zip(&plan.fused).any(|(e, fused)| *fused && e.from.0 == stage);
    let mut reason = match parts.len() {
        1 => "runs where its data is".to_owned(),
        n => format!("split in {n} parts, joined in order"),
    };
    if joined {
        reason += ", its output stays there";
    }
    (distinct.join("+"), reason)
}
