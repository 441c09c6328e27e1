//! Volumes without a kernel: what a program does by paths, in the calls that the kernel would make;
//! and a store that counts, fails and holds back what it is asked for.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use async_trait::async_trait;
use bytes::Bytes;
use posh_volume::{
    Errno, Store,
    directory::{Directory, DirectorySession, Liveness, Machine, Mutability, Rights},
    fs::{MAX_FILES, Opened, ROOT, Settings, Source, Volume},
    journal::{Journal, Record},
    store::*,
};
use tempfile::TempDir;
use tokio::sync::watch;

/// Store that counts requests, and injects faults.
pub struct Observed {
    inner: DirectorySession,
    pub calls: AtomicUsize,
    pub writes: AtomicUsize,
    /// Puts of files with that name fail.
    pub refused: Mutex<Option<(&'static str, Errno)>>,
    /// So many of the next requests to write are lost, after they were carried out or before.
    pub lost: AtomicUsize,
    pub is_lost_after: AtomicBool,
    /// So many of the next requests to write come to a server that does not know the file.
    pub stale: AtomicUsize,
    /// So many of the next walks are lost.
    pub lost_walks: AtomicUsize,
    /// While it is true, writes wait, and files that are made open.
    pub held: watch::Sender<bool>,
    /// Such a file was asked for.
    pub creating: watch::Sender<bool>,
    pub is_dead: AtomicBool,
    /// So many of the next walks from another directory than the root find that directory not
    /// known.
    forgets: AtomicUsize,
}

impl Observed {
    /// Asserts that a request contains no id of a pending file.
    fn check(words: &str) {
        let unborn = format!("generation: {}", u64::MAX);
        assert!(!words.contains(&unborn), "{words}");
    }
}

impl Observed {
    /// As the next gateway has it done.
    pub fn end_session(&self) {
        self.inner.end();
    }

    /// A command of the server has ended, and whoever began it hears so.
    pub async fn mark(&self) -> Stamp {
        self.inner.mark().await.unwrap()
    }
}

#[async_trait]
impl Store for Observed {
    fn root(&self) -> FileId {
        self.inner.root()
    }

    async fn call(&self, caller: &Caller, op: Op) -> Result<Answer, Errno> {
        Self::check(&format!("{op:?}"));
        // Nobody waits for a lease to be given back.
        let is_asked = !matches!(op, Op::Return(_));
        self.calls.fetch_add(is_asked.into(), Ordering::Relaxed);
        let is_below = matches!(op, Op::Walk { from, .. } if from != self.root());
        let forgets = |left: usize| left.checked_sub(1).filter(|_| is_below);
        let loses = |left: usize| left.checked_sub(1).filter(|_| matches!(op, Op::Walk { .. }));
        if self.lost_walks.fetch_update(Ordering::Relaxed, Ordering::Relaxed, loses).is_ok() {
            return Err(Errno::ETIMEDOUT);
        }
        if self.forgets.fetch_update(Ordering::Relaxed, Ordering::Relaxed, forgets).is_ok() {
            return Err(Errno::ESTALE);
        }
        if !matches!(op, Op::CreateWhole { .. }) {
            return self.inner.call(caller, op).await;
        }
        self.creating.send_replace(true);
        let mut held = self.held.subscribe();
        held.wait_for(|held| !held).await.map_err(|_| Errno::EIO)?;
        let lost = self
            .lost
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |lost| lost.checked_sub(1));
        if lost.is_ok() && !self.is_lost_after.load(Ordering::Relaxed) {
            return Err(Errno::EIO);
        }
        let created = self.inner.call(caller, op).await;
        if self.is_dead.load(Ordering::Relaxed) {
            std::future::pending::<()>().await;
        }
        if lost.is_ok() { Err(Errno::EIO) } else { created }
    }

    async fn read(&self, caller: &Caller, parts: Vec<ReadPart>) -> Pieces {
        Self::check(&format!("{parts:?}"));
        self.calls.fetch_add(1, Ordering::Relaxed);
        self.inner.read(caller, parts).await
    }

    async fn write(
        &self,
        caller: &Caller,
        writes: Vec<Write>,
    ) -> Result<Vec<Result<Entry, Errno>>, Errno> {
        self.writes.fetch_add(1, Ordering::Relaxed);
        let mut held = self.held.subscribe();
        held.wait_for(|held| !held).await.map_err(|_| Errno::EIO)?;
        if self.is_dead.load(Ordering::Relaxed) {
            std::future::pending::<()>().await;
        }
        let lost = self
            .lost
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |lost| lost.checked_sub(1));
        if lost.is_ok() && !self.is_lost_after.load(Ordering::Relaxed) {
            return Err(Errno::EIO);
        }
        if self
            .stale
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |stale| stale.checked_sub(1))
            .is_ok()
        {
            return Ok(vec![Err(Errno::ESTALE); writes.len()]);
        }
        let mut results = Vec::new();
        for write in writes {
            let refused = *self.refused.lock().unwrap();
            let errno = match (&write, refused) {
                (Write::Put(put), Some((name, errno))) if put.path.last().unwrap() == name => {
                    Some(errno)
                }
                _ => None,
            };
            match (&write, errno) {
                (_, Some(errno)) => results.push(Err(errno)),
                (Write::Put(put), _) => {
                    Self::check(&format!("{:?}", put.directory));
                    results.extend(self.inner.write(caller, vec![write]).await?);
                }
                (
                    Write::Set { place, .. }
                    | Write::At { place, .. }
                    | Write::Append { place, .. },
                    _,
                ) => {
                    Self::check(&format!("{place:?}"));
                    results.extend(self.inner.write(caller, vec![write]).await?);
                }
            }
        }
        if lost.is_ok() { Err(Errno::EIO) } else { Ok(results) }
    }

    fn notices(&self) -> Notices {
        self.inner.notices()
    }

    fn valid_until(&self) -> Instant {
        self.inner.valid_until()
    }

    fn lease_limit(&self) -> Option<Duration> {
        self.inner.lease_limit()
    }

    fn state(&self) -> StoreState {
        self.inner.state()
    }
}

/// A directory, and whoever uses it.
pub struct Site {
    directory: Arc<Directory>,
    /// The export is a file system of its own.
    is_mount: bool,
    pub top: TempDir,
    /// Number of walks for which the next clients' stores don't know the directory, as after a
    /// restart of the server.
    pub forgets: AtomicUsize,
}

impl Site {
    pub fn new() -> Self {
        let top = tempfile::tempdir().unwrap();
        std::fs::create_dir(top.path().join("export")).unwrap();
        Self::of(top, false)
    }

    /// A store on a tmpfs(5) with these options. `None`: only root can mount one.
    pub fn sized(options: &str) -> Option<Self> {
        if !nix::unistd::geteuid().is_root() {
            eprintln!("not tested: mounting a tmpfs needs root");
            return None;
        }
        let top = tempfile::tempdir().unwrap();
        let path = top.path().join("export");
        std::fs::create_dir(&path).unwrap();
        let tmpfs = Some("tmpfs");
        nix::mount::mount(tmpfs, &path, tmpfs, nix::mount::MsFlags::empty(), Some(options))
            .unwrap();
        Some(Self::of(top, true))
    }

    fn of(top: TempDir, is_mount: bool) -> Self {
        let machine = Machine::start().unwrap();
        let path = top.path().join("export");
        let directory =
            Directory::open(machine, &path, Rights::Own, Mutability::ReadWrite).unwrap();
        Self { directory, forgets: AtomicUsize::new(0), is_mount, top }
    }

    pub fn path(&self, path: &str) -> PathBuf {
        self.top.path().join("export").join(path)
    }

    pub fn state(&self, name: &str) -> PathBuf {
        self.top.path().join("state").join(name)
    }

    /// A volume of its own session, with the journal of that name. It keeps next to nothing of what
    /// it reads.
    pub async fn client(&self, name: &str) -> Client {
        self.client_with(name, 1 << 20).await
    }

    /// Like [`Self::client`], with this size of the cache in memory.
    pub async fn client_with(&self, name: &str, memory_bytes: u64) -> Client {
        let client = self.client_of(memory_bytes);
        let (journal, left) = self.journal(name).await;
        client.volume.keep_journal(journal, left).await.unwrap();
        client
    }

    /// The journal of that name, with its records.
    pub async fn journal(&self, name: &str) -> (Journal, Vec<Record>) {
        loop {
            // The one before lets go of it when its last task has ended.
            match Journal::open(&self.state(name)) {
                Ok(opened) => return opened,
                Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock),
            }
            tokio::task::yield_now().await;
        }
    }

    /// A volume without a journal.
    pub fn client_of(&self, memory_bytes: u64) -> Client {
        let store = Arc::new(Observed {
            inner: DirectorySession::open(Arc::clone(&self.directory), Liveness::Own),
            calls: AtomicUsize::new(0),
            writes: AtomicUsize::new(0),
            refused: Mutex::new(None),
            lost: AtomicUsize::new(0),
            is_lost_after: AtomicBool::new(false),
            stale: AtomicUsize::new(0),
            lost_walks: AtomicUsize::new(0),
            held: watch::Sender::new(false),
            creating: watch::Sender::new(false),
            is_dead: AtomicBool::new(false),
            forgets: AtomicUsize::new(self.forgets.load(Ordering::Relaxed)),
        });
        let settings = Settings { sync: false, memory_bytes, most_files: MAX_FILES };
        let (volume, mut invalidations) =
            Volume::new(Arc::clone(&store) as Arc<dyn Store>, settings, None);
        tokio::spawn(async move { while invalidations.recv().await.is_some() {} });
        Client { volume, store, caller: Caller::default(), open: HashMap::new() }
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        if self.is_mount {
            // Whoever serves it has it open until its threads have ended.
            let _ = nix::mount::umount2(&self.path(""), nix::mount::MntFlags::MNT_DETACH);
        }
    }
}

/// A program, and the volume that it uses.
pub struct Client {
    pub volume: Arc<Volume>,
    pub store: Arc<Observed>,
    pub caller: Caller,
    /// Files that it leaves open, by path.
    pub open: HashMap<PathBuf, Opened>,
}

pub const NEW: OpenFlags = OpenFlags::READ.union(OpenFlags::WRITE).union(OpenFlags::EXCLUSIVE);

impl Client {
    /// The number of a path, each name looked up.
    pub async fn number(&self, path: &Path) -> Result<u64, Errno> {
        let mut at = ROOT;
        let mut kind = Kind::Directory;
        for name in path {
            match kind {
                Kind::Directory => {}
                // It leads nowhere.
                Kind::Symlink => return Err(Errno::ENOENT),
                _ => return Err(Errno::ENOTDIR),
            }
            let its = NameIn { parent: at, name };
            let found = self.volume.lookup(&self.caller, its).await?;
            kind = found.attributes.kind;
            at = self.volume.tell(its, &found, |told| told.number);
        }
        Ok(at)
    }

    pub async fn parent<'a>(&self, path: &'a Path) -> Result<NameIn<'a, u64>, Errno> {
        let parent = self.number(path.parent().unwrap()).await?;
        match self.volume.attributes(&self.caller, parent).await?.kind {
            Kind::Directory => Ok(NameIn { parent, name: path.file_name().unwrap() }),
            Kind::Symlink => Err(Errno::ENOENT),
            _ => Err(Errno::ENOTDIR),
        }
    }

    pub async fn stat(&self, path: impl AsRef<Path>) -> Result<Attributes, Errno> {
        let number = self.number(path.as_ref()).await?;
        self.volume.attributes(&self.caller, number).await
    }

    pub async fn make_directory(&self, path: impl AsRef<Path>) -> Result<u64, Errno> {
        let at = self.parent(path.as_ref()).await?;
        let made = self.volume.make_directory(&self.caller, at, 0o755.into()).await?;
        Ok(self.volume.tell(at, &made, |told| told.number))
    }

    pub async fn symlink(&self, path: impl AsRef<Path>, target: &str) -> Result<(), Errno> {
        let at = self.parent(path.as_ref()).await?;
        self.volume.symlink(&self.caller, at, target.as_ref()).await.map(drop)
    }

    pub async fn create(
        &self,
        path: impl AsRef<Path>,
        flags: OpenFlags,
    ) -> Result<(Opened, u64), Errno> {
        let at = self.parent(path.as_ref()).await?;
        let (opened, entry) = self.volume.create(&self.caller, at, 0o644.into(), flags).await?;
        Ok((opened, self.volume.tell(at, &entry, |told| told.number)))
    }

    pub async fn close(&self, opened: Opened) -> Result<(), Errno> {
        let flushed = self.volume.flush(opened.number, Some(1)).await;
        self.volume.release(opened.number, Some(1)).await?;
        flushed
    }

    /// A new file, as tar(1) makes it.
    pub async fn put(&self, path: impl AsRef<Path>, data: &[u8], mtime: i64) -> Result<u64, Errno> {
        let (opened, number) = self.create(path, NEW).await?;
        let data = Bytes::copy_from_slice(data);
        self.volume.write(opened.number, 0, data, Source::Call).await?;
        let at = |seconds| Some(NewTime::At(Time { seconds, nanoseconds: 5 }));
        let changes =
            Changes { mode: Some(0o600), atime: at(7), mtime: at(mtime), ..Changes::default() };
        self.volume.change(&self.caller, number, Some(opened.number), changes).await?;
        self.close(opened).await?;
        Ok(number)
    }

    pub async fn read(&self, path: impl AsRef<Path>) -> Result<Vec<u8>, Errno> {
        let number = self.number(path.as_ref()).await?;
        let opened = self.volume.open(&self.caller, number, OpenFlags::READ).await?;
        let mut data = Vec::new();
        loop {
            let piece = self.volume.read(opened.number, data.len() as u64, 1 << 20).await?;
            if piece.is_empty() {
                break;
            }
            data.extend_from_slice(&piece);
        }
        self.close(opened).await?;
        Ok(data)
    }

    pub async fn names(&self, path: impl AsRef<Path>) -> Result<Vec<String>, Errno> {
        let number = self.number(path.as_ref()).await?;
        let open = self.volume.open_directory(&self.caller, number)?;
        let mut names: Vec<String> = Vec::new();
        let mut offset = 0;
        loop {
            let part = self.volume.read_directory(open, offset).await?;
            let Some(last) = part.last() else { break };
            offset = last.next;
            names.extend(part.into_iter().map(|name| name.name.into_string().unwrap()));
        }
        self.volume.close_directory(open);
        names.retain(|name| name != "." && name != "..");
        names.sort();
        Ok(names)
    }

    pub async fn remove(&self, path: impl AsRef<Path>, what: Removal) -> Result<(), Errno> {
        let at = self.parent(path.as_ref()).await?;
        self.volume.remove(&self.caller, at, what).await
    }

    pub fn asked(&self) -> usize {
        self.store.calls.load(Ordering::Relaxed) + self.store.writes.load(Ordering::Relaxed)
    }
}
