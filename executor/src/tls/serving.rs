//! Which certificate the executor shows, and what it makes of the certificate that the peer
//! shows. Both files, its own and that of the authorities, are read anew when they change.
//!
//! The handshake only makes sure that the peer has the key of the certificate that it
//! shows. Whether that certificate is any good is looked at right behind it: an alert
//! would tell a user nothing, and might not even arrive.

use std::{
    path::{Path, PathBuf},
    sync::{Arc, Mutex, RwLock},
    time::Duration,
};

use posh_proto::token::Fingerprint;
use rustls::{
    DigitallySignedStruct, DistinguishedName, Error as RustlsError, RootCertStore, ServerConfig,
    SignatureScheme,
    client::danger::HandshakeSignatureValid,
    crypto::CryptoProvider,
    pki_types::{CertificateDer, UnixTime},
    server::{
        ClientHello, ResolvesServerCert, WebPkiClientVerifier,
        danger::{ClientCertVerified, ClientCertVerifier},
    },
    sign::CertifiedKey,
    version::TLS13,
};

use super::{
    AUTHORITY_FILE, NEXT_AUTHORITY_FILE, SERVER_FILE, Stamp, TlsError,
    authority::{Authority, SERVER_LIFETIME_S, read_pair},
    now_s, provider,
    register::Register,
};

/// How often it is asked whether it is time for another certificate.
const RENEWAL_INTERVAL: Duration = Duration::from_secs(3600);

/// The executor's side of TLS.
pub struct Serving {
    /// For the handshakes.
    pub config: Arc<ServerConfig>,
    /// What decides about certificates.
    pub register: Arc<Register>,
    own: Arc<Own>,
    authorities: Authorities,
}

/// What a connection has proved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Proof {
    /// Nothing, and nothing was asked: plain text, or an executor started by ssh.
    NotAsked,
    /// It has shown no certificate.
    Nothing,
    /// It has the key of this certificate, which our authority has signed.
    Certificate(Fingerprint),
    /// What it has shown is of no use; in words for its user.
    Useless(String),
}

impl Serving {
    /// Reads what `posh-executor init` has made.
    ///
    /// # Errors
    /// [`TlsError`].
    pub fn load(directory: &Path) -> Result<Self, TlsError> {
        let provider = provider();
        let register = Arc::new(Register::at(directory));
        register.names()?;
        let authorities = Authorities::load(directory)?;
        let own = Arc::new(Own::load(directory)?);
        let mut config = ServerConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(&[&TLS13])
            .map_err(|error| setup(&error))?
            .with_client_cert_verifier(Arc::new(HasTheKey(provider)))
            .with_cert_resolver(own.clone());
        config.alpn_protocols = vec![b"h2".to_vec()];
        // A resumed connection would spare a millisecond; one path less to think about.
        config.send_tls13_tickets = 0;
        Ok(Self { config: Arc::new(config), register, own, authorities })
    }

    /// What a peer has proved by the certificates that it showed in a handshake.
    #[must_use]
    pub fn proof(&self, shown: Option<&[CertificateDer<'_>]>) -> Proof {
        let Some((certificate, others)) = shown.and_then(<[_]>::split_first) else {
            return Proof::Nothing;
        };
        let fingerprint = Fingerprint::of(certificate);
        // Words for those that were once ours come from the register.
        if let Err(invalid) = self.register.identity_of(&fingerprint) {
            return Proof::Useless(invalid.to_string());
        }
        match self.authorities.now().clients.verify_client_cert(
            certificate,
            others,
            UnixTime::now(),
        ) {
            Ok(_) => Proof::Certificate(fingerprint),
            Err(error) => Proof::Useless(format!(
                "the certificate of this workstation is not accepted: {error}"
            )),
        }
    }

    /// The SHA-256 of the authorities that count now: the one that signs, and during a rotation
    /// behind it the former one.
    #[must_use]
    pub fn authorities(&self) -> Vec<Fingerprint> {
        self.authorities.now().fingerprints.clone()
    }

    /// Makes the executor a new certificate in time, for ever.
    pub async fn keep_fresh(&self) {
        let mut interval = tokio::time::interval(RENEWAL_INTERVAL);
        loop {
            interval.tick().await;
            self.own.renew_if_due(&self.register);
        }
    }
}

fn setup(error: &dyn std::error::Error) -> TlsError {
    TlsError::Setup(error.to_string())
}

/// The executor's own certificate.
#[derive(Debug)]
struct Own {
    directory: PathBuf,
    current: RwLock<Arc<CertifiedKey>>,
    seen: Mutex<Option<Stamp>>,
}

impl Own {
    fn load(directory: &Path) -> Result<Self, TlsError> {
        let seen = Mutex::new(Stamp::of(&directory.join(SERVER_FILE)));
        let current = RwLock::new(read_own(directory)?);
        Ok(Self { directory: directory.to_owned(), current, seen })
    }

    /// Reads the file if it is another one than last time. One that can't be read leaves what there
    /// is, and is tried again: a rotation of the authority counts on it that the latest certificate
    /// is shown.
    fn refresh(&self) {
        let mut seen = self.seen.lock().expect("not poisoned");
        let file = Stamp::of(&self.directory.join(SERVER_FILE));
        if file == *seen {
            return;
        }
        match read_own(&self.directory) {
            Ok(fresh) => {
                tracing::info!("the executor's certificate was read anew");
                *seen = file;
                *self.current.write().expect("not poisoned") = fresh;
            }
            Err(error) => tracing::error!("still using the executor's old certificate: {error}"),
        }
    }

    /// By the age of its file: it is made for a fixed time.
    fn renew_if_due(&self, register: &Register) {
        let file = Stamp::of(&self.directory.join(SERVER_FILE));
        let made = file.and_then(|file| u64::try_from(file.modified.0).ok());
        if made.is_none_or(|made| now_s() < made + SERVER_LIFETIME_S * 2 / 3) {
            return;
        }
        match register.renew_server() {
            Ok(_) => tracing::info!("the executor has made itself a new certificate"),
            Err(error) => tracing::error!("cannot renew the executor's certificate: {error}"),
        }
    }
}

/// Whose certificates count.
struct Authorities {
    directory: PathBuf,
    current: RwLock<Arc<Current>>,
}

struct Current {
    files: [Option<Stamp>; 2],
    fingerprints: Vec<Fingerprint>,
    clients: Arc<dyn ClientCertVerifier>,
}

impl Authorities {
    fn load(directory: &Path) -> Result<Self, TlsError> {
        let current = RwLock::new(Arc::new(Current::read(directory)?));
        Ok(Self { directory: directory.to_owned(), current })
    }

    /// Those of the files now: two stat(2) when nobody has changed them. Files that can't be read
    /// leave what there is, and are tried again.
    fn now(&self) -> Arc<Current> {
        let current = self.current.read().expect("not poisoned").clone();
        if current.files == Current::files(&self.directory) {
            return current;
        }
        match Current::read(&self.directory) {
            Ok(read) => {
                let read = Arc::new(read);
                *self.current.write().expect("not poisoned") = read.clone();
                read
            }
            Err(error) => {
                tracing::error!("still going by the authorities that were read before: {error}");
                current
            }
        }
    }
}

impl Current {
    fn files(directory: &Path) -> [Option<Stamp>; 2] {
        [AUTHORITY_FILE, NEXT_AUTHORITY_FILE].map(|file| Stamp::of(&directory.join(file)))
    }

    fn read(directory: &Path) -> Result<Self, TlsError> {
        // From before: a change since then is seen next time.
        let files = Self::files(directory);
        let certificates = Authority::at(directory).certificates()?;
        let fingerprints =
            certificates.iter().map(|certificate| Fingerprint::of(certificate)).collect();
        let mut roots = RootCertStore::empty();
        for certificate in certificates {
            roots.add(certificate).map_err(|error| setup(&error))?;
        }
        let clients = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider());
        Ok(Self { files, fingerprints, clients: clients.build().map_err(|error| setup(&error))? })
    }
}

impl ResolvesServerCert for Own {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        self.refresh();
        Some(self.current.read().expect("not poisoned").clone())
    }
}

fn read_own(directory: &Path) -> Result<Arc<CertifiedKey>, TlsError> {
    let (key, certificates) = read_pair(&directory.join(SERVER_FILE))?;
    let key =
        CertifiedKey::from_der(certificates, key, &provider()).map_err(|error| setup(&error))?;
    Ok(Arc::new(key))
}

/// Takes any certificate whose key the peer has, or none.
#[derive(Debug)]
struct HasTheKey(Arc<CryptoProvider>);

impl ClientCertVerifier for HasTheKey {
    fn client_auth_mandatory(&self) -> bool {
        false
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: UnixTime,
    ) -> Result<ClientCertVerified, RustlsError> {
        Ok(ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, RustlsError> {
        Err(RustlsError::General("TLS 1.3 only".to_owned()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, RustlsError> {
        let algorithms = &self.0.signature_verification_algorithms;
        rustls::crypto::verify_tls13_signature(message, certificate, signature, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}
