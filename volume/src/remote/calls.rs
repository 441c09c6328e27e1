//! Pending calls by number, and the session's open files: a handle stays the same for the user when
//! the executor has to open the file again.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    time::Duration,
};

use posh_proto::volume::{Call, ToVolume, to_volume};
use tokio::sync::oneshot;

use super::{Connection, Shared, checked};
use crate::store::{Answer, Caller, Errno, FileId, Handle, Op, OpenFlags, Place, Write};

/// Interval of checks of a call that hangs although the executor is alive.
const LOOK_AGAIN: Duration = Duration::from_secs(60);

/// The pending calls and the open files.
#[derive(Debug, Default)]
pub struct Calls {
    last_number: u64,
    waiting: BTreeMap<u64, PendingCall>,
    /// Numbers of pending writes, which have requests of their own.
    writes: BTreeSet<u64>,
    last_handle: u64,
    opened: HashMap<u64, RemoteFile>,
}

/// A pending call.
#[derive(Debug)]
struct PendingCall {
    call: Call,
    delivery: Delivery,
    answer: oneshot::Sender<Given>,
}

/// State of a call that decides if it may be sent again on a new connection.
#[derive(Debug, Clone, Copy)]
struct Delivery {
    is_change: bool,
    is_repeatable: bool,
    /// Number of the executor's session in which it may have been performed.
    sent_in: Option<u64>,
    /// True if it contains handles of that session.
    names_handles: bool,
}

/// An open file.
#[derive(Debug, Clone, Copy)]
struct RemoteFile {
    file: FileId,
    flags: OpenFlags,
    /// Number of the executor's session that the handle belongs to.
    epoch: u64,
    handle: Handle,
}

/// Outcome of a call.
#[derive(Debug)]
pub enum Given {
    Answer(Result<Answer, Errno>),
    /// Answer from an earlier session of the executor: a handle in it is closed.
    Earlier(Result<Answer, Errno>),
    /// The executor no longer knows the call; it can be repeated.
    Again,
}

impl Calls {
    /// Returns the number of requests without an answer.
    pub fn under_way(&self) -> u64 {
        (self.waiting.len() + self.writes.len()) as u64
    }

    /// Returns the number up to which all changes have been answered.
    pub fn acknowledged(&self) -> u64 {
        let change = self
            .waiting
            .iter()
            .find(|(_, waiting)| waiting.delivery.is_change)
            .map(|(number, _)| number);
        let first = change.into_iter().chain(self.writes.first()).min();
        first.map_or(self.last_number, |first| first - 1)
    }

    /// Allocates a number for a write.
    pub fn begin_write(&mut self) -> u64 {
        self.last_number += 1;
        self.writes.insert(self.last_number);
        self.last_number
    }

    /// Notes that a write is no longer pending.
    pub fn end_write(&mut self, number: u64) {
        self.writes.remove(&number);
    }

    /// Delivers a call's outcome.
    pub fn answered(&mut self, number: u64, given: Given) {
        if let Some(waiting) = self.waiting.remove(&number) {
            let _ = waiting.answer.send(given);
        }
    }

    /// Returns all pending calls, to be sent on a new connection to the executor's session `epoch`.
    /// A call that may have been performed in a session before `since`, and must not be repeated,
    /// fails; sessions since then know each other's calls.
    pub fn sent_anew(&mut self, since: u64, epoch: u64) -> Vec<Call> {
        let is_lost = |PendingCall { delivery, .. }: &PendingCall| {
            let is_known =
                |sent_in| sent_in == epoch || sent_in >= since && !delivery.names_handles;
            delivery.sent_in.is_some_and(|sent_in| !is_known(sent_in))
        };
        let lost: Vec<u64> = self
            .waiting
            .iter()
            .filter(|(_, waiting)| is_lost(waiting))
            .map(|(number, _)| *number)
            .collect();
        for number in lost {
            let Some(waiting) = self.waiting.remove(&number) else { continue };
            // A repeatable one begins anew, since its handles may be invalid.
            let is_repeatable = waiting.delivery.is_repeatable;
            let given = if is_repeatable { Given::Again } else { Given::Answer(Err(Errno::EIO)) };
            let _ = waiting.answer.send(given);
        }
        self.waiting.values_mut().for_each(|waiting| waiting.delivery.sent_in = Some(epoch));
        self.waiting.values().map(|waiting| waiting.call.clone()).collect()
    }

    fn begin(&mut self, mut call: Call, delivery: Delivery) -> (Call, oneshot::Receiver<Given>) {
        self.last_number += 1;
        call.number = self.last_number;
        call.acknowledged = self.acknowledged().min(call.number - 1);
        let (answer, given) = oneshot::channel();
        self.waiting.insert(call.number, PendingCall { call: call.clone(), delivery, answer });
        (call, given)
    }

    fn opened(&mut self, opened: RemoteFile) -> Handle {
        self.last_handle += 1;
        self.opened.insert(self.last_handle, opened);
        Handle(self.last_handle)
    }
}

/// Cancels a pending call on drop.
struct Waited<'a> {
    shared: &'a Shared,
    number: u64,
}

impl Drop for Waited<'_> {
    fn drop(&mut self) {
        let was_waiting =
            self.shared.calls.lock().expect("not poisoned").waiting.remove(&self.number).is_some();
        let outgoing = self.shared.connection.borrow().outgoing.clone();
        if let (true, Some(outgoing)) = (was_waiting, outgoing) {
            let _ =
                outgoing.try_send(ToVolume { kind: Some(to_volume::Kind::Cancel(self.number)) });
        }
    }
}

impl Shared {
    /// See [`crate::Store::call`].
    pub async fn call(&self, caller: &Caller, op: Op) -> Result<Answer, Errno> {
        loop {
            let mut sent = op.clone();
            let epoch = match &mut sent {
                Op::Close(handle) => match self.closed(handle)? {
                    // The session of its handle has ended.
                    None => return Ok(Answer::Done),
                    epoch => epoch,
                },
                other => self.with_its_handles(caller, other).await?,
            };
            let (answer, is_earlier) = match self.send(caller, sent, epoch).await {
                Given::Again if matches!(op, Op::Close(_)) => return Ok(Answer::Done),
                Given::Again => continue,
                Given::Answer(answer) => (answer, false),
                Given::Earlier(answer) => (answer, true),
            };
            if let Ok(answer) = &answer
                && !checked::fits(&op, answer)
            {
                tracing::warn!(
                    export = self.export,
                    "the server answers something else, or more, than was asked for"
                );
                return Err(Errno::EIO);
            }
            let flags = match op {
                Op::Open { flags, .. }
                | Op::Create { flags, .. }
                | Op::CreateWhole { flags, .. } => flags,
                _ => return answer,
            };
            let Answer::Opened { handle, entry, parent } = answer? else {
                return Err(Errno::EPROTO);
            };
            // Epoch 0 is no session's: the file is opened again on use.
            let epoch = if is_earlier { 0 } else { self.connection.borrow().epoch };
            let mut calls = self.calls.lock().expect("not poisoned");
            let handle =
                calls.opened(RemoteFile { file: entry.attributes.id, flags, epoch, handle });
            return Ok(Answer::Opened { handle, entry, parent });
        }
    }

    /// Sends an op and waits. `epoch`: the executor's session whose handles it contains.
    async fn send(&self, caller: &Caller, op: Op, epoch: Option<u64>) -> Given {
        let (is_change, is_repeatable) = (op.is_change(), op.is_repeatable());
        let message = Call { caller: Some(caller.into()), op: Some(op.into()), ..Call::default() };
        let (call, mut given, outgoing) = {
            // Atomic, so that a new connection either finds the call or is the one it is sent on.
            let mut calls = self.calls.lock().expect("not poisoned");
            let Connection { outgoing, epoch: now, .. } = self.connection.borrow().clone();
            if epoch.is_some_and(|epoch| epoch != now) {
                return Given::Again;
            }
            let sent_in = outgoing.is_some().then_some(now).or(epoch);
            let names_handles = epoch.is_some();
            let delivery = Delivery { is_change, is_repeatable, sent_in, names_handles };
            let (call, given) = calls.begin(message, delivery);
            (call, given, outgoing)
        };
        let _waited = Waited { shared: self, number: call.number };
        if let Some(outgoing) = outgoing {
            // If it fails, the next connection sends it.
            let sent = outgoing.send(ToVolume { kind: Some(to_volume::Kind::Call(call)) });
            tokio::select! {
                _ = sent => {}
                () = self.out_of_patience() => return Given::Answer(Err(Errno::ETIMEDOUT)),
            }
        }
        loop {
            tokio::select! {
                given = &mut given => return given.unwrap_or(Given::Answer(Err(Errno::EIO))),
                () = self.out_of_patience() => return Given::Answer(Err(Errno::ETIMEDOUT)),
                () = tokio::time::sleep(LOOK_AGAIN) => {}
            }
        }
    }

    /// Replaces our handles by the executor's; returns the session that they belong to, if there
    /// are any.
    async fn with_its_handles(&self, caller: &Caller, op: &mut Op) -> Result<Option<u64>, Errno> {
        let mut epoch = None;
        for place in places(op) {
            if let Some(of) = self.its_handle(caller, place).await? {
                epoch = Some(of);
            }
        }
        Ok(epoch)
    }

    /// Like [`Self::with_its_handles`], for writes.
    pub async fn with_handles_of(
        &self,
        caller: &Caller,
        writes: &mut [Write],
    ) -> Result<Option<u64>, Errno> {
        let mut epoch = None;
        for write in writes {
            let (Write::At { place, .. } | Write::Append { place, .. } | Write::Set { place, .. }) =
                write
            else {
                continue;
            };
            epoch = self.its_handle(caller, place).await?.or(epoch);
        }
        Ok(epoch)
    }

    /// Replaces our handle by the executor's, opening the file again if necessary.
    pub async fn its_handle(
        &self,
        caller: &Caller,
        place: &mut Place,
    ) -> Result<Option<u64>, Errno> {
        let Some(handle) = place.handle else { return Ok(None) };
        let opened = self.opened(handle)?;
        let now = self.connection.borrow().epoch;
        if opened.epoch == now {
            place.handle = Some(opened.handle);
            return Ok(Some(now));
        }
        let flags = opened.flags - (OpenFlags::TRUNCATE | OpenFlags::EXCLUSIVE);
        let again = Op::Open { place: opened.file.into(), flags };
        let answer = loop {
            match self.send(caller, again.clone(), None).await {
                Given::Answer(answer) => break answer,
                Given::Again | Given::Earlier(_) => {}
            }
        };
        let Answer::Opened { handle: new, .. } = answer? else { return Err(Errno::EPROTO) };
        let epoch = self.connection.borrow().epoch;
        if let Some(opened) = self.calls.lock().expect("not poisoned").opened.get_mut(&handle.0) {
            (opened.epoch, opened.handle) = (epoch, new);
        }
        place.handle = Some(new);
        Ok(Some(epoch))
    }

    /// Removes a handle, and replaces it by the executor's; returns its session if that is the
    /// present one.
    fn closed(&self, handle: &mut Handle) -> Result<Option<u64>, Errno> {
        let opened = self
            .calls
            .lock()
            .expect("not poisoned")
            .opened
            .remove(&handle.0)
            .ok_or(Errno::EBADF)?;
        *handle = opened.handle;
        Ok(Some(opened.epoch).filter(|epoch| *epoch == self.connection.borrow().epoch))
    }

    fn opened(&self, handle: Handle) -> Result<RemoteFile, Errno> {
        self.calls.lock().expect("not poisoned").opened.get(&handle.0).copied().ok_or(Errno::EBADF)
    }
}

/// Returns all places in an op.
fn places(op: &mut Op) -> Vec<&mut Place> {
    match op {
        Op::Attributes(place)
        | Op::Open { place, .. }
        | Op::Set { place, .. }
        | Op::Link { file: place, .. }
        | Op::Sync { place, .. }
        | Op::Allocate { place, .. }
        | Op::Seek { place, .. }
        | Op::GetAttribute { place, .. }
        | Op::SetAttribute { place, .. }
        | Op::ListAttributes(place)
        | Op::RemoveAttribute { place, .. }
        | Op::Lock { place, .. }
        | Op::TestLock { place, .. } => vec![place],
        Op::CopyRange { from, to, .. } => vec![&mut from.file, &mut to.file],
        _ => Vec::new(),
    }
}
