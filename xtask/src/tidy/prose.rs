//! Comments and documents.

use std::{fs, path::Path};

use anyhow::{Context, Result};

use super::{
    Check, Finding,
    sources::{self, Source},
};

/// Columns of a line.
const WIDEST: usize = 100;

/// A doc comment that begins so paraphrases where a noun is wanted.
const OPENINGS: [&str; 5] = ["What", "Whether", "Who", "Whose", "The same"];

/// Documents with a limit: lines of the one, words of the other.
const README_LINES: usize = 150;
const ARCHITECTURE_WORDS: usize = 2000;

pub fn wide_lines(root: &Path, sources: &[Source]) -> Result<Check> {
    let mut findings = Vec::new();
    for source in sources.iter().filter(|source| !source.is_test) {
        note_wide(&source.path, source.own_text().lines(), &mut findings);
    }
    for path in sources::listed(root, "*.md")? {
        let text = fs::read_to_string(root.join(&path));
        let text = text.with_context(|| format!("cannot read {path}"))?;
        // A row of a table can't be broken, nor the text of another language.
        let mut is_code = false;
        let prose = text.lines().map(|line| {
            is_code ^= line.trim_start().starts_with("```");
            if is_code || line.trim_start().starts_with('|') { "" } else { line }
        });
        note_wide(&path, prose, &mut findings);
    }
    Ok(Check { name: "wide-lines", rule: "a line has at most 100 columns", findings })
}

fn note_wide<'l>(path: &str, lines: impl Iterator<Item = &'l str>, findings: &mut Vec<Finding>) {
    for (number, line) in lines.enumerate() {
        let columns = line.chars().count();
        if columns > WIDEST && !is_one_word(line) {
            findings.push(Finding::new(path, number + 1, format!("{columns} columns")));
        }
    }
}

/// A name or an address alone on its line has no place to break.
fn is_one_word(line: &str) -> bool {
    let text = line.trim_start().trim_start_matches(['/', '!', '-']).trim_start();
    !text.contains(' ')
}

pub fn openings(sources: &[Source]) -> Check {
    let mut findings = Vec::new();
    for source in sources {
        let mut is_inside = false;
        for (number, line) in source.own_text().lines().enumerate() {
            let text = line.trim_start();
            let doc = text.strip_prefix("///").or_else(|| text.strip_prefix("//!"));
            if let (Some(doc), false) = (doc, is_inside)
                && let Some(opening) = opening(doc.trim_start())
            {
                findings.push(Finding::new(&source.path, number + 1, opening));
            }
            is_inside = doc.is_some();
        }
    }
    Check {
        name: "doc-openings",
        rule: "a doc comment begins with the term, not with What, Whether, Who or The same",
        findings,
    }
}

fn opening(doc: &str) -> Option<&'static str> {
    let is_word = |rest: &str| !rest.starts_with(|next: char| next.is_alphanumeric());
    OPENINGS.into_iter().find(|word| doc.strip_prefix(word).is_some_and(is_word))
}

pub fn long_documents(root: &Path) -> Result<Check> {
    let read = |path: &str| {
        fs::read_to_string(root.join(path)).with_context(|| format!("cannot read {path}"))
    };
    let mut findings = Vec::new();
    let lines = read("README.md")?.lines().count();
    if lines > README_LINES {
        findings.push(Finding::new("README.md", 0, format!("{lines} lines")));
    }
    let words = read("ARCHITECTURE.md")?.split_whitespace().count();
    if words > ARCHITECTURE_WORDS {
        findings.push(Finding::new("ARCHITECTURE.md", 0, format!("{words} words")));
    }
    Ok(Check {
        name: "long-documents",
        rule: "README.md has at most 150 lines, ARCHITECTURE.md 2,000 words",
        findings,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn openings_are_words() {
        assert_eq!(opening("What lies there."), Some("What"));
        assert_eq!(opening("The same, by name."), Some("The same"));
        assert_eq!(opening("Whatever lies there."), None);
        assert_eq!(opening("The lease."), None);
    }

    #[test]
    fn a_wide_line_is_found_where_it_can_be_broken() {
        let (words, word) = ("ab ".repeat(40), "a".repeat(120));
        let mut findings = Vec::new();
        note_wide("a.rs", [&words[..], &word[..], "short"].into_iter(), &mut findings);
        assert_eq!(findings, [Finding::new("a.rs", 1, "120 columns")]);
    }
}
