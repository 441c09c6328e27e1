//! Bash as the oracle: runs a script under its own shell and under posh, with the same environment,
//! on the workstation of a laboratory, and compares the outcomes.

use std::fmt;
use std::io::Read;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::{Duration, Instant};

use clap::ValueEnum;
use serde::Deserialize;

use crate::error::{LabError, Result};
use crate::explain::ExplainReport;
use crate::host::Host;
use crate::people::as_number;
use crate::process::ChildProcess;

/// Time limit of a script on a busy machine.
pub const SCRIPT_LIMIT: Duration = Duration::from_secs(120);
/// Time limit for the end of its output after its own end: beyond it, a process was left behind.
const OUTPUT_LIMIT: Duration = Duration::from_secs(5);

/// The shells that posh can start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shell {
    /// bash, posh's default.
    Bash,
    /// dash.
    Dash,
    /// zsh.
    Zsh,
    /// fish.
    Fish,
}

impl Shell {
    /// The program's name.
    pub fn name(self) -> &'static str {
        match self {
            Shell::Bash => "bash",
            Shell::Dash => "dash",
            Shell::Zsh => "zsh",
            Shell::Fish => "fish",
        }
    }
}

/// Ways to run a script.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Under {
    /// The shell alone.
    Shell,
    /// posh with that shell.
    Posh,
    /// posh, and its report.
    PoshExplained,
}

/// Interception of the shell's commands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Door {
    /// The exec hook, posh's default.
    Hook,
    /// Shims at the front of PATH.
    Path,
}

impl Door {
    /// Both, for tests that hold for each.
    pub const ALL: [Door; 2] = [Door::Hook, Door::Path];

    /// The word that `--door` takes.
    pub fn name(self) -> &'static str {
        match self {
            Door::Hook => "hook",
            Door::Path => "path",
        }
    }
}

/// A script with its environment.
#[derive(Debug, Clone)]
pub struct Script {
    /// The shell that reads it.
    pub shell: Shell,
    /// Interception; `None`: posh's default.
    pub door: Option<Door>,
    /// Its text, given with `-c`.
    pub text: String,
    /// Working directory at the start.
    pub directory: Option<PathBuf>,
    /// Variables besides the host's own.
    pub variables: Vec<(String, String)>,
    /// Options of posh besides the shell and the report.
    pub options: Vec<String>,
    /// Uid that runs it, if not this program's own.
    pub account: Option<u32>,
    /// Time limit.
    pub limit: Duration,
}

impl Script {
    /// A script for bash that starts in the user's home.
    pub fn new(text: impl Into<String>) -> Script {
        Script {
            shell: Shell::Bash,
            door: None,
            text: text.into(),
            directory: None,
            variables: Vec::new(),
            options: Vec::new(),
            account: None,
            limit: SCRIPT_LIMIT,
        }
    }

    /// Sets the shell.
    pub fn shell(mut self, shell: Shell) -> Script {
        self.shell = shell;
        self
    }

    /// Sets the interception.
    pub fn door(mut self, door: Door) -> Script {
        self.door = Some(door);
        self
    }

    /// Sets the working directory.
    pub fn directory(mut self, directory: impl Into<PathBuf>) -> Script {
        self.directory = Some(directory.into());
        self
    }

    /// Adds a variable.
    pub fn variable(mut self, name: &str, value: impl Into<String>) -> Script {
        self.variables.push((name.into(), value.into()));
        self
    }

    /// The command that runs it on `host`.
    pub fn command(&self, host: &Host, under: Under) -> Command {
        let mut command = match under {
            Under::Shell => host.command(self.shell.name()),
            Under::Posh | Under::PoshExplained => host.command(host.programs().join("posh")),
        };
        if under == Under::PoshExplained {
            command.arg("--explain=json");
        }
        if under != Under::Shell {
            command.args(&self.options);
        }
        if under != Under::Shell && self.shell != Shell::Bash {
            command.args(["--shell", self.shell.name()]);
        }
        if let (Some(door), true) = (self.door, under != Under::Shell) {
            command.args(["--door", door.name()]);
        }
        command.arg("-c").arg(&self.text).envs(self.variables.iter().map(|(n, v)| (n, v)));
        if let Some(directory) = &self.directory {
            command.current_dir(directory);
        }
        match self.account {
            Some(number) => as_number(command, number),
            None => command,
        }
    }

    /// Runs it to its end.
    pub fn run(&self, host: &Host, under: Under) -> Result<RunOutcome> {
        let outcome = collect(host, self.command(host, under), &self.text, self.limit)?;
        if under != Under::PoshExplained {
            return Ok(outcome);
        }
        let (stderr, report) = ExplainReport::take(&outcome.stderr)?;
        Ok(RunOutcome { stderr, report: Some(report), ..outcome })
    }
}

/// Outcome of a run.
#[derive(Debug, Clone)]
pub struct RunOutcome {
    /// Its whole standard output.
    pub stdout: Vec<u8>,
    /// Its whole standard error, without posh's report.
    pub stderr: Vec<u8>,
    /// How the shell ended.
    pub status: ExitStatus,
    /// Report of placements, if requested.
    pub report: Option<ExplainReport>,
    /// Time from the start to the end of output.
    pub wall: Duration,
}

impl RunOutcome {
    /// Replaces `from` in both outputs: for runs in directories of their own.
    pub fn with(mut self, from: &str, to: &str) -> RunOutcome {
        self.stdout = replace(&self.stdout, from.as_bytes(), to.as_bytes());
        self.stderr = replace(&self.stderr, from.as_bytes(), to.as_bytes());
        self
    }

    /// The report of an explained run.
    pub fn report(&self) -> &ExplainReport {
        self.report.as_ref().expect("this run was explained")
    }
}

impl PartialEq for RunOutcome {
    /// Compares what a user can tell apart: both outputs and the status.
    fn eq(&self, other: &RunOutcome) -> bool {
        self.stdout == other.stdout && self.stderr == other.stderr && self.status == other.status
    }
}

impl fmt::Display for RunOutcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.status.signal() {
            Some(signal) => writeln!(f, "ended by signal {signal}")?,
            None => writeln!(f, "status {}", self.status.code().unwrap_or(-1))?,
        }
        writeln!(f, "stdout: {}", excerpt(&self.stdout))?;
        write!(f, "stderr: {}", excerpt(&self.stderr))
    }
}

/// The first 2,000 bytes: enough to see what went wrong.
fn excerpt(bytes: &[u8]) -> String {
    let shown = &bytes[..bytes.len().min(2_000)];
    format!("{} bytes {:?}", bytes.len(), String::from_utf8_lossy(shown))
}

pub(crate) fn replace(bytes: &[u8], from: &[u8], to: &[u8]) -> Vec<u8> {
    let mut result = Vec::with_capacity(bytes.len());
    let mut rest = bytes;
    // Copies whole runs: outputs have megabytes, and tests are not optimised.
    while let Some(at) = rest.iter().position(|b| *b == from[0]) {
        let (before, found) = rest.split_at(at);
        result.extend_from_slice(before);
        let is_it = found.starts_with(from);
        result.extend_from_slice(if is_it { to } else { &found[..1] });
        rest = &found[if is_it { from.len() } else { 1 }..];
    }
    result.extend_from_slice(rest);
    result
}

/// Runs a command in a process group of its own and collects its output.
pub fn collect(
    host: &Host,
    mut command: Command,
    what: &str,
    limit: Duration,
) -> Result<RunOutcome> {
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
    let start = Instant::now();
    let mut process = host.spawn(command)?;
    let stdout = drain(process.stdout.take().expect("stdout is a pipe"));
    let stderr = drain(process.stderr.take().expect("stderr is a pipe"));
    if !process.wait_at_most(limit)? {
        end_group(&process);
        return Err(late(format!("the end of {what:?}"), limit, &stderr));
    }
    let open = |name: &str| format!("the end of the {name} of {what:?} after its exit");
    let out = stdout
        .recv_timeout(OUTPUT_LIMIT)
        .map_err(|_| late(open("stdout"), OUTPUT_LIMIT, &stderr))?;
    let err = stderr
        .recv_timeout(OUTPUT_LIMIT)
        .map_err(|_| late(open("stderr"), OUTPUT_LIMIT, &stderr))?;
    let wall = start.elapsed();
    let status = process
        .wait()
        .map_err(|source| LabError::System { action: "wait for a script".into(), source })?;
    Ok(RunOutcome { stdout: out, stderr: err, status, report: None, wall })
}

fn drain(mut pipe: impl Read + Send + 'static) -> Receiver<Vec<u8>> {
    let (sender, receiver) = sync_channel(1);
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        // A read error counts as the end of output.
        let _ = pipe.read_to_end(&mut bytes);
        let _ = sender.send(bytes);
    });
    receiver
}

fn end_group(process: &ChildProcess) {
    if let Some(group) = i32::try_from(process.id()).ok().and_then(rustix::process::Pid::from_raw) {
        let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
    }
}

fn late(what: String, after: Duration, stderr: &Receiver<Vec<u8>>) -> LabError {
    let said = stderr.recv_timeout(Duration::from_secs(1)).unwrap_or_default();
    LabError::Timeout { what, after, detail: format!("stderr: {}", excerpt(&said)) }
}

/// Panics unless both outcomes look the same to a user.
pub fn assert_equal(what: &str, bash: &RunOutcome, posh: &RunOutcome) {
    assert!(
        bash == posh,
        "posh differs from the shell in\n{what}\n--- shell: {bash}\n--- posh: {posh}\n"
    );
}

/// Runs a script under its shell and under posh, which must look the same; returns posh's run with
/// its report. For scripts that change nothing.
pub fn assert_same(host: &Host, script: &Script) -> RunOutcome {
    let bash = script.run(host, Under::Shell).expect("the shell runs the script");
    let posh = script.run(host, Under::PoshExplained).expect("posh runs the script");
    assert_equal(&format!("{} -c {:?}", script.shell.name(), script.text), &bash, &posh);
    posh
}

#[cfg(test)]
mod tests {
    use super::replace;

    #[test]
    fn every_occurrence_is_replaced() {
        assert_eq!(replace(b"/run-bash/a /run-bash/b", b"run-bash", b"RUN"), b"/RUN/a /RUN/b");
    }
}
