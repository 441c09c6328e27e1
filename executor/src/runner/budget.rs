//! Budget of a run for file lookups: names, time, and memory. The supervisor looks files up on
//! behalf of a run's specification, before its commands start (guards, paths, watched trees) and
//! when they have ended (watched trees), and no command's limits apply to that. It stops at once
//! when the run is given up.

use std::{
    cell::Cell,
    os::fd::{AsFd as _, OwnedFd},
    path::Path,
    time::{Duration, Instant},
};

use nix::{
    libc,
    poll::{PollFd, PollFlags, PollTimeout, poll},
};

/// Names looked up: a larger tree is not worth the time of every command in it.
const MAX_NAMES: usize = 500_000;

/// Uncached names come from a disk, some thousand a second: the workstation should not wait for
/// more.
const MAX_TIME: Duration = Duration::from_secs(60);

/// Paths of changed names, of one command: the workstation looks up and invalidates each.
pub const MAX_TOLD_BYTES: usize = 8 << 20;

/// Memory for names that are kept as long as the run lasts: enough for the largest trees within
/// `MAX_NAMES`, with names of usual length. It is charged to the run's identity (`run::prepare`).
pub const MAX_KEPT_BYTES: usize = 16 << 20;

/// Landlock rules for the paths that a run's commands name. The kernel keeps each with its inode
/// (some 1.2 KiB together) as long as the command runs; no limit of this program counts that.
pub const MAX_RULES: usize = 1 << 14;

/// Names between two reads of the clock.
const STEP_NAMES: usize = 64;

/// Message of a refusal because the budget is spent.
pub const SPENT: &str = "there is more to look at than one run may have";

/// Budget for one purpose of one run. One thread spends it.
pub struct Budget {
    names: Cell<usize>,
    time: Cell<Duration>,
    /// Time of the last count.
    counted: Cell<Instant>,
    /// Names since then.
    uncounted: Cell<usize>,
    end: Cell<Option<Over>>,
    /// Rest of [`MAX_TOLD_BYTES`] for the current command.
    told: Cell<usize>,
    /// Rest of [`MAX_KEPT_BYTES`].
    kept: Cell<usize>,
    /// Rest of [`MAX_RULES`].
    rules: Cell<usize>,
    /// A copy of the run's socket: its other end is closed when the run is given up.
    run: Option<OwnedFd>,
}

/// Reason why the budget is spent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Over {
    /// There were too many names.
    Names,
    /// They take too much memory.
    Bytes,
    /// It took too long.
    Time,
    /// The run was given up.
    GivenUp,
}

impl Budget {
    /// With a copy of the run's socket.
    pub fn new(run: Option<OwnedFd>) -> Self {
        Self {
            names: Cell::new(MAX_NAMES),
            time: Cell::new(MAX_TIME),
            counted: Cell::new(Instant::now()),
            uncounted: Cell::new(STEP_NAMES),
            end: Cell::new(None),
            told: Cell::new(MAX_TOLD_BYTES),
            kept: Cell::new(MAX_KEPT_BYTES),
            rules: Cell::new(MAX_RULES),
            run,
        }
    }

    /// Call it after a pause: the commands' own time does not count.
    pub fn resume(&self) {
        self.counted.set(Instant::now());
        self.uncounted.set(STEP_NAMES);
        self.told.set(MAX_TOLD_BYTES);
    }

    /// Reserves room for a name among the changes of the current command. `None`: there is none,
    /// nor for any other name.
    #[must_use]
    pub fn tell(&self, directory: &Path, name: usize) -> Option<()> {
        let bytes = directory.as_os_str().len() + name;
        let left = self.told.get().checked_sub(bytes);
        self.told.set(left.unwrap_or_default());
        left.map(drop)
    }

    /// Spends so many names. From then on false if there are not as many, it has taken too long, or
    /// the run was given up.
    #[must_use]
    pub fn spend(&self, names: usize) -> bool {
        if self.end.get().is_none() {
            self.end.set(self.take(names));
        }
        self.end.get().is_none()
    }

    /// Reserves memory until the run ends. From then on false, for names too, if there is none.
    #[must_use]
    pub fn keep(&self, bytes: usize) -> bool {
        if self.end.get().is_none() {
            match self.kept.get().checked_sub(bytes) {
                Some(left) => self.kept.set(left),
                None => self.end.set(Some(Over::Bytes)),
            }
        }
        self.end.get().is_none()
    }

    /// Spends one rule; false if none is left.
    #[must_use]
    pub fn rule(&self) -> bool {
        let left = self.rules.get().checked_sub(1);
        self.rules.set(left.unwrap_or_default());
        left.is_some()
    }

    /// Reason why the budget is spent, if it is.
    pub fn over(&self) -> Option<Over> {
        self.end.get()
    }

    fn take(&self, names: usize) -> Option<Over> {
        let Some(left) = self.names.get().checked_sub(names) else { return Some(Over::Names) };
        self.names.set(left);
        // Work without names takes some time, too.
        let uncounted = self.uncounted.get().saturating_add(names.max(1));
        self.uncounted.set(uncounted);
        if uncounted < STEP_NAMES {
            return None;
        }
        let now = Instant::now();
        let time = self.time.get().saturating_sub(now - self.counted.replace(now));
        self.time.set(time);
        self.uncounted.set(0);
        match time.is_zero() {
            true => Some(Over::Time),
            false => self.is_given_up().then_some(Over::GivenUp),
        }
    }

    fn is_given_up(&self) -> bool {
        let Some(run) = &self.run else { return false };
        let mut ends = [PollFd::new(run.as_fd(), PollFlags::from_bits_retain(libc::POLLRDHUP))];
        // nix lacks POLLRDHUP, and returns `None` for any answer that contains it.
        let is_end = |events: Option<PollFlags>| events.is_none_or(|events| !events.is_empty());
        poll(&mut ends, PollTimeout::ZERO).is_ok() && is_end(ends[0].revents())
    }
}

#[cfg(test)]
mod tests {
    use std::{io::Write as _, net::Shutdown, os::unix::net::UnixStream};

    use super::*;

    fn is_late(budget: &Budget) {
        budget
            .counted
            .set(Instant::now().checked_sub(MAX_TIME * 2).expect("the machine is not that young"));
    }

    #[test]
    fn names_are_spent_once_and_for_all() {
        let budget = Budget::new(None);
        assert!(budget.spend(MAX_NAMES - 1) && budget.spend(1) && budget.over().is_none());
        assert!(!budget.spend(1) && budget.over() == Some(Over::Names) && !budget.spend(0));
    }

    #[test]
    fn bytes_and_rules_are_bounded_as_names_are() {
        let budget = Budget::new(None);
        assert!(budget.keep(MAX_KEPT_BYTES - 1) && budget.keep(1) && budget.spend(1));
        assert!(!budget.keep(1) && budget.over() == Some(Over::Bytes) && !budget.spend(0));
        let budget = Budget::new(None);
        assert!((0..MAX_RULES).all(|_| budget.rule()) && !budget.rule() && budget.spend(1));
    }

    #[test]
    fn time_counts_while_it_looks() {
        let budget = Budget::new(None);
        is_late(&budget);
        budget.resume();
        assert!(budget.spend(0));
        is_late(&budget);
        assert!((0..STEP_NAMES).any(|_| !budget.spend(0)) && budget.over() == Some(Over::Time));
    }

    #[test]
    fn who_gives_a_run_up_ends_its_looking() {
        for is_half in [true, false] {
            let (mut daemon, run) = UnixStream::pair().expect("two sockets");
            let budget = Budget::new(Some(run.into()));
            daemon.write_all(b"signal").expect("room");
            assert!((0..1000).all(|_| budget.spend(1)));
            match is_half {
                true => daemon.shutdown(Shutdown::Write).expect("open"),
                false => drop(daemon),
            }
            assert!(
                (0..=STEP_NAMES).any(|_| !budget.spend(1)) && budget.over() == Some(Over::GivenUp),
                "{is_half}"
            );
        }
    }
}
