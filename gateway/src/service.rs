//! The gateway's gRPC service: only converts protobuf messages.

use std::{
    ffi::OsString,
    fmt,
    os::unix::ffi::{OsStrExt, OsStringExt},
    path::{Path, PathBuf},
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use bytes::Bytes;
use fs_mapper::{
    ExecutorName, Mount, Resolution,
    config::{Position, VolumeConfig},
};
use posh_proto::{
    PROTOCOL_VERSION,
    executor::StatusReply,
    gateway::{self as wire, gateway_server::Gateway as GatewayService},
};
use tokio::sync::Notify;
use tonic::{Request, Response, Status};

use crate::{
    executors::{Executor, ExecutorState},
    explain, report,
    state::Gateway,
    trace::SessionTimes,
    volumes::{self, About, Volumes},
};

/// Timeout for an executor's status.
const STATUS_TIMEOUT: Duration = Duration::from_secs(1);

/// Implements the service for a gateway.
pub struct GatewayCalls {
    gateway: Arc<Gateway>,
    shutdown: Arc<Notify>,
}

impl GatewayCalls {
    /// `shutdown` is notified when a client asks for the gateway's end.
    #[must_use]
    pub fn new(gateway: Arc<Gateway>, shutdown: Arc<Notify>) -> Self {
        Self { gateway, shutdown }
    }

    fn mount(&self, mount: &Mount) -> wire::Mount {
        let owner = mount.owner.as_ref();
        let executor = owner.and_then(|o| self.gateway.executors.named(&o.executor));
        wire::Mount {
            path: bytes(mount.path.as_path().as_os_str().as_bytes()),
            fs_type: mount.fs_type.clone(),
            source: bytes(mount.source.as_bytes()),
            executor: owner.map(|o| o.executor.to_string()).unwrap_or_default(),
            address: executor.as_ref().map(|e| e.address.clone()).unwrap_or_default(),
            export: owner.map(|o| o.export.clone()).unwrap_or_default(),
            sub_path: owner.map(|o| bytes(o.sub_path.as_os_str().as_bytes())).unwrap_or_default(),
            state: executor.map_or_else(
                || mount.foreign.map_or("no owner".to_owned(), |why| format!("not used: {why}")),
                |e| {
                    let state = e.state();
                    let fault = matches!(state, ExecutorState::Ready(_))
                        .then(|| self.gateway.same_files.fault(&e, mount))
                        .flatten();
                    fault.map_or_else(
                        || state_text(&state, owner.map(|o| o.export.as_str())),
                        |why| format!("not used: {why}"),
                    )
                },
            ),
            mounted: mount.mounted(),
        }
    }
}

/// State of an executor, and of one export of it, as text.
fn state_text(state: &ExecutorState, export: Option<&str>) -> String {
    match state {
        ExecutorState::Asleep => "not used yet".to_owned(),
        ExecutorState::Connecting => "connecting".to_owned(),
        ExecutorState::Unreachable(why) => format!("unreachable: {why}"),
        ExecutorState::Ready(connection) => match export {
            Some(name) => {
                let description = connection.description();
                let exports: Vec<&str> =
                    description.reply.exports.iter().map(|e| e.name.as_str()).collect();
                if exports.contains(&name) {
                    "connected".to_owned()
                } else if name.starts_with(['/', '~']) {
                    format!("{name} can't be opened there; it has {}", exports.join(", "))
                } else {
                    format!("no export of that name; it has {}", exports.join(", "))
                }
            }
            None => "connected".to_owned(),
        },
    }
}

fn bytes(text: &[u8]) -> Bytes {
    Bytes::copy_from_slice(text)
}

fn path(text: &Bytes) -> PathBuf {
    OsString::from_vec(text.to_vec()).into()
}

#[tonic::async_trait]
impl GatewayService for GatewayCalls {
    async fn mounts(
        &self,
        _: Request<wire::MountsRequest>,
    ) -> Result<Response<wire::MountsReply>, Status> {
        let view = self.gateway.view();
        for executor in self.gateway.executors.all() {
            // For an up-to-date answer.
            let _ = executor.settled().await;
        }
        let mounts = view.table.mounts().map(|m| self.mount(m)).collect();
        Ok(Response::new(wire::MountsReply { mounts }))
    }

    async fn resolve(
        &self,
        request: Request<wire::ResolveRequest>,
    ) -> Result<Response<wire::ResolveReply>, Status> {
        let request = request.into_inner();
        let view = self.gateway.view();
        let (wanted, cwd) = (path(&request.path), path(&request.cwd));
        if !cwd.is_absolute() && !wanted.is_absolute() {
            return Err(Status::invalid_argument(
                "a relative path needs an absolute current directory",
            ));
        }
        Ok(Response::new(match view.table.resolve(&wanted, &cwd) {
            Resolution::Local { reason } => {
                wire::ResolveReply { reason: reason.to_string(), ..Default::default() }
            }
            Resolution::Owned(owned) => wire::ResolveReply {
                executor: owned.executor.to_string(),
                export: owned.export_path.export.clone(),
                export_path: bytes(owned.export_path.path.as_os_str().as_bytes()),
                mount: bytes(view.table.mount(owned.mount).path.as_path().as_os_str().as_bytes()),
                client_path: bytes(owned.client_path.as_path().as_os_str().as_bytes()),
                reason: String::new(),
            },
        }))
    }

    async fn report(
        &self,
        request: Request<wire::ReportRequest>,
    ) -> Result<Response<wire::ReportReply>, Status> {
        let request = request.into_inner();
        let session = self.gateway.sessions.get(&request.session);
        let session =
            session.ok_or_else(|| Status::not_found(format!("no session {}", request.session)))?;
        let reports = session.reports.settled().await;
        let text = if request.json { report::to_json(&reports) } else { report::to_text(&reports) };
        let times = request.times.map(|t| SessionTimes {
            started_ns: t.started_ns,
            shell_ns: t.shell_ns,
            ended_ns: t.ended_ns,
        });
        let document =
            session.trace.as_ref().zip(times).map(|(trace, times)| trace.document(&times));
        let (trace, trace_dropped) = document.unwrap_or_default();
        Ok(Response::new(wire::ReportReply { text, trace, trace_dropped }))
    }

    async fn plan(
        &self,
        request: Request<wire::PlanRequest>,
    ) -> Result<Response<wire::PlanReply>, Status> {
        let request = request.into_inner();
        let stages = request.stages.iter().map(|s| explain::PlannedStage {
            argv: s.argv.iter().map(|w| OsString::from_vec(w.to_vec())).collect(),
            stdin: Some(path(&s.stdin_path)).filter(|p| !p.as_os_str().is_empty()),
            stdout: Some(path(&s.stdout_path)).filter(|p| !p.as_os_str().is_empty()),
            unknowable: Some(s.unknowable.clone()).filter(|u| !u.is_empty()),
        });
        let split = (request.split > 0).then_some(request.split);
        let report =
            explain::plan_only(&self.gateway, &path(&request.cwd), stages.collect(), split).await;
        let text =
            if request.json { report::to_json(&[report]) } else { report::to_text(&[report]) };
        Ok(Response::new(wire::PlanReply { text }))
    }

    async fn status(
        &self,
        _: Request<wire::StatusRequest>,
    ) -> Result<Response<wire::StatusReply>, Status> {
        // In parallel: unresponsive executors cost one timeout in total.
        let asked: Vec<_> = self
            .gateway
            .executors
            .all()
            .into_iter()
            .map(|e| tokio::spawn(executor_status(e)))
            .collect();
        let mut executors = Vec::new();
        for status in asked {
            executors.push(status.await.map_err(|error| Status::internal(error.to_string()))?);
        }
        Ok(Response::new(wire::StatusReply {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            protocol: PROTOCOL_VERSION,
            pid: std::process::id(),
            config: bytes(Path::new(self.gateway.config_file()).as_os_str().as_bytes()),
            sessions: u32::try_from(self.gateway.sessions.roots().len()).unwrap_or(u32::MAX),
            pipelines_running: u32::try_from(self.gateway.running.load(Ordering::Relaxed))
                .unwrap_or(u32::MAX),
            pipelines_total: self.gateway.pipelines(),
            executors,
            backstops: self
                .gateway
                .assembler
                .backstops
                .counts()
                .map(|(name, reached)| backstop(name, reached))
                .collect(),
            longest_wait_ms: self.gateway.assembler.backstops.longest().as_secs_f64() * 1000.0,
        }))
    }

    async fn mount_volume(
        &self,
        request: Request<wire::MountVolumeRequest>,
    ) -> Result<Response<wire::MountVolumeReply>, Status> {
        let request = request.into_inner();
        let config = VolumeConfig {
            path: path(&request.path),
            executor: ExecutorName::new(&request.executor),
            export: request.export,
            read_only: request.read_only,
            cache_bytes: if request.cache_bytes > 0 {
                request.cache_bytes
            } else {
                VolumeConfig::DEFAULT_CACHE_BYTES
            },
            sync: request.sync,
            hard: request.hard,
            position: Position::default(),
        };
        let notice = Volumes::mount(&self.gateway, config).await.map_err(precondition)?;
        Ok(Response::new(wire::MountVolumeReply { notice: notice.unwrap_or_default() }))
    }

    async fn unmount_volume(
        &self,
        request: Request<wire::UnmountVolumeRequest>,
    ) -> Result<Response<wire::UnmountVolumeReply>, Status> {
        let unmounted = Volumes::unmount(&self.gateway, &path(&request.into_inner().path)).await;
        unmounted.map_err(precondition)?;
        Ok(Response::new(wire::UnmountVolumeReply {}))
    }

    async fn recover_volume(
        &self,
        request: Request<wire::RecoverVolumeRequest>,
    ) -> Result<Response<wire::RecoverVolumeReply>, Status> {
        let request = request.into_inner();
        let recovered = self.gateway.volumes.recover(&path(&request.path), path(&request.to)).await;
        Ok(Response::new(wire::RecoverVolumeReply { files: recovered.map_err(precondition)? }))
    }

    async fn volumes(
        &self,
        _: Request<wire::VolumesRequest>,
    ) -> Result<Response<wire::VolumesReply>, Status> {
        let volumes = Volumes::list(&self.gateway).iter().map(volume).collect();
        Ok(Response::new(wire::VolumesReply { volumes }))
    }

    async fn shutdown(
        &self,
        _: Request<wire::ShutdownRequest>,
    ) -> Result<Response<wire::ShutdownReply>, Status> {
        self.shutdown.notify_one();
        Ok(Response::new(wire::ShutdownReply {}))
    }
}

fn precondition(error: impl fmt::Display) -> Status {
    Status::failed_precondition(error.to_string())
}

fn volume(about: &About) -> wire::Volume {
    let known = wire::Volume {
        path: bytes(about.config.path.as_os_str().as_bytes()),
        executor: about.config.executor.to_string(),
        export: about.config.export.clone(),
        read_only: about.config.read_only,
        cache_bytes: about.config.cache_bytes,
        ..wire::Volume::default()
    };
    let state = match &about.state {
        Ok(state) => state,
        Err(why) => return wire::Volume { state: format!("not mounted: {why}"), ..known },
    };
    let in_reach = if state.store.in_reach { "mounted" } else { "out of reach" };
    let unreached = state.store.fault.clone().filter(|_| !state.store.in_reach);
    let faults = unreached.into_iter().chain(volumes::notice(state));
    let words: Vec<String> = std::iter::once(in_reach.to_owned()).chain(faults).collect();
    wire::Volume {
        state: words.join(": "),
        cached_bytes: state.cached_bytes,
        dirty_bytes: state.dirty_bytes,
        leases: state.leases,
        files: state.files,
        open: state.open,
        watched: state.store.watched.to_string(),
        ..known
    }
}

fn backstop(name: &str, reached: u64) -> wire::BackstopStatus {
    wire::BackstopStatus { name: name.to_owned(), reached }
}

/// Local state of an executor, with the executor's own report if it comes in time.
async fn executor_status(executor: Arc<Executor>) -> wire::ExecutorStatus {
    let state = executor.state();
    let known = wire::ExecutorStatus {
        name: executor.name.to_string(),
        address: executor.address.clone(),
        state: state_text(&state, None),
        ..wire::ExecutorStatus::default()
    };
    let ExecutorState::Ready(connection) = state else { return known };
    let known = wire::ExecutorStatus { rtt_ms: connection.rtt.as_secs_f64() * 1000.0, ..known };
    let mut client = connection.client.clone();
    match tokio::time::timeout(STATUS_TIMEOUT, client.status()).await {
        Ok(Ok(reply)) => with_usage(known, reply),
        Ok(Err(status)) => wire::ExecutorStatus { refusing: status.message().to_owned(), ..known },
        Err(_) => known,
    }
}

fn with_usage(known: wire::ExecutorStatus, reply: StatusReply) -> wire::ExecutorStatus {
    let (own, whole) = (reply.own.unwrap_or_default(), reply.whole.unwrap_or_default());
    wire::ExecutorStatus {
        asked: true,
        identity: reply.identity,
        user: reply.user,
        confinement: reply.confinement,
        runs: own.runs,
        max_runs: own.max_runs,
        refused: own.refused,
        all_runs: whole.runs,
        max_all_runs: whole.max_runs,
        load_average: reply.load_average,
        refusing: reply.refusing,
        ..known
    }
}
