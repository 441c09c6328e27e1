//! Resources of one identity's runs before and while they run: names, terminals, open files, the
//! record, and the time for analysing their specifications.

use std::{
    fs,
    time::{Duration, Instant},
};

use bytes::Bytes;
use posh_executor::config::Commands;
use posh_proto::executor::{
    Descriptor, PathUse, Pty, RunInput, RunSpec, StatusRequest, ToolsRequest, descriptor::Source,
    rejected::Kind, run_input, run_output,
};
use tokio::{sync::mpsc, time::timeout};
use tokio_stream::{StreamExt as _, wrappers::ReceiverStream};

use super::{TlsLab, identity};
use crate::harness::{Call, Client, PATIENCE, command, pipeline, pipeline_with_input, run};

async fn starts(client: &Client, spec: RunSpec) -> Result<Call, String> {
    let mut call = Call::open(client, spec).await;
    match call.next().await {
        Some(run_output::Kind::Rejected(rejected)) => Err(rejected.message),
        Some(_) => Ok(call),
        None => Err("no message".to_owned()),
    }
}

/// Starts runs until one is refused; returns the reason.
async fn fill(client: &Client, spec: &RunSpec) -> (Vec<Call>, String) {
    let mut calls = Vec::new();
    loop {
        match starts(client, spec.clone()).await {
            Ok(call) => calls.push(call),
            Err(why) => return (calls, why),
        }
    }
}

#[tokio::test]
async fn one_identity_does_not_take_all_terminals() {
    const OF_ONE_RUN: u32 = 128;
    let lab = TlsLab::start(&[identity("ada"), identity("bob")]).await;
    let (ada, bob) = (lab.client("ada").await, lab.client("bob").await);
    let with_terminals = |count: u32| {
        let mut spec = pipeline_with_input(&["cat"]);
        spec.ptys = (0..count).map(|number| Pty { id: 5000 + number, ..Pty::default() }).collect();
        let ends = (0..count)
            .map(|number| Descriptor { fd: 10 + number, source: Some(Source::Pty(5000 + number)) });
        spec.stages[0].descriptors.extend(ends);
        spec
    };
    let all: usize =
        fs::read_to_string("/proc/sys/kernel/pty/max").unwrap().trim().parse().unwrap();
    let (calls, why) = fill(&ada, &with_terminals(OF_ONE_RUN)).await;
    assert!(calls.len() * OF_ONE_RUN as usize <= all / 16, "{} runs: {why}", calls.len());
    assert!(why.contains("pseudo-terminals"), "{why}");
    assert!(starts(&bob, with_terminals(1)).await.is_ok());
    // A run that has ended returns its own.
    drop(calls);
    while starts(&ada, with_terminals(OF_ONE_RUN)).await.is_err() {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn a_run_that_was_refused_may_be_tried_again_under_its_name() {
    let lab = TlsLab::start(&[identity("ada")]).await;
    let ada = lab.client("ada").await;
    let named =
        |program: &str| RunSpec { run_id: "18-1".into(), grace_ms: 1000, ..pipeline(&[program]) };
    for _ in 0..3 {
        assert!(run(&ada, named("no-such-command-here"), Bytes::new()).await.rejected.is_some());
        let elsewhere = RunSpec { protocol: 0, ..named("true") };
        assert_eq!(run(&ada, elsewhere, Bytes::new()).await.refusal().kind(), Kind::Protocol);
    }
    assert_eq!(run(&ada, named("true"), Bytes::new()).await.text(), "");
    // A run is not done twice.
    assert_eq!(run(&ada, named("true"), Bytes::new()).await.refusal().kind(), Kind::Protocol);
    let long = RunSpec { run_id: "x".repeat(4 << 10), ..named("true") };
    assert!(run(&ada, long, Bytes::new()).await.refusal().message.contains("at most 64 bytes"));
}

/// Silent calls take the places of others.
#[tokio::test]
async fn specifications_of_one_identity_are_decoded_few_at_a_time() {
    const AT_A_TIME: usize = 16;
    let lab = TlsLab::start(&[identity("ada"), identity("bob")]).await;
    let (ada, bob) = (lab.client("ada").await, lab.client("bob").await);
    let mut silent = Vec::new();
    for _ in 0..AT_A_TIME {
        let (sender, receiver) = mpsc::channel::<RunInput>(1);
        let mut ada = ada.clone();
        let call =
            tokio::spawn(async move { ada.run(ReceiverStream::new(receiver)).await.map(drop) });
        silent.push((sender, call));
    }
    // Comes after them on the same connection.
    tokio::task::yield_now().await;
    ada.clone().status(StatusRequest {}).await.unwrap();
    let echo = || pipeline(&["echo x"]);
    let waiting = run(&ada, echo(), Bytes::new());
    tokio::pin!(waiting);
    assert!(timeout(Duration::from_millis(500), &mut waiting).await.is_err());
    assert_eq!(run(&bob, echo(), Bytes::new()).await.text(), "x\n");
    let (sender, call) = silent.pop().unwrap();
    drop(sender);
    let _ = call.await.unwrap();
    assert_eq!(timeout(PATIENCE, waiting).await.expect("it has a place").text(), "x\n");
}

#[tokio::test]
async fn a_run_that_is_not_kept_has_nothing_to_do_with_one_of_its_name() {
    let lab = TlsLab::start(&[identity("ada")]).await;
    let ada = lab.client("ada").await;
    let named = |program: &str, grace_ms| RunSpec {
        run_id: "18-1".into(),
        grace_ms,
        ..pipeline(&[program])
    };
    let waiting =
        RunSpec { run_id: "18-1".into(), grace_ms: 60_000, ..pipeline_with_input(&["cat"]) };
    let _kept = starts(&ada, waiting).await.unwrap();
    assert!(run(&ada, named("no-such-command-here", 0), Bytes::new()).await.rejected.is_some());
    assert_eq!(run(&ada, named("echo x", 0), Bytes::new()).await.text(), "x\n");
    // The running one is neither forgotten nor taken for ended.
    assert_eq!(run(&ada, named("true", 1000), Bytes::new()).await.refusal().kind(), Kind::Protocol);
}

#[tokio::test]
async fn refused_runs_do_not_fill_the_record() {
    const RUNS: usize = 200;
    let directory = tempfile::tempdir().unwrap();
    let audit = directory.path().join("audit");
    let identities = [identity("ada")];
    let lab = TlsLab::with(&identities, |config| {
        config.audit = Some(audit.clone());
        config.confinement.commands = Commands::Annotated;
    });
    let lab = lab.await;
    let ada = lab.client("ada").await;
    let mut spec = pipeline(&["true"; 16]);
    for (number, stage) in (0..).zip(&mut spec.stages) {
        stage.program = format!("{}{number}", "\u{1}".repeat(250));
        stage.cwd = stage.program.clone().into();
    }
    for _ in 0..RUNS {
        assert_eq!(run(&ada, spec.clone(), Bytes::new()).await.refusal().kind(), Kind::NotAllowed);
    }
    let text = fs::read_to_string(&audit).unwrap();
    assert!(text.len() < 32 << 10 && !text.contains("run_begin"), "{} bytes", text.len());
    assert!(text.contains(r#""what":"run: NOT_ALLOWED""#), "{text}");
    // An admitted run is recorded before it begins.
    let _call = starts(&ada, pipeline_with_input(&["cat"])).await.unwrap();
    assert!(fs::read_to_string(&audit).unwrap().contains("run_begin"));
}

#[tokio::test]
async fn a_run_whose_name_was_used_is_refused_as_any_other() {
    let directory = tempfile::tempdir().unwrap();
    let audit = directory.path().join("audit");
    let lab = TlsLab::with(&[identity("ada")], |config| config.audit = Some(audit.clone())).await;
    let ada = lab.client("ada").await;
    let named = || RunSpec { run_id: "18-1".into(), grace_ms: 1000, ..pipeline(&["true"]) };
    assert_eq!(run(&ada, named(), Bytes::new()).await.text(), "");
    assert_eq!(run(&ada, named(), Bytes::new()).await.refusal().kind(), Kind::Protocol);
    let is_recorded = || fs::read_to_string(&audit).unwrap().contains(r#""what":"run: PROTOCOL""#);
    let recorded = async {
        while !is_recorded() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(PATIENCE, recorded).await.expect("the record has it");
}

/// Half a MiB each when inflated, and a hundredth of that on the wire.
fn long_specification() -> run_input::Kind {
    let mut spec = command(&["sort"]);
    spec.stages[0].argv.extend(vec![Bytes::from_static(b"-k1,1"); 20_000]);
    spec.stages[0].paths = vec![PathUse { path: "f".into(), ..PathUse::default() }; 100_000];
    spec.stages[0].program = "no-such-command-here".into();
    posh_proto::packed::pack(spec).unwrap()
}

/// Further ones of one identity wait for their turn.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn specifications_of_one_identity_hold_up_no_other_one() {
    let lab = TlsLab::start(&[identity("ada"), identity("bob")]).await;
    let (ada, mut bob) = (lab.client("ada").await, lab.client("bob").await);
    let long = long_specification();
    let names = vec!["zcat".to_owned(); 4096];
    let asked: Vec<_> = (0..24)
        .map(|_| {
            let (mut ada, long, names) = (ada.clone(), long.clone(), names.clone());
            tokio::spawn(async move {
                let input = tokio_stream::once(RunInput { kind: Some(long) })
                    .chain(tokio_stream::pending());
                let _ = ada.tools(ToolsRequest { names }).await;
                let mut output = ada.run(input).await.unwrap().into_inner();
                output.message().await
            })
        })
        .collect();
    let mut longest = Duration::ZERO;
    while !asked.iter().all(tokio::task::JoinHandle::is_finished) {
        let began = Instant::now();
        bob.status(StatusRequest {}).await.unwrap();
        longest = longest.max(began.elapsed());
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert!(longest < Duration::from_secs(2), "{longest:?}");
    let own =
        lab.client("ada").await.status(StatusRequest {}).await.unwrap().into_inner().own.unwrap();
    assert_eq!((own.runs, own.buffered_bytes), (0, 0));
}
