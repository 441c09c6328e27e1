//! The shell scripts that this machine's packages carry.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use super::compare;
use super::visitor::{Run, Visitor};

/// Where packages put commands.
const COMMANDS: [&str; 4] = ["/usr/bin", "/usr/sbin", "/bin", "/sbin"];
/// Where they put scripts of other kinds, which are tried where everything is.
const OTHERS: [&str; 3] = ["/usr/share", "/usr/lib", "/etc"];
/// Arguments that scripts take without doing anything, and none at all, with nothing to read.
const ARGUMENTS: [&[&str]; 4] = [&["--help"], &["--version"], &["-h"], &[]];
/// The slowest help takes a second; some wait for input for ever.
const LIMIT_S: u32 = 10;
/// How many run at once.
const WORKERS: usize = 4;
/// What this machine need not carry, but a machine that builds and tests this does.
const AT_LEAST: usize = 300;

#[test]
fn scripts_of_this_machine() {
    let _turn = crate::whole_machine();
    let visitor = Visitor::arrive();
    let all = std::env::var_os("POSH_TEST_FULL").is_some();
    let mut runs: Vec<Run> = Vec::new();
    let others = if all { scripts(&OTHERS) } else { BTreeSet::new() };
    for script in scripts(&COMMANDS).into_iter().chain(others) {
        runs.extend(ARGUMENTS.iter().map(|arguments| run(&script, arguments)));
    }
    compare(&visitor, &runs, WORKERS).check("scripts of this machine", AT_LEAST);
}

/// By the first line where the script is executable, else by bash; the former also asks for its
/// interpreter.
fn run(script: &Path, arguments: &[&str]) -> Run {
    let path = script.to_str().unwrap().to_owned();
    let executable = script.metadata().is_ok_and(|m| m.permissions().mode() & 0o111 != 0);
    let mut words: Vec<String> =
        if executable { vec!["-c".into(), "\"$0\" \"$@\"".into()] } else { Vec::new() };
    words.push(path.clone());
    words.extend(arguments.iter().map(|a| (*a).to_owned()));
    let name = format!("{path} {}", arguments.join(" "));
    Run { name, words, directory: String::new(), limit_s: LIMIT_S, variables: Vec::new() }
}

/// Every file whose first line names a POSIX shell, once each.
fn scripts(places: &[&str]) -> BTreeSet<PathBuf> {
    let mut found = BTreeSet::new();
    let mut queue: Vec<PathBuf> = places.iter().filter_map(|p| fs::canonicalize(p).ok()).collect();
    while let Some(directory) = queue.pop() {
        for entry in fs::read_dir(&directory).into_iter().flatten().filter_map(Result::ok) {
            let path = entry.path();
            match entry.file_type() {
                Ok(t) if t.is_dir() => queue.push(path),
                Ok(t) if t.is_file() && path.to_str().is_some() && is_script(&path) => {
                    found.insert(path);
                }
                _ => {}
            }
        }
    }
    found
}

fn is_script(path: &Path) -> bool {
    let mut start = [0; 64];
    let Ok(count) = File::open(path).and_then(|mut f| f.read(&mut start)) else { return false };
    let line = start[..count].split(|b| *b == b'\n').next().unwrap_or_default();
    let line = String::from_utf8_lossy(line);
    let Some(interpreter) = line.strip_prefix("#!") else { return false };
    let word = interpreter.split_whitespace().next().unwrap_or_default();
    ["sh", "bash", "dash"]
        .iter()
        .any(|shell| Path::new(word).file_name().is_some_and(|n| n == *shell))
}
