//! Pathname expansion (bash(1), "Pathname Expansion") with bash's defaults: no dotglob, nullglob,
//! extglob or globstar. Names come in byte order; the shell's own order follows the locale.

use std::{
    ffi::{OsStr, OsString},
    fs,
    os::unix::ffi::OsStrExt as _,
    path::Path,
};

use super::words::Unknowable;

/// A field of a word: its text, and which parts may be a pattern (unquoted).
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) struct WordField {
    pieces: Vec<(String, Quoting)>,
}

/// Quoting of a piece: `*`, `?` and `[` are special only where it is unquoted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Quoting {
    Quoted,
    Unquoted,
}

/// Limit of names in an expansion; nobody reads a longer plan.
const NAMES: usize = 100_000;

impl WordField {
    pub(super) fn push(&mut self, text: &str, quoting: Quoting) {
        self.pieces.push((text.to_owned(), quoting));
    }

    /// The field as literal text.
    pub(super) fn literal(&self) -> String {
        self.pieces.iter().map(|(text, _)| text.as_str()).collect()
    }

    /// Names that match, relative to `cwd`; the field itself when it is no pattern or nothing
    /// matches.
    pub(super) fn names(&self, cwd: Option<&Path>) -> Result<Vec<OsString>, Unknowable> {
        let literal = || Ok(vec![OsString::from(self.literal())]);
        let steps = self.steps()?;
        if !steps.iter().any(|step| step.pattern.is_some()) {
            return literal();
        }
        let is_absolute = steps.first().is_some_and(|step| !step.slashes.is_empty());
        let base = match cwd {
            _ if is_absolute => Path::new("/"),
            Some(cwd) => cwd,
            None => {
                return Err(Unknowable::new(
                    "which names match a pattern is known only when it runs",
                ));
            }
        };
        let (mut names, mut is_found) = (vec![OsString::new()], false);
        for step in &steps {
            names.iter_mut().for_each(|name| name.push(&step.slashes));
            is_found |= step.pattern.is_some();
            names = match &step.pattern {
                Some(pattern) => {
                    names.iter().flat_map(|name| pattern.names_in(base, name)).take(NAMES).collect()
                }
                None => {
                    names.iter_mut().for_each(|name| name.push(&step.text));
                    // A slash at the end requires a directory.
                    let is_there = |name: &OsString| {
                        !is_found || fs::symlink_metadata(base.join(name)).is_ok()
                    };
                    names.into_iter().filter(is_there).collect()
                }
            };
        }
        names.sort();
        if names.is_empty() { literal() } else { Ok(names) }
    }

    /// Its components. Quotes do not hide a slash from pathname expansion.
    fn steps(&self) -> Result<Vec<PatternStep>, Unknowable> {
        let mut steps = vec![(String::new(), Vec::new())];
        for (text, quoting) in &self.pieces {
            for character in text.chars() {
                let (slashes, characters) = steps.last_mut().expect("there is one from the start");
                match (character, characters.is_empty()) {
                    ('/', true) => slashes.push('/'),
                    ('/', false) => steps.push(("/".to_owned(), Vec::new())),
                    _ => characters.push((character, *quoting)),
                }
            }
        }
        steps
            .into_iter()
            .map(|(slashes, characters)| PatternStep::new(slashes, &characters))
            .collect()
    }
}

/// A component of a path, and the slashes before it.
struct PatternStep {
    slashes: String,
    text: String,
    /// `None` if nothing in it is special.
    pattern: Option<Name>,
}

impl PatternStep {
    fn new(slashes: String, characters: &[(char, Quoting)]) -> Result<Self, Unknowable> {
        let text = characters.iter().map(|(character, _)| character).collect();
        Ok(Self { slashes, text, pattern: Name::new(characters)? })
    }
}

/// Pattern of a file name.
struct Name {
    /// Two forms: characters for names that are UTF-8, bytes for all others. bash also matches
    /// names that are invalid in its locale by bytes.
    of_characters: Vec<Like>,
    of_bytes: Vec<Like>,
}

/// One element of a pattern, for a character or a byte.
#[derive(Debug, Clone)]
enum Like {
    Itself(u32),
    Any,
    AnyMany,
    OneOf { ranges: Vec<(u32, u32)>, is_negated: bool },
}

impl Name {
    /// `None` if it matches only itself.
    fn new(characters: &[(char, Quoting)]) -> Result<Option<Self>, Unknowable> {
        let mut of_characters = Vec::new();
        let mut rest = characters;
        while let Some(((character, quoting), after)) = rest.split_first() {
            rest = after;
            of_characters.push(match (character, quoting) {
                ('*', Quoting::Unquoted) => Like::AnyMany,
                ('?', Quoting::Unquoted) => Like::Any,
                ('[', Quoting::Unquoted) => match set(after)? {
                    Some((set, after)) => {
                        rest = after;
                        set
                    }
                    // Literal without its closing bracket.
                    None => Like::Itself(u32::from('[')),
                },
                (character, _) => Like::Itself(u32::from(*character)),
            });
        }
        if of_characters.iter().all(|like| matches!(like, Like::Itself(_))) {
            return Ok(None);
        }
        let of_bytes = of_characters.iter().flat_map(Like::as_bytes).collect();
        Ok(Some(Self { of_characters, of_bytes }))
    }

    /// Matching names of a directory, prefixed with the directory's name.
    fn names_in(&self, base: &Path, directory: &OsStr) -> Vec<OsString> {
        let entries = fs::read_dir(base.join(directory)).into_iter().flatten().flatten();
        let fitting =
            entries.map(|entry| entry.file_name()).filter(|name| self.fits(name.as_bytes()));
        fitting.take(NAMES).map(|name| [directory, &name].into_iter().collect()).collect()
    }

    fn fits(&self, name: &[u8]) -> bool {
        // Only a literal dot matches a leading dot.
        let dot = u32::from('.');
        if name.starts_with(b".")
            && !matches!(self.of_characters.first(), Some(Like::Itself(first)) if *first == dot)
        {
            return false;
        }
        match std::str::from_utf8(name) {
            Ok(text) => fits(&self.of_characters, &text.chars().map(u32::from).collect::<Vec<_>>()),
            Err(_) => {
                fits(&self.of_bytes, &name.iter().copied().map(u32::from).collect::<Vec<_>>())
            }
        }
    }
}

impl Like {
    fn takes(&self, place: u32) -> bool {
        match self {
            Self::Itself(itself) => *itself == place,
            Self::Any | Self::AnyMany => true,
            Self::OneOf { ranges, is_negated } => {
                ranges.iter().any(|(first, last)| (*first..=*last).contains(&place)) != *is_negated
            }
        }
    }

    fn as_bytes(&self) -> Vec<Self> {
        let bytes = |character: u32| {
            let text = char::from_u32(character).map(String::from).unwrap_or_default();
            text.into_bytes().into_iter().map(u32::from)
        };
        match self {
            Self::Itself(itself) => bytes(*itself).map(Self::Itself).collect(),
            Self::OneOf { ranges, is_negated } => {
                let of_bytes = |&(first, last): &(u32, u32)| match (first < 0x80, last < 0x80) {
                    (true, true) => vec![(first, last)],
                    _ => bytes(first).chain(bytes(last)).map(|byte| (byte, byte)).collect(),
                };
                let ranges = ranges.iter().flat_map(of_bytes).collect();
                vec![Self::OneOf { ranges, is_negated: *is_negated }]
            }
            Self::Any | Self::AnyMany => vec![self.clone()],
        }
    }
}

/// Returns true if the whole name matches. Backtracks to the last star only, one place at a time.
fn fits(pattern: &[Like], name: &[u32]) -> bool {
    let (mut at, mut place) = (0, 0);
    let mut star = None;
    while place < name.len() {
        match pattern.get(at) {
            Some(Like::AnyMany) => {
                star = Some((at, place));
                at += 1;
            }
            Some(like) if like.takes(name[place]) => (at, place) = (at + 1, place + 1),
            _ => {
                let Some((star_at, taken)) = star else { return false };
                star = Some((star_at, taken + 1));
                (at, place) = (star_at + 1, taken + 1);
            }
        }
    }
    pattern[at..].iter().all(|like| matches!(like, Like::AnyMany))
}

type Quoted = (char, Quoting);

/// The bracket expression after an unquoted `[`, up to its `]`, and the rest; `None` without a
/// closing bracket.
fn set(characters: &[Quoted]) -> Result<Option<(Like, &[Quoted])>, Unknowable> {
    let is_negated = matches!(characters, [('!' | '^', Quoting::Unquoted), ..]);
    let members = &characters[usize::from(is_negated)..];
    // The first member may be a `]`.
    let is_end = |(at, (character, quoting)): (usize, &Quoted)| {
        at > 0 && (*character, *quoting) == (']', Quoting::Unquoted)
    };
    let Some(end) = members.iter().enumerate().position(is_end) else { return Ok(None) };
    let (mut left, after) = (&members[..end], &members[end + 1..]);
    let mut ranges = Vec::new();
    while let Some(((first, quoting), rest)) = left.split_first() {
        if (*first, *quoting) == ('[', Quoting::Unquoted)
            && matches!(rest, [(':' | '.' | '=', _), ..])
        {
            return Err(Unknowable::new(
                "a character class in a pattern is expanded only when it runs",
            ));
        }
        let (last, rest) = match rest {
            [('-', Quoting::Unquoted), (last, _), rest @ ..] => (last, rest),
            rest => (first, rest),
        };
        ranges.push((u32::from(*first), u32::from(*last)));
        left = rest;
    }
    Ok(Some((Like::OneOf { ranges, is_negated }, after)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_matched_as_bash_does() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["a.log", "b.log", ".hidden.log", "c[1]", "c1", "sub/d.log"] {
            let path = dir.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "").unwrap();
        }
        let cases: &[(&str, Quoting, &str)] = &[
            ("*.log", Quoting::Unquoted, "a.log b.log"),
            ("*.log", Quoting::Quoted, "*.log"),
            ("**.log", Quoting::Unquoted, "a.log b.log"),
            ("./*.log", Quoting::Unquoted, "./a.log ./b.log"),
            ("*/", Quoting::Unquoted, "sub/"),
            ("*/*", Quoting::Unquoted, "sub/d.log"),
            ("[^a].log", Quoting::Unquoted, "b.log"),
            ("c[1]", Quoting::Unquoted, "c1"),
            ("c[1", Quoting::Unquoted, "c[1"),
            ("c[[]*", Quoting::Unquoted, "c[1]"),
            ("c[1*", Quoting::Unquoted, "c[1]"),
            ("[]b]*", Quoting::Unquoted, "b.log"),
            (".*", Quoting::Unquoted, ".hidden.log"),
            ("[.]*", Quoting::Unquoted, "[.]*"),
            ("s*/d.log", Quoting::Unquoted, "sub/d.log"),
            ("s*/e.log", Quoting::Unquoted, "s*/e.log"),
            ("a.log/*", Quoting::Unquoted, "a.log/*"),
            ("?.l*o*g", Quoting::Unquoted, "a.log b.log"),
            ("*.txt", Quoting::Unquoted, "*.txt"),
        ];
        for (text, quoting, expected) in cases {
            let mut field = WordField::default();
            field.push(text, *quoting);
            let names = field.names(Some(dir.path())).unwrap();
            let names: Vec<_> = names.iter().map(|name| name.to_str().unwrap()).collect();
            assert_eq!(names.join(" "), *expected, "{text}");
        }
    }

    /// bash itself is the judge; names that are no UTF-8 lie beside others and in their way.
    #[test]
    fn names_that_are_no_text_are_matched_as_bash_does() {
        let dir = tempfile::tempdir().unwrap();
        let names: [&[u8]; 6] =
            [b"plain", b"\xff", b"x\xff\xfey", b"\xc3\xa9", b"\xc3\xa9\xff", b"d\xfe/in\xff"];
        for name in names {
            let path = dir.path().join(OsStr::from_bytes(name));
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "").unwrap();
        }
        for pattern in [
            "*", "?", "??", "???", "x*", "x??y", "*y", "*/*", "d?/*", "é*", "[é]*", "[!p]*",
            "[a-z]*", "x[!a]*",
        ] {
            let mut field = WordField::default();
            field.push(pattern, Quoting::Unquoted);
            for cwd in [dir.path().to_owned(), dir.path().join(OsStr::from_bytes(b"d\xfe"))] {
                let found = field.names(Some(&cwd)).unwrap();
                let mut bash = std::process::Command::new("bash");
                bash.args([
                    "-c",
                    &format!("LC_ALL=C.UTF-8; set -- {pattern}; printf '%s\\0' \"$@\""),
                ]);
                let said = bash.current_dir(&cwd).output().unwrap().stdout;
                let mut expected: Vec<_> =
                    said.split(|byte| *byte == 0).map(OsStr::from_bytes).collect();
                expected.pop();
                expected.sort();
                assert_eq!(found, expected, "{pattern}");
            }
        }
    }

    #[test]
    fn a_quoted_part_of_a_pattern_is_no_pattern() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("*x"), "").unwrap();
        fs::write(dir.path().join("yx"), "").unwrap();
        let mut field = WordField::default();
        field.push("*", Quoting::Quoted);
        field.push("?", Quoting::Unquoted);
        assert_eq!(field.names(Some(dir.path())).unwrap(), ["*x"]);
    }
}
