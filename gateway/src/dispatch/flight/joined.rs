//! Messages to and from local aggregators, as part of the relay.

use nix::sys::signal::Signal as Number;
use posh_proto::executor::{Credit, run_input};

use super::PipelineRelay;
use crate::{
    join::{AggregatorEvent, Joining},
    lower::{JOINED, RunStream},
    stage_link::Status,
};

impl PipelineRelay<'_> {
    /// Aggregator of a stage, while it runs.
    pub(super) fn joining(&self, stage: usize) -> Option<&Joining> {
        let join = self.stages.get(&stage)?.join.as_ref()?;
        join.ended.is_none().then_some(&join.joining)
    }

    pub(super) fn signal_join(&self, stage: usize, signal: u32) {
        if let (Some(joining), Ok(signal)) =
            (self.joining(stage), Number::try_from(signal.cast_signed()))
        {
            joining.signal(signal);
        }
    }

    pub(super) async fn join_told(&mut self, stage: usize, event: AggregatorEvent) {
        match event {
            AggregatorEvent::Fed(part, bytes) => self.credit_part(stage, part, bytes).await,
            AggregatorEvent::Output(data) => self.show(stage, 1, data).await,
            AggregatorEvent::Errors(data) => self.show(stage, 2, data).await,
            AggregatorEvent::Over(status) => self.join_over(stage, status).await,
        }
    }

    async fn credit_part(&mut self, stage: usize, part: usize, bytes: u64) {
        let input =
            self.stages.get(&stage).and_then(|s| s.join.as_ref()).and_then(|j| j.inputs.get(part));
        if let Some(&(run, stream)) = input.filter(|stream| self.joined.contains_key(*stream)) {
            self.send_to(run, run_input::Kind::Credit(Credit { stream, bytes }));
        }
    }

    async fn show(&mut self, stage: usize, fd: u32, data: bytes::Bytes) {
        let bytes = data.len() as u64;
        match self.outputs.get_mut(&(stage, fd)) {
            Some(output) => {
                let released = output.push((JOINED, fd), data);
                let undelivered = output.take_undelivered();
                self.deliver(stage, fd, released).await;
                self.tell_undelivered(stage, fd, undelivered).await;
            }
            // Output to /dev/null.
            None if fd == 1 => self.joining(stage).into_iter().for_each(|j| j.allow(bytes)),
            None => {}
        }
    }

    /// Handles the end of the aggregator: its outputs end too, and the parts have no reader any
    /// more.
    async fn join_over(&mut self, stage: usize, status: Status) {
        let Some(join) = self.stages.get_mut(&stage).and_then(|s| s.join.as_mut()) else { return };
        join.ended = Some(status);
        let unread: Vec<RunStream> =
            join.inputs.iter().copied().filter(|s| self.joined.contains_key(s)).collect();
        for (run, stream) in unread {
            self.send_to(run, run_input::Kind::Closed(stream));
        }
        for fd in [1, 2] {
            self.end_stream_of(stage, fd, (JOINED, fd)).await;
        }
    }
}
