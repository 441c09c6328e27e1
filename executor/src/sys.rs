//! System calls that neither std nor nix offers safely: the crate's only
//! `unsafe` code.
//!
//! A runner must fork (posix_spawn can't hold a child back until all its siblings are set up, nor
//! close, ignore and limit exactly what a shell's child has), receive descriptors, and set mounts
//! read-only. Each function is safe to call under the condition that its comment states; the runner
//! keeps them by having one thread.
#![allow(unsafe_code, reason = "the one file for it, see above")]

use std::{
    ffi::CString,
    io,
    marker::PhantomData,
    mem,
    os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
    ptr,
};

use nix::{
    errno::Errno,
    fcntl::{FcntlArg, OFlag, fcntl},
    libc,
    sys::socket::{ControlMessageOwned, MsgFlags, recvmsg},
    unistd::{ForkResult, Gid, Pid, Uid, setfsgid, setfsuid},
};
use posh_proto::executor::WindowSize;

use crate::identity::ViewUser;

/// The number of signals on Linux.
const SIGNALS: i32 = 64;

/// Forks. Must be called by a process that has one thread, which both runner
/// processes have for all their life: then the child may do anything.
pub fn fork() -> nix::Result<ForkResult> {
    // SAFETY: with one thread no lock can be held by a thread that the child lacks.
    unsafe { nix::unistd::fork() }
}

/// Ends the process at once, without handlers registered for its exit.
pub fn exit_now(status: i32) -> ! {
    // SAFETY: _exit has no preconditions.
    unsafe { libc::_exit(status) }
}

/// Gives this process exactly the descriptors in `wanted` (each a source and its future number),
/// whatever numbers the sources have; all others are closed on exec. `kept` are two more to be used
/// until then. Must be called in a child that is about to exec: owners of those numbers have lost
/// them.
pub fn install_descriptors(
    wanted: &[(BorrowedFd<'_>, RawFd)],
    kept: [BorrowedFd<'_>; 2],
) -> nix::Result<[OwnedFd; 2]> {
    // First out of the way of every wanted number, then to its place.
    let highest =
        wanted.iter().map(|(_, target)| *target).max().unwrap_or(0).max(libc::STDERR_FILENO);
    let lift = |fd: BorrowedFd<'_>| fcntl(fd, FcntlArg::F_DUPFD_CLOEXEC(highest + 1));
    let lifted = wanted
        .iter()
        .map(|(source, target)| Ok((lift(*source)?, *target)))
        .collect::<nix::Result<Vec<_>>>()?;
    let kept = [lift(kept[0])?, lift(kept[1])?];
    // SAFETY: no pointers. dup2 and close_range change the descriptor table only, and
    // the two descriptors made just now are owned by nobody else.
    unsafe {
        close_on_exec(0, u32::MAX)?;
        for (source, target) in lifted {
            Errno::result(libc::dup2(source, target))?;
        }
        Ok(kept.map(|fd| OwnedFd::from_raw_fd(fd)))
    }
}

fn close_on_exec(first: u32, last: u32) -> nix::Result<()> {
    const CLOSE_RANGE_CLOEXEC: libc::c_uint = 4;
    // SAFETY: no pointers; nothing is closed now.
    Errno::result(unsafe { libc::syscall(libc::SYS_close_range, first, last, CLOSE_RANGE_CLOEXEC) })
        .map(drop)
}

/// Sets all signals to ignored (bit n-1 of `ignored` is signal n) or to their
/// defaults, and the mask of blocked ones to `blocked`.
pub fn set_signals(ignored: u64, blocked: u64) {
    // SAFETY: the structures are plain data for which zero is valid; SIG_IGN and
    // SIG_DFL run no code. Signals that can't be set (KILL, STOP, libc's own) fail,
    // and keep their defaults.
    unsafe {
        let mut action: libc::sigaction = mem::zeroed();
        let mut mask: libc::sigset_t = mem::zeroed();
        for signal in 1..=SIGNALS {
            let bit = 1_u64 << (signal - 1);
            action.sa_sigaction = if ignored & bit != 0 { libc::SIG_IGN } else { libc::SIG_DFL };
            libc::sigaction(signal, &raw const action, ptr::null_mut());
            if blocked & bit != 0 {
                libc::sigaddset(&raw mut mask, signal);
            }
        }
        libc::sigprocmask(libc::SIG_SETMASK, &raw const mask, ptr::null_mut());
    }
}

/// Sets a resource limit, lowered to this process's hard limit.
pub fn set_limit(resource: u32, soft: u64, hard: u64) -> nix::Result<()> {
    let wanted = libc::rlimit { rlim_cur: soft.min(hard), rlim_max: hard };
    // SAFETY: both structures live across the calls; unknown resources give EINVAL.
    unsafe {
        if libc::setrlimit(resource as _, &raw const wanted) == 0 {
            return Ok(());
        }
        let mut present: libc::rlimit = mem::zeroed();
        Errno::result(libc::getrlimit(resource as _, &raw mut present))?;
        let hard = hard.min(present.rlim_max);
        let lowered = libc::rlimit { rlim_cur: soft.min(hard), rlim_max: hard };
        Errno::result(libc::setrlimit(resource as _, &raw const lowered)).map(drop)
    }
}

/// Lowers a resource limit to `bound`, if it is higher.
pub fn lower_limit(resource: u32, bound: u64) -> nix::Result<()> {
    // SAFETY: the structure lives across both calls; unknown resources give EINVAL.
    unsafe {
        let mut limit: libc::rlimit = mem::zeroed();
        Errno::result(libc::getrlimit(resource as _, &raw mut limit))?;
        limit.rlim_max = limit.rlim_max.min(bound);
        limit.rlim_cur = limit.rlim_cur.min(limit.rlim_max);
        Errno::result(libc::setrlimit(resource as _, &raw const limit)).map(drop)
    }
}

/// Sets the niceness, as far as this process may.
pub fn set_nice(nice: i32) {
    // SAFETY: no pointers. Lowering needs a privilege; without it the command runs
    // with ours, which changes its speed only.
    unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, nice) };
}

/// Drops every capability that is not in `kept` (bit n is capability n) from the bounding set, so
/// that no program started from now on has it, whatever its user. Capabilities that the kernel does
/// not know are skipped.
pub fn bound_capabilities(kept: u64) -> nix::Result<()> {
    for number in (0..u64::from(u64::BITS)).filter(|number| kept & (1 << number) == 0) {
        // SAFETY: no pointers.
        match Errno::result(unsafe { libc::prctl(libc::PR_CAPBSET_DROP, number, 0, 0, 0) }) {
            Ok(_) => {}
            Err(Errno::EINVAL) => break,
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}

/// Gives up every capability that is not in `kept`; of those, only permitted ones stay. From now on
/// those in `effective` are in force.
pub fn keep_capabilities(kept: u64, effective: u64) -> nix::Result<()> {
    const VERSION_3: u32 = 0x2008_0522;
    #[repr(C)]
    struct Header {
        version: u32,
        pid: i32,
    }
    #[repr(C)]
    #[derive(Default, Clone, Copy)]
    struct Data {
        effective: u32,
        permitted: u32,
        inheritable: u32,
    }
    let halves = |mask: u64| [mask as u32, (mask >> 32) as u32];
    let mut header = Header { version: VERSION_3, pid: 0 };
    let mut data = [Data::default(); 2];
    // SAFETY: both structures are as capget(2) and capset(2) say for this version, and live across
    // the calls.
    unsafe {
        Errno::result(libc::syscall(libc::SYS_capget, &raw mut header, data.as_mut_ptr()))?;
        for (part, (kept, effective)) in
            data.iter_mut().zip(halves(kept).into_iter().zip(halves(effective)))
        {
            part.permitted &= kept;
            part.effective = part.permitted & effective;
            part.inheritable = 0;
        }
        Errno::result(libc::syscall(libc::SYS_capset, &raw mut header, data.as_ptr())).map(drop)
    }
}

/// While it lives, this thread accesses files with a user's rights instead of root's. Applies to
/// this thread alone, which must drop it.
pub struct ActingAs {
    uid: Uid,
    gid: Gid,
    groups: Vec<libc::gid_t>,
    _not_send: PhantomData<*const ()>,
}

impl ActingAs {
    /// Takes the rights of `user`; `None` where they are this process's own.
    ///
    /// # Errors
    /// When the kernel does not give them.
    pub fn begin(user: Option<&ViewUser>) -> nix::Result<Option<Self>> {
        let Some(user) = user.filter(|user| user.uid != 0 && nix::unistd::geteuid().is_root())
        else {
            return Ok(None);
        };
        let groups = nix::unistd::getgroups()?.into_iter().map(Gid::as_raw).collect();
        let (uid, gid) = (Uid::from_raw(user.uid), Gid::from_raw(user.gid));
        set_groups_of_thread(&user.groups)?;
        // Each call returns the former id. The group first: another user may not change it.
        let acting =
            Self { gid: setfsgid(gid), uid: setfsuid(uid), groups, _not_send: PhantomData };
        // They report no failure: only a second call shows it.
        match setfsgid(gid) == gid && setfsuid(uid) == uid {
            true => Ok(Some(acting)),
            false => Err(Errno::EPERM),
        }
    }
}

impl Drop for ActingAs {
    fn drop(&mut self) {
        setfsuid(self.uid);
        setfsgid(self.gid);
        let _ = set_groups_of_thread(&self.groups);
    }
}

/// libc's own function sets the groups of all threads.
fn set_groups_of_thread(groups: &[libc::gid_t]) -> nix::Result<()> {
    // SAFETY: the kernel reads as many numbers as the slice has.
    Errno::result(unsafe { libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr()) })
        .map(drop)
}

/// Sets if the permitted capabilities survive a change of all user ids from root's to others.
pub fn keep_capabilities_of_others(keep: bool) -> nix::Result<()> {
    // SAFETY: no pointers.
    Errno::result(unsafe { libc::prctl(libc::PR_SET_KEEPCAPS, libc::c_ulong::from(keep), 0, 0, 0) })
        .map(drop)
}

/// ABI version of Landlock in the kernel; an error without Landlock.
pub fn landlock_version() -> nix::Result<i32> {
    const VERSION: libc::c_uint = 1;
    // SAFETY: with this flag there is no structure to be read.
    let version = unsafe {
        libc::syscall(libc::SYS_landlock_create_ruleset, ptr::null::<u8>(), 0_usize, VERSION)
    };
    Errno::result(version).map(|version| i32::try_from(version).unwrap_or(i32::MAX))
}

/// Installs a seccomp filter on this process, which must have one thread and no_new_privs. `pass`
/// is the call's sixth argument, which the kernel ignores: filters already installed check it.
pub fn install_filter(program: &[seccompiler::sock_filter], pass: u64) -> nix::Result<()> {
    #[repr(C)]
    struct Program {
        length: libc::c_ushort,
        steps: *const seccompiler::sock_filter,
    }
    let length = program.len().try_into().map_err(|_| Errno::EINVAL)?;
    let program = Program { length, steps: program.as_ptr() };
    let operation = libc::SECCOMP_SET_MODE_FILTER;
    // SAFETY: the structure is a sock_fprog, and lives across the call with the steps that it leads
    // to.
    let done =
        unsafe { libc::syscall(libc::SYS_seccomp, operation, 0, &raw const program, 0, 0, pass) };
    Errno::result(done).map(drop)
}

/// A child that has ended.
pub struct EndedChild {
    /// Its process.
    pub pid: Pid,
    /// As wait(2) gives it.
    pub status: i32,
    /// User and system time.
    pub cpu_us: (u64, u64),
    /// The largest resident set.
    pub max_rss_kib: u64,
}

impl EndedChild {
    fn new(pid: i32, status: i32, usage: &libc::rusage) -> Self {
        let us = |time: libc::timeval| {
            time.tv_sec.unsigned_abs() * 1_000_000 + time.tv_usec.unsigned_abs()
        };
        Self {
            pid: Pid::from_raw(pid),
            status,
            cpu_us: (us(usage.ru_utime), us(usage.ru_stime)),
            max_rss_kib: usage.ru_maxrss.unsigned_abs(),
        }
    }
}

/// Reaps one child that has ended; `None` when none has. ECHILD when there are
/// no children.
pub fn reap() -> nix::Result<Option<EndedChild>> {
    wait(-1)
}

/// Reaps this child, if it has ended.
pub fn reap_one(pid: Pid) -> nix::Result<Option<EndedChild>> {
    wait(pid.as_raw())
}

fn wait(pid: i32) -> nix::Result<Option<EndedChild>> {
    let mut status = 0;
    // SAFETY: both structures live across the call; zero is a valid rusage.
    let (pid, usage) = unsafe {
        let mut usage: libc::rusage = mem::zeroed();
        (libc::wait4(pid, &raw mut status, libc::WNOHANG, &raw mut usage), usage)
    };
    let pid = Errno::result(pid)?;
    Ok((pid != 0).then(|| EndedChild::new(pid, status, &usage)))
}

/// Status of this child, if it has ended. Does not reap it: its pid, and that of its group, stay
/// reserved.
pub fn ended(pid: Pid) -> nix::Result<Option<EndedChild>> {
    let flags = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
    // SAFETY: both structures live across the call, and zero is valid for both. The system call has
    // one argument more than libc's function. Only fields that waitid(2) fills in are read.
    let (found, code, value, usage) = unsafe {
        let mut info: libc::siginfo_t = mem::zeroed();
        let mut usage: libc::rusage = mem::zeroed();
        let id = pid.as_raw();
        let done =
            libc::syscall(libc::SYS_waitid, libc::P_PID, id, &raw mut info, flags, &raw mut usage);
        Errno::result(done)?;
        (info.si_pid(), info.si_code, info.si_status(), usage)
    };
    let status = match code {
        libc::CLD_EXITED => (value & 0xff) << 8,
        libc::CLD_DUMPED => value | 0x80,
        _ => value,
    };
    Ok((found != 0).then(|| EndedChild::new(found, status, &usage)))
}

/// Adds `attr_set` (`MOUNT_ATTR_*`) to the mount that `at` refers to; with `tree`, to all below it
/// too.
pub fn set_mount(at: BorrowedFd<'_>, attr_set: u64, tree: bool) -> nix::Result<()> {
    const AT_RECURSIVE: libc::c_int = 0x8000;
    let attributes = libc::mount_attr { attr_set, attr_clr: 0, propagation: 0, userns_fd: 0 };
    let flags = libc::AT_EMPTY_PATH | if tree { AT_RECURSIVE } else { 0 };
    // SAFETY: the path is a C string, the structure lives across the call and its
    // size is given.
    Errno::result(unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            at.as_raw_fd(),
            c"".as_ptr(),
            flags,
            &raw const attributes,
            mem::size_of_val(&attributes),
        )
    })
    .map(drop)
}

/// Sets the size of the terminal whose master side `master` is.
pub fn resize(master: BorrowedFd<'_>, size: &WindowSize) -> nix::Result<()> {
    let short = |n: u32| u16::try_from(n).unwrap_or(u16::MAX);
    let size = libc::winsize {
        ws_row: short(size.rows),
        ws_col: short(size.columns),
        ws_xpixel: short(size.x_pixels),
        ws_ypixel: short(size.y_pixels),
    };
    // SAFETY: TIOCSWINSZ reads one winsize.
    Errno::result(unsafe { libc::ioctl(master.as_raw_fd(), libc::TIOCSWINSZ, &raw const size) })
        .map(drop)
}

/// Receives one byte and the descriptors that came with it, all closed on exec.
/// No descriptors and no error: the peer has closed.
pub fn receive_descriptors(socket: BorrowedFd<'_>) -> io::Result<Vec<OwnedFd>> {
    let mut byte = [0_u8];
    let mut iov = [io::IoSliceMut::new(&mut byte)];
    let mut space = nix::cmsg_space!([RawFd; super::runner::wire::DESCRIPTORS_PER_MESSAGE]);
    let message = loop {
        match recvmsg::<()>(
            socket.as_raw_fd(),
            &mut iov,
            Some(&mut space),
            MsgFlags::MSG_CMSG_CLOEXEC,
        ) {
            Err(Errno::EINTR) => {}
            other => break other?,
        }
    };
    let mut received = Vec::new();
    for control in message.cmsgs()? {
        if let ControlMessageOwned::ScmRights(descriptors) = control {
            // SAFETY: the kernel has just made them for us; nobody else has them.
            received.extend(descriptors.into_iter().map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }));
        }
    }
    Ok(received)
}

/// While this lives, the kernel kills this process when data arrives on a socket or its other end
/// is closed or shut down, whatever the process is doing, even if it waits for a file system. No
/// unread data may be left on the socket.
pub struct Deadly<'a>(BorrowedFd<'a>);

impl<'a> Deadly<'a> {
    /// Begins it. Data that came before shows when the socket is read.
    pub fn begin(socket: BorrowedFd<'a>) -> nix::Result<Self> {
        // SAFETY: these requests take numbers only.
        unsafe {
            Errno::result(libc::fcntl(
                socket.as_raw_fd(),
                libc::F_SETOWN,
                nix::unistd::getpid().as_raw(),
            ))?;
            Errno::result(libc::fcntl(socket.as_raw_fd(), F_SETSIG, libc::SIGKILL))?;
        }
        let deadly = Self(socket);
        deadly.set(true)?;
        Ok(deadly)
    }

    fn set(&self, is_on: bool) -> nix::Result<()> {
        let mut flags = OFlag::from_bits_retain(fcntl(self.0, FcntlArg::F_GETFL)?);
        flags.set(OFlag::O_ASYNC, is_on);
        fcntl(self.0, FcntlArg::F_SETFL(flags)).map(drop)
    }
}

impl Drop for Deadly<'_> {
    fn drop(&mut self) {
        let _ = self.set(false);
    }
}

/// From fcntl(2); the libc crate lacks it for some systems.
const F_SETSIG: libc::c_int = 10;

/// Reads one byte; false at the end.
pub fn has_byte(pipe: &OwnedFd) -> io::Result<bool> {
    loop {
        match nix::unistd::read(pipe, &mut [0]) {
            Err(Errno::EINTR) => {}
            other => return Ok(other? > 0),
        }
    }
}

/// Replaces this process; returns only the error. The kernel takes three arguments; of the six that
/// a seccomp filter sees, the last is `pass`.
pub fn exec(program: &CString, argv: &[CString], env: &[CString], pass: u64) -> Errno {
    let pointers = |words: &[CString]| -> Vec<*const libc::c_char> {
        words.iter().map(|word| word.as_ptr()).chain([ptr::null()]).collect()
    };
    let (argv, env) = (pointers(argv), pointers(env));
    // SAFETY: all are texts that end in a zero byte, and lists of such that end in a null pointer;
    // they live until it returns.
    unsafe {
        libc::syscall(
            libc::SYS_execve,
            program.as_ptr(),
            argv.as_ptr(),
            env.as_ptr(),
            0_u64,
            0_u64,
            pass,
        )
    };
    Errno::last()
}

/// Begins to trace a process that waits to be started: it keeps running, its children are traced
/// too, and all of them are killed when this process ends.
pub fn observe(pid: Pid) -> nix::Result<()> {
    let options = libc::PTRACE_O_TRACESECCOMP
        | libc::PTRACE_O_TRACEEXEC
        | libc::PTRACE_O_TRACEFORK
        | libc::PTRACE_O_TRACEVFORK
        | libc::PTRACE_O_TRACECLONE
        | libc::PTRACE_O_EXITKILL;
    // SAFETY: this request takes numbers only.
    Errno::result(unsafe {
        libc::ptrace(libc::PTRACE_SEIZE, pid.as_raw(), 0_usize, options as usize)
    })
    .map(drop)
}

/// Continues a stopped tracee, with a signal unless that is 0.
pub fn go_on(pid: Pid, signal: i32) -> nix::Result<()> {
    // SAFETY: this request takes numbers only.
    Errno::result(unsafe {
        libc::ptrace(libc::PTRACE_CONT, pid.as_raw(), 0_usize, signal as usize)
    })
    .map(drop)
}

/// Leaves a tracee in its job control stop, until a SIGCONT continues it.
pub fn stay_stopped(pid: Pid) -> nix::Result<()> {
    // SAFETY: this request takes numbers only.
    Errno::result(unsafe { libc::ptrace(libc::PTRACE_LISTEN, pid.as_raw(), 0_usize, 0_usize) })
        .map(drop)
}

/// Waits for the next event of any child or tracee: its pid, and the status as wait(2) gives it,
/// which may name signals that have no names. ECHILD when none is left.
pub fn wait_for_any() -> nix::Result<(Pid, i32)> {
    let mut status = 0;
    loop {
        // SAFETY: the number lives across the call.
        match Errno::result(unsafe { libc::waitpid(-1, &raw mut status, libc::__WALL) }) {
            Ok(pid) => return Ok((Pid::from_raw(pid), status)),
            Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        net::Shutdown,
        os::{fd::AsFd as _, unix::net::UnixStream},
        time::Duration,
    };

    use nix::{
        sys::{
            signal::Signal,
            wait::{WaitStatus, waitpid},
        },
        unistd::pause,
    };

    use super::*;

    /// How a process ends that waits for something else while `end` happens to the socket's other
    /// end.
    fn ended_by(is_over: bool, end: impl FnOnce(UnixStream)) -> WaitStatus {
        let (ours, its) = UnixStream::pair().unwrap();
        let (ready, tell) = nix::unistd::pipe().unwrap();
        // SAFETY: the child makes system calls only.
        match unsafe { nix::unistd::fork() }.unwrap() {
            ForkResult::Child => {
                // SAFETY: it is the child's own copy, which it never uses.
                unsafe { libc::close(ours.as_raw_fd()) };
                let deadly = Deadly::begin(its.as_fd());
                if is_over {
                    drop(deadly);
                }
                let _ = nix::unistd::write(&tell, b"r");
                // SAFETY: it takes a number only.
                unsafe { libc::alarm(2) };
                pause();
                exit_now(0)
            }
            ForkResult::Parent { child } => {
                assert!(has_byte(&ready).unwrap());
                std::thread::sleep(Duration::from_millis(20));
                drop(its);
                end(ours);
                waitpid(child, None).unwrap()
            }
        }
    }

    #[test]
    fn how_a_child_has_ended_is_told_before_it_is_reaped() {
        let end = |how: fn() -> !| match fork().unwrap() {
            ForkResult::Child => how(),
            ForkResult::Parent { child } => loop {
                if let Some(told) = ended(child).unwrap() {
                    let reaped = reap_one(child).unwrap().unwrap();
                    assert_eq!((told.pid, told.status), (reaped.pid, reaped.status));
                    assert_eq!(reap_one(child).err(), Some(Errno::ECHILD));
                    break WaitStatus::from_raw(told.pid, told.status).unwrap();
                }
            },
        };
        assert!(matches!(end(|| exit_now(3)), WaitStatus::Exited(_, 3)));
        let kill = || {
            let _ = nix::sys::signal::raise(Signal::SIGKILL);
            exit_now(0)
        };
        assert!(matches!(end(kill), WaitStatus::Signaled(_, Signal::SIGKILL, false)));
    }

    #[test]
    fn who_gives_a_run_up_kills_what_prepares_it() {
        let is_killed = |status| matches!(status, WaitStatus::Signaled(_, Signal::SIGKILL, _));
        assert!(is_killed(ended_by(false, drop)));
        assert!(is_killed(ended_by(false, |ours| {
            ours.shutdown(Shutdown::Write).unwrap();
            std::thread::sleep(Duration::from_secs(3));
        })));
        assert!(!is_killed(ended_by(true, drop)));
    }
}
