//! Caching of contents, observed by the requests to the store.

use std::{
    fs,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Instant,
};

use async_trait::async_trait;
use bytes::Bytes;
use nix::errno::Errno;
use posh_volume::{
    directory::{Directory, DirectorySession, Liveness, Machine, Mutability, Rights},
    disk::DiskCache,
    fs::{MAX_FILES, Settings, Volume},
    store::*,
};

/// Counts the parts of files that are read.
struct Counting {
    inner: DirectorySession,
    parts: Arc<AtomicUsize>,
}

#[async_trait]
impl Store for Counting {
    fn root(&self) -> FileId {
        self.inner.root()
    }

    async fn call(&self, caller: &Caller, op: Op) -> Result<Answer, Errno> {
        self.inner.call(caller, op).await
    }

    async fn read(&self, caller: &Caller, parts: Vec<ReadPart>) -> Pieces {
        self.parts.fetch_add(parts.len(), Ordering::Relaxed);
        self.inner.read(caller, parts).await
    }

    async fn write(
        &self,
        caller: &Caller,
        writes: Vec<Write>,
    ) -> Result<Vec<Result<Entry, Errno>>, Errno> {
        self.inner.write(caller, writes).await
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

/// Reads a file of the directory by a new volume with this disk; its contents, and how often the
/// store was asked.
async fn read_anew(directory: &Arc<Directory>, disk: &Path, name: &str) -> (Vec<u8>, usize) {
    let parts = Arc::new(AtomicUsize::new(0));
    let inner = DirectorySession::open(Arc::clone(directory), Liveness::Own);
    let store = Arc::new(Counting { inner, parts: Arc::clone(&parts) });
    let disk = loop {
        // The volume before lets go of it when its last task has ended.
        match DiskCache::open(disk, 64 << 20) {
            Ok(disk) => break disk,
            Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock),
        }
        tokio::task::yield_now().await;
    };
    let (volume, mut invalidations) = Volume::new(
        store,
        Settings { sync: false, memory_bytes: 16 << 20, most_files: MAX_FILES },
        Some(disk),
    );
    let heard = tokio::spawn(async move { while invalidations.recv().await.is_some() {} });
    let caller = Caller::default();
    let at = NameIn { parent: 1, name: name.as_ref() };
    let found = volume.lookup(&caller, at).await.unwrap();
    let number = volume.tell(at, &found, |told| told.number);
    let open = volume.open(&caller, number, OpenFlags::READ).await.unwrap().number;
    let mut contents = Vec::new();
    loop {
        let piece: Bytes = volume.read(open, contents.len() as u64, 256 << 10).await.unwrap();
        if piece.is_empty() {
            break;
        }
        contents.extend_from_slice(&piece);
    }
    volume.release(open, None).await.unwrap();
    while volume.is_writing_to_disk() {
        tokio::task::yield_now().await;
    }
    drop(volume);
    heard.abort();
    (contents, parts.load(Ordering::Relaxed))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_read_is_on_the_disk_after_a_restart_until_it_changes() {
    let [origin, disk] = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let contents: Vec<u8> = (0..3_500_000_u32).map(|number| (number / 7) as u8).collect();
    fs::write(origin.path().join("f"), &contents).unwrap();
    let directory = Directory::open(
        Machine::start().unwrap(),
        origin.path(),
        Rights::Own,
        Mutability::ReadWrite,
    )
    .unwrap();
    let (first, asked) = read_anew(&directory, disk.path(), "f").await;
    assert!(first == contents && asked > 0, "{asked}");
    assert_eq!(read_anew(&directory, disk.path(), "f").await, (contents.clone(), 0));
    let changed: Vec<u8> = contents.iter().map(|byte| !byte).collect();
    fs::write(origin.path().join("f"), &changed).unwrap();
    let (second, asked) = read_anew(&directory, disk.path(), "f").await;
    assert!(second == changed && asked > 0, "{asked}");
}
