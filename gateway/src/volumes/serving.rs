//! One volume, from its connection to its mount.

use std::{
    io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use bytes::Bytes;
use fs_mapper::config::VolumeConfig;
use nix::unistd::geteuid;
use posh_proto::executor::{ReturnedLease, VolumeSession};
use posh_reach::{Carrier, Reached, Route, ServerIdentity};
use posh_volume::{
    disk::DiskCache,
    fs::{MAX_FILES, Settings, Volume},
    fuse::{self, Users},
    journal::{self, Journal, Record},
    mount::{self, NewMount, Wanted},
    mounted::MountedVolume,
    remote::{CannotConnect, Connector, Patience, Remote},
    store::Returned,
};
use tokio::{runtime::Handle, sync::watch};
use tonic::transport::Channel;

use super::VolumeError;
use crate::state::Gateway;

/// The kernel's read-ahead in KiB: one request.
const READ_AHEAD_KIB: u32 = 1024;

/// Contents cached in memory: data that is read repeatedly within seconds, and read-ahead.
const MEMORY_BYTES: u64 = 64 << 20;

/// Timeout and poll interval for a disk cache and a journal that another process holds.
const HANDED_OVER: Duration = Duration::from_secs(1);
const LOOK_AGAIN: Duration = Duration::from_millis(10);

/// A mounted volume.
#[derive(Debug, Clone)]
pub(super) struct Serving {
    pub volume: Arc<Volume>,
    remote: Arc<Remote>,
    export: String,
    session: Bytes,
    mounted: MountedVolume,
    ended: watch::Receiver<bool>,
}

impl Serving {
    /// Connects and mounts.
    pub async fn begin(
        gateway: &Gateway,
        config: &VolumeConfig,
        runtime: Result<Handle, VolumeError>,
    ) -> Result<Self, VolumeError> {
        let executors = gateway.volumes.added_to(&gateway.config);
        let executor = executors.executor(&config.executor).ok_or(VolumeError::ExecutorGone)?;
        let route = Route::to(executor, &executors);
        let config = config.clone();
        // Tasks of the volume belong on its runtime.
        let begun = runtime?.spawn(async move {
            let way = Arc::new(VolumeConnector {
                route,
                carrier: tokio::sync::Mutex::default(),
                server: Mutex::default(),
            });
            let patience =
                if config.hard { Patience { deadline: None } } else { Patience::default() };
            // Root's mounts, whose server has the same users.
            let users = if geteuid().is_root() { Users::All } else { Users::Own };
            let remote = Remote::open_for(
                Arc::<VolumeConnector>::clone(&way),
                &config.export,
                patience,
                users,
            )
            .await;
            let remote = Arc::new(remote?);
            let read_only = config.read_only || remote.is_read_only();
            let settings = Settings {
                sync: config.sync,
                memory_bytes: config.cache_bytes.min(MEMORY_BYTES),
                most_files: MAX_FILES,
            };
            let server = way.server().ok_or(VolumeError::NoConnection)?;
            let kept_as = server.directory_for(&config.export, &remote.machine());
            let disk = disk_for(&config, &kept_as).await;
            // Former versions used the executor's name, or did not know the machine.
            let former =
                [config.source().replace('/', "%"), server.directory_for(&config.export, &[])];
            let journal = journal_for(&config, &kept_as, &former).await?;
            let (volume, invalidations) =
                Volume::new(Arc::<Remote>::clone(&remote), settings, disk);
            // Without the journal, closed files would be missing.
            match journal {
                Some((journal, left)) if !read_only => {
                    volume.end_earlier_sessions(&journal, &remote.session()).await?;
                    volume.keep_journal(journal, left).await.map_err(VolumeError::Journal)?;
                }
                // An empty one is free for a volume that writes.
                Some((journal, left)) if !left.is_empty() || journal.damage().is_some() => {
                    volume.withhold_journal(journal, left);
                }
                _ => {}
            }
            let path = config.path.clone();
            let source = config.source();
            let for_everybody = users == Users::All;
            let new = tokio::task::spawn_blocking(move || {
                let wanted = Wanted { source: &source, read_only, for_everybody };
                mount::mount(&wanted, &config.path)
            });
            let new = new.await?;
            let NewMount { device, volume: mounted } =
                new.map_err(|error| VolumeError::Mount { path: path.clone(), error })?;
            let served = tokio::task::block_in_place(|| {
                fuse::serve(Arc::clone(&volume), invalidations, device, &path, users)
            });
            let thread =
                served.map_err(|error| VolumeError::Kernel { path: path.clone(), error })?;
            let (end, ended) = watch::channel(false);
            let (session, shown) = (remote.session(), Arc::clone(&remote));
            let ending = Arc::clone(&volume);
            tokio::spawn(async move {
                // Any program may unmount it.
                let _ = tokio::task::spawn_blocking(move || thread.join()).await;
                ending.end();
                // Don't make clients of the server wait until its leases expire.
                remote.close().await;
                let _ = end.send(true);
            });
            let (major, minor) = mounted.device();
            mount::read_ahead(major, minor, READ_AHEAD_KIB);
            Ok(Self { volume, remote: shown, export: config.export, session, mounted, ended })
        });
        begun.await?
    }

    /// Session ID at its executor.
    pub fn session(&self) -> &Bytes {
        &self.session
    }

    /// Unmounts it wherever it is now, unless another file system is mounted over it. Blocks.
    ///
    /// # Errors
    /// System errors, or that it is covered.
    pub fn unmount(&self) -> io::Result<()> {
        if self.mounted.is_unmounted() { Ok(()) } else { self.mounted.unmount() }
    }

    /// Returns true if it is certainly neither mounted at its path nor covered by another mount.
    pub fn is_out(&self) -> bool {
        self.mounted.has_left()
    }

    /// Returns true if [`Self::ended`] would return at once.
    pub fn has_ended(&self) -> bool {
        *self.ended.borrow()
    }

    /// Returns when it is neither mounted nor has a session on its server.
    pub async fn ended(&self) {
        // On an error, its runtime has ended.
        let _ = self.ended.clone().wait_for(|ended| *ended).await;
    }

    /// Session for a run that must report its changes to it, with returned leases.
    pub fn told_of_runs(&self) -> VolumeSession {
        let lease = |returned: Returned| ReturnedLease {
            inode: returned.file.inode,
            generation: returned.file.generation,
            stamp: returned.stamp.0,
        };
        let returned = self.volume.give_up_writing().into_iter().map(lease).collect();
        VolumeSession {
            session: self.session.clone(),
            returned,
            opened: self.remote.opened().0,
            export: self.export.clone(),
        }
    }
}

/// Makes connections for one volume, so that bulk data and runs don't delay each other.
struct VolumeConnector {
    route: Route,
    /// Maintains the latest connection: renews its certificate, or holds its ssh.
    carrier: tokio::sync::Mutex<Option<Carrier>>,
    server: Mutex<Option<ServerIdentity>>,
}

impl VolumeConnector {
    /// Server of all connections.
    fn server(&self) -> Option<ServerIdentity> {
        self.server.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

#[tonic::async_trait]
impl Connector for VolumeConnector {
    async fn connect(&self) -> Result<Channel, CannotConnect> {
        let reached = posh_reach::connect(&self.route).await;
        let reached = reached.map_err(|error| CannotConnect::Unreachable(error.sentence()))?;
        let Reached { channel, carrier, server } = reached;
        // Cached data of one server, and writes for it, must not be used for another.
        if self.server().is_some_and(|former| former != server) {
            return Err(CannotConnect::OtherServer);
        }
        *self.carrier.lock().await = Some(carrier);
        *self.server.lock().unwrap_or_else(PoisonError::into_inner) = Some(server);
        Ok(channel)
    }

    /// Completes when the connection must be replaced: after a renewal, the old certificate is
    /// accepted only briefly.
    async fn worn(&self) -> String {
        match &mut *self.carrier.lock().await {
            Some(carrier) => carrier.ended().await,
            None => std::future::pending().await,
        }
    }
}

/// Disk cache of a volume, by the server's identity. Without one, contents are fetched again.
async fn disk_for(config: &VolumeConfig, kept_as: &str) -> Option<DiskCache> {
    let directory = xdg_home("XDG_CACHE_HOME", ".cache")?.join("posh/volumes").join(kept_as);
    // A cache on the volume itself would cache itself.
    if directory.starts_with(&config.path) {
        return None;
    }
    match when_free(|| DiskCache::open(&directory, config.cache_bytes)).await {
        Ok(cache) => Some(cache),
        Err(error) => {
            tracing::warn!(?directory, %error, "nothing that is read is kept on the disk");
            None
        }
    }
}

/// Journal of closed files that are not on the server yet. Without one, no write is delayed.
///
/// # Errors
/// [`VolumeError::JournalUnreadable`]
async fn journal_for(
    config: &VolumeConfig,
    kept_as: &str,
    former: &[String],
) -> Result<Option<(Journal, Vec<Record>)>, VolumeError> {
    let Some(state) = xdg_home("XDG_STATE_HOME", ".local/state") else { return Ok(None) };
    let directory = state.join("posh/volumes").join(kept_as);
    let former = former.iter().filter(|name| *name != kept_as);
    for former in former.map(|name| directory.with_file_name(name)).filter(|is| is.is_dir()) {
        tracing::warn!(
            ?former,
            "what an older version has not sent is left there; remove it when it is not needed"
        );
    }
    open_journal(&directory, &config.path).await
}

/// Opens a journal for a volume that is to be mounted on `mount`.
///
/// Invariant: no volume is mounted without a journal that may have records, unless another volume
/// of this machine holds it, and sends them. So what close(2) has accepted is on its way, or the
/// user is told why it isn't.
///
/// # Errors
/// [`VolumeError::JournalUnreadable`]
async fn open_journal(
    directory: &Path,
    mount: &Path,
) -> Result<Option<(Journal, Vec<Record>)>, VolumeError> {
    let unless_needed = |error: io::Error| {
        if error.kind() != io::ErrorKind::WouldBlock && journal::may_hold_records(directory) {
            return Err(VolumeError::JournalUnreadable { directory: directory.to_owned(), error });
        }
        tracing::warn!(?directory, %error, "no journal is kept");
        Ok(None)
    };
    if directory.starts_with(mount) {
        return unless_needed(io::Error::other("the volume would be mounted over it"));
    }
    when_free(|| Journal::open(directory)).await.map(Some).or_else(unless_needed)
}

/// Retries while a volume that was just unmounted still holds it.
async fn when_free<T>(open: impl Fn() -> io::Result<T>) -> io::Result<T> {
    let began = Instant::now();
    loop {
        match open() {
            Err(error)
                if error.kind() == io::ErrorKind::WouldBlock && began.elapsed() < HANDED_OVER =>
            {
                tokio::time::sleep(LOOK_AGAIN).await;
            }
            opened => return opened,
        }
    }
}

/// Directory by the XDG Base Directory Specification.
fn xdg_home(variable: &str, otherwise: &str) -> Option<PathBuf> {
    let given = std::env::var_os(variable).map(PathBuf::from).filter(|path| path.is_absolute());
    given.or_else(|| std::env::home_dir().map(|home| home.join(otherwise)))
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::PermissionsExt as _};

    use super::*;

    #[tokio::test]
    async fn a_journal_with_records_is_opened_or_told_and_another_one_is_not_needed() {
        let top = tempfile::tempdir().unwrap();
        let (directory, mount) = (top.path().join("state/journal"), top.path().join("mount"));
        let open = || open_journal(&directory, &mount);
        let shared = |mode: u32| {
            fs::set_permissions(&directory, fs::Permissions::from_mode(mode)).unwrap();
        };
        assert!(open().await.unwrap().is_some());
        shared(0o777);
        assert!(open().await.unwrap().is_none(), "nothing is in it");
        fs::write(directory.join("journal-7"), "anything").unwrap();
        let told = open().await.unwrap_err().to_string();
        assert!(told.contains("chmod go-w") && told.contains("were closed here"), "{told}");
        shared(0o700);
        let held = open().await.unwrap();
        assert!(held.is_some());
        assert!(open().await.unwrap().is_none(), "its volume sends it");
        drop(held);
        // What looked like an unfinished record has gone.
        fs::write(directory.join("journal-9"), "anything").unwrap();
        let told = open_journal(&directory, top.path()).await.unwrap_err().to_string();
        assert!(told.contains("mounted over"), "{told}");
        fs::create_dir(directory.join("journal-70")).unwrap();
        let told = open().await.unwrap_err().to_string();
        assert!(told.contains("journal-70"), "{told}");
    }
}
