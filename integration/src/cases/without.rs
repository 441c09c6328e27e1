//! What the cases show of a rule: with it left out of the programs, those that hold it
//! turn red. Red ones that do not name the rule and green ones that do are told too.

use std::fmt::Write as _;

use posh_proto::rule::Rule;

use super::Case;
use super::run::{self, Verdict};
use super::site::Setting;
use crate::error::Result;

/// Which cases noticed that a rule was left out.
#[derive(Debug)]
pub struct Effect {
    rule: Rule,
    /// They name the rule and are red.
    held: Vec<usize>,
    /// They name the rule and are green.
    silent: Vec<usize>,
    /// They name another rule, or none, and are red.
    others: Vec<usize>,
}

impl Effect {
    /// Sorts the verdicts of a run without `rule`.
    pub fn of(rule: Rule, cases: &[Case], verdicts: &[Verdict]) -> Effect {
        let pick = |named: bool, red: bool| {
            let right = |v: &&Verdict| {
                (cases[v.number].rule == Some(rule)) == named && v.faults.is_empty() != red
            };
            verdicts.iter().filter(right).map(|v| v.number).collect()
        };
        Effect {
            rule,
            held: pick(true, true),
            silent: pick(true, false),
            others: pick(false, true),
        }
    }

    /// With the titles of all red cases.
    pub fn in_full(&self, cases: &[Case]) -> String {
        let mut text = format!("\nwithout {}:\n", self.rule);
        for (what, numbers) in [
            ("red, and hold it", &self.held),
            ("green, but hold it", &self.silent),
            ("red besides", &self.others),
        ] {
            let _ = writeln!(text, "{} {what}", numbers.len());
            numbers.iter().for_each(|number| {
                let _ = writeln!(text, "    {}", cases[*number].title());
            });
        }
        text
    }

    fn row(&self, cases: &[Case]) -> String {
        let name = |number: &usize| cases[*number].name.as_str();
        let held: Vec<_> = self.held.iter().map(name).collect();
        let silent = if self.silent.is_empty() {
            String::new()
        } else {
            format!(" ({} silent)", self.silent.len())
        };
        format!(
            "| {} | {}{silent} | {} | {} |\n",
            self.rule,
            self.held.len(),
            self.others.len(),
            held.join(", ")
        )
    }
}

/// Runs all cases without each rule in turn and prints a table; true when at least
/// five cases hold each rule and none of them stays green.
pub fn table(cases: &[Case], setting: &Setting, jobs: usize) -> Result<bool> {
    println!(
        "| left out | cases of it that fail | other cases that fail | which |\n|---|---:|---:|---|"
    );
    let mut complete = true;
    for &rule in Rule::ALL {
        let setting = Setting { without: vec![rule], ..setting.clone() };
        let verdicts = run::run(cases, &setting, jobs, &|_| {})?;
        let effect = Effect::of(rule, cases, &verdicts);
        complete &= effect.silent.is_empty() && effect.held.len() >= ENOUGH;
        print!("{}", effect.row(cases));
    }
    Ok(complete)
}

/// So many cases hold a rule at least.
const ENOUGH: usize = 5;
