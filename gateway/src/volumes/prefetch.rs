//! Informed prefetch: a local command's words tell its input before it opens anything. Its volumes
//! fetch that input in the background. The command does not wait for it, and its end stops it.
//!
//! Invariant: nothing is fetched for a process without the gateway's own rights, and a process has
//! at most one prefetch, with one descriptor, for a limited time ([`Prefetches`]).

use std::{
    collections::BTreeMap,
    ffi::OsStr,
    path::{Path, PathBuf},
    sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use fs_mapper::{LastLink, MountTable, Resolution, Resolver, coherence::Adapter};
use nix::unistd::{getegid, geteuid, getgroups};
use posh_annotations::{CurrentDir, FileKind, FileUse, Invocation, StdinUse};
use posh_volume::{fs::Expected, store::Caller};
use tokio::{io::Interest, runtime::Handle, sync::oneshot, time::timeout};

use super::Volumes;
use crate::{
    enlisted::{DescriptorKind, Enlisted, Pid},
    facts::World,
    session::watch,
};

/// Commands that look at files without reading them: contents are fetched only on an open.
pub(super) const LOOKING: [&str; 4] = ["du", "find", "ls", "stat"];

/// Limit on processes with a prefetch.
const MOST: usize = 256;
/// Limit on the duration of a prefetch: what a command has not read by then comes as it reads.
const LONGEST: Duration = Duration::from_secs(600);

/// Input of a command, by mount point of the volume.
type Inputs = BTreeMap<PathBuf, Vec<Expected>>;

impl Volumes {
    /// Returns true if there are mounted volumes.
    #[must_use]
    pub fn are_there(&self) -> bool {
        *self.mounted.borrow() > 0
    }

    /// Announces a command's input to the volumes, as far as its words tell. Returns text for
    /// `explain` if there is any.
    #[must_use]
    pub fn prefetch(&self, world: &World<'_>, stage: &Enlisted) -> Option<String> {
        if !self.are_there()
            || !stage.has_own_rights
            || stage.mount_namespace != world.mount_namespace
            || !stage.cwd.is_absolute()
        {
            return None;
        }
        let inputs = inputs(world, stage);
        let runtime = self.handle().ok()?;
        let mut told = Vec::new();
        let mut all = Vec::new();
        for (path, expected) in inputs {
            let serving = self
                .known()
                .iter()
                .find(|known| known.config.path == path)
                .and_then(|known| known.serving());
            let Some(serving) = serving else { continue };
            if serving.volume.has(&own_caller(), &expected) {
                continue;
            }
            told.push(path.display().to_string());
            all.push((serving, expected));
        }
        let announce = move || -> Vec<_> {
            let announced = all
                .into_iter()
                .map(|(serving, expected)| serving.volume.will_read(&own_caller(), expected));
            announced.collect()
        };
        (!told.is_empty() && self.prefetches.begin(&runtime, stage.pid, announce))
            .then(|| format!("what it reads on {} is fetched ahead", told.join(" and ")))
    }
}

/// Prefetches at work, by process.
#[derive(Debug, Clone, Default)]
pub(super) struct Prefetches(Arc<Mutex<RunningPrefetches>>);

#[derive(Debug, Default)]
struct RunningPrefetches {
    /// Number of prefetches so far; no number is reused.
    next: u64,
    by_process: BTreeMap<Pid, Prefetch>,
}

#[derive(Debug)]
struct Prefetch {
    number: u64,
    /// Dropping it ends the prefetch.
    _end: oneshot::Sender<()>,
}

/// A prefetch in its task, which is at work no more once this is dropped.
struct Counted {
    number: u64,
    process: Pid,
    all: Prefetches,
}

impl Prefetches {
    /// Announces input until the process ends, in place of what was announced for it before.
    /// Returns false if there are too many.
    fn begin<T: Send + 'static>(
        &self,
        runtime: &Handle,
        process: Pid,
        announce: impl FnOnce() -> T + Send + 'static,
    ) -> bool {
        let Some((counted, mut replaced)) = self.count(process) else { return false };
        runtime.spawn(async move {
            let _counted = counted;
            // A process that can't be watched has already ended.
            let Ok(watched) = watch(process) else { return };
            let _announced = announce();
            let ended = async {
                tokio::select! {
                    _ = watched.ready(Interest::READABLE) => {}
                    _ = &mut replaced => {}
                }
            };
            let _ = timeout(LONGEST, ended).await;
        });
        true
    }

    fn count(&self, process: Pid) -> Option<(Counted, oneshot::Receiver<()>)> {
        let mut work = self.lock();
        if work.by_process.len() >= MOST && !work.by_process.contains_key(&process) {
            return None;
        }
        let number = work.next;
        work.next += 1;
        let (end, ended) = oneshot::channel();
        work.by_process.insert(process, Prefetch { number, _end: end });
        Some((Counted { number, process, all: self.clone() }, ended))
    }

    fn lock(&self) -> MutexGuard<'_, RunningPrefetches> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        let mut work = self.all.lock();
        if work.by_process.get(&self.process).is_some_and(|now| now.number == self.number) {
            work.by_process.remove(&self.process);
        }
    }
}

/// Credentials of commands: other users' commands don't use this gateway. Cached, as libc's
/// getgroups(2) reads a file of /proc each time.
pub(super) fn own_caller() -> Caller {
    static OWN: LazyLock<Caller> = LazyLock::new(|| {
        let groups =
            getgroups().unwrap_or_default().into_iter().map(|group| group.as_raw()).collect();
        Caller { uid: geteuid().as_raw(), gid: getegid().as_raw(), groups, is_guest: false }
    });
    OWN.clone()
}

fn inputs(world: &World<'_>, stage: &Enlisted) -> Inputs {
    let mut inputs = Inputs::new();
    let lookup = |name: &str| stage.variable(name).map(OsStr::to_owned);
    let Ok(invocation) = world.library.classify(&stage.name, &stage.argv, &lookup) else {
        return inputs;
    };
    let mut resolver = Resolver::new(world.table, &stage.cwd);
    let mut note = |path: &Path, last, expected: fn(PathBuf) -> Expected| {
        if let Some((mount, below)) = on_volume(world.table, &mut resolver, path, last) {
            inputs.entry(mount).or_default().push(expected(below));
        }
    };
    for file in &invocation.files {
        if let Some(expected) = use_of(&invocation, file) {
            let last = if file.no_follow { LastLink::Keep } else { LastLink::Follow };
            note(Path::new(&file.path), last, expected);
        }
    }
    if invocation.current_dir == CurrentDir::Reads {
        note(&stage.cwd, LastLink::Follow, Expected::Tree);
    }
    let input = stage
        .descriptor(0)
        .filter(|input| input.kind == DescriptorKind::File && invocation.stdin != StdinUse::Unused);
    if let Some(input) = input {
        note(&input.path, LastLink::Keep, Expected::File);
    }
    inputs
}

fn use_of(invocation: &Invocation, file: &FileUse) -> Option<fn(PathBuf) -> Expected> {
    match file.kind {
        FileKind::InputFile | FileKind::InoutFile
            if LOOKING.contains(&invocation.command.as_str()) =>
        {
            Some(Expected::Tree)
        }
        FileKind::InputFile | FileKind::InoutFile => Some(Expected::File),
        FileKind::InputDir => Some(Expected::Tree),
        FileKind::OutputFile | FileKind::OutputDir | FileKind::NewDir | FileKind::ListFile => None,
    }
}

/// Mount point of a path's volume, and the path below it. `None` if only the server can resolve the
/// path.
pub(super) fn on_volume(
    table: &MountTable,
    resolver: &mut Resolver<'_>,
    path: &Path,
    last: LastLink,
) -> Option<(PathBuf, PathBuf)> {
    let Resolution::Owned(owned) = resolver.resolve_with(path, last) else { return None };
    let mount = table.mount(owned.mount);
    if mount.adapter() != Adapter::Volume || owned.uncertain {
        return None;
    }
    let below = owned.client_path.as_path().strip_prefix(mount.path.as_path()).ok()?;
    Some((mount.path.as_path().to_owned(), below.to_owned()))
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command};

    use super::*;

    /// Waits until so many prefetches hold `mark`, beside this test.
    async fn until_held(mark: &Arc<()>, count: usize) {
        let held = async {
            while Arc::strong_count(mark) != count + 1 {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        timeout(Duration::from_secs(30), held).await.expect("soon");
    }

    fn sleeper() -> Child {
        Command::new("sleep").arg("1000").spawn().unwrap()
    }

    fn end(mut child: Child) {
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[tokio::test]
    async fn a_process_has_one_prefetch_until_it_ends() {
        let (all, runtime, mark) = (Prefetches::default(), Handle::current(), Arc::new(()));
        let begin = |process| {
            let mark = Arc::clone(&mark);
            all.begin(&runtime, process, move || mark)
        };
        let (first, second) = (sleeper(), sleeper());
        for _ in 0..2 * MOST {
            assert!(begin(first.id()));
        }
        assert!(begin(second.id()));
        until_held(&mark, 2).await;
        end(first);
        until_held(&mark, 1).await;
        end(second);
        until_held(&mark, 0).await;
        assert!(all.lock().by_process.is_empty());
        // Nobody watches them on this thread before the loop is over.
        assert!((1..).zip(0..MOST).all(|(process, _)| begin(process)));
        assert!(!begin(u32::MAX >> 1), "there are enough");
    }
}
