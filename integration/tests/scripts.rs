//! Scripts that touch no mount: those that this machine's packages carry, with harmless
//! arguments, and bash's own test suite. Everything runs as an ordinary user on a
//! laboratory's workstation, under the stock shell and under posh, and must look the same.
//! What differs between runs of the stock shell (dates, process ids) is left out, and counted.

mod bash_suite;
mod machine;
mod visitor;

use std::sync::Mutex;

use visitor::{Front, Run, Visitor};

/// How often the stock shell is asked again before a difference counts.
const RERUNS: usize = 2;

/// What came of a comparison.
#[derive(Default)]
struct Tally {
    same: usize,
    /// The stock shell by itself gives now this, now that.
    varies: Vec<String>,
    /// The stock shell did not end in time.
    endless: Vec<String>,
    faults: Vec<String>,
}

/// Compares all runs, several at a time. Those that differed are tried again when nothing else
/// runs, since many a script uses a fixed name in /tmp or lists the home where others write.
fn compare(visitor: &Visitor, runs: &[Run], workers: usize) -> Tally {
    let next = Mutex::new(runs.iter());
    let (tally, differed) = (Mutex::new(Tally::default()), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                loop {
                    let Some(run) = next.lock().unwrap().next() else { return };
                    if let Verdict::Differs(_) = compare_one(visitor, run, &tally) {
                        differed.lock().unwrap().push(run);
                    }
                }
            });
        }
    });
    for run in differed.into_inner().unwrap() {
        match compare_one(visitor, run, &tally) {
            Verdict::Differs(fault) => tally.lock().unwrap().faults.push(fault),
            Verdict::Other => println!("differed beside others, and not alone: {}", run.name),
        }
    }
    tally.into_inner().unwrap()
}

enum Verdict {
    /// And how.
    Differs(String),
    /// Counted already.
    Other,
}

fn compare_one(visitor: &Visitor, run: &Run, tally: &Mutex<Tally>) -> Verdict {
    let stock = visitor.run(run, Front::Stock);
    if Visitor::was_ended(&stock) {
        tally.lock().unwrap().endless.push(run.name.clone());
        return Verdict::Other;
    }
    let mut outcomes = Front::UNDER_TEST.into_iter().map(|front| (front, visitor.run(run, front)));
    let differs = outcomes.find(|(_, outcome)| *outcome != stock);
    // Only then does it matter whether the stock shell agrees with itself.
    let varies = differs.is_some() && (0..RERUNS).any(|_| visitor.run(run, Front::Stock) != stock);
    let mut tally = tally.lock().unwrap();
    match differs {
        None => tally.same += 1,
        Some(_) if varies => tally.varies.push(run.name.clone()),
        Some((front, posh)) => {
            let how = format!(
                "{} {:?} under {front:?}\n--- stock: {stock}\n--- posh: {posh}\n",
                run.name, run.words
            );
            return Verdict::Differs(how);
        }
    }
    Verdict::Other
}

impl Tally {
    /// Prints what was compared, and fails if anything differed or if it was less than `at_least`.
    fn check(&self, what: &str, at_least: usize) {
        println!(
            "{what}: {} compared and the same, {} differ, {} vary by themselves, {} do not end by themselves",
            self.same,
            self.faults.len(),
            self.varies.len(),
            self.endless.len()
        );
        println!("vary: {}", self.varies.join(" "));
        println!("do not end: {}", self.endless.join(" "));
        crate::arena::assert_none(&self.faults, self.same + self.faults.len());
        assert!(
            self.same >= at_least,
            "only {} could be compared, {at_least} are expected",
            self.same
        );
    }
}
