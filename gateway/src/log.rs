//! The log's way out. An event is one line, whatever names and words of others it holds: what they
//! could do to a terminal that shows the log, or to a line of it, is spelled out.

use std::io::{self, Write};

use posh_proto::untrusted::escaped;

/// Takes one event with each write, as tracing-subscriber gives them.
#[derive(Debug)]
pub struct Log<W>(pub W);

impl<W: Write> Write for Log<W> {
    fn write(&mut self, event: &[u8]) -> io::Result<usize> {
        let text = String::from_utf8_lossy(event.strip_suffix(b"\n").unwrap_or(event));
        self.0.write_all(format!("{}\n", escaped(&text)).as_bytes())?;
        Ok(event.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_others_have_named_forges_no_line_of_the_log() {
        let mut log = Vec::new();
        Log(&mut log).write_all(b"INFO path=/mnt/x\nFORGED\x1b[2J\xff\n").unwrap();
        assert_eq!(
            String::from_utf8(log).unwrap(),
            "INFO path=/mnt/x\\nFORGED\\u{1b}[2J\u{fffd}\n"
        );
    }
}
