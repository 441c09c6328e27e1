//! Runs whose redirects wait for the workstation's shell.

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    time::Duration,
};

use bytes::Bytes;
use nix::libc;
use posh_proto::executor::{Release, RunSpec, descriptor::Source, rejected, run_input::Kind, run_output};

use crate::harness::*;

/// What a run does without being released it has done by then.
const A_WHILE: Duration = Duration::from_millis(100);

fn held(name: &str, flags: i32) -> Source {
    match file(name, flags, 0) {
        Source::File(file) => Source::File(posh_proto::executor::File { held: true, ..file }),
        other => other,
    }
}

/// A pipeline that writes to `out`.
fn writing(commands: &[&str], out: &str) -> RunSpec {
    let mut spec = pipeline(commands);
    spec.stages.last_mut().unwrap().descriptors[1].source = Some(held(out, libc::O_WRONLY));
    let unused = *spec.outlets[0].sources.first().unwrap();
    spec.pipes.retain(|id| *id != unused);
    spec.outlets.remove(0);
    spec
}

/// Starts it, empties or makes `out` as a shell would, and lets it go.
async fn run(lab: &Lab, spec: RunSpec, out: &Path) -> Outcome {
    let mut call = Call::open(&lab.client, spec).await;
    call.until(|kind| matches!(kind, run_output::Kind::Started(_)).then_some(())).await;
    tokio::time::sleep(A_WHILE).await;
    fs::write(out, "").unwrap();
    call.send(Kind::Release(Release::default())).await;
    call.collect(Bytes::new()).await
}

fn in_store(lab: &Lab, name: &str) -> PathBuf {
    lab.store.path().join(name)
}

#[tokio::test]
async fn what_is_held_comes_to_its_file_when_it_is_released() {
    let lab = Lab::start().await;
    lab.write("f", "b\na\n");
    let out = in_store(&lab, "out");
    let mut call = Call::open(&lab.client, writing(&["cat f", "sort"], "out")).await;
    call.until(|kind| matches!(kind, run_output::Kind::Started(_)).then_some(())).await;
    tokio::time::sleep(A_WHILE).await;
    assert!(!out.exists());
    fs::write(&out, "").unwrap();
    tokio::time::sleep(A_WHILE).await;
    assert_eq!(fs::read_to_string(&out).unwrap(), "");
    call.send(Kind::Release(Release::default())).await;
    let outcome = call.collect(Bytes::new()).await;
    assert!(outcome.is_finished && outcome.exits[&2].withheld.is_empty(), "{outcome:?}");
    assert_eq!(fs::read_to_string(&out).unwrap(), "a\nb\n");
    let offsets: Vec<_> = outcome.exits[&2].offsets.iter().map(|offset| (offset.fd, offset.offset)).collect();
    assert_eq!(offsets, [(1, 4)]);
}

#[tokio::test]
async fn more_than_may_wait_comes_whole() {
    let lab = Lab::start().await;
    let outcome = run(&lab, writing(&["seq 6000000"], "out"), &in_store(&lab, "out")).await;
    assert!(outcome.is_finished && outcome.exits[&1].withheld.is_empty(), "{outcome:?}");
    let text = fs::read_to_string(in_store(&lab, "out")).unwrap();
    assert_eq!((text.len(), text.ends_with("\n5999999\n6000000\n")), (46_888_896, true));
}

#[tokio::test]
async fn nothing_is_written_to_a_file_that_was_read() {
    let lab = Lab::start().await;
    for (name, make) in [("f", None), ("soft", Some(true)), ("hard", Some(false))] {
        lab.write("f", "b\na\n");
        let out = in_store(&lab, name);
        match make {
            Some(true) => symlink("f", &out).unwrap(),
            Some(false) => fs::hard_link(in_store(&lab, "f"), &out).unwrap(),
            None => {}
        }
        let mut spec = writing(&["sort f"], name);
        spec.stages[0].paths = vec![path_use("f")];
        let outcome = run(&lab, spec, &out).await;
        assert!(!outcome.exits[&1].withheld.is_empty(), "{name}: {outcome:?}");
        assert_eq!(fs::read_to_string(in_store(&lab, "f")).unwrap(), "", "{name}");
    }
    lab.write("g", "b\na\n");
    let mut spec = writing(&["sort"], "g");
    spec.stages[0].descriptors[0].source = Some(file("g", libc::O_RDONLY, 0));
    let outcome = run(&lab, spec, &in_store(&lab, "g")).await;
    assert!(outcome.exits[&1].withheld.contains("also read"), "{outcome:?}");
}

fn appending(commands: &[&str], out: &str) -> RunSpec {
    let mut spec = writing(commands, out);
    spec.stages.last_mut().unwrap().descriptors[1].source = Some(held(out, libc::O_WRONLY | libc::O_APPEND));
    spec
}

#[tokio::test]
async fn what_is_appended_comes_behind_what_is_there_then() {
    let lab = Lab::start().await;
    lab.write("f", "b\na\n");
    lab.write("out", "old\n");
    let mut call = Call::open(&lab.client, appending(&["cat f", "sort"], "out")).await;
    call.until(|kind| matches!(kind, run_output::Kind::Started(_)).then_some(())).await;
    tokio::time::sleep(A_WHILE).await;
    lab.write("out", "old\nolder\n");
    call.send(Kind::Release(Release::default())).await;
    let released = |kind: &run_output::Kind| match kind {
        run_output::Kind::Released(released) => Some(released.written_files.clone()),
        _ => None,
    };
    let sizes: Vec<_> = call.until(released).await.iter().map(|file| (file.stage, file.fd, file.size)).collect();
    assert_eq!(sizes, [(2, 1, 10)]);
    let outcome = call.collect(Bytes::new()).await;
    assert!(outcome.is_finished && outcome.exits[&2].withheld.is_empty(), "{outcome:?}");
    assert_eq!(fs::read_to_string(in_store(&lab, "out")).unwrap(), "old\nolder\na\nb\n");
}

#[tokio::test]
async fn nothing_is_appended_to_a_file_that_is_read() {
    let lab = Lab::start().await;
    lab.write("f", "b\na\n");
    symlink("f", in_store(&lab, "soft")).unwrap();
    fs::hard_link(in_store(&lab, "f"), in_store(&lab, "hard")).unwrap();
    for name in ["f", "soft", "hard"] {
        let mut spec = appending(&["cat f"], name);
        spec.stages[0].paths = vec![path_use("f")];
        assert_eq!(lab.run(spec).await.refusal().kind(), rejected::Kind::OpenFailed, "{name}");
    }
    // It becomes that file later.
    let mut spec = appending(&["cat f"], "later");
    spec.stages[0].paths = vec![path_use("f")];
    let mut call = Call::open(&lab.client, spec).await;
    call.until(|kind| matches!(kind, run_output::Kind::Started(_)).then_some(())).await;
    symlink("f", in_store(&lab, "later")).unwrap();
    call.send(Kind::Release(Release::default())).await;
    let outcome = call.collect(Bytes::new()).await;
    assert!(!outcome.exits[&1].withheld.is_empty(), "{outcome:?}");
    assert_eq!(fs::read_to_string(in_store(&lab, "f")).unwrap(), "b\na\n");
}

#[tokio::test]
async fn a_file_that_is_not_there_or_too_small_gets_nothing_in_silence() {
    let lab = Lab::start().await;
    let mut call = Call::open(&lab.client, writing(&["seq 9"], "nowhere")).await;
    call.until(|kind| matches!(kind, run_output::Kind::Started(_)).then_some(())).await;
    call.send(Kind::Release(Release::default())).await;
    let outcome = call.collect(Bytes::new()).await;
    assert!(!outcome.exits[&1].withheld.is_empty() && !in_store(&lab, "nowhere").exists(), "{outcome:?}");
    let mut spec = writing(&["seq 100000"], "out");
    let limit = posh_proto::executor::ResourceLimit { resource: libc::RLIMIT_FSIZE, soft: 1000, hard: 1000 };
    spec.stages[0].limits = vec![limit];
    let outcome = run(&lab, spec, &in_store(&lab, "out")).await;
    assert!(!outcome.exits[&1].withheld.is_empty(), "{outcome:?}");
}

#[tokio::test]
async fn what_can_not_be_held_is_refused() {
    let lab = Lab::start().await;
    lab.write("f", "x\n");
    let mut reads = pipeline(&["cat"]);
    reads.stages[0].descriptors[0].source = Some(held("f", libc::O_RDONLY));
    let mut tree = writing(&["grep -r x ."], "out");
    tree.stages[0].paths = vec![posh_proto::executor::PathUse { recursive: true, ..path_use(".") }];
    for spec in [reads, tree] {
        assert_eq!(lab.run(spec).await.refusal().kind(), rejected::Kind::Protocol);
    }
}

#[tokio::test]
async fn what_has_read_something_that_is_another_one_now_is_not_released() {
    let lab = Lab::start().await;
    // Older than the steps in which file systems count time.
    ["f", "g", "out"].into_iter().for_each(|name| lab.write(name, "old\n"));
    symlink("f", in_store(&lab, "soft")).unwrap();
    tokio::time::sleep(A_WHILE).await;
    let change = |name: &str| match name {
        "nothing" => {}
        "soft" => {
            fs::remove_file(in_store(&lab, "soft")).unwrap();
            symlink("g", in_store(&lab, "soft")).unwrap();
        }
        name => lab.write(name, "new\n"),
    };
    for (input, changed, expect) in
        [("g", "nothing", ""), ("g", "f", ""), ("soft", "soft", "soft"), ("f", "f", "f"), ("f", "nothing", "f")]
    {
        let mut spec = RunSpec { ahead: true, ..writing(&["sort", "cat"], "out") };
        spec.stages[0].descriptors[0].source = Some(file(input, libc::O_RDONLY, 0));
        if input == "soft" {
            spec.stages[0].paths = vec![path_use(input)];
        }
        let mut call = Call::open(&lab.client, spec).await;
        call.until(|kind| matches!(kind, run_output::Kind::Started(_)).then_some(())).await;
        change(changed);
        fs::write(in_store(&lab, "out"), "").unwrap();
        call.send(Kind::Release(Release { if_unchanged: true, ..Release::default() })).await;
        let released = |kind: &run_output::Kind| match kind {
            run_output::Kind::Released(released) => Some(released.clone()),
            _ => None,
        };
        let released = call.until(released).await;
        assert_eq!(String::from_utf8_lossy(&released.changed), expect, "{input} {changed}");
        if expect.is_empty() {
            assert!(call.collect(Bytes::new()).await.is_finished);
        }
        assert_eq!(
            fs::read_to_string(in_store(&lab, "out")).unwrap() == "old\n",
            expect.is_empty(),
            "{input} {changed}"
        );
    }
}

#[tokio::test]
async fn what_waits_to_be_released_has_not_ended() {
    let lab = Lab::start().await;
    lab.write("f", "x\n");
    tokio::time::sleep(A_WHILE).await;
    let mut spec = RunSpec { ahead: true, to_be_confirmed: true, ..pipeline(&["cat f"]) };
    spec.stages[0].paths = vec![path_use("f")];
    let mut call = Call::open(&lab.client, spec).await;
    call.until(|kind| matches!(kind, run_output::Kind::End(_)).then_some(())).await;
    let ended = call.until(|kind| matches!(kind, run_output::Kind::Exited(_)).then_some(()));
    assert!(tokio::time::timeout(A_WHILE, ended).await.is_err());
    call.send(Kind::Release(Release { if_unchanged: true, ..Release::default() })).await;
    let outcome = call.collect(Bytes::new()).await;
    assert!(outcome.is_finished && outcome.exits.len() == 1, "{outcome:?}");
    // What has just changed, what is not there, what has names.
    lab.write("new", "x\n");
    for path in ["new", "nowhere", "."] {
        let mut spec = RunSpec { ahead: true, to_be_confirmed: true, ..pipeline(&["cat f"]) };
        spec.stages[0].paths = vec![path_use(path)];
        assert_eq!(lab.run(spec).await.refusal().kind(), rejected::Kind::OpenFailed, "{path}");
    }
}
