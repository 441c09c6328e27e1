//! Informed prefetch: a local command's words tell its input before it opens anything. Its volumes
//! fetch that input in the background. The command does not wait for it, and its end stops it.

use std::{
    collections::BTreeMap,
    ffi::OsStr,
    path::{Path, PathBuf},
    sync::LazyLock,
};

use fs_mapper::{LastLink, MountTable, Resolution, Resolver, coherence::Adapter};
use nix::unistd::{getegid, geteuid, getgroups};
use posh_annotations::{CurrentDir, FileKind, FileUse, Invocation, StdinUse};
use posh_volume::{fs::Expected, store::Caller};
use tokio::io::Interest;

use super::Volumes;
use crate::{
    enlisted::{Enlisted, Kind},
    facts::World,
    session::watch,
};

/// Commands that look at files without reading them: contents are fetched only on an open.
pub(super) const LOOKING: [&str; 4] = ["du", "find", "ls", "stat"];

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
            || stage.mount_namespace != world.mount_namespace
            || !stage.cwd.is_absolute()
        {
            return None;
        }
        let inputs = inputs(world, stage);
        let runtime = self.handle().ok()?;
        let mut told = Vec::new();
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
            let (caller, pid) = (own_caller(), stage.pid);
            runtime.spawn(async move {
                // A process that can't be watched has already ended.
                let Ok(process) = watch(pid) else { return };
                let expectation = serving.volume.will_read(&caller, expected);
                let _ = process.ready(Interest::READABLE).await;
                drop(expectation);
            });
        }
        (!told.is_empty())
            .then(|| format!("what it reads on {} is fetched ahead", told.join(" and ")))
    }
}

/// Credentials of commands: other users' commands don't use this gateway. Cached, as libc's
/// getgroups(2) reads a file of /proc each time.
pub(super) fn own_caller() -> Caller {
    static OWN: LazyLock<Caller> = LazyLock::new(|| {
        let groups =
            getgroups().unwrap_or_default().into_iter().map(|group| group.as_raw()).collect();
        Caller { uid: geteuid().as_raw(), gid: getegid().as_raw(), groups }
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
        .filter(|input| input.kind == Kind::File && invocation.stdin != StdinUse::Unused);
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
