//! Annotations of commands: the language, the files that ship with posh, and the classification of
//! invocations. A leaf crate: it reads annotation files and nothing else of the file system.
//!
//! The language's reference is `docs/annotations.md`. [`Library::classify`] finds the command
//! (`library`, which has it parsed by `document` and checked by `compile` into `model`), reads the
//! words (`words`), assigns operands and evaluates conditions (`facts`), finds the files (`files`)
//! and evaluates the keywords (`classify`).
#![forbid(unsafe_code)]

mod classify;
mod compile;
mod coverage;
mod diagnostic;
mod document;
mod explain;
mod facts;
mod files;
mod invocation;
mod library;
mod model;
pub mod settings;
mod words;

pub use coverage::Coverage;
pub use diagnostic::Diagnostic;
pub use invocation::{
    Admitted, Aggregator, Because, BehindMerge, CurrentDir, FileAttribute, FileKind, FileUse,
    Guard, GuardTest, Invocation, LineEnds, Split, StatusRule, StdinUse, TerminalUse, ToolVersion,
    Unknown,
};
pub use library::{DeclaredSplits, Library, check, check_text};
