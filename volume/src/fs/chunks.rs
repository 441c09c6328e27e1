//! LRU cache of contents in memory: chunks of files, each with its file's version.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Mutex, MutexGuard, PoisonError},
};

use bytes::Bytes;

use crate::store::FileId;

/// Size of a chunk, in bytes: a multiple of the kernel's reads.
pub(super) const CHUNK: u64 = 1 << 20;

/// A file, and the index of a chunk in it.
pub(super) type Key = (FileId, u64);

pub(super) struct Chunks {
    kept: Mutex<Kept>,
    limit: u64,
}

#[derive(Default)]
struct Kept {
    chunks: HashMap<Key, Chunk>,
    /// Keys by last use.
    used: BTreeMap<u64, Key>,
    clock: u64,
    bytes: u64,
}

struct Chunk {
    version: u64,
    data: Bytes,
    used: u64,
}

impl Chunks {
    /// Creates a cache for up to `limit` bytes.
    pub fn new(limit: u64) -> Self {
        Self { kept: Mutex::default(), limit }
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn bytes(&self) -> u64 {
        self.kept().bytes
    }

    /// Returns the limit in bytes, which also bounds read-ahead.
    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// Returns a chunk of that version.
    pub fn get(&self, key: Key, version: u64) -> Option<Bytes> {
        let mut kept = self.kept();
        kept.clock += 1;
        let now = kept.clock;
        let chunk = kept.chunks.get_mut(&key).filter(|chunk| chunk.version == version)?;
        let before = std::mem::replace(&mut chunk.used, now);
        let data = chunk.data.clone();
        kept.used.remove(&before);
        kept.used.insert(now, key);
        Some(data)
    }

    /// Returns true if there is a chunk of that version. Doesn't count as a use.
    pub fn has(&self, key: Key, version: u64) -> bool {
        self.kept().chunks.get(&key).is_some_and(|chunk| chunk.version == version)
    }

    /// Caches a chunk.
    pub fn put(&self, key: Key, version: u64, data: Bytes) {
        let mut kept = self.kept();
        kept.remove(key);
        kept.clock += 1;
        let used = kept.clock;
        kept.bytes += data.len() as u64;
        kept.used.insert(used, key);
        kept.chunks.insert(key, Chunk { version, data, used });
        while kept.bytes > self.limit {
            let Some((_, oldest)) = kept.used.first_key_value() else { return };
            let oldest = *oldest;
            kept.remove(oldest);
        }
    }
}

impl Kept {
    fn remove(&mut self, key: Key) {
        if let Some(chunk) = self.chunks.remove(&key) {
            self.bytes -= chunk.data.len() as u64;
            self.used.remove(&chunk.used);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_recently_used_goes_first_and_versions_are_told_apart() {
        let chunks = Chunks::new(10);
        let key = |number| (FileId { inode: 7, generation: 0 }, number);
        for number in 0..3 {
            chunks.put(key(number), 1, Bytes::from_static(b"abc"));
        }
        assert!(chunks.get(key(0), 1).is_some());
        assert_eq!(chunks.get(key(1), 2), None);
        chunks.put(key(3), 1, Bytes::from_static(b"defg"));
        assert_eq!((chunks.get(key(1), 1), chunks.bytes()), (None, 10));
        assert!(chunks.get(key(0), 1).is_some());
        chunks.put(key(0), 2, Bytes::from_static(b"x"));
        assert_eq!((chunks.get(key(0), 1), chunks.bytes()), (None, 8));
    }
}
