//! Starts executors and talks to them. Independent of the tests' subjects.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    path::{Path, PathBuf},
    time::Duration,
};

use bytes::Bytes;
use nix::unistd::geteuid;
use posh_executor::{
    Config, Export,
    config::{Commands, Confinement},
    identity::UnixUser,
};
use posh_proto::{
    MAX_MESSAGE_BYTES, PROTOCOL_VERSION,
    executor::{
        Chunk, Credit, Descriptor, Exited, File, Inlet, MountPoint, Outlet, PathUse, Rejected,
        RunInput, RunOutput, RunSpec, Stage, descriptor::Source, executor_client::ExecutorClient,
        exited::How, run_input::Kind, run_output,
    },
};
use tempfile::TempDir;
use tokio::{
    net::TcpListener,
    sync::{mpsc, oneshot},
    task::JoinHandle,
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Streaming, transport::Channel};

/// Where the tests' workstation has the export; no machine has such a directory.
pub const MOUNT: &str = "/mnt/posh-test-workstation/logs";

/// Timeout for any expected event.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// A mount whose daemon never answers.
pub struct Hung {
    mount: posh_volume::mount::NewMount,
}

impl Hung {
    pub fn over(point: &Path) -> Self {
        let wanted =
            posh_volume::mount::Wanted { source: "hangs", read_only: false, for_everybody: true };
        Self { mount: posh_volume::mount::mount(&wanted, point).unwrap() }
    }
}

impl Drop for Hung {
    fn drop(&mut self) {
        let _ = self.mount.volume.unmount();
    }
}

/// Size of a gateway's chunks.
pub const CHUNK_BYTES: usize = 256 << 10;

pub const OUT: u32 = 1000;
pub const ERR: u32 = 1001;
pub const IN: u32 = 1002;

pub type Client = ExecutorClient<Channel>;

/// Gives this thread and its later children a mount namespace.
pub fn take_own_mounts() {
    use nix::mount::{MsFlags, mount};

    nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNS).unwrap();
    let none = None::<&str>;
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).unwrap();
}

/// Mounts a directory at another place.
pub fn bind(source: &Path, at: &Path) {
    let none = None::<&str>;
    nix::mount::mount(Some(source), at, none, nix::mount::MsFlags::MS_BIND, none).unwrap();
}

/// An executor in this process, serving a fresh directory as `logs`.
pub struct Lab {
    pub store: TempDir,
    pub client: Client,
    pub address: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    pub served: JoinHandle<Result<(), posh_executor::Error>>,
}

pub fn config(store: &Path) -> Config {
    Config {
        listen: SocketAddr::from(([127, 0, 0, 1], 0)),
        confinement: Confinement {
            commands: Commands::Any,
            user: Some(own_user().into()),
            trust_caller_ids: geteuid().is_root(),
            ..Confinement::default()
        },
        runner_program: Some(PathBuf::from(env!("CARGO_BIN_EXE_posh-executor"))),
        ..Config::new(vec![Export {
            name: "logs".into(),
            path: store.to_owned(),
            read_only: false,
            exec: false,
            coherence: None,
            linked_from: None,
        }])
    }
}

/// The user that runs the tests, mostly root: most tests are about commands of root.
pub fn own_user() -> UnixUser {
    let name = nix::unistd::User::from_uid(geteuid()).unwrap().unwrap().name;
    UnixUser::named(&name).unwrap()
}

impl Lab {
    pub async fn start() -> Self {
        Self::with(|_| {}).await
    }

    pub async fn with(change: impl FnOnce(&mut Config)) -> Self {
        let store = TempDir::new().unwrap();
        let mut config = config(store.path());
        change(&mut config);
        let listener = TcpListener::bind(config.listen).await.unwrap();
        let address = listener.local_addr().unwrap();
        let (stop, stopped) = oneshot::channel::<()>();
        let served = tokio::spawn(posh_executor::run(config, listener, async move {
            let _ = stopped.await;
        }));
        let client = connect(address).await;
        Self { store, client, address, stop: Some(stop), served }
    }

    pub fn write(&self, name: &str, content: impl AsRef<[u8]>) {
        std::fs::write(self.store.path().join(name), content).unwrap();
    }

    pub fn stop(&mut self) {
        drop(self.stop.take());
    }

    pub async fn run(&self, spec: RunSpec) -> Outcome {
        run(&self.client, spec, Bytes::new()).await
    }
}

pub async fn connect(address: SocketAddr) -> Client {
    let endpoint = Channel::from_shared(format!("http://{address}")).unwrap();
    let endpoint =
        endpoint.initial_stream_window_size(8 << 20).initial_connection_window_size(64 << 20);
    let channel = tokio::time::timeout(PATIENCE, async {
        loop {
            match endpoint.connect().await {
                Ok(channel) => break channel,
                Err(_) => tokio::task::yield_now().await,
            }
        }
    });
    ExecutorClient::new(channel.await.expect("the executor listens"))
        .max_decoding_message_size(MAX_MESSAGE_BYTES)
}

/// `cat f | sort`, each command split at spaces: standard input is /dev/null, the
/// last output is [`OUT`], all errors [`ERR`], the working directory [`MOUNT`].
pub fn pipeline(commands: &[&str]) -> RunSpec {
    let count = u32::try_from(commands.len()).unwrap();
    let (out, err) = (100 + count, 99);
    let stage = |(id, command): (u32, &&str)| {
        let argv: Vec<Bytes> =
            command.split(' ').map(|word| Bytes::copy_from_slice(word.as_bytes())).collect();
        let stdin = if id == 1 { Source::NullFlags(0) } else { Source::PipeRead(99 + id) };
        Stage {
            id,
            program: command.split(' ').next().unwrap().to_owned(),
            argv,
            cwd: MOUNT.into(),
            umask: 0o022,
            descriptors: vec![
                descriptor(0, stdin),
                descriptor(1, Source::PipeWrite(100 + id)),
                descriptor(2, Source::PipeWrite(err)),
            ],
            ..Stage::default()
        }
    };
    RunSpec {
        run_id: "test".into(),
        protocol: PROTOCOL_VERSION,
        mounts: vec![mount(MOUNT, "logs", "")],
        stages: (1..).zip(commands).map(stage).collect(),
        pipes: (err..=out).filter(|id| *id != 100).collect(),
        outlets: vec![outlet(OUT, &[out]), outlet(ERR, &[err])],
        ..RunSpec::default()
    }
}

/// Like `pipeline`, with the client's input as the first command's standard input.
pub fn pipeline_with_input(commands: &[&str]) -> RunSpec {
    let mut spec = pipeline(commands);
    spec.pipes.push(98);
    spec.stages[0].descriptors[0].source = Some(Source::PipeRead(98));
    spec.inlets = vec![Inlet { stream: IN, pipe: 98 }];
    spec
}

/// One command whose arguments may hold spaces.
pub fn command(argv: &[&str]) -> RunSpec {
    let mut spec = pipeline(&[argv[0]]);
    spec.stages[0].argv = argv.iter().map(|word| Bytes::copy_from_slice(word.as_bytes())).collect();
    spec
}

pub fn mount(path: &str, export: &str, sub_path: &str) -> MountPoint {
    MountPoint {
        path: path.to_owned().into(),
        export: export.into(),
        sub_path: sub_path.to_owned().into(),
        ..MountPoint::default()
    }
}

pub fn outlet(stream: u32, sources: &[u32]) -> Outlet {
    Outlet { stream, sources: sources.to_vec(), initial_credit_bytes: 1 << 20 }
}

pub fn descriptor(fd: u32, source: Source) -> Descriptor {
    Descriptor { fd, source: Some(source) }
}

pub fn file(name: &str, flags: i32, offset: u64) -> Source {
    let flags = flags.unsigned_abs();
    Source::File(File { path: name.to_owned().into(), flags, offset, report_offset: true })
}

pub fn path_use(path: &str) -> PathUse {
    PathUse { path: path.to_owned().into(), ..PathUse::default() }
}

/// A `Run` call that is open.
pub struct Call {
    pub input: mpsc::Sender<RunInput>,
    pub output: Streaming<RunOutput>,
}

impl Call {
    pub async fn open(client: &Client, spec: RunSpec) -> Self {
        let (input, stream) = mpsc::channel(16);
        let first = posh_proto::packed::pack(spec.clone()).unwrap_or(Kind::Spec(spec));
        input.send(RunInput { kind: Some(first) }).await.unwrap();
        let output = client.clone().run(ReceiverStream::new(stream)).await.unwrap().into_inner();
        Self { input, output }
    }

    pub async fn send(&self, kind: Kind) {
        let _ = self.input.send(RunInput { kind: Some(kind) }).await;
    }

    /// The next message; `None` at the call's end.
    pub async fn next(&mut self) -> Option<run_output::Kind> {
        let message = tokio::time::timeout(PATIENCE, self.output.message()).await;
        message.expect("a message in time").expect("no error").and_then(|output| output.kind)
    }

    /// Reads on until `wanted` gives something.
    pub async fn until<T>(&mut self, mut wanted: impl FnMut(&run_output::Kind) -> Option<T>) -> T {
        loop {
            let kind = self.next().await.expect("the message awaited comes before the end");
            if let Some(found) = wanted(&kind) {
                return found;
            }
        }
    }

    /// Reads output until it contains `text`.
    pub async fn until_output(&mut self, text: &str) -> String {
        let mut seen = Vec::new();
        self.until(|kind| {
            if let run_output::Kind::Chunk(Chunk { stream: OUT, data }) = kind {
                seen.extend_from_slice(data);
            }
            let all = String::from_utf8_lossy(&seen);
            all.contains(text).then(|| all.into_owned())
        })
        .await
    }
}

impl Call {
    /// Completes the call, with credit as it is used.
    pub async fn collect(mut self, mut input: Bytes) -> Outcome {
        let mut outcome = Outcome::default();
        let mut is_input_ended = false;
        while let Some(kind) = self.next().await {
            match kind {
                run_output::Kind::Started(_) => outcome.is_started = true,
                run_output::Kind::Rejected(rejected) => outcome.rejected = Some(rejected),
                run_output::Kind::Chunk(Chunk { stream, data }) => {
                    self.send(Kind::Credit(Credit { stream, bytes: data.len() as u64 })).await;
                    if stream == OUT { &mut outcome.out } else { &mut outcome.err }
                        .extend_from_slice(&data);
                }
                run_output::Kind::Credit(Credit { stream, bytes }) if !is_input_ended => {
                    let mut data = input.split_to(input.len().min(usize::try_from(bytes).unwrap()));
                    while !data.is_empty() {
                        let data = data.split_to(data.len().min(CHUNK_BYTES));
                        self.send(Kind::Chunk(Chunk { stream, data })).await;
                    }
                    if input.is_empty() {
                        is_input_ended = true;
                        self.send(Kind::End(stream)).await;
                    }
                }
                run_output::Kind::Exited(exited) => {
                    outcome.exits.insert(exited.stage, exited);
                }
                run_output::Kind::Finished(_) => outcome.is_finished = true,
                _ => {}
            }
        }
        outcome
    }
}

/// Results of a run.
#[derive(Debug, Default)]
pub struct Outcome {
    pub out: Vec<u8>,
    pub err: Vec<u8>,
    pub exits: BTreeMap<u32, Exited>,
    pub rejected: Option<Rejected>,
    pub is_started: bool,
    pub is_finished: bool,
}

impl Outcome {
    pub fn text(&self) -> String {
        assert!(self.is_finished, "{self:?}");
        String::from_utf8_lossy(&self.out).into_owned()
    }

    pub fn errors(&self) -> String {
        String::from_utf8_lossy(&self.err).into_owned()
    }

    pub fn codes(&self) -> Vec<How> {
        self.exits.values().map(|exited| exited.how.unwrap()).collect()
    }

    pub fn refusal(&self) -> &Rejected {
        assert!(!self.is_started, "{self:?}");
        self.rejected.as_ref().unwrap_or_else(|| panic!("not rejected: {self:?}"))
    }
}

/// Runs `spec` to its end, with `input` for [`IN`].
pub async fn run(client: &Client, spec: RunSpec, input: Bytes) -> Outcome {
    Call::open(client, spec).await.collect(input).await
}
