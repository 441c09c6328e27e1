//! `mounts.toml`: the user's configuration of executors, mounts and the gateway. Reading validates
//! everything and reports every mistake at once, without access to mounts or the network.
//! docs/configuration.md has every key.

mod address;
mod allow;
mod find;
mod mistake;
mod near;
mod read;
mod value;
mod volume;

pub use address::{Address, AddressFault, Login, TlsHost};
pub(crate) use value::server_directory;

pub use find::{ConfigScope, ConfigSearch, FoundConfig, PassedOver, UnusableConfig};
pub use mistake::{ConfigErrors, Mistake, Position};
pub use volume::{VolumeConfig, cache_size};

use allow::Register;
pub use trusted_path::Untrusted;

use crate::coherence::Adapter;
use crate::path::ExecutorName;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// A configuration without mistakes. `Config::default()` has no executor: everything runs locally.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Config {
    /// File that it was read from; empty for the default.
    pub file: PathBuf,
    /// In the file's order.
    pub executors: Vec<ExecutorConfig>,
    /// In the file's order.
    pub mounts: Vec<MountConfig>,
    /// In the file's order. Each is among [`Config::mounts`] too: it is a mount with an owner.
    pub volumes: Vec<VolumeConfig>,
    /// The `[gateway]` table.
    pub gateway: GatewayConfig,
}

/// One `[[executor]]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExecutorConfig {
    /// Name that `[[mount]]` uses.
    pub name: ExecutorName,
    /// Address of the executor.
    pub address: Address,
    /// Allows its commands to receive input that was written elsewhere: by commands on this machine
    /// or others, or into files that the executor doesn't own.
    pub takes_input: bool,
    /// Source of the entry.
    pub origin: ExecutorOrigin,
}

/// Source of an executor's configuration.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum ExecutorOrigin {
    /// An `[[executor]]` in the file.
    Configured,
    /// An sshfs mount that the file does not name: contacted only when a command touches the mount.
    Sshfs {
        /// ssh command and options of that mount, instead of [`GatewayConfig::ssh_command`].
        ssh_command: Vec<String>,
    },
}

/// One `[[mount]]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MountConfig {
    /// As the workstation sees it: absolute and normalised by text.
    pub path: PathBuf,
    /// One of [`Config::executors`].
    pub executor: ExecutorName,
    /// Export name on the executor. Over ssh, the directory to serve: an absolute path, or `~` or
    /// `~/...` below the login's home.
    pub export: String,
    /// The directory below the export that is mounted; empty for its root.
    pub sub_path: PathBuf,
    /// Adapter that overrides the file system type's.
    pub coherence: Option<Adapter>,
    /// An sshfs mount can be made to show at once what changes on the server: it sets the owners
    /// that it is told to set, by a login that is known, and the kernel remembers no longer than by
    /// default. See [`sshfs::adopted`](crate::sshfs::adopted).
    pub shows_changes: bool,
    /// Where the entry begins in the file.
    pub position: Position,
}

/// The `[gateway]` table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GatewayConfig {
    /// Number of parts into which one machine's share of a splittable stage is split.
    pub split: u32,
    /// Placement algorithm for stages.
    pub scheduler: Scheduler,
    /// Idle time after which an automatically started gateway exits, in seconds.
    pub idle_timeout_s: u64,
    /// Further directories of annotation files, absolute.
    pub annotations: Vec<PathBuf>,
    /// Program and first arguments of ssh; never empty.
    pub ssh_command: Vec<String>,
    /// Offloads to the servers of sshfs mounts that have no owner.
    pub sshfs: bool,
}

/// Values of `scheduler`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Scheduler {
    /// Run where the data is: Algorithms 1 and 2 of the POSH paper (§5).
    Greedy,
    /// Like `Greedy`, but a command whose files a volume has cached runs locally if that takes less
    /// time than asking their server.
    #[default]
    Cost,
}

/// Ten minutes: starting the gateway again takes milliseconds.
const DEFAULT_IDLE_TIMEOUT_S: u64 = 600;

impl Default for GatewayConfig {
    fn default() -> Self {
        GatewayConfig {
            split: 1,
            scheduler: Scheduler::default(),
            idle_timeout_s: DEFAULT_IDLE_TIMEOUT_S,
            annotations: Vec::new(),
            ssh_command: vec![String::from("ssh")],
            sshfs: true,
        }
    }
}

/// Directories of annotation files besides the built-in ones; later ones override earlier ones:
/// /etc/posh/annotations, ~/.config/posh/annotations (or below $XDG_CONFIG_HOME), and the
/// configuration's. A directory that another user could change is an error, as annotations define
/// the meaning of commands.
pub fn annotation_directories(config: Option<&Config>) -> Vec<Result<PathBuf, Untrusted>> {
    let mut directories = find::annotations(|name| std::env::var_os(name), Path::new("/etc"));
    directories
        .extend(config.into_iter().flat_map(|config| config.gateway.annotations.iter().cloned()));
    let judged = |directory: PathBuf| match trusted_path::directory(&directory, effective_user()) {
        Err(why) if !why.is_missing() => Err(why),
        _ => Ok(directory),
    };
    directories.into_iter().map(judged).collect()
}

/// Directory of the credentials for `tls://` executors: ~/.config/posh/tls, or below
/// $XDG_CONFIG_HOME. `None` without a home directory.
pub fn credentials_directory() -> Option<PathBuf> {
    find::user_directory(|name| std::env::var_os(name).filter(|value| !value.is_empty()))
        .map(|dir| dir.join("posh/tls"))
}

/// Error of [`Config::allow`] and [`Config::deny`].
#[derive(Debug, thiserror::Error)]
pub enum NotAllowed {
    /// Another user may have written it.
    #[error("{}: {}", .0.file.display(), .0.source)]
    Unusable(#[from] UnusableConfig),
    /// Forbidden keys for a directory's file, or other mistakes.
    #[error(transparent)]
    Mistakes(#[from] ConfigErrors),
    /// No directory for the register.
    #[error("neither XDG_STATE_HOME nor HOME is set")]
    NoHome,
    /// The register can't be written.
    #[error("can't note what is allowed of {}: {source}", file.display())]
    Register {
        /// The directory's file.
        file: PathBuf,
        /// System error.
        source: std::io::Error,
    },
}

fn effective_user() -> u32 {
    rustix::process::geteuid().as_raw()
}

fn set_variable(name: &str) -> Option<std::ffi::OsString> {
    std::env::var_os(name).filter(|value| !value.is_empty())
}

fn surrounded<T>(work: impl FnOnce(&find::SearchEnvironment<'_>) -> T) -> T {
    let here = Path::new(".");
    work(&find::SearchEnvironment {
        variable: &set_variable,
        here,
        etc: Path::new("/etc"),
        user: effective_user(),
    })
}

impl Config {
    /// Reads and validates a file that the user has named.
    pub fn load(path: &Path) -> Result<Config, ConfigErrors> {
        Config::load_found(&Config::named(path).map_err(|why| ConfigErrors::unusable(&why))?)
    }

    /// Reads and validates a found file, after checking its trust again on the descriptor that is
    /// read.
    pub fn load_found(found: &FoundConfig) -> Result<Config, ConfigErrors> {
        let text =
            find::read(found, effective_user()).map_err(|why| ConfigErrors::unusable(&why))?;
        read::read(&text, &found.file, found.scope)
    }

    /// Validates a text. `file` is its name in messages, and relative `annotations` start at its
    /// directory.
    pub fn parse(text: &str, file: &Path) -> Result<Config, ConfigErrors> {
        read::read(text, file, ConfigScope::Own)
    }

    /// Finds the file that applies when the command line names none: $POSH_CONFIG, ./mounts.toml if
    /// the user has allowed it, ~/.config/posh/mounts.toml (or below $XDG_CONFIG_HOME),
    /// /etc/posh/mounts.toml. If $POSH_CONFIG is set but unusable, returns an error, so that a
    /// wrong name is not silently ignored.
    pub fn find() -> Result<ConfigSearch, UnusableConfig> {
        surrounded(find::find)
    }

    /// Opens a file that the user has named. The file and every directory of its path must belong
    /// to root or the user, and be writable by nobody else.
    pub fn named(path: &Path) -> Result<FoundConfig, UnusableConfig> {
        find::named(path, effective_user())
    }

    /// Opens a directory's file, which must be allowed with its current contents.
    pub fn allowed(path: &Path) -> Result<FoundConfig, UnusableConfig> {
        surrounded(|around| find::allowed(path, around))
    }

    /// Allows a directory's file with its current contents, if they are valid for
    /// [`ConfigScope::Directory`]. Returns its path.
    pub fn allow(path: &Path) -> Result<PathBuf, NotAllowed> {
        let user = effective_user();
        let (file, text) = find::read_in_directory(path, user)?;
        read::read(&text, &file, ConfigScope::Directory)?;
        let register = Register::of(set_variable, user).ok_or(NotAllowed::NoHome)?;
        let kept = register.allow(&file, &allow::digest(text.as_bytes()));
        kept.map_err(|source| NotAllowed::Register { file: file.clone(), source })?;
        Ok(file)
    }

    /// Revokes [`Config::allow`]. Returns whether the file was allowed.
    pub fn deny(path: &Path) -> Result<bool, NotAllowed> {
        let register = Register::of(set_variable, effective_user()).ok_or(NotAllowed::NoHome)?;
        let failed = |source| NotAllowed::Register { file: path.to_owned(), source };
        // The file may be gone; its directory and name still identify it.
        let absolute = std::path::absolute(path).map_err(failed)?;
        let directory = absolute.parent().and_then(|parent| parent.canonicalize().ok());
        let file =
            directory.zip(absolute.file_name()).map(|(directory, name)| directory.join(name));
        register.deny(&file.unwrap_or(absolute)).map_err(failed)
    }

    /// Exports that an executor's mounts name, sorted and without duplicates.
    pub fn exports_of(&self, executor: &ExecutorName) -> Vec<String> {
        let mounts = self.mounts.iter().filter(|mount| mount.executor == *executor);
        mounts.map(|mount| mount.export.clone()).collect::<BTreeSet<_>>().into_iter().collect()
    }

    /// An executor by name.
    pub fn executor(&self, name: &ExecutorName) -> Option<&ExecutorConfig> {
        self.executors.iter().find(|executor| executor.name == *name)
    }
}
