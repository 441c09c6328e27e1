//! The small certificate authority of one executor: a key that signs the executor's own certificate
//! and those of enrolled gateways. All keys are ECDSA P-256. Its files are read for each signature,
//! and not kept in memory.
//!
//! During a rotation a second file holds the next authority; see `rotation`. From then on the next
//! one signs, and the first only vouches for it.

use std::{
    ops::Range,
    path::{Path, PathBuf},
};

use posh_proto::{secret, token::Fingerprint};
use rcgen::{
    BasicConstraints, CertificateParams, CertificateSigningRequestParams, DistinguishedName,
    DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose, SerialNumber,
};
use rustls::pki_types::{
    CertificateDer, CertificateSigningRequestDer, PrivateKeyDer, pem::PemObject as _,
};
use time::OffsetDateTime;

use super::{AUTHORITY_FILE, NEXT_AUTHORITY_FILE, SERVER_FILE, TlsError, now_s, provider};

const DAY_S: u64 = 24 * 3600;

/// Long enough that a rotation is never urgent because of its age.
pub const AUTHORITY_LIFETIME_S: u64 = 20 * 365 * DAY_S;
/// The executor renews its own when a third is left.
pub const SERVER_LIFETIME_S: u64 = 365 * DAY_S;
/// Gateways renew theirs when a third is left, with the current one: a workstation that was away
/// for longer is enrolled anew.
pub const CLIENT_LIFETIME_S: u64 = 90 * DAY_S;
/// Tolerance for clock differences.
const BACKDATED_S: u64 = 3600;

/// A signed certificate, with its authorities.
#[derive(Debug, Clone)]
pub struct Issued {
    /// The certificate, DER.
    pub certificate: CertificateDer<'static>,
    /// The authority that tokens name, DER. It has signed the certificate, unless there is a next
    /// one.
    pub authority: CertificateDer<'static>,
    /// The next authority during a rotation, DER: it has signed the certificate then.
    pub next_authority: Option<CertificateDer<'static>>,
    /// Validity of the certificate, seconds since 1970.
    pub valid_s: Range<u64>,
}

impl Issued {
    /// The authority that has signed the certificate.
    #[must_use]
    pub fn signed_by(&self) -> &CertificateDer<'static> {
        self.next_authority.as_ref().unwrap_or(&self.authority)
    }
}

/// The authority in one directory.
#[derive(Debug, Clone)]
pub struct Authority {
    directory: PathBuf,
}

impl Authority {
    /// The authority in that directory; reads nothing.
    #[must_use]
    pub fn at(directory: &Path) -> Self {
        Self { directory: directory.to_owned() }
    }

    /// Makes the authority, and a server certificate for `names`.
    ///
    /// # Errors
    /// [`TlsError::Exists`], or when it can't be made or written.
    pub fn create(&self, names: &[String]) -> Result<(), TlsError> {
        let path = self.directory.join(AUTHORITY_FILE);
        if path.symlink_metadata().is_ok() {
            return Err(TlsError::Exists(self.directory.clone()));
        }
        let key = KeyPair::generate().map_err(make)?;
        let certificate = authority_parameters()?.self_signed(&key).map_err(make)?;
        secret::write(&path, &(key.serialize_pem() + &certificate.pem()))?;
        self.renew_server(names)
    }

    /// Makes the next authority, for which the current one vouches by signing its certificate, and
    /// signs the executor's certificate for `names` with it. That certificate is written first: a
    /// peer that trusts the new authority must not meet a certificate that only the old one has
    /// signed.
    pub(super) fn create_next(&self, names: &[String]) -> Result<(), TlsError> {
        let present = self.signing()?;
        if present.former.is_some() {
            return Err(TlsError::Rotating(self.directory.clone()));
        }
        let key = KeyPair::generate().map_err(make)?;
        let certificate = authority_parameters()?.signed_by(&key, &present.issuer).map_err(make)?;
        let (text, pem) = (key.serialize_pem() + &certificate.pem(), certificate.pem());
        let certificate = CertificateDer::from(certificate);
        let issuer = Issuer::from_ca_cert_der(&certificate, key).map_err(make)?;
        self.write_server(
            names,
            &Signing { issuer, certificate, pem, former: Some(Box::new(present)) },
        )?;
        Ok(secret::write(&self.directory.join(NEXT_AUTHORITY_FILE), &text)?)
    }

    /// Replaces the current authority by the next one.
    pub(super) fn take_next(&self) -> Result<(), TlsError> {
        let next = self.directory.join(NEXT_AUTHORITY_FILE);
        Ok(secret::rename(&next, &self.directory.join(AUTHORITY_FILE))?)
    }

    /// Makes a new key and certificate for the executor itself, for host names and IP addresses.
    ///
    /// # Errors
    /// [`TlsError`].
    pub(super) fn renew_server(&self, names: &[String]) -> Result<(), TlsError> {
        self.write_server(names, &self.signing()?)
    }

    fn write_server(&self, names: &[String], signing: &Signing) -> Result<(), TlsError> {
        let key = KeyPair::generate().map_err(make)?;
        let now = now_s();
        let mut params = parameters("posh executor", now - BACKDATED_S..now + SERVER_LIFETIME_S)?;
        let named = CertificateParams::new(names).map_err(make)?;
        params.subject_alt_names = named.subject_alt_names;
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        let certificate = params.signed_by(&key, &signing.issuer).map_err(make)?;
        // With the authorities' own certificates: a gateway that enrols knows one by its
        // fingerprint, that of the former one, while there is one. The signing one comes first.
        let authorities: String =
            signing.with_former().map(|authority| authority.pem.as_str()).collect();
        let text = key.serialize_pem() + &certificate.pem() + &authorities;
        Ok(secret::write(&self.directory.join(SERVER_FILE), &text)?)
    }

    /// Signs a gateway's request for the usual time. Uses its key, and ignores its name.
    ///
    /// # Errors
    /// [`TlsError`].
    pub fn issue(&self, request: &[u8], identity: &str) -> Result<Issued, TlsError> {
        let now = now_s();
        self.issue_for(request, identity, now - BACKDATED_S..now + CLIENT_LIFETIME_S)
    }

    /// Like `issue`, with a given validity.
    ///
    /// # Errors
    /// [`TlsError`].
    pub fn issue_for(
        &self,
        request: &[u8],
        identity: &str,
        valid_s: Range<u64>,
    ) -> Result<Issued, TlsError> {
        let signing = self.signing()?;
        // This also checks that the requester has the key.
        let request = CertificateSigningRequestDer::from(request);
        let mut request = CertificateSigningRequestParams::from_der(&request).map_err(make)?;
        request.params = parameters(identity, valid_s.clone())?;
        request.params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        request.params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        let certificate = request.signed_by(&signing.issuer).map_err(make)?.into();
        let (authority, next_authority) = match signing.former {
            Some(former) => (former.certificate, Some(signing.certificate)),
            None => (signing.certificate, None),
        };
        Ok(Issued { certificate, authority, next_authority, valid_s })
    }

    /// Fingerprint by which tokens name it. During a rotation that is the former one's, until it
    /// ends.
    ///
    /// # Errors
    /// [`TlsError`].
    pub fn fingerprint(&self) -> Result<Fingerprint, TlsError> {
        Ok(Fingerprint::of(&self.certificate()?))
    }

    /// The certificate of the authority that tokens name.
    ///
    /// # Errors
    /// [`TlsError`].
    pub fn certificate(&self) -> Result<CertificateDer<'static>, TlsError> {
        let Signing { certificate, former, .. } = self.signing()?;
        Ok(former.map_or(certificate, |former| former.certificate))
    }

    /// The certificates of the valid authorities: the one that signs, and during a rotation the
    /// former one behind it.
    ///
    /// # Errors
    /// [`TlsError`].
    pub fn certificates(&self) -> Result<Vec<CertificateDer<'static>>, TlsError> {
        let signing = self.signing()?;
        Ok(signing.with_former().map(|authority| authority.certificate.clone()).collect())
    }

    /// The authority that signs, with the former one. The end of a rotation may come between the
    /// two reads: in this order both are then the same one, and none is missed.
    fn signing(&self) -> Result<Signing, TlsError> {
        let next = match self.read(NEXT_AUTHORITY_FILE) {
            Err(TlsError::NotMade(_)) => None,
            next => Some(next?),
        };
        let present = self.read(AUTHORITY_FILE)?;
        Ok(match next {
            Some(next) if next.certificate != present.certificate => {
                Signing { former: Some(Box::new(present)), ..next }
            }
            _ => present,
        })
    }

    fn read(&self, file: &str) -> Result<Signing, TlsError> {
        let path = self.directory.join(file);
        let damaged = |what: String| TlsError::Damaged { path: path.clone(), what };
        let text = match secret::read(&path) {
            Err(error) if error.is_missing() => {
                return Err(TlsError::NotMade(self.directory.clone()));
            }
            text => text?,
        };
        let key = KeyPair::from_pem(&text).map_err(|error| damaged(error.to_string()))?;
        let certificate = CertificateDer::from_pem_slice(text.as_bytes())
            .map_err(|error| damaged(error.to_string()))?;
        // The key stands before it.
        let pem =
            text.find("-----BEGIN CERTIFICATE").map(|at| text[at..].to_owned()).unwrap_or_default();
        let issuer = Issuer::from_ca_cert_der(&certificate, key)
            .map_err(|error| damaged(error.to_string()))?;
        Ok(Signing { issuer, certificate, pem, former: None })
    }
}

/// An authority, ready to sign.
struct Signing {
    issuer: Issuer<'static, KeyPair>,
    certificate: CertificateDer<'static>,
    /// The certificate as PEM.
    pem: String,
    /// Its predecessor, until the rotation ends.
    former: Option<Box<Signing>>,
}

impl Signing {
    fn with_former(&self) -> impl Iterator<Item = &Signing> {
        std::iter::once(self).chain(self.former.as_deref())
    }
}

fn authority_parameters() -> Result<CertificateParams, TlsError> {
    let now = now_s();
    let mut params =
        parameters("posh executor authority", now - BACKDATED_S..now + AUTHORITY_LIFETIME_S)?;
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
    Ok(params)
}

/// Reads a key and the certificates behind it from one file.
pub(super) fn read_pair(
    path: &Path,
) -> Result<(PrivateKeyDer<'static>, Vec<CertificateDer<'static>>), TlsError> {
    let damaged = |what: String| TlsError::Damaged { path: path.to_owned(), what };
    let text = match secret::read(path) {
        Err(error) if error.is_missing() => {
            return Err(TlsError::NotMade(path.parent().unwrap_or(Path::new("/")).to_owned()));
        }
        text => text?,
    };
    let key = PrivateKeyDer::from_pem_slice(text.as_bytes())
        .map_err(|error| damaged(error.to_string()))?;
    let certificates: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(text.as_bytes()).collect();
    Ok((key, certificates.map_err(|error| damaged(error.to_string()))?))
}

fn parameters(name: &str, valid_s: Range<u64>) -> Result<CertificateParams, TlsError> {
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, name);
    params.not_before = instant(valid_s.start)?;
    params.not_after = instant(valid_s.end)?;
    let mut serial = [0; 16];
    provider()
        .secure_random
        .fill(&mut serial)
        .map_err(|_| TlsError::Make("no random numbers".to_owned()))?;
    params.serial_number = Some(SerialNumber::from_slice(&serial));
    params.use_authority_key_identifier_extension = true;
    Ok(params)
}

fn instant(at_s: u64) -> Result<OffsetDateTime, TlsError> {
    let seconds =
        i64::try_from(at_s).map_err(|_| TlsError::Make("a time out of range".to_owned()))?;
    OffsetDateTime::from_unix_timestamp(seconds).map_err(|error| TlsError::Make(error.to_string()))
}

fn make(error: rcgen::Error) -> TlsError {
    TlsError::Make(error.to_string())
}
