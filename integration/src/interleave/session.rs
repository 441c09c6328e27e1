//! A shell that executes lines one by one and reports the end of each: a session of posh, or bash
//! alone.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{ChildStdin, Stdio};
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread::JoinHandle;

use crate::error::{AttemptExt, LabError, Result};
use crate::explain::ExplainReport;
use crate::host::Host;
use crate::oracle::{SCRIPT_LIMIT, Script, Under};
use crate::process::ChildProcess;

/// The shell's loop: of a line, only the exit status matters.
const LOOP: &str =
    "while IFS= read -r line; do eval \"$line\" </dev/null >/dev/null 2>&1; builtin echo $?; done";
/// At most one line is awaited at a time.
const ENDED_AT_ONCE: usize = 4;

/// A running shell. Dropping it ends it.
#[derive(Debug)]
pub struct RunningShell {
    under: Under,
    stdin: Option<ChildStdin>,
    ended: Receiver<i32>,
    said: Option<JoinHandle<Vec<u8>>>,
    process: ChildProcess,
    line: String,
}

impl RunningShell {
    pub fn start(host: &Host, under: Under, directory: &Path) -> Result<RunningShell> {
        let mut command = Script::new(LOOP).directory(directory).command(host, under);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut process = host.spawn(command)?;
        let stdout = process.stdout.take().expect("stdout is a pipe");
        let mut stderr = process.stderr.take().expect("stderr is a pipe");
        let (sender, ended) = sync_channel(ENDED_AT_ONCE);
        std::thread::spawn(move || {
            let statuses = BufReader::new(stdout).lines().map_while(|line| line.ok()?.parse().ok());
            statuses.map_while(|status| sender.send(status).ok()).for_each(drop);
        });
        let said = std::thread::spawn(move || {
            let mut said = Vec::new();
            // A read error counts as the end of output.
            let _ = stderr.read_to_end(&mut said);
            said
        });
        let stdin = process.stdin.take();
        Ok(RunningShell { under, stdin, ended, said: Some(said), process, line: String::new() })
    }

    /// Starts a line.
    pub fn begin(&mut self, line: &str) -> Result<()> {
        line.clone_into(&mut self.line);
        let stdin = self.stdin.as_mut().expect("it has not been ended");
        stdin
            .write_all(format!("{line}\n").as_bytes())
            .attempt(|| format!("give {line:?} to a shell"))
    }

    /// Waits for the line's exit status.
    pub fn status(&mut self) -> Result<i32> {
        self.ended.recv_timeout(SCRIPT_LIMIT).map_err(|gone| LabError::Timeout {
            what: format!("the end of {:?}", self.line),
            after: SCRIPT_LIMIT,
            detail: gone.to_string(),
        })
    }

    /// Ends the shell; returns posh's report, if requested.
    pub fn end(mut self) -> Result<Option<ExplainReport>> {
        drop(self.stdin.take());
        if !self.process.wait_at_most(SCRIPT_LIMIT)? {
            let what = "the end of a session".to_owned();
            return Err(LabError::Timeout { what, after: SCRIPT_LIMIT, detail: String::new() });
        }
        let said = self
            .said
            .take()
            .map(JoinHandle::join)
            .and_then(std::result::Result::ok)
            .unwrap_or_default();
        if self.under != Under::PoshExplained {
            return Ok(None);
        }
        ExplainReport::take(&said).map(|(_, report)| Some(report))
    }
}
