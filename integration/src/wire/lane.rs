//! One direction of a link: the arrival time of each packet, and the loss of packets. The caller
//! passes the time, so that tests need no clock.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::{Profile, tun::HEADER_BYTES};

/// Capacity of a router's buffer: the usual 50 ms of its rate...
const BUFFER: Duration = Duration::from_millis(50);
/// ...and no less than this, or one burst of a fast sender would not fit.
const LEAST_BUFFER_BYTES: u64 = 256 << 10;
/// Ethernet's header, checksum, preamble and gap, and the headers of IP and TCP with timestamps:
/// the overhead of each segment.
const FRAME_BYTES: u64 = 38;
const SEGMENT_BYTES: u64 = 52;

/// Packets on their way.
pub struct Lane {
    delay: Duration,
    bytes_per_second: u64,
    buffer: Duration,
    /// Time at which the sender's interface is idle again.
    free_at: Option<Instant>,
    under_way: VecDeque<(Instant, Vec<u8>)>,
}

impl Lane {
    pub fn new(profile: Profile) -> Lane {
        let bytes_per_second = u64::from(profile.megabits) * 1_000_000 / 8;
        let least = Duration::from_secs_f64(LEAST_BUFFER_BYTES as f64 / bytes_per_second as f64);
        Lane {
            delay: profile.round_trip / 2,
            bytes_per_second,
            buffer: BUFFER.max(least),
            free_at: None,
            under_way: VecDeque::new(),
        }
    }

    /// Sends a packet; it is lost if the buffer is full.
    pub fn push(&mut self, now: Instant, packet: Vec<u8>) {
        if packet.len() < HEADER_BYTES {
            return;
        }
        let start = self.free_at.map_or(now, |free| free.max(now));
        if start - now > self.buffer {
            return;
        }
        let sent = start
            + Duration::from_secs_f64(bytes_on_wire(&packet) as f64 / self.bytes_per_second as f64);
        self.free_at = Some(sent);
        self.under_way.push_back((sent + self.delay, packet));
    }

    /// Arrival time of the next packet.
    pub fn next_due(&self) -> Option<Instant> {
        self.under_way.front().map(|(due, _)| *due)
    }

    /// A packet that has arrived by `now`.
    pub fn pop(&mut self, now: Instant) -> Option<Vec<u8>> {
        if self.next_due()? > now {
            return None;
        }
        self.under_way.pop_front().map(|(_, packet)| packet)
    }
}

/// Bytes of a packet's frames: `gso_size` of its header is the segment size.
fn bytes_on_wire(packet: &[u8]) -> u64 {
    let payload = (packet.len() - HEADER_BYTES) as u64;
    let segment = u64::from(u16::from_ne_bytes([packet[4], packet[5]]));
    let segments = if segment == 0 {
        1
    } else {
        payload.saturating_sub(SEGMENT_BYTES).div_ceil(segment).max(1)
    };
    payload + (segments - 1) * SEGMENT_BYTES + segments * FRAME_BYTES
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packet(bytes: usize) -> Vec<u8> {
        vec![0; HEADER_BYTES + bytes]
    }

    #[test]
    fn packets_arrive_after_the_delay_and_at_the_rate() {
        // 1 byte takes 1 µs.
        let profile = Profile { round_trip: Duration::from_millis(20), megabits: 8 };
        let mut lane = Lane::new(profile);
        let start = Instant::now();
        let frame = 1_000 - usize::try_from(FRAME_BYTES).unwrap();
        lane.push(start, packet(frame));
        lane.push(start, packet(frame));
        assert_eq!(lane.next_due(), Some(start + Duration::from_millis(11)));
        assert!(lane.pop(start + Duration::from_millis(10)).is_none());
        assert!(lane.pop(start + Duration::from_millis(11)).is_some());
        assert_eq!(lane.next_due(), Some(start + Duration::from_millis(12)));
        assert!(lane.pop(start + Duration::from_millis(12)).is_some());
        // After a pause nothing is owed.
        let later = start + Duration::from_secs(1);
        lane.push(later, packet(frame));
        assert_eq!(lane.next_due(), Some(later + Duration::from_millis(11)));
    }

    #[test]
    fn a_full_buffer_drops() {
        let profile = Profile { round_trip: Duration::ZERO, megabits: 80 };
        let mut lane = Lane::new(profile);
        let start = Instant::now();
        let sent = 100;
        for _ in 0..sent {
            lane.push(start, packet(10_000));
        }
        // 50 ms at 10 MB/s hold 500 kB.
        assert!((50..=52).contains(&lane.under_way.len()), "{}", lane.under_way.len());
    }

    #[test]
    fn large_packets_are_counted_as_they_will_be_cut() {
        let mut large = packet(52 + 1_400 * 10);
        large[4..6].copy_from_slice(&1_400u16.to_ne_bytes());
        assert_eq!(bytes_on_wire(&large), 52 + 14_000 + 9 * SEGMENT_BYTES + 10 * FRAME_BYTES);
    }
}
