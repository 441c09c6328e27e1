//! Paired runs: the same commands under bash and under posh, in turns, each
//! command timed inside the shell that runs it, so that the shells' own start
//! does not count.

use std::fs;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use posh_integration::oracle::{Door, Script, Under};

use crate::sample::Samples;
use crate::site::Site;

/// Where a script leaves its times.
const TIMES: &str = "/tmp/times";
/// No run takes as long, not even on a busy machine.
const LIMIT: Duration = Duration::from_secs(120);

/// What is run in turns.
#[derive(Debug, Clone)]
pub struct Paired<'a> {
    /// One command line for the shell; it must succeed.
    pub command: &'a str,
    /// Done before each command, outside of the time.
    pub before_each: &'a str,
    /// So many at the start of each run are not counted: they fill the caches.
    pub warm_up: usize,
    /// How many are counted in each run.
    pub times: usize,
    /// How many runs under each shell.
    pub rounds: usize,
    /// How posh sees the commands.
    pub door: Door,
}

/// What paired runs gave, milliseconds: one median per run.
#[derive(Debug, Clone)]
pub struct Outcome {
    /// Under bash alone.
    pub bash: Samples,
    /// Under posh.
    pub posh: Samples,
    /// What posh took more than bash, pair by pair.
    pub extra: Samples,
}

impl Paired<'_> {
    /// Runs all rounds; which of the two begins changes from round to round.
    pub fn run(&self, site: &Site) -> Result<Outcome> {
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
        Ok(Outcome { bash: samples(bash)?, posh: samples(posh)?, extra: samples(extra)? })
    }

    /// The median of one run's commands, milliseconds.
    fn once(&self, site: &Site, under: Under) -> Result<f64> {
        let script = Script::new(self.text()).door(self.door);
        let mut command = script.command(site.host(), under);
        // Neither pipe nor file: what a command's output is makes a difference to posh.
        command.stdout(Stdio::null()).stderr(Stdio::null());
        let times = site.host().path(TIMES);
        let _ = fs::remove_file(&times);
        let mut process = site.host().spawn(command)?;
        if !process.wait_at_most(LIMIT)? {
            bail!("not over after {LIMIT:?}: {}", self.command);
        }
        if !process.wait()?.success() {
            // Once more, with its messages.
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
