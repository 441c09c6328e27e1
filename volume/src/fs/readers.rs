//! Files that are fetched before they are opened: which ones, how many, and when there are enough.
//! A reader is one program's going through files; what it is going to open is known from the order
//! in which it did till now, or because somebody has said so. No waiting here; [`super::ahead`]
//! fetches.

use std::collections::{HashSet, VecDeque};

use crate::store::FileId;

/// Files that are fetched at the first suspicion; twice as many each time that they were opened.
const FIRST_WINDOW: usize = 16;

/// Files at most that were fetched and not opened.
const LAST_WINDOW: usize = 1024;

/// Files of one request at most, so that the first does not wait for too many others.
const REQUEST_FILES: usize = 256;

/// Contents of one request, but for a file that is larger: 16 files of 64 KiB, or one of 1 MiB.
const REQUEST_BYTES: u64 = 1 << 20;

/// Requests under way: 8 of 1 MiB each fill a link of 1 Gbit/s at 60 ms.
const REQUESTS: usize = 8;

/// And their contents: 4 large files, of which the first 4 MiB are fetched.
const UNDER_WAY_BYTES: u64 = 16 << 20;

/// Files that are expected at most, at 40 bytes each.
const MAX_EXPECTED: usize = 100_000;

/// Readers at the same time; the one that was not seen for longest ends for another.
const MAX_READERS: usize = 8;

/// A reader, for those that fetch for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(super) struct ReaderId(u64);

/// In which order files of a directory are opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum By {
    /// As a shell's pattern has them.
    Name,
    /// As the directory has them: grep -r.
    Listing,
    /// tar, cp -r.
    Inode,
}

impl By {
    pub const ALL: [Self; 3] = [Self::Name, Self::Listing, Self::Inode];
}

/// Where a reader came to: the last directory whose files are expected, and the order.
pub(super) type Reached = (FileId, By);

/// All of them.
#[derive(Debug, Default)]
pub(super) struct Readers {
    /// The last one seen is the last.
    readers: Vec<Reader>,
    next: u64,
}

#[derive(Debug)]
struct Reader {
    id: ReaderId,
    expected: VecDeque<FileId>,
    /// Asked for or fetched, and not opened yet, with their sizes; none for what was there before.
    ahead: VecDeque<(FileId, u64)>,
    members: HashSet<FileId>,
    window: usize,
    requests: usize,
    under_way_bytes: u64,
    /// `None`: it was told what there is.
    reached: Option<Reached>,
    /// Whether it is certain that files are opened, not only looked at.
    opens: bool,
}

impl Readers {
    /// A file is opened: by which readers it was expected, most often one.
    pub fn opened(&mut self, file: FileId) -> Vec<ReaderId> {
        // A stable sort: the others stay in their order.
        self.readers.sort_by_key(|reader| reader.members.contains(&file));
        let expected = self.readers.iter_mut().filter(|reader| reader.members.contains(&file));
        expected.map(|reader| reader.opened(file)).collect()
    }

    /// A program opens files in an order.
    pub fn begin(&mut self, expected: &[FileId], reached: Reached) -> ReaderId {
        let id = self.add(FIRST_WINDOW, Some(reached), true);
        self.expect(id, expected);
        id
    }

    /// Somebody is going to say what will be opened. `opens`: certainly; else nothing is fetched
    /// before the first of them is.
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

    /// It ends; what has been asked for comes all the same.
    pub fn end(&mut self, id: ReaderId) {
        self.readers.retain(|reader| reader.id != id);
    }

    /// More files that will be opened after the others.
    pub fn expect(&mut self, id: ReaderId, files: &[FileId]) {
        let Some(reader) = self.get(id) else { return };
        for file in files {
            if reader.members.len() < MAX_EXPECTED && reader.members.insert(*file) {
                reader.expected.push_back(*file);
            }
        }
    }

    /// Where it came to, if it wants to know how it goes on.
    pub fn reached(&mut self, id: ReaderId) -> Option<Reached> {
        let reader = self.get(id)?;
        reader.reached.filter(|_| reader.expected.len() < reader.window)
    }

    /// The files of one more directory are expected.
    pub fn goes_on(&mut self, id: ReaderId, files: &[FileId], reached: Reached) {
        if let Some(reader) = self.get(id) {
            reader.reached = Some(reached);
        }
        self.expect(id, files);
    }

    /// What one more request is to fetch, and how many bytes that is. `limit_bytes`: of all that is
    /// there and was not opened yet. `size`: how much of a file would be fetched; `None`: nothing.
    pub fn request(
        &mut self,
        id: ReaderId,
        limit_bytes: u64,
        size: impl Fn(FileId) -> Option<u64>,
    ) -> Option<(Vec<FileId>, u64)> {
        self.get(id)?.request(limit_bytes, size)
    }

    /// A request has ended.
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
            // Those before it were passed over.
            for (passed, _) in self.ahead.drain(..=place) {
                self.members.remove(&passed);
            }
            self.window = (self.window * 2).min(LAST_WINDOW);
        } else if let Some(place) = self.expected.iter().position(|expected| *expected == file) {
            // Faster than what is fetched, or in another order: it goes on from there.
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
        // Few large requests, not one more file with each that is opened.
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
            // Also what is there already: it is still to be opened, and no reason to look at all
            // that follows.
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
