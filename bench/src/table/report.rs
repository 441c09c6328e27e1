//! Writes results as JSON, and the report from all stored results: tables in Markdown, and plots.
//! `targets` judges the targets.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::catalogue::{ALL, ONE_COMMAND, is_local};
use super::plot::{self, Series};
use super::results::{Cell, Latency, Results};
use super::targets;

/// Name of the results of some workloads only, which are no part of the report.
const PARTIAL: &str = "partial";
/// Columns of the tables, in order.
const SYSTEMS: [&str; 10] = [
    "server",
    "sshfs",
    "sshfs-tuned",
    "rclone",
    "ssh",
    "ssh-master",
    "parallel",
    "posh",
    "posh-volume",
    "volume",
];
/// Names of links, in the order of the report; others follow.
const LINKS: [&str; 3] = ["wan", "lan", "wifi"];

const METHOD: &str = include_str!("../../METHOD.md");

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Writes one run's results and their report.
pub fn keep(results: &Results) -> Result<()> {
    let name = if results.partial { PARTIAL } else { &results.name };
    let file = root().join("results").join(format!("{name}.json"));
    write(
        &file,
        &(serde_json::to_string_pretty(results).context("cannot write the results as JSON")?
            + "\n"),
    )?;
    if !results.partial {
        return write_all();
    }
    let text = section(results, PARTIAL)?;
    println!("{text}");
    let file = root().join("results").join(format!("{PARTIAL}.md"));
    write(&file, &text)
}

/// A full run's stored results, updated by `anew`.
pub fn with_the_rest(anew: Results) -> Result<Results> {
    let file = root().join("results").join(format!("{}.json", anew.name));
    let text =
        fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
    let mut all: Results = serde_json::from_str(&text)
        .with_context(|| format!("{} is no result of the table", file.display()))?;
    all.take_in(anew);
    Ok(all)
}

/// Writes the report from all full results.
pub fn write_all() -> Result<()> {
    let mut all = read_all()?;
    let place =
        |r: &Results| LINKS.iter().position(|l| r.name.starts_with(l)).unwrap_or(LINKS.len());
    all.sort_by_key(|r| (place(r), r.name.clone()));
    let mut text = format!("# What posh is worth\n\n{METHOD}\n");
    for results in &all {
        text += &section(results, &results.name)?;
    }
    // Written by hand about the figures.
    let notes = root().join("NOTES.md");
    if notes.exists() {
        text += &format!("\n{}", fs::read_to_string(&notes).context("cannot read NOTES.md")?);
    }
    write(&root().join("REPORT.md"), &text)
}

fn read_all() -> Result<Vec<Results>> {
    let directory = root().join("results");
    let mut all = Vec::new();
    for entry in
        fs::read_dir(&directory).with_context(|| format!("cannot list {}", directory.display()))?
    {
        let path = entry?.path();
        if path.extension().is_none_or(|e| e != "json")
            || path.file_stem().is_some_and(|s| s == PARTIAL)
        {
            continue;
        }
        let text =
            fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        // Other benchmarks store their results in this directory, too.
        all.extend(serde_json::from_str::<Results>(&text).ok());
    }
    Ok(all)
}

fn write(file: &Path, text: &str) -> Result<()> {
    if let Some(directory) = file.parent() {
        fs::create_dir_all(directory)
            .with_context(|| format!("cannot make {}", directory.display()))?;
    }
    fs::write(file, text).with_context(|| format!("cannot write {}", file.display()))?;
    eprintln!("written: {}", file.display());
    Ok(())
}

/// Section of one run of the bench.
fn section(results: &Results, name: &str) -> Result<String> {
    let mut text = heading(results);
    text += &verdicts(results);
    text += &times(results);
    text += &picture(name, "time", "Time", &bars(results, "Time by workload", "s", Cell::median))?;
    text += &ratios(results);
    text += &bytes(results);
    text += &picture(
        name,
        "bytes",
        "Bytes moved",
        &bars(results, "Bytes moved", "MB", |c| c.bytes / 1e6),
    )?;
    text += &posh_columns(results);
    text += &elsewhere(results);
    text += &latency(results, name)?;
    text += &splits(results, name)?;
    text += &spread(results);
    Ok(text)
}

fn heading(r: &Results) -> String {
    let m = &r.machine;
    let modified = if m.modified { ", with changes" } else { "" };
    let mut text = format!(
        "\n## {}: {} ms, {} Mbit/s, size {}\n\n{}, {} cores, {} MiB, Linux {}; {}; commit \
         {:.12}{modified}; load {:.1} before and {:.1} after; it took {:.0} min; {} runs, order \
         from seed {}; the servers' data in {}.\n\n\
         | link | round trip, measured | Mbit/s out, measured | Mbit/s back, measured |\n\
         |---|---|---|---|\n",
        r.name,
        r.link.round_trip_ms,
        r.link.megabits,
        r.size,
        m.processor,
        m.cores,
        m.memory_mib,
        m.kernel,
        m.date,
        m.commit,
        m.load_before,
        r.load_after,
        r.took_s / 60.0,
        r.runs,
        r.seed,
        r.storage
    );
    for (what, link) in [("workstation to server", &r.link), ("between servers", &r.between)] {
        let _ = writeln!(
            text,
            "| {what}, {} ms {} Mbit/s | {:.2} ms | {:.0} | {:.0} |",
            link.round_trip_ms,
            link.megabits,
            link.measured_ms,
            link.measured_out,
            link.measured_back
        );
    }
    for again in &r.again {
        let (machine, workloads) = (&again.machine, again.workloads.join(", "));
        let _ = write!(
            text,
            "\nMeasured anew, all systems side by side, {} runs: {workloads} ({}; commit \
             {:.12}).\n",
            again.runs, machine.date, machine.commit
        );
    }
    if !r.faults.is_empty() {
        let _ = write!(text, "\n**This run has faults:**\n\n- {}\n", r.faults.join("\n- "));
    }
    text
}

fn verdicts(results: &Results) -> String {
    let mut text = "\n### Targets\n\nThey are set for size s. How many times as fast as over \
                    sshfs is aimed at for the `wan` link only.\n\n\
                    | what | target | seen | |\n|---|---|---|---|\n"
        .to_owned();
    for v in targets::judge(results) {
        let met = match v.met {
            Some(true) => "met",
            Some(false) => "**missed**",
            None => "open: only a lower bound is known",
        };
        let _ = writeln!(text, "| {} | {} | {} | {met} |", v.what, v.target, v.seen);
    }
    text
}

/// The workloads of a run, in order.
fn workloads(results: &Results) -> Vec<&'static str> {
    let known = ALL.iter().chain([&ONE_COMMAND]).map(|w| w.name);
    known.filter(|name| results.cells.iter().any(|c| c.workload == *name)).collect()
}

fn table(results: &Results, value: impl Fn(&Cell) -> String) -> String {
    let mut text =
        format!("| workload | {} |\n|---|{}\n", SYSTEMS.join(" | "), "---|".repeat(SYSTEMS.len()));
    for workload in workloads(results).into_iter().filter(|name| !is_local(name)) {
        let cell =
            |system: &&str| results.cell(workload, system).map_or_else(|| "–".to_owned(), &value);
        let row: Vec<String> = SYSTEMS.iter().map(cell).collect();
        let _ = writeln!(text, "| {workload} | {} |", row.join(" | "));
    }
    text
}

fn times(results: &Results) -> String {
    let mut text = "\n### Time\n\nMedians, seconds.\n\n".to_owned() + &table(results, seconds);
    for workload in ALL.iter().filter(|workload| workload.servers == 0) {
        let local = |system: &str| results.cell(workload.name, system);
        let (Some(bash), Some(posh), Some(path)) =
            (local("sshfs"), local("posh"), local("posh-path"))
        else {
            continue;
        };
        let _ = writeln!(
            text,
            "\n{} ({}): bash {}, posh {} ({:.2} ×), posh through PATH {} ({:.2} ×).",
            workload.name,
            workload.words,
            seconds(bash),
            seconds(posh),
            posh.median() / bash.median(),
            seconds(path),
            path.median() / bash.median()
        );
    }
    if let Some(cold) = results.cell(ONE_COMMAND.name, "posh-cold") {
        let _ = writeln!(
            text,
            "\nOne small command when no gateway runs (its start and the first connection \
             included): {} s.",
            seconds(cold)
        );
    }
    text
}

fn seconds(cell: &Cell) -> String {
    let value = cell.median();
    let digits = if value < 10.0 { 3 } else { 1 };
    format!("{}{value:.digits$}", if cell.limited { "> " } else { "" })
}

fn ratios(results: &Results) -> String {
    let mut text = "\n### posh against the others\n\n| workload | input | sshfs ÷ posh | \
                    sshfs-tuned ÷ posh | ssh-master ÷ posh | posh − server | posh moved |\n\
                    |---|---|---|---|---|---|---|\n"
        .to_owned();
    for workload in workloads(results).into_iter().filter(|name| !is_local(name)) {
        let Some(posh) = results.cell(workload, "posh") else { continue };
        let ratio = |system: &str| match results.cell(workload, system) {
            Some(c) => {
                format!("{}{:.1}×", if c.limited { "> " } else { "" }, c.median() / posh.median())
            }
            None => "–".to_owned(),
        };
        let more = results
            .cell(workload, "server")
            .map_or("–".to_owned(), |c| format!("{:+.3} s", posh.median() - c.median()));
        let input = results.inputs.iter().find(|i| i.workload == workload);
        let input = input.map_or(String::new(), |i| {
            format!("{} files, {:.1} MB", i.files, i.bytes as f64 / 1e6)
        });
        let share = results.cell(workload, "sshfs").filter(|c| !c.limited && c.bytes > 0.0);
        let share = share.map_or("–".to_owned(), |c| {
            format!("1/{:.0} of the bytes", c.bytes / posh.bytes.max(1.0))
        });
        let _ = writeln!(
            text,
            "| {workload} | {input} | {} | {} | {} | {more} | {share} |",
            ratio("sshfs"),
            ratio("sshfs-tuned"),
            ratio("ssh-master")
        );
    }
    text
}

fn bytes(results: &Results) -> String {
    "\n### Bytes moved\n\nMedians, both directions on the workstation's interfaces, mounts \
     included.\n\n"
        .to_owned()
        + &table(results, |c| size(c.bytes))
}

fn size(bytes: f64) -> String {
    match bytes {
        b if b < 1e4 => format!("{b:.0} B"),
        b if b < 1e6 => format!("{:.1} kB", b / 1e3),
        b => format!("{:.1} MB", b / 1e6),
    }
}

fn bars(results: &Results, title: &str, unit: &str, value: impl Fn(&Cell) -> f64) -> String {
    let groups: Vec<String> = workloads(results).into_iter().map(str::to_owned).collect();
    let row = |system: &&str| Series {
        name: (*system).to_owned(),
        values: groups.iter().map(|w| results.cell(w, system).map(&value)).collect(),
    };
    plot::bars(title, unit, &groups, &SYSTEMS.iter().map(row).collect::<Vec<_>>())
}

/// Table of posh's own statistics.
fn posh_columns(results: &Results) -> String {
    let mut text = "\n### What posh needs\n\nProcessor time is the programs' own, without the \
                    commands'; memory is the peak.\n\n| workload | system | pipelines | setup of \
                    one | stages there | here | gateway | executors |\n\
                    |---|---|---|---|---|---|---|---|\n"
        .to_owned();
    let mut reasons = BTreeSet::new();
    for cell in &results.cells {
        let Some(posh) = &cell.posh else { continue };
        let here: usize = posh.here.iter().map(|(.., count)| count).sum();
        let usage =
            |u: super::results::ProgramUsage| format!("{:.2} s, {:.0} MiB", u.cpu_s, u.peak_mib);
        let _ = writeln!(
            text,
            "| {} | {} | {} | {:.1} ms | {} | {here} | {} | {} |",
            cell.workload,
            cell.system,
            posh.pipelines,
            posh.setup_ms,
            posh.there,
            usage(posh.gateway),
            usage(posh.executors)
        );
        for (command, reason, count) in posh.here.iter().filter(|_| !is_local(&cell.workload)) {
            reasons.insert(format!("- {}: {command} ({count}): {reason}", cell.workload));
        }
    }
    if !reasons.is_empty() {
        text += "\nStages that ran on the workstation, and why:\n\n";
        text += &reasons.into_iter().collect::<Vec<_>>().join("\n");
        text.push('\n');
    }
    text
}

fn elsewhere(results: &Results) -> String {
    let cells: Vec<&Cell> = results.cells.iter().filter(|c| c.system == "posh-elsewhere").collect();
    if cells.is_empty() {
        return String::new();
    }
    let mut text = "\n### An executor on another server than the data\n\n\
                    As in the paper's §8.2.1: the second server mounts the data from the first \
                    one by sshfs (which remembers nothing there) over the link between them.\n\n\
                    | workload | posh | posh, executor elsewhere | bash over sshfs |\n\
                    |---|---|---|---|\n"
        .to_owned();
    for cell in cells {
        let of =
            |system: &str| results.cell(&cell.workload, system).map_or("–".to_owned(), seconds);
        let _ = writeln!(
            text,
            "| {} | {} | {} | {} |",
            cell.workload,
            of("posh"),
            seconds(cell),
            of("sshfs")
        );
    }
    text
}

fn latency(results: &Results, name: &str) -> Result<String> {
    if results.latency.is_empty() {
        return Ok(String::new());
    }
    let mut systems: Vec<&str> = results.latency.iter().map(|l| l.system.as_str()).collect();
    systems.sort_unstable();
    systems.dedup();
    let mut text = format!(
        "\n### One small command against the round trip\n\nMedians, milliseconds; commands of one \
         session that stands, each of a file that was not read before.\n\n\
         | round trip | {} |\n|---|{}\n",
        systems.join(" | "),
        "---|".repeat(systems.len())
    );
    let of = |system: &str| -> Vec<&Latency> {
        results.latency.iter().filter(|l| l.system == system).collect()
    };
    for point in of(systems[0]) {
        let at = |system: &&str| {
            let found = of(system).into_iter().find(|l| l.round_trip_ms == point.round_trip_ms);
            found.map_or("–".to_owned(), |l| format!("{:.1}", l.summary.median))
        };
        let row: Vec<String> = systems.iter().map(at).collect();
        let _ = writeln!(text, "| {} ms | {} |", point.round_trip_ms, row.join(" | "));
    }
    let row = |system: &&str| Series {
        name: (*system).to_owned(),
        values: of(system).into_iter().map(|l| (l.round_trip_ms, l.summary.median)).collect(),
    };
    let series: Vec<_> = systems.iter().map(row).collect();
    let svg = plot::lines("Latency of one small command", "round trip, ms", "ms", &series);
    Ok(text + &picture(name, "latency", "Latency against the round trip", &svg)?)
}

fn splits(results: &Results, name: &str) -> Result<String> {
    if results.splits.is_empty() {
        return Ok(String::new());
    }
    let cores = results.machine.cores;
    let mut text = format!(
        "\n### Throughput against the split factor\n\nAll machines share the {cores} cores of \
         this one, so splitting has little to gain here; the paper's Fig. 7 had 16 cores.\n\n\
         | workload | --split | seconds | MB/s of input |\n|---|---|---|---|\n"
    );
    for s in &results.splits {
        let seconds = s.seconds.median();
        let _ = writeln!(
            text,
            "| {} | {} | {seconds:.3} | {:.0} |",
            s.workload, s.parts, s.megabytes_per_second
        );
    }
    let mut names: Vec<&str> = results.splits.iter().map(|s| s.workload.as_str()).collect();
    names.dedup();
    let row = |workload: &&str| {
        let points = results.splits.iter().filter(|s| s.workload == *workload);
        let values = points.map(|s| (s.parts as f64, s.megabytes_per_second)).collect();
        Series { name: (*workload).to_owned(), values }
    };
    let series: Vec<_> = names.iter().map(row).collect();
    let svg =
        plot::lines("Throughput against the split factor", "--split", "MB/s of input", &series);
    Ok(text + &picture(name, "split", "Throughput against the split factor", &svg)?)
}

/// Least value, quartiles and number of runs of every cell.
fn spread(results: &Results) -> String {
    let mut text = "\n<details><summary>Spread of the times</summary>\n\n\
        | workload | system | runs | least | quartiles | greatest |\n|---|---|---|---|---|---|\n"
        .to_owned();
    for c in &results.cells {
        let s = &c.summary;
        let limited = if c.limited { " (ended at the limit)" } else { "" };
        let _ = writeln!(
            text,
            "| {} | {} | {}{limited} | {:.3} | {:.3} … {:.3} | {:.3} |",
            c.workload,
            c.system,
            c.seconds.count(),
            s.least,
            s.lower_quartile,
            s.upper_quartile,
            s.greatest
        );
    }
    text + "\n</details>\n"
}

/// Writes a plot; returns the text that shows it.
fn picture(name: &str, what: &str, title: &str, svg: &str) -> Result<String> {
    let (directory, link): (PathBuf, String) = match name {
        PARTIAL => (root().join("results"), format!("{name}-{what}.svg")),
        _ => (root().join("plots"), format!("plots/{name}-{what}.svg")),
    };
    write(&directory.join(format!("{name}-{what}.svg")), svg)?;
    Ok(format!("\n![{title}]({link})\n"))
}
