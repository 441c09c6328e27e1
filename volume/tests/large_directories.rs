//! Cached names are bounded, however many a server lists; and all names are listed.
#![allow(clippy::unwrap_used)]

use std::{
    collections::HashMap,
    ffi::OsString,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use async_trait::async_trait;
use posh_volume::{
    fs::{Invalidate, MAX_FILES, ROOT, Settings, Volume},
    store::*,
};
use tokio::sync::mpsc::UnboundedReceiver;

/// As docs/security.md states it.
const BOUND_BYTES: u64 = 64 << 20;
/// Names that are told in one answer may come on top, until the next.
const ANSWER_BYTES: u64 = 1 << 20;

/// The root's directories have the inodes from 2 on, all of the same size; all other names lead to
/// one file, as hard links do.
#[derive(Clone)]
struct Large {
    directories: u64,
    names: u64,
    name_bytes: usize,
    /// How many names of each directory were asked for, and how many lookups of names there were.
    asked: Arc<Mutex<(HashMap<u64, u64>, u64)>>,
}

const FILE: u64 = 1 << 40;

fn entry(inode: u64) -> Entry {
    let time = Time::default();
    let attributes = Attributes {
        id: FileId { inode, generation: 0 },
        kind: if inode == FILE { Kind::Regular } else { Kind::Directory },
        mode: 0o755,
        uid: 0,
        gid: 0,
        links: 1,
        size: 1,
        blocks: 8,
        rdev: 0,
        atime: time,
        mtime: time,
        ctime: time,
        version: 1,
        acls: None,
    };
    Entry {
        attributes,
        leases: Leases::ATTRIBUTES | Leases::ENTRIES | Leases::DATA,
        stamp: Stamp(1),
    }
}

impl Large {
    fn new(directories: u64, names: u64, name_bytes: usize) -> Self {
        Self { directories, names, name_bytes, asked: Arc::default() }
    }

    fn name(&self, index: u64) -> OsString {
        format!("{index:0width$}", width = self.name_bytes).into()
    }

    fn size(&self, directory: u64) -> u64 {
        if directory == 1 { self.directories } else { self.names }
    }

    fn inside(&self, directory: u64, index: u64) -> u64 {
        if directory == 1 { index + 2 } else { FILE }
    }

    fn walk(&self, from: FileId, names: &[OsString]) -> Walked {
        self.asked.lock().unwrap().1 += 1;
        let index = names[0]
            .to_str()
            .unwrap()
            .parse::<u64>()
            .ok()
            .filter(|index| *index < self.size(from.inode));
        let entries: Vec<Entry> =
            index.map(|index| entry(self.inside(from.inode, index))).into_iter().collect();
        let error = entries.is_empty().then_some(Errno::ENOENT);
        Walked { from: entry(from.inode), entries, error }
    }

    fn list(&self, directory: u64, cookie: u64, limit: u32) -> Listing {
        let end = (cookie + u64::from(limit)).min(self.size(directory));
        let listed = |index| {
            let entry = entry(self.inside(directory, index));
            let (inode, kind) = (entry.attributes.id.inode, entry.attributes.kind);
            Listed { name: self.name(index), cookie: index + 1, entry: Some(entry), inode, kind }
        };
        *self.asked.lock().unwrap().0.entry(directory).or_default() += end - cookie;
        let names = (cookie..end).map(listed).collect();
        Listing { directory: entry(directory), names, is_last: end == self.size(directory) }
    }

    fn open(&self) -> (Arc<Volume>, UnboundedReceiver<Invalidate>) {
        Volume::new(
            Arc::new(self.clone()),
            Settings { sync: false, memory_bytes: 1 << 20, most_files: MAX_FILES },
            None,
        )
    }
}

#[async_trait]
impl Store for Large {
    fn root(&self) -> FileId {
        FileId { inode: 1, generation: 0 }
    }

    async fn call(&self, _: &Caller, op: Op) -> Result<Answer, Errno> {
        tokio::task::yield_now().await;
        Ok(match op {
            Op::Walk { from, names } => Answer::Walked(self.walk(from, &names)),
            Op::Attributes(place) => Answer::Entry(entry(place.file.inode)),
            Op::List { directory, cookie, limit } => {
                Answer::Listing(self.list(directory.inode, cookie, limit))
            }
            _ => Answer::Done,
        })
    }

    async fn read(&self, _: &Caller, _: Vec<ReadPart>) -> Pieces {
        Box::pin(tokio_stream::empty())
    }

    async fn write(&self, _: &Caller, _: Vec<Write>) -> Result<Vec<Result<Entry, Errno>>, Errno> {
        Err(Errno::EROFS)
    }

    fn notices(&self) -> Notices {
        Box::pin(tokio_stream::pending())
    }

    fn valid_until(&self) -> Instant {
        Instant::now() + Duration::from_secs(3600)
    }

    fn state(&self) -> StoreState {
        StoreState::default()
    }
}

/// readdir(3) with attributes, from an offset to the end. The names, how many, and the number of
/// the last file.
async fn list(
    volume: &Arc<Volume>,
    open: u64,
    number: u64,
    from: u64,
    mut each: impl FnMut(&OsString),
) -> (u64, u64) {
    let (mut next, mut count, mut last_file) = (from, 0, 0);
    loop {
        let names = volume.read_directory(open, next).await.unwrap();
        let Some(last) = names.last() else { return (count, last_file) };
        next = last.next;
        let take =
            |file: &mut u64, _: &posh_volume::fs::Name, told: Option<posh_volume::fs::Told>| {
                *file = told.map_or(*file, |told| told.number);
                true
            };
        (last_file, _) =
            volume.tell_all(number, &names, last_file, take, |file, count| (file, count));
        for name in names.iter().filter(|name| name.name != "." && name.name != "..") {
            each(&name.name);
            count += 1;
        }
        assert!(volume.state().names_bytes <= BOUND_BYTES + ANSWER_BYTES, "{:?}", volume.state());
    }
}

async fn list_all(volume: &Arc<Volume>, number: u64) -> u64 {
    let open = volume.open_directory(&Caller::default(), number).unwrap();
    let (count, _) = list(volume, open, number, 0, |_| {}).await;
    volume.close_directory(open);
    count
}

async fn find(store: &Large, volume: &Arc<Volume>) {
    assert_eq!(list_all(volume, ROOT).await, store.directories);
    for index in 0..store.directories {
        let at = NameIn { parent: ROOT, name: &store.name(index) };
        let found = volume.lookup(&Caller::default(), at).await.unwrap();
        let number = volume.tell(at, &found, |told| told.number);
        assert_eq!(list_all(volume, number).await, store.names);
    }
}

#[tokio::test]
async fn names_of_many_directories_stay_below_the_bound() {
    let store = Large::new(24, 15_000, 240);
    let (volume, mut invalidations) = store.open();
    find(&store, &volume).await;
    assert!(volume.state().names_bytes > BOUND_BYTES / 2, "nothing is kept: {:?}", volume.state());
    // The kernel was made to forget what nobody here would tell it of.
    let mut forgotten = 0;
    while let Ok(invalidate) = invalidations.try_recv() {
        forgotten +=
            invalidate.names.iter().flatten().map(|(_, names)| names.len() as u64).sum::<u64>();
    }
    assert!(forgotten >= store.names, "{forgotten}");
    // What was dropped is asked for again, and only that.
    let asked = || store.asked.lock().unwrap().clone();
    let before = asked();
    let name = store.name(store.names - 1);
    // Their inodes, which are free.
    let (first, last) = (2, store.directories + 1);
    assert!(volume.lookup(&Caller::default(), NameIn { parent: last, name: &name }).await.is_ok());
    assert_eq!(asked().1, before.1, "the last one is remembered");
    assert!(volume.lookup(&Caller::default(), NameIn { parent: first, name: &name }).await.is_ok());
    assert_eq!(asked().1, before.1 + 1);
    let absent = store.name(store.names);
    assert_eq!(
        volume
            .lookup(&Caller::default(), NameIn { parent: first, name: &absent })
            .await
            .unwrap_err(),
        Errno::ENOENT
    );
    assert_eq!(asked().1, before.1 + 2, "nobody knows here that it is not there");
}

#[tokio::test]
async fn a_million_names_are_listed_and_not_remembered() {
    let store = Large::new(1, 1_000_000, 8);
    let (volume, _invalidations) = store.open();
    list_all(&volume, ROOT).await;
    let at = NameIn { parent: ROOT, name: &store.name(0) };
    let found = volume.lookup(&Caller::default(), at).await.unwrap();
    let number = volume.tell(at, &found, |told| told.number);
    let open = volume.open_directory(&Caller::default(), number).unwrap();
    let mut expected = 0;
    let check = |name: &OsString| {
        assert_eq!(*name, store.name(expected));
        expected += 1;
    };
    assert_eq!(list(&volume, open, number, 0, check).await.0, store.names);
    // seekdir(3), back and forth, past the end; and once more from the beginning.
    for index in [999_999, 5, 700_001, 123_456, 0, 400_000] {
        let names = volume.read_directory(open, index + 2).await.unwrap();
        assert_eq!((&names[0].name, names[0].next), (&store.name(index), index + 3));
    }
    assert!(volume.read_directory(open, store.names + 2).await.unwrap().is_empty());
    assert!(volume.read_directory(open, u64::MAX).await.unwrap().is_empty());
    assert_eq!(volume.read_directory(open, 0).await.unwrap()[2].name, store.name(0));
}

#[tokio::test]
async fn what_is_listed_ahead_is_a_small_share() {
    let store = Large::new(200, 250_000, 230);
    let (volume, _invalidations) = store.open();
    list_all(&volume, ROOT).await;
    let at = NameIn { parent: ROOT, name: &store.name(0) };
    let found = volume.lookup(&Caller::default(), at).await.unwrap();
    let number = volume.tell(at, &found, |told| told.number);
    let open = volume.open_directory(&Caller::default(), number).unwrap();
    volume.read_directory(open, 0).await.unwrap();
    for _ in 0..10_000 {
        tokio::task::yield_now().await;
    }
    let asked = store.asked.lock().unwrap().0.clone();
    let ahead: u64 =
        asked.iter().filter(|(directory, _)| **directory > 2).map(|(_, names)| names).sum();
    assert!(ahead > 0 && ahead < 60_000, "{ahead} names that nobody has asked for");
    assert!(volume.state().names_bytes <= BOUND_BYTES / 4, "{:?}", volume.state());
}

#[tokio::test]
async fn a_large_directory_is_in_memory_part_by_part() {
    let store = Large::new(1, 1_000_000, 100);
    let (volume, _invalidations) = store.open();
    let at = NameIn { parent: ROOT, name: &store.name(0) };
    let found = volume.lookup(&Caller::default(), at).await.unwrap();
    let number = volume.tell(at, &found, |told| told.number);
    let open = volume.open_directory(&Caller::default(), number).unwrap();
    assert_eq!(volume.read_directory(open, 0).await.unwrap()[2].name, store.name(0));
    let asked = store.asked.lock().unwrap().0[&2];
    assert!(asked > 10_000 && asked < 100_000, "{asked} names for the first");
}
