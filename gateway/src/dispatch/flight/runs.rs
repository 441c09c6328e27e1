//! State of one run in the relay: the connection to its executor and, for a run that may outlive
//! its connection, everything that must be repeated to the executor over a new one.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::{Duration, Instant},
};

use posh_proto::executor::{
    Credit, Descriptor, Exited, Resume, RunInput, RunOutput, RunSpec, Signal, Stage, WrittenFile,
    descriptor::Source, run_input, run_output,
};
use posh_reach::Allowance;
use tokio::{sync::mpsc, task::AbortHandle};

use super::outgoing::{GivenCredit, Outgoing, TooMuch};
use crate::{executors::ExecutorConnection, plan::ExecutorId};

/// A resumable run's messages are acknowledged after so many messages or bytes. The executor
/// buffers unacknowledged ones, at least 128 KiB; the outputs' credit is many times that.
const ACKNOWLEDGED_MESSAGES: u64 = 64;
const ACKNOWLEDGED_BYTES: usize = 64 << 10;

/// A connection that resumed a run and was lost sooner was in vain. After so many of these in a
/// row, the run is given up.
const LASTS: Duration = Duration::from_secs(2);
const MOST_IN_VAIN: u32 = 8;

pub(super) struct RunState {
    pub executor: ExecutorId,
    pub connection: Arc<ExecutorConnection>,
    /// `None` while the executor is unreachable, and after the run.
    input: Option<Outgoing>,
    given: GivenCredit,
    listener: Listener,
    kept: Option<ResumeState>,
    /// Remaining allowance for its messages.
    pub allowance: Allowance,
    heard: Instant,
    /// Time of the last resumption, and the number of successive ones that were lost at once.
    resumed: Option<Instant>,
    resumed_in_vain: u32,
    /// The executor has announced the end of messages.
    pub finished: bool,
    /// Number of commands without an exit status.
    commands_left: usize,
    /// Sizes of the files that its redirects write to, at the start.
    pub written_files: Vec<WrittenFile>,
    /// Stages and descriptors of files whose final offsets the executor must report.
    shared_files: BTreeSet<(u32, u32)>,
}

/// The call that carries a run.
pub(super) struct RunCall {
    /// Messages to the executor.
    pub input: mpsc::Sender<RunInput>,
    /// Allowance for the executor's messages.
    pub allowance: Allowance,
    /// Passes them on.
    pub listener: Listener,
}

/// State for resuming a run that has a grace period.
#[derive(Default)]
struct ResumeState {
    run_id: String,
    received: u64,
    acknowledged: u64,
    unacknowledged_bytes: usize,
    credits: BTreeMap<u32, u64>,
    closed: BTreeSet<u32>,
    ended: BTreeSet<u32>,
    signals: Vec<Signal>,
}

impl RunState {
    /// Keeps only reported offsets of the files that were asked about: the executor must not move
    /// the shell's other descriptors, such as its script.
    pub fn keep_shared_offsets(&self, exited: &mut Exited) {
        keep_offsets(&self.shared_files, exited);
    }

    pub fn new(
        executor: ExecutorId,
        connection: Arc<ExecutorConnection>,
        call: RunCall,
        written_files: Vec<WrittenFile>,
        spec: &RunSpec,
    ) -> Self {
        // `Started` was the first.
        let kept =
            || ResumeState { run_id: spec.run_id.clone(), received: 1, ..ResumeState::default() };
        let kept = (spec.grace_ms > 0).then(kept);
        Self {
            executor,
            connection,
            input: Some(Outgoing::new(call.input)),
            given: GivenCredit::default(),
            listener: call.listener,
            kept,
            allowance: call.allowance,
            heard: Instant::now(),
            resumed: None,
            resumed_in_vain: 0,
            finished: false,
            commands_left: spec.stages.len(),
            written_files,
            shared_files: shared_files(spec),
        }
    }

    /// Time since the last message.
    pub fn silence(&self) -> Duration {
        self.heard.elapsed()
    }

    /// Returns true if nothing can be sent to it now.
    pub fn is_over(&self) -> bool {
        self.input.is_none()
    }

    pub fn send(&mut self, kind: run_input::Kind) {
        if let Some(kept) = &mut self.kept {
            kept.note(&kind);
        }
        match &kind {
            run_input::Kind::Credit(credit) => self.allowance.give(credit.stream, credit.bytes),
            run_input::Kind::Closed(stream) => self.allowance.close(*stream),
            run_input::Kind::Chunk(chunk) => self.given.sent(chunk),
            _ => {}
        }
        if let Some(input) = &self.input {
            input.send(kind);
        }
    }

    /// Notes the executor's credit for an input.
    pub fn given(&mut self, stream: u32, bytes: u64) -> Result<(), TooMuch> {
        self.given.give(stream, bytes)
    }

    /// Counts a message, and acknowledges from time to time.
    pub fn received(&mut self, message: &RunOutput) {
        match &message.kind {
            Some(run_output::Kind::Exited(_)) => {
                self.commands_left = self.commands_left.saturating_sub(1)
            }
            Some(run_output::Kind::Finished(_)) => {
                self.finished = true;
                // The executor reads until we close our side.
                self.input = None;
            }
            _ => {}
        }
        let Some(kept) = &mut self.kept else { return };
        self.heard = Instant::now();
        kept.received += 1;
        if let Some(run_output::Kind::Chunk(chunk)) = &message.kind {
            kept.unacknowledged_bytes += chunk.data.len();
        }
        let many = kept.received - kept.acknowledged >= ACKNOWLEDGED_MESSAGES;
        if many || kept.unacknowledged_bytes >= ACKNOWLEDGED_BYTES {
            (kept.acknowledged, kept.unacknowledged_bytes) = (kept.received, 0);
            let received = kept.received;
            self.send(run_input::Kind::Received(received));
        }
    }

    /// Notes the lost connection. Returns the request for resuming the run, if it is resumable.
    pub fn lost(&mut self) -> Option<Resume> {
        self.input = None;
        let is_in_vain = self.resumed.is_some_and(|since| since.elapsed() < LASTS);
        self.resumed_in_vain = if is_in_vain { self.resumed_in_vain + 1 } else { 0 };
        let kept = self.kept.as_ref()?;
        let credit = |(&stream, &bytes): (&u32, &u64)| Credit { stream, bytes };
        Some(Resume {
            run_id: kept.run_id.clone(),
            received: kept.received,
            credits: kept.credits.iter().map(credit).collect(),
            closed: kept.closed.iter().copied().collect(),
            ended: kept.ended.iter().copied().collect(),
            signals: kept.signals.clone(),
        })
    }

    /// Returns true if the executor resumes the run again and again, only to drop it.
    pub fn is_dropped_over_and_over(&self) -> bool {
        self.resumed_in_vain >= MOST_IN_VAIN
    }

    /// Continues over another connection.
    pub fn resumed(
        &mut self,
        connection: Arc<ExecutorConnection>,
        input: mpsc::Sender<RunInput>,
        listener: Listener,
    ) {
        (self.connection, self.input, self.listener) =
            (connection, Some(Outgoing::new(input)), listener);
        self.resumed = Some(Instant::now());
    }

    /// Ends the call: the run is not wanted any more.
    pub fn abandon(&mut self) {
        self.listener.end();
        (self.input, self.kept) = (None, None);
    }

    /// Leaves the run at the end of the pipeline: drains it if its commands have all ended, else
    /// abandons it.
    pub fn leave(mut self) {
        if self.commands_left == 0 {
            self.listener.leave();
        }
    }
}

/// Task that reads a run's messages. Dropping it ends the task, which tells the executor to end the
/// run.
///
/// Invariant: a call whose run has ended is drained, never reset. HTTP/2 libraries count data that
/// still arrives for a reset call, and after too much in a connection's life they close it, with
/// all other runs on it (h2's budget of small DATA frames, and of reset streams).
pub(super) struct Listener(Option<AbortHandle>);

impl Listener {
    pub fn new(task: AbortHandle) -> Self {
        Self(Some(task))
    }

    fn end(&mut self) {
        self.0.take().into_iter().for_each(|task| task.abort());
    }

    /// Detaches the task, which ends by itself.
    fn leave(&mut self) {
        self.0 = None;
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.end();
    }
}

impl ResumeState {
    fn note(&mut self, kind: &run_input::Kind) {
        match kind {
            run_input::Kind::Credit(credit) => {
                *self.credits.entry(credit.stream).or_default() += credit.bytes
            }
            run_input::Kind::Closed(stream) => drop(self.closed.insert(*stream)),
            run_input::Kind::End(stream) => drop(self.ended.insert(*stream)),
            run_input::Kind::Signal(signal) => self.signals.push(*signal),
            _ => {}
        }
    }
}

fn keep_offsets(shared_files: &BTreeSet<(u32, u32)>, exited: &mut Exited) {
    exited.offsets.retain(|offset| shared_files.contains(&(exited.stage, offset.fd)));
}

/// Stages and descriptors of files whose final offsets are requested.
fn shared_files(spec: &RunSpec) -> BTreeSet<(u32, u32)> {
    let of_stage = |stage: &Stage| {
        let id = stage.id;
        let is_meant = |descriptor: &&Descriptor| match &descriptor.source {
            Some(Source::File(file)) => file.report_offset,
            _ => false,
        };
        stage
            .descriptors
            .iter()
            .filter(is_meant)
            .map(|descriptor| (id, descriptor.fd))
            .collect::<Vec<_>>()
    };
    spec.stages.iter().flat_map(of_stage).collect()
}

#[cfg(test)]
mod tests {
    use posh_proto::executor::{File, Offset};

    use super::*;

    #[test]
    fn only_files_that_were_asked_for_are_moved() {
        let file = |report_offset| Some(Source::File(File { report_offset, ..File::default() }));
        let descriptor = |fd, source| Descriptor { fd, source };
        let descriptors =
            vec![descriptor(0, file(true)), descriptor(1, file(false)), descriptor(2, None)];
        let stage = Stage { id: 7, descriptors, ..Stage::default() };
        let shared = shared_files(&RunSpec { stages: vec![stage], ..RunSpec::default() });
        assert_eq!(shared, BTreeSet::from([(7, 0)]));
        let offsets = [0, 1, 2, 3].map(|fd| Offset { fd, offset: 21 }).to_vec();
        for (stage, expected) in [(7, vec![0]), (8, Vec::new())] {
            let mut exited = Exited { stage, offsets: offsets.clone(), ..Exited::default() };
            keep_offsets(&shared, &mut exited);
            assert_eq!(exited.offsets.iter().map(|offset| offset.fd).collect::<Vec<_>>(), expected);
        }
    }
}
