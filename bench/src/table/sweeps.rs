//! Two series of figures beside the table: one small command against the round trip, and throughput
//! against the split factor.

use std::fs;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use posh_integration::wire::Profile;

use super::catalogue::{DataSize, ONE_COMMAND, Workload};
use super::cell::{self, Terms};
use super::place::RunPlace;
use super::results::{Latency, Split};
use super::system::System;
use crate::sample::Samples;

/// Round trips of the sweep, milliseconds.
const ROUND_TRIPS_MS: [u64; 6] = [0, 1, 5, 20, 50, 100];
/// Commands in one session; the first [`WARM_UP`] are not counted.
const COMMANDS: usize = 15;
const WARM_UP: usize = 3;
/// Systems that can run a small command in an existing session.
const SYSTEMS: [System; 4] = [System::Posh, System::PoshVolume, System::SshMaster, System::Sshfs];
/// Values of `--split`.
const PARTS: [usize; 3] = [1, 2, 4];
/// Timeout of a session.
const LIMIT: Duration = Duration::from_secs(120);

/// Latency of one small command, for each round trip and system.
pub fn latency(megabits: u32) -> Result<Vec<Latency>> {
    let mut found = Vec::new();
    for milliseconds in ROUND_TRIPS_MS {
        let link = Profile { round_trip: Duration::from_millis(milliseconds), megabits };
        let mut place = RunPlace::start(link, Profile::LAN, 1, None)?;
        let directory = place.lab.data(1).join(ONE_COMMAND.name);
        fs::create_dir(&directory).context("cannot make a directory on a server")?;
        for number in 0..COMMANDS {
            fs::write(directory.join(format!("small{number}")), "a line\nanother line\n")?;
        }
        for system in SYSTEMS {
            let samples = session(&mut place, system)?;
            let summary = samples.summary();
            eprintln!(
                "  one command, {milliseconds} ms, {}: {:.1} ms",
                system.name(),
                summary.median
            );
            let (round_trip_ms, system) = (milliseconds as f64, system.name().to_owned());
            found.push(Latency { round_trip_ms, system, milliseconds: samples, summary });
        }
    }
    Ok(found)
}

/// Runs commands that each read a new file; milliseconds, timed in the shell.
fn session(place: &mut RunPlace, system: System) -> Result<Samples> {
    const TIMES: &str = "/run/times";
    place.prepare(&ONE_COMMAND, system)?;
    let (mut script, under) = system.script(&ONE_COMMAND, DataSize::S);
    let command = match system {
        System::SshMaster => "$SSH \"$H1\" cat \"$S1/small$i\"",
        _ => "cat \"$S1/small$i\"",
    };
    script.text = format!(
        "for ((i = 0; i < {COMMANDS}; i++)); do\nbefore=$EPOCHREALTIME\n\
         {command} > /dev/null || exit\n\
         after=$EPOCHREALTIME\necho $((${{after/./}} - ${{before/./}}))\ndone > {TIMES}\n"
    );
    let host = &place.lab.workstation;
    let mut command = script.command(host, under);
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let mut process = host.spawn(command)?;
    ensure!(
        process.wait_at_most(LIMIT)? && process.wait()?.success(),
        "a session under {} failed",
        system.name()
    );
    let text =
        fs::read_to_string(host.path(TIMES)).context("cannot read the times of a session")?;
    let micros: Vec<f64> = text.lines().skip(WARM_UP).map(str::parse).collect::<Result<_, _>>()?;
    ensure!(micros.len() == COMMANDS - WARM_UP, "{} times instead of {COMMANDS}", micros.len());
    Ok(Samples::new(micros).context("no times")?.map(|micros| micros / 1000.0))
}

/// Measures one workload in one, two and four parts.
pub fn split(
    place: &mut RunPlace,
    workload: &'static Workload,
    terms: Terms,
    runs: usize,
    input_bytes: u64,
) -> Result<Vec<Split>> {
    let mut found = Vec::new();
    for parts in PARTS {
        let mut seconds = Vec::new();
        for _ in 0..runs {
            let option = parts.to_string();
            seconds.push(
                cell::try_once(place, workload, System::Posh, terms, &["--split", &option])?
                    .seconds,
            );
        }
        let seconds = Samples::new(seconds).context("no runs")?;
        let megabytes_per_second = input_bytes as f64 / 1e6 / seconds.median();
        eprintln!("  {} in {parts} parts: {:.2} s", workload.name, seconds.median());
        found.push(Split {
            workload: workload.name.to_owned(),
            parts,
            seconds,
            megabytes_per_second,
        });
    }
    Ok(found)
}
