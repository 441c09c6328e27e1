//! `cargo xtask tidy`: habits of this repository that neither rustfmt nor clippy checks.
//!
//! Each check counts its findings. `xtask/tidy.toml` has the most that each may have; a count that
//! has become smaller is a reason to lower it there.

mod modules;
mod prose;
mod sources;
mod syntax;

use std::{collections::BTreeMap, fmt, fs, path::Path};

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use sources::Source;

/// Findings that are shown of a check that has too many.
const SHOWN: usize = 20;

/// Limits by the name of the check.
#[derive(Debug, Deserialize)]
struct Limits {
    limits: BTreeMap<String, usize>,
}

/// A check's findings.
#[derive(Debug)]
struct Check {
    name: &'static str,
    rule: &'static str,
    findings: Vec<Finding>,
}

/// A place that breaks a rule.
#[derive(Debug, PartialEq, Eq)]
struct Finding {
    file: String,
    /// From 1; 0 for the file as a whole.
    line: usize,
    what: String,
}

impl Finding {
    fn new(file: &str, line: usize, what: impl Into<String>) -> Self {
        Self { file: file.to_owned(), line, what: what.into() }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.file, self.line, self.what)
    }
}

/// Checks the repository whose root this is, and prints the counts.
///
/// With `all`, every finding is printed.
///
/// # Errors
/// A check has more findings than its limit, a limit belongs to no check, or a file cannot be read
/// or parsed.
pub fn run(root: &Path, all: bool) -> Result<()> {
    let sources = sources::all(root)?;
    let checks = checks(root, &sources)?;
    let mut limits = limits(root)?;
    let mut exceeded = 0;
    for check in &checks {
        let limit = limits.remove(check.name).unwrap_or_default();
        let count = check.findings.len();
        println!("{:<22} {count:>5} of {limit:>5}  {}", check.name, check.rule);
        let shown = if all || count > limit { check.findings.len() } else { 0 };
        let most = if all { shown } else { shown.min(SHOWN) };
        check.findings.iter().take(most).for_each(|finding| println!("  {finding}"));
        if most < shown {
            println!("  and {} more: cargo xtask tidy --all", shown - most);
        }
        exceeded += usize::from(count > limit);
    }
    println!(
        "{} lines of Rust outside tests",
        sources.iter().map(Source::own_lines).sum::<usize>()
    );
    ensure!(limits.is_empty(), "xtask/tidy.toml limits no check of this name: {:?}", limits.keys());
    ensure!(exceeded == 0, "{exceeded} checks have more findings than xtask/tidy.toml allows");
    Ok(())
}

fn checks(root: &Path, sources: &[Source]) -> Result<Vec<Check>> {
    let mut checks = vec![
        prose::wide_lines(root, sources)?,
        prose::openings(sources),
        prose::long_documents(root)?,
        sources::long_files(sources),
        modules::circles(sources),
    ];
    checks.extend(syntax::checks(sources)?);
    Ok(checks)
}

fn limits(root: &Path) -> Result<BTreeMap<String, usize>> {
    let file = root.join("xtask/tidy.toml");
    let text =
        fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
    let limits: Limits =
        toml::from_str(&text).with_context(|| format!("cannot parse {}", file.display()))?;
    Ok(limits.limits)
}
