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

/// Compares all runs, several at a time.
fn compare(visitor: &Visitor, runs: &[Run], workers: usize) -> Tally {
    let next = Mutex::new(runs.iter());
    let tally = Mutex::new(Tally::default());
    std::thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                loop {
                    let Some(run) = next.lock().unwrap().next() else { return };
                    compare_one(visitor, run, &tally);
                }
            });
        }
    });
    tally.into_inner().unwrap()
}

fn compare_one(visitor: &Visitor, run: &Run, tally: &Mutex<Tally>) {
    let stock = visitor.run(run, Front::Stock);
    if Visitor::was_ended(&stock) {
        return tally.lock().unwrap().endless.push(run.name.clone());
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
            tally
                .faults
                .push(format!("{} {:?} under {front:?}\n--- stock: {stock}\n--- posh: {posh}\n", run.name, run.words));
        }
    }
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
        assert!(self.same >= at_least, "only {} could be compared, {at_least} are expected", self.same);
    }
}
