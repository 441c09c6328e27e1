//! Arrival time of a specification at an executor, by this machine's clock. The two clocks are
//! independent and not synchronized: an executor counts from the arrival, and the arrival is
//! estimated as the middle of its possible range (as in NTP, RFC 5905 §8).

/// Within this time, the clocks of two machines drift apart by 100 µs at most (100 ppm). Later
/// times from an executor are shown, but don't narrow the estimate.
const DRIFTLESS_NS: u64 = 1_000_000_000;

/// Range in which a specification must have arrived.
#[derive(Debug, Clone, Copy)]
pub struct Arrival {
    earliest_ns: u64,
    latest_ns: u64,
}

impl Arrival {
    /// Starts with the time of sending.
    pub fn after(sent_ns: u64) -> Self {
        Self { earliest_ns: sent_ns, latest_ns: u64::MAX }
    }

    /// Narrows the range by an event `own_ns` after the arrival that was reported locally at
    /// `received_ns`.
    pub fn heard(&mut self, received_ns: u64, own_ns: u64) {
        if own_ns <= DRIFTLESS_NS {
            self.latest_ns =
                self.latest_ns.min(received_ns.saturating_sub(own_ns)).max(self.earliest_ns);
        }
    }

    /// Middle of the range. With nothing reported but the start of the commands, that is half of
    /// the round trip without the executor's own time, as if both ways took equally long.
    pub fn middle_ns(&self) -> u64 {
        if self.latest_ns == u64::MAX {
            return self.earliest_ns;
        }
        self.earliest_ns + (self.latest_ns - self.earliest_ns) / 2
    }

    /// Minimum time for both ways together.
    pub fn network_ns(&self) -> u64 {
        if self.latest_ns == u64::MAX { 0 } else { self.latest_ns - self.earliest_ns }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sent at 1000; (received, own) of what was heard; the middle.
    #[test]
    fn the_arrival_is_in_the_middle_of_what_is_possible() {
        let check = |heard: &[(u64, u64)], middle: u64| {
            let mut arrival = Arrival::after(1000);
            heard.iter().for_each(|&(received, own)| arrival.heard(received, own));
            assert_eq!(arrival.middle_ns(), middle, "{heard:?}");
            for &(received, own) in heard.iter().filter(|(received, own)| received - own >= 1000) {
                assert!(
                    arrival.middle_ns() + own <= received,
                    "{heard:?}: heard of before it happened"
                );
            }
        };
        // A round trip of 20 and 6 of its own: 10 there, 10 back.
        check(&[(1026, 6)], 1010);
        // The first answer was held up for 40; a later one shows that the way is short.
        check(&[(1066, 6), (1120, 100)], 1010);
        check(&[(1026, 6), (1190, 100)], 1010);
        // Nothing heard, or nonsense: not before it was sent.
        check(&[], 1000);
        check(&[(1026, 900)], 1000);
    }

    #[test]
    fn late_moments_say_nothing_of_the_arrival() {
        let mut arrival = Arrival::after(0);
        arrival.heard(20, 0);
        // An hour later their clock is 50 µs ahead.
        let hour = 3_600_000_000_000;
        arrival.heard(hour, hour + 50_000);
        assert_eq!((arrival.middle_ns(), arrival.network_ns()), (10, 20));
    }
}
