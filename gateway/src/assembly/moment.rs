//! Waits shorter than the resolution of Tokio's timers, one millisecond.

use std::{io, time::Duration};

use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};
use tokio::net::unix::pipe::Receiver;

/// A kernel timer (timerfd_create(2)), wrapped as a pipe receiver: Tokio's documented way to poll
/// any descriptor without `unsafe`.
pub struct Moment(Receiver);

impl Moment {
    /// Must be called within the runtime.
    ///
    /// # Errors
    /// No descriptors left.
    pub fn new() -> io::Result<Self> {
        let timer = timerfd_create(
            TimerfdClockId::Monotonic,
            TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC,
        )?;
        Ok(Self(Receiver::from_owned_fd_unchecked(timer)?))
    }

    /// Waits for `duration`, or not at all if the timer can't be set.
    pub async fn pass(&self, duration: Duration) {
        // Setting a timer to zero disarms it.
        let it_value = Timespec::try_from(duration.max(Duration::from_nanos(1)));
        let Ok(it_value) = it_value else { return };
        let once = Itimerspec { it_interval: Timespec::default(), it_value };
        if timerfd_settime(&self.0, TimerfdTimerFlags::empty(), &once).is_err() {
            return;
        }
        while self.0.readable().await.is_ok() {
            // The expiry may belong to an earlier wait that was dropped.
            match self.0.try_read(&mut [0; 8]) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                _ => return,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[tokio::test]
    async fn a_moment_is_no_shorter_than_it_should_be() {
        let moment = Moment::new().unwrap();
        for micros in [1, 300, 700] {
            // One that is given up leaves nothing to the next.
            let given_up =
                tokio::time::timeout(Duration::ZERO, moment.pass(Duration::from_micros(1)));
            let _ = given_up.await;
            let began = Instant::now();
            moment.pass(Duration::from_micros(micros)).await;
            assert!(began.elapsed() >= Duration::from_micros(micros), "{micros}");
        }
    }
}
