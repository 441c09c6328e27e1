//! Coherence of volumes as numbers: random commands, most of them on the server, in turns with
//! changes and reads by programs of the workstation, while the link is cut now and then. After each
//! step every name, content and attribute of the volume is compared with the server's directory,
//! and with a plain one in which bash did the same.
//!
//! Also measures how soon a change by another client is seen (`client`). `steps` has the steps,
//! `look` compares, `tally` counts.

mod client;
mod look;
mod session;
mod steps;
mod tally;

use std::fs::{self, File};
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use crate::error::{AttemptExt, LabError, Result};
use crate::generate::Numbers;
use crate::host::HOME;
use crate::lab::{Lab, LabSpec};
use crate::network;
use crate::oracle::Under;
use crate::programs::Programs;
use crate::volumes::Mounts;

use look::Handles;
use session::RunningShell;
use steps::InterleaveStep;
pub use tally::InterleaveTally;

/// Directory below the mount, so that the volume's root changes too.
const BELOW: &str = "w";
/// Cuts last from almost no time to a second, which TCP survives.
const SHORTEST_CUT: Duration = Duration::from_millis(50);
const CUT_SPREAD_MS: u64 = 950;
/// A cut begins within this time after its command.
const CUT_BEGINS_MS: u64 = 25;

/// How much is done.
#[derive(Debug, Clone, clap::Args)]
pub struct InterleaveOptions {
    /// How many steps.
    #[arg(long, default_value_t = 1000)]
    pub steps: usize,
    /// Which steps.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// The link is cut during one of so many steps; 0: never.
    #[arg(long, default_value_t = 50)]
    pub cut_every: u64,
    /// How many changes by another client are timed.
    #[arg(long, default_value_t = 200)]
    pub changes: usize,
    /// Tell each step.
    #[arg(long)]
    pub verbose: bool,
}

/// Runs all steps; returns the tally.
///
/// # Errors
/// The laboratory's own; faults of volumes are in the tally.
pub fn run(options: &InterleaveOptions, programs: &Programs) -> Result<InterleaveTally> {
    let lab = Lab::start(&LabSpec::servers(1).mounts(Mounts::Volume), programs)?;
    let mut site = InterleaveSite::start(&lab, options)?;
    for number in 0..options.steps {
        let told = site.one(number)?;
        if options.verbose {
            eprintln!("{told}");
        }
    }
    let mut tally = site.end()?;
    tally.seen = client::delays(&lab, options.changes)?;
    Ok(tally)
}

struct InterleaveSite<'a> {
    lab: &'a Lab,
    numbers: Numbers,
    cut_every: u64,
    volume: RunningShell,
    plain: RunningShell,
    /// Paths, for this process, of the volume, its server, and the plain directory for bash.
    roots: [PathBuf; 3],
    handles: Handles,
    tally: InterleaveTally,
}

impl<'a> InterleaveSite<'a> {
    fn start(lab: &'a Lab, options: &InterleaveOptions) -> Result<Self> {
        let (here, there) = (lab.mount(1).join(BELOW), lab.data(1).join(BELOW));
        let plain = format!("{HOME}/plain");
        let host = &lab.workstation;
        for directory in [host.path(&here), host.path(&plain)] {
            fs::create_dir(&directory).attempt(|| format!("make {}", directory.display()))?;
        }
        let roots = [host.path(&here), there, host.path(&plain)];
        let volume = RunningShell::start(host, Under::PoshExplained, &here)?;
        let plain = RunningShell::start(host, Under::Shell, plain.as_ref())?;
        let numbers = Numbers::seeded(options.seed);
        let (handles, tally) = (Handles::default(), InterleaveTally::default());
        Ok(InterleaveSite {
            lab,
            numbers,
            cut_every: options.cut_every,
            volume,
            plain,
            roots,
            handles,
            tally,
        })
    }

    /// Runs one step; returns its description.
    fn one(&mut self, number: usize) -> Result<String> {
        let step = InterleaveStep::any(&mut self.numbers);
        let is_cut = self.cut_every > 0 && self.numbers.below(self.cut_every) == 0;
        let begun = Instant::now();
        let mut faults = match &step {
            InterleaveStep::Here(change) => {
                let [volume, _, plain] = &self.roots;
                let (ours, plain) = (change.carry_out(volume), change.carry_out(plain));
                let differs = (ours != plain)
                    .then(|| format!("it gave {ours:?}, and {plain:?} on a plain directory"));
                differs.into_iter().collect()
            }
            InterleaveStep::Command(line) if is_cut => self.command_with_cut(line)?,
            InterleaveStep::Command(line) => self.command(line)?,
        };
        self.tally.note_step(&step, is_cut, begun.elapsed());
        faults.extend(self.look());
        let told = format!("step {number}, {step}{}", if is_cut { ", link cut" } else { "" });
        faults.iter().for_each(|fault| self.tally.note_fault(format!("{told}: {fault}")));
        look::bound(&self.roots[0], &self.roots[2])?;
        self.handles.change(&mut self.numbers, &self.roots);
        Ok(told)
    }

    fn command(&mut self, line: &str) -> Result<Vec<String>> {
        self.volume.begin(line)?;
        self.plain.begin(line)?;
        let (ours, bash) = (self.volume.status()?, self.plain.status()?);
        let differs = (ours != bash).then(|| format!("status {ours}, and {bash} under bash"));
        Ok(differs.into_iter().collect())
    }

    /// Cuts the link while the command is about to begin, running, or at its end. It may fail then,
    /// as on any mount, but its changes are seen.
    fn command_with_cut(&mut self, line: &str) -> Result<Vec<String>> {
        let before = self.numbers.below(2) == 0;
        let lasts = SHORTEST_CUT + Duration::from_millis(self.numbers.below(CUT_SPREAD_MS));
        let begins = Duration::from_millis(self.numbers.below(CUT_BEGINS_MS));
        if before {
            network::set_link(&self.lab.workstation, 1, network::LinkState::Down)?;
            self.volume.begin(line)?;
        } else {
            self.volume.begin(line)?;
            thread::sleep(begins);
            network::set_link(&self.lab.workstation, 1, network::LinkState::Down)?;
        }
        self.plain.begin(line)?;
        thread::sleep(lasts);
        network::set_link(&self.lab.workstation, 1, network::LinkState::Up)?;
        let (ours, bash) = (self.volume.status()?, self.plain.status()?);
        if ours != bash {
            self.tally.failed_by_cut += 1;
            look::copy(&self.roots[1], &self.roots[2])?;
        }
        Ok(Vec::new())
    }

    /// Compares everything in the three trees.
    fn look(&mut self) -> Vec<String> {
        // The workstation's own changes are flushed to the server when they are read on it, or by
        // this sync.
        let sent = File::open(&self.roots[0]).and_then(|root| root.sync_all());
        let mut faults: Vec<String> =
            sent.err().map(|error| format!("a sync fails: {error}")).into_iter().collect();
        let stale = look::differences(&self.roots, &mut self.tally.reads);
        self.tally.stale += usize::from(!stale.is_empty());
        faults.extend(stale);
        faults.extend(self.handles.differences(&mut self.tally.reads));
        faults
    }

    /// Ends the sessions; their report has the placements.
    fn end(self) -> Result<InterleaveTally> {
        let mut tally = self.tally;
        self.plain.end()?;
        let report = self
            .volume
            .end()?
            .ok_or_else(|| LabError::Report("the session explained nothing".to_owned()))?;
        tally.note_report(&report);
        Ok(tally)
    }
}
