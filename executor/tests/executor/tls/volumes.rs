//! Volumes of identities: rights that end, and shares.

use std::{collections::BTreeSet, fs, path::PathBuf, sync::Arc, time::Duration};

use bytes::Bytes;
use fs_mapper::config::TlsHost;
use http_body::Frame;
use http_body_util::StreamBody;
use nix::unistd::geteuid;
use posh_executor::{config::Identity, tls::rotation::Forced};
use posh_proto::{
    PROTOCOL_VERSION,
    executor::{StatusRequest, executor_client::ExecutorClient},
    volume::{
        Hello, ReadPart as WirePart, ReadRequest, ToVolume, WriteRequest, to_volume,
        volume_client::VolumeClient,
    },
};
use posh_reach::tls;
use posh_volume::{
    Errno, Store as _,
    remote::{CannotConnect, Connector, Patience, Remote},
    store::*,
};
use tokio::{
    sync::{Notify, mpsc, watch},
    task::JoinHandle,
    time::{Instant, timeout},
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, body::Body, codegen::http, transport::Channel};
use tower::ServiceExt as _;

use super::{TlsLab, identity};
use crate::harness::{MOUNT, PATIENCE, mount, pipeline, run};

const RW: OpenFlags = OpenFlags::READ.union(OpenFlags::WRITE);
/// Revocations and configurations are checked once a second.
const AT_ONCE: Duration = Duration::from_secs(3);

struct ByCertificate {
    host: TlsHost,
    credentials: PathBuf,
    renewed: Notify,
    /// Number of connections.
    connections: watch::Sender<usize>,
}

impl ByCertificate {
    fn new(lab: &TlsLab, credentials: &std::path::Path) -> Arc<Self> {
        let (host, credentials) = (lab.host.clone(), credentials.to_owned());
        Arc::new(Self {
            host,
            credentials,
            renewed: Notify::new(),
            connections: watch::Sender::new(0),
        })
    }
}

#[tonic::async_trait]
impl Connector for ByCertificate {
    async fn connect(&self) -> Result<Channel, CannotConnect> {
        self.connections.send_modify(|count| *count += 1);
        let channel = tls::channel(&self.host, &self.credentials).await;
        channel.map_err(|error| CannotConnect::Unreachable(error.to_string()))
    }

    async fn worn(&self) -> String {
        self.renewed.notified().await;
        "renewed".to_owned()
    }
}

/// Gives up soon, so that the end of a session is noticed.
fn patience() -> Patience {
    Patience::default()
}

async fn volume_of(
    lab: &TlsLab,
    credentials: &std::path::Path,
    export: &str,
) -> Result<Remote, Errno> {
    match timeout(AT_ONCE, Remote::open(ByCertificate::new(lab, credentials), export, patience()))
        .await
    {
        Ok(Ok(remote)) => Ok(remote),
        Ok(Err(_)) | Err(_) => Err(Errno::EACCES),
    }
}

async fn find(remote: &Remote, name: &str) -> FileId {
    let walk = Op::Walk { from: remote.root(), names: vec![name.into()] };
    let Answer::Walked(walked) = remote.call(&Caller::default(), walk).await.unwrap() else {
        panic!("walked")
    };
    walked.entries[0].attributes.id
}

async fn open(remote: &Remote, name: &str) -> Place {
    let file = find(remote, name).await;
    match remote.call(&Caller::default(), Op::Open { place: file.into(), flags: RW }).await.unwrap()
    {
        Answer::Opened { handle, .. } => Place { file, handle: Some(handle) },
        other => panic!("{other:?}"),
    }
}

/// A session that holds an exclusive lock and a write lease, and one call that waits.
async fn held(lab: &TlsLab, credentials: &std::path::Path) -> (Remote, Place) {
    fs::write(lab.stores[0].path().join("f"), "x").unwrap();
    let remote = volume_of(lab, credentials, "logs").await.unwrap();
    let _notices = remote.notices();
    let place = open(&remote, "f").await;
    let lock = Lock::Whole(Some(Access::Exclusive));
    let op = Op::Lock { place, owner: 1, lock, wait: Wait::No };
    remote.call(&Caller::default(), op).await.unwrap();
    (remote, place)
}

/// A program of the server gets the lock, and the session's calls fail.
async fn assert_ended(lab: &TlsLab, remote: &Remote, place: Place) {
    let path = lab.stores[0].path().join("f");
    let file = fs::OpenOptions::new().read(true).write(true).open(&path).unwrap();
    let unlocked = async {
        while rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive)
            .is_err()
        {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(AT_ONCE, unlocked).await.expect("the lock is given back at once");
    let write = Write::At { place, offset: 0, data: Bytes::from_static(b"y") };
    let written =
        timeout(Duration::from_secs(1), remote.write(&Caller::default(), vec![write])).await;
    assert!(!matches!(written, Ok(Ok(results)) if results[0].is_ok()));
    assert_eq!(fs::read(path).unwrap(), b"x");
}

#[tokio::test]
async fn a_revocation_ends_a_session_with_its_locks() {
    let lab = TlsLab::start(&[identity("ada"), identity("bob")]).await;
    let (ada, bob) = (lab.enrol("ada").await.unwrap(), lab.enrol("bob").await.unwrap());
    let (remote, place) = held(&lab, &ada).await;
    let other = volume_of(&lab, &bob, "logs").await.unwrap();
    lab.register().revoke("ada").unwrap();
    assert_ended(&lab, &remote, place).await;
    // No other identity's session has ended.
    find(&other, "f").await;
}

/// A run goes on over a certificate that has lapsed; a session would without end.
#[tokio::test]
async fn a_session_ends_with_its_certificate() {
    let lab = TlsLab::start(&[identity("ada"), identity("bob")]).await;
    let (ada, bob) = (lab.enrol("ada").await.unwrap(), lab.enrol("bob").await.unwrap());
    let other = volume_of(&lab, &bob, "logs").await.unwrap();
    let (remote, place) = held(&lab, &ada).await;
    lab.change_register(|register| {
        for entry in register["certificates"].as_array_mut().unwrap() {
            if entry["identity"] == "ada" {
                entry["expires_s"] = 1.into();
            }
        }
    });
    assert_ended(&lab, &remote, place).await;
    find(&other, "f").await;
    drop(remote);
    let (remote, place) = held(&lab, &lab.enrol("ada").await.unwrap()).await;
    lab.rotate();
    lab.finish(Forced::Yes).unwrap();
    assert_ended(&lab, &remote, place).await;
}

/// A gateway that has renewed connects anew within the hour; the former certificate counts for a
/// day.
#[tokio::test]
async fn a_session_ends_with_a_certificate_that_was_replaced_long_ago_and_another_one_begins() {
    let lab = TlsLab::start(&[identity("ada")]).await;
    let ada = lab.enrol("ada").await.unwrap();
    let (remote, place) = held(&lab, &ada).await;
    tls::enrol::renew(tls::channel(&lab.host, &ada).await.unwrap(), &lab.host, &ada).await.unwrap();
    // Longer than the interval in which sessions are looked at.
    tokio::time::sleep(Duration::from_secs(2)).await;
    find(&remote, "f").await;
    lab.a_day_later();
    assert_ended(&lab, &remote, place).await;
    timeout(PATIENCE, find(&remote, "f")).await.expect("it connects anew by itself");
}

/// Running work may be the reason for that, and would keep a revocation from taking effect.
#[tokio::test]
async fn a_register_that_can_not_be_read_for_long_ends_what_is_at_work() {
    let lab = TlsLab::start(&[identity("ada")]).await;
    let (remote, place) = held(&lab, &lab.enrol("ada").await.unwrap()).await;
    let register = lab.directory.path().join("register.json");
    fs::rename(&register, lab.directory.path().join("aside")).unwrap();
    fs::create_dir(&register).unwrap();
    // The file may be missing for a moment while it is written.
    tokio::time::sleep(Duration::from_secs(2)).await;
    find(&remote, "f").await;
    tokio::time::sleep(Duration::from_secs(4)).await;
    assert_ended(&lab, &remote, place).await;
}

#[tokio::test]
async fn a_session_goes_on_after_its_certificate_was_renewed() {
    let lab = TlsLab::start(&[identity("ada")]).await;
    fs::write(lab.stores[0].path().join("f"), "x").unwrap();
    let ada = lab.enrol("ada").await.unwrap();
    let connector = ByCertificate::new(&lab, &ada);
    let remote = Remote::open(connector.clone(), "logs", patience()).await.unwrap();
    let _notices = remote.notices();
    let place = open(&remote, "f").await;
    tls::enrol::renew(tls::channel(&lab.host, &ada).await.unwrap(), &lab.host, &ada).await.unwrap();
    connector.renewed.notify_one();
    let mut connections = connector.connections.subscribe();
    timeout(PATIENCE, connections.wait_for(|count| *count > 1))
        .await
        .expect("it connects anew")
        .unwrap();
    find(&remote, "f").await;
    lab.a_day_later();
    let write = Write::At { place, offset: 0, data: Bytes::from_static(b"y") };
    let written = remote.write(&Caller::default(), vec![write]).await.unwrap();
    assert!(written[0].is_ok(), "{written:?}");
    assert_eq!(fs::read(lab.stores[0].path().join("f")).unwrap(), b"y");
}

#[tokio::test]
async fn a_session_ends_with_what_the_configuration_takes_away() {
    let none = Some(BTreeSet::from(["private".to_owned()]));
    for less in [
        Identity { exports: none, ..identity("ada") },
        Identity { read_only: true, ..identity("ada") },
        Identity { volumes: false, ..identity("ada") },
        Identity { trust_caller_ids: Some(!geteuid().is_root()), ..identity("ada") },
        identity("bob"),
    ] {
        let lab = TlsLab::start(&[identity("ada")]).await;
        let ada = lab.enrol("ada").await.unwrap();
        let (remote, place) = held(&lab, &ada).await;
        let changed = posh_executor::Config { identities: vec![less], ..lab.config.clone() };
        lab.changes.send(changed).await.unwrap();
        assert_ended(&lab, &remote, place).await;
    }
}

/// An administrator puts another directory in its place (`mv n n.old; mv n.new n`): with SIGHUP,
/// and without.
#[tokio::test]
async fn a_session_ends_when_another_directory_is_at_its_path() {
    let lab = TlsLab::start(&[identity("ada"), identity("bob")]).await;
    let (ada, bob) = (lab.enrol("ada").await.unwrap(), lab.enrol("bob").await.unwrap());
    let (path, others) = (lab.stores[0].path(), tempfile::tempdir().unwrap());
    let private = volume_of(&lab, &bob, "private").await.unwrap();
    for with_hangup in [true, false] {
        let (remote, _) = held(&lab, &ada).await;
        let old = others.path().join(if with_hangup { "first" } else { "second" });
        fs::rename(path, &old).unwrap();
        fs::create_dir(path).unwrap();
        fs::write(path.join("new"), "x").unwrap();
        if with_hangup {
            lab.changes.send(lab.config.clone()).await.unwrap();
        } else {
            find(&volume_of(&lab, &bob, "logs").await.unwrap(), "new").await;
        }
        let file = fs::File::open(old.join("f")).unwrap();
        let unlocked = async {
            while rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive)
                .is_err()
            {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        timeout(AT_ONCE, unlocked).await.expect("the old session ends");
        drop(remote);
        find(&volume_of(&lab, &ada, "logs").await.unwrap(), "new").await;
    }
    // The session of another export goes on.
    fs::write(lab.stores[1].path().join("g"), "y").unwrap();
    find(&private, "g").await;
}

#[tokio::test]
async fn who_may_not_have_volumes_gets_none() {
    let lab =
        TlsLab::start(&[Identity { volumes: false, ..identity("ada") }, identity("bob")]).await;
    let (ada, bob) = (lab.enrol("ada").await.unwrap(), lab.enrol("bob").await.unwrap());
    assert!(volume_of(&lab, &ada, "logs").await.is_err());
    assert!(volume_of(&lab, &bob, "logs").await.is_ok());
    assert_eq!(
        run(&lab.client_of(&ada).await, pipeline(&["echo x"]), Bytes::new()).await.text(),
        "x\n"
    );
}

#[tokio::test]
async fn leases_that_nobody_gives_back_hold_up_no_other_export_and_a_shared_one_once() {
    let lab = TlsLab::start(&[identity("ada"), identity("bob")]).await;
    for number in 0..20 {
        fs::write(lab.stores[0].path().join(format!("f{number}")), "x\n").unwrap();
    }
    fs::write(lab.stores[1].path().join("g"), "y\n").unwrap();
    let ada = volume_of(&lab, &lab.enrol("ada").await.unwrap(), "logs").await.unwrap();
    // It receives its notices, and answers none.
    let _notices = ada.notices();
    let bob = lab.client("bob").await;
    let private = || {
        let mut spec = pipeline(&["cat g"]);
        spec.mounts = vec![mount(MOUNT, "private", "")];
        spec
    };
    assert_eq!(run(&bob, private(), Bytes::new()).await.text(), "y\n");
    let mut waited = Vec::new();
    for number in 0..20 {
        open(&ada, &format!("f{number}")).await;
        let asked = Instant::now();
        assert_eq!(run(&bob, private(), Bytes::new()).await.text(), "y\n");
        assert!(asked.elapsed() < Duration::from_secs(2), "{:?}", asked.elapsed());
        let asked = Instant::now();
        assert_eq!(run(&bob, pipeline(&["cat f0"]), Bytes::new()).await.text(), "x\n");
        waited.push(asked.elapsed());
    }
    let long = waited.iter().filter(|time| **time > Duration::from_secs(2)).count();
    assert!(long <= 1 && waited.iter().all(|time| *time < Duration::from_secs(8)), "{waited:?}");
}

#[tokio::test]
async fn reads_that_nobody_takes_hold_up_no_other_identity() {
    let lab = TlsLab::start(&[identity("ada"), identity("bob")]).await;
    fs::File::create(lab.stores[0].path().join("f")).unwrap().set_len(64 << 20).unwrap();
    let (ada, bob) = (lab.enrol("ada").await.unwrap(), lab.enrol("bob").await.unwrap());
    let remote = volume_of(&lab, &ada, "logs").await.unwrap();
    let file = find(&remote, "f").await;
    let channel = tls::channel(&lab.host, &ada).await.unwrap();
    let mut held = Vec::new();
    for _ in 0..100 {
        let mut client = VolumeClient::new(channel.clone());
        let part = WirePart { place: Some(Place::from(file).into()), start: 0, end: 64 << 20 };
        let session = remote.session();
        let request = ReadRequest { session, parts: vec![part; 8], ..ReadRequest::default() };
        match timeout(Duration::from_millis(500), client.read(request)).await {
            Ok(stream) => held.push(stream.unwrap()),
            // Its share is used up: the others wait.
            Err(_) => break,
        }
    }
    assert!((4..64).contains(&held.len()), "{}", held.len());
    let other = volume_of(&lab, &bob, "logs").await.unwrap();
    let place = open(&other, "f").await;
    let asked = Instant::now();
    let mut pieces =
        other.read(&Caller::default(), vec![ReadPart { place, range: 0..1 << 20 }]).await;
    let piece = timeout(PATIENCE, tokio_stream::StreamExt::next(&mut pieces))
        .await
        .unwrap()
        .unwrap()
        .unwrap();
    assert!(!piece.data.unwrap().is_empty());
    assert!(asked.elapsed() < Duration::from_secs(3), "{:?}", asked.elapsed());
    // And ada's own calls go on.
    find(&remote, "f").await;
}

#[tokio::test]
async fn a_session_has_one_connection_at_a_time() {
    let lab = TlsLab::start(&[identity("ada")]).await;
    let channel = tls::channel(&lab.host, &lab.enrol("ada").await.unwrap()).await.unwrap();
    let mut streams = Vec::new();
    for _ in 0..20 {
        let hello = Hello {
            protocol: PROTOCOL_VERSION,
            session: Bytes::from_static(&[7; 16]),
            export: "logs".to_owned(),
            ..Hello::default()
        };
        let (sender, receiver) = mpsc::channel(1);
        sender.send(ToVolume { kind: Some(to_volume::Kind::Hello(hello)) }).await.unwrap();
        let opened = VolumeClient::new(channel.clone())
            .session(ReceiverStream::new(receiver))
            .await
            .unwrap();
        streams.push((sender, opened.into_inner()));
    }
    let (_, mut last) = streams.pop().unwrap();
    for (_sender, mut stream) in streams {
        let ends = async { while let Ok(Some(_)) = stream.message().await {} };
        timeout(PATIENCE, ends).await.expect("the next one has taken the session up");
    }
    assert!(last.message().await.unwrap().is_some());
}

/// A call whose headers have arrived; its message is still to come.
struct Begun {
    message: mpsc::Sender<Result<Frame<Bytes>, Status>>,
    answer: JoinHandle<http::Response<Body>>,
}

impl Begun {
    fn new(channel: &Channel, method: &str) -> Self {
        let (message, frames) = mpsc::channel(1);
        let body = Body::new(StreamBody::new(ReceiverStream::new(frames)));
        let request = http::Request::post(format!("http://tls/posh.volume.v1.Volume/{method}"));
        let request = request
            .header("content-type", "application/grpc")
            .header("te", "trailers")
            .body(body)
            .unwrap();
        let channel = channel.clone();
        Self {
            message,
            answer: tokio::spawn(async move { channel.oneshot(request).await.unwrap() }),
        }
    }

    /// Sends the message; returns true if the call is refused.
    async fn refuses(self, message: &impl prost::Message) -> bool {
        let mut frame = vec![0];
        frame.extend(u32::try_from(message.encoded_len()).unwrap().to_be_bytes());
        message.encode(&mut frame).unwrap();
        self.message.send(Ok(Frame::data(frame.into()))).await.unwrap();
        // The server answers a unary call once its request has ended.
        drop(self.message);
        let answer = timeout(PATIENCE, self.answer).await.unwrap().unwrap();
        // A refused call has headers only.
        answer.headers().get("grpc-status").is_some_and(|status| status != "0")
    }
}

/// Its message comes after the configuration has changed.
#[tokio::test]
async fn a_call_that_was_begun_before_has_what_its_caller_has_now() {
    for method in ["Session", "Read", "Write"] {
        for is_changed in [false, true] {
            let lab = TlsLab::start(&[identity("ada"), identity("bob")]).await;
            fs::write(lab.stores[0].path().join("f"), "x").unwrap();
            let path = lab.enrol("ada").await.unwrap();
            let channel = tls::channel(&lab.host, &path).await.unwrap();
            let remote = volume_of(&lab, &path, "logs").await.unwrap();
            let (_notices, file) = (remote.notices(), find(&remote, "f").await);
            let begun = Begun::new(&channel, method);
            // Comes after it on the same connection.
            tokio::task::yield_now().await;
            let mut ada = ExecutorClient::new(channel.clone());
            ada.status(StatusRequest {}).await.unwrap();
            if is_changed {
                let identities =
                    vec![Identity { volumes: false, ..identity("ada") }, identity("bob")];
                let changed = posh_executor::Config { identities, ..lab.config.clone() };
                lab.changes.send(changed).await.unwrap();
                // It applies once a new session is refused, well before existing ones are checked.
                let hello = Hello {
                    protocol: PROTOCOL_VERSION,
                    session: Bytes::from_static(&[8; 16]),
                    export: "logs".to_owned(),
                    ..Hello::default()
                };
                while !Begun::new(&channel, "Session").refuses(&to_volume_of(&hello)).await {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
            }
            let session = remote.session();
            let place = Some(Place::from(file).into());
            let refused = match method {
                "Session" => {
                    let hello = Hello {
                        protocol: PROTOCOL_VERSION,
                        session: Bytes::from_static(&[7; 16]),
                        export: "logs".to_owned(),
                        ..Hello::default()
                    };
                    begun.refuses(&to_volume_of(&hello)).await
                }
                "Read" => {
                    let parts = vec![WirePart { place, start: 0, end: 1 }];
                    begun.refuses(&ReadRequest { session, parts, ..ReadRequest::default() }).await
                }
                _ => {
                    begun
                        .refuses(&WriteRequest { session, number: 9999, ..WriteRequest::default() })
                        .await
                }
            };
            assert_eq!(refused, is_changed, "{method}");
        }
    }
}

fn to_volume_of(hello: &Hello) -> ToVolume {
    ToVolume { kind: Some(to_volume::Kind::Hello(hello.clone())) }
}
