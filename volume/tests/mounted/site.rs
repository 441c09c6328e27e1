//! A directory, and volumes mounted of it, each with a session of its own; taken out of the tree in
//! the end.

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    sync::Arc,
};

use nix::{mount::MsFlags, unistd::geteuid};
use posh_volume::{
    directory::{Directory, DirectorySession, Liveness, Machine, Mutability, Rights},
    disk::DiskCache,
    fs::{Settings, State, Volume},
    fuse::{self, Users},
    journal::Journal,
    mount::{self, Wanted},
    mounted::MountedVolume,
    store::Store,
};
use tempfile::TempDir;
use tokio::runtime::Runtime;

/// Size of the caches in memory and on the disk: small, so that there are evictions.
pub const CACHE: u64 = 4 << 20;

/// Files that a volume holds: few, for the same reason.
pub const FILES: usize = 60;

pub struct Site {
    root: TempDir,
    mounts: Vec<PathBuf>,
    below: Vec<PathBuf>,
    volumes: Vec<Arc<Volume>>,
    runtime: Option<Runtime>,
}

impl Site {
    /// So many mounts of one directory.
    pub fn new(mounts: usize) -> Self {
        Self::over(mounts, |session| Arc::new(session))
    }

    /// Like [`Self::new`], with a layer between the volumes and their sessions.
    pub fn over(mounts: usize, between: impl Fn(DirectorySession) -> Arc<dyn Store>) -> Self {
        let root = tempfile::tempdir().unwrap();
        // Other users are to get there.
        fs::set_permissions(root.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let origin = root.path().join("origin");
        fs::create_dir(&origin).unwrap();
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .unwrap();
        let rights = if geteuid().is_root() { Rights::Callers } else { Rights::Own };
        let directory = {
            let _entered = runtime.enter();
            Directory::open(Machine::start().unwrap(), &origin, rights, Mutability::ReadWrite)
                .unwrap()
        };
        let mut site = Self {
            root,
            mounts: Vec::new(),
            below: Vec::new(),
            volumes: Vec::new(),
            runtime: Some(runtime),
        };
        for number in 0..mounts {
            site.add(&directory, number, &between);
        }
        site
    }

    fn add(
        &mut self,
        directory: &Arc<Directory>,
        number: usize,
        between: &impl Fn(DirectorySession) -> Arc<dyn Store>,
    ) {
        let runtime = self.runtime.as_ref().unwrap();
        let _entered = runtime.enter();
        let path = self.root.path().join(format!("mount{number}"));
        fs::create_dir(&path).unwrap();
        let store = DirectorySession::open(Arc::clone(directory), Liveness::Own);
        let is_root = geteuid().is_root();
        if is_root {
            store.tell_acls();
        }
        let store = between(store);
        let disk = DiskCache::open(&self.root.path().join(format!("disk{number}")), CACHE).unwrap();
        let (volume, invalidations) = Volume::new(
            store,
            Settings { sync: false, memory_bytes: CACHE, most_files: FILES },
            Some(disk),
        );
        let journal = Journal::open(&self.root.path().join(format!("journal{number}")));
        let (journal, left) = journal.unwrap();
        runtime.block_on(volume.keep_journal(journal, left)).unwrap();
        let wanted = Wanted { source: "test:origin", read_only: false, for_everybody: is_root };
        let new = mount::mount(&wanted, &path).unwrap();
        let users = if is_root { Users::All } else { Users::Own };
        fuse::serve(Arc::clone(&volume), invalidations, new.device, &path, users).unwrap();
        self.mounts.push(path);
        self.volumes.push(volume);
    }

    /// Mounts something in a directory of a mount. The kernel can't be told then that all names are
    /// doubtful, which would take that along.
    pub fn mount_below(&mut self, number: usize) {
        let place = self.mounts[number].join("below");
        fs::create_dir(&place).unwrap();
        let nothing = None::<&str>;
        nix::mount::mount(nothing, &place, Some("tmpfs"), MsFlags::empty(), nothing).unwrap();
        self.below.push(place);
    }

    /// Returns the exported directory.
    pub fn origin(&self) -> PathBuf {
        self.root.path().join("origin")
    }

    /// A directory that has nothing to do with it.
    pub fn plain(&self) -> PathBuf {
        let plain = self.root.path().join("plain");
        fs::create_dir_all(&plain).unwrap();
        plain
    }

    pub fn mount(&self, number: usize) -> &Path {
        &self.mounts[number]
    }

    pub fn state(&self, number: usize) -> State {
        self.volumes[number].state()
    }

    pub fn catch_up(&self, number: usize) {
        self.runtime.as_ref().unwrap().block_on(self.volumes[number].catch_up());
    }

    /// Returns when a reply with that file has been given to the kernel.
    pub fn wait_until_told(&self, mount: usize, number: u64) {
        while !self.volumes[mount].is_told(number) {
            std::thread::yield_now();
        }
    }

    pub fn settle(&self, number: usize) {
        self.runtime.as_ref().unwrap().block_on(self.volumes[number].settle()).unwrap();
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        for path in &self.below {
            let _ = nix::mount::umount(path);
        }
        for path in &self.mounts {
            if let Ok(Some(mounted)) = MountedVolume::at(path) {
                let _ = mounted.unmount();
            }
        }
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}
