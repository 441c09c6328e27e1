//! The bench of the README's table: workloads after the paper's §7.1 and further ones, over an
//! emulated link, under bash on the server, bash over sshfs, ssh by hand, GNU parallel and posh,
//! side by side in one run.

mod catalogue;
mod cell;
mod data;
mod place;
mod plot;
mod report;
mod results;
mod sweeps;
mod system;
mod targets;
mod usage;
mod verify;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use posh_integration::generate::Numbers;
use posh_integration::network;
use posh_integration::wire::{self, Profile};

use crate::machine::{self, Machine};
use catalogue::{ALL, DataSize, ONE_COMMAND, USUAL_LIMIT_S, Workload};
use cell::{OpenCell, Terms};
use place::RunPlace;
use results::{Cell, MeasuredLink, Results, WorkloadInput};
use system::System;
use verify::Fingerprint;

/// Selection and extent of the bench.
#[derive(Debug, Clone, clap::Args)]
pub struct TableOptions {
    /// Only these workloads; without, all of them, and the rows beside the table.
    #[arg(value_name = "WORKLOAD", value_parser = by_name)]
    workloads: Vec<&'static Workload>,
    /// The link to the servers: wan (20 ms, 600 Mbit/s), lan, wifi, or MILLISECONDS:MEGABITS.
    #[arg(long, value_name = "LINK", default_value = "wan")]
    profile: String,
    /// How much data.
    #[arg(long, value_enum, default_value = "s")]
    size: DataSize,
    /// How often each cell is run; slow ones less often.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u8).range(1..))]
    runs: u8,
    /// Decides the order of the systems; else the time does.
    #[arg(long)]
    seed: Option<u64>,
    /// When a run is ended, seconds, if not sooner; its cell is a lower bound then.
    #[arg(long, value_name = "SECONDS", default_value_t = 900)]
    limit: u64,
    /// Keeps the servers' data in this directory of a disk instead of in memory.
    #[arg(long, value_name = "DIRECTORY")]
    storage: Option<PathBuf>,
    /// The workloads, measured anew, take the place of what the full results of the profile and
    /// size have of them.
    #[arg(long, requires = "workloads")]
    again: bool,
    /// Only writes the report anew, from the results that are there.
    #[arg(long)]
    report_only: bool,
}

/// Time after which the bench gives no run more than the usual limit, so that it ends.
const LONG_RUNS_UNTIL: Duration = Duration::from_secs(40 * 60);

fn by_name(name: &str) -> Result<&'static Workload> {
    let names = || ALL.iter().chain([&ONE_COMMAND]).map(|w| w.name).collect::<Vec<_>>().join(", ");
    let found = Workload::named(name).or((name == ONE_COMMAND.name).then_some(&ONE_COMMAND));
    found.with_context(|| format!("the workloads are {}", names()))
}

/// Runs everything, writes results and report; an error if systems gave different results.
pub fn run(options: &TableOptions) -> Result<()> {
    if options.report_only {
        return report::write_all();
    }
    let link: Profile = options.profile.parse()?;
    let mut bench = Bench::start(options, link)?;
    let chosen: Vec<&'static Workload> = if bench.results.partial {
        options.workloads.clone()
    } else {
        ALL.iter().chain([&ONE_COMMAND]).collect()
    };
    for (done, workload) in chosen.iter().enumerate() {
        bench.workload(workload)?;
        let left = bench.began.elapsed().as_secs_f64() / (done + 1) as f64
            * (chosen.len() - done - 1) as f64;
        eprintln!(
            "{} of {} workloads; about {:.0} min left\n",
            done + 1,
            chosen.len(),
            left / 60.0
        );
    }
    bench.place.clear()?;
    if !bench.results.partial || chosen.iter().any(|w| w.name == ONE_COMMAND.name) {
        bench.results.latency = sweeps::latency(link.megabits)?;
    }
    bench.finish(options.again)
}

struct Bench {
    place: RunPlace,
    terms: Terms,
    order: Numbers,
    began: Instant,
    results: Results,
}

impl Bench {
    fn start(options: &TableOptions, link: Profile) -> Result<Bench> {
        let between = Profile::LAN;
        let most = ALL.iter().map(|w| w.servers).max().unwrap_or(1);
        let place = RunPlace::start(link, between, most, options.storage.as_deref())?;
        let seed = options.seed.unwrap_or_else(seed_of_now);
        let results = Results {
            name: format!("{}-{}", options.profile.replace(':', "x"), options.size.letter()),
            partial: !options.workloads.is_empty(),
            link: check(&place, link, None, 1)?,
            between: check(&place, between, Some(1), 2)?,
            size: options.size.letter(),
            runs: usize::from(options.runs),
            seed,
            storage: options.storage.as_ref().map_or("memory".into(), |d| d.display().to_string()),
            machine: Machine::describe(),
            load_after: 0.0,
            took_s: 0.0,
            order: Vec::new(),
            inputs: Vec::new(),
            cells: Vec::new(),
            latency: Vec::new(),
            splits: Vec::new(),
            faults: Vec::new(),
            again: Vec::new(),
        };
        let terms = Terms { size: options.size, limit: Duration::from_secs(options.limit) };
        Ok(Bench { place, terms, order: Numbers::seeded(seed), began: Instant::now(), results })
    }

    /// Runs all systems, in turns.
    fn workload(&mut self, workload: &'static Workload) -> Result<()> {
        eprintln!("{}: {}", workload.name, workload.words);
        let input_bytes = self.make_input(workload)?;
        let mut cells: Vec<OpenCell> =
            System::of(workload).into_iter().map(|s| OpenCell::new(workload, s)).collect();
        let mut expected = None;
        for round in 1..=self.results.runs {
            for index in shuffled(cells.len(), &mut self.order) {
                if !cells[index].is_done() {
                    self.run(&mut cells[index], round, &mut expected);
                }
            }
        }
        for cell in cells {
            self.close(cell);
        }
        if workload.splits {
            let runs = self.results.runs;
            let splits = sweeps::split(&mut self.place, workload, self.terms, runs, input_bytes)?;
            self.results.splits.extend(splits);
        }
        self.remove_input(workload)
    }

    /// Runs a cell once. A fault is recorded, and reported at the end of the bench.
    fn run(
        &mut self,
        cell: &mut OpenCell,
        round: usize,
        expected: &mut Option<(System, Fingerprint)>,
    ) {
        let (name, system) = (cell.workload.name, cell.system);
        self.results.order.push(format!("{name} {}", system.name()));
        if self.began.elapsed() > LONG_RUNS_UNTIL {
            self.terms.limit = self.terms.limit.min(Duration::from_secs(USUAL_LIMIT_S));
        }
        let fault = match cell.run(&mut self.place, self.terms) {
            Err(error) => Some(format!("{name} under {}: {error:#}", system.name())),
            Ok(trial) => {
                let (over, seconds) =
                    (if trial.outcome.is_none() { "> " } else { "" }, trial.seconds);
                let elapsed = self.began.elapsed().as_secs();
                let clock = format!("[{:2}:{:02}]", elapsed / 60, elapsed % 60);
                eprintln!("  {clock} {:14} run {round}: {over}{seconds:.3} s", system.name());
                trial
                    .fingerprint
                    .clone()
                    .and_then(|found| difference(name, system, found, expected))
            }
        };
        if let Some(fault) = fault {
            eprintln!("  FAULT: {fault}");
            self.results.faults.push(fault);
        }
    }

    fn close(&mut self, cell: OpenCell) {
        let (workload, system) = (cell.workload, cell.system);
        // A run that exceeded its limit would exceed it again.
        let explain = system.is_posh() && !cell.is_limited();
        let explained =
            explain.then(|| cell::explained(&mut self.place, workload, system, self.terms));
        let explained = match explained.transpose() {
            Ok(report) => report,
            Err(error) => {
                eprintln!("  FAULT: {error:#}");
                self.results.faults.push(format!("{error:#}"));
                None
            }
        };
        let closed: Option<Cell> = cell.close(explained);
        self.results.cells.extend(closed);
    }

    fn make_input(&mut self, workload: &'static Workload) -> Result<u64> {
        let stores = self.place.stores(workload);
        for store in &stores {
            std::fs::create_dir(store.data())
                .with_context(|| format!("cannot make {}", store.directory.display()))?;
        }
        (workload.make)(&stores, workload.amount(self.terms.size))
            .with_context(|| format!("cannot make the input of {}", workload.name))?;
        let (mut files, mut bytes) = (0, 0);
        for store in &stores {
            let extent = data::extent(&store.data())?;
            (files, bytes) = (files + extent.0, bytes + extent.1);
        }
        let (name, words) = (workload.name.to_owned(), workload.words.to_owned());
        self.results.inputs.push(WorkloadInput { workload: name, words, files, bytes });
        Ok(bytes)
    }

    /// Removes the input, which occupies memory.
    fn remove_input(&mut self, workload: &'static Workload) -> Result<()> {
        self.place.clear()?;
        for store in self.place.stores(workload) {
            std::fs::remove_dir_all(store.data()).context("cannot remove the input")?;
        }
        Ok(())
    }

    fn finish(mut self, again: bool) -> Result<()> {
        self.results.load_after = machine::load();
        self.results.took_s = self.began.elapsed().as_secs_f64();
        let results = if again { report::with_the_rest(self.results)? } else { self.results };
        report::keep(&results)?;
        let faults = &results.faults;
        ensure!(faults.is_empty(), "{} faults:\n{}", faults.len(), faults.join("\n"));
        Ok(())
    }
}

/// Compares with the first fingerprint, the reference of all others.
fn difference(
    name: &str,
    system: System,
    found: Fingerprint,
    expected: &mut Option<(System, Fingerprint)>,
) -> Option<String> {
    match expected {
        None => {
            *expected = Some((system, found));
            None
        }
        Some((first, fingerprint)) => fingerprint.differences(&found).map(|what| {
            format!("{name}: {} and {} gave different results: {what}", first.name(), system.name())
        }),
    }
}

/// Measures the link between the workstation (or a server) and a server.
fn check(place: &RunPlace, asked: Profile, from: Option<usize>, to: usize) -> Result<MeasuredLink> {
    let lab = &place.lab;
    let near = from.map_or(&lab.workstation, |number| &lab.servers[number - 1].host);
    let found = wire::check::measure(near, &lab.servers[to - 1].host, &network::addresses(to).1)?;
    eprintln!("link of {asked}: measured {found}");
    Ok(MeasuredLink {
        round_trip_ms: asked.round_trip.as_secs_f64() * 1e3,
        megabits: asked.megabits,
        measured_ms: found.round_trip.as_secs_f64() * 1e3,
        measured_out: found.megabits_out,
        measured_back: found.megabits_back,
    })
}

/// A random permutation of the numbers below `count` (Fisher and Yates).
fn shuffled(count: usize, numbers: &mut Numbers) -> Vec<usize> {
    let mut order: Vec<usize> = (0..count).collect();
    for last in (1..count).rev() {
        order.swap(last, numbers.below(last as u64 + 1) as usize);
    }
    order
}

fn seed_of_now() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.map_or(1, |d| d.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_order_depends_on_the_seed_only() {
        let order = |seed| shuffled(9, &mut Numbers::seeded(seed));
        assert_eq!(order(7), order(7));
        assert_ne!(order(7), order(8));
        let mut sorted = order(7);
        sorted.sort_unstable();
        assert_eq!(sorted, (0..9).collect::<Vec<_>>());
    }

    #[test]
    fn every_workload_is_found_by_its_name() {
        for workload in ALL.iter().chain([&ONE_COMMAND]) {
            assert_eq!(by_name(workload.name).unwrap().name, workload.name);
        }
        assert!(by_name("nothing").is_err());
    }
}
