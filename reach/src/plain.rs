//! Diagnosis of an `http://` address whose server doesn't speak HTTP/2: most likely an executor
//! with TLS. It runs only after a first call has failed, since it takes a connection of its own.

use std::time::Duration;

use fs_mapper::config::Address;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::timeout,
};

use crate::Route;

/// Connection preface of HTTP/2 (RFC 9113, section 3.4).
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// Record type "alert" of TLS and its major version (RFC 8446, section 5.1): the reply to a client
/// that doesn't speak TLS.
const TLS_ALERT: [u8; 2] = [21, 3];

/// Timeout of connection and reply; the failed call was answered just before.
const LOOK_TIMEOUT: Duration = Duration::from_secs(2);

/// Returns why the first call to an executor failed: `why`, or better words if the address has the
/// wrong scheme.
pub async fn why_mute(route: &Route, why: String) -> String {
    match &route.address {
        Address::Http { host, port }
            if timeout(LOOK_TIMEOUT, speaks_tls(host, *port)).await == Ok(true) =>
        {
            let tls = route.address.to_string().replacen("http://", "tls://", 1);
            let mut words = format!("{} speaks TLS: its address is {tls}", route.address);
            words.push_str("; run `posh-executor enroll NAME` there and `posh enroll` here");
            words
        }
        _ => why,
    }
}

async fn speaks_tls(host: &str, port: u16) -> bool {
    let mut answer = [0; TLS_ALERT.len()];
    let asked = async {
        let mut stream = TcpStream::connect((host, port)).await?;
        stream.write_all(PREFACE).await?;
        stream.read_exact(&mut answer).await
    };
    asked.await.is_ok() && answer == TLS_ALERT
}
