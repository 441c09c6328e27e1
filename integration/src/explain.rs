//! Reads `posh --explain=json`: placements and their reasons.

use serde::Deserialize;

use crate::error::{LabError, Result};

/// posh's message when there is nothing to report.
const NOTHING_RAN: &[u8] = b"posh: nothing to explain: no command that posh knows was run\n";

/// Placement on the workstation.
pub const LOCAL: &str = "local";

/// All pipelines of one session, in order.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(transparent)]
pub struct ExplainReport {
    /// One entry per pipeline.
    pub pipelines: Vec<ExplainedPipeline>,
}

/// One pipeline.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct ExplainedPipeline {
    /// Its commands, in order.
    pub stages: Vec<ExplainedStage>,
    /// Bytes that posh moved over the network for it.
    pub bytes: u64,
    /// From its completion to the directives of its commands.
    #[serde(default)]
    pub setup_ms: f64,
    /// From its first command's start to its last one's end.
    pub wall_ms: f64,
}

/// One command.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct ExplainedStage {
    /// Its annotation's name.
    pub command: String,
    /// Its arguments; bytes that are not UTF-8 are replaced.
    pub argv: Vec<String>,
    /// An executor's name, or `local`; several, joined by commas, when it was split.
    pub placement: String,
    /// Reason of the placement.
    pub reason: String,
}

impl ExplainReport {
    /// Splits the report off the end of a session's stderr; the rest is the commands' own, which
    /// need not end with a newline.
    pub fn take(stderr: &[u8]) -> Result<(Vec<u8>, ExplainReport)> {
        if let Some(rest) = stderr.strip_suffix(NOTHING_RAN) {
            return Ok((rest.to_vec(), ExplainReport { pipelines: Vec::new() }));
        }
        let starts = stderr.iter().enumerate().filter(|&(_, &b)| b == b'[');
        let mut why = "there is no `[`".to_owned();
        for (start, _) in starts {
            match serde_json::from_slice(&stderr[start..]) {
                Ok(report) => return Ok((stderr[..start].to_vec(), report)),
                Err(e) => why = e.to_string(),
            }
        }
        Err(LabError::Report(format!("{why} in {:?}", String::from_utf8_lossy(stderr))))
    }

    /// Every stage with this command, of all pipelines.
    pub fn stages<'a>(&'a self, command: &'a str) -> impl Iterator<Item = &'a ExplainedStage> {
        self.pipelines.iter().flat_map(|p| &p.stages).filter(move |s| s.command == command)
    }
}

impl ExplainedStage {
    /// Returns true if it did not run on the workstation.
    pub fn is_offloaded(&self) -> bool {
        self.placement != LOCAL
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_report_is_taken_off_the_end() {
        let report = r#"[{"stages":[{"command":"grep","argv":["grep","x"],"placement":"store1","reason":"r"}],"bytes":7,"wall_ms":1.5}]"#;
        let stderr = format!("[not this\ngrep: f: no\n{report}\n");
        let (rest, report) = ExplainReport::take(stderr.as_bytes()).unwrap();
        assert_eq!(rest, b"[not this\ngrep: f: no\n");
        assert!(
            report.stages("grep").all(ExplainedStage::is_offloaded)
                && report.stages("grep").count() == 1
        );
        assert!(ExplainReport::take(b"no report").is_err());
        let (rest, empty) = ExplainReport::take(&[b"no end", NOTHING_RAN].concat()).unwrap();
        assert!(rest == b"no end" && empty.pipelines.is_empty());
    }
}
