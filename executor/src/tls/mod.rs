//! Connections that prove who they are: TLS 1.3 with certificates on both sides.
//!
//! * [`authority`]: the small certificate authority that signs both
//! * [`register`]: the certificates that it has issued and the tokens that are good for one.
//!   What stands there decides, at every call, so that a revocation needs no restart
//! * `rotation`: one authority after another, without an outage
//! * [`administer`]: what the administrator's commands do
//! * `accept`: from a TCP connection to one that is let in, bounded
//! * `serving`: which certificate the executor shows, and what it makes of the peer's

pub mod accept;
pub mod administer;
pub mod authority;
pub mod register;
pub mod rotation;
pub mod serving;

use std::{
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    sync::Arc,
    time::SystemTime,
};

use rustls::crypto::{CryptoProvider, aws_lc_rs};

/// Where init, enroll and the executor keep all this unless told otherwise.
pub const DEFAULT_DIRECTORY: &str = "/etc/posh/tls";

/// The authority's certificate and key.
const AUTHORITY_FILE: &str = "ca.pem";
/// Those of the authority that follows it, during a rotation.
const NEXT_AUTHORITY_FILE: &str = "ca-next.pem";
/// The executor's own certificate and key.
const SERVER_FILE: &str = "server.pem";
/// Certificates issued, and tokens.
const REGISTER_FILE: &str = "register.json";

/// `[tls]` of the configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsConfig {
    /// What `posh-executor init` has made.
    pub directory: PathBuf,
}

/// What can go wrong with certificates, with what to do about it.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file of secrets can't be used.
    #[error(transparent)]
    Secret(#[from] posh_proto::secret::SecretError),
    /// Nothing was made yet.
    #[error("there are no certificates in {}; run: posh-executor init --dir {}", .0.display(), .0.display())]
    NotMade(PathBuf),
    /// There is an authority already, and gateways trust it.
    #[error(
        "there is an authority in {} already, which gateways trust; for a new server certificate run: posh-executor renew --dir {}",
        .0.display(), .0.display()
    )]
    Exists(PathBuf),
    /// A rotation was begun before.
    #[error(
        "a rotation of the authority in {} is under way; posh-executor list shows who has not renewed yet, and this ends it: \
         posh-executor rotate --finish --dir {}",
        .0.display(), .0.display()
    )]
    Rotating(PathBuf),
    /// There is no rotation to end.
    #[error("no rotation of the authority in {} is under way; begin one with posh-executor rotate --dir {}", .0.display(), .0.display())]
    NotRotating(PathBuf),
    /// The end of a rotation would lock these out.
    #[error(
        "these could not come any more: {0}\n\
         a workstation renews within the hour when it is connected, and what it has renewed counts for a day more; \
         wait, or revoke what nobody uses; with --force the rotation ends now, and who has not renewed must be enrolled anew"
    )]
    NotRenewed(String),
    /// A file does not hold what it should.
    #[error("{} is damaged ({what}); restore it, or remove the directory and start anew with posh-executor init", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// How.
        what: String,
    },
    /// A certificate could not be made.
    #[error("cannot make a certificate: {0}")]
    Make(String),
    /// The library will not have it.
    #[error("cannot set up TLS: {0}")]
    Setup(String),
    /// The register is full.
    #[error(
        "the register has {0} certificates, as many as there may be; run: posh-executor revoke NAME"
    )]
    Full(usize),
    /// One identity has all that it may.
    #[error(
        "`{0}` has {1} certificates, as many as one may have; run: posh-executor revoke {0} --certificate SHA256"
    )]
    FullOf(String, usize),
    /// The certificate that asks for another one has ended meanwhile.
    #[error("the certificate of `{0}` does not count any more, and gets no other one")]
    NotRenewable(String),
    /// Nothing to revoke.
    #[error(
        "`{identity}` has no certificate, or several, whose SHA-256 begins with {prefix}; posh-executor list shows them"
    )]
    NoSuchCertificate {
        /// Whose it should be.
        identity: String,
        /// How it was named.
        prefix: String,
    },
}

/// When a file is another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stamp {
    inode: u64,
    size: u64,
    modified: (i64, i64),
    /// Who may read it is told by these.
    mode: u32,
    owner: u32,
}

impl Stamp {
    /// Of what has that name, if anything has.
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

/// The cryptography that all of this uses.
pub(crate) fn provider() -> Arc<CryptoProvider> {
    Arc::new(aws_lc_rs::default_provider())
}

/// Seconds since 1970.
pub(crate) fn now_s() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
