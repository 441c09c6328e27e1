//! Reasons why a volume is not mounted, or can't be unmounted or read.

use std::{io, path::PathBuf};

use nix::errno::Errno;
use posh_volume::{fs::EarlierSessionsError, remote::CannotOpen};
use tokio::task::JoinError;

/// Reason why a volume is not mounted, or can't be unmounted or read; a sentence for the user.
#[derive(Debug, thiserror::Error)]
pub enum VolumeError {
    /// Not configured.
    #[error("no executor is named {name}; there are {others}")]
    NoExecutor {
        /// The requested name.
        name: String,
        /// The configured names.
        others: String,
    },
    /// The configuration has changed.
    #[error("the executor is not in the configuration")]
    ExecutorGone,
    /// The configuration mounts something else there.
    #[error("{} is a [[mount]] of {}", path.display(), file.display())]
    IsMount {
        /// The mount point.
        path: PathBuf,
        /// The configuration.
        file: PathBuf,
    },
    /// There is one.
    #[error("a volume is mounted on {} already", .0.display())]
    AlreadyMounted(PathBuf),
    /// There is none.
    #[error("no volume is mounted on {}", .0.display())]
    NoVolume(PathBuf),
    /// State of a volume that is being mounted.
    #[error("connecting")]
    Connecting,
    /// State of a volume that was unmounted.
    #[error("unmounted")]
    Unmounted,
    /// The volumes' threads can't be started.
    #[error("cannot start threads: {0}")]
    Threads(io::Error),
    /// The server did not open the export.
    #[error(transparent)]
    Server(#[from] CannotOpen),
    /// There is no connection.
    #[error("there is no connection")]
    NoConnection,
    /// The server holds an earlier session.
    #[error("an earlier session of this volume does not end: {0}; try again")]
    EarlierSession(Errno),
    /// It is not known which sessions the server must end.
    #[error(
        "the names of earlier sessions of this volume can't be read: {0}; repair that file, or \
         remove it a minute after the last gateway that used it has ended; what was closed here \
         is kept"
    )]
    SessionNames(io::Error),
    /// The journal of an earlier gateway can't be sent.
    #[error("what a former gateway has not sent can't be taken up: {0}; it is kept; try again")]
    Journal(Errno),
    /// The journal of an earlier gateway may have records, and can't be opened.
    #[error(
        "{error}; this is the journal with files that were closed here and may not be on the \
         server yet; repair that and mount again, or give them up: move {} away",
        directory.display()
    )]
    JournalUnreadable {
        /// The journal's directory.
        directory: PathBuf,
        /// Its error, with the path.
        error: io::Error,
    },
    /// mount(2) failed.
    #[error("cannot mount on {}: {error}", path.display())]
    Mount {
        /// The mount point.
        path: PathBuf,
        /// The system's error.
        error: io::Error,
    },
    /// FUSE's first messages failed.
    #[error("the kernel does not begin with {}: {error}", path.display())]
    Kernel {
        /// The mount point.
        path: PathBuf,
        /// The system's error.
        error: io::Error,
    },
    /// umount(2) failed.
    #[error("cannot unmount {}: {error}", path.display())]
    Unmount {
        /// The mount point.
        path: PathBuf,
        /// The system's error.
        error: io::Error,
    },
    /// Unmounted before the server had everything.
    #[error(
        "{} is unmounted, and the server does not have all that was written: what was closed in \
         new directories is sent when the export is mounted again; what was written to other files \
         last is lost", .0.display()
    )]
    Unsent(PathBuf),
    /// State of an unmounted volume with open files, and what the server lacks.
    #[error("files of it are open, and the server does not have all: {0}")]
    StillOpen(String),
    /// A target of recovery within the volume.
    #[error("{} is in the volume itself; name a directory elsewhere", .0.display())]
    WithinItself(PathBuf),
    /// A copy failed.
    #[error("could not copy all, and the volume still keeps them: {0}")]
    Recovery(io::Error),
    /// A task of the gateway failed.
    #[error(transparent)]
    Task(#[from] JoinError),
}

impl From<EarlierSessionsError> for VolumeError {
    fn from(error: EarlierSessionsError) -> Self {
        match error {
            EarlierSessionsError::Names(error) => Self::SessionNames(error),
            EarlierSessionsError::Store(errno) => Self::EarlierSession(errno),
        }
    }
}
