//! An executor with certificates, and whoever reaches its port: bytes before the handshake, bytes
//! after a handshake without a certificate, and enrolments. An identity is served all the while.

use std::{
    net::SocketAddr,
    path::Path,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use arbitrary::Unstructured;
use fs_mapper::config::TlsHost;
use hyper_util::rt::TokioIo;
use posh_executor::{
    Config,
    tls::{administer, authority::Authority, register::Register},
};
use posh_proto::{
    PROTOCOL_VERSION,
    executor::{DescribeRequest, EnrolRequest, RenewRequest, executor_client::ExecutorClient},
};
use posh_reach::tls;
use prost::Message as _;
use prost_reflect::{DynamicMessage, ServiceDescriptor};
use rustls::{ClientConfig, RootCertStore, pki_types::ServerName};
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    runtime::Runtime,
    time::timeout,
};
use tokio_rustls::TlsConnector;
use tonic::transport::{Channel, Endpoint};

use crate::{calls::Call, executor, hostile, scratch};

/// Strangers between two calls of the identity, which must succeed.
const BETWEEN_PROBES: u64 = 16;

/// For the identity's call.
const PATIENCE: Duration = Duration::from_secs(20);

/// A stranger listens so long to what is said to its bytes.
const LISTENS: Duration = Duration::from_millis(5);

/// Preface of every HTTP/2 connection (RFC 9113 §3.4), and empty settings.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";

struct Peer {
    runtime: Runtime,
    address: SocketAddr,
    without_certificate: Arc<ClientConfig>,
    enrolment: ServiceDescriptor,
    sound: Vec<DynamicMessage>,
    identity: Channel,
    strangers: AtomicU64,
}

fn peer() -> &'static Peer {
    static PEER: OnceLock<Peer> = OnceLock::new();
    PEER.get_or_init(start)
}

fn start() -> Peer {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let [certificates, store, home] = [(); 3].map(|()| scratch::directory());
    administer::init(&certificates, vec!["127.0.0.1".to_owned()]).unwrap();
    let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
    let address = listener.local_addr().unwrap();
    let mut config = configuration(&certificates, &store);
    config.runner_program = Some(executor::runner_program());
    runtime.spawn(posh_executor::run(config, listener, std::future::pending()));
    let host = TlsHost { host: "127.0.0.1".into(), port: address.port() };
    let credentials = home.join("ada");
    let token = Register::at(&certificates).token_for("ada").unwrap();
    let identity = runtime.block_on(async {
        tls::enrol::enrol(&host, &token, &credentials).await.unwrap();
        tls::channel(&host, &credentials).await.unwrap()
    });
    let pool = hostile::pool();
    let sound = [
        (
            "EnrolRequest",
            EnrolRequest { secret: vec![1; 16].into(), signing_request: vec![0x30; 64].into() }
                .encode_to_vec(),
        ),
        ("RenewRequest", RenewRequest { signing_request: vec![0x30; 64].into() }.encode_to_vec()),
    ];
    let sound = sound.into_iter().map(|(name, bytes)| {
        let of = pool.get_message_by_name(&format!("posh.executor.v1.{name}")).unwrap();
        DynamicMessage::decode(of, &bytes[..]).unwrap()
    });
    Peer {
        address,
        without_certificate: without_certificate(&certificates),
        enrolment: pool.get_service_by_name("posh.executor.v1.Enrolment").unwrap(),
        sound: sound.collect(),
        identity,
        strangers: AtomicU64::new(0),
        runtime,
    }
}

fn configuration(certificates: &Path, store: &Path) -> Config {
    let file = certificates.join("executor.toml");
    let (certificates, store) = (certificates.display(), store.display());
    let text = format!(
        "listen = \"127.0.0.1:0\"\n[tls]\ndir = \"{certificates}\"\n[[export]]\nname = \"logs\"\npath = \"{store}\"\n\
         [[identity]]\nname = \"ada\"\nuser = \"nobody\"\n"
    );
    std::fs::write(&file, text).unwrap();
    Config::load(&file).unwrap()
}

fn without_certificate(certificates: &Path) -> Arc<ClientConfig> {
    let mut roots = RootCertStore::empty();
    roots.add(Authority::at(certificates).certificate().unwrap()).unwrap();
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13]);
    let mut config = config.unwrap().with_root_certificates(roots).with_no_client_auth();
    config.alpn_protocols = vec![b"h2".to_vec()];
    Arc::new(config)
}

/// One stranger; now and then a call of the identity, which must be answered.
pub fn strangers(data: &[u8]) {
    let peer = peer();
    let mut source = Unstructured::new(data);
    let way = source.int_in_range(0..=2).unwrap_or(0);
    peer.runtime.block_on(async {
        match way {
            0 => say(TcpStream::connect(peer.address).await.unwrap(), source.take_rest()).await,
            1 => peer.say_after_handshake(source.take_rest()).await,
            _ => peer.enrol(&mut source).await,
        }
        if peer.strangers.fetch_add(1, Ordering::Relaxed).is_multiple_of(BETWEEN_PROBES) {
            let mut client = ExecutorClient::new(peer.identity.clone());
            let asked = client.describe(DescribeRequest { protocol: PROTOCOL_VERSION });
            timeout(PATIENCE, asked)
                .await
                .expect("an identity is answered in time")
                .expect("and served");
        }
    });
}

/// Says it, and hangs up.
async fn say(mut connection: impl AsyncRead + AsyncWrite + Unpin, bytes: &[u8]) {
    let mut answer = [0; 4096];
    if connection.write_all(bytes).await.is_ok() {
        let _ = timeout(LISTENS, connection.read(&mut answer)).await;
    }
}

impl Peer {
    async fn handshake(&self) -> Option<tokio_rustls::client::TlsStream<TcpStream>> {
        let stream = TcpStream::connect(self.address).await.ok()?;
        let name = ServerName::try_from("127.0.0.1").expect("an address");
        TlsConnector::from(self.without_certificate.clone()).connect(name, stream).await.ok()
    }

    async fn say_after_handshake(&self, bytes: &[u8]) {
        // Too many strangers at once are hung up on, which is no fault.
        let Some(stream) = self.handshake().await else { return };
        say(stream, &[PREFACE, bytes].concat()).await;
    }

    async fn enrol(&'static self, source: &mut Unstructured<'_>) {
        let Ok(call) = Call::choose(&self.enrolment, &[], (&self.sound, &[]), source) else {
            return;
        };
        let connector = tower::service_fn(move |_| async move {
            let stream = self.handshake().await.ok_or(std::io::ErrorKind::ConnectionReset)?;
            Ok::<_, std::io::Error>(TokioIo::new(stream))
        });
        let Ok(channel) =
            Endpoint::from_static("http://tls").connect_with_connector(connector).await
        else {
            return;
        };
        if let Some(words) = call.make(&channel).await {
            assert!(!words.contains("panic"), "{words}");
        }
    }
}

/// A ClientHello, frames of HTTP/2, and an enrolment.
pub fn seeds() -> Vec<Vec<u8>> {
    let hello = [&[0, 0x16, 3, 1, 0, 40, 1, 0, 0, 36, 3, 3][..], &[7; 40]].concat();
    let headers =
        [&[1, 0, 0, 8, 1, 5, 0, 0, 0, 1][..], &[0x83, 0x86, 0x84, 0x41, 0, 0x82, 0x87, 0x88]]
            .concat();
    let window = vec![1, 0, 0, 4, 8, 0, 0, 0, 0, 0, 0x7f, 0xff, 0xff, 0xff];
    let enrolments = executor::seeds().into_iter().map(|seed| [&[2], &seed[..]].concat());
    [hello, headers, window].into_iter().chain(enrolments).collect()
}
