//! Joining the outputs of a split stage's parts by an aggregator: the aggregator as a value
//! ([`Recipe`]), posh's own aggregators ([`own`]), and local execution ([`Joining`]). The plan
//! decides which stage is joined, how and where ([`crate::plan::Join`]).

pub mod errors;
pub mod own;
mod run;
pub mod status;

use std::{collections::HashSet, ffi::OsString};

use posh_annotations::{Aggregator, Invocation};

use self::own::OwnAggregator;
pub use self::run::{AggregatorEvent, AggregatorProgram, Joining};
use crate::plan::{StagePart, Steps};

/// Aggregator of one stage's parts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Recipe {
    /// How the parts are passed.
    pub source: JoinSource,
    /// Commands, each reading the output of the one before; none with [`JoinSource::Own`].
    pub commands: Vec<Step>,
    /// Number of parts.
    pub parts: usize,
}

/// See [`Recipe::source`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum JoinSource {
    /// The first command's standard input is the concatenation of all parts.
    InOrder,
    /// The first command's last operands are the parts, one each.
    Separate,
    /// Likewise, but the parts are counts of equal lines: the lines are merged without counts, and
    /// the result is counted again.
    Counted,
    /// posh's own code does everything.
    Own(OwnAggregator),
}

/// A command of a [`Recipe`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    /// Stage that supplies the command, environment and so on.
    pub stage: usize,
    /// Arguments, without the operands for the parts.
    pub argv: Vec<OsString>,
}

/// Arguments of a stage, and their meaning.
#[derive(Debug, Clone, Copy)]
pub struct Words<'a> {
    /// Arguments from the shell.
    pub argv: &'a [OsString],
    /// Result of the annotation.
    pub invocation: &'a Invocation,
}

impl Recipe {
    /// Recipe of `steps` for `stage`, whose parts are `parts`.
    #[must_use]
    pub fn of<'a>(
        steps: Steps,
        stage: usize,
        parts: &[StagePart],
        words: &dyn Fn(usize) -> Words<'a>,
    ) -> Self {
        let merge = |by: usize| Step { stage: by, argv: merging_words(words(by)) };
        let same = || Step { stage, argv: words(stage).argv.to_vec() };
        let (source, commands) = match steps {
            Steps::Merge(by) => (JoinSource::Separate, vec![merge(by)]),
            Steps::MergeThenSame(by) => (JoinSource::Separate, vec![merge(by), same()]),
            Steps::MergeCounted(by) => (JoinSource::Counted, vec![merge(by)]),
            Steps::Same => (JoinSource::InOrder, vec![same()]),
            Steps::Own => (JoinSource::Own(own_of(words(stage).invocation, parts)), Vec::new()),
        };
        Self { source, commands, parts: parts.len() }
    }
}

/// `sort -m` and the relevant options.
fn merging_words(words: Words<'_>) -> Vec<OsString> {
    match words.invocation.split.as_ref().and_then(|s| s.aggregator.as_ref()) {
        Some(Aggregator::Merge { words, .. }) => words.clone(),
        _ => unreachable!("the plan merges by the command of a stage that has one"),
    }
}

fn own_of(invocation: &Invocation, parts: &[StagePart]) -> OwnAggregator {
    match invocation.split.as_ref().and_then(|s| s.aggregator.as_ref()) {
        Some(Aggregator::UniqCount) => OwnAggregator::uniq_count(),
        Some(Aggregator::WcTotal(letters)) => {
            let operands = parts.iter().map(|p| p.operands.as_ref().map_or(0, Vec::len));
            OwnAggregator::wc_total(letters, operands.collect())
        }
        _ => OwnAggregator::sum(),
    }
}

/// Returns true if a common start of the parts' errors can't be about their input: no operand is in
/// two parts.
#[must_use]
pub fn starts_alike(argv: &[OsString], parts: &[StagePart]) -> bool {
    let mut seen = HashSet::new();
    parts.len() > 1
        && parts
            .iter()
            .flat_map(|p| p.operands.iter().flatten())
            .all(|operand| seen.insert(&argv[*operand]))
}
