//! Calls that have no answer yet, by their numbers, and the open files of the session as its user
//! knows them: their handles stay the same when the executor has to open them again.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    time::Duration,
};

use posh_proto::volume::{Call, ToVolume, to_volume};
use tokio::sync::oneshot;

use super::{Connection, Shared, checked};
use crate::store::{Answer, Caller, Errno, FileId, Handle, Op, OpenFlags, Place, Write};

/// A call that hangs although the executor lives is looked at so often.
const LOOK_AGAIN: Duration = Duration::from_secs(60);

/// All of them.
#[derive(Debug, Default)]
pub struct Calls {
    last_number: u64,
    waiting: BTreeMap<u64, Waiting>,
    /// Numbers of writes, which go beside the stream.
    writes: BTreeSet<u64>,
    last_handle: u64,
    opened: HashMap<u64, Opened>,
}

/// A call on its way.
#[derive(Debug)]
struct Waiting {
    call: Call,
    is_change: bool,
    is_repeatable: bool,
    /// It may have happened in the executor's session of that number.
    sent_in: Option<u64>,
    /// It names handles of that session.
    names_handles: bool,
    answer: oneshot::Sender<Given>,
}

/// An open file.
#[derive(Debug, Clone, Copy)]
struct Opened {
    file: FileId,
    flags: OpenFlags,
    /// In the executor's session of that number.
    handle: (u64, Handle),
}

/// What a call is given.
#[derive(Debug)]
pub enum Given {
    Answer(Result<Answer, Errno>),
    /// In an earlier session of the executor: a handle in it is closed.
    Earlier(Result<Answer, Errno>),
    /// The executor knows nothing of it any more; it can be begun again.
    Again,
}

impl Calls {
    /// Requests without an answer.
    pub fn under_way(&self) -> u64 {
        (self.waiting.len() + self.writes.len()) as u64
    }

    /// Up to which number all changes have been answered.
    pub fn acknowledged(&self) -> u64 {
        let change =
            self.waiting.iter().find(|(_, waiting)| waiting.is_change).map(|(number, _)| number);
        let first = change.into_iter().chain(self.writes.first()).min();
        first.map_or(self.last_number, |first| first - 1)
    }

    /// A number for a write.
    pub fn begin_write(&mut self) -> u64 {
        self.last_number += 1;
        self.writes.insert(self.last_number);
        self.last_number
    }

    /// The write has its answer.
    pub fn end_write(&mut self, number: u64) {
        self.writes.remove(&number);
    }

    /// What was answered.
    pub fn answered(&mut self, number: u64, given: Given) {
        if let Some(waiting) = self.waiting.remove(&number) {
            let _ = waiting.answer.send(given);
        }
    }

    /// All calls, to be sent on a new connection to the executor's session `epoch`. What may have
    /// happened in an earlier one than `since`, and must not happen twice, fails; those after it
    /// know each other's calls.
    pub fn sent_anew(&mut self, (since, epoch): (u64, u64)) -> Vec<Call> {
        let is_lost = |waiting: &Waiting| {
            let is_known = |sent_in| sent_in == epoch || sent_in >= since && !waiting.names_handles;
            waiting.sent_in.is_some_and(|sent_in| !is_known(sent_in))
        };
        let lost: Vec<u64> = self
            .waiting
            .iter()
            .filter(|(_, waiting)| is_lost(waiting))
            .map(|(number, _)| *number)
            .collect();
        for number in lost {
            let Some(waiting) = self.waiting.remove(&number) else { continue };
            // It may name handles that are no more, and is begun again.
            let given =
                if waiting.is_repeatable { Given::Again } else { Given::Answer(Err(Errno::EIO)) };
            let _ = waiting.answer.send(given);
        }
        self.waiting.values_mut().for_each(|waiting| waiting.sent_in = Some(epoch));
        self.waiting.values().map(|waiting| waiting.call.clone()).collect()
    }

    fn begin(
        &mut self,
        mut call: Call,
        (is_change, is_repeatable): (bool, bool),
        (epoch, names_handles): (Option<u64>, bool),
    ) -> (Call, oneshot::Receiver<Given>) {
        self.last_number += 1;
        call.number = self.last_number;
        call.acknowledged = self.acknowledged().min(call.number - 1);
        let (answer, given) = oneshot::channel();
        let waiting = Waiting {
            call: call.clone(),
            is_change,
            is_repeatable,
            sent_in: epoch,
            names_handles,
            answer,
        };
        self.waiting.insert(call.number, waiting);
        (call, given)
    }

    fn opened(&mut self, file: FileId, flags: OpenFlags, handle: (u64, Handle)) -> Handle {
        self.last_handle += 1;
        self.opened.insert(self.last_handle, Opened { file, flags, handle });
        Handle(self.last_handle)
    }
}

/// Gives the call up when nobody waits for it any more.
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
                    // What it was open in is no more.
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
                    "the server answers with more than was asked for"
                );
                return Err(Errno::EIO);
            }
            let (Op::Open { flags, .. } | Op::Create { flags, .. } | Op::CreateWhole { flags, .. }) =
                op
            else {
                return answer;
            };
            let Answer::Opened { handle, entry, parent } = answer? else {
                return Err(Errno::EPROTO);
            };
            // Of no session: it is opened again when it is used.
            let epoch = if is_earlier { 0 } else { self.connection.borrow().epoch };
            let mut calls = self.calls.lock().expect("not poisoned");
            let handle = calls.opened(entry.attributes.id, flags, (epoch, handle));
            return Ok(Answer::Opened { handle, entry, parent });
        }
    }

    /// Sends it and waits. `epoch`: the executor's session whose handles it names.
    async fn send(&self, caller: &Caller, op: Op, epoch: Option<u64>) -> Given {
        let kind = (op.is_change(), op.is_repeatable());
        let message = Call { caller: Some(caller.into()), op: Some(op.into()), ..Call::default() };
        let (call, mut given, outgoing) = {
            // In one step, so that a new connection either finds it or is the one it is sent on.
            let mut calls = self.calls.lock().expect("not poisoned");
            let Connection { outgoing, epoch: now, .. } = self.connection.borrow().clone();
            if epoch.is_some_and(|epoch| epoch != now) {
                return Given::Again;
            }
            let sent_in = outgoing.is_some().then_some(now).or(epoch);
            let (call, given) = calls.begin(message, kind, (sent_in, epoch.is_some()));
            (call, given, outgoing)
        };
        let _waited = Waited { shared: self, number: call.number };
        if let Some(outgoing) = outgoing {
            // Where it fails, the next connection takes it along.
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

    /// Puts the executor's handles in place of ours; gives the session that they are of, if there
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

    /// The same for writes.
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

    /// The executor's handle, opened again where it has forgotten it.
    pub async fn its_handle(
        &self,
        caller: &Caller,
        place: &mut Place,
    ) -> Result<Option<u64>, Errno> {
        let Some(handle) = place.handle else { return Ok(None) };
        let opened = self.opened(handle)?;
        let now = self.connection.borrow().epoch;
        if opened.handle.0 == now {
            place.handle = Some(opened.handle.1);
            return Ok(Some(now));
        }
        let flags = opened.flags - (OpenFlags::TRUNCATE | OpenFlags::EXCLUSIVE);
        let again = Op::Open { file: opened.file, flags };
        let answer = loop {
            match self.send(caller, again.clone(), None).await {
                Given::Answer(answer) => break answer,
                Given::Again | Given::Earlier(_) => {}
            }
        };
        let Answer::Opened { handle: new, .. } = answer? else { return Err(Errno::EPROTO) };
        let epoch = self.connection.borrow().epoch;
        if let Some(opened) = self.calls.lock().expect("not poisoned").opened.get_mut(&handle.0) {
            opened.handle = (epoch, new);
        }
        place.handle = Some(new);
        Ok(Some(epoch))
    }

    /// Forgets a handle; gives the executor's, and the session of it if that is the present one.
    fn closed(&self, handle: &mut Handle) -> Result<Option<u64>, Errno> {
        let opened = self
            .calls
            .lock()
            .expect("not poisoned")
            .opened
            .remove(&handle.0)
            .ok_or(Errno::EBADF)?;
        *handle = opened.handle.1;
        Ok(Some(opened.handle.0).filter(|epoch| *epoch == self.connection.borrow().epoch))
    }

    fn opened(&self, handle: Handle) -> Result<Opened, Errno> {
        self.calls.lock().expect("not poisoned").opened.get(&handle.0).copied().ok_or(Errno::EBADF)
    }
}

/// All places that an op names.
fn places(op: &mut Op) -> Vec<&mut Place> {
    match op {
        Op::Attributes(place)
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
        Op::CopyRange { from, to, .. } => vec![&mut from.0, &mut to.0],
        _ => Vec::new(),
    }
}
