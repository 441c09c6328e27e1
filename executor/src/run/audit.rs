//! A run in the audit record: caller, commands and directories before it starts, and then its end,
//! even if it was refused after that. Never arguments, environment or data: a command's words may
//! hold secrets, and so may the text of a refusal.

use std::{collections::HashSet, time::Instant};

use posh_proto::{
    executor::{ClientFile, RunSpec},
    token::Fingerprint,
};
use serde::Serialize;

use super::RunEnd;
use crate::{
    audit::{AuditLog, room_of, shown},
    callers::Caller,
    error::Refusal,
};

/// Directories and statuses recorded of a run.
pub const RECORDED: usize = 16;
/// Programs recorded of a run, each once: far more than annotations know.
const RECORDED_PROGRAMS: usize = 256;
/// Recorded bytes of a text that a gateway chose, of one list of them, and of the list of programs.
const RECORDED_BYTES: usize = 256;
const RECORDED_LIST_BYTES: usize = 1 << 10;
const RECORDED_PROGRAM_BYTES: usize = 4 << 10;

/// A file of the workstation that a run sees; its content is not recorded.
#[derive(Debug, Serialize)]
struct ShownFile {
    path: String,
    bytes: usize,
}

/// Names for which a record has no room: their number, and the SHA-256 of all names, listed or not:
/// programs, exports, directories, each in the order of the run and followed by a zero.
#[derive(Debug, Serialize)]
struct LeftOut {
    left_out: usize,
    names_sha256: String,
}

/// Record of a run's beginning.
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

/// Record of a run's end.
#[derive(Debug, Default, Serialize)]
pub struct RunRecord {
    run_id: String,
    identity: String,
    /// Account that the commands ran as, empty for the executor's own.
    user: String,
    peer: String,
    stages: usize,
    /// Names of programs, each once.
    programs: Vec<String>,
    exports: Vec<String>,
    cwds: Vec<String>,
    #[serde(flatten)]
    left_out: Option<LeftOut>,
    outcome: &'static str,
    /// Kind of the refusal of a refused run, by its name in the contract.
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

impl RunRecord {
    /// For a run that is requested now.
    pub fn of(spec: &RunSpec, client_files: &[ClientFile], caller: &Caller, peer: &str) -> Self {
        let programs = once(spec.stages.iter().map(|stage| stage.program.as_bytes()));
        let exports = once(spec.mounts.iter().map(|mount| mount.export.as_bytes()));
        let cwds = once(spec.stages.iter().map(|stage| &stage.cwd[..]));
        let paths: Vec<&[u8]> = client_files.iter().map(|file| &file.path[..]).collect();
        let left_out = LeftOut::of([&programs, &exports, &cwds, &paths]);
        Self {
            run_id: shown(spec.run_id.as_bytes(), RECORDED_BYTES),
            identity: caller.name().to_owned(),
            user: caller.user.as_ref().map(|user| user.name.clone()).unwrap_or_default(),
            peer: peer.to_owned(),
            stages: spec.stages.len(),
            programs: listed(&programs, LARGE).0,
            exports: listed(&exports, USUAL).0,
            cwds: listed(&cwds, USUAL).0,
            left_out,
            outcome: "",
            refusal: None,
            statuses: Vec::new(),
            bytes_in: 0,
            bytes_out: 0,
            ms: 0,
            client_files: listed(&paths, LARGE)
                .0
                .into_iter()
                .zip(client_files)
                .map(|(path, file)| ShownFile { path, bytes: file.content.len() })
                .collect(),
            began: Some(Instant::now()),
        }
    }

    /// Records that the run begins.
    ///
    /// # Errors
    /// The record can't be written: the run must not begin.
    pub async fn begin(&self, audit: &AuditLog) -> Result<(), Refusal> {
        audit.begin("run_begin", Some(&self.identity), &self.beginning()).await
    }

    fn beginning(&self) -> Begin<'_> {
        Begin {
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
        }
    }

    /// Adds the run's end.
    pub fn ended(
        mut self,
        end: &RunEnd,
        statuses: Vec<String>,
        bytes_in: u64,
        bytes_out: u64,
    ) -> Self {
        let ms = self.began.map_or(0, |began| began.elapsed().as_millis());
        self.outcome = end.word();
        self.refusal = match end {
            RunEnd::Rejected(refusal) => Some(refusal.kind.as_str_name()),
            _ => None,
        };
        Self { statuses, bytes_in, bytes_out, ms: u64::try_from(ms).unwrap_or(u64::MAX), ..self }
    }

    /// Writes it to the log and to the audit record.
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

/// Room of a list in the record.
#[derive(Clone, Copy)]
struct ListRoom {
    entries: usize,
    bytes: usize,
}

/// Room of most lists.
const USUAL: ListRoom = ListRoom { entries: RECORDED, bytes: RECORDED_LIST_BYTES };

/// Room of the lists of programs and of client files.
const LARGE: ListRoom = ListRoom { entries: RECORDED_PROGRAMS, bytes: RECORDED_PROGRAM_BYTES };

/// The first names, as far as there is room, and how many of them are listed unchanged.
fn listed(names: &[&[u8]], room: ListRoom) -> (Vec<String>, usize) {
    let mut texts = Vec::new();
    let mut whole = 0;
    let ListRoom { entries, bytes: mut room } = room;
    for name in names.iter().take(entries) {
        let text = shown(name, RECORDED_BYTES.min(room));
        room = room.saturating_sub(room_of(&text));
        if room == 0 {
            break;
        }
        whole += usize::from(text.as_bytes() == *name);
        texts.push(text);
    }
    (texts, whole)
}

impl LeftOut {
    /// From programs, exports, directories and client files: counts the names that the record lacks
    /// or changes.
    fn of(lists: [&Vec<&[u8]>; 4]) -> Option<Self> {
        let bounds = [LARGE, USUAL, USUAL, LARGE];
        let lost = |(names, bounds): (&&Vec<&[u8]>, _)| names.len() - listed(names, bounds).1;
        let left_out: usize = lists.iter().zip(bounds).map(lost).sum();
        let all = || {
            lists
                .iter()
                .flat_map(|names| names.iter().flat_map(|name| [name, &b"\0"[..]]))
                .collect::<Vec<_>>()
        };
        (left_out > 0)
            .then(|| Self { left_out, names_sha256: Fingerprint::of(&all().concat()).to_string() })
    }
}

/// Each name once, in the order of its first occurrence.
fn once<'a>(names: impl Iterator<Item = &'a [u8]>) -> Vec<&'a [u8]> {
    let mut known = HashSet::new();
    names.filter(|name| known.insert(*name)).collect()
}

#[cfg(test)]
mod tests {
    use posh_proto::executor::{MountPoint, Stage};
    use serde_json::{Value, json};

    use super::*;
    use crate::Config;

    fn record(programs: impl IntoIterator<Item = String>) -> Value {
        let stage = |program| Stage { program, cwd: "/mnt".into(), ..Stage::default() };
        let spec =
            RunSpec { stages: programs.into_iter().map(stage).collect(), ..RunSpec::default() };
        let caller = Caller::anybody(&Config::new(Vec::new()));
        serde_json::to_value(RunRecord::of(&spec, &[], &caller, "peer").beginning()).unwrap()
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
        let names: Vec<String> =
            (0..300).map(|number| format!("p{number}")).chain(["x".repeat(257)]).collect();
        let record = record(names.clone());
        let all: String =
            names.iter().map(|name| format!("{name}\0")).chain(["/mnt\0".to_owned()]).collect();
        assert_eq!(
            (record["left_out"].clone(), record["programs"][255].clone()),
            (json!(45), json!("p255"))
        );
        assert_eq!(record["names_sha256"], Fingerprint::of(all.as_bytes()).to_string());
    }

    #[test]
    fn a_record_is_small_whatever_the_client_writes() {
        for hostile in ["\u{1}", "\u{9b}", "\"", "\\", "ä", "x"] {
            let name = |n: usize| hostile.repeat(4096) + &n.to_string();
            let stage = |n| Stage { program: name(n), cwd: name(n).into(), ..Stage::default() };
            let spec = RunSpec {
                run_id: name(0),
                stages: (0..64).map(stage).collect(),
                mounts: (0..64)
                    .map(|n| MountPoint { export: name(n), ..MountPoint::default() })
                    .collect(),
                ..RunSpec::default()
            };
            let files: Vec<_> = (0..64)
                .map(|n| ClientFile { path: name(n).into(), ..ClientFile::default() })
                .collect();
            let record = RunRecord::of(
                &spec,
                &files,
                &Caller::anybody(&Config::new(Vec::new())),
                "192.0.2.1:1",
            );
            let bytes = serde_json::to_string(&record.beginning()).unwrap().len();
            assert!((1 << 10..16 << 10).contains(&bytes), "{hostile:?}: {bytes}");
        }
    }
}
