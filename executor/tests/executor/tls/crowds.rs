//! Very many peers, and very slow ones: others are served, and memory stays bounded.

use std::{fs, io::ErrorKind, time::Instant};

use bytes::Bytes;
use posh_executor::config::{Identity, Limits};
use posh_proto::executor::DescribeRequest;
use tokio::{io::AsyncWriteExt as _, net::TcpStream};

use super::{TlsLab, identity};
use crate::harness::{PATIENCE, pipeline, run};

/// Connections of the crowd.
const CROWD: usize = 10_000;
/// As many of them as may be kept: of those who have said nothing, and of those who have begun a handshake.
const KEPT: [usize; 2] = [4096, 512];
/// What all that may cost, in this process, which also has the crowd's own sockets.
const MEMORY_MB: usize = 150;

/// The resident memory of a process.
pub fn memory_mb(process: &str) -> usize {
    let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() / 1024
}

/// Whether the other side has not hung up.
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
        // Half of them begin a handshake and never go on.
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
    let kept = |first: usize| crowd.iter().skip(first).step_by(2).filter(|stream| is_open(stream)).count();
    let open = || [kept(1), kept(0)];
    let is_thin = || open().iter().zip(KEPT).all(|(open, kept)| *open <= kept);
    let thinned = async {
        while !is_thin() {
            tokio::task::yield_now().await;
        }
    };
    // Well before their time is up: it is the number that counts.
    tokio::time::timeout(std::time::Duration::from_secs(3), thinned).await.unwrap_or_default();
    assert!(is_thin(), "{:?} are still open", open());
}

/// Whoever says nothing takes no seat of those who speak, also when all come from one address.
#[tokio::test(flavor = "multi_thread")]
async fn silence_keeps_nobody_of_the_same_address_out() {
    let lab = TlsLab::start(&[identity("ada")]).await;
    let path = lab.enrol("ada").await.unwrap();
    // It has connected, as over a long way, and has not begun yet.
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
    let refused = lab.client_of(&path).await.describe(DescribeRequest { protocol: 1 }).await.unwrap_err();
    assert!(refused.message().contains("ada is at its limit of connections"), "{refused:?}");
    assert!(lab.client("bob").await.describe(DescribeRequest { protocol: 1 }).await.is_ok());
    // One that ends makes room for another.
    drop(held.pop());
    let has_room = async {
        while lab.client_of(&path).await.describe(DescribeRequest { protocol: 1 }).await.is_err() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(PATIENCE, has_room).await.expect("there is room again");
}
