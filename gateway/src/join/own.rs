//! posh's own aggregators: each reads the parts' outputs in order, line by line, and writes the
//! output of a single process. Pure: bytes in, bytes out.

use std::{collections::VecDeque, io::Write as _};

/// Limit on a buffered line: the command itself would buffer all of it, but in another process.
const LINE_BYTES: usize = 64 << 20;
/// Like `LINE_BYTES`, but for lines of counts and the name of an operand, which has at most 128 KiB
/// (`MAX_ARG_STRLEN`).
const COUNTS_BYTES: usize = 256 << 10;

/// The data is not the output of a part of the command, or has a line beyond the limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("what a server sent is no part of the output, or has a line of more than 64 MiB")]
pub struct NoPart;

/// A running aggregator.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OwnAggregator {
    kind: Aggregation,
    /// Beginning of an incomplete line.
    open: Vec<u8>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Aggregation {
    Sum(Option<u64>),
    UniqCount(Option<(u64, Vec<u8>)>),
    WcTotal(WcTotal),
}

impl OwnAggregator {
    /// Each part is a number and a newline; the result is their sum, or nothing without parts.
    #[must_use]
    pub fn sum() -> Self {
        Self::new(Aggregation::Sum(None))
    }

    /// Each part is an output of `uniq -c`: counts are added where a part begins with the last line
    /// of the part before.
    #[must_use]
    pub fn uniq_count() -> Self {
        Self::new(Aggregation::UniqCount(None))
    }

    /// Each part is an output of `wc` with options `letters` (`lwmcL`) and so many operands. Parts
    /// with operands also count bytes, which determine the width of the columns.
    #[must_use]
    pub fn wc_total(letters: &str, operands: Vec<usize>) -> Self {
        Self::new(Aggregation::WcTotal(WcTotal::new(letters, operands)))
    }

    fn new(kind: Aggregation) -> Self {
        Self { kind, open: Vec::new() }
    }

    /// Adds bytes; returns output that is complete.
    ///
    /// # Errors
    /// [`NoPart`]
    pub fn push(&mut self, bytes: &[u8]) -> Result<Vec<u8>, NoPart> {
        let longest =
            if matches!(self.kind, Aggregation::UniqCount(_)) { LINE_BYTES } else { COUNTS_BYTES };
        let mut out = Vec::new();
        for line in whole_lines(&mut self.open, bytes, longest)? {
            self.kind.line(&line, &mut out)?;
        }
        Ok(out)
    }

    /// Returns the remaining output after the last part.
    pub fn finish(&mut self) -> Vec<u8> {
        match &mut self.kind {
            Aggregation::Sum(sum) => {
                sum.map(|sum| format!("{sum}\n").into_bytes()).unwrap_or_default()
            }
            Aggregation::UniqCount(held) => {
                let mut out = Vec::new();
                if let Some((count, line)) = held.take() {
                    write_count(count, &line, &mut out);
                }
                out
            }
            Aggregation::WcTotal(wc) => wc.finish(),
        }
    }
}

impl Aggregation {
    /// Handles one line of a part, without its newline.
    fn line(&mut self, line: &[u8], out: &mut Vec<u8>) -> Result<(), NoPart> {
        match self {
            Self::Sum(sum) => {
                if let Some((number, _)) = number(line) {
                    *sum = Some(sum.unwrap_or(0).saturating_add(number));
                }
            }
            Self::UniqCount(held) => {
                if let Some((count, line)) = counted(line) {
                    add(held, count, line, out);
                }
            }
            Self::WcTotal(wc) => return wc.line(line),
        }
        Ok(())
    }
}

/// Adds a line's count to that of equal lines before it, or writes the held line.
fn add(held: &mut Option<(u64, Vec<u8>)>, count: u64, line: &[u8], out: &mut Vec<u8>) {
    match held {
        Some((sum, same)) if same == line => *sum = sum.saturating_add(count),
        _ => {
            if let Some((sum, other)) = held.replace((count, line.to_vec())) {
                write_count(sum, &other, out);
            }
        }
    }
}

/// Counts of sorted parts while a command merges their lines without counts. The merge keeps the
/// order of each part's lines, and of equal lines puts the first part's first.
#[derive(Debug)]
pub struct Recount {
    /// Per part: lines fed to the merge that have not come out yet.
    waiting: Vec<VecDeque<(u64, Vec<u8>)>>,
    /// Per part: beginning of an incomplete line.
    open: Vec<Vec<u8>>,
    merged: Vec<u8>,
    held: Option<(u64, Vec<u8>)>,
}

impl Recount {
    /// Makes the state for so many parts.
    #[must_use]
    pub fn new(parts: usize) -> Self {
        Self {
            waiting: vec![VecDeque::new(); parts],
            open: vec![Vec::new(); parts],
            merged: Vec::new(),
            held: None,
        }
    }

    /// Adds a part's bytes; returns its lines for the merge.
    ///
    /// # Errors
    /// [`NoPart`]
    pub fn part(&mut self, part: usize, bytes: &[u8]) -> Result<Vec<u8>, NoPart> {
        let mut lines = Vec::new();
        for line in whole_lines(&mut self.open[part], bytes, LINE_BYTES)? {
            if let Some((count, line)) = counted(&line) {
                self.waiting[part].push_back((count, line.to_vec()));
                lines.extend_from_slice(line);
                lines.push(b'\n');
            }
        }
        Ok(lines)
    }

    /// Adds output of the merge; returns output that is complete.
    ///
    /// # Errors
    /// [`NoPart`]
    pub fn merged(&mut self, bytes: &[u8]) -> Result<Vec<u8>, NoPart> {
        let mut out = Vec::new();
        for line in whole_lines(&mut self.merged, bytes, LINE_BYTES)? {
            let is_next = |waiting: &&mut VecDeque<(u64, Vec<u8>)>| {
                waiting.front().is_some_and(|(_, l)| *l == line)
            };
            let count = self
                .waiting
                .iter_mut()
                .find(is_next)
                .and_then(VecDeque::pop_front)
                .map_or(0, |(count, _)| count);
            add(&mut self.held, count, &line, &mut out);
        }
        Ok(out)
    }

    /// Returns the remaining output after the merge.
    pub fn finish(&mut self) -> Vec<u8> {
        let mut out = Vec::new();
        if let Some((count, line)) = self.held.take() {
            write_count(count, &line, &mut out);
        }
        out
    }
}

/// Lines that `bytes` complete, without their newlines; the rest stays in `open`.
fn whole_lines(
    open: &mut Vec<u8>,
    mut bytes: &[u8],
    longest: usize,
) -> Result<Vec<Vec<u8>>, NoPart> {
    let mut lines = Vec::new();
    while let Some(end) = bytes.iter().position(|b| *b == b'\n') {
        open.extend_from_slice(&bytes[..end]);
        bytes = &bytes[end + 1..];
        lines.push(std::mem::take(open));
    }
    open.extend_from_slice(bytes);
    if open.len() > longest { Err(NoPart) } else { Ok(lines) }
}

/// Parses a number after optional blanks; returns the rest too.
fn number(text: &[u8]) -> Option<(u64, &[u8])> {
    let text = text.trim_ascii_start();
    let digits = text.iter().take_while(|b| b.is_ascii_digit()).count();
    let number = std::str::from_utf8(&text[..digits]).ok()?.parse().ok()?;
    Some((number, &text[digits..]))
}

/// Parses a line of `uniq -c`: its count, and the line itself.
fn counted(line: &[u8]) -> Option<(u64, &[u8])> {
    let (count, rest) = number(line)?;
    Some((count, rest.strip_prefix(b" ")?))
}

/// In GNU uniq's format.
fn write_count(count: u64, line: &[u8], out: &mut Vec<u8>) {
    write!(out, "{count:>7} ").expect("memory can be written to");
    out.extend_from_slice(line);
    out.push(b'\n');
}

/// Columns of wc in its order; the default is lines, words and bytes.
const COLUMNS: [char; 5] = ['l', 'w', 'm', 'c', 'L'];
/// Width of columns for input that is not a regular file.
const PIPE_WIDTH: usize = 7;

#[derive(Debug, Clone, PartialEq, Eq)]
struct WcTotal {
    /// Columns in the parts' outputs, as indices of [`COLUMNS`].
    present: Vec<usize>,
    /// Columns in the result.
    shown: Vec<usize>,
    /// Operand counts of unread parts, the next one last.
    operands: Vec<usize>,
    /// Remaining lines of the current part, including its total.
    left: usize,
    files: Vec<([u64; 5], Vec<u8>)>,
}

impl WcTotal {
    fn new(letters: &str, mut operands: Vec<usize>) -> Self {
        let asked: Vec<usize> =
            (0..COLUMNS.len()).filter(|i| letters.contains(COLUMNS[*i])).collect();
        let shown = if asked.is_empty() { vec![0, 1, 3] } else { asked };
        let named = operands.iter().any(|n| *n > 0);
        let present = (0..COLUMNS.len())
            .filter(|i| shown.contains(i) || (named && COLUMNS[*i] == 'c'))
            .collect();
        operands.reverse();
        Self { present, shown, operands, left: 0, files: Vec::new() }
    }

    fn line(&mut self, line: &[u8]) -> Result<(), NoPart> {
        if self.left == 0 {
            let count = self.operands.pop().ok_or(NoPart)?;
            self.left = if count > 1 { count + 1 } else { 1 };
        } else if self.left == 1 {
            // The part's own total.
            self.left = 0;
            return Ok(());
        }
        let mut counts = [0; 5];
        let mut rest = line;
        for column in &self.present {
            let Some((count, after)) = number(rest) else { return Ok(()) };
            (counts[*column], rest) = (count, after);
        }
        self.files.push((counts, rest.to_vec()));
        self.left -= 1;
        Ok(())
    }

    fn finish(&mut self) -> Vec<u8> {
        let mut total = [0_u64; 5];
        for (counts, _) in &self.files {
            for (index, count) in counts.iter().enumerate() {
                let sum = total[index].saturating_add(*count);
                total[index] = if COLUMNS[index] == 'L' { total[index].max(*count) } else { sum };
            }
        }
        let mut out = Vec::new();
        let named = self.files.iter().any(|(_, name)| !name.is_empty());
        let width = match self.shown.len() {
            _ if named => total[3].to_string().len(),
            1 => 1,
            _ => PIPE_WIDTH,
        };
        if named {
            self.files.iter().for_each(|(counts, name)| self.write(counts, width, name, &mut out));
            self.write(&total, width, b" total", &mut out);
        } else if !self.files.is_empty() {
            self.write(&total, width, b"", &mut out);
        }
        out
    }

    fn write(&self, counts: &[u64; 5], width: usize, name: &[u8], out: &mut Vec<u8>) {
        for (position, column) in self.shown.iter().enumerate() {
            let space = if position > 0 { " " } else { "" };
            write!(out, "{space}{:>width$}", counts[*column]).expect("memory can be written to");
        }
        out.extend_from_slice(name);
        out.push(b'\n');
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn joined(mut own: OwnAggregator, parts: &[&str]) -> String {
        // In odd pieces, since pipes give what they like.
        let text = parts.concat();
        let mut out: Vec<u8> =
            text.as_bytes().chunks(3).flat_map(|piece| own.push(piece).unwrap()).collect();
        out.extend(own.finish());
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn numbers_are_added() {
        assert_eq!(
            joined(OwnAggregator::sum(), &["3\n", "0\n", "18446744073709551000\n"]),
            "18446744073709551003\n"
        );
        assert_eq!(joined(OwnAggregator::sum(), &[]), "");
    }

    #[test]
    fn equal_lines_at_a_seam_are_one() {
        let parts = ["      2 a\n      1  b\n", "      5  b\n12345678 c\n", "      1 c\n"];
        assert_eq!(
            joined(OwnAggregator::uniq_count(), &parts),
            "      2 a\n      6  b\n12345679 c\n"
        );
    }

    #[test]
    fn counts_find_their_lines_after_a_merge() {
        let mut recount = Recount::new(2);
        assert_eq!(recount.part(0, b"      2 a\n      1 c\n").unwrap(), b"a\nc\n");
        assert_eq!(recount.part(1, b"      3 a\n      4").unwrap(), b"a\n");
        assert_eq!(recount.part(1, b" b\n").unwrap(), b"b\n");
        let out = [
            recount.merged(b"a\na\nb").unwrap(),
            recount.merged(b"\nc\n").unwrap(),
            recount.finish(),
        ]
        .concat();
        assert_eq!(String::from_utf8(out).unwrap(), "      5 a\n      4 b\n      1 c\n");
    }

    #[test]
    fn lines_without_an_end_and_lines_beyond_the_operands_are_not_kept() {
        let piece = vec![b'1'; COUNTS_BYTES];
        for (mut own, longest) in [
            (OwnAggregator::sum(), 1),
            (OwnAggregator::wc_total("l", vec![0]), 1),
            (OwnAggregator::uniq_count(), 256),
        ] {
            assert!((0..longest).all(|_| own.push(&piece) == Ok(Vec::new())));
            assert_eq!(own.push(&piece), Err(NoPart));
        }
        let mut own = OwnAggregator::wc_total("l", vec![1, 0]);
        assert_eq!(own.push(b"1 9 a\n2 8\n"), Ok(Vec::new()));
        assert_eq!(own.push(b"3 7\n"), Err(NoPart));
    }

    #[test]
    fn columns_are_as_wide_as_all_files_need() {
        let parts = [" 1  9 a\n", "  2  90 b\n  3 901  c\n  5 991 total\n"];
        assert_eq!(
            joined(OwnAggregator::wc_total("l", vec![1, 2]), &parts),
            "   1 a\n   2 b\n   3  c\n   6 total\n"
        );
        assert_eq!(
            joined(OwnAggregator::wc_total("", vec![0, 0]), &["1 2 3\n", "4 5 6\n"]),
            "      5       7       9\n"
        );
        assert_eq!(joined(OwnAggregator::wc_total("L", vec![0, 0]), &["12\n", "4\n"]), "12\n");
    }
}
