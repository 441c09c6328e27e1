//! Indexes of the lease table: files by session, and expiries by time, so that no operation scans
//! other sessions' files.
//!
//! Invariant: a file is in a session's index exactly if the session has a grant or an unanswered
//! recall of it, and each recall is in [`Ends`]. Only [`super::LeaseTable::change`] and
//! [`super::LeaseTable::drop_leases`] write to them.

use std::{collections::BTreeSet, time::Instant};

use super::{File, Held, SessionId};
use crate::store::{Leases, Stamp};

/// The files of one session.
#[derive(Debug, Default)]
pub struct Index {
    pub granted: BTreeSet<File>,
    /// Those of `granted` with a write lease.
    pub writable: BTreeSet<File>,
    /// Recalls without an answer.
    pub recalled: BTreeSet<(Stamp, File)>,
    /// Those of `recalled` that recall a write lease.
    pub unwritten: BTreeSet<(Stamp, File)>,
}

/// Expiries, the next first.
#[derive(Debug, Default)]
pub struct Ends {
    /// Sessions that have not expired.
    pub lives: BTreeSet<(Instant, SessionId)>,
    pub recalls: BTreeSet<(Instant, SessionId, File, Stamp)>,
    /// Deadlines for the write leases that were recalled from a session up to that stamp.
    pub flushes: BTreeSet<(Instant, SessionId, Stamp)>,
}

impl Index {
    /// Returns the number of grants and recalls.
    pub fn len(&self) -> usize {
        self.granted.len() + self.recalled.len()
    }

    pub fn may_write(&self) -> bool {
        !self.writable.is_empty() || !self.unwritten.is_empty()
    }

    /// Returns all its files, possibly with duplicates.
    pub fn files(&self) -> impl Iterator<Item = File> + '_ {
        self.granted.iter().copied().chain(self.recalled.iter().map(|(_, file)| *file))
    }

    pub fn insert(&mut self, file: File, session: SessionId, held: &Held, ends: &mut Ends) {
        if let Some(grant) = held.grants.get(&session) {
            self.granted.insert(file);
            if grant.leases.contains(Leases::WRITE) {
                self.writable.insert(file);
            }
        }
        for recalled in held.recalled.iter().filter(|recalled| recalled.session == session) {
            self.recalled.insert((recalled.stamp, file));
            if recalled.leases.contains(Leases::WRITE) {
                self.unwritten.insert((recalled.stamp, file));
            }
            ends.recalls.insert((recalled.until, session, file, recalled.stamp));
        }
    }

    pub fn remove(&mut self, file: File, session: SessionId, held: &Held, ends: &mut Ends) {
        // Most are granted for the first time.
        if held.grants.contains_key(&session) {
            self.granted.remove(&file);
            self.writable.remove(&file);
        }
        for recalled in held.recalled.iter().filter(|recalled| recalled.session == session) {
            self.recalled.remove(&(recalled.stamp, file));
            self.unwritten.remove(&(recalled.stamp, file));
            ends.recalls.remove(&(recalled.until, session, file, recalled.stamp));
        }
    }
}

/// The last of these recalls with that stamp or an earlier one.
pub fn last_until(recalls: &BTreeSet<(Stamp, File)>, stamp: Stamp) -> Option<File> {
    recalls.range(..=(stamp, File::LAST)).next_back().map(|(_, file)| *file)
}
