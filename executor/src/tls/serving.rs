//! The executor's own certificate, and the check of the peer's. Both files, its own and that of the
//! authorities, are read again when they change.
//!
//! The handshake only makes sure that the peer has the key of its certificate. The certificate
//! itself is checked right after it: a TLS alert would tell a user nothing, and might not even
//! arrive.

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
    AUTHORITY_FILE, FileVersion, NEXT_AUTHORITY_FILE, SERVER_FILE, TlsError,
    authority::{Authority, SERVER_LIFETIME_S, read_pair},
    now_s, provider,
    register::Register,
};

/// Interval of the check for a due renewal.
const RENEWAL_INTERVAL: Duration = Duration::from_secs(3600);

/// Difference of clocks that certificates are made for.
const CLOCK_TOLERANCE_S: u64 = 300;

/// The executor's side of TLS.
pub struct Serving {
    /// For the handshakes.
    pub config: Arc<ServerConfig>,
    /// The register, which decides about certificates.
    pub register: Arc<Register>,
    own: Arc<OwnCertificate>,
    authorities: Authorities,
}

/// A peer's proof of its identity.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Proof {
    /// None, and none was asked for: plain text, or an executor started by ssh.
    NotAsked,
    /// No certificate was shown.
    Nothing,
    /// The peer has the key of this certificate, which our authority has signed.
    Certificate(Fingerprint),
    /// The certificate is invalid; the reason for its user.
    Useless(String),
}

impl Serving {
    /// Reads the files made by `posh-executor init`.
    ///
    /// # Errors
    /// [`TlsError`].
    pub fn load(directory: &Path) -> Result<Self, TlsError> {
        let provider = provider();
        let register = Arc::new(Register::at(directory));
        register.names()?;
        let authorities = Authorities::load(directory)?;
        let own = Arc::new(OwnCertificate::load(directory)?);
        let mut config = ServerConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(&[&TLS13])
            .map_err(|error| setup(&error))?
            .with_client_cert_verifier(Arc::new(HasTheKey(provider)))
            .with_cert_resolver(own.clone());
        config.alpn_protocols = vec![b"h2".to_vec()];
        // A resumed connection would save a millisecond, for one more code path.
        config.send_tls13_tickets = 0;
        Ok(Self { config: Arc::new(config), register, own, authorities })
    }

    /// Proof by the certificates that a peer has shown in a handshake.
    #[must_use]
    pub fn proof(&self, shown: Option<&[CertificateDer<'_>]>) -> Proof {
        let Some((certificate, others)) = shown.and_then(<[_]>::split_first) else {
            return Proof::Nothing;
        };
        let fingerprint = Fingerprint::of(certificate);
        // The register has the better messages for certificates that were once ours.
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

    /// The SHA-256 of the valid authorities: the one that signs, and during a rotation the former
    /// one behind it.
    #[must_use]
    pub fn authorities(&self) -> Vec<Fingerprint> {
        self.authorities.now().fingerprints.clone()
    }

    /// Renews the executor's certificate in time, for ever.
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
struct OwnCertificate {
    directory: PathBuf,
    current: RwLock<Arc<CertifiedKey>>,
    seen: Mutex<Option<FileVersion>>,
}

impl OwnCertificate {
    fn load(directory: &Path) -> Result<Self, TlsError> {
        let seen = Mutex::new(FileVersion::of(&directory.join(SERVER_FILE)));
        let current = RwLock::new(read_own(directory)?);
        Ok(Self { directory: directory.to_owned(), current, seen })
    }

    /// Reads the file if it has changed. If it can't be read, the old certificate stays, and the
    /// next call tries again: a rotation of the authority requires that the latest certificate is
    /// shown.
    fn refresh(&self) {
        let mut seen = self.seen.lock().expect("not poisoned");
        let file = FileVersion::of(&self.directory.join(SERVER_FILE));
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

    /// Renews the certificate by the age of its file: its lifetime is fixed. One that was made by a
    /// clock that was ahead is not valid yet for anybody.
    fn renew_if_due(&self, register: &Register) {
        let file = FileVersion::of(&self.directory.join(SERVER_FILE));
        let made = file.and_then(|file| u64::try_from(file.modified.0).ok());
        let is_due = |made: u64| {
            let valid = made.saturating_sub(CLOCK_TOLERANCE_S)..made + SERVER_LIFETIME_S * 2 / 3;
            !valid.contains(&now_s())
        };
        if !made.is_some_and(is_due) {
            return;
        }
        match register.renew_server() {
            Ok(_) => tracing::info!("the executor has made itself a new certificate"),
            Err(error) => tracing::error!("cannot renew the executor's certificate: {error}"),
        }
    }
}

/// The valid authorities.
struct Authorities {
    directory: PathBuf,
    current: RwLock<Arc<Current>>,
}

struct Current {
    files: [Option<FileVersion>; 2],
    fingerprints: Vec<Fingerprint>,
    clients: Arc<dyn ClientCertVerifier>,
}

impl Authorities {
    fn load(directory: &Path) -> Result<Self, TlsError> {
        let current = RwLock::new(Arc::new(Current::read(directory)?));
        Ok(Self { directory: directory.to_owned(), current })
    }

    /// The authorities in the files: two stat(2) if these are unchanged. If they can't be read, the
    /// old ones stay, and the next call tries again.
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
    fn files(directory: &Path) -> [Option<FileVersion>; 2] {
        [AUTHORITY_FILE, NEXT_AUTHORITY_FILE].map(|file| FileVersion::of(&directory.join(file)))
    }

    fn read(directory: &Path) -> Result<Self, TlsError> {
        // Taken before the read: a change since then is seen next time.
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

impl ResolvesServerCert for OwnCertificate {
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

/// Accepts any certificate whose key the peer has, or none.
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

#[cfg(test)]
mod tests {
    use std::{fs::File, time::SystemTime};

    use super::*;

    #[test]
    fn a_certificate_by_a_clock_that_was_ahead_is_renewed() {
        let directory = tempfile::tempdir().unwrap();
        Authority::at(directory.path()).create(&["host".to_owned()]).unwrap();
        let register = Register::at(directory.path());
        register.create(&["host".to_owned()]).unwrap();
        let own = OwnCertificate::load(directory.path()).unwrap();
        let file = directory.path().join(SERVER_FILE);
        let content = || std::fs::read(&file).unwrap();
        let before = content();
        own.renew_if_due(&register);
        assert!(content() == before);
        let ahead = SystemTime::now() + Duration::from_secs(365 * 24 * 3600);
        File::options().write(true).open(&file).unwrap().set_modified(ahead).unwrap();
        own.renew_if_due(&register);
        assert!(content() != before);
    }
}
