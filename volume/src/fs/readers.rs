//! Prediction for file prefetch. A reader is a program that opens many files; the next ones are
//! predicted from the order so far, or were announced ([`super::told`]). It never waits;
//! [`super::ahead`] fetches.

use std::collections::{HashSet, VecDeque};

use crate::store::FileId;

/// Initial prefetch window, in files; it doubles when prefetched files are opened.
const FIRST_WINDOW: usize = 16;

/// Limit of prefetched files that are not opened yet.
const LAST_WINDOW: usize = 1024;

/// Limit of files in one request, so that the first does not wait for too many others.
const REQUEST_FILES: usize = 256;

/// Limit for the contents of one request, except for a single larger file: 16 files of 64 KiB, or
/// one of 1 MiB.
const REQUEST_BYTES: u64 = 1 << 20;

/// Limit of requests in progress: 8 of 1 MiB each fill a link of 1 Gbit/s at 60 ms.
const REQUESTS: usize = 8;

/// Limit for the contents of requests in progress: 4 large files, of which the first 4 MiB are
/// fetched.
const UNDER_WAY_BYTES: u64 = 16 << 20;

/// Limit of predicted files per reader, at 40 bytes each.
const MAX_EXPECTED: usize = 100_000;

/// Limit of readers; the least recently seen one is replaced.
const MAX_READERS: usize = 8;

/// Id of a reader.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(super) struct ReaderId(u64);

/// Order in which files of a directory are opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum By {
    /// By name: a shell's glob.
    Name,
    /// In the directory's order: grep -r.
    Listing,
    /// By inode number: tar, cp -r.
    Inode,
}

impl By {
    pub const ALL: [Self; 3] = [Self::Name, Self::Listing, Self::Inode];
}

/// Position of a reader: the last directory whose files are predicted, and the order.
pub(super) type Reached = (FileId, By);

/// All readers of a volume.
#[derive(Debug, Default)]
pub(super) struct Readers {
    /// Least recently seen first.
    readers: Vec<Reader>,
    next: u64,
}

#[derive(Debug)]
struct Reader {
    id: ReaderId,
    expected: VecDeque<FileId>,
    /// Files that are requested or fetched, and not opened yet, with their sizes; 0 if there was
    /// nothing to fetch.
    ahead: VecDeque<(FileId, u64)>,
    members: HashSet<FileId>,
    window: usize,
    requests: usize,
    under_way_bytes: u64,
    /// `None`: the files were announced.
    reached: Option<Reached>,
    /// True if it certainly opens files, rather than only stats them.
    opens: bool,
}

impl Readers {
    /// Notes that a file is opened; returns the readers that predicted it, most often one.
    pub fn opened(&mut self, file: FileId) -> Vec<ReaderId> {
        // A stable sort, which keeps the order of the others.
        self.readers.sort_by_key(|reader| reader.members.contains(&file));
        let expected = self.readers.iter_mut().filter(|reader| reader.members.contains(&file));
        expected.map(|reader| reader.opened(file)).collect()
    }

    /// Adds a reader for a program that opens files in an order.
    pub fn begin(&mut self, expected: &[FileId], reached: Reached) -> ReaderId {
        let id = self.add(FIRST_WINDOW, Some(reached), true);
        self.expect(id, expected);
        id
    }

    /// Adds a reader for announced files. `opens`: they are certainly opened; otherwise nothing is
    /// fetched before the first one is.
    pub fn told(&mut self, opens: bool) -> ReaderId {
        self.add(LAST_WINDOW, None, opens)
    }

    fn add(&mut self, window: usize, reached: Option<Reached>, opens: bool) -> ReaderId {
        if self.readers.len() >= MAX_READERS {
            self.readers.remove(0);
        }
        self.next += 1;
        let id = ReaderId(self.next);
        self.readers.push(Reader {
            id,
            expected: VecDeque::new(),
            ahead: VecDeque::new(),
            members: HashSet::new(),
            window,
            requests: 0,
            under_way_bytes: 0,
            reached,
            opens,
        });
        id
    }

    /// Ends a reader, but not its requests.
    pub fn end(&mut self, id: ReaderId) {
        self.readers.retain(|reader| reader.id != id);
    }

    /// Appends predicted files.
    pub fn expect(&mut self, id: ReaderId, files: &[FileId]) {
        let Some(reader) = self.get(id) else { return };
        for file in files {
            if reader.members.len() < MAX_EXPECTED && reader.members.insert(*file) {
                reader.expected.push_back(*file);
            }
        }
    }

    /// Returns a reader's position, if it needs more predicted files.
    pub fn reached(&mut self, id: ReaderId) -> Option<Reached> {
        let reader = self.get(id)?;
        reader.reached.filter(|_| reader.expected.len() < reader.window)
    }

    /// Appends the files of the next directory.
    pub fn goes_on(&mut self, id: ReaderId, files: &[FileId], reached: Reached) {
        if let Some(reader) = self.get(id) {
            reader.reached = Some(reached);
        }
        self.expect(id, files);
    }

    /// Returns the files for another request, and their size. `limit_bytes`: limit for all
    /// prefetched files that are not opened yet. `size`: bytes of a file to fetch; `None` for
    /// nothing.
    pub fn request(
        &mut self,
        id: ReaderId,
        limit_bytes: u64,
        size: impl Fn(FileId) -> Option<u64>,
    ) -> Option<(Vec<FileId>, u64)> {
        self.get(id)?.request(limit_bytes, size)
    }

    /// Notes the end of a request.
    pub fn fetched(&mut self, id: ReaderId, bytes: u64) {
        if let Some(reader) = self.get(id) {
            reader.requests -= 1;
            reader.under_way_bytes -= bytes;
        }
    }

    fn get(&mut self, id: ReaderId) -> Option<&mut Reader> {
        self.readers.iter_mut().find(|reader| reader.id == id)
    }
}

impl Reader {
    fn opened(&mut self, file: FileId) -> ReaderId {
        self.opens = true;
        self.members.remove(&file);
        if let Some(place) = self.ahead.iter().position(|(ahead, _)| *ahead == file) {
            // Earlier files were skipped.
            for (passed, _) in self.ahead.drain(..=place) {
                self.members.remove(&passed);
            }
            self.window = (self.window * 2).min(LAST_WINDOW);
        } else if let Some(place) = self.expected.iter().position(|expected| *expected == file) {
            // Faster than the prefetch, or in another order: go on from this file.
            self.expected.rotate_left(place);
            self.expected.pop_front();
        }
        self.id
    }

    fn request(
        &mut self,
        limit_bytes: u64,
        size: impl Fn(FileId) -> Option<u64>,
    ) -> Option<(Vec<FileId>, u64)> {
        // Few large requests, rather than one file for each that is opened.
        let has_enough = self.ahead.len() > self.window / 2 && self.reached.is_some();
        if !self.opens
            || has_enough
            || self.requests >= REQUESTS
            || self.under_way_bytes >= UNDER_WAY_BYTES
        {
            return None;
        }
        let (mut files, mut bytes) = (Vec::new(), 0);
        let ahead_bytes: u64 = self.ahead.iter().map(|(_, size)| size).sum();
        while self.ahead.len() < self.window && files.len() < REQUEST_FILES && bytes < REQUEST_BYTES
        {
            let Some(file) = self.expected.front().copied() else { break };
            let its = size(file).unwrap_or(0);
            if ahead_bytes + bytes + its > limit_bytes || bytes > 0 && bytes + its > REQUEST_BYTES {
                break;
            }
            self.expected.pop_front();
            // Cached files count, too, so that the window also limits this loop.
            self.ahead.push_back((file, its));
            if its > 0 {
                files.push(file);
                bytes += its;
            }
        }
        if files.is_empty() {
            return None;
        }
        self.requests += 1;
        self.under_way_bytes += bytes;
        Some((files, bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT_BYTES: u64 = 16 << 20;

    fn ids(inodes: impl IntoIterator<Item = u64>) -> Vec<FileId> {
        inodes.into_iter().map(|inode| FileId { inode, generation: 0 }).collect()
    }

    fn count(readers: &mut Readers, id: ReaderId, size: u64) -> Vec<usize> {
        let mut next = || readers.request(id, LIMIT_BYTES, |_| Some(size));
        std::iter::from_fn(|| next().map(|(files, _)| files.len())).collect()
    }

    #[test]
    fn more_is_fetched_the_more_of_it_was_opened() {
        let files = ids(0..1000);
        let mut readers = Readers::default();
        let id = readers.begin(&files[2..], (files[0], By::Name));
        assert_eq!(count(&mut readers, id, 100), [16]);
        for file in &files[2..10] {
            assert_eq!(readers.opened(*file), [id]);
        }
        readers.fetched(id, 1600);
        assert_eq!(count(&mut readers, id, 100), [256, 256]);
        assert_eq!(readers.opened(FileId { inode: 5000, generation: 0 }), []);
    }

    #[test]
    fn what_is_there_already_is_looked_at_once() {
        let files = ids(0..10_000);
        let mut readers = Readers::default();
        let id = readers.begin(&files[1..], (files[0], By::Name));
        let looks = std::cell::Cell::new(0);
        for file in &files[1..] {
            assert_eq!(readers.opened(*file), [id]);
            let there = |_| {
                looks.set(looks.get() + 1);
                None
            };
            assert_eq!(readers.request(id, LIMIT_BYTES, there), None);
        }
        assert!(looks.get() < files.len(), "{looks:?}");
    }

    #[test]
    fn how_many_at_once_depends_on_the_sizes() {
        let check = |size, expect: &[usize]| {
            let mut readers = Readers::default();
            let id = readers.told(true);
            readers.expect(id, &ids(0..2000));
            assert_eq!(count(&mut readers, id, size), expect, "of {size} bytes");
        };
        check(2 << 10, &[256; 4]);
        check(64 << 10, &[16; 8]);
        check(1 << 20, &[1; 8]);
        check(4 << 20, &[1; 4]);
    }

    #[test]
    fn what_was_not_opened_bounds_what_is_fetched() {
        let mut readers = Readers::default();
        let id = readers.told(true);
        readers.expect(id, &ids(0..100));
        let mut all = Vec::new();
        while let Some((files, bytes)) = readers.request(id, 5 << 20, |_| Some(1 << 20)) {
            readers.fetched(id, bytes);
            all.extend(files);
        }
        assert_eq!(all, ids(0..5));
        // The first two are passed over.
        readers.opened(all[2]);
        assert_eq!(
            readers.request(id, 5 << 20, |_| Some(1 << 20)).map(|(files, _)| files),
            Some(ids([5]))
        );
    }

    #[test]
    fn who_is_faster_or_elsewhere_is_followed() {
        let mut readers = Readers::default();
        let id = readers.told(true);
        readers.expect(id, &ids(0..10));
        readers.opened(FileId { inode: 6, generation: 0 });
        let (files, _) = readers.request(id, LIMIT_BYTES, |_| Some(1)).unwrap();
        assert_eq!(files, ids([7, 8, 9, 0, 1, 2, 3, 4, 5]));
    }
}
