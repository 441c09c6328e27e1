//! Values that conditions test: an invocation's options and operands by number, their values as
//! bytes, and its environment.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;

use crate::model::{
    Annotation, Arity, Cases, Condition, Conditional, Subject, Test, ValueRule, Which,
};
use crate::words::{InvocationWords, Piece};

/// Looks up a variable of the command.
pub type Environment<'a> = &'a dyn Fn(&str) -> Option<OsString>;

/// Reason why the operands can't be assigned to PARAMS entries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum OperandCountFault {
    #[error("an operand is missing")]
    TooFew,
    #[error("there are more operands than it takes")]
    TooMany,
}

/// A reading whose operands are assigned to PARAMS entries.
pub struct Facts<'a> {
    pub annotation: &'a Annotation,
    pub argv: &'a [OsString],
    pub reading: InvocationWords,
    pub environment: Environment<'a>,
    /// For each of the reading's operands, the number of its PARAMS entry.
    pub dealt: Vec<usize>,
    /// Cached results of conditions, by address: all live in annotations for `'a`. Each condition
    /// scans all words and is evaluated for every word, so that without the cache a long command
    /// line would take quadratic time.
    known: RefCell<HashMap<*const Condition, bool>>,
}

impl<'a> Facts<'a> {
    /// Assigns the operands to the PARAMS entries.
    ///
    /// # Errors
    /// There are too few or too many.
    pub fn new(
        annotation: &'a Annotation,
        argv: &'a [OsString],
        reading: InvocationWords,
        environment: Environment<'a>,
    ) -> Result<Self, OperandCountFault> {
        let mut facts = Self::undealt(annotation, argv, reading, environment);
        let parted = annotation.params.iter().any(|param| param.after_dashes);
        let after = |wanted: bool| {
            move |operand: &&crate::words::Operand| (parted && operand.after_dashes) == wanted
        };
        // Operands after `--` are the last ones, so the two groups follow each other.
        for side in [false, true] {
            let count = facts.reading.operands.iter().filter(after(side)).count();
            let dealt = facts.deal(side, count)?;
            facts.dealt.extend(dealt);
            // Their conditions may be about operands.
            facts.known.get_mut().clear();
        }
        Ok(facts)
    }

    /// Facts before the operands are assigned.
    pub fn undealt(
        annotation: &'a Annotation,
        argv: &'a [OsString],
        reading: InvocationWords,
        environment: Environment<'a>,
    ) -> Self {
        Self {
            annotation,
            argv,
            reading,
            environment,
            dealt: Vec::new(),
            known: RefCell::default(),
        }
    }

    /// The entry of each of `count` operands of one side of `--`.
    fn deal(&self, side: bool, count: usize) -> Result<Vec<usize>, OperandCountFault> {
        let params = &self.annotation.params;
        let exists = |number: &usize| {
            params[*number].after_dashes == side && self.holds(&params[*number].exists)
        };
        let numbers: Vec<usize> = (0..params.len()).filter(exists).collect();
        let needed = |number: usize| match params[number].size {
            Arity::One => 1,
            Arity::Exactly(count) => count,
            _ => params[number].at_least,
        };
        let mut share: Vec<usize> = numbers.iter().map(|number| needed(*number)).collect();
        let needed_in_all = share.iter().sum();
        let mut left = count.checked_sub(needed_in_all).ok_or(OperandCountFault::TooFew)?;
        for (number, share) in numbers.iter().zip(&mut share) {
            if params[*number].size == Arity::Optional && left > 0 {
                *share += 1;
                left -= 1;
            }
        }
        for (number, share) in numbers.iter().zip(&mut share) {
            if params[*number].size == Arity::List {
                *share += left;
                left = 0;
            }
        }
        if left > 0 {
            return Err(OperandCountFault::TooMany);
        }
        Ok(numbers
            .iter()
            .zip(share)
            .flat_map(|(number, share)| std::iter::repeat_n(*number, share))
            .collect())
    }

    /// Returns true if the condition holds.
    pub fn holds(&self, condition: &'a Condition) -> bool {
        match condition {
            Condition::Always => true,
            Condition::Never => false,
            _ => {
                let known = self.known.borrow().get(&std::ptr::from_ref(condition)).copied();
                known.unwrap_or_else(|| {
                    let holds = self.find_out(condition);
                    self.known.borrow_mut().insert(condition, holds);
                    holds
                })
            }
        }
    }

    fn find_out(&self, condition: &'a Condition) -> bool {
        match condition {
            Condition::Always => true,
            Condition::Never => false,
            Condition::Given(subject) => self.count(*subject) > 0,
            Condition::All(all) => all.iter().all(|condition| self.holds(condition)),
            Condition::Any(any) => any.iter().any(|condition| self.holds(condition)),
            Condition::Not(condition) => !self.holds(condition),
            Condition::Value { which, of, test } => self.passes(*which, of, test),
            Condition::Count { of, at_least, at_most } => {
                let count = of.iter().map(|subject| self.count(*subject)).sum();
                (*at_least..=*at_most).contains(&count)
            }
            Condition::LastOf { of, is } => self
                .reading
                .given
                .iter()
                .rev()
                .find(|given| of.contains(&given.option))
                .is_some_and(|given| given.option == *is),
            Condition::Environment { name, test } => {
                let value = (self.environment)(name);
                value.is_some_and(|value| {
                    test.as_ref().is_none_or(|test| accepts(test, value.as_bytes()))
                })
            }
        }
    }

    /// The first case that holds.
    pub fn case<T>(&self, cases: &'a Cases<T>) -> Option<&'a T> {
        cases.0.iter().find(|case| self.holds(&case.when)).map(|case| &case.is)
    }

    /// All entries that hold.
    pub fn holding<T>(&self, entries: &'a [Conditional<T>]) -> impl Iterator<Item = &'a T> {
        entries.iter().filter(|entry| self.holds(&entry.when)).map(|entry| &entry.is)
    }

    /// How many times an option is given, or how many operands an entry got.
    pub fn count(&self, subject: Subject) -> usize {
        match subject {
            Subject::Option(number) => {
                self.reading.given.iter().filter(|given| given.option == number).count()
            }
            Subject::Param(number) => self.dealt.iter().filter(|dealt| **dealt == number).count(),
        }
    }

    /// The arguments dealt to a PARAMS entry.
    pub fn arguments(&self, param: usize) -> impl Iterator<Item = usize> {
        let dealt = self.reading.operands.iter().zip(&self.dealt);
        dealt.filter(move |(_, dealt)| **dealt == param).map(|(operand, _)| operand.argument)
    }

    /// The whole of an argument.
    pub fn whole(&self, argument: usize) -> Piece {
        Piece { argument, start: 0, end: self.argv[argument].len() }
    }

    /// The bytes of a piece.
    pub fn bytes(&self, piece: Piece) -> &'a [u8] {
        &self.argv[piece.argument].as_bytes()[piece.start..piece.end]
    }

    fn passes(&self, which: Which, of: &[Subject], test: &Test) -> bool {
        let pieces: Vec<Piece> = of.iter().flat_map(|subject| self.pieces(*subject)).collect();
        let mut values = pieces.iter().map(|piece| self.bytes(*piece));
        match which {
            Which::Some => values.any(|value| accepts(test, value)),
            Which::Every => values.all(|value| accepts(test, value)),
            Which::Last => pieces
                .iter()
                .max_by_key(|piece| (piece.argument, piece.start))
                .is_some_and(|piece| accepts(test, self.bytes(*piece))),
        }
    }

    /// All values of an option or operand, split at its separator.
    fn pieces(&self, subject: Subject) -> Vec<Piece> {
        match subject {
            Subject::Option(number) => {
                let rule = &self.annotation.options[number].value;
                let given = self.reading.given.iter().filter(|given| given.option == number);
                given
                    .flat_map(|given| &given.values)
                    .flat_map(|piece| self.split(*piece, rule))
                    .collect()
            }
            Subject::Param(number) => {
                let rule = &self.annotation.params[number].value;
                self.arguments(number)
                    .flat_map(|argument| self.split(self.whole(argument), rule))
                    .collect()
            }
        }
    }

    /// The pieces of a value between separators.
    pub fn split(&self, piece: Piece, rule: &ValueRule) -> Vec<Piece> {
        let Some(separator) = &rule.separator else { return vec![piece] };
        let bytes = self.bytes(piece);
        let mut pieces = Vec::new();
        let mut start = 0;
        while let Some(at) = bytes[start..]
            .windows(separator.len())
            .position(|window| window == separator.as_bytes())
        {
            pieces.push(Piece {
                start: piece.start + start,
                end: piece.start + start + at,
                ..piece
            });
            start += at + separator.len();
        }
        pieces.push(Piece { start: piece.start + start, ..piece });
        pieces
    }
}

fn accepts(test: &Test, value: &[u8]) -> bool {
    match test {
        Test::Is(words) => words.iter().any(|word| word.as_bytes() == value),
        Test::Patterns(patterns) => patterns.iter().any(|pattern| pattern.is_match(value)),
    }
}
