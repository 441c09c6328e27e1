//! Client side of space reservations: a file is created in memory only if the store has reserved
//! space for it, so that close(2) can promise that the store takes it.
//!
//! Invariant: the store's reservation for a caller ([`Op::Reserve`]) is at least `free` plus
//! `taken`, less the files in `taken` that the store has created already. [`Notice::Lost`] ends
//! this: `free` becomes 0, and pending files are sent without a reservation.
//!
//! * A new file's part ([`ReservedPart`]) moves from `free` to `taken`, and back if it is not sent.
//! * The store deducts a file that it creates from its reservation by the same number
//!   ([`NewFile::room`]) as [`ReservedPart::spend`] deducts it from `taken`.
//! * A request sets the reservation to the sum of both and some more, which is added to `free`
//!   when it is granted.
//!
//! Where the store grants nothing, calls are sent to the store, which reports its own errors.
//!
//! [`NewFile::room`]: crate::store::NewFile::room
//! [`Notice::Lost`]: crate::store::Notice::Lost

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::{Duration, Instant},
};

use tokio::sync::Notify;

use super::{Volume, newborn::NEWBORN_BYTES};
use crate::store::{Caller, Errno, FileId, Op, room_of_file};

/// Bytes added per request: as many as are in use already, within these limits.
const LEAST_MORE: u64 = 4 << 20;
const MOST_MORE: u64 = 32 << 20;
/// Limit of one caller's reservation, in bytes.
const MAX_BYTES: u64 = 256 << 20;
/// Time from a refusal to the next request.
const REFUSAL_LIFE: Duration = Duration::from_secs(1);
/// Age of the last use at which `free` is given back.
const IDLE: Duration = Duration::from_secs(5);

/// Reservations by caller.
#[derive(Debug, Default)]
pub(super) struct Reservations {
    of: Mutex<HashMap<Caller, Reservation>>,
    /// Held during a request.
    asking: Arc<tokio::sync::Mutex<()>>,
    /// Wakes [`give_back`].
    granted: Notify,
}

#[derive(Debug)]
struct Reservation {
    /// A directory on the file system that it is for.
    directory: FileId,
    /// Bytes for new files.
    free: u64,
    /// Bytes of pending files.
    taken: u64,
    /// Count of [`Notice::Lost`](crate::store::Notice::Lost).
    losses: u64,
    /// The session may have survived its leases, and hold what was `free` before.
    is_stale: bool,
    refused: Option<Instant>,
    used: Instant,
}

/// One file's part of a reservation. Dropping it gives it back.
#[derive(Debug)]
pub(super) struct ReservedPart {
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

    fn with<T>(
        &self,
        caller: &Caller,
        directory: FileId,
        then: impl FnOnce(&mut Reservation) -> T,
    ) -> T {
        let mut all = self.all();
        then(all.entry(caller.clone()).or_insert_with(|| Reservation {
            directory,
            free: 0,
            taken: 0,
            losses: 0,
            is_stale: false,
            refused: None,
            used: crate::clock::now(),
        }))
    }

    /// Takes a part of `free`; the flag says that more should be requested soon.
    fn take(self: &Arc<Self>, caller: &Caller, bytes: u64) -> Option<(ReservedPart, bool)> {
        let mut all = self.all();
        let reservation = all.get_mut(caller)?;
        reservation.free = reservation.free.checked_sub(bytes)?;
        reservation.taken += bytes;
        reservation.used = crate::clock::now();
        let is_low = reservation.free < reservation.more() / 2;
        let reserved = ReservedPart {
            of: Arc::clone(self),
            caller: caller.clone(),
            bytes,
            losses: reservation.losses,
        };
        Some((reserved, is_low))
    }

    /// Handles [`Notice::Lost`](crate::store::Notice::Lost).
    pub fn are_lost(&self) {
        for reservation in self.all().values_mut() {
            reservation.is_stale |= reservation.free > 0;
            reservation.free = 0;
            reservation.losses += 1;
        }
        self.granted.notify_one();
    }
}

impl ReservedPart {
    /// Gives back all but `bytes`, when the file's final size is known.
    pub fn shrink(&mut self, bytes: u64) {
        let rest = self.bytes.saturating_sub(bytes);
        self.bytes -= rest;
        self.give_back(rest);
    }

    /// Deducts the part when the store has created the file.
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

impl Drop for ReservedPart {
    fn drop(&mut self) {
        self.give_back(self.bytes);
    }
}

impl Volume {
    /// Reserves `bytes` for a new file below a directory that the store knows. `None`: refused.
    pub(super) async fn reserve(
        self: &Arc<Self>,
        caller: &Caller,
        directory: FileId,
        bytes: u64,
    ) -> Option<ReservedPart> {
        if let Some((reserved, is_low)) = self.reservations.take(caller, bytes) {
            if is_low && let Ok(turn) = Arc::clone(&self.reservations.asking).try_lock_owned() {
                let (volume, caller) = (Arc::clone(self), caller.clone());
                tokio::spawn(async move {
                    volume.reserve_more(&caller, directory, bytes).await;
                    drop(turn);
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

    /// Reserves space for the first files of a new directory. Runs beside the request that creates
    /// the directory, so that it takes no round trip of its own.
    pub(super) async fn reserve_first(self: &Arc<Self>, caller: &Caller, directory: FileId) {
        if self.settings.sync || !self.births.are_kept() {
            return;
        }
        let _turn = self.reservations.asking.lock().await;
        let has_some =
            self.reservations.all().get(caller).is_some_and(|reservation| reservation.free > 0);
        if !has_some {
            self.reserve_more(caller, directory, room_of_file(NEWBORN_BYTES)).await;
        }
    }

    /// Requests more space, at least `least` bytes.
    async fn reserve_more(self: &Arc<Self>, caller: &Caller, directory: FileId, least: u64) {
        let reservations = &self.reservations;
        let (more, is_refused) = reservations.with(caller, directory, |reservation| {
            reservation.directory = directory;
            let is_refused =
                reservation.refused.is_some_and(|refused| refused.elapsed() < REFUSAL_LIFE);
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
                        reservation.is_stale &= reservation.losses != losses;
                        reservation.used = crate::clock::now();
                        if reservation.losses == losses {
                            reservation.free += more;
                        }
                    });
                    reservations.granted.notify_one();
                    return;
                }
                Err(Errno::ENOSPC | Errno::EDQUOT) if more > least => {}
                // About this directory, not about the space.
                Err(Errno::EACCES | Errno::ENOENT | Errno::ESTALE) => return,
                Err(_) => break,
            }
        }
        reservations
            .with(caller, directory, |reservation| reservation.refused = Some(crate::clock::now()));
    }

    /// Gives back what has been free for [`IDLE`]. Returns whether some has been for less.
    async fn give_back_idle(&self) -> bool {
        let _turn = self.reservations.asking.lock().await;
        let (mut idle, mut is_left) = (Vec::new(), false);
        for (caller, reservation) in self.reservations.all().iter_mut() {
            if reservation.free == 0 && !reservation.is_stale {
                continue;
            }
            if reservation.used.elapsed() < IDLE {
                is_left = true;
                continue;
            }
            (reservation.free, reservation.is_stale) = (0, false);
            idle.push((caller.clone(), reservation.directory, reservation.taken));
        }
        for (caller, directory, bytes) in idle {
            // If it is lost, the session's end gives all back.
            let _ = self.ask(&caller, Op::Reserve { directory, bytes }).await;
        }
        is_left
    }
}

/// Gives back idle reservations until the volume has ended.
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
