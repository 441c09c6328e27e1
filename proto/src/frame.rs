//! Framing of the stage socket: a four-byte little-endian length, then one protobuf message. Has no
//! input or output, since the stage program reads blocking and the gateway asynchronously.

use bytes::{Buf, BufMut, Bytes, BytesMut};
use prost::Message;

/// Bytes of the length prefix.
pub const HEADER_BYTES: usize = 4;

/// The largest frame accepted; bounds the memory that a faulty peer can make us allocate.
pub const MAX_FRAME_BYTES: usize = 64 << 20;

/// A frame's memory is allocated in such pieces as it arrives, since the peer's length is not
/// trusted.
const PIECE_BYTES: usize = 256 << 10;

/// Reason why a frame could not be read.
#[derive(Debug)]
pub enum FrameError {
    /// The length prefix is above the limit.
    TooLong(usize),
    /// The bytes are no message of the expected type.
    Malformed(prost::DecodeError),
}

impl std::fmt::Display for FrameError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::TooLong(n) => write!(f, "frame of {n} bytes is above the limit"),
            Self::Malformed(e) => write!(f, "malformed frame: {e}"),
        }
    }
}

impl std::error::Error for FrameError {}

/// Appends `message` to `out` as one frame.
pub fn encode(message: &impl Message, out: &mut BytesMut) {
    let len = message.encoded_len();
    out.reserve(HEADER_BYTES + len);
    out.put_u32_le(u32::try_from(len).expect("messages are far below 4 GiB"));
    message.encode(out).expect("the buffer grows as needed");
}

/// Appends the beginning of the frame of a `ToStage` with `data` of `length`
/// bytes for `fd`. The bytes themselves come after it, uncopied.
pub fn encode_data_head(fd: u32, length: usize, out: &mut BytesMut) {
    use prost::encoding::{
        WireType, encode_key, encode_varint, encoded_len_varint, key_len, uint32,
    };
    /// Field numbers of stage.proto: `ToStage.data`, `Data.fd`, `Data.data`.
    const TO_STAGE_DATA: u32 = 3;
    const DATA_FD: u32 = 1;
    const DATA_DATA: u32 = 2;
    let length = length as u64;
    // A field of value 0 is left out (proto3).
    let fd_bytes = if fd == 0 { 0 } else { uint32::encoded_len(DATA_FD, &fd) };
    let body_head = fd_bytes + key_len(DATA_DATA) + encoded_len_varint(length);
    let body = body_head as u64 + length;
    let whole = (key_len(TO_STAGE_DATA) + encoded_len_varint(body)) as u64 + body;
    out.put_u32_le(u32::try_from(whole).expect("messages are far below 4 GiB"));
    encode_key(TO_STAGE_DATA, WireType::LengthDelimited, out);
    encode_varint(body, out);
    if fd != 0 {
        uint32::encode(DATA_FD, &fd, out);
    }
    encode_key(DATA_DATA, WireType::LengthDelimited, out);
    encode_varint(length, out);
}

/// Takes one whole frame from the front of `buffer`; `None` when more bytes are needed. Payload
/// fields share `buffer`'s memory.
///
/// # Errors
/// [`FrameError`] when the bytes are no frame; the connection can't be used further.
pub fn decode<M: Message + Default>(buffer: &mut BytesMut) -> Result<Option<M>, FrameError> {
    let frame = take(buffer, MAX_FRAME_BYTES)?;
    frame.map(M::decode).transpose().map_err(FrameError::Malformed)
}

/// Like [`decode`], for a frame of at most `most` bytes, which is not decoded.
///
/// # Errors
/// [`FrameError::TooLong`].
pub fn take(buffer: &mut BytesMut, most: usize) -> Result<Option<Bytes>, FrameError> {
    let Some(length) = announced(buffer) else { return Ok(None) };
    if length > most {
        return Err(FrameError::TooLong(length));
    }
    let missing = (HEADER_BYTES + length).saturating_sub(buffer.len());
    if missing > 0 {
        buffer.reserve(missing.min(PIECE_BYTES));
        return Ok(None);
    }
    buffer.advance(HEADER_BYTES);
    Ok(Some(buffer.split_to(length).freeze()))
}

/// Length of the frame at the front of `buffer`, once its header has arrived.
#[must_use]
pub fn announced(buffer: &BytesMut) -> Option<usize> {
    let header = buffer.first_chunk::<HEADER_BYTES>()?;
    Some(u32::from_le_bytes(*header) as usize)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stage::{Data, ToStage, to_stage::Kind};

    #[test]
    fn a_frame_survives_any_cut() {
        let message = ToStage { kind: Some(Kind::Data(Data { fd: 1, data: "hello".into() })) };
        let mut whole = BytesMut::new();
        encode(&message, &mut whole);
        for cut in 0..whole.len() {
            let mut part = BytesMut::from(&whole[..cut]);
            assert_eq!(decode::<ToStage>(&mut part).unwrap(), None, "cut at {cut}");
            part.extend_from_slice(&whole[cut..]);
            assert_eq!(decode::<ToStage>(&mut part).unwrap(), Some(message.clone()));
        }
    }

    #[test]
    fn the_head_of_data_is_what_prost_would_write() {
        for (fd, length) in [(0, 1), (1, 5), (2, 300_000), (63, 70)] {
            let data = bytes::Bytes::from(vec![7; length]);
            let mut head = BytesMut::new();
            encode_data_head(fd, length, &mut head);
            head.extend_from_slice(&data);
            let message = ToStage { kind: Some(Kind::Data(Data { fd, data })) };
            let mut whole = BytesMut::new();
            encode(&message, &mut whole);
            assert_eq!(head, whole, "{length} bytes for {fd}");
        }
    }

    #[test]
    fn a_hostile_length_is_refused() {
        let mut buffer = BytesMut::from(&[0xff_u8; 8][..]);
        assert!(matches!(decode::<ToStage>(&mut buffer), Err(FrameError::TooLong(_))));
    }

    #[test]
    fn memory_is_taken_for_what_has_come_and_not_for_what_is_announced() {
        let mut buffer = BytesMut::new();
        buffer.put_u32_le(u32::try_from(MAX_FRAME_BYTES).unwrap());
        assert!(take(&mut buffer, MAX_FRAME_BYTES).unwrap().is_none());
        assert!(buffer.capacity() <= 2 * PIECE_BYTES, "{}", buffer.capacity());
    }
}
