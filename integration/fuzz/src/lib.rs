//! Fuzz targets for all untrusted input of posh: configuration and annotation files, mountinfo,
//! command lines, and every message of every service.
//!
//! A [`Target`] takes bytes. `cargo xtask fuzz` drives it with libFuzzer and
//! coverage, for as long as one likes; `tests/short.rs` for some seconds, as part of
//! the ordinary tests. A target panics when what it looks for has happened.
#![allow(clippy::unwrap_used, reason = "a fuzz target reports by its panics")]

mod answers;
mod calls;
mod executor;
mod gateway;
mod hostile;
mod scratch;
mod strangers;
mod texts;
mod volume;
mod volume_answers;

/// One thing that is fuzzed.
pub struct Target {
    /// As on the command line.
    pub name: &'static str,
    /// Takes one input.
    pub run: fn(&[u8]),
    /// Sound inputs to start from; the fuzzer changes them.
    pub seeds: fn() -> Vec<Vec<u8>>,
    /// Inputs that a short run tries: servers take milliseconds for one.
    pub short: u32,
}

/// All of them.
pub const TARGETS: &[Target] = &[
    Target {
        name: "annotations",
        run: texts::annotations,
        seeds: texts::annotation_files,
        short: 400,
    },
    Target { name: "invocations", run: texts::invocation, seeds: texts::invocations, short: 2000 },
    Target {
        name: "mounts_toml",
        run: texts::mounts_toml,
        seeds: texts::mounts_tomls,
        short: 1000,
    },
    Target {
        name: "executor_toml",
        run: texts::executor_toml,
        seeds: texts::executor_tomls,
        short: 1000,
    },
    Target { name: "mountinfo", run: texts::mountinfo, seeds: texts::mountinfos, short: 1000 },
    Target { name: "executor", run: executor::calls, seeds: executor::seeds, short: 150 },
    Target { name: "gateway", run: gateway::calls, seeds: gateway::seeds, short: 150 },
    Target {
        name: "stage_socket",
        run: gateway::stage_socket,
        seeds: gateway::stage_seeds,
        short: 150,
    },
    Target { name: "volume", run: volume::calls, seeds: executor::seeds, short: 60 },
    Target { name: "answers", run: answers::answers, seeds: answers::seeds, short: 30 },
    Target { name: "strangers", run: strangers::strangers, seeds: strangers::seeds, short: 100 },
    Target {
        name: "volume_answers",
        run: volume_answers::answers,
        seeds: volume_answers::seeds,
        short: 30,
    },
];

/// The target of that name.
#[must_use]
pub fn target(name: &str) -> Option<&'static Target> {
    TARGETS.iter().find(|target| target.name == name)
}
