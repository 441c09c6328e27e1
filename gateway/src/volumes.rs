//! Volumes that this gateway serves: mounted on request of the configuration or of `posh mount`,
//! each with its own connection, and synchronized before and after commands run on their servers.
//! `posh_volume` implements a volume.
//!
//! They have their own runtime: a thread of the gateway that accesses a path of a volume blocks on
//! the volume, which must never wait for that thread.

mod at_hand;
mod error;
mod prefetch;
mod serving;

use std::{
    collections::BTreeMap,
    io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::Duration,
};

use bytes::Bytes;
use fs_mapper::{
    ExecutorName, Mount,
    config::{Config, VolumeConfig},
};
use posh_proto::executor::{VolumeMark, VolumeSession};
use posh_volume::{
    fs::{Changes, State},
    mounted::MountedVolume,
    recovery::Recovery,
    store::Stamp,
};
use tokio::{runtime::Runtime, sync::watch, task::JoinSet};

use crate::{
    model::{LocalReason, ReasonKind},
    state::Gateway,
};
pub use error::VolumeError;
use prefetch::Prefetches;
use serving::Serving;

/// Worker threads of the volumes: requests wait for the network, and otherwise copy memory.
const THREADS: usize = 2;

/// Pause between attempts to mount the configured volumes.
const RETRY: Duration = Duration::from_secs(20);

/// Timeout for writes to reach the server before a command runs on it; on expiry, the command runs
/// locally.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(30);

/// Time for an exiting gateway to write unclosed files.
const LAST_WRITES: Duration = Duration::from_secs(10);

/// Timeout for an unmounted volume to end on its server, too.
const END_TIMEOUT: Duration = Duration::from_secs(2);

/// All volumes of a gateway.
#[derive(Debug)]
pub struct Volumes {
    /// At most one per path.
    known: Mutex<Vec<Arc<KnownVolume>>>,
    /// Volumes that were unmounted while files on them are open, until they have ended.
    ///
    /// Invariant: a path belongs to the volume that the kernel has mounted on it and to no other.
    /// So a volume leaves `known` when it is unmounted, and its journal and disk cache are free for
    /// the next one as soon as its delayed writes are on the server
    /// ([`posh_volume::fs::Volume::hand_over`]).
    leaving: Mutex<Vec<(VolumeConfig, Serving)>>,
    mounted: watch::Sender<usize>,
    prefetches: Prefetches,
    runtime: Mutex<Option<Runtime>>,
}

/// One volume.
#[derive(Debug)]
struct KnownVolume {
    config: VolumeConfig,
    phase: Mutex<Phase>,
}

#[derive(Debug)]
enum Phase {
    /// Not mounted, with the reason.
    Not(Arc<VolumeError>),
    Mounted(Serving),
}

/// Status of a volume.
#[derive(Debug)]
pub struct About {
    /// As requested.
    pub config: VolumeConfig,
    /// Its state, or the reason why it is not mounted.
    pub state: Result<State, Arc<VolumeError>>,
}

impl Default for Volumes {
    fn default() -> Self {
        Self {
            known: Mutex::default(),
            leaving: Mutex::default(),
            mounted: watch::Sender::new(0),
            prefetches: Prefetches::default(),
            runtime: Mutex::new(None),
        }
    }
}

impl Volumes {
    /// Number of mounted volumes, as a watch channel.
    #[must_use]
    pub fn count(&self) -> watch::Receiver<usize> {
        self.mounted.subscribe()
    }

    /// Configuration with the volumes that `posh mount` added.
    #[must_use]
    pub fn added_to(&self, config: &Config) -> Config {
        let mut with = config.clone();
        for known in self.known().iter() {
            if !with.mounts.iter().any(|mount| mount.path == known.config.path) {
                with.mounts.push(known.config.mount());
            }
        }
        with
    }

    /// Status of all volumes. Of unmounted ones, only those with data that the server lacks.
    #[must_use]
    pub fn list(gateway: &Gateway) -> Vec<About> {
        let volumes = &gateway.volumes;
        volumes.let_leave(gateway);
        let about =
            |known: &Arc<KnownVolume>| About { config: known.config.clone(), state: known.state() };
        let mut all: Vec<About> = volumes.known().iter().map(about).collect();
        all.extend(volumes.leaving().iter().filter_map(|(config, serving)| {
            let unsent = unsent(&serving.volume.state())?;
            let state = Err(Arc::new(VolumeError::StillOpen(unsent)));
            Some(About { config: config.clone(), state })
        }));
        all
    }

    /// Mounts the configured volumes, each as soon as its executor is reachable.
    pub fn begin(gateway: &Arc<Gateway>) {
        for volume in gateway.config.volumes.clone() {
            let gateway = Arc::downgrade(gateway);
            tokio::spawn(async move {
                while let Some(Err(error)) = mounted(&gateway, volume.clone()).await {
                    tracing::warn!(path = %volume.path.display(), %error, "volume not mounted");
                    tokio::time::sleep(RETRY).await;
                }
            });
        }
    }

    /// Mounts a volume. Returns what the user should know about data that the server lacks.
    ///
    /// # Errors
    /// [`VolumeError`].
    pub async fn mount(
        gateway: &Arc<Gateway>,
        config: VolumeConfig,
    ) -> Result<Option<String>, Arc<VolumeError>> {
        let volumes = &gateway.volumes;
        volumes.let_leave(gateway);
        let known = volumes.enter(gateway, config)?;
        gateway.mounts_changed();
        let outcome = Serving::begin(gateway, &known.config, volumes.handle()).await;
        match outcome {
            Ok(serving) => {
                let notice = notice(&serving.volume.state());
                if let Some(notice) = &notice {
                    tracing::warn!(path = %known.config.path.display(), "{notice}");
                }
                known.become_(Phase::Mounted(serving.clone()));
                let (weak, known) = (Arc::downgrade(gateway), Arc::clone(&known));
                tokio::spawn(async move {
                    serving.ended().await;
                    if let Some(gateway) = weak.upgrade() {
                        gateway.volumes.has_ended(&gateway, &known);
                    }
                });
                volumes.note_count();
                gateway.mounts_changed();
                Ok(notice)
            }
            Err(error) => {
                let error = Arc::new(error);
                known.become_(Phase::Not(Arc::clone(&error)));
                if !volumes.is_configured(gateway, &known) {
                    volumes.known().retain(|other| !Arc::ptr_eq(other, &known));
                    gateway.mounts_changed();
                }
                Err(error)
            }
        }
    }

    /// Handles volumes that any program has unmounted.
    fn let_leave(&self, gateway: &Gateway) {
        let all: Vec<_> = self.known().clone();
        for known in all {
            if known.serving().is_some_and(|serving| serving.is_out()) {
                self.leave(gateway, &known);
            }
        }
    }

    /// Handles a volume that is no longer mounted; files on it may be open.
    fn leave(&self, gateway: &Gateway, known: &Arc<KnownVolume>) {
        let unmounted = Phase::Not(Arc::new(VolumeError::Unmounted));
        let former = std::mem::replace(&mut *known.phase(), unmounted);
        if let Phase::Mounted(serving) = former {
            serving.volume.hand_over();
            let mut leaving = self.leaving();
            // Under the lock: `has_ended` removes volumes that end later.
            if !serving.has_ended() {
                leaving.push((known.config.clone(), serving));
            }
        }
        if !self.is_configured(gateway, known) {
            self.known().retain(|other| !Arc::ptr_eq(other, known));
        }
        self.note_count();
        gateway.mounts_changed();
    }

    /// Registers a volume that is about to be mounted.
    fn enter(
        &self,
        gateway: &Gateway,
        config: VolumeConfig,
    ) -> Result<Arc<KnownVolume>, VolumeError> {
        if gateway.executors.named(&config.executor).is_none() {
            let all = gateway.executors.all();
            let names: Vec<&str> = all.iter().map(|executor| executor.name.as_str()).collect();
            return Err(VolumeError::NoExecutor {
                name: config.executor.to_string(),
                others: names.join(", "),
            });
        }
        let is_volume = gateway.config.volumes.iter().any(|volume| volume.path == config.path);
        if !is_volume && gateway.config.mounts.iter().any(|mount| mount.path == config.path) {
            return Err(VolumeError::IsMount {
                path: config.path,
                file: gateway.config.file.clone(),
            });
        }
        let mut known = self.known();
        if let Some(old) = known.iter().position(|known| known.config.path == config.path) {
            if known[old].is_mounted() {
                return Err(VolumeError::AlreadyMounted(config.path));
            }
            known.remove(old);
        }
        let connecting = Phase::Not(Arc::new(VolumeError::Connecting));
        let new = Arc::new(KnownVolume { config, phase: Mutex::new(connecting) });
        known.push(Arc::clone(&new));
        Ok(new)
    }

    /// Unmounts a volume; also one that a former gateway left behind.
    ///
    /// # Errors
    /// [`VolumeError`].
    pub async fn unmount(gateway: &Gateway, path: &Path) -> Result<(), VolumeError> {
        let volumes = &gateway.volumes;
        volumes.let_leave(gateway);
        let known = volumes.known().iter().find(|known| known.config.path == path).cloned();
        let serving = known.as_ref().and_then(|known| known.serving());
        let mut is_whole = true;
        if let Some(serving) = &serving {
            // Don't stay mounted for a server that does not come back.
            is_whole = is_drained(serving, SETTLE_TIMEOUT).await;
        }
        let (place, its) = (path.to_owned(), serving.clone());
        let unmount = move || match its {
            Some(serving) => serving.unmount().map(Some),
            // One that another process served, or none.
            None => MountedVolume::at(&place)?.map(|left| left.unmount()).transpose(),
        };
        let unmounted = tokio::task::spawn_blocking(unmount).await?;
        let unmounted =
            unmounted.map_err(|error| VolumeError::Unmount { path: path.to_owned(), error })?;
        unmounted.ok_or_else(|| VolumeError::NoVolume(path.to_owned()))?;
        if let (Some(known), Some(serving)) = (&known, &serving) {
            volumes.leave(gateway, known);
            // Open files still keep it.
            let _ = tokio::time::timeout(END_TIMEOUT, serving.ended()).await;
        }
        if is_whole { Ok(()) } else { Err(VolumeError::Unsent(path.to_owned())) }
    }

    /// Copies data that a volume keeps and its server rejects to a new directory. Returns the
    /// number of files.
    ///
    /// # Errors
    /// [`VolumeError`].
    pub async fn recover(&self, path: &Path, to: PathBuf) -> Result<u64, VolumeError> {
        let all: Vec<Serving> = self.serving(|config| config.path == path);
        if all.is_empty() {
            return Err(VolumeError::NoVolume(path.to_owned()));
        }
        if to.starts_with(path) {
            return Err(VolumeError::WithinItself(to));
        }
        let recover = move || {
            let to = Recovery::create(&to)?;
            let recovered = all.iter().map(|serving| serving.volume.recover(&to)).sum();
            to.remove_if_empty();
            recovered
        };
        let recovered: io::Result<u64> = tokio::task::spawn_blocking(recover).await?;
        recovered.map_err(VolumeError::Recovery)
    }

    /// Flushes a mount's volumes before commands run on its server.
    ///
    /// # Errors
    /// Reason why the server may lack local writes.
    pub async fn settle(&self, mount: &Mount) -> Result<(), LocalReason> {
        for serving in self.of(mount) {
            let settled = tokio::time::timeout(SETTLE_TIMEOUT, serving.volume.settle()).await;
            match settled {
                Ok(Ok(())) => {}
                Err(_) | Ok(Err(_)) => {
                    let words = "the server does not take what was written";
                    return Err(ReasonKind::Unflushed.because(words));
                }
            }
        }
        Ok(())
    }

    /// Prepares for a command on the server that may remove or replace names: files that are open
    /// locally stay usable afterwards.
    pub async fn hold_open(&self, mount: &Mount) {
        for serving in self.of(mount) {
            // An unreachable server is reported when the command is started.
            let _ = tokio::time::timeout(SETTLE_TIMEOUT, serving.volume.hold_all_open()).await;
        }
    }

    /// Sessions of an executor that must be told of a run's changes, with the leases that they
    /// return.
    #[must_use]
    pub fn sessions(&self, executor: &ExecutorName) -> Vec<VolumeSession> {
        let theirs = self.serving(|config| config.executor == *executor);
        theirs.iter().map(Serving::told_of_runs).collect()
    }

    /// Waits after a command until the volumes show its changes, as reported by their executor.
    pub async fn caught_up(&self, marks: &[VolumeMark], changes: Changes) {
        let mut latest: BTreeMap<&Bytes, u64> = BTreeMap::new();
        for mark in marks {
            let stamp = latest.entry(&mark.session).or_default();
            *stamp = mark.stamp.max(*stamp);
        }
        let all = self.serving(|_| true);
        let marked =
            all.into_iter().filter_map(|serving| Some((*latest.get(serving.session())?, serving)));
        at_once(marked.map(|(stamp, serving)| async move {
            serving.volume.caught_up(Stamp(stamp), changes).await
        }))
        .await;
    }

    /// Makes a mount's volumes ask for changes after a command, unless their executor has told
    /// them.
    pub async fn catch_up(&self, mount: &Mount, told: &[VolumeMark]) {
        let was_told =
            |serving: &Serving| told.iter().any(|mark| mark.session == *serving.session());
        let others = self.of(mount).into_iter().filter(|serving| !was_told(serving));
        at_once(others.map(|serving| async move { serving.volume.catch_up().await })).await;
    }

    /// Volumes that show a mount's files: the mount itself, or others of the same export.
    fn of(&self, mount: &Mount) -> Vec<Serving> {
        let Some(owner) = &mount.owner else { return Vec::new() };
        self.serving(|config| config.executor == owner.executor && config.export == owner.export)
    }

    /// All served volumes, including unmounted ones.
    fn serving(&self, which: impl Fn(&VolumeConfig) -> bool) -> Vec<Serving> {
        let known = self.known();
        let mut serving: Vec<_> = known
            .iter()
            .filter(|known| which(&known.config))
            .filter_map(|known| known.serving())
            .collect();
        let leaving = self.leaving();
        serving.extend(
            leaving.iter().filter(|(config, _)| which(config)).map(|(_, serving)| serving.clone()),
        );
        serving
    }

    /// Writes remaining data and unmounts all volumes.
    pub async fn end(&self) {
        let all: Vec<_> = self.known().drain(..).collect();
        let mounted =
            all.into_iter().filter_map(|known| Some((known.config.path.clone(), known.serving()?)));
        let leaving: Vec<_> = self.leaving().drain(..).collect();
        let ending =
            mounted.chain(leaving.into_iter().map(|(config, serving)| (config.path, serving)));
        let mut ending: JoinSet<()> =
            ending.map(|(path, serving)| end_one(path, serving)).collect();
        while ending.join_next().await.is_some() {}
        if let Some(runtime) = self.runtime.lock().unwrap_or_else(PoisonError::into_inner).take() {
            runtime.shutdown_background();
        }
    }

    fn has_ended(&self, gateway: &Gateway, known: &Arc<KnownVolume>) {
        tracing::info!(path = %known.config.path.display(), "volume has ended");
        self.leaving().retain(|(_, serving)| !serving.has_ended());
        self.leave(gateway, known);
    }

    fn is_configured(&self, gateway: &Gateway, known: &KnownVolume) -> bool {
        gateway.config.volumes.iter().any(|volume| volume.path == known.config.path)
    }

    fn note_count(&self) {
        let count = self.known().iter().filter(|known| known.is_mounted()).count();
        self.mounted.send_replace(count + self.leaving().len());
    }

    /// Lock order: after `known`.
    fn leaving(&self) -> MutexGuard<'_, Vec<(VolumeConfig, Serving)>> {
        self.leaving.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn known(&self) -> MutexGuard<'_, Vec<Arc<KnownVolume>>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runtime of the volumes, created for the first of them.
    fn handle(&self) -> Result<tokio::runtime::Handle, VolumeError> {
        let mut runtime = self.runtime.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(runtime) = &*runtime {
            return Ok(runtime.handle().clone());
        }
        let built = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(THREADS)
            .thread_name("volumes")
            .enable_all()
            .build()
            .map_err(VolumeError::Threads)?;
        Ok(runtime.insert(built).handle().clone())
    }
}

/// Waits, up to a timeout, until the server has all writes. Returns true if it has.
async fn is_drained(serving: &Serving, timeout: Duration) -> bool {
    let drained = tokio::time::timeout(timeout, serving.volume.drain_all()).await;
    matches!(drained, Ok(Ok(()))) && serving.volume.state().lost.is_none()
}

/// Description of the data that the server lacks.
fn unsent(state: &State) -> Option<String> {
    let bytes =
        (state.dirty_bytes > 0).then(|| format!("{} bytes are on their way", state.dirty_bytes));
    state.lost.clone().or(bytes)
}

/// Description of the files that the server refuses, or that can't be read in the journal.
#[must_use]
pub fn notice(state: &State) -> Option<String> {
    let damage = state.damage.as_ref().map(ToString::to_string);
    let all: Vec<String> = state.lost.iter().cloned().chain(damage).collect();
    (!all.is_empty()).then(|| all.join("; "))
}

/// Writes a volume's remaining data and unmounts it.
async fn end_one(path: PathBuf, serving: Serving) {
    if !is_drained(&serving, LAST_WRITES).await {
        tracing::warn!(path = %path.display(), "what was written last is not on the server");
    }
    let its = serving.clone();
    let unmounted = tokio::task::spawn_blocking(move || its.unmount()).await;
    let _ = tokio::time::timeout(END_TIMEOUT, serving.ended()).await;
    tracing::info!(path = %path.display(), ?unmounted, "volume unmounted");
}

/// Waits for all in parallel: a server that announces a change that never comes delays callers by
/// one timeout only.
async fn at_once(waits: impl Iterator<Item = impl Future<Output = ()> + Send + 'static>) {
    let mut all: JoinSet<()> = waits.collect();
    while all.join_next().await.is_some() {}
}

/// `None` if the gateway is gone.
async fn mounted(
    gateway: &Weak<Gateway>,
    volume: VolumeConfig,
) -> Option<Result<Option<String>, Arc<VolumeError>>> {
    Some(Volumes::mount(&gateway.upgrade()?, volume).await)
}

impl KnownVolume {
    fn phase(&self) -> MutexGuard<'_, Phase> {
        self.phase.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn become_(&self, phase: Phase) {
        *self.phase() = phase;
    }

    fn is_mounted(&self) -> bool {
        matches!(&*self.phase(), Phase::Mounted(serving) if !serving.has_ended())
    }

    fn serving(&self) -> Option<Serving> {
        match &*self.phase() {
            Phase::Mounted(serving) => Some(serving.clone()),
            Phase::Not(_) => None,
        }
    }

    fn state(&self) -> Result<State, Arc<VolumeError>> {
        match &*self.phase() {
            Phase::Mounted(serving) => Ok(serving.volume.state()),
            Phase::Not(why) => Err(why.clone()),
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::Barrier;

    use super::*;

    #[tokio::test]
    async fn volumes_are_waited_for_together() {
        // Each waits until the others do.
        let barrier = Arc::new(Barrier::new(3));
        let waits = (0..3).map(|_| {
            let barrier = Arc::clone(&barrier);
            async move {
                barrier.wait().await;
            }
        });
        tokio::time::timeout(Duration::from_secs(10), at_once(waits))
            .await
            .expect("none is waited for alone");
    }
}
