//! The last look at the files that a command has written: does their mount show them as they are?
//!
//! sshfs takes up a file's new attributes (with an open, or a listing) only if no program has
//! written through the mount while they were on their way, and else goes on with those that it had,
//! for up to 20 s: several jobs at a time are enough for that. So what is shown is compared with
//! what the executor told at the command's end, and asked for again while it is older.
//!
//! Invariant: when a command ends, each file that its executor told of is shown as told or as
//! changed since, or sshfs has forgotten what it knew before ([`SSHFS_MEMORY`]). Where times and
//! sizes can't tell which of two states is the newer one, [`UNCLEAR`] is long enough for many
//! attempts, one of which no write has met.

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

/// How long a file is asked for that may be old, or newer than told.
const UNCLEAR: Duration = Duration::from_secs(1);
/// Pause between attempts, each of which takes a round trip.
const PAUSE: Duration = Duration::from_millis(5);

/// Files as executors told them, by their paths here.
pub type ToldFiles = BTreeMap<PathBuf, ToldFile>;

/// A written file.
#[derive(Debug, Clone, Copy)]
pub struct ToldFile {
    now: Attributes,
    /// Others that write to it only add to it.
    grows: bool,
}

/// Files that executors told of at a stage's end. `written` are those that the stage's words and
/// redirects name; others count only in directories that changed.
pub fn told<'a>(
    exits: &[&'a Exited],
    directories: &[&'a ChangedDirectory],
    written: &BTreeSet<Change>,
    grows: impl Fn(&Path) -> bool,
) -> ToldFiles {
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
            (path, ToldFile { now, grows })
        })
        .collect()
}

/// Returns when all files are shown as told, as changed since, or by a mount that has forgotten
/// what it knew before.
pub(super) async fn until_shown(table: &Arc<OnMounts>, told: ToldFiles) {
    let began = Instant::now();
    let mut left: Vec<(PathBuf, ToldFile)> =
        told.into_iter().filter(|(path, _)| is_on_sshfs(table, path)).collect();
    loop {
        let (at, is_unclear_old) = (Arc::clone(table), began.elapsed() < UNCLEAR);
        let is_old = move |file: &(PathBuf, ToldFile)| match age(&at, &file.0, file.1) {
            Age::Old => Some(file.clone()),
            Age::Unclear if is_unclear_old => Some(file.clone()),
            Age::Unclear | Age::New => None,
        };
        left = in_parallel(left, is_old).await;
        if left.is_empty() || began.elapsed() > SSHFS_MEMORY {
            return;
        }
        let anew = left.iter().map(|(path, _)| Change::FileWritten(path.clone())).collect();
        at_once(table, anew, refresh_one).await;
        tokio::time::sleep(PAUSE).await;
    }
}

/// Age of what is shown of a file against what was told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Age {
    New,
    Old,
    Unclear,
}

/// A file that is missing was removed since.
fn age(table: &OnMounts, path: &Path, told: ToldFile) -> Age {
    let real = real_place(table, &Change::FileWritten(path.to_owned()));
    let found = real.and_then(|real| {
        let (root, _) = root_around(table, &real)?;
        root.metadata(&real).ok()
    });
    found.map_or(Age::New, |found| {
        let shown = Attributes { mode: found.mode(), size: found.size(), mtime_s: found.mtime() };
        age_of(&shown, told)
    })
}

fn age_of(shown: &Attributes, told: ToldFile) -> Age {
    let ToldFile { now, grows } = told;
    let (shown, now) = (as_sftp_has_it(*shown), as_sftp_has_it(now));
    let is_larger = shown.size >= now.size;
    match shown.mtime_s.cmp(&now.mtime_s) {
        _ if shown == now => Age::New,
        Ordering::Less => Age::Old,
        Ordering::Equal if grows && is_larger => Age::New,
        Ordering::Greater if is_larger => Age::New,
        Ordering::Equal | Ordering::Greater => Age::Unclear,
    }
}

/// Times of SFTP, version 3, are unsigned and have 32 bits (draft-ietf-secsh-filexfer-02, 5).
fn as_sftp_has_it(attributes: Attributes) -> Attributes {
    Attributes { mtime_s: attributes.mtime_s & i64::from(u32::MAX), ..attributes }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn which_of_two_states_is_older() {
        let state = |size, mtime_s| Attributes { mode: 0o100_644, size, mtime_s };
        let rows = [
            (state(0, 5), false, Age::Old),
            (state(12, 8), false, Age::New),
            (state(0, 8), false, Age::Unclear),
            (state(24, 8), false, Age::Unclear),
            (state(24, 8), true, Age::New),
            (state(0, 8), true, Age::Unclear),
            (state(24, 9), false, Age::New),
            (state(5, 9), false, Age::Unclear),
            (state(12, 8 + (1 << 32)), false, Age::New),
        ];
        for (shown, grows, expected) in rows {
            let told = ToldFile { now: state(12, 8), grows };
            assert_eq!(age_of(&shown, told), expected, "{shown:?}");
        }
    }
}
