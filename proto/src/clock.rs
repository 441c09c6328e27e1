//! Clocks. That of traces is `CLOCK_MONOTONIC`, which counts from the machine's start for every
//! process, so that times of several programs on one machine can be compared. The gateway aligns
//! the clocks of different machines.

use std::time::SystemTime;

use nix::time::{ClockId, clock_gettime};

/// Milliseconds since 1970, by the clock that files and people go by.
#[must_use]
pub fn now_ms() -> u64 {
    SystemTime::UNIX_EPOCH
        .elapsed()
        .map_or(0, |since| u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
}

/// Nanoseconds since the machine was started. On most machines this is no system call (vdso(7)).
///
/// # Panics
/// Never: Linux has this clock, and it begins at 0 (clock_gettime(2)).
#[must_use]
pub fn monotonic_ns() -> u64 {
    const NS_PER_S: u64 = 1_000_000_000;
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC).expect("every Linux has this clock");
    now.tv_sec().unsigned_abs() * NS_PER_S + now.tv_nsec().unsigned_abs()
}
