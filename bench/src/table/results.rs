//! Results of a run of the bench, as stored in bench/results and read for the report. Times are
//! seconds unless a name says otherwise.

use serde::{Deserialize, Serialize};

use crate::machine::Machine;
use crate::sample::{Samples, Summary};

/// All of one run of the bench.
#[derive(Debug, Serialize, Deserialize)]
pub struct Results {
    /// Profile and size, such as `wan-s`.
    pub name: String,
    /// Only some workloads were run.
    pub partial: bool,
    /// The link as asked for.
    pub link: MeasuredLink,
    /// The link between the servers as asked for.
    pub between: MeasuredLink,
    /// `s`, `m` or `l`.
    pub size: char,
    /// Intended runs of each cell.
    pub runs: usize,
    /// Seed of the order of the systems.
    pub seed: u64,
    /// Place of the servers' data.
    pub storage: String,
    /// Machine and time.
    pub machine: Machine,
    /// Load average of the last minute after the run.
    pub load_after: f64,
    /// Duration of the whole run.
    pub took_s: f64,
    /// Runs in their order: `workload system`.
    pub order: Vec<String>,
    /// Input of each workload.
    pub inputs: Vec<WorkloadInput>,
    /// One for each workload and system.
    pub cells: Vec<Cell>,
    /// Latencies of single commands in a warm session.
    pub latency: Vec<Latency>,
    /// Throughput with different split factors.
    pub splits: Vec<Split>,
    /// Faults: outputs that differ, commands that failed.
    pub faults: Vec<String>,
    /// Workloads whose cells are from a later run, for all systems.
    #[serde(default)]
    pub again: Vec<Again>,
}

/// Workloads that were measured anew.
#[derive(Debug, Serialize, Deserialize)]
pub struct Again {
    /// Names of the workloads.
    pub workloads: Vec<String>,
    /// Machine and time.
    pub machine: Machine,
    /// Intended runs of each cell.
    pub runs: usize,
}

/// A link, requested and measured.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct MeasuredLink {
    /// Requested round-trip time.
    pub round_trip_ms: f64,
    /// Requested rate in each direction.
    pub megabits: u32,
    /// Measured round-trip time of small messages.
    pub measured_ms: f64,
    /// Measured rate of one TCP connection to the server.
    pub measured_out: f64,
    /// Measured rate of one TCP connection from the server.
    pub measured_back: f64,
}

/// A workload's input.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct WorkloadInput {
    /// The workload.
    pub workload: String,
    /// Description.
    pub words: String,
    /// Number of files on all servers.
    pub files: u64,
    /// Bytes of all files.
    pub bytes: u64,
}

/// One workload under one system.
#[derive(Debug, Serialize, Deserialize)]
pub struct Cell {
    /// The workload.
    pub workload: String,
    /// The system, see `System::name`.
    pub system: String,
    /// One for each run; the limit for a run that did not end.
    pub seconds: Samples,
    /// Statistics of `seconds`.
    pub summary: Summary,
    /// A run did not end within the limit: `seconds` is a lower bound.
    pub limited: bool,
    /// Bytes on the workstation's interfaces, both directions, mounts included; the median.
    pub bytes: f64,
    /// Statistics of posh, for its systems.
    pub posh: Option<Explained>,
}

/// posh's own statistics of a cell.
#[derive(Debug, Serialize, Deserialize)]
pub struct Explained {
    /// Number of pipelines that posh saw.
    pub pipelines: usize,
    /// Median setup time of pipelines with an offloaded command, milliseconds.
    pub setup_ms: f64,
    /// Number of stages that ran on a server.
    pub there: usize,
    /// Stages that ran on the workstation: command, reason, count.
    pub here: Vec<(String, String, usize)>,
    /// Usage in the last run.
    pub gateway: ProgramUsage,
    /// Usage in the last run, all executors together.
    pub executors: ProgramUsage,
}

/// Resource usage of a program.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub struct ProgramUsage {
    /// User and system time.
    pub cpu_s: f64,
    /// Peak resident memory; of several processes, the largest.
    pub peak_mib: f64,
}

/// Latency of one small command at one round trip.
#[derive(Debug, Serialize, Deserialize)]
pub struct Latency {
    /// The round trip.
    pub round_trip_ms: f64,
    /// The system.
    pub system: String,
    /// Times of single commands.
    pub milliseconds: Samples,
    /// Statistics of `milliseconds`.
    pub summary: Summary,
}

/// Times of one workload with a split factor.
#[derive(Debug, Serialize, Deserialize)]
pub struct Split {
    /// The workload.
    pub workload: String,
    /// `--split`.
    pub parts: usize,
    /// Time of each run.
    pub seconds: Samples,
    /// Median rate, bytes of input per second in units of 1,000,000.
    pub megabytes_per_second: f64,
}

impl Results {
    /// A cell that was run.
    pub fn cell(&self, workload: &str, system: &str) -> Option<&Cell> {
        self.cells.iter().find(|c| c.workload == workload && c.system == system)
    }

    /// Replaces the results of workloads that were measured again by all systems.
    pub fn take_in(&mut self, anew: Results) {
        let workloads: Vec<String> =
            anew.inputs.iter().map(|input| input.workload.clone()).collect();
        let is_anew = |name: &str| workloads.iter().any(|workload| workload == name);
        self.cells.retain(|cell| !is_anew(&cell.workload));
        self.inputs.retain(|input| !is_anew(&input.workload));
        self.splits.retain(|split| !is_anew(&split.workload));
        self.faults.retain(|fault| !is_anew(fault.split([' ', ':']).next().unwrap_or_default()));
        for again in &mut self.again {
            again.workloads.retain(|workload| !is_anew(workload));
        }
        self.again.retain(|again| !again.workloads.is_empty());
        self.cells.extend(anew.cells);
        self.inputs.extend(anew.inputs);
        self.splits.extend(anew.splits);
        self.faults.extend(anew.faults);
        if !anew.latency.is_empty() {
            self.latency = anew.latency;
        }
        self.again.push(Again { workloads, machine: anew.machine, runs: anew.runs });
    }
}

#[cfg(test)]
impl Results {
    /// Results with these cells only.
    pub fn of_cells(cells: Vec<Cell>) -> Results {
        let link = MeasuredLink {
            round_trip_ms: 20.0,
            megabits: 600,
            measured_ms: 20.0,
            measured_out: 0.0,
            measured_back: 0.0,
        };
        Results {
            name: "wan-s".into(),
            partial: false,
            link: link.clone(),
            between: link,
            size: 's',
            runs: 1,
            seed: 1,
            storage: "memory".into(),
            machine: Machine::describe(),
            load_after: 0.0,
            took_s: 0.0,
            order: Vec::new(),
            inputs: Vec::new(),
            cells,
            latency: Vec::new(),
            splits: Vec::new(),
            faults: Vec::new(),
            again: Vec::new(),
        }
    }
}

impl Cell {
    /// The median.
    pub fn median(&self) -> f64 {
        self.summary.median
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn results(faults: &[&str], workloads: &[&str], seconds: f64) -> Results {
        let cell = |workload: &&str| {
            let seconds = Samples::one(seconds);
            let (workload, system) = ((*workload).to_owned(), "posh".to_owned());
            Cell {
                workload,
                system,
                summary: seconds.summary(),
                seconds,
                limited: false,
                bytes: 0.0,
                posh: None,
            }
        };
        let input = |workload: &&str| WorkloadInput {
            workload: (*workload).into(),
            words: String::new(),
            files: 0,
            bytes: 0,
        };
        Results {
            faults: faults.iter().map(|fault| (*fault).to_owned()).collect(),
            inputs: workloads.iter().map(input).collect(),
            ..Results::of_cells(workloads.iter().map(cell).collect())
        }
    }

    #[test]
    fn what_was_measured_anew_replaces_all_that_was_known_of_it() {
        let mut all = results(
            &["walk: a and b differ", "walk-again: c", "walk under posh: d"],
            &["walk", "walk-again"],
            1.0,
        );
        all.take_in(results(&[], &["walk"], 2.0));
        let seconds = |workload| all.cell(workload, "posh").unwrap().median();
        assert_eq!((seconds("walk"), seconds("walk-again"), all.cells.len()), (2.0, 1.0, 2));
        assert_eq!(all.faults, ["walk-again: c"]);
        assert_eq!(
            all.again.iter().map(|again| again.workloads.join(" ")).collect::<Vec<_>>(),
            ["walk"]
        );
    }
}
