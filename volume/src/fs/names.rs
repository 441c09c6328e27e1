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
    Answer, Caller, Entry, Errno, FileId, Kind, Leases, NameIn, NewMode, Op, OpenFlags, Removal,
    Renaming,
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
        at: NameIn<'_, u64>,
    ) -> Result<Entry, Errno> {
        let entry = self.look_up(caller, at).await?;
        self.table().place(entry.attributes.id, at);
        Ok(entry)
    }

    async fn look_up(
        self: &Arc<Self>,
        caller: &Caller,
        at: NameIn<'_, u64>,
    ) -> Result<Entry, Errno> {
        let NameIn { parent, name } = at;
        if name.len() > NAME_BYTES {
            // Otherwise a complete listing would lead to ENOENT.
            return Err(Errno::ENAMETOOLONG);
        }
        if let Some(entry) = self.unborn_entry(at) {
            return Ok(entry);
        }
        let known = self.table().known(at);
        if let Known::File(file) = known {
            self.drain(file).await?;
        }
        if let Some(known) = self.remembered(at) {
            return known;
        }
        let directory = self.born(parent).await?;
        if self.is_asked_often(parent) {
            // On a failure the name is requested below.
            let _ = self.list_all(caller, directory, For::Program).await;
            if let Some(known) = self.remembered(at) {
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

    fn remembered(&self, at: NameIn<'_, u64>) -> Option<Result<Entry, Errno>> {
        let table = self.table();
        if !table.node(at.parent).is_some_and(|directory| self.is_good(directory)) {
            return None;
        }
        match table.known(at) {
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
        at: NameIn<'_, u64>,
        mode: NewMode,
    ) -> Result<Entry, Errno> {
        let (what, flags) = (What::Directory, OpenFlags::empty());
        if let Some((entry, _)) = self.conceive(caller, at, what, mode.masked, flags).await {
            return Ok(entry);
        }
        let above = self.born(at.parent).await?;
        let op = Op::MakeDirectory { parent: above, name: at.name.to_owned(), mode };
        let asked = SystemTime::now();
        let (entry, ()) =
            tokio::join!(self.made(caller, at.name, op), self.reserve_first(caller, above));
        let entry = entry?;
        self.births.set_clock(clock_offset(asked, SystemTime::now(), entry.attributes.ctime));
        self.table().is_own(&entry, caller, at);
        Ok(entry)
    }

    /// mknod(2). A regular file is created by an open.
    ///
    /// # Errors
    /// Of the call.
    pub async fn make_node(
        self: &Arc<Self>,
        caller: &Caller,
        at: NameIn<'_, u64>,
        mode: NewMode,
        kind: Kind,
        rdev: u64,
    ) -> Result<Entry, Errno> {
        if kind == Kind::Regular {
            let flags = OpenFlags::WRITE | OpenFlags::EXCLUSIVE;
            let (opened, entry) = self.create(caller, at, mode, flags).await?;
            self.release(opened.number, None).await?;
            return Ok(entry);
        }
        let (parent, name) = (self.born(at.parent).await?, at.name.to_owned());
        let op = Op::MakeNode { parent, name, mode, kind, rdev };
        self.made(caller, at.name, op).await
    }

    /// symlink(2)
    ///
    /// # Errors
    /// Of the call.
    pub async fn symlink(
        self: &Arc<Self>,
        caller: &Caller,
        at: NameIn<'_, u64>,
        target: &OsStr,
    ) -> Result<Entry, Errno> {
        // A symbolic link has no mode of its own.
        let (what, mode) = (What::Symlink(target.to_owned()), 0);
        let conceived = self.conceive(caller, at, what, mode, OpenFlags::empty()).await;
        if let Some((entry, _)) = conceived {
            return Ok(entry);
        }
        let (name, target) = (at.name.to_owned(), target.to_owned());
        let op = Op::Symlink { parent: self.born(at.parent).await?, name, target };
        self.made(caller, at.name, op).await
    }

    /// link(2)
    ///
    /// # Errors
    /// Of the call.
    pub async fn link(
        self: &Arc<Self>,
        caller: &Caller,
        file: u64,
        at: NameIn<'_, u64>,
    ) -> Result<Entry, Errno> {
        let file = self.born(file).await?;
        self.drain(file).await?;
        let (parent, name) = (self.born(at.parent).await?, at.name.to_owned());
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
            table.place(file, NameIn { parent: number, name });
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
        at: NameIn<'_, u64>,
        what: Removal,
    ) -> Result<(), Errno> {
        self.look_for_refused(at).await?;
        if let Some(removed) = self.remove_newborn(caller, at, what) {
            return removed;
        }
        self.bear_child(at).await?;
        self.hold_open(caller, at).await;
        let (parent, name) = (self.born(at.parent).await?, at.name.to_owned());
        let op = Op::Remove { parent, name, what };
        let Answer::Removed { parent, .. } = self.ask(caller, op).await? else {
            return Err(Errno::EPROTO);
        };
        self.note_name(&parent, at.name, None);
        Ok(())
    }

    /// renameat2(2). The file's writes are sent before.
    ///
    /// # Errors
    /// Of the call.
    pub async fn rename(
        self: &Arc<Self>,
        caller: &Caller,
        old: NameIn<'_, u64>,
        new: NameIn<'_, u64>,
        how: Renaming,
    ) -> Result<(), Errno> {
        self.bear_child(old).await?;
        self.bear_child(new).await?;
        self.drain_renamed(old).await?;
        if how == Renaming::Replace {
            self.hold_open(caller, new).await;
        }
        let op = Op::Rename {
            parent: self.born(old.parent).await?,
            name: old.name.to_owned(),
            new_parent: self.born(new.parent).await?,
            new_name: new.name.to_owned(),
            how,
        };
        let answer = self.ask(caller, op).await?;
        let Answer::Renamed { from, to, file, other } = answer else { return Err(Errno::EPROTO) };
        if how == Renaming::Replace
            && other.is_some_and(|other| other.attributes.id == file.attributes.id)
        {
            // Two names of one file: a no-op (rename(2)).
            return Ok(());
        }
        self.table().place(file.attributes.id, new);
        let exchanged =
            other.filter(|_| how == Renaming::Exchange).map(|entry| entry.attributes.id);
        if let Some(exchanged) = exchanged {
            self.table().place(exchanged, old);
        }
        {
            // The kernel moves its cached dentries.
            let mut table = self.table();
            table.told(new);
            table.told(old);
        }
        if from.attributes.id == to.attributes.id {
            self.note_name(&to, old.name, exchanged);
            // For a rename within one directory the later answer counts.
            self.note_name(&to, new.name, Some(file.attributes.id));
        } else {
            self.note_name(&from, old.name, exchanged);
            self.note_name(&to, new.name, Some(file.attributes.id));
        }
        Ok(())
    }

    /// Sends the file of a name to the server, with all pending files in it.
    ///
    /// # Errors
    /// The error of its creation.
    async fn bear_child(self: &Arc<Self>, at: NameIn<'_, u64>) -> Result<(), Errno> {
        let number = {
            let table = self.table();
            match table.known(at) {
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

    async fn drain_renamed(&self, at: NameIn<'_, u64>) -> Result<(), Errno> {
        let known = self.table().known(at);
        match known {
            Known::File(file) => self.drain(file).await,
            _ => self.drain_all().await,
        }
    }
}
