//! An ordered queue of bytes. Small pieces are merged: a piece of a few bytes costs several times
//! as much for its bookkeeping, and may keep a large buffer alive. So a queue takes as much memory
//! as it has bytes.

use std::collections::VecDeque;

use bytes::{Bytes, BytesMut};

/// Smaller pieces are copied.
const SMALL_BYTES: usize = 4 << 10;
/// Smaller pieces are merged up to this size.
const JOINED_BYTES: usize = 64 << 10;

/// Appends a piece to the queue.
pub fn keep(waiting: &mut VecDeque<Bytes>, data: Bytes) {
    if data.is_empty() {
        return;
    }
    if data.len() >= SMALL_BYTES {
        return waiting.push_back(data);
    }
    let has_room = waiting.back().is_some_and(|last| last.len() + data.len() <= JOINED_BYTES);
    let last = if has_room { waiting.pop_back() } else { None };
    let mut joined = BytesMut::from(last.unwrap_or_default());
    joined.extend_from_slice(&data);
    waiting.push_back(joined.freeze());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_small_pieces_are_few() {
        let mut waiting = VecDeque::new();
        let text: Vec<u8> = (0..200_000_u32).map(|n| n.to_le_bytes()[0]).collect();
        let whole = Bytes::from(text.clone());
        (0..text.len()).for_each(|at| keep(&mut waiting, whole.slice(at..=at)));
        keep(&mut waiting, Bytes::new());
        assert!(
            waiting.len() <= 1 + text.len() / (JOINED_BYTES - SMALL_BYTES),
            "{}",
            waiting.len()
        );
        assert_eq!(waiting.iter().flatten().copied().collect::<Vec<_>>(), text);
    }
}
