//! Timelines of a session's programs, on request (`posh --trace`, docs/trace.md). A [`Trace`] keeps
//! events of one session; a [`Tracer`] adds those of one pipeline. Without a request it does
//! nothing, not even read a clock. `render` has the output format, `arrival` the mapping of another
//! machine's times to ours.

mod arrival;
mod render;
mod run;

use std::{
    borrow::Cow,
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use posh_proto::clock::monotonic_ns;

use crate::{
    enlisted::Enlisted,
    model::LocalReason,
    stage_link::{StageLink, Times},
};

pub use run::{RunStart, RunTrace};

/// Limit on events per session, at some 200 bytes each: a thousand pipelines of a few stages. Later
/// ones are only counted.
const MOST_EVENTS: usize = 20_000;
/// Pipeline number of events without a pipeline; pipelines are numbered from 1.
const NO_PIPELINE: u64 = 0;
/// Limit on the shown characters of a command's arguments.
const WORDS_SHOWN: usize = 120;

/// Place of an event: the program, and a row in it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Row {
    /// `posh` itself.
    Session,
    /// A stage program: its index in the pipeline, its command.
    Stage(usize, String),
    /// The gateway's work on a pipeline as a whole.
    Pipeline,
    /// The gateway's call to an executor.
    Call(String),
    /// The gateway's work at the end of a stage: its index, its command.
    Ending(usize, String),
    /// An executor's work on a run.
    Run(String),
    /// A command on an executor.
    Command(String, String),
}

/// An event with a duration, or a moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TraceEvent {
    /// Name of the event.
    pub name: Cow<'static, str>,
    /// By [`monotonic_ns`].
    pub start_ns: u64,
    /// `None`: a moment.
    pub end_ns: Option<u64>,
    /// Further data.
    pub notes: Vec<(&'static str, String)>,
}

impl TraceEvent {
    /// Event with a duration.
    #[must_use]
    pub fn span(name: impl Into<Cow<'static, str>>, start_ns: u64, end_ns: u64) -> Self {
        Self { name: name.into(), start_ns, end_ns: Some(end_ns.max(start_ns)), notes: Vec::new() }
    }

    /// Event at one moment.
    #[must_use]
    pub fn moment(name: impl Into<Cow<'static, str>>, at_ns: u64) -> Self {
        Self { name: name.into(), start_ns: at_ns, end_ns: None, notes: Vec::new() }
    }

    /// Adds a note.
    #[must_use]
    pub fn with(mut self, key: &'static str, value: impl fmt::Display) -> Self {
        self.notes.push((key, value.to_string()));
        self
    }
}

/// Start and end of `posh` and its shell, by [`monotonic_ns`].
#[derive(Debug, Clone, Copy)]
pub struct SessionTimes {
    /// posh began.
    pub started_ns: u64,
    /// The shell was started.
    pub shell_ns: u64,
    /// The shell ended.
    pub ended_ns: u64,
}

/// An event with its pipeline number and row.
type Placed = (u64, Row, TraceEvent);

/// Events of a session.
#[derive(Debug, Default)]
pub struct Trace {
    kept: Mutex<KeptEvents>,
}

#[derive(Debug, Default)]
struct KeptEvents {
    events: Vec<Placed>,
    dropped: u64,
}

impl Trace {
    /// Renders the trace; also returns the number of dropped events.
    #[must_use]
    pub fn document(&self, session: &SessionTimes) -> (String, u64) {
        let kept = self.lock();
        let mut own = vec![
            TraceEvent::span("opening the session", session.started_ns, session.shell_ns),
            TraceEvent::span("shell", session.shell_ns, session.ended_ns),
        ];
        if kept.dropped > 0 {
            own.push(TraceEvent::moment(
                format!("no room for {} later events", kept.dropped),
                session.ended_ns,
            ));
        }
        let own: Vec<Placed> =
            own.into_iter().map(|event| (NO_PIPELINE, Row::Session, event)).collect();
        (render::document(own.iter().chain(&kept.events), kept.dropped), kept.dropped)
    }

    fn add(&self, pipeline: u64, row: Row, event: TraceEvent) {
        let mut kept = self.lock();
        if kept.events.len() < MOST_EVENTS {
            kept.events.push((pipeline, row, event));
        } else {
            kept.dropped += 1;
        }
    }

    fn lock(&self) -> MutexGuard<'_, KeptEvents> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Adds one pipeline's events to its session's trace, if there is one.
#[derive(Debug, Clone, Default)]
pub struct Tracer(Option<(Arc<Trace>, u64)>);

impl Tracer {
    /// Tracer for a pipeline by its number.
    #[must_use]
    pub fn new(trace: Option<Arc<Trace>>, pipeline: u64) -> Self {
        Self(trace.map(|trace| (trace, pipeline)))
    }

    /// Returns true if the session is traced.
    #[must_use]
    pub fn is_on(&self) -> bool {
        self.0.is_some()
    }

    /// Current time; 0 without a trace.
    #[must_use]
    pub fn now_ns(&self) -> u64 {
        if self.is_on() { monotonic_ns() } else { 0 }
    }

    /// Adds an event.
    pub fn add(&self, row: Row, event: TraceEvent) {
        if let Some((trace, pipeline)) = &self.0 {
            trace.add(*pipeline, row, event);
        }
    }

    /// Adds a step of the gateway's work, from `since_ns` until now. Returns the current time, at
    /// which the next step begins.
    pub fn step(&self, name: &'static str, since_ns: u64) -> u64 {
        let now_ns = self.now_ns();
        if self.is_on() {
            self.add(Row::Pipeline, TraceEvent::span(name, since_ns, now_ns));
        }
        now_ns
    }

    /// Notes that the pipeline is assembled. Returns the current time.
    pub fn assembled(&self, stages: &[StageLink]) -> u64 {
        let came = stages.iter().filter_map(|stage| stage.times).map(|times| times.received_ns);
        self.step("assembly", came.min().unwrap_or_else(|| self.now_ns()))
    }

    /// Notes that a stage runs its command locally.
    pub fn runs_here(&self, place: usize, stage: &StageLink, reason: &LocalReason) {
        let Some(times) = stage.times.filter(|_| self.is_on()) else { return };
        let times = Times { directed_ns: self.now_ns(), ..times };
        let end =
            TraceEvent::moment("runs here", times.directed_ns).with("why", reason.to_string());
        self.stage(place, &stage.enlisted, &times, end);
    }

    /// Notes that an executor did not start a run.
    pub fn refused(&self, executor: String, sent_ns: u64, why: &impl fmt::Display) {
        if self.is_on() {
            let event = TraceEvent::span("refused", sent_ns, self.now_ns()).with("why", why);
            self.add(Row::Call(executor), event);
        }
    }

    /// Notes the end of a stage that stood in for its command.
    pub fn stood_in(&self, place: usize, stage: &Enlisted, times: &Times) {
        // A stage program that was killed, or still writes, has not reported its end.
        let end_ns = if times.ended_ns == 0 { self.now_ns() } else { times.ended_ns };
        if times.first_byte_ns > 0 {
            self.add(
                row_of(place, stage),
                TraceEvent::moment("first byte written", times.first_byte_ns),
            );
        }
        self.stage(
            place,
            stage,
            times,
            TraceEvent::span("standing in", times.directed_ns.max(times.enlisted_ns), end_ns),
        );
    }

    fn stage(&self, place: usize, stage: &Enlisted, times: &Times, last: TraceEvent) {
        let end_ns = last.end_ns.unwrap_or(last.start_ns);
        let whole = TraceEvent::span(stage.name.clone(), times.started_ns, end_ns)
            .with("words", words(stage));
        let first = TraceEvent::span("looking", times.started_ns, times.enlisted_ns);
        let waiting =
            TraceEvent::span("waiting for the directive", times.enlisted_ns, times.directed_ns);
        for event in [whole.with("pid", stage.pid), first, waiting, last] {
            self.add(row_of(place, stage), event);
        }
    }
}

fn row_of(place: usize, stage: &Enlisted) -> Row {
    Row::Stage(place, stage.name.clone())
}

/// Arguments of a command, truncated.
fn words(stage: &Enlisted) -> String {
    let words = stage.argv.iter().map(|word| word.to_string_lossy());
    let mut line = String::new();
    for word in words {
        line = if line.is_empty() { word.into_owned() } else { line + " " + &word };
        if let Some((end, _)) = line.char_indices().nth(WORDS_SHOWN) {
            line.truncate(end);
            return line + "…";
        }
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trace_is_bounded_and_says_so() {
        let trace = Arc::new(Trace::default());
        let tracer = Tracer::new(Some(Arc::clone(&trace)), 1);
        for _ in 0..MOST_EVENTS + 3 {
            tracer.step("step", 1);
        }
        let (document, dropped) =
            trace.document(&SessionTimes { started_ns: 1, shell_ns: 2, ended_ns: 3 });
        assert_eq!(dropped, 3);
        assert!(document.contains("3 later events"), "the document says it, too");
    }

    #[test]
    fn where_nobody_asked_nothing_is_done() {
        let tracer = Tracer::default();
        assert_eq!((tracer.now_ns(), tracer.step("step", 0), tracer.assembled(&[])), (0, 0, 0));
    }
}
