//! Planning without running (`posh explain`): the words come from a parsed command line, the
//! descriptors are made up, the rest is as for live stages.

use std::{
    ffi::OsString,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
    sync::Arc,
};

use posh_annotations::Aggregator;

use crate::{
    dispatch,
    enlisted::{Descriptor, DescriptorKind, Enlisted},
    facts::ResolvedCommand,
    model::Edge,
    model::LocalReason,
    plan::{Join, Site, Steps},
    report::{PipelineReport, StageReport},
    state::Gateway,
};

/// One stage of a command line.
#[derive(Debug, Clone)]
pub struct PlannedStage {
    /// Arguments.
    pub argv: Vec<OsString>,
    /// `< FILE`
    pub stdin: Option<PathBuf>,
    /// `> FILE`
    pub stdout: Option<PathBuf>,
    /// Reason why its words can't be known without running.
    pub unknowable: Option<String>,
}

/// Plans a command line and returns the placements.
pub async fn plan_only(
    gateway: &Arc<Gateway>,
    cwd: &Path,
    stages: Vec<PlannedStage>,
    split: Option<u32>,
) -> PipelineReport {
    let edges: Vec<Edge> =
        (1..stages.len()).map(|i| Edge { from: (i - 1, 1), to: (i, 0) }).collect();
    let mut imagined = Vec::new();
    for stage in &stages {
        imagined.push(Arc::new(imagine(gateway, cwd, stage).await));
    }
    let reasons: Vec<Option<String>> = stages.into_iter().map(|s| s.unknowable).collect();
    dispatch::plan_only(gateway, &imagined, &edges, &reasons, split).await
}

/// Makes up the description that a stage's process would send.
async fn imagine(gateway: &Gateway, cwd: &Path, stage: &PlannedStage) -> Enlisted {
    let name = stage.argv.first().map(|w| w.to_string_lossy().into_owned()).unwrap_or_default();
    let name = name.rsplit('/').next().unwrap_or_default().to_owned();
    let input = descriptor(0, cwd, stage.stdin.as_deref(), nix::libc::O_RDONLY);
    let output = descriptor(1, cwd, stage.stdout.as_deref(), nix::libc::O_WRONLY);
    let env: Vec<(OsString, OsString)> = std::env::vars_os().collect();
    let path = env.iter().find(|(n, _)| n == "PATH").map(|(_, v)| v.clone());
    let found =
        gateway.tools.on_path(path.as_deref(), &name, gateway.sessions.stage_programs()).await;
    let program = found.ok().flatten().unwrap_or_default();
    Enlisted {
        session: String::new(),
        pid: 0,
        name,
        program,
        argv: stage.argv.clone(),
        env,
        cwd: cwd.to_owned(),
        cwd_mount_id: None,
        umask: 0o022,
        descriptors: vec![input, output],
        ignored_signals: 0,
        blocked_signals: 0,
        limits: Vec::new(),
        nice: 0,
        mount_namespace: gateway.mount_namespace,
        window: None,
        childless: true,
        must_stay: None,
        has_own_rights: false,
        stays: None,
    }
}

fn descriptor(fd: u32, cwd: &Path, file: Option<&Path>, access: i32) -> Descriptor {
    let (kind, path) = match file {
        Some(path) if path == Path::new("/dev/null") => (DescriptorKind::Null, path.to_owned()),
        Some(path) => (DescriptorKind::File, cwd.join(path)),
        // To the next stage or to nowhere: like a terminal that the command does not query.
        None => (DescriptorKind::Pipe, PathBuf::from("pipe:[0]")),
    };
    Descriptor {
        fd,
        kind,
        path,
        identity: (0, u64::from(fd)),
        mount_id: None,
        flags: access.cast_unsigned(),
        offset: 0,
        on_mount: true,
        is_older: false,
        queued_bytes: 0,
        same_as: None,
    }
}

/// Report of a stage with unknown words.
#[must_use]
pub fn unknowable(stage: &Enlisted, reason: &str) -> StageReport {
    StageReport {
        command: stage.name.clone(),
        argv: stage
            .argv
            .iter()
            .map(|w| String::from_utf8_lossy(w.as_bytes()).into_owned())
            .collect(),
        placement: "unknown".to_owned(),
        reason: reason.to_owned(),
        status: None,
    }
}

/// Description of a split stage's join.
#[must_use]
pub fn joined(
    gateway: &Gateway,
    readings: &[Result<ResolvedCommand, LocalReason>],
    join: &Join,
    stage: usize,
) -> String {
    let Join::By { steps, at } = join else {
        return match join {
            Join::Parts => "each goes on in the next stage".to_owned(),
            _ => "joined in order".to_owned(),
        };
    };
    let at = match at {
        Site::Here => "here".to_owned(),
        Site::Executor(executor) => gateway.executors.get(*executor).name.to_string(),
    };
    let name =
        |stage: usize| readings[stage].as_ref().map_or("", |r| r.invocation.command.as_str());
    let merge = |by: usize| {
        let split = readings[by].as_ref().ok().and_then(|r| r.invocation.split.as_ref());
        match split.and_then(|s| s.aggregator.as_ref()) {
            Some(Aggregator::Merge { words, .. }) => join_words(words),
            _ => String::new(),
        }
    };
    let how = match *steps {
        Steps::Merge(by) => format!("joined by {}", merge(by)),
        Steps::MergeThenSame(by) => {
            format!("joined by {} and {} once more", merge(by), name(stage))
        }
        Steps::MergeCounted(by) => format!("joined by {} with their counts added", merge(by)),
        Steps::Same => format!("joined by {} once more", name(stage)),
        Steps::Own => format!("their results of {} joined", name(stage)),
    };
    format!("{how} ({at})")
}

fn join_words(words: &[OsString]) -> String {
    words.iter().map(|w| w.to_string_lossy()).collect::<Vec<_>>().join(" ")
}
