//! A gateway that remembers what it was asked, and a directory in which posh is
//! installed with it. The service is in this process; the program
//! `posh-gateway` is a script that asks for it through two FIFOs.

use std::{
    ffi::OsString,
    fs,
    os::unix::{
        ffi::OsStringExt,
        fs::{DirBuilderExt as _, PermissionsExt, symlink},
    },
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    sync::{Arc, Mutex},
    thread,
};

use bytes::BytesMut;
use posh_hook::session::STAGE;
use posh_proto::{
    PROTOCOL_VERSION, frame,
    gateway::{
        Mount, MountVolumeReply, MountVolumeRequest, MountsReply, MountsRequest, PlanReply,
        PlanRequest, RecoverVolumeReply, RecoverVolumeRequest, ReportReply, ReportRequest,
        ResolveReply, ResolveRequest, ShutdownReply, ShutdownRequest, StatusReply, StatusRequest,
        UnmountVolumeReply, UnmountVolumeRequest, VolumesReply, VolumesRequest,
        gateway_server::{Gateway, GatewayServer},
    },
    runtime::stage_socket,
    stage::{OpenSession, SessionOpened, ToGateway, ToStage, to_gateway, to_stage},
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{UnixListener, UnixStream},
    sync::oneshot,
};
use tokio_stream::wrappers::UnixListenerStream;
use tonic::{Request, Response, Status};

/// The variables of every process of these tests.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// posh with its companions in a directory of its own, and a user's home.
pub struct Installed {
    root: tempfile::TempDir,
}

impl Installed {
    /// Without any `posh-gateway` and without a configuration.
    pub fn new() -> Self {
        let root = tempfile::tempdir().expect("a directory");
        for (name, mode) in [("bin", 0o755), ("run", 0o700), ("home", 0o755), ("shims", 0o755)] {
            fs::create_dir(root.path().join(name)).expect("a directory");
            fs::set_permissions(root.path().join(name), fs::Permissions::from_mode(mode))
                .expect("a mode");
        }
        let installed = Self { root };
        for (name, built) in
            [("posh", env!("CARGO_BIN_EXE_posh")), ("posh-cli", env!("CARGO_BIN_EXE_posh-cli"))]
        {
            let program = installed.at("bin").join(name);
            if fs::hard_link(built, &program).is_err() {
                fs::copy(built, &program).expect("a copy of the program");
            }
        }
        installed.script("bin/posh-stage", "exit 9");
        for session in ["", "session-1"] {
            let directory = installed.at(session);
            fs::DirBuilder::new()
                .mode(0o700)
                .recursive(true)
                .create(&directory)
                .expect("a directory");
            symlink(installed.at("bin/posh-stage"), directory.join(STAGE)).expect("a link");
        }
        installed
    }

    pub fn at(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }

    /// With an (empty) configuration that `--config` need not name.
    pub fn configured(self) -> Self {
        fs::create_dir_all(self.at("home/.config/posh")).expect("a directory");
        fs::write(self.config(), "").expect("a file");
        self
    }

    pub fn config(&self) -> PathBuf {
        self.at("home/.config/posh/mounts.toml")
    }

    /// The socket of the configuration's gateway.
    pub fn socket(&self) -> PathBuf {
        let user = nix::unistd::geteuid().as_raw();
        let runtime = posh_proto::runtime::RuntimeDir::open_at(self.at("run/posh"), user)
            .expect("a runtime directory");
        runtime.socket_path(&self.config().canonicalize().expect("the configuration exists"))
    }

    pub fn script(&self, name: &str, body: &str) {
        fs::write(self.at(name), format!("#!/bin/sh\n{body}\n")).expect("a script");
        fs::set_permissions(self.at(name), fs::Permissions::from_mode(0o755)).expect("a mode");
    }

    /// A `posh-gateway` that runs `body` with the ready descriptor's number in
    /// `$ready`, and notes each start in the file `starts`.
    pub fn gateway_program(&self, body: &str) {
        let starts = self.at("starts");
        let body = format!("echo \"$@\" >> {}\nfor ready; do :; done\n{body}", starts.display());
        self.script("bin/posh-gateway", &body);
    }

    /// A `posh-gateway` that is ready once the service in this process is: the
    /// returned thread waits until it is started.
    pub fn gateway_on_demand(&self) -> thread::JoinHandle<Fake> {
        for fifo in ["started", "go"] {
            nix::unistd::mkfifo(&self.at(fifo), nix::sys::stat::Mode::from_bits_truncate(0o600))
                .expect("a FIFO");
        }
        let (started, go) = (self.at("started"), self.at("go"));
        self.gateway_program(&format!(
            "echo started > {}\nread go < {}\neval \"echo ready >&$ready\"",
            started.display(),
            go.display()
        ));
        let (socket, shims) = (self.socket(), self.at("shims"));
        thread::spawn(move || {
            fs::read_to_string(started).expect("the start");
            let fake = Fake::listen(&socket, &shims);
            fs::write(go, "go\n").expect("the script waits");
            fake
        })
    }

    /// A command with the tests' whole environment.
    pub fn command(&self, program: impl AsRef<std::ffi::OsStr>, arguments: &[&str]) -> Command {
        let mut command = Command::new(program);
        command.args(arguments).env_clear().env("PATH", PATH).env("HOME", self.at("home"));
        command
            .env("XDG_RUNTIME_DIR", self.at("run"))
            .env("ODD", "a=b\nc")
            .current_dir(self.at("home"));
        command.stdin(Stdio::null());
        command
    }

    pub fn posh(&self, arguments: &[&str]) -> Output {
        self.command(self.at("bin/posh"), arguments).output().expect("posh runs")
    }

    /// What plain bash says to the same.
    pub fn bash(&self, arguments: &[&str]) -> Output {
        self.command("bash", arguments).output().expect("bash runs")
    }
}

/// What the service was asked, in order.
#[derive(Debug, Default)]
pub struct Asked {
    pub sessions: Vec<OpenSession>,
    pub reports: Vec<ReportRequest>,
    pub plans: Vec<PlanRequest>,
    pub resolved: Vec<ResolveRequest>,
}

/// A running service; dropping it ends it.
pub struct Fake {
    pub asked: Arc<Mutex<Asked>>,
    end: Option<oneshot::Sender<()>>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Fake {
    /// Returns when the socket is bound.
    pub fn listen(socket: &Path, shims: &Path) -> Self {
        Self::of_version(PROTOCOL_VERSION, socket, shims)
    }

    /// One that speaks another protocol, and says so as gateways do.
    pub fn of_version(protocol: u32, socket: &Path, shims: &Path) -> Self {
        let asked = Arc::<Mutex<Asked>>::default();
        let service = Service { protocol, asked: asked.clone(), shims: shims.to_owned() };
        let (end, ended) = oneshot::channel();
        let listeners = [socket.to_owned(), stage_socket(socket)].map(|socket| {
            let listener = std::os::unix::net::UnixListener::bind(socket).expect("a socket");
            listener.set_nonblocking(true).expect("a socket");
            listener
        });
        let thread = thread::spawn(move || serve(listeners, service, ended));
        Self { asked, end: Some(end), thread: Some(thread) }
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        let _ = self.end.take().map(|end| end.send(()));
        let _ = self.thread.take().map(thread::JoinHandle::join);
    }
}

fn serve(
    [grpc, stages]: [std::os::unix::net::UnixListener; 2],
    service: Service,
    ended: oneshot::Receiver<()>,
) {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let [grpc, stages] =
            [grpc, stages].map(|listener| UnixListener::from_std(listener).expect("a listener"));
        let incoming = UnixListenerStream::new(grpc);
        let sessions = service.clone();
        let server = tonic::transport::Server::builder().add_service(GatewayServer::new(service));
        tokio::select! {
            served = server.serve_with_incoming(incoming) => served.expect("the service"),
            () = sessions.open_sessions(stages) => {}
            _ = ended => {}
        }
    });
}

#[derive(Clone)]
struct Service {
    protocol: u32,
    asked: Arc<Mutex<Asked>>,
    shims: PathBuf,
}

impl Service {
    async fn open_sessions(&self, listener: UnixListener) {
        loop {
            let (mut shell, _) = listener.accept().await.expect("a shell");
            let request = question(&mut shell).await;
            let kind = match self.open_session(request) {
                Ok(opened) => to_stage::Kind::SessionOpened(opened),
                Err(why) => to_stage::Kind::SessionRefused(why),
            };
            let mut answer = BytesMut::new();
            frame::encode(&ToStage { kind: Some(kind) }, &mut answer);
            shell.write_all(&answer).await.expect("it waits");
        }
    }

    fn open_session(&self, request: OpenSession) -> Result<SessionOpened, String> {
        if request.protocol != self.protocol {
            return Err(format!("posh {}, gateway {}", request.protocol, self.protocol));
        }
        self.asked.lock().expect("no panic").sessions.push(request);
        let shim_directory = OsString::from(&self.shims).into_vec().into();
        Ok(SessionOpened { session: "s1".to_owned(), shim_directory })
    }
}

async fn question(shell: &mut UnixStream) -> OpenSession {
    let mut bytes = BytesMut::new();
    loop {
        match frame::decode::<ToGateway>(&mut bytes)
            .expect("a frame")
            .and_then(|message| message.kind)
        {
            Some(to_gateway::Kind::OpenSession(request)) => return request,
            Some(other) => panic!("{other:?}"),
            None => assert_ne!(shell.read_buf(&mut bytes).await.expect("it asks"), 0),
        }
    }
}

type Answer<T> = Result<Response<T>, Status>;

#[tonic::async_trait]
impl Gateway for Service {
    async fn report(&self, request: Request<ReportRequest>) -> Answer<ReportReply> {
        let request = request.into_inner();
        let text = format!("report of {}, json {}", request.session, request.json);
        let trace = request.times.map(|_| "{\"traceEvents\":[1]}".to_owned()).unwrap_or_default();
        self.asked.lock().expect("no panic").reports.push(request);
        Ok(Response::new(ReportReply { text, trace, trace_dropped: 0 }))
    }

    async fn mounts(&self, _: Request<MountsRequest>) -> Answer<MountsReply> {
        let mount = Mount {
            path: "/mnt/logs".into(),
            state: "no owner".to_owned(),
            mounted: true,
            ..Mount::default()
        };
        Ok(Response::new(MountsReply { mounts: vec![mount] }))
    }

    async fn resolve(&self, request: Request<ResolveRequest>) -> Answer<ResolveReply> {
        let request = request.into_inner();
        let reply = ResolveReply {
            client_path: request.path.clone(),
            reason: "a test".to_owned(),
            ..Default::default()
        };
        self.asked.lock().expect("no panic").resolved.push(request);
        Ok(Response::new(reply))
    }

    async fn plan(&self, request: Request<PlanRequest>) -> Answer<PlanReply> {
        let request = request.into_inner();
        let text = format!("{} stages", request.stages.len());
        self.asked.lock().expect("no panic").plans.push(request);
        Ok(Response::new(PlanReply { text }))
    }

    async fn status(&self, _: Request<StatusRequest>) -> Answer<StatusReply> {
        Ok(Response::new(StatusReply {
            version: "9.9".to_owned(),
            protocol: self.protocol,
            pid: 7,
            ..StatusReply::default()
        }))
    }

    async fn shutdown(&self, _: Request<ShutdownRequest>) -> Answer<ShutdownReply> {
        Err(Status::failed_precondition("this one stays"))
    }

    async fn mount_volume(&self, _: Request<MountVolumeRequest>) -> Answer<MountVolumeReply> {
        Err(Status::unimplemented("no volumes"))
    }

    async fn unmount_volume(&self, _: Request<UnmountVolumeRequest>) -> Answer<UnmountVolumeReply> {
        Err(Status::unimplemented("no volumes"))
    }

    async fn recover_volume(&self, _: Request<RecoverVolumeRequest>) -> Answer<RecoverVolumeReply> {
        Err(Status::unimplemented("no volumes"))
    }

    async fn volumes(&self, _: Request<VolumesRequest>) -> Answer<VolumesReply> {
        Ok(Response::new(VolumesReply::default()))
    }
}
