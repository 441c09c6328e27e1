//! The store over a connection to an executor (`volume.proto`): it repeats calls after a broken
//! connection, renews leases, and transfers data in pieces. The user of it provides a
//! [`Connector`].
//!
//! Invariant: all answers are of one machine, and no call reaches another one. Each connection
//! begins with the server's identity (`Welcome`), and becomes the present one, which calls, reads
//! and writes use, only if that is the first one's. Until then the server counts as unreachable.
//!
//! * `link`: the connection, with reconnects; `calls`: pending calls and open files; `checked`:
//!   validation of answers; `transfer`: bulk data

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

/// Interval of heartbeats: three may be lost before leases expire.
const HEARTBEAT: Duration = Duration::from_millis(2500);
/// Time for invalidating all files of a volume in the kernel.
const FORGET_TIME: Duration = Duration::from_millis(1500);
/// Length of a session's name, which can't be guessed.
const NAME_BYTES: usize = 16;
/// Size of the queue of notices; when it is full, the connection isn't read.
const NOTICES: usize = 4096;

/// Makes connections to the executor.
#[async_trait]
pub trait Connector: Send + Sync + 'static {
    /// Returns a channel, which may be shared with others. Called again after a failure of the last
    /// one.
    ///
    /// # Errors
    /// See [`CannotConnect`].
    async fn connect(&self) -> Result<Channel, CannotConnect>;

    /// Completes with the reason when the last channel should be replaced although it works.
    async fn worn(&self) -> String {
        std::future::pending().await
    }
}

/// Error of [`Connector::connect`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CannotConnect {
    /// The executor is unreachable; the reason in a sentence.
    #[error("{0}")]
    Unreachable(String),
    /// Its address leads to another server, for which cached data and unsent writes are not meant.
    #[error("there is another server at its address now; unmount the volume and mount it anew")]
    OtherServer,
    /// Its name or address leads to another machine.
    #[error(
        "its name leads to another machine now, or the machine has another host name or \
         /etc/machine-id (one without that file, after a restart); the volume goes on when it \
         leads back; to use that machine, unmount it and mount it anew"
    )]
    OtherMachine,
}

/// Timeout of a volume's operations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Patience {
    /// Time without the executor after which operations fail with `ETIMEDOUT`. `None`: they wait
    /// for ever.
    pub deadline: Option<Duration>,
}

impl Default for Patience {
    fn default() -> Self {
        Self { deadline: Some(Duration::from_secs(30)) }
    }
}

/// A session with an executor. [`Remote::close`] ends it; after a mere drop it expires at the
/// executor.
#[derive(Debug)]
pub struct Remote {
    shared: Arc<Shared>,
    link: JoinHandle<()>,
    listener: Mutex<Option<mpsc::Receiver<Notice>>>,
}

/// Error of [`Remote::open`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("cannot open the volume {export}: {why}")]
pub struct CannotOpen {
    export: String,
    why: String,
}

/// State shared by the link and the calls.
pub(crate) struct Shared {
    name: Bytes,
    export: String,
    /// True if attributes are to include ACLs.
    tell_acls: bool,
    patience: Patience,
    connector: Arc<dyn Connector>,
    calls: Mutex<Calls>,
    notices: mpsc::Sender<Notice>,
    /// True if the notices have a listener, which may cache data.
    has_listener: AtomicBool,
    /// The present connection.
    connection: watch::Sender<Connection>,
    reconnects: AtomicU64,
}

/// State of the connection to the executor.
#[derive(Clone, Default)]
pub(crate) struct Connection {
    client: Option<VolumeClient<Channel>>,
    outgoing: Option<mpsc::Sender<ToVolume>>,
    /// Number of the executor's session: a new one does not know the handles of the last.
    epoch: u64,
    /// First session since which the executor knows changes by their numbers, and doesn't perform
    /// one twice.
    since: u64,
    root: FileId,
    watched: Watched,
    read_only: bool,
    fault: Option<String>,
    /// True if the executor has refused: a retry is useless.
    is_refused: bool,
    heard: Option<Instant>,
    /// The last loss of all leases that the listener knows of.
    lost: Stamp,
    /// The executor's machine.
    machine: Bytes,
    /// Stamp by which the executor distinguishes this session from others of its name.
    opened: Stamp,
    valid_until: Option<Instant>,
    /// Stamp below which all leases have ended, whether or not the listener knows.
    valid_above: Stamp,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("export", &self.export).finish_non_exhaustive()
    }
}

impl Remote {
    /// Opens a session. Must be called inside a Tokio runtime.
    ///
    /// # Errors
    /// [`CannotOpen`] if the executor is unreachable or refuses. Later failures lead to reconnects.
    pub async fn open(
        connector: Arc<dyn Connector>,
        export: &str,
        patience: Patience,
    ) -> Result<Self, CannotOpen> {
        Self::open_for(connector, export, patience, Users::Own).await
    }

    /// Like [`Remote::open`], for a mount of these users: for [`Users::All`] attributes include
    /// ACLs.
    ///
    /// # Errors
    /// Those of [`Remote::open`].
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
            Ok(Err(error)) => Err(failed(error.to_string())),
            Err(_) => Err(failed("it ended".to_owned())),
        }
    }

    /// Returns the session's name at the executor. It is a secret: it allows to use the session.
    #[must_use]
    pub fn session(&self) -> Bytes {
        self.shared.name.clone()
    }

    /// Returns the stamp by which the executor distinguishes the session whose directory is shown
    /// from others of its name.
    #[must_use]
    pub fn opened(&self) -> Stamp {
        self.shared.connection.borrow().opened
    }

    /// Returns the identity of the server's machine, which is the same at each reconnection.
    #[must_use]
    pub fn machine(&self) -> Bytes {
        self.shared.connection.borrow().machine.clone()
    }

    /// Returns true if the export is read-only.
    #[must_use]
    pub fn is_read_only(&self) -> bool {
        self.shared.connection.borrow().read_only
    }

    /// Ends the session at once: its files are closed, and its locks and leases released, so that
    /// no other session has to wait for their expiry. The store is unusable afterwards.
    pub async fn close(&self) {
        let outgoing = self.shared.connection.borrow().outgoing.clone();
        if let Some(outgoing) = outgoing {
            let bye = to_volume::Kind::Bye(posh_proto::volume::Nothing {});
            let _ = outgoing.send(ToVolume { kind: Some(bye) }).await;
            // The executor closes the stream, which ends the link.
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
        // One event per round trip.
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

    /// Returns a time before the server's leases expire, so that the kernel's caches can be
    /// invalidated before.
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
    /// Completes when the executor has refused, or has been unreachable for longer than the
    /// deadline, if there is one.
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
            // An idle connection receives only heartbeats.
            let deadline = if is_there { deadline.max(2 * HEARTBEAT) } else { deadline };
            // The deadline counts from the last message, also for a call that begins later.
            let since = heard.unwrap_or(began);
            let Some(left) = deadline.checked_sub(since.elapsed()).filter(|left| !left.is_zero())
            else {
                return;
            };
            let _ = tokio::time::timeout(left, connection.changed()).await;
        }
    }

    /// Completes when that connection is no longer the present one.
    async fn is_replaced(&self, connection: &Connection) {
        let Some(its) = &connection.outgoing else { return };
        let is_other =
            |now: &Connection| !now.outgoing.as_ref().is_some_and(|now| now.same_channel(its));
        // The sender lives as long as `self`.
        let _ = self.connection.subscribe().wait_for(is_other).await;
    }

    /// Waits for a connection.
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

/// Returns a random name.
fn new_name() -> io::Result<Bytes> {
    let mut name = [0; NAME_BYTES];
    std::fs::File::open("/dev/urandom")?.read_exact(&mut name)?;
    Ok(Bytes::copy_from_slice(&name))
}

/// Messages on a session's stream.
type Incoming = tonic::Streaming<FromVolume>;
