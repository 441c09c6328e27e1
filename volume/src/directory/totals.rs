//! Sums over the file tables of all exports of one machine. Each export is an account:
//! see [`super::account`].

use std::sync::atomic::{AtomicUsize, Ordering};

use super::account::PoolUsage;

/// Limit of known files: about 250 bytes each, at most 500. An evicted one is answered with ESTALE,
/// and the client walks to it again.
pub const MAX_NODES: usize = 250_000;

/// Sizes of the tables of all exports.
#[derive(Debug)]
pub struct NodeTotals {
    known: Total,
    /// Cached descriptors.
    kept_open: Total,
}

/// A sum with its limit. Invariant: it never exceeds the limit, whatever threads add at once.
#[derive(Debug)]
pub struct Total {
    used: AtomicUsize,
    limit: usize,
}

impl NodeTotals {
    /// With room for so many cached descriptors.
    pub fn new(max_kept_open: usize) -> Self {
        Self { known: Total::new(MAX_NODES), kept_open: Total::new(max_kept_open) }
    }

    /// Known files.
    pub fn known(&self) -> &Total {
        &self.known
    }

    /// Cached descriptors.
    pub fn kept_open(&self) -> &Total {
        &self.kept_open
    }
}

impl Total {
    fn new(limit: usize) -> Self {
        Self { used: AtomicUsize::new(0), limit }
    }

    /// Adds one, if that is within the share of an export that has `own`.
    pub fn try_add(&self, own: usize) -> bool {
        let more =
            |used| PoolUsage { own, used, limit: self.limit }.may_take(1).then_some(used + 1);
        self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok()
    }

    /// Subtracts what was added.
    pub fn subtract(&self, count: usize) {
        self.used.fetch_sub(count, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exports_share_and_nobody_exceeds_the_limit() {
        let total = Total::new(100);
        let mut own = [0, 0, 0];
        for _ in 0..100 {
            for (export, own) in own.iter_mut().enumerate() {
                // The third comes late.
                *own += usize::from(
                    (export < 2 || total.used.load(Ordering::Relaxed) > 60) && total.try_add(*own),
                );
            }
        }
        assert!(own.iter().sum::<usize>() <= 100 && own.iter().all(|own| *own > 5), "{own:?}");
        total.subtract(own.iter().sum());
        assert!(total.try_add(0) && !Total::new(0).try_add(0));
    }
}
