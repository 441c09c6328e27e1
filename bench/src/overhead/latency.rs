//! Time per command and per stage: local ones, and offloaded ones that do almost nothing.

use anyhow::Result;
use posh_integration::oracle::Door;
use posh_integration::programs::Programs;

use crate::paired::Paired;
use crate::report::{BenchReport, FigureTarget};
use crate::site::BenchSite;

const ROUNDS: usize = 10;
const MS: &str = "ms";

/// A local command, a local pipeline, offloaded commands.
pub fn measure(programs: &Programs, report: &mut BenchReport) -> Result<()> {
    let site = BenchSite::start(programs, 1)?;
    site.file("empty", 0)?;
    site.file("small", 4096)?;
    for door in Door::ALL {
        local_command(&site, report, door)?;
        local_pipeline(&site, report, door)?;
    }
    for (what, command) in [
        ("cat of an empty file", "cat /mnt/s1/empty > /dev/null"),
        ("grep -q", "grep -q x /mnt/s1/small"),
        ("cat in $(...)", "seen=$(cat /mnt/s1/empty)"),
    ] {
        offloaded(&site, report, what, command)?;
    }
    Ok(())
}

/// Limits of the extra time of a local command, and of a stage of a local pipeline.
fn targets(door: Door) -> (FigureTarget, FigureTarget) {
    match door {
        Door::Hook => (FigureTarget::AtMost(0.2), FigureTarget::AtMost(0.5)),
        Door::Path => (FigureTarget::AtMost(1.0), FigureTarget::AtMost(2.0)),
    }
}

fn local_command(site: &BenchSite, report: &mut BenchReport, door: Door) -> Result<()> {
    let command = "grep root /etc/passwd > /dev/null";
    site.expect_placement(command, false)?;
    let found = Paired { door, ..small(command, 100, 2 * ROUNDS) }.run(site)?;
    report.add(format!("local command, {}: bash", door.name()), MS, FigureTarget::None, found.bash);
    report.add(format!("local command, {}: extra", door.name()), MS, targets(door).0, found.extra);
    Ok(())
}

fn local_pipeline(site: &BenchSite, report: &mut BenchReport, door: Door) -> Result<()> {
    const STAGES: f64 = 3.0;
    let command = "cat /etc/passwd | grep root | wc -l > /dev/null";
    site.expect_placement(command, false)?;
    let found = Paired { door, ..small(command, 60, ROUNDS) }.run(site)?;
    let extra = found.extra.map(|ms| ms / STAGES);
    report.add(
        format!("local pipeline of 3, {}: bash", door.name()),
        MS,
        FigureTarget::None,
        found.bash,
    );
    report.add(
        format!("local pipeline of 3, {}: extra per stage", door.name()),
        MS,
        targets(door).1,
        extra,
    );
    Ok(())
}

fn offloaded(site: &BenchSite, report: &mut BenchReport, what: &str, command: &str) -> Result<()> {
    site.expect_placement(command, true)?;
    let found = small(command, 60, ROUNDS).run(site)?;
    report.add(format!("{what}: bash, here"), MS, FigureTarget::None, found.bash);
    report.add(
        format!("{what}: posh, offloaded, in all"),
        MS,
        FigureTarget::AtMost(6.0),
        found.posh,
    );
    Ok(())
}

fn small(command: &str, times: usize, rounds: usize) -> Paired<'_> {
    Paired { command, before_each: "", warm_up: 3, times, rounds, door: Door::Hook }
}
