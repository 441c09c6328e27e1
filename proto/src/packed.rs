//! Compressed run specifications, which fit into the first packets of a connection. A command's
//! words are often the names of hundreds of files of one directory, each repeated among its paths.
//! TCP begins with some 14 KiB (RFC 6928), and BBR paces even these: 24 KiB of 400 names took half
//! a round trip more than a short command. Deflated (RFC 1951) it is a tenth.

use std::io::{Read as _, Write as _};

use flate2::{Compression, read::DeflateDecoder, write::DeflateEncoder};
use prost::{Message as _, Name as _};

use crate::{
    codec::{INFLATED_BYTES, SPECIFICATION_BYTES, check},
    executor::{RunSpec, run_input::Kind},
};

/// Smaller specifications are sent uncompressed: they fit anyway.
const SMALLEST: usize = 4 << 10;

/// The specification has more bytes than an executor accepts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("its words and paths have {} KiB, more than one run may have", .0 >> 10)]
pub struct TooLarge(pub usize);

/// The first message of a run.
///
/// # Errors
/// [`TooLarge`] if an executor would refuse it.
pub fn pack(spec: RunSpec) -> Result<Kind, TooLarge> {
    let length = spec.encoded_len();
    if length < SMALLEST {
        return Ok(Kind::Spec(spec));
    }
    if length > INFLATED_BYTES {
        return Err(TooLarge(length));
    }
    let mut encoder = DeflateEncoder::new(Vec::with_capacity(SMALLEST), Compression::fast());
    match encoder.write_all(&spec.encode_to_vec()).and_then(|()| encoder.finish()) {
        Ok(packed) if packed.len() < length && packed.len() <= SPECIFICATION_BYTES => {
            Ok(Kind::Packed(packed.into()))
        }
        _ if length <= SPECIFICATION_BYTES => Ok(Kind::Spec(spec)),
        _ => Err(TooLarge(length)),
    }
}

/// Decodes a packed specification; `None` if it is malformed or exceeds a limit.
#[must_use]
pub fn unpack(packed: &[u8]) -> Option<RunSpec> {
    RunSpec::decode(&*inflate(packed)?).ok()
}

/// Like [`unpack`], but checked only, not decoded.
#[must_use]
pub fn inflate(packed: &[u8]) -> Option<Vec<u8>> {
    let mut encoded = Vec::new();
    let limit = INFLATED_BYTES as u64;
    DeflateDecoder::new(packed).take(limit + 1).read_to_end(&mut encoded).ok()?;
    check(&RunSpec::full_name(), &encoded).ok()?;
    Some(encoded)
}

/// Size of the specification once inflated. Stops one byte beyond the limit.
#[must_use]
pub fn inflated_bytes(packed: &[u8]) -> usize {
    let mut inflating = DeflateDecoder::new(packed).take(INFLATED_BYTES as u64 + 1);
    // Malformed input is refused when it is inflated.
    let _ = std::io::copy(&mut inflating, &mut std::io::sink());
    INFLATED_BYTES + 1 - usize::try_from(inflating.limit()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::executor::Stage;

    fn spec(files: usize) -> RunSpec {
        let argv =
            (0..files).map(|file| format!("/mnt/s1/logs/worker-{file:05}.log").into()).collect();
        RunSpec {
            run_id: "r".into(),
            stages: vec![Stage { argv, ..Stage::default() }],
            ..RunSpec::default()
        }
    }

    #[test]
    fn names_of_one_directory_take_a_tenth() {
        let Ok(Kind::Packed(packed)) = pack(spec(400)) else { panic!("not packed") };
        assert!(packed.len() * 8 < spec(400).encoded_len(), "{} bytes", packed.len());
        assert_eq!(unpack(&packed), Some(spec(400)));
    }

    #[test]
    fn its_size_is_known_without_it() {
        let Ok(Kind::Packed(packed)) = pack(spec(400)) else { panic!("not packed") };
        assert_eq!(inflated_bytes(&packed), spec(400).encoded_len());
        assert_eq!(inflated_bytes(b"nothing of the kind"), 0);
    }

    #[test]
    fn what_is_small_goes_as_it_is_and_what_is_very_large_not_at_all() {
        assert_eq!(pack(spec(10)), Ok(Kind::Spec(spec(10))));
        assert!(matches!(pack(spec(200_000)), Err(TooLarge(_))));
        // Names that nothing deflates.
        let noise = (0..40_000_u64)
            .map(|n| (n.wrapping_mul(0x9E37_79B9_7F4A_7C15)).to_le_bytes().to_vec().into());
        let stage = Stage { argv: noise.collect(), ..Stage::default() };
        assert!(matches!(
            pack(RunSpec { stages: vec![stage], ..RunSpec::default() }),
            Err(TooLarge(_))
        ));
    }

    #[test]
    fn ten_thousand_names_of_one_directory_fit() {
        let Ok(Kind::Packed(packed)) = pack(spec(10_000)) else { panic!("not packed") };
        assert!(packed.len() <= SPECIFICATION_BYTES);
        assert_eq!(unpack(&packed), Some(spec(10_000)));
    }

    #[test]
    fn what_is_inflated_is_looked_at_before_it_is_decoded() {
        let mut encoder = DeflateEncoder::new(Vec::new(), Compression::best());
        encoder.write_all(&[3 << 3 | 2, 0].repeat(1 << 20)).unwrap();
        assert_eq!(unpack(&encoder.finish().unwrap()), None);
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
