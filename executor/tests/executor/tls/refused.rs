//! Peers that must not be admitted, and their error messages.

use std::{ops::Range, sync::Barrier};

use bytes::Bytes;
use posh_executor::{
    identity::ConfiguredAccount,
    tls::{administer, register::Register},
};
use posh_proto::executor::{
    Chunk, DescribeRequest, EnrolRequest, RenewRequest, RunInput, StatusRequest, ToolsRequest,
    enrolment_client::EnrolmentClient, run_input::Kind, run_output,
};
use posh_reach::{
    Route,
    tls::{self, TlsFault},
};
use tempfile::TempDir;
use tonic::{Code, Status};

use super::{TlsLab, client, identity, now_s};
use crate::{
    harness::{Call, Client, IN, Lab, PATIENCE, command, pipeline, pipeline_with_input, run},
    lifecycle::lock_is_free,
};

const HOUR_S: u64 = 3600;
/// At the same time.
const HURRIED: usize = 4;

fn valid_s() -> Range<u64> {
    now_s() - HOUR_S..now_s() + HOUR_S
}

async fn refusal(client: &mut Client) -> Status {
    client.describe(DescribeRequest { protocol: 1 }).await.unwrap_err()
}

fn assert_refused(status: &Status, words: &str) {
    assert_eq!(status.code(), Code::Unauthenticated, "{status:?}");
    assert!(status.message().contains(words), "{status:?}");
}

#[tokio::test]
async fn without_a_certificate_there_is_nothing_but_enrolment() {
    let lab = TlsLab::start(&[identity("ada")]).await;
    let channel = lab.stranger().await;
    let mut executor = client(channel.clone());
    assert_refused(&refusal(&mut executor).await, "run `posh-executor enroll NAME` there");
    assert_refused(&executor.tools(ToolsRequest::default()).await.unwrap_err(), "no certificate");
    assert_refused(&executor.status(StatusRequest {}).await.unwrap_err(), "no certificate");
    let run = executor.run(tokio_stream::once(RunInput::default())).await;
    assert_refused(&run.unwrap_err(), "no certificate");
    let mut enrolment = EnrolmentClient::new(channel.clone());
    assert_refused(&enrolment.renew(RenewRequest::default()).await.unwrap_err(), "no certificate");
    let guess = EnrolRequest { secret: vec![0; 16].into(), ..EnrolRequest::default() };
    let refused = enrolment.enrol(guess).await.unwrap_err();
    assert_eq!(refused.code(), Code::PermissionDenied);
    assert!(refused.message().contains("token is not valid"), "{refused:?}");
}

#[tokio::test]
async fn health_is_not_for_strangers() {
    let lab = TlsLab::start(&[identity("ada")]).await;
    let mut health = tonic_health::pb::health_client::HealthClient::new(lab.stranger().await);
    let asked = health.check(tonic_health::pb::HealthCheckRequest { service: String::new() }).await;
    assert_refused(&asked.unwrap_err(), "no certificate");
}

#[tokio::test]
async fn another_authority_counts_for_nothing() {
    let lab = TlsLab::start(&[identity("ada")]).await;
    let other = TempDir::new().unwrap();
    administer::init(other.path(), Vec::new()).unwrap();
    let (path, issued) = lab.forge("ada", other.path(), valid_s());
    assert_refused(
        &refusal(&mut lab.client_of(&path).await).await,
        "has not issued the certificate",
    );
    // Not even with an entry in the register.
    lab.register().note("ada", &issued).unwrap();
    assert_refused(&refusal(&mut lab.client_of(&path).await).await, "is not accepted");
}

#[tokio::test]
async fn what_the_authority_signed_counts_only_if_it_is_registered() {
    let lab = TlsLab::start(&[identity("ada")]).await;
    let (path, _) = lab.forge("ada", lab.directory.path(), valid_s());
    assert_refused(
        &refusal(&mut lab.client_of(&path).await).await,
        "has not issued the certificate",
    );
}

#[tokio::test]
async fn an_expired_certificate_is_told_so() {
    let lab = TlsLab::start(&[identity("ada")]).await;
    let path = lab.issue("ada", now_s() - 2 * HOUR_S..now_s() - HOUR_S);
    assert_refused(
        &refusal(&mut lab.client_of(&path).await).await,
        "the certificate of `ada` has expired; run",
    );
}

#[tokio::test]
async fn a_certificate_expires_also_while_it_is_in_use() {
    let lab = TlsLab::start(&[identity("ada")]).await;
    let path = lab.issue("ada", now_s() - HOUR_S..now_s() + 2);
    let mut client = lab.client_of(&path).await;
    let expired = async {
        loop {
            if let Err(status) = client.describe(DescribeRequest { protocol: 1 }).await {
                break status;
            }
        }
    };
    assert_refused(&tokio::time::timeout(PATIENCE, expired).await.unwrap(), "has expired");
}

#[tokio::test]
async fn a_revocation_counts_on_open_connections() {
    let lab = TlsLab::start(&[identity("ada"), identity("eve")]).await;
    let (mut ada, mut eve) = (lab.client("ada").await, lab.client("eve").await);
    assert_eq!(run(&eve, pipeline(&["echo x"]), Bytes::new()).await.text(), "x\n");
    administer::revoke(lab.directory.path(), "eve").unwrap();
    assert_refused(&refusal(&mut eve).await, "the certificate of `eve` was revoked");
    let started = eve.run(tokio_stream::once(RunInput::default())).await;
    assert_refused(&started.unwrap_err(), "was revoked");
    assert_refused(
        &refusal(&mut lab.client_of(&lab.credentials("eve")).await).await,
        "was revoked",
    );
    assert!(ada.describe(DescribeRequest { protocol: 1 }).await.is_ok());
}

/// A run that lasts until it is ended.
async fn at_work(client: &Client) -> Call {
    let mut call =
        Call::open(client, command(&["sh", "-c", "exec 9>lock; flock 9; echo ready; sleep 1000"]))
            .await;
    call.until_output("ready").await;
    call
}

/// Final status that the client of an ended run gets.
async fn last_words(mut call: Call) -> Status {
    let over = async {
        loop {
            if let Err(status) = call.output.message().await {
                break status;
            }
        }
    };
    tokio::time::timeout(PATIENCE, over).await.expect("the run is ended")
}

#[tokio::test]
async fn a_revocation_ends_runs_at_work() {
    let lab = TlsLab::start(&[identity("ada"), identity("eve")]).await;
    let (ada, eve) = (lab.client("ada").await, lab.client("eve").await);
    let revoked = at_work(&eve).await;
    let mut other = Call::open(&ada, pipeline_with_input(&["cat"])).await;
    administer::revoke(lab.directory.path(), "eve").unwrap();
    let status = last_words(revoked).await;
    assert_refused(&status, "the executor ended this run: the certificate of `eve` was revoked");
    lock_is_free(lab.stores[0].path()).await;
    // No other identity's run has ended.
    other.send(Kind::Chunk(Chunk { stream: IN, data: "still here".into() })).await;
    other.until_output("still here").await;
}

// Guard: `Register::renew` keeps what it replaces.
#[tokio::test]
async fn what_began_over_a_certificate_that_was_replaced_twice_ends_with_a_revocation() {
    let lab = TlsLab::start(&[identity("eve")]).await;
    let path = lab.enrol("eve").await.unwrap();
    let begun = at_work(&lab.client_of(&path).await).await;
    for _ in 0..2 {
        let channel = tls::channel(&lab.host, &path).await.unwrap();
        tls::enrol::renew(channel, &lab.host, &path).await.unwrap();
    }
    assert_eq!(
        run(&lab.client_of(&path).await, pipeline(&["echo x"]), Bytes::new()).await.text(),
        "x\n"
    );
    administer::revoke(lab.directory.path(), "eve").unwrap();
    assert_refused(
        &last_words(begun).await,
        "the executor ended this run: the certificate of `eve` was revoked",
    );
    lock_is_free(lab.stores[0].path()).await;
}

// Guard: `Admission::standing`.
#[tokio::test]
async fn what_goes_on_over_an_expired_certificate_ends_with_its_identity() {
    let lab = TlsLab::start(&[identity("ada"), identity("eve")]).await;
    let path = lab.issue("eve", now_s() - HOUR_S..now_s() + 2);
    let mut begun = Call::open(&lab.client_of(&path).await, pipeline_with_input(&["cat"])).await;
    tokio::time::sleep(std::time::Duration::from_secs(4)).await;
    begun.send(Kind::Chunk(Chunk { stream: IN, data: "still here".into() })).await;
    begun.until_output("still here").await;
    let mut changed = lab.config.clone();
    changed.identities = vec![identity("ada")];
    lab.changes.send(changed).await.unwrap();
    assert_refused(
        &last_words(begun).await,
        "`eve` has no place in the configuration of this executor",
    );
}

#[tokio::test]
async fn a_changed_configuration_counts_at_once_and_ends_what_has_no_place_in_it() {
    let lab = TlsLab::start(&[identity("ada"), identity("eve")]).await;
    let (ada, eve) = (lab.client("ada").await, lab.client("eve").await);
    let removed = at_work(&eve).await;
    let mut left = Call::open(&ada, pipeline_with_input(&["cat"])).await;
    left.until(|kind| matches!(kind, run_output::Kind::Started(_)).then_some(())).await;
    let mut changed = lab.config.clone();
    changed.identities = vec![identity("ada"), identity("bob")];
    changed.identities[0].commands = Some(["cat".to_owned()].into());
    lab.changes.send(changed).await.unwrap();
    assert_refused(
        &last_words(removed).await,
        "`eve` has no place in the configuration of this executor",
    );
    lock_is_free(lab.stores[0].path()).await;
    assert_eq!(
        run(&lab.client("bob").await, pipeline(&["echo x"]), Bytes::new()).await.text(),
        "x\n"
    );
    let refused = run(&ada, pipeline(&["echo x"]), Bytes::new()).await;
    assert!(refused.refusal().message.contains("ada may not run echo"), "{refused:?}");
    left.send(Kind::Chunk(Chunk { stream: IN, data: "still here".into() })).await;
    left.until_output("still here").await;
}

#[tokio::test]
async fn an_identity_without_configuration_may_do_nothing() {
    let lab = TlsLab::start(&[identity("ada")]).await;
    assert_refused(
        &refusal(&mut lab.client("bob").await).await,
        "`bob` has no place in the configuration",
    );
}

#[tokio::test]
async fn an_identity_whose_account_is_absent_hears_so_and_has_it_looked_up() {
    let mut lab = TlsLab::start(&[identity("ada"), identity("eve")]).await;
    let eve = lab.client("eve").await;
    let removed = at_work(&eve).await;
    let mut changed = lab.config.clone();
    changed.identities[1].user = Some(ConfiguredAccount::Absent("eve-account".to_owned()));
    lab.changes.send(changed).await.unwrap();
    let why = "`eve` is an identity of this executor, but its account is not known on that machine";
    assert_refused(&last_words(removed).await, why);
    lock_is_free(lab.stores[0].path()).await;
    while lab.attempted.try_recv().is_ok() {}
    assert_refused(&refusal(&mut lab.client("eve").await).await, why);
    let attempt = tokio::time::timeout(PATIENCE, lab.attempted.recv()).await.unwrap();
    assert_eq!(attempt.unwrap(), "eve-account");
    // It is let in as soon as the account is known.
    lab.changes.send(lab.config.clone()).await.unwrap();
    let ran = async || run(&lab.client("eve").await, pipeline(&["echo x"]), Bytes::new()).await;
    assert_eq!(ran().await.text(), "x\n");
}

#[tokio::test]
async fn a_token_is_good_once() {
    let lab = TlsLab::start(&[identity("ada")]).await;
    let token = lab.register().token_for("ada").unwrap();
    lab.enrol_with(&token, "first").await.unwrap();
    let again = lab.enrol_with(&token, "second").await.unwrap_err();
    assert!(matches!(&again, TlsFault::Refused(why) if why.contains("used already")), "{again}");
    assert!(!lab.credentials("second").exists());
}

/// As separate processes would: executor and administrator share one register.
#[test]
fn two_that_hurry_share_no_token() {
    let directory = TempDir::new().unwrap();
    administer::init(directory.path(), Vec::new()).unwrap();
    let key = rcgen::KeyPair::generate().unwrap();
    let request = rcgen::CertificateParams::default().serialize_request(&key).unwrap();
    for _ in 0..20 {
        let token = Register::at(directory.path()).token_for("ada").unwrap();
        let start = Barrier::new(HURRIED);
        let enrol = || {
            let register = Register::at(directory.path());
            start.wait();
            register.enrol(&token.secret, request.der()).unwrap().is_ok()
        };
        let enrolled: usize = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..HURRIED).map(|_| scope.spawn(enrol)).collect();
            threads.into_iter().map(|thread| usize::from(thread.join().unwrap())).sum()
        });
        assert_eq!(enrolled, 1);
    }
}

#[tokio::test]
async fn a_token_expires_and_can_be_taken_back() {
    let lab = TlsLab::start(&[identity("ada")]).await;
    let old = lab.register().token_until("ada", now_s() - 1).unwrap();
    let why = lab.enrol_with(&old, "ada").await.unwrap_err().to_string();
    assert!(why.contains("the token has expired; get a new one"), "{why}");
    let revoked = lab.register().token_for("ada").unwrap();
    lab.register().revoke("ada").unwrap();
    let why = lab.enrol_with(&revoked, "ada").await.unwrap_err().to_string();
    assert!(why.contains("taken back"), "{why}");
}

#[tokio::test]
async fn a_token_makes_nobody_somebody_else() {
    let lab = TlsLab::start(&[identity("ada"), identity("boss")]).await;
    let token = lab.register().token_for("ada").unwrap();
    let key = rcgen::KeyPair::generate().unwrap();
    let mut claim = rcgen::CertificateParams::new(vec!["boss".to_owned()]).unwrap();
    claim.distinguished_name.push(rcgen::DnType::CommonName, "boss");
    claim.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let signing_request = claim.serialize_request(&key).unwrap().der().to_vec().into();
    let request = EnrolRequest { secret: token.secret.to_vec().into(), signing_request };
    let issued =
        EnrolmentClient::new(lab.stranger().await).enrol(request).await.unwrap().into_inner();
    assert_eq!(issued.identity, "ada");
    let text = String::from_utf8_lossy(&issued.certificate);
    assert!(text.contains("ada") && !text.contains("boss"), "{text}");
    let known =
        lab.register().identity_of(&posh_proto::token::Fingerprint::of(&issued.certificate));
    assert_eq!(known, Ok("ada".to_owned()));
}

#[tokio::test]
async fn enrolments_are_limited_in_number() {
    let lab = TlsLab::start(&[identity("ada")]).await;
    let mut enrolment = EnrolmentClient::new(lab.stranger().await);
    let guess = EnrolRequest { secret: vec![0; 16].into(), ..EnrolRequest::default() };
    let mut refused = 0;
    for _ in 0..100 {
        refused += usize::from(
            enrolment.enrol(guess.clone()).await.unwrap_err().code() == Code::ResourceExhausted,
        );
    }
    assert!(refused > 40, "{refused}");
}

/// The limit is for all messages together; each of these is smaller.
#[tokio::test]
async fn a_stranger_may_say_little() {
    const MESSAGE_BYTES: usize = 60 << 10;
    let lab = TlsLab::start(&[identity("ada")]).await;
    let mut enrolment = EnrolmentClient::new(lab.stranger().await);
    let request = |bytes: usize| EnrolRequest {
        signing_request: vec![0; bytes].into(),
        ..EnrolRequest::default()
    };
    let large = enrolment.enrol(request(100 << 10)).await.unwrap_err();
    assert_eq!(large.code(), Code::OutOfRange, "{large:?}");
    // Its connection ends after 256 KiB.
    let mut enrolment = EnrolmentClient::new(lab.stranger().await);
    for answered in 0.. {
        let refused = enrolment.enrol(request(MESSAGE_BYTES)).await.unwrap_err();
        if refused.code() != Code::InvalidArgument {
            break;
        }
        assert!(
            (answered + 1) * MESSAGE_BYTES <= 256 << 10,
            "{answered} were answered before: {refused:?}"
        );
    }
    // Others still have their shares.
    let client = lab.client("ada").await;
    assert_eq!(run(&client, pipeline(&["echo x"]), Bytes::new()).await.text(), "x\n");
}

#[tokio::test]
async fn a_token_is_not_shown_to_an_impostor() {
    let (lab, impostor) =
        (TlsLab::start(&[identity("ada")]).await, TlsLab::start(&[identity("ada")]).await);
    let token = lab.register().token_for("ada").unwrap();
    let why = impostor.enrol_with(&token, "ada").await.unwrap_err().to_string();
    assert!(why.contains("is not the executor that has made this token"), "{why}");
    // Nor are commands, after the enrolment.
    let path = lab.enrol_with(&token, "ada").await.unwrap();
    let why = posh_reach::tls::channel(&impostor.host, &path).await.unwrap_err().to_string();
    assert!(why.contains("another authority has signed"), "{why}");
}

#[tokio::test]
async fn the_certificate_must_be_for_the_name() {
    let lab = TlsLab::start(&[identity("ada")]).await;
    let path = lab.enrol("ada").await.unwrap();
    administer::renew(lab.directory.path(), vec!["elsewhere".to_owned()]).unwrap();
    let refused = async {
        loop {
            if let Err(fault) = posh_reach::tls::channel(&lab.host, &path).await {
                break fault.to_string();
            }
        }
    };
    let why = tokio::time::timeout(PATIENCE, refused).await.unwrap();
    assert!(why.contains("posh-executor renew --name 127.0.0.1"), "{why}");
}

#[tokio::test]
async fn plain_text_and_tls_do_not_mix() {
    let tls = TlsLab::start(&[identity("ada")]).await;
    let address = fs_mapper::config::Address::parse(&format!("http://{}", tls.host)).unwrap();
    let route = Route { address, exports: Vec::new(), ssh_command: Vec::new() };
    // As the gateway does it: the connection succeeds, and the first call fails.
    let mut reached = client(posh_reach::connect(&route).await.unwrap().channel);
    let why = posh_reach::why_mute(&route, refusal(&mut reached).await.message().to_owned()).await;
    assert!(
        why.contains(&format!("http://{0} speaks TLS: its address is tls://{0}; run", tls.host)),
        "{why}"
    );
    let plain = Lab::start().await;
    let path = tls.enrol("ada").await.unwrap();
    let host = fs_mapper::config::TlsHost { host: "127.0.0.1".into(), port: plain.address.port() };
    let why = posh_reach::tls::channel(&host, &path).await.unwrap_err().to_string();
    assert!(why.contains("does not speak TLS") && why.contains(&format!("http://{host}")), "{why}");
}
