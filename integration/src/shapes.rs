//! Shapes of processes and pipes (`shapes.yaml`), which determine what a command might have to wait
//! for. They are run under bash and under posh, and posh's counts of waits are read.

use std::fs;
use std::path::Path;

use serde::Deserialize;

use crate::error::{AttemptExt, CaseFaults, LabError, Result};
use crate::host::{HOME, Host};
use crate::lab::Lab;
use crate::oracle::{RunOutcome, Script, Under};
use crate::volumes::{self, User};

/// File with this repository's shapes, at build time.
const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/shapes.yaml");
/// Directory with their files, on the first server's mount.
const DIRECTORY: &str = "shapes";

/// One shape.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Shape {
    /// A few words.
    pub name: String,
    /// For bash.
    pub script: String,
}

/// A gateway's counts of its stages' waits.
#[derive(Debug, Clone, PartialEq)]
pub struct WaitCounts {
    /// Number of waits that have reached each last limit, by name.
    pub backstops: Vec<(String, u64)>,
    /// Longest wait in milliseconds.
    pub longest_ms: f64,
}

/// All shapes.
///
/// # Errors
/// If their file can't be read.
pub fn load() -> Result<Vec<Shape>> {
    let text = fs::read_to_string(FILE).attempt(|| format!("read {FILE}"))?;
    let faults =
        |error: serde_yaml::Error| LabError::Cases(CaseFaults(vec![format!("{FILE}: {error}")]));
    serde_yaml::from_str(&text).map_err(faults)
}

/// Writes the shapes' files on the first server, and reads them through the mount once.
///
/// # Errors
/// If they can't be written.
pub fn furnish(lab: &Lab) -> Result<()> {
    let directory = lab.data(1).join(DIRECTORY);
    let lines = |numbers: std::ops::RangeInclusive<u32>| {
        numbers.map(|n| format!("{n}\n")).collect::<String>()
    };
    let files =
        [("a.txt", lines(1..=200)), ("b.txt", lines(100..=159)), ("abc", "c\na\nb\n".to_owned())];
    fs::create_dir_all(&directory).attempt(|| format!("make {}", directory.display()))?;
    for (name, text) in files {
        fs::write(directory.join(name), text).attempt(|| format!("write {name}"))?;
    }
    let mut look = lab.workstation.command("sh");
    look.args([
        "-c",
        "ls -l \"$0\"; cat \"$0\"/*",
        &format!("{}", lab.mount(1).join(DIRECTORY).display()),
    ]);
    lab.workstation.must(look).map(drop)
}

impl Shape {
    /// Runs it once; process ids in its messages are removed.
    ///
    /// # Errors
    /// If it hangs.
    pub fn run(&self, lab: &Lab, under: Under) -> Result<RunOutcome> {
        let own = Path::new(HOME).join("shape");
        let made = lab.workstation.path(&own);
        let _ = fs::remove_dir_all(&made);
        fs::create_dir(&made).attempt(|| format!("make {}", made.display()))?;
        let script = Script::new(&self.script).directory(lab.mount(1).join(DIRECTORY));
        let outcome = script.variable("T", own.to_string_lossy()).run(&lab.workstation, under)?;
        let stderr = outcome.stderr.into_iter().filter(|byte| !byte.is_ascii_digit()).collect();
        Ok(RunOutcome { stderr, ..outcome })
    }
}

impl WaitCounts {
    /// Reads the counts of a host's gateway.
    ///
    /// # Errors
    /// If it does not run, or its output is invalid.
    pub fn of(host: &Host) -> Result<WaitCounts> {
        let said = host.must(volumes::posh(host, User::Root, &["status", "--json"]))?;
        let status: Status = serde_json::from_slice(&said.stdout)
            .map_err(|error| LabError::Report(error.to_string()))?;
        Ok(WaitCounts {
            backstops: status.backstops.into_iter().collect(),
            longest_ms: status.longest_wait_ms,
        })
    }
}

#[derive(Deserialize)]
struct Status {
    backstops: std::collections::BTreeMap<String, u64>,
    longest_wait_ms: f64,
}
