//! A refresh's access to its mounts: the mount table, and its shares of the limits per executor
//! ([`Shares`](crate::shares::Shares)).

use std::{
    collections::BTreeMap,
    ops::Deref,
    path::{Path, PathBuf},
    sync::Arc,
};

use fs_mapper::{DirectoryOwners, ExecutorName, Mount, MountTable, Resolution, coherence::Change};

use super::refresh::{ReportedChanges, is_on_mount_of, unseen};
use crate::{executors::Executor, shares::TaskShare, state::Gateway};

/// Each call on a mount keeps this until it ends, which may be long after the refresh was given up.
#[derive(Debug)]
pub(super) struct OnMounts {
    table: Arc<MountTable>,
    executors: Vec<Arc<Executor>>,
    shares: Vec<TaskShare>,
    owners: DirectoryOwners,
}

impl Deref for OnMounts {
    type Target = MountTable;

    fn deref(&self) -> &MountTable {
        &self.table
    }
}

impl OnMounts {
    /// Claims room for an executor's reported changes. If there is none, its mounts are invalidated
    /// as a whole.
    pub fn claim(gateway: &Gateway, table: Arc<MountTable>, told: &mut ReportedChanges) -> Self {
        let (mut executors, mut shares) = (Vec::new(), Vec::new());
        for (name, (paths, bytes)) in sizes(&table, told) {
            let Some(executor) = gateway.executors.named(&name) else { continue };
            match executor.shares.room(paths, bytes) {
                Some(share) => shares.push(share),
                None => forget_all_of(&table, &name, told),
            }
            executors.push(executor);
        }
        Self { table, executors, shares, owners: DirectoryOwners::new() }
    }

    /// With the owners that executors told of their directories.
    pub fn with_owners(self, owners: DirectoryOwners) -> Self {
        Self { owners, ..self }
    }

    /// Owners told of a path and of the directory above it, for the real places of both on `mount`;
    /// none if the mount would set others.
    pub fn owners_around(&self, path: &Path, real: &Path, mount: &Mount) -> DirectoryOwners {
        if !mount.shows_changes() {
            return DirectoryOwners::new();
        }
        let places = [Some((path, real)), path.parent().zip(real.parent())];
        let told = places
            .into_iter()
            .flatten()
            .filter_map(|(path, real)| Some((real.to_owned(), *self.owners.get(path)?)));
        told.collect()
    }

    /// Notes that the mount of a path is written to without pause.
    pub fn note_busy(&self, path: &Path) {
        let Resolution::Owned(owned) = self.resolve(path, Path::new("/")) else { return };
        let executors = self.executors.iter().filter(|its| its.name == owned.executor);
        executors.for_each(|executor| executor.note_busy_mounts());
    }

    /// Takes turns in the order of the executors' names, which prevents deadlock.
    pub async fn take_turns(&mut self) {
        for executor in &self.executors {
            self.shares.push(executor.shares.turn().await);
        }
    }
}

/// Number of reported paths per executor, and their bytes.
fn sizes(table: &MountTable, told: &ReportedChanges) -> BTreeMap<ExecutorName, (usize, usize)> {
    let mut sizes: BTreeMap<ExecutorName, (usize, usize)> = BTreeMap::new();
    let changes = told.changes.iter().chain(told.doubtful.iter().map(|(change, _)| change));
    for path in changes.map(Change::path).chain(told.files.keys().map(PathBuf::as_path)) {
        if let Resolution::Owned(owned) = table.resolve(path, Path::new("/")) {
            let (paths, bytes) = sizes.entry(owned.executor).or_default();
            (*paths, *bytes) = (*paths + 1, *bytes + path.as_os_str().len());
        }
    }
    sizes
}

fn forget_all_of(table: &MountTable, name: &ExecutorName, told: &mut ReportedChanges) {
    tracing::warn!(executor = %name, "too many changes at one time");
    told.changes.retain(|change| !is_on_mount_of(table, name, change.path()));
    told.doubtful.retain(|(change, _)| !is_on_mount_of(table, name, change.path()));
    told.files.retain(|path, _| !is_on_mount_of(table, name, path));
    let is_its = |mount: &&Mount| {
        mount.mounted() && mount.owner.as_ref().is_some_and(|owner| owner.executor == *name)
    };
    let mounts = table.mounts().filter(is_its);
    told.changes.extend(mounts.map(|mount| unseen(mount.path.as_path(), mount.adapter(), true)));
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use fs_mapper::{config::Config, mountinfo::MountInfo};

    use super::*;
    use crate::dispatch::verify::ReportedFiles;

    #[test]
    fn a_mount_is_made_to_forget_all_where_too_much_is_told() {
        let place = tempfile::tempdir().unwrap();
        let place = place.path().canonicalize().unwrap();
        let at = |name: &str| place.join(name);
        let executor =
            |name: &str| format!("[[executor]]\nname='{name}'\naddress='http://127.0.0.1:1'\n");
        let mount = |name: &str| {
            let path = at(name);
            format!(
                "[[mount]]\npath='{}'\nexecutor='{name}'\nexport='x'\ncoherence='bind'\n",
                path.display()
            )
        };
        let text = [executor("a"), executor("b"), mount("a"), mount("b")].concat();
        let config = Config::parse(&text, &at("mounts.toml")).unwrap();
        let table = MountTable::new(&config, &MountInfo::read().unwrap());
        let removed = |name: &str| Change::Removed(at(name));
        let changes = BTreeSet::from(["a/one", "a/two", "b/one"].map(removed));
        let mut told =
            ReportedChanges { changes, doubtful: Vec::new(), files: ReportedFiles::new() };
        let names: Vec<ExecutorName> = sizes(&table, &told).into_keys().collect();
        assert_eq!(names.iter().map(ExecutorName::as_str).collect::<Vec<_>>(), ["a", "b"]);
        assert_eq!(sizes(&table, &told)[&names[0]], (2, 2 * at("a/one").as_os_str().len()));
        forget_all_of(&table, &names[0], &mut told);
        assert_eq!(
            told.changes,
            BTreeSet::from([Change::EntriesChanged(at("a")), removed("b/one")])
        );
    }
}
