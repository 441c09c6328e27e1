//! Leases beyond the files that a volume holds go back, each when the kernel has forgotten what it
//! was for; and what is remembered afterwards is what the store has.
#![allow(clippy::unwrap_used)]

use std::{
    collections::{HashMap, HashSet},
    ffi::OsString,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use async_trait::async_trait;
use posh_volume::{
    fs::{Name, ROOT, Settings, Told, Volume},
    store::*,
};
use tokio::sync::mpsc;
use tokio_stream::wrappers::UnboundedReceiverStream;

/// For anything that is to happen at all.
const PATIENCE: Duration = Duration::from_secs(60);

/// Files that the volume holds.
const FILES: usize = 1000;

const DIRECTORIES: u64 = 40;

/// Files in each directory.
const NAMES: u64 = 100;

/// Directories have the inodes from 2 on, and each its files from `1000 × its own` on.
fn is_directory(inode: u64) -> bool {
    inode < 2000
}

fn inside(directory: u64) -> std::ops::Range<u64> {
    if directory == ROOT { 2..2 + DIRECTORIES } else { directory * 1000..directory * 1000 + NAMES }
}

fn name(inode: u64) -> OsString {
    inode.to_string().into()
}

fn id(inode: u64) -> FileId {
    FileId { inode, generation: 0 }
}

/// State of the server and the kernel, on which the invariants are checked.
#[derive(Default)]
struct World {
    stamp: u64,
    /// Leases, with the stamp of the last answer.
    granted: HashMap<u64, u64>,
    /// How often a file was changed.
    changes: HashMap<u64, u64>,
    /// Recalls without an answer.
    recalled: HashSet<u64>,
    /// Files that the kernel remembers something of, and how often it was told of each.
    remembered: HashSet<u64>,
    lookups: HashMap<u64, u64>,
    lists: u64,
    walks: u64,
}

struct Server {
    world: Arc<Mutex<World>>,
    notices: Mutex<Option<mpsc::UnboundedReceiver<Notice>>>,
}

impl World {
    fn entry(&mut self, inode: u64) -> Entry {
        self.stamp += 1;
        self.granted.insert(inode, self.stamp);
        let time = Time::default();
        let changes = self.changes.get(&inode).copied().unwrap_or_default();
        let attributes = Attributes {
            id: id(inode),
            kind: if is_directory(inode) { Kind::Directory } else { Kind::Regular },
            mode: 0o755,
            uid: 0,
            gid: 0,
            links: 1,
            size: changes,
            blocks: 8,
            rdev: 0,
            atime: time,
            mtime: time,
            ctime: time,
            version: changes,
            acls: Some(Acls::empty()),
        };
        let leases = if is_directory(inode) {
            Leases::ATTRIBUTES | Leases::ENTRIES
        } else {
            Leases::ATTRIBUTES
        };
        Entry { attributes, leases, stamp: Stamp(self.stamp) }
    }

    fn returned(&mut self, returned: Returned) {
        let inode = returned.file.inode;
        self.recalled.remove(&inode);
        // A lease of a later answer stays.
        if self.granted.get(&inode).is_none_or(|stamp| *stamp <= returned.stamp.0) {
            assert!(
                !self.remembered.contains(&inode),
                "the kernel remembers {inode} without a lease"
            );
            self.granted.remove(&inode);
        }
    }

    fn told(&mut self, told: &Told) {
        *self.lookups.entry(told.number).or_default() += 1;
        if !told.attributes_life.is_zero() {
            self.remembered.insert(told.number);
        }
    }
}

#[async_trait]
impl Store for Server {
    fn root(&self) -> FileId {
        id(ROOT)
    }

    async fn call(&self, _: &Caller, op: Op) -> Result<Answer, Errno> {
        tokio::task::yield_now().await;
        let mut world = self.world.lock().unwrap();
        Ok(match op {
            Op::Walk { from, names } => {
                world.walks += 1;
                let from = world.entry(from.inode);
                let entries = names
                    .iter()
                    .map(|name| world.entry(name.to_str().unwrap().parse().unwrap()))
                    .collect();
                Answer::Walked(Walked { from, entries, error: None })
            }
            Op::List { directory, .. } => {
                world.lists += 1;
                let entry = world.entry(directory.inode);
                let listed = |inode| {
                    let entry = world.entry(inode);
                    Listed {
                        name: name(inode),
                        cookie: inode,
                        entry: Some(entry),
                        inode,
                        kind: entry.attributes.kind,
                    }
                };
                let names = inside(directory.inode).map(listed).collect();
                Answer::Listing(Listing { directory: entry, names, is_last: true })
            }
            Op::Attributes(place) => Answer::Entry(world.entry(place.file.inode)),
            Op::Open { place: Place { file, .. }, .. } => Answer::Opened {
                handle: Handle(file.inode),
                entry: world.entry(file.inode),
                parent: None,
            },
            Op::Return(all) => {
                all.into_iter().for_each(|returned| world.returned(returned));
                Answer::Done
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
        Box::pin(UnboundedReceiverStream::new(self.notices.lock().unwrap().take().unwrap()))
    }

    fn valid_until(&self) -> Instant {
        Instant::now() + Duration::from_secs(3600)
    }

    fn state(&self) -> StoreState {
        StoreState { watched: Watched::Fanotify, ..StoreState::default() }
    }
}

/// A volume, its server, and a kernel that does what it is told.
struct Site {
    volume: Arc<Volume>,
    world: Arc<Mutex<World>>,
    says: mpsc::UnboundedSender<Notice>,
}

impl Site {
    fn new() -> Self {
        let (says, notices) = mpsc::unbounded_channel();
        let world = Arc::<Mutex<World>>::default();
        let store = Server { world: Arc::clone(&world), notices: Mutex::new(Some(notices)) };
        let settings = Settings { sync: false, memory_bytes: 1 << 20, most_files: FILES };
        let (volume, mut invalidations) = Volume::new(Arc::new(store), settings, None);
        let (weak, kernel) = (Arc::downgrade(&volume), Arc::clone(&world));
        tokio::spawn(async move {
            while let Some(invalidate) = invalidations.recv().await {
                if !invalidate.let_go.is_empty() {
                    // Whoever does not wait for it is sooner.
                    tokio::time::sleep(Duration::from_millis(2)).await;
                }
                let forgotten: Vec<(u64, u64)> = {
                    let mut kernel = kernel.lock().unwrap();
                    kernel.remembered.remove(&invalidate.number);
                    let forget = |number: &u64| {
                        kernel.remembered.remove(number);
                        (*number, kernel.lookups.remove(number).unwrap_or_default())
                    };
                    invalidate.let_go.iter().map(forget).collect()
                };
                let Some(volume) = weak.upgrade() else { return };
                // Some are in use for now.
                for (number, times) in forgotten {
                    if is_directory(number) && times > 0 && number % 3 == 0 {
                        kernel.lock().unwrap().lookups.insert(number, times);
                    } else {
                        volume.forgotten(number, times);
                    }
                }
            }
        });
        Self { volume, world, says }
    }

    fn world(&self) -> std::sync::MutexGuard<'_, World> {
        self.world.lock().unwrap()
    }

    /// stat(2) of a name; the number and the size.
    async fn look_up(&self, parent: u64, inode: u64) -> (u64, u64) {
        let entry = self
            .volume
            .lookup(&Caller::default(), NameIn { parent, name: &name(inode) })
            .await
            .unwrap();
        let tell = |told: Told| {
            self.world().told(&told);
            (told.number, told.attributes.size)
        };
        self.volume.tell(NameIn { parent, name: &name(inode) }, &entry, tell)
    }

    /// As `find -size` goes through a directory: names with attributes, then each that is not told
    /// of with them.
    async fn find(&self, parent: u64) -> Vec<(u64, u64)> {
        let mut found = Vec::new();
        let open = self.volume.open_directory(&Caller::default(), parent).unwrap();
        let mut offset = 0;
        loop {
            let names = self.volume.read_directory_with_attributes(open, offset).await.unwrap();
            if names.is_empty() {
                break;
            }
            let take = |found: &mut Vec<(u64, u64)>, _: &Name, told: Option<Told>| {
                if let Some(told) = told {
                    self.world().told(&told);
                    found.push((told.number, told.attributes.size));
                }
                true
            };
            let count;
            (found, count) =
                self.volume.tell_all(parent, &names, found, take, |found, count| (found, count));
            offset = if count == 0 { offset } else { names[count - 1].next };
        }
        self.volume.close_directory(open);
        found
    }

    /// Of the whole tree; what each file's size is.
    async fn find_all(&self) -> HashMap<u64, u64> {
        let mut sizes = HashMap::new();
        for directory in inside(ROOT) {
            let (number, _) = self.look_up(ROOT, directory).await;
            sizes.extend(self.find(number).await);
        }
        sizes
    }

    async fn until(&self, what: &str, is_so: impl Fn() -> bool) {
        let began = Instant::now();
        while !is_so() {
            assert!(began.elapsed() < PATIENCE, "{what}: {:?}", self.volume.state());
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    /// A program of the server changes a file: whoever has a lease of it is asked to forget it
    /// first.
    async fn change(&self, inode: u64) {
        let is_leased = {
            let mut world = self.world();
            *world.changes.entry(inode).or_default() += 1;
            world.stamp += 1;
            let stamp = world.stamp;
            let is_leased = world.granted.remove(&inode).is_some();
            if is_leased {
                world.recalled.insert(inode);
                self.says
                    .send(Notice::Recall {
                        file: id(inode),
                        leases: Leases::all(),
                        stamp: Stamp(stamp),
                    })
                    .unwrap();
            }
            is_leased
        };
        if is_leased {
            self.until("a recall is answered", || !self.world().recalled.contains(&inode)).await;
        }
    }

    async fn is_quiet(&self) {
        self.until("leases go back", || {
            let held = self.world().granted.len();
            // Those that are held here are those that are counted there.
            held <= FILES && self.volume.state().leases as usize >= held
        })
        .await;
    }
}

#[tokio::test]
async fn leases_beyond_the_bound_go_back_and_what_is_shown_is_what_is_there() {
    let site = Site::new();
    for round in 0..5_u64 {
        let sizes = site.find_all().await;
        assert_eq!(sizes.len() as u64, DIRECTORIES * NAMES);
        let wrong = sizes.iter().filter(|(inode, size)| {
            site.world().changes.get(inode).copied().unwrap_or_default() != **size
        });
        assert_eq!(wrong.count(), 0, "{round}");
        site.is_quiet().await;
        // With what the kernel does not let go of, and what it has let go of since the last round.
        assert!(
            site.volume.state().files as usize <= FILES + FILES / 6 + DIRECTORIES as usize,
            "{:?}",
            site.volume.state()
        );
        for directory in inside(ROOT) {
            site.change(directory * 1000 + round * 13 % NAMES).await;
        }
    }
    // Each directory takes one answer, however much of it was given up, and each change one more.
    let (lists, walks) = {
        let world = site.world();
        (world.lists, world.walks)
    };
    assert!(
        lists <= 5 * (DIRECTORIES + 1) && walks <= 5 * 3 * DIRECTORIES,
        "{lists} listings, {walks} walks"
    );
}

#[tokio::test]
async fn what_is_open_keeps_its_lease() {
    let site = Site::new();
    let (directory, _) = site.look_up(ROOT, 2).await;
    let (file, _) = site.look_up(directory, 2007).await;
    let open = site.volume.open(&Caller::default(), file, OpenFlags::READ).await.unwrap();
    site.find_all().await;
    site.is_quiet().await;
    assert!(site.world().granted.contains_key(&2007));
    site.volume.release(open.number, None).await.unwrap();
    site.find_all().await;
    site.find_all().await;
    site.is_quiet().await;
    site.until("it goes back when it is closed", || !site.world().granted.contains_key(&2008))
        .await;
}
