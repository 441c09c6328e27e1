//! Random cases: files with what is hard at a seam, machines, and words.

use proptest::{collection::vec, prelude::*, sample::select, sample::subsequence};

use crate::{
    carry_out::{Case, Content, File},
    tried::{Operands, TRIED, Tried},
};

/// More flags than these at once are seldom what somebody writes.
const MOST_FLAGS: usize = 3;

/// Lines that sort alike, that are alike, that are numbers; bytes that are no text.
const LINES: [&[u8]; 22] = [
    b"a:1",
    b"a:1",
    b"A:1",
    b"b:two",
    b"two",
    b"",
    b"",
    b" a 1",
    b"10",
    b"9",
    b"1e3 x",
    b"2K",
    b"JAN",
    b"a\tb\tc",
    b"a:1\r",
    b"  two  words",
    b"\xc3\xa9t\xc3\xa9",
    b"\xff\xfe",
    b"nul\0here",
    b"a (x) y",
    b"zz",
    b"-1",
];
/// Of these, what is text in every locale.
const PLAIN_LINES: usize = 16;

fn line(kinds: usize) -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        12 => select(LINES[..kinds].to_vec()).prop_map(<[u8]>::to_vec),
        2 => vec(select(b"ab 1:".to_vec()), 0..6),
        1 => (select(b"ax".to_vec()), 100_usize..9000).prop_map(|(byte, count)| vec![byte; count]),
    ]
}

/// Lines, and whether the last one ends.
fn text(kinds: usize) -> impl Strategy<Value = Vec<u8>> {
    (vec(line(kinds), 0..12), prop::bool::weighted(0.7)).prop_map(|(lines, ends)| {
        let mut text = lines.join(&b'\n');
        if ends && !lines.is_empty() {
            text.push(b'\n');
        }
        text
    })
}

/// What most seams are like, so that most splits go on behind `cat`.
fn ended_text(kinds: usize) -> impl Strategy<Value = Vec<u8>> {
    (vec(line(kinds), 1..12), prop::bool::weighted(0.9)).prop_map(|(lines, ends)| {
        let mut text = lines.join(&b'\n');
        if ends {
            text.push(b'\n');
        }
        text
    })
}

fn locale() -> impl Strategy<Value = String> {
    select(crate::carry_out::locales())
}

fn words_of(tried: &'static Tried) -> impl Strategy<Value = Vec<String>> {
    let flags =
        subsequence(tried.flags.to_vec(), 0..=MOST_FLAGS.min(tried.flags.len())).prop_shuffle();
    (flags, select(tried.words.to_vec())).prop_map(|(flags, words)| {
        let words = flags.into_iter().chain(words.iter().copied());
        std::iter::once(tried.name).chain(words).map(str::to_owned).collect()
    })
}

fn name(number: usize, operands: Operands) -> String {
    const NAMES: [&str; 6] = ["a", "b c", "dir-é", "new\nline", "e.txt", "z"];
    match operands {
        Operands::Images => format!("image{number}.jpg"),
        Operands::Text | Operands::Trees => NAMES[number % NAMES.len()].to_owned(),
    }
}

fn content(operands: Operands) -> BoxedStrategy<Content> {
    match operands {
        Operands::Text => prop_oneof![
            8 => text(LINES.len()).prop_map(Content::Bytes),
            1 => Just(Content::Missing),
            1 => Just(Content::Directory),
        ]
        .boxed(),
        Operands::Trees => prop_oneof![
            6 => vec(select(vec!["a", "ab", "c", "d/a", "d/e"]), 0..4).prop_map(Content::Tree),
            1 => Just(Content::Missing),
            1 => Just(Content::Bytes(Vec::new())),
        ]
        .boxed(),
        Operands::Images => Just(Content::Image).boxed(),
    }
}

fn files(
    content: impl Strategy<Value = Content>,
    operands: Operands,
) -> impl Strategy<Value = Vec<File>> {
    vec((content, 0..2_usize), 2..6).prop_map(move |files| {
        let files = files.into_iter().enumerate();
        files
            .map(|(number, (content, owner))| File { name: name(number, operands), content, owner })
            .collect()
    })
}

/// The command itself over several operands.
pub fn across_operands(tried: &'static Tried) -> impl Strategy<Value = Case> {
    let files = files(content(tried.operands), tried.operands);
    (words_of(tried), select(tried.behind.to_vec()), files, 1..4_usize, locale()).prop_map(
        |(words, behind, files, factor, locale)| Case {
            behind: behind.iter().map(|w| (*w).to_owned()).collect(),
            stages: vec![words],
            files,
            factor,
            locale,
        },
    )
}

/// `cat` of several files and the command behind it.
pub fn across_input(tried: &'static Tried) -> impl Strategy<Value = Case> {
    behind_cat(words_of(tried).prop_map(|words| vec![words]).boxed())
}

/// `cat` of several files, `sort`, and the command behind that.
pub fn behind_sort(tried: &'static Tried) -> impl Strategy<Value = Case> {
    let sort = TRIED.iter().find(|t| t.name == "sort").unwrap();
    behind_cat(
        (words_of(sort), words_of(tried)).prop_map(|(sort, words)| vec![sort, words]).boxed(),
    )
}

/// Up to four stages behind `cat`.
pub fn pipelines() -> impl Strategy<Value = Case> {
    let names = ["grep", "cut", "tr", "sort", "uniq", "tail", "wc", "fold", "sed", "awk"];
    let stage = select(names.to_vec())
        .prop_flat_map(|name| words_of(TRIED.iter().find(|t| t.name == name).unwrap()));
    behind_cat(vec(stage, 2..5).boxed())
}

fn behind_cat(stages: BoxedStrategy<Vec<Vec<String>>>) -> impl Strategy<Value = Case> {
    stages.prop_flat_map(|stages| {
        let kinds = if stages.iter().any(|words| decides_by_all_bytes(words)) {
            PLAIN_LINES
        } else {
            LINES.len()
        };
        let content = prop_oneof![
            12 => ended_text(kinds).prop_map(Content::Bytes),
            1 => text(kinds).prop_map(Content::Bytes),
        ];
        (Just(stages), files(content, Operands::Text), 1..3_usize, locale()).prop_map(
            |(mut stages, files, factor, locale)| {
                stages.insert(0, vec!["cat".to_owned()]);
                Case { stages, files, behind: Vec::new(), factor, locale }
            },
        )
    })
}

/// The one exception that docs/annotations.md names: grep stops printing lines once it has seen
/// bytes that are no text, which parts see each for themselves.
fn decides_by_all_bytes(words: &[String]) -> bool {
    let greps = ["grep", "egrep", "fgrep"].contains(&words[0].as_str());
    greps && !words.iter().any(|w| ["-a", "-c", "--binary-files=text"].contains(&w.as_str()))
}
