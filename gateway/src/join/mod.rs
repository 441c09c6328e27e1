//! Joining the outputs of a split stage's parts by an aggregator: what it is made of, as a value
//! ([`Recipe`]), posh's own aggregators ([`own`]), and the joining on this machine ([`Joining`]).
//! Which stage is joined, how and where, is the plan's matter ([`crate::plan::Join`]).

pub mod errors;
pub mod own;
mod run;
pub mod status;

use std::{collections::HashSet, ffi::OsString};

use posh_annotations::{Aggregator, Invocation};

use self::own::Own;
pub use self::run::{Event, Joining, Program};
use crate::plan::{Part, Steps};

/// What joins the parts of one stage.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Recipe {
    /// How the parts come in.
    pub source: Source,
    /// Commands, each reading what the one before it writes; none with [`Source::Own`].
    pub commands: Vec<Step>,
    /// How many parts there are.
    pub parts: usize,
}

/// See [`Recipe::source`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// The first command's standard input is all parts, one after the other.
    InOrder,
    /// The first command's last operands are the parts, one each.
    Separate,
    /// Likewise, but the parts are counts of equal lines: without them the lines are merged, and
    /// what comes out is counted anew.
    Counted,
    /// posh's own code does all of it.
    Own(Own),
}

/// A command of a [`Recipe`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    /// The stage whose command, environment and so on it has.
    pub stage: usize,
    /// Its words, without the operands that are the parts.
    pub argv: Vec<OsString>,
}

/// The words of a stage, and how they are read.
#[derive(Debug, Clone, Copy)]
pub struct Words<'a> {
    /// As the shell wrote them.
    pub argv: &'a [OsString],
    /// By its annotation.
    pub invocation: &'a Invocation,
}

impl Recipe {
    /// What `steps` mean for `stage`, whose parts are `parts`.
    #[must_use]
    pub fn of<'a>(
        steps: Steps,
        stage: usize,
        parts: &[Part],
        words: &dyn Fn(usize) -> Words<'a>,
    ) -> Self {
        let merge = |by: usize| Step { stage: by, argv: merging_words(words(by)) };
        let same = || Step { stage, argv: words(stage).argv.to_vec() };
        let (source, commands) = match steps {
            Steps::Merge(by) => (Source::Separate, vec![merge(by)]),
            Steps::MergeThenSame(by) => (Source::Separate, vec![merge(by), same()]),
            Steps::MergeCounted(by) => (Source::Counted, vec![merge(by)]),
            Steps::Same => (Source::InOrder, vec![same()]),
            Steps::Own => (Source::Own(own_of(words(stage).invocation, parts)), Vec::new()),
        };
        Self { source, commands, parts: parts.len() }
    }
}

/// `sort -m` and the options that count.
fn merging_words(words: Words<'_>) -> Vec<OsString> {
    match words.invocation.split.as_ref().and_then(|s| s.aggregator.as_ref()) {
        Some(Aggregator::Merge { words, .. }) => words.clone(),
        _ => unreachable!("the plan merges by the command of a stage that has one"),
    }
}

fn own_of(invocation: &Invocation, parts: &[Part]) -> Own {
    match invocation.split.as_ref().and_then(|s| s.aggregator.as_ref()) {
        Some(Aggregator::UniqCount) => Own::uniq_count(),
        Some(Aggregator::WcTotal(letters)) => {
            let operands = parts.iter().map(|p| p.operands.as_ref().map_or(0, Vec::len));
            Own::wc_total(letters, operands.collect())
        }
        _ => Own::sum(),
    }
}

/// Whether the parts of a command say the same at their start only if it is not about their input:
/// no operand is in two parts.
#[must_use]
pub fn starts_alike(argv: &[OsString], parts: &[Part]) -> bool {
    let mut seen = HashSet::new();
    parts.len() > 1
        && parts
            .iter()
            .flat_map(|p| p.operands.iter().flatten())
            .all(|operand| seen.insert(&argv[*operand]))
}
