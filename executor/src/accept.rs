//! From the listener to connections with known peers. Peers without proof have seats in a waiting
//! room of fixed size, for a short time, and may send little. There are three rooms, by a
//! connection's cost: a silent peer costs a socket, a handshake costs buffers of TLS, and a
//! stranger (without a valid certificate) those of HTTP/2, too. Seats are counted by source
//! address: when a room is full, the address with most seats loses its oldest. So ten thousand
//! silent connections cost a fixed amount of memory, and a flood from one address shortens the time
//! of that address alone; even there, silent peers take no seats from speaking ones.

use std::{
    cmp::Reverse,
    collections::{HashMap, VecDeque},
    io,
    net::{IpAddr, Shutdown, SocketAddr},
    os::fd::AsFd as _,
    pin::Pin,
    sync::{Arc, Mutex},
    task::{Context, Poll},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream},
    sync::{mpsc, oneshot},
    task::{JoinHandle, JoinSet},
    time::{Sleep, sleep, timeout},
};
use tokio_rustls::{TlsAcceptor, server::TlsStream};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::server::Connected;

use crate::{
    admission::{Admission, Denied},
    descriptors::DescriptorShares,
    load::ConnectionShare,
    runtimes::Runtimes,
    tls::serving::{Proof, Serving},
};

/// Seats of a room, and those of one source address: enough for a network behind one address that
/// reconnects all at once, and never the whole room.
#[derive(Debug, Clone, Copy)]
struct Seats {
    whole: usize,
    of_one: usize,
}

/// Peers that have sent nothing. Each costs a descriptor and 2 KB. At three thousand new ones in a
/// second, one address still has more than a second to begin.
const SILENT: Seats = Seats { whole: 8192, of_one: 4096 };

/// Peers in a handshake, and strangers after it, each have at most this part of the descriptors of
/// unproven peers; silent ones have the rest.
const SPEAKING_PART: usize = 16;

/// Peers in their handshake. Each costs up to 40 KB.
const SHAKING: Seats = Seats { whole: 1024, of_one: 512 };

/// Peers that have shaken hands without a valid certificate. Each costs up to 100 KB.
const STRANGERS: Seats = Seats { whole: 256, of_one: 128 };

/// Time from the connection to the first byte, and from there to the end of the handshake: four
/// round trips, on a bad link.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);

/// Time for an enrolment. A gateway with an invalid certificate gets the reason, and disconnects.
const STRANGER_TIMEOUT: Duration = Duration::from_secs(10);

/// Bytes that a stranger may send in that time: an enrolment has some 2 KB.
const STRANGER_BYTES: usize = 256 << 10;

/// Time from a revocation to the end of the connection: running work ends meanwhile, and reports
/// why.
const LAST_WORDS: Duration = Duration::from_secs(3);

/// Accepted connections that wait for the server to take them.
const QUEUE: usize = 64;

/// Pause when descriptors have run out (EMFILE): connections must end first.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The peer of a connection; in the extensions of every request.
#[derive(Debug, Clone)]
pub struct Peer {
    /// Its address, where it has one.
    pub address: Option<SocketAddr>,
    /// Its proof of identity.
    pub proof: Proof,
}

/// An accepted connection.
pub struct AcceptedConnection {
    stream: AcceptedStream,
    peer: Peer,
    /// Identity whose runtime serves it.
    identity: Option<String>,
    stranger: Option<Stranger>,
    _closing: Option<Closing>,
    _share: Option<ConnectionShare>,
}

/// Closes a connection when its identity is removed, whatever state the connection is in.
struct Closing(JoinHandle<()>);

enum AcceptedStream {
    Plain(TcpStream),
    Tls(Box<TlsStream<Socket>>),
}

/// A TCP socket that can move to the reactor of another runtime.
struct Socket(Option<TcpStream>);

/// Accepted connections without identity (plain text, strangers); those of identities go to the
/// identities' runtimes. Dropping this ends all handshakes.
pub struct IncomingConnections {
    accepted: ReceiverStream<io::Result<AcceptedConnection>>,
    _work: JoinSet<()>,
}

/// Passes accepted connections to their servers.
#[derive(Clone)]
struct Dispatch {
    common: mpsc::Sender<io::Result<AcceptedConnection>>,
    runtimes: Arc<Runtimes<AcceptedConnection>>,
}

impl IncomingConnections {
    /// Accepts on `listener`, with TLS if configured, for as long as this exists.
    pub fn new(
        listener: TcpListener,
        tls: Option<Arc<Serving>>,
        admission: Admission,
        runtimes: Arc<Runtimes<AcceptedConnection>>,
    ) -> Self {
        let (common, receiver) = mpsc::channel(QUEUE);
        let mut work = JoinSet::new();
        work.spawn(accept(listener, tls, admission, Dispatch { common, runtimes }));
        Self { accepted: ReceiverStream::new(receiver), _work: work }
    }
}

impl Dispatch {
    /// Waits while the server has no room for it.
    async fn send(&self, connection: AcceptedConnection) {
        match connection.identity.clone() {
            Some(identity) => self.runtimes.serve(&identity, connection).await,
            None => {
                // A failed send means that the server has ended.
                let _ = self.common.send(Ok(connection)).await;
            }
        }
    }
}

impl AcceptedConnection {
    /// Registers the socket with the current runtime.
    ///
    /// # Errors
    /// When the runtime has no room for another descriptor.
    pub fn adopt(mut self) -> io::Result<Self> {
        match &mut self.stream {
            AcceptedStream::Plain(_) => {}
            AcceptedStream::Tls(stream) => stream.get_mut().0.adopt()?,
        }
        Ok(self)
    }
}

impl Socket {
    fn stream(&self) -> &TcpStream {
        self.0.as_ref().expect("only `adopt` takes it, and puts it back")
    }

    fn stream_mut(&mut self) -> Pin<&mut TcpStream> {
        Pin::new(self.0.as_mut().expect("only `adopt` takes it, and puts it back"))
    }

    /// On an error the socket is dropped, and its holder must be, too.
    fn adopt(&mut self) -> io::Result<()> {
        let stream = self.0.take().expect("only `adopt` takes it, and puts it back");
        self.0 = Some(TcpStream::from_std(stream.into_std()?)?);
        Ok(())
    }
}

impl AsyncRead for Socket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.stream_mut().poll_read(cx, buffer)
    }
}

impl AsyncWrite for Socket {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.stream_mut().poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.stream_mut().poll_write_vectored(cx, parts)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream_mut().poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream_mut().poll_shutdown(cx)
    }
}

impl tokio_stream::Stream for IncomingConnections {
    type Item = io::Result<AcceptedConnection>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        Pin::new(&mut self.accepted).poll_next(cx)
    }
}

async fn accept(
    listener: TcpListener,
    tls: Option<Arc<Serving>>,
    admission: Admission,
    dispatch: Dispatch,
) {
    let rooms = Arc::new(Rooms::new());
    let mut handshakes = JoinSet::new();
    loop {
        // Reaps finished tasks, lest they pile up.
        while handshakes.try_join_next().is_some() {}
        let (stream, address) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection");
                sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let _ = stream.set_nodelay(true);
        match &tls {
            None => {
                // These peers can't be told apart: beyond the bound they are turned away.
                let Ok(share) = admission.connection(&Proof::NotAsked) else { continue };
                let peer = Peer { address: Some(address), proof: Proof::NotAsked };
                let connection = AcceptedConnection {
                    stream: AcceptedStream::Plain(stream),
                    peer,
                    identity: None,
                    stranger: None,
                    _closing: None,
                    _share: Some(share),
                };
                dispatch.send(connection).await;
            }
            Some(tls) => {
                let (tls, admission, dispatch) = (tls.clone(), admission.clone(), dispatch.clone());
                let rooms = rooms.clone();
                let silent = rooms.silent.enter(SeatUnit::of(address.ip()));
                handshakes.spawn(async move {
                    if first_word(&stream, silent).await.is_none() {
                        return;
                    }
                    if let Some(connection) =
                        shake_hands(&tls, stream, address, &rooms, &admission).await
                    {
                        dispatch.send(connection).await;
                    }
                });
            }
        }
    }
}

/// Waits for the first byte; `None` if the peer is gone, too slow, or has lost its seat.
async fn first_word(stream: &TcpStream, mut seat: Seat) -> Option<()> {
    let mut byte = [0];
    let said = tokio::select! {
        _ = &mut seat.lost => return None,
        said = timeout(HANDSHAKE_TIMEOUT, stream.peek(&mut byte)) => said,
    };
    // A peer that has hung up must not take a seat of the next room.
    matches!(said, Ok(Ok(1..))).then_some(())
}

/// Does the handshake and admits the peer; `None` if the connection is to be dropped.
async fn shake_hands(
    tls: &Serving,
    stream: TcpStream,
    address: SocketAddr,
    rooms: &Rooms,
    admission: &Admission,
) -> Option<AcceptedConnection> {
    let source = SeatUnit::of(address.ip());
    let acceptor = TlsAcceptor::from(tls.config.clone());
    let mut seat = rooms.shaking.enter(source);
    let shaken = tokio::select! {
        _ = &mut seat.lost => return None,
        shaken = timeout(HANDSHAKE_TIMEOUT, acceptor.accept(Socket(Some(stream)))) => shaken,
    };
    let stream = match shaken {
        Ok(Ok(stream)) => stream,
        Ok(Err(error)) => {
            tracing::debug!(%address, %error, "no handshake");
            return None;
        }
        Err(_) => return None,
    };
    let mut proof = tls.proof(stream.get_ref().1.peer_certificates());
    let (mut share, mut identity) = (None, None);
    if let Proof::Certificate(_) = proof {
        match admission.connection(&proof) {
            Ok(admitted) => {
                identity = admitted.identity().map(str::to_owned);
                share = Some(admitted);
            }
            Err(Denied(why)) => proof = Proof::Useless(why),
        }
    }
    let stranger = share.is_none().then(|| Stranger {
        seat: rooms.strangers.enter(source),
        timeout: Box::pin(sleep(STRANGER_TIMEOUT)),
        left_bytes: STRANGER_BYTES,
    });
    let closing = share
        .is_some()
        .then(|| Closing::of(stream.get_ref().0.stream(), admission.clone(), proof.clone()));
    let closing = match closing.transpose() {
        Ok(closing) => closing,
        Err(error) => {
            tracing::warn!(
                %address,
                %error,
                "a connection that could not be closed when it must be"
            );
            return None;
        }
    };
    let peer = Peer { address: Some(address), proof };
    let stream = AcceptedStream::Tls(Box::new(stream));
    Some(AcceptedConnection { stream, peer, identity, stranger, _closing: closing, _share: share })
}

impl Closing {
    fn of(stream: &TcpStream, admission: Admission, proof: Proof) -> io::Result<Self> {
        let socket = socket2::Socket::from(stream.as_fd().try_clone_to_owned()?);
        Ok(Self(tokio::spawn(async move {
            let _ = admission.removed(&proof).await;
            sleep(LAST_WORDS).await;
            let _ = socket.shutdown(Shutdown::Both);
        })))
    }
}

impl Drop for Closing {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Unit in which seats are counted: an IPv4 address, or the /64 network of an IPv6 host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SeatUnit(IpAddr);

impl SeatUnit {
    /// Of a connection from that address.
    #[must_use]
    pub fn of(address: IpAddr) -> Self {
        match address.to_canonical() {
            IpAddr::V6(address) => {
                let [a, b, c, d, ..] = address.segments();
                Self(IpAddr::from([a, b, c, d, 0, 0, 0, 0]))
            }
            address => Self(address),
        }
    }
}

/// Waiting rooms of peers that have proved nothing yet.
struct Rooms {
    silent: Arc<WaitingRoom>,
    shaking: Arc<WaitingRoom>,
    strangers: Arc<WaitingRoom>,
}

impl Rooms {
    fn new() -> Self {
        let descriptors = DescriptorShares::of_process().unproven;
        let [shaking, strangers] =
            [SHAKING, STRANGERS].map(|seats| seats.within(descriptors / SPEAKING_PART));
        let silent = SILENT.within(descriptors - shaking.whole - strangers.whole);
        let room = |seats| Arc::new(WaitingRoom::with(seats));
        Self { silent: room(silent), shaking: room(shaking), strangers: room(strangers) }
    }
}

impl Seats {
    /// At most so many.
    fn within(self, most: usize) -> Self {
        let whole = self.whole.min(most);
        Self { whole, of_one: self.of_one.min(whole / 2) }
    }
}

/// Seats of one kind.
struct WaitingRoom {
    seats: Seats,
    taken: Mutex<TakenSeats>,
}

#[derive(Default)]
struct TakenSeats {
    /// The oldest seats are in front.
    of: HashMap<SeatUnit, VecDeque<(u64, oneshot::Sender<()>)>>,
    count: usize,
    next: u64,
}

/// A seat in a room, until it is dropped or lost to another peer.
struct Seat {
    room: Arc<WaitingRoom>,
    source: SeatUnit,
    number: u64,
    /// Resolves when another peer takes the seat.
    lost: oneshot::Receiver<()>,
}

impl WaitingRoom {
    fn with(seats: Seats) -> Self {
        Self { seats, taken: Mutex::default() }
    }

    fn enter(self: &Arc<Self>, source: SeatUnit) -> Seat {
        let (sender, lost) = oneshot::channel();
        let mut taken = self.taken.lock().expect("not poisoned");
        if taken.of.get(&source).is_some_and(|seats| seats.len() >= self.seats.of_one) {
            taken.remove_oldest(source);
        } else if taken.count >= self.seats.whole
            && let Some(most) = taken.most_seated()
        {
            taken.remove_oldest(most);
        }
        let number = taken.next;
        taken.next += 1;
        taken.count += 1;
        taken.of.entry(source).or_default().push_back((number, sender));
        Seat { room: self.clone(), source, number, lost }
    }
}

impl TakenSeats {
    /// Drops the room's end of the seat, which its holder notices.
    fn remove_oldest(&mut self, source: SeatUnit) {
        let oldest =
            self.of.get(&source).and_then(|seats| seats.front()).map(|(number, _)| *number);
        if let Some(oldest) = oldest {
            self.remove(source, oldest);
        }
    }

    fn remove(&mut self, source: SeatUnit, number: u64) {
        let Some(seats) = self.of.get_mut(&source) else { return };
        let Ok(index) = seats.binary_search_by_key(&number, |(its, _)| *its) else { return };
        seats.remove(index);
        self.count -= 1;
        if seats.is_empty() {
            self.of.remove(&source);
        }
    }

    /// The source with most seats; among equals, the one whose oldest seat is the oldest.
    fn most_seated(&self) -> Option<SeatUnit> {
        let oldest = |seats: &VecDeque<(u64, oneshot::Sender<()>)>| {
            seats.front().map(|(number, _)| Reverse(*number))
        };
        self.of
            .iter()
            .max_by_key(|(_, seats)| (seats.len(), oldest(seats)))
            .map(|(source, _)| *source)
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.room.taken.lock().expect("not poisoned").remove(self.source, self.number);
    }
}

/// Bounds of a connection with an unknown peer.
struct Stranger {
    seat: Seat,
    timeout: Pin<Box<Sleep>>,
    left_bytes: usize,
}

impl Stranger {
    fn is_over(&mut self, cx: &mut Context<'_>) -> bool {
        self.left_bytes == 0
            || self.timeout.as_mut().poll(cx).is_ready()
            || Pin::new(&mut self.seat.lost).poll(cx).is_ready()
    }
}

impl AsyncRead for AcceptedConnection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.stranger.as_mut().is_some_and(|stranger| stranger.is_over(cx)) {
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        let before = buffer.filled().len();
        let polled = match &mut self.stream {
            AcceptedStream::Plain(stream) => Pin::new(stream).poll_read(cx, buffer),
            AcceptedStream::Tls(stream) => Pin::new(stream).poll_read(cx, buffer),
        };
        if let Some(stranger) = &mut self.stranger {
            stranger.left_bytes =
                stranger.left_bytes.saturating_sub(buffer.filled().len() - before);
        }
        polled
    }
}

impl AsyncWrite for AcceptedConnection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        match &mut self.stream {
            AcceptedStream::Plain(stream) => Pin::new(stream).poll_write(cx, bytes),
            AcceptedStream::Tls(stream) => Pin::new(stream).poll_write(cx, bytes),
        }
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match &mut self.stream {
            AcceptedStream::Plain(stream) => Pin::new(stream).poll_write_vectored(cx, parts),
            AcceptedStream::Tls(stream) => Pin::new(stream).poll_write_vectored(cx, parts),
        }
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.stream {
            AcceptedStream::Plain(stream) => Pin::new(stream).poll_flush(cx),
            AcceptedStream::Tls(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.stream {
            AcceptedStream::Plain(stream) => Pin::new(stream).poll_shutdown(cx),
            AcceptedStream::Tls(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}

impl Connected for AcceptedConnection {
    type ConnectInfo = Peer;

    fn connect_info(&self) -> Peer {
        self.peer.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(text: &str) -> SeatUnit {
        SeatUnit::of(text.parse().unwrap())
    }

    const SEATS: Seats = Seats { whole: 256, of_one: 128 };

    fn room() -> Arc<WaitingRoom> {
        Arc::new(WaitingRoom::with(SEATS))
    }

    fn is_lost(seat: &mut Seat) -> bool {
        matches!(seat.lost.try_recv(), Err(oneshot::error::TryRecvError::Closed))
    }

    fn left(seats: &mut [Seat]) -> usize {
        seats.iter_mut().filter_map(|seat| (!is_lost(seat)).then_some(())).count()
    }

    #[test]
    fn a_flood_takes_the_seats_of_its_own_address_alone() {
        let room = room();
        let mut victim = room.enter(source("127.0.0.2"));
        let mut flood: Vec<_> = (0..10_000).map(|_| room.enter(source("127.0.0.1"))).collect();
        assert!(!is_lost(&mut victim));
        assert_eq!(left(&mut flood), SEATS.of_one);
    }

    #[test]
    fn when_many_addresses_fill_the_room_the_greediest_loses() {
        let room = room();
        let mut victim = room.enter(source("192.0.2.200"));
        let mut flood = Vec::new();
        for round in 0..20_u8 {
            flood.extend(
                (1..100)
                    .map(|host| room.enter(source(&format!("198.51.100.{}", host + round % 2)))),
            );
        }
        assert!(!is_lost(&mut victim));
        assert!(left(&mut flood) < SEATS.whole);
    }

    #[test]
    fn a_seat_that_was_left_is_free() {
        let room = room();
        let mut first = room.enter(source("127.0.0.1"));
        for _ in 0..10_000 {
            drop(room.enter(source("127.0.0.1")));
        }
        assert!(!is_lost(&mut first));
        drop(first);
        let taken = room.taken.lock().unwrap();
        assert_eq!((taken.count, taken.of.len()), (0, 0));
    }

    #[test]
    fn one_host_has_one_source() {
        assert_eq!(source("2001:db8::1"), source("2001:db8::ffff:2"));
        assert_ne!(source("2001:db8::1"), source("2001:db8:0:1::1"));
        assert_eq!(source("::ffff:192.0.2.1"), source("192.0.2.1"));
    }
}
