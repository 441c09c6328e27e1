//! What looking at files may cost a run: names that are looked at, time, and what is kept in
//! memory. The supervisor looks on behalf of a run's specification, before its commands start
//! (guards, paths, watched trees) and when they have ended (watched trees), and no command's limits
//! hold for that. Who gives a run up ends its looking at once.

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

/// Names that are looked at: a tree beyond this is not worth the time of every command in it.
const MAX_NAMES: usize = 500_000;

/// Names that nothing remembers come from a disk, some thousand a second: more than that is for the
/// workstation to wait for.
const MAX_TIME: Duration = Duration::from_secs(60);

/// Paths of changed names, of one command: each is what the workstation looks up and forgets.
pub const MAX_TOLD_BYTES: usize = 8 << 20;

/// What is kept of names that are looked at, for as long as the run lasts: room for the names of
/// the largest trees that may be looked at at all, of usual lengths. It is charged to the run's
/// identity (`run::prepare`).
pub const MAX_KEPT_BYTES: usize = 16 << 20;

/// Landlock rules for what the words of a run's commands name. The kernel keeps each, and the inode
/// it is on (some 1.2 KiB together), as long as the command is at work; no limit of this program
/// counts that.
pub const MAX_RULES: usize = 1 << 14;

/// So many names are looked at before the clock is asked again.
const STEP_NAMES: usize = 64;

/// Why what was to be looked at was not.
pub const SPENT: &str = "there is more to look at than one run may have";

/// What there is for one purpose of one run. It is spent by one thread.
pub struct Budget {
    names: Cell<usize>,
    time: Cell<Duration>,
    /// When the time was last counted.
    counted: Cell<Instant>,
    /// Names since then.
    uncounted: Cell<usize>,
    end: Cell<Option<Over>>,
    /// Of [`MAX_TOLD_BYTES`], what is left for the present command.
    told: Cell<usize>,
    /// Of [`MAX_KEPT_BYTES`].
    kept: Cell<usize>,
    /// Of [`MAX_RULES`].
    rules: Cell<usize>,
    /// Its other end is closed when the run is given up.
    run: Option<OwnedFd>,
}

/// Why nothing is left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Over {
    /// There were too many names.
    Names,
    /// They take too much memory.
    Bytes,
    /// It took too long.
    Time,
    /// Nobody wants to know.
    GivenUp,
}

impl Budget {
    /// For a run whose socket this is a copy of.
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

    /// To be called before it is spent after a while: the time until then was the commands' own.
    pub fn resume(&self) {
        self.counted.set(Instant::now());
        self.uncounted.set(STEP_NAMES);
        self.told.set(MAX_TOLD_BYTES);
    }

    /// Takes room for a name among the changes of the present command. `None`: there is none, nor
    /// for any other.
    #[must_use]
    pub fn tell(&self, directory: &Path, name: usize) -> Option<()> {
        let bytes = directory.as_os_str().len() + name;
        let left = self.told.get().checked_sub(bytes);
        self.told.set(left.unwrap_or_default());
        left.map(drop)
    }

    /// Takes as many names. False, from then on, if there are not as many, it has taken too long,
    /// or the run was given up.
    #[must_use]
    pub fn spend(&self, names: usize) -> bool {
        if self.end.get().is_none() {
            self.end.set(self.take(names));
        }
        self.end.get().is_none()
    }

    /// Takes room for what is kept until the run ends. False, from then on and for names too, if
    /// there is none.
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

    /// Takes one rule of those that a run may have; false if there is none.
    #[must_use]
    pub fn rule(&self) -> bool {
        let left = self.rules.get().checked_sub(1);
        self.rules.set(left.unwrap_or_default());
        left.is_some()
    }

    /// Why nothing is left, if that is so.
    pub fn over(&self) -> Option<Over> {
        self.end.get()
    }

    fn take(&self, names: usize) -> Option<Over> {
        let Some(left) = self.names.get().checked_sub(names) else { return Some(Over::Names) };
        self.names.set(left);
        // What costs no name takes some time, too.
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
        // The library does not know the one that was asked for, and says so of any answer with it.
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
