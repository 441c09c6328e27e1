//! Standing executors with certificates: admission, refusal, and messages about it.

mod crowds;
mod refused;
mod rights;
mod rotation;
mod runs;
mod secrets;
mod shares;
mod volumes;

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use fs_mapper::config::TlsHost;
use hyper_util::rt::TokioIo;
use posh_executor::{
    Export,
    config::Identity,
    tls::{TlsConfig, administer, authority::Authority, register::Register},
};
use posh_proto::{MAX_MESSAGE_BYTES, executor::executor_client::ExecutorClient, token::Token};
use posh_reach::tls::{self, TlsFault, credentials::Credentials};
use rustls::{
    ClientConfig, RootCertStore,
    pki_types::{PrivateKeyDer, ServerName, pem::PemObject as _},
};
use tempfile::TempDir;
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{mpsc, oneshot},
    task::JoinHandle,
};
use tokio_rustls::TlsConnector;
use tonic::transport::{Channel, Endpoint};

use crate::harness::{Client, config, pipeline, run};

/// An executor with certificates in this process, serving `logs` and `private`.
struct TlsLab {
    stores: [TempDir; 2],
    /// Certificates of the executor.
    directory: TempDir,
    /// Credentials of workstations.
    home: TempDir,
    host: TlsHost,
    /// Configuration at the start.
    config: posh_executor::Config,
    /// Sends later configurations.
    changes: mpsc::Sender<posh_executor::Config>,
    /// Gets the absent accounts of identities that try to get in.
    attempted: mpsc::Receiver<String>,
    _stop: oneshot::Sender<()>,
    _served: JoinHandle<Result<(), posh_executor::Error>>,
}

fn identity(name: &str) -> Identity {
    Identity::named(name.to_owned())
}

impl TlsLab {
    async fn start(identities: &[Identity]) -> Self {
        Self::with(identities, |_| {}).await
    }

    async fn with(
        identities: &[Identity],
        change: impl FnOnce(&mut posh_executor::Config),
    ) -> Self {
        let [stores @ .., directory, home] = [(); 4].map(|()| TempDir::new().unwrap());
        administer::init(directory.path(), vec!["127.0.0.1".to_owned()]).unwrap();
        let mut config = config(stores[0].path());
        let private = stores[1].path().to_owned();
        config.exports.push(Export {
            name: "private".into(),
            path: private,
            read_only: false,
            exec: false,
            coherence: None,
            linked_from: None,
        });
        config.tls = Some(TlsConfig { directory: directory.path().to_owned() });
        config.identities = identities.to_vec();
        change(&mut config);
        let listener = TcpListener::bind(config.listen).await.unwrap();
        let host =
            TlsHost { host: "127.0.0.1".into(), port: listener.local_addr().unwrap().port() };
        let (stop, stopped) = oneshot::channel::<()>();
        let (changes, changed) = mpsc::channel(1);
        let shutdown = async move {
            let _ = stopped.await;
        };
        let (attempts, attempted) = mpsc::channel(1);
        let changed = posh_executor::ConfigChanges { configs: changed, attempts };
        let served = tokio::spawn(posh_executor::run_with_changes(
            config.clone(),
            changed,
            listener,
            shutdown,
        ));
        Self {
            stores,
            directory,
            home,
            host,
            config,
            changes,
            attempted,
            _stop: stop,
            _served: served,
        }
    }

    fn register(&self) -> Register {
        Register::at(self.directory.path())
    }

    fn credentials(&self, name: &str) -> PathBuf {
        self.home.path().join(name)
    }

    async fn enrol(&self, name: &str) -> Result<PathBuf, TlsFault> {
        self.enrol_with(&self.register().token_for(name).unwrap(), name).await
    }

    async fn enrol_with(&self, token: &Token, name: &str) -> Result<PathBuf, TlsFault> {
        let path = self.credentials(name);
        tls::enrol::enrol(&self.host, token, &path).await.map(|_| path)
    }

    async fn client_of(&self, credentials: &Path) -> Client {
        client(tls::channel(&self.host, credentials).await.unwrap())
    }

    /// An enrolled client.
    async fn client(&self, name: &str) -> Client {
        self.client_of(&self.enrol(name).await.unwrap()).await
    }

    /// Credentials with a certificate of this validity that the register knows.
    fn issue(&self, name: &str, valid_s: std::ops::Range<u64>) -> PathBuf {
        let (path, issued) = self.forge(name, self.directory.path(), valid_s);
        self.register().note(name, &issued).unwrap();
        path
    }

    /// Credentials that the authority in `directory` has signed, which trust our executor.
    fn forge(
        &self,
        name: &str,
        directory: &Path,
        valid_s: std::ops::Range<u64>,
    ) -> (PathBuf, posh_executor::tls::authority::Issued) {
        let key = rcgen::KeyPair::generate().unwrap();
        let request = rcgen::CertificateParams::default().serialize_request(&key).unwrap();
        let issued =
            Authority::at(directory).issue_for(request.der(), name, valid_s.clone()).unwrap();
        let credentials = Credentials {
            server: None,
            identity: name.to_owned(),
            issued_s: valid_s.start,
            expires_s: valid_s.end,
            key: key.serialize_pem(),
            certificate: issued.certificate.to_vec(),
            authority: Authority::at(self.directory.path()).certificate().unwrap().to_vec(),
        };
        let path = self.credentials(name);
        credentials.save(&path).unwrap();
        (path, issued)
    }

    /// A channel of a client that trusts the executor and shows no certificate.
    async fn stranger(&self) -> Channel {
        let host = self.host.clone();
        let config = self.without_certificate();
        let connector = tower::service_fn(move |_| {
            let (host, config) = (host.clone(), config.clone());
            async move {
                let stream = TcpStream::connect((host.host.as_str(), host.port)).await?;
                let name =
                    ServerName::try_from(host.host.clone()).map_err(std::io::Error::other)?;
                TlsConnector::from(config).connect(name, stream).await.map(TokioIo::new)
            }
        });
        Endpoint::from_static("http://tls").connect_with_connector(connector).await.unwrap()
    }

    /// A connection with these credentials, after the handshake.
    async fn connection(
        &self,
        credentials: &Credentials,
    ) -> tokio_rustls::client::TlsStream<TcpStream> {
        let mut roots = RootCertStore::empty();
        roots.add(credentials.authority.clone().into()).unwrap();
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13]);
        let key = PrivateKeyDer::from_pem_slice(credentials.key.as_bytes()).unwrap();
        let config = config.unwrap().with_root_certificates(roots);
        let mut config = config
            .with_client_auth_cert(vec![credentials.certificate.clone().into()], key)
            .unwrap();
        config.alpn_protocols = vec![b"h2".to_vec()];
        let stream = TcpStream::connect((self.host.host.as_str(), self.host.port)).await.unwrap();
        let name = ServerName::try_from(self.host.host.clone()).unwrap();
        TlsConnector::from(Arc::new(config)).connect(name, stream).await.unwrap()
    }

    fn without_certificate(&self) -> Arc<ClientConfig> {
        let mut roots = RootCertStore::empty();
        roots.add(Authority::at(self.directory.path()).certificate().unwrap()).unwrap();
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13]);
        let mut config = config.unwrap().with_root_certificates(roots).with_no_client_auth();
        config.alpn_protocols = vec![b"h2".to_vec()];
        Arc::new(config)
    }
}

fn client(channel: Channel) -> Client {
    ExecutorClient::new(channel).max_decoding_message_size(MAX_MESSAGE_BYTES)
}

fn now_s() -> u64 {
    std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap().as_secs()
}

#[tokio::test]
async fn who_is_enrolled_runs_commands() {
    let lab = TlsLab::start(&[identity("ada")]).await;
    let client = lab.client("ada").await;
    fs::write(lab.stores[0].path().join("f"), "b\na\n").unwrap();
    assert_eq!(
        run(&client, pipeline(&["cat f", "sort"]), bytes::Bytes::new()).await.text(),
        "a\nb\n"
    );
}

#[tokio::test]
async fn a_certificate_is_renewed_over_itself() {
    let lab = TlsLab::start(&[identity("ada")]).await;
    let path = lab.enrol("ada").await.unwrap();
    let first = Credentials::load(&path, &lab.host).unwrap();
    let channel = tls::channel(&lab.host, &path).await.unwrap();
    let second = tls::enrol::renew(channel, &lab.host, &path).await.unwrap();
    assert_ne!((&first.key, &first.certificate), (&second.key, &second.certificate));
    assert_eq!(second.identity, "ada");
    let client = lab.client_of(&path).await;
    assert_eq!(run(&client, pipeline(&["echo x"]), bytes::Bytes::new()).await.text(), "x\n");
    assert_eq!(lab.register().certificates().unwrap().len(), 2);
    let third = PrivateKeyDer::from_pem_slice(second.key.as_bytes());
    assert!(third.is_ok());
}

#[tokio::test]
async fn a_new_server_certificate_is_shown_without_a_restart() {
    let lab = TlsLab::start(&[identity("ada")]).await;
    let shown = || async {
        let stream = TcpStream::connect((lab.host.host.as_str(), lab.host.port)).await.unwrap();
        let name = ServerName::try_from(lab.host.host.clone()).unwrap();
        let stream =
            TlsConnector::from(lab.without_certificate()).connect(name, stream).await.unwrap();
        stream.get_ref().1.peer_certificates().unwrap()[0].to_vec()
    };
    let before = shown().await;
    administer::renew(lab.directory.path(), Vec::new()).unwrap();
    let changed = async {
        while shown().await == before {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(crate::harness::PATIENCE, changed).await.expect("it is read anew");
    // Old credentials trust the authority, not the certificate.
    let client = lab.client("ada").await;
    assert_eq!(run(&client, pipeline(&["echo x"]), bytes::Bytes::new()).await.text(), "x\n");
}
