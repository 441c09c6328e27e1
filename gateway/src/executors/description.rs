//! An executor's description of itself. Its clock, time zone, locales and catalogs of messages may
//! change while a connection lasts, which may be for weeks, so it is asked again.
//!
//! Invariant: a command that goes by the time is placed by an answer that is younger than a
//! minute, and no clock of this machine was set since. Other commands are placed by one that is
//! younger than a minute and a round trip, unless no command was for the last minute.

use std::time::{Duration, Instant};

use posh_proto::{
    PROTOCOL_VERSION, clock,
    executor::{DescribeReply, DescribeRequest},
};
use posh_reach::Server;

use crate::locales::{self, RemoteLocales};

/// Difference of an executor's clock that commands which go by the time do not notice: machines
/// that keep their clocks (NTP) differ by milliseconds.
const CLOCK_TOLERANCE_MS: u64 = 1000;
/// Age from which an answer is asked for again.
const REFRESH_AFTER: Duration = Duration::from_secs(60);
/// Change of this machine's clock against its monotonic one by which it was set, or slept: a clock
/// that is slewed drifts by 0.5 ms in a second (adjtime(3)).
const CLOCK_STEP_MS: u64 = 200;

/// An executor's description of itself, as of some time.
#[derive(Debug)]
pub struct Description {
    /// Its words.
    pub reply: DescribeReply,
    /// Its locales; `None` if it can't read them.
    pub locales: Option<RemoteLocales>,
    /// Its clock differs from this machine's by more than a second.
    pub has_other_time: bool,
    /// Time that the answer took.
    pub rtt: Duration,
    /// When it was asked for.
    asked: Instant,
    /// This machine's time less its monotonic time then.
    clock_offset_ms: u64,
}

impl Description {
    /// Asks for it.
    ///
    /// # Errors
    /// That of the call.
    pub async fn ask(client: &mut Server) -> Result<Self, tonic::Status> {
        let (asked, asked_ms) = (Instant::now(), clock::now_ms());
        let clock_offset_ms = clock_offset_ms();
        let reply = client.describe(DescribeRequest { protocol: PROTOCOL_VERSION }).await?;
        let rtt = asked.elapsed();
        let possible_ms =
            asked_ms.saturating_sub(CLOCK_TOLERANCE_MS)..=clock::now_ms() + CLOCK_TOLERANCE_MS;
        Ok(Self {
            has_other_time: !possible_ms.contains(&reply.now_ms),
            locales: locales::told(&reply),
            reply,
            rtt,
            asked,
            clock_offset_ms,
        })
    }

    /// Returns true if nothing that it says is likely to have changed.
    #[must_use]
    pub fn is_recent(&self) -> bool {
        self.asked.elapsed() < REFRESH_AFTER
            && clock_offset_ms().abs_diff(self.clock_offset_ms) < CLOCK_STEP_MS
    }
}

fn clock_offset_ms() -> u64 {
    clock::now_ms().wrapping_sub(clock::monotonic_ns() / 1_000_000)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn described(ago: Duration, clock_was_set_by_ms: u64) -> Description {
        Description {
            reply: DescribeReply::default(),
            locales: None,
            has_other_time: false,
            rtt: Duration::ZERO,
            asked: Instant::now().checked_sub(ago).unwrap(),
            clock_offset_ms: clock_offset_ms() - clock_was_set_by_ms,
        }
    }

    #[test]
    fn an_answer_counts_for_a_minute_and_until_the_clock_is_set() {
        assert!(described(Duration::from_secs(50), 0).is_recent());
        assert!(!described(Duration::from_secs(61), 0).is_recent());
        assert!(!described(Duration::ZERO, 1000).is_recent());
    }
}
