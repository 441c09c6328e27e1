//! Numbers that a seed decides.

use std::time::Duration;

/// SplitMix64: the same seed gives the same numbers on every machine.
pub struct Chance(u64);

impl Chance {
    /// A stream of its own for each `purpose` of one seed.
    pub fn new(seed: u64, purpose: u64) -> Self {
        let mut chance = Self(
            seed.wrapping_mul(0x2545_f491_4f6c_dd1d) ^ purpose.wrapping_mul(0x9e37_79b9_7f4a_7c15),
        );
        chance.next();
        chance
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// From 0 up to, and without, `limit`.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit.max(1)
    }

    /// In `parts` of a thousand.
    pub fn happens(&mut self, parts: u64) -> bool {
        self.below(1000) < parts
    }

    pub fn pick<'a, T>(&mut self, of: &'a [T]) -> Option<&'a T> {
        of.get(usize::try_from(self.below(of.len() as u64)).unwrap_or_default())
    }

    pub fn between(&mut self, least: Duration, most: Duration) -> Duration {
        let span = u64::try_from((most - least).as_micros()).unwrap_or(u64::MAX);
        least + Duration::from_micros(self.below(span + 1))
    }
}
