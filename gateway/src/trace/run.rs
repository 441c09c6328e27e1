//! Trace of one run on an executor: the call as seen from this machine, and the executor's own
//! times within it.

use posh_proto::executor::{Exited, RunTimes, StartTimes};

use super::{Row, TraceEvent, Tracer, arrival::Arrival};

/// Start of a run: local times, and the executor's report.
#[derive(Debug, Clone, Copy, Default)]
pub struct RunStart {
    /// Time of sending the specification.
    pub sent_ns: u64,
    /// Time of receiving `Started`.
    pub started_ns: u64,
    /// The executor's own times.
    pub times: Option<StartTimes>,
}

/// Trace of one run in progress.
#[derive(Debug)]
pub struct RunTrace {
    tracer: Tracer,
    executor: String,
    call: RunStart,
    arrival: Arrival,
    first_chunk_ns: u64,
    /// Exited commands: name, the executor's time, ours.
    exits: Vec<(String, u64, u64)>,
    finished: Option<RunTimes>,
    over_ns: u64,
}

impl RunTrace {
    /// Trace of a run that has just started.
    #[must_use]
    pub fn new(tracer: Tracer, executor: String, call: RunStart) -> Self {
        let mut arrival = Arrival::after(call.sent_ns);
        call.times.into_iter().for_each(|times| arrival.heard(call.started_ns, times.started_ns));
        Self {
            tracer,
            executor,
            call,
            arrival,
            first_chunk_ns: 0,
            exits: Vec::new(),
            finished: None,
            over_ns: 0,
        }
    }

    /// Notes output of the run.
    pub fn chunk(&mut self) {
        if self.first_chunk_ns == 0 {
            self.first_chunk_ns = self.tracer.now_ns();
        }
    }

    /// Notes the exit of a command.
    pub fn exited(&mut self, command: &str, exited: &Exited) {
        if exited.exited_ns > 0 {
            let now_ns = self.tracer.now_ns();
            self.arrival.heard(now_ns, exited.exited_ns);
            self.exits.push((command.to_owned(), exited.exited_ns, now_ns));
        }
    }

    /// Notes the last message of the run.
    pub fn finished(&mut self, times: Option<RunTimes>) {
        self.over();
        let Some(times) = times else { return };
        self.arrival.heard(self.over_ns, times.finished_ns);
        let first_byte_ns =
            times.outlets.iter().map(|o| o.first_byte_ns).filter(|ns| *ns > 0).min();
        if let Some(own_ns) = first_byte_ns.filter(|_| self.first_chunk_ns > 0) {
            self.arrival.heard(self.first_chunk_ns, own_ns);
        }
        self.finished = Some(times);
    }

    /// Notes the end of the stream.
    pub fn over(&mut self) {
        if self.over_ns == 0 {
            self.over_ns = self.tracer.now_ns();
        }
    }

    /// Adds the run's events. `outlet` names the source of a stream.
    pub fn tell(mut self, outlet: impl Fn(u32) -> String) {
        self.over();
        let here = Row::Call(self.executor.clone());
        self.call_events().into_iter().for_each(|event| self.tracer.add(here.clone(), event));
        let Some(times) = self.call.times else { return };
        let there = Row::Run(self.executor.clone());
        let events = self.start_events(&times).into_iter().chain(self.outlet_events(outlet));
        events.for_each(|event| self.tracer.add(there.clone(), event));
        for (command, exited_ns, _) in &self.exits {
            let life = TraceEvent::span(
                command.clone(),
                self.here_ns(times.spawned_ns),
                self.here_ns(*exited_ns),
            );
            self.tracer.add(Row::Command(self.executor.clone(), command.clone()), life);
        }
    }

    fn call_events(&self) -> Vec<TraceEvent> {
        let mut start = TraceEvent::span("start", self.call.sent_ns, self.call.started_ns);
        if let Some(times) = self.call.times {
            let network_ns =
                (self.call.started_ns - self.call.sent_ns).saturating_sub(times.started_ns);
            start = start.with("executor_ms", milliseconds(times.started_ns));
            start = start.with("network_ms", milliseconds(network_ns));
            start = start.with("network_ms_at_best", milliseconds(self.arrival.network_ns()));
        }
        let mut events = vec![TraceEvent::span("run", self.call.sent_ns, self.over_ns), start];
        if self.first_chunk_ns > 0 {
            events.push(TraceEvent::moment("first output", self.first_chunk_ns));
        }
        events.extend(
            self.exits
                .iter()
                .map(|(command, _, ns)| TraceEvent::moment(format!("exit of {command}"), *ns)),
        );
        events
    }

    fn start_events(&self, times: &StartTimes) -> Vec<TraceEvent> {
        let last_ns = self.exits.iter().map(|(_, ns, _)| *ns).max().unwrap_or(times.started_ns);
        let end_ns = self.finished.as_ref().map_or(last_ns, |finished| finished.finished_ns);
        let steps = [
            ("checking", 0, times.checked_ns),
            ("waiting for a runner", times.checked_ns, times.runner_ns),
            ("handing over", times.runner_ns, times.taken_ns),
            ("preparing", times.taken_ns, times.prepared_ns),
            ("spawning", times.prepared_ns, times.spawned_ns),
            ("letting go", times.spawned_ns, times.started_ns),
        ];
        let whole = TraceEvent::span("run", self.here_ns(0), self.here_ns(end_ns));
        let steps = steps
            .map(|(name, from, to)| TraceEvent::span(name, self.here_ns(from), self.here_ns(to)));
        [whole].into_iter().chain(steps).collect()
    }

    fn outlet_events(&self, outlet: impl Fn(u32) -> String) -> Vec<TraceEvent> {
        let outlets = self.finished.iter().flat_map(|finished| &finished.outlets);
        let events = outlets.flat_map(|times| {
            let what = outlet(times.stream);
            [("first byte of", times.first_byte_ns), ("end of", times.ended_ns)]
                .into_iter()
                .filter(|(_, own_ns)| *own_ns > 0)
                .map(move |(name, own_ns)| {
                    TraceEvent::moment(format!("{name} {what}"), self.here_ns(own_ns))
                })
        });
        events.collect()
    }

    /// Converts an executor's time to our clock, within the call.
    fn here_ns(&self, own_ns: u64) -> u64 {
        self.arrival.middle_ns().saturating_add(own_ns).min(self.over_ns)
    }
}

#[expect(clippy::cast_precision_loss, reason = "three digits are shown")]
fn milliseconds(ns: u64) -> String {
    format!("{:.3}", ns as f64 / 1e6)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMES: StartTimes = StartTimes {
        checked_ns: 1_000,
        runner_ns: 2_000,
        taken_ns: 3_000,
        prepared_ns: 4_000,
        spawned_ns: 5_000,
        started_ns: 6_000,
    };

    fn run(over_ns: u64) -> RunTrace {
        let call = RunStart { sent_ns: 100_000, started_ns: 126_000, times: Some(TIMES) };
        let mut run = RunTrace::new(Tracer::default(), "store1".into(), call);
        run.over_ns = over_ns;
        run
    }

    #[test]
    fn an_executor_s_steps_lie_inside_of_the_call() {
        let mut run = run(190_000);
        run.exits.push(("grep".into(), 50_000, 170_000));
        let events = run.start_events(&TIMES);
        // 20,000 on the way, there and back: it arrived after 10,000.
        assert_eq!((events[0].start_ns, events[0].end_ns), (110_000, Some(160_000)));
        assert!(events.windows(2).skip(1).all(|pair| pair[0].end_ns == Some(pair[1].start_ns)));
        assert_eq!(events[6].end_ns, Some(116_000));
        let start = &run.call_events()[1];
        assert_eq!(
            start.notes[..2],
            [("executor_ms", "0.006".into()), ("network_ms", "0.020".into())]
        );
    }

    #[test]
    fn whatever_is_said_nothing_ends_after_the_call() {
        let mut run = run(130_000);
        run.finished = Some(RunTimes { finished_ns: 1_000_000, ..RunTimes::default() });
        assert!(run.start_events(&TIMES).iter().all(|event| event.end_ns <= Some(130_000)));
    }
}
