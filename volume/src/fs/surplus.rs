//! Eviction of files: beyond [`super::Settings::most_files`] those with the oldest answers are
//! evicted, and their leases returned. So the table, the executor's lease count and the kernel's
//! cache have one bound, however long the volume is used.
//!
//! Invariant: a lease is returned when nothing is cached under it any more, as if it had been
//! recalled: first the table drops it, then the kernel's caches are invalidated, then it is
//! returned to the store. Files that are open or hold data back keep theirs.
//!
//! Since Linux 6.18 the kernel can be asked to drop dentries, too; then it forgets the numbers, and
//! the table the files. An older kernel keeps a number as long as it likes, and the table keeps the
//! file, without a lease.

use std::sync::{Arc, Weak};

use tokio::sync::Notify;

use super::{
    Volume,
    recalls::{Invalidate, Names},
};
use crate::store::Returned;

/// Files that are evicted together.
#[derive(Debug, Default)]
pub(super) struct Surplus {
    /// Leases to return after the kernel's invalidation.
    pub returned: Vec<Returned>,
    /// Files that the kernel knows, directories after their contents.
    pub numbers: Vec<u64>,
    /// Names in them that the kernel may cache.
    pub names: Names,
}

/// Evicts files when the limit is exceeded, as long as the volume exists.
pub(super) async fn give_back(volume: Weak<Volume>, is_full: Arc<Notify>) {
    loop {
        is_full.notified().await;
        loop {
            let Some(found) = volume.upgrade() else { return };
            let Some(Surplus { returned, numbers, names }) = found.take_surplus() else { break };
            let (invalidate, is_done) = Invalidate::let_go(numbers, names);
            let _ = found.invalidate.send(invalidate);
            drop(found);
            // Without a timeout: no other session waits for these leases.
            let _ = is_done.await;
            let Some(found) = volume.upgrade() else { return };
            found.recalled().give_back(returned);
        }
    }
}

impl Volume {
    fn take_surplus(&self) -> Option<Surplus> {
        // Before the table is locked: these locks must not be nested.
        let open = self.open_ids();
        self.table().take_surplus(|file| open.contains(&file) || self.writes.is_dirty(file))
    }
}
