//! Random programs look the same under posh as under bash. Bash, the oracle, runs in
//! a laboratory of its own with the same paths, so that not even a checksum over a
//! path differs. Everything follows from one seed, which is printed; where posh
//! differs, the program and its files are made as small as they go.
//!
//! Where several processes write to one place, or a reader leaves early, a program's result is a
//! matter of chance under bash, too. The generator avoids that, though not wholly: where posh
//! differs, bash runs the program again, and posh may give whatever bash itself has given.
//!
//! `POSH_RANDOM_SEED`, `POSH_RANDOM_FIRST` (number of the first program),
//! `POSH_RANDOM_CASES` and `POSH_RANDOM_FAULTS` (how many are shrunk before the end)
//! choose other programs; `POSH_TEST_FULL` runs ten times as many.

use std::fmt::Write as _;
use std::fs;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use posh_integration::explain::ExplainReport;
use posh_integration::oracle::{Door, Under};
use posh_integration::random::files::Made;
use posh_integration::random::{RandomProgram, grammar, render};
use posh_integration::tree::{self, Tree};
use posh_integration::{Lab, LabSpec, RunOutcome, Script};
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

use crate::programs;

/// Programs when nothing is asked for: what two cores do in three minutes.
const CASES: usize = 2_000;
/// And with `POSH_TEST_FULL`.
const CASES_FULL: usize = 20_000;
/// Faults that are shrunk and shown before the rest is left.
const FAULTS: usize = 3;
/// Loops within loops start hundreds of commands, on machines that do other things as well.
const LIMIT: Duration = Duration::from_secs(400);
/// Each worker has laboratories of its own; two cores have work for so many.
const WORKERS: usize = 2;
/// Trees of strategies are deep, and large without optimisation.
const STACK_BYTES: usize = 64 << 20;
/// So often it says how far it is.
const PROGRESS: usize = 500;
/// Smaller programs that are tried for one fault, and for how long: those that hang take their
/// time.
const SHRINKS: usize = 400;
const SHRINKING: Duration = Duration::from_secs(180);
/// So often bash runs a program again from which posh differs.
const RERUNS: usize = 12;
/// At most one program in so many may be one of those where bash's first result was not its only
/// one.
const CHANCE: usize = 250;
/// The share of programs, of which something ran on the server, that is demanded.
const OFFLOADED: f64 = 0.5;

/// Where one program runs under bash, and where under posh.
struct Pair {
    bash: Lab,
    posh: Lab,
}

/// What is run.
struct Case<'a> {
    program: &'a RandomProgram,
    script: &'a str,
    files: &'a Made,
}

/// What a run left behind.
struct Result {
    outcome: RunOutcome,
    on_mount: Tree,
    here: Tree,
}

/// What is counted over all programs.
#[derive(Debug, Default)]
struct Counts {
    programs: usize,
    programs_offloaded: usize,
    stages: usize,
    stages_offloaded: usize,
    by_chance: usize,
}

/// How a program looked the same.
struct Same {
    report: ExplainReport,
    /// Only as in a later run of bash's.
    by_chance: bool,
}

/// A program that posh runs otherwise than bash, or the generator's own fault.
struct Fault {
    number: usize,
    text: String,
}

impl Pair {
    fn new() -> Pair {
        Pair { bash: bash_alone(), posh: Lab::start(&LabSpec::servers(1), &programs()).unwrap() }
    }

    /// Runs a program under posh and bash, in new directories; the report, or the difference.
    fn attempt(&self, program: &RandomProgram, name: &str) -> std::result::Result<Same, String> {
        let text = render::render(program);
        let made = program.files.made().unwrap();
        let case = Case { program, script: &text.script, files: &made };
        let bash = run(&self.bash, Under::Shell, &case, name)?;
        let posh = run(&self.posh, Under::PoshExplained, &case, name)?;
        let found = differences(&bash, &posh, text.complains_at_once);
        if found.is_empty() {
            return Ok(Same { report: posh.outcome.report().clone(), by_chance: false });
        }
        let mut varies = "";
        for _ in 0..RERUNS {
            // A new one, since a mount remembers a directory of this name that is gone.
            let lab = bash_alone();
            let again = run(&lab, Under::Shell, &case, name)?;
            if differences(&again, &posh, text.complains_at_once).is_empty() {
                return Ok(Same { report: posh.outcome.report().clone(), by_chance: true });
            }
            if !differences(&bash, &again, text.complains_at_once).is_empty() {
                varies = "bash itself differs from run to run, but never like this\n";
            }
        }
        Err(format!("{found}{}{varies}", placements(posh.outcome.report())))
    }
}

fn bash_alone() -> Lab {
    Lab::start(&LabSpec::servers(1).without_executors(), &programs()).unwrap()
}

fn run(
    lab: &Lab,
    under: Under,
    case: &Case<'_>,
    name: &str,
) -> std::result::Result<Result, String> {
    let data = lab.data(1).join(name);
    let here = lab.workstation.path("/home/user").join(name);
    case.files.fill(&data, &here).unwrap();
    let mount = lab.mount(1).join(name);
    let local = format!("/home/user/{name}");
    let mut script =
        Script::new(case.script).variable("D", mount.to_str().unwrap()).variable("L", local);
    script.limit = LIMIT;
    let settings = &case.program.settings;
    script = script.door(if settings.by_path { Door::Path } else { Door::Hook });
    if settings.inside {
        script = script.directory(&mount);
    }
    let outcome = script.run(&lab.workstation, under).map_err(|e| format!("{under:?}: {e}"))?;
    let result = Result {
        outcome,
        on_mount: tree::snapshot(&data, &[]).unwrap(),
        here: tree::snapshot(&here, &[]).unwrap(),
    };
    fs::remove_dir_all(&data).and_then(|()| fs::remove_dir_all(&here)).unwrap();
    Ok(result)
}

/// How posh's run differs; nothing if it does not.
fn differences(bash: &Result, posh: &Result, unordered: bool) -> String {
    let mut text = String::new();
    let complaints = |o: &RunOutcome| {
        let mut bytes = o.stderr.clone();
        if unordered {
            bytes.sort_unstable();
        }
        bytes
    };
    let (left, right) = (&bash.outcome, &posh.outcome);
    let same = left.stdout == right.stdout
        && left.status == right.status
        && complaints(left) == complaints(right);
    if !same {
        let _ = writeln!(text, "--- bash: {left}\n--- posh: {right}");
    }
    for file in tree::differences(&bash.on_mount, &posh.on_mount) {
        let _ = writeln!(text, "--- on the mount: {file}");
    }
    for file in tree::differences(&bash.here, &posh.here) {
        let _ = writeln!(text, "--- on the workstation: {file}");
    }
    text
}

fn placements(report: &ExplainReport) -> String {
    let stages = report.pipelines.iter().flat_map(|p| &p.stages);
    stages.fold(String::new(), |text, s| {
        text + &format!("  {}: {} ({})\n", s.placement, s.argv.join(" "), s.reason)
    })
}

/// The program with this number: the same in every run with this seed.
fn drawn(seed: u64, number: usize) -> impl ValueTree<Value = RandomProgram> {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    bytes[8..16].copy_from_slice(&(number as u64).to_le_bytes());
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
    let mut runner = TestRunner::new_with_rng(Config::default(), rng);
    grammar::program().new_tree(&mut runner).unwrap()
}

/// The smallest program found that still differs.
fn shrunk(
    pair: &Pair,
    mut tree: impl ValueTree<Value = RandomProgram>,
    number: usize,
    mut why: String,
) -> String {
    let mut smallest = tree.current();
    let mut moved = tree.simplify();
    let start = Instant::now();
    for attempt in 0..SHRINKS {
        if !moved || start.elapsed() > SHRINKING {
            break;
        }
        let program = tree.current();
        moved = match pair.attempt(&program, &format!("c{number}-{attempt}")) {
            Err(difference) => {
                (smallest, why) = (program, difference);
                tree.simplify()
            }
            Ok(_) => tree.complicate(),
        };
    }
    let text = render::render(&smallest);
    format!("{}\n{:?}\n{:?}\n{why}", text.script, smallest.settings, smallest.files)
}

fn number(name: &str, otherwise: usize) -> usize {
    std::env::var(name).map_or(otherwise, |v| v.parse().expect("a number"))
}

fn work(
    numbers: (usize, usize),
    next: &AtomicUsize,
    stop: &AtomicBool,
    found: &Mutex<(Counts, Vec<Fault>)>,
) {
    let pair = Pair::new();
    let (seed, end) = numbers;
    let most = number("POSH_RANDOM_FAULTS", FAULTS);
    loop {
        let case = next.fetch_add(1, Ordering::Relaxed);
        if case >= end || stop.load(Ordering::Relaxed) {
            return;
        }
        let tree = drawn(seed as u64, case);
        match pair.attempt(&tree.current(), &format!("c{case}")) {
            Ok(same) => count(&mut found.lock().unwrap().0, &same),
            Err(why) => {
                let text = shrunk(&pair, tree, case, why);
                eprintln!("program {case}:\n{text}");
                let mut found = found.lock().unwrap();
                found.1.push(Fault { number: case, text });
                if found.1.len() >= most {
                    stop.store(true, Ordering::Relaxed);
                }
            }
        }
    }
}

fn count(counts: &mut Counts, same: &Same) {
    let stages = || same.report.pipelines.iter().flat_map(|p| &p.stages);
    let offloaded = stages().filter(|s| s.is_offloaded()).count();
    counts.programs += 1;
    if counts.programs.is_multiple_of(PROGRESS) {
        println!("{} random programs", counts.programs);
    }
    counts.programs_offloaded += usize::from(offloaded > 0);
    counts.by_chance += usize::from(same.by_chance);
    counts.stages += stages().count();
    counts.stages_offloaded += offloaded;
}

#[test]
fn programs_look_the_same() {
    let _turn = crate::whole_machine();
    let full = std::env::var_os("POSH_TEST_FULL").is_some();
    let cases = number("POSH_RANDOM_CASES", if full { CASES_FULL } else { CASES });
    let (seed, first) = (number("POSH_RANDOM_SEED", 2020), number("POSH_RANDOM_FIRST", 0));
    let (next, stop, found) = (AtomicUsize::new(first), AtomicBool::new(false), Mutex::default());
    let start = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..number("POSH_RANDOM_WORKERS", WORKERS).min(cases) {
            let worker = std::thread::Builder::new().stack_size(STACK_BYTES);
            worker
                .spawn_scoped(scope, || work((seed, first + cases), &next, &stop, &found))
                .unwrap();
        }
    });
    let (counts, faults) = found.into_inner().unwrap();
    println!(
        "{} random programs from seed {seed} in {:.0} s: {} offloaded something; {} of {} stages ran on the server; \
         {} only like a later run of bash's",
        counts.programs,
        start.elapsed().as_secs_f64(),
        counts.programs_offloaded,
        counts.stages_offloaded,
        counts.stages,
        counts.by_chance
    );
    let shown = faults.iter().map(|f| {
        format!(
            "program {} (POSH_RANDOM_SEED={seed} POSH_RANDOM_FIRST={}):\n{}",
            f.number, f.number, f.text
        )
    });
    assert!(
        faults.is_empty(),
        "posh differs from bash in\n{}",
        shown.collect::<Vec<_>>().join("\n")
    );
    assert!(
        counts.by_chance * CHANCE <= counts.programs.max(CHANCE),
        "{} results were chance",
        counts.by_chance
    );
    let share = counts.programs_offloaded as f64 / counts.programs as f64;
    assert!(share >= OFFLOADED, "only {share:.2} of the programs offloaded anything");
}
