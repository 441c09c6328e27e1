//! Finding and killing processes below this one.
//!
//! Every process that uses this module is a subreaper: orphans become its children, so that
//! whatever a command leaves behind, even in another session, is found by its parents.
//!
//! Invariant: killing needs nothing that a command can use up or keep busy: no descriptor, no
//! file. Where /proc can't be read, a process is below this one if wait(2) takes it for a child,
//! and what is below that falls to this process once it is killed.
//!
//! Invariant: no loop here ends only when its commands stop forking. Each look takes a bounded
//! number of children.

use std::{
    collections::{HashMap, HashSet},
    fs::{self, File},
    io::{self, BufRead as _, BufReader},
    thread,
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    libc,
    sys::signal::{Signal, kill},
    unistd::{Pid, getpid},
};

use crate::sys;

/// Pause between two looks: killed processes end within this, unless their memory is large or the
/// disk holds them, and then looking often does not help.
const FIRST_PAUSE: Duration = Duration::from_millis(1);
const LAST_PAUSE: Duration = Duration::from_millis(100);

/// Time in which processes may remove their locks and unfinished files.
const GRACE: Duration = Duration::from_secs(1);

/// Most children reaped in one look.
const AT_ONCE: usize = 1024;

/// Most children looked at before a supervisor looks at its other events.
const SOME: usize = 128;

/// The largest process number of any kernel (PID_MAX_LIMIT).
const LAST_NUMBER: i32 = 1 << 22;

/// How this process reaches all processes below it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Below {
    /// By kill(-1), which reaches them and no others: signals end at this process's Landlock
    /// domain (`fence::enter_run`). The kernel sends to all of them at once, so that none escapes
    /// by forking.
    Domain,
    /// One by one, found by their parents. One that forks all the time may be missed for a while.
    Parents,
}

impl Below {
    /// Terminates every process below this one, and kills those that are left after a second. A
    /// killed process leaves its locks: git's would keep the next git out.
    pub fn end(self) {
        let started = Instant::now();
        let mut pause = FIRST_PAUSE;
        let mut is_asked = false;
        while !is_alone() {
            if !is_asked {
                self.signal(Signal::SIGTERM);
                is_asked = true;
            } else if started.elapsed() > GRACE {
                return self.kill();
            }
            thread::sleep(pause);
            pause = (pause * 2).min(LAST_PAUSE);
        }
    }

    /// Kills every process below this one and waits for their ends. Looks again until none is
    /// left: one may be missed, or fall to this process, during a look.
    pub fn kill(self) {
        let mut pause = FIRST_PAUSE;
        while !is_alone() {
            self.signal(Signal::SIGKILL);
            thread::sleep(pause);
            pause = (pause * 2).min(LAST_PAUSE);
        }
    }

    fn signal(self, signal: Signal) {
        match self {
            Self::Domain => drop(kill(Pid::from_raw(-1), signal)),
            Self::Parents => {
                let below = parents().map(|parents| below_in(&parents, getpid()));
                for pid in below.unwrap_or_else(|_| children_by_number().collect()) {
                    let _ = kill(pid, signal);
                }
            }
        }
    }
}

/// Reaps children that have ended; true if no process is left.
fn is_alone() -> bool {
    has_reaped_all(|| sys::reap().map(|ended| ended.is_some()))
}

/// True if there is nothing to reap any more; false if what is left lives, or is too much.
fn has_reaped_all(mut reap: impl FnMut() -> nix::Result<bool>) -> bool {
    for _ in 0..AT_ONCE {
        match reap() {
            Ok(true) | Err(Errno::EINTR) => {}
            Ok(false) => return false,
            Err(_) => return true,
        }
    }
    false
}

/// Reaps orphans that have fallen to this process, some at a time.
#[derive(Default)]
pub struct Orphans {
    /// The list of children, as far as it was not read yet.
    list: Option<BufReader<File>>,
}

impl Orphans {
    /// Returns true if a look at the children has not come to its end.
    pub fn are_left(&self) -> bool {
        self.list.is_some()
    }

    /// Reaps some children that have ended and are not in `kept`.
    pub fn reap_some(&mut self, kept: &HashSet<Pid>) {
        let own = getpid();
        let list = match self.list.take() {
            Some(list) => Ok(list),
            None => File::open(format!("/proc/self/task/{own}/children")).map(BufReader::new),
        };
        let children = match list {
            Ok(list) => self.some_of(list),
            // The kernel may be built without that file.
            Err(_) => parents().map(|parents| children_in(&parents, own)).unwrap_or_default(),
        };
        for child in children.into_iter().filter(|child| !kept.contains(child)) {
            let _ = sys::reap_one(child);
        }
    }

    /// The next children of a list.
    fn some_of(&mut self, mut list: BufReader<File>) -> Vec<Pid> {
        let (mut some, mut number) = (Vec::new(), Vec::new());
        while some.len() < SOME {
            number.clear();
            if !matches!(list.read_until(b' ', &mut number), Ok(1..)) {
                return some;
            }
            let pid = std::str::from_utf8(&number).ok().and_then(|pid| pid.trim().parse().ok());
            // wait4(2) takes 0 for any child.
            some.extend(pid.filter(|pid| *pid > 0).map(Pid::from_raw));
        }
        self.list = Some(list);
        some
    }
}

fn children_in(parents: &HashMap<Pid, Pid>, of: Pid) -> Vec<Pid> {
    parents.iter().filter(|(_, parent)| **parent == of).map(|(pid, _)| *pid).collect()
}

/// The children of this process, without /proc: for each number the kernel says if it is one.
fn children_by_number() -> impl Iterator<Item = Pid> {
    (1..=LAST_NUMBER).map(Pid::from_raw).filter(|pid| sys::ended(*pid).is_ok())
}

/// Kills this process's children that are not in `spared`, with all below them. Those that it
/// misses, and what is below such, become children of this process when their parents end.
pub fn kill_children_except(spared: &[Pid]) {
    let is_spared = |child: &Pid| spared.contains(child);
    let doomed: Vec<Pid> = match parents() {
        Ok(parents) => {
            let children = children_in(&parents, getpid()).into_iter();
            let doomed = children.filter(|child| !is_spared(child));
            doomed.flat_map(|child| below_in(&parents, child).into_iter().chain([child])).collect()
        }
        Err(_) => children_by_number().filter(|child| !is_spared(child)).collect(),
    };
    for pid in doomed {
        let _ = kill(pid, Signal::SIGKILL);
    }
}

fn below_in(parents: &HashMap<Pid, Pid>, root: Pid) -> Vec<Pid> {
    let is_below = |mut pid: Pid| {
        // A chain longer than there are processes would be a cycle, which
        // reused numbers could make within one walk.
        for _ in 0..parents.len() {
            match parents.get(&pid) {
                Some(&parent) if parent == root => return true,
                Some(&parent) => pid = parent,
                None => return false,
            }
        }
        false
    };
    parents.keys().copied().filter(|&pid| is_below(pid)).collect()
}

/// All processes that /proc shows, with their parents. An error if it can't be read, or is not
/// this process's own.
fn parents() -> io::Result<HashMap<Pid, Pid>> {
    let mut parents = HashMap::new();
    for entry in fs::read_dir("/proc")? {
        let name = entry?.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse().ok()) else { continue };
        if let Some(parent) = parent_of(pid)? {
            parents.insert(Pid::from_raw(pid), parent);
        }
    }
    match parents.contains_key(&getpid()) {
        true => Ok(parents),
        false => Err(io::ErrorKind::NotFound.into()),
    }
}

/// `None`: it has ended, or is another user's that /proc does not show.
fn parent_of(pid: i32) -> io::Result<Option<Pid>> {
    let stat = match fs::read(format!("/proc/{pid}/stat")) {
        Ok(stat) => stat,
        Err(error) => {
            let is_gone = [libc::ENOENT, libc::ESRCH, libc::EACCES, libc::EPERM];
            return match error.raw_os_error() {
                Some(errno) if is_gone.contains(&errno) => Ok(None),
                _ => Err(error),
            };
        }
    };
    // The name in parentheses may hold anything, also parentheses and spaces.
    let after_name = stat.iter().rposition(|&byte| byte == b')').and_then(|at| stat.get(at + 2..));
    let text = after_name.and_then(|text| std::str::from_utf8(text).ok());
    Ok(text.and_then(|text| text.split(' ').nth(1)?.parse().ok()).map(Pid::from_raw))
}

#[cfg(test)]
mod tests {
    use nix::{
        sys::prctl,
        unistd::{ForkResult, setsid},
    };

    use super::*;
    use crate::runner::fence;

    const PATIENCE: Duration = Duration::from_secs(60);

    fn sleep_on() -> ! {
        thread::sleep(PATIENCE);
        sys::exit_now(0)
    }

    /// Forks a child in a session of its own, which forks another one.
    fn fork_two() {
        if matches!(sys::fork(), Ok(ForkResult::Child)) {
            let _ = setsid();
            if matches!(sys::fork(), Ok(ForkResult::Child)) {
                let _ = setsid();
            }
            sleep_on();
        }
    }

    /// How a child has ended.
    fn ended(child: Pid) -> i32 {
        let begun = Instant::now();
        loop {
            match sys::reap_one(child).unwrap() {
                Some(ended) => return ended.status,
                None if begun.elapsed() > PATIENCE / 2 => {
                    let _ = kill(child, Signal::SIGKILL);
                    panic!("it kills nothing");
                }
                None => thread::sleep(LAST_PAUSE),
            }
        }
    }

    #[test]
    fn all_of_a_run_is_killed_at_once_and_nothing_else() {
        let ForkResult::Parent { child: outside } = sys::fork().unwrap() else { sleep_on() };
        let ForkResult::Parent { child } = sys::fork().unwrap() else {
            let _ = prctl::set_child_subreaper(true);
            let below = fence::enter_run();
            if below != Ok(Below::Domain) {
                sys::exit_now(1);
            }
            fork_two();
            thread::sleep(Duration::from_millis(100));
            Below::Domain.kill();
            sys::exit_now(0)
        };
        let ended = ended(child);
        let is_outside_alive = sys::ended(outside).unwrap().is_none();
        let _ = kill(outside, Signal::SIGKILL);
        assert_eq!((ended, is_outside_alive), (0, true));
    }

    #[test]
    fn a_look_ends_though_there_is_always_another_child_to_reap() {
        let mut reaped = 0;
        let is_alone = has_reaped_all(|| {
            reaped += 1;
            assert!(reaped < 10 * AT_ONCE, "it goes on and on");
            Ok(true)
        });
        assert!(!is_alone);
    }

    #[test]
    fn orphans_are_reaped_some_at_a_time_and_all_in_the_end() {
        const COUNT: usize = 4 * SOME;
        let ForkResult::Parent { child } = sys::fork().unwrap() else {
            let mut children = (0..COUNT).filter_map(|_| match sys::fork() {
                Ok(ForkResult::Parent { child }) => Some(child),
                Ok(ForkResult::Child) => sys::exit_now(0),
                Err(_) => None,
            });
            let kept = HashSet::from([children.next().unwrap()]);
            let others: Vec<Pid> = children.collect();
            let mut orphans = Orphans::default();
            let (mut looks, begun) = (0, Instant::now());
            while others.iter().any(|pid| sys::ended(*pid).is_ok()) && begun.elapsed() < PATIENCE {
                orphans.reap_some(&kept);
                looks += 1;
            }
            let is_kept_there = kept.iter().all(|pid| sys::ended(*pid).is_ok());
            sys::exit_now(i32::from(!is_kept_there || looks < 2 || others.len() + 1 < COUNT))
        };
        assert_eq!(ended(child), 0);
    }

    #[test]
    fn what_is_below_is_killed_though_nothing_can_be_opened() {
        let ForkResult::Parent { child } = sys::fork().unwrap() else {
            let _ = prctl::set_child_subreaper(true);
            fork_two();
            thread::sleep(Duration::from_millis(100));
            let unset = sys::set_limit(libc::RLIMIT_NOFILE, 0, 0);
            Below::Parents.kill();
            sys::exit_now(i32::from(unset.is_err() || parents().is_ok()))
        };
        assert_eq!(ended(child), 0);
    }
}
