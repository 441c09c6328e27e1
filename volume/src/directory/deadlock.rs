//! Deadlocks of range locks: of owners that wait for each other, the one that would wait last gets
//! `EDEADLK` (fcntl(2)). The kernel does not look for them among open file description locks, which
//! those of sessions are (`locks`), so a machine knows what each owner has locked.
//!
//! Invariant: an owner's ranges are changed together with the kernel's, one change at a time. A
//! cycle is complete when the last of its members begins to wait, and no member of it can release
//! anything before, unless its owner has other threads: only then is it looked for. As with the
//! kernel's own check, an owner with several threads may hear of a deadlock which another of its
//! threads would have ended. Cycles through programs of the server are not seen.

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, Mutex, Weak},
};

use nix::errno::Errno;
use rangemap::RangeMap;

use crate::{
    leases::{File, SessionId},
    store::{Access, RangeLock},
};

/// Looked-at owners of one search. Beyond that, a deadlock is not found.
const MOST_STEPS: usize = 10_000;
/// Files in the table before it is cleared of those that nobody locks any more.
const FIRST_CLEARING: usize = 64;

/// A process of a workstation, or an open file description there.
pub type LockOwner = (SessionId, u64);

/// A lock of a file that is waited for.
type WantedLock = (File, RangeLock);

/// Owners that hold or wait for range locks.
#[derive(Debug, Default)]
pub struct Deadlocks(Mutex<WaitGraph>);

#[derive(Debug, Default)]
struct WaitGraph {
    holders: HashMap<File, Vec<Weak<HeldRanges>>>,
    /// By a number, since an owner may have several threads.
    waiting: HashMap<LockOwner, HashMap<u64, WantedLock>>,
    last_number: u64,
    clear_at: usize,
}

/// Ranges of one file that an owner has locked.
#[derive(Debug)]
pub struct HeldRanges {
    owner: LockOwner,
    ranges: Mutex<RangeMap<u64, Access>>,
}

/// A lock that is waited for, until it is dropped.
#[derive(Debug)]
pub struct WaitingOwner<'a> {
    deadlocks: &'a Deadlocks,
    owner: LockOwner,
    number: u64,
}

impl Deadlocks {
    /// Adds an owner without locks of that file.
    pub fn add(&self, file: File, owner: LockOwner) -> Arc<HeldRanges> {
        let held = Arc::new(HeldRanges { owner, ranges: Mutex::default() });
        let mut state = self.0.lock().expect("not poisoned");
        if state.holders.len() >= state.clear_at.max(FIRST_CLEARING) {
            state.holders.retain(|_, of_file| of_file.iter().any(|held| held.strong_count() > 0));
            state.clear_at = 2 * state.holders.len();
        }
        let of_file = state.holders.entry(file).or_default();
        of_file.retain(|held| held.strong_count() > 0);
        of_file.push(Arc::downgrade(&held));
        held
    }

    /// Notes that an owner is going to wait for a lock.
    ///
    /// # Errors
    /// `EDEADLK` if another one that holds it waits, maybe through others, for this one.
    pub fn wait(
        &self,
        owner: LockOwner,
        file: File,
        lock: &RangeLock,
    ) -> Result<WaitingOwner<'_>, Errno> {
        let mut state = self.0.lock().expect("not poisoned");
        let wanted = (file, lock.clone());
        if state.is_waited_for(owner, wanted.clone()) {
            return Err(Errno::EDEADLK);
        }
        state.last_number += 1;
        let number = state.last_number;
        state.waiting.entry(owner).or_default().insert(number, wanted);
        Ok(WaitingOwner { deadlocks: self, owner, number })
    }
}

impl Drop for WaitingOwner<'_> {
    fn drop(&mut self) {
        let mut state = self.deadlocks.0.lock().expect("not poisoned");
        let Some(its) = state.waiting.get_mut(&self.owner) else { return };
        its.remove(&self.number);
        if its.is_empty() {
            state.waiting.remove(&self.owner);
        }
    }
}

impl WaitGraph {
    /// Returns true if a holder of that lock waits for `owner`.
    fn is_waited_for(&self, owner: LockOwner, first: WantedLock) -> bool {
        let mut seen = HashSet::from([owner]);
        let mut queue = vec![(owner, first)];
        let mut steps = 0;
        while let Some((waiter, (file, lock))) = queue.pop() {
            let of_file = self.holders.get(&file).into_iter().flatten();
            for held in of_file.filter_map(Weak::upgrade) {
                steps += 1;
                if steps > MOST_STEPS {
                    return false;
                }
                if held.owner == waiter || !held.conflicts_with(&lock) {
                    continue;
                }
                if held.owner == owner {
                    return true;
                }
                if seen.insert(held.owner) {
                    let its = self.waiting.get(&held.owner).into_iter().flat_map(HashMap::values);
                    queue.extend(its.map(|wanted| (held.owner, wanted.clone())));
                }
            }
        }
        false
    }
}

impl HeldRanges {
    /// Notes that a lock was taken or released.
    pub fn change(&self, lock: &RangeLock) {
        let mut ranges = self.ranges.lock().expect("not poisoned");
        match lock.access {
            Some(access) => ranges.insert(lock.range.clone(), access),
            None => ranges.remove(lock.range.clone()),
        }
    }

    /// Notes that all locks were released.
    pub fn clear(&self) {
        self.ranges.lock().expect("not poisoned").clear();
    }

    fn conflicts_with(&self, lock: &RangeLock) -> bool {
        let ranges = self.ranges.lock().expect("not poisoned");
        let mut overlapping = ranges.overlapping(&lock.range);
        overlapping.any(|(_, access)| {
            *access == Access::Exclusive || lock.access == Some(Access::Exclusive)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(number: u64) -> File {
        File { system: 1, generation: number }
    }

    fn owner(number: u64) -> LockOwner {
        (SessionId(number % 2), number)
    }

    fn exclusive(range: std::ops::Range<u64>) -> RangeLock {
        RangeLock { range, access: Some(Access::Exclusive) }
    }

    fn shared(range: std::ops::Range<u64>) -> RangeLock {
        RangeLock { range, access: Some(Access::Shared) }
    }

    fn holder(deadlocks: &Deadlocks, at: u64, who: u64, lock: &RangeLock) -> Arc<HeldRanges> {
        let held = deadlocks.add(file(at), owner(who));
        held.change(lock);
        held
    }

    #[test]
    fn the_last_of_a_circle_does_not_wait() {
        let deadlocks = Deadlocks::default();
        let _held: Vec<_> =
            (1..=3).map(|n| holder(&deadlocks, n, n, &exclusive(0..u64::MAX))).collect();
        let _first = deadlocks.wait(owner(1), file(2), &shared(5..6)).unwrap();
        let second = deadlocks.wait(owner(2), file(3), &exclusive(0..1)).unwrap();
        assert_eq!(deadlocks.wait(owner(3), file(1), &shared(0..1)).unwrap_err(), Errno::EDEADLK);
        drop(second);
        let _waits = deadlocks.wait(owner(3), file(1), &shared(0..1)).unwrap();
    }

    #[test]
    fn who_waits_for_what_is_not_in_the_way_is_no_circle() {
        let deadlocks = Deadlocks::default();
        let one = holder(&deadlocks, 1, 1, &shared(0..10));
        let two = holder(&deadlocks, 1, 2, &exclusive(10..20));
        let _first = deadlocks.wait(owner(1), file(1), &exclusive(10..11)).unwrap();
        // Shared with it, beside it, and in another file.
        for (at, lock) in [(1, shared(0..10)), (1, exclusive(20..30)), (2, exclusive(0..10))] {
            drop(deadlocks.wait(owner(2), file(at), &lock).unwrap());
        }
        let refused = || deadlocks.wait(owner(2), file(1), &exclusive(9..30)).err();
        assert_eq!(refused(), Some(Errno::EDEADLK));
        one.change(&RangeLock { range: 9..10, access: None });
        assert_eq!(refused(), None);
        one.change(&shared(0..10));
        assert_eq!(refused(), Some(Errno::EDEADLK));
        one.clear();
        assert_eq!(refused(), None);
        drop(two);
    }

    #[test]
    fn nothing_is_left_of_who_is_gone() {
        let deadlocks = Deadlocks::default();
        for number in 0..1000 {
            drop(holder(&deadlocks, number, 1, &exclusive(0..1)));
            drop(deadlocks.wait(owner(1), file(1), &exclusive(0..1)));
        }
        let state = deadlocks.0.lock().unwrap();
        assert!(state.holders.len() <= FIRST_CLEARING && state.waiting.is_empty());
    }
}
