//! Levels of confinement.

use std::{fmt, str::FromStr};

/// Levels of confinement, from least to most.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// By the rights of their user alone.
    None,
    /// They see the exports and the server's programs only, and no network.
    Namespaces,
    /// They also have a PID namespace and a filter of system calls, and reach only the files that
    /// they name. Demands a Landlock that is new enough ([`crate::runner::LEAST_LANDLOCK`]).
    Strict,
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::None => "none",
            Self::Namespaces => "namespaces",
            Self::Strict => "strict",
        })
    }
}

impl FromStr for Level {
    type Err = NoLevel;

    fn from_str(text: &str) -> Result<Self, NoLevel> {
        [Self::None, Self::Namespaces, Self::Strict]
            .into_iter()
            .find(|level| level.to_string() == text)
            .ok_or_else(|| NoLevel(text.to_owned()))
    }
}

/// A text that names no level.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`require` must be \"strict\", \"namespaces\" or \"none\", not {0:?}")]
pub struct NoLevel(String);
