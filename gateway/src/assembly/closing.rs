//! Decides which waiting stages form a pipeline, and whether it is complete: a pure function of the
//! enlisted stages and a process snapshot. A wrong guess costs speed, never correctness, with one
//! exact exception: two stages are joined only if each end of their pipe has exactly one holder
//! that could use it, and the pipe is empty.

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
use crate::enlisted::{Descriptor, DescriptorKind, Enlisted, Pid};
use crate::model::Edge;

/// Interval between two looks. A process that sleeps at both counts as settled if its system call
/// reveals nothing.
const SETTLED_AFTER: Duration = Duration::from_millis(3);

/// Findings about the waiting stages' pipes.
#[derive(Debug, Default)]
pub struct Closing {
    /// Pipes that join two waiting stages and have no other user.
    pub edges: Vec<Edge>,
    /// Stages (by index) with a pipe end whose state waiting may clarify.
    pub pending: BTreeMap<usize, Patience>,
    /// Stages with a pipe whose other end no known process holds.
    pub leading_out: BTreeSet<usize>,
}

/// Event in another process that a stage waits for; `waits` lists the events that end the wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Awaited {
    /// The end of its current work.
    Work,
    /// An answer from a file system, or output of a command that it reads from.
    Answer,
    /// Its enlistment.
    Enlistment,
}

/// A process worth waiting for, and whether it makes progress.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Patience {
    /// The awaited event.
    pub awaited: Awaited,
    /// Process of the event.
    pub process: Pid,
    /// Runs, or is ready to run.
    pub is_ready: bool,
    /// Its `/proc/PID/schedstat`, which changes as it runs.
    pub scheduled: Scheduled,
}

/// Effect of a pipe holder on the stage at the other end.
enum Outlook {
    /// The holder will be joined, or its end is irrelevant.
    Harmless,
    /// The holder keeps its end indefinitely: the pipe joins no stages, so don't wait.
    Stays,
    /// The holder may become a stage, or close its end.
    MayChange(Awaited),
}

/// Roles of processes.
pub struct Actors<'a> {
    /// Targets of the shims.
    pub stage_programs: &'a HashSet<PathBuf>,
    /// Shells of the sessions.
    pub shells: &'a HashSet<Pid>,
    /// Stages that wait for a directive, by process.
    pub waiting: &'a HashMap<Pid, usize>,
    /// Stages that have their directive: they stand in for a remote command, or run locally.
    pub directed: &'a dyn Fn(Pid) -> bool,
    /// Returns true for an end, of the waiting stage with this index, whose pipe certainly joins no
    /// stages.
    pub leads_out: &'a dyn Fn(usize, &Descriptor) -> bool,
    /// Returns true if the writer of a stage's input pipe certainly runs locally.
    pub fed_here: &'a dyn Fn(&Enlisted, u64) -> bool,
    /// Returns true for a process that awaits an answer from this gateway.
    pub asks: &'a dyn Fn(Pid) -> bool,
    /// Time for which a process has been seen asleep and unchanged.
    pub slept: &'a dyn Fn(&Process) -> Duration,
    /// Part of that time in which the gateway itself was running.
    pub watched: &'a dyn Fn(&Process) -> Duration,
    /// Returns true if a sleeping process may be reading output of a command on a server: a stage
    /// was its descendant during its sleep.
    pub asks_a_server: &'a dyn Fn(&Process) -> bool,
    /// Timeout for an answer from a mount.
    pub answers_within: Duration,
}

/// Pipe ends of a stage that count: its standard streams, and descriptors that its words name.
pub fn used_ends(stage: &Enlisted) -> impl Iterator<Item = &Descriptor> {
    let standard = [(0, true), (1, false), (2, false)].into_iter();
    let standard = standard.filter_map(|(fd, reads)| {
        stage.descriptor(fd).filter(|d| if reads { d.reads() } else { d.writes() })
    });
    standard.chain(stage.named_descriptors()).filter(|d| d.kind == DescriptorKind::Pipe)
}

/// Returns true for a pipe that the shell itself writes to. It existed before the stage, so a stage
/// that reads it is not joined.
pub fn leads_out_for_certain(end: &Descriptor, outputs: &HashSet<u64>) -> bool {
    !end.reads() && outputs.contains(&end.identity.1)
}

/// Examines every pipe of the waiting stages.
#[must_use]
pub fn examine(stages: &[&Enlisted], snapshot: &Snapshot, actors: &Actors<'_>) -> Closing {
    let mut closing = Closing::default();
    let holders = Holders::of(snapshot);
    for (index, stage) in stages.iter().enumerate() {
        for end in used_ends(stage) {
            if (actors.leads_out)(index, end)
                || end.reads() && (actors.fed_here)(stage, end.identity.1)
            {
                continue;
            }
            let pipe = Pipe { inode: end.identity.1, holders: &holders, stages, snapshot, actors };
            if pipe.leads_out(end) {
                // The pipe joins no stages, whoever holds this end.
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
    // A writer with descriptors 1 and 2 on one pipe makes one edge, with the lower number.
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

    /// No known process holds the other end.
    fn leads_out(&self, end: &Descriptor) -> bool {
        !self.holders().any(|(_, held)| if end.writes() { held.reads } else { held.writes })
    }

    /// Returns the last awaited event if some holder may become a stage or close its end, and no
    /// holder stays that prevents joining.
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

    /// Returns true for a shell above the stage that has the pipe as its own stdin, stdout or
    /// stderr: it had it before it forked, and keeps it.
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
            // Uninterruptible sleep: waits for a disk or a network file system, and wakes when that
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
            // A request to this gateway would have arrived by now.
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
            // Another program may still exec (nice, env, a shell).
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

    /// A shell lends descriptors above 2 to process substitutions.
    fn outlook_of_one_that_waits(fd: u32) -> Outlook {
        if fd > 2 { Outlook::Harmless } else { Outlook::Stays }
    }

    /// Returns true if a process that waits for its children continues soon, as one of them ends. A
    /// shell that has read a `$(...)` to its end waits like this for a moment, then execs.
    fn goes_on_by_a_child(&self, process: &Process) -> bool {
        let children = || self.snapshot.processes().filter(|p| p.parent == process.pid);
        // A child seen dead just after its parent was seen waiting; some parents never reap such a
        // child.
        let just_died =
            || children().any(Process::is_dead) && (self.actors.slept)(process) < SETTLED_AFTER;
        children().any(|child| child.ending && !child.is_dead()) || just_died()
    }

    /// Returns true if a process depends on `stage`: it is `stage`, or sleeps until such processes
    /// write to it or end (a coprocess and the shell that asks it). Waiting for it would be waiting
    /// for `stage` itself. Processes that wait only for each other count too: `seen` holds those
    /// visited so far. Another waiting stage continues once it is released, unless it reads the
    /// output of such processes.
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
            // A child that has ended wakes its parent; a pipe without writers wakes its reader.
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

    /// Edge from this stage's descriptor, if no other process uses the pipe.
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
                    // The same pipe twice in one stage (0 and /dev/fd/63): don't join.
                    Some(_) => return None,
                },
                _ if self.is_bystander(stage, held.fd) => {}
                // A shell keeps its end of a process substitution until the command has ended.
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

    /// Returns true for a stage that inherited this end without a word of its command naming it.
    fn is_bystander(&self, stage: Option<usize>, fd: u32) -> bool {
        fd > 2 && stage.is_some_and(|index| !self.uses(index, fd))
    }

    /// Returns true for a waiting shell whose ends of this pipe are all named by stages below it.
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

/// Edges within a group, by position in it: in the same order, whichever stages came first.
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

/// Stages of one group with every writer before its reader; the shell may have started them in any
/// order.
fn downstream(group: Vec<usize>, edges: &[Edge]) -> Vec<usize> {
    let mut left = group;
    let mut ordered = Vec::with_capacity(left.len());
    while !left.is_empty() {
        let ready = |s: &usize| !edges.iter().any(|e| e.to.0 == *s && left.contains(&e.from.0));
        // A cycle of pipes has no first stage; start anywhere.
        let next = left.iter().position(ready).unwrap_or(0);
        ordered.push(left.remove(next));
    }
    ordered
}

#[cfg(test)]
pub(super) mod tests;
