//! Journal on this machine's disk of new files that were closed and are not on the server yet, so
//! that a killed gateway loses none. Records are appended; the next gateway replays them. A record
//! is removed when its file is on the server.
//!
//! A record is a length, a checksum (CRC-32) and a message. It is safe once write(2) has returned:
//! it survives the death of the process, but not of the machine. For the latter, fsync(2) of the
//! file waits for the server.
//!
//! [`crate::fs`] decides when to write a record, and replays them.

use std::{
    collections::{BTreeMap, HashMap},
    ffi::OsString,
    fs::{self, File, OpenOptions, TryLockError},
    io::{self, Write as _},
    os::unix::{ffi::OsStringExt as _, fs::OpenOptionsExt as _},
    path::{Path, PathBuf},
    slice,
    sync::{Mutex, MutexGuard, PoisonError},
};

use bytes::Bytes;
use posh_proto::volume as pb;
use prost::Message as _;

use crate::{
    disk::own_directory,
    store::{Caller, Put, Write},
};

/// Size at which a new segment begins, so that old segments can be removed under constant load.
const SEGMENT_BYTES: u64 = 16 << 20;
/// Size of a record's header: length and checksum.
const HEADER_BYTES: usize = 8;
/// Limit for a valid record: a file's contents, its paths, and room.
const RECORD_BYTES: usize = 8 << 20;
/// Prefix of the segments' file names.
const SEGMENT: &str = "journal-";
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
    current: Option<(u64, File, u64)>,
    /// Segment of each live record.
    records: HashMap<u64, u64>,
    /// Number of live records by segment.
    counts: BTreeMap<u64, usize>,
}

/// Encoded record: a new file, or the numbers of those that are on the server.
#[derive(Clone, PartialEq, prost::Message)]
struct Line {
    #[prost(uint64, tag = "1")]
    order: u64,
    #[prost(bytes = "vec", repeated, tag = "2")]
    home: Vec<Vec<u8>>,
    #[prost(message, optional, tag = "3")]
    caller: Option<pb::Caller>,
    #[prost(message, optional, tag = "4")]
    put: Option<pb::Write>,
    #[prost(uint64, repeated, tag = "5")]
    done: Vec<u64>,
}

impl Journal {
    /// Opens the journal of a directory, which is created if missing. Returns the records that the
    /// last journal has left, in order.
    ///
    /// # Errors
    /// The directory can't be created or read, or is in use ([`io::ErrorKind::WouldBlock`]).
    pub fn open(directory: &Path) -> io::Result<(Self, Vec<Record>)> {
        own_directory(directory)?;
        let lock =
            options().write(true).create(true).truncate(false).open(directory.join(LOCK_FILE))?;
        lock.try_lock().map_err(|error| match error {
            TryLockError::WouldBlock => io::Error::from(io::ErrorKind::WouldBlock),
            TryLockError::Error(error) => error,
        })?;
        let mut left: BTreeMap<u64, Record> = BTreeMap::new();
        let mut segments = segments(directory)?;
        segments.sort_unstable();
        for segment in &segments {
            for line in lines(&fs::read(path_of(directory, *segment))?) {
                line.done.iter().for_each(|done| drop(left.remove(done)));
                left.extend(line.record().map(|record| (record.order, record)));
            }
        }
        let mut state = State::default();
        for record in left.values() {
            // Counted for the last segment, which is removed last, whichever segment they are in.
            let at = segments.last().copied().unwrap_or_default();
            state.records.insert(record.order, at);
            *state.counts.entry(at).or_default() += 1;
        }
        segments.iter().filter(|at| !state.counts.contains_key(at) && left.is_empty()).for_each(
            |at| {
                let _ = fs::remove_file(path_of(directory, *at));
            },
        );
        let next = segments.last().map_or(0, |last| last + 1);
        state.current = Some((next, new_segment(directory, next)?, 0));
        Ok((
            Self { directory: directory.to_owned(), state: Mutex::new(state), lock },
            left.into_values().collect(),
        ))
    }

    /// Returns the names of earlier sessions that have sent records of this journal, and whose
    /// requests may still be in flight.
    ///
    /// # Errors
    /// The disk's.
    pub fn earlier_sessions(&self) -> io::Result<Vec<Bytes>> {
        match fs::read_to_string(self.directory.join(SESSIONS_FILE)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
            read => Ok(read?.lines().filter_map(name_of).collect()),
        }
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
        let line = Line {
            order,
            home: record.home.into_iter().map(OsString::into_vec).collect(),
            caller: Some((&record.caller).into()),
            put: Some(Write::Put(record.put).into()),
            done: Vec::new(),
        };
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
        let body = line.encode_to_vec();
        let length = u32::try_from(body.len()).map_err(|_| io::ErrorKind::FileTooLarge)?;
        let mut record = Vec::with_capacity(HEADER_BYTES + body.len());
        record.extend_from_slice(&length.to_le_bytes());
        record.extend_from_slice(&crc32fast::hash(&body).to_le_bytes());
        record.extend_from_slice(&body);
        let (number, mut file, bytes) = match self.current.take() {
            Some(current) if current.2 < SEGMENT_BYTES => current,
            other => {
                let next = other.map_or(0, |(number, ..)| number + 1);
                (next, new_segment(directory, next)?, 0)
            }
        };
        if let Err(error) = file.write_all(&record) {
            // An incomplete record would hide the ones after it.
            file.set_len(bytes)?;
            self.current = Some((number, file, bytes));
            return Err(error);
        }
        self.current = Some((number, file, bytes + record.len() as u64));
        Ok(number)
    }

    fn one_less(&mut self, directory: &Path, segment: u64) {
        let Some(count) = self.counts.get_mut(&segment) else { return };
        *count -= 1;
        // A segment is needed as long as an older one has live records, for its `done` lines.
        while let Some((oldest, 0)) = self.counts.first_key_value().map(|(at, count)| (*at, *count))
        {
            if self.current.as_ref().is_some_and(|(number, ..)| *number == oldest) {
                return;
            }
            self.counts.remove(&oldest);
            let _ = fs::remove_file(path_of(directory, oldest));
        }
    }

    /// Removes all segments but the current one, which is truncated.
    fn clear(&mut self, directory: &Path) {
        let current = self.current.as_ref().map(|(number, ..)| *number);
        for segment in segments(directory).unwrap_or_default() {
            if Some(segment) != current {
                let _ = fs::remove_file(path_of(directory, segment));
            }
        }
        self.counts.clear();
        if let Some((_, file, bytes)) = &mut self.current
            && file.set_len(0).is_ok()
        {
            *bytes = 0;
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

fn options() -> OpenOptions {
    let mut options = File::options();
    options.mode(0o600);
    options
}

fn path_of(directory: &Path, segment: u64) -> PathBuf {
    directory.join(format!("{SEGMENT}{segment}"))
}

fn new_segment(directory: &Path, number: u64) -> io::Result<File> {
    options().append(true).create(true).open(path_of(directory, number))
}

fn segments(directory: &Path) -> io::Result<Vec<u64>> {
    let number = |entry: io::Result<fs::DirEntry>| {
        entry.ok()?.file_name().to_str()?.strip_prefix(SEGMENT)?.parse().ok()
    };
    Ok(fs::read_dir(directory)?.filter_map(number).collect())
}

/// Decodes hexadecimal digits.
fn name_of(digits: &str) -> Option<Bytes> {
    let byte = |at: usize| u8::from_str_radix(digits.get(at..at + 2)?, 16).ok();
    (0..digits.len()).step_by(2).map(byte).collect::<Option<Vec<u8>>>().map(Bytes::from)
}

/// Decodes the lines up to the first incomplete or damaged one.
fn lines(mut bytes: &[u8]) -> Vec<Line> {
    let mut lines = Vec::new();
    while let Some((header, rest)) = bytes.split_at_checked(HEADER_BYTES) {
        let number = |at: usize| header[at..at + 4].try_into().map_or(0, u32::from_le_bytes);
        let (length, sum) = (number(0) as usize, number(4));
        let Some((body, rest)) = rest.split_at_checked(length).filter(|_| length <= RECORD_BYTES)
        else {
            break;
        };
        match Line::decode(body) {
            Ok(line) if crc32fast::hash(body) == sum => lines.push(line),
            _ => break,
        }
        bytes = rest;
    }
    lines
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
        assert!(segments(directory.path()).unwrap().len() <= 2);
        drop(journal);
        assert_eq!(Journal::open(directory.path()).unwrap().1, [record(100, contents)]);
    }
}
