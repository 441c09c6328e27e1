//! The repository's chores: `cargo xtask setup | build | release | test | demo | chaos | bench |
//! fuzz | guards | simulate | volumes`. Each does whatever set-up it needs first. What is tested,
//! shown or measured lives in `integration` and `bench`; this program only builds and starts it.

mod bash_tests;
mod cargo;
mod fuzz;
mod guards;
mod programs;
mod release;
mod setup;
mod simulate;
mod supply;
mod test;
mod tidy;
mod volumes;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

/// Chores of this repository.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask")]
struct XtaskArguments {
    #[command(subcommand)]
    chore: Chore,
}

#[derive(Debug, Subcommand)]
enum Chore {
    /// Installs the system packages that tests and demonstration need.
    Setup,
    /// Builds the programs as they are to be installed, into target/programs/release.
    Build,
    /// Builds what is handed out, with a bill of materials and checksums, into
    /// target/release-files.
    Release,
    /// Sets up, then runs every check: format, lints, tests, documentation.
    Test {
        /// Give the integration tests more and larger data.
        #[arg(long)]
        full: bool,
        /// Run only the tests whose name holds this, and no other check.
        filter: Option<String>,
    },
    /// Sets up, builds, and shows the paper's pipelines under bash and under posh.
    Demo {
        /// Arguments of the demonstration itself, such as --help.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Sets up, builds, and runs pipelines while executors, links, gateways and disks fail.
    Chaos {
        /// Options of the chaos test itself: `--pipelines 300 --seed 1`.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Runs the bench of the table (all workloads, or those that are named), `bench overhead` or
    /// `bench fairness`.
    Bench {
        /// Workloads and options of the bench, such as --help; or `overhead` or `fairness` and its
        /// options.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Fuzzes what strangers can feed to posh, with coverage (see integration/fuzz).
    Fuzz {
        /// Seconds for each target.
        #[arg(long, default_value_t = 1200)]
        seconds: u32,
        /// Targets at work at a time.
        #[arg(long, default_value_t = 2)]
        jobs: usize,
        /// Only these targets.
        targets: Vec<String>,
    },
    /// Runs test suites for file systems and random commands on volumes, at length.
    Volumes {
        /// Minutes instead of an hour.
        #[arg(long)]
        quick: bool,
    },
    /// Simulates the life of what is written through volumes while everything fails, once for each
    /// seed.
    Simulate {
        /// How many seeds.
        #[arg(long, default_value_t = 200)]
        seeds: u64,
        /// The first of them.
        #[arg(long, default_value_t = 0)]
        from: u64,
        /// Only this one, with all its steps.
        #[arg(long, conflicts_with_all = ["seeds", "from"])]
        seed: Option<u64>,
        /// With this planted fault, up to the first seed that finds it.
        #[arg(long)]
        fault: Option<String>,
    },
    /// Checks habits that neither rustfmt nor clippy knows: names, widths, lengths, circles.
    Tidy {
        /// Print every finding, not only those of checks that have too many.
        #[arg(long)]
        all: bool,
    },
    /// Takes guards out, one after the other, and looks whether the tests of attacks notice.
    Guards {
        /// Only guards whose description or test holds this.
        filter: Option<String>,
        /// Copies of the tree that work at once, each with a target directory of its own.
        #[arg(long, default_value_t = 2)]
        jobs: usize,
        /// Only one part of the table, `2/5` for the second fifth: all of it takes hours.
        #[arg(long, value_name = "PART/PARTS")]
        part: Option<guards::TablePart>,
    },
}

fn main() -> ExitCode {
    match run(XtaskArguments::parse().chore) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(chore: Chore) -> Result<ExitCode> {
    match chore {
        Chore::Setup => {
            setup::toolchain()?;
            programs::small_target()?;
            setup::packages(setup::PackageSet::Everything)?;
            Ok(ExitCode::SUCCESS)
        }
        Chore::Build => {
            println!("{}", programs::release()?.display());
            Ok(ExitCode::SUCCESS)
        }
        Chore::Release => {
            println!("{}", release::run()?.display());
            Ok(ExitCode::SUCCESS)
        }
        Chore::Test { full, filter } => test::run(full, filter.as_deref()),
        Chore::Demo { arguments } => {
            setup::packages(if setup::is_root() {
                setup::PackageSet::Everything
            } else {
                setup::PackageSet::Commands
            })?;
            cargo::become_program(&programs::release()?.join("posh-lab"), "demo", &arguments)
        }
        Chore::Chaos { arguments } => {
            setup::packages(setup::PackageSet::Everything)?;
            cargo::become_program(&programs::release()?.join("posh-lab"), "chaos", &arguments)
        }
        Chore::Bench { arguments } => {
            setup::packages(setup::PackageSet::Everything)?;
            let bench = programs::release()?.join("posh-bench");
            match arguments.split_first() {
                Some((first, rest)) if ["overhead", "fairness"].contains(&first.as_str()) => {
                    cargo::become_program(&bench, first, rest)
                }
                _ => cargo::become_program(&bench, "table", &arguments),
            }
        }
        Chore::Fuzz { seconds, jobs, targets } => {
            setup::toolchain()?;
            fuzz::run(&targets, seconds, jobs)
        }
        Chore::Volumes { quick } => {
            setup::packages(setup::PackageSet::Everything)?;
            volumes::run(quick)
        }
        Chore::Simulate { seeds, from, seed, fault } => {
            setup::toolchain()?;
            let (from, seeds) = seed.map_or((from, seeds), |seed| (seed, 1));
            simulate::run(from, seeds, seed.is_some(), fault.as_deref())
        }
        Chore::Tidy { all } => {
            tidy::run(&cargo::root()?, all)?;
            Ok(ExitCode::SUCCESS)
        }
        Chore::Guards { filter, jobs, part } => {
            setup::toolchain()?;
            setup::packages(setup::PackageSet::Everything)?;
            guards::run(filter.as_deref(), part, jobs)
        }
    }
}
