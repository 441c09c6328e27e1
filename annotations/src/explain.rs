//! Explains how one invocation is read: the role of every word, then the consequences for standard
//! input, splitting, status and so on.

use std::ffi::OsString;
use std::fmt::Write as _;

use crate::facts::{Environment, Facts};
use crate::invocation::{
    Aggregator, BehindMerge, CurrentDir, FileKind, FileUse, Invocation, StatusRule, StdinUse,
    TerminalUse, ToolVersion,
};
use crate::library::Library;
use crate::model::{ValueRule, ValueType};
use crate::words::Piece;

impl Library {
    /// Explains one invocation; the arguments are those of [`Library::classify`]. The text has
    /// several lines and ends with a newline.
    #[must_use]
    pub fn explain(
        &self,
        name: &str,
        argv: &[OsString],
        environment: &dyn Fn(&str) -> Option<OsString>,
    ) -> String {
        explain(self, name, argv, environment)
    }
}

fn explain<'a>(
    library: &'a Library,
    name: &str,
    argv: &'a [OsString],
    environment: Environment<'a>,
) -> String {
    let understood = match library.understand(name, argv, environment) {
        Ok(understood) => understood,
        Err(unknown) => return format!("runs here: {}\n", spelled_out(&unknown.to_string())),
    };
    let mut text = String::new();
    let mut notes = vec![Vec::new(); argv.len()];
    for facts in &understood.levels {
        note_words(facts, &understood.invocation, &mut notes);
    }
    let width = argv
        .iter()
        .skip(1)
        .map(|word| spelled_out(&word.to_string_lossy()).chars().count())
        .max()
        .unwrap_or(0)
        .min(30);
    for (word, notes) in argv.iter().zip(&notes).skip(1) {
        line(&mut text, &word.to_string_lossy(), width, &notes.join("; "));
    }
    for (label, value) in consequences(&understood.invocation, argv) {
        line(&mut text, label, 15, &value);
    }
    text
}

fn line(text: &mut String, label: &str, width: usize, value: &str) {
    let (label, value) = (spelled_out(label), spelled_out(value));
    writeln!(text, "{label:<width$}  {value}").expect("a string can be written to");
}

/// Spells out control characters, so that no word forges a line.
fn spelled_out(words: &str) -> String {
    let spelled = |character: char| -> String {
        if character.is_control() { character.escape_default().collect() } else { character.into() }
    };
    words.chars().map(spelled).collect()
}

fn note_words(facts: &Facts<'_>, invocation: &Invocation, notes: &mut [Vec<String>]) {
    let use_of = |piece: Piece, rule: &ValueRule| {
        let uses = invocation.files.iter().filter(|file| file.argument == piece.argument);
        let kinds: Vec<&str> = uses
            .filter(|file| file.start >= piece.start && file.end <= piece.end)
            .map(kind)
            .collect();
        let may_be_file =
            rule.types.iter().any(|types| matches!(facts.case(types), Some(ValueType::File(_))));
        match (kinds.is_empty(), may_be_file, facts.bytes(piece)) {
            (false, ..) => kinds.join(", "),
            (true, true, b"-") => "standard input or output".to_owned(),
            (true, true, _) => "below the directory that it changes to".to_owned(),
            (true, false, _) => "no file".to_owned(),
        }
    };
    for given in &facts.reading.given {
        let option = &facts.annotation.options[given.option];
        let sort = if given.values.is_empty() { "flag" } else { "option" };
        notes[given.name.argument].push(format!("{sort} {}", option.display()));
        for value in &given.values {
            notes[value.argument].push(format!(
                "value of {}: {}",
                option.display(),
                use_of(*value, &option.value)
            ));
        }
    }
    if let Some(dashes) = facts.reading.dashes {
        notes[dashes].push("end of the options".to_owned());
    }
    if facts.dealt.is_empty()
        && let Some(operand) = facts.reading.operands.first()
    {
        notes[operand.argument].push("subcommand".to_owned());
    }
    for (operand, param) in facts.reading.operands.iter().zip(&facts.dealt) {
        let param = &facts.annotation.params[*param];
        let name = param.name.as_deref().unwrap_or("operand");
        notes[operand.argument]
            .push(format!("{name}: {}", use_of(facts.whole(operand.argument), &param.value)));
    }
}

fn kind(file: &FileUse) -> &'static str {
    match file.kind {
        FileKind::InputFile => "a file that is read",
        FileKind::InputDir => "a tree that is read",
        FileKind::OutputFile => "a file that is written",
        FileKind::OutputDir => "a tree that is written",
        FileKind::NewDir => "a directory that is made",
        FileKind::InoutFile => "a file that is changed",
        FileKind::ListFile => "a list of file names",
    }
}

/// Labels and values of what follows from the words; defaults are left out.
fn consequences(invocation: &Invocation, argv: &[OsString]) -> Vec<(&'static str, String)> {
    let mut lines = vec![("standard input", stdin(invocation.stdin).to_owned())];
    let mut add = |label, value: String| {
        if !value.is_empty() {
            lines.push((label, value));
        }
    };
    add("directory", directory(invocation));
    add("output size", format!("{} of the input", invocation.output_weight));
    add("split", split(invocation, argv));
    add("status of parts", status(invocation.status_rule).to_owned());
    add("terminal", terminal(invocation.terminal).to_owned());
    add("tool version", version(invocation.tool_version).to_owned());
    let starts: Vec<&str> =
        invocation.runs.iter().chain(&invocation.helpers).map(String::as_str).collect();
    add("starts", starts.join(", "));
    add("environment", invocation.environment.join(", "));
    add("reads", invocation.client_files.join(", "));
    add("same there", invocation.same_files.join(", "));
    add(
        "depends on",
        invocation
            .shows
            .iter()
            .map(|shown| format!("{shown:?}").to_lowercase())
            .collect::<Vec<_>>()
            .join(", "),
    );
    add("only there if", guards(invocation));
    add("may be re-run", again(invocation).to_owned());
    if invocation.needs_network {
        add("network", "needed".to_owned());
    }
    lines
}

/// Reasons of the invocation's guards, without adjacent duplicates.
fn guards(invocation: &Invocation) -> String {
    let mut reasons: Vec<String> =
        invocation.guards.iter().map(|guard| format!("not: {}", guard.reason)).collect();
    reasons.dedup();
    reasons.join("; ")
}

fn stdin(stdin: StdinUse) -> &'static str {
    match stdin {
        StdinUse::Unused => "not read",
        StdinUse::ReadsAll => "read to its end",
        StdinUse::MayStopEarly => "read, perhaps not to its end",
    }
}

fn directory(invocation: &Invocation) -> String {
    let used = match (&invocation.working_dir, invocation.current_dir) {
        (Some(directory), _) => format!("changes to {}", directory.to_string_lossy()),
        (None, CurrentDir::Unused) => String::new(),
        (None, CurrentDir::Reads) => "the current directory is read".to_owned(),
        (None, CurrentDir::Writes) => "the current directory may be changed".to_owned(),
    };
    match (used.is_empty(), invocation.searches_up.is_empty()) {
        (_, true) => used,
        (true, false) => format!("looks upwards for {}", invocation.searches_up.join(", ")),
        (false, false) => {
            format!("{used}; looks upwards for {}", invocation.searches_up.join(", "))
        }
    }
}

fn split(invocation: &Invocation, argv: &[OsString]) -> String {
    let Some(split) = &invocation.split else { return "not possible".to_owned() };
    let mut text = if split.across_input {
        "across standard input, at line ends".to_owned()
    } else {
        let operands = split.operands.iter().map(|argument| argv[*argument].to_string_lossy());
        format!("across {}", operands.collect::<Vec<_>>().join(" "))
    };
    if !split.add_arguments.is_empty() {
        write!(text, ", each part with {}", words(&split.add_arguments))
            .expect("a string can be written to");
    }
    match &split.aggregator {
        None => text.push_str("; outputs are joined in order"),
        Some(aggregator) => {
            write!(text, "; outputs are joined by {}", joined_by(aggregator))
                .expect("a string can be written to");
        }
    }
    if split.whole_files {
        text.push_str("; only if each is a regular file that can be read");
    }
    text.push_str(match split.behind_merge {
        None => "",
        Some(BehindMerge::Same) => "; behind a merge by itself once more",
        Some(BehindMerge::Counted) => "; behind a merge by its counts",
    });
    text
}

fn joined_by(aggregator: &Aggregator) -> String {
    match aggregator {
        Aggregator::Merge { words: command, .. } => words(command),
        Aggregator::Same => "the command itself once more".to_owned(),
        Aggregator::Sum => "their sum".to_owned(),
        Aggregator::UniqCount => "posh's own uniq_count".to_owned(),
        Aggregator::WcTotal(_) => "posh's own wc_total".to_owned(),
    }
}

fn words(words: &[OsString]) -> String {
    words.iter().map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
}

fn status(rule: StatusRule) -> &'static str {
    match rule {
        StatusRule::Maximum => "the largest",
        StatusRule::Grep => "0 if any is 0 and none above 1, else the largest above 1, else 1",
    }
}

fn terminal(terminal: TerminalUse) -> &'static str {
    match terminal {
        TerminalUse::Plain => "",
        TerminalUse::Output => "its output differs on a terminal",
        TerminalUse::Interactive => "asks on a terminal: runs here when there is one",
    }
}

fn version(version: ToolVersion) -> &'static str {
    match version {
        ToolVersion::Same => "the same version",
        ToolVersion::Compatible => "the same major version",
        ToolVersion::Any => "any",
    }
}

fn again(invocation: &Invocation) -> &'static str {
    match (invocation.side_effects, invocation.idempotent, invocation.deterministic) {
        (_, false, _) => "no: twice is not once",
        (true, true, _) => "yes: writing it twice leaves the same",
        (false, true, true) => "yes: nothing is changed, and the output is the same",
        (false, true, false) => "only from the start: the output may differ",
    }
}
