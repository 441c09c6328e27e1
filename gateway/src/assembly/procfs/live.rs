//! Single facts about live processes, each read from /proc (proc(5)) when it is asked for.

use std::{
    fs,
    io::Read as _,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    time::Duration,
};

use crate::enlisted::Pid;

/// One end of one pipe in one process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PipeEnd {
    /// Inode of the pipe.
    pub inode: u64,
    /// Descriptor in the process.
    pub fd: u32,
    /// Can read from it.
    pub reads: bool,
    /// Can write to it.
    pub writes: bool,
}

/// Inode number in `pipe:[12345]`.
#[must_use]
pub fn pipe_inode(link: &Path) -> Option<u64> {
    link.to_str()?.strip_prefix("pipe:[")?.strip_suffix(']')?.parse().ok()
}

/// Returns true if a process is one of `roots` or a descendant of one.
#[must_use]
pub fn is_below(pid: Pid, roots: &[Pid]) -> bool {
    !roots.is_empty() && ancestors(pid).any(|pid| roots.contains(&pid))
}

/// A process and its ancestors, up to init.
pub(super) fn ancestors(pid: Pid) -> impl Iterator<Item = Pid> {
    std::iter::successors(Some(pid), |pid| parent_of(*pid))
}

/// Fields of proc_pid_stat(5).
#[derive(Debug)]
pub struct Stat {
    /// Parent: the process that forked it, or its current reaper.
    pub parent: Pid,
    pub(super) state: char,
    /// Process group ID.
    pub group: i64,
    pub(super) session: Pid,
    /// Foreground process group of its terminal; -1 without one.
    pub foreground: i64,
    /// Page faults of children that it has waited for: every child causes some.
    pub faults_of_children: u64,
    pub(super) threads: u32,
    /// Start time, in clock ticks after boot.
    pub started: u64,
}

impl Stat {
    /// Stopped by a signal or a debugger.
    #[must_use]
    pub fn is_stopped(&self) -> bool {
        matches!(self.state, 'T' | 't')
    }

    /// The thread has ended. If it is a process's first one, others may go on.
    pub(super) fn has_ended(&self) -> bool {
        matches!(self.state, 'Z' | 'X')
    }
}

/// Reads a process's stat line.
#[must_use]
pub fn read_stat(pid: Pid) -> Option<Stat> {
    read_stat_of(&Path::new("/proc").join(pid.to_string()))
}

/// Reads the stat line of a process or thread, by its directory.
pub(super) fn read_stat_of(directory: &Path) -> Option<Stat> {
    // At most 52 numbers of 20 digits, and the name. fs::read takes twice as long, as the file's
    // size is unknown.
    let mut buffer = [0; 1200];
    let count =
        fs::File::open(directory.join("stat")).and_then(|mut file| file.read(&mut buffer)).ok()?;
    let text = String::from_utf8_lossy(&buffer[..count]);
    // The name is in parentheses and may contain anything, even ") ".
    let rest = &text[text.rfind(')')? + 1..];
    let mut words = rest.split_ascii_whitespace();
    let state = words.next()?.chars().next()?;
    let parent = words.next()?.parse().ok()?;
    let group = words.next()?.parse().ok()?;
    let session = words.next()?.parse().ok()?;
    // Fields 8, 11, 20 and 22 of the line; four words after the name are taken.
    let foreground = words.nth(1)?.parse().ok()?;
    let faults_of_children = words.nth(2)?.parse().ok()?;
    let threads = words.nth(8)?.parse().ok()?;
    let started = words.nth(1)?.parse().ok()?;
    Some(Stat { parent, state, group, session, foreground, faults_of_children, threads, started })
}

/// Returns true if `hidepid` (proc(5)) hides other users' processes: it hides init, too.
pub(super) fn hides_others() -> bool {
    read_stat(1).is_none()
}

/// Returns true if the process exists, even if its state can't be read.
pub(super) fn is_alive(pid: Pid) -> bool {
    let number = i32::try_from(pid).map(nix::unistd::Pid::from_raw);
    number.is_ok_and(|pid| {
        matches!(nix::sys::signal::kill(pid, None), Ok(()) | Err(nix::errno::Errno::EPERM))
    })
}

/// Directories of a process's threads.
pub(super) fn threads(pid: Pid) -> impl Iterator<Item = PathBuf> {
    fs::read_dir(format!("/proc/{pid}/task"))
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path())
}

/// A living thread of a process whose first thread has ended.
pub(super) fn living_thread(pid: Pid) -> Option<(PathBuf, Stat)> {
    threads(pid)
        .filter_map(|thread| read_stat_of(&thread).map(|stat| (thread, stat)))
        .find(|(_, stat)| !stat.has_ended())
}

/// Directories with distinct `fd` tables: the process's, or each thread's if there are several, as
/// a thread may have its own descriptors (CLONE_FILES of unshare(2)).
pub(super) fn descriptor_tables(pid: Pid, count: u32) -> Vec<PathBuf> {
    let of_threads = if count > 1 { threads(pid).collect() } else { Vec::new() };
    if of_threads.is_empty() { vec![Path::new("/proc").join(pid.to_string())] } else { of_threads }
}

/// Parent or current reaper of a process; `None` for init and for an ended process.
pub(super) fn parent_of(pid: Pid) -> Option<Pid> {
    read_stat(pid).map(|stat| stat.parent).filter(|parent| *parent > 0)
}

/// Last tick that had certainly begun at `time`, which counts from 1970.
pub(super) fn ticks_after_boot(time: Duration) -> Option<u64> {
    use nix::time::{ClockId, clock_gettime};
    /// Inode timestamps have the resolution of the timer interrupt, and the clock may be slewed
    /// meanwhile (adjtimex(2)).
    const MARGIN: Duration = Duration::from_millis(50);
    const TICK_MS: u128 = 10;
    let now = Duration::from(clock_gettime(ClockId::CLOCK_REALTIME).ok()?);
    let since_boot = Duration::from(clock_gettime(ClockId::CLOCK_BOOTTIME).ok()?);
    let made = since_boot.saturating_sub(now.saturating_sub(time)).saturating_sub(MARGIN);
    u64::try_from(made.as_millis() / TICK_MS).ok()
}

pub(super) fn read_system_call(pid: Pid) -> Option<(i64, u64)> {
    let text = fs::read_to_string(format!("/proc/{pid}/syscall")).ok()?;
    let mut words = text.split_ascii_whitespace();
    let number = words.next()?.parse().ok()?;
    let first = words
        .next()
        .and_then(|w| u64::from_str_radix(w.trim_start_matches("0x"), 16).ok())
        .unwrap_or(0);
    Some((number, first))
}

/// Returns true if a process sleeps until a child ends or a signal comes: in wait4(2), waitid(2) or
/// sigsuspend(2).
#[must_use]
pub fn waits_for_children(pid: Pid) -> bool {
    use nix::libc::{SYS_rt_sigsuspend, SYS_wait4, SYS_waitid};
    match read_system_call(pid) {
        Some((number, _)) => [SYS_wait4, SYS_waitid, SYS_rt_sigsuspend].contains(&number),
        // If only a tracer may read the call (Yama), the kernel still names the function that the
        // process sleeps in.
        None => {
            wait_channel(pid).is_some_and(|name| name == "do_wait" || name.ends_with("sigsuspend"))
        }
    }
}

/// Kernel function in which a process sleeps (/proc/PID/wchan).
pub(super) fn wait_channel(pid: Pid) -> Option<String> {
    fs::read_to_string(format!("/proc/{pid}/wchan")).ok()
}

/// Pipe that a process sleeps in a read(2) from, if that is readable.
#[must_use]
pub fn pipe_read_by(pid: Pid) -> Option<u64> {
    match read_system_call(pid)? {
        (nix::libc::SYS_read, fd) => {
            pipe_inode(&fs::read_link(format!("/proc/{pid}/fd/{fd}")).ok()?)
        }
        _ => None,
    }
}

/// Generations above a stage that are looked at for the shell of a `$(...)`: each subshell or
/// function in it is one.
const GENERATIONS: usize = 3;

/// Pipe that the nearest reading shell above a process sleeps in a read(2) from: the output of the
/// `$(...)` in which it is a command.
pub fn substitution_above(pid: Pid) -> Option<u64> {
    ancestors(pid).skip(1).take(GENERATIONS).find_map(pipe_read_by)
}

/// Children of all its threads.
pub fn children(pid: Pid) -> Vec<Pid> {
    let lists = threads(pid).filter_map(|thread| fs::read_to_string(thread.join("children")).ok());
    lists
        .flat_map(|l| l.split_ascii_whitespace().filter_map(|w| w.parse().ok()).collect::<Vec<_>>())
        .collect()
}

pub(super) fn is_pipe(pid: Pid, fd: u64) -> bool {
    fs::read_link(format!("/proc/{pid}/fd/{fd}")).is_ok_and(|link| pipe_inode(&link).is_some())
}

/// The permissions of a link in /proc/PID/fd are the access mode (proc_pid_fd(5)).
pub(super) fn read_end(link: &Path, inode: u64) -> Option<PipeEnd> {
    let mode = fs::symlink_metadata(link).ok()?.permissions().mode();
    let fd = link.file_name()?.to_str()?.parse().ok()?;
    Some(PipeEnd { inode, fd, reads: mode & 0o400 != 0, writes: mode & 0o200 != 0 })
}
