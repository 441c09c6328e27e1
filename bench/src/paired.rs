//! Paired runs: the same commands under bash and under posh, in turns. Each command is timed inside
//! the shell that runs it, so that the shells' own start does not count.

use std::fs;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use posh_integration::oracle::{Door, Script, Under};

use crate::sample::Samples;
use crate::site::BenchSite;

/// File for a script's times.
const TIMES: &str = "/tmp/times";
/// Timeout of a run, far above its time on a busy machine.
const LIMIT: Duration = Duration::from_secs(120);

/// Description of paired runs.
#[derive(Debug, Clone)]
pub struct Paired<'a> {
    /// One command line for the shell; it must succeed.
    pub command: &'a str,
    /// Command before each timed one, not timed.
    pub before_each: &'a str,
    /// Commands at the start of each run that are not counted: they fill the caches.
    pub warm_up: usize,
    /// Commands that are counted in each run.
    pub times: usize,
    /// Runs under each shell.
    pub rounds: usize,
    /// Interception of the commands.
    pub door: Door,
}

/// Times of paired runs, milliseconds: one median per run.
#[derive(Debug, Clone)]
pub struct PairedTimes {
    /// Under bash alone.
    pub bash: Samples,
    /// Under posh.
    pub posh: Samples,
    /// Extra time under posh, pair by pair.
    pub extra: Samples,
}

impl Paired<'_> {
    /// Runs all rounds; which of the two begins alternates.
    pub fn run(&self, site: &BenchSite) -> Result<PairedTimes> {
        let (mut bash, mut posh) = (Vec::new(), Vec::new());
        for round in 0..self.rounds {
            for turn in 0..2 {
                if (round + turn) % 2 == 0 {
                    bash.push(self.once(site, Under::Shell)?);
                } else {
                    posh.push(self.once(site, Under::Posh)?);
                }
            }
        }
        let extra = posh.iter().zip(&bash).map(|(posh, bash)| posh - bash).collect();
        let samples = |values| Samples::new(values).context("no round was run");
        Ok(PairedTimes { bash: samples(bash)?, posh: samples(posh)?, extra: samples(extra)? })
    }

    /// The median of one run's commands, milliseconds.
    fn once(&self, site: &BenchSite, under: Under) -> Result<f64> {
        let script = Script::new(self.text()).door(self.door);
        let mut command = script.command(site.host(), under);
        // /dev/null: posh treats pipes and files differently.
        command.stdout(Stdio::null()).stderr(Stdio::null());
        let times = site.host().path(TIMES);
        let _ = fs::remove_file(&times);
        let mut process = site.host().spawn(command)?;
        if !process.wait_at_most(LIMIT)? {
            bail!("not over after {LIMIT:?}: {}", self.command);
        }
        if !process.wait()?.success() {
            // Again, to show its messages.
            let again = script.run(site.host(), under)?;
            bail!("this failed: {}\n{again}", self.command);
        }
        let text = fs::read_to_string(&times)
            .with_context(|| format!("cannot read {}", times.display()))?;
        let micros: Vec<f64> =
            text.lines().skip(self.warm_up).map(str::parse).collect::<Result<_, _>>()?;
        if micros.len() != self.times {
            bail!("{} times instead of {} of: {}", micros.len(), self.times, self.command);
        }
        Ok(Samples::new(micros).context("no times")?.median() / 1000.0)
    }

    fn text(&self) -> String {
        let Paired { command, before_each, warm_up, times, .. } = self;
        format!(
            "times=()\n\
             for ((i = 0; i < {count}; i++)); do\n{before_each}\n\
             before=$EPOCHREALTIME\n{command} || exit\nafter=$EPOCHREALTIME\n\
             times+=($((${{after/./}} - ${{before/./}})))\n\
             done\nprintf '%s\\n' \"${{times[@]}}\" > {TIMES}\n",
            count = warm_up + times
        )
    }
}
