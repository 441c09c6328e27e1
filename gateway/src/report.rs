//! Placement, reason and cost of each stage: kept per session for `posh --explain`.

use std::{
    collections::VecDeque,
    sync::{Mutex, MutexGuard, PoisonError},
};

use posh_proto::untrusted::{escaped, escaped_json};
use serde::Serialize;

/// Limit on remembered pipelines per session; the oldest are dropped first.
const REMEMBERED: usize = 4096;

/// One pipeline's report.
#[derive(Debug, Clone, Serialize)]
pub struct PipelineReport {
    /// Counts from 1 within the gateway's life.
    pub pipeline: u64,
    /// In the order of the pipeline.
    pub stages: Vec<StageReport>,
    /// Bytes of results and inputs over executors' connections.
    pub bytes: u64,
    /// From the first stage's enlistment to the directives, in milliseconds.
    pub setup_ms: f64,
    /// From the first stage's enlistment to the last stage's end; 0 while it runs, or when all ran
    /// here.
    pub wall_ms: f64,
}

/// One stage's report.
#[derive(Debug, Clone, Serialize)]
pub struct StageReport {
    /// The annotated command's name, or argv's.
    pub command: String,
    /// Its words (invalid UTF-8 replaced).
    pub argv: Vec<String>,
    /// `local`, an executor's name, or several joined by `+`.
    pub placement: String,
    /// Reason, as a sentence.
    pub reason: String,
    /// Exit status as the shell sees it, if it ran remotely.
    pub status: Option<u32>,
}

/// A session's reports.
#[derive(Debug)]
pub struct Reports {
    kept: Mutex<VecDeque<PipelineReport>>,
    running: tokio::sync::watch::Sender<usize>,
}

impl Default for Reports {
    fn default() -> Self {
        Self { kept: Mutex::default(), running: tokio::sync::watch::Sender::new(0) }
    }
}

impl Reports {
    /// Notes the start of a pipeline; its report comes later.
    pub fn begin(&self) {
        self.running.send_modify(|n| *n += 1);
    }

    /// Notes the end of a pipeline.
    pub fn end(&self, report: Option<PipelineReport>) {
        let mut kept = self.lock();
        if kept.len() == REMEMBERED {
            kept.pop_front();
        }
        kept.extend(report);
        drop(kept);
        self.running.send_modify(|n| *n -= 1);
    }

    /// All reports, by pipeline number, once no pipeline is running.
    pub async fn settled(&self) -> Vec<PipelineReport> {
        let _ = self.running.subscribe().wait_for(|n| *n == 0).await;
        let mut reports: Vec<_> = self.lock().iter().cloned().collect();
        reports.sort_by_key(|r| r.pipeline);
        reports
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<PipelineReport>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Reports as `posh --explain=json` prints them.
///
/// # Panics
/// Never: the types have no maps with odd keys.
#[must_use]
pub fn to_json(reports: &[PipelineReport]) -> String {
    escaped_json(&serde_json::to_string_pretty(reports).expect("reports are plain data"))
        .into_owned()
}

/// Reports as `posh --explain` prints them.
#[must_use]
pub fn to_text(reports: &[PipelineReport]) -> String {
    reports.iter().map(pipeline_text).collect()
}

fn pipeline_text(report: &PipelineReport) -> String {
    // Pipelines are numbered from 1; 0 was only planned.
    let mut text = if report.pipeline == 0 {
        "plan".to_owned()
    } else {
        format!("pipeline {}", report.pipeline)
    };
    if report.wall_ms > 0.0 {
        text += &format!(
            ": {:.1} ms, {} over the network, set up in {:.1} ms",
            report.wall_ms,
            size(report.bytes),
            report.setup_ms
        );
    }
    text.push('\n');
    let width = report.stages.iter().map(|s| s.placement.len()).max().unwrap_or(0);
    for stage in &report.stages {
        text += &format!(
            "  {:width$}  {}\n  {:width$}    {}\n",
            stage.placement,
            words(&stage.argv),
            "",
            escaped(&stage.reason)
        );
    }
    text
}

/// Arguments of a command, truncated if many or long.
fn words(argv: &[String]) -> String {
    const SHOWN: usize = 12;
    const LONG: usize = 60;
    let short = |word: &String| -> String {
        if word.chars().count() > LONG {
            word.chars().take(LONG).chain(['…']).collect()
        } else {
            word.clone()
        }
    };
    let mut line = argv.iter().take(SHOWN).map(short).collect::<Vec<_>>().join(" ");
    if argv.len() > SHOWN {
        line += &format!(" … ({} more)", argv.len() - SHOWN);
    }
    escaped(&line).into_owned()
}

/// Formats a number of bytes for people.
#[must_use]
pub fn size(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KB", "MB", "GB", "TB"];
    #[expect(clippy::cast_precision_loss, reason = "three digits are shown")]
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1000.0 && unit + 1 < UNITS.len() {
        value /= 1000.0;
        unit += 1;
    }
    if unit == 0 { format!("{bytes} B") } else { format!("{value:.1} {}", UNITS[unit]) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_read_well() {
        assert_eq!(
            [size(0), size(999), size(1000), size(1_250_000)],
            ["0 B", "999 B", "1.0 KB", "1.2 MB"]
        );
    }
}
