//! Errors of `tls`.

use std::path::PathBuf;

/// Errors with certificates, each with its remedy.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file of secrets can't be used.
    #[error(transparent)]
    Secret(#[from] posh_proto::secret::SecretError),
    /// `posh-executor init` was not run yet.
    #[error(
        "there are no certificates in {}; run: posh-executor init --dir {}",
        .0.display(), .0.display()
    )]
    NotMade(PathBuf),
    /// The directory is another user's, who could have put anything there.
    #[error(
        "{} belongs to the user with the number {owner}, who has to run this command: sudo -u \
         '#{owner}' posh-executor ...",
        directory.display()
    )]
    AnotherUsers {
        /// The directory.
        directory: PathBuf,
        /// Its owner.
        owner: u32,
    },
    /// There is an authority already, and gateways trust it.
    #[error(
        "there is an authority in {} already, which gateways trust; for a new server certificate \
         run: posh-executor renew --dir {}",
        .0.display(), .0.display()
    )]
    Exists(PathBuf),
    /// A rotation was begun before.
    #[error(
        "a rotation of the authority in {} is under way; posh-executor list shows who has not \
         renewed yet, and this ends it: posh-executor rotate --finish --dir {}",
        .0.display(), .0.display()
    )]
    Rotating(PathBuf),
    /// There is no rotation to end.
    #[error(
        "no rotation of the authority in {} is under way; begin one with posh-executor rotate \
         --dir {}",
        .0.display(), .0.display()
    )]
    NotRotating(PathBuf),
    /// The end of a rotation would lock these out.
    #[error(
        "these could not come any more: {0}\n\
         a workstation renews within the hour when it is connected, and what it has renewed counts \
         for a day more; wait, or revoke what nobody uses; with --force the rotation ends now, and \
         who has not renewed must be enrolled anew"
    )]
    NotRenewed(String),
    /// A file has invalid content.
    #[error(
        "{} is damaged ({what}); restore it, or remove the directory and start anew with \
         posh-executor init",
        path.display()
    )]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The damage.
        what: String,
    },
    /// A certificate could not be made.
    #[error("cannot make a certificate: {0}")]
    Make(String),
    /// rustls refuses the configuration.
    #[error("cannot set up TLS: {0}")]
    Setup(String),
    /// The register is full.
    #[error(
        "the register has {0} certificates, as many as there may be; run: posh-executor revoke NAME"
    )]
    Full(usize),
    /// One identity has as many certificates as it may.
    #[error(
        "`{0}` has {1} certificates, as many as one may have; run: posh-executor revoke {0} \
         --certificate SHA256"
    )]
    FullOf(String, usize),
    /// The certificate that asks for its successor has become invalid meanwhile.
    #[error("the certificate of `{0}` does not count any more, and gets no other one")]
    NotRenewable(String),
    /// All certificates that were got over one enrolment are in use.
    #[error(
        "`{0}` has as many certificates in use from one enrolment as there may be; take back what \
         nobody should have: posh-executor revoke {0} --certificate SHA256"
    )]
    AllInUse(String),
    /// No certificate to revoke.
    #[error(
        "`{identity}` has no certificate, or several, whose SHA-256 begins with {prefix}; \
         posh-executor list shows them"
    )]
    NoSuchCertificate {
        /// Identity that was given.
        identity: String,
        /// Prefix that was given.
        prefix: String,
    },
}
