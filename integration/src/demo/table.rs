//! Prints the demonstration's results.

use std::collections::BTreeMap;

use super::{Comparison, Cost};
use crate::explain::ExplainReport;

/// Prints the placements of one application, equal stages counted together, then the differences.
pub fn print_details(comparison: &Comparison) {
    let Comparison { workload, bash, posh, report, differences } = comparison;
    println!("\n{}: bash {}, posh {}", workload.name(), cost(bash), cost(posh));
    print!("{}", placement(report));
    if differences.is_empty() {
        println!("outputs, errors, statuses and files are the same");
    }
    differences.iter().for_each(|d| println!("DIFFERENT: {d}"));
}

/// posh's own explanation of one pipeline.
pub fn print_explain(text: &str) {
    println!("\n== how posh explains one pipeline ==\n\n{text}");
}

/// One line per application.
pub fn print_summary(comparisons: &[Comparison]) {
    println!(
        "\n{:<12} {:>10} {:>10} {:>12} {:>12} {:>9}  same",
        "application", "bash", "posh", "bash", "posh", "bytes"
    );
    for Comparison { workload, bash, posh, differences, .. } in comparisons {
        let share = bash.bytes.zip(posh.bytes).filter(|(b, _)| *b > 0);
        #[expect(clippy::cast_precision_loss, reason = "a share with two digits is shown")]
        let share =
            share.map_or("-".into(), |(b, p)| format!("{:.2} %", 100.0 * p as f64 / b as f64));
        let (name, same) = (workload.name(), if differences.is_empty() { "yes" } else { "NO" });
        let (before, after) = (bytes(bash), bytes(posh));
        let (slow, fast) = (bash.seconds, posh.seconds);
        println!(
            "{name:<12} {slow:>8.2} s {fast:>8.2} s {before:>12} {after:>12} {share:>9}  {same}"
        );
    }
}

/// Indents a text by two columns.
pub fn indent(text: &str) -> String {
    text.lines().map(|l| format!("  {l}\n")).collect()
}

fn placement(report: &ExplainReport) -> String {
    let mut counts: BTreeMap<(&str, &str, &str), usize> = BTreeMap::new();
    for stage in report.pipelines.iter().flat_map(|p| &p.stages) {
        *counts.entry((&stage.placement, &stage.command, &stage.reason)).or_default() += 1;
    }
    let line = |((place, command, reason), count)| {
        format!("  {count:>4} x {command:<12} {place:<10} {reason}\n")
    };
    counts.into_iter().map(line).collect()
}

fn cost(cost: &Cost) -> String {
    format!("{:.2} s and {}", cost.seconds, bytes(cost))
}

/// Formats bytes with powers of 1000 and one decimal.
fn bytes(cost: &Cost) -> String {
    let Some(bytes) = cost.bytes else { return "-".into() };
    #[expect(clippy::cast_precision_loss, reason = "one decimal is shown")]
    let value = bytes as f64;
    match bytes {
        0..1_000 => format!("{bytes} B"),
        1_000..1_000_000 => format!("{:.1} kB", value / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} MB", value / 1e6),
        _ => format!("{:.2} GB", value / 1e9),
    }
}
