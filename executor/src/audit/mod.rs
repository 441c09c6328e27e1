//! The audit record: what was done, by whom, and who was refused. One line of JSON for each
//! beginning and end, in a tamper-evident file (`chain`, [`verify`]). Never arguments, environment,
//! contents or secrets.
//!
//! One thread writes; others send it records through a bounded queue. An operation begins only
//! after its record is written: nothing is done that the record lacks.

mod chain;
mod shown;
mod verify;

use std::{
    collections::{HashMap, VecDeque},
    io,
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant, SystemTime},
};

use posh_proto::{executor::rejected::Kind, token::Fingerprint};
use serde::Serialize;
use serde_json::{Map, Value, json};
use tokio::{
    runtime,
    sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot},
};

use self::chain::{Appended, Chain};
pub(crate) use self::shown::{room_of, shown};
pub use self::verify::{ChainVerdict, verify};
use crate::{
    error::{AttemptExt as _, Error, Refusal},
    tls::{authority::Issued, register::Revocation},
};

/// The executor has started; the record names the state in which it found the file.
const START: &str = "start";
/// The executor has ended in order.
const STOP: &str = "stop";

/// Records that wait to be written.
const QUEUE: usize = 1024;
/// Those of one identity; more of it wait, and hold up no other identity.
const QUEUE_OF_ONE: usize = 64;
/// For a record that a caller waits for: a slower disk counts as failed.
const WRITE_TIMEOUT: Duration = Duration::from_secs(5);
/// Unwritten records that are kept for a retry.
const LATE: usize = 4096;
/// Retry interval while no new record comes.
const RETRY: Duration = Duration::from_secs(1);
/// Refusals recorded at once, and per second; the others are counted. All strangers share this
/// rate.
const REFUSALS_AT_ONCE: f64 = 100.0;
const REFUSALS_PER_SECOND: f64 = 10.0;
/// Per identity.
const REFUSALS_OF_ONE_AT_ONCE: f64 = 20.0;
const REFUSALS_OF_ONE_PER_SECOND: f64 = 1.0;
/// Stands for a missing identity.
const STRANGER: &str = "-";

/// Handle to the record, if there is one.
#[derive(Debug, Clone, Default)]
pub struct AuditLog {
    writer: Option<Arc<AuditWriter>>,
    refusals: Arc<Refusals>,
}

/// Token buckets of refusals by identity: what is left, and when that was counted.
#[derive(Debug, Default)]
struct Refusals(Mutex<HashMap<String, (f64, Instant)>>);

#[derive(Debug)]
struct AuditWriter {
    queue: mpsc::Sender<QueuedRecord>,
    /// Room in the queue, by identity.
    shares: Mutex<HashMap<String, Arc<Semaphore>>>,
    /// Records that will not be written; the next written record names their number.
    left_out: Arc<AtomicU64>,
}

/// A queued record.
#[derive(Debug)]
struct QueuedRecord {
    event: &'static str,
    record: Map<String, Value>,
    written: Option<oneshot::Sender<io::Result<()>>>,
    /// Place in the queue; the executor's own records take none.
    _share: Option<OwnedSemaphorePermit>,
}

/// Way in which a certificate was issued.
#[derive(Debug, Clone, Copy)]
pub enum CertificateEvent {
    /// For a token.
    Enrolled,
    /// For the previous certificate.
    Renewed,
}

impl AuditLog {
    /// Continues the record at `path`, and records the start.
    ///
    /// # Errors
    /// When it can't be written.
    pub fn open(path: Option<&Path>) -> Result<Self, Error> {
        let Some(path) = path else { return Ok(Self::default()) };
        let attempt = || format!("write the audit record {}", path.display());
        let (mut chain, found) = Chain::open(path).attempting(attempt)?;
        if found != chain::ChainCondition::default() {
            tracing::warn!(?found, "the audit record did not end in order");
        }
        let mut record = object(&found);
        record.insert("version".to_owned(), env!("CARGO_PKG_VERSION").into());
        chain.append(START, record).attempting(attempt)?;
        let (queue, entries) = mpsc::channel(QUEUE);
        // Its calls block, so it has a thread; the runtime only supplies timers.
        let runtime =
            runtime::Builder::new_current_thread().enable_time().build().attempting(attempt)?;
        let left_out = Arc::<AtomicU64>::default();
        let writing = Writing { chain, late: VecDeque::new(), left_out: left_out.clone() };
        let write = move || runtime.block_on(write_all(writing, entries));
        thread::Builder::new().name("audit".to_owned()).spawn(write).attempting(attempt)?;
        Ok(Self {
            writer: Some(Arc::new(AuditWriter::new(queue, left_out))),
            refusals: Arc::default(),
        })
    }

    /// Records the beginning of an operation, which may begin once this returns.
    ///
    /// # Errors
    /// The record can't be written.
    pub(crate) async fn begin(
        &self,
        event: &'static str,
        identity: Option<&str>,
        record: &(impl Serialize + Sync),
    ) -> Result<(), Refusal> {
        let Some(writer) = &self.writer else { return Ok(()) };
        let (written, done) = oneshot::channel();
        let writing = async {
            let share = writer.share(identity).await;
            let entry = QueuedRecord {
                event,
                record: object(record),
                written: Some(written),
                _share: share,
            };
            writer.queue.send(entry).await.map_err(|_| io::ErrorKind::BrokenPipe)?;
            done.await.map_err(|_| io::ErrorKind::BrokenPipe)?
        };
        let outcome = tokio::time::timeout(WRITE_TIMEOUT, writing).await;
        outcome.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())).map_err(|error| {
            tracing::error!(%error, "cannot write the audit record");
            Refusal::new(
                Kind::Overloaded,
                "the executor cannot write its audit record just now; its log says why",
            )
        })
    }

    /// Records a past event. Waits for room in the queue, not for the disk.
    pub(crate) async fn note(
        &self,
        event: &'static str,
        identity: &str,
        record: &(impl Serialize + Sync),
    ) {
        let Some(writer) = &self.writer else { return };
        let sending = async {
            let share = writer.share(Some(identity)).await;
            let _ = writer
                .queue
                .send(QueuedRecord { event, record: object(record), written: None, _share: share })
                .await;
        };
        if tokio::time::timeout(WRITE_TIMEOUT, sending).await.is_err() {
            writer.left_out.fetch_add(1, Ordering::Relaxed);
            tracing::error!(event, "the audit record is not written: a record is left out");
        }
    }

    /// Records a refusal; `what` is a constant word. Beyond the rate, refusals are only counted.
    /// Returns true if this one is recorded, or would be if there were a record: others are not
    /// logged either.
    pub(crate) fn refused(&self, identity: &str, peer: &str, what: &str) -> bool {
        if !self.refusals.may_tell(identity) {
            if let Some(writer) = &self.writer {
                writer.left_out.fetch_add(1, Ordering::Relaxed);
            }
            return false;
        }
        self.try_note("refused", json!({ "identity": identity, "peer": peer, "what": what }));
        true
    }

    /// Records a certificate that was issued.
    pub(crate) fn certificate(
        &self,
        event: CertificateEvent,
        identity: &str,
        peer: &str,
        issued: &Issued,
    ) {
        let event = match event {
            CertificateEvent::Enrolled => "enrolled",
            CertificateEvent::Renewed => "renewed",
        };
        let sha256 = Fingerprint::of(&issued.certificate).to_string();
        let record = json!({
            "identity": identity, "peer": peer, "sha256": sha256, "expires_s": issued.valid_s.end
        });
        self.try_note(event, record);
    }

    /// Records a certificate that an administrator revoked; returns true once that is written.
    pub(crate) async fn revoked(&self, revocation: &Revocation) -> bool {
        self.begin("revoked", None, revocation).await.is_ok()
    }

    /// Records the valid authorities, so that a rotation that was begun or ended while no executor
    /// was running shows.
    pub(crate) fn authorities_at_start(&self, authorities: &[Fingerprint]) {
        let sha256s: Vec<_> = authorities.iter().map(ToString::to_string).collect();
        self.try_note("authorities", json!({ "sha256": sha256s }));
    }

    /// Records that an administrator has begun or ended a rotation of the authority; the first one
    /// signs.
    pub(crate) fn authorities(&self, authorities: &[Fingerprint]) {
        let sha256s: Vec<_> = authorities.iter().map(ToString::to_string).collect();
        match &sha256s[..] {
            [next, former] => {
                self.try_note("rotation_begin", json!({ "sha256": next, "former": former }))
            }
            _ => self.try_note("rotation_end", json!({ "sha256": sha256s.first() })),
        }
    }

    /// Records that the configuration was read again; keys in `later` apply after a restart.
    pub(crate) fn reconfigured(&self, identities: usize, later: &[&str]) {
        self.try_note("reconfigured", json!({ "identities": identities, "after_restart": later }));
    }

    /// Records an orderly end: no record follows.
    pub(crate) async fn stop(&self) {
        let _ = self.begin(STOP, None, &Map::new()).await;
    }

    fn try_note(&self, event: &'static str, record: Value) {
        let Some(writer) = &self.writer else { return };
        let record = object(&record);
        if writer
            .queue
            .try_send(QueuedRecord { event, record, written: None, _share: None })
            .is_err()
        {
            writer.left_out.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl AuditWriter {
    fn new(queue: mpsc::Sender<QueuedRecord>, left_out: Arc<AtomicU64>) -> Self {
        Self { queue, shares: Mutex::default(), left_out }
    }

    /// Waits for room among the records of an identity.
    async fn share(&self, identity: Option<&str>) -> Option<OwnedSemaphorePermit> {
        let identity = identity?.to_owned();
        let new = || Arc::new(Semaphore::new(QUEUE_OF_ONE));
        let share =
            self.shares.lock().expect("not poisoned").entry(identity).or_insert_with(new).clone();
        share.acquire_owned().await.ok()
    }
}

impl Refusals {
    fn may_tell(&self, identity: &str) -> bool {
        let (at_once, per_second) = match identity {
            STRANGER => (REFUSALS_AT_ONCE, REFUSALS_PER_SECOND),
            _ => (REFUSALS_OF_ONE_AT_ONCE, REFUSALS_OF_ONE_PER_SECOND),
        };
        let now = Instant::now();
        let mut buckets = self.0.lock().expect("not poisoned");
        let bucket = buckets.entry(identity.to_owned()).or_insert((at_once, now));
        let left =
            (bucket.0 + now.duration_since(bucket.1).as_secs_f64() * per_second).min(at_once);
        let may = left >= 1.0;
        *bucket = (left - f64::from(u8::from(may)), now);
        may
    }
}

fn object(record: &impl Serialize) -> Map<String, Value> {
    match serde_json::to_value(record) {
        Ok(Value::Object(mut map)) => {
            // The line has a time of its own.
            map.remove("at_s");
            map
        }
        _ => Map::new(),
    }
}

/// The record, and entries that could not be written yet. A line of which a part is written is the
/// record's own to finish.
///
/// Invariant: records of past events stand in the order of their arrival, and none is lost without
/// being counted in the record after it: an entry that can't be written now is written before
/// anything else, or counted.
struct Writing {
    chain: Chain,
    late: VecDeque<QueuedRecord>,
    left_out: Arc<AtomicU64>,
}

impl Writing {
    fn take(&mut self, entry: QueuedRecord) {
        self.write_late();
        let QueuedRecord { event, record, written, _share } = entry;
        let outcome = match self.late.is_empty() {
            true => self.append(event, &record),
            false => Err(io::Error::other("earlier records could not be written yet")),
        };
        match (written, outcome) {
            // If the caller no longer waits, it has begun nothing, and records that as its end.
            (Some(written), outcome) => drop(written.send(outcome.and_then(Appended::whole))),
            (None, Ok(_)) => {}
            (None, Err(error)) => {
                tracing::error!(%error, event, "cannot write the audit record");
                self.keep(QueuedRecord { event, record, written: None, _share });
            }
        }
    }

    fn keep(&mut self, mut entry: QueuedRecord) {
        if self.late.len() >= LATE {
            self.left_out.fetch_add(1, Ordering::Relaxed);
            return;
        }
        let now_s = SystemTime::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_secs());
        entry.record.insert("happened_s".to_owned(), now_s.into());
        self.late.push_back(entry);
    }

    fn write_late(&mut self) {
        while let Some(QueuedRecord { event, record, .. }) = self.late.front() {
            let (event, record) = (*event, record.clone());
            if self.append(event, &record).is_err() {
                return;
            }
            self.late.pop_front();
        }
    }

    fn append(&mut self, event: &'static str, record: &Map<String, Value>) -> io::Result<Appended> {
        let left_out = self.left_out.swap(0, Ordering::Relaxed);
        let mut record = record.clone();
        if left_out > 0 {
            record.insert("left_out_before".to_owned(), left_out.into());
        }
        let written = self.chain.append(event, record);
        if written.is_err() {
            self.left_out.fetch_add(left_out, Ordering::Relaxed);
        }
        written
    }
}

/// Runs until the last sender is dropped.
async fn write_all(mut writing: Writing, mut entries: mpsc::Receiver<QueuedRecord>) {
    loop {
        let entry = if writing.late.is_empty() {
            entries.recv().await
        } else {
            match tokio::time::timeout(RETRY, entries.recv()).await {
                Ok(entry) => entry,
                Err(_) => {
                    writing.write_late();
                    continue;
                }
            }
        };
        let Some(entry) = entry else { return writing.write_late() };
        writing.take(entry);
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, path::PathBuf};

    use super::*;

    fn written(count: usize) -> (tempfile::TempDir, PathBuf) {
        let directory = tempfile::TempDir::new().unwrap();
        let path = directory.path().join("audit");
        let (mut chain, found) = Chain::open(&path).unwrap();
        assert_eq!(found, chain::ChainCondition::default());
        for number in 0..count {
            chain
                .append("run_begin", object(&json!({ "n": number, "text": "a\u{9b}31m\n" })))
                .unwrap();
        }
        chain.append(STOP, Map::new()).unwrap();
        (directory, path)
    }

    fn edited(edit: impl FnOnce(&mut Vec<String>)) -> ChainVerdict {
        let (_directory, path) = written(9);
        let mut lines: Vec<_> =
            fs::read_to_string(&path).unwrap().lines().map(str::to_owned).collect();
        edit(&mut lines);
        fs::write(&path, lines.join("\n") + "\n").unwrap();
        verify(&[path]).unwrap()
    }

    #[test]
    fn a_record_as_it_was_written_is_whole() {
        let verdict = edited(|_| {});
        assert!(verdict.is_whole && verdict.text.contains("10 records, whole"), "{}", verdict.text);
        let (_directory, path) = written(1);
        assert!(fs::read_to_string(path).unwrap().contains(r"a\u009b31m\n"));
    }

    #[test]
    fn whatever_is_changed_is_noticed_with_its_line() {
        type Edit = fn(&mut Vec<String>);
        let edits: [(Edit, &str); 6] = [
            (|lines| drop(lines.remove(3)), ":4: records 4 to 4 are missing"),
            (
                |lines| lines[3] = lines[3].replace("\"n\":3", "\"n\":7"),
                ":5: the line before it is not the one",
            ),
            (|lines| lines.swap(3, 4), ":5: record 4 stands behind record 5"),
            (|lines| lines.insert(3, "{}".to_owned()), ":4: this line is no record"),
            (|lines| drop(lines.pop()), "records 10 to 10 are missing at its end"),
            (
                |lines| lines[9] = lines[9].replace("stop", "stoq"),
                "its last line is not the one that was written",
            ),
        ];
        for (edit, said) in edits {
            let verdict = edited(edit);
            assert!(!verdict.is_whole && verdict.text.contains(said), "{said}: {}", verdict.text);
        }
    }

    #[test]
    fn the_chain_goes_on_over_rotations() {
        let (directory, path) = written(3);
        let old = directory.path().join("audit.1");
        fs::rename(&path, &old).unwrap();
        let (mut chain, found) = Chain::open(&path).unwrap();
        assert_eq!(found, chain::ChainCondition::default());
        chain.append(START, Map::new()).unwrap();
        // Also while it is written.
        let older = directory.path().join("audit.2");
        fs::rename(&path, &older).unwrap();
        chain.append(STOP, Map::new()).unwrap();
        let whole = verify(&[old.clone(), older.clone(), path.clone()]).unwrap();
        assert!(whole.is_whole, "{}", whole.text);
        assert!(!verify(&[old, path]).unwrap().is_whole);
    }

    #[test]
    fn what_a_kill_leaves_is_said_by_the_next_start() {
        let (_directory, path) = written(3);
        let mut text = fs::read(&path).unwrap();
        text.truncate(text.len() - 10);
        fs::write(&path, &text).unwrap();
        // As it was before the last record.
        let third = text.split(|byte| *byte == b'\n').nth(2).unwrap();
        fs::write(path.with_extension("head"), format!("{:020} {}\n", 3, chain::hash(third)))
            .unwrap();
        let (mut chain, found) = Chain::open(&path).unwrap();
        assert!(found.torn && found.killed && found.lost.is_none(), "{found:?}");
        chain.append(START, object(&found)).unwrap();
        let verdict = verify(std::slice::from_ref(&path)).unwrap();
        assert!(
            verdict.is_whole && verdict.text.contains(":4: cut off when the executor was killed"),
            "{}",
            verdict.text
        );
    }

    /// As on a full disk, where the file may only be appended to.
    #[test]
    fn a_line_of_which_a_part_is_written_is_finished_first() {
        for is_rotated in [false, true] {
            let (directory, path) = written(3);
            let (mut chain, _) = Chain::open(&path).unwrap();
            chain.append_in_part(START, Map::new(), 20);
            let mut files = vec![path.clone()];
            if is_rotated {
                files.insert(0, directory.path().join("audit.1"));
                fs::rename(&path, &files[0]).unwrap();
            }
            assert_eq!(chain.append(STOP, Map::new()).unwrap(), Appended::Whole);
            let verdict = verify(&files).unwrap();
            assert!(verdict.is_whole, "{is_rotated}: {}", verdict.text);
        }
    }

    #[test]
    fn a_start_after_a_kill_closes_what_was_written_in_part() {
        // All but the newline is a whole record.
        for left in [20, 1] {
            let (_directory, path) = written(3);
            let (mut chain, _) = Chain::open(&path).unwrap();
            chain.append_in_part(START, Map::new(), left);
            drop(chain);
            let (mut chain, found) = Chain::open(&path).unwrap();
            assert_eq!((found.torn, found.lost, found.altered), (left > 1, None, false));
            chain.append(START, object(&found)).unwrap();
            let verdict = verify(std::slice::from_ref(&path)).unwrap();
            assert!(verdict.is_whole, "{left}: {}", verdict.text);
        }
    }

    #[test]
    fn a_record_that_was_cut_is_missed_at_the_next_start() {
        let (_directory, path) = written(9);
        let text = fs::read_to_string(&path).unwrap();
        fs::write(&path, text.lines().take(5).map(|line| format!("{line}\n")).collect::<String>())
            .unwrap();
        let (mut chain, found) = Chain::open(&path).unwrap();
        assert_eq!((found.lost, found.killed), (Some(5), true));
        chain.append(START, object(&found)).unwrap();
        assert!(
            verify(&[path]).unwrap().text.contains(":6: records 6 to 10 are missing before it")
        );
    }

    #[test]
    fn two_do_not_write_one_record() {
        let (_directory, path) = written(1);
        let first = Chain::open(&path).unwrap();
        assert!(Chain::open(&path).unwrap_err().to_string().contains("another executor"));
        drop(first);
        assert!(Chain::open(&path).is_ok());
    }

    #[tokio::test]
    async fn nothing_begins_that_can_not_be_recorded() {
        let directory = tempfile::TempDir::new().unwrap();
        let path = directory.path().join("audit");
        let log = AuditLog::open(Some(&path)).unwrap();
        assert!(log.begin("run_begin", Some("ada"), &Map::new()).await.is_ok());
        // A place where no file can be made.
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        assert_eq!(
            log.begin("run_begin", Some("ada"), &Map::new()).await.unwrap_err().kind,
            Kind::Overloaded
        );
        fs::remove_dir(&path).unwrap();
        assert!(log.begin("run_begin", Some("ada"), &Map::new()).await.is_ok());
    }

    #[tokio::test]
    async fn refusals_without_end_are_counted() {
        let directory = tempfile::TempDir::new().unwrap();
        let path = directory.path().join("audit");
        let log = AuditLog::open(Some(&path)).unwrap();
        let told = (0..5000).filter(|_| log.refused("-", "192.0.2.1:1", "call")).count();
        assert!((100..200).contains(&told), "{told}");
        log.reconfigured(1, &[]);
        log.stop().await;
        let text = fs::read_to_string(&path).unwrap();
        let lines: Vec<Value> =
            text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let left_out: u64 = lines.iter().filter_map(|line| line["left_out_before"].as_u64()).sum();
        assert_eq!((lines.len(), left_out), (told + 3, 5000 - told as u64));
    }

    #[tokio::test]
    async fn refusals_of_one_identity_are_counted_beside_those_of_others() {
        let directory = tempfile::TempDir::new().unwrap();
        let path = directory.path().join("audit");
        let log = AuditLog::open(Some(&path)).unwrap();
        let told =
            (0..500).filter(|_| log.refused("ada", "192.0.2.1:1", "run: NOT_ALLOWED")).count();
        assert!((20..60).contains(&told), "{told}");
        log.refused("bob", "192.0.2.1:2", "run: NOT_ALLOWED");
        log.refused(STRANGER, "192.0.2.1:3", "call");
        log.stop().await;
        let text = fs::read_to_string(&path).unwrap();
        assert!(text.matches("\"ada\"").count() <= 25, "{text}");
        assert_eq!((text.matches("\"bob\"").count(), text.matches("\"-\"").count()), (1, 1));
    }

    /// The file can't be opened, as when descriptors or disk space are used up.
    #[tokio::test]
    async fn what_could_not_be_written_is_written_as_soon_as_it_can_be() {
        let directory = tempfile::TempDir::new().unwrap();
        let path = directory.path().join("audit");
        let log = AuditLog::open(Some(&path)).unwrap();
        log.begin("run_begin", Some("ada"), &json!({})).await.unwrap();
        let rotated = directory.path().join("audit.1");
        fs::rename(&path, &rotated).unwrap();
        fs::create_dir(&path).unwrap();
        log.note("run_end", "ada", &json!({ "n": 1 })).await;
        log.refused("ada", "192.0.2.1:1", "call");
        assert!(log.begin("run_begin", Some("ada"), &json!({})).await.is_err());
        for number in 0..LATE {
            log.note("run_end", &number.to_string(), &json!({ "n": number })).await;
        }
        // The failed `begin` means that all notes before it were taken.
        assert!(log.begin("run_begin", Some("bob"), &json!({})).await.is_err());
        fs::remove_dir(&path).unwrap();
        log.begin("run_begin", Some("bob"), &json!({})).await.unwrap();
        log.stop().await;
        let text = fs::read_to_string(&path).unwrap();
        let events: Vec<Value> =
            text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(events.len(), LATE + 2);
        assert_eq!((&events[0]["event"], &events[0]["n"]), (&"run_end".into(), &1.into()));
        assert_eq!(
            (&events[1]["event"], events[1]["happened_s"].is_u64()),
            (&"refused".into(), true)
        );
        let [.., last, begin, stop] = &events[..] else { panic!("{text}") };
        let left_out: u64 =
            events.iter().filter_map(|event| event["left_out_before"].as_u64()).sum();
        assert_eq!(
            (&last["event"], &begin["event"], &stop["event"], left_out),
            (&"run_end".into(), &"run_begin".into(), &"stop".into(), 2)
        );
        let verdict = verify(&[rotated, path]).unwrap();
        assert!(verdict.is_whole, "{}", verdict.text);
    }

    /// Nothing is taken out of the queue, as by a disk that is slow.
    #[tokio::test]
    async fn one_identity_does_not_fill_the_queue_of_the_record() {
        let (queue, entries) = mpsc::channel(QUEUE);
        let log = AuditLog {
            writer: Some(Arc::new(AuditWriter::new(queue, Arc::default()))),
            refusals: Arc::default(),
        };
        for number in 0..2 * QUEUE {
            let log = log.clone();
            tokio::spawn(async move { log.note("run_end", "ada", &json!({ "n": number })).await });
        }
        for _ in 0..QUEUE {
            tokio::task::yield_now().await;
        }
        assert_eq!(entries.len(), QUEUE_OF_ONE);
        let noted =
            tokio::time::timeout(WRITE_TIMEOUT / 2, log.note("run_end", "bob", &json!({}))).await;
        assert!(noted.is_ok() && entries.len() == QUEUE_OF_ONE + 1);
    }
}
