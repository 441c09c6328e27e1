//! Lists directories on slow mounts before a shell does (design: think in round trips): the
//! kernel and the mount's daemon then have the names at hand when the shell asks, which
//! would list one directory after the other. What is listed is what the shell would see, as nothing
//! of it has run; while a listing is under way nobody is told to forget that directory.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use fs_mapper::{MountTable, Resolution, coherence::Adapter};
use tokio::sync::watch;

/// Listings at once, of all sessions: a mount that hangs must not take all threads.
const AT_ONCE: usize = 64;

/// The listings that are under way.
#[derive(Debug, Default)]
pub struct LookAhead {
    under_way: watch::Sender<usize>,
}

impl LookAhead {
    /// Begins to list those that are on a mount with an owner. Returns at once; what fails, the shell will find out.
    pub fn begin(self: &Arc<Self>, table: &MountTable, directories: impl Iterator<Item = PathBuf>) {
        for directory in directories.filter(|directory| is_slow(table, directory)) {
            if !self.under_way.send_if_modified(|count| *count < AT_ONCE && add(count)) {
                tracing::debug!(directory = %directory.display(), "too much to look ahead at");
                return;
            }
            let all = Arc::clone(self);
            tokio::task::spawn_blocking(move || {
                let names = fs::read_dir(&directory).map(Iterator::count);
                tracing::debug!(directory = %directory.display(), ?names, "looked ahead");
                all.under_way.send_modify(|count| *count -= 1);
            });
        }
    }

    /// Waits until none is under way: whoever makes a mount forget what changed must come after those who read it before.
    pub async fn settled(&self) {
        let _ = self.under_way.subscribe().wait_for(|count| *count == 0).await;
    }
}

fn add(count: &mut usize) -> bool {
    *count += 1;
    true
}

/// Listing it costs round trips: a bind mount is as fast as a disk.
fn is_slow(table: &MountTable, directory: &Path) -> bool {
    match table.resolve(directory, Path::new("/")) {
        Resolution::Owned(owned) => {
            let mount = table.mount(owned.mount);
            mount.mounted() && mount.adapter() != Adapter::Bind
        }
        Resolution::Local { .. } => false,
    }
}
