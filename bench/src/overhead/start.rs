//! Start times: a shell with and without a running gateway, and the first offloaded command.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use posh_integration::process::wait_gone;
use posh_integration::programs::Programs;

use crate::report::{BenchReport, FigureTarget};
use crate::sample::Samples;
use crate::site::BenchSite;

const ROUNDS: usize = 9;
/// Rounds with a machine of their own, whose executors have never run anything.
const FRESH_ROUNDS: usize = 5;
/// Timeout for the end of a gateway.
const END_LIMIT: Duration = Duration::from_secs(10);
const MS: &str = "ms";

/// Measures whole processes, from outside.
pub fn measure(programs: &Programs, report: &mut BenchReport) -> Result<()> {
    let site = BenchSite::start(programs, 1)?;
    let (mut bash, mut warm, mut cold) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        end_gateway(&site)?;
        cold.push(time(&site, posh(&site, "true"))?);
        warm.push(time(&site, posh(&site, "true"))?);
        bash.push(time(&site, shell(&site))?);
    }
    let mut first = Vec::new();
    for _ in 0..FRESH_ROUNDS {
        let fresh = BenchSite::start(programs, 1)?;
        fresh.file("empty", 0)?;
        first.push(time(&fresh, posh(&fresh, "cat /mnt/s1/empty"))?);
    }
    let samples = |values| Samples::new(values).context("no round was run");
    report.add("bash -c true", MS, FigureTarget::None, samples(bash)?);
    report.add("posh -c true", MS, FigureTarget::None, samples(warm)?);
    report.add("posh -c true, no gateway runs", MS, FigureTarget::None, samples(cold)?);
    report.add(
        "posh -c 'cat FILE', no gateway runs, new executor",
        MS,
        FigureTarget::None,
        samples(first)?,
    );
    Ok(())
}

fn posh(site: &BenchSite, text: &str) -> Command {
    let mut command = site.host().command(site.host().programs().join("posh"));
    command.args(["-c", text]);
    command
}

fn shell(site: &BenchSite) -> Command {
    let mut command = site.host().command("bash");
    command.args(["-c", "true"]);
    command
}

fn time(site: &BenchSite, mut command: Command) -> Result<f64> {
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let line = format!("{command:?}");
    let began = Instant::now();
    let mut process = site.host().spawn(command)?;
    let status = process.wait()?;
    let took = began.elapsed();
    ensure!(status.success(), "{line} failed");
    Ok(took.as_secs_f64() * 1000.0)
}

fn end_gateway(site: &BenchSite) -> Result<()> {
    let Some(pid) = site.gateway()? else { return Ok(()) };
    kill(Pid::from_raw(i32::try_from(pid)?), Signal::SIGTERM).context("cannot end the gateway")?;
    ensure!(
        wait_gone(pid, END_LIMIT)?,
        "the gateway was told to end and still runs after {END_LIMIT:?}"
    );
    Ok(())
}
