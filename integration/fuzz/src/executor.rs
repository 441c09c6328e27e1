//! An executor in this process, and its clients.

use std::{
    path::PathBuf,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use arbitrary::Unstructured;
use posh_executor::{Config, config::RightsArguments};
use posh_proto::{
    PROTOCOL_VERSION,
    executor::{
        Chunk, Credit, DescribeRequest, Descriptor, EnvVar, File, Guard, Inlet, Merge, MountPoint,
        Outlet, PathUse, Pty, ReturnedLease, RunInput, RunOutput, RunSpec, Signal, Stage,
        ToolsRequest, VolumeSession, WatchedTree, WindowSize, descriptor::Source,
        executor_client::ExecutorClient, run_input, run_output,
    },
    packed::pack,
};
use posh_volume::{
    remote::{Patience, Remote},
    store::{FileId, Store as _},
};
use prost::Message;
use prost_reflect::{DynamicMessage, ServiceDescriptor};
use tokio::{net::TcpListener, runtime::Runtime, time::timeout};
use tonic::transport::Channel;

use crate::{calls::Call, hostile, scratch, volume::Direct};

/// Where the workstation has the export.
pub const MOUNT: &str = "/mnt/fuzzed/logs";

/// Hostile calls between two sound ones, which must succeed.
const BETWEEN_PROBES: u64 = 16;

/// For a sound run.
const PATIENCE: Duration = Duration::from_secs(20);

/// Parts of error messages that an executor returns only because of a fault of its own.
const FAULTS: [&str; 2] = ["supervisor is gone", "panic"];

/// An executor, and what is sent to it.
pub struct Peer {
    pub runtime: Runtime,
    pub channel: Channel,
    pub address: String,
    service: ServiceDescriptor,
    sound: Vec<DynamicMessage>,
    calls: AtomicU64,
    // A volume's session, which runs may name.
    _volume: Remote,
}

/// The one of this process, which is never ended: the fuzzer's end is its end.
pub fn peer() -> &'static Peer {
    static PEER: OnceLock<Peer> = OnceLock::new();
    PEER.get_or_init(start)
}

fn start() -> Peer {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let store = scratch::directory();
    std::fs::write(store.join("f"), "a\nb\n").unwrap();
    std::fs::create_dir(store.join(".git")).unwrap();
    let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
    let address = listener.local_addr().unwrap();
    let exports = vec![("logs".to_owned(), store)];
    let mut config = Config::from_arguments(address, exports, false, false, rights()).unwrap();
    config.runner_program = Some(runner_program());
    // Few, so that a run that is never over is noticed soon.
    config.bounds.runs = 8;
    runtime.spawn(posh_executor::run(config, listener, std::future::pending()));
    let channel = Channel::from_shared(format!("http://{address}")).unwrap();
    let channel = runtime.block_on(channel.connect()).unwrap();
    let pool = hostile::pool();
    let service = pool.get_service_by_name("posh.executor.v1.Executor").unwrap();
    let volume = Remote::open(Arc::new(Direct(address)), "logs", Patience::default());
    let volume = runtime.block_on(volume).unwrap();
    let sound = sound(&volume).into_iter().map(|(name, bytes)| {
        DynamicMessage::decode(
            pool.get_message_by_name(&format!("posh.executor.v1.{name}")).unwrap(),
            &bytes[..],
        )
        .unwrap()
    });
    let sound = sound.collect();
    let address = address.to_string();
    Peer { runtime, channel, address, service, sound, calls: AtomicU64::new(0), _volume: volume }
}

/// As root's executor has it spelled out.
pub fn rights() -> RightsArguments {
    let is_root = nix::unistd::geteuid().is_root();
    RightsArguments {
        user: is_root.then(|| "root".to_owned()),
        trust_caller_ids: is_root,
        require: None,
    }
}

/// `posh-executor`, built beside this program, or as `POSH_EXECUTOR` says.
pub fn runner_program() -> PathBuf {
    if let Some(program) = std::env::var_os("POSH_EXECUTOR") {
        return program.into();
    }
    let own = std::env::current_exe().unwrap();
    let found = own
        .ancestors()
        .map(|directory| directory.join("posh-executor"))
        .find(|program| program.is_file());
    found.expect("posh-executor is built: cargo build --workspace --bins")
}

/// One or two hostile calls; then, now and then, a sound one.
pub fn calls(data: &[u8]) {
    let peer = peer();
    let mut source = Unstructured::new(data);
    let count = source.int_in_range(1..=2).unwrap_or(1);
    for _ in 0..count {
        let Ok(call) = Call::choose(&peer.service, &[], (&peer.sound, &[]), &mut source) else {
            break;
        };
        if let Some(words) = peer.runtime.block_on(call.make(&peer.channel)) {
            assert!(!FAULTS.iter().any(|fault| words.contains(fault)), "{words}");
        }
    }
    if peer.calls.fetch_add(1, Ordering::Relaxed).is_multiple_of(BETWEEN_PROBES) {
        peer.runtime.block_on(peer.probe());
    }
}

impl Peer {
    /// A sound run, to its end.
    async fn probe(&self) {
        let run = async {
            let mut client = ExecutorClient::new(self.channel.clone());
            client
                .describe(DescribeRequest { protocol: PROTOCOL_VERSION })
                .await
                .expect("it says what it is");
            // A run that was given up just now may still be on its way out.
            loop {
                let inputs = tokio_stream::iter([input(run_input::Kind::Spec(pipeline()))]);
                let mut outputs = client.run(inputs).await.expect("it takes runs").into_inner();
                let mut said = Vec::new();
                while let Some(RunOutput { kind: Some(kind) }) =
                    outputs.message().await.expect("no error")
                {
                    match kind {
                        run_output::Kind::Chunk(chunk) => said.extend_from_slice(&chunk.data),
                        run_output::Kind::Finished(_) => return said,
                        run_output::Kind::Rejected(refusal) => {
                            assert!(
                                refusal.message.contains("many")
                                    || refusal.message.contains("limit"),
                                "{refusal:?}"
                            );
                        }
                        _ => {}
                    }
                }
                tokio::task::yield_now().await;
            }
        };
        let said = timeout(PATIENCE, run).await.expect("a sound run ends in time");
        assert_eq!(said, b"a\nb\n", "a sound run gave something else");
    }
}

fn input(kind: run_input::Kind) -> RunInput {
    RunInput { kind: Some(kind) }
}

/// `cat f | cat`.
fn pipeline() -> RunSpec {
    let stage = |id: u32, argv: &[&str], stdin: Source, out: u32| Stage {
        id,
        program: "cat".into(),
        argv: argv.iter().map(|word| (*word).to_owned().into()).collect(),
        cwd: MOUNT.into(),
        umask: 0o022,
        descriptors: vec![
            descriptor(0, stdin),
            descriptor(1, Source::PipeWrite(out)),
            descriptor(2, Source::PipeWrite(99)),
        ],
        paths: argv[1..]
            .iter()
            .map(|path| PathUse { path: (*path).to_owned().into(), ..PathUse::default() })
            .collect(),
        ..Stage::default()
    };
    RunSpec {
        run_id: "sound".into(),
        protocol: PROTOCOL_VERSION,
        mounts: vec![MountPoint {
            path: MOUNT.into(),
            export: "logs".into(),
            ..MountPoint::default()
        }],
        stages: vec![
            stage(1, &["cat", "f"], Source::NullFlags(0), 101),
            stage(2, &["cat"], Source::PipeRead(101), 102),
        ],
        pipes: vec![99, 101, 102],
        outlets: vec![outlet(1, 102), outlet(2, 99)],
        ..RunSpec::default()
    }
}

fn descriptor(fd: u32, source: Source) -> Descriptor {
    Descriptor { fd, source: Some(source) }
}

fn outlet(stream: u32, source: u32) -> Outlet {
    Outlet { stream, sources: vec![source], initial_credit_bytes: 1 << 20 }
}

/// One with everything in it, beside a volume.
fn elaborate(volume: &Remote) -> RunSpec {
    let mut spec = pipeline();
    let FileId { inode, generation } = volume.root();
    let returned = vec![ReturnedLease { inode, generation, stamp: 1 }];
    spec.volumes = vec![VolumeSession {
        session: volume.session(),
        returned,
        opened: volume.opened().0,
        export: "logs".to_owned(),
    }];
    spec.trace = true;
    spec.pipes.extend([98, 103]);
    spec.ptys = vec![Pty {
        id: 97,
        size: Some(WindowSize { rows: 24, columns: 80, ..WindowSize::default() }),
    }];
    spec.merges = vec![Merge { sources: vec![102], pipe: 103 }];
    spec.inlets = vec![Inlet { stream: 3, pipe: 98 }];
    spec.outlets = vec![outlet(1, 103), outlet(2, 99), outlet(4, 97)];
    let stage = &mut spec.stages[0];
    stage.descriptors[0].source = Some(Source::PipeRead(98));
    stage.descriptors.push(descriptor(3, Source::Pty(97)));
    let file = File { path: "f".into(), flags: 0, offset: 1, report_offset: true };
    stage.descriptors.push(descriptor(4, Source::File(file)));
    stage.descriptors.push(descriptor(5, Source::DuplicateOf(4)));
    stage.paths[0] = PathUse {
        recursive: true,
        no_symlinks: true,
        ends_in_newline: true,
        ..stage.paths[0].clone()
    };
    stage.guards = vec![Guard {
        below: ".git".into(),
        files: vec!["config".into()],
        test: 4,
        ..Guard::default()
    }];
    stage.watched_trees = vec![WatchedTree {
        path: MOUNT.into(),
        up_to: vec![".git".into()],
        own: vec!["x".into()],
        ..WatchedTree::default()
    }];
    stage.ignored_signals = 1 << 12;
    spec
}

/// Long enough to be packed.
fn packed(mut spec: RunSpec) -> run_input::Kind {
    let long = EnvVar { name: "LONG".into(), value: "x".repeat(8192).into() };
    spec.stages.iter_mut().for_each(|stage| stage.env.push(long.clone()));
    pack(spec).expect("a small one")
}

fn sound(volume: &Remote) -> Vec<(&'static str, Vec<u8>)> {
    use run_input::Kind;
    let mut all = vec![
        ("DescribeRequest", DescribeRequest { protocol: PROTOCOL_VERSION }.encode_to_vec()),
        ("ToolsRequest", ToolsRequest { names: vec!["cat".into(), "true".into()] }.encode_to_vec()),
    ];
    let inputs = [
        Kind::Spec(pipeline()),
        Kind::Spec(elaborate(volume)),
        Kind::Spec(pipeline()),
        Kind::Spec(elaborate(volume)),
        packed(pipeline()),
        Kind::Chunk(Chunk { stream: 3, data: "bytes\n".into() }),
        Kind::End(3),
        Kind::Credit(Credit { stream: 1, bytes: 1 << 20 }),
        Kind::Closed(1),
        Kind::Signal(Signal { stage: 1, signal: 15, group: true }),
        Kind::WindowSize(WindowSize { rows: 2, columns: 3, ..WindowSize::default() }),
    ];
    all.extend(inputs.map(|kind| ("RunInput", input(kind).encode_to_vec())));
    all
}

/// Random choices have no sound form: some bytes to begin with.
pub fn seeds() -> Vec<Vec<u8>> {
    (1..=8_u8)
        .map(|factor| {
            (0..=255_u8).map(|byte| byte.wrapping_mul(factor).wrapping_add(factor)).collect()
        })
        .collect()
}
