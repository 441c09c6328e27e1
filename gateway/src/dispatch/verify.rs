//! Verifies that mounts show the attributes that executors have reported.
//!
//! sshfs accepts new attributes of a file (from an open or a listing) only if no program wrote
//! through the mount while the reply was in transit (`cache_add_attr`, `write_ctr`). Otherwise it
//! keeps the cached ones for up to 20 s, which parallel jobs are enough for.
//!
//! Invariant: when a command ends, each reported file is shown as reported, or otherwise than it
//! was cached at the command's end, or whatever was cached has expired ([`SSHFS_MEMORY`]). So
//! nothing that was cached before the end is left.

use std::{
    collections::{BTreeMap, BTreeSet},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use fs_mapper::coherence::{Change, SSHFS_MEMORY};
use nix::sys::stat::SFlag;
use posh_proto::executor::{Attributes, ChangedDirectory, Exited};

use super::{
    on_mounts::OnMounts,
    refresh::{at_once, in_parallel, path_of, real_place, refresh_one, root_around},
};
use crate::written::is_on_sshfs;

/// Wait after which further commands that write run locally.
const LONG: Duration = Duration::from_secs(1);
/// Pause between requests, each of which takes a round trip.
const PAUSE: Duration = Duration::from_millis(5);

/// Reported regular files, by their paths on this machine.
pub type ReportedFiles = BTreeMap<PathBuf, Attributes>;

/// Collects the regular files that executors reported at a stage's end. `written` has those of the
/// stage's words and redirects; others count only in reported directories.
pub fn reported<'a>(
    exits: &[&'a Exited],
    directories: &[&'a ChangedDirectory],
    written: &BTreeSet<Change>,
) -> ReportedFiles {
    let named = exits.iter().flat_map(|exited| &exited.files_now).filter_map(|file| {
        let path = path_of(&file.path);
        let is_written = written.contains(&Change::FileWritten(path.clone()));
        Some((path, file.now?)).filter(|_| is_written)
    });
    let in_directories = directories
        .iter()
        .filter(|directory| directory.written.len() == directory.written_now.len())
        .flat_map(|directory| {
            let path = path_of(&directory.path);
            let names = directory.written.iter().zip(&directory.written_now);
            names.map(move |(name, now)| (path.join(path_of(name)), *now))
        });
    in_directories
        .chain(named)
        .filter(|(_, now)| SFlag::from_bits_truncate(now.mode) & SFlag::S_IFMT == SFlag::S_IFREG)
        .collect()
}

/// A reported file whose mount shows other attributes.
#[derive(Debug, Clone)]
pub(super) struct OutdatedFile {
    path: PathBuf,
    reported: Attributes,
    /// The attributes that the mount showed at the command's end.
    cached: Attributes,
}

/// Compares the cached attributes with the reported ones. Call it before anything is invalidated.
/// Files that are shown as reported are invalidated all the same: their contents may differ at the
/// same size in the same second, and programs that have them open read cached pages.
pub(super) async fn outdated(table: &Arc<OnMounts>, reported: ReportedFiles) -> Vec<OutdatedFile> {
    let files: Vec<(PathBuf, Attributes)> =
        reported.into_iter().filter(|(path, _)| is_on_sshfs(table, path)).collect();
    let at = Arc::clone(table);
    let compare = move |(path, reported): &(PathBuf, Attributes)| {
        let cached = shown(&at, path)?;
        let file = OutdatedFile { path: path.clone(), reported: *reported, cached };
        file.is_stale(cached).then_some(file)
    };
    in_parallel(files, compare).await
}

/// Returns once the mounts show no attributes from before the command's end, or these have expired.
pub(super) async fn wait_until_current(table: &Arc<OnMounts>, outdated: Vec<OutdatedFile>) {
    let began = Instant::now();
    let mut left = outdated;
    loop {
        let at = Arc::clone(table);
        let is_stale = move |file: &OutdatedFile| {
            let shown = shown(&at, &file.path)?;
            file.is_stale(shown).then(|| file.clone())
        };
        left = in_parallel(left, is_stale).await;
        if left.is_empty() || began.elapsed() > SSHFS_MEMORY {
            return;
        }
        if began.elapsed() > LONG {
            left.iter().for_each(|file| table.note_busy(&file.path));
        }
        let anew = left.iter().map(|file| Change::FileWritten(file.path.clone())).collect();
        at_once(table, anew, refresh_one).await;
        tokio::time::sleep(PAUSE).await;
    }
}

impl OutdatedFile {
    fn is_stale(&self, shown: Attributes) -> bool {
        is_same(shown, self.cached) && !is_same(shown, self.reported)
    }
}

/// Attributes from the mount's daemon, not the kernel. `None` for a file that was removed since.
fn shown(table: &OnMounts, path: &Path) -> Option<Attributes> {
    let real = real_place(table, &Change::FileWritten(path.to_owned()))?;
    let (root, _) = root_around(table, &real)?;
    let found = root.fresh_metadata(&real).ok()?;
    Some(Attributes { mode: found.mode(), size: found.size(), mtime_s: found.mtime() })
}

/// Times of SFTP, version 3, are unsigned and have 32 bits (draft-ietf-secsh-filexfer-02, 5).
fn is_same(one: Attributes, other: Attributes) -> bool {
    let in_range = |attributes: Attributes| Attributes {
        mtime_s: attributes.mtime_s & i64::from(u32::MAX),
        ..attributes
    };
    in_range(one) == in_range(other)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_cached_at_the_end_is_stale() {
        let state = |size, mtime_s| Attributes { mode: 0o100_644, size, mtime_s };
        let file = OutdatedFile { path: "f".into(), reported: state(12, 8), cached: state(24, 8) };
        let rows = [
            (state(24, 8), true),
            (state(12, 8), false),
            (state(12, 8 + (1 << 32)), false),
            // Changed since.
            (state(36, 8), false),
            (state(5, 9), false),
        ];
        for (shown, is_stale) in rows {
            assert_eq!(file.is_stale(shown), is_stale, "{shown:?}");
        }
    }
}
