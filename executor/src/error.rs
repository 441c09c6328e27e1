//! The crate's one error type, and the refusal of a single run, which is an
//! answer to the gateway rather than a failure of the executor.

mod tls;

use std::{io, net::SocketAddr};

use posh_proto::executor::{Rejected, RunOutput, rejected, run_output};

pub use tls::TlsError;

use crate::{cgroup::CgroupError, level::Level};

/// An error that ends the executor, or keeps it from starting.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Every mistake of the configuration, one per line.
    #[error("{0}")]
    Config(String),
    /// Plain text was asked for on an address that others can reach.
    #[error(
        "refusing to serve plain text on {0}, which is not a loopback address: listen on \
         127.0.0.1, or pass --allow-plaintext (allow_plaintext = true) in a closed network"
    )]
    Plaintext(SocketAddr),
    /// The configuration names no user for commands, and the executor runs as root.
    #[error(
        "refusing to run everybody's commands as root: pass --user NAME (user = \"NAME\" of \
         [confinement]) with an account that has just the rights that they need, or --user root if \
         that is meant"
    )]
    RootUser,
    /// The machine can't confine commands as the configuration demands.
    #[error(
        "refusing to serve: the confinement `{require}` is required, and this machine reaches \
         {reached}; --require {reached_level} (require = \"{reached_level}\" of [confinement]) \
         accepts less"
    )]
    Confinement {
        /// The level demanded.
        require: Level,
        /// The level reached.
        reached_level: Level,
        /// Description of the level reached, and of what is missing.
        reached: String,
    },
    /// The cgroup that the configuration names can't be used.
    #[error(
        "{0}: `cgroup` of [confinement] names a cgroup of version 2 that is this program's to use"
    )]
    Cgroup(#[from] CgroupError),
    /// A system call failed.
    #[error("cannot {attempt}")]
    Io {
        /// The attempt, with the object's name.
        attempt: String,
        /// The system's answer.
        #[source]
        source: io::Error,
    },
    /// Certificates, keys or the register.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The gRPC server ended with an error.
    #[error("the gRPC server failed")]
    Serve(#[source] tonic::transport::Error),
}

/// Adds the attempt to an [`io::Error`].
pub(crate) trait AttemptExt<T> {
    /// Turns the error into [`Error::Io`].
    fn attempting(self, attempt: impl FnOnce() -> String) -> Result<T, Error>;
}

impl<T, E: Into<io::Error>> AttemptExt<T> for Result<T, E> {
    fn attempting(self, attempt: impl FnOnce() -> String) -> Result<T, Error> {
        self.map_err(|source| Error::Io { attempt: attempt(), source: source.into() })
    }
}

/// Reason why a run is refused; nothing of it has run.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{message}")]
pub(crate) struct Refusal {
    pub kind: rejected::Kind,
    pub message: String,
    /// The stage at fault, or 0.
    pub stage: u32,
}

impl Refusal {
    pub fn new(kind: rejected::Kind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), stage: 0 }
    }

    pub fn at(mut self, stage: u32) -> Self {
        self.stage = stage;
        self
    }

    pub fn protocol(message: impl Into<String>) -> Self {
        Self::new(rejected::Kind::Protocol, message)
    }
}

impl From<Refusal> for RunOutput {
    fn from(refusal: Refusal) -> Self {
        let Refusal { kind, message, stage } = refusal;
        Self {
            kind: Some(run_output::Kind::Rejected(Rejected { kind: kind.into(), message, stage })),
        }
    }
}
