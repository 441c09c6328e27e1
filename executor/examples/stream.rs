//! Measures a running executor: `stream ADDR MOUNT=EXPORT STREAMS CALLS COMMAND...` runs COMMAND
//! STREAMS times at once, and reports the throughput of the output; then runs `cat` CALLS times,
//! one after the other.
#![allow(clippy::unwrap_used, reason = "a measuring tool: any failure ends it")]

use std::time::Instant;

use posh_proto::{
    MAX_MESSAGE_BYTES, PROTOCOL_VERSION,
    executor::{
        Credit, Descriptor, MountPoint, Outlet, RunInput, RunSpec, Stage, descriptor::Source,
        executor_client::ExecutorClient, run_input::Kind, run_output,
    },
};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;

const PIPE: u32 = 1;
const OUTLET: u32 = 2;
const CREDIT: u64 = 4 << 20;

fn spec(mount: &str, export: &str, argv: &[&str]) -> RunSpec {
    let stage = Stage {
        id: 1,
        program: argv[0].to_owned(),
        argv: argv.iter().map(|word| (*word).to_owned().into()).collect(),
        cwd: mount.to_owned().into(),
        descriptors: vec![
            Descriptor { fd: 0, source: Some(Source::NullFlags(0)) },
            Descriptor { fd: 1, source: Some(Source::PipeWrite(PIPE)) },
        ],
        ..Stage::default()
    };
    RunSpec {
        protocol: PROTOCOL_VERSION,
        mounts: vec![MountPoint {
            path: mount.to_owned().into(),
            export: export.to_owned(),
            ..MountPoint::default()
        }],
        stages: vec![stage],
        pipes: vec![PIPE],
        outlets: vec![Outlet { stream: OUTLET, sources: vec![PIPE], initial_credit_bytes: CREDIT }],
        ..RunSpec::default()
    }
}

/// Gives the bytes that came.
async fn run(mut client: ExecutorClient<Channel>, spec: RunSpec) -> u64 {
    let (input, stream) = mpsc::channel(64);
    input.send(RunInput { kind: Some(Kind::Spec(spec)) }).await.unwrap();
    let mut output = client.run(ReceiverStream::new(stream)).await.unwrap().into_inner();
    let (mut total, mut owed) = (0, 0);
    while let Some(message) = output.message().await.unwrap() {
        match message.kind {
            Some(run_output::Kind::Chunk(chunk)) => {
                total += chunk.data.len() as u64;
                owed += chunk.data.len() as u64;
                if owed >= CREDIT / 4 {
                    let credit = Credit { stream: OUTLET, bytes: std::mem::take(&mut owed) };
                    let _ = input.send(RunInput { kind: Some(Kind::Credit(credit)) }).await;
                }
            }
            Some(run_output::Kind::Rejected(rejected)) => panic!("rejected: {}", rejected.message),
            _ => {}
        }
    }
    total
}

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [address, mount, streams, calls, command @ ..] = &arguments[..] else {
        panic!("stream ADDR MOUNT=EXPORT STREAMS CALLS COMMAND...");
    };
    let (mount, export) = mount.split_once('=').unwrap();
    let (streams, calls): (usize, u32) = (streams.parse().unwrap(), calls.parse().unwrap());
    let command: Vec<&str> = command.iter().map(String::as_str).collect();
    let endpoint = Channel::from_shared(format!("http://{address}")).unwrap();
    let endpoint =
        endpoint.initial_stream_window_size(8 << 20).initial_connection_window_size(256 << 20);
    // Without this the executor may send frames of 16 KiB only, at half the speed.
    let endpoint = endpoint.max_frame_size(1 << 20);
    let channel = endpoint.connect().await.unwrap();
    let client = ExecutorClient::new(channel).max_decoding_message_size(MAX_MESSAGE_BYTES);

    let began = Instant::now();
    let runs: Vec<_> = (0..streams)
        .map(|_| tokio::spawn(run(client.clone(), spec(mount, export, &command))))
        .collect();
    let mut total = 0;
    for run in runs {
        total += run.await.unwrap();
    }
    let seconds = began.elapsed().as_secs_f64();
    println!("{total} bytes, {seconds:.3} s, {:.0} MB/s", total as f64 / seconds / 1e6);

    let mut times = Vec::new();
    for _ in 0..calls {
        let began = Instant::now();
        run(client.clone(), spec(mount, export, &["cat"])).await;
        times.push(began.elapsed().as_secs_f64() * 1e3);
    }
    times.sort_by(f64::total_cmp);
    if let (Some(median), Some(worst)) = (times.get(times.len() / 2), times.last()) {
        println!("`cat`: median {median:.2} ms, worst {worst:.2} ms");
    }
}
