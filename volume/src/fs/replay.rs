//! Pending files that an earlier gateway has left in the journal, and what can be said and done
//! about those that the server does not take.

use std::{
    ffi::{OsStr, OsString},
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

use super::{
    MOST_SEARCHES, Volume,
    found::is_lost,
    table::{ROOT, Table},
    unborn::{Newborn, Own, What},
};
use crate::{
    journal::{self, Record},
    store::{Answer, Attributes, Caller, Errno, FileId, Kind, NewFile, NewTime, Op, Put, Time},
};

/// A record whose directory is not there any more.
#[derive(Debug)]
pub(super) struct Unplaced(Record);

impl Unplaced {
    fn path(&self) -> PathBuf {
        self.0.home.iter().chain(&self.0.put.path).collect()
    }
}

/// A directory above a record's place.
enum Above {
    /// On the server, with its name.
    Stored(FileId, OsString),
    /// Its number.
    Pending(u64),
}

impl Above {
    /// As the server knows it.
    fn file(&self) -> Option<FileId> {
        match self {
            Self::Stored(file, _) => Some(*file),
            Self::Pending(_) => None,
        }
    }
}

impl Volume {
    /// Makes what a record tells of a pending file again.
    pub(super) async fn take_up_record(self: &Arc<Self>, record: Record) -> Result<(), Errno> {
        let Some(way) = self.way_of(&record).await? else {
            tracing::warn!(
                path = ?record.put.path,
                "the directory of a file that was closed here is gone; the file is kept"
            );
            self.births.unplaced().push(Unplaced(record));
            return Ok(());
        };
        let file = Arc::clone(&self.births.files).acquire_owned().await.ok();
        let mut table = self.table();
        // Together: a directory that nothing uses may be given up at any time.
        let parent = table.put_in_place(way);
        if table.add_record(record, parent, file).is_none() {
            tracing::error!("a record of the journal can't be read");
        }
        Ok(())
    }

    /// The directories down to a record's place, on the server or pending themselves. `None`: one
    /// of them is gone.
    async fn way_of(&self, record: &Record) -> Result<Option<Vec<Above>>, Errno> {
        for _ in 0..MOST_SEARCHES {
            match self.way_once(record).await {
                // The executor was started anew since the last step, and does not know the
                // directory, which is not gone for that.
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
            // Another directory has its name.
            return Ok(None);
        }
        for name in below {
            let next = match (at, way.last()) {
                (Some(from), _) => self.above(&record.caller, from, name).await?,
                (None, Some(Above::Pending(parent))) => {
                    self.table().pending_directory(*parent, name)
                }
                (None, _) => None,
            };
            let Some(next) = next else { return Ok(None) };
            at = next.file();
            way.push(next);
        }
        Ok(Some(way))
    }

    /// A directory in one that the server has.
    async fn above(
        &self,
        caller: &Caller,
        from: FileId,
        name: &OsStr,
    ) -> Result<Option<Above>, Errno> {
        let pending = {
            let table = self.table();
            table.number_of(from).and_then(|parent| table.pending_directory(parent, name))
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

    /// What was made here and is not on the server, since it does not take it, in words.
    pub(super) fn undelivered(&self) -> Option<String> {
        let refused = self.refused();
        let unplaced = self
            .births
            .unplaced()
            .iter()
            .map(|unplaced| (unplaced.path(), Errno::ESTALE))
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

    /// Numbers, paths and reasons of all pending files that the store has refused, those above
    /// first.
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

    /// Copies the pending files that the store does not take to a directory of this machine, under
    /// the paths that they have in the volume, and forgets them when all are there. What is there
    /// already is not replaced. Their number. Blocks.
    ///
    /// # Errors
    /// Of the first that could not be copied: then nothing is forgotten.
    pub fn recover(&self, to: &Path) -> io::Result<u64> {
        let mut copied = Vec::new();
        for (number, path, _) in self.refused() {
            let Some(put) = self.table().put_of(number) else { continue };
            journal::write_out(&put, &to.join(path))?;
            copied.push((number, put));
        }
        let unplaced: Vec<(u64, PathBuf, Put)> = self
            .births
            .unplaced()
            .iter()
            .map(|unplaced| (unplaced.0.order, unplaced.path(), unplaced.0.put.clone()))
            .collect();
        for (_, path, put) in &unplaced {
            journal::write_out(put, &to.join(path))?;
        }
        let all = copied.iter().map(|(_, put)| put).chain(unplaced.iter().map(|(_, _, put)| put));
        let count = all.filter(|put| !matches!(put.what, NewFile::Directory)).count();
        let orders: Vec<u64> = unplaced.into_iter().map(|(order, ..)| order).collect();
        self.births.unplaced().retain(|unplaced| !orders.contains(&unplaced.0.order));
        self.births.is_done(&orders);
        // Those below first.
        for (number, put) in copied.into_iter().rev() {
            self.forget_refused(number, &put);
        }
        Ok(count as u64)
    }

    /// If it is as it was copied. A directory in which something was made meanwhile stays.
    fn forget_refused(&self, number: u64, copied: &Put) {
        let mut table = self.table();
        let Some(node) = table.node(number) else { return };
        let is_refused = node.unborn.as_ref().is_some_and(|newborn| newborn.refusal().is_some());
        let Some((parent, name)) = node.at.clone() else { return };
        let is_same = || node.is_directory() || table.put_of(number).as_ref() == Some(copied);
        if !is_refused || !node.pending_names.is_empty() || !is_same() {
            return;
        }
        self.forget_newborn(&mut table, number, (parent, &name));
        drop(table);
        let _ = self.invalidate.send(super::Invalidate::of(parent, Some(vec![name])));
    }
}

impl Table {
    /// A directory that is not on the server, by its name.
    fn pending_directory(&self, parent: u64, name: &OsStr) -> Option<Above> {
        let (number, node) = self.unborn_child(parent, name)?;
        node.is_directory().then_some(Above::Pending(number))
    }

    /// The number of the last directory, with all above it where they are.
    fn put_in_place(&mut self, way: Vec<Above>) -> u64 {
        way.into_iter().fold(ROOT, |parent, above| match above {
            Above::Pending(number) => number,
            Above::Stored(file, name) => {
                let number = self.number(file);
                self.place(file, parent, &name);
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
        let (number, _) = self.add_newborn(newborn, attributes, (parent, &name))?;
        if let Some(node) = self.node_mut(number) {
            node.changed = Some(Box::new(put.changes));
        }
        self.node_mut(parent)?.pending_names.insert(name, number);
        self.is_ready(number, bytes);
        Some(number)
    }
}

/// What is shown of it until the store has it.
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
