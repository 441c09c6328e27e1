//! Faults of annotation files, with their places, for users.

use std::fmt;
use std::path::PathBuf;

use crate::document::SourcePosition;

/// One fault of one annotation file.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Diagnostic {
    /// The file, by the name that the caller gave.
    pub file: PathBuf,
    /// Line, from 1; 0 when the file could not be read at all.
    pub line: usize,
    /// Column in characters, from 1; 0 when the file could not be read at all.
    pub column: usize,
    /// Description of the fault, without capital and full stop.
    pub message: String,
}

impl fmt::Display for Diagnostic {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let file = self.file.display();
        match self.line {
            0 => write!(formatter, "{file}: {}", self.message),
            line => write!(formatter, "{file}:{line}:{}: {}", self.column, self.message),
        }
    }
}

/// The faults of one file while it is checked.
#[derive(Debug, Default)]
pub(crate) struct Faults(Vec<(SourcePosition, String)>);

impl Faults {
    pub fn add(&mut self, place: SourcePosition, message: impl Into<String>) {
        self.0.push((place, message.into()));
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// In the order of the file, once each: what annotations share is checked with each of them.
    pub fn into_diagnostics(mut self, file: &std::path::Path) -> Vec<Diagnostic> {
        self.0.sort();
        self.0.dedup();
        let diagnostic = |(place, message): (SourcePosition, String)| Diagnostic {
            file: file.to_owned(),
            line: place.line,
            column: place.column,
            message,
        };
        self.0.into_iter().map(diagnostic).collect()
    }
}
