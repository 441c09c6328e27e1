//! The entry points: serve from a bound listener, or one connection, until the last run has ended.

use std::{
    collections::BTreeSet,
    convert::Infallible,
    future::Future,
    io,
    path::PathBuf,
    sync::{Arc, OnceLock, RwLock, atomic::Ordering},
    time::Duration,
};

use fs_mapper::mountinfo::MountSnapshot;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use posh_proto::{
    MAX_MESSAGE_BYTES, brief,
    codec::{ENROLMENT_BYTES, RUN_BYTES, VOLUME_BYTES},
    executor::{enrolment_server::EnrolmentServer, executor_server::ExecutorServer},
    volume::volume_server::VolumeServer,
};
use posh_volume::directory::Rivals;
use socket2::SockRef;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpListener,
    sync::{mpsc, watch},
};
use tokio_stream::{Stream, StreamExt as _, wrappers::ReceiverStream};
use tonic::{
    service::interceptor::InterceptedService,
    transport::{Server, server::Connected},
};
use tonic_health::{
    pb::health_server::HealthServer,
    server::{HealthReporter, HealthService},
};
use tower::util::MapResponseLayer;

use crate::{
    Config, Error, Export, Stdio,
    accept::{AcceptedConnection, IncomingConnections},
    admission::Admission,
    audit::AuditLog,
    callers::Callers,
    cgroup::Cgroups,
    classifier::{Classifier, Turns},
    config::{EXPORT_PATIENCE, Level, Unserved, machine_files},
    describe::MachineDescription,
    descriptors::DescriptorShares,
    enrolment::Enrolments,
    error::AttemptExt as _,
    hidden,
    load::{Capacity, Load},
    metered::MeterLayer,
    policy::Policy,
    pool::Pool,
    run::KeptRuns,
    runtimes::Runtimes,
    service::{
        ARRIVALS_OF_ONE, ExecutorService, HEARD_OUT_OF_ONE, ServiceState, TOOLS_OF_ONE,
        launches_of_one,
    },
    tls::{register::Revocation, serving::Serving},
    tools::Tools,
    volume::{self, VolumeService, Volumes},
};

/// Bytes in flight on one stream towards the executor: a write of a volume, 4 MiB at most. Output
/// of commands goes the other way, by the gateway's windows.
const STREAM_WINDOW_BYTES: u32 = 4 << 20;

/// Bytes in flight on all streams of a connection together: 50 ms at 1.3 Gbit/s. Unread calls hold
/// what has arrived for them, so that a connection can make the executor hold this much.
const CONNECTION_WINDOW_BYTES: u32 = 8 << 20;

/// Size of incoming frames: twice the minimum of HTTP/2, which costs little per byte. A call holds
/// one frame beside its account, so that larger ones would get around the account (`metered`).
/// Outgoing frames are as large as the gateway takes them.
const MAX_FRAME_BYTES: u32 = 32 << 10;

/// A frozen or vanished peer is noticed after the two together. Our ping waits behind data already
/// on its way, and the kernel would accept megabytes: seconds, on a slow link.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(2);
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(6);
/// Unsent bytes of a connection that the kernel accepts: 2 s at 1 Mbit/s, and far more than the
/// fastest link sends between two writes.
const UNSENT_BYTES: u32 = 256 << 10;
/// Behind ssh the unsent bytes are unknown. sshd holds up to 2 MiB, 17 s at 1 Mbit/s.
const STDIO_KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(20);

/// Calls on one connection at a time; above `max_runs`, so that a run too many gets a refusal with
/// a message instead of waiting.
const MAX_CONCURRENT_CALLS: u32 = 4096;

/// Streams that a peer may reset before we have seen them: a loop of cancelled pipelines is no
/// attack.
const MAX_RESETS: usize = 4096;

/// Size of one call's headers, each with 32 bytes more than its text: a gateway sends some 300
/// bytes. They stay with the call, and an identity has 2,048 calls.
const HEADER_BYTES: u32 = 4 << 10;

/// These bounds for a connection without a valid certificate: each call takes some 10 KB, and its
/// frame 15 bytes.
const STRANGERS_CALLS: u32 = 4;
const STRANGERS_RESETS: usize = 16;
const STRANGERS_HEADER_BYTES: u32 = 8 << 10;

/// Time for killed runs until their processes are reaped.
const KILL_TIMEOUT: Duration = Duration::from_secs(5);

/// Time after the last run until its last messages are with the client and the connections, told to
/// go away, are closed.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(2);

/// Time for the records of sessions that are left then.
const RECORDS_TIMEOUT: Duration = Duration::from_secs(2);

/// Interval of looking at the list of mounts: one read of a file of /proc.
const MOUNTS_INTERVAL: Duration = Duration::from_secs(1);

/// Interval at which links on the paths of exports are followed again.
const LINKS_INTERVAL: Duration = Duration::from_secs(1);

/// Interval of recording revocations: one stat(2), unless the register has changed.
const REVOCATIONS_INTERVAL: Duration = Duration::from_secs(1);

/// Serves `config` on `listener` until `shutdown` completes, then lets running
/// commands end within `config.drain`, and kills what is left.
///
/// Logs `listening on ADDR` once it is clear that commands can be confined as the configuration
/// demands: clients that connect then are served.
///
/// # Errors
/// [`Error::Plaintext`] when the listener's address needs `allow_plaintext`; [`Error::RootUser`];
/// [`Error::Confinement`]; otherwise when the listener or the gRPC server fails.
pub async fn run(
    config: Config,
    listener: TcpListener,
    shutdown: impl Future<Output = ()> + Send,
) -> Result<(), Error> {
    let (_no, configs) = mpsc::channel(1);
    let (attempts, _) = mpsc::channel(1);
    run_with_changes(config, ConfigChanges { configs, attempts }, listener, shutdown).await
}

/// Channels between a server and [`crate::accounts::follow`].
#[derive(Debug)]
pub struct ConfigChanges {
    /// Configurations that replace the former one.
    pub configs: mpsc::Receiver<Config>,
    /// Names of absent accounts whose identities have just tried to get in.
    pub attempts: mpsc::Sender<String>,
}

/// Like [`run`], but applies each further configuration as far as it can change: identities with
/// their rights, and commands. The log says of the rest that it takes a restart.
///
/// # Errors
/// As those of [`run`].
pub async fn run_with_changes(
    config: Config,
    changes: ConfigChanges,
    listener: TcpListener,
    shutdown: impl Future<Output = ()> + Send,
) -> Result<(), Error> {
    let address = listener.local_addr().attempting(|| "read the listener's address".to_owned())?;
    config.check_address(address)?;
    config.check_user()?;
    if config.serves_root_to_anybody() {
        tracing::warn!(
            "whoever reaches {address} is root below the exports: the user is root, and nothing is \
             asked"
        );
    }
    // Its connections inherit it.
    SockRef::from(&listener)
        .set_tcp_notsent_lowat(UNSENT_BYTES)
        .attempting(|| "prepare the listener".to_owned())?;
    tell_unserved(&config);
    let tls =
        config.tls.as_ref().map(|tls| Serving::load(&tls.directory)).transpose()?.map(Arc::new);
    let ConfigChanges { configs, attempts } = changes;
    let (shared, admission) = share(config, tls.clone(), attempts).await?;
    tracing::info!("listening on {address}");
    let mut services =
        Services::new(shared.clone(), admission.clone(), tls.clone(), builder(KEEPALIVE_TIMEOUT))?;
    let (drain, draining) = watch::channel(false);
    let for_one = services.clone();
    if tls.is_some() {
        // Connections with an identity have runtimes of their own.
        services.builder = for_strangers(services.builder);
    }
    let runtimes = Runtimes::new(move |connections: ReceiverStream<AcceptedConnection>| {
        serve_one(for_one.clone(), connections, draining.clone())
    });
    let runtimes = Arc::new(runtimes.attempting(|| "start a thread".to_owned())?);
    let incoming = IncomingConnections::new(listener, tls, admission, runtimes.clone());
    let taking = take_changes(shared, configs);
    tokio::select! {
        served = serve(services, incoming, drain, Some(runtimes), shutdown) => served,
        never = taking => match never {},
    }
}

/// Serves the connections of one identity until the executor ends.
async fn serve_one(
    services: Services,
    connections: ReceiverStream<AcceptedConnection>,
    mut draining: watch::Receiver<bool>,
) {
    let adopted = connections.map(AcceptedConnection::adopt).filter(|connection| {
        connection
            .as_ref()
            .inspect_err(|error| tracing::warn!(%error, "a connection is lost"))
            .is_ok()
    });
    let shutdown = async move {
        let _ = draining.wait_for(|is_draining| *is_draining).await;
    };
    if let Err(error) = services.serve(adopted, shutdown).await {
        tracing::error!(%error, "the connections of an identity are not served any more");
    }
}

/// Serves `config` on one connection until that has ended or `shutdown` completes. Runs that are
/// left when the connection has ended are killed: nobody can get their results.
///
/// # Errors
/// When the peer has gone already, or the gRPC server fails.
pub async fn run_stdio(
    config: Config,
    mut connection: Stdio,
    shutdown: impl Future<Output = ()> + Send,
) -> Result<(), Error> {
    connection.greet().await?;
    let (connection, over) = connection.watched();
    // Without further connections in prospect, the server would send GOAWAY on this one.
    let incoming =
        tokio_stream::once(Ok::<_, io::Error>(connection)).chain(tokio_stream::pending());
    let exports = config.exports.clone();
    let (shared, admission) = share(config, None, mpsc::channel(1).0).await?;
    let (kill, its) = (shared.kill.clone(), shared.clone());
    let end = async {
        tokio::select! {
            // Kept runs are killed, too: no other connection will come to ask for them.
            _ = over => drop(kill.send_replace(true)),
            () = led_elsewhere(exports, &its) => {}
            () = shutdown => {}
        }
    };
    let services = Services::new(shared, admission, None, builder(STDIO_KEEPALIVE_TIMEOUT))?;
    serve(services, incoming, watch::Sender::new(false), None, end).await
}

/// Waits until a link on the path of an export leads elsewhere, and no run is left: none begins any
/// more, and the next executor that the gateway starts serves what is there then.
async fn led_elsewhere(exports: Vec<Export>, shared: &ServiceState) {
    let exports: Arc<Vec<Export>> =
        Arc::new(exports.into_iter().filter(|export| export.linked_from.is_some()).collect());
    if exports.is_empty() {
        std::future::pending::<()>().await;
    }
    loop {
        tokio::time::sleep(LINKS_INTERVAL).await;
        let looked_at = exports.clone();
        let look =
            move || looked_at.iter().try_for_each(|export| export.require_place().map_err(drop));
        if let Ok(Err(())) = tokio::task::spawn_blocking(look).await {
            tracing::info!("a link on the path of an export leads elsewhere");
            return shared.load.idle().await;
        }
    }
}

/// All services. Clones share everything.
#[derive(Clone)]
struct Services {
    shared: Arc<ServiceState>,
    admission: Admission,
    tls: Option<Arc<Serving>>,
    builder: Server,
    health: HealthReporter,
    enrolment: EnrolmentServer<Enrolments>,
}

impl Services {
    fn new(
        shared: Arc<ServiceState>,
        admission: Admission,
        tls: Option<Arc<Serving>>,
        builder: Server,
    ) -> Result<Self, Error> {
        let enrolments = Enrolments::new(tls.clone(), admission.clone(), shared.audit.clone());
        let enrolment = EnrolmentServer::new(enrolments).max_decoding_message_size(ENROLMENT_BYTES);
        Ok(Self { shared, admission, tls, builder, health: HealthReporter::new(), enrolment })
    }

    /// Serves connections until `shutdown` completes and each has ended.
    async fn serve<C>(
        self,
        incoming: impl Stream<Item = io::Result<C>>,
        shutdown: impl Future<Output = ()>,
    ) -> Result<(), Error>
    where
        C: Connected + AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let Self { shared, admission, builder, health, enrolment, .. } = self;
        let health = HealthServer::new(HealthService::from_health_reporter(health));
        let executor = ExecutorServer::new(ExecutorService(shared.clone()))
            .max_decoding_message_size(RUN_BYTES)
            .max_encoding_message_size(MAX_MESSAGE_BYTES);
        let volume = VolumeServer::new(VolumeService(shared))
            .max_decoding_message_size(VOLUME_BYTES)
            .max_encoding_message_size(MAX_MESSAGE_BYTES);
        let router = builder
            .layer(MeterLayer(admission.clone()))
            .layer(MapResponseLayer::new(brief::shortened))
            .add_service(InterceptedService::new(health, admission.clone()))
            .add_service(InterceptedService::new(executor, admission.clone()))
            .add_service(InterceptedService::new(volume, admission))
            .add_service(enrolment);
        router.serve_with_incoming_shutdown(incoming, shutdown).await.map_err(Error::Serve)
    }
}

async fn serve<C>(
    services: Services,
    incoming: impl Stream<Item = io::Result<C>>,
    drain: watch::Sender<bool>,
    runtimes: Option<Arc<Runtimes<AcceptedConnection>>>,
    shutdown: impl Future<Output = ()> + Send,
) -> Result<(), Error>
where
    C: Connected + AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let Services { shared, tls, health, .. } = services.clone();
    if let Some(reason) = shared.pool.no_namespaces() {
        tracing::warn!(
            reason,
            "no mount namespaces: only mounts with the same path on both sides are served"
        );
    }
    health.set_serving::<ExecutorServer<ExecutorService>>().await;
    let mut draining = drain.subscribe();
    let serving = services.serve(incoming, async move {
        let _ = draining.wait_for(|is_draining| *is_draining).await;
    });
    tokio::pin!(serving);
    tokio::select! {
        ended = &mut serving => return ended,
        () = shared.pool.retire_idle() => {}
        () = watch_mounts(&shared) => {}
        () = keep_fresh(tls.as_deref()) => {}
        () = record_administration(tls.as_deref(), &shared.audit) => {}
        () = shutdown => {}
    }
    shared.draining.store(true, Ordering::Relaxed);
    health.set_not_serving::<ExecutorServer<ExecutorService>>().await;
    drain.send_replace(true);
    let all_served = async {
        let ended = serving.await;
        if let Some(runtimes) = &runtimes {
            runtimes.finish().await;
        }
        ended
    };
    tokio::pin!(all_served);
    let ended = tokio::select! {
        ended = &mut all_served => Some(ended),
        () = end_runs(&shared) => None,
    };
    let ended = match ended {
        Some(ended) => ended,
        // The last messages are still on their way out.
        None => tokio::time::timeout(FLUSH_TIMEOUT, all_served).await.unwrap_or(Ok(())),
    };
    let last = async {
        shared.volumes.note_ends(&shared.audit).await;
        if let Some(tls) = &tls {
            settle(tls, Vec::new(), false).await;
        }
    };
    let _ = tokio::time::timeout(RECORDS_TIMEOUT, last).await;
    shared.audit.stop().await;
    ended
}

/// The longest time that an executor takes to end after a signal; a supervisor that has waited
/// longer may kill it.
#[must_use]
pub fn longest_end(drain: Duration) -> Duration {
    const LAST_RECORD: Duration = Duration::from_secs(5);
    drain + KILL_TIMEOUT + FLUSH_TIMEOUT + RECORDS_TIMEOUT + LAST_RECORD
}

/// Records revocations and rotations of the authority, for ever. Administrators make them by
/// programs of their own; the files show them.
async fn record_administration(tls: Option<&Serving>, audit: &AuditLog) {
    let Some(tls) = tls else { return std::future::pending().await };
    let mut interval = tokio::time::interval(REVOCATIONS_INTERVAL);
    let mut authorities = tls.authorities();
    audit.authorities_at_start(&authorities);
    // What this process has recorded is not recorded again if the register can't be written.
    let mut recorded: Vec<Revocation> = Vec::new();
    let mut is_failing = false;
    loop {
        interval.tick().await;
        let unrecorded = tls.register.unrecorded().unwrap_or_default();
        recorded.retain(|revocation| unrecorded.contains(revocation));
        for revocation in unrecorded {
            if !recorded.contains(&revocation) && audit.revoked(&revocation).await {
                recorded.push(revocation);
            }
        }
        is_failing = settle(tls, recorded.clone(), is_failing).await;
        let now = tls.authorities();
        if now != authorities {
            audit.authorities(&now);
            authorities = now;
        }
    }
}

/// Writes to the register what was shown and recorded; returns true if that fails, which is logged
/// once.
async fn settle(tls: &Serving, recorded: Vec<Revocation>, was_failing: bool) -> bool {
    let register = tls.register.clone();
    // It may wait for an administrator's program that has locked the file.
    match tokio::task::spawn_blocking(move || register.settle(&recorded)).await {
        Ok(Err(error)) if !was_failing => {
            tracing::error!("cannot write the register of certificates: {error}");
            true
        }
        Ok(Err(_)) => true,
        Ok(Ok(())) | Err(_) => false,
    }
}

/// Waits for the runs, and kills those that take too long.
async fn end_runs(shared: &ServiceState) {
    if tokio::time::timeout(shared.config.drain, shared.load.idle()).await.is_ok() {
        return;
    }
    let left = shared.load.running();
    tracing::warn!(left, "killing the runs that are left");
    shared.kill.send_replace(true);
    let _ = tokio::time::timeout(KILL_TIMEOUT, shared.load.idle()).await;
}

/// Fails where commands can't be confined as the configuration demands.
fn check_confinement(shared: &ServiceState) -> Result<(), Error> {
    let reached = shared.confinement();
    let require = shared.config.confinement.require;
    if reached.level() < require {
        let reached_level = reached.level();
        return Err(Error::Confinement { require, reached_level, reached: reached.to_string() });
    }
    if reached.level() < Level::Strict {
        tracing::warn!("commands are not fully confined: {reached}");
    }
    Ok(())
}

/// Applies later configurations, for ever.
///
/// Invariant: each wait has a limit and precedes the first change; then everything changes at once.
/// So revoked rights are lost even while a file system hangs.
async fn take_changes(
    shared: Arc<ServiceState>,
    mut changes: mpsc::Receiver<Config>,
) -> Infallible {
    while let Some(changed) = changes.recv().await {
        if let Err(error) = changed.check_user() {
            tracing::error!("the configuration stays as it was: {error}");
            continue;
        }
        tell_unserved(&changed);
        let (policy, hidden) = tokio::join!(policy_of(&shared, &changed), hidden_of(&changed));
        // Before any caller may have these exports.
        shared.pool.hide(hidden);
        let callers = Callers::new(&changed);
        let count = callers.count();
        shared.load.share(callers.are_several());
        shared.change(callers, policy);
        // It waits for file systems, which blocks nothing else.
        volume::end_replaced(&shared);
        let later = shared.config.fixed_in(&changed);
        shared.audit.reconfigured(count, &later);
        if later.is_empty() {
            tracing::info!("took over the configuration");
        } else {
            tracing::warn!(
                "took over the configuration, other than {}: that takes a restart",
                later.join(", ")
            );
        }
    }
    std::future::pending().await
}

/// The policy from now on. If the annotations' directories do not answer, the annotations stay as
/// they were.
async fn policy_of(shared: &ServiceState, changed: &Config) -> Policy {
    let confinement = changed.confinement.clone();
    let reading = tokio::task::spawn_blocking(move || Policy::new(&confinement));
    match tokio::time::timeout(EXPORT_PATIENCE, reading).await {
        Ok(Ok((policy, mistakes))) => {
            mistakes
                .iter()
                .for_each(|mistake| tracing::warn!(%mistake, "annotation file not used"));
            policy
        }
        _ => {
            tracing::error!(
                "the annotations stay as they were, since their directories do not answer"
            );
            shared.policy().with_commands_of(&changed.confinement)
        }
    }
}

/// Paths that no view shows from now on.
async fn hidden_of(changed: &Config) -> BTreeSet<PathBuf> {
    let config = changed.clone();
    let looking = tokio::task::spawn_blocking(move || hidden::paths(&config));
    match tokio::time::timeout(EXPORT_PATIENCE, looking).await {
        Ok(Ok(hidden)) => hidden,
        _ => hidden::configured_paths(changed),
    }
}

/// Tells the administrator which exports are left out.
fn tell_unserved(config: &Config) {
    for Unserved { hint, .. } in &config.unserved {
        let then = if config.file.is_some() {
            ", then send SIGHUP"
        } else {
            ", then start the executor anew"
        };
        tracing::error!("an export is left out: {hint}{then}");
    }
}

/// Looks each second if mounts have changed; for ever. An idle view keeps mounted what was
/// unmounted since, and a volume's session may be on a mount that is covered by now.
async fn watch_mounts(shared: &Arc<ServiceState>) {
    let mut interval = tokio::time::interval(MOUNTS_INTERVAL);
    let mut mounts = MountSnapshot::take().ok();
    loop {
        interval.tick().await;
        if mounts.as_ref().is_none_or(|(mounts, _)| mounts.has_changed()) {
            mounts = MountSnapshot::take().ok();
            shared.pool.end_idle_for(Duration::ZERO);
            volume::end_replaced(shared);
        }
    }
}

/// Renews certificates in time, if there are any; for ever.
async fn keep_fresh(tls: Option<&Serving>) {
    match tls {
        Some(tls) => tls.keep_fresh().await,
        None => std::future::pending().await,
    }
}

async fn share(
    config: Config,
    tls: Option<Arc<Serving>>,
    attempts: mpsc::Sender<String>,
) -> Result<(Arc<ServiceState>, Admission), Error> {
    let soft = raise_open_files();
    let descriptors = DescriptorShares::of_process();
    let (policy, mistakes) = Policy::new(&config.confinement);
    mistakes.iter().for_each(|mistake| tracing::warn!(%mistake, "annotation file not used"));
    let callers = Callers::new(&config);
    // Each command may open as many files as its limit says: the machine has them for all.
    let bounds = config
        .bounds
        .with_files(config.confinement.max_open_files, machine_files())
        .with_connections(descriptors.connections);
    let capacity = Capacity::of_machine(descriptors.runs);
    let load = Arc::new(Load::new(bounds, capacity, callers.are_several()));
    let audit = AuditLog::open(config.audit.as_deref())?;
    let admission = Admission::new(callers, tls, load.clone(), audit.clone(), attempts);
    // Before the first runner, which must be in it.
    let cgroups = Cgroups::take(&config.confinement)?;
    let rivals: Arc<Rivals> = Arc::default();
    let shared = ServiceState {
        load,
        cgroups,
        pool: Pool::new(&config, soft).await,
        policy: RwLock::new(Arc::new(policy)),
        classifier: Classifier::default(),
        admission: admission.clone(),
        machine: MachineDescription::default(),
        tools: Tools::default(),
        tool_turns: Turns::new(TOOLS_OF_ONE),
        arrivals: Turns::new(ARRIVALS_OF_ONE),
        large: Turns::beside(1, rivals.clone()),
        launches: Turns::beside(launches_of_one(), rivals.clone()),
        heard_out: Turns::new(HEARD_OUT_OF_ONE),
        kept: KeptRuns::default(),
        // Without volumes nothing is recorded.
        volumes: Volumes::beside(
            rivals,
            config.state.as_deref().filter(|_| config.volumes),
            descriptors.volumes,
        ),
        audit,
        draining: false.into(),
        kill: watch::Sender::new(false),
        config,
    };
    check_confinement(&shared)?;
    Ok((Arc::new(shared), admission))
}

/// Raises this process's limit of open files as far as it goes; returns the former limit, which
/// commands get.
fn raise_open_files() -> u64 {
    static ORIGINAL: OnceLock<u64> = OnceLock::new();
    *ORIGINAL.get_or_init(|| {
        let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap_or((1024, 1024));
        let _ = setrlimit(Resource::RLIMIT_NOFILE, hard, hard);
        soft
    })
}

fn builder(keepalive_timeout: Duration) -> Server {
    Server::builder()
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_frame_size(MAX_FRAME_BYTES)
        .max_concurrent_streams(MAX_CONCURRENT_CALLS)
        .http2_keepalive_interval(Some(KEEPALIVE_INTERVAL))
        .http2_keepalive_timeout(Some(keepalive_timeout))
        .http2_max_pending_accept_reset_streams(Some(MAX_RESETS))
        .http2_max_local_error_reset_streams(Some(MAX_RESETS))
        .http2_max_header_list_size(HEADER_BYTES)
}

/// Limits for strangers: a peer without proof makes one call, and gets the reason for refusing
/// others.
fn for_strangers(builder: Server) -> Server {
    builder
        .max_concurrent_streams(STRANGERS_CALLS)
        .http2_max_pending_accept_reset_streams(Some(STRANGERS_RESETS))
        .http2_max_local_error_reset_streams(Some(STRANGERS_RESETS))
        .http2_max_header_list_size(STRANGERS_HEADER_BYTES)
}
