//! File prefetch: contents are fetched before the files are opened, in few requests of many files
//! each, for programs that open one file after the other ([`super::readers`] predicts which). Small
//! files are then opened without a round trip.

use std::{
    collections::HashMap,
    ops::Range,
    sync::{Arc, MutexGuard, PoisonError},
};

use bytes::{Bytes, BytesMut};
use tokio_stream::StreamExt as _;

use super::{
    Volume,
    chunks::CHUNK,
    readers::{By, Reached, ReaderId, Readers},
    reading::Origin,
    table::{Node, Table},
};
use crate::store::{Caller, Entry, Errno, FileId, Kind, Leases, ReadPart};

/// Prefetched files that are not opened yet may take this fraction (1/N) of the memory for
/// contents.
const SHARE: u64 = 4;

/// Limit of prefetched chunks per file: the rest is read ahead when the file is read.
const LARGE_CHUNKS: u64 = 4;

/// Limit of directories that are searched in a row for more files.
const EMPTY_DIRECTORIES: usize = 64;

/// Limit of directories that are left upwards for the next one.
const LEVELS: usize = 64;

/// A file to be fetched, its version, and the chunks that were claimed for it.
type Wanted = (FileId, u64, Range<u64>);

/// A file to be fetched that has a single chunk.
struct Small {
    file: FileId,
    version: u64,
    /// True if its contents are cached.
    is_kept: bool,
}

impl Volume {
    /// Returns a small file from the cache, if it was read before with the same rights: open(2) on
    /// the server would give the same result.
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
            if self.loading.is_claimed((file, 0), version) {
                fetched.await;
            } else if !may || self.fetch_from_disk((file, 0), version).await.is_none() {
                return None;
            }
        }
    }

    /// Returns a small file's entry, and true if its contents may be cached and the caller may read
    /// it.
    fn small(&self, caller: &Caller, file: FileId) -> Option<(Entry, bool)> {
        if self.store.lease_limit().is_some() {
            return None;
        }
        let table = self.table();
        let node = table.of(file).filter(|node| self.is_good(node))?;
        let attributes =
            node.attributes.filter(|a| a.kind == Kind::Regular && (1..=CHUNK).contains(&a.size))?;
        let may = node.leases.contains(Leases::DATA) && node.reader == Some(caller.uid);
        Some((Entry { attributes, leases: node.leases, stamp: node.stamp }, may))
    }

    pub(super) fn readers(&self) -> MutexGuard<'_, Readers> {
        self.readers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that a file is opened; prefetches the next ones if this one was predicted.
    pub(super) fn note_opened(self: &Arc<Self>, caller: &Caller, file: FileId) {
        let mut readers = self.readers().opened(file);
        if readers.is_empty() {
            readers.extend(self.begin_reading(file));
        }
        readers.into_iter().for_each(|reader| self.fetch_files_ahead(caller, reader));
    }

    /// Starts a reader when two files of a directory were opened in a known order.
    fn begin_reading(&self, file: FileId) -> Option<ReaderId> {
        let (parent, orders, by) = {
            let mut table = self.table();
            let parent = table.of(file)?.parent?;
            let node = table.of_mut(parent)?;
            let orders = node.orders.clone()?;
            let by = node.cursor.opened(&orders, file)?;
            (parent, orders, by)
        };
        Some(self.readers().begin(orders.files_after(file, by), (parent, by)))
    }

    /// Prefetches the predicted files, as far as there is room.
    pub(super) fn fetch_files_ahead(self: &Arc<Self>, caller: &Caller, reader: ReaderId) {
        self.expect_further_directories(reader);
        let limit = self.chunks.limit() / SHARE;
        loop {
            let request = self.readers().request(reader, limit, |file| self.size_of_fetched(file));
            let Some((files, bytes)) = request else { return };
            let wanted = self.claim(&files);
            let (volume, caller) = (Arc::clone(self), caller.clone());
            tokio::spawn(async move {
                volume.fetch_wanted(&caller, wanted).await;
                volume.readers().fetched(reader, bytes);
                volume.fetch_files_ahead(&caller, reader);
            });
        }
    }

    /// Predicts the files of the next directories whose listings are known by now.
    fn expect_further_directories(&self, reader: ReaderId) {
        for _ in 0..EMPTY_DIRECTORIES {
            let Some(reached) = self.readers().reached(reader) else { return };
            let Some((next, files)) = self.next_directory(reached) else { return };
            self.readers().goes_on(reader, &files, (next, reached.1));
        }
    }

    /// Returns the predicted next directory, and its files.
    fn next_directory(&self, (directory, by): Reached) -> Option<(FileId, Vec<FileId>)> {
        let table = self.table();
        let orders = |directory| table.of(directory)?.orders.clone();
        // A shell's glob stays on its level; other programs descend first.
        let inside = orders(directory)
            .filter(|_| by != By::Name)
            .and_then(|inside| inside.directories(by).first().copied());
        let next = inside.or_else(|| table.directory_after(directory, by))?;
        Some((next, orders(next)?.files(by).to_vec()))
    }

    /// Returns the number of bytes of a file to prefetch; `None` if there is nothing to fetch.
    fn size_of_fetched(&self, file: FileId) -> Option<u64> {
        let table = self.table();
        let attributes = table.of(file).filter(|node| self.is_good(node))?.attributes?;
        drop(table);
        let is_wanted =
            attributes.kind == Kind::Regular && attributes.size > 0 && !self.writes.is_dirty(file);
        let is_there = || self.chunks.get((file, 0), attributes.version).is_some();
        (is_wanted && !is_there()).then(|| attributes.size.min(LARGE_CHUNKS * CHUNK))
    }

    /// Claims the chunks of these files that are neither in memory nor being fetched.
    fn claim(&self, files: &[FileId]) -> Vec<Wanted> {
        let mut wanted = Vec::new();
        for file in files {
            let Some(attributes) = self.table().of(*file).and_then(|node| node.attributes) else {
                continue;
            };
            let version = attributes.version;
            let chunks = 0..attributes.size.div_ceil(CHUNK).min(LARGE_CHUNKS);
            let is_free = |number: &u64| {
                self.chunks.get((*file, *number), version).is_none()
                    && self.loading.claim((*file, *number), version)
            };
            let claimed = chunks.take_while(is_free).count() as u64;
            if claimed > 0 {
                wanted.push((*file, version, 0..claimed));
            }
        }
        wanted
    }

    async fn fetch_wanted(&self, caller: &Caller, wanted: Vec<Wanted>) {
        let mut small = Vec::new();
        for (file, version, chunks) in &wanted {
            if chunks.end > 1 {
                let origin = Origin { caller, place: (*file).into() };
                if let Err(errno) =
                    self.fetch_chunks(&origin, *version, chunks.clone(), &mut 0).await
                {
                    tracing::debug!(%errno, "file not fetched ahead");
                }
            } else {
                let is_kept = self.fetch_from_disk((*file, 0), *version).await.is_some();
                small.push(Small { file: *file, version: *version, is_kept });
            }
        }
        if !small.is_empty()
            && let Err(errno) = self.fetch_files(caller, &small).await
        {
            tracing::debug!(%errno, "files not fetched ahead");
        }
        for (file, version, chunks) in wanted {
            chunks.for_each(|number| self.loading.give_up((file, number), version));
        }
        self.loaded.notify_waiters();
    }

    /// Fetches files of one chunk in one request. For cached ones it only checks the right to read
    /// them, and gets leases.
    async fn fetch_files(&self, caller: &Caller, wanted: &[Small]) -> Result<(), Errno> {
        let part = |of: &Small| ReadPart {
            place: of.file.into(),
            range: 0..if of.is_kept { 0 } else { CHUNK },
        };
        let asked = crate::clock::now();
        let mut pieces = self.store.read(caller, wanted.iter().map(part).collect()).await;
        let mut parts: HashMap<u32, BytesMut> = HashMap::new();
        while let Some(piece) = pieces.next().await {
            let piece = piece?;
            let Some(Small { file, version, is_kept }) = wanted.get(piece.part as usize) else {
                return Err(Errno::EPROTO);
            };
            let is_same = self
                .learn_from(&piece, asked)
                .is_none_or(|entry| entry.attributes.version == *version);
            let Ok(data) = piece.data else { continue };
            let part = parts.entry(piece.part).or_default();
            part.extend_from_slice(&data);
            if piece.is_last && is_same {
                if !is_kept {
                    self.keep(
                        (*file, 0),
                        *version,
                        parts.remove(&piece.part).unwrap_or_default().freeze(),
                    );
                }
                // A change of its permissions would have changed the version.
                let is_it =
                    |node: &&mut Node| node.attributes.is_some_and(|a| a.version == *version);
                if let Some(node) = self.table().of_mut(*file).filter(is_it) {
                    node.reader = Some(caller.uid);
                }
                self.loading.give_up((*file, 0), *version);
                self.loaded.notify_waiters();
            }
        }
        Ok(())
    }
}

impl Table {
    /// Returns the directory after that one and all below it.
    fn directory_after(&self, mut directory: FileId, by: By) -> Option<FileId> {
        // A server may have listed a directory in itself.
        for _ in 0..LEVELS {
            let parent = self.of(directory)?.parent?;
            let orders = self.of(parent)?.orders.as_ref()?;
            if let Some(next) = orders.directories_after(directory, by).first() {
                return Some(*next);
            }
            directory = parent;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::{Attributes, Listed, Stamp};

    fn listed(inode: u64) -> Listed {
        let attributes = Attributes::of_test(FileId { inode, generation: 0 }, Kind::Directory);
        let entry = Some(Entry { attributes, leases: Leases::all(), stamp: Stamp(1) });
        let name = inode.to_string().into();
        Listed { name, cookie: 0, entry, inode, kind: Kind::Directory }
    }

    #[test]
    fn a_directory_that_is_listed_in_itself_is_left_once() {
        let mut table = Table::new(FileId { inode: 2, generation: 0 }, 100);
        let mut list = |directory: u64, names: &[u64]| {
            let id = |inode: &u64| FileId { inode: *inode, generation: 0 };
            let files: Vec<FileId> = std::iter::once(&directory).chain(names).map(id).collect();
            for file in &files {
                table.number(*file);
            }
            let names = Arc::new(names.iter().map(|inode| listed(*inode)).collect());
            table.of_mut(files[0]).unwrap().put_listing(&names);
            for file in &files[1..] {
                table.of_mut(*file).unwrap().parent = Some(files[0]);
            }
        };
        list(2, &[10, 20]);
        list(10, &[11, 12]);
        list(30, &[30]);
        let after = |inode| {
            let found = table.directory_after(FileId { inode, generation: 0 }, By::Name);
            found.map(|file| file.inode)
        };
        assert_eq!([11, 12, 20, 30].map(after), [Some(12), Some(20), None, None]);
    }
}
