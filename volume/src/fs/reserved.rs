//! Space on the store for files that are made in memory: the promise of a close(2) that the store has not heard of.
//!
//! Invariant: what the store keeps free for a caller ([`Op::Reserve`]) is at least what is free here and what pending
//! files have of it, but for those of them that the store has made already. Until [`Notice::Lost`] says that the store
//! has forgotten its sessions: then nothing is free here, and files are sent as they are.
//!
//! * what a file takes when it begins ([`Reserved`]) is moved from free to taken, and back when it is not sent
//! * what the store has made ([`Reserved::spend`]) it has taken from what it keeps, by the same number ([`Put::room`])
//! * a request sets what the store keeps to the sum of both and some more, which is free when it is granted
//!
//! A directory in which the store grants nothing has no files in memory: their calls go through, and
//! get the store's errors.
//!
//! [`Notice::Lost`]: crate::store::Notice::Lost
//! [`Put::room`]: crate::store::Put::room

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::{Duration, Instant},
};

use tokio::sync::Notify;

use super::Volume;
use crate::store::{Caller, Errno, FileId, Op};

/// Asked for at a time, least and most: as much as is in use already.
const LEAST_MORE: u64 = 4 << 20;
const MOST_MORE: u64 = 32 << 20;
/// In all for one caller.
const MAX_BYTES: u64 = 256 << 20;
/// After a refusal, until the store is asked again.
const REFUSAL_LIFE: Duration = Duration::from_secs(1);
/// What nobody has used for so long is given back.
const IDLE: Duration = Duration::from_secs(5);

/// What the store keeps free, by the callers whose files it is for.
#[derive(Debug, Default)]
pub(super) struct Reservations {
    of: Mutex<HashMap<Caller, Reservation>>,
    /// One request at a time.
    asking: tokio::sync::Mutex<()>,
    /// There is something to be given back some time.
    granted: Notify,
}

#[derive(Debug)]
struct Reservation {
    /// Below it, as the store knows it.
    directory: FileId,
    /// Bytes that new files may take.
    free: u64,
    /// Bytes that pending files have taken.
    taken: u64,
    /// How often the store has forgotten it.
    losses: u64,
    refused: Option<Instant>,
    used: Instant,
}

/// A file's part. Given back when it is dropped.
#[derive(Debug)]
pub(super) struct Reserved {
    of: Arc<Reservations>,
    caller: Caller,
    bytes: u64,
    losses: u64,
}

impl Reservation {
    fn more(&self) -> u64 {
        (self.free + self.taken).clamp(LEAST_MORE, MOST_MORE)
    }
}

impl Reservations {
    fn all(&self) -> MutexGuard<'_, HashMap<Caller, Reservation>> {
        self.of.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn with<T>(&self, caller: &Caller, directory: FileId, then: impl FnOnce(&mut Reservation) -> T) -> T {
        let mut all = self.all();
        then(all.entry(caller.clone()).or_insert_with(|| Reservation {
            directory,
            free: 0,
            taken: 0,
            losses: 0,
            refused: None,
            used: Instant::now(),
        }))
    }

    /// Whether there is enough for another few, too.
    fn take(self: &Arc<Self>, caller: &Caller, bytes: u64) -> Option<(Reserved, bool)> {
        let mut all = self.all();
        let reservation = all.get_mut(caller)?;
        reservation.free = reservation.free.checked_sub(bytes)?;
        reservation.taken += bytes;
        reservation.used = Instant::now();
        let is_low = reservation.free < reservation.more() / 2;
        let reserved = Reserved { of: Arc::clone(self), caller: caller.clone(), bytes, losses: reservation.losses };
        Some((reserved, is_low))
    }

    /// The store has forgotten its session.
    pub fn are_lost(&self) {
        for reservation in self.all().values_mut() {
            reservation.free = 0;
            reservation.losses += 1;
        }
    }
}

impl Reserved {
    /// The file's part is smaller than it might have become.
    pub fn shrink(&mut self, bytes: u64) {
        let rest = self.bytes.saturating_sub(bytes);
        self.bytes -= rest;
        self.give_back(rest);
    }

    /// The store has made the file.
    pub fn spend(mut self) {
        let bytes = std::mem::take(&mut self.bytes);
        if let Some(reservation) = self.of.all().get_mut(&self.caller) {
            reservation.taken = reservation.taken.saturating_sub(bytes);
        }
    }

    fn give_back(&self, bytes: u64) {
        if let Some(reservation) = self.of.all().get_mut(&self.caller) {
            reservation.taken = reservation.taken.saturating_sub(bytes);
            if reservation.losses == self.losses {
                reservation.free += bytes;
            }
        }
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        self.give_back(self.bytes);
    }
}

impl Volume {
    /// A part of what the store keeps free, for a new file somewhere below a directory that the store knows. `None`: it
    /// grants nothing.
    pub(super) async fn reserve(self: &Arc<Self>, caller: &Caller, directory: FileId, bytes: u64) -> Option<Reserved> {
        if let Some((reserved, is_low)) = self.reservations.take(caller, bytes) {
            if is_low && self.reservations.asking.try_lock().is_ok() {
                let (volume, caller) = (Arc::clone(self), caller.clone());
                tokio::spawn(async move {
                    let _turn = volume.reservations.asking.lock().await;
                    volume.reserve_more(&caller, directory, LEAST_MORE).await;
                });
            }
            return Some(reserved);
        }
        let _turn = self.reservations.asking.lock().await;
        if let Some((reserved, _)) = self.reservations.take(caller, bytes) {
            return Some(reserved);
        }
        self.reserve_more(caller, directory, bytes).await;
        self.reservations.take(caller, bytes).map(|(reserved, _)| reserved)
    }

    /// What the first files in a new directory need, while the directory is made: no round trip of its own.
    pub(super) async fn reserve_first(self: &Arc<Self>, caller: &Caller, directory: FileId) {
        if self.settings.sync || self.births.journal().is_none() {
            return;
        }
        let _turn = self.reservations.asking.lock().await;
        let has_some = self.reservations.all().get(caller).is_some_and(|reservation| reservation.free > 0);
        if !has_some {
            self.reserve_more(caller, directory, LEAST_MORE).await;
        }
    }

    /// Asks for more, at least for so much.
    async fn reserve_more(self: &Arc<Self>, caller: &Caller, directory: FileId, least: u64) {
        let reservations = &self.reservations;
        let (more, is_refused) = reservations.with(caller, directory, |reservation| {
            reservation.directory = directory;
            let is_refused = reservation.refused.is_some_and(|refused| refused.elapsed() < REFUSAL_LIFE);
            (reservation.more(), is_refused)
        });
        if is_refused {
            return;
        }
        for more in [more.max(least), least] {
            let (bytes, losses) = reservations.with(caller, directory, |reservation| {
                (reservation.free + reservation.taken + more, reservation.losses)
            });
            if bytes > MAX_BYTES {
                continue;
            }
            match self.ask(caller, Op::Reserve { directory, bytes }).await {
                Ok(_) => {
                    reservations.with(caller, directory, |reservation| {
                        reservation.refused = None;
                        reservation.used = Instant::now();
                        if reservation.losses == losses {
                            reservation.free += more;
                        }
                    });
                    reservations.granted.notify_one();
                    return;
                }
                Err(Errno::ENOSPC | Errno::EDQUOT) if more > least => {}
                Err(_) => break,
            }
        }
        reservations.with(caller, directory, |reservation| reservation.refused = Some(Instant::now()));
    }

    /// Gives back what has been free for long. Whether there is more to be given back later.
    async fn give_back_idle(&self) -> bool {
        let _turn = self.reservations.asking.lock().await;
        let (mut idle, mut is_left) = (Vec::new(), false);
        for (caller, reservation) in self.reservations.all().iter_mut().filter(|(_, reservation)| reservation.free > 0)
        {
            if reservation.used.elapsed() < IDLE {
                is_left = true;
                continue;
            }
            reservation.free = 0;
            idle.push((caller.clone(), reservation.directory, reservation.taken));
        }
        for (caller, directory, bytes) in idle {
            // If it is lost, the session's end gives all back.
            let _ = self.ask(&caller, Op::Reserve { directory, bytes }).await;
        }
        is_left
    }
}

/// Works for as long as there is the volume.
pub(super) async fn give_back(reservations: Arc<Reservations>, volume: Weak<Volume>) {
    loop {
        reservations.granted.notified().await;
        loop {
            tokio::time::sleep(IDLE / 2).await;
            let Some(volume) = volume.upgrade() else { return };
            if !volume.give_back_idle().await {
                break;
            }
        }
    }
}
