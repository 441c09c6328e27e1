//! `mounts.toml`: what the user says about executors, mounts and the gateway.
//! Reading validates everything and reports every mistake at once; nothing here
//! looks at a mount or at the network. docs/configuration.md has every key.

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

pub use find::{Found, PassedOver, Scope, Search, Unusable};
pub use mistake::{ConfigErrors, Mistake, Position};
pub use volume::{VolumeConfig, cache_size};

use allow::Register;
pub use trusted_path::Untrusted;

use crate::coherence::Adapter;
use crate::path::ExecutorName;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// A configuration without mistakes. `Config::default()` is "none": no
/// executor, so that everything runs here.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Config {
    /// The file it was read from; empty for the default.
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
    /// What `[[mount]]` calls it.
    pub name: ExecutorName,
    /// How it is reached.
    pub address: Address,
    /// Commands there may be given what was written elsewhere: by commands here or on other
    /// machines, or into files that are not its own.
    pub takes_input: bool,
    /// How it came to be known.
    pub origin: Origin,
}

/// Where an executor is known from.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Origin {
    /// The file names it.
    Configured,
    /// An sshfs mount that the file does not name: to be asked only when a command touches the
    /// mount.
    Sshfs {
        /// The ssh of that mount and its options, instead of [`GatewayConfig::ssh_command`].
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
    /// As the executor names it. One that ssh starts is told what to serve, by this: an
    /// absolute path on its machine, or `~` or `~/...` for what is below the login's home.
    pub export: String,
    /// The directory below the export that is mounted; empty for its root.
    pub sub_path: PathBuf,
    /// The adapter to use whatever the file system type says.
    pub coherence: Option<Adapter>,
    /// Where the entry begins in the file.
    pub position: Position,
}

/// The `[gateway]` table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GatewayConfig {
    /// Into how many parts one machine's share of a splittable stage is cut.
    pub split: u32,
    /// What places the stages.
    pub scheduler: Scheduler,
    /// A gateway that was started by itself ends after so long without work, in seconds.
    pub idle_timeout_s: u64,
    /// Further directories of annotation files, absolute.
    pub annotations: Vec<PathBuf>,
    /// The program that is ssh, and its first arguments; never empty.
    pub ssh_command: Vec<String>,
    /// Whether sshfs mounts that have no owner get the server that they come from.
    pub sshfs: bool,
}

/// Values of `scheduler`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Scheduler {
    /// Where the data lives: Algorithms 1 and 2 of the POSH paper (§5).
    Greedy,
    /// The same, but commands whose files a volume has at hand run here, if that takes less time
    /// than asking their server.
    #[default]
    Cost,
}

/// A gateway that nobody has used for ten minutes is one that nobody misses: it
/// starts again within milliseconds.
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

/// Directories that annotation files are looked for in besides those that ship, a later one over an
/// earlier one: /etc/posh/annotations, ~/.config/posh/annotations (or below $XDG_CONFIG_HOME), and
/// what a configuration names. One that somebody else could change is an error instead: annotations
/// say what commands do.
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

/// Where the credentials for `tls://` executors are: ~/.config/posh/tls, or below
/// $XDG_CONFIG_HOME. None where there is no home.
pub fn credentials_directory() -> Option<PathBuf> {
    find::user_directory(|name| std::env::var_os(name).filter(|value| !value.is_empty()))
        .map(|dir| dir.join("posh/tls"))
}

/// Why a directory's file was not allowed, or that not taken back.
#[derive(Debug, thiserror::Error)]
pub enum NotAllowed {
    /// Somebody else may have written it.
    #[error("{}: {}", .0.file.display(), .0.source)]
    Unusable(#[from] Unusable),
    /// What no directory's file may say, or other mistakes.
    #[error(transparent)]
    Mistakes(#[from] ConfigErrors),
    /// There is no place to keep it.
    #[error("neither XDG_STATE_HOME nor HOME is set")]
    NoHome,
    /// It can't be kept.
    #[error("can't note what is allowed of {}: {source}", file.display())]
    Register {
        /// The directory's file.
        file: PathBuf,
        /// The system's words.
        source: std::io::Error,
    },
}

fn effective_user() -> u32 {
    rustix::process::geteuid().as_raw()
}

fn set_variable(name: &str) -> Option<std::ffi::OsString> {
    std::env::var_os(name).filter(|value| !value.is_empty())
}

fn surrounded<T>(work: impl FnOnce(&find::Surroundings<'_>) -> T) -> T {
    let here = Path::new(".");
    work(&find::Surroundings {
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

    /// Reads and validates what was found, by the same descriptor that is judged once more.
    pub fn load_found(found: &Found) -> Result<Config, ConfigErrors> {
        let text =
            find::read(found, effective_user()).map_err(|why| ConfigErrors::unusable(&why))?;
        read::read(&text, &found.file, found.scope)
    }

    /// Validates a text. `file` is what the messages call it, and relative
    /// `annotations` are taken from its directory.
    pub fn parse(text: &str, file: &Path) -> Result<Config, ConfigErrors> {
        read::read(text, file, Scope::Own)
    }

    /// The file that applies when none is named on the command line: $POSH_CONFIG, ./mounts.toml if
    /// the user has allowed it, ~/.config/posh/mounts.toml (or below $XDG_CONFIG_HOME),
    /// /etc/posh/mounts.toml. The first is an error where it can't be used, so that a wrong name is
    /// not silently passed over.
    pub fn find() -> Result<Search, Unusable> {
        surrounded(find::find)
    }

    /// A file that the user has named: it and every directory on the way to it belong to root or
    /// the user, and nobody else can write them.
    pub fn named(path: &Path) -> Result<Found, Unusable> {
        find::named(path, effective_user())
    }

    /// A directory's file, which must be allowed as it is now.
    pub fn allowed(path: &Path) -> Result<Found, Unusable> {
        surrounded(|around| find::allowed(path, around))
    }

    /// Allows a directory's file as it is now, if [`Scope::Directory`] lets all of it count; gives
    /// its path.
    pub fn allow(path: &Path) -> Result<PathBuf, NotAllowed> {
        let user = effective_user();
        let (file, text) = find::read_in_directory(path, user)?;
        read::read(&text, &file, Scope::Directory)?;
        let register = Register::of(set_variable, user).ok_or(NotAllowed::NoHome)?;
        let kept = register.allow(&file, &allow::digest(text.as_bytes()));
        kept.map_err(|source| NotAllowed::Register { file: file.clone(), source })?;
        Ok(file)
    }

    /// Takes that back; gives whether it was allowed.
    pub fn deny(path: &Path) -> Result<bool, NotAllowed> {
        let register = Register::of(set_variable, effective_user()).ok_or(NotAllowed::NoHome)?;
        let failed = |source| NotAllowed::Register { file: path.to_owned(), source };
        // The file may be gone; its directory names it all the same.
        let absolute = std::path::absolute(path).map_err(failed)?;
        let directory = absolute.parent().and_then(|parent| parent.canonicalize().ok());
        let file =
            directory.zip(absolute.file_name()).map(|(directory, name)| directory.join(name));
        register.deny(&file.unwrap_or(absolute)).map_err(failed)
    }

    /// What the mounts of an executor name as their exports, each once, in order.
    pub fn exports_of(&self, executor: &ExecutorName) -> Vec<String> {
        let mounts = self.mounts.iter().filter(|mount| mount.executor == *executor);
        mounts.map(|mount| mount.export.clone()).collect::<BTreeSet<_>>().into_iter().collect()
    }

    /// An executor by name.
    pub fn executor(&self, name: &ExecutorName) -> Option<&ExecutorConfig> {
        self.executors.iter().find(|executor| executor.name == *name)
    }
}
