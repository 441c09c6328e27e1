//! A laboratory with one server in which a script is tried three times, each time in
//! a fresh directory of its own on the mount: under its shell, under posh, and under
//! posh with a report. What differs comes back as text, so that a table of cases
//! shows all its faults at once.

use std::path::Path;

use posh_integration::explain::ExplainReport;
use posh_integration::oracle::Under;
use posh_integration::tree;
use posh_integration::{Lab, LabSpec, RunOutcome, Script};

use crate::programs;

/// Puts a case's files into a directory, which is on the server.
pub type Fill = fn(&Path) -> std::io::Result<()>;

pub struct Arena {
    pub lab: Lab,
    fill: Fill,
}

/// The three directories: names of one length, so that nothing depends on it.
const RUNS: [(Under, &str); 3] =
    [(Under::Shell, "run-alone"), (Under::Posh, "run-plain"), (Under::PoshExplained, "run-shown")];

impl Arena {
    pub fn new(fill: Fill) -> Arena {
        let lab = Lab::start(&LabSpec::servers(1), &programs()).unwrap();
        Arena { lab, fill }
    }

    /// Tries one script, whose variable `D` is its directory on the mount; the report, or how posh
    /// differed.
    pub fn attempt(&self, name: &str, script: &Script) -> Result<ExplainReport, String> {
        let mut outcomes = Vec::new();
        for (under, run) in RUNS {
            let below = Path::new(name).join(run);
            let data = self.lab.data(1).join(&below);
            std::fs::create_dir_all(&data).unwrap();
            (self.fill)(&data).unwrap();
            let mount = self.lab.mount(1).join(&below);
            let script = script.clone().variable("D", mount.to_str().unwrap());
            let outcome = script
                .run(&self.lab.workstation, under)
                .map_err(|e| format!("{name}: {under:?}: {e}"))?;
            let left = tree::renamed(tree::snapshot(&data, &[]).unwrap(), run, "RUN");
            outcomes.push((outcome.with(run, "RUN"), left));
        }
        let [(alone, left), posh @ ..] = outcomes.as_slice() else { unreachable!("three runs") };
        for ((outcome, found), (under, _)) in posh.iter().zip(&RUNS[1..]) {
            let files = tree::differences(left, found);
            if outcome != alone || !files.is_empty() {
                return Err(difference(name, *under, script, (alone, outcome), &files));
            }
        }
        Ok(outcomes[2].0.report().clone())
    }
}

fn difference(
    name: &str,
    under: Under,
    script: &Script,
    runs: (&RunOutcome, &RunOutcome),
    files: &[String],
) -> String {
    let shell = script.shell.name();
    let (alone, posh) = runs;
    let mut text = format!("{name}: {under:?} differs from {shell} in\n  {}\n", script.text);
    if alone != posh {
        text += &format!("--- {shell}: {alone}\n--- posh: {posh}\n");
    }
    files.iter().for_each(|f| text += &format!("--- file {f}\n"));
    text
}

/// The commands of which not every one ran on the server.
pub fn kept_here(report: &ExplainReport, commands: &[&str]) -> Option<String> {
    let mut wrong = Vec::new();
    for command in commands {
        let stages: Vec<_> = report.stages(command).collect();
        if stages.is_empty() || stages.iter().any(|s| !s.is_offloaded()) {
            wrong.push(format!("{command} {stages:?}"));
        }
    }
    (!wrong.is_empty()).then(|| format!("not offloaded: {}", wrong.join(", ")))
}

/// Panics with everything that went wrong in a table of cases.
pub fn assert_none(faults: &[String], of: usize) {
    assert!(faults.is_empty(), "{} of {of} cases failed:\n\n{}", faults.len(), faults.join("\n"));
}
