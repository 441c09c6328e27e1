//! Errors of making and using a laboratory.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// The result of everything in this crate that can fail.
pub type Result<T> = std::result::Result<T, LabError>;

/// A fault of the laboratory itself, never of what is tested in it.
#[derive(Debug, thiserror::Error)]
pub enum LabError {
    /// A system call on behalf of a host failed.
    #[error("cannot {action}")]
    System {
        /// The attempted action, as words after "cannot".
        action: String,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// A set-up command ended with a non-zero status.
    #[error("{command} failed on {host}: {stderr}")]
    Command {
        /// The command line.
        command: String,
        /// Where it ran.
        host: String,
        /// Its standard error.
        stderr: String,
    },
    /// An expected event did not happen.
    #[error("{what} did not happen within {after:?}: {detail}")]
    Timeout {
        /// The event.
        what: String,
        /// Timeout.
        after: Duration,
        /// State at the timeout.
        detail: String,
    },
    /// A program of this workspace does not exist.
    #[error("{0} does not exist; build it first with `cargo build --workspace`")]
    NotBuilt(PathBuf),
    /// Namespaces, mounts and /dev/fuse need root.
    #[error("a laboratory needs root: {0}")]
    NeedsRoot(String),
    /// Case files have faults.
    #[error("some cases cannot be read:\n{0}")]
    Cases(CaseFaults),
    /// A report could not be understood.
    #[error("cannot read posh's report: {0}")]
    Report(String),
}

/// All faults of case files.
#[derive(Debug, thiserror::Error)]
#[error("{}", .0.join("\n"))]
pub struct CaseFaults(pub Vec<String>);

/// Adds the attempted action to an [`io::Error`] or errno.
pub trait AttemptExt<T> {
    /// `action` follows "cannot".
    fn attempt(self, action: impl FnOnce() -> String) -> Result<T>;
}

impl<T, E: Into<io::Error>> AttemptExt<T> for std::result::Result<T, E> {
    fn attempt(self, action: impl FnOnce() -> String) -> Result<T> {
        self.map_err(|e| LabError::System { action: action(), source: e.into() })
    }
}
