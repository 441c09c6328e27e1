//! The file system of a volume, without FUSE in it: what the kernel asks, answered from memory as
//! far as leases allow, else by the [`Store`].
//!
//! * `table`: files and what is remembered of them; no waiting in it
//! * `names`, `attributes`, `acls`, `listing`, `files`: what the kernel can ask, by subject
//! * `reading`, `chunks` and `keep`: contents, read ahead and kept, in memory and on the disk
//! * `tours`, `readers` and `order`: which directories and files are likely to be opened next,
//!   without waiting; `ahead` and `listing` fetch these, `told` what somebody has named
//! * `kept`: how much of names is remembered; `surplus`: how many files
//! * `at_hand`: how far a program would get without asking
//! * `writing`: contents on their way out
//! * `newborn`: files made in memory; `unborn`: which of them may go out, and when; `flights`,
//!   `births` and `openings`: on their way to the store; `replay`: those that a killed gateway has
//!   left; `reserved`: space that the store keeps free for them
//! * `recalls`: what the store says on its own account, and what the kernel must forget;
//!   `recalled`: recalls until they are answered; `forgetting`: marks and losses until the kernel
//!   has forgotten
//!
//! # What holds
//!
//! *Between a recall and its answer nothing old gets to the kernel.* An answer to the kernel that
//! may be remembered is given while the table is locked ([`Volume::tell`]), and a recall takes its
//! leases out of the table before it has the kernel forget: so the kernel got the answer before it
//! is told to forget it, or gets it with the remark that it is not to be kept.
//!
//! *What was written is on the server when close(2), fsync(2), or any other question about the file
//! is answered.* Files of a directory that this session has just made, and that nobody else knows,
//! are there a little later: before anybody else looks, and in the journal until then.

mod acls;
mod ahead;
mod appending;
mod at_hand;
mod attributed;
mod attributes;
mod births;
mod chunks;
mod files;
mod flights;
mod forgetting;
mod found;
mod keep;
mod kept;
mod listing;
mod names;
mod newborn;
mod openings;
mod order;
mod outcomes;
mod readers;
mod reading;
mod recalled;
mod recalls;
mod replay;
mod reserved;
mod surplus;
mod table;
mod told;
mod tours;
mod unborn;
mod unsent;
mod writing;

use std::{
    collections::HashMap,
    ffi::OsStr,
    ops::Range,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use tokio::{
    sync::{Notify, mpsc, watch},
    task::AbortHandle,
};

use crate::disk::DiskCache;
use crate::store::{
    Answer, Attributes, Caller, Entry, Errno, FileId, Leases, Op, Place, Settling, Stamp, Store,
    StoreState, Watched,
};
use at_hand::RoundTrip;
use births::Births;
use chunks::Chunks;
use files::Open;
use forgetting::Losses;
use keep::Keep;
use listing::Listings;
use readers::Readers;
use reading::Loading;
use recalled::Recalled;
use reserved::Reservations;
use table::{Known, Node, Table};
use tours::Tours;
use writing::Writes;

pub use at_hand::{AtHand, Use};
pub use files::Opened;
pub use listing::{Directory, Name};
pub(crate) use recalled::KERNEL_PATIENCE;
pub use recalls::{Changes, Invalidate};
pub use table::{MAX_FILES, ROOT};
pub use told::{Expectation, Expected};
pub use writing::Source;

/// Files of one call are looked up again so often: the executor may be started anew between each
/// look and the call. Beyond that it contradicts itself.
const MOST_SEARCHES: usize = 100;

/// How a volume behaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settings {
    /// Every write is on the server before it is answered.
    pub sync: bool,
    /// Contents that are kept in memory, in bytes.
    pub memory_bytes: u64,
    /// Files of which something is remembered, but for those in use.
    pub most_files: usize,
}

/// What the kernel may keep of one answer, and for how long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Told {
    /// The kernel's number of the file.
    pub number: u64,
    /// What goes with the number as long as the kernel knows it.
    pub generation: u64,
    /// How it is.
    pub attributes: Attributes,
    /// How long the attributes may be remembered.
    pub attributes_life: Duration,
    /// How long the name may be.
    pub name_life: Duration,
}

/// How a volume does, for `posh volumes`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct State {
    /// Of its store.
    pub store: StoreState,
    /// Contents that are kept, in bytes.
    pub cached_bytes: u64,
    /// Written and not yet on the server, in bytes.
    pub dirty_bytes: u64,
    /// Leases that are held.
    pub leases: u64,
    /// Files that are remembered.
    pub files: u64,
    /// What is remembered of names, in bytes.
    pub names_bytes: u64,
    /// Files that are open.
    pub open: u64,
    /// What was made here and is not on the server, since it does not take it, in words.
    pub lost: Option<String>,
}

/// A mounted volume. Its methods are what the kernel asks; the errors of all of them are the
/// store's, for the process that asked.
pub struct Volume {
    store: Arc<dyn Store>,
    settings: Settings,
    table: Mutex<Table>,
    opens: Mutex<HashMap<u64, Arc<Open>>>,
    directories: Mutex<HashMap<u64, Arc<Directory>>>,
    next_open: AtomicU64,
    writes: Writes,
    chunks: Chunks,
    disk: Option<Keep>,
    invalidate: mpsc::UnboundedSender<Invalidate>,
    loading: Loading,
    /// What programs are reading now, by numbers of these reads: of which open file, and where.
    reads: Mutex<HashMap<u64, (u64, Range<u64>)>>,
    /// Whenever a chunk has come.
    loaded: Notify,
    births: Arc<Births>,
    reservations: Arc<Reservations>,
    recalled: Mutex<Recalled>,
    losses: Mutex<Losses>,
    /// All that the store had to say up to there is forgotten.
    heard: watch::Sender<Stamp>,
    readers: Mutex<Readers>,
    tours: Mutex<Tours>,
    listings: Listings,
    round_trip: RoundTrip,
    /// What works for as long as there is the volume.
    tasks: Mutex<Vec<AbortHandle>>,
}

impl std::fmt::Debug for Volume {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Volume").field("settings", &self.settings).finish_non_exhaustive()
    }
}

impl Volume {
    /// A volume on a store. What the receiver gets must be carried out in order: recalls wait for
    /// it. Needs to be called within the runtime that is to work for it.
    ///
    /// What was read is also kept on the disk, if there is one to keep it.
    #[must_use]
    pub fn new(
        store: Arc<dyn Store>,
        settings: Settings,
        disk: Option<DiskCache>,
    ) -> (Arc<Self>, mpsc::UnboundedReceiver<Invalidate>) {
        let (invalidate, invalidations) = mpsc::unbounded_channel();
        let volume = Arc::new(Self {
            table: Mutex::new(Table::new(store.root(), settings.most_files)),
            store,
            settings,
            opens: Mutex::default(),
            directories: Mutex::default(),
            next_open: AtomicU64::new(1),
            writes: Writes::default(),
            chunks: Chunks::new(settings.memory_bytes),
            disk: disk.map(Keep::new),
            invalidate,
            loading: Loading::default(),
            reads: Mutex::default(),
            loaded: Notify::new(),
            births: Births::new(),
            reservations: Arc::default(),
            recalled: Mutex::default(),
            losses: Mutex::default(),
            heard: watch::Sender::new(Stamp(0)),
            readers: Mutex::default(),
            tours: Mutex::default(),
            listings: Listings::default(),
            round_trip: RoundTrip::default(),
            tasks: Mutex::default(),
        });
        let listener =
            tokio::spawn(recalls::listen(Arc::downgrade(&volume), volume.store.notices()));
        let sender =
            tokio::spawn(births::send(Arc::clone(&volume.births), Arc::downgrade(&volume)));
        let answers = (volume.store.clone(), volume.answers_wake());
        let answerer =
            tokio::spawn(recalled::answer(Arc::downgrade(&volume), answers.0, answers.1));
        let idle = tokio::spawn(reserved::give_back(
            Arc::clone(&volume.reservations),
            Arc::downgrade(&volume),
        ));
        let is_full = volume.table().is_full();
        let surplus = tokio::spawn(surplus::give_back(Arc::downgrade(&volume), is_full));
        let in_time = tokio::spawn(forgetting::forget_in_time(Arc::downgrade(&volume)));
        let tasks =
            [listener, sender, answerer, idle, surplus, in_time].map(|task| task.abort_handle());
        volume.tasks.lock().unwrap_or_else(PoisonError::into_inner).extend(tasks);
        (volume, invalidations)
    }

    /// How it does.
    #[must_use]
    pub fn state(&self) -> State {
        let ((files, leases), kept) = {
            let table = self.table();
            (table.counts(), table.kept_bytes())
        };
        let mut store = self.store.state();
        if self.recalled().has_ended() {
            store.fault.get_or_insert_with(|| {
                "it recalls leases without end; nothing is remembered".to_owned()
            });
        }
        State {
            store,
            cached_bytes: self.disk.as_ref().map_or_else(|| self.chunks.bytes(), Keep::bytes),
            dirty_bytes: self.writes.bytes(),
            leases,
            files,
            names_bytes: kept as u64,
            open: self.opens.lock().unwrap_or_else(PoisonError::into_inner).len() as u64,
            lost: self.undelivered(),
        }
    }

    /// Before a command runs on the server: returns when what was written here is there. What
    /// others hold back its executor asks for.
    ///
    /// # Errors
    /// Something is not there: the server is out of reach, or has refused it.
    pub async fn settle(&self) -> Result<(), Errno> {
        let is_there = self.drain_all().await;
        self.show_as_sent();
        is_there?;
        // What has no place any more is nowhere on the server.
        if !self.births.unplaced().is_empty() {
            return Err(Errno::ESTALE);
        }
        let refusal = self.table().refusal_below(ROOT);
        refusal.map_or(Ok(()), Err)
    }

    /// Nothing more is sent, and who waits for the store waits no longer: the volume is unmounted.
    /// What is in the journal is sent by the next volume that is given it.
    pub fn end(&self) {
        self.births.end();
        self.writes.end();
        if let Some(journal) = self.births.journal() {
            journal.abandon();
        }
        if let Some(disk) = &self.disk {
            disk.give_up();
        }
    }

    /// It is taken out of the tree, and files of it may still be open: works on for them, without a
    /// journal and a disk, which are the next volume's. What is in the journal is sent first.
    pub fn hand_over(&self) {
        if let Some(journal) = self.births.journal() {
            journal.hand_over();
        }
        if let Some(disk) = &self.disk {
            disk.give_up();
        }
    }

    /// After a command ran on the server of which nothing else is told: what it has changed is seen
    /// from now on.
    pub async fn catch_up(self: &Arc<Self>) {
        let settled = self.store.call(&Caller::default(), Op::Settle(Settling::Recalls)).await;
        if settled.is_err() || self.store.state().watched == Watched::LeaseEnd {
            // Nobody says what has changed: anything may have.
            self.forget_everything().await;
        }
    }

    /// Gives a reply to the kernel about a file that has been looked up by name, with the time that
    /// it may be kept. `parent` is the number of the directory with that name.
    pub fn tell<R>(
        &self,
        (parent, name): (u64, &OsStr),
        entry: &Entry,
        reply: impl FnOnce(Told) -> R,
    ) -> R {
        let mut table = self.table();
        self.drop_surplus(&mut table);
        let number = table.looked_up(entry.attributes.id);
        let name_life = self.names_life(&table, parent);
        if !name_life.is_zero() {
            table.told(parent, name);
        }
        let attributes_life = self.attributes_life(&table, number, &entry.attributes);
        let generation = table.node(number).map_or(0, |node| node.generation);
        reply(Told { number, generation, attributes: entry.attributes, attributes_life, name_life })
    }

    /// The same for a file that the kernel has asked about by number.
    pub fn tell_attributes<R>(
        &self,
        number: u64,
        attributes: Attributes,
        reply: impl FnOnce(Told) -> R,
    ) -> R {
        let table = self.table();
        let attributes_life = self.attributes_life(&table, number, &attributes);
        let generation = table.node(number).map_or(0, |node| node.generation);
        reply(Told { number, generation, attributes, attributes_life, name_life: Duration::ZERO })
    }

    /// The same for a name that is not there.
    pub fn tell_absent<R>(
        &self,
        parent: u64,
        name: &OsStr,
        reply: impl FnOnce(Duration) -> R,
    ) -> R {
        let mut table = self.table();
        self.drop_surplus(&mut table);
        let is_known = table.known(parent, name) == Known::Absent;
        let life = if is_known { self.names_life(&table, parent) } else { Duration::ZERO };
        if !life.is_zero() {
            table.told(parent, name);
        }
        reply(life)
    }

    /// The same for names of a directory, until `take` says that there is no more room, or
    /// something was heard of a file since its attributes were found. `give` has the reply, and how
    /// many were told.
    pub fn tell_all<R, T>(
        &self,
        parent: u64,
        names: &[Name],
        mut into: R,
        mut take: impl FnMut(&mut R, &Name, Option<Told>) -> bool,
        give: impl FnOnce(R, usize) -> T,
    ) -> T {
        let mut table = self.table();
        self.drop_surplus(&mut table);
        let name_life = self.names_life(&table, parent);
        let mut count = 0;
        for name in names {
            let heard_since = |entry: &Entry| {
                table.of(entry.attributes.id).is_none_or(|node| node.stamp != entry.stamp)
            };
            if name.entry.as_ref().is_some_and(heard_since) {
                break;
            }
            // What was listed may have been renamed or removed since.
            let (is_so, name_life) = match (name.entry, table.known(parent, &name.name)) {
                (Some(entry), Known::File(file)) => (file == entry.attributes.id, name_life),
                (Some(_), Known::Unknown) if table.has_names_of(parent, name.seen) => {
                    (true, name_life)
                }
                (Some(_), Known::Unknown) => (true, Duration::ZERO),
                _ => (false, Duration::ZERO),
            };
            let told = name.entry.filter(|_| is_so).map(|entry| {
                let number = table.number(entry.attributes.id);
                if !name_life.is_zero() || table.node(number).is_some_and(|node| node.at.is_none())
                {
                    table.place(entry.attributes.id, parent, &name.name);
                }
                let attributes_life = self.attributes_life(&table, number, &entry.attributes);
                let generation = table.node(number).map_or(0, |node| node.generation);
                Told {
                    number,
                    generation,
                    attributes: entry.attributes,
                    attributes_life,
                    name_life,
                }
            });
            if !take(&mut into, name, told) {
                break;
            }
            count += 1;
            if let Some(told) = told {
                table.looked_up(told.attributes.id);
                if !told.name_life.is_zero() {
                    table.told(parent, &name.name);
                }
            }
        }
        give(into, count)
    }

    /// Forgets names beyond what may be kept, here and in the kernel. To be called before names are
    /// told: replies with names that were told are given while the table is locked, so that the
    /// kernel has them by now and forgets them.
    fn drop_surplus(&self, table: &mut Table) {
        for (number, names) in table.drop_surplus() {
            let _ = self.invalidate.send(Invalidate::of(number, Some(names)));
        }
    }

    /// Whether the kernel was told of a file and has not forgotten it since. Takes its turn after
    /// the replies that are being given.
    #[must_use]
    pub fn is_told(&self, number: u64) -> bool {
        self.table().node(number).is_some_and(|node| node.lookups > 0)
    }

    /// The kernel has forgotten a file so many times.
    pub fn forgotten(&self, number: u64, times: u64) {
        self.table().forget(number, times);
    }

    /// A write may have taken bits of the mode away: the kernel has to ask.
    pub async fn mode_may_change(&self, number: u64) {
        let Ok(file) = self.file(number) else { return };
        if self.unborn_attributes(number).is_some() {
            // It has no such bits.
            return;
        }
        let _ = self.drain(file).await;
        self.forget_attributes(number);
    }

    fn attributes_life(&self, table: &Table, number: u64, attributes: &Attributes) -> Duration {
        self.life(table.node(number).filter(|node| node.attributes.as_ref() == Some(attributes)))
    }

    fn names_life(&self, table: &Table, directory: u64) -> Duration {
        self.life(table.node(directory).filter(|node| node.leases.contains(Leases::ENTRIES)))
    }

    /// How long the kernel may remember what a lease of the file allows, if there is one.
    fn life(&self, leased: Option<&Node>) -> Duration {
        leased
            .map(|node| self.good_until(node).saturating_duration_since(crate::clock::now()))
            .unwrap_or_default()
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Until when what is remembered of a file may be used.
    fn good_until(&self, node: &Node) -> Instant {
        let valid_until = self.store.valid_until();
        if node.unborn.is_none() && node.stamp < self.store.valid_above() {
            return crate::clock::now();
        }
        self.store.lease_limit().map_or(valid_until, |limit| valid_until.min(node.heard + limit))
    }

    /// Whether that is now.
    fn is_good(&self, node: &Node) -> bool {
        self.good_until(node) > crate::clock::now()
    }

    fn file(&self, number: u64) -> Result<FileId, Errno> {
        self.table().node(number).map(|node| node.file).ok_or(Errno::ESTALE)
    }

    fn fresh_number(&self) -> u64 {
        self.next_open.fetch_add(1, Ordering::Relaxed)
    }

    /// Asks the store, and remembers what it says. Files that it does not know any more are looked
    /// up first.
    async fn ask(&self, caller: &Caller, op: Op) -> Result<Answer, Errno> {
        let files = op.files();
        let mut answer = self.ask_once(caller, op.clone()).await;
        for _ in 0..MOST_SEARCHES {
            if !matches!(answer, Err(Errno::ESTALE)) {
                break;
            }
            self.find_all_again(caller, &files).await?;
            answer = self.ask_once(caller, op.clone()).await;
        }
        answer
    }

    /// As [`Self::ask`], about a file that may be reached only by an open handle of it.
    async fn ask_of(
        &self,
        caller: &Caller,
        file: FileId,
        op: impl Fn(Place) -> Op,
    ) -> Result<Answer, Errno> {
        match self.ask(caller, op(file.into())).await {
            // An open file goes on to work when its names are gone, or not to be reached any more.
            Err(errno @ (Errno::ESTALE | Errno::EACCES)) => {
                let handle = self.table().of(file).and_then(|node| node.handles.last().copied());
                let handle = handle.ok_or(errno)?;
                self.ask(caller, op(Place { file, handle: Some(handle) })).await
            }
            answer => answer,
        }
    }
}

impl Drop for Volume {
    fn drop(&mut self) {
        self.tasks
            .get_mut()
            .unwrap_or_else(PoisonError::into_inner)
            .iter()
            .for_each(AbortHandle::abort);
    }
}
