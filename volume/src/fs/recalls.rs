//! What the store says on its own account, and what the kernel must forget for it.

use std::{
    ffi::OsString,
    sync::Weak,
    time::{Duration, Instant},
};

use tokio::sync::{mpsc, oneshot};
use tokio_stream::StreamExt as _;

use super::{Volume, table::ROOT, unborn::Which};
use crate::{
    leases::LEASE_TIME,
    store::{Caller, FileId, Leases, Notice, Notices, Op, Returned, Stamp, Watched},
};

/// How long a recall waits for the kernel, which waits for readers of the pages. Past it the recall is answered by the
/// end of the lease.
const KERNEL_PATIENCE: Duration = Duration::from_secs(5);

/// Rights to write that go back with a run; of more the executor asks.
const MAX_GIVEN_UP: usize = 1000;

/// Whether a command that ran on the server can have changed anything.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Changes {
    /// It only reads.
    None,
    /// It may have.
    Possible,
}

/// Names of directories, by the directories' numbers.
pub type Names = Vec<(u64, Vec<OsString>)>;

/// The file's number, if it is known, and what the kernel was told of its names.
type Taken = (Option<u64>, Option<Names>);

/// What the kernel must forget. Dropping it says that it has.
#[derive(Debug)]
pub struct Invalidate {
    /// The file's number; its attributes are forgotten.
    pub number: u64,
    /// And its contents.
    pub pages: bool,
    /// And names, by the numbers of their directories; all names of all directories would do as well.
    pub names: Option<Names>,
    /// Told when it is done.
    done: Option<oneshot::Sender<()>>,
}

impl Invalidate {
    /// Attributes of a file, and names in it where there are some; nobody waits.
    pub(super) fn of(number: u64, names: Option<Vec<OsString>>) -> Self {
        Self { number, pages: false, names: names.map(|names| vec![(number, names)]), done: None }
    }
}

impl Drop for Invalidate {
    fn drop(&mut self) {
        if let Some(done) = self.done.take() {
            let _ = done.send(());
        }
    }
}

/// Takes notices in until the volume or the store has gone. Each by itself: what one waits for may need another.
pub(super) async fn listen(volume: Weak<Volume>, mut notices: Notices) {
    let mut forgetting = Forgetting::new();
    while let Some(notice) = notices.next().await {
        let Some(volume) = volume.upgrade() else { return };
        let share = forgetting.share();
        match notice {
            Notice::Lost { stamp } => {
                volume.lost(stamp);
                tokio::spawn(async move { volume.forget_before(share).await });
            }
            Notice::Recall { file, leases, stamp } => {
                // Before anything that is told later.
                let taken = volume.take_leases(file, leases, stamp);
                tokio::spawn(async move { volume.recalled(file, (leases, stamp), taken, share).await });
            }
            Notice::Is(entry) => volume.table().learn_known(&entry, Instant::now()),
            Notice::All { stamp } => {
                let before = std::mem::replace(&mut forgetting, Forgetting::new());
                // The next one waits for this one, too.
                let of_next = forgetting.share();
                drop(share);
                tokio::spawn(async move {
                    before.done().await;
                    volume.heard.send_if_modified(|heard| std::mem::replace(heard, stamp.max(*heard)) < stamp);
                    drop(of_next);
                });
            }
        }
    }
}

/// What is being forgotten: over when all shares are dropped.
struct Forgetting {
    share: mpsc::Sender<()>,
    shares: mpsc::Receiver<()>,
}

/// A part of it.
type Share = mpsc::Sender<()>;

impl Forgetting {
    fn new() -> Self {
        let (share, shares) = mpsc::channel(1);
        Self { share, shares }
    }

    fn share(&self) -> Share {
        self.share.clone()
    }

    async fn done(mut self) {
        drop(self.share);
        // Nothing is ever sent.
        let _ = self.shares.recv().await;
    }
}

impl Volume {
    /// After a command ran on the server: returns when nothing from before the store's notice with that stamp is remembered. `Changes`
    /// tells whether there may be any, where nobody else does.
    pub async fn caught_up(&self, stamp: Stamp, changes: Changes) {
        let mut heard = self.heard.subscribe();
        let is_heard = tokio::time::timeout(LEASE_TIME, heard.wait_for(|heard| *heard >= stamp)).await.is_ok();
        let is_watched = self.store.state().watched != Watched::LeaseEnd;
        if !is_heard || (!is_watched && changes == Changes::Possible) {
            self.lost(stamp);
            self.forget(ROOT, false, None).await;
        }
    }

    /// Before a command runs on the server: the rights to write that nobody here uses at the moment go back with it, so that they need not
    /// be recalled. What was written is there already ([`Volume::settle`]).
    #[must_use]
    pub fn give_up_writing(&self) -> Vec<Returned> {
        let mut table = self.table();
        let mut taken = table.take_writable(MAX_GIVEN_UP);
        let is_directory = |file| table.of(file).is_some_and(|node| node.own.is_some());
        // Of the others the recall is answered when they are written.
        taken.retain(|(file, _)| {
            let is_used = if is_directory(*file) { !table.unborn.is_empty() } else { self.writes.is_dirty(*file) };
            !is_used
        });
        drop(table);
        taken.into_iter().map(|(file, stamp)| Returned { file, leases: Leases::WRITE, stamp }).collect()
    }

    async fn recalled(&self, file: FileId, (leases, stamp): (Leases, Stamp), taken: Taken, share: Share) {
        let (number, names) = match taken {
            (None, _) => {
                // It may be one that was made here, whose answer is on its way.
                self.landing().await;
                self.take_leases(file, leases, stamp)
            }
            taken => taken,
        };
        if leases.contains(Leases::WRITE) {
            self.bring_out(Which::All).await;
            self.drain(file).await;
        }
        if let Some(number) = number {
            let pages = leases.contains(Leases::DATA);
            self.forget(number, pages, names).await;
        }
        drop(share);
        let returned = Returned { file, leases, stamp };
        if let Err(errno) = self.store.call(&Caller::default(), Op::Return(vec![returned])).await {
            tracing::debug!(%errno, inode = file.inode, "a lease could not be given back");
        }
    }

    fn take_leases(&self, file: FileId, leases: Leases, stamp: Stamp) -> Taken {
        let mut table = self.table();
        let told = leases.contains(Leases::ENTRIES).then(|| table.take_told(file));
        let number = table.recall(file, leases, stamp);
        (number, told.zip(number).map(|(told, number)| vec![(number, told)]))
    }

    async fn forget(&self, number: u64, pages: bool, names: Option<Names>) {
        let (done, is_done) = oneshot::channel();
        let _ = self.invalidate.send(Invalidate { number, pages, names, done: Some(done) });
        if tokio::time::timeout(KERNEL_PATIENCE, is_done).await.is_err() {
            tracing::warn!(number, "the kernel does not forget a file");
        }
    }

    /// The kernel's pages of a file are wrong, or will be without anybody hearing of it.
    pub(super) fn forget_pages(&self, file: FileId) {
        if let Some(number) = self.table().number_of(file) {
            let _ = self.invalidate.send(Invalidate { number, pages: true, names: None, done: None });
        }
    }

    /// The kernel's attributes of a file may be wrong.
    pub(super) fn forget_attributes(&self, number: u64) {
        let _ = self.invalidate.send(Invalidate { number, pages: false, names: None, done: None });
    }

    fn lost(&self, stamp: Stamp) {
        tracing::warn!("all leases of a volume have ended");
        let mut table = self.table();
        let names = table.take_all_told();
        table.lose_all(stamp);
        let numbers: Vec<u64> = table.iter().filter(|(_, node)| node.lookups > 0).map(|(number, _)| number).collect();
        drop(table);
        let _ = self.invalidate.send(Invalidate { number: ROOT, pages: false, names: Some(names), done: None });
        for number in numbers {
            let _ = self.invalidate.send(Invalidate { number, pages: true, names: None, done: None });
        }
    }

    /// Returns when nothing is remembered any more.
    pub(super) async fn forget_everything(&self) {
        self.lost(Stamp(0));
        // What was sent before is carried out before.
        self.forget(ROOT, false, None).await;
    }

    /// Keeps the share until the kernel has forgotten what it was told to forget until now.
    async fn forget_before(&self, share: Share) {
        self.forget(ROOT, false, None).await;
        drop(share);
    }
}
