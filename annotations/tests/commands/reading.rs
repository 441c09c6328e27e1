//! Reads command lines as a table does, and says in a few words what follows.

use std::collections::HashMap;
use std::ffi::OsString;

use posh_annotations::{CurrentDir, FileKind, Invocation, Library, StdinUse, TerminalUse, Unknown};

/// Checks lines of the form `[NAME=VALUE]... COMMAND [WORD]...`; words may stand in single quotes.
#[track_caller]
pub fn check(table: &[(&str, &str)]) {
    let library = Library::builtin();
    let wrong: Vec<String> = table
        .iter()
        .map(|(line, expected)| (line, expected, read(&library, line)))
        .filter(|(_, expected, found)| *expected != found)
        .map(|(line, expected, found)| format!("{line}\n  expected {expected}\n  found    {found}"))
        .collect();
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

pub fn read(library: &Library, line: &str) -> String {
    match classify(library, line) {
        Ok(invocation) => describe(&invocation),
        Err(unknown) => format!("here: {unknown}"),
    }
}

pub fn classify(library: &Library, line: &str) -> Result<Invocation, Unknown> {
    let mut words = words(line);
    let mut variables = HashMap::new();
    while let Some((name, value)) = words[0].split_once('=') {
        variables.insert(name.to_owned(), OsString::from(value));
        words.remove(0);
    }
    let argv: Vec<OsString> = words.iter().map(OsString::from).collect();
    library.classify(&words[0], &argv, &|name| variables.get(name).cloned())
}

pub fn words(line: &str) -> Vec<String> {
    let mut words = Vec::new();
    let mut rest = line.trim_start();
    while !rest.is_empty() {
        let (word, after) = match rest.strip_prefix('\'') {
            Some(quoted) => quoted.split_once('\'').expect("a quote is closed"),
            None => rest.split_once(' ').unwrap_or((rest, "")),
        };
        words.push(word.to_owned());
        rest = after.trim_start();
    }
    words
}

/// The reading in one line: files with their kinds (`!`: the last symlink is not followed), then
/// what is not the plainest case.
pub fn describe(invocation: &Invocation) -> String {
    let mut parts: Vec<String> = Vec::new();
    for file in &invocation.files {
        let kind = match file.kind {
            FileKind::InputFile => "reads",
            FileKind::InputDir => "walks",
            FileKind::OutputFile => "makes",
            FileKind::OutputDir => "fills",
            FileKind::NewDir => "makes directory",
            FileKind::InoutFile => "changes",
            FileKind::ListFile => "lists",
        };
        let mark = if file.no_follow { "!" } else { "" };
        parts.push(format!("{kind} {}{mark}", file.path.to_string_lossy()));
    }
    match invocation.current_dir {
        CurrentDir::Unused => {}
        CurrentDir::Reads => parts.push("reads .".to_owned()),
        CurrentDir::Writes => parts.push("writes .".to_owned()),
    }
    if !invocation.changes_only.is_empty() && invocation.side_effects {
        parts.push(format!("only {}", invocation.changes_only.join(" ")));
    }
    if invocation.replaces_files && invocation.side_effects {
        parts.push("replaces".to_owned());
    }
    if let Some(directory) = &invocation.working_dir {
        parts.push(format!("in {}", directory.to_string_lossy()));
    }
    match invocation.stdin {
        StdinUse::Unused => {}
        StdinUse::ReadsAll => parts.push("stdin".to_owned()),
        StdinUse::MayStopEarly => parts.push("stdin early".to_owned()),
    }
    if let Some(split) = &invocation.split {
        parts.push(format!("split {}", split.operands.len()));
    }
    if !invocation.shows.is_empty() {
        parts.push(format!("shows {:?}", invocation.shows));
    }
    match invocation.terminal {
        TerminalUse::Plain => {}
        TerminalUse::Output => parts.push("tty".to_owned()),
        TerminalUse::Interactive => parts.push("asks".to_owned()),
    }
    if !invocation.deterministic {
        parts.push("varies".to_owned());
    }
    if !invocation.idempotent {
        parts.push("once".to_owned());
    }
    parts.join("; ")
}
