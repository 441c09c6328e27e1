//! Standard error of ssh, and of the executor through it: always read, so that the writer never
//! blocks; the last lines are kept for an error message.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, PoisonError},
};

use tokio::{
    io::{AsyncRead, AsyncReadExt as _},
    task::JoinHandle,
    time::timeout,
};

use super::LAST_WORDS;

/// Number of lines kept: ssh explains a refusal in up to three.
const KEPT_LINES: usize = 3;
/// Limit for each line; the rest is dropped.
const KEPT_LINE_BYTES: usize = 300;
/// Size of the read buffer.
const PIECE_BYTES: usize = 4096;

/// Reader of one standard error.
#[derive(Debug)]
pub(super) struct Said {
    lines: Arc<Mutex<Lines>>,
    reader: JoinHandle<()>,
}

#[derive(Debug, Default)]
struct Lines {
    whole: VecDeque<Vec<u8>>,
    /// The incomplete last line.
    begun: Vec<u8>,
}

impl Said {
    /// Spawns a task that reads to the end.
    pub(super) fn listen(mut input: impl AsyncRead + Unpin + Send + 'static) -> Self {
        let lines = Arc::new(Mutex::new(Lines::default()));
        let kept = Arc::clone(&lines);
        let reader = tokio::spawn(async move {
            let mut piece = [0; PIECE_BYTES];
            while let Ok(read @ 1..) = input.read(&mut piece).await {
                kept.lock().unwrap_or_else(PoisonError::into_inner).add(&piece[..read]);
            }
        });
        Self { lines, reader }
    }

    /// Returns the last lines after `prefix`, or an empty string if there are none. Waits only
    /// [`LAST_WORDS`] for the end: a process that ssh has left behind may hold the pipe open.
    pub(super) async fn after(&mut self, prefix: &str) -> String {
        let _ = timeout(LAST_WORDS, &mut self.reader).await;
        let text = self.lines.lock().unwrap_or_else(PoisonError::into_inner).text();
        // ssh's own messages begin with its name.
        let text = text.strip_prefix("ssh: ").unwrap_or(&text);
        if text.is_empty() { String::new() } else { format!("{prefix}{text}") }
    }
}

impl Drop for Said {
    fn drop(&mut self) {
        self.reader.abort();
    }
}

impl Lines {
    fn add(&mut self, bytes: &[u8]) {
        for part in bytes.split_inclusive(|byte| *byte == b'\n') {
            let room = KEPT_LINE_BYTES.saturating_sub(self.begun.len()).min(part.len());
            self.begun.extend_from_slice(&part[..room]);
            if part.ends_with(b"\n") {
                self.keep();
            }
        }
    }

    fn keep(&mut self) {
        let line = std::mem::take(&mut self.begun).trim_ascii().to_vec();
        if line.is_empty() {
            return;
        }
        self.whole.push_back(line);
        while self.whole.len() > KEPT_LINES {
            self.whole.pop_front();
        }
    }

    /// Joins the lines into one, without the full stop at the end.
    fn text(&mut self) -> String {
        self.keep();
        let lines: Vec<_> = self.whole.iter().map(|line| String::from_utf8_lossy(line)).collect();
        lines.join("; ").trim_end_matches('.').to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_lines_are_kept_however_they_come() {
        let mut lines = Lines::default();
        for piece in ["one\r\ntw", "o\n\n  three\nfo", "ur", "\nfive. (half"] {
            lines.add(piece.as_bytes());
        }
        assert_eq!(lines.text(), "three; four; five. (half");
        let mut long = Lines::default();
        long.add(&[b'x'; 10_000]);
        long.add(b"y\nend.\r\n");
        assert_eq!(long.text(), format!("{}; end", "x".repeat(KEPT_LINE_BYTES)));
    }
}
