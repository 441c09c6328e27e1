//! Files created and changed in memory, without a round trip for each, in directories that this
//! session has created and no other session knows. Each operation reports whether it was possible
//! in memory; if not, the file is created on the store first, and the store is called. `births`
//! sends the files.
//!
//! An operation is not possible in memory if the server could refuse it for reasons other than mode
//! and owner, or if other sessions could see the difference.

use std::{
    ffi::OsString,
    sync::{Arc, PoisonError, atomic::Ordering},
    time::{Duration, SystemTime},
};

use bytes::Bytes;

use super::{
    Opened, Volume,
    files::Open,
    table::{Known, Node, Table},
    unborn::{Newborn, Own, Stage, What},
};
use crate::store::{
    Acls, Attributes, Caller, Changes, Entry, Errno, Kind, Leases, NameIn, NewFile, NewTime,
    OpenFlags, PositionIn, Removal, Time, room_of_file,
};

/// Limit for files in memory; a larger file is written to the server while it grows.
pub(super) const NEWBORN_BYTES: u64 = 256 << 10;

/// setuid, setgid and sticky, which the server sets and clears by its own rules.
const SPECIAL: u32 = 0o7000;

/// setgid, which new directories inherit.
const SETGID: u32 = 0o2000;

/// Owner's permissions that are necessary to create names in a directory.
const MAY_MAKE: u32 = 0o300;

/// Leases of a pending file, which no other session knows.
const ALL_ITS_LEASES: Leases = Leases::ATTRIBUTES.union(Leases::ENTRIES).union(Leases::WRITE);

impl Volume {
    /// Creates a file in memory; `None` if that is not possible.
    pub(super) async fn conceive(
        self: &Arc<Self>,
        caller: &Caller,
        at: NameIn<'_, u64>,
        what: What,
        mode: u32,
        flags: OpenFlags,
    ) -> Option<(Entry, Option<Opened>)> {
        let is_plain = mode & SPECIAL == 0 && !flags.contains(OpenFlags::DIRECT);
        if !is_plain || self.settings.sync || !self.births.are_kept() {
            return None;
        }
        if !self.may_make(&self.table(), caller, at) {
            return None;
        }
        let above = self.table().known_above(at.parent)?;
        let reserved = self.reserve(caller, above, most_room(&what)).await?;
        let room = Arc::clone(&self.births.files).acquire_owned().await.ok()?;
        let mut table = self.table();
        // Checked again after the wait.
        if !self.may_make(&table, caller, at) {
            return None;
        }
        let own = table.node(at.parent)?.own.clone()?;
        let attributes = self.new_attributes(&table, at.parent, &own, &what, mode);
        let open = matches!(what, What::Regular(_)).then(|| self.fresh_number());
        let mut newborn = Newborn {
            flags,
            stage: open.map_or(Stage::Waiting, Stage::Open),
            order: table.unborn.next(),
            ..Newborn::new(what, caller, mode, own, Some(room))
        };
        newborn.room.reserved = Some(reserved);
        let (number, entry) = table.add_newborn(newborn, attributes, at)?;
        let is_direct = self.writes_whole(flags);
        let opened = open.map(|number| Opened { number, keeps_pages: false, is_direct });
        if let Some(opened) = opened {
            table.unborn.has_begun(number);
            self.add_open(
                Open { is_direct, ..Open::new(entry.attributes.id, flags, caller) },
                opened.number,
            );
        } else if self.births.note(&table, number) {
            table.is_ready(number, 0);
        } else {
            table.discard(number);
            return None;
        }
        self.add_name(&mut table, at, number);
        drop(table);
        self.births.wake();
        Some((entry, opened))
    }

    /// Returns true if the caller may create that name in memory.
    fn may_make(&self, table: &Table, caller: &Caller, at: NameIn<'_, u64>) -> bool {
        let Some(node) = table.node(at.parent) else { return false };
        let (Some(own), Some(attributes)) = (&node.own, &node.attributes) else { return false };
        let is_as_made = (attributes.uid, attributes.gid)
            == (own.attributes.uid, own.attributes.gid)
            && attributes.mode & MAY_MAKE == MAY_MAKE;
        // A default ACL changes the modes of new files.
        let is_plain = attributes.acls.is_none_or(|acls| !acls.contains(Acls::DEFAULT));
        own.maker == *caller
            && is_as_made
            && is_plain
            && node.fault.is_none()
            && node.is_complete
            && self.is_held(table, at.parent)
            && table.known(at) == Known::Absent
            && table.first_to_retry().is_none()
    }

    /// Returns true if names are likely to be created in a directory in memory.
    pub(super) fn may_be_made_in(&self, table: &Table, directory: &Node) -> bool {
        let number = table.number_of(directory.file);
        directory.own.is_some()
            && directory.is_complete
            && number.is_some_and(|number| self.is_held(table, number))
    }

    /// Returns true if this session has a valid write lease of the directory, or of its nearest
    /// ancestor that the store knows.
    fn is_held(&self, table: &Table, directory: u64) -> bool {
        let stored = table.way_up(directory).find(|(_, node)| node.unborn.is_none());
        stored.is_some_and(|(_, node)| {
            let needed = if node.is_directory() { Leases::ENTRIES } else { Leases::ATTRIBUTES };
            node.fault.is_none()
                && node.leases.contains(Leases::WRITE | needed)
                && self.is_good(node)
        })
    }

    fn new_attributes(
        &self,
        table: &Table,
        parent: u64,
        own: &Own,
        what: &What,
        mode: u32,
    ) -> Attributes {
        let now = self.births.now();
        let new = Attributes {
            mode,
            links: 1,
            size: 0,
            blocks: 0,
            atime: now,
            mtime: now,
            ctime: now,
            ..own.attributes
        };
        match what {
            What::Regular(_) => Attributes { kind: Kind::Regular, ..new },
            What::Symlink(target) => {
                Attributes { kind: Kind::Symlink, mode: 0o777, size: target.len() as u64, ..new }
            }
            What::Directory => {
                let above = table
                    .node(parent)
                    .and_then(|node| node.attributes)
                    .map_or(0, |parent| parent.mode);
                let Attributes { links, size, blocks, .. } = own.attributes;
                Attributes {
                    kind: Kind::Directory,
                    mode: mode | above & SETGID,
                    links,
                    size,
                    blocks,
                    ..new
                }
            }
        }
    }

    fn add_name(&self, table: &mut Table, at: NameIn<'_, u64>, number: u64) {
        let now = self.births.now();
        let is_directory = table.node(number).is_some_and(|node| node.is_directory());
        let Some(node) = table.node_mut(at.parent) else { return };
        node.pending_names.insert(at.name.to_owned(), number);
        node.listing = None;
        node.orders = None;
        node.share.orders.clear();
        node.name_changes += 1;
        if let Some(attributes) = &mut node.attributes {
            attributes.mtime = now;
            attributes.ctime = now;
            // On file systems that count subdirectories as links.
            attributes.links += u32::from(is_directory && attributes.links > 1);
        }
    }

    pub(super) fn add_open(&self, open: Open, number: u64) {
        self.opens.lock().unwrap_or_else(PoisonError::into_inner).insert(number, Arc::new(open));
    }

    /// Returns the entry of a pending file by its name.
    pub(super) fn unborn_entry(&self, at: NameIn<'_, u64>) -> Option<Entry> {
        let table = self.table();
        let (_, node) = table.unborn_child(at)?;
        Some(Entry { attributes: node.attributes?, leases: node.leases, stamp: node.stamp })
    }

    /// Returns the attributes of a pending file.
    pub(super) fn unborn_attributes(&self, number: u64) -> Option<Attributes> {
        let table = self.table();
        table.node(number).filter(|node| node.unborn.is_some())?.attributes
    }

    pub(super) fn unborn_target(&self, number: u64) -> Option<OsString> {
        match &self.table().node(number)?.unborn.as_ref()?.what {
            What::Symlink(target) => Some(target.clone()),
            _ => None,
        }
    }

    /// Writes to an open file in memory. Returns false if it is not, or no longer, in memory, or
    /// would become too large.
    pub(super) fn write_newborn(
        &self,
        open: &Open,
        at: PositionIn<u64>,
        data: &Bytes,
        appends: bool,
    ) -> bool {
        let mut table = self.table();
        let now = self.births.now();
        let Some(file) = table.number_of(open.file) else { return false };
        let Some(node) = table.node_mut(file) else { return false };
        let (Some(newborn), Some(attributes)) = (&mut node.unborn, &mut node.attributes) else {
            return false;
        };
        let offset = if appends { attributes.size } else { at.offset };
        let end = offset.saturating_add(data.len() as u64);
        let Some(end) =
            Some(end).filter(|end| *end <= NEWBORN_BYTES).and_then(|end| usize::try_from(end).ok())
        else {
            return false;
        };
        if newborn.stage != Stage::Open(at.file) || !self.resize(newborn, end, false) {
            return false;
        }
        let What::Regular(contents) = &mut newborn.what else { return false };
        contents[end - data.len()..end].copy_from_slice(data);
        newborn.is_noted = false;
        let size = contents.len() as u64;
        *attributes =
            Attributes { size, blocks: blocks_of(size), mtime: now, ctime: now, ..*attributes };
        true
    }

    /// Resizes the contents; returns false if there is no room.
    fn resize(&self, newborn: &mut Newborn, length: usize, cuts: bool) -> bool {
        let What::Regular(contents) = &mut newborn.what else { return false };
        let grows = length.saturating_sub(contents.len());
        if grows > 0 {
            let permits = u32::try_from(grows).unwrap_or(u32::MAX);
            let Ok(room) = Arc::clone(&self.writes.room).try_acquire_many_owned(permits) else {
                return false;
            };
            self.writes.dirty.fetch_add(grows as u64, Ordering::Relaxed);
            match &mut newborn.room.bytes {
                Some(all) => all.merge(room),
                none => *none = Some(room),
            }
        }
        if grows > 0 || cuts {
            // When it shrinks, it keeps its room until it is on the store.
            contents.resize(length, 0);
        }
        true
    }

    /// Reads from an open pending file.
    pub(super) fn read_newborn(&self, open: &Open, offset: u64, size: u32) -> Option<Bytes> {
        if !open.file.is_provisional() {
            return None;
        }
        let table = self.table();
        let What::Regular(contents) = &table.of(open.file)?.unborn.as_ref()?.what else {
            return None;
        };
        let within =
            |offset: u64| usize::try_from(offset).unwrap_or(usize::MAX).min(contents.len());
        let end = offset.saturating_add(u64::from(size));
        Some(Bytes::copy_from_slice(&contents[within(offset)..within(end)]))
    }

    /// close(2): writes the file to the journal. Returns false if the store must create it first.
    pub(super) fn flush_newborn(&self, open: &Open) -> bool {
        let mut table = self.table();
        let Some(number) = table.number_of(open.file) else { return false };
        let Some(newborn) = table.node(number).and_then(|node| node.unborn.as_ref()) else {
            return false;
        };
        if newborn.is_noted {
            return true;
        }
        // Without the lease the server might refuse it later.
        if !newborn.is_here() || !self.is_held(&table, number) || !self.births.note(&table, number)
        {
            return false;
        }
        if let Some(newborn) = table.node_mut(number).and_then(|node| node.unborn.as_mut()) {
            newborn.is_noted = true;
        }
        true
    }

    /// Last close: queues the file for the next request. Returns false if it is not, or no longer,
    /// in memory.
    pub(super) fn release_newborn(&self, number: u64, open: &Open) -> bool {
        if !self.flush_newborn(open) {
            return false;
        }
        let mut table = self.table();
        let Some(file) = table.number_of(open.file).filter(|file| !table.unborn.is_demanded(*file))
        else {
            return false;
        };
        let Some(newborn) = table.node_mut(file).and_then(|node| node.unborn.as_mut()) else {
            return false;
        };
        if newborn.stage != Stage::Open(number) {
            return false;
        }
        newborn.stage = Stage::Waiting;
        let bytes = newborn.bytes();
        if let Some(reserved) = &mut newborn.room.reserved {
            reserved.shrink(room_of_file(bytes as u64));
        }
        table.is_ready(file, bytes);
        drop(table);
        self.opens.lock().unwrap_or_else(PoisonError::into_inner).remove(&number);
        self.births.wake();
        true
    }

    /// chmod(2), chown(2), truncate(2), utimensat(2) in memory; `None` if that is not possible.
    pub(super) fn change_newborn(
        &self,
        caller: &Caller,
        number: u64,
        open: Option<u64>,
        changes: &Changes,
    ) -> Option<Attributes> {
        let mut table = self.table();
        let node = table.node(number)?;
        let is_held = self.is_held(&table, number);
        let own = match &node.unborn {
            Some(newborn) if newborn.is_here() => Arc::clone(&newborn.own),
            // It is being sent without this change, which follows in a later request.
            Some(newborn) if is_held && changes.size.is_none() => Arc::clone(&newborn.own),
            // Only without unsent writes, which would change its times later.
            None if is_held && !self.writes.is_dirty(node.file) => node.own.clone()?,
            _ => return None,
        };
        let may = may_change(&own, caller, &node.attributes?, changes);
        let order = table.unborn.next();
        let now = self.births.now();
        let node = table.node_mut(number).filter(|_| may)?;
        let attributes = node.attributes.as_mut()?;
        if let Some(size) = changes.size {
            let newborn = node.unborn.as_mut()?;
            let is_open = newborn.flags.contains(OpenFlags::WRITE)
                && open.is_some_and(|o| newborn.stage == Stage::Open(o));
            let length = usize::try_from(size).ok().filter(|_| is_open && size <= NEWBORN_BYTES)?;
            if !self.resize(newborn, length, true) {
                return None;
            }
            *attributes = Attributes { size, blocks: blocks_of(size), mtime: now, ..*attributes };
        }
        apply(attributes, changes, now);
        let changed = *attributes;
        if let Some(newborn) = &mut node.unborn {
            newborn.is_noted = false;
        }
        let is_waiting =
            node.unborn.as_ref().is_some_and(|newborn| newborn.stage == Stage::Waiting);
        table.note_changed(number, *changes, order);
        if is_waiting {
            // Updates the record of its close; on a failure the old record stays.
            self.births.note(&table, number);
        }
        drop(table);
        self.births.wake();
        Some(changed)
    }

    /// unlink(2) or rmdir(2) of a pending file, which is dropped. `None`: the store may have it.
    ///
    /// # Errors
    /// Those of the system call.
    pub(super) fn remove_newborn(
        &self,
        caller: &Caller,
        at: NameIn<'_, u64>,
        what: Removal,
    ) -> Option<Result<(), Errno>> {
        let mut table = self.table();
        let (number, node) = table.unborn_child(at)?;
        let newborn = node.unborn.as_ref()?;
        let is_here = match newborn.stage {
            Stage::Waiting => !newborn.may_be_there && !node.is_directory(),
            Stage::Refused(_) => true,
            Stage::Open(_) | Stage::Leaving => false,
        };
        let is_empty = node.pending_names.is_empty();
        let may_write = |attributes: Attributes| attributes.mode & MAY_MAKE == MAY_MAKE;
        let may = newborn.caller == *caller || caller.uid == 0;
        if !is_here
            || !may
            || !table.node(at.parent).and_then(|node| node.attributes).is_none_or(may_write)
        {
            return None;
        }
        match (what, node.is_directory()) {
            (Removal::File, true) => return Some(Err(Errno::EISDIR)),
            (Removal::Directory, false) => return Some(Err(Errno::ENOTDIR)),
            (Removal::Directory, true) if !is_empty => return Some(Err(Errno::ENOTEMPTY)),
            _ => {}
        }
        self.forget_newborn(&mut table, number, at);
        Some(Ok(()))
    }

    /// Drops a pending file that will not be sent.
    pub(super) fn forget_newborn(&self, table: &mut Table, number: u64, at: NameIn<'_, u64>) {
        let NameIn { parent, name } = at;
        let Some(node) = table.node_mut(number) else { return };
        let Some(newborn) = node.unborn.take() else { return };
        node.fault = Some(Errno::ESTALE);
        self.births.is_done(&[newborn.order]);
        table.unborn.withdraw(newborn.turn, newborn.bytes());
        self.give_back(newborn.room);
        let (now, order) = (self.births.now(), table.unborn.next());
        let Some(node) = table.node_mut(parent) else { return };
        node.pending_names.remove(name);
        node.name_changes += 1;
        if let Some(attributes) = &mut node.attributes {
            attributes.mtime = now;
            attributes.ctime = now;
        }
        if node.own.is_some() {
            table.note_changed(parent, Changes::default(), order);
        }
    }
}

impl Table {
    /// Adds a pending file to the table, but not its name to the directory.
    pub(super) fn add_newborn(
        &mut self,
        newborn: Newborn,
        attributes: Attributes,
        at: NameIn<'_, u64>,
    ) -> Option<(u64, Entry)> {
        let number = self.insert_unborn();
        let node = self.node_mut(number)?;
        let attributes = Attributes { id: node.file, ..attributes };
        node.attributes = Some(attributes);
        node.leases = ALL_ITS_LEASES;
        node.at = Some((at.parent, at.name.to_owned()));
        node.is_complete = true;
        node.own = Some(Arc::clone(&newborn.own));
        node.unborn = Some(Box::new(newborn));
        Some((number, Entry { attributes, leases: node.leases, stamp: node.stamp }))
    }
}

/// Returns the maximum space, in bytes, that the store may need for a file created in memory.
fn most_room(what: &What) -> u64 {
    match what {
        What::Regular(_) => room_of_file(NEWBORN_BYTES),
        What::Directory | What::Symlink(_) => NewFile::Directory.room(),
    }
}

/// Returns true if the caller may certainly make these changes, by the rules of chmod(2), chown(2)
/// and utimensat(2).
fn may_change(own: &Own, caller: &Caller, attributes: &Attributes, changes: &Changes) -> bool {
    let is_root = own.is_root() && caller.uid == 0;
    let is_owner = own.maker == *caller && attributes.uid == own.attributes.uid;
    let is_same = |new: Option<u32>, is: u32| new.is_none_or(|new| new == is);
    let stays_with = is_same(changes.uid, attributes.uid) && is_same(changes.gid, attributes.gid);
    let is_plain = |mode: u32| {
        let may_make = attributes.kind != Kind::Directory || mode & MAY_MAKE == MAY_MAKE;
        mode & SPECIAL == 0 && attributes.mode & SPECIAL == 0 && may_make
    };
    (is_root || is_owner && stays_with) && changes.mode.is_none_or(is_plain)
}

/// Applies changes, except for the size.
fn apply(attributes: &mut Attributes, changes: &Changes, now: Time) {
    attributes.mode = changes.mode.unwrap_or(attributes.mode);
    attributes.uid = changes.uid.unwrap_or(attributes.uid);
    attributes.gid = changes.gid.unwrap_or(attributes.gid);
    attributes.atime = changes.atime.map_or(attributes.atime, |time| time_of(time, now));
    attributes.mtime = changes.mtime.map_or(attributes.mtime, |time| time_of(time, now));
    attributes.ctime = now;
}

fn time_of(time: NewTime, now: Time) -> Time {
    match time {
        NewTime::Now => now,
        NewTime::At(time) => time,
    }
}

fn blocks_of(size: u64) -> u64 {
    // Most file systems' number, until the server's is known.
    size.div_ceil(4096) * 8
}

/// Returns the offset of another machine's clock in nanoseconds, from its time `there` between two
/// of ours: the possible value closest to 0.
pub(super) fn clock_offset(asked: SystemTime, answered: SystemTime, there: Time) -> i64 {
    let nanoseconds = |time: SystemTime| {
        let since = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or(Duration::ZERO);
        i64::try_from(since.as_nanos()).unwrap_or(i64::MAX)
    };
    let there =
        there.seconds.saturating_mul(1_000_000_000).saturating_add(there.nanoseconds.into());
    let (least, most) =
        (there.saturating_sub(nanoseconds(answered)), there.saturating_sub(nanoseconds(asked)));
    0.clamp(least.min(most), most)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clocks_that_may_agree_agree() {
        let at = |nanoseconds| SystemTime::UNIX_EPOCH + Duration::from_nanos(nanoseconds);
        let there = |nanoseconds: u32| Time { seconds: 0, nanoseconds };
        assert_eq!(clock_offset(at(100), at(200), there(150)), 0);
        assert_eq!(clock_offset(at(100), at(200), there(500)), 300);
        assert_eq!(clock_offset(at(100), at(200), there(30)), -70);
    }
}
