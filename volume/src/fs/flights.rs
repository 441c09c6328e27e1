//! Composes requests of pending files and changes. It never waits and never calls the store.

use bytes::Bytes;

use super::{
    table::Table,
    unborn::{Stage, What},
};
use crate::store::{Attributes, Caller, Changes, Errno, NewFile, NewTime, Place, Put, Write};

/// Limit for the contents in one request: large enough to fill a link.
pub(super) const FLIGHT_BYTES: usize = 2 << 20;

/// Limit of new files in one request, which the server creates one after the other.
pub(super) const FLIGHT_FILES: usize = 2048;

/// Limit of components in a path on the wire; deeper files wait until their directories exist on
/// the store.
pub(super) const MAX_DEPTH: usize = 64;

/// A request.
#[derive(Debug)]
pub(super) struct Flight {
    pub caller: Caller,
    pub writes: Vec<Write>,
    /// Number of each write's file.
    pub numbers: Vec<u64>,
}

impl Table {
    /// Returns the next request: new files in their order, then attributes of directories, if no
    /// more files are queued or there are waiters. Files in a refused directory are refused with
    /// it.
    pub fn next_flight(&mut self) -> Option<Flight> {
        let mut flight: Option<Flight> = None;
        let mut bytes = 0;
        while let Some((order, number)) =
            self.unborn.queue.first_key_value().map(|(turn, number)| (*turn, *number))
        {
            let Some(unborn) = self.node(number).and_then(|node| node.unborn.as_ref()) else {
                self.unborn.queue.remove(&order);
                continue;
            };
            let (size, caller) = (unborn.bytes(), unborn.caller.clone());
            let is_full = flight.as_ref().is_some_and(|flight| {
                flight.writes.len() >= FLIGHT_FILES
                    || bytes + size > FLIGHT_BYTES
                    || flight.caller != caller
            });
            if is_full {
                break;
            }
            let put = self.put_that_may_go(number);
            if put == Err(Errno::ENAMETOOLONG) && flight.is_some() {
                // Its path is shorter once its directories exist on the store.
                break;
            }
            self.unborn.queue.remove(&order);
            self.unborn.bytes = self.unborn.bytes.saturating_sub(size);
            let put = match put {
                Ok(put) => put,
                Err(errno) => {
                    self.refuse(number, errno);
                    continue;
                }
            };
            let sent = put.changes;
            self.unborn.leaving.insert(number, order);
            bytes += size;
            let flight = flight.get_or_insert_with(|| Flight {
                caller,
                writes: Vec::new(),
                numbers: Vec::new(),
            });
            flight.writes.push(Write::Put(put));
            flight.numbers.push(number);
            self.note_leaving(number, order, sent);
        }
        self.add_sets(&mut flight);
        flight
    }

    /// Returns a file's put. `ENAMETOOLONG`: too deep to be sent together with its directories.
    fn put_that_may_go(&self, number: u64) -> Result<Put, Errno> {
        let parent = self.node(number).and_then(|node| Some(node.at.as_ref()?.0));
        if let Some(errno) = parent.and_then(|parent| self.refusal(parent)) {
            return Err(errno);
        }
        let put = self.put_of(number).ok_or(Errno::EIO)?;
        let above = self.of(put.directory).ok_or(Errno::EIO)?;
        match above.fault {
            Some(errno) => Err(errno),
            None if put.path.len() > MAX_DEPTH => Err(Errno::ENAMETOOLONG),
            None => Ok(put),
        }
    }

    /// Returns the put for a pending file in its present state.
    pub fn put_of(&self, number: u64) -> Option<Put> {
        let node = self.node(number)?;
        let (unborn, attributes) = node.unborn.as_ref().zip(node.attributes.as_ref())?;
        let (above, path) = self.path_below(number)?;
        let above = self.node(above)?;
        let what = match &unborn.what {
            What::Regular(data) => NewFile::Regular { data: Bytes::copy_from_slice(data) },
            What::Directory => NewFile::Directory,
            What::Symlink(target) => NewFile::Symlink { target: target.clone() },
        };
        let changes = changes_of(attributes, node.changed.as_deref().copied());
        Some(Put { directory: above.file, path, what, mode: unborn.mode, changes })
    }

    /// Notes that a file is being sent: later changes go with a later request, and the parent's
    /// times must be set, since the new name changes them on the store.
    fn note_leaving(&mut self, number: u64, order: u64, sent: Changes) {
        let parent = self.node(number).and_then(|node| Some(node.at.as_ref()?.0));
        if let Some(node) = self.node_mut(number) {
            node.send_changes(sent);
            if let Some(unborn) = &mut node.unborn {
                unborn.stage = Stage::Leaving;
            }
        }
        if let Some(parent) = parent {
            self.note_changed(parent, Changes::default(), order);
        }
    }

    fn add_sets(&mut self, flight: &mut Option<Flight>) {
        let is_last = self.unborn.queue.is_empty();
        let demanded = self.unborn.demanded;
        let dirty: Vec<(u64, u64)> =
            self.unborn.dirty.iter().map(|(number, order)| (*number, *order)).collect();
        for (number, order) in dirty.into_iter().filter(|(_, order)| is_last || *order <= demanded)
        {
            let Some((caller, write)) = self.set_of(number) else {
                self.unborn.dirty.remove(&number);
                continue;
            };
            let full = |flight: &Flight| {
                flight.caller != caller || flight.writes.len() >= 2 * FLIGHT_FILES
            };
            if flight.as_ref().is_some_and(full) {
                continue;
            }
            self.unborn.dirty.remove(&number);
            self.unborn.leaving.insert(number, order);
            let flight = flight.get_or_insert_with(|| Flight {
                caller,
                writes: Vec::new(),
                numbers: Vec::new(),
            });
            flight.writes.push(write);
            flight.numbers.push(number);
        }
    }

    /// Returns the write that sets a directory's attributes, and its caller.
    fn set_of(&self, number: u64) -> Option<(Caller, Write)> {
        let node =
            self.node(number).filter(|node| node.unborn.is_none() && node.fault.is_none())?;
        let changes = changes_of(node.attributes.as_ref()?, Some(**node.changed.as_ref()?));
        Some((
            node.own.as_ref()?.maker.clone(),
            Write::Set { place: Place::from(node.file), changes },
        ))
    }
}

/// Returns the changed attributes, with the shown times, so that these stay the same.
pub(super) fn changes_of(attributes: &Attributes, changed: Option<Changes>) -> Changes {
    Changes {
        atime: Some(NewTime::At(attributes.atime)),
        mtime: Some(NewTime::At(attributes.mtime)),
        ..changed.unwrap_or_default()
    }
}
