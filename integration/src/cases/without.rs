//! Tests the cases of a rule: with the rule left out of the programs, they must fail. Failing cases
//! that do not name the rule and passing ones that do are reported too.

use std::fmt::Write as _;

use posh_proto::rule::Rule;

use super::Case;
use super::run::{self, CaseVerdict};
use super::site::CaseSettings;
use crate::error::Result;

/// Cases that noticed that a rule was left out.
#[derive(Debug)]
pub struct Effect {
    rule: Rule,
    /// Name the rule and fail.
    held: Vec<usize>,
    /// Name the rule and pass.
    silent: Vec<usize>,
    /// Name another rule, or none, and fail.
    others: Vec<usize>,
}

impl Effect {
    /// Sorts the verdicts of a run without `rule`.
    pub fn of(rule: Rule, cases: &[Case], verdicts: &[CaseVerdict]) -> Effect {
        let pick = |named: bool, red: bool| {
            let right = |v: &&CaseVerdict| {
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

    /// The effect, with the titles of all failing cases.
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

/// Runs all cases without each rule in turn and prints a table; true when at least five cases hold
/// each rule and none of them passes without it.
pub fn table(cases: &[Case], setting: &CaseSettings, jobs: usize) -> Result<bool> {
    println!(
        "| left out | cases of it that fail | other cases that fail | which |\n|---|---:|---:|---|"
    );
    let mut complete = true;
    for &rule in Rule::ALL {
        let setting = CaseSettings { without: vec![rule], ..setting.clone() };
        let verdicts = run::run(cases, &setting, jobs, &|_| {})?;
        let effect = Effect::of(rule, cases, &verdicts);
        complete &= effect.silent.is_empty() && effect.held.len() >= ENOUGH;
        print!("{}", effect.row(cases));
    }
    Ok(complete)
}

/// Least number of cases for a rule.
const ENOUGH: usize = 5;
