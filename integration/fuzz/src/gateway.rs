//! A gateway in this process, beside an executor: its service, and its stage socket.

use std::{
    path::PathBuf,
    sync::{
        OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use arbitrary::Unstructured;
use bytes::BytesMut;
use fs_mapper::config::Config;
use hyper_util::rt::TokioIo;
use posh_gateway::Listeners;
use posh_proto::{
    PROTOCOL_VERSION,
    gateway::{
        PlanRequest, PlannedStage, ReportRequest, ResolveRequest, StatusRequest,
        gateway_client::GatewayClient,
    },
    stage::{Credit, Data, Descriptor, Enlist, OpenSession, Signal, ToGateway, to_gateway::Kind},
};
use prost::Message;
use prost_reflect::{DynamicMessage, MessageDescriptor, ServiceDescriptor};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{UnixListener, UnixStream},
    time::timeout,
};
use tonic::transport::{Channel, Endpoint};

use crate::{calls::Call, executor, hostile, scratch};

/// Hostile calls between two sound ones.
const BETWEEN_PROBES: u64 = 16;

/// For a sound call.
const PATIENCE: Duration = Duration::from_secs(20);

/// A stage that says no more is waited for so long.
const STAGE: Duration = Duration::from_millis(50);

/// Messages of a stage.
const MAX_MESSAGES: usize = 6;

/// A gateway with one executor and one mount of it.
pub struct Gateway {
    pub channel: Channel,
    pub stages: PathBuf,
    pub mount: PathBuf,
}

struct Peer {
    gateway: Gateway,
    service: ServiceDescriptor,
    to_gateway: MessageDescriptor,
    sound: Vec<DynamicMessage>,
    calls: AtomicU64,
}

fn peer() -> &'static Peer {
    static PEER: OnceLock<Peer> = OnceLock::new();
    PEER.get_or_init(|| {
        let gateway = executor::peer()
            .runtime
            .block_on(start(&format!("http://{}", executor::peer().address)));
        let pool = hostile::pool();
        let sound =
            sound(gateway.mount.as_os_str().as_encoded_bytes()).into_iter().map(|(name, bytes)| {
                DynamicMessage::decode(pool.get_message_by_name(name).unwrap(), &bytes[..]).unwrap()
            });
        Peer {
            sound: sound.collect(),
            gateway,
            service: pool.get_service_by_name("posh.gateway.v1.Gateway").unwrap(),
            to_gateway: pool.get_message_by_name("posh.stage.v1.ToGateway").unwrap(),
            calls: AtomicU64::new(0),
        }
    })
}

/// Starts one in this process, for as long as that lives.
pub async fn start(address: &str) -> Gateway {
    let directory = scratch::directory();
    let [grpc, stages, mount] = ["g.sock", "g.stage", "mount"].map(|name| directory.join(name));
    std::fs::create_dir(&mount).unwrap();
    let text = format!(
        "[[executor]]\nname = \"store\"\naddress = \"{address}\"\n[[mount]]\npath = \"{}\"\nexecutor = \"store\"\nexport = \"logs\"\n\
         coherence = \"bind\"\n[gateway]\nsshfs = \"off\"\nidle_timeout_s = 86400\n",
        mount.display()
    );
    let config = Config::parse(&text, &directory.join("mounts.toml")).unwrap();
    let listeners = Listeners {
        grpc: UnixListener::bind(&grpc).unwrap(),
        stages: UnixListener::bind(&stages).unwrap(),
        stage_socket: stages.clone(),
        directory,
    };
    tokio::spawn(posh_gateway::run(config, listeners, std::future::pending()));
    let connect = tower::service_fn(move |_| {
        let socket = grpc.clone();
        async move { UnixStream::connect(socket).await.map(TokioIo::new) }
    });
    let channel =
        Endpoint::from_static("http://gateway").connect_with_connector(connect).await.unwrap();
    Gateway { channel, stages, mount }
}

/// Valid messages of a front end and of a stage.
fn sound(mount: &[u8]) -> Vec<(&'static str, Vec<u8>)> {
    let mount = mount.to_vec();
    let file = [&mount[..], b"/f"].concat();
    let argv = vec!["cat".into(), file.clone().into()];
    let open = OpenSession {
        protocol: PROTOCOL_VERSION,
        pid: std::process::id(),
        path: "/usr/bin:/bin".into(),
        stage_program: "/bin/true".into(),
        ..OpenSession::default()
    };
    let stage = PlannedStage { argv: argv.clone(), ..PlannedStage::default() };
    let plan = PlanRequest {
        cwd: mount.clone().into(),
        stages: vec![stage.clone(), stage],
        json: true,
        split: 2,
    };
    let enlist = Enlist {
        protocol: PROTOCOL_VERSION,
        session: "s1".into(),
        pid: std::process::id(),
        name: "cat".into(),
        program: "/bin/cat".into(),
        argv,
        env: vec!["PATH=/bin".into()],
        cwd: mount.into(),
        descriptors: (0..3)
            .map(|fd| Descriptor { fd, kind: 5, path: "/dev/null".into(), ..Descriptor::default() })
            .collect(),
        ..Enlist::default()
    };
    let mut all = vec![
        ("posh.gateway.v1.PlanRequest", plan.encode_to_vec()),
        (
            "posh.gateway.v1.ResolveRequest",
            ResolveRequest { path: file.into(), cwd: "/".into() }.encode_to_vec(),
        ),
        (
            "posh.gateway.v1.ReportRequest",
            ReportRequest { session: "s1".into(), ..ReportRequest::default() }.encode_to_vec(),
        ),
    ];
    let says = [
        Kind::OpenSession(open),
        Kind::Enlist(enlist.clone()),
        Kind::Enlist(enlist),
        Kind::Ack(posh_proto::stage::Ack {}),
        Kind::Data(Data { fd: 0, data: "x".into() }),
        Kind::End(0),
        Kind::Credit(Credit { fd: 1, bytes: 9 }),
        Kind::Signal(Signal { signal: 2, group: false }),
    ];
    all.extend(
        says.map(|kind| {
            ("posh.stage.v1.ToGateway", ToGateway { kind: Some(kind) }.encode_to_vec())
        }),
    );
    all
}

/// Calls of the gateway's service; not the one that ends it.
pub fn calls(data: &[u8]) {
    let peer = peer();
    let mut source = Unstructured::new(data);
    let Ok(call) = Call::choose(&peer.service, &["Shutdown"], (&peer.sound, &[]), &mut source)
    else {
        return;
    };
    let runtime = &executor::peer().runtime;
    runtime.block_on(call.make(&peer.gateway.channel));
    runtime.block_on(peer.probe());
}

/// Frames from a stage, some with a wrong length.
pub fn stage_socket(data: &[u8]) {
    let peer = peer();
    let mut source = Unstructured::new(data);
    let Ok(bytes) = peer.frames(&mut source) else { return };
    executor::peer().runtime.block_on(async {
        let mut stage =
            UnixStream::connect(&peer.gateway.stages).await.expect("the gateway takes stages");
        // It may hang up in the middle.
        let _ = stage.write_all(&bytes).await;
        let _ = timeout(STAGE, stage.read(&mut [0; 4096])).await;
        drop(stage);
        peer.probe().await;
    });
}

impl Peer {
    fn frames(&self, source: &mut Unstructured<'_>) -> arbitrary::Result<Vec<u8>> {
        let mut bytes = BytesMut::new();
        for _ in 0..source.int_in_range(1..=MAX_MESSAGES)? {
            let message = hostile::message(&self.to_gateway, &self.sound, source)?.encode_to_vec();
            let length = if source.ratio(1, 20)? {
                source.arbitrary()?
            } else {
                u32::try_from(message.len()).unwrap()
            };
            bytes.extend_from_slice(&length.to_le_bytes());
            bytes.extend_from_slice(&message);
        }
        Ok(bytes.to_vec())
    }

    async fn probe(&self) {
        if !self.calls.fetch_add(1, Ordering::Relaxed).is_multiple_of(BETWEEN_PROBES) {
            return;
        }
        let mut client = GatewayClient::new(self.gateway.channel.clone());
        let status = timeout(PATIENCE, client.status(StatusRequest {})).await;
        status.expect("the gateway answers in time").expect("no error");
    }
}

pub fn seeds() -> Vec<Vec<u8>> {
    executor::seeds()
}

pub fn stage_seeds() -> Vec<Vec<u8>> {
    executor::seeds()
}
