//! A gateway beside an executor that lies: about what has changed and where, and in all that it
//! says.

// All of this is test code; clippy's own exception knows only #[test] functions.
#![allow(clippy::unwrap_used)]

use std::{
    fs::{self, File},
    os::unix::fs::{MetadataExt as _, symlink},
    path::{Path, PathBuf},
    pin::Pin,
    process::Command,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use bytes::{Bytes, BytesMut};
use fs_mapper::{config::Config, mountinfo::mount_id};
use hyper_util::rt::TokioIo;
use posh_gateway::Listeners;
use posh_proto::{
    PROTOCOL_VERSION,
    executor::{
        ChangedDirectory, Chunk, DescribeReply, DescribeRequest, Exited, Export, FileFingerprint,
        FingerprintReply, FingerprintRequest, Finished, Rejected, Resumed, RunInput, RunOutput,
        RunSpec, Started, StatusReply, StatusRequest, Tool, ToolsReply, ToolsRequest,
        executor_server::{Executor, ExecutorServer},
        exited::How,
        guard::Test,
        run_input,
        run_output::Kind,
    },
    frame,
    gateway::{ReportRequest, StatusReply as GatewayStatus, gateway_client::GatewayClient},
    packed,
    stage::{
        self, Descriptor, Enlist, OpenSession, ToGateway, ToStage, descriptor, to_gateway, to_stage,
    },
};
use prost::Message as _;
use sha2::{Digest as _, Sha256};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, UnixListener, UnixStream},
    time::timeout,
};
use tokio_stream::{Stream, StreamExt as _, wrappers::TcpListenerStream};
use tonic::{
    Request, Response, Status, Streaming,
    transport::{Channel, Endpoint, Server},
};

/// For anything that is to happen at all.
const PATIENCE: Duration = Duration::from_secs(30);

/// Set in the second run of a test, which is the one in a namespace of its own.
const INSIDE: &str = "POSH_GATEWAY_TEST_INSIDE";

/// Runs a test again where its mounts are its own, and end with it. Needs root.
fn in_own_namespace(test: &str, body: impl Future<Output = ()>) {
    if std::env::var_os(INSIDE).is_some() {
        tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap().block_on(body);
        return;
    }
    let mut again = Command::new("unshare");
    again.args(["--mount", "--propagation", "private", "--"]).arg(std::env::current_exe().unwrap());
    let output = again.args(["--exact", test, "--nocapture"]).env(INSIDE, "1").output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && said.contains("1 passed"),
        "{said}{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

/// More than a run of one command has.
const STREAMS: u32 = 6;

/// Sets a terminal's title and forges a line, where it is not spelled out.
const ESCAPES: &str = "x\u{1b}]0;T\u{7}\nFORGED: ok";
/// The same, spelled out.
const SHOWN: &str = "x\\u{1b}]0;T\\u{7}\\nFORGED: ok";

/// Is given the words of a run's first command, and what the run is answered.
type Meanwhile = Box<dyn FnMut(&[Bytes], &mut Vec<Kind>) + Send>;

/// What each run is answered.
#[derive(Clone, Default)]
struct Liar {
    run: Arc<Mutex<Vec<Kind>>>,
    /// All that it was asked to run.
    asked: Arc<Mutex<Vec<RunSpec>>>,
    /// Whether its answers never end.
    stays: Arc<AtomicBool>,
    /// What it does before it answers a run.
    meanwhile: Arc<Mutex<Option<Meanwhile>>>,
    /// How often it took a run up again, if it drops each.
    drops: Option<Arc<AtomicUsize>>,
    /// The directory that it serves.
    directory: Arc<Mutex<PathBuf>>,
    /// Others may exchange it, as it says.
    is_exchangeable: Arc<AtomicBool>,
}

impl Liar {
    fn meanwhile(&self, work: impl FnMut(&[Bytes], &mut Vec<Kind>) + Send + 'static) {
        *self.meanwhile.lock().unwrap() = Some(Box::new(work));
    }

    fn was_asked_for(&self, command: &str) -> bool {
        self.asked.lock().unwrap().iter().any(|spec| spec.stages[0].program == command)
    }
}

#[tonic::async_trait]
impl Executor for Liar {
    type RunStream = Pin<Box<dyn Stream<Item = Result<RunOutput, Status>> + Send>>;

    async fn describe(
        &self,
        _: Request<DescribeRequest>,
    ) -> Result<Response<DescribeReply>, Status> {
        Ok(Response::new(DescribeReply {
            protocol: PROTOCOL_VERSION,
            version: ESCAPES.to_owned(),
            hostname: ESCAPES.to_owned(),
            exports: vec![Export { name: "x".to_owned(), read_only: false }],
            machine: std::env::consts::ARCH.to_owned(),
            namespaces: true,
            now_ms: posh_proto::clock::now_ms(),
            ..DescribeReply::default()
        }))
    }

    /// It has the workstation's own programs.
    async fn tools(&self, request: Request<ToolsRequest>) -> Result<Response<ToolsReply>, Status> {
        let tool = |name: String| {
            let sha256 = fs::read(Path::new("/usr/bin").join(&name))
                .map(|program| Sha256::digest(program).to_vec());
            Tool { found: sha256.is_ok(), sha256: sha256.unwrap_or_default().into(), name }
        };
        Ok(Response::new(ToolsReply {
            tools: request.into_inner().names.into_iter().map(tool).collect(),
        }))
    }

    /// It has the files that are made there, as a server has.
    async fn fingerprint(
        &self,
        request: Request<FingerprintRequest>,
    ) -> Result<Response<FingerprintReply>, Status> {
        let name = request.into_inner().name;
        let file = self.directory.lock().unwrap().join(std::str::from_utf8(&name).unwrap());
        let content = fs::read(file).unwrap_or_default().into();
        let entries = vec![FileFingerprint { name, content, ..FileFingerprint::default() }];
        let exchangeable = self.is_exchangeable.load(Ordering::Relaxed);
        Ok(Response::new(FingerprintReply { entries, exchangeable, ..FingerprintReply::default() }))
    }

    /// Chunks are of the run's one outlet, whichever number that has.
    async fn run(
        &self,
        request: Request<Streaming<RunInput>>,
    ) -> Result<Response<Self::RunStream>, Status> {
        let first = request.into_inner().message().await?.and_then(|first| first.kind);
        let spec = match first {
            Some(run_input::Kind::Spec(spec)) => spec,
            Some(run_input::Kind::Packed(packed)) => packed::unpack(&packed).unwrap(),
            Some(run_input::Kind::Resume(_)) if let Some(drops) = &self.drops => {
                drops.fetch_add(1, Ordering::Relaxed);
                let resumed = RunOutput { kind: Some(Kind::Resumed(Resumed::default())) };
                let said = [Ok(resumed), Err(Status::unavailable("again"))];
                return Ok(Response::new(Box::pin(tokio_stream::iter(said))));
            }
            other => panic!("{other:?}"),
        };
        self.asked.lock().unwrap().push(spec.clone());
        let mut answers = self.run.lock().unwrap().clone();
        if let Some(meanwhile) = &mut *self.meanwhile.lock().unwrap() {
            meanwhile(&spec.stages[0].argv, &mut answers);
        }
        for answer in &mut answers {
            if let Kind::Chunk(chunk) = answer {
                chunk.stream = spec.outlets[0].stream;
            }
        }
        let mut said: Vec<_> =
            answers.into_iter().map(|kind| Ok(RunOutput { kind: Some(kind) })).collect();
        said.extend(self.drops.iter().map(|_| Err(Status::unavailable("gone"))));
        let said = tokio_stream::iter(said);
        if self.stays.load(Ordering::Relaxed) {
            return Ok(Response::new(Box::pin(said.chain(tokio_stream::pending()))));
        }
        Ok(Response::new(Box::pin(said)))
    }

    async fn status(&self, _: Request<StatusRequest>) -> Result<Response<StatusReply>, Status> {
        let text = || ESCAPES.to_owned();
        let (identity, user, confinement, refusing) = (text(), text(), text(), text());
        Ok(Response::new(StatusReply {
            identity,
            user,
            confinement,
            refusing,
            ..StatusReply::default()
        }))
    }
}

/// A gateway with a mount of the liar's, and one of another executor.
struct Site {
    top: tempfile::TempDir,
    liar: Liar,
    client: GatewayClient<Channel>,
    session: String,
}

impl Site {
    async fn new() -> Self {
        Self::of(Liar::default()).await
    }

    async fn of(liar: Liar) -> Self {
        let top = tempfile::tempdir().unwrap();
        let at = |name: &str| top.path().join(name);
        for name in ["its", "others", "own"] {
            fs::create_dir_all(at(name)).unwrap();
        }
        for name in ["its", "others"] {
            // Mounts, so that the adapter of the configuration has something to do.
            let mounted = Command::new("mount")
                .args(["-t", "tmpfs", "tmpfs"])
                .arg(at(name))
                .status()
                .unwrap();
            assert!(mounted.success());
            fs::create_dir(at(name).join("d")).unwrap();
        }
        *liar.directory.lock().unwrap() = at("its");
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let service = ExecutorServer::new(liar.clone());
        tokio::spawn(
            Server::builder()
                .add_service(service)
                .serve_with_incoming(TcpListenerStream::new(listener)),
        );
        let executor = |name: &str, address: &str| {
            format!("[[executor]]\nname='{name}'\naddress='http://{address}'\n")
        };
        let mount = |name: &str, executor: &str| {
            let path = at(name);
            format!(
                "[[mount]]\npath='{}'\nexecutor='{executor}'\nexport='x'\ncoherence='sshfs'\n",
                path.display()
            )
        };
        let text = [
            executor("liar", &address.to_string()),
            executor("other", "127.0.0.1:1"),
            mount("its", "liar"),
            mount("others", "other"),
            "[gateway]\nsshfs = 'off'\n".to_owned(),
        ];
        let config = Config::parse(&text.concat(), &at("mounts.toml")).unwrap();
        let listeners = Listeners {
            grpc: UnixListener::bind(at("g.sock")).unwrap(),
            stages: UnixListener::bind(at("g.stage")).unwrap(),
            stage_socket: at("g.stage"),
            directory: top.path().to_owned(),
        };
        tokio::spawn(posh_gateway::run(config, listeners, std::future::pending()));
        let socket = at("g.sock");
        let connect = tower::service_fn(move |_| {
            let socket = socket.clone();
            async move { UnixStream::connect(socket).await.map(TokioIo::new) }
        });
        let channel =
            Endpoint::from_static("http://gateway").connect_with_connector(connect).await.unwrap();
        let mut site =
            Self { client: GatewayClient::new(channel), top, liar, session: String::new() };
        site.session = site.open_session().await;
        site
    }

    fn at(&self, name: &str) -> PathBuf {
        self.top.path().join(name)
    }

    async fn connect(&self, first: to_gateway::Kind) -> UnixStream {
        let mut socket = UnixStream::connect(self.at("g.stage")).await.unwrap();
        send(&mut socket, first).await;
        socket
    }

    async fn open_session(&self) -> String {
        let request = OpenSession {
            protocol: PROTOCOL_VERSION,
            pid: std::process::id(),
            path: "/usr/bin:/bin".into(),
            stage_program: "/bin/true".into(),
            explain: true,
            ..OpenSession::default()
        };
        let mut socket = self.connect(to_gateway::Kind::OpenSession(request)).await;
        match next(&mut socket, &mut BytesMut::new()).await {
            to_stage::Kind::SessionOpened(opened) => opened.session,
            other => panic!("{other:?}"),
        }
    }

    /// `cat its/f`, as its stage program would have it, until it was to run remotely or was
    /// refused; gives how it ended.
    async fn cat(&self, answers: Vec<Kind>) -> to_stage::Kind {
        self.command(self.enlist(), answers).await
    }

    /// The same of any command.
    async fn command(&self, enlist: Enlist, answers: Vec<Kind>) -> to_stage::Kind {
        *self.liar.run.lock().unwrap() = answers;
        loop {
            let mut socket = self.connect(to_gateway::Kind::Enlist(enlist.clone())).await;
            let mut buffer = BytesMut::new();
            loop {
                match timeout(PATIENCE, next(&mut socket, &mut buffer)).await.unwrap() {
                    to_stage::Kind::Remote(_) => {
                        send(&mut socket, to_gateway::Kind::Ack(stage::Ack {})).await
                    }
                    to_stage::Kind::RunHere(here) if here.reason.contains("is not in reach") => {
                        break;
                    }
                    ended @ (to_stage::Kind::RunHere(_)
                    | to_stage::Kind::Exit(_)
                    | to_stage::Kind::Again(_)) => {
                        return ended;
                    }
                    _ => {}
                }
            }
        }
    }

    /// A command that writes, whose server tells of names in directories that were removed.
    async fn write_telling_of_removed(&self, told: &[(&str, &[&str])]) {
        let ended = self.command(self.sort(), self.telling_of_removed(told)).await;
        assert!(matches!(ended, to_stage::Kind::Exit(_)), "{ended:?}");
    }

    fn telling_of_removed(&self, told: &[(&str, &[&str])]) -> Vec<Kind> {
        let directory = |(path, names): &(&str, &[&str])| ChangedDirectory {
            path: self.at(path).into_os_string().into_encoded_bytes().into(),
            removed: names.iter().map(|name| Bytes::copy_from_slice(name.as_bytes())).collect(),
            ..ChangedDirectory::default()
        };
        telling(told.iter().map(directory).collect())
    }

    /// `sort -o its/f its/a`
    fn sort(&self) -> Enlist {
        let at = |name: &str| self.at(name).into_os_string().into_encoded_bytes();
        fs::write(self.at("its/a"), "a\n").unwrap();
        let mut enlist = self.enlist();
        (enlist.name, enlist.program) = ("sort".into(), "/usr/bin/sort".into());
        enlist.argv = vec!["sort".into(), "-o".into(), at("its/f").into(), at("its/a").into()];
        enlist
    }

    fn enlist(&self) -> Enlist {
        let null = |fd: u32| Descriptor {
            fd,
            kind: descriptor::Kind::Null.into(),
            path: "/dev/null".into(),
            flags: 2,
            ..Descriptor::default()
        };
        // Not opened by the executor, as it is on no mount.
        let output = Descriptor {
            fd: 1,
            kind: descriptor::Kind::File.into(),
            path: self.at("own/out").into_os_string().into_encoded_bytes().into(),
            flags: 1,
            mount_id: mount_id(File::open(self.at("own")).unwrap()),
            ..Descriptor::default()
        };
        let operand = self.at("its/f").into_os_string().into_encoded_bytes();
        Enlist {
            protocol: PROTOCOL_VERSION,
            session: self.session.clone(),
            pid: std::process::id(),
            name: "cat".into(),
            program: "/usr/bin/cat".into(),
            argv: vec!["cat".into(), operand.into()],
            env: vec!["PATH=/usr/bin:/bin".into(), "TZ=UTC".into()],
            cwd: "/".into(),
            cwd_mount_id: mount_id(File::open("/").unwrap()),
            umask: 0o022,
            descriptors: vec![null(0), output, null(2)],
            mount_namespace: fs::metadata("/proc/self/ns/mnt").unwrap().ino(),
            ..Enlist::default()
        }
    }

    /// Which of the directories have other attributes once the liar has said that their listings
    /// have changed.
    async fn touched(&self, told: &[&str]) -> Vec<bool> {
        let seen = |name: &&str| {
            let found = fs::metadata(self.at(name)).unwrap();
            (found.ctime(), found.ctime_nsec())
        };
        let before: Vec<_> = told.iter().map(seen).collect();
        // Times of change are no finer than the clock's tick.
        tokio::time::sleep(Duration::from_millis(20)).await;
        let directory = |name: &&str| ChangedDirectory {
            path: self.at(name).into_os_string().into_encoded_bytes().into(),
            names_changed: true,
            owner: Some(fs::metadata(self.at(name)).unwrap().uid()),
            ..ChangedDirectory::default()
        };
        let ended = self.cat(telling(told.iter().map(directory).collect())).await;
        assert!(matches!(ended, to_stage::Kind::Exit(_)), "{ended:?}");
        told.iter().map(seen).zip(before).map(|(now, before)| now != before).collect()
    }
}

/// A run that has done well, and changed this.
fn telling(changed_directories: Vec<ChangedDirectory>) -> Vec<Kind> {
    let exited = Exited { how: Some(How::Code(0)), changed_directories, ..Exited::default() };
    let mut answers = vec![Kind::Started(Started::default())];
    answers.extend((0..STREAMS).map(Kind::End));
    // Whichever of these is the command's.
    answers.extend((0..STREAMS).map(|stage| Kind::Exited(Exited { stage, ..exited.clone() })));
    answers.push(Kind::Finished(Finished::default()));
    answers
}

async fn send(socket: &mut UnixStream, kind: to_gateway::Kind) {
    let mut bytes = BytesMut::new();
    frame::encode(&ToGateway { kind: Some(kind) }, &mut bytes);
    socket.write_all(&bytes).await.unwrap();
}

async fn next(socket: &mut UnixStream, buffer: &mut BytesMut) -> to_stage::Kind {
    loop {
        if let Some(kind) = frame::decode::<ToStage>(buffer).unwrap().and_then(|said| said.kind) {
            return kind;
        }
        assert!(socket.read_buf(buffer).await.unwrap() > 0, "the gateway hung up");
    }
}

#[test]
fn what_it_tells_of_others_mounts_and_of_this_machine_is_not_heard() {
    in_own_namespace(
        "what_it_tells_of_others_mounts_and_of_this_machine_is_not_heard",
        tell_of_others_mounts(),
    );
}

async fn tell_of_others_mounts() {
    let site = Site::new().await;
    let told = ["its/d", "others/d", "own", "its/../own", "its/d/../../others/d"];
    assert_eq!(site.touched(&told).await, [true, false, false, false, false]);
}

#[test]
fn its_links_lead_the_gateway_nowhere_else() {
    in_own_namespace("its_links_lead_the_gateway_nowhere_else", make_links());
}

async fn make_links() {
    let site = Site::new().await;
    fs::create_dir(site.at("own/below")).unwrap();
    symlink(site.at("own"), site.at("its/out")).unwrap();
    symlink("../others", site.at("its/up")).unwrap();
    symlink("d", site.at("its/in")).unwrap();
    assert_eq!(
        site.touched(&["its/out", "its/out/below", "its/up/d", "its/in"]).await,
        [false, false, false, true]
    );
}

#[test]
fn what_it_tells_to_be_removed_is_removed_on_its_mount_alone() {
    in_own_namespace(
        "what_it_tells_to_be_removed_is_removed_on_its_mount_alone",
        tell_of_removed_trees(),
    );
}

/// One tree is a link all along, the other becomes one after the gateway has looked at it.
async fn tell_of_removed_trees() {
    let site = Site::new().await;
    fs::create_dir(site.at("own/sub")).unwrap();
    fs::write(site.at("own/sub/precious"), "x").unwrap();
    fs::create_dir(site.at("own/sub/empty")).unwrap();
    symlink("precious", site.at("own/sub/link")).unwrap();
    symlink(site.at("own"), site.at("its/static")).unwrap();
    fs::create_dir_all(site.at("its/top/sub")).unwrap();
    symlink("nowhere", site.at("its/top/sub/precious")).unwrap();
    let (top, old, own) = (site.at("its/top"), site.at("its/old"), site.at("own"));
    let (tell, mut told) = tokio::sync::mpsc::unbounded_channel();
    site.liar.meanwhile(move |words, _| {
        if words[0] == "touch" && fs::rename(&top, &old).is_ok() {
            symlink(&own, &top).unwrap();
        }
        // Asked for after all else has been removed.
        if words[0] == "rmdir" {
            tell.send(()).unwrap();
        }
    });
    let changes = [
        ("its", &["top", "static"][..]),
        ("its/top", &["sub"]),
        ("its/top/sub", &["precious"]),
        ("its/static", &["sub"]),
        ("its/static/sub", &["link", "empty"]),
    ];
    tokio::select! {
        () = site.write_telling_of_removed(&changes) => {}
        removed = told.recv() => removed.unwrap(),
    }
    assert!(site.liar.was_asked_for("touch"), "it shows nothing");
    for name in ["own/sub/precious", "own/sub/empty", "own/sub/link"] {
        assert!(site.at(name).symlink_metadata().is_ok(), "{name}");
    }
}

/// The names of a directory can be seen, and made elsewhere.
#[test]
fn a_name_that_it_sees_proves_nothing() {
    in_own_namespace("a_name_that_it_sees_proves_nothing", see_names());
}

async fn see_names() {
    let site = Site::new().await;
    *site.liar.directory.lock().unwrap() = site.at("own");
    let ended = site.command(site.sort(), vec![Kind::Started(Started::default())]).await;
    let to_stage::Kind::RunHere(here) = ended else { panic!("{ended:?}") };
    assert!(here.reason.contains("does not read what was written"), "{}", here.reason);
    assert!(!site.liar.was_asked_for("sort"));
}

/// Nobody puts a link in the place of a directory whose owner root's login sets.
#[test]
fn root_changes_nothing_where_others_may_exchange_the_mount_s_directory() {
    in_own_namespace(
        "root_changes_nothing_where_others_may_exchange_the_mount_s_directory",
        exchange_above(),
    );
}

async fn exchange_above() {
    let site = Site::new().await;
    site.liar.is_exchangeable.store(true, Ordering::Relaxed);
    let ended = site.command(site.sort(), vec![Kind::Started(Started::default())]).await;
    let to_stage::Kind::RunHere(here) = ended else { panic!("{ended:?}") };
    assert!(here.reason.contains("may put another directory in the place"), "{}", here.reason);
}

#[test]
fn what_it_has_not_made_is_not_removed() {
    in_own_namespace("what_it_has_not_made_is_not_removed", make_nothing());
}

async fn make_nothing() {
    let site = Site::new().await;
    fs::create_dir(site.at("its/top")).unwrap();
    symlink("nowhere", site.at("its/top/link")).unwrap();
    let link = site.at("its/top/link");
    let (tell, mut told) = tokio::sync::mpsc::unbounded_channel();
    site.liar.meanwhile(move |words, answers| {
        if words[0] == "touch" {
            answers.retain(|answer| !matches!(answer, Kind::Exited(_)));
        }
        // Asked for after what was made has been removed.
        if words[0] == "rmdir" || words[0] == "rm" {
            tell.send(link.symlink_metadata().is_ok()).unwrap();
        }
    });
    let changes = [("its", &["top"][..]), ("its/top", &["link"])];
    tokio::select! {
        () = site.write_telling_of_removed(&changes) => panic!("the link is remembered for longer"),
        is_there = told.recv() => assert_eq!(is_there, Some(true)),
    }
}

#[test]
fn what_it_never_ends_holds_up_no_command_for_long() {
    in_own_namespace("what_it_never_ends_holds_up_no_command_for_long", never_end());
}

async fn never_end() {
    let site = Site::new().await;
    let stays = Arc::clone(&site.liar.stays);
    site.liar.meanwhile(move |words, answers| {
        if words[0] == "mkdir" {
            answers.clear();
            stays.store(true, Ordering::Relaxed);
        }
    });
    // Its end is waited for no longer than PATIENCE.
    site.write_telling_of_removed(&[("its", &["top"]), ("its/top", &["sub"])]).await;
    assert!(site.liar.was_asked_for("mkdir"), "it shows nothing");
}

#[test]
fn what_only_reads_has_removed_nothing() {
    in_own_namespace("what_only_reads_has_removed_nothing", remove_by_reading());
}

async fn remove_by_reading() {
    let site = Site::new().await;
    fs::create_dir(site.at("its/top")).unwrap();
    fs::create_dir(site.at("its/top/empty")).unwrap();
    let ended =
        site.cat(site.telling_of_removed(&[("its", &["top"]), ("its/top", &["empty"])])).await;
    assert!(matches!(ended, to_stage::Kind::Exit(_)), "{ended:?}");
    assert!(site.at("its/top/empty").exists() && !site.liar.was_asked_for("mkdir"));
}

#[test]
fn a_signal_ends_a_command_of_which_nothing_is_heard() {
    in_own_namespace("a_signal_ends_a_command_of_which_nothing_is_heard", say_nothing());
}

async fn say_nothing() {
    let site = Site::new().await;
    site.liar.stays.store(true, Ordering::Relaxed);
    *site.liar.run.lock().unwrap() = vec![Kind::Started(Started::default())];
    let mut socket = site.connect(to_gateway::Kind::Enlist(site.enlist())).await;
    let mut buffer = BytesMut::new();
    let remote = timeout(PATIENCE, next(&mut socket, &mut buffer)).await.unwrap();
    assert!(matches!(remote, to_stage::Kind::Remote(_)), "{remote:?}");
    send(&mut socket, to_gateway::Kind::Ack(stage::Ack {})).await;
    // One that need not end it, and one that must.
    for signal in [nix::libc::SIGUSR1, nix::libc::SIGTERM] {
        let signal = stage::Signal { signal: signal.cast_unsigned(), group: false };
        send(&mut socket, to_gateway::Kind::Signal(signal)).await;
    }
    loop {
        match timeout(PATIENCE, next(&mut socket, &mut buffer)).await.unwrap() {
            to_stage::Kind::Exit(ended) => {
                let by = stage::exit::How::Signal(nix::libc::SIGTERM.cast_unsigned());
                return assert_eq!((ended.how, &ended.message[..]), (Some(by), ""));
            }
            other => assert!(
                !matches!(other, to_stage::Kind::RunHere(_) | to_stage::Kind::Again(_)),
                "{other:?}"
            ),
        }
    }
}

#[test]
fn a_run_that_is_taken_up_again_only_to_be_dropped_is_given_up() {
    in_own_namespace(
        "a_run_that_is_taken_up_again_only_to_be_dropped_is_given_up",
        drop_over_and_over(),
    );
}

async fn drop_over_and_over() {
    let drops = Arc::new(AtomicUsize::new(0));
    let site = Site::of(Liar { drops: Some(drops.clone()), ..Liar::default() }).await;
    let ended = site.command(site.sort(), vec![Kind::Started(Started::default())]).await;
    let to_stage::Kind::Exit(exit) = ended else { panic!("{ended:?}") };
    assert!(exit.message.contains("was lost while the command ran there"), "{}", exit.message);
    assert!((2..20).contains(&drops.load(Ordering::Relaxed)), "{drops:?}");
}

#[test]
fn more_output_than_was_asked_for_ends_the_run() {
    in_own_namespace("more_output_than_was_asked_for_ends_the_run", send_too_much());
}

/// Nobody gives credit for what it has not written: none is given here at all.
async fn send_too_much() {
    let site = Site::new().await;
    let chunk = || Kind::Chunk(Chunk { data: vec![b'x'; 64 << 10].into(), ..Chunk::default() });
    let credited = (4 << 20) / (64 << 10);
    for (count, is_kept) in [(credited, true), (credited + 1, false)] {
        let mut answers = vec![Kind::Started(Started::default())];
        answers.extend((0..count).map(|_| chunk()));
        let exited = Exited { how: Some(How::Code(0)), ..Exited::default() };
        answers.extend((0..STREAMS).map(Kind::End));
        answers.extend((0..STREAMS).map(|stage| Kind::Exited(Exited { stage, ..exited.clone() })));
        answers.push(Kind::Finished(Finished::default()));
        let to_stage::Kind::Exit(exit) = site.cat(answers).await else { panic!("it was begun") };
        assert_eq!(exit.message.is_empty(), is_kept, "{}", exit.message);
        assert!(
            is_kept
                || exit.message.contains("executor liar at")
                    && exit.message.contains("than it was asked for")
        );
    }
}

#[test]
fn its_words_say_nothing_to_the_terminal() {
    in_own_namespace("its_words_say_nothing_to_the_terminal", say_escapes());
}

async fn say_escapes() {
    let mut site = Site::new().await;
    let refused = Rejected { message: ESCAPES.to_owned(), ..Rejected::default() };
    let to_stage::Kind::RunHere(here) = site.cat(vec![Kind::Rejected(refused)]).await else {
        panic!("it was refused")
    };
    assert!(here.reason.contains(SHOWN), "{}", here.reason);
    let GatewayStatus { executors, .. } =
        site.client.status(posh_proto::gateway::StatusRequest {}).await.unwrap().into_inner();
    let liar = executors.iter().find(|executor| executor.name == "liar").unwrap();
    assert_eq!([&liar.identity, &liar.user, &liar.confinement, &liar.refusing], [SHOWN; 4]);
    for json in [false, true] {
        let request =
            ReportRequest { session: site.session.clone(), json, ..ReportRequest::default() };
        let text = site.client.report(request).await.unwrap().into_inner().text;
        assert!(
            text.contains("FORGED") && !text.contains('\u{1b}') && !text.contains("\nFORGED"),
            "{text}"
        );
    }
}

impl Site {
    /// A command in the repository `its/d`, by a user whose home is `own` and whose variables hold
    /// secrets.
    fn enlist_in_repository(&self, words: &[&str]) -> Enlist {
        let home = format!("HOME={}", self.at("own").display());
        let env = [
            "PATH=/usr/bin:/bin",
            "TZ=UTC",
            "GIT_AUTHOR_NAME=Ann",
            "GIT_ASKPASS=/SECRET",
            "GIT_CONFIG_VALUE_0=SECRET",
            "GIT_SSH_COMMAND=ssh SECRET",
            "GIT_TOKEN=SECRET",
            &home,
        ];
        Enlist {
            name: words[0].to_owned(),
            program: format!("/usr/bin/{}", words[0]).into(),
            argv: words.iter().map(|word| word.to_string().into()).collect(),
            env: env.iter().map(|variable| variable.to_string().into()).collect(),
            cwd: self.at("its/d").into_os_string().into_encoded_bytes().into(),
            cwd_mount_id: mount_id(File::open(self.at("its/d")).unwrap()),
            ..self.enlist()
        }
    }

    /// The reason why a command ran here, and what the executor was asked to run before that.
    async fn refused(&self, words: &[&str]) -> (String, Vec<RunSpec>) {
        let refused = Rejected { message: "as it likes".to_owned(), ..Rejected::default() };
        let ended =
            self.command(self.enlist_in_repository(words), vec![Kind::Rejected(refused)]).await;
        let to_stage::Kind::RunHere(here) = ended else { panic!("{ended:?}") };
        (here.reason, std::mem::take(&mut *self.liar.asked.lock().unwrap()))
    }
}

/// Settings that git needs, and secrets that it does not.
const SETTINGS: &str = "\
# SECRET
[user]
\tname = Ann # SECRET
\temail = ann@example.org
\tsigningKey = SECRET
[url \"https://SECRET@example.org/\"]
\tinsteadOf = gh:
[http \"https://example.org/\"]
\textraHeader = Authorization: SECRET
[credential \"https://example.org\"]
\tusername = SECRET
\thelper = \"!echo password=SECRET\"
[github]
\ttoken = SECRET
[sendemail]
\tsmtpPass = SECRET
[alias]
\tup = !curl -H SECRET
[remote \"origin\"]
\tpushurl = https://SECRET@example.org/
[core]
\tsshCommand = ssh -i SECRET
\tquotePath
[color \"diff\"]
\tmeta = \"yellow\\t; bold\"
";

#[test]
fn no_secret_goes_to_a_server_that_has_no_need_of_it() {
    in_own_namespace("no_secret_goes_to_a_server_that_has_no_need_of_it", keep_secrets());
}

async fn keep_secrets() {
    let site = Site::new().await;
    fs::write(site.at("own/.gitconfig"), SETTINGS).unwrap();
    fs::create_dir_all(site.at("own/.config/git")).unwrap();
    fs::write(site.at("own/.config/git/config"), "[http]\n\tcookieFile = SECRET\n").unwrap();
    let (_, asked) = site.refused(&["git", "log", "-1"]).await;
    let [spec] = &asked[..] else { panic!("{asked:?}") };
    let text = String::from_utf8_lossy(&spec.encode_to_vec()).into_owned();
    assert!(text.contains("GIT_AUTHOR_NAME") && !text.contains("SECRET"), "{text}");
    let sent = |name: &str| {
        let path = site.at(name).into_os_string().into_encoded_bytes();
        let file = spec.client_files.iter().find(|file| file.path == path).unwrap();
        String::from_utf8(file.content.to_vec()).unwrap()
    };
    let kept = "[user]\n\tname = \"Ann\"\n\temail = \"ann@example.org\"\n[core]\n\tquotepath\n\
                [color \"diff\"]\n\tmeta = \"yellow\\t; bold\"\n";
    assert_eq!(sent("own/.gitconfig"), kept);
    assert_eq!(sent("own/.config/git/config"), "");
}

#[test]
fn a_setting_that_keeps_git_here_goes_nowhere() {
    in_own_namespace("a_setting_that_keeps_git_here_goes_nowhere", keep_git());
}

async fn keep_git() {
    let site = Site::new().await;
    for (added, found) in [
        ("[filter \"x\"]\n\tclean = tr a b\n", "filter.x.clean in "),
        ("[include]\n\tpath = ~/secrets\n", "include.path in "),
        ("[core\n", "line 27 of "),
        ("[user]\n\tname = A\tB\n", "user.name in "),
    ] {
        fs::write(site.at("own/.gitconfig"), format!("{SETTINGS}{added}")).unwrap();
        let (reason, asked) = site.refused(&["git", "log", "-1"]).await;
        let expected = format!("git's configuration may start programs or name files ({found}");
        assert!(reason.contains(&expected) && asked.is_empty(), "{reason} {asked:?}");
    }
}

#[test]
fn a_repository_of_another_user_is_left_to_the_git_of_this_machine() {
    in_own_namespace(
        "a_repository_of_another_user_is_left_to_the_git_of_this_machine",
        look_at_owners(),
    );
}

async fn look_at_owners() {
    let site = Site::new().await;
    fs::create_dir_all(site.at("its/d/.git")).unwrap();
    fs::create_dir_all(site.at("its/d/below")).unwrap();
    let settings = |text: &str| fs::write(site.at("own/.gitconfig"), text).unwrap();
    let own =
        |name: &str, uid: u32| std::os::unix::fs::chown(site.at(name), Some(uid), None).unwrap();
    let check = async |words: &[&str], variables: &[&str], refuses: Option<&str>| {
        let mut stage = site.enlist_in_repository(words);
        stage.env.extend(variables.iter().map(|variable| variable.to_string().into()));
        let refused = Rejected { message: "as it likes".to_owned(), ..Rejected::default() };
        let ended = site
            .command(
                stage,
                refuses.is_none().then_some(Kind::Rejected(refused)).into_iter().collect(),
            )
            .await;
        let to_stage::Kind::RunHere(here) = ended else { panic!("{ended:?}") };
        let went = !std::mem::take(&mut *site.liar.asked.lock().unwrap()).is_empty();
        let is_refused = refuses.is_some_and(|name| {
            let expected = format!(
                "may refuse {}, which belongs to another user (uid 12345)",
                site.at(name).display()
            );
            here.reason.contains(&expected)
        });
        assert_eq!(
            (went, is_refused),
            (refuses.is_none(), refuses.is_some()),
            "{words:?} {variables:?}: {}",
            here.reason
        );
    };
    settings("");
    check(&["git", "log", "-1"], &[], None).await;
    own("its/d/below", 12345);
    check(&["git", "-C", "below", "log", "-1"], &[], None).await;
    for name in ["its/d/.git", "its/d"] {
        own(name, 12345);
        check(&["git", "log", "-1"], &[], Some(name)).await;
        check(&["git", "-C", "below", "log", "-1"], &[], Some(name)).await;
        check(&["git", "log", "-1"], &["SUDO_UID=12346"], Some(name)).await;
        check(&["git", "log", "-1"], &["SUDO_UID=12345"], None).await;
        settings("[safe]\n\tdirectory = *\n");
        check(&["git", "log", "-1"], &[], None).await;
        settings("");
    }
}

#[test]
fn the_zone_that_tz_names_is_compared() {
    in_own_namespace("the_zone_that_tz_names_is_compared", compare_zone());
}

async fn compare_zone() {
    let site = Site::new().await;
    let zone = Path::new("/usr/share/zoneinfo/UTC");
    let (_, asked) = site.refused(&["git", "log", "-1"]).await;
    let [spec] = &asked[..] else { panic!("{asked:?}") };
    let guard =
        spec.stages[0].guards.iter().find(|guard| guard.test() == Test::SameContent).unwrap();
    assert_eq!(guard.files, [zone.as_os_str().as_encoded_bytes()]);
    let expected = fs::read(zone).map(|file| Sha256::digest(file).to_vec()).unwrap_or_default();
    assert_eq!(guard.sha256, [expected]);
    for (variables, named) in [(["TZ=:/own/zone", "X="], "TZ"), (["TZ=UTC", "TZDIR=/own"], "TZDIR")]
    {
        let mut stage = site.enlist_in_repository(&["git", "log", "-1"]);
        stage.env.retain(|variable| !variable.starts_with(b"TZ="));
        stage.env.extend(variables.map(|variable| variable.to_owned().into()));
        let to_stage::Kind::RunHere(here) = site.command(stage, Vec::new()).await else {
            panic!("it left")
        };
        let expected = format!("{named} names a time zone that git log may not find on the server");
        assert!(here.reason.contains(&expected), "{}", here.reason);
        assert!(site.liar.asked.lock().unwrap().is_empty());
    }
}

#[test]
fn the_policy_of_the_workstation_is_compared_and_not_sent() {
    in_own_namespace("the_policy_of_the_workstation_is_compared_and_not_sent", compare_policy());
}

async fn compare_policy() {
    let site = Site::new().await;
    let own = site.at("own/.config/ImageMagick/policy.xml");
    for content in [None, Some("<policymap> SECRET </policymap>")] {
        if let Some(content) = content {
            fs::create_dir_all(own.parent().unwrap()).unwrap();
            fs::write(&own, content).unwrap();
        }
        let (_, asked) = site.refused(&["identify", "f.png"]).await;
        let [spec] = &asked[..] else { panic!("{asked:?}") };
        assert_eq!(spec.client_files, []);
        let guard =
            spec.stages[0].guards.iter().find(|guard| guard.test() == Test::SameContent).unwrap();
        let sha256 = |path: &Path| {
            let at = guard
                .files
                .iter()
                .position(|file| *file == path.as_os_str().as_encoded_bytes())
                .unwrap();
            guard.sha256[at].to_vec()
        };
        let expected = |path: &Path| {
            fs::read(path).map(|file| Sha256::digest(file).to_vec()).unwrap_or_default()
        };
        for path in [Path::new("/etc/ImageMagick-6/policy.xml"), &own] {
            assert_eq!(sha256(path), expected(path), "{}", path.display());
        }
        assert_eq!(guard.files.len(), guard.sha256.len());
    }
}
