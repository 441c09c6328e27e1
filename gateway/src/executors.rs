//! Known executors and their warm connections, with each executor's description of itself. A
//! connection is made before the first pipeline needs it, or, for an executor that only an sshfs
//! mount names, by the first pipeline that does. `posh_reach` does the connecting.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError, RwLock},
    time::{Duration, Instant},
};

use fs_mapper::{
    ExecutorName,
    config::{Address, Config, ExecutorConfig, ExecutorOrigin},
};
use posh_proto::executor::Tool;
use posh_reach::{Carrier, Route, Server};
use tokio::{
    sync::{Notify, watch},
    task::AbortHandle,
};

use crate::{
    model::{ExecutorId, LocalReason, ReasonKind},
    shares::Shares,
};

mod description;
mod greeting;

pub use description::Description;
use greeting::{CannotGreet, GREETING_TIMEOUT, greet};

/// Bounds of the pause between attempts, which doubles.
const RETRY_FIRST: Duration = Duration::from_millis(500);
const RETRY_LAST: Duration = Duration::from_secs(20);
/// Pause between attempts to an unconfigured executor: a server counts failed logins.
const UNASKED_PAUSE: Duration = Duration::from_secs(60);
/// Time for which a mount that was written to without pause is likely to be.
const BUSY: Duration = Duration::from_secs(30);
/// Time that the first pipeline waits for a connection in progress.
const PATIENCE: Duration = Duration::from_secs(2);

/// A live connection.
#[derive(Debug)]
pub struct ExecutorConnection {
    /// The client; clones share the connection.
    pub client: Server,
    /// Another one after each start of the executor: what an earlier instance had begun is over.
    pub instance: String,
    /// The executor's commands, by name.
    pub tools: HashMap<String, Tool>,
    /// The newest description, and a turn to ask for another one.
    description: RwLock<Arc<Description>>,
    describing: tokio::sync::Mutex<()>,
    /// Version lines of the executor's commands, by name.
    pub versions: Mutex<HashMap<String, String>>,
    /// Round-trip time.
    pub rtt: Duration,
    /// Process ID of the ssh that carries it.
    pub ssh_process: Option<u32>,
}

impl ExecutorConnection {
    /// The executor's newest description of itself.
    #[must_use]
    pub fn description(&self) -> Arc<Description> {
        Arc::clone(&self.description.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// A recent description, asked for if there is none.
    ///
    /// # Errors
    /// Why there is none.
    pub async fn recent_description(&self) -> Result<Arc<Description>, CannotGreet> {
        let _turn = self.describing.lock().await;
        let known = self.description();
        if known.is_recent() {
            return Ok(known);
        }
        let mut client = self.client.clone();
        let asked = tokio::time::timeout(GREETING_TIMEOUT, Description::ask(&mut client)).await;
        let new = match asked {
            Ok(Ok(new)) => Arc::new(new),
            Ok(Err(status)) => return Err(CannotGreet::Failed(status.message().to_owned())),
            Err(_) => return Err(CannotGreet::Mute),
        };
        *self.description.write().unwrap_or_else(PoisonError::into_inner) = Arc::clone(&new);
        Ok(new)
    }

    /// The newest description; asks for another one, without waiting, if it is not recent.
    #[must_use]
    pub fn description_and_refresh(self: &Arc<Self>) -> Arc<Description> {
        let known = self.description();
        // Who has the turn is asking already.
        if !known.is_recent() && self.describing.try_lock().is_ok() {
            let connection = Arc::clone(self);
            tokio::spawn(async move { connection.recent_description().await });
        }
        known
    }
}

/// State of an executor.
#[derive(Debug, Clone)]
pub enum ExecutorState {
    /// Not needed by any command yet.
    Asleep,
    /// The first attempt is in progress.
    Connecting,
    /// Connected.
    Ready(Arc<ExecutorConnection>),
    /// Unreachable, with the reason.
    Unreachable(String),
}

/// One executor.
#[derive(Debug)]
pub struct Executor {
    /// Index among present and former executors.
    pub id: ExecutorId,
    /// Its name in the mount table.
    pub name: ExecutorName,
    /// Address in the configuration.
    pub address: String,
    /// May receive input that was written elsewhere (`takes_input`).
    pub takes_input: bool,
    /// Limits on the cost of refreshing its mounts.
    pub shares: Shares,
    /// Time until which commands that write on its sshfs mounts run locally.
    busy_until: Mutex<Option<Instant>>,
    route: Route,
    /// Named only by an sshfs mount: not contacted until needed.
    unasked: bool,
    state: watch::Sender<ExecutorState>,
    retry: Notify,
    wanted: Notify,
}

/// All executors of the mount table.
#[derive(Debug, Clone)]
pub struct Executors(Arc<Registry>);

#[derive(Debug)]
struct Registry {
    commands: Arc<Vec<String>>,
    /// Indexed by ID, so nothing is removed: an executor that has left the mount table is retired.
    known: RwLock<Vec<KnownExecutor>>,
}

#[derive(Debug)]
struct KnownExecutor {
    executor: Arc<Executor>,
    task: AbortHandle,
    current: bool,
}

impl Executors {
    /// Starts connecting to each. `commands` are those whose identity matters.
    #[must_use]
    pub fn start(config: &Config, commands: &Arc<Vec<String>>) -> Self {
        let executors =
            Self(Arc::new(Registry { commands: Arc::clone(commands), known: RwLock::default() }));
        executors.update(config);
        executors
    }

    /// Adopts a new mount table: executors with an unchanged route stay connected.
    pub fn update(&self, config: &Config) {
        let mut known = self.0.known.write().unwrap_or_else(PoisonError::into_inner);
        let wanted: Vec<_> = config
            .executors
            .iter()
            .map(|executor| (executor, Route::to(executor, config)))
            .collect();
        let is_same = |old: &KnownExecutor, new: &(&ExecutorConfig, Route)| {
            old.executor.name == new.0.name
                && old.executor.route == new.1
                && old.executor.takes_input == new.0.takes_input
        };
        for old in known.iter_mut().filter(|old| old.current) {
            old.current = wanted.iter().any(|new| is_same(old, new));
            if !old.current {
                old.retire();
            }
        }
        for new in wanted {
            match known.iter_mut().find(|old| is_same(old, &new)) {
                Some(old) if old.current => {}
                // A mount that reappears gets its former executor.
                Some(old) => {
                    *old = KnownExecutor::begin(Arc::clone(&old.executor), &self.0.commands)
                }
                None => {
                    let executor = Executor::new(ExecutorId(known.len()), new.0, new.1);
                    known.push(KnownExecutor::begin(executor, &self.0.commands));
                }
            }
        }
    }

    /// Executor by its ID.
    #[must_use]
    pub fn get(&self, id: ExecutorId) -> Arc<Executor> {
        Arc::clone(&self.0.known.read().unwrap_or_else(PoisonError::into_inner)[id.0].executor)
    }

    /// Executor by its name in the mount table.
    #[must_use]
    pub fn named(&self, name: &ExecutorName) -> Option<Arc<Executor>> {
        self.all().into_iter().find(|e| e.name == *name)
    }

    /// Executors of the current mount table.
    #[must_use]
    pub fn all(&self) -> Vec<Arc<Executor>> {
        let known = self.0.known.read().unwrap_or_else(PoisonError::into_inner);
        known.iter().filter(|k| k.current).map(|k| Arc::clone(&k.executor)).collect()
    }

    /// Largest round-trip time of the connected executors.
    #[must_use]
    pub fn slowest_round_trip(&self) -> Duration {
        let round_trips =
            self.all().into_iter().filter_map(|executor| match &*executor.state.borrow() {
                ExecutorState::Ready(connection) => Some(connection.rtt),
                _ => None,
            });
        round_trips.max().unwrap_or_default()
    }
}

impl KnownExecutor {
    fn begin(executor: Arc<Executor>, commands: &Arc<Vec<String>>) -> Self {
        executor.state.send_replace(executor.at_first());
        let task = tokio::spawn(Arc::clone(&executor).keep_connected(Arc::clone(commands)));
        Self { executor, task: task.abort_handle(), current: true }
    }

    /// Retires an executor; its runs keep their connection.
    fn retire(&self) {
        self.task.abort();
        let why = "it is in the mount table no more";
        self.executor.state.send_replace(ExecutorState::Unreachable(why.to_owned()));
    }
}

impl Executor {
    fn new(id: ExecutorId, config: &ExecutorConfig, route: Route) -> Arc<Self> {
        Arc::new(Self {
            id,
            name: config.name.clone(),
            address: config.address.to_string(),
            takes_input: config.takes_input,
            shares: Shares::default(),
            busy_until: Mutex::default(),
            route,
            unasked: config.origin != ExecutorOrigin::Configured,
            state: watch::Sender::new(ExecutorState::Asleep),
            retry: Notify::new(),
            wanted: Notify::new(),
        })
    }

    fn at_first(&self) -> ExecutorState {
        if self.unasked { ExecutorState::Asleep } else { ExecutorState::Connecting }
    }

    /// Notes that a program of this machine writes through an sshfs mount without pause, so that
    /// the mount can't be made to show at once what commands write on the server.
    pub fn note_busy_mounts(&self) {
        let mut until = self.busy_until.lock().unwrap_or_else(PoisonError::into_inner);
        *until = Some(Instant::now() + BUSY);
    }

    /// Returns true for a while after [`Self::note_busy_mounts`].
    #[must_use]
    pub fn has_busy_mounts(&self) -> bool {
        let until = self.busy_until.lock().unwrap_or_else(PoisonError::into_inner);
        until.is_some_and(|until| Instant::now() < until)
    }

    /// Current state.
    #[must_use]
    pub fn state(&self) -> ExecutorState {
        self.state.borrow().clone()
    }

    /// State after an attempt in progress has ended, or after a short timeout.
    pub async fn settled(&self) -> ExecutorState {
        let mut state = self.state.subscribe();
        let settled = state.wait_for(|s| !matches!(s, ExecutorState::Connecting));
        match tokio::time::timeout(PATIENCE, settled).await {
            Ok(Ok(settled)) => settled.clone(),
            _ => ExecutorState::Connecting,
        }
    }

    /// Returns the connection, waiting briefly for one in progress.
    ///
    /// # Errors
    /// Reason for running commands locally.
    pub async fn connection(&self) -> Result<Arc<ExecutorConnection>, LocalReason> {
        self.want();
        match self.settled().await {
            ExecutorState::Ready(connection) => Ok(connection),
            ExecutorState::Unreachable(why) => Err(self.out_of_reach(&why)),
            ExecutorState::Connecting | ExecutorState::Asleep => {
                Err(self.out_of_reach("it has not answered yet"))
            }
        }
    }

    /// Wakes a sleeping executor, which callers wait for. An unreachable one is tried again after
    /// its pause, without callers waiting.
    fn want(&self) {
        self.state.send_if_modified(|state| {
            let asleep = matches!(state, ExecutorState::Asleep);
            if asleep {
                *state = ExecutorState::Connecting;
            }
            asleep
        });
        if self.unasked && !matches!(&*self.state.borrow(), ExecutorState::Ready(_)) {
            self.wanted.notify_one();
        }
    }

    /// Connection to the same executor process as `planned`. A lost connection is not used again,
    /// as a request on it may hang as long again. `None` if there is no such connection now.
    #[must_use]
    pub fn in_place_of(&self, planned: Arc<ExecutorConnection>) -> Option<Arc<ExecutorConnection>> {
        match &*self.state.borrow() {
            ExecutorState::Ready(current) if current.instance == planned.instance => {
                Some(Arc::clone(current))
            }
            _ => None,
        }
    }

    /// Notes a connection that a run found broken, and reconnects.
    pub fn lost(&self, connection: &Arc<ExecutorConnection>, why: &str) {
        if self.broke(connection, why) {
            self.retry.notify_one();
        }
    }

    /// Waits for the connection that follows a lost one.
    pub async fn next_connection(&self, lost: &Arc<ExecutorConnection>) -> Arc<ExecutorConnection> {
        let mut state = self.state.subscribe();
        loop {
            self.want();
            let other =
                |s: &ExecutorState| matches!(s, ExecutorState::Ready(c) if !Arc::ptr_eq(c, lost));
            if let Ok(ExecutorState::Ready(connection)) = state.wait_for(other).await.as_deref() {
                return Arc::clone(connection);
            }
        }
    }

    /// Notes a broken connection; returns true if it was the current one.
    fn broke(&self, connection: &Arc<ExecutorConnection>, why: &str) -> bool {
        let is_current =
            matches!(&*self.state.borrow(), ExecutorState::Ready(c) if Arc::ptr_eq(c, connection));
        if is_current {
            tracing::warn!(executor = %self.name, why, "connection lost");
            self.state.send_replace(ExecutorState::Unreachable(why.to_owned()));
        }
        is_current
    }

    /// Returns true if the executor serves one connection only, as if started by ssh: another
    /// connection reaches another executor.
    #[must_use]
    pub fn ends_with_connection(&self) -> bool {
        matches!(self.route.address, Address::Ssh(_))
    }

    fn out_of_reach(&self, why: &str) -> LocalReason {
        let Self { name, address, .. } = self;
        ReasonKind::Executor.because(format!("executor {name} at {address} is not in reach: {why}"))
    }

    async fn keep_connected(self: Arc<Self>, commands: Arc<Vec<String>>) {
        let mut pause = RETRY_FIRST;
        loop {
            if self.unasked {
                self.wanted.notified().await;
            }
            match greet(&self.route, &commands).await {
                Ok((connection, carrier)) => {
                    tracing::info!(
                        executor = %self.name,
                        address = self.address,
                        rtt = ?connection.rtt,
                        "connected"
                    );
                    pause = RETRY_FIRST;
                    let began = Instant::now();
                    self.keep(Arc::new(connection), carrier).await;
                    if self.unasked {
                        self.state.send_replace(ExecutorState::Asleep);
                    }
                    // Usually a single link broke; pause if connections break at once.
                    if began.elapsed() >= RETRY_FIRST {
                        continue;
                    }
                }
                Err(why) => {
                    self.note_failure(&why.to_string());
                    pause = if self.unasked { UNASKED_PAUSE } else { pause };
                }
            }
            let _ = tokio::time::timeout(pause, self.retry.notified()).await;
            pause = (pause * 2).min(RETRY_LAST);
        }
    }

    /// Keeps the connection until it is reported broken, or breaks.
    async fn keep(&self, connection: Arc<ExecutorConnection>, mut carrier: Carrier) {
        self.state.send_replace(ExecutorState::Ready(Arc::clone(&connection)));
        tokio::select! {
            () = self.retry.notified() => {}
            why = carrier.ended() => drop(self.broke(&connection, &why)),
        }
    }

    fn note_failure(&self, why: &str) {
        let known = matches!(&*self.state.borrow(), ExecutorState::Unreachable(old) if old == why);
        if !known {
            tracing::warn!(executor = %self.name, address = self.address, why, "not in reach");
        }
        self.state.send_replace(ExecutorState::Unreachable(why.to_owned()));
    }
}
