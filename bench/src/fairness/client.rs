//! A client of an executor at the level of gRPC: runs, and sessions of volumes.

use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use bytes::Bytes;
use fs_mapper::config::TlsHost;
use posh_proto::executor::descriptor::Source;
use posh_proto::executor::executor_client::ExecutorClient;
use posh_proto::executor::{
    Descriptor, MountPoint, Outlet, RunInput, RunOutput, RunSpec, Stage, run_input, run_output,
};
use posh_proto::volume::volume_client::VolumeClient;
use posh_proto::volume::{
    Alive, Answer, Call, Caller, FileId, FromVolume, Hello, Op, Place, ReadPart, ReadRequest,
    ToVolume, Walk, answer, from_volume, op, to_volume,
};
use posh_proto::{MAX_MESSAGE_BYTES, PROTOCOL_VERSION};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;
use tonic::transport::Channel;

/// Messages queued for sending; the abuser sends thousands.
const QUEUE: usize = 1024;
/// Number of a run's only output and of its stream.
const OUT: u32 = 1000;

pub async fn connect(host: &TlsHost, credentials: &Path) -> Result<Channel> {
    Ok(posh_reach::tls::channel(host, credentials).await?)
}

/// A run of one command, in the mount point of the export.
pub fn run_of(argv: &[&str], export: &str, mounted_at: &str, credit_bytes: u64) -> RunSpec {
    let descriptor = |fd, source| Descriptor { fd, source: Some(source) };
    let stage = Stage {
        id: 1,
        program: argv.first().copied().unwrap_or_default().to_owned(),
        argv: argv.iter().map(|word| Bytes::copy_from_slice(word.as_bytes())).collect(),
        cwd: mounted_at.to_owned().into(),
        umask: 0o022,
        descriptors: vec![
            descriptor(0, Source::NullFlags(0)),
            descriptor(1, Source::PipeWrite(1)),
            descriptor(2, Source::PipeWrite(1)),
        ],
        ..Stage::default()
    };
    RunSpec {
        run_id: "fairness".to_owned(),
        protocol: PROTOCOL_VERSION,
        mounts: vec![MountPoint {
            path: mounted_at.to_owned().into(),
            export: export.into(),
            ..MountPoint::default()
        }],
        stages: vec![stage],
        pipes: vec![1],
        outlets: vec![Outlet { stream: OUT, sources: vec![1], initial_credit_bytes: credit_bytes }],
        ..RunSpec::default()
    }
}

/// A running call of `Run`.
pub struct RunCall {
    /// Ends the call when dropped.
    _input: mpsc::Sender<RunInput>,
    pub output: Streaming<RunOutput>,
}

impl RunCall {
    pub async fn begin(channel: &Channel, spec: RunSpec) -> Result<Self> {
        let (input, messages) = mpsc::channel(QUEUE);
        input.send(RunInput { kind: Some(run_input::Kind::Spec(spec)) }).await?;
        let mut client =
            ExecutorClient::new(channel.clone()).max_decoding_message_size(MAX_MESSAGE_BYTES);
        let output = client.run(ReceiverStream::new(messages)).await?.into_inner();
        Ok(Self { _input: input, output })
    }

    /// Reads all output of a run that ends by itself with status 0.
    pub async fn finish(mut self) -> Result<Vec<u8>> {
        let mut out = Vec::new();
        while let Some(message) = self.output.message().await? {
            match message.kind {
                Some(run_output::Kind::Chunk(chunk)) => out.extend_from_slice(&chunk.data),
                Some(run_output::Kind::Rejected(rejected)) => {
                    bail!("refused: {}", rejected.message)
                }
                Some(run_output::Kind::Finished(_)) => return Ok(out),
                _ => {}
            }
        }
        bail!("the run broke off")
    }
}

/// A session of a volume.
pub struct ClientSession {
    client: VolumeClient<Channel>,
    name: Bytes,
    pub root: FileId,
    to: mpsc::Sender<ToVolume>,
    from: Streaming<FromVolume>,
    number: u64,
}

impl ClientSession {
    pub async fn open(channel: &Channel, export: &str) -> Result<Self> {
        let mut name = [0; 16];
        std::io::Read::read_exact(&mut std::fs::File::open("/dev/urandom")?, &mut name)?;
        let name = Bytes::copy_from_slice(&name);
        let (to, messages) = mpsc::channel(QUEUE);
        let hello = Hello {
            protocol: PROTOCOL_VERSION,
            session: name.clone(),
            export: export.to_owned(),
            tell_acls: true,
            resumes: 0,
        };
        to.send(ToVolume { kind: Some(to_volume::Kind::Hello(hello)) }).await?;
        let mut client =
            VolumeClient::new(channel.clone()).max_decoding_message_size(MAX_MESSAGE_BYTES);
        let mut from = client.session(ReceiverStream::new(messages)).await?.into_inner();
        let root = match from.message().await?.and_then(|message| message.kind) {
            Some(from_volume::Kind::Welcome(welcome)) => {
                welcome.root.context("a volume has a root")?
            }
            other => bail!("no welcome: {other:?}"),
        };
        Ok(Self { client, name, root, to, from, number: 0 })
    }

    /// Sends the keep-alive message, without which the session ends.
    pub async fn keep(&mut self) -> Result<()> {
        let alive = Alive { id: self.number, acknowledged: self.number, lost: 0 };
        Ok(self.to.send(ToVolume { kind: Some(to_volume::Kind::Alive(alive)) }).await?)
    }

    /// Sends a request without waiting for the answer.
    pub async fn ask(&mut self, op: op::Kind) -> Result<u64> {
        self.number += 1;
        let (number, acknowledged) = (self.number, 0);
        let caller = Some(Caller::default());
        let call = Call { number, caller, op: Some(Op { kind: Some(op) }), acknowledged };
        self.to.send(ToVolume { kind: Some(to_volume::Kind::Call(call)) }).await?;
        Ok(number)
    }

    /// Sends a request, and waits for the answer.
    pub async fn call(&mut self, op: op::Kind) -> Result<Answer> {
        let number = self.ask(op).await?;
        while let Some(message) = self.from.message().await? {
            match message.kind {
                Some(from_volume::Kind::Reply(reply)) if reply.number == number => {
                    ensure!(reply.error == 0, "errno {}", reply.error);
                    return reply.answer.context("a reply without error has an answer");
                }
                _ => {}
            }
        }
        bail!("the session broke off")
    }

    /// Looks up a file in the root.
    pub async fn find(&mut self, name: &str) -> Result<FileId> {
        let walk = Walk { from: Some(self.root), names: vec![name.to_owned().into()] };
        let Some(answer::Kind::Walked(walked)) = self.call(op::Kind::Walk(walk)).await?.kind else {
            bail!("a walk has another answer")
        };
        let entry = walked.entries.into_iter().next().context("the file is there")?;
        entry.attributes.and_then(|attributes| attributes.id).context("an entry has an id")
    }

    pub fn read_request(&self, file: FileId, parts: &[(u64, u64)]) -> ReadRequest {
        let part = |(start, end): &(u64, u64)| ReadPart {
            place: Some(place(file)),
            start: *start,
            end: *end,
        };
        let parts = parts.iter().map(part).collect();
        ReadRequest { session: self.name.clone(), caller: Some(Caller::default()), parts }
    }

    /// Reads the beginning of a file.
    pub async fn read(&mut self, file: FileId, bytes: u64) -> Result<Vec<u8>> {
        let request = self.read_request(file, &[(0, bytes)]);
        let mut replies = self.client.read(request).await?.into_inner();
        let mut data = Vec::new();
        while let Some(reply) = replies.message().await? {
            for piece in reply.pieces {
                ensure!(piece.error == 0, "errno {}", piece.error);
                data.extend_from_slice(&piece.data);
            }
        }
        Ok(data)
    }
}

pub fn place(file: FileId) -> Place {
    Place { file: Some(file), handle: None }
}
