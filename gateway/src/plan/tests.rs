//! DAGs with the placements that the paper's §5.2 and §5.3 ask for.

use std::collections::BTreeMap;

use super::{
    BehindMerge, ExecutorId, Flow, Join, Joining, LineEnds, Need, PipelineFacts, Placement,
    PlanSettings, Site, StageFacts, Steps, greedy,
};
use crate::model::{Edge, LocalReason, ReasonKind};

const A: ExecutorId = ExecutorId(0);
const B: ExecutorId = ExecutorId(1);

fn because(words: &'static str) -> LocalReason {
    ReasonKind::Executor.because(words)
}

fn stage(need: Need, weight: f64) -> StageFacts {
    StageFacts {
        need,
        input: Flow::Nothing,
        output: Flow::Nothing,
        weight,
        operands: Vec::new(),
        across_input: false,
        joining: Joining::InOrder,
        behind_merge: None,
        whole_files: false,
        line_ends: LineEnds::Unknown,
        refusals: BTreeMap::new(),
    }
}

/// `cat` of operands (argv 1, 2, ...) with these owners.
fn cat(owners: &[ExecutorId]) -> StageFacts {
    let operands: Vec<_> = owners.iter().enumerate().map(|(i, e)| (i + 1, *e)).collect();
    let need =
        if owners.iter().all(|e| *e == owners[0]) { Need::At(owners[0]) } else { Need::Split };
    StageFacts { operands, line_ends: LineEnds::AsInput, ..stage(need, 1.0) }
}

fn grep() -> StageFacts {
    StageFacts { across_input: true, line_ends: LineEnds::Always, ..stage(Need::Anywhere, 0.5) }
}

/// What can't be split.
fn tac() -> StageFacts {
    stage(Need::Anywhere, 1.0)
}

fn md5sum() -> StageFacts {
    stage(Need::Anywhere, 0.01)
}

fn sort() -> StageFacts {
    StageFacts { joining: Joining::Merge, ..joined(1.0) }
}

fn wc() -> StageFacts {
    StageFacts { joining: Joining::Own, ..joined(0.01) }
}

fn tail() -> StageFacts {
    StageFacts { joining: Joining::Same, behind_merge: Some(BehindMerge::Same), ..joined(0.01) }
}

fn uniq_count() -> StageFacts {
    StageFacts { joining: Joining::Own, behind_merge: Some(BehindMerge::Counted), ..joined(0.5) }
}

fn joined(weight: f64) -> StageFacts {
    StageFacts { across_input: true, line_ends: LineEnds::Always, ..stage(Need::Anywhere, weight) }
}

/// A chain whose last stage writes to `sink`.
fn chain(mut stages: Vec<StageFacts>, sink: Site) -> PipelineFacts {
    let last = stages.len() - 1;
    stages[last].output = Flow::At(sink);
    let edges = (0..last).map(|i| Edge { from: (i, 1), to: (i + 1, 0) }).collect();
    PipelineFacts { stages, edges, own_input_only: BTreeMap::new() }
}

/// One word a stage: `h` here, `a`/`b` on that executor, `a+b` in parts, `!` with a seam to check,
/// `?` with files to look at; `>h` and `>a`: joined by an aggregator, and where.
fn check(facts: &PipelineFacts, options: PlanSettings, expect: &str) {
    let plan = greedy(facts, options);
    let letter = |e: &ExecutorId| char::from(b'a' + u8::try_from(e.0).unwrap()).to_string();
    let mark = |marked: bool, mark: &'static str| if marked { mark } else { "" };
    let words = plan.placements.iter().zip(&plan.joins).map(|(placement, join)| match placement {
        Placement::Here(_) => "h".to_owned(),
        Placement::Remote(parts) => {
            let parts = parts
                .iter()
                .map(|p| {
                    letter(&p.executor) + mark(p.needs_newline, "!") + mark(p.whole_files, "?")
                })
                .collect::<Vec<_>>();
            let at = match join {
                Join::By { at: Site::Here, .. } => ">h".to_owned(),
                Join::By { at: Site::Executor(at), .. } => format!(">{}", letter(at)),
                Join::Parts | Join::InOrder => String::new(),
            };
            parts.join("+") + &at
        }
    });
    assert_eq!(words.collect::<Vec<_>>().join(" "), expect, "{plan}");
}

fn greedy_places(stages: Vec<StageFacts>, sink: Site, expect: &str) {
    check(&chain(stages, sink), PlanSettings::default(), expect);
}

#[test]
fn source_and_sink_on_one_machine_keep_all_between() {
    greedy_places(vec![cat(&[A]), grep(), tac()], Site::Executor(A), "a a a");
}

#[test]
fn the_cut_is_after_the_last_filter() {
    // §5.2's example: cat, grep and cut, written to stdout on the client.
    greedy_places(vec![cat(&[A]), grep(), grep()], Site::Here, "a a a");
    greedy_places(vec![cat(&[A]), grep(), tac(), md5sum()], Site::Here, "a a a a");
}

#[test]
fn what_expands_runs_behind_the_cut() {
    greedy_places(vec![cat(&[A]), stage(Need::Anywhere, 4.0)], Site::Here, "a h");
    greedy_places(vec![cat(&[A]), stage(Need::Anywhere, 4.0), md5sum()], Site::Here, "a a a");
}

#[test]
fn a_stage_bound_here_ends_the_remote_run() {
    let here = || stage(Need::Here(because("flag -P of grep is not annotated")), 1.0);
    greedy_places(vec![cat(&[A]), here(), md5sum()], Site::Here, "a h h");
    greedy_places(vec![cat(&[A]), grep(), here()], Site::Here, "a a h");
}

#[test]
fn nothing_remote_means_everything_here() {
    greedy_places(vec![grep(), tac()], Site::Here, "h h");
}

#[test]
fn local_input_stays_here_even_if_the_sink_is_remote() {
    let mut facts = chain(vec![grep(), tac()], Site::Executor(A));
    facts.stages[0].input = Flow::At(Site::Here);
    // grep halves what must cross: it stays with its source, and so does sort.
    check(&facts, PlanSettings::default(), "h h");
    facts.stages[1].weight = 8.0;
    check(&facts, PlanSettings::default(), "h a");
}

#[test]
fn operands_on_two_mounts_are_split_in_order() {
    greedy_places(vec![cat(&[A, B])], Site::Here, "a+b");
    greedy_places(vec![cat(&[A, A, B, A])], Site::Here, "a+b+a");
}

#[test]
fn the_split_goes_on_across_input() {
    greedy_places(vec![cat(&[A, B]), grep()], Site::Here, "a!+b a+b");
    greedy_places(vec![cat(&[A, B]), grep(), tac()], Site::Here, "a!+b a+b h");
    greedy_places(vec![cat(&[A, B]), grep(), grep(), md5sum()], Site::Here, "a!+b a+b a+b h");
}

#[test]
fn a_stage_without_a_split_ends_it() {
    greedy_places(vec![cat(&[A, B]), md5sum()], Site::Here, "a+b h");
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
    let options = PlanSettings { split_factor: 2, ..PlanSettings::default() };
    check(&chain(vec![cat(&[A, A, A, A]), grep()], Site::Here), options, "a!+a a+a");
    check(&chain(vec![cat(&[A, A, A]), grep(), md5sum()], Site::Here), options, "a!+a a+a a");
    check(&chain(vec![cat(&[A, A, B])], Site::Here), options, "a+a+b");
    check(&chain(vec![cat(&[A])], Site::Here), options, "a");
}

#[test]
fn paths_that_disagree_put_the_stage_here() {
    // comm <(sort a) <(sort b) with a and b on two machines, then on one.
    let diamond = |b: ExecutorId| PipelineFacts {
        stages: vec![
            cat(&[A]),
            cat(&[b]),
            StageFacts { output: Flow::At(Site::Here), ..stage(Need::Anywhere, 0.5) },
        ],
        edges: vec![Edge { from: (0, 1), to: (2, 63) }, Edge { from: (1, 1), to: (2, 62) }],
        own_input_only: BTreeMap::new(),
    };
    check(&diamond(B), PlanSettings::default(), "a b h");
    check(&diamond(A), PlanSettings::default(), "a a a");
}

#[test]
fn an_executor_that_refuses_is_not_used() {
    let mut facts = chain(vec![cat(&[A]), grep(), tac()], Site::Here);
    facts.stages[1].refusals = [(A, because("grep on a is another version"))].into();
    check(&facts, PlanSettings::default(), "a h h");
    facts.stages[0].refusals = [(A, because("a can't be reached"))].into();
    check(&facts, PlanSettings::default(), "h h h");
}

#[test]
fn too_many_parts_run_here() {
    let owners: Vec<_> = (0..200).map(|i| if i % 2 == 0 { A } else { B }).collect();
    greedy_places(vec![cat(&owners)], Site::Here, "h");
}

#[test]
fn parts_are_joined_by_an_aggregator() {
    greedy_places(vec![cat(&[A, B]), wc()], Site::Here, "a!+b a+b>h");
    greedy_places(vec![cat(&[A, B]), grep(), sort()], Site::Here, "a!+b a+b a+b>h");
    greedy_places(vec![cat(&[A, B]), grep(), tail(), tac()], Site::Here, "a!+b a+b a+b>h h");
    // What was joined is not in parts any more.
    greedy_places(vec![cat(&[A, B]), wc(), wc()], Site::Here, "a!+b a+b>h h");
    greedy_places(vec![cat(&[A, B]), sort(), grep()], Site::Here, "a!+b a+b>h h");
}

#[test]
fn a_merge_is_put_off_where_less_flows_behind_it() {
    let facts = chain(vec![cat(&[A, B]), sort(), uniq_count(), sort(), tail()], Site::Here);
    check(&facts, PlanSettings::default(), "a!+b a+b a+b>h h h");
    let plan = greedy(&facts, PlanSettings::default());
    assert_eq!(plan.joins[1], Join::Parts);
    assert_eq!(plan.joins[2], Join::By { steps: Steps::MergeCounted(1), at: Site::Here });
    let facts = chain(vec![cat(&[A, B]), sort(), tail()], Site::Here);
    assert_eq!(
        greedy(&facts, PlanSettings::default()).joins[2],
        Join::By { steps: Steps::MergeThenSame(1), at: Site::Here }
    );
}

#[test]
fn parts_on_one_machine_are_joined_there_and_go_on_there() {
    let options = PlanSettings { split_factor: 2, ..PlanSettings::default() };
    let on = |stages, expect| check(&chain(stages, Site::Here), options, expect);
    on(vec![cat(&[A, A]), sort(), tac()], "a!+a a+a>a a");
    on(vec![cat(&[A, A]), sort(), uniq_count(), sort(), tail()], "a!+a a+a>a a a a");
    // posh's own code runs here, so what comes behind it does, too.
    on(vec![cat(&[A, A]), wc()], "a!+a a+a>h");
    on(vec![cat(&[A, A]), wc(), tac()], "a+a a a");
}

#[test]
fn operands_are_split_before_an_aggregator() {
    let sorted = |owners: &[ExecutorId]| StageFacts {
        joining: Joining::Merge,
        whole_files: true,
        ..cat(owners)
    };
    greedy_places(vec![sorted(&[A, B])], Site::Here, "a?+b?>h");
    greedy_places(vec![sorted(&[A, B]), tail()], Site::Here, "a!?+b? a+b>h");
}

#[test]
fn plans_say_how_parts_are_joined() {
    let facts = chain(vec![cat(&[A, B]), sort(), uniq_count()], Site::Here);
    let text = greedy(&facts, PlanSettings::default()).to_string();
    let expected = "0: executor 0 [1]! + executor 1 [2]\n1: executor 0 + executor 1\n\
                    2: executor 0 + executor 1 merged as 1, its counts added here\n";
    assert_eq!(text, expected);
}

#[test]
fn an_executor_that_takes_no_input_is_given_only_what_is_its_own() {
    let closed = |facts: PipelineFacts| PipelineFacts {
        own_input_only: BTreeMap::from([(B, because("closed"))]),
        ..facts
    };
    let with_input = |stage: StageFacts, input: Flow| StageFacts { input, ..stage };
    let at = |executor| stage(Need::At(executor), 1.0);
    let here = || stage(Need::Here(because("a file here")), 1.0);
    let cases: Vec<(Vec<StageFacts>, Site, &str)> = vec![
        // Its own files, and what flows on there.
        (vec![cat(&[B]), grep(), tac()], Site::Here, "b b b"),
        (vec![with_input(at(B), Flow::At(Site::Executor(B))), grep()], Site::Here, "b b"),
        // What is written here or on another machine does not go there, nor what comes of it.
        (vec![here(), at(B), grep()], Site::Here, "h h h"),
        (vec![cat(&[A]), at(B), grep()], Site::Here, "a h h"),
        (vec![with_input(at(B), Flow::At(Site::Here))], Site::Here, "h"),
        (vec![with_input(at(B), Flow::At(Site::Executor(A))), grep()], Site::Here, "h h"),
        // The other one takes it.
        (vec![cat(&[B]), at(A), grep()], Site::Here, "b a a"),
        // In parts, each has its own.
        (vec![cat(&[A, B]), grep()], Site::Here, "a!+b a+b"),
        (vec![cat(&[A, B]), at(B)], Site::Here, "a+b h"),
    ];
    for (stages, sink, expect) in cases {
        check(&closed(chain(stages, sink)), PlanSettings::default(), expect);
    }
}
