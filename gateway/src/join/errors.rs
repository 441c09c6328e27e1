//! Merged error output of a stage's parts. Messages of a command before it reads input (a wrong
//! pattern, a warning about its arguments) come from every part, and from an aggregator that is the
//! same command; they appear once.

use bytes::Bytes;

/// Error outputs of parts while their common start is unknown.
#[derive(Debug, Clone, Default)]
pub struct SharedStart {
    parts: Vec<(Vec<u8>, bool)>,
}

/// Limit on held output, after which a part no longer waits for the others: longer messages are
/// about data.
const HELD_BYTES: usize = 64 << 10;

impl SharedStart {
    /// Makes the state for so many parts.
    #[must_use]
    pub fn new(parts: usize) -> Self {
        Self { parts: vec![(Vec::new(), false); parts] }
    }

    /// Adds output of a part.
    pub fn push(&mut self, part: usize, data: &[u8]) {
        self.parts[part].0.extend_from_slice(data);
    }

    /// Ends a part.
    pub fn end(&mut self, part: usize) {
        self.parts[part].1 = true;
    }

    /// Returns, once known, the lines at the start of all parts, and each part's remaining output.
    #[must_use]
    pub fn decide(&self) -> Option<(Bytes, Vec<Bytes>)> {
        let shared = shared_lines(self.parts.iter().map(|(text, _)| text.as_slice()));
        // Further lines may be equal only while no part has a different one or has ended.
        let next = |text: &[u8]| text[shared..].iter().position(|b| *b == b'\n').is_some();
        let all_may_go_on = self.parts.iter().all(|(text, ended)| !ended || text.len() > shared);
        let lines =
            self.parts.iter().filter(|(text, ended)| next(text) || (*ended && text.len() > shared));
        let differ = lines.count() == self.parts.len();
        let held = self.parts.iter().any(|(text, _)| text.len() > HELD_BYTES);
        if all_may_go_on && !differ && !held {
            return None;
        }
        let start = Bytes::copy_from_slice(&self.parts.first()?.0[..shared]);
        Some((
            start,
            self.parts.iter().map(|(text, _)| Bytes::copy_from_slice(&text[shared..])).collect(),
        ))
    }
}

/// Length of the whole lines that all texts start with.
fn shared_lines<'a>(mut texts: impl Iterator<Item = &'a [u8]>) -> usize {
    let Some(first) = texts.next() else { return 0 };
    let same = |a: &[u8], b: &[u8]| a.iter().zip(b).take_while(|(a, b)| a == b).count();
    let length = texts.fold(first.len(), |length, text| length.min(same(first, text)));
    first[..length].iter().rposition(|b| *b == b'\n').map_or(0, |end| end + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decided(parts: &[(&str, bool)]) -> Option<(String, Vec<String>)> {
        let mut shared = SharedStart::new(parts.len());
        for (part, (text, ended)) in parts.iter().enumerate() {
            shared.push(part, text.as_bytes());
            if *ended {
                shared.end(part);
            }
        }
        let text = |bytes: &Bytes| String::from_utf8(bytes.to_vec()).unwrap();
        shared.decide().map(|(start, rests)| (text(&start), rests.iter().map(text).collect()))
    }

    #[test]
    fn what_all_say_first_is_said_once() {
        let check = |parts: &[(&str, bool)], start: &str, rests: &[&str]| {
            let rests = rests.iter().map(ToString::to_string).collect();
            assert_eq!(decided(parts), Some((start.to_owned(), rests)), "{parts:?}");
        };
        check(&[("bad\n", true), ("bad\n", true)], "bad\n", &["", ""]);
        check(&[("warn\na: no\n", true), ("warn\n", true)], "warn\n", &["a: no\n", ""]);
        check(
            &[("warn\na: no\n", false), ("warn\nb: no\n", false)],
            "warn\n",
            &["a: no\n", "b: no\n"],
        );
        check(&[("", true), ("bad\n", false)], "", &["", "bad\n"]);
        check(&[("a", true), ("a", true)], "", &["a", "a"]);
    }

    #[test]
    fn parts_wait_for_one_another() {
        assert_eq!(decided(&[("bad\n", true), ("", false)]), None);
        assert_eq!(decided(&[("warn\nx\n", false), ("warn\n", false)]), None);
        assert_eq!(decided(&[("", false), ("", false)]), None);
        let long = "x".repeat(HELD_BYTES + 1);
        assert!(decided(&[(&long, false), ("", false)]).is_some());
    }
}
