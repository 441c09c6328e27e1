//! Random shell programs over random files, for the property that posh is bash. The
//! values here are what is generated and shrunk (`grammar`), written out as text
//! (`render`) and as files (`files`); `commands` is the vocabulary. Running them is
//! the matter of the test.
//!
//! Every program has one result under bash alone: where two processes run at the
//! same time, neither can see how far the other has come. `render` keeps that rule.

pub mod commands;
pub mod files;
pub mod grammar;
pub mod render;

use files::Files;

/// A program with its files.
#[derive(Debug, Clone)]
pub struct Program {
    /// What its directory contains.
    pub files: Files,
    /// What holds for all of it.
    pub settings: Settings,
    /// What it does.
    pub body: List,
}

/// What holds for a whole program.
#[derive(Debug, Clone, Default)]
pub struct Settings {
    /// posh comes to its commands by PATH, not by the exec hook.
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
pub type List = Vec<Entry>;

/// One pipeline or compound with how it is joined to the next.
#[derive(Debug, Clone)]
pub struct Entry {
    /// What runs.
    pub node: Node,
    /// `!` before it.
    pub negated: bool,
    /// What stands behind it.
    pub join: Join,
}

/// What stands behind an entry.
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

/// What an entry runs.
#[derive(Debug, Clone)]
pub enum Node {
    /// One or more stages.
    Pipeline(Vec<Stage>),
    /// A command that changes a file: index into [`commands::CHANGES`], and the file.
    Change(usize, File),
    /// `for x in ...; do ...; done`
    For(Vec<File>, Stage),
    /// `for x in ...; do ... & done`, all writing through one descriptor; small answers only.
    Parallel(Parallel),
    /// `while read -r x; do ...; done < list`
    While(Lines, List),
    /// `if ...; then ...; else ...; fi`
    If(Vec<Stage>, List, List),
    /// `x=$(...)`, and what became of it.
    Substitution(Vec<Stage>),
    /// `{ ...; } 3< file`, where stages may read from descriptor 3; by `exec` in a subshell if set.
    Descriptor(File, bool, List),
    /// `read -r x; echo "$x"` on what is standard input there.
    Read,
}

/// Commands at once with one output.
#[derive(Debug, Clone)]
pub struct Parallel {
    /// Each one's index into [`commands::SMALL`] and file.
    pub jobs: Vec<(usize, File)>,
    /// Through a file that is sorted afterwards, not through a pipe to sort.
    pub by_file: bool,
}

/// Where the lines of a `while` come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Lines {
    /// A file with names of files.
    List,
    /// Any file, as far as its first lines go.
    Head(File),
}

/// One stage of a pipeline.
#[derive(Debug, Clone)]
pub struct Stage {
    /// What runs.
    pub body: Body,
    /// `< ...`
    pub input: Input,
    /// `> ...`
    pub output: Output,
    /// `2> ...`
    pub errors: Errors,
    /// Index into [`commands::LOCALES`], before the command; 0 is none.
    pub locale: usize,
}

/// What a stage runs.
#[derive(Debug, Clone)]
pub enum Body {
    /// Index into [`commands::FILTERS`], and its operands.
    Filter(usize, Vec<File>),
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
    File(File),
    /// `-`
    Stdin,
    /// `<(...)`
    Process(Vec<Stage>),
}

/// What makes one stage of a list.
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
pub enum File {
    /// One of the files on the mount; by absolute path if set.
    Mount(usize, bool),
    /// All of `part-*`.
    Parts,
    /// A file that an earlier entry wrote, if there is one.
    Written(usize),
    /// A file below the directory `tree`.
    Deep,
    /// A symbolic link to a file beside it.
    Link,
    /// A file on this machine.
    Local,
    /// A compressed file.
    Compressed(usize),
    /// A name that is not there.
    Missing,
    /// A directory.
    Directory,
}

/// A redirect of standard input.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Input {
    /// None.
    Inherited,
    /// `< file`
    From(File),
    /// `< /dev/null`
    Null,
    /// A here-document with so many lines.
    Document(usize),
    /// `<<< words`
    Words,
    /// `<&3`, where there is one.
    Third,
    /// `<> file`
    Both(File),
    /// `<&-`
    Closed,
}

/// A redirect of standard output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Output {
    /// None.
    Inherited,
    /// `> file`, on the mount.
    To,
    /// `>> file`; a file that is there, if possible.
    Append,
    /// `> file`, on this machine.
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
