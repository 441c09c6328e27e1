//! A run in the audit record: who, what and where before it is let go, and then how it ended, also
//! if it was refused. Never arguments, environment, or what went through: a command's words may
//! hold secrets, and so may the words of a refusal.

use std::{collections::BTreeSet, time::Instant};

use bytes::Bytes;
use posh_proto::executor::{ClientFile, RunSpec};
use serde::Serialize;

use super::End;
use crate::{audit::AuditLog, callers::Caller, error::Refusal};

/// Programs, directories and statuses in a record.
pub const RECORDED: usize = 16;
/// Bytes of a text that a gateway chose.
const RECORDED_BYTES: usize = 256;

/// A file of the workstation that a run sees; its content is nobody's business.
#[derive(Debug, Serialize)]
struct ShownFile {
    path: String,
    bytes: usize,
}

/// A run as it begins.
#[derive(Debug, Serialize)]
pub struct Begin<'a> {
    run_id: &'a str,
    identity: &'a str,
    user: &'a str,
    peer: &'a str,
    programs: &'a [String],
    exports: &'a [String],
    cwds: &'a [String],
    #[serde(skip_serializing_if = "<[ShownFile]>::is_empty")]
    client_files: &'a [ShownFile],
}

/// One run.
#[derive(Debug, Default, Serialize)]
pub struct Record {
    run_id: String,
    identity: String,
    /// Whose rights the commands had, empty for the executor's own.
    user: String,
    peer: String,
    programs: Vec<String>,
    exports: Vec<String>,
    cwds: Vec<String>,
    outcome: &'static str,
    /// Of a refused run, by the name that the contract has for it.
    #[serde(skip_serializing_if = "Option::is_none")]
    refusal: Option<&'static str>,
    statuses: Vec<String>,
    bytes_in: u64,
    bytes_out: u64,
    ms: u64,
    #[serde(skip)]
    client_files: Vec<ShownFile>,
    #[serde(skip)]
    began: Option<Instant>,
}

impl Record {
    /// Of a run that is asked for now.
    pub fn of(spec: &RunSpec, client_files: &[ClientFile], caller: &Caller, peer: &str) -> Self {
        let cwds: BTreeSet<&Bytes> = spec.stages.iter().map(|stage| &stage.cwd).collect();
        let exports: BTreeSet<&str> = spec.mounts.iter().map(|mount| mount.export.as_str()).collect();
        Self {
            run_id: short(&spec.run_id),
            identity: caller.name().to_owned(),
            user: caller.user.as_ref().map(|user| user.name.clone()).unwrap_or_default(),
            peer: peer.to_owned(),
            programs: spec.stages.iter().take(RECORDED).map(|stage| short(&stage.program)).collect(),
            exports: exports.into_iter().take(RECORDED).map(short).collect(),
            cwds: cwds.into_iter().take(RECORDED).map(|cwd| short(&String::from_utf8_lossy(cwd))).collect(),
            outcome: "",
            refusal: None,
            statuses: Vec::new(),
            bytes_in: 0,
            bytes_out: 0,
            ms: 0,
            client_files: client_files.iter().take(RECORDED).map(ShownFile::from).collect(),
            began: Some(Instant::now()),
        }
    }

    /// Records that it begins.
    ///
    /// # Errors
    /// That can't be written, so that it must not begin.
    pub async fn begin(&self, audit: &AuditLog) -> Result<(), Refusal> {
        let begin = Begin {
            run_id: &self.run_id,
            identity: &self.identity,
            user: &self.user,
            peer: &self.peer,
            programs: &self.programs,
            exports: &self.exports,
            cwds: &self.cwds,
            client_files: &self.client_files,
        };
        audit.begin("run_begin", &begin).await
    }

    /// With what became of it.
    pub fn ended(mut self, end: &End, statuses: Vec<String>, (bytes_in, bytes_out): (u64, u64)) -> Self {
        let ms = self.began.map_or(0, |began| began.elapsed().as_millis());
        self.outcome = end.word();
        self.refusal = match end {
            End::Rejected(refusal) => Some(refusal.kind.as_str_name()),
            _ => None,
        };
        Self { statuses, bytes_in, bytes_out, ms: u64::try_from(ms).unwrap_or(u64::MAX), ..self }
    }

    /// Puts it into the log, and into the file.
    pub async fn write(self, audit: &AuditLog) {
        tracing::info!(
            run_id = self.run_id,
            identity = self.identity,
            user = self.user,
            peer = self.peer,
            programs = self.programs.join(" "),
            exports = self.exports.join(" "),
            cwds = self.cwds.join(" "),
            outcome = self.outcome,
            refusal = self.refusal,
            statuses = self.statuses.join(" "),
            bytes_in = self.bytes_in,
            bytes_out = self.bytes_out,
            ms = self.ms,
            "run ended"
        );
        audit.note("run_end", &self).await;
    }
}

impl From<&ClientFile> for ShownFile {
    fn from(file: &ClientFile) -> Self {
        Self { path: short(&String::from_utf8_lossy(&file.path)), bytes: file.content.len() }
    }
}

fn short(text: &str) -> String {
    let mut end = text.len().min(RECORDED_BYTES);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text[..end].to_owned()
}
