//! An executor in this process that keeps the files of volumes, and its clients.

use std::{
    net::SocketAddr,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use arbitrary::Unstructured;
use bytes::Bytes;
use nix::sys::{
    resource::{Resource, getrlimit, setrlimit},
    signal::{SigSet, Signal},
};
use posh_executor::Config;
use posh_proto::{PROTOCOL_VERSION, volume as wire};
use posh_volume::{
    remote::{CannotConnect, Connector, Patience, Remote},
    store::{Answer, Caller, FileId, Op, OpenFlags, Place, ReadPart, Removal, Store as _, Write},
};
use prost::Message;
use prost_reflect::{DynamicMessage, ServiceDescriptor};
use tokio::{net::TcpListener, runtime::Runtime, time::timeout};
use tokio_stream::StreamExt as _;
use tonic::transport::Channel;

use crate::{calls::Call, hostile, scratch};

/// Hostile calls between two sound ones, which must succeed.
const BETWEEN_PROBES: u64 = 16;

/// For sound calls.
const PATIENCE: Duration = Duration::from_secs(20);

/// The export that nobody hostile can name: what these hold up is theirs alone.
const OTHER: &str = "kept-from-strangers";

/// No file becomes larger: a stranger who may write may fill a disk, which is the disk's matter.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// Sessions of hostile clients, which last after their connections, and are taken up again.
const SESSIONS: u8 = 4;

struct Peer {
    runtime: Runtime,
    channel: Channel,
    service: ServiceDescriptor,
    sound: Vec<DynamicMessage>,
    greetings: Vec<Bytes>,
    other: Remote,
    calls: AtomicU64,
}

/// Straight to the executor.
pub struct Direct(pub SocketAddr);

#[async_trait::async_trait]
impl Connector for Direct {
    async fn connect(&self) -> Result<Channel, CannotConnect> {
        let channel = Channel::from_shared(format!("http://{}", self.0))
            .map_err(|error| CannotConnect::Unreachable(error.to_string()))?;
        channel.connect().await.map_err(|error| CannotConnect::Unreachable(error.to_string()))
    }
}

fn peer() -> &'static Peer {
    static PEER: OnceLock<Peer> = OnceLock::new();
    PEER.get_or_init(start)
}

fn start() -> Peer {
    let (_, hard) = getrlimit(Resource::RLIMIT_FSIZE).unwrap();
    setrlimit(Resource::RLIMIT_FSIZE, MAX_FILE_BYTES, hard).unwrap();
    // Whoever goes beyond gets EFBIG: the threads of the executor inherit this.
    SigSet::from(Signal::SIGXFSZ).thread_block().unwrap();
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let stores = [scratch::directory(), scratch::directory()];
    std::fs::write(stores[0].join("f"), "a\nb\n").unwrap();
    std::fs::create_dir(stores[0].join("logs")).unwrap();
    let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
    let address = listener.local_addr().unwrap();
    let exports = ["logs", OTHER].into_iter().zip(&stores);
    let exports = exports.map(|(name, store)| (name.to_owned(), store.clone())).collect();
    let mut config =
        Config::from_arguments(address, exports, false, false, crate::executor::rights()).unwrap();
    config.runner_program = Some(crate::executor::runner_program());
    runtime.spawn(posh_executor::run(config, listener, std::future::pending()));
    let open = |export| {
        runtime
            .block_on(Remote::open(Arc::new(Direct(address)), export, Patience::default()))
            .unwrap()
    };
    let files = runtime.block_on(ids(&open("logs")));
    let channel = runtime.block_on(Direct(address).connect()).unwrap();
    let pool = hostile::pool();
    let type_named =
        |name: &str| pool.get_message_by_name(&format!("posh.volume.v1.{name}")).unwrap();
    let sound = sound(files)
        .into_iter()
        .map(|(name, bytes)| DynamicMessage::decode(type_named(name), &bytes[..]).unwrap());
    Peer {
        channel,
        service: pool.get_service_by_name("posh.volume.v1.Volume").unwrap(),
        sound: sound.collect(),
        greetings: (0..SESSIONS).map(|number| hello(number).encode_to_vec().into()).collect(),
        other: open(OTHER),
        calls: AtomicU64::new(0),
        runtime,
    }
}

/// The root, and the file and the directory in it.
async fn ids(store: &Remote) -> [FileId; 3] {
    let mut found = [store.root(); 3];
    for (place, name) in found[1..].iter_mut().zip(["f", "logs"]) {
        let walk = Op::Walk { from: store.root(), names: vec![name.into()] };
        let Ok(Answer::Walked(walked)) = store.call(&Caller::default(), walk).await else {
            panic!("no walk to {name}")
        };
        *place = walked.entries[0].attributes.id;
    }
    found
}

/// One or two hostile calls; then, now and then, sound ones.
pub fn calls(data: &[u8]) {
    let peer = peer();
    let mut source = Unstructured::new(data);
    let count = source.int_in_range(1..=2).unwrap_or(1);
    for _ in 0..count {
        let sound = (&*peer.sound, &*peer.greetings);
        let Ok(call) = Call::choose(&peer.service, &[], sound, &mut source) else { break };
        if let Some(words) = peer.runtime.block_on(call.make(&peer.channel)) {
            assert!(!words.contains("panic"), "{words}");
        }
    }
    if peer.calls.fetch_add(1, Ordering::Relaxed).is_multiple_of(BETWEEN_PROBES) {
        let probe = peer.runtime.block_on(async { timeout(PATIENCE, probe(&peer.other)).await });
        probe.expect("sound calls end in time");
    }
}

/// A file is made, written, read and removed.
async fn probe(store: &Remote) {
    let caller = Caller::default();
    let flags = OpenFlags::READ | OpenFlags::WRITE | OpenFlags::EXCLUSIVE;
    let create =
        Op::Create { parent: store.root(), name: "probe".into(), mode: 0o600.into(), flags };
    let Answer::Opened { handle, entry, .. } =
        store.call(&caller, create).await.expect("a file is made")
    else {
        panic!("it was not opened")
    };
    let place = Place { file: entry.attributes.id, handle: Some(handle) };
    let data = Bytes::from_static(b"sound");
    let written = store
        .write(&caller, vec![Write::At { place, offset: 0, data }])
        .await
        .expect("it is written");
    assert!(written.iter().all(Result::is_ok), "{written:?}");
    let mut pieces = store.read(&caller, vec![ReadPart { place, range: 0..u64::MAX }]).await;
    let mut read = Vec::new();
    while let Some(piece) = pieces.next().await {
        read.extend_from_slice(&piece.expect("it is read").data.expect("all of it"));
    }
    assert_eq!(read, b"sound", "something else was read");
    store.call(&caller, Op::Close(handle)).await.expect("it is closed");
    let remove = Op::Remove { parent: store.root(), name: "probe".into(), what: Removal::File };
    store.call(&caller, remove).await.expect("it is removed");
}

fn session(number: u8) -> Bytes {
    vec![b'a' + number; 16].into()
}

fn hello(number: u8) -> wire::ToVolume {
    let hello = wire::Hello {
        protocol: PROTOCOL_VERSION,
        session: session(number),
        export: "logs".into(),
        tell_acls: true,
        resumes: 0,
    };
    wire::ToVolume { kind: Some(wire::to_volume::Kind::Hello(hello)) }
}

/// Every kind of call once, about files that are there.
fn sound([root, file, directory]: [FileId; 3]) -> Vec<(&'static str, Vec<u8>)> {
    use wire::op::Kind;
    let id = |id: FileId| wire::FileId { inode: id.inode, generation: id.generation };
    let place = || Some(wire::Place { file: Some(id(file)), handle: None });
    let opened = || Some(wire::Place { file: Some(id(file)), handle: Some(1) });
    let name = |name: &'static str| Some(wire::Name { parent: Some(id(root)), name: name.into() });
    let make = |new| wire::Make { name: name(new), mode: 0o755, ..Default::default() };
    let extended =
        || wire::Extended { place: place(), name: "user.x".into(), value: "v".into(), how: 0 };
    let lock = || wire::Lock {
        place: opened(),
        owner: 1,
        access: 1,
        start: 0,
        end: 9,
        ..Default::default()
    };
    let changes = wire::Changes {
        size: Some(3),
        mtime: Some(wire::NewTime::default()),
        ..Default::default()
    };
    let ops = [
        Kind::Walk(wire::Walk { from: Some(id(root)), names: vec!["f".into()] }),
        Kind::Attributes(place().unwrap_or_default()),
        Kind::Set(wire::Set { place: place(), changes: Some(changes) }),
        Kind::List(wire::List { directory: Some(id(root)), cookie: 0, limit: 100 }),
        Kind::ReadLink(id(file)),
        Kind::MakeDirectory(make("a")),
        Kind::MakeNode(wire::Make { kind: 3, ..make("..") }),
        Kind::Symlink(wire::Make { target: "/etc".into(), ..make("cat") }),
        Kind::Link(wire::Make { file: place(), ..make("true") }),
        Kind::Remove(wire::Remove { name: name("true"), directory: false }),
        Kind::Rename(wire::Rename { from: name("f"), to: name("a"), how: 0 }),
        Kind::Create(wire::Open { name: name("f"), mode: 0o644, flags: 3, ..Default::default() }),
        Kind::Open(wire::Open { place: place(), flags: 3, ..Default::default() }),
        Kind::Close(1),
        Kind::Sync(wire::Sync { place: opened(), data_only: true }),
        Kind::Allocate(wire::Allocate { place: opened(), start: 0, end: 4096, how: 0 }),
        Kind::Seek(wire::Seek { place: opened(), offset: 0, hole: true }),
        Kind::CopyRange(wire::CopyRange {
            from: opened(),
            to: opened(),
            length: 2,
            to_offset: 4,
            ..Default::default()
        }),
        Kind::FileSystem(wire::Nothing {}),
        Kind::GetAttribute(extended()),
        Kind::SetAttribute(extended()),
        Kind::RemoveAttribute(extended()),
        Kind::ListAttributes(place().unwrap_or_default()),
        Kind::Lock(lock()),
        Kind::TestLock(lock()),
        Kind::Unlock(wire::Unlock { file: Some(id(file)), owner: 1 }),
        Kind::ReturnLeases(wire::ReturnLeases {
            leases: vec![wire::Notice {
                file: Some(id(directory)),
                leases: 15,
                stamp: 1,
                ..wire::Notice::default()
            }],
        }),
        Kind::Settle(true),
    ];
    let call = |(number, op): (u64, Kind)| {
        wire::to_volume::Kind::Call(wire::Call {
            number,
            caller: Some(wire::Caller::default()),
            op: Some(wire::Op { kind: Some(op) }),
            acknowledged: 0,
        })
    };
    let others = [
        wire::to_volume::Kind::Alive(wire::Alive { id: 1, acknowledged: 3, lost: 1 }),
        wire::to_volume::Kind::Cancel(2),
        wire::to_volume::Kind::Bye(wire::Nothing {}),
    ];
    let said = (1..).zip(ops).map(call).chain(others);
    let said = said.map(|kind| ("ToVolume", wire::ToVolume { kind: Some(kind) }.encode_to_vec()));
    let put = wire::Put {
        directory: Some(id(directory)),
        path: vec!["p".into()],
        data: "new".into(),
        mode: 0o644,
        ..Default::default()
    };
    let writes = [
        wire::write::Kind::At(wire::Bytes { place: place(), offset: 1, data: "x".into() }),
        wire::write::Kind::Append(wire::Bytes { place: place(), offset: 0, data: "y".into() }),
        wire::write::Kind::Put(put),
    ];
    let writes = writes.into_iter().map(|kind| wire::Write { kind: Some(kind) }).collect();
    let parts = vec![wire::ReadPart { place: place(), start: 0, end: 10 }];
    let bulk = [
        (
            "ReadRequest",
            wire::ReadRequest { session: session(0), caller: None, parts }.encode_to_vec(),
        ),
        (
            "WriteRequest",
            wire::WriteRequest { session: session(1), number: 1, writes, ..Default::default() }
                .encode_to_vec(),
        ),
    ];
    said.chain(bulk).collect()
}
