//! From the listener to connections whose peer is known. Whoever has not proved anything
//! yet (a handshake that is not over, a connection without a certificate that counts) sits
//! in a waiting room of fixed size, for a short time, and may say little. Seats are counted by
//! source address: when the room is full, the address that has most of them loses its oldest. So
//! ten thousand silent connections cost a fixed amount of memory, and whoever floods from one
//! address shortens the time of that address alone.

use std::{
    collections::{HashMap, VecDeque},
    io,
    net::{IpAddr, Shutdown, SocketAddr},
    os::fd::AsFd as _,
    pin::Pin,
    sync::{Arc, Mutex},
    task::{Context, Poll},
    time::Duration,
};

use socket2::Socket;
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

use super::serving::{Proof, Serving};
use crate::{
    admission::{Admission, Denied},
    load::ConnectionShare,
};

/// Peers that have proved nothing yet. Each costs up to 100 KB (buffers of TLS and HTTP/2).
const WAITING_ROOM: usize = 256;

/// Seats of one source address: enough for a network behind one address that connects anew all at
/// once, and never the whole room.
const SEATS_OF_ONE: usize = 128;

/// From the connection to the end of the handshake: four round trips, on a bad link.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);

/// What an enrolment takes. A gateway whose certificate does not count hears why, and goes.
const STRANGER_TIMEOUT: Duration = Duration::from_secs(10);

/// What a stranger may say in that time: an enrolment has some 2 KB.
const STRANGER_BYTES: usize = 256 << 10;

/// From a revocation to the end of the connection: what was at work ends meanwhile, and says why.
const LAST_WORDS: Duration = Duration::from_secs(3);

/// Accepted connections that wait for the server to take them.
const QUEUE: usize = 64;

/// When there is nothing left to accept with (EMFILE), connections must end first.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Who is at the other end; in the extensions of every request.
#[derive(Debug, Clone)]
pub struct Peer {
    /// Its address, where it has one.
    pub address: Option<SocketAddr>,
    /// What it has proved.
    pub proof: Proof,
}

/// A connection that is let in, so far.
pub struct Connection {
    stream: Stream,
    peer: Peer,
    stranger: Option<Stranger>,
    _closing: Option<Closing>,
    _share: Option<ConnectionShare>,
}

/// Closes a connection when its identity is removed, whatever the connection itself does.
struct Closing(JoinHandle<()>);

enum Stream {
    Plain(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
}

/// Connections as they are let in; dropping it ends what is under way.
pub struct Incoming {
    accepted: ReceiverStream<io::Result<Connection>>,
    _work: JoinSet<()>,
}

impl Incoming {
    /// Accepts on `listener`, with TLS if there is any, for as long as this exists.
    pub fn new(listener: TcpListener, tls: Option<Arc<Serving>>, admission: Admission) -> Self {
        let (sender, receiver) = mpsc::channel(QUEUE);
        let mut work = JoinSet::new();
        work.spawn(accept(listener, tls, admission, sender));
        Self { accepted: ReceiverStream::new(receiver), _work: work }
    }
}

impl tokio_stream::Stream for Incoming {
    type Item = io::Result<Connection>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        Pin::new(&mut self.accepted).poll_next(cx)
    }
}

async fn accept(
    listener: TcpListener,
    tls: Option<Arc<Serving>>,
    admission: Admission,
    sender: mpsc::Sender<io::Result<Connection>>,
) {
    let room = Arc::new(WaitingRoom::default());
    let mut handshakes = JoinSet::new();
    loop {
        // Those that are over, lest they pile up.
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
                // Nobody tells one such peer from another: beyond the bound they are turned away.
                let Ok(share) = admission.connection(&Proof::NotAsked) else { continue };
                let peer = Peer { address: Some(address), proof: Proof::NotAsked };
                let connection = Connection {
                    stream: Stream::Plain(stream),
                    peer,
                    stranger: None,
                    _closing: None,
                    _share: Some(share),
                };
                if sender.send(Ok(connection)).await.is_err() {
                    return;
                }
            }
            Some(tls) => {
                let (tls, admission, sender) = (tls.clone(), admission.clone(), sender.clone());
                let seat = room.enter(Source::of(address.ip()));
                handshakes.spawn(async move {
                    if let Some(connection) = shake_hands(&tls, (stream, address), seat, &admission).await {
                        let _ = sender.send(Ok(connection)).await;
                    }
                });
            }
        }
    }
}

/// The handshake, and what follows from it; `None` when there is no use in going on.
async fn shake_hands(
    tls: &Serving,
    (stream, address): (TcpStream, SocketAddr),
    mut seat: Seat,
    admission: &Admission,
) -> Option<Connection> {
    let acceptor = TlsAcceptor::from(tls.config.clone());
    let shaken = tokio::select! {
        _ = &mut seat.0 => return None,
        shaken = timeout(HANDSHAKE_TIMEOUT, acceptor.accept(stream)) => shaken,
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
    let mut share = None;
    if let Proof::Certificate(_) = proof {
        match admission.connection(&proof) {
            Ok(admitted) => share = Some(admitted),
            Err(Denied(why)) => proof = Proof::Useless(why),
        }
    }
    let stranger = share.is_none().then(|| Stranger {
        seat,
        timeout: Box::pin(sleep(STRANGER_TIMEOUT)),
        left_bytes: STRANGER_BYTES,
    });
    let closing = share.is_some().then(|| Closing::of(stream.get_ref().0, admission.clone(), proof.clone()));
    let closing = match closing.transpose() {
        Ok(closing) => closing,
        Err(error) => {
            tracing::warn!(%address, %error, "a connection that could not be closed when it must be");
            return None;
        }
    };
    let peer = Peer { address: Some(address), proof };
    Some(Connection { stream: Stream::Tls(Box::new(stream)), peer, stranger, _closing: closing, _share: share })
}

impl Closing {
    fn of(stream: &TcpStream, admission: Admission, proof: Proof) -> io::Result<Self> {
        let socket = Socket::from(stream.as_fd().try_clone_to_owned()?);
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

/// Whom a seat counts for: an IPv4 address, or the /64 that one IPv6 host has all addresses of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Source(IpAddr);

impl Source {
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

/// Those who are there longest are in front.
#[derive(Default)]
struct WaitingRoom(Mutex<VecDeque<(Source, oneshot::Sender<()>)>>);

/// A place in the room; it resolves when somebody else needs it.
struct Seat(oneshot::Receiver<()>);

impl WaitingRoom {
    fn enter(&self, source: Source) -> Seat {
        let (sender, receiver) = oneshot::channel();
        let mut seats = self.0.lock().expect("not poisoned");
        let of_one = |seats: &VecDeque<(Source, _)>| seats.iter().filter(|(other, _)| *other == source).count();
        if seats.len() >= WAITING_ROOM || of_one(&seats) >= SEATS_OF_ONE {
            seats.retain(|(_, seat)| !seat.is_closed());
        }
        let loser = match (of_one(&seats) >= SEATS_OF_ONE, seats.len() >= WAITING_ROOM) {
            (true, _) => Some(source),
            (_, true) => most_seated(&seats),
            _ => None,
        };
        // Dropped, which its holder notices.
        if let Some(oldest) = seats.iter().position(|(other, _)| Some(*other) == loser) {
            seats.remove(oldest);
        }
        seats.push_back((source, sender));
        Seat(receiver)
    }
}

/// The source with most seats; among equals, the one whose oldest seat is the oldest.
fn most_seated<T>(seats: &VecDeque<(Source, T)>) -> Option<Source> {
    let mut counts = HashMap::new();
    for (source, _) in seats {
        *counts.entry(*source).or_insert(0_usize) += 1;
    }
    let most = counts.values().max()?;
    seats.iter().map(|(source, _)| *source).find(|source| counts.get(source) == Some(most))
}

/// The bounds of a connection whose peer is nobody.
struct Stranger {
    seat: Seat,
    timeout: Pin<Box<Sleep>>,
    left_bytes: usize,
}

impl Stranger {
    fn is_over(&mut self, cx: &mut Context<'_>) -> bool {
        self.left_bytes == 0
            || self.timeout.as_mut().poll(cx).is_ready()
            || Pin::new(&mut self.seat.0).poll(cx).is_ready()
    }
}

impl AsyncRead for Connection {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if self.stranger.as_mut().is_some_and(|stranger| stranger.is_over(cx)) {
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        let before = buffer.filled().len();
        let polled = match &mut self.stream {
            Stream::Plain(stream) => Pin::new(stream).poll_read(cx, buffer),
            Stream::Tls(stream) => Pin::new(stream).poll_read(cx, buffer),
        };
        if let Some(stranger) = &mut self.stranger {
            stranger.left_bytes = stranger.left_bytes.saturating_sub(buffer.filled().len() - before);
        }
        polled
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match &mut self.stream {
            Stream::Plain(stream) => Pin::new(stream).poll_write(cx, bytes),
            Stream::Tls(stream) => Pin::new(stream).poll_write(cx, bytes),
        }
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match &mut self.stream {
            Stream::Plain(stream) => Pin::new(stream).poll_write_vectored(cx, parts),
            Stream::Tls(stream) => Pin::new(stream).poll_write_vectored(cx, parts),
        }
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.stream {
            Stream::Plain(stream) => Pin::new(stream).poll_flush(cx),
            Stream::Tls(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.stream {
            Stream::Plain(stream) => Pin::new(stream).poll_shutdown(cx),
            Stream::Tls(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}

impl Connected for Connection {
    type ConnectInfo = Peer;

    fn connect_info(&self) -> Peer {
        self.peer.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(text: &str) -> Source {
        Source::of(text.parse().unwrap())
    }

    fn is_lost(seat: &mut Seat) -> bool {
        matches!(seat.0.try_recv(), Err(oneshot::error::TryRecvError::Closed))
    }

    #[test]
    fn a_flood_takes_the_seats_of_its_own_address_alone() {
        let room = WaitingRoom::default();
        let mut victim = room.enter(source("127.0.0.2"));
        let mut flood: Vec<_> = (0..10_000).map(|_| room.enter(source("127.0.0.1"))).collect();
        assert!(!is_lost(&mut victim));
        assert_eq!(flood.iter_mut().filter_map(|seat| (!is_lost(seat)).then_some(())).count(), SEATS_OF_ONE);
    }

    #[test]
    fn when_many_addresses_fill_the_room_the_greediest_loses() {
        let room = WaitingRoom::default();
        let mut victim = room.enter(source("192.0.2.200"));
        let mut flood = Vec::new();
        for round in 0..20_u8 {
            flood.extend((1..100).map(|host| room.enter(source(&format!("198.51.100.{}", host + round % 2)))));
        }
        assert!(!is_lost(&mut victim));
        assert!(flood.iter_mut().filter_map(|seat| (!is_lost(seat)).then_some(())).count() < WAITING_ROOM);
    }

    #[test]
    fn one_host_has_one_source() {
        assert_eq!(source("2001:db8::1"), source("2001:db8::ffff:2"));
        assert_ne!(source("2001:db8::1"), source("2001:db8:0:1::1"));
        assert_eq!(source("::ffff:192.0.2.1"), source("192.0.2.1"));
    }
}
