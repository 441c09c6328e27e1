//! Prints the results of many cases: each failure in full, then the numbers.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Duration;

use super::Case;
use super::run::CaseVerdict;

/// A failed case: its script, the differences of the two runs (shell / posh), and the placements.
pub fn failure(case: &Case, verdict: &CaseVerdict) -> String {
    let mut text = format!("FAILED {}", case.title());
    if !case.why.is_empty() {
        let _ = write!(text, " ({})", case.why.trim());
    }
    text += "\n";
    for line in case.script.trim_end().lines() {
        let _ = writeln!(text, "  | {line}");
    }
    for fault in &verdict.faults {
        let _ = writeln!(text, "  {}", fault.replace('\n', "\n  "));
    }
    text + &verdict.placements
}

/// Numbers of all cases, of each subject, and the total time.
pub fn numbers(cases: &[Case], verdicts: &[CaseVerdict], wall: Duration) -> String {
    let mut subjects: BTreeMap<&str, [usize; 3]> = BTreeMap::new();
    for verdict in verdicts {
        let counts = subjects.entry(cases[verdict.number].subject()).or_default();
        counts[0] += 1;
        counts[1] += usize::from(verdict.offloaded);
        counts[2] += usize::from(!verdict.faults.is_empty());
    }
    let mut text = String::new();
    for (subject, [all, offloading, failed]) in &subjects {
        let _ = writeln!(
            text,
            "{subject:20} {all:5} cases, {offloading:5} offloading, {failed:4} failed"
        );
    }
    let sum = |index: usize| subjects.values().map(|counts| counts[index]).sum::<usize>();
    let missed = verdicts.iter().filter(|v| v.missed > 0).count();
    let by_mount = verdicts.iter().filter(|v| !v.by_mount.is_empty()).count();
    let _ = writeln!(
        text,
        "{:20} {:5} cases, {:5} offloading, {:4} failed; {by_mount} where the mount itself differs \
         from a local copy; \
         {missed} placed only when tried again; {:.1} s",
        "all",
        sum(0),
        sum(1),
        sum(2),
        wall.as_secs_f64()
    );
    text
}

/// The cases that took longest.
pub fn slowest(cases: &[Case], verdicts: &[CaseVerdict]) -> String {
    const SHOWN: usize = 10;
    let mut sorted: Vec<_> = verdicts.iter().collect();
    sorted.sort_by_key(|verdict| std::cmp::Reverse(verdict.wall));
    let line =
        |v: &&CaseVerdict| format!("{:8.2} s {}\n", v.wall.as_secs_f64(), cases[v.number].title());
    sorted.iter().take(SHOWN).map(line).collect()
}
