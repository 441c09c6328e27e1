//! Bytes per second of one offloaded command's output, through executor, one connection, gateway
//! and stage program, compared with bash's own copy and plain TCP.

use std::fs;
use std::io::Read;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use posh_integration::oracle::Door;
use posh_integration::programs::Programs;

use crate::paired::Paired;
use crate::report::{BenchReport, FigureTarget};
use crate::sample::Samples;
use crate::site::{BenchSite, local_path};

pub(super) const SIZE_BYTES: u64 = 1 << 30;
const ROUNDS: usize = 5;
pub(super) const UNIT: &str = "MB/s";

/// Measures output to a file and to a pipe, and other carriers of the bytes.
pub fn measure(programs: &Programs, report: &mut BenchReport) -> Result<()> {
    let site = BenchSite::start(programs, 1)?;
    let big = site.file("big", SIZE_BYTES)?;
    let copy = local_path("copy");
    let to_file = format!("cat {} > {}", big.display(), copy.display());
    let empty = format!(": > {}", copy.display());
    site.expect_placement(&to_file, true)?;
    ensure_equal(&site.host().path(&big), &site.host().path(&copy))?;

    let found = paired(&to_file, &empty).run(&site)?;
    report.add("cat 1 GiB to a file: bash, here", UNIT, FigureTarget::None, rate(&found.bash));
    report.add(
        "cat 1 GiB to a file: posh, offloaded",
        UNIT,
        FigureTarget::AtLeast(500.0),
        rate(&found.posh),
    );

    let program = site.host().programs().join("posh-bench");
    // Not annotated, so that it runs locally and reads a pipe.
    let to_pipe = format!("cat {} | {} discard", big.display(), program.display());
    site.expect_placement(&to_pipe, true)?;
    let found = paired(&to_pipe, "").run(&site)?;
    report.add("cat 1 GiB into a pipe: bash, here", UNIT, FigureTarget::None, rate(&found.bash));
    report.add(
        "cat 1 GiB into a pipe: posh, offloaded",
        UNIT,
        FigureTarget::None,
        rate(&found.posh),
    );

    let tcp = format!("{} tcp {} {}", program.display(), big.display(), copy.display());
    let found = paired(&tcp, &empty).run(&site)?;
    report.add("1 GiB to a file: plain TCP", UNIT, FigureTarget::None, rate(&found.bash));
    Ok(())
}

pub(super) fn paired<'a>(command: &'a str, before_each: &'a str) -> Paired<'a> {
    Paired { command, before_each, warm_up: 0, times: 1, rounds: ROUNDS, door: Door::Hook }
}

pub(super) fn rate(milliseconds: &Samples) -> Samples {
    milliseconds.map(|ms| SIZE_BYTES as f64 / 1e3 / ms)
}

fn ensure_equal(one: &Path, other: &Path) -> Result<()> {
    let open = |path: &Path| {
        fs::File::open(path).with_context(|| format!("cannot open {}", path.display()))
    };
    let (mut one, mut other) = (open(one)?, open(other)?);
    let (mut left, mut right) = (vec![0; 1 << 20], vec![0; 1 << 20]);
    loop {
        let count = one.read(&mut left)?;
        if count == 0 {
            ensure!(other.read(&mut right)? == 0, "the copy is longer than the file");
            return Ok(());
        }
        other.read_exact(&mut right[..count]).context("the copy is shorter than the file")?;
        ensure!(left[..count] == right[..count], "the copy differs from the file");
    }
}
