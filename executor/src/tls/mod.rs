//! Authenticated connections: TLS 1.3 with certificates on both sides.
//!
//! * [`authority`]: the small certificate authority that signs both
//! * [`register`]: issued certificates, and unused tokens. It decides at every call, so that a
//!   revocation needs no restart
//! * `rotation`: replaces the authority, without an outage
//! * [`administer`]: the administrator's commands
//! * `serving`: the executor's own certificate, and the check of the peer's

pub mod administer;
pub mod authority;
pub mod register;
pub mod rotation;
pub mod serving;

use std::{os::unix::fs::MetadataExt as _, path::Path, sync::Arc, time::SystemTime};

pub use crate::config::{DEFAULT_DIRECTORY, TlsConfig};
pub use crate::error::TlsError;

use rustls::crypto::{CryptoProvider, aws_lc_rs};

/// The authority's certificate and key.
const AUTHORITY_FILE: &str = "ca.pem";
/// Certificate and key of the next authority, during a rotation.
const NEXT_AUTHORITY_FILE: &str = "ca-next.pem";
/// The executor's own certificate and key.
const SERVER_FILE: &str = "server.pem";
/// Certificates issued, and tokens.
const REGISTER_FILE: &str = "register.json";

/// Identity of a file's version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct FileVersion {
    inode: u64,
    size: u64,
    modified: (i64, i64),
    /// A change of these changes its readers.
    mode: u32,
    owner: u32,
}

impl FileVersion {
    /// Of the file at `path`, if it exists.
    fn of(path: &Path) -> Option<Self> {
        let metadata = path.symlink_metadata().ok()?;
        Some(Self {
            inode: metadata.ino(),
            size: metadata.size(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            mode: metadata.mode(),
            owner: metadata.uid(),
        })
    }
}

/// The cryptography used for all of this.
pub(crate) fn provider() -> Arc<CryptoProvider> {
    Arc::new(aws_lc_rs::default_provider())
}

/// Seconds since 1970.
pub(crate) fn now_s() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
