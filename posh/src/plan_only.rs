//! `posh explain 'PIPELINE'`: plans the pipelines of a text without running them.
//!
//! At a run, the shell expands the words; this module's parser does, as far as the text alone
//! determines them. Otherwise the stage has a sentence why it is unknown. The gateway makes the
//! plan.

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
    gateway::{self, GatewayTarget},
};

/// One pipeline, as far as it is known without running it.
#[derive(Debug, PartialEq, Eq)]
struct PredictedPipeline {
    /// As it was written.
    text: String,
    /// The directory in which it would run; `None` when the text changes it in a way that is known
    /// only at a run.
    cwd: Option<PathBuf>,
    /// In order.
    stages: Vec<PredictedStage>,
}

/// One command of it.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct PredictedStage {
    /// Expanded; as written when `unknowable`.
    argv: Vec<OsString>,
    /// `< FILE`
    stdin: Option<OsString>,
    /// `> FILE`, `>> FILE`
    stdout: Option<OsString>,
    /// The latter.
    appends: bool,
    /// Reason why its words can't be known.
    unknowable: Option<String>,
}

/// Working directory and variables for the expansion.
struct Surroundings<'a> {
    cwd: PathBuf,
    variable: &'a dyn Fn(&str) -> Option<OsString>,
}

/// Plans each pipeline of `text`; the plans follow each other, with headings if there are several.
///
/// # Errors
/// [`Error::Parse`], or any error of asking the gateway.
pub fn explain(
    target: &GatewayTarget,
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

fn request(pipeline: PredictedPipeline, json: bool, split: Option<NonZeroU32>) -> PlanRequest {
    let lost =
        pipeline.cwd.is_none().then(|| "its directory is known only when it runs".to_owned());
    let stage = |mut stage: PredictedStage| {
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

/// Converts to the contract's type.
fn planned(stage: PredictedStage) -> PlannedStage {
    let bytes = |text: OsString| text.into_vec().into();
    PlannedStage {
        argv: stage.argv.into_iter().map(bytes).collect(),
        stdin_path: stage.stdin.map(bytes).unwrap_or_default(),
        stdout_path: stage.stdout.map(bytes).unwrap_or_default(),
        unknowable: stage.unknowable.unwrap_or_default(),
        appends: stage.appends,
    }
}
