//! Limits on a stage's wait for the processes at its pipes.
//!
//! Each entry lists the awaited event, the events that end the wait, the sign that the awaited
//! event is not near, and the backstop:
//!
//! - [`Awaited::Work`]: a process runs, and may become a stage or close its end. Ends when it
//!   executes a program, closes its end, ends, stops, or sleeps for 3 ms; or when it has worked for
//!   [`WORKS`] in total, and so does something else. No backstop.
//! - [`Awaited::Answer`]: a shell that expands words sleeps in a call on a mount, or reads a
//!   command's output. Ends when the call returns, output arrives, or the command ends; or when it
//!   has slept for [`QUIET`], plus [`ROUND_TRIPS`] for a call on a mount, plus [`STARTS`] for a
//!   command that was sent to a server; at once for a FIFO without another opener; after
//!   [`ANSWERS`] in total. No backstop.
//! - [`Awaited::Enlistment`]: a stage program has started, or a process has an open request to this
//!   gateway. Ends when it enlists, executes the command, ends or stops; or when it has slept for
//!   [`QUIET`] without a request: it enlists with another gateway. Backstop: [`ENLISTS`].
//! - Any of them ends if a process that can't be waited for has the same end of the pipe
//!   (`closing`). Backstop: [`LONGEST`].
//!
//! Invariant: a stage's waits for work and for answers are summed over all processes and never
//! reset, so that no sequence of processes, each with apparent progress, delays a stage for longer.
//! Time in which a ready process has no processor does not count: on an overloaded machine it can't
//! reach its exec. Neither does time beyond [`BETWEEN_LOOKS`] in which the gateway itself had no
//! processor and so did not look: the process may have reached its exec at once and be a stage by
//! now.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use super::closing::{Awaited, Patience};
use crate::backstops::Backstop;

/// A shell's child takes one or two milliseconds from fork to exec, as do programs that execute a
/// command (nice, env, a shell).
const WORKS: Duration = Duration::from_millis(12);
/// Time without activity after which an expected event would have happened.
pub(super) const QUIET: Duration = Duration::from_millis(12);
/// Round trips to a server that suffice to list a directory or run a command.
pub(super) const ROUND_TRIPS: u32 = 4;
/// Time to start a command on a server that first has to set up its view of the workstation's
/// files: about 50 ms.
pub(super) const STARTS: Duration = Duration::from_millis(50);
/// Stages before a command whose words are still being expanded lose nothing by waiting: nobody
/// would read their output yet. They may save its transfer.
const ANSWERS: Duration = Duration::from_secs(1);
/// A running stage program always enlists or executes the command, and does nothing else before.
const ENLISTS: Duration = Duration::from_secs(2);
/// Limit on a stage's total wait.
const LONGEST: Duration = Duration::from_secs(10);
/// A running process shows at the next kernel tick: 10 ms at most (`CONFIG_HZ`), plus a margin.
const RUNS_UNSEEN: Duration = Duration::from_millis(15);
/// Upper bound of the counted time between two looks.
pub(super) const BETWEEN_LOOKS: Duration = Duration::from_millis(4);

/// Past waits of a stage, and the current one.
#[derive(Debug)]
pub(super) struct Waits {
    pub since: Instant,
    spent: BTreeMap<Awaited, Duration>,
    now: Option<PendingWait>,
}

impl Waits {
    /// Starts without a wait.
    pub fn begin() -> Self {
        Self { since: Instant::now(), spent: BTreeMap::new(), now: None }
    }

    /// Notes the awaited event of the latest look.
    pub fn note(&mut self, patience: Option<&Patience>) {
        if let Some(now) = &mut self.now
            && patience.is_some_and(|seen| seen.awaited == now.last.awaited)
        {
            patience.into_iter().for_each(|seen| now.see(seen));
            return;
        }
        if let Some(past) = self.now.take() {
            *self.spent.entry(past.last.awaited).or_default() += past.over();
        }
        self.now = patience.map(PendingWait::new);
    }

    /// Total counted wait.
    pub fn total(&self) -> Duration {
        self.spent.values().sum::<Duration>()
            + self.now.as_ref().map(PendingWait::waited).unwrap_or_default()
    }

    /// Returns true if waiting longer may help.
    pub fn go_on(&self) -> bool {
        self.now.is_some() && !self.is_too_long() && self.left().is_some()
    }

    /// Backstop that ended the wait, if one did.
    pub fn backstop(&self) -> Option<Backstop> {
        let pending = self.now.as_ref()?;
        let has_not_enlisted = pending.last.awaited == Awaited::Enlistment && self.left().is_none();
        let too_long = self.is_too_long().then_some(Backstop::Assembly);
        too_long.or(has_not_enlisted.then_some(Backstop::Enlistment))
    }

    fn is_too_long(&self) -> bool {
        self.since.elapsed() >= LONGEST
    }

    /// Time left for the current wait.
    fn left(&self) -> Option<Duration> {
        let pending = self.now.as_ref()?;
        let spent =
            self.spent.get(&pending.last.awaited).copied().unwrap_or_default() + pending.waited();
        limit(pending.last.awaited).checked_sub(spent).filter(|left| !left.is_zero())
    }
}

fn limit(awaited: Awaited) -> Duration {
    match awaited {
        Awaited::Work => WORKS,
        Awaited::Answer => ANSWERS,
        Awaited::Enlistment => ENLISTS,
    }
}

/// Wait for one kind of event, in one process or several in sequence.
#[derive(Debug)]
struct PendingWait {
    since: Instant,
    /// Time in which the process had no processor, up to `still`, or no look happened.
    uncounted: Duration,
    last: Patience,
    /// Time since when the process looks as in `last`.
    still: Instant,
    /// Time of the last such look; later activity is unknown.
    seen: Instant,
}

impl PendingWait {
    fn new(now: &Patience) -> Self {
        let at = Instant::now();
        Self { since: at, uncounted: Duration::ZERO, last: now.clone(), still: at, seen: at }
    }

    /// Updates with a later look at the same kind of event.
    fn see(&mut self, now: &Patience) {
        let at = Instant::now();
        if self.last != *now {
            // A short standstill may be none: the process ran between two ticks.
            let still = self.seen.duration_since(self.still);
            let starved =
                if self.last.is_ready && still > RUNS_UNSEEN { still } else { Duration::ZERO };
            let [ran, queued] = spent_between(&self.last, now);
            let unseen = self.unseen_until(at).saturating_sub(ran);
            self.uncounted += queued.max(starved + unseen);
            (self.last, self.still) = (now.clone(), at);
        }
        self.seen = at;
    }

    /// Ends the wait, as noticed now. Returns its counted time.
    fn over(mut self) -> Duration {
        let at = Instant::now();
        if self.standstill().is_none() {
            self.uncounted += self.unseen_until(at);
        }
        self.waited()
    }

    fn unseen_until(&self, at: Instant) -> Duration {
        at.duration_since(self.seen).saturating_sub(BETWEEN_LOOKS)
    }

    /// Time for which it has been ready to run without a sign of running.
    fn standstill(&self) -> Option<Duration> {
        self.last.is_ready.then(|| self.still.elapsed())
    }

    fn waited(&self) -> Duration {
        self.since.elapsed().saturating_sub(self.uncounted + self.standstill().unwrap_or_default())
    }
}

/// Time that a process ran, and waited for a processor, between two looks: the first two numbers of
/// `/proc/PID/schedstat`, in nanoseconds.
fn spent_between(before: &Patience, after: &Patience) -> [Duration; 2] {
    let spent = |patience: &Patience, kind| {
        patience.scheduled.split_ascii_whitespace().nth(kind)?.parse::<u64>().ok()
    };
    let is_same = before.process == after.process;
    [0, 1].map(|kind| {
        let both = spent(before, kind).zip(spent(after, kind)).filter(|_| is_same);
        both.map_or(Duration::ZERO, |(before, after)| {
            Duration::from_nanos(after.saturating_sub(before))
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn patience(awaited: Awaited, process: u32, scheduled: &str) -> Patience {
        Patience { awaited, process, is_ready: false, scheduled: scheduled.into() }
    }

    fn earlier(waits: &mut Waits, by: Duration) {
        let pending = waits.now.as_mut().unwrap();
        (pending.since, pending.still, pending.seen) =
            (pending.since - by, pending.still - by, pending.seen - by);
        waits.since -= by;
    }

    /// `while :; do true; done &` beside a command: each child seems to be about to become
    /// something.
    #[test]
    fn what_was_waited_for_is_never_given_back() {
        let mut waits = Waits::begin();
        for child in 0..4 {
            waits.note(Some(&patience(Awaited::Work, child, "")));
            assert_eq!(waits.go_on(), child < 3, "{child}");
            for look in 0..WORKS.as_millis() / 3 {
                earlier(&mut waits, Duration::from_millis(1));
                waits.note(Some(&patience(Awaited::Work, child, &format!("{look} 0 {look}"))));
            }
            earlier(&mut waits, Duration::from_millis(1));
            let other = patience(Awaited::Answer, child, "");
            waits.note(Some(&other).filter(|_| child % 2 == 1));
        }
        assert_eq!(waits.backstop(), None);
    }

    #[test]
    fn a_process_without_a_processor_is_waited_for() {
        let mut waits = Waits::begin();
        waits.note(Some(&patience(Awaited::Work, 1, "10 0 1")));
        earlier(&mut waits, 10 * WORKS);
        assert!(!waits.go_on());
        waits.note(Some(&patience(Awaited::Work, 1, &format!("20 {} 2", (10 * WORKS).as_nanos()))));
        assert!(waits.go_on());
        let mut waits = Waits::begin();
        waits.note(Some(&Patience { is_ready: true, ..patience(Awaited::Work, 1, "10 0 1") }));
        earlier(&mut waits, 10 * WORKS);
        assert!(waits.go_on());
    }

    /// On a machine where the gateway itself gets a processor now and then, a process that computes
    /// looks otherwise at each look.
    #[test]
    fn a_process_that_has_run_between_two_looks_was_not_starved() {
        let mut waits = Waits::begin();
        for look in 0..4 {
            let ran = format!("{} 0 {look}", (10 * WORKS * look).as_nanos());
            waits.note(Some(&Patience { is_ready: true, ..patience(Awaited::Work, 1, &ran) }));
            earlier(&mut waits, 10 * WORKS);
        }
        assert!(!waits.go_on());
    }

    /// The gateway has had no processor for long: what was about to become a stage may have done so
    /// at once.
    #[test]
    fn time_in_which_nobody_looked_does_not_count() {
        for is_ready in [true, false] {
            let mut waits = Waits::begin();
            waits.note(Some(&Patience { is_ready, ..patience(Awaited::Work, 1, "10 0 1") }));
            earlier(&mut waits, 10 * WORKS);
            waits.note(Some(&patience(Awaited::Work, 2, "20 0 1")));
            assert!(waits.go_on());
            earlier(&mut waits, 10 * WORKS);
            waits.note(Some(&patience(Awaited::Enlistment, 2, "30 0 2")));
            assert!(waits.go_on());
            earlier(&mut waits, Duration::from_millis(1));
            waits.note(Some(&patience(Awaited::Work, 3, "10 0 1")));
            assert!(waits.go_on());
        }
    }

    #[test]
    fn only_last_limits_are_backstops() {
        for (awaited, limit, expected) in [
            (Awaited::Work, WORKS, None),
            (Awaited::Answer, ANSWERS, None),
            (Awaited::Enlistment, ENLISTS, Some(Backstop::Enlistment)),
            (Awaited::Enlistment, LONGEST, Some(Backstop::Assembly)),
        ] {
            let mut waits = Waits::begin();
            waits.note(Some(&patience(awaited, 1, "")));
            assert!(waits.go_on() && waits.backstop().is_none(), "{awaited:?}");
            earlier(&mut waits, limit);
            assert_eq!((waits.go_on(), waits.backstop()), (false, expected), "{awaited:?}");
        }
    }
}
