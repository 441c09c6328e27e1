//! Every split and every aggregator that an annotation declares, held against the real tools on
//! random inputs: the planner plans, and its plan is carried out by the code that carries it out
//! (the words of parts, joins, statuses, the order of errors), only that all machines are this one.
//! The output must be that of the unsplit commands.
//!
//! `POSH_SPLIT_CASES` sets the number of cases of each property that must have been split, and then
//! they are others each time; without it they are always the same.
#![allow(clippy::unwrap_used)]

mod carry_out;
mod inputs;
mod tried;

use std::{collections::BTreeMap, sync::LazyLock};

use posh_annotations::Library;
use proptest::{
    prelude::*,
    test_runner::{Config, RngSeed, TestCaseError, TestError, TestRunner},
};

use carry_out::{Case, Verdict};
use tried::{TRIED, Tried};

static LIBRARY: LazyLock<Library> = LazyLock::new(Library::builtin);

/// Cases of each property where the environment does not say.
const CASES: u32 = 16;
/// More cases than this left whole for each that is split, and a generator misses its point.
const MOST_WHOLE: u32 = 40;
const SEED: u64 = 20;

fn asked_cases() -> Option<u32> {
    std::env::var("POSH_SPLIT_CASES").ok().and_then(|text| text.parse().ok())
}

fn cases() -> u32 {
    asked_cases().unwrap_or(CASES)
}

/// Runs one property until enough cases were split and gave the same.
fn hold(what: &str, strategy: impl Strategy<Value = Case>) {
    let rng_seed = if asked_cases().is_some() { RngSeed::Random } else { RngSeed::Fixed(SEED) };
    // Shrinking: enough to be read; each step runs a dozen processes.
    let (cases, max_shrink_iters, failure_persistence) = (cases(), 400, None);
    let max_global_rejects = cases * MOST_WHOLE;
    let config = Config {
        cases,
        max_shrink_iters,
        max_global_rejects,
        failure_persistence,
        rng_seed,
        ..Config::default()
    };
    let result =
        TestRunner::new(config).run(&strategy, |case| match carry_out::compare(&LIBRARY, &case) {
            Verdict::NotSplit => Err(TestCaseError::reject("not split")),
            Verdict::Same => Ok(()),
            Verdict::Differs(how) => Err(TestCaseError::fail(format!("{case}\n{how}"))),
        });
    // Without the value itself: the case is shown as commands and files.
    match result {
        Ok(()) => println!("{what}: {cases} cases"),
        Err(TestError::Fail(reason, _)) => panic!("{what}: {reason}"),
        Err(TestError::Abort(reason)) => panic!("{what}: {reason}"),
    }
}

/// Entries of the table, dealt out to the tests so that they run beside each other.
fn dealt(number: usize) -> impl Iterator<Item = &'static Tried> {
    TRIED.iter().skip(number).step_by(4)
}

fn hold_dealt(number: usize) {
    for tried in dealt(number) {
        let declared = LIBRARY.declared_splits(tried.name);
        if carry_out::which(tried.name).is_none() {
            assert!(
                tried.may_be_missing,
                "{} is not installed; `cargo xtask setup` names what the tests need",
                tried.name
            );
            continue;
        }
        if declared.operands {
            hold(&format!("{} across operands", tried.name), inputs::across_operands(tried));
        }
        if declared.across_input {
            hold(&format!("{} across input", tried.name), inputs::across_input(tried));
        }
        if declared.behind_merge {
            hold(&format!("{} behind sort", tried.name), inputs::behind_sort(tried));
        }
    }
}

#[test]
fn parts_give_what_the_whole_gives_1() {
    hold_dealt(0);
}

#[test]
fn parts_give_what_the_whole_gives_2() {
    hold_dealt(1);
}

#[test]
fn parts_give_what_the_whole_gives_3() {
    hold_dealt(2);
}

#[test]
fn parts_give_what_the_whole_gives_4() {
    hold_dealt(3);
}

/// Several stages behind a split, whichever may be.
#[test]
fn pipelines_in_parts_give_what_whole_ones_give() {
    for _ in 0..4 {
        hold("pipelines", inputs::pipelines());
    }
}

#[test]
fn every_declared_split_is_tried() {
    let tried: BTreeMap<&str, &Tried> = TRIED.iter().map(|t| (t.name, t)).collect();
    let declared =
        |name: &&str| LIBRARY.declared_splits(name) != posh_annotations::DeclaredSplits::default();
    let missing: Vec<&str> =
        LIBRARY.full_names().filter(declared).filter(|n| !tried.contains_key(n)).collect();
    assert!(missing.is_empty(), "annotations declare splits that no property tries: {missing:?}");
    let idle: Vec<&&str> = tried.keys().filter(|name| !declared(name)).collect();
    assert!(idle.is_empty(), "properties of commands that declare no split: {idle:?}");
}
