//! An emulated link with a delay and a rate between two hosts. It has a TUN device on each side,
//! and one thread for each direction, which forwards packets, delays each until it would have
//! arrived, drops packets that a router's buffer would drop, and counts. The kernel's own emulation
//! (netem) is not needed.
//!
//! `lane` decides about each packet; `tun` makes the devices.

pub mod check;
mod lane;
mod tun;

use std::fmt;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::time::TimeSpec;
use nix::unistd::{read, write};

use crate::error::{AttemptExt, Result};
use crate::host::Host;
use lane::Lane;

/// Largest packet of a TUN device: 64 KiB with segmentation left to the receiver
/// (linux/virtio_net.h), and its header.
const PACKET_BYTES: usize = (64 << 10) + tun::HEADER_BYTES;
/// Most that the wake-up of a waiting thread is late.
const TIMER_SLACK_NS: u64 = 1_000;

/// Delay and rate of a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Profile {
    /// Round-trip time.
    pub round_trip: Duration,
    /// Megabits per second, in each direction.
    pub megabits: u32,
}

impl Profile {
    /// A distant server: 20 ms, 600 Mbit/s.
    pub const WAN: Profile = Profile { round_trip: Duration::from_millis(20), megabits: 600 };
    /// A server in the same building: 0.5 ms, 5 Gbit/s.
    pub const LAN: Profile = Profile { round_trip: Duration::from_micros(500), megabits: 5_000 };
    /// A server behind a radio link: 5 ms, 100 Mbit/s.
    pub const WIFI: Profile = Profile { round_trip: Duration::from_millis(5), megabits: 100 };
}

/// Error: the text names no link.
#[derive(Debug, thiserror::Error)]
#[error("{0:?} is no link: give wan, lan, wifi or MILLISECONDS:MEGABITS, such as 20:600")]
pub struct UnknownLink(String);

impl std::str::FromStr for Profile {
    type Err = UnknownLink;

    /// `wan`, `lan`, `wifi`, or `MILLISECONDS:MEGABITS` such as `20:600`.
    fn from_str(text: &str) -> std::result::Result<Profile, UnknownLink> {
        match text {
            "wan" => return Ok(Profile::WAN),
            "lan" => return Ok(Profile::LAN),
            "wifi" => return Ok(Profile::WIFI),
            _ => {}
        }
        let strange = || UnknownLink(text.to_owned());
        let (milliseconds, megabits) = text.split_once(':').ok_or_else(strange)?;
        let milliseconds: f64 = milliseconds.parse().map_err(|_| strange())?;
        let megabits: u32 = megabits.parse().map_err(|_| strange())?;
        if !(0.0..=10_000.0).contains(&milliseconds) || megabits == 0 {
            return Err(strange());
        }
        Ok(Profile { round_trip: Duration::from_secs_f64(milliseconds / 1e3), megabits })
    }
}

impl fmt::Display for Profile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ms, {} Mbit/s", self.round_trip.as_secs_f64() * 1e3, self.megabits)
    }
}

/// One end of a link: the host, and its interface's name.
pub type LinkEnd<'a> = (&'a Host, &'a str);

/// A working link; it is cut when dropped.
#[derive(Debug)]
pub struct Wire {
    stop: Arc<EventFd>,
    carriers: Vec<JoinHandle<()>>,
    carried: [Arc<AtomicU64>; 2],
}

impl Wire {
    /// Joins two hosts. Their interfaces exist on return, without addresses.
    pub fn lay(near: LinkEnd<'_>, far: LinkEnd<'_>, profile: Profile) -> Result<Wire> {
        let ends = [open(near)?, open(far)?];
        let stop =
            EventFd::from_flags(EfdFlags::EFD_CLOEXEC).attempt(|| "make an eventfd".into())?;
        let mut wire =
            Wire { stop: Arc::new(stop), carriers: Vec::new(), carried: Default::default() };
        for (direction, name) in ["out", "back"].into_iter().enumerate() {
            let copy = |end: &OwnedFd| end.try_clone().attempt(|| "copy a descriptor".into());
            let carrier = Carrier {
                from: copy(&ends[direction])?,
                to: copy(&ends[1 - direction])?,
                lane: Lane::new(profile),
                stop: wire.stop.clone(),
                carried: wire.carried[direction].clone(),
            };
            let thread = std::thread::Builder::new()
                .name(format!("wire {name}"))
                .spawn(move || carrier.run());
            wire.carriers.push(thread.attempt(|| "start the thread of a wire".into())?);
        }
        Ok(wire)
    }

    /// Bytes carried from the near to the far end, and back.
    pub fn carried(&self) -> (u64, u64) {
        (self.carried[0].load(Ordering::Relaxed), self.carried[1].load(Ordering::Relaxed))
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        // Never read, so it stays readable for both threads.
        let _ = self.stop.write(1);
        for carrier in self.carriers.drain(..) {
            let _ = carrier.join();
        }
    }
}

fn open((host, name): LinkEnd<'_>) -> Result<OwnedFd> {
    let device = name.to_owned();
    host.run(move || tun::open(&device))
        .attempt(|| format!("make the TUN device {name} on {}", host.name()))
}

/// Carries one direction.
struct Carrier {
    from: OwnedFd,
    to: OwnedFd,
    lane: Lane,
    stop: Arc<EventFd>,
    carried: Arc<AtomicU64>,
}

impl Carrier {
    fn run(mut self) {
        let _ = nix::sys::prctl::set_timerslack(TIMER_SLACK_NS);
        let mut packet = vec![0; PACKET_BYTES];
        while self.wait() {
            self.take_all(&mut packet);
            self.deliver();
        }
    }

    /// Waits for a packet, or the time of one; false when the link is cut.
    fn wait(&self) -> bool {
        let mut fds = [
            PollFd::new(self.stop.as_fd(), PollFlags::POLLIN),
            PollFd::new(self.from.as_fd(), PollFlags::POLLIN),
        ];
        let left = self
            .lane
            .next_due()
            .map(|due| TimeSpec::from_duration(due.saturating_duration_since(Instant::now())));
        match ppoll(&mut fds, left, None) {
            Ok(_) | Err(Errno::EINTR) => fds[0].revents().is_none_or(|e| e.is_empty()),
            Err(_) => false,
        }
    }

    fn take_all(&mut self, packet: &mut [u8]) {
        // The device's host may be gone: then no packets come.
        while let Ok(count) = read(&self.from, packet) {
            self.lane.push(Instant::now(), packet[..count].to_vec());
        }
    }

    fn deliver(&mut self) {
        while let Some(packet) = self.lane.pop(Instant::now()) {
            let bytes = packet.len() - tun::HEADER_BYTES;
            self.carried.fetch_add(bytes as u64, Ordering::Relaxed);
            // A receiver without room drops the packet, as an interface does.
            let _ = write(&self.to, &packet);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn profiles_are_named_or_given() {
        let check = |text: &str, expected: Option<Profile>| {
            assert_eq!(text.parse::<Profile>().ok(), expected, "{text}")
        };
        check("wan", Some(Profile::WAN));
        check("0.5:5000", Some(Profile::LAN));
        check("20", None);
        check("-1:10", None);
        check("1:0", None);
        check("x:y", None);
    }
}
