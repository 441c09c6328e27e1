//! The file system of a volume, without FUSE: it answers the kernel's requests from its cache as
//! far as leases allow, and otherwise by the [`Store`].
//!
//! * `table`: files and their cached attributes and names; never waits
//! * `names`, `attributes`, `acls`, `listing`, `files`: the kernel's requests, by subject
//! * `reading`, `chunks` and `keep`: contents, read ahead and cached, in memory and on the disk
//! * `tours`, `readers` and `order`: predictions of the directories and files that are opened next;
//!   never wait. `ahead` and `listing` prefetch these, `told` those that the caller has named
//! * `kept`: limits for cached names; `surplus`: limits for cached files
//! * `at_hand`: estimate of a program's need for round trips
//! * `writing`: write-back of contents
//! * `newborn`: files created in memory; `unborn`: their states and queue; `flights`, `births`,
//!   `openings` and `outcomes`: sending them to the store; `replay`: those that a killed gateway
//!   has left; `reserved`: space that the store reserves for them
//! * `recalls`: the store's notices, and the invalidations for them; `recalled`: unanswered
//!   recalls; `forgetting`: marks and losses until the kernel's caches are invalidated
//!
//! # Invariants
//!
//! *Between a recall and its answer the kernel gets no stale data to cache.* A cacheable reply is
//! sent while the table is locked ([`Volume::tell`]), and a recall takes its leases out of the
//! table before the kernel's invalidation. So the kernel gets a reply either before the
//! invalidation, or with a lifetime of 0.
//!
//! *When close(2), fsync(2), or any other request about the file is answered, its written data is
//! on the server.* Files in a directory that this session has just created, and that no other
//! session knows, follow later: before any other session looks, and in the journal until then.

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
use crate::journal::{Damage, Journal};
use crate::store::{
    Answer, Attributes, Caller, Entry, Errno, FileId, Leases, NameIn, Op, Place, Settling, Stamp,
    Store, StoreState, Watched,
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
pub use births::EarlierSessionsError;
pub use files::Opened;
pub use listing::{Directory, Name};
pub(crate) use recalled::KERNEL_PATIENCE;
pub use recalls::{Changes, Invalidate};
pub use table::{MAX_FILES, ROOT};
pub use told::{Expectation, Expected};
pub use writing::Source;

/// Limit of attempts to look up a call's files again: the executor may restart between each look-up
/// and the call.
const MOST_SEARCHES: usize = 100;

/// Settings of a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settings {
    /// True if every write goes to the server before it is answered.
    pub sync: bool,
    /// Limit for contents cached in memory, in bytes.
    pub memory_bytes: u64,
    /// Limit for cached files, apart from those in use.
    pub most_files: usize,
}

/// Reply to the kernel about a file, with cache lifetimes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Told {
    /// The kernel's number of the file.
    pub number: u64,
    /// Generation of the number, constant as long as the kernel knows the number.
    pub generation: u64,
    /// The file's attributes.
    pub attributes: Attributes,
    /// Time for which the attributes may be cached.
    pub attributes_life: Duration,
    /// Time for which the name may be cached.
    pub name_life: Duration,
}

/// State of a volume, for `posh volumes`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct State {
    /// State of its store.
    pub store: StoreState,
    /// Cached contents, in bytes.
    pub cached_bytes: u64,
    /// Data that is written and not yet on the server, in bytes.
    pub dirty_bytes: u64,
    /// Number of held leases.
    pub leases: u64,
    /// Number of cached files.
    pub files: u64,
    /// Memory of cached names, in bytes.
    pub names_bytes: u64,
    /// Number of open files.
    pub open: u64,
    /// Message about new files that the server refuses, or about another failure.
    pub lost: Option<String>,
    /// Damage of the journal of earlier gateways.
    pub damage: Option<Damage>,
}

/// A mounted volume. Its methods are the kernel's requests; their errors are the store's, for the
/// calling process.
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
    /// Reads in progress by their numbers: the open file, and the range.
    reads: Mutex<HashMap<u64, (u64, Range<u64>)>>,
    /// Notified when a chunk has arrived.
    loaded: Notify,
    births: Arc<Births>,
    reservations: Arc<Reservations>,
    recalled: Mutex<Recalled>,
    losses: Mutex<Losses>,
    /// Stamp up to which all notices of the store have been carried out.
    heard: watch::Sender<Stamp>,
    readers: Mutex<Readers>,
    tours: Mutex<Tours>,
    listings: Listings,
    round_trip: RoundTrip,
    /// Background tasks, which end with the volume.
    tasks: Mutex<Vec<AbortHandle>>,
}

impl std::fmt::Debug for Volume {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Volume").field("settings", &self.settings).finish_non_exhaustive()
    }
}

impl Volume {
    /// Creates a volume on a store. The caller must carry out the invalidations from the receiver
    /// in order: recalls wait for them. Must be called inside the volume's Tokio runtime.
    ///
    /// With a `disk`, contents are also cached there.
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

    /// Returns the volume's state.
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
            damage: self.births.journal().and_then(Journal::damage),
        }
    }

    /// Returns when all data of this volume is on the server, for a command that will run there.
    /// Its executor requests the data that other sessions hold back.
    ///
    /// # Errors
    /// Some data is not on the server, which is unreachable or has refused it.
    pub async fn settle(&self) -> Result<(), Errno> {
        let is_there = self.drain_all().await;
        self.show_as_sent();
        is_there?;
        // A file whose directory is gone is not on the server.
        if !self.births.unplaced().is_empty() {
            return Err(Errno::ESTALE);
        }
        let refusal = self.table().refusal_below(ROOT);
        refusal.map_or(Ok(()), Err)
    }

    /// Ends the volume after the unmount: sends nothing more, and aborts all waits for the store.
    /// The next volume with the journal sends its records.
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

    /// Releases journal and disk to the next volume after a lazy unmount. The volume goes on to
    /// serve its open files without them; it still sends the present records of the journal.
    pub fn hand_over(&self) {
        if let Some(journal) = self.births.journal() {
            journal.hand_over();
        }
        if let Some(disk) = &self.disk {
            disk.give_up();
        }
    }

    /// Makes the changes of an earlier command on the server visible, if there is no other
    /// information about them.
    pub async fn catch_up(self: &Arc<Self>) {
        let settled = self.store.call(&Caller::default(), Op::Settle(Settling::Recalls)).await;
        if settled.is_err() || self.store.state().watched == Watched::LeaseEnd {
            // Without a watch anything may have changed.
            self.forget_everything().await;
        }
    }

    /// Replies to the kernel about a file that was looked up by name, with cache lifetimes.
    pub fn tell<R>(&self, at: NameIn<'_, u64>, entry: &Entry, reply: impl FnOnce(Told) -> R) -> R {
        let mut table = self.table();
        self.drop_surplus(&mut table);
        let number = table.looked_up(entry.attributes.id);
        let name_life = self.names_life(&table, at.parent);
        if !name_life.is_zero() {
            table.told(at);
        }
        let attributes_life = self.attributes_life(&table, number, &entry.attributes);
        let generation = table.node(number).map_or(0, |node| node.generation);
        reply(Told { number, generation, attributes: entry.attributes, attributes_life, name_life })
    }

    /// Like [`Self::tell`], for a file that the kernel has asked about by number.
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

    /// Like [`Self::tell`], for a name that does not exist.
    pub fn tell_absent<R>(&self, at: NameIn<'_, u64>, reply: impl FnOnce(Duration) -> R) -> R {
        let mut table = self.table();
        self.drop_surplus(&mut table);
        let is_known = table.known(at) == Known::Absent;
        let life = if is_known { self.names_life(&table, at.parent) } else { Duration::ZERO };
        if !life.is_zero() {
            table.told(at);
        }
        reply(life)
    }

    /// Like [`Self::tell`], for names of a directory, until `take` returns false for lack of room,
    /// or up to a file whose attributes may be stale. `give` sends the reply, and gets the number
    /// of names in it.
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
            let at = NameIn { parent, name: &name.name };
            let heard_since = |entry: &Entry| {
                table.of(entry.attributes.id).is_none_or(|node| node.stamp != entry.stamp)
            };
            if name.entry.as_ref().is_some_and(heard_since) {
                break;
            }
            // The listed name may have been renamed or removed since.
            let (is_so, name_life) = match (name.entry, table.known(at)) {
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
                    table.place(entry.attributes.id, at);
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
                    table.told(at);
                }
            }
        }
        give(into, count)
    }

    /// Drops names beyond the limit, in the table and in the kernel. To be called before the kernel
    /// is sent more names: replies are sent while the table is locked, so that the kernel has got
    /// all earlier names, and drops them.
    fn drop_surplus(&self, table: &mut Table) {
        for (number, names) in table.drop_surplus() {
            let _ = self.invalidate.send(Invalidate::of(number, Some(names)));
        }
    }

    /// Returns true if the kernel was sent a file and has not forgotten it since. Waits for replies
    /// that are being sent.
    #[must_use]
    pub fn is_told(&self, number: u64) -> bool {
        self.table().node(number).is_some_and(|node| node.lookups > 0)
    }

    /// Handles FUSE_FORGET: subtracts `times` from a file's look-ups.
    pub fn forgotten(&self, number: u64, times: u64) {
        self.table().forget(number, times);
    }

    /// Invalidates the mode in the kernel, since a write may have cleared setuid and setgid.
    pub async fn mode_may_change(&self, number: u64) {
        let Ok(file) = self.file(number) else { return };
        if self.unborn_attributes(number).is_some() {
            // Files created in memory have no such bits.
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

    /// Returns the kernel's cache lifetime under a lease of the file, or 0 without one.
    fn life(&self, leased: Option<&Node>) -> Duration {
        leased
            .map(|node| self.good_until(node).saturating_duration_since(crate::clock::now()))
            .unwrap_or_default()
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        let mut table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        // Another server or another root may follow after a loss of the connection.
        table.lease_limit = self.store.lease_limit();
        table.follow_root(self.store.root());
        table
    }

    /// Returns the time until which the cache of a file is valid.
    fn good_until(&self, node: &Node) -> Instant {
        let valid_until = self.store.valid_until();
        if node.unborn.is_none() && node.stamp < self.store.valid_above() {
            return crate::clock::now();
        }
        let of_lease = self.store.lease_limit().map(|limit| node.cached_since + limit);
        of_lease.map_or(valid_until, |of_lease| valid_until.min(of_lease))
    }

    /// Returns true if the cache of a file is valid now.
    fn is_good(&self, node: &Node) -> bool {
        self.good_until(node) > crate::clock::now()
    }

    fn file(&self, number: u64) -> Result<FileId, Errno> {
        self.table().node(number).map(|node| node.file).ok_or(Errno::ESTALE)
    }

    fn fresh_number(&self) -> u64 {
        self.next_open.fetch_add(1, Ordering::Relaxed)
    }

    /// Calls the store, and caches its answer. If the store no longer knows the files (`ESTALE`),
    /// they are looked up by their names, and the call is repeated.
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

    /// Like [`Self::ask`], for a file that may be reachable only by an open handle.
    async fn ask_of(
        &self,
        caller: &Caller,
        file: FileId,
        op: impl Fn(Place) -> Op,
    ) -> Result<Answer, Errno> {
        match self.ask(caller, op(file.into())).await {
            // An open file keeps working when its names are gone or unreachable.
            Err(errno @ (Errno::ESTALE | Errno::EACCES)) => {
                let handles = self.table().of(file).map(|node| node.handles.clone());
                for handle in handles.unwrap_or_default().into_iter().rev() {
                    match self.ask(caller, op(Place { file, handle: Some(handle) })).await {
                        // It was closed meanwhile.
                        Err(Errno::ESTALE | Errno::EBADF) => {}
                        answer => return answer,
                    }
                }
                Err(errno)
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
