//! The audit record: one line for every run, also for one that was refused. It says who,
//! what, where and how it ended. Never arguments, environment, or what went through: a
//! command's words may hold secrets, and so may the words of a refusal.

use std::{
    collections::BTreeSet,
    fs::{File, OpenOptions},
    io::{self, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
    time::{Instant, SystemTime},
};

use bytes::Bytes;
use posh_proto::executor::RunSpec;
use serde::Serialize;

use super::End;
use crate::{
    callers::Caller,
    error::{Attempt as _, Error},
};

/// Programs, directories and statuses in a record.
pub const RECORDED: usize = 16;
/// Bytes of a text that a gateway chose.
const RECORDED_BYTES: usize = 256;

/// The file that gets the records, if there is one; the log gets them anyway.
#[derive(Debug, Default)]
pub struct AuditFile(Option<PathBuf>);

/// One run.
#[derive(Debug, Serialize)]
pub struct Record {
    /// Seconds since 1970, of the run's end.
    at_s: u64,
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
    began: Option<Instant>,
}

impl Record {
    /// Of a run that is asked for now.
    pub fn of(spec: &RunSpec, caller: &Caller, peer: &str) -> Self {
        let cwds: BTreeSet<&Bytes> = spec.stages.iter().map(|stage| &stage.cwd).collect();
        let exports: BTreeSet<&str> = spec.mounts.iter().map(|mount| mount.export.as_str()).collect();
        Self {
            at_s: 0,
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
            began: Some(Instant::now()),
        }
    }

    /// With what became of it.
    pub fn ended(mut self, end: &End, statuses: Vec<String>, (bytes_in, bytes_out): (u64, u64)) -> Self {
        let ms = self.began.map_or(0, |began| began.elapsed().as_millis());
        self.at_s = SystemTime::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_secs());
        self.outcome = end.word();
        self.refusal = match end {
            End::Rejected(refusal) => Some(refusal.kind.as_str_name()),
            _ => None,
        };
        Self { statuses, bytes_in, bytes_out, ms: u64::try_from(ms).unwrap_or(u64::MAX), ..self }
    }

    /// Puts it into the log, and into the file.
    pub async fn write(self, file: &AuditFile) {
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
        file.write(self).await;
    }
}

impl AuditFile {
    /// Makes sure that records can be written there.
    pub fn open(path: Option<&Path>) -> Result<Self, Error> {
        if let Some(path) = path {
            appending(path).attempting(|| format!("open the audit file {}", path.display()))?;
        }
        Ok(Self(path.map(Path::to_owned)))
    }

    /// Adds a line.
    pub async fn write(&self, record: impl Serialize + Send + 'static) {
        let Some(path) = self.0.clone() else { return };
        let written = tokio::task::spawn_blocking(move || append(&path, &record)).await;
        if let Ok(Err(error)) = written {
            tracing::error!(%error, "cannot write the audit record");
        }
    }
}

/// By its name each time, so that who rotates logs need not tell us.
fn append(path: &Path, record: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(record)?;
    line.push(b'\n');
    // One write, which the kernel appends whole.
    appending(path)?.write_all(&line)
}

fn appending(path: &Path) -> io::Result<File> {
    OpenOptions::new().append(true).create(true).mode(0o600).open(path)
}

fn short(text: &str) -> String {
    let mut end = text.len().min(RECORDED_BYTES);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text[..end].to_owned()
}
