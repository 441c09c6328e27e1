//! Counts of interleavings, and their faults.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use super::steps::InterleaveStep;
use crate::explain::ExplainReport;

/// Limit of the median delay until a change by another client is seen. Single ones wait for a
/// processor on a busy machine.
const SEEN_WITHIN: Duration = Duration::from_millis(100);
/// One in this many commands may run locally: after a cut that was too long for them, or if none of
/// their files are on the server.
const ELSEWHERE: usize = 6;
/// Faults that are printed in full: a stale file shows in each step after its first.
const TOLD: usize = 20;

/// Results of a run.
#[derive(Debug, Default)]
pub struct InterleaveTally {
    /// Steps that were commands, and that were calls of a local program.
    pub commands: usize,
    /// See [`InterleaveTally::commands`].
    pub changes: usize,
    /// Commands during which the link was cut.
    pub cuts: usize,
    /// Of those, commands that did not end as under bash.
    pub failed_by_cut: usize,
    /// Stages on the server, and on the workstation.
    pub offloaded: usize,
    /// See [`InterleaveTally::offloaded`].
    pub local: usize,
    /// Compared names, contents and attributes.
    pub reads: usize,
    /// Steps after which stale data, or another result than bash's, was seen.
    pub stale: usize,
    /// Delays from a change by another client until it is seen, shortest first.
    pub seen: Vec<Duration>,
    longest: Duration,
    /// Reasons of local commands, with counts.
    reasons: BTreeMap<String, usize>,
    faults: Vec<String>,
}

impl InterleaveTally {
    pub(super) fn note_step(&mut self, step: &InterleaveStep, is_cut: bool, took: Duration) {
        match step {
            InterleaveStep::Command(_) => {
                self.commands += 1;
                self.cuts += usize::from(is_cut);
            }
            InterleaveStep::Here(_) => self.changes += 1,
        }
        self.longest = self.longest.max(took);
    }

    pub(super) fn note_fault(&mut self, fault: String) {
        if self.faults.len() < TOLD {
            eprintln!("{fault}");
        }
        self.faults.push(fault);
    }

    pub(super) fn note_report(&mut self, report: &ExplainReport) {
        let stages = || report.pipelines.iter().flat_map(|pipeline| &pipeline.stages);
        self.offloaded = stages().filter(|stage| stage.is_offloaded()).count();
        for stage in stages().filter(|stage| !stage.is_offloaded()) {
            self.local += 1;
            *self.reasons.entry(format!("{}: {}", stage.command, stage.reason)).or_default() += 1;
        }
    }

    /// Nothing stale was seen, most commands ran on the server, and other clients' changes are seen
    /// soon.
    #[must_use]
    pub fn is_good(&self) -> bool {
        let most_are_offloaded = self.offloaded > self.local * ELSEWHERE;
        self.faults.is_empty()
            && most_are_offloaded
            && self.median().is_none_or(|median| median <= SEEN_WITHIN)
    }

    fn median(&self) -> Option<Duration> {
        self.seen.get(self.seen.len() / 2).copied()
    }
}

impl fmt::Display for InterleaveTally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let InterleaveTally {
            commands,
            changes,
            cuts,
            failed_by_cut,
            offloaded,
            local,
            reads,
            stale,
            ..
        } = self;
        writeln!(
            f,
            "{} steps: {commands} command lines, {changes} changes by programs here",
            commands + changes
        )?;
        writeln!(f, "{offloaded} commands on the server, {local} here")?;
        writeln!(
            f,
            "{cuts} cuts of the link, {failed_by_cut} commands ended otherwise for that; \
             longest step {:.1?}",
            self.longest
        )?;
        writeln!(
            f,
            "{reads} files looked at, {stale} steps after which something was stale, {} faults",
            self.faults.len()
        )?;
        if let (Some(worst), Some(median)) = (self.seen.last(), self.median()) {
            let count = self.seen.len();
            writeln!(
                f,
                "{count} changes by another client: seen after {median:.1?} (median), \
                 {worst:.1?} (worst)"
            )?;
        }
        self.reasons
            .iter()
            .try_for_each(|(reason, count)| writeln!(f, "  {count} here: {reason}"))?;
        self.faults.iter().take(TOLD).try_for_each(|fault| writeln!(f, "  {fault}"))
    }
}
