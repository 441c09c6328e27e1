//! How much of names is kept: each directory's share is counted when it is entered and given back
//! when it is dropped, and the directories that were not used for longest are dropped when the sum
//! is too large. What is dropped is asked for again, and the kernel is made to forget the names
//! that it was told of.
//!
//! The sum of a volume is [`KEPT_BYTES`], and beside it [`OPEN_BYTES`] for open directories and
//! [`AHEAD_BYTES`] for listings that nobody has asked for yet: about 150 MiB with all overhead,
//! whatever a server lists.

use std::{
    mem::size_of,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use crate::store::{FileId, Listed};

/// Of all directories of a volume: some 130,000 short names, more than files are held
/// (`super::table::MAX_FILES`).
pub(super) const KEPT_BYTES: usize = 64 << 20;

/// Of one directory; a larger one is listed part by part, and not remembered.
pub(super) const LISTING_BYTES: usize = KEPT_BYTES / 2;

/// Of open directories. Beyond that each has one part at a time.
pub(super) const OPEN_BYTES: usize = 32 << 20;

/// Of listings ahead that are under way, beyond the first part of each.
pub(super) const AHEAD_BYTES: usize = KEPT_BYTES / 8;

/// What a name costs in a map, beside its bytes: itself, a number, the map's room, the allocator's.
const NAME_BYTES: usize = 96;

/// What a file costs in a directory's orders (`super::order`).
const ORDER_BYTES: usize = 3 * size_of::<FileId>();

/// A sum that charges share.
pub(super) type Sum = Arc<AtomicUsize>;

/// Bytes that somebody has; given back when it is dropped.
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

    /// The same unless the sum would be more than that.
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

/// What is charged to one directory.
#[derive(Debug, Default)]
pub(super) struct Share {
    /// Its listing and the map of its names.
    pub names: Charge,
    /// Its orders.
    pub orders: Charge,
    /// Names that the kernel may remember.
    pub told: Charge,
    /// When it was used, as the table counts.
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

/// One name in a map.
pub(super) fn name_bytes(name: &std::ffi::OsStr) -> usize {
    NAME_BYTES + name.len()
}

/// Names as a server lists them.
pub(super) fn listed_bytes(names: &[Listed]) -> usize {
    names.iter().map(|listed| size_of::<Listed>() + listed.name.len()).sum()
}

/// The same with all that is remembered by it.
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
