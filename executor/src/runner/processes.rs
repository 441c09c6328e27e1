//! Finding and killing processes below this one.
//!
//! Every process that uses this module is a subreaper: orphans become its children, so that
//! whatever a command leaves behind, even in another session, is found by its parents.

use std::{
    collections::{HashMap, HashSet},
    fs, thread,
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
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

/// Terminates every process below this one, and kills those that are left after a second. A killed
/// process leaves its locks: git's would keep the next git out.
pub fn end_all_below() {
    let started = Instant::now();
    let mut pause = FIRST_PAUSE;
    let mut is_asked = false;
    while !is_alone() {
        if !is_asked {
            for pid in below(getpid()) {
                let _ = kill(pid, Signal::SIGTERM);
            }
            is_asked = true;
        } else if started.elapsed() > GRACE {
            return kill_all_below();
        }
        thread::sleep(pause);
        pause = (pause * 2).min(LAST_PAUSE);
    }
}

/// Reaps children that have ended; true if no process is left.
fn is_alone() -> bool {
    loop {
        match sys::reap() {
            Ok(Some(_)) | Err(Errno::EINTR) => {}
            Ok(None) => return false,
            Err(_) => return true,
        }
    }
}

/// Reaps the children that have ended and are not in `kept`.
pub fn reap_others(kept: &HashSet<Pid>) {
    for child in children().into_iter().filter(|child| !kept.contains(child)) {
        let _ = sys::reap_one(child);
    }
}

/// The children of this process, which has one thread.
fn children() -> Vec<Pid> {
    let own = getpid();
    match fs::read_to_string(format!("/proc/self/task/{own}/children")) {
        Ok(pids) => {
            pids.split_whitespace().filter_map(|pid| pid.parse().ok()).map(Pid::from_raw).collect()
        }
        // The kernel may be built without that file.
        Err(_) => {
            parents().into_iter().filter(|(_, parent)| *parent == own).map(|(pid, _)| pid).collect()
        }
    }
}

/// Kills every process below this one and waits for their ends. Looks again until none is left: one
/// may fork, or be missed, during a look.
pub fn kill_all_below() {
    let mut pause = FIRST_PAUSE;
    while !is_alone() {
        for pid in below(getpid()) {
            let _ = kill(pid, Signal::SIGKILL);
        }
        thread::sleep(pause);
        pause = (pause * 2).min(LAST_PAUSE);
    }
}

/// Kills this process's children that are not in `spared`, with all below them.
pub fn kill_children_except(spared: &[Pid]) {
    let parents = parents();
    let own = getpid();
    for (&pid, &parent) in &parents {
        if parent == own && !spared.contains(&pid) {
            for pid in below_in(&parents, pid) {
                let _ = kill(pid, Signal::SIGKILL);
            }
            let _ = kill(pid, Signal::SIGKILL);
        }
    }
}

fn below(root: Pid) -> Vec<Pid> {
    below_in(&parents(), root)
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

/// All processes that /proc shows, with their parents.
fn parents() -> HashMap<Pid, Pid> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter_map(|pid: i32| Some((Pid::from_raw(pid), parent_of(pid)?))).collect()
}

fn parent_of(pid: i32) -> Option<Pid> {
    let stat = fs::read(format!("/proc/{pid}/stat")).ok()?;
    // The name in parentheses may hold anything, also parentheses and spaces.
    let after_name = stat.iter().rposition(|&byte| byte == b')')?;
    let text = std::str::from_utf8(stat.get(after_name + 2..)?).ok()?;
    text.split(' ').nth(1)?.parse().ok().map(Pid::from_raw)
}
