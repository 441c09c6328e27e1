//! Waits that ended by a backstop. Every wait of a stage for its directive should end by an event,
//! or by evidence that no event is near (`assembly::waits`); a reached backstop is a fault of posh.
//! It is counted, logged and shown by `posh status`, and makes a laboratory fail.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use posh_proto::BACKSTOP;

use crate::enlisted::Enlisted;

/// A backstop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Backstop {
    /// A pipeline's assembly as a whole.
    Assembly,
    /// A started stage program that did not enlist.
    Enlistment,
    /// A stage that did not acknowledge its directive.
    Acknowledgement,
}

impl Backstop {
    /// All backstops.
    pub const ALL: [Self; 3] = [Self::Assembly, Self::Enlistment, Self::Acknowledgement];

    /// Name in `posh status`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Assembly => "assembly",
            Self::Enlistment => "enlistment",
            Self::Acknowledgement => "acknowledgement",
        }
    }
}

/// Counts since the gateway's start.
#[derive(Debug, Default)]
pub struct Backstops {
    counts: [AtomicU64; Backstop::ALL.len()],
    longest_us: AtomicU64,
}

impl Backstops {
    /// Counts and logs a reached backstop.
    pub fn reached(&self, backstop: Backstop, stage: &Enlisted) {
        self.counts[backstop as usize].fetch_add(1, Ordering::Relaxed);
        tracing::error!(limit = backstop.name(), command = stage.name, pid = stage.pid, BACKSTOP);
    }

    /// Notes a stage's wait for its pipeline, without the time in which the awaited process had no
    /// processor.
    pub fn waited(&self, time: Duration) {
        self.longest_us
            .fetch_max(u64::try_from(time.as_micros()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// Longest such wait.
    pub fn longest(&self) -> Duration {
        Duration::from_micros(self.longest_us.load(Ordering::Relaxed))
    }

    /// Names and counts.
    pub fn counts(&self) -> impl Iterator<Item = (&'static str, u64)> {
        Backstop::ALL
            .into_iter()
            .map(|one| (one.name(), self.counts[one as usize].load(Ordering::Relaxed)))
    }
}
