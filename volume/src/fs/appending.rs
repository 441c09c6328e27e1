//! Appends: which open files have each write(2) come as one request, and what becomes of appends
//! whose answer is lost.
//!
//! Invariant: what one request of the kernel carries is appended by one write of the server,
//! wherever the end is then. So it is also when this session alone may write the file: a lease
//! keeps other sessions away, not programs of the server.

use tokio_stream::StreamExt as _;

use super::{
    Volume,
    files::Open,
    found::is_lost,
    table::{Node, Table},
};
use crate::store::{Answer, Caller, Errno, FileId, Leases, Op, OpenFlags, Place, ReadPart, Write};

/// What has been added to a file since the answer was lost is searched only if it is no more.
const MOST_SEARCHED_BYTES: u64 = 64 << 20;

impl Volume {
    /// Whether the kernel is to send each write(2) by such an open file as one request, as far as
    /// one carries it, around its pages. With pages it sends each one that it does not have whole
    /// by itself, and keeps it locked until that is answered: what waits for another client then
    /// keeps this client from forgetting the page, for which the other may wait.
    pub(super) fn writes_whole(&self, flags: OpenFlags) -> bool {
        flags.contains(OpenFlags::APPEND) || self.settings.sync && flags.contains(OpenFlags::WRITE)
    }

    /// Whether appends are answered before they are on the server, as other writes are: nobody else
    /// can look at the file before it has them, or the kernel has a page of it locked
    /// ([`Self::writes_whole`]).
    pub(super) fn may_gather(&self, table: &Table, open: &Open) -> bool {
        let is_alone = |node: &Node| node.leases.contains(Leases::WRITE) && self.is_good(node);
        !open.is_direct || table.of(open.file).is_some_and(is_alone)
    }

    /// Where the file ended before any of these was sent, if some of them are appends.
    ///
    /// # Errors
    /// Of asking.
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

    /// Takes out the appends that the server may have though their answer was lost: they would have
    /// been carried out in their order, each as one, so they would lie behind `end` in that order,
    /// whatever others have appended between them. The same bytes may be another's: what is taken
    /// out is not known to have happened, only what is left is known not to have. Gives where the
    /// last of them ends.
    ///
    /// # Errors
    /// A lost request, which can be made again; others say that this can't be found out.
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
        // Not by a handle that may be for writing alone.
        let mut pieces =
            self.store.read(caller, vec![ReadPart { place: place.file.into(), range }]).await;
        let mut added = Vec::new();
        while let Some(piece) = pieces.next().await {
            added.extend_from_slice(&piece?.data?);
        }
        Ok(added)
    }
}

/// Whether nobody knows what became of writes with that error, and they may not be made twice.
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
