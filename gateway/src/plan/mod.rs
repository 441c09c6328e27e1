//! Where each stage of a pipeline runs: a pure function from what is known of
//! the pipeline to a [`Plan`], which is a value that prints. The `greedy`
//! scheduler is the paper's (§5.2, Algorithms 1 and 2, and §5.3), by its prose
//! where the printed algorithm slips.
//!
//! 1. Constraints: a stage is bound to the machine of its files; files on several
//!    machines, or here, bind it here unless it can be split.
//! 2. Splitting: a splittable stage with operands on several machines becomes one
//!    part for each run of operands on one machine, and so do the stages behind it
//!    that may be split across their input, as long as joining their outputs in order
//!    gives what one process would print. The last of them is joined by its aggregator ([`Join`]).
//! 3. For each path from a source to a sink, the cheapest cuts: an edge between
//!    machines costs what is estimated to flow over it. Among equals the latest cut is taken.
//! 4. A stage that two paths place differently runs here.
//! 5. So does one on an executor that takes no input, if it is given some (`inputs`).

mod inputs;
mod join;
mod paths;
mod print;

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

pub use self::join::{Join, Steps};
use crate::assembly::Edge;

/// Why a stage stays here of a pipeline that has nothing to do with any executor.
pub const NOTHING_ON_MOUNTS: &str = "nothing that it uses is on a mount with an executor";

/// An executor, by its place in the configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ExecutorId(pub usize);

/// A place where a stage can run, or where data is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Site {
    /// This workstation.
    Here,
    /// A server.
    Executor(ExecutorId),
}

/// What a stage's files and nature demand.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Need {
    /// It must run here, and why.
    Here(String),
    /// It names no files: it runs wherever its data flows.
    Anywhere,
    /// Its files are on one machine.
    At(ExecutorId),
    /// Its files are on several machines, but it can be split: the owner of each splittable
    /// operand.
    Split,
}

/// Where a stage's standard input comes from, or its output goes to, when no
/// other waiting stage is at that end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flow {
    /// Nothing flows: not read, /dev/null, closed, or joined to another stage.
    Nothing,
    /// A file or terminal or foreign program at that site.
    At(Site),
}

/// What is known of the end of a splittable stage's output lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LineEnds {
    /// Output always ends in a newline (or is empty).
    Always,
    /// Output ends as the last operand's file ends: that must be looked at.
    AsInput,
    /// Nobody knows.
    Unknown,
}

/// What makes one output of the outputs of a stage's parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Joining {
    /// One after the other.
    InOrder,
    /// A command that is given all parts, each sorted (`sort -m`).
    Merge,
    /// Likewise, and it drops some of the lines (`sort -m -u`).
    MergeUnique,
    /// The command itself once more, over the parts in order (`tail`, `uniq`).
    Same,
    /// posh's own code, over the parts in order (`wc`, `uniq -c`).
    Own,
}

/// How a stage can be split behind parts that have to be merged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BehindMerge {
    /// The merged parts are read by the command once more.
    Same,
    /// The parts are counts of lines; the lines are merged and the counts of equal ones added.
    Counted,
}

/// What the planner knows of one stage.
#[derive(Debug, Clone, PartialEq)]
pub struct StageFacts {
    /// See [`Need`].
    pub need: Need,
    /// See [`Flow`].
    pub input: Flow,
    /// See [`Flow`].
    pub output: Flow,
    /// Bytes out for each byte in.
    pub weight: f64,
    /// Splittable operands in order: index into argv, owner. Empty: not splittable.
    pub operands: Vec<(usize, ExecutorId)>,
    /// May be split across its standard input.
    pub across_input: bool,
    /// Joins its parts.
    pub joining: Joining,
    /// May be split across an input whose parts have to be merged.
    pub behind_merge: Option<BehindMerge>,
    /// Parts keep only operands that are regular files, can be read, and so can't fail.
    pub whole_files: bool,
    /// See [`LineEnds`].
    pub line_ends: LineEnds,
    /// Executors that can't run it, and why (tool, locale, version, not in reach).
    pub refusals: BTreeMap<ExecutorId, String>,
}

/// A pipeline as the planner sees it.
#[derive(Debug, Clone, PartialEq)]
pub struct PipelineFacts {
    /// In the order in which the shell started them.
    pub stages: Vec<StageFacts>,
    /// Pipes between them.
    pub edges: Vec<Edge>,
    /// Executors that are to see only what they have, and how a plan says so.
    pub own_input_only: BTreeMap<ExecutorId, String>,
}

/// The planner's settings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// Parts that one machine's share of a split is cut into (paper §5.3; 1: none).
    pub split_factor: usize,
    /// More parts than this, and the stage runs here: interleaved operands make one part each.
    pub most_parts: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self { split_factor: 1, most_parts: 64 }
    }
}

/// What is to be done with one stage.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Placement {
    /// The shell's own process becomes the command, and why.
    Here(String),
    /// It runs in parts (one, if it is not split), whose outputs are joined in order.
    Remote(Vec<Part>),
}

/// One part of a stage.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    /// Where it runs.
    pub executor: ExecutorId,
    /// Which splittable operands it keeps (indices into argv); `None`: all words as they are.
    pub operands: Option<Vec<usize>>,
    /// The last operand's file must end in a newline.
    pub needs_newline: bool,
    /// The operands must be regular files that can be read.
    pub whole_files: bool,
}

impl Part {
    /// The whole of a stage, or what comes from the same part of the stage before.
    fn on(executor: ExecutorId) -> Self {
        Self { executor, operands: None, needs_newline: false, whole_files: false }
    }
}

/// A plan; `Display` prints it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// One for each stage.
    pub placements: Vec<Placement>,
    /// For each edge of the pipeline: a pipe on the server that joins the stages part by part
    /// (or all parts into one), with nothing passing through the workstation.
    pub fused: Vec<bool>,
    /// For each stage: how its parts' outputs become one.
    pub joins: Vec<Join>,
}

/// Plans a pipeline.
#[must_use]
pub fn greedy(pipeline: &PipelineFacts, options: Options) -> Plan {
    let heads = split_heads(pipeline, options);
    let mut sites = paths::assign(pipeline, &heads);
    let place_all = |sites: &[Result<Spot, String>]| -> Vec<Placement> {
        (0..pipeline.stages.len()).map(|stage| place(pipeline, &heads, sites, stage)).collect()
    };
    let mut placements = place_all(&sites);
    // Each turn takes a stage here: what it feeds may be next.
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

/// The parts of every stage that is split across its operands.
type Heads = BTreeMap<usize, Vec<Part>>;

/// Where the paths put a stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Spot {
    Site(Site),
    /// With the parts of that split stage.
    Parts(usize),
}

fn split_heads(pipeline: &PipelineFacts, options: Options) -> Heads {
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

/// Runs of neighbouring operands with one owner, each cut into at most `factor` pieces.
fn parts_of(stage: &StageFacts, factor: usize) -> Vec<Part> {
    stage
        .operands
        .chunk_by(|a, b| a.1 == b.1)
        .flat_map(|run| run.chunks(run.len().div_ceil(factor.max(1))))
        .map(|piece| Part {
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
    sites: &[Result<Spot, String>],
    stage: usize,
) -> Placement {
    let facts = &pipeline.stages[stage];
    match &sites[stage] {
        Err(reason) => Placement::Here(reason.clone()),
        Ok(Spot::Site(Site::Here)) => Placement::Here(paths::reason_for_here(pipeline, stage)),
        Ok(Spot::Site(Site::Executor(executor))) => match facts.refusals.get(executor) {
            Some(reason) => Placement::Here(reason.clone()),
            None => Placement::Remote(vec![Part::on(*executor)]),
        },
        Ok(Spot::Parts(head)) if *head == stage => Placement::Remote(heads[head].clone()),
        Ok(Spot::Parts(head)) => {
            Placement::Remote(heads[head].iter().map(|p| Part::on(p.executor)).collect())
        }
    }
}

/// A split stage that is followed by one split across its input is cut between
/// lines only if each part but the last ends in a newline.
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

/// Whether the stages are joined on the server: part by part, or all parts into one on their
/// machine.
fn is_fused(placements: &[Placement], joins: &[Join], edge: &Edge) -> bool {
    let (Placement::Remote(from), Placement::Remote(to)) =
        (&placements[edge.from.0], &placements[edge.to.0])
    else {
        return false;
    };
    let one = |parts: &[Part]| parts.iter().map(|p| p.executor).collect::<BTreeSet<_>>().len() == 1;
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
