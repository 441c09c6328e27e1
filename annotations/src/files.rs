//! The files among the words of one invocation: where each path stands, how it
//! is used, and whether one of them is standard input.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;

use crate::facts::Facts;
use crate::invocation::{FileKind, FileUse};
use crate::model::{Arity, ChangesDir, Dash, ValueRule, ValueType};
use crate::words::Piece;

/// Files that the words of an invocation name.
#[derive(Debug, Default)]
pub struct Gathered {
    /// In the order of argv.
    pub uses: Vec<FileUse>,
    /// Arguments that mean standard input, operands only.
    pub stdin_operands: Vec<usize>,
    /// True if some word means standard input.
    pub names_stdin: bool,
    /// True if an option's value means standard input: it is no stream of lines then.
    pub stdin_in_option: bool,
    /// Operands that are files, standard input included.
    pub file_operands: usize,
    /// Directory that the invocation changes to first (`git -C DIR`), and whether it writes
    /// something relative to it.
    pub working_dir: Option<OsString>,
    pub writes_below_working_dir: bool,
}

/// Reason why the files can't be determined.
#[derive(Debug)]
pub enum FilesFault {
    /// The words do not fit.
    Shape(String),
    /// The invocation must run locally.
    Stays(String),
}

/// A value that is not among those that the annotation allows.
#[derive(Debug, thiserror::Error)]
#[error("the value {0} is not annotated")]
struct UnlistedValue(String);

/// Paths that are standard input under another name.
const STDIN_PATHS: [&[u8]; 3] = [b"/dev/stdin", b"/dev/fd/0", b"/proc/self/fd/0"];

/// A word that may be a file.
struct Candidate<'a> {
    piece: Piece,
    kind: FileKind,
    rule: &'a ValueRule,
    operand: bool,
    changes_dir: Option<ChangesDir>,
}

/// Finds the files. `inside` says that an option of the command before the
/// subcommand has already changed the directory.
pub fn gather(facts: &Facts<'_>, inside: bool) -> Result<Gathered, FilesFault> {
    let mut gathered = Gathered::default();
    let mut changed = inside.then_some(ChangesDir::Everything);
    for candidate in candidates(facts)? {
        let path = facts.bytes(candidate.piece);
        gathered.file_operands += usize::from(candidate.operand);
        match meaning(&candidate, path) {
            Dash::Stdout => continue,
            Dash::Stdin if candidate.kind == FileKind::ListFile => {
                let why = "the files named on its standard input can't be seen before it runs";
                return Err(FilesFault::Stays(why.to_owned()));
            }
            Dash::Stdin => {
                gathered.names_stdin = true;
                gathered.stdin_in_option |= !candidate.operand;
                if candidate.operand {
                    gathered.stdin_operands.push(candidate.piece.argument);
                }
                if path == b"-" {
                    continue;
                }
            }
            Dash::File => {}
        }
        if path.is_empty() {
            return Err(FilesFault::Shape("a file name is empty".to_owned()));
        }
        if relative_to_changed(&candidate, changed) && !path.starts_with(b"/") {
            below_changed(&candidate, path, &mut gathered)?;
            continue;
        }
        if candidate.changes_dir.is_some() {
            changed = candidate.changes_dir;
            if changed == Some(ChangesDir::Everything) {
                gathered.working_dir = Some(OsStr::from_bytes(path).to_owned());
            }
        }
        gathered.uses.push(file_use(facts, &candidate, path));
    }
    Ok(gathered)
}

fn relative_to_changed(candidate: &Candidate<'_>, changed: Option<ChangesDir>) -> bool {
    match changed {
        None => false,
        Some(ChangesDir::Everything) => true,
        Some(ChangesDir::Operands) => candidate.operand || candidate.changes_dir.is_some(),
    }
}

/// Handles a relative path after an option that changed the directory. It lies below that
/// directory, which is listed already; otherwise its place is unknown and the command stays local.
fn below_changed(
    candidate: &Candidate<'_>,
    path: &[u8],
    gathered: &mut Gathered,
) -> Result<(), FilesFault> {
    if candidate.changes_dir.is_some() {
        return Err(FilesFault::Stays("it changes its directory twice".to_owned()));
    }
    if path.split(|byte| *byte == b'/').any(|component| component == b"..") {
        return Err(FilesFault::Stays(
            "a path leads out of the directory that it changes to".to_owned(),
        ));
    }
    gathered.writes_below_working_dir |= candidate.kind.writes();
    Ok(())
}

fn meaning(candidate: &Candidate<'_>, path: &[u8]) -> Dash {
    let reads = matches!(candidate.kind, FileKind::InputFile | FileKind::ListFile);
    if reads && STDIN_PATHS.contains(&path) {
        return Dash::Stdin;
    }
    if path != b"-" {
        return Dash::File;
    }
    candidate.rule.dash.unwrap_or(match candidate.kind {
        FileKind::InputFile | FileKind::ListFile => Dash::Stdin,
        FileKind::OutputFile => Dash::Stdout,
        FileKind::InputDir | FileKind::OutputDir | FileKind::NewDir | FileKind::InoutFile => {
            Dash::File
        }
    })
}

fn file_use(facts: &Facts<'_>, candidate: &Candidate<'_>, path: &[u8]) -> FileUse {
    FileUse {
        argument: candidate.piece.argument,
        start: candidate.piece.start,
        end: candidate.piece.end,
        path: OsStr::from_bytes(path).to_owned(),
        kind: candidate.kind,
        no_follow: facts.holds(&candidate.rule.no_follow),
    }
}

/// All words of a file type, in the order of argv.
fn candidates<'a>(facts: &Facts<'a>) -> Result<Vec<Candidate<'a>>, FilesFault> {
    let mut found = Vec::new();
    for given in &facts.reading.given {
        let option = &facts.annotation.options[given.option];
        for (number, value) in given.values.iter().enumerate() {
            let from = found.len();
            add(facts, &option.value, number, *value, &mut found).map_err(|reason| {
                FilesFault::Shape(format!("{} of {}", reason, option.display()))
            })?;
            for candidate in &mut found[from..] {
                candidate.changes_dir = option.changes_dir;
            }
        }
    }
    for (number, param) in facts.annotation.params.iter().enumerate() {
        for (nth, argument) in facts.arguments(number).enumerate() {
            // The types of specific_size(n) are those of its words; else there is one.
            let nth = if matches!(param.size, Arity::Exactly(_)) { nth } else { 0 };
            let from = found.len();
            add(facts, &param.value, nth, facts.whole(argument), &mut found)
                .map_err(|reason| FilesFault::Shape(format!("{reason} as operand")))?;
            for candidate in &mut found[from..] {
                candidate.operand = true;
            }
        }
    }
    found.sort_by_key(|candidate| (candidate.piece.argument, candidate.piece.start));
    Ok(found)
}

fn add<'a>(
    facts: &Facts<'a>,
    rule: &'a ValueRule,
    nth: usize,
    value: Piece,
    found: &mut Vec<Candidate<'a>>,
) -> Result<(), UnlistedValue> {
    for piece in facts.split(value, rule) {
        let bytes = facts.bytes(piece);
        if !rule.allowed.is_empty()
            && !rule.allowed.iter().any(|allowed| allowed.as_bytes() == bytes)
        {
            return Err(UnlistedValue(String::from_utf8_lossy(bytes).into_owned()));
        }
        let types = rule.types.get(nth).or(rule.types.last());
        if let Some(ValueType::File(kind)) = types.and_then(|types| facts.case(types)) {
            found.push(Candidate { piece, kind: *kind, rule, operand: false, changes_dir: None });
        }
    }
    Ok(())
}
