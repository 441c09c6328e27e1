//! Judges one pipeline: bash's result, a clear error, or wrong.

use std::path::PathBuf;
use std::time::{Duration, Instant};
use std::{fs, io};

use super::faults::{InjectedFault, Point};
use super::proxy::LONG;
use super::work::{Effect, Work};
use crate::error::Result;
use crate::oracle::RunOutcome;
use crate::tree;

/// Limit of the time after a fault, and a margin for a busy machine.
const PATIENCE: Duration = Duration::from_secs(10);
const SLACK: Duration = Duration::from_millis(1500);
/// posh's exit status when it could not complete a command.
const EXIT_POSH_FAILED: i32 = 125;

/// One pipeline and its fault.
#[derive(Debug, Clone)]
pub struct Injected {
    pub work: Work,
    pub point: Point,
    pub fault: InjectedFault,
    /// For [`Point::Middle`].
    pub after_chunks: usize,
}

/// Kind of a result.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum How {
    /// As under bash.
    AsBash,
    /// An error that is reported.
    FailedCleanly,
    /// Neither; a description.
    Wrong(String),
}

/// Files that a pipeline left.
#[derive(Debug)]
pub struct LeftFiles {
    /// Its path for this process.
    pub directory: PathBuf,
    /// The commits in its repository, if it makes any.
    pub history: Vec<String>,
}

/// A pipeline that has ended under one shell.
#[derive(Debug, Clone, Copy)]
pub struct EndedPipeline<'a> {
    pub outcome: &'a RunOutcome,
    pub left: &'a LeftFiles,
}

/// Result of a pipeline.
#[derive(Debug, Clone)]
pub struct PipelineVerdict {
    pub how: How,
    /// The fault was injected; false if the pipeline has no such point.
    pub fired: bool,
    /// Time from the fault to the end.
    pub took: Duration,
    /// Commands were repeated locally.
    pub again: bool,
    /// A run was resumed on a new connection.
    pub resumed: bool,
    /// Log of the gateway meanwhile.
    pub log: String,
}

/// Reason why a result is wrong.
#[derive(Debug, thiserror::Error)]
enum WrongResult {
    #[error("another result with status 0; files: {0:?}")]
    Success(Vec<String>),
    #[error("another result without a word from posh; files: {0:?}")]
    Silent(Vec<String>),
    #[error("its output is not the beginning of bash's")]
    Output,
    #[error("an error that does not say what was lost")]
    UnclearError,
    #[error("a tree can't be read")]
    Tree,
    #[error("it only reads, and files have changed: {0:?}")]
    Changed(Vec<String>),
    #[error(transparent)]
    File(#[from] io::Error),
    #[error("{file} has {now} bytes and not the {once} of once, or others")]
    Appended { file: &'static str, now: usize, once: usize },
    #[error("committed twice: {0:?}")]
    CommittedTwice(Vec<String>),
}

/// Compares the results under bash and posh, and checks the time.
pub fn judge(
    injected: &Injected,
    bash: &EndedPipeline<'_>,
    posh: Result<RunOutcome>,
    left_by_posh: &LeftFiles,
    fired: Option<(Instant, Instant)>,
) -> PipelineVerdict {
    let took =
        fired.map_or(Duration::ZERO, |(fired, ended)| ended.saturating_duration_since(fired));
    let how = match posh {
        Err(error) => How::Wrong(format!("it hangs: {error}")),
        Ok(posh) => {
            match compare(injected, bash, &EndedPipeline { outcome: &posh, left: left_by_posh }) {
                Ok(how) if took > patience(injected) => {
                    How::Wrong(format!("it took {took:?} after the fault, {how:?}: {posh}"))
                }
                Ok(how) => how,
                Err(what) => {
                    How::Wrong(format!("{what}\n--- bash: {}\n--- posh: {posh}", bash.outcome))
                }
            }
        }
    };
    PipelineVerdict {
        how,
        fired: fired.is_some(),
        took,
        again: false,
        resumed: false,
        log: String::new(),
    }
}

/// Limit of the time after the fault. The first command may start before the shell has opened
/// another one's files. Over a link that is down the shell then waits for its mount, as under bash,
/// and posh can't report that.
fn patience(injected: &Injected) -> Duration {
    let is_opened_by_shell =
        ["< ", "> "].iter().any(|redirect| injected.work.text.contains(redirect));
    let may_be_ahead = matches!(injected.point, Point::BeforeSpecification | Point::BeforeStarted);
    match injected.fault {
        InjectedFault::CutForGood if is_opened_by_shell && may_be_ahead => LONG + PATIENCE + SLACK,
        _ => PATIENCE + SLACK,
    }
}

fn compare(
    injected: &Injected,
    bash: &EndedPipeline<'_>,
    posh: &EndedPipeline<'_>,
) -> std::result::Result<How, WrongResult> {
    let differences = differences(bash.left, posh.left)?;
    if bash.outcome == posh.outcome && differences.is_empty() {
        return Ok(How::AsBash);
    }
    once_only(injected.work.effect, bash.left, posh.left)?;
    let (bash, posh) = (bash.outcome, posh.outcome);
    let said = String::from_utf8_lossy(&posh.stderr);
    let full = injected.fault == InjectedFault::FullDisk && !posh.stderr.is_empty();
    if posh.status.success() {
        return Err(WrongResult::Success(differences));
    }
    if !said.contains("posh: ") && !full {
        return Err(WrongResult::Silent(differences));
    }
    if !bash.stdout.starts_with(&posh.stdout) {
        return Err(WrongResult::Output);
    }
    let is_lost = posh.status.code().is_some_and(|code| code == EXIT_POSH_FAILED) || full;
    if is_lost || said.contains("was lost") || said.contains("the gateway ended") {
        return Ok(How::FailedCleanly);
    }
    Err(WrongResult::UnclearError)
}

/// Paths at which the trees differ; repositories are compared by git.
fn differences(
    here: &LeftFiles,
    there: &LeftFiles,
) -> std::result::Result<Vec<String>, WrongResult> {
    let trees = [here, there].map(|left| tree::snapshot(&left.directory, &["repo/.git"]));
    let [Ok(left), Ok(right)] = trees else { return Err(WrongResult::Tree) };
    let mut differences = tree::differences(&left, &right);
    if here.history != there.history {
        differences.push(format!("history: {:?} / {:?}", here.history, there.history));
    }
    Ok(differences)
}

fn once_only(
    effect: Effect,
    here: &LeftFiles,
    there: &LeftFiles,
) -> std::result::Result<(), WrongResult> {
    match effect {
        Effect::Reads => match differences(here, there)? {
            changed if changed.is_empty() => Ok(()),
            changed => Err(WrongResult::Changed(changed)),
        },
        Effect::Writes => Ok(()),
        Effect::Appends(file) => {
            let read = |left: &LeftFiles| fs::read(left.directory.join(file));
            let (once, now) = (read(here)?, read(there)?);
            // The file may have all, a prefix, or nothing of the appended text; never more.
            if once.starts_with(&now) && now.starts_with(b"first\n") {
                return Ok(());
            }
            Err(WrongResult::Appended { file, now: now.len(), once: once.len() })
        }
        Effect::Commits => {
            let (once, now) = (here.history.len(), there.history.len());
            if now > once {
                Err(WrongResult::CommittedTwice(there.history.clone()))
            } else {
                Ok(())
            }
        }
    }
}
