//! The Rust files of the repository.

use std::{fs, path::Path, process::Command};

use anyhow::{Context, Result, ensure};

use super::{Check, Finding};

/// Lines of a file, without its tests.
const LONGEST: usize = 500;

/// A Rust file.
#[derive(Debug)]
pub struct Source {
    /// From the root of the repository.
    pub path: String,
    pub text: String,
    /// The file holds tests only.
    pub is_test: bool,
}

impl Source {
    /// Lines before the first `#[cfg(test)]` that begins a line; 0 for a file of tests.
    pub fn own_lines(&self) -> usize {
        if self.is_test { 0 } else { self.own_text().lines().count() }
    }

    /// The text without the tests at its end.
    pub fn own_text(&self) -> &str {
        if self.is_test {
            return "";
        }
        let module = ["mod ", "pub(crate) mod "];
        let mut marks = self.text.match_indices("\n#[cfg(test)]\n");
        let end = marks.find(|(place, mark)| {
            module.iter().any(|word| self.text[place + mark.len()..].starts_with(word))
        });
        end.map_or(&self.text[..], |(place, _)| &self.text[..=place])
    }
}

/// All files that git tracks or would track.
pub fn all(root: &Path) -> Result<Vec<Source>> {
    let read = |path: String| {
        let text = fs::read_to_string(root.join(&path));
        let text = text.with_context(|| format!("cannot read {path}"))?;
        Ok(Source { is_test: is_test(&path), path, text })
    };
    listed(root, "*.rs")?.into_iter().map(read).collect()
}

/// Files of the repository that match, and exist.
pub fn listed(root: &Path, pattern: &str) -> Result<Vec<String>> {
    let words = ["ls-files", "-z", "--cached", "--others", "--exclude-standard", pattern];
    let output = Command::new("git").arg("-C").arg(root).args(words).output();
    let output = output.context("cannot start git")?;
    ensure!(output.status.success(), "git ls-files: {}", String::from_utf8_lossy(&output.stderr));
    let names = String::from_utf8(output.stdout).context("names of files")?;
    let there = names.split_terminator('\0').filter(|name| root.join(name).exists());
    Ok(there.map(str::to_owned).collect())
}

/// `tests/` beside a package's `src/`, a module named `tests`, or a crate that only tests.
fn is_test(path: &str) -> bool {
    let (directories, file) = path.rsplit_once('/').unwrap_or(("", path));
    let in_tests = directories.split('/').any(|part| part == "tests" || part == "fuzz");
    in_tests || file == "tests.rs" || file.ends_with("_tests.rs")
}

pub fn long_files(sources: &[Source]) -> Check {
    let long = sources.iter().filter(|source| source.own_lines() > LONGEST);
    let finding =
        |source: &Source| Finding::new(&source.path, 0, format!("{} lines", source.own_lines()));
    Check {
        name: "long-files",
        rule: "a file has at most 500 lines without its tests",
        findings: long.map(finding).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tests_are_told_from_the_rest() {
        assert!(is_test("executor/tests/executor/main.rs"));
        assert!(is_test("volume/src/leases_tests.rs"));
        assert!(is_test("trusted-path/src/tests.rs"));
        assert!(!is_test("integration/src/lab.rs"));
        let text = "fn one() {}\n\n#[cfg(test)]\nmod tests {\n}\n".to_owned();
        let source = Source { path: "a.rs".to_owned(), text, is_test: false };
        assert_eq!((source.own_lines(), source.own_text()), (2, "fn one() {}\n\n"));
    }
}
