//! Blocking client of the gateway's gRPC service: one connection, a small runtime on this thread,
//! one method per call.

use std::{
    future::Future,
    io,
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    sync::Mutex,
    time::Duration,
};

use fs_mapper::peer::Peer;
use hyper_util::rt::TokioIo;
use nix::{sys::signal::Signal, unistd::geteuid};
use posh_proto::{
    MAX_MESSAGE_BYTES,
    gateway::{
        MountVolumeRequest, MountsReply, MountsRequest, PlanReply, PlanRequest,
        RecoverVolumeRequest, ReportReply, ReportRequest, ResolveReply, ResolveRequest,
        ShutdownRequest, StatusReply, StatusRequest, UnmountVolumeRequest, VolumesReply,
        VolumesRequest, gateway_client::GatewayClient,
    },
};
use tokio::runtime::{Builder, Runtime};
use tonic::{
    Status,
    transport::{Channel, Endpoint},
};

use crate::{Error, signals::BlockedSignals};

/// Timeout for calls that a gateway answers from memory. Beyond it the gateway hangs (is stopped,
/// say), and the shell must start all the same.
pub(super) const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// A connection to one gateway.
#[derive(Debug)]
pub struct Client {
    socket: PathBuf,
    service: GatewayClient<Channel>,
    runtime: Runtime,
}

impl Client {
    /// Connects to a gateway that runs.
    ///
    /// # Errors
    /// [`Error::NotRunning`] when no process listens on the socket.
    pub fn connect(socket: &Path) -> Result<Self, Error> {
        let not_running = |source| Error::NotRunning { socket: socket.to_owned(), source };
        let stream = UnixStream::connect(socket).map_err(not_running)?;
        expect_own(&stream, socket)?;
        stream.set_nonblocking(true).map_err(not_running)?;
        let runtime =
            Builder::new_current_thread().enable_io().enable_time().build().map_err(not_running)?;
        let channel = runtime.block_on(async { channel(stream) });
        let service = GatewayClient::new(channel).max_decoding_message_size(MAX_MESSAGE_BYTES);
        Ok(Self { socket: socket.to_owned(), service, runtime })
    }

    /// Report on a session: where its stages ran, and its trace if requested. Waits, without limit,
    /// until its pipelines have ended.
    ///
    /// # Errors
    /// [`Error::Call`], as for every method here.
    pub fn report(&mut self, request: ReportRequest) -> Result<ReportReply, Error> {
        let mut service = self.service.clone();
        self.wait("could not report", async move { service.report(request).await })
    }

    /// The mount table.
    ///
    /// # Errors
    /// [`Error::Call`]
    pub fn mounts(&mut self) -> Result<MountsReply, Error> {
        let mut service = self.service.clone();
        self.call(
            "could not list the mounts",
            async move { service.mounts(MountsRequest {}).await },
        )
    }

    /// Resolves a path to its owner.
    ///
    /// # Errors
    /// [`Error::Call`]
    pub fn resolve(&mut self, request: ResolveRequest) -> Result<ResolveReply, Error> {
        let mut service = self.service.clone();
        self.call("could not resolve the path", async move { service.resolve(request).await })
    }

    /// Plans one pipeline without running it.
    ///
    /// # Errors
    /// [`Error::Call`]
    pub fn plan(&mut self, request: PlanRequest) -> Result<PlanReply, Error> {
        let mut service = self.service.clone();
        self.call("could not plan the pipeline", async move { service.plan(request).await })
    }

    /// State of the gateway.
    ///
    /// # Errors
    /// [`Error::Call`]
    pub fn status(&mut self) -> Result<StatusReply, Error> {
        let mut service = self.service.clone();
        self.call(
            "could not tell its status",
            async move { service.status(StatusRequest {}).await },
        )
    }

    /// Mounts a volume. Waits for its executor as long as the gateway does. Returns the gateway's
    /// notice about data that the server lacks, or an empty text.
    ///
    /// # Errors
    /// [`Error::Call`]
    pub fn mount_volume(&mut self, request: MountVolumeRequest) -> Result<String, Error> {
        let mut service = self.service.clone();
        let mount = async move { service.mount_volume(request).await };
        Ok(self.wait("could not mount the volume", mount)?.notice)
    }

    /// Unmounts a volume. Waits, without limit, until what was written is on the server.
    ///
    /// # Errors
    /// [`Error::Call`]
    pub fn unmount_volume(&mut self, request: UnmountVolumeRequest) -> Result<(), Error> {
        let mut service = self.service.clone();
        self.wait(
            "could not unmount the volume",
            async move { service.unmount_volume(request).await },
        )
        .map(|_| ())
    }

    /// Copies data that a volume's server refuses to a directory; returns the number of files.
    ///
    /// # Errors
    /// [`Error::Call`]
    pub fn recover_volume(&mut self, request: RecoverVolumeRequest) -> Result<u64, Error> {
        let mut service = self.service.clone();
        let reply = self.wait("could not recover the files", async move {
            service.recover_volume(request).await
        })?;
        Ok(reply.files)
    }

    /// State of the volumes.
    ///
    /// # Errors
    /// [`Error::Call`]
    pub fn volumes(&mut self) -> Result<VolumesReply, Error> {
        let mut service = self.service.clone();
        self.call(
            "could not list the volumes",
            async move { service.volumes(VolumesRequest {}).await },
        )
    }

    /// Asks the gateway to end when its pipelines have ended.
    ///
    /// # Errors
    /// [`Error::Call`]
    pub fn shut_down(&mut self) -> Result<(), Error> {
        let mut service = self.service.clone();
        self.call("could not be ended", async move { service.shutdown(ShutdownRequest {}).await })
            .map(|_| ())
    }

    fn call<T>(
        &self,
        attempt: &'static str,
        call: impl Future<Output = Result<tonic::Response<T>, Status>>,
    ) -> Result<T, Error> {
        let late = || {
            Status::deadline_exceeded(format!("no answer within {} s", ANSWER_TIMEOUT.as_secs()))
        };
        self.wait(attempt, async {
            tokio::time::timeout(ANSWER_TIMEOUT, call).await.unwrap_or_else(|_| Err(late()))
        })
    }

    fn wait<T>(
        &self,
        attempt: &'static str,
        call: impl Future<Output = Result<tonic::Response<T>, Status>>,
    ) -> Result<T, Error> {
        // A gateway that dies during a call must not kill this process by SIGPIPE, whose
        // disposition belongs to the user and stays unchanged.
        let _held = BlockedSignals::new(&[Signal::SIGPIPE])?;
        self.runtime.block_on(call).map(tonic::Response::into_inner).map_err(|status| Error::Call {
            socket: self.socket.clone(),
            attempt,
            status: Box::new(status),
        })
    }
}

/// The peer, or an error if it is another user: it would learn all that this user runs, and decide
/// how it runs.
pub(super) fn expect_own(stream: &UnixStream, socket: &Path) -> Result<Peer, Error> {
    let peer = Peer::of(stream).map_err(|source| Error::Start {
        attempt: "ask who listens on a gateway's socket".to_owned(),
        source,
    })?;
    let user = geteuid().as_raw();
    if peer.user == user {
        return Ok(peer);
    }
    Err(Error::ForeignGateway { socket: socket.to_owned(), owner: peer.user, user })
}

/// A channel over this connection, which never makes a second one.
fn channel(stream: UnixStream) -> Channel {
    let once = Mutex::new(Some(stream));
    // The name is never resolved: the connection exists already.
    Endpoint::from_static("http://gateway").connect_with_connector_lazy(tower::service_fn(
        move |_: tonic::transport::Uri| {
            let stream = once.lock().map(|mut stream| stream.take()).unwrap_or_default();
            async move {
                let gone = || {
                    io::Error::new(
                        io::ErrorKind::ConnectionReset,
                        "the gateway closed the connection",
                    )
                };
                tokio::net::UnixStream::from_std(stream.ok_or_else(gone)?).map(TokioIo::new)
            }
        },
    ))
}
