//! `cargo xtask fuzz`: the targets of `integration/fuzz` under libFuzzer, with coverage.
//!
//! Passes of the stable compiler give libFuzzer its coverage, so that neither a nightly toolchain
//! nor a further program is needed. Findings and corpora are in `fuzz` of the target directory.

use std::fs::{self, File};
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use crate::cargo;

/// As in cargo-fuzz, without a sanitizer: posh has little unsafe code.
const FLAGS: &str = "-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares -Ccodegen-units=1";

/// Memory limit of a target, its corpus included: a leak ends the run.
const RSS_LIMIT_MIB: u32 = 2048;

/// Timeout of one input, which finds hangs.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Longer inputs only repeat what shorter ones show.
const MAX_INPUT_BYTES: u32 = 16 << 10;

/// Fuzzes `targets` (none: all), each for `seconds`, `jobs` at a time.
pub fn run(targets: &[String], seconds: u32, jobs: usize) -> Result<ExitCode> {
    let root =
        Path::new(env!("CARGO_MANIFEST_DIR")).parent().context("xtask lies in the workspace")?;
    let all = names(root)?;
    if let Some(unknown) = targets.iter().find(|name| !all.contains(name)) {
        bail!("there is no target `{unknown}`; there are {}", all.join(", "));
    }
    let programs = FuzzPrograms::build()?;
    let mut left: Vec<String> = if targets.is_empty() { all } else { targets.to_vec() };
    left.reverse();
    let mut failed = 0;
    let mut running: Vec<Fuzzer> = Vec::new();
    while !left.is_empty() || !running.is_empty() {
        while running.len() < jobs.max(1)
            && let Some(name) = left.pop()
        {
            running.push(Fuzzer::start(&programs, &name, seconds)?);
        }
        let first = running.remove(0);
        failed += u32::from(!first.finish()?);
    }
    Ok(if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Names of the targets, from their table.
fn names(root: &Path) -> Result<Vec<String>> {
    let table = fs::read_to_string(root.join("integration/fuzz/src/lib.rs"))
        .context("cannot read the targets")?;
    let targets = table.split("const TARGETS").nth(1).unwrap_or_default();
    let names: Vec<String> = targets
        .split("Target {")
        .skip(1)
        .filter_map(|target| target.trim_start().strip_prefix("name: \"")?.split('"').next())
        .map(str::to_owned)
        .collect();
    let entries = targets.matches("seeds:").count();
    ensure!(entries > 0, "integration/fuzz/src/lib.rs has no targets");
    ensure!(
        names.len() == entries,
        "of {entries} targets in integration/fuzz/src/lib.rs only {names:?} could be read"
    );
    Ok(names)
}

/// Built programs, and the directory for results.
struct FuzzPrograms {
    fuzzer: PathBuf,
    executor: PathBuf,
    base: PathBuf,
}

impl FuzzPrograms {
    fn build() -> Result<Self> {
        // This program is TARGET/TRIPLE/debug/xtask.
        let own = std::env::current_exe().context("cannot tell where this program lies")?;
        let lies = own
            .ancestors()
            .nth(2)
            .and_then(|of_triple| Some((of_triple.file_name()?, of_triple.parent()?)));
        let (triple, target) = lies.context("this program lies in no target directory")?;
        let base = target.join("fuzz");
        cargo::must(cargo::command(&["build", "--quiet", "--release", "--bin", "posh-executor"]))?;
        let mut build =
            cargo::command(&["build", "--quiet", "--profile", "fuzz", "--package", "posh-fuzz"]);
        build.args(["--features", "libfuzzer", "--target-dir"]).arg(&base).env("RUSTFLAGS", FLAGS);
        cargo::must(build)?;
        Ok(Self {
            fuzzer: base.join(triple).join("fuzz/posh-fuzz"),
            executor: target.join(triple).join("release/posh-executor"),
            base,
        })
    }
}

/// A running target.
struct Fuzzer {
    name: String,
    child: Child,
    log: PathBuf,
    artifacts: PathBuf,
}

impl Fuzzer {
    fn start(programs: &FuzzPrograms, name: &str, seconds: u32) -> Result<Self> {
        let base = programs.base.join(name);
        let [seeds, corpus, artifacts] =
            ["seeds", "corpus", "artifacts"].map(|kind| base.join(kind));
        for directory in [&seeds, &corpus, &artifacts] {
            fs::create_dir_all(directory)
                .with_context(|| format!("cannot make {}", directory.display()))?;
        }
        let log = base.join("log");
        let said = File::create(&log).with_context(|| format!("cannot write {}", log.display()))?;
        let mut fuzz = Command::new(&programs.fuzzer);
        fuzz.env("POSH_FUZZ_TARGET", name)
            .env("POSH_FUZZ_SEEDS", &seeds)
            .env("POSH_EXECUTOR", &programs.executor)
            .arg(format!("-max_total_time={seconds}"))
            .arg(format!("-rss_limit_mb={RSS_LIMIT_MIB}"))
            .arg(format!("-timeout={}", TIMEOUT.as_secs()))
            .arg(format!("-max_len={MAX_INPUT_BYTES}"))
            .arg(format!("-artifact_prefix={}/", artifacts.display()))
            .arg("-print_final_stats=1")
            .args([&corpus, &seeds])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(said);
        let child = fuzz.spawn().with_context(|| format!("cannot start the fuzzer of {name}"))?;
        println!("{name}: at work for {seconds} s, log in {}", log.display());
        Ok(Self { name: name.to_owned(), child, log, artifacts })
    }

    /// Waits for its end and prints the result; true if nothing was found.
    fn finish(mut self) -> Result<bool> {
        let status = self
            .child
            .wait()
            .with_context(|| format!("cannot wait for the fuzzer of {}", self.name))?;
        let mut log = Vec::new();
        File::open(&self.log)
            .and_then(|mut file| file.read_to_end(&mut log))
            .context("cannot read the log")?;
        let log = String::from_utf8_lossy(&log);
        let stat = |name: &str| {
            let line =
                log.lines().rev().find_map(|line| line.strip_prefix(&format!("stat::{name}:")));
            line.map_or("?", str::trim).to_owned()
        };
        let covered = log
            .lines()
            .rev()
            .find_map(|line| line.split(" cov: ").nth(1)?.split(' ').next())
            .unwrap_or("?");
        println!(
            "{}: {} inputs, {covered} edges covered, {} new in the corpus, peak {} MiB: {}",
            self.name,
            stat("number_of_executed_units"),
            stat("new_units_added"),
            stat("peak_rss_mb"),
            if status.success() {
                "nothing found".to_owned()
            } else {
                format!("FOUND ({status}), see {}", self.artifacts.display())
            }
        );
        if !status.success() {
            let tail: Vec<_> = log.lines().rev().take(12).collect();
            tail.into_iter().rev().for_each(|line| println!("    {line}"));
        }
        Ok(status.success())
    }
}
