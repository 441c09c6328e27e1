//! Lists directories on slow mounts before a shell does (design: think in round trips): the
//! kernel and the mount's daemon then have the names at hand when the shell asks, which
//! would list one directory after the other. What is listed is what the shell would see: nothing
//! of it has run, or nothing that could have changed it (`before`). While a look is under way its mount is told to
//! forget nothing, and no look leaves its mount. A volume of our own is told what changes: it is asked itself, and for all that the text names.

mod before;
mod listed;

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::{OsStr, OsString},
    io,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
    sync::Arc,
};

use bytes::Bytes;
use fs_mapper::{Mount, MountTable, Resolution, coherence::Adapter};
use nix::{
    dir::Dir,
    fcntl::{OFlag, OpenHow, ResolveFlag, open, openat2},
    sys::stat::Mode,
};
use posh_proto::gateway as wire;
use tokio::{sync::watch, task::JoinHandle};

use crate::{state::View, volumes::Volumes};
pub use before::Before;
pub use listed::{Found, Listed};

/// Looks at one mount at once, of all sessions: one that hangs must not take all threads.
const AT_ONCE: usize = 64;

/// What has been begun for a text.
#[derive(Debug, Default)]
pub struct Looked {
    /// Ends when volumes have fetched what the text's commands read.
    pub fetched: Option<JoinHandle<()>>,
    /// What the looks find.
    pub listed: Listed,
    /// Directories of that, for who is sooner.
    pub wanted: Vec<(PathBuf, Found)>,
    /// Looks that are to begin when the first command has come.
    pub later: Vec<Look>,
}

/// A directory that is to be listed.
#[derive(Debug)]
pub struct Look {
    /// Of its mount.
    top: PathBuf,
    directory: PathBuf,
    found: Found,
}

/// The looks that are under way.
#[derive(Debug, Default)]
pub struct LookAhead {
    /// How many, by the mount's place.
    under_way: watch::Sender<BTreeMap<PathBuf, usize>>,
}

impl LookAhead {
    /// Begins to list what a shell is about to list. Returns at once; what fails, the shell will find out.
    pub fn begin(
        self: &Arc<Self>,
        View { table, library }: &View,
        volumes: &Volumes,
        ahead: &wire::LookAhead,
        path: &Path,
    ) -> Looked {
        volumes.look_ahead(table, &paths(&ahead.named), &paths(&ahead.listed));
        let fetched = volumes.foresee(table, library, &ahead.foreseen);
        let first = ahead.commands.first().filter(|_| !ahead.second.is_empty());
        let before = first.and_then(|first| Before::read(table, library, first, &ahead.environment, path));
        let mut second = paths(&ahead.second);
        second.retain(|directory| before.as_ref().is_some_and(|before| before.keeps(table, directory)));
        let (mut listed, mut wanted, mut later) = (Listed::default(), Vec::new(), Vec::new());
        let first: BTreeSet<PathBuf> = paths(&ahead.first).into_iter().collect();
        // While a look is under way through an sshfs mount, a shell waits twice as long for its redirect: it comes first.
        let opens = |mount: &Mount| before.as_ref().is_some_and(|before| before.writes_to(table, mount));
        for directory in first.iter().cloned().chain(second).collect::<BTreeSet<_>>() {
            if let Some((mount, place)) = on_slow_mount(table, &directory) {
                let is_first = first.contains(&directory);
                let found = listed.expect(directory);
                wanted.push((place.clone(), found.clone()));
                let look = Look { top: mount.path.as_path().to_owned(), directory: place, found };
                match !is_first && opens(mount) {
                    true => later.push(look),
                    false => self.look(look),
                }
            }
        }
        Looked { fetched, listed, wanted, later }
    }

    /// Begins one.
    pub fn look(self: &Arc<Self>, Look { top, directory, found }: Look) {
        if !self.under_way.send_if_modified(|looks| add(looks, &top)) {
            tracing::debug!(directory = %directory.display(), "too much to look ahead at");
            return;
        }
        let all = Arc::clone(self);
        tokio::task::spawn_blocking(move || {
            let names = list(&top, &directory);
            let count = names.as_ref().map(Vec::len);
            tracing::debug!(directory = %directory.display(), ?count, "looked ahead");
            names.into_iter().for_each(|names| found.tell(names));
            all.under_way.send_modify(|looks| remove(looks, &top));
        });
    }

    /// Waits until none is under way on the mounts of these paths: whoever makes a mount forget what changed must come after
    /// those who read it before.
    pub async fn settled<'a>(&self, table: &MountTable, changed: impl Iterator<Item = &'a Path>) {
        let top = |path: &Path| match table.resolve(path, Path::new("/")) {
            Resolution::Owned(owned) => Some(table.mount(owned.mount).path.as_path().to_owned()),
            Resolution::Local { .. } => None,
        };
        let tops: BTreeSet<PathBuf> = changed.filter_map(top).collect();
        let is_settled = |looks: &BTreeMap<PathBuf, usize>| !tops.iter().any(|top| looks.contains_key(top));
        let _ = self.under_way.subscribe().wait_for(is_settled).await;
    }
}

fn paths(texts: &[Bytes]) -> Vec<PathBuf> {
    texts.iter().map(path).collect()
}

fn path(text: &Bytes) -> PathBuf {
    OsStr::from_bytes(text).into()
}

fn add(looks: &mut BTreeMap<PathBuf, usize>, top: &Path) -> bool {
    let count = looks.entry(top.to_owned()).or_default();
    *count += usize::from(*count < AT_ONCE);
    *count < AT_ONCE
}

fn remove(looks: &mut BTreeMap<PathBuf, usize>, top: &Path) {
    if let Some(count) = looks.get_mut(top) {
        *count -= 1;
        if *count == 0 {
            looks.remove(top);
        }
    }
}

/// Lists a directory, unless a symbolic link leads out of the mount: of that one nobody waits for this look.
fn list(top: &Path, directory: &Path) -> io::Result<Vec<OsString>> {
    let below = directory.strip_prefix(top).map_err(io::Error::other)?;
    let below = if below.as_os_str().is_empty() { Path::new(".") } else { below };
    let top = open(top, OFlag::O_PATH | OFlag::O_CLOEXEC, Mode::empty())?;
    let how = OpenHow::new()
        .flags(OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC)
        .resolve(ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_XDEV);
    let opened = openat2(&top, below, how)?;
    let entries = Dir::from_fd(opened)?;
    entries.into_iter().map(|entry| Ok(OsStr::from_bytes(entry?.file_name().to_bytes()).to_owned())).collect()
}

/// The mount that a directory is on, and the directory as that has it. Listing it costs round trips through the kernel: a bind mount is as
/// fast as a disk, and a volume is asked itself.
fn on_slow_mount<'t>(table: &'t MountTable, directory: &Path) -> Option<(&'t Mount, PathBuf)> {
    let Resolution::Owned(owned) = table.resolve(directory, Path::new("/")) else { return None };
    let mount = table.mount(owned.mount);
    (mount.mounted() && !matches!(mount.adapter(), Adapter::Bind | Adapter::Volume))
        .then(|| (mount, owned.client_path.as_path().to_owned()))
}
