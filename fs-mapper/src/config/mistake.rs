//! Mistakes in a configuration, in the format of compilers: one line per mistake with file, line
//! and column.

use super::UnusableConfig;
use std::fmt;
use std::path::PathBuf;

/// Position in a text. The default, two zeros, means that no text has the entry.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Position {
    /// Line, from 1.
    pub line: usize,
    /// Column in characters, from 1.
    pub column: usize,
}

impl Position {
    /// The position of a byte offset in a text.
    pub(super) fn of(text: &str, offset: usize) -> Position {
        let before = text.get(..offset).unwrap_or(text);
        let line_start = before.rfind('\n').map_or(0, |newline| newline + 1);
        Position {
            line: before.matches('\n').count() + 1,
            column: before[line_start..].chars().count() + 1,
        }
    }
}

/// One mistake.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mistake {
    /// As the caller named the file.
    pub file: PathBuf,
    /// `None` when the file as a whole is at fault.
    pub position: Option<Position>,
    /// Description of the mistake.
    pub message: String,
    /// Advice for the user; may be empty.
    pub hint: String,
}

impl fmt::Display for Mistake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:", self.file.display())?;
        if let Some(Position { line, column }) = self.position {
            write!(f, "{line}:{column}:")?;
        }
        write!(f, " error: {}", self.message)?;
        if !self.hint.is_empty() {
            write!(f, "; {}", self.hint)?;
        }
        Ok(())
    }
}

/// Every mistake of one file, in the file's order; never empty.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigErrors {
    pub(super) mistakes: Vec<Mistake>,
}

impl ConfigErrors {
    pub(super) fn unusable(why: &UnusableConfig) -> Self {
        let message = format!("cannot read the configuration: {}", why.source);
        let hint = String::from("name another file with --config or POSH_CONFIG");
        ConfigErrors {
            mistakes: vec![Mistake { file: why.file.clone(), position: None, message, hint }],
        }
    }

    /// The mistakes in the file's order.
    pub fn mistakes(&self) -> &[Mistake] {
        &self.mistakes
    }
}

impl fmt::Display for ConfigErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, mistake) in self.mistakes.iter().enumerate() {
            if index > 0 {
                writeln!(f)?;
            }
            mistake.fmt(f)?;
        }
        Ok(())
    }
}

impl std::error::Error for ConfigErrors {}
