//! Cases as data: a script with what must come of it, read from
//! `integration/cases/**/*.yaml`, run under its shell and under posh, and compared.
//! The format is described in `integration/cases/README.md`. What the scripts find
//! in their directory is [`fixture`]'s, how they run is [`site`]'s, what counts as
//! equal is [`judge`]'s matter.

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
    /// The rule or trap that it holds.
    #[serde(default, deserialize_with = "rule")]
    pub rule: Option<Rule>,
    /// Commands that must have run on a server.
    #[serde(default)]
    pub offloads: Vec<Wanted>,
    /// Commands that must have run here.
    #[serde(default)]
    pub local: Vec<Wanted>,
    /// Commands that must have run here where the mount is an sshfs, for what that does to files;
    /// on volumes they run on the server.
    #[serde(default)]
    pub by_sshfs: Vec<Wanted>,
    /// Who reads the script.
    #[serde(default)]
    pub shell: Language,
    /// Where it starts.
    #[serde(default)]
    pub start: Start,
    /// A script for `sh` in the fresh directory, on the server.
    #[serde(default)]
    pub prepare: String,
    /// The script.
    pub script: String,
    /// Files whose time of change is compared too.
    #[serde(default)]
    pub times: Vec<PathBuf>,
    /// The lines of standard output come in no fixed order.
    #[serde(default)]
    pub unordered: bool,
    /// Runs as the laboratory's ordinary user.
    #[serde(default)]
    pub user: bool,
    /// It holds through this door only: the other one shows, as docs/doors.md says.
    #[serde(default)]
    pub door: Option<Door>,
    /// What posh is measured by.
    #[serde(default)]
    pub oracle: Oracle,
    /// A difference that is known and not yet mended: the case fails once there is none.
    #[serde(default)]
    pub known: String,
    /// What it is about.
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

    /// Whether it is meant for this door; none given is the hook, posh's default.
    pub fn holds_through(&self, door: Option<Door>) -> bool {
        self.door.is_none_or(|only| only == door.unwrap_or(Door::Hook))
    }

    /// Whether it belongs to the sample that has one of `count` cases: by its title, so that the
    /// sample stays as it is when cases are added.
    pub fn is_one_of(&self, count: u64) -> bool {
        // Its low bits are its weak ones.
        (generate::sum(self.title().as_bytes()) >> 32).is_multiple_of(count.max(1))
    }

    /// The directory of its file: what the case is about.
    pub fn subject(&self) -> &str {
        self.file.rsplit_once('/').map_or("", |(directory, _)| directory)
    }
}

/// Where a script starts, and what its variable `D` holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Start {
    /// At home; `D` is the directory's absolute path.
    #[default]
    Home,
    /// In the directory itself; `D` is `.`.
    Inside,
}

/// By which run of the shell alone posh is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Oracle {
    /// Over the mount, as a user without posh would run it.
    #[default]
    Mount,
    /// On the local copy: where the mount itself makes a command fail that succeeds on every file
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
pub struct Wanted {
    /// The annotation's name.
    pub command: String,
    /// At least so many.
    pub count: usize,
}

impl<'de> Deserialize<'de> for Wanted {
    fn deserialize<D: Deserializer<'de>>(source: D) -> Result<Self, D::Error> {
        let text = String::deserialize(source)?;
        let Some((command, count)) = text.rsplit_once('*') else {
            return Ok(Wanted { command: text, count: 1 });
        };
        let count = count.parse().ok().filter(|count| *count > 0);
        let count = count
            .ok_or_else(|| de::Error::custom(format!("{text:?} is not a command with a number")))?;
        Ok(Wanted { command: command.to_owned(), count })
    }
}

impl fmt::Display for Wanted {
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
