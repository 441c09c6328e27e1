//! A cgroup per run (cgroups(7), version 2), where the system has delegated one to the executor:
//! bounds of memory and processes for all that a run starts, and an end for all of it at once.
//!
//! A cgroup is delegated if its attribute says so (`user.delegate` or `trusted.delegate`, as
//! systemd's `Delegate=yes` sets it), or if the configuration names it. Any other is left alone,
//! whatever rights we have: others manage it.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, ErrorKind},
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use fs_mapper::mountinfo::MountInfo;

use crate::config::{Confinement, machine_memory_bytes};

/// Child of the executor's own processes: a cgroup that enables controllers for its children must
/// contain no process itself (cgroups(7), "no internal processes").
const OWN: &str = "executor";
/// Prefix of the name of a run's cgroup.
const RUN: &str = "run-";
/// Controllers that bound runs, if they can be enabled.
const CONTROLLERS: [&str; 2] = ["memory", "pids"];
/// Attempts to remove a cgroup: killed processes are gone within milliseconds, unless a dead disk
/// holds them. The next start removes the rest.
const REMOVALS: u32 = 50;
const BETWEEN_REMOVALS: Duration = Duration::from_millis(20);

/// The delegated cgroup, parent of the runs' cgroups.
#[derive(Debug)]
pub struct Cgroups {
    directory: PathBuf,
    controllers: Vec<&'static str>,
    max_processes: u64,
    max_memory_bytes: u64,
    next: AtomicU64,
}

/// Cgroup of one run. Dropping it kills what is left in it.
#[derive(Debug)]
pub struct RunCgroup(PathBuf);

/// A cgroup that can't be used.
#[derive(Debug, thiserror::Error)]
#[error("cannot {attempt} the cgroup {}: {error}", directory.display())]
pub struct CgroupError {
    attempt: &'static str,
    directory: PathBuf,
    #[source]
    error: io::Error,
}

impl Cgroups {
    /// Takes over the delegated cgroup, if there is one.
    ///
    /// # Errors
    /// The configured cgroup can't be used.
    pub fn take(confinement: &Confinement) -> Result<Option<Self>, CgroupError> {
        let directory = match &confinement.cgroup {
            Some(named) => Some(named.clone()),
            None => own().filter(|own| is_delegated(own)),
        };
        let Some(directory) = directory else { return Ok(None) };
        match Self::prepare(&directory, confinement) {
            Ok(cgroups) => Ok(Some(cgroups)),
            Err(error) if confinement.cgroup.is_some() => Err(error),
            Err(error) => {
                tracing::warn!(%error, "the delegated cgroup is not used");
                Ok(None)
            }
        }
    }

    fn prepare(directory: &Path, confinement: &Confinement) -> Result<Self, CgroupError> {
        let failed = |attempt: &'static str| {
            let directory = directory.to_owned();
            move |error| CgroupError { attempt, directory, error }
        };
        let controllers =
            fs::read_to_string(directory.join("cgroup.controllers")).map_err(failed("read"))?;
        let own = directory.join(OWN);
        make(&own).map_err(failed("make one below"))?;
        fs::write(own.join("cgroup.procs"), "0").map_err(failed("enter"))?;
        let offered = CONTROLLERS
            .into_iter()
            .filter(|name| controllers.split_whitespace().any(|one| one == *name));
        let enable = |name: &&str| {
            fs::write(directory.join("cgroup.subtree_control"), format!("+{name}")).is_ok()
        };
        let controllers = offered.filter(enable).collect();
        for entry in fs::read_dir(directory).map_err(failed("list"))?.flatten() {
            // Left by an executor that was killed.
            if entry.file_name().to_string_lossy().starts_with(RUN) {
                remove(&entry.path());
            }
        }
        Ok(Self {
            directory: directory.to_owned(),
            controllers,
            max_processes: confinement.max_processes,
            max_memory_bytes: confinement.max_memory_bytes,
            next: AtomicU64::new(0),
        })
    }

    /// Creates a cgroup for a run of so many commands, and opens the file by which its first
    /// process enters it.
    ///
    /// # Errors
    /// Errors of cgroupfs.
    pub fn make(&self, commands: usize) -> io::Result<(RunCgroup, OwnedFd)> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let path = self.directory.join(format!("{RUN}{}-{number}", std::process::id()));
        fs::create_dir(&path)?;
        let run = RunCgroup(path);
        let bounds = [
            ("memory", "memory.max", self.memory_of(commands)),
            // The supervisor and who tells its commands' ends are two more processes.
            ("pids", "pids.max", self.max_processes.saturating_add(2)),
        ];
        for (controller, file, bound) in bounds {
            if bound > 1 && self.controllers.contains(&controller) {
                fs::write(run.0.join(file), bound.to_string())?;
            }
        }
        let entrance = OpenOptions::new().write(true).open(run.0.join("cgroup.procs"))?;
        Ok((run, entrance.into()))
    }

    /// `commands` times the bound of one command, but at most half of the machine's memory, unless
    /// the bound of one command is more.
    fn memory_of(&self, commands: usize) -> u64 {
        let most = self.max_memory_bytes.max(machine_memory_bytes() / 2);
        self.max_memory_bytes.saturating_mul(commands as u64).min(most)
    }

    /// Description of the bounds for `posh status`.
    #[must_use]
    pub fn words(&self) -> String {
        match self.controllers.is_empty() {
            true => "cgroup".to_owned(),
            false => format!("cgroup ({})", self.controllers.join(", ")),
        }
    }
}

/// Enters the cgroup: called by a run's first process, with the file that [`Cgroups::make`] opened.
///
/// # Errors
/// Errors of cgroupfs.
pub fn enter(entrance: OwnedFd) -> io::Result<()> {
    io::Write::write_all(&mut File::from(entrance), b"0")
}

impl Drop for RunCgroup {
    fn drop(&mut self) {
        let path = std::mem::take(&mut self.0);
        match tokio::runtime::Handle::try_current() {
            Ok(runtime) => drop(runtime.spawn_blocking(move || remove(&path))),
            Err(_) => remove(&path),
        }
    }
}

/// Kills what is left in a run's cgroup, and removes it.
fn remove(run: &Path) {
    // `cgroup.kill` needs Linux 5.14; the run's own processes are killed by other means, too.
    let _ = fs::write(run.join("cgroup.kill"), "1");
    for _ in 0..REMOVALS {
        match fs::remove_dir(run) {
            Err(error) if error.kind() == ErrorKind::ResourceBusy => {
                std::thread::sleep(BETWEEN_REMOVALS)
            }
            Err(error) if error.kind() != ErrorKind::NotFound => {
                tracing::warn!(path = %run.display(), %error, "a run's cgroup can't be removed");
                return;
            }
            _ => return,
        }
    }
    tracing::warn!(path = %run.display(), "a run's processes are not dead yet; its cgroup stays");
}

fn make(directory: &Path) -> io::Result<()> {
    fs::create_dir(directory).or_else(|error| match error.kind() {
        ErrorKind::AlreadyExists => Ok(()),
        _ => Err(error),
    })
}

/// Directory of our own cgroup, or of its delegated parent if we are in [`OWN`], as after a restart
/// in place.
fn own() -> Option<PathBuf> {
    let about = fs::read_to_string("/proc/self/cgroup").ok()?;
    let path = about.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let mounts = MountInfo::read().ok()?;
    let mount =
        mounts.visible().into_iter().find(|entry| entry.fs_type == "cgroup2")?.mount_point.clone();
    let directory = mount.join(path);
    Some(if directory.ends_with(OWN) { directory.parent()?.to_owned() } else { directory })
}

fn is_delegated(directory: &Path) -> bool {
    let is_set = |name: &&str| {
        let mut value = [0; 2];
        rustix::fs::getxattr(directory, *name, &mut value)
            .is_ok_and(|count| value[..count] == *b"1")
    };
    ["user.delegate", "trusted.delegate"].iter().any(is_set)
}
