//! An executor behind mutual TLS. The executor's certificate must be signed by the authority that
//! it had when this workstation was enrolled, or by that authority's successor. The executor issued
//! our certificate. When it shows a successor of its authority, our certificate is renewed, and
//! from then on the successor is trusted.
//!
//! * [`credentials`]: the file of key, certificate and authority
//! * [`enrol`]: enrolment, and renewal before the certificate expires
//! * `trust`: verification of the executor, and messages for failed handshakes

pub mod credentials;
pub mod enrol;
mod trust;

use std::{
    future::Future,
    io,
    path::{Path, PathBuf},
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use fs_mapper::config::{TlsHost, credentials_directory};
use hyper_util::rt::TokioIo;
use rustls::{
    ClientConfig,
    pki_types::{InvalidDnsNameError, ServerName},
};
use tokio::{net::TcpStream, time::timeout};
use tokio_rustls::{TlsConnector, client::TlsStream};
use tonic::transport::{Channel, Uri};
use tower::{Service, service_fn};

use self::credentials::Credentials;
use crate::{ServerIdentity, endpoint, frames::Metered, root_cause};

/// URI that HTTP/2 requires; ignored, since TLS is established before.
const BEHIND_TLS: &str = "http://tls";

/// Timeout of TCP's handshake.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// Timeout of TLS's handshake: two round trips on a bad link, with a busy executor.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);

/// Error of enrolment or connection, with the remedy.
#[derive(Debug, thiserror::Error)]
pub enum TlsFault {
    /// There is no directory for credentials.
    #[error("there is no place for certificates: neither XDG_CONFIG_HOME nor HOME is set")]
    NoHome,
    /// This workstation was never enrolled there.
    #[error(
        "this workstation has no certificate for {0}; run `posh-executor enroll NAME` there \
         and `posh enroll {0} TOKEN` here"
    )]
    NotEnrolled(TlsHost),
    /// The credentials file can't be read or written, or others can access it.
    #[error(transparent)]
    Secret(#[from] posh_proto::secret::SecretError),
    /// The credentials file has invalid contents.
    #[error("{} is damaged ({what}); enrol this workstation anew", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The error in it.
        what: String,
    },
    /// No TCP connection, with the system's error.
    #[error("{0}")]
    Connect(io::Error),
    /// Timeout of a handshake.
    #[error("no answer within {} s", .0.as_secs())]
    Silent(Duration),
    /// TLS's handshake failed; the message for the user.
    #[error("{0}")]
    Handshake(String),
    /// The host is no valid name for a certificate.
    #[error("the host {0:?} can't stand in a certificate")]
    Name(String, #[source] InvalidDnsNameError),
    /// The TLS library refused the configuration.
    #[error("cannot set up TLS: {0}")]
    Setup(String),
    /// A reconnect reached another server than the first connection did.
    #[error("this workstation was enrolled at another server as {0} meanwhile")]
    OtherServer(TlsHost),
    /// The executor refused, or its reply is unacceptable.
    #[error("{0}")]
    Refused(String),
}

/// Timeout of a renewal for the executor's next authority, while the caller waits for the
/// connection.
const RENEWAL_TIMEOUT: Duration = Duration::from_secs(5);

/// A connection to an executor that has proved its identity.
type Stream = TlsStream<TcpStream>;

/// Returns the path of the credentials for an executor.
///
/// # Errors
/// [`TlsFault::NoHome`].
pub fn credentials_file(host: &TlsHost) -> Result<PathBuf, TlsFault> {
    let directory = credentials_directory().ok_or(TlsFault::NoHome)?;
    // Colons of IPv6 addresses are fine in a file name.
    Ok(directory.join(format!("{host}.json")))
}

/// Returns a channel that reads the credentials from the file at each connect.
///
/// # Errors
/// [`TlsFault`].
pub async fn channel(host: &TlsHost, credentials: &Path) -> Result<Channel, TlsFault> {
    Ok(identified_channel(host, credentials).await?.0)
}

/// Like [`channel`], but also returns the server's identity.
///
/// # Errors
/// [`TlsFault`].
pub async fn identified_channel(
    host: &TlsHost,
    credentials: &Path,
) -> Result<(Channel, ServerIdentity), TlsFault> {
    let (stream, server) = connect(host, credentials).await?;
    let wants_renewal =
        Credentials::may_be_replaced(credentials) && shows_another(&stream, host, credentials);
    let channel = over(stream, host, credentials, Some(server.clone())).await?;
    if wants_renewal {
        match timeout(RENEWAL_TIMEOUT, enrol::renew(channel.clone(), host, credentials)).await {
            Ok(Ok(_)) => {
                let (stream, server) = connect(host, credentials).await?;
                return Ok((over(stream, host, credentials, Some(server.clone())).await?, server));
            }
            // Retried on the next connect, while the present certificate is valid.
            Ok(Err(fault)) => {
                tracing::warn!(%host, %fault, "not renewed for the executor's next authority")
            }
            Err(_) => {
                tracing::warn!(%host, "no answer to a renewal for the executor's next authority")
            }
        }
    }
    Ok((channel, server))
}

/// Returns true if the executor, on another connection, shows a successor of the trusted authority.
pub async fn is_behind(host: &TlsHost, credentials: &Path) -> bool {
    connect(host, credentials)
        .await
        .is_ok_and(|(stream, _)| shows_another(&stream, host, credentials))
}

/// Returns true if the authority in the executor's certificate chain is not the trusted one: a hint
/// that a renewal may be due, and no more.
fn shows_another(stream: &Stream, host: &TlsHost, credentials: &Path) -> bool {
    let shown = stream.get_ref().1.peer_certificates().and_then(|shown| shown.get(1));
    let is_other =
        |present: Credentials| shown.is_some_and(|shown| shown.as_ref() != present.authority);
    Credentials::load(credentials, host).is_ok_and(is_other)
}

/// Returns a channel over an existing first connection.
async fn over(
    stream: Stream,
    host: &TlsHost,
    credentials: &Path,
    server: Option<ServerIdentity>,
) -> Result<Channel, TlsFault> {
    let endpoint =
        endpoint(BEHIND_TLS.to_owned()).map_err(|error| TlsFault::Setup(error.to_string()))?;
    let connected = endpoint
        .connect_with_connector(connector(stream, host.clone(), credentials.to_owned(), server))
        .await;
    connected.map_err(|error| TlsFault::Handshake(root_cause(&error)))
}

async fn connect(host: &TlsHost, credentials: &Path) -> Result<(Stream, ServerIdentity), TlsFault> {
    let loaded = Credentials::load(credentials, host)?;
    let stream = handshake(host, Arc::new(trust::config_of(&loaded, credentials)?)).await?;
    Ok((stream, ServerIdentity::of_authority(&loaded.server())))
}

/// Connects TCP, then TLS.
async fn handshake(host: &TlsHost, config: Arc<ClientConfig>) -> Result<Stream, TlsFault> {
    let name = ServerName::try_from(host.host.clone())
        .map_err(|error| TlsFault::Name(host.host.clone(), error))?;
    let stream =
        timeout(CONNECT_TIMEOUT, TcpStream::connect((host.host.as_str(), host.port))).await;
    let stream =
        stream.map_err(|_| TlsFault::Silent(CONNECT_TIMEOUT))?.map_err(TlsFault::Connect)?;
    stream.set_nodelay(true).map_err(TlsFault::Connect)?;
    let shaken = timeout(HANDSHAKE_TIMEOUT, TlsConnector::from(config).connect(name, stream)).await;
    shaken
        .map_err(|_| TlsFault::Silent(HANDSHAKE_TIMEOUT))?
        .map_err(|error| TlsFault::Handshake(trust::words(host, &error)))
}

/// A connection with TLS.
type TlsIo = TokioIo<Metered<Stream>>;
/// Future of a connector.
type Connecting = Pin<Box<dyn Future<Output = io::Result<TlsIo>> + Send>>;

/// Returns a connector that yields `first`, and afterwards reconnects to the same server only.
fn connector(
    first: Stream,
    host: TlsHost,
    credentials: PathBuf,
    server: Option<ServerIdentity>,
) -> impl Service<Uri, Response = TlsIo, Error = io::Error, Future = Connecting> + Send {
    let first = Mutex::new(Some(first));
    service_fn(move |_: Uri| -> Connecting {
        let ready = first.lock().unwrap_or_else(PoisonError::into_inner).take();
        let (host, credentials, server) = (host.clone(), credentials.clone(), server.clone());
        Box::pin(async move {
            let metered = |stream| TokioIo::new(Metered::new(stream, &format!("tls://{host}")));
            match ready {
                Some(stream) => Ok(metered(stream)),
                None => match connect(&host, &credentials).await {
                    Ok((stream, found)) if server.is_none_or(|server| server == found) => {
                        Ok(metered(stream))
                    }
                    Ok(_) => Err(io::Error::other(TlsFault::OtherServer(host))),
                    Err(fault) => Err(io::Error::other(fault)),
                },
            }
        })
    })
}
