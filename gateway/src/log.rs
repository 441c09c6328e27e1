//! Log output. An event is one line, whatever names and words of others it contains: control
//! characters, which could affect a terminal or fake a line, are escaped.

use std::io::{self, Write};

use posh_proto::untrusted::escaped;

/// Expects one event per write, as from tracing-subscriber.
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
