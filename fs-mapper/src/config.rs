//! `mounts.toml`: what the user says about executors, mounts and the gateway.
//! Reading validates everything and reports every mistake at once; nothing here
//! looks at a mount or at the network. docs/configuration.md has every key.

mod address;
mod find;
mod mistake;
mod near;
mod read;
mod value;
mod volume;

pub use address::{Address, AddressFault, Login, TlsHost};
pub(crate) use value::server_directory;

pub use mistake::{ConfigErrors, Mistake, Position};
pub use volume::{VolumeConfig, cache_size};

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
    /// How it came to be known.
    pub origin: Origin,
}

/// Where an executor is known from.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Origin {
    /// The file names it.
    Configured,
    /// An sshfs mount that the file does not name: to be asked only when a command touches the mount.
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
    /// The same, but commands whose files a volume has at hand run here, if that takes less time than asking their server.
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

/// Where annotation files are looked for besides those that ship, a later place
/// over an earlier one: /etc/posh/annotations, ~/.config/posh/annotations (or
/// below $XDG_CONFIG_HOME), and what a configuration names.
pub fn annotation_directories(config: Option<&Config>) -> Vec<PathBuf> {
    let mut directories = find::annotations(|name| std::env::var_os(name), Path::new("/etc"));
    directories.extend(config.into_iter().flat_map(|config| config.gateway.annotations.iter().cloned()));
    directories
}

/// Where the credentials for `tls://` executors are: ~/.config/posh/tls, or below
/// $XDG_CONFIG_HOME. None where there is no home.
pub fn credentials_directory() -> Option<PathBuf> {
    find::user_directory(|name| std::env::var_os(name).filter(|value| !value.is_empty()))
        .map(|dir| dir.join("posh/tls"))
}

impl Config {
    /// Reads and validates a file.
    pub fn load(path: &Path) -> Result<Config, ConfigErrors> {
        let text = std::fs::read_to_string(path).map_err(|error| ConfigErrors::unreadable(path, &error))?;
        Config::parse(&text, path)
    }

    /// Validates a text. `file` is what the messages call it, and relative
    /// `annotations` are taken from its directory.
    pub fn parse(text: &str, file: &Path) -> Result<Config, ConfigErrors> {
        read::read(text, file)
    }

    /// The file that applies when none is named: $POSH_CONFIG, ./mounts.toml,
    /// ~/.config/posh/mounts.toml (or below $XDG_CONFIG_HOME),
    /// /etc/posh/mounts.toml. The first is taken as it is when set, so that a
    /// wrong name is an error and not silently passed over.
    pub fn find_default() -> Option<PathBuf> {
        find::find(|name| std::env::var_os(name), Path::new("/etc"))
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
