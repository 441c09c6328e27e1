//! An executor with one export, a connection to it that can be cut, and short names for operations.

use std::{
    ffi::OsString,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use posh_executor::{Config, Export, config::Confinement, identity::UnixUser};
use posh_volume::{
    Errno, Store,
    remote::{CannotConnect, Connector, Patience, Remote},
    store::*,
};
use tempfile::TempDir;
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{oneshot, watch},
    task::JoinSet,
};
use tokio_stream::StreamExt as _;
use tonic::transport::{Channel, Endpoint};

/// Timeout for any expected event.
pub const PATIENCE: Duration = Duration::from_secs(30);
pub const EXPORT: &str = "data";
pub const RW: OpenFlags = OpenFlags::READ.union(OpenFlags::WRITE);

pub struct Site {
    pub top: TempDir,
    pub address: SocketAddr,
    _stop: oneshot::Sender<()>,
    _served: JoinSet<()>,
}

impl Site {
    pub async fn new() -> Self {
        let top = TempDir::new().unwrap();
        let export = Export {
            name: EXPORT.into(),
            path: top.path().to_owned(),
            read_only: false,
            exec: false,
            coherence: None,
            linked_from: None,
        };
        let config = Config {
            listen: SocketAddr::from(([127, 0, 0, 1], 0)),
            // Its callers are several users.
            confinement: Confinement {
                user: UnixUser::named("root").ok().map(Into::into),
                trust_caller_ids: true,
                ..Confinement::default()
            },
            runner_program: Some(PathBuf::from(env!("CARGO_BIN_EXE_posh-executor"))),
            ..Config::new(vec![export])
        };
        let listener = TcpListener::bind(config.listen).await.unwrap();
        let address = listener.local_addr().unwrap();
        let (stop, stopped) = oneshot::channel::<()>();
        let mut served = JoinSet::new();
        served.spawn(async move {
            let stopped = async {
                let _ = stopped.await;
            };
            posh_executor::run(config, listener, stopped).await.unwrap();
        });
        Self { top, address, _stop: stop, _served: served }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.top.path().join(name)
    }

    pub async fn remote(&self) -> Remote {
        Remote::open(Arc::new(Direct(self.address)), EXPORT, Patience::default()).await.unwrap()
    }
}

/// Connects directly to an address.
pub struct Direct(pub SocketAddr);

#[async_trait::async_trait]
impl Connector for Direct {
    async fn connect(&self) -> Result<Channel, CannotConnect> {
        let endpoint = Endpoint::from_shared(format!("http://{}", self.0)).unwrap();
        let endpoint =
            endpoint.initial_stream_window_size(8 << 20).initial_connection_window_size(64 << 20);
        let channel = endpoint.tcp_nodelay(true).connect().await;
        channel.map_err(|error| CannotConnect::Unreachable(error.to_string()))
    }
}

/// A proxy between a gateway and the executor.
pub struct Proxy {
    pub address: SocketAddr,
    /// Counts cuts; and true if new connections are let through.
    line: watch::Sender<(u64, bool)>,
    /// Counts freezes.
    frozen: watch::Sender<u64>,
    target: watch::Sender<SocketAddr>,
    _task: JoinSet<()>,
}

impl Proxy {
    pub async fn to(target: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (line, state) = watch::channel((0, true));
        let (frozen, ice) = watch::channel(0);
        let (target, leads_to) = watch::channel(target);
        let mut task = JoinSet::new();
        task.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((client, _)) = listener.accept().await {
                if state.borrow().1 {
                    connections.spawn(carry(
                        client,
                        *leads_to.borrow(),
                        (state.clone(), ice.clone()),
                    ));
                }
            }
        });
        Self { address, line, frozen, target, _task: task }
    }

    /// Breaks all connections; new ones go to another address.
    pub fn lead_to(&self, target: SocketAddr) {
        self.target.send_replace(target);
        self.cut();
    }

    /// Stops all connections without closing them; new ones work.
    pub fn freeze(&self) {
        self.frozen.send_modify(|count| *count += 1);
    }

    /// Breaks all connections.
    pub fn cut(&self) {
        self.line.send_modify(|line| line.0 += 1);
    }

    /// Breaks all connections, and lets none through until `open` is true.
    pub fn let_through(&self, open: bool) {
        self.line.send_modify(|line| *line = (line.0 + 1, open));
    }
}

async fn carry(
    mut client: TcpStream,
    target: SocketAddr,
    (mut line, mut ice): (watch::Receiver<(u64, bool)>, watch::Receiver<u64>),
) {
    line.mark_unchanged();
    ice.mark_unchanged();
    let Ok(mut server) = TcpStream::connect(target).await else { return };
    client.set_nodelay(true).unwrap();
    server.set_nodelay(true).unwrap();
    tokio::select! {
        _ = tokio::io::copy_bidirectional(&mut client, &mut server) => {}
        _ = line.changed() => {}
        _ = ice.changed() => drop(line.changed().await),
    }
}

pub fn me() -> Caller {
    Caller::default()
}

pub async fn call(store: &dyn Store, op: Op) -> Result<Answer, Errno> {
    tokio::time::timeout(PATIENCE, store.call(&me(), op)).await.expect("an answer")
}

pub async fn walk(store: &dyn Store, path: &str) -> Walked {
    let names = Path::new(path).iter().map(OsString::from).collect();
    match call(store, Op::Walk { from: store.root(), names }).await.unwrap() {
        Answer::Walked(walked) => walked,
        other => panic!("{other:?}"),
    }
}

pub async fn find(store: &dyn Store, path: &str) -> Result<Entry, Errno> {
    let walked = walk(store, path).await;
    match walked.error {
        Some(errno) => Err(errno),
        None => Ok(walked.entries.last().copied().unwrap_or(walked.from)),
    }
}

pub async fn open(
    store: &dyn Store,
    path: &str,
    flags: OpenFlags,
) -> Result<(Place, Entry), Errno> {
    let file = find(store, path).await?.attributes.id;
    match call(store, Op::Open { place: file.into(), flags }).await? {
        Answer::Opened { handle, entry, .. } => Ok((Place { file, handle: Some(handle) }, entry)),
        other => panic!("{other:?}"),
    }
}

pub async fn content(store: &dyn Store, place: Place) -> Result<(Vec<u8>, Option<Entry>), Errno> {
    let mut pieces = store.read(&me(), vec![ReadPart { place, range: 0..u64::MAX }]).await;
    let (mut content, mut entry) = (Vec::new(), None);
    while let Some(piece) = tokio::time::timeout(PATIENCE, pieces.next()).await.expect("bytes") {
        let piece = piece?;
        entry = entry.or(piece.entry);
        assert_eq!(piece.offset, content.len() as u64);
        content.extend_from_slice(&piece.data?);
    }
    Ok((content, entry))
}

pub async fn write(
    store: &dyn Store,
    place: Place,
    offset: u64,
    data: Vec<u8>,
) -> Result<Entry, Errno> {
    let write = Write::At { place, offset, data: Bytes::from(data) };
    let mut results = tokio::time::timeout(PATIENCE, store.write(&me(), vec![write]))
        .await
        .expect("an answer")?;
    results.remove(0)
}
