//! Serves files to mounts of workstations (`volume.proto`): admission of sessions, and the three
//! calls. `session` implements a session, `beside` its coherence with runs, `records` its traces
//! after a restart; the crate `posh-volume` implements files and leases.

mod beside;
mod left_calls;
mod looks;
mod records;
mod session;
mod shown;

use std::{
    collections::{HashMap, hash_map::Entry},
    io,
    path::{Path, PathBuf},
    pin::Pin,
    ptr,
    sync::{Arc, Mutex, Weak},
    task::Poll,
    time::Duration,
};

use bytes::Bytes;
use nix::unistd::geteuid;
use posh_proto::{
    PROTOCOL_VERSION, other_version,
    volume::{
        FromVolume, Hello, Piece, ReadReply, ReadRequest, ToVolume, Welcome, WriteReply,
        WriteRequest, from_volume, to_volume, volume_server::Volume,
    },
};
use posh_volume::{
    Store as _,
    directory::{
        Account, Directory, DirectorySession, HELD, Liveness, Machine, Mutability, Pool, PoolUsage,
        READ_BYTES, Rights, Rivals, WeakSession, WriteRoom,
    },
    keeper::Keeper,
    leases::{GRACE_TIME, Overlap},
    store::{Caller as FileCaller, Pieces, ReadPart, Stamp},
    wire,
};
use prost::Message as _;
use tokio::sync::mpsc;
use tokio_stream::{Stream, StreamExt as _, wrappers::ReceiverStream};
use tonic::{Request, Response, Status, Streaming};

use self::left_calls::{LeftCalls, Whose};
use self::records::{FormerRecords, NotRecorded, Records};
use self::session::{Charges, KnownCalls, Outgoing, Served, SessionOwner};
pub use self::{
    beside::{Beside, trees_of},
    looks::end_replaced,
    shown::ShownVolumes,
};
use crate::{
    Export,
    accept::Peer,
    admission::{Denied, peer_name},
    callers::{Caller, caller_of},
    classifier::Turns,
    machine,
    metered::{Arrived, kept_until_sent},
    own_mounts,
    service::ServiceState,
    tls::serving::Proof,
};

/// Sessions in all, and of one identity: a workstation has one for each of its mounts.
const MAX_SESSIONS: usize = 512;
const MAX_SESSIONS_OF_ONE: usize = 128;
/// Interval in which the space of removed files is freed.
const CLOSE_REMOVED_INTERVAL: Duration = Duration::from_secs(1);
/// Length of a session's name, which must be hard to guess.
const MIN_NAME_BYTES: usize = 16;
const MAX_NAME_BYTES: usize = 64;
/// Time in which a new connection must send its hello.
const HELLO_TIMEOUT: Duration = Duration::from_secs(10);
/// Memory of a decoded request of many small parts, as a multiple of its encoded bytes.
const DECODED_FACTOR: usize = 4;
/// Queued messages; a listing may be a megabyte.
const OUTGOING: usize = 256;
/// Pieces of small files are sent together up to this size.
const REPLY_BYTES: usize = 256 << 10;
/// Queued replies.
const REPLIES: usize = 1;
/// Bytes of untaken answers, of all and of one identity: with all its other buffers an executor
/// stays below 256 MiB.
const ANSWER_BYTES: usize = 112 << 20;
const ANSWER_BYTES_OF_ONE: usize = 48 << 20;
/// Bytes of running or remembered calls, of all and of one identity.
const CALL_BYTES: usize = 32 << 20;
const CALL_BYTES_OF_ONE: usize = 12 << 20;
/// Contents of running writes, and of those that wait for others' leases, of all and of one
/// identity.
const WRITE_BYTES: usize = 48 << 20;
const WRITE_BYTES_OF_ONE: usize = 24 << 20;
/// Memory of a part of a read besides its bytes.
const PART_BYTES: usize = 512;
/// Most memory of one read in this process: in the store, one reply being made and queued ones, of
/// up to twice their size.
const MAX_READ_BYTES: usize = READ_BYTES + (1 + REPLIES) * 2 * REPLY_BYTES;

/// Reason of a session's end, for the log.
const REPLACED: &str = "another directory is at the export's path";

/// All sessions, and what they share.
#[derive(Debug)]
pub struct Volumes {
    /// Started for the first session: most executors have none. Owned by the sessions' directories:
    /// with the last one, watching other programs' changes, which slows these down, stops.
    machine: Mutex<Weak<Machine>>,
    /// The leases of each machine in turn, with the penalties of holders that did not return
    /// theirs.
    keeper: Arc<Keeper>,
    /// Records for the next process. `None`: there is no next one. An error: the reason for
    /// refusing sessions.
    records: Option<Result<Records, NotRecorded>>,
    /// Active identities, with volumes and with runs.
    rivals: Arc<Rivals>,
    /// Those that all sessions may have open.
    descriptors: usize,
    directories: Mutex<Vec<OpenDirectory>>,
    /// Looks at the paths of directories in use.
    looks: looks::Looks,
    sessions: Mutex<HashMap<Bytes, Arc<Served>>>,
    /// Sessions that have ended while a system call of theirs may still run: that keeps them.
    at_work: Mutex<Vec<AtWork>>,
    /// Ended sessions whose ends are not recorded yet.
    ending: Mutex<Vec<Arc<Served>>>,
    /// Calls of sessions that were not resumed in time, oldest first, for later sessions.
    left_calls: Mutex<LeftCalls<KnownCalls>>,
    /// Turns of identities to add a session.
    openings: Turns,
    /// Bytes of untaken reads and listings. Further requests wait.
    answers: Arc<Pool>,
    /// Bytes of running calls, and of remembered answers. Separate from `answers`, since a read may
    /// wait for a call.
    calls: Arc<Pool>,
    /// Contents of running writes. Further writes wait.
    writes: Arc<Pool>,
    /// Contents of writes that wait for others' leases; see [`posh_volume::directory::WriteRoom`].
    waiting_writes: Arc<Pool>,
}

impl Volumes {
    /// Without sessions, with `rivals` shared with other work. `state`: the directory for records
    /// of sessions, in which those of earlier processes are found. If it can't be used there are no
    /// sessions. `descriptors`: those that all sessions may have open.
    pub fn beside(rivals: Arc<Rivals>, state: Option<&Path>, descriptors: usize) -> Self {
        let (records, left) = match state.map(Records::open) {
            Some(Ok((records, left))) => (Some(Ok(records)), left),
            Some(Err(error)) => {
                tracing::warn!("no volumes are served: {error}");
                (Some(Err(error)), FormerRecords::default())
            }
            None => (None, FormerRecords::default()),
        };
        let keeper = Keeper::after(left.former.iter().cloned());
        keeper.table().compare_by(Overlap(own_mounts::have_files_in_common));
        if !left.former.is_empty() {
            tracing::info!(
                sessions = left.former.len(),
                "volumes of an earlier executor: changes wait until these are back"
            );
        }
        if !left.is_empty() {
            tokio::spawn(left.remove_after(GRACE_TIME));
        }
        Self {
            machine: Mutex::default(),
            keeper: Arc::new(keeper),
            records,
            rivals,
            descriptors,
            directories: Mutex::default(),
            looks: looks::Looks::default(),
            sessions: Mutex::default(),
            at_work: Mutex::default(),
            ending: Mutex::default(),
            left_calls: Mutex::default(),
            openings: Turns::new(1),
            answers: Pool::new(ANSWER_BYTES, ANSWER_BYTES_OF_ONE),
            calls: Pool::new(CALL_BYTES, CALL_BYTES_OF_ONE),
            writes: Pool::new(WRITE_BYTES, WRITE_BYTES_OF_ONE),
            waiting_writes: Pool::new(WRITE_BYTES, WRITE_BYTES_OF_ONE),
        }
    }
}

/// A session that has ended.
#[derive(Debug)]
struct AtWork {
    identity: Option<String>,
    name: Bytes,
    store: WeakSession,
}

#[derive(Debug)]
struct OpenDirectory {
    path: PathBuf,
    rights: Rights,
    mutability: Mutability,
    /// Locked while it is opened.
    directory: Arc<Mutex<Weak<Directory>>>,
}

/// Answers, as a connection takes them.
type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// The peer of a connection.
#[derive(Debug, Clone)]
pub struct ConnectionOrigin {
    /// For the log.
    pub name: String,
    /// Proof by which it is admitted.
    pub proof: Proof,
}

/// The gRPC service.
pub struct VolumeService(pub Arc<ServiceState>);

#[tonic::async_trait]
impl Volume for VolumeService {
    type SessionStream = Answers<FromVolume>;
    type ReadStream = Answers<ReadReply>;

    async fn session(
        &self,
        request: Request<Streaming<ToVolume>>,
    ) -> Result<Response<Self::SessionStream>, Status> {
        let caller = caller_of(&request)?;
        let peer = ConnectionOrigin::of(request.extensions().get());
        self.0
            .load
            .admit_call(&caller)
            .map_err(|refusal| Status::resource_exhausted(refusal.message))?;
        let mut incoming = request.into_inner();
        let hello = tokio::time::timeout(HELLO_TIMEOUT, incoming.message()).await;
        let hello = hello
            .map_err(|_| Status::deadline_exceeded("no hello"))??
            .and_then(|message| message.kind);
        let Some(to_volume::Kind::Hello(hello)) = hello else {
            return Err(Status::invalid_argument("a session begins with a hello"));
        };
        let caller = self.standing(caller, &peer)?;
        let (served, resumed) = self.session_of(&caller, &peer, &hello).await?;
        let resumes = Stamp(hello.resumes);
        drop(hello);
        let (sender, receiver) = mpsc::channel(OUTGOING);
        served.store.renew();
        let mut hello = served.begin_hello();
        let (Stamp(lost), until) = served.store.missed();
        let welcome = Welcome {
            root: Some(served.store.root().into()),
            resumed,
            watched: wire::watched_number(served.store.state().watched),
            lost,
            read_only: served.export.read_only,
            opened: served.store.opened().0,
            knows_calls: !resumed && served.knows_calls_of(resumes),
            machine: machine::identity(),
        };
        let shared = self.0.clone();
        tokio::spawn(async move {
            // The connection takes nothing of it before the call is answered.
            session::send(&sender, from_volume::Kind::Welcome(welcome), None).await;
            if session::tell_missed(&served, &mut hello, until, &sender).await {
                served.attach(sender.clone(), peer.proof);
                session::attend(shared, served, incoming, hello, sender).await;
            }
        });
        // An answer's charge is returned when the connection asks for the next one: until then
        // HTTP/2 holds the answer, for as long as the client leaves its window closed.
        let mut untaken: Option<Charges> = None;
        let messages = ReceiverStream::new(receiver).map(move |Outgoing { message, charge }| {
            drop(std::mem::replace(&mut untaken, charge));
            Ok(message)
        });
        Ok(Response::new(Box::pin(messages)))
    }

    async fn read(
        &self,
        request: Request<ReadRequest>,
    ) -> Result<Response<Self::ReadStream>, Status> {
        let caller =
            self.standing(caller_of(&request)?, &ConnectionOrigin::of(request.extensions().get()))?;
        let arrived = request.extensions().get::<Arrived>().cloned().unwrap_or_default();
        let request = request.into_inner();
        let request_bytes = arrived.holds(request.encoded_len()) * DECODED_FACTOR;
        let ReadRequest { session, caller: file_caller, parts } = request;
        let served = self.admitted(&caller, &session).await?;
        // Held until the call ends.
        let Some(waits) = served.call_bytes.try_take(&served.account, request_bytes) else {
            return Err(Status::resource_exhausted(
                "too many reads of this identity wait for their turn",
            ));
        };
        drop((session, arrived));
        let parts: Vec<ReadPart> = parts
            .into_iter()
            .map(TryInto::try_into)
            .collect::<Result<_, _>>()
            .map_err(malformed)?;
        let file_caller = served.acting_for(file_caller);
        let charge = self.0.volumes.answers.take(&served.account, bytes_of(&parts)).await;
        let pieces = HELD.scope(Arc::new(waits), served.store.read(&file_caller, parts)).await;
        let (sender, receiver) = mpsc::channel(REPLIES);
        tokio::spawn(async move {
            tokio::select! {
                () = pack(pieces, sender) => {}
                () = served.store.ended() => {}
            }
        });
        // Held with the stream: until its end the client may leave all of it untaken.
        let replies = ReceiverStream::new(receiver).map(move |reply| {
            let _charged = &charge;
            reply
        });
        Ok(Response::new(Box::pin(replies)))
    }

    async fn write(&self, request: Request<WriteRequest>) -> Result<Response<WriteReply>, Status> {
        let caller =
            self.standing(caller_of(&request)?, &ConnectionOrigin::of(request.extensions().get()))?;
        let arrived = request.extensions().get::<Arrived>().cloned().unwrap_or_default();
        let WriteRequest { session, number, caller: file_caller, writes, acknowledged } =
            request.into_inner();
        let served = self.admitted(&caller, &session).await?;
        drop(session);
        served.acknowledge(acknowledged);
        let file_caller = served.acting_for(file_caller);
        // Before any wait.
        let calls = served.charge_writes(&file_caller, &writes)?;
        let writes: Vec<_> = writes
            .into_iter()
            .map(TryInto::try_into)
            .collect::<Result<_, _>>()
            .map_err(malformed)?;
        let volumes = &self.0.volumes;
        // The contents share the memory of the whole message.
        let bytes = arrived.holds(writes.iter().map(session::size_of).sum());
        let charge = volumes.writes.take(&served.account, bytes).await;
        drop(arrived);
        let room = WriteRoom { charge, waiting: volumes.waiting_writes.clone(), bytes };
        let (reply, charge) = served.write(number, file_caller, writes, calls, room).await?;
        Ok(kept_until_sent(Response::new(reply), charge))
    }
}

impl ConnectionOrigin {
    fn of(peer: Option<&Peer>) -> Self {
        Self {
            name: peer_name(peer),
            proof: peer.map_or(Proof::Nothing, |peer| peer.proof.clone()),
        }
    }
}

impl VolumeService {
    /// The caller with its current rights, since a call's headers may have come long before its
    /// message.
    fn standing(
        &self,
        caller: Arc<Caller>,
        peer: &ConnectionOrigin,
    ) -> Result<Arc<Caller>, Status> {
        match self.0.admission.admitted(&peer.proof) {
            Ok(now) => Ok(now.unwrap_or(caller)),
            Err(Denied(why)) => Err(Status::unauthenticated(why)),
        }
    }

    /// The session of that name, if its caller may still have it.
    async fn admitted(&self, caller: &Caller, name: &Bytes) -> Result<Arc<Served>, Status> {
        let served = self.0.volumes.session(caller, name)?;
        if served.is_within(caller) {
            return Ok(served);
        }
        session::end(&self.0, &served).await;
        Err(Status::not_found("this session has ended: the executor's configuration has changed"))
    }

    /// The session of that name, or a new one.
    async fn session_of(
        &self,
        caller: &Arc<Caller>,
        peer: &ConnectionOrigin,
        hello: &Hello,
    ) -> Result<(Arc<Served>, bool), Status> {
        if hello.protocol != PROTOCOL_VERSION {
            return Err(Status::failed_precondition(other_version(
                "the gateway",
                hello.protocol,
                "this executor",
            )));
        }
        if !(MIN_NAME_BYTES..=MAX_NAME_BYTES).contains(&hello.session.len()) {
            return Err(Status::invalid_argument("a session's name has 16 to 64 bytes"));
        }
        let volumes = &self.0.volumes;
        if !caller.volumes {
            let why = format!(
                "{} may not have volumes on this executor (`volumes = false`)",
                caller.name()
            );
            return Err(Status::permission_denied(why));
        }
        if let Ok(served) = self.admitted(caller, &hello.session).await {
            if served.export.name == hello.export {
                let resumes = served.store.opened() == Stamp(hello.resumes);
                return Ok((served, resumes));
            }
            return Err(Status::invalid_argument("that session is of another export"));
        }
        if self.0.is_draining() {
            return Err(Status::unavailable("this executor is ending"));
        }
        let export = caller.exports.iter().find(|export| export.name == hello.export).cloned();
        let export = export.ok_or_else(|| no_export(caller, &hello.export))?;
        let rights = rights_of(caller);
        let shared = self.0.clone();
        let opened = tokio::task::spawn_blocking({
            let export = export.clone();
            move || shared.volumes.directory(&export, rights)
        });
        let directory = opened.await.map_err(|error| Status::internal(error.to_string()))?;
        let directory = directory.map_err(|error| {
            Status::failed_precondition(format!("cannot serve the export {}: {error}", export.name))
        })?;
        // If the directory was replaced, its sessions must not read on while others see the new
        // one.
        end_all(&self.0, volumes.sessions_of(&export.path, |its| !its.is_same(&directory)));
        let account = volumes.account(caller);
        let store = DirectorySession::open_for(account.clone(), directory, Liveness::Served);
        if hello.tell_acls {
            store.tell_acls();
        }
        let (session, calls) = (kept(&hello.session), volumes.calls.clone());
        let trusts_groups = rights_of(caller) == Rights::Callers;
        let left = volumes.take_calls(caller, &session, &export.name);
        let has_left = left.is_some();
        let (caller, origin) = (caller.clone(), peer.clone());
        let whose = SessionOwner { caller, origin, export, account, trusts_groups };
        let served = Served::new(&session, whose, store, calls);
        if let Some(left) = left {
            served.take_over(left);
        }
        // In a task of its own, since the call may be reset meanwhile: each recorded beginning
        // needs its end.
        let (shared, its) = (self.0.clone(), served.clone());
        let beginning = async move {
            let begun = begin(shared.clone(), session.clone(), its.clone()).await;
            if begun.is_err() && has_left {
                // It did not begin: the next attempt finds them again.
                shared.volumes.leave_calls_as(session, &its);
            }
            begun
        };
        tokio::spawn(beginning).await.map_err(|error| Status::internal(error.to_string()))??;
        Ok((served, false))
    }
}

/// Records that a session begins, and adds it to the table.
async fn begin(shared: Arc<ServiceState>, name: Bytes, served: Arc<Served>) -> Result<(), Status> {
    // One after the other, so that a session without room is not recorded.
    let _turn = shared.volumes.openings.share_of(&served.caller).acquire_owned().await;
    shared.volumes.require_room(&served)?;
    match &shared.volumes.records {
        Some(Ok(records)) => {
            served.note_in(records).map_err(|error| Status::unavailable(error.to_string()))?
        }
        Some(Err(error)) => return Err(Status::unavailable(error.to_string())),
        None => {}
    }
    if let Err(refusal) = served.begin(&shared.audit).await {
        served.forget_record();
        return Err(Status::unavailable(refusal.message));
    }
    if let Err(refused) = shared.volumes.add(name, served.clone()) {
        served.note_end(&shared.audit).await;
        served.forget_record();
        return Err(refused);
    }
    served.clone().start_notices();
    let (identity, peer, export) = (served.caller.name(), &served.peer, &served.export.name);
    tracing::info!(identity, peer, export, "volume opened");
    tokio::spawn(session::end_with_rights(shared.clone(), Arc::downgrade(&served)));
    // The call that asked for it may be gone.
    tokio::spawn(async move { session::end_unless_taken_up(&shared, &served).await });
    Ok(())
}

/// Ends sessions whose directory was replaced, each without waiting for another's last calls. Their
/// files are closed in their own accounts' lanes ([`DirectorySession::end`]), whoever ends them.
fn end_all(shared: &Arc<ServiceState>, sessions: Vec<Arc<Served>>) {
    for served in sessions {
        let shared = shared.clone();
        tokio::spawn(async move { session::end_denied(&shared, &served, REPLACED).await });
    }
}

impl Volumes {
    /// The sessions of an export at `path` whose directory is one of these.
    fn sessions_of(&self, path: &Path, is_meant: impl Fn(&Directory) -> bool) -> Vec<Arc<Served>> {
        let sessions = self.sessions.lock().expect("not poisoned");
        let meant = sessions
            .values()
            .filter(|its| its.export.path == path && is_meant(its.store.directory()));
        meant.cloned().collect()
    }

    /// Records the end of all sessions that are left, or are just ending, when the executor ends.
    pub async fn note_ends(&self, audit: &crate::audit::AuditLog) {
        let left: Vec<Arc<Served>> = {
            let sessions = self.sessions.lock().expect("not poisoned");
            let ending = self.ending.lock().expect("not poisoned");
            sessions.values().chain(&*ending).cloned().collect()
        };
        for served in left {
            served.note_end(audit).await;
        }
    }

    /// The directories in use by sessions, each once, with the paths at which they were opened.
    fn directories_in_use(&self) -> Vec<(PathBuf, Arc<Directory>)> {
        let sessions = self.sessions.lock().expect("not poisoned");
        let mut found: Vec<(PathBuf, Arc<Directory>)> = Vec::new();
        for served in sessions.values() {
            let (path, directory) = (&served.export.path, served.store.directory());
            if !found.iter().any(|(known, its)| known == path && its.is_same(directory)) {
                found.push((path.clone(), directory.clone()));
            }
        }
        found
    }

    /// A session of this caller.
    fn session(&self, caller: &Caller, name: &Bytes) -> Result<Arc<Served>, Status> {
        let sessions = self.sessions.lock().expect("not poisoned");
        let found = sessions.get(name).filter(|served| served.caller.identity == caller.identity);
        found.cloned().ok_or_else(|| Status::not_found("no such session of a volume"))
    }

    fn require_room(&self, served: &Served) -> Result<(), Status> {
        require_room_in(&self.sessions.lock().expect("not poisoned"), served)
    }

    fn add(&self, name: Bytes, served: Arc<Served>) -> Result<(), Status> {
        let mut sessions = self.sessions.lock().expect("not poisoned");
        require_room_in(&sessions, &served)?;
        match sessions.entry(name) {
            // Only sessions in the table are counted, recorded and ended.
            Entry::Occupied(_) => {
                Err(Status::aborted("that session is being opened by another call"))
            }
            Entry::Vacant(place) => {
                place.insert(served);
                Ok(())
            }
        }
    }

    /// The account that the sessions of that caller share.
    fn account(&self, caller: &Caller) -> Arc<Account> {
        let sessions = self.sessions.lock().expect("not poisoned");
        let known = sessions.values().find(|served| served.caller.identity == caller.identity);
        known.map_or_else(
            || Account::named(caller.identity.as_deref().unwrap_or_default()),
            |its| its.account.clone(),
        )
    }

    /// Notes that the holder of sessions of that name has ended.
    fn has_ended(&self, name: &str) {
        self.keeper.has_ended(name);
        self.is_back(name);
    }

    /// Notes that the holder of the session of that name relies on no earlier state.
    fn is_back(&self, name: &str) {
        if let Some(Ok(records)) = &self.records {
            records.is_back(name);
        }
    }

    /// Removes a session from the table, if it is still that one.
    fn remove(&self, served: &Arc<Served>) -> bool {
        let mut sessions = self.sessions.lock().expect("not poisoned");
        let found = sessions
            .iter()
            .find(|(_, other)| Arc::ptr_eq(other, served))
            .map(|(name, _)| name.clone());
        let Some(name) = found else { return false };
        // Under both locks: a session is always in one of the two.
        let mut at_work = self.at_work.lock().expect("not poisoned");
        at_work.retain(|ended| ended.store.upgrade().is_some());
        let (identity, store) = (served.caller.identity.clone(), served.store.downgrade());
        at_work.push(AtWork { identity, name: name.clone(), store });
        self.ending.lock().expect("not poisoned").push(served.clone());
        sessions.remove(&name);
        true
    }

    /// Notes that the end of a removed session is recorded.
    fn is_recorded(&self, served: &Arc<Served>) {
        self.ending.lock().expect("not poisoned").retain(|other| !Arc::ptr_eq(other, served));
    }

    /// Keeps the calls of a session that is about to end, since it was not resumed.
    fn leave_calls(&self, served: &Served) {
        let name = {
            let sessions = self.sessions.lock().expect("not poisoned");
            let found = sessions.iter().find(|(_, other)| ptr::eq(&raw const ***other, served));
            let Some((name, _)) = found else { return };
            name.clone()
        };
        self.leave_calls_as(name, served);
    }

    /// Keeps a session's calls for the next one of that name.
    fn leave_calls_as(&self, name: Bytes, served: &Served) {
        let Some(calls) = served.leave_calls() else { return };
        let whose = Whose {
            identity: served.caller.identity.clone(),
            name,
            export: served.export.name.clone(),
        };
        let bytes = calls.bytes();
        self.left_calls.lock().expect("not poisoned").add(whose, calls, bytes);
    }

    /// Takes the calls of an earlier session of that name.
    fn take_calls(&self, caller: &Caller, name: &Bytes, export: &str) -> Option<KnownCalls> {
        let whose = Whose {
            identity: caller.identity.clone(),
            name: name.clone(),
            export: export.to_owned(),
        };
        self.left_calls.lock().expect("not poisoned").take(&whose)
    }

    /// Ended sessions of that name with system calls that may still run.
    fn still_at_work(&self, caller: &Caller, name: &Bytes) -> Vec<DirectorySession> {
        let at_work = self.at_work.lock().expect("not poisoned");
        let meant =
            at_work.iter().filter(|ended| ended.identity == caller.identity && ended.name == *name);
        meant.filter_map(|ended| ended.store.upgrade()).collect()
    }

    /// State shared by sessions, if there are some.
    #[cfg(test)]
    fn machine_in_use(&self) -> Option<Arc<Machine>> {
        self.machine.lock().expect("not poisoned").upgrade()
    }

    /// The export's directory, opened once for each kind of rights, and again once its path names
    /// another one. May block.
    fn directory(&self, export: &Export, rights: Rights) -> io::Result<Arc<Directory>> {
        let machine = {
            let mut machine = self.machine.lock().expect("not poisoned");
            match machine.upgrade() {
                Some(machine) => machine,
                None => {
                    let started = Machine::start_with(
                        self.keeper.clone(),
                        self.rivals.clone(),
                        self.descriptors,
                    )?;
                    *machine = Arc::downgrade(&started);
                    started
                }
            }
        };
        let mutability =
            if export.read_only { Mutability::ReadOnly } else { Mutability::ReadWrite };
        let place = {
            let mut directories = self.directories.lock().expect("not poisoned");
            // A task that opens a directory shares its entry.
            directories.retain(|known| {
                let is_open = |directory: &Weak<Directory>| directory.strong_count() > 0;
                Arc::strong_count(&known.directory) > 1
                    || known.directory.lock().is_ok_and(|known| is_open(&known))
            });
            let is_it = |known: &&OpenDirectory| {
                (&known.path, &known.rights, known.mutability)
                    == (&export.path, &rights, mutability)
            };
            match directories.iter().find(is_it) {
                Some(known) => known.directory.clone(),
                None => {
                    let (path, directory) =
                        (export.path.clone(), Arc::new(Mutex::new(Weak::new())));
                    let its_rights = rights.clone();
                    let known = OpenDirectory {
                        path,
                        rights: its_rights,
                        mutability,
                        directory: directory.clone(),
                    };
                    directories.push(known);
                    directory
                }
            }
        };
        // A file system that hangs blocks only those that ask for it.
        let mut known = place.lock().expect("not poisoned");
        if let Some(directory) = known.upgrade()
            && directory.is_at(&export.path)
        {
            return Ok(directory);
        }
        let directory = Directory::open(machine, &export.path, rights, mutability)?;
        *known = Arc::downgrade(&directory);
        tokio::spawn(close_removed(Arc::downgrade(&directory)));
        Ok(directory)
    }
}

/// Closes descriptors of files that programs of the server have removed, as long as sessions use
/// the directory.
async fn close_removed(directory: Weak<Directory>) {
    loop {
        tokio::time::sleep(CLOSE_REMOVED_INTERVAL).await;
        let Some(directory) = directory.upgrade() else { return };
        // A file system that hangs blocks this task alone.
        let _ = tokio::task::spawn_blocking(move || directory.close_removed()).await;
    }
}

fn require_room_in(sessions: &HashMap<Bytes, Arc<Served>>, served: &Served) -> Result<(), Status> {
    let own =
        sessions.values().filter(|other| other.caller.identity == served.caller.identity).count();
    let usage = PoolUsage { own, used: sessions.len(), limit: MAX_SESSIONS };
    if own < MAX_SESSIONS_OF_ONE && usage.may_take(1) {
        return Ok(());
    }
    Err(Status::resource_exhausted("too many sessions of volumes on this executor"))
}

/// Rights with which a caller's files are accessed. Only root can take others' rights.
fn rights_of(caller: &Caller) -> Rights {
    if !geteuid().is_root() {
        return Rights::Own;
    }
    match &caller.user {
        _ if caller.trust_caller_ids => Rights::Callers,
        Some(user) => Rights::User(FileCaller {
            uid: user.uid,
            gid: user.gid,
            groups: user.groups.clone().into(),
            is_guest: false,
        }),
        None => Rights::Own,
    }
}

fn no_export(caller: &Caller, export: &str) -> Status {
    if let Some(why) = caller.why_unserved(export) {
        return Status::failed_precondition(why);
    }
    Status::permission_denied(format!(
        "{} has no export `{export}` on this executor (`[[export]]`, and `exports` of its \
         [[identity]])",
        caller.name()
    ))
}

/// Copies a name that outlives its call, so that it does not keep its message's memory.
fn kept(name: &Bytes) -> Bytes {
    Bytes::copy_from_slice(name)
}

fn malformed(malformed: wire::Malformed) -> Status {
    Status::invalid_argument(malformed.to_string())
}

/// Memory of a read's untaken data in this process.
fn bytes_of(parts: &[ReadPart]) -> usize {
    let of = |part: &ReadPart| {
        part.range.end.saturating_sub(part.range.start).saturating_add(PART_BYTES as u64)
    };
    let bytes = parts.iter().map(of).fold(0, u64::saturating_add);
    usize::try_from(bytes).unwrap_or(usize::MAX).min(MAX_READ_BYTES)
}

/// Sends pieces together as long as they are ready at once.
async fn pack(mut pieces: Pieces, sender: mpsc::Sender<Result<ReadReply, Status>>) {
    while let Some(first) = pieces.next().await {
        let mut reply = ReadReply { pieces: Vec::new() };
        let mut next = Some(first);
        let mut bytes = 0;
        while let Some(piece) = next.take() {
            match piece {
                Ok(piece) => {
                    let piece = Piece::from(piece);
                    bytes += piece.data.len();
                    reply.pieces.push(piece);
                }
                Err(errno) => {
                    let _ = sender.send(Err(Status::internal(errno.desc()))).await;
                    return;
                }
            }
            if bytes < REPLY_BYTES {
                next = std::future::poll_fn(|context| {
                    Poll::Ready(match pieces.as_mut().poll_next(context) {
                        Poll::Ready(piece) => piece,
                        Poll::Pending => None,
                    })
                })
                .await;
            }
        }
        if sender.send(Ok(reply)).await.is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_volume_acts_as_its_callers_user_whatever_ids_are_claimed() {
        if !geteuid().is_root() {
            return;
        }
        let anybody = Caller::anybody(&crate::Config::new(Vec::new()));
        let user = crate::identity::UnixUser::named("nobody").unwrap();
        let uid = user.uid;
        let mapped = Caller { user: Some(user), trust_caller_ids: false, ..anybody };
        assert!(matches!(rights_of(&mapped), Rights::User(user) if user.uid == uid));
        assert_eq!(rights_of(&Caller { trust_caller_ids: true, ..mapped }), Rights::Callers);
    }

    #[test]
    fn names_that_are_kept_do_not_keep_their_messages() {
        let message = Bytes::from(vec![7; 1 << 20]);
        let name = message.slice(..16);
        let kept = kept(&name);
        drop(name);
        assert!(message.is_unique() && kept == message[..16]);
    }

    #[tokio::test]
    async fn a_run_waits_for_those_who_had_leases_though_nobody_has_a_volume_yet() {
        let state = tempfile::tempdir().unwrap();
        let former = Volumes::beside(Arc::default(), Some(state.path()), 1024);
        let _stays = former
            .records
            .as_ref()
            .unwrap()
            .as_ref()
            .unwrap()
            .note("ada", Path::new("/srv/a"))
            .unwrap();
        drop(former);
        let volumes = Volumes::beside(Arc::default(), Some(state.path()), 1024);
        let caller = Caller::anybody(&crate::Config::new(Vec::new()));
        let begins = async |tree: &str| {
            let trees = [tree.into()];
            let begun = volumes.begin_run(&caller, Vec::new(), &trees);
            tokio::time::timeout(Duration::from_secs(2), begun).await.is_ok()
        };
        assert!(begins("/srv/b").await && !begins("/srv").await && !begins("/srv/a/b").await);
        volumes.has_ended("ada");
        assert!(begins("/srv").await);
    }

    #[tokio::test]
    async fn penalties_of_leases_do_not_end_with_the_last_session() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().canonicalize().unwrap();
        let export = Export::named("a".to_owned(), path, false);
        let volumes = Volumes::beside(Arc::default(), None, 1024);
        let opened = volumes.directory(&export, Rights::Own).unwrap();
        let keeper = volumes.machine_in_use().unwrap().keeper.clone();
        drop(opened);
        assert!(volumes.machine_in_use().is_none());
        let _opened = volumes.directory(&export, Rights::Own).unwrap();
        assert!(Arc::ptr_eq(&keeper, &volumes.machine_in_use().unwrap().keeper));
    }
}
