//! What a runner's processes give up, besides what the namespaces hide: privileges,
//! system calls that no command needs, another user's rights. It is given up by the keeper and
//! the supervisors, once for all commands that they fork; the files that a
//! single command reaches are the matter of `fence`.
//!
//! Nothing here is undone by execve(2): no program gives its caller further rights.

use std::fs;

use nix::{
    errno::Errno,
    libc,
    sys::prctl,
    unistd::{Gid, Uid, geteuid, setgroups, setresgid, setresuid},
};
use posh_proto::executor::rejected::Kind;

use super::{
    filter,
    wire::{Bounds, Identity, Isolation, Reached, ViewSpec},
};
use crate::{error::Refusal, sys};

/// What root can do with files (capabilities(7)): CHOWN, DAC_OVERRIDE, DAC_READ_SEARCH, FOWNER, FSETID. A command
/// of root keeps these, since without them `tar -x` and `cat` would not do what they do for root; all else is lost.
const ROOTS_FILES: u64 = 0b1_1111;

/// What the keeper needs to give its supervisors their user: SETGID, SETUID; and KILL, to end them.
const KEEPERS: u64 = ROOTS_FILES | 1 << 5 | 1 << 6 | 1 << 7;

/// Gives up all that no supervisor needs. Called when the view stands, by a process that has one thread.
pub fn keeper(spec: &ViewSpec) -> Result<Reached, Refusal> {
    let failed = |what: &str, errno: Errno| Refusal::new(Kind::NoNamespace, format!("cannot {what}: {}", errno.desc()));
    let mut reached = namespaces(spec);
    // Nobody may look into our memory or descriptors: one of these leads to the root's writable side.
    prctl::set_dumpable(false).map_err(|errno| failed("hide the runner from its commands", errno))?;
    bound_processes(spec.bounds, spec.isolation());
    prctl::set_no_new_privs().map_err(|errno| failed("give up new privileges", errno))?;
    if geteuid().is_root() || spec.isolation() != Isolation::Nothing {
        let is_roots = geteuid().is_root() && spec.identity.as_ref().is_none_or(|identity| identity.uid == 0);
        sys::bound_capabilities(if is_roots { ROOTS_FILES } else { 0 })
            .and_then(|()| sys::keep_capabilities(if geteuid().is_root() { KEEPERS } else { 0 }))
            .map_err(|errno| failed("give up capabilities", errno))?;
    }
    match filter::apply() {
        Ok(()) => reached.has.push("seccomp".to_owned()),
        Err(why) => reached.lacks.push(format!("seccomp ({why})")),
    }
    Ok(reached)
}

/// Takes the rights of whose commands these are; called by a supervisor, before it looks at any path.
pub fn take_identity(identity: Option<&Identity>) -> nix::Result<()> {
    if !geteuid().is_root() {
        return Ok(());
    }
    if let Some(Identity { uid, gid, groups }) = identity.filter(|identity| identity.uid != 0) {
        let groups: Vec<Gid> = groups.iter().map(|group| Gid::from_raw(*group)).collect();
        setgroups(&groups)?;
        let (uid, gid) = (Uid::from_raw(*uid), Gid::from_raw(*gid));
        setresgid(gid, gid, gid)?;
        setresuid(uid, uid, uid)?;
        return sys::keep_capabilities(0);
    }
    sys::keep_capabilities(ROOTS_FILES)
}

/// Sets the bounds of one command; the workstation may have set lower ones.
pub fn set_bounds(bounds: &Bounds) -> nix::Result<()> {
    // The core of a command would lie in a directory of the workstation.
    sys::lower_limit(libc::RLIMIT_CORE, 0)?;
    for (resource, bound) in [
        (libc::RLIMIT_NPROC, bounds.processes),
        (libc::RLIMIT_DATA, bounds.memory_bytes),
        (libc::RLIMIT_FSIZE, bounds.file_bytes),
    ] {
        if bound > 0 {
            sys::lower_limit(resource, bound)?;
        }
    }
    Ok(())
}

/// The numbers of processes end there, in a namespace of their own (since Linux 6.14); elsewhere the user's limit
/// has to do, which root has not.
fn bound_processes(bounds: Bounds, isolation: Isolation) {
    /// The kernel takes no less: the first 300 numbers are used once only.
    const LEAST: u64 = 302;
    if isolation == Isolation::MountsAndProcesses && bounds.processes > 0 {
        let _ = fs::write("/proc/sys/kernel/pid_max", bounds.processes.max(LEAST).to_string());
    }
}

fn namespaces(spec: &ViewSpec) -> Reached {
    let mut reached = Reached::default();
    match spec.isolation() {
        Isolation::Nothing => reached.lacks.push("mounts, processes and network of their own".to_owned()),
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
