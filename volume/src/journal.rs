//! Journal on this machine's disk of new files that were closed and are not on the server yet, so
//! that a killed gateway loses none. Records are appended; the next gateway replays them. A record
//! is removed when its file is on the server.
//!
//! A record is safe once write(2) has returned: it survives the death of the process, but not of
//! the machine. For the latter, fsync(2) of the file waits for the server.
//!
//! Invariant: a journal with records that can't be read is never taken for an empty one. Either
//! [`Journal::open`] fails, or each readable record is returned, the damaged segment is kept when
//! it would be removed (`State::remove`), and [`Journal::damage`] tells of it. That is safe in
//! any order of records: a damaged one may have said that an earlier one is on the server, which
//! then is put again, and a put replaces nothing.
//!
//! [`crate::fs`] decides when to write a record, and replays them. `segment` has the format.

mod segment;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    ffi::OsString,
    fmt,
    fs::{self, File, OpenOptions, TryLockError},
    io::{self, Write as _},
    os::unix::{ffi::OsStringExt as _, fs::OpenOptionsExt as _},
    path::{Path, PathBuf},
    slice,
    sync::{Mutex, MutexGuard, PoisonError},
};

use bytes::Bytes;

use self::segment::{Line, SegmentLines};
use crate::{
    disk::own_directory,
    store::{Caller, Put, Write},
};

/// Size at which a new segment begins, so that old segments can be removed under constant load.
const SEGMENT_BYTES: u64 = 16 << 20;
/// Prefix of the segments' file names.
const SEGMENT: &str = "journal-";
/// Prefix of the file names of damaged segments without live records.
const DAMAGED: &str = "damaged-";
/// Limit for damaged segments that are kept; the oldest is removed.
const MOST_DAMAGED: usize = 8;
/// File with the names of sessions whose requests may still be in flight, in hexadecimal, one per
/// line.
const SESSIONS_FILE: &str = "sessions";
/// Locked by the journal that uses the directory.
const LOCK_FILE: &str = "lock";

/// A new file that may not be on the server yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// Sequence number, unique within a process.
    pub order: u64,
    /// Path from the root to the directory that `put` is relative to.
    pub home: Vec<OsString>,
    /// Caller that created the file.
    pub caller: Caller,
    /// The file, and its path.
    pub put: Put,
}

/// Journal of one volume.
#[derive(Debug)]
pub struct Journal {
    directory: PathBuf,
    state: Mutex<State>,
    /// Locked until [`Self::hand_over`] or [`Self::abandon`] is complete, or until drop.
    lock: File,
}

#[derive(Debug, Default)]
struct State {
    /// True if new records are refused.
    is_ending: bool,
    /// True if its session goes on after the directory was released to the next journal.
    is_handed_over: bool,
    current: Option<OpenSegment>,
    /// OpenSegment of each live record.
    records: HashMap<u64, u64>,
    /// Number of live records by segment.
    counts: BTreeMap<u64, usize>,
    /// Segments that are kept when they would be removed.
    damaged: BTreeSet<u64>,
}

/// The segment that records are appended to.
#[derive(Debug)]
struct OpenSegment {
    number: u64,
    file: File,
    bytes: u64,
}

/// A part of a journal that can't be read; says what to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Damage {
    directory: PathBuf,
}

impl fmt::Display for Damage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "the journal in {} was damaged: files that were closed here may be missing on the \
             server, or removed ones be there again; when you have looked for them, remove \
             {DAMAGED}* there, which has what can't be read",
            self.directory.display()
        )
    }
}

impl Journal {
    /// Opens the journal of a directory, which is created if missing. Returns the records that the
    /// last journal has left, in order.
    ///
    /// # Errors
    /// The directory or a segment can't be created or read, with its path, or the directory is in
    /// use ([`io::ErrorKind::WouldBlock`]).
    pub fn open(directory: &Path) -> io::Result<(Self, Vec<Record>)> {
        own_directory(directory)?;
        let path = directory.join(LOCK_FILE);
        let lock = options().write(true).create(true).truncate(false).open(&path);
        let lock = lock.map_err(|error| of_path(&path, error))?;
        lock.try_lock().map_err(|error| match error {
            TryLockError::WouldBlock => io::Error::from(io::ErrorKind::WouldBlock),
            TryLockError::Error(error) => error,
        })?;
        let mut left: BTreeMap<u64, Record> = BTreeMap::new();
        let segments = numbered(directory, SEGMENT)?;
        let mut state = State::default();
        for segment in &segments {
            let path = path_of(directory, *segment);
            let read = SegmentLines::read(&fs::read(&path).map_err(|error| of_path(&path, error))?);
            let mut is_damaged = read.is_damaged;
            for line in read.lines {
                let is_record = line.done.is_empty();
                line.done.iter().for_each(|done| drop(left.remove(done)));
                let record = line.record();
                is_damaged |= is_record && record.is_none();
                left.extend(record.map(|record| (record.order, record)));
            }
            if is_damaged {
                tracing::error!(?path, "a segment of the journal is damaged; it is kept");
                state.damaged.insert(*segment);
            }
        }
        for record in left.values() {
            // Counted for the last segment, which is removed last, whichever segment they are in.
            let at = segments.last().copied().unwrap_or_default();
            state.records.insert(record.order, at);
            *state.counts.entry(at).or_default() += 1;
        }
        let next = segments.last().map_or(Ok(0), |last| number_after(directory, *last))?;
        state.current = Some(OpenSegment::create(directory, next)?);
        if left.is_empty() {
            segments.iter().for_each(|segment| state.remove(directory, *segment));
        }
        Ok((
            Self { directory: directory.to_owned(), state: Mutex::new(state), lock },
            left.into_values().collect(),
        ))
    }

    /// Returns the names of earlier sessions that have sent records of this journal, and whose
    /// requests may still be in flight.
    ///
    /// # Errors
    /// The disk's, with the file's path; [`io::ErrorKind::InvalidData`] if a name is damaged: its
    /// session would not be ended.
    pub fn earlier_sessions(&self) -> io::Result<Vec<Bytes>> {
        let path = self.directory.join(SESSIONS_FILE);
        let names = match fs::read_to_string(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            read => read.map_err(|error| of_path(&path, error))?,
        };
        names.lines().map(name_of).collect::<Option<_>>().ok_or_else(|| {
            let error = io::Error::new(io::ErrorKind::InvalidData, "a name is damaged");
            of_path(&path, error)
        })
    }

    /// Returns the damage of the journal, as long as damaged segments are kept.
    #[must_use]
    pub fn damage(&self) -> Option<Damage> {
        let is_live = !self.state().damaged.is_empty();
        let is_kept = || numbered(&self.directory, DAMAGED).is_ok_and(|kept| !kept.is_empty());
        (is_live || is_kept()).then(|| Damage { directory: self.directory.clone() })
    }

    /// Notes that session `name` sends the journal's records from now on. `earlier`: sessions that
    /// have sent them before, and may not have ended.
    ///
    /// # Errors
    /// The disk's: the next journal would not know of this session.
    pub fn begin_session(&self, earlier: &[Bytes], name: &Bytes) -> io::Result<()> {
        self.note_sessions(&[earlier, slice::from_ref(name)].concat())
    }

    /// Replaces the file of session names atomically.
    fn note_sessions(&self, names: &[Bytes]) -> io::Result<()> {
        let digits =
            |name: &Bytes| name.iter().map(|byte| format!("{byte:02x}")).collect::<String>() + "\n";
        let (new, path) = (self.directory.join("sessions.new"), self.directory.join(SESSIONS_FILE));
        let mut file = options().write(true).create(true).truncate(true).open(&new)?;
        file.write_all(names.iter().map(digits).collect::<String>().as_bytes())?;
        // A crash of the machine must not leave an empty file.
        file.sync_data()?;
        fs::rename(new, path)
    }

    /// Returns the highest number of a live record; new records need higher ones.
    #[must_use]
    pub fn last_order(&self) -> u64 {
        self.state().records.keys().copied().max().unwrap_or_default()
    }

    /// Appends a record of a new file, in place of an earlier one with its number.
    ///
    /// # Errors
    /// The disk's; [`io::ErrorKind::BrokenPipe`] for a new record after [`Self::hand_over`].
    pub fn note(&self, record: Record) -> io::Result<()> {
        let order = record.order;
        let line = line_of(record);
        let mut state = self.state();
        if state.is_ending && !state.records.contains_key(&order) {
            return Err(io::Error::new(io::ErrorKind::BrokenPipe, "the volume is unmounted"));
        }
        let segment = state.append(&self.directory, &line)?;
        let before = state.records.insert(order, segment);
        *state.counts.entry(segment).or_default() += 1;
        if let Some(before) = before {
            state.one_less(&self.directory, before);
        }
        Ok(())
    }

    /// Removes records: the server has these files, or never will.
    pub fn done(&self, orders: &[u64]) {
        let mut state = self.state();
        let segments: Vec<u64> =
            orders.iter().filter_map(|order| state.records.remove(order)).collect();
        if segments.is_empty() {
            return;
        }
        if !state.records.is_empty() {
            // On a failure, the next journal puts them once more, and finds that they exist.
            let _ =
                state.append(&self.directory, &Line { done: orders.to_vec(), ..Line::default() });
        }
        segments.into_iter().for_each(|segment| state.one_less(&self.directory, segment));
        if state.records.is_empty() {
            state.clear(&self.directory);
            self.give_up_if_done(&state);
        }
    }

    /// Refuses new records from now on, and releases the directory to the next journal as soon as
    /// no record is left.
    ///
    /// Invariant: only the holder of the file lock writes to the directory and sends its records.
    /// So the lock is released with the last record, when none can be added: both under one mutex.
    pub fn hand_over(&self) {
        let mut state = self.state();
        (state.is_ending, state.is_handed_over) = (true, true);
        self.give_up_if_done(&state);
    }

    /// Releases the directory to the next journal, with its records. To be called when none of them
    /// is being sent any more.
    pub fn abandon(&self) {
        let mut state = self.state();
        *state = State { is_ending: true, ..State::default() };
        self.give_up_if_done(&state);
    }

    /// Returns true if new records are accepted.
    #[must_use]
    pub fn is_open(&self) -> bool {
        !self.state().is_ending
    }

    fn give_up_if_done(&self, state: &State) {
        if state.is_ending && state.records.is_empty() {
            if state.is_handed_over {
                // The session goes on, but sends no more records.
                let _ = fs::remove_file(self.directory.join(SESSIONS_FILE));
            }
            // On an error, the drop of the descriptor unlocks.
            let _ = self.lock.unlock();
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Appends a line; returns its segment.
    fn append(&mut self, directory: &Path, line: &Line) -> io::Result<u64> {
        let line = line.encoded().ok_or(io::ErrorKind::FileTooLarge)?;
        let current = self.current.as_mut().ok_or(io::ErrorKind::BrokenPipe)?;
        if current.bytes >= SEGMENT_BYTES {
            *current = OpenSegment::create(directory, number_after(directory, current.number)?)?;
        }
        if let Err(error) = current.file.write_all(&line) {
            // A torn line is expected at the end of a segment only.
            if current.file.set_len(current.bytes).is_err() {
                current.bytes = SEGMENT_BYTES;
            }
            return Err(error);
        }
        current.bytes += line.len() as u64;
        Ok(current.number)
    }

    fn one_less(&mut self, directory: &Path, segment: u64) {
        let Some(count) = self.counts.get_mut(&segment) else { return };
        *count -= 1;
        // A segment is needed as long as an older one has live records, for its `done` lines.
        while let Some((oldest, 0)) = self.counts.first_key_value().map(|(at, count)| (*at, *count))
        {
            if self.current.as_ref().is_some_and(|current| current.number == oldest) {
                return;
            }
            self.counts.remove(&oldest);
            self.remove(directory, oldest);
        }
    }

    /// Removes a segment, or keeps it under another name if it is damaged.
    fn remove(&mut self, directory: &Path, segment: u64) {
        let path = path_of(directory, segment);
        let removed = if self.damaged.remove(&segment) {
            keep_damaged(directory, &path)
        } else {
            fs::remove_file(&path)
        };
        // On a failure, the next journal reads it again.
        if let Err(error) = removed {
            tracing::warn!(?path, %error, "can't remove a segment of the journal");
        }
    }

    /// Removes all segments but the current one, which is truncated.
    fn clear(&mut self, directory: &Path) {
        let current = self.current.as_ref().map(|current| current.number);
        for segment in numbered(directory, SEGMENT).unwrap_or_default() {
            if Some(segment) != current {
                self.remove(directory, segment);
            }
        }
        self.counts.clear();
        if let Some(current) = &mut self.current
            && current.file.set_len(0).is_ok()
        {
            current.bytes = 0;
        }
    }
}

impl Line {
    fn record(self) -> Option<Record> {
        let Ok(Write::Put(put)) = Write::try_from(self.put?) else { return None };
        let home = self.home.into_iter().map(OsString::from_vec).collect();
        Some(Record { order: self.order, home, caller: self.caller?.into(), put })
    }
}

fn line_of(record: Record) -> Line {
    Line {
        order: record.order,
        home: record.home.into_iter().map(OsString::into_vec).collect(),
        caller: Some((&record.caller).into()),
        put: Some(Write::Put(record.put).into()),
        done: Vec::new(),
    }
}

fn options() -> OpenOptions {
    let mut options = File::options();
    options.mode(0o600);
    options
}

fn path_of(directory: &Path, segment: u64) -> PathBuf {
    directory.join(format!("{SEGMENT}{segment}"))
}

impl OpenSegment {
    /// Creates a segment; its name is free.
    fn create(directory: &Path, number: u64) -> io::Result<Self> {
        let path = path_of(directory, number);
        let file = options().append(true).create_new(true).open(&path);
        Ok(Self { number, file: file.map_err(|error| of_path(&path, error))?, bytes: 0 })
    }
}

/// Returns the number of the next segment.
fn number_after(directory: &Path, segment: u64) -> io::Result<u64> {
    segment.checked_add(1).ok_or_else(|| {
        let error = io::Error::new(io::ErrorKind::InvalidData, "no segment can follow that one");
        of_path(&path_of(directory, segment), error)
    })
}

/// Renames a damaged segment, so that it is not read again.
fn keep_damaged(directory: &Path, segment: &Path) -> io::Result<()> {
    let kept = numbered(directory, DAMAGED)?;
    let name = |number: u64| directory.join(format!("{DAMAGED}{number}"));
    for oldest in &kept[..kept.len().saturating_sub(MOST_DAMAGED - 1)] {
        tracing::warn!(path = ?name(*oldest), "removing the oldest damaged segment");
        fs::remove_file(name(*oldest))?;
    }
    fs::rename(segment, name(kept.last().map_or(0, |last| last.saturating_add(1))))
}

/// Returns the numbers of the files with that prefix, in order. Other spellings of a number are not
/// ours.
fn numbered(directory: &Path, prefix: &str) -> io::Result<Vec<u64>> {
    let mut numbers = Vec::new();
    let failed = |error| of_path(directory, error);
    for entry in fs::read_dir(directory).map_err(failed)? {
        let name = entry.map_err(failed)?.file_name();
        let digits = name.to_str().and_then(|name| name.strip_prefix(prefix));
        let number = digits.and_then(|digits| digits.parse::<u64>().ok());
        numbers.extend(number.filter(|number| digits == Some(&number.to_string())));
    }
    numbers.sort_unstable();
    Ok(numbers)
}

/// Returns false if a directory has certainly no records: without them, a volume needs no journal.
#[must_use]
pub fn may_hold_records(directory: &Path) -> bool {
    let is_empty = |segment: &u64| {
        let about = path_of(directory, *segment).symlink_metadata();
        about.is_ok_and(|about| about.is_file() && about.len() == 0)
    };
    match numbered(directory, SEGMENT) {
        Ok(segments) => !segments.iter().all(is_empty),
        Err(error) => {
            !matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
        }
    }
}

fn of_path(path: &Path, error: io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

/// Decodes hexadecimal digits.
fn name_of(digits: &str) -> Option<Bytes> {
    let byte = |at: usize| u8::from_str_radix(digits.get(at..at + 2)?, 16).ok();
    let name = (0..digits.len()).step_by(2).map(byte).collect::<Option<Vec<u8>>>()?;
    Some(name).filter(|name| !name.is_empty()).map(Bytes::from)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::{Changes, FileId, NewFile};

    fn record(order: u64, contents: &'static [u8]) -> Record {
        let put = Put {
            directory: FileId { inode: 3, generation: 4 },
            path: vec!["d".into(), format!("f{order}").into()],
            what: NewFile::Regular { data: Bytes::from_static(contents) },
            mode: 0o640,
            changes: Changes { uid: Some(7), ..Changes::default() },
        };
        Record {
            order,
            home: vec!["a".into()],
            caller: Caller { uid: 1, gid: 2, groups: [3].into(), is_guest: false },
            put,
        }
    }

    #[test]
    fn sessions_are_told_again_until_they_have_ended() {
        let directory = tempfile::tempdir().unwrap();
        let names: Vec<Bytes> = (0..4).map(|name| Bytes::from(vec![name, 0xff])).collect();
        let open = || Journal::open(directory.path()).unwrap().0;
        assert_eq!(open().earlier_sessions().unwrap(), names[..0]);
        open().begin_session(&[], &names[0]).unwrap();
        // The second is killed before it has ended the first.
        open().begin_session(&names[..1], &names[1]).unwrap();
        let third = open();
        assert_eq!(third.earlier_sessions().unwrap(), names[..2]);
        third.begin_session(&[], &names[2]).unwrap();
        // What was handed over goes on, with what is not in the journal.
        third.note(record(1, b"closed")).unwrap();
        third.hand_over();
        assert!(Journal::open(directory.path()).is_err());
        third.done(&[1]);
        let fourth = open();
        assert_eq!(fourth.earlier_sessions().unwrap(), names[..0]);
        fourth.begin_session(&[], &names[3]).unwrap();
        // What is given up has asked for things.
        fourth.abandon();
        assert_eq!(open().earlier_sessions().unwrap(), names[3..]);
    }

    #[test]
    fn what_is_not_done_is_there_again() {
        let directory = tempfile::tempdir().unwrap();
        {
            let (journal, left) = Journal::open(directory.path()).unwrap();
            assert_eq!(left, []);
            for order in 1..=3 {
                journal.note(record(order, b"old")).unwrap();
            }
            journal.note(record(2, b"new")).unwrap();
            journal.done(&[1]);
            assert!(Journal::open(directory.path()).is_err(), "it is in use");
        }
        let (journal, left) = Journal::open(directory.path()).unwrap();
        assert_eq!(left, [record(2, b"new"), record(3, b"old")]);
        assert_eq!(journal.last_order(), 3);
        journal.note(record(4, b"more")).unwrap();
        journal.done(&[2, 3]);
        drop(journal);
        let (journal, left) = Journal::open(directory.path()).unwrap();
        assert_eq!(left, [record(4, b"more")]);
        journal.done(&[4]);
        drop(journal);
        let files = fs::read_dir(directory.path())
            .unwrap()
            .map(|file| file.unwrap().metadata().unwrap().len());
        assert_eq!(files.sum::<u64>(), 0, "nothing counts any more");
    }

    #[test]
    fn a_journal_is_handed_over_with_its_last_record() {
        let directory = tempfile::tempdir().unwrap();
        let (first, _) = Journal::open(directory.path()).unwrap();
        first.note(record(1, b"old")).unwrap();
        first.hand_over();
        assert!(first.note(record(2, b"new")).is_err(), "it would belong to the next one");
        first.note(record(1, b"changed")).unwrap();
        assert!(Journal::open(directory.path()).is_err(), "a record is still to be sent");
        first.done(&[1]);
        let (second, left) = Journal::open(directory.path()).unwrap();
        assert_eq!(left, []);
        second.note(record(1, b"of the second")).unwrap();
        first.done(&[1]);
        assert!(first.note(record(1, b"late")).is_err());
        second.abandon();
        second.done(&[1]);
        assert!(second.note(record(1, b"late")).is_err());
        assert_eq!(Journal::open(directory.path()).unwrap().1, [record(1, b"of the second")]);
    }

    #[test]
    fn a_torn_end_hides_nothing_before_it() {
        let directory = tempfile::tempdir().unwrap();
        let (journal, _) = Journal::open(directory.path()).unwrap();
        journal.note(record(1, b"whole")).unwrap();
        journal.note(record(2, b"torn")).unwrap();
        drop(journal);
        let file = path_of(directory.path(), 0);
        let whole = fs::read(&file).unwrap();
        fs::write(&file, &whole[..whole.len() - 1]).unwrap();
        assert_eq!(Journal::open(directory.path()).unwrap().1, [record(1, b"whole")]);
    }

    fn flip(path: &Path, at: usize) {
        let mut bytes = fs::read(path).unwrap();
        bytes[at] ^= 1;
        fs::write(path, bytes).unwrap();
    }

    #[test]
    fn a_damaged_record_hides_no_other_and_is_told_until_its_segment_is_removed() {
        let directory = tempfile::tempdir().unwrap();
        let all: Vec<Record> = (1..=3).map(|order| record(order, b"contents")).collect();
        let (journal, _) = Journal::open(directory.path()).unwrap();
        all.iter().for_each(|record| journal.note(record.clone()).unwrap());
        assert_eq!(journal.damage(), None);
        drop(journal);
        let segment = path_of(directory.path(), 0);
        let damaged = segment.metadata().unwrap().len() / 2;
        flip(&segment, usize::try_from(damaged).unwrap());
        let damaged = fs::read(&segment).unwrap();
        // Also if the next one is killed before it has sent anything.
        for _ in 0..2 {
            let (journal, left) = Journal::open(directory.path()).unwrap();
            assert_eq!(left, [all[0].clone(), all[2].clone()]);
            assert!(journal.damage().unwrap().to_string().contains("damaged-*"));
        }
        let (journal, _) = Journal::open(directory.path()).unwrap();
        journal.done(&[1, 3]);
        assert!(journal.damage().is_some());
        drop(journal);
        let (journal, left) = Journal::open(directory.path()).unwrap();
        assert_eq!(left, []);
        assert!(journal.damage().is_some());
        let kept = directory.path().join("damaged-0");
        assert_eq!(fs::read(&kept).unwrap(), damaged);
        fs::remove_file(kept).unwrap();
        assert_eq!(journal.damage(), None);
    }

    #[test]
    fn damaged_segments_are_bounded() {
        let directory = tempfile::tempdir().unwrap();
        for _ in 0..MOST_DAMAGED + 2 {
            let (journal, left) = Journal::open(directory.path()).unwrap();
            assert_eq!(left, []);
            journal.note(record(1, b"contents")).unwrap();
            drop(journal);
            let last = numbered(directory.path(), SEGMENT).unwrap().pop().unwrap();
            flip(&path_of(directory.path(), last), 20);
        }
        drop(Journal::open(directory.path()).unwrap());
        let kept: Vec<u64> = (2..2 + MOST_DAMAGED as u64).collect();
        assert_eq!(numbered(directory.path(), DAMAGED).unwrap(), kept);
    }

    #[test]
    fn a_journal_that_can_not_be_read_is_not_an_empty_one() {
        let directory = tempfile::tempdir().unwrap();
        let fault = |what: &str| {
            let error = Journal::open(directory.path()).unwrap_err();
            assert!(error.to_string().contains(what), "{error}");
        };
        assert!(!may_hold_records(&directory.path().join("missing")));
        drop(Journal::open(directory.path()).unwrap());
        assert!(!may_hold_records(directory.path()));
        // Not a name of a segment.
        fs::write(directory.path().join("journal-007"), "x").unwrap();
        drop(Journal::open(directory.path()).unwrap());
        assert!(!may_hold_records(directory.path()));
        fs::create_dir(path_of(directory.path(), 9)).unwrap();
        fault("journal-9");
        assert!(may_hold_records(directory.path()));
        fs::remove_dir(path_of(directory.path(), 9)).unwrap();
        let last = path_of(directory.path(), u64::MAX);
        fs::write(&last, line_of(record(1, b"contents")).encoded().unwrap()).unwrap();
        fault("journal-18446744073709551615");
        assert!(may_hold_records(directory.path()));
        fs::remove_file(last).unwrap();
        let (journal, _) = Journal::open(directory.path()).unwrap();
        for names in [&b"\xff\xff\n"[..], b"0a\n0g\n", b"0a\n\n", b"0a0\n"] {
            fs::write(directory.path().join(SESSIONS_FILE), names).unwrap();
            let error = journal.earlier_sessions().unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData);
            assert!(error.to_string().contains(SESSIONS_FILE), "{error}");
        }
    }

    #[test]
    fn files_are_removed_while_more_keeps_coming() {
        let directory = tempfile::tempdir().unwrap();
        let (journal, _) = Journal::open(directory.path()).unwrap();
        let contents: &'static [u8] = vec![1; 1 << 20].leak();
        for order in 1..=100 {
            journal.note(record(order, contents)).unwrap();
            if order > 1 {
                journal.done(&[order - 1]);
            }
        }
        assert!(numbered(directory.path(), SEGMENT).unwrap().len() <= 2);
        drop(journal);
        assert_eq!(Journal::open(directory.path()).unwrap().1, [record(100, contents)]);
    }
}
