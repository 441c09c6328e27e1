//! sshfs mounts that the configuration does not name. The mount's source has the login, and its
//! daemon's arguments have ssh's options. They become executors and mounts like configured ones. If
//! anything about a mount is unknown, its commands run locally and the reason says so.

mod arguments;
mod connection;
mod probe;
mod processes;
mod shown;

use crate::config::{
    Address, AddressFault, Config, ExecutorConfig, ExecutorOrigin, Login, MountConfig, Position,
    server_directory,
};
use crate::daemons::Daemons;
use crate::foreign::{self, Foreign};
use crate::mountinfo::{MountEntry, MountInfo};
use crate::path::ExecutorName;
use arguments::{ArgumentsFault, SshSettings};
pub use connection::{SshfsConnections, SshfsProcesses, servers_of};
pub use probe::{ProbeError, ProbeFile};
pub use shown::{DirectoryLook, FileLook, FileSystemLook, seconds};
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// Type of sshfs mounts in mountinfo.
pub(crate) const FS_TYPE: &str = "fuse.sshfs";

/// A mount that is not used, and the reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeftOut {
    /// The mount point.
    pub path: PathBuf,
    /// Reason, for the user.
    pub reason: String,
}

/// Reason why a mount's owner is not known, about the mount.
#[derive(Debug, thiserror::Error)]
enum OwnerFault {
    #[error("its source is not UTF-8")]
    SourceNotUtf8,
    #[error("its source {0:?} is not of the form [user@]host:path")]
    SourceForm(String),
    #[error("its sshfs is not found among the running processes")]
    NoProcess,
    /// A process was not looked at, since it has other rights.
    #[error(
        "its sshfs is not found among the running processes that run with our own rights; another \
         one runs with {0}"
    )]
    NoProcessOfOurRights(&'static str),
    #[error("several sshfs processes may serve it")]
    SeveralProcesses,
    #[error(transparent)]
    Arguments(#[from] ArgumentsFault),
    #[error(transparent)]
    Login(#[from] AddressFault),
    #[error("its directory {directory:?} {what}")]
    Directory { directory: String, what: &'static str },
    #[error(transparent)]
    Foreign(#[from] Foreign),
}

/// Returns true if this user has an sshfs mount.
pub fn is_mounted(info: &MountInfo) -> bool {
    own_mounts(info).next().is_some()
}

/// Adds this user's unnamed sshfs mounts to the configuration, unless it says `sshfs = "off"`. Also
/// returns the mounts that are left out. Reads processes only if there are sshfs mounts.
///
/// Says of each sshfs mount if it passes on owners: it can be made to show at once what changes on
/// the server. That takes two things.
///
/// An owner which the server's executor has told can be set through it. Through an unnamed one: its
/// login is the executor's, so that the server's kernel lets it set nobody but itself, unless it is
/// root; and root is shown as what it is, or as this user, which sshfs translates back. Through a
/// named one, whose login is not known: no number is translated, and nothing but sftp-server(8) is
/// asked, so that exactly what was told is set.
///
/// And the kernel remembers no longer than by default, after which it asks sshfs.
pub fn adopted(config: &Config, info: &MountInfo) -> (Config, Vec<LeftOut>) {
    let (mut with, mut left_out) = (config.clone(), Vec::new());
    if config.gateway.sshfs && unnamed(config, info).next().is_some() {
        (with, left_out) = adopt(config, info, &Daemons::running(processes::PROGRAMS, &[]));
    }
    let named: Vec<_> = info
        .visible()
        .into_iter()
        .filter(|entry| entry.fs_type == FS_TYPE && entry.root == Path::new("/"))
        .filter(|entry| config.mounts.iter().any(|mount| mount.path == entry.mount_point))
        .collect();
    if !named.is_empty() {
        // Arguments of root's processes are as good: they are only looked at.
        let daemons = Daemons::running(processes::PROGRAMS, &[0]);
        for entry in named.into_iter().filter(|entry| shows_changes(entry, &daemons)) {
            let its = with.mounts.iter_mut().filter(|mount| mount.path == entry.mount_point);
            its.for_each(|mount| mount.shows_changes = true);
        }
    }
    (with, left_out)
}

/// Returns true if a named mount's sshfs is known to pass on owners; see [`adopted`].
fn shows_changes(entry: &MountEntry, daemons: &Daemons) -> bool {
    let settings = entry.source.to_str().ok_or(OwnerFault::SourceNotUtf8);
    let settings = settings.and_then(|source| settings_of(entry, source, daemons));
    settings.is_ok_and(|settings| !settings.translates_login && !settings.makes_kernel_remember)
}

/// Like `adopted`, but with given processes.
fn adopt(config: &Config, info: &MountInfo, daemons: &Daemons) -> (Config, Vec<LeftOut>) {
    let mut with = config.clone();
    let mut left_out = Vec::new();
    for entry in unnamed(config, info) {
        match source(entry, daemons) {
            Ok(MountSource { login, directory, settings }) => {
                let executor = executor(&mut with.executors, login, settings.ssh_command);
                with.mounts.push(MountConfig {
                    path: entry.mount_point.clone(),
                    executor,
                    export: directory,
                    sub_path: PathBuf::new(),
                    coherence: None,
                    shows_changes: !settings.makes_kernel_remember,
                    position: Position::default(),
                });
            }
            Err(fault) => {
                let path = entry.mount_point.clone();
                left_out.push(LeftOut { path, reason: fault.to_string() });
            }
        }
    }
    (with, left_out)
}

fn unnamed<'i>(config: &'i Config, info: &'i MountInfo) -> impl Iterator<Item = &'i MountEntry> {
    own_mounts(info)
        .filter(|entry| !config.mounts.iter().any(|mount| mount.path == entry.mount_point))
}

/// Another user's mount uses that user's keys, which we must not use.
fn own_mounts(info: &MountInfo) -> impl Iterator<Item = &MountEntry> {
    let is_own = |entry: &&MountEntry| foreign::user(entry) == Some(foreign::own_user());
    let whole = |entry: &&MountEntry| entry.fs_type == FS_TYPE && entry.root == Path::new("/");
    info.visible().into_iter().filter(whole).filter(is_own)
}

/// Source of an sshfs mount, with its options.
struct MountSource {
    login: Login,
    /// On the server, in the form of an export.
    directory: String,
    settings: SshSettings,
}

fn source(entry: &MountEntry, daemons: &Daemons) -> Result<MountSource, OwnerFault> {
    Foreign::check(entry)?;
    let source = entry.source.to_str().ok_or(OwnerFault::SourceNotUtf8)?;
    let settings = settings_of(entry, source, daemons)?;
    let (login, directory) = parts(source)?;
    let login = Login::new(login.0, login.1, settings.port)?;
    Ok(MountSource { login, directory, settings })
}

/// Settings in the arguments of a mount's sshfs.
fn settings_of(
    entry: &MountEntry,
    source: &str,
    daemons: &Daemons,
) -> Result<SshSettings, OwnerFault> {
    let names_it =
        |words: &[OsString]| processes::of_mount(words, source, &entry.mount_point).is_some();
    let serving = daemons.serving(entry, &names_it).into_iter();
    let mut of_it =
        serving.filter_map(|daemon| processes::of_mount(&daemon.words, source, &entry.mount_point));
    let arguments = of_it.next().ok_or_else(|| not_found(daemons.refused))?;
    if of_it.any(|other| other != arguments) {
        return Err(OwnerFault::SeveralProcesses);
    }
    Ok(arguments::read(arguments)?)
}

fn not_found(refused: Option<&'static str>) -> OwnerFault {
    refused.map_or(OwnerFault::NoProcess, OwnerFault::NoProcessOfOurRights)
}

/// Splits `[USER@]HOST:PATH` into user, host and directory, the last in the form of an export.
fn parts(source: &str) -> Result<((Option<&str>, &str), String), OwnerFault> {
    let odd = || OwnerFault::SourceForm(source.to_owned());
    let (host_end, path_start) = match source.find("]:") {
        Some(bracket) => (bracket + 1, bracket + 2),
        None => source.find(':').map(|colon| (colon, colon + 1)).ok_or_else(odd)?,
    };
    let (who, path) = (&source[..host_end], &source[path_start..]);
    let (user, host) = who.rsplit_once('@').map_or((None, who), |(user, host)| (Some(user), host));
    let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    let directory = match path {
        "" => "~".to_owned(),
        _ if path.starts_with('/') => path.to_owned(),
        // sftp does not expand a tilde.
        _ => format!("~/{path}"),
    };
    let directory = server_directory(&directory)
        .map_err(|(what, _)| OwnerFault::Directory { directory, what })?;
    Ok(((user, host), directory))
}

/// Finds the executor for a login and ssh command, or adds one.
fn executor(
    executors: &mut Vec<ExecutorConfig>,
    login: Login,
    ssh_command: Vec<String>,
) -> ExecutorName {
    let base = login.to_string();
    let (address, origin) = (Address::Ssh(login), ExecutorOrigin::Sshfs { ssh_command });
    if let Some(same) =
        executors.iter().find(|executor| executor.address == address && executor.origin == origin)
    {
        return same.name.clone();
    }
    let is_taken = |name: &str| executors.iter().any(|executor| executor.name.as_str() == name);
    let numbered = (2..).map(|number| format!("{base}-{number}"));
    let name = std::iter::once(base.clone()).chain(numbered).find(|name| !is_taken(name));
    let name = ExecutorName::new(name.expect("there are more numbers than executors"));
    executors.push(ExecutorConfig { name: name.clone(), address, takes_input: true, origin });
    name
}

#[cfg(test)]
#[path = "sshfs/tests.rs"]
mod tests;
