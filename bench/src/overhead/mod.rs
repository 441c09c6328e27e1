//! `overhead`: posh's cost where it has nothing to gain. Executors and mounts use this machine's
//! loopback interface and memory, so that any time beyond bash's is posh's own.

mod confinement;
mod latency;
mod memory;
mod setup;
mod start;
mod throughput;
mod tls;

use std::path::PathBuf;
use std::time::Instant;

use anyhow::Result;
use posh_integration::programs::Programs;

use crate::report::BenchReport;

const METHOD: &str = "One machine in namespaces of its own with a gateway and executors on its \
                      loopback interface; exports are bind mounts of a tmpfs. Commands are timed \
                      inside the shell that runs them ($EPOCHREALTIME), in runs that alternate \
                      between bash and posh; a sample is the median of one run, and an extra the \
                      difference of two neighbouring runs. Memory is VmRSS and VmHWM of \
                      /proc/PID/status.";

/// Selection and output of the measurement.
#[derive(Debug, Clone, clap::Args)]
pub struct OverheadOptions {
    /// Only this part (may be repeated).
    #[arg(long = "only", value_enum, value_name = "PART")]
    only: Vec<OverheadPart>,
    /// Where the figures go as JSON.
    #[arg(
        long,
        value_name = "FILE",
        default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/results/overhead.json")
    )]
    output: PathBuf,
}

/// One part of the benchmark.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum OverheadPart {
    /// Commands and stages that stay here, and small ones that do not.
    Latency,
    /// Bytes per second through one connection.
    Throughput,
    /// Bytes per second with certificates, and with plain text.
    Tls,
    /// Resident memory of gateway and executor.
    Memory,
    /// The time until the paper's pipelines get their directives.
    Setup,
    /// The first command of all.
    Start,
    /// Namespaces, filters and rules around each command.
    Confinement,
}

impl OverheadPart {
    const ALL: [OverheadPart; 7] = [
        OverheadPart::Latency,
        OverheadPart::Throughput,
        OverheadPart::Tls,
        OverheadPart::Memory,
        OverheadPart::Setup,
        OverheadPart::Start,
        OverheadPart::Confinement,
    ];

    fn measure(self, programs: &Programs, report: &mut BenchReport) -> Result<()> {
        match self {
            OverheadPart::Latency => latency::measure(programs, report),
            OverheadPart::Throughput => throughput::measure(programs, report),
            OverheadPart::Tls => tls::measure(programs, report),
            OverheadPart::Memory => memory::measure(programs, report),
            OverheadPart::Setup => setup::measure(programs, report),
            OverheadPart::Start => start::measure(programs, report),
            OverheadPart::Confinement => confinement::measure(programs, report),
        }
    }
}

/// Measures, prints and writes; an error if something could not be measured.
pub fn run(options: &OverheadOptions) -> Result<()> {
    let programs = Programs::beside_this()?;
    for program in ["posh", "posh-cli", "posh-gateway", "posh-executor", "posh-stage", "posh-lab"] {
        programs.find(program)?;
    }
    let mut report = BenchReport::new("overhead", METHOD);
    let parts = if options.only.is_empty() { &OverheadPart::ALL[..] } else { &options.only };
    for part in parts {
        let began = Instant::now();
        eprintln!("{part:?}");
        part.measure(&programs, &mut report)?;
        eprintln!("  ({:.0} s)", began.elapsed().as_secs_f64());
    }
    report.finish(&options.output)
}
