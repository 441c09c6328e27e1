//! A run in the audit record: who, what and where before it is let go, and then how it ended, also
//! if it was refused. Never arguments, environment, or what went through: a command's words may
//! hold secrets, and so may the words of a refusal.

use std::{collections::HashSet, time::Instant};

use posh_proto::{
    executor::{ClientFile, RunSpec},
    token::Fingerprint,
};
use serde::Serialize;

use super::End;
use crate::{audit::AuditLog, callers::Caller, error::Refusal};

/// Directories and statuses in a record.
pub const RECORDED: usize = 16;
/// Programs, each named once: far more than annotations know.
const RECORDED_PROGRAMS: usize = 256;
/// Bytes of a text that a gateway chose.
const RECORDED_BYTES: usize = 256;

/// A file of the workstation that a run sees; its content is nobody's business.
#[derive(Debug, Serialize)]
struct ShownFile {
    path: String,
    bytes: usize,
}

/// What a record has no room for: how many names, and the SHA-256 of all, listed or not: programs, exports, directories, each in
/// the order of the run and followed by a zero.
#[derive(Debug, Serialize)]
struct LeftOut {
    left_out: usize,
    names_sha256: String,
}

/// A run as it begins.
#[derive(Debug, Serialize)]
pub struct Begin<'a> {
    run_id: &'a str,
    identity: &'a str,
    user: &'a str,
    peer: &'a str,
    stages: usize,
    programs: &'a [String],
    exports: &'a [String],
    cwds: &'a [String],
    #[serde(flatten)]
    left_out: &'a Option<LeftOut>,
    #[serde(skip_serializing_if = "<[ShownFile]>::is_empty")]
    client_files: &'a [ShownFile],
}

/// One run.
#[derive(Debug, Serialize)]
pub struct Record {
    run_id: String,
    identity: String,
    /// Whose rights the commands had, empty for the executor's own.
    user: String,
    peer: String,
    stages: usize,
    /// Each once.
    programs: Vec<String>,
    exports: Vec<String>,
    cwds: Vec<String>,
    #[serde(flatten)]
    left_out: Option<LeftOut>,
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
    pub fn of(spec: &RunSpec, caller: &Caller, peer: &str) -> Self {
        let texts = |names: Vec<&[u8]>| -> Vec<String> {
            names.into_iter().map(|name| short(&String::from_utf8_lossy(name))).collect()
        };
        let programs = once(spec.stages.iter().map(|stage| stage.program.as_bytes()));
        let exports = once(spec.mounts.iter().map(|mount| mount.export.as_bytes()));
        let cwds = once(spec.stages.iter().map(|stage| &stage.cwd[..]));
        let left_out = LeftOut::of(&[(&programs, RECORDED_PROGRAMS), (&exports, RECORDED), (&cwds, RECORDED)]);
        let first = |names: Vec<&[u8]>, count| texts(names.into_iter().take(count).collect());
        Self {
            run_id: short(&spec.run_id),
            identity: caller.name().to_owned(),
            user: caller.user.as_ref().map(|user| user.name.clone()).unwrap_or_default(),
            peer: peer.to_owned(),
            stages: spec.stages.len(),
            programs: first(programs, RECORDED_PROGRAMS),
            exports: first(exports, RECORDED),
            cwds: first(cwds, RECORDED),
            left_out,
            outcome: "",
            refusal: None,
            statuses: Vec::new(),
            bytes_in: 0,
            bytes_out: 0,
            ms: 0,
            client_files: spec.client_files.iter().map(ShownFile::from).collect(),
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
            stages: self.stages,
            programs: &self.programs,
            exports: &self.exports,
            cwds: &self.cwds,
            left_out: &self.left_out,
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

impl LeftOut {
    /// Of lists, each with how many of it are recorded. A name that is shortened is left out, too.
    fn of(lists: &[(&Vec<&[u8]>, usize)]) -> Option<Self> {
        let is_kept = |index: usize, name: &[u8], most: usize| index < most && name.len() <= RECORDED_BYTES;
        let lost = |(names, most): &(&Vec<&[u8]>, usize)| {
            names.iter().enumerate().filter(|(index, name)| !is_kept(*index, name, *most)).count()
        };
        let left_out: usize = lists.iter().map(lost).sum();
        let all =
            || lists.iter().flat_map(|(names, _)| names.iter().flat_map(|name| [name, &b"\0"[..]])).collect::<Vec<_>>();
        (left_out > 0).then(|| Self { left_out, names_sha256: Fingerprint::of(&all().concat()).to_string() })
    }
}

/// Each name once, in the order in which they come.
fn once<'a>(names: impl Iterator<Item = &'a [u8]>) -> Vec<&'a [u8]> {
    let mut known = HashSet::new();
    names.filter(|name| known.insert(*name)).collect()
}

fn short(text: &str) -> String {
    let mut end = text.len().min(RECORDED_BYTES);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text[..end].to_owned()
}

#[cfg(test)]
mod tests {
    use posh_proto::executor::Stage;
    use serde_json::{Value, json};

    use super::*;
    use crate::config::Config;

    fn record(programs: impl IntoIterator<Item = String>) -> Value {
        let stage = |program| Stage { program, cwd: "/mnt".into(), ..Stage::default() };
        let spec = RunSpec { stages: programs.into_iter().map(stage).collect(), ..RunSpec::default() };
        serde_json::to_value(Record::of(&spec, &Caller::anybody(&Config::new(Vec::new())), "peer")).unwrap()
    }

    #[test]
    fn every_program_of_a_run_is_recorded_once() {
        let many = (0..200).map(|number| format!("p{}", number % 100));
        let record = record(many);
        assert_eq!(record["programs"].as_array().unwrap().len(), 100);
        assert_eq!((&record["stages"], record.get("left_out")), (&json!(200), None));
    }

    #[test]
    fn of_what_is_left_out_the_number_and_the_hash_are_recorded() {
        let names: Vec<String> = (0..300).map(|number| format!("p{number}")).chain(["x".repeat(257)]).collect();
        let record = record(names.clone());
        let all: String = names.iter().map(|name| format!("{name}\0")).chain(["/mnt\0".to_owned()]).collect();
        assert_eq!((record["left_out"].clone(), record["programs"][255].clone()), (json!(45), json!("p255")));
        assert_eq!(record["names_sha256"], Fingerprint::of(all.as_bytes()).to_string());
    }
}
