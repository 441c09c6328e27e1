//! What the store says on its own account, and what the kernel must forget for it.

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

/// For so long a write may be on its way from the kernel's pages to here: its thread may have to
/// wait for a processor.
const WRITE_TIME: Duration = Duration::from_secs(2);

/// Names of directories, by the directories' numbers.
pub type Names = Vec<(u64, Vec<OsString>)>;

/// The file's number, if it is known, and what the kernel was told of its names.
pub(super) type Taken = (Option<u64>, Option<Names>);

/// What the kernel must forget. Dropping it says that it has.
#[derive(Debug)]
pub struct Invalidate {
    /// The file's number; its attributes are forgotten.
    pub number: u64,
    /// And its contents.
    pub pages: bool,
    /// Parts of these that are being read: the kernel has their pages locked until they are there.
    pub busy: Vec<Range<u64>>,
    /// And names, by the numbers of their directories; all names of all directories would do as
    /// well.
    pub names: Option<Names>,
    /// Files of which everything is forgotten, and their names given up where nobody uses them.
    pub let_go: Vec<u64>,
    /// Told when it is done.
    done: Option<oneshot::Sender<()>>,
}

impl Invalidate {
    /// Attributes of a file, and names in it where there are some; nobody waits.
    pub(super) fn of(number: u64, names: Option<Vec<OsString>>) -> Self {
        let names = names.map(|names| vec![(number, names)]);
        Self { number, pages: false, busy: Vec::new(), names, let_go: Vec::new(), done: None }
    }

    /// Names of all these directories; nobody waits.
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

    /// The same with contents and names of any directories; also what completes when it is carried
    /// out.
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

    /// Attributes and contents of a file of which parts are being read; also what completes when it
    /// is carried out.
    pub(super) fn beside_reads(
        number: u64,
        busy: Vec<Range<u64>>,
    ) -> (Self, oneshot::Receiver<()>) {
        let (mut invalidate, is_done) = Self::awaited(number, true, None);
        invalidate.busy = busy;
        (invalidate, is_done)
    }

    /// All of these files, and names of directories; also what completes when it is carried out.
    pub(super) fn let_go(files: Vec<u64>, names: Names) -> (Self, oneshot::Receiver<()>) {
        let (mut invalidate, is_done) =
            Self::awaited(ROOT, false, (!names.is_empty()).then_some(names));
        invalidate.let_go = files;
        (invalidate, is_done)
    }
}

impl Invalidate {
    /// From now on that one says when it is done.
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

/// Takes notices in until the volume or the store has gone. It waits for nothing: what one notice
/// waits for may need another.
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
    /// After a command ran on the server: returns when nothing from before the store's notice with
    /// that stamp is remembered. `Changes` tells whether there may be any, where nobody else does.
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

    /// Before a command runs on the server: the rights to write that nobody here uses at the moment
    /// go back with it, so that they need not be recalled. What was written is there already
    /// ([`Volume::settle`]).
    #[must_use]
    pub fn give_up_writing(&self) -> Vec<Returned> {
        let mut table = self.table();
        let mut taken = table.take_writable(MAX_GIVEN_UP);
        let is_directory = |file| table.of(file).is_some_and(|node| node.own.is_some());
        // Of the others the recall is answered when they are written.
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
        // Before anything that is told later.
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

    /// A server that does not keep to the protocol: from now on nothing is remembered of what it
    /// says, and it is given no answers.
    pub(super) fn end_as_broken(self: &Arc<Self>) {
        if self.recalled().end() {
            tracing::error!(
                "the server recalls leases without end: nothing is remembered any more"
            );
            self.lost(Stamp(u64::MAX), None);
            self.heard.send_replace(Stamp(u64::MAX));
        }
    }

    /// Whether the kernel was to forget pages of the file so lately that a write may have been on
    /// its way then.
    pub fn were_pages_recalled(&self, number: u64) -> bool {
        let recalled = self.table().node(number).and_then(|node| node.pages_recalled);
        recalled.is_some_and(|at| crate::clock::now() - at < WRITE_TIME)
    }

    /// The kernel's pages of a file are wrong, or will be without anybody hearing of it.
    pub(super) fn forget_pages(&self, file: FileId) {
        if let Some(number) = self.table().number_of(file) {
            let _ = self.invalidate.send(Invalidate::awaited(number, true, None).0);
        }
    }

    /// As [`Self::forget_pages`], unless a change would be heard of. To be called before the reply
    /// with which the kernel gets pages, of a read or a write: it forgets them as soon as it has
    /// them. A lease that goes later takes them along.
    pub(super) fn forget_unleased_pages(&self, file: FileId) {
        let is_leased =
            self.table().of(file).is_some_and(|node| node.leases.contains(Leases::DATA));
        if !is_leased {
            self.forget_pages(file);
        }
    }

    /// The kernel's attributes of a file may be wrong.
    pub(super) fn forget_attributes(&self, number: u64) {
        let _ = self.invalidate.send(Invalidate::of(number, None));
    }
}
