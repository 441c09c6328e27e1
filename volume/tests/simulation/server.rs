//! The server's side: the executor's process, which can be killed and started anew, over a
//! directory that outlives it. Each session carries each numbered request out once, however often
//! it arrives.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use posh_volume::{
    Errno, Store,
    directory::{Account, Directory, DirectorySession, Liveness, Machine, Mutability, Rights},
    keeper::Keeper,
    leases::Former,
    store::*,
};
use tokio::{
    task::AbortHandle,
    time::{Instant, sleep},
};
use tokio_stream::StreamExt as _;

use crate::shared::Shared;

/// A session ends when its client has been away for so long.
pub const SESSION_TIME: Duration = Duration::from_secs(30);

/// Deliberate bug, to show that the simulation detects it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// A new file is acknowledged and not made.
    AckPut,
    /// A killed gateway's last journal record is gone.
    JournalTail,
    /// An append is carried out twice.
    AppendTwice,
    /// Written bytes are acknowledged, and follow a second later.
    LateWrite,
    /// Refused files are dropped.
    ForgetRefused,
    /// A rename stops after its first half.
    HalfRename,
    /// Recalls are answered and not heeded.
    StaleRead,
    /// A server that starts anew does not wait for those who had leases.
    NoGrace,
}

impl Fault {
    pub const ALL: [(&'static str, Self); 8] = [
        ("ack-put", Self::AckPut),
        ("journal-tail", Self::JournalTail),
        ("append-twice", Self::AppendTwice),
        ("late-write", Self::LateWrite),
        ("forget-refused", Self::ForgetRefused),
        ("half-rename", Self::HalfRename),
        ("stale-read", Self::StaleRead),
        ("no-grace", Self::NoGrace),
    ];

    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.iter().find(|(its, _)| *its == name).map(|(_, fault)| *fault)
    }
}

/// Request of one message.
#[derive(Debug, Clone)]
pub enum Request {
    Call(Caller, Op),
    Write(Caller, Vec<Write>),
    Read(Caller, Vec<ReadPart>),
}

/// Answer to a [`Request`].
#[derive(Debug, Clone)]
#[expect(clippy::large_enum_variant, reason = "it is made once and read once")]
pub enum Response {
    Call(Result<Answer, Errno>),
    Write(Result<Vec<Result<Entry, Errno>>, Errno>),
    Read(Vec<Result<Piece, Errno>>),
}

/// The machine: its disk, and what happened in which order.
pub struct Site {
    pub export: PathBuf,
    pub fault: Option<Fault>,
    /// So many of the next writes find the disk full.
    pub full: AtomicU64,
    /// Messages are cut off, delayed and lost.
    pub is_rough: AtomicBool,
    pub server: Mutex<Option<Arc<Server>>>,
    pub log: Log,
}

/// Log of events, with their times.
pub struct Log {
    began: Instant,
    /// Also what the server is asked for and answers.
    tells_requests: bool,
    lines: Mutex<Vec<String>>,
}

impl Log {
    pub fn new() -> Self {
        let tells_requests = crate::setting("REQUESTS").is_some();
        Self { began: Instant::now(), tells_requests, lines: Mutex::default() }
    }

    pub fn note(&self, line: &str) {
        let line = format!("{:>9.3} {line}", self.began.elapsed().as_secs_f64());
        self.lines.lock().unwrap().push(line);
    }

    pub fn lines(&self) -> Vec<String> {
        self.lines.lock().unwrap().clone()
    }
}

/// One process of the executor.
pub struct Server {
    keeper: Arc<Keeper>,
    directory: Arc<Directory>,
    sessions: Mutex<BTreeMap<u64, Arc<Served>>>,
    /// Clients that had a session of an earlier process.
    former: BTreeSet<u64>,
    is_over: AtomicBool,
}

/// State of a request.
#[derive(Debug, Clone)]
#[expect(clippy::large_enum_variant, reason = "it is made once and read once")]
enum Performed {
    UnderWay,
    Answered(Response),
    /// The server was killed.
    Never,
}

/// The session of one client.
pub struct Served {
    pub session: DirectorySession,
    requests: Mutex<BTreeMap<u64, Arc<Shared<Performed>>>>,
    tasks: Mutex<Vec<AbortHandle>>,
    /// When its client was last there.
    seen: Mutex<Instant>,
}

impl Site {
    /// After an earlier process that had these sessions.
    pub fn start_server(&self, former: BTreeSet<u64>) {
        let named = former
            .iter()
            .map(|client| Former { name: client.to_string(), tree: self.export.clone() });
        let keeper = if self.fault == Some(Fault::NoGrace) {
            Keeper::default()
        } else {
            Keeper::after(named)
        };
        let keeper = Arc::new(keeper);
        let machine = Machine::without_threads(Arc::clone(&keeper));
        let directory =
            Directory::open(machine, &self.export, Rights::Own, Mutability::ReadWrite).unwrap();
        let server =
            Server { keeper, directory, sessions: Mutex::default(), former, is_over: false.into() };
        *self.server.lock().unwrap() = Some(Arc::new(server));
        self.log.note("the server starts");
    }

    /// With everything that it was about to do. The clients that may rely on leases.
    pub fn kill_server(&self) -> BTreeSet<u64> {
        let Some(server) = self.server.lock().unwrap().take() else { return BTreeSet::new() };
        self.log.note("the server is killed");
        server.is_over.store(true, Ordering::Relaxed);
        let sessions = server.sessions.lock().unwrap();
        sessions.values().for_each(|served| served.end());
        sessions.keys().chain(&server.former).copied().collect()
    }

    pub fn running(&self) -> Option<Arc<Server>> {
        self.server.lock().unwrap().clone()
    }

    fn is_full(&self) -> bool {
        self.full
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1))
            .is_ok()
    }
}

impl Server {
    /// The session of a client, and whether it goes on. `resumes`:
    /// which one of them it had.
    pub fn welcome(&self, client: u64, resumes: Stamp) -> (Arc<Served>, bool) {
        let mut sessions = self.sessions.lock().unwrap();
        let now = Instant::now();
        sessions.retain(|_, served| {
            let stays = now - *served.seen.lock().unwrap() < SESSION_TIME;
            if !stays {
                served.session.end();
            }
            stays
        });
        if let Some(served) = sessions.get(&client) {
            served.is_alive();
            return (Arc::clone(served), served.session.opened() == resumes);
        }
        // Of one account per machine: what one has let lapse is not held against the other.
        let account = Account::named(if client.is_multiple_of(2) { "ada" } else { "bob" });
        let session =
            DirectorySession::open_for(account, Arc::clone(&self.directory), Liveness::Served);
        session.name(&client.to_string());
        let served = Arc::new(Served {
            session,
            requests: Mutex::default(),
            tasks: Mutex::default(),
            seen: Mutex::new(now),
        });
        sessions.insert(client, Arc::clone(&served));
        (served, false)
    }

    /// Carries a request out, once: whoever asks again gets the same answer. It goes on when nobody
    /// waits for it.
    pub async fn perform(
        &self,
        site: &Arc<Site>,
        served: &Arc<Served>,
        number: u64,
        request: Request,
    ) -> Option<Response> {
        if self.is_over.load(Ordering::Relaxed) {
            return None;
        }
        if let Request::Call(_, Op::EndSessions(names)) = request {
            names.iter().for_each(|name| self.end_session(std::str::from_utf8(name).unwrap()));
            return Some(Response::Call(Ok(Answer::Done)));
        }
        let performed = {
            let mut requests = served.requests.lock().unwrap();
            match requests.get(&number) {
                Some(performed) => Arc::clone(performed),
                None => {
                    let performed = Arc::new(Shared::new(Performed::UnderWay));
                    requests.insert(number, Arc::clone(&performed));
                    let its = Arc::clone(&performed);
                    let (site, session) = (Arc::clone(site), served.session.clone());
                    let task = tokio::spawn(async move {
                        let asked = site.log.tells_requests.then(|| shortened(&request));
                        let response = carry_out(&site, &session, request).await;
                        if let Some(asked) = asked {
                            site.log.note(&format!(
                                "request {number}: {asked} = {}",
                                shortened(&response)
                            ));
                        }
                        its.set(Performed::Answered(response));
                    });
                    served.tasks.lock().unwrap().push(task.abort_handle());
                    performed
                }
            }
        };
        match performed.when(|performed| !matches!(performed, Performed::UnderWay)).await {
            Performed::Answered(response) => Some(response),
            Performed::UnderWay | Performed::Never => None,
        }
    }
}

impl Server {
    fn end_session(&self, name: &str) {
        if let Some(served) = self.sessions.lock().unwrap().remove(&name.parse().unwrap()) {
            served.end();
        }
        self.keeper.has_ended(name);
    }
}

impl Served {
    /// Nothing of it is carried out any more.
    fn end(&self) {
        self.tasks.lock().unwrap().iter().for_each(AbortHandle::abort);
        for request in self.requests.lock().unwrap().values() {
            let is_under_way = matches!(*request.borrow(), Performed::UnderWay);
            if is_under_way {
                request.set(Performed::Never);
            }
        }
        self.session.end();
    }

    pub fn is_alive(&self) {
        *self.seen.lock().unwrap() = Instant::now();
        self.session.renew();
    }
}

async fn carry_out(site: &Arc<Site>, session: &DirectorySession, request: Request) -> Response {
    match request {
        Request::Call(caller, op) => Response::Call(call(site, session, &caller, op).await),
        Request::Write(caller, writes) => {
            let mut results = Vec::new();
            for write in writes {
                match write_one(site, session, &caller, write).await {
                    Ok(more) => results.extend(more),
                    Err(errno) => return Response::Write(Err(errno)),
                }
            }
            Response::Write(Ok(results))
        }
        Request::Read(caller, parts) => {
            Response::Read(session.read(&caller, parts).await.collect().await)
        }
    }
}

async fn call(
    site: &Site,
    session: &DirectorySession,
    caller: &Caller,
    op: Op,
) -> Result<Answer, Errno> {
    let makes = match &op {
        Op::MakeDirectory { .. }
        | Op::Symlink { .. }
        | Op::Link { .. }
        | Op::CreateWhole { .. } => true,
        Op::Create { flags, .. } => flags.contains(OpenFlags::EXCLUSIVE),
        _ => false,
    };
    if makes && site.is_full() {
        return Err(Errno::ENOSPC);
    }
    if let (
        Op::Rename { parent, name, new_parent, new_name, how: Renaming::Replace },
        Some(Fault::HalfRename),
    ) = (&op, site.fault)
    {
        // The new name is there, and the old one stays.
        let place = Place::from(file_of(session, caller, *parent, name).await?);
        let (parent, name) = (*new_parent, new_name.clone());
        let removed = Op::Remove { parent, name: name.clone(), what: Removal::File };
        let _ = session.call(caller, removed).await;
        session.call(caller, Op::Link { file: place, parent, name }).await?;
        return Err(Errno::EIO);
    }
    session.call(caller, op).await
}

async fn file_of(
    session: &DirectorySession,
    caller: &Caller,
    parent: FileId,
    name: &std::ffi::OsStr,
) -> Result<FileId, Errno> {
    let walk = Op::Walk { from: parent, names: vec![name.to_owned()] };
    let Answer::Walked(walked) = session.call(caller, walk).await? else {
        return Err(Errno::EPROTO);
    };
    walked.entries.first().map(|entry| entry.attributes.id).ok_or(Errno::ENOENT)
}

async fn write_one(
    site: &Arc<Site>,
    session: &DirectorySession,
    caller: &Caller,
    write: Write,
) -> Result<Vec<Result<Entry, Errno>>, Errno> {
    let takes_room = match &write {
        Write::Set { .. } => false,
        Write::Put(put) => !is_there(session, caller, put).await,
        Write::At { .. } | Write::Append { .. } => true,
    };
    if takes_room && site.is_full() {
        return Ok(vec![Err(Errno::ENOSPC)]);
    }
    match (&write, site.fault) {
        (Write::Put(put), Some(Fault::AckPut)) if matches!(put.what, NewFile::Regular { .. }) => {
            let made = session.write(caller, vec![write.clone()]).await?;
            // Only where that shows: another program of the server may always remove a file.
            if let Some(path) = path_of(&site.export, made.first(), put) {
                let _ = std::fs::remove_file(path);
            }
            Ok(made)
        }
        (Write::Append { .. }, Some(Fault::AppendTwice)) => {
            session.write(caller, vec![write.clone()]).await?;
            session.write(caller, vec![write]).await
        }
        (Write::At { place, .. }, Some(Fault::LateWrite)) => {
            let entry = session.call(caller, Op::Attributes(*place)).await;
            let Ok(Answer::Entry(entry)) = entry else {
                return session.write(caller, vec![write]).await;
            };
            let (session, caller) = (session.clone(), caller.clone());
            tokio::spawn(async move {
                sleep(Duration::from_secs(1)).await;
                session.write(&caller, vec![write]).await
            });
            Ok(vec![Ok(entry)])
        }
        _ => session.write(caller, vec![write]).await,
    }
}

/// A full disk refuses no name that is taken: that is found out first.
async fn is_there(session: &DirectorySession, caller: &Caller, put: &Put) -> bool {
    let walk = Op::Walk { from: put.directory, names: put.path.clone() };
    matches!(session.call(caller, walk).await,
        Ok(Answer::Walked(walked)) if walked.entries.len() == put.path.len())
}

/// Where a new file came to lie, as its inode tells.
fn path_of(export: &Path, made: Option<&Result<Entry, Errno>>, put: &Put) -> Option<PathBuf> {
    let Some(Ok(entry)) = made else { return None };
    let is_it = |path: &PathBuf| {
        use std::os::unix::fs::MetadataExt as _;
        std::fs::symlink_metadata(path).is_ok_and(|found| found.ino() == entry.attributes.id.inode)
    };
    let name = put.path.last()?;
    all_below(export).into_iter().filter(|path| path.file_name() == Some(name)).find(is_it)
}

/// As much of it as can be read.
fn shortened(what: &impl std::fmt::Debug) -> String {
    format!("{what:?}").chars().take(600).collect()
}

/// All paths below a directory, without it.
pub fn all_below(top: &Path) -> BTreeSet<PathBuf> {
    let mut all = BTreeSet::new();
    let mut left = vec![top.to_owned()];
    while let Some(at) = left.pop() {
        for entry in std::fs::read_dir(at).unwrap() {
            let path = entry.unwrap().path();
            if path.symlink_metadata().unwrap().is_dir() {
                left.push(path.clone());
            }
            all.insert(path);
        }
    }
    all
}
