//! Shared state of the gateway.

use std::{
    fs, io,
    os::unix::fs::MetadataExt,
    path::Path,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
};

use fs_mapper::{
    MountTable,
    coherence::Adapter,
    config::{Config, Scheduler},
    mountinfo::MountSnapshot,
    process::Process,
    rights::{Aside, Rights},
    sshfs,
};
use posh_annotations::Library;
use sha2::{Digest, Sha256};
use tokio::sync::Notify;

use crate::{
    aside::aside,
    assembly::{Assembler, Writers},
    executors::Executors,
    locales::LocalLocales,
    model::{LocalReason, ReasonKind},
    new_files::NewFiles,
    open_files::OpenFiles,
    peers::Peer,
    same_files::SameFiles,
    session::{Mounts, Sessions},
    shares::Shares,
    tools::LocalTools,
    volumes::Volumes,
    zone,
};

/// Comparison of a process's rights with the gateway's.
type Compare = fn(&Rights, &Process, Aside) -> io::Result<Option<&'static str>>;

/// The gateway's one shared value.
#[derive(Debug)]
pub struct Gateway {
    /// Configuration from the start.
    pub config: Config,
    /// Executors and their connections.
    pub executors: Executors,
    /// sshfs mounts, as compared with their executors.
    pub same_files: SameFiles,
    /// Files that sshfs mounts make, as compared with their executors'.
    pub new_files: NewFiles,
    /// Sessions of shells.
    pub sessions: Arc<Sessions>,
    /// Assembles pipelines from enlisted stages.
    pub assembler: Assembler,
    /// Finds files that are being written.
    pub writers: Writers,
    /// Hashes and versions of local commands.
    pub tools: LocalTools,
    /// This machine's locales.
    pub locales: LocalLocales,
    /// Names of commands with a shim.
    pub commands: Arc<Vec<String>>,
    /// Inode of our mount namespace, which the mount table describes.
    pub mount_namespace: u64,
    /// Rights of this process; a command with fewer runs locally. `None` if unknown.
    pub rights: Option<Rights>,
    /// Machine name of uname(2).
    pub machine: String,
    /// Makes run IDs unguessable for other clients of an executor.
    pub secret: String,
    /// Finds files that local processes have open.
    pub open_files: OpenFiles,
    /// Limits on lookups in local directories, which may lead to mounts that hang.
    pub own_files: Shares,
    /// Number of running pipelines.
    pub running: AtomicUsize,
    /// Volumes served by this gateway.
    pub volumes: Volumes,
    view: Mutex<Arc<View>>,
    /// Number of the next table.
    table_reads: AtomicU64,
    /// Notified when a plan has found that the mounts are no longer those of the table.
    pub table_is_old: Notify,
    pipelines: AtomicU64,
}

/// State that may change while the gateway runs; each pipeline uses one view throughout.
#[derive(Debug)]
pub struct View {
    /// Map from path to owner.
    pub table: Arc<MountTable>,
    /// The mounts that the table was made of.
    pub mounts: MountSnapshot,
    /// Number of the table; a later one began to be read later.
    pub number: u64,
    /// Annotations of commands.
    pub library: Arc<Library>,
}

impl Gateway {
    /// Makes a gateway of its parts.
    #[must_use]
    pub fn new(
        config: Config,
        view: View,
        executors: Executors,
        sessions: Arc<Sessions>,
        assembler: Assembler,
    ) -> Self {
        let commands = Arc::new(view.library.commands().map(str::to_owned).collect());
        Self {
            config,
            executors,
            same_files: SameFiles::default(),
            new_files: NewFiles::default(),
            sessions,
            assembler,
            writers: Writers::default(),
            tools: LocalTools::default(),
            locales: LocalLocales::default(),
            commands,
            mount_namespace: fs::metadata("/proc/self/ns/mnt").map_or(0, |m| m.ino()),
            rights: Rights::own().ok(),
            machine: nix::sys::utsname::uname()
                .map(|u| u.machine().to_string_lossy().into_owned())
                .unwrap_or_default(),
            // random(4); 122 bits.
            secret: fs::read_to_string("/proc/sys/kernel/random/uuid")
                .unwrap_or_default()
                .trim()
                .replace('-', ""),
            open_files: OpenFiles::default(),
            own_files: Shares::default(),
            running: AtomicUsize::new(0),
            volumes: Volumes::default(),
            view: Mutex::new(Arc::new(view)),
            table_reads: AtomicU64::new(1),
            table_is_old: Notify::new(),
            pipelines: AtomicU64::new(0),
        }
    }

    /// Reason for refusing requests of a process: its rights differ from the gateway's.
    #[must_use]
    pub fn confined(&self, peer: &Peer) -> Option<String> {
        self.lacks(peer, Rights::difference)
    }

    /// Reason for running a command locally: its process's rights differ from the gateway's, or are
    /// unknown.
    #[must_use]
    pub fn keeps_here(&self, peer: &Peer) -> Option<LocalReason> {
        self.lacks(peer, Rights::keep_here).map(|why| ReasonKind::Process.because(why))
    }

    fn lacks(&self, peer: &Peer, compare: Compare) -> Option<String> {
        let compared = self.rights.as_ref().ok_or(io::ErrorKind::NotFound.into());
        let differs = compared.and_then(|own| compare(own, &peer.process()?, |work| aside(work)));
        match differs {
            Ok(what) => what.map(|what| {
                format!("it does not run with the gateway's own rights, but with {what}")
            }),
            Err(_) => Some("the rights of its process can't be told".to_owned()),
        }
    }

    /// SHA-256 of /etc/localtime as it is now, since a machine may travel; empty if there is none.
    #[must_use]
    pub fn localtime(&self) -> Vec<u8> {
        fs::read(zone::LOCALTIME).map(|zone| Sha256::digest(zone).to_vec()).unwrap_or_default()
    }

    /// Current mount table and library.
    #[must_use]
    pub fn view(&self) -> Arc<View> {
        Arc::clone(&self.view.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Reads the changed mounts; new pipelines use them.
    pub fn mounts_changed(&self) {
        let number = self.table_reads.fetch_add(1, Ordering::Relaxed);
        let Ok((mounts, info)) = MountSnapshot::take() else { return };
        let with_volumes = self.volumes.added_to(&self.config);
        // This reads processes, of which a user may have many.
        let (config, _) = aside(|| sshfs::adopted(&with_volumes, &info));
        let table = Arc::new(MountTable::new(&config, &info));
        let mut view = self.view.lock().unwrap_or_else(PoisonError::into_inner);
        // A read that began earlier may end later.
        if view.number > number {
            return;
        }
        self.executors.update(&config);
        self.sessions.publish(&self.told_of(&table));
        *view = Arc::new(View { table, mounts, number, library: Arc::clone(&view.library) });
    }

    /// Data about the mounts for sessions.
    #[must_use]
    pub fn told_of(&self, table: &MountTable) -> Mounts {
        let volumes =
            table.mounts().any(|mount| mount.mounted() && mount.adapter() == Adapter::Volume);
        let at_hand = volumes && self.config.gateway.scheduler == Scheduler::Cost;
        Mounts { prefixes: table.prefixes().encode(), at_hand }
    }

    /// Next number for a pipeline.
    #[must_use]
    pub fn next_pipeline(&self) -> u64 {
        self.pipelines.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Number of pipelines so far.
    #[must_use]
    pub fn pipelines(&self) -> u64 {
        self.pipelines.load(Ordering::Relaxed)
    }

    /// The configuration file.
    #[must_use]
    pub fn config_file(&self) -> &Path {
        &self.config.file
    }
}
