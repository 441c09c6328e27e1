//! A server whose export's directory was replaced: the mounted root becomes the new directory.
#![allow(clippy::unwrap_used)]

use std::{
    ffi::OsStr,
    fs,
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use async_trait::async_trait;
use nix::unistd::{getegid, geteuid};
use posh_volume::{
    directory::{Directory, DirectorySession, Liveness, Machine, Mutability, Rights},
    fs::{ROOT, Settings, Source, Volume},
    journal::Journal,
    store::*,
};
use tokio::sync::mpsc;
use tokio_stream::{StreamExt as _, wrappers::UnboundedReceiverStream};

/// For anything that is to happen at all.
const PATIENCE: Duration = Duration::from_secs(20);

/// Sessions with one directory after the other.
struct Successive {
    present: Mutex<Arc<DirectorySession>>,
    /// Loses all writes.
    is_down: AtomicBool,
    notices: mpsc::UnboundedSender<Notice>,
    listener: Mutex<Option<mpsc::UnboundedReceiver<Notice>>>,
}

impl Successive {
    fn new(first: DirectorySession) -> Self {
        let (notices, listener) = mpsc::unbounded_channel();
        let (present, listener) = (Mutex::new(Arc::new(first)), Mutex::new(Some(listener)));
        let its = Self { present, is_down: false.into(), notices, listener };
        its.pass_on();
        its
    }

    fn present(&self) -> Arc<DirectorySession> {
        self.present.lock().unwrap().clone()
    }

    fn pass_on(&self) {
        let (mut its, notices) = (self.present().notices(), self.notices.clone());
        tokio::spawn(async move {
            while let Some(notice) = its.next().await {
                let _ = notices.send(notice);
            }
        });
    }

    fn is_replaced(&self, next: DirectorySession) {
        *self.present.lock().unwrap() = Arc::new(next);
        let (stamp, _) = self.present().missed();
        let _ = self.notices.send(Notice::Lost { stamp });
        self.pass_on();
    }
}

#[async_trait]
impl Store for Successive {
    fn root(&self) -> FileId {
        self.present().root()
    }

    async fn call(&self, caller: &Caller, op: Op) -> Result<Answer, Errno> {
        self.present().call(caller, op).await
    }

    async fn read(&self, caller: &Caller, parts: Vec<ReadPart>) -> Pieces {
        self.present().read(caller, parts).await
    }

    async fn write(
        &self,
        caller: &Caller,
        writes: Vec<Write>,
    ) -> Result<Vec<Result<Entry, Errno>>, Errno> {
        if self.is_down.load(Ordering::Relaxed) {
            return Err(Errno::ETIMEDOUT);
        }
        self.present().write(caller, writes).await
    }

    fn notices(&self) -> Notices {
        let listener = self.listener.lock().unwrap().take();
        Box::pin(UnboundedReceiverStream::new(listener.unwrap()))
    }

    fn valid_until(&self) -> Instant {
        self.present().valid_until()
    }

    fn state(&self) -> StoreState {
        self.present().state()
    }
}

fn session(machine: &Arc<Machine>, root: &Path) -> DirectorySession {
    let directory =
        Directory::open(machine.clone(), root, Rights::Own, Mutability::ReadWrite).unwrap();
    DirectorySession::open(directory, Liveness::Own)
}

fn caller() -> Caller {
    Caller {
        uid: geteuid().as_raw(),
        gid: getegid().as_raw(),
        groups: Arc::default(),
        is_guest: false,
    }
}

async fn number(volume: &Arc<Volume>, parent: u64, name: &str) -> Result<u64, Errno> {
    let at = NameIn { parent, name: OsStr::new(name) };
    let entry = volume.lookup(&caller(), at).await?;
    Ok(volume.tell(at, &entry, |told| told.number))
}

async fn contents(volume: &Arc<Volume>, parent: u64, name: &str) -> Result<String, Errno> {
    let file = number(volume, parent, name).await?;
    let open = volume.open(&caller(), file, OpenFlags::READ).await?;
    let read = volume.read(open.number, 0, 100).await;
    volume.release(open.number, None).await?;
    Ok(String::from_utf8(read?.to_vec()).unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_mounted_root_is_the_new_directory() {
    let top = tempfile::tempdir().unwrap();
    let (old, new) = (top.path().join("old"), top.path().join("new"));
    for (root, text) in [(&old, "old"), (&new, "new")] {
        fs::create_dir_all(root.join("d")).unwrap();
        fs::write(root.join("f"), text).unwrap();
        fs::write(root.join("d/f"), text).unwrap();
    }
    fs::write(old.join("gone"), "gone").unwrap();
    let machine = Machine::start().unwrap();
    let store = Arc::new(Successive::new(session(&machine, &old)));
    let settings = Settings { sync: false, memory_bytes: 4 << 20, most_files: 1000 };
    let (volume, mut invalidations) = Volume::new(store.clone(), settings, None);
    let (journal, left) = Journal::open(&top.path().join("journal")).unwrap();
    volume.keep_journal(journal, left).await.unwrap();
    tokio::spawn(async move { while invalidations.recv().await.is_some() {} });
    assert_eq!(contents(&volume, ROOT, "f").await.unwrap(), "old");
    let directory = number(&volume, ROOT, "d").await.unwrap();
    assert_eq!(contents(&volume, directory, "f").await.unwrap(), "old");
    // An open file, and a link that is not sent yet, in a directory of this session.
    let gone = number(&volume, ROOT, "gone").await.unwrap();
    let open = volume.open(&caller(), gone, OpenFlags::WRITE).await.unwrap();
    let at = NameIn { parent: ROOT, name: OsStr::new("own") };
    let own = volume.make_directory(&caller(), at, NewMode::from(0o755)).await.unwrap();
    let own = volume.tell(at, &own, |told| told.number);
    let at = NameIn { parent: own, name: OsStr::new("unsent") };
    store.is_down.store(true, Ordering::Relaxed);
    volume.symlink(&caller(), at, OsStr::new("target")).await.unwrap();
    store.is_replaced(session(&machine, &new));
    store.is_down.store(false, Ordering::Relaxed);
    assert_eq!(contents(&volume, ROOT, "f").await.unwrap(), "new");
    assert_eq!(contents(&volume, ROOT, "gone").await, Err(Errno::ENOENT));
    let found = number(&volume, ROOT, "d").await.unwrap();
    assert_ne!(found, directory);
    assert_eq!(contents(&volume, found, "f").await.unwrap(), "new");
    // What was open or a working directory is that of the former tree.
    assert_eq!(contents(&volume, directory, "f").await, Err(Errno::ESTALE));
    let written = volume.write(open.number, 0, "x".into(), Source::Call).await;
    let flushed = volume.flush(open.number, None).await;
    assert!(written.is_err() || flushed.is_err(), "{written:?} {flushed:?}");
    // Nothing of it comes into the new one; it is kept, and said to be.
    let settled = tokio::time::timeout(PATIENCE, volume.settle()).await.unwrap();
    assert_eq!(settled, Err(Errno::ESTALE));
    let lost = volume.state().lost.unwrap();
    assert!(lost.contains("own") && lost.contains("posh volumes recover"), "{lost}");
    assert!(!new.join("own").exists());
    // And new files are made in the new one.
    let at = NameIn { parent: ROOT, name: OsStr::new("made") };
    volume.make_directory(&caller(), at, NewMode::from(0o755)).await.unwrap();
    assert!(new.join("made").is_dir() && !old.join("made").exists());
}
