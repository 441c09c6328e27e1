//! Commands that a script's text names, of which the gateway has said before they came that all of theirs is at hand: they
//! need not be asked about one by one. Only a hint: what stays here runs as it was given, at worst more slowly.

/// For so long it counts: what is at hand may be changed on its server.
pub const HOLDS_NS: u64 = 1_000_000_000;

/// What a command is known by: 64 bits of FNV-1a. One that has another's digest stays here as well.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Digest(u64);

impl Digest {
    /// Without the words: where it runs, and which of descriptors 0 to 2 may be files on mounts with owners (bit N).
    #[must_use]
    pub fn new(cwd: &[u8], streams: u8) -> Self {
        const BASIS: u64 = 0xcbf2_9ce4_8422_2325;
        let mut digest = Self(BASIS);
        digest.add(&[streams]);
        digest.word(cwd);
        digest
    }

    /// The next one of argv.
    pub fn word(&mut self, word: &[u8]) {
        self.add(word);
        self.add(&[0]);
    }

    fn add(&mut self, bytes: &[u8]) {
        const PRIME: u64 = 0x0000_0100_0000_01b3;
        self.0 = bytes.iter().fold(self.0, |sum, byte| (sum ^ u64::from(*byte)).wrapping_mul(PRIME));
    }

    /// As it is in the session file, one behind the other.
    #[must_use]
    pub fn bytes(self) -> [u8; 8] {
        self.0.to_le_bytes()
    }

    /// Whether it is among them.
    #[must_use]
    pub fn is_in(self, all: &[u8]) -> bool {
        all.chunks_exact(8).any(|one| one == self.bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn digest(cwd: &[u8], streams: u8, words: &[&[u8]]) -> Digest {
        let mut digest = Digest::new(cwd, streams);
        words.iter().for_each(|word| digest.word(word));
        digest
    }

    #[test]
    fn each_command_has_its_own() {
        let all = [
            digest(b"/mnt", 0, &[b"cat", b"a"]),
            digest(b"/mnt", 2, &[b"cat", b"a"]),
            digest(b"/", 0, &[b"cat", b"a"]),
            digest(b"/mnt", 0, &[b"cat", b"a", b""]),
            digest(b"/mnt", 0, &[b"cata"]),
        ];
        let bytes: std::vec::Vec<u8> = all.iter().flat_map(|digest| digest.bytes()).collect();
        for (index, one) in all.iter().enumerate() {
            assert!(one.is_in(&bytes) && !one.is_in(&bytes[8 * (index + 1)..]) && !one.is_in(&bytes[..8 * index]));
        }
        assert!(!all[0].is_in(&[]) && !all[0].is_in(&bytes[..7]));
    }

    #[test]
    fn it_is_fnv_1a() {
        // The algorithm's own test vector of "a".
        let mut digest = Digest(0xcbf2_9ce4_8422_2325);
        digest.add(b"a");
        assert_eq!(digest.0, 0xaf63_dc4c_8601_ec8c);
    }
}
