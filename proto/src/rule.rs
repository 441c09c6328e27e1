//! The rules of exactness and the traps, by name, and a switch for each. What a
//! rule demands is implemented where it belongs; there, [`holds`] is asked, so that
//! a test can run without one rule and see which cases notice. In release builds
//! every rule holds, always, and asking costs nothing.

use std::{fmt, str::FromStr};

macro_rules! rules {
    ($($(#[$doc:meta])* $name:ident = $text:literal,)*) => {
        /// A rule by which the same command gives the same answer elsewhere.
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
    /// Links, nested mounts and special files lead where they lead here.
    Files = "files",
    /// The server's programs are those that are here.
    Tools = "tools",
    /// Variables, configuration files and umask that can matter, and no others.
    Environment = "environment",
    /// What writes to a terminal does so there.
    Terminal = "terminal",
    /// A redirect is opened at the shell's offset, and the shell's offset moves.
    Offsets = "offsets",
    /// Standard input is read only by commands that read it.
    Stdin = "stdin",
    /// Nothing stale is read, nothing new overwritten.
    Coherence = "coherence",
    /// Output moves as it appears, and who lost its reader ends.
    Streaming = "streaming",
    /// Errors stay apart from output.
    Stderr = "stderr",
    /// Stages are fused only over a pipe that is theirs alone.
    PipeHolders = "pipe-holders",
    /// An output that another process writes to is written here.
    SharedOutput = "shared-output",
    /// Who may stop reading a shared input runs here.
    EarlyReaders = "early-readers",
    /// Descriptors are of the kind that they are here.
    DescriptorKinds = "descriptor-kinds",
    /// An input that is the output is noticed by the command.
    InputIsOutput = "input-is-output",
    /// Closed descriptors stay closed.
    ClosedDescriptors = "closed-descriptors",
    /// Signals end, stop and spare commands as here.
    InitSignals = "init-signals",
    /// What may ask on the terminal runs here.
    AskingCommands = "asking-commands",
    /// What only changes names goes through the mount.
    MetadataCommands = "metadata-commands",
    /// Time zones, users' names, locales and limits are the workstation's.
    Identity = "identity",
    /// What the mount shows otherwise than the server is shown from here.
    MountDifferences = "mount-differences",
    /// The index that git writes there is no other than here.
    GitIndex = "git-index",
}

/// The variable with the rules to be left out, joined by commas. Debug builds only.
pub const VARIABLE: &str = "POSH_WITHOUT";

/// Whether `rule` is kept by this process.
#[cfg(not(debug_assertions))]
#[must_use]
pub const fn holds(_rule: Rule) -> bool {
    true
}

/// Whether `rule` is kept by this process, which it is unless `POSH_WITHOUT` names it.
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

/// `POSH_WITHOUT` as this process has it, for a child that is given no other variables.
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

impl FromStr for Rule {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Rule::ALL.iter().find(|rule| rule.name() == text);
        found.copied().ok_or_else(|| {
            let names: Vec<_> = Rule::ALL.iter().map(|rule| rule.name()).collect();
            format!("there is no rule {text:?}; use one of {}", names.join(", "))
        })
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
