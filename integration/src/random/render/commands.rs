//! Renders commands and their operands.

use std::fmt::Write as _;

use super::super::commands::{CHANGES, FILTERS, PAIRS, SMALL, SOURCES, StdinUse};
use super::super::files::COMPRESSED;
use super::super::{Body, FileOperand, Parallel, Side, Stage};
use super::words::{compressed, prefix};
use super::{Around, ScriptWriter, without_stdin};

impl ScriptWriter {
    /// Returns true if it is rendered as several commands.
    pub(super) fn is_compound(&self, body: &Body) -> bool {
        match body {
            Body::Filter(index, _) => FILTERS[*index].0.contains(" | "),
            Body::Source(index) => SOURCES[*index].contains(" | "),
            Body::Group(..) => true,
            Body::Pair(..) | Body::Tee(_) => false,
        }
    }

    /// Adds redirects to a text: several commands need braces for that.
    pub(super) fn compound(&mut self, text: &str, redirects: &str) {
        let compound = text.contains(" | ");
        match compound && !redirects.is_empty() {
            true => self.text += &format!("{{ {text}; }}{redirects}"),
            false => self.text += &format!("{text}{redirects}"),
        }
    }

    pub(super) fn filter(
        &mut self,
        index: usize,
        files: &[FileOperand],
        piped: bool,
        redirects: &str,
        around: Around,
    ) {
        let (text, reads) = FILTERS[index];
        let before = self.complaints;
        let from_stdin = files.is_empty();
        let complains = reads == StdinUse::Checks
            || reads == StdinUse::Compressed && from_stdin
            || reads != StdinUse::All && !self.are_text;
        self.complaints += usize::from(complains);
        let stops = !self.reads_all(reads) && from_stdin && around.shared_pipe;
        let binary = self.are_text && text.starts_with("gzip -n9");
        let (text, reads) =
            if around.quiet && complains || stops || binary { FILTERS[0] } else { (text, reads) };
        let operands = self.operands(text, reads, files, around);
        // tr has no operands; other filters take a second operand for their output.
        let operands = match text.split(' ').next() {
            Some("tr") if piped || operands.is_empty() || redirects.contains('<') => String::new(),
            Some("tr") => format!(" < {}", operands.trim_start()),
            _ => operands,
        };
        let text = text.replace('@', prefix(around));
        // In a pipe, grep's boundary between text and binary data depends on the size of its reads.
        let text = match text.split_once(' ') {
            Some((grep, rest)) if from_stdin && !self.are_text && grep.ends_with("grep") => {
                format!("{grep} -a {rest}")
            }
            _ => text,
        };
        let text =
            if text.contains('%') { text.replace(" %", &operands) } else { text + &operands };
        let text = only_the_last_complains(text, around);
        self.at_once |= text.contains(" | ") && self.complaints > before;
        self.compound(&text, redirects);
    }

    pub(super) fn operands(
        &mut self,
        text: &str,
        reads: StdinUse,
        files: &[FileOperand],
        around: Around,
    ) -> String {
        let single = matches!(text.split(' ').next(), Some("tr" | "uniq" | "base64"));
        let mut files = files.to_vec();
        if single {
            files.truncate(1);
        }
        let mut words = String::new();
        for file in files {
            let word = match file {
                FileOperand::Missing | FileOperand::Directory if !around.quiet => {
                    self.word(file, around)
                }
                FileOperand::Mount(index, _) | FileOperand::Compressed(index)
                    if reads == StdinUse::Compressed =>
                {
                    compressed(index % COMPRESSED, prefix(around))
                }
                _ if reads == StdinUse::Compressed => compressed(0, prefix(around)),
                FileOperand::Parts if single => self.word(FileOperand::Mount(0, false), around),
                file => self.word(file, around),
            };
            let _ = write!(words, " {word}");
        }
        words
    }

    pub(super) fn pair(&mut self, index: usize, left: &Side, right: &Side, around: Around) {
        if around.quiet {
            let _ = write!(self.text, "cat {}list", prefix(around));
            return;
        }
        self.complaints += 1;
        self.text += PAIRS[index];
        for side in [left, right] {
            self.text += " ";
            match side {
                Side::File(file) => {
                    // Exactly two operands.
                    let file = if *file == FileOperand::Parts { FileOperand::Deep } else { *file };
                    let word = self.word(file, around);
                    self.text += &word;
                }
                // Later commands continue to read from it.
                Side::Stdin if around.shared_pipe => self.text += "/dev/null",
                Side::Stdin => self.text += "-",
                Side::Process(stages) => {
                    let inner = Around {
                        quiet: true,
                        alone: false,
                        shared_pipe: false,
                        third: false,
                        ..around
                    };
                    let stages = without_stdin(stages);
                    let text = self.nested(|w| {
                        w.pipeline(&stages, inner, None);
                    });
                    let _ = write!(self.text, "<( {text})");
                }
            }
        }
    }

    pub(super) fn source(&mut self, index: usize, redirects: &str, around: Around) {
        let text = SOURCES[index];
        // xargs reports the signal that ended a command; sshfs does not let tar read every link.
        let complains = ["missing", "diff", "xargs", "tar"].iter().any(|w| text.contains(w))
            || text.contains("grep") && !self.are_text;
        self.complaints += usize::from(complains);
        let text = if around.quiet && complains { SOURCES[0] } else { text };
        let text = text.replace('@', prefix(around));
        self.compound(&text, redirects);
    }

    pub(super) fn tee(&mut self, append: bool, around: Around, made: &mut Vec<String>) {
        if around.quiet {
            self.text += "cat";
            return;
        }
        let name = if append { self.appended() } else { self.fresh("out") };
        let _ =
            write!(self.text, "tee {}{}{name}", if append { "-a " } else { "" }, prefix(around));
        made.push(name);
    }

    pub(super) fn change(&mut self, index: usize, file: FileOperand, around: Around) {
        let FileOperand::Mount(number, _) = file else {
            self.text += "true";
            return;
        };
        let word = self.word(file, around);
        if around.quiet || !around.alone {
            let _ = write!(self.text, "cat {word}");
            return;
        }
        self.complaints += 1;
        self.gone.insert(number);
        self.text += &CHANGES[index].replace('%', &word).replace('@', prefix(around));
    }

    pub(super) fn for_loop(&mut self, files: &[FileOperand], stage: &Stage, around: Around) {
        let before = self.complaints;
        let words: Vec<String> = files.iter().map(|f| self.word(*f, around)).collect();
        let Body::Filter(index, _) = stage.body else { return };
        let (text, reads) = FILTERS[index];
        let complains = matches!(reads, StdinUse::Checks | StdinUse::Compressed) || !self.are_text;
        self.complaints += usize::from(complains);
        let binary = self.are_text && text.starts_with("gzip -n9");
        let text = if around.quiet && complains || binary { FILTERS[0].0 } else { text };
        let operand = if text.starts_with("tr ") { " < \"$x\"" } else { " \"$x\"" };
        let text = text.replace('@', prefix(around));
        let text = if text.contains('%') { text.replace(" %", operand) } else { text + operand };
        let text = only_the_last_complains(text, around);
        self.at_once |= text.contains(" | ") && self.complaints > before;
        let mut made = Vec::new();
        let output = self.output(stage.output, Around { alone: false, ..around }, &mut made);
        let _ = write!(self.text, "for x in {}; do {{ {text}; }}{output}; done", words.join(" "));
        self.written.extend(made);
    }

    pub(super) fn parallel(&mut self, parallel: &Parallel, around: Around) {
        let before = self.complaints;
        let by_file = parallel.by_file && !around.quiet;
        self.line(if by_file { "{ {" } else { "{" });
        for (index, file) in &parallel.jobs {
            // Their output ends in a newline and is short only for such files.
            let file = match file {
                FileOperand::Written(_) | FileOperand::Compressed(_) => {
                    FileOperand::Mount(0, false)
                }
                file => *file,
            };
            let word = self.word(file, around);
            let command = if around.quiet && !self.are_text { "wc -l" } else { SMALL[*index] };
            // When errors go to the output, several that print errors concurrently have no order.
            let errors = if around.merged { " 2> /dev/null" } else { "" };
            self.line(&format!("{command} {word}{errors} &"));
        }
        self.line("wait");
        self.at_once |= self.complaints > before;
        if by_file {
            let name = self.fresh("out");
            let path = format!("{}{name}", prefix(around));
            let _ = write!(self.text, "}} > {path}; sort -o {path} {path}; cat {path}; }}");
            self.written.push(name);
        } else {
            self.text += "} | sort";
        }
    }
}

/// Lets only the last of several commands in a pipe print errors, if these go to the output: of
/// two, the order would be random.
fn only_the_last_complains(text: String, around: Around) -> String {
    if around.merged { text.replace(" | ", " 2> /dev/null | ") } else { text }
}
