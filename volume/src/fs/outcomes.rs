//! Results of sent pending files: created, lost with their request, or refused.

use std::{
    collections::HashMap,
    path::PathBuf,
    sync::{Arc, atomic::Ordering},
    time::Instant,
};

use super::{
    MOST_SEARCHES, Volume,
    found::{Found, is_lost},
    newborn::NEWBORN_BYTES,
    recalls::Invalidate,
    reserved::ReservedPart,
    table::Table,
    unborn::{Room, What},
};
use crate::store::{Attributes, Caller, Entry, Errno, Kind, Leases, NameIn, Place, Write};

/// Reason why it is unknown if the store has a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Doubt {
    /// A file with that name exists, which an earlier request may have created.
    Exists,
    /// The store does not know its directory.
    NoDirectory,
    /// The store does not know the directory whose attributes were set.
    Forgotten,
}

/// Returns true if the maker of a file may open it for reading.
fn is_readable(maker: &Caller, made: &Attributes) -> bool {
    made.kind == Kind::Regular
        && maker.uid == made.uid
        && (maker.uid == 0 || made.mode & 0o400 != 0)
}

impl Volume {
    /// Processes the result of one write; returns the doubt, if any.
    pub(super) fn landed(
        &self,
        number: u64,
        result: Result<Entry, Errno>,
        asked: Instant,
    ) -> Option<(u64, Doubt)> {
        let may_be_there = {
            let table = self.table();
            table
                .node(number)
                .and_then(|node| node.unborn.as_ref())
                .map(|newborn| newborn.may_be_there)
        };
        match (result, may_be_there) {
            (Ok(entry), Some(_)) => self.is_born(number, &entry, asked),
            (Err(Errno::EEXIST), Some(true)) => return Some((number, Doubt::Exists)),
            (Err(Errno::ESTALE | Errno::ENOENT), Some(_)) => {
                return Some((number, Doubt::NoDirectory));
            }
            (Err(errno), Some(_)) => self.is_refused(number, errno),
            (Err(Errno::ESTALE), None) => return Some((number, Doubt::Forgotten)),
            (result, None) => self.is_set(number, result, asked),
        }
        None
    }

    /// Resolves doubts. All of these files are in `Leaving`.
    ///
    /// # Errors
    /// A request is lost: the remaining files are queued again.
    pub(super) async fn settle_doubtful(&self, doubtful: Vec<(u64, Doubt)>) -> Result<(), Errno> {
        let mut found: HashMap<u64, Found> = HashMap::new();
        let mut lost = Ok(());
        for (number, doubt) in doubtful {
            let outcome = match (lost, doubt) {
                (Err(_), _) => lost,
                (Ok(()), Doubt::Exists) => self.compare(number).await,
                (Ok(()), Doubt::NoDirectory) => self.find_directory_of(number, &mut found).await,
                (Ok(()), Doubt::Forgotten) => self.find_forgotten(number).await,
            };
            if outcome.is_err() {
                lost = outcome;
                self.table().is_lost(number);
            }
        }
        lost
    }

    /// Compares a file with the existing one of its name, which an earlier request may have
    /// created.
    async fn compare(&self, number: u64) -> Result<(), Errno> {
        let (put, caller) = {
            let table = self.table();
            let caller =
                table.node(number).and_then(|node| Some(node.unborn.as_ref()?.caller.clone()));
            let Some(known) = table.put_of(number).zip(caller) else { return Ok(()) };
            known
        };
        let asked = crate::clock::now();
        let Some(entry) = self.found_there(&caller, &put).await? else {
            self.is_refused(number, Errno::EEXIST);
            return Ok(());
        };
        // The lost request may not have set all attributes of a directory.
        let set = Write::Set { place: Place::from(entry.attributes.id), changes: put.changes };
        match self.store.write(&caller, vec![set]).await?.pop().ok_or(Errno::EPROTO)? {
            Ok(entry) => self.is_born(number, &entry, asked),
            Err(errno) => self.is_refused(number, errno),
        }
        Ok(())
    }

    /// Checks, before a refused file is removed, if an earlier request has created it on the store
    /// after all.
    ///
    /// # Errors
    /// Unknown, since a request is lost.
    pub(super) async fn look_for_refused(&self, at: NameIn<'_, u64>) -> Result<(), Errno> {
        for _ in 0..MOST_SEARCHES {
            let (number, above, caller, put) = {
                let table = self.table();
                let Some((number, node)) = table.unborn_child(at) else { return Ok(()) };
                let refused =
                    node.unborn.as_ref().filter(|its| its.refusal().is_some() && its.may_be_there);
                let Some((newborn, (above, _))) = refused.zip(table.path_below(number)) else {
                    return Ok(());
                };
                let Some(put) = table.put_of(number) else { return Ok(()) };
                (number, above, newborn.caller.clone(), put)
            };
            let asked = crate::clock::now();
            match self.found_there(&caller, &put).await {
                Ok(Some(entry)) if self.table().take_refused(number) => {
                    self.is_born(number, &entry, asked)
                }
                // The executor has restarted.
                Err(Errno::ESTALE | Errno::EAGAIN) => {
                    match self.find_again(&caller, above).await? {
                        Found::There(_) => continue,
                        Found::Gone(_) => {}
                    }
                }
                Err(errno) if is_lost(errno) => return Err(errno),
                // It doesn't exist, is unreachable, or is being sent again meanwhile.
                Ok(_) | Err(_) => {}
            }
            return Ok(());
        }
        Err(Errno::EIO)
    }

    /// Looks up a file's directory by name, since the store does not know its id, or a directory
    /// above it is gone.
    async fn find_directory_of(
        &self,
        number: u64,
        known: &mut HashMap<u64, Found>,
    ) -> Result<(), Errno> {
        let (above, caller, searches) = {
            let mut table = self.table();
            let Some((above, _)) = table.path_below(number) else { return Ok(()) };
            let parent = table.node(number).and_then(|node| Some(node.at.as_ref()?.0));
            if parent.is_some_and(|parent| parent != above && table.is_pending(parent)) {
                // The result of the pending parent applies to this one, too.
                table.wait_again(number, false);
                return Ok(());
            }
            let Some(newborn) = table.node_mut(number).and_then(|node| node.unborn.as_mut()) else {
                return Ok(());
            };
            newborn.searches += 1;
            (above, newborn.caller.clone(), newborn.searches)
        };
        let found = match known.get(&above) {
            Some(found) => *found,
            None => self.find_again(&caller, above).await?,
        };
        known.insert(above, found);
        match found {
            Found::There(_) if searches <= MOST_SEARCHES => self.table().wait_again(number, false),
            Found::There(_) => self.is_refused(number, Errno::ENOENT),
            Found::Gone(first) => {
                self.is_refused(number, Errno::ESTALE);
                if let Some(first) = first {
                    self.table().keep_removed(above, first);
                }
            }
        }
        Ok(())
    }

    /// Looks up a directory by name, since setting its attributes has failed with `ESTALE`.
    async fn find_forgotten(&self, number: u64) -> Result<(), Errno> {
        let caller =
            self.table().node(number).and_then(|node| Some(node.own.as_ref()?.maker.clone()));
        match self.find_again(&caller.unwrap_or_default(), number).await? {
            Found::There(_) => self.table().is_lost(number),
            Found::Gone(_) => self.is_set(number, Err(Errno::ESTALE), crate::clock::now()),
        }
        Ok(())
    }

    /// Handles a refusal. The file stays pending; operations on it that need the store fail with
    /// the error.
    fn is_refused(&self, number: u64, errno: Errno) {
        let mut table = self.table();
        let path = table.path_to(number).map(|names| names.iter().collect::<PathBuf>());
        tracing::warn!(
            number,
            ?path,
            %errno,
            "the server does not take a file that was made here; it is kept"
        );
        table.refuse(number, errno);
    }

    /// Handles a creation.
    fn is_born(&self, number: u64, entry: &Entry, asked: Instant) {
        let mut table = self.table();
        let Some(newborn) = table.node_mut(number).and_then(|node| node.unborn.take()) else {
            return;
        };
        self.take_over(&mut table, number, entry, asked);
        let Some(node) = table.node_mut(number) else { return };
        let (leases, is_directory) = (node.leases, node.is_directory());
        node.pages_doubtful = !leases.contains(Leases::DATA);
        node.own = Some(Arc::clone(&newborn.own));
        if is_readable(&newborn.caller, &entry.attributes) {
            node.reader = Some(newborn.caller.uid);
        }
        let is_leased = leases.contains(Leases::ATTRIBUTES)
            && (!is_directory || leases.contains(Leases::ENTRIES));
        let doubtful = (!is_leased).then(|| table.take_told(entry.attributes.id));
        drop(table);
        if let (What::Regular(data), true) = (newborn.what, leases.contains(Leases::DATA))
            && !data.is_empty()
        {
            self.chunks.put((entry.attributes.id, 0), entry.attributes.version, data.into());
        }
        self.is_delivered(newborn.room);
        if doubtful.is_some() {
            // Without leases the kernel's caches may become stale.
            let _ = self.invalidate.send(Invalidate::of(number, doubtful));
        } else {
            self.is_outdated(number);
        }
        self.births.will_be_done(newborn.order);
    }

    /// Takes over the store's entry of a file that was pending.
    pub(super) fn take_over(&self, table: &mut Table, number: u64, entry: &Entry, asked: Instant) {
        let id = entry.attributes.id;
        table.bear(number, id);
        if let Some(node) = table.node_mut(number) {
            node.leases = Leases::empty();
        }
        if !table.learn_sent(entry, asked)
            && let Some(node) = table.node_mut(number)
        {
            node.lose(Leases::all());
        }
        let order = table.unborn.has_arrived(number);
        if table.node(number).is_some_and(|node| node.changed.is_some()) {
            table.unborn.is_dirty(number, order);
        }
        let Some((parent, name)) = table.node(number).and_then(|node| node.at.clone()) else {
            return;
        };
        if let Some(node) = table.node_mut(parent) {
            node.pending_names.remove(&name);
        }
        if let Some(parent) = table.node(parent).map(|node| node.file) {
            table.name(parent, &name, Some(id));
        }
    }

    /// Processes the result of setting a directory's attributes.
    fn is_set(&self, number: u64, result: Result<Entry, Errno>, asked: Instant) {
        let mut table = self.table();
        table.unborn.has_arrived(number);
        let before = table.node(number).and_then(|node| node.attributes);
        let is_changed_again = table.unborn.will_change_again(number);
        if let Some(node) = table.node_mut(number).filter(|_| !is_changed_again) {
            node.changed = None;
        }
        match result {
            Ok(entry) => {
                table.learn_sent(&entry, asked);
                drop(table);
                self.is_outdated(number);
                let (key, new) = ((entry.attributes.id, 0), entry.attributes);
                // Only attributes have changed: the contents of the old version are valid.
                let same =
                    before.filter(|before| before.size == new.size && new.size <= NEWBORN_BYTES);
                let kept = same.and_then(|before| self.chunks.get(key, before.version));
                kept.into_iter().for_each(|kept| self.chunks.put(key, new.version, kept));
            }
            // Another program has removed it.
            Err(Errno::ESTALE | Errno::ENOENT) => {}
            Err(errno) => {
                drop(table);
                self.tell_fault(number, &format!("attributes could not be set: {errno}"));
            }
        }
    }

    /// Releases the room of a file that the store has created.
    pub(super) fn is_delivered(&self, mut room: Room) {
        room.reserved.take().into_iter().for_each(ReservedPart::spend);
        self.give_back(room);
    }

    pub(super) fn give_back(&self, room: Room) {
        let bytes = room.bytes.as_ref().map_or(0, tokio::sync::OwnedSemaphorePermit::num_permits);
        self.writes.dirty.fetch_sub(bytes as u64, Ordering::Relaxed);
    }

    /// Drops a file whose creation has failed before its first close: its open files get the error.
    pub(super) fn is_stillborn(&self, number: u64, errno: Errno) {
        let mut table = self.table();
        let Some(node) = table.node_mut(number) else { return };
        let Some(newborn) = node.unborn.take() else { return };
        node.fault = Some(errno);
        node.lose(Leases::all());
        node.attributes = None;
        let (file, at) = (node.file, node.at.clone());
        table.unborn.has_arrived(number);
        if let Some((parent, name)) = &at
            && let Some(node) = table.node_mut(*parent)
        {
            node.pending_names.remove(name);
            let _ = self.invalidate.send(Invalidate::of(*parent, Some(vec![name.clone()])));
        }
        drop(table);
        self.give_back(newborn.room);
        self.note_fault(file, errno);
        let _ = self.invalidate.send(Invalidate::of(number, None));
        self.births.is_done(&[newborn.order]);
    }
}
