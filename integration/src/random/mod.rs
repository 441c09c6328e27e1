//! Random shell programs over random files, for the property that posh behaves as bash. The values
//! of this module are generated and shrunk (`grammar`), then rendered as text (`render`) and
//! written as files (`files`); `commands` is the vocabulary. The test runs them.
//!
//! Every program has only one result under bash: processes that run concurrently can't observe each
//! other's progress. `render` keeps that rule.

pub mod commands;
pub mod files;
pub mod grammar;
pub mod render;

use files::Files;

/// A program with its files.
#[derive(Debug, Clone)]
pub struct RandomProgram {
    /// Files of its directory.
    pub files: Files,
    /// Settings of the whole program.
    pub settings: Settings,
    /// Its commands.
    pub body: List,
}

/// Settings of a whole program.
#[derive(Debug, Clone, Default)]
pub struct Settings {
    /// Commands are intercepted by shims on PATH, not by the exec hook.
    pub by_path: bool,
    /// It starts in its directory, not in the home of the user.
    pub inside: bool,
    /// `set -o pipefail`.
    pub pipefail: bool,
    /// `set -e`.
    pub errexit: bool,
    /// Index into [`commands::UMASKS`]; 0 changes nothing.
    pub umask: usize,
    /// Index into [`commands::LOCALES`]; 0 changes nothing.
    pub locale: usize,
}

/// Entries in order.
pub type List = Vec<ListEntry>;

/// A pipeline or compound command, and its connection to the next.
#[derive(Debug, Clone)]
pub struct ListEntry {
    /// The pipeline or compound command.
    pub node: CommandNode,
    /// `!` before it.
    pub negated: bool,
    /// The text after it.
    pub join: Join,
}

/// Text after an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Join {
    /// A new line.
    Then,
    /// `echo $?`, or all of `PIPESTATUS`.
    Status,
    /// `&&`
    And,
    /// `||`
    Or,
    /// `&`, output to a file of its own, and `wait` at the end of the list.
    Background,
}

/// Pipeline or compound command of an entry.
#[derive(Debug, Clone)]
pub enum CommandNode {
    /// One or more stages.
    Pipeline(Vec<Stage>),
    /// A command that changes a file: index into [`commands::CHANGES`], and the file.
    Change(usize, FileOperand),
    /// `for x in ...; do ...; done`
    For(Vec<FileOperand>, Stage),
    /// `for x in ...; do ... & done`, all writing through one descriptor; small answers only.
    Parallel(Parallel),
    /// `while read -r x; do ...; done < list`
    While(LineSource, List),
    /// `if ...; then ...; else ...; fi`
    If(Vec<Stage>, List, List),
    /// `x=$(...)`, then prints status and value.
    Substitution(Vec<Stage>),
    /// `{ ...; } 3< file`, where stages may read from descriptor 3; by `exec` in a subshell if set.
    Descriptor(FileOperand, bool, List),
    /// `read -r x; echo "$x"` from the current standard input.
    Read,
}

/// Commands that run concurrently with one output.
#[derive(Debug, Clone)]
pub struct Parallel {
    /// Each one's index into [`commands::SMALL`] and file.
    pub jobs: Vec<(usize, FileOperand)>,
    /// The output goes to a file that is sorted afterwards, not through a pipe to sort.
    pub by_file: bool,
}

/// Source of the lines of a `while`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LineSource {
    /// A file with names of files.
    List,
    /// The first lines of any file.
    Head(FileOperand),
}

/// One stage of a pipeline.
#[derive(Debug, Clone)]
pub struct Stage {
    /// Its command.
    pub body: Body,
    /// `< ...`
    pub input: InputRedirect,
    /// `> ...`
    pub output: OutputRedirect,
    /// `2> ...`
    pub errors: Errors,
    /// Index into [`commands::LOCALES`], before the command; 0 is none.
    pub locale: usize,
}

/// Command of a stage.
#[derive(Debug, Clone)]
pub enum Body {
    /// Index into [`commands::FILTERS`], and its operands.
    Filter(usize, Vec<FileOperand>),
    /// Index into [`commands::PAIRS`], and its two operands.
    Pair(usize, Side, Side),
    /// Index into [`commands::SOURCES`].
    Source(usize),
    /// `tee`, with `-a` if set.
    Tee(bool),
    /// Several entries as one.
    Group(Around, List),
}

/// An operand of a command that compares two.
#[derive(Debug, Clone)]
pub enum Side {
    /// A file.
    File(FileOperand),
    /// `-`
    Stdin,
    /// `<(...)`
    Process(Vec<Stage>),
}

/// Form in which a list becomes one stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Around {
    /// `{ ...; }`
    Braces,
    /// `( ... )`
    Subshell,
    /// `( cd tree; ... )`
    Directory,
    /// A function that is called.
    Function,
    /// `eval '...'`
    Eval,
    /// `bash -c '...'`
    Bash,
}

/// An operand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileOperand {
    /// One of the files on the mount; by absolute path if set.
    Mount(usize, bool),
    /// All of `part-*`.
    Parts,
    /// A file that an earlier entry has written, if there is one.
    Written(usize),
    /// A file below the directory `tree`.
    Deep,
    /// A symbolic link to a file beside it.
    Link,
    /// A file on the workstation's disk.
    Local,
    /// A compressed file.
    Compressed(usize),
    /// A name that does not exist.
    Missing,
    /// A directory.
    Directory,
}

/// A redirect of standard input.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum InputRedirect {
    /// None.
    Inherited,
    /// `< file`
    From(FileOperand),
    /// `< /dev/null`
    Null,
    /// A here-document with so many lines.
    Document(usize),
    /// `<<< words`
    Words,
    /// `<&3`, if descriptor 3 is open.
    Third,
    /// `<> file`
    Both(FileOperand),
    /// `<&-`
    Closed,
}

/// A redirect of standard output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OutputRedirect {
    /// None.
    Inherited,
    /// `> file`, on the mount.
    To,
    /// `>> file`; an existing file, if possible.
    Append,
    /// `> file`, on the workstation's disk.
    Local,
    /// `> /dev/null`
    Null,
    /// `>&2`
    Errors,
    /// `>&-`
    Closed,
}

/// A redirect of standard error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Errors {
    /// None.
    Inherited,
    /// `2> file`, on the mount.
    To,
    /// `2> /dev/null`
    Null,
    /// `2>&1`
    Output,
    /// `2>&-`
    Closed,
}
