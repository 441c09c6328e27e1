//! `cargo xtask volumes`: tests of volumes that take too long for every check. The suites come from
//! crates.io and are installed in the target directory; `integration` selects and judges them.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, Result};

use crate::{cargo, programs};

/// The suites, in the releases to which the counts in docs and limits refer.
const SUITES: [(&str, &str); 2] = [("fsx", "0.3.2"), ("pjdfstest", "0.2.2")];

/// Steps of random commands and reads, and of a short run.
const STEPS: &str = "10000";
const FEW_STEPS: &str = "300";

/// Runs everything, even after a failure.
pub fn run(is_quick: bool) -> Result<ExitCode> {
    let built = programs::release()?;
    let lab = |words: &[&str]| lab(&built, words);
    let tools = suites()?;
    let steps = if is_quick { FEW_STEPS } else { STEPS };
    let coherence = lab(&["coherence", "--steps", steps]);
    let tools = tools.to_string_lossy().into_owned();
    let quick: &[&str] = if is_quick { &["--quick"] } else { &[] };
    let suites = lab(&[&["suites", "--tools", &tools][..], quick].concat());
    coherence.and(suites)?;
    Ok(ExitCode::SUCCESS)
}

fn lab(built: &Path, words: &[&str]) -> Result<()> {
    let mut lab = Command::new(built.join("posh-lab"));
    lab.args(words);
    cargo::must(lab)
}

/// The directory of the suites' programs, installed unless they exist.
fn suites() -> Result<PathBuf> {
    let target =
        std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| PathBuf::from("target"), PathBuf::from);
    let place = std::path::absolute(target.join("suites"))
        .context("cannot tell where the target directory is")?;
    let programs = place.join("bin");
    for (suite, version) in SUITES {
        if programs.join(suite).exists() {
            continue;
        }
        println!("set-up: building {suite} {version} from crates.io");
        let mut install = cargo::command(&[
            "install",
            "--quiet",
            "--locked",
            suite,
            "--version",
            version,
            "--root",
        ]);
        install.arg(&place);
        cargo::must(install)?;
    }
    Ok(programs)
}
