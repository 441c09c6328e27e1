//! `fairness`: the effect of one identity's or a stranger's abuse on another identity. Each kind of
//! abuse has a fresh executor; the other identity's latencies are measured first without the abuse,
//! then during it.

pub mod abuse;
mod client;
mod idle_group;
mod relay;
mod server;

use std::fmt::Write as _;
use std::io::{BufRead as _, BufReader};
use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};
use std::{fs, thread};

use anyhow::{Context, Result, ensure};
use clap::ValueEnum as _;
use fs_mapper::config::TlsHost;
use posh_integration::programs::Programs;
use posh_proto::executor::StatusRequest;
use posh_proto::executor::executor_client::ExecutorClient;
use posh_proto::volume::{FileId, op};
use posh_reach::tls::enrol;
use tokio::runtime::Runtime;
use tokio::time::timeout;
use tonic::transport::Channel;

use self::abuse::AbuseKind;
use self::client::{ClientSession, RunCall, connect, place, run_of};
use self::idle_group::IdleGroup;
use self::server::{ABUSER, CONTENT, FILE, FairnessServer, OTHER, OTHER_EXPORT};
use crate::machine::Machine;

/// Mount point of the other identity's export.
const MOUNT: &str = "/mnt/fairness-b";
/// Timeout of a sample; an expiry counts as an error.
const PATIENCE: Duration = Duration::from_secs(5);
/// Timeout for the beginning of the abuse.
const BEGINS: Duration = Duration::from_secs(3);
const LOCALHOST: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
/// One-way delay of a distant workstation, for new connections.
const ONE_WAY: Duration = Duration::from_millis(50);
/// Required bounds.
const MAX_RATIO: f64 = 3.0;
const MAX_PEAK_MIB: u64 = 256;

/// Selection and extent of the measurement.
#[derive(Debug, Clone, clap::Args)]
pub struct FairnessOptions {
    /// Only this kind (may be repeated).
    #[arg(long = "only", value_enum, value_name = "KIND")]
    only: Vec<AbuseKind>,
    /// Samples of each figure at most.
    #[arg(long, default_value_t = 500)]
    samples: usize,
    /// Seconds for the quiet part and for the abuse, at most, each.
    #[arg(long, default_value_t = 5)]
    seconds: u64,
    /// Writes the table to bench/FAIRNESS.md, too.
    #[arg(long)]
    write: bool,
}

/// Prints the table; fails if a bound is exceeded.
pub fn run(options: &FairnessOptions) -> Result<ExitCode> {
    let programs = Programs::beside_this()?;
    let kinds = if options.only.is_empty() { AbuseKind::value_variants() } else { &options.only };
    let mut table = String::from(HEAD);
    print!("{HEAD}");
    let mut missed = Vec::new();
    for kind in kinds {
        let measured =
            measure(*kind, programs.directory(), options).with_context(|| kind.name())?;
        let line = measured.line();
        println!("{line}");
        table += &format!("{line}\n");
        if !measured.holds() {
            missed.push(kind.name());
        }
    }
    match missed.is_empty() {
        true => println!("all of {} kinds hold", kinds.len()),
        false => {
            println!("{} of {} kinds do not hold: {}", missed.len(), kinds.len(), missed.join(", "))
        }
    }
    if options.write {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("FAIRNESS.md");
        fs::write(&path, page(&table))
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(if missed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

const HEAD: &str = "| abuse | by | run quiet p99 ms | run p99 ms | ratio | stat and read quiet \
                    p99 ms | p99 ms | ratio | connecting quiet p99 ms | p99 ms | ratio | samples \
                    | errors | peak RSS MiB | holds |\n\
                    |---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|\n";

fn page(table: &str) -> String {
    let Machine { processor, cores, date, commit, load_before, .. } = Machine::describe();
    format!(
        "# Fairness\n\nMade by `cargo xtask bench fairness --write` on {date}, commit\n{commit}, \
         {cores} cores of {processor},\nload before {load_before}.\n\nEach line has an executor \
         of its own with its default bounds, over TLS on the loopback interface.\nThe other \
         identity runs `cat` of a small file, and asks for the attributes and the content of \
         one\nover a volume, one after the other. Meanwhile it connects anew, over a round trip \
         of 100 ms, and\nasks for the status. Like a workstation with processors of its own, it \
         waits for no process of this\nmachine (SCHED_FIFO). Quiet first, then beside the abuse, \
         which comes from another address and at\nthe priority of idle work (SCHED_IDLE{}). \
         Peak RSS is that of the\nexecutor itself (VmHWM), not of the commands. Required: at \
         most {MAX_RATIO} times the quiet p99, no error,\nat most {MAX_PEAK_MIB} MiB.\n\n{table}",
        if IdleGroup::new().is_ok() { ", in a control group with cpu.idle" } else { "" }
    )
}

/// Latencies of the other identity.
#[derive(Debug, Default)]
struct Latencies {
    run: Vec<Duration>,
    volume: Vec<Duration>,
    connecting: Vec<Duration>,
    errors: Vec<String>,
}

impl Latencies {
    async fn missed(&mut self, error: &anyhow::Error) {
        self.errors.push(format!("{error:#}"));
        // Limits the number of errors that return at once.
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// The 99th percentile.
fn p99(samples: &mut [Duration]) -> Option<f64> {
    samples.sort_unstable();
    let index = (samples.len() * 99).div_ceil(100).checked_sub(1)?;
    samples.get(index).map(|sample| sample.as_secs_f64() * 1e3)
}

struct Measured {
    kind: AbuseKind,
    run: [Option<f64>; 2],
    volume: [Option<f64>; 2],
    connecting: [Option<f64>; 2],
    samples: usize,
    errors: Vec<String>,
    peak_mib: Option<u64>,
}

fn ratio([quiet, beside]: [Option<f64>; 2]) -> Option<f64> {
    Some(beside? / quiet?)
}

impl Measured {
    fn holds(&self) -> bool {
        let is_small = |latencies| ratio(latencies).is_some_and(|ratio| ratio <= MAX_RATIO);
        let memory_holds = self.peak_mib.is_some_and(|peak| peak <= MAX_PEAK_MIB);
        [self.run, self.volume, self.connecting].into_iter().all(is_small)
            && self.errors.is_empty()
            && memory_holds
    }

    fn line(&self) -> String {
        let figure =
            |value: Option<f64>| value.map_or("-".to_owned(), |value| format!("{value:.1}"));
        let by = if self.kind.is_of_a_stranger() { "stranger" } else { "identity" };
        let mut line = format!("| {} | {by} |", self.kind.name());
        for latencies in [self.run, self.volume, self.connecting] {
            let figures = [latencies[0], latencies[1], ratio(latencies)].map(figure);
            let _ = write!(line, " {} |", figures.join(" | "));
        }
        let errors = match self.errors.first() {
            Some(first) => format!("{} ({})", self.errors.len(), first.replace(['|', '\n'], " ")),
            None => "0".to_owned(),
        };
        let peak = self.peak_mib.map_or("ended".to_owned(), |mib| mib.to_string());
        let holds = if self.holds() { "yes" } else { "**no**" };
        let _ = write!(line, " {} | {errors} | {peak} | {holds} |", self.samples);
        line
    }
}

/// Lets this thread, which is the workstation of the other identity, wait for no process of the
/// executor's machine: a real one has processors of its own (SCHED_FIFO of sched(7)). What it
/// starts is scheduled as usual.
fn has_a_machine_of_its_own() -> Result<()> {
    let thread = nix::unistd::gettid().to_string();
    let status = Command::new("chrt")
        .args(["--fifo", "--reset-on-fork", "--pid", "1", &thread])
        .stdin(Stdio::null())
        .status()
        .context("cannot start chrt")?;
    ensure!(status.success(), "cannot give the workstation a priority of its own: chrt: {status}");
    Ok(())
}

fn measure(kind: AbuseKind, programs: &Path, options: &FairnessOptions) -> Result<Measured> {
    let server = FairnessServer::start(programs)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let token = server.token(ABUSER)?;
    runtime.block_on(enrol::enrol(&server.host, &token, &server.credentials(ABUSER)))?;
    runtime.block_on(enrol::enrol(
        &server.host,
        &server.token(OTHER)?,
        &server.credentials(OTHER),
    ))?;
    let other = Other { host: server.host.clone(), credentials: server.credentials(OTHER) };
    has_a_machine_of_its_own()?;
    let mut quiet = other.sample(&runtime, options)?;
    ensure!(quiet.errors.is_empty(), "without abuse: {:?}", quiet.errors);
    server.forget_peak()?;
    let abuse = Abuse::begin(kind, &server, &token.to_string())?;
    let mut beside = other.sample(&runtime, options)?;
    let peak_mib = server.peak_mib();
    drop(abuse);
    Ok(Measured {
        kind,
        samples: beside.run.len(),
        run: [p99(&mut quiet.run), p99(&mut beside.run)],
        volume: [p99(&mut quiet.volume), p99(&mut beside.volume)],
        connecting: [p99(&mut quiet.connecting), p99(&mut beside.connecting)],
        errors: beside.errors,
        peak_mib,
    })
}

/// The abuser's process; killed when dropped.
struct Abuse {
    process: Child,
    /// Dropped after the process.
    _group: Option<IdleGroup>,
}

impl Abuse {
    fn begin(kind: AbuseKind, server: &FairnessServer, token: &str) -> Result<Self> {
        // SCHED_IDLE (sched(7)) and an idle control group, since a real abuser has a machine of its
        // own.
        let group = IdleGroup::new().ok();
        let mut command = Command::new("sh");
        command.args(["-c", r#"test -z "$0" || echo $$ > "$0" || exit; exec chrt --idle 0 "$@""#]);
        command.arg(group.as_ref().map_or(Path::new(""), IdleGroup::members));
        command.arg(std::env::current_exe()?).args(["abuse", "--kind", &kind.name()]);
        command.arg("--port").arg(server.host.port.to_string());
        command.arg("--credentials").arg(server.credentials(ABUSER)).args(["--token", token]);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        if std::env::var_os("POSH_FAIRNESS_LOG").is_some() {
            command.stderr(Stdio::inherit());
        }
        let mut process = command.spawn()?;
        let (begun, begins) = mpsc::channel();
        let output = process.stdout.take().context("stdout is a pipe")?;
        thread::spawn(move || {
            for _ in BufReader::new(output).lines().map_while(Result::ok) {
                let _ = begun.send(());
            }
        });
        let abuse = Self { process, _group: group };
        // An abuse that begins slowly is measured from its beginning.
        let _ = begins.recv_timeout(BEGINS);
        Ok(abuse)
    }
}

impl Drop for Abuse {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The identity that is measured: a workstation that stays connected.
struct Other {
    host: TlsHost,
    credentials: PathBuf,
}

impl Other {
    fn sample(&self, runtime: &Runtime, options: &FairnessOptions) -> Result<Latencies> {
        let end = Instant::now() + Duration::from_secs(options.seconds);
        let mut latencies = Latencies::default();
        let mut others = Latencies::default();
        runtime.block_on(async {
            let far = relay::start(self.host.port, LOCALHOST, ONE_WAY).await?;
            let far = TlsHost { port: far, ..self.host.clone() };
            let commands = async {
                let mut connected = None;
                while Instant::now() < end && latencies.run.len() < options.samples {
                    if let Err(error) = self.sample_once(&mut connected, &mut latencies).await {
                        connected = None;
                        latencies.missed(&error).await;
                    }
                }
            };
            let connections = async {
                while Instant::now() < end {
                    let begun = Instant::now();
                    match in_time(self.ask_anew(&far), "a new connection").await {
                        Ok(()) => others.connecting.push(begun.elapsed()),
                        Err(error) => others.missed(&error).await,
                    }
                }
            };
            tokio::join!(commands, connections);
            anyhow::Ok(())
        })?;
        latencies.connecting = others.connecting;
        latencies.errors.extend(others.errors);
        Ok(latencies)
    }

    /// Asks on a new connection.
    async fn ask_anew(&self, host: &TlsHost) -> Result<()> {
        let channel = connect(host, &self.credentials).await?;
        ExecutorClient::new(channel).status(StatusRequest {}).await?;
        Ok(())
    }

    async fn sample_once(
        &self,
        connected: &mut Option<Connected>,
        latencies: &mut Latencies,
    ) -> Result<()> {
        if connected.is_none() {
            *connected =
                Some(in_time(Connected::new(&self.host, &self.credentials), "connecting").await?);
        }
        let Some(connected) = connected else { return Ok(()) };
        let begun = Instant::now();
        in_time(connected.run(), "a run").await?;
        latencies.run.push(begun.elapsed());
        let begun = Instant::now();
        in_time(connected.stat_and_read(), "a volume").await?;
        latencies.volume.push(begun.elapsed());
        Ok(())
    }
}

async fn in_time<T>(work: impl Future<Output = Result<T>>, what: &'static str) -> Result<T> {
    timeout(PATIENCE, work)
        .await
        .with_context(|| format!("{what}: nothing in {PATIENCE:?}"))?
        .context(what)
}

/// A connection with a session of a volume.
struct Connected {
    channel: Channel,
    session: ClientSession,
    file: FileId,
    kept: Instant,
}

impl Connected {
    async fn new(host: &TlsHost, credentials: &Path) -> Result<Self> {
        let channel = connect(host, credentials).await?;
        let mut session = ClientSession::open(&channel, OTHER_EXPORT).await?;
        let file = session.find(FILE).await?;
        Ok(Self { channel, session, file, kept: Instant::now() })
    }

    async fn run(&self) -> Result<()> {
        let spec = run_of(&["cat", FILE], OTHER_EXPORT, MOUNT, 1 << 20);
        let output = RunCall::begin(&self.channel, spec).await?.finish().await?;
        ensure!(output == CONTENT.as_bytes(), "it printed {:?}", String::from_utf8_lossy(&output));
        Ok(())
    }

    async fn stat_and_read(&mut self) -> Result<()> {
        if self.kept.elapsed() > Duration::from_secs(2) {
            self.session.keep().await?;
            self.kept = Instant::now();
        }
        self.session.call(op::Kind::Attributes(place(self.file))).await?;
        let content = self.session.read(self.file, CONTENT.len() as u64).await?;
        ensure!(content == CONTENT.as_bytes(), "it read {:?}", String::from_utf8_lossy(&content));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_of_a_hundred_may_be_slower() {
        let mut samples: Vec<Duration> = (1..=200).rev().map(Duration::from_millis).collect();
        assert_eq!(p99(&mut samples), Some(198.0));
        assert_eq!(p99(&mut [Duration::from_millis(7)]), Some(7.0));
        assert_eq!(p99(&mut []), None);
    }

    #[test]
    fn only_what_was_measured_and_is_small_holds() {
        let measured = |beside, errors: &[&str], peak_mib| Measured {
            kind: AbuseKind::Views,
            run: [Some(1.0), beside],
            volume: [Some(1.0), Some(2.0)],
            connecting: [Some(9.0), Some(9.0)],
            samples: 1,
            errors: errors.iter().map(|&error| error.to_owned()).collect(),
            peak_mib,
        };
        assert!(measured(Some(3.0), &[], Some(256)).holds());
        assert!(!measured(Some(3.1), &[], Some(256)).holds());
        assert!(!measured(None, &[], Some(256)).holds());
        assert!(!measured(Some(1.0), &["refused"], Some(256)).holds());
        assert!(
            !measured(Some(1.0), &[], Some(257)).holds() && !measured(Some(1.0), &[], None).holds()
        );
    }
}
