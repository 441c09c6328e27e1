//! Colours, columns, quoting: what commands write because they write to a terminal.

use posh_integration::explain::ExplainReport;
use posh_integration::oracle::{Door, Under};
use posh_integration::terminal::{Terminal, TerminalSize};
use posh_integration::{Lab, Script, Shell};

use super::lab;
use crate::arena::kept_here;

/// Script, and the commands of it that must have run on the server, all of them. What
/// may start a pager, and colours of ls (which tell what a mount does not carry), stay here.
type Case = (&'static str, &'static [&'static str]);

/// As for the cases that are data.
const PLACEMENT_TRIES: usize = 3;

const SIZES: [TerminalSize; 4] = [
    TerminalSize::USUAL,
    TerminalSize::new(50, 200),
    TerminalSize::new(20, 33),
    TerminalSize::new(40, 121),
];

const CASES: &[Case] = &[
    ("ls /mnt/s1/many", &["ls"]),
    ("cd /mnt/s1/many && ls", &["ls"]),
    ("ls --color=auto /mnt/s1/many", &[]),
    ("LS_COLORS='di=1;35:*.gz=4;31' ls --color=auto /mnt/s1/many", &[]),
    ("COLUMNS=50 ls /mnt/s1/many", &["ls"]),
    ("TERM=dumb ls --color=auto /mnt/s1/many", &[]),
    ("ls -x /mnt/s1/many; ls -m /mnt/s1/many; ls -1 /mnt/s1/many", &["ls"]),
    ("ls /mnt/s1/many | cat", &["ls", "cat"]),
    ("ls --color=auto /mnt/s1/many | cat", &[]),
    ("grep --color=auto needle /mnt/s1/f", &["grep"]),
    ("grep --color=auto -n needle /mnt/s1/f /mnt/s1/g", &["grep"]),
    ("grep --color=always needle /mnt/s1/f | tail -n 2", &["grep", "tail"]),
    ("cat /mnt/s1/f | grep --color=auto needle", &["cat", "grep"]),
    ("GREP_COLORS='mt=01;34' grep --color=auto needle /mnt/s1/f", &["grep"]),
    ("TERM=dumb grep --color=auto needle /mnt/s1/f", &["grep"]),
    ("grep --color=auto needle /mnt/s1/f /mnt/s1/absent", &["grep"]),
    ("grep --color=auto needle /mnt/s1/absent; echo $?", &["grep"]),
    ("diff --color=auto /mnt/s1/f /mnt/s1/g", &["diff"]),
    ("diff --color=auto -y -t /mnt/s1/f /mnt/s1/g | head -n 5", &["diff", "head"]),
    ("cat /mnt/s1/f", &["cat"]),
    ("head -c 5000 /mnt/s1/large; echo", &["head"]),
    ("printf 'no newline at the end' > /mnt/s1/n; cat /mnt/s1/n; cat /mnt/s1/n; echo", &["cat"]),
    ("wc /mnt/s1/f; sort /mnt/s1/f | uniq -c | sort -n | tail", &["wc", "sort", "uniq", "tail"]),
    ("find /mnt/s1/many -name '*e' | sort", &["find", "sort"]),
    ("cd /mnt/s1/repo && git --no-pager log", &[]),
    ("cd /mnt/s1/repo && git --no-pager log --oneline --graph", &[]),
    ("cd /mnt/s1/repo && git --no-pager diff", &[]),
    ("cd /mnt/s1/repo && git --no-pager diff --stat", &[]),
    ("cd /mnt/s1/repo && git --no-pager status", &["git status"]),
    ("cd /mnt/s1/repo && git log | cat", &[]),
    ("cd /mnt/s1/repo && GIT_PAGER=cat git log --oneline", &["git log"]),
    ("cd /mnt/s1/repo && GIT_PAGER=cat git diff", &["git diff"]),
    ("cd /mnt/s1/repo && git diff", &[]),
    ("cd /mnt/s1/repo && git branch", &[]),
    ("tput cols; tput lines; stty size", &[]),
    ("test -t 1 && echo terminal; cat /mnt/s1/f | test -t 0 || echo pipe", &[]),
];

struct Seen {
    raw: Vec<u8>,
    screen: String,
    status: i32,
}

fn run(lab: &Lab, script: &Script, under: Under, size: TerminalSize) -> Seen {
    let mut command = script.command(&lab.workstation, under);
    if !script.variables.iter().any(|(name, _)| name == "TERM") {
        command.env("TERM", "xterm-256color");
    }
    let ran = Terminal::run(&lab.workstation, &command, size);
    let (raw, screen, status) = ran.unwrap_or_else(|e| panic!("{}: {e}", script.text));
    Seen { raw, screen, status }
}

fn try_case(lab: &Lab, (text, offloaded): &Case, size: TerminalSize) -> Result<(), String> {
    let script = Script::new(*text).shell(Shell::Bash);
    let alone = run(lab, &script, Under::Shell, size);
    for door in Door::ALL {
        let script = script.clone().door(door);
        let differ = |posh: &Seen| {
            let [a, b] = [&alone, posh].map(|s| String::from_utf8_lossy(&s.raw).into_owned());
            format!(
                "{size:?} {door:?} {text}\n--- bash {} {a:?}\n--- posh {} {b:?}\n",
                alone.status, posh.status
            )
        };
        let posh = run(lab, &script, Under::Posh, size);
        if alone.raw != posh.raw || alone.status != posh.status || alone.screen != posh.screen {
            return Err(differ(&posh));
        }
        if offloaded.is_empty() {
            continue;
        }
        // Who belongs together is found out against the clock, and may be missed on a busy machine.
        // Wrong output is never tried again.
        let mut missed = None;
        for _ in 0..PLACEMENT_TRIES {
            let mut shown = run(lab, &script, Under::PoshExplained, size);
            let (rest, report) =
                ExplainReport::take(&shown.raw).map_err(|e| format!("{text}: {e}"))?;
            shown.raw = rest;
            if alone.raw != shown.raw {
                return Err(differ(&shown));
            }
            missed = kept_here(&report, offloaded);
            if missed.is_none() {
                break;
            }
        }
        if let Some(missed) = missed {
            return Err(format!("{text}: {size:?} {door:?}: {missed}"));
        }
    }
    Ok(())
}

#[test]
fn colours_and_columns() {
    let lab = lab();
    let mut faults = Vec::new();
    for size in SIZES {
        faults.extend(CASES.iter().filter_map(|case| try_case(&lab, case, size).err()));
    }
    crate::arena::assert_none(&faults, CASES.len() * SIZES.len());
}
