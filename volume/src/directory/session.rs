//! One session with a directory, and the way of one op: what it is going to touch, whom that has to
//! wait for, what happens, and how things are then.

use std::{
    collections::{HashMap, HashSet},
    os::fd::{AsFd as _, BorrowedFd},
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
    account::Account,
    attributes,
    files::Opened,
    limits,
    locks::Locks,
    nodes::{Keep, Node},
    reserved::Reservations,
    transfer::WriteRoom,
};
use crate::{
    keeper::{Begun, Keeper},
    leases::{self, FLUSH_TIME, File, Intent, LEASE_TIME, SessionId, overlap},
    store::{
        Acls, Answer, Caller, Changes, Entry, FileId, Handle, Kind, Leases, Notice, Notices, Op,
        OpenFlags, Pieces, Place, ReadPart, Returned, Settling, Stamp, Store, StoreState, Watched,
        Write,
    },
};

/// What a change of names is about.
pub const NAMES: Leases = Leases::ENTRIES.union(Leases::ATTRIBUTES);
/// What a change of bytes is about.
pub const BYTES: Leases = Leases::DATA.union(Leases::ATTRIBUTES);
/// Notices that wait for their listener.
const NOTICES: usize = 1024;
/// The kernel ends leases that are not given up after 45 s (/proc/sys/fs/lease-break-time).
const LEASES_END: Duration = Duration::from_secs(60);
const ASK_AGAIN: Duration = Duration::from_millis(50);

/// What one op is going to touch.
pub type Intents = Vec<(File, FileId, Intent)>;

/// A session with a [`Directory`]. The last clone's end closes its files and gives back its locks
/// and leases.
#[derive(Debug, Clone)]
pub struct DirectorySession(pub(super) Arc<Session>);

/// A [`DirectorySession`] that may have gone: it goes with its last holder and its last job.
#[derive(Debug, Clone)]
pub struct WeakSession(Weak<Session>);

impl WeakSession {
    /// The session, if it is still there.
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
    /// Whose share of the machine it uses.
    pub account: Arc<Account>,
    /// One flush or refresh at a time.
    settling: tokio::sync::Mutex<()>,
    liveness: Liveness,
    has_listener: AtomicBool,
    /// Attributes tell which ACLs there are.
    tells_acls: AtomicBool,
    /// Who called last: what the session is told without having asked is looked at with its rights.
    last_caller: Mutex<Caller>,
    /// Nothing more is done for it.
    over: watch::Sender<bool>,
    /// Jobs that are at work on threads.
    jobs: watch::Sender<usize>,
}

/// Who says that the session is alive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Liveness {
    /// It lives as long as this process: its listener renews its leases.
    Own,
    /// Whoever serves it, by [`DirectorySession::renew`].
    Served,
}

/// What became of an op at first.
#[expect(clippy::large_enum_variant, reason = "most often it is the answer")]
enum Attempt {
    Done(Answer),
    Wait(Begun),
}

impl DirectorySession {
    /// A new one, without anything, of nobody in particular.
    #[must_use]
    pub fn open(directory: Arc<Directory>, liveness: Liveness) -> Self {
        Self::open_for(Account::named(""), directory, liveness)
    }

    /// A new one, without anything.
    #[must_use]
    pub fn open_for(account: Arc<Account>, directory: Arc<Directory>, liveness: Liveness) -> Self {
        let id = directory.machine.keeper.open_session(account.name(), directory.tree());
        Self(Arc::new(Session {
            directory,
            id,
            opened: Mutex::default(),
            last_handle: AtomicU64::default(),
            locks: Locks::default(),
            reserved: Reservations::default(),
            account,
            settling: tokio::sync::Mutex::default(),
            liveness,
            has_listener: false.into(),
            tells_acls: false.into(),
            last_caller: Mutex::default(),
            over: watch::Sender::new(false),
            jobs: watch::Sender::new(0),
        }))
    }

    /// The directory that it is of.
    #[must_use]
    pub fn directory(&self) -> &Arc<Directory> {
        &self.0.directory
    }

    /// From now on attributes tell which ACLs there are, which costs a look more for each file.
    pub fn tell_acls(&self) {
        self.0.tells_acls.store(true, Ordering::Relaxed);
    }

    /// It bears that name: what is left from a former session of it ([`leases::Former`]) does not
    /// stand in its way.
    pub fn name(&self, name: &str) {
        self.0.keeper().table().name(self.0.id, name);
    }

    /// It ends, whoever still has a share of it: what it has open is closed, its locks and leases
    /// are given back, and what it asks for from now on is refused with `ESTALE`.
    pub fn end(&self) {
        self.0.end();
    }

    /// The same session, without keeping it.
    #[must_use]
    pub fn downgrade(&self) -> WeakSession {
        WeakSession(Arc::downgrade(&self.0))
    }

    /// Completes when nothing of it is at work any more. To be called after its [`Self::end`].
    pub async fn is_quiet(&self) {
        // It is not dropped: the session is ours.
        let _ = self.0.jobs.subscribe().wait_for(|count| *count == 0).await;
    }

    /// Completes when the session has ended.
    pub async fn ended(&self) {
        self.0.ended().await;
    }

    /// A sign of life from whoever is served.
    pub fn renew(&self) {
        self.0.renew();
    }

    /// When it was opened. No other session of this machine was, in this process or an earlier one.
    #[must_use]
    pub fn opened(&self) -> Stamp {
        self.0.keeper().table().opened(self.0.id)
    }

    /// What may not have been heard because of a break; see [`crate::leases::LeaseTable::missed`].
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

    /// What other programs of this machine have changed until now is told to the listener before
    /// its notice with this stamp. `None`: the session has ended.
    pub async fn mark(&self) -> Option<Stamp> {
        self.0.catch_up().await.ok()?;
        self.0.tell_changed().await.ok()?;
        self.0.keeper().mark(self.0.id)
    }

    /// Leases are given back; see [`Op::Return`].
    pub fn give_back(&self, returned: Vec<Returned>) {
        for each in returned {
            let file = self.0.directory.nodes.file(each.file);
            self.0.keeper().returned(self.0.id, file, each.leases, each.stamp);
        }
    }

    /// As [`Store::write`], with a charge for what is in memory.
    ///
    /// # Errors
    /// The errors of that; `EAGAIN` when nothing is written, since there is no room to wait in.
    pub async fn write_in(
        &self,
        caller: &Caller,
        writes: Vec<Write>,
        room: WriteRoom,
    ) -> Result<Vec<Result<Entry, Errno>>, Errno> {
        super::transfer::write(&self.0, caller, writes, Some(room)).await
    }

    /// Open files, for the state.
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
        session.last_caller.lock().expect("not poisoned").clone_from(caller);
        match op {
            Op::Lock { place, owner, lock, wait } => {
                super::locks::lock(session, caller, (place, owner), (lock, wait)).await
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
            // Whoever serves sessions by names has ended them.
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

/// Passes notices on for as long as there is a session and a listener.
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
            // A session of our own is renewed in time.
            () = tokio::time::sleep(LEASE_TIME / 4) => continue,
        };
        // It has ended, though somebody still has it: asking again would be answered at once, for
        // ever.
        let Some(notices) = notices else { return };
        for notice in notices {
            if sender.send(notice).await.is_err() {
                return;
            }
        }
    }
}

/// A job that is at work.
struct Job<'a>(&'a Session);

impl<'a> Job<'a> {
    fn begin(session: &'a Session) -> Self {
        session.jobs.send_modify(|count| *count += 1);
        Self(session)
    }
}

impl Drop for Job<'_> {
    fn drop(&mut self) {
        self.0.jobs.send_modify(|count| *count -= 1);
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
        self.reserved.clear();
        let mut unlocked: HashSet<FileId> = self.locks.clear();
        let opened = std::mem::take(&mut *self.opened.lock().expect("not poisoned"));
        unlocked.extend(opened.values().map(|opened| opened.file));
        drop(opened);
        unlocked.into_iter().for_each(|file| self.unlocked(file));
    }

    pub fn is_over(&self) -> bool {
        *self.over.borrow()
    }

    /// Completes when the session ends.
    pub async fn ended(&self) {
        let _ = self.over.subscribe().wait_for(|over| *over).await;
    }

    /// Whoever waits for a lock of that file tries again.
    pub fn unlocked(&self, file: FileId) {
        self.keeper().unlocked.notify(self.directory.nodes.file(file));
    }

    /// Does something on one of the account's threads, with exactly the caller's rights. All that
    /// depends on names and files of the export is done in here.
    pub async fn as_caller<T, F>(self: &Arc<Self>, caller: &Caller, job: F) -> Result<T, Errno>
    where
        T: Send + 'static,
        F: FnOnce(&Arc<Self>) -> Result<T, Fault> + Send + 'static,
    {
        let job = self.acting(caller, job);
        self.directory.machine.workers.run(&self.account, job).await
    }

    /// See [`Self::as_caller`]; what keeps a processor busy.
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

    /// The job, done with the caller's rights.
    fn acting<T, F>(
        self: &Arc<Self>,
        caller: &Caller,
        job: F,
    ) -> impl FnOnce() -> Result<T, Errno> + Send + use<T, F>
    where
        F: FnOnce(&Arc<Self>) -> Result<T, Fault> + Send,
    {
        let (session, caller) = (self.clone(), caller.clone());
        move || {
            let _job = Job::begin(&session);
            // It may have ended while this waited for a thread. Looked at after the job is counted:
            // who ends the session and then sees none is right.
            if session.is_over() {
                return Err(Errno::ESTALE);
            }
            let _acting = session.directory.act(&caller)?;
            Ok(job(&session)?)
        }
    }

    pub fn keeper(&self) -> &Arc<Keeper> {
        &self.directory.machine.keeper
    }

    fn renew(&self) {
        self.keeper().table().renew(self.id, crate::clock::now());
    }

    /// Opens a file that a program of the server may have leased (F_SETLEASE of fcntl(2)) as
    /// open(2) does: when the lease is given up. No thread waits meanwhile, since that may take
    /// long: the kernel is asked again and again.
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
        // Whoever asks looks at all locks of the file in the kernel, as who takes one does.
        let _step = match &op {
            Op::TestLock { .. } => self.account.step().await,
            _ => None,
        };
        let op = Arc::new(op);
        let first = {
            let (op, owner) = (op.clone(), caller.clone());
            self.as_caller(caller, move |session| session.attempt(&owner, &op)).await?
        };
        match first {
            Attempt::Done(answer) => Ok(answer),
            Attempt::Wait(mut begun) => {
                begun.clear().await;
                let owner = caller.clone();
                self.as_caller(caller, move |session| {
                    let answer = session.execute_for(&owner, &op);
                    begun.finish();
                    answer
                })
                .await
            }
        }
    }

    /// Does it at once, if nobody is in the way.
    fn attempt(&self, caller: &Caller, op: &Op) -> Result<Attempt, Fault> {
        let intents = self.intents(op)?;
        self.check_rights(op)?;
        let mut begun = self.announce(intents);
        if !begun.is_clear() {
            return Ok(Attempt::Wait(begun));
        }
        let answer = self.execute_for(caller, op)?;
        begun.finish();
        Ok(Attempt::Done(answer))
    }

    /// One at a time for each session, and few for each account: what these cost others is bounded.
    /// Whoever is waited for answers by [`Op::Return`] and writes, which never wait for a turn in
    /// here, so that turns can't wait for each other; and a recall ends by time in any case.
    async fn settle(self: &Arc<Self>, how: Settling) -> Result<Answer, Errno> {
        let _turn = self.settling.lock().await;
        let _place = self.directory.machine.settling.take(&self.account, 1).await;
        // It may have ended while this waited for its turn.
        if self.is_over() {
            return Err(Errno::ESTALE);
        }
        if how == Settling::Flush {
            let tree = self.directory.tree();
            let waiter = (self.account.name(), Some(self.id));
            self.keeper().flush(waiter, |other| overlap(tree, other), FLUSH_TIME).await;
        }
        self.catch_up().await?;
        if self.directory.watched == Watched::LeaseEnd {
            // Anything may have changed.
            self.keeper().recall_all(self.id).await;
        }
        self.keeper().begin_answers(self.id).clear().await;
        Ok(Answer::Settled(self.keeper().table().next_stamp()))
    }

    /// Whoever has run a command that changed files is likely to look at them next: it is told how
    /// they are before it asks.
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
                // It is gone, or somebody else holds it.
                if let Some(entry) = entry.ok().filter(|entry| !entry.leases.is_empty()) {
                    session.keeper().table().tell(session.id, entry);
                }
            }
            Ok(())
        };
        self.as_caller(&caller, tell).await
    }

    /// What others have done is recalled when this returns.
    async fn catch_up(&self) -> Result<(), Errno> {
        let directory = self.directory.clone();
        let catch_up = move || {
            directory.machine.watch.catch_up();
            Ok(())
        };
        self.directory.machine.workers.run(&self.account, catch_up).await
    }

    /// Says what is about to happen. A change of an export that is not to be changed does not
    /// happen: it is refused when it is executed, and until then nobody gives anything up for it.
    pub fn announce(&self, mut intents: Intents) -> Begun {
        if self.directory.require_writable().is_err() {
            intents.retain(|(_, _, intent)| *intent == Intent::Look);
        }
        self.keeper().begin(self.id, &intents)
    }

    /// What the op looks at or changes, as far as names tell now.
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
                // A name that is not there may be one that another session has not sent yet.
                let child = self.child_id(*parent, name)?;
                std::iter::once(change(*parent, NAMES))
                    .chain(child.map(|child| change(child, NAMES)))
                    .collect()
            }
            Op::Rename { from, to, .. } => {
                let (file, other) = (self.child_id(from.0, &from.1)?, self.child_id(to.0, &to.1)?);
                if file.is_some() && file == other {
                    // One file with two names: nothing happens (rename(2)).
                    return Ok(Vec::new());
                }
                let mut intents = vec![change(from.0, NAMES), change(to.0, NAMES)];
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
            Op::Open { file, flags } => vec![self.intent(*file, opening(*flags))],
            Op::Allocate { place, .. } => vec![change(place.file, BYTES)],
            Op::CopyRange { from, to, .. } => {
                vec![self.intent(from.0.file, Intent::Look), change(to.0.file, BYTES)]
            }
            Op::SetAttribute { place, .. } | Op::RemoveAttribute { place, .. } => {
                vec![change(place.file, Leases::ATTRIBUTES)]
            }
            _ => Vec::new(),
        })
    }

    /// With the space that the caller has reserved.
    fn execute_for(&self, caller: &Caller, op: &Op) -> Result<Answer, Fault> {
        match op {
            Op::CreateWhole { put, .. } => {
                self.reserved.spending(caller).spend(put.what.room(), || self.execute(op))
            }
            op => self.execute(op),
        }
    }

    pub fn execute(&self, op: &Op) -> Result<Answer, Fault> {
        match op {
            Op::Walk { from, names } => self.walk(*from, names).map(Answer::Walked),
            Op::List { directory, cookie, limit } => {
                self.list(*directory, (*cookie, *limit)).map(Answer::Listing)
            }
            Op::Attributes(place) => self.entry_of(*place).map(Answer::Entry),
            Op::Set { place, changes } => self.set(*place, changes).map(Answer::Entry),
            Op::ReadLink(file) => self.read_link(*file),
            Op::MakeDirectory { .. }
            | Op::MakeNode { .. }
            | Op::Symlink { .. }
            | Op::Link { .. } => self.make(op),
            Op::Remove { parent, name, what } => self.remove((*parent, name), *what),
            Op::Rename { from, to, how } => self.rename((from, to), *how),
            Op::Create { parent, name, mode, flags } => {
                self.create((*parent, name), (*mode, *flags))
            }
            Op::CreateWhole { put, flags } => self.create_whole(put, *flags),
            Op::Open { file, flags } => self.open(*file, *flags),
            Op::Close(handle) => self.close(*handle),
            Op::Sync { place, what } => self.sync(*place, *what),
            Op::Seek { place, offset, what } => self.seek(*place, (*offset, *what)),
            Op::FileSystem => attributes::file_system(self.directory.nodes.root().fd.as_fd())
                .map(Answer::FileSystem),
            Op::GetAttribute { .. }
            | Op::SetAttribute { .. }
            | Op::ListAttributes(_)
            | Op::RemoveAttribute { .. } => self.extended(op),
            Op::TestLock { place, owner, lock } => super::locks::test(self, (*place, *owner), lock),
            Op::Unlock { file, owner } => {
                super::locks::unlock(self, *file, *owner);
                Ok(Answer::Done)
            }
            // Answered before anything is touched, or done in steps.
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

    /// What is held under [`Leases::WRITE`] by others, of files that are about to be told of. Most
    /// often nobody holds any.
    fn looks(&self, ids: impl FnOnce() -> Vec<FileId>) -> Intents {
        if !self.keeper().table().may_be_held_back(self.id) {
            return Vec::new();
        }
        ids().into_iter().map(|id| self.intent(id, Intent::Look)).collect()
    }

    fn intent(&self, id: FileId, intent: Intent) -> (File, FileId, Intent) {
        (self.directory.nodes.file(id), id, intent)
    }

    /// The file that a name means now.
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

    /// How a place is now, with the leases that go with it.
    pub fn entry_of(&self, place: Place) -> Result<Entry, Fault> {
        let target = self.target(place)?;
        let leases = if target.is_directory() { NAMES } else { Leases::ATTRIBUTES };
        self.entry((target.fd(), place.file), leases)
    }

    /// How a node is now.
    pub fn entry_of_node(&self, node: &Node) -> Result<Entry, Fault> {
        let leases = if node.kind == Kind::Directory { NAMES } else { Leases::ATTRIBUTES };
        self.entry((node.fd.as_fd(), node.id), leases)
    }

    /// How a directory is that this session has just made. Nobody else knows it: its names may be
    /// made in memory, unless their permissions come of more than mode and owner.
    pub fn entry_of_new_directory(&self, node: &Node) -> Result<Entry, Fault> {
        let is_plain = attributes::has_no_default_acl(node.fd.as_fd());
        let held_back = if is_plain { Leases::WRITE } else { Leases::empty() };
        self.entry((node.fd.as_fd(), node.id), NAMES | held_back)
    }

    /// First the lease, then the look: a change in between is recalled with a later stamp.
    pub fn entry(
        &self,
        (fd, id): (BorrowedFd<'_>, FileId),
        wanted: Leases,
    ) -> Result<Entry, Fault> {
        let file = (self.directory.nodes.file(id), id);
        // Nobody would answer recalls.
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

/// What a change of attributes is about.
pub fn leases_of(changes: &Changes) -> Leases {
    if changes.size.is_some() { BYTES } else { Leases::ATTRIBUTES }
}

/// What changes nothing is as good as a look.
pub fn setting(changes: &Changes) -> Intent {
    if *changes == Changes::default() { Intent::Look } else { Intent::Change(leases_of(changes)) }
}

fn opening(flags: OpenFlags) -> Intent {
    if flags.contains(OpenFlags::TRUNCATE) { Intent::Change(BYTES) } else { Intent::Look }
}
