//! Calls on this process that need `unsafe` or must not use Rust's runtime: execve, dying by a
//! signal, messages on descriptor 2.
#![allow(
    unsafe_code,
    reason = "execve with borrowed C strings, the environment as it is, resetting a signal's \
              disposition and reading into memory that nobody has filled yet have no safe wrapper"
)]

use std::{
    ffi::{CStr, CString, OsStr},
    io,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, RawFd},
        unix::ffi::OsStrExt,
    },
    ptr,
};

use bytes::BytesMut;
use nix::{
    errno::Errno,
    sys::{
        signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, raise, sigaction},
        wait::{Id, WaitPidFlag, waitid},
    },
    unistd::{ForkResult, Pid},
};
use posh_proto::untrusted::escaped;

/// Becomes another program; returns only on failure, with the error.
pub fn exec(program: &CStr, argv: &[CString], environment: &[CString]) -> io::Error {
    let argv: Vec<_> = argv.iter().map(|a| a.as_ptr()).chain([ptr::null()]).collect();
    let environment: Vec<_> = environment.iter().map(|e| e.as_ptr()).chain([ptr::null()]).collect();
    // SAFETY: both arrays end in a null pointer and borrow strings that live until the call
    // returns.
    unsafe { nix::libc::execve(program.as_ptr(), argv.as_ptr(), environment.as_ptr()) };
    io::Error::last_os_error()
}

/// The environment as execve(2) passed it; std leaves out entries without `=`.
pub fn environment() -> Vec<CString> {
    unsafe extern "C" {
        static environ: *const *const std::ffi::c_char;
    }
    // SAFETY: the C library set `environ` to the kernel's array, which ends in a null pointer. A
    // caller of `std::env::set_var` (an unsafe function) must know that no other thread reads it.
    unsafe {
        let entries = (0..).map(|index| *environ.add(index)).take_while(|entry| !entry.is_null());
        entries.map(|entry| CStr::from_ptr(entry).to_owned()).collect()
    }
}

/// Runs `child` in a child process, whose exit status is its result.
///
/// # Errors
/// fork(2)'s; EAGAIN if there are other threads, since their locks would stay locked in the child.
pub fn fork(child: impl FnOnce() -> i32) -> nix::Result<Pid> {
    let threads = std::fs::read_dir("/proc/self/task").map_err(|_| Errno::EAGAIN)?;
    if threads.count() != 1 {
        return Err(Errno::EAGAIN);
    }
    // SAFETY: this process has only this thread, so that the child may do anything.
    match unsafe { nix::unistd::fork() }? {
        ForkResult::Parent { child } => Ok(child),
        ForkResult::Child => {
            let status = child();
            // SAFETY: _exit(2) runs no further code of this process.
            unsafe { nix::libc::_exit(status) }
        }
    }
}

/// Returns true if this process has no child, running or dead.
pub fn is_childless() -> bool {
    let flags =
        WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT | WaitPidFlag::__WALL;
    waitid(Id::All, flags) == Err(Errno::ECHILD)
}

/// Duplicates `source` to the descriptor `target`, without close-on-exec.
///
/// # Errors
/// dup2(2)'s.
pub fn put(source: BorrowedFd<'_>, target: RawFd) -> nix::Result<()> {
    // SAFETY: dup2 takes two numbers. `target` is the shell's descriptor, and no value of this
    // process owns it.
    Errno::result(unsafe { nix::libc::dup2(source.as_raw_fd(), target) }).map(drop)
}

/// A descriptor inherited from the shell. It stays open until this process ends, which closes only
/// descriptors that it opened; if it was not open, each use fails with EBADF.
pub fn inherited(fd: RawFd) -> BorrowedFd<'static> {
    // A `BorrowedFd` can't be -1; the largest number is as little open.
    let fd = if fd == -1 { RawFd::MAX } else { fd };
    // SAFETY: the number is not -1, and one that is closed only makes system calls fail. Nothing in
    // the stage program closes or replaces a descriptor that it did not open (`put` does in a child
    // that executes next).
    unsafe { BorrowedFd::borrow_raw(fd) }
}

/// One read(2) of at most `limit` bytes to the end of `buffer`, into its uninitialised spare
/// capacity: zeroing it first costs more than reading. Returns the number of bytes; 0 at the end,
/// or without spare capacity.
///
/// # Errors
/// read(2)'s; `buffer` is unchanged then.
pub fn read_into(fd: impl AsFd, buffer: &mut BytesMut, limit: usize) -> rustix::io::Result<usize> {
    let spare = buffer.spare_capacity_mut();
    let limit = limit.min(spare.len());
    let (filled, _) = rustix::io::read(fd, &mut spare[..limit])?;
    let count = filled.len();
    // SAFETY: read(2) has just filled so many bytes behind the length, and they are within the
    // capacity.
    unsafe { buffer.set_len(buffer.len() + count) };
    Ok(count)
}

/// Returns true if two descriptors have one open file description (kcmp(2) with `KCMP_FILE`, which
/// is 0); false if the kernel does not permit the call.
pub fn same_description(a: RawFd, b: RawFd) -> bool {
    let pid = nix::unistd::getpid().as_raw();
    // SAFETY: kcmp takes five integers and no pointers.
    unsafe { nix::libc::syscall(nix::libc::SYS_kcmp, pid, pid, 0, a, b) == 0 }
}

/// Ends this process as the remote command ended: by `signal`, or, if the shell has set that signal
/// to be ignored, with a shell's exit status for it. A signal whose default action does not end a
/// process is not raised: stopped, this process would block the shell for ever.
pub fn die_by(signal: i32) -> i32 {
    let status = status_of(signal);
    let Some(signal) = Signal::try_from(signal).ok().filter(|signal| ends(*signal)) else {
        return status;
    };
    // A core was dumped, if at all, on the executor; a second one would be of this process.
    let _ = nix::sys::resource::setrlimit(nix::sys::resource::Resource::RLIMIT_CORE, 0, 0);
    if signal != Signal::SIGKILL {
        let default = SigAction::new(SigHandler::SigDfl, SaFlags::empty(), SigSet::empty());
        // SAFETY: SIG_DFL installs no handler, so nothing can run in an unsafe context.
        if unsafe { sigaction(signal, &default) }.is_err() {
            return status;
        }
    }
    let _ = raise(signal);
    let mut only = SigSet::empty();
    only.add(signal);
    let _ = only.thread_unblock();
    status
}

/// A shell's status for a signal: 128 and the number, clamped so that it is never truncated to 0.
fn status_of(signal: i32) -> i32 {
    128 + signal.clamp(1, 127)
}

/// Returns true if the signal's default action ends a process (signal(7)).
fn ends(signal: Signal) -> bool {
    use Signal::{SIGCHLD, SIGCONT, SIGSTOP, SIGTSTP, SIGTTIN, SIGTTOU, SIGURG, SIGWINCH};
    !matches!(signal, SIGCHLD | SIGCONT | SIGSTOP | SIGTSTP | SIGTTIN | SIGTTOU | SIGURG | SIGWINCH)
}

/// Sets this process's short name to that of a program of this name (comm of proc(5)).
pub fn rename(name: &OsStr) {
    if let Ok(name) = CString::new(name.as_bytes()) {
        let _ = nix::sys::prctl::set_name(&name);
    }
}

/// Returns true if the shell has set the signal to be ignored.
pub fn ignores(signal: Signal) -> bool {
    let mut old = std::mem::MaybeUninit::<nix::libc::sigaction>::uninit();
    // SAFETY: with a null new action, sigaction(2) only writes the old one to the place given.
    unsafe {
        nix::libc::sigaction(signal as i32, ptr::null(), old.as_mut_ptr()) == 0
            && old.assume_init().sa_sigaction == nix::libc::SIG_IGN
    }
}

/// Prints an error of posh itself on descriptor 2, and returns `status`.
pub fn complain(status: i32, message: &str) -> i32 {
    say(&format!("posh: {message}"));
    status
}

/// Writes one line to descriptor 2, escaped: names and a gateway's messages are in it.
pub fn say(message: &str) {
    let line = format!("{}\n", escaped(message));
    let _ = rustix::io::write(rustix::stdio::stderr(), line.as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_stops_us_and_no_signal_is_a_good_end() {
        // Whether these would stop us depends on who started the test.
        let stopping = [Signal::SIGSTOP, Signal::SIGTSTP, Signal::SIGTTIN, Signal::SIGTTOU];
        assert!(!stopping.into_iter().any(ends));
        for signal in [i32::MIN, -1, 0, 17, 18, 19, 20, 21, 22, 23, 28, 65, 128, 256, i32::MAX] {
            let status = die_by(signal);
            assert!((129..=255).contains(&status), "{signal}: {status}");
        }
        assert_eq!((status_of(15), status_of(64)), (143, 192));
        assert!(Signal::iterator().filter(|signal| ends(*signal)).count() > 20);
    }
}
