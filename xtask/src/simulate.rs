//! `cargo xtask simulate`: the simulation of volumes (`volume/tests/simulation`) for any number of
//! seeds.

use std::process::ExitCode;

use anyhow::Result;

use crate::cargo;

/// Runs `seeds` seeds from `from` on, optimised. `is_shown`: also prints the steps of seeds that
/// find no fault.
pub fn run(from: u64, seeds: u64, is_shown: bool, fault: Option<&str>) -> Result<ExitCode> {
    let mut test = cargo::command(&[
        "test",
        "--quiet",
        "--release",
        "-p",
        "posh-volume",
        "--test",
        "simulation",
    ]);
    test.args(["--", "--nocapture", "--exact", "no_seed_breaks_a_promise"]);
    test.env("POSH_SIMULATE_FROM", from.to_string()).env("POSH_SIMULATE_SEEDS", seeds.to_string());
    if is_shown {
        test.env("POSH_SIMULATE_VERBOSE", "1");
    }
    if let Some(fault) = fault {
        test.env("POSH_SIMULATE_FAULT", fault);
    }
    cargo::must(test)?;
    Ok(ExitCode::SUCCESS)
}
