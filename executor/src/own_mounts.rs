//! Exports that this machine itself mounts from elsewhere (a proxy near a cloud's
//! storage): it remembers things too. What it remembers is dropped before
//! commands read there, and what they wrote is waited for afterwards, until
//! others can see it. Exports on local disks cost one stat(2).

use std::{
    ffi::OsStr,
    fs,
    os::unix::{ffi::OsStrExt as _, fs::MetadataExt as _},
    path::{Component, Path, PathBuf},
    time::{Duration, SystemTime},
};

use fs_mapper::{coherence::Adapter, mountinfo::MountInfo};
use nix::sys::statfs::{BTRFS_SUPER_MAGIC, FsType, OVERLAYFS_SUPER_MAGIC, TMPFS_MAGIC, statfs};
use posh_proto::{
    executor::{MountPoint, Stage, descriptor::Source, rejected::Kind},
    rule::{self, Rule},
};
use tokio::task::spawn_blocking;

use crate::{Export, error::Refusal};

/// A mount that does not forget in this time is not used: the gateway waits not much longer for a run to start.
const RENEW_LIMIT: Duration = Duration::from_secs(5);

/// File systems of this machine that are on no disk, or on several.
const OWN_FILE_SYSTEMS: [FsType; 3] = [TMPFS_MAGIC, BTRFS_SUPER_MAGIC, OVERLAYFS_SUPER_MAGIC];

/// The paths of one run that lie on such exports, by export.
#[derive(Debug, Clone)]
pub struct OwnMounts {
    used: Vec<(Adapter, Vec<PathBuf>)>,
    since: SystemTime,
}

impl OwnMounts {
    /// Finds out which there are.
    pub async fn of(exports: &[Export], mounts: &[MountPoint], stages: &[Stage]) -> Result<Self, Refusal> {
        let mut candidates = Vec::new();
        let mounts = if rule::holds(Rule::Coherence) { mounts } else { &[] };
        for mount in mounts {
            let Some(export) = exports.iter().find(|export| export.name == mount.export) else { continue };
            let paths = paths_below(mount, &export.path, stages);
            if !paths.is_empty() {
                candidates.push((export.coherence, paths));
            }
        }
        let look = spawn_blocking(move || {
            let adapter = |(configured, paths): (Option<Adapter>, Vec<PathBuf>)| {
                let adapter = configured.map_or_else(|| adapter_of(&paths[0]), Ok)?;
                Ok((adapter, paths))
            };
            candidates.into_iter().map(adapter).collect::<Result<Vec<_>, String>>()
        });
        let used = within_limit(look).await?;
        let used = used.into_iter().filter(|(adapter, _)| *adapter != Adapter::Bind).collect();
        // Times of files are those of the kernel's last tick.
        Ok(Self { used, since: SystemTime::now() - Duration::from_millis(20) })
    }

    /// No such export is used.
    pub fn is_empty(&self) -> bool {
        self.used.is_empty()
    }

    /// Drops what is remembered; to be done before anything of the run looks at a file.
    pub async fn renew(&self) -> Result<(), Refusal> {
        if self.is_empty() {
            return Ok(());
        }
        let used = self.used.clone();
        within_limit(spawn_blocking(move || {
            let renew = |(adapter, paths): &(Adapter, Vec<PathBuf>)| adapter.coherence().renew(paths);
            used.iter().try_for_each(renew).map_err(|error| error.to_string())
        }))
        .await
    }

    /// Waits until what was written is where others see it; the error says what is not.
    pub async fn publish(self) -> Result<(), String> {
        let work = spawn_blocking(move || {
            let publish =
                |(adapter, paths): &(Adapter, Vec<PathBuf>)| adapter.coherence().publish(&paths[0], self.since);
            self.used.iter().try_for_each(publish).map_err(|error| error.to_string())
        });
        work.await.unwrap_or_else(|error| Err(error.to_string()))
    }
}

async fn within_limit<T>(work: tokio::task::JoinHandle<Result<T, String>>) -> Result<T, Refusal> {
    let reason = match tokio::time::timeout(RENEW_LIMIT, work).await {
        Ok(Ok(Ok(done))) => return Ok(done),
        Ok(Ok(Err(reason))) => reason,
        _ => "the export's own mount does not answer".to_owned(),
    };
    Err(Refusal::new(Kind::Stale, format!("commands there may see an old state: {reason}")))
}

/// Where the stages' paths are on this machine, as far as they lie in one mount;
/// its top, if one of them can't be told from its text.
fn paths_below(mount: &MountPoint, export: &Path, stages: &[Stage]) -> Vec<PathBuf> {
    let point = path_of(&mount.path);
    let top = export.join(path_of(&mount.sub_path));
    let mut found = Vec::new();
    for path in stages.iter().flat_map(named_paths) {
        if path.components().any(|part| part == Component::ParentDir) {
            return vec![top];
        }
        if let Ok(rest) = path.strip_prefix(point) {
            // Without the slash that joining nothing leaves behind.
            found.push(top.join(rest).components().collect());
        }
    }
    found.sort_unstable();
    found.dedup();
    found
}

/// The paths that a stage is known to use, absolute.
fn named_paths(stage: &Stage) -> Vec<PathBuf> {
    let cwd = path_of(&stage.cwd);
    let files = stage.descriptors.iter().filter_map(|descriptor| match &descriptor.source {
        Some(Source::File(file)) => Some(path_of(&file.path)),
        _ => None,
    });
    let paths = stage.paths.iter().map(|used| path_of(&used.path));
    let trees = stage.watched_trees.iter().map(|tree| path_of(&tree.path));
    std::iter::once(cwd).chain(paths).chain(files).chain(trees).map(|path| cwd.join(path)).collect()
}

fn path_of(bytes: &[u8]) -> &Path {
    Path::new(OsStr::from_bytes(bytes))
}

/// By the file system that the nearest existing directory lies on.
fn adapter_of(path: &Path) -> Result<Adapter, String> {
    let there = path.ancestors().find_map(|above| fs::canonicalize(above).ok());
    let there = there.ok_or_else(|| format!("{} cannot be found", path.display()))?;
    // Disks have a major number; network, FUSE and memory file systems have none.
    if fs::metadata(&there).is_ok_and(|found| nix::sys::stat::major(found.dev()) != 0) {
        return Ok(Adapter::Bind);
    }
    // Those that have none and are no mount of somebody else's: the table of mounts, which takes long to read, need not be asked.
    if statfs(&there).is_ok_and(|found| OWN_FILE_SYSTEMS.contains(&found.filesystem_type())) {
        return Ok(Adapter::Bind);
    }
    let info = MountInfo::read().map_err(|error| error.to_string())?;
    let around = info.visible().into_iter().filter(|mount| there.starts_with(&mount.mount_point));
    let mount = around.max_by_key(|mount| mount.mount_point.components().count());
    Ok(mount.map_or(Adapter::Bind, |mount| Adapter::of(&mount.fs_type)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use posh_proto::executor::{Descriptor, File, PathUse};

    #[test]
    fn paths_of_a_run_on_an_export() {
        let mount = MountPoint { path: "/mnt/w".into(), export: "w".into(), sub_path: "sub".into() };
        let check = |cwd: &'static str, path: &'static str, expect: &[&str]| {
            let used = PathUse { path: path.into(), ..PathUse::default() };
            let stage = Stage { cwd: cwd.into(), paths: vec![used], ..Stage::default() };
            let expect: Vec<PathBuf> = expect.iter().map(PathBuf::from).collect();
            assert_eq!(paths_below(&mount, Path::new("/srv/w"), &[stage]), expect, "{cwd} {path}");
        };
        check("/home/u", "/mnt/w/d/f", &["/srv/w/sub/d/f"]);
        check("/mnt/w/d", "f", &["/srv/w/sub/d", "/srv/w/sub/d/f"]);
        check("/mnt/w", ".", &["/srv/w/sub"]);
        check("/home/u", "../../mnt/w/f", &["/srv/w/sub"]);
        check("/home/u", "/mnt/other/f", &[]);
    }

    #[test]
    fn redirects_count() {
        let mount = MountPoint { path: "/mnt/w".into(), export: "w".into(), ..MountPoint::default() };
        let file = File { path: "/mnt/w/out".into(), ..File::default() };
        let descriptor = Descriptor { fd: 1, source: Some(Source::File(file)) };
        let stage = Stage { cwd: "/".into(), descriptors: vec![descriptor], ..Stage::default() };
        assert_eq!(paths_below(&mount, Path::new("/srv/w"), &[stage]), [PathBuf::from("/srv/w/out")]);
    }

    #[test]
    fn a_local_directory_needs_nothing() {
        let directory = tempfile::tempdir().unwrap();
        assert_eq!(adapter_of(&directory.path().join("not/there")), Ok(Adapter::Bind));
    }
}
