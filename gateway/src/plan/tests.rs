//! DAGs with the placements that the paper's §5.2 and §5.3 ask for.

use std::collections::BTreeMap;

use super::{ExecutorId, Flow, LineEnds, Need, Options, PipelineFacts, Placement, Site, StageFacts, greedy};
use crate::assembly::Edge;

const A: ExecutorId = ExecutorId(0);
const B: ExecutorId = ExecutorId(1);

fn stage(need: Need, weight: f64) -> StageFacts {
    StageFacts {
        need,
        input: Flow::Nothing,
        output: Flow::Nothing,
        weight,
        operands: Vec::new(),
        across_input: false,
        line_ends: LineEnds::Unknown,
        refusals: BTreeMap::new(),
    }
}

/// `cat` of operands (argv 1, 2, ...) with these owners.
fn cat(owners: &[ExecutorId]) -> StageFacts {
    let operands: Vec<_> = owners.iter().enumerate().map(|(i, e)| (i + 1, *e)).collect();
    let need = if owners.iter().all(|e| *e == owners[0]) { Need::At(owners[0]) } else { Need::Split };
    StageFacts { operands, line_ends: LineEnds::AsInput, ..stage(need, 1.0) }
}

fn grep() -> StageFacts {
    StageFacts { across_input: true, line_ends: LineEnds::Always, ..stage(Need::Anywhere, 0.5) }
}

fn sort() -> StageFacts {
    stage(Need::Anywhere, 1.0)
}

fn wc() -> StageFacts {
    stage(Need::Anywhere, 0.01)
}

/// A chain whose last stage writes to `sink`.
fn chain(mut stages: Vec<StageFacts>, sink: Site) -> PipelineFacts {
    let last = stages.len() - 1;
    stages[last].output = Flow::At(sink);
    let edges = (0..last).map(|i| Edge { from: (i, 1), to: (i + 1, 0) }).collect();
    PipelineFacts { stages, edges }
}

/// One word a stage: `h` here, `a`/`b` on that executor, `a+b` in parts, `!` with a seam to check.
fn check(facts: &PipelineFacts, options: Options, expect: &str) {
    let plan = greedy(facts, options);
    let letter = |e: &ExecutorId| char::from(b'a' + u8::try_from(e.0).unwrap()).to_string();
    let words = plan.placements.iter().map(|p| match p {
        Placement::Here(_) => "h".to_owned(),
        Placement::Remote(parts) => parts
            .iter()
            .map(|p| letter(&p.executor) + if p.needs_newline { "!" } else { "" })
            .collect::<Vec<_>>()
            .join("+"),
    });
    assert_eq!(words.collect::<Vec<_>>().join(" "), expect, "{plan}");
}

fn greedy_places(stages: Vec<StageFacts>, sink: Site, expect: &str) {
    check(&chain(stages, sink), Options::default(), expect);
}

#[test]
fn source_and_sink_on_one_machine_keep_all_between() {
    greedy_places(vec![cat(&[A]), grep(), sort()], Site::Executor(A), "a a a");
}

#[test]
fn the_cut_is_after_the_last_filter() {
    // §5.2's example: cat, grep and cut, written to stdout on the client.
    greedy_places(vec![cat(&[A]), grep(), grep()], Site::Here, "a a a");
    greedy_places(vec![cat(&[A]), grep(), sort(), wc()], Site::Here, "a a a a");
}

#[test]
fn what_expands_runs_behind_the_cut() {
    greedy_places(vec![cat(&[A]), stage(Need::Anywhere, 4.0)], Site::Here, "a h");
    greedy_places(vec![cat(&[A]), stage(Need::Anywhere, 4.0), wc()], Site::Here, "a a a");
}

#[test]
fn a_stage_bound_here_ends_the_remote_run() {
    let here = || stage(Need::Here("flag -P of grep is not annotated".to_owned()), 1.0);
    greedy_places(vec![cat(&[A]), here(), wc()], Site::Here, "a h h");
    greedy_places(vec![cat(&[A]), grep(), here()], Site::Here, "a a h");
}

#[test]
fn nothing_remote_means_everything_here() {
    greedy_places(vec![grep(), sort()], Site::Here, "h h");
}

#[test]
fn local_input_stays_here_even_if_the_sink_is_remote() {
    let mut facts = chain(vec![grep(), sort()], Site::Executor(A));
    facts.stages[0].input = Flow::At(Site::Here);
    // grep halves what must cross: it stays with its source, and so does sort.
    check(&facts, Options::default(), "h h");
    facts.stages[1].weight = 8.0;
    check(&facts, Options::default(), "h a");
}

#[test]
fn operands_on_two_mounts_are_split_in_order() {
    greedy_places(vec![cat(&[A, B])], Site::Here, "a+b");
    greedy_places(vec![cat(&[A, A, B, A])], Site::Here, "a+b+a");
}

#[test]
fn the_split_goes_on_across_input() {
    greedy_places(vec![cat(&[A, B]), grep()], Site::Here, "a!+b a+b");
    greedy_places(vec![cat(&[A, B]), grep(), sort()], Site::Here, "a!+b a+b h");
    greedy_places(vec![cat(&[A, B]), grep(), grep(), wc()], Site::Here, "a!+b a+b a+b h");
}

#[test]
fn a_stage_that_reduces_is_not_split() {
    greedy_places(vec![cat(&[A, B]), wc()], Site::Here, "a+b h");
}

#[test]
fn unknown_line_ends_end_the_split() {
    let mut head = cat(&[A, B]);
    head.line_ends = LineEnds::Unknown;
    greedy_places(vec![head, grep()], Site::Here, "a+b h");
}

#[test]
fn several_mounts_without_a_split_stay_here() {
    let mut head = stage(Need::Split, 1.0);
    head.operands = Vec::new();
    greedy_places(vec![head, grep()], Site::Here, "h h");
}

#[test]
fn the_splitting_factor_cuts_one_machines_share() {
    let options = Options { split_factor: 2, ..Options::default() };
    check(&chain(vec![cat(&[A, A, A, A]), grep()], Site::Here), options, "a!+a a+a");
    check(&chain(vec![cat(&[A, A, A]), grep(), wc()], Site::Here), options, "a!+a a+a a");
    check(&chain(vec![cat(&[A, A, B])], Site::Here), options, "a+a+b");
    check(&chain(vec![cat(&[A])], Site::Here), options, "a");
}

#[test]
fn paths_that_disagree_put_the_stage_here() {
    // comm <(sort a) <(sort b) with a and b on two machines, then on one.
    let diamond = |b: ExecutorId| PipelineFacts {
        stages: vec![cat(&[A]), cat(&[b]), StageFacts { output: Flow::At(Site::Here), ..stage(Need::Anywhere, 0.5) }],
        edges: vec![Edge { from: (0, 1), to: (2, 63) }, Edge { from: (1, 1), to: (2, 62) }],
    };
    check(&diamond(B), Options::default(), "a b h");
    check(&diamond(A), Options::default(), "a a a");
}

#[test]
fn an_executor_that_refuses_is_not_used() {
    let mut facts = chain(vec![cat(&[A]), grep(), sort()], Site::Here);
    facts.stages[1].refusals = [(A, "grep on a is another version".to_owned())].into();
    check(&facts, Options::default(), "a h h");
    facts.stages[0].refusals = [(A, "a can't be reached".to_owned())].into();
    check(&facts, Options::default(), "h h h");
}

#[test]
fn too_many_parts_run_here() {
    let owners: Vec<_> = (0..200).map(|i| if i % 2 == 0 { A } else { B }).collect();
    greedy_places(vec![cat(&owners)], Site::Here, "h");
}
