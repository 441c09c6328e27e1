//! A session with a directory, and the stages of an op: its intents, waiting for recalls, the
//! operation itself, and the entries in the answer.

use std::{
    collections::HashMap,
    os::fd::{AsFd as _, BorrowedFd},
    path::Path,
    sync::{
        Arc, Mutex, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use async_trait::async_trait;
use nix::errno::Errno;
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;

use super::{
    Directory, Fault,
    account::{Account, ChargedFor},
    attributes,
    descriptor::{ClosingLane, Purpose},
    effects,
    files::Opened,
    limits,
    locks::Locks,
    nodes::{Keep, Node},
    reserved::Reservations,
    transfer::WriteRoom,
};
use crate::{
    keeper::{Begun, Keeper},
    leases::{self, FLUSH_TIME, FileRef, Intent, LEASE_TIME, Overlap, SessionId},
    store::{
        Acls, Answer, Caller, Changes, Entry, FileId, Handle, Kind, Leases, NameIn, Notice,
        Notices, Op, OpenFlags, Pieces, Place, ReadPart, Returned, Settling, Stamp, Store,
        StoreState, Watched, Write,
    },
};

/// Leases that a change of names conflicts with.
pub const NAMES: Leases = Leases::ENTRIES.union(Leases::ATTRIBUTES);
/// Leases that a change of contents conflicts with.
pub const BYTES: Leases = Leases::DATA.union(Leases::ATTRIBUTES);
/// Size of the queue to a session's listener.
const NOTICES: usize = 1024;
/// Timeout for the break of a kernel lease. The kernel itself breaks it after 45 s
/// (/proc/sys/fs/lease-break-time).
const LEASES_END: Duration = Duration::from_secs(60);
const ASK_AGAIN: Duration = Duration::from_millis(50);

/// Files that one op is going to access or change.
pub type Intents = Vec<(FileRef, Intent)>;

/// A session with a [`Directory`]. Dropping the last clone closes its files and releases its locks
/// and leases.
#[derive(Debug, Clone)]
pub struct DirectorySession(pub(super) Arc<Session>);

/// Weak reference to a [`DirectorySession`], which lives until its last holder and its last job.
#[derive(Debug, Clone)]
pub struct WeakSession(Weak<Session>);

impl WeakSession {
    /// Returns the session if it still exists.
    #[must_use]
    pub fn upgrade(&self) -> Option<DirectorySession> {
        self.0.upgrade().map(DirectorySession)
    }
}

#[derive(Debug)]
pub struct Session {
    pub directory: Arc<Directory>,
    pub id: SessionId,
    pub opened: Mutex<HashMap<Handle, Arc<Opened>>>,
    pub last_handle: AtomicU64,
    pub locks: Locks,
    pub reserved: Reservations,
    /// Account that its use of the machine is charged to.
    pub account: Arc<Account>,
    /// Lanes for what it has open and locked.
    pub closing: Arc<ClosingLane>,
    unlocking: Arc<ClosingLane>,
    /// Held during an [`Op::Settle`]: one at a time.
    settling: tokio::sync::Mutex<()>,
    liveness: Liveness,
    has_listener: AtomicBool,
    /// True if attributes include [`Acls`].
    tells_acls: AtomicBool,
    /// The last caller, with whose rights unrequested entries are read.
    last_caller: Mutex<Caller>,
    /// True after the end: no further job runs.
    over: watch::Sender<bool>,
    /// Number of running jobs.
    jobs: Arc<watch::Sender<usize>>,
}

/// Source of a session's lease renewals.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Liveness {
    /// A local session, which lives as long as this process: its listener renews the leases.
    Own,
    /// A session of a remote client: its server calls [`DirectorySession::renew`].
    Served,
}

/// Result of an op's first attempt.
#[expect(clippy::large_enum_variant, reason = "most often it is the answer")]
enum Attempt {
    Done(Answer),
    Wait(Begun, Intents),
}

impl DirectorySession {
    /// Opens a session for the account with an empty name.
    #[must_use]
    pub fn open(directory: Arc<Directory>, liveness: Liveness) -> Self {
        Self::open_for(Account::named(""), directory, liveness)
    }

    /// Opens a session for an account.
    #[must_use]
    pub fn open_for(account: Arc<Account>, directory: Arc<Directory>, liveness: Liveness) -> Self {
        let id = directory.machine.keeper.open_session(account.name(), directory.tree());
        let (workers, tree) = (&directory.machine.workers, directory.tree());
        let closing = ClosingLane::new(workers, account.name(), tree, Purpose::Closing);
        let unlocking = ClosingLane::new(workers, account.name(), tree, Purpose::Unlocking);
        Self(Arc::new(Session {
            directory,
            id,
            opened: Mutex::default(),
            last_handle: AtomicU64::default(),
            locks: Locks::default(),
            reserved: Reservations::default(),
            account,
            closing,
            unlocking,
            settling: tokio::sync::Mutex::default(),
            liveness,
            has_listener: false.into(),
            tells_acls: false.into(),
            last_caller: Mutex::default(),
            over: watch::Sender::new(false),
            jobs: Arc::new(watch::Sender::new(0)),
        }))
    }

    /// Returns the session's directory.
    #[must_use]
    pub fn directory(&self) -> &Arc<Directory> {
        &self.0.directory
    }

    /// Includes ACLs in attributes from now on, which costs more system calls per file.
    pub fn tell_acls(&self) {
        self.0.tells_acls.store(true, Ordering::Relaxed);
    }

    /// Names the session: leases left from a former session with that name ([`leases::Former`])
    /// don't block it.
    pub fn name(&self, name: &str) {
        self.0.keeper().table().name(self.0.id, name);
    }

    /// Ends the session for all its holders: refuses every further op with `ESTALE`, releases its
    /// leases, and has its locks released and its files closed by worker threads. Never blocks.
    ///
    /// The kernel keeps a lock until it has been released, which a hanging file system (FUSE, NFS)
    /// can delay; then it delays no lock of another export.
    pub fn end(&self) {
        self.0.end();
    }

    /// Returns a weak reference.
    #[must_use]
    pub fn downgrade(&self) -> WeakSession {
        WeakSession(Arc::downgrade(&self.0))
    }

    /// Completes when no job of it runs any more, and its locks are released. To be called after
    /// [`Self::end`].
    pub async fn is_quiet(&self) {
        // The sender lives as long as `self`.
        let _ = self.0.jobs.subscribe().wait_for(|count| *count == 0).await;
    }

    /// Completes when the session has ended.
    pub async fn ended(&self) {
        self.0.ended().await;
    }

    /// Renews the leases, on a sign of life from the client.
    pub fn renew(&self) {
        self.0.renew();
    }

    /// Returns the stamp of its opening, unique among all sessions of this machine, including those
    /// of earlier processes.
    #[must_use]
    pub fn opened(&self) -> Stamp {
        self.0.keeper().table().opened(self.0.id)
    }

    /// Returns the notices that a broken connection may have lost; see
    /// [`crate::leases::LeaseTable::missed`].
    #[must_use]
    pub fn missed(&self) -> (Stamp, Stamp) {
        self.0.keeper().table().missed(self.0.id)
    }

    /// See [`crate::leases::LeaseTable::missed_recalls`].
    #[must_use]
    pub fn missed_recalls(
        &self,
        after: Option<leases::Place>,
        until: Stamp,
    ) -> (Vec<Notice>, Option<leases::Place>) {
        self.0.keeper().table().missed_recalls(self.0.id, after, until)
    }

    /// Queues notices about all earlier changes by other programs of this machine, then one with
    /// the returned stamp. `None`: the session has ended.
    pub async fn mark(&self) -> Option<Stamp> {
        self.0.catch_up().await.ok()?;
        self.0.tell_changed().await.ok()?;
        self.0.keeper().mark(self.0.id)
    }

    /// Takes back leases; see [`Op::Return`].
    pub fn give_back(&self, returned: Vec<Returned>) {
        for each in returned {
            let file = self.0.directory.nodes.file(each.file);
            self.0.keeper().returned(self.0.id, file, each.leases, each.stamp);
        }
    }

    /// Like [`Store::write`], with a charge for the data in memory.
    ///
    /// # Errors
    /// Those of [`Store::write`]; `EAGAIN` if nothing was written, for lack of room to wait in.
    pub async fn write_in(
        &self,
        caller: &Caller,
        writes: Vec<Write>,
        room: WriteRoom,
    ) -> Result<Vec<Result<Entry, Errno>>, Errno> {
        super::transfer::write(&self.0, caller, writes, Some(room)).await
    }

    /// Returns the number of open files.
    #[must_use]
    pub fn open_files(&self) -> usize {
        self.0.opened.lock().expect("not poisoned").len()
    }
}

#[async_trait]
impl Store for DirectorySession {
    fn root(&self) -> FileId {
        self.0.directory.nodes.root().id
    }

    async fn call(&self, caller: &Caller, op: Op) -> Result<Answer, Errno> {
        let session = &self.0;
        limits::check(&op)?;
        let op = match session.directory.is_guest(caller) {
            true => op.without_set_ids(),
            false => op,
        };
        session.last_caller.lock().expect("not poisoned").clone_from(caller);
        match op {
            Op::Lock { place, owner, lock, wait } => {
                super::locks::lock(session, caller, place, owner, lock, wait).await
            }
            Op::Settle(how) => session.settle(how).await,
            Op::Reserve { directory, bytes } => {
                let owner = caller.clone();
                let reserve =
                    move |session: &Arc<Session>| session.reserve(&owner, directory, bytes);
                session.as_caller(caller, reserve).await.map(|()| Answer::Done)
            }
            Op::Return(returned) => {
                self.give_back(returned);
                Ok(Answer::Done)
            }
            // The server of named sessions has ended them before.
            Op::EndSessions(_) => Ok(Answer::Done),
            Op::Forgotten(lost) => {
                session.keeper().forgotten(session.id, lost);
                Ok(Answer::Done)
            }
            op @ (Op::Open { .. } | Op::Create { .. } | Op::Set { .. }) => {
                session.open_in_time(caller, op).await
            }
            op => session.perform(caller, op).await,
        }
    }

    async fn read(&self, caller: &Caller, parts: Vec<ReadPart>) -> Pieces {
        super::transfer::read(&self.0, caller, parts)
    }

    async fn write(
        &self,
        caller: &Caller,
        writes: Vec<Write>,
    ) -> Result<Vec<Result<Entry, Errno>>, Errno> {
        super::transfer::write(&self.0, caller, writes, None).await
    }

    fn notices(&self) -> Notices {
        let (sender, receiver) = mpsc::channel(NOTICES);
        if !self.0.has_listener.swap(true, Ordering::Relaxed) {
            tokio::spawn(tell(Arc::downgrade(&self.0), sender));
        }
        Box::pin(ReceiverStream::new(receiver))
    }

    fn valid_until(&self) -> Instant {
        if self.0.liveness == Liveness::Own {
            self.0.renew();
        }
        self.0.keeper().table().valid_until(self.0.id).unwrap_or_else(crate::clock::now)
    }

    fn lease_limit(&self) -> Option<Duration> {
        (self.0.directory.watched == Watched::LeaseEnd).then_some(LEASE_TIME)
    }

    fn state(&self) -> StoreState {
        StoreState { in_reach: true, watched: self.0.directory.watched, ..StoreState::default() }
    }
}

/// Forwards notices while the session and its listener exist.
async fn tell(session: Weak<Session>, sender: mpsc::Sender<Notice>) {
    loop {
        let Some((keeper, id)) = session.upgrade().map(|session| {
            if session.liveness == Liveness::Own {
                session.renew();
            }
            (session.keeper().clone(), session.id)
        }) else {
            return;
        };
        let notices = tokio::select! {
            biased;
            notices = keeper.notices(id) => notices,
            () = sender.closed() => return,
            // Back to the renewal of a local session.
            () = tokio::time::sleep(LEASE_TIME / 4) => continue,
        };
        // The session has ended but still has holders: another `notices` would return at once, and
        // this would spin.
        let Some(notices) = notices else { return };
        for notice in notices {
            if sender.send(notice).await.is_err() {
                return;
            }
        }
    }
}

/// A running job.
struct Job(Arc<watch::Sender<usize>>);

impl Job {
    fn begin(session: &Session) -> Self {
        session.jobs.send_modify(|count| *count += 1);
        Self(session.jobs.clone())
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        self.0.send_modify(|count| *count -= 1);
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.end();
    }
}

impl Session {
    fn end(&self) {
        self.over.send_replace(true);
        self.keeper().end_session(self.id);
        let (reserved, locks) = (self.reserved.take_all(), self.locks.take_all());
        let opened = std::mem::take(&mut *self.opened.lock().expect("not poisoned"));
        if reserved.is_empty() && locks.is_empty() && opened.is_empty() {
            return;
        }
        let (job, directory) = (Job::begin(self), self.directory.clone());
        self.unlocking.run(move || {
            let unlocked = |file| {
                directory.machine.keeper.unlocked.notify(directory.nodes.file(file));
            };
            locks.iter().for_each(|((file, _), lock)| {
                lock.release();
                unlocked(*file);
            });
            opened.values().filter(|opened| opened.release()).for_each(|its| unlocked(its.file));
            drop(job);
            // Closed in a lane of its own.
            drop((reserved, locks, opened));
        });
    }

    pub fn is_over(&self) -> bool {
        *self.over.borrow()
    }

    /// Completes when the session ends.
    pub async fn ended(&self) {
        let _ = self.over.subscribe().wait_for(|over| *over).await;
    }

    /// Wakes the waiters for locks of that file.
    pub fn unlocked(&self, file: FileId) {
        self.keeper().unlocked.notify(self.directory.nodes.file(file));
    }

    /// Runs a job on one of the account's threads, with exactly the caller's rights. All accesses
    /// to names and files of the export go through this.
    pub async fn as_caller<T, F>(self: &Arc<Self>, caller: &Caller, job: F) -> Result<T, Errno>
    where
        T: Send + 'static,
        F: FnOnce(&Arc<Self>) -> Result<T, Fault> + Send + 'static,
    {
        let job = self.acting(caller, job);
        self.directory.machine.workers.run(&self.account, job).await
    }

    /// Like [`Self::as_caller`], for CPU-bound jobs.
    pub async fn as_caller_at_low_priority<T, F>(
        self: &Arc<Self>,
        caller: &Caller,
        job: F,
    ) -> Result<T, Errno>
    where
        T: Send + 'static,
        F: FnOnce(&Arc<Self>) -> Result<T, Fault> + Send + 'static,
    {
        let job = self.acting(caller, job);
        self.directory.machine.low_priority_workers.run(&self.account, job).await
    }

    /// Wraps a job so that it runs with the caller's rights.
    fn acting<T, F>(
        self: &Arc<Self>,
        caller: &Caller,
        job: F,
    ) -> impl FnOnce() -> Result<T, Errno> + Send + use<T, F>
    where
        F: FnOnce(&Arc<Self>) -> Result<T, Fault> + Send,
    {
        let (session, caller) = (self.clone(), caller.clone());
        let effects = effects::of_call();
        move || {
            let _job = Job::begin(&session);
            let _noting = effects::note_in(effects);
            // It may have ended while this waited for a thread. Checked after the job was counted,
            // so that `is_quiet` can't miss it.
            if session.is_over() {
                return Err(Errno::ESTALE);
            }
            let _acting = session.directory.act(&caller)?;
            let _charged = ChargedFor::begin(&caller);
            Ok(job(&session)?)
        }
    }

    pub fn keeper(&self) -> &Arc<Keeper> {
        &self.directory.machine.keeper
    }

    fn renew(&self) {
        self.keeper().table().renew(self.id, crate::clock::now());
    }

    /// Opens a file when a program of the server has given up its kernel lease of it (F_SETLEASE of
    /// fcntl(2)), as open(2) does. It polls instead of blocking a thread, since that may take long.
    async fn open_in_time(self: &Arc<Self>, caller: &Caller, op: Op) -> Result<Answer, Errno> {
        let begun = crate::clock::now();
        loop {
            match self.perform(caller, op.clone()).await {
                Err(Errno::EAGAIN)
                    if crate::clock::now() - begun < LEASES_END && !self.is_over() =>
                {
                    tokio::time::sleep(ASK_AGAIN).await;
                }
                answer => return answer,
            }
        }
    }

    async fn perform(self: &Arc<Self>, caller: &Caller, op: Op) -> Result<Answer, Errno> {
        if let Op::CopyRange { .. } | Op::Allocate { .. } = op {
            return super::steps::perform(self, caller, op).await;
        }
        // The kernel scans all locks of the file, as for taking one.
        let step = match &op {
            Op::TestLock { .. } => self.account.step().await,
            _ => None,
        };
        let op = Arc::new(op);
        let first = {
            let (op, owner) = (op.clone(), caller.clone());
            let attempt = move |session: &Arc<Self>| {
                let _until_it_is_done = step;
                session.attempt(&owner, &op)
            };
            self.as_caller(caller, attempt).await?
        };
        match first {
            Attempt::Done(answer) => Ok(answer),
            Attempt::Wait(mut begun, intents) => {
                begun.clear().await;
                let owner = caller.clone();
                self.as_caller(caller, move |session| {
                    let answer = session.execute_for(&owner, &op, &intents);
                    begun.finish();
                    answer
                })
                .await
            }
        }
    }

    /// Executes the op at once, unless recalls are necessary.
    fn attempt(&self, caller: &Caller, op: &Op) -> Result<Attempt, Fault> {
        let intents = self.intents(op)?;
        self.check_rights(op)?;
        let mut begun = self.announce(&intents);
        if !begun.is_clear() {
            return Ok(Attempt::Wait(begun, intents));
        }
        let answer = self.execute_for(caller, op, &intents)?;
        begun.finish();
        Ok(Attempt::Done(answer))
    }

    /// Performs [`Op::Settle`], one at a time per session and few per account, to bound their cost
    /// for others. No deadlock: the other sessions answer by [`Op::Return`] and writes, which never
    /// wait for such a turn, and a recall times out in any case.
    async fn settle(self: &Arc<Self>, how: Settling) -> Result<Answer, Errno> {
        let _turn = self.settling.lock().await;
        let _place = self.directory.machine.settling.take(&self.account, 1).await;
        // It may have ended while this waited for its turn.
        if self.is_over() {
            return Err(Errno::ESTALE);
        }
        if how == Settling::Flush {
            let tree = self.directory.tree();
            let Overlap(overlap) = self.keeper().table().overlap();
            let of = |other: &Path| overlap(tree, other);
            self.keeper().flush(self.account.name(), Some(self.id), of, FLUSH_TIME).await;
        }
        self.catch_up().await?;
        if self.directory.watched == Watched::LeaseEnd {
            // Anything may have changed.
            self.keeper().recall_all(self.id).await;
        }
        self.keeper().begin_answers(self.id).clear().await;
        Ok(Answer::Settled(self.keeper().table().next_stamp()))
    }

    /// Sends the attributes of changed files unasked: after a command has changed files, its caller
    /// is likely to stat them next.
    async fn tell_changed(self: &Arc<Self>) -> Result<(), Errno> {
        let changed = self.keeper().table().take_changed(self.id);
        if changed.is_empty() || self.directory.watched == Watched::LeaseEnd {
            return Ok(());
        }
        let caller = self.last_caller.lock().expect("not poisoned").clone();
        let tell = move |session: &Arc<Self>| {
            for file in changed {
                let entry = session
                    .directory
                    .nodes
                    .node(file)
                    .and_then(|node| session.entry_of_node(&node));
                // Skips files that are gone or held by another session.
                if let Some(entry) = entry.ok().filter(|entry| !entry.leases.is_empty()) {
                    session.keeper().table().tell(session.id, entry);
                }
            }
            Ok(())
        };
        self.as_caller(&caller, tell).await
    }

    /// Completes when recalls for all earlier changes by other programs are queued.
    async fn catch_up(&self) -> Result<(), Errno> {
        let directory = self.directory.clone();
        let catch_up = move || {
            directory.machine.watch.catch_up();
            Ok(())
        };
        self.directory.machine.workers.run(&self.account, catch_up).await
    }

    /// Announces an op to the lease table. On a read-only export changes are left out: they will be
    /// refused on execution, and must not recall leases before.
    pub fn announce(&self, intents: &Intents) -> Begun {
        if self.directory.require_writable().is_err() {
            let looks = intents.iter().filter(|(_, intent)| *intent == Intent::Look);
            return self.keeper().begin(self.id, &looks.copied().collect::<Intents>());
        }
        self.keeper().begin(self.id, intents)
    }

    /// Returns the files that the op accesses or changes, by the present names.
    pub fn intents(&self, op: &Op) -> Result<Intents, Fault> {
        let change = |id: FileId, leases| self.intent(id, Intent::Change(leases));
        Ok(match op {
            Op::Walk { from, names } => self.looks(|| self.walked_ids(*from, names)),
            Op::List { directory, cookie, limit } => {
                self.looks(|| self.listed_ids(*directory, *cookie, *limit))
            }
            Op::Attributes(place) | Op::Seek { place, .. } => {
                vec![self.intent(place.file, Intent::Look)]
            }
            Op::Set { place, changes } => vec![self.intent(place.file, setting(changes))],
            Op::MakeDirectory { parent, .. }
            | Op::MakeNode { parent, .. }
            | Op::Symlink { parent, .. } => {
                vec![change(*parent, NAMES)]
            }
            Op::Link { file, parent, .. } => {
                vec![change(*parent, NAMES), change(file.file, Leases::ATTRIBUTES)]
            }
            Op::Remove { parent, name, .. } => {
                // A missing name may be one that another session has not sent yet.
                let child = self.child_id(*parent, name)?;
                std::iter::once(change(*parent, NAMES))
                    .chain(child.map(|child| change(child, NAMES)))
                    .collect()
            }
            Op::Rename { parent, name, new_parent, new_name, .. } => {
                let (file, other) =
                    (self.child_id(*parent, name)?, self.child_id(*new_parent, new_name)?);
                if file.is_some() && file == other {
                    // Two names of one file: a no-op (rename(2)).
                    return Ok(Vec::new());
                }
                let mut intents = vec![change(*parent, NAMES), change(*new_parent, NAMES)];
                intents.extend(file.map(|file| change(file, Leases::ATTRIBUTES)));
                intents.extend(other.map(|other| change(other, NAMES)));
                intents
            }
            Op::Create { parent, name, flags, .. } => match self.child_id(*parent, name)? {
                Some(file) if !flags.contains(OpenFlags::EXCLUSIVE) => {
                    vec![self.intent(file, opening(*flags))]
                }
                Some(_) => return Err(Errno::EEXIST.into()),
                None => vec![change(*parent, NAMES)],
            },
            Op::CreateWhole { put, .. } => {
                let (parent, name) = self.place_of(put)?;
                match self.child_id(parent.id, name)? {
                    Some(_) => return Err(Errno::EEXIST.into()),
                    None => vec![change(parent.id, NAMES)],
                }
            }
            Op::Open { place, flags } => vec![self.intent(place.file, opening(*flags))],
            Op::Allocate { place, .. } => vec![change(place.file, BYTES)],
            Op::CopyRange { from, to, .. } => {
                vec![self.intent(from.file.file, Intent::Look), change(to.file.file, BYTES)]
            }
            Op::SetAttribute { place, .. } | Op::RemoveAttribute { place, .. } => {
                vec![change(place.file, Leases::ATTRIBUTES)]
            }
            _ => Vec::new(),
        })
    }

    /// Executes an op, deducting a new file from the caller's space reservation.
    fn execute_for(&self, caller: &Caller, op: &Op, announced: &Intents) -> Result<Answer, Fault> {
        match op {
            Op::CreateWhole { put, .. } => self
                .reserved
                .spending(caller)
                .spend(put.what.room(), || self.execute(op, announced)),
            op => self.execute(op, announced),
        }
    }

    /// Executes an op, whose intents were announced. By then a name may stand for another file.
    pub fn execute(&self, op: &Op, announced: &Intents) -> Result<Answer, Fault> {
        match op {
            Op::Walk { from, names } => self.walk(*from, names).map(Answer::Walked),
            Op::List { directory, cookie, limit } => {
                self.list(*directory, *cookie, *limit).map(Answer::Listing)
            }
            Op::Attributes(place) => self.entry_of(*place).map(Answer::Entry),
            Op::Set { place, changes } => self.set(*place, changes).map(Answer::Entry),
            Op::ReadLink(file) => self.read_link(*file),
            Op::MakeDirectory { .. }
            | Op::MakeNode { .. }
            | Op::Symlink { .. }
            | Op::Link { .. } => self.make(op),
            Op::Remove { parent, name, what } => {
                self.remove(NameIn { parent: *parent, name }, *what, announced)
            }
            Op::Rename { parent, name, new_parent, new_name, how } => self.rename(
                NameIn { parent: *parent, name },
                NameIn { parent: *new_parent, name: new_name },
                *how,
                announced,
            ),
            Op::Create { parent, name, mode, flags } => {
                self.create(NameIn { parent: *parent, name }, *mode, *flags, announced)
            }
            Op::CreateWhole { put, flags } => self.create_whole(put, *flags, announced),
            Op::Open { place, flags } => self.open(*place, *flags),
            Op::Close(handle) => self.close(*handle),
            Op::Sync { place, what } => self.sync(*place, *what),
            Op::Seek { place, offset, what } => self.seek(*place, *offset, *what),
            Op::FileSystem => attributes::file_system(self.directory.nodes.root().fd.as_fd())
                .map(Answer::FileSystem),
            Op::GetAttribute { .. }
            | Op::SetAttribute { .. }
            | Op::ListAttributes(_)
            | Op::RemoveAttribute { .. } => self.extended(op),
            Op::TestLock { place, owner, lock } => super::locks::test(self, *place, *owner, lock),
            Op::Unlock { file, owner } => {
                super::locks::unlock(self, *file, *owner);
                Ok(Answer::Done)
            }
            // Answered in `call`, or performed in steps.
            Op::Lock { .. }
            | Op::Return(_)
            | Op::Forgotten(_)
            | Op::EndSessions(_)
            | Op::Settle(_)
            | Op::Reserve { .. }
            | Op::CopyRange { .. }
            | Op::Allocate { .. } => Err(Errno::EOPNOTSUPP.into()),
        }
    }

    fn extended(&self, op: &Op) -> Result<Answer, Fault> {
        let (Op::GetAttribute { place, .. }
        | Op::SetAttribute { place, .. }
        | Op::RemoveAttribute { place, .. }
        | Op::ListAttributes(place)) = op
        else {
            return Err(Errno::EOPNOTSUPP.into());
        };
        let target = self.target(*place)?;
        let stamp = self.keeper().table().next_stamp();
        let answer = match op {
            Op::GetAttribute { name, .. } => {
                Some(Answer::Value { value: attributes::value(target.fd(), name)?, stamp })
            }
            Op::ListAttributes(_) => {
                Some(Answer::Names { names: attributes::names(target.fd())?, stamp })
            }
            Op::SetAttribute { name, value, how, .. } => {
                self.directory.require_writable()?;
                attributes::set_value(target.fd(), name, value, *how)?;
                None
            }
            Op::RemoveAttribute { name, .. } => {
                self.directory.require_writable()?;
                attributes::remove_value(target.fd(), name)?;
                None
            }
            _ => None,
        };
        answer.map_or_else(|| self.entry_of(*place).map(Answer::Entry), Ok)
    }

    /// Returns intents to read these files, if other sessions may hold [`Leases::WRITE`] at all.
    /// Most often none does.
    fn looks(&self, ids: impl FnOnce() -> Vec<FileId>) -> Intents {
        if !self.keeper().table().may_be_held_back(self.id) {
            return Vec::new();
        }
        ids().into_iter().map(|id| self.intent(id, Intent::Look)).collect()
    }

    pub fn intent(&self, id: FileId, intent: Intent) -> (FileRef, Intent) {
        (self.directory.nodes.file_ref(id), intent)
    }

    /// Returns the file that a name refers to at present.
    pub fn child_id(
        &self,
        parent: FileId,
        name: &std::ffi::OsStr,
    ) -> Result<Option<FileId>, Fault> {
        let parent = self.directory.nodes.node(parent)?;
        match self.directory.nodes.child(&parent, name, Keep::Open) {
            Ok(child) => Ok(Some(child.id)),
            Err(fault) if fault == Fault::from(Errno::ENOENT) => Ok(None),
            Err(fault) => Err(fault),
        }
    }

    /// Returns the entry of a place, with leases.
    pub fn entry_of(&self, place: Place) -> Result<Entry, Fault> {
        let target = self.target(place)?;
        let leases = if target.is_directory() { NAMES } else { Leases::ATTRIBUTES };
        self.entry(target.fd(), place.file, leases)
    }

    /// Returns the entry of a node, with leases.
    pub fn entry_of_node(&self, node: &Node) -> Result<Entry, Fault> {
        let leases = if node.kind == Kind::Directory { NAMES } else { Leases::ATTRIBUTES };
        self.entry(node.fd.as_fd(), node.id, leases)
    }

    /// Returns the entry of a directory that this session has just created, with [`Leases::WRITE`],
    /// since no other session knows it; not if it has a default ACL, from which new files get their
    /// permissions.
    pub fn entry_of_new_directory(&self, node: &Node) -> Result<Entry, Fault> {
        let is_plain = attributes::has_no_default_acl(node.fd.as_fd());
        let held_back = if is_plain { Leases::WRITE } else { Leases::empty() };
        self.entry(node.fd.as_fd(), node.id, NAMES | held_back)
    }

    /// Grants leases, then reads the attributes: a change in between is recalled with a later
    /// stamp.
    pub fn entry(&self, fd: BorrowedFd<'_>, id: FileId, wanted: Leases) -> Result<Entry, Fault> {
        let file = self.directory.nodes.file_ref(id);
        // Without a listener, recalls would remain unanswered.
        let has_listener = self.has_listener.load(Ordering::Relaxed);
        let wanted = if has_listener { wanted } else { Leases::empty() };
        let (leases, stamp) =
            self.keeper().table().grant(self.id, file, wanted, crate::clock::now());
        let mut attributes = attributes::of(fd, id)?;
        if self.tells_acls.load(Ordering::Relaxed) {
            let has_acls = self.directory.nodes.has_acls();
            attributes.acls =
                if has_acls { attributes::acls(fd, attributes.kind) } else { Some(Acls::empty()) };
        }
        Ok(Entry { attributes, leases, stamp })
    }
}

/// Returns the leases that a change of attributes conflicts with.
pub fn leases_of(changes: &Changes) -> Leases {
    if changes.size.is_some() { BYTES } else { Leases::ATTRIBUTES }
}

/// Returns the intent of a change of attributes; an empty one only reads.
pub fn setting(changes: &Changes) -> Intent {
    if *changes == Changes::default() { Intent::Look } else { Intent::Change(leases_of(changes)) }
}

fn opening(flags: OpenFlags) -> Intent {
    if flags.contains(OpenFlags::TRUNCATE) { Intent::Change(BYTES) } else { Intent::Look }
}
