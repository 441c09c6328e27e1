//! Renders a program as text for bash. A part whose result would depend on the speed of processes
//! is replaced: the rules are at `Around` (restrictions of a place) and at
//! `ScriptWriter::pipeline`.

mod commands;
mod words;

use std::collections::BTreeSet;
use std::fmt::Write as _;

use self::words::{prefix, quoted, to_directory};
use super::commands::{FILTERS, LOCALES, StdinUse, UMASKS};
use super::{
    Around as Group, Body, CommandNode, Errors, FileOperand, InputRedirect, Join, LineSource,
    ListEntry, OutputRedirect, RandomProgram, Stage,
};

/// A program's text.
#[derive(Debug, Clone)]
pub struct RenderedProgram {
    /// For `bash -c`; `$D` is the program's directory on the mount, `$L` the one on the
    /// workstation.
    pub script: String,
    /// Two processes may print errors at the same time, each in several writes, so that the bytes
    /// of stderr have no order.
    pub complains_at_once: bool,
}

/// Start of relative names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum NameStart {
    /// Any other directory: names are absolute.
    Home,
    /// The program's directory.
    Inside,
    /// A directory below the program's.
    Below,
}

/// Restrictions at a place in a program.
#[derive(Debug, Clone, Copy)]
struct Around {
    place: NameStart,
    /// No errors and no written files: the reader of this output may stop early, so that its
    /// progress is random.
    quiet: bool,
    /// Errors go to the output, so only the last stage may print any.
    merged: bool,
    /// No other process runs at the same time.
    alone: bool,
    /// Standard input is a pipe that later commands read too: it must be read to its end.
    shared_pipe: bool,
    /// Descriptor 3 is open.
    third: bool,
}

/// Writes the whole program.
pub fn render(program: &RandomProgram) -> RenderedProgram {
    let settings = &program.settings;
    let mut writer = ScriptWriter {
        are_text: program.files.are_text(),
        pipefail: settings.pipefail,
        errexit: settings.errexit,
        ..ScriptWriter::default()
    };
    let place = if settings.inside { NameStart::Inside } else { NameStart::Home };
    let around = Around {
        place,
        quiet: false,
        merged: false,
        alone: true,
        shared_pipe: false,
        third: false,
    };
    if settings.umask > 0 {
        let _ = writeln!(writer.text, "umask {}", UMASKS[settings.umask]);
    }
    if settings.locale > 0 {
        let _ = writeln!(writer.text, "export LC_ALL={}", LOCALES[settings.locale]);
    }
    if settings.errexit {
        writer.text += "set -e\n";
    }
    if settings.pipefail {
        writer.text += "set -o pipefail\n";
    }
    writer.list(&program.body, around);
    RenderedProgram { script: writer.text, complains_at_once: writer.at_once }
}

#[derive(Debug, Default)]
struct ScriptWriter {
    text: String,
    /// Bodies of here-documents for the next newline.
    pending: String,
    /// Number of names given so far, to files, functions and here-documents.
    names: usize,
    /// Depth of the current list.
    depth: usize,
    /// Files that are complete.
    written: Vec<String>,
    /// Those of them that the current top-level entry reads or appends to.
    used: BTreeSet<String>,
    /// Files of `used` that it appends to.
    busy: BTreeSet<String>,
    /// Indices into [`NAMES`] of files that may not exist any more.
    gone: BTreeSet<usize>,
    /// Number of places that may print errors.
    complaints: usize,
    at_once: bool,
    are_text: bool,
    pipefail: bool,
    errexit: bool,
}

impl ScriptWriter {
    fn list(&mut self, list: &[ListEntry], mut around: Around) {
        self.depth += 1;
        let (mut later, mut waits) = (Vec::new(), false);
        let before = self.complaints;
        for (index, entry) in list.iter().enumerate() {
            // A shell that ends at the first error does not wait for it.
            let background = !around.quiet && !around.merged && !self.errexit;
            if entry.join == Join::Background && background {
                let complete = self.written.len();
                self.background(
                    entry,
                    Around { alone: false, shared_pipe: false, third: false, ..around },
                );
                later.extend(self.written.drain(complete..));
                (around.alone, waits) = (false, true);
            } else {
                // `&` would put a whole list of && and || into the background.
                let last = list.get(index + 1).is_none_or(|next| next.join == Join::Background);
                let chained = index > 0 && matches!(list[index - 1].join, Join::And | Join::Or);
                self.entry(entry, last, chained, around);
            }
            if self.depth == 1 && !waits {
                self.used.clear();
                self.busy.clear();
            }
        }
        if waits {
            self.line("wait");
            self.at_once |= self.complaints > before;
        }
        self.written.extend(later);
        self.depth -= 1;
    }

    fn entry(&mut self, entry: &ListEntry, last: bool, chained: bool, around: Around) {
        if entry.negated && matches!(entry.node, CommandNode::Pipeline(_)) {
            self.text += "! ";
        }
        let early = self.node(&entry.node, around);
        match entry.join {
            Join::And if !last && !around.quiet => self.line(" &&"),
            Join::Or if !last && !around.quiet => self.line(" ||"),
            // In a chain, another pipeline may have run last.
            Join::Status if !around.quiet && (early || chained) => self.line("\necho \"$?\""),
            Join::Status if !around.quiet => self.line("\necho \"${PIPESTATUS[*]}\""),
            _ => self.line(""),
        }
    }

    fn background(&mut self, entry: &ListEntry, around: Around) {
        let output = self.fresh("out");
        let target = format!(" > {}{output}", prefix(around));
        // bash gives a background command /dev/null only if the shell's input is no pipe.
        if let CommandNode::Pipeline(stages) = &entry.node {
            self.pipeline(&without_stdin(stages), around, Some(&target));
        } else {
            self.line("{");
            self.node(&entry.node, around);
            self.line("");
            let _ = write!(self.text, "}} < /dev/null{target}");
        }
        self.line(" &");
        self.written.push(output);
    }

    /// Writes a node without a newline after it; returns true if only its last status is
    /// deterministic.
    fn node(&mut self, node: &CommandNode, around: Around) -> bool {
        match node {
            CommandNode::Pipeline(stages) => return self.pipeline(stages, around, None),
            CommandNode::Change(index, file) => self.change(*index, *file, around),
            CommandNode::For(files, stage) => self.for_loop(files, stage, around),
            CommandNode::Parallel(parallel) => self.parallel(parallel, around),
            CommandNode::While(lines, body) => self.while_loop(lines, body, around),
            CommandNode::If(test, yes, no) => self.branch(test, yes, no, around),
            CommandNode::Substitution(stages) => self.substitution(stages, around),
            CommandNode::Descriptor(file, exec, body) => {
                self.descriptor(*file, *exec, body, around)
            }
            CommandNode::Read => self.text += "read -r x; echo \"<$x>\"",
        }
        true
    }

    /// Writes stages. After the last one that may leave its input unread, everything is
    /// deterministic; before it only the final output may be visible.
    fn pipeline(&mut self, stages: &[Stage], around: Around, output: Option<&str>) -> bool {
        let stops = (1..stages.len()).rev().find(|k| !self.drains(&stages[*k]));
        // How much is read before that stage is random, and later commands may continue to read.
        let unread = stops.map(|_| without_stdin(stages));
        let stages = unread.as_deref().unwrap_or(stages);
        let alone = self.pipefail && stops.is_some();
        if alone {
            self.line("( set +o pipefail");
        }
        let mut hidden = Vec::new();
        let mut complaining = 0;
        for (index, stage) in stages.iter().enumerate() {
            let (complete, before) = (self.written.len(), self.complaints);
            let (first, last) = (index == 0, index + 1 == stages.len());
            let inner = Around {
                quiet: around.quiet || stops.is_some_and(|k| index < k) || (around.merged && !last),
                alone: around.alone && stages.len() == 1,
                shared_pipe: around.shared_pipe && first,
                third: around.third && first,
                ..around
            };
            if !first {
                self.text += " | ";
            }
            self.stage(stage, !first, inner, output.filter(|_| last));
            hidden.extend(self.written.drain(complete..));
            complaining += usize::from(self.complaints > before);
        }
        self.at_once |= complaining > 1;
        self.written.extend(hidden);
        if alone {
            self.line("");
            self.text += ")";
        }
        stops.is_some() || stages.iter().any(|s| matches!(s.body, Body::Group(..)))
    }

    /// Returns true if a stage reads the pipe before it to its end.
    fn drains(&self, stage: &Stage) -> bool {
        let writes = matches!(
            stage.output,
            OutputRedirect::Inherited
                | OutputRedirect::To
                | OutputRedirect::Append
                | OutputRedirect::Local
                | OutputRedirect::Null
        );
        writes
            && stage.input == InputRedirect::Inherited
            && match &stage.body {
                Body::Filter(index, files) => files.is_empty() && self.reads_all(FILTERS[*index].1),
                Body::Tee(_) => true,
                Body::Pair(..) | Body::Source(_) => false,
                Body::Group(_, list) => match list.first() {
                    Some(ListEntry { node: CommandNode::Pipeline(stages), join, .. }) => {
                        *join != Join::Background && stages.iter().all(|s| self.drains(s))
                    }
                    _ => false,
                },
            }
    }

    fn reads_all(&self, reads: StdinUse) -> bool {
        reads == StdinUse::All || reads == StdinUse::Text && self.are_text
    }

    fn stage(&mut self, stage: &Stage, piped: bool, around: Around, output: Option<&str>) {
        let compound = self.is_compound(&stage.body);
        let mut made = Vec::new();
        if stage.locale > 0 && !compound {
            let _ = write!(self.text, "LC_ALL={} ", LOCALES[stage.locale]);
        }
        if let Body::Group(kind, list) = &stage.body {
            let shared_pipe = match stage.input {
                InputRedirect::Inherited => piped || around.shared_pipe,
                InputRedirect::Document(_) | InputRedirect::Words => true,
                _ => false,
            };
            let merged = around.merged || stage.errors == Errors::Output;
            let alone = around.alone && stage.input == InputRedirect::Inherited;
            let complete = self.written.len();
            self.group(*kind, list, Around { shared_pipe, merged, alone, ..around });
            made.extend(self.written.drain(complete..));
        }
        // After the group: a here-document's body follows the next newline.
        let input = self.input(stage, piped, around);
        let output = match output {
            Some(target) => target.to_owned(),
            None => self.output(stage.output, around, &mut made),
        };
        let errors = self.errors(stage, compound, around, &mut made);
        let redirects = format!("{input}{output}{errors}");
        match &stage.body {
            Body::Filter(index, files) => self.filter(*index, files, piped, &redirects, around),
            Body::Pair(index, left, right) => self.pair(*index, left, right, around),
            Body::Source(index) => self.source(*index, &redirects, around),
            Body::Tee(append) => self.tee(*append, around, &mut made),
            Body::Group(..) => {}
        }
        if !matches!(stage.body, Body::Filter(..) | Body::Source(_)) {
            self.text += &redirects;
        }
        self.written.extend(made);
    }

    fn group(&mut self, kind: Group, list: &[ListEntry], around: Around) {
        match kind {
            Group::Braces => self.enclosed("{", "}", list, around),
            Group::Subshell => self.enclosed("(", ")", list, around),
            Group::Directory => {
                let _ = write!(self.text, "( cd {}tree", to_directory(around));
                self.enclosed("", ")", list, Around { place: NameStart::Below, ..around });
            }
            Group::Function => {
                let name = self.fresh("f");
                let _ = write!(self.text, "{{ {name}() ");
                self.enclosed("{", "}", list, around);
                let _ = write!(self.text, "; {name}; }}");
            }
            Group::Eval | Group::Bash => {
                let text = self.nested(|w| w.list(list, around));
                let command = if kind == Group::Eval { "eval" } else { "bash -c" };
                let _ = write!(self.text, "{command} {}", quoted(&text));
            }
        }
    }

    fn enclosed(&mut self, open: &str, close: &str, list: &[ListEntry], around: Around) {
        self.line(open);
        self.list(list, around);
        self.text += close;
    }

    fn while_loop(&mut self, lines: &LineSource, body: &[ListEntry], around: Around) {
        let mut inner = Around { alone: false, third: false, ..around };
        let ways = prefix(around);
        match lines {
            LineSource::List => inner.shared_pipe = false,
            LineSource::Head(file) => {
                let quiet = Around { quiet: true, ..around };
                let word = self.word(*file, quiet);
                let _ = write!(self.text, "head -n 3 {word} | ");
                inner.shared_pipe = true;
            }
        }
        self.line("while read -r x; do");
        self.line("echo \"$x\"");
        if *lines == LineSource::List && !around.quiet {
            self.complaints += usize::from(!self.gone.is_empty());
            self.line(&format!("wc -l {ways}\"$x\""));
        }
        self.list(body, inner);
        self.text += "done";
        if *lines == LineSource::List {
            let _ = write!(self.text, " < {ways}list");
        }
    }

    fn branch(&mut self, test: &[Stage], yes: &[ListEntry], no: &[ListEntry], around: Around) {
        self.text += "if ";
        self.pipeline(test, around, None);
        self.line("; then");
        self.list(yes, around);
        self.line("else");
        self.list(no, around);
        self.text += "fi";
    }

    fn substitution(&mut self, stages: &[Stage], around: Around) {
        // bash warns about NULs.
        self.complaints += usize::from(!self.are_text);
        self.at_once |= !self.are_text;
        let text = self.nested(|w| {
            w.pipeline(stages, around, None);
        });
        // Two parentheses would be an arithmetic expansion.
        let _ = write!(self.text, "x=$( {text}); echo \"$? ${{#x}} $x\"");
    }

    fn descriptor(&mut self, file: FileOperand, exec: bool, body: &[ListEntry], around: Around) {
        // One file only.
        let word =
            self.word(if file == FileOperand::Parts { FileOperand::Deep } else { file }, around);
        let inner = Around { third: true, alone: false, ..around };
        if exec {
            self.line(&format!("( exec 3< {word}"));
            self.list(body, inner);
            self.text += ")";
        } else {
            self.enclosed("{", "}", body, inner);
            let _ = write!(self.text, " 3< {word}");
        }
    }

    /// Text written by `write`, apart from the program's.
    fn nested(&mut self, write: impl FnOnce(&mut ScriptWriter)) -> String {
        let outer = (std::mem::take(&mut self.text), std::mem::take(&mut self.pending));
        write(self);
        if !self.pending.is_empty() {
            self.line("");
        }
        let inner = std::mem::replace(&mut self.text, outer.0);
        self.pending = outer.1;
        inner
    }

    fn line(&mut self, text: &str) {
        for (index, line) in text.split('\n').enumerate() {
            if index > 0 {
                self.newline();
            }
            self.text += line;
        }
        self.newline();
    }

    fn newline(&mut self) {
        self.text.push('\n');
        self.text += &std::mem::take(&mut self.pending);
    }
}

/// Replaces the first stage's shared input by /dev/null.
fn without_stdin(stages: &[Stage]) -> Vec<Stage> {
    let mut stages = stages.to_vec();
    if matches!(stages[0].input, InputRedirect::Inherited | InputRedirect::Third) {
        stages[0].input = InputRedirect::Null;
    }
    stages
}
