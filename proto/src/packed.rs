//! Specifications of runs that fit into the first packets of a connection: a command's words are often the names of hundreds of files
//! of one directory, each also among its paths. TCP begins with some 14 KiB (RFC 6928), and paces even these where its congestion
//! control is BBR: 24 KiB of 400 names took half a round trip more than a short command. Deflated (RFC 1951) it is a tenth.

use std::io::{Read as _, Write as _};

use flate2::{Compression, read::DeflateDecoder, write::DeflateEncoder};
use prost::Message as _;

use crate::executor::{RunSpec, run_input::Kind};

/// What is smaller goes out as it is: it fits anyway.
const SMALLEST: usize = 4 << 10;

/// What is larger goes out as it is: packing would take longer than it saves. Nor is more unpacked, whatever a peer sends.
const LARGEST: usize = 256 << 10;

/// The first message of a run.
#[must_use]
pub fn pack(spec: RunSpec) -> Kind {
    let length = spec.encoded_len();
    if !(SMALLEST..=LARGEST).contains(&length) {
        return Kind::Spec(spec);
    }
    let mut encoder = DeflateEncoder::new(Vec::with_capacity(SMALLEST), Compression::fast());
    match encoder.write_all(&spec.encode_to_vec()).and_then(|()| encoder.finish()) {
        Ok(packed) if packed.len() < length => Kind::Packed(packed.into()),
        _ => Kind::Spec(spec),
    }
}

/// What was packed; `None` where it is nothing of the kind.
#[must_use]
pub fn unpack(packed: &[u8]) -> Option<RunSpec> {
    let mut encoded = Vec::new();
    let limit = LARGEST as u64;
    DeflateDecoder::new(packed).take(limit + 1).read_to_end(&mut encoded).ok()?;
    (encoded.len() <= LARGEST).then(|| RunSpec::decode(&*encoded).ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::executor::Stage;

    fn spec(files: usize) -> RunSpec {
        let argv = (0..files).map(|file| format!("/mnt/s1/logs/worker-{file:05}.log").into()).collect();
        RunSpec { run_id: "r".into(), stages: vec![Stage { argv, ..Stage::default() }], ..RunSpec::default() }
    }

    #[test]
    fn names_of_one_directory_take_a_tenth() {
        let Kind::Packed(packed) = pack(spec(400)) else { panic!("not packed") };
        assert!(packed.len() * 8 < spec(400).encoded_len(), "{} bytes", packed.len());
        assert_eq!(unpack(&packed), Some(spec(400)));
    }

    #[test]
    fn what_is_small_or_very_large_goes_as_it_is() {
        assert_eq!(pack(spec(10)), Kind::Spec(spec(10)));
        assert_eq!(pack(spec(100_000)), Kind::Spec(spec(100_000)));
    }

    #[test]
    fn nothing_grows_beyond_what_may_be_packed() {
        let mut encoder = DeflateEncoder::new(Vec::new(), Compression::best());
        for _ in 0..64 {
            encoder.write_all(&[0; 1 << 20]).unwrap();
        }
        assert_eq!(unpack(&encoder.finish().unwrap()), None);
        assert_eq!(unpack(b"no such thing"), None);
    }
}
