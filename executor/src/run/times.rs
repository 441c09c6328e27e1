//! Times of a traced run (`RunSpec.trace`): counted from the arrival of the specification, since
//! this machine's clock means nothing to the reader. An untraced run reads no clock.

use std::{
    collections::BTreeMap,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use posh_proto::{
    clock::monotonic_ns,
    executor::{Exited, RunTimes, StartTimes, StreamTimes},
};

/// Counts from a specification's arrival.
#[derive(Debug, Clone, Copy)]
pub struct Clock {
    arrived_ns: u64,
}

impl Clock {
    /// `None`, unless the specification that arrived then asks for times.
    pub fn start(is_traced: bool, arrived_ns: u64) -> Option<Self> {
        is_traced.then_some(Self { arrived_ns })
    }

    /// Now.
    pub fn now_ns(self) -> u64 {
        self.since(monotonic_ns())
    }

    /// Converts a time of this machine's clock. 0 stands for an event that never happened.
    fn since(self, moment_ns: u64) -> u64 {
        moment_ns.saturating_sub(self.arrived_ns).max(1)
    }

    /// Converts the supervisor's times from this machine's clock.
    pub fn take_over(self, times: StartTimes) -> StartTimes {
        StartTimes {
            taken_ns: self.since(times.taken_ns),
            prepared_ns: self.since(times.prepared_ns),
            spawned_ns: self.since(times.spawned_ns),
            ..times
        }
    }

    /// Adds the time at which the commands have started and the client is told.
    pub fn started(self, times: StartTimes) -> StartTimes {
        StartTimes { started_ns: self.now_ns(), ..times }
    }

    /// Like `take_over`, for a command's end.
    pub fn take_over_end(self, exited: Exited) -> Exited {
        Exited { exited_ns: self.since(exited.exited_ns), ..exited }
    }
}

/// Bytes that passed through the daemon, and the times of its outlets.
#[derive(Default)]
pub struct Traffic {
    received_bytes: AtomicU64,
    sent_bytes: AtomicU64,
    outlets: Option<(Clock, Mutex<BTreeMap<u32, StreamTimes>>)>,
}

impl Traffic {
    /// With times, if there is a clock.
    pub fn new(clock: Option<Clock>) -> Self {
        Self { outlets: clock.map(|clock| (clock, Mutex::default())), ..Self::default() }
    }

    /// Bytes from the client have been written for a command.
    pub fn received(&self, bytes: usize) {
        self.received_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Bytes of an outlet are about to be sent.
    pub fn sent(&self, stream: u32, bytes: usize) {
        self.sent_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        self.note(stream, |times, now_ns| {
            if times.first_byte_ns == 0 {
                times.first_byte_ns = now_ns;
            }
        });
    }

    /// An outlet's sources are at their end.
    pub fn ended(&self, stream: u32) {
        self.note(stream, |times, now_ns| times.ended_ns = now_ns);
    }

    /// Bytes from and to the client.
    pub fn totals(&self) -> (u64, u64) {
        (self.received_bytes.load(Ordering::Relaxed), self.sent_bytes.load(Ordering::Relaxed))
    }

    /// Times reported at the end of a run.
    pub fn times(&self) -> Option<RunTimes> {
        let (clock, outlets) = self.outlets.as_ref()?;
        let outlets =
            outlets.lock().unwrap_or_else(PoisonError::into_inner).values().copied().collect();
        Some(RunTimes { outlets, finished_ns: clock.now_ns() })
    }

    fn note(&self, stream: u32, change: impl FnOnce(&mut StreamTimes, u64)) {
        let Some((clock, outlets)) = &self.outlets else { return };
        let mut outlets = outlets.lock().unwrap_or_else(PoisonError::into_inner);
        change(
            outlets.entry(stream).or_insert(StreamTimes { stream, ..StreamTimes::default() }),
            clock.now_ns(),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_looks_at_a_clock_unasked() {
        assert!(Clock::start(false, monotonic_ns()).is_none());
        let traffic = Traffic::new(None);
        traffic.sent(1, 5);
        assert_eq!((traffic.totals(), traffic.times()), ((0, 5), None));
    }

    #[test]
    fn an_outlet_has_one_first_byte() {
        let clock = Clock::start(true, monotonic_ns()).unwrap();
        let traffic = Traffic::new(Some(clock));
        traffic.sent(7, 1);
        let first = traffic.times().unwrap().outlets[0].first_byte_ns;
        traffic.sent(7, 1);
        traffic.ended(7);
        let times = traffic.times().unwrap();
        assert_eq!((times.outlets[0].stream, times.outlets[0].first_byte_ns), (7, first));
        assert!(
            first > 0
                && first <= times.outlets[0].ended_ns
                && times.outlets[0].ended_ns <= times.finished_ns
        );
    }

    #[test]
    fn what_happened_at_once_is_not_what_never_happened() {
        let clock = Clock { arrived_ns: 10 };
        assert_eq!([clock.since(5), clock.since(10), clock.since(25)], [1, 1, 15]);
    }
}
