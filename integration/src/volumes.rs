//! Volumes of the workstation: their entries in a configuration, and the start of the gateway that
//! serves them.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Output, Stdio};

use clap::ValueEnum;

use crate::error::{AttemptExt, Result};
use crate::host::{Host, RUNTIME};
use crate::people::{self, Person, as_number};
use crate::services;

/// Sockets, configuration and cache of root's second gateway.
pub const OTHER_RUNTIME: &str = "/run/other";

/// Kind of the workstation's mounts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum Mounts {
    /// By sshfs; the configuration says which export is behind each mount.
    #[default]
    Sshfs,
    /// As volumes, which the gateway serves itself; commands run where their data lives, whatever a
    /// volume has at hand.
    Volume,
    /// As volumes, and where that takes less time commands run here, as they do if nothing is
    /// configured.
    AtHand,
}

impl Mounts {
    /// Returns true if the gateway serves the mounts.
    #[must_use]
    pub fn are_volumes(self) -> bool {
        self != Mounts::Sshfs
    }

    /// First lines of a configuration.
    #[must_use]
    pub fn settings(self) -> &'static str {
        match self {
            Mounts::Sshfs | Mounts::Volume => "[gateway]\nscheduler = \"greedy\"\n\n",
            Mounts::AtHand => "",
        }
    }

    /// Entry of a configuration for one mount.
    #[must_use]
    pub fn entry(self, path: &str, executor: &str, export: &str) -> String {
        let kind = match self {
            Mounts::Sshfs => "mount",
            Mounts::Volume | Mounts::AtHand => "volume",
        };
        format!(
            "[[{kind}]]\npath = \"{path}\"\nexecutor = \"{executor}\"\nexport = \"{export}\"\n\n"
        )
    }
}

/// Starts the gateway of the host's user, or of the ordinary one, and waits until it has mounted
/// its volumes at `paths`.
///
/// # Errors
/// The gateway's error, or that the volumes do not appear.
pub fn start(host: &Host, user: User, paths: &[&str]) -> Result<()> {
    host.must(posh(host, user, &["gateway", "start"]))?;
    let tell = || {
        output(host, user, &["volumes"])
            .map(|said| String::from_utf8_lossy(&said.stdout).into_owned())
    };
    paths.iter().try_for_each(|path| services::wait_in_mountinfo(host, path, &tell))
}

/// Writes the configuration of root's second gateway.
///
/// # Errors
/// If it can't be written.
pub fn other_root(host: &Host, table: &str) -> Result<()> {
    let directory = host.path(OTHER_RUNTIME);
    fs::create_dir_all(&directory)
        .and_then(|()| fs::set_permissions(&directory, fs::Permissions::from_mode(0o700)))
        .attempt(|| format!("make {OTHER_RUNTIME}"))?;
    services::write_file(host, format!("{OTHER_RUNTIME}/mounts.toml"), table.as_bytes())
}

/// User of a gateway.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum User {
    /// The host's user, who is root.
    Root,
    /// Root with a second gateway, as if of another workstation: its own configuration, see
    /// [`other_root`].
    OtherRoot,
    /// The laboratory's ordinary user, see [`people`].
    Ordinary,
}

/// `posh` with these arguments, as that user.
#[must_use]
pub fn posh(host: &Host, user: User, words: &[&str]) -> Command {
    let mut command = host.command(host.programs().join("posh"));
    command.args(words).stdout(Stdio::piped()).stderr(Stdio::piped());
    // The gateway's cache must not be in a home, which tests examine.
    match user {
        User::Root => command.env("XDG_CACHE_HOME", RUNTIME),
        User::OtherRoot => {
            let config = format!("{OTHER_RUNTIME}/mounts.toml");
            command
                .env("XDG_CACHE_HOME", OTHER_RUNTIME)
                .env("XDG_RUNTIME_DIR", OTHER_RUNTIME)
                .env("POSH_CONFIG", config)
        }
        User::Ordinary => command.envs(Person::variables()).env("XDG_CACHE_HOME", people::RUNTIME),
    };
    match user {
        User::Root | User::OtherRoot => command,
        User::Ordinary => as_number(command, people::HERE),
    }
}

/// Output of `posh` with these arguments, for any exit status.
///
/// # Errors
/// If it can't be started.
pub fn output(host: &Host, user: User, words: &[&str]) -> Result<Output> {
    let mut command = posh(host, user, words);
    host.run(move || command.output()).attempt(|| format!("run posh on {}", host.name()))
}
