//! Cases as data: scripts with expectations, read from `integration/cases/**/*.yaml`, run under
//! their shell and under posh, and compared. The format is described in
//! `integration/cases/README.md`. [`fixture`] makes the files of the scripts' directory, [`site`]
//! runs the scripts, [`judge`] compares.

pub mod fixture;
pub mod judge;
pub mod load;
pub mod options;
pub mod run;
pub mod site;
pub mod summary;
pub mod without;

use std::fmt;
use std::path::PathBuf;

use posh_proto::rule::Rule;
use serde::{Deserialize, Deserializer, de};

use crate::generate;
use crate::oracle::{Door, Shell};

/// One case of a file.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Case {
    /// Unique in its file.
    pub name: String,
    /// The rule or trap that it tests.
    #[serde(default, deserialize_with = "rule")]
    pub rule: Option<Rule>,
    /// Commands that must run on a server.
    #[serde(default)]
    pub offloads: Vec<WantedCommand>,
    /// Commands that must run locally.
    #[serde(default)]
    pub local: Vec<WantedCommand>,
    /// Commands that must run locally if the mount is an sshfs, because of its effects on files; on
    /// volumes they run on the server.
    #[serde(default)]
    pub by_sshfs: Vec<WantedCommand>,
    /// Shell of the script.
    #[serde(default)]
    pub shell: Language,
    /// Working directory at the start.
    #[serde(default)]
    pub start: StartDirectory,
    /// A script for `sh` in the fresh directory, on the server.
    #[serde(default)]
    pub prepare: String,
    /// The script.
    pub script: String,
    /// Files whose time of change is compared too.
    #[serde(default)]
    pub times: Vec<PathBuf>,
    /// The lines of standard output have no fixed order.
    #[serde(default)]
    pub unordered: bool,
    /// Runs as the laboratory's ordinary user.
    #[serde(default)]
    pub user: bool,
    /// The only interception for which it holds: docs/doors.md says how the other one differs.
    #[serde(default)]
    pub door: Option<Door>,
    /// Reference run for the comparison.
    #[serde(default)]
    pub oracle: Oracle,
    /// A known difference that is not fixed yet: the case fails once there is none.
    #[serde(default)]
    pub known: String,
    /// Purpose of the case.
    #[serde(default)]
    pub why: String,
    /// Its file, relative to the directory of all cases, without `.yaml`.
    #[serde(skip)]
    pub file: String,
}

impl Case {
    /// `rules/offsets:head-then-cat`.
    pub fn title(&self) -> String {
        format!("{}:{}", self.file, self.name)
    }

    /// Returns true if the case applies to this interception; `None` is the hook, posh's default.
    pub fn holds_through(&self, door: Option<Door>) -> bool {
        self.door.is_none_or(|only| only == door.unwrap_or(Door::Hook))
    }

    /// Returns true if the case belongs to the sample of one in `count` cases. Chosen by title, so
    /// that the sample does not change when cases are added.
    pub fn is_one_of(&self, count: u64) -> bool {
        // The low bits of the sum are the weak ones.
        (generate::sum(self.title().as_bytes()) >> 32).is_multiple_of(count.max(1))
    }

    /// Directory of its file: the subject of the case.
    pub fn subject(&self) -> &str {
        self.file.rsplit_once('/').map_or("", |(directory, _)| directory)
    }
}

/// Working directory of a script, and value of its variable `D`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum StartDirectory {
    /// At home; `D` is the directory's absolute path.
    #[default]
    Home,
    /// In the directory itself; `D` is `.`.
    Inside,
}

/// Reference run of the shell alone, with which posh is compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Oracle {
    /// Over the mount, as a user without posh would run it.
    #[default]
    Mount,
    /// On the local copy, if the mount makes a command fail that succeeds on every other file
    /// system.
    Local,
}

/// The shells of case files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
#[expect(missing_docs, reason = "named as the shells are")]
pub enum Language {
    #[default]
    Bash,
    Dash,
    Zsh,
    Fish,
}

impl From<Language> for Shell {
    fn from(language: Language) -> Shell {
        match language {
            Language::Bash => Shell::Bash,
            Language::Dash => Shell::Dash,
            Language::Zsh => Shell::Zsh,
            Language::Fish => Shell::Fish,
        }
    }
}

/// `cat`, or `cat*3`: a command, and how many stages of it at least.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WantedCommand {
    /// The annotation's name.
    pub command: String,
    /// At least so many.
    pub count: usize,
}

impl<'de> Deserialize<'de> for WantedCommand {
    fn deserialize<D: Deserializer<'de>>(source: D) -> Result<Self, D::Error> {
        let text = String::deserialize(source)?;
        let Some((command, count)) = text.rsplit_once('*') else {
            return Ok(WantedCommand { command: text, count: 1 });
        };
        let count = count.parse().ok().filter(|count| *count > 0);
        let count = count
            .ok_or_else(|| de::Error::custom(format!("{text:?} is not a command with a number")))?;
        Ok(WantedCommand { command: command.to_owned(), count })
    }
}

impl fmt::Display for WantedCommand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.count {
            1 => f.write_str(&self.command),
            count => write!(f, "{}*{count}", self.command),
        }
    }
}

fn rule<'de, D: Deserializer<'de>>(source: D) -> Result<Option<Rule>, D::Error> {
    String::deserialize(source)?.parse().map(Some).map_err(de::Error::custom)
}
