//! Pacing of busy outlets. Most programs write 4 KiB at a time, and a reader that wakes up for each
//! piece spends far more on that than on the bytes. Once a stream has shown that it flows, its
//! reader lets bytes gather in the pipe.
//!
//! A stream that is slower than [`BUSY_GAP`] per read is never held up.

use std::{
    io::{self, ErrorKind},
    os::fd::AsFd as _,
    time::{Duration, Instant},
};

use nix::sys::{
    time::TimeSpec,
    timer::{Expiration, TimerSetTimeFlags},
    timerfd::{ClockId, TimerFd, TimerFlags},
};
use tokio::net::unix::pipe;

/// Smaller reads are small: pieces as a program writes them.
const SMALL_BYTES: usize = 64 << 10;

/// Small reads that follow one another faster than this belong to a busy stream.
const BUSY_GAP: Duration = Duration::from_micros(200);

/// Number of such reads before the stream counts as busy, so that a burst of a few lines is not
/// delayed.
const BUSY_READS: u32 = 16;

/// Time for which bytes gather. At 4 GB/s that fills the pipe; the runtime's own timers, which
/// count milliseconds, would stop a writer at 1 GB/s.
const PAUSE: TimeSpec = TimeSpec::new(0, 250_000);

/// History of an outlet's reads.
pub struct Pace {
    busy_reads: u32,
    last_read: Instant,
    timer: Option<Timer>,
}

impl Pace {
    pub fn new() -> Self {
        Self { busy_reads: 0, last_read: Instant::now(), timer: None }
    }

    /// Call it after each read, with its size and whether it emptied the pipe; pauses when more is
    /// about to come.
    pub async fn after_read(&mut self, bytes: usize, is_emptied: bool) {
        let is_busy = self.note(bytes, self.last_read.elapsed());
        if is_emptied && is_busy {
            self.pause().await;
        }
        self.last_read = Instant::now();
    }

    /// Notes a read that came `gap` after the last one or its pause; returns true if the stream is
    /// busy.
    fn note(&mut self, bytes: usize, gap: Duration) -> bool {
        if gap > BUSY_GAP {
            self.busy_reads = 0;
        } else if bytes < SMALL_BYTES {
            self.busy_reads = self.busy_reads.saturating_add(1);
        }
        self.busy_reads >= BUSY_READS
    }

    async fn pause(&mut self) {
        if self.timer.is_none() {
            self.timer = Timer::new().ok();
        }
        // Without a timer there is only no pause.
        if let Some(timer) = &self.timer {
            let _ = timer.wait(PAUSE).await;
        }
    }
}

/// A kernel timer, which is finer than the runtime's.
struct Timer {
    timer: TimerFd,
    /// A duplicate for the runtime, which can wait for any readable descriptor.
    expired: pipe::Receiver,
}

impl Timer {
    fn new() -> io::Result<Self> {
        let flags = TimerFlags::TFD_CLOEXEC | TimerFlags::TFD_NONBLOCK;
        let timer = TimerFd::new(ClockId::CLOCK_MONOTONIC, flags)?;
        let expired = pipe::Receiver::from_owned_fd_unchecked(timer.as_fd().try_clone_to_owned()?)?;
        Ok(Self { timer, expired })
    }

    async fn wait(&self, time: TimeSpec) -> io::Result<()> {
        self.timer.set(Expiration::OneShot(time), TimerSetTimeFlags::empty())?;
        loop {
            self.expired.readable().await?;
            match self.expired.try_read(&mut [0; 8]) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                other => return other.map(drop),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_many_small_reads_in_a_row_are_busy() {
        let check = |reads: &[(usize, u64)], expected: bool| {
            let mut pace = Pace::new();
            let mut is_busy = false;
            for (bytes, gap_us) in reads {
                is_busy = pace.note(*bytes, Duration::from_micros(*gap_us));
            }
            assert_eq!(is_busy, expected, "{reads:?}");
        };
        let busy = vec![(4096, 10); BUSY_READS as usize];
        check(&busy, true);
        check(&busy[1..], false);
        check(&vec![(4096, 300); 1000], false);
        check(&vec![(128 << 10, 10); 1000], false);
        // A read after a pause is large, but the stream is still busy.
        check(&[&busy[..], &[(200 << 10, 5)]].concat(), true);
        check(&[&busy[..], &[(4096, 1000)]].concat(), false);
    }

    #[tokio::test]
    async fn a_pause_ends_again_and_again() {
        let mut pace = Pace::new();
        for _ in 0..3 {
            let began = Instant::now();
            pace.pause().await;
            assert!(pace.timer.is_some() && began.elapsed() >= Duration::from(PAUSE));
        }
    }
}
