//! The runner: the second program of this binary, which the daemon starts once
//! per mount table. It has these kinds of processes, all with one thread:
//!
//! * the **guard** waits for the daemon's end of the control socket to close and
//!   then kills everything below it, even when that is stuck;
//! * the **keeper** (process 1 of the PID namespace, where there is one) builds the view, and forks
//!   one supervisor per run, the next one before there is a run for it;
//! * a **supervisor** owns one run: it checks paths, opens files, forks the stages, reports their
//!   exits, and kills what is left when its socket closes. What may wait for a file system once the
//!   stages run, a process below it does (`teller`).
//!
//! None of them outlives the daemon: the sockets close with it, however it died.

mod budget;
mod build;
mod changes;
mod confine;
mod devices;
mod elf;
mod fence;
mod filter;
mod guards;
pub mod ids;
mod listing;
mod paths;
mod places;
mod processes;
mod programs;
mod root;
mod scratch;
mod spawn;
mod supervisor;
mod system;
mod teller;
mod view;
pub mod wire;

use std::{
    ffi::OsStr,
    fs::File,
    io::{self, Write as _},
    net::Shutdown,
    os::{
        fd::{AsFd as _, BorrowedFd, OwnedFd},
        unix::{ffi::OsStrExt as _, net::UnixStream},
    },
    process::ExitCode,
};

use nix::{
    errno::Errno,
    fcntl::OFlag,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sched::{CloneFlags, unshare},
    sys::{
        prctl,
        signal::{SigSet, Signal, kill},
        signalfd::{SfdFlags, SignalFd},
        wait::{Id, WaitPidFlag, WaitStatus, waitid, waitpid},
    },
    unistd::{ForkResult, Pid, dup2_stdin, getegid, geteuid, pipe2, setsid},
};
use posh_proto::executor::{RunOutput, rejected};

use self::wire::{Isolation, ViewReply, ViewSpec, read_frame, write_frame};
use crate::{error::Refusal, sys};

pub(crate) use self::{
    budget::Budget,
    fence::{CHANGE, READ, ReadableFiles, ground, rules},
    listing::open_directory,
    paths::{find, name_of},
    places::check_file,
    programs::{Programs, library_directories},
    system::{Hidden, taken},
    view::{View, is_shown, open_below, open_export, open_root, path_of, refuse},
};
pub use self::{budget::MAX_KEPT_BYTES, fence::LEAST_LANDLOCK, filter::ALLOWED as ALLOWED_CALLS};

/// Main function of a guard: the control socket is its standard input.
#[must_use]
pub fn main() -> ExitCode {
    match guard() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            complain(&error);
            ExitCode::FAILURE
        }
    }
}

/// Reports an error on standard error, if that is still open.
fn complain(error: &io::Error) {
    let _ = writeln!(io::stderr(), "posh-executor runner: {error}");
}

fn guard() -> io::Result<()> {
    let control = take_control()?;
    let spec: ViewSpec = read_frame(&control)?;
    // Started as /proc/self/exe, it would be listed as `exe`.
    let _ = prctl::set_name(c"posh-runner");
    // A session of its own: signals of the daemon's terminal are not for us.
    let _ = setsid();
    prctl::set_child_subreaper(true)?;
    confine::be_killed_first()?;
    confine::allow_hurry();
    let children = child_signals()?;
    if let Err(errno) = leave_namespaces(spec.isolation()) {
        let error = format!("cannot make a namespace: {}", errno.desc());
        return write_frame(
            &control,
            &ViewReply { error, kind: rejected::Kind::NoNamespace.into(), ..ViewReply::default() },
        );
    }
    match sys::fork()? {
        ForkResult::Child => {
            let status = match keep(&control, &spec, &children) {
                Ok(()) => 0,
                Err(error) => {
                    complain(&error);
                    1
                }
            };
            sys::exit_now(status)
        }
        ForkResult::Parent { child } => {
            wait_for_either_end(&control, &children, child);
            // Tells the daemon at once that this runner takes no more runs.
            let _ = control.shutdown(Shutdown::Both);
            processes::Below::Parents.kill();
            if !spec.scratch.is_empty() {
                let _ = std::fs::remove_dir_all(OsStr::from_bytes(&spec.scratch));
            }
            Ok(())
        }
    }
}

/// Moves the control socket off standard input, so that no child has it.
fn take_control() -> io::Result<UnixStream> {
    let stdin = io::stdin();
    let control = UnixStream::from(stdin.as_fd().try_clone_to_owned()?);
    dup2_stdin(File::open("/dev/null")?)?;
    Ok(control)
}

/// Enters new namespaces, all but the mount namespace, which is the keeper's:
/// the guard must still see the machine's own /tmp to clean up there.
fn leave_namespaces(isolation: Isolation) -> nix::Result<()> {
    if isolation == Isolation::Nothing {
        return Ok(());
    }
    let (uid, gid) = (geteuid(), getegid());
    // No annotated command needs the network or others' shared memory.
    let mut flags = CloneFlags::CLONE_NEWNET | CloneFlags::CLONE_NEWIPC | CloneFlags::CLONE_NEWUTS;
    if !uid.is_root() {
        flags |= CloneFlags::CLONE_NEWUSER;
    }
    if isolation == Isolation::MountsAndProcesses {
        flags |= CloneFlags::CLONE_NEWPID;
    }
    unshare(flags)?;
    if !uid.is_root() {
        let write = |file: &str, text: String| {
            std::fs::write(file, text)
                .map_err(|error| Errno::from_raw(error.raw_os_error().unwrap_or(0)))
        };
        write("/proc/self/setgroups", "deny".to_owned())?;
        write("/proc/self/uid_map", format!("{uid} {uid} 1"))?;
        write("/proc/self/gid_map", format!("{gid} {gid} 1"))?;
    }
    Ok(())
}

/// Returns when the keeper has ended or the daemon is gone; then the keeper is killed, and with it
/// its PID namespace.
fn wait_for_either_end(control: &UnixStream, children: &SignalFd, keeper: Pid) {
    loop {
        let mut ready = [
            PollFd::new(control.as_fd(), PollFlags::empty()),
            PollFd::new(children.as_fd(), PollFlags::POLLIN),
        ];
        match poll(&mut ready, PollTimeout::NONE) {
            Ok(_) if is_ready(&ready[0]) => break,
            Ok(_) => {
                let _ = children.read_signal();
                while let Ok(Some(ended)) = sys::reap() {
                    if ended.pid == keeper {
                        return;
                    }
                }
            }
            Err(Errno::EINTR) => {}
            Err(_) => break,
        }
    }
    let _ = kill(keeper, Signal::SIGKILL);
    let _ = waitpid(keeper, None);
}

/// The keeper: builds the view, then forks a supervisor for each run.
fn keep(control: &UnixStream, spec: &ViewSpec, children: &SignalFd) -> io::Result<()> {
    prctl::set_pdeathsig(Signal::SIGKILL)?;
    prctl::set_child_subreaper(true)?;
    let unset = confine::bound_view(spec);
    let view = match View::build(spec) {
        Ok(view) => view,
        Err(Refusal { kind, message, .. }) => {
            return write_frame(
                control,
                &ViewReply { error: message, kind: kind.into(), ..ViewReply::default() },
            );
        }
    };
    let reached = match confine::keeper(spec) {
        Ok(mut reached) => {
            reached.lacks.extend(unset);
            reached
        }
        Err(Refusal { kind, message, .. }) => {
            return write_frame(
                control,
                &ViewReply { error: message, kind: kind.into(), ..ViewReply::default() },
            );
        }
    };
    let used = scratch::ScratchUse::new(spec)?;
    let directories = view.directories.clone();
    write_frame(control, &ViewReply { reached, directories, ..ViewReply::default() })?;
    let mut supervisors = Vec::new();
    let (mut spare, mut has_spares) = (None, true);
    loop {
        if spare.is_none() && has_spares {
            spare = fork_spare(control, &view, &used, children, &mut supervisors).ok();
        }
        let asks = spare.as_ref().map_or(control.as_fd(), |taken: &OwnedFd| taken.as_fd());
        let [asked, ended] = wait_for([asks, children.as_fd()])?;
        if ended {
            let _ = children.read_signal();
            reap_supervisors(&mut supervisors);
            if let Err(errno) = used.clean() {
                complain(&errno.into());
            }
        }
        if !asked {
            continue;
        }
        if let Some(taken) = spare.take() {
            match sys::has_byte(&taken)? {
                true => {}
                false if is_closed(control)? => return Ok(()),
                // It has ended by itself. Whatever the reason, the next one would, too.
                false => has_spares = false,
            }
            continue;
        }
        let Some(socket) = sys::receive_descriptors(control.as_fd())?.into_iter().next() else {
            return Ok(());
        };
        let socket = UnixStream::from(socket);
        match sys::fork() {
            Ok(ForkResult::Child) => sys::exit_now(serve(socket, &view, &used, children)),
            Ok(ForkResult::Parent { child }) => supervisors.push(child),
            Err(errno) => {
                let message = format!("cannot start a process on the server: {}", errno.desc());
                let _ = write_frame(
                    &socket,
                    &RunOutput::from(Refusal::new(rejected::Kind::SpawnFailed, message)),
                );
            }
        }
    }
}

/// Forks a supervisor before there is a run for it, so that the run does not wait for the fork. It
/// takes the next run off the control socket by itself, and then writes a byte to the returned
/// pipe; it ends without one when the daemon is gone.
fn fork_spare(
    control: &UnixStream,
    view: &View,
    used: &scratch::ScratchUse,
    children: &SignalFd,
    supervisors: &mut Vec<Pid>,
) -> nix::Result<OwnedFd> {
    let (taken, tell) = pipe2(OFlag::O_CLOEXEC)?;
    match sys::fork()? {
        ForkResult::Child => {
            drop(taken);
            sys::exit_now(serve_as_spare(control, view, used, children, tell).unwrap_or(0))
        }
        ForkResult::Parent { child } => supervisors.push(child),
    }
    Ok(taken)
}

/// Main function of a spare supervisor; `None` without a run.
fn serve_as_spare(
    control: &UnixStream,
    view: &View,
    used: &scratch::ScratchUse,
    children: &SignalFd,
    tell: OwnedFd,
) -> Option<i32> {
    prctl::set_pdeathsig(Signal::SIGKILL).ok()?;
    let socket = sys::receive_descriptors(control.as_fd()).ok()?.into_iter().next()?;
    File::from(tell).write_all(b"t").ok()?;
    Some(serve(socket.into(), view, used, children))
}

/// Main function of a supervisor that has a run.
fn serve(socket: UnixStream, view: &View, used: &scratch::ScratchUse, children: &SignalFd) -> i32 {
    match used.begin() {
        Ok(()) => supervisor::main(socket, view, children),
        Err(errno) => {
            complain(&errno.into());
            1
        }
    }
}

/// Returns true if the daemon has closed its end.
fn is_closed(control: &UnixStream) -> nix::Result<bool> {
    let mut ready = [PollFd::new(control.as_fd(), PollFlags::empty())];
    poll(&mut ready, PollTimeout::ZERO)?;
    Ok(is_ready(&ready[0]))
}

/// Reaps supervisors, and kills the orphans of one that did not end by itself. An orphan that has
/// ended may have left others: the keeper looks until its only children are supervisors.
fn reap_supervisors(supervisors: &mut Vec<Pid>) {
    let mut are_orphans = false;
    kill_stopped();
    while let Ok(Some(ended)) = sys::reap() {
        let supervisor = supervisors.iter().position(|pid| *pid == ended.pid);
        are_orphans |= supervisor.is_none() || ended.status != 0;
        if let Some(at) = supervisor {
            supervisors.swap_remove(at);
        }
    }
    if are_orphans {
        processes::kill_children_except(supervisors);
    }
}

/// Kills supervisors that are stopped: another process of the commands' user did that (SIGSTOP),
/// and they would end nothing when their runs are given up or their callers' rights are taken away.
fn kill_stopped() {
    let stopped = WaitPidFlag::WSTOPPED | WaitPidFlag::WNOHANG;
    while let Ok(WaitStatus::Stopped(pid, _)) = waitid(Id::All, stopped) {
        let _ = kill(pid, Signal::SIGKILL);
    }
}

/// SIGCHLD as a descriptor; it is blocked from now on.
fn child_signals() -> nix::Result<SignalFd> {
    let mut mask = SigSet::empty();
    mask.add(Signal::SIGCHLD);
    mask.thread_block()?;
    SignalFd::with_flags(&mask, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)
}

/// Waits until one of them is readable or at its end.
fn wait_for<const COUNT: usize>(fds: [BorrowedFd<'_>; COUNT]) -> nix::Result<[bool; COUNT]> {
    poll_all(fds, PollTimeout::NONE)
}

/// Looks which of them are readable or at their end.
fn look_at<const COUNT: usize>(fds: [BorrowedFd<'_>; COUNT]) -> nix::Result<[bool; COUNT]> {
    poll_all(fds, PollTimeout::ZERO)
}

fn poll_all<const COUNT: usize>(
    fds: [BorrowedFd<'_>; COUNT],
    timeout: PollTimeout,
) -> nix::Result<[bool; COUNT]> {
    let mut ready = fds.map(|fd| PollFd::new(fd, PollFlags::POLLIN));
    loop {
        match poll(&mut ready, timeout) {
            Err(Errno::EINTR) => {}
            Ok(_) => return Ok(ready.each_ref().map(is_ready)),
            Err(errno) => return Err(errno),
        }
    }
}

fn is_ready(fd: &PollFd<'_>) -> bool {
    fd.revents().is_some_and(|events| !events.is_empty())
}
