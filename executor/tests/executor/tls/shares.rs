//! No identity takes what others need: messages, renewals, enrolments, and rights that end.

use std::{
    fs,
    process::Command,
    time::{Duration, Instant},
};

use bytes::Bytes;
use http_body_util::StreamBody;
use posh_executor::tls::{
    administer,
    register::{Certificate, MAX_OF_ONE},
};
use posh_proto::{
    executor::{
        DescribeRequest, EnrolRequest, MountPoint, RunInput, RunSpec, StatusRequest,
        enrolment_client::EnrolmentClient, run_input,
    },
    token::Fingerprint,
};
use posh_reach::tls::{self, credentials::Credentials};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio_stream::StreamExt as _;
use tonic::{Code, Status, body::Body, codegen::http, transport::Channel};
use tower::ServiceExt as _;

use super::{TlsLab, crowds::memory_mb, identity};
use crate::{
    harness::{PATIENCE, connect, pipeline, run},
    lifecycle::Program,
};

/// Calls with half a message each.
const HALVES: usize = 600;
/// Growth of the executor, for their 140 MB: 32 MiB on the account, HTTP/2's window, and calls.
const HALVES_MB: usize = 80;

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

/// A field that the contract does not have: a decoded message would keep its bytes in memory.
#[derive(Clone, prost::Message)]
struct Padded {
    #[prost(bytes = "vec", tag = "1000")]
    padding: Vec<u8>,
}

#[tokio::test]
async fn what_decoding_drops_is_refused() {
    let lab = TlsLab::start(&[identity("ada")]).await;
    let path = lab.enrol("ada").await.unwrap();
    let channel = tls::channel(&lab.host, &path).await.unwrap();
    let ask = |method: &'static str| {
        let mut client = tonic::client::Grpc::new(channel.clone());
        async move {
            client.ready().await.unwrap();
            let codec = tonic_prost::ProstCodec::<Padded, Padded>::default();
            let padded = tonic::Request::new(tokio_stream::once(Padded { padding: vec![7; 9000] }));
            let mut answer =
                client.streaming(padded, method.parse().unwrap(), codec).await?.into_inner();
            answer.message().await.map(|_| ())
        }
    };
    for method in ["posh.executor.v1.Executor/Run", "posh.executor.v1.Executor/Tools"] {
        let method = format!("/{method}").leak();
        let refused = ask(method).await.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument, "{method}: {refused:?}");
        assert!(refused.message().contains("has no field 1000"), "{method}: {refused:?}");
    }
    for method in ["Session", "Read", "Write"] {
        let method = format!("/posh.volume.v1.Volume/{method}").leak();
        let refused = ask(method).await.unwrap_err();
        assert!(refused.message().contains("has no field 1000"), "{method}: {refused:?}");
    }
    assert_eq!(
        run(&lab.client_of(&path).await, pipeline(&["echo x"]), Bytes::new()).await.text(),
        "x\n"
    );
}

#[tokio::test]
async fn headers_of_a_call_are_few() {
    let lab = TlsLab::start(&[identity("ada")]).await;
    let mut client = lab.client("ada").await;
    for (bytes, is_heard) in [(2000, true), (5000, false), (2000, true)] {
        let mut request = tonic::Request::new(StatusRequest {});
        request.metadata_mut().insert("padding", "x".repeat(bytes).parse().unwrap());
        assert_eq!(client.status(request).await.is_ok(), is_heard, "{bytes}");
    }
}

/// A `Run` whose first message never completes.
async fn half_message(channel: Channel, half: Bytes) {
    let half = http_body::Frame::data(half);
    let frames = tokio_stream::once(Ok::<_, Status>(half)).chain(tokio_stream::pending());
    let request = http::Request::post("http://tls/posh.executor.v1.Executor/Run");
    let request = request.header("content-type", "application/grpc").header("te", "trailers");
    let _ = channel.oneshot(request.body(Body::new(StreamBody::new(frames))).unwrap()).await;
}

/// The executor is a process of its own, since the client buffers unsent data.
#[tokio::test(flavor = "multi_thread")]
async fn half_messages_cost_a_fixed_amount() {
    let store = tempfile::tempdir().unwrap();
    let mut executor =
        Program::start(&mut Command::new(env!("CARGO_BIN_EXE_posh-executor")), store.path());
    let address = executor.address();
    let memory_mb = || memory_mb(&executor.pid().to_string());
    let before_mb = memory_mb();
    let mut half = vec![0];
    half.extend((250_u32 << 10).to_be_bytes());
    half.resize(240 << 10, 0);
    let half = Bytes::from(half);
    let channel =
        Channel::from_shared(format!("http://{address}")).unwrap().connect().await.unwrap();
    let halves: Vec<_> =
        (0..HALVES).map(|_| tokio::spawn(half_message(channel.clone(), half.clone()))).collect();
    tokio::time::sleep(Duration::from_secs(3)).await;
    let grown_mb = memory_mb().saturating_sub(before_mb);
    assert!(grown_mb < HALVES_MB, "{grown_mb} MB");
    let other = connect(address).await;
    assert_eq!(run(&other, pipeline(&["true"]), Bytes::new()).await.text(), "");
    halves.iter().for_each(tokio::task::JoinHandle::abort);
}

#[tokio::test]
async fn a_right_token_is_taken_whatever_others_guess() {
    let lab = TlsLab::start(&[identity("ada")]).await;
    let token = lab.register().token_for("ada").unwrap();
    let enrolment = EnrolmentClient::new(lab.stranger().await);
    let guess = EnrolRequest { secret: vec![0; 16].into(), ..EnrolRequest::default() };
    // A few at once: the address earns another attempt every half second, in which a busy machine
    // answers few.
    let mut is_held_back = false;
    for _ in 0..60 {
        let mut guesses = tokio::task::JoinSet::new();
        for _ in 0..3 {
            let (mut enrolment, guess) = (enrolment.clone(), guess.clone());
            guesses.spawn(async move { enrolment.enrol(guess).await.unwrap_err() });
        }
        let refusals = guesses.join_all().await;
        is_held_back |= refusals
            .iter()
            .any(|refusal| refusal.message().starts_with("too many failed enrolments"));
    }
    assert!(is_held_back);
    // Even from the same address.
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
    assert!(
        register.certificates().unwrap().len() <= 4,
        "{}",
        administer::list(lab.directory.path()).unwrap()
    );
    // Again and again with the renewed certificate.
    for _ in 0..5 {
        let channel = tls::channel(&lab.host, &path).await.unwrap();
        tls::enrol::renew(channel, &lab.host, &path).await.unwrap();
    }
    assert!(
        register.certificates().unwrap().len() <= 8,
        "{}",
        administer::list(lab.directory.path()).unwrap()
    );
    let mut client = lab.client_of(&path).await;
    assert!(client.describe(DescribeRequest { protocol: 1 }).await.is_ok());
    // The first was replaced twice: a copy of it is invalid.
    let kept = lab.credentials("kept");
    fs::copy(&path, &kept).unwrap();
    fs::write(&kept, old).unwrap();
    assert!(lab.client_of(&kept).await.describe(DescribeRequest { protocol: 1 }).await.is_err());
}

// Guard: `Register::renew`.
#[tokio::test]
async fn who_has_stolen_a_certificate_takes_no_successor_away() {
    let lab = TlsLab::start(&[identity("bob")]).await;
    let owners = lab.enrol("bob").await.unwrap();
    let stolen = lab.credentials("stolen");
    fs::copy(&owners, &stolen).unwrap();
    let former = fs::read(&stolen).unwrap();
    let renew = async |path: &std::path::Path| {
        let channel = tls::channel(&lab.host, path).await.unwrap();
        tls::enrol::renew(channel, &lab.host, path).await
    };
    renew(&owners).await.unwrap();
    assert!(lab.client_of(&owners).await.describe(DescribeRequest { protocol: 1 }).await.is_ok());
    // With the former one, and with its successors.
    for _ in 0..4 {
        fs::write(&stolen, &former).unwrap();
        let _ = renew(&stolen).await;
    }
    assert!(renew(&stolen).await.is_ok());
    assert!(lab.client_of(&owners).await.describe(DescribeRequest { protocol: 1 }).await.is_ok());
    administer::revoke(lab.directory.path(), "bob").unwrap();
    assert!(lab.client_of(&owners).await.describe(DescribeRequest { protocol: 1 }).await.is_err());
}

// Guard: the register keeps which certificates were shown.
#[tokio::test]
async fn who_has_stolen_a_certificate_takes_no_successor_away_after_a_restart_either() {
    let lab = TlsLab::start(&[identity("bob")]).await;
    let owners = lab.enrol("bob").await.unwrap();
    let sha256 = || Fingerprint::of(&Credentials::load(&owners, &lab.host).unwrap().certificate);
    let former = sha256();
    let channel = tls::channel(&lab.host, &owners).await.unwrap();
    tls::enrol::renew(channel, &lab.host, &owners).await.unwrap();
    let present = sha256();
    let before = lab.register();
    assert_eq!(before.identity_of(&present).unwrap(), "bob");
    before.settle(&[]).unwrap();
    // As another process has it, which was never shown anything.
    let after = lab.register();
    let key = rcgen::KeyPair::generate().unwrap();
    let request = rcgen::CertificateParams::default().serialize_request(&key).unwrap();
    for _ in 0..8 {
        after.renew("bob", &former, request.der()).unwrap();
    }
    assert_eq!(after.identity_of(&present).unwrap(), "bob");
}

// Guard: an enrolment's bound.
#[tokio::test]
async fn one_workstation_leaves_the_others_of_its_identity_room() {
    let lab = TlsLab::start(&[identity("ada")]).await;
    let register = lab.register();
    let key = rcgen::KeyPair::generate().unwrap();
    let request = rcgen::CertificateParams::default().serialize_request(&key).unwrap();
    let enrolled = || {
        let token = register.token_for("ada").unwrap();
        let (_, issued) = register.enrol(&token.secret, request.der()).unwrap().unwrap();
        Fingerprint::of(&issued.certificate)
    };
    let (greedy, other) = (enrolled(), enrolled());
    // Each is shown, and asks for three more.
    let (mut present, mut refused) = (vec![greedy], 0);
    for _ in 0..4 {
        let mut next = Vec::new();
        for certificate in &present {
            for _ in 0..3 {
                let Ok(issued) = register.renew("ada", certificate, request.der()) else {
                    refused += 1;
                    continue;
                };
                let issued = Fingerprint::of(&issued.certificate);
                register.identity_of(&issued).unwrap();
                next.push(issued);
            }
        }
        present = next;
    }
    let now_s = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap().as_secs();
    let certificates = register.certificates().unwrap();
    let is_valid = |it: &&Certificate| it.superseded_s.is_none_or(|at| at > now_s);
    let valid = certificates.iter().filter(is_valid).count();
    assert!(refused > 0 && valid <= 9, "{refused} refused, {valid} valid");
    assert!(register.renew("ada", &other, request.der()).is_ok());
}

// Guard: the register keeps which revocations are recorded.
#[tokio::test]
async fn a_revocation_is_recorded_once_whenever_it_is_made() {
    let lab = TlsLab::start(&[identity("ada")]).await;
    lab.enrol("ada").await.unwrap();
    // As while no executor was running: nothing has read the register before.
    administer::revoke(lab.directory.path(), "ada").unwrap();
    let unrecorded = lab.register().unrecorded().unwrap();
    assert_eq!(unrecorded.len(), 1);
    assert_eq!(unrecorded[0].identity, "ada");
    lab.register().settle(&unrecorded).unwrap();
    assert_eq!(lab.register().unrecorded().unwrap(), []);
}

#[tokio::test]
async fn one_before_the_present_certificate_counts_in_case_an_answer_is_lost() {
    let lab = TlsLab::start(&[identity("bob")]).await;
    let path = lab.enrol("bob").await.unwrap();
    let old = fs::read(&path).unwrap();
    let channel = tls::channel(&lab.host, &path).await.unwrap();
    tls::enrol::renew(channel, &lab.host, &path).await.unwrap();
    fs::write(&path, old).unwrap();
    assert!(lab.client_of(&path).await.describe(DescribeRequest { protocol: 1 }).await.is_ok());
    assert!(
        administer::list(lab.directory.path())
            .unwrap()
            .contains("replaced, good for 24 hours more")
    );
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
    let sha256 =
        Fingerprint::of(&Credentials::load(&stolen, &lab.host).unwrap().certificate).to_string();
    let channel = tls::channel(&lab.host, &stolen).await.unwrap();
    tls::enrol::renew(channel, &lab.host, &stolen).await.unwrap();
    assert!(administer::list(lab.directory.path()).unwrap().contains(&sha256[..16]));
    assert!(administer::revoke_one(lab.directory.path(), "ada", &sha256[..4]).is_err());
    administer::revoke_one(lab.directory.path(), "ada", &sha256[..12]).unwrap();
    let refused =
        lab.client_of(&stolen).await.describe(DescribeRequest { protocol: 1 }).await.unwrap_err();
    assert!(refused.message().contains("was revoked"), "{refused:?}");
    assert!(lab.client_of(&other).await.describe(DescribeRequest { protocol: 1 }).await.is_ok());
}

/// A client that sends only its preface, and so does not reconnect either.
#[tokio::test]
async fn a_revocation_closes_connections() {
    let lab = TlsLab::start(&[identity("ada"), identity("eve")]).await;
    let mut streams = Vec::new();
    for name in ["ada", "eve"] {
        let credentials = Credentials::load(&lab.enrol(name).await.unwrap(), &lab.host).unwrap();
        let mut stream = lab.connection(&credentials).await;
        stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").await.unwrap();
        // The server's settings: it was admitted.
        assert!(stream.read(&mut [0; 9]).await.unwrap() > 0);
        streams.push(stream);
    }
    administer::revoke(lab.directory.path(), "eve").unwrap();
    let revoked = Instant::now();
    let mut rest = Vec::new();
    let _ = tokio::time::timeout(PATIENCE, streams[1].read_to_end(&mut rest))
        .await
        .expect("it is closed");
    // Keepalive, whose pings these do not answer, takes 8 s.
    assert!(revoked.elapsed() < Duration::from_secs(7), "{:?}", revoked.elapsed());
    streams[0].write_all(b"\0\0\0\x04\x01\0\0\0\0").await.unwrap();
}

// Guard: `Register::renew` looks at the certificate under its lock.
#[tokio::test]
async fn a_certificate_that_was_taken_back_meanwhile_gets_no_other_one() {
    let lab = TlsLab::start(&[identity("ada")]).await;
    let path = lab.enrol("ada").await.unwrap();
    let present = posh_proto::token::Fingerprint::of(
        &Credentials::load(&path, &lab.host).unwrap().certificate,
    );
    // As a call that was admitted before the revocation, and reaches the register after it.
    let key = rcgen::KeyPair::generate().unwrap();
    let request = rcgen::CertificateParams::default().serialize_request(&key).unwrap();
    assert!(lab.register().renew("ada", &present, request.der()).is_ok());
    assert!(lab.register().renew("eve", &present, request.der()).is_err());
    lab.register().revoke("ada").unwrap();
    assert!(lab.register().renew("ada", &present, request.der()).is_err());
}
