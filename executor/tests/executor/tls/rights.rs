//! Rights of an identity, and their limits.

use std::{collections::BTreeSet, fs, time::Duration};

use bytes::Bytes;
use posh_executor::{
    Export,
    config::{Identity, Limits},
};
use posh_proto::executor::{
    DescribeRequest, FingerprintReply, FingerprintRequest, RunInput, StatusRequest, ToolsRequest,
    rejected::Kind, run_input, run_output,
};
use posh_reach::tls;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Request;

use super::{TlsLab, identity};
use crate::harness::{Call, Hung, MOUNT, command, mount, pipeline, run};

/// Less than the timeout for a file system that hangs.
const AT_ONCE: Duration = Duration::from_secs(4);

fn set(names: &[&str]) -> Option<BTreeSet<String>> {
    Some(names.iter().map(|name| (*name).to_owned()).collect())
}

/// Its specification comes after the configuration has changed.
#[tokio::test]
async fn a_call_that_was_opened_before_has_what_its_caller_has_now() {
    let lab = TlsLab::start(&[identity("ada")]).await;
    let mut ada = lab.client("ada").await;
    let (sender, receiver) = mpsc::channel(1);
    let mut opened = ada.clone();
    let opened = tokio::spawn(async move { opened.run(ReceiverStream::new(receiver)).await });
    // Comes after it on the same connection.
    tokio::task::yield_now().await;
    ada.status(StatusRequest {}).await.unwrap();
    let mut config = lab.config.clone();
    config.identities = vec![Identity { commands: set(&["cat"]), ..identity("ada") }];
    lab.changes.send(config).await.unwrap();
    while run(&ada, pipeline(&["echo x"]), Bytes::new()).await.rejected.is_none() {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    sender
        .send(RunInput { kind: Some(run_input::Kind::Spec(pipeline(&["echo x"]))) })
        .await
        .unwrap();
    let mut messages = opened.await.unwrap().unwrap().into_inner();
    let first = messages.message().await.unwrap().unwrap().kind;
    assert!(matches!(first, Some(run_output::Kind::Rejected(_))), "{first:?}");
}

/// Headers come before the configuration changes, the message after it.
#[tokio::test]
async fn a_look_that_was_asked_for_before_sees_what_its_caller_may_see_now() {
    let lab = TlsLab::start(&[identity("ada")]).await;
    let credentials = lab.enrol("ada").await.unwrap();
    let channel = tls::channel(&lab.host, &credentials).await.unwrap();
    let mut ada = lab.client_of(&credentials).await;
    let look = FingerprintRequest { export: "private".into(), ..FingerprintRequest::default() };
    assert!(ada.fingerprint(look.clone()).await.is_ok());
    let (sender, receiver) = mpsc::channel(1);
    let asked = tokio::spawn(async move {
        let mut call = tonic::client::Grpc::new(channel);
        call.ready().await.unwrap();
        let path = "/posh.executor.v1.Executor/Fingerprint".parse().unwrap();
        let codec = tonic_prost::ProstCodec::<_, FingerprintReply>::default();
        call.client_streaming(Request::new(ReceiverStream::new(receiver)), path, codec).await
    });
    // Its headers go out.
    tokio::time::sleep(Duration::from_millis(300)).await;
    let mut config = lab.config.clone();
    config.exports.truncate(1);
    lab.changes.send(config).await.unwrap();
    while ada.fingerprint(look.clone()).await.is_ok() {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    sender.send(look).await.unwrap();
    drop(sender);
    let refused = asked.await.unwrap().unwrap_err();
    assert!(refused.message().contains("no export"), "{refused}");
}

/// A directory is told to whoever may run `ls`, and the record has it.
#[tokio::test]
async fn a_look_is_as_much_as_ls_and_is_recorded() {
    let ada = Identity { commands: set(&["cat"]), ..identity("ada") };
    let record = tempfile::tempdir().unwrap();
    let audit = record.path().join("audit");
    let identities = [ada, identity("bob")];
    let lab = TlsLab::with(&identities, |config| config.audit = Some(audit.clone())).await;
    let look = FingerprintRequest { export: "private".into(), ..FingerprintRequest::default() };
    let refused = lab.client("ada").await.fingerprint(look.clone()).await.unwrap_err();
    assert!(refused.message().contains("may not run ls"), "{refused}");
    assert!(lab.client("bob").await.fingerprint(look).await.is_ok());
    let lines = fs::read_to_string(&audit).unwrap();
    let looks: Vec<&str> = lines.lines().filter(|line| line.contains("\"look\"")).collect();
    assert!(looks.iter().any(|line| line.contains("bob") && line.contains("private")), "{lines}");
}

/// An export that answered at the start hangs now, even after it was removed.
#[tokio::test]
async fn rights_are_taken_away_while_an_export_hangs() {
    let around = tempfile::tempdir().unwrap();
    let path = around.path().join("data");
    fs::create_dir(&path).unwrap();
    let hanging = Export::named("hangs".into(), path, false);
    let lab = TlsLab::with(&[identity("ada")], |config| config.exports.push(hanging.clone())).await;
    let ada = lab.client("ada").await;
    let hung = Hung::over(around.path());
    for (exports, commands) in
        [(&lab.config.exports[..], ["cat", "echo"]), (&lab.config.exports[..2], ["cat", "true"])]
    {
        let taken = if commands[1] == "echo" { "true" } else { "echo x" };
        assert!(run(&ada, pipeline(&[taken]), Bytes::new()).await.rejected.is_none());
        let mut config = lab.config.clone();
        config.exports = exports.to_vec();
        config.identities = vec![Identity { commands: set(&commands), ..identity("ada") }];
        lab.changes.send(config).await.unwrap();
        let refused = async {
            while run(&ada, pipeline(&[taken]), Bytes::new()).await.rejected.is_none() {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(AT_ONCE, refused).await.expect("it counts at once");
    }
    drop(hung);
}

#[tokio::test]
async fn another_identitys_export_does_not_exist() {
    let ada = Identity { exports: set(&["logs"]), ..identity("ada") };
    let lab = TlsLab::start(&[ada, identity("bob")]).await;
    fs::write(lab.stores[1].path().join("f"), "secret\n").unwrap();
    let mut spec = pipeline(&["cat f"]);
    spec.mounts = vec![mount(MOUNT, "private", "")];
    let (mut ada, bob) = (lab.client("ada").await, lab.client("bob").await);
    assert_eq!(run(&bob, spec.clone(), Bytes::new()).await.text(), "secret\n");
    assert_eq!(run(&ada, spec, Bytes::new()).await.refusal().kind(), Kind::UnknownExport);
    let exports = ada.describe(DescribeRequest { protocol: 1 }).await.unwrap().into_inner().exports;
    assert_eq!(exports.iter().map(|export| export.name.as_str()).collect::<Vec<_>>(), ["logs"]);
}

#[tokio::test]
async fn who_may_only_read_can_not_write() {
    let ada = Identity { read_only: true, ..identity("ada") };
    let lab = TlsLab::start(&[ada, identity("bob")]).await;
    fs::write(lab.stores[0].path().join("f"), "old\n").unwrap();
    let (mut ada, bob) = (lab.client("ada").await, lab.client("bob").await);
    let write = || command(&["sh", "-c", "echo new > f; cat f"]);
    let outcome = run(&ada, write(), Bytes::new()).await;
    assert!(outcome.errors().contains("Read-only file system"), "{outcome:?}");
    assert_eq!(outcome.text(), "old\n");
    // An identity with other rights has another runner.
    assert_eq!(run(&bob, write(), Bytes::new()).await.text(), "new\n");
    assert_eq!(run(&ada, pipeline(&["cat f"]), Bytes::new()).await.text(), "new\n");
    assert!(
        ada.describe(DescribeRequest { protocol: 1 }).await.unwrap().into_inner().exports[0]
            .read_only
    );
}

#[tokio::test]
async fn only_listed_commands_run() {
    let ada = Identity { commands: set(&["cat", "grep"]), ..identity("ada") };
    let lab = TlsLab::start(&[ada]).await;
    fs::write(lab.stores[0].path().join("f"), "x\n").unwrap();
    let mut ada = lab.client("ada").await;
    assert_eq!(run(&ada, pipeline(&["cat f", "grep x"]), Bytes::new()).await.text(), "x\n");
    let outcome = run(&ada, pipeline(&["cat f", "sort"]), Bytes::new()).await;
    assert_eq!((outcome.refusal().kind(), outcome.refusal().stage), (Kind::MissingTool, 2));
    assert!(outcome.refusal().message.contains("ada may not run sort"), "{outcome:?}");
    let names = ["cat", "sort"].map(str::to_owned).to_vec();
    let tools = ada.tools(ToolsRequest { names }).await.unwrap().into_inner().tools;
    assert_eq!(tools.iter().map(|tool| tool.found).collect::<Vec<_>>(), [true, false]);
}

#[tokio::test]
async fn a_thousand_commands_of_one_do_not_starve_another() {
    let lab =
        TlsLab::with(&[identity("ada"), identity("bob")], |config| config.bounds.runs = 16).await;
    let (ada, mut bob) = (lab.client("ada").await, lab.client("bob").await);
    let mut held = Vec::new();
    let mut refused = 0;
    for _ in 0..1000 {
        let mut call =
            Call::open(&ada, command(&["sh", "-c", "echo ready; exec sleep 1000"])).await;
        match call.next().await.unwrap() {
            posh_proto::executor::run_output::Kind::Rejected(rejected) => {
                assert_eq!(rejected.kind(), Kind::Overloaded);
                assert!(rejected.message.contains("ada has its share"), "{rejected:?}");
                refused += 1;
            }
            _ => held.push(call),
        }
    }
    assert_eq!((held.len(), refused), (12, 988));
    for _ in 0..20 {
        assert_eq!(run(&bob, pipeline(&["echo x"]), Bytes::new()).await.text(), "x\n");
    }
    let status = bob.status(StatusRequest {}).await.unwrap().into_inner();
    let (own, whole) = (status.own.unwrap(), status.whole.unwrap());
    assert_eq!((status.identity.as_str(), own.refused, whole.refused), ("bob", 0, 988));
    assert!(whole.runs >= 12 && whole.max_runs == 16, "{whole:?}");
}

#[tokio::test]
async fn limits_of_an_identity_are_its_own() {
    let limits = Limits { processes: Some(2), ..Limits::default() };
    let lab = TlsLab::start(&[Identity { limits, ..identity("ada") }, identity("bob")]).await;
    let (ada, bob) = (lab.client("ada").await, lab.client("bob").await);
    let three = || pipeline(&["echo x", "cat", "cat"]);
    let refusal = run(&ada, three(), Bytes::new()).await;
    assert_eq!(refusal.refusal().message, "ada is at its limit of processes on this executor");
    assert_eq!(run(&ada, pipeline(&["echo x", "cat"]), Bytes::new()).await.text(), "x\n");
    assert_eq!(run(&bob, three(), Bytes::new()).await.text(), "x\n");
}

#[tokio::test]
async fn calls_too_fast_are_refused() {
    let limits = Limits { calls_per_second: Some(5), ..Limits::default() };
    let lab = TlsLab::start(&[Identity { limits, ..identity("ada") }]).await;
    let mut ada = lab.client("ada").await;
    let mut refused = None;
    for _ in 0..200 {
        refused = ada.describe(DescribeRequest { protocol: 1 }).await.err().or(refused);
    }
    let refused = refused.expect("200 calls come faster than 5 a second");
    assert!(refused.message().contains("limit of 5 calls a second"), "{refused:?}");
}
