//! Results of a benchmark: printed as a table, stored as JSON. Targets are shown beside the
//! figures, without a verdict.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use serde::Serialize;

use crate::machine::{Machine, load};
use crate::sample::{Samples, Summary};

/// Target of a figure.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FigureTarget {
    /// Not more than this.
    AtMost(f64),
    /// Not less than this.
    AtLeast(f64),
    /// For comparison only.
    None,
}

/// One figure.
#[derive(Debug, Serialize)]
pub struct Measurement {
    /// Description.
    pub what: String,
    /// Unit of all its numbers.
    pub unit: &'static str,
    /// See [`FigureTarget`].
    pub target: FigureTarget,
    /// Statistics of the samples.
    pub summary: Summary,
    /// Number of samples.
    pub count: usize,
    /// The samples themselves.
    pub samples: Samples,
}

/// All of a benchmark.
#[derive(Debug, Serialize)]
pub struct BenchReport {
    /// Its name.
    pub benchmark: &'static str,
    /// Method of the measurement.
    pub method: &'static str,
    /// Machine and time.
    pub machine: Machine,
    /// The load average of the last minute after it.
    pub load_after: f64,
    /// In order.
    pub measurements: Vec<Measurement>,
}

impl BenchReport {
    /// An empty report.
    pub fn new(benchmark: &'static str, method: &'static str) -> BenchReport {
        BenchReport {
            benchmark,
            method,
            machine: Machine::describe(),
            load_after: 0.0,
            measurements: Vec::new(),
        }
    }

    /// Adds a figure, and prints it at once.
    pub fn add(
        &mut self,
        what: impl Into<String>,
        unit: &'static str,
        target: FigureTarget,
        samples: Samples,
    ) {
        let (summary, count) = (samples.summary(), samples.count());
        let measurement = Measurement { what: what.into(), unit, target, summary, count, samples };
        eprintln!("  {}: {:.2} {unit}", measurement.what, summary.median);
        self.measurements.push(measurement);
    }

    /// Prints the table and writes the file.
    pub fn finish(mut self, file: &Path) -> Result<()> {
        self.load_after = load();
        self.print();
        if let Some(directory) = file.parent() {
            fs::create_dir_all(directory)
                .with_context(|| format!("cannot make {}", directory.display()))?;
        }
        let text =
            serde_json::to_string_pretty(&self).context("cannot write the results as JSON")?;
        fs::write(file, text + "\n").with_context(|| format!("cannot write {}", file.display()))?;
        println!("\nwritten to {}", file.display());
        Ok(())
    }

    fn print(&self) {
        let m = &self.machine;
        println!("\n{}, {} cores, {} MiB, Linux {}", m.processor, m.cores, m.memory_mib, m.kernel);
        let modified = if m.modified { " with changes" } else { "" };
        println!(
            "{}, commit {:.12}{modified}, load {:.1} before and {:.1} after\n",
            m.date, m.commit, m.load_before, self.load_after
        );
        let rows: Vec<[String; 5]> = self.measurements.iter().map(Measurement::row).collect();
        let width = rows.iter().map(|r| r[0].chars().count()).max().unwrap_or(0);
        println!("{:width$}  {:>9}  {:>9}  {:>19}  unit", "", "target", "median", "quartiles");
        for [what, target, median, quartiles, unit] in rows {
            println!("{what:width$}  {target:>9}  {median:>9}  {quartiles:>19}  {unit}");
        }
    }
}

impl Measurement {
    fn row(&self) -> [String; 5] {
        let target = match self.target {
            FigureTarget::AtMost(bound) => format!("<= {bound}"),
            FigureTarget::AtLeast(bound) => format!(">= {bound}"),
            FigureTarget::None => String::new(),
        };
        let number = |value: f64| {
            if value.abs() < 100.0 { format!("{value:.2}") } else { format!("{value:.0}") }
        };
        let s = &self.summary;
        let quartiles = match self.count {
            1 => String::new(),
            _ => format!("{} … {}", number(s.lower_quartile), number(s.upper_quartile)),
        };
        [self.what.clone(), target, number(s.median), quartiles, self.unit.to_owned()]
    }
}
