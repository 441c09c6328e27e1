//! `cargo xtask simulate`: the simulation of volumes (`volume/tests/simulation`) for as many seeds
//! as one likes.

use std::process::ExitCode;

use anyhow::Result;

use crate::cargo;

/// Runs so many seeds `from` the first one, optimised. `is_shown`: also the steps of those that
/// break nothing.
pub fn run((from, seeds): (u64, u64), is_shown: bool, fault: Option<&str>) -> Result<ExitCode> {
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
