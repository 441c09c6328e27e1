//! Privileges that a runner's processes give up, beside what namespaces hide: capabilities, system
//! calls that no command needs, another user's rights. The keeper and the supervisors give them up
//! once for all commands that they fork; `fence` limits the files of a single command.
//!
//! execve(2) undoes none of this: no program gives its caller further rights.

use std::{fmt, fs, io, os::fd::OwnedFd};

use nix::{
    errno::Errno,
    libc,
    sys::{
        prctl,
        resource::{Resource, getrlimit, setrlimit},
        utsname::uname,
    },
    unistd::{Gid, Uid, fchdir, geteuid, setgroups, setresgid, setresuid},
};
use posh_proto::executor::rejected::Kind;

use super::{
    fence,
    filter::{self, Holes},
    wire::{Bounds, ConfinementReport, Isolation, ViewSpec, ViewUser},
};
use crate::{config::Level, error::Refusal, sys};

/// Root's capabilities over files (capabilities(7)): CHOWN, DAC_OVERRIDE, DAC_READ_SEARCH, FOWNER,
/// FSETID. A command of root keeps these, since `tar -x` and `cat` need them to act as root's do;
/// all others are dropped.
const ROOTS_FILES: u64 = 0b1_1111;

/// A command's working directory may be closed to its user, and stays its directory all the same:
/// entering it takes DAC_READ_SEARCH. It is effective for that one call only, and no program gets
/// it.
const SEARCH: u64 = 1 << 2;

/// Capabilities by which the keeper gives its supervisors their user, SETGID and SETUID, and ends
/// them, KILL.
const KEEPERS: u64 = ROOTS_FILES | 1 << 5 | 1 << 6 | 1 << 7;

/// Gives up all that no supervisor needs. Called when the view is complete, by a process that has
/// one thread.
pub fn keeper(spec: &ViewSpec) -> Result<ConfinementReport, Refusal> {
    let failed = |what: &str, errno: Errno| {
        Refusal::new(Kind::NoNamespace, format!("cannot {what}: {}", errno.desc()))
    };
    let mut reached = namespaces(spec);
    // Other processes must not read our memory or descriptors: one of these leads to the root's
    // writable mount.
    prctl::set_dumpable(false)
        .map_err(|errno| failed("hide the runner from its commands", errno))?;
    prctl::set_no_new_privs().map_err(|errno| failed("give up new privileges", errno))?;
    if geteuid().is_root() || spec.isolation() != Isolation::Nothing {
        let is_roots = geteuid().is_root() && spec.user.as_ref().is_none_or(|user| user.uid == 0);
        sys::bound_capabilities(if is_roots { ROOTS_FILES } else { 0 })
            .and_then(|()| match geteuid().is_root() {
                true => sys::keep_capabilities(KEEPERS, KEEPERS),
                false => sys::keep_capabilities(SEARCH, 0),
            })
            .map_err(|errno| failed("give up capabilities", errno))?;
    }
    let holes =
        if spec.mounts.iter().any(|mount| mount.no_holes) { Holes::Hidden } else { Holes::Shown };
    match filter::apply(spec.isolation(), holes).and_then(|()| filter::prepare()) {
        Ok(()) => reached.has.push("seccomp".to_owned()),
        Err(why) => reached.lacks.push(format!("seccomp ({why})")),
    }
    match fence::reached() {
        Ok(landlock) => reached.has.push(landlock),
        Err(missing) => reached.lacks.push(missing.to_string()),
    }
    Ok(reached)
}

/// Takes the rights of the commands' user; called by a supervisor, before it accesses any path.
pub fn take_user(user: Option<&ViewUser>) -> nix::Result<()> {
    if !geteuid().is_root() {
        return Ok(());
    }
    if let Some(ViewUser { uid, gid, groups, .. }) = user.filter(|user| user.uid != 0) {
        let groups: Vec<Gid> = groups.iter().map(|group| Gid::from_raw(*group)).collect();
        setgroups(&groups)?;
        let (uid, gid) = (Uid::from_raw(*uid), Gid::from_raw(*gid));
        setresgid(gid, gid, gid)?;
        sys::keep_capabilities_of_others(true)?;
        setresuid(uid, uid, uid)?;
        sys::keep_capabilities_of_others(false)?;
        return sys::keep_capabilities(SEARCH, 0);
    }
    sys::keep_capabilities(ROOTS_FILES, ROOTS_FILES)
}

/// Data size of a supervisor: the largest specification, decoded and with a rule and a check for
/// each of its words, takes a third of that, and the names of the largest trees as much.
pub const SUPERVISOR_BYTES: u64 = 128 << 20;

/// Bound of a supervisor's own memory: nothing else bounds what it looks up for a client. Beyond
/// it, the supervisor ends, and with it its run. Commands do not have it.
pub struct OwnMemory {
    before: (u64, u64),
}

impl OwnMemory {
    /// Sets it; the hard limit stays, so that the commands' can be raised to it.
    pub fn bound() -> nix::Result<Self> {
        let before = getrlimit(Resource::RLIMIT_DATA)?;
        sys::set_limit(libc::RLIMIT_DATA, SUPERVISOR_BYTES.min(before.0), before.1)?;
        Ok(Self { before })
    }

    /// Restores the limit: called by a command's own process, before its own limits are set.
    pub fn give_back(&self) -> nix::Result<()> {
        sys::set_limit(libc::RLIMIT_DATA, self.before.0, self.before.1)
    }
}

/// Enters a command's directory, in the command's own process; afterwards only its user's rights
/// are left.
pub fn enter_directory(directory: &OwnedFd) -> nix::Result<()> {
    let entered = match fchdir(directory) {
        Err(Errno::EACCES) => {
            sys::keep_capabilities(SEARCH, SEARCH).and_then(|()| fchdir(directory))
        }
        other => other,
    };
    if !geteuid().is_root() {
        sys::keep_capabilities(0, 0)?;
    }
    entered
}

/// Sets the bounds of one command; the workstation may have set lower ones.
pub fn set_bounds(bounds: &Bounds) -> nix::Result<()> {
    // A command's core would be written to a directory of the workstation.
    sys::lower_limit(libc::RLIMIT_CORE, 0)?;
    sys::lower_limit(libc::RLIMIT_NICE, 0)?;
    for (resource, bound) in [
        (libc::RLIMIT_NPROC, bounds.processes),
        (libc::RLIMIT_DATA, bounds.memory_bytes),
        (libc::RLIMIT_FSIZE, bounds.file_bytes),
        (libc::RLIMIT_NOFILE, bounds.open_files),
    ] {
        if bound > 0 {
            sys::lower_limit(resource, bound)?;
        }
    }
    Ok(())
}

/// When memory runs out, the OOM killer shall choose runners and their commands, rather than the
/// executor or other programs of the machine. Children inherit the score, and no command has the
/// right (CAP_SYS_RESOURCE) or the /proc to lower it.
const OOM_SCORE: i32 = 500;

/// Makes the OOM killer prefer this process, and all that it starts.
pub fn be_killed_first() -> io::Result<()> {
    const FILE: &str = "/proc/self/oom_score_adj";
    let own = fs::read_to_string(FILE)?.trim().parse().unwrap_or(0);
    fs::write(FILE, OOM_SCORE.max(own).to_string())
}

/// Niceness of a supervisor that ends its run: thousands of processes that always run would let it
/// wait for seconds.
const HURRY: i32 = -20;

/// Lets supervisors have that niceness later, when they have their user's rights. Commands can't:
/// see [`set_bounds`]. An executor of another user may not allow it; runs end all the same.
pub fn allow_hurry() {
    // The limit is 20 minus the niceness (getrlimit(2)).
    const MOST: u64 = 40;
    if geteuid().is_root() {
        let _or_slower = setrlimit(Resource::RLIMIT_NICE, MOST, MOST);
    }
}

/// Goes before everything else that runs on this machine: called by a supervisor that only ends
/// what is below it.
pub fn hurry() {
    sys::set_nice(HURRY);
}

/// Sets the bounds of all of a view's commands together; returns descriptions of those that this
/// machine does not let root set. Called before the view is complete: its /proc has no settings.
pub fn bound_view(spec: &ViewSpec) -> Vec<String> {
    let unset: Vec<String> =
        bound_processes(spec).into_iter().chain(bound_shared_memory(spec)).collect();
    // An executor of another user may set none of them, which is no fault of the machine.
    if geteuid().is_root() { unset } else { Vec::new() }
}

/// Bounds process ids, in a PID namespace of its own (since Linux 6.14); elsewhere the user's limit
/// must do, which does not apply to root.
fn bound_processes(spec: &ViewSpec) -> Option<String> {
    /// The kernel takes no less: the first 300 numbers are used once only.
    const LEAST: u64 = 302;
    let is_own = spec.isolation() == Isolation::MountsAndProcesses && is_kernel_since(6, 14);
    if is_own && spec.bounds.processes > 0 {
        return set("pid_max", &spec.bounds.processes.max(LEAST).to_string());
    }
    None
}

/// Sets a kernel setting of this namespace; returns a description of the failure.
fn set(setting: &str, value: &str) -> Option<String> {
    let path = format!("/proc/sys/kernel/{setting}");
    let error = fs::write(&path, value).err()?;
    Some(format!("a bound of each view ({path}: {error})"))
}

/// Bounds System V shared memory, messages and semaphores, which outlive their processes
/// (sysvipc(7)) and have no other bound: all of a view's, in an IPC namespace of its own, take no
/// more than its temporary files may. An executor without root's rights may not set that.
fn bound_shared_memory(spec: &ViewSpec) -> Vec<String> {
    /// Queues of up to 16 KiB each (msgmnb); a message of one byte takes 70 times that.
    const MESSAGE_QUEUES: u32 = 16;
    /// SEMMSL, SEMMNS, SEMOPM, SEMMNI (semget(2)).
    const SEMAPHORES: &str = "250 1024 32 64";
    if spec.isolation() == Isolation::Nothing || spec.bounds.tmp_bytes == 0 || !geteuid().is_root()
    {
        return Vec::new();
    }
    let page_bytes = rustix::param::page_size() as u64;
    let bounds = [
        ("shmall", spec.bounds.tmp_bytes.div_ceil(page_bytes)),
        ("msgmni", u64::from(MESSAGE_QUEUES)),
    ]
    .map(|(setting, bound)| (setting, bound.to_string()));
    let bounds = bounds.into_iter().chain([("sem", SEMAPHORES.to_owned())]);
    bounds.filter_map(|(setting, bound)| set(setting, &bound)).collect()
}

/// Before Linux 6.14, the setting was the whole machine's.
fn is_kernel_since(major: u32, minor: u32) -> bool {
    let Ok(name) = uname() else { return false };
    let release = name.release().to_string_lossy().into_owned();
    let mut numbers = release.split(['.', '-']).map_while(|part| part.parse::<u32>().ok());
    numbers.next().zip(numbers.next()).is_some_and(|version| version >= (major, minor))
}

impl ConfinementReport {
    /// The level reached.
    pub fn level(&self) -> Level {
        let has = |what: &str| self.has.iter().any(|one| one.starts_with(what));
        match (
            has("mounts") && has("network"),
            has("processes") && has("seccomp") && has("landlock"),
        ) {
            (true, true) => Level::Strict,
            (true, false) => Level::Namespaces,
            (false, _) => Level::None,
        }
    }
}

impl fmt::Display for ConfinementReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let level = self.level();
        match (self.has.is_empty(), self.lacks.is_empty()) {
            (true, _) => write!(f, "{level}; missing: {}", self.lacks.join(", ")),
            (false, true) => write!(f, "{level}: {}", self.has.join(", ")),
            (false, false) => {
                write!(f, "{level}: {}; missing: {}", self.has.join(", "), self.lacks.join(", "))
            }
        }
    }
}

fn namespaces(spec: &ViewSpec) -> ConfinementReport {
    let mut reached = ConfinementReport::default();
    match spec.isolation() {
        Isolation::Nothing => {
            reached.lacks.push("mounts, processes and network of their own".to_owned())
        }
        Isolation::Mounts => {
            reached.has = ["mounts", "network"].map(str::to_owned).to_vec();
            reached.lacks.push("processes of their own".to_owned());
        }
        Isolation::MountsAndProcesses => {
            reached.has = ["mounts", "processes", "network"].map(str::to_owned).to_vec();
        }
    }
    reached
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_reached_has_a_level() {
        let reached = |has: &[&str], lacks: &[&str]| ConfinementReport {
            has: has.iter().map(ToString::to_string).collect(),
            lacks: lacks.iter().map(ToString::to_string).collect(),
        };
        for (has, lacks, expected) in [
            (
                &["mounts", "processes", "network", "seccomp", "landlock 7"][..],
                &[][..],
                "strict: mounts, processes, network, seccomp, landlock 7",
            ),
            (
                &["mounts", "network", "seccomp"],
                &["landlock (none)"],
                "namespaces: mounts, network, seccomp; missing: landlock (none)",
            ),
            (&["seccomp", "landlock 1"], &["mounts"], "none: seccomp, landlock 1; missing: mounts"),
            (&[], &["everything"], "none; missing: everything"),
        ] {
            assert_eq!(reached(has, lacks).to_string(), expected);
        }
    }
}
