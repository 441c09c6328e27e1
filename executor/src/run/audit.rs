//! A run in the audit record: who, what and where before it is let go, and then how it ended, also
//! if it was refused after that. Never arguments, environment, or what went through: a command's words may
//! hold secrets, and so may the words of a refusal.

use std::{collections::BTreeSet, time::Instant};

use bytes::Bytes;
use posh_proto::executor::{ClientFile, RunSpec};
use serde::Serialize;

use super::End;
use crate::{audit::AuditLog, callers::Caller, error::Refusal};

/// Programs, directories and statuses in a record.
pub const RECORDED: usize = 16;
/// Bytes of a text that a gateway chose, and of one list of them, as they stand in the record.
const RECORDED_BYTES: usize = 256;
const RECORDED_LIST_BYTES: usize = 1 << 10;

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
            run_id: shown(spec.run_id.as_bytes(), RECORDED_BYTES),
            identity: caller.name().to_owned(),
            user: caller.user.as_ref().map(|user| user.name.clone()).unwrap_or_default(),
            peer: peer.to_owned(),
            programs: some(spec.stages.iter().map(|stage| stage.program.as_bytes())),
            exports: some(exports.into_iter().map(str::as_bytes)),
            cwds: some(cwds.into_iter().map(|cwd| &cwd[..])),
            outcome: "",
            refusal: None,
            statuses: Vec::new(),
            bytes_in: 0,
            bytes_out: 0,
            ms: 0,
            client_files: some(client_files.iter().map(|file| &file.path[..]))
                .into_iter()
                .zip(client_files)
                .map(|(path, file)| ShownFile { path, bytes: file.content.len() })
                .collect(),
            began: Some(Instant::now()),
        }
    }

    /// Records that it begins.
    ///
    /// # Errors
    /// That can't be written, so that it must not begin.
    pub async fn begin(&self, audit: &AuditLog) -> Result<(), Refusal> {
        audit.begin("run_begin", Some(&self.identity), &self.beginning()).await
    }

    fn beginning(&self) -> Begin<'_> {
        Begin {
            run_id: &self.run_id,
            identity: &self.identity,
            user: &self.user,
            peer: &self.peer,
            programs: &self.programs,
            exports: &self.exports,
            cwds: &self.cwds,
            client_files: &self.client_files,
        }
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
        audit.note("run_end", &self.identity, &self).await;
    }
}

/// The first of them, as far as there is room.
fn some<'a>(texts: impl Iterator<Item = &'a [u8]>) -> Vec<String> {
    let mut room = RECORDED_LIST_BYTES;
    let fits = |text: &'a [u8]| {
        let shown = shown(text, RECORDED_BYTES.min(room));
        room -= room_of(&shown);
        (room > 0).then_some(shown)
    };
    texts.take(RECORDED).map_while(fits).collect()
}

/// The beginning of a text that takes at most so many bytes in the record. There, a control character would be six.
fn shown(text: &[u8], most: usize) -> String {
    let begin = &text[..text.len().min(most)];
    let mut shown = String::new();
    let mut room = most;
    for character in String::from_utf8_lossy(begin).chars() {
        let character = if character.is_control() { char::REPLACEMENT_CHARACTER } else { character };
        let Some(left) = room.checked_sub(room_of(character.encode_utf8(&mut [0; 4]))) else { break };
        room = left;
        shown.push(character);
    }
    shown
}

/// Bytes of it in the record.
fn room_of(shown: &str) -> usize {
    shown.len() + shown.matches(['"', '\\']).count()
}

#[cfg(test)]
mod tests {
    use posh_proto::executor::{MountPoint, Stage};

    use super::*;
    use crate::Config;

    #[test]
    fn a_record_is_small_whatever_the_client_writes() {
        for hostile in ["\u{1}", "\u{9b}", "\"", "\\", "ä", "x"] {
            let name = |n: usize| hostile.repeat(4096) + &n.to_string();
            let stage = |n| Stage { program: name(n), cwd: name(n).into(), ..Stage::default() };
            let spec = RunSpec {
                run_id: name(0),
                stages: (0..64).map(stage).collect(),
                mounts: (0..64).map(|n| MountPoint { export: name(n), ..MountPoint::default() }).collect(),
                ..RunSpec::default()
            };
            let files: Vec<_> = (0..64).map(|n| ClientFile { path: name(n).into(), ..ClientFile::default() }).collect();
            let record = Record::of(&spec, &files, &Caller::anybody(&Config::new(Vec::new())), "192.0.2.1:1");
            let bytes = serde_json::to_string(&record.beginning()).unwrap().len();
            assert!((1 << 10..6 << 10).contains(&bytes), "{hostile:?}: {bytes}");
        }
    }

    #[test]
    fn usual_names_are_told_whole() {
        assert_eq!(some(["cat".as_bytes(), "sort\n".as_bytes()].into_iter()), ["cat", "sort\u{fffd}"]);
    }
}
