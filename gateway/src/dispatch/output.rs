//! The ordered join of an output's parts on their way to one descriptor: the
//! part whose turn it is flows, the others wait, each within its credit.

use std::collections::VecDeque;

use bytes::Bytes;

use crate::lower::Stream;

/// One descriptor of a stage program, and the streams that feed it in order.
#[derive(Debug)]
pub struct Output {
    parts: Vec<Part>,
    /// The part whose turn it is.
    current: usize,
    /// Bytes given to the stage program for each part, oldest first, not yet credited.
    uncredited: VecDeque<(usize, u64)>,
    failed: bool,
    /// Bytes came for a reader who had gone, since the question was last asked.
    undelivered: bool,
}

#[derive(Debug)]
struct Part {
    stream: Stream,
    waiting: VecDeque<Bytes>,
    ended: bool,
}

impl Output {
    /// Joins these streams.
    #[must_use]
    pub fn new(streams: &[Stream]) -> Self {
        let parts = streams.iter().map(|&stream| Part { stream, waiting: VecDeque::new(), ended: false });
        Self { parts: parts.collect(), current: 0, uncredited: VecDeque::new(), failed: false, undelivered: false }
    }

    /// Takes bytes of a stream; what may go to the descriptor now comes back.
    pub fn push(&mut self, stream: Stream, data: Bytes) -> Option<Bytes> {
        if self.failed {
            self.undelivered |= !data.is_empty();
            return None;
        }
        let index = self.parts.iter().position(|p| p.stream == stream)?;
        if index != self.current {
            self.parts[index].waiting.push_back(data);
            return None;
        }
        self.note(index, &data);
        Some(data)
    }

    /// A stream has ended; what had waited for that comes back, in order.
    pub fn end(&mut self, stream: Stream) -> Vec<Bytes> {
        if let Some(part) = self.parts.iter_mut().find(|p| p.stream == stream) {
            part.ended = true;
        }
        let mut released = Vec::new();
        while self.parts.get(self.current).is_some_and(|p| p.ended) {
            self.current += 1;
            let current = self.current;
            if let Some(next) = self.parts.get_mut(current) {
                let waiting: Vec<Bytes> = next.waiting.drain(..).collect();
                waiting.iter().for_each(|data| self.note(current, data));
                released.extend(waiting);
            }
        }
        released
    }

    fn note(&mut self, part: usize, data: &Bytes) {
        let bytes = data.len() as u64;
        match self.uncredited.back_mut() {
            Some((last, sum)) if *last == part => *sum += bytes,
            _ => self.uncredited.push_back((part, bytes)),
        }
    }

    /// The stage program has written so many bytes: the credit that each stream gets for it.
    pub fn credit(&mut self, mut bytes: u64) -> Vec<(Stream, u64)> {
        let mut credits = Vec::new();
        while let Some((part, left)) = self.uncredited.front_mut().filter(|_| bytes > 0) {
            let given = bytes.min(*left);
            (*left, bytes) = (*left - given, bytes - given);
            if !self.parts[*part].ended {
                credits.push((self.parts[*part].stream, given));
            }
            if *left == 0 {
                self.uncredited.pop_front();
            }
        }
        credits
    }

    /// Nobody reads the descriptor any more; the streams to be closed for it.
    pub fn fail(&mut self) -> Vec<Stream> {
        self.failed = true;
        self.undelivered = self.parts.iter().any(|p| !p.waiting.is_empty());
        self.parts.iter_mut().for_each(|p| p.waiting.clear());
        self.parts.iter().filter(|p| !p.ended).map(|p| p.stream).collect()
    }

    /// Whether bytes came, since this was last asked, that nobody reads any more.
    pub fn take_undelivered(&mut self) -> bool {
        std::mem::take(&mut self.undelivered)
    }

    /// All streams have ended.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.current == self.parts.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(pieces: &[Bytes]) -> String {
        pieces.iter().map(|b| String::from_utf8_lossy(b).into_owned()).collect()
    }

    #[test]
    fn parts_come_out_in_order_whatever_comes_first() {
        let mut output = Output::new(&[(0, 1), (1, 1), (2, 1)]);
        assert_eq!(output.push((2, 1), "c".into()), None);
        assert_eq!(output.push((1, 1), "b".into()), None);
        assert_eq!(output.push((0, 1), "a".into()), Some("a".into()));
        assert_eq!(text(&output.end((1, 1))), "");
        assert_eq!(text(&output.end((0, 1))), "bc");
        assert_eq!(output.push((2, 1), "d".into()), Some("d".into()));
        assert!(!output.is_done());
        output.end((2, 1));
        assert!(output.is_done());
    }

    #[test]
    fn credit_goes_to_the_part_whose_bytes_were_written() {
        let mut output = Output::new(&[(0, 1), (1, 1)]);
        output.push((0, 1), "aaaa".into());
        output.push((1, 1), "bb".into());
        assert_eq!(output.credit(3), [((0, 1), 3)]);
        output.end((0, 1));
        // The first part needs no credit any more; the second one's bytes follow.
        assert_eq!(output.credit(2), [((1, 1), 1)]);
    }

    #[test]
    fn a_failed_output_swallows_the_rest() {
        let mut output = Output::new(&[(0, 1), (1, 1)]);
        output.end((0, 1));
        assert_eq!(output.fail(), [(1, 1)]);
        assert!(!output.take_undelivered());
        assert_eq!(output.push((1, 1), "x".into()), None);
        assert!(output.take_undelivered() && !output.take_undelivered());
        output.end((1, 1));
        assert!(output.is_done());
    }
}
