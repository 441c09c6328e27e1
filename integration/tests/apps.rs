//! The paper's five applications (§7.1) on small data: what bash makes of them, posh
//! makes too, on the servers that own the data, and for the logs with at most one
//! hundredth of the bytes.

use std::path::Path;

use posh_integration::explain::ExplainReport;
use posh_integration::oracle::{Under, assert_equal};
use posh_integration::tree::{self, EntryKind, Tree};
use posh_integration::workload::{Store, Workload, WorkloadSize};
use posh_integration::{Lab, LabSpec, RunOutcome};

use crate::programs;

/// Attempts at the placement of an application.
const TRIES: usize = 5;

/// posh may move one hundredth of what bash moves.
const LOG_SHARE: u64 = 100;

struct Run {
    outcome: RunOutcome,
    /// What is left on the servers, and in the local directory for results.
    left: Vec<Tree>,
    bytes_moved: u64,
}

fn run(lab: &Lab, workload: Workload, under: Under, name: &str) -> Run {
    let stores: Vec<Store<'_>> = lab.stores(name).unwrap();
    let size = if std::env::var_os("POSH_TEST_FULL").is_some() {
        WorkloadSize::Demo
    } else {
        WorkloadSize::Test
    };
    workload.generate(&stores, size).unwrap();
    let out = lab.workstation.path(format!("/home/user/{name}"));
    std::fs::create_dir(&out).unwrap();
    let script = workload.script_for(&stores, &format!("/home/user/{name}"));
    let before = lab.bytes_moved().unwrap();
    let outcome = script.run(&lab.workstation, under).unwrap().with(name, "RUN");
    let bytes_moved = lab.bytes_moved().unwrap() - before;
    let places = stores.iter().map(Store::data).chain([out]);
    let left = places.map(|p| tree::snapshot(&p, workload.volatile()).unwrap()).collect();
    Run { outcome, left, bytes_moved }
}

/// Runs it under bash and posh, in a laboratory of its own so that its bytes are its own.
fn compare(workload: Workload) -> (Run, Run) {
    let lab = Lab::start(&LabSpec::servers(workload.stores()), &programs()).unwrap();
    let bash = run(&lab, workload, Under::Shell, "run-alone");
    assert!(bash.outcome.status.success(), "{}: {}", workload.name(), bash.outcome);
    assert_eq!(empty_files(&bash), Vec::<&Path>::new(), "{} makes no empty files", workload.name());
    let posh = run(&lab, workload, Under::PoshExplained, "run-shown");
    assert_equal(workload.name(), &bash.outcome, &posh.outcome);
    for (bash, posh) in bash.left.iter().zip(&posh.left) {
        let differences = tree::differences(bash, posh);
        assert!(differences.is_empty(), "{}: {differences:#?}", workload.name());
    }
    (bash, posh)
}

/// Results that would make any comparison worthless; git has files of its own that are empty.
fn empty_files(run: &Run) -> Vec<&Path> {
    let files = run.left.iter().flatten().filter(|(path, _)| !path.starts_with("repository"));
    files
        .filter(|(_, entry)| matches!(&entry.kind, EntryKind::File(bytes) if bytes.is_empty()))
        .map(|(p, _)| p.as_path())
        .collect()
}

/// Compares until all these commands have run on servers. Pipelines are assembled against deadlines,
/// which a busy machine may miss: then a stage runs on the workstation, correct but slow.
fn compare_offloading(workload: Workload, commands: &[&str]) -> (Run, Run) {
    let mut tries = 0;
    loop {
        let (bash, posh) = compare(workload);
        tries += 1;
        match misplaced(posh.outcome.report(), commands) {
            None => return (bash, posh),
            Some(words) => assert!(tries < TRIES, "{words}"),
        }
    }
}

fn misplaced(report: &ExplainReport, commands: &[&str]) -> Option<String> {
    commands.iter().find_map(|command| {
        let stages: Vec<_> = report.stages(command).collect();
        assert!(!stages.is_empty(), "{command} is not in the report: {report:#?}");
        let here: Vec<_> = stages.iter().filter(|s| !s.is_offloaded()).collect();
        (!here.is_empty()).then(|| format!("{command} ran on the workstation: {here:#?}"))
    })
}

fn assert_few_bytes(bash: &Run, posh: &Run) {
    let (bash, posh) = (bash.bytes_moved, posh.bytes_moved);
    assert!(posh * LOG_SHARE <= bash, "posh moved {posh} bytes and bash {bash}");
}

#[test]
fn ray_tracing_logs() {
    let (bash, posh) =
        compare_offloading(Workload::RayTrace, &["cat", "grep", "head", "cut", "sed"]);
    assert_few_bytes(&bash, &posh);
}

#[test]
fn thumbnails() {
    compare_offloading(Workload::Thumbnails, &["mogrify"]);
}

#[test]
fn port_scan() {
    let (bash, posh) = compare_offloading(Workload::PortScan, &["cat", "jq", "pr", "awk", "sort"]);
    assert_few_bytes(&bash, &posh);
}

#[test]
fn access_logs_of_five_servers() {
    let (bash, posh) = compare_offloading(Workload::AccessLogs, &["cat", "grep"]);
    assert_few_bytes(&bash, &posh);
}

#[test]
fn git_workflow() {
    compare_offloading(Workload::Git, &["git apply", "git status", "git add", "git commit"]);
}
