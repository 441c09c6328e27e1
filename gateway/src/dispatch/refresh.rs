//! After a remote command has changed files, the mounts here must not go on
//! showing what they remember (design §5, rule 8). Which files changed is known
//! from redirects and from the annotation.

use std::{
    collections::BTreeSet,
    ffi::OsStr,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use fs_mapper::{MountTable, Resolution, coherence::Change};
use posh_annotations::{CurrentDir, FileKind};
use posh_proto::rule::{self, Rule};

use crate::{
    enlisted::{Enlisted, Kind},
    facts::{Place, Reading},
    state::Gateway,
};

/// A mount that does not answer in this time is not waited for: the command has
/// ended, and its shell must go on.
const DEADLINE: Duration = Duration::from_secs(5);

/// What one stage has changed, as far as can be known.
pub struct Written {
    table: Arc<MountTable>,
    changes: Vec<Change>,
}

/// Calls on the mounts at once: each costs a round trip or more, and they wait for nothing but the network.
const AT_ONCE: usize = 16;

impl Written {
    /// Adds directories in which the executor found something changed.
    pub fn add(&mut self, directories: &[Bytes]) {
        let named = directories.iter().map(|d| PathBuf::from(OsStr::from_bytes(d)));
        self.changes.extend(named.map(Change::NamesChanged));
    }

    /// Redirects of a stage, and the files and directories that its annotation says it changes.
    #[must_use]
    pub fn by(gateway: &Gateway, stage: &Enlisted, reading: Option<&Reading>) -> Self {
        let mut files = BTreeSet::new();
        let mut directories = BTreeSet::new();
        let redirects = [1, 2].into_iter().filter_map(|fd| stage.descriptor(fd));
        files.extend(redirects.filter(|d| d.kind == Kind::File && d.writes()).map(|d| d.path.clone()));
        for (file, place) in reading.into_iter().flat_map(|r| r.invocation.files.iter().zip(&r.places)) {
            let Some(Place::At(_, path, _)) = place else { continue };
            if file.kind.writes() {
                note(file.kind, path.as_path(), &mut files, &mut directories);
            }
        }
        let writes_cwd = reading.is_some_and(|r| r.invocation.current_dir == CurrentDir::Writes);
        if writes_cwd {
            directories.insert(stage.cwd.clone());
        }
        let changes =
            directories.into_iter().map(Change::NamesChanged).chain(files.into_iter().map(Change::FileWritten));
        Self { table: Arc::clone(&gateway.view().table), changes: changes.collect() }
    }
}

fn note(kind: FileKind, path: &Path, files: &mut BTreeSet<PathBuf>, directories: &mut BTreeSet<PathBuf>) {
    if kind.recursive() {
        directories.insert(path.to_owned());
    } else {
        files.insert(path.to_owned());
    }
    // It may be a new name, also that of a tree.
    directories.extend(path.parent().map(Path::to_owned));
}

/// Makes the mounts forget. Blocks as long as they do, up to a deadline.
pub async fn refresh(written: Written) {
    if written.changes.is_empty() || !rule::holds(Rule::Coherence) {
        return;
    }
    let work = tokio::task::spawn_blocking(move || {
        let Written { table, changes } = &written;
        std::thread::scope(|scope| {
            for share in changes.chunks(changes.len().div_ceil(AT_ONCE)) {
                scope.spawn(move || share.iter().for_each(|change| refresh_one(table, change)));
            }
        });
    });
    if tokio::time::timeout(DEADLINE, work).await.is_err() {
        tracing::warn!("a mount does not answer; what it shows of changed files may be old");
    }
}

fn refresh_one(table: &MountTable, change: &Change) {
    let (Change::FileWritten(path) | Change::NamesChanged(path)) = change;
    let Resolution::Owned(owned) = table.resolve(path, Path::new("/")) else { return };
    if let Err(error) = table.mount(owned.mount).coherence().refresh(change) {
        // Usually the command removed the file again, or never made it.
        tracing::debug!(path = %path.display(), %error, "nothing to refresh");
    }
}
