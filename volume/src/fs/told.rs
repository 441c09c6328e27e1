//! Prefetch of announced files: files that a program is known to read are fetched, and trees
//! listed, before it begins, in the announced order. Nothing waits for it, correctness doesn't
//! depend on it, and its errors are ignored.

use std::{
    collections::BTreeMap,
    ffi::{OsStr, OsString},
    path::{Component, Path, PathBuf},
    sync::Arc,
};

use tokio::task::{AbortHandle, JoinSet};

use super::{
    Volume,
    listing::For,
    readers::ReaderId,
    table::{Known, ROOT},
    tours::TourId,
};
use crate::store::{Answer, Caller, Entry, Errno, FileId, Kind, Listed, NameIn, Op};

/// Number of names in one directory from which on it is listed, instead of looking each one up.
const LISTED_FROM: usize = 3;

/// Limit of directories that are looked up concurrently.
const DIRECTORIES_AT_ONCE: usize = 32;

/// An announced read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Expected {
    /// The contents of a file, by its path below the volume's root.
    File(PathBuf),
    /// All names below a directory; also the contents, once the first file of them is opened.
    Tree(PathBuf),
}

/// Guard of a prefetch, which ends when this is dropped.
#[derive(Debug)]
pub struct Expectation {
    volume: Arc<Volume>,
    reader: ReaderId,
    tour: TourId,
    task: AbortHandle,
}

impl Drop for Expectation {
    fn drop(&mut self) {
        self.task.abort();
        self.volume.readers().end(self.reader);
        self.volume.tours().end(self.tour);
    }
}

impl Volume {
    /// Starts to prefetch the files that `caller` is going to read, in that order. Must be called
    /// inside the volume's Tokio runtime. Prefetched files that are not opened yet are limited to a
    /// share of the memory for contents.
    #[must_use]
    pub fn will_read(self: &Arc<Self>, caller: &Caller, expected: Vec<Expected>) -> Expectation {
        let has_files = expected.iter().any(|expected| matches!(expected, Expected::File(_)));
        let reader = self.readers().told(has_files);
        let tour = self.tours().told(reader);
        let (volume, caller) = (Arc::clone(self), caller.clone());
        let task =
            tokio::spawn(
                async move { volume.find_expected(&caller, expected, reader, tour).await },
            );
        Expectation { volume: Arc::clone(self), reader, tour, task: task.abort_handle() }
    }

    async fn find_expected(
        self: Arc<Self>,
        caller: &Caller,
        expected: Vec<Expected>,
        reader: ReaderId,
        tour: TourId,
    ) {
        let mut finding = JoinSet::new();
        for (directory, names) in by_directory(expected) {
            if finding.len() >= DIRECTORIES_AT_ONCE {
                finding.join_next().await;
            }
            let (volume, caller) = (Arc::clone(&self), caller.clone());
            finding.spawn(async move {
                let found = volume.find(&caller, &directory, &names).await;
                volume.expect_found(&caller, &found, reader, tour);
            });
        }
        while finding.join_next().await.is_some() {}
    }

    fn expect_found(
        self: &Arc<Self>,
        caller: &Caller,
        found: &[Entry],
        reader: ReaderId,
        tour: TourId,
    ) {
        let of = |kind| {
            found
                .iter()
                .map(|entry| &entry.attributes)
                .filter(move |a| a.kind == kind)
                .map(|a| a.id)
        };
        let (files, directories): (Vec<FileId>, Vec<FileId>) =
            (of(Kind::Regular).collect(), of(Kind::Directory).collect());
        self.readers().expect(reader, &files);
        self.fetch_files_ahead(caller, reader);
        self.tours().expect(tour, &directories);
        self.list_ahead(caller, tour);
    }

    /// Appends a directory's files to the reader of an announced tour.
    pub(super) fn expect_files_of(
        self: &Arc<Self>,
        caller: &Caller,
        tour: TourId,
        names: &[Listed],
    ) {
        let Some(reader) = self.tours().reader(tour) else { return };
        let files = names.iter().filter(|listed| listed.kind == Kind::Regular);
        let files: Vec<FileId> =
            files.filter_map(|listed| Some(listed.entry?.attributes.id)).collect();
        self.readers().expect(reader, &files);
        self.fetch_files_ahead(caller, reader);
    }

    /// Looks up names of a directory, as far as they exist.
    async fn find(
        &self,
        caller: &Caller,
        directory: &[OsString],
        names: &[OsString],
    ) -> Vec<Entry> {
        if names.len() < LISTED_FROM {
            let mut found = Vec::new();
            for name in names {
                let path: Vec<OsString> = directory
                    .iter()
                    .chain([name])
                    .filter(|name| !name.is_empty())
                    .cloned()
                    .collect();
                found.extend(self.walk_down(caller, &path).await);
            }
            return found;
        }
        let Ok(parent) = self.walk_down(caller, directory).await else { return Vec::new() };
        let parent = parent.attributes.id;
        let _ = self.list_all(caller, parent, For::Program).await;
        names.iter().filter_map(|name| self.known_entry(parent, name)).collect()
    }

    /// Walks down from the root in one request, without following symbolic links, and caches every
    /// name on the path. A cached path needs no request.
    async fn walk_down(&self, caller: &Caller, path: &[OsString]) -> Result<Entry, Errno> {
        if let Some(known) = self.known_at(path) {
            return known.ok_or(Errno::ENOENT);
        }
        let root = self.file(ROOT)?;
        let answer = self.ask(caller, Op::Walk { from: root, names: path.to_vec() }).await?;
        let Answer::Walked(walked) = answer else { return Err(Errno::EPROTO) };
        let mut at = walked.from;
        for (name, entry) in path.iter().zip(&walked.entries) {
            self.remember_name(&at, name, Some(entry.attributes.id));
            at = *entry;
        }
        walked.error.map_or(Ok(at), Err)
    }

    /// Resolves a path from the cache: a file that the store knows, or `Some(None)` if it certainly
    /// does not exist.
    fn known_at(&self, path: &[OsString]) -> Option<Option<Entry>> {
        let table = self.table();
        let Some(node) = self.node_at(&table, path)? else { return Some(None) };
        let attributes = node.attributes.filter(|_| node.unborn.is_none())?;
        Some(Some(Entry { attributes, leases: node.leases, stamp: node.stamp }))
    }

    fn known_entry(&self, directory: FileId, name: &OsStr) -> Option<Entry> {
        let table = self.table();
        let at = NameIn { parent: table.number_of(directory)?, name };
        let Known::File(file) = table.known(at) else { return None };
        let node = table.of(file).filter(|node| self.is_good(node) && node.unborn.is_none())?;
        Some(Entry { attributes: node.attributes?, leases: node.leases, stamp: node.stamp })
    }
}

/// Groups paths by their directory. Paths with `..` are left out.
fn by_directory(expected: Vec<Expected>) -> BTreeMap<Vec<OsString>, Vec<OsString>> {
    let mut all: BTreeMap<Vec<OsString>, Vec<OsString>> = BTreeMap::new();
    for expected in expected {
        let (Expected::File(path) | Expected::Tree(path)) = expected;
        let Some(mut names) = plain_names(&path) else { continue };
        let name = names.pop().unwrap_or_default();
        all.entry(names).or_default().push(name);
    }
    all
}

pub(super) fn plain_names(path: &Path) -> Option<Vec<OsString>> {
    let name = |component| match component {
        Component::CurDir => None,
        Component::Normal(name) => Some(Some(name.to_owned())),
        _ => Some(None),
    };
    path.components().filter_map(name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_put_together_by_directory() {
        let file = |path: &str| Expected::File(path.into());
        let found = by_directory(vec![
            file("d/b"),
            file("a"),
            file("d/./a"),
            file("../x"),
            file("/y"),
            file(""),
        ]);
        let found: Vec<String> =
            found.iter().map(|(directory, names)| format!("{directory:?} {names:?}")).collect();
        assert_eq!(found, [r#"[] ["a", ""]"#, r#"["d"] ["b", "a"]"#]);
    }
}
