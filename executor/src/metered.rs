//! Metering of request and answer bytes. An incomplete message is held by its call, on the account
//! of its sender: its length is reserved as soon as it is known, and without room nothing more of
//! the call is read until there is some. So the memory of incomplete messages is bounded for each
//! account, HTTP/2's own windows aside, and one identity's incomplete messages never wait for
//! another's. A message that isn't complete in time ends its call.
//!
//! tonic reads the messages of a stream into one buffer, which stays as large as the largest of
//! them until the stream ends. So a stream keeps a charge for that, apart from the incomplete
//! messages of unary calls ([`Largest`]).
//!
//! Answers are metered too: a call stays among its identity's open calls until its answer was
//! taken, not only until it was made. A frame of an answer is on the caller's account until HTTP/2
//! asks for the next one, which it does when the peer's window has room for the frames before;
//! where the account has no room, the answer waits. So untaken answers are bounded for each
//! identity, whatever call they belong to.

use std::{
    any::Any,
    collections::HashMap,
    future::Future as _,
    pin::Pin,
    sync::{Arc, Mutex},
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use http_body::{Frame, SizeHint};
use posh_proto::codec::VOLUME_BYTES;
use tokio::{
    sync::{AcquireError, OwnedSemaphorePermit, Semaphore},
    time::{Instant, Sleep, sleep_until},
};
use tonic::{Response, Status, body::Body, codegen::http};
use tower::{Layer, Service};

use crate::{admission::Admission, load::CallShare};

/// Unfinished messages of all accounts together, divided among them: half of an executor's 256 MiB.
const UNFINISHED_BYTES: usize = 128 << 20;

/// The largest messages of request streams, likewise.
const STREAM_BYTES: usize = 64 << 20;

/// Bytes of each stream without a charge: tonic's buffer has them from the beginning.
const STREAM_FREE_BYTES: usize = 8 << 10;

/// Messages of runs in their queues, likewise. Apart from `UNTAKEN_BYTES`: queued messages wait for
/// those.
const QUEUED_BYTES: usize = 64 << 20;

/// Frames of answers that were not taken, likewise.
const UNTAKEN_BYTES: usize = 64 << 20;

/// Permits of the messages of a unary call. They stay on the account until the request has ended
/// and its handler, which charges the bytes elsewhere, drops this.
#[derive(Debug, Clone, Default)]
pub struct Arrived(Arc<Mutex<Vec<OwnedSemaphorePermit>>>);

impl Arrived {
    /// Memory of messages whose fields take so many bytes: they may have had more on the wire, in
    /// varints that are longer than necessary.
    pub fn holds(&self, fields_bytes: usize) -> usize {
        let on_the_wire = self
            .0
            .lock()
            .expect("not poisoned")
            .iter()
            .map(OwnedSemaphorePermit::num_permits)
            .sum();
        fields_bytes.max(on_the_wire)
    }
}

/// The charge for the largest message that a request stream has brought, beyond
/// [`STREAM_FREE_BYTES`], until the stream is gone.
#[derive(Debug, Clone)]
pub struct Largest(Arc<Mutex<StreamCharge>>);

#[derive(Debug)]
struct StreamCharge {
    account: Arc<Semaphore>,
    permit: Option<OwnedSemaphorePermit>,
    /// Bytes of the largest message.
    largest: usize,
    /// Messages up to this size have room otherwise.
    covered: usize,
}

impl StreamCharge {
    /// Bytes that a message of that length needs beyond what the stream has.
    fn missing(&self, length: usize) -> u32 {
        let held = self.permit.as_ref().map_or(0, OwnedSemaphorePermit::num_permits);
        if length <= self.covered.max(held) {
            0
        } else {
            u32::try_from(length - held).unwrap_or(u32::MAX)
        }
    }

    fn add(&mut self, permit: OwnedSemaphorePermit) {
        match &mut self.permit {
            Some(held) => held.merge(permit),
            None => self.permit = Some(permit),
        }
    }
}

impl Largest {
    /// On this account of streams.
    pub fn on(account: Arc<Semaphore>) -> Self {
        Self(Arc::new(Mutex::new(StreamCharge {
            account,
            permit: None,
            largest: 0,
            covered: STREAM_FREE_BYTES,
        })))
    }

    /// From now on, messages up to that size are covered by what the call was admitted with.
    pub fn cover(&self, bytes: usize) {
        let mut stream = self.0.lock().expect("not poisoned");
        stream.covered = bytes;
        if stream.largest <= bytes {
            stream.permit = None;
        }
    }

    /// Ends [`Self::cover`]. False: the account has no room for it, and the stream must end.
    pub fn uncover(&self) -> bool {
        let mut stream = self.0.lock().expect("not poisoned");
        stream.covered = STREAM_FREE_BYTES;
        match stream.missing(stream.largest) {
            0 => true,
            missing => {
                let permit = stream.account.clone().try_acquire_many_owned(missing).ok();
                let has_room = permit.is_some();
                permit.into_iter().for_each(|permit| stream.add(permit));
                has_room
            }
        }
    }
}

/// The account that a request's messages are charged to.
pub enum ChargedAccount {
    /// All messages of a unary call, until the handler drops it.
    Unary(Arc<Semaphore>, Arrived),
    /// The largest message of a stream.
    Stream(Largest),
}

/// Bounds of one account: at most the data that a volume has in flight, and at least two of the
/// largest messages.
const MOST_OF_ONE: usize = 32 << 20;
pub const LEAST_OF_ONE: usize = 2 * VOLUME_BYTES;

/// Time from a message's first byte to its last, the wait for room included, and from a call's
/// beginning to the end of its first message: the largest takes 34 s at 1 Mbit/s.
const MESSAGE_TIMEOUT: Duration = Duration::from_secs(60);

/// The head of a message: a flag and its length.
const HEAD_BYTES: usize = 5;

/// Waits for room on an account.
pub type Acquire = Pin<Box<dyn Future<Output = Result<OwnedSemaphorePermit, AcquireError>> + Send>>;

/// Accounts of bytes, by identity. Callers without identity share one account.
#[derive(Debug)]
pub struct Accounts {
    of_one: usize,
    accounts: Mutex<HashMap<Option<String>, Arc<Semaphore>>>,
}

impl Accounts {
    /// Accounts of unfinished messages, for so many identities.
    pub fn of_unfinished(identities: usize) -> Self {
        Self::sharing(UNFINISHED_BYTES, identities)
    }

    /// Accounts of request streams, for so many identities.
    pub fn of_streams(identities: usize) -> Self {
        let of_one = (STREAM_BYTES / identities.max(1)).clamp(2 * LEAST_OF_ONE, MOST_OF_ONE);
        Self { of_one, accounts: Mutex::default() }
    }

    /// Accounts of runs' messages that HTTP/2 has not asked for, for so many identities.
    pub fn of_queued(identities: usize) -> Self {
        Self::sharing(QUEUED_BYTES, identities)
    }

    /// Accounts of untaken frames, for so many identities.
    pub fn of_untaken(identities: usize) -> Self {
        Self::sharing(UNTAKEN_BYTES, identities)
    }

    fn sharing(bytes: usize, identities: usize) -> Self {
        let of_one = (bytes / identities.max(1)).clamp(LEAST_OF_ONE, MOST_OF_ONE);
        Self { of_one, accounts: Mutex::default() }
    }

    /// One identity's account.
    pub fn account(&self, identity: Option<&String>) -> Arc<Semaphore> {
        let mut accounts = self.accounts.lock().expect("not poisoned");
        accounts
            .entry(identity.cloned())
            .or_insert_with(|| Arc::new(Semaphore::new(self.of_one)))
            .clone()
    }
}

/// A request's body; ends the call if that can't be served.
pub struct Metered {
    body: Body,
    charge: ChargedAccount,
    refused: Option<Status>,
    /// Bytes received and not passed on.
    pending: Bytes,
    head: Vec<u8>,
    /// Missing bytes of the current message.
    left: usize,
    acquire: Option<Acquire>,
    deadline: Option<Pin<Box<Sleep>>>,
    /// The call's place among the open ones: a call is open until both directions have ended.
    _share: Option<Arc<CallShare>>,
}

impl Metered {
    /// Charged to `charge`; a refused call ends with the status `refused`.
    pub fn new(
        body: Body,
        charge: ChargedAccount,
        refused: Option<Status>,
        share: Option<Arc<CallShare>>,
    ) -> Self {
        let deadline = Some(Box::pin(sleep_until(Instant::now() + MESSAGE_TIMEOUT)));
        let (pending, head) = (Bytes::new(), Vec::with_capacity(HEAD_BYTES));
        Self {
            body,
            charge,
            refused,
            pending,
            head,
            left: 0,
            acquire: None,
            deadline,
            _share: share,
        }
    }

    /// Number of received bytes that may be passed on; reserves room for the last message.
    fn advance(&mut self) -> usize {
        let mut at = 0;
        while at < self.pending.len() && self.acquire.is_none() {
            let rest = self.pending.len() - at;
            if self.left > 0 {
                let taken = self.left.min(rest);
                at += taken;
                self.left -= taken;
                if self.left == 0 {
                    self.finish();
                }
                continue;
            }
            let taken = (HEAD_BYTES - self.head.len()).min(rest);
            self.head.extend_from_slice(&self.pending[at..at + taken]);
            at += taken;
            if self.head.len() == HEAD_BYTES {
                self.begin();
            }
        }
        at
    }

    /// Handles a complete head.
    fn begin(&mut self) {
        let length = u32::from_be_bytes([self.head[1], self.head[2], self.head[3], self.head[4]]);
        self.left = usize::try_from(length).unwrap_or(usize::MAX);
        self.head.clear();
        if self.left == 0 {
            return self.finish();
        }
        self.deadline
            .get_or_insert_with(|| Box::pin(sleep_until(Instant::now() + MESSAGE_TIMEOUT)));
        // Larger messages are refused by their head, without their bytes.
        if self.left > VOLUME_BYTES {
            return;
        }
        let (account, missing) = match &self.charge {
            ChargedAccount::Unary(account, _) => (account.clone(), length),
            ChargedAccount::Stream(Largest(stream)) => {
                let mut stream = stream.lock().expect("not poisoned");
                stream.largest = stream.largest.max(self.left);
                (stream.account.clone(), stream.missing(self.left))
            }
        };
        if missing > 0 {
            self.acquire = Some(Box::pin(account.acquire_many_owned(missing)));
        }
    }

    /// Keeps the permit of the message whose head was read.
    fn keep(&self, permit: OwnedSemaphorePermit) {
        match &self.charge {
            ChargedAccount::Unary(_, Arrived(arrived)) => {
                arrived.lock().expect("not poisoned").push(permit)
            }
            ChargedAccount::Stream(Largest(stream)) => {
                stream.lock().expect("not poisoned").add(permit)
            }
        }
    }

    fn finish(&mut self) {
        // After a unary call's message more may come, unwanted: the timeout runs until the call's
        // end.
        if let ChargedAccount::Stream(_) = self.charge {
            self.deadline = None;
        }
    }
}

impl http_body::Body for Metered {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = self.get_mut();
        if let Some(status) = this.refused.take() {
            return Poll::Ready(Some(Err(status)));
        }
        loop {
            if this.deadline.as_mut().is_some_and(|deadline| deadline.as_mut().poll(cx).is_ready())
            {
                let message = format!(
                    "a message did not come to its end within {} s",
                    MESSAGE_TIMEOUT.as_secs()
                );
                return Poll::Ready(Some(Err(Status::deadline_exceeded(message))));
            }
            if let Some(acquire) = &mut this.acquire {
                let permit = ready!(acquire.as_mut().poll(cx));
                this.acquire = None;
                // The semaphore is never closed.
                permit.into_iter().for_each(|permit| this.keep(permit));
            }
            let ready = this.advance();
            if ready > 0 {
                return Poll::Ready(Some(Ok(Frame::data(this.pending.split_to(ready)))));
            }
            match ready!(Pin::new(&mut this.body).poll_frame(cx)) {
                None => return Poll::Ready(None),
                Some(Err(status)) => return Poll::Ready(Some(Err(status))),
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => this.pending = data,
                    Err(trailers) => return Poll::Ready(Some(Ok(trailers))),
                },
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.refused.is_none() && self.pending.is_empty() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::default()
    }
}

/// Meters calls, from the request's first byte until the answer's last one was taken.
#[derive(Clone)]
pub struct MeterLayer(pub Admission);

/// See [`MeterLayer`].
#[derive(Clone)]
pub struct Meter<S> {
    admission: Admission,
    inner: S,
}

impl<S> Layer<S> for MeterLayer {
    type Service = Meter<S>;

    fn layer(&self, inner: S) -> Meter<S> {
        Meter { admission: self.0.clone(), inner }
    }
}

impl<S> Service<http::Request<Body>> for Meter<S>
where
    S: Service<http::Request<Body>, Response = http::Response<Body>>,
    S::Future: Send + 'static,
{
    type Response = http::Response<Body>;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, S::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let (request, charged) = self.admission.meter(request);
        let answering = self.inner.call(request);
        Box::pin(async move {
            let mut answer = answering.await?;
            let kept = answer.extensions_mut().remove::<KeptUntilSent>();
            Ok(answer.map(|body| Body::new(Answer::new(body, charged, kept))))
        })
    }
}

/// Something that is released with the answer.
#[derive(Clone)]
struct KeptUntilSent(
    #[expect(dead_code, reason = "given back with the answer")] Arc<dyn Any + Send + Sync>,
);

/// Keeps `charge` until the answer has gone out: until then HTTP/2 holds the answer, for as long as
/// the caller leaves its window closed.
pub fn kept_until_sent<T>(
    mut response: Response<T>,
    charge: impl Send + Sync + 'static,
) -> Response<T> {
    response.extensions_mut().insert(KeptUntilSent(Arc::new(charge)));
    response
}

/// The accounts that an answer is charged to. A stranger has none: its connection is bounded as a
/// whole.
#[derive(Default)]
pub struct Charged {
    /// Its place among the open calls, where it has one.
    pub share: Option<Arc<CallShare>>,
    /// Frames that were not taken.
    pub untaken: Option<Arc<Semaphore>>,
}

/// Room for the next frame, of a chunk or of several small messages. Reserved before the frame is
/// made, since a waiting frame takes as much memory as an untaken one.
const FRAME_BYTES: u32 = 288 << 10;

/// An answer's body. HTTP/2 asks for the next frame, or drops the body, when the frames before have
/// a place in the peer's window.
struct Answer {
    body: Body,
    account: Option<Arc<Semaphore>>,
    /// Pending reservation for the next frame.
    room: Option<Acquire>,
    /// A frame larger than [`FRAME_BYTES`], and its pending reservation. These are few: their calls
    /// are charged for them.
    large: Option<(Frame<Bytes>, Acquire)>,
    /// Permit of the last frame.
    untaken: Option<OwnedSemaphorePermit>,
    _share: Option<Arc<CallShare>>,
    _kept: Option<KeptUntilSent>,
}

impl Answer {
    fn new(
        body: Body,
        Charged { share, untaken: account }: Charged,
        kept: Option<KeptUntilSent>,
    ) -> Self {
        Self { body, account, room: None, large: None, untaken: None, _share: share, _kept: kept }
    }

    /// Room is held only while the body is asked for a frame: without a frame to send, nothing is
    /// kept.
    fn poll_room(
        &mut self,
        account: &Arc<Semaphore>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<OwnedSemaphorePermit>> {
        let room = self
            .room
            .get_or_insert_with(|| Box::pin(account.clone().acquire_many_owned(FRAME_BYTES)));
        // The semaphore is never closed.
        let permit = ready!(room.as_mut().poll(cx)).ok();
        self.room = None;
        Poll::Ready(permit)
    }
}

impl http_body::Body for Answer {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = self.get_mut();
        this.untaken = None;
        let Some(account) = this.account.clone() else {
            return Pin::new(&mut this.body).poll_frame(cx);
        };
        if this.large.is_none() {
            let mut room = ready!(this.poll_room(&account, cx));
            let frame = match ready!(Pin::new(&mut this.body).poll_frame(cx)) {
                Some(Ok(frame)) => frame,
                end => return Poll::Ready(end),
            };
            let bytes = frame.data_ref().map_or(0, Bytes::len);
            if bytes <= FRAME_BYTES as usize {
                drop(room.as_mut().and_then(|room| room.split(FRAME_BYTES as usize - bytes)));
                this.untaken = room;
                return Poll::Ready(Some(Ok(frame)));
            }
            // Reserved at once, since a wait for more while holding some could deadlock. A frame
            // larger than an account takes all of it.
            drop(room);
            let whole = u32::try_from(bytes.min(LEAST_OF_ONE)).unwrap_or(u32::MAX);
            this.large = Some((frame, Box::pin(account.acquire_many_owned(whole))));
        }
        let Some((_, room)) = &mut this.large else { return Poll::Ready(None) };
        this.untaken = ready!(room.as_mut().poll(cx)).ok();
        Poll::Ready(this.large.take().map(|(frame, _)| Ok(frame)))
    }

    fn is_end_stream(&self) -> bool {
        self.large.is_none() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        if self.large.is_none() { self.body.size_hint() } else { SizeHint::default() }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use http_body_util::{BodyExt as _, StreamBody};
    use tokio_stream::{StreamExt as _, wrappers::UnboundedReceiverStream};

    use super::*;

    fn message(length: u32) -> Vec<u8> {
        let mut message = vec![0];
        message.extend(length.to_be_bytes());
        message.resize(message.len() + usize::try_from(length).unwrap(), 7);
        message
    }

    fn unary(account: &Arc<Semaphore>) -> ChargedAccount {
        ChargedAccount::Unary(account.clone(), Arrived::default())
    }

    fn stream(account: &Arc<Semaphore>) -> ChargedAccount {
        ChargedAccount::Stream(Largest::on(account.clone()))
    }

    fn metered(charge: ChargedAccount) -> (tokio::sync::mpsc::UnboundedSender<Vec<u8>>, Metered) {
        let (sender, receiver) = tokio::sync::mpsc::unbounded_channel::<Vec<u8>>();
        let frames = UnboundedReceiverStream::new(receiver)
            .map(|data| Ok::<_, Status>(Frame::data(Bytes::from(data))));
        (sender, Metered::new(Body::new(StreamBody::new(frames)), charge, None, None))
    }

    #[tokio::test]
    async fn bytes_go_through_however_they_are_cut() {
        let whole: Vec<u8> = [0, 1, 900, 0, 70_000].into_iter().flat_map(message).collect();
        for size in [1, 4, 7, 1000, 1 << 20] {
            let account = Arc::new(Semaphore::new(LEAST_OF_ONE));
            let (sender, body) = metered(stream(&account));
            whole.chunks(size).for_each(|piece| sender.send(piece.to_vec()).unwrap());
            drop(sender);
            assert_eq!(body.collect().await.unwrap().to_bytes(), whole, "{size}");
            assert_eq!(account.available_permits(), LEAST_OF_ONE);
        }
    }

    #[tokio::test]
    async fn a_message_that_has_come_stays_on_the_account_while_it_is_held() {
        let account = Arc::new(Semaphore::new(LEAST_OF_ONE));
        let arrived = Arrived::default();
        let (sender, body) = metered(ChargedAccount::Unary(account.clone(), arrived.clone()));
        sender.send(message(70_000)).unwrap();
        drop(sender);
        assert_eq!(body.collect().await.unwrap().to_bytes().len(), HEAD_BYTES + 70_000);
        assert_eq!(account.available_permits(), LEAST_OF_ONE - 70_000);
        assert_eq!(
            [0, 500, 80_000].map(|fields_bytes| arrived.holds(fields_bytes)),
            [70_000, 70_000, 80_000]
        );
        drop(arrived);
        assert_eq!(account.available_permits(), LEAST_OF_ONE);
    }

    #[tokio::test]
    async fn a_call_that_does_not_end_holds_its_messages_on_the_account_and_ends_in_time() {
        let account = Arc::new(Semaphore::new(LEAST_OF_ONE));
        let (sender, mut body) = metered(unary(&account));
        sender.send([message(70_000), message(0), message(9)].concat()).unwrap();
        let mut passed = 0;
        while let Ok(Some(frame)) =
            tokio::time::timeout(Duration::from_millis(10), body.frame()).await
        {
            passed += frame.unwrap().into_data().unwrap().len();
        }
        assert_eq!(passed, 3 * HEAD_BYTES + 70_009);
        assert_eq!(account.available_permits(), LEAST_OF_ONE - 70_009);
        assert!(body.deadline.is_some());
        drop(body);
        assert_eq!(account.available_permits(), LEAST_OF_ONE);
    }

    #[tokio::test]
    async fn a_stream_is_charged_for_its_largest_message_until_it_ends() {
        let account = Arc::new(Semaphore::new(LEAST_OF_ONE));
        let largest = Largest::on(account.clone());
        let (sender, mut body) = metered(ChargedAccount::Stream(largest.clone()));
        let held = || LEAST_OF_ONE - account.available_permits();
        for (length, charged) in [(9, 0), (70_000, 70_000), (100, 70_000), (90_000, 90_000)] {
            sender.send(message(length)).unwrap();
            let mut passed = 0;
            while passed < HEAD_BYTES + usize::try_from(length).unwrap() {
                passed += body.frame().await.unwrap().unwrap().into_data().unwrap().len();
            }
            assert_eq!(held(), charged);
        }
        // The run of this stream was admitted with room for its messages.
        largest.cover(100_000);
        assert_eq!(held(), 0);
        assert!(largest.uncover());
        assert_eq!(held(), 90_000);
        largest.cover(100_000);
        let others =
            account.clone().try_acquire_many_owned(u32::try_from(LEAST_OF_ONE).unwrap()).unwrap();
        assert!(!largest.uncover());
        drop((others, largest, body));
        assert_eq!(held(), 0);
    }

    #[tokio::test]
    async fn streams_with_large_messages_hold_no_more_than_their_account() {
        let account = Arc::new(Semaphore::new(LEAST_OF_ONE));
        let mut open = Vec::new();
        for count in 0..10 {
            let (sender, mut body) = metered(stream(&account));
            sender.send(message(1 << 20)).unwrap();
            let mut passed = 0;
            while let Ok(Some(frame)) =
                tokio::time::timeout(Duration::from_millis(10), body.frame()).await
            {
                passed += frame.unwrap().into_data().unwrap().len();
            }
            assert_eq!(
                passed,
                if count < 8 { HEAD_BYTES + (1 << 20) } else { HEAD_BYTES },
                "{count}"
            );
            open.push((sender, body));
        }
        drop(open);
        assert_eq!(account.available_permits(), LEAST_OF_ONE);
    }

    /// An answer of two frames of that size, and how many have been made.
    fn answer(account: &Arc<Semaphore>, bytes: usize) -> (Answer, Arc<AtomicUsize>) {
        let made = Arc::new(AtomicUsize::new(0));
        let counted = made.clone();
        let frames = tokio_stream::iter(0..2).map(move |_| {
            counted.fetch_add(1, Ordering::Relaxed);
            Ok::<_, Status>(Frame::data(Bytes::from(vec![7; bytes])))
        });
        let charged = Charged { share: None, untaken: Some(account.clone()) };
        (Answer::new(Body::new(StreamBody::new(frames)), charged, None), made)
    }

    const SOON: Duration = Duration::from_millis(10);

    #[tokio::test]
    async fn answers_that_nobody_takes_hold_no_more_than_their_account_made_or_not() {
        const FRAME: usize = FRAME_BYTES as usize;
        let account = Arc::new(Semaphore::new(4 * FRAME));
        let mut answers: Vec<_> = (0..5).map(|_| answer(&account, FRAME)).collect();
        for (answer, _) in &mut answers[..4] {
            assert!(answer.frame().await.unwrap().is_ok());
        }
        let [(first, _), .., (last, made)] = &mut answers[..] else { panic!("five") };
        assert!(tokio::time::timeout(SOON, last.frame()).await.is_err());
        assert_eq!(made.load(Ordering::Relaxed), 0);
        // Each asks for the next frame once the one before was taken; the longest wait ends first.
        let (of_last, of_first) = tokio::join!(last.collect(), first.collect());
        assert_eq!(
            [of_last, of_first].map(|body| body.unwrap().to_bytes().len()),
            [2 * FRAME, FRAME]
        );
        drop(answers);
        assert_eq!(account.available_permits(), 4 * FRAME);
    }

    #[tokio::test]
    async fn answers_have_what_their_frames_have_and_keep_nothing_while_there_is_none() {
        let account = Arc::new(Semaphore::new(LEAST_OF_ONE));
        for bytes in [1, FRAME_BYTES as usize + 1, LEAST_OF_ONE, LEAST_OF_ONE + 1] {
            let (mut answer, _) = answer(&account, bytes);
            assert_eq!(answer.frame().await.unwrap().unwrap().into_data().unwrap().len(), bytes);
            assert_eq!(account.available_permits(), LEAST_OF_ONE - bytes.min(LEAST_OF_ONE));
            drop(answer);
        }
        let silent = StreamBody::new(tokio_stream::pending::<Result<Frame<Bytes>, Status>>());
        let charged = Charged { share: None, untaken: Some(account.clone()) };
        let mut silent = Answer::new(Body::new(silent), charged, None);
        assert!(tokio::time::timeout(SOON, silent.frame()).await.is_err());
        assert_eq!(account.available_permits(), LEAST_OF_ONE);
    }

    #[tokio::test]
    async fn unfinished_messages_hold_no_more_than_their_account() {
        let account = Arc::new(Semaphore::new(LEAST_OF_ONE));
        let half = message(u32::try_from(VOLUME_BYTES).unwrap())[..VOLUME_BYTES / 2].to_vec();
        let mut open = Vec::new();
        for count in 0..8 {
            let (sender, mut body) = metered(unary(&account));
            sender.send(half.clone()).unwrap();
            let mut passed = 0;
            while let Ok(Some(frame)) =
                tokio::time::timeout(Duration::from_millis(10), body.frame()).await
            {
                passed += frame.unwrap().into_data().unwrap().len();
            }
            // There is room for two of the largest; of the others only the head is passed on.
            assert_eq!(passed, if count < 2 { half.len() } else { HEAD_BYTES }, "{count}");
            open.push((sender, body));
        }
        // The timeout expires.
        open[0].1.deadline = Some(Box::pin(sleep_until(Instant::now())));
        let late = open[0].1.frame().await.unwrap().unwrap_err();
        assert_eq!(late.code(), tonic::Code::DeadlineExceeded);
        open.clear();
        assert_eq!(account.available_permits(), LEAST_OF_ONE);
    }
}
