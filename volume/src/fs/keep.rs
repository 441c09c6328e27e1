//! Contents that are kept on the disk beside the memory: written when the disk has the time, read
//! when the memory has not got them. A chunk belongs to a version of its file, so that what is
//! found is what the server has, if that version still is the file's.

use std::sync::Arc;

use bytes::Bytes;
use tokio::{sync::Semaphore, task};

use super::{Volume, chunks::Key};
use crate::disk::{ChunkKey, DiskCache};

/// Chunks on their way to the disk: with more it is slower than the link, and some are not kept.
const WRITES: usize = 32;

/// The disk, and who writes to it.
pub(super) struct Keep {
    cache: Arc<DiskCache>,
    writes: Arc<Semaphore>,
}

impl Keep {
    pub fn new(cache: DiskCache) -> Self {
        Self { cache: Arc::new(cache), writes: Arc::new(Semaphore::new(WRITES)) }
    }

    /// The disk is the next volume's.
    pub fn give_up(&self) {
        self.cache.give_up();
    }

    /// On the disk.
    pub fn bytes(&self) -> u64 {
        self.cache.usage().bytes
    }
}

fn chunk((file, index): Key, version: u64) -> ChunkKey {
    ChunkKey { file, version, index }
}

impl Volume {
    /// Whether something that was read is still on its way to the disk.
    #[must_use]
    pub fn is_writing_to_disk(&self) -> bool {
        self.disk.as_ref().is_some_and(|disk| disk.writes.available_permits() < WRITES)
    }

    /// Keeps a chunk that has come from the store.
    pub(super) fn keep(&self, key: Key, version: u64, data: Bytes) {
        self.chunks.put(key, version, data.clone());
        let Some(disk) = &self.disk else { return };
        let Ok(turn) = Arc::clone(&disk.writes).try_acquire_owned() else { return };
        let cache = Arc::clone(&disk.cache);
        task::spawn_blocking(move || {
            // What other versions had is of no use any more.
            cache.forget(key.0, Some(version));
            cache.put(chunk(key, version), &data);
            drop(turn);
        });
    }

    /// Whether the disk has a chunk.
    pub(super) fn is_on_disk(&self, key: Key, version: u64) -> bool {
        self.disk.as_ref().is_some_and(|disk| disk.cache.has(chunk(key, version)))
    }

    /// A chunk from the disk, which then is in memory, too.
    pub(super) async fn fetch_from_disk(&self, key: Key, version: u64) -> Option<()> {
        let cache = Arc::clone(&self.disk.as_ref()?.cache);
        let wanted = chunk(key, version);
        if !cache.has(wanted) {
            return None;
        }
        let data = task::spawn_blocking(move || cache.get(wanted)).await.ok().flatten()?;
        self.chunks.put(key, version, data);
        Some(())
    }
}
