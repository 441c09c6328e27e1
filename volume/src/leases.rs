//! Who may remember what of which file: leases, their recalls, and who waits for whom. Pure
//! logic: the clock is passed in, nothing waits and nothing is sent here.
//!
//! All leases of a session end at one time, which each sign of life moves on ([`LeaseTable::renew`]). A change says first what
//! it is about ([`LeaseTable::begin`]), which recalls what other sessions hold of it; it may happen when all recalls
//! are answered, or their sessions' time is over ([`LeaseTable::is_clear`]), and others get no new leases of these
//! files until it is done ([`LeaseTable::finish`]).
//!
//! Invariant: nobody waits for a lease longer than the time that its recall states. Who is alive and does not answer
//! in that time loses all leases of its owner, hears so, and gets none for [`LAPSED_TIME`].

use std::{
    collections::{HashMap, HashSet, hash_map},
    mem,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use crate::directory::is_share;
use crate::store::{Entry, FileId, Leases, Notice, Stamp};

/// How long leases hold without a sign of life. A writer waits for so long when a holder is out of reach.
pub const LEASE_TIME: Duration = Duration::from_secs(10);
/// After a recall nobody waits longer than that for a session that is alive but does not answer; it then loses all its leases. Who has
/// to write something first gets [`FLUSH_TIME`].
pub const ANSWER_TIME: Duration = Duration::from_secs(10);
/// For 64 MiB at 10 Mbit/s, and the rest of what such a link carries.
pub const FLUSH_TIME: Duration = Duration::from_secs(60);
/// Files with leases, of all sessions: about 200 bytes each. An owner of sessions may have as many as it
/// leaves free, so that others find room; beyond, answers come without leases.
pub const MAX_LEASED_FILES: usize = 400_000;
/// Before a run the holders of rights to write have this time to give them back.
pub const RUN_TIME: Duration = Duration::from_secs(5);
/// An owner that has let a recall lapse gets no leases for this time: it makes others wait once, not for each file
/// that it opens. What it does goes on without leases.
pub const LAPSED_TIME: Duration = Duration::from_secs(300);
/// Notices that wait for a session, about 100 bytes each.
const MAX_UNTAKEN: usize = 65_536;
/// Changed files of which a session is told how they are: whoever has changed more does not look at all of them at once.
const MAX_CHANGED: usize = 32;

/// A file, among all file systems of the keeper's machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct File {
    /// The file system.
    pub system: u64,
    /// The file's [`FileId::generation`], which no two files of a file system have alike.
    pub generation: u64,
}

/// One holder.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SessionId(pub u64);

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
    awaited: Vec<(File, SessionId, Stamp)>,
}

/// All leases.
#[derive(Debug, Default)]
pub struct LeaseTable {
    files: HashMap<File, Held>,
    sessions: HashMap<SessionId, Session>,
    /// Files with recalls that have no answer yet.
    recalling: HashSet<File>,
    /// Files of which changes may be held back, by who does; perhaps some more.
    writable: HashMap<SessionId, HashSet<File>>,
    /// By the name of whoever the sessions belong to.
    owners: HashMap<String, Owner>,
    /// Of all sessions' `files`.
    leased: usize,
    last_session: u64,
    last_stamp: u64,
}

#[derive(Debug, Default)]
struct Held {
    id: FileId,
    grants: HashMap<SessionId, Grant>,
    recalled: Vec<Recalled>,
    /// Who is changing it now.
    changing: Vec<Option<SessionId>>,
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
    sessions: usize,
    files: usize,
    /// It gets no leases before.
    lapsed_until: Option<Instant>,
}

#[derive(Debug)]
struct Session {
    owner: String,
    /// The directory whose files it uses.
    tree: PathBuf,
    valid_until: Instant,
    files: usize,
    outbox: Vec<Notice>,
    /// When it last lost everything.
    lost: Stamp,
    /// Files that it held leases of, and that have changed since this was last asked for: the first of them.
    changed: Vec<FileId>,
}

/// Whether two trees have files in common, as far as their paths tell.
#[must_use]
pub fn overlap(one: &Path, other: &Path) -> bool {
    one.starts_with(other) || other.starts_with(one)
}

impl LeaseTable {
    /// An empty one. Stamps count on from there: they must not begin anew with a process, since their readers live on.
    #[must_use]
    pub fn starting_at(last: Stamp) -> Self {
        Self { last_stamp: last.0, ..Self::default() }
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
        self.owners.retain(|_, owner| owner.sessions > 0 || owner.lapsed_until.is_some_and(|until| until > now));
        self.owners.entry(owner.to_owned()).or_default().sessions += 1;
        let (outbox, changed, valid_until) = (Vec::new(), Vec::new(), now + LEASE_TIME);
        let (owner, tree) = (owner.to_owned(), tree.to_owned());
        self.sessions.insert(id, Session { owner, tree, valid_until, files: 0, outbox, lost, changed });
        id
    }

    /// A sign of life; all that the session holds is valid again for [`LEASE_TIME`]. What had ended already stays ended.
    pub fn renew(&mut self, session: SessionId, now: Instant) {
        self.expire(now);
        if let Some(session) = self.sessions.get_mut(&session) {
            session.valid_until = session.valid_until.max(now + LEASE_TIME);
        }
    }

    /// The holder goes for good.
    pub fn end_session(&mut self, session: SessionId) {
        self.drop_leases(session);
        self.writable.remove(&session);
        if let Some(ended) = self.sessions.remove(&session)
            && let Some(owner) = self.owners.get_mut(&ended.owner)
        {
            owner.sessions -= 1;
        }
    }

    /// Gives of `wanted` what goes together with what others have, and tells all that the session has now. To be called
    /// before the file is looked at, so that a change in between is recalled with a later stamp.
    pub fn grant(&mut self, session: SessionId, file: (File, FileId), wanted: Leases, now: Instant) -> (Leases, Stamp) {
        let stamp = self.next_stamp();
        let Some(own) = self.sessions.get_mut(&session).filter(|own| own.valid_until > now) else {
            return (Leases::empty(), stamp);
        };
        let Some(owner) = self.owners.get_mut(&own.owner) else { return (Leases::empty(), stamp) };
        // Whoever does not take what it is told is not given more to be told of.
        let has_lapsed = owner.lapsed_until.is_some_and(|until| until > now) || own.outbox.len() >= MAX_UNTAKEN;
        let has_room = is_share((owner.files, 1), (self.leased, MAX_LEASED_FILES));
        let held = self.files.entry(file.0).or_insert_with(|| Held { id: file.1, ..Held::default() });
        let can_be_had = if has_lapsed { Leases::empty() } else { held.compatible(session, wanted) };
        let is_new = !held.grants.contains_key(&session);
        let leases = match held.grants.entry(session) {
            hash_map::Entry::Occupied(mut grant) => {
                let grant = grant.get_mut();
                grant.leases |= can_be_had;
                grant.stamp = stamp;
                grant.leases
            }
            hash_map::Entry::Vacant(_) if can_be_had.is_empty() || !has_room => Leases::empty(),
            hash_map::Entry::Vacant(place) => place.insert(Grant { leases: can_be_had, stamp }).leases,
        };
        if is_new && !leases.is_empty() {
            own.files += 1;
            owner.files += 1;
            self.leased += 1;
        }
        if leases.contains(Leases::WRITE) {
            self.writable.entry(session).or_default().insert(file.0);
        }
        self.drop_if_unused(file.0);
        (leases, stamp)
    }

    /// Recalls what stands in the way of all these. `session`: whose own leases don't.
    pub fn begin(&mut self, session: Option<SessionId>, intents: &[(File, FileId, Intent)], now: Instant) -> Ticket {
        self.expire(now);
        let mut ticket = Ticket { session, changes: Vec::new(), awaited: Vec::new() };
        for (file, id, intent) in intents {
            let masks = match intent {
                Intent::Look => (Leases::WRITE, Leases::WRITE),
                // Who holds the right to write must not write over a change that it has not seen.
                Intent::Change(leases) => (*leases | Leases::WRITE, Leases::all()),
            };
            self.recall(*file, session, masks, now);
            if let Some(held) = self.files.get(file) {
                let of_others = held.recalled.iter().filter(|recalled| Some(recalled.session) != session);
                let in_the_way = of_others.filter(|recalled| recalled.leases.intersects(masks.0));
                ticket.awaited.extend(in_the_way.map(|recalled| (*file, recalled.session, recalled.stamp)));
            }
            if matches!(intent, Intent::Change(_)) {
                let held = self.files.entry(*file).or_insert_with(|| Held { id: *id, ..Held::default() });
                held.changing.push(session);
                ticket.changes.push(*file);
            }
        }
        ticket
    }

    /// Something has changed already, by somebody who holds no leases: recalls, and nobody waits. Whether somebody is told.
    pub fn changed(&mut self, file: File, leases: Leases, now: Instant) -> bool {
        self.recall(file, None, (leases | Leases::WRITE, leases | Leases::WRITE), now)
    }

    /// Whether nothing stands in the way any more.
    pub fn is_clear(&mut self, ticket: &Ticket, now: Instant) -> bool {
        self.expire(now);
        ticket.awaited.iter().all(|(file, session, stamp)| {
            let held = self.files.get(file);
            !held.is_some_and(|held| held.recalled.iter().any(|r| r.session == *session && r.stamp <= *stamp))
        })
    }

    /// It has happened, or does not happen.
    pub fn finish(&mut self, ticket: Ticket) {
        for file in ticket.changes {
            if let Some(held) = self.files.get_mut(&file)
                && let Some(at) = held.changing.iter().position(|by| *by == ticket.session)
            {
                held.changing.swap_remove(at);
            }
            self.drop_if_unused(file);
        }
    }

    /// Recalls all rights to write of those holders whose trees `of` says, but `session` itself. Within `time` they have answered, or
    /// have lost what they hold.
    pub fn begin_flush(
        &mut self,
        session: Option<SessionId>,
        of: impl Fn(&Path) -> bool,
        time: Duration,
        now: Instant,
    ) -> Ticket {
        self.forget_written();
        let intent = |file: &File| Some((*file, self.files.get(file)?.id, Intent::Look));
        let is_meant = |holder: &SessionId| self.sessions.get(holder).is_some_and(|holder| of(&holder.tree));
        let others = self.writable.iter().filter(|(holder, _)| Some(**holder) != session && is_meant(holder));
        let intents: Vec<_> = others.flat_map(|(_, files)| files).filter_map(intent).collect();
        let ticket = self.begin(session, &intents, now);
        for (file, holder, stamp) in &ticket.awaited {
            let recalled = self.files.get_mut(file).into_iter().flat_map(|held| &mut held.recalled);
            for recalled in recalled.filter(|r| r.session == *holder && r.stamp <= *stamp) {
                recalled.until = recalled.until.min(now + time);
            }
        }
        ticket
    }

    /// Files that others than sessions have changed since this was last asked, of those that were recalled from the session.
    pub fn take_changed(&mut self, session: SessionId) -> Vec<FileId> {
        self.sessions.get_mut(&session).map(|session| mem::take(&mut session.changed)).unwrap_or_default()
    }

    /// Tells the session how a file is, as it would an answer.
    pub fn tell(&mut self, session: SessionId, entry: Entry) {
        if let Some(session) = self.sessions.get_mut(&session) {
            session.outbox.push(Notice::Is(entry));
        }
    }

    /// Puts a mark behind all that the session is to be told until now. `None`: there is no such session.
    pub fn mark(&mut self, session: SessionId) -> Option<Stamp> {
        let stamp = self.next_stamp();
        let outbox = &mut self.sessions.get_mut(&session)?.outbox;
        // What is told by one mark need not be told by two: the outbox of a session that is out of reach stays small.
        if let Some(Notice::All { stamp: last }) = outbox.last_mut() {
            *last = stamp;
        } else {
            outbox.push(Notice::All { stamp });
        }
        Some(stamp)
    }

    /// The session gives leases back: by a recall with that stamp, or of its own accord.
    pub fn returned(&mut self, session: SessionId, file: File, leases: Leases, stamp: Stamp) {
        let Some(held) = self.files.get_mut(&file) else { return };
        for recalled in held.recalled.iter_mut().filter(|r| r.session == session && r.stamp <= stamp) {
            recalled.leases -= leases;
        }
        held.recalled.retain(|recalled| !recalled.leases.is_empty());
        if let Some(grant) = held.grants.get_mut(&session)
            && grant.stamp <= stamp
        {
            grant.leases -= leases;
            self.drop_empty_grant(file, session);
        }
        self.drop_if_unused(file);
    }

    /// All leases of the session but those to write are recalled: what it remembers may be old.
    pub fn recall_all(&mut self, session: SessionId, now: Instant) {
        let stamp = self.next_stamp();
        let until = now + ANSWER_TIME;
        let Some(its) = self.sessions.get_mut(&session) else { return };
        for (file, held) in &mut self.files {
            let Some(grant) = held.grants.get_mut(&session) else { continue };
            // What it holds back itself is newer than all that others have.
            let leases = if grant.leases.contains(Leases::WRITE) { Leases::ENTRIES } else { Leases::all() };
            let lost = grant.leases & leases;
            if lost.is_empty() {
                continue;
            }
            grant.leases -= lost;
            held.recalled.push(Recalled { session, leases: lost, stamp, until });
            its.outbox.push(Notice::Recall { file: held.id, leases: lost, stamp });
            if grant.leases.is_empty() {
                held.grants.remove(&session);
                its.files = its.files.saturating_sub(1);
                self.leased = self.leased.saturating_sub(1);
                if let Some(owner) = self.owners.get_mut(&its.owner) {
                    owner.files = owner.files.saturating_sub(1);
                }
            }
            self.recalling.insert(*file);
        }
    }

    /// Awaits the session's own answers to what has been recalled from it.
    pub fn begin_answers(&mut self, session: SessionId, now: Instant) -> Ticket {
        self.expire(now);
        let files = self.recalling.iter().filter_map(|file| Some((*file, self.files.get(file)?)));
        let recalls = files.flat_map(|(file, held)| held.recalled.iter().map(move |recalled| (file, recalled)));
        let own = recalls.filter(|(_, recalled)| recalled.session == session);
        let awaited = own.map(|(file, recalled)| (file, session, recalled.stamp)).collect();
        Ticket { session: Some(session), changes: Vec::new(), awaited }
    }

    /// What is to be told to a session, in order.
    pub fn take_notices(&mut self, session: SessionId) -> Vec<Notice> {
        self.sessions.get_mut(&session).map(|session| mem::take(&mut session.outbox)).unwrap_or_default()
    }

    /// What a session that is back after a break may not have heard: when it last lost everything; its recalls without an answer, and that
    /// these are all.
    #[must_use]
    pub fn missed(&self, session: SessionId) -> (Stamp, Vec<Notice>) {
        let lost = self.sessions.get(&session).map(|session| session.lost).unwrap_or_default();
        let held = self.recalling.iter().filter_map(|file| self.files.get(file));
        let recalls = held.flat_map(|held| held.recalled.iter().map(|recalled| (held.id, recalled)));
        let recalls = recalls.filter(|(_, recalled)| recalled.session == session);
        let notice = |(file, recalled): (FileId, &Recalled)| Notice::Recall {
            file,
            leases: recalled.leases,
            stamp: recalled.stamp,
        };
        (lost, recalls.map(notice).chain([Notice::All { stamp: Stamp(self.last_stamp) }]).collect())
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

    /// When [`Self::is_clear`] may change without anybody's doing.
    #[must_use]
    pub fn deadline(&self, ticket: &Ticket) -> Option<Instant> {
        let of = |(file, session, _): &(File, SessionId, Stamp)| {
            let recalled = self.files.get(file)?.recalled.iter().filter(|r| r.session == *session);
            let until = recalled.map(|recalled| recalled.until).min()?;
            Some(self.sessions.get(session).map_or(until, |session| until.min(session.valid_until)))
        };
        ticket.awaited.iter().filter_map(of).min()
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
        self.files.get(&file).is_some_and(|held| held.changing.contains(&Some(session)))
    }

    /// Whether anybody but the session may hold changes back.
    pub fn may_be_held_back(&mut self, session: SessionId) -> bool {
        let files = &self.files;
        let is_held = |holder, file| files.get(file).is_some_and(|held: &Held| held.is_writable_by(holder));
        let may = self
            .writable
            .iter()
            .any(|(holder, held)| *holder != session && held.iter().any(|file| is_held(*holder, file)));
        if !may {
            // So that the next look is a short one.
            self.writable.retain(|holder, _| *holder == session);
        }
        may
    }

    fn forget_written(&mut self) {
        let files = &self.files;
        for (holder, held) in &mut self.writable {
            held.retain(|file| files.get(file).is_some_and(|held| held.is_writable_by(*holder)));
        }
        self.writable.retain(|_, held| !held.is_empty());
    }

    /// An order among answers and recalls.
    pub fn next_stamp(&mut self) -> Stamp {
        self.last_stamp += 1;
        Stamp(self.last_stamp)
    }

    /// Recalls from all but `session`: who holds one of the first leases loses all of the second. Whether somebody does.
    fn recall(&mut self, file: File, session: Option<SessionId>, masks: (Leases, Leases), now: Instant) -> bool {
        let stamp = self.next_stamp();
        let Some(held) = self.files.get_mut(&file) else { return false };
        let (mut emptied, mut is_told) = (Vec::new(), false);
        for (holder, grant) in &mut held.grants {
            let is_writer = grant.leases.contains(Leases::WRITE);
            let lost = grant.leases & if is_writer { masks.1 } else { masks.0 };
            if Some(*holder) == session || lost.is_empty() {
                continue;
            }
            grant.leases -= lost;
            is_told = true;
            let time = if lost.contains(Leases::WRITE) { FLUSH_TIME } else { ANSWER_TIME };
            self.recalling.insert(file);
            held.recalled.push(Recalled { session: *holder, leases: lost, stamp, until: now + time });
            if let Some(holder) = self.sessions.get_mut(holder) {
                holder.outbox.push(Notice::Recall { file: held.id, leases: lost, stamp });
                if session.is_none() && holder.changed.len() < MAX_CHANGED && !holder.changed.contains(&held.id) {
                    holder.changed.push(held.id);
                }
            }
            if grant.leases.is_empty() {
                emptied.push(*holder);
            }
        }
        emptied.into_iter().for_each(|holder| self.drop_empty_grant(file, holder));
        is_told
    }

    /// Ends what is over by time.
    pub fn expire(&mut self, now: Instant) {
        let is_over = |session: &Session| session.valid_until <= now && session.files > 0;
        let mut over: Vec<SessionId> =
            self.sessions.iter().filter(|(_, session)| is_over(session)).map(|(id, _)| *id).collect();
        self.recalling.retain(|file| self.files.get(file).is_some_and(|held| !held.recalled.is_empty()));
        let overdue = self.recalling.iter().filter_map(|file| self.files.get(file)).flat_map(|held| &held.recalled);
        let is_overdue = |recalled: &&Recalled| {
            let session = self.sessions.get(&recalled.session);
            recalled.until <= now || session.is_none_or(|session| session.valid_until <= now)
        };
        let overdue: Vec<&Recalled> = overdue.filter(is_overdue).collect();
        // One that is out of reach has lost them by time. One that is alive was asked, and has not answered.
        let is_alive = |session: &&Session| session.valid_until > now;
        let alive = overdue.iter().filter_map(|recalled| self.sessions.get(&recalled.session).filter(is_alive));
        let lapsed: HashSet<String> = alive.map(|session| session.owner.clone()).collect();
        over.extend(overdue.iter().map(|recalled| recalled.session));
        for owner in lapsed.iter().filter(|owner| !owner.is_empty()) {
            let its = self.sessions.iter().filter(|(_, session)| session.owner == *owner);
            over.extend(its.map(|(id, _)| *id));
            if let Some(owner) = self.owners.get_mut(owner) {
                owner.lapsed_until = Some(now + LAPSED_TIME);
            }
        }
        over.sort_unstable();
        over.dedup();
        over.into_iter().for_each(|session| self.lose(session));
    }

    fn lose(&mut self, session: SessionId) {
        self.drop_leases(session);
        let stamp = self.next_stamp();
        if let Some(session) = self.sessions.get_mut(&session) {
            session.lost = stamp;
            session.outbox.push(Notice::Lost { stamp });
        }
    }

    fn drop_leases(&mut self, session: SessionId) {
        for held in self.files.values_mut() {
            held.grants.remove(&session);
            held.recalled.retain(|recalled| recalled.session != session);
        }
        self.files.retain(|_, held| !held.is_unused());
        if let Some(session) = self.sessions.get_mut(&session) {
            let lost = mem::take(&mut session.files);
            self.leased = self.leased.saturating_sub(lost);
            if let Some(owner) = self.owners.get_mut(&session.owner) {
                owner.files = owner.files.saturating_sub(lost);
            }
        }
    }

    fn drop_empty_grant(&mut self, file: File, session: SessionId) {
        let Some(held) = self.files.get_mut(&file) else { return };
        if held.grants.get(&session).is_some_and(|grant| grant.leases.is_empty()) {
            held.grants.remove(&session);
            if let Some(session) = self.sessions.get_mut(&session) {
                session.files = session.files.saturating_sub(1);
                self.leased = self.leased.saturating_sub(1);
                if let Some(owner) = self.owners.get_mut(&session.owner) {
                    owner.files = owner.files.saturating_sub(1);
                }
            }
        }
    }

    fn drop_if_unused(&mut self, file: File) {
        if self.files.get(&file).is_some_and(Held::is_unused) {
            self.files.remove(&file);
        }
    }
}

impl Held {
    fn is_unused(&self) -> bool {
        self.grants.is_empty() && self.recalled.is_empty() && self.changing.is_empty()
    }

    /// Whether that session holds changes back, or has yet to answer that it does not.
    fn is_writable_by(&self, session: SessionId) -> bool {
        let granted = self.grants.get(&session).map(|grant| grant.leases);
        let recalled = self.recalled.iter().filter(|recalled| recalled.session == session).map(|r| r.leases);
        granted.into_iter().chain(recalled).any(|leases| leases.contains(Leases::WRITE))
    }

    /// What of `wanted` the session may have now.
    fn compatible(&self, session: SessionId, wanted: Leases) -> Leases {
        let mut others = self.grants.iter().filter(|(holder, _)| **holder != session).map(|(_, grant)| grant.leases);
        let is_changing = self.changing.iter().any(|by| *by != Some(session));
        // What was recalled from the session itself it may have again before it has answered: the answer bears the recall's stamp, which
        // is lower. But a right to write comes back when everybody has seen what was written.
        let is_recalled = self.recalled.iter().any(|recalled| recalled.leases.contains(Leases::WRITE));
        if is_changing || is_recalled || others.clone().any(|leases| leases.contains(Leases::WRITE)) {
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
