//! What the store says on its own account, and what the kernel must forget for it.

use std::{ffi::OsString, sync::Weak, time::Duration};

use tokio::sync::oneshot;
use tokio_stream::StreamExt as _;

use super::{Volume, table::ROOT};
use crate::store::{Caller, FileId, Leases, Notice, Notices, Op, Returned, Stamp};

/// How long a recall waits for the kernel, which waits for readers of the pages. Past it the recall is answered by the
/// end of the lease.
const KERNEL_PATIENCE: Duration = Duration::from_secs(5);

/// Names of directories, by the directories' numbers.
pub type Names = Vec<(u64, Vec<OsString>)>;

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

impl Drop for Invalidate {
    fn drop(&mut self) {
        if let Some(done) = self.done.take() {
            let _ = done.send(());
        }
    }
}

/// Takes notices in until the volume or the store has gone.
pub(super) async fn listen(volume: Weak<Volume>, mut notices: Notices) {
    while let Some(notice) = notices.next().await {
        let Some(volume) = volume.upgrade() else { return };
        match notice {
            Notice::Lost { stamp } => volume.lost(stamp),
            // Each by itself: what one waits for may need another.
            Notice::Recall { file, leases, stamp } => {
                tokio::spawn(async move { volume.recalled(file, leases, stamp).await });
            }
        }
    }
}

impl Volume {
    async fn recalled(&self, file: FileId, leases: Leases, stamp: Stamp) {
        let (number, names) = self.take_leases(file, leases, stamp);
        if leases.contains(Leases::WRITE) {
            self.drain(file).await;
        }
        if let Some(number) = number {
            let pages = leases.contains(Leases::DATA);
            self.forget(number, pages, names).await;
        }
        let returned = Returned { file, leases, stamp };
        if let Err(errno) = self.store.call(&Caller::default(), Op::Return(vec![returned])).await {
            tracing::debug!(%errno, inode = file.inode, "a lease could not be given back");
        }
    }

    fn take_leases(&self, file: FileId, leases: Leases, stamp: Stamp) -> (Option<u64>, Option<Names>) {
        let mut table = self.table();
        let told = leases.contains(Leases::ENTRIES).then(|| table.told_names(file));
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
        let names = table.all_told_names();
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
}
