//! Verification of an executor. For an enrolment, the token names the authority by its fingerprint;
//! afterwards the authority is the one in the credentials, or a successor that it vouches for. Also
//! the messages for a failed handshake.

use std::{io, path::Path, sync::Arc};

use fs_mapper::config::TlsHost;
use posh_proto::token::Fingerprint;
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, Error, InvalidMessage, OtherError,
    RootCertStore, SignatureScheme,
    client::{
        Resumption, WebPkiServerVerifier,
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    },
    crypto::{CryptoProvider, aws_lc_rs, verify_tls13_signature},
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime, pem::PemObject as _},
    server::WebPkiClientVerifier,
    version::TLS13,
};

use super::{TlsFault, credentials::Credentials};

/// The executor doesn't show the authority that the token names.
#[derive(Debug, thiserror::Error)]
#[error("the authority is not the one that the token names")]
struct OtherAuthority;

/// Our crypto provider, which prefers AES-128: it is a fifth faster than AES-256, and as safe as
/// P-256 is.
fn provider() -> Arc<CryptoProvider> {
    let mut provider = aws_lc_rs::default_provider();
    provider
        .cipher_suites
        .sort_by_key(|suite| suite.suite() != rustls::CipherSuite::TLS13_AES_128_GCM_SHA256);
    Arc::new(provider)
}

/// Returns a TLS configuration with these credentials.
pub(super) fn config_of(credentials: &Credentials, path: &Path) -> Result<ClientConfig, TlsFault> {
    let damaged = |what: String| TlsFault::Damaged { path: path.to_owned(), what };
    let mut roots = RootCertStore::empty();
    let authority = CertificateDer::from(credentials.authority.clone());
    roots.add(authority).map_err(|error| damaged(error.to_string()))?;
    let key = PrivateKeyDer::from_pem_slice(credentials.key.as_bytes())
        .map_err(|error| damaged(error.to_string()))?;
    let certificate = CertificateDer::from(credentials.certificate.clone());
    let config = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&TLS13])
        .map_err(|error| TlsFault::Setup(error.to_string()))?
        .with_root_certificates(roots)
        .with_client_auth_cert(vec![certificate], key)
        .map_err(|error| damaged(error.to_string()))?;
    Ok(finished(config))
}

/// Returns a TLS configuration without a client certificate, for an executor whose authority has
/// this fingerprint.
pub(super) fn config_for(authority: Fingerprint) -> Result<ClientConfig, TlsFault> {
    let provider = provider();
    let verifier = Arc::new(Named { authority, provider: provider.clone() });
    let config = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&TLS13])
        .map_err(|error| TlsFault::Setup(error.to_string()))?
        .dangerous()
        .with_custom_certificate_verifier(verifier)
        .with_no_client_auth();
    Ok(finished(config))
}

/// Returns true if `authority` has signed `next`, and `next` has signed our `certificate`. An
/// executor's own key can't vouch for an authority: if it is stolen, the thief must not be trusted
/// beyond the validity of the executor's certificate.
pub(super) fn vouches(authority: &[u8], next: &[u8], certificate: &[u8]) -> bool {
    let [authority, next, certificate] =
        [authority, next, certificate].map(|bytes| CertificateDer::from(bytes.to_vec()));
    // Both a chain through `next` to `authority` and one to `next` itself: a certificate that
    // `authority` signed directly proves nothing about `next`.
    is_signed(&certificate, std::slice::from_ref(&next), authority)
        && is_signed(&certificate, &[], next.clone())
}

fn is_signed(
    certificate: &CertificateDer<'_>,
    between: &[CertificateDer<'_>],
    root: CertificateDer<'static>,
) -> bool {
    let mut roots = RootCertStore::empty();
    if roots.add(root).is_err() {
        return false;
    }
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider()).build();
    verifier.is_ok_and(|verifier| {
        verifier.verify_client_cert(certificate, between, UnixTime::now()).is_ok()
    })
}

fn finished(mut config: ClientConfig) -> ClientConfig {
    config.alpn_protocols = vec![b"h2".to_vec()];
    config.resumption = Resumption::disabled();
    config
}

/// Verifier that trusts the authority with that fingerprint in the executor's own chain.
#[derive(Debug)]
struct Named {
    authority: Fingerprint,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for Named {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        others: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let named = others.iter().find(|other| Fingerprint::of(other).is(&self.authority));
        let other_authority = || CertificateError::Other(OtherError(Arc::new(OtherAuthority)));
        let authority = named.ok_or_else(other_authority)?.clone().into_owned();
        let mut roots = RootCertStore::empty();
        roots.add(authority)?;
        let verifier =
            WebPkiServerVerifier::builder_with_provider(Arc::new(roots), self.provider.clone());
        let verifier = verifier.build().map_err(|error| Error::General(error.to_string()))?;
        verifier.verify_server_cert(certificate, others, name, ocsp, now)
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(Error::General("TLS 1.3 only".to_owned()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls13_signature(message, certificate, signature, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

/// Explains a failed handshake to the user.
pub(super) fn words(host: &TlsHost, error: &io::Error) -> String {
    let Some(error) = error.get_ref().and_then(|cause| cause.downcast_ref::<Error>()) else {
        return match error.kind() {
            io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset => {
                format!(
                    "{host} hung up in the middle of the handshake; \
                     is it a posh-executor with [tls]?"
                )
            }
            _ => error.to_string(),
        };
    };
    match error {
        Error::InvalidMessage(
            InvalidMessage::InvalidContentType | InvalidMessage::UnknownProtocolVersion,
        ) => {
            format!(
                "{host} does not speak TLS; if it is an executor without [tls], \
                 its address is http://{host}"
            )
        }
        Error::InvalidCertificate(reason) => of_certificate(host, reason),
        other => other.to_string(),
    }
}

fn of_certificate(host: &TlsHost, reason: &CertificateError) -> String {
    match reason {
        CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
            format!(
                "the certificate of {host} has expired, or the clock here is wrong; \
                 there, run: posh-executor renew"
            )
        }
        CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
            format!("the certificate of {host} is not valid yet: one of the two clocks is wrong")
        }
        CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => {
            format!(
                "the certificate of {host} is for another name; \
                 there, run: posh-executor renew --name {} (and all its other names)",
                host.host
            )
        }
        CertificateError::UnknownIssuer | CertificateError::BadSignature => {
            format!(
                "{host} is not the executor at which this workstation was enrolled: \
                 another authority has signed its certificate. If it was set up anew, \
                 or its authority was replaced while this workstation was away, \
                 enrol this workstation again; else somebody stands in between"
            )
        }
        CertificateError::Other(OtherError(other)) if other.is::<OtherAuthority>() => format!(
            "{host} is not the executor that has made this token; check the address, \
             or somebody stands in between. The token was not sent"
        ),
        other => format!("the certificate of {host} is no good: {other}"),
    }
}
