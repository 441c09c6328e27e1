//! What enrolling has left on this workstation: a key that never leaves it, a certificate
//! for it, and whom to believe. One file for each executor, only for its owner.

use std::{
    path::Path,
    time::{Duration, SystemTime},
};

use fs_mapper::config::TlsHost;
use posh_proto::{executor::IssuedCertificate, secret, token::Fingerprint};
use serde::{Deserialize, Serialize};

use super::Fault;

/// However an executor may change its authority, it has no others made sooner than this.
const LEAST_AGE: Duration = Duration::from_secs(3600);

/// The file.
#[derive(Clone, Serialize, Deserialize)]
pub struct Credentials {
    /// What the executor calls this workstation.
    pub identity: String,
    /// From when the certificate is good, seconds since 1970.
    pub issued_s: u64,
    /// Until when.
    pub expires_s: u64,
    /// The private key, PEM.
    pub key: String,
    /// DER.
    pub certificate: Vec<u8>,
    /// Who signs the executor's certificate, DER.
    pub authority: Vec<u8>,
    /// The server's identity, if it is older than this authority: see [`Credentials::server`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub server: Option<String>,
}

impl Credentials {
    /// Of a key and what was signed for it.
    pub(super) fn new(key: String, issued: IssuedCertificate) -> Self {
        let IssuedCertificate { identity, certificate, authority, issued_s, expires_s, .. } =
            issued;
        let (certificate, authority) = (certificate.into(), authority.into());
        Self { identity, issued_s, expires_s, key, certificate, authority, server: None }
    }

    /// Reads them.
    ///
    /// # Errors
    /// [`Fault::NotEnrolled`], or why they can't be used.
    pub fn load(path: &Path, host: &TlsHost) -> Result<Self, Fault> {
        let text = match secret::read(path) {
            Err(error) if error.is_missing() => return Err(Fault::NotEnrolled(host.clone())),
            text => text?,
        };
        serde_json::from_str(&text)
            .map_err(|error| Fault::Damaged { path: path.to_owned(), what: error.to_string() })
    }

    /// Writes them in place of older ones.
    ///
    /// # Errors
    /// [`Fault::Secret`].
    pub fn save(&self, path: &Path) -> Result<(), Fault> {
        let text = serde_json::to_string(self).map_err(|error| Fault::Setup(error.to_string()))?;
        Ok(secret::write(path, &(text + "\n"))?)
    }

    /// The server behind the address: the fingerprint of the authority that it had when this
    /// workstation was enrolled there. What is got by a connection that these credentials have
    /// proved stays that server's.
    #[must_use]
    pub fn server(&self) -> String {
        self.server.clone().unwrap_or_else(|| Fingerprint::of(&self.authority).to_string())
    }

    /// How long until it is time for others: when a third of their life is left.
    #[must_use]
    pub fn renewal_in(&self) -> Duration {
        let life_s = self.expires_s.saturating_sub(self.issued_s);
        let due = SystemTime::UNIX_EPOCH + Duration::from_secs(self.issued_s + life_s / 3 * 2);
        due.duration_since(SystemTime::now()).unwrap_or_default()
    }

    /// Whether the file is so old that others may be got before it is time.
    pub(super) fn may_be_replaced(path: &Path) -> bool {
        let age = path
            .metadata()
            .and_then(|metadata| metadata.modified())
            .ok()
            .and_then(|at| at.elapsed().ok());
        age.is_none_or(|age| age >= LEAST_AGE)
    }

    /// Until when they are good.
    #[must_use]
    pub fn expires_in(&self) -> Duration {
        let end = SystemTime::UNIX_EPOCH + Duration::from_secs(self.expires_s);
        end.duration_since(SystemTime::now()).unwrap_or_default()
    }
}
