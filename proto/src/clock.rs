//! The clock of traces. `CLOCK_MONOTONIC` counts from the machine's start for every process, so
//! that times of several programs on one machine can be compared. The gateway aligns the clocks of
//! different machines.

use nix::time::{ClockId, clock_gettime};

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
