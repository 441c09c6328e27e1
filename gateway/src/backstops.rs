//! Waits that ended by their last limit. Every wait of a stage for its directive ends by an event,
//! or by evidence that no event is near (`assembly::waits`); a limit that is reached all the same
//! is a fault of posh. It is counted, logged and shown by `posh status`, and a laboratory fails
//! where one was reached.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use posh_proto::BACKSTOP;

use crate::enlisted::Enlisted;

/// Which limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Backstop {
    /// Of a pipeline's assembly as a whole.
    Assembly,
    /// A stage program was started and did not enlist.
    Enlistment,
    /// A stage did not acknowledge its directive.
    Acknowledgement,
}

impl Backstop {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Assembly, Self::Enlistment, Self::Acknowledgement];

    /// As `posh status` calls it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Assembly => "assembly",
            Self::Enlistment => "enlistment",
            Self::Acknowledgement => "acknowledgement",
        }
    }
}

/// How often each was reached since the gateway's start.
#[derive(Debug, Default)]
pub struct Backstops {
    counts: [AtomicU64; Backstop::ALL.len()],
    longest_us: AtomicU64,
}

impl Backstops {
    /// A stage has waited in vain.
    pub fn reached(&self, backstop: Backstop, stage: &Enlisted) {
        self.counts[backstop as usize].fetch_add(1, Ordering::Relaxed);
        tracing::error!(limit = backstop.name(), command = stage.name, pid = stage.pid, BACKSTOP);
    }

    /// A stage has waited for its pipeline, without the time in which whom it waited for had no
    /// processor.
    pub fn waited(&self, time: Duration) {
        self.longest_us
            .fetch_max(u64::try_from(time.as_micros()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// The longest of these times.
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
