//! Proof that commands which change files on an sshfs mount may do so on its executor. An sftp
//! service need not be what a login's commands are: it may clear other permissions of new files
//! (`internal-sftp -u 0027`), refuse changes (`-R`, `-P`), start in another directory, or have
//! another user or group. No request of SFTP tells any of it, so a directory with a file is made
//! through the mount, once.
//!
//! Invariant: a command that may change files on an sshfs mount is placed on an executor only if,
//! while sshfs had the connections that it has now, what was made through the mount was seen by the
//! executor of now, in the directory and as the user and group of the executor's own commands; and
//! if the command's umask clears all that the mount's server clears. It is made in the mount's
//! root, or, where that may not be changed, in a directory that the command may change, and removed
//! at once.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use fs_mapper::{Mount, coherence::Adapter, sshfs::SshfsConnections};
use posh_annotations::CurrentDir;
use posh_proto::rule::{self, Rule};

use crate::{
    enlisted::Enlisted,
    executors::Executor,
    facts::{PathOwner, ResolvedCommand, World},
    model::{LocalReason, ReasonKind},
    probe::{Connected, FileOwner, NotProved, SeenFile, prove},
    same_files::SameFiles,
};

/// Age of a failed attempt from which a command makes another one in the same directory.
const AGAIN_AFTER: Duration = Duration::from_secs(60);
/// Number of failed attempts that are remembered.
const MOST_FAILED: usize = 64;

/// sshfs mounts of which it is known how they make files, or why not.
#[derive(Debug, Default)]
pub struct NewFiles(Mutex<KnownMounts>);

#[derive(Debug, Default)]
struct KnownMounts {
    /// By the mount's path.
    proved: HashMap<PathBuf, KnownServer>,
    /// By the directory.
    failed: HashMap<PathBuf, FailedAttempt>,
}

#[derive(Debug)]
struct FailedAttempt {
    of: Circumstances,
    at: Instant,
    why: NotAlike,
}

#[derive(Debug)]
struct KnownServer {
    of: Circumstances,
    /// Permissions that the mount's server clears.
    umask: u32,
}

/// The connections that a proof holds for.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Circumstances {
    files_mount_id: Option<u32>,
    /// `None` if another user's sshfs serves the mount.
    connections: Option<SshfsConnections>,
    /// Of the executor.
    instance: String,
}

/// Reason for which a mount and an executor are not shown to make the same files.
#[derive(Debug, Clone, thiserror::Error)]
enum NotAlike {
    #[error("{0}")]
    NotProved(#[from] NotProved),
    #[error(
        "the mount makes files of user {} and group {}, and the executor of user {} and group {}",
        mount.user, mount.group, executor.user, executor.group
    )]
    OtherOwner { mount: FileOwner, executor: FileOwner },
    #[error("{} has a default ACL", .0.display())]
    DefaultAcl(PathBuf),
    /// Root's requests by path could lead anywhere, such as those that make sshfs forget a listing.
    #[error("others than root may put another directory in the place of {} there", .0.display())]
    Exchangeable(PathBuf),
}

impl NotAlike {
    /// Returns true if each attempt leaves something in the directory.
    fn leaves_something(&self) -> bool {
        matches!(self, Self::NotProved(NotProved::NotRemoved { .. }))
    }
}

impl NewFiles {
    /// Checks that a command makes the same files on an executor as through its sshfs mounts.
    ///
    /// # Errors
    /// Reason for running it locally.
    pub async fn check(
        &self,
        same_files: &SameFiles,
        to: Connected<'_>,
        world: &World<'_>,
        stage: &Enlisted,
        reading: &ResolvedCommand,
    ) -> Result<(), LocalReason> {
        // `posh explain` has no process, and changes nothing.
        if stage.pid == 0 || !rule::holds(Rule::MountDifferences) {
            return Ok(());
        }
        for (mount, path) in changed_places(world, to.executor, reading) {
            let point = mount.path.as_path();
            let cleared = self.cleared(same_files, to, mount, path).await.map_err(|why| {
                ReasonKind::Attributes.because(format!(
                    "{} may change what is on {}, and it is not shown that executor {} does that \
                     as the mount would: {why}",
                    reading.invocation.command,
                    point.display(),
                    to.executor.name
                ))
            })?;
            if cleared & !stage.umask != 0 {
                return Err(ReasonKind::Attributes.because(format!(
                    "the umask {:03o} allows permissions that the server of {} does not give to \
                     new files: its umask is {cleared:03o}",
                    stage.umask,
                    point.display()
                )));
            }
        }
        Ok(())
    }

    /// Permissions that a mount's server clears, for an executor that is shown to act as it does.
    async fn cleared(
        &self,
        same_files: &SameFiles,
        to: Connected<'_>,
        mount: &Mount,
        path: &Path,
    ) -> Result<u32, NotAlike> {
        let of = Circumstances {
            files_mount_id: mount.files_mount_id,
            connections: same_files.connections_of(mount),
            instance: to.connection.instance.clone(),
        };
        let point = mount.path.as_path();
        if let Some(known) = self.lock().proved.get(point).filter(|known| known.of == of) {
            return Ok(known.umask);
        }
        // What is changed may be a directory, or about to be made.
        let above = path.parent().filter(|above| above.starts_with(point)).unwrap_or(path);
        let mut found = self.try_in(to, mount, &of, point).await;
        // The root of a mount is rarely worked in, and often may not be changed.
        if let Err(NotAlike::NotProved(NotProved::NotMade { .. }) | NotAlike::DefaultAcl(_)) = found
            && above != point
        {
            found = self.try_in(to, mount, &of, above).await;
        }
        let umask = found?;
        self.lock().proved.insert(point.to_owned(), KnownServer { of, umask });
        Ok(umask)
    }

    /// Tries a directory in which the last attempt has not failed just now.
    async fn try_in(
        &self,
        to: Connected<'_>,
        mount: &Mount,
        of: &Circumstances,
        directory: &Path,
    ) -> Result<u32, NotAlike> {
        if let Some(failed) = self.lock().failed.get(directory)
            && failed.of == *of
            && (failed.at.elapsed() < AGAIN_AFTER || failed.why.leaves_something())
        {
            return Err(failed.why.clone());
        }
        let why = match prove(to, mount, directory).await {
            Ok(SeenFile { owner, owner_of_commands, .. }) if owner != owner_of_commands => {
                NotAlike::OtherOwner { mount: owner, executor: owner_of_commands }
            }
            Ok(SeenFile { is_exchangeable: true, owner: FileOwner { user: 0, .. }, .. }) => {
                NotAlike::Exchangeable(directory.to_owned())
            }
            Ok(SeenFile { has_default_acl: true, .. }) => {
                NotAlike::DefaultAcl(directory.to_owned())
            }
            Ok(made) => return Ok(made.cleared),
            Err(why) => why.into(),
        };
        tracing::info!(executor = %to.executor.name, %why, "may not make the same files");
        let failed = FailedAttempt { of: of.clone(), at: Instant::now(), why: why.clone() };
        let mut known = self.lock();
        if known.failed.len() >= MOST_FAILED {
            known.failed.retain(|_, failed| failed.why.leaves_something());
        }
        known.failed.insert(directory.to_owned(), failed);
        Err(why)
    }

    fn lock(&self) -> MutexGuard<'_, KnownMounts> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Places on an executor's sshfs mounts that a command may change.
fn changed_places<'t>(
    world: &World<'t>,
    executor: &Executor,
    reading: &'t ResolvedCommand,
) -> impl Iterator<Item = (&'t Mount, &'t Path)> {
    let files = reading.invocation.files.iter().zip(&reading.places);
    let files =
        files.filter(|(file, _)| file.kind.writes()).filter_map(|(_, place)| place.as_ref());
    let changes_cwd = reading.invocation.current_dir == CurrentDir::Writes;
    let (table, id) = (world.table, executor.id);
    files.chain(reading.cwd.iter().filter(move |_| changes_cwd)).filter_map(move |place| {
        let PathOwner::At(owner, path, mount) = place else { return None };
        let mount = table.mount(*mount);
        let is_its = *owner == id && mount.adapter() == Adapter::Sshfs;
        is_its.then(|| (mount, path.as_path()))
    })
}
