//! Prediction for directory prefetch: a program that lists a directory and then a subdirectory is
//! likely to walk all of them (find, du, ls -R, grep -r, a shell's glob), and would wait for one
//! round trip after the other.
//!
//! A tour is one such walk. Its predicted directories are in depth-first order, and are listed in
//! parallel; the window grows when they are opened. It never waits; [`super::listing`] requests the
//! listings.

use std::collections::{HashSet, VecDeque};

use super::readers::ReaderId;
use crate::store::FileId;

/// Initial prefetch window, in directories.
const FIRST_WINDOW: usize = 4;

/// Limit of the window: prefetched directories that are not opened yet, and those in progress. At
/// 20 ms and 20 files in each some 200,000 files a second.
const LAST_WINDOW: usize = 192;

/// Limit of names in the window: a fraction of the table's limit.
const MAX_NAMES: usize = 20_000;

/// Limit of predicted directories per tour; in a wider tree prediction starts anew beyond it.
const MAX_EXPECTED: usize = 50_000;

/// Limit of tours; the least recently seen one is replaced.
const MAX_TOURS: usize = 8;

/// Number of recently listed directories, in which a tour may begin.
const RECENT: usize = 64;

/// Id of a tour.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct TourId(u64);

/// All tours of a volume.
#[derive(Debug, Default)]
pub(super) struct Tours {
    /// Least recently seen first.
    tours: Vec<Tour>,
    recent: VecDeque<FileId>,
    next: u64,
}

#[derive(Debug)]
struct Tour {
    id: TourId,
    /// Stack of predicted directories: the next one is the last.
    expected: Vec<FileId>,
    /// Prefetched directories and those in progress, with their number of names.
    ahead: VecDeque<(FileId, usize)>,
    window: usize,
    /// All directories of the tour.
    members: HashSet<FileId>,
    /// Reader of the files in its directories, for an announced tour.
    reader: Option<ReaderId>,
}

impl Tours {
    /// Notes that a program lists a directory in `parent`; returns its tours, most often one. A new
    /// tour begins if `parent` was listed recently; `siblings` returns its directories.
    pub fn visited(
        &mut self,
        directory: FileId,
        parent: Option<FileId>,
        siblings: impl FnOnce(FileId) -> Vec<FileId>,
    ) -> Vec<TourId> {
        let known: Vec<TourId> = self.seen(directory);
        let begins = parent.filter(|parent| known.is_empty() && self.recent.contains(parent));
        self.recent.retain(|other| *other != directory);
        self.recent.push_back(directory);
        if self.recent.len() > RECENT {
            self.recent.pop_front();
        }
        let Some(parent) = begins else { return known };
        let id = self.begin(siblings(parent), FIRST_WINDOW);
        if let Some(tour) = self.get(id) {
            tour.members.insert(directory);
        }
        vec![id]
    }

    fn seen(&mut self, directory: FileId) -> Vec<TourId> {
        // A stable sort, which keeps the order of the others.
        self.tours.sort_by_key(|tour| tour.members.contains(&directory));
        let on_it = self.tours.iter_mut().filter(|tour| tour.members.contains(&directory));
        on_it.map(|tour| tour.visited(directory)).collect()
    }

    /// Adds a tour of announced directories, with the full window.
    pub fn told(&mut self, reader: ReaderId) -> TourId {
        let id = self.begin(Vec::new(), LAST_WINDOW);
        if let Some(tour) = self.get(id) {
            tour.reader = Some(reader);
        }
        id
    }

    /// Appends predicted directories after all others.
    pub fn expect(&mut self, id: TourId, directories: &[FileId]) {
        let Some(tour) = self.get(id) else { return };
        let room = MAX_EXPECTED.saturating_sub(tour.members.len());
        let new: Vec<FileId> =
            directories.iter().copied().filter(|d| tour.members.insert(*d)).take(room).collect();
        tour.expected.splice(..0, new.into_iter().rev());
    }

    /// Returns the reader of an announced tour.
    pub fn reader(&mut self, id: TourId) -> Option<ReaderId> {
        self.get(id)?.reader
    }

    /// Ends a tour, but not its requests.
    pub fn end(&mut self, id: TourId) {
        self.tours.retain(|tour| tour.id != id);
    }

    fn begin(&mut self, mut directories: Vec<FileId>, window: usize) -> TourId {
        if self.tours.len() >= MAX_TOURS {
            self.tours.remove(0);
        }
        self.next += 1;
        let id = TourId(self.next);
        directories.truncate(MAX_EXPECTED);
        directories.reverse();
        let members = directories.iter().copied().collect();
        self.tours.push(Tour {
            id,
            expected: directories,
            ahead: VecDeque::new(),
            window,
            members,
            reader: None,
        });
        id
    }

    /// Notes the listing of a tour's directory: its subdirectories come first.
    pub fn listed(&mut self, id: TourId, directory: FileId, names: usize, inside: &[FileId]) {
        let Some(tour) = self.get(id) else { return };
        if let Some(ahead) = tour.ahead.iter_mut().find(|(ahead, _)| *ahead == directory) {
            ahead.1 = names;
        }
        for inside in inside.iter().rev() {
            if tour.members.len() < MAX_EXPECTED && tour.members.insert(*inside) {
                tour.expected.push(*inside);
            }
        }
    }

    /// Returns the directories to list now.
    pub fn next(&mut self, id: TourId) -> Vec<FileId> {
        self.get(id).map(Tour::next).unwrap_or_default()
    }

    fn get(&mut self, id: TourId) -> Option<&mut Tour> {
        self.tours.iter_mut().find(|tour| tour.id == id)
    }
}

impl Tour {
    fn visited(&mut self, directory: FileId) -> TourId {
        if let Some(place) = self.ahead.iter().position(|(ahead, _)| *ahead == directory) {
            // Earlier ones were skipped, or come in another order. After one that was too large for
            // a prefetch, or almost, others are likely to be, too.
            let is_large = self.ahead.drain(..=place).any(|(_, names)| names >= MAX_NAMES);
            self.window = if is_large { FIRST_WINDOW } else { (self.window * 2).min(LAST_WINDOW) };
        } else if let Some(place) =
            self.expected.iter().rposition(|expected| *expected == directory)
        {
            self.expected.remove(place);
        }
        self.id
    }

    fn next(&mut self) -> Vec<FileId> {
        let mut next = Vec::new();
        let names = self.ahead.iter().fold(0, |sum: usize, (_, names)| sum.saturating_add(*names));
        while names < MAX_NAMES && self.ahead.len() < self.window {
            let Some(directory) = self.expected.pop() else { break };
            self.ahead.push_back((directory, 0));
            next.push(directory);
        }
        next
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(inode: u64) -> FileId {
        FileId { inode, generation: 0 }
    }

    fn ids(inodes: impl IntoIterator<Item = u64>) -> Vec<FileId> {
        inodes.into_iter().map(id).collect()
    }

    #[test]
    fn what_lies_in_a_directory_is_expected_before_what_lies_beside_it() {
        let mut tours = Tours::default();
        assert_eq!(tours.visited(id(1), None, |_| unreachable!()), []);
        let tour = tours.visited(id(10), Some(id(1)), |_| ids(20..30))[0];
        tours.listed(tour, id(10), 2, &ids([11, 12]));
        assert_eq!(tours.next(tour), ids([11, 12, 20, 21]));
        assert_eq!(tours.next(tour), []);
        // Opened as expected: twice as much is listed ahead.
        assert_eq!(tours.visited(id(11), Some(id(10)), |_| unreachable!()), [tour]);
        tours.listed(tour, id(12), 1, &ids([13]));
        assert_eq!(tours.next(tour), ids([13, 22, 23, 24, 25]));
    }

    #[test]
    fn a_directory_that_is_listed_alone_begins_nothing() {
        let mut tours = Tours::default();
        for number in 0..100 {
            // In a directory that nobody has listed.
            assert_eq!(tours.visited(id(number), Some(id(1000)), |_| unreachable!()), []);
        }
    }

    #[test]
    fn what_was_passed_over_makes_room_and_what_is_large_does_not() {
        let mut tours = Tours::default();
        let tour = tours.told(ReaderId::default());
        tours.expect(tour, &ids(0..1000));
        assert_eq!(tours.next(tour).len(), LAST_WINDOW);
        tours.visited(id(99), None, |_| unreachable!());
        assert_eq!(tours.next(tour).len(), 100);
        for number in 100..300 {
            tours.listed(tour, id(number), MAX_NAMES / 100, &[]);
        }
        tours.visited(id(110), None, |_| unreachable!());
        assert_eq!(tours.next(tour), []);
        tours.end(tour);
        assert_eq!(tours.next(tour), []);
    }
}
