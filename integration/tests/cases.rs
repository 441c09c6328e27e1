//! Every case of `integration/cases` under its shell and under posh, through the door that
//! posh chooses; with `POSH_TEST_FULL`, through each of the two.

use std::io::Write;
use std::sync::Arc;
use std::time::Instant;

use posh_integration::cases::fixture::Fixture;
use posh_integration::cases::site::CaseSettings;
use posh_integration::cases::{Case, load, run, summary};
use posh_integration::oracle::Door;
use posh_integration::volumes::Mounts;

use crate::programs;

/// So many cases there are at least, and so many that must run something on a server.
const CASES: usize = 700;
const OFFLOADING: usize = 450;
/// At most one in so many may be placed only when tried again.
const MISSED: usize = 100;
/// On volumes, one of so many runs.
const SAMPLE: u64 = 23;
/// The smallest machine that runs this has two cores, and other tests run beside it.
const JOBS: usize = 1;

#[test]
fn cases_are_the_same_under_posh() {
    let _turn = crate::whole_machine();
    let cases =
        load::load(&[load::DIRECTORY.into()]).unwrap().unwrap_or_else(|faults| panic!("{faults}"));
    let asserting = cases.iter().filter(|case| !case.offloads.is_empty()).count();
    assert!(cases.len() >= CASES, "only {} cases are left", cases.len());
    assert!(asserting >= OFFLOADING, "only {asserting} cases must offload something");
    let full = std::env::var_os("POSH_TEST_FULL").is_some();
    let doors: &[Option<Door>] = if full { &[Some(Door::Path), Some(Door::Hook)] } else { &[None] };
    let fixture = Arc::new(Fixture::make().unwrap());
    for &door in doors {
        let setting = CaseSettings {
            programs: programs(),
            fixture: Arc::clone(&fixture),
            without: Vec::new(),
            door,
            mounts: Mounts::Sshfs,
        };
        let cases: Vec<Case> =
            cases.iter().filter(|case| case.holds_through(door)).cloned().collect();
        all_pass(&cases, &setting);
    }
}

/// The cases on volumes: commands run on the same machines, but for those whose data is cached. Without `POSH_TEST_FULL`, a sample.
#[test]
fn cases_are_the_same_on_volumes() {
    let _turn = crate::whole_machine();
    let mut cases =
        load::load(&[load::DIRECTORY.into()]).unwrap().unwrap_or_else(|faults| panic!("{faults}"));
    let count = if std::env::var_os("POSH_TEST_FULL").is_some() { 1 } else { SAMPLE };
    cases.retain(|case| case.holds_through(None) && case.is_one_of(count));
    assert!(
        cases.len() as u64 * count >= CASES as u64 / 2,
        "only {} cases are in the sample",
        cases.len()
    );
    let fixture = Arc::new(Fixture::make().unwrap());
    for mounts in [Mounts::Volume, Mounts::AtHand] {
        let setting = CaseSettings {
            programs: programs(),
            fixture: Arc::clone(&fixture),
            without: Vec::new(),
            door: None,
            mounts,
        };
        all_pass(&cases, &setting);
    }
}

fn all_pass(cases: &[Case], setting: &CaseSettings) {
    let start = Instant::now();
    let verdicts = run::run(cases, setting, JOBS, &|_| {}).unwrap();
    // Past the test harness, which would keep it: the number of cases is to be seen.
    let door = setting.door.map_or("the default door", Door::name);
    let numbers = summary::numbers(cases, &verdicts, start.elapsed());
    let failed: Vec<_> = verdicts.iter().filter(|v| !v.faults.is_empty()).collect();
    let texts: String = failed.iter().map(|v| summary::failure(&cases[v.number], v)).collect();
    std::io::stdout()
        .lock()
        .write_all(
            format!("cases through {door}, {:?}:\n{numbers}{texts}\n", setting.mounts).as_bytes(),
        )
        .unwrap();
    let missed = verdicts.iter().filter(|v| v.missed > 0).count();
    assert!(missed * MISSED <= cases.len(), "{missed} cases were placed only when tried again");
    assert!(failed.is_empty(), "{} of {} cases failed:\n\n{texts}", failed.len(), cases.len());
}
