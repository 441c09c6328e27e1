//! Assigns processes to commands, finds accesses that annotations miss, and describes them.

use std::{
    collections::{HashMap, HashSet},
    ffi::{OsStr, OsString},
    fmt::Write as _,
    fs,
    os::unix::ffi::{OsStrExt as _, OsStringExt as _},
    path::{Path, PathBuf},
    rc::Rc,
};

use nix::{libc, unistd::Pid};

use super::{
    calls::{self, SystemCall, Touch},
    observe::{CallDecision, Judge, Thread},
    scope::{CommandRights, Miss, ProcessPath, open_directory},
};
use crate::policy::Policy;

/// Reported misses: a command that walks a tree which no word names would fill the screen.
const MAX_MISSES: usize = 100;

/// Words at the beginning that a script's interpreter may have (`/bin/sh -e SCRIPT`).
const MAX_INTERPRETER_WORDS: usize = 3;

/// A command that an annotation understands.
struct UnderstoodCommand {
    argv: Vec<OsString>,
    scope: CommandRights,
}

/// Judges by annotations.
pub struct Verifier {
    policy: Policy,
    temporary: PathBuf,
    /// The command of each process: children belong to their parent's command.
    processes: HashMap<Pid, Rc<UnderstoodCommand>>,
    verified: usize,
    misses: Vec<String>,
    seen: HashSet<String>,
    /// Commands that were not verified, one sentence each, once.
    unverified: Vec<String>,
}

impl Verifier {
    /// By the annotations of `policy`, with a directory for temporary files.
    pub fn new(policy: Policy, temporary: PathBuf) -> Self {
        Self {
            policy,
            temporary,
            processes: HashMap::new(),
            verified: 0,
            misses: Vec::new(),
            seen: HashSet::new(),
            unverified: Vec::new(),
        }
    }

    /// The report, and true if commands were verified and nothing was missed.
    pub fn report(&self) -> (String, bool) {
        let mut text = String::new();
        for line in self.unverified.iter().chain(self.misses.iter().take(MAX_MISSES)) {
            let _ = writeln!(text, "{line}");
        }
        if self.misses.len() > MAX_MISSES {
            let _ = writeln!(text, "and {} more", self.misses.len() - MAX_MISSES);
        }
        let _ = match (self.verified, self.misses.len()) {
            (0, _) => writeln!(
                text,
                "no command was verified: none that ran is understood by an annotation"
            ),
            (verified, 0) => {
                writeln!(
                    text,
                    "commands verified: {verified}; each used what its annotation names, and no \
                     more"
                )
            }
            (verified, misses) => {
                writeln!(
                    text,
                    "commands verified: {verified}; uses that no annotation names: {misses}"
                )
            }
        };
        (text, self.verified > 0 && self.misses.is_empty())
    }

    /// Analyses the words of a process after an execve(2).
    fn known(&mut self, process: Pid) -> Option<UnderstoodCommand> {
        let about = |what: &str| fs::read(format!("/proc/{process}/{what}")).unwrap_or_default();
        let (argv, environment) = (words(&about("cmdline")), words(&about("environ")));
        let (name, argv) = self.named(argv, about("comm").trim_ascii_end())?;
        let variable = |name: &str| {
            let prefix = [name.as_bytes(), b"="].concat();
            let value =
                environment.iter().find_map(|word| word.as_bytes().strip_prefix(&prefix[..]))?;
            Some(OsStr::from_bytes(value).to_owned())
        };
        let read = self.policy.understand(&name, &argv, &variable).map_err(|why| why.to_string());
        let read = read.and_then(|invocation| {
            let cwd = fs::read_link(format!("/proc/{process}/cwd"))
                .map_err(|error| format!("{name}: {error}"))?;
            CommandRights::new(&name, &invocation, &cwd, &self.temporary)
                .map_err(|error| format!("{name}: {error}"))
        });
        match read {
            Ok(scope) => Some(UnderstoodCommand { argv, scope }),
            Err(why) => {
                let sentence = format!("not verified: {why}");
                if self.seen.insert(sentence.clone()) {
                    self.unverified.push(sentence);
                }
                None
            }
        }
    }

    /// The annotated name of a program, and its words; a script's without those of its interpreter.
    fn named(&self, argv: Vec<OsString>, comm: &[u8]) -> Option<(String, Vec<OsString>)> {
        let name_of = |word: &OsString| Path::new(word).file_name()?.to_str().map(str::to_owned);
        let is_it = |word: &&OsString| name_of(word).is_some_and(|name| self.policy.knows(&name));
        let scripts = argv.iter().take(MAX_INTERPRETER_WORDS).position(|word| {
            is_it(&word) && Path::new(word).file_name().is_some_and(|name| name.as_bytes() == comm)
        });
        let start = scripts.or_else(|| argv.first().filter(is_it).map(|_| 0))?;
        let name = name_of(&argv[start])?;
        Some((name, argv[start..].to_vec()))
    }

    fn note(&mut self, known: &UnderstoodCommand, comm: &str, given: &[u8], miss: &Miss) {
        let Miss { deed, path, is_named, .. } = miss;
        let path = path.display();
        let sentence = match (is_named, word_of(&known.argv, given)) {
            (true, _) => {
                format!("{comm}: {deed} {path}, which its annotation names, but not for that")
            }
            (false, Some(word)) => {
                format!("{comm}: {deed} {path}, which no word of its annotation names ({word}?)")
            }
            (false, None) => {
                format!("{comm}: {deed} {path}, which no word of its annotation names")
            }
        };
        if self.seen.insert(sentence.clone()) {
            self.misses.push(sentence);
        }
    }
}

impl Judge for Verifier {
    fn executed(&mut self, process: Pid) {
        if self.processes.contains_key(&process) {
            return;
        }
        if let Some(known) = self.known(process) {
            self.verified += 1;
            self.processes.insert(process, Rc::new(known));
        }
    }

    fn born(&mut self, process: Pid, parent: Pid) {
        if let Some(known) = self.processes.get(&parent).cloned() {
            self.processes.insert(process, known);
        }
    }

    fn called(&mut self, process: Pid, thread: &Thread, call: &SystemCall) -> CallDecision {
        let Some(known) = self.processes.get(&process).cloned() else {
            return CallDecision::Granted;
        };
        let mut verdict = CallDecision::Granted;
        for touch in calls::touches(call, &|address| thread.word(address)) {
            let Some(given) = thread.path(touch.path).filter(|path| !path.is_empty()) else {
                continue;
            };
            let Some(place) = place(thread, &touch, &given) else { continue };
            if let Some(miss) = known.scope.miss(&place, touch.deed) {
                let comm = fs::read_to_string(thread.about("comm")).unwrap_or_default();
                self.note(&known, comm.trim_end(), &given, &miss);
                if miss.is_governed {
                    verdict = CallDecision::Denied;
                }
            }
        }
        verdict
    }

    fn ended(&mut self, process: Pid) {
        self.processes.remove(&process);
    }
}

fn place(thread: &Thread, touch: &Touch, given: &[u8]) -> Option<ProcessPath> {
    let base = match touch.directory {
        libc::AT_FDCWD => thread.about("cwd"),
        fd => thread.about(&format!("fd/{fd}")),
    };
    let path = PathBuf::from(OsString::from_vec(given.to_vec()));
    let base = if path.is_absolute() { PathBuf::from("/") } else { PathBuf::from(base) };
    Some(ProcessPath { base: open_directory(&base).ok()?, path, follows: touch.follows })
}

/// The word of a command that contains this path, for people: the option before it, or its number.
fn word_of(argv: &[OsString], given: &[u8]) -> Option<String> {
    let at = argv.iter().skip(1).position(|word| word.as_bytes().ends_with(given))? + 1;
    let is_option = |word: &OsString| word.len() > 1 && word.as_bytes().starts_with(b"-");
    let before = &argv[at].as_bytes()[..argv[at].len() - given.len()];
    let option = match before {
        b"" if at > 1 && is_option(&argv[at - 1]) => argv[at - 1].as_bytes(),
        b"" => return Some(format!("word {at}")),
        before => before.strip_suffix(b"=").unwrap_or(before),
    };
    Some(format!("option {}", String::from_utf8_lossy(option)))
}

/// Splits words that end in zero bytes.
fn words(bytes: &[u8]) -> Vec<OsString> {
    let ended = bytes.strip_suffix(b"\0").unwrap_or(bytes);
    ended.split(|byte| *byte == 0).map(|word| OsString::from_vec(word.to_vec())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_is_named_as_people_would() {
        for (line, given, expected) in [
            ("sort --random-source=/k f", "/k", "option --random-source"),
            ("sort --random-source /k f", "/k", "option --random-source"),
            ("sort -T/k f", "/k", "option -T"),
            ("sort a /k", "/k", "word 2"),
            ("sort f", "/k", "none"),
        ] {
            let argv: Vec<OsString> = line.split(' ').map(OsString::from).collect();
            assert_eq!(
                word_of(&argv, given.as_bytes()).unwrap_or("none".to_owned()),
                expected,
                "{line}"
            );
        }
    }
}
