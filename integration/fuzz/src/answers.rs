//! A gateway beside an executor that lies: what it answers to a run is hostile, in any order,
//! and a stage waits for its end.

use std::{
    convert::Infallible,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    pin::Pin,
    sync::{Arc, Mutex, OnceLock},
    task::{Context, Poll},
    time::Duration,
};

use arbitrary::Unstructured;
use bytes::{Bytes, BytesMut};
use fs_mapper::mountinfo::mount_id;
use posh_proto::{
    PROTOCOL_VERSION,
    executor::{
        Chunk, Credit, Exited, Finished, Offset, Rejected, RunOutput, Started, VolumeMark,
        exited::How, run_output,
    },
    frame,
    stage::{
        self, Descriptor, Enlist, OpenSession, ToGateway, ToStage, descriptor::Kind, to_gateway,
        to_stage,
    },
};
use prost::Message as _;
use prost_reflect::{DynamicMessage, MessageDescriptor};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, UnixStream},
    sync::mpsc,
    time::timeout,
};
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tonic::{
    Request, Response, Status, Streaming,
    body::Body,
    client,
    codegen::http,
    server::{Grpc, NamedService, StreamingService},
    transport::Server,
};

use crate::{calls::Raw, executor, gateway, hostile};

/// After the executor's last word a stage must be told to end within this.
const PATIENCE: Duration = Duration::from_secs(20);

/// Before the gateway is asked again.
const RECONNECTION: Duration = Duration::from_millis(10);

/// Messages of one run.
const MAX_MESSAGES: usize = 8;

/// Answers to the next run.
static NEXT: Mutex<Vec<Bytes>> = Mutex::new(Vec::new());

struct Peer {
    stages: PathBuf,
    mount: PathBuf,
    session: String,
    of: MessageDescriptor,
    sound: Vec<DynamicMessage>,
}

fn peer() -> &'static Peer {
    static PEER: OnceLock<Peer> = OnceLock::new();
    PEER.get_or_init(|| executor::peer().runtime.block_on(start()))
}

async fn start() -> Peer {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let liar = Server::builder().add_service(Liar);
    tokio::spawn(liar.serve_with_incoming(TcpListenerStream::new(listener)));
    let gateway = gateway::start(&address).await;
    let request = OpenSession {
        protocol: PROTOCOL_VERSION,
        pid: std::process::id(),
        path: "/usr/bin:/bin".into(),
        stage_program: "/bin/true".into(),
        ..OpenSession::default()
    };
    let session = open_session(&gateway.stages, request).await;
    let pool = hostile::pool();
    let of = pool.get_message_by_name("posh.executor.v1.RunOutput").unwrap();
    let sound = outputs()
        .into_iter()
        .map(|output| DynamicMessage::decode(of.clone(), &output[..]).unwrap())
        .collect();
    let (stages, mount) = (gateway.stages.clone(), gateway.mount.clone());
    // It lives as long as the process.
    std::mem::forget(gateway);
    Peer { stages, mount, session, of, sound }
}

async fn open_session(stages: &Path, request: OpenSession) -> String {
    let mut socket = UnixStream::connect(stages).await.expect("the gateway takes shells");
    send(&mut socket, to_gateway::Kind::OpenSession(request)).await;
    let mut buffer = BytesMut::new();
    while socket.read_buf(&mut buffer).await.unwrap() > 0 {}
    match frame::decode::<ToStage>(&mut buffer).unwrap().and_then(|said| said.kind) {
        Some(to_stage::Kind::SessionOpened(opened)) => opened.session,
        other => panic!("{other:?}"),
    }
}

fn said(kind: run_output::Kind) -> Bytes {
    RunOutput { kind: Some(kind) }.encode_to_vec().into()
}

/// A run's whole answer, streams numbered as gateways do.
fn outputs() -> Vec<Bytes> {
    use run_output::Kind;
    let exited = Exited { stage: 0, how: Some(How::Code(0)), ..Exited::default() };
    let odd = Exited {
        offsets: vec![Offset { fd: 1, offset: 7 }],
        changes_incomplete: true,
        volume_marks: vec![VolumeMark { session: vec![b'a'; 16].into(), stamp: 1 }],
        ..exited.clone()
    };
    let mut all = vec![said(Kind::Started(Started::default()))];
    all.extend((0..6).flat_map(|stream| {
        [
            said(Kind::Chunk(Chunk { stream, data: "x\n".into() })),
            said(Kind::End(stream)),
            said(Kind::Closed(stream)),
        ]
    }));
    all.extend([
        said(Kind::Exited(exited)),
        said(Kind::Exited(odd)),
        said(Kind::Credit(Credit { stream: 1, bytes: 1 << 20 })),
        said(Kind::Rejected(Rejected { kind: 5, message: "no".into(), stage: 0 })),
        said(Kind::Finished(Finished::default())),
    ]);
    all
}

/// One run and its hostile answer; the stage must be told to end, or to run its command itself.
pub fn answers(data: &[u8]) {
    let peer = peer();
    let mut source = Unstructured::new(data);
    let Ok(messages) = peer.messages(&mut source) else { return };
    *NEXT.lock().unwrap() = messages;
    executor::peer().runtime.block_on(async {
        timeout(PATIENCE, peer.stage())
            .await
            .expect("the stage is told to end, and runs go there again");
    });
}

impl Peer {
    fn messages(&self, source: &mut Unstructured<'_>) -> arbitrary::Result<Vec<Bytes>> {
        let mut messages = Vec::new();
        // Mostly, for else nothing comes of the others.
        if source.ratio(7, 8)? {
            messages.push(outputs()[0].clone());
        }
        for _ in 0..source.int_in_range(0..=MAX_MESSAGES)? {
            messages.push(hostile::message(&self.of, &self.sound, source)?.encode_to_vec().into());
        }
        Ok(messages)
    }

    /// `cat MOUNT/f` again and again, until it was to run remotely: the gateway connects anew
    /// where it had reason to doubt a connection.
    async fn stage(&self) {
        while !self.stage_once().await {
            tokio::time::sleep(RECONNECTION).await;
        }
    }

    /// Enlists the stage once, as its stage program would; true if it was to run remotely.
    async fn stage_once(&self) -> bool {
        let mut socket = UnixStream::connect(&self.stages).await.expect("the gateway takes stages");
        send(&mut socket, to_gateway::Kind::Enlist(self.enlist())).await;
        let mut is_remote = false;
        let mut buffer = BytesMut::new();
        loop {
            while let Some(said) =
                frame::decode::<ToStage>(&mut buffer).expect("the gateway sends frames")
            {
                match said.kind {
                    Some(to_stage::Kind::Remote(_)) => {
                        is_remote = true;
                        send(&mut socket, to_gateway::Kind::Ack(stage::Ack {})).await;
                    }
                    Some(to_stage::Kind::Data(data)) => {
                        let credit = stage::Credit { fd: data.fd, bytes: data.data.len() as u64 };
                        send(&mut socket, to_gateway::Kind::Credit(credit)).await;
                    }
                    Some(to_stage::Kind::RunHere(here)) => {
                        // Others mount things on this machine meanwhile.
                        let passing = ["is not in reach", "mounts have changed just now"];
                        let is_passing = passing.iter().any(|why| here.reason.contains(why));
                        assert!(is_remote || is_passing, "runs here because {}", here.reason);
                        return is_remote;
                    }
                    Some(to_stage::Kind::Exit(_) | to_stage::Kind::Again(_)) => return true,
                    _ => {}
                }
            }
            let count = socket.read_buf(&mut buffer).await.expect("no error");
            assert!(count > 0, "the gateway hung up on a stage");
        }
    }

    fn enlist(&self) -> Enlist {
        let null = |fd: u32| Descriptor {
            fd,
            kind: Kind::Null.into(),
            path: "/dev/null".into(),
            ..Descriptor::default()
        };
        // A file of this machine: its bytes come through the gateway.
        let out = self.mount.with_file_name("out");
        std::fs::write(&out, "").unwrap();
        let metadata = std::fs::metadata(&out).unwrap();
        let file = |fd: u32| Descriptor {
            fd,
            kind: Kind::File.into(),
            path: out.as_os_str().as_encoded_bytes().to_vec().into(),
            device: metadata.dev(),
            inode: metadata.ino(),
            flags: 1,
            mount_id: mount_id(std::fs::File::open(&out).unwrap()),
            ..Descriptor::default()
        };
        let namespace = std::fs::metadata("/proc/self/ns/mnt").unwrap().ino();
        let operand = [self.mount.as_os_str().as_encoded_bytes(), b"/f"].concat();
        Enlist {
            protocol: PROTOCOL_VERSION,
            session: self.session.clone(),
            pid: std::process::id(),
            name: "cat".into(),
            program: "/usr/bin/cat".into(),
            argv: vec!["cat".into(), operand.into()],
            env: vec!["PATH=/usr/bin:/bin".into()],
            cwd: "/".into(),
            cwd_mount_id: mount_id(std::fs::File::open("/").unwrap()),
            umask: 0o022,
            descriptors: vec![null(0), file(1), file(2)],
            mount_namespace: namespace,
            ..Enlist::default()
        }
    }
}

async fn send(socket: &mut UnixStream, kind: to_gateway::Kind) {
    let mut bytes = BytesMut::new();
    frame::encode(&ToGateway { kind: Some(kind) }, &mut bytes);
    // It may have hung up already; reading tells.
    let _ = socket.write_all(&bytes).await;
}

/// The executor that lies about runs; all else is answered by a real one.
#[derive(Clone)]
struct Liar;

impl NamedService for Liar {
    const NAME: &'static str = "posh.executor.v1.Executor";
}

impl tower::Service<http::Request<Body>> for Liar {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let path = Arc::new(request.uri().path().to_owned());
        Box::pin(async move { Ok(Grpc::new(Raw).streaming(Answer(path), request).await) })
    }
}

/// The answer to one call.
struct Answer(Arc<String>);

type Answers = Pin<
    Box<
        dyn Future<Output = Result<Response<ReceiverStream<Result<Bytes, Status>>>, Status>> + Send,
    >,
>;

impl StreamingService<Bytes> for Answer {
    type Response = Bytes;
    type ResponseStream = ReceiverStream<Result<Bytes, Status>>;
    type Future = Answers;

    fn call(&mut self, request: Request<Streaming<Bytes>>) -> Answers {
        let path = self.0.clone();
        Box::pin(async move {
            let (answers, stream) = mpsc::channel(MAX_MESSAGES + 1);
            if path.ends_with("/Run") {
                let messages = std::mem::take(&mut *NEXT.lock().unwrap());
                let mut input = request.into_inner();
                tokio::spawn(async move {
                    for message in messages {
                        let _ = answers.send(Ok(message)).await;
                    }
                    // Then it is gone, whatever it has left out; what the gateway said meanwhile is
                    // read.
                    while let Ok(Ok(Some(_))) =
                        timeout(Duration::from_millis(2), input.message()).await
                    {
                    }
                });
            } else {
                let mut input = request.into_inner();
                let message = input.message().await?.unwrap_or_default();
                let mut real = client::Grpc::new(executor::peer().channel.clone());
                real.ready().await.map_err(|error| Status::unavailable(error.to_string()))?;
                let path = (*path).clone().try_into().expect("it was one");
                let answer = real.unary(Request::new(message), path, Raw).await?.into_inner();
                let _ = answers.send(Ok(answer)).await;
            }
            Ok(Response::new(ReceiverStream::new(stream)))
        })
    }
}

pub fn seeds() -> Vec<Vec<u8>> {
    executor::seeds()
}
