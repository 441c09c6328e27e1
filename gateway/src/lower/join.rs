//! Lowering of aggregators. On the parts' machine, an aggregator's commands are further commands of
//! the run, which read the parts' pipes. On this machine, it reads the parts' streams.

use bytes::Bytes;
use posh_proto::executor::{
    Descriptor as WireDescriptor, Merge, Outlet, Stage, descriptor::Source,
};

use super::{Builder, CommandPlace, JOINED, JoinedHere, OUTPUT_CREDIT_BYTES, bare, bytes};
use crate::{
    enlisted::{Descriptor, DescriptorKind},
    facts::ResolvedCommand,
    join::{AggregatorProgram, JoinSource as Parts, Recipe, Words},
    plan::{ExecutorId, Join, Site, StagePart, Steps},
};

/// First descriptor for a merging command's parts: above those that scripts use.
const FIRST_PART_FD: u32 = 40;

impl Builder<'_> {
    fn recipe(&self, stage: usize, steps: Steps, parts: &[StagePart]) -> Recipe {
        Recipe::of(steps, stage, parts, &|stage| Words {
            argv: &self.commands[stage].argv,
            invocation: &self.reading(stage).invocation,
        })
    }

    fn reading(&self, stage: usize) -> &ResolvedCommand {
        self.readings[stage].as_ref().expect("only read commands are placed")
    }

    /// Adds the pipe from an aggregator's last command to the next stage on the same machine.
    pub(super) fn lay_pipe_of_join(&mut self, edge: usize, stage: usize, parts: &[StagePart]) {
        let Join::By { steps, .. } = self.plan.joins[stage] else { return };
        let last = parts.len() + self.recipe(stage, steps, parts).commands.len() - 1;
        let run = self.run_of(&parts[0]);
        let pipe = self.lowered.runs[run].pipe();
        self.writes.insert((edge, last), pipe);
        self.reads.insert((edge, 0), pipe);
    }

    /// Output of a part that an aggregator joins. Its errors are separate, even if the stage's own
    /// descriptors are one terminal.
    pub(super) fn output_of_part(&mut self, place: &CommandPlace, local: &Descriptor) -> Source {
        if local.fd != 1 && local.kind == DescriptorKind::Null {
            return Source::NullFlags(local.flags & super::ACCESS_AND_STATUS);
        }
        let run = &mut self.lowered.runs[place.run];
        let pipe = run.pipe();
        let joined_there =
            matches!(self.plan.joins[place.stage], Join::By { at: Site::Executor(_), .. });
        if local.fd == 1 && joined_there {
            self.part_pipes.entry(place.stage).or_default().push(pipe);
            return Source::PipeWrite(pipe);
        }
        let stream = run.number();
        run.spec.outlets.push(Outlet {
            stream,
            sources: vec![pipe],
            initial_credit_bytes: OUTPUT_CREDIT_BYTES,
        });
        let stream = (place.run, stream);
        if local.fd == 1 {
            self.part_streams.entry(place.stage).or_default().push(stream);
        } else {
            self.lowered.outputs.entry((place.stage, local.fd)).or_default().push(stream);
        }
        Source::PipeWrite(pipe)
    }

    /// Adds the aggregator of a stage whose parts are added.
    pub(super) fn add_join(&mut self, stage: usize, parts: &[StagePart]) {
        let Join::By { steps, at } = self.plan.joins[stage] else { return };
        let recipe = self.recipe(stage, steps, parts);
        match at {
            Site::Here => self.join_here(stage, recipe),
            Site::Executor(executor) => self.join_there(stage, &recipe, executor),
        }
    }

    fn join_here(&mut self, stage: usize, recipe: Recipe) {
        let inputs = self.part_streams.remove(&stage).unwrap_or_default();
        let enlisted = &self.commands[stage];
        for fd in [1, 2] {
            if enlisted.descriptor(fd).is_some_and(|d| d.kind != DescriptorKind::Null) {
                self.lowered.outputs.entry((stage, fd)).or_default().push((JOINED, fd));
            }
        }
        let programs = recipe.commands.iter().map(|step| {
            let enlisted = &self.commands[step.stage];
            AggregatorProgram { path: enlisted.program.clone(), env: enlisted.env.clone() }
        });
        let programs = programs.collect();
        self.lowered.joins.insert(stage, JoinedHere { recipe, programs, inputs });
    }

    fn join_there(&mut self, stage: usize, recipe: &Recipe, executor: ExecutorId) {
        let run = self
            .lowered
            .runs
            .iter()
            .position(|r| r.executor == executor)
            .expect("made for every part");
        let (mut input, parts) = self.inputs_of_join(stage, recipe, run);
        let mut parts = Some(parts);
        for (index, step) in recipe.commands.iter().enumerate() {
            let is_last = index + 1 == recipe.commands.len();
            let number = recipe.parts + index;
            let place = CommandPlace { stage, number, run, executor, is_whole: is_last };
            let mut descriptors = vec![WireDescriptor { fd: 0, source: Some(input.clone()) }];
            if is_last {
                descriptors.extend(self.own_descriptor(&place, 1));
                descriptors.extend(self.own_descriptor(&place, 2));
            } else {
                let pipe = self.lowered.runs[run].pipe();
                descriptors.push(WireDescriptor { fd: 1, source: Some(Source::PipeWrite(pipe)) });
                descriptors.extend(self.own_descriptor(&place, 2));
                input = Source::PipeRead(pipe);
            }
            let mut argv: Vec<Bytes> = step.argv.iter().map(|w| bytes(w)).collect();
            for descriptor in parts.take().unwrap_or_default() {
                argv.push(format!("/dev/fd/{}", descriptor.fd).into());
                descriptors.push(descriptor);
            }
            let id = self.lowered.runs[run].number();
            self.lowered.commands.insert((run, id), (stage, number));
            let own = bare(id, &self.commands[step.stage], &self.reading(step.stage).invocation);
            self.lowered.runs[run].spec.stages.push(Stage { argv, descriptors, ..own });
        }
    }

    /// The first command's standard input, and the parts' descriptors.
    fn inputs_of_join(
        &mut self,
        stage: usize,
        recipe: &Recipe,
        run: usize,
    ) -> (Source, Vec<WireDescriptor>) {
        let pipes = self.part_pipes.remove(&stage).unwrap_or_default();
        if recipe.source == Parts::InOrder {
            let run = &mut self.lowered.runs[run];
            let pipe = run.pipe();
            run.spec.merges.push(Merge { sources: pipes, pipe });
            return (Source::PipeRead(pipe), Vec::new());
        }
        let parts = (FIRST_PART_FD..).zip(pipes);
        let parts =
            parts.map(|(fd, pipe)| WireDescriptor { fd, source: Some(Source::PipeRead(pipe)) });
        (Source::NullFlags(nix::libc::O_RDONLY.cast_unsigned()), parts.collect())
    }

    fn own_descriptor(&mut self, place: &CommandPlace, fd: u32) -> Option<WireDescriptor> {
        let enlisted = &self.commands[place.stage];
        let invocation =
            &self.readings[place.stage].as_ref().expect("only read commands are placed").invocation;
        self.descriptor(place, enlisted, invocation, fd)
    }
}
