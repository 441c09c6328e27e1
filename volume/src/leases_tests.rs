//! Leases against what they promise: whoever remembers something never remembers what is no more.

use proptest::prelude::*;

use super::*;

const FILES: u64 = 3;
const SESSIONS: usize = 3;

fn file(number: u64) -> FileRef {
    FileRef {
        key: File { system: 1, generation: number },
        id: FileId { inode: number, generation: number },
    }
}

/// A holder as a client would be: it remembers a version under a lease, and answers recalls when it
/// likes.
#[derive(Default)]
struct Client {
    remembered: HashMap<u64, u64>,
    dirty: HashMap<u64, u64>,
    recalls: Vec<(u64, Leases, Stamp)>,
}

#[derive(Debug, Clone)]
enum Step {
    Look {
        session: usize,
        file: u64,
        may_write: bool,
    },
    /// Begins a change, which happens as soon as it may.
    Change {
        session: usize,
        file: u64,
    },
    ByOther {
        file: u64,
    },
    WriteBack {
        session: usize,
        file: u64,
    },
    Answer {
        session: usize,
    },
    Pass {
        ms: u64,
    },
    Renew {
        session: usize,
    },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let session = 0..SESSIONS;
    let file = 0..FILES;
    let step = prop_oneof![
        4 => (session.clone(), file.clone(), any::<bool>()).prop_map(|(session, file, may_write)| Step::Look { session, file, may_write }),
        3 => (session.clone(), file.clone()).prop_map(|(session, file)| Step::Change { session, file }),
        1 => file.clone().prop_map(|file| Step::ByOther { file }),
        2 => (session.clone(), file).prop_map(|(session, file)| Step::WriteBack { session, file }),
        3 => session.clone().prop_map(|session| Step::Answer { session }),
        1 => (1_u64..6000).prop_map(|ms| Step::Pass { ms }),
        1 => session.prop_map(|session| Step::Renew { session }),
    ];
    prop::collection::vec(step, 1..80)
}

struct World {
    table: LeaseTable,
    now: Instant,
    ids: Vec<SessionId>,
    clients: Vec<Client>,
    versions: HashMap<u64, u64>,
    pending: Vec<(Ticket, usize, u64)>,
    next_version: u64,
}

impl World {
    fn new() -> Self {
        let mut table = LeaseTable::default();
        let now = Instant::now();
        let ids = (0..SESSIONS).map(|_| table.open_session(now)).collect();
        let clients = (0..SESSIONS).map(|_| Client::default()).collect();
        Self {
            table,
            now,
            ids,
            clients,
            versions: HashMap::new(),
            pending: Vec::new(),
            next_version: 1,
        }
    }

    fn step(&mut self, step: &Step) {
        match *step {
            Step::Look { session, file, may_write } => self.look(session, file, may_write),
            Step::Change { session, file: number } => {
                let intent = Intent::Change(Leases::ATTRIBUTES | Leases::DATA);
                let intents = [(file(number), intent)];
                let ticket = self.table.begin(Some(self.ids[session]), &intents, self.now);
                self.pending.push((ticket, session, number));
            }
            Step::ByOther { file: number } => {
                // What was held back by a writer is written over it: as with two programs on one
                // machine.
                self.set_version(number);
                self.table.changed(file(number).key, Leases::ATTRIBUTES | Leases::DATA, self.now);
            }
            Step::WriteBack { session, file: number } => {
                if self.table.held(self.ids[session], file(number).key).contains(Leases::WRITE) {
                    self.next_version += 1;
                    let version = self.next_version;
                    self.clients[session].dirty.insert(number, version);
                    self.clients[session].remembered.insert(number, version);
                }
            }
            Step::Answer { session } => self.answer(session),
            Step::Pass { ms } => self.now += Duration::from_millis(ms),
            Step::Renew { session } => self.table.renew(self.ids[session], self.now),
        }
        self.settle();
        self.check();
    }

    fn set_version(&mut self, number: u64) -> u64 {
        self.next_version += 1;
        self.versions.insert(number, self.next_version);
        self.next_version
    }

    fn look(&mut self, session: usize, number: u64, may_write: bool) {
        let intents = [(file(number), Intent::Look)];
        let mut ticket = self.table.begin(Some(self.ids[session]), &intents, self.now);
        // One that has to wait is given up here.
        let is_clear = self.table.is_clear(&mut ticket, self.now);
        self.table.finish(ticket);
        self.listen();
        if !is_clear || self.clients[session].recalls.iter().any(|(of, ..)| *of == number) {
            return;
        }
        let wanted = Leases::ATTRIBUTES | Leases::DATA;
        let wanted = if may_write { wanted | Leases::WRITE } else { wanted };
        let (leases, _) = self.table.grant(self.ids[session], file(number), wanted, self.now);
        let client = &mut self.clients[session];
        if leases.contains(Leases::DATA) && !client.dirty.contains_key(&number) {
            client
                .remembered
                .insert(number, self.versions.get(&number).copied().unwrap_or_default());
        }
    }

    /// Writes what is held back, forgets, answers.
    fn answer(&mut self, session: usize) {
        self.listen();
        for (number, leases, stamp) in mem::take(&mut self.clients[session].recalls) {
            if leases.contains(Leases::WRITE)
                && let Some(version) = self.clients[session].dirty.remove(&number)
            {
                self.versions.insert(number, version);
            }
            if leases.contains(Leases::DATA) {
                self.clients[session].remembered.remove(&number);
            }
            self.table.returned(self.ids[session], file(number).key, leases, stamp);
        }
    }

    fn listen(&mut self) {
        for (id, client) in self.ids.iter().zip(&mut self.clients) {
            for notice in self.table.take_notices(*id) {
                match notice {
                    Notice::Recall { file, leases, stamp } => {
                        client.recalls.push((file.generation, leases, stamp))
                    }
                    Notice::Lost { .. } => *client = Client::default(),
                    Notice::Is(_) | Notice::All { .. } => {}
                }
            }
        }
    }

    /// Changes that may happen do; their own sessions know of them.
    fn settle(&mut self) {
        for (mut ticket, session, number) in mem::take(&mut self.pending) {
            if !self.table.is_clear(&mut ticket, self.now) {
                self.pending.push((ticket, session, number));
                continue;
            }
            let version = self.set_version(number);
            self.clients[session].dirty.remove(&number);
            self.clients[session].remembered.entry(number).and_modify(|known| *known = version);
            self.table.finish(ticket);
        }
        self.listen();
    }

    /// A client with a valid lease of the contents, and no pending recall, caches the newest
    /// version.
    fn check(&self) {
        check_indexes(&self.table);
        for (id, client) in self.ids.iter().zip(&self.clients) {
            let is_valid = self.table.valid_until(*id).is_some_and(|until| until > self.now);
            for (number, version) in client.remembered.iter().filter(|_| is_valid) {
                let is_told = client.recalls.iter().any(|(of, ..)| of == number);
                let newest = self.versions.get(number).copied().unwrap_or_default();
                let is_newest = *version == newest || client.dirty.get(number) == Some(version);
                assert!(
                    is_told || is_newest,
                    "file {number}: {version} is remembered, {newest} is"
                );
            }
            let writers =
                |number: &u64| self.ids.iter().filter(|id| self.holds_write(**id, *number)).count();
            assert!((0..FILES).all(|number| writers(&number) <= 1), "two may write");
        }
    }

    fn holds_write(&self, id: SessionId, number: u64) -> bool {
        self.table.held(id, file(number).key).contains(Leases::WRITE)
    }
}

proptest! {
    #[test]
    fn nothing_old_is_remembered_under_a_lease(steps in steps()) {
        let mut world = World::new();
        steps.iter().for_each(|step| world.step(step));
        // In the end everybody's time is over, and nothing waits any more.
        world.now += FLUSH_TIME;
        world.settle();
        prop_assert!(world.pending.is_empty());
    }
}

#[test]
fn a_change_waits_for_the_answer_or_for_the_holders_time() {
    let mut table = LeaseTable::default();
    let now = Instant::now();
    let (one, two) = (table.open_session(now), table.open_session(now));
    let file = file(7);
    let wanted = Leases::DATA | Leases::ATTRIBUTES;
    assert_eq!(table.grant(one, file, wanted, now).0, wanted);
    let change = [(file, Intent::Change(wanted))];
    let mut ticket = table.begin(Some(two), &change, now);
    assert!(!table.is_clear(&mut ticket, now));
    let [Notice::Recall { stamp, leases, .. }] = table.take_notices(one)[..] else {
        panic!("one recall")
    };
    // Until it has happened nobody gets a lease; the one that asks for it least of all.
    assert_eq!(table.grant(one, file, wanted, now).0, Leases::empty());
    table.returned(one, file.key, leases, stamp);
    assert!(table.is_clear(&mut ticket, now));
    assert_eq!(table.grant(one, file, wanted, now).0, Leases::empty());
    table.finish(ticket);
    assert_eq!(table.grant(one, file, wanted, now).0, wanted);

    let mut ticket = table.begin(Some(two), &change, now);
    assert_eq!(table.deadline(&ticket), Some(now + LEASE_TIME));
    assert!(!table.is_clear(&mut ticket, now + LEASE_TIME - Duration::from_millis(1)));
    assert!(table.is_clear(&mut ticket, now + LEASE_TIME));
    table.finish(ticket);
    assert!(matches!(table.take_notices(one)[..], [Notice::Recall { .. }, Notice::Lost { .. }]));
    assert_eq!(table.size().0, 0, "nothing is left of it");
}

#[test]
fn who_does_not_answer_loses_all() {
    let mut table = LeaseTable::default();
    let mut now = Instant::now();
    let (one, two) = (table.open_session(now), table.open_session(now));
    let file = file(7);
    let _ = table.grant(one, file, Leases::DATA | Leases::WRITE, now);
    let mut ticket = table.begin(Some(two), &[(file, Intent::Look)], now);
    let until = now + FLUSH_TIME;
    while now < until {
        assert!(!table.is_clear(&mut ticket, now), "it is alive, and may still be writing");
        now += Duration::from_secs(5);
        table.renew(one, now);
    }
    assert!(table.is_clear(&mut ticket, now));
    table.finish(ticket);
    assert_eq!(table.held(one, file.key), Leases::empty());
}

#[test]
fn a_lease_on_its_way_is_not_given_back_by_mistake() {
    let mut table = LeaseTable::default();
    let now = Instant::now();
    let one = table.open_session(now);
    let file = file(7);
    let (_, first) = table.grant(one, file, Leases::DATA, now);
    let _ = table.grant(one, file, Leases::DATA, now);
    table.returned(one, file.key, Leases::DATA, first);
    assert_eq!(table.held(one, file.key), Leases::DATA);
}

#[test]
fn an_owner_that_lets_a_recall_lapse_makes_others_wait_once() {
    let (mut table, mut now) = (LeaseTable::default(), Instant::now());
    let ada = [(); 2].map(|()| table.open_session_of("ada", Path::new("/a"), now));
    let bob = table.open_session_of("bob", Path::new("/a/sub"), now);
    let lapsing = |table: &mut LeaseTable, number, now| {
        let granted = ada.map(|session| table.grant(session, file(number), Leases::DATA, now).0);
        granted.iter().all(|leases| *leases == Leases::DATA)
    };
    assert!(lapsing(&mut table, 1, now) && lapsing(&mut table, 2, now));
    let change = |number| (file(number), Intent::Change(Leases::DATA));
    let mut ticket = table.begin(Some(bob), &[change(1)], now);
    assert!(!table.is_clear(&mut ticket, now));
    for _ in 0..4 {
        now += ANSWER_TIME / 4;
        ada.iter().chain([&bob]).for_each(|session| table.renew(*session, now));
    }
    assert!(table.is_clear(&mut ticket, now));
    table.finish(ticket);
    // All that its owner had is gone, and it gets nothing more that others would have to wait for.
    let mut ticket = table.begin(Some(bob), &[change(2)], now);
    assert!(table.is_clear(&mut ticket, now));
    table.finish(ticket);
    assert!(!lapsing(&mut table, 3, now));
    assert!(table.take_notices(ada[1]).iter().any(|notice| matches!(notice, Notice::Lost { .. })));
    // Others are not affected, and it is for a time.
    assert_eq!(table.grant(bob, file(3), Leases::DATA, now).0, Leases::DATA);
    now += LAPSED_TIME;
    ada.iter().for_each(|session| table.renew(*session, now));
    assert_eq!(table.grant(ada[0], file(4), Leases::DATA, now).0, Leases::DATA);
}

#[test]
fn a_flush_is_of_its_trees_and_takes_its_time_at_most() {
    let (mut table, mut now) = (LeaseTable::default(), Instant::now());
    let ada = table.open_session_of("ada", Path::new("/a"), now);
    assert_eq!(table.grant(ada, file(1), Leases::WRITE, now).0, Leases::WRITE);
    let mut other = flush_of(&mut table, |tree| overlap(tree, Path::new("/b")), RUN_TIME, now);
    assert!(table.is_clear(&mut other, now));
    // Somebody waits already, for longer.
    let mut look = table.begin(None, &[(file(1), Intent::Look)], now);
    let mut shared = flush_of(&mut table, |tree| overlap(tree, Path::new("/a/sub")), RUN_TIME, now);
    assert!(!table.is_clear(&mut shared, now));
    now += RUN_TIME;
    assert!(table.is_clear(&mut shared, now) && table.is_clear(&mut look, now));
    assert!(table.take_notices(ada).iter().any(|notice| matches!(notice, Notice::Lost { .. })));
    [other, look, shared].into_iter().for_each(|ticket| table.finish(ticket));
}

#[test]
fn one_owner_leaves_leases_for_others() {
    let (mut table, now) = (LeaseTable::default(), Instant::now());
    let (ada, bob) = (
        table.open_session_of("ada", Path::new("/"), now),
        table.open_session_of("bob", Path::new("/"), now),
    );
    let limit = MAX_LEASED_FILES as u64;
    let granted = (0..limit)
        .filter(|number| !table.grant(ada, file(*number), Leases::DATA, now).0.is_empty())
        .count();
    assert_eq!(granted, MAX_LEASED_FILES / 2);
    assert_eq!(table.grant(bob, file(limit), Leases::DATA, now).0, Leases::DATA);
    table.end_session(ada);
    assert_eq!(table.leased, 1);
}

/// All steps of a flush.
fn flush_of(
    table: &mut LeaseTable,
    of: impl Fn(&Path) -> bool,
    time: Duration,
    now: Instant,
) -> Ticket {
    let holders = table.writers(None, of);
    for holder in &holders {
        let mut after = table.recall_written(*holder, None, None, now);
        while after.is_some() {
            after = table.recall_written(*holder, None, after, now);
        }
    }
    table.begin_flush(&holders, time, now)
}

/// The indexes agree with the files.
fn check_indexes(table: &LeaseTable) {
    let mut recalls = 0;
    for (id, session) in &table.sessions {
        let (mut rebuilt, mut ends) = (Index::default(), Ends::default());
        table.files.iter().for_each(|(file, held)| rebuilt.insert(*file, *id, held, &mut ends));
        let all = |index: &Index| {
            (
                index.granted.clone(),
                index.writable.clone(),
                index.recalled.clone(),
                index.unwritten.clone(),
            )
        };
        assert_eq!(all(&rebuilt), all(&session.index));
        assert!(ends.recalls.is_subset(&table.ends.recalls));
        recalls += ends.recalls.len();
        assert_eq!(table.writers.contains(id), rebuilt.may_write());
    }
    assert_eq!(recalls, table.ends.recalls.len());
    let total = |count: fn(&Session) -> usize| table.sessions.values().map(count).sum::<usize>();
    assert_eq!(table.leased, total(|session| session.index.len()));
    assert_eq!(table.leased, table.owners.values().map(|owner| owner.files).sum::<usize>());
}

/// A holder of rights to write, and somebody whose flush asks for them.
fn holder_of(files: u64) -> (LeaseTable, SessionId, Instant) {
    let (mut table, now) = (LeaseTable::default(), Instant::now());
    let holder = table.open_session_of("ada", Path::new("/a"), now);
    for number in 0..files {
        assert_eq!(table.grant(holder, file(number), Leases::WRITE, now).0, Leases::WRITE);
    }
    (table, holder, now)
}

#[test]
fn a_flush_of_many_files_lets_others_in_between() {
    let files = 2 * STEP as u64 + 1;
    let (mut table, holder, now) = holder_of(files);
    let mut after = None;
    for recalled in [STEP, STEP, 1] {
        after = table.recall_written(holder, None, after, now);
        assert_eq!(table.take_notices(holder).len(), recalled);
        check_indexes(&table);
    }
    assert_eq!(after, None);
    // Another flush has nothing to look at, and its ticket is as short as for one file.
    let mut tickets = [(); 2].map(|()| flush_of(&mut table, |_| true, FLUSH_TIME, now));
    assert!(table.take_notices(holder).is_empty());
    assert!(tickets.iter().all(|ticket| ticket.awaited.len() == 1));
    for number in 0..files {
        assert!(tickets.iter_mut().all(|ticket| !table.is_clear(ticket, now)), "{number}");
        table.returned(holder, file(number).key, Leases::WRITE, Stamp(u64::MAX));
    }
    assert!(tickets.iter_mut().all(|ticket| table.is_clear(ticket, now)));
    assert!(!table.may_be_held_back(SessionId(0)));
    check_indexes(&table);
}

#[test]
fn what_a_session_remembers_is_recalled_and_told_again_in_steps() {
    let files = STEP as u64 + 1;
    let (mut table, now) = (LeaseTable::default(), Instant::now());
    let own = table.open_session_of("ada", Path::new("/a"), now);
    (0..files).for_each(|number| {
        let _ = table.grant(own, file(number), Leases::DATA, now);
    });
    let after = table.recall_all(own, None, now);
    assert_eq!(table.take_notices(own).len(), STEP);
    assert_eq!(table.recall_all(own, after, now), None);
    assert_eq!(table.take_notices(own).len(), 1);
    let (_, until) = table.missed(own);
    let (first, next) = table.missed_recalls(own, None, until);
    let (rest, end) = table.missed_recalls(own, next, until);
    assert_eq!((first.len(), rest.len(), end), (STEP, 1, None));
}

#[test]
fn who_does_not_answer_gets_a_file_only_so_often() {
    let (mut table, now) = (LeaseTable::default(), Instant::now());
    let own = table.open_session_of("ada", Path::new("/a"), now);
    for _ in 0..MAX_UNANSWERED {
        assert_eq!(table.grant(own, file(1), Leases::DATA, now).0, Leases::DATA);
        assert!(table.changed(file(1).key, Leases::DATA, now));
    }
    assert_eq!(table.grant(own, file(1), Leases::DATA, now).0, Leases::empty());
    table.returned(own, file(1).key, Leases::DATA, Stamp(u64::MAX));
    assert_eq!(table.grant(own, file(1), Leases::DATA, now).0, Leases::DATA);
}

#[test]
fn recalls_without_an_answer_count_as_leases() {
    let (mut table, now) = (LeaseTable::default(), Instant::now());
    let own = table.open_session_of("ada", Path::new("/a"), now);
    let _ = table.grant(own, file(1), Leases::DATA, now);
    assert!(table.changed(file(1).key, Leases::DATA, now));
    assert_eq!(table.leased, 1);
    table.returned(own, file(1).key, Leases::DATA, Stamp(u64::MAX));
    assert_eq!(table.leased, 0);
}

#[test]
fn who_takes_no_notices_is_told_only_what_it_needs() {
    let (mut table, now) = (LeaseTable::default(), Instant::now());
    let own = table.open_session_of("ada", Path::new("/a"), now);
    let (id, then) = (file(1).id, crate::store::Time { seconds: 0, nanoseconds: 0 });
    let (atime, mtime, ctime) = (then, then, then);
    let (mode, uid, gid, links, size, blocks, rdev, version) = (0, 0, 0, 0, 0, 0, 0, 0);
    let kind = crate::store::Kind::Regular;
    let attributes = crate::store::Attributes {
        id,
        kind,
        mode,
        uid,
        gid,
        links,
        size,
        blocks,
        rdev,
        atime,
        mtime,
        ctime,
        version,
        acls: None,
    };
    for _ in 0..=MAX_UNTAKEN {
        table.tell(own, Entry { attributes, leases: Leases::empty(), stamp: Stamp(1) });
    }
    assert_eq!(table.take_notices(own).len(), MAX_UNTAKEN);
}

#[test]
fn an_owner_that_answers_late_again_and_again_makes_others_wait_no_longer_than_its_budget() {
    let (mut table, began) = (LeaseTable::default(), Instant::now());
    let [ada, adas] = [(); 2].map(|()| table.open_session_of("ada", Path::new("/a"), began));
    let at = |seconds| began + Duration::from_secs(seconds);
    // Several that wait at a time count once, and whoever waits for oneself does not.
    assert!(!table.waited("bob", ada, at(0), at(9)));
    assert!(!table.waited("cara", adas, at(1), at(9)));
    assert!(!table.waited("ada", adas, at(10), at(100)));
    // Nor does whoever did not wait until then.
    assert!(!table.waited("bob", ada, at(100), at(50)));
    [ada, adas].iter().for_each(|session| table.renew(*session, at(9)));
    assert_eq!(table.grant(ada, file(1), Leases::WRITE, at(9)).0, Leases::WRITE);
    assert!(table.waited("bob", ada, at(9), at(9) + WAIT_BUDGET - Duration::from_secs(9)));
    // It is treated as one that has not answered.
    assert_eq!(table.held(ada, file(1).key), Leases::empty());
    table.renew(adas, at(16));
    assert_eq!(table.grant(adas, file(1), Leases::DATA, at(16)).0, Leases::empty());
    // The budget is one for so long: seldom waits cost nothing.
    for n in 1..10 {
        let since = at(16) + LAPSED_TIME * n;
        assert!(!table.waited("bob", ada, since, since + WAIT_BUDGET - Duration::from_secs(1)));
    }
}

fn former(name: &str) -> Former {
    Former { name: name.to_owned(), tree: PathBuf::from("/tree") }
}

/// A table after an earlier process with the sessions "ada" and "bob", and their next sessions.
fn after_a_restart(now: Instant) -> (LeaseTable, [SessionId; 2]) {
    let mut table = LeaseTable::starting_at(Stamp(1000));
    table.begin_grace([former("ada"), former("bob")], now);
    let sessions = ["ada", "bob"].map(|name| {
        let session = table.open_session_of(name, Path::new("/tree"), now);
        table.name(session, name);
        session
    });
    (table, sessions)
}

fn may_change(table: &mut LeaseTable, session: SessionId, now: Instant) -> bool {
    let mut ticket = table.begin(Some(session), &[(file(1), Intent::Change(Leases::DATA))], now);
    let is_clear = table.is_clear(&mut ticket, now);
    table.finish(ticket);
    is_clear
}

#[test]
fn after_a_restart_nothing_is_changed_under_a_former_holder() {
    let now = Instant::now();
    let (mut table, [ada, bob]) = after_a_restart(now);
    let everything = Leases::all();
    assert!(!may_change(&mut table, ada, now) && !may_change(&mut table, bob, now));
    assert_eq!(table.grant(ada, file(3), everything, now).0, everything - Leases::WRITE);
    // Looks are nobody's harm.
    let mut look = table.begin(Some(bob), &[(file(1), Intent::Look)], now);
    assert!(table.is_clear(&mut look, now));
    table.finish(look);
    let elsewhere = table.open_session_of("eve", Path::new("/other"), now);
    assert!(may_change(&mut table, elsewhere, now));
    let above = table.open_session_of("eve", Path::new("/"), now);
    assert!(!may_change(&mut table, above, now));
    // The holder is back, and has forgotten: nothing of its own is in its way, and nothing of its
    // own in the other's.
    assert!(table.forgotten(bob, table.missed(bob).0));
    assert!(may_change(&mut table, ada, now) && !may_change(&mut table, bob, now));
    assert!(table.forgotten(ada, table.missed(ada).0));
    assert!(may_change(&mut table, bob, now) && may_change(&mut table, above, now));
    assert!(table.grant(ada, file(2), everything, now).0.contains(Leases::WRITE));
}

#[test]
fn who_does_not_come_back_is_waited_for_as_long_as_leases_last() {
    let now = Instant::now();
    let (mut table, [ada, _]) = after_a_restart(now);
    assert!(!table.forgotten(ada, Stamp(999)), "of an earlier loss");
    for (later, is_over) in [(LEASE_TIME, false), (GRACE_TIME, true)] {
        table.renew(ada, now + later);
        assert_eq!(may_change(&mut table, ada, now + later), is_over);
    }
}
