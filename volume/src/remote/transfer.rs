//! Bulk data, in requests of their own beside the stream of calls. A broken read is resumed from
//! its present position; a broken write is repeated with its number.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use bytes::Bytes;
use posh_proto::volume as pb;
use prost::Message as _;
use tokio::sync::mpsc;
use tokio_stream::{StreamExt as _, wrappers::ReceiverStream};
use tonic::{Code, Status};

use super::{Connection, Shared, checked};
use crate::store::{Caller, Entry, Errno, Piece, Pieces, ReadPart, Write};

/// Number of pieces queued for the receiver; each is up to 256 KiB.
const PIECES: usize = 16;
/// Time within which all requests of a broken connection notice that.
const NOTICE_TIME: Duration = Duration::from_secs(1);
/// Time before a read that brought nothing is repeated.
const PAUSE: Duration = Duration::from_millis(200);

/// See [`crate::Store::read`].
pub fn read(shared: Arc<Shared>, caller: Caller, parts: Vec<ReadPart>) -> Pieces {
    let (sender, receiver) = mpsc::channel(PIECES);
    let parts = (0..).zip(parts).collect();
    tokio::spawn(async move {
        let mut left: BTreeMap<u32, ReadPart> = parts;
        while !left.is_empty() {
            let before = bytes_left(&left);
            let asked = tokio::select! {
                asked = read_some(&shared, &caller, &mut left, &sender) => asked,
                () = sender.closed() => return,
                () = shared.out_of_patience() => Err(Errno::ETIMEDOUT),
            };
            if let Err(errno) = asked {
                let _ = sender.send(Err(errno)).await;
                return;
            }
            if bytes_left(&left) == before {
                tokio::time::sleep(PAUSE).await;
            }
        }
    });
    Box::pin(ReceiverStream::new(receiver))
}

/// Number of parts and bytes that have not arrived.
fn bytes_left(left: &BTreeMap<u32, ReadPart>) -> (usize, u64) {
    let bytes = |part: &ReadPart| part.range.end.saturating_sub(part.range.start);
    (left.len(), left.values().map(bytes).sum())
}

/// Reads as much as arrives on one connection.
async fn read_some(
    shared: &Shared,
    caller: &Caller,
    left: &mut BTreeMap<u32, ReadPart>,
    sender: &mpsc::Sender<Result<Piece, Errno>>,
) -> Result<(), Errno> {
    let connection = shared.connected().await?;
    let numbers: Vec<u32> = left.keys().copied().collect();
    let mut parts = Vec::with_capacity(numbers.len());
    for part in left.values() {
        let mut part = part.clone();
        shared.its_handle(caller, &mut part.place).await?;
        parts.push(part.into());
    }
    let request =
        pb::ReadRequest { session: shared.name.clone(), caller: Some(caller.into()), parts };
    let Some(mut client) = connection.client.clone() else { return Ok(()) };
    let mut replies = match while_it_lasts(shared, &connection, client.read(request)).await {
        None => return Ok(()),
        Some(Ok(replies)) => replies.into_inner(),
        Some(Err(status)) => return after(shared, &connection, &status).await,
    };
    loop {
        let reply = match while_it_lasts(shared, &connection, replies.next()).await.flatten() {
            None => return Ok(()),
            Some(Err(status)) => return after(shared, &connection, &status).await,
            Some(Ok(reply)) => reply,
        };
        let whole = reply.encoded_len();
        for piece in reply.pieces {
            let mut piece = Piece::try_from(piece).map_err(|_| Errno::EPROTO)?;
            piece.part = *numbers.get(piece.part as usize).ok_or(Errno::EPROTO)?;
            let is_of = |part: &ReadPart| {
                piece.entry.is_none_or(|entry| entry.attributes.id == part.place.file)
            };
            if !left.get(&piece.part).is_some_and(|part| continues(part, &piece) && is_of(part)) {
                tracing::warn!(
                    export = shared.export,
                    "the server sends bytes that were not asked for"
                );
                return Err(Errno::EIO);
            }
            // A piece shares the memory of its message. Who keeps it counts its own bytes.
            piece.data = piece.data.map(|data| match data.len() < whole / 2 {
                true => Bytes::copy_from_slice(&data),
                false => data,
            });
            if piece.is_last {
                left.remove(&piece.part);
            } else if let (Some(part), Ok(data)) = (left.get_mut(&piece.part), &piece.data) {
                part.range.start = piece.offset + data.len() as u64;
            }
            if sender.send(Ok(piece)).await.is_err() {
                left.clear();
                return Ok(());
            }
        }
    }
}

/// Returns true if a piece continues its part, for which the receiver has room, or ends it. Each
/// piece brings a part nearer to its end, so that a read has an end whatever the server sends.
fn continues(part: &ReadPart, piece: &Piece) -> bool {
    let Ok(data) = &piece.data else { return piece.is_last };
    let end = piece.offset.checked_add(data.len() as u64);
    // The end of the file, which may be before the rest, has no bytes.
    if data.is_empty() {
        return piece.is_last;
    }
    piece.offset == part.range.start && end.is_some_and(|end| end <= part.range.end)
}

/// See [`crate::Store::write`].
pub async fn write(
    shared: &Shared,
    caller: &Caller,
    writes: Vec<Write>,
) -> Result<Vec<Result<Entry, Errno>>, Errno> {
    let begun = Begun::new(shared);
    let answer = tokio::select! {
        answer = write_until_answered(shared, caller, begun.number, &writes) => answer,
        () = shared.out_of_patience() => Err(Errno::ETIMEDOUT),
    };
    drop(begun);
    let results = answer?.results;
    if results.len() != writes.len() {
        return Err(Errno::EPROTO);
    }
    let result = |(write, result): (&Write, pb::Written)| match crate::wire::errno(result.error) {
        Some(errno) => Ok(Err(errno)),
        None => {
            let entry = result.entry.ok_or(Errno::EPROTO)?;
            let entry = Entry::try_from(entry).map_err(|_| Errno::EPROTO)?;
            if checked::is_written(write, &entry) { Ok(Ok(entry)) } else { Err(Errno::EPROTO) }
        }
    };
    writes.iter().zip(results).map(result).collect()
}

/// A pending write. The executor stores the answers to all later ones, too, so its drop must end
/// it.
struct Begun<'a> {
    shared: &'a Shared,
    number: u64,
}

impl<'a> Begun<'a> {
    fn new(shared: &'a Shared) -> Self {
        Self { shared, number: shared.calls.lock().expect("not poisoned").begin_write() }
    }
}

impl Drop for Begun<'_> {
    fn drop(&mut self) {
        self.shared.calls.lock().expect("not poisoned").end_write(self.number);
    }
}

async fn write_until_answered(
    shared: &Shared,
    caller: &Caller,
    number: u64,
    writes: &[Write],
) -> Result<pb::WriteReply, Errno> {
    let mut sent_in = None;
    loop {
        let connection = shared.connected().await?;
        if sent_in.is_some_and(|sent_in| sent_in < connection.since) {
            // Its outcome is unknown.
            return Err(Errno::EIO);
        }
        let mut its = writes.to_vec();
        shared.with_handles_of(caller, &mut its).await?;
        let Some(mut client) = connection.client.clone() else { continue };
        sent_in = Some(connection.epoch);
        let writes = its.into_iter().map(Into::into).collect();
        let acknowledged = shared.calls.lock().expect("not poisoned").acknowledged();
        let (session, caller) = (shared.name.clone(), Some(caller.into()));
        let request = pb::WriteRequest { session, number, caller, writes, acknowledged };
        match while_it_lasts(shared, &connection, client.write(request)).await {
            Some(Ok(reply)) => return Ok(reply.into_inner()),
            Some(Err(status)) => after(shared, &connection, &status).await?,
            // Repeated on the next connection; the executor performs it only once.
            None => {}
        }
    }
}

/// Waits for a request's answer; `None` when its connection was replaced. A request at the end of a
/// connection may get neither an answer nor an error: h2 accepts it and never sends it.
async fn while_it_lasts<T>(
    shared: &Shared,
    connection: &Connection,
    answer: impl Future<Output = T>,
) -> Option<T> {
    tokio::select! {
        biased;
        answer = answer => Some(answer),
        () = shared.is_replaced(connection) => None,
    }
}

/// Handles an error status. After a broken connection, waits until it is replaced, so that the
/// request can be repeated.
async fn after(shared: &Shared, connection: &Connection, status: &Status) -> Result<(), Errno> {
    match status.code() {
        Code::InvalidArgument | Code::OutOfRange | Code::FailedPrecondition => {
            return Err(Errno::EINVAL);
        }
        Code::Internal
        | Code::ResourceExhausted
        | Code::PermissionDenied
        | Code::Unauthenticated => {
            return Err(Errno::EIO);
        }
        _ => {}
    }
    // If only this request was lost, the connection stays.
    let _ = tokio::time::timeout(NOTICE_TIME, shared.is_replaced(connection)).await;
    Ok(())
}
