//! `posh --trace`: one timeline over stage programs, gateway and executors, that a
//! viewer of Chrome's trace event format takes, and in which times of two machines fit together.

use std::collections::BTreeMap;
use std::fs;

use posh_integration::host::HOME;
use posh_integration::oracle::Under;
use posh_integration::wire::Profile;
use posh_integration::{Lab, LabSpec, RunOutcome, Script};
use serde::Deserialize;

use crate::programs;

/// What every event must have. Times are microseconds.
#[derive(Debug, Clone, Deserialize)]
struct Event {
    name: String,
    ph: String,
    pid: u64,
    tid: u64,
    ts: f64,
    dur: Option<f64>,
    /// How far an instant event is drawn.
    s: Option<String>,
    args: BTreeMap<String, serde_json::Value>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Document {
    trace_events: Vec<Event>,
}

/// Times are written with three digits behind the point.
const ROUNDING_US: f64 = 0.002;

impl Event {
    fn end(&self) -> f64 {
        self.ts + self.dur.unwrap_or(0.0)
    }

    fn is_within(&self, other: &Event) -> bool {
        self.ts + ROUNDING_US >= other.ts && self.end() <= other.end() + ROUNDING_US
    }
}

impl Document {
    /// Reads the file of that name in the user's home and checks what holds for every trace.
    fn read(lab: &Lab, name: &str) -> Document {
        let text = fs::read_to_string(lab.workstation.path(HOME).join(name)).unwrap();
        let document: Document =
            serde_json::from_str(&text).unwrap_or_else(|e| panic!("{name}: {e}: {text}"));
        document.trace_events.iter().for_each(|event| document.check(event));
        document
    }

    fn check(&self, event: &Event) {
        let (is_span, is_moment) = (event.dur.is_some(), event.s.as_deref() == Some("t"));
        assert_eq!(
            [is_span, is_moment, event.ph == "M"],
            [event.ph == "X", event.ph == "i", !is_span && !is_moment]
        );
        assert!(event.ts >= 0.0 && event.dur.is_none_or(|dur| dur >= 0.0), "{event:?}");
        if event.ph != "M" {
            assert!(
                self.names("thread_name").contains_key(&event.tid),
                "{event:?} is in a row without a name"
            );
        }
        // A viewer draws spans of one row inside of each other, or one after the other.
        for other in self.spans().filter(|other| is_span && other.tid == event.tid) {
            let apart =
                event.end() <= other.ts + ROUNDING_US || other.end() <= event.ts + ROUNDING_US;
            assert!(
                apart || event.is_within(other) || other.is_within(event),
                "{event:?} crosses {other:?}"
            );
        }
    }

    fn spans(&self) -> impl Iterator<Item = &Event> {
        self.trace_events.iter().filter(|event| event.dur.is_some())
    }

    /// What metadata events call a program (by pid) or a row (by tid).
    fn names(&self, kind: &str) -> BTreeMap<u64, &str> {
        let named = self.trace_events.iter().filter(|event| event.name == kind);
        let key = |event: &Event| if kind == "process_name" { event.pid } else { event.tid };
        named.map(|event| (key(event), event.args["name"].as_str().unwrap())).collect()
    }

    fn programs(&self) -> Vec<&str> {
        self.names("process_name").into_values().collect()
    }

    /// Events of all rows of a program whose name ends so.
    fn row(&self, program: &str, row: &str) -> Vec<&Event> {
        let (programs, rows) = (self.names("process_name"), self.names("thread_name"));
        let is_there = |event: &&Event| {
            let row_name = rows.get(&event.tid).is_some_and(|name| name.ends_with(row));
            event.ph != "M" && row_name && programs[&event.pid] == program
        };
        self.trace_events.iter().filter(is_there).collect()
    }

    /// The only event of that name in a row.
    fn only(&self, program: &str, row: &str, name: &str) -> &Event {
        let found: Vec<_> =
            self.row(program, row).into_iter().filter(|event| event.name == name).collect();
        let [event] = found.as_slice() else { panic!("{program}, {row}, {name}: {found:?}") };
        event
    }
}

fn lab(spec: &LabSpec) -> Lab {
    let lab = Lab::start(spec, &programs()).unwrap();
    for server in 1..=spec.servers.len() {
        let lines: String =
            (0..5000).map(|i| format!("{i} of {server}{}\n", ["", " x"][i % 2])).collect();
        fs::write(lab.data(server).join("f"), lines).unwrap();
    }
    // The gateway starts and connects before anything is looked at.
    run(&lab, "cat /mnt/s1/f | wc -l", &[]);
    lab
}

fn run(lab: &Lab, text: &str, options: &[&str]) -> RunOutcome {
    let mut script = Script::new(text);
    script.options = options.iter().map(|&option| option.to_owned()).collect();
    script.run(&lab.workstation, Under::Posh).unwrap()
}

/// What a command changed is seen before its shell hears of its end, so the next one begins later.
#[test]
fn a_mount_is_told_of_a_command_before_the_next_one_runs() {
    let lab = lab(&LabSpec::servers(1).link(Profile::WAN));
    let text = "sort /mnt/s1/f >> /mnt/s1/out; tac /mnt/s1/out | head -n 1";
    let outcome = run(&lab, text, &["--trace", "t.json"]);
    assert!(outcome.status.success() && outcome.stderr.is_empty(), "{outcome}");
    let trace = Document::read(&lab, "t.json");
    let told: Vec<&Event> =
        trace.spans().filter(|event| event.name == "refreshing the mount").collect();
    let runs: Vec<&Event> =
        trace.row("gateway", "call to store1").into_iter().filter(|e| e.name == "run").collect();
    assert!(told[0].end() < runs[1].ts, "{told:?} {runs:?}");
}

#[test]
fn times_of_all_programs_fit_together_over_a_long_link() {
    let lab = lab(&LabSpec::servers(1).link(Profile::WAN));
    let round_trip_us = Profile::WAN.round_trip.as_secs_f64() * 1e6;
    let outcome = run(&lab, "cat /mnt/s1/f | grep x | wc -l", &["--trace", "t.json"]);
    assert_eq!(
        (outcome.stdout.as_slice(), outcome.stderr.as_slice()),
        (&b"2500\n"[..], &b""[..]),
        "{outcome}"
    );
    let trace = Document::read(&lab, "t.json");
    assert_eq!(trace.programs(), ["posh", "gateway", "executor store1"]);

    let (call, start) = (
        trace.only("gateway", "call to store1", "run"),
        trace.only("gateway", "call to store1", "start"),
    );
    assert!(start.is_within(call));
    let own_us = start.args["executor_ms"].as_str().unwrap().parse::<f64>().unwrap() * 1e3;
    assert!(
        start.dur.unwrap() - own_us >= round_trip_us,
        "{start:?} is shorter than the round trip"
    );
    let there: Vec<&Event> = trace.row("executor store1", "");
    assert!(
        there.iter().all(|event| event.is_within(call)),
        "{there:?} is not all within {call:?}"
    );
    for step in
        ["checking", "waiting for a runner", "handing over", "preparing", "spawning", "letting go"]
    {
        let step = trace.only("executor store1", "pipeline 2", step);
        // The specification was on its way for at least half of the round trip, and so was the
        // answer.
        let way = round_trip_us / 2.0;
        assert!(
            step.ts >= start.ts + way && step.end() + way <= start.end() + ROUNDING_US,
            "{step:?} in {start:?}"
        );
    }
    let first_byte =
        trace.only("executor store1", "pipeline 2", "first byte of descriptor 1 of wc (stage 3)");
    let (first_output, written) = (
        trace.only("gateway", "call to store1", "first output"),
        trace.only("posh", "stage 3: wc", "first byte written"),
    );
    assert!(first_byte.ts <= first_output.ts && first_output.ts <= written.ts);
    for (place, name) in ["cat", "grep", "wc"].into_iter().enumerate() {
        let row = format!("stage {}: {name}", place + 1);
        let whole = trace.only("posh", &row, name);
        let steps = ["looking", "waiting for the directive", "standing in"]
            .map(|s| trace.only("posh", &row, s));
        assert!(steps.iter().all(|step| step.is_within(whole)), "{steps:?} in {whole:?}");
        assert!(steps[2].dur.unwrap() >= round_trip_us, "{:?}", steps[2]);
        trace.only("gateway", &format!("end of {row}"), "farewell");
        trace.only(
            "executor store1",
            &format!("{name} (stage {})", place + 1),
            &format!("{name} (stage {})", place + 1),
        );
    }
    let mut steps = trace.row("gateway", "pipeline 2");
    steps.sort_by(|a, b| a.ts.total_cmp(&b.ts));
    let steps: Vec<&str> = steps.iter().map(|event| event.name.as_str()).collect();
    let planning = ["reading the commands", "settling files", "asking who can run it", "planning"];
    let all = [&["assembly"][..], &planning, &["directives", "lowering", "starting", "relaying"]]
        .concat();
    assert_eq!(steps, all);
}

#[test]
fn whatever_happens_a_trace_tells_of_it() {
    let lab = lab(&LabSpec::servers(2));
    // Parts on two machines, joined here.
    let outcome = run(&lab, "cat /mnt/s1/f /mnt/s2/f | grep -c x", &["--trace", "split"]);
    assert_eq!(outcome.stdout, b"5000\n", "{outcome}");
    let trace = Document::read(&lab, "split");
    assert_eq!(trace.programs(), ["posh", "gateway", "executor store1", "executor store2"]);
    for server in ["store1", "store2"] {
        let call = trace.only("gateway", &format!("call to {server}"), "run");
        assert!(
            trace.row(&format!("executor {server}"), "").iter().all(|event| event.is_within(call))
        );
    }

    // It runs here, and no executor is asked.
    fs::write(lab.workstation.path(HOME).join("own"), "own\n").unwrap();
    let outcome = run(&lab, "sort ~/own /mnt/s1/f | tail -n 1", &["--trace", "here"]);
    assert_eq!(outcome.stdout, b"own\n", "{outcome}");
    let trace = Document::read(&lab, "here");
    assert_eq!(trace.programs(), ["posh", "gateway"]);
    let why = &trace.only("posh", "stage 1: sort", "runs here").args["why"];
    assert!(!why.as_str().unwrap().is_empty());

    // Nobody is asked at all: the shell is all there is.
    run(&lab, "echo nothing", &["--trace", "nothing"]);
    let trace = Document::read(&lab, "nothing");
    assert_eq!(trace.programs(), ["posh"]);
    assert!(trace.only("posh", "session", "shell").dur > Some(0.0));

    // A stage that is killed while its command runs elsewhere says no last word.
    let text = "tail -n +1 -f /mnt/s1/f > out & until [ -s out ]; do :; done; kill -9 $!; wait $!; echo $?";
    let outcome = run(&lab, text, &["--trace", "killed"]);
    assert_eq!(outcome.stdout, b"137\n", "{outcome}");
    let trace = Document::read(&lab, "killed");
    trace.only("posh", "stage 1: tail", "standing in");
    trace.only("executor store1", "tail (stage 1)", "tail (stage 1)");

    // A session within a session has a trace of its own, and posh reports as well.
    let inner = format!(
        "{}/posh --trace inner -c 'cat /mnt/s1/f | wc -l'",
        posh_integration::host::PROGRAMS
    );
    let outcome =
        run(&lab, &format!("{inner}; cat /mnt/s2/f | wc -l"), &["--trace", "outer", "--explain"]);
    assert_eq!(outcome.stdout, b"5000\n5000\n", "{outcome}");
    assert!(String::from_utf8_lossy(&outcome.stderr).contains("store2  cat"), "{outcome}");
    for (name, executor) in [("inner", "executor store1"), ("outer", "executor store2")] {
        assert_eq!(Document::read(&lab, name).programs(), ["posh", "gateway", executor]);
    }

    // A file that can't be written.
    let outcome = run(&lab, "echo ran", &["--trace", "/nowhere/t"]);
    assert_eq!((outcome.status.code(), outcome.stdout.as_slice()), (Some(1), &b""[..]));
    let said = String::from_utf8_lossy(&outcome.stderr);
    assert_eq!(
        said,
        "posh: can't write the trace /nowhere/t: No such file or directory (os error 2)\n"
    );
}
