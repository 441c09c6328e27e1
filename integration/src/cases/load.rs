//! Reads case files. Reports all faults of all files at once, each with its file and, where there
//! is one, the name of its case.

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};

use serde_yaml::Value;

use super::Case;
use crate::error::{AttemptExt, CaseFaults, Result};

/// Directory of this repository's cases, at build time.
pub const DIRECTORY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/cases");

/// Fault of one case.
#[derive(Debug, thiserror::Error)]
enum CaseFault {
    #[error(transparent)]
    Yaml(#[from] serde_yaml::Error),
    #[error("a name has small letters, digits and hyphens only")]
    Name,
    #[error("the script is empty")]
    NoScript,
}

/// The cases of `paths` (files, or directories with everything below them), ordered by name; or all
/// faults, one per line.
pub fn load(paths: &[PathBuf]) -> Result<std::result::Result<Vec<Case>, CaseFaults>> {
    let mut files = Vec::new();
    for path in paths {
        collect(path, &mut files)?;
    }
    let (mut cases, mut faults) = (Vec::new(), Vec::new());
    for file in files {
        let text = fs::read_to_string(&file).attempt(|| format!("read {}", file.display()))?;
        read(&text, &file, &mut cases, &mut faults);
    }
    Ok(if faults.is_empty() { Ok(cases) } else { Err(CaseFaults(faults)) })
}

fn collect(path: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    if !path.is_dir() {
        files.push(path.to_owned());
        return Ok(());
    }
    let entries = fs::read_dir(path).and_then(Iterator::collect::<std::io::Result<Vec<_>>>);
    let mut below: Vec<_> = entries
        .attempt(|| format!("list {}", path.display()))?
        .iter()
        .map(fs::DirEntry::path)
        .collect();
    below.sort();
    below.retain(|p| p.is_dir() || p.extension().is_some_and(|e| e == "yaml"));
    below.iter().try_for_each(|path| collect(path, files))
}

fn read(text: &str, file: &Path, cases: &mut Vec<Case>, faults: &mut Vec<String>) {
    let values: Vec<Value> = match serde_yaml::from_str(text) {
        Ok(values) => values,
        Err(error) => return faults.push(format!("{}: {error}", file.display())),
    };
    let mut names = HashSet::new();
    for (number, value) in (1..).zip(values) {
        let named = value
            .get("name")
            .and_then(Value::as_str)
            .map_or_else(|| format!("case {number}"), str::to_owned);
        match serde_yaml::from_value::<Case>(value).map_err(CaseFault::from).and_then(check) {
            Ok(case) if names.insert(case.name.clone()) => {
                cases.push(Case { file: subject_of(file), ..case })
            }
            Ok(_) => faults.push(format!("{}: {named}: this name is there twice", file.display())),
            Err(error) => faults.push(format!("{}: {named}: {error}", file.display())),
        }
    }
}

fn check(case: Case) -> std::result::Result<Case, CaseFault> {
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    if case.name.is_empty() || !case.name.chars().all(plain) {
        return Err(CaseFault::Name);
    }
    if case.script.trim().is_empty() {
        return Err(CaseFault::NoScript);
    }
    Ok(case)
}

/// Path of the file below `cases`, without its extension.
fn subject_of(file: &Path) -> String {
    let path = file.canonicalize().unwrap_or_else(|_| file.to_owned());
    let below = Path::new(DIRECTORY).canonicalize().ok();
    let short = below
        .and_then(|d| path.strip_prefix(d).ok().map(Path::to_owned))
        .unwrap_or_else(|| file.to_owned());
    short.with_extension("").display().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn faults_of(text: &str) -> Vec<String> {
        let (mut cases, mut faults) = (Vec::new(), Vec::new());
        read(text, Path::new("x/y.yaml"), &mut cases, &mut faults);
        faults
    }

    #[test]
    fn all_faults_are_named_at_once() {
        let text = "- {name: a, script: 'true'}\n- {name: a, script: 'true'}\n- {name: B, script: 'true'}\n\
                    - {name: c, scirpt: 'true', script: 'true'}\n- {name: d, script: 'true', rule: none}\n- {script: 'true'}\n\
                    - {name: e, script: ' '}\n- {name: f, script: x, offloads: ['cat*0']}\n";
        let faults = faults_of(text);
        let expect = [
            "a: this name",
            "B: a name has",
            "c: unknown field `scirpt`",
            "d: there is no rule",
            "case 6: missing field `name`",
            "e: the script is empty",
            "f: \"cat*0\" is not",
        ];
        assert_eq!(faults.len(), expect.len(), "{faults:#?}");
        for (fault, expect) in faults.iter().zip(expect) {
            assert!(fault.starts_with("x/y.yaml: ") && fault.contains(expect), "{fault}");
        }
        assert_eq!(faults_of("{").len(), 1);
    }

    #[test]
    fn counts_are_read() {
        let (mut cases, mut faults) = (Vec::new(), Vec::new());
        read(
            "- {name: a, script: x, offloads: [cat*3, git log]}",
            Path::new("x/y.yaml"),
            &mut cases,
            &mut faults,
        );
        let wanted: Vec<_> =
            cases[0].offloads.iter().map(|w| (w.command.as_str(), w.count)).collect();
        assert_eq!(wanted, [("cat", 3), ("git log", 1)], "{faults:?}");
    }
}
