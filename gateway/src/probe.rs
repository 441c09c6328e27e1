//! A file that is made through an sshfs mount, and read on an executor: proof that its directory is
//! the same on both, and of what the mount's sftp service makes of new files.
//!
//! Invariant: what proves it is the file's content, which nobody else can tell: random, told to
//! nobody, and readable by the file's owner only. Its name is no secret: whoever lists the
//! directory sees it.

use std::{
    ffi::OsString,
    fs,
    os::unix::ffi::OsStrExt as _,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use fs_mapper::{
    Mount,
    sshfs::{ProbeError, ProbeFile},
};
use posh_proto::executor::{FileFingerprint, FingerprintRequest};

use crate::executors::{Executor, ExecutorConnection};

/// Limit for each answer of the mount and of the executor.
const LIMIT: Duration = Duration::from_secs(10);

/// An executor, and its connection.
#[derive(Clone, Copy)]
pub struct Connected<'a> {
    pub executor: &'a Arc<Executor>,
    pub connection: &'a Arc<ExecutorConnection>,
}

/// Reason for which a directory is not shown to be the executor's.
#[derive(Debug, Clone, thiserror::Error)]
pub enum NotProved {
    #[error("{} can't be changed through the mount ({why})", directory.display())]
    NotMade { directory: PathBuf, why: String },
    #[error("the executor does not say what it sees ({0})")]
    NoAnswer(String),
    #[error("the executor does not read what was written in {}", .0.display())]
    NotThere(PathBuf),
    #[error("{} stays there, since it can't be removed through the mount ({why})", left.display())]
    NotRemoved { left: PathBuf, why: String },
}

/// A file that was made through a mount and read by an executor.
#[derive(Debug, Clone, Copy)]
pub struct SeenFile {
    /// Permissions that the mount's server has cleared, of all.
    pub cleared: u32,
    /// Its owner on the server.
    pub owner: FileOwner,
    /// Owner of a file that the executor's commands make there.
    pub owner_of_commands: FileOwner,
    /// The directory's default ACL, not a umask, decides on permissions; true if unknown.
    pub has_default_acl: bool,
    /// Others may put another directory in the place of its directory on the server.
    pub is_exchangeable: bool,
}

/// User and group, as numbers of the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileOwner {
    pub user: u32,
    pub group: u32,
}

/// Makes a file in a directory of a mount, asks the executor for it, and removes it.
///
/// # Errors
/// The directory is not shown to be the executor's.
pub async fn prove(
    to: Connected<'_>,
    mount: &Mount,
    directory: &Path,
) -> Result<SeenFile, NotProved> {
    let not_made = |why: String| NotProved::NotMade { directory: directory.to_owned(), why };
    // random(4); 122 bits each.
    let uuid = || {
        let read = fs::read_to_string("/proc/sys/kernel/random/uuid");
        read.map(|text| text.trim().to_owned()).map_err(|error| not_made(error.to_string()))
    };
    let (name, content) = (OsString::from(format!(".posh-{}", uuid()?)), uuid()?);
    let (shares, place) = (&to.executor.shares, mount.path.as_path());
    let (theirs, within) = (mount.clone(), directory.to_owned());
    let (called, written) = (name.clone(), content.clone());
    let make = move || {
        let root = theirs.open_root().map_err(ProbeError::NotMade)?;
        ProbeFile::make(&root, &within, &called, written.as_bytes())
    };
    let left = directory.join(&name);
    let made = match shares.ask(place, LIMIT, make).await {
        Ok(Ok(made)) => made,
        Ok(Err(ProbeError::NotMade(error))) => return Err(not_made(error.to_string())),
        Ok(Err(ProbeError::NotRemoved(error))) => {
            return Err(NotProved::NotRemoved { left, why: error.to_string() });
        }
        Err(unanswered) => return Err(not_made(unanswered.to_string())),
    };
    let cleared = made.cleared();
    let seen = ask(to, mount, directory, &name, &content).await;
    let removed = shares.ask(place, LIMIT, move || made.remove()).await;
    let removed = removed.map_err(|unanswered| unanswered.to_string());
    match removed.and_then(|removed| removed.map_err(|error| error.to_string())) {
        Ok(()) => seen.map(|seen| SeenFile { cleared, ..seen }),
        Err(why) => Err(NotProved::NotRemoved { left, why }),
    }
}

async fn ask(
    to: Connected<'_>,
    mount: &Mount,
    directory: &Path,
    name: &OsString,
    content: &str,
) -> Result<SeenFile, NotProved> {
    let owner = mount.owner.as_ref();
    let below = directory.strip_prefix(mount.path.as_path()).unwrap_or(directory);
    let request = owner.map(|owner| FingerprintRequest {
        export: owner.export.clone(),
        sub_path: Bytes::copy_from_slice(owner.sub_path.join(below).as_os_str().as_bytes()),
        name: Bytes::copy_from_slice(name.as_bytes()),
    });
    let mut client = to.connection.client.clone();
    let asked = client.fingerprint(request.unwrap_or_default());
    let reply = match tokio::time::timeout(LIMIT, asked).await {
        Ok(Ok(reply)) => reply,
        Ok(Err(status)) => return Err(NotProved::NoAnswer(status.message().to_owned())),
        Err(_) => return Err(NotProved::NoAnswer("it does not answer".to_owned())),
    };
    let is_it = |entry: &&FileFingerprint| {
        entry.name == name.as_bytes() && entry.content == content.as_bytes()
    };
    match reply.entries.iter().find(is_it) {
        Some(seen) => Ok(SeenFile {
            cleared: 0,
            owner: FileOwner { user: seen.user, group: seen.group },
            owner_of_commands: FileOwner { user: reply.user, group: reply.group },
            has_default_acl: reply.has_default_acl,
            is_exchangeable: reply.exchangeable,
        }),
        None => Err(NotProved::NotThere(directory.to_owned())),
    }
}
