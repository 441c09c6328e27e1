//! Finds this user's gateway and connects to it: finds the configuration, calls its gateway, and
//! starts it if none answers.

mod client;
mod opening;
mod start;

use std::{
    env, fs,
    io::{self, Write as _},
    os::unix::fs::{FileTypeExt as _, MetadataExt as _},
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use fs_mapper::{
    config::{Config, ConfigSearch, FoundConfig, PassedOver, UnusableConfig},
    mountinfo::MountInfo,
    sshfs,
};
use nix::unistd::geteuid;
use posh_proto::{
    runtime::{RuntimeDir, stage_socket},
    untrusted::escaped,
};

pub use client::Client;
pub use opening::{OpenedSession, open_session};
pub use start::start;
pub(crate) use start::{c_string, environment};

use crate::{Error, error::named};

/// Timeout for the end of a gateway after a request to end. Pipelines, and the flush of recent
/// writes, have shorter limits.
const END_TIMEOUT: Duration = Duration::from_secs(20);
const END_POLL: Duration = Duration::from_millis(5);

/// `--config` and `--socket`; [`find`] adds the environment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GatewayTarget {
    /// A configuration file.
    pub config: Option<PathBuf>,
    /// A gateway's socket.
    pub socket: Option<PathBuf>,
}

/// The place of a gateway.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GatewayPlace {
    /// A socket that the user named; no gateway is started for it.
    Socket(PathBuf),
    /// The gateway of this configuration.
    Config {
        /// The file, and how far it is trusted.
        config: FoundConfig,
        /// Socket of its gateway.
        socket: PathBuf,
    },
}

impl GatewayPlace {
    /// The socket, however it was found.
    #[must_use]
    pub fn socket(&self) -> &Path {
        match self {
            Self::Socket(socket) | Self::Config { socket, .. } => socket,
        }
    }
}

/// Finds the place (`--socket`, `--config`, `$POSH_SOCKET`, [`find_config`]), or `None` where
/// nothing is configured and no sshfs mounted.
///
/// # Errors
/// [`Error::Config`] when a file was named that can't be used, and
/// [`Error::RuntimeDir`].
pub fn find(target: &GatewayTarget) -> Result<Option<GatewayPlace>, Error> {
    Ok(search(target)?.0)
}

/// Like [`find`], with the configurations of higher precedence that are not used.
///
/// # Errors
/// As [`find`].
pub fn search(target: &GatewayTarget) -> Result<(Option<GatewayPlace>, Vec<PassedOver>), Error> {
    // The command line takes precedence over the environment.
    let from_environment = || non_empty("POSH_SOCKET").filter(|_| target.config.is_none());
    if let Some(socket) = target.socket.clone().or_else(from_environment) {
        expect_trusted(&socket)?;
        return Ok((Some(GatewayPlace::Socket(socket)), Vec::new()));
    }
    let ConfigSearch { found, passed_over } = search_config(target)?;
    let Some(config) = found.or_else(unconfigured) else { return Ok((None, passed_over)) };
    let socket = RuntimeDir::open()?.socket_path(&config.gateway_name());
    Ok((Some(GatewayPlace::Config { config, socket }), passed_over))
}

/// Prints which configurations are not used, and why.
pub fn say_passed_over(target: &GatewayTarget) {
    for why in search(target).map(|(_, passed_over)| passed_over).unwrap_or_default() {
        let _ = writeln!(io::stderr(), "posh: {}", escaped(&why.to_string()));
    }
}

/// With sshfs mounts posh works without a configuration; an empty one is used.
fn unconfigured() -> Option<FoundConfig> {
    let mounted = MountInfo::read().is_ok_and(|info| sshfs::is_mounted(&info));
    mounted.then(FoundConfig::empty)
}

/// Like [`find`], for a request that needs a gateway.
///
/// # Errors
/// Also [`Error::NoConfig`].
pub fn require(target: &GatewayTarget) -> Result<GatewayPlace, Error> {
    find(target)?.ok_or(Error::NoConfig)
}

/// A client of the gateway at `place`, started if it must be.
///
/// # Errors
/// Any error of reaching it; the gateway of a [`GatewayPlace::Socket`] is not started.
pub fn reach(place: &GatewayPlace) -> Result<Client, Error> {
    reach_by(place, Client::connect)
}

/// Timeout for a gateway that is about to end.
const ENDS: Duration = Duration::from_secs(5);

/// Waits until no process listens at `place`; returns false at the timeout.
#[must_use]
pub fn has_ended(place: &GatewayPlace) -> bool {
    let until = Instant::now() + ENDS;
    loop {
        if matches!(Client::connect(place.socket()), Err(Error::NotRunning { .. })) {
            return true;
        }
        if Instant::now() >= until {
            return false;
        }
        thread::sleep(Duration::from_millis(20));
    }
}

fn reach_by<T>(
    place: &GatewayPlace,
    connect: impl Fn(&Path) -> Result<T, Error>,
) -> Result<T, Error> {
    match (connect(place.socket()), place) {
        (Err(Error::NotRunning { .. }), GatewayPlace::Config { config, .. }) => {
            start::in_background(config)?;
            connect(place.socket())
        }
        (outcome, _) => outcome,
    }
}

/// The configuration file in force: the named one, else the result of [`Config::find`].
///
/// # Errors
/// [`Error::Config`] when a named file can't be used.
pub fn find_config(target: &GatewayTarget) -> Result<Option<FoundConfig>, Error> {
    Ok(search_config(target)?.found)
}

fn search_config(target: &GatewayTarget) -> Result<ConfigSearch, Error> {
    let searched = match &target.config {
        Some(named) => Config::named(named)
            .map(|found| ConfigSearch { found: Some(found), ..ConfigSearch::default() }),
        None => Config::find(),
    };
    searched.map_err(|UnusableConfig { file, source }| Error::Config { path: file, source })
}

/// Asks the target's gateway to end; returns a report.
///
/// # Errors
/// [`Error::Call`], [`Error::NoConfig`]
pub fn stop(target: &GatewayTarget) -> Result<String, Error> {
    match Client::connect(require(target)?.socket()) {
        Err(Error::NotRunning { socket, .. }) => {
            Ok(format!("no gateway runs at {}\n", named(&socket)))
        }
        client => {
            let mut client = client?;
            let process = client.status().ok().map(|status| status.pid);
            client.shut_down()?;
            let has_ended = process.is_some_and(ends);
            let words = if has_ended {
                "the gateway has ended"
            } else {
                "the gateway ends when its pipelines have ended"
            };
            Ok(format!("{words}\n"))
        }
    }
}

/// Waits for the end of a gateway, after which its volumes are unmounted. Returns false at the
/// timeout.
fn ends(process: u32) -> bool {
    let asked = Instant::now();
    while is_running(process) {
        if asked.elapsed() > END_TIMEOUT {
            return false;
        }
        thread::sleep(END_POLL);
    }
    true
}

/// Returns true if the process exists and is no zombie (proc_pid_stat(5)).
fn is_running(process: u32) -> bool {
    let Ok(status) = fs::read_to_string(format!("/proc/{process}/stat")) else { return false };
    !status.rsplit_once(") ").is_some_and(|(_, state)| state.starts_with(['Z', 'X']))
}

/// Requires that a named socket and the stage socket beside it belong to root or the user, and that
/// no other user can change their path. The environment may be another user's (`sudo -E`), and the
/// gateway decides what is executed.
fn expect_trusted(socket: &Path) -> Result<(), Error> {
    let user = geteuid().as_raw();
    let untrusted = |why: String| Error::UntrustedSocket { socket: socket.to_owned(), why };
    let directory =
        socket.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    match trusted_path::directory(directory, user) {
        // No such socket: reported when it is called.
        Err(missing) if missing.is_missing() => return Ok(()),
        walked => walked.map_err(|why| untrusted(why.to_string()))?,
    };
    for file in [socket.to_owned(), stage_socket(socket)] {
        let Ok(about) = fs::symlink_metadata(&file) else { continue };
        if !about.file_type().is_socket() {
            return Err(untrusted(format!("{} is no socket", file.display())));
        }
        if about.uid() != user && about.uid() != 0 {
            return Err(untrusted(format!("{} belongs to user {}", file.display(), about.uid())));
        }
    }
    Ok(())
}

fn non_empty(variable: &str) -> Option<PathBuf> {
    env::var_os(variable).filter(|value| !value.is_empty()).map(PathBuf::from)
}

#[cfg(test)]
mod tests {
    use std::os::unix::{
        fs::{PermissionsExt as _, symlink},
        net::UnixListener,
    };

    use super::*;

    fn at(socket: &Path) -> Result<Option<GatewayPlace>, Error> {
        find(&GatewayTarget { config: None, socket: Some(socket.to_owned()) })
    }

    #[test]
    fn a_socket_where_others_can_write_is_none() {
        let top = tempfile::tempdir().unwrap();
        let directory = top.path().join("d");
        fs::create_dir(&directory).unwrap();
        let socket = directory.join("e.sock");
        let _listeners =
            [&socket, &top.path().join("other")].map(|path| UnixListener::bind(path).unwrap());
        assert!(at(&socket).is_ok());
        for mode in [0o777, 0o1777, 0o770] {
            fs::set_permissions(&directory, fs::Permissions::from_mode(mode)).unwrap();
            assert!(matches!(at(&socket), Err(Error::UntrustedSocket { .. })), "{mode:o}");
        }
        fs::set_permissions(&directory, fs::Permissions::from_mode(0o700)).unwrap();
        for link in ["e.stage", "f.sock"] {
            symlink(top.path().join("other"), directory.join(link)).unwrap();
            let named = directory.join(link).with_extension("sock");
            assert!(matches!(at(&named), Err(Error::UntrustedSocket { .. })), "{link}");
            fs::remove_file(directory.join(link)).unwrap();
        }
        assert!(at(&socket).is_ok());
    }

    #[test]
    fn a_socket_of_another_user_is_none() {
        let top = tempfile::tempdir().unwrap();
        let directory = top.path().join("d");
        fs::create_dir(&directory).unwrap();
        let socket = directory.join("e.sock");
        let _listener = UnixListener::bind(&socket).unwrap();
        for path in [&socket, &directory] {
            if std::os::unix::fs::chown(path, Some(54_321), None).is_err() {
                return;
            }
            assert!(matches!(at(&socket), Err(Error::UntrustedSocket { .. })));
            std::os::unix::fs::chown(path, Some(0), None).unwrap();
        }
    }
}
