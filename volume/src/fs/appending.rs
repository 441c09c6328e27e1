//! Appends: direct I/O for `O_APPEND`, and recovery of appends whose answer is lost.
//!
//! Invariant: one request of the kernel is appended by one write on the server, at the end of the
//! file at that time. That also holds under a write lease, which excludes other sessions but not
//! programs on the server.

use tokio_stream::StreamExt as _;

use super::{
    Volume,
    files::Open,
    found::is_lost,
    table::{Node, Table},
};
use crate::store::{Answer, Caller, Errno, FileId, Leases, Op, OpenFlags, Place, ReadPart, Write};

/// Limit for the data added since a lost append that is searched for it.
const MOST_SEARCHED_BYTES: u64 = 64 << 20;

impl Volume {
    /// Returns true if an open file with these flags needs direct I/O: the kernel sends each
    /// write(2) as one request (up to the maximum size), bypassing its pages. Otherwise the kernel
    /// sends each incomplete page by itself, and keeps it locked until the answer. If the write
    /// waits for another client, the locked page blocks the invalidation that the other may wait
    /// for.
    pub(super) fn writes_whole(&self, flags: OpenFlags) -> bool {
        flags.contains(OpenFlags::APPEND) || self.settings.sync && flags.contains(OpenFlags::WRITE)
    }

    /// Returns true if appends may be answered before they are on the server, like other writes:
    /// under a valid write lease, or if the kernel has a page locked ([`Self::writes_whole`]).
    pub(super) fn may_gather(&self, table: &Table, open: &Open) -> bool {
        let is_alone = |node: &Node| node.leases.contains(Leases::WRITE) && self.is_good(node);
        !open.is_direct || table.of(open.file).is_some_and(is_alone)
    }

    /// Returns the file's size before any of these writes was sent, if some of them are appends.
    ///
    /// # Errors
    /// Those of the call.
    pub(super) async fn end_before(
        &self,
        caller: &Caller,
        file: FileId,
        writes: &[Write],
    ) -> Result<Option<u64>, Errno> {
        let Some(place) = writes.iter().find_map(appended_to) else { return Ok(None) };
        if let Some(size) = self.size_known(file) {
            return Ok(Some(size));
        }
        match self.ask(caller, Op::Attributes(place)).await? {
            Answer::Entry(entry) => Ok(Some(entry.attributes.size)),
            _ => Err(Errno::EPROTO),
        }
    }

    /// Removes the appends that the server may have performed although their answer was lost: their
    /// bytes would be after `end`, in their order, each contiguous, possibly with other programs'
    /// appends in between. Equal bytes may also be another program's: so the removed ones may not
    /// have been performed, but the remaining ones certainly have not. Returns the end of the last
    /// removed one.
    ///
    /// # Errors
    /// That of a lost request, which can be repeated; with other errors it can't be determined.
    pub(super) async fn take_out_arrived(
        &self,
        caller: &Caller,
        end: u64,
        writes: &mut Vec<Write>,
    ) -> Result<u64, Errno> {
        let Some(place) = writes.iter().find_map(appended_to) else { return Ok(end) };
        let added = self.read_added(caller, place, end).await?;
        let mut rest = added.as_slice();
        let mut is_arrived = true;
        writes.retain(|write| {
            let Write::Append { data, .. } = write else { return true };
            let found = Some(data).filter(|_| is_arrived).and_then(|data| position(rest, data));
            is_arrived = found.is_some();
            rest = &rest[found.map_or(0, |at| at + data.len())..];
            !is_arrived
        });
        Ok(end + (added.len() - rest.len()) as u64)
    }

    async fn read_added(&self, caller: &Caller, place: Place, end: u64) -> Result<Vec<u8>, Errno> {
        let Answer::Entry(entry) = self.ask(caller, Op::Attributes(place)).await? else {
            return Err(Errno::EPROTO);
        };
        let range = end..entry.attributes.size;
        if range.is_empty() {
            return Ok(Vec::new());
        }
        if range.end - range.start > MOST_SEARCHED_BYTES {
            return Err(Errno::EFBIG);
        }
        // Without the handle, which may be write-only.
        let mut pieces =
            self.store.read(caller, vec![ReadPart { place: place.file.into(), range }]).await;
        let mut added = Vec::new();
        while let Some(piece) = pieces.next().await {
            added.extend_from_slice(&piece?.data?);
        }
        Ok(added)
    }
}

/// Returns true if the outcome of writes is unknown after that error, and they must not be
/// repeated.
pub(super) fn is_doubtful(writes: &[Write], errno: Errno) -> bool {
    is_lost(errno)
        && errno != Errno::EAGAIN
        && writes.iter().any(|write| appended_to(write).is_some())
}

fn appended_to(write: &Write) -> Option<Place> {
    match write {
        Write::Append { place, .. } => Some(*place),
        _ => None,
    }
}

fn position(all: &[u8], part: &[u8]) -> Option<usize> {
    all.windows(part.len().max(1)).position(|window| window == part)
}
