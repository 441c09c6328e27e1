//! A program as text for bash. Where what was drawn would depend on how fast which
//! process is, something else is written in its place: the rules are at [`Around`]
//! (what may be said where) and at [`Writer::pipeline`].

use std::collections::BTreeSet;
use std::fmt::Write as _;

use super::commands::{CHANGES, FILTERS, LOCALES, PAIRS, Reads, SMALL, SOURCES, UMASKS};
use super::files::NAMES;
use super::{Around as Group, Body, Entry, Errors, File, Input, Join, Lines, Node, Output, Parallel, Program, Side, Stage};

/// A program's text.
#[derive(Debug, Clone)]
pub struct Text {
    /// For `bash -c`; `$D` is the program's directory on the mount, `$L` the one on the workstation.
    pub script: String,
    /// Two processes may complain at the same time, each in several writes, so bytes of stderr have no order.
    pub complains_at_once: bool,
}

/// Where relative names start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// Elsewhere: names are absolute.
    Home,
    /// The program's directory.
    Inside,
    /// A directory in it.
    Below,
}

/// What may be said at one place in a program.
#[derive(Debug, Clone, Copy)]
struct Around {
    place: Place,
    /// No errors and no files written: whoever reads this may stop early, so how far
    /// this comes is chance.
    quiet: bool,
    /// Errors go where the output goes, so only the last stage may complain.
    merged: bool,
    /// Nothing else runs at the same time.
    alone: bool,
    /// Standard input is a pipe which others read after this: it must be read to its end.
    shared_pipe: bool,
    /// There is a descriptor 3.
    third: bool,
}

/// Writes the whole program.
pub fn render(program: &Program) -> Text {
    let settings = &program.settings;
    let mut writer =
        Writer { are_text: program.files.are_text(), pipefail: settings.pipefail, ..Writer::default() };
    let place = if settings.inside { Place::Inside } else { Place::Home };
    let around =
        Around { place, quiet: false, merged: false, alone: true, shared_pipe: false, third: false };
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
    Text { script: writer.text, complains_at_once: writer.at_once }
}

#[derive(Debug, Default)]
struct Writer {
    text: String,
    /// Bodies of here-documents, which follow the next newline.
    pending: String,
    /// Names given so far, of files, functions and here-documents.
    names: usize,
    /// How deep the list is that is being written.
    depth: usize,
    /// Files that are complete.
    written: Vec<String>,
    /// Those of them that the current top-level entry reads or appends to.
    used: BTreeSet<String>,
    /// Those of them that it appends to.
    busy: BTreeSet<String>,
    /// Indices into [`NAMES`] that may not be there any more.
    gone: BTreeSet<usize>,
    /// Places that may complain.
    complaints: usize,
    at_once: bool,
    are_text: bool,
    pipefail: bool,
}

impl Writer {
    fn list(&mut self, list: &[Entry], mut around: Around) {
        self.depth += 1;
        let (mut later, mut waits) = (Vec::new(), false);
        let before = self.complaints;
        for (index, entry) in list.iter().enumerate() {
            if entry.join == Join::Background && !around.quiet && !around.merged {
                let complete = self.written.len();
                self.background(entry, Around { alone: false, shared_pipe: false, third: false, ..around });
                later.extend(self.written.drain(complete..));
                (around.alone, waits) = (false, true);
            } else {
                // A list of && and || would be in the background as a whole.
                let last = list.get(index + 1).is_none_or(|next| next.join == Join::Background);
                self.entry(entry, last, around);
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

    fn entry(&mut self, entry: &Entry, last: bool, around: Around) {
        if entry.negated && matches!(entry.node, Node::Pipeline(_)) {
            self.text += "! ";
        }
        let early = self.node(&entry.node, around);
        match entry.join {
            Join::And if !last && !around.quiet => self.line(" &&"),
            Join::Or if !last && !around.quiet => self.line(" ||"),
            Join::Status if !around.quiet && early => self.line("\necho \"$?\""),
            Join::Status if !around.quiet => self.line("\necho \"${PIPESTATUS[*]}\""),
            _ => self.line(""),
        }
    }

    fn background(&mut self, entry: &Entry, around: Around) {
        let output = self.fresh("out");
        let target = format!(" > {}{output}", prefix(around));
        // bash gives it /dev/null only where nothing is piped into the shell.
        if let Node::Pipeline(stages) = &entry.node {
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

    /// Writes a node without a newline behind it; whether only its last status is no chance.
    fn node(&mut self, node: &Node, around: Around) -> bool {
        match node {
            Node::Pipeline(stages) => return self.pipeline(stages, around, None),
            Node::Change(index, file) => self.change(*index, *file, around),
            Node::For(files, stage) => self.for_loop(files, stage, around),
            Node::Parallel(parallel) => self.parallel(parallel, around),
            Node::While(lines, body) => self.while_loop(lines, body, around),
            Node::If(test, yes, no) => self.branch((test, yes, no), around),
            Node::Substitution(stages) => self.substitution(stages, around),
            Node::Descriptor(file, exec, body) => self.descriptor(*file, *exec, body, around),
            Node::Read => self.text += "read -r x; echo \"<$x>\"",
        }
        true
    }

    /// Writes stages. Behind the last one that may leave its input unread nothing is
    /// chance; before it nothing may be seen but what comes out in the end.
    fn pipeline(&mut self, stages: &[Stage], around: Around, output: Option<&str>) -> bool {
        let stops = (1..stages.len()).rev().find(|k| !self.drains(&stages[*k]));
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

    /// Whether a stage reads the pipe before it to its end.
    fn drains(&self, stage: &Stage) -> bool {
        let writes = matches!(stage.output, Output::Inherited | Output::To | Output::Append | Output::Local | Output::Null);
        writes
            && stage.input == Input::Inherited
            && match &stage.body {
                Body::Filter(index, files) => files.is_empty() && self.reads_all(FILTERS[*index].1),
                Body::Tee(_) => true,
                Body::Pair(..) | Body::Source(_) => false,
                Body::Group(_, list) => match list.first() {
                    Some(Entry { node: Node::Pipeline(stages), join, .. }) => {
                        *join != Join::Background && stages.iter().all(|s| self.drains(s))
                    }
                    _ => false,
                },
            }
    }

    fn reads_all(&self, reads: Reads) -> bool {
        reads == Reads::All || reads == Reads::Text && self.are_text
    }

    fn stage(&mut self, stage: &Stage, piped: bool, around: Around, output: Option<&str>) {
        let compound = self.is_compound(&stage.body);
        let mut made = Vec::new();
        if stage.locale > 0 && !compound {
            let _ = write!(self.text, "LC_ALL={} ", LOCALES[stage.locale]);
        }
        if let Body::Group(kind, list) = &stage.body {
            let shared_pipe = match stage.input {
                Input::Inherited => piped || around.shared_pipe,
                Input::Document(_) | Input::Words => true,
                _ => false,
            };
            let merged = around.merged || stage.errors == Errors::Output;
            let alone = around.alone && stage.input == Input::Inherited;
            let complete = self.written.len();
            self.group(*kind, list, Around { shared_pipe, merged, alone, ..around });
            made.extend(self.written.drain(complete..));
        }
        // After the group: what a here-document contains follows the next newline.
        let input = self.input(stage, piped, around);
        let output = match output {
            Some(target) => target.to_owned(),
            None => self.output(stage.output, around, &mut made),
        };
        let errors = self.errors(stage, compound, around, &mut made);
        let redirects = format!("{input}{output}{errors}");
        match &stage.body {
            Body::Filter(index, files) => self.filter(*index, files, (piped, &redirects), around),
            Body::Pair(index, left, right) => self.pair(*index, left, right, around),
            Body::Source(index) => self.source(*index, &redirects, around),
            Body::Tee(append) => self.tee(*append, around, &mut made),
            Body::Group(..) => {}
        }
        if !compound || matches!(stage.body, Body::Group(..)) {
            self.text += &redirects;
        }
        self.written.extend(made);
    }

    /// It is written as several commands.
    fn is_compound(&self, body: &Body) -> bool {
        match body {
            Body::Filter(index, _) => FILTERS[*index].0.contains(" | "),
            Body::Source(index) => SOURCES[*index].contains(" | "),
            Body::Group(..) => true,
            Body::Pair(..) | Body::Tee(_) => false,
        }
    }

    /// Several commands with redirects need braces; the text of one stays as it is.
    fn compound(&mut self, text: &str, redirects: &str) {
        let compound = text.contains(" | ");
        match compound && !redirects.is_empty() {
            true => self.text += &format!("{{ {text}; }}{redirects}"),
            false => self.text += text,
        }
    }

    fn filter(&mut self, index: usize, files: &[File], (piped, redirects): (bool, &str), around: Around) {
        let (text, reads) = FILTERS[index];
        let from_stdin = files.is_empty();
        let complains = reads == Reads::Checks
            || reads == Reads::Compressed && from_stdin
            || reads == Reads::Text && !self.are_text;
        self.complaints += usize::from(complains);
        let stops = !self.reads_all(reads) && from_stdin && around.shared_pipe;
        let (text, reads) = if around.quiet && complains || stops { FILTERS[0] } else { (text, reads) };
        let operands = self.operands(text, reads, files, around);
        // tr has no operands; others take the second for their output.
        let operands = match text.split(' ').next() {
            Some("tr") if piped || operands.is_empty() || redirects.contains('<') => String::new(),
            Some("tr") => format!(" < {}", operands.trim_start()),
            _ => operands,
        };
        let text = text.replace('@', prefix(around));
        let text = if text.contains('%') { text.replace(" %", &operands) } else { text + &operands };
        self.compound(&text, redirects);
    }

    fn operands(&mut self, text: &str, reads: Reads, files: &[File], around: Around) -> String {
        let single = matches!(text.split(' ').next(), Some("tr" | "uniq" | "base64"));
        let mut files = files.to_vec();
        if single {
            files.truncate(1);
        }
        let mut words = String::new();
        for file in files {
            let compressed = reads == Reads::Compressed;
            let file = match file {
                File::Mount(index, _) if compressed => File::Compressed(index % 2),
                File::Missing | File::Directory if compressed && !around.quiet => file,
                _ if compressed => File::Compressed(0),
                File::Parts if single => File::Mount(0, false),
                file => file,
            };
            let _ = write!(words, " {}", self.word(file, around));
        }
        words
    }

    fn pair(&mut self, index: usize, left: &Side, right: &Side, around: Around) {
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
                    // Two operands, not more.
                    let file = if *file == File::Parts { File::Deep } else { *file };
                    let word = self.word(file, around);
                    self.text += &word;
                }
                // Others read on from there.
                Side::Stdin if around.shared_pipe => self.text += "/dev/null",
                Side::Stdin => self.text += "-",
                Side::Process(stages) => {
                    let inner = Around { quiet: true, alone: false, shared_pipe: false, third: false, ..around };
                    let stages = without_stdin(stages);
                    let text = self.nested(|w| {
                        w.pipeline(&stages, inner, None);
                    });
                    let _ = write!(self.text, "<({text})");
                }
            }
        }
    }

    fn source(&mut self, index: usize, redirects: &str, around: Around) {
        let text = SOURCES[index];
        // xargs tells which signal ended a command.
        let complains = ["missing", "diff", "xargs"].iter().any(|w| text.contains(w));
        self.complaints += usize::from(complains);
        let text = if around.quiet && complains { SOURCES[0] } else { text };
        let text = text.replace('@', prefix(around));
        self.compound(&text, redirects);
    }

    fn tee(&mut self, append: bool, around: Around, made: &mut Vec<String>) {
        if around.quiet {
            self.text += "cat";
            return;
        }
        let name = if append { self.appended() } else { self.fresh("out") };
        let _ = write!(self.text, "tee {}{}{name}", if append { "-a " } else { "" }, prefix(around));
        made.push(name);
    }

    fn group(&mut self, kind: Group, list: &[Entry], around: Around) {
        match kind {
            Group::Braces => self.enclosed("{", "}", list, around),
            Group::Subshell => self.enclosed("(", ")", list, around),
            Group::Directory => {
                let _ = write!(self.text, "( cd {}tree", absolute_or(around));
                self.enclosed("", ")", list, Around { place: Place::Below, ..around });
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

    fn enclosed(&mut self, open: &str, close: &str, list: &[Entry], around: Around) {
        self.line(open);
        self.list(list, around);
        self.text += close;
    }

    fn change(&mut self, index: usize, file: File, around: Around) {
        let File::Mount(number, _) = file else {
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

    fn for_loop(&mut self, files: &[File], stage: &Stage, around: Around) {
        let words: Vec<String> = files.iter().map(|f| self.word(*f, around)).collect();
        let Body::Filter(index, _) = stage.body else { return };
        let (text, reads) = FILTERS[index];
        let complains = reads == Reads::Checks || reads == Reads::Compressed || !self.are_text;
        self.complaints += usize::from(complains);
        let text = if around.quiet && complains { FILTERS[0].0 } else { text };
        let operand = if text.starts_with("tr ") { " < \"$x\"" } else { " \"$x\"" };
        let text = text.replace('@', prefix(around));
        let text = if text.contains('%') { text.replace(" %", operand) } else { text + operand };
        let mut made = Vec::new();
        let output = self.output(stage.output, Around { alone: false, ..around }, &mut made);
        let _ = write!(self.text, "for x in {}; do {{ {text}; }}{output}; done", words.join(" "));
        self.written.extend(made);
    }

    fn parallel(&mut self, parallel: &Parallel, around: Around) {
        let before = self.complaints;
        let by_file = parallel.by_file && !around.quiet;
        self.line("{");
        for (index, file) in &parallel.jobs {
            // Their answers end in a newline and are short only for such files.
            let file = match file {
                File::Written(_) | File::Compressed(_) => File::Mount(0, false),
                file => *file,
            };
            let word = self.word(file, around);
            self.line(&format!("{} {word} &", SMALL[*index]));
        }
        self.line("wait");
        self.at_once |= self.complaints > before;
        if by_file {
            let name = self.fresh("out");
            let path = format!("{}{name}", prefix(around));
            let _ = write!(self.text, "}} > {path}; sort -o {path} {path}; cat {path}");
            self.written.push(name);
        } else {
            self.text += "} | sort";
        }
    }

    fn while_loop(&mut self, lines: &Lines, body: &[Entry], around: Around) {
        let mut inner = Around { alone: false, third: false, ..around };
        let ways = prefix(around);
        match lines {
            Lines::List => inner.shared_pipe = false,
            Lines::Head(file) => {
                let quiet = Around { quiet: true, ..around };
                let word = self.word(*file, quiet);
                let _ = write!(self.text, "head -n 3 {word} | ");
                inner.shared_pipe = true;
            }
        }
        self.line("while read -r x; do");
        self.line("echo \"$x\"");
        if *lines == Lines::List && !around.quiet {
            self.complaints += usize::from(!self.gone.is_empty());
            self.line(&format!("wc -l {ways}\"$x\""));
        }
        self.list(body, inner);
        self.text += "done";
        if *lines == Lines::List {
            let _ = write!(self.text, " < {ways}list");
        }
    }

    fn branch(&mut self, (test, yes, no): (&[Stage], &[Entry], &[Entry]), around: Around) {
        self.text += "if ";
        self.pipeline(test, around, None);
        self.line("; then");
        self.list(yes, around);
        self.line("else");
        self.list(no, around);
        self.text += "fi";
    }

    fn substitution(&mut self, stages: &[Stage], around: Around) {
        // bash complains of NULs.
        self.complaints += usize::from(!self.are_text);
        let text = self.nested(|w| {
            w.pipeline(stages, around, None);
        });
        let _ = write!(self.text, "x=$({text}); echo \"$? ${{#x}} $x\"");
    }

    fn descriptor(&mut self, file: File, exec: bool, body: &[Entry], around: Around) {
        // One file, not more.
        let word = self.word(if file == File::Parts { File::Deep } else { file }, around);
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

    fn input(&mut self, stage: &Stage, piped: bool, around: Around) -> String {
        match &stage.input {
            Input::Inherited => String::new(),
            // One file, not more.
            Input::From(File::Parts) => format!(" < {}", self.word(File::Deep, around)),
            Input::From(file) => format!(" < {}", self.word(*file, around)),
            Input::Null => " < /dev/null".into(),
            Input::Document(lines) => {
                let end = self.fresh("E");
                for line in 0..*lines {
                    let _ = writeln!(self.pending, "needle {} of hay", line * 7 % 5);
                }
                let _ = writeln!(self.pending, "{end}");
                format!(" <<{end}")
            }
            Input::Words => " <<< 'a needle'".into(),
            Input::Third if around.third && !piped => " <&3".into(),
            Input::Third => String::new(),
            // It would make files where there are none.
            Input::Both(file) => match file {
                File::Mount(index, _) if !self.gone.contains(index) => format!(" <> {}", self.word(*file, around)),
                _ => String::new(),
            },
            Input::Closed if around.quiet => String::new(),
            Input::Closed => {
                self.complaints += 1;
                " <&-".into()
            }
        }
    }

    fn output(&mut self, output: Output, around: Around, made: &mut Vec<String>) -> String {
        let on_mount = prefix(around);
        match output {
            Output::Null => return " > /dev/null".into(),
            _ if around.quiet => return String::new(),
            Output::Inherited => {}
            Output::To => {
                made.push(self.fresh("out"));
                return format!(" > {on_mount}{}", made[made.len() - 1]);
            }
            Output::Append => {
                made.push(self.appended());
                return format!(" >> {on_mount}{}", made[made.len() - 1]);
            }
            Output::Local => return format!(" > \"$L\"/{}", self.fresh("out")),
            Output::Errors if around.alone => return " >&2".into(),
            Output::Errors => {}
            Output::Closed => {
                self.complaints += 1;
                return " >&-".into();
            }
        }
        String::new()
    }

    fn errors(&mut self, stage: &Stage, compound: bool, around: Around, made: &mut Vec<String>) -> String {
        let group = matches!(stage.body, Body::Group(..));
        match stage.errors {
            Errors::Null => " 2> /dev/null".into(),
            // Two processes would write into one pipe.
            Errors::Output if compound && !group => String::new(),
            Errors::Output => " 2>&1".into(),
            _ if around.quiet => String::new(),
            Errors::Inherited => String::new(),
            Errors::To if group => String::new(),
            Errors::To => {
                made.push(self.fresh("out"));
                format!(" 2> {}{}", prefix(around), made[made.len() - 1])
            }
            Errors::Closed => " 2>&-".into(),
        }
    }

    /// An operand as a word of the shell.
    fn word(&mut self, file: File, around: Around) -> String {
        let ways = prefix(around);
        match file {
            File::Mount(index, absolute) => {
                if self.gone.contains(&index) {
                    self.complaints += 1;
                    if around.quiet {
                        return format!("{ways}list");
                    }
                }
                named(NAMES[index], if absolute { "\"$D\"/" } else { ways })
            }
            File::Parts => format!("{ways}part-*"),
            File::Written(index) => {
                let complete: Vec<&String> = self.written.iter().filter(|n| !self.busy.contains(*n)).collect();
                if complete.is_empty() || around.quiet {
                    return self.word(File::Mount(index, false), around);
                }
                let name = complete[index % complete.len()].clone();
                // It is not there if what makes it was not reached.
                self.complaints += 1;
                self.used.insert(name.clone());
                format!("{ways}{name}")
            }
            File::Deep => format!("{ways}tree/deep/two.t"),
            File::Link => {
                self.complaints += usize::from(self.gone.contains(&0));
                let name = if around.quiet && self.gone.contains(&0) { "list" } else { "link" };
                format!("{ways}{name}")
            }
            File::Local => "\"$L\"/local".into(),
            File::Compressed(number) => format!("{ways}z{number}.gz"),
            File::Missing | File::Directory if around.quiet => format!("{ways}list"),
            File::Missing => {
                self.complaints += 1;
                format!("{ways}missing")
            }
            File::Directory => {
                self.complaints += 1;
                format!("{ways}tree")
            }
        }
    }

    /// A file that is there already, if one may be written; else a new one.
    fn appended(&mut self) -> String {
        let free = self.written.iter().find(|n| !self.used.contains(*n)).cloned();
        let name = match free {
            Some(name) => name,
            None => self.fresh("out"),
        };
        // Nobody else uses it at the same time.
        self.used.insert(name.clone());
        self.busy.insert(name.clone());
        name
    }

    fn fresh(&mut self, kind: &str) -> String {
        self.names += 1;
        format!("{kind}{}", self.names)
    }

    /// What `write` writes, apart.
    fn nested(&mut self, write: impl FnOnce(&mut Writer)) -> String {
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

/// The same, but the first stage does not read what others read too.
fn without_stdin(stages: &[Stage]) -> Vec<Stage> {
    let mut stages = stages.to_vec();
    if matches!(stages[0].input, Input::Inherited | Input::Third) {
        stages[0].input = Input::Null;
    }
    stages
}

fn prefix(around: Around) -> &'static str {
    match around.place {
        Place::Home => "\"$D\"/",
        Place::Inside => "",
        Place::Below => "../",
    }
}

/// The way to the program's directory from anywhere in it.
fn absolute_or(around: Around) -> &'static str {
    if around.place == Place::Inside { "" } else { "\"$D\"/" }
}

/// A name that no shell and no command takes for something else.
fn named(name: &[u8], ways: &str) -> String {
    let ways = if ways.is_empty() && name[0] == b'-' { "./" } else { ways };
    if name.iter().all(|b| b.is_ascii_alphanumeric() || b".-".contains(b)) {
        return format!("{ways}{}", String::from_utf8_lossy(name));
    }
    let mut word = format!("{ways}$'");
    for byte in name {
        match byte {
            b'a'..=b'z' | b' ' => word.push(char::from(*byte)),
            byte => drop(write!(word, "\\x{byte:02x}")),
        }
    }
    word + "'"
}

fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', "'\\''"))
}
