//! Exports on network mounts of this machine (a proxy near a cloud's storage), which cache. Caches
//! are invalidated before commands read; afterwards the executor waits until other machines can see
//! what the commands wrote. Exports on local disks cost a look at the list of mounts.
//!
//! Invariant: the exports' own paths and the mount table decide which mounts those are. Paths that
//! a run names are text, until they are looked up with its user's rights.

use std::{
    ffi::OsStr,
    io,
    os::unix::ffi::OsStrExt as _,
    path::{Component, Path, PathBuf},
    sync::{Arc, Mutex},
    time::{Duration, SystemTime},
};

use fs_mapper::{
    coherence::Adapter,
    mountinfo::{MountEntry, MountSnapshot},
};
use posh_proto::{
    executor::{MountPoint, Stage, descriptor::Source, rejected::Kind},
    rule::{self, Rule},
};
use posh_volume::leases::overlap;
use tokio::task::{JoinError, spawn_blocking};

use crate::{Export, callers::Caller, error::Refusal, runner::wire::ViewUser, sys::ActingAs};

/// Timeout for invalidating a mount's caches; then the run is refused. The gateway waits not much
/// longer for a run to start.
const RENEW_LIMIT: Duration = Duration::from_secs(5);

/// Paths of one run that are invalidated one by one. Beyond that the whole mount is invalidated:
/// the kernel drops what it does not use.
const MAX_PATHS: usize = 1000;

/// Longest path that the kernel looks up.
const PATH_MAX: usize = 4096;

/// The paths of one run that lie on such mounts.
#[derive(Debug, Clone)]
pub struct OwnMounts {
    used: Vec<Used>,
    user: Option<ViewUser>,
    since: SystemTime,
}

/// One mount of this machine that a run uses.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Used {
    adapter: Adapter,
    /// Mount point, or the export whose adapter is configured.
    top: PathBuf,
    /// Paths that the run names below it.
    paths: Vec<PathBuf>,
}

impl OwnMounts {
    /// Finds these mounts.
    pub async fn of(
        caller: &Caller,
        mounts: &[MountPoint],
        stages: &[Stage],
    ) -> Result<Self, Refusal> {
        let mounts = if rule::holds(Rule::Coherence) { mounts } else { &[] };
        let exports: Vec<Export> = caller
            .exports
            .iter()
            .filter(|e| mounts.iter().any(|m| m.export == e.name))
            .cloned()
            .collect();
        let uid =
            caller.user.as_ref().map_or_else(|| nix::unistd::geteuid().as_raw(), |user| user.uid);
        let look = spawn_blocking(move || {
            Ok(exports.iter().flat_map(|export| tops_of(export, uid)).collect::<Vec<_>>())
        });
        let tops = within_limit(look).await?;
        let named = if tops.is_empty() { Vec::new() } else { named_paths(stages) };
        let used = tops.into_iter().map(|(adapter, export, top)| {
            let paths = paths_on(
                &top,
                named.as_slice(),
                mounts.iter().filter(|mount| mount.export == export.name),
                &export.path,
            );
            Used { adapter, top, paths }
        });
        let user = caller.user.as_ref().map(Into::into);
        // File times have the resolution of a kernel tick.
        Ok(Self {
            used: used.collect(),
            user,
            since: SystemTime::now() - Duration::from_millis(20),
        })
    }

    /// Returns true if the run uses no such mount.
    pub fn is_empty(&self) -> bool {
        self.used.is_empty()
    }

    /// Invalidates caches; call it before anything of the run looks at a file.
    pub async fn renew(&self) -> Result<(), Refusal> {
        if self.is_empty() {
            return Ok(());
        }
        let (used, user) = (self.used.clone(), self.user.clone());
        within_limit(spawn_blocking(move || {
            for Used { adapter, top, paths } in &used {
                adapter.coherence().renew(top, paths)?;
            }
            let _acting = ActingAs::begin(user.as_ref())?;
            for Used { adapter, paths, .. } in &used {
                adapter.coherence().look_again(paths)?;
            }
            Ok(())
        }))
        .await
    }

    /// Waits until other machines can see the run's writes; the error names those that they can't.
    pub async fn publish(self) -> Result<(), Unpublished> {
        let work = spawn_blocking(move || {
            let publish = |used: &Used| used.adapter.coherence().publish(&used.top, self.since);
            self.used.iter().try_for_each(publish)
        });
        work.await?.map_err(Unpublished::Mount)
    }
}

/// Writes of a run did not get beyond this machine.
#[derive(Debug, thiserror::Error)]
pub enum Unpublished {
    /// The export's own mount does not take them.
    #[error(transparent)]
    Mount(io::Error),
    /// The task ended early.
    #[error(transparent)]
    Task(#[from] JoinError),
}

async fn within_limit<T>(work: tokio::task::JoinHandle<io::Result<T>>) -> Result<T, Refusal> {
    let reason = match tokio::time::timeout(RENEW_LIMIT, work).await {
        Ok(Ok(Ok(done))) => return Ok(done),
        Ok(Ok(Err(error))) => error.to_string(),
        _ => "the export's own mount does not answer".to_owned(),
    };
    Err(Refusal::new(Kind::Stale, format!("commands there may see an old state: {reason}")))
}

/// The caching mounts: the one on which the export lies, and those within it that this user's
/// commands can enter, since links may lead there.
fn tops_of(export: &Export, uid: u32) -> Vec<(Adapter, Export, PathBuf)> {
    if let Some(adapter) = export.coherence {
        let is_meant = adapter != Adapter::Bind;
        return is_meant
            .then(|| (adapter, export.clone(), export.path.clone()))
            .into_iter()
            .collect();
    }
    let table = mount_table();
    let around = table.iter().filter(|mount| export.path.starts_with(&mount.mount_point));
    let around = around.max_by_key(|mount| mount.mount_point.components().count());
    let within = below(&table, &export.path).filter(|mount| !is_of_another(mount, uid));
    let all = around.into_iter().chain(within);
    let all =
        all.map(|mount| (Adapter::of(&mount.fs_type), export.clone(), mount.mount_point.clone()));
    all.filter(|(adapter, ..)| *adapter != Adapter::Bind).collect()
}

/// Returns true if two trees of this machine may have files in common: by their paths, or since one
/// file system is mounted in both. Accesses neither.
pub fn have_files_in_common(one: &Path, other: &Path) -> bool {
    overlap(one, other) || {
        let table = mount_table();
        let [ones, others] = [one, other].map(|tree| mounted_in(&table, tree));
        ones.iter().any(|(device, one)| {
            others.iter().any(|(its, other)| device == its && overlap(one, other))
        })
    }
}

/// File systems of a tree, by device, and the directories of these that are in it.
fn mounted_in(table: &[MountEntry], tree: &Path) -> Vec<((u32, u32), PathBuf)> {
    let around = table.iter().filter(|mount| tree.starts_with(&mount.mount_point));
    let around = around.max_by_key(|mount| mount.mount_point.components().count());
    let own = around.and_then(|mount| {
        Some((mount.device, mount.root.join(tree.strip_prefix(&mount.mount_point).ok()?)))
    });
    let within = below(table, tree).map(|mount| (mount.device, mount.root.clone()));
    own.into_iter().chain(within).collect()
}

/// A FUSE mount of another user than root. Without `allow_other` not even root may look into it
/// (mount.fuse3(8)); with it, it shows what that user likes, so that nothing is lost where its
/// caches are left alone, and nobody's runs depend on it.
fn is_of_another(mount: &MountEntry, uid: u32) -> bool {
    let options = || mount.options.split(',');
    let owner = options().find_map(|option| option.strip_prefix("user_id=")?.parse::<u32>().ok());
    let is_fuse =
        mount.fs_type == "fuse" || mount.fs_type.starts_with("fuse.") || mount.fs_type == "fuseblk";
    let is_shared = options().any(|option| option == "allow_other");
    is_fuse && owner.is_some_and(|owner| owner != uid && (owner != 0 || !is_shared))
}

fn below<'a>(table: &'a [MountEntry], directory: &'a Path) -> impl Iterator<Item = &'a MountEntry> {
    table.iter().filter(move |mount| {
        mount.mount_point.starts_with(directory) && mount.mount_point != directory
    })
}

/// The visible mounts: without those that are covered.
type MountTable = Arc<Vec<MountEntry>>;

/// The current mount table; made again only after a change.
fn mount_table() -> MountTable {
    static KNOWN: Mutex<Option<(MountSnapshot, MountTable)>> = Mutex::new(None);
    let mut known = KNOWN.lock().expect("not poisoned");
    if let Some((mounts, table)) = &*known
        && !mounts.has_changed()
    {
        return table.clone();
    }
    *known = None;
    match MountSnapshot::take() {
        Ok((mounts, info)) => {
            let table = Arc::new(info.visible().into_iter().cloned().collect());
            *known = Some((mounts, Arc::clone(&table)));
            table
        }
        Err(error) => {
            tracing::warn!(%error, "cannot read the table of mounts");
            MountTable::default()
        }
    }
}

/// Those of the paths that lie on a mount of this machine; the mount's top, if the text of one path
/// does not tell where it leads, or there are too many.
fn paths_on<'a>(
    top: &Path,
    named: &[PathBuf],
    mounts: impl Iterator<Item = &'a MountPoint>,
    export: &Path,
) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for mount in mounts {
        let point = path_of(&mount.path);
        let start = export.join(path_of(&mount.sub_path));
        for path in named {
            if path.components().any(|part| part == Component::ParentDir) {
                return vec![top.to_owned()];
            }
            let Ok(rest) = path.strip_prefix(point) else { continue };
            // Without the slash that joining nothing leaves behind.
            let path: PathBuf = start.join(rest).components().collect();
            if path.starts_with(top) {
                found.push(path);
            } else {
                // The path, or a link in it, may lead there.
                return vec![top.to_owned()];
            }
            if found.len() > MAX_PATHS {
                return vec![top.to_owned()];
            }
        }
    }
    found.sort_unstable();
    found.dedup();
    if found.is_empty() { vec![top.to_owned()] } else { found }
}

/// The paths that stages are known to use, absolute; no more than matter.
fn named_paths(stages: &[Stage]) -> Vec<PathBuf> {
    let of_stage = |stage: &Stage| {
        let cwd = path_of(&stage.cwd).to_owned();
        let files = stage.descriptors.iter().filter_map(|descriptor| match &descriptor.source {
            Some(Source::File(file)) => Some(&file.path),
            _ => None,
        });
        let paths = stage.paths.iter().map(|used| &used.path);
        let trees = stage.watched_trees.iter().map(|tree| &tree.path);
        let all = std::iter::once(&stage.cwd).chain(paths).chain(files).chain(trees);
        // The kernel does not look up longer ones.
        let all = all.filter(|path| stage.cwd.len() + path.len() < PATH_MAX);
        all.take(MAX_PATHS + 2).map(|path| cwd.join(path_of(path))).collect::<Vec<_>>()
    };
    stages.iter().flat_map(of_stage).take(MAX_PATHS + 2).collect()
}

fn path_of(bytes: &[u8]) -> &Path {
    Path::new(OsStr::from_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use fs_mapper::mountinfo::MountInfo;
    use posh_proto::executor::{Descriptor, File, PathUse};

    fn used(cwd: &'static str, path: &'static str) -> Stage {
        let used = PathUse { path: path.into(), ..PathUse::default() };
        Stage { cwd: cwd.into(), paths: vec![used], ..Stage::default() }
    }

    #[test]
    fn paths_of_a_run_on_a_mount_of_this_machine() {
        let mount = MountPoint {
            path: "/mnt/w".into(),
            export: "w".into(),
            sub_path: "sub".into(),
            ..MountPoint::default()
        };
        let check = |top: &str, (cwd, path): (&'static str, &'static str), expect: &[&str]| {
            let expect: Vec<PathBuf> = expect.iter().map(PathBuf::from).collect();
            let named = named_paths(&[used(cwd, path)]);
            let found =
                paths_on(Path::new(top), &named, std::iter::once(&mount), Path::new("/srv/w"));
            assert_eq!(found, expect, "{top} {cwd} {path}");
        };
        check("/srv", ("/home/u", "/mnt/w/d/f"), &["/srv/w/sub/d/f"]);
        check("/srv", ("/mnt/w/d", "f"), &["/srv/w/sub/d", "/srv/w/sub/d/f"]);
        check("/srv", ("/mnt/w", "."), &["/srv/w/sub"]);
        check("/srv/w", ("/home/u", "../../mnt/w/f"), &["/srv/w"]);
        // Only the whole mount is sure to contain the path.
        check("/srv/w/sub/inner", ("/mnt/w", "inner/f"), &["/srv/w/sub/inner"]);
        check("/srv/w", ("/home/u", "/mnt/other/f"), &["/srv/w"]);
    }

    #[test]
    fn redirects_count() {
        let mount =
            MountPoint { path: "/mnt/w".into(), export: "w".into(), ..MountPoint::default() };
        let file = File { path: "/mnt/w/out".into(), ..File::default() };
        let descriptor = Descriptor { fd: 1, source: Some(Source::File(file)) };
        let named = named_paths(&[Stage {
            cwd: "/".into(),
            descriptors: vec![descriptor],
            ..Stage::default()
        }]);
        let found =
            paths_on(Path::new("/srv/w"), &named, std::iter::once(&mount), Path::new("/srv/w"));
        assert_eq!(found, [PathBuf::from("/srv/w/out")]);
    }

    #[test]
    fn of_many_paths_and_long_ones_little_is_looked_at() {
        let paths = vec![PathUse { path: "f".into(), ..PathUse::default() }; 130_000];
        let stage = |depth| Stage {
            cwd: format!("/{}", "d/".repeat(depth)).into(),
            paths: paths.clone(),
            ..Stage::default()
        };
        assert_eq!(named_paths(&vec![stage(2000); 3]).len(), MAX_PATHS + 2);
        assert_eq!(named_paths(&[stage(30_000)]).len(), 0);
    }

    #[test]
    fn one_directory_may_be_in_several_trees() {
        let mounts = "\
21 1 8:1 / / rw - ext4 /dev/sda1 rw
22 21 8:2 / /srv/disk rw - ext4 /dev/sdb1 rw
23 21 8:2 /data/logs /exports/logs rw - ext4 /dev/sdb1 rw
24 22 8:1 /home /srv/disk/home rw - ext4 /dev/sda1 rw
";
        let info = MountInfo::parse(mounts.as_bytes()).unwrap();
        let table: Vec<MountEntry> = info.visible().into_iter().cloned().collect();
        let common = |one: &str, other: &str| {
            let [one, other] = [one, other].map(|tree| mounted_in(&table, Path::new(tree)));
            one.iter().any(|(device, tree)| {
                other.iter().any(|(its, other)| device == its && overlap(tree, other))
            })
        };
        assert!(common("/exports/logs", "/srv/disk/data"));
        assert!(common("/srv/disk/data/logs/2026", "/exports/logs"));
        assert!(common("/home/u", "/srv/disk"));
        assert!(!common("/home/u", "/srv/disk/data") && !common("/exports/logs", "/srv/disk/d"));
        assert!(!common("/srv/other", "/srv/disk/data"));
    }

    #[test]
    fn a_local_directory_needs_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().canonicalize().unwrap();
        let export = Export::named("w".to_owned(), path, false);
        assert_eq!(tops_of(&export, 0), []);
        let configured = Export { coherence: Some(Adapter::Nfs), ..export };
        assert_eq!(tops_of(&configured, 0).len(), 1);
    }

    #[test]
    fn what_another_user_has_mounted_is_nothing_of_a_run() {
        let line = |fs_type: &str, options: &str| {
            let line = format!("50 20 0:44 / /srv/w/x rw - {fs_type} x rw,{options}\n");
            MountInfo::parse(line.as_bytes()).unwrap().visible()[0].clone()
        };
        let own = |fs_type, options| is_of_another(&line(fs_type, options), 1000);
        assert!(
            own("fuse.sshfs", "user_id=1001,group_id=1001") && own("fuse", "user_id=0,group_id=0")
        );
        assert!(!own("fuse.sshfs", "user_id=1000,group_id=1000"));
        // A user can name what is mounted as it likes, and need not answer.
        assert!(own("fuse.rclone", "user_id=1001,group_id=1001,allow_other"));
        assert!(!own("fuse.rclone", "user_id=0,group_id=0,allow_other"));
        assert!(!own("ext4", "user_id=1001") && !own("fuse.sshfs", "group_id=1"));
    }
}
