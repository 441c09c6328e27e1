//! Very many peers, and very slow ones: others are served, and memory stays bounded.

use std::{
    fs,
    io::ErrorKind,
    time::{Duration, Instant},
};

use bytes::Bytes;
use hyper_util::rt::TokioIo;
use posh_executor::config::{Identity, Limits};
use posh_proto::executor::{DescribeRequest, ToolsRequest};
use posh_reach::tls::credentials::Credentials;
use rustls::pki_types::ServerName;
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _},
    net::TcpStream,
    time::timeout,
};
use tokio_rustls::TlsConnector;
use tonic::{Code, transport::Endpoint};

use super::{TlsLab, client, identity};
use crate::harness::{Client, PATIENCE, pipeline, run};

/// Connections of the crowd.
const CROWD: usize = 10_000;
/// Number of them that may be kept: silent ones, and those in a handshake.
const KEPT: [usize; 2] = [4096, 512];
/// Memory for all that, in this process, which also has the crowd's own sockets.
const MEMORY_MB: usize = 150;

/// The resident memory of a process.
pub fn memory_mb(process: &str) -> usize {
    let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() / 1024
}

/// True if the other side has not hung up.
fn is_open(stream: &TcpStream) -> bool {
    let mut byte = [0];
    matches!(stream.try_read(&mut byte), Err(error) if error.kind() == ErrorKind::WouldBlock)
}

#[tokio::test(flavor = "multi_thread")]
async fn ten_thousand_connections_keep_nobody_out() {
    let lab = TlsLab::start(&[identity("ada")]).await;
    let path = lab.enrol("ada").await.unwrap();
    let before_mb = memory_mb("self");
    let mut crowd = Vec::new();
    for number in 0..CROWD {
        let mut stream = TcpStream::connect((lab.host.host.as_str(), lab.host.port)).await.unwrap();
        // Half of them begin a handshake and never continue.
        if number % 2 == 0 {
            let _ = stream.write_all(&[22, 3, 1, 2, 0, 1]).await;
        }
        crowd.push(stream);
        if number % 1000 == 999 {
            let asked = Instant::now();
            let client = lab.client_of(&path).await;
            assert_eq!(run(&client, pipeline(&["echo x"]), Bytes::new()).await.text(), "x\n");
            assert!(asked.elapsed() < PATIENCE / 2, "{:?}", asked.elapsed());
        }
    }
    let grown_mb = memory_mb("self").saturating_sub(before_mb);
    assert!(grown_mb < MEMORY_MB, "{grown_mb} MB");
    // They were made in turns.
    let kept =
        |first: usize| crowd.iter().skip(first).step_by(2).filter(|stream| is_open(stream)).count();
    let open = || [kept(1), kept(0)];
    let is_thin = || open().iter().zip(KEPT).all(|(open, kept)| *open <= kept);
    let thinned = async {
        while !is_thin() {
            tokio::task::yield_now().await;
        }
    };
    // Well before their timeout: the number is the reason.
    tokio::time::timeout(std::time::Duration::from_secs(3), thinned).await.unwrap_or_default();
    assert!(is_thin(), "{:?} are still open", open());
}

/// Silent peers take no seat of speaking ones, even if all come from one address.
#[tokio::test(flavor = "multi_thread")]
async fn silence_keeps_nobody_of_the_same_address_out() {
    let lab = TlsLab::start(&[identity("ada")]).await;
    let path = lab.enrol("ada").await.unwrap();
    // It has connected, as over a slow link, and has sent nothing yet.
    let mut early = TcpStream::connect((lab.host.host.as_str(), lab.host.port)).await.unwrap();
    let mut crowd = Vec::new();
    for _ in 0..1000 {
        crowd.push(TcpStream::connect((lab.host.host.as_str(), lab.host.port)).await.unwrap());
    }
    assert!(is_open(&early), "the silent ones have its seat");
    early.write_all(&[22, 3, 1, 2, 0, 1]).await.unwrap();
    for _ in 0..1000 {
        crowd.push(TcpStream::connect((lab.host.host.as_str(), lab.host.port)).await.unwrap());
    }
    let client = lab.client_of(&path).await;
    assert_eq!(run(&client, pipeline(&["echo x"]), Bytes::new()).await.text(), "x\n");
    assert!(is_open(&early), "the silent ones have its seat");
}

#[tokio::test]
async fn a_silent_peer_is_hung_up_on() {
    let lab = TlsLab::start(&[identity("ada")]).await;
    let stream = TcpStream::connect((lab.host.host.as_str(), lab.host.port)).await.unwrap();
    let over = async {
        stream.readable().await.unwrap();
        assert!(!is_open(&stream));
    };
    tokio::time::timeout(PATIENCE, over).await.expect("its time is up");
}

#[tokio::test]
async fn an_identity_has_so_many_connections() {
    let limits = Limits { connections: Some(2), ..Limits::default() };
    let lab = TlsLab::start(&[Identity { limits, ..identity("ada") }, identity("bob")]).await;
    let path = lab.enrol("ada").await.unwrap();
    let mut held = Vec::new();
    for _ in 0..2 {
        let mut client = lab.client_of(&path).await;
        client.describe(DescribeRequest { protocol: 1 }).await.unwrap();
        held.push(client);
    }
    let refused =
        lab.client_of(&path).await.describe(DescribeRequest { protocol: 1 }).await.unwrap_err();
    assert!(refused.message().contains("ada is at its limit of connections"), "{refused:?}");
    assert!(lab.client("bob").await.describe(DescribeRequest { protocol: 1 }).await.is_ok());
    // A closed connection makes room for another.
    drop(held.pop());
    let has_room = async {
        while lab.client_of(&path).await.describe(DescribeRequest { protocol: 1 }).await.is_err() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(PATIENCE, has_room).await.expect("there is room again");
}

/// HTTP/2's SETTINGS_MAX_CONCURRENT_STREAMS, as the executor announces it to a peer (RFC 9113,
/// sections 4.1 and 6.5).
async fn calls_at_a_time(mut stream: impl AsyncRead + AsyncWrite + Unpin) -> u32 {
    const SETTINGS: u8 = 4;
    const MAX_CONCURRENT_STREAMS: u16 = 3;
    stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.unwrap();
    stream.write_all(&[0, 0, 0, SETTINGS, 0, 0, 0, 0, 0]).await.unwrap();
    loop {
        let mut head = [0; 9];
        stream.read_exact(&mut head).await.unwrap();
        let mut payload = vec![0; usize::from(u16::from_be_bytes([head[1], head[2]]))];
        stream.read_exact(&mut payload).await.unwrap();
        let mut settings = payload.chunks(6).map(|s| (u16::from_be_bytes([s[0], s[1]]), &s[2..]));
        if head[3] == SETTINGS
            && let Some((_, value)) = settings.find(|(name, _)| *name == MAX_CONCURRENT_STREAMS)
        {
            return u32::from_be_bytes(value.try_into().unwrap());
        }
    }
}

#[tokio::test]
async fn a_stranger_has_few_calls_at_a_time() {
    let lab = TlsLab::start(&[identity("ada")]).await;
    let stream = TcpStream::connect((lab.host.host.as_str(), lab.host.port)).await.unwrap();
    let name = ServerName::try_from(lab.host.host.clone()).unwrap();
    let stranger =
        TlsConnector::from(lab.without_certificate()).connect(name, stream).await.unwrap();
    assert_eq!(timeout(PATIENCE, calls_at_a_time(stranger)).await.unwrap(), 4);
    let ada = Credentials::load(&lab.enrol("ada").await.unwrap(), &lab.host).unwrap();
    let ada = lab.connection(&ada).await;
    assert!(timeout(PATIENCE, calls_at_a_time(ada)).await.unwrap() > 1000);
}

/// The client's windows stay closed.
#[tokio::test]
async fn answers_that_nobody_reads_are_few() {
    const UNREAD: usize = 4;
    let lab = TlsLab::start(&[identity("ada"), identity("bob")]).await;
    let ada = Credentials::load(&lab.enrol("ada").await.unwrap(), &lab.host).unwrap();
    let only = std::sync::Mutex::new(Some(TokioIo::new(lab.connection(&ada).await)));
    let connector = tower::service_fn(move |_| {
        let only = only.lock().unwrap().take();
        async move { only.ok_or_else(|| std::io::Error::from(std::io::ErrorKind::NotConnected)) }
    });
    let endpoint = Endpoint::from_static("http://tls").initial_stream_window_size(0);
    let channel = endpoint.connect_with_connector(connector).await.unwrap();
    let ask = |mut client: Client| async move {
        client.tools(ToolsRequest { names: vec!["cat".to_owned(); 4096] }).await.map(drop)
    };
    let mut calls: Vec<_> =
        (0..2 * UNREAD).map(|_| tokio::spawn(ask(client(channel.clone())))).collect();
    let refused = async {
        while calls.iter().filter(|call| !call.is_finished()).count() > UNREAD {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(PATIENCE, refused).await.unwrap();
    let (unread, refused): (Vec<_>, Vec<_>) = calls.drain(..).partition(|call| !call.is_finished());
    assert_eq!(unread.len(), UNREAD);
    for call in refused {
        assert_eq!(call.await.unwrap().unwrap_err().code(), Code::ResourceExhausted);
    }
    // Others get answers, and so does this client after giving up.
    ask(lab.client("bob").await).await.unwrap();
    drop(channel);
    unread.iter().for_each(|call| call.abort());
    let again = lab.client_of(&lab.credentials("ada")).await;
    while ask(again.clone()).await.is_err() {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
