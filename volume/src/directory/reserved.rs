//! Server side of space reservations ([`Op::Reserve`]): space is held for files that a session is
//! going to put, so that a file which was closed before it was sent can be created.
//!
//! The space of one caller is held by a file without a name (O_TMPFILE), filled by fallocate(2) and
//! owned by the caller. It ends with the session or with this process. Inodes can't be held so:
//! where few are free, a reservation is refused.
//!
//! Invariant: a put that is covered by a reservation fails with `ENOSPC` or `EDQUOT` only after its
//! part of the held space was given back to the file system.
//!
//! [`Op::Reserve`]: crate::store::Op::Reserve

use std::{
    collections::HashMap,
    os::fd::OwnedFd,
    sync::{Mutex, MutexGuard, PoisonError},
};

use nix::errno::Errno;
use rustix::fs::{FallocateFlags, Mode, OFlags};

use super::{Fault, account::Charge, nodes::BENEATH, session::Session};
use crate::store::{Caller, FileId};

/// Limit of callers with a reservation in one session.
const MAX_CALLERS: usize = 64;
/// Limit of a session's reservations, in bytes: `ls` and `du` on the server do not show them.
const MAX_BYTES: u64 = 512 << 20;
/// A reservation is at most this fraction (1/N) of the available space: others need it, too.
const LARGEST_SHARE: u64 = 8;
/// Least count of free inodes: with fewer, other programs may use them up before the files come.
const MIN_FREE_FILES: u64 = 32_768;

/// Reservations of a session, by caller.
#[derive(Debug, Default)]
pub struct Reservations(Mutex<HashMap<Caller, SpaceHold>>);

/// Held space.
#[derive(Debug)]
struct SpaceHold {
    file: OwnedFd,
    bytes: u64,
    _charge: Charge,
}

/// Deducts a batch of puts from a reservation, at the latest when it is dropped.
#[derive(Debug)]
pub struct Spending<'a> {
    reservations: &'a Reservations,
    caller: &'a Caller,
    /// Bytes not deducted yet.
    owed: u64,
}

impl SpaceHold {
    fn resize(&mut self, bytes: u64) -> Result<(), Fault> {
        if bytes > self.bytes {
            let grown = rustix::fs::fallocate(
                &self.file,
                FallocateFlags::empty(),
                self.bytes,
                bytes - self.bytes,
            );
            if let Err(errno) = grown {
                // Some file systems keep a partial allocation.
                rustix::fs::ftruncate(&self.file, self.bytes)?;
                return Err(errno.into());
            }
        } else {
            rustix::fs::ftruncate(&self.file, bytes)?;
        }
        self.bytes = bytes;
        Ok(())
    }
}

impl Reservations {
    fn all(&self) -> MutexGuard<'_, HashMap<Caller, SpaceHold>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends all reservations.
    pub fn clear(&self) {
        self.all().clear();
    }

    pub fn spending<'a>(&'a self, caller: &'a Caller) -> Spending<'a> {
        Spending { reservations: self, caller, owed: 0 }
    }

    /// Deducts bytes. Returns `false` if the caller has no reservation.
    fn take(&self, caller: &Caller, bytes: u64) -> bool {
        let mut all = self.all();
        let Some(reserved) = all.get_mut(caller) else { return false };
        reserved.resize(reserved.bytes.saturating_sub(bytes)).is_ok()
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
        let mut all = self.reserved.all();
        if bytes == 0 {
            all.remove(caller);
            return Ok(());
        }
        let others: u64 = all
            .iter()
            .filter(|(owner, _)| *owner != caller)
            .map(|(_, reserved)| reserved.bytes)
            .sum();
        if bytes > MAX_BYTES.saturating_sub(others) {
            return Err(Errno::ENOSPC.into());
        }
        if let Some(reserved) = all.get_mut(caller)
            && bytes <= reserved.bytes
        {
            return reserved.resize(bytes);
        }
        let node = self.directory.nodes.node(directory)?;
        let found = rustix::fs::fstatvfs(&node.fd)?;
        // File systems that allocate inodes dynamically report 0.
        let has_few_files = found.f_files > 0 && found.f_favail < MIN_FREE_FILES;
        let held = all.get(caller).map_or(0, |reserved| reserved.bytes);
        let available = found.f_bavail.saturating_mul(found.f_frsize).saturating_add(held);
        if has_few_files || bytes > available / LARGEST_SHARE {
            return Err(Errno::ENOSPC.into());
        }
        if let Some(reserved) = all.get_mut(caller) {
            return reserved.resize(bytes);
        }
        if all.len() >= MAX_CALLERS {
            return Err(Errno::ENOSPC.into());
        }
        let charge =
            self.directory.machine.descriptors.try_take(&self.account, 1).ok_or(Errno::EMFILE)?;
        let flags = OFlags::WRONLY | OFlags::TMPFILE | OFlags::CLOEXEC;
        let file = rustix::fs::openat2(&node.fd, ".", flags, Mode::RUSR | Mode::WUSR, BENEATH)?;
        let mut reserved = SpaceHold { file, bytes: 0, _charge: charge };
        reserved.resize(bytes)?;
        // A session that has ended meanwhile has already cleared its reservations.
        if !self.is_over() {
            all.insert(caller.clone(), reserved);
        }
        Ok(())
    }
}
