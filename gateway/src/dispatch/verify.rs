//! Verifies that mounts show the attributes that executors have reported.
//!
//! sshfs accepts new attributes of a file (from an open or a listing) only if no program wrote
//! through the mount while the reply was in transit (`cache_add_attr`, `write_ctr`). Otherwise it
//! keeps the cached ones for up to 20 s, which parallel jobs are enough for. So the attributes that
//! the mount shows are compared with those at the command's end, and requested again while they are
//! older.
//!
//! Invariant: when a command ends, each reported file is shown as reported or as changed since, or
//! sshfs has dropped what it had cached before ([`SSHFS_MEMORY`]). Where times and sizes can't tell
//! which of two states is newer, [`UNCLEAR`] allows many requests, one of which no write has met.

use std::{
    cmp::Ordering,
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

/// Time to request attributes that may be older or newer than the reported ones.
const UNCLEAR: Duration = Duration::from_secs(1);
/// Pause between requests, each of which takes a round trip.
const PAUSE: Duration = Duration::from_millis(5);

/// Reported files, by their paths on this machine.
pub type ReportedFiles = BTreeMap<PathBuf, ReportedFile>;

/// A written file, as its executor reported it.
#[derive(Debug, Clone, Copy)]
pub struct ReportedFile {
    now: Attributes,
    /// Opened with `O_APPEND`: other writers of it make it only larger.
    grows: bool,
}

/// Collects the regular files that executors reported at a stage's end. `written` has those of the
/// stage's words and redirects; others count only in reported directories.
pub fn reported<'a>(
    exits: &[&'a Exited],
    directories: &[&'a ChangedDirectory],
    written: &BTreeSet<Change>,
    grows: impl Fn(&Path) -> bool,
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
        .map(|(path, now)| {
            let grows = grows(&path);
            (path, ReportedFile { now, grows })
        })
        .collect()
}

/// Returns once all files are shown as reported or as changed since, or cached attributes have
/// expired.
pub(super) async fn wait_until_current(table: &Arc<OnMounts>, reported: ReportedFiles) {
    let began = Instant::now();
    let mut left: Vec<(PathBuf, ReportedFile)> =
        reported.into_iter().filter(|(path, _)| is_on_sshfs(table, path)).collect();
    loop {
        let (at, is_patient) = (Arc::clone(table), began.elapsed() < UNCLEAR);
        let is_stale = move |file: &(PathBuf, ReportedFile)| match freshness(&at, &file.0, file.1) {
            Freshness::Stale => Some(file.clone()),
            Freshness::Unclear if is_patient => Some(file.clone()),
            Freshness::Unclear | Freshness::Current => None,
        };
        left = in_parallel(left, is_stale).await;
        if left.is_empty() || began.elapsed() > SSHFS_MEMORY {
            return;
        }
        let anew = left.iter().map(|(path, _)| Change::FileWritten(path.clone())).collect();
        at_once(table, anew, refresh_one).await;
        tokio::time::sleep(PAUSE).await;
    }
}

/// Shown attributes compared with reported ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Freshness {
    Current,
    Stale,
    Unclear,
}

/// A file that is missing was removed since.
fn freshness(table: &OnMounts, path: &Path, reported: ReportedFile) -> Freshness {
    let real = real_place(table, &Change::FileWritten(path.to_owned()));
    let found = real.and_then(|real| {
        let (root, _) = root_around(table, &real)?;
        root.metadata(&real).ok()
    });
    found.map_or(Freshness::Current, |found| {
        let shown = Attributes { mode: found.mode(), size: found.size(), mtime_s: found.mtime() };
        freshness_of(&shown, reported)
    })
}

fn freshness_of(shown: &Attributes, reported: ReportedFile) -> Freshness {
    let ReportedFile { now, grows } = reported;
    let (shown, now) = (in_sftp_range(*shown), in_sftp_range(now));
    let is_larger = shown.size >= now.size;
    match shown.mtime_s.cmp(&now.mtime_s) {
        _ if shown == now => Freshness::Current,
        Ordering::Less => Freshness::Stale,
        Ordering::Equal if grows && is_larger => Freshness::Current,
        Ordering::Greater if is_larger => Freshness::Current,
        Ordering::Equal | Ordering::Greater => Freshness::Unclear,
    }
}

/// Times of SFTP, version 3, are unsigned and have 32 bits (draft-ietf-secsh-filexfer-02, 5).
fn in_sftp_range(attributes: Attributes) -> Attributes {
    Attributes { mtime_s: attributes.mtime_s & i64::from(u32::MAX), ..attributes }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn which_of_two_states_is_staleer() {
        let state = |size, mtime_s| Attributes { mode: 0o100_644, size, mtime_s };
        let rows = [
            (state(0, 5), false, Freshness::Stale),
            (state(12, 8), false, Freshness::Current),
            (state(0, 8), false, Freshness::Unclear),
            (state(24, 8), false, Freshness::Unclear),
            (state(24, 8), true, Freshness::Current),
            (state(0, 8), true, Freshness::Unclear),
            (state(24, 9), false, Freshness::Current),
            (state(5, 9), false, Freshness::Unclear),
            (state(12, 8 + (1 << 32)), false, Freshness::Current),
        ];
        for (shown, grows, expected) in rows {
            let reported = ReportedFile { now: state(12, 8), grows };
            assert_eq!(freshness_of(&shown, reported), expected, "{shown:?}");
        }
    }
}
