//! Proof that an executor which ssh starts serves the files that an sshfs mount shows. Both were
//! reached by one name, at different times: it may mean two machines (round robin of login nodes,
//! a VPN, an edited `~/.ssh/config`). So the directory that the mount shows is compared with what
//! the executor says of it, and the addresses that both are connected to are, where they are known.
//! A directory that does not rest, or that sshfs shows from its cache, is proved to be the same by
//! what is made in it ([`prove`]).
//!
//! Invariant: a command is placed on such an executor only if all its sshfs mounts were compared
//! with it and found the same while sshfs had the connections that it has now and the executor was
//! the one of the connection that the command will use. So it is compared anew after every other
//! connection of either. What sshfs has cached from an earlier connection's server is compared with
//! nothing: after the loss of one, commands run locally until that has expired.
//!
//! Only executors of ssh are compared. The administrator of one that listens has given it a name
//! and chosen its exports, which may be another path, or be seen by another user.

mod compare;

use std::{
    collections::{BTreeSet, HashMap},
    net::SocketAddr,
    os::unix::ffi::OsStrExt as _,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use bytes::Bytes;
use fs_mapper::{
    Mount, MountTable,
    coherence::{Adapter, SSHFS_MEMORY},
    sshfs::{DirectoryLook, SshfsConnections, SshfsProcesses, servers_of},
};
use posh_proto::{codec::FINGERPRINTS, executor::FingerprintRequest};
use tokio::sync::watch;

use crate::{
    aside::{aside, in_own_thread},
    executors::{Executor, ExecutorConnection},
    model::{LocalReason, ReasonKind},
    probe::{Connected, NotProved, prove},
};
use compare::{Difference, ToldDirectory, compare};

/// Time that commands wait for a comparison in progress.
const PATIENCE: Duration = Duration::from_secs(2);
/// Limit for a look at the mount, and for the executor's answer.
const LOOK_LIMIT: Duration = Duration::from_secs(10);
/// Age of a difference from which a command makes it be compared again.
const AGAIN_AFTER: Duration = Duration::from_secs(5);
/// Likewise, if a file that was made is not there: that is no matter of time.
const OTHER_AGAIN_AFTER: Duration = Duration::from_secs(60);

/// sshfs mounts of executors, by their paths, and the state of each.
#[derive(Debug, Default)]
pub struct SameFiles(Mutex<HashMap<PathBuf, KnownMount>>);

/// Result of a comparison; `None` while it is in progress.
type Compared = watch::Receiver<Option<Result<(), NotShown>>>;

/// Reason for which a mount is not shown to have its executor's files.
#[derive(Debug, Clone, thiserror::Error)]
enum NotShown {
    #[error("that is not known yet")]
    NotYet,
    #[error(
        "its sshfs has connected anew, and may show for some seconds what it has cached of \
         another machine"
    )]
    ConnectedAnew,
    #[error("its sshfs's connections can't be found ({0})")]
    NoConnections(Arc<std::io::Error>),
    #[error(
        "sshfs is connected to {}, and the executor is reached at {}",
        list(mount),
        list(executor)
    )]
    OtherServer { mount: BTreeSet<SocketAddr>, executor: BTreeSet<SocketAddr> },
    #[error("{difference}, and {proof}")]
    Differs { difference: Box<NotShown>, proof: NotProved },
    #[error("{0}")]
    Other(Difference),
    #[error("the mount can't be looked at ({0})")]
    NoLook(Arc<str>),
    #[error("the executor does not describe its directory ({0})")]
    NoAnswer(Arc<str>),
}

impl NotShown {
    fn again_after(&self) -> Duration {
        match self {
            Self::Differs { proof: NotProved::NotThere(_), .. } => OTHER_AGAIN_AFTER,
            // Each attempt would leave something.
            Self::Differs { proof: NotProved::NotRemoved { .. }, .. } => Duration::MAX,
            _ => AGAIN_AFTER,
        }
    }
}

fn list(all: &BTreeSet<SocketAddr>) -> String {
    all.iter().map(SocketAddr::to_string).collect::<Vec<_>>().join(", ")
}

#[derive(Debug, Default)]
struct KnownMount {
    files_mount_id: Option<u32>,
    processes: Arc<SshfsProcesses>,
    /// Connections at the last check.
    connections: SshfsConnections,
    /// Time until which sshfs's cache may be of another server.
    caches_until: Option<Instant>,
    verdict: Option<Verdict>,
}

#[derive(Debug)]
struct Verdict {
    connections: SshfsConnections,
    /// Of the executor.
    instance: String,
    began: Instant,
    compared: Compared,
}

impl SameFiles {
    /// Checks that an executor serves what its sshfs mounts show; compares them if that is not
    /// known, and waits for a short while.
    ///
    /// # Errors
    /// Reason for running commands locally.
    pub async fn check(
        &self,
        executor: &Arc<Executor>,
        table: &MountTable,
        connection: &Arc<ExecutorConnection>,
    ) -> Result<(), LocalReason> {
        if !executor.ends_with_connection() {
            return Ok(());
        }
        let mounts = sshfs_mounts(executor, table, connection);
        let begun: Vec<_> =
            mounts.map(|mount| (mount, self.begin(executor, mount, connection))).collect();
        for (mount, begun) in begun {
            let compared = match begun {
                Ok(mut compared) => {
                    let done = compared.wait_for(Option::is_some);
                    match tokio::time::timeout(PATIENCE, done).await {
                        Ok(Ok(result)) => result.clone().unwrap_or(Err(NotShown::NotYet)),
                        _ => Err(NotShown::NotYet),
                    }
                }
                Err(why) => Err(why),
            };
            compared
                .map_err(|why| ReasonKind::Executor.because(sentence(executor, mount, &why)))?;
        }
        Ok(())
    }

    /// Known reason for which a mount's commands run locally.
    pub fn fault(&self, executor: &Executor, mount: &Mount) -> Option<String> {
        let known = self.lock();
        let verdict = known.get(mount.path.as_path())?.verdict.as_ref()?;
        let why = verdict.compared.borrow().as_ref()?.as_ref().err()?.clone();
        Some(sentence(executor, mount, &why))
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<PathBuf, KnownMount>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Connections of a mount's sshfs now; `None` if they can't be found.
    pub fn connections_of(&self, mount: &Mount) -> Option<SshfsConnections> {
        let (found, now) = self.connections(mount).ok()?;
        KnownMount::of(&mut self.lock(), mount, found, &now);
        Some(now)
    }

    /// Processes of a mount, and their connections now. Known processes are asked first: finding
    /// them reads all of the user's.
    fn connections(
        &self,
        mount: &Mount,
    ) -> Result<(Arc<SshfsProcesses>, SshfsConnections), NotShown> {
        let known = self.lock().get(mount.path.as_path()).and_then(|known| {
            (known.files_mount_id == mount.files_mount_id).then(|| Arc::clone(&known.processes))
        });
        let now = known.and_then(|known| Some((known.connections().ok()?, known)));
        if let Some((now, known)) = now {
            return Ok((known, now));
        }
        let gone = || std::io::Error::from(std::io::ErrorKind::NotFound);
        let mount_id = mount.files_mount_id.ok_or_else(gone);
        let found = aside(|| SshfsProcesses::of(mount_id?));
        let found = found.and_then(|found| Ok((found.connections()?, Arc::new(found))));
        let (now, found) = found.map_err(|error| NotShown::NoConnections(Arc::new(error)))?;
        Ok((found, now))
    }

    /// The comparison of a mount as it is now with an executor: one that has been made, or is made
    /// now.
    fn begin(
        &self,
        executor: &Arc<Executor>,
        mount: &Mount,
        connection: &Arc<ExecutorConnection>,
    ) -> Result<Compared, NotShown> {
        let (found, now) = self.connections(mount)?;
        let mut all = self.lock();
        let known = KnownMount::of(&mut all, mount, found, &now);
        if known.caches_until.is_some_and(|until| Instant::now() < until) {
            return Err(NotShown::ConnectedAnew);
        }
        let is_of_now =
            |old: &&Verdict| old.connections == now && old.instance == connection.instance;
        let earlier = known.verdict.as_ref().filter(is_of_now);
        let before = earlier.and_then(|old| old.compared.borrow().clone());
        if let Some(old) = earlier
            && before.as_ref().is_none_or(|before| match before {
                Ok(()) => true,
                Err(why) => old.began.elapsed() < why.again_after(),
            })
        {
            return Ok(old.compared.clone());
        }
        let (tell, compared) = watch::channel(before);
        let work = Comparison {
            executor: Arc::clone(executor),
            connection: Arc::clone(connection),
            mount: mount.clone(),
            processes: Arc::clone(&known.processes),
            connections: now.clone(),
        };
        tokio::spawn(async move { tell.send_replace(Some(work.make().await)) });
        known.verdict = Some(Verdict {
            connections: now,
            instance: connection.instance.clone(),
            began: Instant::now(),
            compared: compared.clone(),
        });
        Ok(compared)
    }
}

impl KnownMount {
    /// State of a mount whose sshfs has these connections now.
    fn of<'a>(
        all: &'a mut HashMap<PathBuf, KnownMount>,
        mount: &Mount,
        processes: Arc<SshfsProcesses>,
        now: &SshfsConnections,
    ) -> &'a mut Self {
        let known = all.entry(mount.path.as_path().to_owned()).or_default();
        if known.files_mount_id != mount.files_mount_id
            || !Arc::ptr_eq(&known.processes, &processes)
        {
            *known = Self {
                files_mount_id: mount.files_mount_id,
                processes,
                connections: now.clone(),
                ..Self::default()
            };
        }
        if known.connections != *now {
            if !now.has_all_of(&known.connections) {
                known.caches_until = Some(Instant::now() + SSHFS_MEMORY);
            }
            known.connections = now.clone();
        }
        known
    }
}

/// Mounts of sshfs whose exports an executor has.
fn sshfs_mounts<'t>(
    executor: &'t Executor,
    table: &'t MountTable,
    connection: &ExecutorConnection,
) -> impl Iterator<Item = &'t Mount> {
    let description = connection.description();
    table.mounts().filter(move |mount| {
        let exports = &description.reply.exports;
        mount.mounted()
            && Adapter::of(&mount.fs_type) == Adapter::Sshfs
            && mount.owner.as_ref().is_some_and(|owner| {
                owner.executor == executor.name
                    && exports.iter().any(|its| its.name == owner.export)
            })
    })
}

fn sentence(executor: &Executor, mount: &Mount, why: &NotShown) -> String {
    let export = mount.owner.as_ref().map_or("", |owner| &owner.export);
    format!(
        "the mount at {} is not shown to have the files that executor {} serves as {export}: {why}",
        mount.path.as_path().display(),
        executor.name
    )
}

/// A comparison to be made.
struct Comparison {
    executor: Arc<Executor>,
    connection: Arc<ExecutorConnection>,
    mount: Mount,
    processes: Arc<SshfsProcesses>,
    /// Connections that it is about.
    connections: SshfsConnections,
}

impl Comparison {
    async fn make(self) -> Result<(), NotShown> {
        self.compare_all().await?;
        // What was seen may be another connection's.
        match self.processes.connections() {
            Ok(now) if now == self.connections => Ok(()),
            _ => Err(NotShown::NotYet),
        }
    }

    async fn compare_all(&self) -> Result<(), NotShown> {
        let have_one_address = self.compare_servers().await?;
        let Err(difference) = self.compare(have_one_address).await else { return Ok(()) };
        // It may be the same directory that does not rest, or that sshfs shows from its cache.
        let to = Connected { executor: &self.executor, connection: &self.connection };
        let path = self.mount.path.as_path();
        let Err(proof) = prove(to, &self.mount, path).await else { return Ok(()) };
        let (executor, mount) = (&self.executor.name, path.display());
        tracing::warn!(%executor, %mount, %difference, %proof, "differs");
        Err(NotShown::Differs { difference: Box::new(difference), proof })
    }

    /// Compares what the mount shows with what the executor says before and after.
    async fn compare(&self, have_one_address: bool) -> Result<(), NotShown> {
        let before = self.ask().await?;
        let shown = self.look(before.is_listed()).await?;
        compare(&before, &shown, &self.ask().await?, have_one_address).map_err(NotShown::Other)
    }

    /// Compares the addresses that sshfs and our own ssh are connected to. Returns false if they
    /// are not known, as behind a proxy or through a master connection.
    async fn compare_servers(&self) -> Result<bool, NotShown> {
        let Some(ssh) = self.connection.ssh_process else { return Ok(false) };
        let processes = Arc::clone(&self.processes);
        let found = in_own_thread(move || (processes.servers(), servers_of(ssh))).await;
        let (mount, executor) = found.map_err(|_| NotShown::NotYet)?;
        same_servers(mount, executor)
    }

    async fn look(&self, lists: bool) -> Result<DirectoryLook, NotShown> {
        let mount = self.mount.clone();
        let place = mount.path.as_path().to_owned();
        let work = move || {
            let (root, path): (_, &Path) = (mount.open_root()?, mount.path.as_path());
            DirectoryLook::through(&root, path, FINGERPRINTS, lists)
        };
        let looked = self.executor.shares.ask(&place, LOOK_LIMIT, work).await;
        looked
            .map_err(|unanswered| unanswered.to_string())
            .and_then(|looked| looked.map_err(|error| error.to_string()))
            .map_err(|why| NotShown::NoLook(why.into()))
    }

    async fn ask(&self) -> Result<ToldDirectory, NotShown> {
        let owner = self.mount.owner.as_ref();
        let request = owner.map(|owner| FingerprintRequest {
            export: owner.export.clone(),
            sub_path: Bytes::copy_from_slice(owner.sub_path.as_os_str().as_bytes()),
            name: Bytes::new(),
        });
        let mut client = self.connection.client.clone();
        let asked = client.fingerprint(request.unwrap_or_default());
        let failed = |why: &str| NotShown::NoAnswer(why.into());
        let reply = match tokio::time::timeout(LOOK_LIMIT, asked).await {
            Ok(Ok(reply)) => reply,
            Ok(Err(status)) => return Err(failed(status.message())),
            Err(_) => return Err(failed("it does not answer")),
        };
        ToldDirectory::of(reply).ok_or_else(|| failed("a part is missing"))
    }
}

fn same_servers(
    mount: BTreeSet<SocketAddr>,
    executor: BTreeSet<SocketAddr>,
) -> Result<bool, NotShown> {
    if mount.is_empty() || executor.is_empty() {
        return Ok(false);
    }
    match mount == executor {
        true => Ok(true),
        false => Err(NotShown::OtherServer { mount, executor }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_addresses_are_other_servers() {
        let set = |all: &[&str]| all.iter().map(|one| one.parse().unwrap()).collect();
        let check = |mount: &[&str], executor: &[&str], same: Option<bool>| {
            assert_eq!(same_servers(set(mount), set(executor)).ok(), same, "{mount:?}");
        };
        check(&["10.0.0.1:22"], &["10.0.0.1:22"], Some(true));
        check(&["10.0.0.1:22"], &["10.0.0.2:22"], None);
        check(&["10.0.0.1:22"], &["10.0.0.1:2222"], None);
        // One of several connections (max_conns) goes elsewhere.
        check(&["10.0.0.1:22", "10.0.0.2:22"], &["10.0.0.1:22"], None);
        check(&[], &["10.0.0.2:22"], Some(false));
        check(&["10.0.0.1:22"], &[], Some(false));
    }
}
