//! Digest of delivered bytes, by which a repeated run of a lost command recognizes them. It does
//! not depend on how the bytes were divided into chunks. Gateway and stage program must compute the
//! same. It detects faults, not forgery.

/// Odd, with bits well spread: the golden ratio in 64 bits.
const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;
const WORD_BYTES: usize = 8;

/// A running digest.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Digest {
    state: u64,
    bytes: u64,
    /// Bytes that do not fill a word yet.
    rest: [u8; WORD_BYTES],
}

impl Digest {
    /// Takes the next bytes.
    pub fn add(&mut self, mut data: &[u8]) {
        let held = (self.bytes % WORD_BYTES as u64) as usize;
        self.bytes += data.len() as u64;
        if held > 0 {
            let taken = data.len().min(WORD_BYTES - held);
            self.rest[held..held + taken].copy_from_slice(&data[..taken]);
            data = &data[taken..];
            if held + taken < WORD_BYTES {
                return;
            }
            self.mix(u64::from_le_bytes(self.rest));
        }
        let (words, rest) = data.as_chunks::<WORD_BYTES>();
        words.iter().for_each(|word| self.mix(u64::from_le_bytes(*word)));
        self.rest[..rest.len()].copy_from_slice(rest);
    }

    /// Number of bytes so far.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Digest of all bytes so far.
    #[must_use]
    pub fn value(&self) -> u64 {
        let held = (self.bytes % WORD_BYTES as u64) as usize;
        let mut word = [0; WORD_BYTES];
        word[..held].copy_from_slice(&self.rest[..held]);
        let mut end = self.clone();
        end.mix(u64::from_le_bytes(word));
        end.mix(self.bytes);
        end.state
    }

    fn mix(&mut self, word: u64) {
        let state = (self.state ^ word).wrapping_mul(FACTOR);
        self.state = state ^ (state >> 29);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(pieces: &[&[u8]]) -> u64 {
        let mut digest = Digest::default();
        pieces.iter().for_each(|piece| digest.add(piece));
        assert_eq!(digest.bytes(), pieces.iter().map(|p| p.len() as u64).sum::<u64>());
        digest.value()
    }

    #[test]
    fn it_does_not_matter_how_bytes_are_cut() {
        let text: Vec<u8> = (0..100_u8).collect();
        let whole = of(&[&text]);
        for at in 0..text.len() {
            let (a, b) = text.split_at(at);
            assert_eq!(of(&[a, b]), whole, "{at}");
            assert_eq!(of(&[&a[..at / 2], &a[at / 2..], b]), whole, "{at}");
        }
    }

    #[test]
    fn every_byte_counts() {
        let text = [7; 33];
        for at in 0..text.len() {
            let mut other = text;
            other[at] ^= 1;
            assert_ne!(of(&[&other]), of(&[&text]), "{at}");
        }
        assert_ne!(of(&[&[0; 8]]), of(&[&[0; 9]]));
        assert_ne!(of(&[&text]), of(&[&text[..32]]));
    }
}
