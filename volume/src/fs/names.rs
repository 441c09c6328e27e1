//! Look-up, creation, removal and renaming of names. A change goes to the server before it is
//! answered, except for files created in memory.

use std::{ffi::OsStr, sync::Arc, time::SystemTime};

use super::{
    Volume,
    listing::For,
    newborn::clock_offset,
    table::{Known, Node},
    unborn::What,
};
use crate::store::{
    Answer, Caller, Entry, Errno, FileId, Kind, Leases, NewMode, Op, OpenFlags, Removal, Renaming,
};

/// Number of look-ups in a directory after which all of it is listed, so that one answer serves the
/// rest.
const SINGLE_QUESTIONS: u32 = 3;

/// The longest name that Linux file systems have.
const NAME_BYTES: usize = 255;

impl Volume {
    /// Looks up a name.
    ///
    /// # Errors
    /// `ENOENT`, to be cached as [`Volume::tell_absent`] says; others.
    pub async fn lookup(
        self: &Arc<Self>,
        caller: &Caller,
        parent: u64,
        name: &OsStr,
    ) -> Result<Entry, Errno> {
        let entry = self.look_up(caller, parent, name).await?;
        self.table().place(entry.attributes.id, parent, name);
        Ok(entry)
    }

    async fn look_up(
        self: &Arc<Self>,
        caller: &Caller,
        parent: u64,
        name: &OsStr,
    ) -> Result<Entry, Errno> {
        if name.len() > NAME_BYTES {
            // Otherwise a complete listing would lead to ENOENT.
            return Err(Errno::ENAMETOOLONG);
        }
        if let Some(entry) = self.unborn_entry(parent, name) {
            return Ok(entry);
        }
        let known = self.table().known(parent, name);
        if let Known::File(file) = known {
            self.drain(file).await?;
        }
        if let Some(known) = self.remembered(parent, name) {
            return known;
        }
        let directory = self.born(parent).await?;
        if self.is_asked_often(parent) {
            // On a failure the name is requested below.
            let _ = self.list_all(caller, directory, For::Program).await;
            if let Some(known) = self.remembered(parent, name) {
                return known;
            }
        }
        let entry = self.walk_to(caller, directory, name).await?;
        if !self.writes.is_dirty(entry.attributes.id) {
            return Ok(entry);
        }
        // Another hard link of a file with unsent writes: the answer has its old size.
        self.drain(entry.attributes.id).await?;
        self.walk_to(caller, directory, name).await
    }

    fn is_asked_often(&self, parent: u64) -> bool {
        let mut table = self.table();
        let Some(node) = table.node_mut(parent) else { return false };
        node.asked += 1;
        node.asked == SINGLE_QUESTIONS && !node.is_complete
    }

    async fn walk_to(
        &self,
        caller: &Caller,
        directory: FileId,
        name: &OsStr,
    ) -> Result<Entry, Errno> {
        let op = Op::Walk { from: directory, names: vec![name.to_owned()] };
        let Answer::Walked(walked) = self.ask(caller, op).await? else { return Err(Errno::EPROTO) };
        let found = walked.entries.first().copied();
        match (found, walked.error) {
            (Some(entry), _) => {
                self.remember_name(&walked.from, name, Some(entry.attributes.id));
                Ok(entry)
            }
            (None, Some(Errno::ENOENT)) => {
                self.remember_name(&walked.from, name, None);
                Err(Errno::ENOENT)
            }
            (None, error) => Err(error.unwrap_or(Errno::EPROTO)),
        }
    }

    /// Caches a name from its directory's answer, unless there was a later one about the directory.
    pub(super) fn remember_name(&self, directory: &Entry, name: &OsStr, file: Option<FileId>) {
        self.table().found(directory, name, file);
    }

    fn remembered(&self, parent: u64, name: &OsStr) -> Option<Result<Entry, Errno>> {
        let table = self.table();
        if !table.node(parent).is_some_and(|directory| self.is_good(directory)) {
            return None;
        }
        match table.known(parent, name) {
            Known::Absent => Some(Err(Errno::ENOENT)),
            Known::Unknown => None,
            Known::File(file) => {
                let node = table.of(file).filter(|node| {
                    node.leases.contains(Leases::ATTRIBUTES) && self.is_good(node)
                })?;
                let attributes = node.attributes?;
                Some(Ok(Entry { attributes, leases: node.leases, stamp: node.stamp }))
            }
        }
    }

    /// mkdir(2)
    ///
    /// # Errors
    /// Of the call.
    pub async fn make_directory(
        self: &Arc<Self>,
        caller: &Caller,
        parent: u64,
        name: &OsStr,
        mode: NewMode,
    ) -> Result<Entry, Errno> {
        let new = (What::Directory, mode.masked);
        if let Some((entry, _)) =
            self.conceive(caller, (parent, name), new, OpenFlags::empty()).await
        {
            return Ok(entry);
        }
        let above = self.born(parent).await?;
        let op = Op::MakeDirectory { parent: above, name: name.to_owned(), mode };
        let asked = SystemTime::now();
        let (entry, ()) =
            tokio::join!(self.made(caller, name, op), self.reserve_first(caller, above));
        let entry = entry?;
        self.births.set_clock(clock_offset((asked, SystemTime::now()), entry.attributes.ctime));
        self.table().is_own(&entry, caller, (parent, name));
        Ok(entry)
    }

    /// mknod(2). A regular file is created by an open.
    ///
    /// # Errors
    /// Of the call.
    pub async fn make_node(
        self: &Arc<Self>,
        caller: &Caller,
        (parent, name): (u64, &OsStr),
        mode: NewMode,
        (kind, rdev): (Kind, u64),
    ) -> Result<Entry, Errno> {
        if kind == Kind::Regular {
            let (opened, entry) = self
                .create(caller, (parent, name), mode, OpenFlags::WRITE | OpenFlags::EXCLUSIVE)
                .await?;
            self.release(opened.number, None).await?;
            return Ok(entry);
        }
        let op = Op::MakeNode {
            parent: self.born(parent).await?,
            name: name.to_owned(),
            mode,
            kind,
            rdev,
        };
        self.made(caller, name, op).await
    }

    /// symlink(2)
    ///
    /// # Errors
    /// Of the call.
    pub async fn symlink(
        self: &Arc<Self>,
        caller: &Caller,
        parent: u64,
        name: &OsStr,
        target: &OsStr,
    ) -> Result<Entry, Errno> {
        // A symbolic link has no mode of its own.
        let new = (What::Symlink(target.to_owned()), 0);
        if let Some((entry, _)) =
            self.conceive(caller, (parent, name), new, OpenFlags::empty()).await
        {
            return Ok(entry);
        }
        let (name, target) = (name.to_owned(), target.to_owned());
        let op = Op::Symlink { parent: self.born(parent).await?, name: name.clone(), target };
        self.made(caller, &name, op).await
    }

    /// link(2)
    ///
    /// # Errors
    /// Of the call.
    pub async fn link(
        self: &Arc<Self>,
        caller: &Caller,
        file: u64,
        parent: u64,
        name: &OsStr,
    ) -> Result<Entry, Errno> {
        let file = self.born(file).await?;
        self.drain(file).await?;
        let (parent, name) = (self.born(parent).await?, name.to_owned());
        let answer =
            self.ask_of(caller, file, |file| Op::Link { file, parent, name: name.clone() }).await?;
        self.note_made(answer, &name)
    }

    async fn made(&self, caller: &Caller, name: &OsStr, op: Op) -> Result<Entry, Errno> {
        let answer = self.ask(caller, op).await?;
        self.note_made(answer, name)
    }

    fn note_made(&self, answer: Answer, name: &OsStr) -> Result<Entry, Errno> {
        let Answer::Made { entry, parent } = answer else { return Err(Errno::EPROTO) };
        self.note_name(&parent, name, Some(entry.attributes.id));
        Ok(entry)
    }

    /// Applies this session's own change of a name to the cache.
    pub(super) fn note_name(&self, parent: &Entry, name: &OsStr, file: Option<FileId>) {
        let mut table = self.table();
        let id = parent.attributes.id;
        if let (Some(file), Some(number)) = (file, table.number_of(id)) {
            table.place(file, number, name);
        }
        match table.of_mut(id) {
            Some(node) if node.stamp == parent.stamp => {}
            // A later answer: cached names may be newer than this change.
            Some(node) => return node.lose(Leases::ENTRIES),
            None => return,
        }
        table.renamed(id, name, file);
    }

    /// unlink(2) or rmdir(2)
    ///
    /// # Errors
    /// Of the call.
    pub async fn remove(
        self: &Arc<Self>,
        caller: &Caller,
        parent: u64,
        name: &OsStr,
        what: Removal,
    ) -> Result<(), Errno> {
        self.look_for_refused(parent, name).await?;
        if let Some(removed) = self.remove_newborn(caller, parent, name, what) {
            return removed;
        }
        self.bear_child(parent, name).await?;
        self.hold_open(caller, (parent, name)).await;
        let op = Op::Remove { parent: self.born(parent).await?, name: name.to_owned(), what };
        let Answer::Removed { parent, .. } = self.ask(caller, op).await? else {
            return Err(Errno::EPROTO);
        };
        self.note_name(&parent, name, None);
        Ok(())
    }

    /// renameat2(2). The file's writes are sent before.
    ///
    /// # Errors
    /// Of the call.
    pub async fn rename(
        self: &Arc<Self>,
        caller: &Caller,
        (from, name): (u64, &OsStr),
        (to, new_name): (u64, &OsStr),
        how: Renaming,
    ) -> Result<(), Errno> {
        self.bear_child(from, name).await?;
        self.bear_child(to, new_name).await?;
        self.drain_renamed(from, name).await?;
        if how == Renaming::Replace {
            self.hold_open(caller, (to, new_name)).await;
        }
        let at = (from, to);
        let (from, to) = (
            (self.born(from).await?, name.to_owned()),
            (self.born(to).await?, new_name.to_owned()),
        );
        let answer = self.ask(caller, Op::Rename { from, to, how }).await?;
        let Answer::Renamed { from, to, file, other } = answer else { return Err(Errno::EPROTO) };
        if how == Renaming::Replace
            && other.is_some_and(|other| other.attributes.id == file.attributes.id)
        {
            // Two names of one file: a no-op (rename(2)).
            return Ok(());
        }
        self.table().place(file.attributes.id, at.1, new_name);
        let exchanged =
            other.filter(|_| how == Renaming::Exchange).map(|entry| entry.attributes.id);
        if let Some(exchanged) = exchanged {
            self.table().place(exchanged, at.0, name);
        }
        {
            // The kernel moves its cached dentries.
            let mut table = self.table();
            table.told(at.1, new_name);
            table.told(at.0, name);
        }
        if from.attributes.id == to.attributes.id {
            self.note_name(&to, name, exchanged);
            // For a rename within one directory the later answer counts.
            self.note_name(&to, new_name, Some(file.attributes.id));
        } else {
            self.note_name(&from, name, exchanged);
            self.note_name(&to, new_name, Some(file.attributes.id));
        }
        Ok(())
    }

    /// Sends the file of a name to the server, with all pending files in it.
    ///
    /// # Errors
    /// The error of its creation.
    async fn bear_child(self: &Arc<Self>, parent: u64, name: &OsStr) -> Result<(), Errno> {
        let number = {
            let table = self.table();
            match table.known(parent, name) {
                Known::File(file) => table.number_of(file),
                _ => None,
            }
        };
        let Some(number) = number else { return Ok(()) };
        match self.born(number).await {
            // Other errors are reported by the call itself.
            Err(errno) if self.table().node(number).is_some_and(Node::is_ahead) => Err(errno),
            _ => Ok(()),
        }
    }

    async fn drain_renamed(&self, parent: u64, name: &OsStr) -> Result<(), Errno> {
        let known = self.table().known(parent, name);
        match known {
            Known::File(file) => self.drain(file).await,
            _ => self.drain_all().await,
        }
    }
}
