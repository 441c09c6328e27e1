//! Cost of confining a command: the time from the hand-over of a run to a runner until its only
//! command has ended, compared with the same command started by an ordinary process. The namespaces
//! exist already, as for all runs but a user's first.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use posh_integration::programs::Programs;
use posh_proto::PROTOCOL_VERSION;
use posh_proto::executor::{
    DescribeRequest, Descriptor, MountPoint, RunInput, RunSpec, Stage, descriptor::Source,
    executor_client::ExecutorClient, run_input, run_output,
};
use tonic::transport::Channel;

use crate::report::{BenchReport, FigureTarget};
use crate::sample::Samples;

/// Each round runs one command confined and one without, in turn.
const ROUNDS: usize = 500;
/// The first run creates the namespaces.
const WARM_UP: usize = 20;
const TARGET_MS: f64 = 1.5;
const MS: &str = "ms";
/// Mount point in which the command runs.
const MOUNT: &str = "/mnt/posh-bench/empty";

/// An executor with an empty export.
struct Executor {
    process: Child,
    address: String,
}

impl Drop for Executor {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Measures `cat < /dev/null`, with and without confinement.
pub fn measure(programs: &Programs, report: &mut BenchReport) -> Result<()> {
    let executor = start(programs)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut client =
        runtime.block_on(ExecutorClient::connect(format!("http://{}", executor.address)))?;
    let about = runtime
        .block_on(client.describe(DescribeRequest { protocol: PROTOCOL_VERSION }))?
        .into_inner();
    let (mut bare, mut confined) = (Vec::new(), Vec::new());
    for round in 0..WARM_UP + ROUNDS {
        let (there, here) = (runtime.block_on(run(&mut client))?, spawn()?);
        if round >= WARM_UP {
            confined.push(there.as_secs_f64() * 1e3);
            bare.push(here.as_secs_f64() * 1e3);
        }
    }
    let extra = confined.iter().zip(&bare).map(|(there, here)| there - here).collect();
    let samples = |values| Samples::new(values).context("no round was run");
    report.add(
        "cat < /dev/null: started by an ordinary process, until it has ended",
        MS,
        FigureTarget::None,
        samples(bare)?,
    );
    let what = format!("the same in a runner ({})", about.confinement);
    report.add(what, MS, FigureTarget::None, samples(confined)?);
    report.add(
        "what confinement adds to a command",
        MS,
        FigureTarget::AtMost(TARGET_MS),
        samples(extra)?,
    );
    Ok(())
}

fn start(programs: &Programs) -> Result<Executor> {
    let mut command = Command::new(programs.find("posh-executor")?);
    command.args(["--listen", "127.0.0.1:0", "--export", "empty=/var/empty"]);
    if nix::unistd::geteuid().is_root() {
        command.args(["--user", "root"]);
    }
    std::fs::create_dir_all("/var/empty").context("cannot make /var/empty")?;
    let mut process = command
        .stdin(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .context("cannot start an executor")?;
    let errors = process.stderr.take().context("it has no standard error")?;
    let mut executor = Executor { process, address: String::new() };
    for line in BufReader::new(errors).lines() {
        if let Some((_, address)) = line?.split_once("listening on ") {
            executor.address = address.split_whitespace().next().unwrap_or_default().to_owned();
            return Ok(executor);
        }
    }
    bail!("the executor has ended without listening");
}

fn spawn() -> Result<Duration> {
    let null = File::options().write(true).open("/dev/null")?;
    let began = Instant::now();
    let status = Command::new("cat").stdin(Stdio::null()).stdout(null).env_clear().status()?;
    anyhow::ensure!(status.success(), "cat failed");
    Ok(began.elapsed())
}

/// Time from the hand-over to the runner until the command has ended, by the executor's own clock.
async fn run(client: &mut ExecutorClient<Channel>) -> Result<Duration> {
    let null =
        |fd, flags: i32| Descriptor { fd, source: Some(Source::NullFlags(flags.unsigned_abs())) };
    let stage = Stage {
        id: 1,
        program: "cat".into(),
        argv: vec!["cat".into()],
        cwd: MOUNT.into(),
        descriptors: vec![
            null(0, nix::libc::O_RDONLY),
            null(1, nix::libc::O_WRONLY),
            null(2, nix::libc::O_WRONLY),
        ],
        ..Stage::default()
    };
    let spec = RunSpec {
        protocol: PROTOCOL_VERSION,
        mounts: vec![MountPoint {
            path: MOUNT.into(),
            export: "empty".into(),
            ..MountPoint::default()
        }],
        stages: vec![stage],
        trace: true,
        ..RunSpec::default()
    };
    let input = tokio_stream::once(RunInput { kind: Some(run_input::Kind::Spec(spec)) });
    // The end of the requests ends all inputs, of which there are none.
    let mut output = client.run(input).await?.into_inner();
    let mut given_ns = None;
    while let Some(message) = output.message().await? {
        match message.kind {
            Some(run_output::Kind::Started(started)) => {
                given_ns = started.times.map(|times| times.runner_ns)
            }
            Some(run_output::Kind::Exited(exited)) => {
                let given_ns = given_ns.context("it was not said when the run was handed over")?;
                return Ok(Duration::from_nanos(exited.exited_ns.saturating_sub(given_ns)));
            }
            Some(run_output::Kind::Rejected(rejected)) => bail!("refused: {}", rejected.message),
            _ => {}
        }
    }
    bail!("the run has ended without a word of its command")
}
