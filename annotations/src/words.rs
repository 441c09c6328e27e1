//! Reads the words of one invocation by an annotation's options, as GNU getopt_long does: separates
//! options, their values and operands. The meaning of values is left to [`crate::facts`].

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;

use crate::model::{Annotation, Arity, Numeric, Opt};

/// Part of one argument: `argv[argument][start..end]`, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    pub argument: usize,
    pub start: usize,
    pub end: usize,
}

/// One option as given, with its values.
#[derive(Debug, Clone)]
pub struct GivenOption {
    pub option: usize,
    /// Where its name stands.
    pub name: Piece,
    pub values: Vec<Piece>,
}

/// One operand.
#[derive(Debug, Clone, Copy)]
pub struct Operand {
    pub argument: usize,
    /// It stands after `--`.
    pub after_dashes: bool,
}

/// All words of an invocation.
#[derive(Debug, Default)]
pub struct InvocationWords {
    pub given: Vec<GivenOption>,
    pub operands: Vec<Operand>,
    /// Where `--` stood.
    pub dashes: Option<usize>,
}

/// A word that does not fit the annotation.
#[derive(Debug)]
pub struct Misfit {
    /// How far reading came: argument and byte.
    pub at: (usize, usize),
    pub why: Why,
}

#[derive(Debug)]
pub enum Why {
    /// Not listed, as written.
    Flag(String),
    /// Anything else, as a sentence.
    Shape(String),
}

/// How to read.
#[derive(Debug, Clone, Copy)]
pub struct Manner {
    /// The first argument to read.
    pub from: usize,
    /// No option is read after the first operand.
    pub options_first: bool,
    /// Reading ends at the first operand (which names a subcommand).
    pub until_operand: bool,
}

/// Reads `argv` by `annotation`'s options.
pub fn read(
    annotation: &Annotation,
    argv: &[OsString],
    manner: Manner,
) -> Result<InvocationWords, Misfit> {
    let mut reader = WordReader {
        annotation,
        argv,
        manner,
        next: manner.from,
        reading: InvocationWords::default(),
    };
    if annotation.style.old_style {
        reader.old_style_bundle()?;
    }
    if annotation.style.expression {
        reader.expression()?
    } else {
        reader.all()?
    }
    Ok(reader.reading)
}

struct WordReader<'a> {
    annotation: &'a Annotation,
    argv: &'a [OsString],
    manner: Manner,
    /// The argument to read next.
    next: usize,
    reading: InvocationWords,
}

impl<'a> WordReader<'a> {
    fn all(&mut self) -> Result<(), Misfit> {
        let mut options_ended = false;
        while let Some(word) = self.word() {
            if options_ended {
                self.operand();
            } else if let Some(option) =
                self.find(|option| option.words.iter().any(|name| name.as_bytes() == word))
            {
                self.whole_word(option)?;
            } else if word == b"--" {
                self.reading.dashes = Some(self.next);
                self.next += 1;
                options_ended = true;
            } else if word.len() > 1 && word[0] == b'-' {
                self.dashed(word)?;
            } else {
                if self.manner.until_operand {
                    self.operand();
                    return Ok(());
                }
                options_ended = self.manner.options_first;
                self.operand();
            }
        }
        Ok(())
    }

    fn dashed(&mut self, word: &'a [u8]) -> Result<(), Misfit> {
        if let Some(option) = self.numeric(word) {
            let name = Piece { argument: self.next, start: 0, end: 1 };
            let value = Piece { argument: self.next, start: 1, end: word.len() };
            self.next += 1;
            self.give(option, name, vec![value]);
            return Ok(());
        }
        if self.annotation.style.long_arg_single_dash {
            return self.single_dash(word);
        }
        if word.starts_with(b"--") { self.long(word) } else { self.bundle(word) }
    }

    /// `-5`, where the annotation takes that for an option with a number.
    fn numeric(&self, word: &[u8]) -> Option<usize> {
        let form = if self.next == self.manner.from { Numeric::First } else { Numeric::Anywhere };
        let digits = word[1..].iter().all(u8::is_ascii_digit);
        self.find(|option| match option.numeric {
            Some(Numeric::Anywhere) => digits,
            Some(Numeric::First) => digits && form == Numeric::First,
            None => false,
        })
    }

    /// `-resize`, whole; or one short option.
    fn single_dash(&mut self, word: &[u8]) -> Result<(), Misfit> {
        let name = &word[1..];
        let found = self.find(|option| {
            option.long.iter().any(|long| long.as_bytes() == name) || option.short == name
        });
        match found {
            Some(option) => self.whole_word(option),
            None => Err(self.unlisted(0, word)),
        }
    }

    /// An option that takes the whole of the word, with its values in the next ones.
    fn whole_word(&mut self, option: usize) -> Result<(), Misfit> {
        let name = Piece { argument: self.next, start: 0, end: self.length(self.next) };
        self.next += 1;
        let values = self.values(option, None)?;
        self.give(option, name, values);
        Ok(())
    }

    fn long(&mut self, word: &[u8]) -> Result<(), Misfit> {
        let end = word.iter().position(|byte| *byte == b'=').unwrap_or(word.len());
        let Some(option) = self.long_name(&word[2..end]) else {
            return Err(self.unlisted(0, &word[..end]));
        };
        let name = Piece { argument: self.next, start: 0, end };
        let attached = (end < word.len()).then_some(Piece {
            argument: self.next,
            start: end + 1,
            end: word.len(),
        });
        if attached.is_some() && self.option(option).size == Arity::Nothing {
            return Err(self.shape(format!("{} takes no value", self.option(option).display())));
        }
        self.next += 1;
        let values = self.values(option, attached)?;
        self.give(option, name, values);
        Ok(())
    }

    /// The option of that long name, or of the one name that begins with it.
    fn long_name(&self, name: &[u8]) -> Option<usize> {
        if let Some(option) =
            self.find(|option| option.long.iter().any(|long| long.as_bytes() == name))
        {
            return Some(option);
        }
        if self.annotation.style.no_abbreviations || name.is_empty() {
            return None;
        }
        let begins = |long: &String| long.as_bytes().starts_with(name);
        if self.annotation.known_long.iter().any(begins) {
            return None;
        }
        let mut found = (0..self.annotation.options.len())
            .filter(|option| self.option(*option).long.iter().any(begins));
        let option = found.next()?;
        found.next().is_none().then_some(option)
    }

    /// `-abfVALUE`
    fn bundle(&mut self, word: &[u8]) -> Result<(), Misfit> {
        let argument = self.next;
        self.next += 1;
        for (at, character) in word.iter().enumerate().skip(1) {
            let Some(option) = self.find(|option| option.short.contains(character)) else {
                self.next = argument;
                return Err(self.unlisted(at, &[b'-', *character]));
            };
            let name = Piece { argument, start: at, end: at + 1 };
            if self.option(option).size == Arity::Nothing {
                self.give(option, name, Vec::new());
                continue;
            }
            let attached =
                (at + 1 < word.len()).then_some(Piece { argument, start: at + 1, end: word.len() });
            let values = self.values(option, attached)?;
            self.give(option, name, values);
            return Ok(());
        }
        Ok(())
    }

    /// The first word of `tar xzf a.tgz`.
    fn old_style_bundle(&mut self) -> Result<(), Misfit> {
        let Some(word) = self.word().filter(|word| !word.is_empty() && word[0] != b'-') else {
            return Ok(());
        };
        let argument = self.next;
        self.next += 1;
        for (at, character) in word.iter().enumerate() {
            let Some(option) = self.find(|option| option.short.contains(character)) else {
                self.next = argument;
                return Err(self.unlisted(at, &[b'-', *character]));
            };
            let values = match self.option(option).size {
                Arity::Optional => Vec::new(),
                _ => self.values(option, None)?,
            };
            self.give(option, Piece { argument, start: at, end: at + 1 }, values);
        }
        Ok(())
    }

    /// The values of an option, `attached` being the rest of its own word.
    fn values(&mut self, option: usize, attached: Option<Piece>) -> Result<Vec<Piece>, Misfit> {
        let listed = self.option(option);
        let mut values: Vec<Piece> = attached.into_iter().collect();
        let wanted = match &listed.size {
            Arity::Nothing | Arity::Optional => values.len(),
            Arity::One => 1,
            Arity::Exactly(count) => *count,
            Arity::List if listed.value.separator.is_some() => 1,
            Arity::List => values.len() + self.words_until_dash(),
            Arity::Until(ends) => self.words_until(ends).ok_or_else(|| self.lacking(listed))?,
        };
        while values.len() < wanted {
            if self.next >= self.argv.len() {
                return Err(self.lacking(listed));
            }
            values.push(Piece { argument: self.next, start: 0, end: self.length(self.next) });
            self.next += 1;
        }
        Ok(values)
    }

    fn words_until_dash(&self) -> usize {
        let rest = &self.argv[self.next.min(self.argv.len())..];
        rest.iter().take_while(|word| word.len() < 2 || !word.as_bytes().starts_with(b"-")).count()
    }

    fn words_until(&self, ends: &[String]) -> Option<usize> {
        let rest = &self.argv[self.next.min(self.argv.len())..];
        rest.iter()
            .position(|word| ends.iter().any(|end| end.as_bytes() == word.as_bytes()))
            .map(|at| at + 1)
    }

    /// `find [options] [operands] [expression]`
    fn expression(&mut self) -> Result<(), Misfit> {
        while let Some(word) = self.word() {
            if word.len() < 2 || word[0] != b'-' || self.expression_word(word).is_some() {
                break;
            }
            self.dashed(word)?;
        }
        while self.word().is_some_and(|word| !begins_expression(word)) {
            self.operand();
        }
        while let Some(word) = self.word() {
            match self.expression_word(word) {
                Some(option) => self.whole_word(option)?,
                None if begins_expression(word) => return Err(self.unlisted(0, word)),
                None => {
                    let word = String::from_utf8_lossy(word).into_owned();
                    return Err(self
                        .shape(format!("{word} stands in the expression, but is no part of one")));
                }
            }
        }
        Ok(())
    }

    fn expression_word(&self, word: &[u8]) -> Option<usize> {
        self.find(|option| {
            option.in_expression && option.words.iter().any(|name| name.as_bytes() == word)
        })
    }

    fn word(&self) -> Option<&'a [u8]> {
        self.argv.get(self.next).map(|word| word.as_bytes())
    }

    fn length(&self, argument: usize) -> usize {
        self.argv[argument].len()
    }

    fn option(&self, option: usize) -> &'a Opt {
        &self.annotation.options[option]
    }

    fn find(&self, test: impl Fn(&Opt) -> bool) -> Option<usize> {
        self.annotation.options.iter().position(test)
    }

    fn operand(&mut self) {
        self.reading
            .operands
            .push(Operand { argument: self.next, after_dashes: self.reading.dashes.is_some() });
        self.next += 1;
    }

    fn give(&mut self, option: usize, name: Piece, values: Vec<Piece>) {
        self.reading.given.push(GivenOption { option, name, values });
    }

    fn unlisted(&self, at: usize, flag: &[u8]) -> Misfit {
        Misfit { at: (self.next, at), why: Why::Flag(String::from_utf8_lossy(flag).into_owned()) }
    }

    fn lacking(&self, option: &Opt) -> Misfit {
        self.shape(format!("{} lacks a value", option.display()))
    }

    fn shape(&self, reason: String) -> Misfit {
        Misfit { at: (self.next, 0), why: Why::Shape(reason) }
    }
}

/// Returns true if the word ends the operands of `find`.
fn begins_expression(word: &[u8]) -> bool {
    matches!(word, b"(" | b")" | b"!" | b",") || (word.len() > 1 && word[0] == b'-')
}
