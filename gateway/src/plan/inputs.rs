//! Executors that accept only their own data: a stage runs on one of them only if all its input
//! comes from that executor (`takes_input = false` of an `[[executor]]`).
//!
//! Invariant: in the plan, no such executor is sent a byte that a command on this or another
//! machine has written, or that lies in a file elsewhere. Arguments and variables of the commands
//! themselves are sent all the same.

use super::{Edge, Flow, LocalReason, PipelineFacts, Placement, Site, StagePart};

/// Finds a stage that would get foreign input, with the reason for running it locally.
pub(super) fn first_with_foreign_input(
    pipeline: &PipelineFacts,
    placements: &[Placement],
) -> Option<(usize, LocalReason)> {
    placements.iter().enumerate().find_map(|(stage, placement)| {
        let Placement::Remote(parts) = placement else { return None };
        let why = parts.iter().find_map(|part| pipeline.own_input_only.get(&part.executor))?;
        (!has_own_input(pipeline, placements, stage, parts)).then(|| (stage, why.clone()))
    })
}

fn has_own_input(
    pipeline: &PipelineFacts,
    placements: &[Placement],
    stage: usize,
    parts: &[StagePart],
) -> bool {
    let is_at = |executor| parts.iter().all(|part| part.executor == executor);
    let comes_from_there = |edge: &Edge| match &placements[edge.from.0] {
        Placement::Here(_) => false,
        // Part by part, or all parts of one machine into its only part.
        Placement::Remote(from) => {
            let is_same = from.len() == parts.len()
                && from.iter().zip(parts).all(|(a, b)| a.executor == b.executor);
            is_same
                || (parts.len() == 1 && from.iter().all(|part| part.executor == parts[0].executor))
        }
    };
    let file_is_there = match pipeline.stages[stage].input {
        Flow::Nothing => true,
        Flow::At(Site::Here) => false,
        Flow::At(Site::Executor(executor)) => is_at(executor),
    };
    file_is_there && pipeline.edges.iter().filter(|edge| edge.to.0 == stage).all(comes_from_there)
}
