//! Who may remember what of which file: leases, their recalls, and who waits for whom. Pure
//! logic: the clock is passed in, nothing waits and nothing is sent here.
//!
//! All leases of a session end at one time, which each sign of life moves on
//! ([`LeaseTable::renew`]). A change says first what it is about ([`LeaseTable::begin`]), which
//! recalls what other sessions hold of it; it may happen when all recalls are answered, or their
//! sessions' time is over ([`LeaseTable::is_clear`]), and others get no new leases of these files
//! until it is done ([`LeaseTable::finish`]).
//!
//! Invariant: nobody waits for a lease longer than the time that its recall states. Who is alive
//! and does not answer in that time loses all leases of its owner, hears so, and gets none for
//! [`LAPSED_TIME`]. So does an owner for whose answers others have waited longer than
//! [`WAIT_BUDGET`] within that time, since each of them may come late.
//!
//! Grace ([`Former`]; RFC 8881, section 8.4.2.1). Sessions of an earlier process of this server may
//! still rely on the leases that it granted, and this table does not know which. Invariant: as long
//! as one of them does, no change of its tree is clear for anybody else, and nobody else gets the
//! right to write there. It no longer does when its holder has said so ([`LeaseTable::forgotten`]),
//! or when those leases have ended by time.
//!
//! Invariant: no identity makes the work for another one longer, since all share one lock. An op
//! costs as much as the files that it names have holders, and its waiting O(1) at each look; work
//! over all files of a session is done in steps of [`STEP`]. The one exception is the end of a
//! session's leases, by its own end or by time: it costs O(1) for each lease, once, and each had to
//! be asked for.

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

use crate::directory::is_share;
use crate::store::{Entry, FileId, Leases, Notice, Stamp};

/// How long leases hold without a sign of life. A writer waits for so long when a holder is out of
/// reach.
pub const LEASE_TIME: Duration = Duration::from_secs(10);
/// After a recall nobody waits longer than that for a session that is alive but does not answer; it
/// then loses all its leases. Who has to write something first gets [`FLUSH_TIME`].
pub const ANSWER_TIME: Duration = Duration::from_secs(10);
/// For 64 MiB at 10 Mbit/s, and the rest of what such a link carries.
pub const FLUSH_TIME: Duration = Duration::from_secs(60);
/// Leases and recalls without an answer, of all sessions: about 400 bytes each. An owner of
/// sessions may have as many as it leaves free, so that others find room; beyond, answers come
/// without leases.
pub const MAX_LEASED_FILES: usize = 400_000;
/// Before a run the holders of rights to write have this time to give them back.
pub const RUN_TIME: Duration = Duration::from_secs(5);
/// An owner that has let a recall lapse gets no leases for this time: it makes others wait once,
/// not for each file that it opens. What it does goes on without leases.
pub const LAPSED_TIME: Duration = Duration::from_secs(300);
/// For so long in all others wait for an owner's answers within [`LAPSED_TIME`], however soon
/// before their ends these come: three runs. An owner that takes longer is one that does not
/// answer.
pub const WAIT_BUDGET: Duration = Duration::from_secs(15);
/// Notices that wait for a session, about 100 bytes each.
const MAX_UNTAKEN: usize = 65_536;
/// Recalls of a file that a session has not answered; it gets no new lease of it before. Bounds the
/// looks at one file.
const MAX_UNANSWERED: usize = 4;
/// Files that are looked at while the lock is held, at most, where all those of a session are:
/// about a millisecond.
pub const STEP: usize = 1000;
/// Changed files of which a session is told how they are: whoever has changed more does not look at
/// all of them at once.
const MAX_CHANGED: usize = 32;

/// How much longer grace lasts than leases: the holder's clock may be slower than this machine's by
/// one part in a hundred.
const CLOCK_DRIFT: Duration = Duration::from_millis(100);
/// When the leases of an earlier process have ended, after its end.
pub const GRACE_TIME: Duration = LEASE_TIME.saturating_add(CLOCK_DRIFT);

/// A session of an earlier process, which may rely on leases that this one knows nothing of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Former {
    /// By which its holder is known again: each session of this process may bear the name of one
    /// ([`LeaseTable::name`]).
    pub name: String,
    /// The directory whose files it uses.
    pub tree: PathBuf,
}

/// A file, among all file systems of the keeper's machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct File {
    /// The file system.
    pub system: u64,
    /// The file's [`FileId::generation`], which no two files of a file system have alike.
    pub generation: u64,
}

impl File {
    const LAST: Self = Self { system: u64::MAX, generation: u64::MAX };
}

/// One holder.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SessionId(pub u64);

/// A place among a session's recalls.
pub type Place = (Stamp, File);

/// What somebody is about to do with a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Intent {
    /// Looks at it: others must have written what they hold back.
    Look,
    /// Changes what these leases are about.
    Change(Leases),
}

/// Something that was begun.
#[derive(Debug)]
#[must_use = "others get no leases of its files until it is finished"]
pub struct Ticket {
    session: Option<SessionId>,
    changes: Vec<File>,
    /// What is answered stays so: the last is looked at until it is, and goes.
    awaited: Vec<Awaited>,
    /// What is awaited is over then.
    until: Option<Instant>,
}

/// Recalls of a session, with that stamp or an earlier one.
#[derive(Debug, Clone, Copy)]
enum Awaited {
    Of(File, SessionId, Stamp),
    All(SessionId, Stamp),
    /// Those of rights to write. One for all files: a ticket is as short for 100,000 files as for
    /// one.
    Written(SessionId, Stamp),
}

/// How far a ticket is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// Nothing stands in the way any more.
    Clear,
    /// This was a step: the lock is to be let go.
    More,
    /// Nothing changes before that session answers for that file, ends, or the time is over.
    Waits(SessionId, File, Instant),
    /// Nothing changes before the holder of a former session is back, or the time is over.
    Grace(Instant),
}

/// All leases.
#[derive(Debug, Default)]
pub struct LeaseTable {
    files: HashMap<File, Held>,
    sessions: HashMap<SessionId, Session>,
    ends: Ends,
    /// Who may hold changes back, or has yet to answer that it does not.
    writers: BTreeSet<SessionId>,
    /// By the name of whoever the sessions belong to.
    owners: HashMap<String, Owner>,
    /// Sessions of earlier processes whose leases may still be relied on, and until when they may.
    former: Vec<(Former, Instant)>,
    /// Of all sessions' indexes.
    leased: usize,
    last_session: u64,
    last_stamp: u64,
}

#[derive(Debug, Default)]
struct Held {
    id: FileId,
    grants: BTreeMap<SessionId, Grant>,
    recalled: Vec<Recalled>,
    /// Who is changing it now, and how many times.
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
    /// It gets no leases before.
    lapsed_until: Option<Instant>,
    delays: Delays,
}

/// For how long others have waited for an owner's answers. Times at which several wait count once.
#[derive(Debug, Default)]
struct Delays {
    total: Duration,
    /// Since when that is counted.
    since: Option<Instant>,
    /// What was before is counted.
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
    /// Wakes whoever takes what is in the outbox, and nobody else.
    wake: Arc<Notify>,
    /// What its holder relies on from before, it has of another session.
    opened: Stamp,
    /// When it last lost everything.
    lost: Stamp,
    /// The [`Former::name`] that it bears.
    name: Option<String>,
    /// Files that it held leases of, and that have changed since this was last asked for: the first
    /// of them.
    changed: Vec<FileId>,
}

/// Whether two trees have files in common, as far as their paths tell.
#[must_use]
pub fn overlap(one: &Path, other: &Path) -> bool {
    one.starts_with(other) || other.starts_with(one)
}

impl LeaseTable {
    /// An empty one. Stamps count on from there: they must not begin anew with a process, since
    /// their readers live on.
    #[must_use]
    pub fn starting_at(last: Stamp) -> Self {
        Self { last_stamp: last.0, ..Self::default() }
    }

    /// Further stamps are later than this one.
    pub fn count_on_from(&mut self, stamp: Stamp) {
        self.last_stamp = self.last_stamp.max(stamp.0);
    }

    /// These sessions of an earlier process, which has ended by now, may rely on their leases until
    /// their time is over.
    pub fn begin_grace(&mut self, former: impl IntoIterator<Item = Former>, now: Instant) {
        let until = now + GRACE_TIME;
        self.former.extend(former.into_iter().map(|former| (former, until)));
    }

    /// Names a session. What is left from a former one of this name does not stand in its own way.
    pub fn name(&mut self, session: SessionId, name: &str) {
        if let Some(session) = self.sessions.get_mut(&session) {
            session.name = Some(name.to_owned());
        }
    }

    /// The session relies on nothing from before that loss of all its leases: what a former one of
    /// its name had has ended. Whether there was one.
    pub fn forgotten(&mut self, session: SessionId, lost: Stamp) -> bool {
        // A loss that an earlier process has told of says nothing about this one.
        let its = self.sessions.get(&session).filter(|its| lost >= its.opened);
        let Some(name) = its.and_then(|its| its.name.clone()) else { return false };
        self.has_ended(&name)
    }

    /// The holder of former sessions of that name is no more. Whether there were any.
    pub fn has_ended(&mut self, name: &str) -> bool {
        let before = self.former.len();
        self.former.retain(|(former, _)| former.name != name);
        self.former.len() < before
    }

    /// Until when a former session but that of the same name may rely on leases in a tree that `of`
    /// says.
    pub fn grace(
        &mut self,
        session: Option<SessionId>,
        of: impl Fn(&Path) -> bool,
        now: Instant,
    ) -> Option<Instant> {
        // Most often there is none.
        if self.former.is_empty() {
            return None;
        }
        self.former.retain(|(_, until)| *until > now);
        let own = session.and_then(|session| self.sessions.get(&session)?.name.as_deref());
        let in_the_way =
            self.former.iter().filter(|(former, _)| Some(&*former.name) != own && of(&former.tree));
        in_the_way.map(|(_, until)| *until).max()
    }

    /// The same for the session's own tree.
    fn grace_of(&mut self, session: SessionId, now: Instant) -> Option<Instant> {
        if self.former.is_empty() {
            return None;
        }
        let tree = self.sessions.get(&session)?.tree.clone();
        self.grace(Some(session), |other| overlap(&tree, other), now)
    }

    /// A new holder, without any lease, of nobody in particular.
    #[cfg(test)]
    pub fn open_session(&mut self, now: Instant) -> SessionId {
        let owner = self.last_session.to_string();
        self.open_session_of(&owner, Path::new("/"), now)
    }

    /// A new holder, without any lease.
    pub fn open_session_of(&mut self, owner: &str, tree: &Path, now: Instant) -> SessionId {
        self.last_session += 1;
        let id = SessionId(self.last_session);
        // What somebody remembers from before, of another session, is not covered.
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

    /// A sign of life; all that the session holds is valid again for [`LEASE_TIME`]. What had ended
    /// already stays ended.
    pub fn renew(&mut self, session: SessionId, now: Instant) {
        self.expire(now);
        if let Some(its) = self.sessions.get_mut(&session) {
            self.ends.lives.remove(&(its.valid_until, session));
            its.valid_until = its.valid_until.max(now + LEASE_TIME);
            self.ends.lives.insert((its.valid_until, session));
        }
    }

    /// The holder goes for good.
    pub fn end_session(&mut self, session: SessionId) {
        self.drop_leases(session);
        let Some(ended) = self.sessions.remove(&session) else { return };
        self.ends.lives.remove(&(ended.valid_until, session));
        if let Some(owner) = self.owners.get_mut(&ended.owner) {
            owner.sessions.remove(&session);
        }
        ended.wake.notify_one();
    }

    /// Gives of `wanted` what goes together with what others have, and tells all that the session
    /// has now. To be called before the file is looked at, so that a change in between is recalled
    /// with a later stamp.
    pub fn grant(
        &mut self,
        session: SessionId,
        file: (File, FileId),
        wanted: Leases,
        now: Instant,
    ) -> (Leases, Stamp) {
        let stamp = self.next_stamp();
        // A right to write stands in the way of what a former session may have.
        let wanted =
            if self.grace_of(session, now).is_some() { wanted - Leases::WRITE } else { wanted };
        let Some(own) = self.sessions.get(&session).filter(|own| own.valid_until > now) else {
            return (Leases::empty(), stamp);
        };
        let Some(owner) = self.owners.get(&own.owner) else { return (Leases::empty(), stamp) };
        // What was found to be over stays so until a sign of life.
        let is_over = !self.ends.lives.contains(&(own.valid_until, session));
        // Whoever does not take what it is told is not given more to be told of.
        let has_lapsed =
            owner.lapsed_until.is_some_and(|until| until > now) || own.outbox.len() >= MAX_UNTAKEN;
        let has_room = is_share((owner.files, 1), (self.leased, MAX_LEASED_FILES));
        let held =
            self.files.entry(file.0).or_insert_with(|| Held { id: file.1, ..Held::default() });
        let refused = is_over || has_lapsed || !has_room && !held.grants.contains_key(&session);
        let can_be_had = if refused { Leases::empty() } else { held.compatible(session, wanted) };
        let leases = self.change(file.0, session, |held| {
            let grant = held.grants.entry(session).or_insert(Grant { leases: can_be_had, stamp });
            grant.leases |= can_be_had;
            grant.stamp = stamp;
            grant.leases
        });
        (leases.unwrap_or_default(), stamp)
    }

    /// Recalls what stands in the way of all these. `session`: whose own leases don't.
    pub fn begin(
        &mut self,
        session: Option<SessionId>,
        intents: &[(File, FileId, Intent)],
        now: Instant,
    ) -> Ticket {
        self.expire(now);
        let mut ticket = Ticket { session, changes: Vec::new(), awaited: Vec::new(), until: None };
        for (file, id, intent) in intents {
            let masks = match intent {
                Intent::Look => (Leases::WRITE, Leases::WRITE),
                // Who holds the right to write must not write over a change that it has not seen.
                Intent::Change(leases) => (*leases | Leases::WRITE, Leases::all()),
            };
            self.recall(*file, session, masks, now);
            if let Some(held) = self.files.get(file) {
                let of_others =
                    held.recalled.iter().filter(|recalled| Some(recalled.session) != session);
                let in_the_way = of_others.filter(|recalled| recalled.leases.intersects(masks.0));
                ticket.awaited.extend(
                    in_the_way.map(|recalled| Awaited::Of(*file, recalled.session, recalled.stamp)),
                );
            }
            if matches!(intent, Intent::Change(_)) {
                let held =
                    self.files.entry(*file).or_insert_with(|| Held { id: *id, ..Held::default() });
                *held.changing.entry(session).or_default() += 1;
                ticket.changes.push(*file);
            }
        }
        ticket
    }

    /// Something has changed already, by somebody who holds no leases: recalls, and nobody waits.
    /// Whether somebody is told.
    pub fn changed(&mut self, file: File, leases: Leases, now: Instant) -> bool {
        self.recall(file, None, (leases | Leases::WRITE, leases | Leases::WRITE), now)
    }

    /// Whether nothing stands in the way any more.
    pub fn is_clear(&mut self, ticket: &mut Ticket, now: Instant) -> bool {
        loop {
            match self.progress(ticket, now) {
                Progress::Clear => return true,
                Progress::Waits(..) | Progress::Grace(_) => return false,
                Progress::More => {}
            }
        }
    }

    /// A step towards that. All steps of a ticket together are as many as it has entries, and one
    /// for each look.
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

    /// Whose answer for which file is awaited, and until when.
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

    /// It has happened, or does not happen.
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

    /// Who may hold changes back of trees that `of` says, but `session` itself. A flush recalls
    /// their rights to write ([`Self::recall_written`]) and awaits the answers
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

    /// Recalls a step's worth of the holder's rights to write, for `by`: of files behind `after`.
    /// Where the next step begins.
    ///
    /// What is recalled is no longer writable: a second flush does not look at it again, so that
    /// flushes cost O(1) for each right that was granted, however many there are.
    pub fn recall_written(
        &mut self,
        (holder, by): (SessionId, Option<SessionId>),
        after: Option<File>,
        now: Instant,
    ) -> Option<File> {
        self.expire(now);
        let files = step_of(&self.sessions.get(&holder)?.index.writable, after);
        for file in &files {
            self.recall(*file, by, (Leases::WRITE, Leases::WRITE), now);
        }
        files.get(STEP - 1).copied()
    }

    /// Awaits all rights to write that were recalled from these holders. Within `time` they have
    /// answered, or have lost what they hold.
    pub fn begin_flush(&mut self, holders: &[SessionId], time: Duration, now: Instant) -> Ticket {
        self.expire(now);
        let (stamp, until) = (Stamp(self.last_stamp), now + time);
        let sessions = &self.sessions;
        let is_awaited = |holder: &&SessionId| {
            sessions.get(*holder).is_some_and(|its| !its.index.unwritten.is_empty())
        };
        let holders: Vec<SessionId> = holders.iter().filter(is_awaited).copied().collect();
        // Otherwise each recall ends no later by itself.
        if time < FLUSH_TIME {
            self.ends.flushes.extend(holders.iter().map(|holder| (until, *holder, stamp)));
        }
        let awaited = holders.into_iter().map(|holder| Awaited::Written(holder, stamp)).collect();
        Ticket { session: None, changes: Vec::new(), awaited, until: Some(until) }
    }

    /// Files that others than sessions have changed since this was last asked, of those that were
    /// recalled from the session.
    pub fn take_changed(&mut self, session: SessionId) -> Vec<FileId> {
        self.sessions
            .get_mut(&session)
            .map(|session| mem::take(&mut session.changed))
            .unwrap_or_default()
    }

    /// Tells the session how a file is, as it would an answer.
    pub fn tell(&mut self, session: SessionId, entry: Entry) {
        // It is of use to be told, not needed: whoever does not take notices goes without.
        if let Some(session) =
            self.sessions.get_mut(&session).filter(|session| session.outbox.len() < MAX_UNTAKEN)
        {
            session.post(Notice::Is(entry));
        }
    }

    /// Puts a mark behind all that the session is to be told until now. `None`: there is no such
    /// session.
    pub fn mark(&mut self, session: SessionId) -> Option<Stamp> {
        let stamp = self.next_stamp();
        let its = self.sessions.get_mut(&session)?;
        // What is told by one mark need not be told by two: the outbox of a session that is out of
        // reach stays small.
        if let Some(Notice::All { stamp: last }) = its.outbox.last_mut() {
            *last = stamp;
        } else {
            its.post(Notice::All { stamp });
        }
        Some(stamp)
    }

    /// The session gives leases back: by a recall with that stamp, or of its own accord.
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

    /// All leases of the session but those to write are recalled: what it remembers may be old. A
    /// step of it: files behind `after`; where the next step begins. What is granted meanwhile is
    /// fresh.
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
            // What it holds back itself is newer than all that others have.
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

    /// Awaits the session's own answers to what has been recalled from it.
    pub fn begin_answers(&mut self, session: SessionId, now: Instant) -> Ticket {
        self.expire(now);
        let awaited = vec![Awaited::All(session, Stamp(self.last_stamp))];
        Ticket { session: Some(session), changes: Vec::new(), awaited, until: None }
    }

    /// When the session was opened.
    #[must_use]
    pub fn opened(&self, session: SessionId) -> Stamp {
        self.sessions.get(&session).map(|session| session.opened).unwrap_or_default()
    }

    /// What is to be told to a session, in order.
    pub fn take_notices(&mut self, session: SessionId) -> Vec<Notice> {
        self.sessions
            .get_mut(&session)
            .map(|session| mem::take(&mut session.outbox))
            .unwrap_or_default()
    }

    /// What a session that is back after a break may not have heard: when it last lost everything,
    /// and the recalls until now. [`Self::missed_recalls`] tells them, in steps.
    #[must_use]
    pub fn missed(&self, session: SessionId) -> (Stamp, Stamp) {
        let lost = self.sessions.get(&session).map(|session| session.lost).unwrap_or_default();
        (lost, Stamp(self.last_stamp))
    }

    /// A step's worth of the session's recalls without an answer, behind the place `after` and
    /// until a stamp, and where the next step begins.
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

    /// All that everybody has ends: it is not known what has changed.
    pub fn lose_all(&mut self) {
        let sessions: Vec<SessionId> = self.sessions.keys().copied().collect();
        sessions.into_iter().for_each(|session| self.lose(session));
    }

    /// Until when the session's leases hold.
    #[must_use]
    pub fn valid_until(&self, session: SessionId) -> Option<Instant> {
        self.sessions.get(&session).map(|session| session.valid_until)
    }

    /// When [`Self::is_clear`] may change without anybody's doing, and not before.
    #[must_use]
    pub fn deadline(&self, ticket: &Ticket) -> Option<Instant> {
        let (_, _, until) = self.unanswered(*ticket.awaited.last()?)?;
        Some(ticket.until.map_or(until, |its| its.min(until)))
    }

    /// What wakes whoever takes the session's notices.
    #[must_use]
    pub fn wake(&self, session: SessionId) -> Option<Arc<Notify>> {
        self.sessions.get(&session).map(|session| session.wake.clone())
    }

    /// Files with leases and sessions, for the state.
    #[must_use]
    pub fn size(&self) -> (usize, usize) {
        (self.files.len(), self.sessions.len())
    }

    /// What the session holds of a file.
    #[must_use]
    pub fn held(&self, session: SessionId, file: File) -> Leases {
        let grant = self.files.get(&file).and_then(|held| held.grants.get(&session));
        grant.map_or(Leases::empty(), |grant| grant.leases)
    }

    /// Whether the session has announced a change of the file that is not finished.
    #[must_use]
    pub fn is_changing(&self, file: File, session: SessionId) -> bool {
        self.files.get(&file).is_some_and(|held| held.changing.contains_key(&Some(session)))
    }

    /// Whether anybody but the session may hold changes back.
    #[must_use]
    pub fn may_be_held_back(&self, session: SessionId) -> bool {
        self.writers.len() > usize::from(self.writers.contains(&session))
    }

    /// An order among answers and recalls.
    pub fn next_stamp(&mut self) -> Stamp {
        self.last_stamp += 1;
        Stamp(self.last_stamp)
    }

    /// Recalls from all but `session`: who holds one of the first leases loses all of the second.
    /// Whether somebody does.
    fn recall(
        &mut self,
        file: File,
        session: Option<SessionId>,
        masks: (Leases, Leases),
        now: Instant,
    ) -> bool {
        let stamp = self.next_stamp();
        let Some(held) = self.files.get(&file) else { return false };
        let lost = held.grants.iter().filter(|(holder, _)| Some(**holder) != session).map(
            |(holder, grant)| {
                let is_writer = grant.leases.contains(Leases::WRITE);
                (*holder, grant.leases & if is_writer { masks.1 } else { masks.0 })
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

    /// Ends what is over by time. Costs nothing while nothing is: the next end is known.
    pub fn expire(&mut self, now: Instant) {
        // One that is out of reach has lost its leases by time.
        while let Some(&(until, session)) = self.ends.lives.first()
            && until <= now
        {
            self.ends.lives.pop_first();
            if self.sessions.get(&session).is_some_and(|session| session.index.len() > 0) {
                self.lose(session);
            }
        }
        // One that is alive was asked, and has not answered.
        while let Some(session) = self.overdue(now) {
            self.lapse(session, now);
        }
    }

    /// A session with a recall that is over. It has none when it has lost all.
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

    /// Whose session that is.
    #[must_use]
    pub fn owner_of(&self, session: SessionId) -> Option<&str> {
        self.sessions.get(&session).map(|session| &*session.owner)
    }

    /// The owner `waiter` has waited for an answer of the session from `since` until now. Whether
    /// that used [`WAIT_BUDGET`] up, so that the session's owner has lost its leases.
    pub fn waited(
        &mut self,
        (waiter, session): (&str, SessionId),
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

    /// Changes what one session has of a file: all that is about one goes through here, which keeps
    /// the indexes exact and leaves nothing that is empty.
    fn change<T>(
        &mut self,
        file: File,
        session: SessionId,
        how: impl FnOnce(&mut Held) -> T,
    ) -> Option<T> {
        let (held, its) = (self.files.get_mut(&file)?, self.sessions.get_mut(&session)?);
        let before = its.index.len();
        its.index.remove((file, session), held, &mut self.ends);
        let done = how(held);
        held.recalled.retain(|recalled| !recalled.leases.is_empty());
        if held.grants.get(&session).is_some_and(|grant| grant.leases.is_empty()) {
            held.grants.remove(&session);
        }
        its.index.insert((file, session), held, &mut self.ends);
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
    /// Whether anything of it counts beyond its sessions.
    fn is_remembered_at(&self, now: Instant) -> bool {
        let is_counting =
            self.delays.since.is_some_and(|since| now.duration_since(since) < LAPSED_TIME);
        is_counting || self.lapsed_until.is_some_and(|until| until > now)
    }
}

impl Delays {
    /// Counts a wait. Whether the budget is used up, which begins anew then.
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

/// The next files, as many as one step looks at.
fn step_of(files: &BTreeSet<File>, after: Option<File>) -> Vec<File> {
    let from = after.map_or(Bound::Unbounded, Bound::Excluded);
    files.range((from, Bound::Unbounded)).take(STEP).copied().collect()
}

impl Held {
    fn is_unused(&self) -> bool {
        self.grants.is_empty() && self.recalled.is_empty() && self.changing.is_empty()
    }

    /// What of `wanted` the session may have now.
    fn compatible(&self, session: SessionId, wanted: Leases) -> Leases {
        let mut others = self
            .grants
            .iter()
            .filter(|(holder, _)| **holder != session)
            .map(|(_, grant)| grant.leases);
        let is_changing =
            self.changing.len() > usize::from(self.changing.contains_key(&Some(session)));
        // What was recalled from the session itself it may have again before it has answered: the
        // answer bears the recall's stamp, which is lower. But a right to write comes back when
        // everybody has seen what was written.
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
