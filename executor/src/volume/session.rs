//! One session of a volume: it outlives its connection for a while, runs each numbered call once,
//! and remembers answers until they are acknowledged.

use std::{
    collections::BTreeMap,
    future::Future,
    ptr,
    sync::{
        Arc, Mutex, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant, SystemTime},
};

use bytes::Bytes;
use posh_proto::{
    token::Fingerprint,
    volume::{
        Alive, Call, Caller as WireCaller, FromVolume, Reply, ToVolume, Write as WireWrite,
        WriteReply, Written, from_volume, to_volume, write,
    },
};
use posh_volume::{
    Errno, Store as _,
    directory::{
        Account, Charge, DirectorySession, EFFECTS, EffectMark, Effects, HELD, MAX_NAMES, Pool,
        WriteRoom,
    },
    store::{
        Answer, Caller as FileCaller, ENDED_AT_ONCE, NewFile, Notice, Op, OpenFlags, Stamp, Write,
    },
};
use prost::Message as _;
use serde::Serialize;
use tokio::{
    sync::{mpsc, watch},
    task::AbortHandle,
};
use tokio_stream::StreamExt as _;
use tonic::{Code, Status, Streaming};

use super::{
    ConnectionOrigin, MAX_NAME_BYTES, MIN_NAME_BYTES,
    records::{NotRecorded, Records, SessionRecord},
};
use crate::{
    Export,
    admission::{Admission, Denied, LOOK_INTERVAL},
    audit::AuditLog,
    callers::Caller,
    error::Refusal,
    service::ServiceState,
    tls::serving::Proof,
};

/// Timeout for aborted calls before the audit record counts them: their threads continue, and a
/// file system may hang.
const LAST_COUNTS: Duration = Duration::from_secs(5);
/// Timeout for system calls of a session that must have ended.
const LAST_JOBS: Duration = Duration::from_secs(5);
/// Time for which a session waits for its workstation, with its open files and locks: a laptop that
/// changes networks. Its leases end before that.
const KEEP_TIME: Duration = Duration::from_secs(30);
/// Running or unacknowledged calls; a gateway of ours has fewer.
const MAX_CALLS: usize = 8192;

/// Memory of a call besides its own bytes, with an answer of ordinary size.
const CALL_BYTES: usize = 1 << 10;
/// Longest call: an attribute's value, the names of walks, a few thousand leases.
const MAX_CALL_BYTES: usize = 2 << 20;
/// Bytes counted for a call that has no answer yet.
const CALL_AT_WORK_BYTES: usize = 64 << 10;
/// Memory of an entry in an answer.
const ENTRY_BYTES: usize = 256;
/// Memory of a name in a request, besides its bytes.
const NAME_BYTES: usize = 96;
/// Memory of a name in a listing, at its longest.
const LISTED_BYTES: usize = 450;
/// XATTR_SIZE_MAX, and XATTR_LIST_MAX.
const ATTRIBUTE_BYTES: usize = 64 << 10;

/// Message on a session's stream.
#[derive(Debug)]
pub struct Outgoing {
    pub message: FromVolume,
    /// Charges that are held until the connection has taken it.
    pub charge: Option<Charges>,
}

/// Charges for a call, and for its answer.
pub type Charges = Arc<(Charge, Option<Charge>)>;

/// A session.
#[derive(Debug)]
pub struct Served {
    /// Name in the record.
    name: String,
    pub caller: Arc<Caller>,
    pub export: Export,
    pub store: DirectorySession,
    /// Groups that callers claim are used.
    trusts_groups: bool,
    /// Account that it is charged to.
    pub account: Arc<Account>,
    pub peer: String,
    /// Proof by which the current or last connection is admitted.
    proof: Mutex<Proof>,
    began: Instant,
    /// See [`super::Volumes`].
    pub call_bytes: Arc<Pool>,
    calls: Mutex<Calls>,
    /// Queue of the current connection, for notices.
    outgoing: watch::Sender<Option<mpsc::Sender<Outgoing>>>,
    /// Number of times that it was opened or resumed.
    hellos: watch::Sender<u64>,
    counts: Counts,
    /// True once its end is recorded.
    is_end_noted: AtomicBool,
    /// Record for the next process of this executor.
    record: Mutex<Option<SessionRecord>>,
}

#[derive(Debug, Default)]
struct Counts {
    calls: AtomicU64,
    bytes_written: AtomicU64,
    deeds: [AtomicU64; DEEDS.len()],
}

/// Kinds of changes to an export, as in the audit record.
#[derive(Debug, Clone, Copy)]
enum Deed {
    Made,
    Written,
    Changed,
    Renamed,
    Removed,
}

const DEEDS: [(Deed, &str); 5] = [
    (Deed::Made, "made"),
    (Deed::Written, "written"),
    (Deed::Changed, "changed"),
    (Deed::Renamed, "renamed"),
    (Deed::Removed, "removed"),
];

impl Deed {
    fn of(op: &Op) -> Option<Self> {
        match op {
            Op::MakeDirectory { .. }
            | Op::MakeNode { .. }
            | Op::Symlink { .. }
            | Op::Link { .. }
            | Op::Create { .. }
            | Op::CreateWhole { .. } => Some(Self::Made),
            Op::Allocate { .. } | Op::CopyRange { .. } => Some(Self::Written),
            Op::Open { flags, .. } if flags.contains(OpenFlags::TRUNCATE) => Some(Self::Written),
            Op::Set { .. } | Op::SetAttribute { .. } | Op::RemoveAttribute { .. } => {
                Some(Self::Changed)
            }
            Op::Rename { .. } => Some(Self::Renamed),
            Op::Remove { .. } => Some(Self::Removed),
            _ => None,
        }
    }

    fn of_write(write: &Write) -> Self {
        match write {
            Write::At { .. } | Write::Append { .. } => Self::Written,
            Write::Put(_) => Self::Made,
            Write::Set { .. } => Self::Changed,
        }
    }
}

impl Counts {
    fn note(&self, deed: Deed) {
        self.deeds[deed as usize].fetch_add(1, Ordering::Relaxed);
    }
}

/// A change in progress. It counts unless it is known not to have happened: an aborted one may have
/// happened, and so may one that fails after the store has begun it.
struct UnderWay {
    session: Arc<Served>,
    deed: Option<Deed>,
    bytes: usize,
    /// Set by the store.
    effect: EffectMark,
}

impl UnderWay {
    fn of(session: &Arc<Served>, op: &Op) -> Self {
        let effect = EffectMark::default();
        Self { session: session.clone(), deed: Deed::of(op), bytes: 0, effect }
    }

    fn of_write(session: &Arc<Served>, write: &Write) -> Self {
        let (deed, bytes) = (Some(Deed::of_write(write)), size_of(write));
        Self { session: session.clone(), deed, bytes, effect: EffectMark::default() }
    }

    /// Returns the effects of these, for the store.
    fn effects(under_way: &[Self]) -> Effects {
        under_way.iter().map(|each| each.effect.clone()).collect()
    }

    /// Ends it: as a success, or as a failure.
    fn end(mut self, has_failed: bool) {
        if has_failed && !self.effect.has_begun() {
            self.deed = None;
        }
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        let Some(deed) = self.deed.take() else { return };
        self.session.counts.note(deed);
        self.session.counts.bytes_written.fetch_add(self.bytes as u64, Ordering::Relaxed);
    }
}

/// Invariant: each change that was begun since [`Self::since`] is listed until it is acknowledged.
/// So an unlisted change has not begun, and can begin.
#[derive(Debug, Default)]
struct Calls {
    acknowledged: u64,
    by_number: BTreeMap<u64, Numbered>,
    /// Stamp of the first session whose changes are known.
    since: Stamp,
    /// No call begins any more: the next session has them.
    are_left: bool,
}

/// Calls of sessions that have ended.
#[derive(Debug)]
pub struct KnownCalls(Calls);

impl KnownCalls {
    /// Bytes charged for these calls as long as they are known.
    pub fn bytes(&self) -> usize {
        self.0.by_number.values().map(Numbered::bytes).sum()
    }
}

/// A call that has begun.
#[derive(Debug, Clone)]
struct Numbered {
    outcome: watch::Receiver<Option<CallOutcome>>,
    is_remembered: bool,
    task: AbortHandle,
    /// It began in an earlier session.
    is_earlier: bool,
    /// The connection that waits for the answer, and the task that will send it.
    answering: Option<(mpsc::WeakSender<Outgoing>, AbortHandle)>,
}

impl Numbered {
    fn bytes(&self) -> usize {
        match &*self.outcome.borrow() {
            Some(CallOutcome::Answered(_, charges)) => {
                charges.0.amount() + charges.1.as_ref().map_or(0, Charge::amount)
            }
            Some(CallOutcome::Written(_, charge)) => charge.amount(),
            // It still runs, and has no answer.
            None => CALL_AT_WORK_BYTES,
        }
    }
}

#[derive(Debug, Clone)]
#[expect(clippy::large_enum_variant, reason = "most often it is the answer")]
enum CallOutcome {
    Answered(Reply, Charges),
    Written(Result<WriteReply, Errno>, Arc<Charge>),
}

/// The audit record of a session.
#[derive(Debug, Serialize)]
struct SessionAudit {
    at_s: u64,
    session: String,
    volume: String,
    identity: String,
    user: String,
    peer: String,
    calls: u64,
    bytes_written: u64,
    /// Number of successes of each kind of change, without zeros.
    did: BTreeMap<&'static str, u64>,
    ms: u64,
}

/// Record of a session's beginning.
#[derive(Debug, Serialize)]
struct Begin<'a> {
    session: &'a str,
    volume: &'a str,
    identity: &'a str,
    user: &'a str,
    peer: &'a str,
    read_only: bool,
}

/// Owner of a session, its export, and its rights.
pub struct SessionOwner {
    pub caller: Arc<Caller>,
    pub origin: ConnectionOrigin,
    pub export: Export,
    pub account: Arc<Account>,
    /// The groups that its workstation claims count.
    pub trusts_groups: bool,
}

impl Served {
    /// Has no connection yet.
    pub fn new(
        name: &[u8],
        whose: SessionOwner,
        store: DirectorySession,
        call_bytes: Arc<Pool>,
    ) -> Arc<Self> {
        // Hashed, since the name itself resumes the session.
        let name = Fingerprint::of(name).to_string();
        store.name(&name);
        let calls = Calls { since: store.opened(), ..Calls::default() };
        let SessionOwner { caller, origin, export, account, trusts_groups } = whose;
        Arc::new(Self {
            name,
            caller,
            export,
            store,
            trusts_groups,
            account,
            peer: origin.name,
            proof: Mutex::new(origin.proof),
            began: Instant::now(),
            call_bytes,
            calls: Mutex::new(calls),
            outgoing: watch::Sender::new(None),
            hellos: watch::Sender::new(0),
            counts: Counts::default(),
            is_end_noted: false.into(),
            record: Mutex::default(),
        })
    }

    /// Counts a connection that opens or resumes the session. The result changes when the next one
    /// does.
    pub fn begin_hello(&self) -> watch::Receiver<u64> {
        self.hellos.send_modify(|count| *count += 1);
        self.hellos.subscribe()
    }

    /// Sets the current connection, with its proof.
    pub fn attach(&self, sender: mpsc::Sender<Outgoing>, proof: Proof) {
        *self.proof.lock().expect("not poisoned") = proof;
        self.outgoing.send_replace(Some(sender));
    }

    /// Records it for the next process, before it has any leases.
    ///
    /// # Errors
    /// [`NotRecorded`]: it must not begin.
    pub fn note_in(&self, records: &Records) -> Result<(), NotRecorded> {
        let record = records.note(&self.name, self.store.directory().tree())?;
        *self.record.lock().expect("not poisoned") = Some(record);
        Ok(())
    }

    /// Removes its record, since its leases have ended. A holder whose rights were removed may rely
    /// on them for a moment more, as it may while this process runs.
    pub fn forget_record(&self) {
        if let Some(record) = self.record.lock().expect("not poisoned").take() {
            record.remove();
        }
    }

    /// Records that the session begins.
    ///
    /// # Errors
    /// The record can't be written: the session must not begin.
    pub async fn begin(&self, audit: &AuditLog) -> Result<(), Refusal> {
        let begin = Begin {
            session: &self.name,
            volume: &self.export.name,
            identity: self.caller.name(),
            user: self.caller.user.as_ref().map_or("", |user| &user.name),
            peer: &self.peer,
            read_only: self.export.read_only,
        };
        audit.begin("volume_begin", Some(self.caller.name()), &begin).await
    }

    /// Records that the session has ended, once.
    pub async fn note_end(&self, audit: &AuditLog) {
        if self.is_end_noted.swap(true, Ordering::Relaxed) {
            return;
        }
        audit.note("volume_end", self.caller.name(), &self.record()).await;
    }

    /// Returns true if the caller's current rights are those with which the session began.
    pub fn is_within(&self, caller: &Caller) -> bool {
        caller.volumes
            && caller.user == self.caller.user
            && caller.trust_caller_ids == self.caller.trust_caller_ids
            && caller.exports.contains(&self.export)
    }

    /// Checks that the connected peer is still admitted, by the current register and configuration.
    fn is_admitted(&self, admission: &Admission) -> Result<(), Denied> {
        let proof = self.proof.lock().expect("not poisoned").clone();
        match admission.admitted(&proof)? {
            Some(caller) if !self.is_within(&caller) => {
                Err(Denied("the configuration has changed".to_owned()))
            }
            _ => Ok(()),
        }
    }

    /// Forwards recalls to the current connection.
    pub fn start_notices(self: Arc<Self>) {
        let mut notices = self.store.notices();
        let session = Arc::downgrade(&self);
        let mut connection = self.outgoing.subscribe();
        drop(self);
        tokio::spawn(async move {
            while let Some(notice) = notices.next().await {
                loop {
                    if session.strong_count() == 0 {
                        return;
                    }
                    let sender = connection.borrow_and_update().clone();
                    let message = from_volume::Kind::Notice(notice.into());
                    // A lost notice is sent again when the session is resumed.
                    match sender {
                        Some(sender) if send(&sender, message, None).await => break,
                        _ if connection.changed().await.is_err() => return,
                        _ => {}
                    }
                }
            }
        });
    }

    /// Charge for a call of these writes besides their contents, from its decoding until its answer
    /// was taken.
    pub fn charge_writes(
        &self,
        caller: &FileCaller,
        writes: &[WireWrite],
    ) -> Result<Charge, Status> {
        self.call_bytes.try_take(&self.account, charged_for(caller, writes)).ok_or_else(too_many)
    }

    /// The caller on whose behalf a call acts.
    pub fn acting_for(&self, wanted: Option<WireCaller>) -> FileCaller {
        acting_for(wanted.unwrap_or_default(), self.trusts_groups)
    }

    /// Writes once for each number. A write that would have to wait without room for waiting has
    /// not begun: the client sends it again.
    pub async fn write(
        self: &Arc<Self>,
        number: u64,
        caller: FileCaller,
        writes: Vec<Write>,
        charge: Charge,
        room: WriteRoom,
    ) -> Result<(WriteReply, Arc<Charge>), Status> {
        self.store.renew();
        let session = self.clone();
        let work = async move {
            let deeds: Vec<UnderWay> =
                writes.iter().map(|write| UnderWay::of_write(&session, write)).collect();
            let writing = session.store.write_in(&caller, writes, room);
            let results = EFFECTS.scope(UnderWay::effects(&deeds), writing).await;
            for (number, deed) in deeds.into_iter().enumerate() {
                let result = results.as_ref().ok().and_then(|results| results.get(number));
                deed.end(!result.is_some_and(Result::is_ok));
            }
            let reply = results
                .map(|results| WriteReply { results: results.into_iter().map(written).collect() });
            CallOutcome::Written(reply, Arc::new(charge))
        };
        match outcome_of(self.once(number, true, work)?).await {
            Some(CallOutcome::Written(Err(Errno::EAGAIN), _)) => {
                self.calls.lock().expect("not poisoned").by_number.remove(&number);
                Err(Status::unavailable(
                    "too many writes of this identity wait for leases of others",
                ))
            }
            Some(CallOutcome::Written(written, charge)) => written
                .map(|written| (written, charge))
                .map_err(|errno| Status::internal(errno.desc())),
            None => Err(Status::internal("it was given up with its session")),
            Some(_) => Err(Status::invalid_argument("that number is another call's")),
        }
    }

    /// Begins the work of that number, or finds it running.
    fn once(
        self: &Arc<Self>,
        number: u64,
        is_remembered: bool,
        work: impl Future<Output = CallOutcome> + Send + 'static,
    ) -> Result<watch::Receiver<Option<CallOutcome>>, Status> {
        let mut calls = self.calls.lock().expect("not poisoned");
        if calls.are_left {
            return Err(Status::not_found("this session has ended"));
        }
        if is_remembered && number <= calls.acknowledged {
            return Err(Status::already_exists("that call has been answered"));
        }
        if let Some(known) = calls.by_number.get(&number) {
            return Ok(known.outcome.clone());
        }
        if calls.by_number.len() >= MAX_CALLS {
            return Err(too_many());
        }
        self.counts.calls.fetch_add(1, Ordering::Relaxed);
        let (sender, outcome) = watch::channel(None);
        let session = Arc::downgrade(self);
        let task = tokio::spawn(async move {
            let outcome = work.await;
            if !is_remembered && let Some(session) = session.upgrade() {
                session.calls.lock().expect("not poisoned").by_number.remove(&number);
            }
            sender.send_replace(Some(outcome));
        });
        calls.by_number.insert(
            number,
            Numbered {
                outcome: outcome.clone(),
                is_remembered,
                task: task.abort_handle(),
                is_earlier: false,
                answering: None,
            },
        );
        Ok(outcome)
    }

    /// Sends the answer on that connection, once: a repetition of a running call waits for the same
    /// answer, and an earlier connection no longer does.
    fn answer_when_done(
        &self,
        number: u64,
        outcome: watch::Receiver<Option<CallOutcome>>,
        sender: &mpsc::Sender<Outgoing>,
    ) {
        let mut calls = self.calls.lock().expect("not poisoned");
        let earlier = calls.by_number.get(&number).is_some_and(|known| known.is_earlier);
        let send = |sender: mpsc::Sender<Outgoing>| async move {
            match outcome_of(outcome).await {
                Some(CallOutcome::Answered(reply, charges)) => {
                    answer(&sender, Reply { earlier, ..reply }, Some(charges)).await;
                }
                // It was aborted with its session: its outcome is unknown.
                None if earlier => {
                    let reply = Reply { number, error: Errno::EIO as i32, ..Reply::default() };
                    answer(&sender, reply, None).await;
                }
                _ => {}
            }
        };
        // It may have ended already, and be forgotten.
        let Some(known) = calls.by_number.get_mut(&number) else {
            tokio::spawn(send(sender.clone()));
            return;
        };
        let waits_here = |(its, task): &(mpsc::WeakSender<Outgoing>, AbortHandle)| {
            !task.is_finished() && its.upgrade().is_some_and(|its| its.same_channel(sender))
        };
        if known.answering.as_ref().is_some_and(waits_here) {
            return;
        }
        let task = tokio::spawn(send(sender.clone())).abort_handle();
        if let Some((_, earlier)) = known.answering.replace((sender.downgrade(), task)) {
            earlier.abort();
        }
    }

    /// Forgets changes up to that number: the client will not ask for them again.
    pub fn acknowledge(&self, number: u64) {
        let mut calls = self.calls.lock().expect("not poisoned");
        if number > calls.acknowledged {
            calls.acknowledged = number;
            calls.by_number.retain(|its, call| *its > number || !call.is_remembered);
        }
    }

    /// Aborts a call that the client does not wait for any more, such as a lock.
    fn cancel(&self, number: u64) {
        let mut calls = self.calls.lock().expect("not poisoned");
        // An aborted call removes nothing itself. A change is remembered until it is acknowledged.
        if calls.by_number.get(&number).is_some_and(|call| !call.is_remembered)
            && let Some(call) = calls.by_number.remove(&number)
        {
            call.task.abort();
        } else if let Some(call) = calls.by_number.get(&number) {
            call.task.abort();
        }
    }

    /// Returns true if all changes since the opening of the session with that stamp are known.
    pub fn knows_calls_of(&self, opened: Stamp) -> bool {
        opened != Stamp::default() && opened >= self.calls.lock().expect("not poisoned").since
    }

    /// Hands the calls to the next session: none begins any more. `None`: that was done before.
    pub fn leave_calls(&self) -> Option<KnownCalls> {
        let mut calls = self.calls.lock().expect("not poisoned");
        if std::mem::replace(&mut calls.are_left, true) {
            return None;
        }
        let mut by_number = calls.by_number.clone();
        by_number.retain(|_, call| call.is_remembered);
        by_number.values_mut().for_each(|call| (call.is_earlier, call.answering) = (true, None));
        let Calls { acknowledged, since, .. } = *calls;
        Some(KnownCalls(Calls { acknowledged, by_number, since, are_left: false }))
    }

    /// Takes the calls of an earlier session. Call it before the session is shared.
    pub fn take_over(&self, KnownCalls(known): KnownCalls) {
        *self.calls.lock().expect("not poisoned") = known;
    }

    /// Returns true if `sender` is still its connection.
    fn is_attached_to(&self, sender: &mpsc::Sender<Outgoing>) -> bool {
        self.outgoing.borrow().as_ref().is_some_and(|its| its.same_channel(sender))
    }

    fn record(&self) -> SessionAudit {
        SessionAudit {
            at_s: SystemTime::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_secs()),
            session: self.name.clone(),
            volume: self.export.name.clone(),
            identity: self.caller.name().to_owned(),
            user: self.caller.user.as_ref().map(|user| user.name.clone()).unwrap_or_default(),
            peer: self.peer.clone(),
            calls: self.counts.calls.load(Ordering::Relaxed),
            bytes_written: self.counts.bytes_written.load(Ordering::Relaxed),
            did: DEEDS
                .iter()
                .map(|(deed, word)| {
                    (*word, self.counts.deeds[*deed as usize].load(Ordering::Relaxed))
                })
                .filter(|(_, count)| *count > 0)
                .collect(),
            ms: u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX),
        }
    }
}

/// Handles the messages of one connection, until that ends.
pub async fn attend(
    shared: Arc<ServiceState>,
    served: Arc<Served>,
    mut incoming: Streaming<ToVolume>,
    mut hello: watch::Receiver<u64>,
    sender: mpsc::Sender<Outgoing>,
) {
    loop {
        let message = tokio::select! {
            message = incoming.message() => message,
            () = sender.closed() => break,
            // Another connection has resumed the session.
            _ = hello.changed() => break,
            () = served.store.ended() => return,
        };
        let Ok(Some(ToVolume { kind: Some(kind) })) = message else { break };
        if let Err(Denied(why)) = served.is_admitted(&shared.admission) {
            return end_denied(&shared, &served, &why).await;
        }
        match kind {
            to_volume::Kind::Call(call) => begin_call(&shared, &served, call, &sender).await,
            to_volume::Kind::Alive(alive) => {
                served.store.renew();
                served.acknowledge(alive.acknowledged);
                let (Stamp(lost), _) = served.store.missed();
                let answer = Alive { id: alive.id, acknowledged: alive.acknowledged, lost };
                send(&sender, from_volume::Kind::Alive(answer), None).await;
            }
            to_volume::Kind::Cancel(number) => served.cancel(number),
            to_volume::Kind::Bye(_) => {
                end(&shared, &served).await;
                return;
            }
            to_volume::Kind::Hello(_) => break,
        }
    }
    // Another connection may have resumed the session meanwhile.
    if served.is_attached_to(&sender) {
        served.outgoing.send_replace(None);
        end_unless_taken_up(&shared, &served).await;
    }
}

/// Ends a session that no connection resumes for a while. A connection that does, waits in turn
/// when it ends.
pub async fn end_unless_taken_up(shared: &ServiceState, served: &Arc<Served>) {
    let mut outgoing = served.outgoing.subscribe();
    let taken_up =
        tokio::time::timeout(KEEP_TIME, outgoing.wait_for(Option::is_some)).await.is_ok();
    if !taken_up {
        shared.volumes.leave_calls(served);
        end(shared, served).await;
    }
}

/// Sends a connection the recalls that the session may have missed, up to a stamp. Returns true if
/// all were sent: when the next connection says hello (`hello` changes), this one is abandoned.
///
/// Invariant: one session holds at most one step of recalls for that, however many connections say
/// hello and leave their notices untaken.
pub async fn tell_missed(
    served: &Served,
    hello: &mut watch::Receiver<u64>,
    until: Stamp,
    sender: &mpsc::Sender<Outgoing>,
) -> bool {
    let telling = async {
        let mut after = None;
        loop {
            let (notices, next) = served.store.missed_recalls(after, until);
            for notice in notices {
                send(sender, from_volume::Kind::Notice(notice.into()), None).await;
            }
            after = next;
            if after.is_none() {
                break;
            }
        }
        send(sender, from_volume::Kind::Notice(Notice::All { stamp: until }.into()), None).await;
    };
    tokio::select! {
        () = telling => true,
        _ = hello.changed() => false,
    }
}

/// Ends a session when its holder is not admitted any more: checked as often as for runs, and at
/// each call.
pub async fn end_with_rights(shared: Arc<ServiceState>, session: Weak<Served>) {
    loop {
        {
            let Some(served) = session.upgrade() else { return };
            if let Err(Denied(why)) = served.is_admitted(&shared.admission) {
                return end_denied(&shared, &served, &why).await;
            }
        }
        tokio::time::sleep(LOOK_INTERVAL).await;
    }
}

/// Ends a session, and logs the reason.
pub async fn end_denied(shared: &ServiceState, served: &Arc<Served>, why: &str) {
    tracing::info!(
        identity = served.caller.name(),
        volume = served.export.name,
        why,
        "volume taken away"
    );
    end(shared, served).await;
}

/// Ends a session: its calls under way, its open files, its locks and its leases.
pub async fn end(shared: &ServiceState, served: &Arc<Served>) {
    // Tasks that wait for it share it; without a sender the stream ends.
    served.outgoing.send_replace(None);
    served.store.end();
    if shared.volumes.remove(served) {
        served.forget_record();
        let mut under_way: Vec<_> = {
            let calls = served.calls.lock().expect("not poisoned");
            calls.by_number.values().map(|call| (call.task.clone(), call.outcome.clone())).collect()
        };
        under_way.iter().for_each(|(task, _)| task.abort());
        // Their changes are counted once they are gone, which closes their outcomes.
        let gone = async {
            for (_, outcome) in &mut under_way {
                let _ = outcome.wait_for(|_| false).await;
            }
        };
        let _ = tokio::time::timeout(LAST_COUNTS, gone).await;
        let record = served.record();
        tracing::info!(
            volume = record.volume,
            identity = record.identity,
            peer = record.peer,
            calls = record.calls,
            bytes_written = record.bytes_written,
            ms = record.ms,
            "volume closed"
        );
        served.note_end(&shared.audit).await;
        shared.volumes.is_recorded(served);
    }
}

/// Ends other sessions of the same identity. See [`Op::EndSessions`].
async fn end_sessions(
    shared: &Arc<ServiceState>,
    session: &Served,
    names: Vec<Bytes>,
) -> Result<(), Errno> {
    for name in names {
        if let Ok(earlier) = shared.volumes.session(&session.caller, &name) {
            if ptr::eq(&raw const *earlier, session) {
                continue;
            }
            let shared = shared.clone();
            // In a task of its own, since the call may be aborted: each recorded beginning needs
            // its end.
            let ending = tokio::spawn(async move { end(&shared, &earlier).await });
            ending.await.map_err(|_| Errno::EIO)?;
        }
        for at_work in shared.volumes.still_at_work(&session.caller, &name) {
            tokio::time::timeout(LAST_JOBS, at_work.is_quiet()).await.map_err(|_| Errno::EBUSY)?;
        }
        shared.volumes.has_ended(&Fingerprint::of(&name).to_string());
    }
    Ok(())
}

/// Returns true if a call may name these sessions.
fn are_names(names: &[Bytes]) -> bool {
    names.len() <= ENDED_AT_ONCE
        && names.iter().all(|name| (MIN_NAME_BYTES..=MAX_NAME_BYTES).contains(&name.len()))
}

/// Must not wait: behind it come the answers to recalls that others wait for.
async fn begin_call(
    shared: &Arc<ServiceState>,
    served: &Arc<Served>,
    call: Call,
    sender: &mpsc::Sender<Outgoing>,
) {
    let number = call.number;
    let refuse = |errno: Errno| {
        answer(sender, Reply { number, error: errno as i32, ..Reply::default() }, None)
    };
    served.acknowledge(call.acknowledged);
    let bytes = call.encoded_len();
    if bytes > MAX_CALL_BYTES {
        return refuse(Errno::E2BIG).await;
    }
    let caller = served.acting_for(call.caller);
    let op = match call
        .op
        .ok_or(Errno::EPROTO)
        .and_then(|op| Op::try_from(op).map_err(|_| Errno::EPROTO))
    {
        Ok(op) => op,
        Err(errno) => return refuse(errno).await,
    };
    if let Op::Return(_) | Op::Forgotten(_) = op {
        let forgotten = match op {
            Op::Forgotten(lost) => Some(lost),
            _ => None,
        };
        let reply = reply(number, served.store.call(&caller, op).await);
        if forgotten.is_some_and(|lost| lost >= served.store.missed().0) {
            let (shared, name) = (shared.clone(), served.name.clone());
            tokio::task::spawn_blocking(move || shared.volumes.is_back(&name));
        }
        return answer(sender, reply, None).await;
    }
    if matches!(&op, Op::EndSessions(names) if !are_names(names)) {
        return refuse(Errno::E2BIG).await;
    }
    served.store.renew();
    let Some(charge) =
        served.call_bytes.try_take(&served.account, charged_for_call(bytes, &caller, &op))
    else {
        return refuse(Errno::EBUSY).await;
    };
    let (session, shared) = (served.clone(), shared.clone());
    let is_remembered = op.is_change();
    let work = async move {
        // Before the answer is made: else it would take memory while it waits.
        let for_answer = match answer_bytes(&op) {
            0 => None,
            bytes => Some(shared.volumes.answers.take(&session.account, bytes).await),
        };
        let under_way = UnderWay::of(&session, &op);
        let charges = Arc::new((charge, for_answer));
        let answer = match op {
            Op::EndSessions(names) => {
                end_sessions(&shared, &session, names).await.map(|()| Answer::Done)
            }
            op => {
                let calling = HELD.scope(charges.clone(), session.store.call(&caller, op));
                EFFECTS.scope(UnderWay::effects(std::slice::from_ref(&under_way)), calling).await
            }
        };
        under_way.end(answer.is_err());
        CallOutcome::Answered(reply(number, answer), charges)
    };
    match served.once(number, is_remembered, work) {
        Ok(outcome) => served.answer_when_done(number, outcome, sender),
        // Answered already, or the session's end closes this connection: the next session knows it.
        Err(status) if matches!(status.code(), Code::AlreadyExists | Code::NotFound) => {}
        Err(_) => refuse(Errno::EBUSY).await,
    }
}

/// Groups are dropped unless callers' ids are trusted: with a configured user's rights, or this
/// program's own, they have no use.
fn acting_for(caller: WireCaller, trusts_groups: bool) -> FileCaller {
    let WireCaller { uid, gid, groups, is_guest } = caller;
    let groups = if trusts_groups { groups } else { Vec::new() };
    FileCaller { uid, gid, groups: groups.into(), is_guest }
}

/// Memory of a caller's groups.
fn groups_bytes(caller: &FileCaller) -> usize {
    size_of_val(&*caller.groups)
}

/// Charge for a call that had so many bytes on the wire.
fn charged_for_call(bytes: usize, caller: &FileCaller, op: &Op) -> usize {
    bytes + groups_bytes(caller) + names_bytes(op) + CALL_BYTES
}

/// Charge for a call of these writes, besides their contents.
fn charged_for(caller: &FileCaller, writes: &[WireWrite]) -> usize {
    CALL_BYTES + groups_bytes(caller) + bytes_of_writes(writes)
}

/// Memory of writes besides their contents.
fn bytes_of_writes(writes: &[WireWrite]) -> usize {
    let of_names = |write: &WireWrite| match &write.kind {
        Some(write::Kind::Put(put)) => put.path.iter().map(|name| name.len() + NAME_BYTES).sum(),
        _ => 0,
    };
    writes.iter().map(|write| ENTRY_BYTES + of_names(write)).sum()
}

/// Memory of a call's names besides its own bytes.
fn names_bytes(op: &Op) -> usize {
    match op {
        Op::Walk { names, .. } => names.len() * NAME_BYTES,
        Op::CreateWhole { put, .. } => put.path.len() * NAME_BYTES,
        _ => 0,
    }
}

/// Size of the answer, if it is more than an ordinary one's.
fn answer_bytes(op: &Op) -> usize {
    match op {
        Op::List { limit, .. } => (*limit).clamp(1, MAX_NAMES) as usize * LISTED_BYTES,
        Op::Walk { names, .. } if names.len() * ENTRY_BYTES > CALL_BYTES => {
            names.len() * ENTRY_BYTES
        }
        Op::GetAttribute { .. } | Op::ListAttributes(_) => ATTRIBUTE_BYTES,
        _ => 0,
    }
}

fn too_many() -> Status {
    Status::resource_exhausted(
        "too many calls of volumes at a time, or answers that nobody has acknowledged",
    )
}

fn reply(number: u64, answer: Result<posh_volume::store::Answer, Errno>) -> Reply {
    match answer {
        Ok(answer) => Reply { number, answer: Some(answer.into()), ..Reply::default() },
        Err(errno) => Reply { number, error: errno as i32, ..Reply::default() },
    }
}

async fn answer(sender: &mpsc::Sender<Outgoing>, reply: Reply, charges: Option<Charges>) {
    send(sender, from_volume::Kind::Reply(reply), charges).await;
}

/// Sends a message; returns false if the connection is gone.
pub async fn send(
    sender: &mpsc::Sender<Outgoing>,
    kind: from_volume::Kind,
    charges: Option<Charges>,
) -> bool {
    let message = FromVolume { kind: Some(kind) };
    sender.send(Outgoing { message, charge: charges }).await.is_ok()
}

/// `None`: the call was aborted.
async fn outcome_of(mut outcome: watch::Receiver<Option<CallOutcome>>) -> Option<CallOutcome> {
    let done = outcome.wait_for(Option::is_some).await.ok()?;
    done.clone()
}

fn written(result: Result<posh_volume::store::Entry, Errno>) -> Written {
    match result {
        Ok(entry) => Written { entry: Some(entry.into()), error: 0 },
        Err(errno) => Written { entry: None, error: errno as i32 },
    }
}

/// Bytes of a write's contents.
pub fn size_of(write: &Write) -> usize {
    match write {
        Write::At { data, .. } | Write::Append { data, .. } => data.len(),
        Write::Put(put) => match &put.what {
            NewFile::Regular { data } => data.len(),
            _ => 0,
        },
        Write::Set { .. } => 0,
    }
}

#[cfg(test)]
mod tests {
    use posh_proto::volume::Put;

    use super::*;

    #[test]
    fn groups_of_callers_are_charged_where_they_count_and_dropped_where_not() {
        let wanted = || WireCaller { uid: 1, gid: 2, groups: vec![5; 65_536], is_guest: false };
        assert_eq!(groups_bytes(&acting_for(wanted(), true)), 256 << 10);
        assert_eq!(groups_bytes(&acting_for(wanted(), false)), 0);
        let taken = |groups: usize| {
            charged_for(&acting_for(WireCaller { groups: vec![5; groups], ..wanted() }, true), &[])
        };
        assert_eq!(taken(65_536) - taken(0), 256 << 10);
        let of_call = |groups: usize| {
            let caller = acting_for(WireCaller { groups: vec![5; groups], ..wanted() }, true);
            charged_for_call(100, &caller, &Op::FileSystem)
        };
        assert_eq!(of_call(65_536) - of_call(0), 256 << 10);
        assert_eq!(of_call(0), 100 + CALL_BYTES);
    }

    #[test]
    fn names_of_writes_are_charged() {
        let put = |names: usize| WireWrite {
            kind: Some(write::Kind::Put(Put { path: vec!["d".into(); names], ..Put::default() })),
        };
        assert_eq!(bytes_of_writes(&[]), 0);
        assert!(bytes_of_writes(&vec![put(2048); 63]) > 12_000_000);
        assert!(bytes_of_writes(&vec![put(2); 1000]) < 1 << 20);
    }
}
