//! Replay of pending files from an earlier gateway's journal; report and recovery of files that the
//! server refuses.

use std::{
    collections::HashMap,
    ffi::{OsStr, OsString},
    io,
    path::PathBuf,
    sync::Arc,
};

use super::{
    MOST_SEARCHES, Volume,
    found::is_lost,
    table::{ROOT, Table},
    unborn::{Newborn, Own, What},
};
use crate::{
    journal::{Journal, Record},
    recovery::Recovery,
    store::{
        Answer, Attributes, Caller, Errno, FileId, Kind, NameIn, NewFile, NewTime, Op, Put, Time,
    },
};

/// A record that is kept and not sent.
#[derive(Debug)]
pub(super) struct Unplaced {
    record: Record,
    why: Errno,
}

impl Unplaced {
    pub(super) fn new(record: Record, why: Errno) -> Self {
        Self { record, why }
    }

    fn path(&self) -> PathBuf {
        path_of(&self.record)
    }
}

fn path_of(record: &Record) -> PathBuf {
    record.home.iter().chain(&record.put.path).collect()
}

/// Returns the records that become pending files, and the others.
///
/// Invariant: a path is that of one pending file. Of several records the last is the file that the
/// user has seen there last: one before it was removed, which a damaged journal does not know any
/// more, or its directory was gone, and another is there now.
pub(super) fn without_superseded(left: Vec<Record>) -> (Vec<Record>, Vec<Unplaced>) {
    let mut last = HashMap::new();
    last.extend(left.iter().map(|record| (path_of(record), record.order)));
    let (placed, others): (Vec<_>, Vec<_>) = left
        .into_iter()
        .partition(|record| last.get(&path_of(record)).is_some_and(|last| *last == record.order));
    (placed, others.into_iter().map(|record| Unplaced::new(record, Errno::EEXIST)).collect())
}

/// A directory in a record's path.
enum Above {
    /// On the server, with its name.
    Stored(FileId, OsString),
    /// Pending, with its number.
    Pending(u64),
}

impl Above {
    /// Returns its id, if it is on the server.
    fn file(&self) -> Option<FileId> {
        match self {
            Self::Stored(file, _) => Some(*file),
            Self::Pending(_) => None,
        }
    }
}

impl Volume {
    /// Sets the journal of a volume that changes nothing on its store: the records that are left
    /// are kept, told, and can be recovered.
    pub fn withhold_journal(&self, journal: Journal, left: Vec<Record>) {
        let withheld = left.into_iter().map(|record| Unplaced::new(record, Errno::EROFS));
        self.births.unplaced().extend(withheld);
        let _ = self.births.journal.set(journal);
    }

    /// Makes a record a pending file again.
    pub(super) async fn take_up_record(self: &Arc<Self>, record: Record) -> Result<(), Errno> {
        let Some(way) = self.way_of(&record).await? else {
            tracing::warn!(
                path = ?record.put.path,
                "the directory of a file that was closed here is gone; the file is kept"
            );
            self.births.unplaced().push(Unplaced::new(record, Errno::ESTALE));
            return Ok(());
        };
        let file = Arc::clone(&self.births.files).acquire_owned().await.ok();
        let mut table = self.table();
        // Under one lock: an unused directory may be evicted at any time.
        let parent = table.put_in_place(way);
        if table.add_record(record, parent, file).is_none() {
            tracing::error!("a record of the journal can't be read");
        }
        Ok(())
    }

    /// Returns the directories of a record's path, on the server or pending. `None`: one of them is
    /// gone.
    async fn way_of(&self, record: &Record) -> Result<Option<Vec<Above>>, Errno> {
        for _ in 0..MOST_SEARCHES {
            match self.way_once(record).await {
                // The executor has restarted since the last step, and doesn't know the id of the
                // directory, which still exists.
                Err(Errno::ESTALE) => {}
                Err(errno) if is_lost(errno) => return Err(Errno::ETIMEDOUT),
                way => return way,
            }
        }
        Err(Errno::ETIMEDOUT)
    }

    async fn way_once(&self, record: &Record) -> Result<Option<Vec<Above>>, Errno> {
        let Some((_, below)) = record.put.path.split_last() else { return Ok(None) };
        let mut at = Some(self.store.root());
        let mut way = Vec::new();
        for name in &record.home {
            let Some(from) = at else { return Ok(None) };
            let Some(next) = self.above(&record.caller, from, name).await? else { return Ok(None) };
            at = next.file();
            way.push(next);
        }
        if at != Some(record.put.directory) {
            // Another directory has its name now.
            return Ok(None);
        }
        for name in below {
            let next = match (at, way.last()) {
                (Some(from), _) => self.above(&record.caller, from, name).await?,
                (None, Some(Above::Pending(parent))) => {
                    self.table().pending_directory(NameIn { parent: *parent, name })
                }
                (None, _) => None,
            };
            let Some(next) = next else { return Ok(None) };
            at = next.file();
            way.push(next);
        }
        Ok(Some(way))
    }

    /// Looks up a directory in one that is on the server.
    async fn above(
        &self,
        caller: &Caller,
        from: FileId,
        name: &OsStr,
    ) -> Result<Option<Above>, Errno> {
        let pending = {
            let table = self.table();
            let parent = table.number_of(from);
            parent.and_then(|parent| table.pending_directory(NameIn { parent, name }))
        };
        if pending.is_some() {
            return Ok(pending);
        }
        match self.ask_once(caller, Op::Walk { from, names: vec![name.to_owned()] }).await {
            Ok(Answer::Walked(walked)) => {
                let entry =
                    walked.entries.first().filter(|entry| entry.attributes.kind == Kind::Directory);
                Ok(entry.map(|entry| Above::Stored(entry.attributes.id, name.to_owned())))
            }
            Ok(_) => Err(Errno::EPROTO),
            Err(errno) if errno == Errno::ESTALE || is_lost(errno) => Err(errno),
            Err(_) => Ok(None),
        }
    }

    /// Returns a message about refused files, or else about another failure.
    pub(super) fn undelivered(&self) -> Option<String> {
        let refused = self.refused();
        let unplaced = self
            .births
            .unplaced()
            .iter()
            .map(|unplaced| (unplaced.path(), unplaced.why))
            .collect::<Vec<_>>();
        let count = refused.len() + unplaced.len();
        let Some((path, errno)) = refused
            .iter()
            .map(|(_, path, errno)| (path, *errno))
            .chain(unplaced.iter().map(|(path, errno)| (path, *errno)))
            .next()
        else {
            return self.births.fault();
        };
        let and = if count > 1 { format!(" and {} more", count - 1) } else { String::new() };
        Some(format!(
            "{}{and} could not be made on the server ({errno}): kept here; \
             free space or repair the place, \
             or take the files out with \"posh volumes recover\"",
            path.display()
        ))
    }

    /// Returns numbers, paths and errors of all refused files, parents first.
    fn refused(&self) -> Vec<(u64, PathBuf, Errno)> {
        let table = self.table();
        let mut refused: Vec<_> = table
            .unborn
            .refused
            .values()
            .filter_map(|number| {
                let errno = table.node(*number)?.unborn.as_ref()?.refusal()?;
                Some((*number, table.path_to(*number)?.iter().collect(), errno))
            })
            .collect();
        refused.sort_by(|(_, one, _), (_, other, _): &(u64, PathBuf, Errno)| one.cmp(other));
        refused
    }

    /// Copies all refused files to a directory, under their paths in the volume, and drops them
    /// when all are copied. Returns the number of files. Blocks.
    ///
    /// Files that the volume shows come first, so that they keep their names if others have the
    /// same ones ([`Recovery::put`]); then those of earlier gateways, in the order of their closes.
    ///
    /// # Errors
    /// That of the first failed copy: then no file is dropped.
    pub fn recover(&self, to: &Recovery) -> io::Result<u64> {
        let mut copied = Vec::new();
        for (number, path, _) in self.refused() {
            let Some(put) = self.table().put_of(number) else { continue };
            to.put(&path, &put)?;
            copied.push((number, put));
        }
        let unplaced: Vec<(u64, PathBuf, Put)> = self
            .births
            .unplaced()
            .iter()
            .map(|unplaced| (unplaced.record.order, unplaced.path(), unplaced.record.put.clone()))
            .collect();
        for (_, path, put) in &unplaced {
            to.put(path, put)?;
        }
        let all = copied.iter().map(|(_, put)| put).chain(unplaced.iter().map(|(_, _, put)| put));
        let count = all.filter(|put| !matches!(put.what, NewFile::Directory)).count();
        let orders: Vec<u64> = unplaced.into_iter().map(|(order, ..)| order).collect();
        self.births.unplaced().retain(|unplaced| !orders.contains(&unplaced.record.order));
        self.births.is_done(&orders);
        // Children first.
        for (number, put) in copied.into_iter().rev() {
            self.forget_refused(number, &put);
        }
        Ok(count as u64)
    }

    /// Drops a refused file if it is unchanged since it was copied. A directory with new pending
    /// files stays.
    fn forget_refused(&self, number: u64, copied: &Put) {
        let mut table = self.table();
        let Some(node) = table.node(number) else { return };
        let is_refused = node.unborn.as_ref().is_some_and(|newborn| newborn.refusal().is_some());
        let Some((parent, name)) = node.at.clone() else { return };
        let is_same = || node.is_directory() || table.put_of(number).as_ref() == Some(copied);
        if !is_refused || !node.pending_names.is_empty() || !is_same() {
            return;
        }
        self.forget_newborn(&mut table, number, NameIn { parent, name: &name });
        drop(table);
        let _ = self.invalidate.send(super::Invalidate::of(parent, Some(vec![name])));
    }
}

impl Table {
    /// Returns a pending directory by its name.
    fn pending_directory(&self, at: NameIn<'_, u64>) -> Option<Above> {
        let (number, node) = self.unborn_child(at)?;
        node.is_directory().then_some(Above::Pending(number))
    }

    /// Notes the directories of a path in the table; returns the number of the last one.
    fn put_in_place(&mut self, way: Vec<Above>) -> u64 {
        way.into_iter().fold(ROOT, |parent, above| match above {
            Above::Pending(number) => number,
            Above::Stored(file, name) => {
                let number = self.number(file);
                self.place(file, NameIn { parent, name: &name });
                number
            }
        })
    }

    fn add_record(
        &mut self,
        record: Record,
        parent: u64,
        file: Option<tokio::sync::OwnedSemaphorePermit>,
    ) -> Option<u64> {
        let Record { order, caller, put, .. } = record;
        let name = put.path.last()?.clone();
        let attributes = attributes_of(&put, &caller);
        let directory = Attributes { kind: Kind::Directory, mode: 0o700, ..attributes };
        let own = Arc::new(Own { maker: caller.clone(), attributes: directory });
        let what = match put.what {
            NewFile::Regular { data } => What::Regular(data.to_vec()),
            NewFile::Symlink { target } => What::Symlink(target),
            NewFile::Directory => What::Directory,
        };
        let newborn = Newborn {
            order,
            may_be_there: true,
            is_noted: true,
            ..Newborn::new(what, &caller, put.mode, own, file)
        };
        let bytes = newborn.bytes();
        let at = NameIn { parent, name: &name };
        let (number, _) = self.add_newborn(newborn, attributes, at)?;
        if let Some(node) = self.node_mut(number) {
            node.changed = Some(Box::new(put.changes));
        }
        self.node_mut(parent)?.pending_names.insert(name, number);
        self.is_ready(number, bytes);
        Some(number)
    }
}

/// Returns the attributes to show until the store has the file.
fn attributes_of(put: &Put, caller: &Caller) -> Attributes {
    let time = |time: Option<NewTime>| match time {
        Some(NewTime::At(time)) => time,
        _ => Time::default(),
    };
    let (kind, size) = match &put.what {
        NewFile::Regular { data } => (Kind::Regular, data.len() as u64),
        NewFile::Symlink { target } => (Kind::Symlink, target.len() as u64),
        NewFile::Directory => (Kind::Directory, 0),
    };
    Attributes {
        id: FileId::default(),
        kind,
        mode: put.changes.mode.unwrap_or(put.mode),
        links: 1,
        uid: put.changes.uid.unwrap_or(caller.uid),
        gid: put.changes.gid.unwrap_or(caller.gid),
        size,
        blocks: size.div_ceil(4096) * 8,
        atime: time(put.changes.atime),
        mtime: time(put.changes.mtime),
        ctime: time(put.changes.mtime),
        rdev: 0,
        version: 0,
        acls: None,
    }
}
