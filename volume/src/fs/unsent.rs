//! Reads of files with unsent writes.
//!
//! Invariant: a read never waits for a write of this session. The kernel keeps pages locked while
//! it reads them, and doesn't invalidate them before they have arrived; a write may have to wait at
//! the store for the invalidation in another session's kernel.

use std::ops::Range;

use bytes::{Bytes, BytesMut};

use super::{Volume, files::Open};
use crate::store::Errno;

/// Unsent writes: offsets and bytes, in the order of the writes.
pub(super) type Unsent = Vec<(u64, Bytes)>;

impl Volume {
    /// Reads from the store, and overlays unsent writes. `unsent` must be taken before, so that
    /// writes that arrive meanwhile are included.
    pub(super) async fn read_beside(
        &self,
        open: &Open,
        range: Range<u64>,
        unsent: &Unsent,
    ) -> Result<Bytes, Errno> {
        let is_whole = |(offset, data): &(u64, Bytes)| {
            *offset <= range.start && range.end <= end_of(*offset, data)
        };
        if let Some((offset, data)) = unsent.last().filter(|last| is_whole(last)) {
            self.forget_unleased_pages(open.file);
            return Ok(
                data.slice(within(data, *offset, range.start)..within(data, *offset, range.end))
            );
        }
        let there = self.read_through(open, range.clone()).await?;
        Ok(merged(there, &range, unsent))
    }
}

fn end_of(offset: u64, data: &Bytes) -> u64 {
    offset.saturating_add(data.len() as u64)
}

/// Returns the index in `data`, which begins at `offset` of a file, for the offset `place`.
fn within(data: &Bytes, offset: u64, place: u64) -> usize {
    usize::try_from(place.saturating_sub(offset)).unwrap_or(usize::MAX).min(data.len())
}

/// Overlays unsent writes on the store's data, which may be short.
fn merged(there: Bytes, range: &Range<u64>, unsent: &Unsent) -> Bytes {
    let mut all = BytesMut::from(there);
    for (offset, data) in unsent {
        let (from, to) = (range.start.max(*offset), range.end.min(end_of(*offset, data)));
        let length =
            |place: u64| usize::try_from(place.saturating_sub(range.start)).unwrap_or(usize::MAX);
        if from >= to {
            continue;
        }
        if all.len() < length(to) {
            all.resize(length(to), 0);
        }
        all[length(from)..length(to)]
            .copy_from_slice(&data[within(data, *offset, from)..within(data, *offset, to)]);
    }
    all.freeze()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn later_bytes_lie_over_earlier_ones_and_beyond_the_end() {
        let part = |offset: u64, text: &'static str| (offset, Bytes::from_static(text.as_bytes()));
        for (there, range, unsent, expected) in [
            ("abcdef", 10..16, vec![], "abcdef"),
            ("abcdef", 10..16, vec![part(0, "0123456789X")], "Xbcdef"),
            ("abcdef", 10..16, vec![part(12, "XX"), part(13, "YY")], "abXYYf"),
            (
                "abcdef",
                10..16,
                vec![part(15, "XYZ"), part(16, "Z"), part(0, "0123456789")],
                "abcdeX",
            ),
            ("ab", 10..16, vec![part(14, "X")], "ab\0\0X"),
            ("", 10..16, vec![part(9, "012345678")], "123456"),
        ] {
            assert_eq!(
                merged(Bytes::from_static(there.as_bytes()), &range, &unsent),
                expected.as_bytes()
            );
        }
    }
}
