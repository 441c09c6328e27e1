//! One cell of the table: a workload under a system, run and checked as often as the budget allows.

use std::time::Duration;

use anyhow::{Result, bail, ensure};
use posh_integration::LabError;
use posh_integration::explain::{ExplainReport, ExplainedPipeline, ExplainedStage};
use posh_integration::oracle::{RunOutcome, Under};

use super::catalogue::{DataSize, USUAL_LIMIT_S, Workload};
use super::place::RunPlace;
use super::results::{Cell, Explained, ProgramUsage};
use super::system::System;
use super::usage::Mark;
use super::verify::Fingerprint;
use crate::sample::Samples;

/// Total time of a cell's runs after which it is not run again: slow cells have the least spread,
/// and the whole bench has to end.
const REPEAT_BUDGET_S: f64 = 15.0;

/// Terms of every run.
#[derive(Debug, Clone, Copy)]
pub struct Terms {
    /// Size of the data.
    pub size: DataSize,
    /// Time limit of bash over sshfs with default options.
    pub limit: Duration,
}

impl Terms {
    /// Time limit of a run.
    pub fn limit_of(&self, workload: &Workload, system: System) -> Duration {
        let limit = self.limit.min(Duration::from_secs(workload.limit_s));
        let usual = limit.min(Duration::from_secs(USUAL_LIMIT_S));
        match system {
            // The default is the reference.
            System::Sshfs => limit,
            // A fraction shows whether these change the order of magnitude.
            System::SshfsTuned | System::PoshElsewhere => usual / 10,
            _ => usual,
        }
    }
}

/// One run.
#[derive(Debug)]
pub struct Trial {
    /// Time from the start of the shell to the end of its output.
    pub seconds: f64,
    /// `None`: it did not end within the limit.
    pub outcome: Option<RunOutcome>,
    /// Digests of its results; `None` if it did not end.
    pub fingerprint: Option<Fingerprint>,
    bytes: u64,
    gateway: ProgramUsage,
    executors: ProgramUsage,
}

/// A cell whose runs are not complete.
#[derive(Debug)]
pub struct OpenCell {
    /// Its workload.
    pub workload: &'static Workload,
    /// Its system.
    pub system: System,
    trials: Vec<Trial>,
}

impl OpenCell {
    /// A cell without runs.
    pub fn new(workload: &'static Workload, system: System) -> OpenCell {
        OpenCell { workload, system, trials: Vec::new() }
    }

    /// Returns true if another run is not worth its time.
    pub fn is_done(&self) -> bool {
        let spent: f64 = self.trials.iter().map(|t| t.seconds).sum();
        spent > REPEAT_BUDGET_S || self.is_limited()
    }

    /// Returns true if a run did not end within the limit.
    pub fn is_limited(&self) -> bool {
        self.trials.iter().any(|t| t.outcome.is_none())
    }

    /// Runs it once more.
    pub fn run(&mut self, place: &mut RunPlace, terms: Terms) -> Result<&Trial> {
        self.trials.push(try_once(place, self.workload, self.system, terms, &[])?);
        Ok(self.trials.last().expect("one was just added"))
    }

    /// Result of the runs; `None` without runs.
    pub fn close(self, explained: Option<ExplainReport>) -> Option<Cell> {
        let seconds = Samples::new(self.trials.iter().map(|t| t.seconds).collect())?;
        let bytes = Samples::new(self.trials.iter().map(|t| t.bytes as f64).collect())?.median();
        let last = self.trials.last()?;
        let posh = explained.map(|report| explain(&report, last.gateway, last.executors));
        let limited = self.is_limited();
        let (workload, system) = (self.workload.name.to_owned(), self.system.name().to_owned());
        Some(Cell { workload, system, summary: seconds.summary(), seconds, limited, bytes, posh })
    }
}

/// Makes one run from a fresh state; `options` are posh's.
pub fn try_once(
    place: &mut RunPlace,
    workload: &'static Workload,
    system: System,
    terms: Terms,
    options: &[&str],
) -> Result<Trial> {
    place.prepare(workload, system)?;
    let (mut script, under) = system.script(workload, terms.size);
    script.limit = terms.limit_of(workload, system);
    script.options = options.iter().map(|o| (*o).to_owned()).collect();
    let (gateways, executors) = (Mark::set(&place.gateways()?), Mark::set(&place.executors()?));
    let before = place.lab.bytes_moved()?;
    let outcome = match script.run(system.host(&place.lab), under) {
        Ok(outcome) => Some(outcome),
        Err(LabError::Timeout { .. }) => None,
        Err(error) => return Err(error.into()),
    };
    let bytes = place.lab.bytes_moved()? - before;
    let (gateway, executors) =
        (gateways.since(&place.gateways()?), executors.since(&place.executors()?));
    let seconds = outcome.as_ref().map_or(script.limit, |o| o.wall).as_secs_f64();
    if let Some(outcome) = &outcome {
        let name = (workload.name, system.name());
        ensure!(outcome.status.success(), "{} failed under {}: {outcome}", name.0, name.1);
    }
    let take = |outcome| Fingerprint::take(place, workload, system, outcome);
    let fingerprint = outcome.as_ref().map(take).transpose()?;
    Ok(Trial { seconds, outcome, fingerprint, bytes, gateway, executors })
}

/// Runs the workload again for posh's report.
pub fn explained(
    place: &mut RunPlace,
    workload: &'static Workload,
    system: System,
    terms: Terms,
) -> Result<ExplainReport> {
    place.prepare(workload, system)?;
    let (mut script, _) = system.script(workload, terms.size);
    script.limit = terms.limit;
    let outcome = match script.run(&place.lab.workstation, Under::PoshExplained) {
        Err(LabError::Timeout { after, .. }) => {
            bail!("{} under posh --explain=json took longer than {after:?}", workload.name)
        }
        outcome => outcome?,
    };
    ensure!(
        outcome.status.success(),
        "{} failed under posh --explain=json: {outcome}",
        workload.name
    );
    Ok(outcome.report().clone())
}

fn explain(report: &ExplainReport, gateway: ProgramUsage, executors: ProgramUsage) -> Explained {
    let offloaded: Vec<&ExplainedPipeline> = report
        .pipelines
        .iter()
        .filter(|p| p.stages.iter().any(ExplainedStage::is_offloaded))
        .collect();
    let setup_ms =
        Samples::new(offloaded.iter().map(|p| p.setup_ms).collect()).map_or(0.0, |s| s.median());
    let stages = || report.pipelines.iter().flat_map(|p| &p.stages);
    let mut here: Vec<(String, String, usize)> = Vec::new();
    for stage in stages().filter(|s| !s.is_offloaded()) {
        match here
            .iter_mut()
            .find(|(command, reason, _)| *command == stage.command && *reason == stage.reason)
        {
            Some((.., count)) => *count += 1,
            None => here.push((stage.command.clone(), stage.reason.clone(), 1)),
        }
    }
    let there = stages().filter(|s| s.is_offloaded()).count();
    Explained { pipelines: report.pipelines.len(), setup_ms, there, here, gateway, executors }
}
