//! Writes a trace in Chrome's trace event format ("JSON Object Format" of the document *Trace Event
//! Format*), which ui.perfetto.dev and chrome://tracing open: complete events (`X`) and instant
//! ones (`i`), times in microseconds, and metadata events (`M`) that name programs and rows.

use std::collections::{BTreeMap, BTreeSet};

use posh_proto::untrusted::escaped_json;
use serde_json::{Map, Value, json};

use super::{Placed, Row, TraceEvent};

/// A program, in display order.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum TracedProgram {
    Posh,
    Gateway,
    Executor(String),
}

impl TracedProgram {
    fn of(row: &Row) -> Self {
        match row {
            Row::Session | Row::Stage(..) => Self::Posh,
            Row::Pipeline | Row::Call(_) | Row::Ending(..) => Self::Gateway,
            Row::Run(executor) | Row::Command(executor, _) => Self::Executor(executor.clone()),
        }
    }

    fn name(&self) -> String {
        match self {
            Self::Posh => "posh".to_owned(),
            Self::Gateway => "gateway".to_owned(),
            Self::Executor(name) => format!("executor {name}"),
        }
    }

    fn category(&self) -> &'static str {
        match self {
            Self::Posh => "posh",
            Self::Gateway => "gateway",
            Self::Executor(_) => "executor",
        }
    }
}

fn row_name(pipeline: u64, row: &Row) -> String {
    let what = match row {
        Row::Session => return "session".to_owned(),
        Row::Pipeline | Row::Run(_) => return format!("pipeline {pipeline}"),
        Row::Stage(place, name) => format!("stage {}: {name}", place + 1),
        Row::Ending(place, name) => format!("end of stage {}: {name}", place + 1),
        Row::Call(executor) => format!("call to {executor}"),
        Row::Command(_, command) => command.clone(),
    };
    format!("pipeline {pipeline}, {what}")
}

/// Renders the document. Times count from the first event.
pub fn document<'a>(events: impl Iterator<Item = &'a Placed> + Clone, dropped: u64) -> String {
    let rows: BTreeSet<(TracedProgram, u64, &Row)> =
        events.clone().map(|(n, row, _)| (TracedProgram::of(row), *n, row)).collect();
    let programs: BTreeSet<&TracedProgram> = rows.iter().map(|(program, ..)| program).collect();
    let programs: BTreeMap<&TracedProgram, u64> = programs.into_iter().zip(1..).collect();
    let mut written: Vec<String> = Vec::new();
    let mut write = |event: &Value| written.push(escaped_html(&event.to_string()));
    programs
        .iter()
        .flat_map(|(program, pid)| named_program(program, *pid))
        .for_each(|event| write(&event));
    let mut places = BTreeMap::new();
    // Keep row numbers apart from program numbers: viewers take an equal one for the main thread.
    for (tid, (program, pipeline, row)) in (1 + programs.len() as u64..).zip(&rows) {
        let place = DrawnRow { program: programs[program], row: tid };
        named_row(place, &row_name(*pipeline, row)).iter().for_each(&mut write);
        places.insert((*pipeline, *row), (place, program.category()));
    }
    let origin_ns = events.clone().map(|(.., event)| event.start_ns).min().unwrap_or(0);
    for (pipeline, row, event) in events {
        let (place, category) = places[&(*pipeline, row)];
        write(&written_event(event, place, category, origin_ns));
    }
    let about = json!({ "posh": env!("CARGO_PKG_VERSION"), "dropped": dropped });
    // One event per line, and never all of them as values: these take ten times the memory of their
    // text.
    let events = written.join(",\n");
    format!("{{\"traceEvents\":[\n{events}\n],\"displayTimeUnit\":\"ms\",\"otherData\":{about}}}\n")
}

/// Position of an event in the drawing.
#[derive(Clone, Copy)]
struct DrawnRow {
    program: u64,
    /// 0 for the program itself.
    row: u64,
}

/// Names and words come from users and servers. The document must be harmless in a web page or on a
/// terminal.
fn escaped_html(event: &str) -> String {
    escaped_json(event).replace('<', "\\u003c").replace('>', "\\u003e").replace('&', "\\u0026")
}

fn named_program(program: &TracedProgram, pid: u64) -> [Value; 2] {
    let place = DrawnRow { program: pid, row: 0 };
    [
        metadata("process_name", place, &json!({ "name": program.name() })),
        metadata("process_sort_index", place, &json!({ "sort_index": pid })),
    ]
}

fn named_row(place: DrawnRow, name: &str) -> [Value; 2] {
    [
        metadata("thread_name", place, &json!({ "name": name })),
        metadata("thread_sort_index", place, &json!({ "sort_index": place.row })),
    ]
}

fn metadata(name: &str, place: DrawnRow, arguments: &Value) -> Value {
    let DrawnRow { program, row } = place;
    json!({ "name": name, "ph": "M", "ts": 0, "pid": program, "tid": row, "args": arguments })
}

fn written_event(event: &TraceEvent, place: DrawnRow, category: &str, origin_ns: u64) -> Value {
    let notes: Map<String, Value> =
        event.notes.iter().map(|(key, value)| ((*key).to_owned(), value.as_str().into())).collect();
    let mut written = json!({
        "name": event.name, "cat": category, "pid": place.program, "tid": place.row,
        "args": notes,
        "ts": microseconds(event.start_ns.saturating_sub(origin_ns)),
    });
    match event.end_ns {
        Some(end_ns) => {
            written["ph"] = "X".into();
            written["dur"] = microseconds(end_ns.saturating_sub(event.start_ns)).into();
        }
        None => {
            written["ph"] = "i".into();
            // Drawn in its own row only.
            written["s"] = "t".into();
        }
    }
    written
}

#[expect(clippy::cast_precision_loss, reason = "exact for the first hundred days of a trace")]
fn microseconds(ns: u64) -> f64 {
    ns as f64 / 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_named_and_times_count_from_the_first_event() {
        let events = [
            (
                1,
                Row::Command("store1".into(), "grep".into()),
                TraceEvent::span("grep", 7_000, 9_500),
            ),
            (0, Row::Session, TraceEvent::moment("began", 5_000).with("why", "a test")),
        ];
        let document: Value = serde_json::from_str(&document(events.iter(), 0)).unwrap();
        let written = document["traceEvents"].as_array().unwrap();
        let named = |kind: &str| -> Vec<&str> {
            written
                .iter()
                .filter(|e| e["name"] == kind)
                .map(|e| e["args"]["name"].as_str().unwrap())
                .collect()
        };
        assert_eq!(named("process_name"), ["posh", "executor store1"]);
        assert_eq!(named("thread_name"), ["session", "pipeline 1, grep"]);
        let grep = written.iter().find(|e| e["name"] == "grep").unwrap();
        assert_eq!(
            (&grep["ph"], &grep["ts"], &grep["dur"]),
            (&json!("X"), &json!(2.0), &json!(2.5))
        );
        let began = written.iter().find(|e| e["name"] == "began").unwrap();
        assert_eq!(
            (&began["ph"], &began["ts"], &began["args"]["why"]),
            (&json!("i"), &json!(0.0), &json!("a test"))
        );
        assert_ne!((&grep["pid"], &grep["tid"]), (&began["pid"], &began["tid"]));
    }

    #[test]
    fn a_trace_of_nothing_is_a_document() {
        let document: Value = serde_json::from_str(&document([].iter(), 0)).unwrap();
        assert_eq!(document["traceEvents"], json!([]));
    }
}
