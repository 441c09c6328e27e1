//! Resident memory while the gateway joins eight outputs in order, and when idle.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use posh_integration::explain::ExplainReport as Explained;
use posh_integration::host::CONFIG;
use posh_integration::oracle::{SCRIPT_LIMIT, collect};
use posh_integration::programs::Programs;

use crate::machine::{field, kib};
use crate::report::{BenchReport, FigureTarget};
use crate::sample::Samples;
use crate::site::BenchSite;

const PARTS: u64 = 8;
const PART_BYTES: u64 = 1 << 30;
const UNIT: &str = "MiB";
const LOADED: FigureTarget = FigureTarget::AtMost(160.0);
const IDLE: FigureTarget = FigureTarget::AtMost(32.0);
/// Pause after the work: memory that is freed by then is not held by an idle service.
const REST: Duration = Duration::from_secs(2);

/// Peak and idle memory of gateway and executor.
pub fn measure(programs: &Programs, report: &mut BenchReport) -> Result<()> {
    let site = BenchSite::start(programs, 1)?;
    let mut words = String::new();
    for number in 1..=PARTS {
        // A sparse file of zeros: 8 GiB of data would not fit into every machine's memory.
        let path = site.sparse_file(&format!("part{number}"), PART_BYTES, u8::try_from(number)?)?;
        words += &format!(" {}", path.display());
    }
    site.file("empty", 0)?;
    site.expect_placement("cat /mnt/s1/empty", true)?;
    let gateway = site.gateway()?.context("no gateway runs")?;
    let executor = site.executor(1);
    for (name, pid) in [("gateway", gateway), ("executor", executor)] {
        report.add(format!("{name}, idle before"), UNIT, IDLE, resident(pid, "VmRSS")?);
    }
    join_eight(&site, &words)?;
    for (name, pid) in [("gateway", gateway), ("executor", executor)] {
        report.add(
            format!("{name}, peak while {PARTS} GiB are joined"),
            UNIT,
            LOADED,
            resident(pid, "VmHWM")?,
        );
    }
    std::thread::sleep(REST);
    for (name, pid) in [("gateway", gateway), ("executor", executor)] {
        report.add(format!("{name}, idle after"), UNIT, IDLE, resident(pid, "VmRSS")?);
    }
    Ok(())
}

/// Joins all parts into a reader that is slower than their writers.
fn join_eight(site: &BenchSite, words: &str) -> Result<()> {
    let reader = site.host().programs().join("posh-bench");
    let text = format!(
        "cat{words} | {} consume --parts {PARTS} --part-bytes {PART_BYTES}",
        reader.display()
    );
    let mut command = site.host().command(site.host().programs().join("posh"));
    command.args([
        "--explain=json",
        "--split",
        &PARTS.to_string(),
        "--config",
        CONFIG,
        "-c",
        &text,
    ]);
    let outcome = collect(site.host(), command, &text, SCRIPT_LIMIT)?;
    ensure!(outcome.status.success(), "the join failed: {outcome}");
    let (_, explained) = Explained::take(&outcome.stderr)?;
    let cat = explained.stages("cat").next().context("posh saw no cat")?;
    ensure!(
        cat.is_offloaded() && cat.reason.contains(&format!("{PARTS} parts")),
        "cat was not split: {}",
        cat.reason
    );
    Ok(())
}

fn resident(pid: u32, which: &str) -> Result<Samples> {
    let file = format!("/proc/{pid}/status");
    let value = field(&file, which)
        .and_then(|v| kib(&v))
        .with_context(|| format!("no {which} in {file}"))?;
    Ok(Samples::one(value as f64 / 1024.0))
}
