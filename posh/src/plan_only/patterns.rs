//! Pathname expansion (bash(1), "Pathname Expansion") with bash's defaults: no
//! dotglob, nullglob, extglob or globstar. Names come in byte order; the shell's
//! own order follows the locale.

use std::{
    ffi::OsString,
    path::{Path, PathBuf},
};

use glob::{MatchOptions, Pattern, glob_with};

use super::words::Unknowable;

/// A field of a word: its text, and which of it may be a pattern (unquoted).
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) struct Field {
    pieces: Vec<(String, Quoting)>,
}

/// Whether `*`, `?` and `[` mean anything in a piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Quoting {
    Quoted,
    Unquoted,
}

/// A shell lists a directory to expand a pattern; a plan stops where nobody
/// reads on.
const NAMES: usize = 100_000;

impl Field {
    pub(super) fn push(&mut self, text: &str, quoting: Quoting) {
        self.pieces.push((text.to_owned(), quoting));
    }

    /// The field without regard to patterns.
    pub(super) fn literal(&self) -> String {
        self.pieces.iter().map(|(text, _)| text.as_str()).collect()
    }

    /// The names it matches, as seen from `cwd`; itself when it is no pattern or
    /// matches nothing.
    pub(super) fn names(&self, cwd: Option<&Path>) -> Result<Vec<OsString>, Unknowable> {
        let literal = || Ok(vec![OsString::from(self.literal())]);
        let Some(pattern) = self.pattern()? else { return literal() };
        let absolute = pattern.starts_with('/');
        let base = match cwd {
            _ if absolute => String::new(),
            Some(cwd) => match cwd.to_str() {
                Some(cwd) => format!("{}/", Pattern::escape(cwd.trim_end_matches('/'))),
                None => return Err(Unknowable::new("its directory's name is not UTF-8")),
            },
            None => return Err(Unknowable::new("which names match a pattern is known only when it runs")),
        };
        // The library drops a leading `./` and a trailing `/`; a shell keeps both.
        let bare = pattern.trim_start_matches("./");
        let (lead, end) = (&pattern[..pattern.len() - bare.len()], if bare.ends_with('/') { "/" } else { "" });
        let options =
            MatchOptions { case_sensitive: true, require_literal_separator: true, require_literal_leading_dot: true };
        // A pattern that makes no sense (`a[b`) stands for itself.
        let Ok(matches) = glob_with(&format!("{base}{bare}"), options) else { return literal() };
        let strip = cwd.filter(|_| !absolute).unwrap_or(Path::new(""));
        let names: Vec<OsString> = matches
            .flatten()
            .take(NAMES)
            .map(|path| {
                let mut name = OsString::from(lead);
                name.push(path.strip_prefix(strip).unwrap_or(&path));
                name.push(end);
                name
            })
            .collect();
        if names.is_empty() { literal() } else { Ok(names) }
    }

    /// The directory that a shell lists first to find the names, as seen from `cwd`; `None` when it is no pattern.
    pub(super) fn listed_directory(&self, cwd: &Path) -> Option<PathBuf> {
        let mut before = String::new();
        for (text, quoting) in &self.pieces {
            let special = text.find(['*', '?', '[']).filter(|_| *quoting == Quoting::Unquoted);
            before.push_str(&text[..special.unwrap_or(text.len())]);
            if special.is_some() {
                let end = before.rfind('/').map_or(0, |slash| slash + 1);
                return Some(cwd.join(&before[..end]));
            }
        }
        None
    }

    /// Whether anything in it may be special.
    pub(super) fn is_pattern(&self) -> bool {
        let is_special =
            |(text, quoting): &(String, Quoting)| *quoting == Quoting::Unquoted && text.contains(['*', '?', '[']);
        self.pieces.iter().any(is_special)
    }

    /// In the library's language, or `None` when nothing in it is special.
    fn pattern(&self) -> Result<Option<String>, Unknowable> {
        let mut pattern = String::new();
        let mut special = false;
        for (text, quoting) in &self.pieces {
            if *quoting == Quoting::Quoted {
                pattern.push_str(&Pattern::escape(text));
                continue;
            }
            if text.contains("[[:") || text.contains("[[.") || text.contains("[[=") {
                return Err(Unknowable::new("a character class in a pattern is expanded only when it runs"));
            }
            special |= text.contains(['*', '?', '[']);
            // Without globstar two stars are one; and `[^a]` is another spelling of `[!a]`.
            for character in text.replace("[^", "[!").chars() {
                if !(character == '*' && pattern.ends_with('*')) {
                    pattern.push(character);
                }
            }
        }
        Ok(special.then_some(pattern))
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

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
            ("*.txt", Quoting::Unquoted, "*.txt"),
        ];
        for (text, quoting, expected) in cases {
            let mut field = Field::default();
            field.push(text, *quoting);
            let names = field.names(Some(dir.path())).unwrap();
            let names: Vec<_> = names.iter().map(|name| name.to_str().unwrap()).collect();
            assert_eq!(names.join(" "), *expected, "{text}");
        }
    }

    #[test]
    fn the_first_directory_of_a_pattern() {
        type Pieces<'a> = &'a [(&'a str, Quoting)];
        let cases: &[(Pieces<'_>, Option<&str>)] = &[
            (&[("/d", Quoting::Quoted), ("/x/*.csv", Quoting::Unquoted)], Some("/d/x/")),
            (&[("/d/*/e/*", Quoting::Unquoted)], Some("/d/")),
            (&[("*.log", Quoting::Unquoted)], Some("/cwd/")),
            (&[("sub/a?", Quoting::Unquoted)], Some("/cwd/sub/")),
            (&[("/d/*", Quoting::Quoted)], None),
            (&[("/d/f", Quoting::Unquoted)], None),
        ];
        for (pieces, expected) in cases {
            let mut field = Field::default();
            pieces.iter().for_each(|(text, quoting)| field.push(text, *quoting));
            let listed = field.listed_directory(Path::new("/cwd"));
            assert_eq!(listed.as_deref(), expected.map(Path::new), "{pieces:?}");
        }
    }

    #[test]
    fn a_quoted_part_of_a_pattern_is_no_pattern() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("*x"), "").unwrap();
        fs::write(dir.path().join("yx"), "").unwrap();
        let mut field = Field::default();
        field.push("*", Quoting::Quoted);
        field.push("?", Quoting::Unquoted);
        assert_eq!(field.names(Some(dir.path())).unwrap(), ["*x"]);
    }
}
