//! Every case of `integration/cases` under its shell and under posh.

use std::sync::Arc;
use std::time::Instant;

use posh_integration::cases::fixture::Fixture;
use posh_integration::cases::site::Setting;
use posh_integration::cases::{load, run, summary};

use crate::programs;

/// So many cases there are at least, and so many that must run something on a server.
const CASES: usize = 2;
const OFFLOADING: usize = 1;
/// One laboratory for each core of the smallest machine that runs this.
const JOBS: usize = 2;

#[test]
fn cases_are_the_same_under_posh() {
    let cases = load::load(&[load::DIRECTORY.into()]).unwrap().unwrap_or_else(|faults| panic!("{faults}"));
    let setting =
        Setting { programs: programs(), fixture: Arc::new(Fixture::make().unwrap()), without: Vec::new(), door: None };
    let start = Instant::now();
    let verdicts = run::run(&cases, &setting, JOBS, &|_| {}).unwrap();
    println!("{}", summary::numbers(&cases, &verdicts, start.elapsed()));
    let failed: Vec<_> = verdicts.iter().filter(|v| !v.faults.is_empty()).collect();
    let texts: String = failed.iter().map(|v| summary::failure(&cases[v.number], v)).collect();
    assert!(failed.is_empty(), "{} of {} cases failed:\n\n{texts}", failed.len(), cases.len());
    let asserting = cases.iter().filter(|case| !case.offloads.is_empty()).count();
    assert!(cases.len() >= CASES, "only {} cases are left", cases.len());
    assert!(asserting >= OFFLOADING, "only {asserting} cases must offload something");
}
