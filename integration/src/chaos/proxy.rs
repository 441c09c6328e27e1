//! A proxy in front of the executor, on its server, which implements the gRPC services, forwards
//! each message, and injects the fault at the chosen one. It has one thread: to block that freezes
//! the proxy like a dead link, keep-alive pings included; and dropping its runtime resets all of
//! its connections.

use std::fs::{self, File};
use std::net::SocketAddr;
use std::pin::Pin;
use std::process::Command;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::Scope;
use std::time::{Duration, Instant};

use nix::sched::{CloneFlags, setns};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use posh_proto::MAX_MESSAGE_BYTES;
use posh_proto::executor::executor_client::ExecutorClient;
use posh_proto::executor::executor_server::{Executor, ExecutorServer};
use posh_proto::executor::{
    DescribeReply, DescribeRequest, FingerprintReply, FingerprintRequest, RunInput, RunOutput,
    StatusReply, StatusRequest, ToolsReply, ToolsRequest, run_input, run_output,
};
use tokio::sync::{Notify, mpsc};
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tokio_stream::{Stream, StreamExt as _};
use tonic::transport::{Channel, Endpoint, Server};
use tonic::{Request, Response, Status, Streaming};

use super::faults::{InjectedFault, Point};
use crate::error::Result;
use crate::lab::Lab;
use crate::network;
use crate::running;
use crate::services::{self, EXECUTOR_PORT, Service};

/// Port of the proxy, to which the gateway connects.
pub const PORT: u16 = 7500;
const SHORT: Duration = Duration::from_secs(2);
const DELAY: Duration = Duration::from_secs(1);
/// Limit of a fault "for good", which otherwise lasts until the pipeline's end.
pub const LONG: Duration = Duration::from_secs(30);

/// The proxy's handle for the test.
pub struct Proxy(Arc<ProxyShared>);

#[derive(Default)]
struct ProxyShared {
    state: Mutex<ProxyState>,
    changed: Condvar,
    /// Tells the proxy to reset its connections.
    reset: Notify,
    workstation: u32,
    server: u32,
    disk: std::path::PathBuf,
}

#[derive(Default)]
struct ProxyState {
    armed: Option<(Point, InjectedFault, usize)>,
    fired: Option<Instant>,
    executor: i32,
    /// A pipeline is running.
    is_busy: bool,
    /// Faults that are not healed yet.
    unhealed: usize,
    is_listening: bool,
    must_restart: Option<InjectedFault>,
    is_over: bool,
}

impl Proxy {
    /// Starts the executor and the proxy; both end with [`Proxy::end`].
    pub fn start<'scope, 'env>(
        scope: &'scope Scope<'scope, 'env>,
        lab: &'env Lab,
    ) -> Result<Proxy> {
        let server = &lab.servers[0].host;
        let shared = Arc::new(ProxyShared {
            workstation: lab.workstation.pid(),
            server: server.pid(),
            disk: lab.data(1).join("filler"),
            ..ProxyShared::default()
        });
        let executor = start_executor(lab)?;
        let own = shared.clone();
        scope.spawn(move || own.serve(lab, executor));
        assert!(shared.wait(|state| state.is_listening), "the proxy listens");
        Ok(Proxy(shared))
    }

    /// Arms a fault for the next run.
    pub fn arm(&self, point: Point, fault: InjectedFault, after_chunks: usize) {
        let mut state = self.0.lock();
        (state.armed, state.fired, state.is_busy) =
            (Some((point, fault, after_chunks)), None, true);
    }

    /// Ends the pipeline's fault; it is healed on return. Returns the time of the fault, if it was
    /// injected.
    pub fn disarm(&self) -> Option<Instant> {
        {
            let mut state = self.0.lock();
            (state.armed, state.is_busy) = (None, false);
            self.0.changed.notify_all();
        }
        let _ = fs::remove_file(&self.0.disk);
        let is_well = |state: &ProxyState| {
            state.unhealed == 0 && state.is_listening && state.must_restart.is_none()
        };
        assert!(self.0.wait(is_well), "what was broken is whole again");
        self.0.lock().fired
    }

    /// Ends the proxy's thread.
    pub fn end(&self) {
        self.0.lock().is_over = true;
        self.0.reset.notify_one();
    }
}

fn start_executor(lab: &Lab) -> Result<Service> {
    let export = &lab.servers[0].spec.exports[0];
    let exports = [(export.name.clone(), export.directory())];
    services::start_executor(&lab.servers[0].host, "127.0.0.1", &exports)
}

impl ProxyShared {
    fn lock(&self) -> MutexGuard<'_, ProxyState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a state; false if it was not reached in time.
    fn wait(&self, is_so: impl Fn(&ProxyState) -> bool) -> bool {
        let state = self.lock();
        let waited = self.changed.wait_timeout_while(state, LONG, |state| !is_so(state));
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }

    /// Waits for the pipeline's end, at most this long.
    fn wait_at_most(&self, limit: Duration) {
        let state = self.lock();
        drop(
            self.changed
                .wait_timeout_while(state, limit, |state| state.is_busy)
                .unwrap_or_else(PoisonError::into_inner),
        );
    }

    fn serve(self: &Arc<Self>, lab: &Lab, mut executor: Service) {
        let space =
            File::open(format!("/proc/{}/ns/net", self.server)).expect("the server has a network");
        setns(space, CloneFlags::CLONE_NEWNET).expect("root may enter it");
        loop {
            self.lock().executor = executor.process.id().cast_signed();
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .expect("a runtime");
            runtime.block_on(self.serve_until_reset());
            self.lock().is_listening = false;
            // Closes the sockets without a goodbye.
            drop(runtime);
            if self.lock().is_over {
                return;
            }
            let restart = self.lock().must_restart;
            if let Some(fault) = restart {
                if fault == InjectedFault::KillForGood {
                    self.wait_at_most(LONG);
                }
                // Its port is free only after its end.
                let _ = executor.process.wait();
                executor = start_executor(lab).expect("the executor starts again");
                self.lock().must_restart = None;
            }
        }
    }

    async fn serve_until_reset(self: &Arc<Self>) {
        let address: SocketAddr =
            format!("{}:{PORT}", network::addresses(1).1).parse().expect("an address");
        let listener = loop {
            match tokio::net::TcpListener::bind(address).await {
                Ok(listener) => break listener,
                // Child processes of other threads have copies of all sockets until they execute.
                Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::AddrInUse, "{error}"),
            }
            tokio::task::yield_now().await;
        };
        let endpoint =
            Endpoint::from_shared(format!("http://127.0.0.1:{EXECUTOR_PORT}")).expect("an address");
        let client = ExecutorClient::new(endpoint.tcp_nodelay(true).connect_lazy());
        let client = client
            .max_decoding_message_size(MAX_MESSAGE_BYTES)
            .max_encoding_message_size(MAX_MESSAGE_BYTES);
        let service = ExecutorServer::new(RelayService { client, shared: self.clone() })
            .max_decoding_message_size(MAX_MESSAGE_BYTES)
            .max_encoding_message_size(MAX_MESSAGE_BYTES);
        self.lock().is_listening = true;
        self.changed.notify_all();
        let serving = Server::builder()
            .add_service(service)
            .serve_with_incoming(TcpListenerStream::new(listener));
        tokio::select! {
            served = serving => served.expect("the listener does not fail"),
            () = self.reset.notified() => {}
        }
    }

    /// Injects the fault if this is its point; after a reset, never returns.
    async fn at(self: &Arc<Self>, point: Point, chunks: usize) {
        let fault = {
            let mut state = self.lock();
            match state.armed {
                Some((armed, fault, after))
                    if armed == point && (point != Point::Middle || chunks >= after) =>
                {
                    (state.armed, state.fired) = (None, Some(Instant::now()));
                    fault
                }
                _ => return,
            }
        };
        let executor = Pid::from_raw(self.lock().executor);
        match fault {
            InjectedFault::Kill | InjectedFault::KillForGood => {
                self.lock().must_restart = Some(fault);
                let _ = kill(executor, Signal::SIGKILL);
                self.reset().await;
            }
            InjectedFault::Reset => self.reset().await,
            InjectedFault::Freeze | InjectedFault::FreezeForGood => {
                let _ = kill(executor, Signal::SIGSTOP);
                self.wait_at_most(if fault == InjectedFault::Freeze { SHORT } else { LONG });
                let _ = kill(executor, Signal::SIGCONT);
            }
            InjectedFault::Delay => self.wait_at_most(DELAY),
            InjectedFault::Cut => self.cut(SHORT),
            InjectedFault::CutForGood => self.cut(LONG),
            InjectedFault::KillGateway => self.kill_gateway(),
            InjectedFault::FullDisk => self.fill_disk(),
        }
    }

    async fn reset(&self) {
        self.reset.notify_one();
        std::future::pending::<()>().await;
    }

    /// Cuts the link; another thread of this network namespace heals it.
    fn cut(self: &Arc<Self>, limit: Duration) {
        self.lock().unhealed += 1;
        set_link("down");
        let shared = self.clone();
        std::thread::spawn(move || {
            shared.wait_at_most(limit);
            set_link("up");
            shared.lock().unhealed -= 1;
            shared.changed.notify_all();
        });
    }

    fn kill_gateway(&self) {
        for process in running::on_host(self.workstation).unwrap_or_default() {
            if process.program == "posh-gateway" {
                let _ = kill(Pid::from_raw(process.pid.cast_signed()), Signal::SIGKILL);
            }
        }
    }

    fn fill_disk(&self) {
        if let Ok(mut file) = File::create(&self.disk) {
            let _ = std::io::copy(&mut std::io::repeat(0), &mut file);
        }
    }
}

/// Sets the state of the server's only interface; this thread is in its network namespace.
fn set_link(state: &str) {
    let status = Command::new("ip").args(["link", "set", "dev", "eth0", state]).status();
    assert!(status.is_ok_and(|status| status.success()), "the link goes {state}");
}

struct RelayService {
    client: ExecutorClient<Channel>,
    shared: Arc<ProxyShared>,
}

#[tonic::async_trait]
impl Executor for RelayService {
    type RunStream = Pin<Box<dyn Stream<Item = std::result::Result<RunOutput, Status>> + Send>>;

    async fn describe(
        &self,
        request: Request<DescribeRequest>,
    ) -> std::result::Result<Response<DescribeReply>, Status> {
        self.client.clone().describe(request.into_inner()).await
    }

    async fn tools(
        &self,
        request: Request<ToolsRequest>,
    ) -> std::result::Result<Response<ToolsReply>, Status> {
        self.client.clone().tools(request.into_inner()).await
    }

    async fn fingerprint(
        &self,
        request: Request<FingerprintRequest>,
    ) -> std::result::Result<Response<FingerprintReply>, Status> {
        self.client.clone().fingerprint(request.into_inner()).await
    }

    async fn status(
        &self,
        request: Request<StatusRequest>,
    ) -> std::result::Result<Response<StatusReply>, Status> {
        self.client.clone().status(request.into_inner()).await
    }

    async fn run(
        &self,
        request: Request<Streaming<RunInput>>,
    ) -> std::result::Result<Response<Self::RunStream>, Status> {
        let mut input = request.into_inner();
        let first =
            input.message().await?.ok_or_else(|| Status::invalid_argument("no first message"))?;
        if matches!(first.kind, Some(run_input::Kind::Spec(_))) {
            self.shared.at(Point::BeforeSpecification, 0).await;
        }
        let input = tokio_stream::once(first).chain(input.map_while(std::result::Result::ok));
        let output = self.client.clone().run(input).await?.into_inner();
        let (sender, receiver) = mpsc::channel(1);
        tokio::spawn(carry(self.shared.clone(), output, sender));
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }
}

/// Forwards a run's messages, and injects the fault before the right one.
async fn carry(
    shared: Arc<ProxyShared>,
    mut output: Streaming<RunOutput>,
    sender: mpsc::Sender<std::result::Result<RunOutput, Status>>,
) {
    let (mut is_started, mut chunks) = (false, 0);
    loop {
        let message = tokio::select! {
            // Dropping the stream cancels the executor's call, too.
            () = sender.closed() => return,
            message = output.message() => message,
        };
        let message = match message {
            Ok(Some(message)) => message,
            Ok(None) => return,
            Err(status) => return drop(sender.send(Err(status)).await),
        };
        match &message.kind {
            Some(run_output::Kind::Started(_)) => {
                shared.at(Point::BeforeStarted, 0).await;
                is_started = true;
            }
            Some(run_output::Kind::Credit(_)) | None => {}
            Some(kind) => {
                if is_started && chunks == 0 {
                    shared.at(Point::BeforeFirstByte, 0).await;
                }
                match kind {
                    run_output::Kind::Chunk(_) => {
                        shared.at(Point::Middle, chunks).await;
                        chunks += 1;
                    }
                    run_output::Kind::Exited(_) => shared.at(Point::BeforeStatus, 0).await,
                    run_output::Kind::Finished(_) => shared.at(Point::BeforeFinished, 0).await,
                    _ => {}
                }
            }
        }
        if sender.send(Ok(message)).await.is_err() {
            return;
        }
    }
}
