//! Log output. Servers, confined processes and whoever names a file can cause events, in any number
//! and with any text.
//!
//! Invariants:
//! * An event is one line, of at most 4 KiB: control characters, which could affect a
//!   terminal or fake a line, are escaped.
//! * Each kind of event has a bounded number of lines a minute ([`Limit`]), so no kind displaces
//!   the others.
//! * The file has a bounded size while the gateway runs, and one predecessor ([`LogFile`]).

mod file;
mod limit;

use std::io::{self, Write};

use posh_proto::untrusted::escaped;

pub use self::{file::LogFile, limit::Limit};

/// Limit of a line: a name and a server's message fit.
const LINE_BYTES: usize = 4 << 10;

/// Expects one event per write, as from tracing-subscriber.
#[derive(Debug)]
pub struct Log<W>(pub W);

impl<W: Write> Write for Log<W> {
    fn write(&mut self, event: &[u8]) -> io::Result<usize> {
        let text = String::from_utf8_lossy(event.strip_suffix(b"\n").unwrap_or(event));
        let line = escaped(&text);
        let shown = match line.char_indices().find(|(at, _)| *at >= LINE_BYTES) {
            Some((end, _)) => format!("{}...\n", &line[..end]),
            None => format!("{line}\n"),
        };
        self.0.write_all(shown.as_bytes())?;
        Ok(event.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(event: &[u8]) -> String {
        let mut log = Vec::new();
        Log(&mut log).write_all(event).unwrap();
        String::from_utf8(log).unwrap()
    }

    #[test]
    fn what_others_have_named_forges_no_line_of_the_log() {
        assert_eq!(
            line(b"INFO path=/mnt/x\nFORGED\x1b[2J\xff\n"),
            "INFO path=/mnt/x\\nFORGED\\u{1b}[2J\u{fffd}\n"
        );
    }

    #[test]
    fn a_long_message_is_cut() {
        let long = line("\u{e9}\n".repeat(LINE_BYTES).as_bytes());
        assert!((LINE_BYTES..LINE_BYTES + 10).contains(&long.len()), "{}", long.len());
        assert!(long.ends_with("...\n") && long.lines().count() == 1);
    }
}
