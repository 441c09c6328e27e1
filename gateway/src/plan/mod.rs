//! Placement of a pipeline's stages: a pure function from facts about the pipeline to a [`Plan`],
//! which is a value that prints. The `greedy` scheduler is the paper's (§5.2, Algorithms 1 and 2,
//! and §5.3); it follows the prose where the printed algorithm errs.
//!
//! 1. Constraints: a stage is bound to the machine of its files. Files on several machines, or
//!    local ones, bind it to this machine unless it can be split.
//! 2. Splitting: a splittable stage with operands on several machines becomes one part for each run
//!    of operands on one machine. So do the stages behind it that may be split across their input,
//!    as long as joining their outputs in order gives the output of a single process. The last of
//!    them is joined by its aggregator ([`Join`]).
//! 3. For each path from a source to a sink, the cheapest cuts: an edge between machines costs its
//!    estimated flow. Of equal cuts, the latest is taken.
//! 4. A stage that two paths place differently runs locally.
//! 5. So does a stage on an executor that takes no input, if it would get some (`inputs`).

mod inputs;
mod join;
mod paths;
mod print;

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

pub use self::join::{Join, Steps};
use crate::model::Edge;
pub use crate::model::{ExecutorId, LocalReason, ReasonKind};

/// A machine that runs a stage or has data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Site {
    /// This workstation.
    Here,
    /// A server.
    Executor(ExecutorId),
}

/// Placement constraint from a stage's files and nature.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Need {
    /// Must run locally, with the reason.
    Here(LocalReason),
    /// Names no files: runs wherever its data flows.
    Anywhere,
    /// Its files are on one machine.
    At(ExecutorId),
    /// Its files are on several machines, but it can be split by the owners of its splittable
    /// operands.
    Split,
}

/// Source of a stage's standard input, or destination of its output, if no other waiting stage is
/// at that end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flow {
    /// Nothing flows: not read, /dev/null, closed, or joined to another stage.
    Nothing,
    /// A file, terminal or foreign process at that site.
    At(Site),
}

/// How a splittable stage's output ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LineEnds {
    /// Output always ends in a newline (or is empty).
    Always,
    /// Ends as the last operand's file ends, which must be checked.
    AsInput,
    /// Unknown.
    Unknown,
}

/// How the outputs of a stage's parts are joined.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Joining {
    /// Concatenation.
    InOrder,
    /// A command that takes all parts as sorted operands (`sort -m`).
    Merge,
    /// Likewise, but it drops some lines (`sort -m -u`).
    MergeUnique,
    /// The command itself, run on the concatenated parts (`tail`, `uniq`).
    Same,
    /// posh's own code, run on the concatenated parts (`wc`, `uniq -c`).
    Own,
}

/// How a stage can be split behind parts that need a merge.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BehindMerge {
    /// The command runs again on the merged parts.
    Same,
    /// The parts are counts of lines; lines are merged and the counts of equal ones added.
    Counted,
}

/// The planner's facts about one stage.
#[derive(Debug, Clone, PartialEq)]
pub struct StageFacts {
    /// See [`Need`].
    pub need: Need,
    /// See [`Flow`].
    pub input: Flow,
    /// See [`Flow`].
    pub output: Flow,
    /// Output bytes per input byte.
    pub weight: f64,
    /// Splittable operands in order: index into argv, owner. Empty if not splittable.
    pub operands: Vec<(usize, ExecutorId)>,
    /// Can be split across its standard input.
    pub across_input: bool,
    /// How its parts are joined.
    pub joining: Joining,
    /// How it can be split across an input whose parts need a merge.
    pub behind_merge: Option<BehindMerge>,
    /// Parts keep only operands that are readable regular files, and so can't fail.
    pub whole_files: bool,
    /// See [`LineEnds`].
    pub line_ends: LineEnds,
    /// Executors that can't run it, with the reason (tool, locale, version, unreachable).
    pub refusals: BTreeMap<ExecutorId, LocalReason>,
}

/// The planner's facts about a pipeline.
#[derive(Debug, Clone, PartialEq)]
pub struct PipelineFacts {
    /// In the order in which the shell started them.
    pub stages: Vec<StageFacts>,
    /// Pipes between the stages.
    pub edges: Vec<Edge>,
    /// Executors that accept only their own data, with the reason for plans.
    pub own_input_only: BTreeMap<ExecutorId, LocalReason>,
}

/// Settings of the planner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlanSettings {
    /// Number of pieces into which one machine's share of a split is cut (paper §5.3; 1: none).
    pub split_factor: usize,
    /// Limit on parts, beyond which the stage runs locally: interleaved operands make one part
    /// each.
    pub most_parts: usize,
}

impl Default for PlanSettings {
    fn default() -> Self {
        Self { split_factor: 1, most_parts: 64 }
    }
}

/// Placement of one stage.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Placement {
    /// The stage program executes the command locally, with the reason.
    Here(LocalReason),
    /// Runs in parts (one, if it is not split), whose outputs are joined.
    Remote(Vec<StagePart>),
}

/// One part of a stage.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StagePart {
    /// Executor of the part.
    pub executor: ExecutorId,
    /// Splittable operands that it keeps (indices into argv); `None`: all words unchanged.
    pub operands: Option<Vec<usize>>,
    /// The last operand's file must end in a newline.
    pub needs_newline: bool,
    /// The operands must be readable regular files.
    pub whole_files: bool,
}

impl StagePart {
    /// A whole stage, or a part fed by the same part of the stage before.
    fn on(executor: ExecutorId) -> Self {
        Self { executor, operands: None, needs_newline: false, whole_files: false }
    }
}

/// A plan; `Display` prints it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// One for each stage.
    pub placements: Vec<Placement>,
    /// Per edge of the pipeline: true if a pipe on the server joins the stages, part by part or all
    /// parts into one, with no data through the workstation.
    pub fused: Vec<bool>,
    /// Per stage: how its parts' outputs are joined.
    pub joins: Vec<Join>,
}

/// Plans a pipeline.
#[must_use]
pub fn greedy(pipeline: &PipelineFacts, options: PlanSettings) -> Plan {
    let heads = split_heads(pipeline, options);
    let mut sites = paths::assign(pipeline, &heads);
    let place_all = |sites: &[Result<Spot, LocalReason>]| -> Vec<Placement> {
        (0..pipeline.stages.len()).map(|stage| place(pipeline, &heads, sites, stage)).collect()
    };
    let mut placements = place_all(&sites);
    // Each iteration makes one stage local; the stage that it feeds may be next.
    while let Some((stage, why)) = inputs::first_with_foreign_input(pipeline, &placements) {
        sites[stage] = Err(why);
        placements = place_all(&sites);
    }
    mark_seams(pipeline, &mut placements);
    let joins: Vec<Join> =
        (0..placements.len()).map(|stage| join::of(pipeline, &placements, &sites, stage)).collect();
    let fused = pipeline.edges.iter().map(|e| is_fused(&placements, &joins, e)).collect();
    Plan { placements, fused, joins }
}

/// Parts of every stage that is split across its operands.
type Heads = BTreeMap<usize, Vec<StagePart>>;

/// A stage's placement by the paths.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Spot {
    Site(Site),
    /// Together with the parts of that split stage.
    Parts(usize),
}

fn split_heads(pipeline: &PipelineFacts, options: PlanSettings) -> Heads {
    let mut heads = Heads::new();
    for (index, stage) in pipeline.stages.iter().enumerate() {
        let wanted = match stage.need {
            Need::Split => true,
            Need::At(_) => options.split_factor > 1 && stage.operands.len() > 1,
            Need::Here(_) | Need::Anywhere => false,
        };
        if !wanted || stage.operands.iter().any(|(_, e)| stage.refusals.contains_key(e)) {
            continue;
        }
        let parts = parts_of(stage, options.split_factor);
        if parts.len() > 1 && parts.len() <= options.most_parts {
            heads.insert(index, parts);
        }
    }
    heads
}

/// Groups neighbouring operands with one owner, each group cut into at most `factor` pieces.
fn parts_of(stage: &StageFacts, factor: usize) -> Vec<StagePart> {
    stage
        .operands
        .chunk_by(|a, b| a.1 == b.1)
        .flat_map(|run| run.chunks(run.len().div_ceil(factor.max(1))))
        .map(|piece| StagePart {
            executor: piece[0].1,
            operands: Some(piece.iter().map(|(index, _)| *index).collect()),
            needs_newline: false,
            whole_files: stage.whole_files,
        })
        .collect()
}

fn place(
    pipeline: &PipelineFacts,
    heads: &Heads,
    sites: &[Result<Spot, LocalReason>],
    stage: usize,
) -> Placement {
    let facts = &pipeline.stages[stage];
    match &sites[stage] {
        Err(reason) => Placement::Here(reason.clone()),
        Ok(Spot::Site(Site::Here)) => Placement::Here(paths::reason_for_here(pipeline, stage)),
        Ok(Spot::Site(Site::Executor(executor))) => match facts.refusals.get(executor) {
            Some(reason) => Placement::Here(reason.clone()),
            None => Placement::Remote(vec![StagePart::on(*executor)]),
        },
        Ok(Spot::Parts(head)) if *head == stage => Placement::Remote(heads[head].clone()),
        Ok(Spot::Parts(head)) => {
            Placement::Remote(heads[head].iter().map(|p| StagePart::on(p.executor)).collect())
        }
    }
}

/// Marks parts that must end in a newline: all but the last of a split stage, if a stage split
/// across its input follows. Only then is the input cut between lines.
fn mark_seams(pipeline: &PipelineFacts, placements: &mut [Placement]) {
    for edge in &pipeline.edges {
        let follows = matches!(&placements[edge.to.0], Placement::Remote(parts) if parts.len() > 1);
        let as_input = pipeline.stages[edge.from.0].line_ends == LineEnds::AsInput;
        if let (true, true, Placement::Remote(parts)) =
            (follows, as_input, &mut placements[edge.from.0])
        {
            let last = parts.len() - 1;
            parts[..last]
                .iter_mut()
                .filter(|p| p.operands.is_some())
                .for_each(|p| p.needs_newline = true);
        }
    }
}

/// Returns true if the stages are joined on the server: part by part, or all parts into one on
/// their machine.
fn is_fused(placements: &[Placement], joins: &[Join], edge: &Edge) -> bool {
    let (Placement::Remote(from), Placement::Remote(to)) =
        (&placements[edge.from.0], &placements[edge.to.0])
    else {
        return false;
    };
    let one =
        |parts: &[StagePart]| parts.iter().map(|p| p.executor).collect::<BTreeSet<_>>().len() == 1;
    let one_machine = one(from) && to.len() == 1 && from[0].executor == to[0].executor;
    match &joins[edge.from.0] {
        Join::Parts => true,
        Join::InOrder => one_machine,
        Join::By { at, .. } => one_machine && *at == Site::Executor(to[0].executor),
    }
}

impl fmt::Display for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Here => f.write_str("here"),
            Self::Executor(ExecutorId(index)) => write!(f, "executor {index}"),
        }
    }
}

#[cfg(test)]
mod tests;
