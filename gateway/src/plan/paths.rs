//! Cheapest placements along each path from a source to a sink (paper §5.2, step 2), and agreement
//! between paths that meet.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    ExecutorId, Flow, Heads, LineEnds, LocalReason, Need, PipelineFacts, ReasonKind, Site, Spot,
    StageFacts, join::PendingJoin,
};

/// Placement of each stage by the paths, or the reason for running it locally.
pub(super) fn assign(pipeline: &PipelineFacts, heads: &Heads) -> Vec<Result<Spot, LocalReason>> {
    let mut wishes: Vec<BTreeSet<Spot>> = vec![BTreeSet::new(); pipeline.stages.len()];
    for path in source_to_sink(pipeline) {
        for (stage, spot) in path.iter().zip(cheapest(pipeline, heads, &path)) {
            wishes[*stage].insert(spot);
        }
    }
    let pinned = |stage: usize| pin(pipeline, heads, stage);
    wishes.into_iter().enumerate().map(|(stage, wishes)| agree(pinned(stage), &wishes)).collect()
}

fn agree(
    pin: Option<Result<Spot, LocalReason>>,
    wishes: &BTreeSet<Spot>,
) -> Result<Spot, LocalReason> {
    match (pin, wishes.len()) {
        (Some(pin), _) => pin,
        (None, 1) => Ok(*wishes.first().expect("there is one")),
        (None, _) => Err(ReasonKind::Placement.because("its inputs come from several machines")),
    }
}

/// Fixed placement of a stage, or the reason for running it locally; `None` if it is free.
fn pin(pipeline: &PipelineFacts, heads: &Heads, stage: usize) -> Option<Result<Spot, LocalReason>> {
    if heads.contains_key(&stage) {
        return Some(Ok(Spot::Parts(stage)));
    }
    let facts = &pipeline.stages[stage];
    match &facts.need {
        Need::Anywhere => None,
        Need::Here(reason) => Some(Err(reason.clone())),
        Need::At(executor) => Some(match facts.refusals.get(executor) {
            Some(reason) => Err(reason.clone()),
            None => Ok(Spot::Site(Site::Executor(*executor))),
        }),
        Need::Split => Some(Err(facts.refusals.values().next().cloned().unwrap_or_else(|| {
            ReasonKind::Placement
                .because("its files are on several machines, in too many pieces to be split")
        }))),
    }
}

/// Every path along standard output, from each stage without an incoming pipe.
fn source_to_sink(pipeline: &PipelineFacts) -> Vec<Vec<usize>> {
    let next: BTreeMap<usize, usize> = pipeline.edges.iter().map(|e| (e.from.0, e.to.0)).collect();
    let has_source: BTreeSet<usize> = pipeline.edges.iter().map(|e| e.to.0).collect();
    let sources = (0..pipeline.stages.len()).filter(|s| !has_source.contains(s));
    let walk = |source: usize| {
        let mut path = vec![source];
        while let Some(stage) = next.get(path.last().expect("starts with its source")) {
            if path.contains(stage) {
                break;
            }
            path.push(*stage);
        }
        path
    };
    let mut paths: Vec<Vec<usize>> = sources.map(walk).collect();
    let reached: BTreeSet<usize> = paths.iter().flatten().copied().collect();
    // A cycle of FIFOs has no source: each of its stages is a path of its own.
    paths.extend((0..pipeline.stages.len()).filter(|s| !reached.contains(s)).map(|s| vec![s]));
    paths
}

/// Cheapest spots for the stages of one path, by dynamic programming over its edges: crossing
/// between machines costs the flow.
fn cheapest(pipeline: &PipelineFacts, heads: &Heads, path: &[usize]) -> Vec<Spot> {
    let columns = columns(pipeline, heads, path);
    let source = pipeline.stages[path[0]].input;
    let sink = pipeline.stages[path[path.len() - 1]].output;
    // The flow into the first stage is the unit; each stage multiplies it by its weight.
    let mut flowing = 1.0;
    let mut costs: Vec<Vec<(f64, usize)>> = Vec::new();
    for (position, &stage) in path.iter().enumerate() {
        let column = columns[position].spots.iter().map(|&spot| match position {
            0 => (entry_cost(source, spot, heads), 0),
            _ => best_before(
                &costs[position - 1],
                &columns[position - 1],
                stage,
                spot,
                flowing,
                heads,
            ),
        });
        costs.push(column.collect());
        flowing *= pipeline.stages[stage].weight;
    }
    let last = path.len() - 1;
    let ends = costs[last]
        .iter()
        .zip(&columns[last].spots)
        .map(|((cost, _), &spot)| cost + exit_cost(sink, spot, flowing, &columns[last], heads));
    // Of equal cuts, take the last: the stage is not where its output goes.
    let elsewhere = |spot: Spot| match sink {
        Flow::Nothing => spot != Spot::Site(Site::Here),
        Flow::At(site) => spot != Spot::Site(site),
    };
    let mut at = cheapest_index(ends, |index| elsewhere(columns[last].spots[index]));
    let mut spots = vec![columns[last].spots[at]];
    for position in (1..path.len()).rev() {
        at = costs[position][at].1;
        spots.push(columns[position - 1].spots[at]);
    }
    spots.reverse();
    spots
}

/// Of equally cheap predecessors, takes another spot than `spot`: the cut is as late as possible.
fn best_before(
    before: &[(f64, usize)],
    column: &Column,
    stage: usize,
    spot: Spot,
    flowing: f64,
    heads: &Heads,
) -> (f64, usize) {
    let spots = &column.spots;
    // A stage that is not in parts can't continue in parts; a split begins at its head only.
    let impossible =
        |from: Spot| matches!(spot, Spot::Parts(head) if head != stage && from != spot);
    let cost_from = |from: Spot| match impossible(from) {
        true => f64::INFINITY,
        false => crossing(from, spot, column.joined_here, heads) * flowing,
    };
    let costs: Vec<f64> =
        before.iter().zip(spots).map(|((cost, _), &from)| cost + cost_from(from)).collect();
    let index = cheapest_index(costs.iter().copied(), |index| spots[index] != spot);
    (costs[index], index)
}

fn cheapest_index(costs: impl Iterator<Item = f64>, preferred: impl Fn(usize) -> bool) -> usize {
    const SAME: f64 = 1e-9;
    let costs: Vec<f64> = costs.collect();
    let least = costs.iter().copied().fold(f64::INFINITY, f64::min);
    let cheapest = || costs.iter().enumerate().filter(|(_, c)| **c <= least + SAME).map(|(i, _)| i);
    cheapest().find(|&i| preferred(i)).or_else(|| cheapest().next()).unwrap_or(0)
}

/// Options of one stage of a path.
struct Column {
    /// Possible spots.
    spots: Vec<Spot>,
    /// If it is split, its parts are joined on the workstation.
    joined_here: bool,
}

/// Possible spots of each stage of a path: its fixed spot, or every spot on the path.
fn columns(pipeline: &PipelineFacts, heads: &Heads, path: &[usize]) -> Vec<Column> {
    let mut known: BTreeSet<Spot> = [Spot::Site(Site::Here)].into();
    for flow in [pipeline.stages[path[0]].input, pipeline.stages[path[path.len() - 1]].output] {
        if let Flow::At(site) = flow {
            known.insert(Spot::Site(site));
        }
    }
    for &stage in path {
        if let Some(pinned) = pin(pipeline, heads, stage) {
            let spot = pinned.unwrap_or(Spot::Site(Site::Here));
            known.insert(spot);
            known.extend(single_site(spot, heads).map(Spot::Site));
        }
    }
    // Parts continue as long as every stage since the split can be split behind the pending join.
    let mut split: Option<(usize, PendingJoin)> = None;
    let mut columns = Vec::new();
    for (position, &stage) in path.iter().enumerate() {
        let facts = &pipeline.stages[stage];
        let after_split = position > 0 && ends_lines(&pipeline.stages[path[position - 1]]);
        split = match pin(pipeline, heads, stage) {
            Some(Ok(Spot::Parts(head))) => Some((head, PendingJoin::head(pipeline, head))),
            Some(_) => None,
            None => split
                .filter(|(head, _)| after_split && runs_at_all(facts, &heads[head]))
                .and_then(|(head, pending)| Some((head, pending.after(pipeline, stage)?)))
                // On one machine the merge runs on the server, and counting once sends less than
                // the counts of parts.
                .filter(|(head, pending)| {
                    !pending.is_counted() || single_site(Spot::Parts(*head), heads).is_none()
                }),
        };
        columns.push(Column {
            spots: match pin(pipeline, heads, stage) {
                Some(pinned) => vec![pinned.unwrap_or(Spot::Site(Site::Here))],
                None => free_spots(facts, &known, split.map(|(head, _)| head)),
            },
            joined_here: split.is_some_and(|(_, pending)| pending.joined_here()),
        });
    }
    columns
}

fn free_spots(facts: &StageFacts, known: &BTreeSet<Spot>, parts: Option<usize>) -> Vec<Spot> {
    let spots = known.iter().copied().filter(|spot| match spot {
        Spot::Site(Site::Here) => true,
        Spot::Site(Site::Executor(executor)) => !facts.refusals.contains_key(executor),
        Spot::Parts(_) => false,
    });
    // Parts first: with equal data movement, several processes are faster than one.
    parts.map(Spot::Parts).into_iter().chain(spots).collect()
}

fn ends_lines(facts: &StageFacts) -> bool {
    facts.line_ends != LineEnds::Unknown
}

fn runs_at_all(facts: &StageFacts, parts: &[super::StagePart]) -> bool {
    parts.iter().all(|p| !facts.refusals.contains_key(&p.executor))
}

/// The machine of all parts, if there is only one.
fn single_site(spot: Spot, heads: &Heads) -> Option<Site> {
    let Spot::Parts(head) = spot else { return None };
    let machines: BTreeSet<ExecutorId> = heads[&head].iter().map(|p| p.executor).collect();
    (machines.len() == 1).then(|| Site::Executor(*machines.first().expect("there is one")))
}

/// Network crossings between two spots: 0 for none, 2 if the data must pass through the
/// workstation.
fn crossing(from: Spot, to: Spot, joined_here: bool, heads: &Heads) -> f64 {
    match single_site(from, heads) {
        _ if from == to => 0.0,
        Some(site) if Spot::Site(site) == to => {
            if joined_here {
                2.0
            } else {
                0.0
            }
        }
        _ => 1.0,
    }
}

fn entry_cost(source: Flow, spot: Spot, heads: &Heads) -> f64 {
    match source {
        Flow::Nothing => 0.0,
        Flow::At(site) => crossing(Spot::Site(site), spot, false, heads),
    }
}

fn exit_cost(sink: Flow, spot: Spot, flowing: f64, column: &Column, heads: &Heads) -> f64 {
    match sink {
        Flow::Nothing => 0.0,
        Flow::At(site) => crossing(spot, Spot::Site(site), column.joined_here, heads) * flowing,
    }
}

/// Reason for a stage that the paths placed locally.
pub(super) fn reason_for_here(pipeline: &PipelineFacts, stage: usize) -> LocalReason {
    let facts = &pipeline.stages[stage];
    let feeds: Vec<usize> =
        pipeline.edges.iter().filter(|e| e.to.0 == stage).map(|e| e.from.0).collect();
    let anything_remote =
        pipeline.stages.iter().any(|s| !matches!(s.need, Need::Here(_) | Need::Anywhere));
    if let Some(reason) = facts.refusals.values().next().filter(|_| anything_remote) {
        return reason.clone();
    }
    match (feeds.is_empty(), anything_remote) {
        (_, false) => LocalReason::nothing_on_mounts(),
        (true, true) => ReasonKind::Placement.because("its input is on this machine"),
        (false, true) => ReasonKind::Placement.because("less data moves when it runs here"),
    }
}
