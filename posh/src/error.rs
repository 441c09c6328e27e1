//! Errors of the front end, with their messages. Exit statuses are in `ending.rs`.

use std::{
    io,
    path::{Path, PathBuf},
};

use fs_mapper::config::{ConfigErrors, Mistake, NotAllowed};
use nix::errno::Errno;
use posh_proto::{
    runtime::RuntimeDirError,
    untrusted::{escaped, escaped_lines},
};

/// Every error of the front end, worded for its user.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The configuration file that was named can't be opened.
    #[error("can't read the configuration {}", named(path))]
    Config {
        /// As it was given.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// A question was asked that needs a gateway, and none is configured.
    #[error(
        "no configuration found at $POSH_CONFIG, ./mounts.toml (as `posh allow` allows it), \
         ~/.config/posh/mounts.toml or /etc/posh/mounts.toml; name one with --config FILE"
    )]
    NoConfig,
    /// The directory of the sockets can't be used.
    #[error(transparent)]
    RuntimeDir(#[from] RuntimeDirError),
    /// Users other than root and this one could listen on the socket.
    #[error(
        "the gateway's socket {} (POSH_SOCKET or --socket) is not trusted: {why}",
        named(socket)
    )]
    UntrustedSocket {
        /// The socket that was named.
        socket: PathBuf,
        /// Reason.
        why: String,
    },
    /// No process listens on the socket.
    #[error("no gateway answers at {}", named(socket))]
    NotRunning {
        /// The socket that was tried.
        socket: PathBuf,
        /// connect(2)'s error.
        source: io::Error,
    },
    /// Another user's process listens on the socket.
    #[error("{} is served by user {owner}, not by user {user}", named(socket))]
    ForeignGateway {
        /// The socket.
        socket: PathBuf,
        /// The other user.
        owner: u32,
        /// Us.
        user: u32,
    },
    /// posh-gateway is missing.
    #[error("posh-gateway is neither beside {} nor on PATH", named(.0))]
    NoGatewayProgram(PathBuf),
    /// A file or process that starting the gateway needs.
    #[error("can't start the gateway: {attempt}")]
    Start {
        /// The attempted action, with its object's name.
        attempt: String,
        /// The system's error.
        source: io::Error,
    },
    /// The gateway's own error at its start.
    #[error("{0}")]
    Refused(String),
    /// It ended, or reported nothing, before it was ready.
    #[error("the gateway {what}; its messages are in {}", named(log))]
    NotReady {
        /// Its behaviour instead.
        what: &'static str,
        /// Its log file.
        log: PathBuf,
    },
    /// The process that starts the gateway has printed the reason.
    #[error("the gateway for {} did not start", named(.0))]
    DidNotStart(PathBuf),
    /// A call failed.
    #[error("the gateway at {} {attempt}: {}", named(socket), words(status))]
    Call {
        /// The socket.
        socket: PathBuf,
        /// "could not report", ...
        attempt: &'static str,
        /// gRPC's error.
        status: Box<tonic::Status>,
    },
    /// A session could not be opened.
    #[error("the gateway at {} could not open a session: {what}", named(socket))]
    NoSession {
        /// Its gRPC socket.
        socket: PathBuf,
        /// Its reason, or its behaviour instead.
        what: String,
    },
    /// A directory that can't be a volume's mount point.
    #[error("{} can't be a mount point", named(path))]
    MountPoint {
        /// As it was given.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// A volume that a gateway has left behind can't be unmounted.
    #[error("can't unmount {}", named(path))]
    Unmount {
        /// Where it is.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The shell is not on PATH.
    #[error("{0} is not found on PATH")]
    NoShell(&'static str),
    /// The shell was found but can't be executed.
    #[error("can't run {}", named(path))]
    Exec {
        /// The shell's path.
        path: PathBuf,
        /// execve(2)'s error.
        source: Errno,
    },
    /// posh-cli can't be executed.
    #[error("can't run {}, which is installed with posh", named(path))]
    NoCli {
        /// Where it should be.
        path: PathBuf,
        /// execve(2)'s error.
        source: Errno,
    },
    /// A system call on our own process that should not fail.
    #[error("can't {attempt}")]
    System {
        /// The attempted action.
        attempt: &'static str,
        /// The system's error.
        source: Errno,
    },
    /// Words that can't be given to a program.
    #[error("a word contains a NUL byte, which no program can be given")]
    NulInArgument,
    /// The text to be explained is no shell program.
    #[error("can't parse the pipeline: {0}")]
    Parse(String),
    /// The file of `--trace` can't be made or written.
    #[error("can't write the trace {}", named(path))]
    Trace {
        /// As it was given.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// Writing the answer failed (a full disk, a closed pipe).
    #[error("can't write the answer")]
    Output(#[source] io::Error),
    /// A directory's file that was not allowed, or could not be denied.
    #[error(transparent)]
    Allow(#[from] fs_mapper::config::NotAllowed),
    /// Mistakes in the configuration.
    #[error(transparent)]
    Mistakes(#[from] ConfigErrors),
    /// Reason why nothing was copied to another machine.
    #[error("{0}")]
    Attach(String),
    /// Reason why this workstation got no certificate.
    #[error("{0}")]
    Enroll(String),
    /// The annotations crate's own error.
    #[error("{0}")]
    Annotations(String),
}

impl Error {
    /// Returns true if the call failed because its connection was lost. An error that the gateway
    /// itself reports has no source.
    #[must_use]
    pub fn is_lost_connection(&self) -> bool {
        matches!(
            self,
            Self::Call { status, .. } if std::error::Error::source(status.as_ref()).is_some()
        )
    }

    /// The message and its causes in one line, to be put after `posh: `; a configuration's mistakes
    /// in a line each. Escaped: it has file names and messages of gateways and servers.
    ///
    /// Invariant: line breaks are our own, between mistakes: each mistake is escaped by itself, and
    /// a gateway has done so in its message ([`mistake_lines`]).
    #[must_use]
    pub fn chain(&self) -> String {
        match self {
            Self::Mistakes(mistakes) | Self::Allow(NotAllowed::Mistakes(mistakes)) => {
                return mistake_lines(mistakes);
            }
            Self::Refused(said) => return escaped_lines(said).into_owned(),
            _ => {}
        }
        let mut text = self.to_string();
        let mut cause = std::error::Error::source(self);
        while let Some(error) = cause {
            text.push_str(": ");
            text.push_str(&error.to_string());
            cause = error.source();
        }
        escaped(&text).into_owned()
    }
}

/// The mistakes of a configuration, one a line, escaped.
#[must_use]
pub fn mistake_lines(mistakes: &ConfigErrors) -> String {
    let line = |mistake: &Mistake| escaped(&mistake.to_string()).into_owned();
    mistakes.mistakes().iter().map(line).collect::<Vec<_>>().join("\n")
}

/// A path in a message, with its line breaks escaped.
#[must_use]
pub fn named(path: &Path) -> String {
    escaped(&path.to_string_lossy()).into_owned()
}

/// Message of a status; for a mere "transport error", that of its deepest source.
fn words(status: &tonic::Status) -> String {
    let mut deepest = std::error::Error::source(status);
    while let Some(cause) = deepest.and_then(std::error::Error::source) {
        deepest = Some(cause);
    }
    deepest.map_or_else(|| status.message().to_owned(), ToString::to_string)
}

#[cfg(test)]
mod tests {
    use fs_mapper::config::Config;

    use super::*;

    #[test]
    fn a_name_with_a_line_break_forges_no_line() {
        let path = || PathBuf::from("/d/f\nposh: all is well\u{1b}[2J");
        let shown = r"/d/f\nposh: all is well\u{1b}[2J";
        let source = || io::Error::other("no\nposh: all is well");
        let errors = [
            Error::Config { path: path(), source: source() },
            Error::Trace { path: path(), source: source() },
            Error::Exec { path: path(), source: nix::errno::Errno::ENOENT },
            Error::from(Config::allow(&path()).unwrap_err()),
            Error::Attach(format!("can't read {}", path().display())),
            Error::RuntimeDir(RuntimeDirError::NotADirectory(path())),
        ];
        for error in errors {
            let said = error.chain();
            assert!(said.contains(shown) && !said.contains('\n'), "{said}");
        }
    }
}
