//! Which waiting stages form a pipeline, and whether it is complete: a pure
//! function of what enlisted and of a snapshot of the processes. A wrong guess
//! here costs speed and never an answer, with one exception that is exact: two
//! stages are joined only when each end of their pipe has exactly one holder
//! that could use it, and nothing is queued in it.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    path::PathBuf,
    time::Duration,
};

use posh_proto::rule::{self, Rule};

use super::{
    procfs::{Process, Scheduled, Snapshot},
    waits::{QUIET, STARTS},
};
use crate::enlisted::{Descriptor, Enlisted, Kind, Pid};

/// A process whose system call says nothing is taken as settled when it has been asleep at two
/// looks this far apart.
const SETTLED_AFTER: Duration = Duration::from_millis(3);

/// A pipe between two stages that both wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Edge {
    /// Index of the stage that writes, and its descriptor.
    pub from: (usize, u32),
    /// Index of the stage that reads, and its descriptor.
    pub to: (usize, u32),
}

/// What is known of the waiting stages' pipes.
#[derive(Debug, Default)]
pub struct Closing {
    /// Pipes that join two waiting stages and that nobody else uses.
    pub edges: Vec<Edge>,
    /// Stages (by index) with a pipe end about which more can be learned by waiting.
    pub pending: BTreeMap<usize, Patience>,
    /// Stages with a pipe end whose other end nobody was seen to have.
    pub leading_out: BTreeSet<usize>,
}

/// The event that a stage waits for in another process; `waits` lists what ends the wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Awaited {
    /// To come to the end of what it is doing.
    Work,
    /// To be answered by a file system, or by a command that it reads from.
    Answer,
    /// To enlist.
    Enlistment,
}

/// A process that is worth waiting for, and whether it gets on.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Patience {
    /// The awaited event.
    pub awaited: Awaited,
    /// The process whose event it is.
    pub process: Pid,
    /// It runs, or would if it had a processor.
    pub is_ready: bool,
    /// Its `/proc/PID/schedstat`, which changes when it runs.
    pub scheduled: Scheduled,
}

/// The effect of a process that has an end of a stage's pipe on that stage.
enum Outlook {
    /// It is to be joined, or its end counts for nothing.
    Harmless,
    /// It has its end for as long as can be told: the pipe joins no stages, and there is nothing to
    /// wait for.
    Stays,
    /// It may become a stage, or close its end.
    MayChange(Awaited),
}

/// Who is what among the processes.
pub struct Actors<'a> {
    /// Files that shims lead to.
    pub stage_programs: &'a HashSet<PathBuf>,
    /// The sessions' shells.
    pub shells: &'a HashSet<Pid>,
    /// Stages that wait for a directive, by process.
    pub waiting: &'a HashMap<Pid, usize>,
    /// Stages that have got theirs: they stand in for a remote command, or touch nothing and run
    /// here.
    pub directed: &'a dyn Fn(Pid) -> bool,
    /// Pipes that the sessions' shells write to.
    pub outputs: &'a HashSet<u64>,
    /// Whether what a stage reads from a pipe is written here for certain.
    pub fed_here: &'a dyn Fn(&Enlisted, u64) -> bool,
    /// Processes that this gateway has yet to answer.
    pub asks: &'a dyn Fn(Pid) -> bool,
    /// For how long a process was seen asleep, and unchanged.
    pub slept: &'a dyn Fn(&Process) -> Duration,
    /// For how long of that the gateway was at work itself.
    pub watched: &'a dyn Fn(&Process) -> Duration,
    /// Tells if a sleeping process may be reading the output of a command on a server: one was
    /// below it during its sleep.
    pub asks_a_server: &'a dyn Fn(&Process) -> bool,
    /// Within this time a mount answers.
    pub answers_within: Duration,
}

/// A pipe end of a stage that counts: what it reads or writes by convention, or
/// what its words name.
pub fn used_ends(stage: &Enlisted) -> impl Iterator<Item = &Descriptor> {
    let standard = [(0, true), (1, false), (2, false)].into_iter();
    let standard = standard.filter_map(|(fd, reads)| {
        stage.descriptor(fd).filter(|d| if reads { d.reads() } else { d.writes() })
    });
    standard.chain(stage.named_descriptors()).filter(|d| d.kind == Kind::Pipe)
}

/// What the shell itself writes to was there before it: if a stage should read it, they are not
/// joined.
pub fn leads_out_for_certain(end: &Descriptor, outputs: &HashSet<u64>) -> bool {
    !end.reads() && outputs.contains(&end.identity.1)
}

/// Looks at every pipe of the waiting stages.
#[must_use]
pub fn examine(stages: &[&Enlisted], snapshot: &Snapshot, actors: &Actors<'_>) -> Closing {
    let mut closing = Closing::default();
    let holders = Holders::of(snapshot);
    for (index, stage) in stages.iter().enumerate() {
        for end in used_ends(stage) {
            if leads_out_for_certain(end, actors.outputs)
                || end.reads() && (actors.fed_here)(stage, end.identity.1)
            {
                continue;
            }
            let pipe = Pipe { inode: end.identity.1, holders: &holders, stages, snapshot, actors };
            if pipe.leads_out(end) {
                // It joins no stages, whoever holds this end.
                closing.leading_out.insert(index);
            } else if let Some(patience) = pipe.may_change(stage.pid) {
                let last = closing.pending.entry(index).or_insert_with(|| patience.clone());
                if patience > *last {
                    *last = patience;
                }
            } else if end.writes() {
                closing.edges.extend(pipe.edge_from(index, end));
            }
        }
    }
    // A writer with both descriptors 1 and 2 on one pipe is one edge: the lower number stands for
    // it.
    closing.edges.sort_by_key(|e| (e.from, e.to));
    closing.edges.dedup_by_key(|e| (e.from.0, e.to));
    closing
}

struct Holders<'a>(HashMap<u64, Vec<(&'a Process, super::procfs::PipeEnd)>>);

impl<'a> Holders<'a> {
    fn of(snapshot: &'a Snapshot) -> Self {
        let mut by_pipe: HashMap<u64, Vec<_>> = HashMap::new();
        for process in snapshot.processes().filter(|p| !p.is_dead()) {
            for end in &process.pipe_ends {
                by_pipe.entry(end.inode).or_default().push((process, *end));
            }
        }
        Self(by_pipe)
    }
}

struct Pipe<'a> {
    inode: u64,
    holders: &'a Holders<'a>,
    stages: &'a [&'a Enlisted],
    snapshot: &'a Snapshot,
    actors: &'a Actors<'a>,
}

impl Pipe<'_> {
    fn holders(&self) -> impl Iterator<Item = &(&Process, super::procfs::PipeEnd)> {
        self.holders.0.get(&self.inode).into_iter().flatten()
    }

    /// Nobody here has the other end.
    fn leads_out(&self, end: &Descriptor) -> bool {
        !self.holders().any(|(_, held)| if end.writes() { held.reads } else { held.writes })
    }

    /// Some holder is about to become a stage, or to let go, and nobody stays who keeps the pipe
    /// from joining two stages.
    fn may_change(&self, stage: Pid) -> Option<Patience> {
        let mut last: Option<Patience> = None;
        for (process, held) in self.holders() {
            let awaited = match self.outlook(stage, process, held.fd) {
                Outlook::Harmless => continue,
                Outlook::Stays => return None,
                Outlook::MayChange(awaited) => awaited,
            };
            let is_ready = process.state == 'R';
            let (process, scheduled) = (process.pid, process.scheduled.clone());
            last = last.max(Some(Patience { awaited, process, is_ready, scheduled }));
        }
        last
    }

    /// A shell above the stage that has the pipe as its own input, output or errors: it had it
    /// before it forked, and keeps it whatever it does.
    fn keeps(&self, process: &Process, fd: u32, stage: Pid) -> bool {
        fd <= 2 && self.snapshot.is_ancestor(process.pid, stage)
    }

    fn outlook(&self, stage: Pid, process: &Process, fd: u32) -> Outlook {
        if process.pid == stage || self.actors.waiting.contains_key(&process.pid) {
            return Outlook::Harmless;
        }
        if self.keeps(process, fd, stage)
            || (self.actors.directed)(process.pid)
            || process.is_stopped()
        {
            return Outlook::Stays;
        }
        if process.state == 'D' {
            // The kernel works for it, on a disk or a network file system, and wakes it when that
            // is done.
            return Outlook::MayChange(Awaited::Answer);
        }
        if (self.actors.asks)(process.pid) {
            return Outlook::MayChange(Awaited::Enlistment);
        }
        let within = |limit, awaited| match (self.actors.slept)(process) < limit {
            true => Outlook::MayChange(awaited),
            false => Outlook::Stays,
        };
        if self.actors.stage_programs.contains(&process.executable) {
            // What it may have asked this gateway has had the time to come here.
            let is_another_s = (self.actors.watched)(process) >= QUIET;
            return if is_another_s {
                Outlook::Stays
            } else {
                Outlook::MayChange(Awaited::Enlistment)
            };
        }
        if process.reads_from(self.inode) {
            return Outlook::Stays;
        }
        if self.waits_for(stage, process, &mut BTreeSet::new()) {
            return Self::outlook_of_one_that_waits(fd);
        }
        if process.waits_for_children() {
            return match self.goes_on_by_a_child(process) {
                true => Outlook::MayChange(Awaited::Work),
                false => Self::outlook_of_one_that_waits(fd),
            };
        }
        if process.executable.as_os_str().is_empty() {
            // In the middle of an execve.
            return Outlook::MayChange(Awaited::Work);
        }
        let parent = self.snapshot.get(process.parent);
        let is_fork = parent.is_some_and(|p| p.executable == process.executable);
        if !is_fork && !self.actors.shells.contains(&process.pid) {
            // Another program: it may still be one that execs (nice, env, a shell).
            return within(SETTLED_AFTER, Awaited::Work);
        }
        if process.waits_for_partner {
            return Outlook::Stays;
        }
        if process.walks_files() {
            return within(self.actors.answers_within, Awaited::Answer);
        }
        if process.sleeps_in_pipe {
            let is_far = (self.actors.asks_a_server)(process);
            return within(
                if is_far { self.actors.answers_within + STARTS } else { QUIET },
                Awaited::Answer,
            );
        }
        within(SETTLED_AFTER, Awaited::Work)
    }

    /// A shell keeps what it lends to a process substitution above its standard streams.
    fn outlook_of_one_that_waits(fd: u32) -> Outlook {
        if fd > 2 { Outlook::Harmless } else { Outlook::Stays }
    }

    /// A process that waits for its children goes on as soon as one of them has ended: the
    /// shell that has read a `$(...)` to its end waits like this for a moment, then execs.
    fn goes_on_by_a_child(&self, process: &Process) -> bool {
        let children = || self.snapshot.processes().filter(|p| p.parent == process.pid);
        // Seen dead just after its parent was seen to wait; some parents leave such a child alone.
        let just_died =
            || children().any(Process::is_dead) && (self.actors.slept)(process) < SETTLED_AFTER;
        children().any(|child| child.ending && !child.is_dead()) || just_died()
    }

    /// Tells if a process gets on only when `stage` does: it is that, or sleeps until such
    /// processes write to it or end (a coprocess and the shell that asks it). To wait for it would
    /// be to wait for oneself. Processes that wait for each other alone are such, too: `seen` are
    /// those that were asked about on the way. Another waiting stage gets on as soon as it is let
    /// go, unless it reads what such processes write.
    fn waits_for(&self, stage: Pid, process: &Process, seen: &mut BTreeSet<Pid>) -> bool {
        if process.pid == stage || !seen.insert(process.pid) {
            return true;
        }
        let is_writer = |(writer, held): &(&Process, super::procfs::PipeEnd)| {
            held.writes && writer.pid != process.pid
        };
        let writers = |pipe: u64| -> Vec<&Process> {
            let holders = self.holders.0.get(&pipe).into_iter().flatten();
            holders.filter(|held| is_writer(held)).map(|(writer, _)| *writer).collect()
        };
        let mut wait_for_all = |awaited: Vec<&Process>| {
            // A child that has ended is news to its parent; of a pipe without a writer, its end is.
            let is_news =
                awaited.is_empty() || awaited.iter().any(|one| one.is_dead() || one.ending);
            !is_news && awaited.into_iter().all(|one| self.waits_for(stage, one, seen))
        };
        if let Some(index) = self.actors.waiting.get(&process.pid) {
            let read = used_ends(self.stages[*index])
                .filter(|end| end.reads())
                .map(|end| writers(end.identity.1));
            return read.collect::<Vec<_>>().into_iter().any(wait_for_all);
        }
        match process.pipe_it_reads() {
            _ if process.waits_for_children() => wait_for_all(
                self.snapshot.processes().filter(|child| child.parent == process.pid).collect(),
            ),
            Some(pipe) => wait_for_all(writers(pipe)),
            None => false,
        }
    }

    /// The edge that starts at this stage's descriptor, if the pipe is nobody else's.
    fn edge_from(&self, writer: usize, end: &Descriptor) -> Option<Edge> {
        let alone = rule::holds(Rule::PipeHolders);
        if alone && (end.queued_bytes > 0 || self.snapshot.may_be_held_unseen(self.inode)) {
            return None;
        }
        let mut reader: Option<(usize, u32)> = None;
        for (process, held) in self.holders() {
            let stage = self.actors.waiting.get(&process.pid).copied();
            if held.reads && held.writes {
                return None;
            }
            if held.writes {
                if alone && stage != Some(writer) && !self.is_bystander(stage, held.fd) {
                    return None;
                }
                continue;
            }
            match stage {
                Some(index) if self.uses(index, held.fd) => match reader {
                    None => reader = Some((index, held.fd)),
                    // The same pipe twice in one stage (0 and /dev/fd/63): leave it alone.
                    Some(_) => return None,
                },
                _ if self.is_bystander(stage, held.fd) => {}
                // The shell keeps its end of a process substitution until the command has ended.
                _ if process.waits_for_children() && self.only_lends(process) => {}
                _ if alone => return None,
                _ => {}
            }
        }
        let (reader, fd) = reader?;
        (reader != writer).then_some(Edge { from: (writer, end.fd), to: (reader, fd) })
    }

    fn uses(&self, stage: usize, fd: u32) -> bool {
        used_ends(self.stages[stage]).any(|d| d.fd == fd)
    }

    /// A stage that inherited this end without a word of its command naming it.
    fn is_bystander(&self, stage: Option<usize>, fd: u32) -> bool {
        fd > 2 && stage.is_some_and(|index| !self.uses(index, fd))
    }

    /// A shell that waits, above the stage whose words name the end that it holds.
    fn only_lends(&self, shell: &Process) -> bool {
        let lent = |fd: u32, stage: &Enlisted| {
            fd > 2 && stage.named_descriptors().any(|d| d.identity.1 == self.inode)
        };
        shell.pipe_ends.iter().filter(|e| e.inode == self.inode).all(|end| {
            self.stages
                .iter()
                .any(|stage| lent(end.fd, stage) && self.snapshot.is_ancestor(shell.pid, stage.pid))
        })
    }
}

/// Groups of stages that edges join, each from its sources to its sink.
#[must_use]
pub fn groups(count: usize, edges: &[Edge]) -> Vec<Vec<usize>> {
    let mut leader: Vec<usize> = (0..count).collect();
    fn find(leader: &[usize], mut at: usize) -> usize {
        while leader[at] != at {
            at = leader[at];
        }
        at
    }
    for edge in edges {
        let (a, b) = (find(&leader, edge.from.0), find(&leader, edge.to.0));
        leader[a.max(b)] = a.min(b);
    }
    let mut groups: HashMap<usize, Vec<usize>> = HashMap::new();
    for stage in 0..count {
        groups.entry(find(&leader, stage)).or_default().push(stage);
    }
    let mut groups: Vec<_> = groups.into_values().map(|group| downstream(group, edges)).collect();
    groups.sort();
    groups
}

/// The edges within a group, by its members' places in it: in the same order, whichever stages came
/// first.
#[must_use]
pub fn edges_of(group: &[usize], edges: &[Edge]) -> Vec<Edge> {
    let place: HashMap<usize, usize> =
        group.iter().enumerate().map(|(new, &old)| (old, new)).collect();
    let inside = edges.iter().filter(|e| place.contains_key(&e.from.0));
    let placed =
        inside.map(|e| Edge { from: (place[&e.from.0], e.from.1), to: (place[&e.to.0], e.to.1) });
    let mut placed: Vec<Edge> = placed.collect();
    placed.sort_by_key(|edge| (edge.from, edge.to));
    placed
}

/// The stages of one group with every writer before its reader; the shell may
/// have started them in any order.
fn downstream(group: Vec<usize>, edges: &[Edge]) -> Vec<usize> {
    let mut left = group;
    let mut ordered = Vec::with_capacity(left.len());
    while !left.is_empty() {
        let ready = |s: &usize| !edges.iter().any(|e| e.to.0 == *s && left.contains(&e.from.0));
        // A ring of pipes has no first stage; any will do.
        let next = left.iter().position(ready).unwrap_or(0);
        ordered.push(left.remove(next));
    }
    ordered
}

#[cfg(test)]
pub(super) mod tests;
