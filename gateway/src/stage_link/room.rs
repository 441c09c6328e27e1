//! Connections of stages, shells and processes that ask.
//!
//! Invariant: every connection is counted from its acceptance until its socket is closed
//! ([`CountedConnection`]): in all, and by process. The bounds leave two thirds of the descriptors
//! to the gateway. The second half of all is for processes with the gateway's own rights
//! ([`SilentConnection::is_crowded`]). A refused stage runs its command itself, and at once.
//!
//! Before its first message, a connection also has one of fewer places ([`SilentConnection`]): a
//! new one displaces the one that has been silent the longest.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};

use crate::enlisted::Pid;

/// Limit on silent connections; each takes up to some 300 KiB.
const PLACES: usize = 256;
/// Limit on those with a large message: 8 MiB each.
const LARGE_ONES: usize = 8;
/// Limit on all connections.
const MOST: usize = 4096;
/// One process has at most this part of all connections.
const PART_OF_ONE_PROCESS: usize = 8;

/// All of them.
#[derive(Debug, Clone)]
pub struct Room {
    open: Arc<Mutex<OpenConnections>>,
    silent: Arc<Mutex<Silent>>,
    large_ones: Arc<Semaphore>,
    most: usize,
}

/// Open connections.
#[derive(Debug, Default)]
struct OpenConnections {
    total: usize,
    /// Without those that have none. `None`: processes of another PID namespace.
    by_process: BTreeMap<Option<Pid>, usize>,
}

#[derive(Debug, Default)]
struct Silent {
    /// Number of connections so far; no number is reused.
    next: u64,
    by_number: BTreeMap<u64, oneshot::Sender<()>>,
}

/// One open connection in the count; whoever has its socket keeps it.
#[derive(Debug)]
pub struct CountedConnection {
    process: Option<Pid>,
    room: Room,
}

/// One connection's place before its first message, released on drop.
#[derive(Debug)]
pub struct SilentConnection {
    connection: CountedConnection,
    silence: Silence,
    lost: oneshot::Receiver<()>,
}

/// Place among the silent connections.
#[derive(Debug)]
struct Silence {
    number: u64,
    room: Room,
}

/// Reason for refusing a connection.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum Full {
    /// All places are taken.
    #[error("too many connections are open")]
    All,
    /// The process has its share.
    #[error("its process has too many connections")]
    Process,
}

impl Room {
    /// Room in a process that may have that many descriptors.
    #[must_use]
    pub fn among(descriptors: u64) -> Self {
        // A connection has a second descriptor, of its process, until its first message is read.
        let most = usize::try_from(descriptors / 3).unwrap_or(MOST).min(MOST);
        Self {
            open: Arc::default(),
            silent: Arc::default(),
            large_ones: Arc::new(Semaphore::new(LARGE_ONES)),
            most,
        }
    }

    /// Takes a place for a new connection of a process.
    ///
    /// # Errors
    /// [`Full`]; the connection must be closed.
    pub fn enter(&self, process: Option<Pid>) -> Result<SilentConnection, Full> {
        let connection = self.count(process)?;
        let mut silent = self.silent();
        if silent.by_number.len() >= PLACES.min(self.most / 2) {
            // Dropping its sender notifies the other end.
            silent.by_number.pop_first();
        }
        let number = silent.next;
        silent.next += 1;
        let (sender, lost) = oneshot::channel();
        silent.by_number.insert(number, sender);
        Ok(SilentConnection { connection, silence: Silence { number, room: self.clone() }, lost })
    }

    fn count(&self, process: Option<Pid>) -> Result<CountedConnection, Full> {
        let mut open = self.open();
        if open.total >= self.most {
            return Err(Full::All);
        }
        let of_process = open.by_process.get(&process).copied().unwrap_or_default();
        if of_process >= self.most / PART_OF_ONE_PROCESS {
            return Err(Full::Process);
        }
        open.total += 1;
        open.by_process.insert(process, of_process + 1);
        Ok(CountedConnection { process, room: self.clone() })
    }

    /// Waits until few enough others have a large message.
    pub(super) async fn for_a_large_one(&self) -> OwnedSemaphorePermit {
        let permit = Arc::clone(&self.large_ones).acquire_owned().await;
        permit.expect("it is never closed")
    }

    /// Number of open connections.
    #[cfg(test)]
    pub(super) fn total(&self) -> usize {
        self.open().total
    }

    fn open(&self) -> MutexGuard<'_, OpenConnections> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn silent(&self) -> MutexGuard<'_, Silent> {
        self.silent.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl SilentConnection {
    /// Returns true if only processes with the gateway's own rights may still be served.
    #[must_use]
    pub fn is_crowded(&self) -> bool {
        let room = self.room();
        room.open().total > room.most / 2
    }

    pub(super) fn room(&self) -> &Room {
        &self.silence.room
    }

    /// Completes when another connection has taken the place.
    pub(super) async fn lost(&mut self) {
        let _sender_is_gone = (&mut self.lost).await;
    }

    /// Releases the place after the first message; the connection is still counted.
    pub(super) fn heard(self) -> CountedConnection {
        self.connection
    }
}

impl Drop for Silence {
    fn drop(&mut self) {
        self.room.silent().by_number.remove(&self.number);
    }
}

impl Drop for CountedConnection {
    fn drop(&mut self) {
        let mut open = self.room.open();
        open.total -= 1;
        match open.by_process.get_mut(&self.process) {
            Some(count) if *count > 1 => *count -= 1,
            _ => drop(open.by_process.remove(&self.process)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_one_that_is_silent_for_longest_loses_its_place() {
        let room = Room::among(20_000);
        let enter = || room.enter(None).unwrap();
        let mut places: Vec<SilentConnection> = (0..PLACES).map(|_| enter()).collect();
        let is_lost = |place: &mut SilentConnection| {
            place.lost.try_recv() == Err(oneshot::error::TryRecvError::Closed)
        };
        assert!(!places.iter_mut().any(is_lost));
        // One that has spoken has made room.
        let _spoken = places.remove(100).heard();
        places.push(enter());
        assert!(!places.iter_mut().any(is_lost));
        places.push(enter());
        let lost: Vec<bool> = places.iter_mut().map(is_lost).collect();
        assert!(lost[0] && !lost[1..].contains(&true));
    }

    #[test]
    fn connections_are_counted_until_they_are_closed() {
        let room = Room::among(240);
        let heard = |process| room.enter(Some(process)).map(SilentConnection::heard);
        // Eight processes have their share of ten each, and that is all.
        let of_one: Vec<_> = (0..10).map(|_| heard(0).unwrap()).collect();
        assert_eq!(heard(0).unwrap_err(), Full::Process);
        assert!(!room.enter(Some(1)).unwrap().is_crowded());
        let of_others: Vec<_> =
            (1..8).flat_map(|process| [process; 10]).map(|p| heard(p).unwrap()).collect();
        assert_eq!(heard(8).unwrap_err(), Full::All);
        drop(of_one);
        assert!(room.enter(Some(0)).unwrap().is_crowded());
        drop(of_others);
        assert!(room.open().by_process.is_empty());
        assert_eq!(room.total(), 0);
    }
}
