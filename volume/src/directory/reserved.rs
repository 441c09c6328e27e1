//! Server side of space reservations ([`Op::Reserve`]): space is held for files that a session is
//! going to put, so that a file which was closed before it was sent can be created.
//!
//! The space of one caller is held by a file without a name (O_TMPFILE), filled by fallocate(2) and
//! owned by the caller. It ends with the session or with this process. Inodes can't be held so:
//! where few are free, a reservation is refused.
//!
//! Invariant: an account holds at most an eighth of what it leaves free in a file system, and 512
//! MiB in all, by however many sessions; space counts until its file is closed.
//!
//! Invariant: a put that is covered by a reservation fails with `ENOSPC` or `EDQUOT` only after its
//! part of the held space was given back to the file system.
//!
//! [`Op::Reserve`]: crate::store::Op::Reserve

use std::{
    collections::HashMap,
    os::fd::AsFd as _,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use nix::errno::Errno;
use rustix::fs::{FallocateFlags, Mode, OFlags};

use super::{
    Fault,
    account::Account,
    descriptor::Descriptor,
    nodes::{BENEATH, Node},
    session::Session,
};
use crate::store::{Caller, FileId};

/// Limit of callers with a reservation in one session.
const MAX_CALLERS: usize = 64;
/// Limit of an account's reservations, in bytes: `ls` and `du` on the server do not show them.
const MAX_BYTES: u64 = 512 << 20;
/// An account's reservations in one file system are at most this fraction (1/N) of the space that
/// is still available there: others need it, too.
const LARGEST_SHARE: u64 = 8;
/// Least count of free inodes: with fewer, other programs may use them up before the files come.
const MIN_FREE_FILES: u64 = 32_768;

/// Bytes that accounts hold, of all sessions of a machine.
#[derive(Debug, Default)]
pub struct HeldBytes(Mutex<HashMap<ReservedAccount, u64>>);

/// An account in a file system.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct ReservedAccount {
    account: String,
    system: u64,
}

/// The part of one reservation in [`HeldBytes`]; dropping it gives it back.
#[derive(Debug)]
struct ReservationShare {
    held: Arc<HeldBytes>,
    place: ReservedAccount,
    bytes: Mutex<u64>,
}

/// Reservations of a session, by caller. Only a reservation's own lock is held during a system
/// call, never the table's, which the end of the session takes.
#[derive(Debug, Default)]
pub struct Reservations(Mutex<ByCaller>);

type ByCaller = HashMap<Caller, Arc<Mutex<SpaceHold>>>;

/// Held space.
#[derive(Debug)]
pub struct SpaceHold {
    file: Descriptor,
    bytes: u64,
    /// Also held until the file is closed.
    share: Arc<ReservationShare>,
}

/// Deducts a batch of puts from a reservation, at the latest when it is dropped.
#[derive(Debug)]
pub struct Spending<'a> {
    reservations: &'a Reservations,
    caller: &'a Caller,
    /// Bytes not deducted yet.
    owed: u64,
}

impl HeldBytes {
    fn all(&self) -> MutexGuard<'_, HashMap<ReservedAccount, u64>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ReservationShare {
    fn of(held: &Arc<HeldBytes>, account: &Account, system: u64) -> Arc<Self> {
        let place = ReservedAccount { account: account.name().to_owned(), system };
        Arc::new(Self { held: held.clone(), place, bytes: Mutex::default() })
    }

    fn bytes(&self) -> MutexGuard<'_, u64> {
        self.bytes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets its size. It grows only within the account's limits: [`MAX_BYTES`] in all, and `most`
    /// in its file system.
    fn set(&self, bytes: u64, most: u64) -> Result<(), Fault> {
        let (mut own, mut all) = (self.bytes(), self.held.all());
        if bytes > *own {
            let of_account = all.iter().filter(|(at, _)| at.account == self.place.account);
            let others = of_account.map(|(_, bytes)| *bytes).sum::<u64>().saturating_sub(*own);
            let here = all.get(&self.place).map_or(0, |bytes| bytes.saturating_sub(*own));
            if bytes.saturating_add(others) > MAX_BYTES || bytes.saturating_add(here) > most {
                return Err(Errno::ENOSPC.into());
            }
        }
        let sum = all.entry(self.place.clone()).or_default();
        *sum = sum.saturating_sub(*own).saturating_add(bytes);
        if *sum == 0 {
            all.remove(&self.place);
        }
        *own = bytes;
        Ok(())
    }
}

impl Drop for ReservationShare {
    fn drop(&mut self) {
        // What shrinks is never refused.
        let _ = self.set(0, 0);
    }
}

impl SpaceHold {
    /// Changes its size, within a limit of the account in the file system.
    fn resize(&mut self, bytes: u64, most: u64) -> Result<(), Fault> {
        if bytes <= self.bytes {
            rustix::fs::ftruncate(&self.file, bytes)?;
            self.bytes = bytes;
            return self.share.set(bytes, most);
        }
        // Counted first: other sessions may grow meanwhile.
        self.share.set(bytes, most)?;
        let (from, more) = (self.bytes, bytes - self.bytes);
        let grown = rustix::fs::fallocate(&self.file, FallocateFlags::empty(), from, more);
        if let Err(errno) = grown {
            // Some file systems keep a partial allocation.
            rustix::fs::ftruncate(&self.file, from)?;
            self.share.set(from, most)?;
            return Err(errno.into());
        }
        self.bytes = bytes;
        Ok(())
    }

    fn shrink(&mut self, bytes: u64) -> Result<(), Fault> {
        self.resize(bytes.min(self.bytes), 0)
    }
}

fn locked(hold: &Mutex<SpaceHold>) -> MutexGuard<'_, SpaceHold> {
    hold.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Reservations {
    fn all(&self) -> MutexGuard<'_, ByCaller> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn of(&self, caller: &Caller) -> Option<Arc<Mutex<SpaceHold>>> {
        self.all().get(caller).cloned()
    }

    /// Takes all out, to be dropped.
    pub fn take_all(&self) -> ByCaller {
        std::mem::take(&mut *self.all())
    }

    pub fn spending<'a>(&'a self, caller: &'a Caller) -> Spending<'a> {
        Spending { reservations: self, caller, owed: 0 }
    }

    /// Deducts bytes. Returns `false` if the caller has no reservation.
    fn take(&self, caller: &Caller, bytes: u64) -> bool {
        let Some(hold) = self.of(caller) else { return false };
        let mut hold = locked(&hold);
        let rest = hold.bytes.saturating_sub(bytes);
        hold.shrink(rest).is_ok()
    }
}

impl Spending<'_> {
    /// Creates a file that `bytes` are reserved for. Only when the file system is full is the
    /// space given back at once; otherwise once for the batch.
    pub fn spend<T>(&mut self, bytes: u64, put: impl Fn() -> Result<T, Fault>) -> Result<T, Fault> {
        let made = put();
        match &made {
            Ok(_) => self.owed += bytes,
            Err(Fault(Errno::ENOSPC | Errno::EDQUOT)) => {
                self.owed += bytes;
                if self.pay() {
                    return put();
                }
            }
            Err(_) => {}
        }
        made
    }

    fn pay(&mut self) -> bool {
        let owed = std::mem::take(&mut self.owed);
        owed > 0 && self.reservations.take(self.caller, owed)
    }
}

impl Drop for Spending<'_> {
    fn drop(&mut self) {
        self.pay();
    }
}

impl Session {
    /// See [`Op::Reserve`](crate::store::Op::Reserve).
    pub fn reserve(&self, caller: &Caller, directory: FileId, bytes: u64) -> Result<(), Fault> {
        self.directory.require_writable()?;
        let known = self.reserved.of(caller);
        if bytes == 0 {
            if let Some(hold) = known {
                locked(&hold).shrink(0)?;
                self.reserved.all().remove(caller);
            }
            return Ok(());
        }
        if let Some(hold) = &known {
            let mut hold = locked(hold);
            if bytes <= hold.bytes {
                return hold.shrink(bytes);
            }
        }
        let node = self.directory.nodes.node(directory)?;
        let found = rustix::fs::fstatvfs(&node.fd)?;
        // File systems that allocate inodes dynamically report 0.
        if found.f_files > 0 && found.f_favail < MIN_FREE_FILES {
            return Err(Errno::ENOSPC.into());
        }
        let most = found.f_bavail.saturating_mul(found.f_frsize) / LARGEST_SHARE;
        let hold = match known {
            Some(hold) => hold,
            None => self.new_hold(caller, &node, found.f_fsid)?,
        };
        locked(&hold).resize(bytes, most)
    }

    /// Adds an empty reservation of a caller.
    fn new_hold(
        &self,
        caller: &Caller,
        directory: &Node,
        system: u64,
    ) -> Result<Arc<Mutex<SpaceHold>>, Fault> {
        let machine = &self.directory.machine;
        let charge = machine.descriptors.try_take(&self.account, 1).ok_or(Errno::EMFILE)?;
        let flags = OFlags::WRONLY | OFlags::TMPFILE | OFlags::CLOEXEC;
        let mode = Mode::RUSR | Mode::WUSR;
        let file = rustix::fs::openat2(directory.fd.as_fd(), ".", flags, mode, BENEATH)?;
        let share = ReservationShare::of(&machine.reserved, &self.account, system);
        let file = Descriptor::open(&self.closing, file, Arc::new((charge, share.clone())));
        let mut all = self.reserved.all();
        // Under the lock under which the end empties the table, so that no space is left over.
        if self.is_over() {
            return Err(Errno::ESTALE.into());
        }
        if all.len() >= MAX_CALLERS && !all.contains_key(caller) {
            return Err(Errno::ENOSPC.into());
        }
        let new = || Arc::new(Mutex::new(SpaceHold { file, bytes: 0, share }));
        Ok(all.entry(caller.clone()).or_insert_with(new).clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sessions_of_one_account_share_its_reservations() {
        const MIB: u64 = 1 << 20;
        let held = Arc::new(HeldBytes::default());
        let (ada, bob) = (Account::named("ada"), Account::named("bob"));
        let first = ReservationShare::of(&held, &ada, 1);
        first.set(80 * MIB, 100 * MIB).unwrap();
        let second = ReservationShare::of(&held, &ada, 1);
        assert_eq!(second.set(21 * MIB, 100 * MIB), Err(Errno::ENOSPC.into()));
        second.set(20 * MIB, 100 * MIB).unwrap();
        ReservationShare::of(&held, &bob, 1).set(100 * MIB, 100 * MIB).unwrap();
        // Another file system has its own limit, below that of all.
        let elsewhere = ReservationShare::of(&held, &ada, 2);
        assert_eq!(elsewhere.set(413 * MIB, MAX_BYTES), Err(Errno::ENOSPC.into()));
        elsewhere.set(412 * MIB, MAX_BYTES).unwrap();
        // What shrinks is not refused, though there is no room any more.
        first.set(10 * MIB, 0).unwrap();
        drop((first, second));
        elsewhere.set(MAX_BYTES, MAX_BYTES).unwrap();
        drop(elsewhere);
        assert!(held.all().is_empty());
    }
}
