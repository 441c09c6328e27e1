//! The demonstration: the paper's five applications under bash and under posh, on the same data,
//! with outputs compared byte for byte, and the costs of each. `site` makes the machines, `table`
//! prints the results.

mod site;
mod table;

use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::sync_channel;

use nix::sys::signal::{SigSet, Signal};

use crate::error::{AttemptExt, Result};
use crate::explain::ExplainReport;
use crate::oracle::{RunOutcome, Under};
use crate::programs::Programs;
use crate::tree::{self, Tree};
use crate::wire::Profile;
use crate::workload::{Store, Workload, WorkloadSize};
use site::DemoSite;

/// Selection and size of the demonstration.
#[derive(Debug, Clone, clap::Args)]
pub struct DemoOptions {
    /// Only this application (may be repeated).
    #[arg(long = "only", value_name = "NAME", value_parser = by_name)]
    only: Vec<Workload>,
    /// A few megabytes of data instead of some 100.
    #[arg(long)]
    small: bool,
    /// Each server's link: wan (20 ms, 600 Mbit/s, the paper's), wifi, lan, or
    /// MILLISECONDS:MEGABITS.
    #[arg(long, value_name = "LINK", default_value = "lan")]
    link: Profile,
}

/// Error: no application has the name.
#[derive(Debug, thiserror::Error)]
#[error("the applications are {names}", names = Workload::ALL.map(Workload::name).join(", "))]
struct UnknownApplication;

fn by_name(name: &str) -> std::result::Result<Workload, UnknownApplication> {
    Workload::ALL.into_iter().find(|w| w.name() == name).ok_or(UnknownApplication)
}

/// Results of one application under both.
struct Comparison {
    workload: Workload,
    bash: Cost,
    posh: Cost,
    report: ExplainReport,
    differences: Vec<String>,
}

/// Cost of a run.
struct Cost {
    seconds: f64,
    /// Unknown without network namespaces.
    bytes: Option<u64>,
}

/// Shows everything; false when an output differed. Ends early, and cleans up, on a signal.
pub fn run(options: DemoOptions) -> Result<bool> {
    let mut signals = SigSet::empty();
    [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP].into_iter().for_each(|s| signals.add(s));
    // Before any thread starts, so that all of them inherit it; children start with a clear mask.
    signals.thread_block().attempt(|| "block signals".into())?;
    let site = Arc::new(DemoSite::start(&options, &Programs::beside_this()?)?);
    let (ended, end) = sync_channel(2);
    let (interrupted, shown) = (ended.clone(), Arc::clone(&site));
    std::thread::spawn(move || interrupted.send(signals.wait().map(Err)));
    std::thread::spawn(move || ended.send(Ok(Ok(show(&shown, &options)))));
    let end = end
        .recv()
        .expect("the two threads send before they end")
        .attempt(|| "wait for a signal".into())?;
    site.end();
    match end {
        Ok(same) => same,
        Err(signal) => {
            eprintln!("ended by {signal}; nothing is left behind");
            std::process::exit(128 + signal as i32)
        }
    }
}

fn show(site: &DemoSite, options: &DemoOptions) -> Result<bool> {
    println!("{}", site.description());
    site.warm_up()?;
    let chosen = if options.only.is_empty() { &Workload::ALL[..] } else { &options.only };
    let mut comparisons = Vec::new();
    for workload in chosen {
        let comparison = compare(
            site,
            *workload,
            if options.small { WorkloadSize::Test } else { WorkloadSize::Demo },
        )?;
        table::print_details(&comparison);
        comparisons.push(comparison);
    }
    table::print_explain(&explain_view(site, chosen)?);
    table::print_summary(&comparisons);
    Ok(comparisons.iter().all(|c| c.differences.is_empty()))
}

struct DemoRun {
    outcome: RunOutcome,
    cost: Cost,
    left: Vec<Tree>,
}

fn compare(site: &DemoSite, workload: Workload, size: WorkloadSize) -> Result<Comparison> {
    println!("\n== {} ==\n\n{}", workload.name(), table::indent(workload.script()));
    let bash = run_under(site, workload, size, Under::Shell, "with-bash")?;
    let posh = run_under(site, workload, size, Under::PoshExplained, "with-posh")?;
    let mut differences = Vec::new();
    if bash.outcome != posh.outcome {
        differences.push(format!("bash: {}\nposh: {}", bash.outcome, posh.outcome));
    }
    for (bash, posh) in bash.left.iter().zip(&posh.left) {
        differences.extend(tree::differences(bash, posh));
    }
    let report = posh.outcome.report().clone();
    Ok(Comparison { workload, bash: bash.cost, posh: posh.cost, report, differences })
}

/// Runs an application on new data, which no run has read through the mount yet.
fn run_under(
    site: &DemoSite,
    workload: Workload,
    size: WorkloadSize,
    under: Under,
    name: &str,
) -> Result<DemoRun> {
    let name = format!("{}-{name}", workload.name());
    let stores = site.stores(&name, workload.stores())?;
    println!("making the data of {} ({})", workload.name(), stores[0].mount.display());
    workload.generate(&stores, size)?;
    let out = site.home().join(&name);
    let seen = site.workstation().path(&out);
    std::fs::create_dir(&seen).attempt(|| format!("make {}", out.display()))?;
    let script = workload.script_for(&stores, &out.to_string_lossy());
    let before = site.bytes_moved()?;
    let outcome = script.run(site.workstation(), under)?.with(&name, workload.name());
    let bytes = before.zip(site.bytes_moved()?).map(|(before, after)| after - before);
    let cost = Cost { seconds: outcome.wall.as_secs_f64(), bytes };
    let left = leave(workload, &stores, &seen, &name)?;
    Ok(DemoRun { outcome, cost, left })
}

/// Reads the files that a run left, then removes its directories, so that memory holds one run's
/// data only.
fn leave(workload: Workload, stores: &[Store<'_>], out: &Path, name: &str) -> Result<Vec<Tree>> {
    let places: Vec<_> = stores.iter().map(Store::data).chain([out.to_owned()]).collect();
    let read = |place: &std::path::PathBuf| {
        Ok(tree::renamed(tree::snapshot(place, workload.volatile())?, name, workload.name()))
    };
    let trees = places.iter().map(read).collect();
    for place in places {
        std::fs::remove_dir_all(&place).attempt(|| format!("remove {}", place.display()))?;
    }
    trees
}

/// Output of `posh --explain` for a pipeline over two servers.
fn explain_view(site: &DemoSite, chosen: &[Workload]) -> Result<String> {
    let count = chosen.iter().map(|w| w.stores()).max().unwrap_or(1).min(2);
    let stores = site.stores("explained", count)?;
    let mut names = Vec::new();
    for (number, store) in (1..).zip(&stores) {
        crate::generate::access_logs(&store.data().join("logs"), number, 2, 20_000)
            .attempt(|| "make the data of the explain view".into())?;
        names.push(format!("{}/logs/*.csv", store.mount.display()));
    }
    let text = format!(
        "cat {} | grep -v '^ip,' | cut -d , -f 1 | sort | uniq -c | sort -rn | head -n 3",
        names.join(" ")
    );
    let mut command = site.workstation().command(site.workstation().programs().join("posh"));
    command.args(["--explain", "-c", &text]);
    let outcome =
        crate::oracle::collect(site.workstation(), command, &text, crate::oracle::SCRIPT_LIMIT)?;
    let said = [&outcome.stdout[..], &outcome.stderr].concat();
    Ok(format!("$ posh --explain -c \"{text}\"\n{}", String::from_utf8_lossy(&said)))
}
