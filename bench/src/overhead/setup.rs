//! The paper's Table 2: the time from a pipeline's completion until its commands have their
//! directives, for each application.

use anyhow::{Context, Result};
use posh_integration::explain::ExplainedStage;
use posh_integration::oracle::Under;
use posh_integration::programs::Programs;
use posh_integration::workload::{Workload, WorkloadSize};

use crate::report::{BenchReport, FigureTarget};
use crate::sample::Samples;
use crate::site::{BenchSite, local_path};

const ROUNDS: usize = 4;

/// One figure for each application: over all its pipelines that have an offloaded command.
pub fn measure(programs: &Programs, report: &mut BenchReport) -> Result<()> {
    let most = Workload::ALL.iter().map(|w| w.stores()).max().unwrap_or(1);
    let site = BenchSite::start(programs, most)?;
    for workload in Workload::ALL {
        let mut times = Vec::new();
        for round in 0..ROUNDS {
            let found = setup_times(&site, workload, round)?;
            // The first round connects, and fills caches.
            times.extend(if round == 0 { Vec::new() } else { found });
        }
        let what = format!("setup of a pipeline: {}", workload.name());
        let samples = Samples::new(times)
            .with_context(|| format!("nothing of {} was offloaded", workload.name()))?;
        report.add(what, "ms", FigureTarget::None, samples);
    }
    Ok(())
}

fn setup_times(site: &BenchSite, workload: Workload, round: usize) -> Result<Vec<f64>> {
    let name = format!("{}-{round}", workload.name());
    let stores = site.stores(&name, workload.stores())?;
    workload.generate(&stores, WorkloadSize::Test)?;
    let out = local_path(&name);
    std::fs::create_dir(site.host().path(&out))
        .with_context(|| format!("cannot make {}", out.display()))?;
    let script = workload.script_for(&stores, &out.to_string_lossy());
    let outcome = script.run(site.host(), Under::PoshExplained)?;
    anyhow::ensure!(outcome.status.success(), "{} failed: {outcome}", workload.name());
    let offloaded = outcome
        .report()
        .pipelines
        .iter()
        .filter(|p| p.stages.iter().any(ExplainedStage::is_offloaded));
    Ok(offloaded.map(|p| p.setup_ms).collect())
}
