//! What all parts of the gateway share.

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
    mountinfo::MountInfo,
    process::Process,
    rights::{Aside, Rights},
    sshfs,
};
use posh_annotations::Library;
use sha2::{Digest, Sha256};

use crate::{
    aside::aside,
    assembly::{Assembler, Writers},
    executors::Executors,
    open_files::OpenFiles,
    peers::Peer,
    session::{Mounts, Sessions},
    shares::Shares,
    tools::LocalTools,
    volumes::Volumes,
};

/// How a process is compared with the gateway.
type Compare = fn(&Rights, &Process, Aside) -> io::Result<Option<&'static str>>;

/// The gateway's one shared value.
#[derive(Debug)]
pub struct Gateway {
    /// As loaded at the start.
    pub config: Config,
    /// Connections.
    pub executors: Executors,
    /// Shells.
    pub sessions: Arc<Sessions>,
    /// Takes stages in.
    pub assembler: Assembler,
    /// Knows what is being written.
    pub writers: Writers,
    /// This machine's commands.
    pub tools: LocalTools,
    /// Names that get a shim.
    pub commands: Arc<Vec<String>>,
    /// Inode of our mount namespace: the mount table is true in it.
    pub mount_namespace: u64,
    /// What this process may do; a command with less runs locally. `None` if that can't be told.
    pub rights: Option<Rights>,
    /// As uname(2) names it.
    pub machine: String,
    /// SHA-256 of /etc/localtime; empty when there is none.
    pub localtime: Vec<u8>,
    /// What makes the names of runs such that no other client of an executor can guess them.
    pub secret: String,
    /// Looks for files that are open here.
    pub open_files: OpenFiles,
    /// Questions to this machine's own directories, which may lead to mounts that hang.
    pub own_files: Shares,
    /// Pipelines at work now.
    pub running: AtomicUsize,
    /// Mounts that are served here.
    pub volumes: Volumes,
    view: Mutex<Arc<View>>,
    pipelines: AtomicU64,
}

/// What may change while the gateway runs; each pipeline uses one view throughout.
#[derive(Debug)]
pub struct View {
    /// Path → owner.
    pub table: Arc<MountTable>,
    /// What is known of commands.
    pub library: Arc<Library>,
}

impl Gateway {
    /// Puts the parts together.
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
            sessions,
            assembler,
            writers: Writers::default(),
            tools: LocalTools::default(),
            commands,
            mount_namespace: fs::metadata("/proc/self/ns/mnt").map_or(0, |m| m.ino()),
            rights: Rights::own().ok(),
            machine: nix::sys::utsname::uname()
                .map(|u| u.machine().to_string_lossy().into_owned())
                .unwrap_or_default(),
            localtime: fs::read("/etc/localtime")
                .map(|c| Sha256::digest(c).to_vec())
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
            pipelines: AtomicU64::new(0),
        }
    }

    /// Why a process must not have the gateway do anything: it has not exactly the gateway's
    /// rights.
    #[must_use]
    pub fn confined(&self, peer: &Peer) -> Option<String> {
        self.lacks(peer, Rights::difference)
    }

    /// Why a command must run locally: its process has not exactly the gateway's rights, or that
    /// can't be told.
    #[must_use]
    pub fn keeps_here(&self, peer: &Peer) -> Option<String> {
        self.lacks(peer, Rights::keep_here)
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

    /// The mount table and library as they are now.
    #[must_use]
    pub fn view(&self) -> Arc<View> {
        Arc::clone(&self.view.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The mounts of this machine have changed: new pipelines see the new ones.
    pub fn mounts_changed(&self) {
        let Ok(info) = MountInfo::read() else { return };
        let with_volumes = self.volumes.added_to(&self.config);
        // It looks at processes: those of one user may be many.
        let (config, _) = aside(|| sshfs::adopted(&with_volumes, &info));
        self.executors.update(&config);
        let table = Arc::new(MountTable::new(&config, &info));
        let old = self.view();
        let view = View { table, library: Arc::clone(&old.library) };
        self.sessions.publish(&self.told_of(&view.table));
        *self.view.lock().unwrap_or_else(PoisonError::into_inner) = Arc::new(view);
    }

    /// What sessions are told of the mounts.
    #[must_use]
    pub fn told_of(&self, table: &MountTable) -> Mounts {
        let volumes =
            table.mounts().any(|mount| mount.mounted() && mount.adapter() == Adapter::Volume);
        let at_hand = volumes && self.config.gateway.scheduler == Scheduler::Cost;
        Mounts { prefixes: table.prefixes().encode(), at_hand }
    }

    /// A number for a pipeline.
    #[must_use]
    pub fn next_pipeline(&self) -> u64 {
        self.pipelines.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// How many pipelines there have been.
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
