//! What can go wrong in the front end, and the words for it. Exit statuses are
//! chosen in `ending.rs`, not here.

use std::{
    io,
    path::{Path, PathBuf},
};

use nix::errno::Errno;
use posh_proto::{
    runtime::RuntimeDirError,
    untrusted::{escaped, escaped_lines},
};

/// Every failure of the front end, worded for its user.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The configuration file that was named can't be opened.
    #[error("can't read the configuration {}", named(path))]
    Config {
        /// As it was given.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A question was asked that needs a gateway, and none is configured.
    #[error(
        "no configuration found at $POSH_CONFIG, ./mounts.toml (as `posh allow` allows it), ~/.config/posh/mounts.toml \
         or /etc/posh/mounts.toml; name one with --config FILE"
    )]
    NoConfig,
    /// The directory of the sockets can't be used.
    #[error(transparent)]
    RuntimeDir(#[from] RuntimeDirError),
    /// Others than root and the user could listen there.
    #[error(
        "the gateway's socket {} (POSH_SOCKET or --socket) is not trusted: {why}",
        named(socket)
    )]
    UntrustedSocket {
        /// The socket that was named.
        socket: PathBuf,
        /// What is wrong.
        why: String,
    },
    /// Nobody listens on the socket.
    #[error("no gateway answers at {}", named(socket))]
    NotRunning {
        /// The socket that was tried.
        socket: PathBuf,
        /// What connect(2) said.
        source: io::Error,
    },
    /// Somebody else listens on the socket.
    #[error("{} is served by user {owner}, not by user {user}", named(socket))]
    ForeignGateway {
        /// The socket.
        socket: PathBuf,
        /// The other user.
        owner: u32,
        /// Us.
        user: u32,
    },
    /// The program itself is missing.
    #[error("posh-gateway is neither beside {} nor on PATH", named(.0))]
    NoGatewayProgram(PathBuf),
    /// A file or process that starting the gateway needs.
    #[error("can't start the gateway: {attempt}")]
    Start {
        /// What was attempted, with the object's name.
        attempt: String,
        /// What the system said.
        source: io::Error,
    },
    /// The gateway's own words on why it did not start.
    #[error("{0}")]
    Refused(String),
    /// It ended, or said nothing, before it was ready.
    #[error("the gateway {what}; its messages are in {}", named(log))]
    NotReady {
        /// What it did instead.
        what: &'static str,
        /// Its log file.
        log: PathBuf,
    },
    /// The process that starts the gateway has said why it failed.
    #[error("the gateway for {} did not start", named(.0))]
    DidNotStart(PathBuf),
    /// A call failed.
    #[error("the gateway at {} {attempt}: {}", named(socket), words(status))]
    Call {
        /// The socket.
        socket: PathBuf,
        /// "could not report", ...
        attempt: &'static str,
        /// What gRPC said.
        status: Box<tonic::Status>,
    },
    /// A session was asked for.
    #[error("the gateway at {} could not open a session: {what}", named(socket))]
    NoSession {
        /// Its gRPC socket.
        socket: PathBuf,
        /// What it said, or did instead.
        what: String,
    },
    /// A place for a volume that can't be one.
    #[error("{} can't be a mount point", named(path))]
    MountPoint {
        /// As it was given.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A volume that a gateway has left behind does not go.
    #[error("can't unmount {}", named(path))]
    Unmount {
        /// Where it is.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The shell is not on PATH.
    #[error("{0} is not found on PATH")]
    NoShell(&'static str),
    /// The shell was found but would not run.
    #[error("can't run {}", named(path))]
    Exec {
        /// The shell's path.
        path: PathBuf,
        /// What execve(2) said.
        source: Errno,
    },
    /// The program for all but plain lines can't be run.
    #[error("can't run {}, which is installed with posh", named(path))]
    NoCli {
        /// Where it should be.
        path: PathBuf,
        /// What execve(2) said.
        source: Errno,
    },
    /// A system call on our own process that should not fail.
    #[error("can't {attempt}")]
    System {
        /// What was attempted.
        attempt: &'static str,
        /// What the system said.
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
        /// What the system said.
        source: io::Error,
    },
    /// Writing the answer failed (a full disk, a closed pipe).
    #[error("can't write the answer")]
    Output(#[source] io::Error),
    /// A directory's file that was not allowed, or could not be denied.
    #[error(transparent)]
    Allow(#[from] fs_mapper::config::NotAllowed),
    /// Why nothing was copied to another machine.
    #[error("{0}")]
    Attach(String),
    /// Why this workstation got no certificate.
    #[error("{0}")]
    Enroll(String),
    /// The annotations crate's own words.
    #[error("{0}")]
    Annotations(String),
}

impl Error {
    /// A call that its connection has not outlived: what a gateway itself says has no further
    /// cause.
    #[must_use]
    pub fn is_lost_connection(&self) -> bool {
        matches!(self, Self::Call { status, .. } if std::error::Error::source(status.as_ref()).is_some())
    }

    /// The message and its causes in one line, as `posh: ` is followed by, fit to be shown: it
    /// holds names of files, and what gateways and servers have said.
    #[must_use]
    pub fn chain(&self) -> String {
        let mut text = self.to_string();
        let mut cause = std::error::Error::source(self);
        while let Some(error) = cause {
            text.push_str(": ");
            let words = error.to_string();
            // The system has no line breaks of its own; where it says what is wrong with a file,
            // names have.
            text.push_str(&if error.is::<io::Error>() {
                escaped(&words)
            } else {
                words.as_str().into()
            });
            cause = error.source();
        }
        escaped_lines(&text).into_owned()
    }
}

/// A name in a message, which is one line: its line breaks are none of ours.
fn named(path: &Path) -> String {
    escaped(&path.to_string_lossy()).into_owned()
}

/// What a status says; where it is only "transport error", what lies below it.
fn words(status: &tonic::Status) -> String {
    let mut deepest = std::error::Error::source(status);
    while let Some(cause) = deepest.and_then(std::error::Error::source) {
        deepest = Some(cause);
    }
    deepest.map_or_else(|| status.message().to_owned(), ToString::to_string)
}

#[cfg(test)]
mod tests {
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
        ];
        for error in errors {
            let said = error.chain();
            assert!(said.contains(shown) && !said.contains('\n'), "{said}");
        }
    }
}
