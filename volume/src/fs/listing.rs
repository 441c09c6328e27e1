//! Directories as they are read: one listing for each open directory, which stays as it was when it was begun,
//! with the attributes of its files.

use std::{
    ffi::OsString,
    sync::{Arc, PoisonError},
};

use super::{Volume, table::Cursor};
use crate::store::{Answer, Caller, Entry, Errno, FileId, Kind, Leases, Listed, Op};

/// Names of one answer: about 300 KiB with their attributes, so that a large directory takes few round trips and
/// the first names do not wait for the last.
const NAMES_AT_ONCE: u32 = 4096;

/// An open directory.
#[derive(Debug)]
pub struct Directory {
    number: u64,
    caller: Caller,
    names: tokio::sync::Mutex<Option<Arc<Vec<Listed>>>>,
}

/// A name of a directory, as the kernel wants it.
#[derive(Debug, Clone)]
pub struct Name {
    /// One component; `.` and `..` too.
    pub name: OsString,
    /// What the next part begins with.
    pub next: u64,
    /// The file; `None` for `.` and `..`, and for a file that has to be looked up.
    pub entry: Option<Entry>,
    /// Its number as `ls -i` shows it.
    pub inode: u64,
    /// What it is.
    pub kind: Kind,
}

impl Volume {
    /// opendir(3). Whether it may be read, the first part tells.
    ///
    /// # Errors
    /// `ESTALE`
    pub fn open_directory(&self, caller: &Caller, number: u64) -> Result<u64, Errno> {
        self.file(number)?;
        let open = self.fresh_number();
        let directory = Directory { number, caller: caller.clone(), names: tokio::sync::Mutex::default() };
        self.directories.lock().unwrap_or_else(PoisonError::into_inner).insert(open, Arc::new(directory));
        Ok(open)
    }

    /// closedir(3)
    pub fn close_directory(&self, open: u64) {
        self.directories.lock().unwrap_or_else(PoisonError::into_inner).remove(&open);
    }

    /// The names from `offset` on, more than the kernel takes at once. Attributes are there only where they are true now.
    ///
    /// # Errors
    /// Of reading the directory.
    pub async fn read_directory(self: &Arc<Self>, open: u64, offset: u64) -> Result<Vec<Name>, Errno> {
        let directory = self.directories.lock().unwrap_or_else(PoisonError::into_inner).get(&open).cloned();
        let directory = directory.ok_or(Errno::EBADF)?;
        let mut names = directory.names.lock().await;
        // From its start it is read anew, as rewinddir(3) wants it.
        if offset == 0 || names.is_none() {
            let file = self.born(directory.number).await?;
            *names = Some(self.list_all(&directory.caller, file).await?);
        }
        let listed = names.clone().unwrap_or_default();
        let own = self.table().node(directory.number).map_or(0, |node| node.file.inode);
        let dots = [".", ".."].into_iter().zip(1..).map(|(name, next)| Name {
            name: name.into(),
            next,
            entry: None,
            inode: own,
            kind: Kind::Directory,
        });
        let from = usize::try_from(offset).unwrap_or(usize::MAX);
        let table = self.table();
        let files =
            listed.iter().zip(3..).skip(from.saturating_sub(2)).take(NAMES_FOR_THE_KERNEL).map(|(listed, next)| {
                let known =
                    listed.entry.and_then(|entry| table.of(entry.attributes.id)).filter(|node| self.is_good(node));
                let known = known.filter(|node| !self.writes.is_dirty(node.file));
                let entry = known.and_then(|node| {
                    node.attributes.map(|attributes| Entry { attributes, leases: node.leases, stamp: node.stamp })
                });
                // What stat(2) shows.
                let inode = listed.entry.and_then(|entry| table.number_of(entry.attributes.id)).unwrap_or(listed.inode);
                Name { name: listed.name.clone(), next, entry, inode, kind: listed.kind }
            });
        Ok(dots.skip(from).chain(files).collect())
    }

    /// All names of a directory, remembered if its lease allows it.
    pub(super) async fn list_all(&self, caller: &Caller, file: FileId) -> Result<Arc<Vec<Listed>>, Errno> {
        if let Some(listing) = self.remembered_listing(file) {
            return Ok(listing);
        }
        let made = self.table().of(file).map(|node| node.made);
        let mut names = Vec::new();
        let mut cookie = 0;
        let mut first = None;
        loop {
            let op = Op::List { directory: file, cookie, limit: NAMES_AT_ONCE };
            let Answer::Listing(part) = self.ask(caller, op).await? else { return Err(Errno::EPROTO) };
            first = first.or(Some(part.directory));
            cookie = part.names.last().map_or(cookie, |listed| listed.cookie);
            let ends = part.is_last || part.names.is_empty();
            names.extend(part.names);
            if ends {
                let names = Arc::new(names);
                if self.table().of(file).map(|node| node.made) == made {
                    self.remember_listing(first.as_ref(), &part.directory, &names);
                }
                return Ok(names);
            }
        }
    }

    fn remembered_listing(&self, file: FileId) -> Option<Arc<Vec<Listed>>> {
        let table = self.table();
        let node = table.of(file).filter(|node| node.leases.contains(Leases::ENTRIES))?;
        node.listing.clone().filter(|_| self.is_good(node))
    }

    /// It holds if the directory was the same from the first part to the last, and nothing was heard of it since.
    fn remember_listing(&self, first: Option<&Entry>, last: &Entry, names: &Arc<Vec<Listed>>) {
        let mut table = self.table();
        let is_one = first.is_some_and(|first| first.attributes.version == last.attributes.version);
        let Some(node) = table.of_mut(last.attributes.id) else { return };
        if !is_one || node.stamp != last.stamp || !node.leases.contains(Leases::ENTRIES) {
            return;
        }
        node.listing = Some(Arc::clone(names));
        node.names = names.iter().filter_map(|l| Some((l.name.clone(), Some(l.entry?.attributes.id)))).collect();
        // A name whose file can't be looked at is there all the same.
        node.is_complete = names.iter().all(|listed| listed.entry.is_some());
        if !node.is_complete {
            node.listing = None;
        }
        let mut order: Vec<(&OsString, FileId)> =
            names.iter().filter_map(|listed| Some((&listed.name, listed.entry?.attributes.id))).collect();
        order.sort_unstable();
        node.order = Some(Arc::new(order.iter().map(|(_, file)| *file).collect()));
        node.cursor = Cursor::default();
        for (_, file) in order {
            if let Some(node) = table.of_mut(file) {
                node.parent = Some(last.attributes.id);
            }
        }
    }
}

/// More than fit into one answer to the kernel (128 KiB).
const NAMES_FOR_THE_KERNEL: usize = 1024;
