//! Commands whose executor or connection is lost after their start. A run that does more than read
//! is resumed over a new connection. A read-only command is run again by its stage program, which
//! skips delivered output. Anything else fails with an error message. A command that must not run
//! twice is never run again.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
};

use posh_proto::{executor::descriptor::Source, stage::Delivered};

use super::{FlightEvent, PartEnd, PipelineRelay, RunFault, listen};
use crate::{
    dispatch::{
        again,
        refresh::{self, StageChanges},
        resume::{self, Gone, Order, Resumed},
    },
    enlisted::{DescriptorKind, Pid},
    lower::RunStream,
    stage_link::ForStage,
};

impl PipelineRelay<'_> {
    /// Handles the end of a run's stream: a success if all its commands have exited.
    pub(super) async fn run_over(&mut self, run: usize, fault: Option<RunFault>) {
        self.noted.over(run);
        let error = match fault {
            Some(RunFault::Exceeded(why)) => return self.run_broken(run, &why).await,
            Some(RunFault::Lost(why)) => Some(why),
            None => None,
        };
        let finished = self.runs[run].finished;
        // A finished run is not resumed, even if exit statuses are missing.
        let order = self.runs[run].lost().filter(|_| !finished);
        if (finished && self.has_all_statuses(run)) || self.unended(run).is_empty() {
            return self.end_streams(run).await;
        }
        let why = error.unwrap_or_else(|| "the connection was closed".to_owned());
        let executor = self.gateway.executors.get(self.runs[run].executor);
        let lost = self.runs[run].connection.clone();
        executor.lost(&lost, &why);
        tracing::warn!(
            executor = %executor.name,
            why,
            kept = order.is_some(),
            "lost while commands ran there"
        );
        self.why_lost.insert(run, why.clone());
        match order {
            Some(_) if self.runs[run].is_dropped_over_and_over() => {
                self.run_gone(run, Gone::OutOfReach).await
            }
            Some(resume) => {
                let (events, silence) = (self.events.clone(), self.runs[run].silence());
                let order = Order { resume, allowance: self.runs[run].allowance.clone() };
                self.pumps.spawn(async move {
                    let resumed = resume::resume(executor, lost, silence, order).await;
                    let _ = events.send(FlightEvent::Resumed(run, resumed)).await;
                });
            }
            None => self.give_up(run, None).await,
        }
    }

    /// Ends a run whose executor exceeds its allowance: none of its messages can be trusted.
    pub(super) async fn run_broken(&mut self, run: usize, why: &str) {
        self.runs[run].abandon();
        let executor = self.gateway.executors.get(self.runs[run].executor);
        tracing::warn!(
            executor = %executor.name,
            why,
            "a run is ended, since its executor is broken"
        );
        for command in self.unended(run) {
            let name = &self.stages[&self.commands[&command].0].name;
            let place = format!("executor {} at {}", executor.name, executor.address);
            let message =
                format!("posh: {name}: {place} is broken: {why}; its output is incomplete");
            self.part_ended(command.0, command.1, PartEnd::Lost(message));
        }
        self.end_streams(run).await;
    }

    pub(super) fn run_resumed(&mut self, run: usize, resumed: Resumed) {
        tracing::info!(run, "a run goes on by a new connection");
        let Resumed { connection, input, output } = resumed;
        let listener = listen(run, output, self.events.clone());
        self.runs[run].resumed(connection, input, listener);
    }

    pub(super) async fn run_gone(&mut self, run: usize, gone: Gone) {
        tracing::warn!(run, ?gone, "a run does not go on");
        self.give_up(run, Some(gone)).await;
    }

    fn has_all_statuses(&self, run: usize) -> bool {
        let mut theirs = self.commands.iter().filter(|(command, _)| command.0 == run);
        theirs.all(|(_, (stage, part))| self.stages[stage].parts[*part].is_some())
    }

    /// Commands of a run without exit status or without the end of their output: the status may
    /// come first.
    pub(super) fn unended(&self, run: usize) -> Vec<(usize, u32)> {
        let is_whole = |stage: usize| {
            let mut joined =
                self.joined.iter().filter(|(stream, place)| stream.0 == run && place.0 == stage);
            let mut feeds =
                self.feeds.iter().filter(|(stream, place)| stream.0 == run && place.0 == stage);
            joined.next().is_none()
                && feeds.all(|(stream, place)| self.outputs[place].has_ended(*stream))
        };
        let is_unended = |&(stage, part): &(usize, usize)| {
            self.stages[&stage].parts[part].is_none() || !is_whole(stage)
        };
        let theirs = self
            .commands
            .iter()
            .filter(|(key, place)| key.0 == run && !self.stages[&place.0].finished);
        theirs.filter(|(_, place)| is_unended(place)).map(|(key, _)| *key).collect()
    }

    async fn give_up(&mut self, run: usize, gone: Option<Gone>) {
        if self.run_again(run, gone).await {
            return;
        }
        let executor = self.gateway.executors.get(self.runs[run].executor);
        let why = self.why_lost.get(&run).cloned().unwrap_or_default();
        let known = gone.map(|gone| format!("{}; ", gone.sentence())).unwrap_or_default();
        for command in self.unended(run) {
            let name = &self.stages[&self.commands[&command].0].name;
            let message = format!(
                "posh: {name}: executor {} at {} was lost while the command ran there ({why}); \
                 {known}its output is incomplete",
                executor.name, executor.address
            );
            self.part_ended(command.0, command.1, PartEnd::Lost(message));
        }
        self.end_streams(run).await;
    }

    pub(super) async fn end_streams(&mut self, run: usize) {
        let streams = self.feeds.keys().chain(self.joined.keys()).filter(|s| s.0 == run);
        let streams: Vec<RunStream> = streams.copied().collect();
        for stream in streams {
            self.end_stream(stream).await;
        }
    }

    /// Lets all affected stages run their commands locally if every one can; changes nothing
    /// otherwise.
    async fn run_again(&mut self, run: usize, gone: Option<Gone>) -> bool {
        let (stages, runs) = self.concerned(run);
        let mut orders = BTreeMap::new();
        for &stage in &stages {
            let repeats = self.readings[stage].as_ref().is_ok_and(again::repeats_itself);
            if !repeats || self.spent.contains(&stage) {
                return false;
            }
            let Some(delivered) = self.delivered_of(stage, gone) else { return false };
            orders.insert(stage, delivered);
        }
        let view = self.gateway.view();
        let world = crate::dispatch::world(self.gateway, &view);
        let commands = stages
            .iter()
            .map(|&s| Some((&*self.pipeline.stages[s].enlisted, self.readings[s].as_ref().ok()?)));
        let commands: Vec<_> = commands.flatten().collect();
        if !again::mounts_answer(&world, &commands).await {
            return false;
        }
        runs.iter().for_each(|run| self.runs[*run].abandon());
        let executor = self.gateway.executors.get(self.runs[run].executor);
        for (stage, delivered) in orders {
            let reason = format!(
                "executor {} at {} was lost while it ran there",
                executor.name, executor.address
            );
            tracing::warn!(
                stage,
                reason,
                bytes = delivered.iter().map(|d| d.bytes).sum::<u64>(),
                "run again here"
            );
            self.signal_join(stage, nix::libc::SIGKILL.cast_unsigned());
            let (enlisted, reading) =
                (&self.pipeline.stages[stage].enlisted, self.readings[stage].as_ref().ok());
            let written = StageChanges::by(self.gateway, enlisted, reading, std::iter::empty());
            let state = self.stages.get_mut(&stage).expect("concerned stages are remote");
            state.finished = true;
            let (gateway, tell) = (self.gateway.clone(), state.tell.clone());
            self.farewells.spawn(async move {
                refresh::refresh(gateway, written).await;
                let _ = tell.send(ForStage::Again { reason, delivered }).await;
            });
        }
        true
    }

    /// Unfinished stages of a lost run, with all stages joined to them on servers, and the runs of
    /// all these.
    fn concerned(&self, run: usize) -> (BTreeSet<usize>, BTreeSet<usize>) {
        let mut stages: BTreeSet<usize> =
            self.unended(run).iter().map(|command| self.commands[command].0).collect();
        let mut runs = BTreeSet::from([run]);
        loop {
            let before = (stages.len(), runs.len());
            for &(from, to) in &self.fused {
                if stages.contains(&from) || stages.contains(&to) {
                    stages.extend([from, to]);
                }
            }
            let theirs = self.commands.iter().filter(|(_, (stage, _))| stages.contains(stage));
            runs.extend(theirs.map(|(command, _)| command.0));
            if (stages.len(), runs.len()) == before {
                return (stages, runs);
            }
        }
    }

    /// Data delivered by a stage, if its command can run once more.
    fn delivered_of(&self, stage: usize, gone: Option<Gone>) -> Option<Vec<Delivered>> {
        let enlisted = &self.pipeline.stages[stage].enlisted;
        self.stages.get(&stage).filter(|state| !state.finished && !state.gone)?;
        let mut delivered = Vec::new();
        for ((_, fd), digest) in self.delivered.range((stage, 0)..=(stage, u32::MAX)) {
            // The stage program can't filter output between a command and its terminal.
            if enlisted.descriptor(*fd).is_none_or(|d| d.kind == DescriptorKind::Tty) {
                return None;
            }
            let (bytes, digest) = (digest.bytes(), digest.value());
            delivered.push(Delivered { fd: *fd, bytes, digest, ..Delivered::default() });
        }
        for (&(run, id), _) in self.commands.iter().filter(|(_, (s, _))| *s == stage) {
            for (_, fd, file) in
                again::redirects(&self.specs[run]).filter(|(command, ..)| *command == id)
            {
                // Two writers must never write one file.
                gone.filter(|gone| gone.is_dead())?;
                let written = &self.runs[run].written_files;
                let before =
                    written.iter().find(|written| (written.stage, written.fd) == (id, fd))?;
                let file_offset = Some(again::written_from(file, before)?);
                delivered.push(Delivered { fd, file_offset, ..Delivered::default() });
            }
        }
        for one in &mut delivered {
            one.also = self.written_through(stage, one.fd);
        }
        Some(delivered)
    }

    /// Descriptors of a stage's command that duplicate `fd`.
    fn written_through(&self, stage: usize, fd: u32) -> Vec<u32> {
        let Some((&(run, id), _)) = self.commands.iter().find(|(_, (s, _))| *s == stage) else {
            return Vec::new();
        };
        let command = self.specs[run].stages.iter().find(|command| command.id == id);
        let others = command.into_iter().flat_map(|command| &command.descriptors);
        others
            .filter(|other| other.source == Some(Source::DuplicateOf(fd)))
            .map(|other| other.fd)
            .collect()
    }

    /// Returns true for a read-only command whose reader on the server has not ended: it may have
    /// to run again, so its stage program must stay. Only in a pipeline `a
    /// b`, as a shell waits for all of it.
    pub(super) fn is_held(&self, stage: usize) -> bool {
        if self.stages[&stage].gone || !self.readings[stage].as_ref().is_ok_and(again::only_reads) {
            return false;
        }
        let pid = |stage: usize| self.pipeline.stages[stage].enlisted.pid;
        let mut readers = self.fused.iter().filter(|(from, _)| *from == stage).map(|(_, to)| *to);
        readers.any(|to| {
            self.stages.get(&to).is_some_and(|reader| !reader.finished && !reader.gone)
                && parent(pid(stage)).is_some_and(|shell| parent(pid(to)) == Some(shell))
        })
    }
}

/// Parent's process ID: fourth field of proc_pid_stat(5). The name before it may contain anything.
fn parent(pid: Pid) -> Option<u32> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(") ")?.1.split(' ').nth(1)?.parse().ok()
}
