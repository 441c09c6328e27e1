//! Fields that the hook needs of the message `SessionFile` in proto/stage.proto, read from
//! protobuf's encoding. Only the stage program reads the other fields.

use crate::places::Places;

/// Field numbers.
const SOCKET: u64 = 2;
const ALWAYS_ENLIST: u64 = 3;
const PREFIXES: u64 = 4;
const TRACE: u64 = 5;
const ASKS: u64 = 6;
/// Most seven-bit groups of a varint (64 bits).
const MAX_GROUPS: u32 = 10;

/// Fields of a session file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SessionFile<'a> {
    /// The gateway's stage socket.
    pub(crate) socket: &'a [u8],
    /// Every known command is reported afterwards (`--explain`, a trace), so that none may bypass
    /// the gateway.
    pub(crate) is_told_of: bool,
    /// The gateway is asked before the stage program is started.
    pub(crate) asks: bool,
    /// Every known command goes to the stage program.
    pub(crate) always_enlist: bool,
    /// Mount points.
    pub(crate) places: Places<'a>,
}

impl<'a> SessionFile<'a> {
    /// `None` when the bytes are no such message.
    pub(crate) fn read(mut bytes: &'a [u8]) -> Option<Self> {
        let (mut socket, mut prefixes): (&[u8], &[u8]) = (b"", b"");
        let (mut always_enlist, mut traces, mut asks) = (false, false, false);
        while !bytes.is_empty() {
            let key = number(&mut bytes)?;
            match (key >> 3, key & 7) {
                (field, 0) => {
                    let value = number(&mut bytes)?;
                    always_enlist |= field == ALWAYS_ENLIST && value != 0;
                    traces |= field == TRACE && value != 0;
                    asks |= field == ASKS && value != 0;
                }
                (field, 2) => {
                    let length = usize::try_from(number(&mut bytes)?).ok()?;
                    let (value, rest) = bytes.split_at_checked(length)?;
                    bytes = rest;
                    match field {
                        SOCKET => socket = value,
                        PREFIXES => prefixes = value,
                        _ => {}
                    }
                }
                _ => return None,
            }
        }
        let is_told_of = always_enlist || traces;
        Places::read(prefixes).map(|places| Self {
            socket,
            is_told_of,
            asks,
            always_enlist,
            places,
        })
    }
}

/// Decodes a varint.
fn number(bytes: &mut &[u8]) -> Option<u64> {
    let mut value = 0_u64;
    for group in 0..MAX_GROUPS {
        let (byte, rest) = bytes.split_first()?;
        *bytes = rest;
        value |= u64::from(byte & 0x7f).checked_shl(7 * group)?;
        if byte & 0x80 == 0 {
            return Some(value);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::SessionFile;

    #[test]
    fn the_fields_are_found_among_the_others() {
        let bytes = b"\x0a\x03s-1\x12\x02/s\x18\x01\x22\x06o/m/a/";
        assert_eq!(SessionFile::read(bytes), None);
        let bytes = b"\x0a\x03s-1\x12\x02/s\x18\x01\x22\x05o/m/\0";
        let read = SessionFile::read(bytes).unwrap();
        assert!(read.always_enlist && !read.asks);
        assert_eq!(read.socket, b"/s");
        let traced = SessionFile::read(b"\x28\x01\x30\x01").unwrap();
        assert!(traced.asks && traced.is_told_of && !traced.always_enlist && read.is_told_of);
        assert_eq!(read.places.owned().collect::<Vec<_>>(), [b"/m/"]);
        let read = SessionFile::read(b"").unwrap();
        assert!(!read.always_enlist && read.places.owned().next().is_none());
    }

    #[test]
    fn what_is_cut_off_is_no_message() {
        for bytes in
            [&b"\x22\x05o/m/"[..], b"\x22", b"\x22\xff", b"\x1d\0\0\0\0", &[0x18; 1], &[0xff; 11]]
        {
            assert_eq!(SessionFile::read(bytes), None, "{bytes:?}");
        }
    }
}
