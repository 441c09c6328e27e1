//! A store that recalls, marks and loses leases as often as it likes: each recall is answered once,
//! with its own stamp, and what waits for an answer or for the kernel is bounded.
#![allow(clippy::unwrap_used)]

use std::{
    collections::HashSet,
    ffi::OsString,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use async_trait::async_trait;
use bytes::Bytes;
use posh_volume::{
    fs::{Invalidate, MAX_FILES, ROOT, Settings, Volume},
    store::*,
};
use tokio::{runtime::Handle, sync::mpsc, time::timeout};
use tokio_stream::wrappers::UnboundedReceiverStream;

/// For anything that is to happen at all.
const PATIENCE: Duration = Duration::from_secs(60);

/// Names in the root; the file of number `n` has the inode `n + 2`.
const FILES: u64 = 20;

/// Says what the test has it say.
struct Scripted {
    notices: Mutex<Option<mpsc::UnboundedReceiver<Notice>>>,
    /// Calls that give leases back are never answered.
    takes_nothing: AtomicBool,
    returned: Mutex<Vec<Returned>>,
    forgotten: Mutex<Vec<Stamp>>,
    return_calls: AtomicUsize,
    walks: AtomicUsize,
    acls: AtomicUsize,
    leases: Mutex<Leases>,
}

struct Site {
    store: Arc<Scripted>,
    says: mpsc::UnboundedSender<Notice>,
    volume: Arc<Volume>,
    invalidations: mpsc::UnboundedReceiver<Invalidate>,
}

fn id(inode: u64) -> FileId {
    FileId { inode, generation: 0 }
}

#[async_trait]
impl Store for Scripted {
    fn root(&self) -> FileId {
        id(1)
    }

    async fn call(&self, _: &Caller, op: Op) -> Result<Answer, Errno> {
        match op {
            Op::Walk { from, names } => {
                self.walks.fetch_add(1, Ordering::Relaxed);
                let inode = |name: &OsString| name.to_str().unwrap().parse::<u64>().unwrap() + 2;
                let entries = names.iter().map(|name| self.entry(inode(name))).collect();
                Ok(Answer::Walked(Walked { from: self.entry(from.inode), entries, error: None }))
            }
            Op::Return(returned) => {
                self.return_calls.fetch_add(1, Ordering::Relaxed);
                self.returned.lock().unwrap().extend(returned);
                if self.takes_nothing.load(Ordering::Relaxed) {
                    std::future::pending::<()>().await;
                }
                Ok(Answer::Done)
            }
            Op::Forgotten(stamp) => {
                self.forgotten.lock().unwrap().push(stamp);
                if self.takes_nothing.load(Ordering::Relaxed) {
                    std::future::pending::<()>().await;
                }
                Ok(Answer::Done)
            }
            Op::GetAttribute { .. } => {
                self.acls.fetch_add(1, Ordering::Relaxed);
                Ok(Answer::Value { value: Bytes::from_static(b"acl"), stamp: Stamp(1) })
            }
            _ => Err(Errno::EOPNOTSUPP),
        }
    }

    async fn read(&self, _: &Caller, _: Vec<ReadPart>) -> Pieces {
        Box::pin(tokio_stream::empty())
    }

    async fn write(&self, _: &Caller, _: Vec<Write>) -> Result<Vec<Result<Entry, Errno>>, Errno> {
        Err(Errno::EROFS)
    }

    fn notices(&self) -> Notices {
        Box::pin(UnboundedReceiverStream::new(self.notices.lock().unwrap().take().unwrap()))
    }

    fn valid_until(&self) -> Instant {
        Instant::now() + Duration::from_secs(3600)
    }

    fn state(&self) -> StoreState {
        StoreState { watched: Watched::Fanotify, ..StoreState::default() }
    }
}

impl Scripted {
    fn entry(&self, inode: u64) -> Entry {
        let time = Time::default();
        let kind = if inode == 1 { Kind::Directory } else { Kind::Regular };
        let attributes = Attributes {
            id: id(inode),
            kind,
            mode: 0o750,
            uid: 0,
            gid: 0,
            links: 1,
            size: 0,
            blocks: 0,
            rdev: 0,
            atime: time,
            mtime: time,
            ctime: time,
            version: 1,
            acls: Some(Acls::ACCESS),
        };
        Entry { attributes, leases: *self.leases.lock().unwrap(), stamp: Stamp(1) }
    }
}

impl Site {
    async fn new() -> Self {
        let (says, notices) = mpsc::unbounded_channel();
        let store = Arc::new(Scripted {
            notices: Mutex::new(Some(notices)),
            takes_nothing: false.into(),
            returned: Mutex::default(),
            forgotten: Mutex::default(),
            return_calls: AtomicUsize::default(),
            walks: AtomicUsize::default(),
            acls: AtomicUsize::default(),
            leases: Mutex::new(Leases::ATTRIBUTES | Leases::ENTRIES | Leases::DATA),
        });
        let settings = Settings { sync: false, memory_bytes: 1 << 20, most_files: MAX_FILES };
        let (volume, invalidations) = Volume::new(Arc::<Scripted>::clone(&store), settings, None);
        let site = Self { store, says, volume, invalidations };
        for number in 0..FILES {
            site.look_up(number).await;
        }
        site
    }

    /// As the kernel does; its number.
    async fn look_up(&self, number: u64) -> u64 {
        let name = OsString::from(number.to_string());
        let at = NameIn { parent: ROOT, name: &name };
        let entry = self.volume.lookup(&Caller::default(), at).await.unwrap();
        self.volume.tell(at, &entry, |told| told.number)
    }

    fn recall(&self, inode: u64, leases: Leases, stamp: u64) {
        self.says.send(Notice::Recall { file: id(inode), leases, stamp: Stamp(stamp) }).unwrap();
    }

    /// The kernel does what it is told.
    fn kernel(&mut self) {
        let (_, none) = mpsc::unbounded_channel();
        let mut invalidations = std::mem::replace(&mut self.invalidations, none);
        tokio::spawn(async move { while invalidations.recv().await.is_some() {} });
    }

    async fn until(&self, what: &str, is_so: impl Fn(&Self) -> bool) {
        let wait = async {
            while !is_so(self) {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        assert!(timeout(PATIENCE, wait).await.is_ok(), "{what}");
    }

    async fn returned(&self, count: usize) -> HashSet<(u64, u32, u64)> {
        self.until("all are answered", |site| site.store.returned.lock().unwrap().len() >= count)
            .await;
        let all = self.store.returned.lock().unwrap();
        let set: HashSet<_> =
            all.iter().map(|its| (its.file.inode, its.leases.bits(), its.stamp.0)).collect();
        assert_eq!((all.len(), set.len()), (count, count), "each once");
        set
    }

    fn tasks() -> usize {
        Handle::current().metrics().num_alive_tasks()
    }
}

#[tokio::test]
async fn each_recall_is_answered_once_with_its_own_leases_and_stamp() {
    let mut site = Site::new().await;
    site.kernel();
    let mut expected = HashSet::new();
    for stamp in 2..20_000 {
        // Every third file is not known here.
        let inode = stamp % (FILES * 3 / 2) + 2;
        let leases = Leases::from_bits_truncate(u32::try_from(stamp / 7 % 15).unwrap() + 1);
        site.recall(inode, leases, stamp);
        expected.insert((inode, leases.bits(), stamp));
    }
    assert_eq!(site.returned(expected.len()).await, expected);
    let calls = site.store.return_calls.load(Ordering::Relaxed);
    assert!(calls < expected.len(), "{calls} calls");
}

#[tokio::test]
async fn recalls_without_end_take_a_few_tasks_and_calls() {
    let mut site = Site::new().await;
    site.kernel();
    site.store.takes_nothing.store(true, Ordering::Relaxed);
    let before = Site::tasks();
    for stamp in 2..300_000 {
        site.recall(stamp % 1000, Leases::all(), stamp);
        site.recall(stamp % 1000, Leases::ATTRIBUTES, stamp);
        if stamp % 1000 == 0 {
            tokio::task::yield_now().await;
            let tasks = Site::tasks() - before;
            assert!(tasks <= 200, "{tasks} tasks after {stamp} recalls");
        }
    }
    site.until("it is found out", |site| site.volume.state().store.fault.is_some()).await;
    assert!(site.store.return_calls.load(Ordering::Relaxed) <= 64);
    site.until("they end", |_| Site::tasks() - before <= 80).await;
    // From now on it is asked for everything.
    let walks = site.store.walks.load(Ordering::Relaxed);
    for _ in 0..3 {
        site.look_up(0).await;
    }
    assert_eq!(site.store.walks.load(Ordering::Relaxed), walks + 3);
    assert_eq!(site.volume.state().leases, 0);
    // No command waits for what it never says.
    let caught_up = site.volume.caught_up(Stamp(1 << 40), posh_volume::fs::Changes::Possible);
    timeout(Duration::from_secs(5), caught_up).await.unwrap();
}

/// The kernel waits for a reader of pages, which the server does not answer.
#[tokio::test(start_paused = true)]
async fn what_waits_for_the_kernel_is_bounded() {
    let mut site = Site::new().await;
    site.store.takes_nothing.store(true, Ordering::Relaxed);
    let before = Site::tasks();
    for stamp in 2..2_000 {
        for inode in 1..FILES + 2 {
            site.recall(inode, Leases::DATA | Leases::ENTRIES, stamp);
        }
        site.says.send(Notice::Lost { stamp: Stamp(stamp) }).unwrap();
        site.says.send(Notice::All { stamp: Stamp(stamp) }).unwrap();
        // The clock goes on when nobody has anything to do.
        tokio::time::sleep(Duration::from_millis(100)).await;
        let (waiting, tasks) = (site.invalidations.len(), Site::tasks() - before);
        assert!(waiting <= 100, "{waiting} invalidations after {stamp}");
        assert!(tasks <= 200, "{tasks} tasks after {stamp}");
    }
    // All were answered in time, though the kernel has done nothing.
    assert!(site.store.returned.lock().unwrap().len() > 10_000);
    site.kernel();
    timeout(
        Duration::from_secs(30),
        site.volume.caught_up(Stamp(1_999), posh_volume::fs::Changes::None),
    )
    .await
    .unwrap();
}

/// The store hears of a loss that everything is forgotten, when the kernel has forgotten it.
#[tokio::test(start_paused = true)]
async fn a_loss_is_answered_when_all_is_forgotten() {
    let mut site = Site::new().await;
    site.says.send(Notice::Lost { stamp: Stamp(9) }).unwrap();
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(site.store.forgotten.lock().unwrap().is_empty());
    site.kernel();
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(*site.store.forgotten.lock().unwrap(), [Stamp(9)]);
    // One answer is on its way, however many losses there are.
    site.store.takes_nothing.store(true, Ordering::Relaxed);
    for stamp in 10..100 {
        site.says.send(Notice::Lost { stamp: Stamp(stamp) }).unwrap();
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert_eq!(*site.store.forgotten.lock().unwrap(), [Stamp(9), Stamp(10)]);
}

/// A mark counts when all that came before it is forgotten, and no sooner.
#[tokio::test(start_paused = true)]
async fn a_mark_waits_for_what_came_before() {
    let mut site = Site::new().await;
    site.recall(2, Leases::DATA, 5);
    site.says.send(Notice::All { stamp: Stamp(6) }).unwrap();
    site.says.send(Notice::All { stamp: Stamp(7) }).unwrap();
    site.recall(3, Leases::DATA, 8);
    site.says.send(Notice::Lost { stamp: Stamp(9) }).unwrap();
    site.says.send(Notice::All { stamp: Stamp(10) }).unwrap();
    let caught_up = |stamp| {
        let volume = Arc::clone(&site.volume);
        tokio::spawn(
            async move { volume.caught_up(Stamp(stamp), posh_volume::fs::Changes::None).await },
        )
    };
    let (first, last) = (caught_up(7), caught_up(10));
    let patient = async || tokio::time::sleep(Duration::from_secs(1)).await;
    patient().await;
    assert!(!first.is_finished() && !last.is_finished());
    let mut numbers = Vec::new();
    while let Ok(carried_out) = site.invalidations.try_recv() {
        numbers.push(carried_out.number);
        drop(carried_out);
        if numbers.len() == 1 {
            patient().await;
            assert!(first.is_finished() && !last.is_finished(), "{numbers:?}");
        }
    }
    patient().await;
    assert!(last.is_finished(), "{numbers:?}");
}

#[tokio::test]
async fn an_acl_that_nobody_would_tell_of_is_forgotten_by_the_kernel() {
    let mut site = Site::new().await;
    let number = site.look_up(3).await;
    let name = "system.posix_acl_access".as_ref();
    let caller = Caller::default();
    for _ in 0..3 {
        assert_eq!(site.volume.extended(&caller, number, name).await.unwrap(), "acl");
    }
    assert_eq!(site.store.acls.load(Ordering::Relaxed), 1);
    assert!(site.invalidations.try_recv().is_err(), "a lease tells of changes");
    site.recall(5, Leases::all(), 2);
    timeout(PATIENCE, site.invalidations.recv()).await.unwrap().unwrap();
    assert_eq!(site.volume.extended(&caller, number, name).await.unwrap(), "acl");
    let told = timeout(PATIENCE, site.invalidations.recv()).await.unwrap().unwrap();
    assert_eq!(
        (told.number, told.pages, site.store.acls.load(Ordering::Relaxed)),
        (number, false, 2)
    );
}
