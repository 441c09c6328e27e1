//! Credentials from an enrolment: a private key that never leaves this workstation, its
//! certificate, and the authority to trust. One file per executor, accessible only to its owner.

use std::{
    path::Path,
    time::{Duration, SystemTime},
};

use fs_mapper::config::TlsHost;
use posh_proto::{executor::IssuedCertificate, secret, token::Fingerprint};
use serde::{Deserialize, Serialize};

use super::TlsFault;

/// Minimum age of the file before an early renewal, however often an executor changes its
/// authority.
const LEAST_AGE: Duration = Duration::from_secs(3600);

/// Contents of the file.
#[derive(Clone, Serialize, Deserialize)]
pub struct Credentials {
    /// Name of this workstation at the executor.
    pub identity: String,
    /// Start of the certificate's validity, seconds since 1970.
    pub issued_s: u64,
    /// End of its validity, seconds since 1970.
    pub expires_s: u64,
    /// The private key, PEM.
    pub key: String,
    /// The certificate, DER.
    pub certificate: Vec<u8>,
    /// Certificate of the authority that signs the executor's certificate, DER.
    pub authority: Vec<u8>,
    /// The server's identity, if it is older than this authority: see [`Credentials::server`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub server: Option<String>,
}

impl Credentials {
    /// Combines a key with the certificate that was issued for it.
    pub(super) fn new(key: String, issued: IssuedCertificate) -> Self {
        let IssuedCertificate { identity, certificate, authority, issued_s, expires_s, .. } =
            issued;
        let (certificate, authority) = (certificate.into(), authority.into());
        Self { identity, issued_s, expires_s, key, certificate, authority, server: None }
    }

    /// Reads the file.
    ///
    /// # Errors
    /// [`TlsFault::NotEnrolled`], [`TlsFault::Damaged`], [`TlsFault::Secret`].
    pub fn load(path: &Path, host: &TlsHost) -> Result<Self, TlsFault> {
        let text = match secret::read(path) {
            Err(error) if error.is_missing() => return Err(TlsFault::NotEnrolled(host.clone())),
            text => text?,
        };
        serde_json::from_str(&text)
            .map_err(|error| TlsFault::Damaged { path: path.to_owned(), what: error.to_string() })
    }

    /// Writes the file in place of an older one.
    ///
    /// # Errors
    /// [`TlsFault::Secret`].
    pub fn save(&self, path: &Path) -> Result<(), TlsFault> {
        let text =
            serde_json::to_string(self).map_err(|error| TlsFault::Setup(error.to_string()))?;
        Ok(secret::write(path, &(text + "\n"))?)
    }

    /// Returns the server's identity: the fingerprint of the authority that it had when this
    /// workstation was enrolled. It stays when the authority is rotated, and so does the data that
    /// is kept under it.
    #[must_use]
    pub fn server(&self) -> String {
        self.server.clone().unwrap_or_else(|| Fingerprint::of(&self.authority).to_string())
    }

    /// Returns the time until renewal is due: when a third of the certificate's validity is left.
    #[must_use]
    pub fn renewal_in(&self) -> Duration {
        let life_s = self.expires_s.saturating_sub(self.issued_s);
        let due = SystemTime::UNIX_EPOCH + Duration::from_secs(self.issued_s + life_s / 3 * 2);
        due.duration_since(SystemTime::now()).unwrap_or_default()
    }

    /// Returns true if the file is old enough for an early renewal.
    pub(super) fn may_be_replaced(path: &Path) -> bool {
        let age = path
            .metadata()
            .and_then(|metadata| metadata.modified())
            .ok()
            .and_then(|at| at.elapsed().ok());
        age.is_none_or(|age| age >= LEAST_AGE)
    }

    /// Returns the time until the certificate expires.
    #[must_use]
    pub fn expires_in(&self) -> Duration {
        let end = SystemTime::UNIX_EPOCH + Duration::from_secs(self.expires_s);
        end.duration_since(SystemTime::now()).unwrap_or_default()
    }
}
