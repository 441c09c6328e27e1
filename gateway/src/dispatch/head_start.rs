//! A script's commands, begun before its shell comes to them: the first one while the shell starts, each further one together with
//! those before it, unless it reads what they write. By the text it is known what will come; where that does nothing but
//! read files of mounts, its output waits here until it comes (docs/coherence.md). It is handed over only to a pipeline that would have
//! been started by the very same specification, if the shell has run nothing else in between, and if what it has read is still
//! the same; else it is given up, as a run that nobody reads.

mod confirm;
mod listing;

use std::{
    collections::{HashSet, VecDeque},
    ffi::{OsStr, OsString},
    fs,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use bytes::Bytes;
use fs_mapper::{Resolution, coherence::Adapter};
use nix::libc::{O_ACCMODE, O_APPEND, O_RDONLY, O_WRONLY};
use posh_proto::{
    executor::{Credit, File, Release, RunSpec, WrittenFile, descriptor::Source, run_input},
    gateway::{CertainCommand, PlannedStage},
    stage::Enlist,
};
use tokio::task::JoinHandle;

use super::{
    Planned, Subject, again, lower,
    start::{self, Flight, Refusal},
    world,
};
use crate::{
    aside::aside_if_far,
    assembly::{Edge, Pipeline, Shape},
    enlisted::{Descriptor, Enlisted, Kind, Pid},
    executors::Connection,
    facts,
    look_ahead::{Before, Found, Listed},
    lower::Lowered,
    plan::{ExecutorId, Placement},
    session::Session,
    state::{Gateway, View},
    tools::program_on_path,
    trace::Tracer,
};

/// A shell that has not come to its next command by then waits for something: nothing is held ready for it.
const HELD: Duration = Duration::from_secs(10);

/// The same for what is begun while another command is still to come or at work: nobody can tell how long after that it was to run.
const AHEAD: Duration = Duration::from_millis(100);

/// Of each output so much may come before it is wanted.
const CREDIT_BYTES: u64 = 256 << 10;

/// So many wait at once for a shell.
const AT_ONCE: usize = 4;

/// Signals 32 and 33 (nptl(7)).
const OF_THE_LIBRARY: u64 = 3 << 31;

/// What a session's text says will come, and what is begun of it.
#[derive(Debug, Default)]
pub struct HeadStart(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// `None` when nothing is known of what comes.
    text: Option<Text>,
    /// So many of its commands have come.
    come: usize,
    /// So many times something was to be begun: an executor takes a run's name only once, also where it refuses the run.
    attempts: usize,
    /// The last of these, while it is at work; what runs here until the next one comes.
    at_work: Option<AtWork>,
    /// The next ones.
    begun: VecDeque<Begun>,
}

/// What has come and is not done.
#[derive(Debug)]
struct AtWork {
    /// As the text has it.
    command: CertainCommand,
    /// It writes nothing on mounts.
    is_silent: bool,
}

/// What may be begun.
struct Next {
    /// How many come before it.
    number: usize,
    attempt: usize,
    command: CertainCommand,
    /// Those before it that are not done, and may write on mounts.
    beside: Vec<CertainCommand>,
    text: Text,
}

/// The beginning of a text, and of whom it is.
#[derive(Debug, Clone)]
pub struct Text {
    /// Those that will come, in order, whatever becomes of each.
    pub commands: VecDeque<CertainCommand>,
    /// Their variables.
    pub environment: Vec<Bytes>,
    /// What patterns become.
    pub listed: Listed,
    /// The shell's process.
    pub shell: Enlist,
    /// Its PATH.
    pub search: PathBuf,
}

impl Text {
    /// A process of the shell's.
    fn shell(&self) -> Enlisted {
        let (env, shell) = (self.environment.clone(), self.shell.clone());
        Enlisted::from(Enlist { env, childless: true, pid: 0, ..shell })
    }
}

/// A run that waits for its stages.
#[derive(Debug)]
pub struct Begun {
    executor: ExecutorId,
    run_id: String,
    /// As it was asked for, and as the stages' own would be.
    spec: RunSpec,
    /// As the text has it.
    command: CertainCommand,
    /// The shell has run nothing before it.
    is_first: bool,
    /// It writes nothing there.
    is_silent: bool,
    /// When, and how long it counts after that, unless its executor confirms that what it reads is as it was.
    began: Instant,
    holds: Duration,
    /// Ends with this.
    flight: Option<JoinHandle<Result<Flight, Refusal>>>,
}

impl Drop for Begun {
    fn drop(&mut self) {
        self.flight.iter().for_each(JoinHandle::abort);
    }
}

impl HeadStart {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What will come.
    pub fn expect(&self, text: Text) {
        self.lock().text = Some(text);
    }

    /// The command that may be begun next.
    fn next(&self) -> Option<Next> {
        let mut state = self.lock();
        state.attempts += 1;
        let text = state.text.as_ref()?;
        if state.begun.len() == AT_ONCE {
            return None;
        }
        let command = text.commands.get(state.begun.len())?.clone();
        let at_work = state.at_work.iter().map(|at_work| (at_work.is_silent, &at_work.command));
        let begun = state.begun.iter().map(|begun| (begun.is_silent, &begun.command));
        let beside = at_work.chain(begun).filter(|(is_silent, _)| !is_silent).map(|(_, command)| command.clone());
        let text = Text { commands: VecDeque::new(), ..text.clone() };
        let (number, attempt) = (state.come + state.begun.len(), state.attempts);
        Some(Next { number, attempt, command, beside: beside.collect(), text })
    }

    /// Whether that command is still the next one.
    fn is_next(&self, number: usize) -> bool {
        self.lock().is_next(number)
    }

    fn has_come(&self, number: usize) -> bool {
        self.lock().come > number
    }

    fn offer(&self, number: usize, begun: Begun) {
        let mut state = self.lock();
        if state.is_next(number) {
            state.begun.push_back(begun);
        }
    }

    /// That command has not come: none that follows it will soon.
    fn give_up(&self, number: usize) {
        let mut state = self.lock();
        if state.come <= number {
            state.begun.clear();
        }
    }

    /// Nothing comes any more.
    pub fn end(&self) {
        let mut state = self.lock();
        state.text = None;
        state.at_work = None;
        state.begun.clear();
    }

    /// What was begun, for a pipeline of the session that comes now. From one on that is not the expected one, nothing is known any more.
    /// Also given is how many have come with it.
    pub fn take(&self, pipeline: &Pipeline) -> (usize, Option<Begun>) {
        let mut state = self.lock();
        let begun = state.begun.pop_front();
        state.come += 1;
        let expected = state.text.as_mut().and_then(|text| text.commands.pop_front());
        let Some(command) = expected.filter(|expected| !pipeline.stays && is_that(pipeline, expected)) else {
            state.text = None;
            state.at_work = None;
            state.begun.clear();
            return (state.come, None);
        };
        state.at_work = Some(AtWork { command, is_silent: begun.as_ref().is_some_and(|begun| begun.is_silent) });
        (state.come, begun)
    }

    /// What has come last has done all that it does.
    pub fn is_done(&self) {
        self.lock().at_work = None;
    }

    /// The same, if so many have come.
    pub fn is_done_with(&self, come: usize) {
        let mut state = self.lock();
        if state.come == come {
            state.at_work = None;
        }
    }

    /// How long what is begun counts. The next command waits for nothing but its own redirect, if for anything; before any other nobody
    /// can tell how long.
    fn holds(&self, number: usize, round_trip: Duration) -> Duration {
        let state = self.lock();
        if state.come == number && state.at_work.is_none() { HELD } else { AHEAD + 2 * round_trip }
    }

    fn is_at_work(&self) -> bool {
        self.lock().at_work.is_some()
    }
}

impl State {
    fn is_next(&self, number: usize) -> bool {
        number == self.come + self.begun.len() && self.text.is_some()
    }
}

/// Whether a pipeline may be what a text says.
fn is_that(pipeline: &Pipeline, command: &CertainCommand) -> bool {
    let is_alike = |(stage, told): (&Enlisted, &PlannedStage)| {
        let words =
            |argv: &[OsString]| argv.iter().map(|word| Bytes::copy_from_slice(word.as_bytes())).collect::<Vec<_>>();
        let has_words = told.has_pattern || words(&stage.argv) == told.argv;
        has_words && stage.cwd.as_os_str().as_bytes() == command.cwd && told.argv.first() == words(&stage.argv).first()
    };
    let stages = pipeline.stages.iter().map(|stage| &*stage.enlisted);
    pipeline.stages.len() == command.stages.len() && stages.zip(&command.stages).all(is_alike)
}

/// Has the executor tell what is in directories whose names a command of the text has patterns for.
pub fn list(gateway: &Arc<Gateway>, session: &Arc<Session>, text: &Text, wanted: Vec<(PathBuf, Found)>) {
    let has_pattern = |command: &CertainCommand| command.stages.iter().any(|stage| stage.has_pattern);
    let is_small = wanted.len() <= AT_ONCE && text.commands.iter().take(2).any(has_pattern);
    for (number, (directory, found)) in wanted.into_iter().enumerate().filter(|_| is_small) {
        let (gateway, session, text) = (Arc::clone(gateway), Arc::clone(session), text.clone());
        tokio::spawn(async move {
            let listed = Box::pin(listing::names(&gateway, &session, &text, (number, &directory)));
            let names = tokio::time::timeout(HELD, listed).await.ok().flatten();
            tracing::debug!(session = session.id, directory = %directory.display(), is_known = names.is_some(), "asked what is there");
            names.into_iter().for_each(|names| found.tell(names));
        });
    }
}

/// Begins the next commands of a session, as far as they may be begun: its shell has just been started, or nothing is left to do of what was run
/// `before` but to tell the mounts.
pub async fn begin(gateway: Arc<Gateway>, session: Arc<Session>, before: Vec<Arc<Enlisted>>) {
    // What is to be told of the one before goes first.
    tokio::task::yield_now().await;
    let mut last = None;
    while let Some(next) = session.head_start.next() {
        let number = next.number;
        let begun = Box::pin(prepare(&gateway, &session, next, &before)).await;
        let Some(begun) = begun else {
            // It has come by now: the one after it may be begun beside it.
            if session.head_start.has_come(number) {
                continue;
            }
            break;
        };
        tracing::debug!(session = session.id, number, "a command is begun before it comes");
        session.head_start.offer(number, begun);
        last = Some(number);
    }
    if let Some(number) = last {
        tokio::time::sleep(HELD).await;
        while session.head_start.is_at_work() {
            tokio::time::sleep(HELD).await;
        }
        session.head_start.give_up(number);
    }
}

async fn prepare(
    gateway: &Arc<Gateway>,
    session: &Session,
    Next { number, attempt, command, beside, text }: Next,
    before: &[Arc<Enlisted>],
) -> Option<Begun> {
    let shell = text.shell();
    let told = command.clone();
    let command = text.listed.expand(command, facts::collates_by_bytes(&shell)).await?;
    let view = gateway.view();
    let outputs_of =
        |command| Some(Before::read(&view.table, &view.library, command, &text.environment, &text.search)?.outputs);
    let outputs = outputs_of(&command)?;
    // Where one before it may change anything else, there is nothing to be begun.
    let written: Vec<PathBuf> = beside.iter().map(outputs_of).collect::<Option<Vec<_>>>()?.concat();
    let commands = imagine(&command, &shell, &text.search)?;
    let run_id = format!("{}-ahead-{number}.{attempt}", session.id);
    let Ready { executor, connection, mut spec } =
        ready(gateway, session, &commands, (before, &written), &run_id).await?;
    // What it writes on mounts by way of this machine can't be held.
    let is_there = |file: &&Descriptor| matches!(view.table.resolve(&file.path, Path::new("/")), Resolution::Owned(_));
    let open = commands.iter().flat_map(|command| &command.descriptors);
    let redirected = open.filter(|d| d.fd <= 2 && d.kind == Kind::File && d.writes()).filter(is_there).count();
    let can_be_held = redirected == again::redirects(&spec).count() && can_be_held(&spec);
    // Of a tree nobody can tell whether it is as it was.
    let is_tree = spec.stages.iter().flat_map(|stage| &stage.paths).any(|used| used.recursive);
    let can_be_held = can_be_held && (beside.is_empty() && spec.volumes.is_empty() || !is_tree);
    if !can_be_held || !outputs.iter().all(|path| is_new(&view, path)) || !session.head_start.is_next(number) {
        return None;
    }
    let round_trip = connection.as_ref().map_or(Duration::ZERO, |connection| connection.rtt);
    let is_silent = redirected == 0;
    // What volumes show is never old: their files are looked at once more.
    let has_volumes = !spec.volumes.is_empty();
    spec.to_be_confirmed = !beside.is_empty() || has_volumes;
    let tracer = Tracer::new(session.trace.clone(), 0);
    let sent = with_little_credit(held(RunSpec { trace: tracer.is_on(), ahead: true, ..spec.clone() }));
    let run_id = spec.run_id.clone();
    let flight = start::open_in_time(gateway.executors.get(executor), connection, sent, tracer);
    let flight = match !beside.is_empty() {
        // It is refused where it may not be: then it can still be begun when those before it are done.
        true => {
            let begun = Ok(flight.await.ok()?);
            tokio::spawn(async { begun })
        }
        false => tokio::spawn(flight),
    };
    Some(Begun {
        executor,
        run_id,
        spec: comparable(spec),
        command: told,
        is_first: number == 0,
        is_silent,
        began: Instant::now(),
        holds: match (beside.is_empty() && !has_volumes, is_silent) {
            (true, true) => session.head_start.holds(number, round_trip),
            // What has to be released can be confirmed with that.
            (true, false) => AHEAD + 2 * round_trip,
            (false, _) => Duration::ZERO,
        },
        flight: Some(flight),
    })
}

/// What can be started for a command.
struct Ready {
    executor: ExecutorId,
    connection: Option<Arc<Connection>>,
    spec: RunSpec,
}

/// The one run of a pipeline, if it is one, and reads nothing but what may be read a moment sooner.
async fn ready(
    gateway: &Gateway,
    session: &Session,
    commands: &[Arc<Enlisted>],
    (before, written): (&[Arc<Enlisted>], &[PathBuf]),
    run_id: &str,
) -> Option<Ready> {
    let view = gateway.view();
    let world = world(gateway, &view);
    let edges = (1..commands.len()).map(|index| Edge { from: (index - 1, 1), to: (index, 0) }).collect();
    let shape = Shape::unshared(commands.len(), edges);
    let tracer = &Tracer::default();
    let subject = Subject { commands, shape: &shape, split: session.split, tracer, before };
    let planned = Planned::make(gateway, &world, &subject).await;
    let places = planned.readings.iter().flatten().flat_map(|reading| reading.places.iter().flatten());
    let inputs = commands.iter().flat_map(|command| command.descriptor(0)).filter(|input| input.kind == Kind::File);
    let mut read = places.filter_map(|place| place.path()).chain(inputs.map(|input| input.path.as_path()));
    let is_all_there = planned.plan.placements.iter().all(|placement| matches!(placement, Placement::Remote(_)));
    let place = |path: &Path| match view.table.resolve(path, Path::new("/")) {
        Resolution::Owned(owned) => Some(owned.client_path),
        Resolution::Local { .. } => None,
    };
    let written: Vec<_> = written.iter().filter_map(|path| place(path)).collect();
    let is_left_alone = |path: &Path| place(path).is_none_or(|place| !written.contains(&place));
    if !is_all_there || !read.all(|path| can_wait(&view, path) && is_left_alone(path)) {
        tracing::debug!(run_id, placements = ?planned.plan.placements, "it is not begun");
        return None;
    }
    let lowered = lower(gateway, &world, (commands, &shape), &planned, run_id);
    let (executor, spec) = (lowered.runs.first()?.executor, only_run(&lowered)?.clone());
    Some(Ready { executor, connection: planned.connections.get(&executor).cloned(), spec })
}

/// What is written there waits for the shell to have opened it, if it can: not where what is read are trees, in which it may be found.
fn can_be_held(spec: &RunSpec) -> bool {
    let writes = |file: &File| file.flags.cast_signed() & O_ACCMODE == O_WRONLY && file.offset == 0;
    let mut paths = spec.stages.iter().flat_map(|stage| &stage.paths);
    let mut redirects = again::redirects(spec).peekable();
    redirects.peek().is_none() || redirects.all(|(_, _, file)| writes(file)) && !paths.any(|used| used.recursive)
}

/// The same with little credit: nobody reads what comes before its stages do, and all runs share one connection.
fn with_little_credit(mut spec: RunSpec) -> RunSpec {
    for outlet in &mut spec.outlets {
        outlet.initial_credit_bytes = outlet.initial_credit_bytes.min(CREDIT_BYTES);
    }
    spec
}

/// The same with its redirects held.
fn held(mut spec: RunSpec) -> RunSpec {
    let descriptors = spec.stages.iter_mut().flat_map(|stage| &mut stage.descriptors);
    for file in descriptors.filter_map(|descriptor| match &mut descriptor.source {
        Some(Source::File(file)) => Some(file),
        _ => None,
    }) {
        file.held = file.flags.cast_signed() & O_ACCMODE != O_RDONLY;
    }
    spec
}

/// The specification of a pipeline that is one run with no input from here, and joined nowhere.
fn only_run(lowered: &Lowered) -> Option<&RunSpec> {
    let [run] = lowered.runs.as_slice() else { return None };
    (lowered.joins.is_empty() && lowered.inputs.is_empty()).then_some(&run.spec)
}

/// A specification without its name, and without what each shell makes anew and no command can tell: the order of variables,
/// and what becomes of the signals that the C library has for itself (bash ignores them).
fn comparable(mut spec: RunSpec) -> RunSpec {
    spec.run_id.clear();
    spec.trace = false;
    // What they have given back since, they say when it is released.
    spec.volumes.iter_mut().for_each(|volume| volume.returned.clear());
    for stage in &mut spec.stages {
        stage.env.sort_by(|a, b| a.name.cmp(&b.name));
        stage.ignored_signals &= !OF_THE_LIBRARY;
    }
    spec
}

/// Whether what lies there may be read a moment sooner: nothing of what this machine has written waits to be sent, by this file system,
/// or since it has just been settled.
fn can_wait(view: &View, path: &Path) -> bool {
    match view.table.resolve(path, Path::new("/")) {
        Resolution::Owned(owned) => {
            matches!(view.table.mount(owned.mount).adapter(), Adapter::Sshfs | Adapter::Bind | Adapter::Volume)
        }
        Resolution::Local { .. } => false,
    }
}

/// Whether the shell will find nothing there that it empties: that might be what the command reads, by another name; nor anything that it
/// waits for. Of a file on a mount its executor looks, when it is open.
fn is_new(view: &View, output: &Path) -> bool {
    let is_owned = matches!(view.table.resolve(output, Path::new("/")), Resolution::Owned(_));
    let is_empty = || fs::metadata(output).map_or(true, |about| about.is_file() && about.len() == 0);
    is_owned || aside_if_far(&view.table, &[output.to_owned()], is_empty)
}

/// The stages as their processes would enlist.
fn imagine(command: &CertainCommand, shell: &Enlisted, search: &Path) -> Option<Vec<Arc<Enlisted>>> {
    let last = command.stages.len().checked_sub(1)?;
    let stage = |(index, stage): (usize, &PlannedStage)| {
        let argv: Vec<OsString> = stage.argv.iter().map(os).collect();
        let name = argv.first()?.to_str()?.to_owned();
        let mut command = Enlisted {
            program: program_on_path(Some(search.as_os_str()), &name, &HashSet::new())?,
            name,
            argv,
            cwd: os(&command.cwd).into(),
            ..shell.clone()
        };
        let append = if stage.appends { O_APPEND } else { 0 };
        let ends =
            [(0, &stage.stdin_path, index > 0, O_RDONLY), (1, &stage.stdout_path, index < last, O_WRONLY | append)];
        for (fd, path, is_joined, flags) in ends {
            let path = (!path.is_empty()).then(|| command.cwd.join(os(path)));
            let imagined = match path {
                Some(path) if path == Path::new("/dev/null") => Some((Kind::Null, path)),
                Some(path) => Some((Kind::File, path)),
                None => is_joined.then(|| (Kind::Pipe, PathBuf::new())),
            };
            if let Some((kind, path)) = imagined {
                command.descriptors.retain(|descriptor| descriptor.fd != fd);
                let others = command.descriptors.iter_mut().filter(|descriptor| descriptor.same_as == Some(fd));
                others.for_each(|descriptor| descriptor.same_as = None);
                command.descriptors.push(Descriptor::imagined(fd, kind, path, flags));
            }
        }
        command.descriptors.sort_by_key(|descriptor| descriptor.fd);
        Some(Arc::new(command))
    };
    command.stages.iter().enumerate().map(stage).collect()
}

fn os(bytes: &Bytes) -> OsString {
    OsStr::from_bytes(bytes).to_owned()
}

impl Begun {
    /// The flight, if it is what this pipeline would start now, or why it was refused. The specification then has the name by which that was done.
    pub async fn join(
        mut self,
        gateway: &Gateway,
        pipeline: &Pipeline,
        session: &Session,
        lowered: &mut Lowered,
    ) -> Option<Result<Flight, Refusal>> {
        let to_be_confirmed = self.spec.to_be_confirmed;
        let now = only_run(lowered).map(|spec| comparable(RunSpec { to_be_confirmed, ..spec.clone() }));
        let is_same = now.as_ref() == Some(&self.spec) && lowered.runs[0].executor == self.executor;
        if !is_same || self.is_first && !is_first(pipeline, session) {
            tracing::debug!(session = session.id, is_same, begun = ?self.spec, ?now, "a command is another one than was begun");
            return None;
        }
        let is_old = self.began.elapsed() > self.holds;
        let can_wait = !self.is_silent || to_be_confirmed;
        if is_old && !can_wait {
            tracing::debug!(session = session.id, "a command comes too late for what was begun");
            return None;
        }
        let mut flight = match self.flight.take()?.await.ok()? {
            Ok(flight) => flight,
            // Nothing is known then; or there was no room for what nobody waited for, or for what waits.
            Err(refusal) if refusal.is_of_that_moment() || can_wait => return None,
            Err(refusal) => return Some(Err(refusal)),
        };
        let spec = &mut lowered.runs[0].spec;
        let begun = held(RunSpec { run_id: std::mem::take(&mut self.run_id), ..spec.clone() });
        if is_old {
            let executor = gateway.executors.get(self.executor);
            match confirm::release_if_unchanged(executor, &mut flight, &begun).await {
                Ok(true) => {}
                Ok(false) => {
                    tracing::debug!(session = session.id, "what was begun has read something that is another one now");
                    return None;
                }
                Err(refusal) => return Some(Err(refusal)),
            }
        }
        *spec = begun;
        // How much is before what is appended, nobody has looked.
        let written = again::redirects(spec).filter(|(.., file)| file.flags.cast_signed() & O_APPEND == 0);
        let written = written.map(|(stage, fd, file)| WrittenFile { stage, fd, size: file.offset });
        flight.written_files = written.collect();
        // The shell has them open, and all that comes is read from now on.
        flight.told_first.push(run_input::Kind::Release(Release::default()));
        let credits = spec.outlets.iter().map(|outlet| Credit {
            stream: outlet.stream,
            bytes: outlet.initial_credit_bytes.saturating_sub(CREDIT_BYTES),
        });
        flight.told_first.extend(credits.map(run_input::Kind::Credit));
        Some(Ok(flight))
    }
}

/// Whether the shell has not waited for any process: nothing that it runs one after the other has run before.
fn is_first(pipeline: &Pipeline, session: &Session) -> bool {
    let is_first = |pid: Pid| {
        let own = Stat::of(pid)?;
        // The shell may become its last command.
        let shell = if own.is_shell_of(session) { own } else { Stat::of(own.parent)? };
        Some(shell.is_shell_of(session) && shell.waited_for_nobody)
    };
    pipeline.stages.iter().all(|stage| is_first(stage.enlisted.pid) == Some(true))
}

/// Of proc_pid_stat(5).
pub(super) struct Stat {
    pid: Pid,
    pub(super) parent: Pid,
    /// No page faults of children that were waited for, and every process has some.
    waited_for_nobody: bool,
}

impl Stat {
    /// Whether it is a session's shell.
    pub(super) fn is_shell_of(&self, session: &Session) -> bool {
        let own = if session.is_waited_for() { self.parent } else { self.pid };
        own == session.pid
    }

    pub(super) fn of(pid: Pid) -> Option<Self> {
        let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The name before may hold anything.
        let fields: Vec<&str> = text.rsplit_once(") ")?.1.split(' ').collect();
        let (parent, minor, major) = (fields.get(1)?, fields.get(8)?, fields.get(10)?);
        Some(Self { pid, parent: parent.parse().ok()?, waited_for_nobody: *minor == "0" && *major == "0" })
    }
}
