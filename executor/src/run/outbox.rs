//! A run's messages on their way to its client, in one numbered queue. Messages of a kept run stay
//! until the client has acknowledged them, so that a new connection resumes exactly where the lost
//! one ended; those of any other run are dropped when they are sent.

use std::{
    collections::VecDeque,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, Waker, ready},
};

use posh_proto::executor::{Resumed, RunOutput, run_output};
use prost::Message as _;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio_stream::Stream;
use tonic::Status;

use super::output_of;
use crate::metered::{Acquire, LEAST_OF_ONE};

/// Messages waiting for HTTP/2: enough that reading from a pipe and writing to the
/// network overlap, at most 1 MiB with the largest chunks.
const QUEUE: u64 = 4;

/// Unacknowledged output of a kept run, beyond which it waits, with a client or without. A gateway
/// acknowledges bytes on arrival, before anybody reads them, so that this depends on the link
/// alone: 4 MiB are 30 ms at 1 Gbit/s.
pub const HELD_BYTES: usize = 4 << 20;
/// Of that, this much of each run is on no account: its client can always acknowledge something,
/// and the run goes on. A gateway acknowledges at each 64 KiB and at each 64 messages.
const OWN_HELD_BYTES: usize = 128 << 10;
/// So a kept run's chunks are no larger than half of it.
pub const KEPT_CHUNK_BYTES: usize = OWN_HELD_BYTES / 2 - MESSAGE_BYTES;
/// Other messages, such as a status or credit, may be what the client waits for: they have as much
/// again, some hundreds of messages.
const WORD_BYTES: usize = 128 << 10;
/// Memory of a queued message beside its content.
const MESSAGE_BYTES: usize = 512;

/// A message, or the error that ends the call.
pub type Message = Result<RunOutput, Status>;

/// The queue of one run; see the module's text.
///
/// Invariant: queued messages of runs that are not kept are on the caller's account, from before
/// they are queued until they are taken, or the client is gone. The run's end changes nothing of
/// that. Of kept runs this applies beyond [`OWN_HELD_BYTES`], until the messages are acknowledged
/// or the run has ended. Long lists of changes have their room before they come here.
pub struct Outbox {
    state: Mutex<OutboxState>,
    changed: Notify,
    /// Account of queued bytes.
    account: Option<Arc<Semaphore>>,
    /// Account of encoded lists of changes, until HTTP/2 has taken them: of a kept run the list
    /// itself stays, and each of its clients may leave its frame untaken.
    frames: Option<Arc<Semaphore>>,
}

struct Queued {
    message: Message,
    sort: Sort,
    bytes: usize,
    charge: Option<OwnedSemaphorePermit>,
}

#[derive(Clone, Copy)]
enum Sort {
    Output,
    Word,
    /// The exit of a command with a long list.
    List,
}

struct OutboxState {
    messages: VecDeque<Queued>,
    /// Bytes of output, of other messages, and of lists.
    held_bytes: usize,
    word_bytes: usize,
    list_bytes: usize,
    /// Number of the first queued message, and of the next that is sent.
    first: u64,
    next: u64,
    keeps: bool,
    /// Counts the clients; only the last one gets messages.
    client: u64,
    is_attached: bool,
    /// No further message comes.
    is_ended: bool,
    waker: Option<Waker>,
}

/// No client gets messages any more.
#[derive(Debug)]
pub struct Unheard;

impl Outbox {
    /// For a run, with its accounts of queued messages and of large frames.
    pub fn of_run(is_kept: bool, queued: Arc<Semaphore>, frames: Arc<Semaphore>) -> Arc<Self> {
        Self::new(is_kept, Some(queued), Some(frames))
    }

    /// For a kept run, with its account. It has no client yet.
    #[cfg(test)]
    pub fn kept(account: Arc<Semaphore>) -> Arc<Self> {
        Self::new(true, Some(account), None)
    }

    /// For a run that ends with its client, with its account.
    pub fn of_one_client(account: Option<Arc<Semaphore>>) -> Arc<Self> {
        Self::new(false, account, None)
    }

    fn new(
        keeps: bool,
        account: Option<Arc<Semaphore>>,
        frames: Option<Arc<Semaphore>>,
    ) -> Arc<Self> {
        let state = OutboxState {
            messages: VecDeque::new(),
            held_bytes: 0,
            word_bytes: 0,
            list_bytes: 0,
            first: 0,
            next: 0,
            keeps,
            client: 0,
            is_attached: false,
            is_ended: false,
            waker: None,
        };
        Arc::new(Self { state: Mutex::new(state), changed: Notify::new(), account, frames })
    }

    /// Returns true if it outlives its client.
    pub fn keeps(&self) -> bool {
        self.lock().keeps
    }

    /// Queues a message, when there is room.
    pub async fn send(&self, message: Message) -> Result<(), Unheard> {
        self.send_within(message, None).await
    }

    /// Like `send`, for an exit whose long list of changes has its room already.
    pub async fn send_within(
        &self,
        message: Message,
        room: Option<OwnedSemaphorePermit>,
    ) -> Result<(), Unheard> {
        let (sort, size) = match &room {
            Some(room) => (Sort::List, room.num_permits()),
            None if is_output(&message) => (Sort::Output, bytes_of(&message)),
            None => (Sort::Word, bytes_of(&message)),
        };
        self.wait(|state| {
            if state.is_ended || !(state.is_attached || state.keeps) {
                return Some(Err(Unheard));
            }
            let waiting = state.first + state.messages.len() as u64 - state.next;
            let has_room = match sort {
                _ if !state.keeps => true,
                Sort::Output => state.held_bytes + size <= HELD_BYTES || state.held_bytes == 0,
                Sort::Word => state.word_bytes < WORD_BYTES,
                Sort::List => true,
            };
            ((waiting < QUEUE || !state.is_attached) && has_room).then_some(Ok(()))
        })
        .await?;
        let charge = match sort {
            Sort::List => room,
            Sort::Word if self.keeps() => None,
            _ => self.charge(size).await?,
        };
        let mut state = self.lock();
        *state.bytes_held(sort) += size;
        state.messages.push_back(Queued { message, sort, bytes: size, charge });
        state.wake();
        Ok(())
    }

    /// Waits until there is room on the account, or for a kept run in its own part, or no client is
    /// left.
    async fn charge(&self, bytes: usize) -> Result<Option<OwnedSemaphorePermit>, Unheard> {
        let Some(account) = &self.account else { return Ok(None) };
        // A message larger than an account takes all of it.
        let charged = u32::try_from(bytes.min(LEAST_OF_ONE)).unwrap_or(u32::MAX);
        let without =
            |state: &OutboxState| match state.is_ended || !(state.is_attached || state.keeps) {
                true => Some(Err(Unheard)),
                false => {
                    (state.keeps && state.held_bytes + bytes <= OWN_HELD_BYTES).then_some(Ok(None))
                }
            };
        tokio::select! {
            biased;
            own = self.wait(without) => own,
            // The semaphore is never closed.
            charge = account.clone().acquire_many_owned(charged) => Ok(charge.ok()),
        }
    }

    /// Waits until no client is attached.
    pub async fn detached(&self) {
        self.wait(|state| (!state.is_attached).then_some(())).await;
    }

    /// The first client's messages.
    pub fn attach(self: &Arc<Self>) -> Messages {
        self.next_client(None)
    }

    /// The messages from number `received` on, for a further client; `None` if they are gone.
    pub fn resume(self: &Arc<Self>, received: u64) -> Option<Messages> {
        {
            let mut state = self.lock();
            if received < state.first || received > state.next {
                return None;
            }
            state.next = received;
        }
        Some(self.next_client(Some(Ok(output_of(run_output::Kind::Resumed(Resumed {}))))))
    }

    /// Acknowledges so many messages.
    pub fn received(&self, count: u64) {
        let mut state = self.lock();
        while state.first < count.min(state.next) {
            state.pop();
            state.first += 1;
        }
        drop(state);
        self.changed.notify_waiters();
    }

    /// No further message comes; queued ones are still sent.
    pub fn end(&self) {
        let mut state = self.lock();
        state.is_ended = true;
        if state.keeps {
            // Ended runs have a bound of their own (`kept`), and no client acknowledges their
            // messages.
            state.messages.iter_mut().for_each(|queued| drop(queued.charge.take()));
        }
        state.wake();
        drop(state);
        self.changed.notify_waiters();
    }

    /// Bytes of all queued messages.
    pub fn held_bytes(&self) -> usize {
        let state = self.lock();
        state.held_bytes + state.word_bytes + state.list_bytes
    }

    fn next_client(self: &Arc<Self>, greeting: Option<Message>) -> Messages {
        let mut state = self.lock();
        state.client += 1;
        state.is_attached = true;
        // Ends the stream of the client before.
        state.wake();
        Messages { outbox: self.clone(), client: state.client, greeting, room: None, untaken: None }
    }

    async fn wait<T>(&self, mut look: impl FnMut(&OutboxState) -> Option<T>) -> T {
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            // From now on no change is missed.
            changed.as_mut().enable();
            if let Some(found) = look(&self.lock()) {
                return found;
            }
            changed.await;
        }
    }

    fn lock(&self) -> MutexGuard<'_, OutboxState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn bytes_of(message: &Message) -> usize {
    let content = match message {
        Ok(RunOutput { kind: Some(run_output::Kind::Chunk(chunk)) }) => chunk.data.len(),
        Ok(message) => message.encoded_len(),
        Err(status) => status.message().len(),
    };
    MESSAGE_BYTES + content
}

fn is_output(message: &Message) -> bool {
    matches!(message, Ok(RunOutput { kind: Some(run_output::Kind::Chunk(_)) }))
}

impl OutboxState {
    fn pop(&mut self) -> Option<Message> {
        let Queued { message, sort, bytes, .. } = self.messages.pop_front()?;
        *self.bytes_held(sort) -= bytes;
        Some(message)
    }

    fn bytes_held(&mut self, sort: Sort) -> &mut usize {
        match sort {
            Sort::Output => &mut self.held_bytes,
            Sort::Word => &mut self.word_bytes,
            Sort::List => &mut self.list_bytes,
        }
    }

    fn wake(&mut self) {
        self.waker.take().into_iter().for_each(Waker::wake);
    }
}

/// One client's messages.
pub struct Messages {
    outbox: Arc<Outbox>,
    client: u64,
    greeting: Option<Message>,
    /// Pending reservation for a large frame.
    room: Option<Acquire>,
    /// Permit of the last frame: none follows before HTTP/2 has taken it.
    untaken: Option<OwnedSemaphorePermit>,
}

impl Messages {
    /// One message, for a call without a run.
    pub fn only(message: Message) -> Self {
        let outbox = Outbox::of_one_client(None);
        outbox.end();
        outbox.next_client(Some(message))
    }
}

impl Messages {
    /// Reserves room for a message's encoded form, if that is large.
    fn poll_room(&mut self, queued: &Queued, context: &mut Context<'_>) -> Poll<()> {
        let Some(frames) =
            self.outbox.frames.as_ref().filter(|_| matches!(queued.sort, Sort::List))
        else {
            return Poll::Ready(());
        };
        let room = self.room.get_or_insert_with(|| {
            let bytes = queued.message.as_ref().map_or(0, RunOutput::encoded_len).min(LEAST_OF_ONE);
            Box::pin(frames.clone().acquire_many_owned(u32::try_from(bytes).unwrap_or(u32::MAX)))
        });
        // The semaphore is never closed.
        self.untaken = ready!(room.as_mut().poll(context)).ok();
        self.room = None;
        Poll::Ready(())
    }
}

impl Stream for Messages {
    type Item = Message;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Message>> {
        self.untaken = None;
        if let Some(greeting) = self.greeting.take() {
            return Poll::Ready(Some(greeting));
        }
        let outbox = self.outbox.clone();
        let mut state = outbox.lock();
        if state.client != self.client {
            self.room = None;
            return Poll::Ready(None);
        }
        let at = usize::try_from(state.next - state.first).unwrap_or(usize::MAX);
        if let Some(queued) = state.messages.get(at)
            && self.poll_room(queued, context).is_pending()
        {
            // Another client may come meanwhile.
            state.waker = Some(context.waker().clone());
            return Poll::Pending;
        }
        let message = if state.keeps {
            state.messages.get(at).map(|queued| queued.message.clone())
        } else {
            let message = state.pop();
            state.first += u64::from(message.is_some());
            message
        };
        match message {
            Some(message) => {
                state.next += 1;
                drop(state);
                outbox.changed.notify_waiters();
                Poll::Ready(Some(message))
            }
            None if state.is_ended => Poll::Ready(None),
            None => {
                state.waker = Some(context.waker().clone());
                Poll::Pending
            }
        }
    }
}

impl Drop for Messages {
    fn drop(&mut self) {
        let mut state = self.outbox.lock();
        if state.client == self.client {
            state.is_attached = false;
            if !state.keeps {
                while state.pop().is_some() {}
            }
            drop(state);
            self.outbox.changed.notify_waiters();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use posh_proto::executor::{ChangedDirectory, Chunk, Exited};
    use tokio_stream::StreamExt as _;

    use super::*;

    fn account() -> Arc<Semaphore> {
        Arc::new(Semaphore::new(LEAST_OF_ONE))
    }

    fn chunk(stream: u32) -> Message {
        Ok(output_of(run_output::Kind::Chunk(Chunk { stream, data: vec![0; 10].into() })))
    }

    async fn streams(messages: &mut Messages, count: usize) -> Vec<u32> {
        let mut seen = Vec::new();
        while seen.len() < count {
            match messages.next().await {
                Some(Ok(RunOutput { kind: Some(run_output::Kind::Chunk(chunk)) })) => {
                    seen.push(chunk.stream)
                }
                Some(_) => {}
                None => break,
            }
        }
        seen
    }

    #[tokio::test]
    async fn what_the_clients_of_one_identity_do_not_take_has_one_account_also_beyond_the_runs_ends()
     {
        let account = Arc::new(Semaphore::new(3 * (MESSAGE_BYTES + 10)));
        let outboxes = [(); 3].map(|()| Outbox::of_one_client(Some(account.clone())));
        let mut clients = outboxes.each_ref().map(Outbox::attach);
        let [first, second, third] = &outboxes;
        first.send(chunk(0)).await.unwrap();
        first.send(chunk(1)).await.unwrap();
        first.end();
        second.send(chunk(2)).await.unwrap();
        let patience = Duration::from_millis(20);
        assert!(tokio::time::timeout(patience, third.send(chunk(3))).await.is_err());
        // One message is taken, and another one fits.
        assert_eq!(streams(&mut clients[0], 1).await, [0]);
        third.send(chunk(3)).await.unwrap();
        assert!(tokio::time::timeout(patience, third.send(chunk(4))).await.is_err());
        let [first_client, ..] = clients;
        drop(first_client);
        assert!(account.available_permits() > 0);
    }

    #[tokio::test]
    async fn who_waits_for_the_account_hears_that_the_client_is_gone() {
        let account = Arc::new(Semaphore::new(0));
        let outbox = Outbox::of_one_client(Some(account));
        let client = outbox.attach();
        let (sent, ()) = tokio::join!(outbox.send(chunk(0)), async {
            tokio::task::yield_now().await;
            drop(client);
        });
        assert!(sent.is_err());
    }

    #[tokio::test]
    async fn a_further_client_goes_on_where_the_first_ended() {
        let outbox = Outbox::kept(account());
        let mut first = outbox.attach();
        for stream in 0..3 {
            outbox.send(chunk(stream)).await.unwrap();
        }
        assert_eq!(streams(&mut first, 3).await, [0, 1, 2]);
        outbox.received(1);
        drop(first);
        outbox.detached().await;
        // Without a client nothing waits.
        for stream in 3..20 {
            outbox.send(chunk(stream)).await.unwrap();
        }
        assert_eq!(outbox.held_bytes(), 19 * (MESSAGE_BYTES + 10));
        outbox.end();
        assert!(outbox.resume(0).is_none() && outbox.resume(4).is_none());
        let mut second = outbox.resume(2).unwrap();
        assert_eq!(streams(&mut second, 100).await, (2..20).collect::<Vec<_>>());
        // Again, from the last acknowledged message.
        let mut third = outbox.resume(19).unwrap();
        assert_eq!(streams(&mut third, 100).await, [19]);
        assert!(second.next().await.is_none());
    }

    #[tokio::test]
    async fn a_list_of_changes_is_encoded_for_one_client_at_a_time_where_there_is_room_for_one() {
        let (queued, frames) = (account(), Arc::new(Semaphore::new(1 << 20)));
        let outbox = Outbox::of_run(true, queued.clone(), frames.clone());
        let removed = vec![vec![b'n'; 100].into(); 9000];
        let list = vec![ChangedDirectory { removed, ..ChangedDirectory::default() }];
        let exited = Exited { changed_directories: list, ..Exited::default() };
        let room = queued.clone().try_acquire_many_owned(1 << 20).unwrap();
        outbox
            .send_within(Ok(output_of(run_output::Kind::Exited(exited))), Some(room))
            .await
            .unwrap();
        // A list does not count as output: there is as much room for that as before.
        outbox.send(chunk(1)).await.unwrap();
        assert_eq!(outbox.held_bytes(), (1 << 20) + MESSAGE_BYTES + 10);
        let is_list = |message: Option<Message>| {
            matches!(message, Some(Ok(RunOutput { kind: Some(run_output::Kind::Exited(_)) })))
        };
        let mut first = outbox.attach();
        assert!(is_list(first.next().await));
        assert!(frames.available_permits() < 1 << 18);
        // The client leaves that untaken, and reconnects.
        let mut second = outbox.resume(0).unwrap();
        assert!(matches!(
            second.next().await,
            Some(Ok(RunOutput { kind: Some(run_output::Kind::Resumed(_)) }))
        ));
        assert!(tokio::time::timeout(Duration::from_millis(20), second.next()).await.is_err());
        drop(first);
        assert!(is_list(second.next().await));
        assert_eq!(streams(&mut second, 1).await, [1]);
        assert_eq!(frames.available_permits(), 1 << 20);
        outbox.received(1);
        assert_eq!(queued.available_permits(), LEAST_OF_ONE);
    }

    #[tokio::test]
    async fn nothing_is_kept_unasked() {
        let outbox = Outbox::of_one_client(None);
        let mut messages = outbox.attach();
        outbox.send(chunk(1)).await.unwrap();
        assert_eq!(streams(&mut messages, 1).await, [1]);
        assert_eq!(outbox.held_bytes(), 0);
        drop(messages);
        outbox.detached().await;
        assert!(outbox.send(chunk(2)).await.is_err());
    }

    #[tokio::test]
    async fn what_is_not_acknowledged_has_a_bound() {
        const CHUNK_BYTES: usize = KEPT_CHUNK_BYTES;
        let outbox = Outbox::kept(account());
        let large = || {
            Ok(output_of(run_output::Kind::Chunk(Chunk {
                stream: 1,
                data: vec![0; CHUNK_BYTES].into(),
            })))
        };
        let mut sent = 0;
        while let Ok(done) =
            tokio::time::timeout(Duration::from_millis(50), outbox.send(large())).await
        {
            done.unwrap();
            sent += 1;
        }
        assert_eq!(sent, HELD_BYTES / (CHUNK_BYTES + MESSAGE_BYTES));
        // A status overtakes waiting output, and an acknowledgement makes room.
        outbox.send(Ok(output_of(run_output::Kind::End(1)))).await.unwrap();
        let _messages = outbox.resume(0).unwrap();
        let mut messages = outbox.attach();
        assert_eq!(streams(&mut messages, 2).await.len(), 2);
        outbox.received(2);
        assert!(outbox.held_bytes() < HELD_BYTES);
    }

    #[tokio::test]
    async fn a_sender_waits_for_room() {
        let outbox = Outbox::of_one_client(None);
        let mut messages = outbox.attach();
        let sender = tokio::spawn({
            let outbox = outbox.clone();
            async move {
                for stream in 0..50 {
                    outbox.send(chunk(stream)).await.unwrap();
                }
                outbox.end();
            }
        });
        assert_eq!(streams(&mut messages, 100).await, (0..50).collect::<Vec<_>>());
        sender.await.unwrap();
    }
}
