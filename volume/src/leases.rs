//! Lease table: leases by file and session, their recalls, and the changes that wait for them. Pure
//! logic: the clock is passed in; it neither waits nor sends.
//!
//! All leases of a session expire at one time, which each sign of life extends
//! ([`LeaseTable::renew`]). A change is announced first ([`LeaseTable::begin`]), which recalls
//! conflicting leases of other sessions. It may proceed when all recalls are answered, or their
//! sessions have expired ([`LeaseTable::is_clear`]). Other sessions get no new leases of its files
//! until it is done ([`LeaseTable::finish`]).
//!
//! Invariant: no wait for a lease exceeds the time that its recall states. A session that is alive
//! and does not answer in that time loses all leases of its owner, is notified, and gets none for
//! [`LAPSED_TIME`]. So does an owner for whose answers others have waited longer than
//! [`WAIT_BUDGET`] within that time, since many answers may come just in time.
//!
//! Grace ([`Former`]; RFC 8881, section 8.4.2.1). Sessions of an earlier process of this server may
//! still rely on leases that it granted, and this table does not know which. Invariant: as long as
//! one of them does, other sessions can't change its tree, and get no [`Leases::WRITE`] of it. It
//! no longer does when its holder has said so ([`LeaseTable::forgotten`]), or when those leases
//! have expired.
//!
//! Invariant: no identity increases another one's work, since all share one lock. An op costs as
//! much as its files have holders, and each check while it waits O(1); work over all files of a
//! session is done in steps of [`STEP`]. The one exception is the end of a session's leases, by its
//! own end or by expiry: O(1) per lease, once, and each lease had to be requested.

mod index;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, hash_map},
    mem,
    ops::Bound,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::sync::Notify;

use self::index::{Ends, Index, last_until};

use crate::directory::PoolUsage;
use crate::store::{Entry, FileId, Leases, Notice, Stamp};

/// Lifetime of leases without a sign of life. A writer waits for so long if a holder is
/// unreachable.
pub const LEASE_TIME: Duration = Duration::from_secs(10);
/// Timeout for the answer to a recall; after it, the session loses all its leases. A session that
/// has to write first gets [`FLUSH_TIME`].
pub const ANSWER_TIME: Duration = Duration::from_secs(10);
/// Timeout for the answer to a recall of [`Leases::WRITE`]: 64 MiB at 10 Mbit/s, beside other
/// traffic.
pub const FLUSH_TIME: Duration = Duration::from_secs(60);
/// Limit of leases and unanswered recalls of all sessions: about 400 bytes each. An owner may have
/// as many as it leaves free, so that others find room; beyond, answers come without leases.
pub const MAX_LEASED_FILES: usize = 400_000;
/// Timeout for the flush of write leases before a run.
pub const RUN_TIME: Duration = Duration::from_secs(5);
/// Time for which an owner gets no leases after it has let a recall lapse: so others wait for it
/// once, not for each file that it opens. Its operations go on without leases.
pub const LAPSED_TIME: Duration = Duration::from_secs(300);
/// Total time within [`LAPSED_TIME`] for which others wait for an owner's answers, even if each is
/// in time: three runs. An owner that takes longer is treated as one that doesn't answer.
pub const WAIT_BUDGET: Duration = Duration::from_secs(15);
/// Limit of queued notices per session, about 100 bytes each.
const MAX_UNTAKEN: usize = 65_536;
/// Limit of unanswered recalls per file and session, from which on the session gets no new lease of
/// the file. It bounds the work for one file.
const MAX_UNANSWERED: usize = 4;
/// Limit of files per step under the lock, in work over all files of a session: about a
/// millisecond.
pub const STEP: usize = 1000;
/// Limit of changed files whose attributes are sent to a session unasked.
const MAX_CHANGED: usize = 32;

/// Margin of grace over the lifetime of leases: the holder's clock may be 1 % slower than this
/// machine's.
const CLOCK_DRIFT: Duration = Duration::from_millis(100);
/// Time after the end of an earlier process at which its leases have expired.
pub const GRACE_TIME: Duration = LEASE_TIME.saturating_add(CLOCK_DRIFT);

/// A session of an earlier process, which may rely on leases unknown to this one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Former {
    /// Name that identifies its holder: a session of this process may have the same name
    /// ([`LeaseTable::name`]).
    pub name: String,
    /// The directory whose files it uses.
    pub tree: PathBuf,
}

/// Key of a file, unique among all file systems of the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct File {
    /// The file system.
    pub system: u64,
    /// The file's [`FileId::generation`], unique within a file system.
    pub generation: u64,
}

impl File {
    const LAST: Self = Self { system: u64::MAX, generation: u64::MAX };
}

/// A file: its key in the lease table, and its id on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileRef {
    /// The key.
    pub key: File,
    /// The id, which recalls name.
    pub id: FileId,
}

/// Id of a session, which holds leases.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SessionId(pub u64);

/// A position among a session's recalls.
pub type Place = (Stamp, File);

/// Planned access to a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Intent {
    /// Read: other sessions must write their held-back data first.
    Look,
    /// Change, which conflicts with these leases.
    Change(Leases),
}

/// An announced operation.
#[derive(Debug)]
#[must_use = "others get no leases of its files until it is finished"]
pub struct Ticket {
    session: Option<SessionId>,
    changes: Vec<File>,
    /// Recalls without an answer, used as a stack: an answered one is popped and never checked
    /// again.
    awaited: Vec<Awaited>,
    /// Deadline for all of them.
    until: Option<Instant>,
}

/// Recalls of a session, up to that stamp.
#[derive(Debug, Clone, Copy)]
enum Awaited {
    Of(File, SessionId, Stamp),
    All(SessionId, Stamp),
    /// Those of [`Leases::WRITE`], of all files: so a ticket for 100,000 files has one entry.
    Written(SessionId, Stamp),
}

/// Progress of a ticket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// The operation may proceed.
    Clear,
    /// A step is done: release the lock, and call again.
    More,
    /// Wait until that session answers for that file or ends, or until that time.
    Waits(SessionId, File, Instant),
    /// Wait until the holder of a former session is back, or until that time.
    Grace(Instant),
}

/// The lease table.
#[derive(Debug, Default)]
pub struct LeaseTable {
    files: HashMap<File, Held>,
    sessions: HashMap<SessionId, Session>,
    ends: Ends,
    /// Sessions with write leases, or with unanswered recalls of them.
    writers: BTreeSet<SessionId>,
    /// Owners by identity.
    owners: HashMap<String, Owner>,
    /// Sessions of earlier processes, and the end of their grace period.
    former: Vec<(Former, Instant)>,
    overlap: Overlap,
    /// Total length of all sessions' indexes.
    leased: usize,
    last_session: u64,
    last_stamp: u64,
}

#[derive(Debug, Default)]
struct Held {
    id: FileId,
    grants: BTreeMap<SessionId, Grant>,
    recalled: Vec<Recalled>,
    /// Number of announced changes by session.
    changing: HashMap<Option<SessionId>, usize>,
}

#[derive(Debug)]
struct Grant {
    leases: Leases,
    stamp: Stamp,
}

/// A recall without an answer.
#[derive(Debug)]
struct Recalled {
    session: SessionId,
    leases: Leases,
    stamp: Stamp,
    until: Instant,
}

/// All sessions of one identity.
#[derive(Debug, Default)]
struct Owner {
    sessions: BTreeSet<SessionId>,
    files: usize,
    /// Time until which it gets no leases.
    lapsed_until: Option<Instant>,
    delays: Delays,
}

/// Total time for which others have waited for an owner's answers. Concurrent waits count once.
#[derive(Debug, Default)]
struct Delays {
    total: Duration,
    /// Start of the present period.
    since: Option<Instant>,
    /// Time up to which waits are counted.
    counted: Option<Instant>,
}

#[derive(Debug)]
struct Session {
    owner: String,
    /// The directory whose files it uses.
    tree: PathBuf,
    valid_until: Instant,
    index: Index,
    outbox: Vec<Notice>,
    /// Wakes the reader of the outbox.
    wake: Arc<Notify>,
    /// Stamp of its opening: leases with earlier stamps are another session's.
    opened: Stamp,
    /// Stamp of the last loss of all its leases.
    lost: Stamp,
    /// Its name; see [`Former::name`].
    name: Option<String>,
    /// Files that it held leases of, and that other programs have changed since
    /// [`LeaseTable::take_changed`]; at most [`MAX_CHANGED`].
    changed: Vec<FileId>,
}

/// Returns true if one path is an ancestor of the other, or both are the same.
#[must_use]
pub fn overlap(one: &Path, other: &Path) -> bool {
    one.starts_with(other) || other.starts_with(one)
}

/// Function that returns true if two trees may have files in common.
#[derive(Debug, Clone, Copy)]
pub struct Overlap(pub fn(&Path, &Path) -> bool);

impl Default for Overlap {
    /// By the text of the paths.
    fn default() -> Self {
        Self(overlap)
    }
}

impl LeaseTable {
    /// Sets how trees of sessions are compared: mounts may give one directory several paths.
    pub fn compare_by(&mut self, overlap: Overlap) {
        self.overlap = overlap;
    }

    /// How trees of sessions are compared.
    #[must_use]
    pub fn overlap(&self) -> Overlap {
        self.overlap
    }

    /// Creates an empty table. Stamps continue from `last`: they must not restart with a process,
    /// since their readers live on.
    #[must_use]
    pub fn starting_at(last: Stamp) -> Self {
        Self { last_stamp: last.0, ..Self::default() }
    }

    /// Makes all further stamps later than this one.
    pub fn count_on_from(&mut self, stamp: Stamp) {
        self.last_stamp = self.last_stamp.max(stamp.0);
    }

    /// Begins the grace period for these sessions of an earlier process, which has ended by now.
    pub fn begin_grace(&mut self, former: impl IntoIterator<Item = Former>, now: Instant) {
        let until = now + GRACE_TIME;
        self.former.extend(former.into_iter().map(|former| (former, until)));
    }

    /// Names a session. The grace period of a former one with this name doesn't block it.
    pub fn name(&mut self, session: SessionId, name: &str) {
        if let Some(session) = self.sessions.get_mut(&session) {
            session.name = Some(name.to_owned());
        }
    }

    /// Ends the grace period of the former session of the same name, since the session has dropped
    /// everything from before that loss of all its leases. Returns true if there was one.
    pub fn forgotten(&mut self, session: SessionId, lost: Stamp) -> bool {
        // A loss from an earlier process is not one of this session.
        let its = self.sessions.get(&session).filter(|its| lost >= its.opened);
        let Some(name) = its.and_then(|its| its.name.clone()) else { return false };
        self.has_ended(&name)
    }

    /// Ends the grace period of former sessions of that name, whose holder is gone. Returns true if
    /// there were any.
    pub fn has_ended(&mut self, name: &str) -> bool {
        let before = self.former.len();
        self.former.retain(|(former, _)| former.name != name);
        self.former.len() < before
    }

    /// Returns the end of the grace period of former sessions in trees that match `of`, except for
    /// those with the session's name.
    pub fn grace(
        &mut self,
        session: Option<SessionId>,
        of: impl Fn(&Path) -> bool,
        now: Instant,
    ) -> Option<Instant> {
        // The common case.
        if self.former.is_empty() {
            return None;
        }
        self.former.retain(|(_, until)| *until > now);
        let own = session.and_then(|session| self.sessions.get(&session)?.name.as_deref());
        let in_the_way =
            self.former.iter().filter(|(former, _)| Some(&*former.name) != own && of(&former.tree));
        in_the_way.map(|(_, until)| *until).max()
    }

    /// Like [`Self::grace`], for the session's own tree.
    fn grace_of(&mut self, session: SessionId, now: Instant) -> Option<Instant> {
        if self.former.is_empty() {
            return None;
        }
        let tree = self.sessions.get(&session)?.tree.clone();
        let Overlap(overlap) = self.overlap;
        self.grace(Some(session), |other| overlap(&tree, other), now)
    }

    /// Opens a session with an owner of its own.
    #[cfg(test)]
    pub fn open_session(&mut self, now: Instant) -> SessionId {
        let owner = self.last_session.to_string();
        self.open_session_of(&owner, Path::new("/"), now)
    }

    /// Opens a session without leases.
    pub fn open_session_of(&mut self, owner: &str, tree: &Path, now: Instant) -> SessionId {
        self.last_session += 1;
        let id = SessionId(self.last_session);
        // Leases from before, of another session, are not covered.
        let lost = self.next_stamp();
        self.owners.retain(|_, owner| !owner.sessions.is_empty() || owner.is_remembered_at(now));
        self.owners.entry(owner.to_owned()).or_default().sessions.insert(id);
        let (outbox, changed, valid_until) = (Vec::new(), Vec::new(), now + LEASE_TIME);
        let (owner, tree, index, wake) =
            (owner.to_owned(), tree.to_owned(), Index::default(), Arc::default());
        let (opened, name) = (lost, None);
        self.ends.lives.insert((valid_until, id));
        let session =
            Session { owner, tree, valid_until, index, outbox, wake, opened, lost, name, changed };
        self.sessions.insert(id, session);
        id
    }

    /// Extends the session's leases by [`LEASE_TIME`] from now, on a sign of life. Expired leases
    /// stay expired.
    pub fn renew(&mut self, session: SessionId, now: Instant) {
        self.expire(now);
        if let Some(its) = self.sessions.get_mut(&session) {
            self.ends.lives.remove(&(its.valid_until, session));
            its.valid_until = its.valid_until.max(now + LEASE_TIME);
            self.ends.lives.insert((its.valid_until, session));
        }
    }

    /// Ends a session for good.
    pub fn end_session(&mut self, session: SessionId) {
        self.drop_leases(session);
        let Some(ended) = self.sessions.remove(&session) else { return };
        self.ends.lives.remove(&(ended.valid_until, session));
        if let Some(owner) = self.owners.get_mut(&ended.owner) {
            owner.sessions.remove(&session);
        }
        ended.wake.notify_one();
    }

    /// Grants those of `wanted` that are compatible with other sessions' leases, and returns all
    /// that the session has now. To be called before the file is read, so that a change in between
    /// is recalled with a later stamp.
    pub fn grant(
        &mut self,
        session: SessionId,
        file: FileRef,
        wanted: Leases,
        now: Instant,
    ) -> (Leases, Stamp) {
        let stamp = self.next_stamp();
        // A write lease would conflict with the possible leases of a former session.
        let wanted =
            if self.grace_of(session, now).is_some() { wanted - Leases::WRITE } else { wanted };
        let Some(own) = self.sessions.get(&session).filter(|own| own.valid_until > now) else {
            return (Leases::empty(), stamp);
        };
        let Some(owner) = self.owners.get(&own.owner) else { return (Leases::empty(), stamp) };
        // A session that was found expired stays so until a sign of life.
        let is_over = !self.ends.lives.contains(&(own.valid_until, session));
        // A session that doesn't read its notices gets no more leases.
        let has_lapsed =
            owner.lapsed_until.is_some_and(|until| until > now) || own.outbox.len() >= MAX_UNTAKEN;
        let usage = PoolUsage { own: owner.files, used: self.leased, limit: MAX_LEASED_FILES };
        let has_room = usage.may_take(1);
        let held =
            self.files.entry(file.key).or_insert_with(|| Held { id: file.id, ..Held::default() });
        let refused = is_over || has_lapsed || !has_room && !held.grants.contains_key(&session);
        let can_be_had = if refused { Leases::empty() } else { held.compatible(session, wanted) };
        let leases = self.change(file.key, session, |held| {
            let grant = held.grants.entry(session).or_insert(Grant { leases: can_be_had, stamp });
            grant.leases |= can_be_had;
            grant.stamp = stamp;
            grant.leases
        });
        (leases.unwrap_or_default(), stamp)
    }

    /// Announces an operation: recalls all leases that conflict with the intents, except for those
    /// of `session` itself.
    pub fn begin(
        &mut self,
        session: Option<SessionId>,
        intents: &[(FileRef, Intent)],
        now: Instant,
    ) -> Ticket {
        self.expire(now);
        let mut ticket = Ticket { session, changes: Vec::new(), awaited: Vec::new(), until: None };
        for (file, intent) in intents {
            let FileRef { key: file, id } = *file;
            let (leases, of_writers) = match intent {
                Intent::Look => (Leases::WRITE, Leases::WRITE),
                // A write lease's holder must not overwrite a change that it has not seen.
                Intent::Change(leases) => (*leases | Leases::WRITE, Leases::all()),
            };
            self.recall(file, session, leases, of_writers, now);
            if let Some(held) = self.files.get(&file) {
                let of_others =
                    held.recalled.iter().filter(|recalled| Some(recalled.session) != session);
                let in_the_way = of_others.filter(|recalled| recalled.leases.intersects(leases));
                ticket.awaited.extend(
                    in_the_way.map(|recalled| Awaited::Of(file, recalled.session, recalled.stamp)),
                );
            }
            if matches!(intent, Intent::Change(_)) {
                let held = self.files.entry(file).or_insert_with(|| Held { id, ..Held::default() });
                *held.changing.entry(session).or_default() += 1;
                ticket.changes.push(file);
            }
        }
        ticket
    }

    /// Recalls leases after a change by another program, without waiting. Returns true if any
    /// session held one.
    pub fn changed(&mut self, file: File, leases: Leases, now: Instant) -> bool {
        let leases = leases | Leases::WRITE;
        self.recall(file, None, leases, leases, now)
    }

    /// Returns true if the operation may proceed.
    pub fn is_clear(&mut self, ticket: &mut Ticket, now: Instant) -> bool {
        loop {
            match self.progress(ticket, now) {
                Progress::Clear => return true,
                Progress::Waits(..) | Progress::Grace(_) => return false,
                Progress::More => {}
            }
        }
    }

    /// Performs one step of [`Self::is_clear`]. A ticket's total work is its number of entries, and
    /// O(1) for each call.
    pub fn progress(&mut self, ticket: &mut Ticket, now: Instant) -> Progress {
        self.expire(now);
        for _ in 0..STEP {
            let Some(last) = ticket.awaited.last() else {
                let changes = ticket.session.filter(|_| !ticket.changes.is_empty());
                let grace = changes.and_then(|session| self.grace_of(session, now));
                return grace.map_or(Progress::Clear, Progress::Grace);
            };
            if let Some((session, file, until)) = self.unanswered(*last) {
                return Progress::Waits(
                    session,
                    file,
                    ticket.until.map_or(until, |its| its.min(until)),
                );
            }
            ticket.awaited.pop();
        }
        Progress::More
    }

    /// Returns the session and the file whose answer is awaited, and the deadline.
    fn unanswered(&self, awaited: Awaited) -> Option<(SessionId, File, Instant)> {
        let (session, stamp, file) = match awaited {
            Awaited::Of(file, session, stamp) => (session, stamp, Some(file)),
            Awaited::All(session, stamp) => {
                (session, stamp, last_until(&self.sessions.get(&session)?.index.recalled, stamp))
            }
            Awaited::Written(session, stamp) => {
                (session, stamp, last_until(&self.sessions.get(&session)?.index.unwritten, stamp))
            }
        };
        let recalled = self.files.get(&file?)?.recalled.iter();
        let its =
            recalled.filter(|recalled| recalled.session == session && recalled.stamp <= stamp);
        let until = its.map(|recalled| recalled.until).min()?;
        let life = self.sessions.get(&session).map_or(until, |session| session.valid_until);
        Some((session, file?, until.min(life)))
    }

    /// Ends an announced operation, whether it was performed or not.
    pub fn finish(&mut self, ticket: Ticket) {
        for file in ticket.changes {
            if let Some(held) = self.files.get_mut(&file)
                && let hash_map::Entry::Occupied(mut count) = held.changing.entry(ticket.session)
            {
                *count.get_mut() -= 1;
                if *count.get() == 0 {
                    count.remove();
                }
            }
            self.drop_if_unused(file);
        }
    }

    /// Returns the sessions that may hold changes back in trees that match `of`, without `session`.
    /// A flush recalls their write leases ([`Self::recall_written`]) and awaits the answers
    /// ([`Self::begin_flush`]).
    #[must_use]
    pub fn writers(
        &self,
        session: Option<SessionId>,
        of: impl Fn(&Path) -> bool,
    ) -> Vec<SessionId> {
        let is_meant =
            |holder: &SessionId| self.sessions.get(holder).is_some_and(|holder| of(&holder.tree));
        self.writers
            .iter()
            .copied()
            .filter(|holder| Some(*holder) != session && is_meant(holder))
            .collect()
    }

    /// Recalls one step of the holder's write leases, for `by`: of files after `after`. Returns the
    /// `after` of the next step, if any.
    ///
    /// A recalled lease is no longer indexed as writable, so that a second flush skips it: flushes
    /// cost O(1) per granted lease, however many flushes there are.
    pub fn recall_written(
        &mut self,
        holder: SessionId,
        by: Option<SessionId>,
        after: Option<File>,
        now: Instant,
    ) -> Option<File> {
        self.expire(now);
        let files = step_of(&self.sessions.get(&holder)?.index.writable, after);
        for file in &files {
            self.recall(*file, by, Leases::WRITE, Leases::WRITE, now);
        }
        files.get(STEP - 1).copied()
    }

    /// Returns a ticket for all write leases that were recalled from these holders. Within `time`
    /// they answer, or lose their leases.
    pub fn begin_flush(&mut self, holders: &[SessionId], time: Duration, now: Instant) -> Ticket {
        self.expire(now);
        let (stamp, until) = (Stamp(self.last_stamp), now + time);
        let sessions = &self.sessions;
        let is_awaited = |holder: &&SessionId| {
            sessions.get(*holder).is_some_and(|its| !its.index.unwritten.is_empty())
        };
        let holders: Vec<SessionId> = holders.iter().filter(is_awaited).copied().collect();
        // Otherwise each recall's own deadline is no later.
        if time < FLUSH_TIME {
            self.ends.flushes.extend(holders.iter().map(|holder| (until, *holder, stamp)));
        }
        let awaited = holders.into_iter().map(|holder| Awaited::Written(holder, stamp)).collect();
        Ticket { session: None, changes: Vec::new(), awaited, until: Some(until) }
    }

    /// Takes the session's recalled files that other programs have changed since the last call.
    pub fn take_changed(&mut self, session: SessionId) -> Vec<FileId> {
        self.sessions
            .get_mut(&session)
            .map(|session| mem::take(&mut session.changed))
            .unwrap_or_default()
    }

    /// Sends a file's entry to the session, as an answer would.
    pub fn tell(&mut self, session: SessionId, entry: Entry) {
        // Optional: dropped if the session doesn't read its notices.
        if let Some(session) =
            self.sessions.get_mut(&session).filter(|session| session.outbox.len() < MAX_UNTAKEN)
        {
            session.post(Notice::Is(entry));
        }
    }

    /// Queues a mark after all present notices of the session. `None`: there is no such session.
    pub fn mark(&mut self, session: SessionId) -> Option<Stamp> {
        let stamp = self.next_stamp();
        let its = self.sessions.get_mut(&session)?;
        // Adjacent marks are merged, so that an unreachable session's outbox stays small.
        if let Some(Notice::All { stamp: last }) = its.outbox.last_mut() {
            *last = stamp;
        } else {
            its.post(Notice::All { stamp });
        }
        Some(stamp)
    }

    /// Takes leases back from a session: for a recall with that stamp, or unasked.
    pub fn returned(&mut self, session: SessionId, file: File, leases: Leases, stamp: Stamp) {
        self.change(file, session, |held| {
            for recalled in
                held.recalled.iter_mut().filter(|r| r.session == session && r.stamp <= stamp)
            {
                recalled.leases -= leases;
            }
            if let Some(grant) = held.grants.get_mut(&session).filter(|grant| grant.stamp <= stamp)
            {
                grant.leases -= leases;
            }
        });
    }

    /// Recalls one step of all leases of the session except for write leases, since its cache may
    /// be stale: of files after `after`. Returns the `after` of the next step, if any. Leases that
    /// are granted meanwhile are fresh.
    pub fn recall_all(
        &mut self,
        session: SessionId,
        after: Option<File>,
        now: Instant,
    ) -> Option<File> {
        self.expire(now);
        let files = step_of(&self.sessions.get(&session)?.index.granted, after);
        for file in &files {
            let Some(grant) = self.files.get(file).and_then(|held| held.grants.get(&session))
            else {
                continue;
            };
            // Data that the session itself holds back is newer than the server's.
            let leases =
                if grant.leases.contains(Leases::WRITE) { Leases::ENTRIES } else { Leases::all() };
            let lost = grant.leases & leases;
            if !lost.is_empty() {
                let stamp = self.next_stamp();
                let recalled = Recalled { session, leases: lost, stamp, until: now + ANSWER_TIME };
                self.recall_from(*file, recalled);
            }
        }
        files.get(STEP - 1).copied()
    }

    /// Returns a ticket for the session's own answers to its present recalls.
    pub fn begin_answers(&mut self, session: SessionId, now: Instant) -> Ticket {
        self.expire(now);
        let awaited = vec![Awaited::All(session, Stamp(self.last_stamp))];
        Ticket { session: Some(session), changes: Vec::new(), awaited, until: None }
    }

    /// Returns the stamp of the session's opening.
    #[must_use]
    pub fn opened(&self, session: SessionId) -> Stamp {
        self.sessions.get(&session).map(|session| session.opened).unwrap_or_default()
    }

    /// Takes the session's notices, in order.
    pub fn take_notices(&mut self, session: SessionId) -> Vec<Notice> {
        self.sessions
            .get_mut(&session)
            .map(|session| mem::take(&mut session.outbox))
            .unwrap_or_default()
    }

    /// Returns, for a session after a reconnect, the stamp of the last loss of all its leases, and
    /// the present stamp, up to which [`Self::missed_recalls`] lists its recalls, in steps.
    #[must_use]
    pub fn missed(&self, session: SessionId) -> (Stamp, Stamp) {
        let lost = self.sessions.get(&session).map(|session| session.lost).unwrap_or_default();
        (lost, Stamp(self.last_stamp))
    }

    /// Returns one step of the session's unanswered recalls, from after the position `after` to a
    /// stamp, and the `after` of the next step, if any.
    #[must_use]
    pub fn missed_recalls(
        &self,
        session: SessionId,
        after: Option<Place>,
        until: Stamp,
    ) -> (Vec<Notice>, Option<Place>) {
        let Some(its) = self.sessions.get(&session) else { return (Vec::new(), None) };
        let from = after.map_or(Bound::Unbounded, Bound::Excluded);
        let unanswered = its
            .index
            .recalled
            .range((from, Bound::Unbounded))
            .take_while(|(stamp, _)| *stamp <= until);
        let step: Vec<Place> = unanswered.take(STEP).copied().collect();
        let notice = |(stamp, file): &Place| {
            let held = self.files.get(file)?;
            let recalled =
                held.recalled.iter().find(|r| r.session == session && r.stamp == *stamp)?;
            Some(Notice::Recall { file: held.id, leases: recalled.leases, stamp: *stamp })
        };
        (step.iter().filter_map(notice).collect(), step.get(STEP - 1).copied())
    }

    /// Ends all leases of all sessions: anything may have changed.
    pub fn lose_all(&mut self) {
        let sessions: Vec<SessionId> = self.sessions.keys().copied().collect();
        sessions.into_iter().for_each(|session| self.lose(session));
    }

    /// Returns the expiry of the session's leases.
    #[must_use]
    pub fn valid_until(&self, session: SessionId) -> Option<Instant> {
        self.sessions.get(&session).map(|session| session.valid_until)
    }

    /// Returns the earliest time at which [`Self::is_clear`] can change by expiry alone.
    #[must_use]
    pub fn deadline(&self, ticket: &Ticket) -> Option<Instant> {
        let (_, _, until) = self.unanswered(*ticket.awaited.last()?)?;
        Some(ticket.until.map_or(until, |its| its.min(until)))
    }

    /// Returns the [`Notify`] that wakes the reader of the session's notices.
    #[must_use]
    pub fn wake(&self, session: SessionId) -> Option<Arc<Notify>> {
        self.sessions.get(&session).map(|session| session.wake.clone())
    }

    /// Returns the numbers of files and of sessions.
    #[must_use]
    pub fn size(&self) -> (usize, usize) {
        (self.files.len(), self.sessions.len())
    }

    /// Returns the session's leases of a file.
    #[must_use]
    pub fn held(&self, session: SessionId, file: File) -> Leases {
        let grant = self.files.get(&file).and_then(|held| held.grants.get(&session));
        grant.map_or(Leases::empty(), |grant| grant.leases)
    }

    /// Returns true if the session has announced a change of the file that is not finished.
    #[must_use]
    pub fn is_changing(&self, file: File, session: SessionId) -> bool {
        self.files.get(&file).is_some_and(|held| held.changing.contains_key(&Some(session)))
    }

    /// Returns true if any other session may hold changes back.
    #[must_use]
    pub fn may_be_held_back(&self, session: SessionId) -> bool {
        self.writers.len() > usize::from(self.writers.contains(&session))
    }

    /// Returns the next stamp for an answer or a recall.
    pub fn next_stamp(&mut self) -> Stamp {
        self.last_stamp += 1;
        Stamp(self.last_stamp)
    }

    /// Recalls these leases from all sessions but `session`; from a write lease's holder those in
    /// `of_writers`. Returns true if any session held one.
    fn recall(
        &mut self,
        file: File,
        session: Option<SessionId>,
        leases: Leases,
        of_writers: Leases,
        now: Instant,
    ) -> bool {
        let stamp = self.next_stamp();
        let Some(held) = self.files.get(&file) else { return false };
        let lost = held.grants.iter().filter(|(holder, _)| Some(**holder) != session).map(
            |(holder, grant)| {
                let is_writer = grant.leases.contains(Leases::WRITE);
                (*holder, grant.leases & if is_writer { of_writers } else { leases })
            },
        );
        let lost: Vec<(SessionId, Leases)> = lost.filter(|(_, lost)| !lost.is_empty()).collect();
        let id = held.id;
        for (holder, leases) in &lost {
            let time = if leases.contains(Leases::WRITE) { FLUSH_TIME } else { ANSWER_TIME };
            self.recall_from(
                file,
                Recalled { session: *holder, leases: *leases, stamp, until: now + time },
            );
            if let Some(holder) = self.sessions.get_mut(holder).filter(|_| session.is_none())
                && holder.changed.len() < MAX_CHANGED
                && !holder.changed.contains(&id)
            {
                holder.changed.push(id);
            }
        }
        !lost.is_empty()
    }

    fn recall_from(&mut self, file: File, recalled: Recalled) {
        let (session, leases, stamp) = (recalled.session, recalled.leases, recalled.stamp);
        let id = self.change(file, session, |held| {
            if let Some(grant) = held.grants.get_mut(&session) {
                grant.leases -= leases;
            }
            held.recalled.push(recalled);
            held.id
        });
        if let (Some(file), Some(session)) = (id, self.sessions.get_mut(&session)) {
            session.post(Notice::Recall { file, leases, stamp });
        }
    }

    /// Ends expired leases and recalls. O(1) if there are none: the next expiry is known.
    pub fn expire(&mut self, now: Instant) {
        // An unreachable session: its leases have expired.
        while let Some(&(until, session)) = self.ends.lives.first()
            && until <= now
        {
            self.ends.lives.pop_first();
            if self.sessions.get(&session).is_some_and(|session| session.index.len() > 0) {
                self.lose(session);
            }
        }
        // A session that is alive but has not answered a recall.
        while let Some(session) = self.overdue(now) {
            self.lapse(session, now);
        }
    }

    /// Returns a session with an overdue recall. A loss of all leases removes its recalls.
    fn overdue(&mut self, now: Instant) -> Option<SessionId> {
        if let Some((until, session, ..)) = self.ends.recalls.first()
            && *until <= now
        {
            return Some(*session);
        }
        while let Some(&(until, session, stamp)) = self.ends.flushes.first()
            && until <= now
        {
            self.ends.flushes.pop_first();
            let its = self.sessions.get(&session);
            if its.is_some_and(|its| last_until(&its.index.unwritten, stamp).is_some()) {
                return Some(session);
            }
        }
        None
    }

    /// Returns the owner of a session.
    #[must_use]
    pub fn owner_of(&self, session: SessionId) -> Option<&str> {
        self.sessions.get(&session).map(|session| &*session.owner)
    }

    /// Counts that the owner `waiter` has waited for an answer of the session from `since` until
    /// now. Returns true if [`WAIT_BUDGET`] is used up, so that the session's owner has lost its
    /// leases.
    pub fn waited(
        &mut self,
        waiter: &str,
        session: SessionId,
        since: Instant,
        now: Instant,
    ) -> bool {
        if since >= now {
            return false;
        }
        let Some(owner) =
            self.owner_of(session).filter(|owner| *owner != waiter).map(str::to_owned)
        else {
            return false;
        };
        let is_used_up =
            self.owners.get_mut(&owner).is_some_and(|owner| owner.delays.add(since, now));
        if is_used_up {
            self.lapse(session, now);
        }
        is_used_up
    }

    fn lapse(&mut self, session: SessionId, now: Instant) {
        self.lose(session);
        let Some(its) = self.sessions.get(&session).filter(|its| !its.owner.is_empty()) else {
            return;
        };
        let Some(owner) = self.owners.get_mut(&its.owner) else { return };
        owner.lapsed_until = Some(now + LAPSED_TIME);
        let others: Vec<SessionId> =
            owner.sessions.iter().copied().filter(|other| *other != session).collect();
        others.into_iter().for_each(|other| self.lose(other));
    }

    fn lose(&mut self, session: SessionId) {
        self.drop_leases(session);
        let stamp = self.next_stamp();
        if let Some(session) = self.sessions.get_mut(&session) {
            session.lost = stamp;
            session.post(Notice::Lost { stamp });
        }
    }

    fn drop_leases(&mut self, session: SessionId) {
        let Some(its) = self.sessions.get_mut(&session) else { return };
        let index = mem::take(&mut its.index);
        let (name, count) = (its.owner.clone(), index.len());
        for file in index.files() {
            let Some(held) = self.files.get_mut(&file) else { continue };
            for recalled in held.recalled.extract_if(.., |recalled| recalled.session == session) {
                self.ends.recalls.remove(&(recalled.until, session, file, recalled.stamp));
            }
            held.grants.remove(&session);
            self.drop_if_unused(file);
        }
        self.writers.remove(&session);
        self.count(&name, count, 0);
    }

    /// Changes one session's grant and recalls of a file, by `how`. Every such change goes through
    /// this, which updates the indexes and removes empty entries.
    fn change<T>(
        &mut self,
        file: File,
        session: SessionId,
        how: impl FnOnce(&mut Held) -> T,
    ) -> Option<T> {
        let (held, its) = (self.files.get_mut(&file)?, self.sessions.get_mut(&session)?);
        let before = its.index.len();
        its.index.remove(file, session, held, &mut self.ends);
        let done = how(held);
        held.recalled.retain(|recalled| !recalled.leases.is_empty());
        if held.grants.get(&session).is_some_and(|grant| grant.leases.is_empty()) {
            held.grants.remove(&session);
        }
        its.index.insert(file, session, held, &mut self.ends);
        if its.index.may_write() {
            self.writers.insert(session);
        } else {
            self.writers.remove(&session);
        }
        let after = its.index.len();
        if before != after {
            let owner = its.owner.clone();
            self.count(&owner, before, after);
        }
        self.drop_if_unused(file);
        Some(done)
    }

    fn count(&mut self, owner: &str, before: usize, after: usize) {
        self.leased = (self.leased + after).saturating_sub(before);
        if let Some(owner) = self.owners.get_mut(owner) {
            owner.files = (owner.files + after).saturating_sub(before);
        }
    }

    fn drop_if_unused(&mut self, file: File) {
        if self.files.get(&file).is_some_and(Held::is_unused) {
            self.files.remove(&file);
        }
    }
}

impl Owner {
    /// Returns true if its penalties must outlive its sessions.
    fn is_remembered_at(&self, now: Instant) -> bool {
        let is_counting =
            self.delays.since.is_some_and(|since| now.duration_since(since) < LAPSED_TIME);
        is_counting || self.lapsed_until.is_some_and(|until| until > now)
    }
}

impl Delays {
    /// Counts a wait. Returns true, and resets the count, if the budget is used up.
    fn add(&mut self, since: Instant, now: Instant) -> bool {
        if self.since.is_none_or(|since| now.duration_since(since) >= LAPSED_TIME) {
            *self = Self { total: Duration::ZERO, since: Some(now), counted: self.counted };
        }
        let from = self.counted.map_or(since, |counted| counted.max(since));
        self.total += now.saturating_duration_since(from);
        self.counted = Some(now);
        if self.total < WAIT_BUDGET {
            return false;
        }
        *self = Self { counted: self.counted, ..Self::default() };
        true
    }
}

impl Session {
    fn post(&mut self, notice: Notice) {
        self.outbox.push(notice);
        self.wake.notify_one();
    }
}

/// Returns the files of the next step.
fn step_of(files: &BTreeSet<File>, after: Option<File>) -> Vec<File> {
    let from = after.map_or(Bound::Unbounded, Bound::Excluded);
    files.range((from, Bound::Unbounded)).take(STEP).copied().collect()
}

impl Held {
    fn is_unused(&self) -> bool {
        self.grants.is_empty() && self.recalled.is_empty() && self.changing.is_empty()
    }

    /// Returns those of `wanted` that the session may have now.
    fn compatible(&self, session: SessionId, wanted: Leases) -> Leases {
        let mut others = self
            .grants
            .iter()
            .filter(|(holder, _)| **holder != session)
            .map(|(_, grant)| grant.leases);
        let is_changing =
            self.changing.len() > usize::from(self.changing.contains_key(&Some(session)));
        // A session may get a lease again before it has answered the recall: its answer has the
        // recall's stamp, which is lower. But while a write lease is being recalled, nobody gets
        // any.
        let is_recalled =
            self.recalled.iter().any(|recalled| recalled.leases.contains(Leases::WRITE));
        let unanswered =
            self.recalled.iter().filter(|recalled| recalled.session == session).count();
        if is_changing
            || is_recalled
            || unanswered >= MAX_UNANSWERED
            || others.clone().any(|leases| leases.contains(Leases::WRITE))
        {
            return Leases::empty();
        }
        if others.next().is_some() || !self.recalled.is_empty() {
            return wanted - Leases::WRITE;
        }
        wanted
    }
}

#[cfg(test)]
#[path = "leases_tests.rs"]
mod tests;
