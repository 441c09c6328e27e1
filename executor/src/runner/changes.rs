//! What a command has changed in trees that the workstation's mount remembers:
//! only this side can tell without asking for each file over the network.
//!
//! Directories are reported in which something is newer than the stage's start.
//! One that is itself newer was never seen by the workstation, and neither was
//! what is in it.

use std::{
    ffi::OsStr,
    fs,
    os::unix::{ffi::OsStrExt as _, fs::MetadataExt as _},
    path::{Path, PathBuf},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use posh_proto::executor::{Stage, WatchedTree};

use super::view::View;

/// Times of files are those of the kernel's last tick, which may lie a little before the clock.
const TICK: Duration = Duration::from_millis(20);
/// Entries that are looked at: a tree beyond this is not worth the time of every command in it.
const MAX_ENTRIES: usize = 500_000;
/// Directories that are reported; the workstation forgets each by a call of its own.
const MAX_REPORTED: usize = 4096;

/// The trees of one stage, and the moment before which nothing in them was its work.
pub struct Watch {
    since: Duration,
    trees: Vec<PathBuf>,
}

/// Directories with something new, and whether these are all.
#[derive(Debug, Default, PartialEq)]
pub struct Changes {
    pub directories: Vec<PathBuf>,
    pub incomplete: bool,
}

impl Watch {
    /// To be made before the stage starts.
    pub fn new(view: &View, stage: &Stage) -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let trees = stage.watched_trees.iter().map(|tree| root_of(view, tree));
        Self { since: now.saturating_sub(TICK), trees: trees.collect() }
    }

    /// Walks the trees; costs nothing when there are none.
    pub fn changes(&self) -> Changes {
        let mut changes = Changes::default();
        let mut left = MAX_ENTRIES;
        for tree in &self.trees {
            self.walk(tree.clone(), &mut changes, &mut left);
        }
        changes
    }

    fn walk(&self, tree: PathBuf, changes: &mut Changes, left: &mut usize) {
        let mut queue = vec![tree];
        while let Some(directory) = queue.pop() {
            let Ok(own) = fs::symlink_metadata(&directory) else { continue };
            let mut changed = self.is_newer(&own);
            let Ok(entries) = fs::read_dir(&directory) else { continue };
            for entry in entries.flatten() {
                let Some(fewer) = left.checked_sub(1) else {
                    changes.incomplete = true;
                    return;
                };
                *left = fewer;
                let Ok(found) = entry.metadata() else { continue };
                // A directory below is reported for itself.
                changed |= !found.is_dir() && self.is_newer(&found);
                if found.is_dir() && found.dev() == own.dev() && !self.was_made_since(&found) {
                    queue.push(entry.path());
                }
            }
            if changed && changes.directories.len() == MAX_REPORTED {
                changes.incomplete = true;
                return;
            }
            if changed {
                changes.directories.push(directory);
            }
        }
    }

    fn is_newer(&self, found: &fs::Metadata) -> bool {
        let seconds = u64::try_from(found.ctime()).unwrap_or(0);
        Duration::new(seconds, u32::try_from(found.ctime_nsec()).unwrap_or(0)) >= self.since
    }

    /// Where the file system does not say, it was not.
    fn was_made_since(&self, found: &fs::Metadata) -> bool {
        let made = found.created().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
        made.is_some_and(|made| made >= self.since)
    }
}

/// The tree itself, or the nearest directory above it, within its mount, that has one of the names.
fn root_of(view: &View, tree: &WatchedTree) -> PathBuf {
    let path = Path::new(OsStr::from_bytes(&tree.path));
    let top = view.mount_of(path);
    let inside = path.ancestors().take_while(|above| top.is_some_and(|top| above.starts_with(top)));
    let named = |above: &&Path| tree.up_to.iter().any(|name| above.join(name).symlink_metadata().is_ok());
    inside.into_iter().find(named).unwrap_or(path).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_with_something_new_are_reported() {
        let tree = tempfile::tempdir().expect("a directory");
        let root = tree.path();
        for old in ["quiet", "written", "grown/deep"] {
            fs::create_dir_all(root.join(old)).expect("a directory");
        }
        fs::write(root.join("quiet/f"), "old").expect("a file");
        fs::write(root.join("written/f"), "old").expect("a file");
        // The clock of files moves in ticks: what comes now must be told from what was.
        let before = fs::symlink_metadata(root.join("written/f")).expect("it is there");
        let probe = root.join("quiet/probe");
        let since = loop {
            fs::write(&probe, "x").expect("a file");
            let found = fs::symlink_metadata(&probe).expect("it is there");
            let changed = Duration::new(found.ctime().unsigned_abs(), u32::try_from(found.ctime_nsec()).unwrap_or(0));
            if (found.ctime(), found.ctime_nsec()) > (before.ctime(), before.ctime_nsec()) {
                break changed;
            }
        };
        let watch = Watch { since, trees: vec![root.to_owned()] };
        fs::remove_file(&probe).expect("removed");
        fs::write(root.join("written/f"), "new").expect("a file");
        fs::create_dir(root.join("grown/deep/new")).expect("a directory");
        fs::write(root.join("grown/deep/new/f"), "new").expect("a file");
        let mut found: Vec<_> = watch.changes().directories;
        found.sort();
        // `quiet` has lost the probe; `new` was never seen.
        assert_eq!(found, [root.join("grown/deep"), root.join("quiet"), root.join("written")]);
    }
}
