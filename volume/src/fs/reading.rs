//! Reads of contents: from cached chunks, or from the store. Sequential reads are read ahead, with
//! a window that grows; random reads are fetched as requested.

use std::{
    collections::HashSet,
    ops::Range,
    sync::{Arc, PoisonError},
    time::Instant,
};

use bytes::Bytes;
use tokio_stream::StreamExt as _;

use super::{
    MOST_SEARCHES, Volume,
    chunks::{CHUNK, Key},
    files::Open,
};
use crate::store::{Caller, Entry, Errno, Leases, OpenFlags, Piece, Place, ReadPart};

/// Limit of chunks in one request: large enough to fill a link, small enough for several requests
/// in progress.
const REQUEST_CHUNKS: u64 = 4;

/// Limit of read-ahead, in chunks, if the cache has room: a link of 1 Gbit/s at 250 ms.
const AHEAD_CHUNKS: u64 = 32;

/// Attempts to read from cached chunks: if fetched chunks are evicted before their use, the cache
/// is too small, and the read bypasses it.
const ATTEMPTS: usize = 3;

/// Access pattern of an open file's reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Pattern {
    /// End of the last read.
    end: u64,
    /// Read-ahead window in chunks; 0: not sequential.
    ahead: u64,
}

impl Pattern {
    /// Notes a read; returns the number of chunks to read ahead, or `None` for a random read.
    fn next(&mut self, range: &Range<u64>, limit: u64) -> Option<u64> {
        // Requests of the kernel's own read-ahead overtake each other a little.
        let in_order = range.start <= self.end.saturating_add(CHUNK)
            && range.end.saturating_add(CHUNK) >= self.end;
        let is_next = range.start >= self.end;
        self.end = if in_order { self.end.max(range.end) } else { range.end };
        if !in_order {
            self.ahead = 0;
            return None;
        }
        if is_next && range.start > 0 {
            self.ahead = (self.ahead * 2).clamp(1, limit.max(1));
        }
        Some(self.ahead)
    }
}

/// File and caller of a fetch.
pub(super) struct Origin<'a> {
    pub caller: &'a Caller,
    pub place: Place,
}

/// Chunks that are being fetched.
#[derive(Default)]
pub(super) struct Loading(std::sync::Mutex<HashSet<(Key, u64)>>);

impl Loading {
    pub(super) fn claim(&self, key: Key, version: u64) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert((key, version))
    }

    pub(super) fn is_claimed(&self, key: Key, version: u64) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).contains(&(key, version))
    }

    pub(super) fn give_up(&self, key: Key, version: u64) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&(key, version));
    }
}

/// A read in progress.
struct Read<'a> {
    volume: &'a Volume,
    number: u64,
}

impl<'a> Read<'a> {
    fn begin(volume: &'a Volume, open: u64, range: Range<u64>) -> Self {
        let number = volume.fresh_number();
        volume.reads.lock().unwrap_or_else(PoisonError::into_inner).insert(number, (open, range));
        Self { volume, number }
    }
}

impl Drop for Read<'_> {
    fn drop(&mut self) {
        self.volume.reads.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.number);
    }
}

impl Volume {
    /// read(2)
    ///
    /// # Errors
    /// Of the call.
    pub async fn read(self: &Arc<Self>, open: u64, offset: u64, size: u32) -> Result<Bytes, Errno> {
        let number = open;
        let open = self.open_file(open)?;
        let _read = Read::begin(self, number, offset..offset.saturating_add(size.into()));
        if let Some(data) = self.read_newborn(&open, offset, size) {
            return Ok(data);
        }
        if let (true, Some(pinned)) = (open.file.is_provisional(), &open.pinned) {
            // Opened after the store had refused it.
            let within =
                |offset: u64| usize::try_from(offset).unwrap_or(usize::MAX).min(pinned.len());
            return Ok(pinned.slice(within(offset)..within(offset.saturating_add(size.into()))));
        }
        let open = if open.file.is_provisional() { self.born_open(number).await? } else { open };
        let range = offset..offset.saturating_add(u64::from(size));
        match self.writes.unsent(open.file) {
            Some(unsent) if unsent.is_empty() => {}
            Some(unsent) => return self.read_beside(&open, range, &unsent).await,
            // Unsent appends; under a write lease, they don't wait for other sessions.
            None => self.drain(open.file).await?,
        }
        let limit = AHEAD_CHUNKS.min(self.chunks.limit() / CHUNK / 2);
        let ahead = open.pattern.lock().unwrap_or_else(PoisonError::into_inner).next(&range, limit);
        let is_kept = !open.flags.contains(OpenFlags::DIRECT) && limit > 0;
        if let (Some(ahead), true) = (ahead, is_kept)
            && let Some(data) = self.read_chunks(&open, &range, ahead).await?
        {
            return Ok(data);
        }
        match (self.read_through(&open, range.clone()).await, &open.pinned) {
            // It has no names any more, and was opened from the cache.
            (Err(Errno::ESTALE), Some(pinned)) => {
                let within =
                    |offset: u64| usize::try_from(offset).unwrap_or(usize::MAX).min(pinned.len());
                Ok(pinned.slice(within(range.start)..within(range.end)))
            }
            (data, _) => data,
        }
    }

    pub(super) async fn read_through(
        &self,
        open: &Open,
        range: Range<u64>,
    ) -> Result<Bytes, Errno> {
        let mut data = self.read_once(open, range.clone()).await;
        for _ in 0..MOST_SEARCHES {
            if !matches!(data, Err(Errno::ESTALE)) {
                break;
            }
            self.find_all_again(&open.caller, &[open.file]).await?;
            data = self.read_once(open, range.clone()).await;
        }
        data
    }

    async fn read_once(&self, open: &Open, range: Range<u64>) -> Result<Bytes, Errno> {
        let part = ReadPart { place: open.place(), range };
        let asked = crate::clock::now();
        let mut pieces = self.store.read(&open.caller, vec![part]).await;
        let mut data = Vec::new();
        let mut last = None;
        while let Some(piece) = pieces.next().await {
            let piece = piece?;
            last = self.learn_from(&piece, asked).or(last);
            data.push(piece.data?);
        }
        let is_leased = last.is_some_and(|entry| entry.leases.contains(Leases::DATA));
        if !is_leased {
            // Without a lease the kernel must not cache these pages.
            self.forget_pages(open.file);
        }
        Ok(joined(data))
    }

    pub(super) fn learn_from(&self, piece: &Piece, asked: Instant) -> Option<Entry> {
        let entry = piece.entry?;
        self.table().learn(&entry, asked);
        Some(entry)
    }

    /// Returns version and size of a file whose contents may be cached.
    fn steady(&self, open: &Open) -> Option<(u64, u64)> {
        let table = self.table();
        let node = table
            .of(open.file)
            .filter(|node| node.leases.contains(Leases::DATA | Leases::ATTRIBUTES))?;
        let attributes = node.attributes.filter(|_| self.is_good(node))?;
        Some((attributes.version, attributes.size))
    }

    /// Reads from chunks, fetching missing ones; `None` if the contents may not be cached.
    async fn read_chunks(
        self: &Arc<Self>,
        open: &Arc<Open>,
        range: &Range<u64>,
        ahead: u64,
    ) -> Result<Option<Bytes>, Errno> {
        for _ in 0..ATTEMPTS {
            let Some((version, size)) = self.steady(open) else { return Ok(None) };
            let range = range.start..range.end.min(size);
            if range.is_empty() {
                return Ok(Some(Bytes::new()));
            }
            let wanted = range.start / CHUNK..range.end.div_ceil(CHUNK);
            let fetched = self.loaded.notified();
            tokio::pin!(fetched);
            fetched.as_mut().enable();
            self.fetch_ahead(
                open,
                version,
                wanted.start..(wanted.end + ahead).min(size.div_ceil(CHUNK)),
            );
            let mut waits = true;
            while waits {
                if let Some(data) = self.out_of_chunks(open, version, &range) {
                    return Ok(Some(data));
                }
                waits = wanted
                    .clone()
                    .any(|chunk| self.loading.is_claimed((open.file, chunk), version));
                if waits {
                    fetched.as_mut().await;
                    fetched.set(self.loaded.notified());
                    fetched.as_mut().enable();
                }
            }
        }
        Ok(None)
    }

    fn out_of_chunks(&self, open: &Open, version: u64, range: &Range<u64>) -> Option<Bytes> {
        let mut parts = Vec::new();
        for number in range.start / CHUNK..range.end.div_ceil(CHUNK) {
            let chunk = self.chunks.get((open.file, number), version)?;
            let base = number * CHUNK;
            let within = |offset: u64| {
                usize::try_from(offset.saturating_sub(base)).unwrap_or(usize::MAX).min(chunk.len())
            };
            parts.push(chunk.slice(within(range.start)..within(range.end)));
        }
        Some(joined(parts))
    }

    /// Fetches chunks that are neither cached nor being fetched.
    fn fetch_ahead(self: &Arc<Self>, open: &Arc<Open>, version: u64, chunks: Range<u64>) {
        let mut claimed: Option<Range<u64>> = None;
        for number in chunks {
            let key = (open.file, number);
            let is_wanted =
                self.chunks.get(key, version).is_none() && self.loading.claim(key, version);
            let is_full =
                claimed.as_ref().is_some_and(|range| range.end - range.start >= REQUEST_CHUNKS);
            if !is_wanted || is_full {
                claimed.take().into_iter().for_each(|range| self.fetch(open, version, range));
            }
            if is_wanted {
                claimed = Some(claimed.map_or(number..number + 1, |range| range.start..number + 1));
            }
        }
        claimed.into_iter().for_each(|range| self.fetch(open, version, range));
    }

    fn fetch(self: &Arc<Self>, open: &Arc<Open>, version: u64, chunks: Range<u64>) {
        let (volume, open) = (Arc::clone(self), Arc::clone(open));
        tokio::spawn(async move {
            let mut next = chunks.start;
            let origin = Origin { caller: &open.caller, place: open.place() };
            if let Err(errno) =
                volume.fetch_chunks(&origin, version, chunks.clone(), &mut next).await
            {
                tracing::debug!(%errno, file = open.file.inode, "not read ahead");
            }
            chunks.for_each(|number| volume.loading.give_up((open.file, number), version));
            volume.loaded.notify_waiters();
        });
    }

    /// Fetches chunks from the disk, or else from the store. `next`: the first missing chunk.
    pub(super) async fn fetch_chunks(
        &self,
        origin: &Origin<'_>,
        version: u64,
        chunks: Range<u64>,
        next: &mut u64,
    ) -> Result<(), Errno> {
        let file = origin.place.file;
        while *next < chunks.end && self.fetch_from_disk((file, *next), version).await.is_some() {
            self.loading.give_up((file, *next), version);
            self.loaded.notify_waiters();
            *next += 1;
        }
        if *next == chunks.end {
            return Ok(());
        }
        let part = ReadPart { place: origin.place, range: *next * CHUNK..chunks.end * CHUNK };
        let asked = crate::clock::now();
        let mut pieces = self.store.read(origin.caller, vec![part]).await;
        let mut data = Arrived::default();
        while let Some(piece) = pieces.next().await {
            let piece = piece?;
            if self
                .learn_from(&piece, asked)
                .is_some_and(|entry| entry.attributes.version != version)
            {
                return Ok(());
            }
            let is_last = piece.is_last;
            data.add(piece.data?);
            while let Some(chunk) = data.take_chunk(is_last) {
                let key = (file, *next);
                self.keep(key, version, chunk);
                self.loading.give_up(key, version);
                self.loaded.notify_waiters();
                *next += 1;
            }
        }
        Ok(())
    }
}

/// Consecutive pieces of a file that don't fill a chunk yet.
#[derive(Default)]
struct Arrived {
    pieces: Vec<Bytes>,
    bytes: usize,
}

impl Arrived {
    fn add(&mut self, piece: Bytes) {
        self.bytes += piece.len();
        self.pieces.push(piece);
    }

    /// Takes a full chunk, or the rest at the end. Copies at most once.
    fn take_chunk(&mut self, is_last: bool) -> Option<Bytes> {
        let chunk_bytes = usize::try_from(CHUNK).unwrap_or(usize::MAX);
        if self.bytes < chunk_bytes && !(is_last && self.bytes > 0) {
            return None;
        }
        let surplus = self.bytes.saturating_sub(chunk_bytes);
        let rest = self
            .pieces
            .last_mut()
            .map(|last| last.split_off(last.len() - surplus))
            .filter(|_| surplus > 0);
        self.bytes = surplus;
        Some(joined(std::mem::replace(&mut self.pieces, rest.into_iter().collect())))
    }
}

fn joined(mut parts: Vec<Bytes>) -> Bytes {
    match parts.len() {
        0 => Bytes::new(),
        1 => parts.pop().unwrap_or_default(),
        _ => parts.concat().into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_cut_where_they_end() {
        let chunk = usize::try_from(CHUNK).unwrap();
        let mut arrived = Arrived::default();
        let mut taken = Vec::new();
        for (length, is_last) in [(chunk - 1, false), (2, false), (chunk + 5, false), (3, true)] {
            arrived.add(vec![0; length].into());
            while let Some(chunk) = arrived.take_chunk(is_last) {
                taken.push(chunk.len());
            }
        }
        assert_eq!(taken, [chunk, chunk, 9]);
    }

    #[test]
    fn the_window_grows_while_it_is_read_in_order() {
        let mut pattern = Pattern::default();
        let mut offset = 0;
        let mut read = |length: u64| {
            offset += length;
            pattern.next(&(offset - length..offset), 8)
        };
        assert_eq!((0..6).map(|_| read(CHUNK)).collect::<Vec<_>>(), [0, 1, 2, 4, 8, 8].map(Some));
        assert_eq!(pattern.next(&(100 * CHUNK..101 * CHUNK), 8), None);
        assert_eq!(pattern.next(&(101 * CHUNK..102 * CHUNK), 8), Some(1));
    }
}
