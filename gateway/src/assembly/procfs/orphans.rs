//! Processes that left the tree of their session, and all processes of a session.

use std::{
    collections::HashSet,
    fs,
    time::{Duration, Instant},
};

use super::live::{Stat, ancestors, children, is_alive, read_stat};
use crate::enlisted::Pid;

/// Finds processes that left their session's tree, without reading all of /proc each time: a
/// process older than every session can't have inherited from one.
#[derive(Debug, Default)]
pub struct Orphans {
    /// IDs of processes older than the sessions.
    pub(super) old: HashSet<Pid>,
    /// Start time of the oldest root when `old` was filled.
    oldest_start: u64,
    /// Time of the last search.
    looked_at: Option<Instant>,
}

/// Minimum time before process IDs are reused: there are at least 32,768.
const NUMBERS_HOLD: Duration = Duration::from_secs(5);

impl Orphans {
    /// Processes younger than the oldest root that init or a subreaper adopted. A subreaper adopts
    /// only its own descendants' orphans (PR_SET_CHILD_SUBREAPER(2const)), so one with a session's
    /// processes is an ancestor of that session's root. Skips `known` ones.
    pub(super) fn find(&mut self, roots: &[Pid], known: impl Fn(Pid) -> bool) -> Vec<Pid> {
        let Some(oldest) = roots.iter().filter_map(|&r| Some(read_stat(r)?.started)).min() else {
            return Vec::new();
        };
        let looked_at = self.looked_at.replace(Instant::now());
        if oldest < self.oldest_start || looked_at.is_none_or(|at| at.elapsed() > NUMBERS_HOLD) {
            self.old.clear();
        }
        self.oldest_start = oldest;
        // Read the ancestors first: when one ends, the next one above adopts its children.
        let reapers: HashSet<Pid> =
            roots.iter().flat_map(|&root| ancestors(root).skip(1)).collect();
        let Ok(directory) = fs::read_dir("/proc") else { return Vec::new() };
        let pids = directory.flatten().filter_map(|e| e.file_name().to_str()?.parse::<Pid>().ok());
        let mut orphans = Vec::new();
        let mut seen = HashSet::new();
        for pid in pids {
            if self.old.contains(&pid) {
                seen.insert(pid);
                continue;
            }
            if known(pid) {
                continue;
            }
            let Some(Stat { parent, started, .. }) = read_stat(pid) else {
                orphans.extend(is_alive(pid).then_some(pid));
                continue;
            };
            if started < oldest {
                seen.insert(pid);
            } else if parent <= 1 || reapers.contains(&parent) {
                orphans.push(pid);
            }
        }
        // A vanished ID may return as a younger process.
        self.old = seen;
        orphans
    }
}

/// Processes below `roots`, and orphans of these trees. Reads neither their states nor the children
/// of `childless` ones.
pub fn processes_below(
    roots: &[Pid],
    childless: &HashSet<Pid>,
    orphans: &mut Orphans,
) -> HashSet<Pid> {
    let mut found = HashSet::new();
    let add_below = |tops: &[Pid], found: &mut HashSet<Pid>| {
        let mut queue: Vec<Pid> = tops.to_vec();
        while let Some(pid) = queue.pop() {
            if found.insert(pid) && !childless.contains(&pid) {
                queue.extend(children(pid));
            }
        }
    };
    add_below(roots, &mut found);
    let cut_off = orphans.find(roots, |pid| found.contains(&pid));
    add_below(&cut_off, &mut found);
    found
}
