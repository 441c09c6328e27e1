//! Assembles pipelines from live processes. A pipe has an inode: its writer and its reader are
//! neighbours. Enlisted stages wait until their pipeline is complete, or a deadline has passed;
//! then the whole group is planned.

mod asking;
mod closing;
mod moment;
mod procfs;
mod staying;
mod waits;
mod writers;

pub(crate) use procfs::children as children_of;
pub(crate) use procfs::{Stat, is_below, pipe_inode, pipe_read_by, read_stat, waits_for_children};
pub use writers::{Writers, Written};

use std::{
    collections::{HashMap, HashSet},
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use posh_proto::rule::{self, Rule};
use tokio::sync::mpsc;

use crate::{
    aside::Growing,
    backstops::Backstops,
    enlisted::{Descriptor, DescriptorKind, Enlisted, Pid},
    executors::Executors,
    model::Edge,
    session::Sessions,
    stage_link::StageLink,
};
use asking::{Asking, OpenQuestion};
use closing::{Actors, Closing};
use moment::Moment;
use procfs::{Orphans, Process, Scheduled, SearchTargets, Snapshot};
use staying::Staying;
use waits::{BETWEEN_LOOKS, QUIET, ROUND_TRIPS, Waits};

/// Time without new enlistments after which processes are read to find the other end of a stage's
/// pipe: commands of a pipeline enlist one after the other. Reading takes half as long and blocks
/// all tasks of the gateway, including those of the other commands.
const GATHER: Duration = Duration::from_micros(500);
/// Upper bound, however many stages enlist.
const GATHER_LONGEST: Duration = Duration::from_millis(2);
/// Interval of looks at the processes while something is pending.
const LOOK_AGAIN: Duration = Duration::from_millis(1);
/// Like `LOOK_AGAIN`, but for stages that have waited longer than [`LONG_WAIT`].
const LOOK_AGAIN_LATER: Duration = Duration::from_millis(8);
const LONG_WAIT: Duration = Duration::from_millis(100);
/// Maximum number of looks per round, of which the last two agree on the edges.
const LOOKS: u32 = 3;
/// Looks further apart reveal nothing about the time between them.
const LOOKS_FAR_APART: Duration = Duration::from_millis(20);
/// Capacity of the queue of events to the assembler.
const QUEUE: usize = 1024;

/// A complete pipeline: stages that wait for a directive, in the order in which the shell started
/// them.
pub struct Pipeline {
    /// The stages.
    pub stages: Vec<StageLink>,
    /// Pipes between the stages.
    pub shape: PipelineShape,
    /// All of them run locally ([`Enlisted::stays`]).
    pub stays: bool,
}

/// Pipes between the stages of a pipeline, and descriptors that they share with other processes.
#[derive(Debug, Clone)]
pub struct PipelineShape {
    /// Pipes, by index of the stages.
    pub edges: Vec<Edge>,
    /// Per stage: regular files on its descriptors 1 and 2 that another live process may write too.
    pub shared_outputs: Vec<HashSet<PathBuf>>,
    /// Per stage: descriptors whose pipe another process may read too.
    pub shared_inputs: Vec<HashSet<u32>>,
}

impl PipelineShape {
    /// Shape of `count` stages that share nothing with other processes.
    #[must_use]
    pub fn unshared(count: usize, edges: Vec<Edge>) -> Self {
        let (outputs, inputs) = (0..count).map(|_| (HashSet::new(), HashSet::new())).unzip();
        Self { edges, shared_outputs: outputs, shared_inputs: inputs }
    }
}

/// Event for the assembler.
#[derive(Debug)]
enum AssemblyEvent {
    Enlisted(Box<StageLink>, Option<OpenQuestion>),
    LetGo(Box<Enlisted>),
    Directed(Arc<Enlisted>),
    Ended(Pid),
}

/// The sending side of the assembler.
#[derive(Debug, Clone)]
pub struct Assembler {
    events: mpsc::Sender<AssemblyEvent>,
    asking: Asking,
    /// Counts waits that reached their backstop.
    pub backstops: Arc<Backstops>,
}

impl Assembler {
    /// Starts the assembler; complete pipelines come out of the receiver.
    #[must_use]
    pub fn start(
        sessions: Arc<Sessions>,
        executors: Executors,
    ) -> (Self, mpsc::Receiver<Pipeline>) {
        let (events, incoming) = mpsc::channel(QUEUE);
        let (complete, pipelines) = mpsc::channel(QUEUE);
        let assembly = Assembly::new(sessions, executors, complete);
        let backstops = Arc::clone(&assembly.backstops);
        let asking = assembly.asking.clone();
        tokio::spawn(assembly.run(incoming));
        (Self { events, asking, backstops }, pipelines)
    }

    /// Registers a request from a process that has connected. While the request is open, stages
    /// that share a pipe with the process wait for it.
    pub fn asks(&self, process: Option<Pid>) -> Option<OpenQuestion> {
        process.map(|process| self.asking.begin(process))
    }

    /// Adds a stage that waits for its directive. Its request ends once it is among the waiting
    /// stages.
    pub async fn enlisted(&self, stage: StageLink, question: Option<OpenQuestion>) {
        let _ = self.events.send(AssemblyEvent::Enlisted(Box::new(stage), question)).await;
    }

    /// Notes that a command runs locally without having enlisted: readers of its output need not
    /// look for it.
    pub async fn let_go(&self, command: Enlisted) {
        let _ = self.events.send(AssemblyEvent::LetGo(Box::new(command))).await;
    }

    /// Notes that a stage stands in for a remote command from now on.
    pub async fn directed(&self, stage: Arc<Enlisted>) {
        let _ = self.events.send(AssemblyEvent::Directed(stage)).await;
    }

    /// Notes the end of a directed stage.
    pub async fn ended(&self, pid: Pid) {
        let _ = self.events.send(AssemblyEvent::Ended(pid)).await;
    }
}

/// A process that was asleep, in one system call of one program, at every look so far.
struct Sleep {
    since: Instant,
    seen: Instant,
    /// Part of that time in which the gateway looked often enough to have done its own part.
    watched: Duration,
    program: PathBuf,
    call: Option<(i64, u64)>,
    scheduled: Scheduled,
    /// A stage was its descendant at one of these looks.
    asks_a_server: bool,
}

impl Sleep {
    /// Continues the sleep of the last look if the call and program are the same, and the process
    /// has not run since or the last look was recent. In the second case it may have run in
    /// between, but not for long.
    fn going_on(before: Option<&Self>, process: &Process, now: Instant) -> Self {
        let Process { system_call: call, scheduled, executable, .. } = process;
        let is_same = |old: &&Self| {
            let has_slept = !scheduled.is_empty() && old.scheduled == *scheduled;
            let is_in_the_same = old.call == *call && old.program == *executable;
            is_in_the_same && (has_slept || now.duration_since(old.seen) < LOOKS_FAR_APART)
        };
        let same = before.filter(is_same);
        Self {
            since: same.map_or(now, |old| old.since),
            seen: now,
            watched: same.map_or(Duration::ZERO, |old| {
                old.watched + now.duration_since(old.seen).min(BETWEEN_LOOKS)
            }),
            program: executable.clone(),
            call: *call,
            scheduled: scheduled.clone(),
            asks_a_server: same.is_some_and(|old| old.asks_a_server),
        }
    }
}

struct WaitingStage {
    stage: StageLink,
    waits: Waits,
    /// A pipe of it leads out of the session, seen twice.
    leads_out: bool,
    /// Pipe that a shell above it was reading when it enlisted: `$(...)`.
    substitution: Option<u64>,
}

impl WaitingStage {
    fn new(stage: StageLink, outputs: &HashSet<u64>) -> Self {
        let writes =
            |end: &Descriptor| end.writes() && !closing::leads_out_for_certain(end, outputs);
        let substitution = if closing::used_ends(&stage.enlisted).any(writes) {
            procfs::substitution_above(stage.enlisted.pid)
        } else {
            None
        };
        Self { stage, waits: Waits::begin(), leads_out: false, substitution }
    }

    /// Returns true for a pipe that joins no stages, whoever else holds it: a session's shell
    /// writes to it, or a shell above the stage reads it.
    fn leads_out_for_certain(&self, end: &Descriptor, outputs: &HashSet<u64>) -> bool {
        closing::leads_out_for_certain(end, outputs)
            || end.writes() && self.substitution == Some(end.identity.1)
    }
}

struct Assembly {
    sessions: Arc<Sessions>,
    /// Source of the servers' round-trip times.
    executors: Executors,
    backstops: Arc<Backstops>,
    complete: mpsc::Sender<Pipeline>,
    waiting: Vec<WaitingStage>,
    directed: HashMap<Pid, Arc<Enlisted>>,
    asking: Asking,
    asleep: HashMap<Pid, Sleep>,
    orphans: Orphans,
    staying: Staying,
    /// Runs the reading of /proc.
    reading: Growing,
    /// Time of the last look.
    looked: Option<Instant>,
    moment: Option<Moment>,
}

impl Assembly {
    fn new(
        sessions: Arc<Sessions>,
        executors: Executors,
        complete: mpsc::Sender<Pipeline>,
    ) -> Self {
        let (waiting, directed) = (Vec::new(), HashMap::new());
        let (orphans, staying) = (Orphans::default(), Staying::default());
        let (asking, asleep, reading) = (Asking::default(), HashMap::new(), Growing::default());
        let (looked, moment) = (None, Moment::new().ok());
        let backstops = Arc::default();
        Self {
            sessions,
            executors,
            backstops,
            complete,
            waiting,
            directed,
            asking,
            asleep,
            orphans,
            staying,
            reading,
            looked,
            moment,
        }
    }

    async fn run(mut self, mut incoming: mpsc::Receiver<AssemblyEvent>) {
        loop {
            let event = if self.waiting.is_empty() {
                incoming.recv().await
            } else {
                match tokio::time::timeout(self.pause(), incoming.recv()).await {
                    Ok(event) => event,
                    Err(_) => {
                        self.look().await;
                        continue;
                    }
                }
            };
            let Some(event) = event else { return };
            self.take(event);
            self.take_more(&mut incoming).await;
            self.look().await;
        }
    }

    /// Takes queued events together, and those that arrive while a pipeline's commands are still
    /// enlisting or the assembler rests: one look serves all.
    async fn take_more(&mut self, incoming: &mut mpsc::Receiver<AssemblyEvent>) {
        while let Ok(event) = incoming.try_recv() {
            self.take(event);
        }
        let began = Instant::now();
        while let Some(left) = self.gathers().filter(|_| began.elapsed() < GATHER_LONGEST) {
            self.release_staying().await;
            let Some(moment) = &self.moment else { break };
            let event =
                tokio::select! { event = incoming.recv() => event, () = moment.pass(left) => None };
            let Some(event) = event else { break };
            self.take(event);
        }
        while let Some(rest) = self.rest() {
            self.release_staying().await;
            let Ok(Some(event)) = tokio::time::timeout(rest, incoming.recv()).await else { return };
            self.take(event);
        }
    }

    /// Time without new enlistments still to pass before processes are read. `None` if each pipe of
    /// the recent stages has both ends among the waiting stages.
    fn gathers(&self) -> Option<Duration> {
        let left = |waiting: &WaitingStage| {
            GATHER.checked_sub(waiting.waits.since.elapsed()).filter(|left| !left.is_zero())
        };
        if !self.waiting.iter().any(|waiting| left(waiting).is_some()) {
            return None;
        }
        let outputs = self.sessions.outputs();
        let pipes = |waiting: &WaitingStage| -> Vec<(u64, bool)> {
            let stage = &waiting.stage.enlisted;
            let ends = closing::used_ends(stage).filter(|end| {
                !waiting.leads_out_for_certain(end, &outputs)
                    && !self.is_fed_here(stage, end.identity.1)
            });
            ends.map(|end| (end.identity.1, end.writes())).collect()
        };
        let there: HashSet<(u64, bool)> = self.waiting.iter().flat_map(pipes).collect();
        let is_lonely = |&(pipe, writes): &(u64, bool)| !there.contains(&(pipe, !writes));
        self.waiting
            .iter()
            .filter(|waiting| pipes(waiting).iter().any(is_lonely))
            .filter_map(left)
            .max()
    }

    /// Time until the next look. A stage that has waited long waits for a slow mount or a long
    /// `$(...)`: fewer looks cost it little.
    fn pause(&self) -> Duration {
        let long = self.waiting.iter().all(|w| w.waits.since.elapsed() > LONG_WAIT);
        let pause = if long { LOOK_AGAIN_LATER } else { LOOK_AGAIN };
        pause.max(self.rest().unwrap_or_default())
    }

    /// Remaining rest after a long look, which lasts as long as the look did: at most half of a
    /// processor's time goes to looking, however many processes there are.
    fn rest(&self) -> Option<Duration> {
        let took = self.reading.took();
        let left = self.looked.and_then(|looked| took.checked_sub(looked.elapsed()));
        left.filter(|left| took > LOOK_AGAIN && !left.is_zero())
    }

    fn take(&mut self, event: AssemblyEvent) {
        match event {
            AssemblyEvent::Enlisted(stage, _question) => {
                self.staying.enlisted(stage.enlisted.pid);
                self.waiting.push(WaitingStage::new(*stage, &self.sessions.outputs()));
            }
            AssemblyEvent::LetGo(command) => self.staying.let_go(&command),
            AssemblyEvent::Directed(stage) => drop(self.directed.insert(stage.pid, stage)),
            AssemblyEvent::Ended(pid) => drop(self.directed.remove(&pid)),
        }
    }

    /// Releases every pipeline that is complete.
    async fn look(&mut self) {
        self.waiting.retain(|w| !w.stage.is_gone());
        self.release_staying().await;
        if self.waiting.is_empty() {
            return;
        }
        let (mut snapshot, mut closing) = self.look_around();
        // Lists of children and descriptors are read while processes fork and end, so one may be
        // missed. A missed process causes no wait and appears to share no pipe: trust such a
        // finding only if seen twice.
        if !closing.edges.is_empty()
            || closing.leading_out.iter().any(|&stage| !self.waiting[stage].leads_out)
        {
            for look in 2..=LOOKS {
                let before = std::mem::take(&mut closing.edges);
                (snapshot, closing) = self.look_around();
                if closing.edges == before || look == LOOKS {
                    closing.edges.retain(|edge| before.contains(edge));
                    break;
                }
            }
            closing.leading_out.iter().for_each(|&stage| self.waiting[stage].leads_out = true);
        }
        for (index, waiting) in self.waiting.iter_mut().enumerate() {
            waiting.waits.note(closing.pending.get(&index));
        }
        let ready = self.ready_groups(&closing);
        self.release(&ready, &closing, &snapshot).await;
    }

    fn look_around(&mut self) -> (Snapshot, Closing) {
        let wanted = self.wanted();
        let snapshot = if wanted.pipes.is_empty() && wanted.files.is_empty() {
            Snapshot::default()
        } else {
            self.reading.run(|| Snapshot::take(&self.sessions.roots(), &wanted, &mut self.orphans))
        };
        self.looked = Some(Instant::now());
        self.note_sleepers(&snapshot);
        let closing = self.examine(&snapshot);
        (snapshot, closing)
    }

    /// Releases stages that run locally anyway, without reading processes.
    async fn release_staying(&mut self) {
        let stages: Vec<&Enlisted> = self.waiting.iter().map(|w| &*w.stage.enlisted).collect();
        let (groups, edges) =
            self.staying.groups(&stages, &|stage, pipe| self.is_fed_here(stage, pipe));
        if groups.is_empty() {
            return;
        }
        let mut waiting: Vec<Option<WaitingStage>> =
            std::mem::take(&mut self.waiting).into_iter().map(Some).collect();
        for group in groups {
            let stages: Vec<StageLink> =
                group.iter().filter_map(|&i| Some(waiting[i].take()?.stage)).collect();
            stages.iter().for_each(|stage| self.staying.let_go(&stage.enlisted));
            let shape = PipelineShape::unshared(stages.len(), closing::edges_of(&group, &edges));
            let _ = self.complete.send(Pipeline { stages, shape, stays: true }).await;
        }
        self.waiting = waiting.into_iter().flatten().collect();
    }

    fn wanted(&self) -> SearchTargets {
        let mut wanted = SearchTargets::default();
        let outputs = self.sessions.outputs();
        for waiting in &self.waiting {
            let stage = &waiting.stage.enlisted;
            let ends = closing::used_ends(stage)
                .filter(|end| !waiting.leads_out_for_certain(end, &outputs));
            wanted.pipes.extend(ends.map(|d| d.identity.1));
            wanted.files.extend(output_files(stage));
        }
        // A stage that stands in for a remote command only relays bytes, and starts no process.
        let has_any = |stage: &Enlisted| {
            let has = |d: &Descriptor| {
                wanted.pipes.contains(&d.identity.1) || wanted.files.contains(&d.path)
            };
            stage.descriptors.iter().any(has)
        };
        let without = self.directed.values().filter(|stage| stage.childless && !has_any(stage));
        wanted.without = without.map(|stage| stage.pid).collect();
        wanted.stage_programs = self.sessions.stage_programs();
        let waiting =
            self.waiting.iter().map(|w| &w.stage.enlisted).filter(|stage| stage.childless);
        wanted.waiting = waiting.map(|stage| (stage.pid, Arc::clone(stage))).collect();
        wanted
    }

    fn note_sleepers(&mut self, snapshot: &Snapshot) {
        let now = Instant::now();
        let old = std::mem::take(&mut self.asleep);
        let sleepers = snapshot.processes().filter(|p| p.state != 'R');
        let stages = self.stages_in(snapshot);
        let sleep = |p: &Process| {
            let mut sleep = Sleep::going_on(old.get(&p.pid), p, now);
            let is_below = |stage: &Pid| snapshot.is_ancestor(p.pid, *stage);
            sleep.asks_a_server |= p.sleeps_in_pipe && stages.iter().any(is_below);
            sleep
        };
        self.asleep = sleepers.map(|p| (p.pid, sleep(p))).collect();
    }

    /// Processes of stages: not yet enlisted, waiting, in planning, or standing in for a remote
    /// command.
    fn stages_in(&self, snapshot: &Snapshot) -> Vec<Pid> {
        let programs = self.sessions.stage_programs();
        let is_waiting = |pid: Pid| self.waiting.iter().any(|w| w.stage.enlisted.pid == pid);
        let is_stage = |p: &&Process| {
            programs.contains(&p.executable)
                || self.directed.contains_key(&p.pid)
                || is_waiting(p.pid)
        };
        snapshot.processes().filter(is_stage).map(|p| p.pid).collect()
    }

    fn examine(&self, snapshot: &Snapshot) -> Closing {
        let stages: Vec<&Enlisted> = self.waiting.iter().map(|w| &*w.stage.enlisted).collect();
        let waiting: HashMap<Pid, usize> =
            stages.iter().enumerate().map(|(i, s)| (s.pid, i)).collect();
        let outputs = self.sessions.outputs();
        let slept = |p: &Process| {
            self.asleep.get(&p.pid).map_or(Duration::ZERO, |sleep| sleep.since.elapsed())
        };
        closing::examine(
            &stages,
            snapshot,
            &Actors {
                stage_programs: &self.sessions.stage_programs(),
                shells: &self.sessions.shells(snapshot.processes().map(|p| (p.pid, p.parent))),
                waiting: &waiting,
                directed: &|pid| self.directed.contains_key(&pid) || self.staying.is_at_work(pid),
                leads_out: &|stage, end| self.waiting[stage].leads_out_for_certain(end, &outputs),
                fed_here: &|stage, pipe| self.is_fed_here(stage, pipe),
                asks: &|pid| self.asking.asks(pid),
                slept: &slept,
                watched: &|p| self.asleep.get(&p.pid).map_or(Duration::ZERO, |sleep| sleep.watched),
                asks_a_server: &|p| {
                    self.asleep.get(&p.pid).is_some_and(|sleep| sleep.asks_a_server)
                },
                answers_within: QUIET + self.executors.slowest_round_trip() * ROUND_TRIPS,
            },
        )
    }

    /// Returns true if the pipe's writer has noted, without enlisting, that it runs locally.
    fn is_fed_here(&self, stage: &Enlisted, pipe: u64) -> bool {
        self.sessions.is_fed_here(&stage.session, pipe)
    }

    /// Groups in which no stage waits for an event, or none within its limit.
    fn ready_groups(&self, closing: &Closing) -> Vec<Vec<usize>> {
        let mut groups = closing::groups(self.waiting.len(), &closing.edges);
        groups.retain(|group| !group.iter().any(|&i| self.waiting[i].waits.go_on()));
        groups
    }

    async fn release(&mut self, ready: &[Vec<usize>], closing: &Closing, snapshot: &Snapshot) {
        if ready.is_empty() {
            return;
        }
        let mut waiting: Vec<Option<WaitingStage>> =
            std::mem::take(&mut self.waiting).into_iter().map(Some).collect();
        let mut pipelines = Vec::new();
        for group in ready {
            let edges = closing::edges_of(group, &closing.edges);
            for waiting in group.iter().filter_map(|&i| waiting[i].as_ref()) {
                self.backstops.waited(waiting.waits.total());
                tracing::debug!(
                    command = waiting.stage.enlisted.name,
                    waits = ?waiting.waits,
                    "goes on"
                );
                if let Some(backstop) = waiting.waits.backstop() {
                    self.backstops.reached(backstop, &waiting.stage.enlisted);
                }
            }
            let mut stages: Vec<StageLink> =
                group.iter().filter_map(|&i| Some(waiting[i].take()?.stage)).collect();
            stages.iter_mut().for_each(refresh_offsets);
            let members: HashSet<Pid> = stages.iter().map(|s| s.enlisted.pid).collect();
            let shared_outputs: Vec<_> =
                stages.iter().map(|s| shared_outputs(&s.enlisted, &members, snapshot)).collect();
            let shared_inputs =
                stages.iter().map(|s| shared_inputs(&s.enlisted, snapshot)).collect();
            pipelines.push(Pipeline {
                stages,
                shape: PipelineShape { edges, shared_outputs, shared_inputs },
                stays: false,
            });
        }
        self.waiting = waiting.into_iter().flatten().collect();
        for pipeline in pipelines {
            let _ = self.complete.send(pipeline).await;
        }
    }
}

/// Another process may have moved a shared offset since the stage enlisted. A process that ended
/// before the snapshot moves it no more; any other counts as a sharer.
fn refresh_offsets(stage: &mut StageLink) {
    let pid = stage.enlisted.pid;
    let files = stage
        .enlisted
        .descriptors
        .iter()
        .enumerate()
        .filter(|(_, d)| d.kind == DescriptorKind::File);
    let moved = files.filter_map(|(index, d)| {
        let now = writers::offset(pid, Path::new(&d.fd.to_string()))?;
        (now != d.offset).then_some((index, now))
    });
    let moved: Vec<(usize, u64)> = moved.collect();
    for (index, offset) in moved {
        Arc::make_mut(&mut stage.enlisted).descriptors[index].offset = offset;
    }
}

/// Regular files on mounts that a stage writes through descriptors 1 and 2.
fn output_files(stage: &Enlisted) -> impl Iterator<Item = PathBuf> {
    let files = [1, 2].into_iter().filter_map(|fd| stage.descriptor(fd));
    files.filter(|d| d.kind == DescriptorKind::File && d.on_mount).map(|d| d.path.clone())
}

/// Output files that another live process has open: it may write through the same offset. A shell
/// that waits for its only child, our stage, will not.
fn shared_outputs(
    stage: &Enlisted,
    members: &HashSet<Pid>,
    snapshot: &Snapshot,
) -> HashSet<PathBuf> {
    let files: HashSet<PathBuf> =
        output_files(stage).filter(|_| rule::holds(Rule::SharedOutput)).collect();
    let session = nix::unistd::getsid(nix_pid(stage.pid))
        .ok()
        .and_then(|session| Pid::try_from(session.as_raw()).ok());
    let is_unseen = snapshot.may_share_files_unseen(stage.pid, session);
    let shared = |file: &PathBuf| {
        is_unseen
            || snapshot.is_written_outside(file)
            || snapshot.processes().any(|p| {
                let holds = !p.is_dead() && p.pid != stage.pid && p.files.contains(file);
                holds && !waits_only_for(p, stage.pid, members, snapshot)
            })
    };
    files.into_iter().filter(shared).collect()
}

fn nix_pid(pid: Pid) -> Option<nix::unistd::Pid> {
    i32::try_from(pid).ok().map(nix::unistd::Pid::from_raw)
}

fn waits_only_for(shell: &Process, pid: Pid, members: &HashSet<Pid>, snapshot: &Snapshot) -> bool {
    let is_above = snapshot.is_ancestor(shell.pid, pid);
    let mut children = snapshot.processes().filter(|p| p.parent == shell.pid && !p.is_dead());
    is_above
        && shell.waits_for_children()
        && children
            .all(|c| c.pid == pid || members.contains(&c.pid) || snapshot.is_ancestor(c.pid, pid))
}

/// Pipes that a stage reads and another process might read too.
fn shared_inputs(stage: &Enlisted, snapshot: &Snapshot) -> HashSet<u32> {
    let ends = closing::used_ends(stage).filter(|d| d.reads());
    let shared = ends.filter(|end| {
        snapshot.may_be_held_unseen(end.identity.1)
            || snapshot.is_read_outside(end.identity.1)
            || snapshot.processes().any(|p| {
                p.pid != stage.pid
                    && !p.is_dead()
                    && p.pipe_ends.iter().any(|e| e.inode == end.identity.1 && e.reads)
            })
    });
    shared.map(|d| d.fd).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sleep_goes_on_if_it_is_the_same() {
        let began = Instant::now();
        let later = |milliseconds| began + Duration::from_millis(milliseconds);
        let (call, other) = (Some((nix::libc::SYS_wait4, 0)), Some((nix::libc::SYS_read, 0)));
        let process = |executable: &str, system_call, scheduled: &str| Process {
            executable: executable.into(),
            system_call,
            scheduled: scheduled.into(),
            ..closing::tests::stage_process(1)
        };
        let check =
            |before: &str, now: (&str, Option<(i64, u64)>, &str), at: u64, goes_on: bool| {
                let old = Sleep::going_on(None, &process("bash", call, before), began);
                let new = Sleep::going_on(Some(&old), &process(now.0, now.1, now.2), later(at));
                assert_eq!(new.since == began, goes_on, "{before} {now:?} {at}");
            };
        check("1 2 3", ("bash", call, "1 2 3"), 500, true);
        check("1 2 3", ("bash", call, "1 2 4"), 5, true);
        check("1 2 3", ("bash", call, "1 2 4"), 500, false);
        check("1 2 3", ("bash", other, "1 2 3"), 5, false);
        // `head "$(...)"`: a shell that has read a substitution to its end has become a stage
        // program, which reads as well.
        check("1 2 3", ("posh-stage", call, "1 2 4"), 5, false);
        // A kernel that does not count.
        check("", ("bash", call, ""), 5, true);
        check("", ("bash", call, ""), 500, false);
    }
}
