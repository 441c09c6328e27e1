//! `cargo xtask guards`: checks that the tests of attacks notice the removal of a guard. Each guard
//! of `guards.toml` is removed from a copy of the tree, alone, and its test must fail then.
//!
//! It takes minutes for every handful, so it is no part of `cargo xtask test`; that checks only
//! that the table still matches the source.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Output, Stdio};
use std::str::FromStr;

use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;

use crate::cargo;

/// Time limit of one test, which may wait for an event that never comes without its guard. Its own
/// timeouts are 20 s at a time.
const LIMIT_S: u32 = 180;

/// Exit status of timeout(1) when it had to kill the test.
const TIMED_OUT: i32 = 124;

/// The whole table.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    guard: Vec<Guard>,
}

/// One guard, and the test that must fail without it.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Guard {
    what: String,
    /// From the workspace's root.
    file: PathBuf,
    /// The guard's text, which occurs once.
    text: String,
    /// Replacement of the guard's text.
    without: String,
    /// Package and test target: `posh-executor/executor`; `posh-proto/lib` for the tests in the
    /// package's sources.
    program: String,
    /// Full name of the test.
    test: String,
}

/// In place of a test target: the tests in a package's sources.
const LIBRARY: &str = "lib";

/// Result of a test.
#[derive(Debug, PartialEq, Eq)]
enum TestVerdict {
    Passed,
    Failed,
    TimedOut,
    /// It crashed its test program.
    Died,
    /// No test has this name, so that nothing was tested.
    NotThere,
}

/// One of several parts of the table, of about equal length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TablePart {
    /// From 0.
    number: usize,
    parts: usize,
}

impl FromStr for TablePart {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let numbers = text.split_once('/').map(|(number, parts)| (number.parse(), parts.parse()));
        match numbers {
            Some((Ok(number), Ok(parts))) if (1..=parts).contains(&number) => {
                Ok(Self { number: number - 1, parts })
            }
            _ => bail!("`{text}` is not PART/PARTS, such as 2/5"),
        }
    }
}

impl TablePart {
    /// Range of this part among `count` items.
    fn of(self, count: usize) -> Range<usize> {
        let border = |number| count * number / self.parts;
        border(self.number)..border(self.number + 1)
    }
}

/// Removes every guard whose description or test contains `filter`: one after the other in each of
/// `jobs` copies of the tree.
pub fn run(filter: Option<&str>, part: Option<TablePart>, jobs: usize) -> Result<ExitCode> {
    let root = cargo::root()?;
    let is_wanted = |guard: &Guard| {
        filter.is_none_or(|part| guard.what.contains(part) || guard.test.contains(part))
    };
    let mut guards: Vec<Guard> = table(&root)?.into_iter().filter(is_wanted).collect();
    ensure!(!guards.is_empty(), "no guard is called so");
    // Guards of one source file follow each other, which saves builds.
    guards.sort_by(|one, other| (&one.file, &one.program).cmp(&(&other.file, &other.program)));
    if let Some(part) = part {
        guards = guards.drain(part.of(guards.len())).collect();
    }
    let share = guards.len().div_ceil(jobs.max(1));
    let kept = std::thread::scope(|scope| {
        let root = &root;
        let work = |(number, share)| scope.spawn(move || take_out(&Copy::of(root, number)?, share));
        let at_work: Vec<_> = guards.chunks(share).enumerate().map(work).collect();
        let kept = at_work.into_iter().map(|thread| thread.join().expect("no panic in a copy"));
        kept.sum::<Result<usize>>()
    })?;
    println!("{} guards taken out, {kept} not missed by their tests", guards.len());
    Ok(if kept == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Returns the number of guards whose removal no test noticed.
fn take_out(tree: &Copy, guards: &[Guard]) -> Result<usize> {
    // A test must pass with the guard for its failure without it to mean anything.
    let mut by_program: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for guard in guards {
        by_program.entry(&guard.program).or_default().insert(&guard.test);
    }
    for (program, tests) in by_program {
        let together = tree.test(program, &tests)?;
        for test in tests.into_iter().filter(|_| together != TestVerdict::Passed) {
            let alone = tree.test(program, &BTreeSet::from([test]))?;
            ensure!(alone == TestVerdict::Passed, "{test} with its guard: {alone:?}");
        }
    }
    let mut kept = 0;
    for guard in guards {
        let verdict = tree.without(guard)?;
        let is_missed =
            matches!(verdict, TestVerdict::Failed | TestVerdict::TimedOut | TestVerdict::Died);
        kept += usize::from(!is_missed);
        println!(
            "{}  {}: {} {verdict:?}",
            if is_missed { "ok  " } else { "KEPT" },
            guard.what,
            guard.test
        );
    }
    Ok(kept)
}

fn table(root: &Path) -> Result<Vec<Guard>> {
    let text = fs::read_to_string(root.join("xtask/guards.toml"))
        .context("cannot read the table of guards")?;
    Ok(toml::from_str::<Table>(&text).context("the table of guards")?.guard)
}

impl Guard {
    /// The source without the guard.
    fn taken_out_of(&self, source: &str) -> Result<String> {
        let count = source.matches(&self.text).count();
        ensure!(
            count == 1,
            "{}: the text of `{}` stands there {count} times",
            self.file.display(),
            self.what
        );
        ensure!(self.text != self.without, "`{}` is not taken out", self.what);
        Ok(source.replace(&self.text, &self.without))
    }
}

/// Package and test target of a program.
fn target(program: &str) -> Result<(&str, &str)> {
    program.split_once('/').with_context(|| format!("{program:?} is no PACKAGE/TARGET"))
}

/// A copy of the tree with a target directory of its own, so that its builds are not taken for the
/// real programs.
struct Copy {
    tree: PathBuf,
    target: PathBuf,
}

impl Copy {
    fn of(root: &Path, number: usize) -> Result<Self> {
        // This program is TARGET/TRIPLE/debug/xtask.
        let own = std::env::current_exe().context("cannot tell where this program lies")?;
        let base = own
            .ancestors()
            .nth(3)
            .context("this program lies in no target directory")?
            .join(format!("guards/{number}"));
        let copy = Self { tree: base.join("tree"), target: base.join("target") };
        let listed = must(Command::new("git").arg("-C").arg(root).args(["ls-files", "-z"]))?;
        for name in
            String::from_utf8(listed.stdout).context("names of files")?.split_terminator('\0')
        {
            let (from, to) = (root.join(name), copy.tree.join(name));
            // A file that git still lists may be gone.
            let Ok(content) = fs::read(&from) else { continue };
            copy.write(&to, &content)?;
        }
        Ok(copy)
    }

    /// Writes a file. Unchanged content keeps its time, and cargo its builds.
    fn write(&self, to: &Path, content: &[u8]) -> Result<()> {
        if fs::read(to).is_ok_and(|present| present == content) {
            return Ok(());
        }
        let attempt = || format!("cannot write {}", to.display());
        fs::create_dir_all(to.parent().unwrap_or(&self.tree)).with_context(attempt)?;
        fs::write(to, content).with_context(attempt)
    }

    /// Result of the test without the guard; the guard is restored afterwards.
    fn without(&self, guard: &Guard) -> Result<TestVerdict> {
        let file = self.tree.join(&guard.file);
        let source =
            fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
        self.write(&file, guard.taken_out_of(&source)?.as_bytes())?;
        let verdict = self.test(&guard.program, &BTreeSet::from([guard.test.as_str()]));
        self.write(&file, source.as_bytes())?;
        verdict
    }

    /// Result of these tests of a program.
    fn test(&self, program: &str, tests: &BTreeSet<&str>) -> Result<TestVerdict> {
        let (package, target) = target(program)?;
        if package == "posh-integration" {
            must(self.cargo(&["build", "--quiet", "--workspace", "--bins"], None))?;
        }
        let target = if target == LIBRARY { vec!["--lib"] } else { vec!["--test", target] };
        let words = [&["test", "--quiet", "--package", package], &target[..]].concat();
        must(self.cargo(&[&words[..], &["--no-run"]].concat(), None))?;
        let tests: Vec<&str> = tests.iter().copied().collect();
        let words = [&words[..], &["--", "--exact"], &tests].concat();
        let limit_s = LIMIT_S * u32::try_from(tests.len())?;
        let output =
            self.cargo(&words, Some(limit_s)).output().context("cannot start cargo test")?;
        if output.status.code() == Some(TIMED_OUT) {
            return Ok(TestVerdict::TimedOut);
        }
        let said = String::from_utf8_lossy(&output.stdout);
        Ok(match said.lines().find_map(|line| line.strip_prefix("test result: ")) {
            Some(sum) if sum.contains(&format!(" {} passed", tests.len())) => TestVerdict::Passed,
            Some(sum) if !sum.contains(" 0 failed") => TestVerdict::Failed,
            Some(_) => TestVerdict::NotThere,
            None => TestVerdict::Died,
        })
    }

    /// cargo for the copy, with a time limit if one is given.
    fn cargo(&self, words: &[&str], limit_s: Option<u32>) -> Command {
        let cargo = cargo::command(words);
        let mut command = match limit_s {
            Some(limit_s) => {
                let mut command = Command::new("timeout");
                command
                    .args(["--kill-after=10", &limit_s.to_string()])
                    .arg(cargo.get_program())
                    .args(cargo.get_args());
                command
            }
            None => cargo,
        };
        // No backtrace of it is read.
        command.env("CARGO_PROFILE_DEV_DEBUG", "0");
        command.current_dir(&self.tree).env("CARGO_TARGET_DIR", &self.target).stdin(Stdio::null());
        command
    }
}

/// Runs a command to its end; a non-zero status is an error with the command's output.
fn must(command: impl std::borrow::BorrowMut<Command>) -> Result<Output> {
    let mut command = command;
    let command = command.borrow_mut();
    let output =
        command.output().with_context(|| format!("cannot start {}", cargo::line(command)))?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{} failed: {said}", cargo::line(command));
    Ok(output)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_are_the_whole() {
        let parts = ["1/3", "2/3", "3/3"].map(|part| part.parse::<TablePart>().unwrap().of(380));
        assert_eq!(parts, [0..126, 126..253, 253..380]);
        for wrong in ["0/3", "4/3", "3", "a/3", "1/0", ""] {
            assert!(wrong.parse::<TablePart>().is_err(), "{wrong}");
        }
    }

    fn sources(directory: &Path) -> Vec<String> {
        let mut found = Vec::new();
        for entry in fs::read_dir(directory).unwrap().map(Result::unwrap) {
            let path = entry.path();
            if path.is_dir() {
                found.extend(sources(&path));
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                found.push(fs::read_to_string(path).unwrap());
            }
        }
        found
    }

    /// What `cargo xtask guards` needs before it can begin: a change of the source shows here.
    #[test]
    fn every_guard_and_its_test_are_where_the_table_says() {
        let root = cargo::root().unwrap();
        let guards = table(&root).unwrap();
        for guard in &guards {
            let source = fs::read_to_string(root.join(&guard.file)).unwrap();
            guard.taken_out_of(&source).unwrap();
            let (package, target) = target(&guard.program).unwrap();
            let directory = if target == LIBRARY { "src" } else { "tests" };
            let function = format!("fn {}()", guard.test.rsplit("::").next().unwrap());
            let tests = sources(&root.join(package.trim_start_matches("posh-")).join(directory));
            assert!(
                tests.iter().any(|source| source.contains(&function)),
                "{} is not there",
                guard.test
            );
        }
    }

    /// Headings of docs/security.md, one for each kind of attacker.
    const ATTACKERS: [&str; 5] = [
        "### Strangers",
        "### Identities",
        "### Other local users",
        "### Servers",
        "### Directories",
    ];
    /// Attacks in the table, at least.
    const MIN_ATTACKS: usize = 90;

    /// `| attack | guard | test |`, below the headings of the attackers.
    fn attacks(text: &str) -> Vec<(&str, Vec<&str>)> {
        let mut attacker = None;
        let mut found = Vec::new();
        for line in text.lines() {
            if line.starts_with('#') {
                attacker = ATTACKERS.into_iter().find(|known| *known == line);
            }
            let cells: Vec<&str> = line.split(" | ").collect();
            if let (Some(attacker), [_, _, tests]) = (attacker, &cells[..])
                && tests.contains('`')
            {
                found.push((attacker, tests.split('`').skip(1).step_by(2).collect()));
            }
        }
        found
    }

    #[test]
    fn every_attack_of_the_table_has_a_test() {
        let root = cargo::root().unwrap();
        let text = fs::read_to_string(root.join("docs/security.md")).unwrap();
        let attacks = attacks(&text);
        assert!(attacks.len() >= MIN_ATTACKS, "{} attacks", attacks.len());
        for attacker in ATTACKERS {
            assert!(attacks.iter().any(|(of, _)| *of == attacker), "no attack below {attacker}");
        }
        let directories = [
            "annotations",
            "executor",
            "fs-mapper",
            "gateway",
            "hook",
            "integration",
            "posh",
            "proto",
        ];
        let directories =
            directories.iter().chain(&["reach", "trusted-path", "volume", "xtask", "bench"]);
        let sources: Vec<String> =
            directories.flat_map(|directory| sources(&root.join(directory))).collect();
        let missing = attacks.iter().flat_map(|(_, tests)| tests).filter(|test| {
            let function = format!("fn {test}(");
            !sources.iter().any(|source| source.contains(&function))
        });
        assert_eq!(missing.collect::<Vec<_>>(), Vec::<&&str>::new(), "tests that are not there");
    }
}
