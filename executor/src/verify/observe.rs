//! Traces the processes of one command line by ptrace(2), as an unprivileged user may do with its
//! children. They stop only at the calls of `calls`, selected by a seccomp filter; a [`Judge`]
//! decides about each call, and may make it fail. No security boundary: a second thread could
//! change a path after the check.

use std::{
    collections::HashMap,
    fs::File,
    io::{self, Read as _, Write as _},
    os::{fd::OwnedFd, unix::fs::FileExt as _},
};

use nix::{
    libc,
    sys::{
        prctl, ptrace,
        signal::{Signal, kill},
    },
    unistd::{ForkResult, Pid, dup2_stdout, execvp, pipe2},
};
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};

use super::calls::{self, SystemCall};
use crate::sys;

/// Longest path (PATH_MAX).
const MAX_PATH_BYTES: usize = 4096;
/// Least size of a page: memory may end at any page boundary.
const PAGE_BYTES: u64 = 4096;

/// Decision about a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CallDecision {
    Granted,
    /// It fails with EACCES, as it would on a server.
    Denied,
}

/// Decides about the calls of the processes.
pub trait Judge {
    /// A process has executed another program.
    fn executed(&mut self, process: Pid);
    /// A process was made by another one.
    fn born(&mut self, process: Pid, parent: Pid);
    /// A thread of a process is about to make a call.
    fn called(&mut self, process: Pid, thread: &Thread, call: &SystemCall) -> CallDecision;
    /// A process has ended.
    fn ended(&mut self, process: Pid);
}

/// A stopped thread, whose memory can be read.
pub struct Thread(Pid);

impl Thread {
    /// Reads a path from its memory.
    pub fn path(&self, mut address: u64) -> Option<Vec<u8>> {
        let memory = self.memory()?;
        let mut path = Vec::new();
        while path.len() < MAX_PATH_BYTES {
            let mut page = vec![0; usize::try_from(PAGE_BYTES - address % PAGE_BYTES).ok()?];
            let got = memory.read_at(&mut page, address).ok().filter(|got| *got > 0)?;
            match page[..got].iter().position(|byte| *byte == 0) {
                Some(end) => {
                    path.extend_from_slice(&page[..end]);
                    return Some(path);
                }
                None => path.extend_from_slice(&page[..got]),
            }
            address += got as u64;
        }
        None
    }

    /// Reads eight bytes of its memory.
    pub fn word(&self, address: u64) -> Option<u64> {
        let mut bytes = [0; 8];
        self.memory()?.read_exact_at(&mut bytes, address).ok()?;
        Some(u64::from_ne_bytes(bytes))
    }

    /// Path of one of its files below /proc.
    pub fn about(&self, what: &str) -> String {
        format!("/proc/{}/{what}", self.0)
    }

    fn memory(&self) -> Option<File> {
        File::open(self.about("mem")).ok()
    }
}

/// Runs `argv` until it has ended and none of its processes is left; those that still run when the
/// first process has ended are killed, as on a server. Must be called by a process that has one
/// thread.
///
/// # Errors
/// Errors of the system.
pub fn run(argv: &[std::ffi::CString], judge: &mut dyn Judge) -> io::Result<()> {
    let filter = filter()?;
    let (wait, go) = pipe2(nix::fcntl::OFlag::O_CLOEXEC)?;
    match sys::fork()? {
        ForkResult::Child => {
            drop(go);
            become_command(wait, &filter, argv)
        }
        ForkResult::Parent { child } => {
            drop(wait);
            if let Err(errno) = sys::observe(child) {
                // Its pipe closes, and it exits by itself.
                drop(go);
                let _ = sys::wait_for_any();
                let hint = "see /proc/sys/kernel/yama/ptrace_scope, and whether a debugger \
                            observes already";
                return Err(io::Error::other(format!(
                    "cannot observe a command: {}; {hint}",
                    errno.desc()
                )));
            }
            File::from(go).write_all(b"x")?;
            let mut watch = TracerState {
                root: child,
                is_over: false,
                threads: HashMap::new(),
                parents: HashMap::new(),
            };
            watch.follow(judge)
        }
    }
}

fn become_command(wait: OwnedFd, filter: &BpfProgram, argv: &[std::ffi::CString]) -> ! {
    let mut byte = [0];
    let set_up = || -> io::Result<()> {
        // Standard output is for the report alone.
        dup2_stdout(io::stderr())?;
        prctl::set_no_new_privs()?;
        seccompiler::apply_filter(filter).map_err(io::Error::other)
    };
    if !matches!(File::from(wait).read(&mut byte), Ok(1)) {
        sys::exit_now(126);
    }
    match set_up().map(|()| execvp(&argv[0], argv)) {
        Ok(Ok(never)) => match never {},
        Ok(Err(errno)) => {
            eprintln!("posh-executor: cannot start {}: {}", argv[0].to_string_lossy(), errno.desc())
        }
        Err(why) => eprintln!("posh-executor: cannot prepare a command: {why}"),
    }
    sys::exit_now(126)
}

/// Stops the tracee at the calls in the table.
fn filter() -> io::Result<BpfProgram> {
    let arch = std::env::consts::ARCH.try_into().map_err(io::Error::other)?;
    let rules = calls::numbers().map(|number| (number, Vec::new())).collect();
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, SeccompAction::Trace(0), arch);
    filter.and_then(TryInto::try_into).map_err(io::Error::other)
}

/// State of the tracer.
struct TracerState {
    root: Pid,
    /// The first process has ended.
    is_over: bool,
    /// The process that a thread belongs to.
    threads: HashMap<Pid, Pid>,
    /// Parents of threads and processes that have not been seen yet.
    parents: HashMap<Pid, Pid>,
}

impl TracerState {
    fn follow(&mut self, judge: &mut dyn Judge) -> io::Result<()> {
        loop {
            let (thread, status) = match sys::wait_for_any() {
                Ok(happened) => happened,
                Err(nix::errno::Errno::ECHILD) => return Ok(()),
                Err(errno) => return Err(errno.into()),
            };
            if libc::WIFSTOPPED(status) {
                if self.is_over {
                    // Made just before the first process ended, and first seen now.
                    let _ = kill(thread, Signal::SIGKILL);
                }
                self.stopped(thread, status, judge);
                continue;
            }
            self.threads.remove(&thread);
            judge.ended(thread);
            if thread == self.root {
                self.is_over = true;
                for left in self.threads.keys() {
                    let _ = kill(*left, Signal::SIGKILL);
                }
            }
        }
    }

    /// Errors are ignored: a thread that has ended meanwhile (ESRCH) is reported by wait(2).
    fn stopped(&mut self, thread: Pid, status: i32, judge: &mut dyn Judge) {
        let process = self.process_of(thread, judge);
        let signal = libc::WSTOPSIG(status);
        match status >> 16 {
            0 => {
                let _ = sys::go_on(thread, signal);
            }
            libc::PTRACE_EVENT_STOP if is_stop(signal) => {
                let _ = sys::stay_stopped(thread);
            }
            event => {
                match event {
                    libc::PTRACE_EVENT_SECCOMP => call(process, thread, judge),
                    libc::PTRACE_EVENT_EXEC => judge.executed(process),
                    libc::PTRACE_EVENT_FORK
                    | libc::PTRACE_EVENT_VFORK
                    | libc::PTRACE_EVENT_CLONE => {
                        self.expect_child_of(thread, process);
                    }
                    _ => {}
                }
                let _ = sys::go_on(thread, 0);
            }
        }
    }

    fn expect_child_of(&mut self, thread: Pid, process: Pid) {
        let child = ptrace::getevent(thread)
            .ok()
            .and_then(|number| i32::try_from(number).ok())
            .map(Pid::from_raw);
        if let Some(child) = child.filter(|child| !self.threads.contains_key(child)) {
            self.parents.insert(child, process);
        }
    }

    /// The process of a thread; reports a new process before any of its calls.
    fn process_of(&mut self, thread: Pid, judge: &mut dyn Judge) -> Pid {
        if let Some(process) = self.threads.get(&thread) {
            return *process;
        }
        let told = self.parents.remove(&thread);
        let text = std::fs::read_to_string(format!("/proc/{thread}/status")).unwrap_or_default();
        let field = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name))?;
            line.trim().parse().ok().map(Pid::from_raw)
        };
        let process = field("Tgid:").unwrap_or(thread);
        self.threads.insert(thread, process);
        // Its own first stop may come before its parent's: then the kernel still knows its parent.
        if process == thread
            && let Some(parent) = told.or_else(|| field("PPid:"))
        {
            judge.born(process, parent);
        }
        process
    }
}

fn is_stop(signal: i32) -> bool {
    matches!(signal, libc::SIGSTOP | libc::SIGTSTP | libc::SIGTTIN | libc::SIGTTOU)
}

fn call(process: Pid, thread: Pid, judge: &mut dyn Judge) {
    let Ok(registers) = ptrace::getregs(thread) else { return };
    if judge.called(process, &Thread(thread), &call_of(&registers)) == CallDecision::Denied {
        deny(thread, registers);
    }
}

#[cfg(target_arch = "x86_64")]
fn call_of(registers: &libc::user_regs_struct) -> SystemCall {
    let r = registers;
    SystemCall {
        number: r.orig_rax.cast_signed(),
        arguments: [r.rdi, r.rsi, r.rdx, r.r10, r.r8, r.r9],
    }
}

#[cfg(target_arch = "aarch64")]
fn call_of(registers: &libc::user_regs_struct) -> SystemCall {
    let r = registers.regs;
    SystemCall { number: r[8].cast_signed(), arguments: [r[0], r[1], r[2], r[3], r[4], r[5]] }
}

/// A call with an invalid number is skipped, and its result is the register's value.
#[cfg(target_arch = "x86_64")]
fn deny(thread: Pid, mut registers: libc::user_regs_struct) {
    registers.orig_rax = u64::MAX;
    registers.rax = i64::from(-libc::EACCES).cast_unsigned();
    let _ = ptrace::setregs(thread, registers);
}

/// On other architectures the number is not among these registers: the call is made, and only
/// reported.
#[cfg(not(target_arch = "x86_64"))]
fn deny(_: Pid, _: libc::user_regs_struct) {}
