//! Files that are open while they are made on the server: since somebody waits for them, for their size, or because they have been open
//! for long. They are made as any other is, with what was written to them so far, and go on by their handles.

use std::{
    sync::{Arc, PoisonError},
    time::{Duration, Instant},
};

use bytes::Bytes;

use super::{
    Volume,
    files::Open,
    flights::changes_of,
    unborn::{Newborn, Stage, What, Which},
};
use crate::store::{Answer, Caller, Changes, Entry, Errno, Leases, Op, OpenFlags, Place, Write};

/// A file that is open for longer is made on the server: somebody there may wait for what it gets.
pub(super) const OPEN_LINGER: Duration = Duration::from_millis(200);

/// A file that is made by itself, since it is open.
struct Opening {
    number: u64,
    open: u64,
    parent: u64,
    order: u64,
}

impl Volume {
    /// Makes those that have been open for long, or that somebody waits for.
    pub(super) fn open_overdue(self: &Arc<Self>) {
        let begun_before = Instant::now().checked_sub(OPEN_LINGER);
        let overdue = {
            let table = self.table();
            begun_before.map(|before| table.unborn.overdue(&table, before)).unwrap_or_default()
        };
        for number in overdue {
            if let Some(opening) = self.claim_open(number) {
                let volume = Arc::clone(self);
                tokio::spawn(async move { volume.make_open(opening).await });
            }
        }
    }

    /// Makes a file on the server that is open.
    pub(super) async fn bear_open(self: &Arc<Self>, number: u64) {
        match self.claim_open(number) {
            Some(opening) => {
                // To the end, also if who asked has gone.
                let volume = Arc::clone(self);
                let _ = tokio::spawn(async move { volume.make_open(opening).await }).await;
            }
            None => self.bring_out(Which::Closed).await,
        }
    }

    /// From now on it is not changed in memory.
    fn claim_open(&self, number: u64) -> Option<Opening> {
        let mut table = self.table();
        let node = table.node_mut(number)?;
        let parent = node.at.as_ref()?.0;
        let newborn = node.unborn.as_mut()?;
        let Stage::Open(open) = newborn.stage else { return None };
        newborn.stage = Stage::Leaving;
        let order = table.unborn.leaves(number);
        Some(Opening { number, open, parent, order })
    }

    async fn make_open(self: Arc<Self>, opening: Opening) {
        self.table().unborn.demand(Which::Closed);
        self.births.wake();
        let parent = opening.parent;
        self.arrived_when(|table| table.node(parent).is_none_or(|node| node.unborn.is_none())).await;
        if let Err(errno) = self.make_on_server(&opening).await {
            self.is_stillborn(opening.number, errno);
        }
        self.births.arrived.notify_waiters();
        self.births.wake();
    }

    async fn make_on_server(&self, opening: &Opening) -> Result<(), Errno> {
        let Opening { number, open, parent, order } = *opening;
        let (op, caller, writes) = {
            let table = self.table();
            let above = table.node(parent).ok_or(Errno::EIO)?;
            above.fault.map_or(Ok(()), Err)?;
            let node = table.node(number).ok_or(Errno::EIO)?;
            let (Some(newborn), Some(attributes)) = (&node.unborn, &node.attributes) else { return Err(Errno::EIO) };
            let (_, name) = node.at.clone().ok_or(Errno::EIO)?;
            let flags = (newborn.flags - OpenFlags::TRUNCATE) | OpenFlags::EXCLUSIVE;
            let op = Op::Create { parent: above.file, name, mode: newborn.mode.into(), flags };
            (op, newborn.caller.clone(), (newborn.contents(), changes_of(attributes, node.changed)))
        };
        let asked = Instant::now();
        let Answer::Opened { handle, entry, parent: above } = self.store.call(&caller, op).await? else {
            return Err(Errno::EPROTO);
        };
        let place = Place { file: entry.attributes.id, handle: Some(handle) };
        let written = self.write_first(&caller, place, writes).await;
        let latest = written.as_ref().map_or(entry, |written| *written);
        let mut table = self.table();
        let newborn = table.node_mut(number).and_then(|node| node.unborn.take());
        if let Some(node) = table.node_mut(number) {
            node.changed = None;
            node.handles.push(handle);
        }
        // The directory has another time by that, until it is set.
        table.note_changed(parent, Changes::default(), order);
        self.take_over(&mut table, number, &latest, asked);
        let leases = table.node(number).map_or(Leases::empty(), |node| node.leases);
        if let Some(above) = above {
            table.learn(&above, asked);
        }
        // At once: who finds it born finds the handle.
        self.exchange_open(open, place);
        drop(table);
        if !leases.contains(Leases::DATA | Leases::ATTRIBUTES) {
            self.forget_pages(place.file);
        }
        self.is_outdated(number);
        if let Err(errno) = written {
            self.note_fault(place.file, errno);
        }
        if let Some(newborn) = newborn {
            self.births.is_done(&[newborn.order]);
            self.give_back(newborn.room);
        }
        Ok(())
    }

    async fn write_first(
        &self,
        caller: &Caller,
        place: Place,
        (data, changes): (Bytes, Changes),
    ) -> Result<Entry, Errno> {
        let mut writes = Vec::new();
        if !data.is_empty() {
            writes.push(Write::At { place, offset: 0, data });
        }
        writes.push(Write::Set { place, changes });
        let mut results = self.store.write(caller, writes).await?;
        let last = results.pop().ok_or(Errno::EPROTO)?;
        results.into_iter().collect::<Result<Vec<_>, _>>()?;
        last
    }

    /// The open file has a handle now.
    fn exchange_open(&self, open: u64, place: Place) {
        let mut opens = self.opens.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = opens.get_mut(&open) {
            let new = Open::new(place.file, known.flags, &known.caller);
            *new.handle.lock().unwrap_or_else(PoisonError::into_inner) = place.handle;
            *known = Arc::new(new);
        }
    }
}

impl Newborn {
    fn contents(&self) -> Bytes {
        match &self.what {
            What::Regular(data) => Bytes::copy_from_slice(data),
            _ => Bytes::new(),
        }
    }
}
