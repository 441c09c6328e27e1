//! Compares two runs of a case: both outputs, the status, the statuses of the last pipeline, the
//! directory and the home afterwards; and checks where commands had to run. The names of the runs'
//! directories count as equal.

use std::path::Path;

use super::site::ScriptRun;
use super::{Case, WantedCommand};
use crate::explain::ExplainReport;
use crate::oracle::replace;
use crate::tree::{Tree, differences, renamed};
use crate::volumes::Mounts;

/// Placeholder for the name of a run's directory, of equal length.
const NAME: &str = "run-RUNRUN";

/// Differences of two runs of a case, one entry each; empty if a user could not tell them apart.
pub fn differing(case: &Case, one: &ScriptRun, other: &ScriptRun) -> Vec<String> {
    let mut found = Vec::new();
    let (left, right) = (&one.outcome, &other.outcome);
    if left.status != right.status {
        found.push(format!("status: {} / {}", left.status, right.status));
    }
    if one.statuses != other.statuses {
        found.push(format!("$? and PIPESTATUS: {:?} / {:?}", one.statuses, other.statuses));
    }
    found.extend(output("stdout", |run| &run.outcome.stdout, one, other, case.unordered));
    found.extend(output("stderr", |run| &run.outcome.stderr, one, other, false));
    found.extend(files("", |run| &run.left, one, other));
    found.extend(files("~/", |run| &run.home, one, other));
    found.extend(case.times.iter().filter_map(|path| time(path, one, other)));
    found
}

fn output(
    name: &str,
    stream: fn(&ScriptRun) -> &[u8],
    one: &ScriptRun,
    other: &ScriptRun,
    unordered: bool,
) -> Option<String> {
    let (left, right) = (stream(one), stream(other));
    // Most are equal as they are, and some have megabytes.
    if left == right {
        return None;
    }
    let neutral =
        |bytes: &[u8], run: &ScriptRun| replace(bytes, run.name.as_bytes(), NAME.as_bytes());
    let (left, right) = (neutral(left, one), neutral(right, other));
    let equal = if unordered { sorted(&left) == sorted(&right) } else { left == right };
    (!equal).then(|| {
        format!(
            "{name}: {}\n{:width$}/ {}",
            excerpt(&left, &right),
            "",
            excerpt(&right, &left),
            width = name.len()
        )
    })
}

fn sorted(bytes: &[u8]) -> Vec<&[u8]> {
    let mut lines: Vec<_> = bytes.split_inclusive(|b| *b == b'\n').collect();
    lines.sort_unstable();
    lines
}

/// Part of a text around its first difference from another.
fn excerpt(bytes: &[u8], other: &[u8]) -> String {
    const BEFORE: usize = 80;
    const SHOWN: usize = 400;
    let differs = bytes.iter().zip(other).take_while(|(a, b)| a == b).count();
    let from = differs.saturating_sub(BEFORE);
    let shown = &bytes[from..bytes.len().min(from + SHOWN)];
    let place = if from > 0 { format!(" from {from}") } else { String::new() };
    format!("{} bytes{place} {:?}", bytes.len(), String::from_utf8_lossy(shown))
}

fn files(
    prefix: &str,
    tree: fn(&ScriptRun) -> &Tree,
    one: &ScriptRun,
    other: &ScriptRun,
) -> Vec<String> {
    let (left, right) = (tree(one), tree(other));
    if left == right {
        return Vec::new();
    }
    // Only differing entries are compared in detail: a case has megabytes of files.
    let pick = |tree: &Tree, than: &Tree, run: &ScriptRun| {
        let differing = tree.iter().filter(|(path, entry)| than.get(*path) != Some(*entry));
        renamed(
            differing.map(|(path, entry)| (path.clone(), entry.clone())).collect(),
            &run.name,
            NAME,
        )
    };
    let found = differences(&pick(left, right, one), &pick(right, left, other));
    found.into_iter().map(|difference| format!("file {prefix}{difference}")).collect()
}

fn time(path: &Path, one: &ScriptRun, other: &ScriptRun) -> Option<String> {
    let of = |run: &ScriptRun| run.left.get(path).map(|entry| entry.modified_s);
    let (left, right) = (of(one), of(other));
    (left != right || left.is_none())
        .then(|| format!("time of {}: {left:?} / {right:?}", path.display()))
}

/// Commands that did not run where the case requires it.
pub fn misplaced(case: &Case, report: &ExplainReport, mounts: Mounts) -> Vec<String> {
    let (mut there, mut here): (Vec<_>, Vec<_>) =
        (case.offloads.iter().collect(), case.local.iter().collect());
    match mounts {
        Mounts::Sshfs => here.extend(&case.by_sshfs),
        Mounts::Volume => there.extend(&case.by_sshfs),
        // With cached data any command may run locally.
        Mounts::AtHand => there.clear(),
    }
    let there = there.into_iter().filter(|w| count(report, w, true) < w.count);
    let here = here.into_iter().filter(|w| count(report, w, false) < w.count);
    let there: Vec<_> = there.map(|w| format!("not offloaded: {w}")).collect();
    there.into_iter().chain(here.map(|w| format!("did not run here: {w}"))).collect()
}

fn count(report: &ExplainReport, wanted: &WantedCommand, offloaded: bool) -> usize {
    report.stages(&wanted.command).filter(|stage| stage.is_offloaded() == offloaded).count()
}

/// Placement of each stage and its reason, one line each.
pub fn placements(report: &ExplainReport) -> String {
    let mut text = String::new();
    for (number, pipeline) in (1..).zip(&report.pipelines) {
        for stage in &pipeline.stages {
            let words: String = stage.argv.join(" ").chars().take(100).collect();
            text += &format!("    {number} {}: {words:?} ({})\n", stage.placement, stage.reason);
        }
    }
    text
}

/// Returns true if some stage ran on a server.
pub fn offloaded(report: &ExplainReport) -> bool {
    report
        .pipelines
        .iter()
        .flat_map(|p| &p.stages)
        .any(crate::explain::ExplainedStage::is_offloaded)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::oracle::RunOutcome;
    use std::os::unix::process::ExitStatusExt;
    use std::process::ExitStatus;
    use std::time::Duration;

    fn run(name: &str, stdout: &str) -> ScriptRun {
        let status = ExitStatus::from_raw(0);
        let outcome = RunOutcome {
            stdout: stdout.into(),
            stderr: Vec::new(),
            status,
            report: None,
            wall: Duration::ZERO,
        };
        ScriptRun {
            outcome,
            statuses: "0 0".into(),
            left: Tree::new(),
            home: Tree::new(),
            name: name.into(),
        }
    }

    fn case(unordered: bool) -> Case {
        let text = format!("{{name: a, script: x, unordered: {unordered}}}");
        serde_yaml::from_str(&text).unwrap()
    }

    #[test]
    fn names_of_runs_do_not_count_and_order_only_where_there_is_one() {
        let (one, other) =
            (run("run-000001", "run-000001/f\nb\n"), run("run-000002", "b\nrun-000002/f\n"));
        assert_eq!(differing(&case(true), &one, &other), Vec::<String>::new());
        assert_eq!(differing(&case(false), &one, &other).len(), 1);
        let less = run("run-000003", "b\n");
        assert!(
            differing(&case(true), &one, &less)[0].starts_with("stdout: 15 bytes"),
            "{:?}",
            differing(&case(true), &one, &less)
        );
    }
}
