//! Runs many cases: several workers, each with machines of its own, take one case after the other.
//! A laboratory in which a script hung is replaced.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::site::{CaseSettings, CaseSite, RunMode};
use super::{Case, Oracle, judge};
use crate::error::{LabError, Result};
use crate::volumes::Mounts;

/// Attempts at the placement of a case. Pipelines are assembled against deadlines, which a busy
/// machine may miss: then a stage runs on the workstation, correct but slow. Wrong output is never
/// retried.
const TRIES: usize = 3;

/// Result of one case.
#[derive(Debug)]
pub struct CaseVerdict {
    /// Index among the cases that were run.
    pub number: usize,
    /// Differences between posh and its shell, and commands that did not run where they must.
    pub faults: Vec<String>,
    /// Differences of the shell itself between the mount and a local copy.
    pub by_mount: Vec<String>,
    /// Some stage ran on a server.
    pub offloaded: bool,
    /// Attempts with the right output but the wrong placement, before the right one.
    pub missed: usize,
    /// Placement of every stage and its reason.
    pub placements: String,
    /// Time of all runs together.
    pub wall: Duration,
}

impl CaseVerdict {
    /// Verdict of a run that did not end, or could not be started.
    fn broken(number: usize, error: &LabError) -> CaseVerdict {
        let faults = vec![error.to_string()];
        CaseVerdict {
            number,
            faults,
            by_mount: Vec::new(),
            offloaded: false,
            missed: 0,
            placements: String::new(),
            wall: Duration::ZERO,
        }
    }
}

/// Runs all `cases`; calls `done` with each verdict. Returns the verdicts in the cases' order.
pub fn run(
    cases: &[Case],
    setting: &CaseSettings,
    jobs: usize,
    done: &(dyn Fn(&CaseVerdict) + Sync),
) -> Result<Vec<CaseVerdict>> {
    let next = AtomicUsize::new(0);
    let verdicts = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        let work = || -> Result<()> {
            let mut site = CaseSite::start(setting)?;
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                let Some(case) = cases.get(number) else { return Ok(()) };
                let verdict = match try_case(&mut site, case, number) {
                    Ok(verdict) => verdict,
                    Err(error) => {
                        site = CaseSite::start(setting)?;
                        CaseVerdict::broken(number, &error)
                    }
                };
                done(&verdict);
                verdicts.lock().unwrap_or_else(PoisonError::into_inner).push(verdict);
            }
        };
        let workers: Vec<_> = (0..jobs.max(1)).map(|_| scope.spawn(work)).collect();
        workers.into_iter().try_for_each(|worker| worker.join().expect("a worker does not panic"))
    })?;
    let mut verdicts = verdicts.into_inner().unwrap_or_else(PoisonError::into_inner);
    verdicts.sort_by_key(|verdict| verdict.number);
    Ok(verdicts)
}

fn try_case(site: &mut CaseSite, case: &Case, number: usize) -> Result<CaseVerdict> {
    let start = Instant::now();
    let copy = site.run(case, RunMode::Copy)?;
    let mount = site.run(case, RunMode::Mount)?;
    let oracle = match case.oracle {
        Oracle::Mount => &mount,
        Oracle::Local => &copy,
    };
    let mut missed = 0;
    let (posh, mut faults) = loop {
        let posh = site.run(case, RunMode::Posh)?;
        let mut faults = judge::differing(case, oracle, &posh);
        let misplaced = judge::misplaced(case, posh.outcome.report(), site.mounts());
        if faults.is_empty() && !misplaced.is_empty() && missed + 1 < TRIES {
            missed += 1;
            continue;
        }
        faults.extend(misplaced);
        break (posh, faults);
    };
    if site.mounts() == Mounts::AtHand {
        let untold = site.run(case, RunMode::PoshUntold)?;
        faults.extend(
            judge::differing(case, oracle, &untold)
                .into_iter()
                .map(|fault| format!("untold: {fault}")),
        );
    }
    let known = !case.known.is_empty();
    match (known, faults.is_empty()) {
        (true, true) => {
            faults.push(format!("no difference any more; remove `known: {}`", case.known.trim()))
        }
        (true, false) => faults.clear(),
        (false, _) => {}
    }
    let report = posh.outcome.report();
    Ok(CaseVerdict {
        number,
        faults,
        by_mount: judge::differing(case, &copy, &mount),
        offloaded: judge::offloaded(report),
        missed,
        placements: judge::placements(report),
        wall: start.elapsed(),
    })
}
