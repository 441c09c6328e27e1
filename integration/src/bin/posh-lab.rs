//! The laboratory's program: process 1 of its hosts, an interactive laboratory, and the
//! demonstration.

use std::ffi::OsString;
use std::io::{Read, Write};
use std::process::{ExitCode, Stdio};

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};
use posh_integration::host::PATH;
use posh_integration::programs::Programs;
use posh_integration::wire::Profile;
use posh_integration::{Lab, LabSpec, cases, chaos, demo, init, interleave, network, suites, wire};

/// Runs laboratories for posh.
#[derive(Debug, Parser)]
struct LabArguments {
    #[command(subcommand)]
    task: LabTask,
}

#[derive(Debug, Subcommand)]
enum LabTask {
    /// Process 1 of a laboratory host (started by the laboratory itself).
    #[command(hide = true)]
    Init,
    /// Holds a laboratory with mounts until standard input ends, and prints its processes.
    Hold {
        /// How many servers.
        servers: usize,
    },
    /// Runs a command on the workstation of a new laboratory, to look around: `posh-lab run --
    /// bash`.
    Run {
        /// How many servers; server N has /srv/sN, which the workstation mounts as /mnt/sN.
        #[arg(long, default_value_t = 1)]
        servers: usize,
        /// Each server's link: wan, wifi, lan, or MILLISECONDS:MEGABITS; else nothing limits it.
        #[arg(long)]
        link: Option<Profile>,
        /// The command and its arguments.
        #[arg(required = true, last = true)]
        command: Vec<OsString>,
    },
    /// Measures links, to show that they are what they are said to be.
    Links {
        /// wan, wifi, lan, or MILLISECONDS:MEGABITS.
        #[arg(default_values = ["wan", "wifi", "lan"])]
        links: Vec<Profile>,
    },
    /// Runs the paper's applications under bash and under posh, and compares.
    Demo(demo::DemoOptions),
    /// Runs the cases of integration/cases under their shells and under posh, and compares.
    Cases(cases::options::CaseOptions),
    /// Runs commands on a volume's server in turns with reads here, and counts what was stale.
    Coherence(interleave::InterleaveOptions),
    /// Runs test suites for file systems on volumes.
    Suites(suites::SuiteOptions),
    /// Runs pipelines while executors, links, gateways and disks fail, and compares.
    Chaos(chaos::ChaosOptions),
}

fn main() -> Result<ExitCode> {
    match LabArguments::parse().task {
        LabTask::Init => init::run()?,
        LabTask::Hold { servers } => hold(servers)?,
        LabTask::Run { servers, link, command } => {
            return look_around(
                LabSpec { link, unconfigured: true, ..LabSpec::servers(servers) },
                &command,
            );
        }
        LabTask::Links { links } => links.into_iter().try_for_each(measure)?,
        LabTask::Demo(options) => {
            let same = demo::run(options)?;
            return Ok(if same { ExitCode::SUCCESS } else { ExitCode::FAILURE });
        }
        LabTask::Cases(options) => {
            let passed = cases::options::main(&options)?;
            return Ok(if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE });
        }
        LabTask::Coherence(options) => {
            let tally = interleave::run(&options, &Programs::beside_this()?)?;
            print!("{tally}");
            return Ok(if tally.is_good() { ExitCode::SUCCESS } else { ExitCode::FAILURE });
        }
        LabTask::Suites(options) => {
            let is_good = suites::run(&options, &Programs::beside_this()?)?;
            return Ok(if is_good { ExitCode::SUCCESS } else { ExitCode::FAILURE });
        }
        LabTask::Chaos(options) => {
            let tally = chaos::run(&options, &Programs::beside_this()?)?;
            print!("{tally}");
            return Ok(if tally.is_good() { ExitCode::SUCCESS } else { ExitCode::FAILURE });
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn look_around(spec: LabSpec, words: &[OsString]) -> Result<ExitCode> {
    let lab = Lab::start(&spec, &Programs::beside_this()?)?;
    let (program, arguments) = words.split_first().context("clap requires a command")?;
    let path = format!("{}:{PATH}", lab.workstation.programs().display());
    let mut command = lab.workstation.command(program);
    command.args(arguments).stdin(Stdio::inherit()).env("PATH", path);
    command.envs(std::env::var_os("TERM").map(|term| ("TERM", term)));
    let status = lab.workstation.spawn(command)?.wait()?;
    Ok(status
        .code()
        .and_then(|code| u8::try_from(code).ok())
        .map_or(ExitCode::FAILURE, ExitCode::from))
}

fn measure(link: Profile) -> Result<()> {
    let lab =
        Lab::start(&LabSpec::servers(1).link(link).without_executors(), &Programs::beside_this()?)?;
    let measured =
        wire::check::measure(&lab.workstation, &lab.servers[0].host, &network::addresses(1).1)?;
    println!("{link}: measured {measured}");
    Ok(())
}

fn hold(servers: usize) -> Result<()> {
    let lab =
        Lab::start(&LabSpec::servers(servers).without_executors(), &Programs::beside_this()?)?;
    let mut pids = Vec::new();
    for host in std::iter::once(&lab.workstation).chain(lab.servers.iter().map(|s| &s.host)) {
        pids.extend(host.processes()?.iter().map(|p| p.pid));
    }
    println!("{}", pids.iter().map(u32::to_string).collect::<Vec<_>>().join(" "));
    std::io::stdout().flush()?;
    std::io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}
