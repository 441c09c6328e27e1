//! `posh explain 'PIPELINE'`: plans what a text would run, and runs nothing.
//!
//! The shell that runs a pipeline decides what its words are; here a parser
//! stands in for it, as far as a text alone can tell. Where only running could
//! tell, the stage says so in a sentence. The planning itself is the gateway's.

mod braces;
mod nesting;
mod patterns;
mod reader;
mod words;

use std::{
    env,
    ffi::OsString,
    num::NonZeroU32,
    os::unix::ffi::{OsStrExt, OsStringExt},
    path::{Path, PathBuf},
};

use posh_proto::gateway::{PlanRequest, PlannedStage};

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
pub fn explain(
    target: &Target,
    text: &str,
    json: bool,
    split: Option<NonZeroU32>,
) -> Result<String, Error> {
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
    let lost =
        pipeline.cwd.is_none().then(|| "its directory is known only when it runs".to_owned());
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
    }
}
