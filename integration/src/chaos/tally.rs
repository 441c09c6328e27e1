//! Counts of faults by their points, and of results.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use super::faults::{InjectedFault, Point};
use super::verdict::{How, Injected, PipelineVerdict};

/// Results of all pipelines.
#[derive(Debug, Default)]
pub struct ChaosTally {
    points: BTreeMap<Point, Counts>,
    faults: BTreeMap<InjectedFault, Counts>,
    /// Pipelines that did not reach their point.
    pub unharmed: usize,
    /// Wrong results.
    pub wrong: Vec<String>,
    /// Things left behind.
    pub remains: Vec<String>,
}

#[derive(Debug, Default, Clone, Copy)]
struct Counts {
    faults: usize,
    as_bash: usize,
    again: usize,
    resumed: usize,
    failed: usize,
    wrong: usize,
    longest: Duration,
}

impl Counts {
    fn add(&mut self, verdict: &PipelineVerdict) {
        self.faults += 1;
        self.again += usize::from(verdict.again);
        self.resumed += usize::from(verdict.resumed);
        self.longest = self.longest.max(verdict.took);
        match verdict.how {
            How::AsBash => self.as_bash += 1,
            How::FailedCleanly => self.failed += 1,
            How::Wrong(_) => self.wrong += 1,
        }
    }
}

impl ChaosTally {
    /// Counts one pipeline; returns a line about a wrong result.
    pub(super) fn add(
        &mut self,
        index: usize,
        injected: &Injected,
        verdict: PipelineVerdict,
    ) -> Option<String> {
        let Injected { work, point, fault, .. } = injected;
        if verdict.fired {
            self.points.entry(*point).or_default().add(&verdict);
            self.faults.entry(*fault).or_default().add(&verdict);
        } else {
            self.unharmed += 1;
        }
        let How::Wrong(what) = &verdict.how else { return None };
        let line = format!(
            "pipeline {index}: {:?}, {} {}: {what}",
            work.text,
            fault.words(),
            point.words()
        );
        let line = format!("{line}\n--- gateway:\n{}", verdict.log);
        self.wrong.push(line.clone());
        Some(line)
    }

    /// Number of injected faults.
    pub fn faults(&self) -> usize {
        self.points.values().map(|counts| counts.faults).sum()
    }

    /// Number of runs and commands that were resumed or repeated.
    pub fn retried(&self) -> usize {
        self.points.values().map(|counts| counts.again + counts.resumed).sum()
    }

    /// Number of points at which a fault was injected.
    pub fn points(&self) -> usize {
        self.points.len()
    }

    /// No wrong result, and nothing left behind.
    pub fn is_good(&self) -> bool {
        self.wrong.is_empty() && self.remains.is_empty()
    }
}

impl fmt::Display for ChaosTally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let head =
            ["faults", "as bash", "run again", "gone on", "failed cleanly", "wrong", "longest"];
        writeln!(f, "| at | {} |\n|---{}|", head.join(" | "), "|---:".repeat(head.len()))?;
        for (point, counts) in &self.points {
            write_row(f, point.words(), counts)?;
        }
        for (fault, counts) in &self.faults {
            write_row(f, fault.words(), counts)?;
        }
        let sum = |what: fn(&Counts) -> usize| self.points.values().map(what).sum::<usize>();
        writeln!(
            f,
            "\n{} faults: {} retried ({} run again, {} gone on), {} as bash in all, {} failed \
             cleanly, {} wrong; {} pipelines never came to their point",
            self.faults(),
            self.retried(),
            sum(|c| c.again),
            sum(|c| c.resumed),
            sum(|c| c.as_bash),
            sum(|c| c.failed),
            self.wrong.len(),
            self.unharmed
        )?;
        self.wrong.iter().chain(&self.remains).try_for_each(|line| writeln!(f, "{line}"))
    }
}

fn write_row(f: &mut fmt::Formatter<'_>, name: &str, c: &Counts) -> fmt::Result {
    let longest = c.longest.as_secs_f64();
    let (faults, as_bash, again, resumed) = (c.faults, c.as_bash, c.again, c.resumed);
    writeln!(
        f,
        "| {name} | {faults} | {as_bash} | {again} | {resumed} | {} | {} | {longest:.1} s |",
        c.failed, c.wrong
    )
}
