//! `posh explain 'PIPELINE'`: plans what a text would run, and runs nothing.
//!
//! The shell that runs a pipeline decides what its words are; here a parser
//! stands in for it, as far as a text alone can tell. Where only running could
//! tell, the stage says so in a sentence. The planning itself is the gateway's.

mod ahead;
mod braces;
mod followed;
mod nesting;
mod patterns;
mod reader;
mod words;

pub use ahead::BYTES as LOOKED_AT_BYTES;

use ahead::{Ahead, Command, Touched};
use followed::Followed;

use std::{
    env,
    ffi::{OsStr, OsString},
    num::NonZeroU32,
    os::unix::ffi::{OsStrExt, OsStringExt},
    path::{Path, PathBuf},
};

use posh_proto::gateway::{CertainCommand, FollowedCommand, ForeseenCommand, LookAhead, PlanRequest, PlannedStage};

use crate::{
    Error,
    gateway::{self, Target},
};

/// One pipeline, as far as it is known without running it.
#[derive(Debug, PartialEq, Eq)]
struct Pipeline {
    /// As it was written.
    text: String,
    /// The directory it would run in; `None` when the text changes it in a way
    /// that only running can tell.
    cwd: Option<PathBuf>,
    /// In order.
    stages: Vec<Stage>,
}

/// One command of it.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Stage {
    /// Expanded; as written when `unknowable`.
    argv: Vec<OsString>,
    /// `< FILE`
    stdin: Option<OsString>,
    /// `> FILE`, `>> FILE`
    stdout: Option<OsString>,
    /// The latter.
    appends: bool,
    /// A word is a pattern, which stands for itself.
    has_pattern: bool,
    /// Why its words can't be known.
    unknowable: Option<String>,
}

/// What the text is read against.
struct Surroundings<'a> {
    cwd: PathBuf,
    variable: &'a dyn Fn(&str) -> Option<OsString>,
}

/// Plans each pipeline of `text`; one plan after the other, with a heading when
/// there are several.
///
/// # Errors
/// [`Error::Parse`], or whatever kept the gateway from planning.
pub fn explain(target: &Target, text: &str, json: bool, split: Option<NonZeroU32>) -> Result<String, Error> {
    let cwd = env::current_dir().unwrap_or_else(|_| PathBuf::from("/"));
    let pipelines = reader::read(text, &Surroundings { cwd, variable: &|name| env::var_os(name) })?;
    if pipelines.is_empty() {
        return Err(Error::Parse("it runs no command".to_owned()));
    }
    let mut gateway = gateway::reach(&gateway::require(target)?)?;
    let several = pipelines.len() > 1 && !json;
    let mut plans = String::new();
    for pipeline in pipelines {
        if several {
            plans.push_str(&format!("$ {}\n", pipeline.text));
        }
        let plan = gateway.plan(request(pipeline, json, split))?;
        plans.push_str(plan.text.trim_end());
        plans.push('\n');
    }
    Ok(plans)
}

fn request(pipeline: Pipeline, json: bool, split: Option<NonZeroU32>) -> PlanRequest {
    let lost = pipeline.cwd.is_none().then(|| "its directory is known only when it runs".to_owned());
    let stage = |mut stage: Stage| {
        stage.unknowable = stage.unknowable.or_else(|| lost.clone());
        planned(stage)
    };
    let cwd = pipeline.cwd.as_deref().unwrap_or(Path::new("/"));
    PlanRequest {
        cwd: cwd.as_os_str().as_bytes().to_vec().into(),
        stages: pipeline.stages.into_iter().map(stage).collect(),
        json,
        split: split.map_or(0, NonZeroU32::get),
    }
}

/// As the contract has it.
fn planned(stage: Stage) -> PlannedStage {
    let bytes = |text: OsString| text.into_vec().into();
    PlannedStage {
        argv: stage.argv.into_iter().map(bytes).collect(),
        stdin_path: stage.stdin.map(bytes).unwrap_or_default(),
        stdout_path: stage.stdout.map(bytes).unwrap_or_default(),
        unknowable: stage.unknowable.unwrap_or_default(),
        appends: stage.appends,
        has_pattern: stage.has_pattern,
    }
}

fn foreseen((cwd, stage): (PathBuf, Stage)) -> ForeseenCommand {
    ForeseenCommand { stage: Some(planned(stage)), cwd: cwd.into_os_string().into_vec().into() }
}

fn certain_command(Command { stages, cwd }: Command) -> CertainCommand {
    CertainCommand { stages: stages.into_iter().map(planned).collect(), cwd: cwd.into_os_string().into_vec().into() }
}

/// What the shell that is about to start will run, list and, unless there are no volumes, name, as the contract has it; where there are
/// volumes for certain, not what follows what.
#[must_use]
pub fn look_ahead(text: &str, has_volumes: Option<bool>) -> Option<LookAhead> {
    let cwd = env::current_dir().ok()?;
    let variable = |name: &str| env::var_os(name);
    let Ahead { first, second, commands: certain } = ahead::listed(text, &cwd, &variable);
    let Touched { named, listed, commands } =
        if has_volumes == Some(false) { Touched::default() } else { ahead::touched(text, &cwd, &variable) };
    let bytes = |text: OsString| text.into_vec().into();
    let paths = |paths: Vec<PathBuf>| paths.into_iter().map(|path| bytes(path.into_os_string())).collect();
    let mut ahead = LookAhead {
        first: paths(first),
        named: paths(named),
        listed: paths(listed),
        foreseen: commands.into_iter().map(foreseen).collect(),
        ..LookAhead::default()
    };
    let stages = certain.iter().flat_map(|command| &command.stages);
    let is_prepared_for = is_prepared(stages.filter_map(|stage| stage.argv.first()).map(OsString::as_os_str));
    if !certain.is_empty() && !is_prepared_for {
        ahead.second = paths(second);
        ahead.commands = certain.into_iter().map(certain_command).collect();
        ahead.environment = env::vars_os().map(|(name, value)| bytes([name, value].join(OsStr::new("=")))).collect();
    }
    if has_volumes != Some(true)
        && let Some(whole) = ahead::whole(text)
    {
        let followed = followed::followed(text, &whole, &variable);
        if !is_prepared(followed.iter().flat_map(|command| &command.next).map(OsStr::new)) {
            ahead.followed = followed.into_iter().map(followed_command).collect();
        }
    }
    Some(ahead).filter(|ahead| *ahead != LookAhead::default())
}

fn followed_command(Followed { words, is_open, next }: Followed) -> FollowedCommand {
    let unknown = (0..).zip(&words).filter(|(_, word)| word.is_none()).map(|(index, _)| index);
    FollowedCommand {
        unknown: unknown.collect(),
        words: words.into_iter().map(|word| word.unwrap_or_default().into()).collect(),
        is_open,
        next: next.into_iter().collect(),
    }
}

/// Whether the environment makes bash begin with something else than the text: a start-up file, options, a
/// function with a command's name (bash(1)).
fn is_prepared<'a>(names: impl Iterator<Item = &'a OsStr>) -> bool {
    let is_function = |name: &OsStr| {
        let variable = [OsStr::new("BASH_FUNC_"), name, OsStr::new("%%")].join(OsStr::new(""));
        env::var_os(variable).is_some()
    };
    let is_set = |name: &&str| env::var_os(name).is_some();
    ["BASH_ENV", "BASHOPTS", "ENV", "PS4", "SHELLOPTS"].iter().any(is_set)
        || names.chain(ahead::PASSED_OVER.into_iter().map(OsStr::new)).any(is_function)
}
