//! From a plan to wire messages: one run per executor, with kernel pipes between stages that are
//! joined on the server, and a table that maps streams to descriptors of stage programs.

mod join;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    ffi::{OsStr, OsString},
    os::unix::ffi::OsStrExt,
    path::{Component, Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use fs_mapper::{Mount, MountId, MountTable, coherence::Adapter};
use posh_annotations::{CurrentDir, FileAttribute, FileKind, FileUse, Invocation, StdinUse};
use posh_proto::{
    PROTOCOL_VERSION,
    executor::{
        ClientFile, Descriptor as WireDescriptor, EnvVar, File, Inlet, Merge, MountPoint, Outlet,
        PathUse, Pty, ResourceLimit, RunSpec, Stage, WatchedTree, WindowSize, descriptor::Source,
    },
    rule::{self, Rule},
};

use crate::{
    assembly::PipelineShape,
    client_files, elsewhere,
    enlisted::{Descriptor, DescriptorKind, Enlisted},
    facts::{self, PathOwner, ResolvedCommand, Surroundings, World},
    join::{AggregatorProgram, Recipe},
    model::LocalReason,
    plan::{ExecutorId, Join, Placement, Plan, StagePart},
    written::{directories_written, files_on_sshfs, is_on_sshfs, made_places, watched_places},
    zone::LOCALTIME,
};

/// Limit on unread bytes of an output: a link of 20 ms and 600 Mbit/s holds 1.5 MB, and eight
/// buffered outputs stay well below the gateway's memory budget.
pub const OUTPUT_CREDIT_BYTES: u64 = 4 << 20;
/// More than the clock tick of any server (jiffies, time(7)).
const BEYOND_A_TICK: Duration = Duration::from_millis(10);
/// Variables that affect every command: messages, collation, argument order, and `~`.
const COMMON_ENVIRONMENT: [&str; 6] = ["LANG", "LANGUAGE", "LC_*", "POSIXLY_CORRECT", "TZ", "HOME"];

/// A stream of a run: (run, stream).
pub type RunStream = (usize, u32);
/// Run index of a local aggregator's output: streams for descriptors 1 and 2.
pub const JOINED: usize = usize::MAX;

/// A local aggregator.
#[derive(Debug)]
pub struct JoinedHere {
    /// Recipe of the aggregator.
    pub recipe: Recipe,
    /// The commands of the recipe.
    pub programs: Vec<AggregatorProgram>,
    /// Its input streams, part by part.
    pub inputs: Vec<RunStream>,
}

/// Runs to start, and the connection of their streams to the stage programs.
#[derive(Debug, Default)]
pub struct Lowered {
    /// One per executor.
    pub runs: Vec<ExecutorRun>,
    /// Streams for each descriptor of a stage program, in order: (stage, fd) → streams.
    pub outputs: BTreeMap<(usize, u32), Vec<RunStream>>,
    /// Stream that each descriptor of a stage program feeds.
    pub inputs: BTreeMap<(usize, u32), RunStream>,
    /// Stages whose parts are joined by a local aggregator.
    pub joins: BTreeMap<usize, JoinedHere>,
    /// Stage and part of each remote command: (run, wire ID) → (stage, part). An aggregator's
    /// commands are numbered after the parts.
    pub commands: HashMap<(usize, u32), (usize, usize)>,
}

/// One executor's run.
#[derive(Debug)]
pub struct ExecutorRun {
    /// Executor of the run.
    pub executor: ExecutorId,
    /// Specification of the run.
    pub spec: RunSpec,
    next: u32,
}

impl ExecutorRun {
    fn number(&mut self) -> u32 {
        self.next += 1;
        self.next
    }

    fn pipe(&mut self) -> u32 {
        let pipe = self.number();
        self.spec.pipes.push(pipe);
        pipe
    }
}

/// Builds the runs of a plan.
pub struct Builder<'a> {
    world: &'a World<'a>,
    commands: &'a [Arc<Enlisted>],
    shape: &'a PipelineShape,
    readings: &'a [Result<ResolvedCommand, LocalReason>],
    plan: &'a Plan,
    lowered: Lowered,
    /// Outputs of a stage's parts for an aggregator: streams to this machine, or pipes on the
    /// server.
    part_streams: HashMap<usize, Vec<RunStream>>,
    part_pipes: HashMap<usize, Vec<u32>>,
    /// Executors whose machines are in another time zone.
    other_zones: BTreeSet<ExecutorId>,
    /// (edge, part of the writer) → pipe to write; (edge, part of the reader) → pipe to read.
    writes: HashMap<(usize, usize), u32>,
    reads: HashMap<(usize, usize), u32>,
}

impl<'a> Builder<'a> {
    /// Makes a builder.
    #[must_use]
    pub fn new(
        world: &'a World<'a>,
        commands: &'a [Arc<Enlisted>],
        shape: &'a PipelineShape,
        readings: &'a [Result<ResolvedCommand, LocalReason>],
        plan: &'a Plan,
    ) -> Self {
        Self {
            world,
            commands,
            shape,
            readings,
            plan,
            lowered: Lowered::default(),
            part_streams: HashMap::new(),
            part_pipes: HashMap::new(),
            other_zones: BTreeSet::new(),
            writes: HashMap::new(),
            reads: HashMap::new(),
        }
    }

    /// Sets the executors in other time zones than this machine's.
    #[must_use]
    pub fn with_other_zones(mut self, executors: BTreeSet<ExecutorId>) -> Self {
        self.other_zones = executors;
        self
    }

    /// Builds the runs. `id` identifies them in all programs' logs.
    #[must_use]
    pub fn build(mut self, id: &str) -> Lowered {
        for placement in &self.plan.placements {
            if let Placement::Remote(parts) = placement {
                for part in parts {
                    self.run_on(part.executor, id);
                }
            }
        }
        self.lay_pipes();
        for stage in 0..self.plan.placements.len() {
            if let Placement::Remote(parts) = &self.plan.placements[stage] {
                for (number, part) in parts.iter().enumerate() {
                    self.add_command(stage, number, part);
                }
                self.add_join(stage, parts);
            }
        }
        if !rule::holds(Rule::Paths) {
            self.lowered.runs.iter_mut().for_each(|run| elsewhere::move_to(&mut run.spec));
        }
        self.lowered
    }

    fn run_on(&mut self, executor: ExecutorId, id: &str) {
        if self.lowered.runs.iter().any(|r| r.executor == executor) {
            return;
        }
        let mounts = self.world.table.mounts().filter_map(|m| {
            let owner = m.owner.as_ref()?;
            (facts::owner_id(self.world, m) == Some(executor) && m.mounted()).then(|| MountPoint {
                path: bytes(m.path.as_path().as_os_str()),
                export: owner.export.clone(),
                sub_path: bytes(owner.sub_path.as_os_str()),
                read_only: m.flags.is_read_only,
                no_symlinks: m.flags.follows_no_links,
                no_holes: matches!(m.adapter(), Adapter::Sshfs | Adapter::Rclone),
                one_file_system: m.adapter() == Adapter::Volume,
            })
        });
        let spec = RunSpec {
            run_id: id.to_owned(),
            protocol: PROTOCOL_VERSION,
            mounts: mounts.collect(),
            ..RunSpec::default()
        };
        self.lowered.runs.push(ExecutorRun { executor, spec, next: 0 });
    }

    fn run_of(&self, part: &StagePart) -> usize {
        self.lowered
            .runs
            .iter()
            .position(|r| r.executor == part.executor)
            .expect("made for every part")
    }

    /// Adds pipes on the servers for every fused edge: part by part, or all parts into one.
    fn lay_pipes(&mut self) {
        for (index, edge) in
            self.shape.edges.iter().enumerate().filter(|(i, _)| self.plan.fused[*i])
        {
            let (Placement::Remote(from), Placement::Remote(to)) =
                (&self.plan.placements[edge.from.0], &self.plan.placements[edge.to.0])
            else {
                continue;
            };
            if matches!(self.plan.joins[edge.from.0], Join::By { .. }) {
                self.lay_pipe_of_join(index, edge.from.0, from);
                continue;
            }
            for (number, part) in from.iter().enumerate() {
                let run = self.run_of(part);
                let pipe = self.lowered.runs[run].pipe();
                self.writes.insert((index, number), pipe);
                if from.len() == to.len() {
                    self.reads.insert((index, number), pipe);
                }
            }
            if from.len() != to.len() {
                let run = self.run_of(&to[0]);
                let pipe = self.lowered.runs[run].pipe();
                let sources = (0..from.len()).map(|n| self.writes[&(index, n)]).collect();
                self.lowered.runs[run].spec.merges.push(Merge { sources, pipe });
                self.reads.insert((index, 0), pipe);
            }
        }
    }

    /// Arguments of a command on a server.
    fn argv(
        &self,
        enlisted: &Enlisted,
        reading: &ResolvedCommand,
        part: &StagePart,
    ) -> Vec<OsString> {
        let mut words = argv_of(&enlisted.argv, &reading.invocation, part);
        let is_remote = |place: &PathOwner| match place {
            PathOwner::At(_, _, mount) => self.world.table.mount(*mount).adapter() != Adapter::Bind,
            PathOwner::Here(_) => false,
        };
        if reading.places.iter().flatten().any(is_remote) {
            let after = words_of_command(&reading.invocation, &words);
            words.splice(after..after, reading.invocation.remote_arguments.iter().cloned());
        }
        words
    }

    fn add_command(&mut self, stage: usize, number: usize, part: &StagePart) {
        let enlisted = &self.commands[stage];
        let reading = self.readings[stage].as_ref().expect("only read commands are placed");
        let run = self.run_of(part);
        let id = self.lowered.runs[run].number();
        self.lowered.commands.insert((run, id), (stage, number));
        let mut fds: Vec<u32> = vec![0, 1, 2];
        fds.extend(enlisted.named_descriptors().map(|d| d.fd));
        fds.dedup();
        let Placement::Remote(parts) = &self.plan.placements[stage] else { return };
        let is_whole = parts.len() == 1;
        let place = CommandPlace { stage, number, run, executor: part.executor, is_whole };
        let descriptors = fds
            .iter()
            .filter_map(|&fd| self.descriptor(&place, enlisted, &reading.invocation, fd))
            .collect();
        let command = Stage {
            argv: self.argv(enlisted, reading, part).iter().map(|w| bytes(w)).collect(),
            descriptors,
            paths: paths_of(self.world, reading, part),
            guards: client_files::guards(
                enlisted,
                &reading.invocation,
                &reading.client_files,
                self.has_same_inodes(reading),
            ),
            watched_trees: watched_trees(self.world, reading),
            owners_of: owners_of(self.world.table, reading),
            attributes_of: self.attributes_of(&place, enlisted, reading),
            covered: self.covered(part.executor),
            local_output: self.local_output(&place, enlisted),
            ..bare(id, enlisted, &reading.invocation)
        };
        let zone = self.zone(enlisted, &reading.invocation, part.executor);
        let spec = &mut self.lowered.runs[run].spec;
        spec.stages.push(command);
        for file in reading.client_files.sent.iter().cloned().chain(zone) {
            if rule::holds(Rule::Environment)
                && !spec.client_files.iter().any(|f| f.path == file.path)
            {
                spec.client_files.push(file);
            }
        }
    }

    /// Returns true if files have the same inode numbers locally and on the server.
    fn has_same_inodes(&self, reading: &ResolvedCommand) -> bool {
        let mut places = reading.places.iter().flatten().chain(&reading.cwd);
        let same = places.all(|place| facts::shows(self.world, place, FileAttribute::Inode));
        same || !rule::holds(Rule::GitIndex)
    }

    /// Local mount points inside an executor's exports.
    fn covered(&self, executor: ExecutorId) -> Vec<Bytes> {
        let table = self.world.table;
        let serves = |mount: &&Mount| {
            facts::owner_id(self.world, mount) == Some(executor) && mount.mounted()
        };
        let below = table.mounts().filter(serves).flat_map(|mount| table.nested(&mount.path));
        let others = below.filter(|mount| facts::owner_id(self.world, mount) != Some(executor));
        others.map(|mount| bytes(mount.path.as_path().as_os_str())).collect()
    }

    /// Executor's file that the command's output is written to through the local mount.
    /// Single files that the command writes on sshfs mounts, by its words or by redirects that the
    /// server opens.
    fn attributes_of(
        &self,
        place: &CommandPlace,
        enlisted: &Enlisted,
        reading: &ResolvedCommand,
    ) -> Vec<Bytes> {
        let redirects = [1, 2].into_iter().filter_map(|fd| enlisted.descriptor(fd));
        let redirects = redirects
            .filter(|output| output.kind == DescriptorKind::File && output.writes())
            .filter(|output| self.file_there(place, output).is_some())
            .filter(|output| is_on_sshfs(self.world.table, &output.path))
            .map(|output| output.path.clone());
        let named = files_on_sshfs(self.world.table, reading);
        let all: BTreeSet<PathBuf> = named.chain(redirects).collect();
        all.iter().map(|path| bytes(path.as_os_str())).collect()
    }

    fn local_output(&self, place: &CommandPlace, enlisted: &Enlisted) -> Bytes {
        let output = enlisted.descriptor(1).filter(|output| {
            facts::file_site(self.world, output) == Some(place.executor)
                && self.file_there(place, output).is_none()
        });
        output.map_or_else(Bytes::new, |output| bytes(output.path.as_os_str()))
    }

    /// This machine's time zone file, for a command that shows times and an executor with another
    /// zone.
    fn zone(
        &self,
        enlisted: &Enlisted,
        invocation: &Invocation,
        executor: ExecutorId,
    ) -> Option<ClientFile> {
        if !self.other_zones.contains(&executor) || !facts::shows_local_time(enlisted, invocation) {
            return None;
        }
        let content = std::fs::read(LOCALTIME).ok()?.into();
        Some(ClientFile { path: Bytes::from_static(LOCALTIME.as_bytes()), content, mode: 0o644 })
    }

    fn descriptor(
        &mut self,
        place: &CommandPlace,
        enlisted: &Enlisted,
        invocation: &Invocation,
        fd: u32,
    ) -> Option<WireDescriptor> {
        let Some(local) = enlisted.descriptor(fd) else {
            let closed = rule::holds(Rule::ClosedDescriptors);
            let source = if closed {
                Source::Closed(true)
            } else {
                Source::NullFlags(nix::libc::O_RDWR.cast_unsigned())
            };
            return Some(WireDescriptor { fd, source: Some(source) });
        };
        if fd > 0
            && matches!(self.plan.joins[place.stage], Join::By { .. })
            && !place.is_whole
            && local.writes()
        {
            return Some(WireDescriptor { fd, source: Some(self.output_of_part(place, local)) });
        }
        let unread = fd == 0 && invocation.stdin == StdinUse::Unused && rule::holds(Rule::Stdin);
        let as_pipe = fd == 0 && !rule::holds(Rule::DescriptorKinds);
        let source = if let Some(source) = self.joined(place, fd) {
            source
        } else if local.kind == DescriptorKind::Null || unread {
            Source::NullFlags(local.flags & ACCESS_AND_STATUS)
        } else if let Some(earlier) = same_output(enlisted, local) {
            Source::DuplicateOf(earlier)
        } else if let Some(file) = self.file_there(place, local).filter(|_| !as_pipe) {
            Source::File(file)
        } else if fd == 0 || (fd > 2 && !local.writes()) {
            self.inlet(place, fd)
        } else {
            self.outlet(place, local, enlisted)
        };
        Some(WireDescriptor { fd, source: Some(source) })
    }

    /// End of a pipe on the server.
    fn joined(&self, place: &CommandPlace, fd: u32) -> Option<Source> {
        for (index, edge) in
            self.shape.edges.iter().enumerate().filter(|(i, _)| self.plan.fused[*i])
        {
            if edge.from == (place.stage, fd) {
                return self.writes.get(&(index, place.number)).map(|p| Source::PipeWrite(*p));
            }
            if edge.to == (place.stage, fd) {
                return self.reads.get(&(index, place.number)).map(|p| Source::PipeRead(*p));
            }
        }
        None
    }

    /// A redirect that the server opens itself, at the shell's offset.
    fn file_there(&self, place: &CommandPlace, local: &Descriptor) -> Option<File> {
        if !place.is_whole || facts::site_by_name(self.world, local) != Some(place.executor) {
            return None;
        }
        let around = Surroundings {
            edges: &self.shape.edges,
            index: place.stage,
            shared_outputs: &self.shape.shared_outputs[place.stage],
            shared_inputs: &self.shape.shared_inputs[place.stage],
        };
        if local.writes() && !facts::opens_there(self.world, local, &around) {
            return None;
        }
        Some(File {
            path: bytes(local.path.as_os_str()),
            flags: local.flags & ACCESS_AND_STATUS,
            offset: if rule::holds(Rule::Offsets) { local.offset } else { 0 },
            report_offset: rule::holds(Rule::Offsets),
        })
    }

    fn inlet(&mut self, place: &CommandPlace, fd: u32) -> Source {
        let run = &mut self.lowered.runs[place.run];
        let (stream, pipe) = (run.number(), run.pipe());
        run.spec.inlets.push(Inlet { stream, pipe });
        self.lowered.inputs.insert((place.stage, fd), (place.run, stream));
        Source::PipeRead(pipe)
    }

    fn outlet(&mut self, place: &CommandPlace, local: &Descriptor, enlisted: &Enlisted) -> Source {
        let run = &mut self.lowered.runs[place.run];
        let stream = run.number();
        let (source, descriptor) =
            if local.kind == DescriptorKind::Tty && rule::holds(Rule::Terminal) {
                let id = run.number();
                let size = enlisted.window.map(|w| WindowSize {
                    rows: w.rows,
                    columns: w.columns,
                    x_pixels: 0,
                    y_pixels: 0,
                });
                run.spec.ptys.push(Pty { id, size });
                (id, Source::Pty(id))
            } else {
                let pipe = run.pipe();
                (pipe, Source::PipeWrite(pipe))
            };
        run.spec.outlets.push(Outlet {
            stream,
            sources: vec![source],
            initial_credit_bytes: OUTPUT_CREDIT_BYTES,
        });
        self.lowered.outputs.entry((place.stage, local.fd)).or_default().push((place.run, stream));
        descriptor
    }
}

/// Flags of F_GETFL that another open(2) can repeat: access mode, O_APPEND, O_NONBLOCK.
const ACCESS_AND_STATUS: u32 =
    (nix::libc::O_ACCMODE | nix::libc::O_APPEND | nix::libc::O_NONBLOCK).cast_unsigned();

struct CommandPlace {
    stage: usize,
    number: usize,
    run: usize,
    executor: ExecutorId,
    /// Its output is the stage's whole output.
    is_whole: bool,
}

/// Earlier standard descriptor that shares this output's open file description.
fn same_output(enlisted: &Enlisted, local: &Descriptor) -> Option<u32> {
    let one = enlisted.descriptor(1).filter(|_| local.fd == 2)?;
    if !rule::holds(Rule::Stderr) {
        return Some(1);
    }
    let same = match local.kind {
        DescriptorKind::Pipe | DescriptorKind::Tty | DescriptorKind::Socket => {
            one.identity == local.identity && one.writes()
        }
        _ => local.same_as == Some(1),
    };
    same.then_some(1)
}

fn bytes(text: &OsStr) -> Bytes {
    Bytes::copy_from_slice(text.as_bytes())
}

/// Process attributes of a command, without descriptors and paths.
fn bare(id: u32, enlisted: &Enlisted, invocation: &Invocation) -> Stage {
    let limit = |&(resource, soft, hard): &(u32, u64, u64)| ResourceLimit { resource, soft, hard };
    Stage {
        id,
        program: enlisted.name.clone(),
        env: environment_of(enlisted, invocation),
        cwd: bytes(enlisted.cwd.as_os_str()),
        umask: if rule::holds(Rule::Environment) { enlisted.umask } else { 0o022 },
        ignored_signals: if rule::holds(Rule::InitSignals) { enlisted.ignored_signals } else { 0 },
        blocked_signals: if rule::holds(Rule::InitSignals) { enlisted.blocked_signals } else { 0 },
        limits: enlisted.limits.iter().map(limit).collect(),
        nice: if rule::holds(Rule::Environment) { enlisted.nice } else { 0 },
        ..Stage::default()
    }
}

/// Arguments of one part of a command: its own operands, and those of `when_split`.
#[must_use]
pub fn argv_of(argv: &[OsString], invocation: &Invocation, part: &StagePart) -> Vec<OsString> {
    let mut words = argv.to_vec();
    let (Some(split), Some(kept)) = (&invocation.split, &part.operands) else { return words };
    for operand in split.operands.iter().rev().filter(|o| !kept.contains(o)) {
        words.remove(*operand);
    }
    let after = words_of_command(invocation, &words);
    words.splice(after..after, split.add_arguments.iter().cloned());
    words
}

/// Number of words of the command's name, including a subcommand.
fn words_of_command(invocation: &Invocation, words: &[OsString]) -> usize {
    invocation.command.split(' ').count().min(words.len())
}

/// Trees that the command may change, on mounts with caches.
fn watched_trees(world: &World<'_>, reading: &ResolvedCommand) -> Vec<WatchedTree> {
    let tree = |(path, mount): &(PathBuf, MountId)| WatchedTree {
        path: bytes(path.as_os_str()),
        up_to: reading.invocation.searches_up.clone(),
        only: reading.invocation.changes_only.clone(),
        grows: reading.invocation.only_grows.clone(),
        own: reading.invocation.own_directories.clone(),
        replaces: reading.invocation.replaces_files,
        made: false,
        far: facts::round_trip_to(world, world.table.mount(*mount))
            .is_some_and(|time| time >= BEYOND_A_TICK),
    };
    let places = watched_places(world.table, reading).into_iter();
    let made = made_places(world.table, reading).into_iter().map(|(path, _)| WatchedTree {
        path: bytes(path.as_os_str()),
        made: true,
        ..WatchedTree::default()
    });
    places.map(|place| tree(&place)).chain(made).collect()
}

/// Directories above single files that the command writes. Their listings are invalidated, which
/// takes their owners on some mounts.
fn owners_of(table: &MountTable, reading: &ResolvedCommand) -> Vec<Bytes> {
    let above = directories_written(table, reading);
    above.iter().map(|directory| bytes(directory.as_os_str())).collect()
}

fn environment_of(enlisted: &Enlisted, invocation: &Invocation) -> Vec<EnvVar> {
    let terminal = enlisted.descriptor(1).is_some_and(|d| d.kind == DescriptorKind::Tty);
    let wanted = |name: &OsStr| {
        if !rule::holds(Rule::Environment) {
            return false;
        }
        let listed =
            COMMON_ENVIRONMENT.into_iter().chain(invocation.environment.iter().map(String::as_str));
        listed.into_iter().any(|pattern| matches(pattern, name)) || (terminal && name == "TERM")
    };
    let forwarded = enlisted.env.iter().filter(|(name, _)| wanted(name));
    forwarded.map(|(name, value)| EnvVar { name: bytes(name), value: bytes(value) }).collect()
}

/// Matches a name, or a prefix followed by `*`.
fn matches(pattern: &str, name: &OsStr) -> bool {
    match pattern.strip_suffix('*') {
        Some(prefix) => name.as_bytes().starts_with(prefix.as_bytes()),
        None => name == pattern,
    }
}

/// Names that a command creates in directories for the files that it copies: `cp a d` creates
/// `d/a`, with `--parents` the whole path, and for a directory's content (`d/.`) anything.
fn names_made(reading: &ResolvedCommand) -> impl Iterator<Item = PathBuf> {
    let of_kind =
        |kind: FileKind| reading.invocation.files.iter().filter(move |file| file.kind == kind);
    let on_mount = |file: &&FileUse| {
        let mut places = reading.invocation.files.iter().zip(&reading.places);
        places.any(|(other, place)| {
            std::ptr::eq(other, *file) && matches!(place, Some(PathOwner::At(..)))
        })
    };
    let into = of_kind(FileKind::OutputDir).filter(on_mount);
    into.flat_map(move |directory| {
        let sources = [FileKind::InputFile, FileKind::InputDir].into_iter().flat_map(of_kind);
        sources.flat_map(|source| made_by(Path::new(&directory.path), &source.path))
    })
}

fn made_by(directory: &Path, source: &OsStr) -> BTreeSet<PathBuf> {
    let whole = Path::new(source).strip_prefix("/").unwrap_or(Path::new(source));
    let name = match source.as_bytes() {
        b"." | b".." => None,
        bytes if bytes.ends_with(b"/.") || bytes.ends_with(b"/..") => None,
        _ => whole.file_name(),
    };
    let goes_up = whole.components().any(|part| part == Component::ParentDir);
    let below = Some(directory.join(whole)).filter(|_| !goes_up);
    let beside = name.map_or_else(|| directory.to_owned(), |name| directory.join(name));
    below.into_iter().chain([beside]).collect()
}

/// Returns true if a command may replace a file beside one that it writes by name, where the mount
/// shows a symlink. For trees, the executor reports each name's type.
fn puts_beside(world: &World<'_>, file: &FileUse, place: Option<&PathOwner>) -> bool {
    let is_one = file.kind.writes() && !file.kind.recursive() && file.kind != FileKind::NewDir;
    let is_sshfs = |mount: MountId| world.table.mount(mount).adapter() == Adapter::Sshfs;
    is_one && matches!(place, Some(PathOwner::At(_, _, mount)) if is_sshfs(*mount))
}

/// Returns true if the kernel here takes the umask off the permissions of new files. On volumes and
/// NFS, the server does.
fn masks(world: &World<'_>, place: &PathOwner) -> bool {
    matches!(
        place,
        PathOwner::At(_, _, mount) if world.table.mount(*mount).adapter() == Adapter::Sshfs
    )
}

fn paths_of(world: &World<'_>, reading: &ResolvedCommand, part: &StagePart) -> Vec<PathUse> {
    let last = part.operands.as_ref().and_then(|o| o.last()).filter(|_| part.needs_newline);
    let splittable = reading.invocation.split.as_ref().map_or(&[][..], |s| &s.operands);
    let kept = |file: &FileUse| match &part.operands {
        Some(operands) => operands.contains(&file.argument) || !splittable.contains(&file.argument),
        None => true,
    };
    let files = reading.invocation.files.iter().zip(&reading.places);
    let files =
        files.filter(|(file, place)| matches!(place, Some(PathOwner::At(..))) && kept(file));
    let mut paths: Vec<PathUse> = files
        .map(|(file, place)| PathUse {
            path: bytes(&file.path),
            recursive: file.kind.recursive(),
            no_follow: file.no_follow,
            ends_in_newline: last == Some(&file.argument),
            whole_file: part.whole_files && splittable.contains(&file.argument),
            plain_symlinks_below: file.kind.recursive()
                && !file.kind.writes()
                && reading.invocation.shows.contains(&FileAttribute::Symlinks)
                && place.as_ref().is_some_and(|p| facts::contains_symlinks(world, p)),
            no_symlinks: !file.no_follow
                && place.as_ref().is_some_and(|p| facts::contains_symlinks(world, p)),
            written_over: false,
            no_links_beside: puts_beside(world, file, place.as_ref()),
            keeps_owner: file.kind == FileKind::InoutFile && !file.no_follow,
            takes_umask: file.kind.writes() && place.as_ref().is_some_and(|p| masks(world, p)),
        })
        .collect();
    paths.extend(names_made(reading).map(|path| PathUse {
        path: bytes(path.as_os_str()),
        no_follow: true,
        written_over: true,
        ..PathUse::default()
    }));
    if let Some(cwd) = &reading.cwd {
        paths.push(PathUse {
            path: Bytes::from_static(b"."),
            recursive: true,
            takes_umask: reading.invocation.current_dir == CurrentDir::Writes && masks(world, cwd),
            ..PathUse::default()
        });
    }
    paths
}
