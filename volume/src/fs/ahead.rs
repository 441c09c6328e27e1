//! Small files ahead of their opening: whoever opens the files of a directory one after the other, in the order of
//! their names (as a shell's pattern has them), gets the contents of the next ones in a few requests of many files each, and opens
//! them without asking anybody.

use std::{collections::HashMap, sync::Arc, time::Instant};

use bytes::{Bytes, BytesMut};
use tokio_stream::StreamExt as _;

use super::{Volume, chunks::CHUNK};
use crate::store::{Caller, Entry, Errno, FileId, Kind, Leases, ReadPart};

/// Files of the first request; each further one has twice as many.
const FIRST_WINDOW: usize = 16;

/// Files of one request at most.
const LAST_WINDOW: usize = 256;

/// Contents of one request at most.
const WINDOW_BYTES: u64 = 4 << 20;

/// A file to be fetched: it has one chunk.
type Wanted = (FileId, u64);

impl Volume {
    /// A small file whose contents are kept, read with the same rights: open(2) would say nothing new.
    pub(super) async fn in_memory(&self, caller: &Caller, file: FileId) -> Option<(Entry, Bytes)> {
        loop {
            let fetched = self.loaded.notified();
            tokio::pin!(fetched);
            fetched.as_mut().enable();
            let (entry, may) = self.small(caller, file)?;
            let version = entry.attributes.version;
            if let Some(data) = self.chunks.get((file, 0), version) {
                return Some((entry, data)).filter(|_| may);
            }
            if !self.loading.is_claimed((file, 0), version) {
                return None;
            }
            fetched.await;
        }
    }

    /// How a small file is, and whether its contents may be remembered and the caller may read it.
    fn small(&self, caller: &Caller, file: FileId) -> Option<(Entry, bool)> {
        if self.store.lease_limit().is_some() {
            return None;
        }
        let table = self.table();
        let node = table.of(file).filter(|node| self.is_good(node))?;
        let attributes = node.attributes.filter(|a| a.kind == Kind::Regular && (1..=CHUNK).contains(&a.size))?;
        let may = node.leases.contains(Leases::DATA) && node.reader == Some(caller.uid);
        Some((Entry { attributes, leases: node.leases, stamp: node.stamp }, may))
    }

    /// Notes that a file is opened; fetches those that come next, if it came next itself.
    pub(super) fn fetch_siblings(self: &Arc<Self>, caller: &Caller, file: FileId) {
        let next = self.next_siblings(file);
        if next.is_empty() || self.chunks.limit() < 2 * WINDOW_BYTES {
            return;
        }
        let wanted = self.claim_small(&next);
        if wanted.is_empty() {
            return;
        }
        let (volume, caller) = (Arc::clone(self), caller.clone());
        tokio::spawn(async move {
            if let Err(errno) = volume.fetch_files(&caller, &wanted).await {
                tracing::debug!(%errno, "files not fetched ahead");
            }
            wanted.iter().for_each(|(file, version)| volume.loading.give_up((*file, 0), *version));
            volume.loaded.notify_waiters();
        });
    }

    fn next_siblings(&self, file: FileId) -> Vec<FileId> {
        let mut table = self.table();
        let Some(parent) = table.of(file).and_then(|node| node.parent) else { return Vec::new() };
        let Some(directory) = table.of_mut(parent) else { return Vec::new() };
        let Some(order) = directory.order.clone() else { return Vec::new() };
        let cursor = &mut directory.cursor;
        let is_next = order.get(cursor.last) == Some(&file) && cursor.last > 0;
        let place = if is_next { Some(cursor.last) } else { order.iter().position(|other| *other == file) };
        cursor.last = place.map_or(0, |place| place + 1);
        if !is_next {
            (cursor.fetched, cursor.window) = (cursor.last, 0);
            return Vec::new();
        }
        // The next request begins before the last one is used up.
        if cursor.fetched > cursor.last + cursor.window / 2 {
            return Vec::new();
        }
        cursor.window = (cursor.window * 2).clamp(FIRST_WINDOW, LAST_WINDOW);
        let from = cursor.fetched.max(cursor.last);
        cursor.fetched = (from + cursor.window).min(order.len());
        order.get(from..cursor.fetched).unwrap_or_default().to_vec()
    }

    /// Those that are small and not in memory, nor on their way.
    fn claim_small(&self, files: &[FileId]) -> Vec<Wanted> {
        let mut bytes = 0;
        let mut wanted = Vec::new();
        for file in files {
            // What contents may be remembered of, the answer says.
            let attributes = self.table().of(*file).filter(|node| self.is_good(node)).and_then(|node| node.attributes);
            let small = attributes.filter(|a| a.kind == Kind::Regular && (1..=CHUNK).contains(&a.size));
            let Some(attributes) = small.filter(|_| !self.writes.is_dirty(*file)) else { continue };
            bytes += attributes.size;
            if bytes > WINDOW_BYTES {
                break;
            }
            let (key, version) = ((*file, 0), attributes.version);
            if self.chunks.get(key, version).is_none() && self.loading.claim(key, version) {
                wanted.push((*file, version));
            }
        }
        wanted
    }

    async fn fetch_files(&self, caller: &Caller, wanted: &[Wanted]) -> Result<(), Errno> {
        let part = |(file, _): &Wanted| ReadPart { place: (*file).into(), range: 0..CHUNK };
        let asked = Instant::now();
        let mut pieces = self.store.read(caller, wanted.iter().map(part).collect()).await;
        let mut parts: HashMap<u32, BytesMut> = HashMap::new();
        while let Some(piece) = pieces.next().await {
            let piece = piece?;
            let Some((file, version)) = wanted.get(piece.part as usize) else { return Err(Errno::EPROTO) };
            let is_same = self.learn_from(&piece, asked).is_none_or(|entry| entry.attributes.version == *version);
            let Ok(data) = piece.data else { continue };
            let part = parts.entry(piece.part).or_default();
            part.extend_from_slice(&data);
            if piece.is_last && is_same {
                self.keep((*file, 0), *version, parts.remove(&piece.part).unwrap_or_default().freeze());
                if let Some(node) = self.table().of_mut(*file) {
                    node.reader = Some(caller.uid);
                }
                self.loading.give_up((*file, 0), *version);
                self.loaded.notify_waiters();
            }
        }
        Ok(())
    }
}
