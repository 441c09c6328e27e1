//! Strategies for random programs. In every choice the simplest comes first and lists can shrink,
//! so that a program that fails shrinks to its essence.

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;

use super::commands::{CHANGES, FILTERS, LOCALES, PAIRS, SMALL, SOURCES, UMASKS};
use super::files::{COMPRESSED, Content, ContentKind, Files, NAMES, PARTS};
use super::{
    Around, Body, CommandNode, Errors, FileOperand, InputRedirect, Join, LineSource, List,
    ListEntry, OutputRedirect, Parallel, RandomProgram, Settings,
};
use super::{Side, Stage};

/// Depth of nested groups.
const DEPTH: u32 = 3;
/// Lines of most files.
const FEW: usize = 40;
/// Lines of some: more than a block.
const SOME: usize = 600;
/// Lines of few files: more than a pipe holds.
const MANY: usize = 9_000;

/// Programs with their files.
pub fn program() -> impl Strategy<Value = RandomProgram> {
    (settings(), list(DEPTH, 1..5), files()).prop_map(|(settings, body, files)| RandomProgram {
        files,
        settings,
        body,
    })
}

fn settings() -> impl Strategy<Value = Settings> {
    let rare = |of: usize| prop_oneof![4 => Just(0), 1 => 0..of];
    let sometimes = prop::bool::weighted;
    (
        sometimes(0.3),
        any::<bool>(),
        sometimes(0.2),
        sometimes(0.15),
        rare(UMASKS.len()),
        rare(LOCALES.len()),
    )
        .prop_map(|(by_path, inside, pipefail, errexit, umask, locale)| Settings {
            by_path,
            inside,
            pipefail,
            errexit,
            umask,
            locale,
        })
}

fn files() -> impl Strategy<Value = Files> {
    let all = |text: bool| {
        let some = move |count: usize| vec(content(text), count);
        (some(NAMES.len()), some(PARTS), some(COMPRESSED), content(text))
            .prop_map(|(named, parts, compressed, local)| Files { named, parts, compressed, local })
    };
    prop_oneof![2 => all(true), 1 => all(false)]
}

fn content(text: bool) -> impl Strategy<Value = Content> {
    let kinds = [
        ContentKind::Words,
        ContentKind::Sorted,
        ContentKind::Numbers,
        ContentKind::Long,
        ContentKind::Returns,
        ContentKind::Foreign,
        ContentKind::Invalid,
        ContentKind::Binary,
    ];
    let kinds = if text { &kinds[..5] } else { &kinds[..] };
    let lines = prop_oneof![2 => Just(0), 20 => 1..FEW, 3 => 1..SOME, 1 => 1..MANY];
    let ended = prop::bool::weighted(0.25).prop_map(|no| !no);
    (select(kinds.to_vec()), lines, 0..1_000u64, ended).prop_map(|(kind, lines, seed, ended)| {
        // A long line counts as many short ones.
        let lines = if kind == ContentKind::Long { lines / 20 + 1 } else { lines };
        Content { kind, lines, seed, ended }
    })
}

fn list(depth: u32, length: std::ops::Range<usize>) -> BoxedStrategy<List> {
    vec(entry(depth), length).boxed()
}

fn entry(depth: u32) -> BoxedStrategy<ListEntry> {
    let join = prop_oneof![
        8 => Just(Join::Then),
        5 => Just(Join::Status),
        2 => Just(Join::And),
        2 => Just(Join::Or),
        2 => Just(Join::Background),
    ];
    (node(depth), prop::bool::weighted(0.05), join)
        .prop_map(|(node, negated, join)| ListEntry { node, negated, join })
        .boxed()
}

fn node(depth: u32) -> BoxedStrategy<CommandNode> {
    let leaf = prop_oneof![
        20 => pipeline(depth).prop_map(CommandNode::Pipeline),
        2 => (vec(file(), 1..4), simple_stage())
            .prop_map(|(files, stage)| CommandNode::For(files, stage)),
        2 => parallel().prop_map(CommandNode::Parallel),
        1 => pipeline(0).prop_map(CommandNode::Substitution),
        1 => Just(CommandNode::Read),
        2 => (0..CHANGES.len(), file()).prop_map(|(index, file)| CommandNode::Change(index, file)),
    ];
    if depth == 0 {
        return leaf.boxed();
    }
    let inner = || list(depth - 1, 1..3);
    prop_oneof![
        26 => leaf,
        2 => (lines(), inner()).prop_map(|(lines, body)| CommandNode::While(lines, body)),
        1 => (pipeline(0), inner(), inner())
            .prop_map(|(test, yes, no)| CommandNode::If(test, yes, no)),
        2 => (file(), any::<bool>(), inner())
            .prop_map(|(file, exec, body)| CommandNode::Descriptor(file, exec, body)),
    ]
    .boxed()
}

fn parallel() -> impl Strategy<Value = Parallel> {
    (vec((0..SMALL.len(), file()), 1..5), any::<bool>())
        .prop_map(|(jobs, by_file)| Parallel { jobs, by_file })
}

fn lines() -> impl Strategy<Value = LineSource> {
    prop_oneof![Just(LineSource::List), file().prop_map(LineSource::Head)]
}

fn pipeline(depth: u32) -> BoxedStrategy<Vec<Stage>> {
    prop_oneof![6 => vec(stage(depth), 1..4), 1 => vec(stage(depth), 1..7)].boxed()
}

fn stage(depth: u32) -> BoxedStrategy<Stage> {
    dressed(body(depth))
}

/// A stage that is one command.
fn simple_stage() -> BoxedStrategy<Stage> {
    dressed(filter().boxed())
}

fn dressed(body: BoxedStrategy<Body>) -> BoxedStrategy<Stage> {
    let locale = prop_oneof![9 => Just(0), 1 => 0..LOCALES.len()];
    (body, input(), output(), errors(), locale)
        .prop_map(|(body, input, output, errors, locale)| Stage {
            body,
            input,
            output,
            errors,
            locale,
        })
        .boxed()
}

fn filter() -> impl Strategy<Value = Body> {
    (0..FILTERS.len(), vec(file(), 0..3)).prop_map(|(index, files)| Body::Filter(index, files))
}

fn body(depth: u32) -> BoxedStrategy<Body> {
    let leaf = prop_oneof![
        20 => filter(),
        2 => (0..PAIRS.len(), side(depth), side(depth))
            .prop_map(|(index, left, right)| Body::Pair(index, left, right)),
        2 => (0..SOURCES.len()).prop_map(Body::Source),
        2 => prop::bool::weighted(0.3).prop_map(Body::Tee),
    ];
    if depth == 0 {
        return leaf.boxed();
    }
    let around = prop_oneof![
        4 => Just(Around::Braces),
        3 => Just(Around::Subshell),
        1 => Just(Around::Directory),
        1 => Just(Around::Function),
        1 => Just(Around::Eval),
        1 => Just(Around::Bash),
    ];
    prop_oneof![
        24 => leaf,
        5 => (around, list(depth - 1, 1..4)).prop_map(|(around, list)| Body::Group(around, list)),
    ]
    .boxed()
}

fn side(depth: u32) -> BoxedStrategy<Side> {
    let plain = prop_oneof![4 => file().prop_map(Side::File), 1 => Just(Side::Stdin)];
    if depth < DEPTH {
        return plain.boxed();
    }
    prop_oneof![5 => plain, 2 => pipeline(0).prop_map(Side::Process)].boxed()
}

fn file() -> impl Strategy<Value = FileOperand> {
    prop_oneof![
        16 => (0..NAMES.len(), prop::bool::weighted(0.3))
            .prop_map(|(index, absolute)| FileOperand::Mount(index, absolute)),
        2 => Just(FileOperand::Parts),
        3 => (0..8usize).prop_map(FileOperand::Written),
        1 => Just(FileOperand::Deep),
        1 => Just(FileOperand::Link),
        1 => Just(FileOperand::Local),
        1 => (0..COMPRESSED).prop_map(FileOperand::Compressed),
        1 => Just(FileOperand::Missing),
        1 => Just(FileOperand::Directory),
    ]
}

fn input() -> impl Strategy<Value = InputRedirect> {
    prop_oneof![
        20 => Just(InputRedirect::Inherited),
        5 => file().prop_map(InputRedirect::From),
        1 => Just(InputRedirect::Null),
        1 => (0..9usize).prop_map(InputRedirect::Document),
        1 => Just(InputRedirect::Words),
        2 => Just(InputRedirect::Third),
        1 => file().prop_map(InputRedirect::Both),
        1 => Just(InputRedirect::Closed),
    ]
}

fn output() -> impl Strategy<Value = OutputRedirect> {
    prop_oneof![
        24 => Just(OutputRedirect::Inherited),
        4 => Just(OutputRedirect::To),
        2 => Just(OutputRedirect::Append),
        1 => Just(OutputRedirect::Local),
        1 => Just(OutputRedirect::Null),
        1 => Just(OutputRedirect::Errors),
        1 => Just(OutputRedirect::Closed),
    ]
}

fn errors() -> impl Strategy<Value = Errors> {
    prop_oneof![
        24 => Just(Errors::Inherited),
        1 => Just(Errors::To),
        1 => Just(Errors::Null),
        3 => Just(Errors::Output),
        1 => Just(Errors::Closed),
    ]
}
