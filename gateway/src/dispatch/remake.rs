//! Directories that were removed on a server while a mount still shows them. sshfs forgets a
//! directory only when it is removed through sshfs, or after 20 s. So recreate it on the server,
//! empty and private, and then remove it through the mount. Only what was created for this is
//! removed.
//!
//! Invariant: after a removed tree has been handled, no name below it is cached: each was looked up
//! while its directory existed, or has expired in sshfs.

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::OsStr,
    mem,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use bytes::Bytes;
use fs_mapper::{
    ExecutorName, MountTable, Resolution,
    coherence::{Change, KERNEL_MEMORY, SSHFS_MEMORY, StaleEntry},
};
use nix::libc;
use posh_proto::{
    PROTOCOL_VERSION,
    executor::{
        Descriptor, MountPoint, RunInput, RunSpec, Stage, descriptor::Source, exited::How,
        run_input, run_output,
    },
};
use posh_reach::Allowance;

use super::{
    connection_of,
    on_mounts::OnMounts,
    refresh::{RemovedTree, in_parallel, root_around},
};
use crate::{executors::ExecutorConnection, state::Gateway};

/// Directories created by one run, each by its own process that reports its status.
const AT_ONCE: usize = 64;
/// Limit on the bytes of directory names for one process.
const WORDS_BYTES: usize = 64 << 10;
/// Beyond so many names, waiting until the kernel's entries expire takes less time than looking up
/// each.
const FEW_NAMES: usize = 32;
/// Timeout for one command on a server, which creates or removes directories of [`WORDS_BYTES`] at
/// most.
const RUN_DEADLINE: Duration = Duration::from_secs(10);
/// Timeout for removing what was created, after a refresh was given up; the shell goes on
/// meanwhile.
const REMOVAL_DEADLINE: Duration = Duration::from_secs(60);

/// Makes the mounts forget directories; returns those that they still show.
pub async fn forget(
    gateway: &Gateway,
    table: &Arc<OnMounts>,
    directories: Vec<PathBuf>,
    remnants: &Remnants,
) -> Vec<PathBuf> {
    let mut by_executor: BTreeMap<ExecutorName, Vec<PathBuf>> = BTreeMap::new();
    for directory in directories {
        if let Resolution::Owned(owned) = table.resolve(&directory, Path::new("/")) {
            by_executor.entry(owned.executor).or_default().push(directory);
        }
    }
    let mut left = Vec::new();
    for (name, directories) in by_executor {
        let connection = match gateway.executors.named(&name) {
            Some(executor) => connection_of(gateway, &executor, table).await.ok(),
            None => None,
        };
        let Some(connection) = connection else {
            left.extend(directories);
            continue;
        };
        let server = remnants.note(RemakeServer::new(gateway, table, connection, &name));
        left.extend(server.forget(directories).await);
    }
    left
}

/// Makes the mounts forget trees. Returns directories that they still show, and the changes below
/// tops that exist again, which need ordinary invalidation.
pub(super) async fn forget_trees(
    gateway: &Gateway,
    table: &Arc<OnMounts>,
    trees: Vec<RemovedTree>,
    remnants: &Remnants,
) -> (Vec<PathBuf>, BTreeSet<Change>) {
    let (mut shown, mut there_again) = (Vec::new(), BTreeSet::new());
    let mut by_executor: BTreeMap<ExecutorName, Vec<RemovedTree>> = BTreeMap::new();
    for tree in trees {
        if let Resolution::Owned(owned) = table.resolve(&tree.top, Path::new("/")) {
            by_executor.entry(owned.executor).or_default().push(tree);
        }
    }
    for (name, trees) in by_executor {
        let connection = match gateway.executors.named(&name) {
            Some(executor) => connection_of(gateway, &executor, table).await.ok(),
            None => None,
        };
        let Some(connection) = connection else {
            there_again.extend(trees.into_iter().flat_map(RemovedTree::changes));
            continue;
        };
        let server = remnants.note(RemakeServer::new(gateway, table, connection, &name));
        let since = Instant::now();
        let tops: Vec<PathBuf> = trees.iter().map(|tree| tree.top.clone()).collect();
        let made: BTreeSet<PathBuf> = server.make_tops(&tops).await.into_iter().collect();
        let (new, others): (Vec<_>, Vec<_>) =
            trees.into_iter().partition(|tree| made.contains(&tree.top));
        there_again.extend(others.into_iter().flat_map(RemovedTree::changes));
        shown.extend(server.forget_new(new, since).await);
    }
    (shown, there_again)
}

fn mounts_of(table: &MountTable, executor: &ExecutorName) -> Vec<MountPoint> {
    let mounts = table.mounts().filter(|mount| mount.mounted()).filter_map(|mount| {
        let owner = mount.owner.as_ref().filter(|owner| owner.executor == *executor)?;
        Some(MountPoint {
            path: bytes(mount.path.as_path().as_os_str()),
            export: owner.export.clone(),
            sub_path: bytes(owner.sub_path.as_os_str()),
            ..MountPoint::default()
        })
    });
    mounts.collect()
}

/// Servers with created entries that may not have been removed.
#[derive(Debug, Default)]
pub(super) struct Remnants(Mutex<Vec<Arc<RemakeServer>>>);

impl Remnants {
    fn note(&self, server: RemakeServer) -> Arc<RemakeServer> {
        let server = Arc::new(server);
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::clone(&server));
        server
    }

    /// Removes the created entries, up to a deadline.
    pub async fn remove(self) {
        let servers = self.0.into_inner().unwrap_or_else(PoisonError::into_inner);
        let all = async {
            for server in servers {
                server.remove_made().await;
            }
        };
        if tokio::time::timeout(REMOVAL_DEADLINE, all).await.is_err() {
            tracing::warn!("directories that were made to be forgotten may be left on a server");
        }
    }
}

/// Entries that were, or may have been, created on a server and not removed.
#[derive(Debug, Default)]
struct Made {
    directories: BTreeSet<PathBuf>,
    files: BTreeSet<PathBuf>,
}

/// Server of the removed directories.
#[derive(Debug)]
struct RemakeServer {
    table: Arc<OnMounts>,
    connection: Arc<ExecutorConnection>,
    mounts: Vec<MountPoint>,
    run_id: u64,
    made: Mutex<Made>,
}

impl RemakeServer {
    fn new(
        gateway: &Gateway,
        table: &Arc<OnMounts>,
        connection: Arc<ExecutorConnection>,
        name: &ExecutorName,
    ) -> Self {
        let (table, mounts) = (Arc::clone(table), mounts_of(table, name));
        Self { table, connection, mounts, run_id: gateway.next_pipeline(), made: Mutex::default() }
    }

    async fn forget(&self, directories: Vec<PathBuf>) -> Vec<PathBuf> {
        let sorted: BTreeSet<&PathBuf> = directories.iter().collect();
        let (mut tops, mut below): (Vec<PathBuf>, Vec<PathBuf>) = (Vec::new(), Vec::new());
        // Entries below a directory follow it directly.
        for path in sorted {
            let is_below = tops.last().is_some_and(|top| path.starts_with(top));
            if is_below { &mut below } else { &mut tops }.push(path.clone());
        }
        let mut made = self.make_tops(&tops).await;
        // Nothing below a newly created directory can belong to anybody else.
        let new: BTreeSet<PathBuf> = made.iter().cloned().collect();
        below.retain(|path| path.ancestors().any(|above| new.contains(above)));
        made.extend(self.make_all(&below).await);
        let removed = self.remove(made).await;
        directories.into_iter().filter(|directory| !removed.contains(directory)).collect()
    }

    /// Creates directories; returns those that did not exist. An existing one belongs to somebody
    /// else, and the mount shows it correctly.
    async fn make_tops(&self, tops: &[PathBuf]) -> Vec<PathBuf> {
        let mut made = Vec::new();
        for tops in tops.chunks(AT_ONCE) {
            let stages = tops
                .iter()
                .map(|top| stage(&["mkdir", "-m", "700", "--"], std::slice::from_ref(top)));
            let ended = self.run(stages.collect()).await;
            let new: Vec<PathBuf> = tops
                .iter()
                .zip(ended)
                .filter(|(_, made)| *made)
                .map(|(top, _)| top.clone())
                .collect();
            self.made().directories.extend(new.iter().cloned());
            made.extend(new);
        }
        made
    }

    /// Forgets trees whose tops have just been created, and did not exist at `gone_since`.
    async fn forget_new(&self, trees: Vec<RemovedTree>, gone_since: Instant) -> Vec<PathBuf> {
        let (mut directories, mut others) = (Vec::new(), Vec::new());
        for tree in trees {
            directories.extend(tree.directories);
            others.extend(tree.others);
        }
        let mut made = self.make_all(&directories).await;
        let (table, are_many) = (Arc::clone(&self.table), others.len() > FEW_NAMES);
        let forget = move |path: &PathBuf| {
            if gone_since.elapsed() > SSHFS_MEMORY {
                return None;
            }
            let (root, mount) = root_around(&table, path)?;
            let coherence = mount.coherence();
            let left = match are_many {
                true => coherence.forget_one_of_many_removed(&root, path),
                false => coherence.forget_removed(&root, path),
            };
            left.ok().filter(|left| *left != StaleEntry::Nothing).map(|left| (path.clone(), left))
        };
        let (links, empty): (Vec<_>, Vec<_>) = in_parallel(others, forget)
            .await
            .into_iter()
            .partition(|(_, left)| *left == StaleEntry::Link);
        self.forget_links(links.into_iter().map(|(path, _)| path).collect()).await;
        // Directories that were empty.
        let empty: Vec<PathBuf> = empty.into_iter().map(|(path, _)| path).collect();
        if are_many {
            tokio::time::sleep(KERNEL_MEMORY).await;
        }
        made.extend(self.make_all(&empty).await);
        let removed = self.remove(made).await;
        directories.extend(empty);
        directories.into_iter().filter(|directory| !removed.contains(directory)).collect()
    }

    /// Makes sshfs forget symlinks in recreated directories: it forgets one that is removed through
    /// it, whatever the server has under its name.
    async fn forget_links(&self, links: Vec<PathBuf>) {
        self.made().files.extend(links.iter().cloned());
        let made = self.with_each(&["touch", "--"], &links).await;
        let table = Arc::clone(&self.table);
        let remove = move |path: &PathBuf| {
            root_around(&table, path)?.0.remove_file(path).ok().map(|()| path.clone())
        };
        let removed = BTreeSet::from_iter(in_parallel(made, remove).await);
        self.made().files.retain(|file| !removed.contains(file));
        if removed.len() < links.len() {
            tracing::debug!("links are forgotten in time");
            tokio::time::sleep(SSHFS_MEMORY).await;
        }
    }

    /// Creates directories with their parents; returns those that exist now.
    async fn make_all(&self, directories: &[PathBuf]) -> Vec<PathBuf> {
        self.made().directories.extend(directories.iter().cloned());
        self.with_each(&["mkdir", "-p", "-m", "700", "--"], directories).await
    }

    /// Removes directories that the server created: through their mount, the deepest first and
    /// those of one depth in parallel; and on the server, what is left. Returns those removed
    /// through the mount.
    async fn remove(&self, made: Vec<PathBuf>) -> BTreeSet<PathBuf> {
        let mut by_depth: BTreeMap<usize, Vec<PathBuf>> = BTreeMap::new();
        for directory in made {
            by_depth.entry(directory.components().count()).or_default().push(directory);
        }
        let mut gone = BTreeSet::new();
        for directories in by_depth.into_values().rev() {
            let table = Arc::clone(&self.table);
            let remove = move |directory: &PathBuf| {
                root_around(&table, directory)?
                    .0
                    .remove_directory(directory)
                    .ok()
                    .map(|()| directory.clone())
            };
            let removed = in_parallel(directories, remove).await;
            for directory in &removed {
                self.made().directories.remove(directory);
            }
            gone.extend(removed);
        }
        self.remove_made().await;
        gone
    }

    /// Removes entries on the server itself, the deepest first.
    async fn remove_made(&self) {
        let Made { directories, files } = mem::take(&mut *self.made());
        self.with_each(&["rm", "-f", "--"], &Vec::from_iter(files)).await;
        let directories: Vec<PathBuf> = directories.into_iter().rev().collect();
        self.with_each(&["rmdir", "--"], &directories).await;
    }

    fn made(&self) -> MutexGuard<'_, Made> {
        self.made.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs a command on paths; returns those for which the server reports success.
    async fn with_each(&self, words: &[&str], paths: &[PathBuf]) -> Vec<PathBuf> {
        let mut done = Vec::new();
        for paths in portions(paths) {
            let has_succeeded = self.run(vec![stage(words, paths)]).await == [true];
            if has_succeeded {
                done.extend_from_slice(paths);
            }
        }
        done
    }

    /// Returns each stage's success; a stage without an answer in time has failed.
    async fn run(&self, stages: Vec<Stage>) -> Vec<bool> {
        let count = stages.len();
        let run = tokio::time::timeout(RUN_DEADLINE, self.run_to_its_end(stages));
        run.await.unwrap_or_else(|_| vec![false; count])
    }

    async fn run_to_its_end(&self, mut stages: Vec<Stage>) -> Vec<bool> {
        let mut succeeded = vec![false; stages.len()];
        (0..).zip(&mut stages).for_each(|(id, stage)| stage.id = id);
        let spec = RunSpec {
            run_id: format!("{}-{}", std::process::id(), self.run_id),
            protocol: PROTOCOL_VERSION,
            mounts: self.mounts.clone(),
            stages,
            ..RunSpec::default()
        };
        let allowance = Allowance::of(&spec);
        let first = RunInput { kind: Some(run_input::Kind::Spec(spec)) };
        let Ok(mut output) =
            self.connection.client.clone().run(tokio_stream::once(first), allowance).await
        else {
            return succeeded;
        };
        while let Ok(Some(message)) = output.message().await {
            if let Some(run_output::Kind::Exited(exited)) = message.kind
                && let Some(stage) = succeeded.get_mut(exited.stage as usize)
            {
                *stage = exited.how == Some(How::Code(0));
            }
        }
        succeeded
    }
}

/// Splits into portions for the arguments of one process each, in order.
fn portions(directories: &[PathBuf]) -> impl Iterator<Item = &[PathBuf]> {
    let mut bytes = 0;
    directories.chunk_by(move |last, _| {
        bytes += last.as_os_str().len();
        let has_room = bytes < WORDS_BYTES;
        if !has_room {
            bytes = 0;
        }
        has_room
    })
}

fn stage(words: &[&str], paths: &[PathBuf]) -> Stage {
    let paths = paths.iter().map(|path| path.as_os_str());
    let argv = words.iter().map(OsStr::new).chain(paths).map(bytes);
    let null =
        |fd| Descriptor { fd, source: Some(Source::NullFlags(libc::O_RDWR.cast_unsigned())) };
    Stage {
        program: words[0].to_owned(),
        argv: argv.collect(),
        cwd: Bytes::from_static(b"/"),
        umask: 0o077,
        descriptors: (0..=2).map(null).collect(),
        ..Stage::default()
    }
}

fn bytes(text: &OsStr) -> Bytes {
    Bytes::copy_from_slice(text.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_process_gets_no_more_names_than_fit() {
        let directories: Vec<PathBuf> =
            (0..1000).map(|number| format!("/{number:01000}").into()).collect();
        let all: Vec<&[PathBuf]> = portions(&directories).collect();
        assert_eq!(all.concat(), directories);
        assert!((10..20).contains(&all.len()), "{}", all.len());
        assert!(all.iter().all(|portion| (1..70).contains(&portion.len())));
        assert_eq!(portions(&[]).count(), 0);
    }
}
