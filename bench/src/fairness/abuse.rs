//! The abuser: repeats one kind of abuse until the process is killed. It is a process of its own at
//! the lowest priority, so that its own use of this machine counts as little as possible.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Result, bail};
use bytes::{BufMut as _, Bytes, BytesMut};
use clap::ValueEnum;
use fs_mapper::config::TlsHost;
use http_body_util::BodyExt as _;
use posh_proto::executor::executor_client::ExecutorClient;
use posh_proto::executor::{RunSpec, StatusRequest, run_output};
use posh_proto::token::{Fingerprint, Token};
use posh_proto::volume::volume_client::VolumeClient;
use posh_proto::volume::{Allocate, CopyRange, Lock, Open, answer, op};
use posh_reach::tls::enrol;
use tokio::io::AsyncWriteExt as _;
use tokio::task::JoinSet;
use tokio::time::sleep;
use tonic::transport::Channel;
use tower::ServiceExt as _;

use super::client::{ClientSession, RunCall, connect, place, run_of};
use super::relay::{self, ABUSER_ADDRESS};
use super::server::{ABUSED_EXPORT, FILE, FILES, LARGE_BYTES};

/// Mount point of the abuser's export.
const MOUNT: &str = "/mnt/fairness-a";
/// Concurrency, where a kind repeats one action.
const MANY: usize = 64;
/// Pause after a refused attempt, so that others are tried too.
const PAUSE: Duration = Duration::from_millis(20);
/// Credit for an output that is never read.
const MUCH_CREDIT: u64 = 64 << 20;

/// Target and kind of the abuse.
#[derive(Debug, Clone, clap::Args)]
pub struct AbuseOptions {
    /// The kind of abuse.
    #[arg(long, value_enum)]
    kind: AbuseKind,
    /// The executor's port on 127.0.0.1.
    #[arg(long)]
    port: u16,
    /// The abuser's credentials.
    #[arg(long)]
    credentials: PathBuf,
    /// A token that was used: it names the authority.
    #[arg(long)]
    token: String,
}

/// Kinds of abuse.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum AbuseKind {
    /// Opens files for writing over a volume, more and more, and gives no lease back.
    KeptLeases,
    /// Messages that are small on the wire and large when they are decoded.
    MessageBombs,
    /// Messages of 60 MiB that never come to their ends, many over one connection.
    HalfMessages,
    /// Many mount tables, each with a run that goes on.
    Views,
    /// Copies and allocations of 256 MiB over a volume, hundreds at a time.
    VolumeCopies,
    /// Locks over a volume that wait for one another, thousands.
    WaitingLocks,
    /// Command lines of 60,000 words.
    LongCommandLines,
    /// Reads over a volume whose answers nobody takes.
    UnreadReads,
    /// Outputs of commands that nobody takes.
    UnreadOutputs,
    /// Renewals of a certificate without end.
    Renewals,
    /// Calls without a pause.
    FastCalls,
    /// Connections with a certificate, without end.
    Connections,
    /// A command that starts processes (3,000 at a time).
    ForkBomb,
    /// Commands that take memory (6 GiB each).
    MemoryHog,
    /// Commands that fill /tmp (4 GiB each).
    DiskHog,
    /// Runs that are cancelled as soon as they have begun.
    Cancellations,
    /// Connections that say nothing, 3,000 a second.
    SilentConnections,
    /// Handshakes that are begun and not gone on with, 3,000 a second.
    HalfHandshakes,
    /// Guesses of enrolment tokens.
    TokenGuesses,
}

impl AbuseKind {
    /// Returns true for abuse by a client without a certificate.
    pub fn is_of_a_stranger(self) -> bool {
        matches!(self, Self::SilentConnections | Self::HalfHandshakes | Self::TokenGuesses)
    }

    /// Name on the command line.
    pub fn name(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
    }
}

/// Abuses without end.
pub fn run(options: &AbuseOptions) -> Result<()> {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(async {
        // A limit per address must not count these connections with the other identity's.
        let port = relay::start(options.port, ABUSER_ADDRESS, Duration::ZERO).await?;
        let abuser = Abuser {
            port: options.port,
            host: TlsHost { host: "127.0.0.1".to_owned(), port },
            credentials: options.credentials.clone(),
            authority: options.token.parse::<Token>()?.authority,
        };
        abuser.abuse(options.kind).await
    })
}

/// Tells the parent that the abuse has begun.
fn at_work() {
    let _ = std::io::stdout().write_all(b"at work\n");
}

struct Abuser {
    /// The executor's own port.
    port: u16,
    /// Relay to the executor from the abuser's address.
    host: TlsHost,
    credentials: PathBuf,
    authority: Fingerprint,
}

impl Abuser {
    /// Repeats the abuse after every refusal, until the process is killed.
    async fn abuse(&self, kind: AbuseKind) -> Result<()> {
        if kind.is_of_a_stranger() || kind == AbuseKind::Connections {
            at_work();
        }
        loop {
            if let Err(error) = self.once(kind).await {
                eprintln!("{}: {error:#}", kind.name());
                // A refused abuse counts as begun, too.
                at_work();
            }
            sleep(PAUSE).await;
        }
    }

    async fn once(&self, kind: AbuseKind) -> Result<()> {
        match kind {
            AbuseKind::KeptLeases => self.keep_leases().await,
            AbuseKind::MessageBombs => self.send_bombs().await,
            AbuseKind::HalfMessages => self.send_halves().await,
            AbuseKind::Views => self.hold_views().await,
            AbuseKind::VolumeCopies => self.copy().await,
            AbuseKind::WaitingLocks => self.wait_for_locks().await,
            AbuseKind::LongCommandLines => self.all(Abuser::run_long_line).await,
            AbuseKind::UnreadReads => self.read_nothing().await,
            AbuseKind::UnreadOutputs => self.leave_outputs().await,
            AbuseKind::Renewals => self.renew().await,
            AbuseKind::FastCalls => self.call_fast().await,
            AbuseKind::Connections => self.connect_on().await,
            AbuseKind::ForkBomb => {
                self.run(shell("i=0; while [ $i -lt 3000 ]; do sleep 100 & i=$((i+1)); done; wait"))
                    .await
            }
            AbuseKind::MemoryHog => self.run(shell("head -c 6G /dev/zero | tail")).await,
            AbuseKind::DiskHog => {
                self.run(shell("head -c 4G /dev/zero > /tmp/x; rm -f /tmp/x")).await
            }
            AbuseKind::Cancellations => self.all(Abuser::cancel).await,
            AbuseKind::SilentConnections => self.flood(b"").await,
            AbuseKind::HalfHandshakes => self.flood(&[22, 3, 1, 2, 0, 1, 0, 1, 0xfc]).await,
            AbuseKind::TokenGuesses => self.all(Abuser::guess).await,
        }
    }

    async fn channel(&self) -> Result<Channel> {
        connect(&self.host, &self.credentials).await
    }

    /// Runs `work` many times concurrently; ends when all have ended.
    async fn all<F: Future<Output = Result<()>> + Send + 'static>(
        &self,
        work: impl Fn(Abuser) -> F,
    ) -> Result<()> {
        let mut all = JoinSet::new();
        for _ in 0..MANY {
            all.spawn(work(self.another()));
        }
        at_work();
        let mut last = Ok(());
        while let Some(ended) = all.join_next().await {
            last = ended?.and(last);
        }
        last
    }

    fn another(&self) -> Abuser {
        Abuser {
            port: self.port,
            host: self.host.clone(),
            credentials: self.credentials.clone(),
            authority: self.authority,
        }
    }

    async fn run(&self, spec: RunSpec) -> Result<()> {
        let run = RunCall::begin(&self.channel().await?, spec).await?;
        at_work();
        run.finish().await.map(drop)
    }

    async fn run_long_line(self) -> Result<()> {
        self.run(long_line()).await
    }

    async fn cancel(self) -> Result<()> {
        let channel = self.channel().await?;
        loop {
            let mut run = RunCall::begin(&channel, shell("sleep 10")).await?;
            let _ = run.output.message().await?;
        }
    }

    async fn guess(self) -> Result<()> {
        let mut secret = [0; 16];
        std::io::Read::read_exact(&mut std::fs::File::open("/dev/urandom")?, &mut secret)?;
        let token = Token { authority: self.authority, secret };
        let nowhere = Path::new("/nonexistent/credentials");
        Ok(enrol::enrol(&self.host, &token, nowhere).await.map(drop)?)
    }

    async fn keep_leases(&self) -> Result<()> {
        let channel = self.channel().await?;
        let mut session = ClientSession::open(&channel, ABUSED_EXPORT).await?;
        session.call(op::Kind::Settle(true)).await?;
        for number in (0..FILES).cycle() {
            let file = session.find(&format!("g{number}")).await?;
            /// `O_RDWR`: a file that may be written back.
            const FLAGS: u32 = 3;
            let open = Open { place: Some(place(file)), flags: FLAGS, ..Open::default() };
            session.call(op::Kind::Open(open)).await?;
            session.keep().await?;
            at_work();
            sleep(PAUSE).await;
        }
        Ok(())
    }

    /// Sends 4 MiB of empty mounts: two bytes each, and some hundred once decoded.
    async fn send_bombs(&self) -> Result<()> {
        const MOUNTS: u8 = 3 << 3 | 2;
        const COUNT: usize = 2 << 20;
        let spec = [MOUNTS, 0].repeat(COUNT);
        let mut message = BytesMut::new();
        message.put_u8(1 << 3 | 2);
        prost::encoding::encode_varint(spec.len() as u64, &mut message);
        message.extend_from_slice(&spec);
        let message = message.freeze();
        let channel = self.channel().await?;
        at_work();
        let mut calls = JoinSet::new();
        for _ in 0..4 {
            let (channel, message) = (channel.clone(), message.clone());
            calls.spawn(async move { raw_call(channel, message.len(), vec![message]).await });
        }
        while let Some(ended) = calls.join_next().await {
            ended??;
        }
        Ok(())
    }

    async fn send_halves(&self) -> Result<()> {
        const PIECE: Bytes = Bytes::from_static(&[0; 64 << 10]);
        const PIECES: usize = 60 << 4;
        let channel = self.channel().await?;
        at_work();
        let mut calls = JoinSet::new();
        for _ in 0..30 {
            let channel = channel.clone();
            calls.spawn(async move { raw_call(channel, 63 << 20, vec![PIECE; PIECES]).await });
        }
        while let Some(ended) = calls.join_next().await {
            ended??;
        }
        Ok(())
    }

    async fn hold_views(&self) -> Result<()> {
        let channel = self.channel().await?;
        let mut held = Vec::new();
        for number in 0..MANY {
            let spec =
                run_of(&["tail", "-f", FILE], ABUSED_EXPORT, &format!("{MOUNT}{number}"), 1 << 20);
            let mut run = RunCall::begin(&channel, spec).await?;
            let first = run.output.message().await?.and_then(|message| message.kind);
            if let Some(run_output::Kind::Rejected(rejected)) = first {
                at_work();
                eprintln!("{number} views: {}", rejected.message);
                break;
            }
            held.push(run);
        }
        at_work();
        sleep(Duration::from_secs(2)).await;
        Ok(())
    }

    async fn copy(&self) -> Result<()> {
        let channel = self.channel().await?;
        let mut session = ClientSession::open(&channel, ABUSED_EXPORT).await?;
        let (from, to) = (session.find("large").await?, session.find("copy").await?);
        /// `FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE`.
        const HOLE: u32 = 3;
        for _ in 0..300 {
            let hole = Allocate { place: Some(place(from)), start: 0, end: LARGE_BYTES, how: HOLE };
            session.ask(op::Kind::Allocate(hole)).await?;
            let copy = CopyRange {
                from: Some(place(from)),
                to: Some(place(to)),
                length: LARGE_BYTES,
                ..CopyRange::default()
            };
            session.ask(op::Kind::CopyRange(copy)).await?;
        }
        at_work();
        session.keep().await?;
        session.call(op::Kind::FileSystem(posh_proto::volume::Nothing {})).await.map(drop)
    }

    async fn wait_for_locks(&self) -> Result<()> {
        let channel = self.channel().await?;
        let mut session = ClientSession::open(&channel, ABUSED_EXPORT).await?;
        let file = session.find(FILE).await?;
        let mut handles = Vec::new();
        for _ in 0..2 {
            let open = Open { place: Some(place(file)), flags: 3, ..Open::default() };
            match session.call(op::Kind::Open(open)).await?.kind {
                Some(answer::Kind::Opened(opened)) => handles.push(opened.handle),
                _ => bail!("an open has another answer"),
            }
        }
        let lock = |handle, wait| {
            let mut place = place(file);
            place.handle = Some(handle);
            op::Kind::Lock(Lock {
                place: Some(place),
                whole: true,
                access: 2,
                wait,
                ..Lock::default()
            })
        };
        session.call(lock(handles[0], false)).await?;
        for _ in 0..8000 {
            session.ask(lock(handles[1], true)).await?;
        }
        at_work();
        loop {
            session.keep().await?;
            sleep(Duration::from_secs(2)).await;
        }
    }

    /// Requests 64 times 8 parts of 64 MiB; the answers stay in the connections.
    async fn read_nothing(&self) -> Result<()> {
        let mut kept = Vec::new();
        for _ in 0..4 {
            let channel = self.channel().await?;
            let mut session = ClientSession::open(&channel, ABUSED_EXPORT).await?;
            let file = session.find("large").await?;
            let parts: Vec<(u64, u64)> = (0..8).map(|part| (part << 20, 64 << 20)).collect();
            let mut replies = Vec::new();
            for _ in 0..MANY {
                let request = session.read_request(file, &parts);
                replies.push(VolumeClient::new(channel.clone()).read(request).await?);
            }
            kept.push((session, replies));
            at_work();
        }
        loop {
            for (session, _) in &mut kept {
                session.keep().await?;
            }
            sleep(Duration::from_secs(2)).await;
        }
    }

    async fn leave_outputs(&self) -> Result<()> {
        let channel = self.channel().await?;
        let mut kept = Vec::new();
        for _ in 0..MANY {
            let spec = run_of(&["cat", "/dev/zero"], ABUSED_EXPORT, MOUNT, MUCH_CREDIT);
            kept.push(RunCall::begin(&channel, spec).await?);
        }
        at_work();
        sleep(Duration::from_secs(5)).await;
        Ok(())
    }

    async fn renew(&self) -> Result<()> {
        let channel = self.channel().await?;
        at_work();
        loop {
            enrol::renew(channel.clone(), &self.host, &self.credentials).await?;
        }
    }

    async fn call_fast(&self) -> Result<()> {
        let channel = self.channel().await?;
        at_work();
        let mut calls = JoinSet::new();
        for _ in 0..MANY {
            let mut client = ExecutorClient::new(channel.clone());
            calls.spawn(async move {
                loop {
                    // May be refused.
                    let _ = client.status(StatusRequest {}).await;
                }
            });
        }
        while let Some(ended) = calls.join_next().await {
            ended?
        }
        Ok(())
    }

    async fn connect_on(&self) -> Result<()> {
        let mut kept = Vec::new();
        loop {
            let channel = self.channel().await?;
            let mut client = ExecutorClient::new(channel);
            let _ = client.status(StatusRequest {}).await;
            kept.push(client);
            if kept.len() > 1000 {
                kept.remove(0);
            }
        }
    }

    /// Opens 3,000 connections a second with this beginning, of which 600 are held.
    async fn flood(&self, beginning: &[u8]) -> Result<()> {
        let mut held = std::collections::VecDeque::new();
        loop {
            for _ in 0..30 {
                let mut stream = relay::connect(self.port, ABUSER_ADDRESS).await?;
                let _ = stream.write_all(beginning).await;
                held.push_back(stream);
            }
            while held.len() > 600 {
                held.pop_front();
            }
            sleep(Duration::from_millis(10)).await;
        }
    }
}

fn shell(text: &str) -> RunSpec {
    run_of(&["sh", "-c", text], ABUSED_EXPORT, MOUNT, 1 << 20)
}

fn long_line() -> RunSpec {
    let words: Vec<&str> =
        std::iter::once("sort").chain(std::iter::repeat_n("-k1,1", 60_000)).collect();
    run_of(&words, ABUSED_EXPORT, MOUNT, 1 << 20)
}

/// Calls `Run` with a message whose header announces `told_bytes`, and these pieces of it; waits
/// for the answer.
async fn raw_call(channel: Channel, told_bytes: usize, pieces: Vec<Bytes>) -> Result<()> {
    let (mut sender, body) = http_body_util::channel::Channel::<Bytes, std::io::Error>::new(1);
    let body = tonic::body::Body::new(body);
    let request = http::Request::post("/posh.executor.v1.Executor/Run")
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .body(body)?;
    let answer = tokio::spawn(channel.oneshot(request));
    let mut head = BytesMut::new();
    head.put_u8(0);
    head.put_u32(u32::try_from(told_bytes)?);
    sender.send_data(head.freeze()).await?;
    for piece in pieces {
        sender.send_data(piece).await?;
    }
    let response = answer.await??;
    response.into_body().collect().await?;
    Ok(())
}
