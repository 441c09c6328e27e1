//! `posh-executor audit verify`: checks that the record is unaltered.

use std::{
    fmt::Write as _,
    fs::File,
    io::{self, BufRead as _, BufReader},
    path::{Path, PathBuf},
};

use super::{
    START,
    chain::{ChainLine, Head, NO_HASH, hash, parse},
};

/// Result of a verification, for its user.
#[derive(Debug, Default)]
pub struct ChainVerdict {
    /// Lines to print.
    pub text: String,
    /// Nothing is broken.
    pub is_whole: bool,
}

/// Verifies the files of one record, oldest first; the last is the one that is written now.
///
/// # Errors
/// When one can't be read.
pub fn verify(files: &[PathBuf]) -> io::Result<ChainVerdict> {
    let mut reader = ChainReader { is_whole: true, ..ChainReader::default() };
    for file in files {
        reader.file(file)?;
    }
    if let Some(file) = files.last() {
        reader.end(file)?;
    }
    Ok(ChainVerdict { text: reader.text, is_whole: reader.is_whole })
}

#[derive(Default)]
struct ChainReader {
    /// The line before, if there is one.
    last: Option<Head>,
    /// A line that is no record: valid only if the next start reports it as torn.
    torn: Option<(String, String)>,
    text: String,
    is_whole: bool,
}

impl ChainReader {
    fn broken(&mut self, place: &str, what: &str) {
        self.is_whole = false;
        let _ = writeln!(self.text, "{place}: {what}");
    }

    fn file(&mut self, path: &Path) -> io::Result<()> {
        let (mut count, mut number) = (0_usize, 0_usize);
        let broken_before = self.text.len();
        for line in BufReader::new(File::open(path)?).split(b'\n') {
            let line = line?;
            number += 1;
            let place = format!("{}:{number}", path.display());
            match parse(&line) {
                Some(record) => {
                    count += 1;
                    self.record(&place, record, hash(&line));
                }
                None => {
                    self.close_torn();
                    self.torn = Some((place, hash(&line)));
                }
            }
        }
        let state = if self.text.len() == broken_before { "whole" } else { "broken" };
        let _ = writeln!(self.text, "{}: {count} records, {state}", path.display());
        Ok(())
    }

    fn record(
        &mut self,
        place: &str,
        ChainLine { seq, prev, event, record, .. }: ChainLine,
        sha256: String,
    ) {
        let is_start_after_torn =
            event == START && record.get("torn").is_some_and(|torn| torn == true);
        if let Some((torn_at, torn)) = self.torn.take() {
            if is_start_after_torn && prev == torn {
                let _ = writeln!(
                    self.text,
                    "{torn_at}: cut off when the executor was killed; the next start says so"
                );
                self.in_order(place, seq);
            } else {
                self.broken(&torn_at, "this line is no record: it was changed or put in");
            }
        } else {
            match self.last.clone() {
                Some(last) => {
                    if prev != last.sha256 {
                        self.broken(
                            place,
                            "the line before it is not the one that was written before this record",
                        );
                    }
                    self.in_order(place, seq);
                }
                None if seq == 1 && prev != NO_HASH => {
                    self.broken(place, "the first record names one before it")
                }
                None if seq != 1 => {
                    let _ = writeln!(
                        self.text,
                        "{place}: the record begins with number {seq}; older files were not given"
                    );
                }
                None => {}
            }
        }
        self.last = Some(Head { seq, sha256 });
    }

    fn in_order(&mut self, place: &str, seq: u64) {
        let Some(last) = self.last.as_ref().map(|last| last.seq) else { return };
        if seq > last + 1 {
            self.broken(
                place,
                &format!("records {} to {} are missing before it", last + 1, seq - 1),
            );
        } else if seq <= last {
            self.broken(place, &format!("record {seq} stands behind record {last}"));
        }
    }

    fn close_torn(&mut self) {
        if let Some((place, _)) = self.torn.take() {
            self.broken(&place, "this line is no record: it was changed or put in");
        }
    }

    /// Compares the end with the head file beside the last file.
    fn end(&mut self, path: &Path) -> io::Result<()> {
        let place = path.display().to_string();
        if let Some((torn, _)) = self.torn.take() {
            self.broken(
                &torn,
                "the last line is no record: cut off, and no start after it says so",
            );
        }
        let last = self.last.clone().unwrap_or(Head { seq: 0, sha256: NO_HASH.to_owned() });
        match Head::read(path)? {
            None => self.broken(
                &place,
                "the file beside it that names its end (.head) is missing or unreadable",
            ),
            Some(head) if head.seq > last.seq => {
                self.broken(
                    &place,
                    &format!("records {} to {} are missing at its end", last.seq + 1, head.seq),
                );
            }
            Some(head) if head.seq == last.seq && head.sha256 != last.sha256 => {
                self.broken(&place, "its last line is not the one that was written");
            }
            // An executor that is killed between the two writes leaves one record more.
            Some(head) if head.seq + 1 < last.seq => {
                self.broken(
                    &place,
                    &format!("its end was written as record {}, and there are more", head.seq),
                );
            }
            Some(_) => {}
        }
        Ok(())
    }
}
