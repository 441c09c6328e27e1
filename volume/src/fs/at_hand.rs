//! How far a program that runs on this machine would get without asking the store: what is
//! remembered under leases, and which contents are here. Nothing waits in it, and nothing depends
//! on it: what has been recalled meanwhile is asked for.

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
use crate::store::{Caller, Kind, Leases};

/// Files of a tree that are looked at, at most: with more a walk through them takes as long as most
/// links.
const MOST_FILES: u64 = 2000;

/// What a program does with a path below the volume's root.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Use {
    /// It looks at it, and lists it if it is a directory.
    Look(PathBuf),
    /// It reads it.
    Read(PathBuf),
    /// It looks at everything below it.
    LookBelow(PathBuf),
    /// It reads everything below it.
    ReadBelow(PathBuf),
    /// It writes to a file that is open.
    Write(PathBuf),
    /// It makes a file of that name, or one in the directory of that name.
    Make(PathBuf),
}

/// What that takes here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct AtHand {
    /// Files that are looked at or read.
    pub files: u64,
    /// Contents, in bytes.
    pub bytes: u64,
    /// Of these, what would have to be fetched, and, where something is written, what may have to
    /// be sent.
    pub missing: u64,
    /// Round trips, one after the other; contents of small files are fetched together
    /// ([`Volume::will_read`]).
    pub round_trips: u32,
    /// The time that one of them takes.
    pub round_trip: Duration,
}

/// The time that a round trip takes: the shortest of late.
#[derive(Debug, Default)]
pub(super) struct RoundTrip(AtomicU64);

impl RoundTrip {
    /// One took so long. A link that has become longer is believed after a while.
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

/// A count that is not finished.
#[derive(Default)]
struct Count {
    found: AtHand,
    fetches: bool,
    writes: bool,
}

impl Volume {
    /// How much of what a program is going to use is here. `None`: nobody can tell without asking.
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
        let missing = count.found.missing + if count.writes { count.found.bytes } else { 0 };
        Some(AtHand { round_trips, missing, round_trip: self.round_trip.get(), ..count.found })
    }

    /// Whether nothing of what is expected would have to be fetched.
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
            // What was made in it in memory goes out before it is listed.
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

    /// In a directory that nobody else knows a file costs nothing. Elsewhere it is made, written
    /// and closed.
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

    /// What a path leads to, if that is known: a file, or `None` where there is none.
    pub(super) fn node_at<'t>(
        &self,
        table: &'t Table,
        path: &[OsString],
    ) -> Option<Option<&'t Node>> {
        let mut at = ROOT;
        for name in path {
            let file = match (table.unborn_child(at, name), table.known(at, name)) {
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

    /// All below a directory; with a caller, its contents too.
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
        count.found.bytes += attributes.size;
        if node.unborn.is_some() {
            return;
        }
        // Only small files are opened without asking.
        count.found.round_trips += u32::from(!(1..=CHUNK).contains(&attributes.size));
        let may = node.leases.contains(Leases::DATA) && node.reader == Some(caller.uid);
        let is_here = |number| {
            let key = (node.file, number);
            self.chunks.has(key, attributes.version) || self.is_on_disk(key, attributes.version)
        };
        let chunks =
            (0..attributes.size.div_ceil(CHUNK)).filter(|number| !may || !is_here(*number));
        let missing = chunks.map(|number| CHUNK.min(attributes.size - number * CHUNK)).sum::<u64>();
        count.found.missing += missing;
        count.fetches |= missing > 0 || self.writes.is_dirty(node.file);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
