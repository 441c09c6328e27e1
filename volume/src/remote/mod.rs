//! The store over a connection to an executor (`volume.proto`): calls that survive a broken
//! connection, leases kept alive, bytes in parts. Whoever uses it says how a connection is made
//! ([`Connector`]).
//!
//! * `link`: the connection, made anew as often as needed; `calls`: what has no answer yet;
//!   `transfer`: bytes

mod calls;
mod checked;
mod link;
mod transfer;

use std::{
    io::{self, Read as _},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use async_trait::async_trait;
use bytes::Bytes;
use posh_proto::volume::{FromVolume, ToVolume, to_volume, volume_client::VolumeClient};
use tokio::{
    sync::{mpsc, oneshot, watch},
    task::JoinHandle,
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;

use self::calls::Calls;
use crate::{
    fuse::Users,
    leases::LEASE_TIME,
    store::{
        Answer, Caller, Entry, Errno, FileId, Notice, Notices, Op, Pieces, ReadPart, Stamp, Store,
        StoreState, Watched, Write,
    },
};

/// A sign of life so often: three may be lost before leases end.
const HEARTBEAT: Duration = Duration::from_millis(2500);
/// Time for the kernel to forget all files of a volume.
const FORGET_TIME: Duration = Duration::from_millis(1500);
/// Bytes of a session's name; nobody guesses them.
const NAME_BYTES: usize = 16;
/// Notices that wait for their listener; behind them the executor waits.
const NOTICES: usize = 4096;

/// Makes connections to the executor.
#[async_trait]
pub trait Connector: Send + Sync + 'static {
    /// A channel on which nothing has been sent. It is asked for anew when the last one has failed,
    /// and may be one that others use.
    ///
    /// # Errors
    /// Why not, in a sentence.
    async fn connect(&self) -> Result<Channel, String>;

    /// Completes when the last channel should be made anew although it works, with the reason.
    async fn worn(&self) -> String {
        std::future::pending().await
    }
}

/// How patient a volume is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Patience {
    /// After so long without the executor operations fail with `ETIMEDOUT`. `None`: they wait for
    /// ever.
    pub deadline: Option<Duration>,
}

impl Default for Patience {
    fn default() -> Self {
        Self { deadline: Some(Duration::from_secs(30)) }
    }
}

/// A session with an executor. Dropping it leaves the session to be ended by the executor's clock;
/// [`Remote::close`] ends it.
#[derive(Debug)]
pub struct Remote {
    shared: Arc<Shared>,
    link: JoinHandle<()>,
    listener: Mutex<Option<mpsc::Receiver<Notice>>>,
}

/// Why there is no session.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("cannot open the volume {export}: {why}")]
pub struct CannotOpen {
    export: String,
    why: String,
}

/// What the link and the calls share.
pub(crate) struct Shared {
    name: Bytes,
    export: String,
    /// Attributes are to tell which ACLs there are.
    tell_acls: bool,
    patience: Patience,
    connector: Arc<dyn Connector>,
    calls: Mutex<Calls>,
    notices: mpsc::Sender<Notice>,
    /// Somebody hears the notices, and may remember things.
    has_listener: AtomicBool,
    /// The connection, by its number among all.
    connection: watch::Sender<Connection>,
    reconnects: AtomicU64,
}

/// How the executor is reached.
#[derive(Clone, Default)]
pub(crate) struct Connection {
    client: Option<VolumeClient<Channel>>,
    outgoing: Option<mpsc::Sender<ToVolume>>,
    /// Counts the sessions that there have been on the other side: what one knew, the next does
    /// not.
    epoch: u64,
    /// Since that session changes are known by their numbers: what was begun is not begun again.
    since: u64,
    root: FileId,
    watched: Watched,
    read_only: bool,
    fault: Option<String>,
    /// It is of no use to try again.
    is_refused: bool,
    heard: Option<Instant>,
    /// The last loss of all leases that the listener knows of.
    lost: Stamp,
    /// By which the executor tells this session from others of its name.
    opened: Stamp,
    valid_until: Option<Instant>,
    /// Leases of answers from before have ended, whether or not the listener knows.
    valid_above: Stamp,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("export", &self.export).finish_non_exhaustive()
    }
}

impl Remote {
    /// Opens a session. Must be called inside a runtime.
    ///
    /// # Errors
    /// [`CannotOpen`] when the executor is not in reach or refuses; later losses are mended.
    pub async fn open(
        connector: Arc<dyn Connector>,
        export: &str,
        patience: Patience,
    ) -> Result<Self, CannotOpen> {
        Self::open_for(connector, export, patience, Users::Own).await
    }

    /// As [`Remote::open`], for a mount that these users have: for everybody attributes also tell
    /// which ACLs there are.
    ///
    /// # Errors
    /// As there.
    pub async fn open_for(
        connector: Arc<dyn Connector>,
        export: &str,
        patience: Patience,
        users: Users,
    ) -> Result<Self, CannotOpen> {
        let failed = |why: String| CannotOpen { export: export.to_owned(), why };
        let name = new_name().map_err(|error| failed(format!("no random bytes: {error}")))?;
        let (notices, listener) = mpsc::channel(NOTICES);
        let shared = Arc::new(Shared {
            name,
            export: export.to_owned(),
            tell_acls: users == Users::All,
            patience,
            connector,
            calls: Mutex::default(),
            notices,
            has_listener: false.into(),
            connection: watch::Sender::new(Connection::default()),
            reconnects: AtomicU64::default(),
        });
        let (first, opened) = oneshot::channel();
        let link = tokio::spawn(link::keep(shared.clone(), first));
        match opened.await {
            Ok(Ok(())) => Ok(Self { shared, link, listener: Mutex::new(Some(listener)) }),
            Ok(Err(why)) => Err(failed(why)),
            Err(_) => Err(failed("it ended".to_owned())),
        }
    }

    /// The session's name, by which its executor knows it. Whoever knows it can use the session.
    #[must_use]
    pub fn session(&self) -> Bytes {
        self.shared.name.clone()
    }

    /// Whether nothing can be changed.
    #[must_use]
    pub fn is_read_only(&self) -> bool {
        self.shared.connection.borrow().read_only
    }

    /// Ends the session at once: what it had open is closed, its locks and leases are given back,
    /// and nobody waits for their end. Nothing works any more afterwards.
    pub async fn close(&self) {
        let outgoing = self.shared.connection.borrow().outgoing.clone();
        if let Some(outgoing) = outgoing {
            let bye = to_volume::Kind::Bye(posh_proto::volume::Nothing {});
            let _ = outgoing.send(ToVolume { kind: Some(bye) }).await;
            // The executor ends the stream, and with it the link.
            let mut connection = self.shared.connection.subscribe();
            let ended = connection.wait_for(|connection| connection.outgoing.is_none());
            let _ = tokio::time::timeout(HEARTBEAT, ended).await;
        }
        self.link.abort();
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        self.link.abort();
    }
}

#[async_trait]
impl Store for Remote {
    fn root(&self) -> FileId {
        self.shared.connection.borrow().root
    }

    async fn call(&self, caller: &Caller, op: Op) -> Result<Answer, Errno> {
        // One for each round trip that somebody may wait for.
        tracing::trace!(export = self.shared.export, ?op, "asks");
        self.shared.call(caller, op).await
    }

    async fn read(&self, caller: &Caller, parts: Vec<ReadPart>) -> Pieces {
        tracing::trace!(export = self.shared.export, parts = parts.len(), "reads");
        transfer::read(self.shared.clone(), caller.clone(), parts)
    }

    async fn write(
        &self,
        caller: &Caller,
        writes: Vec<Write>,
    ) -> Result<Vec<Result<Entry, Errno>>, Errno> {
        tracing::trace!(export = self.shared.export, writes = writes.len(), "writes");
        transfer::write(&self.shared, caller, writes).await
    }

    fn notices(&self) -> Notices {
        match self.listener.lock().expect("not poisoned").take() {
            Some(listener) => {
                self.shared.has_listener.store(true, Ordering::Relaxed);
                Box::pin(ReceiverStream::new(listener))
            }
            None => Box::pin(tokio_stream::empty()),
        }
    }

    /// Before the server's leases end: until then the kernel has to have forgotten.
    fn valid_until(&self) -> Instant {
        let valid_until = self.shared.connection.borrow().valid_until;
        valid_until.and_then(|until| until.checked_sub(FORGET_TIME)).unwrap_or_else(Instant::now)
    }

    fn valid_above(&self) -> Stamp {
        self.shared.connection.borrow().valid_above
    }

    fn lease_limit(&self) -> Option<Duration> {
        (self.shared.connection.borrow().watched == Watched::LeaseEnd).then_some(LEASE_TIME)
    }

    fn state(&self) -> StoreState {
        let connection = self.shared.connection.borrow().clone();
        StoreState {
            in_reach: connection.outgoing.is_some(),
            watched: connection.watched,
            under_way: self.shared.calls.lock().expect("not poisoned").under_way(),
            reconnects: self.shared.reconnects.load(Ordering::Relaxed),
            fault: connection.fault,
        }
    }
}

impl Shared {
    /// Completes when the executor has been out of reach for too long; never, where that is no
    /// reason to give up.
    async fn out_of_patience(&self) {
        let began = Instant::now();
        let mut connection = self.connection.subscribe();
        loop {
            let (is_refused, heard, is_there) = {
                let connection = connection.borrow_and_update();
                (connection.is_refused, connection.heard, connection.outgoing.is_some())
            };
            if is_refused {
                return;
            }
            let Some(deadline) = self.patience.deadline else {
                if connection.changed().await.is_err() {
                    return;
                }
                continue;
            };
            // A connection that is idle is heard of with each sign of life.
            let deadline = if is_there { deadline.max(2 * HEARTBEAT) } else { deadline };
            // Who begins when it is long out of reach waits no longer than who was there first.
            let since = heard.unwrap_or(began);
            let Some(left) = deadline.checked_sub(since.elapsed()).filter(|left| !left.is_zero())
            else {
                return;
            };
            let _ = tokio::time::timeout(left, connection.changed()).await;
        }
    }

    /// Completes when that connection is not the session's any more.
    async fn is_replaced(&self, connection: &Connection) {
        let Some(its) = &connection.outgoing else { return };
        let is_other =
            |now: &Connection| !now.outgoing.as_ref().is_some_and(|now| now.same_channel(its));
        // The sender is ours: it does not end.
        let _ = self.connection.subscribe().wait_for(is_other).await;
    }

    /// The connection, when there is one.
    async fn connected(&self) -> Result<Connection, Errno> {
        let mut connection = self.connection.subscribe();
        tokio::select! {
            found = connection.wait_for(|connection| connection.outgoing.is_some()) => {
                found.map(|found| found.clone()).map_err(|_| Errno::EIO)
            }
            () = self.out_of_patience() => Err(Errno::ETIMEDOUT),
        }
    }
}

/// From the kernel.
fn new_name() -> io::Result<Bytes> {
    let mut name = [0; NAME_BYTES];
    std::fs::File::open("/dev/urandom")?.read_exact(&mut name)?;
    Ok(Bytes::copy_from_slice(&name))
}

/// What comes on a session's stream.
type Incoming = tonic::Streaming<FromVolume>;
