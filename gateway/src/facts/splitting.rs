//! How a stage may be split between machines.

use std::collections::BTreeMap;

use posh_annotations::{Aggregator, Invocation, Split};

use crate::{
    enlisted::{DescriptorKind, Enlisted},
    plan::{BehindMerge, Flow, Joining, LineEnds, Need, Site, StageFacts},
};

/// posh's own code compares lines by bytes, uniq by the locale's collation.
pub(super) fn counts_equal_lines(invocation: &Invocation) -> bool {
    let split = invocation.split.as_ref();
    split.is_some_and(|s| s.aggregator == Some(Aggregator::UniqCount))
}

/// Returns true if the stage's locale collates by bytes.
pub fn collates_by_bytes(stage: &Enlisted) -> bool {
    let set = ["LC_ALL", "LC_COLLATE", "LANG"]
        .into_iter()
        .find_map(|n| stage.variable(n).filter(|v| !v.is_empty()));
    set.is_none_or(|locale| ["C", "POSIX", "C.UTF-8", "C.utf8"].iter().any(|name| locale == *name))
}

/// Facts about splitting a command, from its annotation alone. It runs anywhere, and no operand has
/// an owner.
#[must_use]
pub fn splitting(invocation: &Invocation) -> StageFacts {
    let split = invocation.split.as_ref().filter(|s| joins_itself(invocation, s));
    StageFacts {
        need: Need::Anywhere,
        input: Flow::Nothing,
        output: Flow::At(Site::Here),
        weight: invocation.output_weight,
        operands: Vec::new(),
        across_input: split.is_some_and(|s| s.across_input),
        joining: match split.and_then(|s| s.aggregator.as_ref()) {
            None => Joining::InOrder,
            Some(Aggregator::Merge { drops: false, .. }) => Joining::Merge,
            Some(Aggregator::Merge { drops: true, .. }) => Joining::MergeUnique,
            Some(Aggregator::Same) => Joining::Same,
            Some(Aggregator::Sum | Aggregator::UniqCount | Aggregator::WcTotal(_)) => Joining::Own,
        },
        behind_merge: split.and_then(|s| s.behind_merge).map(|way| match way {
            posh_annotations::BehindMerge::Same => BehindMerge::Same,
            posh_annotations::BehindMerge::Counted => BehindMerge::Counted,
        }),
        whole_files: split.is_some_and(|s| s.whole_files),
        line_ends: line_ends(invocation),
        refusals: BTreeMap::new(),
    }
}

/// Returns true unless the merging command differs from the annotated one, whose presence and
/// version are known everywhere.
pub(super) fn joins_itself(invocation: &Invocation, split: &Split) -> bool {
    match &split.aggregator {
        Some(Aggregator::Merge { words, .. }) => {
            words.first().is_some_and(|name| *name == *invocation.command)
        }
        _ => true,
    }
}

fn line_ends(invocation: &Invocation) -> LineEnds {
    match invocation.line_ends {
        posh_annotations::LineEnds::Always => LineEnds::Always,
        posh_annotations::LineEnds::AsInput => LineEnds::AsInput,
        posh_annotations::LineEnds::Unknown => LineEnds::Unknown,
    }
}

/// Returns true if a stage's outputs allow a split: parts write one after the other. A reader must
/// not notice (one open file description for stdout and stderr).
pub(super) fn can_be_split(stage: &Enlisted) -> bool {
    let Some(out) = stage.descriptor(1) else { return false };
    let Some(err) = stage.descriptor(2) else { return true };
    let one = out.identity == err.identity
        && matches!(out.kind, DescriptorKind::Pipe | DescriptorKind::File | DescriptorKind::Socket);
    !one
}
