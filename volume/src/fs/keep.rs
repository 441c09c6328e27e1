//! Second-level cache of contents, on the disk: written in the background, read on a miss in
//! memory. A chunk belongs to a version of its file, and is valid while that is the file's version.

use std::sync::Arc;

use bytes::Bytes;
use tokio::{sync::Semaphore, task};

use super::{Volume, chunks::Key};
use crate::disk::{ChunkKey, DiskCache};

/// Limit of chunks being written to the disk. If it is reached, the disk is slower than the link,
/// and chunks are dropped.
const WRITES: usize = 32;

/// The disk cache, with permits for writes.
pub(super) struct Keep {
    cache: Arc<DiskCache>,
    writes: Arc<Semaphore>,
}

impl Keep {
    pub fn new(cache: DiskCache) -> Self {
        Self { cache: Arc::new(cache), writes: Arc::new(Semaphore::new(WRITES)) }
    }

    /// Releases the disk cache to the next volume.
    pub fn give_up(&self) {
        self.cache.give_up();
    }

    /// Returns the bytes on the disk.
    pub fn bytes(&self) -> u64 {
        self.cache.usage().bytes
    }
}

fn chunk((file, index): Key, version: u64) -> ChunkKey {
    ChunkKey { file, version, index }
}

impl Volume {
    /// Returns true if chunks are being written to the disk.
    #[must_use]
    pub fn is_writing_to_disk(&self) -> bool {
        self.disk.as_ref().is_some_and(|disk| disk.writes.available_permits() < WRITES)
    }

    /// Caches a chunk from the store.
    pub(super) fn keep(&self, key: Key, version: u64, data: Bytes) {
        self.chunks.put(key, version, data.clone());
        let Some(disk) = &self.disk else { return };
        let Ok(turn) = Arc::clone(&disk.writes).try_acquire_owned() else { return };
        let cache = Arc::clone(&disk.cache);
        task::spawn_blocking(move || {
            // Chunks of other versions are useless.
            cache.forget(key.0, Some(version));
            cache.put(chunk(key, version), &data);
            drop(turn);
        });
    }

    /// Returns true if the disk has a chunk.
    pub(super) fn is_on_disk(&self, key: Key, version: u64) -> bool {
        self.disk.as_ref().is_some_and(|disk| disk.cache.has(chunk(key, version)))
    }

    /// Loads a chunk from the disk to memory; `None` if it is not there.
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
