//! A checked annotation as data: made from YAML by [`crate::compile`], used by [`crate::words`] and
//! [`crate::classify`] to read invocations.

use std::sync::OnceLock;

use regex::bytes::Regex;

use crate::invocation::{
    Because, BehindMerge, CurrentDir, FileAttribute, FileKind, Guard, LineEnds, StatusRule,
    TerminalUse, ToolVersion,
};

/// One command of an annotation file, ready to read invocations.
#[derive(Debug)]
pub struct Command {
    pub body: Body,
    /// Flags left out deliberately.
    pub omissions: Vec<Omission>,
    /// The words that print the list of flags; `None`: `NAME --help`.
    pub help: Option<Vec<String>>,
}

#[derive(Debug)]
pub enum Body {
    /// Tried in order.
    Annotations(Vec<Annotation>),
    /// Options before the subcommand's name, and keywords that apply to every subcommand.
    Subcommands(Box<Annotation>),
}

/// Flags of the tool that the annotation does not list, and why.
#[derive(Debug)]
pub struct Omission {
    pub flags: Vec<String>,
    pub reason: String,
}

/// One way to use a command.
#[derive(Debug, Default)]
pub struct Annotation {
    pub when: Condition,
    pub options: Vec<Opt>,
    pub params: Vec<Param>,
    pub style: Style,
    pub needs_current_dir: Cases<CurrentDir>,
    pub splittable_across_input: Condition,
    pub output_weight: Cases<f64>,
    pub reads_stdin: Condition,
    pub stops_early: Condition,
    pub when_split: Vec<Conditional<Vec<String>>>,
    pub when_remote: Vec<Conditional<Vec<String>>>,
    pub aggregator: Cases<Joiner>,
    pub behind_merge: Cases<BehindMerge>,
    pub whole_files: Condition,
    pub status: Cases<StatusRule>,
    pub line_ends: Cases<LineEnds>,
    pub terminal: Cases<TerminalUse>,
    pub environment: Vec<String>,
    pub client_files: Vec<String>,
    pub same_files: Vec<String>,
    pub runs: Vec<Conditional<String>>,
    pub helpers: Vec<Conditional<String>>,
    pub tool_version: Cases<ToolVersion>,
    pub deterministic: Option<Condition>,
    pub side_effects: Option<Condition>,
    pub idempotent: Option<Condition>,
    pub needs_network: Condition,
    pub shows: Vec<Conditional<FileAttribute>>,
    pub searches_up: Vec<String>,
    pub changes_only: Vec<Conditional<String>>,
    pub only_grows: Vec<String>,
    pub own_directories: Vec<String>,
    pub replaces_files: Option<Condition>,
    pub guards: Vec<Conditional<Guard>>,
    pub stays_here: Vec<Conditional<Reason>>,
    /// Long names under `not_annotated`: they can make an abbreviation ambiguous.
    pub known_long: Vec<String>,
}

/// How the command's words are written.
#[derive(Debug, Default, Clone, Copy)]
pub struct Style {
    pub long_arg_single_dash: bool,
    pub no_abbreviations: bool,
    pub options_first: bool,
    pub ignores_posixly_correct: bool,
    pub old_style: bool,
    /// Operands are followed by expression words (`find`).
    pub expression: bool,
}

/// An option, with or without a value, or a word of an expression.
#[derive(Debug)]
pub struct Opt {
    pub short: Vec<u8>,
    pub long: Vec<String>,
    pub words: Vec<String>,
    pub in_expression: bool,
    pub size: Arity,
    pub numeric: Option<Numeric>,
    pub value: ValueRule,
    pub changes_dir: Option<ChangesDir>,
    pub stays_here: Option<Reason>,
}

/// Reason why an invocation runs locally.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reason {
    pub text: String,
    pub because: Because,
}

/// One entry of PARAMS.
#[derive(Debug)]
pub struct Param {
    pub name: Option<String>,
    pub exists: Condition,
    pub size: Arity,
    pub at_least: usize,
    pub value: ValueRule,
    pub splittable: Condition,
    pub or_stdin: Condition,
    pub or_current_dir: Condition,
    pub after_dashes: bool,
}

/// Type and form of the words given for an option or operand.
#[derive(Debug)]
pub struct ValueRule {
    /// One per word; the last one holds for all further words.
    pub types: Vec<Cases<ValueType>>,
    pub separator: Option<String>,
    /// Other values are not understood. Empty: any.
    pub allowed: Vec<String>,
    pub dash: Option<Dash>,
    pub no_follow: Condition,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ValueType {
    #[default]
    Text,
    File(FileKind),
}

/// Meaning of the value `-`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dash {
    File,
    Stdin,
    Stdout,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Arity {
    /// A flag.
    Nothing,
    One,
    Optional,
    Exactly(usize),
    List,
    /// Up to and including one of these words.
    Until(Vec<String>),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Numeric {
    First,
    Anywhere,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChangesDir {
    Operands,
    Everything,
}

/// How the outputs of parts become one.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Joiner {
    #[default]
    Concatenation,
    Merge {
        words: Vec<String>,
        keep: KeptOptions,
        /// Options with which equal lines are dropped.
        drops: Vec<usize>,
    },
    Same,
    Sum,
    UniqCount,
    WcTotal,
}

/// Which options of the invocation the joining command is given.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KeptOptions {
    Nothing,
    Options,
    Only(Vec<usize>),
}

/// A thing that only counts when its condition holds.
#[derive(Debug)]
pub struct Conditional<T> {
    pub when: Condition,
    pub is: T,
}

/// The first entry that holds, else the default of the type or keyword.
#[derive(Debug)]
pub struct Cases<T>(pub Vec<Conditional<T>>);

impl<T> Default for Cases<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

/// A predicate on an invocation.
#[derive(Debug, Default)]
pub enum Condition {
    Always,
    #[default]
    Never,
    Given(Subject),
    All(Vec<Condition>),
    Any(Vec<Condition>),
    Not(Box<Condition>),
    Value {
        which: Which,
        of: Vec<Subject>,
        test: Test,
    },
    Count {
        of: Vec<Subject>,
        at_least: usize,
        at_most: usize,
    },
    LastOf {
        of: Vec<usize>,
        is: usize,
    },
    Environment {
        name: String,
        test: Option<Test>,
    },
}

impl Condition {
    /// Adds the variables of the environment on which it depends.
    pub fn variables<'a>(&'a self, found: &mut Vec<&'a str>) {
        match self {
            Self::Environment { name, .. } => found.push(name),
            Self::All(parts) | Self::Any(parts) => {
                parts.iter().for_each(|part| part.variables(found));
            }
            Self::Not(part) => part.variables(found),
            Self::Always
            | Self::Never
            | Self::Given(_)
            | Self::Value { .. }
            | Self::Count { .. }
            | Self::LastOf { .. } => {}
        }
    }
}

/// An option or an operand that a condition names, by its index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Subject {
    Option(usize),
    Param(usize),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Which {
    Some,
    Every,
    Last,
}

/// A test on one value.
#[derive(Debug)]
pub enum Test {
    Is(Vec<String>),
    Patterns(Vec<Pattern>),
}

/// A regular expression, compiled when first used: a gateway that starts should
/// not compile hundreds of which it needs a few.
#[derive(Debug)]
pub struct Pattern {
    source: String,
    regex: OnceLock<Option<Regex>>,
}

impl Pattern {
    /// `whole`: the value must match from end to end.
    pub fn new(source: &str, whole: bool) -> Self {
        let source = if whole { format!("^(?:{source})\\z") } else { source.to_owned() };
        Self { source, regex: OnceLock::new() }
    }

    /// The error of the regular expression, if it does not compile.
    pub fn fault(&self) -> Option<String> {
        let error = Regex::new(&self.source).err()?;
        // The last line of the message names the fault; the others draw it.
        error.to_string().lines().last().map(|line| line.trim_start_matches("error: ").to_owned())
    }

    /// Compiles it now instead of at first use.
    pub fn prepare(&self) {
        self.regex();
    }

    /// False for a pattern with a fault; those do not pass the checker.
    pub fn is_match(&self, value: &[u8]) -> bool {
        self.regex().is_some_and(|regex| regex.is_match(value))
    }

    fn regex(&self) -> Option<&Regex> {
        self.regex.get_or_init(|| Regex::new(&self.source).ok()).as_ref()
    }
}

impl Opt {
    /// How to name it in a message: `--count`, else `-c`.
    pub fn display(&self) -> String {
        match (self.long.first(), self.short.first(), self.words.first()) {
            (Some(long), ..) => format!("--{long}"),
            (None, Some(short), _) => format!("-{}", char::from(*short)),
            (None, None, Some(word)) => word.clone(),
            (None, None, None) => "-NUMBER".to_owned(),
        }
    }
}

impl Default for ValueRule {
    fn default() -> Self {
        Self {
            types: vec![Cases::default()],
            separator: None,
            allowed: Vec::new(),
            dash: None,
            no_follow: Condition::Never,
        }
    }
}
