//! The connection: connects, sends heartbeats, and reconnects with the same session until it is
//! aborted.

use std::{
    collections::VecDeque,
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use posh_proto::{
    MAX_MESSAGE_BYTES, PROTOCOL_VERSION,
    codec::VOLUME_ANSWER_BYTES,
    untrusted::escaped,
    volume::{
        Alive, Call, Hello, Reply, ToVolume, Welcome, from_volume, to_volume,
        volume_client::VolumeClient,
    },
};
use tokio::sync::{mpsc, oneshot};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status};

use super::{CannotConnect, Connection, HEARTBEAT, Incoming, Shared, calls::Given};
use crate::{
    leases::LEASE_TIME,
    store::{Answer, Errno, Notice, Op, Returned, Stamp},
    wire,
};

/// Bounds of the exponential backoff between attempts.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
/// Timeout for the connection with all its handshakes, and again for the welcome.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(15);
/// Time without any message, even answers to heartbeats, after which the connection counts as dead.
const SILENCE: Duration = Duration::from_secs(10);
/// Limit of the identity of a server's machine.
const MACHINE_BYTES: usize = 64;
/// Size of the queue of outgoing messages.
const OUTGOING: usize = 1024;

/// Error of an attempt to connect.
#[derive(Debug, thiserror::Error)]
#[error("{why}")]
pub struct Failed {
    why: String,
    /// True if a retry is useless.
    is_final: bool,
}

/// An established connection.
struct Link {
    incoming: Incoming,
    outgoing: mpsc::Sender<ToVolume>,
    /// Unanswered heartbeats, with the times when they were sent.
    beats: VecDeque<(u64, Instant)>,
    heard: Instant,
}

/// Maintains the connection; sends the result of the first attempt to `first`.
pub async fn keep(shared: Arc<Shared>, first: oneshot::Sender<Result<(), Failed>>) {
    let mut first = Some(first);
    let mut pause = FIRST_PAUSE;
    loop {
        match connect(&shared).await {
            Ok(link) => {
                pause = FIRST_PAUSE;
                match first.take() {
                    Some(first) => drop(first.send(Ok(()))),
                    None => drop(shared.reconnects.fetch_add(1, Ordering::Relaxed)),
                }
                let why = attend(&shared, link).await;
                disconnected(&shared, why, false);
            }
            Err(failed) => {
                if let Some(first) = first.take() {
                    let _ = first.send(Err(failed));
                    return;
                }
                disconnected(&shared, failed.why, failed.is_final);
            }
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

fn disconnected(shared: &Shared, why: String, is_refused: bool) {
    tracing::debug!(export = shared.export, why, "volume out of reach");
    // Under the lock of the calls, so that no call uses the old connection.
    let _calls = shared.calls.lock().expect("not poisoned");
    shared.connection.send_modify(|connection| {
        connection.outgoing = None;
        connection.client = None;
        connection.fault = Some(why);
        connection.is_refused = is_refused;
    });
}

async fn connect(shared: &Shared) -> Result<Link, Failed> {
    let passing = |why: String| Failed { why, is_final: false };
    let channel = tokio::time::timeout(CONNECT_TIMEOUT, shared.connector.connect()).await;
    let channel = channel.map_err(|_| passing("no connection in time".to_owned()))?;
    let channel = channel.map_err(|error| passing(error.to_string()))?;
    let mut client = VolumeClient::new(channel)
        .max_decoding_message_size(VOLUME_ANSWER_BYTES)
        .max_encoding_message_size(MAX_MESSAGE_BYTES);
    let (outgoing, messages) = mpsc::channel(OUTGOING);
    let hello = Hello {
        protocol: PROTOCOL_VERSION,
        session: shared.name.clone(),
        export: shared.export.clone(),
        tell_acls: shared.tell_acls,
        resumes: shared.connection.borrow().opened.0,
    };
    let said = Instant::now();
    let hello = ToVolume { kind: Some(to_volume::Kind::Hello(hello)) };
    outgoing.try_send(hello).map_err(|_| passing("it ended".to_owned()))?;
    let welcome = async {
        let mut incoming = client.session(ReceiverStream::new(messages)).await?.into_inner();
        match incoming.message().await?.and_then(|message| message.kind) {
            Some(from_volume::Kind::Welcome(welcome)) => Ok((incoming, welcome)),
            _ => Err(Status::failed_precondition(
                "the executor does not speak of volumes as expected",
            )),
        }
    };
    let welcome = tokio::time::timeout(CONNECT_TIMEOUT, welcome).await;
    let (incoming, welcome) = welcome
        .map_err(|_| passing("no answer in time".to_owned()))?
        .map_err(|status| failed(&status))?;
    take_up(shared, client, outgoing.clone(), welcome, said).await?;
    Ok(Link { incoming, outgoing, beats: VecDeque::new(), heard: Instant::now() })
}

fn failed(status: &Status) -> Failed {
    let is_final = matches!(
        status.code(),
        Code::Unauthenticated
            | Code::PermissionDenied
            | Code::InvalidArgument
            | Code::Unimplemented
    );
    Failed { why: escaped(status.message()).into_owned(), is_final }
}

/// Resumes the session or begins a new one, and sends the pending calls.
async fn take_up(
    shared: &Shared,
    client: VolumeClient<tonic::transport::Channel>,
    outgoing: mpsc::Sender<ToVolume>,
    welcome: Welcome,
    said: Instant,
) -> Result<(), Failed> {
    let root = wire::id_from_server(welcome.root)
        .map_err(|error| Failed { why: error.to_string(), is_final: false })?;
    let lost = Stamp(welcome.lost);
    let before = shared.connection.borrow().clone();
    let is_first = before.epoch == 0;
    if welcome.machine.len() > MACHINE_BYTES {
        return Err(Failed { why: "its identity is too long".to_owned(), is_final: false });
    }
    if !is_first && welcome.machine != before.machine {
        // Nothing is left on the other machine.
        let bye = to_volume::Kind::Bye(posh_proto::volume::Nothing {});
        let _ = outgoing.send(ToVolume { kind: Some(bye) }).await;
        return Err(Failed { why: CannotConnect::OtherMachine.to_string(), is_final: false });
    }
    let is_other_root = !is_first && root != before.root;
    if is_other_root {
        tracing::warn!(export = shared.export, "the export's directory was replaced");
        // First, so that requests which come after the notice name the new root.
        shared.connection.send_modify(|connection| connection.root = root);
    }
    // Before any answer of the new connection is cached.
    if !is_first && lost > before.lost || is_other_root {
        let _ = shared.notices.send(Notice::Lost { stamp: lost }).await;
    }
    let has_listener = shared.has_listener.load(Ordering::Relaxed);
    let calls = {
        let mut calls = shared.calls.lock().expect("not poisoned");
        let epoch = if welcome.resumed { before.epoch } else { before.epoch + 1 };
        let since = if welcome.resumed || welcome.knows_calls { before.since } else { epoch };
        let connection = Connection {
            client: Some(client),
            outgoing: Some(outgoing.clone()),
            epoch,
            since,
            root,
            watched: wire::watched_of(welcome.watched),
            read_only: welcome.read_only,
            fault: None,
            lost,
            machine: welcome.machine,
            opened: Stamp(welcome.opened),
            is_refused: false,
            heard: Some(Instant::now()),
            valid_until: Some(said + LEASE_TIME),
            valid_above: lost.max(before.valid_above),
        };
        shared.connection.send_replace(connection);
        calls.sent_anew(since, epoch)
    };
    // In a task: the queue may fill up before the stream is read.
    tokio::spawn(async move {
        // Without a listener nothing is cached.
        let forgotten = (!has_listener)
            .then(|| Call { op: Some(Op::Forgotten(lost).into()), ..Call::default() });
        for call in forgotten.into_iter().chain(calls) {
            if outgoing.send(ToVolume { kind: Some(to_volume::Kind::Call(call)) }).await.is_err() {
                return;
            }
        }
    });
    Ok(())
}

/// Serves the connection until it breaks; returns the reason.
async fn attend(shared: &Shared, mut link: Link) -> String {
    let mut beat = tokio::time::interval(HEARTBEAT);
    beat.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut last_beat = 0;
    loop {
        tokio::select! {
            message = link.incoming.message() => match message {
                Ok(Some(message)) => {
                    let Some(kind) = message.kind else { continue };
                    link.heard = Instant::now();
                    take(shared, &mut link, kind).await;
                }
                Ok(None) => return "the executor has ended the session".to_owned(),
                Err(status) => return escaped(status.message()).into_owned(),
            },
            why = shared.connector.worn() => return why,
            _ = beat.tick() => {
                if link.heard.elapsed() > SILENCE {
                    return "the executor is silent".to_owned();
                }
                last_beat += 1;
                link.beats.push_back((last_beat, Instant::now()));
                let acknowledged = shared.calls.lock().expect("not poisoned").acknowledged();
                let alive = Alive { id: last_beat, acknowledged, lost: 0 };
                // If the queue is full, other messages are on their way, which tell as much.
                let alive = ToVolume { kind: Some(to_volume::Kind::Alive(alive)) };
                let _ = link.outgoing.try_send(alive);
            }
        }
    }
}

async fn take(shared: &Shared, link: &mut Link, kind: from_volume::Kind) {
    let heard = link.heard;
    let mut valid_until = None;
    let mut lost = Stamp::default();
    match kind {
        from_volume::Kind::Reply(reply) => {
            let (number, is_earlier) = (reply.number, reply.earlier);
            let answer = answer_of(reply);
            let given = if is_earlier { Given::Earlier(answer) } else { Given::Answer(answer) };
            shared.calls.lock().expect("not poisoned").answered(number, given);
        }
        from_volume::Kind::Notice(notice) => {
            // An unknown notice can only be an offer of leases.
            if let Ok(notice) = notice.try_into() {
                noticed(shared, link, notice).await;
            }
        }
        from_volume::Kind::Alive(alive) => {
            while let Some((id, sent)) =
                link.beats.front().copied().filter(|(id, _)| *id <= alive.id)
            {
                link.beats.pop_front();
                if id == alive.id {
                    valid_until = Some(sent + LEASE_TIME);
                    lost = Stamp(alive.lost);
                }
            }
        }
        from_volume::Kind::Welcome(_) => {}
    }
    shared.connection.send_if_modified(|connection| {
        connection.heard = Some(heard);
        connection.valid_until = valid_until.or(connection.valid_until);
        connection.valid_above = connection.valid_above.max(lost);
        // No receiver waits for a change of these fields.
        false
    });
}

/// Forwards a notice to the listener. Without one nothing is cached, and a recall is answered at
/// once.
async fn noticed(shared: &Shared, link: &Link, notice: Notice) {
    if shared.has_listener.load(Ordering::Relaxed) {
        let _ = shared.notices.send(notice).await;
        return;
    }
    if let Notice::Recall { file, leases, stamp } = notice {
        let op = Op::Return(vec![Returned { file, leases, stamp }]);
        let call = Call { op: Some(op.into()), ..Call::default() };
        let _ = link.outgoing.send(ToVolume { kind: Some(to_volume::Kind::Call(call)) }).await;
    }
}

fn answer_of(reply: Reply) -> Result<Answer, Errno> {
    match wire::errno(reply.error) {
        Some(errno) => Err(errno),
        None => reply.answer.ok_or(Errno::EPROTO)?.try_into().map_err(|error: wire::Malformed| {
            tracing::warn!(%error, "the server's answer means nothing");
            Errno::EIO
        }),
    }
}
