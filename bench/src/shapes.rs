//! The table of docs/waits.md: the times of each shape of processes and pipes under bash and under
//! posh, over a link.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::Args;
use posh_integration::oracle::Under;
use posh_integration::programs::Programs;
use posh_integration::shapes::{self, Shape, WaitCounts};
use posh_integration::wire::Profile;
use posh_integration::{Lab, LabSpec};

use crate::sample::Samples;

/// Options of `posh-bench shapes`.
#[derive(Debug, Args)]
pub struct ShapesOptions {
    /// How often each shape is run under each shell.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// The server's link: wan, wifi, lan, or MILLISECONDS:MEGABITS; else nothing limits it.
    #[arg(long)]
    link: Option<Profile>,
}

/// Prints the table.
pub fn run(options: &ShapesOptions) -> Result<()> {
    ensure!(options.rounds > 0, "no round, no median");
    let lab = Lab::start(
        &LabSpec { link: options.link, ..LabSpec::servers(1) },
        &Programs::beside_this()?,
    )?;
    shapes::furnish(&lab)?;
    println!("| shape | bash, ms | posh, ms | more, ms |\n|---|---:|---:|---:|");
    for shape in shapes::load()? {
        println!("{}", row(&shape, &lab, options.rounds)?);
    }
    let waits = WaitCounts::of(&lab.workstation)?;
    println!(
        "\nThe longest wait of a command was {:.1} ms; backstops: {:?}.",
        waits.longest_ms, waits.backstops
    );
    Ok(())
}

fn row(shape: &Shape, lab: &Lab, rounds: usize) -> Result<String> {
    let (mut bash, mut posh) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        bash.push(milliseconds(shape.run(lab, Under::Shell)?.wall));
        posh.push(milliseconds(shape.run(lab, Under::Posh)?.wall));
    }
    let extra = posh.iter().zip(&bash).map(|(posh, bash)| posh - bash).collect();
    let [bash, posh, extra] = [bash, posh, extra].map(Samples::new);
    let median = |samples: Option<Samples>| {
        samples.map(|samples| samples.median()).context("no round was run")
    };
    Ok(format!(
        "| {} | {:.1} | {:.1} | {:+.1} |",
        shape.name,
        median(bash)?,
        median(posh)?,
        median(extra)?
    ))
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1000.0
}
