//! An executor behind TLS: certificates on both sides. The executor's must be signed by the
//! authority that it had when this workstation was enrolled, or by the one that follows it; ours is
//! what it gave us. When it shows that another authority follows, our certificate is renewed, and
//! then that one is believed.
//!
//! * [`credentials`]: what enrolling has left here
//! * [`enrol`]: getting them, and getting others before they expire
//! * `trust`: whom to believe, and the words for why not

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
use crate::{ServerIdentity, endpoint, root_cause};

/// HTTP/2 wants an address; TLS is done by the time that somebody looks at it.
const BEHIND_TLS: &str = "http://tls";

/// For TCP's handshake.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// For the one of TLS: two round trips on a bad link, at an executor that many want something of.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);

/// Why there is no connection, and what to do.
#[derive(Debug, thiserror::Error)]
pub enum Fault {
    /// There is no directory for credentials.
    #[error("there is no place for certificates: neither XDG_CONFIG_HOME nor HOME is set")]
    NoHome,
    /// This workstation was never enrolled there.
    #[error(
        "this workstation has no certificate for {0}; run `posh-executor enroll NAME` there and `posh enroll {0} TOKEN` here"
    )]
    NotEnrolled(TlsHost),
    /// What enrolling has left can't be used.
    #[error(transparent)]
    Secret(#[from] posh_proto::secret::SecretError),
    /// The same.
    #[error("{} is damaged ({what}); enrol this workstation anew", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// How.
        what: String,
    },
    /// No TCP connection: the system's words.
    #[error("{0}")]
    Connect(io::Error),
    /// Nothing came.
    #[error("no answer within {} s", .0.as_secs())]
    Silent(Duration),
    /// No TLS: whatever it was, in words.
    #[error("{0}")]
    Handshake(String),
    /// The host is none that a certificate can be for.
    #[error("the host {0:?} can't stand in a certificate")]
    Name(String, #[source] InvalidDnsNameError),
    /// The library will not have it.
    #[error("cannot set up TLS: {0}")]
    Setup(String),
    /// What was begun with one server does not go on with another.
    #[error("this workstation was enrolled at another server as {0} meanwhile")]
    OtherServer(TlsHost),
    /// The executor does not want it.
    #[error("{0}")]
    Refused(String),
}

/// For a renewal that the executor's certificate has asked for, while somebody waits for the
/// connection.
const RENEWAL_TIMEOUT: Duration = Duration::from_secs(5);

/// A connection to an executor that has proved who it is.
type Stream = TlsStream<TcpStream>;

/// Where the credentials for an executor are.
///
/// # Errors
/// [`Fault::NoHome`].
pub fn credentials_file(host: &TlsHost) -> Result<PathBuf, Fault> {
    let directory = credentials_directory().ok_or(Fault::NoHome)?;
    // IPv6 addresses have colons, which are nothing special in a name.
    Ok(directory.join(format!("{host}.json")))
}

/// A channel by the credentials that are in the file whenever it connects.
///
/// # Errors
/// [`Fault`].
pub async fn channel(host: &TlsHost, credentials: &Path) -> Result<Channel, Fault> {
    Ok(identified_channel(host, credentials).await?.0)
}

/// The same, with the server that it leads to.
///
/// # Errors
/// [`Fault`].
pub async fn identified_channel(
    host: &TlsHost,
    credentials: &Path,
) -> Result<(Channel, ServerIdentity), Fault> {
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
            // As long as the present certificate counts, there is another time.
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

/// Whether the executor, asked by another connection, shows that another authority follows the one
/// that is believed here.
pub async fn is_behind(host: &TlsHost, credentials: &Path) -> bool {
    connect(host, credentials)
        .await
        .is_ok_and(|(stream, _)| shows_another(&stream, host, credentials))
}

/// Behind its own certificate an executor shows that of the authority that has signed it. It counts
/// for nothing here, other than that it may be time for another certificate of ours.
fn shows_another(stream: &Stream, host: &TlsHost, credentials: &Path) -> bool {
    let shown = stream.get_ref().1.peer_certificates().and_then(|shown| shown.get(1));
    let is_other =
        |present: Credentials| shown.is_some_and(|shown| shown.as_ref() != present.authority);
    Credentials::load(credentials, host).is_ok_and(is_other)
}

/// A channel whose first connection is there already.
async fn over(
    stream: Stream,
    host: &TlsHost,
    credentials: &Path,
    server: Option<ServerIdentity>,
) -> Result<Channel, Fault> {
    let endpoint =
        endpoint(BEHIND_TLS.to_owned()).map_err(|error| Fault::Setup(error.to_string()))?;
    let connected = endpoint
        .connect_with_connector(connector(stream, host.clone(), credentials.to_owned(), server))
        .await;
    connected.map_err(|error| Fault::Handshake(root_cause(&error)))
}

async fn connect(host: &TlsHost, credentials: &Path) -> Result<(Stream, ServerIdentity), Fault> {
    let loaded = Credentials::load(credentials, host)?;
    let stream = handshake(host, Arc::new(trust::config_of(&loaded, credentials)?)).await?;
    Ok((stream, ServerIdentity::of_authority(&loaded.server())))
}

/// TCP, and then TLS.
async fn handshake(host: &TlsHost, config: Arc<ClientConfig>) -> Result<Stream, Fault> {
    let name = ServerName::try_from(host.host.clone())
        .map_err(|error| Fault::Name(host.host.clone(), error))?;
    let stream =
        timeout(CONNECT_TIMEOUT, TcpStream::connect((host.host.as_str(), host.port))).await;
    let stream = stream.map_err(|_| Fault::Silent(CONNECT_TIMEOUT))?.map_err(Fault::Connect)?;
    stream.set_nodelay(true).map_err(Fault::Connect)?;
    let shaken = timeout(HANDSHAKE_TIMEOUT, TlsConnector::from(config).connect(name, stream)).await;
    shaken
        .map_err(|_| Fault::Silent(HANDSHAKE_TIMEOUT))?
        .map_err(|error| Fault::Handshake(trust::words(host, &error)))
}

/// What a connector gives: a connection that is being made.
type Connecting = Pin<Box<dyn Future<Output = io::Result<TokioIo<Stream>>> + Send>>;

/// A connector that gives `first`, and then makes connections of its own, to the same server.
fn connector(
    first: Stream,
    host: TlsHost,
    credentials: PathBuf,
    server: Option<ServerIdentity>,
) -> impl Service<Uri, Response = TokioIo<Stream>, Error = io::Error, Future = Connecting> + Send + 'static
{
    let first = Mutex::new(Some(first));
    service_fn(move |_: Uri| -> Connecting {
        let ready = first.lock().unwrap_or_else(PoisonError::into_inner).take();
        let (host, credentials, server) = (host.clone(), credentials.clone(), server.clone());
        Box::pin(async move {
            match ready {
                Some(stream) => Ok(TokioIo::new(stream)),
                None => match connect(&host, &credentials).await {
                    Ok((stream, found)) if server.is_none_or(|server| server == found) => {
                        Ok(TokioIo::new(stream))
                    }
                    Ok(_) => Err(io::Error::other(Fault::OtherServer(host))),
                    Err(fault) => Err(io::Error::other(fault)),
                },
            }
        })
    })
}
