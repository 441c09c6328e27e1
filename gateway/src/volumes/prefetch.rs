//! What a command that runs here is going to read is known from its words before it opens anything: its volumes are told,
//! and fetch it meanwhile (informed prefetch). The command waits for none of that, and ends it when it ends. Likewise what a
//! shell is going to look up and list.

use std::{
    collections::BTreeMap,
    ffi::{OsStr, OsString},
    os::unix::ffi::OsStrExt as _,
    path::{Path, PathBuf},
    sync::{Arc, LazyLock},
};

use bytes::Bytes;
use fs_mapper::{LastLink, MountTable, Resolution, Resolver, coherence::Adapter};
use nix::unistd::{getegid, geteuid, getgroups};
use posh_annotations::{CurrentDir, FileKind, FileUse, Invocation, Library, StdinUse};
use posh_proto::gateway as wire;
use posh_volume::{
    fs::{Expected, Look},
    store::Caller,
};
use tokio::{io::Interest, task::JoinHandle};

use super::Volumes;
use crate::{
    enlisted::{Enlisted, Kind},
    facts::World,
    session::watch,
};

/// Commands that look at files and do not read them: contents are fetched only if they open one all the same.
pub(super) const LOOKING: [&str; 4] = ["du", "find", "ls", "stat"];

/// What a command reads, by the mount point of the volume.
type Inputs = BTreeMap<PathBuf, Vec<Expected>>;

impl Volumes {
    /// Whether there is any.
    #[must_use]
    pub fn are_there(&self) -> bool {
        *self.mounted.borrow() > 0
    }

    /// Tells the volumes what a command is going to read, as far as its words say. For `explain`, if there is something.
    #[must_use]
    pub fn prefetch(&self, world: &World<'_>, stage: &Enlisted) -> Option<String> {
        if !self.are_there() || stage.mount_namespace != world.mount_namespace || !stage.cwd.is_absolute() {
            return None;
        }
        let inputs = inputs(world, stage);
        let runtime = self.handle().ok()?;
        let mut told = Vec::new();
        for (path, expected) in inputs {
            let serving = self.known().iter().find(|known| known.config.path == path).and_then(|known| known.serving());
            let Some(serving) = serving else { continue };
            if serving.volume.has(&own_caller(), &expected) {
                continue;
            }
            told.push(path.display().to_string());
            let (caller, pid) = (own_caller(), stage.pid);
            runtime.spawn(async move {
                // It has ended already, if it can't be watched.
                let Ok(process) = watch(pid) else { return };
                let expectation = serving.volume.will_read(&caller, expected);
                let _ = process.ready(Interest::READABLE).await;
                drop(expectation);
            });
        }
        (!told.is_empty()).then(|| format!("what it reads on {} is fetched ahead", told.join(" and ")))
    }

    /// Whether there is nothing to fetch of what a command reads, as far as its words say.
    #[must_use]
    pub fn has_what_it_reads(&self, world: &World<'_>, command: &Enlisted) -> bool {
        inputs(world, command).into_iter().all(|(path, expected)| {
            let serving = self.known().iter().find(|known| known.config.path == path).and_then(|known| known.serving());
            serving.is_some_and(|serving| serving.volume.has(&own_caller(), &expected))
        })
    }

    /// Fetches what commands are going to read that a shell's text names, as far as it is small and the words alone tell.
    pub fn foresee(
        &self,
        table: &Arc<MountTable>,
        library: &Arc<Library>,
        commands: &[wire::ForeseenCommand],
    ) -> Option<JoinHandle<()>> {
        if commands.is_empty() || !self.are_there() {
            return None;
        }
        let runtime = self.handle().ok()?;
        let serving: BTreeMap<PathBuf, _> =
            self.known().iter().filter_map(|known| Some((known.config.path.clone(), known.serving()?))).collect();
        let (table, library, commands) = (Arc::clone(table), Arc::clone(library), commands.to_vec());
        Some(runtime.spawn(async move {
            for (path, files) in foreseen(&table, &library, &commands) {
                if let Some(serving) = serving.get(&path) {
                    serving.volume.fetch_small(&own_caller(), &files).await;
                }
            }
        }))
    }

    /// Tells the volumes what a shell may look up, and which directories it may list: absolute paths, as its text has them.
    pub fn look_ahead(&self, table: &MountTable, named: &[PathBuf], listed: &[PathBuf]) {
        if !self.are_there() {
            return;
        }
        let mut looks: BTreeMap<PathBuf, Look> = BTreeMap::new();
        let mut note = |paths: &[PathBuf], of: fn(&mut Look) -> &mut Vec<PathBuf>| {
            for path in paths {
                let found = on_volume(table, &mut Resolver::new(table, Path::new("/")), path, LastLink::Keep);
                if let Some((mount, below)) = found {
                    of(looks.entry(mount).or_default()).push(below);
                }
            }
        };
        note(named, |look| &mut look.named);
        note(listed, |look| &mut look.listed);
        let Ok(runtime) = self.handle() else { return };
        for (path, look) in looks {
            let serving = self.known().iter().find(|known| known.config.path == path).and_then(|known| known.serving());
            if let Some(serving) = serving {
                let _in_runtime = runtime.enter();
                serving.volume.look_ahead(&own_caller(), &look);
            }
        }
    }
}

/// Commands of other users do not come to this gateway. Asked for once: getgroups(2) behind libc reads a file of /proc each time.
pub(super) fn own_caller() -> Caller {
    static OWN: LazyLock<Caller> = LazyLock::new(|| {
        let groups = getgroups().unwrap_or_default().into_iter().map(|group| group.as_raw()).collect();
        Caller { uid: geteuid().as_raw(), gid: getegid().as_raw(), groups }
    });
    OWN.clone()
}

fn inputs(world: &World<'_>, stage: &Enlisted) -> Inputs {
    let mut inputs = Inputs::new();
    let lookup = |name: &str| stage.variable(name).map(OsStr::to_owned);
    let Ok(invocation) = world.library.classify(&stage.name, &stage.argv, &lookup) else { return inputs };
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
    let input = stage.descriptor(0).filter(|input| input.kind == Kind::File && invocation.stdin != StdinUse::Unused);
    if let Some(input) = input {
        note(&input.path, LastLink::Keep, Expected::File);
    }
    inputs
}

/// What commands are going to read, below the mount points of their volumes. What their environment will be then is not known here.
fn foreseen(
    table: &MountTable,
    library: &Library,
    commands: &[wire::ForeseenCommand],
) -> BTreeMap<PathBuf, Vec<PathBuf>> {
    let text = |bytes: &Bytes| OsStr::from_bytes(bytes).to_owned();
    let mut files: BTreeMap<PathBuf, Vec<PathBuf>> = BTreeMap::new();
    for (stage, cwd) in commands.iter().filter_map(|command| Some((command.stage.as_ref()?, text(&command.cwd)))) {
        let argv: Vec<OsString> = stage.argv.iter().map(text).collect();
        let name = argv.first().and_then(|name| name.to_str());
        let Some(Ok(invocation)) = name.map(|name| library.classify(name, &argv, &|_| None)) else { continue };
        let is_read =
            |file: &&FileUse| file.kind == FileKind::InputFile && !LOOKING.contains(&invocation.command.as_str());
        let named = invocation.files.iter().filter(is_read).map(|file| PathBuf::from(&file.path));
        let input = (!stage.stdin_path.is_empty()).then(|| PathBuf::from(text(&stage.stdin_path)));
        let mut resolver = Resolver::new(table, Path::new(&cwd));
        for path in named.chain(input) {
            if let Some((mount, below)) = on_volume(table, &mut resolver, &path, LastLink::Keep) {
                files.entry(mount).or_default().push(below);
            }
        }
    }
    files
}

fn use_of(invocation: &Invocation, file: &FileUse) -> Option<fn(PathBuf) -> Expected> {
    match file.kind {
        FileKind::InputFile | FileKind::InoutFile if LOOKING.contains(&invocation.command.as_str()) => {
            Some(Expected::Tree)
        }
        FileKind::InputFile | FileKind::InoutFile => Some(Expected::File),
        FileKind::InputDir => Some(Expected::Tree),
        FileKind::OutputFile | FileKind::OutputDir | FileKind::NewDir | FileKind::ListFile => None,
    }
}

/// The mount point of the volume that a path is on, and the path below it. Where only the server can say what it means, there is nothing to fetch.
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
