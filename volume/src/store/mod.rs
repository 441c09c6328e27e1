//! The interface between a volume and the server of its files: the trait [`Store`] and its types. A
//! [`Store`] value is one session: leases, handles and locks belong to it and end with it.
//!
//! A small operation is a [`Store::call`]: one request, one answer. Concurrent calls have no order
//! but that of their answers. [`Store::read`] and [`Store::write`] move data, in batches over many
//! files.
//!
//! # Caching
//!
//! Every answer about a file says which [`Leases`] go with it. Under a lease the caller may answer
//! from its cache until the lease is recalled ([`Store::notices`]), has been given back
//! ([`Op::Return`]), or expires ([`Store::valid_until`]). All leases of a session expire at the
//! same time, which the store itself extends while it is in touch with the server.
//!
//! A recall may overtake an earlier answer, and an answer an earlier recall. So both carry a
//! [`Stamp`]: an answer with stamp `a` about a file must not be cached once a recall of that file
//! with a stamp above `a` has been seen; it may still be given to the caller. Bulk data are
//! stamped, too.
//!
//! A session that changes a file waits for [`Op::Return`] as the answer to the recall. So answering
//! a recall must not wait for a call of one's own: two sessions that create names in one directory
//! would deadlock.
mod answer;
mod bulk;
mod file;
mod op;

pub use answer::*;
pub use bulk::*;
pub use file::*;
pub use op::*;

use std::{
    fmt,
    pin::Pin,
    sync::Arc,
    time::{Duration, Instant},
};

use async_trait::async_trait;
use bitflags::bitflags;
pub use nix::errno::Errno;
use tokio_stream::Stream;

/// Pieces of one [`Store::read`], as they arrive.
pub type Pieces = Pin<Box<dyn Stream<Item = Result<Piece, Errno>> + Send>>;

/// Stream of the server's notices.
pub type Notices = Pin<Box<dyn Stream<Item = Notice> + Send>>;

/// A session with the server of a volume's files.
#[async_trait]
pub trait Store: Send + Sync + 'static {
    /// Returns the volume's root directory. It is another one when the server's path of the export
    /// leads to another directory; all leases have ended then, and nothing of the new one was
    /// answered before.
    fn root(&self) -> FileId;

    /// Performs one operation. Dropping the future cancels a wait ([`Op::Lock`]), but not
    /// necessarily a change.
    ///
    /// # Errors
    /// The error number of the corresponding system call; `ESTALE` if the file is no longer known
    /// (walk to it again), `EIO` or `ETIMEDOUT` if the server is unreachable, `EOPNOTSUPP` if the
    /// store doesn't support the operation.
    async fn call(&self, caller: &Caller, op: Op) -> Result<Answer, Errno>;

    /// Reads parts of many files, all in one request. Pieces of one part come in order and without
    /// gaps; those of different parts interleave in any order. [`Piece::is_last`] ends a part:
    /// short at the end of the file. A hole reads as zeros. An error of a part is a piece of its
    /// own; an error of the stream ends it.
    async fn read(&self, caller: &Caller, parts: Vec<ReadPart>) -> Pieces;

    /// Performs writes, all in one request, in the given order; a failed one doesn't stop the rest.
    /// The results are in the same order. Every later call of any session sees an answered write.
    ///
    /// # Errors
    /// The whole request is lost. All, some or none of it may have been performed.
    async fn write(
        &self,
        caller: &Caller,
        writes: Vec<Write>,
    ) -> Result<Vec<Result<Entry, Errno>>, Errno>;

    /// Returns the notices, in order. There is one listener: a second call gets an empty stream. A
    /// session without a listener gets no leases.
    fn notices(&self) -> Notices;

    /// Returns the time at which the session's leases expire, unless it is extended. An operation
    /// that began and ended before needs no further check.
    fn valid_until(&self) -> Instant;

    /// Returns the stamp below which all leases have ended, also before [`Notice::Lost`] was
    /// processed. Read [`Self::valid_until`] first: it is never extended before this stamp is set.
    fn valid_above(&self) -> Stamp {
        Stamp::default()
    }

    /// Returns the lifetime of a single lease, from its answer on, if changes by other programs on
    /// the server aren't watched ([`Watched::LeaseEnd`]). `None`: only [`Self::valid_until`] limits
    /// it.
    fn lease_limit(&self) -> Option<Duration> {
        None
    }

    /// Returns the state for `posh volumes`.
    fn state(&self) -> StoreState;
}

/// Identity that an operation is performed as, and the owner of new files. A store whose session is
/// tied to one account of its machine performs everything as that account.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Caller {
    /// The uid.
    pub uid: u32,
    /// The primary gid.
    pub gid: u32,
    /// The supplementary groups.
    pub groups: Arc<[u32]>,
    /// Not the user who mounted the volume. Where all callers act as one account, a guest gives its
    /// files no set-user-ID and set-group-ID bits, and takes them off what he writes.
    pub is_guest: bool,
}

/// Sequence number of answers and recalls of one session: later ones have higher numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Stamp(pub u64);

bitflags! {
    /// Parts of a file that the lease's holder may cache.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
    pub struct Leases: u32 {
        /// Its attributes, its extended attributes, and where a symbolic link leads.
        const ATTRIBUTES = 1;
        /// A directory's names: which there are, which there are not, and what each means.
        const ENTRIES = 2;
        /// Its contents.
        const DATA = 4;
        /// Write-back: its contents and attributes may be changed in the cache and written later;
        /// no other session has a lease of it. A recall (for a reader) is answered when all is
        /// written; if the other leases are recalled with it, nothing may stay cached. Of a
        /// directory: names may be created in the cache, too. Only the session that has just
        /// created the directory gets it.
        const WRITE = 8;
    }
}

/// Leases given back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Returned {
    /// The file.
    pub file: FileId,
    /// Its leases.
    pub leases: Leases,
    /// The recall's stamp. For leases that are returned unasked, the highest stamp seen in an
    /// answer about the file, so that a lease in flight is not returned by mistake.
    pub stamp: Stamp,
}

/// Message that the server sends unasked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "fields are explained with the variant")]
pub enum Notice {
    /// These leases are recalled: drop the cached data, and answer with [`Op::Return`] (with this
    /// stamp). The writer waits for that.
    Recall { file: FileId, leases: Leases, stamp: Stamp },
    /// All leases have ended, by expiry or because the server has restarted: drop the cache, and
    /// answer with [`Op::Forgotten`] (with this stamp). Open handles and locks may be lost, too.
    Lost { stamp: Stamp },
    /// Attributes of a file after the change that a [`Notice::Recall`] was for, with unrequested
    /// leases, as in an answer.
    Is(Entry),
    /// All notices up to that stamp have been sent: the changes by an earlier command on the server
    /// are known.
    All { stamp: Stamp },
}

/// State of a store.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct StoreState {
    /// True if the server answered the last request.
    pub in_reach: bool,
    /// Method by which changes by other programs on the server are noticed.
    pub watched: Watched,
    /// Number of requests without an answer.
    pub under_way: u64,
    /// Number of reconnects.
    pub reconnects: u64,
    /// The last error's message.
    pub fault: Option<String>,
}

/// Method by which changes by other programs on the server are noticed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Watched {
    /// By fanotify(7), at once.
    Fanotify,
    /// By inotify(7), at once.
    Inotify,
    /// Not at all: they show when a lease expires.
    #[default]
    LeaseEnd,
}

impl fmt::Display for Watched {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Fanotify => "fanotify",
            Self::Inotify => "inotify",
            Self::LeaseEnd => "lease end",
        })
    }
}
