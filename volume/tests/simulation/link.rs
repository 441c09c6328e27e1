//! The way between a gateway and the server, as `posh_volume::remote` makes it: connections that
//! break at any message, requests made again with their numbers on the next one, open files opened
//! again in the next session, leases that end by the client's clock.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use posh_volume::{Errno, Store, leases::LEASE_TIME, store::*};
use tokio::{
    sync::mpsc,
    time::{Instant, sleep, sleep_until, timeout_at},
};
use tokio_stream::{StreamExt as _, wrappers::ReceiverStream};

use crate::{
    chance::Chance,
    server::{Fault, Request, Response, Served, Server, Site},
    shared::Shared,
};

/// As `posh_volume::remote` has them.
const HEARTBEAT: Duration = Duration::from_millis(2500);
const PATIENCE: Duration = Duration::from_secs(30);
const SILENCE: Duration = Duration::from_secs(10);
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const NOTICES: usize = 4096;
/// No message is faster: a lease begins at the server later than its client counts from, by this,
/// which is what clocks may drift apart in [`LEASE_TIME`].
const LEAST_DELAY: Duration = Duration::from_millis(1);
/// How much faster or slower a client's clock may be, in parts of a million.
const DRIFT_PPM: u64 = 50;

#[derive(Clone)]
struct Connection {
    number: u64,
    /// The server's session of that number.
    epoch: u64,
    opened: Stamp,
    to: Option<(Arc<Server>, Arc<Served>)>,
    heard: Instant,
}

#[derive(Clone, Copy)]
struct Opened {
    file: FileId,
    flags: OpenFlags,
    handle: (u64, Handle),
}

pub struct Link {
    site: Arc<Site>,
    /// One for each process of a gateway.
    client: u64,
    root: FileId,
    /// In parts of a million of a second.
    drift: i64,
    chance: Mutex<Chance>,
    connection: Shared<Connection>,
    /// Messages wait until then.
    held_until: Mutex<Instant>,
    /// There is no connection until then.
    cut_until: Mutex<Instant>,
    valid_until: Mutex<Instant>,
    handles: Mutex<(u64, BTreeMap<u64, Opened>)>,
    numbers: AtomicU64,
    notices: mpsc::Sender<Notice>,
    listener: Mutex<Option<mpsc::Receiver<Notice>>>,
    dead: Shared<bool>,
}

impl Link {
    pub async fn connect(site: &Arc<Site>, client: u64, seed: u64) -> Arc<Self> {
        let mut chance = Chance::new(seed, 1000 + client);
        let drift = i64::try_from(chance.below(2 * DRIFT_PPM + 1)).unwrap()
            - i64::try_from(DRIFT_PPM).unwrap();
        let (notices, listener) = mpsc::channel(NOTICES);
        let root = loop {
            match site.running() {
                Some(server) => break server.welcome(client, Stamp::default()).0.session.root(),
                None => sleep(FIRST_PAUSE).await,
            }
        };
        let now = Instant::now();
        let link = Arc::new(Self {
            site: Arc::clone(site),
            client,
            root,
            drift,
            chance: Mutex::new(chance),
            connection: Shared::new(Connection {
                number: 0,
                epoch: 0,
                opened: Stamp::default(),
                to: None,
                heard: now,
            }),
            held_until: Mutex::new(now),
            cut_until: Mutex::new(now),
            valid_until: Mutex::new(now),
            handles: Mutex::default(),
            numbers: AtomicU64::new(0),
            notices,
            listener: Mutex::new(Some(listener)),
            dead: Shared::new(false),
        });
        tokio::spawn(Arc::clone(&link).keep());
        link.is_up().await;
        link
    }

    /// Completes when there is a connection.
    pub async fn is_up(&self) {
        self.connection.when(|connection| connection.to.is_some()).await;
    }

    /// The gateway is no more: nothing that it asks for is answered.
    pub fn kill(&self) {
        self.dead.set(true);
        self.connection.modify(|connection| connection.to = None);
    }

    fn is_dead(&self) -> bool {
        self.dead.get()
    }

    /// The connection breaks.
    pub fn cut(&self, time: Duration) {
        self.site.log.note(&format!("link {} is cut for {time:?}", self.client));
        *self.cut_until.lock().unwrap() = Instant::now() + time;
        self.connection.modify(|connection| {
            if connection.to.take().is_some() {
                connection.heard = Instant::now();
            }
        });
    }

    /// Nothing comes through for a while, and nobody notices at first.
    pub fn hold(self: &Arc<Self>, time: Duration) {
        self.site.log.note(&format!("link {} is held for {time:?}", self.client));
        {
            let mut held_until = self.held_until.lock().unwrap();
            *held_until = (Instant::now() + time).max(*held_until);
        }
        if time > SILENCE {
            let link = Arc::clone(self);
            tokio::spawn(async move {
                sleep(SILENCE).await;
                if Instant::now() < *link.held_until.lock().unwrap() {
                    link.cut(time - SILENCE);
                }
            });
        }
    }

    pub fn heal(&self) {
        *self.held_until.lock().unwrap() = Instant::now();
        *self.cut_until.lock().unwrap() = Instant::now();
    }

    /// Keeps a connection, for as long as the gateway lives.
    async fn keep(self: Arc<Self>) {
        while !self.is_dead() {
            let cut_until = *self.cut_until.lock().unwrap();
            let held_until = *self.held_until.lock().unwrap();
            if Instant::now() < cut_until.max(held_until) {
                sleep(FIRST_PAUSE).await;
                continue;
            }
            let said = Instant::now();
            let delay = self.delay();
            sleep(delay).await;
            let Some(server) = self.site.running().filter(|_| !self.is_dead()) else {
                sleep(FIRST_PAUSE).await;
                continue;
            };
            self.take_up(&server, said).await;
            self.attend().await;
            sleep(FIRST_PAUSE).await;
        }
    }

    async fn take_up(self: &Arc<Self>, server: &Arc<Server>, said: Instant) {
        let before = self.connection.get();
        let (served, is_resumed) = server.welcome(self.client, before.opened);
        let is_lost =
            self.site.is_rough.load(Ordering::Relaxed) && self.chance.lock().unwrap().happens(100);
        if is_lost {
            self.site.log.note(&format!("link {} loses its welcome", self.client));
            return;
        }
        let opened = served.session.opened();
        let is_new = !is_resumed || before.epoch == 0;
        if is_new {
            let listened = Arc::clone(&served);
            tokio::spawn(Arc::clone(self).pass_notices(listened, before.epoch + 1));
            if before.epoch > 0 {
                let (lost, _) = served.session.missed();
                let _ = self.notices.send(Notice::Lost { stamp: lost }).await;
            }
        }
        self.is_valid_from(said);
        let epoch = before.epoch + u64::from(is_new);
        self.site.log.note(&format!("link {} is up, session {epoch}", self.client));
        self.connection.modify(|connection| {
            connection.number += 1;
            connection.epoch = epoch;
            connection.opened = opened;
            connection.to = Some((Arc::clone(server), served));
            connection.heard = Instant::now();
        });
    }

    /// Signs of life, until it breaks.
    async fn attend(&self) {
        let connection = self.connection.get();
        let Some((server, served)) = connection.to.clone() else { return };
        loop {
            tokio::select! {
                biased;
                () = self.is_replaced(&connection) => return,
                () = sleep(HEARTBEAT) => {}
            }
            let said = Instant::now();
            if !self.passes(&connection).await {
                return;
            }
            if !self.site.running().is_some_and(|running| Arc::ptr_eq(&running, &server)) {
                return self.cut(Duration::ZERO);
            }
            served.is_alive();
            if !self.passes(&connection).await {
                return;
            }
            self.is_valid_from(said);
        }
    }

    /// In their order, and all of them: what is not heard because of a break is told on the next
    /// connection.
    async fn pass_notices(self: Arc<Self>, served: Arc<Served>, epoch: u64) {
        let mut notices = served.session.notices();
        while let Some(notice) = notices.next().await {
            loop {
                let is_there = |connection: &Connection| {
                    connection.epoch > epoch || connection.to.is_some() && connection.epoch == epoch
                };
                let now = self.connection.when(is_there).await;
                if now.epoch > epoch || self.is_dead() {
                    return;
                }
                if self.passes(&now).await {
                    break;
                }
            }
            if let (Notice::Recall { file, leases, stamp }, Some(Fault::StaleRead)) =
                (&notice, self.site.fault)
                && !leases.contains(Leases::WRITE)
            {
                served.session.give_back(vec![Returned {
                    file: *file,
                    leases: *leases,
                    stamp: *stamp,
                }]);
                continue;
            }
            if self.notices.send(notice).await.is_err() {
                return;
            }
        }
    }

    fn is_valid_from(&self, said: Instant) {
        let lease = i64::try_from(LEASE_TIME.as_micros()).unwrap();
        let lease =
            Duration::from_micros(u64::try_from(lease + lease * self.drift / 1_000_000).unwrap());
        *self.valid_until.lock().unwrap() = said + lease;
    }

    fn delay(&self) -> Duration {
        let mut chance = self.chance.lock().unwrap();
        if !self.site.is_rough.load(Ordering::Relaxed) {
            return LEAST_DELAY;
        }
        let most = match chance.below(20) {
            0 => Duration::from_millis(900),
            1..5 => Duration::from_millis(50),
            _ => Duration::from_millis(4),
        };
        chance.between(LEAST_DELAY, most)
    }

    /// Delivers a message after a delay; returns false if its connection breaks before.
    async fn passes(&self, connection: &Connection) -> bool {
        let delay = self.delay();
        let cut = {
            let mut chance = self.chance.lock().unwrap();
            let is_cut = self.site.is_rough.load(Ordering::Relaxed) && chance.happens(4);
            is_cut.then(|| chance.between(Duration::from_millis(10), Duration::from_secs(3)))
        };
        if let Some(time) = cut {
            if self.is_replaced_now(connection) {
                return false;
            }
            self.cut(time);
            return false;
        }
        let arrives_at = (Instant::now() + delay).max(*self.held_until.lock().unwrap());
        tokio::select! {
            biased;
            () = self.is_replaced(connection) => false,
            () = sleep_until(arrives_at) => true,
        }
    }

    fn is_replaced_now(&self, connection: &Connection) -> bool {
        let now = self.connection.borrow();
        now.number != connection.number || now.to.is_none()
    }

    async fn is_replaced(&self, connection: &Connection) {
        let is_other = |now: &Connection| now.number != connection.number || now.to.is_none();
        self.connection.when(is_other).await;
    }

    async fn connected(&self) -> Result<Connection, Errno> {
        let until = self.connection.borrow().heard + PATIENCE;
        let found =
            timeout_at(until, self.connection.when(|connection| connection.to.is_some())).await;
        if self.is_dead() {
            std::future::pending::<()>().await;
        }
        found.map_err(|_| Errno::ETIMEDOUT)
    }

    /// Until there is an answer. A change that may have happened in an earlier session is not made
    /// again.
    async fn deliver(&self, request: Request) -> Result<Response, Errno> {
        let (is_change, is_repeatable) = match &request {
            Request::Call(_, op) => (op.is_change(), op.is_repeatable()),
            Request::Write(..) => (true, false),
            Request::Read(..) => (false, true),
        };
        let mut number = self.numbers.fetch_add(1, Ordering::Relaxed);
        let mut sent_in = None;
        loop {
            let connection = self.connected().await?;
            if sent_in.is_some_and(|epoch| epoch != connection.epoch) {
                if !is_repeatable {
                    return Err(Errno::EIO);
                }
                number = self.numbers.fetch_add(1, Ordering::Relaxed);
            }
            if !is_change {
                number = self.numbers.fetch_add(1, Ordering::Relaxed);
            }
            let mut its = request.clone();
            match self.give_its_handles(&mut its, &connection).await {
                Ok(true) => {}
                Ok(false) => continue,
                Err(errno) => return Err(errno),
            }
            sent_in = Some(connection.epoch);
            let Some((server, served)) = connection.to.clone() else { continue };
            if !self.passes(&connection).await {
                continue;
            }
            let response = tokio::select! {
                biased;
                () = self.is_replaced(&connection) => continue,
                response = server.perform(&self.site, &served, number, its) => response,
            };
            let Some(response) = response else {
                // The server has been killed.
                self.cut(Duration::ZERO);
                continue;
            };
            if self.passes(&connection).await {
                if self.is_dead() {
                    std::future::pending::<()>().await;
                }
                return Ok(response);
            }
        }
    }

    /// Puts the server's handles in place of ours, opened again in a new session. `false`: that has
    /// changed meanwhile.
    async fn give_its_handles(
        &self,
        request: &mut Request,
        connection: &Connection,
    ) -> Result<bool, Errno> {
        let (caller, places) = match request {
            Request::Call(caller, Op::Close(handle)) => {
                let opened = self.opened(*handle)?;
                if opened.handle.0 != connection.epoch {
                    return Err(Errno::ESTALE);
                }
                *handle = opened.handle.1;
                let _ = caller;
                return Ok(true);
            }
            Request::Call(caller, op) => (caller.clone(), places(op)),
            Request::Write(caller, writes) => {
                (caller.clone(), writes.iter_mut().filter_map(place_of).collect())
            }
            Request::Read(caller, parts) => {
                (caller.clone(), parts.iter_mut().map(|part| &mut part.place).collect())
            }
        };
        for place in places {
            let Some(handle) = place.handle else { continue };
            let opened = self.opened(handle)?;
            if opened.handle.0 == connection.epoch {
                place.handle = Some(opened.handle.1);
                continue;
            }
            let flags = opened.flags - (OpenFlags::TRUNCATE | OpenFlags::EXCLUSIVE);
            let again =
                Request::Call(caller.clone(), Op::Open { place: opened.file.into(), flags });
            let Response::Call(answer) = Box::pin(self.deliver(again)).await? else {
                return Err(Errno::EPROTO);
            };
            let Answer::Opened { handle: new, .. } = answer? else { return Err(Errno::EPROTO) };
            let epoch = self.connection.borrow().epoch;
            if let Some(opened) = self.handles.lock().unwrap().1.get_mut(&handle.0) {
                opened.handle = (epoch, new);
            }
            if epoch != connection.epoch {
                return Ok(false);
            }
            place.handle = Some(new);
        }
        Ok(true)
    }

    fn opened(&self, handle: Handle) -> Result<Opened, Errno> {
        self.handles.lock().unwrap().1.get(&handle.0).copied().ok_or(Errno::EBADF)
    }
}

fn place_of(write: &mut Write) -> Option<&mut Place> {
    match write {
        Write::At { place, .. } | Write::Append { place, .. } | Write::Set { place, .. } => {
            Some(place)
        }
        Write::Put(_) => None,
    }
}

fn places(op: &mut Op) -> Vec<&mut Place> {
    match op {
        Op::Attributes(place)
        | Op::Set { place, .. }
        | Op::Link { file: place, .. }
        | Op::Sync { place, .. }
        | Op::Allocate { place, .. }
        | Op::Seek { place, .. } => vec![place],
        Op::CopyRange { from, to, .. } => vec![&mut from.file, &mut to.file],
        _ => Vec::new(),
    }
}

#[async_trait]
impl Store for Link {
    fn root(&self) -> FileId {
        self.root
    }

    async fn call(&self, caller: &Caller, op: Op) -> Result<Answer, Errno> {
        let answer = match self.deliver(Request::Call(caller.clone(), op.clone())).await {
            Ok(Response::Call(answer)) => answer,
            Ok(_) => Err(Errno::EPROTO),
            Err(errno) => Err(errno),
        };
        match (&op, answer) {
            (Op::Close(handle), answer) => {
                self.handles.lock().unwrap().1.remove(&handle.0);
                match answer {
                    Err(Errno::ESTALE | Errno::EIO) => Ok(Answer::Done),
                    answer => answer,
                }
            }
            (
                Op::Open { flags, .. } | Op::Create { flags, .. } | Op::CreateWhole { flags, .. },
                Ok(Answer::Opened { handle, entry, parent }),
            ) => {
                let epoch = self.connection.borrow().epoch;
                let mut handles = self.handles.lock().unwrap();
                handles.0 += 1;
                let number = handles.0;
                let opened =
                    Opened { file: entry.attributes.id, flags: *flags, handle: (epoch, handle) };
                handles.1.insert(number, opened);
                Ok(Answer::Opened { handle: Handle(number), entry, parent })
            }
            (_, answer) => answer,
        }
    }

    async fn read(&self, caller: &Caller, parts: Vec<ReadPart>) -> Pieces {
        let pieces = match self.deliver(Request::Read(caller.clone(), parts)).await {
            Ok(Response::Read(pieces)) => pieces,
            Ok(_) => vec![Err(Errno::EPROTO)],
            Err(errno) => vec![Err(errno)],
        };
        Box::pin(tokio_stream::iter(pieces))
    }

    async fn write(
        &self,
        caller: &Caller,
        writes: Vec<Write>,
    ) -> Result<Vec<Result<Entry, Errno>>, Errno> {
        match self.deliver(Request::Write(caller.clone(), writes)).await? {
            Response::Write(results) => results,
            _ => Err(Errno::EPROTO),
        }
    }

    fn notices(&self) -> Notices {
        match self.listener.lock().unwrap().take() {
            Some(listener) => Box::pin(ReceiverStream::new(listener)),
            None => Box::pin(tokio_stream::empty()),
        }
    }

    fn valid_until(&self) -> std::time::Instant {
        self.valid_until.lock().unwrap().into_std()
    }

    fn state(&self) -> StoreState {
        let in_reach = self.connection.borrow().to.is_some();
        // Nothing but the sessions changes the files, so that leases tell of all changes.
        StoreState { in_reach, watched: Watched::Fanotify, ..StoreState::default() }
    }
}
