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
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        [Self::None, Self::Namespaces, Self::Strict]
            .into_iter()
            .find(|level| level.to_string() == text)
            .ok_or_else(|| {
                format!("`require` must be \"strict\", \"namespaces\" or \"none\", not {text:?}")
            })
    }
}
