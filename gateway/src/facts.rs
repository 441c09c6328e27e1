//! From live stages to the planner's input: resolves each command by its annotation, resolves each
//! path, and inspects each descriptor. Every rule of exactness that can't be kept becomes a reason
//! for running locally.

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::OsStr,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
    time::Duration,
};

use fs_mapper::{
    ClientPath, ExecutorName, LastLink, Mount, MountId, MountTable, Owned, Resolution, Resolver,
    coherence::{Adapter, WriteBehind},
};
use posh_annotations::{
    Aggregator, CurrentDir, FileAttribute, FileKind, FileUse, Invocation, Library, Split, StdinUse,
    TerminalUse, Unknown,
};
use posh_proto::{
    locales,
    rule::{self, Rule},
};

use crate::{
    client_files::{self, ClientFiles},
    enlisted::{Descriptor, DescriptorKind, Enlisted, descriptor_named_by},
    executors::{ExecutorState, Executors},
    model::{Edge, LocalReason, ReasonKind},
    ownership,
    plan::{BehindMerge, ExecutorId, Flow, Joining, LineEnds, Need, Site, StageFacts},
    shares::Shares,
    working_directory,
    zone::{self, Zone},
};

/// Timeout for a lookup above a mount: mostly local directories.
const PATIENCE: Duration = Duration::from_secs(2);

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
    check_attributes(world, &reading)?;
    check_umask(world, stage, &reading)?;
    check_search(world, stage, &reading)?;
    reading.client_files = client_files::read(world.own_files, stage, &reading.invocation)?;
    check_owner(world, stage, &reading)?;
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

/// Checks that file attributes that a command shows look the same on the server.
fn check_attributes(world: &World<'_>, reading: &ResolvedCommand) -> Result<(), LocalReason> {
    if !rule::holds(Rule::MountDifferences) {
        return Ok(());
    }
    for place in reading.places.iter().flatten().chain(&reading.cwd) {
        let PathOwner::At(_, _, mount) = place else { continue };
        let mount = world.table.mount(*mount);
        if let Some(differs) = reading.invocation.shows.iter().find(|a| !shown_alike(mount, **a)) {
            return Err(ReasonKind::Attributes.because(format!(
                "{} shows {}, which a {} mount does not show as the server does",
                reading.invocation.command,
                attribute(*differs),
                mount.fs_type
            )));
        }
    }
    Ok(())
}

/// Permissions that an sftp server always clears on new files, whatever the creator's umask:
/// defaults of login.defs(5) and pam_umask(8) clear no less.
const SFTP_UMASK: u32 = 0o022;

/// Checks that a command creates no files with more permissions than the mount would give them.
fn check_umask(
    world: &World<'_>,
    stage: &Enlisted,
    reading: &ResolvedCommand,
) -> Result<(), LocalReason> {
    let files =
        reading.invocation.files.iter().zip(&reading.places).filter(|(file, _)| file.kind.writes());
    let cwd = reading.cwd.iter().filter(|_| reading.invocation.current_dir == CurrentDir::Writes);
    for place in files.filter_map(|(_, place)| place.as_ref()).chain(cwd) {
        let PathOwner::At(_, _, mount) = place else { continue };
        let mount = world.table.mount(*mount);
        if mount.adapter() == Adapter::Sshfs && stage.umask & SFTP_UMASK != SFTP_UMASK {
            return Err(ReasonKind::Attributes.because(format!(
                "the umask {:03o} allows permissions that sshd does not give to new files on {}",
                stage.umask,
                mount.path.as_path().display()
            )));
        }
    }
    Ok(())
}

/// Returns true if a mount shows an attribute as the server has it. A bind mount does. sshfs passes
/// on permissions, sizes of directories and the order of their entries (observed up to 3,000
/// entries; above 10,000 find(1) sorts by inode number on local disks). Of other file systems only
/// permissions are certain.
fn shown_alike(mount: &Mount, attribute: FileAttribute) -> bool {
    let through_sshfs = matches!(attribute, FileAttribute::Order | FileAttribute::DirSize);
    match mount.adapter() {
        _ if attribute == FileAttribute::CopiedOwner => true,
        // The executor checks symlinks below.
        Adapter::Sshfs if attribute == FileAttribute::Symlinks => true,
        Adapter::Bind => true,
        // It passes on the server's attributes, but the device is local, and access times are
        // recorded locally.
        Adapter::Volume => !matches!(attribute, FileAttribute::Device | FileAttribute::AccessTime),
        Adapter::Sshfs => through_sshfs || attribute == FileAttribute::Mode,
        Adapter::Rclone | Adapter::Nfs | Adapter::Generic => attribute == FileAttribute::Mode,
    }
}

/// Like `shown_alike`, but for a place; local files are shown as they are.
#[must_use]
pub fn shows(world: &World<'_>, place: &PathOwner, attribute: FileAttribute) -> bool {
    match place {
        PathOwner::At(_, _, mount) => shown_alike(world.table.mount(*mount), attribute),
        PathOwner::Here(_) => true,
    }
}

fn attribute(attribute: FileAttribute) -> &'static str {
    match attribute {
        FileAttribute::Owner => "owners",
        FileAttribute::Inode => "inode numbers",
        FileAttribute::Links => "link counts",
        FileAttribute::Blocks => "disk usage",
        FileAttribute::Device => "device numbers",
        FileAttribute::Times => "exact times",
        FileAttribute::Mode => "permissions",
        FileAttribute::CopiedOwner => "owners that it copies",
        FileAttribute::DirSize => "sizes of directories",
        FileAttribute::Order => "the order of directory entries",
        FileAttribute::AccessTime => "times of access",
        FileAttribute::Symlinks => "targets of symbolic links",
    }
}

/// The executor that owns a mount.
#[must_use]
pub fn owner_id(world: &World<'_>, mount: &Mount) -> Option<ExecutorId> {
    world.executor_id(&mount.owner.as_ref()?.executor)
}

/// Returns true if a command's output depends on the machine's time zone.
#[must_use]
pub fn shows_local_time(stage: &Enlisted, invocation: &Invocation) -> bool {
    zone::of(stage, invocation) == Some(Zone::Machine)
}

/// Returns true if a command compares times with the present one, shows them, or may otherwise go
/// by the clock.
#[must_use]
pub fn goes_by_the_time(stage: &Enlisted, invocation: &Invocation) -> bool {
    invocation.shows.contains(&FileAttribute::Times)
        || !invocation.deterministic
        || zone::of(stage, invocation).is_some()
}

/// Returns true if the mount of a place restricts symlinks: Debian's sshfs refuses absolute ones
/// and those with `..` (`contain_symlinks`).
#[must_use]
pub fn contains_symlinks(world: &World<'_>, place: &PathOwner) -> bool {
    let is_sshfs = |mount| world.table.mount(mount).adapter() == Adapter::Sshfs;
    matches!(place, PathOwner::At(_, _, mount) if is_sshfs(*mount))
}

/// Checks that nothing that a command searches for upwards (`.git`) lies above the mount, where
/// only this machine could find it. A mount may lie in another one, which may hang.
fn check_search(
    world: &World<'_>,
    stage: &Enlisted,
    reading: &ResolvedCommand,
) -> Result<(), LocalReason> {
    if reading.invocation.searches_up.is_empty() {
        return Ok(());
    }
    let Some((_, mount)) = search(world, stage, reading) else { return Ok(()) };
    let top = mount.path.as_path();
    let (place, names) = (top.to_owned(), reading.invocation.searches_up.clone());
    let look = move || {
        place.ancestors().skip(1).find_map(|directory| {
            let mut files = names.iter().map(|name| directory.join(name));
            files.find(|file| file.symlink_metadata().is_ok())
        })
    };
    match world.own_files.ask_aside(top, PATIENCE, look) {
        Err(why) => Err(ReasonKind::ClientFiles.because(format!(
            "{} may find files above {}: {why}",
            reading.invocation.command,
            top.display()
        ))),
        Ok(None) => Ok(()),
        Ok(Some(file)) => Err(ReasonKind::ClientFiles.because(format!(
            "{} may find {} on this machine",
            reading.invocation.command,
            file.display()
        ))),
    }
}

/// Start directory of a command's upward search, and its mount.
fn search<'w>(
    world: &World<'w>,
    stage: &Enlisted,
    reading: &ResolvedCommand,
) -> Option<(PathBuf, &'w Mount)> {
    let start =
        reading.invocation.working_dir.as_ref().map_or(stage.cwd.clone(), |d| stage.cwd.join(d));
    let Resolution::Owned(owned) = world.table.resolve(&start, &stage.cwd) else { return None };
    Some((start, world.table.mount(owned.mount)))
}

/// Checks that the search result is the user's own, as this machine sees it.
fn check_owner(
    world: &World<'_>,
    stage: &Enlisted,
    reading: &ResolvedCommand,
) -> Result<(), LocalReason> {
    if reading.invocation.searches_up.is_empty() || !rule::holds(Rule::Identity) {
        return Ok(());
    }
    let Some((start, mount)) = search(world, stage, reading) else { return Ok(()) };
    let executor = mount.owner.as_ref().and_then(|owner| world.executors.named(&owner.executor));
    let Some(executor) = executor else {
        return Err(ReasonKind::Executor.because("its mount has no executor any more"));
    };
    let top = mount.path.as_path();
    ownership::check(
        &executor.shares,
        stage,
        &reading.invocation,
        &start,
        top,
        &reading.client_files.sent,
    )
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
    let output = flow_out(world, stage, around);
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
    let checked = check_terminal(stage, &reading.invocation)
        .and_then(|()| check_devices(stage))
        .and_then(|()| check_output_is_not_input(world, stage, reading, around))
        .and_then(|()| check_named_descriptors(world, stage, &reading.invocation, around))
        .and_then(|()| flow_in(world, stage, &reading.invocation, around));
    let input = match checked {
        Ok(input) => input,
        Err(reason) => return here(reason),
    };
    let (need, operands) = match need_of(stage, reading) {
        Ok(found) => found,
        Err(reason) => return here(reason),
    };
    let splitting = splitting(&reading.invocation);
    let splits = can_be_split(stage)
        && (collates_by_bytes(stage) || !counts_equal_lines(&reading.invocation));
    StageFacts {
        across_input: splits && splitting.across_input,
        behind_merge: splitting.behind_merge.filter(|_| splits),
        ..StageFacts { need, input, output, operands, ..splitting }
    }
}

/// posh's own code compares lines by bytes, uniq by the locale's collation.
fn counts_equal_lines(invocation: &Invocation) -> bool {
    let split = invocation.split.as_ref();
    split.is_some_and(|s| s.aggregator == Some(Aggregator::UniqCount))
}

/// Returns true if the stage's locale collates by bytes.
pub fn collates_by_bytes(stage: &Enlisted) -> bool {
    let set = ["LC_ALL", "LC_COLLATE", "LANG"]
        .into_iter()
        .find_map(|n| stage.variable(n).filter(|v| !v.is_empty()));
    set.is_none_or(|locale| ["C", "POSIX", "C.UTF-8", "C.utf8"].iter().any(|name| locale == *name))
}

/// Facts about splitting a command, from its annotation alone. It runs anywhere, and no operand has
/// an owner.
#[must_use]
pub fn splitting(invocation: &Invocation) -> StageFacts {
    let split = invocation.split.as_ref().filter(|s| joins_itself(invocation, s));
    StageFacts {
        need: Need::Anywhere,
        input: Flow::Nothing,
        output: Flow::At(Site::Here),
        weight: invocation.output_weight,
        operands: Vec::new(),
        across_input: split.is_some_and(|s| s.across_input),
        joining: match split.and_then(|s| s.aggregator.as_ref()) {
            None => Joining::InOrder,
            Some(Aggregator::Merge { drops: false, .. }) => Joining::Merge,
            Some(Aggregator::Merge { drops: true, .. }) => Joining::MergeUnique,
            Some(Aggregator::Same) => Joining::Same,
            Some(Aggregator::Sum | Aggregator::UniqCount | Aggregator::WcTotal(_)) => Joining::Own,
        },
        behind_merge: split.and_then(|s| s.behind_merge).map(|way| match way {
            posh_annotations::BehindMerge::Same => BehindMerge::Same,
            posh_annotations::BehindMerge::Counted => BehindMerge::Counted,
        }),
        whole_files: split.is_some_and(|s| s.whole_files),
        line_ends: line_ends(invocation),
        refusals: BTreeMap::new(),
    }
}

/// Returns true unless the merging command differs from the annotated one, whose presence and
/// version are known everywhere.
fn joins_itself(invocation: &Invocation, split: &Split) -> bool {
    match &split.aggregator {
        Some(Aggregator::Merge { words, .. }) => {
            words.first().is_some_and(|name| *name == *invocation.command)
        }
        _ => true,
    }
}

fn line_ends(invocation: &Invocation) -> LineEnds {
    match invocation.line_ends {
        posh_annotations::LineEnds::Always => LineEnds::Always,
        posh_annotations::LineEnds::AsInput => LineEnds::AsInput,
        posh_annotations::LineEnds::Unknown => LineEnds::Unknown,
    }
}

fn check_terminal(stage: &Enlisted, invocation: &Invocation) -> Result<(), LocalReason> {
    let on_terminal =
        (0..=2).any(|fd| stage.descriptor(fd).is_some_and(|d| d.kind == DescriptorKind::Tty));
    match invocation.terminal {
        TerminalUse::Interactive if on_terminal && rule::holds(Rule::AskingCommands) => {
            Err(ReasonKind::Descriptors
                .because(format!("{} may ask or draw on the terminal", invocation.command)))
        }
        _ => Ok(()),
    }
}

/// Checks outputs: posh handles terminals and /dev/null. Errors of other devices (/dev/full) are
/// known only to the command itself.
fn check_devices(stage: &Enlisted) -> Result<(), LocalReason> {
    let strange = [1, 2]
        .into_iter()
        .filter_map(|fd| stage.descriptor(fd))
        .find(|d| d.kind == DescriptorKind::Other);
    match strange {
        None => Ok(()),
        Some(device) => Err(ReasonKind::Descriptors
            .because(format!("it writes to the device {}", device.path.display()))),
    }
}

/// `cat a all >> all`: the command notices only if its output is opened on the same machine as its
/// input. For single files, the executor checks whether they are an output that is written through
/// the mount (`lower::Builder::local_output`), as the command does locally: by resolved paths.
fn check_output_is_not_input(
    world: &World<'_>,
    stage: &Enlisted,
    reading: &ResolvedCommand,
    around: &Surroundings<'_>,
) -> Result<(), LocalReason> {
    let Some(output) = stage.descriptor(1).filter(|d| d.kind == DescriptorKind::File) else {
        return Ok(());
    };
    if !rule::holds(Rule::InputIsOutput) {
        return Ok(());
    }
    let inputs_there = |id: ExecutorId| {
        reading.invocation.files.iter().zip(&reading.places).any(|(file, place)| match place {
            Some(PathOwner::At(executor, path, mount)) => {
                let mount = world.table.mount(*mount);
                let is_told_apart = !file.kind.recursive()
                    && (mount.adapter() != Adapter::Rclone || are_two_files(path, &output.path));
                *executor == id && !is_told_apart
            }
            _ => false,
        })
    };
    match file_site(world, output) {
        Some(id) if inputs_there(id) && !opens_there(world, output, around) => {
            Err(ReasonKind::Descriptors.because(
                "its output file is beside its input and must be written through the mount",
            ))
        }
        Some(_) if reads_its_output(stage, reading) && !opens_there(world, output, around) => {
            Err(ReasonKind::Descriptors
                .because("its output file is its input and must be written through the mount"))
        }
        _ => Ok(()),
    }
}

fn reads_its_output(stage: &Enlisted, reading: &ResolvedCommand) -> bool {
    let is_read = reading.invocation.stdin != StdinUse::Unused;
    let path = |fd: u32| stage.descriptor(fd).map(|file| &file.path);
    is_read && path(0) == path(1)
}

/// Returns true if two names on an rclone mount are certainly different files: it has no links, but
/// some clouds ignore case.
fn are_two_files(one: &ClientPath, other: &Path) -> bool {
    let plain = |path: &Path| {
        let goes_up = path.components().any(|part| part == std::path::Component::ParentDir);
        path.to_str().filter(|_| !goes_up).map(str::to_lowercase)
    };
    let (one, other) = (plain(one.as_path()), plain(other));
    one.is_some() && other.is_some() && one != other
}

/// Checks words such as `/dev/stdin`. A pipe or terminal is the descriptor itself, but a regular
/// file is opened anew (proc_pid_fd(5)), at its beginning. An executor does so only if it has
/// opened the file itself.
fn check_named_descriptors(
    world: &World<'_>,
    stage: &Enlisted,
    invocation: &Invocation,
    around: &Surroundings<'_>,
) -> Result<(), LocalReason> {
    for file in &invocation.files {
        let named = descriptor_named_by(&file.path).and_then(|fd| stage.descriptor(fd));
        let Some(named) = named.filter(|named| named.kind == DescriptorKind::File) else {
            continue;
        };
        let is_there = site_by_name(world, named).is_some()
            && (named.fd == 0 || opens_there(world, named, around));
        if !is_there && rule::holds(Rule::DescriptorKinds) {
            return Err(ReasonKind::Descriptors
                .because(format!("{} is a file that is opened anew here", file.path.display())));
        }
    }
    Ok(())
}

/// Source of standard input, after checking descriptors that the words name.
fn flow_in(
    world: &World<'_>,
    stage: &Enlisted,
    invocation: &Invocation,
    around: &Surroundings<'_>,
) -> Result<Flow, LocalReason> {
    for named in stage.named_descriptors() {
        match named.kind {
            DescriptorKind::Pipe if around.feeds(named.fd) || around.drains(named.fd) => {}
            DescriptorKind::File if !rule::holds(Rule::DescriptorKinds) => {}
            _ => {
                return Err(ReasonKind::Descriptors.because(format!(
                    "{} is not a pipe from a stage that posh runs",
                    named.path.display()
                )));
            }
        }
    }
    let early = match invocation.stdin {
        StdinUse::Unused if rule::holds(Rule::Stdin) => return Ok(Flow::Nothing),
        StdinUse::Unused => false,
        StdinUse::ReadsAll => false,
        StdinUse::MayStopEarly => rule::holds(Rule::EarlyReaders),
    };
    let Some(input) = stage.descriptor(0) else { return Ok(Flow::Nothing) };
    match input.kind {
        DescriptorKind::Null => Ok(Flow::Nothing),
        DescriptorKind::Pipe if around.feeds(0) => Ok(Flow::Nothing),
        DescriptorKind::Pipe | DescriptorKind::Socket
            if early && around.shared_inputs.contains(&0) =>
        {
            Err(ReasonKind::Descriptors.because("it may stop reading an input that others read on"))
        }
        DescriptorKind::Pipe => Ok(Flow::At(Site::Here)),
        DescriptorKind::Socket if !early => Ok(Flow::At(Site::Here)),
        DescriptorKind::File if input.is_older => Err(ReasonKind::Descriptors.because(
            "its input may have been opened before it, and its name be another file's by now",
        )),
        DescriptorKind::File => match site_by_name(world, input) {
            Some(id) => Ok(Flow::At(Site::Executor(id))),
            None if early => Err(ReasonKind::Descriptors
                .because("it may stop reading in the middle of a file on this machine")),
            None => Ok(Flow::At(Site::Here)),
        },
        DescriptorKind::Tty => Err(ReasonKind::Descriptors.because("it reads the terminal")),
        DescriptorKind::Socket | DescriptorKind::Directory | DescriptorKind::Other => {
            Err(ReasonKind::Descriptors.because("its standard input is no file and no pipe"))
        }
    }
}

fn flow_out(world: &World<'_>, stage: &Enlisted, around: &Surroundings<'_>) -> Flow {
    let Some(output) = stage.descriptor(1) else { return Flow::Nothing };
    match output.kind {
        DescriptorKind::Null => Flow::Nothing,
        DescriptorKind::Pipe if around.drains(1) => Flow::Nothing,
        DescriptorKind::File => {
            match site_by_name(world, output).filter(|_| opens_there(world, output, around)) {
                Some(id) => Flow::At(Site::Executor(id)),
                None => Flow::At(Site::Here),
            }
        }
        _ => Flow::At(Site::Here),
    }
}

/// Returns true if a path leads to the file or directory that a process has open by it: nothing was
/// mounted over it since. The path is the kernel's, and its mount ID says on which mount it is; a
/// command without a process opens the path anew.
fn is_shown(table: &MountTable, path: &Path, mount_id: Option<u64>) -> bool {
    mount_id.is_none_or(|id| table.shows(path, id))
}

/// Executor that owns the file of a descriptor. The kernel's path has no symlinks; a deleted file
/// has no path on the server.
#[must_use]
pub fn file_site(world: &World<'_>, descriptor: &Descriptor) -> Option<ExecutorId> {
    if descriptor.kind != DescriptorKind::File
        || descriptor.path.as_os_str().as_bytes().ends_with(b" (deleted)")
        || !is_shown(world.table, &descriptor.path, descriptor.mount_id)
    {
        return None;
    }
    match world.table.resolve(&descriptor.path, Path::new("/")) {
        Resolution::Owned(owned) => world.executor_id(&owned.executor),
        Resolution::Local { .. } => None,
    }
}

/// Like `file_site`, but only if the file certainly still has the name.
#[must_use]
pub fn site_by_name(world: &World<'_>, descriptor: &Descriptor) -> Option<ExecutorId> {
    file_site(world, descriptor).filter(|_| !descriptor.is_older)
}

/// Returns true if an output file on a mount may be opened on the server instead.
#[must_use]
pub fn opens_there(world: &World<'_>, descriptor: &Descriptor, around: &Surroundings<'_>) -> bool {
    let Resolution::Owned(owned) = world.table.resolve(&descriptor.path, Path::new("/")) else {
        return false;
    };
    rule::holds(Rule::InputIsOutput)
        && !descriptor.is_older
        && !around.shared_outputs.contains(&descriptor.path)
        && world.table.mount(owned.mount).coherence().write_behind() == WriteBehind::Allowed
}

/// Machine that the files require, and the splittable operands with their owners.
fn need_of(
    stage: &Enlisted,
    reading: &ResolvedCommand,
) -> Result<(Need, Vec<(usize, ExecutorId)>), LocalReason> {
    let split = reading
        .invocation
        .split
        .as_ref()
        .filter(|s| joins_itself(&reading.invocation, s) && can_be_split(stage));
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

/// Returns true if a stage's outputs allow a split: parts write one after the other. A reader must
/// not notice (one open file description for stdout and stderr).
fn can_be_split(stage: &Enlisted) -> bool {
    let Some(out) = stage.descriptor(1) else { return false };
    let Some(err) = stage.descriptor(2) else { return true };
    let one = out.identity == err.identity
        && matches!(out.kind, DescriptorKind::Pipe | DescriptorKind::File | DescriptorKind::Socket);
    !one
}
