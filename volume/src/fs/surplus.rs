//! Leases that nobody has asked for any more: beyond [`super::Settings::most_files`] the files that
//! were asked about longest ago are given up, so that what a volume remembers, what its executor
//! counts for it and what the kernel keeps of it have one bound, however long it is used.
//!
//! Invariant: a lease goes back when nothing rests upon it any more, as if it had been recalled:
//! the table has lost it, then the kernel has forgotten what it was for, then the store is told.
//! Files that are open or hold something back keep theirs.
//!
//! The kernel lets go of the names too, where it can be asked to (Linux 6.18): then it forgets the
//! numbers, and the table the files. An older kernel keeps a number as long as it likes, and the
//! table what it needs for it, without a lease.

use std::sync::{Arc, Weak};

use tokio::sync::Notify;

use super::{
    Volume,
    recalls::{Invalidate, Names},
};
use crate::store::Returned;

/// Files that are given up together.
#[derive(Debug, Default)]
pub(super) struct Surplus {
    /// Leases that go back when the kernel has forgotten all of this.
    pub returned: Vec<Returned>,
    /// Files that the kernel knows, directories behind what lies in them.
    pub numbers: Vec<u64>,
    /// Names of directories that it may remember.
    pub names: Names,
}

/// Gives files up, one surplus after the other, whenever there is one and for as long as there is a
/// volume.
pub(super) async fn give_back(volume: Weak<Volume>, is_full: Arc<Notify>) {
    loop {
        is_full.notified().await;
        loop {
            let Some(found) = volume.upgrade() else { return };
            let Some(Surplus { returned, numbers, names }) = found.take_surplus() else { break };
            let (invalidate, is_done) = Invalidate::let_go(numbers, names);
            let _ = found.invalidate.send(invalidate);
            drop(found);
            // However long the kernel takes: nobody waits for these leases.
            let _ = is_done.await;
            let Some(found) = volume.upgrade() else { return };
            found.recalled().give_back(returned);
        }
    }
}

impl Volume {
    fn take_surplus(&self) -> Option<Surplus> {
        // Before the table is locked: whoever has one of these locked may want the other.
        let open = self.open_ids();
        self.table().take_surplus(|file| open.contains(&file) || self.writes.is_dirty(file))
    }
}
