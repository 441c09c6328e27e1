//! Starts a gateway in the background, only once even if several shells need one at the same time.
//!
//! The shell that posh becomes must not have a child that it did not create. So an intermediate
//! process, `posh gateway start`, starts the gateway and ends once that is ready; the gateway is
//! then a child of init.

use std::{
    env,
    ffi::{CString, OsStr, OsString},
    fs::{File, OpenOptions},
    io::{self, PipeReader, Read},
    os::{
        fd::{AsFd, AsRawFd},
        unix::{ffi::OsStrExt, fs::OpenOptionsExt, net::UnixStream},
    },
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use fs_mapper::config::{ConfigScope, FoundConfig};
use nix::{
    errno::Errno,
    fcntl::{FcntlArg, FdFlag, fcntl},
    poll::{PollFd, PollFlags, PollTimeout, poll},
    spawn::{PosixSpawnAttr, PosixSpawnFileActions, PosixSpawnFlags, posix_spawn},
    sys::{
        signal::{SigSet, Signal, kill},
        stat::{Mode, umask},
    },
    unistd::Pid,
};
use posh_proto::runtime::RuntimeDir;

use super::GatewayPlace;
use crate::{Error, descriptors, programs};

/// Timeout for a gateway's start. Reading a configuration and binding a socket takes milliseconds;
/// after this time it will not succeed.
const READY_TIMEOUT: Duration = Duration::from_secs(10);

/// Limit of the gateway's error text; the rest is dropped.
const READY_TEXT_BYTES: u64 = 64 << 10;

/// Message of a gateway that listens; any other text is its error.
const READY: &[u8] = b"ready\n";

/// Starts the gateway of `config` from an intermediate process, which prints its errors on our
/// stderr.
///
/// # Errors
/// [`Error::DidNotStart`] after that message, [`Error::Start`] without one.
pub(super) fn in_background(config: &FoundConfig) -> Result<(), Error> {
    let starter = programs::beside("posh-cli").map_err(failed("find posh's own program"))?;
    let mut command = Command::new(&starter);
    command.args(["gateway", "start"]);
    match config.scope {
        ConfigScope::Own => drop(command.arg("--config").arg(&config.file)),
        // To name the file would be to trust it further: the intermediate process finds it again.
        ConfigScope::Directory => {
            command.current_dir(config.file.parent().unwrap_or(Path::new("/")));
        }
    }
    let ended = command.stdin(Stdio::null()).stdout(Stdio::null()).status();
    let ended = ended.map_err(failed(format!("run {}", starter.display())))?;
    if ended.success() { Ok(()) } else { Err(Error::DidNotStart(config.file.clone())) }
}

/// Starts the gateway at `place` unless it runs, and returns when it is ready.
/// Closes every descriptor but the standard ones.
///
/// # Errors
/// [`Error::Refused`] with the gateway's own error, or another error of its start.
pub fn start(place: &GatewayPlace) -> Result<(), Error> {
    let (config, socket) = match place {
        GatewayPlace::Socket(socket) => {
            return answers(socket).map_err(|source| not_running(socket, source));
        }
        GatewayPlace::Config { config, socket } => (config, socket),
    };
    descriptors::close_inherited();
    let runtime = RuntimeDir::open()?;
    let _only_one = lock(&runtime.lock_path(&config.gateway_name()))?;
    // The previous holder of the lock may have started it.
    if answers(socket).is_ok() {
        return Ok(());
    }
    let log = runtime.log_path(&config.gateway_name());
    let (ready, child) = spawn(&program()?, config, socket, &log)?;
    match wait_until_ready(ready, &log) {
        Err(error @ Error::NotReady { .. }) => {
            // It is useless, and no other process will end it.
            let _ = kill(child, Signal::SIGKILL);
            Err(error)
        }
        outcome => outcome,
    }
}

fn answers(socket: &Path) -> io::Result<()> {
    UnixStream::connect(socket).map(drop)
}

fn not_running(socket: &Path, source: io::Error) -> Error {
    Error::NotRunning { socket: socket.to_owned(), source }
}

fn failed(attempt: impl Into<String>) -> impl FnOnce(io::Error) -> Error {
    let attempt = attempt.into();
    move |source| Error::Start { attempt, source }
}

/// Waits for the lock; its holder is bound by [`READY_TIMEOUT`].
fn lock(path: &Path) -> Result<File, Error> {
    let attempt = || format!("lock {}", path.display());
    let file = OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(path);
    let file = file.map_err(failed(attempt()))?;
    file.lock().map_err(failed(attempt()))?;
    Ok(file)
}

/// `posh-gateway` beside our own program, else the first on PATH.
fn program() -> Result<PathBuf, Error> {
    let beside = programs::beside("posh-gateway").map_err(failed("find posh's own program"))?;
    let path = env::var_os("PATH").unwrap_or_default();
    let on_path =
        env::split_paths(&path).filter(|dir| dir.is_absolute()).map(|dir| dir.join("posh-gateway"));
    let found =
        std::iter::once(beside.clone()).chain(on_path).find(|candidate| candidate.is_file());
    found.ok_or_else(|| {
        Error::NoGatewayProgram(beside.parent().unwrap_or(Path::new("/")).to_owned())
    })
}

/// Spawns it in a session of its own (setsid(2)), at `/`, with default signals and priority, and
/// its messages in `log`; returns the pipe for its ready message.
fn spawn(
    program: &Path,
    config: &FoundConfig,
    socket: &Path,
    log: &Path,
) -> Result<(PipeReader, Pid), Error> {
    let system = |errno: Errno| failed(format!("run {}", program.display()))(errno.into());
    let (ready, ready_for_child) = io::pipe().map_err(failed("make a pipe"))?;
    // The only descriptor that the gateway inherits besides the standard ones.
    fcntl(&ready_for_child, FcntlArg::F_SETFD(FdFlag::empty())).map_err(system)?;
    let null = File::open("/dev/null").map_err(failed("open /dev/null"))?;
    let log_file = open_log(log)?;
    let mut actions = PosixSpawnFileActions::init().map_err(system)?;
    for (from, to) in [(&null, 0), (&null, 1), (&log_file, 2)] {
        actions.add_dup2(from.as_raw_fd(), to).map_err(system)?;
    }
    // Its files are private to the user, and it keeps no file system busy.
    umask(Mode::from_bits_truncate(0o077));
    env::set_current_dir("/").map_err(failed("change to /"))?;
    let ready_fd = ready_for_child.as_raw_fd().to_string();
    let words = [
        program.as_os_str(),
        OsStr::new(match config.scope {
            ConfigScope::Own => "--config",
            ConfigScope::Directory => "--from-directory",
        }),
        config.file.as_os_str(),
        OsStr::new("--socket"),
        socket.as_os_str(),
        OsStr::new("--log"),
        log.as_os_str(),
        OsStr::new("--ready-fd"),
        OsStr::new(&ready_fd),
    ];
    let arguments =
        words.map(|word| c_string(word.as_bytes())).into_iter().collect::<Result<Vec<_>, _>>()?;
    let environment = environment(env::vars_os())?;
    // It serves later shells, too: without this one's priority, as far as the system allows that.
    let _ = rustix::process::setpriority_process(None, 0);
    let spawn = |policy: Scheduling| {
        posix_spawn(program, &actions, &detached(policy)?, &arguments, &environment)
    };
    // Only root leaves SCHED_IDLE (sched(7)).
    let child = match spawn(Scheduling::Default) {
        Err(Errno::EPERM) => spawn(Scheduling::OfShell),
        other => other,
    };
    Ok((ready, child.map_err(system)?))
}

/// Scheduling policy of the gateway.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Scheduling {
    /// SCHED_OTHER.
    Default,
    OfShell,
}

fn detached(policy: Scheduling) -> nix::Result<PosixSpawnAttr> {
    // Flags of glibc that nix does not define. New attributes name SCHED_OTHER.
    let policy = match policy {
        Scheduling::Default => nix::libc::POSIX_SPAWN_SETSCHEDULER,
        Scheduling::OfShell => 0,
    };
    let own = i32::from(nix::libc::POSIX_SPAWN_SETSID) | policy;
    let own_session = PosixSpawnFlags::from_bits_retain(own);
    let mut attributes = PosixSpawnAttr::init()?;
    attributes.set_flags(
        own_session
            | PosixSpawnFlags::POSIX_SPAWN_SETSIGDEF
            | PosixSpawnFlags::POSIX_SPAWN_SETSIGMASK,
    )?;
    attributes.set_sigdefault(&SigSet::all())?;
    attributes.set_sigmask(&SigSet::empty())?;
    Ok(attributes)
}

fn open_log(path: &Path) -> Result<File, Error> {
    let attempt = || format!("open its log {}", path.display());
    OpenOptions::new().create(true).append(true).mode(0o600).open(path).map_err(failed(attempt()))
}

/// `NAME=VALUE` for each variable, as execve(2) takes them.
pub(crate) fn environment(
    variables: impl Iterator<Item = (OsString, OsString)>,
) -> Result<Vec<CString>, Error> {
    variables
        .map(|(name, value)| c_string(&[name.as_bytes(), b"=", value.as_bytes()].concat()))
        .collect()
}

/// A word for execve(2).
pub(crate) fn c_string(bytes: &[u8]) -> Result<CString, Error> {
    CString::new(bytes).map_err(|_| Error::NulInArgument)
}

fn wait_until_ready(mut ready: PipeReader, log: &Path) -> Result<(), Error> {
    let not_ready = |what| Error::NotReady { what, log: log.to_owned() };
    let deadline = Instant::now() + READY_TIMEOUT;
    let mut text = Vec::new();
    // The ready message is complete by itself; an error ends at end of file.
    while text != READY {
        if !readable(&ready, deadline).map_err(failed("wait for the gateway"))? {
            return Err(not_ready("did not say within 10 s that it is ready"));
        }
        let mut piece = [0; 4096];
        match ready.read(&mut piece).map_err(failed("read what the gateway says"))? {
            0 => break,
            n if (text.len() as u64) < READY_TEXT_BYTES => text.extend_from_slice(&piece[..n]),
            _ => {}
        }
    }
    if text == READY {
        return Ok(());
    }
    match String::from_utf8_lossy(&text).trim() {
        "" => Err(not_ready("ended before it was ready")),
        error => Err(Error::Refused(error.to_owned())),
    }
}

fn readable(pipe: &PipeReader, deadline: Instant) -> io::Result<bool> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout = PollTimeout::try_from(left).unwrap_or(PollTimeout::ZERO);
        match poll(&mut [PollFd::new(pipe.as_fd(), PollFlags::POLLIN)], timeout) {
            Ok(n) => return Ok(n > 0),
            Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gateway_is_started_without_its_shells_scheduling_policy() {
        let program = Path::new("/usr/bin/chrt");
        if !program.exists() {
            return;
        }
        // A shell with SCHED_BATCH runs this test again, which then starts a program as it starts
        // gateways.
        let name =
            "gateway::start::tests::a_gateway_is_started_without_its_shells_scheduling_policy";
        if env::var_os("POSH_TEST_AS_BATCH").is_none() {
            let mut again = Command::new(program);
            again.args(["-b", "0"]).arg(env::current_exe().unwrap()).args(["--exact", name]);
            let again = again.arg("--nocapture").env("POSH_TEST_AS_BATCH", "1").output().unwrap();
            let said = String::from_utf8_lossy(&again.stdout);
            return assert!(said.contains("SCHED_OTHER"), "{said}");
        }
        let words = [c"chrt".to_owned(), c"-p".to_owned(), c"0".to_owned()];
        let actions = PosixSpawnFileActions::init().unwrap();
        let attributes = detached(Scheduling::Default).unwrap();
        let child = posix_spawn(program, &actions, &attributes, &words, &[] as &[CString]);
        nix::sys::wait::waitpid(child.unwrap(), None).unwrap();
    }
}
