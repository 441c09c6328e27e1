//! Processing of the store's notices, and invalidations of the kernel's caches.

use std::{
    ffi::OsString,
    ops::Range,
    sync::{Arc, Weak},
    time::Duration,
};

use tokio::sync::oneshot;
use tokio_stream::StreamExt as _;

use super::{
    Volume,
    forgetting::{Forgetting, Share},
    recalled::Recall,
    table::ROOT,
};
use crate::{
    leases::LEASE_TIME,
    store::{FileId, Leases, Notice, Notices, Returned, Stamp, Watched},
};

/// Limit of write leases that are returned with a run; the executor recalls the rest.
const MAX_GIVEN_UP: usize = 1000;

/// Possible changes by a command on the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Changes {
    /// The command only reads.
    None,
    /// The command may have changed files.
    Possible,
}

/// Time that a write may take from the kernel's pages to this process, if its thread has to wait
/// for a processor.
const WRITE_TIME: Duration = Duration::from_secs(2);

/// Names of directories, by the directories' numbers.
pub type Names = Vec<(u64, Vec<OsString>)>;

/// The file's number, if it is known, and the names in it that the kernel may cache.
pub(super) type Taken = (Option<u64>, Option<Names>);

/// An invalidation of the kernel's caches. Dropping it reports that it is done.
#[derive(Debug)]
pub struct Invalidate {
    /// Number of the file whose attributes are invalidated.
    pub number: u64,
    /// True if its pages are invalidated, too.
    pub pages: bool,
    /// Ranges of these that are being read: the kernel keeps their pages locked until then.
    pub busy: Vec<Range<u64>>,
    /// Names to invalidate, by the numbers of their directories. Invalidating all names of all
    /// directories is fine, too.
    pub names: Option<Names>,
    /// Files to invalidate completely, and whose unused dentries are dropped.
    pub let_go: Vec<u64>,
    /// Notified when it is done.
    done: Option<oneshot::Sender<()>>,
}

impl Invalidate {
    /// Invalidates a file's attributes, and names in it, if any; nothing waits for it.
    pub(super) fn of(number: u64, names: Option<Vec<OsString>>) -> Self {
        let names = names.map(|names| vec![(number, names)]);
        Self { number, pages: false, busy: Vec::new(), names, let_go: Vec::new(), done: None }
    }

    /// Invalidates names of directories; nothing waits for it.
    pub(super) fn of_names(names: Names) -> Self {
        Self {
            number: ROOT,
            pages: false,
            busy: Vec::new(),
            names: Some(names),
            let_go: Vec::new(),
            done: None,
        }
    }

    /// Like [`Self::of`], with pages and names of any directories. The receiver completes when it
    /// is done.
    pub(super) fn awaited(
        number: u64,
        pages: bool,
        names: Option<Names>,
    ) -> (Self, oneshot::Receiver<()>) {
        let (done, is_done) = oneshot::channel();
        (
            Self { number, pages, busy: Vec::new(), names, let_go: Vec::new(), done: Some(done) },
            is_done,
        )
    }

    /// Invalidates attributes and pages of a file that is being read. The receiver completes when
    /// it is done.
    pub(super) fn beside_reads(
        number: u64,
        busy: Vec<Range<u64>>,
    ) -> (Self, oneshot::Receiver<()>) {
        let (mut invalidate, is_done) = Self::awaited(number, true, None);
        invalidate.busy = busy;
        (invalidate, is_done)
    }

    /// Drops these files, and names of directories. The receiver completes when it is done.
    pub(super) fn let_go(files: Vec<u64>, names: Names) -> (Self, oneshot::Receiver<()>) {
        let (mut invalidate, is_done) =
            Self::awaited(ROOT, false, (!names.is_empty()).then_some(names));
        invalidate.let_go = files;
        (invalidate, is_done)
    }
}

impl Invalidate {
    /// Moves the completion to a new value.
    pub(crate) fn take_over(&mut self) -> Self {
        let (number, pages, done) = (self.number, self.pages, self.done.take());
        Self { number, pages, busy: Vec::new(), names: None, let_go: Vec::new(), done }
    }
}

impl Drop for Invalidate {
    fn drop(&mut self) {
        if let Some(done) = self.done.take() {
            let _ = done.send(());
        }
    }
}

/// Processes notices until the volume or the store is gone. It never blocks on one notice, which
/// may need a later one.
pub(super) async fn listen(volume: Weak<Volume>, mut notices: Notices) {
    let mut forgetting = Forgetting::default();
    while let Some(notice) = notices.next().await {
        let Some(volume) = volume.upgrade() else { return };
        match notice {
            Notice::Lost { stamp } => {
                volume.reservations.are_lost();
                volume.lost(stamp, Some(forgetting.share()));
            }
            Notice::Recall { file, leases, stamp } => {
                volume.take_recall(Returned { file, leases, stamp }, forgetting.share());
            }
            Notice::Is(entry) => volume.table().learn_known(&entry, crate::clock::now()),
            Notice::All { stamp } => volume.mark(forgetting.next(), stamp),
        }
    }
}

impl Volume {
    /// Returns, after a command on the server, when no data from before the store's notice with
    /// that stamp is cached. `changes` matters only if changes on the server aren't watched.
    pub async fn caught_up(self: &Arc<Self>, stamp: Stamp, changes: Changes) {
        let mut heard = self.heard.subscribe();
        let is_heard =
            tokio::time::timeout(LEASE_TIME, heard.wait_for(|heard| *heard >= stamp)).await.is_ok();
        let is_watched = self.store.state().watched != Watched::LeaseEnd;
        if !is_heard || (!is_watched && changes == Changes::Possible) {
            let round = self.lost(stamp, None);
            self.forgotten_by(round).await;
        }
    }

    /// Takes unused write leases, to be returned with a command that will run on the server, so
    /// that they need not be recalled. Written data is already there ([`Volume::settle`]).
    #[must_use]
    pub fn give_up_writing(&self) -> Vec<Returned> {
        let mut table = self.table();
        let mut taken = table.take_writable(MAX_GIVEN_UP);
        let is_directory = |file| table.of(file).is_some_and(|node| node.own.is_some());
        // The recalls of leases in use are answered when their data is written.
        taken.retain(|(file, _)| {
            let is_used = if is_directory(*file) {
                !table.unborn.is_idle()
            } else {
                self.writes.is_dirty(*file)
            };
            !is_used
        });
        drop(table);
        taken
            .into_iter()
            .map(|(file, stamp)| Returned { file, leases: Leases::WRITE, stamp })
            .collect()
    }

    fn take_recall(self: &Arc<Self>, returned: Returned, share: Share) {
        if !self.recalled().has_room() {
            return self.end_as_broken();
        }
        // Before any later reply to the kernel.
        let taken = self.take_leases(&returned);
        self.take_up(Recall { returned, taken, share });
    }

    pub(super) fn take_leases(&self, recalled: &Returned) -> Taken {
        let Returned { file, leases, stamp } = *recalled;
        let mut table = self.table();
        let told = leases.contains(Leases::ENTRIES).then(|| table.take_told(file));
        let number = table.recall(file, leases, stamp);
        (number, told.zip(number).map(|(told, number)| vec![(number, told)]))
    }

    /// Handles a server that violates the protocol: from now on nothing of it is cached, and its
    /// recalls are not answered.
    pub(super) fn end_as_broken(self: &Arc<Self>) {
        if self.recalled().end() {
            tracing::error!(
                "the server recalls leases without end: nothing is remembered any more"
            );
            self.lost(Stamp(u64::MAX), None);
            self.heard.send_replace(Stamp(u64::MAX));
        }
    }

    /// Returns true if pages of the file were invalidated so recently that a write may have been in
    /// flight then.
    pub fn were_pages_recalled(&self, number: u64) -> bool {
        let recalled = self.table().node(number).and_then(|node| node.pages_recalled);
        recalled.is_some_and(|at| crate::clock::now() - at < WRITE_TIME)
    }

    /// Invalidates the kernel's pages of a file, which are stale, or may become so without a
    /// recall.
    pub(super) fn forget_pages(&self, file: FileId) {
        if let Some(number) = self.table().number_of(file) {
            let _ = self.invalidate.send(Invalidate::awaited(number, true, None).0);
        }
    }

    /// Like [`Self::forget_pages`], but only without a lease. To be called before the reply to a
    /// read or a write, by which the kernel gets pages: they are invalidated as soon as it has
    /// them. A later loss of the lease invalidates them, too.
    pub(super) fn forget_unleased_pages(&self, file: FileId) {
        let is_leased =
            self.table().of(file).is_some_and(|node| node.leases.contains(Leases::DATA));
        if !is_leased {
            self.forget_pages(file);
        }
    }

    /// Invalidates the kernel's attributes of a file.
    pub(super) fn forget_attributes(&self, number: u64) {
        let _ = self.invalidate.send(Invalidate::of(number, None));
    }
}
