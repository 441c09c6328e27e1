//! The benchmarks' program: each subcommand is one benchmark, or a helper process that a benchmark
//! starts on its own machines.

mod fairness;
mod machine;
mod overhead;
mod paired;
mod pump;
mod report;
mod sample;
mod shapes;
mod site;
mod table;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

/// Measures posh.
#[derive(Debug, Parser)]
struct BenchArguments {
    #[command(subcommand)]
    task: BenchTask,
}

#[derive(Debug, Subcommand)]
enum BenchTask {
    /// Cost of posh itself: per command, per stage, per byte, in memory and at the start.
    Overhead(overhead::OverheadOptions),
    /// Effect of one identity's or a stranger's abuse on another identity: its latencies beside
    /// each kind of abuse.
    Fairness(fairness::FairnessOptions),
    /// Abuses an executor until it is killed.
    #[command(hide = true)]
    Abuse(fairness::abuse::AbuseOptions),
    /// The table: workloads over an emulated link, under bash, ssh, GNU parallel and posh.
    Table(table::TableOptions),
    /// Delay of each shape of processes and pipes, beyond bash (docs/waits.md).
    Shapes(shapes::ShapesOptions),
    /// Reads standard input slowly and checks that parts come whole and in order.
    #[command(hide = true)]
    Consume {
        /// How many parts.
        #[arg(long)]
        parts: u64,
        /// Bytes of each.
        #[arg(long)]
        part_bytes: u64,
    },
    /// Reads standard input to its end.
    #[command(hide = true)]
    Discard,
    /// Copies a file to another one over a TCP connection of its own on the loopback interface.
    #[command(hide = true)]
    Tcp {
        /// File to send.
        from: PathBuf,
        /// Where it arrives.
        to: PathBuf,
    },
}

fn main() -> Result<ExitCode> {
    match BenchArguments::parse().task {
        BenchTask::Overhead(options) => overhead::run(&options)?,
        BenchTask::Fairness(options) => return fairness::run(&options),
        BenchTask::Abuse(options) => fairness::abuse::run(&options)?,
        BenchTask::Table(options) => table::run(&options)?,
        BenchTask::Shapes(options) => shapes::run(&options)?,
        BenchTask::Consume { parts, part_bytes } => pump::consume(parts, part_bytes)?,
        BenchTask::Discard => pump::discard()?,
        BenchTask::Tcp { from, to } => pump::tcp(&from, &to)?,
    }
    Ok(ExitCode::SUCCESS)
}
