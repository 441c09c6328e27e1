//! How and where the outputs of a stage's parts are joined: on the parts' machine if there is only
//! one, else locally.

use std::{collections::BTreeSet, fmt};

use super::{BehindMerge, Joining, PipelineFacts, Placement, Site, Spot};
use crate::model::LocalReason;

/// Join of a stage's outputs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Join {
    /// No join: each part flows on to its part of the next stage.
    Parts,
    /// Concatenation; also the output of a stage that is not split.
    InOrder,
    /// By an aggregator.
    By {
        /// Steps of the aggregator.
        steps: Steps,
        /// Machine of the aggregator.
        at: Site,
    },
}

/// Steps of an aggregator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Steps {
    /// Merges the parts with that stage's command (`sort -m`).
    Merge(usize),
    /// Merges them likewise, and feeds the result to the stage's own command.
    MergeThenSame(usize),
    /// Merges the counted lines of the parts with that stage's command, and adds the counts of
    /// equal lines.
    MergeCounted(usize),
    /// Feeds the parts in order to the stage's own command.
    Same,
    /// Feeds the parts in order to posh's own code.
    Own,
}

impl Steps {
    /// Returns true if all steps are commands, which any machine of the plan has.
    fn only_commands(self) -> bool {
        !matches!(self, Self::MergeCounted(_) | Self::Own)
    }
}

/// Join that is still due after a stage that runs in parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PendingJoin {
    /// Concatenation.
    InOrder,
    /// A merge with that stage's command.
    Merge(usize),
    /// These steps, which end the parts.
    Steps(Steps),
}

impl PendingJoin {
    /// Join due after the stage in which the split begins.
    pub(super) fn head(pipeline: &PipelineFacts, stage: usize) -> Self {
        match pipeline.stages[stage].joining {
            Joining::InOrder => Self::InOrder,
            Joining::Merge | Joining::MergeUnique => Self::Merge(stage),
            Joining::Same => Self::Steps(Steps::Same),
            Joining::Own => Self::Steps(Steps::Own),
        }
    }

    /// Join due after a further stage, if that one can be split behind this join.
    pub(super) fn after(self, pipeline: &PipelineFacts, stage: usize) -> Option<Self> {
        let facts = &pipeline.stages[stage];
        match (self, facts.behind_merge) {
            (Self::InOrder, _) if facts.across_input => Some(Self::head(pipeline, stage)),
            (Self::Merge(by), Some(BehindMerge::Same)) => {
                Some(Self::Steps(Steps::MergeThenSame(by)))
            }
            // A merge that drops lines would drop their counts.
            (Self::Merge(by), Some(BehindMerge::Counted))
                if pipeline.stages[by].joining == Joining::Merge =>
            {
                Some(Self::Steps(Steps::MergeCounted(by)))
            }
            _ => None,
        }
    }

    /// Returns true if the parts are counts of equal lines.
    pub(super) fn is_counted(self) -> bool {
        matches!(self, Self::Steps(Steps::MergeCounted(_)))
    }

    fn steps(self) -> Option<Steps> {
        match self {
            Self::InOrder => None,
            Self::Merge(by) => Some(Steps::Merge(by)),
            Self::Steps(steps) => Some(steps),
        }
    }

    /// Returns true if the parts can only be joined on the workstation, even if they are on one
    /// machine.
    pub(super) fn joined_here(self) -> bool {
        self.steps().is_some_and(|steps| !steps.only_commands())
    }
}

/// Join of one stage.
pub(super) fn of(
    pipeline: &PipelineFacts,
    placements: &[Placement],
    sites: &[Result<Spot, LocalReason>],
    stage: usize,
) -> Join {
    let (Placement::Remote(parts), Ok(Spot::Parts(head))) = (&placements[stage], &sites[stage])
    else {
        return Join::InOrder;
    };
    let goes_on = |to: usize| to != *head && sites[to] == Ok(Spot::Parts(*head));
    if pipeline.edges.iter().any(|e| e.from == (stage, 1) && goes_on(e.to.0)) {
        return Join::Parts;
    }
    let Some(steps) = pending(pipeline, *head, stage).steps() else { return Join::InOrder };
    let machines: BTreeSet<_> = parts.iter().map(|p| p.executor).collect();
    let at = match machines.first().filter(|_| machines.len() == 1 && steps.only_commands()) {
        Some(machine) => Site::Executor(*machine),
        None => Site::Here,
    };
    Join::By { steps, at }
}

/// Join due after `stage`, which the split of `head` has reached.
fn pending(pipeline: &PipelineFacts, head: usize, stage: usize) -> PendingJoin {
    let mut chain = vec![stage];
    while let Some(edge) = pipeline.edges.iter().find(|e| e.to == (chain[chain.len() - 1], 0)) {
        if chain.contains(&head) || chain.contains(&edge.from.0) {
            break;
        }
        chain.push(edge.from.0);
    }
    let behind = chain.iter().rev().skip(1);
    behind.fold(PendingJoin::head(pipeline, head), |pending, &stage| {
        pending.after(pipeline, stage).unwrap_or(pending)
    })
}

impl fmt::Display for Join {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self::By { steps, at } = self else { return Ok(()) };
        match steps {
            Steps::Merge(by) => write!(f, " merged as {by}"),
            Steps::MergeThenSame(by) => write!(f, " merged as {by}, then itself"),
            Steps::MergeCounted(by) => write!(f, " merged as {by}, its counts added"),
            Steps::Same => f.write_str(" then itself"),
            Steps::Own => f.write_str(" joined"),
        }?;
        write!(f, " {}{at}", if *at == Site::Here { "" } else { "on " })
    }
}
