//! The model: for each path the state that it must have, or the states that it may have after a
//! call without an answer, or with an error that leaves its outcome open.

use std::collections::{BTreeMap, BTreeSet};

use posh_volume::Errno;

/// Expected state of a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum State {
    Absent,
    Directory,
    /// That contents.
    File(Vec<u8>),
    /// Of any length up to that, and any part of it; the rest is zeros. Pieces that are under way
    /// at the same time may arrive in any order, or fail one by one.
    PartOf(Vec<u8>),
}

/// Actual state of a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Found {
    Absent,
    Directory,
    File(Vec<u8>),
}

impl State {
    pub fn fits(&self, found: &Found) -> bool {
        match (self, found) {
            (Self::Absent, Found::Absent) | (Self::Directory, Found::Directory) => true,
            (Self::File(promised), Found::File(is)) => promised == is,
            (Self::PartOf(promised), Found::File(is)) => {
                is.len() <= promised.len()
                    && is.iter().zip(promised).all(|(is, promised)| is == promised || *is == 0)
            }
            _ => false,
        }
    }

    /// In a few words.
    pub fn shown(&self) -> String {
        match self {
            Self::Absent => "absent".to_owned(),
            Self::Directory => "a directory".to_owned(),
            Self::File(data) => format!("{:?} of {} bytes", beginning(data), data.len()),
            Self::PartOf(data) => {
                format!("a part of {:?} of {} bytes", beginning(data), data.len())
            }
        }
    }
}

impl Found {
    pub fn shown(&self) -> String {
        match self {
            Self::Absent => "absent".to_owned(),
            Self::Directory => "a directory".to_owned(),
            Self::File(data) => format!("{:?} of {} bytes", beginning(data), data.len()),
        }
    }
}

fn beginning(data: &[u8]) -> String {
    String::from_utf8_lossy(&data[..data.len().min(12)]).into_owned()
}

/// Paths of which it is not known what became of a call: one of these worlds is so, for all of them
/// together.
#[derive(Debug, Clone)]
pub struct Doubt {
    pub call: String,
    pub paths: Vec<String>,
    pub worlds: Vec<Vec<State>>,
}

/// A record of a log: between how often, and how often at most, it is there.
pub type Records = BTreeMap<String, (usize, usize)>;

/// A write of a shared register, from its call to its answer.
#[derive(Debug, Clone)]
pub struct Setting {
    pub value: String,
    pub began: u64,
    /// `None`: nobody was told that it has happened.
    pub ended: Option<u64>,
}

#[derive(Debug, Default)]
pub struct Model {
    /// Certain states.
    pub known: BTreeMap<String, State>,
    /// Of paths that no call uses any more.
    pub doubts: Vec<Doubt>,
    /// Paths that a call is about to change.
    pub under_way: BTreeSet<String>,
    pub logs: BTreeMap<String, Records>,
    pub registers: BTreeMap<String, Vec<Setting>>,
    /// Counts what happens.
    pub step: u64,
    pub broken: Vec<String>,
}

impl Model {
    pub fn tick(&mut self) -> u64 {
        self.step += 1;
        self.step
    }

    pub fn breaks(&mut self, what: String) {
        self.broken.push(what);
    }

    pub fn is(&self, path: &str) -> State {
        self.known.get(path).cloned().unwrap_or(State::Absent)
    }

    /// A path whose state is certain, or was never used.
    pub fn is_certain(&self, path: &str) -> bool {
        !self.under_way.contains(path)
            && !self.doubts.iter().any(|doubt| doubt.paths.iter().any(|its| its == path))
    }

    /// From now on one of these worlds may be: a call begins.
    pub fn begin(&mut self, doubt: Doubt) {
        self.under_way.extend(doubt.paths.iter().cloned());
        self.doubts.push(doubt);
    }

    /// The call of these paths has ended, and all is certain.
    pub fn end(&mut self, paths: &[&str], states: Vec<State>) {
        self.doubts.retain(|doubt| doubt.paths != paths);
        for (path, state) in paths.iter().zip(states) {
            self.under_way.remove(*path);
            self.known.insert((*path).to_owned(), state);
        }
    }

    /// Checks that each path's actual state is an expected one.
    pub fn check(&mut self, place: &str, find: &dyn Fn(&str) -> Found) {
        let mut broken = Vec::new();
        let doubtful: BTreeSet<&String> =
            self.doubts.iter().flat_map(|doubt| &doubt.paths).collect();
        for (path, state) in self.known.iter().filter(|(path, _)| !doubtful.contains(path)) {
            let found = find(path);
            if !state.fits(&found) {
                broken.push(format!(
                    "{place}: {path} must be {}, and is {}",
                    state.shown(),
                    found.shown()
                ));
            }
        }
        for doubt in &self.doubts {
            let found: Vec<Found> = doubt.paths.iter().map(|path| find(path)).collect();
            let is_so = |world: &Vec<State>| {
                world.iter().zip(&found).all(|(state, found)| state.fits(found))
            };
            if !doubt.worlds.iter().any(is_so) {
                let shown: Vec<String> = found.iter().map(Found::shown).collect();
                let worlds: Vec<Vec<String>> = doubt
                    .worlds
                    .iter()
                    .map(|world| world.iter().map(State::shown).collect())
                    .collect();
                broken.push(format!(
                    "{place}: after {} {:?} may be one of {worlds:?}, and is {shown:?}",
                    doubt.call, doubt.paths
                ));
            }
        }
        self.broken.extend(broken);
    }

    /// Every path that may be there.
    pub fn may_be(&self, path: &str) -> bool {
        self.known.get(path).is_some_and(|state| *state != State::Absent)
            || self.doubts.iter().any(|doubt| doubt.paths.iter().any(|its| its == path))
    }

    /// Whole records, each as often as was promised.
    pub fn check_log(&mut self, place: &str, log: &str, contents: &[u8]) {
        let Some(records) = self.logs.get(log) else { return };
        let text = String::from_utf8_lossy(contents);
        let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
        for line in text.split_terminator('\n') {
            *counts.entry(line).or_default() += 1;
        }
        let mut broken = Vec::new();
        for (record, (least, most)) in records {
            let count = counts.remove(record.as_str()).unwrap_or_default();
            if count < *least || count > *most {
                broken.push(format!(
                    "{place}: {log} has {record:?} {count} times, and not {least} to {most} times"
                ));
            }
        }
        broken.extend(
            counts.keys().map(|line| format!("{place}: {log} has {line:?}, which nobody wrote so")),
        );
        self.broken.extend(broken);
    }

    /// A register that was read from `began` on has a value that no later write had replaced
    /// before.
    pub fn check_register(&mut self, who: &str, register: &str, began: u64, value: &str) {
        let Some(settings) = self.registers.get(register) else { return };
        let Some(read) = settings.iter().find(|setting| setting.value == value) else {
            self.broken.push(format!("{who} reads {value:?} from {register}, which nobody wrote"));
            return;
        };
        let replaced = read.ended.and_then(|ended| {
            settings
                .iter()
                .find(|other| other.began > ended && other.ended.is_some_and(|ended| ended < began))
        });
        if let Some(newer) = replaced {
            let newer = &newer.value;
            self.broken.push(format!(
                "{who} reads {value:?} from {register} after {newer:?} was written and closed"
            ));
        }
    }
}

/// Returns true if an error means that nothing was performed.
pub fn is_refusal(errno: Errno) -> bool {
    matches!(errno, Errno::ENOSPC | Errno::EDQUOT)
}

/// Returns true for an error of a broken connection.
pub fn is_break(errno: Errno) -> bool {
    matches!(errno, Errno::EIO | Errno::ETIMEDOUT)
}
