//! The gateway's end of the socket to one stage program or starting `posh`: accepts it, checks its
//! identity, and decodes frames. Dropping a [`StageLink`] closes the socket; a stage that has not
//! acknowledged then runs its command itself.
//!
//! Invariants; a process with fewer rights than its user may connect, too:
//! * The first message of a client has limits on time, bytes and elements. All of it is counted
//!   before decoding.
//! * Connections are counted as long as their sockets are open ([`Room`]).
//! * After its first message, nothing is read from a client but a stage that was told to stand in
//!   for a remote command. A stage that speaks earlier is hung up on.
//! * Reading ends when the [`StageLink`] is dropped.

mod room;

use std::{
    fmt, io,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use bytes::{Buf, Bytes, BytesMut};
use posh_proto::{
    PROTOCOL_VERSION, clock,
    codec::{self, ENLISTMENT_BYTES},
    frame, other_version,
    stage::{self as wire, ToGateway, ToStage, to_gateway, to_stage},
};
use prost::Message as _;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{
        UnixStream,
        unix::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::mpsc,
};

pub use self::room::{CountedConnection, Full, Room, SilentConnection};
use crate::{
    enlisted::{Enlisted, Pid, Window},
    peers::Peer,
};

/// Capacity of the queues to and from one stage. Data is bounded by credit; this bounds the rest,
/// and a stopped stage program.
const QUEUE: usize = 256;
/// Size of the first read from a socket: most commands send no more before they are answered. A
/// larger buffer would be mapped and unmapped each time.
const FIRST_READ_BYTES: usize = 8 << 10;
/// Size of further reads.
const READ_BYTES: usize = 256 << 10;
/// Timeout for the first message: a stage program sends it at once.
const FIRST_WORD: Duration = Duration::from_secs(5);
/// Limit on later messages: data comes in pieces of 256 KiB.
const LATER_BYTES: usize = 1 << 20;
/// Name of [`ToGateway`] in the protocol.
const TO_GATEWAY: &str = "posh.stage.v1.ToGateway";

/// Message from an enlisted stage.
#[derive(Debug)]
pub enum FromStage {
    /// Gives up the right to run its command itself.
    Ack,
    /// Bytes read from a descriptor.
    Data(u32, Bytes),
    /// End of file on that descriptor.
    End(u32),
    /// So many bytes received for a descriptor are written.
    Credit(u32, u64),
    /// A descriptor can't be written any more; errno.
    WriteFailed(u32, u32),
    /// A signal came: its number, and true if it came from a terminal, so for the whole group.
    Signal(u32, bool),
    /// The terminal's size changed.
    Window(Window),
    /// Times of the stage program in a traced session; its last message.
    Times(Times),
}

/// Times in a stage program of a traced session, by this machine's shared clock, in nanoseconds; 0
/// if it did not happen.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Times {
    /// Start.
    pub started_ns: u64,
    /// Before its request to us.
    pub enlisted_ns: u64,
    /// We had read its request.
    pub received_ns: u64,
    /// It had our directive.
    pub directed_ns: u64,
    /// It wrote the first byte of the command's output.
    pub first_byte_ns: u64,
    /// Before its end.
    pub ended_ns: u64,
}

impl From<wire::Times> for Times {
    fn from(message: wire::Times) -> Self {
        let wire::Times { started_ns, enlisted_ns, directed_ns, first_byte_ns, ended_ns } = message;
        Self { started_ns, enlisted_ns, directed_ns, first_byte_ns, ended_ns, received_ns: 0 }
    }
}

/// Exit status for a stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// Exit code.
    Code(u32),
    /// Killed by a signal.
    Signal(u32),
}

/// Message for a stage.
#[derive(Debug)]
pub enum ForStage {
    /// Run the command yourself, with the reason.
    RunHere(String),
    /// Stand in for the command: descriptors to read as credit comes, and to write.
    Remote {
        /// Descriptors that may be read.
        reads: Vec<u32>,
        /// Descriptors that may be written.
        writes: Vec<u32>,
    },
    /// Write this to a descriptor.
    Data(u32, Bytes),
    /// Read and send so many bytes more.
    Credit(u32, u64),
    /// Nobody reads that input any more.
    StopReading(u32),
    /// Run the command yourself from its beginning, and skip what was delivered.
    Again {
        /// The reason.
        reason: String,
        /// Delivered output by descriptor; may be empty.
        delivered: Vec<wire::Delivered>,
    },
    /// End with the command's status.
    Exit {
        /// The status.
        status: Status,
        /// The command left a core file.
        core_dumped: bool,
        /// Final offsets of shared files: descriptor, offset.
        seeks: Vec<(u32, u64)>,
        /// Error message of posh for descriptor 2.
        message: String,
    },
}

/// A stage that waits, or stands in for a remote command.
#[derive(Debug)]
pub struct StageLink {
    /// Description of the stage.
    pub enlisted: Arc<Enlisted>,
    /// Times, in a traced session.
    pub times: Option<Times>,
    outgoing: mpsc::Sender<ForStage>,
    incoming: mpsc::Receiver<FromStage>,
}

impl StageLink {
    /// Returns true if the stage program has closed its end.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        self.incoming.is_closed() && self.incoming.is_empty()
    }

    /// Sends a message; it is dropped if the stage is gone.
    pub async fn tell(&self, message: ForStage) {
        let _ = self.outgoing.send(message).await;
    }

    /// Receives the next message; `None` if the stage is gone.
    pub async fn hear(&mut self) -> Option<FromStage> {
        self.incoming.recv().await
    }

    /// A sender that outlives this value's borrow.
    #[must_use]
    pub fn sender(&self) -> mpsc::Sender<ForStage> {
        self.outgoing.clone()
    }

    /// Hands over the receiver; afterwards, [`Self::hear`] receives nothing.
    #[must_use]
    pub fn take_incoming(&mut self) -> mpsc::Receiver<FromStage> {
        std::mem::replace(&mut self.incoming, mpsc::channel(1).1)
    }
}

/// Client of the stage socket.
#[derive(Debug)]
pub enum StageSocketClient {
    /// An intercepted command.
    Stage(StageLink),
    /// A `posh` that asks for a session.
    Shell(Box<wire::OpenSession>, Asker),
    /// A process that is about to execute a command.
    Executing(wire::Question, Pid, Asker),
}

/// A client that gets one answer.
#[derive(Debug)]
pub struct Asker {
    writer: OwnedWriteHalf,
    _connection: CountedConnection,
}

/// Reason for refusing a connection to the stage socket.
#[derive(Debug, thiserror::Error)]
pub enum Refused {
    /// The socket failed.
    #[error("stage socket")]
    Io(#[from] io::Error),
    /// The first message was neither an enlistment nor a request for a session.
    #[error("neither a stage nor a shell")]
    NotEnlisted,
    /// Another protocol version.
    #[error("{}", other_version("the stage program", *.0, "this gateway"))]
    Version(u32),
    /// Not a frame.
    #[error(transparent)]
    Frame(#[from] frame::FrameError),
    /// Exceeds a limit.
    #[error(transparent)]
    Unfit(#[from] codec::Unfit),
    /// No first message in time.
    #[error("it says nothing")]
    Silent,
    /// Displaced by newer connections.
    #[error("too many say nothing")]
    Crowded,
    /// A large first message from a process without the necessary rights.
    #[error("{0}")]
    Confined(String),
}

/// Accepts one connection, which keeps its place until its first message, and reads its enlistment
/// or request. `confined` returns the reason why its process must not use the gateway.
///
/// # Errors
/// [`Refused`]; a stage program then runs its command itself.
pub async fn accept(
    socket: UnixStream,
    peer: &Peer,
    mut place: SilentConnection,
    confined: impl Fn() -> Option<String>,
) -> Result<StageSocketClient, Refused> {
    let (mut reader, writer) = socket.into_split();
    let mut buffer = BytesMut::with_capacity(FIRST_READ_BYTES);
    // Trust the kernel's process ID, not the message's.
    let process = |claimed| peer.number.unwrap_or(claimed);
    let room = place.room().clone();
    let first = tokio::select! {
        biased;
        first = read_first(&mut reader, &mut buffer, &room, confined) => first?,
        () = place.lost() => return Err(Refused::Crowded),
        () = tokio::time::sleep(FIRST_WORD) => return Err(Refused::Silent),
    };
    let connection = place.heard();
    let enlist = match first {
        to_gateway::Kind::Enlist(enlist) if enlist.protocol == PROTOCOL_VERSION => enlist,
        to_gateway::Kind::Enlist(enlist) => return Err(Refused::Version(enlist.protocol)),
        to_gateway::Kind::Question(question) => {
            let asker = Asker { writer, _connection: connection };
            return Ok(StageSocketClient::Executing(question, process(0), asker));
        }
        to_gateway::Kind::OpenSession(request) => {
            let request = wire::OpenSession { pid: process(request.pid), ..request };
            let asker = Asker { writer, _connection: connection };
            return Ok(StageSocketClient::Shell(Box::new(request), asker));
        }
        _ => return Err(Refused::NotEnlisted),
    };
    let times =
        enlist.times.map(|times| Times { received_ns: clock::monotonic_ns(), ..times.into() });
    let mut enlist = Enlisted::from(enlist);
    enlist.pid = process(enlist.pid);
    let (outgoing, for_stage) = mpsc::channel(QUEUE);
    let (from_stage, incoming) = mpsc::channel(QUEUE);
    let line =
        Arc::new(StageConnection { stands_in: AtomicBool::new(false), _connection: connection });
    let reading = read(reader, buffer, from_stage.clone(), Arc::clone(&line));
    tokio::spawn(async move {
        tokio::select! {
            () = from_stage.closed() => {}
            () = reading => {}
        }
    });
    tokio::spawn(write(writer, for_stage, line));
    Ok(StageSocketClient::Stage(StageLink {
        enlisted: Arc::new(enlist),
        times,
        outgoing,
        incoming,
    }))
}

/// Both directions of a stage's connection.
#[derive(Debug)]
struct StageConnection {
    /// The stage was told to stand in for its command, so it may speak.
    stands_in: AtomicBool,
    _connection: CountedConnection,
}

/// Answers a `posh`; dropped if it is gone.
pub async fn tell_shell(
    shell: Asker,
    answer: Result<wire::SessionOpened, impl fmt::Display + Send>,
) {
    let answer = match answer {
        Ok(opened) => to_stage::Kind::SessionOpened(opened),
        Err(refused) => to_stage::Kind::SessionRefused(refused.to_string()),
    };
    answer_once(shell, answer).await;
}

/// Tells a process to run its command locally.
pub async fn tell_to_stay(process: Asker) {
    answer_once(process, to_stage::Kind::RunHere(wire::RunHere::default())).await;
}

async fn answer_once(mut asker: Asker, kind: to_stage::Kind) {
    let mut buffer = BytesMut::new();
    frame::encode(&ToStage { kind: Some(kind) }, &mut buffer);
    let _ = asker.writer.write_all(&buffer).await;
}

async fn read_first(
    reader: &mut OwnedReadHalf,
    buffer: &mut BytesMut,
    room: &Room,
    confined: impl Fn() -> Option<String>,
) -> Result<to_gateway::Kind, Refused> {
    let mut share = None;
    loop {
        if let Some(frame) = frame::take(buffer, ENLISTMENT_BYTES)? {
            return decoded(frame)?.ok_or(Refused::NotEnlisted);
        }
        // Comparing rights takes some 50 µs: much for a small command, little for this one.
        if share.is_none() && frame::announced(buffer).is_some_and(|length| length > READ_BYTES) {
            if let Some(why) = confined() {
                return Err(Refused::Confined(why));
            }
            share = Some(room.for_a_large_one().await);
        }
        if buffer.len() == buffer.capacity() {
            buffer.reserve(READ_BYTES);
        }
        if reader.read_buf(buffer).await? == 0 {
            return Err(Refused::NotEnlisted);
        }
    }
}

fn decoded(frame: Bytes) -> Result<Option<to_gateway::Kind>, Refused> {
    codec::check(TO_GATEWAY, &frame)?;
    let message = ToGateway::decode(frame).map_err(frame::FrameError::Malformed)?;
    Ok(message.kind)
}

/// Ends when the stage program has closed its end, speaks before it was told to stand in, or sends
/// an invalid frame.
async fn read(
    mut reader: OwnedReadHalf,
    mut buffer: BytesMut,
    sender: mpsc::Sender<FromStage>,
    line: Arc<StageConnection>,
) {
    if buffer.is_empty() {
        // The next message is its acknowledgement, or its end.
        let _end_or_more = reader.read_buf(&mut buffer).await;
    }
    if !line.stands_in.load(Ordering::Acquire) {
        return;
    }
    loop {
        let frame = frame::take(&mut buffer, LATER_BYTES).map_err(Refused::from);
        match frame.and_then(|frame| frame.map(decoded).transpose()) {
            Ok(Some(kind)) => {
                let Some(said) = kind.and_then(from_wire) else { continue };
                if sender.send(said).await.is_err() {
                    return;
                }
                continue;
            }
            Ok(None) => {}
            Err(error) => {
                tracing::warn!(%error, "a stage program sent no frame");
                return;
            }
        }
        buffer.reserve(READ_BYTES);
        if !matches!(reader.read_buf(&mut buffer).await, Ok(n) if n > 0) {
            return;
        }
    }
}

async fn write(
    mut writer: OwnedWriteHalf,
    mut messages: mpsc::Receiver<ForStage>,
    line: Arc<StageConnection>,
) {
    let mut buffer = BytesMut::new();
    while let Some(message) = messages.recv().await {
        if matches!(message, ForStage::Remote { .. }) {
            line.stands_in.store(true, Ordering::Release);
        }
        let written = match message {
            ForStage::Data(fd, data) => {
                frame::encode_data_head(fd, data.len(), &mut buffer);
                let mut both = buffer.split().chain(data);
                writer.write_all_buf(&mut both).await
            }
            other => {
                frame::encode(&ToStage { kind: Some(to_wire(other)) }, &mut buffer);
                writer.write_all(&buffer.split()).await
            }
        };
        if written.is_err() {
            return;
        }
    }
}

fn from_wire(kind: to_gateway::Kind) -> Option<FromStage> {
    Some(match kind {
        to_gateway::Kind::Enlist(_)
        | to_gateway::Kind::OpenSession(_)
        | to_gateway::Kind::Question(_) => return None,
        to_gateway::Kind::Ack(_) => FromStage::Ack,
        to_gateway::Kind::Data(d) => FromStage::Data(d.fd, d.data),
        to_gateway::Kind::End(fd) => FromStage::End(fd),
        to_gateway::Kind::Credit(c) => FromStage::Credit(c.fd, c.bytes),
        to_gateway::Kind::WriteFailed(w) => FromStage::WriteFailed(w.fd, w.errno),
        to_gateway::Kind::Signal(s) => FromStage::Signal(s.signal, s.group),
        to_gateway::Kind::WindowSize(w) => {
            FromStage::Window(Window { rows: w.rows, columns: w.columns })
        }
        to_gateway::Kind::Times(times) => FromStage::Times(times.into()),
    })
}

fn to_wire(message: ForStage) -> to_stage::Kind {
    match message {
        ForStage::RunHere(reason) => to_stage::Kind::RunHere(wire::RunHere { reason }),
        ForStage::Remote { reads, writes } => {
            to_stage::Kind::Remote(wire::Remote { reads, writes })
        }
        ForStage::Data(fd, data) => to_stage::Kind::Data(wire::Data { fd, data }),
        ForStage::Credit(fd, bytes) => to_stage::Kind::Credit(wire::Credit { fd, bytes }),
        ForStage::StopReading(fd) => to_stage::Kind::StopReading(fd),
        ForStage::Again { reason, delivered } => {
            to_stage::Kind::Again(wire::Again { reason, delivered })
        }
        ForStage::Exit { status, core_dumped, seeks, message } => {
            to_stage::Kind::Exit(wire::Exit {
                how: Some(match status {
                    Status::Code(code) => wire::exit::How::Code(code),
                    Status::Signal(signal) => wire::exit::How::Signal(signal),
                }),
                core_dumped,
                seeks: seeks.into_iter().map(|(fd, offset)| wire::Seek { fd, offset }).collect(),
                message,
            })
        }
    }
}

#[cfg(test)]
mod tests {
    use prost::Name as _;

    use super::*;
    use crate::peers;

    #[test]
    fn what_is_said_is_measured_by_its_name() {
        assert_eq!(ToGateway::full_name(), TO_GATEWAY);
    }

    /// How a connection is taken of a process that may not have the gateway do anything.
    async fn refused(frame: &[u8]) -> Refused {
        let (mut other, socket) = UnixStream::pair().unwrap();
        let peer = peers::own(&socket).unwrap();
        let length = u32::try_from(frame.len()).unwrap().to_le_bytes();
        let said = [&length[..], frame].concat();
        tokio::spawn(async move { other.write_all(&said).await });
        let confined = || Some("it is confined".to_owned());
        accept(socket, &peer, Room::among(1024).enter(None).unwrap(), confined).await.unwrap_err()
    }

    const PATIENCE: Duration = Duration::from_secs(30);
    /// Rest of a message that announces as much as it may.
    const UNFINISHED_BYTES: usize = 100_000;

    /// A stage program's end of a connection, and the gateway's.
    async fn enlisted(room: &Room) -> (UnixStream, StageLink) {
        let (mut stage, socket) = UnixStream::pair().unwrap();
        let peer = peers::own(&socket).unwrap();
        let enlist = wire::Enlist { protocol: PROTOCOL_VERSION, ..wire::Enlist::default() };
        let mut bytes = BytesMut::new();
        let kind = Some(to_gateway::Kind::Enlist(enlist));
        frame::encode(&ToGateway { kind }, &mut bytes);
        stage.write_all(&bytes).await.unwrap();
        let place = room.enter(peer.number).unwrap();
        let StageSocketClient::Stage(link) = accept(socket, &peer, place, || None).await.unwrap()
        else {
            panic!("it is a stage")
        };
        (stage, link)
    }

    async fn say_a_half(stage: &mut UnixStream) {
        let length = u32::try_from(LATER_BYTES).unwrap().to_le_bytes();
        // It may be hung up on before that.
        let _all_or_not = stage.write_all(&length).await;
        let _all_or_not = stage.write_all(&vec![0; UNFINISHED_BYTES]).await;
    }

    async fn until_closed(stage: &mut UnixStream, room: &Room) {
        let closed = async {
            let _reset_or_not = stage.read_to_end(&mut Vec::new()).await;
            while room.total() > 0 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::time::timeout(PATIENCE, closed).await.expect("it ends");
    }

    #[tokio::test]
    async fn a_stage_that_speaks_before_it_stands_in_is_hung_up_on() {
        let room = Room::among(1024);
        let (mut stage, mut link) = enlisted(&room).await;
        say_a_half(&mut stage).await;
        let heard = tokio::time::timeout(PATIENCE, link.hear()).await.expect("nothing is read");
        assert!(heard.is_none() && link.is_gone(), "{heard:?}");
        link.tell(ForStage::RunHere(String::new())).await;
        assert_eq!(room.total(), 1);
        drop(link);
        until_closed(&mut stage, &room).await;
    }

    #[tokio::test]
    async fn a_connection_ends_with_its_link() {
        let room = Room::among(1024);
        let (mut stage, mut link) = enlisted(&room).await;
        link.tell(ForStage::Remote { reads: vec![], writes: vec![] }).await;
        let mut head = [0; 4];
        stage.read_exact(&mut head).await.unwrap();
        let mut bytes = BytesMut::new();
        frame::encode(&ToGateway { kind: Some(to_gateway::Kind::Ack(wire::Ack {})) }, &mut bytes);
        stage.write_all(&bytes).await.unwrap();
        let heard = tokio::time::timeout(PATIENCE, link.hear()).await.expect("it is read");
        assert!(matches!(heard, Some(FromStage::Ack)), "{heard:?}");
        say_a_half(&mut stage).await;
        drop(link);
        until_closed(&mut stage, &room).await;
    }

    #[tokio::test]
    async fn of_a_confined_process_nothing_large_is_decoded() {
        let nonsense = |bytes: usize| vec![0xff; bytes];
        assert!(matches!(refused(&nonsense(READ_BYTES + 1)).await, Refused::Confined(_)));
        // Its rights are looked at when it is known what it wants.
        assert!(matches!(refused(&nonsense(100)).await, Refused::Unfit(_)));
    }
}
