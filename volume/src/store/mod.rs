//! What a volume asks of whatever keeps its files: one trait, and the words that it uses. A
//! [`Store`] value is one session: leases, handles and locks are its own and end with it.
//!
//! Everything small is a [`Store::call`]: one request, one answer, as many at a time as one likes,
//! in no order but that of their answers. What moves data is [`Store::read`] and [`Store::write`],
//! in batches over many files.
//!
//! # What may be remembered
//!
//! Every answer that tells of a file says which [`Leases`] go with it. Under a lease the caller may
//! answer from memory, until (whichever is first) the lease is recalled ([`Store::notices`]), it
//! has been given back ([`Op::Return`]), or [`Store::valid_until`] is over. All leases of a session
//! are valid to the same time, which the store itself keeps moving on while it is in touch with the
//! keeper of the files.
//!
//! A recall may overtake an answer that was made before it, and the other way round. So both carry
//! a [`Stamp`]: what an answer with stamp `a` says of a file must not be remembered (it may be
//! given to whoever asked) when a recall of that file with a stamp above `a` has been seen. Bulk
//! data are stamped, too.
//!
//! Who changed the file waits for the recall to be answered by [`Op::Return`], so that it must not
//! wait for a call of one's own: two sessions that make names in one directory would wait for each
//! other.
//!
//! Not here: how any of this is kept or carried.
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

/// The pieces of one [`Store::read`], as they arrive.
pub type Pieces = Pin<Box<dyn Stream<Item = Result<Piece, Errno>> + Send>>;

/// What the keeper of the files says on its own account.
pub type Notices = Pin<Box<dyn Stream<Item = Notice> + Send>>;

/// A session with whatever keeps the files of a volume.
#[async_trait]
pub trait Store: Send + Sync + 'static {
    /// The directory that is the volume's root.
    fn root(&self) -> FileId;

    /// Does one thing. Dropping the future gives a wait up ([`Op::Lock`]); what changes something
    /// may happen all the same.
    ///
    /// # Errors
    /// The error number that the system call of the same purpose would give; `ESTALE` when the file
    /// is not known any more (walk to it again), `EIO` or `ETIMEDOUT` when the keeper is out of
    /// reach, `EOPNOTSUPP` for what this store can't do.
    async fn call(&self, caller: &Caller, op: Op) -> Result<Answer, Errno>;

    /// Reads parts of many files, all in one request. Pieces of one part come in order and without
    /// gaps; those of several parts come as it suits. A part ends with a piece that says so
    /// ([`Piece::is_last`]): short at the end of the file. A hole reads as zeros. An error that
    /// concerns a part is a piece of its own; one of the whole stream ends it.
    async fn read(&self, caller: &Caller, parts: Vec<ReadPart>) -> Pieces;

    /// Writes, all in one request, in the order that is given, also where one of them fails. The
    /// results are in the same order. What has been answered is seen by every later call of any
    /// session.
    ///
    /// # Errors
    /// When the whole request is lost. It may have happened, or a part of it.
    async fn write(
        &self,
        caller: &Caller,
        writes: Vec<Write>,
    ) -> Result<Vec<Result<Entry, Errno>>, Errno>;

    /// Recalls, in order. There is one listener: a second call gets an empty stream. A session that
    /// does not listen yet gets no leases.
    fn notices(&self) -> Notices;

    /// Until when the leases of the session hold, if nothing more is heard. An operation that began
    /// before and ended before needs no further question.
    fn valid_until(&self) -> Instant;

    /// Leases of answers with earlier stamps have ended, though [`Notice::Lost`] may not have been
    /// taken in yet. Whoever asks for both asks for [`Self::valid_until`] first: that is never
    /// moved on without this one.
    fn valid_above(&self) -> Stamp {
        Stamp::default()
    }

    /// How long a single lease is good for, counted from its answer, where other programs' changes
    /// on the keeper's machine are not noticed ([`Watched::LeaseEnd`]). `None`: no less than
    /// [`Self::valid_until`] says.
    fn lease_limit(&self) -> Option<Duration> {
        None
    }

    /// In a few words and figures, for `posh volumes`.
    fn state(&self) -> StoreState;
}

/// With whose rights something is done, and to whom new files belong. A store whose session is tied
/// to one account of its machine does everything as that account.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Caller {
    /// The user's number.
    pub uid: u32,
    /// The first group's number.
    pub gid: u32,
    /// All further groups.
    pub groups: Arc<[u32]>,
}

/// An order of answers and recalls of one session: later ones have higher numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Stamp(pub u64);

bitflags! {
    /// What may be remembered of a file.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
    pub struct Leases: u32 {
        /// Its attributes, its extended attributes, and where a symbolic link leads.
        const ATTRIBUTES = 1;
        /// A directory's names: which there are, which there are not, and what each means.
        const ENTRIES = 2;
        /// Its contents.
        const DATA = 4;
        /// Its contents and attributes may be changed in memory and written later: nobody else has
        /// a lease of it. A recall of this (somebody wants to read) is answered when all is
        /// written; with the others recalled at the same time nothing may be kept. Of a directory:
        /// names may be made in it in memory, too. Who has just made a directory gets it, nobody
        /// else.
        const WRITE = 8;
    }
}

/// Leases given back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Returned {
    /// Of which file.
    pub file: FileId,
    /// Which.
    pub leases: Leases,
    /// The recall's stamp; for leases given back unasked the highest stamp of an answer about the
    /// file that was seen, so that a lease that is on its way is not given back by mistake.
    pub stamp: Stamp,
}

/// What the keeper says on its own account.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "fields are explained with the variant")]
pub enum Notice {
    /// These leases are no more: forget, and answer with [`Op::Return`] (with this stamp). Who
    /// wants to change the file waits.
    Recall { file: FileId, leases: Leases, stamp: Stamp },
    /// All leases have ended, by time or because the keeper has begun anew: forget, and answer with
    /// [`Op::Forgotten`] (with this stamp). Open handles and locks may be lost, too.
    Lost { stamp: Stamp },
    /// How a file is after a change of which there was a [`Notice::Recall`] before, with leases
    /// that were not asked for: as in an answer.
    Is(Entry),
    /// All that had to be told up to that stamp has been told: so much is known of what a command
    /// on the keeper's machine has changed.
    All { stamp: Stamp },
}

/// How a store does.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct StoreState {
    /// Whether the keeper was in reach when it was last asked.
    pub in_reach: bool,
    /// What the leases rest upon: how other programs' changes are seen.
    pub watched: Watched,
    /// Requests that have no answer yet.
    pub under_way: u64,
    /// How often the connection was made anew.
    pub reconnects: u64,
    /// The last fault, in words.
    pub fault: Option<String>,
}

/// How changes by other programs on the keeper's machine are noticed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Watched {
    /// By fanotify(7), at once.
    Fanotify,
    /// By inotify(7), at once.
    Inotify,
    /// Not at all: when a lease ends.
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
