//! Estimate of the round trips that a program on this machine would need, from leases and cached
//! contents. It never waits, and correctness doesn't depend on it.

use std::{
    ffi::OsString,
    path::PathBuf,
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use super::{
    Volume,
    chunks::CHUNK,
    table::{Known, Node, ROOT, Table},
    told::{Expected, plain_names},
};
use crate::store::{Caller, Kind, Leases, NameIn};

/// Limit of files in a tree that are counted: a walk over more takes as long as a round trip.
const MOST_FILES: u64 = 2000;

/// A program's access to a path below the volume's root.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Use {
    /// stat(2), or listing a directory.
    Look(PathBuf),
    /// Reading a file.
    Read(PathBuf),
    /// stat(2) of everything below the path.
    LookBelow(PathBuf),
    /// Reading everything below the path.
    ReadBelow(PathBuf),
    /// Writing to an open file.
    Write(PathBuf),
    /// Creating a file with that name, or in the directory with that name.
    Make(PathBuf),
}

/// Estimated cost of a program's accesses on this machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct AtHand {
    /// Number of accessed files.
    pub files: u64,
    /// Size of the contents, in bytes.
    pub bytes: u64,
    /// Bytes of these that must be fetched, and, if anything is written, may have to be sent.
    pub missing: u64,
    /// Sequential round trips; contents of small files are fetched together
    /// ([`Volume::will_read`]).
    pub round_trips: u32,
    /// Duration of a round trip.
    pub round_trip: Duration,
}

/// Estimate of the round-trip time: the shortest recent one.
#[derive(Debug, Default)]
pub(super) struct RoundTrip(AtomicU64);

impl RoundTrip {
    /// Notes a round trip. The estimate grows by at most an eighth each time.
    pub fn took(&self, time: Duration) {
        let time = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let known = self.0.load(Ordering::Relaxed);
        let longest = if known == 0 { u64::MAX } else { known + known / 8 };
        self.0.store(time.min(longest), Ordering::Relaxed);
    }

    pub fn get(&self) -> Duration {
        Duration::from_nanos(self.0.load(Ordering::Relaxed))
    }
}

/// Limit of chunks that one estimate looks for, more than a cache has; further ones count as
/// missing. A sparse file, or a server's word, has any size.
const MOST_CHUNKS: u64 = 1 << 16;

/// State of an estimate.
#[derive(Default)]
struct Count {
    found: AtHand,
    /// Number of chunks that were looked for.
    looked: u64,
    fetches: bool,
    writes: bool,
}

impl Volume {
    /// Estimates the cost of a program's accesses. `None`: unknown without a request to the server.
    #[must_use]
    pub fn at_hand(&self, caller: &Caller, uses: &[Use]) -> Option<AtHand> {
        if self.store.lease_limit().is_some() {
            return None;
        }
        let table = self.table();
        let mut count = Count::default();
        for used in uses {
            self.count(&table, caller, used, &mut count)?;
        }
        let round_trips = count.found.round_trips + u32::from(count.fetches);
        let written = if count.writes { count.found.bytes } else { 0 };
        let missing = count.found.missing.saturating_add(written);
        Some(AtHand { round_trips, missing, round_trip: self.round_trip.get(), ..count.found })
    }

    /// Returns true if the expected accesses need no round trip.
    #[must_use]
    pub fn has(&self, caller: &Caller, expected: &[Expected]) -> bool {
        let to_use = |expected: &Expected| match expected {
            Expected::File(path) => Use::Read(path.clone()),
            Expected::Tree(path) => Use::ReadBelow(path.clone()),
        };
        let uses: Vec<_> = expected.iter().map(to_use).collect();
        self.at_hand(caller, &uses).is_some_and(|found| found.round_trips == 0)
    }

    fn count(&self, table: &Table, caller: &Caller, used: &Use, count: &mut Count) -> Option<()> {
        let path = match used {
            Use::Make(path) => return self.count_made(table, &plain_names(path)?, count),
            Use::Look(path)
            | Use::Read(path)
            | Use::LookBelow(path)
            | Use::ReadBelow(path)
            | Use::Write(path) => path,
        };
        count.found.files += 1;
        let Some(node) = self.node_at(table, &plain_names(path)?)? else { return Some(()) };
        let kind = node.attributes?.kind;
        match (used, kind) {
            (Use::Write(_), _) => {
                count.writes = true;
                count.found.round_trips += u32::from(node.unborn.is_none());
            }
            (Use::Look(_), Kind::Directory) if node.listing.is_some() => {
                count.found.files += node.names.len() as u64
            }
            // Pending files in it are sent before it is listed.
            (Use::Look(_), Kind::Directory) => {
                count.found.round_trips += 1 + u32::from(!node.pending_names.is_empty())
            }
            (Use::LookBelow(_), Kind::Directory) => self.count_tree(table, None, node, count)?,
            (Use::ReadBelow(_), Kind::Directory) => {
                self.count_tree(table, Some(caller), node, count)?
            }
            (Use::Read(_) | Use::ReadBelow(_), Kind::Regular) => {
                self.count_contents(caller, node, count)
            }
            (_, Kind::Symlink) => return None,
            _ => {}
        }
        Some(())
    }

    /// Counts a new file: it is free if it is created in memory; otherwise it takes round trips for
    /// creating, and for writing and closing it.
    fn count_made(&self, table: &Table, path: &[OsString], count: &mut Count) -> Option<()> {
        const ELSEWHERE: u32 = 2;
        (count.found.files, count.writes) = (count.found.files + 1, true);
        let found = self.node_at(table, path)?;
        let directory = match found {
            Some(node) if node.attributes?.kind == Kind::Directory => Some(node),
            Some(file) => {
                count.found.round_trips += if file.unborn.is_some() { 0 } else { ELSEWHERE };
                return Some(());
            }
            None => self.node_at(table, path.split_last()?.1)?,
        };
        let is_own = directory.is_some_and(|node| self.may_be_made_in(table, node));
        count.found.round_trips += if is_own { 0 } else { ELSEWHERE };
        Some(())
    }

    /// Resolves a path from the cache: a file, or `Some(None)` if it certainly does not exist.
    pub(super) fn node_at<'t>(
        &self,
        table: &'t Table,
        path: &[OsString],
    ) -> Option<Option<&'t Node>> {
        let mut at = ROOT;
        for name in path {
            let its = NameIn { parent: at, name };
            let file = match (table.unborn_child(its), table.known(its)) {
                (Some((number, _)), _) => {
                    at = number;
                    continue;
                }
                (None, Known::File(file)) => file,
                (None, Known::Absent) if table.node(at).is_some_and(|node| self.is_good(node)) => {
                    return Some(None);
                }
                (None, Known::Absent | Known::Unknown) => return None,
            };
            at = table.number_of(file)?;
        }
        let node = table.node(at)?;
        (node.unborn.is_some() || self.is_good(node)).then_some(Some(node))
    }

    /// Counts all files below a directory; with a reader, their contents too.
    fn count_tree(
        &self,
        table: &Table,
        reader: Option<&Caller>,
        top: &Node,
        count: &mut Count,
    ) -> Option<()> {
        let mut directories = vec![top];
        while let Some(directory) = directories.pop() {
            let listing = directory.listing.as_ref().filter(|_| self.is_good(directory))?;
            count.found.files += listing.len() as u64;
            if count.found.files > MOST_FILES {
                return None;
            }
            for listed in listing.iter() {
                let file = listed.entry?.attributes.id;
                let node =
                    table.of(file).filter(|node| node.unborn.is_some() || self.is_good(node))?;
                match (node.attributes?.kind, reader) {
                    (Kind::Directory, _) => directories.push(node),
                    (Kind::Regular, Some(caller)) => self.count_contents(caller, node, count),
                    _ => {}
                }
            }
        }
        Some(())
    }

    fn count_contents(&self, caller: &Caller, node: &Node, count: &mut Count) {
        let Some(attributes) = node.attributes else { return };
        count.found.bytes = count.found.bytes.saturating_add(attributes.size);
        if node.unborn.is_some() {
            return;
        }
        // Only small files are opened without a round trip.
        count.found.round_trips += u32::from(!(1..=CHUNK).contains(&attributes.size));
        let may = node.leases.contains(Leases::DATA) && node.reader == Some(caller.uid);
        let is_here = |number| {
            let key = (node.file, number);
            self.chunks.has(key, attributes.version) || self.is_on_disk(key, attributes.version)
        };
        let missing =
            if may { count.missing_of(attributes.size, is_here) } else { attributes.size };
        count.found.missing = count.found.missing.saturating_add(missing);
        count.fetches |= missing > 0 || self.writes.is_dirty(node.file);
    }
}

impl Count {
    /// Returns how many bytes of a file of that size are in no chunk that is there.
    fn missing_of(&mut self, size: u64, is_there: impl Fn(u64) -> bool) -> u64 {
        let chunks = size.div_ceil(CHUNK).min(MOST_CHUNKS - self.looked);
        self.looked += chunks;
        let there = (0..chunks).filter(|number| is_there(*number));
        size - there.map(|number| CHUNK.min(size - number * CHUNK)).sum::<u64>()
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn files_of_any_size_are_estimated_at_once() {
        let (mut count, looked) = (Count::default(), Cell::new(0));
        let is_there = |number| {
            looked.set(looked.get() + 1);
            number != 1
        };
        assert_eq!(count.missing_of(0, is_there), 0);
        assert_eq!(count.missing_of(2 * CHUNK + 5, is_there), CHUNK);
        assert_eq!(count.missing_of(CHUNK + 5, is_there), 5);
        let missing = count.missing_of(u64::MAX, is_there);
        assert_eq!(missing, u64::MAX - (MOST_CHUNKS - 6) * CHUNK);
        assert_eq!(count.missing_of(u64::MAX, is_there), u64::MAX);
        assert_eq!(looked.get(), MOST_CHUNKS);
    }

    #[test]
    fn a_round_trip_is_the_shortest_of_late() {
        let round_trip = RoundTrip::default();
        let after = |times: &[u64]| {
            times.iter().for_each(|time| round_trip.took(Duration::from_nanos(*time)));
            round_trip.get().as_nanos()
        };
        assert_eq!(after(&[]), 0);
        assert_eq!(after(&[900, 800, 850]), 850);
        assert_eq!(after(&[5000]), 956);
        assert_eq!(after(&[5000; 30]), 5000);
        assert_eq!(after(&[20]), 20);
    }
}
