//! Chaos: pipelines under posh while their executor, the gateway, the link or the disk fails at a
//! chosen message of the protocol. Each must end with bash's result, or with a clear error and
//! without a partial result that looks complete; nothing runs twice, hangs, or is left behind.
//!
//! A proxy in front of the executor, which sees each message, injects the fault (`proxy`); `work`
//! has the pipelines, `verdict` judges the results.

mod faults;
mod proxy;
mod tally;
mod verdict;
mod work;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::error::{AttemptExt, LabError, Result};
use crate::generate::Numbers;
use crate::host::{CONFIG, HOME, Host, RUNTIME};
use crate::lab::{ExportSpec, Lab, LabSpec, ServerSpec};
use crate::oracle::{Script, Under};
use crate::programs::Programs;
use crate::quiet;
use crate::services;

pub use faults::{InjectedFault, Point};
use proxy::{PORT, Proxy};
pub use tally::ChaosTally;
use verdict::{EndedPipeline, Injected, LeftFiles, PipelineVerdict};
use work::{Effect, Work};

/// Size of the server's disk: enough for a few pipelines' files, and soon full.
const DISK_BYTES: u64 = 64 << 20;
/// Timeout for the gateway to find an executor again: it waits up to 20 s between two attempts.
const READY: Duration = Duration::from_secs(40);
const LOOK_AGAIN: Duration = Duration::from_millis(100);
/// A pipeline that takes longer hangs.
const LIMIT: Duration = Duration::from_secs(60);
/// Time after which a running process counts as left behind: killed runs continue for the grace
/// period of their connection.
const AFTERWARDS: Duration = Duration::from_secs(15);

/// Includes plans: placements explain failures.
const LOG: &str = "info,posh_gateway::dispatch=debug";

/// How much is done.
#[derive(Debug, Clone, clap::Args)]
pub struct ChaosOptions {
    /// How many pipelines.
    #[arg(long, default_value_t = 300)]
    pub pipelines: usize,
    /// Leave out those before this one: to try one again, `--first 288 --pipelines 289`.
    #[arg(long, default_value_t = 0)]
    pub first: usize,
    /// Which pipelines and faults.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Laboratories at the same time: most of the time is spent waiting.
    #[arg(long, default_value_t = 3)]
    pub labs: usize,
    /// Leave out faults that last until the pipeline's end: they take 10 s each.
    #[arg(long)]
    pub short: bool,
}

/// Runs all pipelines; returns the tally.
///
/// # Errors
/// The laboratory's own; faults of posh are in the tally.
pub fn run(options: &ChaosOptions, programs: &Programs) -> Result<ChaosTally> {
    let tally = Mutex::new(ChaosTally::default());
    let labs = options.labs.clamp(1, options.pipelines.max(1));
    std::thread::scope(|scope| {
        let tally = &tally;
        let start =
            |lab: usize| scope.spawn(move || in_one_lab(options, programs, lab, labs, tally));
        let running: Vec<_> = (0..labs).map(start).collect();
        running.into_iter().try_for_each(|lab| lab.join().expect("a laboratory does not panic"))
    })?;
    Ok(tally.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner))
}

fn in_one_lab(
    options: &ChaosOptions,
    programs: &Programs,
    number: usize,
    labs: usize,
    tally: &Mutex<ChaosTally>,
) -> Result<()> {
    let export = ExportSpec { size_bytes: Some(DISK_BYTES), ..ExportSpec::new("s1") };
    let server = ServerSpec { name: "store1".into(), exports: vec![export] };
    let spec = LabSpec { servers: vec![server], executors: false, ..LabSpec::default() };
    let lab = Lab::start(&spec, programs)?;
    let table = lab.mount_table().replace(&services::EXECUTOR_PORT.to_string(), &PORT.to_string());
    services::write_file(&lab.workstation, CONFIG, table.as_bytes())?;
    let site = ChaosSite { lab: &lab, originals: lab.workstation.path(HOME).join("originals") };
    services::write_file(&lab.servers[0].host, "/srv/s1/probe", b"here\n")?;
    work::make_files(&lab.workstation, &format!("{HOME}/originals"))?;
    std::thread::scope(|scope| {
        let proxy = Proxy::start(scope, &lab)?;
        for index in
            (number..options.pipelines).step_by(labs).filter(|index| *index >= options.first)
        {
            let injected = plan(options, index);
            let verdict = site.one(index, &injected, &proxy);
            let done = match verdict {
                Ok(verdict) => tally
                    .lock()
                    .unwrap_or_else(std::sync::PoisonError::into_inner)
                    .add(index, &injected, verdict),
                Err(error) => return Err(error),
            };
            if let Some(line) = done {
                eprintln!("{line}");
            }
        }
        proxy.end();
        Ok(())
    })?;
    site.look_for_remains(tally)
}

/// Chooses pipeline, fault and point.
fn plan(options: &ChaosOptions, index: usize) -> Injected {
    let mut numbers =
        Numbers::seeded(options.seed.wrapping_mul(1_000_003).wrapping_add(index as u64));
    for _ in 0..8 {
        numbers.below(2);
    }
    let mut pick =
        |count: usize| usize::try_from(numbers.below(count as u64)).expect("below a usize");
    // Points in turn, so that a short run covers each.
    let point = Point::ALL[index % Point::ALL.len()];
    let faults: Vec<InjectedFault> = InjectedFault::ALL
        .into_iter()
        .filter(|fault| !(options.short && fault.is_long()))
        .collect();
    let fault = faults[pick(faults.len())];
    let fitting: Vec<Work> = Work::all().into_iter().filter(|work| work.reaches(point)).collect();
    Injected { work: fitting[pick(fitting.len())].clone(), point, fault, after_chunks: 1 + pick(6) }
}

struct ChaosSite<'a> {
    lab: &'a Lab,
    originals: PathBuf,
}

impl ChaosSite<'_> {
    /// Waits until the gateway has found the executor again: it retries in intervals.
    fn wait_offloaded(&self) -> Result<()> {
        let end = Instant::now() + READY;
        loop {
            let script = Script::new("cat /mnt/s1/probe").variable("POSH_LOG", LOG);
            let outcome = script.run(&self.lab.workstation, Under::PoshExplained)?;
            if outcome
                .report()
                .pipelines
                .iter()
                .flat_map(|p| &p.stages)
                .any(|stage| stage.is_offloaded())
            {
                return Ok(());
            }
            if Instant::now() > end {
                let what = "a pipeline on the server, after all was healed".to_owned();
                return Err(LabError::Timeout { what, after: READY, detail: outcome.to_string() });
            }
            std::thread::sleep(LOOK_AGAIN);
        }
    }

    fn one(&self, index: usize, injected: &Injected, proxy: &Proxy) -> Result<PipelineVerdict> {
        let (own, theirs) = (format!("{HOME}/bash-{index}"), format!("/mnt/s1/posh-{index}"));
        let here = self.lab.workstation.path(&own);
        let there = self.lab.data(1).join(format!("posh-{index}"));
        for target in [&here, &there] {
            copy(&self.originals, target)?;
        }
        self.wait_offloaded()?;
        let script = |directory: &str| {
            let script = Script {
                directory: Some(directory.into()),
                limit: LIMIT,
                ..Script::new(injected.work.text)
            };
            let date = "2024-01-01T00:00:00Z";
            script
                .variable("POSH_LOG", LOG)
                .variable("GIT_AUTHOR_DATE", date)
                .variable("GIT_COMMITTER_DATE", date)
        };
        let bash = script(&own).run(&self.lab.workstation, Under::Shell)?;
        let before = self.log();
        proxy.arm(injected.point, injected.fault, injected.after_chunks);
        let posh = script(&theirs).run(&self.lab.workstation, Under::Posh);
        let ended = Instant::now();
        let fired = proxy.disarm().map(|fired| (fired, ended));
        let log = self.log();
        let log = log.strip_prefix(&before).unwrap_or(&log);
        let there_path =
            format!("{}/posh-{index}", self.lab.servers[0].spec.exports[0].directory());
        let left = |host: &Host, path: &str, directory: &Path| {
            let commits = injected.work.effect == Effect::Commits;
            let history = if commits { work::history(host, path)? } else { Vec::new() };
            Ok::<_, LabError>(LeftFiles { directory: directory.to_owned(), history })
        };
        let ours = left(&self.lab.workstation, &own, &here)?;
        let bash = EndedPipeline { outcome: &bash, left: &ours };
        let remote = left(&self.lab.servers[0].host, &there_path, &there)?;
        let verdict = verdict::judge(injected, &bash, posh, &remote, fired);
        let again = log.contains("run again here");
        let resumed = log.contains("goes on by a new connection");
        let verdict = PipelineVerdict { again, resumed, log: log.to_owned(), ..verdict };
        for target in [&here, &there] {
            fs::remove_dir_all(target).attempt(|| format!("remove {}", target.display()))?;
        }
        Ok(verdict)
    }

    /// Logs of the workstation's gateways: placements, repeated and resumed runs.
    fn log(&self) -> String {
        let mut files = quiet::files_below(&self.lab.workstation.path(RUNTIME)).unwrap_or_default();
        files.retain(|file| file.extension().is_some_and(|e| e == "log"));
        files
            .iter()
            .map(|file| String::from_utf8_lossy(&fs::read(file).unwrap_or_default()).into_owned())
            .collect()
    }

    /// Looks for processes, mounts and temporary files that are left behind.
    fn look_for_remains(&self, tally: &Mutex<ChaosTally>) -> Result<()> {
        let mut found = Vec::new();
        for host in [&self.lab.workstation, &self.lab.servers[0].host] {
            let processes = quiet::processes_left(host, AFTERWARDS)?;
            found.extend(
                processes.iter().map(|process| format!("left on {}: {process:?}", host.name())),
            );
        }
        let left =
            fs::read_dir(self.lab.data(1)).attempt(|| "list the server's directory".into())?;
        let left = left.flatten().filter(|entry| entry.file_name() != "probe");
        found.extend(left.map(|entry| format!("left on the server: {}", entry.path().display())));
        tally.lock().unwrap_or_else(std::sync::PoisonError::into_inner).remains.extend(found);
        Ok(())
    }
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    let mut command = std::process::Command::new("cp");
    let output = command.arg("-a").args([from, to]).output().attempt(|| "run cp".into())?;
    if output.status.success() {
        return Ok(());
    }
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    Err(LabError::Command { command: format!("{command:?}"), host: "this machine".into(), stderr })
}
