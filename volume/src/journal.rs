//! What was closed and is not on the server yet, on this machine's disk: so that a gateway that is
//! killed loses nothing of it. Records are appended and read again by the next one; they are gone
//! when what they tell of is on the server.
//!
//! A record is length, checksum (CRC-32) and a message. It is there when write(2) has returned:
//! that holds against the death of a process, not against that of the machine, for which fsync(2)
//! asks the server.
//!
//! Not here: when something is noted, and how it is sent again ([`crate::fs`]).

use std::{
    collections::{BTreeMap, HashMap},
    ffi::OsString,
    fs::{self, File, OpenOptions, TryLockError},
    io::{self, Write as _},
    os::unix::{
        ffi::OsStringExt as _,
        fs::{DirBuilderExt as _, OpenOptionsExt as _},
    },
    path::{Path, PathBuf},
    slice,
    sync::{Mutex, MutexGuard, PoisonError},
};

use bytes::Bytes;
use posh_proto::volume as pb;
use prost::Message as _;

use crate::{
    disk::own_directory,
    store::{Caller, NewFile, Put, Write},
};

/// A new file is begun beyond, so that what is long since on the server can be removed while more
/// keeps coming.
const SEGMENT_BYTES: u64 = 16 << 20;
/// Length and checksum.
const HEADER_BYTES: usize = 8;
/// The longest record that is believed: a file's contents, its paths, and room.
const RECORD_BYTES: usize = 8 << 20;
/// What the names of the files begin with.
const SEGMENT: &str = "journal-";
/// Names of the sessions whose requests may still be on their way, in hexadecimal digits, one a
/// line.
const SESSIONS_FILE: &str = "sessions";
/// Held by whoever uses the directory.
const LOCK_FILE: &str = "lock";

/// A new file that the server may not have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// Its number among all of one process.
    pub order: u64,
    /// The names from the root to the directory that `put` begins at.
    pub home: Vec<OsString>,
    /// Who made it.
    pub caller: Caller,
    /// What it is, and where.
    pub put: Put,
}

/// The records of one volume.
#[derive(Debug)]
pub struct Journal {
    directory: PathBuf,
    state: Mutex<State>,
    /// Locked until the directory is given up, at the latest as long as this value lives.
    lock: File,
}

#[derive(Debug, Default)]
struct State {
    /// No new record is taken.
    is_ending: bool,
    /// Its session goes on when the directory is the next journal's.
    is_handed_over: bool,
    current: Option<(u64, File, u64)>,
    /// Where each record is that still counts.
    records: HashMap<u64, u64>,
    /// How many of each file count; without the current one.
    counts: BTreeMap<u64, usize>,
}

/// A record as it is written: of a new file, or of those that are on the server.
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
    /// Opens the journal of a directory, which is made if need be, with what the last one has left,
    /// in order.
    ///
    /// # Errors
    /// The directory can't be made or read, or is in use ([`io::ErrorKind::WouldBlock`]).
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
            // They count until they are done, wherever they are: the last file is the last to go.
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

    /// The names of the sessions that have sent what is in the journal, and whose requests may
    /// still be on their way.
    ///
    /// # Errors
    /// The disk's.
    pub fn earlier_sessions(&self) -> io::Result<Vec<Bytes>> {
        match fs::read_to_string(self.directory.join(SESSIONS_FILE)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
            read => Ok(read?.lines().filter_map(name_of).collect()),
        }
    }

    /// What is in the journal is sent by that session from now on, and was by these earlier ones,
    /// none of which is known to have ended.
    ///
    /// # Errors
    /// The disk's: the next one would not hear of this session.
    pub fn begin_session(&self, earlier: &[Bytes], name: &Bytes) -> io::Result<()> {
        self.note_sessions(&[earlier, slice::from_ref(name)].concat())
    }

    /// All or none.
    fn note_sessions(&self, names: &[Bytes]) -> io::Result<()> {
        let digits =
            |name: &Bytes| name.iter().map(|byte| format!("{byte:02x}")).collect::<String>() + "\n";
        let (new, path) = (self.directory.join("sessions.new"), self.directory.join(SESSIONS_FILE));
        let mut file = options().write(true).create(true).truncate(true).open(&new)?;
        file.write_all(names.iter().map(digits).collect::<String>().as_bytes())?;
        // What an earlier machine's end has left must not be nothing.
        file.sync_data()?;
        fs::rename(new, path)
    }

    /// The order of the next record must be above.
    #[must_use]
    pub fn last_order(&self) -> u64 {
        self.state().records.keys().copied().max().unwrap_or_default()
    }

    /// A new file, or how it is now.
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

    /// The server has these, or never will.
    pub fn done(&self, orders: &[u64]) {
        let mut state = self.state();
        let segments: Vec<u64> =
            orders.iter().filter_map(|order| state.records.remove(order)).collect();
        if segments.is_empty() {
            return;
        }
        if !state.records.is_empty() {
            // If it can't be written, they are put once more, and found to be there.
            let _ =
                state.append(&self.directory, &Line { done: orders.to_vec(), ..Line::default() });
        }
        segments.into_iter().for_each(|segment| state.one_less(&self.directory, segment));
        if state.records.is_empty() {
            state.clear(&self.directory);
            self.give_up_if_done(&state);
        }
    }

    /// Takes no new record from now on, and gives the directory up to the next journal as soon as
    /// none is left.
    ///
    /// Invariant: who holds the lock alone writes to the directory, and alone sends what is in it.
    /// So the lock goes together with the last record, and while none can be added: both are seen
    /// to under one mutex.
    pub fn hand_over(&self) {
        let mut state = self.state();
        (state.is_ending, state.is_handed_over) = (true, true);
        self.give_up_if_done(&state);
    }

    /// Gives the directory up to the next journal, with what is in it. To be called when nothing of
    /// it is sent any more.
    pub fn abandon(&self) {
        let mut state = self.state();
        *state = State { is_ending: true, ..State::default() };
        self.give_up_if_done(&state);
    }

    /// Whether new records are taken.
    #[must_use]
    pub fn is_open(&self) -> bool {
        !self.state().is_ending
    }

    fn give_up_if_done(&self, state: &State) {
        if state.is_ending && state.records.is_empty() {
            if state.is_handed_over {
                // The session goes on, with other things.
                let _ = fs::remove_file(self.directory.join(SESSIONS_FILE));
            }
            // An error: the lock goes with the descriptor.
            let _ = self.lock.unlock();
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// In which file it is.
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
            // What is half written must not hide what comes after it.
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
        // What older files say of done and undone is of use as long as any of them is needed.
        while let Some((oldest, 0)) = self.counts.first_key_value().map(|(at, count)| (*at, *count))
        {
            if self.current.as_ref().is_some_and(|(number, ..)| *number == oldest) {
                return;
            }
            self.counts.remove(&oldest);
            let _ = fs::remove_file(path_of(directory, oldest));
        }
    }

    /// Nothing counts any more.
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

/// Writes what a record would have made on the server to a path of this machine. Directories above
/// it are made; nothing is replaced.
///
/// # Errors
/// The disk's; [`io::ErrorKind::AlreadyExists`].
pub fn write_out(put: &Put, path: &Path) -> io::Result<()> {
    let explained =
        |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
    let parent = path.parent().unwrap_or(path);
    fs::DirBuilder::new().recursive(true).mode(0o700).create(parent).map_err(explained)?;
    match &put.what {
        NewFile::Regular { data } => {
            let mode = put.changes.mode.unwrap_or(put.mode) & 0o777;
            let mut file = File::options()
                .mode(mode)
                .write(true)
                .create_new(true)
                .open(path)
                .map_err(explained)?;
            file.write_all(data).and_then(|()| file.sync_all()).map_err(explained)
        }
        NewFile::Symlink { target } => std::os::unix::fs::symlink(target, path).map_err(explained),
        NewFile::Directory => {
            fs::DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(explained)
        }
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

/// What hexadecimal digits tell.
fn name_of(digits: &str) -> Option<Bytes> {
    let byte = |at: usize| u8::from_str_radix(digits.get(at..at + 2)?, 16).ok();
    (0..digits.len()).step_by(2).map(byte).collect::<Option<Vec<u8>>>().map(Bytes::from)
}

/// As far as they are whole.
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
    use crate::store::{Changes, FileId};

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
            caller: Caller { uid: 1, gid: 2, groups: [3].into() },
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

    #[test]
    fn what_is_written_out_replaces_nothing() {
        let top = tempfile::tempdir().unwrap();
        let path = top.path().join("to/d/f1");
        let put = record(1, b"contents").put;
        write_out(&put, &path).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"contents");
        let again = write_out(&record(1, b"other").put, &path).unwrap_err();
        assert_eq!(again.kind(), io::ErrorKind::AlreadyExists);
        assert!(again.to_string().contains("to/d/f1"), "{again}");
        assert_eq!(fs::read(&path).unwrap(), b"contents");
    }
}
