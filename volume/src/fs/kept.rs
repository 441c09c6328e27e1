//! Memory accounting for cached names: each directory's share is charged when it is cached, and
//! released when it is dropped. Above the limit, the names of the least recently used directories
//! are dropped, in the kernel too, and requested again on the next use.
//!
//! The limit per volume is [`KEPT_BYTES`], plus [`OPEN_BYTES`] for open directories and
//! [`AHEAD_BYTES`] for prefetched listings: about 150 MiB with all overhead, whatever a server
//! lists.

use std::{
    mem::size_of,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use crate::store::{FileId, Listed};

/// Limit for all directories of a volume: some 130,000 short names, more than the held files
/// (`super::table::MAX_FILES`).
pub(super) const KEPT_BYTES: usize = 64 << 20;

/// Limit for one directory; a larger one is listed in parts, and not cached.
pub(super) const LISTING_BYTES: usize = KEPT_BYTES / 2;

/// Limit for open directories. Beyond it each has one part at a time.
pub(super) const OPEN_BYTES: usize = 32 << 20;

/// Limit for directory prefetches in progress, beyond the first part of each.
pub(super) const AHEAD_BYTES: usize = KEPT_BYTES / 8;

/// Overhead of a name in a map beside its bytes: the string, a number, the map's and the
/// allocator's spare room.
const NAME_BYTES: usize = 96;

/// Memory of a file in a directory's orders (`super::order`).
const ORDER_BYTES: usize = 3 * size_of::<FileId>();

/// Total that charges share.
pub(super) type Sum = Arc<AtomicUsize>;

/// Charged bytes, released on drop.
#[derive(Debug, Default)]
pub(super) struct Charge {
    sum: Sum,
    bytes: usize,
}

impl Charge {
    pub fn of(sum: &Sum) -> Self {
        Self { sum: Arc::clone(sum), bytes: 0 }
    }

    pub fn add(&mut self, bytes: usize) {
        self.sum.fetch_add(bytes, Ordering::Relaxed);
        self.bytes += bytes;
    }

    /// Like [`Self::add`], unless the total would exceed `most`; returns true if it was added.
    pub fn add_within(&mut self, bytes: usize, most: usize) -> bool {
        let more = |sum: usize| sum.checked_add(bytes).filter(|sum| *sum <= most);
        let is_taken = self.sum.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok();
        self.bytes += if is_taken { bytes } else { 0 };
        is_taken
    }

    pub fn set(&mut self, bytes: usize) {
        self.clear();
        self.add(bytes);
    }

    pub fn clear(&mut self) {
        self.sum.fetch_sub(self.bytes, Ordering::Relaxed);
        self.bytes = 0;
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.clear();
    }
}

/// Charges of one directory.
#[derive(Debug, Default)]
pub(super) struct Share {
    /// Its listing and the map of its names.
    pub names: Charge,
    /// Its orders.
    pub orders: Charge,
    /// Names that the kernel may cache.
    pub told: Charge,
    /// Last use, by the table's clock.
    pub used: u64,
}

impl Share {
    pub fn of(sum: &Sum) -> Self {
        Self { names: Charge::of(sum), orders: Charge::of(sum), told: Charge::of(sum), used: 0 }
    }

    pub fn bytes(&self) -> usize {
        self.names.bytes() + self.orders.bytes() + self.told.bytes()
    }
}

/// Returns the memory of a name in a map.
pub(super) fn name_bytes(name: &std::ffi::OsStr) -> usize {
    NAME_BYTES + name.len()
}

/// Returns the memory of listed names.
pub(super) fn listed_bytes(names: &[Listed]) -> usize {
    names.iter().map(|listed| size_of::<Listed>() + listed.name.len()).sum()
}

/// Like [`listed_bytes`], plus the map of names and the orders.
pub(super) fn remembered_bytes(names: &[Listed]) -> usize {
    listed_bytes(names)
        + names.iter().map(|listed| name_bytes(&listed.name)).sum::<usize>()
        + orders_bytes(names)
}

pub(super) fn orders_bytes(names: &[Listed]) -> usize {
    names.len() * ORDER_BYTES
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_charged_is_given_back() {
        let sum = Sum::default();
        let now = || sum.load(Ordering::Relaxed);
        let mut share = Share::of(&sum);
        share.names.add(10);
        share.told.add(5);
        share.orders.set(7);
        share.orders.set(3);
        assert_eq!((now(), share.bytes()), (18, 18));
        share.names.clear();
        assert_eq!(now(), 8);
        let mut other = Charge::of(&sum);
        assert!(
            other.add_within(12, 20)
                && !other.add_within(1, 20)
                && !other.add_within(usize::MAX, 20)
        );
        assert_eq!((now(), other.bytes()), (20, 12));
        drop(other);
        drop(share);
        assert_eq!(now(), 0);
    }
}
