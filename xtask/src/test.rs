//! `cargo xtask test`: the complete check, for developers and CI. Every step runs even after a
//! failure; the last line sums up.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context, Result, ensure};

use crate::bash_tests;
use crate::cargo;
use crate::programs;
use crate::setup::{self, PackageSet};
use crate::supply;
use crate::tidy;

/// Tests (and steps, which count as one each) that passed and failed.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct Sum {
    passed: u64,
    failed: u64,
}

/// Sets up and runs everything, or only the tests whose names contain `filter`.
pub fn run(full: bool, filter: Option<&str>) -> Result<ExitCode> {
    setup::toolchain()?;
    programs::small_target()?;
    setup::packages(PackageSet::Everything)?;
    ensure!(setup::is_root(), "the tests make network and mount namespaces: run them as root");
    ensure!(
        Path::new("/dev/fuse").exists(),
        "the tests mount with FUSE, and /dev/fuse does not exist"
    );
    let mut sum = Sum::default();
    if filter.is_none() {
        sum.step(cargo::command(&["fmt", "--all", "--check"]))?;
        sum.step(cargo::command(&[
            "clippy",
            "--quiet",
            "--workspace",
            "--all-targets",
            "--",
            "-D",
            "warnings",
        ]))?;
        sum.check("supply chain", supply::check());
        sum.check("tidy", cargo::root().and_then(|root| tidy::run(&root, false)));
    }
    // Integration tests start the programs themselves, which `cargo test` alone does not build.
    for build in programs::builds(&["--quiet"], &["--tests"])? {
        sum.step(build)?;
    }
    sum.tests(full, filter, &programs::assemble("debug")?)?;
    if filter.is_none() {
        let mut doc = cargo::command(&["doc", "--quiet", "--workspace", "--no-deps"]);
        doc.env("RUSTDOCFLAGS", "-D warnings");
        sum.step(doc)?;
    }
    println!("{} passed, {} failed", sum.passed, sum.failed);
    Ok(if sum.failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

impl Sum {
    /// A check that passes or fails as a whole.
    fn step(&mut self, mut command: Command) -> Result<()> {
        let line = cargo::line(&command);
        println!("$ {line}");
        let status = command
            .stdin(Stdio::null())
            .status()
            .with_context(|| format!("cannot start {line}"))?;
        if status.success() {
            self.passed += 1;
        } else {
            println!("{line}: failed");
            self.failed += 1;
        }
        Ok(())
    }

    /// A check of this program's own.
    fn check(&mut self, name: &str, result: Result<()>) {
        match result {
            Ok(()) => self.passed += 1,
            Err(error) => {
                println!("{name}: failed: {error:#}");
                self.failed += 1;
            }
        }
    }

    fn tests(&mut self, full: bool, filter: Option<&str>, programs: &Path) -> Result<()> {
        let mut command = cargo::command(&["test", "--workspace", "--no-fail-fast"]);
        command.args(filter).env("POSH_PROGRAMS", programs);
        if full {
            command.env("POSH_TEST_FULL", "1");
            match bash_tests::fetch() {
                Ok(tests) => drop(command.env("POSH_BASH_TESTS", tests)),
                Err(error) => {
                    println!("bash's own test suite is NOT compared, for want of it: {error:#}")
                }
            }
        }
        println!("$ {}", cargo::line(&command));
        let mut child =
            with_default_signals(&command).spawn().context("cannot start cargo test")?;
        let output = BufReader::new(child.stdout.take().expect("stdout is a pipe"));
        let before = *self;
        for line in output.split(b'\n') {
            let line = line.context("cannot read the output of cargo test")?;
            let line = String::from_utf8_lossy(&line);
            println!("{line}");
            self.add(Sum::read(&line).unwrap_or_default());
        }
        let status = child.wait().context("cannot wait for cargo test")?;
        // A test that does not compile, or a test program that was killed, prints no result.
        if !status.success() && self.failed == before.failed {
            self.failed += 1;
        }
        Ok(())
    }

    fn add(&mut self, more: Sum) {
        self.passed += more.passed;
        self.failed += more.failed;
    }

    /// `test result: ok. 5 passed; 0 failed; ...`
    fn read(line: &str) -> Option<Sum> {
        let counts = line.strip_prefix("test result: ")?;
        let count = |what: &str| {
            counts.split([';', '.']).find_map(|p| p.trim().strip_suffix(what)?.trim().parse().ok())
        };
        Some(Sum { passed: count("passed")?, failed: count("failed")? })
    }
}

/// Runs the command through env(1), with default actions for the signals that a background job of a
/// shell or nohup(1) ignores: tests interrupt and hang up their processes.
fn with_default_signals(command: &Command) -> Command {
    let mut env = Command::new("env");
    env.arg("--default-signal=HUP,INT,QUIT").arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => env.env(name, value),
            None => env.env_remove(name),
        };
    }
    if let Some(directory) = command.get_current_dir() {
        env.current_dir(directory);
    }
    env.stdin(Stdio::null()).stdout(Stdio::piped());
    env
}

#[cfg(test)]
mod tests {
    use super::Sum;

    #[test]
    fn results_of_the_test_programs_are_read() {
        let line = "test result: FAILED. 5 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out; finished in 2.01s";
        assert_eq!(Sum::read(line), Some(Sum { passed: 5, failed: 2 }));
        assert_eq!(Sum::read("test a ... ok"), None);
    }
}
