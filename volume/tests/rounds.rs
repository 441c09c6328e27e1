//! How many round trips a program waits for: a store that answers nothing before nobody has
//! anything more to ask, and then all at once. What counts is not time, so that it is the same on
//! every machine.
#![allow(clippy::unwrap_used)]

use std::{
    cell::Cell,
    ffi::OsString,
    future::Future,
    path::PathBuf,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use async_trait::async_trait;
use bytes::Bytes;
use posh_volume::{
    disk::DiskCache,
    fs::{Expected, MAX_FILES, ROOT, Settings, Use, Volume},
    store::*,
};
use tokio::sync::oneshot;

const MEMORY_BYTES: u64 = 64 << 20;

/// Contents of each file.
const CONTENTS: Bytes = Bytes::from_static(&[b'x'; 2000]);

/// So often everybody else has had a turn: then nobody has anything to do.
const QUIET: usize = 500;

/// A tree of two levels. The root's inode is 1; directories have those after it, and each its files
/// from `1000 × its own` on.
#[derive(Clone, Copy)]
struct Tree {
    directories: u64,
    files: u64,
}

/// The tree, far away.
#[derive(Clone)]
struct Far {
    tree: Tree,
    waiting: Arc<Mutex<Vec<oneshot::Sender<()>>>>,
}

fn id(inode: u64) -> FileId {
    FileId { inode, generation: 0 }
}

fn entry(inode: u64) -> Entry {
    let kind = if inode < 1000 * 2 { Kind::Directory } else { Kind::Regular };
    let (time, size) = (Time::default(), CONTENTS.len() as u64);
    let attributes = Attributes {
        id: id(inode),
        kind,
        mode: 0o755,
        uid: 0,
        gid: 0,
        links: 1,
        size,
        blocks: 8,
        rdev: 0,
        atime: time,
        mtime: time,
        ctime: time,
        version: 1,
        acls: Some(Acls::empty()),
    };
    let leases = Leases::ATTRIBUTES | Leases::ENTRIES | Leases::DATA;
    Entry { attributes, leases, stamp: Stamp(1) }
}

fn name(inode: u64) -> OsString {
    format!("n{inode:07}").into()
}

impl Far {
    async fn round(&self) {
        let (sender, answered) = oneshot::channel();
        self.waiting.lock().unwrap().push(sender);
        answered.await.unwrap();
    }

    fn inside(&self, directory: u64) -> std::ops::Range<u64> {
        if directory == 1 {
            2..2 + self.tree.directories
        } else {
            directory * 1000..directory * 1000 + self.tree.files
        }
    }

    fn walk(&self, from: FileId, names: &[OsString]) -> Walked {
        let mut walked = Walked { from: entry(from.inode), entries: Vec::new(), error: None };
        let mut at = from.inode;
        for wanted in names {
            let Some(found) = self.inside(at).find(|inode| name(*inode) == *wanted) else {
                walked.error = Some(Errno::ENOENT);
                break;
            };
            walked.entries.push(entry(found));
            at = found;
        }
        walked
    }

    fn list(&self, directory: FileId) -> Listing {
        let listed = |inode| {
            let entry = entry(inode);
            Listed {
                name: name(inode),
                cookie: inode,
                entry: Some(entry),
                inode,
                kind: entry.attributes.kind,
            }
        };
        let names = self.inside(directory.inode).map(listed).collect();
        Listing { directory: entry(directory.inode), names, is_last: true }
    }
}

#[async_trait]
impl Store for Far {
    fn root(&self) -> FileId {
        id(1)
    }

    async fn call(&self, _: &Caller, op: Op) -> Result<Answer, Errno> {
        self.round().await;
        Ok(match op {
            Op::Walk { from, names } => Answer::Walked(self.walk(from, &names)),
            Op::Attributes(place) => Answer::Entry(entry(place.file.inode)),
            Op::List { directory, .. } => Answer::Listing(self.list(directory)),
            Op::Open { place: Place { file, .. }, .. } => Answer::Opened {
                handle: Handle(file.inode),
                entry: entry(file.inode),
                parent: None,
            },
            _ => Answer::Done,
        })
    }

    async fn read(&self, _: &Caller, parts: Vec<ReadPart>) -> Pieces {
        self.round().await;
        let piece = |(part, of): (u32, ReadPart)| {
            let entry = Some(entry(of.place.file.inode));
            Ok(Piece { part, offset: 0, data: Ok(CONTENTS), is_last: true, entry })
        };
        Box::pin(tokio_stream::iter((0..).zip(parts).map(piece).collect::<Vec<_>>()))
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

/// Answers, round by round, for as long as it is asked.
async fn answer(far: &Far, rounds: &Cell<usize>) {
    let mut idle = 0;
    loop {
        for _ in 0..QUIET {
            tokio::task::yield_now().await;
        }
        let waiting = std::mem::take(&mut *far.waiting.lock().unwrap());
        if waiting.is_empty() {
            // Perhaps for this machine's disk.
            idle += 1;
            assert!(idle < 5000, "the program waits, and nobody is asked for anything");
            tokio::time::sleep(Duration::from_millis(1)).await;
            continue;
        }
        idle = 0;
        rounds.set(rounds.get() + 1);
        waiting.into_iter().for_each(|waiting| waiting.send(()).unwrap_or_default());
    }
}

/// Returns the number of rounds that a program takes.
fn rounds<F: Future<Output = ()>>(tree: Tree, program: impl FnOnce(Arc<Volume>) -> F) -> usize {
    rounds_with(tree, None, program)
}

/// Like [`rounds`], for a volume with a disk cache.
fn rounds_with<F: Future<Output = ()>>(
    tree: Tree,
    disk: Option<DiskCache>,
    program: impl FnOnce(Arc<Volume>) -> F,
) -> usize {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let rounds = Cell::new(0);
    runtime.block_on(async {
        let far = Far { tree, waiting: Arc::default() };
        let settings = Settings { sync: false, memory_bytes: MEMORY_BYTES, most_files: MAX_FILES };
        let (volume, _invalidations) = Volume::new(Arc::new(far.clone()), settings, disk);
        tokio::select! {
            biased;
            () = program(volume) => {}
            () = answer(&far, &rounds) => {}
        }
    });
    rounds.get()
}

/// All that opendir(3) and readdir(3) give, by the kernel's numbers.
async fn list(volume: &Arc<Volume>, number: u64) -> Vec<(OsString, u64)> {
    let open = volume.open_directory(&Caller::default(), number).unwrap();
    let (mut all, mut next) = (Vec::new(), 0);
    loop {
        let names = volume.read_directory(open, next).await.unwrap();
        let Some(last) = names.last() else { break };
        next = last.next;
        let known = names.into_iter().filter_map(|name| Some((name.name, name.entry?)));
        for (name, entry) in known {
            let number =
                volume.tell(NameIn { parent: number, name: &name }, &entry, |told| told.number);
            all.push((name, number));
        }
    }
    volume.close_directory(open);
    all
}

/// find(1)
async fn find(volume: Arc<Volume>) {
    let mut seen = 0;
    for (_, directory) in list(&volume, ROOT).await {
        for (_, file) in list(&volume, directory).await {
            volume.attributes(&Caller::default(), file).await.unwrap();
            seen += 1;
        }
    }
    assert!(seen > 0);
}

async fn read(volume: &Arc<Volume>, file: u64) {
    let opened = volume.open(&Caller::default(), file, OpenFlags::READ).await.unwrap();
    assert_eq!(volume.read(opened.number, 0, 1 << 17).await.unwrap(), CONTENTS);
    volume.release(opened.number, None).await.unwrap();
}

#[test]
fn directories_of_a_walk_are_listed_ahead() {
    let taken = rounds(Tree { directories: 1000, files: 20 }, find);
    assert!(taken <= 10, "{taken} round trips");
}

/// The kernel asks for the ACL of whatever anybody but its owner uses.
#[test]
fn acls_that_are_not_there_are_not_asked_for() {
    let taken = rounds(Tree { directories: 1000, files: 20 }, |volume| async move {
        find(Arc::clone(&volume)).await;
        for (_, directory) in list(&volume, ROOT).await {
            for (number, file) in
                list(&volume, directory).await.into_iter().chain([(name(1), directory)])
            {
                for acl in ["system.posix_acl_access", "system.posix_acl_default"] {
                    let found = volume.extended(&Caller::default(), file, acl.as_ref()).await;
                    assert_eq!(found, Err(Errno::ENODATA), "{number:?}");
                }
            }
        }
    });
    assert!(taken <= 10, "{taken} round trips");
}

#[test]
fn files_are_fetched_ahead_over_many_directories() {
    // cat */*
    let taken = rounds(Tree { directories: 50, files: 20 }, |volume| async move {
        let mut files = Vec::new();
        for (_, directory) in list(&volume, ROOT).await {
            files.extend(list(&volume, directory).await);
        }
        for (_, file) in files {
            read(&volume, file).await;
        }
    });
    assert!(taken <= 24, "{taken} round trips");
}

#[test]
fn a_program_that_goes_through_a_tree_has_its_files_fetched_ahead() {
    // grep -r
    let taken = rounds(Tree { directories: 50, files: 20 }, |volume| async move {
        for (_, directory) in list(&volume, ROOT).await {
            for (_, file) in list(&volume, directory).await {
                read(&volume, file).await;
            }
        }
    });
    assert!(taken <= 24, "{taken} round trips");
}

/// By name, as a program that was given names.
async fn read_named(volume: &Arc<Volume>, directory: u64, file: u64) {
    let caller = Caller::default();
    let mut number = ROOT;
    for name in [name(directory), name(file)] {
        let entry = volume.lookup(&caller, NameIn { parent: number, name: &name }).await.unwrap();
        number = volume.tell(NameIn { parent: number, name: &name }, &entry, |told| told.number);
    }
    read(volume, number).await;
}

#[test]
fn what_a_program_was_told_to_read_is_there_when_it_opens_it() {
    let tree = Tree { directories: 10, files: 100 };
    let taken = rounds(tree, |volume| async move {
        let paths = (2..12)
            .flat_map(|directory| (0..100).map(move |file| (directory, directory * 1000 + file)));
        let expected = paths.clone().map(|(directory, file)| {
            Expected::File(PathBuf::from_iter([name(directory), name(file)]))
        });
        let expectation = volume.will_read(&Caller::default(), expected.collect());
        for (directory, file) in paths {
            read_named(&volume, directory, file).await;
        }
        drop(expectation);
    });
    assert!(taken <= 8, "{taken} round trips");
}

#[test]
fn a_tree_that_is_going_to_be_read_is_fetched_when_its_first_file_is_opened() {
    let taken = rounds(Tree { directories: 50, files: 20 }, |volume| async move {
        let _expectation =
            volume.will_read(&Caller::default(), vec![Expected::Tree(PathBuf::new())]);
        for (_, directory) in list(&volume, ROOT).await {
            for (_, file) in list(&volume, directory).await {
                read(&volume, file).await;
            }
        }
    });
    assert!(taken <= 8, "{taken} round trips");
}

#[test]
fn an_expectation_that_has_ended_asks_for_nothing_more() {
    let taken = rounds(Tree { directories: 50, files: 20 }, |volume| async move {
        drop(volume.will_read(&Caller::default(), vec![Expected::Tree(PathBuf::new())]));
        list(&volume, ROOT).await;
    });
    assert_eq!(taken, 1);
}

/// As the first time, and not one question for each.
#[test]
fn files_that_are_kept_on_the_disk_are_opened_together() {
    let place = tempfile::tempdir().unwrap();
    let disk = || Some(DiskCache::open(place.path(), 1 << 30).unwrap());
    let tree = Tree { directories: 1, files: 300 };
    let kept = Cell::new(0);
    let kept = &kept;
    let read_all = |volume: Arc<Volume>| async move {
        list(&volume, ROOT).await;
        let caller = Caller::default();
        let entry = volume.lookup(&caller, NameIn { parent: ROOT, name: &name(2) }).await.unwrap();
        let directory =
            volume.tell(NameIn { parent: ROOT, name: &name(2) }, &entry, |told| told.number);
        for (_, file) in list(&volume, directory).await {
            read(&volume, file).await;
            // What comes faster than the disk takes it is not kept.
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
        kept.set(volume.state().cached_bytes);
    };
    let first = rounds_with(tree, disk(), read_all);
    // A slow disk needs several.
    for _ in 0..10 {
        if kept.get() < 100 * CONTENTS.len() as u64 {
            rounds_with(tree, disk(), read_all);
        }
    }
    assert!(kept.get() >= 100 * CONTENTS.len() as u64, "{} bytes are kept", kept.get());
    let again = rounds_with(tree, disk(), read_all);
    assert!(first < 40 && again < 40, "{first} and then {again} round trips");
}

/// As one that has done nothing, listed the root, gone through the tree, or also read a file.
async fn prepare(volume: &Arc<Volume>, known: u32) {
    match known {
        0 => {}
        1 => drop(list(volume, ROOT).await),
        _ => find(Arc::clone(volume)).await,
    }
    if known > 2 {
        read_named(volume, 2, 2000).await;
    }
}

/// A program takes no more round trips than estimated.
#[test]
fn what_is_at_hand_takes_no_more_than_is_said() {
    let tree = Tree { directories: 5, files: 20 };
    let path = |directory: u64, file: u64| PathBuf::from_iter([name(directory), name(file)]);
    let said = Cell::new((0, 0));
    let taken = |known: u32, uses: &[Use]| {
        let uses = uses.to_vec();
        said.set((0, 0));
        let before = Cell::new(0);
        let all = rounds(tree, |volume| {
            let (said, before) = (&said, &before);
            async move {
                let caller = Caller::default();
                prepare(&volume, known).await;
                let Some(found) = volume.at_hand(&caller, &uses) else {
                    before.set(usize::MAX);
                    return;
                };
                said.set((found.round_trips, found.missing));
                assert_eq!(volume.at_hand(&caller, &uses), Some(found));
                let files = uses.iter().filter_map(|used| match used {
                    Use::Read(path) => Some(Expected::File(path.clone())),
                    _ => None,
                });
                let _expectation = volume.will_read(&caller, files.collect());
                // A program takes longer to begin.
                tokio::task::yield_now().await;
                tokio::task::yield_now().await;
                for used in &uses {
                    match used {
                        Use::Read(path) => {
                            let mut inodes = path
                                .iter()
                                .map(|name| name.to_str().unwrap()[1..].parse().unwrap());
                            read_named(&volume, inodes.next().unwrap(), inodes.next().unwrap())
                                .await;
                        }
                        Use::Look(path) if path.as_os_str().is_empty() => {
                            drop(list(&volume, ROOT).await)
                        }
                        Use::LookBelow(_) => find(Arc::clone(&volume)).await,
                        _ => panic!("not tried"),
                    }
                }
            }
        });
        let prepared = rounds(tree, |volume| async move { prepare(&volume, known).await });
        (before.get() != usize::MAX).then(|| (all - prepared, said.get()))
    };
    let (one, other) = (Use::Read(path(2, 2000)), Use::Read(path(4, 4003)));
    let (root, all) = (Use::Look(PathBuf::new()), Use::LookBelow(PathBuf::new()));
    assert_eq!(taken(0, std::slice::from_ref(&one)), None);
    assert_eq!(taken(1, std::slice::from_ref(&one)), None);
    assert_eq!(taken(1, std::slice::from_ref(&all)), None);
    assert_eq!(taken(1, std::slice::from_ref(&root)), Some((0, (0, 0))));
    assert_eq!(taken(2, std::slice::from_ref(&all)), Some((0, (0, 0))));
    assert_eq!(taken(3, std::slice::from_ref(&one)), Some((0, (0, 0))));
    assert_eq!(taken(3, &[root, all, one.clone()]), Some((0, (0, 0))));
    let (rounds, said) = taken(3, &[one, other]).unwrap();
    assert_eq!((rounds, said), (1, (1, CONTENTS.len() as u64)));
}
