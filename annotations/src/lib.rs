//! What posh knows of commands: the annotation language, the files that ship
//! with it, and the reading of one invocation by it. A leaf: nothing here looks
//! at the file system beyond reading annotation files.
#![forbid(unsafe_code)]

mod invocation;

pub use invocation::{
    Aggregator, CurrentDir, FileKind, FileUse, Invocation, Split, StatusRule, StdinUse, TerminalUse, ToolVersion,
    Unknown,
};

use std::ffi::{OsStr, OsString};

/// A checked set of annotations.
#[derive(Debug, Clone, Default)]
pub struct Library {}

impl Library {
    /// The files that ship with posh.
    #[must_use]
    pub fn builtin() -> Self {
        Self::default()
    }

    /// Every annotated command's name (first word), sorted, once each.
    pub fn commands(&self) -> impl Iterator<Item = &str> {
        std::iter::empty()
    }

    /// Reads one invocation. `name` is the command's name as the shell found it;
    /// `argv[0]` is not used. `environment` looks up a variable of the command
    /// (`POSIXLY_CORRECT`, `GREP_OPTIONS`, `GIT_DIR`, ... can change the reading).
    ///
    /// # Errors
    /// [`Unknown`] says why the invocation stays here.
    pub fn classify(
        &self,
        name: &str,
        argv: &[OsString],
        environment: &dyn Fn(&str) -> Option<OsString>,
    ) -> Result<Invocation, Unknown> {
        let _ = (argv, environment, OsStr::new(""));
        Err(Unknown::Command(name.to_owned()))
    }
}
