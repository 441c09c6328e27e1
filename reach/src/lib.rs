//! Connects to an executor: from its address to a gRPC channel, over TCP, over TLS, or through an
//! ssh that starts it. Calls, reconnects and the choice of an executor are up to the caller.

mod allowance;
mod frames;
mod identity;
pub mod open_files;
mod plain;
mod server;
pub mod ssh;
pub mod tls;

use std::{io, path::PathBuf, time::Duration};

use fs_mapper::config::{Address, Config, ExecutorConfig, ExecutorOrigin, TlsHost};
use hyper_util::rt::TokioIo;
use tokio::{net::TcpStream, task::JoinSet, time::timeout};
use tonic::transport::{Channel, Endpoint, Uri};
use tower::{Service, service_fn};

pub use allowance::{Allowance, has_exceeded};
use frames::Metered;
pub use identity::ServerIdentity;
pub use plain::why_mute;
use posh_proto::untrusted::escaped;
pub use server::{Outputs, Server};
use tls::credentials::Credentials;

/// Flow-control window of one HTTP/2 stream: 20 ms at 600 Mbit/s are 1.5 MB, and a loopback link
/// takes far more.
const STREAM_WINDOW_BYTES: u32 = 8 << 20;
/// Flow-control window of a connection. Credits keep its streams below it, so that a stream that is
/// read late doesn't block the others.
const CONNECTION_WINDOW_BYTES: u32 = 256 << 20;
/// Chunks are up to 256 KiB: with the default frames of 16 KiB the executor needs twice the time
/// for a gigabyte.
const FRAME_BYTES: u32 = 1 << 20;
/// Keepalive: a frozen peer is detected after the two together. On a slow link the reply queues
/// behind data: 1 MiB of a command's input takes 6 s at 1.4 Mbit/s.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(2);
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(6);
/// Number of reset streams that h2 remembers, and for how long. Frames for a stream that it has
/// forgotten are protocol errors, and h2 closes the connection after 1,024 of them.
const REMEMBERED_RESETS: usize = 1024;
const RESET_REMEMBERED: Duration = Duration::from_secs(30);
/// Timeout of TCP's handshake.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// URI that HTTP/2 requires; ignored on a connection over ssh.
const BEHIND_SSH: &str = "http://ssh";

/// Pause before another attempt to renew a certificate.
const RENEWAL_PAUSE: Duration = Duration::from_secs(3600);

/// Parameters of a connection to an executor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Route {
    /// The executor's address.
    pub address: Address,
    /// Exports that the executor is started with, if ssh starts it.
    pub exports: Vec<String>,
    /// The ssh program and its first arguments.
    pub ssh_command: Vec<String>,
}

impl Route {
    /// Returns the route to an executor of a configuration.
    #[must_use]
    pub fn to(executor: &ExecutorConfig, config: &Config) -> Self {
        Self {
            address: executor.address.clone(),
            exports: config.exports_of(&executor.name),
            ssh_command: match &executor.origin {
                ExecutorOrigin::Configured => config.gateway.ssh_command.clone(),
                ExecutorOrigin::Sshfs { ssh_command } => ssh_command.clone(),
            },
        }
    }
}

/// A connected executor.
#[derive(Debug)]
pub struct Reached {
    /// Channel for its clients; dropping the last clone closes the connection.
    pub channel: Channel,
    /// The transport, which reports when it ends by itself.
    pub carrier: Carrier,
    /// The server's identity.
    pub server: ServerIdentity,
}

/// Transport of a channel.
#[derive(Debug)]
pub enum Carrier {
    /// TCP: its end is noticed only on use of the channel.
    Tcp,
    /// TLS; the task renews the certificate.
    Tls(JoinSet<()>),
    /// An ssh.
    Ssh(ssh::Watch),
}

impl Carrier {
    /// Process ID of the ssh; `None` without one.
    #[must_use]
    pub fn ssh_process(&self) -> Option<u32> {
        match self {
            Carrier::Ssh(watch) => watch.process(),
            Carrier::Tcp | Carrier::Tls(_) => None,
        }
    }

    /// Completes with the reason when the transport has ended: for TCP never, for TLS when there is
    /// a new certificate to reconnect with.
    pub async fn ended(&mut self) -> String {
        match self {
            Carrier::Tcp => std::future::pending().await,
            Carrier::Tls(renewal) => {
                renewal.join_next().await;
                "its certificate was renewed".to_owned()
            }
            Carrier::Ssh(watch) => watch.ended().await,
        }
    }
}

/// Error of [`connect`].
#[derive(Debug, thiserror::Error)]
pub enum Unreachable {
    /// The address is no valid endpoint.
    #[error("bad address")]
    Address(#[source] tonic::transport::Error),
    /// No connection, with the system's error message.
    #[error("{0}")]
    Connect(String),
    /// TLS failed, or its certificates are missing or unusable.
    #[error(transparent)]
    Tls(#[from] tls::TlsFault),
    /// ssh failed, or the program that it started.
    #[error(transparent)]
    Ssh(#[from] ssh::SshFault),
}

impl Unreachable {
    /// Returns the message with its causes in one line, escaped: it may contain text from a server
    /// or from ssh.
    #[must_use]
    pub fn sentence(&self) -> String {
        let causes = std::iter::successors(std::error::Error::source(self), |cause| cause.source());
        escaped(&causes.fold(self.to_string(), |text, cause| format!("{text}: {cause}")))
            .into_owned()
    }
}

/// Connects; makes no call yet. Must be called inside a Tokio runtime.
///
/// # Errors
/// [`Unreachable`]. Apply a timeout: ssh's own timeouts are long.
pub async fn connect(route: &Route) -> Result<Reached, Unreachable> {
    match &route.address {
        Address::Http { host, port } => {
            let endpoint = endpoint(route.address.to_string())?;
            let channel = endpoint
                .connect_with_connector(over_tcp(host.clone(), *port))
                .await
                .map_err(|error| Unreachable::Connect(root_cause(&error)))?;
            let server = ServerIdentity::of_address(&route.address);
            Ok(Reached { channel, carrier: Carrier::Tcp, server })
        }
        Address::Tls(host) => {
            let credentials = tls::credentials_file(host)?;
            let (channel, server) = tls::identified_channel(host, &credentials).await?;
            let mut renewal = JoinSet::new();
            renewal.spawn(renew_in_time(channel.clone(), host.clone(), credentials));
            Ok(Reached { channel, carrier: Carrier::Tls(renewal), server })
        }
        Address::Ssh(login) => {
            let (stream, watch) = ssh::start(login, route).await?;
            let connector = ssh::only(Metered::new(stream, &route.address.to_string()));
            let connected =
                endpoint(BEHIND_SSH.to_owned())?.connect_with_connector(connector).await;
            let channel = connected.map_err(|error| Unreachable::Connect(root_cause(&error)))?;
            let server = ServerIdentity::of_login(&route.address, &route.ssh_command);
            Ok(Reached { channel, carrier: Carrier::Ssh(watch), server })
        }
    }
}

/// A connection without TLS.
type TcpIo = TokioIo<Metered<TcpStream>>;

/// Returns a connector for an address without TLS.
fn over_tcp(
    host: String,
    port: u16,
) -> impl Service<Uri, Response = TcpIo, Error = io::Error, Future: Send> + Send {
    service_fn(move |_: Uri| {
        let host = host.clone();
        async move {
            let connected = timeout(CONNECT_TIMEOUT, TcpStream::connect((host.as_str(), port)));
            let stream =
                connected.await.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??;
            stream.set_nodelay(true)?;
            Ok(TokioIo::new(Metered::new(stream, &format!("http://{host}:{port}"))))
        }
    })
}

/// Renews the certificate when it is due, or returns when another program has renewed it.
async fn renew_in_time(channel: Channel, host: TlsHost, path: PathBuf) {
    let connected_with =
        Credentials::load(&path, &host).map(|credentials| credentials.certificate).ok();
    loop {
        let present = Credentials::load(&path, &host);
        // Another program of this user renewed it: the replaced one is not accepted for long.
        if present.as_ref().is_ok_and(|present| {
            connected_with.as_ref().is_some_and(|mine| *mine != present.certificate)
        }) {
            return;
        }
        let due = present.map_or(RENEWAL_PAUSE, |present| present.renewal_in());
        // In steps, since a timer's clock stops during suspend.
        if !due.is_zero() {
            tokio::time::sleep(due.min(RENEWAL_PAUSE)).await;
            // Once an hour is enough: see `LEAST_AGE` of the credentials.
            if !tls::is_behind(&host, &path).await {
                continue;
            }
        }
        match tls::enrol::renew(channel.clone(), &host, &path).await {
            Ok(_) => return,
            Err(_) => tokio::time::sleep(RENEWAL_PAUSE).await,
        }
    }
}

fn endpoint(address: String) -> Result<Endpoint, Unreachable> {
    let endpoint = Endpoint::from_shared(address).map_err(Unreachable::Address)?;
    Ok(endpoint
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_frame_size(FRAME_BYTES)
        .http2_keep_alive_interval(KEEPALIVE_INTERVAL)
        .keep_alive_timeout(KEEPALIVE_TIMEOUT)
        .keep_alive_while_idle(true)
        .http2_max_concurrent_reset_streams(REMEMBERED_RESETS)
        .http2_reset_stream_duration(RESET_REMEMBERED))
}

/// Returns the innermost cause, which a user understands ("Connection refused").
fn root_cause(error: &dyn std::error::Error) -> String {
    std::iter::successors(error.source(), |e| e.source())
        .last()
        .map_or_else(|| error.to_string(), ToString::to_string)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn nobody_listens() {
        // A port that was free a moment ago.
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = Address::parse(&format!("http://{}", listener.local_addr().expect("bound")))
            .expect("an address");
        drop(listener);
        let route = Route { address, exports: Vec::new(), ssh_command: Vec::new() };
        let why = connect(&route).await.expect_err("nobody listens").to_string();
        assert!(why.contains("refused"), "{why}");
    }
}
