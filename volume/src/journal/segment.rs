//! One segment of the journal as bytes: encoding of lines, and reading with damage.
//!
//! A line in a segment is its length, its checksum (CRC-32) and a message. A process that dies
//! while it appends leaves a torn tail: the beginning of one line, which nothing was promised for.
//! All else that is no line is damage, and what can be read around it is read:
//!
//! 1. The message has its checksum: only the length is damaged, and nothing is lost.
//! 2. The length leads to another line, or to the segment's end: the message is skipped.
//! 3. Otherwise lines begin again at the first place from which whole lines follow one another
//!    until the segment's end.
//!
//! Invariant: the contents of a file never become lines, although they may be those of a journal.
//! By 1 and 2, reading goes on where a line that was written has ended. By 3 it does as well: a
//! place within contents would need a last line that reaches from them over the rest of their own
//! line, with the file's times, which are unknown to the author of the contents. For the same
//! reason a torn tail, which may end anywhere, is searched for lines only to tell of damage.

use posh_proto::volume as pb;
use prost::Message as _;

/// Size of a line's header: length and checksum.
const HEADER_BYTES: usize = 8;
/// Limit for a valid message: a file's contents, its paths, and room.
const MESSAGE_BYTES: usize = 8 << 20;
/// Limit for the bytes whose checksums a search in one segment computes: about a second.
const SEARCH_BYTES: usize = 1 << 30;
/// First bytes of messages: the tags of `order` and of `done`.
const FIRST_BYTES: [u8; 2] = [0x08, 0x2a];

/// A new file, or the numbers of those that are on the server.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Line {
    #[prost(uint64, tag = "1")]
    pub order: u64,
    #[prost(bytes = "vec", repeated, tag = "2")]
    pub home: Vec<Vec<u8>>,
    #[prost(message, optional, tag = "3")]
    pub caller: Option<pb::Caller>,
    #[prost(message, optional, tag = "4")]
    pub put: Option<pb::Write>,
    #[prost(uint64, repeated, tag = "5")]
    pub done: Vec<u64>,
}

/// Readable lines of a segment.
#[derive(Debug, Default)]
pub(super) struct SegmentLines {
    pub lines: Vec<Line>,
    /// True if some bytes are neither a line nor a torn tail.
    pub is_damaged: bool,
}

impl Line {
    /// Encodes it; `None` if it is too large.
    pub fn encoded(&self) -> Option<Vec<u8>> {
        let message = self.encode_to_vec();
        let length = u32::try_from(message.len()).ok()?;
        let mut line = Vec::with_capacity(HEADER_BYTES + message.len());
        line.extend_from_slice(&length.to_le_bytes());
        line.extend_from_slice(&crc32fast::hash(&message).to_le_bytes());
        line.extend_from_slice(&message);
        Some(line)
    }
}

impl SegmentLines {
    /// Reads a segment.
    pub fn read(bytes: &[u8]) -> Self {
        let mut reader = SegmentReader { bytes, budget: SEARCH_BYTES };
        let (mut read, mut at) = (Self::default(), 0);
        while at < bytes.len() {
            if let Some((line, end)) = reader.line_at(at) {
                read.lines.push(line);
                at = end;
                continue;
            }
            let Some(header) = reader.header(at) else { return read };
            let is_cut = header.is_plausible() && reader.end(at, header.length).is_none();
            let next = match reader.with_any_length(at, header.sum) {
                Some((line, end)) => {
                    read.lines.push(line);
                    Some(end)
                }
                None if is_cut => {
                    read.is_damaged |= reader.next_sequence(at).is_some();
                    return read;
                }
                None => reader.framed(at, header).or_else(|| reader.next_sequence(at)),
            };
            read.is_damaged = true;
            let Some(next) = next else { return read };
            at = next;
        }
        read
    }
}

#[derive(Clone, Copy)]
struct LineHeader {
    length: usize,
    sum: u32,
}

impl LineHeader {
    /// No message is empty: zeros are no line.
    fn is_plausible(self) -> bool {
        (1..=MESSAGE_BYTES).contains(&self.length)
    }
}

struct SegmentReader<'a> {
    bytes: &'a [u8],
    /// Bytes whose checksums may still be computed in searches.
    budget: usize,
}

impl SegmentReader<'_> {
    fn header(&self, at: usize) -> Option<LineHeader> {
        let header = self.bytes.get(at..)?.first_chunk::<HEADER_BYTES>()?;
        let number = |at: usize| header[at..at + 4].try_into().map_or(0, u32::from_le_bytes);
        Some(LineHeader { length: number(0) as usize, sum: number(4) })
    }

    /// Returns the end of a line, if the segment is that long.
    fn end(&self, at: usize, length: usize) -> Option<usize> {
        (at + HEADER_BYTES).checked_add(length).filter(|end| *end <= self.bytes.len())
    }

    /// Reads a line; returns its end as well.
    fn line_at(&self, at: usize) -> Option<(Line, usize)> {
        let header = self.header(at).filter(|header| header.is_plausible())?;
        let end = self.end(at, header.length)?;
        let message = &self.bytes[at + HEADER_BYTES..end];
        let is_whole = FIRST_BYTES.contains(&message[0]) && crc32fast::hash(message) == header.sum;
        Some((Line::decode(message).ok().filter(|_| is_whole)?, end))
    }

    /// Reads a line whose length is damaged: its message has the checksum, and another line or the
    /// segment's end follows.
    fn with_any_length(&self, at: usize, sum: u32) -> Option<(Line, usize)> {
        let begin = at + HEADER_BYTES;
        let messages = self.bytes.get(begin..)?;
        let mut running = crc32fast::Hasher::new();
        for (index, byte) in messages.iter().take(MESSAGE_BYTES).enumerate() {
            running.update(&[*byte]);
            let end = begin + index + 1;
            if running.clone().finalize() == sum
                && (end == self.bytes.len() || self.line_at(end).is_some())
                && let Ok(line) = Line::decode(&self.bytes[begin..end])
            {
                return Some((line, end));
            }
        }
        None
    }

    /// Returns the end of a damaged line by its length, if another line or the segment's end is
    /// there.
    fn framed(&self, at: usize, header: LineHeader) -> Option<usize> {
        let end = self.end(at, header.length).filter(|_| header.is_plausible())?;
        (end == self.bytes.len() || self.line_at(end).is_some()).then_some(end)
    }

    /// Returns the first place after `at` from which lines follow one another to the end.
    fn next_sequence(&mut self, at: usize) -> Option<usize> {
        (at + 1..self.bytes.len()).find(|from| self.is_sequence(*from))
    }

    fn is_sequence(&mut self, mut at: usize) -> bool {
        while at < self.bytes.len() {
            let Some(header) = self.header(at).filter(|header| header.is_plausible()) else {
                return false;
            };
            if self.end(at, header.length).is_none() {
                return false;
            }
            let Some(budget) = self.budget.checked_sub(header.length) else { return false };
            self.budget = budget;
            let Some((_, end)) = self.line_at(at) else { return false };
            at = end;
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::{Changes, FileId, NewFile, NewTime, Put, Time, Write};

    fn line(order: u64, data: &[u8]) -> Line {
        let time = NewTime::At(Time { seconds: 5, nanoseconds: 123_456_789 });
        let put = Put {
            directory: FileId { inode: 3, generation: 4 },
            path: vec![format!("f{order}").into()],
            what: NewFile::Regular { data: data.to_vec().into() },
            mode: 0o640,
            changes: Changes { mtime: Some(time), ..Changes::default() },
        };
        let put = Some(Write::Put(put).into());
        Line { order, put, ..Line::default() }
    }

    fn segment(lines: &[Line]) -> Vec<u8> {
        lines.iter().flat_map(|line| line.encoded().unwrap()).collect()
    }

    fn orders(read: &SegmentLines) -> Vec<u64> {
        read.lines.iter().map(|line| line.order).collect()
    }

    #[test]
    fn one_damaged_byte_costs_one_line_at_most_and_is_never_silent() {
        let all = [1, 2, 3].map(|order| line(order, b"contents"));
        let whole = segment(&all);
        let ends: Vec<usize> = (1..=3).map(|count| segment(&all[..count]).len()).collect();
        for (at, value) in (0..whole.len()).flat_map(|at| [(at, 1), (at, 0x40), (at, 0xff)]) {
            let mut bytes = whole.clone();
            bytes[at] ^= value;
            let read = SegmentLines::read(&bytes);
            let damaged = ends.iter().position(|end| at < *end).unwrap();
            let begin = damaged.checked_sub(1).map_or(0, |before| ends[before]);
            // Without its length, a line is whole.
            let lost = (at >= begin + 4).then_some(damaged as u64 + 1);
            let left: Vec<u64> = (1..=3).filter(|order| Some(*order) != lost).collect();
            assert_eq!((orders(&read), read.is_damaged), (left, true), "{at} {value:x}");
        }
    }

    #[test]
    fn a_torn_tail_is_no_damage_wherever_it_is_cut() {
        let whole = segment(&[line(1, b"one"), line(2, b"two")]);
        let first = segment(&[line(1, b"one")]).len();
        for end in first..whole.len() {
            let read = SegmentLines::read(&whole[..end]);
            assert_eq!((orders(&read), read.is_damaged), (vec![1], false), "{end}");
        }
    }

    #[test]
    fn lines_are_read_again_after_a_destroyed_stretch() {
        let all: Vec<Line> = (1..=30).map(|order| line(order, b"contents")).collect();
        let whole = segment(&all);
        let size = segment(&all[..1]).len();
        for fill in [0, 0xff, b'X'] {
            let mut bytes = whole.clone();
            bytes[5 * size + 3..9 * size + 6].fill(fill);
            let read = SegmentLines::read(&bytes);
            let left: Vec<u64> = (1..=5).chain(11..=30).collect();
            assert_eq!((orders(&read), read.is_damaged), (left, true), "{fill}");
        }
        let mut zeros = whole.clone();
        zeros.extend([0; 4096]);
        let read = SegmentLines::read(&zeros);
        assert_eq!((read.lines.len(), read.is_damaged), (30, true));
    }

    #[test]
    fn contents_never_become_lines() {
        // A file whose contents are a journal.
        let inner = segment(&[line(66, b"theirs"), line(67, b"theirs")]);
        let all = [line(1, b"one"), line(2, &inner), line(3, b"three")];
        let whole = segment(&all);
        let second = segment(&all[..1]).len();
        for at in second..segment(&all[..2]).len() {
            for bytes in [
                // Damage of one byte, of the header and one byte, and a torn tail.
                [&whole[..at], &[whole[at] ^ 1], &whole[at + 1..]].concat(),
                {
                    let mut bytes = [&whole[..at], &[whole[at] ^ 1], &whole[at + 1..]].concat();
                    bytes[second..second + 8].fill(0xff);
                    bytes
                },
                whole[..at].to_vec(),
            ] {
                let found = orders(&SegmentLines::read(&bytes));
                assert!(found.iter().all(|order| *order < 60), "{at} {found:?}");
            }
        }
    }
}
