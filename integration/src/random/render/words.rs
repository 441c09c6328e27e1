//! Renders redirects, operands and names.

use std::fmt::Write as _;

use super::super::files::NAMES;
use super::super::{Body, Errors, FileOperand, InputRedirect, OutputRedirect, Stage};
use super::{Around, NameStart, ScriptWriter};

impl ScriptWriter {
    pub(super) fn input(&mut self, stage: &Stage, piped: bool, around: Around) -> String {
        match &stage.input {
            InputRedirect::Inherited => String::new(),
            // One file only.
            InputRedirect::From(FileOperand::Parts) => {
                format!(" < {}", self.word(FileOperand::Deep, around))
            }
            InputRedirect::From(file) => format!(" < {}", self.word(*file, around)),
            InputRedirect::Null => " < /dev/null".into(),
            InputRedirect::Document(lines) => {
                let end = self.fresh("E");
                for line in 0..*lines {
                    let _ = writeln!(self.pending, "needle {} of hay", line * 7 % 5);
                }
                let _ = writeln!(self.pending, "{end}");
                format!(" <<{end}")
            }
            InputRedirect::Words => " <<< 'a needle'".into(),
            InputRedirect::Third if around.third && !piped => " <&3".into(),
            InputRedirect::Third => String::new(),
            // It would create missing files.
            InputRedirect::Both(file) => match file {
                FileOperand::Mount(index, _) if !self.gone.contains(index) => {
                    format!(" <> {}", self.word(*file, around))
                }
                _ => String::new(),
            },
            InputRedirect::Closed if around.quiet => String::new(),
            // The pipe of a `$(...)` inside would get the free number, and its command would read
            // from itself for ever.
            InputRedirect::Closed if matches!(stage.body, Body::Group(..)) => " < /dev/null".into(),
            InputRedirect::Closed => {
                self.complaints += 1;
                " <&-".into()
            }
        }
    }

    pub(super) fn output(
        &mut self,
        output: OutputRedirect,
        around: Around,
        made: &mut Vec<String>,
    ) -> String {
        let on_mount = prefix(around);
        match output {
            OutputRedirect::Null => return " > /dev/null".into(),
            _ if around.quiet => return String::new(),
            OutputRedirect::Inherited => {}
            OutputRedirect::To => {
                made.push(self.fresh("out"));
                return format!(" > {on_mount}{}", made[made.len() - 1]);
            }
            OutputRedirect::Append => {
                made.push(self.appended());
                return format!(" >> {on_mount}{}", made[made.len() - 1]);
            }
            OutputRedirect::Local => return format!(" > \"$L\"/{}", self.fresh("out")),
            OutputRedirect::Errors if around.alone => return " >&2".into(),
            OutputRedirect::Errors => {}
            OutputRedirect::Closed => {
                self.complaints += 1;
                return " >&-".into();
            }
        }
        String::new()
    }

    pub(super) fn errors(
        &mut self,
        stage: &Stage,
        compound: bool,
        around: Around,
        made: &mut Vec<String>,
    ) -> String {
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
    pub(super) fn word(&mut self, file: FileOperand, around: Around) -> String {
        let ways = prefix(around);
        match file {
            FileOperand::Mount(index, absolute) => {
                if self.gone.contains(&index) {
                    self.complaints += 1;
                    if around.quiet {
                        return format!("{ways}list");
                    }
                }
                named(NAMES[index], if absolute { "\"$D\"/" } else { ways })
            }
            FileOperand::Parts => format!("{ways}part-*"),
            FileOperand::Written(index) => {
                let complete: Vec<&String> =
                    self.written.iter().filter(|n| !self.busy.contains(*n)).collect();
                if complete.is_empty() || around.quiet {
                    return self.word(FileOperand::Mount(index, false), around);
                }
                let name = complete[index % complete.len()].clone();
                // It does not exist if its command was not reached.
                self.complaints += 1;
                self.used.insert(name.clone());
                format!("{ways}{name}")
            }
            FileOperand::Deep => format!("{ways}tree/deep/two.t"),
            FileOperand::Link => {
                self.complaints += usize::from(self.gone.contains(&0));
                let name = if around.quiet && self.gone.contains(&0) { "list" } else { "link" };
                format!("{ways}{name}")
            }
            FileOperand::Local => "\"$L\"/local".into(),
            // A command that expects compressed data has other operands; for other commands it is
            // binary.
            FileOperand::Compressed(number) if self.are_text => {
                self.word(FileOperand::Mount(number, false), around)
            }
            FileOperand::Compressed(number) => compressed(number, ways),
            FileOperand::Missing | FileOperand::Directory if around.quiet => format!("{ways}list"),
            FileOperand::Missing => {
                self.complaints += 1;
                format!("{ways}missing")
            }
            FileOperand::Directory => {
                self.complaints += 1;
                format!("{ways}tree")
            }
        }
    }

    /// An existing file, if one may be written; else a new one.
    pub(super) fn appended(&mut self) -> String {
        let free = self.written.iter().find(|n| !self.used.contains(*n)).cloned();
        let name = match free {
            Some(name) => name,
            None => self.fresh("out"),
        };
        // Nothing else uses it at the same time.
        self.used.insert(name.clone());
        self.busy.insert(name.clone());
        name
    }

    pub(super) fn fresh(&mut self, kind: &str) -> String {
        self.names += 1;
        format!("{kind}{}", self.names)
    }
}

pub(super) fn prefix(around: Around) -> &'static str {
    match around.place {
        NameStart::Home => "\"$D\"/",
        NameStart::Inside => "",
        NameStart::Below => "../",
    }
}

/// Prefix that leads to the program's directory from anywhere in it.
pub(super) fn to_directory(around: Around) -> &'static str {
    if around.place == NameStart::Inside { "" } else { "\"$D\"/" }
}

/// The name of a compressed file.
pub(super) fn compressed(number: usize, ways: &str) -> String {
    format!("{ways}z{number}.gz")
}

/// A name quoted so that no shell or command misreads it.
pub(super) fn named(name: &[u8], ways: &str) -> String {
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

pub(super) fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', "'\\''"))
}
