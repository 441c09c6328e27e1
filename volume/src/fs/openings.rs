//! Creation on the server of pending files that are still open, since another operation needs them,
//! they have become too large, or they have been open for long. They are created with their
//! contents so far, and go on by their handles.

use std::{
    sync::{Arc, PoisonError},
    time::Duration,
};

use super::{
    MOST_SEARCHES, Volume,
    births::{FIRST_PAUSE, LONGEST_PAUSE},
    files::Open,
    found::is_lost,
    unborn::{Stage, Which},
};
use crate::store::{Answer, Changes, Errno, Leases, Op, OpenFlags, Place};

/// Time after which an open file is created on the server, where a program may wait for its
/// contents.
pub(super) const OPEN_LINGER: Duration = Duration::from_millis(200);

/// An open pending file that is being created on the server.
struct Opening {
    number: u64,
    open: u64,
    parent: u64,
    order: u64,
}

/// Failure of a creation.
enum Failed {
    /// The answer is lost: the file may exist.
    Lost(Errno),
    /// The store's error.
    Refused(Errno),
}

impl Volume {
    /// Creates files on the server that have been open for long, or that waiters need.
    pub(super) fn open_overdue(self: &Arc<Self>) {
        let begun_before = crate::clock::now().checked_sub(OPEN_LINGER);
        let overdue = {
            let table = self.table();
            begun_before.map(|before| table.unborn.overdue(&table, before)).unwrap_or_default()
        };
        overdue.into_iter().for_each(|number| self.bear_open(number));
    }

    /// Creates an open file on the server, in the background.
    pub(super) fn bear_open(self: &Arc<Self>, number: u64) {
        if let Some(opening) = self.claim_open(number) {
            let volume = Arc::clone(self);
            tokio::spawn(async move { volume.make_open(opening).await });
        }
    }

    /// Moves an open file to `Leaving`, so that it is no longer changed in memory.
    fn claim_open(&self, number: u64) -> Option<Opening> {
        let mut table = self.table();
        let node = table.node_mut(number)?;
        let parent = node.at.as_ref()?.0;
        let newborn = node.unborn.as_mut()?;
        let Stage::Open(open) = newborn.stage else { return None };
        newborn.stage = Stage::Leaving;
        let order = table.unborn.leaves(number);
        if let Some(newborn) = table.node_mut(number).and_then(|node| node.unborn.as_mut()) {
            newborn.turn = order;
        }
        Some(Opening { number, open, parent, order })
    }

    /// Repeats the creation until it succeeds or is refused.
    async fn make_open(self: Arc<Self>, opening: Opening) {
        let Opening { number, parent, .. } = opening;
        self.table().unborn.demand(Which::Closed);
        self.births.wake();
        let mut pause = FIRST_PAUSE;
        let mut searches = 0;
        loop {
            self.arrived_when(|table| !table.is_pending(parent) || table.refusal(parent).is_some())
                .await;
            if self.births.is_over() {
                return;
            }
            let refusal = self.table().refusal(parent);
            let made = match refusal {
                Some(errno) => Err(Failed::Refused(errno)),
                None => self.make_on_server(&opening).await,
            };
            if let (Err(_), Some(node)) = (&made, self.table().node_mut(number)) {
                node.take_changes_back();
            }
            match made {
                Ok(()) => break,
                Err(Failed::Refused(Errno::ESTALE)) if searches < MOST_SEARCHES => {
                    searches += 1;
                    let caller = self
                        .table()
                        .node(number)
                        .and_then(|node| Some(node.unborn.as_ref()?.caller.clone()));
                    // If it is not found, the next attempt fails.
                    let _ = self.find_again(&caller.unwrap_or_default(), parent).await;
                }
                Err(Failed::Refused(errno)) => {
                    self.is_refused_open(number, errno);
                    break;
                }
                Err(Failed::Lost(errno)) => {
                    {
                        let mut table = self.table();
                        if let Some(newborn) =
                            table.node_mut(number).and_then(|node| node.unborn.as_mut())
                        {
                            newborn.may_be_there = true;
                        }
                        table.unborn.timeouts += u64::from(errno == Errno::ETIMEDOUT);
                    }
                    self.births.arrived.notify_waiters();
                    tokio::time::sleep(pause).await;
                    pause = (2 * pause).min(LONGEST_PAUSE);
                    searches = 0;
                }
            }
        }
        self.births.arrived.notify_waiters();
        self.births.wake();
    }

    /// Handles the refusal of an open file. It stays pending if one of its descriptors was closed
    /// before; otherwise it is dropped.
    fn is_refused_open(&self, number: u64, errno: Errno) {
        let mut table = self.table();
        let is_noted = table
            .node(number)
            .and_then(|node| node.unborn.as_ref())
            .is_some_and(|newborn| newborn.is_noted);
        if is_noted {
            table.refuse(number, errno);
        } else {
            drop(table);
            self.is_stillborn(number, errno);
        }
    }

    async fn make_on_server(&self, opening: &Opening) -> Result<(), Failed> {
        let Opening { number, open, parent, order } = *opening;
        let (put, flags, caller, may_be_there) = {
            let mut table = self.table();
            table.node(parent).ok_or(Errno::EIO)?.fault.map_or(Ok(()), Err)?;
            let put = table.put_of(number).ok_or(Errno::EIO)?;
            let newborn =
                table.node(number).and_then(|node| node.unborn.as_ref()).ok_or(Errno::EIO)?;
            let flags = newborn.flags - (OpenFlags::TRUNCATE | OpenFlags::EXCLUSIVE);
            let changes = put.changes;
            let known = (put, flags, newborn.caller.clone(), newborn.may_be_there);
            if let Some(node) = table.node_mut(number) {
                node.send_changes(changes);
            }
            known
        };
        let asked = crate::clock::now();
        let op = Op::CreateWhole { put: put.clone(), flags };
        let mut is_found = false;
        let answer = match self.store.call(&caller, op).await {
            Err(Errno::EEXIST) if may_be_there => {
                is_found = true;
                let found = self.found_there(&caller, &put).await.map_err(Failed::Lost)?;
                let file = found.ok_or(Errno::EEXIST)?.attributes.id;
                self.store.call(&caller, Op::Open { place: file.into(), flags }).await
            }
            // The server is overloaded: try again.
            Err(Errno::EBUSY) => Err(Errno::EAGAIN),
            answer => answer,
        };
        let answer = answer
            .map_err(|errno| if is_lost(errno) { Failed::Lost(errno) } else { errno.into() })?;
        let Answer::Opened { handle, entry, parent: above } = answer else {
            return Err(Errno::EPROTO.into());
        };
        let place = Place { file: entry.attributes.id, handle: Some(handle) };
        let mut table = self.table();
        if let Some(node) = table.node_mut(number).filter(|_| is_found) {
            // An earlier request has created it, without the changes since.
            node.take_changes_back();
        }
        let newborn = table.node_mut(number).and_then(|node| node.unborn.take());
        if let Some(node) = table.node_mut(number) {
            node.own = newborn.as_ref().map(|newborn| Arc::clone(&newborn.own));
            node.handles.push(handle);
        }
        // The creation has changed the directory's times, which must be set again.
        table.note_changed(parent, Changes::default(), order);
        self.take_over(&mut table, number, &entry, asked);
        let leases = table.node(number).map_or(Leases::empty(), |node| node.leases);
        if let Some(above) = above {
            table.learn(&above, asked);
        }
        // Under the lock, so that a file known to the store has its handle.
        self.exchange_open(open, place);
        drop(table);
        if !leases.contains(Leases::DATA | Leases::ATTRIBUTES) {
            self.forget_pages(place.file);
        }
        self.is_outdated(number);
        if let Some(newborn) = newborn {
            self.births.is_done(&[newborn.order]);
            self.is_delivered(newborn.room);
        }
        Ok(())
    }

    /// Replaces an open file by one with a handle.
    fn exchange_open(&self, open: u64, place: Place) {
        let mut opens = self.opens.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = opens.get_mut(&open) {
            let new = Open {
                is_direct: known.is_direct,
                ..Open::new(place.file, known.flags, &known.caller)
            };
            *new.handle.lock().unwrap_or_else(PoisonError::into_inner) = place.handle;
            *known = Arc::new(new);
        }
    }
}

impl From<Errno> for Failed {
    fn from(errno: Errno) -> Self {
        Self::Refused(errno)
    }
}
