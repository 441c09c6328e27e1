//! Life of the gateway: from a checked configuration and two listening sockets until a shutdown
//! request or the idle timeout.

use std::{
    future::Future,
    io,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use fs_mapper::{
    MountTable,
    config::{Config, annotation_directories},
    mountinfo::{MountInfoError, MountSnapshot},
    sshfs,
};
use nix::sys::resource::{Resource, getrlimit};
use posh_annotations::{Because, Library};
use posh_proto::{
    DESCRIPTORS, MAX_MESSAGE_BYTES, brief,
    gateway::gateway_server::GatewayServer,
    rule::{self, Rule},
    untrusted::escaped,
};
use tokio::{
    io::{Interest, unix::AsyncFd},
    net::{UnixListener, UnixStream},
    sync::{Notify, mpsc, watch},
};
use tokio_stream::{StreamExt as _, wrappers::UnixListenerStream};
use tonic::transport::Server;
use tower::util::MapResponseLayer;

use crate::{
    assembly::{Assembler, Pipeline},
    dispatch,
    enlisted::Enlisted,
    executors::Executors,
    memory,
    opening::{self, SessionRefused},
    peers,
    service::GatewayCalls,
    session::Sessions,
    stage_link::{self, Room, StageSocketClient},
    state::{Gateway, View},
    volumes::Volumes,
};

/// Time for running pipelines to end after a shutdown request.
const DRAIN: Duration = Duration::from_secs(5);

/// Time for final answers to clients.
const LAST_ANSWERS: Duration = Duration::from_secs(1);
/// Time without a pipeline after which memory is returned.
const QUIET: Duration = Duration::from_secs(1);

/// Sockets of the gateway. The stage socket's path is published to stages.
pub struct Listeners {
    /// gRPC.
    pub grpc: UnixListener,
    /// The stage protocol.
    pub stages: UnixListener,
    /// The stage socket's path.
    pub stage_socket: PathBuf,
    /// Directory of session directories; only this user may write there.
    pub directory: PathBuf,
}

/// Reason for a failed start, or for an unrequested end.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// /proc/self/mountinfo could not be read.
    #[error("cannot read the mount table of this machine")]
    Mounts(#[from] MountInfoError),
    /// The gRPC server failed.
    #[error("gRPC server")]
    Grpc(#[from] tonic::transport::Error),
    /// The reflection service refused our own descriptors.
    #[error("reflection service")]
    Reflection(#[from] tonic_reflection::server::Error),
}

/// Serves until `shutdown` completes, a client asks for the end, or the gateway was idle (no
/// session and no volume) for the configured time.
///
/// # Errors
/// [`ServeError`].
pub async fn run(
    config: Config,
    listeners: Listeners,
    shutdown: impl Future<Output = ()>,
) -> Result<(), ServeError> {
    let library = load_annotations(&config);
    let (mounts, info) = MountSnapshot::take()?;
    let (with_sshfs, _) = sshfs::adopted(&config, &info);
    let table = MountTable::new(&with_sshfs, &info);
    let commands = Arc::new(library.commands().map(str::to_owned).collect::<Vec<_>>());
    let executors = Executors::start(&with_sshfs, &commands);
    let sessions = Sessions::new(listeners.directory.clone(), listeners.stage_socket.clone());
    let (assembler, pipelines) = Assembler::start(Arc::clone(&sessions), executors.clone());
    let idle = Duration::from_secs(config.gateway.idle_timeout_s);
    let view = View { table: Arc::new(table), mounts, number: 0, library: Arc::new(library) };
    let gateway = Arc::new(Gateway::new(config, view, executors, Arc::clone(&sessions), assembler));
    let asked_to_end = Arc::new(Notify::new());

    let tasks = [
        tokio::spawn(accept_stages(Arc::clone(&gateway), listeners.stages)),
        tokio::spawn(carry_out_all(Arc::clone(&gateway), pipelines)),
        tokio::spawn(watch_mounts(Arc::clone(&gateway))),
        tokio::spawn(give_memory_back(Arc::clone(&gateway))),
        tokio::spawn(prepare_annotations(Arc::clone(&gateway))),
        tokio::spawn(Arc::clone(&sessions).remove_left()),
    ];
    Volumes::begin(&gateway);
    let service = GatewayCalls::new(Arc::clone(&gateway), Arc::clone(&asked_to_end));
    let end = async {
        tokio::select! {
            () = shutdown => tracing::info!("told to end"),
            () = asked_to_end.notified() => tracing::info!("asked to end"),
            () = idle_for(&sessions, gateway.volumes.count(), idle) => {
                tracing::info!(?idle, "nobody needs this gateway")
            }
        }
    };
    let served = serve_grpc(&gateway, service, listeners.grpc, end).await;
    drain(&gateway).await;
    gateway.volumes.end().await;
    tasks.iter().for_each(tokio::task::JoinHandle::abort);
    sessions.close_all();
    served
}

/// Kinds of reasons for running locally, by the rule that they enforce.
const REASONS: [(Rule, Because); 3] = [
    (Rule::AskingCommands, Because::Asks),
    (Rule::MetadataCommands, Because::CheapThroughMount),
    (Rule::MountDifferences, Because::MountDiffers),
];

fn load_annotations(config: &Config) -> Library {
    let mut directories = Vec::new();
    for directory in annotation_directories(Some(config)) {
        match directory {
            Ok(directory) => directories.push(directory),
            Err(why) => tracing::warn!("annotations not used: {}", escaped(&why.to_string())),
        }
    }
    let (mut library, mistakes) = Library::load(&directories);
    let ignored = REASONS.iter().filter(|(rule, _)| !rule::holds(*rule)).map(|(_, kind)| *kind);
    library.ignore_reasons(ignored.collect());
    // A file with mistakes is ignored: its commands run locally, and the log and `posh annotations
    // check` say why.
    mistakes.iter().for_each(|mistake| tracing::warn!(%mistake, "annotation file not used"));
    library
}

async fn serve_grpc(
    gateway: &Gateway,
    service: GatewayCalls,
    listener: UnixListener,
    end: impl Future<Output = ()>,
) -> Result<(), ServeError> {
    let (health_reporter, health) = tonic_health::server::health_reporter();
    health_reporter.set_serving::<GatewayServer<GatewayCalls>>().await;
    let reflection = tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(DESCRIPTORS)
        .build_v1()?;
    let (stop, stopped) = tokio::sync::oneshot::channel();
    let incoming = UnixListenerStream::new(listener).then(|client| async {
        others_first().await;
        client
    });
    let clients = incoming.filter(|client| {
        let Ok(client) = client else { return true };
        let refused = match peers::own(client) {
            Ok(peer) => gateway.confined(&peer),
            Err(error) => Some(error.to_string()),
        };
        if let Some(why) = &refused {
            tracing::warn!(why, "a client was not let in");
        }
        refused.is_none()
    });
    let server = Server::builder()
        .layer(MapResponseLayer::new(brief::shortened))
        .add_service(GatewayServer::new(service).max_decoding_message_size(MAX_MESSAGE_BYTES))
        .add_service(health)
        .add_service(reflection)
        .serve_with_incoming_shutdown(clients, async {
            let _ = stopped.await;
        });
    tokio::pin!(server);
    tokio::select! {
        served = &mut server => return served.map_err(ServeError::from),
        () = end => {}
    }
    // The answer to the shutdown request must still be sent.
    let _ = stop.send(());
    let _ = tokio::time::timeout(LAST_ANSWERS, server).await;
    Ok(())
}

/// Lets every other task run that can, and the sockets be looked at, before the next connection is
/// accepted: else a process that connects without pause has 128 connections served (tokio's budget
/// of a task) for each step of a command.
async fn others_first() {
    tokio::task::yield_now().await;
}

async fn next_connection(listener: &UnixListener) -> io::Result<UnixStream> {
    others_first().await;
    Ok(listener.accept().await?.0)
}

async fn accept_stages(gateway: Arc<Gateway>, listener: UnixListener) {
    let descriptors = getrlimit(Resource::RLIMIT_NOFILE).map_or(1024, |(soft, _)| soft);
    let room = Room::among(descriptors);
    loop {
        let Ok(socket) = next_connection(&listener).await else {
            // Probably out of descriptors: stages that can't connect run locally.
            tokio::time::sleep(Duration::from_millis(10)).await;
            continue;
        };
        let admitted = peers::own(&socket).and_then(|peer| {
            let place = room.enter(peer.number).map_err(io::Error::other)?;
            Ok((peer, place))
        });
        let (peer, place) = match admitted {
            Ok(admitted) => admitted,
            Err(error) => {
                tracing::warn!(%error, "a caller was not let in");
                continue;
            }
        };
        let gateway = Arc::clone(&gateway);
        tokio::spawn(async move {
            if place.is_crowded()
                && let Some(why) = gateway.confined(&peer)
            {
                return tracing::warn!(why, "a caller was not let in among many");
            }
            let question = gateway.assembler.asks(peer.number);
            match stage_link::accept(socket, &peer, place, || gateway.confined(&peer)).await {
                Ok(StageSocketClient::Stage(mut stage)) => {
                    dispatch::look_at_once(&gateway, Arc::make_mut(&mut stage.enlisted), &peer);
                    gateway.assembler.enlisted(stage, question).await;
                }
                Ok(StageSocketClient::Shell(request, shell)) => {
                    // It may be a command of a pipeline, but is not a stage.
                    drop(question);
                    let opened = match gateway.confined(&peer) {
                        Some(why) => Err(SessionRefused::Confined(why)),
                        None => opening::open(&gateway, *request),
                    };
                    stage_link::tell_shell(shell, opened).await;
                }
                Ok(StageSocketClient::Executing(question, pid, process)) => {
                    let Some(mut command) =
                        Enlisted::about_to_execute(question, pid, gateway.mount_namespace)
                    else {
                        return;
                    };
                    if dispatch::stays_at_once(&gateway, &mut command, &peer) {
                        gateway.assembler.let_go(command).await;
                        stage_link::tell_to_stay(process).await;
                    }
                }
                Err(error) => tracing::warn!(%error, "a caller was not taken in"),
            }
        });
    }
}

async fn carry_out_all(gateway: Arc<Gateway>, mut pipelines: mpsc::Receiver<Pipeline>) {
    while let Some(pipeline) = pipelines.recv().await {
        let gateway = Arc::clone(&gateway);
        tokio::spawn(async move {
            let _at_work = RunningPipeline::new(&gateway.running);
            dispatch::carry_out(Arc::clone(&gateway), pipeline).await;
        });
    }
}

/// Counts a pipeline while it runs, even if its task is aborted.
struct RunningPipeline<'a>(&'a AtomicUsize);

impl<'a> RunningPipeline<'a> {
    fn new(count: &'a AtomicUsize) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(count)
    }
}

impl Drop for RunningPipeline<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Prepares annotations, so that the first command of each name need not wait. That competes with
/// running work for memory and caches (a session over sshfs took 0.20 s instead of 0.16), so it
/// waits for a second without a pipeline.
async fn prepare_annotations(gateway: Arc<Gateway>) {
    let mut before = u64::MAX;
    loop {
        tokio::time::sleep(QUIET).await;
        let (running, total) = (gateway.running.load(Ordering::Relaxed), gateway.pipelines());
        if running == 0 && total == before {
            break;
        }
        before = total;
    }
    let library = Arc::clone(&gateway.view().library);
    let _ = tokio::task::spawn_blocking(move || library.prepare()).await;
}

/// Returns memory between pipelines: after a large one, the allocator keeps tens of megabytes.
async fn give_memory_back(gateway: Arc<Gateway>) {
    let mut trimmed_after = 0;
    loop {
        tokio::time::sleep(QUIET).await;
        let (running, total) = (gateway.running.load(Ordering::Relaxed), gateway.pipelines());
        if running == 0 && total != trimmed_after {
            memory::trim();
            trimmed_after = total;
        }
    }
}

/// Watches mounts: poll(2) reports an exceptional condition on mountinfo for each mount and unmount
/// (proc_pid_mountinfo(5)). A plan that finds another change, as a renamed directory, says so.
async fn watch_mounts(gateway: Arc<Gateway>) {
    let file = match std::fs::File::open(Path::new("/proc/self/mountinfo")) {
        Ok(file) => file,
        Err(error) => return tracing::warn!(%error, "cannot watch mounts"),
    };
    #[expect(
        deprecated,
        reason = "the replacement is unsafe; a File owns its descriptor for its whole life"
    )]
    let watched = match AsyncFd::with_interest(file, Interest::PRIORITY | Interest::ERROR) {
        Ok(watched) => watched,
        Err(error) => return tracing::warn!(%error, "cannot watch mounts"),
    };
    loop {
        tokio::select! {
            ready = watched.ready(Interest::PRIORITY | Interest::ERROR) => match ready {
                Ok(mut ready) => ready.clear_ready(),
                Err(_) => return,
            },
            () = gateway.table_is_old.notified() => {}
            // Nothing else tells when a renamed directory brings a mount back to its path.
            () = tokio::time::sleep(QUIET) => if !gateway.view().mounts.has_changed() {
                continue;
            }
        }
        gateway.mounts_changed();
    }
}

/// Completes after `idle` without sessions and volumes.
async fn idle_for(all: &Sessions, mut volumes: watch::Receiver<usize>, idle: Duration) {
    let mut sessions = all.count();
    loop {
        if sessions.wait_for(|n| *n == 0).await.is_err()
            || volumes.wait_for(|n| *n == 0).await.is_err()
        {
            return;
        }
        let needed = async {
            tokio::select! {
                _ = sessions.wait_for(|n| *n > 0) => {}
                _ = volumes.wait_for(|n| *n > 0) => {}
            }
        };
        if tokio::time::timeout(idle, needed).await.is_err() {
            return;
        }
    }
}

async fn drain(gateway: &Gateway) {
    let deadline = tokio::time::Instant::now() + DRAIN;
    while gateway.running.load(Ordering::Relaxed) > 0 && tokio::time::Instant::now() < deadline {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[tokio::test]
    async fn a_command_goes_on_while_others_connect() {
        const CONNECTIONS: usize = 50;
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        let listener = UnixListener::bind(&path).unwrap();
        let connect = || std::os::unix::net::UnixStream::connect(&path).unwrap();
        let _all: Vec<_> = (0..CONNECTIONS).map(|_| connect()).collect();
        let steps = Cell::new(0);
        let command = async {
            loop {
                steps.set(steps.get() + 1);
                tokio::task::yield_now().await;
            }
        };
        let accepting = async {
            for _ in 0..CONNECTIONS {
                next_connection(&listener).await.unwrap();
            }
        };
        tokio::select! {
            biased;
            () = command => {}
            () = accepting => {}
        }
        assert!(steps.get() >= CONNECTIONS, "{} steps", steps.get());
    }
}
