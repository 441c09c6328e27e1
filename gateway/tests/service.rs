//! The gateway's gRPC services as any other program sees them, over its UNIX socket.

// All of this is test code; clippy's own exception knows only #[test] functions.
#![allow(clippy::unwrap_used)]

use std::{
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use bytes::BytesMut;
use fs_mapper::config::Config;
use hyper_util::rt::TokioIo;
use posh_gateway::Listeners;
use posh_proto::{
    PROTOCOL_VERSION, frame,
    gateway::{MountsRequest, ResolveRequest, StatusRequest, gateway_client::GatewayClient},
    stage::{Enlist, OpenSession, ToGateway, ToStage, to_gateway, to_stage},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{UnixListener, UnixStream},
    time::timeout,
};
use tonic::transport::{Channel, Endpoint};
use tonic_health::pb::{
    HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient,
};
use tonic_reflection::pb::v1::{
    ServerReflectionRequest, server_reflection_client::ServerReflectionClient,
    server_reflection_request, server_reflection_response,
};

/// For anything that is to happen at all.
const PATIENCE: Duration = Duration::from_secs(30);

/// One mount whose executor nobody has started.
fn config(directory: &Path) -> String {
    format!(
        "[[executor]]\nname = \"gone\"\naddress = \"http://127.0.0.1:1\"\n[[mount]]\npath = \"{}\"\nexecutor = \"gone\"\nexport = \"logs\"\ncoherence = \"bind\"\n",
        directory.display()
    )
}

/// What a gateway of this process listens on.
fn listeners(directory: &Path) -> Listeners {
    Listeners {
        grpc: UnixListener::bind(directory.join("g.sock")).unwrap(),
        stages: UnixListener::bind(directory.join("g.stage")).unwrap(),
        stage_socket: directory.join("g.stage"),
        directory: directory.to_owned(),
    }
}

/// A gateway in this process that runs until the test ends.
async fn gateway(directory: PathBuf) -> Channel {
    let config = Config::parse(&config(&directory), &directory.join("mounts.toml")).unwrap();
    tokio::spawn(posh_gateway::run(config, listeners(&directory), std::future::pending()));
    let socket = directory.join("g.sock");
    let connect = tower::service_fn(move |_| {
        let socket = socket.clone();
        async move { UnixStream::connect(socket).await.map(TokioIo::new) }
    });
    Endpoint::from_static("http://gateway").connect_with_connector(connect).await.unwrap()
}

#[tokio::test]
async fn mounts_and_resolve_answer_without_an_executor() {
    let directory = tempfile::tempdir().unwrap();
    let mut client = GatewayClient::new(gateway(directory.path().to_owned()).await);
    let mounts = client.mounts(MountsRequest {}).await.unwrap().into_inner().mounts;
    let mount = mounts.iter().find(|m| m.executor == "gone").unwrap();
    assert!(mount.state.starts_with("unreachable: "), "{}", mount.state);
    let path = directory.path().join("a/../b").into_os_string().into_encoded_bytes().into();
    let reply =
        client.resolve(ResolveRequest { path, cwd: "/".into() }).await.unwrap().into_inner();
    assert_eq!(
        (&*reply.executor, &*reply.export, &reply.export_path[..]),
        ("gone", "logs", &b"a/../b"[..])
    );
    let local = client
        .resolve(ResolveRequest { path: "/etc".into(), cwd: "/".into() })
        .await
        .unwrap()
        .into_inner();
    assert_eq!(local.reason, "/etc is not on a mount with an executor");
    let relative =
        client.resolve(ResolveRequest { path: "x".into(), cwd: "".into() }).await.unwrap_err();
    assert_eq!(relative.code(), tonic::Code::InvalidArgument);
    assert_eq!(client.status(StatusRequest {}).await.unwrap().into_inner().pid, std::process::id());
}

#[tokio::test]
async fn standard_health_and_reflection_answer() {
    let directory = tempfile::tempdir().unwrap();
    let channel = gateway(directory.path().to_owned()).await;
    let request = HealthCheckRequest { service: "posh.gateway.v1.Gateway".into() };
    let health = HealthClient::new(channel.clone()).check(request).await.unwrap().into_inner();
    assert_eq!(health.status(), ServingStatus::Serving);
    let list = server_reflection_request::MessageRequest::ListServices(String::new());
    let request = ServerReflectionRequest { host: String::new(), message_request: Some(list) };
    let mut answers = ServerReflectionClient::new(channel)
        .server_reflection_info(tokio_stream::iter([request]))
        .await
        .unwrap()
        .into_inner();
    let answer = answers.message().await.unwrap().unwrap().message_response.unwrap();
    let server_reflection_response::MessageResponse::ListServicesResponse(services) = answer else {
        panic!("{answer:?}");
    };
    assert!(services.service.iter().any(|s| s.name == "posh.gateway.v1.Gateway"), "{services:?}");
}

/// Programs of one installation may be replaced while a gateway runs.
const OTHERS: [u32; 3] = [0, PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1];

#[tokio::test]
async fn front_ends_of_other_versions_are_told_what_to_do() {
    let directory = tempfile::tempdir().unwrap();
    let mut client = GatewayClient::new(gateway(directory.path().to_owned()).await);
    for protocol in OTHERS {
        let open = to_gateway::Kind::OpenSession(OpenSession { protocol, ..Default::default() });
        let refused = answer(directory.path(), open).await;
        let Some(to_stage::Kind::SessionRefused(refused)) = refused else { panic!("{refused:?}") };
        let older = if protocol < PROTOCOL_VERSION { "posh" } else { "the running gateway" };
        let words = format!(
            "posh speaks protocol {protocol}, the running gateway {PROTOCOL_VERSION}: update {older};"
        );
        assert!(refused.starts_with(&words), "{refused:?}");
        assert!(refused.contains("`posh gateway stop` ends the one that runs"), "{refused:?}");
        // What a front end of any version asks to find that out.
        assert_eq!(
            client.status(StatusRequest {}).await.unwrap().into_inner().protocol,
            PROTOCOL_VERSION
        );
    }
}

fn enlist(protocol: u32) -> to_gateway::Kind {
    let argv = vec!["cat".into()];
    to_gateway::Kind::Enlist(Enlist { protocol, name: "cat".into(), argv, ..Enlist::default() })
}

/// Its first answer to what is said first on the stage socket; `None` if it hangs up, which means
/// to a stage: run here.
async fn answer(directory: &Path, first: to_gateway::Kind) -> Option<to_stage::Kind> {
    let mut stage = UnixStream::connect(directory.join("g.stage")).await.unwrap();
    let mut bytes = BytesMut::new();
    frame::encode(&ToGateway { kind: Some(first) }, &mut bytes);
    stage.write_all(&bytes.split()).await.unwrap();
    loop {
        if let Some(said) = frame::decode::<ToStage>(&mut bytes).unwrap() {
            return said.kind;
        }
        if stage.read_buf(&mut bytes).await.unwrap() == 0 {
            return None;
        }
    }
}

#[tokio::test]
async fn stage_programs_of_other_versions_are_left_to_themselves() {
    let directory = tempfile::tempdir().unwrap();
    let _client = gateway(directory.path().to_owned()).await;
    for protocol in OTHERS {
        assert_eq!(answer(directory.path(), enlist(protocol)).await, None, "protocol {protocol}");
        // Those of its own are served as before.
        let directive = answer(directory.path(), enlist(PROTOCOL_VERSION)).await;
        assert!(matches!(directive, Some(to_stage::Kind::RunHere(_))), "{directive:?}");
    }
}

/// Says this, and gives what comes until the gateway hangs up.
async fn hung_up_on(directory: &Path, said: &[u8]) -> Vec<u8> {
    let mut socket = UnixStream::connect(directory.join("g.stage")).await.unwrap();
    // It may hang up before it has read all.
    let _all_or_not = socket.write_all(said).await;
    let mut answer = Vec::new();
    let _reset_or_not =
        timeout(PATIENCE, socket.read_to_end(&mut answer)).await.expect("it hangs up");
    answer
}

/// An enlistment of empty elements of one of its fields: two bytes each, and some hundred once
/// decoded.
fn empty_elements(field: u8, count: usize) -> Vec<u8> {
    let mut enlist = vec![1 << 3 | 2];
    prost::encoding::encode_varint(2 + 2 * count as u64, &mut enlist);
    enlist.extend([1 << 3, u8::try_from(PROTOCOL_VERSION).unwrap()]);
    enlist.extend([field << 3 | 2, 0].repeat(count));
    let length = u32::try_from(enlist.len()).unwrap().to_le_bytes();
    [&length[..], &enlist].concat()
}

#[tokio::test]
async fn what_is_said_first_is_counted_before_it_is_decoded() {
    let directory = tempfile::tempdir().unwrap();
    let _client = gateway(directory.path().to_owned()).await;
    for field in [6, 7, 10, 13] {
        let answer = hung_up_on(directory.path(), &empty_elements(field, 1_000_000)).await;
        assert!(answer.is_empty(), "field {field}");
    }
    // More bytes than anybody needs.
    assert!(hung_up_on(directory.path(), &empty_elements(10, 5_000_000)).await.is_empty());
    // As many words as the kernel takes are taken.
    let argv = vec!["x".into(); 200_000];
    let enlist =
        Enlist { protocol: PROTOCOL_VERSION, name: "cat".into(), argv, ..Enlist::default() };
    let directive = answer(directory.path(), to_gateway::Kind::Enlist(enlist)).await;
    assert!(matches!(directive, Some(to_stage::Kind::RunHere(_))), "{directive:?}");
}

#[tokio::test]
async fn who_says_nothing_is_hung_up_on_and_takes_nobody_s_place() {
    let directory = tempfile::tempdir().unwrap();
    let _client = gateway(directory.path().to_owned()).await;
    // Half of a frame is nothing.
    let half = &empty_elements(10, 100)[..50];
    let began = Instant::now();
    assert!(hung_up_on(directory.path(), half).await.is_empty());
    assert!(began.elapsed() > Duration::from_secs(2), "it was given time");
    let mut silent = Vec::new();
    for _ in 0..300 {
        silent.push(UnixStream::connect(directory.path().join("g.stage")).await.unwrap());
    }
    let began = Instant::now();
    let directive = answer(directory.path(), enlist(PROTOCOL_VERSION)).await;
    assert!(matches!(directive, Some(to_stage::Kind::RunHere(_))), "{directive:?}");
    // The first ones make room for the others.
    for socket in &mut silent[..40] {
        assert_eq!(timeout(PATIENCE, socket.read(&mut [0])).await.unwrap().unwrap(), 0);
    }
    assert!(began.elapsed() < Duration::from_secs(4), "{:?}", began.elapsed());
}

#[tokio::test]
async fn a_gateway_that_nobody_needs_ends() {
    let directory = tempfile::tempdir().unwrap();
    let text = config(directory.path()) + "[gateway]\nidle_timeout_s = 1\n";
    let config = Config::parse(&text, &directory.path().join("mounts.toml")).unwrap();
    posh_gateway::run(config, listeners(directory.path()), std::future::pending()).await.unwrap();
}
