//! Appends that are answered before the server has them, over a link that loses answers: each is
//! there once, in its order, and where an answer was lost that is said.
#![allow(clippy::unwrap_used)]

use std::{
    ffi::OsStr,
    fs::{self, OpenOptions},
    io::Write as _,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Instant,
};

use async_trait::async_trait;
use nix::unistd::{getegid, geteuid};
use posh_volume::{
    directory::{Directory, DirectorySession, Liveness, Machine, Mutability, Rights},
    fs::{ROOT, Settings, Source, Volume},
    store::*,
};

const RECORDS: usize = 3000;

/// Requests until this one lose their answers, unless their turn says otherwise.
const LOSSES: usize = 12;

fn record(writer: usize, number: usize) -> Vec<u8> {
    format!("{writer}.{number:06}|{}\n", "x".repeat(60)).into_bytes()
}

/// Store that loses requests or their answers in turn, and adds another program's appends.
struct Lossy {
    inner: DirectorySession,
    log: PathBuf,
    requests: Arc<AtomicUsize>,
}

impl Lossy {
    /// Another program's.
    fn append_another(&self, number: usize) {
        OpenOptions::new()
            .append(true)
            .open(&self.log)
            .unwrap()
            .write_all(&record(1, number))
            .unwrap();
    }
}

#[async_trait]
impl Store for Lossy {
    fn root(&self) -> FileId {
        self.inner.root()
    }

    async fn call(&self, caller: &Caller, op: Op) -> Result<Answer, Errno> {
        self.inner.call(caller, op).await
    }

    async fn read(&self, caller: &Caller, parts: Vec<ReadPart>) -> Pieces {
        self.inner.read(caller, parts).await
    }

    async fn write(
        &self,
        caller: &Caller,
        mut writes: Vec<Write>,
    ) -> Result<Vec<Result<Entry, Errno>>, Errno> {
        let turn = self.requests.fetch_add(1, Ordering::Relaxed);
        self.append_another(2 * turn);
        let how = if turn < LOSSES { turn % 4 } else { 3 };
        match how {
            0 => return Err(Errno::EIO),
            1 => writes.truncate(writes.len() / 2),
            _ => {}
        }
        let answer = self.inner.write(caller, writes).await;
        self.append_another(2 * turn + 1);
        if how == 3 { answer } else { Err([Errno::EIO, Errno::ETIMEDOUT][turn / 4 % 2]) }
    }

    fn notices(&self) -> Notices {
        self.inner.notices()
    }

    fn valid_until(&self) -> Instant {
        self.inner.valid_until()
    }

    fn state(&self) -> StoreState {
        self.inner.state()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn appends_whose_answers_are_lost_happen_once() {
    let root = tempfile::tempdir().unwrap();
    let log = root.path().join("log");
    fs::write(&log, "first\n").unwrap();
    let machine = Machine::start().unwrap();
    let directory =
        Directory::open(machine, root.path(), Rights::Own, Mutability::ReadWrite).unwrap();
    let requests = Arc::new(AtomicUsize::new(0));
    let inner = DirectorySession::open(directory, Liveness::Own);
    let store = Arc::new(Lossy { inner, log: log.clone(), requests: Arc::clone(&requests) });
    let (volume, mut invalidations) =
        Volume::new(store, Settings { sync: false, memory_bytes: 4 << 20, most_files: 1000 }, None);
    tokio::spawn(async move { while invalidations.recv().await.is_some() {} });
    let caller = Caller {
        uid: geteuid().as_raw(),
        gid: getegid().as_raw(),
        groups: Arc::default(),
        is_guest: false,
    };
    let at = NameIn { parent: ROOT, name: OsStr::new("log") };
    let entry = volume.lookup(&caller, at).await.unwrap();
    let number = volume.tell(at, &entry, |told| told.number);
    let flags = OpenFlags::WRITE | OpenFlags::APPEND;
    let open = volume.open(&caller, number, flags).await.unwrap();
    let reader = volume.open(&caller, number, OpenFlags::READ).await.unwrap();
    for number in 0..RECORDS {
        // Wherever the kernel thinks that it is.
        volume.write(open.number, 0, record(0, number).into(), Source::Append).await.unwrap();
        if number % (RECORDS / LOSSES) == 0 {
            let _ = volume.attributes(&caller, entry.attributes.id.inode).await;
        }
    }
    let flushed = loop {
        let flushed = volume.flush(open.number, None).await;
        if flushed != Err(Errno::ETIMEDOUT) {
            break flushed;
        }
    };
    // Others may have appended the same bytes. That is said to each descriptor that may write,
    // until fsync(2) has said it: a child that ends closes its own without looking.
    assert_eq!(flushed, Err(Errno::EIO));
    assert_eq!(volume.flush(open.number, None).await, Err(Errno::EIO));
    assert_eq!(volume.sync(open.number, Synced::Everything).await, Err(Errno::EIO));
    assert_eq!(volume.sync(open.number, Synced::Everything).await, Ok(()));
    assert_eq!(volume.flush(open.number, None).await, Ok(()));
    assert_eq!(volume.flush(reader.number, None).await, Ok(()));
    assert_eq!(volume.sync(reader.number, Synced::Everything).await, Err(Errno::EIO));
    volume.release(reader.number, None).await.unwrap();
    volume.release(open.number, None).await.unwrap();
    let requests = requests.load(Ordering::Relaxed);
    assert!(requests > LOSSES && requests < RECORDS / 10, "{requests} requests");
    let content = fs::read(&log).unwrap();
    let of = |writer: u8| {
        content.split_inclusive(|byte| *byte == b'\n').filter(move |line| line[0] == writer)
    };
    assert!(
        of(b'0').eq((0..RECORDS).map(|number| record(0, number))),
        "{} of {RECORDS}",
        of(b'0').count()
    );
    assert!(
        of(b'1').eq((0..2 * requests)
            .map(|number| record(1, number))
            .filter(|line| content_has(&content, line)))
    );
}

fn content_has(content: &[u8], line: &[u8]) -> bool {
    content.split_inclusive(|byte| *byte == b'\n').any(|there| there == line)
}
