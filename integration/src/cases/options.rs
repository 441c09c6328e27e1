//! `posh-lab cases`: selection of cases and ways to run them.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use clap::Args;
use posh_proto::rule::Rule;

use super::fixture::Fixture;
use super::site::CaseSettings;
use super::{Case, load, run, summary, without};
use crate::error::{LabError, Result};
use crate::oracle::Door;
use crate::programs::Programs;
use crate::volumes::Mounts;

/// The options.
#[derive(Debug, Args)]
pub struct CaseOptions {
    /// How posh is to see commands: by its directory on PATH, or by its hook in execve
    #[arg(long, value_enum)]
    door: Option<Door>,
    /// Leave this rule out of all programs (debug builds only)
    #[arg(long, value_name = "RULE")]
    without: Vec<Rule>,
    /// Leave out each rule in turn and print the table of docs/rules.md
    #[arg(long)]
    rules_table: bool,
    /// Only cases whose title (file:name) holds this
    #[arg(long, value_name = "TEXT")]
    filter: Vec<String>,
    /// Only one of so many, always the same ones
    #[arg(long, value_name = "COUNT", default_value_t = 1)]
    one_of: u64,
    /// Kind of the mounts of the servers' directories
    #[arg(long, value_enum, default_value_t)]
    mounts: Mounts,
    /// How many laboratories at once
    #[arg(long, default_value_t = 2)]
    jobs: usize,
    /// Only print the titles
    #[arg(long)]
    list: bool,
    /// Print where each case's stages ran, and where the mount itself differs from a local copy
    #[arg(long)]
    verbose: bool,
    /// Files or directories; all cases of the source tree when left out
    paths: Vec<PathBuf>,
}

/// Runs the selected cases and prints the results; true when nothing failed.
pub fn main(options: &CaseOptions) -> Result<bool> {
    let paths =
        if options.paths.is_empty() { vec![load::DIRECTORY.into()] } else { options.paths.clone() };
    let mut cases = load::load(&paths)?.map_err(LabError::Cases)?;
    cases.retain(|case| {
        options.filter.is_empty() || options.filter.iter().any(|text| case.title().contains(text))
    });
    cases.retain(|case| case.holds_through(options.door) && case.is_one_of(options.one_of));
    if options.list {
        cases.iter().for_each(|case| println!("{}", case.title()));
        return Ok(true);
    }
    let setting = CaseSettings {
        programs: Programs::beside_this()?,
        fixture: Arc::new(Fixture::make()?),
        without: options.without.clone(),
        door: options.door,
        mounts: options.mounts,
    };
    if options.rules_table {
        return without::table(&cases, &setting, options.jobs);
    }
    let start = Instant::now();
    let verbosity = match (options.verbose, options.without.is_empty()) {
        (true, _) => Verbosity::All,
        (false, true) => Verbosity::Failures,
        (false, false) => Verbosity::Quiet,
    };
    let tell = |verdict: &run::CaseVerdict| tell(&cases[verdict.number], verdict, verbosity);
    let verdicts = run::run(&cases, &setting, options.jobs, &tell)?;
    if options.verbose {
        print!("{}", summary::slowest(&cases, &verdicts));
    }
    print!("{}", summary::numbers(&cases, &verdicts, start.elapsed()));
    if let [rule] = options.without[..] {
        print!("{}", without::Effect::of(rule, &cases, &verdicts).in_full(&cases));
    }
    Ok(verdicts.iter().all(|v| v.faults.is_empty()))
}

/// Cases that are printed as they end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verbosity {
    /// None: with a rule left out many fail, and only their names matter.
    Quiet,
    Failures,
    All,
}

fn tell(case: &Case, verdict: &run::CaseVerdict, verbose: Verbosity) {
    if !verdict.faults.is_empty() && verbose != Verbosity::Quiet {
        return println!("{}", summary::failure(case, verdict));
    }
    if verbose == Verbosity::All {
        let by_mount: String =
            verdict.by_mount.iter().map(|d| format!("    by the mount: {d}\n")).collect();
        println!("passed {}\n{}{by_mount}", case.title(), verdict.placements);
    }
}
