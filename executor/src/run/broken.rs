//! Failures of what this program does for a run that has started.

use std::io;

use tokio::task::JoinError;

use crate::own_mounts::Unpublished;

/// Data of the commands was lost in this program.
#[derive(Debug, thiserror::Error)]
pub enum BrokenStream {
    /// The outputs of several commands can't be moved into one.
    #[error("cannot join the outputs of commands: {0}")]
    Join(#[source] io::Error),
    /// An output can't be read to its end.
    #[error("cannot read a command's output: {0}")]
    Output(#[source] io::Error),
    /// The wiring names a pipe or pty that was not made.
    #[error("no pipe or pty {0}")]
    NoPipe(u32),
    /// The runtime can't wait for an end.
    #[error("cannot wait for pipe or pty {id}: {error}")]
    Unready {
        /// The pipe or pty.
        id: u32,
        /// The system's error.
        #[source]
        error: io::Error,
    },
    /// The task of a stream ended early.
    #[error(transparent)]
    Task(#[from] JoinError),
}

/// The exit of a command can't be reported.
#[derive(Debug, thiserror::Error)]
pub enum FarewellError {
    /// Its writes did not get beyond this machine.
    #[error(transparent)]
    Unpublished(#[from] Unpublished),
    /// The task of the report ended early.
    #[error(transparent)]
    Task(#[from] JoinError),
}

/// A client sent what it must not send to an inlet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum InletViolation {
    /// It had said that there would be no more.
    #[error("bytes after the end of an inlet")]
    AfterEnd,
    /// It has not so much credit.
    #[error("an inlet has credit for {credit_bytes} bytes, and more were sent")]
    Credit {
        /// The credit.
        credit_bytes: usize,
    },
}
