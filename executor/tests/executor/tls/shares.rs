//! Nobody takes what others need: messages, renewals, enrolments, and rights that end.

use std::{fs, time::Duration};

use bytes::Bytes;
use http_body_util::StreamBody;
use posh_executor::tls::{administer, register::MAX_OF_ONE};
use posh_proto::{
    executor::{
        DescribeRequest, EnrolRequest, MountPoint, RunInput, RunSpec, enrolment_client::EnrolmentClient, run_input,
    },
    token::Fingerprint,
};
use posh_reach::tls::{self, credentials::Credentials};
use tokio_stream::StreamExt as _;
use tonic::{Code, Status, body::Body, codegen::http, transport::Channel};
use tower::ServiceExt as _;

use super::{TlsLab, crowds::memory_mb, identity};
use crate::harness::{PATIENCE, pipeline, run};

/// Calls with half a message each.
const HALVES: usize = 600;
/// What they may cost this process, which also has the client's own buffers.
const HALVES_MB: usize = 120;

#[tokio::test]
async fn a_message_of_empty_messages_is_not_decoded() {
    let lab = TlsLab::start(&[identity("ada")]).await;
    let client = lab.client("ada").await;
    let spec = RunSpec { mounts: vec![MountPoint::default(); 100_000], ..RunSpec::default() };
    let input = RunInput { kind: Some(run_input::Kind::Spec(spec)) };
    let mut output = client.clone().run(tokio_stream::once(input)).await.unwrap().into_inner();
    let refused = output.message().await.unwrap_err();
    assert_eq!(refused.code(), Code::ResourceExhausted, "{refused:?}");
    assert!(refused.message().contains("more than 256 `mounts`"), "{refused:?}");
    let large = RunSpec { run_id: "x".repeat(1 << 20), ..RunSpec::default() };
    let input = RunInput { kind: Some(run_input::Kind::Spec(large)) };
    let mut output = client.clone().run(tokio_stream::once(input)).await.unwrap().into_inner();
    assert_eq!(output.message().await.unwrap_err().code(), Code::OutOfRange);
    assert_eq!(run(&client, pipeline(&["echo x"]), Bytes::new()).await.text(), "x\n");
}

/// A `Run` whose first message claims 250 KiB and stops after most of it.
async fn half_message(channel: Channel) {
    let mut half = vec![0];
    half.extend((250_u32 << 10).to_be_bytes());
    half.resize(240 << 10, 0);
    let half = http_body::Frame::data(Bytes::from(half));
    let frames = tokio_stream::once(Ok::<_, Status>(half)).chain(tokio_stream::pending());
    let request = http::Request::post("http://tls/posh.executor.v1.Executor/Run");
    let request = request.header("content-type", "application/grpc").header("te", "trailers");
    let _ = channel.oneshot(request.body(Body::new(StreamBody::new(frames))).unwrap()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn half_messages_cost_a_fixed_amount_and_only_whoever_sends_them() {
    let lab = TlsLab::start(&[identity("ada"), identity("bob")]).await;
    let (ada, bob) = (lab.enrol("ada").await.unwrap(), lab.client("bob").await);
    let (channel, _) = tls::channel(&lab.host, &ada).await.unwrap();
    let before_mb = memory_mb();
    let halves: Vec<_> = (0..HALVES).map(|_| tokio::spawn(half_message(channel.clone()))).collect();
    tokio::time::sleep(Duration::from_secs(3)).await;
    let grown_mb = memory_mb().saturating_sub(before_mb);
    assert!(grown_mb < HALVES_MB, "{grown_mb} MB");
    assert_eq!(run(&bob, pipeline(&["echo x"]), Bytes::new()).await.text(), "x\n");
    halves.iter().for_each(tokio::task::JoinHandle::abort);
}

#[tokio::test]
async fn a_right_token_is_taken_whatever_others_guess() {
    let lab = TlsLab::start(&[identity("ada")]).await;
    let token = lab.register().token_for("ada").unwrap();
    let mut enrolment = EnrolmentClient::new(lab.stranger().await);
    let guess = EnrolRequest { secret: vec![0; 16].into(), ..EnrolRequest::default() };
    let mut last = Code::Ok;
    for _ in 0..60 {
        last = enrolment.enrol(guess.clone()).await.unwrap_err().code();
    }
    assert_eq!(last, Code::ResourceExhausted);
    // From the same address even.
    lab.enrol_with(&token, "ada").await.unwrap();
}

#[tokio::test]
async fn a_renewal_replaces_and_the_register_stays_small() {
    let lab = TlsLab::start(&[identity("bob"), identity("ada")]).await;
    let path = lab.enrol("bob").await.unwrap();
    let old = fs::read(&path).unwrap();
    let register = lab.register();
    let present = || Fingerprint::of(&Credentials::load(&path, &lab.host).unwrap().certificate);
    let key = rcgen::KeyPair::generate().unwrap();
    let request = rcgen::CertificateParams::default().serialize_request(&key).unwrap();
    for _ in 0..10 {
        register.renew("bob", &present(), request.der()).unwrap();
    }
    assert!(register.certificates().unwrap().len() <= 4, "{}", administer::list(lab.directory.path()).unwrap());
    // Over and over with what was got.
    for _ in 0..5 {
        let (channel, _) = tls::channel(&lab.host, &path).await.unwrap();
        tls::enrol::renew(channel, &lab.host, &path).await.unwrap();
    }
    assert!(register.certificates().unwrap().len() <= 4, "{}", administer::list(lab.directory.path()).unwrap());
    let mut client = lab.client_of(&path).await;
    assert!(client.describe(DescribeRequest { protocol: 1 }).await.is_ok());
    // The first was replaced twice: whoever has kept it is out.
    let kept = lab.credentials("kept");
    fs::copy(&path, &kept).unwrap();
    fs::write(&kept, old).unwrap();
    assert!(lab.client_of(&kept).await.describe(DescribeRequest { protocol: 1 }).await.is_err());
}

#[tokio::test]
async fn one_before_the_present_certificate_counts_in_case_an_answer_is_lost() {
    let lab = TlsLab::start(&[identity("bob")]).await;
    let path = lab.enrol("bob").await.unwrap();
    let old = fs::read(&path).unwrap();
    let (channel, _) = tls::channel(&lab.host, &path).await.unwrap();
    tls::enrol::renew(channel, &lab.host, &path).await.unwrap();
    fs::write(&path, old).unwrap();
    assert!(lab.client_of(&path).await.describe(DescribeRequest { protocol: 1 }).await.is_ok());
    assert!(administer::list(lab.directory.path()).unwrap().contains("replaced, good for 24 hours more"));
}

#[tokio::test]
async fn one_identity_does_not_fill_the_register() {
    let lab = TlsLab::start(&[identity("ada"), identity("bob")]).await;
    let register = lab.register();
    let key = rcgen::KeyPair::generate().unwrap();
    let request = rcgen::CertificateParams::default().serialize_request(&key).unwrap();
    for _ in 0..MAX_OF_ONE {
        let token = register.token_for("bob").unwrap();
        register.enrol(&token.secret, request.der()).unwrap().unwrap();
    }
    let token = register.token_for("bob").unwrap();
    let full = register.enrol(&token.secret, request.der()).unwrap_err().to_string();
    assert!(full.contains("`bob` has 64 certificates") && full.contains("--certificate"), "{full}");
    lab.enrol("ada").await.unwrap();
    administer::revoke(lab.directory.path(), "bob").unwrap();
    lab.enrol("bob").await.unwrap();
}

#[tokio::test]
async fn one_certificate_is_revoked_with_what_was_got_over_it() {
    let lab = TlsLab::start(&[identity("ada")]).await;
    let (stolen, other) = (lab.enrol("ada").await.unwrap(), lab.home.path().join("other"));
    let token = lab.register().token_for("ada").unwrap();
    tls::enrol::enrol(&lab.host, &token, &other).await.unwrap();
    let sha256 = Fingerprint::of(&Credentials::load(&stolen, &lab.host).unwrap().certificate).to_string();
    let (channel, _) = tls::channel(&lab.host, &stolen).await.unwrap();
    tls::enrol::renew(channel, &lab.host, &stolen).await.unwrap();
    assert!(administer::list(lab.directory.path()).unwrap().contains(&sha256[..16]));
    assert!(administer::revoke_one(lab.directory.path(), "ada", &sha256[..4]).is_err());
    administer::revoke_one(lab.directory.path(), "ada", &sha256[..12]).unwrap();
    let refused = lab.client_of(&stolen).await.describe(DescribeRequest { protocol: 1 }).await.unwrap_err();
    assert!(refused.message().contains("was revoked"), "{refused:?}");
    assert!(lab.client_of(&other).await.describe(DescribeRequest { protocol: 1 }).await.is_ok());
}

#[tokio::test]
async fn a_revocation_closes_connections() {
    let lab = TlsLab::start(&[identity("ada"), identity("eve")]).await;
    let (_ada, mut eve) = (lab.client("ada").await, lab.client("eve").await);
    assert!(eve.describe(DescribeRequest { protocol: 1 }).await.is_ok());
    administer::revoke(lab.directory.path(), "eve").unwrap();
    // A channel that is not a reconnecting one fails for good once its connection is closed.
    let closed = async {
        loop {
            let status = eve.describe(DescribeRequest { protocol: 1 }).await.unwrap_err();
            if status.code() != Code::Unauthenticated {
                break;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(PATIENCE, closed).await.expect("its connection is closed");
}
