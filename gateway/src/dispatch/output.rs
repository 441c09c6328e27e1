//! Ordered merge of an output's parts into one descriptor: the current part flows, the others are
//! buffered, each within its credit.

use std::collections::VecDeque;

use bytes::Bytes;
use posh_proto::pieces;

use crate::{join::errors::SharedStart, lower::RunStream};

/// One descriptor of a stage program, and the streams that feed it in order.
#[derive(Debug)]
pub struct StageOutput {
    parts: Vec<OutputPart>,
    /// Index of the part that flows.
    current: usize,
    /// Bytes sent to the stage program per part, oldest first, not yet credited.
    uncredited: VecDeque<(usize, u64)>,
    failed: bool,
    /// Common start of the first `held_parts` streams, while it is not yet known.
    start: Option<SharedStart>,
    /// Common start of all parts. A following aggregator may repeat it.
    said: Bytes,
    held_parts: usize,
    /// See [`Self::mute_after`].
    muted_after: usize,
    /// Data that arrived for a reader that is gone, since the last `take_undelivered`.
    undelivered: Vec<Bytes>,
}

#[derive(Debug)]
struct OutputPart {
    stream: RunStream,
    waiting: VecDeque<Bytes>,
    ended: bool,
}

impl StageOutput {
    /// Merges these streams.
    #[must_use]
    pub fn new(streams: &[RunStream]) -> Self {
        let parts = streams.iter().map(|&stream| OutputPart {
            stream,
            waiting: VecDeque::new(),
            ended: false,
        });
        Self {
            parts: parts.collect(),
            current: 0,
            uncredited: VecDeque::new(),
            failed: false,
            start: None,
            said: Bytes::new(),
            held_parts: 0,
            muted_after: usize::MAX,
            undelivered: Vec::new(),
        }
    }

    /// Merges the error outputs of a command's `parts` parts, followed by those of the aggregator:
    /// a common start appears once.
    #[must_use]
    pub fn of_errors(streams: &[RunStream], parts: usize) -> Self {
        let held_parts = parts.min(streams.len());
        Self { start: Some(SharedStart::new(held_parts)), held_parts, ..Self::new(streams) }
    }

    /// Adds data of a stream. Returns data for the descriptor.
    pub fn push(&mut self, stream: RunStream, data: Bytes) -> Vec<Bytes> {
        if self.failed {
            self.undelivered.extend(Some(data).filter(|data| !data.is_empty()));
            return Vec::new();
        }
        let Some(index) = self.parts.iter().position(|p| p.stream == stream) else {
            return Vec::new();
        };
        if index > self.muted_after {
            return Vec::new();
        }
        if let Some(start) = self.start.as_mut().filter(|_| index < self.held_parts) {
            start.push(index, &data);
            return self.decide();
        }
        if index != self.current || self.start.is_some() || self.may_repeat(index) {
            pieces::keep(&mut self.parts[index].waiting, data);
            return Vec::new();
        }
        self.note(index, &data);
        vec![data]
    }

    /// Returns true while an aggregator's output must be buffered as a whole: it may begin with the
    /// common start.
    fn may_repeat(&self, index: usize) -> bool {
        self.held_parts > 0 && index >= self.held_parts && !self.parts[index].ended
    }

    /// Releases held data once the common start is known.
    fn decide(&mut self) -> Vec<Bytes> {
        let Some((said, rests)) = self.start.as_ref().and_then(SharedStart::decide) else {
            return Vec::new();
        };
        self.start = None;
        for (index, (part, rest)) in self.parts.iter_mut().zip(rests).enumerate() {
            if index <= self.muted_after {
                pieces::keep(&mut part.waiting, rest);
            }
        }
        self.parts[0].waiting.push_front(said.clone());
        self.said = said;
        let mut released = self.release(0);
        released.extend(self.advance());
        released
    }

    /// Buffered data of the part that now flows.
    fn release(&mut self, part: usize) -> Vec<Bytes> {
        let mut waiting: Vec<Bytes> = self.parts[part].waiting.drain(..).collect();
        if part >= self.held_parts && self.held_parts > 0 {
            let text = Bytes::from(waiting.concat());
            waiting = vec![
                text.strip_prefix(&*self.said).map_or(text.clone(), |rest| text.slice_ref(rest)),
            ];
        }
        waiting.retain(|data| !data.is_empty());
        waiting.iter().for_each(|data| self.note(part, data));
        waiting
    }

    /// Ends a stream. Returns data that had waited for that, in order.
    pub fn end(&mut self, stream: RunStream) -> Vec<Bytes> {
        let Some(index) = self.parts.iter().position(|p| p.stream == stream) else {
            return Vec::new();
        };
        self.parts[index].ended = true;
        if let Some(start) = self.start.as_mut().filter(|_| index < self.held_parts) {
            start.end(index);
            return self.decide();
        }
        let mut released = Vec::new();
        if index == self.current && self.start.is_none() {
            released = self.release(index);
        }
        released.extend(self.advance());
        released
    }

    /// Goes on to the next part that has not ended.
    fn advance(&mut self) -> Vec<Bytes> {
        let mut released = Vec::new();
        while self.start.is_none() && self.parts.get(self.current).is_some_and(|p| p.ended) {
            self.current += 1;
            if self.current < self.parts.len() && !self.may_repeat(self.current) {
                released.extend(self.release(self.current));
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

    /// Credit for each stream after the stage program has written `bytes`.
    pub fn credit(&mut self, mut bytes: u64) -> Vec<(RunStream, u64)> {
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

    /// Handles a closed descriptor. Returns the streams to close.
    pub fn fail(&mut self) -> Vec<RunStream> {
        self.failed = true;
        self.start = None;
        self.undelivered = self.parts.iter_mut().flat_map(|p| p.waiting.drain(..)).collect();
        self.parts.iter().filter(|p| !p.ended).map(|p| p.stream).collect()
    }

    /// Returns the data that has arrived for a closed descriptor since the last call.
    pub fn take_undelivered(&mut self) -> Vec<Bytes> {
        std::mem::take(&mut self.undelivered)
    }

    /// Number of merged streams.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "there is always one")]
    pub fn len(&self) -> usize {
        self.parts.len()
    }

    /// Index of the part that flows.
    #[must_use]
    pub fn current(&self) -> usize {
        self.current
    }

    /// Drops the output of later parts: a single process would have ended in this part and never
    /// done their work.
    pub fn mute_after(&mut self, part: usize) {
        self.muted_after = self.muted_after.min(part);
        for part in self.parts.iter_mut().skip(part + 1) {
            part.waiting.clear();
        }
    }

    /// Returns true if a stream has ended.
    #[must_use]
    pub fn has_ended(&self, stream: RunStream) -> bool {
        self.parts.iter().any(|part| part.stream == stream && part.ended)
    }

    /// Returns true if all streams have ended.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.current == self.parts.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lower::JOINED;

    fn text(pieces: &[Bytes]) -> String {
        pieces.iter().map(|b| String::from_utf8_lossy(b).into_owned()).collect()
    }

    #[test]
    fn parts_come_out_in_order_whatever_comes_first() {
        let mut output = StageOutput::new(&[(0, 1), (1, 1), (2, 1)]);
        assert_eq!(text(&output.push((2, 1), "c".into())), "");
        assert_eq!(text(&output.push((1, 1), "b".into())), "");
        assert_eq!(text(&output.push((0, 1), "a".into())), "a");
        assert_eq!(text(&output.end((1, 1))), "");
        assert_eq!(text(&output.end((0, 1))), "bc");
        assert_eq!(text(&output.push((2, 1), "d".into())), "d");
        assert!(!output.is_done());
        output.end((2, 1));
        assert!(output.is_done());
    }

    #[test]
    fn credit_goes_to_the_part_whose_bytes_were_written() {
        let mut output = StageOutput::new(&[(0, 1), (1, 1)]);
        output.push((0, 1), "aaaa".into());
        output.push((1, 1), "bb".into());
        assert_eq!(output.credit(3), [((0, 1), 3)]);
        output.end((0, 1));
        // The first part needs no credit any more; the second one's bytes follow.
        assert_eq!(output.credit(2), [((1, 1), 1)]);
    }

    #[test]
    fn what_all_parts_say_first_is_said_once() {
        let streams = [(0, 1), (1, 1), (JOINED, 2)];
        let mut output = StageOutput::of_errors(&streams, 2);
        let mut said = output.push((1, 1), "bad\n".into());
        said.extend(output.push((JOINED, 2), "bad\n".into()));
        said.extend(output.end((JOINED, 2)));
        said.extend(output.end((1, 1)));
        assert_eq!(text(&said), "");
        said.extend(output.push((0, 1), "bad\nmore\n".into()));
        assert_eq!(text(&said), "bad\nmore\n");
        said.extend(output.end((0, 1)));
        assert_eq!(text(&said), "bad\nmore\n");
        assert!(output.is_done());
    }

    #[test]
    fn what_would_never_have_been_done_is_not_shown() {
        let mut output = StageOutput::of_errors(&[(0, 1), (1, 1)], 2);
        output.push((1, 1), "missing\n".into());
        output.mute_after(0);
        let mut said = output.push((0, 1), "broken\n".into());
        said.extend(output.end((0, 1)));
        said.extend(output.push((1, 1), "more\n".into()));
        said.extend(output.end((1, 1)));
        assert_eq!(text(&said), "broken\n");
        assert!(output.is_done());
    }

    #[test]
    fn a_failed_output_swallows_the_rest() {
        let mut output = StageOutput::new(&[(0, 1), (1, 1)]);
        output.end((0, 1));
        assert_eq!(output.fail(), [(1, 1)]);
        assert_eq!(text(&output.take_undelivered()), "");
        assert_eq!(text(&output.push((1, 1), "x".into())), "");
        assert_eq!(text(&output.take_undelivered()), "x");
        assert_eq!(text(&output.take_undelivered()), "");
        output.end((1, 1));
        assert!(output.is_done());
    }
}
