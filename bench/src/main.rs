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
struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Debug, Subcommand)]
enum Task {
    /// Cost of posh itself: per command, per stage, per byte, in memory and at the start.
    Overhead(overhead::Options),
    /// Effect of one identity's or a stranger's abuse on another identity: its latencies beside
    /// each kind of abuse.
    Fairness(fairness::Options),
    /// Abuses an executor until it is killed.
    #[command(hide = true)]
    Abuse(fairness::abuse::Options),
    /// The table: workloads over an emulated link, under bash, ssh, GNU parallel and posh.
    Table(table::Options),
    /// Delay of each shape of processes and pipes, beyond bash (docs/waits.md).
    Shapes(shapes::Options),
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
    match Arguments::parse().task {
        Task::Overhead(options) => overhead::run(&options)?,
        Task::Fairness(options) => return fairness::run(&options),
        Task::Abuse(options) => fairness::abuse::run(&options)?,
        Task::Table(options) => table::run(&options)?,
        Task::Shapes(options) => shapes::run(&options)?,
        Task::Consume { parts, part_bytes } => pump::consume(parts, part_bytes)?,
        Task::Discard => pump::discard()?,
        Task::Tcp { from, to } => pump::tcp(&from, &to)?,
    }
    Ok(ExitCode::SUCCESS)
}
