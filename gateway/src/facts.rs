//! From live stages to the planner's input: resolves each command by its annotation, resolves each
//! path, and inspects each descriptor. Every rule of exactness that can't be kept becomes a reason
//! for running locally.

mod attributes;
mod descriptors;
mod search;
mod splitting;
#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::OsStr,
    path::{Path, PathBuf},
    time::Duration,
};

pub use attributes::{contains_symlinks, goes_by_the_time, shows, shows_local_time};
pub use descriptors::{file_site, opens_there, site_by_name};
use fs_mapper::{
    ClientPath, ExecutorName, LastLink, Mount, MountId, MountTable, Owned, Resolution, Resolver,
    coherence::Adapter,
};
use posh_annotations::{CurrentDir, FileKind, FileUse, Invocation, Library, Unknown};
use posh_proto::{
    locales,
    rule::{self, Rule},
};
pub use splitting::{collates_by_bytes, splitting};

use crate::{
    client_files::{self, ClientFiles},
    enlisted::{DescriptorKind, Enlisted, descriptor_named_by},
    executors::{ExecutorState, Executors},
    model::{Edge, LocalReason, ReasonKind},
    plan::{ExecutorId, Flow, Joining, LineEnds, Need, StageFacts},
    shares::Shares,
    working_directory,
};

/// Input of a classification.
pub struct World<'a> {
    /// Path → owner.
    pub table: &'a MountTable,
    /// Annotations of commands.
    pub library: &'a Library,
    /// Executors of the configuration.
    pub executors: &'a Executors,
    /// Inode of the mount namespace that `table` describes.
    pub mount_namespace: u64,
    /// The mounts are no longer those of the table.
    pub mounts_have_changed: bool,
    /// Limits on lookups in local directories, which may lead to mounts that hang.
    pub own_files: &'a Shares,
}

impl World<'_> {
    /// ID of an executor, by its name.
    #[must_use]
    pub fn executor_id(&self, name: &ExecutorName) -> Option<ExecutorId> {
        self.executors.named(name).map(|e| e.id)
    }
}

/// A command, resolved by its annotation and the mount table.
#[derive(Debug)]
pub struct ResolvedCommand {
    /// Result of the annotation.
    pub invocation: Invocation,
    /// Owner of each of `invocation.files`; `None` if the word is not a path of its own (a
    /// descriptor, /dev/null).
    pub places: Vec<Option<PathOwner>>,
    /// Owner of the current directory, if the command uses it.
    pub cwd: Option<PathOwner>,
    /// The user's configuration files that the command reads.
    pub client_files: ClientFiles,
}

/// Owner of a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PathOwner {
    /// Owned by an executor: its ID, the path, the mount.
    At(ExecutorId, ClientPath, MountId),
    /// Local, with the reason.
    Here(LocalReason),
}

impl PathOwner {
    /// Path on a mount.
    #[must_use]
    pub fn path(&self) -> Option<&Path> {
        match self {
            Self::At(_, path, _) => Some(path.as_path()),
            Self::Here(_) => None,
        }
    }
}

/// Resolves a command.
///
/// # Errors
/// Reason for running it locally.
pub fn read(world: &World<'_>, stage: &Enlisted) -> Result<ResolvedCommand, LocalReason> {
    if stage.mount_namespace != world.mount_namespace {
        return Err(
            ReasonKind::Process.because("it runs in another mount namespace than the gateway")
        );
    }
    if world.mounts_have_changed {
        return Err(
            ReasonKind::Path.because("mounts have changed just now, and it may be on another one")
        );
    }
    if let Some(why) = &stage.must_stay {
        return Err(why.clone());
    }
    if !stage.cwd.is_absolute() {
        return Err(ReasonKind::Process.because("its current directory was deleted"));
    }
    if !is_shown(world.table, &stage.cwd, stage.cwd_mount_id) {
        return Err(ReasonKind::Path.because("its current directory lies beneath a mount"));
    }
    if !is_in_its_directory(world, stage) {
        return Err(ReasonKind::Path.because("its current directory may be another one by now"));
    }
    if let Some(name) = changed_program(stage) {
        return Err(ReasonKind::Process.because(format!(
            "{name} changes what any program is or reads, and the server may not have that"
        )));
    }
    let lookup = |name: &str| stage.variable(name).map(OsStr::to_owned);
    let invocation = world
        .library
        .classify(&stage.name, &stage.argv, &lookup)
        .map_err(|e: Unknown| ReasonKind::Annotation.because(e.to_string()))?;
    if invocation.needs_network {
        return Err(
            ReasonKind::Annotation.because(format!("{} needs the network", invocation.command))
        );
    }
    let mut resolver = Resolver::new(world.table, &stage.cwd);
    let mut places = Vec::new();
    for file in &invocation.files {
        places.push(place_of(world, &mut resolver, file)?);
    }
    let cwd = match invocation.current_dir {
        CurrentDir::Unused => None,
        CurrentDir::Reads | CurrentDir::Writes => {
            Some(place(world, &mut resolver, &stage.cwd, LastLink::Follow, PathExtent::Whole)?)
        }
    };
    let mut reading =
        ResolvedCommand { invocation, places, cwd, client_files: ClientFiles::default() };
    attributes::check_attributes(world, &reading)?;
    search::check_search(world, stage, &reading)?;
    reading.client_files = client_files::read(world.own_files, stage, &reading.invocation)?;
    search::check_owner(world, stage, &reading)?;
    Ok(reading)
}

/// Variables of the dynamic loader and the C library that make every program another one: other
/// libraries, locales, conversions or options (ld.so(8), locale(7)). Time zones: see `zone`.
const PROGRAM_VARIABLES: [&str; 5] =
    ["GLIBC_TUNABLES", "GCONV_PATH", "NLSPATH", "_POSIX2_VERSION", "GETCONF_DIR"];

/// Name of a variable that makes the stage's program another one.
fn changed_program(stage: &Enlisted) -> Option<&str> {
    let set = stage.env.iter().filter(|(_, value)| !value.is_empty());
    set.filter_map(|(name, _)| name.to_str()).find(|name| {
        name.starts_with("LD_")
            || PROGRAM_VARIABLES.contains(name)
            || locales::PLACES.contains(name)
    })
}

/// Returns true if a process works in the directory that its path names. Asks only where the two
/// may differ.
fn is_in_its_directory(world: &World<'_>, stage: &Enlisted) -> bool {
    let Resolution::Owned(owned) = world.table.resolve(&stage.cwd, Path::new("/")) else {
        return true;
    };
    let mount = world.table.mount(owned.mount);
    let may_differ = matches!(mount.adapter(), Adapter::Volume | Adapter::Nfs);
    // `posh explain` has no process.
    if !may_differ || stage.pid == 0 {
        return true;
    }
    let Some(executor) = world.executors.named(&owned.executor) else { return true };
    let top = mount.path.as_path();
    working_directory::is_at_its_path(&executor.shares, top, stage.pid, &stage.cwd)
}

/// Round-trip time to the executor of a mount, if it is reachable.
#[must_use]
pub fn round_trip_to(world: &World<'_>, mount: &Mount) -> Option<Duration> {
    match world.executors.get(owner_id(world, mount)?).state() {
        ExecutorState::Ready(connection) => Some(connection.rtt),
        _ => None,
    }
}

/// The executor that owns a mount.
#[must_use]
pub fn owner_id(world: &World<'_>, mount: &Mount) -> Option<ExecutorId> {
    world.executor_id(&mount.owner.as_ref()?.executor)
}

/// Extent of a path's use: itself, or everything below it too.
#[derive(Clone, Copy, PartialEq, Eq)]
enum PathExtent {
    Whole,
    Node,
}

fn place_of(
    world: &World<'_>,
    resolver: &mut Resolver<'_>,
    file: &FileUse,
) -> Result<Option<PathOwner>, LocalReason> {
    let path = Path::new(&file.path);
    if path == Path::new("/dev/null")
        || path == Path::new("-")
        || descriptor_named_by(&file.path).is_some()
    {
        return Ok(None);
    }
    if file.kind == FileKind::ListFile {
        return Err(ReasonKind::Annotation.because(format!(
            "the files named in {} can't be seen before it runs",
            path.display()
        )));
    }
    let last = if file.no_follow { LastLink::Keep } else { LastLink::Follow };
    let tree = if file.kind.recursive() { PathExtent::Whole } else { PathExtent::Node };
    place(world, resolver, path, last, tree).map(Some)
}

fn place(
    world: &World<'_>,
    resolver: &mut Resolver<'_>,
    path: &Path,
    last: LastLink,
    tree: PathExtent,
) -> Result<PathOwner, LocalReason> {
    let owned = match resolver.resolve_with(path, last) {
        Resolution::Local { reason } => {
            return Ok(PathOwner::Here(ReasonKind::Path.because(reason.to_string())));
        }
        Resolution::Owned(owned) => owned,
    };
    if owned.through_symlink && rule::holds(Rule::Files) {
        return Err(ReasonKind::Path.because(format!(
            "{} passes a symbolic link that only this machine has",
            path.display()
        )));
    }
    if tree == PathExtent::Whole && rule::holds(Rule::Files) {
        no_other_mounts_below(world.table, &owned)?;
    }
    let id = world.executor_id(&owned.executor).ok_or_else(|| {
        ReasonKind::Executor.because(format!("executor {} is not configured", owned.executor))
    })?;
    Ok(PathOwner::At(id, owned.client_path, owned.mount))
}

fn no_other_mounts_below(table: &MountTable, owned: &Owned) -> Result<(), LocalReason> {
    let foreign = table
        .nested(&owned.client_path)
        .into_iter()
        .find(|m| m.owner.as_ref().is_none_or(|o| o.executor != owned.executor));
    match foreign {
        None => Ok(()),
        Some(mount) => Err(ReasonKind::Path.because(format!(
            "{} is mounted below {}",
            mount.path.as_path().display(),
            owned.client_path.as_path().display()
        ))),
    }
}

/// Returns true if no file that a command names, uses or has open is on a mount. Then its input is
/// local or piped, and its output is no larger. The quick look before counted the current directory
/// as used.
#[must_use]
pub fn is_all_here(stage: &Enlisted, reading: &ResolvedCommand) -> bool {
    let is_elsewhere = |place: &PathOwner| matches!(place, PathOwner::At(..));
    let mut places = reading.places.iter().flatten().chain(&reading.cwd);
    let mut open =
        stage.descriptors.iter().filter(|d| d.kind == DescriptorKind::File && d.on_mount);
    !places.any(is_elsewhere) && open.next().is_none() && reading.invocation.output_weight <= 1.0
}

/// The pipeline around a stage.
pub struct Surroundings<'a> {
    /// Pipes between waiting stages.
    pub edges: &'a [Edge],
    /// This stage's index in them.
    pub index: usize,
    /// Output files that another process may write at the same time.
    pub shared_outputs: &'a std::collections::HashSet<PathBuf>,
    /// Input pipes that another process may read.
    pub shared_inputs: &'a std::collections::HashSet<u32>,
}

impl Surroundings<'_> {
    fn feeds(&self, fd: u32) -> bool {
        self.edges.iter().any(|e| e.to == (self.index, fd))
    }

    fn drains(&self, fd: u32) -> bool {
        self.edges.iter().any(|e| e.from == (self.index, fd))
    }
}

/// Facts about one stage for the planner; the caller adds executors' refusals.
#[must_use]
pub fn stage_facts(
    world: &World<'_>,
    stage: &Enlisted,
    reading: &Result<ResolvedCommand, LocalReason>,
    around: &Surroundings<'_>,
) -> StageFacts {
    let output = descriptors::flow_out(world, stage, around);
    let here = |reason: LocalReason| StageFacts {
        need: Need::Here(reason),
        input: Flow::Nothing,
        output,
        weight: 1.0,
        operands: Vec::new(),
        across_input: false,
        joining: Joining::InOrder,
        behind_merge: None,
        whole_files: false,
        line_ends: LineEnds::Unknown,
        refusals: BTreeMap::new(),
    };
    let reading = match reading {
        Ok(reading) => reading,
        Err(reason) => return here(reason.clone()),
    };
    let checked = descriptors::check_terminal(stage, &reading.invocation)
        .and_then(|()| descriptors::check_devices(stage))
        .and_then(|()| descriptors::check_output_is_not_input(world, stage, reading, around))
        .and_then(|()| {
            descriptors::check_named_descriptors(world, stage, &reading.invocation, around)
        })
        .and_then(|()| descriptors::flow_in(world, stage, &reading.invocation, around));
    let input = match checked {
        Ok(input) => input,
        Err(reason) => return here(reason),
    };
    let (need, operands) = match need_of(stage, reading) {
        Ok(found) => found,
        Err(reason) => return here(reason),
    };
    let splitting = splitting(&reading.invocation);
    let splits = splitting::can_be_split(stage)
        && (collates_by_bytes(stage) || !splitting::counts_equal_lines(&reading.invocation));
    StageFacts {
        across_input: splits && splitting.across_input,
        behind_merge: splitting.behind_merge.filter(|_| splits),
        ..StageFacts { need, input, output, operands, ..splitting }
    }
}

/// Returns true if a path leads to the file or directory that a process has open by it: nothing was
/// mounted over it since. The path is the kernel's, and its mount ID says on which mount it is; a
/// command without a process opens the path anew.
fn is_shown(table: &MountTable, path: &Path, mount_id: Option<u64>) -> bool {
    mount_id.is_none_or(|id| table.shows(path, id))
}

/// Machine that the files require, and the splittable operands with their owners.
fn need_of(
    stage: &Enlisted,
    reading: &ResolvedCommand,
) -> Result<(Need, Vec<(usize, ExecutorId)>), LocalReason> {
    let split = reading.invocation.split.as_ref().filter(|s| {
        splitting::joins_itself(&reading.invocation, s) && splitting::can_be_split(stage)
    });
    let splittable: BTreeSet<usize> =
        split.into_iter().flat_map(|s| s.operands.iter().copied()).collect();
    let mut sites = BTreeSet::new();
    let mut fixed = BTreeSet::new();
    let mut local = None;
    let mut operands = Vec::new();
    let files = reading.invocation.files.iter().zip(&reading.places);
    let arguments = files.map(|(f, p)| (Some(f.argument), p.as_ref()));
    for (argument, place) in arguments.chain([(None, reading.cwd.as_ref())]) {
        match place {
            None => {}
            Some(PathOwner::Here(reason)) => local = Some(reason.clone()),
            Some(PathOwner::At(id, ..)) => {
                sites.insert(*id);
                match argument.filter(|a| splittable.contains(a)) {
                    Some(argument) => operands.push((argument, *id)),
                    None => drop(fixed.insert(*id)),
                }
            }
        }
    }
    if let Some(reason) = local {
        return Err(reason);
    }
    let need = match (sites.len(), fixed.len()) {
        (0, _) => Need::Anywhere,
        (1, _) => Need::At(*sites.first().expect("there is one")),
        (_, 0) => Need::Split,
        (n, _) => return Err(ReasonKind::Placement.because(format!("{n} mounts, not splittable"))),
    };
    Ok((need, operands))
}
