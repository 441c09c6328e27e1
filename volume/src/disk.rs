//! Persistent cache of file contents on this machine's disk.
//!
//! A file's contents are split into chunks of [`CHUNK_BYTES`]. Each chunk is a file of its own,
//! with its key (file, version, index) and a checksum over all of it. So writes need no order and
//! no sync: a chunk that a crash has left incomplete fails its checksum and is dropped. A chunk
//! belongs to one version of a file ([`Attributes::version`](crate::store::Attributes)); the caller
//! must check that the version is current.
//!
//! The quota is hard: space is reserved before a chunk is written, and the least recently used
//! chunks are evicted. Calls block on the disk. A failed write is no error: the chunk isn't cached.
//! One cache at a time uses the directory.

use std::{
    collections::BTreeMap,
    fs::{self, File, OpenOptions, TryLockError},
    io::{self, Read as _, Write as _},
    os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard},
    time::{Duration, SystemTime},
};

use bytes::Bytes;

use crate::store::FileId;

/// Size of all chunks of a file but the last.
pub const CHUNK_BYTES: usize = 1 << 20;

/// Magic number of a chunk's file; the digit is the format's version.
const MAGIC: [u8; 8] = *b"posh-ch1";
/// Length of the header: magic, checksum, length of the contents, and the key's four numbers.
const HEADER_BYTES: usize = 8 + 4 + 4 + 4 * 8;
/// Number of directories for chunks, so that none grows to hundreds of thousands of names.
const SHARDS: u64 = 256;
/// Unit of the space accounting: the disk's block size.
const BLOCK_BYTES: u64 = 4096;
/// Minimum interval between updates of a chunk's mtime, which keeps the LRU order over a restart.
const NOTED_EVERY: Duration = Duration::from_secs(600);
/// Locked by the cache that uses the directory.
const LOCK_FILE: &str = "lock";
/// Name prefix of a chunk that is being written, or that a crash has left incomplete.
const UNFINISHED: &str = "new-";

/// Key of a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ChunkKey {
    /// The file.
    pub file: FileId,
    /// The file's version, from its attributes.
    pub version: u64,
    /// Position: the chunk begins at byte `index` × [`CHUNK_BYTES`].
    pub index: u64,
}

/// Usage of the cache, and counts since the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Usage {
    /// Bytes on the disk, in whole blocks.
    pub bytes: u64,
    /// Limit of `bytes`.
    pub quota_bytes: u64,
    /// Number of cached chunks.
    pub chunks: u64,
    /// Number of cache hits.
    pub hits: u64,
    /// Number of cache misses.
    pub misses: u64,
    /// Number of chunks that were dropped as damaged.
    pub damaged: u64,
}

/// The cache; see the module's text.
#[derive(Debug)]
pub struct DiskCache {
    directory: PathBuf,
    quota_bytes: u64,
    state: Mutex<DiskCacheState>,
    /// Locked until [`Self::give_up`], or until drop.
    lock: File,
}

#[derive(Debug, Default)]
struct DiskCacheState {
    /// True after [`DiskCache::give_up`]: another cache may own the directory.
    is_given_up: bool,
    chunks: BTreeMap<ChunkKey, Kept>,
    /// Least recently used first.
    uses: BTreeMap<u64, ChunkKey>,
    next_use: u64,
    bytes: u64,
    hits: u64,
    misses: u64,
    damaged: u64,
    unfinished: u64,
}

#[derive(Debug, Clone, Copy)]
struct Kept {
    bytes: u64,
    used: u64,
    /// Time of the last update of its file's mtime.
    noted: SystemTime,
}

impl DiskCache {
    /// Opens or creates a cache. Existing chunks stay, as far as the quota allows. Other files in
    /// the directory are left alone.
    ///
    /// # Errors
    /// The directory can't be created or read, or is in use ([`io::ErrorKind::WouldBlock`]).
    pub fn open(directory: &Path, quota_bytes: u64) -> io::Result<Self> {
        own_directory(directory)?;
        let mut options = OpenOptions::new();
        let lock = options
            .create(true)
            .truncate(false)
            .write(true)
            .mode(0o600)
            .open(directory.join(LOCK_FILE))?;
        lock.try_lock().map_err(|error| match error {
            TryLockError::Error(error) => error,
            TryLockError::WouldBlock => io::ErrorKind::WouldBlock.into(),
        })?;
        let mut found = Vec::new();
        for shard in (0..SHARDS).map(|shard| directory.join(shard_name(shard))) {
            match fs::read_dir(shard) {
                Ok(entries) => scan(entries, &mut found)?,
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        found.sort_by_key(|(_, _, used)| *used);
        let mut state = DiskCacheState::default();
        found.into_iter().for_each(|(key, bytes, noted)| state.keep(key, bytes, noted));
        let cache =
            Self { directory: directory.to_owned(), quota_bytes, state: Mutex::new(state), lock };
        cache.make_room(0);
        Ok(cache)
    }

    /// Returns a chunk's contents if they are cached and undamaged.
    pub fn get(&self, key: ChunkKey) -> Option<Bytes> {
        let noted = {
            let mut state = self.lock();
            let Some(noted) = state.touch(key) else {
                state.misses += 1;
                return None;
            };
            noted
        };
        let path = self.path(key);
        match read_chunk(&path, key) {
            Ok(data) => {
                self.lock().hits += 1;
                if noted.elapsed().is_ok_and(|age| age > NOTED_EVERY) {
                    self.note_use(key, &path);
                }
                Some(data)
            }
            Err(error) => {
                let mut state = self.lock();
                state.misses += 1;
                // A concurrent call may have evicted it.
                if error.kind() != io::ErrorKind::NotFound && !state.is_given_up {
                    state.damaged += 1;
                    tracing::warn!(
                        path = %path.display(),
                        %error,
                        "a chunk of the cache is damaged and was removed"
                    );
                    let _ = fs::remove_file(&path);
                }
                state.drop_chunk(key);
                None
            }
        }
    }

    /// Returns true if a chunk is cached; it may be damaged.
    pub fn has(&self, key: ChunkKey) -> bool {
        self.lock().chunks.contains_key(&key)
    }

    /// Caches a chunk if possible, in place of an older one with the key.
    ///
    /// # Panics
    /// It is larger than [`CHUNK_BYTES`].
    pub fn put(&self, key: ChunkKey, data: &[u8]) {
        assert!(data.len() <= CHUNK_BYTES, "a chunk has at most {CHUNK_BYTES} bytes");
        let bytes = space_of(data.len());
        let Some(number) = self.make_room(bytes) else { return };
        let path = self.path(key);
        let unfinished = self.shard(key).join(format!("{UNFINISHED}{number}"));
        let written = self
            .make_shard(key)
            .and_then(|()| write_chunk(&unfinished, key, data))
            .and_then(|()| {
                let mut state = self.lock();
                if state.is_given_up {
                    return Err(io::ErrorKind::BrokenPipe.into());
                }
                fs::rename(&unfinished, &path)?;
                // `make_room` has counted its space; `keep` counts it again.
                state.bytes -= bytes;
                state.drop_chunk(key);
                state.keep(key, bytes, SystemTime::now());
                Ok(())
            });
        if let Err(error) = written {
            tracing::debug!(path = %path.display(), %error, "a chunk can't be kept");
            let _ = fs::remove_file(&unfinished);
            let mut state = self.lock();
            state.bytes = state.bytes.saturating_sub(bytes);
        }
    }

    /// Removes all chunks of a file but those of one version.
    pub fn forget(&self, file: FileId, but: Option<u64>) {
        let first = ChunkKey { file, version: 0, index: 0 };
        let last = ChunkKey { file, version: u64::MAX, index: u64::MAX };
        let mut state = self.lock();
        let of_file = state.chunks.range(first..=last).map(|(key, _)| *key);
        let old: Vec<_> = of_file.filter(|key| Some(key.version) != but).collect();
        for key in old {
            self.remove(&mut state, key);
        }
    }

    /// Releases the directory, with its chunks, to the next cache; this one is empty from now on.
    ///
    /// Invariant: only the holder of the file lock adds and removes chunks. A chunk that is being
    /// written is discarded.
    pub fn give_up(&self) {
        let mut state = self.lock();
        *state = DiskCacheState { is_given_up: true, ..DiskCacheState::default() };
        // On an error, the drop of the descriptor unlocks.
        let _ = self.lock.unlock();
    }

    /// Returns the usage.
    pub fn usage(&self) -> Usage {
        let state = self.lock();
        Usage {
            bytes: state.bytes,
            quota_bytes: self.quota_bytes,
            chunks: state.chunks.len() as u64,
            hits: state.hits,
            misses: state.misses,
            damaged: state.damaged,
        }
    }

    /// Reserves space, evicting chunks, and returns a unique number for the unfinished chunk;
    /// `None` if the quota is too small or the directory was given up.
    fn make_room(&self, bytes: u64) -> Option<u64> {
        let mut state = self.lock();
        if state.is_given_up {
            return None;
        }
        while state.bytes + bytes > self.quota_bytes {
            let (_, &oldest) = state.uses.first_key_value()?;
            self.remove(&mut state, oldest);
        }
        state.bytes += bytes;
        state.unfinished += 1;
        Some(state.unfinished)
    }

    /// Removes a chunk: first its file, then its space from the accounting.
    fn remove(&self, state: &mut DiskCacheState, key: ChunkKey) {
        let path = self.path(key);
        if let Err(error) = fs::remove_file(&path)
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!(path = %path.display(), %error, "a chunk of the cache can't be removed");
        }
        state.drop_chunk(key);
    }

    fn note_use(&self, key: ChunkKey, path: &Path) {
        let now = SystemTime::now();
        if let Some(kept) = self.lock().chunks.get_mut(&key) {
            kept.noted = now;
        }
        // Only the LRU order after a restart depends on it.
        let _ = OpenOptions::new().write(true).open(path).and_then(|file| file.set_modified(now));
    }

    fn shard(&self, key: ChunkKey) -> PathBuf {
        self.directory.join(shard_name((key.file.inode ^ key.index) % SHARDS))
    }

    fn make_shard(&self, key: ChunkKey) -> io::Result<()> {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(self.shard(key))
    }

    fn path(&self, key: ChunkKey) -> PathBuf {
        self.shard(key).join(name_of(key))
    }

    fn lock(&self) -> MutexGuard<'_, DiskCacheState> {
        self.state.lock().expect("not poisoned")
    }
}

/// Creates a directory that only this user can write, at a path that others can't redirect: they
/// could make us serve forged contents, or send them to the server.
pub(crate) fn own_directory(directory: &Path) -> io::Result<()> {
    let user = rustix::process::geteuid().as_raw();
    let made = trusted_path::make_directory(directory, user)?;
    if made.owner == user { Ok(()) } else { Err(io::ErrorKind::PermissionDenied.into()) }
}

impl DiskCacheState {
    fn keep(&mut self, key: ChunkKey, bytes: u64, noted: SystemTime) {
        let used = self.next_use;
        self.next_use += 1;
        self.bytes += bytes;
        self.uses.insert(used, key);
        self.chunks.insert(key, Kept { bytes, used, noted });
    }

    /// Marks a chunk as the most recently used; returns the time of its file's last mtime update.
    fn touch(&mut self, key: ChunkKey) -> Option<SystemTime> {
        let kept = self.chunks.get_mut(&key)?;
        self.uses.remove(&kept.used);
        kept.used = self.next_use;
        self.uses.insert(kept.used, key);
        self.next_use += 1;
        Some(kept.noted)
    }

    fn drop_chunk(&mut self, key: ChunkKey) {
        if let Some(kept) = self.chunks.remove(&key) {
            self.uses.remove(&kept.used);
            self.bytes -= kept.bytes;
        }
    }
}

/// Lists the chunks of one directory: keys, space, last noted uses. Removes incomplete ones.
fn scan(entries: fs::ReadDir, found: &mut Vec<(ChunkKey, u64, SystemTime)>) -> io::Result<()> {
    for entry in entries {
        let entry = entry?;
        let name = entry.file_name();
        let Some(name) = name.to_str() else { continue };
        if name.starts_with(UNFINISHED) {
            fs::remove_file(entry.path())?;
        } else if let Some(key) = key_of(name) {
            let about = entry.metadata()?;
            let bytes = about.size().next_multiple_of(BLOCK_BYTES).max(BLOCK_BYTES);
            found.push((key, bytes, about.modified()?));
        }
    }
    Ok(())
}

fn shard_name(shard: u64) -> String {
    format!("{shard:02x}")
}

fn name_of(key: ChunkKey) -> String {
    let ChunkKey { file, version, index } = key;
    format!("{:x}.{:x}.{version:x}.{index:x}", file.inode, file.generation)
}

fn key_of(name: &str) -> Option<ChunkKey> {
    let mut parts = name.split('.').map(|part| u64::from_str_radix(part, 16));
    let mut next = || parts.next()?.ok();
    let file = FileId { inode: next()?, generation: next()? };
    let key = ChunkKey { file, version: next()?, index: next()? };
    // Rejects other spellings of the same numbers.
    (name_of(key) == name).then_some(key)
}

fn space_of(data_bytes: usize) -> u64 {
    ((HEADER_BYTES + data_bytes) as u64).next_multiple_of(BLOCK_BYTES)
}

/// Builds the header without the checksum, which covers it too.
fn header(key: ChunkKey, data_bytes: u32) -> [u8; HEADER_BYTES] {
    let mut header = [0; HEADER_BYTES];
    header[..8].copy_from_slice(&MAGIC);
    header[12..16].copy_from_slice(&data_bytes.to_le_bytes());
    let numbers = [key.file.inode, key.file.generation, key.version, key.index];
    for (place, number) in header[16..].chunks_exact_mut(8).zip(numbers) {
        place.copy_from_slice(&number.to_le_bytes());
    }
    header
}

fn checksum(header: &[u8; HEADER_BYTES], data: &[u8]) -> [u8; 4] {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&header[12..]);
    hasher.update(data);
    hasher.finalize().to_le_bytes()
}

fn write_chunk(path: &Path, key: ChunkKey, data: &[u8]) -> io::Result<()> {
    let data_bytes = u32::try_from(data.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    let mut header = header(key, data_bytes);
    let sum = checksum(&header, data);
    header[8..12].copy_from_slice(&sum);
    let mut file = OpenOptions::new().create_new(true).write(true).mode(0o600).open(path)?;
    file.write_all(&header)?;
    file.write_all(data)
}

fn read_chunk(path: &Path, key: ChunkKey) -> io::Result<Bytes> {
    let damaged = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what);
    let mut file = File::open(path)?;
    let mut found = [0; HEADER_BYTES];
    file.read_exact(&mut found)?;
    let data_bytes = u32::from_le_bytes([found[12], found[13], found[14], found[15]]);
    if data_bytes as usize > CHUNK_BYTES {
        return Err(damaged("it says that it is larger than a chunk"));
    }
    // `read_to_end` needs no zeroed buffer. A file with one byte more is damaged.
    let mut data = Vec::with_capacity(data_bytes as usize + 1);
    file.take(u64::from(data_bytes) + 1).read_to_end(&mut data)?;
    let mut wanted = header(key, data_bytes);
    let sum = checksum(&wanted, &data);
    wanted[8..12].copy_from_slice(&sum);
    if wanted != found || data.len() != data_bytes as usize {
        return Err(damaged("its header or its checksum does not fit"));
    }
    Ok(data.into())
}

#[cfg(test)]
#[path = "disk_tests.rs"]
mod tests;
