//! A volume beside a server that lies: a mount's file system asks, as a program would have it ask,
//! and what it is answered is hostile: replies, notices, contents, in any order.

use std::{
    convert::Infallible,
    ffi::OsStr,
    future::Future,
    net::SocketAddr,
    os::unix::ffi::OsStrExt as _,
    pin::Pin,
    sync::{Arc, Mutex, OnceLock},
    task::{Context, Poll},
    time::Duration,
};

use arbitrary::Unstructured;
use bytes::Bytes;
use posh_proto::volume as wire;
use posh_volume::{
    fs::{Invalidate, MAX_FILES, ROOT, Settings, Source, Volume},
    remote::{Patience, Remote},
    store::{Caller, Errno, NameIn, OpenFlags, Removal},
};
use prost::Message as _;
use prost_reflect::{DynamicMessage, MessageDescriptor};
use tokio::{net::TcpListener, sync::mpsc, time::timeout};
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tonic::{
    Request, Response, Status, Streaming,
    body::Body,
    codegen::http,
    server::{Grpc, NamedService, StreamingService},
    transport::Server,
};

use crate::{calls::Raw, executor, hostile, volume::Direct};

/// After it a volume gives up a server that is out of reach.
const DEADLINE: Duration = Duration::from_millis(60);

/// A program is killed that has waited so long: a server may leave a call without an answer.
const OPERATION: Duration = Duration::from_millis(60);

/// Bytes that a program asks for at a time.
const READ_BYTES: u32 = 4096;

/// Contents of the file, as an honest server has it.
const CONTENTS: &[u8] = b"a\nb\n";

/// The longest name of Linux file systems.
const NAME_BYTES: usize = 255;

/// Answers that wait to be sent.
const OUTGOING: usize = 64;

/// The choices that are left of the present input.
static CHOICES: Mutex<Vec<u8>> = Mutex::new(Vec::new());

struct Peer {
    address: SocketAddr,
    from_volume: MessageDescriptor,
    read_reply: MessageDescriptor,
    write_reply: MessageDescriptor,
}

fn peer() -> &'static Peer {
    static PEER: OnceLock<Peer> = OnceLock::new();
    PEER.get_or_init(|| executor::peer().runtime.block_on(start()))
}

async fn start() -> Peer {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let liar = Server::builder().add_service(Liar);
    tokio::spawn(liar.serve_with_incoming(TcpListenerStream::new(listener)));
    let pool = hostile::pool();
    let named = |name: &str| pool.get_message_by_name(&format!("posh.volume.v1.{name}")).unwrap();
    Peer {
        address,
        from_volume: named("FromVolume"),
        read_reply: named("ReadReply"),
        write_reply: named("WriteReply"),
    }
}

/// One mount and what a program does on it; the kernel must be told nothing impossible.
pub fn answers(data: &[u8]) {
    let peer = peer();
    *CHOICES.lock().unwrap() = data.to_vec();
    executor::peer().runtime.block_on(async {
        let patience = Patience { deadline: Some(DEADLINE) };
        let remote =
            timeout(OPERATION, Remote::open(Arc::new(Direct(peer.address)), "logs", patience))
                .await;
        let Ok(Ok(remote)) = remote else { return };
        let settings = Settings { sync: false, memory_bytes: 1 << 20, most_files: MAX_FILES };
        let (volume, mut invalidations) = Volume::new(Arc::new(remote), settings, None);
        let kernel = tokio::spawn(async move {
            // A kernel forgets at once; dropping what it is told says so.
            while let Some(invalidate) = invalidations.recv().await {
                drop::<Invalidate>(invalidate);
            }
        });
        use_files(&volume, data.is_empty()).await;
        drop(volume);
        kernel.abort();
    });
}

/// Waits for one operation, as long as its program lives.
async fn answer_of<T>(operation: impl Future<Output = Result<T, Errno>>) -> Result<T, Errno> {
    timeout(OPERATION, operation).await.unwrap_or(Err(Errno::EINTR))
}

/// `is_honest`: nothing is bent, so that the file has to be there.
async fn use_files(volume: &Arc<Volume>, is_honest: bool) {
    let caller = Caller::default();
    let at = NameIn { parent: ROOT, name: OsStr::new("f") };
    let _ = answer_of(volume.attributes(&caller, ROOT)).await;
    let found = answer_of(volume.lookup(&caller, at)).await;
    let number = found.as_ref().map_or(ROOT, |entry| volume.tell(at, entry, |told| told.number));
    if let Ok(directory) = volume.open_directory(&caller, ROOT) {
        for listed in answer_of(volume.read_directory(directory, 0)).await.unwrap_or_default() {
            let name = listed.name.as_bytes();
            assert!(!name.is_empty() && name.len() <= NAME_BYTES, "a name of {} bytes", name.len());
            assert!(!name.contains(&b'/') && !name.contains(&0), "{:?} is no name", listed.name);
        }
        volume.close_directory(directory);
    }
    assert!(!is_honest || found.is_ok(), "{found:?}");
    if let Ok(opened) =
        answer_of(volume.open(&caller, number, OpenFlags::READ | OpenFlags::WRITE)).await
    {
        for offset in [0, 1 << 20] {
            let read = answer_of(volume.read(opened.number, offset, READ_BYTES)).await;
            assert!(!is_honest || offset > 0 || read.as_deref() == Ok(CONTENTS), "{read:?}");
            let length = read.map_or(0, |data| data.len());
            assert!(length <= READ_BYTES as usize, "{length} bytes were read of {READ_BYTES}");
        }
        let data = Bytes::from_static(b"new");
        let _ = answer_of(volume.write(opened.number, 1, data, Source::Call)).await;
        let _ = answer_of(volume.flush(opened.number, None)).await;
        let _ = answer_of(volume.release(opened.number, None)).await;
    }
    let new = NameIn { parent: ROOT, name: OsStr::new("d") };
    let _ = answer_of(volume.make_directory(&caller, new, 0o755.into())).await;
    let _ = answer_of(volume.target(&caller, number)).await;
    let _ = answer_of(volume.extended_names(&caller, number)).await;
    let _ = answer_of(volume.file_system(&caller)).await;
    let _ = answer_of(volume.remove(&caller, at, Removal::File)).await;
}

/// The server that lies about files.
#[derive(Clone)]
struct Liar;

impl NamedService for Liar {
    const NAME: &'static str = "posh.volume.v1.Volume";
}

impl tower::Service<http::Request<Body>> for Liar {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let path = request.uri().path().to_owned();
        Box::pin(async move { Ok(Grpc::new(Raw).streaming(Lie(path), request).await) })
    }
}

/// Answers to one call, by its path.
struct Lie(String);

type Answers = ReceiverStream<Result<Bytes, Status>>;

impl StreamingService<Bytes> for Lie {
    type Response = Bytes;
    type ResponseStream = Answers;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Answers>, Status>> + Send>>;

    fn call(&mut self, request: Request<Streaming<Bytes>>) -> Self::Future {
        let is_session = self.0.ends_with("/Session");
        let is_read = self.0.ends_with("/Read");
        Box::pin(async move {
            let mut input = request.into_inner();
            let (answers, stream) = mpsc::channel(OUTGOING);
            if is_session {
                tokio::spawn(async move {
                    while let Ok(Some(message)) = input.message().await {
                        for said in session_answers(&message) {
                            if answers.send(Ok(said)).await.is_err() {
                                return;
                            }
                        }
                    }
                });
                return Ok(Response::new(ReceiverStream::new(stream)));
            }
            let message = input.message().await?.unwrap_or_default();
            let of = if is_read { &peer().read_reply } else { &peer().write_reply };
            let sound = if is_read { read_reply() } else { write_reply(&message) };
            let _ = answers.send(Ok(bend(of, sound))).await;
            Ok(Response::new(ReceiverStream::new(stream)))
        })
    }
}

/// A sound answer with some of it replaced, as the input has it; sound when the input is used up.
fn bend(of: &MessageDescriptor, sound: Vec<u8>) -> Bytes {
    let mut choices = CHOICES.lock().unwrap();
    let rest = std::mem::take(&mut *choices);
    let mut source = Unstructured::new(&rest);
    // Two of three are sound: nobody asks much of a server that never says anything sensible.
    let is_sound = source.is_empty() || source.ratio(2, 3).unwrap_or(true);
    let like = [DynamicMessage::decode(of.clone(), &sound[..]).unwrap()];
    let bent = if is_sound { None } else { hostile::message(of, &like, &mut source).ok() };
    *choices = source.take_rest().to_vec();
    bent.map_or(sound, |message| message.encode_to_vec()).into()
}

/// Answers to a session's message: a reply, and sometimes a notice of the server's own.
fn session_answers(message: &[u8]) -> Vec<Bytes> {
    use wire::{from_volume::Kind as To, to_volume::Kind as From};
    let said = wire::ToVolume::decode(message).ok().and_then(|message| message.kind);
    let notice = wire::Notice {
        file: Some(file(2)),
        leases: 15,
        stamp: 9,
        is_all: false,
        entry: Some(entry(2)),
    };
    let sound = match said {
        Some(From::Hello(_)) => {
            vec![To::Welcome(wire::Welcome { root: Some(file(1)), ..Default::default() })]
        }
        Some(From::Alive(alive)) => vec![To::Alive(alive)],
        Some(From::Call(call)) => {
            let answer = call
                .op
                .and_then(|op| op.kind)
                .map(|kind| wire::Answer { kind: Some(answer(kind)) });
            vec![
                To::Reply(wire::Reply { number: call.number, error: 0, answer, earlier: false }),
                To::Notice(notice),
            ]
        }
        _ => Vec::new(),
    };
    let of = &peer().from_volume;
    sound
        .into_iter()
        .map(|kind| bend(of, wire::FromVolume { kind: Some(kind) }.encode_to_vec()))
        .collect()
}

fn file(inode: u64) -> wire::FileId {
    wire::FileId { inode, generation: 7 }
}

/// A file that may be remembered: the root, or `f` in it.
fn entry(inode: u64) -> wire::Entry {
    let attributes = wire::Attributes {
        id: Some(file(inode)),
        kind: if inode == 1 { 1 } else { 0 },
        mode: 0o755,
        links: 1,
        size: CONTENTS.len() as u64,
        blocks: 8,
        version: 1,
        ..Default::default()
    };
    wire::Entry { attributes: Some(attributes), leases: 15, stamp: 1 }
}

fn read_reply() -> Vec<u8> {
    let piece = wire::Piece {
        data: CONTENTS.into(),
        is_last: true,
        entry: Some(entry(2)),
        ..wire::Piece::default()
    };
    wire::ReadReply { pieces: vec![piece] }.encode_to_vec()
}

fn write_reply(request: &[u8]) -> Vec<u8> {
    let count = wire::WriteRequest::decode(request).map_or(0, |request| request.writes.len());
    let written = wire::Written { entry: Some(entry(2)), error: 0 };
    wire::WriteReply { results: vec![written; count] }.encode_to_vec()
}

/// An honest answer.
fn answer(op: wire::op::Kind) -> wire::answer::Kind {
    use wire::{answer::Kind as To, op::Kind as From};
    let entries = |count| wire::Entries { entries: vec![entry(1); count] };
    let walked = |names: usize| wire::Walked {
        from: Some(entry(1)),
        entries: vec![entry(2); names],
        error: 0,
    };
    match op {
        From::Walk(walk) => To::Walked(walked(walk.names.len())),
        From::Attributes(_) | From::Set(_) => To::Entry(entry(2)),
        From::List(_) => To::Listing(wire::Listing {
            directory: Some(entry(1)),
            names: vec![wire::Listed {
                name: "f".into(),
                cookie: 1,
                entry: Some(entry(2)),
                inode: 2,
                kind: 0,
            }],
            is_last: true,
        }),
        From::ReadLink(_) => To::Target(wire::Stamped { values: vec!["f".into()], stamp: 1 }),
        From::MakeDirectory(_) | From::MakeNode(_) | From::Symlink(_) | From::Link(_) => {
            To::Made(entries(2))
        }
        From::Remove(_) => To::Removed(entries(1)),
        From::Rename(_) => To::Renamed(entries(3)),
        From::Create(_) | From::Open(_) => {
            To::Opened(wire::Opened { handle: 1, entry: Some(entry(2)), parent: Some(entry(1)) })
        }
        From::Seek(_) => To::Offset(0),
        From::CopyRange(copy) => {
            To::Copied(wire::Copied { bytes: copy.length, entry: Some(entry(2)) })
        }
        From::FileSystem(_) => {
            To::FileSystem(wire::FileSystem { block_bytes: 4096, ..Default::default() })
        }
        From::GetAttribute(_) => To::Value(wire::Stamped { values: vec!["v".into()], stamp: 1 }),
        From::ListAttributes(_) => {
            To::Names(wire::Stamped { values: vec!["user.x".into()], stamp: 1 })
        }
        From::TestLock(_) => To::Locked(wire::Lock::default()),
        From::Settle(_) => To::Settled(1),
        _ => To::Done(wire::Nothing {}),
    }
}

/// Choices of different lengths: how long the server goes on lying.
pub fn seeds() -> Vec<Vec<u8>> {
    std::iter::once(Vec::new()).chain(executor::seeds()).collect()
}
