//! Files of a random program: fixed names, random contents.

use std::ffi::OsStr;
use std::fs;
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use crate::generate::Numbers;

/// Files that programs name, simple names first. Bytes, since one is not UTF-8.
pub const NAMES: &[&[u8]] = &[
    b"a",
    b"b",
    b"c.txt",
    b"two words",
    b"new\nline",
    b"-dash",
    b".hidden",
    "\u{fc}ber".as_bytes(),
    b"\xff\xfe",
];
/// Number of files that a glob matches.
pub const PARTS: usize = 3;
/// Number of compressed files, `z0.gz` and so on.
pub const COMPRESSED: usize = 2;
/// Words of texts: few, so that searches find matches.
const WORDS: &[&str] = &["needle", "hay", "foo", "Banana", "apple", "10", "9", "x.y", "straw", "a"];
/// Words that are not ASCII: a command that cuts lines at bytes makes them invalid.
const FOREIGN: &[&str] = &["na\u{ef}ve", "\u{17c}aba", "needle", "\u{65e5}\u{672c}"];
/// Separators of words.
const BETWEEN: &[&str] = &[" ", " ", ",", "\t", "  "];

/// Kind of a file's content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ContentKind {
    /// Words, a few in each line.
    Words,
    /// Words, sorted by line.
    Sorted,
    /// Numbers, one in each line.
    Numbers,
    /// Few and long lines.
    Long,
    /// Lines that end in CR LF.
    Returns,
    /// Words that are not ASCII.
    Foreign,
    /// Text with bytes that are not UTF-8.
    Invalid,
    /// All bytes.
    Binary,
}

/// A file's content.
#[derive(Debug, Clone)]
pub struct Content {
    /// See [`ContentKind`].
    pub kind: ContentKind,
    /// Lines; about 12 bytes each.
    pub lines: usize,
    /// Seed of the random content.
    pub seed: u64,
    /// The last line ends in a newline.
    pub ended: bool,
}

/// All files of a program.
#[derive(Debug, Clone)]
pub struct Files {
    /// Those of [`NAMES`].
    pub named: Vec<Content>,
    /// Files that a glob matches.
    pub parts: Vec<Content>,
    /// The compressed ones.
    pub compressed: Vec<Content>,
    /// The one on the workstation.
    pub local: Content,
}

impl Content {
    /// Its bytes.
    pub fn bytes(&self) -> Vec<u8> {
        let mut numbers = Numbers::seeded(self.seed + 1);
        let mut lines: Vec<Vec<u8>> = (0..self.lines).map(|_| self.line(&mut numbers)).collect();
        if self.kind == ContentKind::Sorted {
            lines.sort();
        }
        let mut bytes = Vec::new();
        for line in lines {
            bytes.extend_from_slice(&line);
            bytes.extend_from_slice(if self.kind == ContentKind::Returns {
                b"\r\n"
            } else {
                b"\n"
            });
        }
        if !self.ended {
            bytes.pop();
        }
        bytes
    }

    fn line(&self, numbers: &mut Numbers) -> Vec<u8> {
        match self.kind {
            ContentKind::Numbers => numbers.below(1_000).to_string().into_bytes(),
            ContentKind::Binary => {
                (0..numbers.below(24)).map(|_| numbers.below(256) as u8).collect()
            }
            ContentKind::Long => words(numbers, WORDS, 60),
            ContentKind::Invalid if numbers.below(4) == 0 => {
                [b"\xff\xc3 ", words(numbers, WORDS, 2).as_slice()].concat()
            }
            kind => {
                let count = numbers.below(4);
                words(numbers, if kind == ContentKind::Foreign { FOREIGN } else { WORDS }, count)
            }
        }
    }

    /// Returns true if every command takes the file, and every piece of it, for text.
    pub fn is_text(&self) -> bool {
        !matches!(self.kind, ContentKind::Binary | ContentKind::Invalid | ContentKind::Foreign)
    }
}

fn words(numbers: &mut Numbers, from: &[&str], count: u64) -> Vec<u8> {
    let mut line = Vec::new();
    for word in 0..count {
        if word > 0 {
            line.extend_from_slice(
                BETWEEN[numbers.below(BETWEEN.len() as u64) as usize].as_bytes(),
            );
        }
        line.extend_from_slice(from[numbers.below(from.len() as u64) as usize].as_bytes());
    }
    line
}

impl Files {
    /// Returns true if all files are text for every command.
    pub fn are_text(&self) -> bool {
        let all = self.named.iter().chain(&self.parts).chain(&self.compressed).chain([&self.local]);
        all.into_iter().all(Content::is_text)
    }

    /// Makes the contents of all.
    pub fn made(&self) -> io::Result<Made> {
        let mut files: Vec<(PathBuf, Vec<u8>)> = Vec::new();
        for (name, content) in NAMES.iter().zip(&self.named) {
            files.push((OsStr::from_bytes(name).into(), content.bytes()));
        }
        let in_tree = ["tree/one.t", "tree/deep/two.t", "tree/deep/er/a b"];
        files.extend(
            (0..in_tree.len())
                .map(|index| (in_tree[index].into(), files[index].1.clone()))
                .collect::<Vec<_>>(),
        );
        for (number, content) in self.parts.iter().enumerate() {
            files.push((format!("part-{number}").into(), content.bytes()));
        }
        for (number, content) in self.compressed.iter().enumerate() {
            files.push((format!("z{number}.gz").into(), compressed(&content.bytes())?));
        }
        files.push(("list".into(), b"a\nb\nc.txt\n".into()));
        files.push(("patterns".into(), b"needle\nBanana\n".into()));
        files.push(("tree/deep/empty.t".into(), Vec::new()));
        Ok(Made { on_mount: files, local: self.local.bytes() })
    }
}

/// Contents of the files of a program.
#[derive(Debug)]
pub struct Made {
    /// By their names in the program's directory.
    on_mount: Vec<(PathBuf, Vec<u8>)>,
    /// Of the file `local` on the workstation.
    local: Vec<u8>,
}

impl Made {
    /// Writes the files into two new directories, on the mount and on the workstation.
    pub fn fill(&self, on_mount: &Path, here: &Path) -> io::Result<()> {
        fs::create_dir_all(on_mount.join("tree/deep/er"))?;
        fs::create_dir(here)?;
        for (name, bytes) in &self.on_mount {
            fs::write(on_mount.join(name), bytes)?;
        }
        fs::write(here.join("local"), &self.local)?;
        std::os::unix::fs::symlink("../one.t", on_mount.join("tree/deep/link"))?;
        std::os::unix::fs::symlink("a", on_mount.join("link"))
    }
}

/// Compresses with the machine's gzip.
fn compressed(bytes: &[u8]) -> io::Result<Vec<u8>> {
    use std::process::{Command, Stdio};
    let mut child =
        Command::new("gzip").arg("-nc").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
    let mut stdin = child.stdin.take().expect("stdin is a pipe");
    let bytes = bytes.to_owned();
    // The compressed data may exceed the pipe's capacity before it is read.
    let writer = std::thread::spawn(move || stdin.write_all(&bytes));
    let output = child.wait_with_output()?;
    writer.join().expect("writing to a pipe does not panic")?;
    Ok(output.stdout)
}
