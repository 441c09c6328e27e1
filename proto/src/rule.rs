//! The rules of exactness and the traps, by name, with a switch for each. The code that implements
//! a rule asks [`holds`], so that a test can run without one rule and see which cases notice. In
//! release builds every rule holds, and asking costs nothing.

use std::{fmt, str::FromStr};

macro_rules! rules {
    ($($(#[$doc:meta])* $name:ident = $text:literal,)*) => {
        /// A rule by which a command gives the same result on another machine.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Rule {
            $($(#[$doc])* $name,)*
        }

        impl Rule {
            /// Every rule, then every trap.
            pub const ALL: &[Rule] = &[$(Rule::$name),*];

            /// Its name in case files and in `POSH_WITHOUT`.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self {
                    $(Rule::$name => $text,)*
                }
            }
        }
    };
}

rules! {
    /// The server shows the workstation's paths.
    Paths = "paths",
    /// Links, nested mounts and special files lead to the same files as on the workstation.
    Files = "files",
    /// The server's programs are the same as the workstation's.
    Tools = "tools",
    /// Variables, configuration files and umask that can matter, and no others.
    Environment = "environment",
    /// A command that writes to a terminal writes to one on the server too.
    Terminal = "terminal",
    /// A redirect is opened at the shell's offset, and the shell's offset moves.
    Offsets = "offsets",
    /// Standard input is read only by commands that read it.
    Stdin = "stdin",
    /// Nothing stale is read, nothing new overwritten.
    Coherence = "coherence",
    /// Output moves as it appears, and a writer that has lost its reader ends.
    Streaming = "streaming",
    /// Errors stay apart from output.
    Stderr = "stderr",
    /// Stages are fused only over a pipe that no other process has open.
    PipeHolders = "pipe-holders",
    /// An output that another process writes to is written on the workstation.
    SharedOutput = "shared-output",
    /// A command that may stop reading a shared input early runs locally.
    EarlyReaders = "early-readers",
    /// Descriptors have the same kind as on the workstation.
    DescriptorKinds = "descriptor-kinds",
    /// A command whose input is its output notices that.
    InputIsOutput = "input-is-output",
    /// Closed descriptors stay closed.
    ClosedDescriptors = "closed-descriptors",
    /// Signals end, stop and spare commands as on the workstation.
    InitSignals = "init-signals",
    /// A command that may ask on the terminal runs locally.
    AskingCommands = "asking-commands",
    /// A command that only changes names goes through the mount.
    MetadataCommands = "metadata-commands",
    /// Time zones, users' names, locales and limits are the workstation's.
    Identity = "identity",
    /// Attributes that the mount shows differently from the server are read through the mount.
    MountDifferences = "mount-differences",
    /// The index that git writes on the server equals one written on the workstation.
    GitIndex = "git-index",
}

/// Variable with the rules to switch off, joined by commas. Debug builds only.
pub const VARIABLE: &str = "POSH_WITHOUT";

/// Returns true: release builds keep every rule.
#[cfg(not(debug_assertions))]
#[must_use]
pub const fn holds(_rule: Rule) -> bool {
    true
}

/// Returns true unless `POSH_WITHOUT` names `rule`.
#[cfg(debug_assertions)]
#[must_use]
pub fn holds(rule: Rule) -> bool {
    use std::sync::OnceLock;
    static WITHOUT: OnceLock<Vec<Rule>> = OnceLock::new();
    let read = || {
        let named = std::env::var(VARIABLE).unwrap_or_default();
        named.split(',').filter_map(|name| name.parse().ok()).collect()
    };
    !WITHOUT.get_or_init(read).contains(&rule)
}

/// This process's `POSH_WITHOUT`, for a child that is given no other variables.
#[must_use]
pub fn passed_on() -> Option<(&'static str, String)> {
    let named = std::env::var(VARIABLE).ok().filter(|_| cfg!(debug_assertions))?;
    Some((VARIABLE, named))
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Error: no rule has this name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("there is no rule {0:?}; use one of {names}", names = names())]
pub struct UnknownRule(String);

fn names() -> String {
    let names: Vec<_> = Rule::ALL.iter().map(|rule| rule.name()).collect();
    names.join(", ")
}

impl FromStr for Rule {
    type Err = UnknownRule;

    fn from_str(text: &str) -> Result<Self, UnknownRule> {
        let found = Rule::ALL.iter().find(|rule| rule.name() == text);
        found.copied().ok_or_else(|| UnknownRule(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_is_read_back() {
        for rule in Rule::ALL {
            assert_eq!(rule.name().parse(), Ok(*rule));
        }
        assert!("no-such-rule".parse::<Rule>().is_err());
    }
}
