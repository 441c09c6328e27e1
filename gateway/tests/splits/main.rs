//! Every split and every aggregator that an annotation declares, held against the real tools on random inputs: the
//! planner plans, and its plan is carried out by the code that carries it out (the words of parts, joins, statuses,
//! the order of errors), only that all machines are this one. What comes out must be what the unsplit commands give.
//!
//! `POSH_SPLIT_CASES` sets the number of cases of each property, and then they are others each time; without it
//! they are always the same.
#![allow(clippy::unwrap_used)]

mod carry_out;
mod inputs;
mod tried;

use std::{
    collections::BTreeMap,
    sync::{LazyLock, Mutex},
};

use posh_annotations::Library;
use proptest::{
    prelude::*,
    test_runner::{Config, RngSeed, TestCaseError, TestError, TestRunner},
};

use carry_out::{Case, Verdict};
use tried::{TRIED, Tried};

static LIBRARY: LazyLock<Library> = LazyLock::new(Library::builtin);

/// Cases of each property where the environment does not say.
const CASES: u32 = 24;
/// Below this share of cases that were really split, a generator misses its point.
const LEAST_SHARE: f64 = 0.1;
const SEED: u64 = 20;

fn asked_cases() -> Option<u32> {
    std::env::var("POSH_SPLIT_CASES").ok().and_then(|text| text.parse().ok())
}

fn cases() -> u32 {
    asked_cases().unwrap_or(CASES)
}

/// Runs one property; gives how many cases were split.
fn hold(what: &str, strategy: impl Strategy<Value = Case>) -> u32 {
    let split = Mutex::new(0);
    let rng_seed = if asked_cases().is_some() { RngSeed::Random } else { RngSeed::Fixed(SEED) };
    // Enough to be read; each step runs a dozen processes.
    let max_shrink_iters = 400;
    let config = Config { cases: cases(), max_shrink_iters, failure_persistence: None, rng_seed, ..Config::default() };
    let mut runner = TestRunner::new(config);
    let result = runner.run(&strategy, |case| match carry_out::compare(&LIBRARY, &case) {
        Verdict::NotSplit => Ok(()),
        Verdict::Same => {
            *split.lock().unwrap() += 1;
            Ok(())
        }
        Verdict::Differs(how) => Err(TestCaseError::fail(format!("{case}\n{how}"))),
    });
    if let Err(error) = result {
        // Without the value itself: the case is shown as commands and files.
        let text = match error {
            TestError::Fail(reason, _) => reason.to_string(),
            TestError::Abort(reason) => reason.to_string(),
        };
        panic!("{what}: {text}");
    }
    let split = *split.lock().unwrap();
    println!("{what}: {split} of {} split", cases());
    split
}

fn require_share(what: &str, split: u32) {
    let share = f64::from(split) / f64::from(cases());
    assert!(share >= LEAST_SHARE, "{what}: only {split} of {} cases were split", cases());
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
            let what = format!("{} across operands", tried.name);
            require_share(&what, hold(&what, inputs::across_operands(tried)));
        }
        if declared.across_input {
            let what = format!("{} across input", tried.name);
            require_share(&what, hold(&what, inputs::across_input(tried)));
        }
        if declared.behind_merge {
            let what = format!("{} behind sort", tried.name);
            require_share(&what, hold(&what, inputs::behind_sort(tried)));
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
    let declared = |name: &&str| LIBRARY.declared_splits(name) != posh_annotations::DeclaredSplits::default();
    let missing: Vec<&str> = LIBRARY.full_names().filter(declared).filter(|n| !tried.contains_key(n)).collect();
    assert!(missing.is_empty(), "annotations declare splits that no property tries: {missing:?}");
    let idle: Vec<&&str> = tried.keys().filter(|name| !declared(name)).collect();
    assert!(idle.is_empty(), "properties of commands that declare no split: {idle:?}");
}
