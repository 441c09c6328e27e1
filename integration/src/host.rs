//! One machine of the laboratory: a network, mount, process and host-name namespace, entered by one
//! thread that starts everything that runs in it. No namespace has a name and no file is made
//! outside of private tmpfs mounts, so nothing is left behind. `services` and `lab` start the
//! programs of a host.

use std::ffi::OsString;
use std::fs;
use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Output, Stdio};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, setns, unshare};

use crate::devices;
use crate::error::{AttemptExt, LabError, Result};
use crate::process::{ChildProcess, wait_gone};
use crate::programs::Programs;
use crate::running::{self, Running};

/// Directory of the programs under test on every host, for any target directory.
pub const PROGRAMS: &str = "/run/posh-bin";
/// Home directory of a host's user.
pub const HOME: &str = "/home/user";
/// The user's runtime directory (sockets) on every host.
pub const RUNTIME: &str = "/run/user";
/// The mount table of the workstation.
pub const CONFIG: &str = "/run/mounts.toml";
/// The search path on every host.
pub const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Directories that are empty tmpfs mounts of each host's own. `/run` is not listed: it holds the
/// programs and is mounted first.
const OWN_DIRECTORIES: [&str; 4] = ["/tmp", "/mnt", "/home", "/srv"];
/// Jobs waiting for a host's thread; each is short, callers block.
const JOB_QUEUE: usize = 16;
/// Timeout for the kernel to end a host's processes.
const END_LIMIT: Duration = Duration::from_secs(5);

type HostFn = Box<dyn FnOnce() + Send>;

/// A machine; ends with everything on it when dropped.
#[derive(Debug)]
pub struct Host {
    name: String,
    programs: PathBuf,
    variables: Vec<(String, OsString)>,
    place: HostIsolation,
}

#[derive(Debug)]
enum HostIsolation {
    /// This machine itself, for users other than root.
    Plain,
    Namespaces {
        jobs: Option<SyncSender<HostFn>>,
        door: Option<JoinHandle<()>>,
        init: Child,
        lifeline: Option<ChildStdin>,
    },
    /// A second mount namespace of a host; its processes are that host's.
    Room { jobs: Option<SyncSender<HostFn>>, door: Option<JoinHandle<()>>, thread: u32, host: u32 },
}

impl Host {
    /// Makes the namespaces, mounts the private directories and starts process 1.
    pub fn start(name: &str, programs: &Programs) -> Result<Host> {
        if !nix::unistd::geteuid().is_root() {
            return Err(LabError::NeedsRoot("namespaces cannot be made by this user".into()));
        }
        let (jobs, queue) = sync_channel::<HostFn>(JOB_QUEUE);
        let (answer, made) = sync_channel(1);
        let (host, bin) = (name.to_owned(), programs.clone());
        let door = std::thread::Builder::new()
            .name(format!("host {name}"))
            .spawn(move || door(&host, &bin, &answer, &queue))
            .attempt(|| format!("start the thread of host {name}"))?;
        let gone = || LabError::NeedsRoot(format!("the thread of host {name} ended"));
        let mut init = made.recv().map_err(|_| gone())??;
        let lifeline = init.stdin.take();
        let place =
            HostIsolation::Namespaces { jobs: Some(jobs), door: Some(door), init, lifeline };
        Ok(Host {
            name: name.to_owned(),
            programs: PROGRAMS.into(),
            variables: namespace_variables(),
            place,
        })
    }

    /// A view of this machine with a mount namespace of its own, in which other files can be at the
    /// same paths. Must be dropped before the host.
    pub fn room(&self) -> Result<Host> {
        let (jobs, queue) = sync_channel::<HostFn>(JOB_QUEUE);
        let (answer, made) = sync_channel(1);
        let host = self.pid();
        let name = format!("{} (other files)", self.name);
        let door = std::thread::Builder::new()
            .name(format!("host {name}"))
            .spawn(move || {
                let entered = enter_room(host);
                let failed = entered.is_err();
                if answer.send(entered).is_ok() && !failed {
                    work_off(&queue);
                }
            })
            .attempt(|| format!("start the thread of host {name}"))?;
        let gone = || LabError::NeedsRoot(format!("the thread of host {name} ended"));
        let thread = made.recv().map_err(|_| gone())??;
        let place = HostIsolation::Room { jobs: Some(jobs), door: Some(door), thread, host };
        Ok(Host { name, programs: self.programs.clone(), variables: self.variables.clone(), place })
    }

    /// This machine itself: no namespaces, for a demonstration without root.
    pub fn plain(name: &str, programs: &Programs) -> Host {
        let home = std::env::var_os("HOME").unwrap_or_else(|| "/".into());
        let programs = programs.directory().to_owned();
        Host {
            name: name.to_owned(),
            programs,
            variables: vec![("HOME".into(), home)],
            place: HostIsolation::Plain,
        }
    }

    /// Adds variables for every command.
    pub fn with_variables(mut self, variables: &[(&str, &Path)]) -> Host {
        self.variables.extend(
            variables
                .iter()
                .map(|(name, value)| ((*name).to_owned(), value.as_os_str().to_owned())),
        );
        self
    }

    /// The host's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The directory of the programs under test, as this host sees it.
    pub fn programs(&self) -> &Path {
        &self.programs
    }

    /// Runs `job` on this host's thread, inside its namespaces. `job` must not
    /// start threads (the kernel refuses them there).
    pub fn run<T: Send + 'static>(&self, job: impl FnOnce() -> T + Send + 'static) -> T {
        let (HostIsolation::Namespaces { jobs: Some(jobs), .. }
        | HostIsolation::Room { jobs: Some(jobs), .. }) = &self.place
        else {
            return job();
        };
        let (answer, result) = sync_channel(1);
        let job: HostFn = Box::new(move || drop(answer.send(job())));
        jobs.send(job).expect("the host's thread lives as long as the host");
        result.recv().expect("a job on a host's thread does not panic")
    }

    /// A command with the host's environment and nothing of this process's.
    pub fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new(program);
        command.env_clear().env("PATH", PATH).env("LANG", "C.UTF-8").stdin(Stdio::null());
        command.envs(std::env::var_os("POSH_LOG").map(|log| ("POSH_LOG", log)));
        command.envs(self.variables.iter().map(|(name, value)| (name, value)));
        if !matches!(self.place, HostIsolation::Plain) {
            command.current_dir(HOME);
        }
        command
    }

    /// Starts a command (see [`Host::command`]) on this host.
    pub fn spawn(&self, mut command: Command) -> Result<ChildProcess> {
        let name = command.get_program().to_string_lossy().into_owned();
        let child = self.run(move || command.spawn());
        child.map(ChildProcess::new).attempt(|| format!("start {name} on {}", self.name))
    }

    /// Runs a set-up command to its end; a non-zero status is an error.
    pub fn must(&self, mut command: Command) -> Result<Output> {
        let line = format!("{command:?}");
        let program = command.get_program().to_string_lossy().into_owned();
        let output = self
            .run(move || command.output())
            .attempt(|| format!("run {program} on {}", self.name))?;
        if output.status.success() {
            return Ok(output);
        }
        let stderr = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        Err(LabError::Command { command: line, host: self.name.clone(), stderr })
    }

    /// Path by which this process can open a path of this host.
    pub fn path(&self, path: impl AsRef<Path>) -> PathBuf {
        let path = path.as_ref();
        let process = match &self.place {
            HostIsolation::Plain => return path.to_owned(),
            HostIsolation::Namespaces { init, .. } => init.id(),
            HostIsolation::Room { thread, .. } => *thread,
        };
        let below = path.strip_prefix("/").unwrap_or(path);
        PathBuf::from(format!("/proc/{process}/root")).join(below)
    }

    /// The process whose /proc entry shows this host's namespaces.
    pub fn pid(&self) -> u32 {
        match &self.place {
            HostIsolation::Plain => std::process::id(),
            HostIsolation::Namespaces { init, .. } => init.id(),
            HostIsolation::Room { host, .. } => *host,
        }
    }

    /// Every process of this host except its process 1, including those in nested process
    /// namespaces (an executor's runs).
    pub fn processes(&self) -> Result<Vec<Running>> {
        running::on_host(self.pid())
    }
}

fn namespace_variables() -> Vec<(String, OsString)> {
    let pairs = [("HOME", HOME), ("XDG_RUNTIME_DIR", RUNTIME), ("POSH_CONFIG", CONFIG)];
    pairs.map(|(name, value)| (name.to_owned(), value.into())).to_vec()
}

impl Drop for Host {
    fn drop(&mut self) {
        let (jobs, door, init, lifeline) = match &mut self.place {
            HostIsolation::Plain => return,
            HostIsolation::Room { jobs, door, .. } => return end_door(jobs, door),
            HostIsolation::Namespaces { jobs, door, init, lifeline } => {
                (jobs, door, init, lifeline)
            }
        };
        // Process 1 ends when its input does, and takes the others with it.
        drop(lifeline.take());
        if !matches!(wait_gone(init.id(), END_LIMIT), Ok(true)) {
            eprintln!("host {} has processes that do not end", self.name);
            let _ = init.kill();
            return;
        }
        let _ = init.wait();
        end_door(jobs, door);
    }
}

fn end_door(jobs: &mut Option<SyncSender<HostFn>>, door: &mut Option<JoinHandle<()>>) {
    drop(jobs.take());
    if let Some(door) = door.take() {
        let _ = door.join();
    }
}

/// The thread of a host: enters new namespaces, answers with process 1, then runs jobs.
fn door(
    name: &str,
    programs: &Programs,
    answer: &SyncSender<Result<Child>>,
    queue: &Receiver<HostFn>,
) {
    let init = enter(name, programs);
    let failed = init.is_err();
    if answer.send(init).is_err() || failed {
        return;
    }
    work_off(queue);
}

fn work_off(queue: &Receiver<HostFn>) {
    while let Ok(job) = queue.recv() {
        job();
    }
}

/// Enters the namespaces of the host whose process 1 is `init`, and a new mount namespace; returns
/// the id of this thread.
fn enter_room(init: u32) -> Result<u32> {
    let spaces = ["mnt", "net", "uts", "pid"].map(|space| format!("/proc/{init}/ns/{space}"));
    let files: Vec<_> =
        spaces.iter().map(|path| fs::File::open(path).attempt(|| format!("open {path}"))).collect();
    unshare(CloneFlags::CLONE_FS).attempt(|| "have a root of its own".into())?;
    for (file, path) in files.into_iter().zip(&spaces) {
        setns(file?, CloneFlags::empty()).attempt(|| format!("enter {path}"))?;
    }
    unshare(CloneFlags::CLONE_NEWNS).attempt(|| "make a mount namespace".into())?;
    u32::try_from(nix::unistd::gettid().as_raw())
        .map_err(|_| io::Error::other("odd thread number"))
        .attempt(|| "know its number".into())
}

fn enter(name: &str, programs: &Programs) -> Result<Child> {
    let spaces = CloneFlags::CLONE_FS
        | CloneFlags::CLONE_NEWNS
        | CloneFlags::CLONE_NEWNET
        | CloneFlags::CLONE_NEWUTS
        | CloneFlags::CLONE_NEWPID;
    unshare(spaces).attempt(|| format!("make the namespaces of host {name}"))?;
    nix::unistd::sethostname(name).attempt(|| format!("set the host name {name}"))?;
    let none: Option<&str> = None;
    // Mounts must not propagate in either direction.
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)
        .attempt(|| "make mounts private".into())?;
    mount_directories(programs)?;
    start_init()
}

fn mount_directories(programs: &Programs) -> Result<()> {
    let tmpfs = |path: &str| {
        mount(Some("tmpfs"), path, Some("tmpfs"), MsFlags::empty(), Some("mode=0755"))
            .attempt(|| format!("mount a tmpfs on {path}"))
    };
    // The programs may lie below one of the directories that are hidden next.
    tmpfs("/run")?;
    make_directory(PROGRAMS, 0o755)?;
    let none: Option<&str> = None;
    mount(Some(programs.directory()), PROGRAMS, none, MsFlags::MS_BIND, none)
        .attempt(|| format!("bind {} to {PROGRAMS}", programs.directory().display()))?;
    devices::replace()?;
    for directory in OWN_DIRECTORIES {
        tmpfs(directory)?;
    }
    make_directory(HOME, 0o755)?;
    make_directory(RUNTIME, 0o700)?;
    make_directory("/run/sshd", 0o755)?;
    set_mode("/tmp", 0o1777)
}

fn make_directory(path: &str, mode: u32) -> Result<()> {
    fs::create_dir_all(path).attempt(|| format!("make the directory {path}"))?;
    set_mode(path, mode)
}

fn set_mode(path: &str, mode: u32) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(path, fs::Permissions::from_mode(mode))
        .attempt(|| format!("set the mode of {path}"))
}

fn start_init() -> Result<Child> {
    let program = Path::new(PROGRAMS).join("posh-lab");
    let mut command = Command::new(&program);
    command.arg("init").env_clear().current_dir("/").stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut init =
        command.spawn().attempt(|| format!("start {} as process 1", program.display()))?;
    let stdout = init.stdout.take().expect("stdout is a pipe");
    let mut line = String::new();
    let read = BufReader::new(stdout).read_line(&mut line);
    match read.and_then(|_| {
        if line == "ready\n" { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
    }) {
        Ok(()) => Ok(init),
        Err(e) => {
            drop(ChildProcess::new(init));
            Err(e).attempt(|| "start process 1 of a host".into())
        }
    }
}
